"""Which of several arrays was the first with an entry that is not finite."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .intermediates import axes_of, Leading, Scan
from .summarize import Summary


# Axes along which time goes by: those of scans, and (`None`) what a transformation
# further out has put before them.
_Axes = Sequence[tuple[int, Scan | None]]


def axes_of_time(x: Any, known: Leading | None) -> _Axes:
    """Those of an array or a summary; none if it has another shape by now."""
    axes = known and axes_of(known, x.size if isinstance(x, Summary) else x)
    return [
        (i, scan)
        for i, (kind, _, scan) in enumerate(axes or ())
        if scan or kind == "outside"
    ]


@ft.lru_cache(maxsize=64)
def bad_along(*axes: int) -> Callable:
    """Where along these axes there is what is not finite."""

    def fn(x: Any) -> jax.Array:
        bad = x.not_finite > 0 if isinstance(x, Summary) else ~jnp.isfinite(x)
        return jnp.any(bad, tuple(set(range(bad.ndim)) - set(axes)))

    return fn


class Time(NamedTuple):
    """When the first entry of a row that is not finite was computed: at which place
    along each of `_Axes`, in which pass, and where in that."""

    row: int
    places: tuple[tuple[Scan | None, int], ...]
    order: tuple[int, int]

    @staticmethod
    def of(mode: str, row: int, axes: _Axes, bad: Any) -> "Time":
        """`bad` is what `bad_along` returned, if there are numbers."""
        at: list[int] = []
        if axes and bad is not None:
            from_end = tuple(i for i, (_, s) in enumerate(axes) if s and s[-1][1])
            at = np.argwhere(np.flip(bad, from_end))[0].tolist()
        places = tuple((scan, i) for i, (_, scan) in zip(at, axes))
        return Time(row, places, _in_pass(mode, row))

    def is_before(self, other: "Time") -> bool:
        for (scan, i), (same, j) in zip(self.places, other.places):
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
