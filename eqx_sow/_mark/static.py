"""How a PyTree is split into its arrays, which are operands of an equation, and all
else, which is part of a parameter. JAX compares parameters, and keeps programs by
them."""

import dataclasses as dc
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

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

    def __hash__(self):
        if not hasattr(self, "_hash"):
            try:
                self._hash = hash((type(self.value), self.value))
            except Exception:  # A user's `__hash__` may raise anything.
                self._hash = id(self.value)
        return self._hash

    def __eq__(self, other):
        if type(other) is not Const:
            return False
        a, b = self.value, other.value
        if a is b:
            return True
        if type(a) is not type(b):
            return False
        if isinstance(a, float | complex):
            return repr(a) == repr(b)
        try:
            return bool(a == b)
        except Exception:  # A user's `__eq__` may, and NumPy's `__bool__` does.
            return False

    def __repr__(self):
        return repr(self.value)


class SameParts:
    """A PyTree, equal to another one if the arrays are the very same objects, and all
    other leaves are equal. For options that users may write anew in each call, such as
    `transform={"h": jnp.mean}`: what is compiled is found again. To compare arrays by
    their numbers would compute, and add equations to a program that is being traced.

    A NumPy array is compared by its numbers: a user may change them between two calls.
    """

    __slots__ = ("value", "_form", "_hash")

    def __init__(self, value: Any):
        arrays, form = take_apart(value)
        self.value = value
        if any(isinstance(x, np.ndarray) for x in arrays):
            arrays = [x.copy() if isinstance(x, np.ndarray) else x for x in arrays]
            self.value = form.with_arrays(arrays)
        self._form = (form, *map(_identity, arrays))
        self._hash = hash(self._form)

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        return type(other) is SameParts and self._form == other._form


def _identity(x: Any) -> Hashable:
    if isinstance(x, np.ndarray):
        return x.tobytes(), x.dtype, x.shape
    return id(x)


@dc.dataclass(frozen=True)
class NoTangent:
    """A leaf, in a derivative of a sow, that was not differentiated: an integer, a key,
    a NumPy array, or what JAX refuses to differentiate. There is no operand for it.

    Its tangent is zero. Its cotangent is not known: JAX never computes one. Zeros of
    this `dtype` stand in its place.
    """

    shape: tuple[int, ...]
    dtype: Any


# A leaf that is an operand of the equation.
OPERAND = object()


def is_operand(x: Any) -> bool:
    """Whether a leaf is an array that JAX can hold: NumPy has arrays of strings. Or a
    number with a dtype, which JAX makes of a Python number: the rule of a
    `jax.custom_vjp` function may be called with one."""
    dtype = getattr(x, "dtype", np.dtype(object))
    return isinstance(x, jax.Array) or (
        (eqx.is_array(x) or isinstance(x, int | float | complex))
        and (jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_))
    )


@jtu.register_static
class Form(NamedTuple):
    """A PyTree without its arrays. For `(x, 2)` with an array `x`, `leaves` are
    `(OPERAND, Const(2))`. In a derivative, some may be `NoTangent`s. In a PyTree, as
    what a jitted function returns, a form is static."""

    treedef: Const
    leaves: tuple[Any, ...]

    @property
    def n_operands(self) -> int:
        return self.leaves.count(OPERAND)

    def with_arrays(self, arrays: Sequence[Any], lead: Sequence[int] = ()) -> Any:
        """The PyTree with these arrays. Leaves that were not differentiated are zeros,
        with the axes `lead` before their own."""
        operand = iter(arrays)

        def leaf(x):
            if x is OPERAND:
                return next(operand)
            if not isinstance(x, NoTangent):
                return x.value
            return np.zeros((*lead, *x.shape), x.dtype)

        return jtu.tree_unflatten(self.treedef.value, list(map(leaf, self.leaves)))


def take_apart(
    tree: Any, is_operand: Callable[[Any], bool] = is_operand
) -> tuple[list[Any], Form]:
    """The arrays of a PyTree, and what else it is."""
    leaves, treedef = jtu.tree_flatten(tree)
    found = list(map(is_operand, leaves))
    static = tuple(OPERAND if d else Const(x) for d, x in zip(found, leaves))
    return [x for d, x in zip(found, leaves) if d], Form(Const(treedef), static)
