"""The rules of JAX's that eqx_sow wraps. There are few, and only here.

For a scan, a while or a cond with a sow inside, some of JAX's rules move equations to
places where it is no longer known where they came from:

- `vmap` of a loop puts the new axis inside the loop's. A sow has to know how many
  loops are around the axis.
- `vmap` of a cond whose predicate varies runs all branches, and `vmap` of a while runs
  until the last lane has finished. A sow has to know whether it really runs.
- differentiation moves what does not depend on the iteration out of a scan. A sow has
  to stay.
- differentiation drops the tangent part of a cond or a checkpoint if none of its
  outputs is used.

So these rules prepare the equation, or mend what comes out, and leave the work to JAX's
rule. Outside a capture they are not even called.
"""

import contextlib
import dataclasses as dc
import functools as ft
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax.core
import jax.extend.core as jexc
import jax.extend.linear_util as lu
from jax.extend import source_info_util
from jax.extend.core import primitives as prims
from jax.interpreters import ad, batching, partial_eval as pe

from .. import _compat, _hijax
from .._errors import SowError
from .._mark.listening import around, listening
from .._mark.noting import listening_as
from .._mark.primitive import computed_again, sow_p, widened
from .._mark.site import Guard
from . import rules as _rules
from .handler import Given, Handler
from .interpreter import Interpret, rules
from .rewrite import PRINTS, without
from .sows import (
    has_sow,
    is_lanewise,
    jaxprs_in,
    KEPT_IN_LOOP,
    kept_with_jaxpr,
    map_jaxprs,
    shows_sow,
)


_wrapped: list[tuple[dict, jexc.Primitive, Callable]] = []


def _wrap(table: dict, primitive: jexc.Primitive, always: bool = False) -> Callable:
    """A decorator of a function that is called, during a capture or `always`, in the
    place of the rule for this primitive in one of JAX's tables: with that rule, and its
    arguments."""

    def decorate(wrapper):
        what = f"the rule for `{primitive}` that {wrapper.__name__} wraps"
        rule: Any = _compat.find(what, lambda: table[primitive])

        def chosen(*args, **kwargs):
            if listening.value is None and not always:
                return rule(*args, **kwargs)
            return wrapper(rule, *args, **kwargs)

        chosen.__wrapped__ = rule
        table[primitive] = chosen
        _wrapped.append((table, primitive, chosen))
        return wrapper

    return decorate


def check_wrapped() -> None:
    """Raises if another library has put rules in the place of ours."""
    for table, primitive, chosen in _wrapped:
        if table.get(primitive) is not chosen:
            raise SowError(
                f"Another library has replaced JAX's rule for `{primitive}`, which "
                "eqx_sow needs to see. Import eqx_sow after that library."
            )


def _listening_with(**changes: Any) -> Any:
    """A context in which JAX's rules, and its caches, find these in `listening`."""
    return listening(listening.value._replace(**changes))


# --- custom derivative rules ---
@lu.transformation2
def _listening_as_at_call(rule, at_call, scope, *args):
    with listening_as(at_call), scope():
        return rule(*args)


@dc.dataclass(frozen=True)
class _InScope:
    """Makes contexts in which names begin with this scope."""

    scope: str

    def __call__(self):
        now = listening.value
        if now is None:
            return contextlib.nullcontext()
        return listening(now._replace(scope=self.scope))


@lu.transformation2
def _in_context(bwd, context, *args):
    with context():
        return bwd(*args)


def _keep_listening(primitive: jexc.Primitive, scope: Callable) -> None:
    """Whoever calls a function with a derivative rule of its own while sows are marked
    wants those of the rule, too. JAX traces the rule when it is first needed, which may
    be after the capture, and keeps the jaxpr with the equation. So the rule is traced
    as if that happened at the call of the function, and in a `scope`.

    A `bwd` is traced by whoever differentiates. It only takes the names from the call:
    they begin with the scopes around that."""
    bind = primitive.bind

    def bind_listening(*args, **params):
        at_call = listening.value
        if at_call is not None:
            fn, rule, *bwd = params["subfuns"]
            here = at_call._replace(n_loops=0, moving=False)
            rule = _listening_as_at_call(rule, here, scope)
            if at_call.scope:
                bwd = [_in_context(f, _InScope(at_call.scope)) for f in bwd]
            params = {**params, "subfuns": (fn, rule, *bwd)}
        return bind(*args, **params)

    primitive.bind = bind_listening


_keep_listening(prims.custom_jvp_call_p, _compat.derivative_rule)
_keep_listening(prims.custom_vjp_call_p, contextlib.nullcontext)


# --- JAX's next primitives ---
if _hijax.hi_p is not None:
    _bind_hi = _hijax.hi_p.bind

    def _bind_classic(*args, _prim):
        """A checkpoint that was traced while listening is what it is without
        `JAX_REMAT3`: bound so before JAX batches or differentiates it. All others call
        their rules later, and take the names from here."""
        here = listening.value
        classic = None if here is None else _hijax.classic_form(_prim)
        if classic is None:
            if here is not None and here.scope:
                _prim = _hijax.hi_within(_prim, _InScope(here.scope))
            return _bind_hi(*args, _prim=_prim)
        primitive, params = classic
        outs = primitive.bind(*args, **params)
        return outs if primitive.multiple_results else [outs]

    _hijax.hi_p.bind = _bind_classic

    @_wrap(batching.fancy_primitive_batchers, _hijax.hi_p)
    def _batch_hi(rule, axis_data, args, dims, *, _prim):
        if _hijax.is_users(_prim):
            return rule(axis_data, args, dims, _prim=_prim)
        # JAX batches the derivative rules among the parameters when they are called,
        # with a `jax.vmap` of its own. That has to know what is around this one.
        around_vmap = around(axis_data)

        def telling(x):
            if isinstance(x, tuple):
                return tuple(map(telling, x))
            return _telling_vmap(x, around_vmap) if inspect.isfunction(x) else x

        _prim = _hijax.hi_with_params(_prim, telling)
        return rule(axis_data, args, dims, _prim=_prim)


def _telling_vmap(rule, around_vmap):
    @ft.wraps(rule)
    def call(*args):
        if listening.value is not None:
            trace = _compat.current_trace()
            trace.axis_data = _compat.with_around(trace.axis_data, around_vmap)
        return rule(*args)

    return call


# --- vmap ---
@dc.dataclass(frozen=True)
class AddGuard(Handler):
    """Gives each sow one more guard, with the operand `Given.values` that says whether
    the sow runs. With the index `i` of a cond, of which a vmap runs both branches:

        b = sow[name=h] e a    ->    _, b = sow[name=h, guards=(Guard(...),)] e i a
    """

    guard: Guard
    has_outer: bool = True

    def sow(self, found, given, site, asks, atoms, frame):
        del found, asks
        n = len(site.guards)
        operands = frame.read(atoms)
        none = (False,) * len(site.axes)
        site = site._replace(
            guards=(*site.guards, self.guard),
            varies=(*site.varies[:n], none, *site.varies[n:]),
            permutations=(*site.permutations[:n], (), *site.permutations[n:]),
        )
        (edge,) = frame.read(frame.eqn.invars[:1])
        edge, *outs = sow_p.bind(
            edge, *operands[:n], given.values, *operands[n:], site=site
        )
        frame.set(frame.eqn.outvars, [edge, *outs[:n], *outs[n + 1 :]])
        return given


def _within(axis_data, *conds, n_loops=0):
    """What JAX's rules are told of a mapped axis, with more conds and loops between the
    vmap and what they batch."""
    outside = around(axis_data)
    inside = outside._replace(
        n_loops=outside.n_loops + n_loops, conds=(*outside.conds, *conds)
    )
    return _compat.with_around(axis_data, inside)


# A cond whose branches have no guards. One for all, so that JAX's caches know it.
_NO_COND = object()


def _batched(rule, axis_data, args, dims, params):
    """What JAX's batching rule for a loop binds, as a jaxpr, and where the axes are;
    sows in there count one more loop."""
    dims_out = []
    inside = _within(axis_data, n_loops=1)
    # Where the loop was called, which a trace of its own does not know.
    called = source_info_util.current().traceback

    def batched(*args):
        with source_info_util.user_context(called):
            outs, dims_out[:] = rule(inside, args, dims, **params)
        return outs

    with _listening_with(n_loops=around(inside).n_loops):
        closed = jax.make_jaxpr(batched)(*args)
    return closed, dims_out


@_wrap(batching.fancy_primitive_batchers, prims.scan_p)
def _batch_scan(rule, axis_data, args, dims, **params):
    if not shows_sow(params["jaxpr"]):
        # There may be some in a custom derivative rule: those cannot be seen yet.
        return rule(_within(axis_data, n_loops=1), args, dims, **params)
    closed, dims_out = _batched(rule, axis_data, args, dims, params)
    return jexc.jaxpr_as_fun(closed)(*args), dims_out


@_wrap(batching.fancy_primitive_batchers, prims.while_p)
def _batch_while(rule, axis_data, args, dims, **params):
    body, cond = params["body_jaxpr"], params["cond_jaxpr"]
    closed, dims_out = _batched(rule, axis_data, args, dims, params)
    loop = closed.eqns[-1]
    varies = loop.params["cond_jaxpr"].out_avals[0].shape
    # If the predicate had an axis before, an earlier vmap has put guards there.
    if varies and not cond.out_avals[0].shape:
        if has_sow(body):
            args, dims, params = _guarded(axis_data, args, dims, params)
        axis_data = _within(axis_data, None)
        closed, dims_out = _batched(rule, axis_data, args, dims, params)
    n = len(body.out_avals)
    return jexc.jaxpr_as_fun(closed)(*args)[-n:], dims_out[-n:]


def _guarded(axis_data, args, dims, params):
    """The same while loop, with the sows in its body told whether they run: what it
    takes, where the axes of the lanes are, and its parameters."""
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    n = params["cond_nconsts"]
    m = n + params["body_nconsts"]
    going = jexc.jaxpr_as_fun(without(cond, PRINTS))
    run = Interpret(AddGuard(Guard()))(body)
    told = lambda mask, *args: run(Given(values=mask), *args)[0]
    carries = not cond.effects and is_lanewise(cond)
    make = _carrying_predicate if carries else _evaluating_twice
    guarded, carry = make(going, told, n, m), body.in_avals[m - n :]
    if carries:
        carry = [*cond.out_avals, *carry]
    avals = *cond.in_avals[:n], *body.in_avals[: m - n], *carry
    body = jax.make_jaxpr(guarded)(*avals)
    # In front of its own constants, the body takes those of the predicate.
    params = {**params, "body_jaxpr": body, "body_nconsts": m}
    if not carries:
        return [*args[:n], *args], [*dims[:n], *dims], params
    over = [*dims[:n], *dims[m:]]
    mapped = any(d is not None for d in over)
    if mapped:
        going = jax.vmap(
            going,
            in_axes=over,
            axis_name=axis_data.name,
            axis_size=axis_data.size,
            spmd_axis_name=axis_data.spmd_name,
        )
    (mask,) = going(*args[:n], *args[m:])
    cond = jax.make_jaxpr(lambda mask, *_: mask)(*carry)
    params = {**params, "cond_jaxpr": cond, "cond_nconsts": 0}
    args = [*args[:m], mask, *args[m:]]
    return args, [*dims[:m], 0 if mapped else None, *dims[m:]], params


def _evaluating_twice(going, told, n, m):
    """A body that evaluates the predicate once more, for the sows in it."""

    def guarded(*args):
        (mask,) = going(*args[:n], *args[m:])
        return told(mask, *args[n:])

    return guarded


def _carrying_predicate(going, told, n, m):
    """A body that carries the predicate in front of all else, if each lane is sure to
    have one of its own. So it is evaluated once in each iteration; JAX does so twice
    under a vmap, to know whether to go on, and in which lanes."""

    def guarded(*args):
        mask, *carry = args[m:]
        outs = told(mask, *args[n:m], *carry)
        # As under JAX's rule, the predicate sees a lane that has finished as it was.
        new = [jax.lax.select_n(mask, x, y) for x, y in zip(carry, outs)]
        return [*going(*args[:n], *new), *outs]

    return guarded


@_wrap(batching.fancy_primitive_batchers, prims.cond_p)
def _batch_cond(rule, axis_data, args, dims, *, branches, **params):
    # If the index varies, JAX's rule runs all branches, and selects:
    #
    #     y = cond[branches=(f, g)] i x    ->    y = select_n i f(x) g(x)
    #
    # So each sow in `f` gets the guard that `i` is 0, and each one in `g` that it is 1.
    if dims[0] is None:
        return rule(axis_data, args, dims, branches=branches, **params)
    if not any(map(shows_sow, branches)):
        axis_data = _within(axis_data, _NO_COND)
        return rule(axis_data, args, dims, branches=branches, **params)
    index, *operands = args
    cond = object()
    of_one = jexc.mapped_aval(axis_data.size, dims[0], jax.typeof(index))

    def guarded(i):
        run = Interpret(AddGuard(Guard(cond, i, len(branches))))(branches[i])

        def branch(index, *operands):
            return run(Given(values=index), *operands)[0]

        return jax.make_jaxpr(branch)(of_one, *branches[i].in_avals)

    return rule(
        _within(axis_data, cond),
        (index, index, *operands),
        (dims[0], *dims),
        branches=tuple(map(guarded, range(len(branches)))),
        **params,
    )


# --- differentiation ---
# JAX linearizes a checkpoint by its rule for tangents, and does not tell this rule
# whether they will be transposed. See `_differentiated` in `_mark/primitive.py`.
_compat.primitive_linearizations.setdefault(
    prims.remat_p, ft.partial(_compat.linearize_by_tangents, prims.remat_p)
)


@_wrap(_compat.primitive_linearizations, prims.remat_p)
def _linearize_checkpoint(rule, is_vjp, *args, **params):
    with _listening_with(is_vjp=bool(is_vjp)):
        return rule(is_vjp, *args, **params)


@_wrap(pe.partial_eval_jaxpr_custom_rules, prims.while_p)
def _checkpoint_while(rule, *args):
    with _listening_with(in_while=True), _nothing_saved():
        return rule(*args)


@contextlib.contextmanager
def _nothing_saved():
    """JAX saves what an equation with an effect returns, if it has no rule for it, such
    as for a call of a `jax.custom_jvp` function with a mark inside. A `while_loop` has
    no room for that. So here they have a rule."""
    table = pe.partial_eval_jaxpr_custom_rules
    new = [p for p in rules if p is not None and p not in table]
    table.update(dict.fromkeys(new, computed_again))
    try:
        yield
    finally:
        for primitive in new:
            table.pop(primitive, None)


@kept_with_jaxpr
def _returning_operand(jaxpr: Any, i: int) -> Any:
    """A jaxpr that returns its operand `i` as well."""
    outvars = [*jaxpr.outvars, jaxpr.invars[i]]
    return _compat.with_changes(jaxpr, outvars=outvars)


def _keep_tangents(primitive: jexc.Primitive, first: int) -> None:
    """JAX's rule splits an equation in two, and drops the one for the tangents if none
    of its outputs is used. If there is a sow in it, it must stay: so we add an output,
    one of its own operands, and hold on to that. An example is

        best = jax.checkpoint(lambda x: jnp.argmax(sow(jnp.sin(x), "h")))

    An index has no tangent, so what `best` makes of tangents has no output, but there
    is the sow of the tangent of `h` in it, whose cotangent is zero.
    """

    @_wrap(pe.custom_partial_eval_rules, primitive)
    def _partial_eval(rule, trace, /, *tracers, **params):
        unknown = [not t.is_known() for t in tracers[first:]]
        if not (any(unknown) and any(map(shows_sow, jaxprs_in(params)))):
            return rule(trace, *tracers, **params)
        i = unknown.index(True)
        params = map_jaxprs(params, lambda jaxpr: _returning_operand(jaxpr, i))
        *outs, tangent = rule(trace, *tracers, **params)
        if shows_sow(tangent.recipe):
            trace.effect_handles.append(tangent)
        return outs


_keep_tangents(prims.cond_p, first=1)
_keep_tangents(prims.remat_p, first=0)


# --- sows stay in their loops ---
#
# When JAX differentiates a scan, it evaluates the body before the loop, in a trace of
# partial evaluation: what is known there, because it is computed from constants of the
# loop alone, is moved out. Whatever comes out of a sow is unknown:
#
#     scan[              ->   b = sin w
#       b = sin w             scan[
#       c = sow b               c = sow b
#       ... c ...               ... c ...
#     ] w                     ] b
#
# So is whatever comes out of an equation with a sow inside, such as a cond. Only what
# JAX splits into a known and an unknown part, such as a jitted function, is split here,
# too, by the same rules.
#
# While the rule of a scan runs, `_moving.to` is the trace to which it moves things, the
# parent of the trace of partial evaluation. Those with other parents are of derivatives
# in the body. But inside what is split, they all move something out.
class _Moving(threading.local):
    to: Any = None


_moving = _Moving()


def _moves(trace: Any) -> bool:
    """Whether what is known in this trace is moved out of a scan."""
    here = listening.value
    # Only a trace of partial evaluation has the method.
    if here is None or not hasattr(trace, "instantiate_const"):
        return False
    return here.moving or trace.parent_trace is _moving.to


def _moves_to_here(rule: Callable, *args, **params):
    before, _moving.to = _moving.to, _compat.current_trace()
    try:
        return rule(*args, **params)
    finally:
        _moving.to = before


_wrap(_compat.primitive_linearizations, prims.scan_p)(_moves_to_here)
_wrap(pe.custom_partial_eval_rules, prims.scan_p)(_moves_to_here)


def _as_jit(fn: Callable, avals: Sequence[Any]) -> Any:
    """A call of a function, as the equation of a jitted one."""

    def call(*args):
        return fn(*args)

    call.__name__ = KEPT_IN_LOOP
    (eqn,) = jax.make_jaxpr(jax.jit(call))(*avals).eqns
    return eqn


@_wrap(pe.partial_eval_jaxpr_custom_rules, prims.scan_p)
def _checkpoint_scan(rule, *args):
    # The rule traces the known part anew, in a trace that does not know where the scan
    # was called.
    called = args[-1].source_info.traceback
    with _listening_with(moving=True), source_info_util.user_context(called):
        known, *rest = rule(*args)
    if shows_sow(known):
        # The call of a jaxpr, in which JAX up to 0.10 would lose the effects.
        call = jexc.jaxpr_as_fun(known.params["call_jaxpr"])
        eqn = _as_jit(call, [v.aval for v in known.invars])
        known = known.replace(primitive=eqn.primitive, params=eqn.params)
    return known, *rest


_SPLIT = prims.scan_p, prims.jit_p, prims.closed_call_p


def _keep_in_loop(primitive: jexc.Primitive) -> None:
    """For a primitive that may have a sow inside. Some of them have no rule for partial
    evaluation: JAX's traces have methods."""
    bind = primitive.bind

    def bind_in_loop(*args, **params):
        # Where nothing moves, this costs as little as it can.
        here = listening.value
        if here is None:
            return bind(*args, **params)
        before, widened.here = widened.here, False
        try:
            if here.moving or _moving.to is not None:
                return in_loop(*args, **params)
            return bind(*args, **params)
        finally:
            if widened.ever:
                widened.since(before, jaxprs_in(params))

    def in_loop(*args, **params):
        if not _moves(trace := _compat.current_trace()):
            return bind(*args, **params)
        # One more operand, so that not even a function of nothing is known.
        tracers = list(map(trace.to_jaxpr_tracer, (0, *args)))
        known = all(x.is_known() for x in tracers)
        # Of a `shard_map` of what is known, a part with only sows would be dropped.
        if primitive in _SPLIT or (primitive is _compat.shard_map_p and not known):
            with _listening_with(moving=True):
                return bind(*args, **params)
        tracers = list(map(trace.instantiate_const, tracers))
        call = lambda _, *args: list(bind(*args, **params))
        eqn = _as_jit(call, [x.aval for x in tracers])
        if not shows_sow(eqn):
            return bind(*args, **params)
        return trace.default_process_primitive(eqn.primitive, tracers, eqn.params)

    primitive.bind = bind_in_loop


for _primitive in filter(None, rules):
    _keep_in_loop(_primitive)


def _partial_eval_sow(trace, *tracers, site):
    if _moves(trace):
        tracers = map(trace.instantiate_const, tracers)
    return trace.default_process_primitive(sow_p, tracers, dict(site=site))


pe.custom_partial_eval_rules[sow_p] = _partial_eval_sow


if _compat.fancy_transposes:
    _wrap(_compat.fancy_transposes, prims.scan_p)(_compat.with_zeros)


# Outside a capture, too: what was captured may be differentiated.
@_wrap(ad.primitive_transposes, prims.while_p, always=True)
def _transpose_while(rule, *args, **params):
    try:
        return rule(*args, **params)
    except ValueError as e:  # that a `while_loop` has no reverse mode
        jaxpr, _ = _compat.open_jaxpr(params["body_jaxpr"])
        if str(_rules.__file__) in jaxpr.debug_info.func_src_info:
            e.add_note(_NO_REVERSE_MODE)
        raise


_NO_REVERSE_MODE = (
    "eqx_sow: there is a mark in this loop. If the loop is diffrax's or Equinox's, its "
    "derivative rule covers only its result, not what is captured or planted inside. "
    "Write `diffrax.diffeqsolve(..., adjoint=diffrax.DirectAdjoint())`, or "
    '`eqx.internal.while_loop(..., kind="bounded")`. Or take the gradient inside, '
    "`save_intermediates(eqx.filter_grad(loss))`."
)
