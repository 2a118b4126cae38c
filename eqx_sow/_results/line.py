"""What a row of a table, or a line of text, says of an array."""

from typing import Any

import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .summarize import is_numeric, merged, Summary


def in_one_line(x: Any) -> str:
    """For an event of a `tap` without a callback: an array or a `Summary`. By NumPy,
    since a callback must not call JAX."""
    if isinstance(x, Summary):
        summary = jtu.tree_map(lambda a: np.asarray(a, np.float64), x)
        summary = merged(summary, tuple(range(summary.size.ndim)), np)
        words = [number_of_entries(summary)]
    else:
        words = [type_of(x)]
        # Of a key there is only the shape.
        if not is_numeric(x):
            return words[0]
        summary = _summary(x)
    words += [f"{k} {v}" for k, v in statistics_of(summary, digits=3).items()]
    if bad := not_finite_of(summary):
        words.append(f"not finite {bad}")
    return "  ".join(words)


def _summary(x: np.ndarray) -> Summary:
    """What `summarize` says, in float64, in which no square overflows."""
    is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
    x = (np.abs(x) if is_complex else x).astype(np.float64)
    is_finite = np.isfinite(x)
    # Without any, the numbers are not shown.
    finite = x[is_finite] if is_finite.any() else np.zeros(1)
    numbers: Any = dict(
        size=x.size,
        mean=finite.mean(),
        std=finite.std(),
        rms=np.linalg.norm(finite) / finite.size**0.5,
        min=finite.min(),
        max=finite.max(),
        zeros=np.sum(x == 0),
        not_finite=np.sum(~is_finite),
    )
    return Summary(**numbers)


def type_of(x: Any) -> str:
    """Such as `f32[3]`."""
    return jax.core.ShapedArray(x.shape, x.dtype).str_short(short_dtypes=True)


def number_of_entries(summary: Summary) -> str:
    size = round(float(summary.size))
    return f"{size} {'entry' if size == 1 else 'entries'}"


def not_finite_of(summary: Summary) -> str:
    """Such as `3/100`, or nothing if all entries are finite."""
    bad, size = round(float(summary.not_finite)), round(float(summary.size))
    return f"{bad}/{size}" if bad else ""


STATISTICS = ("mean", "std", "min", "max", "norm", "zeros")


def statistics_of(summary: Summary, digits: int) -> dict[str, str]:
    """Of a summary without leading axes. There are none if no entry is finite."""
    entries = float(summary.size - summary.not_finite)
    if entries <= 0:
        return {}
    numbers = {c: float(getattr(summary, c)) for c in STATISTICS[:4]}
    numbers["norm"] = float(summary.rms) * entries**0.5
    words = {c: f"{x:.{digits}g}" for c, x in numbers.items()}
    return words | {"zeros": f"{summary.zeros / entries:.0%}"}
