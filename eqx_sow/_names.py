"""Names of marks, and of the iterations of the loops around them.

A mark in a loop has one name, and each iteration has one as well, in which the index is
written. `Named("blocks/attn", (Iterations(6, 4),))` is a mark in a loop over four
layers: behind six characters stands the index, so its iterations are `blocks/0/attn` to
`blocks/3/attn`, as in a list of layers. Those of `Named("h", (Iterations(None, 4),))`,
in a loop over nothing that has a name, are `h/0` to `h/3`.

To find what a pattern selects, `selected` lets `_globs` match it with names that have
an `Index` in place of any number: with `blocks`, an index and `attn` for the first of
these. Of what the pattern makes of that index, `_as_selected` makes the name of what is
selected, and the iterations that it has.
"""

import itertools as it
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ._errors import SowError
from ._globs import compiled, fitting, Index, Part, parts_of, Tree


def join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def has_traced_number(name: str) -> bool:
    """Whether an f-string has put one into it, as in `h/JitTracer(int32[])`."""
    return "Trace" in name and re.search(r"Trace[rd]\W", name) is not None


class Iterations(NamedTuple):
    """Those of a loop around a mark: where the index of one stands in the name, behind
    so many characters or at the end (`None`), and how many there are."""

    place: int | None
    length: int


class Named(NamedTuple):
    """What a mark is to patterns: its name, and the loops around, from outside in."""

    name: str
    loops: tuple[Iterations, ...] = ()


def in_loops(name: str, after: Iterable[int | None], lengths: Iterable[int]) -> Named:
    """A mark in loops of these lengths. `after` is that of its `Label`."""
    places = it.chain(after, it.repeat(None))
    return Named(name, tuple(Iterations(next(places), n) for n in lengths))


class Selected(NamedTuple):
    """What a pattern selects of a mark: all of it, under its own `name`; or, with an
    index in the pattern, one iteration of a loop, under the name with that index. A
    layer of a list that is counted from the end has that name, too.

    `at` has an entry for each loop around the mark, from outside in: which iteration is
    meant, or `None` for all. `after` is where in the new name the indices of the loops
    stand of which all are meant.
    """

    name: str
    at: tuple[int | None, ...] = ()
    after: tuple[int | None, ...] = ()


# --- names with indices, to be matched ---
def _parts_with_indices(
    named: Named, parts: Sequence[Part], loops: Sequence[int]
) -> list[Part | Index]:
    """The parts of a name, with an index for each of these loops. For `blocks/attn` in
    a loop over layers that is `blocks`, the index, `attn`; and for `blocks.encode`,
    since a list has `blocks/2.encode`, it is `blocks`, and the index with `.encode`
    behind it."""
    places = [x.place for x in named.loops]
    index = lambda k, rest="": Index(k, named.loops[k].length, rest)
    new: list[Part | Index] = [index(k) for k in loops if places[k] == 0]
    for part in parts:
        inside = [k for k in loops if part.start < (places[k] or 0) <= part.end]
        if not inside:
            new.append(part)
            continue
        rest = named.name[places[inside[0]] : part.end]
        text, from_end = part.text.removesuffix(rest), part.from_end
        from_end = from_end and from_end.removesuffix(rest)
        new.append(Part(part.start, part.end - len(rest), text, from_end))
        *others, last = inside
        new += [*map(index, others), index(last, rest)]
    return [*new, *[index(k) for k in loops if places[k] is None]]


def _which_loops(
    places: Sequence[int | None], most: int, whole: bool
) -> Iterator[tuple[bool, int, list[int]]]:
    """The names that a mark may be called by have indices of different loops: for `h`
    in two loops they are `h`, `h/0` and `h/0/0`. For each such name, these are the
    loops whose index it has; whether a list of layers would have the name, too; and how
    many indices a pattern needs to have for that name, at most `most`, beside those
    that stand for all iterations. Names that a list would have come first.

    An index at the end needs those of all outer loops that have theirs there. With
    `whole`, a pattern has no index but those that stand for all iterations.
    """
    inside = [k for k, place in enumerate(places) if place is not None]
    at_end = [k for k, place in enumerate(places) if place is None]
    at_end = [] if whole else at_end[:most]
    # `blocks/2` is a layer, also in a loop over batches: a list has that name.
    for m in range(len(at_end) + 1):
        yield True, m, [*inside, *at_end[:m]]
    if whole:
        yield from [(False, 0, [])] if inside else []
        return
    for n in range(most + 1):
        for m in range(min(n, len(at_end)) + 1):
            for some in it.combinations(inside, n - m):
                if len(some) < len(inside):
                    yield False, n, [*some, *at_end[:m]]


def selected(
    tree: Tree, named: Named, lengths: Mapping[str, int], whole: bool = False
) -> dict[int, tuple[bool, list[Selected]]]:
    """The patterns of a tree that fit a mark, by their numbers: whether each fits the
    name that a list would have, and what it selects. For the pattern `h/*/0`, and `h`
    in two loops, the first of `h`, `h/*` and `h/*/*` counts that fits. `lengths`: see
    `lengths_of_lists`."""
    found: dict[int, tuple[bool, list[Selected]]] = {}
    parts = parts_of(named.name, lengths)
    places = [x.place for x in named.loops]
    most = max(tree.n_indices, default=0)
    for in_list, n, loops in _which_loops(places, most, whole):
        name = _parts_with_indices(named, parts, loops)
        for i, choices in fitting(tree.root, name, whole).items():
            # Others may have more indices, which is nothing to this pattern.
            if i not in found and n <= tree.n_indices[i]:
                each = [x for x in map(dict, choices) if _is_there(named, x)]
                if each:
                    some = [_as_selected(named, x) for x in _without_parts(each)]
                    found[i] = in_list, some
    return found


def _is_there(named: Named, choice: Mapping[Any, Any]) -> bool:
    """Whether a loop has the iterations that are chosen, if its length is symbolic."""
    for x, i in choice.items():
        if not isinstance(x, Index) or i == "*" or isinstance(x.n, int):
            continue
        try:
            if not -x.n <= i < x.n:
                return False
        except Exception:  # JAX has no public name for what it raises
            raise SowError(
                f"{named.name!r} is in a loop of the symbolic length {x.n}, so it is "
                f"not known whether there is an iteration {i}. Say how long it is at "
                f"least: `jax.export.symbolic_shape({str(x.n)!r}, "
                f"constraints=['{x.n} >= 8'])`."
            ) from None
    return True


def _without_parts(each: list[dict[Any, Any]]) -> list[dict[Any, Any]]:
    """`h/1/0` is part of `h/*/0`."""

    def is_part(x, whole):
        return x is not whole and all(whole.get(k) in ("*", i) for k, i in x.items())

    return [x for x in each if not any(is_part(x, whole) for whole in each)]


# --- what is selected ---
# What is written into a name: in which order (from the left), where what is there
# begins and ends, and the new text.
_Edit = tuple[tuple[bool, int, int], int, int, str]


def _edited(name: str, edits: Iterable[_Edit]) -> str:
    # From the back, so that the other places stay where they are.
    for _, start, stop, text in sorted(edits, reverse=True):
        name = name[:start] + text + name[stop:]
    return name


def _with_index(name: str, loop: int, place: int | None, index: Any) -> _Edit:
    """Writes the index of a loop to its place. Loops are counted from outside in."""
    at = len(name) if place is None else place
    text = f"/{index}" if at else f"{index}/"
    return (place is None, at, loop), at, at, text


def in_a_list(name: str, indices: Iterable[tuple[int | None, Any]]) -> str:
    """The name of an iteration. Each index, from outside in, comes with its place, as
    in `Iterations`. For `blocks/attn` and `[(6, 2)]` that is `blocks/2/attn`, as it
    would be called in a list of layers, and for `blocks.encode` it is
    `blocks/2.encode`.
    """
    each = enumerate(indices)
    return _edited(name, [_with_index(name, k, place, i) for k, (place, i) in each])


def last_in_lists(named: Named) -> list[str]:
    """What the last iteration would be called in a list: `blocks/3/attn` for
    `blocks/attn` in a loop over 4 layers. Nothing if that has no known length."""
    layers = [x for x in named.loops if x.place is not None]
    if not layers or not all(isinstance(x.length, int) for x in layers):
        return []
    return [in_a_list(named.name, [(x.place, x.length - 1) for x in layers])]


def _edits(named: Named, choice: Mapping[Any, Any]) -> list[_Edit]:
    return [
        ((False, x.start, -1), x.start, x.end, new)
        if isinstance(x, Part)
        else _with_index(named.name, x.loop, named.loops[x.loop].place, new)
        for x, new in choice.items()
    ]


def _as_selected(named: Named, choice: Mapping[Any, Any]) -> Selected:
    """What is selected by a `Choice`: for `blocks/attn` in a loop over layers, and an
    index of -1, that is `Selected("blocks/-1/attn", at=(3,))`."""
    some = {x: i for x, i in choice.items() if i != "*"}
    given = {x.loop: i for x, i in some.items() if isinstance(x, Index)}
    edits = _edits(named, some)
    # An index moves those to the right that stand behind it.
    moved = lambda k, place: sum(
        len(text) - (stop - start)
        for order, start, stop, text in edits
        if order < (False, place, k)
    )
    after = tuple(
        None if place is None else place + moved(k, place)
        for k, (place, _) in enumerate(named.loops)
        if k not in given
    )
    name = _edited(named.name, edits)
    if not given:
        return Selected(name, (), after)
    # Not `%`: the length may be symbolic.
    from_start = lambda i, n: i if i >= 0 else n + i
    at = tuple(
        from_start(given[k], n) if k in given else None
        for k, (_, n) in enumerate(named.loops)
    )
    if len(some) < len(choice):
        # The name has no `*` for the loops of which all are meant, unless it would mean
        # something else without: `h/*/0` is not `h/0`.
        alone = selected(compiled((name,)), named, {})
        if [x.at for _, some in alone.values() for x in some] != [at]:
            name = _edited(named.name, _edits(named, choice))
            after = (None,) * len(after)
    return Selected(name, at, after)
