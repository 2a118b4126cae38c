"""What errors say of a name or a pattern that selects nothing."""

import difflib
import fnmatch
import itertools as it
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ._errors import shown, UnknownSowError
from ._globs import fits, is_glob
from ._names import in_a_list, Named, places_of


def across_slashes(pattern: str, names: Iterable[str]) -> str:
    """Says what to write instead of a pattern that fits nothing, but would fit some
    names if `*` did not stop at a slash."""
    there = dict.fromkeys(names)
    meant = set(filter(re.compile(fnmatch.translate(pattern)).match, there))
    if not (is_glob(pattern) and meant):
        return ""
    each = [_or_more(part) for part in pattern.split("/")[:_MOST_PARTS]]
    rest = pattern.split("/")[_MOST_PARTS:]
    longer = ["/".join((*parts, *rest)) for parts in it.product(*each)]
    fit = {p: {name for name in there if fits(p, name)} for p in longer}
    right = [p for p in longer if fit[p] == meant]
    right = right or [p for p in longer if fit[p] > meant]
    right = sorted(right, key=lambda p: (len(p), p))[:2]
    what = " or ".join(map(repr, right)) or "`**` for any number of parts"
    return f" `*` stops at a slash: write {what}."


_MOST_PARTS = 4


def _or_more(part: str) -> list[str]:
    """A part of a pattern, and what fits more parts than that."""
    if part == "*":
        return [part, "*/*", "**"]
    front, star, back = part.partition("*")
    if not star or part == "**":
        return [part]
    apart = ["/".join(filter(None, (front, x, back))) for x in ("*", "**")]
    ends = [x.join((f"{front}*", f"*{back}")) for x in ("/", "/**/")]
    return [part, *apart, f"**/{part}", f"{part}/**", *ends]


def no_such_iteration(pattern: str, found: Iterable[Named]) -> str:
    """Says which iterations or layers there are, if a pattern fits a name but for its
    indices."""
    is_index = lambda part: part.lstrip("-").isdecimal()
    without = lambda name: "/".join(x for x in name.split("/") if not is_index(x))
    plain = without(pattern)
    alike = [x for x in found if fits(plain, without(x.name))]
    if plain == pattern or not alike:
        return ""
    one, loops = alike[0], alike[0].loops
    if not loops and without(one.name) != one.name:
        numbers = lambda name: [int(x) for x in name.split("/") if is_index(x)]
        names = sorted((x.name for x in alike), key=numbers)
        return (
            " In a list, each has a name of its own, from "
            f"{names[0]!r} to {names[-1]!r}, the last one."
        )
    called = lambda indices: in_a_list(one.name, zip(places_of(one), indices))
    first, last = called([0] * len(loops)), called([n - 1 for n in loops])
    they = f"they are {first!r} to {last!r}"
    they = they if loops else "it is in no loop of known length"
    return f" There is no such iteration of {one.name!r}: {they}."


def check_known(
    call: str,
    option: Iterable[Any] | None,
    there: Iterable[str],
    problem: str = "selects no mark of this program",
    *,
    kind: str = "names",
    hint: Callable[[Any, Sequence[str]], str] = lambda pattern, close: "",
) -> None:
    """Raises if anything in `option` is not `there`. `hint` says more about it, given
    those names that are close to it."""
    known = dict.fromkeys(there)
    for pattern in option or ():
        if isinstance(pattern, str) and pattern in known:
            continue
        said = listed(pattern, known, kind, hint)
        raise UnknownSowError(f"`{call}`: {pattern!r} {problem}. {said}")


def listed(
    pattern: Any,
    there: Iterable[str],
    kind: str = "names",
    hint: Callable[[Any, Sequence[str]], str] = lambda pattern, close: "",
) -> str:
    """What a message about a pattern that selects nothing says of what there is."""
    there = list(map(str, there))
    close = difflib.get_close_matches(str(pattern), there, n=3)
    more = hint(pattern, close)
    if close and not more:
        more = f" Did you mean {' or '.join(map(repr, close))}?"
    return f"The {kind} there are: {shown(there)}.{more}"
