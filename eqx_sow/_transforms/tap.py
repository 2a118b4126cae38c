"""`tap`."""

import collections
import dataclasses as dc
import functools as ft
import math
import operator
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.extend.core as jexc
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.interpreters import ad, batching, mlir, partial_eval as pe
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .. import _compat
from .._errors import SowError
from .._mark.listening import Listening, listening
from .._mark.primitive import sow_p
from .._mark.site import Site
from .._mark.static import Const, NoTangent, OPERAND, rebuild, Same
from .._names import check_known, lookup, matches
from .._values.entry import align, Path, runs, transformed
from .._values.modes import is_backward, labels
from .._walk.find import has_sow, is_plain, jaxprs_in, sites
from .._walk.frame import Frame
from .._walk.handler import Given, Handler
from .._walk.refuse import check_guarded, is_solver
from . import options as opt
from .checks import check_modes, check_second_derivatives, wanted
from .options import Options
from .program import Program, trace
from .replay import call_of, has_run, Inside, Ran, recomputed
from .transformed import Transformed, wrap


class TapEvent(NamedTuple):
    """One execution of a sow, as the callback of [`eqx_sow.tap`][] gets it.

    **Attributes:**

    - `name`: the name of the sow.
    - `mode`: `"primal"`, `"tangent"`, `"cotangent"`, or of second order, such as
        `"cotangent.tangent"`.
    - `value`: the PyTree that was sown, after `transform`. Arrays are NumPy arrays,
        with a leading axis for each `vmap` that the value varies over, and none for
        loops; a key is its `jax.random.key_data`. All other leaves are what they were.
    - `count`: how many executions of this name and mode came before it in this call, an
        `int`. One that was not sent counts too.
    - `ran`: `None`; or, where a condition differs between the lanes of a `vmap`, a
        boolean array with the axes of the lanes that says which of them ran. The value
        is zero for the others. Each branch that has the name is an event of its own.

    An event from a `jax.shard_map` has also `event.device`, a dict of mesh axis to the
    index of the device along it. Elsewhere that is `None`.

    !!! example

        ```python
        import eqx_sow
        import jax
        import jax.numpy as jnp

        events = []
        fn = eqx_sow.tap(lambda x: eqx_sow.sow(jnp.sin(x), "sin"), events.append)
        fn(jnp.ones(3))
        jax.effects_barrier()
        name, mode, value, count, ran = events[0]  # "sin", "primal", ..., 0, None
        ```
    """

    name: str
    mode: str
    value: Any
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    ran: Any
    device = None


TapEvent.__module__ = "eqx_sow"


class _DeviceEvent(TapEvent):
    """An event that knows its device."""

    device: Any

    def __repr__(self):
        fields = ", ".join(f"{k}={v!r}" for k, v in self._asdict().items())
        return f"TapEvent({fields}, device={self.device!r})"


# --- on the host ---

# What callbacks raised, until they are raised. JAX reports only the text of it.
_failures: collections.deque[SowError] = collections.deque(maxlen=8)


@dc.dataclass(frozen=True)
class _Delivery:
    """Calls the callback. `lanes` are the sizes of the leading axes, outermost first;
    `has` says which of them each operand has, of which the first tells what ran if
    `guarded`."""

    callback: Const | Same
    name: str
    mode: str
    where: str
    treedef: Const
    leaves: tuple[Any, ...]
    lanes: tuple[int, ...]
    has: tuple[tuple[bool, ...], ...]
    guarded: bool
    devices: tuple[Hashable, ...]
    ordered: bool

    def __call__(self, count: Any, *operands: Any) -> None:
        n = len(self.devices)
        event = self._event(int(count), operands[n:])
        if n:
            event = _DeviceEvent(*event)
            event.device = dict(zip(self.devices, map(int, operands[:n])))
        try:
            self.callback.value(event)
        except Exception as e:  # whatever it raises, which ends the run
            failure = SowError(
                f"The callback of `tap` raised {type(e).__name__}: {e} (at "
                f"`sow(..., {self.name!r})` at {self.where}, {self.mode}, with "
                f"{event.count} executions before it)."
            )
            _failures.append(failure)
            raise failure from e

    def _event(self, count: int, operands: Sequence[Any]) -> TapEvent:
        # Copies: what the callback keeps must not change when a buffer is used again.
        arrays = [np.array(x) for x in operands]
        axes = [i for i in range(len(self.lanes)) if any(h[i] for h in self.has)]
        lead = tuple(self.lanes[i] for i in axes)
        has = [tuple(h[i] for i in axes) for h in self.has]
        every = (True,) * len(axes)
        # The cotangent of what is the same for all lanes is a total.
        total = is_backward(self.mode)

        def full(x, has):
            core = x.shape[sum(has) :]
            return np.broadcast_to(align(x, has, every), (*lead, *core)).copy()

        ran = None
        if self.guarded:
            ran, has = full(arrays.pop(0), has[0]), has[1:]
        for i, x in enumerate(arrays):
            if has[i] != every:
                if total:
                    continue
                arrays[i] = x = full(x, has[i])
            if ran is not None:
                x[~ran] = 0
        value = rebuild(self.treedef, self.leaves, arrays, lead)
        if ran is not None and not axes:
            ran = None
        return TapEvent(self.name, self.mode, value, count, ran)


def _print(event: TapEvent) -> None:
    """The callback that is there without one."""
    print(_line(event), flush=True)


def _line(event: TapEvent) -> str:
    parts = [f"{event.name} {event.mode} [{event.count}]"]
    leaves: Any = jtu.tree_leaves_with_path(event.value)
    arrays = [(path, x) for path, x in leaves if isinstance(x, np.ndarray)]
    for path, x in arrays:
        label = f"{jtu.keystr(path)}: " if len(arrays) > 1 else ""
        parts.append(f"{label}{_shape(x)}{_statistics(x)}")
    if event.ran is not None:
        parts.append(f"ran in {event.ran.sum()} of {event.ran.size} lanes")
    device: Any = event.device
    if device is not None:
        where = ", ".join(f"{axis}={i}" for axis, i in device.items())
        parts.append(f"on device {where}")
    return "  ".join(parts)


def _shape(x: np.ndarray) -> str:
    return jax.core.ShapedArray(x.shape, x.dtype).str_short(short_dtypes=True)


def _statistics(x: np.ndarray) -> str:
    if not (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool):
        return ""
    is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
    x = (np.abs(x) if is_complex else x).astype(np.float64)
    finite = x[np.isfinite(x)]
    text = ""
    if finite.size:
        numbers = dict(
            mean=finite.mean(),
            std=finite.std(),
            min=finite.min(),
            max=finite.max(),
            norm=np.linalg.norm(finite),
        )
        text = "".join(f"  {k} {v:.3g}" for k, v in numbers.items())
        text += f"  zeros {np.mean(finite == 0):.0%}"
    if finite.size < x.size:
        text += f"  not finite {x.size - finite.size}/{x.size}"
    return text


# --- from the device to the host ---

_effect = _compat.TapEffect()

# Operands: the count, the indices of the device, what ran if `guarded`, the values.
send_p = jexc.Primitive("tap")
send_p.multiple_results = True


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
    n = 1 + len(delivery.devices)
    if dims[0] is not None:
        # So it is inside a loop or a branch with a predicate that has lanes.
        raise SowError(
            f"`sow(..., {delivery.name!r})` at {delivery.where} is tapped in a loop or "
            "a branch that only some lanes of a `jax.vmap` run, and the vmap came "
            "after the tap: which lanes run cannot be told. Put the vmap inside: "
            "`tap(jax.vmap(fn), ...)`."
        )
    has = tuple(
        (d is not None, *h) for d, h in zip(dims[n:], delivery.has, strict=True)
    )
    operands = [
        x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims)
    ]
    lanes = (axis_data.size, *delivery.lanes)
    send_p.bind(*operands, delivery=dc.replace(delivery, lanes=lanes, has=has))
    return [], []


def _send_checkpoint(saveable, unknown, instantiated, eqn):
    del saveable
    if any(unknown):
        missing = [
            x
            for x, i in zip(eqn.invars, instantiated)
            if not i and not isinstance(x, jexc.Literal)
        ]
        return None, eqn, [], [], missing
    # What a backward pass computes again is not told again.
    return eqn, None, [], [], []


send_p.def_impl(_send_impl)
send_p.def_effectful_abstract_eval(_send_effects)
ad.primitive_jvps[send_p] = lambda primals, tangents, **params: (
    send_p.bind(*primals, **params),
    [],
)
ad.primitive_transposes[send_p] = lambda cts, *operands, **params: (
    [None] * len(operands)
)
batching.fancy_primitive_batchers[send_p] = _send_batch
pe.partial_eval_jaxpr_custom_rules[send_p] = _send_checkpoint
_lowering = mlir.lower_fun(_send_lowered, multiple_results=True)
mlir.register_lowering(send_p, _lowering)
# As for JAX's own callbacks, which have a channel each there.
mlir.register_lowering(send_p, _lowering, platform="tpu", cacheable=False)


# Whether it is true in any lane of the vmaps to come: so a `lax.cond` stays one.
any_lane_p = jexc.Primitive("any_lane")


def _any_lane_batch(operands, dims):
    (x,), (d,) = operands, dims
    return any_lane_p.bind(jnp.any(x, d)), None


any_lane_p.def_impl(lambda x: x)
any_lane_p.def_abstract_eval(lambda x: x)
batching.primitive_batchers[any_lane_p] = _any_lane_batch
mlir.register_lowering(any_lane_p, lambda ctx, x: [x])


def _any(x: Any) -> Any:
    return any_lane_p.bind(jnp.any(x))


def _only_if(predicate: Any, fn: Callable[[], None]) -> None:
    if isinstance(predicate, jax.core.Tracer):
        jax.lax.cond(predicate, lambda: fn(), lambda: None)
    elif predicate:
        fn()


# --- the handler ---


class _MeshAxis(NamedTuple):
    name: Hashable
    size: int
    mesh: Any

    @property
    def is_explicit(self) -> bool:
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types))
        return types[self.name] == AxisType.Explicit


class _Place(NamedTuple):
    """A sow of a program. `mesh`: the axes of the `shard_map`s around it. `inside` and
    `calls`: what else is. `solver`: it is in a linear solver."""

    site: Site
    mesh: tuple[_MeshAxis, ...] = ()
    inside: Inside = Inside()
    calls: Path = ()
    solver: bool = False

    @property
    def slot(self) -> tuple[Any, tuple[Hashable, ...]]:
        return self.site.key, tuple(a.name for a in self.mesh)

    def start(self) -> Any:
        """The count before the first execution: one for each device."""
        shape = [a.size for a in self.mesh]
        if not any(a.is_explicit for a in self.mesh):
            return np.zeros(shape, np.int32)
        spec = PartitionSpec(*(a.name if a.is_explicit else None for a in self.mesh))
        sharding = NamedSharding(self.mesh[0].mesh, spec)
        return jnp.zeros(shape, jnp.int32, out_sharding=sharding)


def _places(x: Any, here: _Place) -> Iterator[_Place]:
    for eqn in _compat.open_jaxpr(x)[0].eqns:
        if is_plain(eqn) or not has_sow(eqn):
            continue
        inside = here._replace(
            mesh=(*here.mesh, *_mesh_axes(eqn)),
            inside=here.inside.within(eqn),
            calls=(*here.calls, *call_of(eqn)),
            solver=here.solver or is_solver(eqn),
        )
        subjaxprs = [] if eqn.primitive is sow_p else list(jaxprs_in(eqn.params))
        if subjaxprs:
            for jaxpr in subjaxprs:
                yield from _places(jaxpr, inside)
        else:
            calls = here.calls if eqn.primitive is sow_p else inside.calls
            for site in sites(eqn):
                yield inside._replace(site=site, calls=calls)


def _mesh_axes(eqn: Any) -> tuple[_MeshAxis, ...]:
    """The axes over which an equation spreads what is inside it."""
    if eqn.primitive is not _compat.shard_map_p:
        return ()
    p = eqn.params
    mesh, manual = p["mesh"], _compat.manual_axes(p)
    axes = mesh.shape.items()
    return tuple(_MeshAxis(a, n, mesh) for a, n in axes if a in manual)


class _Ran(NamedTuple):
    """A sow that the walk came by."""

    site: Site
    operands: Sequence[Any]


@dc.dataclass(frozen=True)
class _Tap(Handler):
    """Sends the values of sows to the host.

    `chosen` has the `Site.key`s of these, and what their modes are called; `ran` those
    of which a replay in a backward pass is not an event. `Given.carry` is a dict with a
    count for each place of `slots`: a key, and the mesh axes around it. `mesh` are
    those around what is walked over,
    `devices` these and the ones around the whole program.
    """

    tag: Any
    chosen: tuple[tuple[Any, str], ...]
    ran: Ran
    elsewhere: frozenset[str]
    slots: tuple[tuple[Any, tuple[Hashable, ...]], ...]
    callback: Const | Same
    transform: Same
    when: Same
    every: int
    in_order: bool
    devices: tuple[Hashable, ...]
    has_outer: bool
    mesh: tuple[Hashable, ...] = ()
    inside: Inside = Inside()

    @property
    def differentiable(self):
        return self.has_outer

    @ft.cached_property
    def _modes(self) -> dict[Any, str]:
        return dict(self.chosen)

    @property
    def cacheable(self):
        return self.transform.value is None and self.when.value is None

    def wants(self, site):
        return site.tag == self.tag and site.key in self._modes

    def keeps_intact(self, eqn):
        return self.has_outer and not any(map(self.wants, sites(eqn)))

    def for_inside(self, eqn):
        axes = [a.name for a in _mesh_axes(eqn)]
        inside = self.inside.within(eqn)
        if not axes and inside == self.inside:
            return self
        return dc.replace(
            self,
            devices=(*self.devices, *axes),
            mesh=(*self.mesh, *axes),
            inside=inside,
        )

    def meet_unknown(self, found, eqn):
        inside = [s.name for s in sites(eqn) if self.wants(s)]
        # Who solves evaluates the function elsewhere too.
        if not is_solver(eqn) or not self.elsewhere.issuperset(inside):
            super().meet_unknown(found, eqn)

    def carry_for_devices(self, carry, axes):
        del axes  # which `for_inside` has put into `mesh`
        inside = {
            str(i): carry[str(i)]
            for i, (_, mesh) in enumerate(self.slots)
            if mesh[: len(self.mesh)] == self.mesh
        }
        return inside, lambda new: {**carry, **new}

    def sow(self, found, given, site: Site, atoms, frame: Frame):
        if self.wants(site) and not self._is_replay(found, site, atoms, frame):
            check_guarded(site)
            operands = frame.read_arrays(atoms)
            frame.settle()
            slot = str(self.slots.index((site.key, self.mesh)))
            send = ft.partial(self._send, site, operands)
            count = _repeat(send, site, given.carry[slot])
            given = given._replace(carry={**given.carry, slot: count})
        if self.has_outer:
            frame.leave(frame.eqn)
        else:
            frame.alias(atoms)
        return given

    def _is_replay(self, found, site, atoms, frame):
        new = _Ran(site, atoms)
        if not site.modes:
            backward = self.inside.is_backward(frame.eqn)
            new = _Ran(site._replace(replay=backward), atoms)
        earlier = [(i, x) for i, x in enumerate(found) if isinstance(x, _Ran)]
        found.append(new)
        return (
            has_run(site.key, self.inside.replayed(site), self.ran)
            or recomputed(new.site, atoms, earlier, frame) is not None
        )

    def _send(self, site: Site, operands: Sequence[Any], count: Any) -> Any:
        """Sends one execution, if it is to be sent. Returns the count after it."""
        n = len(site.guards)
        lanes = [i for i, a in enumerate(site.axes) if a.lane]
        has = [tuple(site.has(i)[k] for k in lanes) for i in range(len(operands))]
        axes = [site.axes[k] for k in lanes]
        values = _Values(site, axes, operands[n:], has[n:], site.treedef, site.leaves)
        ran, ran_has = None, (False,) * len(axes)
        executed: Any = np.True_
        if n:
            ran_has = tuple(map(any, zip(*has[:n])))
            guards = runs(site, operands[:n])
            ran = [align(x, h, ran_has) for x, h in zip(guards, has)]
            ran = ft.reduce(operator.and_, ran)
            executed = _any(ran)

        def send():
            devices = [jax.lax.axis_index(a) for a in self.devices]
            new = values
            transform = lookup(self.transform.value, site.name)
            if transform is not None:
                new = values.mapped(transform, "transform")
            treedef, leaves, arrays, array_has = new.sendable()
            if ran is not None:
                arrays, array_has = [ran, *arrays], [ran_has, *array_has]
            delivery = _Delivery(
                self.callback,
                site.name,
                self._modes[site.key],
                site.where,
                treedef,
                leaves,
                tuple(a.size for a in axes),
                tuple(array_has),
                ran is not None,
                self.devices,
                self.in_order,
            )
            send_p.bind(count, *devices, *arrays, delivery=delivery)

        def send_when():
            predicate = self.when.value
            if predicate is None:
                return send()
            holds, holds_has = values.holding(predicate)
            if ran is not None:
                both = tuple(map(operator.or_, holds_has, ran_has))
                holds = align(holds, holds_has, both) & align(ran, ran_has, both)
            _only_if(_any(holds), send)

        due = executed
        if self.every > 1:
            due = due & (count % np.int32(self.every) == 0)
        _only_if(due, send_when)
        return count + executed.astype(np.int32)


def _repeat(send: Callable[[Any], Any], site: Site, count: Any) -> Any:
    """A sow that JAX moved out of its loop runs in each iteration all the same."""
    times = math.prod(a.size for a in site.axes if not a.lane)
    if times == 1:
        return send(count)
    return jax.lax.fori_loop(0, times, lambda _, c: send(c), count)


@dc.dataclass(frozen=True)
class _Values:
    """What is sown, each array with those axes of its lanes that it has."""

    site: Site
    axes: Sequence[Any]
    arrays: Sequence[Any]
    has: Sequence[tuple[bool, ...]]
    treedef: Const
    leaves: tuple[Any, ...]

    def mapped(self, fn: Callable, what: str) -> "_Values":
        """A function of the value as the code at the sow sees it, for each lane."""
        treedef, leaves, arrays, has = transformed(
            fn, self.site, self.axes, self.arrays, self.has, what
        )
        return dc.replace(self, arrays=arrays, has=has, treedef=treedef, leaves=leaves)

    def holding(self, predicate: Callable) -> tuple[Any, tuple[bool, ...]]:
        """A predicate of the value, for each lane."""

        def holds(value):
            out = predicate(value)
            if isinstance(out, bool):
                out = np.bool_(out)
            if getattr(out, "shape", None) != () or out.dtype != bool:
                raise SowError(
                    f"The `when` of `tap` returned {out!r} for `sow(..., "
                    f"{self.site.name!r})` at {self.site.where}. It takes the value "
                    "and returns a single boolean: write `.any()` or `.all()`."
                )
            return out

        mapped = self.mapped(holds, "when")
        return mapped.arrays[0], mapped.has[0]

    def sendable(self) -> tuple[Const, tuple[Any, ...], list[Any], list[Any]]:
        """Arrays that NumPy knows, and what is left of the others."""
        arrays, leaves, has = [], [], []
        mine = iter(zip(self.arrays, self.has))
        for leaf in self.leaves:
            if leaf is OPERAND:
                x, h = next(mine)
                if x.dtype == jax.dtypes.float0:
                    leaf = NoTangent(x.shape[sum(h) :], x.dtype, x.dtype)
                else:
                    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                        x = jax.random.key_data(x)
                    arrays.append(x)
                    has.append(h)
            leaves.append(leaf)
        return self.treedef, tuple(leaves), arrays, has


# --- the transformation ---

# What a vmap does to a tapped program: it goes inside. The rule is all there is to it.
over_lanes_p = jexc.Primitive("tap_over_lanes")
over_lanes_p.multiple_results = True


def _over_lanes_batch(axis_data, operands, dims, *, run):
    return run.value(axis_data, operands, dims)


batching.fancy_primitive_batchers[over_lanes_p] = _over_lanes_batch


class _Tapped(Transformed):
    _fn: Callable
    # These may hold arrays.
    _transform: Any
    _when: Any
    _callback: Any = eqx.field(static=True)
    _options: Const = eqx.field(static=True)

    def _run(self, args, kwargs):
        options: Options = self._options.value
        program = trace(self._fn, args, kwargs, options.marking)
        return program.output(_evaluate(self, program, program.closed, program.inputs))

    def __call__(self, /, *args, **kwargs):
        try:
            return super().__call__(*args, **kwargs)
        except jax.errors.JaxRuntimeError as e:
            for failure in list(_failures):
                if str(failure) in str(e):
                    _failures.remove(failure)
                    raise failure from failure.__cause__
            raise


def _evaluate(self: _Tapped, program: Program, closed: Any, inputs: Sequence[Any]):
    jaxpr, consts = _compat.open_jaxpr(closed)
    operands = [*consts, *inputs]
    if not _compat.has_lanes(operands):
        return _walk(self, program, closed, inputs)

    def over_lanes(axis_data, operands, dims):
        dims_out: list[int | None] = []

        def batched(*operands):
            same: list[Any] = []

            def lane(*operands):
                outs = _compat.splice(
                    jaxpr, operands[: len(consts)], operands[len(consts) :]
                )
                dims_out[:] = [0 if _compat.has_lanes([x]) else None for x in outs]
                same[:] = outs
                return [x for x, d in zip(outs, dims_out) if d is not None]

            outs = iter(
                jax.vmap(
                    lane,
                    in_axes=tuple(dims),
                    axis_size=axis_data.size,
                    axis_name=axis_data.name,
                    spmd_axis_name=axis_data.spmd_name,
                )(*operands)
            )
            return [x if d is None else next(outs) for x, d in zip(same, dims_out)]

        with listening(Listening()):
            closed = jax.make_jaxpr(batched)(*operands)
        return _evaluate(self, program, closed, operands), dims_out

    return over_lanes_p.bind(*operands, run=Same(over_lanes))


def _walk(self: _Tapped, program: Program, closed: Any, inputs: Sequence[Any]):
    options: Options = self._options.value
    program = dc.replace(program, closed=closed)
    names, tag = options.names, options.tag
    nowhere: Any = None
    everything = [p for p in _places(closed, _Place(nowhere)) if p.site.tag == tag]
    known = dict.fromkeys(p.site.name for p in everything)
    check_known("tap(..., names=...)", names, known)
    program.check_called(known)
    if isinstance(self._transform, Mapping):
        check_known("tap(..., transform=...)", self._transform, known)
    places = [p for p in everything if names is None or matches(names, p.site.name)]
    mode_of = labels({p.site.key for p in places})
    check_modes("tap", options, mode_of.values())
    chosen = wanted(options, mode_of)
    places = [p for p in places if p.site.key in chosen]
    _check_order(closed, places)
    check_second_derivatives(program, options, chosen)
    counts = {p.slot: p.start() for p in places}
    handler = _Tap(
        tag=tag,
        chosen=tuple(chosen.items()),
        ran=frozenset(
            (p.site.key, (*p.calls, p.site.origin))
            for p in places
            if p.inside.replayed(p.site) is None
        ),
        elsewhere=frozenset(p.site.name for p in places if not p.solver),
        slots=tuple(counts),
        callback=self._callback,
        transform=Same(self._transform),
        when=Same(self._when),
        every=options.every,
        in_order=options.ordered,
        has_outer=listening.value is not None,
        devices=jax.sharding.get_abstract_mesh().manual_axes,
    )
    carry = {str(i): count for i, count in enumerate(counts.values())}
    outs, _ = program.evaluate(handler, Given(carry), *inputs)
    return outs


def _check_order(closed: Any, places: Sequence[_Place]) -> None:
    """Raises if the order of the executions of a name was lost."""
    for p in places:
        key = p.site.key
        if all(a.lane for a in p.site.axes) or _at_once(closed, key) == 1:
            continue
        if _in_different_branches([q.site for q in places if q.site.key == key]):
            continue
        raise SowError(
            f"`tap`: {key[0]!r} is sown in several places, and its value at "
            f"{p.site.where} is the same in each iteration of a loop, so JAX moved it "
            "out of the loop: the order of the executions is lost. Give that sow a "
            "name of its own."
        )


def _in_different_branches(sites: Sequence[Site]) -> bool:
    """Whether the sites are in branches of one cond under a vmap, each in its own: no
    lane comes by two of them."""
    branches = [{cond: branch for cond, branch, _ in s.guards} for s in sites]
    shared = set(branches[0]).intersection(*branches)
    return any(len({b[cond] for b in branches}) == len(sites) for cond in shared)


def _at_once(x: Any, key: Any) -> int:
    """At how many places one run goes past a sow with this key: one branch counts."""
    total = 0
    for eqn in _compat.open_jaxpr(x)[0].eqns:
        if is_plain(eqn) or not has_sow(eqn):
            continue
        if eqn.primitive is sow_p:
            total += eqn.params["site"].key == key
            continue
        inside = [_at_once(j, key) for j in jaxprs_in(eqn.params)] or [0]
        branches = eqn.primitive is jexc.primitives.cond_p
        total += max(inside) if branches else sum(inside)
    return total


_unset: Any = object()
_FUNCTIONS = types.FunctionType, types.MethodType, types.BuiltinFunctionType


def tap(
    fn: Callable = _unset,
    callback: Callable[[TapEvent], Any] | None = None,
    *,
    tag: Hashable = "intermediates",
    names: str | Sequence[str] | Callable[[str], bool] | None = None,
    modes: str | Sequence[str] | None = None,
    capture: Any = None,
    methods: str | Sequence[str] = ("__call__",),
    inputs: bool = False,
    scope: bool = False,
    transform: Callable | Mapping[str, Callable] | None = None,
    when: Callable[[Any], Any] | None = None,
    every: int = 1,
    ordered: bool = False,
) -> Callable:
    """Shows what is sown in a function while it runs.

    The law: `tap(fn)` computes what `fn` does, and so do its gradients. The events of
    one name and mode, in order, are what `save_intermediates(fn)` stacks.

    **Arguments:**

    - `fn`: a function, a model, or a transformed function such as
        `eqx.filter_grad(loss)` or `eqx.filter_jit(model)`. Without it this returns a
        decorator.
    - `callback`: a function of an [`eqx_sow.TapEvent`][], called on the host each time
        that a selected sow runs, while the program goes on. Without one, each event is
        printed as one line: name, mode, count, shape, and the statistics of
        [`eqx_sow.tabulate`][].
    - `tag`, `names`, `modes`, `capture`, `methods`, `inputs`, `scope`: as in
        [`eqx_sow.save_intermediates`][]. Cotangents arrive while the backward pass
        runs, backward in time.
    - `transform`: a function of the value, or a dict of names or globs to functions,
        that is applied on the device where the value is sown: only its result goes to
        the host.
    - `when`: a function of the value as it is sown, before `transform`, that returns a
        single boolean. It is evaluated on the device; where it is false, nothing goes
        to the host. Under `vmap` it sees one lane, and the value of all lanes is sent
        if it is true for any.
    - `every`: only each `every`-th execution of a name and mode, beginning with the
        first. Nothing of the others goes to the host, nor is `when` evaluated.
    - `ordered`: events come in the order of the program, also those of different names,
        as with `jax.debug.callback(..., ordered=True)`, and with the limits that JAX
        has for this, such as programs on a single device. Without it, those of one sow
        in a loop come in order on a CPU; otherwise events may overtake each other, and
        `event.count` tells.

    **Returns:**

    A function with the signature and the output of `fn`. A tapped sow is still a sow:
    `save_intermediates(tap(fn))` captures it, and several taps see it. What
    `save_intermediates` inside `fn` takes, `tap` does not see.

    Like `eqx.filter_vmap`, what is returned is a PyTree whose leaves are those of `fn`,
    and it can be used as a decorator of methods.

    All lanes of a `vmap` are one event, whether it is `tap(vmap(fn))` or
    `vmap(tap(fn))`. A sow that a backward pass computes again is not an event; its
    cotangent is one. In a `jax.shard_map` there is an event for each device, and
    `event.device` says which. A `tap` that is called within a branch of a `cond` sees
    all lanes of a later `vmap` over it, as `jax.debug.callback` does: tap the whole
    function instead.

    The callback must be fast, for the program may wait for it, and it must not call
    JAX, which may wait for the program. `jax.effects_barrier()` waits until all
    callbacks have been called.

    An exception in the callback ends the run. What is raised is an
    [`eqx_sow.SowError`][] that names the sow, with that exception as its cause; or,
    where only JAX notices (under a `jax.jit` around the `tap`, or when the result is
    awaited), a `jax.errors.JaxRuntimeError` whose text tells the same. Catch exceptions
    in the callback if watching a run must never end it.

    **Raises:**

    `TypeError` and `ValueError` if an option is not of the kind above. When called,
    [`eqx_sow.UnknownSowError`][] if an option selects nothing,
    [`eqx_sow.UnsupportedPrimitiveError`][] if a value cannot be had where it is sown,
    and [`eqx_sow.SowError`][] if it cannot be told when, or in which lanes, a sow runs.

    !!! example

        ```python
        import eqx_sow
        import jax
        import jax.numpy as jnp

        def fn(x):
            def body(i, x):
                return eqx_sow.sow(x / 2, "x")
            return jax.lax.fori_loop(0, 100, body, x)

        def progress(event):
            print(f"{event.name} is {event.value} after {event.count} iterations")

        out = eqx_sow.tap(fn, progress, every=20)(1.0)

        # An alarm for what is not finite, and where it was first:
        not_finite = lambda x: ~jnp.isfinite(x).all()
        out = eqx_sow.tap(jax.grad(fn), when=not_finite)(1.0)
        ```
    """
    options = {k: v for k, v in locals().items() if k not in ("fn", "callback")}
    if fn is _unset:
        return lambda fn: tap(fn, callback, **options)
    static, arrays = opt.checked("tap", fn, options)
    if not (callback is None or callable(callback)):
        raise TypeError(
            f"`tap(fn, callback)` takes a function of an event, not {callback!r}."
        )
    callback = _print if callback is None else callback
    # What may hold arrays is not compared.
    kind = Const if isinstance(callback, _FUNCTIONS) else Same
    arrays = arrays["transform"], arrays["when"]
    return wrap(_Tapped, fn, *arrays, kind(callback), Const(static))
