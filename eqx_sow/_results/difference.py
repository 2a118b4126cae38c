"""How much two arrays differ, in numbers."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .at_hand import any_along, can_be_read, pieces
from .blocks import in_blocks
from .on_device import computed


class Numbers(NamedTuple):
    """Of the entries that are finite in both: the largest difference, and the sums of
    `abs(a)**2`, `abs(b)**2` and `a * conj(b)`, of entries divided by `scale`, of which
    norms and the cosine are made. And how many entries are beyond."""

    largest: Any = 0.0
    sums: tuple[Any, Any, Any] = (0.0, 0.0, 0.0)
    beyond: Any = 0
    scale: Any = 1.0


Tolerance = tuple[Any, Any]


def together(parts: Sequence[Numbers]) -> Numbers:
    scales = [float(p.scale) ** 2 for p in parts]
    total = lambda k: sum(float(p.sums[k]) * s for p, s in zip(parts, scales))
    largest = max(float(p.largest) for p in parts)
    sums = total(0), total(1), total(2)
    return Numbers(largest, sums, sum(int(p.beyond) for p in parts))


def _beyond(x: Any, y: Any, tolerance: Tolerance, xp: Any) -> Any:
    """Which entries are. Those that are not finite in both are, unless they are the
    same."""
    rtol, atol = tolerance
    both = xp.isfinite(x) & xp.isfinite(y)
    same = (x == y) | (xp.isnan(x) & xp.isnan(y))
    x, y = xp.where(both, x, 0), xp.where(both, y, 0)
    return xp.where(both, xp.abs(x - y) > atol + rtol * xp.abs(y), ~same)


def _of_entries(x: Any, y: Any, scale: Any, xp: Any) -> tuple[Any, tuple[Any, ...]]:
    """Of each entry, the difference, and what is summed."""
    both = xp.isfinite(x) & xp.isfinite(y)
    x, y = xp.where(both, x, 0), xp.where(both, y, 0)
    off = xp.abs(x - y)
    x, y = x / scale, y / scale
    return off, (xp.abs(x) ** 2, xp.abs(y) ** 2, (x * xp.conj(y)).real)


def _keys(x: Any, y: Any, xp: Any) -> tuple[Any, Any]:
    """Keys that differ as numbers that do, whatever the tolerance is."""
    a, b = (xp.asarray(jax.random.key_data(k)) for k in (x, y))
    off = xp.any(a != b, tuple(range(x.ndim, a.ndim)))
    return xp.where(off, np.float32(np.nan), 0), xp.zeros(x.shape, np.float32)


def is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def difference(
    a: Any, b: Any, tolerance: Tolerance, time: tuple[int, ...]
) -> tuple[Numbers, Any]:
    """Starts to compute them; and where some entries are beyond, along these axes."""
    of_pair = _read if can_be_read((a, b)) else _on_device
    return of_pair(a, b, tolerance, time)


# How many entries NumPy takes at once, so that they stay in the cache.
_AT_ONCE = 2**16


def _read(
    a: Any, b: Any, tolerance: Tolerance, time: tuple[int, ...]
) -> tuple[Numbers, Any]:
    """Of arrays in the memory of the host, in float64."""
    a, b = _keys(a, b, np) if is_key(a) else (a, b)
    bad = np.zeros([np.shape(a)[k] for k in time], bool)
    whole, parts = np.asarray(b), [Numbers()]
    for index, mine in pieces(a):
        flat, other, beyond = mine.reshape(-1), whole[index].reshape(-1), []
        for start in range(0, flat.size, _AT_ONCE):
            here = slice(start, start + _AT_ONCE)
            x, y = _wide(flat[here]), _wide(other[here])
            off, (xx, yy, xy) = _of_entries(x, y, 1.0, np)
            beyond.append(_beyond(x, y, tolerance, np))
            sums = np.sum(xx), np.sum(yy), np.sum(xy)
            parts.append(Numbers(np.max(off), sums, np.sum(beyond[-1])))
        far = np.concatenate([np.zeros(0, bool), *beyond]).reshape(mine.shape)
        bad[tuple(index[k] for k in time)] |= any_along(far, time)
    return together(parts), bad


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _on_device(
    a: Any, b: Any, tolerance: Tolerance, time: tuple[int, ...]
) -> tuple[Numbers, Any]:
    """The same of arrays that are spread over processes, or on an accelerator."""
    goes_to_b = isinstance(b, jax.Array) and can_be_read(a)
    a, b = (_beside(a, b), b) if goes_to_b else (a, _beside(b, a))
    rtol, atol = map(np.float32, tolerance)
    with jax.debug_nans(False):
        return computed(_difference(time), (a, b), rtol, atol)


def _beside(x: Any, other: jax.Array) -> jax.Array:
    """An array on the devices of another one of its shape, and sharded like that."""
    if isinstance(x, jax.Array) and x.sharding == other.sharding:
        return x
    if can_be_read(x) and not is_key(x):
        # Each process puts its part there.
        whole = np.asarray(x)
        return jax.make_array_from_callback(
            whole.shape, other.sharding, lambda index: whole[index]
        )
    return jax.device_put(x, other.sharding)


@ft.lru_cache(maxsize=64)
def _difference(time: tuple[int, ...]) -> Callable[..., tuple[Numbers, jax.Array]]:
    def fn(pair: tuple[Any, Any], rtol: Any, atol: Any) -> tuple[Numbers, jax.Array]:
        a, b = pair
        a, b = _keys(a, b, jnp) if is_key(a) else (a, b)
        x, y = (_as_float(z) for z in (a, b))
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.promote_types(x.dtype, y.dtype)
        x, y = x.astype(dtype), y.astype(dtype)
        tolerance = rtol.astype(x.real.dtype), atol.astype(x.real.dtype)
        size = [jnp.where(jnp.isfinite(z), jnp.abs(z), 0) for z in (x, y)]
        # So that no square overflows.
        scale = jnp.max(jnp.maximum(size[0], size[1]), initial=0)
        scale = jnp.where(scale > 0, scale, 1)
        far = _beyond(x, y, tolerance, jnp)
        bad = jnp.any(far, [k for k in range(far.ndim) if k not in time])
        (x, block), (y, _) = in_blocks(x), in_blocks(y)
        off, (xx, yy, xy) = _of_entries(x, y, scale.astype(dtype), jnp)
        total = lambda z: jnp.sum(jnp.sum(z, block))
        sums = total(xx), total(yy), total(xy)
        beyond = jnp.sum(far, dtype=np.uint32)
        return Numbers(jnp.max(off, initial=0), sums, beyond, scale), bad

    return fn


def _as_float(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating) or x.dtype.itemsize > 4:
        return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(float)
    return x.astype(jnp.float32)
