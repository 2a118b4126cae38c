"""The handler of `tap`."""

import dataclasses as dc
import functools as ft
import itertools as it
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .. import _compat
from .._arrays import sharding_on
from .._errors import SowError
from .._mark.site import runs_apart, Site
from .._mark.static import Const, NoTangent, OPERAND, SameParts
from .._names import lookup
from .._values.entry import align, either, in_each_iteration, running, transformed
from .._walk.frame import Frame
from .._walk.handler import check_guarded, Handler, is_solver
from .._walk.sows import Found, loops_of, sites, sows
from .asked import Asked, reached
from .collect import leave_to_others, pass_by
from .events import Delivery, print_event
from .send import any_lane, only_if, send_p


class _MeshAxis(NamedTuple):
    name: Hashable
    size: int
    mesh: Any


class Place(NamedTuple):
    """A sow of a program. `mesh`: the axes of the `shard_map`s around it. `loops`: how
    many iterations those around have. `solver`: it is in a linear solver."""

    site: Site
    mesh: tuple[_MeshAxis, ...] = ()
    solver: bool = False
    loops: tuple[int | None, ...] = ()

    @property
    def slot(self) -> tuple[Any, tuple[Hashable, ...]]:
        return self.site.key, tuple(a.name for a in self.mesh)

    def start(self) -> Any:
        """The count before the first execution: one for each device."""
        shape = [a.size for a in self.mesh]
        names = [a.name for a in self.mesh]
        sharding = sharding_on(self.mesh[0].mesh, names) if names else None
        if sharding is None:
            return np.zeros(shape, np.int32)
        return jnp.zeros(shape, jnp.int32, out_sharding=sharding)


def places_in(x: Any) -> Iterator[Place]:
    """The places of the sows of a program."""
    for site, eqns, _ in sows(x):
        yield Place(
            site,
            mesh=tuple(it.chain.from_iterable(map(_mesh_axes, eqns))),
            solver=any(map(is_solver, eqns)),
            loops=tuple(loop.length for loop in loops_of(eqns)),
        )


def _mesh_axes(eqn: Any) -> tuple[_MeshAxis, ...]:
    """The axes over which an equation spreads what is inside it."""
    if eqn.primitive is not _compat.shard_map_p:
        return ()
    p = eqn.params
    mesh, manual = p["mesh"], p["newly_manual_axes"]
    axes = mesh.shape.items()
    return tuple(_MeshAxis(a, n, mesh) for a, n in axes if a in manual)


@dc.dataclass(frozen=True)
class Tap(Handler):
    """Sends the values of sows to the host.

    `chosen` has the `Site.key`s of these, and what their modes are called.
    `Given.carry` is a dict with a count for each place of `slots`: a key, and the mesh
    axes around it. `Given.values` are the arrays of the option `extra`, and `extra` is
    what else there is of it. `mesh` are the mesh axes around what is walked over.
    """

    options: Const
    asked: Asked
    chosen: tuple[tuple[Any, str], ...]
    elsewhere: frozenset[str]
    slots: tuple[tuple[Any, tuple[Hashable, ...]], ...]
    transform: SameParts
    when: SameParts
    extra: tuple[Const, tuple[Any, ...]]
    has_outer: bool
    mesh: tuple[Hashable, ...] = ()

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
        _, *key = site.key
        return site.tag == self.options.value.tag and any(
            (x.name, *key) in self._modes for x in self.asked.perhaps(site)
        )

    def needs_iterations(self, jaxpr):
        return self.asked.iterations_in(jaxpr, self.options.value.tag)

    def keeps_intact(self, eqn):
        return self.has_outer and not any(map(self.wants, sites(eqn)))

    def for_inside(self, eqn):
        axes = [a.name for a in _mesh_axes(eqn)]
        asked = self.asked.within(eqn)
        if not axes and asked == self.asked:
            return self
        return dc.replace(self, mesh=(*self.mesh, *axes), asked=asked)

    def meet_unknown(self, found, eqn):
        inside = [s.name for s in sites(eqn) if self.wants(s)]
        # Who solves evaluates the function elsewhere too.
        if not is_solver(eqn) or not self.elsewhere.issuperset(inside):
            super().meet_unknown(found, eqn)

    def carry_for_devices(self, carry):
        inside = {
            str(i): carry[str(i)]
            for i, (_, mesh) in enumerate(self.slots)
            if mesh[: len(self.mesh)] == self.mesh
        }
        return inside, lambda new: {**carry, **new}

    def slices_for_devices(self, values, jaxpr, devices):
        return values, lambda xs: xs, [PartitionSpec()] * len(values)

    def sow(self, found, given, site: Site, atoms, frame: Frame):
        # Who has marked the same module may plant there.
        shared = self.has_outer and bool(site.labels[1:])
        now = leave_to_others(site, frame) if shared else atoms
        if self.wants(site) and not site.again:
            check_guarded(site)
            operands = frame.read_arrays(now)
            frame.flush_effects()
            transform = lookup(self.transform.value, site.name)
            for one, at in self.asked.of(site):
                if one.key not in self._modes:
                    continue
                # Its count is carried under this key.
                slot = str(self.slots.index((one.key, self.mesh)))
                mine = lookup(self.transform.value, one.name) or transform
                here = reached(at, given.iterations)
                send = ft.partial(self._send, one, operands, given.values, mine, here)
                count = in_each_iteration(one, send, given.carry[slot])
                given = given._replace(carry={**given.carry, slot: count})
        if not shared:
            pass_by(self, atoms, frame)
        return given

    def _send(
        self,
        site: Site,
        operands: Sequence[Any],
        extra: Sequence[Any],
        transform: Any,
        here: Any,
        count: Any,
    ) -> Any:
        """Sends one execution, if it is to be sent and is `here`. Returns the count
        after it."""
        # `ran`: in which lanes, if a condition differs between these.
        n = len(site.guards)
        values, has = operands[n:], [site.has(i) for i in range(n, len(operands))]
        ran, ran_has = running(site, operands) if n else (None, ())
        executed = here if ran is None else any_lane(ran) & here

        def send():
            devices = jax.sharding.get_abstract_mesh().manual_axes
            indices = map(jax.lax.axis_index, devices)
            new = site.treedef, site.leaves, values, has
            if transform is not None:
                new = transformed(transform, site, values, has)
            printed = self.options.value.callback.value is print_event
            treedef, leaves, arrays, array_has = _sendable(*new, printed)
            if ran is not None:
                arrays, array_has = [ran, *arrays], [ran_has, *array_has]
            none = [(False,) * len(site.axes)] * len(extra)
            *form, more, more_has = _sendable(*self.extra, extra, none, False)
            delivery = Delivery(
                self.options.value.callback,
                site.name,
                self._modes[site.key],
                site.where,
                treedef,
                leaves,
                tuple(a.size for a in site.axes),
                (*more_has, *array_has),
                ran is not None,
                tuple(form),
                devices,
                self.options.value.ordered,
            )
            send_p.bind(count, *indices, *more, *arrays, delivery=delivery)

        def send_when():
            predicate = self.when.value
            if predicate is None:
                return send()
            holds = _single(predicate, site)
            *_, [holds], [holds_has] = transformed(holds, site, values, has, "when")
            if ran is not None:
                both = either(holds_has, ran_has)
                holds = align(holds, holds_has, both) & align(ran, ran_has, both)
            only_if(any_lane(holds), send)

        # First `every`, then `when`, then the transform: what is not due costs nothing.
        due = executed
        if (every := self.options.value.every) > 1:
            due = due & (count % np.int32(min(every, 2**31 - 1)) == 0)
        only_if(due, send_when)
        return count + executed.astype(np.int32)


def _single(predicate: Callable, site: Site) -> Callable:
    """The predicate, which must return a single boolean."""

    def holds(value):
        out = predicate(value)
        if isinstance(out, bool):
            out = np.bool_(out)
        if getattr(out, "shape", None) != () or out.dtype != bool:
            raise SowError(
                f"The `when` of `tap` returned {out!r} for `sow(..., {site.name!r})` "
                f"at {site.where}. It takes the value and returns a single boolean: "
                "write `.any()` or `.all()`."
            )
        return out

    return holds


def _sendable(
    treedef: Const, leaves: Any, values: Any, has: Any, printed: bool
) -> tuple[Any, ...]:
    """Arrays that NumPy knows, and what is left of the others: of a key, if it is to be
    `printed`, its type."""
    new_leaves, new, new_has = [], [], []
    mine = iter(zip(values, has))
    for leaf in leaves:
        if leaf is OPERAND:
            x, h = next(mine)
            if x.dtype == jax.dtypes.float0:
                leaf = NoTangent(x.shape[sum(h) :], x.dtype, x.dtype)
            elif not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                new.append(x)
                new_has.append(h)
            elif printed:
                leaf = Const(jax.ShapeDtypeStruct(x.shape, x.dtype))
            else:
                new.append(jax.random.key_data(x))
                new_has.append(h)
        new_leaves.append(leaf)
    return treedef, tuple(new_leaves), new, new_has


# --- the order of executions ---
def check_order(closed: Any, places: Sequence[Place]) -> None:
    """Raises if the order of the executions of a name was lost."""
    for p in places:
        key = p.site.key
        if runs_apart(p.site):
            raise SowError(
                f"`tap`: {key[0]!r} at {p.site.where} is in a loop that is the same in "
                "each iteration of another one, so JAX moved the inner loop out of the "
                "outer one: the order of the executions is lost. Tap the other names, "
                "`tap(..., names=...)`, or tap before you differentiate."
            )
        if all(a.lane for a in p.site.axes) or _runs_alone(closed, p.site):
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


def _runs_alone(closed: Any, site: Site) -> bool:
    """Whether one run of a program goes past one sow like this: all others are in other
    branches of a cond."""
    key = site.key, site.tag
    alike = [x for x in sows(closed) if (x.site.key, x.site.tag) == key and x.path]
    return all(_in_other_branches(x, y) for x, y in it.combinations(alike, 2))


def _in_other_branches(x: Found, y: Found) -> bool:
    """Whether the ways to two sows part at the branches of a cond."""
    pairs = enumerate(zip(x.path or (), y.path or ()))
    part = next(i for i, (a, b) in pairs if a != b)
    # Indices of equations and numbers of jaxprs take turns.
    is_branch = part % 2 == 1
    return is_branch and x.eqns[part // 2].primitive is jexc.primitives.cond_p
