"""Primitives that run one jaxpr, once.

The equation of a jitted function or a checkpoint is kept, with a new jaxpr in it, so
that whatever else it says stays true.

Functions with a derivative or a batching rule of their own are walked like plain ones,
for the sows. The original equation gives the derivatives of the outputs (or, for a
batching rule, the outputs themselves), so the rules are kept; XLA removes it unless it
is differentiated. If something is planted inside, the rules are those of another
function, and are given up.
"""

from typing import Any

import jax
import jax.extend.core as jexc
import jax.extend.linear_util as lu
import jax.numpy as jnp
import jax.tree_util as jtu

from ... import _compat
from ..._mark.listening import listening
from ..._mark.primitive import sow_effect
from ..._mark.staging import types_of
from ..handler import refuse
from ..interpreter import rule_for
from ..sows import eqn_without_sows, expanded, sites, without_prints, without_sows


def bind(eqn, args, **params):
    params = eqn.primitive.get_bind_params({**eqn.params, **params})
    return list(map(_compat.as_array, eqn.primitive.bind(*args, **params)))


@rule_for(jexc.primitives.jit_p)
def _jit(interpret, given, eqn, *args):
    closed, inputs, treedef = interpret.staged(eqn.params["jaxpr"], given, *args)
    n = len(inputs) - len(args)
    extra = treedef.num_leaves - len(eqn.outvars)
    new_in, new_out = _compat.unspecified()
    p = eqn.params
    out = bind(
        eqn,
        inputs,
        jaxpr=closed,
        **{k: (v,) * n + tuple(p[k]) for k, v in new_in.items()},
        **{k: tuple(p[k]) + (v,) * extra for k, v in new_out.items()},
    )
    return jtu.tree_unflatten(treedef, out)


@rule_for(jexc.primitives.remat_p)
def _checkpoint(interpret, given, eqn, *args):
    closed, inputs, treedef = interpret.staged(eqn.params["jaxpr"], given, *args)
    out = bind(eqn, inputs, jaxpr=_compat.open_jaxpr(closed)[0])
    return jtu.tree_unflatten(treedef, out)


@rule_for(jexc.primitives.call_p)
@rule_for(jexc.primitives.closed_call_p)
def _call(interpret, given, eqn, *args):
    return interpret(eqn.params["call_jaxpr"])(given, *args)


# --- functions with rules of their own ---
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


def _inside(interpret, given, eqn, jaxpr, args, join=_derivative_of):
    """Walks over `jaxpr`, a copy of the function in the equation, for the sows, and
    binds the equation too. `join` makes one output from that of the copy and that of
    the equation."""
    if interpret.handler.changes_inside(eqn):
        return interpret(jaxpr)(given, *args)
    # Both run, and only the original prints.
    copy = without_prints(jaxpr)
    # An effect that cannot be left out, such as an `io_callback` with a result.
    if any(e != sow_effect for e in copy.effects):
        return _only_the_original(interpret, given, eqn, copy, args)
    inputs = args
    if not interpret.handler.differentiable:
        # What `tap` sends is an effect, so that JAX would keep the derivative of the
        # copy, which nobody uses.
        inputs = map(jax.lax.stop_gradient, args)
    outs, taken = interpret(copy)(given, *inputs)
    original = bind(_without_sows(eqn), args)
    return list(map(join, outs, original)), taken


def _only_the_original(interpret, given, eqn, copy, args):
    handler = interpret.handler
    why = "the function has an effect, as an `io_callback`, that would happen twice"
    refuse(handler, eqn, sites(eqn), why, "Sow its result outside.")
    seen = types_of(interpret(copy), given, *args)[1]
    kept = eqn if handler.has_outer else _without_sows(eqn)
    return bind(kept, args), seen._replace(carry=given.carry)


@lu.transformation2
def _quiet(rule, *zeros):
    jaxpr, *rest = rule(*zeros)
    if listening.value is None:
        jaxpr = without_sows(jaxpr)
    return jaxpr, *rest


def _without_sows(eqn):
    """The equation without sows, in its derivative rule too, where JAX would keep them
    though nothing asks for them."""
    rules = {
        name: _quiet(eqn.params[name])
        for name in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk")
        if name in eqn.params
    }
    eqn = eqn_without_sows(eqn)
    return eqn.replace(params={**eqn.params, **rules})


@rule_for(jexc.primitives.custom_jvp_call_p)
@rule_for(jexc.primitives.custom_vjp_call_p)
def _custom(interpret, given, eqn, *args):
    return _inside(interpret, given, eqn, eqn.params["call_jaxpr"], args)


# `None`, which no primitive is, if there is none.
@rule_for(_compat.hi_p)
def _custom_hi(interpret, given, eqn, *args):
    return _inside(interpret, given, eqn, expanded(eqn), args)


@rule_for(_compat.custom_vmap_p)
def _custom_vmap(interpret, given, eqn, *args):
    of_original = lambda _, out: out
    return _inside(interpret, given, eqn, eqn.params["call"], args, of_original)
