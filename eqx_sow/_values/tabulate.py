"""`tabulate`."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._errors import SowError


_WIDTH = 100
_TEXT = ("name", "mode", "value", "finite")
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
    _check(intermediates)
    for digits, gap in ((3, 2), (2, 1)):
        rows = [
            row
            for name, modes in intermediates.items()
            for row in _rows(name, modes, digits)
        ]
        table = _layout(rows, gap)
        if max(map(len, table)) <= _WIDTH:
            break
    return "\n".join(table)


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


def _layout(rows, gap):
    first = next((row for row in rows if row["finite"]), None)
    if first is not None:
        first["finite"] += " <- first"
    columns = [
        c
        for c in ("name", "mode", "value", "count", *_STATISTICS, "finite")
        if c in _TEXT[:3] or any(row[c] for row in rows)
    ]
    title = dict(zip(columns, columns), value="shape", finite="not finite")
    widths = {c: max(len(row[c]) for row in (title, *rows)) for c in columns}
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

    lines = [line(title), "-" * (sum(widths.values()) + gap * (len(columns) - 1))]
    name = None
    for row in rows:
        lines.append(line({**row, "name": "" if row["name"] == name else row["name"]}))
        name = row["name"]
    return lines


def _rows(name, modes, digits):
    count = _total(name, jtu.tree_leaves(modes.get("count")))
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
                **_statistics(name, x, digits),
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
    sums = [x.sum() for c in counts if (x := _numbers(name, c)) is not None]
    return str(int(sum(sums))) if sums else ""


def _statistics(name, x, digits):
    row = dict.fromkeys((*_STATISTICS, "finite"), "")
    x = _numbers(name, x)
    if x is None:
        return row
    if bad := int(np.sum(~np.isfinite(x))):
        row["finite"] = f"{bad}/{x.size}"
    x = x[np.isfinite(x)]
    if x.size:
        numbers = x.mean(), x.std(), x.min(), x.max(), np.linalg.norm(x.ravel())
        row.update(zip(_STATISTICS, (f"{x:.{digits}g}" for x in numbers)))
        row["zeros"] = f"{np.mean(x == 0):.0%}"
    return row


def _type(x):
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
