"""What `save_intermediates` returns beside the output."""

import dataclasses as dc
import re
import sys
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np

from .._errors import SowError
from .._frames import api_boundary
from .flat import as_data, flattened
from .layers import axes_of_each, Known, runs_of, UNKNOWN
from .leaves import is_numeric, is_state
from .lookup import find, is_there, unknown_name
from .nodes import Keys, made, modes_in_order, modes_of, OfMode, register
from .numbers import is_at_hand
from .stacks import unstacked


# For whoever takes the gradient of a function that `save_intermediates` returned.
_NO_LOSS = (
    "\nThis is the output of `save_intermediates(fn)`, a pair `(out, intermediates)`. "
    "For the gradients of the marked values, too, put the gradient inside: "
    "`save_intermediates(eqx.filter_grad(loss))`. Or write "
    "`eqx.filter_grad(save_intermediates(loss), has_aux=True)`\n"
)


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

    Look up what `names=` would select, with or without the root: one layer of a list or
    a stack, `intermediates["blocks/2/attn"]`; one iteration of another loop,
    `intermediates["h/3"]` or `["h/-1"]`. A pattern gives the values of all names that
    it fits, stacked in order of execution: `intermediates["blocks/*/attn"]` has an axis
    for the layers, of a list as of a stack. For a list, this axis comes first, and
    nested lists give one axis each. A stack has it where its loop is: with a `vmap`
    around the loop, behind the lanes. If the values cannot be stacked, it is an
    [`eqx_sow.SowError`][]. `in`, `.get` and `.primals[...]` agree with `[...]`. A name
    or a mode that is not there is an [`eqx_sow.UnknownSowError`][], which is a
    `KeyError` as well, and says why.

    To JAX it is a PyTree node of its own type. In `jax.tree.map(fn, a, b)`, and as
    results of the branches of a `jax.lax.cond`, two `Intermediates` need the same names
    in the same order, and stacks the same order of axes. To combine one with a plain
    dict, write `dict(intermediates)` or `Intermediates(plain)`. Its paths consist of
    `jax.tree_util.DictKey`s.

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

    _known: Known = Known()

    def copy(self) -> "Intermediates":
        return made(Intermediates, self, self._known)

    __copy__ = copy

    # Pickles are then independent of our classes.
    def __getstate__(self):
        return {"axes": self._known.axes}

    def __setstate__(self, state):
        self._known = Known(**state)

    def __getitem__(self, name: str) -> dict[str, Any]:
        modes: Any = super().get(name, self)
        known = self._known
        if modes is self:
            name, modes, known = self._found(name)
        # What is put in may be anything.
        return modes_of(name, modes, known) if type(modes) is dict else modes

    def get(self, name: Any, default: Any = None) -> Any:
        return self[name] if name in self else default

    def __contains__(self, name: Any) -> bool:
        return super().__contains__(name) or is_there(name, dict(self), self._known)

    @api_boundary
    def _found(self, name: Any) -> tuple[str, Any, Known]:
        there = find(name, dict(self), self._known)
        if there is None:
            raise unknown_name(name, dict(self), self._known)
        return there

    def __or__(self, other: Any) -> "Intermediates":
        return Intermediates(dict(self) | other)

    def __ror__(self, other: Any) -> "Intermediates":
        return Intermediates(other | dict(self))

    @property
    def primals(self) -> dict[str, Any]:
        """A dict `{name: value}` of the mode `"primal"`, the values themselves. Names
        without this mode are left out. Names are looked up as in `intermediates`."""
        return self._of_mode("primal")

    @property
    def tangents(self) -> dict[str, Any]:
        """A dict of the mode `"tangent"`, like `primals`."""
        return self._of_mode("tangent")

    @property
    def cotangents(self) -> dict[str, Any]:
        """A dict of the mode `"cotangent"`, like `primals`."""
        return self._of_mode("cotangent")

    def _of_mode(self, mode: str) -> dict[str, Any]:
        values = {name: modes[mode] for name, modes in self.items() if mode in modes}
        lacking = {name: tuple(self[name]) for name in self if name not in values}
        known = dc.replace(self._known, lacking=lacking) if lacking else self._known
        return made(OfMode, values, (mode, known))

    def __repr__(self) -> str:
        shown = dict(jtu.tree_map(_number, self, is_leaf=is_state))
        # A `State` prints badly: its keys need not be strings.
        text = eqx.tree_pformat(shown, struct_as_array=True, truncate_leaf=is_state)
        # What NumPy calls the dtype of the cotangent of an integer.
        text = re.sub(r"\[\('f(?:loat)?0', 'V'\)\](\S*?)\(numpy\)", r"float0\1", text)
        # `jax.grad` of a function that returns a pair prints the pair while it handles
        # the error that a pair is not an array.
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
        for key, _, x in flattened(self, sep):
            if key in flat:
                raise SowError(
                    f"`Intermediates.flat(sep={sep!r})`: two arrays would have the key "
                    f"{key!r}. Choose another `sep`."
                )
            flat[key] = as_data(x)
        # All at once, since each would be waited for.
        scalars = jax.device_get({k: x for k, x in flat.items() if _is_number(x)})
        return flat | {k: np.asarray(x)[()] for k, x in scalars.items()}

    @api_boundary
    def axes(self, name: str, mode: str = "primal") -> tuple[Any, ...]:
        """Describes the leading axes that loops and `vmap`s added to a value.

        **Arguments:**

        - `name`, `mode`: of the value. Layers of a list are a `"loop"`, too.

        **Returns:**

        A tuple, outermost first, of

        - `"vmap"`, `"loop"`, or for an axis of a mesh its name, as in `"device:data"`;
        - `"buffer"`, for the executions that [`eqx_sow.Buffer`][] keeps;
        - `"outside"`, for an axis that a transformation around `save_intermediates` has
            added, as in `jax.vmap(save_intermediates(fn))`.

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
        name, modes, known = self._found(name)
        of_mode, value = known.of(name, mode), modes_of(name, modes, known)[mode]
        runs = [axes_of_each(*run) for run in runs_of(of_mode, value)]
        if any(axes is None or UNKNOWN in axes for run in runs for axes in run):
            raise SowError(
                f"`Intermediates.axes({name!r}, {mode!r})`: these arrays are not those "
                "that `save_intermediates` returned, so their axes are not known. Call "
                "`axes` on what it returned."
            )
        most = (max(filter(None, run), key=len, default=()) for run in runs)
        kinds = [tuple(kind for kind, *_ in axes) for axes in most]
        return tuple(kinds) if isinstance(of_mode, list) else kinds[0]

    @api_boundary
    def unstack(self) -> "Intermediates":
        """Takes stacks of layers apart, as if each were a list.

        In a scan over 12 stacked blocks, `"blocks/*/attn"` is one value with an axis
        for the loop. Here it becomes `"blocks/0/attn"` to `"blocks/11/attn"`, for
        tables and loggers.

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
            list(intermediates)  # ["blocks/*"]
            list(intermediates.unstack())  # ["blocks/0", "blocks/1", ...]
            ```
        """
        values, axes = unstacked(self, self._known)
        # The names are others now.
        known = dc.replace(self._known, axes=axes, found=(), appended=frozenset())
        return made(Intermediates, values, known)


def _is_number(x: Any) -> bool:
    """Whether it is a scalar that can be shown as a number."""
    return is_numeric(x) and not x.shape and is_at_hand(x)


class _Number:
    def __init__(self, text: str):
        self.text = text

    def __repr__(self):
        return self.text


def _number(x: Any) -> Any:
    """A leaf as `print` shows it."""
    return _Number(str(np.asarray(x)[()])) if _is_number(x) else x


# Pickles are then independent of where this file is.
Intermediates.__module__ = "eqx_sow"


def _unflatten(names: Keys, children: Any) -> Intermediates:
    new = made(Intermediates, (), names.known)
    for name, x in zip(names, children):
        # JAX has sorted the modes. And it puts anything in the place of a child.
        new[name] = modes_in_order(x) if type(x) is dict and len(x) > 1 else x
    return new


register(Intermediates, _unflatten)
