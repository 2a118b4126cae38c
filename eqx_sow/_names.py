"""Names, globs and predicates."""

import difflib
import fnmatch
import functools as ft
import itertools as it
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ._errors import SowError, UnknownSowError


def join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def matches(pattern: Any, name: str) -> bool:
    """Whether a name, a glob or a predicate selects `name`."""
    if isinstance(pattern, str):
        return pattern == name or fnmatch.fnmatchcase(name, pattern)
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


def every_selected(
    patterns: Iterable[Any],
    name: str,
    after: tuple[int | None, ...],
    loops: tuple[int, ...] = ANY_LOOPS,
    names: frozenset[str] = frozenset(),
) -> list[Selected]:
    """What patterns select of a sow called `name` in `loops` of these lengths, from
    outside in. `after` is that of its `Label`. For `h` in a loop of 4 iterations,

        "h"     all of it
        "h/3"   iteration 3
        "h/-1"  the same
        "h/4"   nothing

    and for `blocks/attn` in a loop over layers, with an `after` of `(6,)`,
    `"blocks/2/attn"` is layer 2, `"blocks/*/attn"` all of it, and `"blocks/[12]/attn"`
    two layers. What looks like an index in one of the `names` that sows have is none:
    if there is a sow `h/0`, no pattern means iteration 0 of `h` by that.
    """
    found: dict[str, Selected] = {}
    for p in patterns:
        if p != name and p in names:
            continue
        if matches(p, name):
            some: Iterable[Selected] = [Selected(name, (), after)]
        else:
            some = _in_range(p, name, after, loops) if isinstance(p, str) else ()
        found |= {x.name: x for x in some if not x.at or x.name not in names}
    return list(found.values())


# So many iterations are looked at, to find those that a glob fits.
_MOST = 1000


def _indices(segment: str, loops: tuple[int, ...]) -> list[str]:
    """Which indices a segment of a pattern may mean: `2`, `-1`, `*` itself, or those
    that `[12]` or `?` fits; or one such as `2.encode` with a method."""
    segment, *_ = segment.split(".")
    digits = segment.removeprefix("-")
    if segment == "*" or (digits.isascii() and digits.isdecimal()):
        return [segment]
    if "?" in segment or "[" in segment:
        every = map(str, range(min(max(loops, default=0), _MOST)))
        return [i for i in every if fnmatch.fnmatchcase(i, segment)]
    return []


def _in_range(
    pattern: str, name: str, after: tuple[int | None, ...], loops: tuple[int, ...]
) -> tuple[Selected, ...]:
    try:
        return _with_index(pattern, name, after, loops)
    except Exception:  # JAX has no public name for what it raises
        length = next((n for n in loops if not isinstance(n, int)), None)
        if length is None:
            raise
        raise SowError(
            f"`names={pattern!r}`: {name!r} is in a loop of the symbolic length "
            f"{length}, so it is not known whether there is such an iteration. Say "
            f"how long it is at least: `jax.export.symbolic_shape({str(length)!r}, "
            f"constraints=['{length} >= 8'])`."
        ) from None


@ft.lru_cache(maxsize=4096)
def _with_index(
    pattern: str, name: str, after: tuple[int | None, ...], loops: tuple[int, ...]
) -> tuple[Selected, ...]:
    """Tries all ways to put the indices of the pattern into the name. For the pattern
    `h/*/0` and `h` in two loops these are `h`, `h/*`, `h/0`, `h/*/*`, `h/*/0`, ..."""
    segments = [_indices(x, loops) for x in pattern.split("/")]
    # `*` comes first.
    indices = sorted({i for of_segment in segments for i in of_segment})
    places = (*after, *[None] * len(loops))[: len(loops)]
    for some in _loops_with_index(places, sum(map(bool, segments))):
        found: dict[tuple[str, ...], Selected] = {}
        for chosen in it.product(indices, repeat=len(some)):
            given = {k: int(x) for k, x in zip(some, chosen) if x != "*"}
            listed = in_a_list(name, [(places[k], x) for k, x in zip(some, chosen)])
            # `h/1/0` is part of `h/*/0`.
            is_part = any(
                all(x in ("*", i) for x, i in zip(whole, chosen)) for whole in found
            )
            in_range = all(-loops[k] <= i < loops[k] for k, i in given.items())
            if in_range and not is_part and matches(pattern, listed):
                one = _iteration(name, places, given, loops)
                if "*" in chosen:
                    named_so = every_selected([one.name], name, after, loops)
                    # For `h/*/0`, that is `h/0`, which is another one.
                    if [x.at for x in named_so] != [one.at]:
                        one = Selected(listed, one.at, (None,) * len(one.after))
                found[chosen] = one
        if found:
            return tuple(found.values())
    return ()


def _loops_with_index(places: Sequence[int | None], most: int) -> Iterator[list[int]]:
    """Which of the loops around a sow may have their index in a pattern. Of those with
    an index at the end, the inner ones need the outer ones. `blocks/2` is a layer, also
    in a loop over batches: a list has that name."""
    inside = [k for k, place in enumerate(places) if place is not None]
    at_end = [k for k, place in enumerate(places) if place is None]
    for n in range(most + 1):
        for m in range(min(n, len(at_end)) + 1):
            for some in it.combinations(inside, n - m):
                yield sorted([*some, *at_end[:m]])


def _iteration(
    name: str,
    places: Sequence[int | None],
    given: Mapping[int, int],
    loops: Sequence[int],
) -> Selected:
    """What is selected if the indices of some loops are `given`."""
    new = in_a_list(name, [(places[k], i) for k, i in given.items()])
    at = tuple(given[k] % n if k in given else None for k, n in enumerate(loops))
    # An index moves those to the right that stand behind it.
    order = [(place is None, place, k) for k, place in enumerate(places)]
    after = tuple(
        None
        if place is None
        else place + sum(len(f"/{x}") for i, x in given.items() if order[i] < order[k])
        for k, place in enumerate(places)
        if k not in given
    )
    return Selected(new, at if given else (), after)


def in_a_list(name: str, indices: Iterable[tuple[int | None, Any]]) -> str:
    """The name of an iteration. Each index, from outside in, comes with its place:
    after so many characters of the name, or behind all others (`None`). For
    `blocks/attn` and `[(6, 2)]` that is `blocks/2/attn`, as it would be called in a
    list of layers, and for `blocks.encode` it is `blocks/2.encode`.
    """
    end = len(name)
    in_order = sorted(indices, key=lambda pair: (pair[0] is None, pair[0] or 0))
    # From the back, so that the other places stay where they are.
    for place, i in reversed(in_order):
        at = end if place is None else place
        name = f"{name[:at]}/{i}{name[at:]}" if at else f"{i}/{name}"
    return name


def lookup(option: Any, *names: str, of_all: str = "") -> Any:
    """What a dict of glob to something (or one thing for all names) says of something
    with these names, and for globs also the name `Label.of_all`. What is spelled out
    goes before globs, and these go in their order."""
    if option is None or not isinstance(option, Mapping):
        return option
    spelled_out = [option[name] for name in names if name in option]
    every = (*names, of_all)
    fitting = (x for p, x in option.items() if any(matches(p, n) for n in every))
    return next(it.chain(spelled_out, fitting), None)


def has_traced_number(name: str) -> bool:
    """Whether an f-string has put one into it, as in `h/JitTracer(int32[])`."""
    return "Trace" in name and re.search(r"Trace[rd]\W", name) is not None


def check_known(
    call: str,
    option: Iterable[Any] | None,
    there: Iterable[str],
    problem: str = "selects no sow of this program",
    *,
    kind: str = "names",
    hint: Callable[[Any, Sequence[str]], str] = lambda pattern, close: "",
) -> None:
    """Raises if anything in `option` selects nothing of what is `there`. `hint` says
    more about a pattern, given those names that are close to it."""
    known = dict.fromkeys(there)
    for pattern in option or ():
        spelled_out = isinstance(pattern, str) and pattern in known
        if spelled_out or any(matches(pattern, name) for name in known):
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
    names = ", ".join(map(repr, there)) or "none at all"
    close = difflib.get_close_matches(str(pattern), there, n=3)
    more = hint(pattern, close)
    if close and not more:
        more = f" Did you mean {' or '.join(map(repr, close))}?"
    return f"The {kind} there are: {names}.{more}"
