"""What `save_intermediates` returns beside the output."""

import functools as ft
import itertools as it
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._errors import shown, SowError, UnknownSowError
from .._frames import api_boundary
from .._globs import is_glob
from .._names import across_slashes, Named, places_of, Selection
from .at_hand import is_at_hand
from .layers import (
    AllAxes,
    at_iteration,
    axes_of_each,
    axes_of_value,
    layers_of,
    Leading,
    loops_over_layers,
    NamedAxes,
    runs_of,
    unstacked,
)
from .lookup import as_known, Known, Modes, modes_of, unknown_name
from .summarize import is_numeric, is_value, Summary


# For whoever takes the gradient of a function that `save_intermediates` returned.
_NO_LOSS = (
    "\nThis is the output of `save_intermediates(fn)`, a pair `(out, intermediates)`. "
    "For the gradients of the marked values, too, put the gradient inside: "
    "`save_intermediates(eqx.filter_grad(loss))`. Or write "
    "`eqx.filter_grad(save_intermediates(loss), has_aux=True)`\n"
)


class _Names(tuple[str, ...]):
    """The names of an `Intermediates`, and what its arrays are. That does not count for
    whether two are of one form: both a loop and a vmap stack values."""

    axes: AllAxes = Known()


class Intermediates(dict[str, dict[str, Any]]):
    """Holds what [`eqx_sow.save_intermediates`][] captured:
    `intermediates[name][mode]`.

    A `dict` whose names are in order of execution. JAX sorts the keys of a plain dict,
    but keeps the order of this one under every transformation: `jax.jit`, `jax.vmap`,
    `jax.grad(..., has_aux=True)`, the outputs of a `jax.lax.scan`, `jax.eval_shape`,
    `jax.tree.map`. The modes of a name are in order as well: `"primal"` first,
    `"count"` last. It is equal to a dict with the same items, and prints like one, with
    types in place of the arrays, except for scalars. In a notebook it is displayed as
    the table of [`eqx_sow.tabulate`][].

    Look up an iteration as if the loop were a list: `intermediates["blocks/2/attn"]` of
    a stack captured as `"blocks/attn"`, `intermediates["h/3"]`,
    `intermediates["h/-1"]`. You can leave out where the model is, as in the option
    `names`. A name or a mode that is not there is an [`eqx_sow.UnknownSowError`][],
    which is a `KeyError` as well, and says why.

    To JAX it is a PyTree node of its own type. In `jax.tree.map(fn, a, b)`, and as
    results of the branches of a `jax.lax.cond`, two `Intermediates` need the same names
    in the same order. To combine one with a plain dict, write `dict(intermediates)` or
    `Intermediates(plain)`. Its paths consist of `jax.tree_util.DictKey`s.

    **Arguments:**

    Those of `dict`.

    !!! example

        ```python
        import eqx_sow
        import jax
        import jax.numpy as jnp

        def f(x):
            return eqx_sow.sow(eqx_sow.sow(jnp.sin(x), "sin") * 2, "double")

        out, intermediates = jax.jit(eqx_sow.save_intermediates(f))(jnp.ones(3))
        list(intermediates)  # ["sin", "double"]
        intermediates["sin"]["primal"]  # of shape (3,)
        intermediates.primals["sin"]  # the same
        ```
    """

    _axes: AllAxes = Known()

    def copy(self) -> "Intermediates":
        return with_axes(self, self._axes)

    __copy__ = copy

    def __getitem__(self, name: str) -> dict[str, Any]:
        modes: Any = self.get(name, self)
        if modes is self:
            name, found = self._found(name)
            modes = found.get(name)
        # What is put in may be anything.
        return modes_of(name, modes, self._axes) if type(modes) is dict else modes

    @api_boundary
    def _found(self, name: Any) -> tuple[str, "Intermediates"]:
        """What `names=name` would have captured: its name, and an `Intermediates` that
        has it. If it is no key here, it may be an iteration of a loop, a layer that is
        counted from the end, or lack its root."""
        if name in self:
            return name, self
        known = as_known(self._axes)
        if not isinstance(name, str):
            raise unknown_name(name, self, known, None)
        found = known.found or [*_all_named(self)]
        selection = Selection([name], found, known.roots)
        some = [(whole, one) for whole in found for one in selection.all_of(whole)]
        for new in [] if is_glob(name) else dict.fromkeys(one.name for _, one in some):
            if new in self:
                return new, self
            at = {whole: one.at for whole, one in some if one.name == new}
            wholes = {whole.name for whole in at}
            if len(wholes) == 1 and wholes <= self.keys():
                if not any(at.values()):
                    return wholes.pop(), self
                layer = _iteration(wholes.pop(), new, self, at)
                if layer is not None:
                    return new, layer
        raise unknown_name(name, self, known, selection)

    def __or__(self, other: Any) -> "Intermediates":
        return Intermediates(dict(self) | other)

    def __ror__(self, other: Any) -> "Intermediates":
        return Intermediates(other | dict(self))

    @property
    def primals(self) -> dict[str, Any]:
        """A plain dict `{name: value}` of the mode `"primal"`, the values themselves.
        Names without this mode are left out."""
        return self._of_mode("primal")

    @property
    def tangents(self) -> dict[str, Any]:
        """A plain dict of the mode `"tangent"`, like `primals`."""
        return self._of_mode("tangent")

    @property
    def cotangents(self) -> dict[str, Any]:
        """A plain dict of the mode `"cotangent"`, like `primals`."""
        return self._of_mode("cotangent")

    def _of_mode(self, mode: str) -> dict[str, Any]:
        return {name: modes[mode] for name, modes in self.items() if mode in modes}

    def __repr__(self) -> str:
        shown = dict(jtu.tree_map(_number, self, is_leaf=is_state))
        # A `State` prints badly: its keys need not be strings.
        text = eqx.tree_pformat(shown, struct_as_array=True, truncate_leaf=is_state)
        # What NumPy calls the dtype of the cotangent of an integer.
        text = re.sub(r"\[\('f(?:loat)?0', 'V'\)\](\S*?)\(numpy\)", r"float0\1", text)
        # `jax.grad` of a function that returns a pair prints the pair while it handles
        # the error that a pair is no array.
        handled = sys.exception()
        is_pair = isinstance(handled, TypeError) and f"{text})" in str(handled)
        return text + _NO_LOSS if is_pair else text

    def _repr_html_(self) -> str | None:
        # Here, as a table asks for the order of what it is given.
        from .tabulate import html

        return html(self)

    @api_boundary
    def flat(self, sep: str = "/") -> dict[str, Any]:
        """Puts all arrays into one flat dict, for loggers and file formats.

        **Arguments:**

        - `sep`: the separator between a name, its mode, and the path of the array
            within the value.

        **Returns:**

        A `dict` with one entry for each array, in order: `"layers/0/primal"`, or
        `"layers/0/cotangent/rms"` for a field of a [`eqx_sow.Summary`][]. A histogram
        comes with its `".../edges"`. Scalars are NumPy's, so that `pandas.Series(flat)`
        has numbers in it; traced ones stay as they are. Leaves that are not arrays, an
        `eqx.nn.State` and the cotangents of integers are left out. A key comes back as
        its `jax.random.key_data`.

        **Raises:**

        [`eqx_sow.SowError`][] if two arrays would have the same key.

        !!! example

            ```python
            import equinox as eqx
            import eqx_sow
            import jax
            import jax.numpy as jnp

            model = eqx.nn.MLP(2, 1, 8, 2, key=jax.random.key(0))
            saved = eqx_sow.save_intermediates(model, capture=eqx.nn.Linear)
            out, intermediates = saved(jnp.ones(2))
            flat = intermediates.flat()
            list(flat)[0]  # "layers/0/primal"
            sizes = {name: float(jnp.linalg.norm(x)) for name, x in flat.items()}
            ```
        """
        flat: dict[str, Any] = {}
        for name, modes in self.items():
            for mode, value in modes.items():
                for path, x in _arrays_in(value):
                    inside = jtu.keystr(path, simple=True, separator=sep)
                    key = sep.join(filter(None, (name, mode, inside)))
                    if key in flat:
                        raise SowError(
                            f"`Intermediates.flat(sep={sep!r})`: two arrays would have "
                            f"the key {key!r}. Choose another `sep`."
                        )
                    flat[key] = x
        # All at once, since each would be waited for.
        scalars = jax.device_get({k: x for k, x in flat.items() if _is_number(x)})
        return flat | {k: np.asarray(x)[()] for k, x in scalars.items()}

    @api_boundary
    def axes(self, name: str, mode: str = "primal") -> tuple[Any, ...]:
        """Describes the leading axes that loops and `vmap`s added to a value.

        **Arguments:**

        - `name`, `mode`: of the value.

        **Returns:**

        A tuple, outermost first, of

        - `"vmap"`, `"loop"`, or for an axis of a mesh its name, as in `"device:data"`;
        - `"buffer"`, for the executions that [`eqx_sow.Buffer`][] keeps;
        - `"outside"`, for what a transformation around `save_intermediates` has added,
            as in `jax.vmap(save_intermediates(fn))`.

        If the arrays of a value have different numbers of leading axes, the tuple
        describes those with the most. With [`eqx_sow.Append`][] you get a tuple of such
        tuples, one for each place.

        **Raises:**

        `KeyError` if there is no such value; [`eqx_sow.SowError`][] if its arrays are
        not those that `save_intermediates` returned, so that their axes are not known.

        !!! example

            ```python
            import eqx_sow
            import jax
            import jax.numpy as jnp

            def f(x):
                layer = lambda x, w: (eqx_sow.sow(jnp.sin(w * x), "h"), None)
                return jax.lax.scan(layer, x, jnp.arange(4.0))[0]

            saved = eqx_sow.save_intermediates(jax.vmap(f))
            out, intermediates = saved(jnp.ones((5, 3)))
            intermediates["h"]["primal"].shape  # (5, 4, 3)
            intermediates.axes("h", "primal")  # ("vmap", "loop")
            ```
        """
        several, axes = self._axes_of_places(name, mode)
        if None in axes:
            raise SowError(
                f"`Intermediates.axes({name!r}, {mode!r})`: these arrays are not those "
                "that `save_intermediates` returned, so their axes are not known. Call "
                "`axes` on what it returned."
            )
        kinds = [tuple(kind for kind, *_ in of) for of in axes if of is not None]
        return tuple(kinds) if several else kinds[0]

    def _axes_of_places(self, name: str, mode: str) -> tuple[bool, list]:
        """Whether the values of several places are in a tuple, and the axes at each, or
        `None` where they are not known."""
        name, found = self._found(name)
        value = found[name][mode]
        known = found._axes.get((name, mode), ())
        axes = [axes_of_value(of_run, x) for of_run, x in runs_of(known, value)]
        return isinstance(known, list), axes

    @api_boundary
    def stack(self, pattern: str, mode: str = "primal") -> Any:
        """Stacks the values of several names: all layers along one axis.

        **Arguments:**

        - `pattern`: a glob, such as `"blocks/*/mlp"`, as in the option `names` of
            [`eqx_sow.save_intermediates`][]. It also works for a model that stacks its
            layers, whose value is `"blocks/mlp"` with an axis for the loop.
        - `mode`: the mode of the values.

        **Returns:**

        A PyTree like each of the values, whose arrays have a new first axis, in order
        of execution. For a model that stacks its layers, this is the axis of the loop,
        moved to the front.

        **Raises:**

        [`eqx_sow.UnknownSowError`][] if the pattern matches nothing;
        [`eqx_sow.SowError`][] if the values differ in structure, shape or dtype.

        !!! example

            ```python
            import equinox as eqx
            import eqx_sow
            import jax
            import jax.numpy as jnp

            model = eqx.nn.MLP(4, 4, 4, 2, key=jax.random.key(0))
            saved = eqx_sow.save_intermediates(model, capture=eqx.nn.Linear)
            out, intermediates = saved(jnp.ones(4))
            intermediates.stack("layers/*").shape  # (3, 4)
            ```
        """
        if not (isinstance(pattern, str) or callable(pattern)):
            raise TypeError(
                f"`Intermediates.stack(pattern)` takes a glob, such as "
                f"`'blocks/*/mlp'`, not {pattern!r}."
            )
        there = [name for name, modes in self.items() if mode in modes]
        known = {name: self._axes.get((name, mode), ()) for name in there}
        named = {name: _named(name, known[name], self[name][mode]) for name in there}
        roots = [name.split("/")[0] for name in there]
        selection = Selection([pattern], named.values(), roots)
        call = f"`Intermediates.stack({pattern!r}, {mode!r})`"
        for several in selection.ambiguous.values():
            which = " or ".join(map(repr, several))
            raise UnknownSowError(f"{call} may be {which}. Write which one.")
        values = [
            (layer, value)
            for name in there
            for one in selection.all_of(named[name])
            for at, layer, _, value in layers_of(name, known[name], self[name][mode])
            if all(i in (None, n) for i, n in zip(one.at, at))
        ]
        if not values:
            changed = any(None in self._axes_of_places(n, mode)[1] for n in there)
            hint = " If you have computed with the values since, the axis of the layers"
            hint += " is no longer known: call `stack` before that."
            hint = hint if changed else across_slashes(str(pattern), there)
            raise UnknownSowError(
                f"{call} matches nothing. The names with this mode are: "
                f"{shown(there)}.{hint}"
            )
        return _stacked(pattern, values)

    @api_boundary
    def unstack(self) -> "Intermediates":
        """Takes stacks of layers apart, as if each were a list.

        In a scan over 12 stacked blocks, `"blocks/attn"` is one value with an axis for
        the loop. Here it becomes `"blocks/0/attn"` to `"blocks/11/attn"`, for tables
        and loggers.

        **Returns:**

        An `Intermediates` in order of execution: all of layer 0, then all of layer 1,
        and so on. Other axes stay where they are: `vmap`s, and loops that do not slice
        a stack. A name that runs several times has a tuple for each layer. Shapes from
        `eval_shape` can be unstacked, too.

        **Raises:**

        [`eqx_sow.SowError`][] if the values have other shapes than those that
        `save_intermediates` returned, so that the axis of the layers is no longer
        known; or if two values would have the same name.

        !!! example

            ```python
            import equinox as eqx
            import eqx_sow
            import jax
            import jax.numpy as jnp

            class Model(eqx.Module):
                blocks: eqx.nn.Linear  # four of them, stacked

                def __call__(self, x):
                    return jax.lax.scan(lambda x, f: (f(x), None), x, self.blocks)[0]

            make = eqx.filter_vmap(lambda key: eqx.nn.Linear(3, 3, key=key))
            model = Model(make(jax.random.split(jax.random.key(0), 4)))
            saved = eqx_sow.save_intermediates(model, capture=eqx.nn.Linear)
            out, intermediates = saved(jnp.ones(3))
            list(intermediates)  # ["blocks"]
            list(intermediates.unstack())  # ["blocks/0", "blocks/1", ...]
            ```
        """
        values, axes = unstacked(self, self._axes)
        return with_axes(values, as_known(self._axes).of_layers(axes))


def is_state(x: Any) -> bool:
    return isinstance(x, eqx.nn.State)


def _arrays_in(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What `flat` has of a value, with the path of each."""
    is_leaf = lambda x: is_state(x) or isinstance(x, Summary)
    for path, x in jtu.tree_leaves_with_path(value, is_leaf=is_leaf):
        if isinstance(x, Summary):
            yield from ((path + p, y) for p, y in jtu.tree_leaves_with_path(x))
            if x.edges is not None:
                yield (*path, jtu.GetAttrKey("edges")), np.asarray(x.edges)
        elif is_value(x) and x.dtype != jax.dtypes.float0:
            yield path, _as_data(x)


def _as_data(x: Any) -> Any:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key and isinstance(x, jax.Array) else x


def _is_number(x: Any) -> bool:
    """Whether it is a scalar that can be shown as a number."""
    if not is_numeric(x) or x.shape or isinstance(x, jax.ShapeDtypeStruct):
        return False
    return not isinstance(x, jax.Array) or is_at_hand(x)


class _Number:
    def __init__(self, text: str):
        self.text = text

    def __repr__(self):
        return self.text


def _number(x: Any) -> Any:
    """A leaf as `print` shows it."""
    return _Number(str(np.asarray(x)[()])) if _is_number(x) else x


# --- iterations ---
def _all_named(intermediates: Intermediates) -> Iterator[Named]:
    """What the names are to patterns, as far as that is known: with the loops that each
    is in, wherever in the name their indices stand."""
    for name, modes in intermediates.items():
        some: dict[Named, None] = {}
        for mode, value in modes.items():
            known = intermediates._axes.get((name, mode), ())
            for of_run, _ in runs_of(known, value):
                some |= dict.fromkeys(_with_loops(name, of_run))
        yield from some or [Named(name)]


def _with_loops(name: str, leading: Sequence[Leading]) -> Iterator[Named]:
    """What a name is to patterns, at one place. Every array there has the axes of all
    loops."""
    for axes, shape in leading[:1]:
        loops = [(p, n) for (kind, p, _), n in zip(axes, shape) if kind == "loop"]
        yield Named(name, *zip(*loops)) if loops else Named(name)


def _named(name: str, known: Any, value: Any) -> Named:
    """What a name is to patterns: with the loops over layers that its value is from."""
    loops = loops_over_layers(known, value)
    return Named(name, tuple(x.place for x in loops), tuple(x.length for x in loops))


def _iteration(
    name: str, new: str, intermediates: Intermediates, at: Mapping[Named, Any]
) -> Intermediates | None:
    """Of all modes of a name, the iterations `at`, see `Selected.at`, under the name
    `new`. `at` has those of each place. `None` if the axes are not known."""
    of_place = {(x.name, places_of(x), x.loops): one for x, one in at.items()}
    modes, axes = {}, Known()
    # Of several runs, which ones have them. A derivative may be missing there.
    having: set[int] = set()
    for mode, value in intermediates.get(name, {}).items():
        known: Any = intermediates._axes.get((name, mode), ())
        several = isinstance(known, list)
        parts = {}
        for k, (of_run, x) in enumerate(runs_of(known, value)):
            named = next(_with_loops(name, of_run), Named(name))
            one = of_place.get((name, places_of(named), named.loops))
            if one and axes_of_value(of_run, x) is not None:
                parts[k] = at_iteration(of_run, x, one)
            elif one or not several:
                return None
            elif x is None and k in having:
                parts[k] = (), None
        having |= parts.keys()
        if parts:
            left, values = zip(*parts.values())
            modes[mode] = values if several else values[0]
            axes[new, mode] = [*left] if several else left[0]
    if len(having) == 1 and name not in as_known(intermediates._axes).appended:
        # Of the runs, one alone is in such a loop.
        for mode in modes:
            if isinstance(axes[new, mode], list):
                modes[mode], axes[new, mode] = modes[mode][0], axes[new, mode][0]
    return with_axes({new: modes}, axes) if modes else None


# --- stacks ---
def _stacked(pattern: str, named: Sequence[tuple[str, Any]]) -> Any:
    """The values along a new first axis of their arrays."""

    def form(value):
        arrays = filter(is_value, jtu.tree_leaves(value))
        return jtu.tree_structure(value), [(x.shape, x.dtype) for x in arrays]

    values = [value for _, value in named]
    if any(form(value) != form(values[0]) for value in values):
        kinds: dict[str, str] = {}
        for name, value in named:
            kinds.setdefault(eqx.tree_pformat(value), name)
        found = " and ".join(f"{name!r} is {kind}" for kind, name in kinds.items())
        raise SowError(
            f"`Intermediates.stack({pattern!r})`: the values differ in structure, "
            f"shape or dtype: {found}. Select values that are alike, by a pattern such "
            "as `blocks/*/mlp`."
        )

    def stacked(*xs):
        if not is_value(xs[0]):
            return xs[0]
        if isinstance(xs[0], jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((len(xs), *xs[0].shape), xs[0].dtype)
        # JAX has no arrays of the dtype `float0`.
        return (jnp if any(isinstance(x, jax.Array) for x in xs) else np).stack(xs)

    return jtu.tree_map(stacked, *values)


def with_axes(values: Any, axes: AllAxes) -> Intermediates:
    """`Intermediates` of which it is known what the arrays are."""
    made = Intermediates(values)
    made._axes = axes
    return made


def axes_in(
    intermediates: Mapping[str, Any], name: Any, mode: Any
) -> Iterator[NamedAxes | None]:
    """The leading axes of the arrays of a mode, one after another, as far as they are
    known."""
    known = getattr(intermediates, "_axes", {}).get((name, mode), ())
    known = it.chain.from_iterable(known) if isinstance(known, list) else known
    return axes_of_each(known, intermediates[name][mode])


# Pickles are then independent of where this file is.
Intermediates.__module__ = "eqx_sow"


def _rank(mode: str) -> tuple[Any, ...]:
    order = {"primal": 0, "tangent": 1, "cotangent": 2}
    parts = [order.get(part, 3) for part in mode.split(".")]
    return mode == "count", len(parts), parts, mode


@ft.lru_cache(maxsize=4096)
def _ordered(modes: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(sorted(modes, key=lambda mode: _rank(str(mode))))


def in_order(modes: Mapping[str, Any]) -> dict[str, Any]:
    """The modes of one name: `"primal"` first, `"count"` last."""
    return {mode: modes[mode] for mode in _ordered(tuple(modes))}


def _flatten(x: Intermediates):
    names = _Names(x)
    names.axes = x._axes
    children = tuple(x.values())
    # An entry of another `Intermediates` that was put in.
    if Modes in map(type, children):
        children = tuple(dict(m) if type(m) is Modes else m for m in children)
    return children, names


def _flatten_with_keys(x: Intermediates):
    children, names = _flatten(x)
    return tuple(zip(map(jtu.DictKey, names), children)), names


def _unflatten(names, children) -> Intermediates:
    # This is most of what a call of a compiled function costs more than one that
    # returns a plain dict, so it does no more than it has to.
    made = Intermediates(zip(names, children))
    made._axes = names.axes
    for name, x in zip(names, children):
        # JAX rebuilds its own dicts with their keys sorted; and it puts anything in the
        # place of a child.
        if type(x) is dict and len(x) > 1:
            made[name] = in_order(x)
    return made


jtu.register_pytree_with_keys(Intermediates, _flatten_with_keys, _unflatten, _flatten)
jax.export.register_pytree_node_serialization(
    Intermediates,
    serialized_name="eqx_sow.Intermediates",
    serialize_auxdata=lambda names: json.dumps(names).encode(),
    deserialize_auxdata=lambda names: _Names(json.loads(names)),
)
