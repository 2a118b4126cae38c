"""Loops and branches that run eagerly.

JAX compiles each of them by itself, and finds it again by its jaxprs, which it keeps
with the functions that they were traced from. So what a rule binds in the place of one
is the same each time: it is staged once for each handler, and kept with the jaxpr.
"""

import functools as ft
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.tree_util as jtu

from ... import _compat
from ..interpreter import Interpret
from ..sows import jaxprs_in


def _to_ref(x: Any) -> Any:
    return weakref.ref(x) if _compat.is_jaxpr(x) else x


def _from_ref(x: Any) -> Any:
    return x() if isinstance(x, weakref.ref) else x


def staged_if_eager(rule: Callable) -> Callable:
    """For a rule that binds a primitive which JAX compiles when it runs eagerly."""
    stages: weakref.WeakKeyDictionary[Any, Callable] = weakref.WeakKeyDictionary()

    def stage(bare):
        # Neither holds on to a jaxpr, which is to go when JAX is done with it.
        @ft.lru_cache(maxsize=16)
        def by(params, handler):
            def run(given, args):
                new = jax.tree.map(_from_ref, dict(params))
                return rule(Interpret(handler), given, bare.replace(params=new), *args)

            return jax.jit(run)

        return by

    @ft.wraps(rule)
    def staged(interpret, given, eqn, *args):
        plain = all(isinstance(v.aval, jax.core.ShapedArray) for v in eqn.invars)
        if not (plain and _compat.is_eager()):
            return rule(interpret, given, eqn, *args)
        by = stages.setdefault(
            next(jaxprs_in(eqn.params)), stage(eqn.replace(params={}))
        )
        params = jax.tree.map(_to_ref, eqn.params)
        traced = by(tuple(params.items()), interpret.handler).trace(given, args)
        leaves = jtu.tree_leaves((given, args))
        out = _compat.inline_or_call(traced.jaxpr, leaves)
        return jtu.tree_unflatten(jtu.tree_structure(traced.out_info), out)

    return staged
