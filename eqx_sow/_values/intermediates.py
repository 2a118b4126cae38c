"""What `save_intermediates` returns beside the output."""

import functools as ft
import json
from collections.abc import Hashable, Mapping
from typing import Any

import jax.export
import jax.tree_util as jtu


# A loop, which of the axes of an array it is, counted from the last one, and whether it
# runs from its end. These are plain tuples: pickles have them.
Loop = tuple[Hashable, int, bool]
# An array as it came back: its loops, from outside in, and its shape. Transformations
# further out put more axes before those.
Stacked = tuple[tuple[Loop, ...], tuple[int, ...]]
_AllStacked = Mapping[tuple[str, str], tuple[Stacked, ...]]


class _Names(tuple[str, ...]):
    """The names of an `Intermediates`, and what its arrays are. That does not count for
    whether two are of one form: both a loop and a vmap stack values."""

    stacked: _AllStacked = {}


class Intermediates(dict[str, dict[str, Any]]):
    """What [`eqx_sow.save_intermediates`][] captured: `intermediates[name][mode]`.

    A `dict` whose names are in order of execution. JAX sorts the keys of a plain dict.
    Of this one it keeps their order, under every transformation: `jax.jit`, `jax.vmap`,
    `jax.grad(..., has_aux=True)`, the outputs of a `jax.lax.scan`, `jax.eval_shape`,
    `jax.tree.map`. The modes of a name are in order as well: `"primal"` first,
    `"count"` last. It prints as a dict, and is equal to a dict with the same items. In
    a notebook it shows as a table, that of [`eqx_sow.tabulate`][].

    To JAX it is a node of its own. `jax.tree.map(fn, a, b)` takes two `Intermediates`
    with the same names in the same order, and so do the branches of a `jax.lax.cond`.
    Beside a plain dict, write `dict(intermediates)`, or `Intermediates(plain)`. The
    keys in its paths are those of a dict, `jax.tree_util.DictKey`.

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
        ```
    """

    _stacked: _AllStacked = {}

    def copy(self) -> "Intermediates":
        return with_stacked(self, self._stacked)

    __copy__ = copy

    def __or__(self, other: Any) -> "Intermediates":
        return Intermediates(dict(self) | other)

    def __ror__(self, other: Any) -> "Intermediates":
        return Intermediates(other | dict(self))

    def _repr_html_(self) -> str | None:
        # Here, as a table asks for the order of what it is given.
        from .tabulate import html

        return html(self)


def with_stacked(values: Any, stacked: _AllStacked) -> Intermediates:
    """`Intermediates` of which it is known what the arrays are."""
    made = Intermediates(values)
    made._stacked = stacked
    return made


def stacked_in(intermediates: Mapping[str, Any], name: Any, mode: Any) -> Any:
    """What the arrays of a mode are, one after another, as far as that is known."""
    known = isinstance(intermediates, Intermediates)
    return iter(intermediates._stacked.get((name, mode), ()) if known else ())


# Pickles are then independent of where this file is.
Intermediates.__module__ = "eqx_sow"


@ft.cache
def _rank(mode: str) -> tuple[Any, ...]:
    parts = mode.split(".")
    known = {"primal": 0, "tangent": 1, "cotangent": 2}
    ranks = tuple(known.get(p, len(known)) for p in parts)
    return mode == "count", len(parts), ranks, mode


def in_order(modes: Mapping[str, Any]) -> dict[str, Any]:
    """The modes of one name: `"primal"` first, `"count"` last."""
    return {mode: modes[mode] for mode in sorted(modes, key=lambda m: _rank(str(m)))}


def _names(x: Intermediates) -> _Names:
    names = _Names(x)
    names.stacked = x._stacked
    return names


def _flatten(x: Intermediates):
    return tuple(x.values()), _names(x)


def _flatten_with_keys(x: Intermediates):
    return tuple((jtu.DictKey(name), modes) for name, modes in x.items()), _names(x)


def _unflatten(names, children) -> Intermediates:
    # JAX rebuilds its own dicts with their keys sorted; and it puts anything in the
    # place of a child.
    values = (
        (name, in_order(x) if type(x) is dict and len(x) > 1 else x)
        for name, x in zip(names, children)
    )
    return with_stacked(values, names.stacked)


jtu.register_pytree_with_keys(Intermediates, _flatten_with_keys, _unflatten, _flatten)
jax.export.register_pytree_node_serialization(
    Intermediates,
    serialized_name="eqx_sow.Intermediates",
    serialize_auxdata=lambda names: json.dumps(names).encode(),
    deserialize_auxdata=lambda names: _Names(json.loads(names)),
)
