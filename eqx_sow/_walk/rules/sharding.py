"""`jax.shard_map`, written anew: what is sown on each device gets an axis for the
devices, sharded over the mesh."""

import jax
from jax.sharding import PartitionSpec

from ... import _compat
from ..._arrays import on_mesh
from ..handler import Given, refuse, Taken
from ..interpreter import rule_for
from ..sows import sites


@rule_for(_compat.shard_map_p)
def _shard_map(interpret, given, eqn, *args):
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
    on_device, everywhere = PartitionSpec(*axes), PartitionSpec()

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
