"""Functions with derivative or batching rules of their own.

The sows are evaluated as in a plain function. The original equation gives the
derivatives of the outputs (or, for a batching rule, the outputs themselves), so the
rules are kept; XLA removes it unless it is differentiated. If something is
planted inside, the rules are those of another function, and are given up.
"""

import weakref
from typing import Any

import jax
import jax.extend.core as jexc
import jax.extend.linear_util as lu
import jax.numpy as jnp

from ... import _compat
from ..._mark.listening import listening
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
    if interpret.handler.changes_inside(eqn):
        return interpret(jaxpr)(given, *args)
    # The original prints what there is to print.
    inputs = args
    if not interpret.handler.differentiable:
        # With an effect, the derivative of the copy would not be removed.
        inputs = map(jax.lax.stop_gradient, args)
    outs, taken = interpret(without_prints(jaxpr))(given, *inputs)
    original = bind(_without_sows(eqn), args)
    return list(map(_derivative_of, outs, original)), taken


_quiet: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _without_sows(eqn):
    """The equation without sows, in its derivative rule too, where JAX would keep them
    though nothing asks for them."""

    def quiet(rule):
        def call(*zeros):
            jaxpr, *rest = rule.call_wrapped(*zeros)
            if listening.value is None:
                if jaxpr not in _quiet:
                    _quiet[jaxpr] = without_sows(jaxpr)
                jaxpr = _quiet[jaxpr]
            return jaxpr, *rest

        return lu.wrap_init(call, debug_info=rule.debug_info)

    rules = {
        name: quiet(eqn.params[name])
        for name in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk")
        if name in eqn.params
    }
    eqn = without_sows(eqn)
    return eqn.replace(params={**eqn.params, **rules})


rule_for(jexc.primitives.custom_jvp_call_p)(_custom)
rule_for(jexc.primitives.custom_vjp_call_p)(_custom)


@rule_for(_compat.custom_vmap_p)
def _custom_vmap(interpret, given, eqn, *args):
    jaxpr = eqn.params["call"]
    if interpret.handler.changes_inside(eqn):
        return interpret(jaxpr)(given, *args)
    _, taken = interpret(without_prints(jaxpr))(given, *args)
    return bind(without_sows(eqn), args), taken
