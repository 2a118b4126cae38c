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

import dataclasses as dc
import functools as ft
import itertools as it
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np

from .._names import Named, with_indices
from .leaves import arrays_in, is_value


# A scan: of each equation around it and of its own, the index, and whether it runs from
# its end if it is a scan. See `Entry.route`. These are plain tuples: pickles have them.
Scan = tuple[tuple[int, bool | None], ...]
# What an axis is; which part of a name its index is; and its scan, as far as that is
# known. ("loop", 1, ...) is the loop over the layers of `blocks/*/attn`, whose layer 2
# is `blocks/2/attn`. None for an axis whose index stands at the end, or nowhere.
NamedAxis = tuple[str, int | None, Scan | None]
NamedAxes = tuple[NamedAxis, ...]
# In the place of other axes, of which it is not known what they are.
UNKNOWN: NamedAxis = "unknown", None, None
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
    In the view of one mode, `lacking` has the names without it, and what modes they
    have: of a pattern that selects one of them, there is no value of that mode.
    """

    axes: Mapping[tuple[str, str], OfValue | OfRuns] = dc.field(default_factory=dict)
    found: tuple[Named, ...] = ()
    roots: tuple[str, ...] = ()
    capture: Any = None
    modes: tuple[str, ...] | None = None
    appended: frozenset[str] = frozenset()
    order: Mapping[str, Sequence[int]] = dc.field(default_factory=dict)
    lacking: Mapping[str, Sequence[str]] = dc.field(default_factory=dict)

    def of(self, name: Any, mode: Any) -> OfValue | OfRuns:
        """The leading axes of the arrays of one value."""
        return self.axes.get((name, mode), ())

    @ft.cached_property
    def orders(self) -> dict[str, str]:
        """Of each name for which the order of its axes matters, what that is, and how
        long they are: to JAX, values of the same shape are then of two forms, and what
        it has compiled for one is not used for the other. That is from the layers on,
        or from a loop with lanes behind it: what is in front may as well have come from
        outside, as in `vmap(save_intermediates(f))`."""
        found: dict[str, str] = {}
        for (name, _), of_runs in self.axes.items():
            runs = of_runs if isinstance(of_runs, list) else [of_runs]
            each = [*map(_order, it.chain(*runs))]
            if name not in found and any(each):
                found[name] = "; ".join(each)
        return found


def _order(leading: Leading) -> str:
    axes, shape = leading
    kinds, layers, start = [kind for kind, *_ in axes], of_layers(axes), 0
    if layers:
        start = min(layers)
    elif "loop" in kinds and "vmap" in kinds[kinds.index("loop") :]:
        start = kinds.index("loop")
    else:
        return ""
    for n, k in enumerate(layers):
        kinds[k] = f"layers {n}"
    return ", ".join([*kinds[start:], str([*shape[start:]])])


def of_layers(axes: Sequence[NamedAxis]) -> list[int]:
    """Which of some axes are those of layers, in the order in which the name has these
    layers."""
    found = [(place, k) for k, (_, place, _) in enumerate(axes) if place is not None]
    return [k for _, k in sorted(found)]


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


def axes_of_each(known: OfValue, value: Any) -> list[NamedAxes | None]:
    """Those of each array of the value of one run."""
    arrays = arrays_in(value)
    if len(arrays) != len(known):
        return [None] * max(len(arrays), len(known))
    return [*map(_axes_of, known, arrays)]


def runs_of(known: OfValue | OfRuns, value: Any) -> list[tuple[OfValue, Any]]:
    """The values of all runs of a name, each with what is known of its axes."""
    return [*zip(known, value)] if isinstance(known, list) else [(known, value)]


def joined(
    known: OfValue | OfRuns, runs: Sequence[tuple[OfValue, Any]]
) -> tuple[OfValue | OfRuns, Any]:
    """The reverse of `runs_of`: several runs are a list and a tuple, as in `known`."""
    of_runs, values = zip(*runs)
    return ([*of_runs], values) if isinstance(known, list) else runs[0]


# --- iterations ---
class LoopAxis(NamedTuple):
    """A loop that stacked a value: where in the name the index of an iteration stands,
    as in `NamedAxis`; how many iterations it has; which scan it is; and whether it is
    known where its axis is."""

    place: int | None
    length: int
    scan: Scan | None
    is_known: bool


def loops_of(known: OfValue, value: Any) -> list[LoopAxis]:
    """The loops that stacked a value, from outside in, given the value of one run. If
    it is not what came back, it is not known where their axes are."""
    arrays = arrays_in(value)
    alike = len(arrays) == len(known)
    places = map(_places, known, arrays) if alike else [None] * len(known)
    # Every array has the axes of all loops.
    each = [
        [(x, n, i) for x, n, i in zip(*own, at or it.repeat(None)) if x[0] == "loop"]
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
        axes, shape = own = next(of_arrays, ((), np.shape(x)))
        of_loops = iter(at)
        index = [next(of_loops) if kind == "loop" else None for kind, *_ in axes]
        kept = [i is None for i in index] + [True] * (len(shape) - len(axes))
        new.append((tuple(it.compress(axes, kept)), tuple(it.compress(shape, kept))))
        pairs = zip(_places(own, x) or (), index)
        return indexed(x, {k: i for k, i in pairs if i is not None})

    value = jtu.tree_map(one, value)
    return tuple(new), value


def indexed(x: Any, at: Mapping[Any, int]) -> Any:
    """An array at an index for some of its axes."""
    if not at:
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        shape = tuple(n for k, n in enumerate(x.shape) if k not in at)
        return jax.ShapeDtypeStruct(shape, x.dtype)
    # With the dots, what NumPy returns is an array, also if no axis is left.
    return x[(*[at.get(k, slice(None)) for k in range(max(at) + 1)], ...)]


# --- layers ---
def behind_layers(known: OfValue, value: Any, sizes: Sequence[int]) -> OfValue:
    """What is known of the axes of several such values of one run, once they are
    stacked: those of the layers come first."""
    layers = tuple(("loop", k, None) for k in range(len(sizes)))
    pairs = zip(arrays_in(value), axes_of_each(known, value))
    return tuple(
        ((*layers, *((UNKNOWN,) if axes is None else axes)), (*sizes, *np.shape(x)))
        for x, axes in pairs
    )


def parts(
    name: str, known: OfValue | OfRuns, value: Any
) -> Iterator[tuple[str, dict[int | None, int], tuple[OfValue | OfRuns, Any]]]:
    """The parts of a value in a list of layers: what each would be called, its index by
    the place of each loop over layers in the name, and the part, with what is known of
    it. For `blocks/*/attn` these are `blocks/0/attn` to `blocks/3/attn`. Without any
    such loop, or if several runs of the name had different ones, it is the value."""
    runs = [(*run, loops_of(*run)) for run in runs_of(known, value)]
    alike = {
        tuple(x[:2] for x in loops if x.place is not None)
        for of_run, _, loops in runs
        if of_run
    }
    over = alike.pop() if len(alike) == 1 else ()
    if not over:
        yield name, {}, (known, value)
        return
    places, lengths = zip(*over)
    for at in it.product(*map(range, lengths)):
        index = dict(zip(places, at))
        each = [
            at_iteration(of_run, x, [index.get(y.place) for y in loops])
            for of_run, x, loops in runs
        ]
        yield with_indices(name, index.items()), index, joined(known, each)
