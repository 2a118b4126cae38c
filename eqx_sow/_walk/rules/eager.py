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
from ..find import jaxprs_in
from ..interpreter import Interpret


def _map_jaxprs(x: Any, fn: Callable) -> Any:
    """A parameter, with `fn` applied to the jaxpr, or the jaxprs, or references to
    them, that it is."""
    if isinstance(x, weakref.ref) or _compat.is_jaxpr(x):
        return fn(x)
    return tuple(_map_jaxprs(v, fn) for v in x) if type(x) is tuple else x


def staged_if_eager(rule: Callable) -> Callable:
    """For a rule that binds a primitive which JAX compiles when it runs eagerly."""
    stages: weakref.WeakKeyDictionary[Any, Callable] = weakref.WeakKeyDictionary()

    def stage(bare):
        # Neither holds on to a jaxpr, which is to go when JAX is done with it.
        @ft.lru_cache(maxsize=16)
        def by(params, handler):
            def run(given, args):
                new = {k: _map_jaxprs(v, lambda ref: ref()) for k, v in params}
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
        params = {k: _map_jaxprs(v, weakref.ref) for k, v in eqn.params.items()}
        traced = by(tuple(params.items()), interpret.handler).trace(given, args)
        leaves = jtu.tree_leaves((given, args))
        out = _compat.inline_or_call(traced.jaxpr, leaves)
        return jtu.tree_unflatten(jtu.tree_structure(traced.out_info), out)

    return staged
