"""`tabulate`."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ._errors import SowError


_WIDTH = 100
_STATISTICS = ("mean", "std", "min", "max", "norm", "zeros")


def tabulate(intermediates: Mapping[str, Mapping[str, Any]]) -> str:
    """A table of what [`eqx_sow.save_intermediates`][] captured, as text.

    One row for each name and mode (and leaf, if the value has several), in order of
    execution, in at most 100 columns. `count` is the sum over all axes. The statistics
    are those of the finite entries; complex numbers count by their magnitude. `zeros`
    is the share of entries that are zero. The first row with something that is not
    finite is marked.

    **Arguments:**

    - `intermediates`: what `save_intermediates` returned, or its shapes, as
        `eqx.filter_eval_shape` returns them.

    **Returns:**

    A string.

    **Raises:**

    [`eqx_sow.SowError`][] under `jax.jit` and other transformations, where there are no
    numbers yet.

    !!! example

        ```python
        import eqx_sow
        import jax.numpy as jnp

        fn = lambda x: eqx_sow.sow(jnp.sin(x), "sin").sum()
        out, intermediates = eqx_sow.save_intermediates(fn)(jnp.arange(4.0))
        print(eqx_sow.tabulate(intermediates))
        ```
    """
    rows = [row for name, modes in intermediates.items() for row in _rows(name, modes)]
    bad = [row["finite"] for row in rows]
    if any(bad):
        first = next(i for i, b in enumerate(bad) if b)
        rows[first]["finite"] += " <- first"
    columns = ["name", "mode", "value", "count", *_STATISTICS, "finite"]
    columns = [
        c for c in columns if c in ("name", "mode", "value") or any(r[c] for r in rows)
    ]
    title = dict(zip(columns, columns), value="shape", finite="not finite")
    widths = {c: max(len(r[c]) for r in [title, *rows]) for c in columns}
    spare = _WIDTH - sum(widths.values()) - 2 * (len(columns) - 1)
    for c, least in (("name", 16), ("value", 12)):
        cut = max(min(-spare, widths[c] - least), 0)
        widths[c] -= cut
        spare += cut

    def line(row):
        cells = [
            _shorten(row[c], widths[c]).ljust(widths[c])
            if c in ("name", "mode", "value", "finite")
            else row[c].rjust(widths[c])
            for c in columns
        ]
        return "  ".join(cells).rstrip()

    rule = "-" * (sum(widths.values()) + 2 * (len(columns) - 1))
    lines = [line(title), rule]
    previous = None
    for row in rows:
        lines.append(
            line({**row, "name": "" if row["name"] == previous else row["name"]})
        )
        previous = row["name"]
    return "\n".join(lines)


def _rows(name, modes):
    counts = modes.get("count")
    if isinstance(counts, tuple):
        count = _total(name, counts)
    else:
        count = "" if counts is None else _total(name, (counts,))
    for mode, value in modes.items():
        if mode == "count":
            continue
        leaves, _ = jtu.tree_flatten_with_path(value)
        leaves = [(path, x) for path, x in leaves if _is_value(x)]
        for path, x in leaves:
            label = name + jtu.keystr(path) if len(leaves) > 1 else name
            yield {
                "name": label,
                "mode": mode,
                "value": _type(x),
                "count": count,
                **_statistics(name, x),
            }


def _is_value(x):
    return eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def _numbers(name, x):
    if isinstance(x, jax.core.Tracer):
        raise SowError(
            f"`tabulate`: the value of {name!r} is a tracer, which has no numbers yet. "
            "Return the intermediates from the transformed function, and call "
            "`tabulate` on what comes back."
        )
    dtype = x.dtype
    if isinstance(x, jax.ShapeDtypeStruct) or not (
        jnp.issubdtype(dtype, jnp.number) or dtype == bool
    ):
        return None
    x = np.asarray(x)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        x = np.abs(x)
    return x.astype(np.float64)


def _total(name, counts):
    numbers = [_numbers(name, x) for x in counts]
    if any(x is None for x in numbers):
        return ""
    return str(int(sum(np.sum(x) for x in numbers)))


def _statistics(name, x):
    row = dict.fromkeys((*_STATISTICS, "finite"), "")
    x = _numbers(name, x)
    if x is None:
        return row
    if bad := int(np.sum(~np.isfinite(x))):
        row["finite"] = f"{bad} of {x.size}"
    x = x[np.isfinite(x)]
    if x.size:
        numbers = x.mean(), x.std(), x.min(), x.max(), np.linalg.norm(x.ravel())
        row.update(zip(_STATISTICS, map(_number, numbers)))
        row["zeros"] = f"{np.mean(x == 0):.0%}"
    return row


def _number(x):
    return f"{x:.3g}"


def _type(x):
    short = (
        jnp.dtype(x.dtype).name
        if not jnp.issubdtype(x.dtype, jax.dtypes.extended)
        else str(x.dtype)
    )
    for long, abbreviated in (
        ("bfloat", "bf"),
        ("float", "f"),
        ("uint", "u"),
        ("int", "i"),
        ("complex", "c"),
    ):
        if short.startswith(long) and short != "float0":
            short = abbreviated + short[len(long) :]
            break
    return f"{short}[{','.join(map(str, x.shape))}]"


def _shorten(text, width):
    if len(text) <= width:
        return text
    keep = width - 1
    return text[: keep // 2] + "…" + text[len(text) - (keep - keep // 2) :]
