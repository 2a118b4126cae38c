"""The one walk over a jaxpr.

A `Handler` says what becomes of a sow: `save_intermediates` takes its value, `plant`
replaces it, the rules in `jax_rules.py` guard it. The table `rules` says, for
each higher-order primitive, how to run its jaxprs with the handler inside. Neither
knows of the other, and every equation that has no sow in it stays exactly as it was.
"""

import functools as ft
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jexc
import jax.tree_util as jtu

from .. import _compat
from .._arrays import in_mesh_of
from .._mark.primitive import sow_p
from .._mark.staging import to_jaxpr
from .frame import Frame, without_donating
from .handler import Given, Handler, refuse_unknown, Taken
from .sows import with_sow, without_sows


rules: dict[jexc.Primitive, Callable] = {}


def rule_for(primitive: jexc.Primitive) -> Callable[[Callable], Callable]:
    """A decorator for a rule `rule(interpret, given, eqn, *args) -> (outs, taken)`.

    `interpret(jaxpr)` is a function `run(given, *args) -> (outs, taken)` that runs the
    jaxpr, while the handler sees to the sows in there. The rule writes the loop or the
    branches of the equation anew, with `run` in the place of the jaxpr, and passes on
    what `run` returns.
    """

    def register(rule):
        rules[primitive] = rule
        return rule

    return register


# For each jaxpr, a function of a handler that returns what that makes of it. So a jaxpr
# that occurs many times is walked once by each handler. The results are kept for as
# long as the jaxpr is.
Stages = weakref.WeakKeyDictionary[Any, Callable]
_stages: Stages = weakref.WeakKeyDictionary()


class Interpret:
    """`interpret(jaxpr)(given, *args) -> (outs, taken)`."""

    def __init__(self, handler: Handler, stages: Stages = _stages):
        self.handler = handler
        self._stages = stages

    def __call__(self, jaxpr: Any) -> Callable:
        def run(given, *args):
            closed, inputs, treedef = self.staged(jaxpr, given, *args)
            out = _compat.inline_or_call(closed, inputs)
            return jtu.tree_unflatten(treedef, out)

        return run

    def staged(self, jaxpr: Any, given: Given, *args) -> tuple[Any, list[Any], Any]:
        """For rules that keep an equation and put another jaxpr into it: what the
        handler makes of a jaxpr, without constants; the inputs of that, the last of
        which are `args`; and the treedef of what `run` would return."""
        if jaxpr not in self._stages:
            self._stages[jaxpr] = _stage(weakref.ref(jaxpr), self._stages)
        closed, treedef = self._stages[jaxpr](self.handler)(given, args)
        _, consts = _compat.open_jaxpr(closed)
        inputs = [*consts, *jtu.tree_leaves((given, args))]
        return consts_as_args(closed), inputs, treedef


def _stage(jaxpr: weakref.ref, stages: Stages) -> Callable:
    @ft.lru_cache(maxsize=16)
    def by(handler):
        def evaluate_jaxpr(given, args):
            opened, consts = _compat.open_jaxpr(jaxpr())
            return evaluate(opened, consts, handler, given, args, stages)

        return to_jaxpr(evaluate_jaxpr)

    return by


# The same jaxpr each time, so that JAX compiles it once.
_closed: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def consts_as_args(closed: Any) -> Any:
    """A closed jaxpr of which the constants are the first operands."""
    jaxpr, consts = _compat.open_jaxpr(closed)
    if not consts:
        return closed
    if jaxpr not in _closed:
        invars = [*jaxpr.constvars, *jaxpr.invars]
        opened = jaxpr.replace(constvars=[], invars=invars)
        _closed[jaxpr] = jexc.ClosedJaxpr(opened, ())
    return _closed[jaxpr]


def evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    handler: Handler,
    given: Given,
    args,
    stages: Stages | None = None,
) -> tuple[list[Any], Taken]:
    """Evaluates an open jaxpr, with each sow left to the handler."""
    if stages is None:
        kept = handler.cacheable or _compat.is_eager()
        stages = _stages if kept else weakref.WeakKeyDictionary()
    frame = Frame(jaxpr, [*consts, *args])
    found: list[Any] = []
    begin = 0
    for i, eqn in with_sow(jaxpr).items():
        frame.defer(*jaxpr.eqns[begin:i])
        begin = i + 1
        frame.now, frame.eqn = i, eqn
        if eqn.primitive is sow_p:
            _, *atoms = eqn.invars
            given = handler.sow(found, given, eqn.params["site"], atoms, frame)
            continue
        frame.eqn = eqn = without_donating(eqn)
        if handler.keeps_intact(eqn):
            frame.defer(eqn)
            continue
        rule = rules.get(eqn.primitive)
        if rule is None:
            refuse_unknown(handler, eqn)
            frame.defer(eqn if handler.has_outer else without_sows(eqn))
            continue
        values = frame.read(eqn.invars)
        frame.flush_effects()
        with eqn.ctx.manager, in_mesh_of(values):
            outs, taken = rule(
                Interpret(handler.for_inside(eqn), stages), given, eqn, *values
            )
        frame.set(eqn.outvars, outs)
        rest = handler.leave_equation(taken.values, frame)
        found.append(taken._replace(values=rest))
        given = given._replace(carry=taken.carry)
    frame.defer(*jaxpr.eqns[begin:])
    frame.now = len(jaxpr.eqns)
    taken = handler.end_jaxpr(found, given, frame)
    outs = frame.read_arrays(jaxpr.outvars)
    frame.flush_effects()
    return outs, taken
