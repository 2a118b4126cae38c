"""Loops, branches and `jax.shard_map`, written anew with `jax.lax`.

What a handler passes down (`Given`) and takes back (`Taken`) goes through them like
this, for a scan with the body `(carry, x) -> (carry, y)`:

    ((state, carry), (ys, values)) = scan(body, (state, carry), (xs, slices))

The `state` of a reducer, or a count, goes from iteration to iteration. `slices` are
what is passed down to each iteration, such as its part of a planted array. `values` is
what is taken from the sows of an iteration, which the scan stacks.
"""

import functools as ft
from collections.abc import Callable
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.core
import jax.extend.core as jexc
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from ... import _compat
from ..._arrays import on_mesh, select, zeros_like
from ..._mark.staging import to_jaxpr, types_of
from ..handler import Given, refuse, Taken
from ..interpreter import consts_as_args, rule_for
from ..sows import sites, without_sows
from .calls import bind


def _split(xs, *sizes):
    out = []
    for n in sizes:
        out.append(list(xs[:n]))
        xs = xs[n:]
    return *out, list(xs)


# --- loops and branches that run eagerly ---
def staged_if_eager(rule: Callable) -> Callable:
    """For a rule that binds a primitive which JAX compiles when it runs eagerly.

    JAX finds what it has compiled by the jaxprs in the equation, which it keeps with
    the functions that they were traced from. So what the rule binds has to be the same
    each time: it is staged once for each handler, and kept with the jaxpr.
    """

    def of_params(interpret, given, held, *args):
        # What a rule reads of an equation.
        primitive, params = held
        eqn = SimpleNamespace(primitive=primitive, params=dict(params), invars=())
        return rule(interpret, given, eqn, *args)

    @ft.wraps(rule)
    def staged(interpret, given, eqn, *args):
        plain = all(isinstance(v.aval, jax.core.ShapedArray) for v in eqn.invars)
        if not (plain and _compat.is_eager()):
            return rule(interpret, given, eqn, *args)
        held = eqn.primitive, tuple(eqn.params.items())
        return interpret.run(of_params, held, given, *args)

    return staged


# --- rules ---
@rule_for(jexc.primitives.scan_p)
@staged_if_eager
def _scan(interpret, given, eqn, *args):
    p = eqn.params
    handler = interpret.handler
    num_consts, num_carry = _compat.scan_arity(p)
    consts, init, xs = _split(args, num_consts, num_carry)
    run = interpret(p["jaxpr"])
    is_sliced = handler.sliced_by_scan(given.values, p["jaxpr"])
    slices, same = eqx.partition(given.values, is_sliced)
    asked = handler.needs_iterations(p["jaxpr"])
    iterations = [jnp.arange(p["length"], dtype=jnp.int32)] if asked else []

    # With `names="h/3"`, the value of one iteration is carried along, and no stack of
    # all of them is made. `only` says for each value which iteration that is.
    keeps = asked and handler.keeps_iterations
    kept = only = is_kept = None
    if keeps:
        first = given._replace(iterations=(*given.iterations, jnp.int32(0)))
        avals = p["jaxpr"].in_avals[num_consts + num_carry :]
        types = types_of(run, first, *consts, *init, *avals)[1].values
        only = handler.only_iterations(types)
        is_kept = jax.tree.map(lambda n: n >= 0, only)
        only, types = eqx.filter((only, types), (is_kept, is_kept))
        kept = jax.tree.map(lambda x: _vary(zeros_like(x), _compat.varying(x)), types)

    def body(carry, x):
        state, kept, carry = carry
        slices, iteration, x = x
        values = eqx.combine(slices, same)
        here = Given(state, values, (*given.iterations, *iteration))
        outs, taken = run(here, *consts, *carry, *x)
        carry, y = _split(outs, num_carry)
        rest = taken.values
        if keeps:
            new, rest = eqx.partition(rest, is_kept)
            kept = jax.tree.map(
                lambda n, x, y: jnp.where(iteration[0] == n, x, y), only, new, kept
            )
        return (taken.carry, kept, carry), (y, rest)

    (state, kept, carry), (ys, rest) = lax.scan(
        body,
        (given.carry, kept, init),
        (slices, iterations, xs),
        length=p["length"],
        reverse=p["reverse"],
        unroll=p["unroll"],
    )
    rest = eqx.combine(kept, rest) if keeps else rest
    return [*carry, *ys], Taken(state, handler.stack_iterations(rest, p["length"]))


@rule_for(jexc.primitives.cond_p)
@staged_if_eager
def _cond(interpret, given, eqn, index, *args):
    # The branches sow different things, and have to return the same: each fills in
    # zeros for what only the others sow.
    runs = [interpret(jaxpr) for jaxpr in eqn.params["branches"]]
    types = [types_of(run, given, *args)[1].values for run in runs]
    to_one_form = interpret.handler.unify_branches(types)

    def branch(run):
        def call(given, *args):
            outs, taken = run(given, *args)
            rest = to_one_form(taken.values)
            return outs, taken._replace(values=_varying_like(index, rest))

        return call

    # The new equation has all that the branches close over as operands, with one jaxpr
    # for each branch.
    branches = alike(list(map(branch, runs)), given, *args)
    staged = [to_jaxpr(fn)(given, *args) for fn in branches]
    consts = [_compat.open_jaxpr(closed)[1] for closed, _ in staged]

    def with_all_consts(i):
        jaxpr = consts_as_args(staged[i][0])

        def call(consts, *args):
            return _compat.inline_or_call(jaxpr, [*consts[i], *args])

        return jax.make_jaxpr(call)(consts, *leaves)

    # Not `lax.switch`, which would clamp the index once more.
    leaves = [*jax.tree.leaves(given), *args]
    new = tuple(map(with_all_consts, range(len(staged))))
    out = bind(eqn, [index, *jax.tree.leaves(consts), *leaves], branches=new)
    return jax.tree.unflatten(staged[0][1], out)


def _vary(x, axes):
    missing = tuple(axes - _compat.varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def _varying_like(predicate, tree):
    """Inside a `jax.shard_map`: what depends on a predicate varies where it does."""
    axes = _compat.varying(predicate)
    return jax.tree.map(lambda x: _vary(x, axes), tree) if axes else tree


def alike(fns, *args):
    """Inside a `jax.shard_map`: functions whose results vary over the same axes."""
    if not any(map(_compat.varying, jax.tree.leaves(args))):
        return fns
    avals = zip(*[jax.make_jaxpr(fn)(*args).out_avals for fn in fns])
    axes = [frozenset().union(*map(_compat.varying, a)) for a in avals]

    def wrap(fn):
        def call(*args):
            leaves, treedef = jax.tree.flatten(fn(*args))
            return jax.tree.unflatten(treedef, list(map(_vary, leaves, axes)))

        return call

    return list(map(wrap, fns))


@rule_for(jexc.primitives.while_p)
@staged_if_eager
def _while(interpret, given, eqn, *args):
    p = eqn.params
    handler = interpret.handler
    refuse(
        handler,
        eqn,
        sites(p["cond_jaxpr"]),
        "a sow in the condition of a `while_loop` runs before each iteration and once "
        "more, which fits no iteration",
        "Sow the value in the body.",
    )
    cond_consts, consts, init = _split(args, p["cond_nconsts"], p["body_nconsts"])
    cond_jaxpr = p["cond_jaxpr"]
    predicate = without_sows(cond_jaxpr)
    run = interpret(p["body_jaxpr"])
    types = types_of(run, given, *consts, *init)[1].values
    # Under vmap: the lanes that have finished stay as they are. Whatever the handler
    # does, `jax_rules.py` has told it which lanes these are.
    lanes = cond_jaxpr.out_avals[0].shape
    mutable = [
        x
        for v, x in zip(eqn.invars, args)
        if lanes and not isinstance(v.aval, jax.core.ShapedArray)
    ]

    def going(carry, jaxpr=predicate):
        (out,) = _compat.inline_or_call(jaxpr, [*cond_consts, *carry])
        return out

    def body(loop):
        carry, state, rest = loop
        before = [ref[...] for ref in mutable]
        outs, taken = run(given._replace(carry=state), *consts, *carry)
        if lanes:
            mask = going(carry)
            outs = [select(mask, x, y) for x, y in zip(outs, carry)]
            for ref, x in zip(mutable, before):
                ref[...] = select(mask, ref[...], x)
        return outs, taken.carry, handler.after_iteration(rest, taken.values)

    # Its aval: evaluated once more, the predicate might print.
    (pred,) = jax.make_jaxpr(going)(init).out_avals
    # How often the body runs is not known, so nothing can be stacked: `rest` has what
    # the last iteration sowed, and before the first one zeros.
    empty = _varying_like(pred, handler.before_first_iteration(types))
    first = init, given.carry, empty
    step, start = alike([body, lambda loop: loop], first)
    kept = cond_jaxpr if handler.has_outer else predicate
    carry, state, rest = lax.while_loop(
        lambda loop: jnp.any(going(loop[0], kept)), step, start(first)
    )
    return carry, Taken(state, rest)


# --- devices ---
@rule_for(_compat.shard_map_p)
def _shard_map(interpret, given, eqn, *args):
    # What is sown on each device gets an axis for the devices, sharded over the mesh.
    p = eqn.params
    handler = interpret.handler
    refuse(
        handler,
        eqn,
        filter(handler.needs_order, sites(eqn)),
        "a reducer with a state, such as `Last`, needs to know which execution comes "
        "first, and there is no order of execution over devices",
        "Capture it without a reducer.",
    )
    run = interpret(p["jaxpr"])
    manual = p["newly_manual_axes"]
    axes = {a: n for a, n in p["mesh"].shape.items() if a in manual}
    # What goes in: of a planted array, the part of each device; of a count, its own.
    values, value_specs = handler.values_on_devices(given.values, p["jaxpr"], [*axes])
    carry, carry_back = handler.carry_for_devices(given.carry)
    on_device, everywhere = P(*axes), P()

    def for_values(fn, values):
        of = lambda spec, xs: jax.tree.map(lambda x: fn(x, spec), xs)
        return jax.tree.map(of, value_specs, values)

    values = for_values(lambda x, spec: on_mesh(x, p["mesh"], spec), values)
    specs = None

    def varying(x):
        return [a for a in axes if not p["check_vma"] or a in _compat.varying(x)]

    # What comes out: on each device, what is sown there gets an axis of size 1 in
    # front. With 4 devices, `f32[3]` becomes `f32[1, 3]`, and all together `f32[4, 3]`.
    def body(carry, values, index, *args):
        nonlocal specs
        values = for_values(lambda x, spec: x.squeeze(range(len(spec))), values)
        carry = jax.tree.map(lambda x: x.reshape(x.shape[len(axes) :]), carry)
        outs, taken = run(Given(carry, values, index), *args)
        rest, specs = handler.stack_devices(taken.values, axes, varying)
        one = (1,) * len(axes)
        carry = jax.tree.map(lambda x: x.reshape(*one, *x.shape), taken.carry)
        return list(outs), carry, rest

    def mapped(body, out_specs):
        return jax.shard_map(
            body,
            mesh=p["mesh"],
            in_specs=(on_device, value_specs, everywhere, *p["in_specs"]),
            out_specs=out_specs,
            axis_names=set(axes),
            check_vma=p["check_vma"],
        )

    def probe(*args):
        body(*args)
        return ()

    # First only to learn what varies over which axis: `stack_devices` sets `specs`.
    jax.eval_shape(mapped(probe, ()), carry, values, given.iterations, *args)
    out_specs = list(p["out_specs"]), on_device, specs
    outs, carry, rest = mapped(body, out_specs)(carry, values, given.iterations, *args)
    return outs, Taken(carry_back(carry), rest)
