"""The reductions behind `summarize` and `tabulate`.

XLA on a CPU computes several reductions of one array in a single pass, without writing
another array of its size, if they are one `lax.reduce` of several operands. It uses
vector instructions, and is ten times as fast, if exactly one of these is a sum of
floating-point numbers and all others are integers. So each pass below has one sum and
some counts, and finds the smallest and the largest entry as integers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.lax as lax
import jax.numpy as jnp
import numpy as np

from .._arrays import spec_of


# How many entries are added one after another. The sum of a million in float32 would
# have only two digits.
_BLOCK = 1024


def as_real(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.abs(x)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.float64 if x.dtype.itemsize == 8 else jnp.float32)
    return x.astype(jnp.result_type(float))


def statistics(x: jax.Array, edges: tuple[float, ...] | None) -> dict[str, Any]:
    """The fields of a `Summary` of an array of float32 or float64.

    The first pass over the array counts, finds the smallest and the largest entry, and
    adds all up, which gives about the mean. The second one adds up the deviations from
    that, so it is known how far it was off. The third one adds up their squares.
    """
    size = x.size
    x, axes = _in_blocks(x)
    padding = x.size - size

    finite = jnp.isfinite(x)
    # A sum of so few entries that are so small cannot overflow.
    small = jnp.array(1 / (4 * _BLOCK), x.dtype)
    bad, zeros, low, high, total = _reduce(
        axes,
        _count(~finite),
        _count(x == 0),
        _extremum(x, finite, np.inf, lax.min),
        _extremum(x, finite, -np.inf, lax.max),
        _total(x * small, finite),
    )
    # As integers, since one in a billion matters. Blocks are padded by NaN.
    not_finite = jnp.sum(bad, dtype=jnp.uint32) - np.uint32(padding)
    not_finite = not_finite.astype(jnp.result_type(float))
    size = jnp.full_like(not_finite, size)
    entries = jnp.maximum(size - not_finite, 1).astype(x.dtype)
    low = jnp.min(_as_float(low, x.dtype), initial=jnp.inf)
    high = jnp.max(_as_float(high, x.dtype), initial=-jnp.inf)
    about = jnp.clip(jnp.sum(total / entries) / small, low, high)
    about = jnp.where(low <= high, about, 0)

    # Half of a deviation cannot overflow. With the scale, its square cannot either.
    scale = in_range(jnp.maximum(jnp.abs(low), jnp.abs(high)))
    deviation = (x / 2 - about / 2) * (1 / scale)

    def mean(y: jax.Array) -> jax.Array:
        n, total = _reduce(axes, _count(finite), _total(y, finite))
        # XLA drops a count that nothing uses.
        total = jnp.where(n > 0, total, 0)
        return jnp.sum(total / entries)

    off, squares = mean(deviation), mean(deviation**2)
    mean_ = jnp.clip(about + 2 * off * scale, low, high)
    std = 2 * jnp.sqrt(jnp.maximum(squares - off**2, 0)) * scale
    numbers = dict(mean=mean_, std=std, rms=jnp.hypot(mean_, std), min=low, max=high)
    some = low <= high
    return {k: jnp.where(some, v, jnp.nan) for k, v in numbers.items()} | dict(
        size=size,
        zeros=_sum_of_counts(zeros),
        not_finite=not_finite,
        histogram=None if edges is None else _histogram(x, axes, edges),
        edges=edges,
    )


def in_range(scale: Any) -> Any:
    """A scale so that neither it nor its inverse is flushed to zero or overflows."""
    least = 4 * float(jnp.finfo(scale.dtype).tiny)
    return scale.clip(least, 1 / least)


# An array, the number where its reduction begins, and how two of its entries are
# reduced. (JAX has no rule for a batch of reductions that begin with a traced number.)
_Part = tuple[Any, Any, Callable]


def _reduce(axes: tuple[int, ...], *parts: _Part) -> Sequence[Any]:
    arrays, initial, fns = zip(*parts)
    step = lambda a, b: tuple(fn(x, y) for fn, x, y in zip(fns, a, b))
    return lax.reduce(arrays, initial, step, axes)


def _count(mask: Any) -> _Part:
    return mask.astype(jnp.uint32), np.uint32(0), lax.add


def _total(x: jax.Array, mask: jax.Array) -> _Part:
    return jnp.where(mask, x, 0), np.zeros((), x.dtype), lax.add


def _extremum(x: jax.Array, mask: jax.Array, nothing: float, fn: Callable) -> _Part:
    integer = jnp.dtype(f"int{x.dtype.itemsize * 8}")
    initial = _in_order(np.array(nothing, x.dtype).view(integer))[()]
    entries = _in_order(lax.bitcast_convert_type(x, integer))
    return jnp.where(mask, entries, initial), initial, fn


def _as_float(bits: jax.Array, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(_in_order(bits), dtype)


def _in_order(bits: Any) -> Any:
    """From the bits of floating-point numbers, integers in the order of these; and
    back. Those of negative numbers are in the opposite order, so all but the sign of
    them are inverted."""
    info = np.iinfo(bits.dtype)
    return bits ^ ((bits >> np.array(info.bits - 1, bits.dtype)) & info.max)


def _sum_of_counts(count: jax.Array) -> jax.Array:
    return jnp.sum(count.astype(jnp.result_type(float)))


def _in_blocks(x: jax.Array) -> tuple[jax.Array, tuple[int, ...]]:
    """Splits an axis, so that some of the last axes have about `_BLOCK` entries. Also
    says which axes these are: for `[8, 4096]`, `[8, 4, 1024]` and `(2,)`."""
    if x.size <= 4 * _BLOCK:
        return x, tuple(range(x.ndim))
    entries, axis = 1, x.ndim
    while axis > 0 and entries < _BLOCK // 4:
        axis -= 1
        if entries * x.shape[axis] > _BLOCK:
            x = _split(x, axis, _BLOCK // entries)
            axis += 1
        entries *= max(x.shape[axis], 1)
    return x, tuple(range(axis, x.ndim))


def _split(x: jax.Array, axis: int, most: int) -> jax.Array:
    """Makes two axes of one, the second with at most `most` entries. If the length has
    no divisor that is large enough, the axis is padded by NaN."""
    names = spec_of(x)[axis] or ()
    names = names if isinstance(names, tuple) else (names,)
    # The axis of the blocks has to be one that can be sharded as the axis was.
    shards = math.prod(jax.typeof(x).sharding.mesh.shape[name] for name in names)
    n = x.shape[axis]
    # Where the type does not say that it is sharded, most meshes have powers of two.
    suits = lambda k: (math.gcd(n // k, 64), k)
    divisors = (k for k in range(most, most // 4, -1) if n % (k * shards) == 0)
    k = max(divisors, key=suits, default=None)
    if k is None:
        k = most
        pad = [(0, 0, 0)] * x.ndim
        pad[axis] = (0, -n % (k * shards), 0)
        x = lax.pad(x, jnp.array(jnp.nan, x.dtype), pad)
    return x.reshape(*x.shape[:axis], -1, k, *x.shape[axis + 1 :])


def _histogram(x: jax.Array, axes: tuple[int, ...], edges: tuple[float, ...]):
    exact = np.asarray(edges)
    # For each edge, the smallest number of this dtype to the right of it, so that
    # rounding puts no entry on the other side. Beyond the numbers of the dtype that is
    # infinity. The last bin includes its right edge.
    with np.errstate(over="ignore"):
        rounded = exact.astype(x.dtype)
        above = np.nextafter(rounded, np.array(np.inf, x.dtype))
    from_edge = np.where(rounded < exact, above, rounded)
    from_edge[-1] = np.where(rounded[-1] <= exact[-1], above[-1], rounded[-1])
    parts = [_count(jnp.isfinite(x) & (x >= edge)) for edge in from_edge]
    counts = _reduce(axes, *parts)
    bins = [_sum_of_counts(a - b) for a, b in zip(counts[:-1], counts[1:])]
    return jnp.stack(bins)
