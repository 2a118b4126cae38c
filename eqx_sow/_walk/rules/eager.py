"""Loops and branches that run eagerly.

JAX compiles each of them by itself, and finds it again by its jaxprs, which it keeps
with the functions that they were traced from. So what a rule binds in the place of one
is the same each time: it is staged once for each handler, and kept with the jaxpr.
"""

import dataclasses as dc
import functools as ft
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.tree_util as jtu

from ... import _compat
from ..find import jaxprs_in
from ..interpreter import Interpret


@dc.dataclass(frozen=True)
class _Equation:
    """An equation that does not keep its jaxprs, which are to go when JAX is done with
    them. Two are equal if the rule does the same for both."""

    params: tuple[tuple[str, Any], ...]
    without_params: Any = dc.field(compare=False)

    @classmethod
    def of(cls, eqn: Any) -> "_Equation":
        params = {k: _map_jaxprs(v, weakref.ref) for k, v in eqn.params.items()}
        return cls(tuple(params.items()), eqn.replace(params={}))

    def restored(self) -> Any:
        params = {k: _map_jaxprs(v, lambda ref: ref()) for k, v in self.params}
        return self.without_params.replace(params=params)


def _map_jaxprs(x: Any, fn: Callable) -> Any:
    """A parameter, with `fn` applied to the jaxpr, or the jaxprs, or references to
    them, that it is."""
    if isinstance(x, weakref.ref) or _compat.is_jaxpr(x):
        return fn(x)
    return tuple(_map_jaxprs(v, fn) for v in x) if type(x) is tuple else x


def staged_if_eager(rule: Callable) -> Callable:
    """For a rule that binds a primitive which JAX compiles when it runs eagerly."""
    stages: weakref.WeakKeyDictionary[Any, Callable] = weakref.WeakKeyDictionary()

    def stage():
        @ft.lru_cache(maxsize=16)
        def by(equation, handler):
            def run(given, args):
                return rule(Interpret(handler), given, equation.restored(), *args)

            return jax.jit(run)

        return by

    @ft.wraps(rule)
    def staged(interpret, given, eqn, *args):
        plain = all(isinstance(v.aval, jax.core.ShapedArray) for v in eqn.invars)
        if not (plain and _compat.is_eager()):
            return rule(interpret, given, eqn, *args)
        jaxpr = next(jaxprs_in(eqn.params))
        by = stages.setdefault(jaxpr, stage())
        traced = by(_Equation.of(eqn), interpret.handler).trace(given, args)
        leaves = jtu.tree_leaves((given, args))
        out = jax.core.eval_jaxpr(*_compat.open_jaxpr(traced.jaxpr), *leaves)
        return jtu.tree_unflatten(jtu.tree_structure(traced.out_info), out)

    return staged
