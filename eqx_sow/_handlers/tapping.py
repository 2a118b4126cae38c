"""`tap`: its handler, and the way to the callback.

`Tap` gives what it sees to `send`, a primitive in the program, and that to a
`Delivery`, which runs on the host (`delivery.py`).
"""

import dataclasses as dc
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir, partial_eval as pe

from .. import _compat
from .._arrays import on_mesh
from .._errors import SowError, takes_two
from .._mark.site import Label, Site
from .._mark.static import Const, Form, NoTangent, OPERAND, SameParts
from .._values.axes import as_operand
from .._values.entry import captured, Entry, in_front, running, value_of
from .._values.transform import Batched, transformed, Value
from .._walk.frame import Frame
from .._walk.handler import check_clear, check_guarded, Given, Handler
from .._walk.plan import Ask, Placed, planned, Wanted
from .._walk.runs import Run
from .._walk.sows import variables, Way
from .asked import Asked, for_each_loop, function_for, layer, leave, reached
from .delivery import Delivery, print_event


# --- from the device ---
def send(
    count: Any,
    iterations: Sequence[Any],
    entry: Entry,
    extra: Value,
    action: "Send",
    options: Any,
) -> None:
    """Sends an execution to the callback, which is the `count`-th, in these iterations
    of the loops around. `extra` is the option of that name, and `options` are all
    options of `tap`."""
    site, n = entry.site, len(entry.arrays) - entry.counted
    value = Value(site.form, entry.arrays[:n], site.varies[:n])
    value = _sendable(value, printed=options.callback.value is print_event)
    extra = _sendable(extra, printed=False)
    varies = *value.varies, *site.varies[n:]
    # No more of the site: in another trace of the program all else may differ.
    sent = Site(site.labels, value.form, modes=site.modes)
    sent = sent._replace(axes=site.axes, varies=varies)
    devices = jax.sharding.get_abstract_mesh().manual_axes
    delivery = Delivery(
        options.callback,
        action.mode,
        sent,
        entry.counted,
        extra.form,
        devices,
        options.ordered,
        action.whole,
        site.said,
        action.of_value,
    )
    indices = map(jax.lax.axis_index, devices)
    ran = map(as_operand, entry.arrays[n:], varies[n:])
    arrays = [*extra.arrays, *value.arrays, *ran]
    operands = count, *iterations, *indices, *arrays
    _send_p.bind(*operands, delivery=delivery)


def _sendable(value: Value, printed: bool) -> Value:
    """The value with arrays that NumPy knows, as operands, and what is left of the
    others: of a key, if it is to be `printed`, its type."""
    leaves, arrays, varies = [], [], []
    operands = iter(zip(value.arrays, value.varies))
    for leaf in value.form.leaves:
        if leaf is OPERAND:
            x, v = next(operands)
            x = as_operand(x, v)
            is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            if x.dtype == jax.dtypes.float0:
                leaf = NoTangent(x.shape[sum(v) :], x.dtype)
            elif is_key and printed:
                leaf = Const(jax.ShapeDtypeStruct(x.shape, x.dtype))
            else:
                arrays.append(jax.random.key_data(x) if is_key else x)
                varies.append(v)
        leaves.append(leaf)
    return Value(value.form._replace(leaves=tuple(leaves)), arrays, varies)


_effect = _compat.DebugEffect()

# Operands: those of a `Delivery`.
_send_p = jexc.Primitive("tap")
_send_p.multiple_results = True


def _send_effects(*avals, delivery):
    del avals
    return [], {_compat.ordered_effect if delivery.ordered else _effect}


def _send_impl(*operands, delivery):
    delivery(*operands)
    return []


def _send_lowered(*operands, delivery):
    jax.debug.callback(delivery, *operands, ordered=delivery.ordered)
    return []


def _send_batch(axis_data, operands, dims, *, delivery):
    k = 1 + len(delivery.whole.places)
    n = k + len(delivery.devices)
    if any(d is not None for d in dims[:k]):
        # So it is inside a loop or a branch with a predicate that has lanes.
        raise SowError(
            f"`tap`: {delivery.said} is in a loop or a branch that only some lanes of "
            "a `jax.vmap` run, and the vmap is outside the tap, so eqx_sow cannot tell "
            "which lanes run. Put the vmap inside: `tap(jax.vmap(fn), ...)`."
        )
    operands = [
        x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims)
    ]
    varies = [d is not None for d in dims[n + delivery.extra.n_operands :]]
    _send_p.bind(*operands, delivery=delivery.with_lane(axis_data.size, varies))
    return [], []


def _send_checkpoint(saveable, unknown, instantiated, eqn):
    del saveable
    if any(unknown):
        missing = [x for x, i in zip(eqn.invars, instantiated) if not i]
        return None, eqn, [], [], variables(missing)
    # What a backward pass computes again is not told again.
    return eqn, None, [], [], []


def _send_remat(trace, *operands, **params):
    del trace
    return _send_p.bind(*operands, **params), (), lambda *_: []


_send_p.def_impl(_send_impl)
_send_p.def_effectful_abstract_eval(_send_effects)
ad.primitive_jvps[_send_p] = lambda primals, tangents, **params: (
    _send_p.bind(*primals, **params),
    [],
)
ad.primitive_transposes[_send_p] = lambda cts, *operands, **params: (
    [None] * len(operands)
)
batching.fancy_primitive_batchers[_send_p] = _send_batch
pe.partial_eval_jaxpr_custom_rules[_send_p] = _send_checkpoint
_compat.remat_rules[_send_p] = _send_remat


def _lowering(ctx, *operands, delivery):
    if _compat.is_exported(ctx):
        raise SowError(
            f"A function with a `tap`, here of {delivery.said}, cannot be exported, "
            "since `jax.export` writes no callbacks into a program. Return the values, "
            "as `save_intermediates` does, and export that: "
            "`jax.export.export(jax.jit(save_intermediates(fn)))`."
        )
    return _lower(ctx, *operands, delivery=delivery)


_lower = mlir.lower_fun(_send_lowered, multiple_results=True)
mlir.register_lowering(_send_p, _lowering)
# As for JAX's own callbacks, which have a channel each there.
mlir.register_lowering(_send_p, _lowering, platform="tpu", cacheable=False)


def all_lanes(site: Site, operands: Sequence[Any]) -> list[Any]:
    """The operands, to which no more lanes may come: `batched` is about to see all."""

    @jax.custom_batching.custom_vmap
    def same(x):
        return x

    @same.def_vmap
    def _(*_):
        raise SowError(
            f"`transform=batched(...)` has already been applied to {site.said}, so it "
            "cannot see the lanes of an outer `jax.vmap`, but all lanes are one "
            "event. Put the vmap inside: `tap(jax.vmap(fn), ...)`."
        )

    # What an event says is not differentiated.
    return [
        x if x.dtype == jax.dtypes.float0 else same(jax.lax.stop_gradient(x))
        for x in operands
    ]


# A `lax.cond` on it stays one under the vmaps to come.
@jax.custom_batching.custom_vmap
def any_lane(x: Any) -> Any:
    """Whether it is true in any lane."""
    return jnp.any(x)


@any_lane.def_vmap
def _any_lane_batch(size, batched, x):
    del size, batched
    return any_lane(x), False


def only_if(predicate: Any, fn: Callable[[], None]) -> None:
    if isinstance(predicate, jax.core.Tracer):
        jax.lax.cond(predicate, lambda: fn(), lambda: None)
    elif predicate:
        fn()


# --- at a sow ---
# Of a count: the `Site.key`, the mesh axes around, as each device counts for itself,
# and for that of the option `every`, in a tuple, which parts of the name are the
# indices of layers.
CountKey = tuple[Any, tuple[str, ...], tuple[tuple[int, ...], ...]]


class Send(NamedTuple):
    """What `Tap` does at a mark."""

    # Of the function, or of `None`.
    transform: SameParts
    mode: str
    # The key of its count in `Given.carry`; and with the option `every`, that of the
    # counts of each layer.
    counted_as: tuple[CountKey, ...]
    # What all iterations of the mark are called. `places` has an entry for each loop.
    whole: Label
    # Of each loop around it, from outside in, whether its iteration is that of the
    # value. Not so in a `while_loop` that is part of a backward pass alone.
    of_value: tuple[bool, ...]


def to_send(
    asked: Iterable[Asked],
    runs: Mapping[Way, Run],
    mode_of: Mapping[Any, str],
    transform: Any,
    every: int,
) -> tuple[Placed, dict[CountKey, Any]]:
    """What is sent: those `Site.key`s whose modes `mode_of` names. Also the counts
    before the first execution: of each in all, and with `every`, of each layer, since
    in a list each layer has a name of its own. Nothing is sent at a repetition."""
    rows: dict[Way, Wanted] = {}
    counts: dict[CountKey, Any] = {}
    for mark, site, at in asked:
        run = runs[mark.way]
        if site.key not in mode_of or run.again:
            continue
        check_clear(site, run.again)
        spread = [(a, e.params["mesh"]) for e in mark.eqns for a in _mesh_axes(e)]
        axes = tuple(str(a) for a, _ in spread)
        counted_as: list[CountKey] = [(site.key, axes, ())]
        counts.setdefault(counted_as[0], _zeros(spread))
        if every > 1:
            pairs = zip(mark.site.label.places, mark.loops)
            layers = [(k, n) for k, n in pairs if k is not None]
            key = site.key, axes, (tuple(k for k, _ in layers),)
            # A program with a symbolic length does not run.
            shape = [n if isinstance(n, int) else 1 for _, n in layers]
            # Several places of one name may have stacks of different lengths.
            if key in counts:
                shape = list(map(max, shape, counts[key].shape[len(spread) :]))
            counts[key] = _zeros(spread, shape)
            counted_as.append(key)
        # Those of a `while_loop` stand at the end.
        places = for_each_loop(mark, mark.site.label.places)
        whole = mark.site.label._replace(places=places)
        whiles, lengths = iter(run.backward), for_each_loop(mark, mark.loops)
        of_value = tuple(n is not None or next(whiles, False) is False for n in lengths)
        fn = function_for(transform, mark.site.name, site.name)
        mode = mode_of[site.key]
        send = Send(fn, mode, tuple(counted_as), whole, of_value)
        row = rows.setdefault(mark.way, Wanted(mark, []))
        row.asks.append(Ask(0, site.labels, for_each_loop(mark, at), send))
    return planned(rows.values()), counts


def _zeros(spread: Sequence[tuple[Any, Any]], shape: Sequence[int] = ()) -> Any:
    """Counts of each device before the first execution, given the axes over which
    `shard_map`s spread a mark, and their meshes."""
    zeros = np.zeros([*(mesh.shape[a] for a, mesh in spread), *shape], np.int32)
    if not spread:
        return zeros
    # The mesh of the `shard_map` may have other types of axes than the one where the
    # count begins, and comes back to after each part of the program.
    around = jax.sharding.get_abstract_mesh()
    mesh = spread[0][1] if around.empty else around
    return on_mesh(zeros, mesh, [a for a, _ in spread])


def _mesh_axes(eqn: Any) -> list[Hashable]:
    """The axes over which an equation spreads what is inside it, in mesh order."""
    if eqn.primitive is not _compat.shard_map_p:
        return []
    manual = eqn.params["newly_manual_axes"]
    return [a for a in eqn.params["mesh"].shape if a in manual]


@dc.dataclass(frozen=True, kw_only=True)
class Tap(Handler):
    """Sends the values of marks to the host. Its actions are `Send`, and `Ask.at` has
    an entry for each `while_loop`, too. `Given.carry` has the counts, and
    `Given.values` are the arrays of the option `extra`."""

    options: Any
    when: SameParts
    # That of the option `extra`.
    extra: Form
    has_outer: bool
    cacheable: bool

    counts_whiles = True
    differentiable = False

    def needs_iteration(self, ask):
        return True

    def carry_on_devices(self, carry, inside):
        return {k: carry[k] for _, ask in inside for k in ask.action.counted_as}

    def sow(self, found, given, site: Site, asks, atoms, frame: Frame):
        # An outer `plant` may replace the value.
        atoms = leave(self, site, atoms, frame)
        if not asks:
            return given
        check_guarded(asks[0].seen(site))
        site, operands = in_front(site, frame.read_arrays(atoms))
        frame.flush_effects()
        for ask in asks:
            given = self._send(ask, ask.seen(site), operands, given)
        return given

    def _send(
        self, ask: Ask, site: Site, operands: Sequence[Any], given: Given
    ) -> Given:
        """Sends one execution, if it is asked for, and is due, and counts it."""
        action = ask.action
        total, *of_layers = action.counted_as
        count = given.carry[total]
        extra = Value(self.extra, given.values, [()] * len(given.values))
        is_asked = reached(ask.at, given.iterations)
        # In which lanes, if a condition differs between these.
        run, run_varies = running(site, operands)
        executed = is_asked if run is None else any_lane(run) & is_asked
        options = self.options
        transform = action.transform.value

        def send_it():
            sees_all = isinstance(transform, Batched)
            seen = all_lanes(site, operands) if sees_all else operands
            entry = captured(site, seen, transform)
            send(count, given.iterations, entry, extra, action, options)

        def send_when():
            predicate = self.when.value
            if predicate is None:
                return send_it()
            value = value_of(site, operands)
            holds = _single(predicate, site, self.extra.with_arrays(given.values))
            value = transformed(holds, site, value, run_varies, "when")
            (holds,) = value.arrays
            only_if(any_lane(holds if run is None else holds & run), send_it)

        # First `every`, then `when`, then the transform: what is not due costs nothing.
        due, one = executed, executed.astype(np.int32)
        counts: dict[CountKey, Any] = {total: count + one}
        for key in of_layers:
            i = layer(action.whole.places, given.iterations)
            of_each = jnp.asarray(given.carry[key])
            # `every` is of any size, while a count is an int32.
            every = np.int32(min(options.every, 2**31 - 1))
            due = due & (of_each[i] % every == 0)
            counts[key] = of_each.at[i].add(one)
        only_if(due, send_when)
        return given._replace(carry={**given.carry, **counts})


def _single(predicate: Callable, site: Site, extra: Any) -> Callable:
    """The predicate, which must return a single boolean."""
    more = (extra,) if takes_two(predicate) else ()

    def holds(value):
        try:
            out = predicate(value, *more)
        except Exception as e:  # whatever it raises, which goes on its way
            if more and extra is None:
                e.add_note("`extra` is None, as no `extra=` was passed to `tap`.")
            raise
        if isinstance(out, bool):
            out = np.bool_(out)
        if getattr(out, "shape", None) != () or out.dtype != bool:
            raise SowError(
                f"The `when` of `tap` returned {out!r} for {site.said}. It takes the "
                "value and returns a single boolean: write `.any()` or `.all()`."
            )
        return out

    return holds
