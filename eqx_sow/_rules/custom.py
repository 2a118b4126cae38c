"""Functions with derivative or batching rules of their own.

The original equation gives the outputs, and so keeps its rules; the sows inside are
evaluated beside it. XLA merges what is then computed twice.
"""

import jax.extend.core as jexc

from .. import _compat
from .._interpreter import Given, Handler, Interpret, opaque, register_rule
from .calls import _bind


class Strip(Handler):
    """Takes the sows out."""

    def sow(self, found, given, site, atoms, frame):
        del found, site
        frame.alias(atoms)
        return given

    def __eq__(self, other):
        return type(other) is Strip

    def __hash__(self):
        return hash(Strip)


def _without_sows(jaxpr, args):
    closed, _ = Interpret(Strip()).staged(jaxpr, Given(), *args)
    return closed


def _custom(name):
    def rule(interpret, given, eqn, *args):
        jaxpr = eqn.params[name]
        if interpret.handler.changes(eqn):
            # The rules are those of another function.
            return interpret(jaxpr)(given, *args)
        outs = _bind(eqn, args, **{name: _without_sows(jaxpr, args)})
        _, taken = interpret(jaxpr)(given, *args)
        return outs, taken

    return rule


register_rule(jexc.primitives.custom_jvp_call_p)(_custom("call_jaxpr"))
register_rule(jexc.primitives.custom_vjp_call_p)(_custom("call_jaxpr"))
register_rule(_compat.custom_vmap_p)(_custom("call"))
opaque.add(_compat.noinline_p)
