"""What goes through a program in the place of arrays, to find where those of a module
come from: see `locating.py`.

    flat = concatenate a b       # `a` and `b` are inputs
    c = mul flat 0.5
    d = slice[0:3] c

Here `flat` is at a distance of 0 from both inputs, since it only moves their entries.
`c` is at a distance of 1. `d` has entries of `a` only, so it is at a distance of 1 from
that, and does not come from `b`.

A slice with a constant index may be a layer of a stack:

    jax.tree.map(lambda a: a[1], blocks)     # `blocks` is a stack of 3 layers

    b = slice[start_indices=(1, 0) limit_indices=(2, 4)] weight    # f32[3,4]
    c = squeeze[dimensions=(0,)] b

`b` is entry 1 of 3, with an axis of length 1 in its place, and `c` is without that. A
slice that keeps the axis, as `a[1:2]`, is a smaller stack, and no layer. It is not
known which layers of the whole are in `a[::-1]`, `a[1:]` or `a[jnp.array([2, 0])]`.

Nor is every entry a layer: `a[:, 1]` has a row of each of the layers. So each axis of
an array knows which one of the source it is.

An index may be a number in the program, too: `jnp.take(a, 1, axis=0)` and
`jax.lax.dynamic_index_in_dim` compute `1 if 1 >= 0 else 1 + 3` before they use it.
"""

import itertools as it
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp

from .._walk.sows import Way


# What moves numbers and leaves them as they are, more or less. (Some edges come out of
# one branch or another, and go through the primitive for edges once more.)
_MOVES = (
    "all_gather all_to_all broadcast_in_dim concatenate convert_element_type copy "
    "copy_p device_put dynamic_slice dynamic_update_slice edge expand_dims gather "
    "name optimization_barrier pad pbroadcast pcast ppermute pvary "
    "reduce_precision reshape reshard rev select_n sharding_constraint slice "
    "split squeeze stack stop_gradient tile unstack"
)
# A transposition is half a computation: nothing else has such a distance. What makes a
# new array of several, rather than changing one, is farther than any number of changes.
TRANSPOSED, CHANGED, FAR = 1, 2, 1 << 16
_STEPS = dict.fromkeys(_MOVES.split(), 0) | {
    "transpose": TRANSPOSED,
    "dot_general": FAR,
    "conv_general_dilated": FAR,
}
# Of the sources of a value, so many are kept: the nearest.
_NEAREST = 8

# For each axis of an array, those that it was made of by reshaping: one, if it is an
# axis of the source itself; none, if it is not known, or not from the source.
Axes = tuple[tuple[int, ...], ...]


class Cut(NamedTuple):
    """Entry `i` of the `n` along an axis, which is number `axis` of the source, or
    `None` if that is not known. `is_open`: whether the axis is still there, with a
    length of 1. `way` leads to the equation."""

    n: int
    i: int
    axis: int | None = None
    is_open: bool = False
    way: Way = ()


# What has some entries of an array, or all in another order: an entry of it is one of
# the whole, and it is not known which. So is an entry of what one device has.
OTHER_ENTRIES = Cut(0, 0)


def closed(cuts: tuple[Cut, ...]) -> tuple[Cut, ...]:
    """The slices that have lost their axis, as far as it is known which they are."""
    known = it.takewhile(lambda c: c != OTHER_ENTRIES, cuts)
    return tuple([c for c in known if not c.is_open])


def in_common(several: Sequence[tuple[Cut, ...]]) -> tuple[Cut, ...]:
    """The slices that several values begin with."""
    first, *others = several
    for other in others:
        alike = [a[:3] == b[:3] for a, b in zip(first, other)]
        first = first[: [*alike, False].index(False)]
    return first


class Origin(NamedTuple):
    """What goes through the program in the place of an array.

    `distances`: how many computations there are between the array and each of its
    sources (see `Places`), in the order of the operands of these. `made`: which
    equation computed it, moves aside. `edges`: if it is an edge, the ways to the
    equations that it comes out of. `cases`: if it comes out of a cond, what it is in
    each branch, with what made the index. `parts`: if it is a concatenation, the axis,
    and the length of each part, with what it is. `each`: if a scan stacked it, the way
    to that, and what it is in one iteration. `cuts`: by the number of a source, the
    slices that it is of that, the first one first. `number`: its entries, if it is an
    index that is a constant. `is_whole`: whether it is a source, with all entries along
    those axes that `cuts` takes no entry of. `axes`: which axes of the source it has.
    """

    distances: Mapping[int, int] = {}
    made: Hashable = None
    edges: tuple[Way, ...] = ()
    cases: "tuple[Hashable, Sequence[Origin]] | None" = None
    parts: "tuple[int, Sequence[tuple[int, Origin]]] | None" = None
    each: "tuple[Way, Origin] | None" = None
    cuts: Mapping[int, tuple[Cut, ...]] = {}
    number: tuple[int, ...] | None = None
    is_whole: bool = False
    axes: Axes = ()

    def axis(self, k: int) -> int | None:
        """Which axis of the source axis `k` is, if it is one."""
        return self.axes[k][0] if len(self.axes[k]) == 1 else None

    def cut(self, more: Sequence[Cut], way: Way = ()) -> "Origin":
        """What some slices leave of it, which the equation at `way` makes."""
        if not more:
            return self
        more = [c if c == OTHER_ENTRIES else c._replace(way=way) for c in more]
        cuts = {s: (*self.cuts.get(s, ()), *more) for s in self.distances}
        made = (self.made, *(cut[:3] for cut in more))
        return self._replace(cuts=cuts, made=made, is_whole=False, each=None)

    def squeezed(self) -> "Origin":
        """What is left without the axes of length 1 that slices have left."""
        if not self.cuts:
            return self
        close = lambda of_source: tuple(c._replace(is_open=False) for c in of_source)
        return self._replace(cuts={s: close(x) for s, x in self.cuts.items()})

    def changing(self) -> "Origin":
        """What it is in a loop, in which a number is another one each time."""
        return self if self.number is None else self._replace(number=None)

    def along(self, more: int) -> "Origin":
        """An array with so many more axes in front. With one less, it is a slice, which
        is not of some of the parts if they are along that axis."""
        axes = ((),) * more + self.axes[max(-more, 0) :]
        new = self._replace(axes=axes, parts=None, each=None)
        if self.parts is None or self.parts[0] + more < 0:
            return new
        axis, parts = self.parts
        parts = [(n, x.along(more)) for n, x in parts]
        return new._replace(parts=(axis + more, parts))


# --- several values ---
# The lengths of some pieces, and the values that each is computed of.
_Pieces = Sequence[tuple[int, Sequence[Origin]]]


def _one_of(values: Sequence[Origin], step: int, made: Hashable) -> Origin:
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
        # Of what is computed entry by entry, those of the nearest value that has them.
        near = sorted(values, key=lambda v: min(v.distances.values(), default=FAR))
        ndim = max(len(v.axes) for v in values)
        each = zip(*(v.axes for v in near if len(v.axes) == ndim))
        axes = tuple(next(filter(None, axis), ()) for axis in each)
    cuts = {}
    if any(v.cuts for v in values):
        for source, n in distances.items():
            alike = [v for v in values if v.distances.get(source) == n - step]
            cuts[source] = in_common([v.cuts.get(source, ()) for v in alike])
    return Origin(distances, made, tuple(edges), cuts=cuts, axes=axes)


def undecided(values: Sequence[Origin]) -> Origin:
    """What is one of several values: it is not known which."""
    if all(x is values[0] for x in values):
        return values[0]
    return _of_pieces(*_side_by_side(values))


def in_order(cases: Sequence[Origin]) -> Sequence[Origin]:
    """The cases in the order of the user's code: of two, as of `jnp.where(p, a, b)`,
    JAX has the second one first."""
    return cases[::-1] if len(cases) == 2 else cases


def _of_pieces(
    axis: int,
    pieces: _Pieces,
    step: int = 0,
    way: Way = (),
    moved: Callable[[Axes], Axes] = lambda axes: axes,
) -> Origin:
    """The value that consists of these pieces along an axis, each of which one equation
    computes, whose axes are `moved`. Mostly there is one piece."""
    parts = []
    for n, xs in pieces:
        x = _one_of(xs, step, xs[0].made if xs and not step else way)
        parts.append((n, x._replace(axes=moved(x.axes))))
    if len(parts) == 1:
        return parts[0][1]
    made = parts[0][1].made if parts else None
    whole = _one_of(_equally_near([x for _, x in parts]), 0, made)
    return whole._replace(parts=(axis, parts))


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
    if not parts:
        return 0, [(0, values)]
    lengths = [n for n, _ in parts]

    def row(x):
        own_axis, own = x.parts or (None, ())
        is_alike = (own_axis, [n for n, _ in own]) == (axis, lengths)
        return [part for _, part in own] if is_alike else [x] * len(lengths)

    return axis, list(zip(lengths, zip(*map(row, values))))


# --- equations ---
class _Effect(NamedTuple):
    """What an equation does to its first operand, or to each alike: without more, it
    computes entry by entry.

    `of`: the operands that its outputs are made of, if that is known. `axes`: the axes
    of the outputs, given those of an operand, if they are others. `to`: where the axis
    of parts is in the outputs. `pieces`: what each output consists of along an axis, if
    that is other than what each operand consists of. `cuts`: for each output, the
    entries of the operand that it has, other than parts of a concatenation. `is_whole`:
    whether it has all of the operand along the other axes.
    """

    of: Sequence[Origin] | None = None
    axes: Callable[[Axes], Axes] | None = None
    to: Callable[[int], int | None] | None = None
    pieces: tuple[int, list[_Pieces]] | None = None
    cuts: Sequence[Sequence[Cut]] = ()
    is_whole: bool = False


def outputs_of(eqn: Any, operands: Sequence[Origin], way: Way) -> list[Origin]:
    """What comes out of an equation that is neither a mark nor an edge."""
    name, ins = eqn.primitive.name, [v.aval.shape for v in eqn.invars]
    make = _EFFECTS.get(name.partition("-")[0])  # there is a `scatter-add`
    effect = make(eqn, operands) if make else _Effect()
    of = effect.of
    if of is None:
        # An index, or a factor, is not what an array is made of.
        of = [x for x, shape in zip(operands, ins) if shape] or operands

    def moved(axes):
        shape = eqn.outvars[0].aval.shape
        if effect.axes is not None:
            axes = effect.axes(axes) if len(axes) == len(ins[0]) else ()
        return axes if len(axes) == len(shape) else ((),) * len(shape)

    step = _STEPS.get(name, CHANGED)
    axis, outs = effect.pieces or _entry_by_entry(eqn, of, effect.to)
    found = [_of_pieces(axis, pieces, step, way, moved) for pieces in outs]
    number = _number(eqn, operands)
    if number is not None:
        return [x._replace(number=number) for x in found]
    if effect.cuts:
        found = [x.cut(more, way) for x, more in zip(found, effect.cuts)]
    if name in ("squeeze", "reshape"):
        found = [x.squeezed() for x in found]
    if step or not (operands and operands[0].is_whole):
        return found
    is_whole = effect.is_whole or eqn.outvars[0].aval.shape == ins[0]
    return [x._replace(is_whole=True) for x in found] if is_whole else found


def _entry_by_entry(
    eqn: Any, operands: Sequence[Origin], to: Callable[[int], int | None] | None
) -> tuple[int, list[_Pieces]]:
    """What each output consists of that is computed entry by entry, such as `2 * flat`:
    of as many pieces as the operands, if it has their axis."""
    axis, pieces = _side_by_side(operands)
    new: int | None = axis
    if len(pieces) > 1 and to is not None:
        new = to(axis)
    elif len(pieces) > 1:
        ins, out = [v.aval.shape for v in eqn.invars], eqn.outvars[0].aval.shape
        # `(n,)` and `(m, n)` are `(1, n)` and `(m, n)` by now.
        fits = lambda s: len(s) == len(out) and all(n in (1, m) for n, m in zip(s, out))
        new = axis if all(map(fits, filter(None, ins))) else None
    if new is None:
        new, pieces = 0, [(0, operands)]
    return new, [pieces] * len(eqn.outvars)


def _picked(keys: Iterable[int | None]) -> Callable[[Axes], Axes]:
    """Takes these of the axes of an operand. `None`: a new one."""
    keys = list(keys)
    return lambda axes: tuple(() if k is None else axes[k] for k in keys)


def _without(eqn: Any, gone: Sequence[int]) -> Callable[[Axes], Axes]:
    return _picked(k for k in range(eqn.invars[0].aval.ndim) if k not in gone)


def _pieces_in(parts: Any, spans: Iterable[tuple[int, int]]) -> list[_Pieces]:
    """The pieces of these parts between some indices. `ravel_pytree` concatenates the
    arrays of a model, and takes them apart again: each comes from its own piece."""
    ends = list(it.accumulate(n for n, _ in parts))
    return [
        [
            (n, [x])
            for end, (length, x) in zip(ends, parts)
            if (n := min(stop, end) - max(start, end - length)) > 0
        ]
        for start, stop in spans
    ]


def _concatenate(eqn: Any, operands: Sequence[Origin]) -> _Effect:
    axis = eqn.params["dimension"]
    lengths = [v.aval.shape[axis] for v in eqn.invars]
    return _Effect(pieces=(axis, [[(n, [x]) for n, x in zip(lengths, operands)]]))


def _stack(eqn: Any, operands: Sequence[Origin]) -> _Effect:
    axis, keys = eqn.params["axis"], list(range(eqn.invars[0].aval.ndim))
    axes = _picked([*keys[:axis], None, *keys[axis:]])
    return _Effect(axes=axes, pieces=(axis, [[(1, [x]) for x in operands]]))


def _split(eqn: Any, operands: Sequence[Origin]) -> _Effect:
    """What `split` does, and `unstack`, which takes the axis away."""
    whole, k, n_outs = operands[0], eqn.params["axis"], len(eqn.outvars)
    n, sizes = eqn.invars[0].aval.shape[k], eqn.params.get("sizes")
    axes = _without(eqn, [k]) if sizes is None else None
    along, parts = whole.parts or (None, ())
    if k == along:
        stops = list(it.accumulate(sizes or [1] * n_outs))
        pieces = k, _pieces_in(parts, zip([0, *stops], stops))
        return _Effect(axes=axes, pieces=pieces)
    if n != n_outs or n == 1 and not whole.is_whole:
        return _Effect(axes=axes, cuts=[[OTHER_ENTRIES]] * n_outs)
    is_open = sizes is not None
    cuts = [[Cut(n, i, whole.axis(k), is_open)] for i in range(n)]
    return _Effect(axes=axes, cuts=cuts, is_whole=True)


def _slice(eqn: Any, operands: Sequence[Origin]) -> _Effect:
    p = eqn.params
    strides = p["strides"] or it.repeat(1)
    along = [*map(range, p["start_indices"], p["limit_indices"], strides)]
    # Every other entry is no part.
    starts = (r.start if r.step == 1 or len(r) == 1 else None for r in along)
    return _slice_of(eqn, operands, [*map(len, along)], enumerate(starts))


def _dynamic_slice(eqn: Any, operands: Sequence[Origin]) -> _Effect:
    starts = enumerate(x.number[0] if x.number else None for x in operands[1:])
    return _slice_of(eqn, operands, eqn.params["slice_sizes"], starts)


def _gather(eqn: Any, operands: Sequence[Origin]) -> _Effect:
    p, indices = eqn.params["dimension_numbers"], eqn.invars[1].aval
    numbers = indices.shape == (len(p.start_index_map),) and operands[1].number
    starts = zip(map(int, p.start_index_map), numbers or ())
    gone = (*p.collapsed_slice_dims, *p.operand_batching_dims)
    left = (k for k in range(eqn.invars[0].aval.ndim) if k not in gone)
    ndim = eqn.outvars[0].aval.ndim
    axes = _picked(next(left) if k in p.offset_dims else None for k in range(ndim))
    sizes, gone = eqn.params["slice_sizes"], p.collapsed_slice_dims
    effect = _slice_of(eqn, operands, sizes, starts, gone, indices.ndim > 1)
    return effect._replace(of=operands[:1], axes=axes)


def _slice_of(
    eqn: Any,
    operands: Sequence[Origin],
    sizes: Sequence[int],
    starts: Iterable[tuple[int, int | None]],
    gone: Sequence[int] = (),
    is_several: bool = False,
) -> _Effect:
    """What a slice of these sizes does, which begins at a constant along some axes, and
    loses those that are `gone`; or several of them."""
    shape, whole = eqn.invars[0].aval.shape, operands[0]
    along, parts = whole.parts or (None, ())
    begins = {
        k: min(max(i, 0), shape[k] - sizes[k]) for k, i in starts if i is not None
    }
    cuts = [
        Cut(shape[k], start, whole.axis(k), k not in gone)
        for k, start in sorted(begins.items())
        if sizes[k] == 1 and k != along
        if shape[k] > 1 or whole.is_whole and k in gone
    ]
    less = [k for k, (n, m) in enumerate(zip(sizes, shape)) if n < m]
    is_whole = len(less) == sum(cut.n > 1 for cut in cuts)
    # Several entries of an axis other than that of parts, and not all in their order.
    if is_several or any(sizes[k] > 1 and k != along for k in less):
        cuts.append(OTHER_ENTRIES)
        is_whole = False
    pieces = None
    if along in begins:
        span = begins[along], begins[along] + sizes[along]
        pieces = along, _pieces_in(parts, [span])
    return _Effect(pieces=pieces, cuts=[cuts], is_whole=is_whole)


def _squeeze(eqn: Any, operands: Sequence[Origin]) -> _Effect:
    whole, gone = operands[0], eqn.params["dimensions"]
    # What JAX makes of entry 0 of 1, unless it is the axis that a slice has left.
    left = {c.axis for cuts in whole.cuts.values() for c in cuts if c.is_open}
    entries = [k for k in gone if whole.is_whole and whole.axis(k) not in left]
    cuts = [Cut(1, 0, whole.axis(k)) for k in entries]
    return _Effect(axes=_without(eqn, gone), cuts=[cuts], is_whole=True)


def _transpose(eqn: Any, operands: Sequence[Origin]) -> _Effect:
    order = eqn.params["permutation"]
    return _Effect(axes=_picked(order), to=order.index)


def _broadcast(eqn: Any, operands: Sequence[Origin]) -> _Effect:
    places = eqn.params["broadcast_dimensions"]
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    same = {i: k for k, i in enumerate(places) if before[k] == after[i]}
    axes = _picked(same.get(i) for i in range(len(after)))
    return _Effect(axes=axes, to=places.__getitem__)


def _reshape(eqn: Any, operands: Sequence[Origin]) -> _Effect:
    """Axes that become one are together in that; if it becomes as many again, they are
    taken to be the same. Those of length 1 come and go."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    sizes = [n for n in after if n != 1]

    def axes(axes):
        old = [(n, a) for n, a in zip(before, axes) if n != 1]

        def n_alike(step):
            pairs = zip(old[::step], sizes[::step])
            return sum(1 for _ in it.takewhile(lambda x: x[0][0] == x[1], pairs))

        first = n_alike(1)
        last = min(n_alike(-1), len(sizes) - first)
        i, j = len(old) - last, len(sizes) - last
        of = tuple(k for _, a in old[first:i] for k in a)
        inside = [(k,) for k in of] if len(of) == j - first else [of] * (j - first)
        new = iter([*(a for _, a in old[:first]), *inside, *(a for _, a in old[i:])])
        return tuple(() if n == 1 else next(new) for n in after)

    return _Effect(axes=axes)


_EFFECTS: dict[str, Callable[[Any, Sequence[Origin]], _Effect]] = {
    "concatenate": _concatenate,
    "stack": _stack,
    "split": _split,
    "unstack": _split,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "select_n": lambda eqn, operands: _Effect(of=in_order(operands[1:])),
    **dict.fromkeys(
        ("rev", "pad", "sort"),
        lambda eqn, operands: _Effect(cuts=[[OTHER_ENTRIES]] * len(eqn.outvars)),
    ),
    # What has entries of another array is as that was before.
    **dict.fromkeys(
        ("scatter", "dynamic_update_slice"),
        lambda eqn, operands: _Effect(to=lambda k: k if operands[0].parts else None),
    ),
}


# --- indices ---
_ARITHMETIC: dict[str, Callable[..., int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "lt": operator.lt,
    "select_n": lambda which, *cases: cases[which],
    "convert_element_type": int,
    "broadcast_in_dim": int,
    "reshape": int,
    "squeeze": int,
}


def number_of(x: Any, aval: Any) -> tuple[int, ...] | None:
    """The number that a constant is, if it may be an index."""
    is_integer = not aval.shape and jnp.issubdtype(aval.dtype, jnp.integer)
    if not is_integer or isinstance(x, jax.core.Tracer):
        return None
    is_here = not isinstance(x, jax.Array) or (
        x.is_fully_addressable and not x.is_deleted()
    )
    return (int(x),) if is_here else None


def _number(eqn: Any, operands: Sequence[Origin]) -> tuple[int, ...] | None:
    """The entries of what an equation computes of indices that are constants."""
    numbers: list[Any] = [x.number for x in operands]
    if not numbers or None in numbers:
        return None
    if eqn.primitive.name == "concatenate":
        return sum(numbers, ())
    compute = _ARITHMETIC.get(eqn.primitive.name)
    (size,) = {v.aval.size for v in eqn.outvars} if compute else (0,)
    if compute is None or any(len(x) != size for x in numbers):
        return None
    return tuple(compute(*entries) for entries in zip(*numbers))
