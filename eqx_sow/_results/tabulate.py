"""`tabulate`, and what a line of text says of an array."""

import contextlib
import dataclasses as dc
import functools as ft
import itertools as it
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

import jax
import jax.core
import jax.lax as lax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .. import _compat
from .._arrays import leading, select, sharded_like
from .._errors import SowError
from .._frames import api_boundary
from .intermediates import axes_in, in_order, Intermediates, is_state
from .layers import NamedAxes, Scan
from .summarize import (
    as_array,
    is_numeric,
    is_value,
    merged,
    Summary,
    summary_of,
    summary_on_host,
)


_WIDTH = 100
_STATISTICS = ("mean", "std", "min", "max", "norm", "zeros")
_COLUMNS = ("name", "mode", "shape", "count", *_STATISTICS, "not finite")
_TEXT = ("name", "mode", "shape", "not finite")
_FIRST = " <- first"


class _Table(str):
    """Text that a notebook shows as a table, and a prompt without quotes."""

    html: str
    __repr__ = str.__str__

    def _repr_html_(self):
        return self.html


@api_boundary
def tabulate(intermediates: Mapping[str, Mapping[str, Any]]) -> str:
    """A table of what [`eqx_sow.save_intermediates`][] captured, as text.

    It has one row for each name and mode (and leaf, if the value has several), in order
    of execution, and at most 100 columns of text. A value without arrays, such as a
    Python number, has a row without numbers. An `eqx.nn.State`, which belongs to the
    model, has no row. `count` is the sum over all axes. The statistics are those of the
    finite entries of executions that took place; complex numbers count by their
    magnitude. `zeros` is the share of entries that are zero. A [`eqx_sow.Summary`][],
    with any number of leading axes, is one row. It has the numbers that the row of the
    values would have, and the number of entries in place of their shape.

    An arrow marks the row with the first entry, in order of execution, that is not
    finite. In a loop, that is the row that went wrong in the earliest iteration; a
    backward pass goes through the rows from the last to the first. A leading axis from
    a `jax.vmap` or a loop around `save_intermediates` counts as time, too. Of what a
    reducer has combined, only such axes and the order of the rows count; where the
    shape of a value has been changed, only the order of the rows. What
    `save_intermediates` returns is an [`eqx_sow.Intermediates`][], whose order is
    always that of execution; `jax.jit` sorts the names of a plain dict, and the table
    of one has no arrow.

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
    table = _Table(_text(rows))
    table.html = _html(rows)
    return table


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
    said = _said(x, summary_on_host(x), digits=3)
    shape = said.pop("shape")
    return "  ".join([shape, *(f"{k} {v}" for k, v in said.items())])


def _said(x: Any, summary: Summary | None, digits: int) -> dict[str, str]:
    """What the columns say of an array, a shape or a `Summary`, if the `summary` of all
    its entries is that. There are no statistics if no entry is finite."""
    if summary is None:
        return {"shape": "summary" if isinstance(x, Summary) else _type_of(x)}
    size, bad = round(float(summary.size)), round(float(summary.not_finite))
    said = {"shape": _type_of(x)}
    if isinstance(x, Summary):
        said["shape"] = f"{size} {'entry' if size == 1 else 'entries'}"
    if (entries := float(summary.size - summary.not_finite)) > 0:
        numbers = {c: getattr(summary, c) for c in _STATISTICS[:4]}
        numbers["norm"] = float(summary.rms) * entries**0.5
        said |= {c: f"{float(n):.{digits}g}" for c, n in numbers.items()}
        said["zeros"] = f"{summary.zeros / entries:.0%}"
    return said | ({"not finite": f"{bad}/{size}"} if bad else {})


def _type_of(x: Any) -> str:
    """Such as `f32[3]`."""
    if not is_value(x):
        return ""
    return jax.core.ShapedArray(x.shape, x.dtype).str_short(short_dtypes=True)


# --- rows ---
_itself: Callable[[Any], Any] = lambda x: x


@dc.dataclass
class _Row:
    """What the table says of a leaf `x` of a value: an array, its shape, a `Summary`,
    or `None` if the value has no arrays.

    `counts` are the arrays that say how often it ran. `summary` is that of all entries
    that ran, if there are numbers. `bad` says where some are not finite, along the axes
    along which time goes by. `scans` are what these are: `None` for what a
    transformation further out has put before the others.
    """

    name: str
    mode: str
    x: Any
    scans: Sequence[Scan | None]
    counts: list[Any]
    summary: Summary | None
    bad: Any
    is_first_bad: bool = False

    def cells(self, digits: int) -> dict[str, str]:
        cells = dict.fromkeys(_COLUMNS, "") | _said(self.x, self.summary, digits)
        # In 64 bits, since the sum of many int32 may be larger.
        counts = [int(np.sum(c, dtype=np.int64)) for c in self.counts if c is not None]
        cells |= {"name": self.name, "mode": self.mode}
        cells |= {"count": str(sum(counts))} if counts else {}
        cells["not finite"] += _FIRST if self.is_first_bad else ""
        return cells


def _rows(intermediates: Mapping[str, Any]) -> list[_Row]:
    rows = [row for name in intermediates for row in _rows_of_name(intermediates, name)]
    # Only now, when all are being computed, are the first ones awaited.
    numbers = jax.device_get([(row.counts, row.summary, row.bad) for row in rows])
    for row, (counts, summary, bad) in zip(rows, numbers):
        row.counts, row.summary, row.bad = counts, summary, bad
    # JAX may have sorted the names of a plain dict.
    if isinstance(intermediates, Intermediates):
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
            # Of a summary, those of its first array. None if they are not known.
            own, *_ = *(next(axes, None) for _ in jtu.tree_leaves(x)), ()
            own = own or ()
            if is_state(x):
                continue
            run = _runs(count, path, x, primals.get(path, x))
            if run is None and is_value(count):
                of_count = next(axes_in(intermediates, name, "count"), None)
                run = _aligned(count, of_count, x, own)
            # The axes along which time goes by, and their scans.
            time = {
                i: scan
                for i, (kind, _, scan) in enumerate(own)
                if scan or kind == "outside"
            }
            behind = () if run is None else own[run.ndim :]
            in_buffer = [kind for kind, *_ in behind][:1] == ["buffer"]
            of_row = _numbers(*time, in_buffer=in_buffer)
            numbers = _computed(of_row, x, run) if numeric else None
            summary, bad = numbers or (None, None)
            yield _Row(
                f"{name}{jtu.keystr(path)}" if needs_path else str(name),
                mode,
                x,
                [*time.values()],
                counts,
                summary,
                bad,
            )


def _leaves(value: Any) -> dict[Any, Any]:
    is_whole = lambda x: isinstance(x, Summary) or is_state(x)
    leaves, _ = jtu.tree_flatten_with_path(value, is_leaf=is_whole)
    return {p: x for p, x in leaves if is_whole(x) or is_value(x)}


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
    return jnp.expand_dims(count, more) if len(ways) == 1 else None


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
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    everywhere = NamedSharding(meshes[0], PartitionSpec()) if meshes else None
    # While a function is being traced, numbers are still numbers.
    now = contextlib.nullcontext if _compat.is_eager() else jax.ensure_compile_time_eval
    with now():
        # JAX finds what it has compiled by the function.
        return jax.jit(fn, out_shardings=everywhere)(as_array(value), *others)


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
        return merged(x, tuple(every)), bad

    return fn


# --- which row was the first with an entry that is not finite ---
def _mark_first_bad(rows: Sequence[_Row]) -> None:
    # All of a scan comes where the first row in it does. Which of two rows in it came
    # first, their iterations say.
    began: dict[Scan | None, tuple[int, int]] = {}
    times = []
    for order, i in sorted((_in_pass(row.mode, i), i) for i, row in enumerate(rows)):
        bad, scans = rows[i].bad, rows[i].scans
        if bad is None or not bad.any():
            continue
        # The iteration of each scan around the first such entry, counted from the one
        # that ran first.
        back = tuple(k for k, scan in enumerate(scans) if scan and scan[-1][1])
        at = np.argwhere(np.flip(bad, back))[0].tolist()
        place = [(began.setdefault(scan, order), n) for scan, n in zip(scans, at)]
        times.append(([*place, (order, 0)], i))
    if times:
        _, first = min(times)
        rows[first].is_first_bad = True


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
def _cells(rows: Sequence[_Row], digits: int) -> list[dict[str, str]]:
    """The titles of those columns that there are, and the cells of each row, which has
    no name if it is that of the row above."""
    every = [row.cells(digits) for row in rows]
    columns = [
        c for c in _COLUMNS if c in _TEXT[:3] or any(cells[c] for cells in every)
    ]
    names = [None, *(row.name for row in rows)]
    for cells, above in zip(every, names):
        cells["name"] = "" if cells["name"] == above else cells["name"]
    return [
        {c: cells[c] for c in columns} for cells in ({c: c for c in columns}, *every)
    ]


def _text(rows: Sequence[_Row]) -> str:
    for digits, gap in ((3, 2), (2, 1)):
        cells = _cells(rows, digits)
        widths = {c: max(len(row[c]) for row in cells) for c in cells[0]}
        over = sum(widths.values()) + gap * (len(widths) - 1) - _WIDTH
        if over <= 0:
            break
    for c, least in (("name", 20), ("shape", 12), ("name", 8)):
        cut = min(max(over, 0), max(widths[c] - least, 0))
        widths[c] -= cut
        over -= cut

    def line(row):
        text = {
            c: _shorten(row[c], n).ljust(n) for c, n in widths.items() if c in _TEXT
        }
        number = {c: row[c].rjust(n) for c, n in widths.items()}
        return (" " * gap).join((number | text).values()).rstrip()

    head, *body = map(line, cells)
    return "\n".join([head, "-" * (_WIDTH + over), *body])


def _html(rows: Sequence[_Row]) -> str:
    def line(cells, tag):
        text = "".join(
            f'<{tag} style="text-align: {"left" if c in _TEXT else "right"}">'
            f"{escape(cell)}</{tag}>"
            for c, cell in cells.items()
        )
        is_first = _FIRST in cells.get("not finite", "")
        bold = ' style="font-weight: bold"' if is_first else ""
        return f"<tr{bold}>{text}</tr>"

    head, *body = _cells(rows, digits=3)
    lines = "".join(line(cells, "td") for cells in body)
    return f"<table><thead>{line(head, 'th')}</thead><tbody>{lines}</tbody></table>"


def _shorten(text: str, width: int) -> str:
    """Cuts the words of a name, longest first, so that its indices can be read: those
    of `conv1` as well, unless there is no room."""
    for words, n in it.product((r"[^\W\d_]+", r"[^\W\d]\w*"), range(len(text), 0, -1)):
        short = re.sub(words, lambda word: word[0][:n], text)
        if len(short) <= width:
            return short
    return text[: width - 1] + "…" if text else ""
