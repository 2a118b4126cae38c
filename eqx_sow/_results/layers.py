"""What the leading axes of captured arrays are, and one iteration of loops among them.

`Known.axes` has the axes of each array as it came back. What a user has done to the
arrays since shows in their shapes: other axes in front are from a transformation around
`save_intermediates`, and of anything else nothing is known.
"""

import dataclasses as dc
import itertools as it
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np

from .._names import Named, with_indices
from .leaves import is_value


# A scan: of each equation around it and of its own, the index, and whether it runs from
# its end if it is a scan. See `Entry.route`. These are plain tuples: pickles have them.
Scan = tuple[tuple[int, bool | None], ...]
# What an axis is; where its index stands in a name; and its scan, as far as that is
# known. ("loop", 1, ...) is the loop over the layers of `blocks/*/attn`, whose layer 2 a
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


# The modes of each name.
Values = Mapping[str, Mapping[str, Any]]


@dc.dataclass(frozen=True)
class Known:
    """What is known of what came back.

    `axes` are the leading axes of the arrays of each name and mode, see `NamedAxes`.
    All else is for looking up, and for what errors say: `found` are all marks in the
    program, those that were left out included; `roots` is where the models are, as in
    `Program.roots`; `capture` and `modes` are the options; `appended` are the names
    that the user's `Append` has put into a tuple, also if there is one value alone.
    `order` says of the runs of each name where among those of all names they were.
    """

    axes: Mapping[tuple[str, str], OfValue | OfRuns] = dc.field(default_factory=dict)
    found: tuple[Named, ...] = ()
    roots: tuple[str, ...] = ()
    capture: Any = None
    modes: tuple[str, ...] | None = None
    appended: frozenset[str] = frozenset()
    order: Mapping[str, Sequence[int]] = dc.field(default_factory=dict)

    def of(self, name: Any, mode: Any) -> OfValue | OfRuns:
        """The leading axes of the arrays of one value."""
        return self.axes.get((name, mode), ())


# --- axes ---
def _axes_of(known: Leading, x: Any) -> NamedAxes | None:
    """The leading axes of an array, if it is what came back. An outer transformation
    may have put more before these."""
    axes, shape = known
    front = np.ndim(x) - len(shape)
    if front < 0 or np.shape(x)[front:] != shape:
        return None
    return (*[("outside", None, None)] * front, *axes)


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
    as in `NamedAxis`; how many iterations it has; and which scan it is."""

    place: int | None
    length: int
    scan: Scan | None


def loops_of(known: OfValue, value: Any) -> list[LoopAxis] | None:
    """The loops that stacked a value, from outside in, given the value of one run.
    `None` if it is not what came back, so that its axes are not known."""
    if axes_of_value(known, value) is None:
        return None
    # Every array has the axes of all loops.
    own, shape = known[0] if known else ((), ())
    axes = zip(own, shape)
    return [LoopAxis(place, n, scan) for (k, place, scan), n in axes if k == "loop"]


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
        axes, shape = next(of_arrays)
        of_loops = iter(at)
        index = [next(of_loops) if kind == "loop" else None for kind, *_ in axes]
        kept = [i is None for i in index] + [True] * (len(shape) - len(axes))
        new.append((tuple(it.compress(axes, kept)), tuple(it.compress(shape, kept))))
        front = [None] * (np.ndim(x) - len(shape))
        return _indexed(x, [*front, *index])

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
    alike = {tuple((x.place, x.length) for x in loops) for loops in found}
    return found[0] if len(alike) == 1 else []


def layers_of(
    name: str, known: OfValue | OfRuns, value: Any
) -> Iterator[tuple[tuple[int, ...], str, OfValue | OfRuns, Any]]:
    """The parts of a value that a list of layers would have as values of their own:
    the index of each, the name that it has there, and what is known of it. For
    `blocks/*/attn` of `[4, ...]`, in a loop over layers, these are `blocks/0/attn` to
    `blocks/3/attn`. If there is no such loop, it is the value itself."""
    loops = loops_over_layers(known, value)
    if not loops:
        yield (), name, known, value
        return
    for at in it.product(*[range(x.length) for x in loops]):
        runs = [_layer(of_run, x, at) for of_run, x in runs_of(known, value)]
        of_layer, layer = map(list, zip(*runs))
        layer_name = with_indices(name, [(x.place, i) for x, i in zip(loops, at)])
        if isinstance(known, list):
            yield at, layer_name, of_layer, tuple(layer)
        else:
            yield at, layer_name, of_layer[0], layer[0]


def _layer(known: OfValue, value: Any, at: Sequence[int]) -> tuple[OfValue, Any]:
    if not known:
        return known, value
    indices = iter(at)
    loops = loops_of(known, value) or ()
    of_loops = [None if x.place is None else next(indices) for x in loops]
    return at_iteration(known, value, of_loops)
