"""What errors say of a name or a pattern that selects nothing."""

import difflib
import fnmatch
import itertools as it
import re
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any

from ._errors import shown, UnknownSowError
from ._globs import compiled, fits, head_of, is_glob, is_index, of_all_layers
from ._names import join, Named, selected, with_indices


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


def _indices(name: str) -> list[int]:
    """The indices in a name."""
    heads = (head_of(part)[0] for part in name.split("/"))
    return [int(head) for head in heads if is_index(head)]


def _without_index_at_end(pattern: str) -> list[str]:
    """What all iterations are called, of which a pattern is one, from the longest:
    of `b/2/h/3` these are `b/*/h/*` and `b/*/h`."""
    names = [of_all_layers(pattern)]
    parts = pattern.split("/")
    while len(parts) > 1 and is_index(parts[-1]):
        parts.pop()
        names.append(of_all_layers("/".join(parts)))
    return names


def no_such_iteration(
    pattern: str, found: Iterable[Named], roots: Iterable[str] = ()
) -> str:
    """Says which iterations or layers there are, if a pattern fits a name but for its
    indices. It may lack the root of a model, one of `roots`."""
    found, indices = list(found), _indices(pattern)
    if not indices:
        return ""
    each = _without_index_at_end(pattern)
    each = [path for p in each for path in (p, *[join(root, p) for root in roots])]
    alike = [[x for x in found if fits(p, x.name)] for p in each]
    alike = next(filter(None, alike), None)
    if alike is None:
        return ""
    one, loops = alike[0], alike[0].loops
    if not loops and _indices(one.name):
        names = sorted((x.name for x in alike), key=_indices)
        if len(names) == 1:
            return (
                f" In a list, each has a name of its own. There is {one.name!r} only."
            )
        return (
            " In a list, each has a name of its own, from "
            f"{names[0]!r} to {names[-1]!r}, the last one."
        )
    said = f" There is no such iteration of {one.name!r}"
    if not loops:
        return (
            f"{said}, which is not in a loop of known length. For a `while_loop`, "
            "`reduce=eqx_sow.Buffer(n)` keeps iterations. If it runs several times "
            "in straight-line code, its value is a tuple: write "
            f"`intermediates[{one.name!r}]['primal'][{indices[-1]}]`. To give each run "
            'a name of its own, write `with eqx_sow.scope(f"step{i}"):` around it.'
        )
    first = with_indices(one.name, [(place, 0) for place, _ in loops])
    last = with_indices(one.name, [(place, n - 1) for place, n in loops])
    return f"{said}: they are {first!r} to {last!r}."


def entry_of_value(
    pattern: str, names: Iterable[str], roots: Iterable[str], more: str = ""
) -> str:
    """Says what to write instead of the name of a row in a table, such as `h[0]` for
    what is in the tuple `h`, and `more`. It may lack the root of a model, one of
    `roots`."""
    key = r"\[(?:\d+|'[^']*')\]"
    row = re.fullmatch(rf"([^\[]+)({key}(?:{key}|\.\w+)*)", pattern)
    if row is None:
        return ""
    there, (name, path) = set(names), row.groups()
    for full in (name, *[join(root, name) for root in roots]):
        if full in there:
            return (
                f" {pattern!r} is the entry `{path}` of the value of {full!r}: write "
                f"`intermediates[{full!r}]['primal']{path}`.{more}"
            )
    return ""


# What a captured call is marked with if an option asks for it.
_OPTIONAL = {
    ".inputs": " Inputs are marked with `inputs=True`.",
    ".call": " Whole calls are marked with `calls=True`.",
}


def without_option(pattern: str, there: Iterable[str]) -> str:
    """Says which option is missing if a name is that of inputs or of a whole call."""
    for suffix, said in _OPTIONAL.items():
        if pattern.endswith(suffix) and not any(x.endswith(suffix) for x in there):
            return said
    return ""


def check_no_entry(
    call: str,
    patterns: Iterable[Any],
    n_runs: Mapping[str, int],
    roots: Collection[str],
    more: str,
) -> None:
    """Raises if a pattern such as `h[1]`, which as a glob is `h1`, is a row of a table:
    an entry of the tuple `h`. `n_runs`: how often each name runs."""
    for pattern in patterns:
        row = isinstance(pattern, str) and re.fullmatch(r"(.*)\[(\d+)\]", pattern)
        of = [row[1], *[join(root, row[1]) for root in roots]] if row else []
        if row and any(n_runs.get(name, 0) > max(int(row[2]), 1) for name in of):
            entry = entry_of_value(pattern, n_runs, roots, more)
            raise UnknownSowError(f"`{call}`:{entry}")


def _close(pattern: str, there: Iterable[str], found: Iterable[Named]) -> list[str]:
    """The names that are close to a pattern. If it has an index, so do they: what is
    close to `blocks/3/atn` is layer 3 of `blocks/*/attn`, not all layers of it."""
    n_indices = lambda name: len(_indices(name))
    indices = _indices(pattern)
    there = dict.fromkeys(there)
    if is_glob(pattern) and (globs := _close_globs(pattern, there, found)):
        return globs
    if not indices:
        return difflib.get_close_matches(pattern, _lists_as_patterns(there), n=3)
    stacks = [x for x in found if x.loops and x.name in there]
    parts = it.chain(*[_with_indices(x, indices) for x in stacks])
    others = there.keys() - {x.name for x in stacks}
    alike = [x for x in (*there, *parts) if n_indices(x) >= len(indices)]
    first = difflib.get_close_matches(pattern, dict.fromkeys(alike), n=3)
    return first or difflib.get_close_matches(pattern, sorted(others), n=3)


def _lists_as_patterns(names: Iterable[str]) -> Iterable[str]:
    """The names, in which those of all layers of a list are one: `blocks/*/attn`, what
    is close to `blocks/atn` of a list as of a stack."""
    star = lambda part: "*" if is_index(part) else part
    all_of = {name: "/".join(map(star, name.split("/"))) for name in names}
    n_layers = Counter(all_of.values())
    return dict.fromkeys(p if n_layers[p] > 1 else name for name, p in all_of.items())


def _close_globs(
    pattern: str, there: Iterable[str], found: Iterable[Named]
) -> list[str]:
    """The same pattern without a typo, if there are names that it fits: `blocks/*` for
    `block/*`. And globs where somebody has written regular expressions."""
    named = [*found] or [*map(Named, there)]
    words = {part for x in named for part in x.name.split("/")}
    right = lambda part: difflib.get_close_matches(part, words, n=1) or [part]
    parts = re.sub(r"\.[*+]", "*", pattern).split("/")
    new = [p if is_glob(p) or p in words or is_index(p) else right(p)[0] for p in parts]
    ways = dict.fromkeys(["/".join(parts), "/".join(new)])
    # Where the model is may be left out.
    ways = [way for p in ways if p != pattern for way in (p, f"**/{p}")]
    fit = (p for p in ways if any(selected(compiled((p,)), x, {}) for x in named))
    return [*it.islice(fit, 1)]


def _with_indices(named: Named, indices: Sequence[int]) -> Iterator[str]:
    """What a mark in loops is called with some of these indices, in their order: with
    those of all layers, and of none or more of the other loops, from outside in."""
    inside = [x for x in named.loops if x.place is not None]
    inside.sort(key=lambda x: x.place or 0)
    at_end = [x for x in named.loops if x.place is None]
    has = lambda n, i: isinstance(n, int) and -n <= i < n
    for m in range(len(at_end) + 1):
        around = [*inside, *at_end[:m]]
        for some in it.combinations(indices, len(around)):
            if all(has(n, i) for (_, n), i in zip(around, some)):
                places = [place for place, _ in around]
                yield with_indices(named.name, zip(places, some))


def check_known(
    call: str,
    option: Iterable[Any] | None,
    there: Iterable[str],
    problem: str = "selects no mark of this program",
    *,
    kind: str = "names",
    hint: Callable[[Any, Sequence[str]], str] = lambda pattern, close: "",
    found: Iterable[Named] = (),
) -> None:
    """Raises if anything in `option` is not `there`. `hint` says more about it, given
    those names that are close to it. `found`: see `listed`."""
    known = dict.fromkeys(there)
    for pattern in option or ():
        if isinstance(pattern, str) and pattern in known:
            continue
        said = listed(pattern, known, kind, hint, found)
        raise UnknownSowError(f"`{call}`: {pattern!r} {problem}. {said}")


def listed(
    pattern: Any,
    there: Iterable[str],
    kind: str = "names",
    hint: Callable[[Any, Sequence[str]], str] = lambda pattern, close: "",
    found: Iterable[Named] = (),
) -> str:
    """What a message about a pattern that selects nothing says of what there is. Those
    that are `found` in loops have iterations, too."""
    there = list(map(str, there))
    close = _close(str(pattern), there, found)
    more = hint(pattern, close)
    if close and not more:
        more = f" Did you mean {' or '.join(map(repr, close))}?"
    return f"The {kind} there are: {shown(there)}.{more}"
