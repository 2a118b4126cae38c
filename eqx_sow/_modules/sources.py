"""What goes through a program in the place of numbers, to find where the arrays of a
module come from: see `naming.py`.

    flat = concatenate a b       # `a` and `b` are inputs
    c = mul flat 0.5
    d = slice[0:3] c

Here `flat` is at a distance of 0 from both inputs, since it only moves their entries.
`c` is at a distance of 1. `d` has entries of `a` only, so it is at a distance of 1 from
that, and does not come from `b`.
"""

import itertools as it
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from .._walk.sows import Way
from . import cuts as _cuts
from .cuts import Axes, axes_after, Cut, Cuts, same_axes


# What moves numbers and leaves them as they are, more or less. (Some edges come out of
# one branch or another, and go through the primitive for edges once more.)
_MOVES = frozenset(
    "all_gather all_to_all broadcast_in_dim concatenate convert_element_type copy "
    "copy_p device_put dynamic_slice dynamic_update_slice edge expand_dims gather "
    "name optimization_barrier pad pbroadcast pcast ppermute pvary "
    "reduce_precision reshape reshard rev select_n sharding_constraint slice "
    "split squeeze stack stop_gradient tile unstack".split()
)
# A transposition is half a computation: nothing else has such a distance. What makes a
# new array of several, rather than changing one, is farther than any number of changes.
TRANSPOSED, CHANGED, FAR = 1, 2, 1 << 16
_STEPS = dict.fromkeys(_MOVES, 0) | {
    "transpose": TRANSPOSED,
    "dot_general": FAR,
    "conv_general_dilated": FAR,
}
# Of the sources of a value, so many are kept: the nearest.
_NEAREST = 8


class Origin(NamedTuple):
    """What goes through the program in the place of an array.

    `distances`: how many computations there are between the array and each of its
    sources (see `Places`), in the order of the operands of these. `made`: which
    equation computed it, moves aside. `edges`: if it is an edge, the ways to the
    equations that it comes out of. `cases`: if it comes out of a cond, what it is in
    each branch, with what made the index. `parts`: if it is a concatenation, the axis,
    and what it consists of. `cuts`: which entries it is of its sources. `number`: its
    entries, if it is an index that is a constant. `is_whole`: whether it is a source,
    with all entries along those axes that `cuts` takes no entry of. `axes`: which axes
    of the source it has.
    """

    distances: Mapping[int, int] = {}
    made: Hashable = None
    edges: tuple[Way, ...] = ()
    cases: "tuple[Hashable, Sequence[Origin]] | None" = None
    parts: "tuple[int, Parts] | None" = None
    cuts: Cuts = {}
    number: tuple[int, ...] | None = None
    is_whole: bool = False
    axes: Axes = ()

    def cut(self, more: Sequence[Cut]) -> "Origin":
        """The same after some slices."""
        if not more:
            return self
        cuts = {s: (*self.cuts.get(s, ()), *more) for s in self.distances}
        made = (self.made, *(cut.entry for cut in more))
        return self._replace(cuts=cuts, made=made, is_whole=False)

    def squeezed(self) -> "Origin":
        """The same without the axes of length 1 that slices have left."""
        if not self.cuts:
            return self
        close = lambda of_source: tuple(c._replace(is_open=False) for c in of_source)
        return self._replace(cuts={s: close(x) for s, x in self.cuts.items()})

    def changing(self) -> "Origin":
        """The same in a loop, in which a number is another one each time."""
        return self if self.number is None else self._replace(number=None)

    def along(self, more: int) -> "Origin":
        """The same with so many more axes in front. With one less, it is a slice, which
        is not of some of the parts if they are along that axis."""
        axes = ((),) * more + self.axes[max(-more, 0) :]
        if self.parts is None:
            return self._replace(axes=axes)
        axis, parts = self.parts
        if axis + more < 0:
            return self._replace(parts=None, axes=axes)
        return self._replace(
            parts=(axis + more, [(n, x.along(more)) for n, x in parts]), axes=axes
        )


# What an array was concatenated of: the lengths, and what each part is.
Parts = Sequence[tuple[int, Origin]]


# --- equations ---
def one_of(values: Sequence[Origin], step: int = 0, made: Hashable = None) -> Origin:
    """The value of an equation with these operands, which adds `step` to the distances.
    With a step of 0, also what is one of several values, and it is not known which."""
    distances: dict[int, int] = {}
    for value in values:
        for source, n in value.distances.items():
            distances[source] = min(n + step, distances.get(source, 1 << 30))
    if len(distances) > _NEAREST:
        nearest = sorted(distances.items(), key=lambda item: item[1])
        distances = dict(nearest[:_NEAREST])
    edges = dict.fromkeys(e for v in values for e in v.edges)
    axes = values[0].axes if values else ()
    if any(v.axes != axes for v in values):
        near = sorted(values, key=lambda v: min(v.distances.values(), default=FAR))
        axes = same_axes([v.axes for v in near], max(len(v.axes) for v in values))
    cuts = _cuts_of(values, distances, step) if any(v.cuts for v in values) else {}
    return Origin(distances, made, tuple(edges), cuts=cuts, axes=axes)


def _cuts_of(
    values: Sequence[Origin], distances: Mapping[int, int], step: int
) -> dict[int, tuple[Cut, ...]]:
    """The slices that are in all of the nearest values from a source."""
    found = {}
    for source, n in distances.items():
        alike = [v for v in values if v.distances.get(source) == n - step]
        found[source] = _cuts.in_common([v.cuts.get(source, ()) for v in alike])
    return found


def undecided(values: Sequence[Origin]) -> Origin:
    """What is one of several values: it is not known which."""
    if all(x is values[0] for x in values):
        return values[0]
    return _of_pieces(*_side_by_side(values))


def in_order(cases: Sequence[Origin]) -> Sequence[Origin]:
    """Of two cases, as of `jnp.where(p, a, b)`, JAX has the second one first."""
    return cases[::-1] if len(cases) == 2 else cases


def outputs_of(eqn: Any, operands: Sequence[Origin], way: Way) -> list[Origin]:
    """What comes out of an equation that is neither a mark nor an edge."""
    number, name = _cuts.number(eqn, operands), eqn.primitive.name
    is_moved = name in _MOVES and bool(operands) and operands[0].is_whole
    starts, more = _cuts.after(eqn, operands, way)
    is_whole = is_moved and _cuts.is_of_whole(eqn, more)
    # An index, or a factor, is not what an array is made of.
    if name == "select_n":
        operands = in_order(operands[1:])
    elif name == "gather":
        operands = operands[:1]
    else:
        arrays = [x for x, v in zip(operands, eqn.invars) if v.aval.shape]
        operands = arrays or operands
    step = _STEPS.get(name, CHANGED)
    axis, outs = _in_pieces(eqn, operands, starts)
    found = [_of_pieces(axis, pieces, step, way, eqn) for pieces in outs]
    if number is not None:
        return [x._replace(number=number) for x in found]
    if any(more):
        found = [x.cut(entries) for x, entries in zip(found, more)]
    if name in ("squeeze", "reshape"):
        found = [x.squeezed() for x in found]
    return [x._replace(is_whole=True) for x in found] if is_whole else found


# The lengths of some pieces, and the values that each is computed of.
_Pieces = Sequence[tuple[int, Sequence[Origin]]]


def _of_pieces(
    axis: int, pieces: _Pieces, step: int = 0, way: Way = (), eqn: Any = None
) -> Origin:
    """The value that consists of these pieces along an axis, each of which one equation
    computes. Mostly there is one piece."""
    parts = [
        (n, one_of(xs, step, xs[0].made if xs and not step else way))
        for n, xs in pieces
    ]
    if eqn is not None:
        moved = lambda x: x._replace(axes=axes_after(eqn, x.axes))
        parts = [(n, moved(x)) for n, x in parts]
    if len(parts) == 1:
        return parts[0][1]
    made = parts[0][1].made if parts else None
    whole = one_of(_equally_near([x for _, x in parts]), 0, made)
    return whole._replace(parts=(axis, parts))


def _in_pieces(
    eqn: Any, operands: Sequence[Origin], starts: Mapping[int, int]
) -> tuple[int, list[_Pieces]]:
    """What each output of an equation consists of along an axis.

    `ravel_pytree` concatenates the arrays of a model, and takes them apart again. What
    was computed in between entry by entry, such as `2 * flat`, has pieces, too; what is
    sliced out of it comes from its own piece only. `starts`: where a slice begins."""
    p, name = eqn.params, eqn.primitive.name
    if name in ("concatenate", "stack"):
        axis = p["dimension" if name == "concatenate" else "axis"]
        lengths = (1 if name == "stack" else v.aval.shape[axis] for v in eqn.invars)
        return axis, [[(n, [x]) for n, x in zip(lengths, operands)]]
    axis, parts = next((x.parts for x in operands if x.parts), (0, ()))
    ends = list(it.accumulate(n for n, _ in parts))
    start = starts.get(axis) if parts else None
    if start is not None:
        spans = [(start, start + _cuts.sizes_of(eqn)[axis])]
    elif name in ("split", "unstack") and parts and p["axis"] == axis:
        stops = list(it.accumulate(p.get("sizes", [1] * len(eqn.outvars))))
        spans = list(zip([0, *stops], stops))
    else:
        to = _axis_after(eqn, axis, operands[0]) if parts else None
        if to is None:
            return 0, [[(0, operands)]] * len(eqn.outvars)
        _, pieces = _side_by_side(operands)
        return to, [pieces] * len(eqn.outvars)
    return axis, [
        [
            (n, [x])
            for end, (length, x) in zip(ends, parts)
            if (n := min(stop, end) - max(start, end - length)) > 0
        ]
        for start, stop in spans
    ]


def _axis_after(eqn: Any, axis: int, first: Origin) -> int | None:
    """Where the axis of parts is in the outputs of an equation that does something to
    each entry, or to some of them, and leaves them in their order."""
    p, name = eqn.params, eqn.primitive.name
    if name == "broadcast_in_dim":
        return p["broadcast_dimensions"][axis]
    if name == "transpose":
        return p["permutation"].index(axis)
    ins, out = [v.aval.shape for v in eqn.invars], eqn.outvars[0].aval.shape
    if name.startswith(("scatter", "dynamic_update_slice")):
        return axis if first.parts else None
    # `(n,)` and `(m, n)` are `(1, n)` and `(m, n)` by now.
    fits = lambda s: len(s) == len(out) and all(n in (1, m) for n, m in zip(s, out))
    return axis if all(map(fits, filter(None, ins))) else None


def _equally_near(values: list[Origin]) -> list[Origin]:
    """The parts of a stack: each is one, also if less was changed in it."""
    nearest = [min(x.distances.values(), default=0) for x in values]
    most = max((n for n in nearest if n < FAR), default=0)

    def moved(x, by):
        return x._replace(distances={s: n + by for s, n in x.distances.items()})

    return [moved(x, max(most - n, 0)) for x, n in zip(values, nearest)]


def _side_by_side(values: Sequence[Origin]) -> tuple[int, _Pieces]:
    """The parts of several values, if any has some. Those that have none, or others,
    are taken as a whole."""
    axis, parts = next((x.parts for x in values if x.parts), (0, ()))
    lengths = [n for n, _ in parts]

    def row(x):
        own_axis, own = x.parts or (None, ())
        is_alike = (own_axis, [n for n, _ in own]) == (axis, lengths)
        return [part for _, part in own] if is_alike else [x] * len(lengths)

    rows = zip(*map(row, values))
    return axis, list(zip(lengths, rows)) if parts else [(0, values)]
