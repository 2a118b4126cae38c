"""How much two arrays differ, in numbers."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .leaves import is_key
from .numbers import any_along, can_be_read, computed, on_host, pieces
from .reductions import in_blocks


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
    # The norm of numbers near the largest ones is infinite: the table has none.
    with np.errstate(over="ignore"):
        scales = [np.float64(p.scale) ** 2 for p in parts]
        total = lambda k: sum(float(p.sums[k]) * s for p, s in zip(parts, scales))
        sums = total(0), total(1), total(2)
    largest = max(float(p.largest) for p in parts)
    return Numbers(largest, sums, sum(int(p.beyond) for p in parts))


def _of_floats(x: Any, y: Any, tolerance: Tolerance, xp: Any) -> tuple[Any, Any]:
    """The difference of each two, zero unless both are finite; and which are beyond.
    Those that are not finite in both are, unless they are the same."""
    rtol, atol = tolerance
    both = xp.isfinite(x) & xp.isfinite(y)
    same = (x == y) | (xp.isnan(x) & xp.isnan(y))
    x, y = xp.where(both, x, 0), xp.where(both, y, 0)
    off = xp.abs(x - y)
    return off, xp.where(both, off > atol + rtol * xp.abs(y), ~same)


def _summed(x: Any, y: Any, scale: Any, xp: Any) -> tuple[Any, ...]:
    both = xp.isfinite(x) & xp.isfinite(y)
    x, y = xp.where(both, x, 0) / scale, xp.where(both, y, 0) / scale
    return xp.abs(x) ** 2, xp.abs(y) ** 2, (x * xp.conj(y)).real


def _are_integers(a: Any, b: Any) -> bool:
    return all(z.dtype == bool or jnp.issubdtype(z.dtype, jnp.integer) for z in (a, b))


def _of_integers(x: Any, y: Any, wide: Any, xp: Any) -> tuple[Any, Any]:
    """The difference of each two, as far as a float can hold it, and whether there is
    one. `wide` are the longest integers, signed and unsigned, and the longest float.

    With its sign in front, an integer of any type fits into the unsigned one, modulo
    2**32 or 2**64. There, two of the same sign are in the same order, and their
    difference is what it is."""
    signed, unsigned, real = wide
    bits, below, size = [], [], []
    for z in (x, y):
        has_sign = jnp.issubdtype(z.dtype, jnp.signedinteger)
        z = z.astype(signed) if has_sign else z.astype(unsigned)
        below.append(z < 0 if has_sign else xp.zeros_like(z, bool))
        bits.append(z.astype(unsigned))
        size.append(xp.abs(z.astype(real)))
    (u, v), apart = bits, below[0] != below[1]
    off = xp.where(u > v, u - v, v - u).astype(real)
    return xp.where(apart, size[0] + size[1], off), apart | (u != v)


def _keys(x: Any, y: Any, xp: Any) -> tuple[Any, Any]:
    """Which keys differ, and what they would be if they did not."""
    a, b = (xp.asarray(jax.random.key_data(k)) for k in (x, y))
    off = xp.any(a != b, tuple(range(x.ndim, a.ndim)))
    return off, xp.zeros_like(off)


def difference(
    a: Any, b: Any, tolerance: Tolerance, time: tuple[int, ...]
) -> tuple[Numbers, Any]:
    """Starts to compute them; and where some entries are beyond, along these axes."""
    if can_be_read((a, b)):
        return _read(a, b, tolerance, time)
    if not is_key(a):
        a, b = _narrowed(a), _narrowed(b)
        if not _fit(a, b):
            a, b = np.asarray(on_host(a)), np.asarray(on_host(b))
            return _read(a, b, tolerance, time)
    return _on_device(a, b, tolerance, time)


def _narrowed(x: Any) -> Any:
    """An array of the host, in 32 bits if those are all that JAX has, and nothing is
    lost."""
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    if isinstance(x, jax.Array) or x.dtype == dtype:
        return x
    with np.errstate(all="ignore"):
        narrow = x.astype(dtype)
        is_same = np.all((narrow == x) | ((narrow != narrow) & (x != x)))
    return narrow if is_same else x


def _fit(a: Any, b: Any) -> bool:
    """Whether a device has numbers that hold all of these."""
    known = all(jax.dtypes.canonicalize_dtype(x.dtype) == x.dtype for x in (a, b))
    long = [_are_integers(x, x) and x.dtype.itemsize >= 4 for x in (a, b)]
    return known and (_are_integers(a, b) or not any(long))


# How many entries NumPy takes at once, so that they stay in the cache.
_AT_ONCE = 2**16


def _read(
    a: Any, b: Any, tolerance: Tolerance, time: tuple[int, ...]
) -> tuple[Numbers, Any]:
    """The numbers of two arrays in the memory of the host, in float64; and at which of
    the indices along `time` any entry is beyond the tolerance."""
    a, b = _keys(a, b, np) if is_key(a) else (a, b)
    bad = np.zeros([np.shape(a)[k] for k in time], bool)
    whole, parts, are_integers = np.asarray(b), [Numbers()], _are_integers(a, b)
    for index, mine in pieces(a):
        flat, other = mine.reshape(-1), whole[index].reshape(-1)
        beyond = np.zeros(flat.shape, bool)
        for start in range(0, flat.size, _AT_ONCE):
            here = slice(start, start + _AT_ONCE)
            x, y = _wide(flat[here]), _wide(other[here])
            with np.errstate(over="ignore"):
                if are_integers:
                    wide = np.int64, np.uint64, np.float64
                    off, far = _of_integers(flat[here], other[here], wide, np)
                else:
                    off, far = _of_floats(x, y, tolerance, np)
                xx, yy, xy = map(np.sum, _summed(x, y, 1.0, np))
            beyond[here] = far
            parts.append(Numbers(np.max(off), (xx, yy, xy), np.sum(far)))
        far = any_along(beyond.reshape(mine.shape), time)
        bad[tuple(index[k] for k in time)] |= far
    return together(parts), bad


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _on_device(
    a: Any, b: Any, tolerance: Tolerance, time: tuple[int, ...]
) -> tuple[Numbers, Any]:
    """What `_read` returns, for arrays that are spread over processes, or are on an
    accelerator."""
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
        if _are_integers(a, b):
            wide = *map(jax.dtypes.canonicalize_dtype, (np.int64, np.uint64)), dtype
            off, far = _of_integers(a, b, wide, jnp)
        else:
            off, far = _of_floats(x, y, tolerance, jnp)
        bad = jnp.any(far, [k for k in range(far.ndim) if k not in time])
        (x, block), (y, _) = in_blocks(x), in_blocks(y)
        summed = _summed(x, y, scale.astype(dtype), jnp)
        xx, yy, xy = (jnp.sum(jnp.sum(z, block)) for z in summed)
        beyond = jnp.sum(far, dtype=np.uint32)
        largest = jnp.max(off, initial=0)
        return Numbers(largest, (xx, yy, xy), beyond, scale), bad

    return fn


def _as_float(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating) or x.dtype.itemsize > 4:
        return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(float)
    return x.astype(jnp.float32)
