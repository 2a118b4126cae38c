"""Names, globs and predicates."""

import difflib
import fnmatch
import functools as ft
import itertools as it
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ._errors import UnknownSowError


def join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def matches(pattern: Any, name: str) -> bool:
    """Whether a name, a glob, a predicate or a sequence of them selects `name`."""
    if isinstance(pattern, str):
        return pattern == name or fnmatch.fnmatchcase(name, pattern)
    if isinstance(pattern, Sequence):
        return name in pattern or any(matches(p, name) for p in pattern)
    selects = pattern(name)
    try:
        return bool(selects)
    except Exception as e:  # of an array, NumPy's or JAX's
        raise TypeError(
            f"`names={pattern!r}` returned {selects!r} for {name!r}. Return `True` or "
            "`False`."
        ) from e


class Selected(NamedTuple):
    """What a pattern selects of a sow: all of it, under its own `name`; or, with an
    index in the pattern, one iteration of a loop, under the name with that index.

    `at` has an entry for each loop around the sow, from outside in: which iteration is
    meant, or `None` for all. `after` is `Label.after` for the loops of which all are
    meant, in the new name.
    """

    name: str
    at: tuple[int | None, ...] = ()
    after: tuple[int | None, ...] = ()


# Loops that have any iteration one may ask for.
ANY_LOOPS = (2**62,) * 8


def selected(
    pattern: Any,
    name: str,
    after: tuple[int | None, ...],
    loops: tuple[int, ...] = ANY_LOOPS,
) -> Selected | None:
    """What a pattern selects of a sow called `name` in `loops` of these lengths, from
    outside in. `after` is that of its `Label`. For `h` in a loop of 4 iterations,

        "h"     all of it
        "h/3"   iteration 3
        "h/-1"  the same
        "h/4"   nothing

    and for `blocks/attn` in a loop over layers, with an `after` of `(1,)`,
    `"blocks/2/attn"` is layer 2, and `"blocks/*/attn"` all of it.
    """
    if matches(pattern, name):
        return Selected(name, (), after)
    return (
        _with_index(pattern, name, after, loops) if isinstance(pattern, str) else None
    )


# In the place of an index. No glob but one with the same there fits it.
_INDEX = "\0"


@ft.lru_cache(maxsize=4096)
def _with_index(
    pattern: str, name: str, after: tuple[int | None, ...], loops: tuple[int, ...]
) -> Selected | None:
    parts, end = pattern.split("/"), len(name.split("/"))
    is_index = lambda x: x == "*" or x.lstrip("-").isdecimal() and x.isascii()
    candidates = [i for i, x in enumerate(parts) if is_index(x)]
    places = (*after, *[None] * len(loops))[: len(loops)]
    inner = [(n, k) for k, n in enumerate(places) if n is not None]
    ends = [(end, k) for k, n in enumerate(places) if n is None]
    some = (it.combinations(inner, n) for n in range(len(inner) + 1))
    # Of the indices at the end, those of inner loops need those of outer ones.
    firsts = [ends[:m] for m in range(len(ends) + 1)]
    for given, first in it.product(it.chain.from_iterable(some), firsts):
        cuts = [*sorted(given, key=lambda cut: cut[0]), *first]
        whole = in_a_list(name, [(place, _INDEX) for place, _ in cuts])
        for chosen in it.combinations(candidates, len(cuts)):
            glob = [_INDEX if i in chosen else x for i, x in enumerate(parts)]
            indices = {k: (place, parts[i]) for (place, k), i in zip(cuts, chosen)}
            if matches("/".join(glob), whole) and all(
                x == "*" or -loops[k] <= int(x) < loops[k]
                for k, (_, x) in indices.items()
            ):
                return _at(name, places, indices, loops)
    return None


def _at(
    name: str,
    places: Sequence[int | None],
    indices: Mapping[int, tuple[int, str]],
    loops: Sequence[int],
) -> Selected:
    """`indices`: of some loops, where in the name the index stands, and which."""
    given = {k: indices[k] for k in sorted(indices) if indices[k][1] != "*"}
    at = tuple(
        int(given[k][1]) % n if k in given else None for k, n in enumerate(loops)
    )
    before = lambda n: sum(place <= n for place, _ in given.values())
    rest = tuple(
        None if n is None else n + before(n)
        for k, n in enumerate(places)
        if k not in given
    )
    return Selected(in_a_list(name, [*given.values()]), at if given else (), rest)


def in_a_list(name: str, at: Sequence[tuple[int, Any]]) -> str:
    """What a list of layers calls one of those that a loop goes over: `blocks/2/attn`
    for `blocks/attn`, with `at` of `[(1, 2)]`, since the index 2 stands after one
    segment. From outside in, if there are several loops."""
    parts = name.split("/")
    for place, i in sorted(reversed(at), key=lambda x: -x[0]):
        parts.insert(place, str(i))
    return "/".join(parts)


def lookup(option: Any, name: str) -> Any:
    """What a dict of glob to something (or one thing for all names) says of `name`. A
    name that is spelled out goes before globs, and these go in their order."""
    if not isinstance(option, Mapping):
        return option
    if name in option:
        return option[name]
    return next((x for p, x in option.items() if matches(p, name)), None)


def same_in_a_model(name: str, there: Iterable[str]) -> tuple[str, list[str]]:
    """A glob for what `name` may be called if the model is passed in another way, and
    what it fits: names that end like it, after a slash."""
    parts = name.split("/")
    for i in range(len(parts)):
        end = "/".join(parts[i:])
        fits = [x for x in there if x == end or x.endswith(f"/{end}")]
        if fits and ("/" in end or i == 0 or end in fits):
            return f"*{end}", fits
    return "", []


def check_known(
    call: str,
    option: Iterable[Any] | None,
    there: Iterable[str],
    problem: str = "selects no sow of this program",
    *,
    kind: str = "names",
    hint: Callable[[Any, Iterable[str]], str] = lambda pattern, known: "",
) -> None:
    """Raises if anything in `option` selects nothing of what is `there`. `hint` says
    more about a pattern."""
    known = dict.fromkeys(there)
    for pattern in option or ():
        spelled_out = isinstance(pattern, str) and pattern in known
        if spelled_out or any(matches(pattern, name) for name in known):
            continue
        message = f"`{call}`: {pattern!r} {problem}. "
        names = ", ".join(map(repr, known)) if known else "none at all"
        message += f"The {kind} there are: {names}."
        if isinstance(pattern, str):
            close = difflib.get_close_matches(pattern, known, n=3)
            if close:
                message += f" Did you mean {' or '.join(map(repr, close))}?"
        raise UnknownSowError(message + hint(pattern, known))
