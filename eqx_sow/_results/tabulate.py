"""`tabulate`."""

import contextlib
import dataclasses as dc
import functools as ft
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .. import _compat
from .._errors import SowError
from .._frames import api_boundary
from .intermediates import axes_in, axes_of, in_order, Intermediates, Leading, Scan
from .line import not_finite_of, number_of_entries, STATISTICS, statistics_of, type_of
from .summarize import as_array, is_numeric, is_value, merged, Summary, summary_of


_WIDTH = 100
_TEXT = ("name", "mode", "value", "finite")


class _Table(str):
    """Text that a notebook shows as a table, and a prompt without quotes."""

    _html: str

    def __new__(cls, text: str, html: str = ""):
        self = super().__new__(cls, text)
        self._html = html
        return self

    def __repr__(self):
        return str(self)

    def _repr_html_(self):
        return self._html


@api_boundary
def tabulate(intermediates: Mapping[str, Mapping[str, Any]]) -> str:
    """A table of what [`eqx_sow.save_intermediates`][] captured, as text.

    It has one row for each name and mode (and leaf, if the value has several), in order
    of execution, and at most 100 columns of text. A value without arrays, such as a
    Python number, has a row without numbers. `count` is the sum over all axes. The
    statistics are those of the finite entries of executions that took place; complex
    numbers count by their magnitude. `zeros` is the share of entries that are zero. A
    [`eqx_sow.Summary`][], with any number of leading axes, is one row. It has the
    numbers that the row of the values would have, and the number of entries in place of
    their shape.

    An arrow marks the row with the first entry, in order of execution, that is not
    finite. In a loop, that is the row that went wrong in the earliest iteration; a
    backward pass goes through the rows from the last to the first. A leading axis from
    a `jax.vmap` or a loop around `save_intermediates` counts as time, too. Of what a
    reducer has combined, only such axes and the order of the rows count; where the
    shape of a value has been changed, only the order of the rows. `jax.jit` sorts the
    names of a plain dict, and a table of sorted names has no arrow; numbers in names
    are then in order, 2 before 10. What `save_intermediates` returns is an
    [`eqx_sow.Intermediates`][], whose order is always that of execution.

    The statistics are computed on the device, by [`eqx_sow.summarize`][], which is
    compiled once for each shape; only these numbers come to the host. Values may be
    spread over several processes: then all of them must call `tabulate`, and all get
    the same table. Without `jax_enable_x64`, NumPy's float64 and int64 arrays are
    converted to float32 first.

    **Arguments:**

    - `intermediates`: what `save_intermediates` returned, with values, summaries or
        both; or its shapes, as `eqx.filter_eval_shape` returns them.

    **Returns:**

    A string. In a notebook it is displayed as an HTML table, with unabbreviated names.

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
    for name, modes in intermediates.items():
        if any(isinstance(x, jax.core.Tracer) for x in jtu.tree_leaves(modes)):
            raise SowError(
                f"`tabulate`: the value of {name!r} is a tracer, which has no numbers "
                "yet. Return the intermediates from the transformed function, and call "
                "`tabulate` on what comes back."
            )
    rows = _rows(intermediates)
    for digits, gap in ((3, 2), (2, 1)):
        lines = _layout([row.cells(digits) for row in rows], gap)
        if max(map(len, lines)) <= _WIDTH:
            break
    return _Table("\n".join(lines), _html(rows))


def html(intermediates: Any) -> str | None:
    """For a notebook: the table, with the numbers of those values that are at hand. To
    wait for another process could take forever."""
    try:
        _check(intermediates)
    except TypeError:
        return None

    def at_hand(x):
        is_there = not isinstance(x, jax.core.Tracer) and (
            x.is_fully_addressable and not x.is_deleted()
        )
        return x if is_there else jax.ShapeDtypeStruct(x.shape, x.dtype)

    only_at_hand = lambda x: at_hand(x) if isinstance(x, jax.Array) else x
    return _html(_rows(jtu.tree_map(only_at_hand, intermediates)))


def _check(intermediates):
    wrong = intermediates
    if isinstance(intermediates, Mapping):
        values = intermediates.values()
        wrong = next((x for x in values if not isinstance(x, Mapping)), None)
        if wrong is None:
            return
    raise TypeError(
        "`tabulate(intermediates)` takes a dict `{name: {mode: value}}`, and there is "
        f"{type(wrong).__name__} where a dict should be. Write `out, intermediates = "
        "save_intermediates(fn)(...)` and then `tabulate(intermediates)`, or "
        "`tabulate({'h': intermediates['h']})` for one name."
    )


def _ordered(intermediates: Mapping[str, Any]) -> bool:
    """Whether the order of the names is that of execution. If they are sorted, JAX may
    have done it."""
    names = list(map(str, intermediates))
    known = isinstance(intermediates, Intermediates) or len(names) < 2
    return known or names != sorted(names)


def _natural(name: Any) -> list[Any]:
    parts = re.split(r"(\d+)", str(name))
    return [int(p) if i % 2 else p for i, p in enumerate(parts)]


@dc.dataclass
class _Row:
    """What the table says of a leaf `x` of a value: an array, its shape, a `Summary`,
    or `None` if the value has no arrays.

    `leading` is what is known of its axes. `counts` are the arrays that say how often
    it ran. `summary` is that of all entries that ran, if there are numbers.
    """

    name: str
    mode: str
    x: Any
    leading: Leading | None
    counts: list[Any]
    summary: Summary | None
    is_first_bad: bool = False

    @property
    def not_finite(self) -> str:
        return "" if self.summary is None else not_finite_of(self.summary)

    @property
    def _value(self) -> str:
        if self.x is None:
            return ""
        if not isinstance(self.x, Summary):
            return type_of(self.x)
        return "summary" if self.summary is None else number_of_entries(self.summary)

    def cells(self, digits: int) -> dict[str, str]:
        # In 64 bits, since the sum of many int32 may be larger.
        counts = [int(np.sum(c, dtype=np.int64)) for c in self.counts if c is not None]
        numbers = {} if self.summary is None else statistics_of(self.summary, digits)
        return (
            dict.fromkeys(STATISTICS, "")
            | numbers
            | {
                "name": self.name,
                "mode": self.mode,
                "value": self._value,
                "count": str(sum(counts)) if counts else "",
                "finite": self.not_finite + (" <- first" if self.is_first_bad else ""),
            }
        )


def _rows(intermediates: Mapping[str, Any]) -> list[_Row]:
    names = list(intermediates)
    if not _ordered(intermediates):
        names.sort(key=_natural)
    rows = [row for name in names for row in _rows_of_name(intermediates, name)]
    # Only now, when all are being computed, are the first ones awaited.
    numbers = jax.device_get([(row.counts, row.summary) for row in rows])
    for row, (counts, summary) in zip(rows, numbers):
        row.counts, row.summary = counts, summary
    if _ordered(intermediates):
        _mark_first_bad(rows)
    return rows


def _rows_of_name(intermediates: Mapping[str, Any], name: Any) -> Iterator[_Row]:
    modes = in_order(intermediates[name])
    count = modes.pop("count", None)
    counts = [_computed(_itself, c) for c in jtu.tree_leaves(count)]
    # What has no arrays ran all the same.
    leaves = {mode: _leaves(value) or {(): None} for mode, value in modes.items()}
    primals = leaves.get("primal", {})
    # Only leaves with statistics decide whether rows need a path, as there are no
    # summaries of keys, and both tables have the same names.
    several = any(sum(map(_has_statistics, x.values())) > 1 for x in leaves.values())
    for mode, values in leaves.items():
        axes = axes_in(intermediates, name, mode)
        for path, x in values.items():
            numeric = _has_statistics(x)
            needs_path = several or (len(values) > 1 and not numeric)
            run = _runs(count, path, x, primals.get(path, x))
            yield _Row(
                f"{name}{jtu.keystr(path)}" if needs_path else str(name),
                mode,
                x,
                # Those of the first array, if it is a summary.
                [*(next(axes, None) for _ in jtu.tree_leaves(x)), None][0],
                counts,
                _computed(_summary, x, run) if numeric else None,
            )


def _leaves(value: Any) -> dict[Any, Any]:
    is_summary = lambda x: isinstance(x, Summary)
    leaves, _ = jtu.tree_flatten_with_path(value, is_leaf=is_summary)
    return {p: x for p, x in leaves if is_summary(x) or is_value(x)}


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


def _computed(fn: Callable, value: Any, *others: Any) -> Any:
    """Starts to compute on the device. `None` if there are only shapes. Each process
    gets all of the result."""
    leaves = jtu.tree_leaves((value, others))
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        return None
    # Host arrays go to wherever the others are.
    local = lambda x: not isinstance(x, jax.Array) or x.is_fully_addressable
    others = jtu.tree_map(lambda x: np.asarray(x) if local(x) else x, others)
    shardings = [x.sharding for x in leaves if isinstance(x, jax.Array)]
    meshes = [s.mesh for s in shardings if isinstance(s, jax.sharding.NamedSharding)]
    # While a function is being traced, numbers are still numbers.
    now = contextlib.nullcontext if _compat.is_eager() else jax.ensure_compile_time_eval
    with now():
        return _compiled(fn, *meshes[:1])(as_array(value), *others)


@ft.lru_cache(maxsize=64)
def _compiled(fn: Callable, mesh: Any = None) -> Callable:
    if mesh is None:
        return jax.jit(fn)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.jit(fn, out_shardings=everywhere)


def _itself(count: Any) -> Any:
    return count


def _summary(x: Any, runs: Any) -> Summary:
    """What `summarize` would say of all entries of a row. If `runs` are given, they say
    how often each execution along the leading axes ran."""
    if not isinstance(x, Summary):
        of_each = summary_of
        for _ in range(jnp.ndim(runs) if runs is not None else 0):
            of_each = jax.vmap(of_each)
        x = of_each(x)
    if runs is not None:
        # A summary of zeros is one of no entries.
        x = jtu.tree_map(lambda a: jnp.where(runs > 0, a, 0), x)
    return merged(x, tuple(range(jnp.ndim(x.size))))


# --- which row was the first with an entry that is not finite ---
# Axes along which time goes by: those of scans, and (`None`) what a transformation
# further out has put before them.
_TimeAxes = list[tuple[int, Scan | None]]


def _mark_first_bad(rows: Sequence[_Row]) -> None:
    bad = [(i, row) for i, row in enumerate(rows) if row.not_finite]
    axes = [_time_axes(row) if len(bad) > 1 else [] for _, row in bad]
    where = [
        _computed(_bad_along(*[axis for axis, _ in of_row]), row.x) if of_row else None
        for (_, row), of_row in zip(bad, axes)
    ]
    first: _Time | None = None
    for (i, row), of_row, is_bad in zip(bad, axes, jax.device_get(where)):
        time = _Time(row, _first_place(of_row, is_bad), _in_pass(row.mode, i))
        first = time if first is None or time.is_before(first) else first
    if first is not None:
        first.row.is_first_bad = True


def _time_axes(row: _Row) -> _TimeAxes:
    """None if the array has another shape by now than what came back."""
    x = row.x.size if isinstance(row.x, Summary) else row.x
    axes = row.leading and axes_of(row.leading, x)
    return [
        (i, scan)
        for i, (kind, _, scan) in enumerate(axes or ())
        if scan or kind == "outside"
    ]


@ft.lru_cache(maxsize=64)
def _bad_along(*axes: int) -> Callable:
    """Where along these axes there is what is not finite."""

    def fn(x: Any) -> jax.Array:
        bad = x.not_finite > 0 if isinstance(x, Summary) else ~jnp.isfinite(x)
        return jnp.any(bad, tuple(set(range(bad.ndim)) - set(axes)))

    return fn


def _first_place(axes: _TimeAxes, bad: Any) -> list[tuple[Scan | None, int]]:
    """The scans around the first entry that is not finite, and its iteration in each,
    counted from the one that ran first. `bad` is what `_bad_along` returned, if there
    are numbers."""
    if not axes or bad is None:
        return []
    reverse = tuple(i for i, (_, scan) in enumerate(axes) if scan and scan[-1][1])
    at = np.argwhere(np.flip(bad, reverse))[0].tolist()
    return [(scan, i) for i, (_, scan) in zip(at, axes)]


class _Time(NamedTuple):
    """When the first entry of a row that is not finite was computed: in which iteration
    of each scan around, in which pass, and where in that."""

    row: _Row
    iterations: list[tuple[Scan | None, int]]
    order: tuple[int, int]

    def is_before(self, other: "_Time") -> bool:
        for (scan, i), (same, j) in zip(self.iterations, other.iterations):
            if scan != same:
                break
            if i != j:
                return i < j
        return self.order < other.order


def _in_pass(mode: str, row: int) -> tuple[int, int]:
    """In which pass a row was computed, and where in that.

    Each `grad` runs what was there, and then all of it backward. So the first one makes
    two passes of one, and one around it four of these two. The cotangent of what runs
    in pass `i` of `n` runs in pass `2 * n - 1 - i`:

        primal, cotangent | cotangent.cotangent, ...
           0        1     |          2            3
    """
    pass_, passes, sign = 0, 1, 1
    for part in str(mode).split("."):
        if part == "cotangent":
            pass_, sign = 2 * passes - 1 - pass_, -sign
        if part != "tangent":
            passes *= 2
    return pass_, sign * row


# --- text and HTML ---
def _columns(rows: Sequence[dict[str, str]]) -> dict[str, str]:
    """Which there are, and their titles."""
    titles = {c: c for c in ("name", "mode", "value", "count", *STATISTICS, "finite")}
    titles |= {"value": "shape", "finite": "not finite"}
    return {
        c: title
        for c, title in titles.items()
        if c in _TEXT[:3] or any(row[c] for row in rows)
    }


def _layout(rows, gap):
    columns = _columns(rows)
    widths = {c: max(len(row[c]) for row in (columns, *rows)) for c in columns}
    room = _WIDTH - gap * (len(columns) - 1) - sum(widths.values())
    if gap == 1:
        for c, least in (("name", 20), ("value", 12), ("name", 8)):
            cut = min(max(-room, 0), max(widths[c] - least, 0))
            widths[c] -= cut
            room += cut

    def line(row):
        cells = [
            _shorten(row[c], widths[c]).ljust(widths[c])
            if c in _TEXT
            else row[c].rjust(widths[c])
            for c in columns
        ]
        return (" " * gap).join(cells).rstrip()

    lines = [line(columns), "-" * (sum(widths.values()) + gap * (len(columns) - 1))]
    lines += [line(row) for row in _without_repeats(rows)]
    return lines


def _without_repeats(rows):
    name = None
    for row in rows:
        yield {**row, "name": "" if row["name"] == name else row["name"]}
        name = row["name"]


def _html(rows: Sequence[_Row]) -> str:
    cells = [row.cells(digits=3) for row in rows]
    columns = _columns(cells)

    def line(row, tag, style=""):
        text = "".join(
            f'<{tag} style="text-align: {"left" if c in _TEXT else "right"}">'
            f"{escape(row[c])}</{tag}>"
            for c in columns
        )
        return f"<tr{style}>{text}</tr>"

    bold = ' style="font-weight: bold"'
    body = [
        line(row_cells, "td", bold if row.is_first_bad else "")
        for row_cells, row in zip(_without_repeats(cells), rows)
    ]
    head = f"<thead>{line(columns, 'th')}</thead>"
    return f"<table>{head}<tbody>{''.join(body)}</tbody></table>"


def _shorten(text, width):
    """Cuts the words of a path, longest first, so that its indices can be read."""
    parts = text.split("/")
    while sum(map(len, parts)) + len(parts) - 1 > width:
        i = max(
            range(len(parts)), key=lambda i: len(parts[i]) - 3 * (i == len(parts) - 1)
        )
        if len(parts[i]) == 1:
            return text[: width - 1] + "…"
        parts[i] = parts[i][:-1]
    return "/".join(parts)
