"""Numbers of arrays, computed where these are: on their devices, or at hand.

An array on a CPU can be read in place. So its entries go in rows of one length through
a program that is compiled once, whatever the shapes of the arrays are. To compile a
reduction for each shape takes a third of a second for each.
"""

import contextlib
import dataclasses as dc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .. import _compat
from .leaves import long_as_float
from .summarize import merged_on_host, Summary, summary_of_rows


_ROW = 1024
# How many rows the program takes at once: many of a large array, or a few.
_MANY, _FEW = 1024, 64


def is_at_hand(x: Any) -> bool:
    """Whether the numbers of an array are in this process. A shape has none."""
    if not isinstance(x, jax.Array):
        return not isinstance(x, jax.ShapeDtypeStruct)
    is_tracer = isinstance(x, jax.core.Tracer)
    return not is_tracer and x.is_fully_addressable and not x.is_deleted()


def can_be_read(value: Any) -> bool:
    """Whether all arrays are in the memory of the host, too."""
    return all(is_at_hand(x) and _is_on_cpu(x) for x in jtu.tree_leaves(value))


def _is_on_cpu(x: Any) -> bool:
    devices = x.devices() if isinstance(x, jax.Array) else ()
    return all(d.platform == "cpu" for d in devices)


def pieces(x: Any) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """The shards of an array, and the place of each in it: views, not copies."""
    if not isinstance(x, jax.Array):
        yield (slice(None),) * np.ndim(x), np.asarray(x)
        return
    for shard in x.addressable_shards:
        if shard.replica_id == 0:
            yield shard.index, np.asarray(shard.data)


def computing() -> contextlib.AbstractContextManager[Any]:
    """While a function is being traced, numbers are still numbers."""
    if _compat.is_eager():
        return contextlib.nullcontext()
    return jax.ensure_compile_time_eval()


# --- on devices ---
def computed(fn: Callable, value: Any, *others: Any) -> Any:
    """Starts to compute on the device. `None` if there are only shapes. Each process
    gets all of the result."""
    leaves = jtu.tree_leaves((value, others))
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        return None
    # Host arrays go to wherever the others are.
    others = jtu.tree_map(lambda x: np.asarray(x) if is_at_hand(x) else x, others)
    shardings = [x.sharding for x in leaves if isinstance(x, jax.Array)]
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    everywhere = NamedSharding(meshes[0], PartitionSpec()) if meshes else None
    with computing():
        # JAX finds what it has compiled by the function.
        return jax.jit(fn, out_shardings=everywhere)(long_as_float(value), *others)


def on_host(x: Any) -> Any:
    """An array as NumPy's, from wherever it is, in each process. `None` if there are
    only shapes."""
    return np.asarray(x) if is_at_hand(x) else computed(_itself, x)


def _itself(x: Any) -> Any:
    return x


# --- what ran ---
def executed(x: Any, runs: Any, in_buffer: bool) -> np.ndarray | None:
    """Which entries along the first axes of `x` ran, if it is not all. In a buffer,
    `runs` says how many do, from its first place on."""
    if runs is None:
        return None
    runs = np.asarray(runs)
    if in_buffer:
        runs = runs[..., None] - np.arange(np.shape(x)[runs.ndim], dtype=runs.dtype)
    if np.all(runs > 0):
        return None
    shape = np.shape(x.size if isinstance(x, Summary) else x)
    return np.broadcast_to(runs > 0, shape[: runs.ndim])


def leading(x: np.ndarray, ndim: int) -> np.ndarray:
    return x.reshape(x.shape + (1,) * (ndim - x.ndim))


def _part(mask: np.ndarray, index: Sequence[slice], data: np.ndarray) -> np.ndarray:
    mask = mask[tuple(index[: mask.ndim])]
    return np.broadcast_to(mask, data.shape[: mask.ndim])


# --- statistics ---
def summaries(values: Sequence[Any], ran: Sequence[np.ndarray | None]) -> list[Summary]:
    """What `summarize` says of all entries of each array or `Summary` that ran, see
    `executed`."""
    given = [*zip(values, ran)]
    started = [
        ([(i, len(x)) for i, x in some], _summaries_of_rows(some, size))
        for some, size in _batches(_rows(given))
    ]
    found: list[list[Summary]] = [[] for _ in given]
    for owners, results in jax.device_get(started):
        every, start = _concatenated(results), 0
        for i, n in owners:
            found[i].append(_at(every, slice(start, start + n)))
            start += n
    merged = _merged_each([_concatenated(x or [_NOTHING]) for x in found])
    return [*map(_of_all, merged, values, ran)]


def not_finite(x: Any, mask: np.ndarray | None, kept: Sequence[int]) -> np.ndarray:
    """Where some entries that ran are not finite, along the `kept` axes."""
    if isinstance(x, Summary):
        return any_along(_ran(x, mask).not_finite > 0, kept)
    out = np.zeros([x.shape[k] for k in kept], bool)
    for index, data in pieces(x):
        bad = ~np.isfinite(data)
        if mask is not None:
            bad &= leading(_part(mask, index, data), bad.ndim)
        out[tuple(index[k] for k in kept)] |= any_along(bad, kept)
    return out


def any_along(x: Any, kept: Sequence[int]) -> np.ndarray:
    return x.any(tuple(a for a in range(x.ndim) if a not in kept))


def _ran(x: Summary, mask: np.ndarray | None) -> Summary:
    if mask is None:
        return jtu.tree_map(np.asarray, x)
    mask = np.broadcast_to(leading(mask, x.size.ndim), x.size.shape)
    # A summary of zeros is one of no entries.
    return jtu.tree_map(lambda a: np.where(leading(mask, a.ndim), a, 0), x)


# Some rows, and the number of the array that they are of.
_Owned = tuple[int, np.ndarray]


def _rows(given: Iterable[tuple[Any, np.ndarray | None]]) -> Iterator[_Owned]:
    """Puts the entries of arrays that ran into rows, up to `_MANY` at once. Those that
    fill up the last row are NaN."""
    n = _MANY * _ROW
    for i, (x, mask) in enumerate(given):
        for index, data in () if isinstance(x, Summary) else pieces(x):
            some = data if mask is None else data[_part(mask, index, data)]
            flat = some.reshape(-1)
            for start in range(0, flat.size, n):
                entries = _as_real(flat[start : start + n])
                if fill := -entries.size % _ROW:
                    entries = np.pad(entries, (0, fill), constant_values=np.nan)
                yield i, entries.reshape(-1, _ROW)


def _batches(rows: Iterable[_Owned]) -> Iterator[tuple[list[_Owned], int]]:
    """Those of one dtype together, as soon as they are enough; and how many the program
    is to take at once."""
    waiting: dict[Any, list[_Owned]] = {}
    n_rows = lambda some: sum(len(x) for _, x in some)
    for i, x in rows:
        some = [] if len(x) == _MANY else waiting.setdefault(x.dtype, [])
        some.append((i, x))
        if n_rows(some) >= _MANY:
            yield some if len(x) == _MANY else waiting.pop(x.dtype), _MANY
    for some in waiting.values():
        yield some, _MANY if n_rows(some) > _MANY // 2 else _FEW


def _summaries_of_rows(some: Sequence[_Owned], size: int) -> list[Summary]:
    """Starts to compute them."""
    rows = some[0][1] if len(some) == 1 else np.concatenate([x for _, x in some])
    results = []
    # NaN is what the rest of a row is made of, not what `jax_debug_nans` looks for.
    with computing(), jax.debug_nans(False):
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            if len(part) < size:
                part = np.pad(part, ((0, size - len(part)), (0, 0)))
            results.append(summary_of_rows(_on_cpu(part)))
    return results


def _of_all(s: Summary, x: Any, mask: np.ndarray | None) -> Summary:
    """That of the rows of an array, without the entries that fill these up."""
    if isinstance(x, Summary):
        return merged_on_host(_ran(x, mask))
    every = x.size if mask is None else np.sum(mask) * math.prod(x.shape[mask.ndim :])
    n_filled = s.size - every
    return dc.replace(s, size=s.size - n_filled, not_finite=s.not_finite - n_filled)


# A summary of zeros is one of no entries.
_NO: Any = np.zeros(1)
_NOTHING = Summary(*[_NO] * 8)


def _concatenated(parts: Sequence[Summary]) -> Summary:
    return jtu.tree_map(lambda *x: np.concatenate(x), *parts)


def _at(rows: Summary, index: int | slice) -> Summary:
    return jtu.tree_map(lambda x: x[index], rows)


def _merged_each(each: Sequence[Summary]) -> list[Summary]:
    """Those of about as many rows at once, which NumPy does as fast as one alone."""
    lengths = [(len(x.size) - 1).bit_length() for x in each]
    out: dict[int, Summary] = {}
    for length in set(lengths):
        some = [i for i, n in enumerate(lengths) if n == length]
        pad = lambda x: np.pad(x, (0, 2**length - len(x)))
        rows = [jtu.tree_map(pad, each[i]) for i in some]
        merged = merged_on_host(jtu.tree_map(lambda *x: np.stack(x), *rows), (1,))
        out |= {i: _at(merged, k) for k, i in enumerate(some)}
    return [out[i] for i in range(len(each))]


def _on_cpu(x: np.ndarray) -> Any:
    # Inside `jax.set_mesh`, JAX takes arrays on that mesh, and puts NumPy's there.
    if not jax.sharding.get_abstract_mesh().empty:
        return x
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX was told to use an accelerator only
        return x
    return jax.device_put(x, cpu)


def _as_real(x: np.ndarray) -> np.ndarray:
    """The numbers that `summarize` would take."""
    x = long_as_float(np.abs(x) if np.iscomplexobj(x) else x)
    is_wide = x.dtype.itemsize == 8 or not jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(jnp.result_type(float) if is_wide else np.float32, copy=False)
