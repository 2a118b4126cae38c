"""What the leading axes of captured arrays are, and one iteration of loops among them.

`Known.axes` has the axes of each array as it came back, and its shape. Nothing else is
known of what a user has done with the arrays since. So an array of that shape has those
axes. If it has more, as from a transformation around `save_intermediates`, its shape
says where they are, unless there are two ways to add axes that give the same shape:

    came back       now                  the axis of the loop
    [loop=4, 3]     [5, 4, 3]            1, as after `jax.vmap`
                    [4, 3, 5]            0, as after `jax.jacfwd`
                    [4, 4, 3]            0 or 1: not known
                    [4]                  not known
"""

import itertools as it
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np

from .._names import in_a_list
from .leaves import is_value


# A scan: of each equation around it and of its own, the index, and whether it runs from
# its end if it is a scan. See `Entry.route`. These are plain tuples: pickles have them.
Scan = tuple[tuple[int, bool | None], ...]
# What an axis is; where its index stands in a name; and its scan, as far as that is
# known. ("loop", 6, ...) is the loop over the layers of `blocks/attn`, whose layer 2 a
# list would call `blocks/2/attn`. None for an axis whose index stands at the end, or
# nowhere.
NamedAxis = tuple[str, int | None, Scan | None]
NamedAxes = tuple[NamedAxis, ...]
# The leading axes of an array as it came back, and its shape.
Leading = tuple[NamedAxes, tuple[int, ...]]
# For each array of a value.
OfValue = tuple[Leading, ...]
# For several runs of one name, whose values are in a tuple, a list of that.
OfRuns = list[OfValue]


# --- axes ---
def _first_fit(shape: Sequence[Any], now: Sequence[Any]) -> list[int] | None:
    """Where the axes of a shape are in another one that has more, if each is as far to
    the front as it can be."""
    places, start = [], 0
    for n in shape:
        at = next((i for i in range(start, len(now)) if now[i] == n), None)
        if at is None:
            return None
        places.append(at)
        start = at + 1
    return places


def _places(known: Leading, x: Any) -> list[int | None] | None:
    """Where each of the axes is that an array had as it came back, `None` for what is
    not known. `None` for all of them if it is another array."""
    _, shape = known
    now = np.shape(x)
    if now == shape:
        return [*range(len(now))]
    front, back = _first_fit(shape, now), _first_fit(shape[::-1], now[::-1])
    if front is None or back is None:
        return None
    last = [len(now) - 1 - i for i in reversed(back)]
    return [i if i == j else None for i, j in zip(front, last)]


def _axes_of(known: Leading, x: Any) -> NamedAxes | None:
    """The leading axes of an array, if they are known. Other axes may have come to
    these, before each of them."""
    axes, shape = known
    places = _places(known, x)
    if places is None or None in places[: len(axes) + 1]:
        return None
    # Behind them, the array begins that the code at the mark sees.
    end = places[len(axes)] if len(axes) < len(shape) else np.ndim(x)
    own = dict(zip(places, axes))
    return tuple(own.get(i, ("outside", None, None)) for i in range(end or 0))


def axes_of_each(known: Iterable[Leading], value: Any) -> Iterator[NamedAxes | None]:
    return map(_axes_of, known, filter(is_value, jtu.tree_leaves(value)))


def axes_of_value(known: Sequence[Leading], value: Any) -> NamedAxes | None:
    n = sum(map(is_value, jtu.tree_leaves(value)))
    there = [axes for axes in axes_of_each(known, value) if axes is not None]
    if not len(there) == n == len(known):
        return None
    return max(there, key=len, default=())


def runs_of(known: OfValue | OfRuns, value: Any) -> list[tuple[OfValue, Any]]:
    """The values of all runs of a name, each with what is known of its axes."""
    return [*zip(known, value)] if isinstance(known, list) else [(known, value)]


def axes_of_runs(known: OfValue | OfRuns, value: Any) -> list[NamedAxes | None]:
    return [axes_of_value(of_run, x) for of_run, x in runs_of(known, value)]


# --- iterations ---
class LoopAxis(NamedTuple):
    """A loop that stacked a value: where in the name the index of an iteration stands,
    as in `NamedAxis`; how many iterations it has; which scan it is; and whether it is
    known where its axis is."""

    place: int | None
    length: int
    scan: Scan | None
    is_known: bool


def loops_of(known: OfValue, value: Any) -> list[LoopAxis] | None:
    """The loops that stacked a value, from outside in, given the value of one run.
    `None` if it is not what came back, so that its axes are not known."""
    arrays = [*filter(is_value, jtu.tree_leaves(value))]
    places = list(map(_places, known, arrays))
    if len(arrays) != len(known) or None in places:
        return None
    # Every array has the axes of all loops.
    each = [
        [(x, n, i) for x, n, i in zip(*own, at or ()) if x[0] == "loop"]
        for own, at in zip(known, places)
    ]
    return [
        LoopAxis(place, n, scan, all(i is not None for *_, i in of_arrays))
        for of_arrays in zip(*each)
        for (_, place, scan), n, _ in of_arrays[:1]
    ]


def at_iteration(
    known: OfValue, value: Any, at: Sequence[int | None]
) -> tuple[OfValue, Any]:
    """The value of one run at some iterations, and what is then known of its axes. `at`
    says for each of `loops_of`, from outside in, which iteration is meant, or `None`
    for all of it. For `h` of `[5, 4, 3]` with the axes `("vmap", "loop")` and an `at`
    of `(2,)` that is `h[:, 2]`.

    The places of those loops that stay are still those in the old name.
    """
    of_arrays = iter(known)
    new: list[Leading] = []

    def one(x):
        if not is_value(x):
            return x
        axes, shape = own = next(of_arrays)
        of_loops = iter(at)
        index = [next(of_loops) if kind == "loop" else None for kind, *_ in axes]
        kept = [i is None for i in index] + [True] * (len(shape) - len(axes))
        new.append((tuple(it.compress(axes, kept)), tuple(it.compress(shape, kept))))
        where = dict(zip(_places(own, x) or (), index))
        return _indexed(x, [where.get(i) for i in range(np.ndim(x))])

    value = jtu.tree_map(one, value)
    return tuple(new), value


def _indexed(x: Any, index: Sequence[int | None]) -> Any:
    """An array at an index for each of its first axes, `None` for all of it."""
    if all(i is None for i in index):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        kept = [i is None for i in index] + [True] * (x.ndim - len(index))
        return jax.ShapeDtypeStruct(tuple(it.compress(x.shape, kept)), x.dtype)
    # With the dots, what NumPy returns is an array, also if no axis is left.
    return x[(*[slice(None) if i is None else i for i in index], ...)]


# --- layers ---
def loops_over_layers(known: OfValue | OfRuns, value: Any) -> list[LoopAxis]:
    """The loops over layers that stacked a value: those whose index has a place in the
    name. None if they are not known, or several runs of the name had different ones."""
    each = [loops_of(of_run, x) for of_run, x in runs_of(known, value) if of_run]
    found = [[x for x in loops or () if x.place is not None] for loops in each]
    if not all(x.is_known for loops in found for x in loops):
        return []
    alike = {tuple((x.place, x.length) for x in loops) for loops in found}
    return found[0] if len(alike) == 1 else []


def names_of_layers(
    name: str, loops: Sequence[LoopAxis], which: Collection[int]
) -> Iterator[tuple[str, tuple[int | None, ...]]]:
    """What the parts of a value would be called in a list of layers, and the index of
    each in these loops over layers: those of `which` are taken apart. For `blocks/attn`
    these are `blocks/0/attn` to `blocks/3/attn`. Without any such loop, it is the value
    itself."""
    every = (range(x.length) if k in which else (None,) for k, x in enumerate(loops))
    for at in it.product(*every):
        indices = [(x.place, i) for x, i in zip(loops, at) if i is not None]
        yield in_a_list(name, indices), at


def layer_of(
    known: OfValue | OfRuns, value: Any, at: Sequence[int | None]
) -> tuple[OfValue | OfRuns, Any]:
    """Such a part, and what is known of it."""
    if all(i is None for i in at):
        return known, value
    runs = [_layer(of_run, x, at) for of_run, x in runs_of(known, value)]
    of_layer, layer = map(list, zip(*runs))
    if isinstance(known, list):
        return of_layer, tuple(layer)
    return of_layer[0], layer[0]


def _layer(known: OfValue, value: Any, at: Sequence[int | None]) -> tuple[OfValue, Any]:
    if not known:
        return known, value
    indices = iter(at)
    loops = loops_of(known, value) or ()
    of_loops = [None if x.place is None else next(indices) for x in loops]
    return at_iteration(known, value, of_loops)
