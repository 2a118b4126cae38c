"""`compare`."""

import contextlib
import dataclasses as dc
import functools as ft
import itertools as it
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._errors import SowError, UnknownSowError
from .._frames import api_boundary
from .at_hand import any_along, can_be_read, pieces
from .first import FIRST, First, mark_first, time_in
from .intermediates import axes_in, Intermediates, is_state
from .on_device import computed
from .summarize import in_blocks, is_numeric, Summary
from .table import Table
from .tabulate import check_no_tracers, leaves_in, type_of


_COLUMNS = ("name", "mode", "shape", "largest", "norm", "cosine", "beyond")
_TEXT = ("name", "mode", "shape", "beyond")


class Comparison(Table):
    """The table that [`eqx_sow.compare`][] returns: a `str`, which a notebook shows as
    an HTML table.

    !!! example

        ```python
        import eqx_sow
        import jax.numpy as jnp

        f = lambda x: eqx_sow.sow(jnp.sin(x), "sin")
        g = lambda x: eqx_sow.sow(x - x**3 / 6, "sin")
        _, exact = eqx_sow.save_intermediates(f)(jnp.arange(3.0))
        _, approximate = eqx_sow.save_intermediates(g)(jnp.arange(3.0))
        comparison = eqx_sow.compare(approximate, exact)
        comparison.first  # ("sin", "primal")
        assert eqx_sow.compare(exact, exact).first is None
        ```
    """

    first: tuple[str, str] | None
    """The name and mode of the first row beyond tolerance, in order of execution, or
    `None` if there is none."""


Comparison.__module__ = "eqx_sow"


@api_boundary
def compare(
    intermediates: Mapping[str, Any],
    reference: Mapping[str, Any],
    *,
    rtol: float = 1e-3,
    atol: float = 1e-6,
) -> Comparison:
    """Compares two captures, and shows where they first differ.

    The table has one row for each name and mode that both have (and leaf, if the value
    has several), in order of execution:

    - `shape`: also of the reference, if shapes or dtypes differ,
    - `largest`: the largest absolute difference,
    - `norm`: the relative difference of the norms: `-0.5` if the norm is half as large,
    - `cosine`: of the angle between the two,
    - `beyond`: how many entries differ by more than `atol + rtol * abs(reference)`, if
        any. Entries that are not finite in only one of the two are beyond, as are all
        entries if the shapes differ. Entries that are NaN in both, or the same
        infinity, are not. Keys are equal or beyond.

    An arrow marks the row with the first entry beyond the tolerance, in order of
    execution, as in [`eqx_sow.tabulate`][]: in a loop, of the earliest iteration; for
    cotangents, from the bottom row upwards. Names that only one of the two has are
    listed below.

    Entries that are not finite are left out of `largest`, `norm` and `cosine`. Leaves
    that are not arrays are ignored. A [`eqx_sow.Summary`][] is compared by its
    statistics. The numbers are computed where the values are: values on a CPU are read
    in place, others on their device. Values may be spread over several processes: then
    all of them must call `compare`.

    **Arguments:**

    - `intermediates`: what [`eqx_sow.save_intermediates`][] returned, or any
        `{name: array}`.
    - `reference`: what another capture returned; or a mapping `{name: array}`, which
        is compared with the primals. Arrays may be NumPy's, or anything that
        `numpy.asarray` takes, such as PyTorch's detached tensors. If one of the two
        has a stack of layers (`"blocks/attn"`) where the other has a list
        (`"blocks/0/attn"`), the stack is taken apart, by
        [`eqx_sow.Intermediates`][]`.unstack()`.
    - `rtol`, `atol`: the tolerance. For bfloat16, whose numbers are 0.4 % apart, a
        `rtol` of `2e-2` and an `atol` of 1 % of the largest value are a start.

    **Returns:**

    A [`eqx_sow.Comparison`][]: a string, with the attribute `first`, which is the
    `(name, mode)` of the row with the arrow, or `None`. In a test, write `assert
    eqx_sow.compare(a, b).first is None`.

    **Raises:**

    [`eqx_sow.UnknownSowError`][] if the two have no name and mode in common;
    [`eqx_sow.SowError`][] under `jax.jit` and other transformations. `TypeError` if it
    is given anything else.

    !!! example

        ```python
        import equinox as eqx
        import eqx_sow
        import jax
        import jax.numpy as jnp

        model = eqx.nn.MLP(3, 1, 8, 2, key=jax.random.key(0))
        bias = lambda model: model.layers[1].bias
        other = eqx.tree_at(bias, model, replace_fn=lambda b: b + 1)
        save = lambda m: eqx_sow.save_intermediates(m, capture=True)(jnp.ones(3))[1]
        comparison = eqx_sow.compare(save(other), save(model))
        comparison.first  # ("layers/1", "primal")
        print(comparison)
        ```
    """
    for of, given in (("intermediates", intermediates), ("reference", reference)):
        if not isinstance(given, Mapping):
            raise TypeError(
                f"`compare(intermediates, reference)`: `{of}` is to be what "
                "`save_intermediates` returned beside the output, or a mapping "
                f"`{{name: array}}`, not {type(given).__name__}."
            )
        check_no_tracers("compare", given)
    a, b = _alike(_by_mode(intermediates), _by_mode(reference))
    there = lambda x: {(name, mode) for name, modes in x.items() for mode in modes}
    both = there(a) & there(b)
    if not both and (a or b):
        names = [", ".join(map(repr, x)) or "none" for x in (a, b)]
        raise UnknownSowError(
            "`compare(intermediates, reference)`: there is nothing to compare, as no "
            f"name and mode is in both. Names in the first: {names[0]}. Names in the "
            f"second: {names[1]}. Rename one of them: "
            "`{new: reference[old] for old, new in names.items()}`."
        )
    # JAX may have sorted the names of a plain dict.
    lead = a if isinstance(intermediates, Intermediates) else b
    ordered = [(n, m) for n in lead for m in lead[n] if (n, m) in both]
    rows = [row for key in ordered for row in _rows(a, b, *key)]
    _fill(rows, (rtol, atol))
    mark_first(rows)
    ways = ((a, b, "first"), (b, a, "second"))
    below = [_only_in(x, other, both, of) for x, other, of in ways]
    table = Comparison.of(
        _COLUMNS, _TEXT, [x.cells() for x in rows], "\n".join(filter(None, below))
    )
    table.first = next(((x.of, x.mode) for x in rows if x.is_first), None)
    return table


# --- what is compared ---
def _by_mode(given: Mapping[str, Any]) -> Intermediates:
    """`{name: {mode: value}}`, also of a plain `{name: value}`."""
    if isinstance(given, Intermediates):
        return given
    is_modes = lambda x: isinstance(x, Mapping) and x and all(map(_is_mode, x))
    by_mode = {k: x if is_modes(x) else {"primal": x} for k, x in given.items()}
    return Intermediates(jtu.tree_map(_as_array, by_mode, is_leaf=is_state))


def _is_mode(key: Any) -> bool:
    modes = {"primal", "tangent", "cotangent"}
    return key == "count" or isinstance(key, str) and modes >= {*key.split(".")}


def _as_array(x: Any) -> Any:
    """Such as a tensor of PyTorch, which is a leaf to JAX."""
    if hasattr(x, "dtype") and hasattr(x, "__array__") and not isinstance(x, jax.Array):
        return np.asarray(x)
    return x


def _alike(a: Intermediates, b: Intermediates) -> tuple[Intermediates, Intermediates]:
    """With stacks taken apart, if that makes more names the same."""
    if a.keys() == b.keys():
        return a, b
    # They cannot be taken apart if someone has computed with them.
    ua, ub = a, b
    with contextlib.suppress(SowError):
        ua = a.unstack()
    with contextlib.suppress(SowError):
        ub = b.unstack()
    ways = ((a, b), (ua, b), (a, ub), (ua, ub))
    return min(ways, key=lambda way: len(way[0].keys() ^ way[1].keys()))


def _only_in(
    x: Intermediates, other: Intermediates, both: set[tuple[str, str]], which: str
) -> str:
    more = {n: [m for m in modes if (n, m) not in both] for n, modes in x.items()}
    for name, mode in [(n, m) for n in x for m in x[n] if (n, m) in both]:
        for i in _runs_only_in(x[name][mode], other[name][mode], mode):
            more.setdefault(f"{name}[{i}]", []).append(mode)
    names = [f"{n} ({', '.join(modes)})" for n, modes in more.items() if modes]
    return f"Only in the {which}: {', '.join(names)}" if names else ""


def _runs_only_in(x: Any, other: Any, mode: str) -> list[int]:
    """Of several runs of a name, those of which only `x` has a derivative. Whether
    there is one depends on what else is in the loop, as for a name that runs once."""
    if mode in ("primal", "count") or not type(x) is type(other) is tuple:
        return []
    pairs = enumerate(zip(x, other))
    return [i for i, (mine, its) in pairs if mine is not None and its is None]


# --- rows ---
@dc.dataclass
class _Row(First):
    """What is said of a leaf `a` and the leaf `b` of the reference; `None` if it has no
    such leaf. `of` is the name of the value, `name` that of the leaf. `time` says along
    which axes time goes by."""

    of: str
    name: str
    a: Any
    b: Any
    time: tuple[int, ...]
    numbers: Any = None

    @property
    def differ(self) -> bool:
        """In more than their numbers."""
        return _form(self.a) != _form(self.b)

    @property
    def has_numbers(self) -> bool:
        """Whether there are any to compare."""
        parts = [*_parts(self.a), *_parts(self.b)]
        of_shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in parts)
        return not of_shapes and all(is_numeric(x) or _is_key(x) for x in parts)

    def cells(self) -> dict[str, str]:
        types = [_said(self.a), _said(self.b)]
        cells = dict.fromkeys(_COLUMNS, "") | dict(name=self.name, mode=self.mode)
        cells["shape"] = " / ".join(dict.fromkeys(types))
        if self.differ:
            cells["beyond"] = "differs"
        if self.numbers is not None:
            cells |= self._of_numbers()
        cells["beyond"] += FIRST if self.is_first else ""
        return cells

    def _of_numbers(self) -> dict[str, str]:
        largest, (of_a, of_b, of_both), beyond, _ = self.numbers
        of_a, of_b = of_a**0.5, of_b**0.5
        cells = {"beyond": f"{beyond}/{_size(self.a)}"} if beyond else {}
        if _is_key(self.a) or not _size(self.a):
            return cells
        cells["largest"] = f"{largest:.3g}"
        if of_a == of_b:
            cells["norm"] = "0"
        elif of_b and np.isfinite(of_a):
            cells["norm"] = f"{(of_a - of_b) / of_b:+.1e}"
        if of_a and of_b and np.isfinite(of_a * of_b):
            cells["cosine"] = f"{of_both / of_a / of_b:.5f}"
        return cells


def _rows(
    a: Intermediates,
    b: Intermediates,
    name: str,
    mode: str,
) -> Iterator[_Row]:
    mine, others = leaves_in(a[name][mode]), leaves_in(b[name][mode])
    if len(mine) == len(others) == 1:
        # `(x,)` is compared with `x`.
        others = dict(zip(mine, others.values()))
    ways = ((a, b), (b, a))
    lacking = {
        jtu.SequenceKey(i)
        for x, y in ways
        for i in _runs_only_in(x[name][mode], y[name][mode], mode)
    }
    every = {**mine, **others}
    axes = [axes_in(x, name, mode) for x in (a, b)]
    # Those of the first array of a summary.
    of_leaf = [
        {p: [*it.islice(of, len(jtu.tree_leaves(x)))][:1] for p, x in leaves.items()}
        for of, leaves in zip(axes, (mine, others))
    ]
    for path, x in every.items():
        if is_state(x) or {*path[:1]} & lacking:
            continue
        known = [own[0] for of in of_leaf for own in [of.get(path)] if own and own[0]]
        time = time_in(known[0] if known else ())
        yield _Row(
            mode,
            [*time.values()],
            of=name,
            name=f"{name}{jtu.keystr(path)}" if len(every) > 1 else str(name),
            a=mine.get(path),
            b=others.get(path),
            time=(*time,),
        )


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _form(x: Any) -> Any:
    """What two must have in common to be compared."""
    if isinstance(x, Summary):
        return Summary, np.shape(x.size), x.edges
    return is_numeric(x), np.shape(x), x.dtype if _is_key(x) else None


def _said(x: Any) -> str:
    if isinstance(x, Summary):
        return f"summary{list(np.shape(x.size)) or ''}"
    return "nothing" if x is None else type_of(x)


def _size(x: Any) -> int:
    return sum(int(np.size(y)) for y in _parts(x))


def _parts(x: Any) -> list[Any]:
    """The arrays that are compared. Those of a summary have different numbers of axes
    if there is a histogram."""
    return jtu.tree_leaves(x) if isinstance(x, Summary) else [x]


# --- numbers ---
class _Numbers(NamedTuple):
    """Of the entries that are finite in both: the largest difference, and the sums of
    `abs(a)**2`, `abs(b)**2` and `a * conj(b)`, of entries divided by `scale`, of which
    norms and the cosine are made. And how many entries are beyond."""

    largest: Any = 0.0
    sums: tuple[Any, Any, Any] = (0.0, 0.0, 0.0)
    beyond: Any = 0
    scale: Any = 1.0


_Tolerance = tuple[Any, Any]


def _fill(rows: Sequence[_Row], tolerance: _Tolerance) -> None:
    started = []
    for row in rows:
        if row.differ:
            row.bad = np.ones([1] * len(row.time), bool)
            continue
        if not row.has_numbers:
            continue
        for a, b in zip(_parts(row.a), _parts(row.b)):
            of_pair = _read if can_be_read((a, b)) else _on_device
            started.append((row, of_pair(a, b, tolerance, row.time)))
    # Only now, when all are being computed, are the first ones awaited.
    done = jax.device_get([numbers for _, numbers in started])
    for (row, _), (numbers, bad) in zip(started, done):
        row.numbers = _together([row.numbers or _Numbers(), numbers])
        row.bad = bad if row.bad is None else row.bad | bad


def _together(parts: Sequence[_Numbers]) -> _Numbers:
    scales = [float(p.scale) ** 2 for p in parts]
    total = lambda k: sum(float(p.sums[k]) * s for p, s in zip(parts, scales))
    largest = max(float(p.largest) for p in parts)
    sums = total(0), total(1), total(2)
    return _Numbers(largest, sums, sum(int(p.beyond) for p in parts))


def _beyond(x: Any, y: Any, tolerance: _Tolerance, xp: Any) -> Any:
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


# How many entries NumPy takes at once, so that they stay in the cache.
_AT_ONCE = 2**16


def _read(
    a: Any, b: Any, tolerance: _Tolerance, time: tuple[int, ...]
) -> tuple[_Numbers, Any]:
    """Of arrays in the memory of the host, in float64; and where some entries are
    beyond, along these axes."""
    a, b = _keys(a, b, np) if _is_key(a) else (a, b)
    bad = np.zeros([np.shape(a)[k] for k in time], bool)
    whole, parts = np.asarray(b), [_Numbers()]
    for index, mine in pieces(a):
        flat, other, beyond = mine.reshape(-1), whole[index].reshape(-1), []
        for start in range(0, flat.size, _AT_ONCE):
            here = slice(start, start + _AT_ONCE)
            x, y = _wide(flat[here]), _wide(other[here])
            off, (xx, yy, xy) = _of_entries(x, y, 1.0, np)
            beyond.append(_beyond(x, y, tolerance, np))
            sums = np.sum(xx), np.sum(yy), np.sum(xy)
            parts.append(_Numbers(np.max(off), sums, np.sum(beyond[-1])))
        far = np.concatenate([np.zeros(0, bool), *beyond]).reshape(mine.shape)
        bad[tuple(index[k] for k in time)] |= any_along(far, time)
    return _together(parts), bad


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _on_device(
    a: Any, b: Any, tolerance: _Tolerance, time: tuple[int, ...]
) -> tuple[_Numbers, Any]:
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
    if can_be_read(x) and not _is_key(x):
        # Each process puts its part there.
        whole = np.asarray(x)
        return jax.make_array_from_callback(
            whole.shape, other.sharding, lambda index: whole[index]
        )
    return jax.device_put(x, other.sharding)


@ft.lru_cache(maxsize=64)
def _difference(time: tuple[int, ...]) -> Callable[..., tuple[_Numbers, jax.Array]]:
    def fn(pair: tuple[Any, Any], rtol: Any, atol: Any) -> tuple[_Numbers, jax.Array]:
        a, b = pair
        a, b = _keys(a, b, jnp) if _is_key(a) else (a, b)
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
        return _Numbers(jnp.max(off, initial=0), sums, beyond, scale), bad

    return fn


def _as_float(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating) or x.dtype.itemsize > 4:
        return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(float)
    return x.astype(jnp.float32)
