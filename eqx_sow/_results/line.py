"""What one line of text says of a value."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .summarize import is_numeric, Summary


def in_one_line(x: Any) -> str:
    """Of an array or a summary. By NumPy: a callback must not call JAX."""
    if isinstance(x, Summary):
        size = round(float(np.sum(x.size)))
        what = f"{size} {'entry' if size == 1 else 'entries'}"
    else:
        what = jax.core.ShapedArray(x.shape, x.dtype).str_short(short_dtypes=True)
        # Of a key there is only the shape.
        if not is_numeric(x):
            return what
        x = _of_entries(x)
    return "  ".join([what, *_statistics(x)])


def _of_entries(x: np.ndarray) -> Summary:
    """An array as summaries of one entry each."""
    is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
    x = (np.abs(x) if is_complex else x).astype(np.float64)
    one, none = np.ones_like(x), np.zeros_like(x)
    not_finite: Any = ~np.isfinite(x)
    numbers: Sequence[Any] = x, none, np.abs(x), x, x
    return Summary(*[one, *numbers, x == 0, not_finite])


def _statistics(s: Summary) -> list[str]:
    """Of all entries of all these summaries."""
    fields = s.size, s.not_finite, s.zeros, s.mean, s.std, s.rms, s.min, s.max
    x = np.stack([np.ravel(np.asarray(x, np.float64)) for x in fields])
    size, not_finite, zeros = map(round, x[:3].sum(1))
    entries, bad, _, mean, std, rms, least, most = x[:, x[0] > x[1]]
    finite = entries - bad
    words = []
    if finite.size:
        about = np.average(mean, weights=finite)
        roots = np.sqrt(finite / finite.sum())
        numbers = dict(
            mean=about,
            std=np.linalg.norm(roots * [std, mean - about]),
            min=least.min(),
            max=most.max(),
            norm=np.linalg.norm(np.sqrt(finite) * rms),
        )
        words = [f"{k} {v:.3g}" for k, v in numbers.items()]
        words.append(f"zeros {zeros / (size - not_finite):.0%}")
    if not_finite:
        words.append(f"not finite {not_finite}/{size}")
    return words
