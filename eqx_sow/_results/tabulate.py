"""`tabulate`, and what a line of text says of an array."""

import dataclasses as dc
import functools as ft
import itertools as it
import operator as op
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.lax as lax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._arrays import leading, select, sharded_like
from .._frames import api_boundary
from .intermediates import Intermediates
from .layers import NamedAxes
from .leaves import is_numeric, is_state, is_value, shape_of, type_of
from .nodes import modes_in_order
from .numbers import (
    can_be_read,
    computed,
    executed,
    is_at_hand,
    not_finite,
    on_host,
    summaries,
)
from .reductions import merged_summary
from .rows import check_no_tracers, Leaf, leaves_of, mark_first, Row, TextTable
from .summarize import Summary, summary_of, summary_on_host


_STATISTICS = ("mean", "std", "min", "max", "norm", "zeros")
_COLUMNS = ("name", "mode", "shape", "count", *_STATISTICS, "not finite")
_ALWAYS = ("name", "mode", "shape")
_EMPTY = """\
Nothing was captured. Either the program has no mark: call `eqx_sow.sow` in it, or pass
`capture=True` to `save_intermediates`, which marks the output of each module. Or the
option `modes=` asks for what is not there, such as cotangents without a gradient."""


@api_boundary
def tabulate(intermediates: Mapping[str, Mapping[str, Any]]) -> str:
    """Makes a table of what [`eqx_sow.save_intermediates`][] captured, as text.

    It has one row for each name and mode (and leaf, if the value has several), in order
    of execution. Names are not shortened, so that you can copy them into `names=` or
    `plant`. A value without arrays has a row without numbers, and an `eqx.nn.State` has
    no row. `count` is the sum over all axes. The statistics are over the finite entries
    of executions that took place; complex numbers count by their magnitude. `zeros` is
    the share of entries that are zero. A [`eqx_sow.Summary`][], with any number of
    leading axes, is one row. It has the numbers of the values, and the number of
    entries in place of their shape.

    An arrow marks the row with the first entry, in order of execution, that is not
    finite. In a loop, this is the row that went wrong in the earliest iteration.
    Cotangents are read from the bottom row upwards. Entries that a `jax.vmap` or a loop
    around `save_intermediates` has stacked count as iterations, too. After a reducer or
    a change of shape the iterations can no longer be compared, so the arrow points at
    the first bad row. The table of a plain dict has no arrow, as `jax.jit` sorts its
    names.

    The statistics are computed as by [`eqx_sow.summarize`][], where the values are:
    arrays on a CPU are read in place, and others on their device. Values may be spread
    over several processes: then all of them must call `tabulate`, and all get the same
    table. Without `jax_enable_x64`, NumPy's float64 and int64 arrays are converted to
    float32 first.

    **Arguments:**

    - `intermediates`: what `save_intermediates` returned, with values, summaries or
        both; or its shapes, as `.eval_shape` returns them.

    **Returns:**

    A string. In a notebook it is displayed as an HTML table, which scrolls if it is
    wide.

    **Raises:**

    [`eqx_sow.SowError`][] under `jax.jit` and other transformations, where there are no
    numbers yet. `TypeError` if it is given anything else.

    !!! example

        ```python
        import eqx_sow
        import jax.numpy as jnp

        fn = lambda x: eqx_sow.sow(jnp.sin(x), "sin").sum()
        out, intermediates = eqx_sow.save_intermediates(fn)(jnp.arange(4.0))
        print(eqx_sow.tabulate(intermediates))
        ```
    """
    _check(intermediates)
    check_no_tracers("tabulate", intermediates)
    return _table(intermediates)


def html(intermediates: Any) -> str | None:
    """For a notebook: the table, with the numbers of those values that are at hand. To
    wait for another process could take forever."""
    try:
        _check(intermediates)
    except TypeError:
        return None

    only_at_hand = lambda x: x if is_at_hand(x) else shape_of(x)
    return _table(jtu.tree_map(only_at_hand, intermediates)).html


def _table(intermediates: Mapping[str, Any]) -> TextTable:
    cells = [row.cells() for row in _rows(intermediates)]
    if not cells:
        return TextTable.of_text(_EMPTY)
    columns = [c for c in _COLUMNS if c in _ALWAYS or any(x[c] for x in cells)]
    return TextTable.of(columns, cells)


def _check(intermediates: Any) -> None:
    of_modes = [intermediates]
    if isinstance(intermediates, Mapping):
        of_modes = intermediates.values()
    for x in of_modes:
        if not isinstance(x, Mapping):
            raise TypeError(
                "`tabulate(intermediates)` takes a dict `{name: {mode: value}}`, and "
                f"there is {type(x).__name__} where a dict should be. Write `out, "
                "intermediates = save_intermediates(fn)(...)` and then "
                "`tabulate(intermediates)`, or `tabulate({'h': intermediates['h']})` "
                "for one name."
            )


# --- what is said of an array ---
def in_one_line(x: Any) -> str:
    """For an event of a `tap` without a callback: an array or a `Summary`."""
    said = _said(x, summary_on_host(x))
    shape = said.pop("shape")
    return "  ".join([shape, *(f"{k} {v}" for k, v in said.items())])


def _said(x: Any, summary: Summary | None) -> dict[str, str]:
    """What the columns say of an array, a shape or a `Summary`, if the `summary` of all
    its entries is that. There are no statistics if no entry is finite."""
    if summary is None:
        return {"shape": "summary" if isinstance(x, Summary) else type_of(x)}
    size, bad = round(float(summary.size)), round(float(summary.not_finite))
    said = {"shape": type_of(x)}
    if isinstance(x, Summary):
        said["shape"] = f"{size} {'entry' if size == 1 else 'entries'}"
    if (entries := float(summary.size - summary.not_finite)) > 0:
        numbers = {c: getattr(summary, c) for c in _STATISTICS[:4]}
        numbers["norm"] = float(summary.rms) * entries**0.5
        said |= {c: f"{float(n):.3g}" for c, n in numbers.items()}
        said["zeros"] = f"{summary.zeros / entries:.0%}"
    return said | ({"not finite": f"{bad}/{size}"} if bad else {})


# --- rows ---
@dc.dataclass
class _Row(Row):
    """What the table says of a leaf `x` of a value: an array, its shape, a `Summary`,
    or `None` if the value has no arrays.

    `counts` are the arrays that say how often it ran. `summary` is that of all entries
    that ran, if there are numbers, and `bad` says where some of them are not finite.
    Both are computed of `run`, how often each execution ran; `in_buffer` says whether
    these are in a buffer.
    """

    columns = _COLUMNS
    x: Any
    counts: list[Any]
    run: Any
    in_buffer: bool
    summary: Summary | None = None

    def said(self) -> dict[str, str]:
        # In 64 bits, since the sum of many int32 may be larger.
        counts = [int(np.sum(c, dtype=np.int64)) for c in self.counts if c is not None]
        count = {"count": str(sum(counts))} if counts else {}
        return _said(self.x, self.summary) | count


def _rows(intermediates: Mapping[str, Any]) -> list[_Row]:
    rows = [row for name in intermediates for row in _rows_of_name(intermediates, name)]
    numeric = [row for row in rows if _has_statistics(row.x)]
    here = [can_be_read((row.x, row.run)) for row in numeric]
    for row in it.compress(numeric, map(op.not_, here)):
        of_row = _numbers(*row.time, in_buffer=row.in_buffer)
        row.summary, row.bad = computed(of_row, row.x, row.run) or (None, None)
    read = [*it.compress(numeric, here)]
    ran = [executed(row.x, row.run, row.in_buffer) for row in read]
    for row, mask, s in zip(read, ran, summaries([row.x for row in read], ran)):
        row.summary = s
        row.bad = not_finite(row.x, mask, row.time) if s.not_finite else None
    # Only now, when all are being computed, are the first ones awaited.
    numbers = jax.device_get([(row.counts, row.summary, row.bad) for row in rows])
    for row, (counts, summary, bad) in zip(rows, numbers):
        row.counts, row.summary, row.bad = counts, summary, bad
    # JAX may have sorted the names of a plain dict.
    if isinstance(intermediates, Intermediates):
        mark_first(rows)
    return rows


def _rows_of_name(intermediates: Mapping[str, Any], name: Any) -> Iterator[_Row]:
    modes = modes_in_order(intermediates[name])
    count = modes.pop("count", None)
    counts = [on_host(c) for c in jtu.tree_leaves(count)]
    # What has no arrays ran all the same.
    nothing = {(): Leaf(None, ())}
    leaves = {mode: leaves_of(intermediates, name, mode) or nothing for mode in modes}
    primals = leaves.get("primal", {})
    # Only leaves with statistics decide whether rows need a path, as there are no
    # summaries of keys, and both tables have the same names.
    with_path = lambda values: sum(_has_statistics(x.x) for x in values.values()) > 1
    several = any(map(with_path, leaves.values()))
    for mode, values in leaves.items():
        for path, (x, axes, when) in values.items():
            if is_state(x):
                continue
            own = axes or ()
            needs_path = several or (len(values) > 1 and not _has_statistics(x))
            primal = primals[path].x if path in primals else x
            run = _runs(count, path, x, primal)
            if run is None and is_value(count):
                of_count = leaves_of(intermediates, name, "count")[()].axes
                run = _aligned(count, of_count, x, own)
            behind = () if run is None else own[run.ndim :]
            yield _Row(
                mode,
                f"{name}{jtu.keystr(path)}" if needs_path else str(name),
                axes,
                when,
                x=x,
                counts=counts,
                run=run,
                in_buffer=[kind for kind, *_ in behind][:1] == ["buffer"],
            )


def _has_statistics(x: Any) -> bool:
    return isinstance(x, Summary) or is_numeric(x)


def _runs(count: Any, path: Sequence[Any], x: Any, primal: Any) -> Any:
    """How often the entries of a leaf ran, if that can be told. With `Append` each
    place has its own count."""
    if isinstance(count, tuple):
        at = getattr(path[0], "idx", None) if path else None
        count = count[at] if at is not None and at < len(count) else None
    # Those of a summary count nothing where it did not run.
    if not all(map(is_value, (x, primal, count))):
        return None
    # A cotangent that is the same for all lanes has no axis for them.
    same = x.shape == primal.shape and count.shape == x.shape[: count.ndim]
    return count if same else None


def _aligned(count: Any, of_count: NamedAxes | None, x: Any, of_x: NamedAxes) -> Any:
    """How often the entries of a derivative ran that has more axes than the value, as
    in `jax.jacfwd`: with axes of size one for these, if there is but one way to do so.
    """
    is_shape = isinstance(count, jax.ShapeDtypeStruct)
    if not of_x or not is_value(x) or of_count is None or is_shape:
        return None
    # The scans of a backward pass are others, but over as much.
    own = [(kind, n) for (kind, *_), n in zip(of_x, x.shape)]
    have = [(kind, n) for (kind, *_), n in zip(of_count, count.shape)]
    every = range(len(own))
    ways = [w for w in it.combinations(every, len(have)) if [own[i] for i in w] == have]
    more = [i for way in ways for i in every if i not in way]
    xp = np if can_be_read(count) else jnp
    return xp.expand_dims(count, more) if len(ways) == 1 else None


@ft.lru_cache(maxsize=64)
def _numbers(
    *time: int, in_buffer: bool
) -> Callable[[Any, Any], tuple[Summary, jax.Array]]:
    """What `summarize` would say of all entries of a row; and where there are some that
    are not finite, along these axes."""

    def fn(x: Any, runs: Any) -> tuple[Summary, jax.Array]:
        if in_buffer:
            # How many are left from each place on: none in those that are empty.
            n = runs.ndim
            places = lax.broadcasted_iota(runs.dtype, x.shape[: n + 1], n)
            runs = leading(runs, n + 1) - places
        n = max([jnp.ndim(runs) if runs is not None else 0, *[a + 1 for a in time]])
        if not isinstance(x, Summary):
            of_each = summary_of
            for _ in range(n):
                of_each = jax.vmap(of_each)
            x = of_each(x)
        if runs is not None:
            # How often each execution ran. A summary of zeros is one of no entries.
            ran = jnp.broadcast_to(leading(runs > 0, n), x.size.shape)
            ran = sharded_like(ran, x.size)
            x = jtu.tree_map(lambda a: select(ran, a, jnp.zeros_like(a)), x)
        every = range(jnp.ndim(x.size))
        bad = jnp.sum(x.not_finite, [a for a in every if a not in time]) > 0
        return merged_summary(x, tuple(every)), bad

    return fn
