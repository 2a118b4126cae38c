"""Which row of a table was computed first."""

import dataclasses as dc
from collections.abc import Sequence
from typing import Any

import numpy as np

from .layers import NamedAxes, Scan


FIRST = " <- first"


@dc.dataclass
class First:
    """What tells when something in a row went wrong, in a list of rows in order of
    execution. `bad` says where it did, along the axes along which time goes by, or is
    `None` if it did not. `scans` are what these axes are: `None` for what a
    transformation further out has put before the others."""

    mode: str
    scans: Sequence[Scan | None]
    bad: Any = dc.field(default=None, kw_only=True)
    is_first: bool = dc.field(default=False, kw_only=True)


def time_in(axes: NamedAxes) -> dict[int, Scan | None]:
    """The axes along which time goes by, and their scans."""
    return {
        i: scan for i, (kind, _, scan) in enumerate(axes) if scan or kind == "outside"
    }


def mark_first(rows: Sequence[First]) -> None:
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
