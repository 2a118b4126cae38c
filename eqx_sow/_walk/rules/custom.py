"""Functions with derivative or batching rules of their own.

The sows are evaluated as in a plain function. The original equation gives the
derivatives of the outputs (or, for a batching rule, the outputs themselves), so the
rules are kept; XLA removes it as long as nobody differentiates. If something is
planted inside, the rules are those of another function, and are given up.
"""

from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp

from ... import _compat
from ..edit import without_prints, without_sows
from ..interpreter import rule_for
from .calls import bind


@jax.custom_jvp
def _with_derivative_of(x: Any, y: Any) -> Any:
    del y
    return x


@_with_derivative_of.defjvp
def _with_derivative_of_jvp(primals, tangents):
    (_, y), (_, tangent) = primals, tangents
    # Not `x`: the rule may have another value than the function.
    return y, tangent


def _derivative_of(x, y):
    inexact = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    return _with_derivative_of(x, y) if inexact else x


def _custom(interpret, given, eqn, *args):
    jaxpr = eqn.params["call_jaxpr"]
    if interpret.handler.changes(eqn):
        return interpret(jaxpr)(given, *args)
    # The original prints what there is to print.
    outs, taken = interpret(without_prints(jaxpr))(given, *args)
    original = bind(without_sows(eqn), args)
    return list(map(_derivative_of, outs, original)), taken


rule_for(jexc.primitives.custom_jvp_call_p)(_custom)
rule_for(jexc.primitives.custom_vjp_call_p)(_custom)


@rule_for(_compat.custom_vmap_p)
def _custom_vmap(interpret, given, eqn, *args):
    jaxpr = eqn.params["call"]
    if interpret.handler.changes(eqn):
        return interpret(jaxpr)(given, *args)
    _, taken = interpret(without_prints(jaxpr))(given, *args)
    return bind(without_sows(eqn), args), taken
