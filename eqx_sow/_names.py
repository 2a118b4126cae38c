"""Names of marks, and of the iterations of the loops around them.

A name is a path. A loop over the layers of a stack is a part of it, written `*`: what
runs in a scan over the layers of a stack at `blocks` is `blocks/*/attn`, as all layers
of a list are called together. `Named("blocks/*/attn", (Iterations(1, 4),))` is a mark
in a loop over four layers: part 1 is the index, so its iterations are `blocks/0/attn`
to `blocks/3/attn`. Any other loop does not show, and has its index at the end: the
iterations of `Named("h", (Iterations(None, 4),))` are `h/0` to `h/3`.

To find what a pattern selects, `selected` lets `_globs` match it with names that have
an `Index` in place of any number: with `blocks`, an index and `attn` for the first of
these. Of what the pattern makes of that index, `_as_selected` makes the name of what is
selected, and the iterations that it has.
"""

import itertools as it
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ._errors import SowError
from ._globs import fitting, Index, Node, Part, parts_of


def join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def has_traced_number(name: str) -> bool:
    """Whether an f-string has put one into it, as in `h/JitTracer(int32[])`."""
    return "Trace" in name and re.search(r"Trace[rd]\W", name) is not None


class Iterations(NamedTuple):
    """Those of a loop around a mark: which part of the name is the index of one (`None`
    for one that stands at the end), and how many there are."""

    place: int | None
    length: int


class Named(NamedTuple):
    """What a mark is to patterns: its name, and the loops around, from outside in."""

    name: str
    loops: tuple[Iterations, ...] = ()


def in_loops(name: str, places: Iterable[int | None], lengths: Iterable[int]) -> Named:
    """A mark in loops of these lengths. `places` are those of its `Label`."""
    places = it.chain(places, it.repeat(None))
    return Named(name, tuple(Iterations(next(places), n) for n in lengths))


def with_stars(
    path: Sequence[str], n_keys: Sequence[int | None]
) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    """A path with a `*` for each loop over a stack that has `n_keys` of it, and which
    part that is. For `("blocks", "attn")` in a loop over time, and one over the layers
    of a stack at `blocks`, `(None, 1)`, that is `("blocks", "*", "attn")`, and again
    `(None, 1)`."""
    over_stacks = sorted((n, k) for k, n in enumerate(n_keys) if n is not None)
    new, places = list(path), list(n_keys)
    for before, (n, k) in enumerate(over_stacks):
        new.insert(n + before, "*")
        # There may be slashes in a key.
        places[k] = sum(key.count("/") + 1 for key in new[: n + before])
    return tuple(new), tuple(places)


def with_indices(name: str, indices: Iterable[tuple[int | None, Any]]) -> str:
    """The name of an iteration. Each index, from outside in, comes with its place, as
    in `Iterations`. For `blocks/*.encode` and `[(1, 2)]` that is `blocks/2.encode`, as
    it is called in a list of layers."""
    parts = name.split("/")
    n = len(parts)
    for place, i in indices:
        if place is None:
            parts.append(str(i))
        elif place < n:
            parts[place] = f"{i}{parts[place].removeprefix('*')}"
    return "/".join(parts)


def last_in_lists(named: Named) -> list[str]:
    """What the last iteration would be called in a list: `blocks/3/attn` for
    `blocks/*/attn` in a loop over 4 layers. Nothing if that has no known length."""
    layers = [x for x in named.loops if x.place is not None]
    if not layers or not all(isinstance(x.length, int) for x in layers):
        return []
    return [with_indices(named.name, [(x.place, x.length - 1) for x in layers])]


class Selected(NamedTuple):
    """What a pattern selects of a mark: all of it, under its own `name`; or, with an
    index in the pattern, one iteration of a loop, under the name with that index. A
    layer of a list that is counted from the end has that name, too.

    `at` has an entry for each loop around the mark, from outside in: which iteration is
    meant, or `None` for all. `places` is which part of the new name is the index, for
    those loops of which all are meant.
    """

    name: str
    at: tuple[int | None, ...] = ()
    places: tuple[int | None, ...] = ()


def whole(named: Named) -> Selected:
    return Selected(named.name, (), tuple(x.place for x in named.loops))


# --- what patterns select ---
def _parts_with_indices(
    named: Named, parts: Sequence[Part], n_at_end: int
) -> list[Part | Index]:
    """The parts of a name, with an index for each loop over layers, and at the end for
    so many others, from outside in."""
    loop_at = {x.place: k for k, x in enumerate(named.loops) if x.place is not None}
    index = lambda k, rest="": Index(k, named.loops[k].length, rest)
    at_end = [k for k, x in enumerate(named.loops) if x.place is None][:n_at_end]
    return [
        index(loop_at[x.number], x.text.removeprefix("*")) if x.number in loop_at else x
        for x in parts
    ] + list(map(index, at_end))


def selected(
    root: Node, named: Named, lengths: Mapping[str, int], whole: bool = False
) -> dict[int, list[Selected]]:
    """What the patterns of a tree, given by its root, select of a mark, by the numbers
    of those that fit. For the pattern `h/*/0`, and `h` in two loops, the first of `h`,
    `h/*` and `h/*/*` counts that fits. `lengths`: see `lengths_of_lists`. With `whole`,
    a pattern selects all iterations or none."""
    found: dict[int, list[Selected]] = {}
    parts = parts_of(named.name, lengths)
    n_at_end = 0 if whole else sum(x.place is None for x in named.loops)
    for n in range(n_at_end + 1):
        name = _parts_with_indices(named, parts, n)
        for i, choices in fitting(root, name, whole).items():
            if i not in found:
                each = [x for x in map(dict, choices) if _is_there(named, x)]
                if each:
                    found[i] = [_as_selected(named, x) for x in _without_parts(each)]
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


def _as_selected(named: Named, choice: Mapping[Any, Any]) -> Selected:
    """What is selected by a `Choice`: for `blocks/*/attn` in a loop over 4 layers, and
    an index of -1, that is `Selected("blocks/-1/attn", at=(3,))`."""
    parts, loops = named.name.split("/"), named.loops
    for x, text in choice.items():
        if isinstance(x, Part):
            parts[x.number] = text
    chosen = {x.loop: i for x, i in choice.items() if isinstance(x, Index)}
    given = {k: i for k, i in chosen.items() if i != "*"}
    inside = [(loops[k].place, i) for k, i in given.items()]
    name = with_indices("/".join(parts), [x for x in inside if x[0] is not None])
    # The name has no `*` for a loop that does not show, unless it would mean something
    # else without: `h/*/0` is not `h/0`.
    at_end = [str(chosen[k]) for k in sorted(chosen) if loops[k].place is None]
    while at_end[-1:] == ["*"]:
        at_end.pop()
    name = "/".join((name, *at_end))
    places = tuple(x.place for k, x in enumerate(loops) if k not in given)
    if not given:
        return Selected(name, (), places)
    # Not `%`: the length may be symbolic.
    from_start = lambda i, n: i if i >= 0 else n + i
    at = (
        from_start(given[k], n) if k in given else None
        for k, (_, n) in enumerate(loops)
    )
    return Selected(name, tuple(at), places)
