"""The state of a reducer on its way through a program."""

import dataclasses as dc
import functools as ft
import itertools as it
from collections.abc import Callable, Container, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._arrays import (
    at_index,
    broadcast_to,
    differentiable_where,
    mesh_inside,
    one_along,
    onto,
    sharded_along,
    sharded_like,
    spec_of,
    with_index,
    zeros_like,
)
from .._errors import calling
from .._mark.listening import listening
from .._mark.site import Axis, Site
from .._mark.static import Const, Form, OPERAND
from .._results.layers import Scan
from .axes import broadcast, kept_axes
from .entry import Entry, with_count
from .merge import different_axes, kinds_that_vary, unify, with_axes
from .reduce import Execution, Reducer


@jtu.register_dataclass
@dc.dataclass(frozen=True)
class ReducerState:
    """The state of a reducer for one name and mode.

    It goes through loops as part of their carry. `started` makes it, `stepped` takes it
    through one execution, and `result_of` makes of it what comes back. For `Buffer(4)`
    of a value `f32[3]` in a `vmap` of 8 lanes and any loops, `acc` is `[f32[8,4,3]]`
    and `count` is `i32[8]`. The layers of a stack have a state each, as those of a list
    have: if one of the loops is a scan over 12 layers, inside of the `vmap`, that is
    `[f32[8,12,4,3]]` and `i32[8,12]`.
    """

    # What the reducer returned last, for each lane and layer: leading axes for those of
    # `site`.
    # Only its leaves, so that JAX never compares what is static in there, for which it
    # would call `==` of users' classes.
    acc: list[Any]
    # How many executions there were, for each lane and layer.
    count: Any
    # The mark, of which only the axes of lanes and layers are left. Its last array is
    # the count.
    site: Site = dc.field(metadata=dict(static=True))
    # Whether any of the executions may not happen, so that the count comes back, too.
    conditional: bool = dc.field(metadata=dict(static=True))
    # The treedef of `acc`.
    structure: Const = dc.field(metadata=dict(static=True))
    # See `Entry`. The loops that were combined count as none.
    route: Scan = dc.field(metadata=dict(static=True))


def started(reducer: Reducer, entries: Sequence[Entry], eqn: Any) -> ReducerState:
    """The state before the first execution. `entries` are the shapes of what would be
    captured of the name and mode without a reducer, in each place, and `eqn` is the
    equation of the first one."""
    # Not those of vmaps that no value varies over: `batched` has seen all of their
    # lanes at once, and how many these are may differ from place to place.
    kinds = kinds_that_vary([e.site for e in entries])
    form = unify(_of_one_length([_with_lanes_and_layers(e, kinds) for e in entries]))
    site, axes = form.site, form.site.axes
    *values, count = map(zeros_like, form.with_only().arrays)
    named = site._replace(axes=entries[0].site.axes)
    no_name = "A reducer sees one lane. Reduce over all in a `transform`, before it."
    with calling("reducer that you passed as `reduce`", named, no_name=no_name):
        acc = _on_mesh_of(eqn, reducer, site, values)
        acc, structure = jtu.tree_flatten(acc)
    sizes, specs = tuple(a.size for a in axes), [a.spec for a in axes]
    acc, count = jtu.tree_map(
        lambda x: broadcast_to(x, (*sizes, *x.shape), specs), (acc, count)
    )
    conditional = any(e.counted for e in entries)
    return ReducerState(acc, count, site, conditional, Const(structure), form.route)


def _with_lanes_and_layers(e: Entry, kinds: Container[Any]) -> Entry:
    """The entry without the axes of loops, but of those over layers, and without those
    of vmaps of other kinds, as shapes."""
    label = e.site.label
    is_layer = lambda place: place is not None
    # Of each loop around, from outside in, whether it is over layers.
    over_layers = lambda: map(is_layer, it.chain(label.places, it.repeat(None)))
    of_scans, of_axes = over_layers(), over_layers()
    route = [(i, r if r is not None and next(of_scans) else None) for i, r in e.route]
    kept = [
        k
        for k, a in enumerate(e.site.axes)
        if (a.kind in kinds if a.lane else a.mesh is None and next(of_axes))
    ]
    e = e.with_only(kept)
    label = label._replace(places=tuple(k for k in label.places if k is not None))
    site = e.site._replace(labels=(label, *e.site.labels[1:]))
    return dc.replace(e, site=site, route=tuple(route))


def _of_one_length(entries: Sequence[Entry]) -> list[Entry]:
    """The entries with room for the layers of each: there may be several places of one
    name, with stacks of different lengths."""
    each = [[a.size for a in e.site.axes if not a.lane] for e in entries]
    if len({*map(len, each)}) > 1:
        # A `sow` may be called like all layers, `blocks/*`, and be in no loop.
        raise different_axes([e.site for e in entries])
    # Two symbolic lengths cannot be compared, but equal ones are one.
    sizes = [max({*of_all}) for of_all in zip(*each)]
    new = []
    for e in entries:
        size = iter(sizes)
        axes = [a if a.lane else a._replace(size=next(size)) for a in e.site.axes]
        new.append(e.replace(e.arrays, axes=axes))
    return new


def _on_mesh_of(eqn: Any, reducer: Reducer, site: Site, values: list[Any]) -> Any:
    """`reducer.start`, which may call a function of the user's, on the mesh of the
    mark. The state is on the mesh here."""
    here, mesh = jax.sharding.get_abstract_mesh(), mesh_inside(eqn)
    if mesh is None or reducer.keeps_structure:
        return reducer.start(site, values)
    with eqn.ctx.manager:
        acc = reducer.start(site, [onto(x, mesh, spec_of(x)) for x in values])
    # Inside, zeros like a value do not say how that is sharded here.
    specs = {x.shape: spec_of(x) for x in values}
    return jtu.tree_map(lambda x: onto(x, here, specs.get(x.shape, ())), acc)


def stepped(
    reducer: Reducer,
    state: ReducerState,
    entry: Entry,
    layer: Sequence[Any] = (),
    iteration: tuple[Any, ...] = (),
    here: Any = None,
    how: Literal["next", "opens", "fills"] = "next",
) -> ReducerState:
    """The state after one more execution, or if `here` is false, the same state.
    `layer` is the index in each stack of layers around, from outside in, and
    `iteration` that in each scan.

    If not each execution of a value has a derivative, the value `opens` a row for each,
    of zeros, in the state of the derivative, which then `fills` that row."""
    axes = state.site.axes
    lanes = [a for a in axes if a.lane]
    index = dict(zip([k for k, a in enumerate(axes) if not a.lane], layer))
    if here is not None:
        entry = with_count(entry)
        *arrays, count = entry.arrays
        entry = entry.replace([*arrays, jnp.where(here, count, 0)])
    own = [a._replace(n_loops=0) for a in entry.site.axes]
    one = with_axes(with_count(entry.replace(entry.arrays, axes=own)), lanes)
    every = (True,) * len(lanes)
    *values, run = [broadcast(x, every, lanes) for x in one.arrays]
    values = [] if how == "opens" else values

    def in_lane(acc, count, run, values):
        before = acc
        if how == "opens":
            values = [jnp.zeros_like(x[0]) for x in acc]
        after = count if how == "fills" else count + run
        count = count - 1 if how == "fills" else count
        if entry.counted:
            only_here = ft.partial(differentiable_where, run > 0)
            acc, values = jtu.tree_map(only_here, (acc, values))
        with listening(None):  # as in `transformed`
            tree = jtu.tree_unflatten(state.structure.value, acc)
            x = Execution(state.site, values, count, iteration)
            new = jtu.tree_leaves(reducer.step(tree, x))
        new = list(map(sharded_like, new, before))
        if entry.counted:
            new = [jnp.where(run > 0, x, y) for x, y in zip(new, before)]
        return new, after

    # On the mesh of the mark, other axes can be explicit than on the one around.
    specs = [a.spec for a in axes]
    every_layer = [sharded_along(x, specs) for x in (*state.acc, state.count)]
    *acc, count = old = [at_index(x, index) if index else x for x in every_layer]
    acc, count = _in_lanes(in_lane, lanes)(acc, count, run, values)
    # A value that is the same in all lanes comes back unsharded.
    new = list(map(sharded_like, (*acc, count), old))
    if index:
        new = [with_index(x, index, y) for x, y in zip(every_layer, new)]
    *acc, count = map(sharded_like, new, (*state.acc, state.count))
    return dc.replace(state, acc=acc, count=count)


def result_of(reducer: Reducer, state: ReducerState) -> Entry:
    """What comes back, as an entry. Behind the axes of lanes and layers, its arrays
    have those of `Reducer.lead`."""
    site, axes = state.site, state.site.axes
    kept = kept_axes(site)
    varies = site.varies[: site.form.n_operands]
    result, form = state.acc, Form(state.structure, (OPERAND,) * len(state.acc))
    result = _in_lanes(reducer.finish, axes)(result, state.count)
    if not reducer.keeps_structure:
        site = site._replace(form=form)
        varies = [kept] * len(result)
    counted = state.conditional or reducer.counts
    if counted:
        result, varies = [*result, state.count], [*varies, kept]

    def of_one_lane(x, varies):
        """Where all lanes are the same, one of them."""
        for k, v in enumerate(varies):
            x = x if v else one_along(x, k)
        return x

    arrays = tuple(map(of_one_lane, result, varies))
    site = site._replace(varies=tuple(varies))
    return Entry(arrays, site, counted, route=state.route)


def _in_lanes(fn: Callable, lanes: Sequence[Axis]) -> Callable:
    """`fn` of one lane, as a function of arrays that have all lanes in front."""
    for _ in lanes:
        fn = jax.vmap(fn)
    return fn
