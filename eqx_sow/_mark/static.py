"""Static leaves: how a PyTree is split into arrays and what can be compared."""

import dataclasses as dc
import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np


class Const:
    """A static leaf, compared so that two leaves are equal only if no program could
    tell them apart: `1`, `1.0` and `True` differ, and so do `0.0` and `-0.0`."""

    __slots__ = ("value", "_hash")

    def __init__(self, value: Any):
        self.value = value
        try:
            self._hash = hash((type(value), value))
        except Exception:  # A user's `__hash__` may raise anything.
            self._hash = id(value)

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        if type(other) is not Const:
            return False
        a, b = self.value, other.value
        if a is b:
            return True
        if type(a) is not type(b):
            return False
        if isinstance(a, float):
            return a == b and math.copysign(1, a) == math.copysign(1, b)
        if isinstance(a, complex):
            return repr(a) == repr(b)
        try:
            return bool(a == b)
        except Exception:  # A user's `__eq__` may, and NumPy's `__bool__` does.
            return False

    def __repr__(self):
        return repr(self.value)


class SameParts:
    """A PyTree that is equal to one with the very same arrays, and all else alike: an
    option that is written anew in each call."""

    __slots__ = ("value", "_form", "_hash")

    def __init__(self, value: Any):
        self.value = value
        arrays, *static = take_apart(value)
        self._form = (*static, *map(id, arrays))
        self._hash = hash(self._form)

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        return type(other) is SameParts and self._form == other._form


@dc.dataclass(frozen=True)
class NoTangent:
    """A leaf that is not differentiated, and of which there is no operand.

    Its tangent is zero. Its cotangent is not known: JAX never computes one, and a zero
    would be wrong. It is an integer, a key, a NumPy array, or what JAX refuses to
    differentiate. `dtype` is that of the zeros which
    stand there; `tangent_dtype` what a tangent of the leaf would have.
    """

    shape: tuple[int, ...]
    dtype: Any
    tangent_dtype: Any


# A leaf that is an operand of the equation.
OPERAND = object()


def is_operand(x: Any) -> bool:
    """Whether a leaf is an array that JAX can hold: NumPy has arrays of strings."""
    return isinstance(x, jax.Array) or (
        eqx.is_array(x)
        and (jnp.issubdtype(x.dtype, np.number) or jnp.issubdtype(x.dtype, np.bool_))
    )


def take_apart(tree: Any) -> tuple[list[Any], Const, tuple[Any, ...]]:
    """The arrays of a PyTree, its treedef, and for each leaf `OPERAND` or a `Const`."""
    leaves, treedef = jtu.tree_flatten(tree)
    found = list(map(is_operand, leaves))
    static = tuple(OPERAND if d else Const(x) for d, x in zip(found, leaves))
    return [x for d, x in zip(found, leaves) if d], Const(treedef), static


def rebuild(
    treedef: Const, leaves: Sequence[Any], values: Sequence[Any], lead=()
) -> Any:
    """The PyTree. Leaves that are not differentiated are zeros."""
    operand = iter(values)
    return jtu.tree_unflatten(
        treedef.value,
        [
            next(operand)
            if x is OPERAND
            else np.zeros((*lead, *x.shape), x.dtype)
            if isinstance(x, NoTangent)
            else x.value
            for x in leaves
        ],
    )
