"""Primitives that run one jaxpr, once. Their equations are kept, with a new jaxpr in
them, so that whatever else they say stays true."""

import jax.extend.core as jexc
import jax.tree_util as jtu

from .. import _compat
from .._interpreter import register_rule


def bind(eqn, args, **params):
    params = eqn.primitive.get_bind_params({**eqn.params, **params})
    return eqn.primitive.bind(*args, **params)


def _inputs(closed, given, args):
    """The operands of the new equation, and how many there are before `args`."""
    _, consts = _compat.open_jaxpr(closed)
    before = [*consts, *jtu.tree_leaves(given)]
    return [*before, *args], len(before)


def _consts_as_args(closed):
    jaxpr, consts = _compat.open_jaxpr(closed)
    if not consts:
        # JAX compiles what it has compiled already only if it is another jaxpr.
        return closed
    jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    return _compat.close_jaxpr(jaxpr)


@register_rule(jexc.primitives.jit_p)
def _jit(interpret, given, eqn, *args):
    closed, treedef = interpret.staged(eqn.params["jaxpr"], given, *args)
    inputs, n = _inputs(closed, given, args)
    extra = treedef.num_leaves - len(eqn.outvars)
    new_in, new_out = _compat.unspecified()
    p = eqn.params
    out = bind(
        eqn,
        inputs,
        jaxpr=_consts_as_args(closed),
        **{k: (v,) * n + tuple(p[k]) for k, v in new_in.items()},
        **{k: tuple(p[k]) + (v,) * extra for k, v in new_out.items()},
    )
    return jtu.tree_unflatten(treedef, out)


@register_rule(jexc.primitives.remat_p)
def _checkpoint(interpret, given, eqn, *args):
    closed, treedef = interpret.staged(eqn.params["jaxpr"], given, *args)
    inputs, _ = _inputs(closed, given, args)
    out = bind(eqn, inputs, jaxpr=_compat.open_jaxpr(_consts_as_args(closed))[0])
    return jtu.tree_unflatten(treedef, out)


@register_rule(jexc.primitives.call_p)
@register_rule(jexc.primitives.closed_call_p)
def _call(interpret, given, eqn, *args):
    return interpret(eqn.params["call_jaxpr"])(given, *args)
