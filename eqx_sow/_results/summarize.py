"""`summarize`."""

import contextlib
import dataclasses as dc
import functools as ft
from collections.abc import Sequence
from typing import Any, overload

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._arrays import as_integer
from .._errors import SowError
from .._frames import api_boundary
from .leaves import is_numeric, long_as_float
from .reductions import (
    added,
    by_block,
    counts_in_bins,
    in_blocks,
    merged_jit,
    merged_summary,
    one_by_one,
)


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

    `mean`, `std`, `rms`, `min` and `max` can be differentiated. Where the standard
    deviation is zero, its gradient is zero.

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
        return merged_jit(self, tuple(sorted(axes)))

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
        return added(self, other)

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
    JAX: 1e300 then counts as infinite. Intermediate results neither overflow nor
    underflow.

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
        return summary_of(jnp.asarray(long_as_float(x)), edges)

    return jtu.tree_map(one, value)


def _as_edges(call: str, edges: Any) -> tuple[float, ...] | None:
    if edges is None:
        return None
    given = edges
    with contextlib.suppress(TypeError, ValueError):  # not a number
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
    return merged_summary(s, axes, ft.partial(one_by_one, xp=np), np)


@jax.jit
def summary_of_rows(x: jax.Array) -> Summary:
    """That of each row of a matrix."""
    return merged_summary(_of_entries(x), (1,), ft.partial(by_block, (1,)))


@ft.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _summary(x: jax.Array, edges: tuple[float, ...] | None) -> Summary:
    there, _ = in_blocks(jnp.ones_like(x, bool))
    x, block = in_blocks(x)
    entries = _of_entries(x, there)
    s = merged_summary(entries, tuple(range(x.ndim)), ft.partial(by_block, block))
    histogram = None if edges is None else counts_in_bins(x, block, edges)
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
