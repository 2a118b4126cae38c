"""Primitives that run one jaxpr, once. Their equations are kept, with a new jaxpr in
them, so that whatever else they say stays true."""

import jax.extend.core as jexc
import jax.tree_util as jtu

from ... import _compat
from ..interpreter import rule_for


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
