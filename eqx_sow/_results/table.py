"""Tables, as text and in a notebook."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Self


# The arrow, and the columns that begin at the left.
FIRST = " <- first"
_TEXT = "name", "mode", "shape", "not finite", "beyond"


class Table(str):
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
