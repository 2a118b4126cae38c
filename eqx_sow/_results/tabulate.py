"""`tabulate`."""

import contextlib
import functools as ft
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .. import _compat
from .._errors import SowError
from .._frames import api_boundary
from .first import axes_of_time, bad_along, Time
from .intermediates import axes_in, in_order, Intermediates, Leading
from .summarize import as_array, is_numeric, is_value, merged, Summary, summary_of


_WIDTH = 100
_TEXT = ("name", "mode", "value", "finite")
_STATISTICS = ("mean", "std", "min", "max", "norm", "zeros")


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
    rows = _computed(intermediates, _device)
    for digits, gap in ((3, 2), (2, 1)):
        lines = _layout([_cells(row, digits) for row in rows], gap)
        if max(map(len, lines)) <= _WIDTH:
            break
    return _Table("\n".join(lines), _html(rows))


def html(intermediates: Any) -> str | None:
    """For a notebook: the table, as far as there are numbers at hand."""
    try:
        _check(intermediates)
    except TypeError:
        return None
    return _html(_computed(intermediates, _at_hand))


def _computed(intermediates: Mapping[str, Any], compute: Callable) -> list[dict]:
    rows = _fetched(list(_rows(intermediates, compute)))
    _point(rows, intermediates, compute)
    return rows


def _check(intermediates):
    wrong = intermediates
    if isinstance(intermediates, Mapping):
        wrong = [x for x in intermediates.values() if not isinstance(x, Mapping)]
        if not wrong:
            return
        wrong = wrong[0]
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


def _rows(intermediates: Mapping[str, Any], compute: Callable) -> Iterator[dict]:
    names = list(intermediates)
    if not _ordered(intermediates):
        names.sort(key=_natural)
    for name in names:
        modes = in_order(intermediates[name])
        count = modes.pop("count", None)
        counts = [compute(name, _itself, c) for c in jtu.tree_leaves(count)]
        # What has no arrays ran all the same.
        leaves = {m: _leaves(value) or {(): None} for m, value in modes.items()}
        primals = leaves.get("primal", {})
        # Summaries have none of keys: what is counted here has statistics.
        several = any(sum(map(_counts, x.values())) > 1 for x in leaves.values())
        for mode, values in leaves.items():
            known = axes_in(intermediates, name, mode)
            for path, x in values.items():
                many = several or (len(values) > 1 and not _counts(x))
                run = _runs(count, path, x, primals.get(path, x))
                yield {
                    "name": f"{name}{jtu.keystr(path)}" if many else str(name),
                    "mode": mode,
                    "value": _type(x),
                    "count": counts,
                    "numbers": compute(name, _summary, x, run) if _counts(x) else None,
                    "of": (x, _taken(known, x)),
                    "finite": "",
                    "first": False,
                }


def _leaves(value: Any) -> dict[Any, Any]:
    is_summary = lambda x: isinstance(x, Summary)
    leaves, _ = jtu.tree_flatten_with_path(value, is_leaf=is_summary)
    return {p: x for p, x in leaves if is_summary(x) or is_value(x)}


def _taken(known: Iterator[Leading], x: Any) -> Leading | None:
    """What is known of an array, or of the first of a summary."""
    there = [a for a in jtu.tree_leaves(x) if jnp.result_type(a) != jax.dtypes.float0]
    return ([next(known, None) for _ in there] or [None])[0]


def _counts(x):
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


def _device(name: Any, fn: Callable, *args: Any) -> Any:
    """Starts to compute. `None` if there are only shapes."""
    leaves = jtu.tree_leaves(args)
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        raise SowError(
            f"`tabulate`: the value of {name!r} is a tracer, which has no numbers yet. "
            "Return the intermediates from the transformed function, and call "
            "`tabulate` on what comes back."
        )
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        return None
    # Host arrays go to wherever the others are.
    local = lambda x: not isinstance(x, jax.Array) or x.is_fully_addressable
    value, *others = args
    others = jtu.tree_map(lambda x: np.asarray(x) if local(x) else x, others)
    # While a function is being traced, numbers are still numbers.
    now = contextlib.nullcontext if _compat.is_eager() else jax.ensure_compile_time_eval
    with now():
        shardings = [x.sharding for x in leaves if isinstance(x, jax.Array)]
        return _compiled(fn, _everywhere(shardings))(as_array(value), *others)


def _at_hand(name: Any, fn: Callable, *args: Any) -> Any:
    """The same, but for what would have to be awaited from another process, or cannot
    be had."""

    def there(x):
        if isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct):
            return False
        return not isinstance(x, jax.Array) or (
            x.is_fully_addressable and not x.is_deleted()
        )

    if not all(map(there, jtu.tree_leaves(args))):
        return None
    return _device(name, fn, *args)


def _everywhere(shardings: Sequence[Any]) -> Any:
    """The sharding of numbers that each process has."""
    for s in shardings:
        if isinstance(s, jax.sharding.NamedSharding):
            return jax.sharding.NamedSharding(s.mesh, jax.sharding.PartitionSpec())
    return None


@ft.lru_cache(maxsize=64)
def _compiled(fn: Callable, sharding: Any) -> Callable:
    return jax.jit(fn) if sharding is None else jax.jit(fn, out_shardings=sharding)


def _itself(count: Any) -> Any:
    return count


def _summary(x: Any, run: Any) -> Summary:
    """Of one row: what `summarize` would say of all its entries that ran."""
    if isinstance(x, Summary):
        return merged(x, tuple(range(jnp.ndim(x.size))))
    return summary_of(x, None if run is None else run > 0)


def _fetched(rows: list[dict]) -> list[dict]:
    for row, (counts, summary) in zip(
        rows, jax.device_get([(row["count"], row["numbers"]) for row in rows])
    ):
        # In 64 bits, as the sum of many int32.
        sums = [int(np.sum(c, dtype=np.int64)) for c in counts if c is not None]
        row["count"] = str(sum(sums)) if sums else ""
        if summary is None:
            continue
        row["numbers"] = summary
        size, bad = round(float(summary.size)), round(float(summary.not_finite))
        if row["value"] == _SUMMARY:
            row["value"] = f"{size} {'entry' if size == 1 else 'entries'}"
        if bad:
            row["finite"] = f"{bad}/{size}"
    return rows


def _point(
    rows: Sequence[dict], intermediates: Mapping[str, Any], compute: Callable
) -> None:
    """Marks the row with the first entry that is not finite."""
    bad = [i for i, row in enumerate(rows) if row["finite"]]
    if not bad or not _ordered(intermediates):
        return
    several = len(bad) > 1
    axes = [axes_of_time(*rows[i]["of"]) if several else () for i in bad]
    there = [
        compute(rows[i]["name"], bad_along(*[a for a, _ in of]), rows[i]["of"][0])
        if of
        else None
        for i, of in zip(bad, axes)
    ]
    times = [
        Time.of(rows[i]["mode"], i, of, x)
        for i, of, x in zip(bad, axes, jax.device_get(there))
    ]
    first = ft.reduce(lambda a, b: b if b.is_before(a) else a, times)
    rows[first.row]["first"] = True


def _cells(row: dict, digits: int) -> dict[str, str]:
    cells = dict.fromkeys(_STATISTICS, "")
    cells |= {c: row[c] for c in (*_TEXT, "count")}
    if row["first"]:
        cells["finite"] += " <- first"
    summary = row["numbers"]
    if summary is None:
        return cells
    entries = float(summary.size - summary.not_finite)
    if entries > 0:
        numbers = {c: float(getattr(summary, c)) for c in ("mean", "std", "min", "max")}
        numbers["norm"] = float(summary.rms) * math.sqrt(entries)
        cells |= {c: f"{x:.{digits}g}" for c, x in numbers.items()}
        cells["zeros"] = f"{summary.zeros / entries:.0%}"
    return cells


def _columns(rows: Sequence[dict[str, str]]) -> dict[str, str]:
    """Which there are, and their titles."""
    titles = {c: c for c in ("name", "mode", "value", "count", *_STATISTICS, "finite")}
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


def _html(rows: Sequence[dict]) -> str:
    cells = [_cells(row, 3) for row in rows]
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
        line(row, "td", bold if full["first"] else "")
        for row, full in zip(_without_repeats(cells), rows)
    ]
    head = f"<thead>{line(columns, 'th')}</thead>"
    return f"<table>{head}<tbody>{''.join(body)}</tbody></table>"


_SUMMARY = "summary"


def _type(x):
    if x is None:
        return ""
    if isinstance(x, Summary):
        return _SUMMARY
    return jax.core.ShapedArray(x.shape, x.dtype).str_short(short_dtypes=True)


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
