"""Tables, as text and in a notebook; and their rows: one for each leaf of a value, and
which of them went wrong first."""

import dataclasses as dc
import itertools as it
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, ClassVar, NamedTuple, Self

import jax.core
import jax.tree_util as jtu
import numpy as np

from .._errors import SowError
from .layers import axes_of_each, Known, NamedAxes, Scan
from .leaves import is_state, is_value
from .summarize import Summary


# The arrow, and the columns that begin at the left.
FIRST = " <- first"
_TEXT = "name", "mode", "shape", "not finite", "beyond"


class TextTable(str):
    """Text that a notebook shows as a table, and a prompt without quotes."""

    html: str
    __repr__ = str.__str__

    def _repr_html_(self):
        return self.html

    @classmethod
    def of_text(cls, text: str) -> Self:
        table = cls(text)
        table.html = f"<p>{escape(text)}</p>"
        return table

    @classmethod
    def of(
        cls,
        columns: Sequence[str],
        rows: Sequence[Mapping[str, str]],
        below: str = "",
    ) -> Self:
        """Of the cells of each row. What has the name of the row above shows none. Text
        may follow `below`."""
        names = [None, *(row["name"] for row in rows)]
        above = zip(rows, names)
        rows = [{**x, "name": x["name"] * (x["name"] != name)} for x, name in above]
        table = cls(_text(columns, rows) + (f"\n\n{below}" if below else ""))
        table.html = _html(columns, rows, below)
        return table


def _text(columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> str:
    every = [dict(zip(columns, columns)), *rows]
    widths = {c: max(len(row[c]) for row in every) for c in columns}

    def line(row):
        pad = lambda c: str.ljust if c in _TEXT else str.rjust
        return "  ".join(pad(c)(row[c], n) for c, n in widths.items()).rstrip()

    head, *body = map(line, every)
    rule = "-" * (sum(widths.values()) + 2 * (len(widths) - 1))
    return "\n".join([head, rule, *body])


def _html(columns: Sequence[str], rows: Sequence[Mapping[str, str]], below: str) -> str:
    def line(row, tag):
        text = "".join(
            f'<{tag} style="text-align: {"left" if c in _TEXT else "right"}; '
            f'white-space: nowrap">{escape(row[c])}</{tag}>'
            for c in columns
        )
        is_first = any(FIRST in row[c] for c in columns)
        bold = ' style="font-weight: bold"' if is_first else ""
        return f"<tr{bold}>{text}</tr>"

    head, body = line(dict(zip(columns, columns)), "th"), [line(x, "td") for x in rows]
    below = f'<p style="white-space: pre-wrap">{escape(below)}</p>' if below else ""
    return (
        f'<div style="overflow-x: auto"><table><thead>{head}</thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>{below}"
    )


# --- rows ---
class Leaf(NamedTuple):
    """A leaf of a value, a `Summary` or an `eqx.nn.State`; its leading axes, `None` if
    they are not known any more; and if that is known, where among all runs the one was
    that it is of."""

    x: Any
    axes: NamedAxes | None = ()
    when: int | None = None


def is_whole(x: Any) -> bool:
    return isinstance(x, Summary) or is_state(x)


def has_arrays(x: Any) -> bool:
    return is_whole(x) or is_value(x)


def leaves_of(
    intermediates: Mapping[str, Any],
    name: Any,
    mode: str,
    is_leaf: Callable[[Any], bool] = is_whole,
    selected: Callable[[Any], bool] = has_arrays,
) -> dict[Any, Leaf]:
    """Those of a value, by their paths."""
    value = intermediates[name][mode]
    everything: Known = getattr(intermediates, "_known", Known())
    known: Any = everything.of(name, mode)
    order, several = everything.order.get(name, ()), isinstance(known, list)
    known = (*it.chain(*known),) if several else known
    axes = iter(axes_of_each(known, value) if known else ())
    leaves = {}
    for path, x in jtu.tree_leaves_with_path(value, is_leaf=is_leaf):
        # Of a summary, those of its first array.
        own = [*it.islice(axes, sum(map(is_value, jtu.tree_leaves(x))))]
        if selected(x):
            run = getattr(path[0], "idx", 0) if several and path else 0
            when = order[min(run, len(order) - 1)] if order else None
            leaves[path] = Leaf(x, own[0] if own else (), when)
    return leaves


def check_no_tracers(call: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if any(isinstance(x, jax.core.Tracer) for x in jtu.tree_leaves(value)):
            raise SowError(
                f"`{call}`: the value of {name!r} is a tracer, which has no numbers "
                "yet. Return the intermediates from the transformed function, and call "
                f"`{call}` on what comes back."
            )


@dc.dataclass
class Row:
    """One of several in order of execution. `bad` says where something went wrong,
    along the axes along which time goes by, or is `None` if it did not."""

    # The last one has the arrow.
    columns: ClassVar[Sequence[str]]

    mode: str
    name: str
    axes: NamedAxes | None
    # See `Leaf.when`.
    when: int | None
    bad: Any = dc.field(default=None, kw_only=True)
    is_first: bool = dc.field(default=False, kw_only=True)
    # Of the first such entry, the index along each of these axes, if they are known.
    at: Mapping[int, int] = dc.field(default_factory=dict, kw_only=True)

    @property
    def scans(self) -> dict[int, Scan | None]:
        """The axes along which time goes by, and their scans: `None` for what an outer
        transformation has put before the others."""
        return {
            i: scan
            for i, (kind, _, scan) in enumerate(self.axes or ())
            if scan or kind == "outside"
        }

    @property
    def time(self) -> tuple[int, ...]:
        return (*self.scans,)

    def said(self) -> dict[str, str]:
        """What some of the columns say."""
        raise NotImplementedError

    def cells(self) -> dict[str, str]:
        own = {"name": self.name, "mode": self.mode}
        cells = dict.fromkeys(self.columns, "") | own | self.said()
        cells[self.columns[-1]] += FIRST if self.is_first else ""
        return cells


def mark_first(rows: Sequence[Row]) -> None:
    # All of a scan comes where the first row in it does. Which of two rows in it came
    # first, their iterations say.
    began: dict[Scan | None, tuple[int, int]] = {}
    times = []
    # Several runs of a name have rows that follow one another. If nothing is known of
    # when they were, the order is that of the rows.
    when = [row.when for row in rows if row.when is not None]
    when = when if len(when) == len(rows) else range(len(rows))
    each = enumerate(zip(rows, when))
    # If the iterations of some are not known, those of others cannot be compared.
    is_wrong = [row.bad is not None and bool(row.bad.any()) for row in rows]
    in_loops = all(row.axes is not None for row in it.compress(rows, is_wrong))
    for order, i in sorted((_in_pass(row.mode, n), i) for i, (row, n) in each):
        if not is_wrong[i]:
            continue
        bad = rows[i].bad if in_loops else np.array(True)
        scans = [*rows[i].scans.values()] if in_loops else []
        # The iteration of each scan around the first such entry, counted from the one
        # that ran first.
        back = tuple(k for k, scan in enumerate(scans) if scan and scan[-1][1])
        at = np.argwhere(np.flip(bad, back))[0].tolist()
        of_axes = (
            (k, bad.shape[k] - 1 - n if k in back else n) for k, n in enumerate(at)
        )
        rows[i].at = {axis: n for axis, (_, n) in zip(rows[i].scans, of_axes)}
        place = [(began.setdefault(scan, order), n) for scan, n in zip(scans, at)]
        times.append(([*place, (order, 0)], i))
    if times:
        _, first = min(times)
        rows[first].is_first = True


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
