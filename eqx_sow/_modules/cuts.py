"""Slices of an array with a constant index: what one layer of a stack is taken out by.

    jax.tree.map(lambda a: a[1], blocks)     # `blocks` is a stack of 3 layers

    b = slice[start_indices=(1, 0) limit_indices=(2, 4)] weight    # f32[3,4]
    c = squeeze[dimensions=(0,)] b

`b` is entry 1 of 3, with an axis of length 1 in its place, and `c` is without that. A
slice that keeps the axis, as `a[1:2]`, is a smaller stack, and no layer. It is not
known which layers of the whole are in `a[::-1]`, `a[1:]` or `a[jnp.array([2, 0])]`.

Nor is every entry a layer: `a[:, 1]` has a row of each of the layers. So each axis of
an array knows which one of the source it is (`axes_after`).

An index may be a number in the program, too: `jnp.take(a, 1, axis=0)` and
`jax.lax.dynamic_index_in_dim` compute `1 if 1 >= 0 else 1 + 3` before they use it.
"""

import itertools as it
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp

from .._walk.sows import Way


class Cut(NamedTuple):
    """Entry `i` of the `n` along an axis, which is number `axis` of the source, or
    `None` if that is not known. `way` leads to the equation. `is_open`: whether the
    axis is still there, with a length of 1."""

    n: int
    i: int
    axis: int | None = None
    way: Way = ()
    is_open: bool = False

    @property
    def entry(self) -> tuple[int, int, int | None]:
        return self[:3]


# What has some entries of an array, or all in another order: an entry of it is one of
# the whole, and it is not known which. So is an entry of what one device has.
OTHER_ENTRIES = Cut(0, 0)
# By the number of a source, the slices that a value is of it, the first one first.
Cuts = Mapping[int, tuple[Cut, ...]]


def closed(cuts: tuple[Cut, ...]) -> tuple[Cut, ...]:
    """The slices that have lost their axis, as far as it is known which they are."""
    known = it.takewhile(lambda c: c != OTHER_ENTRIES, cuts)
    return tuple(c for c in known if not c.is_open)


def in_common(several: Sequence[tuple[Cut, ...]]) -> tuple[Cut, ...]:
    """The slices that several values begin with."""
    first, *others = several
    for other in others:
        alike = [a.entry == b.entry for a, b in zip(first, other)]
        first = first[: [*alike, False].index(False)]
    return first


def after(
    eqn: Any, operands: Sequence[Any], way: Way
) -> tuple[dict[int, int], list[Sequence[Cut]]]:
    """Where a slice begins along those axes where that is a constant. And for each
    output of an equation, the entries that it takes out of the first operand, other
    than parts of a concatenation."""
    p, name, n_outs = eqn.params, eqn.primitive.name, len(eqn.outvars)
    if name in _REORDERS:
        return {}, [[OTHER_ENTRIES]] * n_outs
    if name not in _SLICES:
        return {}, []
    along, _ = operands[0].parts or (None, ())
    shape, is_whole = eqn.invars[0].aval.shape, operands[0].is_whole
    axis = lambda k: of[0] if len(of := operands[0].axes[k]) == 1 else None
    if name == "squeeze":
        # What JAX makes of entry 0 of 1, unless it is the axis that a slice has left.
        left = {c.axis for cuts in operands[0].cuts.values() for c in cuts if c.is_open}
        gone = [k for k in p["dimensions"] if is_whole and axis(k) not in left]
        return {}, [[Cut(1, 0, axis(k), way) for k in gone]]
    if name in ("unstack", "split"):
        k, n = p["axis"], shape[p["axis"]]
        is_entry = k != along and n == n_outs and (n > 1 or is_whole)
        every = [Cut(n, i, axis(k), way, name == "split") for i in range(n_outs)]
        others = [] if k == along else [OTHER_ENTRIES]
        return {}, [[cut] if is_entry else others for cut in every]
    sizes, starts = sizes_of(eqn), _starts(eqn, operands)
    gone = p["dimension_numbers"].collapsed_slice_dims if name == "gather" else ()
    found = [
        Cut(shape[k], start, axis(k), way, k not in gone)
        for k, start in sorted(starts.items())
        if sizes[k] == 1 and k != along and (shape[k] > 1 or is_whole and k in gone)
    ]
    if _has_several(eqn, along):
        found.append(OTHER_ENTRIES)
    return starts, [found]


def is_of_whole(eqn: Any, more: Sequence[Sequence[Cut]]) -> bool:
    """Whether each output has all of the first operand along the axes that `more`, see
    `after`, takes no entry of."""
    name, shape = eqn.primitive.name, eqn.invars[0].aval.shape
    if eqn.outvars[0].aval.shape == shape or name == "squeeze":
        return True
    if not more or any(OTHER_ENTRIES in cuts for cuts in more):
        return False
    n_less = sum(n < m for n, m in zip(sizes_of(eqn), shape))
    return name in ("unstack", "split") or n_less == sum(c.n > 1 for c in more[0])


_SLICES = "slice", "dynamic_slice", "gather", "unstack", "split", "squeeze"
_REORDERS = "rev", "pad", "sort"


def _has_several(eqn: Any, along: int | None) -> bool:
    """Whether a slice has several entries of an axis, other than one of parts, and not
    all of them in their order."""
    of, sizes = eqn.invars[0].aval.shape, sizes_of(eqn)
    if eqn.primitive.name == "gather" and eqn.invars[1].aval.ndim > 1:
        return True
    return any(1 < n < m for k, (n, m) in enumerate(zip(sizes, of)) if k != along)


def sizes_of(eqn: Any) -> Sequence[int]:
    """The shape of what a slice takes out of an array."""
    p = eqn.params
    if eqn.primitive.name == "slice":
        return [j - i for i, j in zip(p["start_indices"], p["limit_indices"])]
    return p.get("slice_sizes", ())


def _starts(eqn: Any, operands: Sequence[Any]) -> dict[int, int]:
    p, shape = eqn.params, eqn.invars[0].aval.shape
    if eqn.primitive.name == "slice":
        return dict(enumerate(p["start_indices"]))
    if eqn.primitive.name == "dynamic_slice":
        axes = range(len(shape))
        numbers: Sequence[Any] = [x.number and x.number[0] for x in operands[1:]]
    else:
        axes = p["dimension_numbers"].start_index_map
        is_one = eqn.invars[1].aval.shape == (len(axes),)
        numbers = (is_one and operands[1].number) or [None] * len(axes)
    most = [n - size for n, size in zip(shape, sizes_of(eqn))]
    known = ((int(k), i) for k, i in zip(axes, numbers) if i is not None)
    return {k: min(max(i, 0), most[k]) for k, i in known}


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


def number(eqn: Any, operands: Sequence[Any]) -> tuple[int, ...] | None:
    """The entries of what an equation computes of indices that are constants."""
    numbers = [x.number for x in operands]
    if not numbers or None in numbers:
        return None
    if eqn.primitive.name == "concatenate":
        return sum(numbers, ())
    compute = _ARITHMETIC.get(eqn.primitive.name)
    (size,) = {v.aval.size for v in eqn.outvars} if compute else (0,)
    if compute is None or any(len(x) != size for x in numbers):
        return None
    return tuple(compute(*entries) for entries in zip(*numbers))


# --- which axes of the source an array has ---
# For each axis of an array, those that it was made of by reshaping: one, if it is an
# axis of the source itself; none, if it is not known, or not from the source.
Axes = tuple[tuple[int, ...], ...]


def axes_of_source(x: Any) -> Axes:
    return tuple((k,) for k in range(x.ndim))


def same_axes(several: Sequence[Axes], ndim: int) -> Axes:
    """The axes of what is computed of these entry by entry, the nearest one first."""
    first = next(iter(several), ())
    if len(first) == ndim and all(a is first for a in several):
        return first
    fit = [a for a in several if len(a) == ndim]
    return tuple(next(filter(None, k), ()) for k in zip(*fit)) or ((),) * ndim


def axes_after(eqn: Any, axes: Axes) -> Axes:
    """The axes of what an equation makes of an operand, given those of that."""
    p, name, shape = eqn.params, eqn.primitive.name, eqn.outvars[0].aval.shape
    if name not in _MOVES_AXES:
        return axes if len(axes) == len(shape) else ((),) * len(shape)
    before = eqn.invars[0].aval.shape
    if len(axes) != len(before):
        return ((),) * len(shape)
    if name == "transpose":
        return tuple(axes[k] for k in p["permutation"])
    if name == "reshape":
        return _reshaped(axes, before, shape)
    if name == "stack":
        return (*axes[: p["axis"]], (), *axes[p["axis"] :])
    if name == "broadcast_in_dim":
        of = dict(zip(p["broadcast_dimensions"], zip(axes, before)))
        there = (of.get(k, ((), -1)) for k in range(len(shape)))
        return tuple(a if n == m else () for (a, n), m in zip(there, shape))
    if name == "gather":
        numbers = p["dimension_numbers"]
        gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        left = iter([a for k, a in enumerate(axes) if k not in gone])
        has = lambda k: k in numbers.offset_dims
        return tuple(next(left) if has(k) else () for k in range(len(shape)))
    gone = p["dimensions"] if name == "squeeze" else (p["axis"],)
    return tuple(a for k, a in enumerate(axes) if k not in gone)


_MOVES_AXES = frozenset(
    "transpose reshape stack broadcast_in_dim gather squeeze unstack".split()
)


def _reshaped(axes: Axes, before: Sequence[Any], after: Sequence[Any]) -> Axes:
    """Axes that become one are together in that; if it becomes as many again, they are
    taken to be the same. Those of length 1 come and go."""
    old = [(n, a) for n, a in zip(before, axes) if n != 1]
    sizes = [n for n in after if n != 1]

    def n_alike(step):
        pairs = zip(old[::step], sizes[::step])
        return sum(1 for _ in it.takewhile(lambda x: x[0][0] == x[1], pairs))

    first = n_alike(1)
    last = min(n_alike(-1), len(old) - first, len(sizes) - first)
    i, j = len(old) - last, len(sizes) - last
    of = tuple(k for _, a in old[first:i] for k in a)
    inside = [(k,) for k in of] if len(of) == j - first else [of] * (j - first)
    new = iter([*(a for _, a in old[:first]), *inside, *(a for _, a in old[i:])])
    return tuple(() if n == 1 else next(new) for n in after)
