"""The handler of `tap`."""

import dataclasses as dc
import functools as ft
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._arrays import sharding_on
from .._errors import SowError
from .._mark.site import Site
from .._mark.static import Const, SameParts
from .._values.axes import aligned
from .._values.entry import captured, in_front, running, value_of
from .._values.transform import Batched, transformed, Value
from .._walk.frame import Frame
from .._walk.handler import check_guarded, Given
from .._walk.sows import sites
from .asked import leave, Listens, reached
from .events import all_lanes, any_lane, only_if, send


def first_count(site: Site, eqns: Sequence[Any]) -> tuple[Any, Any]:
    """Of a sow, to which these equations lead: the key of its count, which has the mesh
    axes of the `shard_map`s around, as each device counts for itself; and the count of
    each before the first execution."""
    spread = [(a, eqn.params["mesh"]) for eqn in eqns for a in _mesh_axes(eqn)]
    zeros = np.zeros([mesh.shape[a] for a, mesh in spread], np.int32)
    sharding = sharding_on(spread[0][1], [a for a, _ in spread]) if spread else None
    if sharding is not None:
        zeros = jnp.zeros(zeros.shape, zeros.dtype, out_sharding=sharding)
    return (site.key, tuple(str(a) for a, _ in spread)), zeros


def _mesh_axes(eqn: Any) -> list[Hashable]:
    """The axes over which an equation spreads what is inside it, in mesh order."""
    if eqn.primitive is not _compat.shard_map_p:
        return []
    manual = eqn.params["newly_manual_axes"]
    return [a for a in eqn.params["mesh"].shape if a in manual]


@dc.dataclass(frozen=True, kw_only=True)
class Tap(Listens):
    """Sends the values of sows to the host. `Given.carry` has the counts: there is one
    for each `Site.key` and the mesh axes around. `Given.values` are the arrays of the
    option `extra`."""

    options: Const
    when: SameParts
    # The treedef and the leaves of the option `extra`.
    extra: tuple[Const, tuple[Any, ...]]
    # The `Site.key`s of what is sent, and what their modes are called.
    chosen: tuple[tuple[Any, str], ...] = ()
    # The mesh axes around what is walked over.
    mesh: tuple[str, ...] = ()

    @property
    def differentiable(self):
        return self.has_outer

    @ft.cached_property
    def _modes(self) -> dict[Any, str]:
        return dict(self.chosen)

    @property
    def cacheable(self):
        return super().cacheable and self.when.value is None

    def wants(self, site):
        _, *key = site.key
        return site.tag == self.tag and any(
            (x.name, *key) in self._modes for x in self.selected(site)
        )

    def keeps_intact(self, eqn):
        return self.has_outer and not any(map(self.wants, sites(eqn)))

    def for_inside(self, eqn):
        inside = super().for_inside(eqn)
        mesh = (*self.mesh, *map(str, _mesh_axes(eqn)))
        return inside if mesh == self.mesh else dc.replace(inside, mesh=mesh)

    def carry_for_devices(self, carry):
        n = len(self.mesh)
        inside = {slot: x for slot, x in carry.items() if slot[1][:n] == self.mesh}
        return inside, lambda new: {**carry, **new}

    def sow(self, found, given, site: Site, atoms, frame: Frame):
        left = leave(self, site, atoms, frame)
        # A `plant` further out that marked the same module may replace the value.
        now = left if site.labels[1:] else atoms
        if not self.wants(site) or site.again:
            return given
        check_guarded(site)
        site, operands = in_front(site, frame.read_arrays(now))
        frame.flush_effects()
        for one, at in self.asked(site, self.loops):
            if one.key in self._modes:
                transform = self.transform_of(site, one)
                given = self._send(one, operands, transform, at, given)
        return given

    def _send(
        self,
        site: Site,
        operands: Sequence[Any],
        transform: Any,
        at: tuple[int | None, ...],
        given: Given,
    ) -> Given:
        """Sends one execution, if it is asked for, and is due, and counts it."""
        slot = site.key, self.mesh
        count = given.carry[slot]
        extra = Value(*self.extra, given.values, [()] * len(given.values))
        is_asked = reached(at, given.iterations)
        # In which lanes, if a condition differs between these.
        run, _ = running(site, operands)
        executed = is_asked if run is None else any_lane(run) & is_asked
        options = self.options.value

        def send_it():
            whole = isinstance(transform, Batched)
            seen = all_lanes(site, operands) if whole else operands
            entry = captured(site, seen, transform)
            send(count, entry, extra, self._modes[site.key], options)

        def send_when():
            predicate = self.when.value
            if predicate is None:
                return send_it()
            value = value_of(site, operands)
            value = transformed(_single(predicate, site), site, value, "when")
            holds = aligned(value.arrays[0], value.varies[0])
            only_if(any_lane(holds if run is None else holds & run), send_it)

        # First `every`, then `when`, then the transform: what is not due costs nothing.
        due = executed
        if (every := options.every) > 1:
            due = due & (count % np.int32(min(every, 2**31 - 1)) == 0)
        only_if(due, send_when)
        count = count + executed.astype(np.int32)
        return given._replace(carry={**given.carry, slot: count})


def _single(predicate: Callable, site: Site) -> Callable:
    """The predicate, which must return a single boolean."""

    def holds(value):
        out = predicate(value)
        if isinstance(out, bool):
            out = np.bool_(out)
        if getattr(out, "shape", None) != () or out.dtype != bool:
            raise SowError(
                f"The `when` of `tap` returned {out!r} for {site.said}. It takes the "
                "value and returns a single boolean: write `.any()` or `.all()`."
            )
        return out

    return holds
