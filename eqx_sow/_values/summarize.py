"""`summarize`."""

import contextlib
import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

import equinox as eqx
import jax
import jax.core
import jax.lax as lax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._arrays import leading
from .._errors import SowError
from .._frames import api_boundary


Edges = Sequence[float] | np.ndarray | jax.Array | None


class Summary(eqx.Module):
    """The statistics of an array, from [`eqx_sow.summarize`][].

    All of them are arrays, of one shape: `()` for the summary of one array. Where it is
    stacked or mapped, as by a `jax.lax.scan` or a `jax.vmap`, they have leading axes,
    and each entry is a summary. `mean`, `std`, `rms`, `min` and `max` are those of the
    finite entries, NaN if there are none.

    Counts are floating-point numbers, since an int32 would overflow: one layer of a
    large model, over a few hundred steps, has more than `2**31` entries. They are exact
    up to `2**24` in float32, and right to seven digits from there on. (With
    `jax_enable_x64` they are float64, and exact up to `2**53`.)

    Summaries are merged by `+`, and those along an axis by `merge`. Both are exact: but
    for rounding, the result is the summary of all the entries together. Adding those
    with other leading axes or other `edges` is an [`eqx_sow.SowError`][]. A summary
    that is all zeros is that of no entries, as is what stands for a value that did not
    run.

    Gradients are those of `mean`, `std`, `rms`, `min` and `max`; of a deviation of zero
    they are zero.

    !!! example

        ```python
        import eqx_sow
        import jax.numpy as jnp

        first = eqx_sow.summarize(jnp.arange(4.0))
        both = first + eqx_sow.summarize(jnp.arange(4.0, 8.0))
        both.mean  # 3.5
        ```

    ??? abstract "How they are merged"

        By the pairwise formula for means and sums of squared deviations, which takes no
        difference of two large numbers: T. F. Chan, G. H. Golub and R. J. LeVeque,
        "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
        Stanford University, technical report STAN-CS-79-773, 1979.
    """

    size: jax.Array
    """How many entries there are, whether finite or not."""
    mean: jax.Array
    """Their mean."""
    std: jax.Array
    """Their standard deviation, that of NumPy: the root of the mean squared
    deviation."""
    rms: jax.Array
    """The root of their mean square. The norm is `rms * sqrt(size - not_finite)`."""
    min: jax.Array
    """The smallest."""
    max: jax.Array
    """The largest."""
    zeros: jax.Array
    """How many are zero."""
    not_finite: jax.Array
    """How many are NaN or infinite."""
    histogram: jax.Array | None = None
    """With `edges`, how many are in each bin, along a last axis of length
    `len(edges) - 1`; else `None`."""
    edges: tuple[float, ...] | None = eqx.field(static=True, default=None)
    """What was passed to `summarize`, as a tuple; it is static."""

    @classmethod
    @api_boundary
    def empty(cls, shape: Sequence[int] = (), *, edges: Edges = None) -> "Summary":
        """The summary of no entries, to which others can be added.

        **Arguments:**

        - `shape`: its leading axes.
        - `edges`: as in [`eqx_sow.summarize`][]: the same as those of the summaries to
            be added.

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
        """The summary of all entries along some of the leading axes.

        **Arguments:**

        - `axis`: which, an int or several: of the axes of `size`, counted from the end
            if negative. All of them by default.

        **Returns:**

        A `Summary` without these axes.

        **Raises:**

        `ValueError` if there is no such axis.

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
        if axis is None:
            axes = tuple(range(ndim))
        else:
            axes = tuple(axis) if isinstance(axis, Sequence) else (axis,)
            is_axis = lambda a: isinstance(a, int | np.integer) and -ndim <= a < ndim
            if not all(map(is_axis, axes)):
                raise ValueError(
                    f"`Summary.merge(axis={axis!r})`: there are {ndim} axes to merge, "
                    f"those of `size`, whose shape is {jnp.shape(self.size)}."
                )
            axes = tuple(a % ndim for a in axes)
        return merged(self, axes)

    @api_boundary
    def __add__(self, other: "Summary") -> "Summary":
        if not isinstance(other, Summary):
            return NotImplemented
        if self.edges != other.edges:
            raise SowError(
                "`Summary + Summary`: these have histograms with different edges, "
                f"{_show(self.edges)} and {_show(other.edges)}. Pass the same `edges` "
                "to `summarize` and to `Summary.empty`."
            )
        if jnp.shape(self.size) != jnp.shape(other.size):
            raise SowError(
                "`Summary + Summary`: these have different leading axes, "
                f"{jnp.shape(self.size)} and {jnp.shape(other.size)}. Use "
                "`Summary.merge(axis)` first."
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
    """The statistics of each array of a PyTree, without a copy of it.

    For `save_intermediates(..., transform=eqx_sow.summarize)`: within a scan over
    layers only the statistics are stacked, not the activations. They are computed by
    two reductions, which read the array and write numbers.

    Entries that are not finite are counted, and left out of everything else. Complex
    numbers count by their magnitude, booleans as 0 and 1. Everything is computed and
    returned in float32, float64 arrays in float64 (and with `jax_enable_x64` integers
    too). The deviation is that from the mean, not a difference of squares; neither
    large nor small numbers overflow on the way.

    **Arguments:**

    - `value`: any PyTree.
    - `edges`: the edges of the bins of a histogram, in increasing order: numbers, not
        arrays that are being traced. As in `numpy.histogram`, the last bin includes its
        right edge, and what is outside of the first and the last edge is in no bin;
        these may be infinite.

    **Returns:**

    The PyTree with a `Summary` in the place of each array, and `None` in that of
    everything else: static leaves, keys and other arrays that are not numeric.

    **Raises:**

    `TypeError` if `edges` is traced; `ValueError` if it is not an increasing sequence
    of at least two numbers.

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
        return _summary(jnp.asarray(as_array(x)), edges)

    return jtu.tree_map(one, value)


def is_numeric(x: Any) -> bool:
    """Whether a leaf, an array or the shape of one, has statistics."""
    if not (eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)):
        return False
    # A `float0` is a number to none of these.
    return jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool


def as_array(x: Any) -> Any:
    """NumPy's integers as numbers of which JAX does not cut off the upper 32 bits."""
    if isinstance(x, np.ndarray | np.generic) and x.dtype in (np.int64, np.uint64):
        return x.astype(np.float64)
    return x


def _as_edges(call: str, edges: Any) -> tuple[float, ...] | None:
    if edges is None:
        return None
    if any(isinstance(x, jax.core.Tracer) for x in jtu.tree_leaves(edges)):
        raise TypeError(
            f"`{call}(..., edges=...)`: these are being traced, and the edges of a "
            "histogram have to be numbers. Compute them by NumPy, for example by "
            "`numpy.linspace`, or before the function is transformed."
        )
    given = edges
    with contextlib.suppress(TypeError, ValueError):  # what is no number
        edges = np.asarray(edges, np.float64)
        if edges.ndim == 1 and edges.size > 1 and np.all(edges[1:] > edges[:-1]):
            return tuple(edges.tolist())
    raise ValueError(
        f"`{call}(..., edges=...)` takes at least two numbers in increasing order, the "
        f"edges of the bins, not {given!r}. Write `numpy.linspace(0, 1, 11)`."
    )


def _show(edges: Any) -> str:
    return "none" if edges is None else np.array2string(np.asarray(edges), threshold=6)


@ft.partial(jax.jit, static_argnums=1)
def _summary(x: jax.Array, edges: tuple[float, ...] | None) -> Summary:
    return _statistics(as_real(x), edges)


def as_real(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.abs(x)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.float64 if x.dtype.itemsize == 8 else jnp.float32)
    return x.astype(jnp.result_type(float))


@ft.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _statistics(x: jax.Array, edges: tuple[float, ...] | None) -> Summary:
    blocks = _Blocks(x)
    s = _sums(x.size, blocks)
    histogram = None if edges is None else _histogram(blocks, edges)
    stats = finish(s, jnp)
    return Summary(*[s.size, *stats, s.zeros, s.not_finite, histogram, edges])


# That of the reductions would keep every partial result.
@_statistics.defjvp
def _statistics_jvp(edges, primals, tangents):
    (x,), (t,) = primals, tangents
    s = _statistics(x, edges)
    t = jnp.where(jnp.isfinite(x), t, 0)
    n = jnp.maximum(s.size - s.not_finite, 1).astype(x.dtype)

    def along(direction):
        return jnp.sum(jnp.where(jnp.isfinite(x), direction, 0) * t)

    def root(root, deviation):
        return along(deviation / jnp.where(root > 0, root, 1)) / n

    def extremum(value):
        here = (x == value).astype(x.dtype)
        return along(here) / jnp.maximum(jnp.sum(here), 1)

    zero = jnp.zeros_like
    return s, Summary(
        size=zero(s.size),
        mean=jnp.sum(t) / n,
        std=root(s.std, x - s.mean),
        rms=root(s.rms, x),
        min=extremum(s.min),
        max=extremum(s.max),
        zeros=zero(s.zeros),
        not_finite=zero(s.not_finite),
        histogram=None if s.histogram is None else zero(s.histogram),
        edges=edges,
    )


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


def sums(
    x: jax.Array, run: jax.Array | None = None, *, one_device: bool = False
) -> Sums:
    """Of all entries of an array of float32 or float64.

    `run`, if given, is a boolean for each entry along the leading axes: whether it is
    one at all. `one_device`: the array is on a single CPU, and can be large.
    """
    rows = _Rows.shape(x.size) if one_device and run is None else None
    return _sums(x.size, _Blocks(x, run) if rows is None else _Rows(x.reshape(rows)))


class _Some(NamedTuple):
    """Entries, and which of them are there at all, if not all are."""

    x: jax.Array
    run: jax.Array | None = None

    @property
    def ok(self):
        return self.where(jnp.isfinite(self.x))

    def where(self, mask):
        return mask if self.run is None else mask & self.run


# An array, where its reduction begins, and how two of its entries are reduced.
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
    """The same for a large array on one CPU, row by row: XLA makes vector instructions
    of that, and is three times as fast. `x` has three axes: blocks, rows, entries."""

    whole = True

    def __init__(self, x: jax.Array):
        self._x = x
        self.dtype = x.dtype

    @staticmethod
    def shape(size: int) -> tuple[int, int, int] | None:
        """Of an array of that size, if it is large, and can be divided."""
        if size < 2**18:
            return None
        width = next((n for n in range(4096, 1023, -1) if size % n == 0), None)
        if width is None:
            return None
        rows = next(n for n in range(256, 0, -1) if size // width % n == 0)
        return size // width // rows, rows, width

    def reduce(self, parts_of: Callable[[_Some], Sequence[_Part]]) -> Sequence[Any]:
        def row(acc, x):
            parts = parts_of(_Some(x))
            return [fn(a, new) for a, (new, _, fn) in zip(acc, parts)], None

        def block(xs):
            first = [x for x, _, _ in parts_of(_Some(xs[0]))]
            return lax.scan(row, first, xs[1:])[0]

        return lax.map(block, self._x)


def _count(mask) -> _Part:
    return mask.astype(jnp.uint32), jnp.uint32(0), lax.add


def _total(x, mask) -> _Part:
    zero = jnp.zeros((), x.dtype)
    return jnp.where(mask, x, zero), zero, lax.add


def _sums(whole_size: int, blocks: _Blocks | _Rows) -> Sums:
    dtype = blocks.dtype
    inf = jnp.array(jnp.inf, dtype)
    # A sum of so few of them cannot overflow. That it may underflow does not matter.
    down = jnp.array(0.5 ** (_BLOCK.bit_length() + 1), dtype)

    def first_parts(some):
        x, ok = some.x, some.ok
        return [
            _count(ok),
            _count(some.where(~jnp.isfinite(x))),
            _count(some.where(x == 0)),
            (jnp.where(ok, x, inf), inf, lax.min),
            (jnp.where(ok, x, -inf), -inf, lax.max),
            _total(x * down, ok),
        ]

    n, bad, zeros, low, high, total = blocks.reduce(first_parts)
    counts = jnp.result_type(float)
    n, bad, zeros = (jnp.sum(c.astype(counts)) for c in (n, bad, zeros))
    size = jnp.full_like(n, whole_size) if blocks.whole else n + bad
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
def _root_of_sum(xs: jax.Array, axis) -> jax.Array:
    """The root of the sum of squares, whatever their size."""
    up, down = _scale(jnp.max(jnp.abs(xs), axis, keepdims=True, initial=0))
    return jnp.sqrt(jnp.sum((xs * down) ** 2, axis)) * jnp.squeeze(up, axis)


@_root_of_sum.defjvp
def _root_of_sum_jvp(axis, primals, tangents):
    (xs,), (ts,) = primals, tangents
    root = _root_of_sum(xs, axis)
    at = jnp.expand_dims(jnp.where(root > 0, root, 1), axis)
    return root, jnp.sum(xs / at * ts, axis)


_EDGES = 8


def _histogram(blocks: _Blocks, edges: tuple[float, ...]):
    dtype = blocks.dtype
    # The smallest numbers of this dtype that are in the bins to the right of an edge.
    # So that rounding puts no entry on the other side of it.
    exact = np.asarray(edges)
    at = exact.astype(dtype)
    inf = np.asarray(np.inf, dtype)
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


@jax.jit
def _added(a: Summary, b: Summary) -> Summary:
    def both(x, y):
        # With 64 bits, `Summary.empty` has more than a summary of float32.
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.promote_types(jnp.result_type(x), jnp.result_type(y))
        return jnp.stack([jnp.asarray(x, dtype), jnp.asarray(y, dtype)])

    return merged(jtu.tree_map(both, a, b), (0,))


@ft.partial(jax.jit, static_argnums=1)
def merged(s: Summary, axes: tuple[int, ...]) -> Summary:
    """One summary of those along some axes, by Chan's formula. Not by the squares of
    deviations: these would overflow before the deviations do."""
    if not axes:
        return s
    n = s.size - s.not_finite
    total = jnp.sum(n, axes)
    some = n > 0
    at = lambda x: jnp.expand_dims(x, axes)
    mean, std = jnp.where(some, s.mean, 0), jnp.where(some, s.std, 0)
    weights = (n / jnp.maximum(at(total), 1)).astype(mean.dtype)
    about = jnp.sum(weights * mean, axes)
    new_mean = about + jnp.sum(weights * (mean - at(about)), axes)
    roots = jnp.sqrt(weights)
    parts = jnp.stack([roots * std, roots * (mean - at(new_mean))])
    new_std = _root_of_sum(parts, (0, *[a + 1 for a in axes]))
    inf = jnp.inf
    stats = (
        new_mean,
        new_std,
        _root_of_sum(jnp.stack([new_mean, new_std]), (0,)),
        jnp.min(jnp.where(some, s.min, inf), axes, initial=inf),
        jnp.max(jnp.where(some, s.max, -inf), axes, initial=-inf),
    )
    size, zeros, bad = (jnp.sum(x, axes) for x in (s.size, s.zeros, s.not_finite))
    histogram = None if s.histogram is None else jnp.sum(s.histogram, axes)
    return Summary(*[size, *_or_nan(total > 0, stats), zeros, bad, histogram, s.edges])


def _or_nan(some, stats):
    return [jnp.where(some, x, jnp.array(jnp.nan, x.dtype)) for x in stats]
