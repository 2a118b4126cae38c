"""`summarize`."""

import contextlib
import dataclasses as dc
import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any, overload

import equinox as eqx
import jax
import jax.core
import jax.lax as lax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._arrays import as_integer, spec_of
from .._errors import SowError
from .._frames import api_boundary


Edges = Sequence[float] | np.ndarray | jax.Array | None


class Summary(eqx.Module):
    """The statistics of an array, from [`eqx_sow.summarize`][].

    All of them are arrays of the same shape: `()` for the summary of one array, and
    with leading axes under `jax.lax.scan` or `jax.vmap`. `mean`, `std`, `rms`, `min`
    and `max` are over the finite entries, and NaN if there are none.

    Counts are floating-point numbers, since an int32 would overflow: in float32 they
    are exact up to `2**24`, and correct to seven digits beyond that. (With
    `jax_enable_x64` they are float64.)

    `+` merges two summaries, and `merge` those along an axis. Up to rounding, the
    result is the summary of all entries together. Adding summaries with different
    leading axes or different `edges` is an [`eqx_sow.SowError`][]. A summary that is
    all zeros, as for a mark that did not run, has no entries.

    `mean`, `std`, `rms`, `min` and `max` can be differentiated. The gradient of a
    standard deviation of zero is zero.

    !!! example

        ```python
        import eqx_sow
        import jax.numpy as jnp

        first = eqx_sow.summarize(jnp.arange(4.0))
        both = first + eqx_sow.summarize(jnp.arange(4.0, 8.0))
        both.mean  # 3.5
        ```

    ??? abstract "How they are merged"

        By the pairwise formula of T. F. Chan, G. H. Golub and R. J. LeVeque, "Updating
        Formulae and a Pairwise Algorithm for Computing Sample Variances", Stanford
        University, technical report STAN-CS-79-773, 1979.
    """

    size: jax.Array
    """The number of entries, whether finite or not."""
    mean: jax.Array
    """The mean of the finite entries."""
    std: jax.Array
    """Their standard deviation, as in NumPy: the root of the mean squared
    deviation."""
    rms: jax.Array
    """The root of their mean square. The norm is `rms * sqrt(size - not_finite)`."""
    min: jax.Array
    """The smallest finite entry."""
    max: jax.Array
    """The largest finite entry."""
    zeros: jax.Array
    """The number of zeros."""
    not_finite: jax.Array
    """The number of entries that are NaN or infinite."""
    histogram: jax.Array | None = None
    """With `edges`, the number of entries in each bin, along a last axis of length
    `len(edges) - 1`. Otherwise `None`."""
    edges: tuple[float, ...] | None = eqx.field(static=True, default=None)
    """The `edges` that were passed to `summarize`, as a static tuple."""

    @classmethod
    @api_boundary
    def empty(cls, shape: Sequence[int] = (), *, edges: Edges = None) -> "Summary":
        """Makes a summary of no entries, to which others can be added.

        **Arguments:**

        - `shape`: its leading axes.
        - `edges`: as in [`eqx_sow.summarize`][], and the same as in the summaries to be
            added.

        **Returns:**

        A `Summary` of float32 arrays (float64 with `jax_enable_x64`).

        **Raises:**

        As [`eqx_sow.summarize`][].
        """
        edges = _as_edges("Summary.empty", edges)
        dtype = jnp.result_type(float)
        counts = np.zeros(shape, dtype)
        nothing = np.full(shape, np.nan, dtype)
        bins = None if edges is None else np.zeros((*shape, len(edges) - 1), dtype)
        arrays = [counts, *[nothing] * 5, counts, counts, bins]
        # Here a NaN is what there is to say, not what `jax_debug_nans` looks for.
        with jax.debug_nans(False):
            return cls(*[*jtu.tree_map(jnp.asarray, arrays), edges])

    @api_boundary
    def merge(self, axis: int | Sequence[int] | None = None) -> "Summary":
        """Merges leading axes: the summary of all entries along them.

        **Arguments:**

        - `axis`: an axis of `size`, or several, counted from the end if negative. All
            by default.

        **Returns:**

        A `Summary` without these axes.

        **Raises:**

        `ValueError` if there is no such axis, or one is named twice.

        !!! example

            ```python
            import eqx_sow
            import jax
            import jax.numpy as jnp

            xs = jnp.ones((4, 3, 8))
            by_layer_and_lane = jax.vmap(jax.vmap(eqx_sow.summarize))(xs)
            by_layer_and_lane.mean.shape  # (4, 3)
            by_layer = by_layer_and_lane.merge(axis=1)  # that of each `xs[i]`
            by_layer.mean.shape  # (4,)
            ```
        """
        ndim = jnp.ndim(self.size)
        given = range(ndim) if axis is None else axis
        given = given if isinstance(given, Sequence) else (given,)
        numbers = [a for a in map(as_integer, given) if a is not None]
        axes = {a % ndim for a in numbers if -ndim <= a < ndim}
        if len(axes) < len(given):
            raise ValueError(
                f"`Summary.merge(axis={axis!r})`: there are {ndim} axes to merge, "
                f"those of `size`, whose shape is {jnp.shape(self.size)}. Name "
                "each at most once, by its number."
            )
        return _merged(self, tuple(sorted(axes)))

    @api_boundary
    def __add__(self, other: "Summary") -> "Summary":
        if not isinstance(other, Summary):
            return NotImplemented
        mine, others = jnp.shape(self.size), jnp.shape(other.size)
        if self.edges != other.edges or mine != others:
            raise SowError(
                "`Summary + Summary`: these have histograms with different edges, "
                f"{_show(self.edges)} and {_show(other.edges)}, or different leading "
                f"axes, {mine} and {others}. Pass the same `edges` to `summarize` and "
                "to `Summary.empty`. Use `Summary.merge(axis)` first."
            )
        return _added(self, other)

    def __radd__(self, other: int) -> "Summary":
        # For `sum`, which starts with zero.
        return self if isinstance(other, int) and other == 0 else NotImplemented


Summary.__module__ = "eqx_sow"


@overload
def summarize(value: jax.Array, *, edges: Edges = ...) -> Summary: ...


@overload
def summarize(value: Any, *, edges: Edges = ...) -> Any: ...


@api_boundary
def summarize(
    value: Any, *, edges: Sequence[float] | np.ndarray | jax.Array | None = None
) -> Any:
    """Computes statistics of each array in a PyTree, without copying the array.

    For `save_intermediates(..., transform=eqx_sow.summarize)`: a scan over layers then
    stacks statistics, not activations.

    Entries that are not finite are counted, and left out of everything else. Complex
    numbers count by their magnitude, booleans as 0 and 1. Everything is computed and
    returned in float32; with `jax_enable_x64`, float64 arrays and integers in float64.
    Without it, NumPy's float64 and int64 arrays are converted to float32 first, as in
    JAX: 1e300 then counts as infinite. Neither large nor small numbers overflow on the
    way.

    **Arguments:**

    - `value`: any PyTree.
    - `edges`: the edges of the bins of a histogram, in increasing order: numbers, not
        arrays that are being traced. As in `numpy.histogram`, the last bin includes its
        right edge, and entries beyond the first and the last edge are in no bin. Edges
        may be infinite.

    **Returns:**

    The PyTree with each array replaced by a `Summary`, and everything else (static
    leaves, keys and other arrays that are not numeric) by `None`.

    **Raises:**

    `ValueError` if `edges` is not an increasing sequence of at least two numbers, or is
    traced.

    !!! example

        ```python
        import eqx_sow
        import jax
        import jax.numpy as jnp

        def f(x):
            layer = lambda x, scale: (eqx_sow.sow(jnp.tanh(scale * x), "h"), None)
            return jax.lax.scan(layer, x, jnp.arange(1.0, 4.0))[0]

        saved = eqx_sow.save_intermediates(f, transform=eqx_sow.summarize)
        _, intermediates = saved(jnp.ones((16, 8)))
        intermediates["h"]["primal"].rms.shape  # (3,)
        intermediates["h"]["primal"].merge().size  # 384.0
        ```

        In memory that does not grow with the number of iterations:

        ```python
        import eqx_sow
        import jax
        import jax.numpy as jnp

        def f(x):
            return jax.lax.fori_loop(
                0, 100, lambda i, x: eqx_sow.sow(jnp.cos(x), "x"), x
            )

        total = eqx_sow.Fold(
            eqx_sow.Summary.empty(), lambda acc, x: acc + eqx_sow.summarize(x)
        )
        _, intermediates = eqx_sow.save_intermediates(f, reduce=total)(jnp.ones(3))
        intermediates["x"]["primal"].size  # 300.0
        ```
    """
    edges = _as_edges("summarize", edges)

    def one(x):
        if not is_numeric(x):
            return None
        return summary_of(jnp.asarray(as_array(x)), edges)

    return jtu.tree_map(one, value)


def is_value(x: Any) -> bool:
    """Whether a leaf is an array, or the shape of one."""
    return eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def is_numeric(x: Any) -> bool:
    """Whether it has statistics."""
    # A `float0` is a number to none of these.
    return is_value(x) and (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool)


def as_array(x: Any) -> Any:
    """NumPy's integers as numbers of which JAX does not cut off the upper 32 bits."""
    if isinstance(x, np.ndarray | np.generic) and x.dtype in (np.int64, np.uint64):
        return x.astype(np.float64)
    return x


def _as_edges(call: str, edges: Any) -> tuple[float, ...] | None:
    if edges is None:
        return None
    given = edges
    with contextlib.suppress(TypeError, ValueError):  # what is no number
        edges = np.asarray(edges, np.float64)
        if edges.ndim == 1 and edges.size > 1 and np.all(edges[1:] > edges[:-1]):
            return tuple(edges.tolist())
    raise ValueError(
        f"`{call}(..., edges=...)` takes at least two numbers in increasing order, the "
        f"edges of the bins, not {given!r}. Write `numpy.linspace(0, 1, 11)`: numbers "
        "that are being traced are not known yet."
    )


def _show(edges: Any) -> str:
    return "none" if edges is None else np.array2string(np.asarray(edges), threshold=6)


@ft.partial(jax.jit, static_argnums=1)
def summary_of(x: jax.Array, edges: tuple[float, ...] | None = None) -> Summary:
    return _summary(_as_real(x), edges)


def _as_real(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.abs(x)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.float64 if x.dtype.itemsize == 8 else jnp.float32)
    return x.astype(jnp.result_type(float))


def summary_on_host(x: Any) -> Summary | None:
    """The summary of all entries of an array or a `Summary`, by NumPy, since a callback
    must not call JAX; in float64. Of a key there is none."""
    if not isinstance(x, Summary):
        if not is_numeric(x):
            return None
        is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
        x = _of_entries((np.abs(x) if is_complex else x).astype(np.float64), xp=np)
    return merged_on_host(x)


def merged_on_host(s: Summary, axes: tuple[int, ...] | None = None) -> Summary:
    """By NumPy, in float64, along all leading axes or some."""
    s = jtu.tree_map(lambda a: np.asarray(a, np.float64), s)
    axes = tuple(range(s.size.ndim)) if axes is None else axes
    return merged(s, axes, ft.partial(_one_by_one, xp=np), np)


@jax.jit
def summary_of_rows(x: jax.Array) -> Summary:
    """That of each row of a matrix."""
    return merged(_of_entries(x), (1,), ft.partial(_by_block, (1,)))


@ft.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _summary(x: jax.Array, edges: tuple[float, ...] | None) -> Summary:
    there, _ = in_blocks(jnp.ones_like(x, bool))
    x, block = in_blocks(x)
    entries = _of_entries(x, there)
    s = merged(entries, tuple(range(x.ndim)), ft.partial(_by_block, block))
    histogram = None if edges is None else _histogram(x, block, edges)
    return dc.replace(s, histogram=histogram, edges=edges)


# Of the reductions themselves, JAX would keep every partial result.
@_summary.defjvp
def _summary_jvp(edges, primals, tangents):
    (x,), (t,) = primals, tangents
    s = _summary(x, edges)
    finite = jnp.isfinite(x)
    n = jnp.maximum(s.size - s.not_finite, 1).astype(x.dtype)
    not_zero = lambda root: jnp.where(root > 0, root, 1)

    def along(gradient):
        return jnp.sum(jnp.where(finite, gradient, 0) * jnp.where(finite, t, 0))

    def of_extremum(value):
        places = (x == value).astype(x.dtype)
        return along(places / jnp.maximum(jnp.sum(places), 1))

    numbers = dict(
        mean=along(jnp.ones_like(x)) / n,
        std=along((x - s.mean) / not_zero(s.std)) / n,
        rms=along(x / not_zero(s.rms)) / n,
        min=of_extremum(s.min),
        max=of_extremum(s.max),
    )
    return s, dc.replace(jtu.tree_map(jnp.zeros_like, s), **numbers)


@jax.jit
def _added(a: Summary, b: Summary) -> Summary:
    def both(x, y):
        # With 64 bits, `Summary.empty` has more than a summary of float32.
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.promote_types(jnp.result_type(x), jnp.result_type(y))
        return jnp.stack([jnp.asarray(x, dtype), jnp.asarray(y, dtype)])

    return merged(jtu.tree_map(both, a, b), (0,))


def _of_entries(x: Any, there: Any = True, xp: Any = jnp) -> Summary:
    """For each entry of an array, the summary of it alone; of none where it is not
    `there`."""
    finite = xp.isfinite(x)
    count = lambda mask: mask.astype(np.uint32)
    numbers = dict(mean=x, std=xp.zeros_like(x), rms=x, min=x, max=x)
    return Summary(
        size=count(finite | there),
        **numbers,
        zeros=count(x == 0),
        not_finite=count(~finite & there),
    )


# What is reduced, and how: by "sum", "min" or "max".
_Part = tuple[Any, str]
_START = {"sum": 0, "min": np.inf, "max": -np.inf}
_OF_TWO = {"sum": lax.add, "min": lax.min, "max": lax.max}


def _one_by_one(axes: tuple[int, ...], *parts: _Part, xp: Any = jnp) -> list[Any]:
    return [getattr(xp, how)(x, axes, initial=_START[how]) for x, how in parts]


def _by_block(
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
    return _one_by_one(axes[: -len(block) or None], *of_each)


def merged(
    s: Summary, axes: tuple[int, ...], reduce: Callable = _one_by_one, xp: Any = jnp
) -> Summary:
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
        # The sum of `n` makes it several operands, see `_by_block`.
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
    return Summary(
        size=total + not_finite,
        **{k: xp.where(any_, x, nan) for k, x in numbers.items()},
        zeros=zeros,
        not_finite=not_finite,
        histogram=None if s.histogram is None else xp.sum(s.histogram, axes),
        edges=s.edges,
    )


_merged = jax.jit(merged, static_argnums=1)


# Known here, since NumPy warns where it first learns this in a callback, in a thread
# that flushes small numbers to zero.
_LEAST = {np.dtype(x): 4 * float(np.finfo(x).tiny) for x in ("float32", "float64")}


def _in_range(scale: Any) -> Any:
    """A scale so that neither it nor its inverse is flushed to zero or overflows."""
    least = _LEAST[scale.dtype]
    return scale.clip(least, 1 / least)


# --- blocks ---
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


def _histogram(x: jax.Array, block: tuple[int, ...], edges: tuple[float, ...]):
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
    right_of = _by_block(block, tuple(range(x.ndim)), *counts)
    return jnp.stack([a - b for a, b in zip(right_of[:-1], right_of[1:])])
