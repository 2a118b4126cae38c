"""How to run each higher-order primitive of JAX's with marks inside.

**Calls.** The equation of a jitted function or a checkpoint is kept, with a new jaxpr
in it, so that whatever else it says stays true.

Of functions with a derivative or a batching rule of their own, a copy is walked over,
for the marks. The original equation gives the outputs and their derivatives once these
are differentiated (or, for a batching rule, the outputs in any case), so the rules are
kept. XLA removes it if it is not needed. If something is planted inside, the rules are
those of another function, and are given up.

**Loops, branches and `jax.shard_map`** are written anew with `jax.lax`. What a handler
passes down (`Given`) and takes back (`Taken`) goes through them like this, for a scan
with the body `(carry, x) -> (carry, y)`:

    ((state, carry), (ys, values)) = scan(body, (state, carry), (xs, slices))

The `state` of a reducer, or a count, goes from iteration to iteration. `slices` are
what is passed down to each iteration, such as its part of a planted array. `values` is
what is taken from the marks of an iteration, which the scan stacks.
"""

import dataclasses as dc
import functools as ft
from collections.abc import Callable
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.core
import jax.extend.core as jexc
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P

from .. import _compat, _hijax
from .._arrays import on_mesh, select, sharded_along, zeros_like
from .._errors import UnsupportedPrimitiveError
from .._mark.primitive import sow_effect
from .._staging import to_jaxpr, types_of
from .._values import entry as _entry, merge as _merge
from .handler import Given, refuse, Taken
from .interpreter import Interpret, rule_for, with_operands
from .meshes import adds_up, forgets
from .plan import EMPTY
from .rewrite import MARKS, PRINTS, without
from .sows import expanded, FUNCTION, jaxprs_in, jaxprs_to_run, number


# --- calls ---
def rebind(eqn, args, **params):
    params = eqn.primitive.get_bind_params({**eqn.params, **params})
    return list(map(_compat.as_array, eqn.primitive.bind(*args, **params)))


@rule_for(jexc.primitives.jit_p)
def _jit(interpret, given, eqn, *args):
    closed, inputs, treedef = interpret.staged(eqn.params["jaxpr"], 0, given, *args)
    n = len(inputs) - len(args)
    extra = treedef.num_leaves - len(eqn.outvars)
    new_in, new_out = _compat.unspecified()
    p = eqn.params
    out = rebind(
        eqn,
        inputs,
        jaxpr=closed,
        **{k: (v,) * n + tuple(p[k]) for k, v in new_in.items()},
        **{k: tuple(p[k]) + (v,) * extra for k, v in new_out.items()},
    )
    return jtu.tree_unflatten(treedef, out)


@rule_for(jexc.primitives.remat_p)
def _checkpoint(interpret, given, eqn, *args):
    closed, inputs, treedef = interpret.staged(eqn.params["jaxpr"], 0, given, *args)
    out = rebind(eqn, inputs, jaxpr=_compat.open_jaxpr(closed)[0])
    return jtu.tree_unflatten(treedef, out)


@rule_for(jexc.primitives.call_p)
@rule_for(jexc.primitives.closed_call_p)
def _call(interpret, given, eqn, *args):
    return interpret(eqn.params["call_jaxpr"])(given, *args)


# --- calls that only say something about a function ---
@rule_for(_compat.metadata_p)
def _metadata(interpret, given, eqn, *args):
    closed, inputs, treedef = interpret.staged(eqn.params["jaxpr"], 0, given, *args)
    return jtu.tree_unflatten(treedef, rebind(eqn, inputs, jaxpr=closed))


@rule_for(_compat.composite_p)
@rule_for(_compat.program_order_p)
def _annotated(interpret, given, eqn, *args):
    (jaxpr,) = jaxprs_in(eqn.params)
    if not interpret.handler.has_outer and not interpret.asked(jaxpr):
        return rebind(without(eqn, MARKS), args), Taken(given.carry, ())
    # What it says is of as many operands and outputs as there are: a compiler may have
    # a kernel with the name of a composite.
    return interpret(jaxpr)(given, *args)


# --- functions with rules of their own ---
def _inside(interpret, given, eqn, jaxpr, args, join, k=0):
    """Sees to the marks in `jaxpr`, a copy of the function in the equation, which has
    none of its rules. The equation is bound, too, without its marks, and `join` makes
    one of the two. `k` is the number of `jaxpr` in the equation."""
    handler = interpret.handler
    inside = interpret.asked(jaxpr, k)
    own = args[: len(_compat.open_jaxpr(jaxpr)[0].invars)]
    if handler.replaces and inside:
        return interpret(jaxpr, k)(given, *own)
    if not handler.has_outer and not inside:
        return rebind(without(eqn, MARKS), args), Taken(given.carry, ())
    # Both run, and only the original prints.
    copy = without(jaxpr, PRINTS)
    # An effect that cannot be left out, such as an `io_callback` with a result.
    effects = [e for e in copy.effects if not isinstance(e, _compat.AxisEffect)]
    if any(e != sow_effect for e in effects):
        why = "an effect of the function, such as an `io_callback`, would happen twice"
        refuse(eqn, inside, why, "Mark its result outside.")
        kept = eqn if handler.has_outer else without(eqn, MARKS)
        return rebind(kept, args), Taken(given.carry, ())
    original = rebind(without(eqn, MARKS), args)
    return join(interpret, given, copy, k, own, original)


def _with_derivative_of(interpret, given, jaxpr, k, args, original):
    """What comes out of a walk over `jaxpr`. If it is differentiated, the outputs are
    the `original` ones, with their derivatives, and what was taken has its plain
    derivative. For `h` inside a `jax.custom_jvp` function `f`:

        S(f)        runs `all_of_it` alone, for the outputs of `f` as well
        grad(S(f))  runs `f` with its rule for the outputs, and `values_only` for `h`

    A `jax.custom_jvp` function chooses between the two, as JAX calls its rule only if
    it is differentiated.
    """
    handler = interpret.handler
    all_of_it, inputs, treedef = interpret.staged(jaxpr, k, given, *args)
    # If it is differentiated, outer transformations see the marks in the rule of the
    # original, and not those in here, in whatever equations these are.
    quietly = dc.replace(handler, has_outer=False)
    alone = Interpret(quietly, interpret.stages, interpret.plan)
    values_only, same, _ = alone.staged(jaxpr, k, given, *args)
    values_only = without(values_only, MARKS, in_rules=True)
    join = _differentiated if handler.differentiable else _sent
    outs = join(handler, all_of_it, inputs, values_only, same, original)
    return jtu.tree_unflatten(treedef, outs)


def _sent(handler, all_of_it, inputs, values_only, same, original):
    """For `tap`: what it sends must be sent once, with a derivative or without one, and
    has none itself."""
    del handler

    @jax.custom_jvp
    def copy(inputs, original, same):
        del original, same
        return _compat.inline_or_call(all_of_it, inputs)

    @ft.partial(copy.defjvp, symbolic_zeros=True)
    def _(primals, tangents):
        (_, original, same), (_, of_original, _) = primals, tangents
        taken = _compat.inline_or_call(values_only, same)[len(original) :]
        zeros = [SymbolicZero(jax.typeof(x).to_tangent_aval()) for x in taken]
        return [*original, *taken], [*of_original, *zeros]

    return copy(inputs, original, same)


def _differentiated(handler, all_of_it, inputs, values_only, same, original):
    """For what is saved, whose plain derivative JAX takes: so the values are computed
    out here. But what a `transform` prints must be printed once, in `copy` or in its
    rule."""
    without_prints = without(values_only, PRINTS)
    values = _compat.inline_or_call(without_prints, same)
    prints = without_prints is not values_only

    @jax.custom_jvp
    def copy(inputs, original, values, same):
        del original, same
        if prints or handler.has_outer:
            return _compat.inline_or_call(all_of_it, inputs)
        # `all_of_it` is the same program as `values_only`.
        return values

    @ft.partial(copy.defjvp, symbolic_zeros=True)
    def _(primals, tangents):
        (_, original, values, same), (_, of_original, of_values, _) = primals, tangents
        if prints:
            _compat.inline_or_call(values_only, same)
        n = len(original)
        return [*original, *values[n:]], [*of_original, *of_values[n:]]

    return copy(inputs, original, values, same if prints else [])


@rule_for(jexc.primitives.custom_jvp_call_p)
@rule_for(jexc.primitives.custom_vjp_call_p)
def _custom(interpret, given, eqn, *args):
    jaxpr = eqn.params["call_jaxpr"]
    return _inside(interpret, given, eqn, jaxpr, args, _with_derivative_of)


# `None`, which no primitive is, if there is none.
@rule_for(_hijax.hi_p)
def _custom_hi(interpret, given, eqn, *args):
    ((k, jaxpr),) = jaxprs_to_run(eqn).items() or [(FUNCTION, expanded(eqn))]
    return _inside(interpret, given, eqn, jaxpr, args, _with_derivative_of, k)


@rule_for(_compat.custom_vmap_p)
def _custom_vmap(interpret, given, eqn, *args):
    def join(interpret, given, jaxpr, k, args, original):
        outs, taken = interpret(jaxpr, k)(given, *args)
        # If there is an outer transformation, which may plant something in the copy,
        # the rule is given up.
        return outs if interpret.handler.has_outer else original, taken

    return _inside(interpret, given, eqn, eqn.params["call"], args, join)


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
        return interpret.apply(of_params, held, given, *args)

    return staged


# --- loops and branches ---
def _split(xs, *sizes):
    out = []
    for n in sizes:
        out.append(list(xs[:n]))
        xs = xs[n:]
    return *out, list(xs)


@rule_for(jexc.primitives.scan_p)
@staged_if_eager
def _scan(interpret, given, eqn, *args):
    p = eqn.params
    handler = interpret.handler
    num_consts, num_carry = _compat.scan_arity(p)
    consts, init, xs = _split(args, num_consts, num_carry)
    run = interpret(p["jaxpr"])
    inside = interpret.asked(p["jaxpr"])
    is_sliced = handler.sliced_by_scan(given.values, inside)
    slices, same = eqx.partition(given.values, is_sliced)
    asked = any(handler.needs_iteration(ask) for _, ask in inside)
    iterations = [jnp.arange(p["length"], dtype=jnp.int32)] if asked else []

    operands = slices, iterations, xs

    def step(state, carry, x):
        slices, iteration, x = x
        values = eqx.combine(slices, same)
        here = Given(state, values, (*given.iterations, *iteration))
        return run(here, *consts, *carry, *x)

    # With `names="h/3"`, the value of one iteration is carried along, and no stack of
    # all of them is made.
    kept = []
    if asked:
        of_one = lambda x: jexc.mapped_aval(p["length"], 0, jax.typeof(x))
        first = jax.tree.map(of_one, operands)
        types = types_of(step, given.carry, init, first)[1].entries
        empty = lambda x: _compat.vary(zeros_like(x), _compat.varying(x))
        kept = jax.tree.map(empty, list(filter(_entry.keeps_one, types)))

    def keep(iteration, new, old):
        (i,) = iteration
        return jax.tree.map(lambda x, y: jnp.where(i == new.at[-1], x, y), new, old)

    def body(carry, x):
        state, kept, carry = carry
        outs, taken = step(state, carry, x)
        carry, y = _split(outs, num_carry)
        _, iteration, _ = x
        new = filter(_entry.keeps_one, taken.entries)
        kept = [keep(iteration, e, old) for e, old in zip(new, kept)]
        rest = [e for e in taken.entries if not _entry.keeps_one(e)]
        return (taken.carry, kept, carry), (y, rest)

    (state, kept, carry), (ys, rest) = lax.scan(
        body,
        (given.carry, kept, init),
        operands,
        # A symbolic length is only taken from what is scanned over.
        length=None if jax.tree.leaves(operands) else p["length"],
        reverse=p["reverse"],
        unroll=p["unroll"],
    )
    values = tuple(_entry.stacked(e, p["length"]) for e in (*kept, *rest))
    return [*carry, *ys], Taken(state, values)


@rule_for(jexc.primitives.cond_p)
@staged_if_eager
def _cond(interpret, given, eqn, index, *args):
    # The branches mark different things, and have to return the same: each fills in
    # zeros for what only the others mark.
    runs = [interpret(jaxpr, k) for k, jaxpr in enumerate(eqn.params["branches"])]
    for k, jaxpr in enumerate(eqn.params["branches"]):
        _refuse_totals(interpret.asked(jaxpr, k), jaxpr, index)
    types = [types_of(run, given, *args)[1].entries for run in runs]
    bring = _merge.to_one_form(types)

    def branch(run):
        def call(given, *args):
            outs, taken = run(given, *args)
            rest = bring(taken.entries)
            return outs, taken._replace(entries=_varying_like(index, rest))

        return call

    branches = varying_alike(list(map(branch, runs)), given, *args)
    staged = [to_jaxpr(fn)(given, *args) for fn in branches]
    # Each branch takes all that any of them closes over.
    opened = [_compat.open_jaxpr(closed) for closed, _ in staged]
    constvars = tuple(v for jaxpr, _ in opened for v in jaxpr.constvars)
    consts = [x for _, consts in opened for x in consts]
    new = tuple(with_operands(jaxpr, constvars) for jaxpr, _ in opened)
    # Not `lax.switch`, which would clamp the index once more.
    inputs = [index, *consts, *jax.tree.leaves(given), *args]
    return jax.tree.unflatten(staged[0][1], rebind(eqn, inputs, branches=new))


def _varying_like(predicate, tree):
    """Inside a `jax.shard_map`: what depends on a predicate varies where it does."""
    axes = _compat.varying(predicate)
    return jax.tree.map(lambda x: _compat.vary(x, axes), tree) if axes else tree


def _refuse_totals(inside, jaxpr, predicate):
    """Raises if what only some devices run has a total over all of them. In a gradient,
    in a `jax.shard_map`, of

        branch = lambda x: sow((x, c), "h")[0] * c  # all devices have the same `c`
        lax.cond(x > 0, branch, jnp.sin, x)

    the cotangent of that `c` is a `psum` in the branch: a device that is there waits
    for the others. So it does in a gradient with respect to `c`, without any mark.
    """
    axes = _compat.varying(predicate)
    if not axes or not adds_up(jaxpr, axes):
        return
    for mark, _ in inside:
        site = mark.site
        if not site.flows_backward:
            continue
        dtype = lambda aval: getattr(aval, "dtype", bool)  # a HiPrim takes others
        avals = [v.aval for v in mark.eqns[-1].invars[1:]]
        floats = [x for x in avals if jnp.issubdtype(dtype(x), jnp.inexact)]
        shared = sorted(frozenset().union(*[axes - _compat.varying(x) for x in floats]))
        if shared:
            axis = shared[0]
            raise UnsupportedPrimitiveError(
                f"The cotangent of {site.said} cannot be captured or planted: an array "
                f"there is the same along the mesh axis {axis!r}, so its cotangent is "
                "the sum over that, and the devices that run this branch or iteration "
                f"would wait for the others. Let it vary, by `jax.lax.pcast(x, {axis!r}"
                ", to='varying')`, or leave cotangents out, by `modes`."
            )


def varying_alike(fns, *args):
    """Inside a `jax.shard_map`: functions whose results vary over the same axes."""
    if not any(map(_compat.varying, jax.tree.leaves(args))):
        return fns
    avals = zip(*[jax.make_jaxpr(fn)(*args).out_avals for fn in fns])
    axes = [frozenset().union(*map(_compat.varying, a)) for a in avals]

    def wrap(fn):
        def call(*args):
            leaves, treedef = jax.tree.flatten(fn(*args))
            return jax.tree.unflatten(treedef, list(map(_compat.vary, leaves, axes)))

        return call

    return list(map(wrap, fns))


@rule_for(jexc.primitives.while_p)
@staged_if_eager
def _while(interpret, given, eqn, *args):
    p = eqn.params
    handler = interpret.handler
    cond_jaxpr, body_jaxpr = p["cond_jaxpr"], p["body_jaxpr"]
    k, n_cond = number(eqn, body_jaxpr), number(eqn, cond_jaxpr)
    refuse(
        eqn,
        interpret.asked(cond_jaxpr, n_cond),
        "a mark in the condition of a `while_loop` runs before each iteration and once "
        "more, which fits no iteration",
        "Mark the value in the body.",
    )
    cond_consts, consts, init = _split(args, p["cond_nconsts"], p["body_nconsts"])
    predicate = without(cond_jaxpr, MARKS)
    run_body, inside = interpret(body_jaxpr, k), interpret.asked(body_jaxpr, k)
    plan = interpret.plan or EMPTY.plan

    def run(given, *args):
        outs, taken = run_body(given, *args)
        return outs, taken._replace(
            entries=_merge.with_values(taken.entries, plan.apart)
        )

    asked = any(handler.needs_iteration(ask) for _, ask in inside)
    index = [jnp.int32(0)] if asked and handler.counts_whiles else []
    at = lambda index: given._replace(iterations=(*given.iterations, *index))
    types = types_of(run, at(index), *consts, *init)[1].entries
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
        carry, state, rest, index = loop
        before = [ref[...] for ref in mutable]
        outs, taken = run(at(index)._replace(carry=state), *consts, *carry)
        if lanes:
            mask = going(carry)
            outs = [select(mask, x, y) for x, y in zip(outs, carry)]
            for ref, x in zip(mutable, before):
                ref[...] = select(mask, ref[...], x)
        rest = tuple(
            _merge.after_iteration(old, e, e.slot in plan.backward)
            for old, e in zip(rest, taken.entries)
        )
        return outs, taken.carry, rest, [i + 1 for i in index]

    # Its aval: evaluated once more, the predicate might print.
    (pred,) = jax.make_jaxpr(going)(init).out_avals
    _refuse_totals(inside, body_jaxpr, pred)
    # How often the body runs is not known, so nothing can be stacked: `rest` has what
    # the last iteration sowed, and before the first one zeros.
    empty = tuple(_merge.zeros(_merge.unify([_entry.left_loop(e)])) for e in types)
    first = init, given.carry, _varying_like(pred, empty), index
    step, start = varying_alike([body, lambda loop: loop], first)
    kept = cond_jaxpr if handler.has_outer else predicate
    carry, state, rest, _ = lax.while_loop(
        lambda loop: jnp.any(going(loop[0], kept)), step, start(first)
    )
    return carry, Taken(state, rest)


# --- devices ---
@rule_for(_compat.shard_map_p)
def _shard_map(interpret, given, eqn, *args):
    # What is marked on each device gets an axis for the devices, sharded over the mesh.
    p = eqn.params
    handler = interpret.handler
    inside = interpret.asked(p["jaxpr"])
    refuse(
        eqn,
        [(mark, ask) for mark, ask in inside if handler.needs_order(ask)],
        "a reducer with a state, such as `Last`, needs to know which execution comes "
        "first, and there is no order of execution over devices",
        "Capture it without a reducer.",
    )
    run = interpret(p["jaxpr"])
    manual = p["newly_manual_axes"]
    axes = {a: n for a, n in p["mesh"].shape.items() if a in manual}
    # What goes in: of a planted array, the part of each device; of a count, its own.
    values = given.values
    value_specs = handler.specs_on_devices(inside, [*axes])
    carry = handler.carry_on_devices(given.carry, inside)
    on_device, everywhere = P(*axes), P()

    def for_values(fn, values):
        of = lambda spec, xs: jax.tree.map(lambda x: fn(x, spec), xs)
        return jax.tree.map(of, value_specs, values)

    def cut(x, spec):
        # From a mesh around where the axis is not explicit, it comes in one piece.
        return sharded_along(on_mesh(x, p["mesh"], spec), spec)

    values = for_values(cut, values)
    carry = jax.tree.map(lambda x: cut(x, on_device), carry)
    specs = None

    known = p["check_vma"] and not forgets(p["jaxpr"])

    def varying(x):
        return [a for a in axes if not known or a in _compat.varying(x)]

    # What comes out: on each device, what is marked there gets an axis of size 1 in
    # front. With 4 devices, `f32[3]` becomes `f32[1, 3]`, and all together `f32[4, 3]`.
    def body(carry, values, index, *args):
        nonlocal specs
        values = for_values(lambda x, spec: x.squeeze(range(len(spec))), values)
        carry = jax.tree.map(lambda x: x.reshape(x.shape[len(axes) :]), carry)
        outs, taken = run(Given(carry, values, index), *args)
        pairs = [_entry.on_device(e, axes, varying) for e in taken.entries]
        rest, specs = tuple(e for e, _ in pairs), tuple(s for _, s in pairs)
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

    # First only to learn what varies over which axis: this sets `specs`.
    jax.eval_shape(mapped(probe, ()), carry, values, given.iterations, *args)
    out_specs = list(p["out_specs"]), on_device, specs
    outs, carry, rest = mapped(body, out_specs)(carry, values, given.iterations, *args)
    return outs, Taken({**given.carry, **carry}, rest)
