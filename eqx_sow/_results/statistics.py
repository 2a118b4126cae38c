"""The reductions behind `summarize` and `tabulate`."""

import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.lax as lax
import jax.numpy as jnp
import numpy as np

from .._arrays import leading


def as_real(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.abs(x)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.float64 if x.dtype.itemsize == 8 else jnp.float32)
    return x.astype(jnp.result_type(float))


# XLA's reductions of several arrays at once write nothing else to memory; what it
# reduces alone it first writes there, on a CPU. It makes vector instructions of them if
# there is one sum of floating-point numbers among integers, and is then ten times as
# fast: so `_extremum` is that of integers, and each sum has a count beside it.
#
# How many entries are added one after another: on a CPU, the sum of a million in
# float32 may have two digits.
_BLOCK = 1024


def statistics(
    x: jax.Array, run: jax.Array | None, edges: tuple[float, ...] | None
) -> dict[str, Any]:
    """The fields of a `Summary` of an array of float32 or float64.

    The first pass over the array counts, and finds the smallest and the largest entry
    and about the mean. The others add up the deviations from that, which tells how far
    it was off, and their squares.

    `run`, if given, is a boolean for each entry along the leading axes: whether it is
    one at all. For `x` of `[iterations, features]`, it is `[iterations]`.
    """
    if run is not None:
        run = jnp.broadcast_to(leading(run, x.ndim), x.shape)
    # What is padded has a mask.
    blocks = _Blocks(*_in_blocks(x, run))
    # A sum of so few of them cannot overflow. That it may underflow does not matter.
    down = jnp.array(0.5 ** (_BLOCK.bit_length() + 1), x.dtype)
    ok = blocks.ok
    not_finite, zeros, low, high, total, *ran = blocks.reduce(
        _count(blocks.that_run(~jnp.isfinite(blocks.x))),
        _count(blocks.that_run(blocks.x == 0)),
        _extremum(blocks.x, ok, np.inf, lax.min),
        _extremum(blocks.x, ok, -np.inf, lax.max),
        _total(blocks.x * down, ok),
        *([] if run is None else [_count(blocks.run)]),
    )
    not_finite, zeros, *ran = map(_sum_of_counts, (not_finite, zeros, *ran))
    size = jnp.full_like(not_finite, x.size) if run is None else ran[0]
    finite = size - not_finite
    number = lambda bits: lax.bitcast_convert_type(_in_order(bits), x.dtype)
    low = jnp.min(number(low), initial=jnp.inf)
    high = jnp.max(number(high), initial=-jnp.inf)
    n = jnp.maximum(finite, 1).astype(x.dtype)
    about = lax.clamp(low, jnp.sum(total / n) / down, high)
    # If there are none, neither is finite; but then nothing asks.
    about = jnp.where(low <= high, about, 0)

    # A power of two as a scale rounds nothing, and the squares neither overflow nor
    # underflow.
    scale, down = _scale(jnp.maximum(jnp.abs(low), jnp.abs(high)))
    d = blocks.x * down - about * down
    off, squares = blocks.mean(d), blocks.mean(d * d)
    mean = jnp.clip(about + off * scale, low, high)
    std = jnp.sqrt(jnp.maximum(squares - off * off, 0)) * scale
    numbers = dict(mean=mean, std=std, rms=jnp.hypot(mean, std), min=low, max=high)
    nan = jnp.array(jnp.nan, x.dtype)
    return {k: jnp.where(finite > 0, v, nan) for k, v in numbers.items()} | dict(
        size=size,
        zeros=zeros,
        not_finite=not_finite,
        histogram=None if edges is None else _histogram(blocks, edges),
        edges=edges,
    )


# An array, where its reduction begins (a number: JAX cannot map over one that is an
# array), and how two of its entries are reduced.
_Part = tuple[Any, Any, Callable]


class _Blocks(NamedTuple):
    """The entries as they are reduced, neighbours at once: along `axes` there are about
    `_BLOCK` of them. `run` says which are there at all, if not all are."""

    x: jax.Array
    run: jax.Array | None
    axes: tuple[int, ...]

    @property
    def ok(self) -> jax.Array:
        return self.that_run(jnp.isfinite(self.x))

    def that_run(self, mask: jax.Array) -> jax.Array:
        return mask if self.run is None else mask & self.run

    def reduce(self, *parts: _Part) -> Sequence[Any]:
        """What is left of each block, for several parts at once."""
        arrays, initial, fns = zip(*parts)
        step = lambda a, b: tuple(fn(x, y) for fn, x, y in zip(fns, a, b))
        return lax.reduce(arrays, initial, step, self.axes)

    def mean(self, x: jax.Array) -> jax.Array:
        """Of what belongs to the finite entries; zero if there are none."""
        count, total = self.reduce(_count(self.ok), _total(x, self.ok))
        # XLA drops a count that nothing uses, and this one is.
        n = jnp.maximum(_sum_of_counts(count), 1).astype(x.dtype)
        return jnp.sum(total / n)


def _count(mask: Any) -> _Part:
    return mask.astype(jnp.uint32), np.uint32(0), lax.add


def _total(x: jax.Array, mask: jax.Array) -> _Part:
    zero = np.zeros((), x.dtype)
    return jnp.where(mask, x, zero), zero, lax.add


def _extremum(x: jax.Array, mask: jax.Array, nothing: float, fn: Callable) -> _Part:
    integer = jnp.dtype(f"int{x.dtype.itemsize * 8}")
    initial = _in_order(np.array(nothing, x.dtype).view(integer))[()]
    entries = _in_order(lax.bitcast_convert_type(x, integer))
    return jnp.where(mask, entries, initial), initial, fn


def _in_order(bits: Any) -> Any:
    """Of the bits of floating-point numbers, integers in the order of these; and back.
    Those of negative numbers are in the opposite order, so all but the sign of them are
    inverted."""
    info = np.iinfo(bits.dtype)
    return bits ^ ((bits >> np.array(info.bits - 1, bits.dtype)) & info.max)


def _sum_of_counts(count: jax.Array) -> jax.Array:
    return jnp.sum(count.astype(jnp.result_type(float)))


def _in_blocks(x, run):
    """Splits an axis so that some of the last axes have about `_BLOCK` entries. Also
    which axes these are."""
    done, axis = 1, x.ndim
    if x.size <= 4 * _BLOCK:
        return x, run, tuple(range(x.ndim))
    while axis > 0 and done < _BLOCK // 4:
        axis -= 1
        n = x.shape[axis]
        if done * n > _BLOCK:
            x, run = _split(x, run, axis, _BLOCK // done)
            axis += 1
        done *= max(x.shape[axis], 1)
    return x, run, tuple(range(axis, x.ndim))


def _split(x, run, axis: int, most: int):
    """Makes two axes of one, the second with at most `most` entries."""
    n = x.shape[axis]
    shards = _shards(x, axis)

    def rank(k):
        # Also where an axis is sharded and its type does not say so, the axis of blocks
        # should be one that can be sharded.
        return math.gcd(n // k, 64), k

    fits = [k for k in range(most, most // 4, -1) if n % (k * shards) == 0]
    if fits:
        k = max(fits, key=rank)
    else:
        # The entries that are added here are none.
        k = most
        pad = [(0, 0, 0)] * x.ndim
        pad[axis] = (0, -n % (k * shards), 0)
        if run is None:
            run = lax.full_like(x, True, bool)
        x = lax.pad(x, jnp.zeros((), x.dtype), pad)
        run = lax.pad(run, jnp.array(False), pad)
    shape = (*x.shape[:axis], x.shape[axis] // k, k, *x.shape[axis + 1 :])
    return x.reshape(shape), None if run is None else run.reshape(shape)


def _shards(x, axis: int) -> int:
    """Into how many an axis is sharded, if the type of the array says so."""
    sharding = jax.typeof(x).sharding
    names = sharding.spec[axis]
    names = names if isinstance(names, tuple) else (names,)
    return math.prod(sharding.mesh.shape[n] for n in names if isinstance(n, str))


def _scale(largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A power of two that is about as large, and its inverse."""
    info = jnp.finfo(largest.dtype)
    # The exponent is what is between the sign and the digits.
    bits = jnp.uint32 if info.bits == 32 else jnp.uint64
    exponent = ((1 << info.nexp) - 1) << info.nmant
    up = lax.bitcast_convert_type(largest, bits) & jnp.array(exponent, bits)
    up = lax.bitcast_convert_type(up, largest.dtype)
    # So that the inverse is neither infinite nor flushed to zero.
    least = float(info.tiny) * 2
    up = jnp.where(largest == 0, 1, jnp.clip(up, least, 1 / least))
    return up, 1 / up


@ft.partial(jax.custom_jvp, nondiff_argnums=(1,))
def root_of_sum(xs: jax.Array, axis) -> jax.Array:
    """The root of the sum of squares, whatever their size."""
    up, down = _scale(jnp.max(jnp.abs(xs), axis, keepdims=True, initial=0))
    return jnp.sqrt(jnp.sum((xs * down) ** 2, axis)) * jnp.squeeze(up, axis)


@root_of_sum.defjvp
def root_of_sum_jvp(axis, primals, tangents):
    (xs,), (ts,) = primals, tangents
    root = root_of_sum(xs, axis)
    at = jnp.expand_dims(jnp.where(root > 0, root, 1), axis)
    return root, jnp.sum(xs / at * ts, axis)


_EDGES = 8


def _histogram(blocks: _Blocks, edges: tuple[float, ...]):
    dtype = blocks.x.dtype
    # The smallest numbers of this dtype that are in the bins to the right of an edge.
    # So that rounding puts no entry on the other side of it.
    exact = np.asarray(edges)
    inf = np.asarray(np.inf, dtype)
    # An edge beyond the numbers of this dtype is infinite.
    with np.errstate(over="ignore"):
        at = exact.astype(dtype)
        at = np.where(at < exact, np.nextafter(at, inf), at)
        if at[-1] == exact[-1]:
            at[-1] = np.nextafter(at[-1], inf)
    # Some at a time: each is an operand of the reduction.
    right = []
    for some in np.array_split(at, -(-at.size // _EDGES)):
        right += blocks.reduce(*[_count(blocks.ok & (blocks.x >= e)) for e in some])
    counts = [_sum_of_counts(a - b) for a, b in zip(right[:-1], right[1:])]
    return jnp.stack(counts)
