"""What `save_intermediates` and `plant` return."""

import warnings
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu

from . import _compat
from ._primitive import rebuild, take_apart


class Transformed(eqx.Module):
    """A function around `_fn`: a PyTree with the arrays of `_fn`, that can be a
    method."""

    _fn: eqx.AbstractVar[Callable]

    @property
    def __wrapped__(self):
        return self._fn

    @abstractmethod
    def _run(self, args: tuple, kwargs: dict) -> Any:
        pass

    def _pack(self, result: Any) -> Any:
        """What `_run` returned, in a form of which `jax.jit` sorts no keys."""
        return result

    def _unpack(self, packed: Any) -> Any:
        return packed

    def __call__(self, /, *args, **kwargs):
        if not (_is_jitted(self._fn) and _compat.is_eager()):
            return _run(self, args, kwargs)
        # `S(jit(f))` is `jit(S(f))`: so it is traced and compiled when `jit(f)` would
        # be.
        arrays, treedef, leaves = take_apart((self, args, kwargs))
        key = _Key(treedef, leaves)
        return type(self)._unpack(self, _jitted(key, *arrays).value())

    def __hash__(self):
        # `jax.jit` takes only what is hashable, and dicts are not.
        try:
            return super().__hash__()
        except TypeError:
            return id(self)

    def __get__(self, instance, owner):
        del owner
        return self if instance is None else eqx.Partial(self, instance)


def _run(self, args, kwargs):
    # Not `self._run`: for a method, Equinox makes a module that holds `self`, and warns
    # if JAX transformed what is in there.
    return type(self)._run(self, args, kwargs)


def wrap(cls: type, *fields: Any) -> Any:
    with warnings.catch_warnings():
        # Equinox warns of functions that JAX transformed, as attributes.
        warnings.simplefilter("ignore")
        return eqx.module_update_wrapper(cls(*fields))


class _Key:
    """All of a call but its arrays."""

    def __init__(self, treedef, leaves):
        self.treedef = treedef
        self.leaves = leaves
        self._hash = hash((treedef, leaves))

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        return self.treedef == other.treedef and self.leaves == other.leaves


@jtu.register_pytree_node_class
class _Output:
    """Any PyTree, as one whose leaves are arrays."""

    def __init__(self, arrays, aux):
        self.arrays = arrays
        self.aux = aux

    def value(self):
        treedef, leaves = self.aux
        return rebuild(treedef, leaves, self.arrays)

    def tree_flatten(self):
        return self.arrays, self.aux

    @classmethod
    def tree_unflatten(cls, aux, arrays):
        return cls(arrays, aux)


def _traced(key, *arrays):
    self, args, kwargs = rebuild(key.treedef, key.leaves, arrays)
    arrays, *aux = take_apart(type(self)._pack(self, _run(self, args, kwargs)))
    return _Output(arrays, tuple(aux))


_jitted = jax.jit(_traced, static_argnums=0)


def _is_jitted(fn: Any) -> bool:
    if isinstance(fn, eqx.Partial):
        return _is_jitted(fn.func)
    return isinstance(fn, (_compat.FilterJit, _compat.Jit))
