"""How several summaries are merged into one."""

import dataclasses as dc
from collections.abc import Callable
from typing import Any

import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .blocks import one_by_one


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
