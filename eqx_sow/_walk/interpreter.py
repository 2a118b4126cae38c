"""The one walk over a jaxpr.

A `Handler` says what becomes of a mark: `save_intermediates` takes its value, `plant`
replaces it, the rules in `jax_rules.py` guard it. The table `rules` says, for
each higher-order primitive, how to run its jaxprs with the handler inside. Neither
knows of the other, and every equation that has no mark in it stays exactly as it was.
"""

import functools as ft
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jexc
import jax.tree_util as jtu

from .. import _compat
from .._arrays import in_mesh_of, mesh_inside
from .._mark.primitive import sow_p
from .._staging import to_jaxpr
from .frame import Frame, without_donating
from .handler import Given, Handler, refuse_unknown, Taken
from .meshes import carry_outside, entries_outside, given_inside
from .plan import Ask, asked, EMPTY, Placed, Plan
from .rewrite import MARKS, without
from .sows import (
    jaxprs_in,
    kept_with_jaxpr,
    loop_of,
    Mark,
    with_sow,
)


rules: dict[jexc.Primitive, Callable] = {}


def rule_for(primitive: jexc.Primitive) -> Callable[[Callable], Callable]:
    """A decorator for a rule `rule(interpret, given, eqn, *args) -> (outs, taken)`.

    `interpret(jaxpr)` is a function `run(given, *args) -> (outs, taken)` that runs the
    jaxpr, while the handler sees to the marks in there. The rule writes the loop or the
    branches of the equation anew, with `run` in the place of the jaxpr, and passes on
    what `run` returns.
    """

    def register(rule):
        rules[primitive] = rule
        return rule

    return register


def _to_ref(x: Any) -> Any:
    return weakref.ref(x) if _compat.is_jaxpr(x) else x


def _from_ref(x: Any) -> Any:
    return x() if isinstance(x, weakref.ref) else x


def _new_stages() -> Callable:
    """What handlers make of jaxprs: see `Interpret.staged`. It is kept for as long as
    the jaxpr is there, which it does not hold on to."""

    @kept_with_jaxpr
    def of_jaxpr(jaxpr):
        del jaxpr

        @ft.lru_cache(maxsize=16)
        def by(handler, plan, fn, refs):
            def run(given, args):
                held = jax.tree.map(_from_ref, refs)
                return fn(Interpret(handler, of_jaxpr, plan), given, held, *args)

            return to_jaxpr(run)

        return by

    return of_jaxpr


_stages = _new_stages()


def evaluate(
    interpret: "Interpret", given: Given, jaxpr: Any, *args
) -> tuple[list[Any], Taken]:
    """Evaluates a jaxpr, with each mark left to the handler."""
    handler, plan = interpret.handler, interpret.plan
    jaxpr, consts = _compat.open_jaxpr(jaxpr)
    frame = Frame(jaxpr, [*consts, *args])
    found: list[Any] = []
    begin = 0
    for i, eqn in with_sow(jaxpr).items():
        frame.defer(*jaxpr.eqns[begin:i])
        begin = i + 1
        frame.now, frame.eqn = i, eqn
        if eqn.primitive is sow_p:
            asks = () if plan is None else plan.marks.get(i, ())
            given = _sow(handler, found, given, asks, frame)
            continue
        frame.eqn = eqn = without_donating(eqn)
        placed = EMPTY if plan is None else plan.inside.get(i)
        rule = rules.get(eqn.primitive)
        if placed is None or rule is None:
            refuse_unknown(eqn, asked(placed or EMPTY, eqn))
            frame.defer(eqn if handler.has_outer else without(eqn, MARKS))
            continue
        values = frame.read(eqn.invars)
        frame.flush_effects()
        mesh = mesh_inside(eqn)
        with eqn.ctx.manager, frame.in_scope(), in_mesh_of(values):
            inside = Interpret(handler, interpret.stages, plan and placed.plan)
            passed = inside.given(given, placed)
            passed = passed if mesh is None else given_inside(passed, mesh)
            outs, taken = rule(inside, passed, eqn, *values)
        if mesh is not None:
            taken = _outside(taken, given, frame)
        elif taken.carry:
            # A compiled equation may leave a count on the mesh of a part of it.
            taken = taken._replace(carry=carry_outside(taken.carry, given.carry))
        frame.set(eqn.outvars, outs)
        loop = loop_of(eqn)
        step = i, loop.reverse if loop else None
        slots = placed.slots
        found += [e.with_slot(slots[e.slot], step) for e in taken.entries]
        given = given._replace(carry=taken.carry)
    frame.defer(*jaxpr.eqns[begin:])
    frame.now = len(jaxpr.eqns)
    entries = handler.end_jaxpr(found, frame)
    outs = frame.read_arrays(jaxpr.outvars)
    frame.flush_effects()
    return outs, Taken(given.carry, entries)


def _sow(
    handler: Handler,
    found: list[Any],
    given: Given,
    asks: tuple[Ask, ...],
    frame: Frame,
) -> Given:
    """Leaves the mark `frame.eqn` to the handler, on the mesh of the mark."""
    eqn = frame.eqn
    _, *atoms = eqn.invars
    site, mesh = eqn.params["site"], mesh_inside(eqn)
    if mesh is None:
        return handler.sow(found, given, site, asks, atoms, frame)
    frame.read(atoms)
    new: list[Any] = []
    with eqn.ctx.manager:
        on_mesh = given_inside(given, mesh)
        after = handler.sow(new, on_mesh, site, asks, atoms, frame)
        taken = Taken(after.carry, handler.end_jaxpr(new, frame))
    taken = _outside(taken, given, frame)
    found += taken.entries
    return given._replace(carry=taken.carry)


def _outside(taken: Taken, given: Given, frame: Frame) -> Taken:
    """What came out of the equation `frame.eqn`, on the mesh around."""
    return Taken(
        carry_outside(taken.carry, given.carry),
        entries_outside(taken.entries, frame.jaxpr, frame.eqn),
    )


def renamed(taken: Taken, placed: Placed) -> Taken:
    """What is taken inside, with its slots as they are called around."""
    entries = tuple(e.with_slot(placed.slots[e.slot]) for e in taken.entries)
    return taken._replace(entries=entries)


class Interpret:
    """`interpret(jaxpr, k)(given, *args) -> (outs, taken)`, where `k` is the number of
    the jaxpr in the equation.

    `plan` is that of the equation, or for `evaluate`, of the jaxpr. Without one, the
    handler sees to every mark."""

    def __init__(
        self, handler: Handler, stages: Callable | None = None, plan: Plan | None = None
    ):
        self.handler = handler
        self.plan = plan
        kept = handler.cacheable or _compat.is_eager()
        self.stages = stages or (_stages if kept else _new_stages())

    def __call__(self, jaxpr: Any, k: int = 0) -> Callable:
        def run(given, *args):
            closed, inputs, treedef = self.staged(jaxpr, k, given, *args)
            return jtu.tree_unflatten(treedef, _compat.inline_or_call(closed, inputs))

        return run

    def asked(self, jaxpr: Any, k: int = 0) -> list[tuple[Mark, Ask]]:
        """What is asked at the marks in jaxpr `k` of the equation."""
        return asked(self._placed(k), jaxpr)

    def given(self, given: Given, placed: Placed) -> Given:
        """What is passed down to what is inside, of which this is the plan."""
        values = self.handler.values_inside(given.values, placed.slots)
        return given._replace(values=values)

    def _placed(self, k: int) -> Placed:
        return EMPTY if self.plan is None else self.plan.inside.get(k, EMPTY)

    def apply(self, fn: Callable, held: Any, given: Given, *args) -> Any:
        """`fn(interpret, given, held, *args)`, by way of a jaxpr: see `staged`."""
        closed, inputs, treedef = self._staged(fn, held, self.plan, given, args)
        return jtu.tree_unflatten(treedef, _compat.inline_or_call(closed, inputs))

    def staged(
        self, jaxpr: Any, k: int, given: Given, *args
    ) -> tuple[Any, list[Any], Any]:
        """For rules that keep an equation and put another jaxpr into it: what the
        handler makes of a jaxpr, without constants; the inputs of that, the last of
        which are `args`; and the treedef of what `apply` would return.

        A jaxpr that occurs many times is walked once by each handler and plan, and what
        that makes of it is the same jaxpr each time, which JAX compiles once.
        """
        placed = self._placed(k)
        plan, given = self.plan and placed.plan, self.given(given, placed)
        closed, inputs, treedef = self._staged(evaluate, jaxpr, plan, given, args)
        outs, taken = jtu.tree_unflatten(treedef, range(treedef.num_leaves))
        return closed, inputs, jtu.tree_structure((outs, renamed(taken, placed)))

    def _staged(
        self, fn: Callable, held: Any, plan: Plan | None, given: Given, args: Any
    ) -> tuple[Any, list[Any], Any]:
        """What `fn(interpret, given, held, *args)` computes, as a jaxpr: see `staged`.
        `held` is a jaxpr, or whatever is hashable and has jaxprs inside."""
        by = self.stages(next(jaxprs_in(held)))
        refs = jax.tree.map(_to_ref, held)
        closed, treedef = by(self.handler, plan, fn, refs)(given, args)
        _, consts = _compat.open_jaxpr(closed)
        inputs = [*consts, *jtu.tree_leaves((given, args))]
        return consts_as_args(closed), inputs, treedef


def consts_as_args(closed: Any) -> Any:
    """A closed jaxpr of which the constants are the first operands."""
    jaxpr, consts = _compat.open_jaxpr(closed)
    return with_operands(jaxpr, tuple(jaxpr.constvars)) if consts else closed


@kept_with_jaxpr
def with_operands(jaxpr: Any, more: tuple[Any, ...]) -> Any:
    """An open jaxpr, closed. Its first operands are these variables, among which are
    those of its constants."""
    invars = [*more, *jaxpr.invars]
    return jexc.ClosedJaxpr(jaxpr.replace(constvars=[], invars=invars), ())
