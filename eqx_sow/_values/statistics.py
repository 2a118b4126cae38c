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


# How many entries are added one after another. XLA's reductions of several arrays at
# once write nothing else to memory, but on a CPU they go through the entries in order:
# the sum of a million in float32 has two digits.
_BLOCK = 1024


class Sums(NamedTuple):
    """What is left of an array once it has been reduced: numbers."""

    size: Any
    zeros: Any
    not_finite: Any
    min: Any
    max: Any
    # The mean, roughly, and a power of two that is about as large as the entries.
    about: Any
    scale: Any
    # The means of the deviations from `about`, divided by `scale`, and of their
    # squares.
    first: Any
    second: Any


def sums(x: jax.Array, run: jax.Array | None = None) -> Sums:
    """Of all entries of an array of float32 or float64.

    `run`, if given, is a boolean for each entry along the leading axes: whether it is
    one at all.
    """
    return _sums(x.size, _Blocks(x, run))


def sums_of_blocks(x: jax.Array, first: jax.Array) -> Sums:
    """Of some blocks of a large array, from the `first` on: arrays of one axis."""
    some, rows, width = division(x.size)
    x = x.reshape(-1, width)
    block = lambda i: _sums(rows * width, _Rows(x, i * rows, rows))
    return lax.map(block, first + jnp.arange(some, dtype=first.dtype))


def division(size: int) -> tuple[int, int, int]:
    """How a large array is divided among the cores of a CPU: how many blocks at a time,
    the rows of a block, and the entries of a row; zeros if it is not. A block fits the
    second cache of a core, the sums of its rows fit the first."""

    def most(n, least, of):
        return next((k for k in range(n, least - 1, -1) if of % k == 0), 0)

    width = most(512, 128, size) if size >= 2**18 else 0
    rows = most(512, 16, size // width) if width else 0
    return (most(16, 1, size // (width * rows)), rows, width) if rows else (0, 0, 0)


def sums_and_histogram(
    x: jax.Array, edges: tuple[float, ...] | None
) -> tuple[Sums, jax.Array | None]:
    blocks = _Blocks(x)
    s = _sums(x.size, blocks)
    return s, None if edges is None else _histogram(blocks, edges)


class _Some(NamedTuple):
    """Entries, and which of them are there at all, if not all are."""

    x: jax.Array
    run: jax.Array | None = None

    @property
    def ok(self):
        return self.where(jnp.isfinite(self.x))

    def where(self, mask):
        return mask if self.run is None else mask & self.run


# An array, where its reduction begins (a number: JAX cannot map over one that is an
# array), and how two of its entries are reduced.
_Part = tuple[Any, Any, Callable]


class _Blocks:
    """The entries as they are reduced: neighbours at once."""

    def __init__(self, x: jax.Array, run: jax.Array | None = None):
        if run is not None:
            run = jnp.broadcast_to(leading(run, x.ndim), x.shape)
        # What is padded has a mask.
        self.whole = run is None
        self.dtype = x.dtype
        entries, mask, self._axes = _in_blocks(x, run)
        self._some = _Some(entries, mask)

    def reduce(self, parts_of: Callable[[_Some], Sequence[_Part]]) -> Sequence[Any]:
        """What is left of several parts, that take as many reductions more."""
        arrays, initial, fns = zip(*parts_of(self._some))
        if math.prod(arrays[0].shape[a] for a in self._axes) == 1:
            return [lax.squeeze(x, self._axes) for x in arrays]
        step = lambda a, b: tuple(fn(x, y) for fn, x, y in zip(fns, a, b))
        return lax.reduce(arrays, initial, step, self._axes)


class _Rows:
    """The same for some rows of an array on a CPU, one after another: XLA makes vector
    instructions of that, and is several times as fast."""

    whole = True

    def __init__(self, x: jax.Array, first: jax.Array, rows: int):
        self._row = lambda i: as_real(lax.dynamic_index_in_dim(x, first + i, 0, False))
        self._rows = rows
        self.dtype = jax.eval_shape(as_real, x).dtype

    def reduce(self, parts_of: Callable[[_Some], Sequence[_Part]]) -> Sequence[Any]:
        def step(i, acc):
            parts = parts_of(_Some(self._row(i)))
            return [fn(a, new) for a, (new, _, fn) in zip(acc, parts)]

        first = [new for new, _, _ in parts_of(_Some(self._row(0)))]
        return lax.fori_loop(np.int32(1), np.int32(self._rows), step, first)


def _count(mask) -> _Part:
    return mask.astype(jnp.uint32), np.uint32(0), lax.add


def _total(x, mask) -> _Part:
    zero = np.zeros((), x.dtype)
    return jnp.where(mask, x, zero), zero, lax.add


def _sums(whole_size: int, blocks: _Blocks | _Rows) -> Sums:
    dtype = blocks.dtype
    inf = np.array(np.inf, dtype)
    # A sum of so few of them cannot overflow. That it may underflow does not matter.
    down = jnp.array(0.5 ** (_BLOCK.bit_length() + 1), dtype)

    def first_parts(some):
        x, ok = some.x, some.ok
        there = [] if blocks.whole else [_count(ok)]
        return [
            *there,
            _count(some.where(~jnp.isfinite(x))),
            _count(some.where(x == 0)),
            (jnp.where(ok, x, inf), inf, lax.min),
            (jnp.where(ok, x, -inf), -inf, lax.max),
            _total(x * down, ok),
        ]

    *there, bad, zeros, low, high, total = blocks.reduce(first_parts)
    counts = jnp.result_type(float)
    *there, bad, zeros = (jnp.sum(c.astype(counts)) for c in (*there, bad, zeros))
    size = there[0] + bad if there else jnp.full_like(bad, whole_size)
    n = size - bad
    low, high = jnp.min(low, initial=jnp.inf), jnp.max(high, initial=-jnp.inf)
    n = jnp.maximum(n, 1).astype(dtype)
    about = lax.clamp(low, jnp.sum(total / n) / down, high)
    # If there are none, neither is finite; but then nothing asks.
    about = jnp.where(low <= high, about, 0)

    # Deviations from about the mean tell how far that was off, too. A power of two as
    # a scale rounds nothing, and the squares neither overflow nor underflow.
    scale, down = _scale(jnp.maximum(jnp.abs(low), jnp.abs(high)))

    def second_parts(some):
        d = some.x * down - about * down
        return [_total(d, some.ok), _total(d * d, some.ok)]

    first, second = blocks.reduce(second_parts)
    first, second = jnp.sum(first / n), jnp.sum(second / n)
    return Sums(size, zeros, bad, low, high, about, scale, first, second)


def together(s: Sums) -> Sums:
    """Of all parts of an array, from those of each, by NumPy: Chan's formula."""
    entries = s.size - s.not_finite
    some = entries > 0
    weights = entries / max(entries.sum(), 1)
    scale = s.scale.max(where=some, initial=float(np.finfo(s.scale.dtype).tiny))
    by = np.where(some, s.scale, 0) / scale
    means = np.where(some, s.about, 0) / scale + s.first * by
    about = np.sum(weights * means)
    squares = (s.second - s.first**2) * by**2 + (means - about) ** 2
    return Sums(
        s.size.sum(),
        s.zeros.sum(),
        s.not_finite.sum(),
        s.min.min(),
        s.max.max(),
        about * scale,
        scale,
        np.zeros(()),
        np.sum(weights * squares),
    )


def finish(s: Sums, xp: Any) -> tuple[Any, ...]:
    """Mean, deviation, root of the mean square, least and greatest, by `jax.numpy` or
    by `numpy`."""
    some = s.size > s.not_finite
    mean = xp.clip(s.about + s.first * s.scale, s.min, s.max)
    std = xp.sqrt(xp.maximum(s.second - s.first * s.first, 0)) * s.scale
    stats = mean, std, xp.hypot(mean, std), s.min, s.max
    return tuple(xp.where(some, x, xp.asarray(xp.nan, mean.dtype)) for x in stats)


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
    dtype = blocks.dtype
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
    # Several at once: what XLA reduces alone it first writes to memory, on a CPU.
    right = []
    for some in np.array_split(at, -(-at.size // _EDGES)):
        right += blocks.reduce(
            lambda entries, some=some: [
                _count(entries.ok & (entries.x >= e)) for e in some
            ]
        )
    counts = jnp.result_type(float)
    return jnp.stack(
        [jnp.sum((a - b).astype(counts)) for a, b in zip(right[:-1], right[1:])]
    )
