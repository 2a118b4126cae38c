"""The handler of `plant`, and the arrays that it holds."""

import contextlib
import dataclasses as dc
import functools as ft
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import PartitionSpec

from .. import _compat
from .._arrays import leading, one_along, sharded_like, whole_along
from .._errors import calling, SowError
from .._mark.primitive import edge_value, sow_p
from .._mark.site import Axis, Site
from .._mark.static import Const, OPERAND, rebuild, SameParts
from .._values import entry as _entry, merge as _merge
from .._values.entry import Entry
from .._walk.frame import Frame
from .._walk.handler import check_guarded, Handler
from .._walk.rules.control_flow import alike
from .._walk.sows import loops_of, sites, sows
from .asked import reached
from .collect import leave_to_others, pass_by


@dc.dataclass(frozen=True)
class Replace(Handler):
    """Replaces what is sown. All go by `Site.key`: of what is `planted` there, the last
    one counts. `Given.values` has its arrays."""

    tag: Any
    planted: tuple[tuple[Any, tuple["Planted", ...]], ...]
    has_outer: bool

    @ft.cached_property
    def _planted(self) -> dict[Any, tuple["Planted", ...]]:
        return dict(self.planted)

    @property
    def cacheable(self):
        return not any(
            isinstance(x.new, SameParts) for _, xs in self.planted for x in xs
        )

    def wants(self, site):
        return site.tag == self.tag and site.key in self._planted

    @ft.cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(name for name, *_ in self._planted)

    def _is_planted(self, site):
        """Whether this or another mode of it is planted."""
        return site.tag == self.tag and site.name in self._names

    def keeps_intact(self, eqn):
        return self.has_outer and not any(map(self._is_planted, sites(eqn)))

    def changes_inside(self, eqn):
        return any(map(self.wants, sites(eqn)))

    def sow(self, found, given, site: Site, atoms, frame: Frame):
        del found
        n_guards = len(site.guards)
        # A planted site is still a site, whoever marked it.
        is_marked = site.label.depth > 0 and self._is_planted(site)
        still = site.for_all() if is_marked else site
        if not self.wants(site):
            if still is not site and self.has_outer:
                leave_to_others(still, frame)
            else:
                pass_by(self, atoms, frame)
            return given
        check_guarded(site)
        old = frame.read_arrays(atoms)
        guards, old = old[:n_guards], old[n_guards:]
        new, index = old, given.iterations
        for planted, arrays in zip(self._planted[site.key], given.values[site.key]):
            compute = ft.partial(_new, planted, arrays, site, guards, old, index)
            new = _only_at(planted.at, index, compute, new, site)
        new = [*guards, *new]
        new = [edge_value(frame.eqn.outvars[0].aval), *new]
        if self.has_outer:
            (edge,) = frame.read(frame.eqn.invars[:1])
            new = sow_p.bind(edge, *new[1:], site=still)
        frame.set(frame.eqn.outvars, new)
        return given

    def needs_iterations(self, jaxpr):
        inside = (self._planted[s.key] for s in sites(jaxpr) if self.wants(s))
        return any(p.with_index or p.at for planted in inside for p in planted)

    def slices_for_scan(self, values, jaxpr):
        inside = {}
        for site, eqns, _ in sows(jaxpr):
            if not self.wants(site):
                continue
            within = loops_of(eqns)
            scans = sum(loop.length is not None for loop in within)
            # How many of the axes that it has are of loops around this one.
            outside = sum(not a.lane and a.loops > len(within) for a in site.axes)
            slices = inside[site.key] = []
            for planted, arrays in zip(self._planted[site.key], values[site.key]):
                has = planted.has_axis_of_scan(scans, site)
                slices.append([jnp.moveaxis(x, outside, 0) for x in arrays if has])

        def put_back(xs):
            new = {k: [x or y for x, y in zip(xs[k], values[k])] for k in xs}
            return {**values, **new}

        return inside, put_back

    def slices_for_devices(self, values, jaxpr, devices):
        keys = {s.key for s in sites(jaxpr) if self.wants(s)}
        inside = {k: values[k] for k in keys}
        spec = lambda p: PartitionSpec(*[a.mesh for a in p.axes if a.mesh in devices])
        specs = {k: list(map(spec, self._planted[k])) for k in keys}

        def put_back(xs):
            # No others: what a `shard_map` closes over is not sharded inside.
            return {
                k: [
                    [x.reshape(x.shape[len(spec) :]) for x in arrays]
                    for spec, arrays in zip(specs[k], xs[k])
                ]
                for k in xs
            }

        return inside, put_back, specs


@dc.dataclass(frozen=True)
class Planted:
    """One of `values`, for one `Site.key`. `new` is the site that its arrays are for,
    or a function of the value; if it is called `with_index`, of the value and
    `Given.iterations`. The first axes of the arrays are those of the loops still around
    the walk.

    With `at`, this is for one iteration only, of those of the scans around for which
    it is not `None`. Its arrays lack the axes of these.
    """

    new: Site | SameParts
    at: tuple[int | None, ...] = ()
    with_index: bool = False

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.new.axes if isinstance(self.new, Site) else ()

    def has_axis_of_scan(self, within: int, site: Site) -> bool:
        """Whether the arrays have an axis for a scan, which has so many others within
        it around the sow."""
        if self.at and not all(a.lane for a in site.axes):
            raise _moved(site)
        return not self.at or self.at[-1 - within :][0] is None


def _moved(site: Site) -> SowError:
    return SowError(
        f"`plant`: `sow(..., {site.name!r})` at {site.where} has the same value in "
        "each iteration, so JAX moved it out of the loop when it differentiated the "
        "program, and iterations cannot be told apart there. Plant before you "
        "differentiate: `eqx.filter_grad(plant(fn, ...))`."
    )


def _new(
    planted: Planted,
    arrays: Sequence[Any],
    site: Site,
    guards: list,
    old: list,
    index: tuple[Any, ...],
) -> list[Any]:
    if isinstance(planted.new, Site):
        new = _at_site(site, guards, arrays, planted.new)
        # What was captured there is equal, which cannot be seen while it is traced.
        _check_fixed(site, old, new, unknown=True)
        return new
    if not planted.with_index:
        return _apply(planted.new.value, site, old)
    if not all(a.lane for a in site.axes):
        raise _moved(site)
    fn = planted.new.value
    return _apply(lambda value: fn(value, index), site, old)


def _only_at(
    at: tuple[int | None, ...],
    index: tuple[Any, ...],
    compute: Callable[[], list[Any]],
    other: list[Any],
    site: Site,
) -> list[Any]:
    """What is computed in one iteration, and elsewhere the other."""
    if not at:
        return compute()
    if len(at) != len(index):
        raise _moved(site)
    # Not `where`: elsewhere a function may have a gradient that is not finite.
    changes = [
        i
        for i, x in enumerate(other)
        if i not in site.fixed and x.dtype != jax.dtypes.float0
    ]
    pick = lambda values: [values[i] for i in changes]
    first, second = alike([lambda _: pick(compute()), lambda xs: xs], pick(other))
    chosen = jax.lax.cond(reached(at, index), first, second, pick(other))
    new = dict(zip(changes, chosen))
    return [new.get(i, x) for i, x in enumerate(other)]


def _check_fixed(
    site: Site, old: Sequence[Any], new: Sequence[Any], unknown: bool
) -> None:
    """`unknown`: whether an array of which nothing is known will do."""
    for x, y in ((old[i], new[i]) for i in site.fixed):
        known = not any(isinstance(z, jax.core.Tracer) for z in (x, y))
        if x is not y and not (np.array_equal(x, y) if known else unknown):
            raise SowError(
                f"`plant`: at `sow(..., {site.name!r})` ({site.where}) there is a "
                "NumPy array, with which the program goes on whatever is planted. Sow "
                "a JAX array, `jnp.asarray(...)`, to replace it."
            )


def _at_site(site: Site, guards: list, arrays: Sequence[Any], form: Site) -> list[Any]:
    """The operands of a sow, from arrays that have all the axes of the form."""
    # A sow that was moved out of its loop still has the axis of it, first of all.
    hoisted = sum(not a.lane for a in site.axes)
    lanes = [a for a in form.axes if a.lane]
    own = tuple(a._replace(loops=0) for a in site.axes if a.lane)
    own = site._replace(axes=own)
    runs = jnp.ones((1,) * (hoisted + len(lanes)), bool)
    for i, x in enumerate(_entry.runs(site, guards)):
        has = [False] * hoisted + list(_merge.placed(own, lanes, i))
        runs = runs & x[tuple(slice(None) if h else None for h in has)]
    pairs = [pair for pair in zip(form.leaves, site.leaves) if pair[0] is OPERAND]
    # Another branch may differentiate leaves that this one does not.
    arrays = [x for x, (_, leaf) in zip(arrays, pairs) if leaf is OPERAND]
    new = []
    for i, x in enumerate(arrays):
        at, here = 0, runs
        keep = [False] * hoisted + list(_merge.placed(own, lanes, len(guards) + i))
        for k in keep:
            if k:
                at += 1
            else:
                x = _same_along(x, at, here, site)
                here = jnp.any(here, axis=at)
        new.append(x)
    return new


def _same_along(x, axis: int, runs, site: Site):
    """The one value along an axis, as far as the sow `runs`."""
    if x.shape[axis] == 1:
        return one_along(x, axis)
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    data = jax.random.key_data(x) if is_key else x
    data = whole_along(data, axis)
    runs = leading(whole_along(runs, axis), data.ndim)
    at = jnp.argmax(runs, axis, keepdims=True)
    one = jnp.take_along_axis(data, at, axis)
    if _compat.varying(one):
        # A device that fails alone would leave the others waiting.
        raise SowError(
            f"`plant`: `sow(..., {site.name!r})` at {site.where} has one value for all "
            "entries of an axis. Whether a planted value varies along it cannot be "
            "checked in a `jax.shard_map`. Plant a function, or plant before you "
            "differentiate: `eqx.filter_grad(plant(fn, ...))`."
        )
    one = eqx.error_if(
        one,
        jnp.any(runs & (data != one) & ~((data != data) & (one != one))),
        f"`plant`: at `sow(..., {site.name!r})` ({site.where}) the program has one "
        "value for all entries of an axis: the planted value must not vary along it.",
    )
    one = jnp.squeeze(one, axis)
    return jax.random.wrap_key_data(one, impl=jax.random.key_impl(x)) if is_key else one


def _apply(fn: Callable, site: Site, values: Sequence[Any]) -> list[Any]:
    """`fn` of the value as the code at the sow sees it, for each lane."""
    n_guards = len(site.guards)
    has = [site.has(n_guards + i) for i in range(len(values))]

    def apply(*values):
        old = rebuild(site.treedef, site.leaves, values)
        new = _operands(fn(old), site, values, of_function=True)
        _check_fixed(site, values, new, unknown=False)
        return new

    with calling("planted function", site):
        return _entry.for_each_lane(apply, site.axes, has, has)(*values)


def _operands(
    value: Any, site: Site, like: Sequence[Any], of_function: bool = False
) -> list[Any]:
    """The arrays of a value that must look like what is sown, and they like `like`."""
    whose = "what the function returned" if of_function else "the value"
    value_for = f"`plant`: {whose} for `sow(..., {site.name!r})` at {site.where}"
    leaves, treedef = jtu.tree_flatten(value)
    if Const(treedef) != site.treedef:
        if of_function and value is None:
            raise SowError(
                f"`plant`: the function for `sow(..., {site.name!r})` at {site.where} "
                "returned None; did it forget `return`?"
            )
        raise SowError(
            f"{value_for} has the structure {treedef}, but {site.treedef.value} is "
            f"sown there. {'Return' if of_function else 'Plant'} a value of that "
            "structure."
        )
    new = []
    operand = iter(like)
    for leaf, x in zip(site.leaves, leaves):
        if leaf is not OPERAND:
            if isinstance(leaf, Const) and leaf != Const(x):
                raise SowError(
                    f"{value_for} has the static leaf {x!r}, but {leaf.value!r} is "
                    "sown there. Static leaves cannot be changed: plant that one."
                )
            continue
        old = next(operand)
        x = _as_jax_does(x, old.dtype)
        if not eqx.is_array(x) or (x.shape, x.dtype) != (old.shape, old.dtype):
            got = f"{x.dtype}{list(x.shape)}" if eqx.is_array(x) else repr(x)
            remedy = (
                "Return an array of that shape and dtype."
                if of_function
                else "Plant an array of that shape and dtype, or a function."
            )
            raise SowError(
                f"{value_for} has a leaf {got} where {old.dtype}{list(old.shape)} is "
                f"sown. {remedy}"
            )
        new.append(sharded_like(jnp.asarray(x), old))
    return new


def _as_jax_does(x: Any, dtype: Any) -> Any:
    """A NumPy array or a Python number as an array, if it can be one of the dtype."""
    # Such as strings; a number that is too large; any number for a key.
    with contextlib.suppress(TypeError, OverflowError):
        if isinstance(x, np.ndarray | np.generic):
            return jnp.asarray(x)
        if isinstance(x, bool | int | float | complex):
            with jax.numpy_dtype_promotion("standard"):
                if jnp.result_type(x, dtype) == dtype:
                    return jnp.asarray(x, dtype)
    return x


def prepare(value: Any, mode: str, entry: Entry) -> list[Any]:
    """The arrays of a planted value, the axes of loops first."""
    axes = entry.site.axes
    final = _entry.final_axes(entry.site, counted=False)
    like = [
        entry.with_lead(i, [a for a, h in zip(axes, has) if h])
        for i, has in enumerate(final)
    ]
    structure = Const(jtu.tree_structure(value))
    if structure != entry.site.treedef and isinstance(value, Mapping) and mode in value:
        value = value[mode]
    arrays = _operands(value, entry.site, like)
    loops = [i for i, a in enumerate(axes) if not a.lane]
    every = (True,) * len(axes)
    arrays = [_entry.align(x, has, every) for x, has in zip(arrays, final)]
    return [jnp.moveaxis(x, loops, range(len(loops))) for x in arrays]
