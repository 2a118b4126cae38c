"""Reductions of whole arrays, in blocks: exact enough for a billion entries, without a
copy of them; and how several summaries are merged into one."""

import dataclasses as dc
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._arrays import spec_of


# What is reduced, and how: by "sum", "min" or "max".
_Part = tuple[Any, str]
_START = {"sum": 0, "min": np.inf, "max": -np.inf}
_OF_TWO = {"sum": lax.add, "min": lax.min, "max": lax.max}


def one_by_one(axes: tuple[int, ...], *parts: _Part, xp: Any = jnp) -> list[Any]:
    return [getattr(xp, how)(x, axes, initial=_START[how]) for x, how in parts]


def by_block(
    block: tuple[int, ...], axes: tuple[int, ...], *parts: _Part
) -> Sequence[Any]:
    """Those of all axes: first those of each block, then of all blocks.

    XLA on a CPU reads an array once for all of these, and writes no other array of its
    size, if they are one `lax.reduce` of several operands.
    """
    # JAX has no rule for a batch of reductions that begin with a traced number.
    starts = [np.array(_START[how], x.dtype) for x, how in parts]
    fns = [_OF_TWO[how] for _, how in parts]
    both = lambda a, b: tuple(fn(x, y) for fn, x, y in zip(fns, a, b))
    of_blocks = lax.reduce([x for x, _ in parts], starts, both, block)
    # Of all entries, there may be more than a `uint32` can hold.
    wide = lambda x: x.astype(jnp.result_type(float)) if x.dtype == np.uint32 else x
    of_each = [(wide(x), how) for x, (_, how) in zip(of_blocks, parts)]
    return one_by_one(axes[: -len(block) or None], *of_each)


# How many entries are added up at once. XLA on a CPU adds one after the other: of 64
# million numbers between 10 and 11 in float32, the `std` would be wrong by 0.2 percent.
_BLOCK = 1024


def in_blocks(x: jax.Array) -> tuple[jax.Array, tuple[int, ...]]:
    """Splits an axis, so that some of the last axes have about `_BLOCK` entries. Also
    says which axes these are: for `[8, 4096]`, `[8, 4, 1024]` and `(2,)`."""
    # `jax.export` has symbolic sizes, which cannot be compared.
    if isinstance(x.size, int) and x.size <= 4 * _BLOCK:
        return x, tuple(range(x.ndim))
    entries, axis = 1, x.ndim
    while axis > 0 and entries < _BLOCK // 4:
        axis -= 1
        n = x.shape[axis]
        if not isinstance(n, int) or entries * n > _BLOCK:
            x = _split(x, axis, _BLOCK // entries)
            axis += 1
        entries *= max(x.shape[axis], 1)
    return x, tuple(range(axis, x.ndim))


def _split(x: jax.Array, axis: int, most: int) -> jax.Array:
    """Makes two axes of one, the second with at most `most` entries. If the length has
    no divisor that is large enough, the axis is padded by NaN, or by `False`."""
    names = spec_of(x)[axis] or ()
    names = names if isinstance(names, tuple) else (names,)
    # The axis of the blocks has to be one that can be sharded as the axis was.
    shards = math.prod(jax.typeof(x).sharding.mesh.shape[name] for name in names)
    n = x.shape[axis]
    # Where the type does not say that it is sharded, most meshes have powers of two.
    suits = lambda k: (math.gcd(n // k, 64), k)
    each = range(most, most // 4, -1) if isinstance(n, int) else ()
    divisors = (k for k in each if n % (k * shards) == 0)
    k = max(divisors, key=suits, default=None)
    if k is None:
        k = most
        nothing = False if x.dtype == bool else jnp.nan
        pad = [(0, 0, 0)] * x.ndim
        whole = k * shards
        pad[axis] = (0, (n + whole - 1) // whole * whole - n, 0)
        x = lax.pad(x, jnp.array(nothing, x.dtype), pad)
    return x.reshape(*x.shape[:axis], x.shape[axis] // k, k, *x.shape[axis + 1 :])


def counts_in_bins(x: jax.Array, block: tuple[int, ...], edges: tuple[float, ...]):
    """How many entries are in each bin of a histogram."""
    exact = np.asarray(edges)
    # For each edge, the smallest number of this dtype to the right of it, so that
    # rounding puts no entry on the other side. Beyond the numbers of the dtype that is
    # infinity. The last bin includes its right edge.
    with np.errstate(over="ignore"):
        rounded = exact.astype(x.dtype)
        above = np.nextafter(rounded, np.array(np.inf, x.dtype))
    from_edge = np.where(rounded < exact, above, rounded)
    from_edge[-1] = np.where(rounded[-1] <= exact[-1], above[-1], rounded[-1])
    masks = [jnp.isfinite(x) & (x >= edge) for edge in from_edge]
    counts = [(mask.astype(jnp.uint32), "sum") for mask in masks]
    right_of = by_block(block, tuple(range(x.ndim)), *counts)
    return jnp.stack([a - b for a, b in zip(right_of[:-1], right_of[1:])])


# --- summaries ---
# A `Summary`, of NumPy's arrays or JAX's. Its class has methods that use this.
_Summary = Any


@jax.jit
def added(a: _Summary, b: _Summary) -> _Summary:
    def both(x, y):
        # With 64 bits, `Summary.empty` has more than a summary of float32.
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.promote_types(jnp.result_type(x), jnp.result_type(y))
        return jnp.stack([jnp.asarray(x, dtype), jnp.asarray(y, dtype)])

    return merged_summary(jtu.tree_map(both, a, b), (0,))


def merged_summary(
    s: _Summary, axes: tuple[int, ...], reduce: Callable = one_by_one, xp: Any = jnp
) -> _Summary:
    """One summary of those along some axes, by Chan's formula."""
    dtype, n = s.mean.dtype, s.size - s.not_finite
    some, nan = n > 0, np.array(np.nan, dtype)
    total, zeros, not_finite, low, high = reduce(
        axes,
        (n, "sum"),
        (s.zeros, "sum"),
        (s.not_finite, "sum"),
        (xp.where(some, s.min, np.inf), "min"),
        (xp.where(some, s.max, -np.inf), "max"),
    )
    any_ = total > 0
    expand = lambda x: xp.expand_dims(x, axes)
    weights = n.astype(dtype) / expand(xp.maximum(total, 1).astype(dtype))

    def average(x):
        # The sum of `n` makes it several operands, see `by_block`.
        total, mean = reduce(axes, (n, "sum"), (weights * x, "sum"))
        return xp.where(total > 0, mean, 0)

    # With this scale no square overflows. It is a power of two, so nothing is rounded.
    scale = _in_range(xp.maximum(xp.abs(low), xp.abs(high)))
    scale = lax.stop_gradient(scale) if xp is jnp else scale
    mantissa, _ = xp.frexp(scale)
    scale, inverse = scale / mantissa, mantissa / scale
    scaled = lambda x: xp.where(some, x, 0) * expand(inverse)
    # Where it is zero, so is its gradient.
    root = lambda x: xp.where(x > 0, xp.sqrt(xp.where(x > 0, x, 1)), 0)
    mean, std = scaled(s.mean), scaled(s.std)
    about = xp.clip(average(mean), low * inverse, high * inverse)
    about = xp.where(any_, about, 0)
    deviation = mean - expand(about)
    off = average(deviation)
    new_mean, variance = about + off, average(std**2 + deviation**2) - off**2
    numbers = dict(
        mean=new_mean * scale,
        std=root(variance) * scale,
        rms=root(variance + new_mean**2) * scale,
        min=low,
        max=high,
    )
    return dc.replace(
        s,
        size=total + not_finite,
        **{k: xp.where(any_, x, nan) for k, x in numbers.items()},
        zeros=zeros,
        not_finite=not_finite,
        histogram=None if s.histogram is None else xp.sum(s.histogram, axes),
    )


merged_jit = jax.jit(merged_summary, static_argnums=1)


# Known here, since NumPy warns where it first learns this in a callback, in a thread
# that flushes small numbers to zero.
_LEAST = {np.dtype(x): 4 * float(np.finfo(x).tiny) for x in ("float32", "float64")}


def _in_range(scale: Any) -> Any:
    """A scale so that neither it nor its inverse is flushed to zero or overflows."""
    least = _LEAST[scale.dtype]
    return scale.clip(least, 1 / least)
