"""`compare`."""

import contextlib
import dataclasses as dc
import functools as ft
import itertools as it
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from .._errors import SowError, UnknownSowError
from .._frames import api_boundary
from .._globs import of_all_layers
from .._names import with_indices
from .difference import difference, Numbers, together, Tolerance
from .flat import is_mode, places_of
from .intermediates import Intermediates
from .layers import indexed, of_layers
from .leaves import is_key, is_numeric, is_state, is_value, type_of
from .nodes import made, modes_in_order
from .pairs import as_compared, by_place, is_leaf, Leaves, pairs, Static
from .rows import check_no_tracers, is_whole, leaves_of, mark_first, Row, TextTable
from .stacks import fits_along, layers_like
from .summarize import Summary


_COLUMNS = ("name", "mode", "shape", "largest", "norm", "cosine", "beyond")


class Comparison(TextTable):
    """The table that [`eqx_sow.compare`][] returns: a `str`, which a notebook shows as
    an HTML table.

    !!! example

        ```python
        import eqx_sow
        import jax.numpy as jnp

        f = lambda x: eqx_sow.sow(jnp.sin(x), "sin")
        g = lambda x: eqx_sow.sow(x - x**3 / 6, "sin")
        _, exact = eqx_sow.save_intermediates(f)(jnp.arange(3.0))
        _, approximate = eqx_sow.save_intermediates(g)(jnp.arange(3.0))
        comparison = eqx_sow.compare(approximate, exact)
        comparison.first  # ("sin", "primal")
        assert eqx_sow.compare(exact, exact).first is None
        ```
    """

    first: tuple[str, str] | None
    """The name and mode of the first row beyond tolerance, in order of execution, or
    `None` if there is none."""


Comparison.__module__ = "eqx_sow"


@api_boundary
def compare(
    intermediates: Mapping[str, Any],
    reference: Mapping[str, Any],
    *,
    rtol: float = 1e-3,
    atol: float = 1e-6,
) -> Comparison:
    """Compares two captures, and shows where they first differ.

    The table has one row for each name and mode that both have (and leaf, if the value
    has several), in order of execution:

    - `shape`: also of the reference, if shapes or dtypes differ,
    - `largest`: the largest absolute difference,
    - `norm`: the relative difference of the norms: `-0.5` if the norm is half as large,
    - `cosine`: the cosine of the angle between the two values,
    - `beyond`: how many entries differ by more than `atol + rtol * abs(reference)`, if
        any. An entry that is finite on one side only counts as beyond; so do
        all if the shapes differ. Entries that are NaN in both, or the same
        infinity, are not. Integers, booleans and keys count as beyond unless they are
        equal.

    Of a stack of layers that differs, the row has the name of the layer that differs
    first, such as `blocks/17/attn`, and is about that layer alone.

    An arrow marks the row with the first entry beyond the tolerance, in order of
    execution, as in [`eqx_sow.tabulate`][]: in a loop, of the earliest iteration; for
    cotangents, from the bottom row upwards. Names and modes that only one of the two
    has are listed below, without an arrow. If both should have the same, also write
    `assert a.flat().keys() == b.flat().keys()`.

    Entries that are not finite are left out of `largest`, `norm` and `cosine`. Python
    numbers, and lists of them, are compared as arrays. Other leaves have a row if they
    differ: strings that are not equal, functions and classes of different names,
    objects of different classes. So does a leaf that only one of the two values has.
    A tuple equals a list. A [`eqx_sow.Summary`][] is
    compared by its statistics.

    The numbers are computed where the values are: values on a CPU are read in place,
    others on their device. 64-bit NumPy arrays that would be rounded there are compared
    on the host. Values may be spread over several processes: then all of them must call
    `compare`.

    **Arguments:**

    - `intermediates`: what [`eqx_sow.save_intermediates`][] returned, or any
        `{name: array}`. If both are plain dicts, rows are in the order of the first.
    - `reference`: what another capture returned; or a mapping `{name: array}`, which
        is compared with the primals. Keys may be those of `flat()`, as in a file
        (`numpy.savez`, safetensors, JSON): `"layers/0/cotangent"`. Leaves that `flat()`
        leaves out are not compared then. Arrays may be NumPy's, or anything that
        `numpy.asarray` takes, such as PyTorch's detached tensors. If a capture has a
        stack of layers (`"blocks/*/attn"`) where the other has a list
        (`"blocks/0/attn"`), the stack is taken apart, by
        [`eqx_sow.Intermediates`][]`.unstack()`, in a file by its shape. If two axes are
        equally long, do that before `flat()`.
    - `rtol`, `atol`: the tolerance. For bfloat16, whose numbers are 0.4 % apart, a
        `rtol` of `2e-2` and an `atol` of 1 % of the largest value are a start.

    **Returns:**

    A [`eqx_sow.Comparison`][]: a string, with the attribute `first`, which is the
    `(name, mode)` of the row with the arrow, or `None`. In a test, write `assert
    eqx_sow.compare(a, b).first is None`.

    **Raises:**

    [`eqx_sow.UnknownSowError`][] if the two have no name and mode in common;
    [`eqx_sow.SowError`][] under `jax.jit` and other transformations. `TypeError` if it
    is given anything else.

    !!! example

        ```python
        import equinox as eqx
        import eqx_sow
        import jax
        import jax.numpy as jnp

        model = eqx.nn.MLP(3, 1, 8, 2, key=jax.random.key(0))
        bias = lambda model: model.layers[1].bias
        other = eqx.tree_at(bias, model, replace_fn=lambda b: b + 1)
        save = lambda m: eqx_sow.save_intermediates(m, capture=True)(jnp.ones(3))[1]
        comparison = eqx_sow.compare(save(other), save(model))
        comparison.first  # ("layers/1", "primal")
        print(comparison)
        ```
    """
    for of, given in (("intermediates", intermediates), ("reference", reference)):
        if not isinstance(given, Mapping):
            raise TypeError(
                f"`compare(intermediates, reference)`: `{of}` must be the "
                "second output of `save_intermediates`, or a mapping "
                f"`{{name: array}}`, not {type(given).__name__}."
            )
    # A file is read once.
    first, second = _held(intermediates), _held(reference)
    for given in (first, second):
        check_no_tracers("compare", given)
    x, y = _by_mode(first, second), _by_mode(second, first)
    x.values, y.values = a, b = _alike(_by_shapes(x, y), _by_shapes(y, x))
    there = lambda x: {(name, mode) for name, modes in x.items() for mode in modes}
    both = there(a) & there(b)
    if not both and (a or b):
        names = [", ".join(map(repr, x)) or "none" for x in (a, b)]
        instead = ""
        if a.keys() & b.keys():
            instead = " Capture the same modes in both."
        elif a and b:
            one, other = _alike_but_for_root(a, b)
            pair = f"{{{one!r}: reference[{other!r}]}}"
            instead = f" Give one of the two the names of the other: `{pair}`."
        raise UnknownSowError(
            "`compare(intermediates, reference)`: there is nothing to compare, as no "
            f"name and mode is in both. Names in the first: {names[0]}. Names in the "
            f"second: {names[1]}.{instead}"
        )
    # JAX may have sorted the names of a plain dict.
    is_sorted = [not isinstance(x, Intermediates) for x in (intermediates, reference)]
    lead = b if is_sorted == [True, False] else a
    ordered = [(n, m) for n in lead for m in lead[n] if (n, m) in both]
    lacking = {key: _lacking(x, y, *key) for key in ordered}
    rows = [
        row
        for key in ordered
        for row in _rows(x, y, *key, {*it.chain(*lacking[key])}, of_first=lead is a)
    ]
    _fill(rows, (rtol, atol))
    mark_first(rows)
    _fill([row.of_layer() for row in rows if row.layer], (rtol, atol))
    below = [
        _only_in(of, values, both, {key: n[i] for key, n in lacking.items()})
        for i, (of, values) in enumerate((("first", a), ("second", b)))
    ]
    cells = [row.cells() for row in rows]
    table = Comparison.of(_COLUMNS, cells, "\n".join(filter(None, below)))
    table.first = next(((x.of, x.mode) for x in rows if x.is_first), None)
    return table


# --- what is compared ---
@dc.dataclass
class _Side:
    """One of the two. `is_flat`: it has the arrays of a flat dict; `is_ours`: all that
    was captured, else the values of another library."""

    values: Intermediates
    is_flat: bool = False
    is_ours: bool = True

    def leaves(self, name: Any, mode: str) -> Leaves:
        if mode not in self.values.get(name, ()):
            return {}
        every = lambda x: True
        found = leaves_of(self.values, name, mode, is_leaf, selected=every)
        return by_place(found, self.is_flat)

    def runs(self, name: Any, mode: str) -> set[str]:
        """Those that have a value, of a name that runs several times."""
        return {place.split("/")[0] for place in self.leaves(name, mode)}

    def all_runs(self, name: Any, mode: str) -> set[str]:
        value = self.values[name][mode]
        if type(value) is tuple:
            return {str(i) for i in range(len(value))}
        return self.runs(name, "primal")

    def lacks(self, x: Any) -> bool:
        """Whether it has no such leaf, whatever ran."""
        is_float0 = is_value(x) and x.dtype == jax.dtypes.float0
        in_flat = is_value(x) or isinstance(x, Summary)
        is_left_out = is_float0 or is_state(x) or (self.is_flat and not in_flat)
        return not self.is_ours and is_left_out


def _held(given: Mapping[str, Any]) -> Mapping[str, Any]:
    is_ours = isinstance(given, Intermediates)
    by_mode = is_ours and all(isinstance(modes, Mapping) for modes in given.values())
    return given if by_mode else dict(given)


def _by_mode(given: Mapping[str, Any], other: Mapping[str, Any]) -> _Side:
    """`{name: {mode: value}}`, also of a plain `{name: value}`."""
    if isinstance(given, Intermediates):
        return _Side(given)
    have_modes = {k for k, x in given.items() if _has_modes(x, other.get(k))}
    structured = isinstance(other, Intermediates) or any(
        map(_are_modes, other.values())
    )
    places = None if have_modes else places_of(given, other, are_flat=not structured)
    if places is not None:
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for key, x in given.items():
            name, mode, inside = places[key]
            found.setdefault(name, {}).setdefault(mode, {})[inside] = x
        by_mode = {
            name: {mode: _of_parts(parts) for mode, parts in modes.items()}
            for name, modes in found.items()
        }
        return _Side(Intermediates(by_mode), is_flat=True, is_ours=False)
    each = {
        k: modes_in_order(x) if k in have_modes else {"primal": x}
        for k, x in given.items()
    }
    return _Side(Intermediates(each), is_ours=bool(have_modes))


def _of_parts(parts: dict[str, Any]) -> Any:
    """The value that has these, by their paths in it. It is not a plain dict, since JAX
    sorts the keys of that."""
    return parts[""] if [*parts] == [""] else Intermediates(parts)


def _are_modes(x: Any) -> bool:
    return isinstance(x, Mapping) and bool(x) and all(map(is_mode, x))


def _has_modes(x: Any, other: Any) -> bool:
    """Whether a dict is that of the modes of a name. `{"count": 3}` may be a value."""
    if not _are_modes(x):
        return False
    value = other.get("primal") if _are_modes(other) else None
    is_value = isinstance(value, Mapping) and {*value} == {*x}
    return not is_value or isinstance(x.get("primal"), Mapping)


def _by_shapes(x: _Side, y: _Side) -> Intermediates:
    """The values of one side, in which stacks of whose axes nothing is known, as those
    in a file, are taken apart as `y` has them in a list."""
    known = x.values._known
    new = made(Intermediates, (), known)
    for name, modes in x.values.items():
        layers = layers_like(name, y.values) if isinstance(name, str) else None
        is_known = any(known.of(name, mode) for mode in modes)
        if layers is None or name in y.values.keys() or is_known:
            new[name] = dict(modes)
            continue
        for mode in modes:
            for layer, part in _layers(x, y, name, mode, *layers):
                new.setdefault(layer, {})[mode] = part
    return new


def _layers(
    x: _Side, y: _Side, name: str, mode: str, names: Sequence[str], sizes: Sequence[int]
) -> Iterator[tuple[str, Any]]:
    """The value of each of these layers, from one of all of them."""
    both = x.leaves(name, mode), y.leaves(names[0], mode)
    parts: dict[str, tuple[Any, Sequence[int]]] = {}
    for place, _, p, q in pairs(*both, are_ours=False):
        array, one = as_compared(p.x, q.x)
        at: Sequence[int] = ()
        # The edges of a histogram are the same for all.
        alike = isinstance(array, Summary) == isinstance(one, Summary)
        every, first = (x.size if isinstance(x, Summary) else x for x in (array, one))
        arrays = is_value(every) and is_value(first) and alike
        if arrays and every.shape != first.shape:
            n = first.ndim if q.axes is None or not y.is_ours else len(q.axes)
            fits = fits_along(every.shape, sizes, first.shape, n)
            if not fits and [*every.shape[: len(sizes)]] == sizes:
                # A row says that the shapes differ.
                fits = {(*range(len(sizes)),)}
            if len(fits) != 1:
                raise SowError(
                    f"`compare(intermediates, reference)`: {name!r}, "
                    f"{type_of(every)}, is compared with the layers {names[0]!r} to "
                    f"{names[-1]!r}, {type_of(first)}, and it is not known which of "
                    "its axes is that of the layers. For a file, save "
                    "`intermediates.unstack().flat()`, which has the names of layers."
                )
            (at,) = fits
        if p.x is not None:
            parts[place] = array if at else p.x, at
    for layer, index in zip(names, it.product(*map(range, sizes))):
        of_layer = {
            place: jtu.tree_map(ft.partial(indexed, at=dict(zip(at, index))), array)
            for place, (array, at) in parts.items()
        }
        yield layer, _of_parts(of_layer)


def _alike_but_for_root(a: Collection[str], b: Collection[str]) -> tuple[str, str]:
    """A name of `a` that one of `b` may mean, with another root, or with a `*` for the
    index of a layer; else the first of each. The first name gets the `*`."""
    for one, other in it.product(map(str, a), map(str, b)):
        p, q = of_all_layers(one), of_all_layers(other)
        if p.endswith(f"/{q}"):
            return p[: len(p) - len(q)] + other, other
        if q.endswith(f"/{p}"):
            return other[len(q) - len(p) :], other
    return next(iter(a)), next(iter(b))


def _alike(a: Intermediates, b: Intermediates) -> tuple[Intermediates, Intermediates]:
    """With stacks taken apart, if that makes more names the same: if fewer are left of
    the one that has fewer, such as a port. The others are in `Only in`."""
    if a.keys() == b.keys():
        return a, b
    # They cannot be taken apart if someone has computed with them.
    ua, ub = a, b
    with contextlib.suppress(SowError):
        ua = a.unstack()
    with contextlib.suppress(SowError):
        ub = b.unstack()
    ways = ((a, b), (ua, b), (a, ub), (ua, ub))

    def left(way):
        x, y = (side.keys() for side in way)
        return min(len(x - y), len(y - x)), len(x ^ y)

    return min(ways, key=left)


_Runs = Mapping[tuple[str, str], Collection[str]]


def _only_in(
    which: str, x: Intermediates, both: set[tuple[str, str]], runs: _Runs
) -> str:
    more = {n: [m for m in modes if (n, m) not in both] for n, modes in x.items()}
    for (name, mode), some in runs.items():
        for i in sorted(some, key=int):
            more.setdefault(f"{name}[{i}]", []).append(mode)
    names = [f"{n} ({', '.join(modes)})" for n, modes in more.items() if modes]
    return f"Only in the {which}: {', '.join(names)}" if names else ""


def _lacking(x: _Side, y: _Side, name: str, mode: str) -> tuple[set[str], set[str]]:
    """Of several runs of a name, those of which only `x`, and those of which only `y`
    has a derivative. Whether there is one depends on what else is in the loop, as for a
    name that runs once."""
    known = (side.values._known.of(name, mode) for side in (x, y))
    if mode in ("primal", "count") or not any(isinstance(k, list) for k in known):
        return set(), set()
    of_x, of_y = x.runs(name, mode), y.runs(name, mode)
    all_of_x, all_of_y = x.all_runs(name, mode), y.all_runs(name, mode)
    return (of_x - of_y) & all_of_y, (of_y - of_x) & all_of_x


# --- rows ---
@dc.dataclass
class _Row(Row):
    """What is said of a leaf `a` and the leaf `b` of the reference; `None` if it has no
    such leaf. `of` is the name of the value, `name` that of the leaf."""

    columns = _COLUMNS
    of: str
    a: Any
    b: Any
    numbers: Any = None

    @property
    def differ(self) -> bool:
        """In more than their numbers."""
        return _form(self.a) != _form(self.b)

    @property
    def layer(self) -> dict[int, int]:
        """Of a stack that differs, the axes of the layers, each with the index of the
        layer that differs first."""
        found = {} if self.differ else self.at
        return {i: n for i, n in found.items() if i in of_layers(self.axes or ())}

    def of_layer(self) -> "_Row":
        """The row, of which only that layer is left. It has its name in a list."""
        layer, axes = self.layer, self.axes or ()
        label, places = self.name.removeprefix(self.of), [axes[i][1] for i in layer]
        self.of = with_indices(self.of, zip(places, layer.values()))
        self.name = self.of + label
        self.a, self.b = jtu.tree_map(ft.partial(indexed, at=layer), (self.a, self.b))
        self.axes = tuple(x for i, x in enumerate(axes) if i not in layer)
        self.numbers = self.bad = None
        return self

    @property
    def has_numbers(self) -> bool:
        """Whether there are any to compare."""
        parts = [*_parts(self.a), *_parts(self.b)]
        of_shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in parts)
        return not of_shapes and all(is_numeric(x) or is_key(x) for x in parts)

    def said(self) -> dict[str, str]:
        types = [_said(self.a), _said(self.b)]
        said = {"shape": " / ".join(dict.fromkeys(types))}
        if self.differ:
            said["beyond"] = "differs"
        return said if self.numbers is None else said | self._of_numbers()

    def _of_numbers(self) -> dict[str, str]:
        largest, (of_a, of_b, of_both), beyond, _ = self.numbers
        of_a, of_b = of_a**0.5, of_b**0.5
        cells = {"beyond": f"{beyond}/{_size(self.a)}"} if beyond else {}
        if is_key(self.a) or not _size(self.a):
            return cells
        cells["largest"] = f"{largest:.3g}"
        if of_a == of_b:
            cells["norm"] = "0"
        elif of_b and np.isfinite(of_a):
            cells["norm"] = f"{(of_a - of_b) / of_b:+.1e}"
        if of_a and of_b and np.isfinite(of_a * of_b):
            cells["cosine"] = f"{of_both / of_a / of_b:.5f}"
        return cells


def _rows(
    x: _Side, y: _Side, name: str, mode: str, without: set[str], of_first: bool
) -> list[_Row]:
    """`without` are runs that are left out. `of_first`: whether the order of execution
    is that of the first of the two."""
    rows = []
    both = x.leaves(name, mode), y.leaves(name, mode)
    for place, label, p, q in pairs(*both, are_ours=x.is_ours and y.is_ours):
        if place.split("/")[0] in without:
            continue
        if p.x is None and x.lacks(q.x) or q.x is None and y.lacks(p.x):
            continue
        a, b = as_compared(p.x, q.x)
        if isinstance(a, Static) and isinstance(b, Static) and a.key == b.key:
            continue
        when = p.when if of_first else q.when
        # `None`: they are not known any more.
        axes = p.axes or q.axes or p.axes
        rows.append(_Row(mode, f"{name}{label}", axes, when, of=name, a=a, b=b))
    if len(rows) == 1 and not without:
        rows[0].name = str(name)
    return rows


def _fill(rows: Sequence[_Row], tolerance: Tolerance) -> None:
    started = []
    for row in rows:
        if row.differ:
            row.bad = np.ones([1] * len(row.time), bool)
            continue
        if not row.has_numbers:
            continue
        for a, b in zip(_parts(row.a), _parts(row.b)):
            started.append((row, difference(a, b, tolerance, row.time)))
    # Only now, when all are being computed, are the first ones awaited.
    done = jax.device_get([numbers for _, numbers in started])
    for (row, _), (numbers, bad) in zip(started, done):
        row.numbers = together([row.numbers or Numbers(), numbers])
        row.bad = bad if row.bad is None else row.bad | bad


def _form(x: Any) -> Any:
    """What two must have in common to be compared."""
    if isinstance(x, Static):
        return Static, x.key
    if isinstance(x, Summary):
        return Summary, np.shape(x.size), x.edges
    if x is None or is_whole(x):
        return type(x), None
    return np.shape(x), x.dtype if is_key(x) else None


def _said(x: Any) -> str:
    if isinstance(x, Static):
        return x.shown
    if isinstance(x, Summary):
        return f"summary{list(np.shape(x.size)) or ''}"
    if is_whole(x):
        return "state"
    return "nothing" if x is None else type_of(x)


def _size(x: Any) -> int:
    return sum(int(np.size(y)) for y in _parts(x))


def _parts(x: Any) -> list[Any]:
    """The arrays that are compared. Those of a summary have different numbers of axes
    if there is a histogram."""
    return jtu.tree_leaves(x) if isinstance(x, Summary) else [x]
