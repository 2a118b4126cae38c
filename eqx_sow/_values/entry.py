"""What has been captured of one name and mode so far, on its way out of a program.

The arrays of an `Entry` keep only the axes that they really vary over. `Site.axes` says
which axes the entry has in all; they are filled in once, at the very end.

An example: a vmap of 2 lanes in a scan of 3 iterations in a vmap of 5 lanes,

    def f(x):                                            # under vmap, 5 lanes
        def body(c, _):                                  # 3 iterations
            jax.vmap(lambda y: sow((c, y), "a"))(ys)     # 2 lanes
            return jnp.sin(c), None
        return lax.scan(body, x, None, length=3)

where `c` varies over the outer lanes and `y` over the inner ones. As JAX traces it,
the inner vmap comes first. It gives the sow `Axis(2, has=(False, True), loops=0)`. The
outer vmap batches the scan, and the sow inside as part of that: its axis, of which
`loops=1` says that a loop is between it and the sow, goes in front, `Axis(5, has=(True,
False), loops=1)`. So the operands are `c[5]` and `y[2]`, and the axes are (5, 2).

When the walk leaves the scan, each array has a new leading axis: `c[3, 5]`, `y[3, 2]`.
`stacked` moves it inside the axes that are outside of the loop (those with `loops >
0`, which count one less now): `c[5, 3]`, `y[3, 2]`, and the axes are (5, 3, 2), as the
program is nested. At the end `full` fills in what is missing: both are `[5, 3, 2]`.
"""

import dataclasses as dc
import functools as ft
import itertools as it
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import jax.tree_util as jtu

from .. import _compat
from .._arrays import broadcast_to, select, shape_like, spec_of
from .._errors import calling, SowError
from .._mark.site import Axis, Cases, out_of_loop, Site, with_has
from .._mark.static import Const, NoTangent, OPERAND, rebuild, take_apart
from .._results.intermediates import Axis as NamedAxis, Leading, Scan
from .batched import all_lanes_p, Batched
from .modes import is_backward


@jtu.register_dataclass
@dc.dataclass(frozen=True)
class Entry:
    """What was captured, and the site as it would be if `arrays` were its operands.

    If `counted`, the last array is the count: how many times the sow ran. `cases` has
    those of each sow that the entry was made of; once that is `captured`, the site has
    none any more. `route` leads to the equation of the sow: of each equation around it,
    from outside in, the index, and whether it is a scan (`reverse`, or `None` if not).
    """

    arrays: tuple[Any, ...]
    site: Site = dc.field(metadata=dict(static=True))
    counted: bool = dc.field(default=False, metadata=dict(static=True))
    cases: tuple[Cases, ...] = dc.field(default=(), metadata=dict(static=True))
    route: Scan = dc.field(default=(), metadata=dict(static=True))
    # Of each scan that is still around it, from outside in, which iteration alone is
    # kept, or `None` for all; empty if all are kept of all.
    at: tuple[int | None, ...] = dc.field(default=(), metadata=dict(static=True))

    def core_shape(self, i: int) -> tuple[int, ...]:
        """The shape of array `i` without its leading axes."""
        return self.site.shape(i, self.arrays[i].shape)

    def core_spec(self, i: int) -> tuple[Any, ...]:
        """Over which mesh axes the axes of `core_shape` are sharded."""
        return spec_of(self.arrays[i])[sum(self.site.has(i)) :]

    def with_lead(self, i: int, axes: Sequence[Axis]) -> jax.ShapeDtypeStruct:
        """The shape of array `i` with these leading axes in the place of its own."""
        shape = (*(a.size for a in axes), *self.core_shape(i))
        spec = (*(a.spec for a in axes), *self.core_spec(i))
        return shape_like(self.arrays[i], shape, spec)

    def replace(self, arrays: Sequence[Any], axes: Sequence[Axis]) -> "Entry":
        site = self.site._replace(axes=tuple(axes))
        return dc.replace(self, arrays=tuple(arrays), site=site)

    def without_axes(self, which: Sequence[int]) -> "Entry":
        """An entry, as shapes, of one place along these axes."""
        axes = [a for k, a in enumerate(self.site.axes) if k not in which]
        shapes = [
            self.with_lead(i, [a for a in axes if a.has[i]])
            for i in range(len(self.arrays))
        ]
        return self.replace(shapes, axes)


def grouped(
    entries: Sequence[Entry], key: Callable[[Site], Any] = lambda site: site.key
) -> dict[Any, list[Entry]]:
    found: dict[Any, list[Entry]] = {}
    for e in entries:
        found.setdefault(key(e.site), []).append(e)
    return found


def align(x, has: Sequence[bool], want: Sequence[bool]):
    """Gives `x` an axis of size one wherever it has none of the axes in `want`."""
    index = tuple(slice(None) if h else None for h, w in zip(has, want) if h or w)
    return x if all(h or not w for h, w in zip(has, want)) else x[index]


def broadcast(x, has, want, axes: Sequence[Axis]):
    if tuple(has) == tuple(want):
        return x
    x = align(x, has, want)
    lead = [a for a, h, w in zip(axes, has, want) if h or w]
    shape = (*(a.size for a in lead), *jnp.shape(x)[len(lead) :])
    if jnp.shape(x) == shape:
        return x
    return broadcast_to(x, shape, [a.spec for a in lead])


def either(*has: Sequence[bool]) -> tuple[bool, ...]:
    """The axes that any of several operands has."""
    return tuple(map(any, zip(*has)))


def captured(entry: Entry, transform: Callable | None) -> Entry:
    """The entry of one sow, which still has the operands of that: transformed, and with
    a count in the place of the guards."""
    site, operands = entry.site, entry.arrays
    n_guards = len(site.guards)
    if transform is None and not n_guards:
        return entry
    axes = site.axes
    treedef, leaves = site.treedef, site.leaves
    values = list(operands[n_guards:])
    value_has = [site.has(i) for i in range(n_guards, len(operands))]
    if transform is not None:
        treedef, leaves, values, value_has = transformed(
            transform, site, values, value_has
        )
    if n_guards:
        run, run_has = running(site, operands)
        values = [_mask(run, run_has, x, h, axes) for x, h in zip(values, value_has)]
        value_has = [either(h, run_has) for h in value_has]
        values.append(run.astype(jnp.int32))
        value_has.append(run_has)
    axes = with_has(axes, value_has)
    new = site._replace(treedef=treedef, leaves=leaves, axes=axes, guards=())
    return dc.replace(entry, arrays=tuple(values), site=new, counted=bool(n_guards))


def runs(site: Site, operands: Sequence[Any]) -> list[Any]:
    """For each guard, given its operand, whether the sow runs."""
    return [
        x if x.dtype == bool else x == branch
        for x, (_, branch, _) in zip(operands, site.guards)
    ]


def running(site: Site, operands: Sequence[Any]) -> tuple[Any, tuple[bool, ...]]:
    """Whether a sow with guards runs, and which of the axes that has."""
    has = [site.has(i) for i in range(len(site.guards))]
    run_has = either(*has)
    each = [align(x, h, run_has) for x, h in zip(runs(site, operands), has)]
    return ft.reduce(operator.and_, each), run_has


def _mask(run, run_has, x, has, axes):
    both = either(has, run_has)
    x = broadcast(x, has, both, axes)
    return select(align(run, run_has, both), x, jnp.zeros_like(x))


def transformed(
    fn: Callable,
    site: Site,
    values: Sequence[Any],
    has: Sequence[tuple[bool, ...]],
    what: str = "transform",
) -> tuple[Const, tuple[Any, ...], list[Any], list[tuple[bool, ...]]]:
    """Applies `fn` to the value as the code at the sow sees it, for each lane; one that
    is `batched`, to all lanes at once. Returns what there is of the result: its
    treedef, its leaves, arrays, and their axes."""
    axes = site.axes
    if isinstance(fn, Batched):
        with calling(what, site):
            treedef, leaves, values = _of_all_lanes(fn, site, values, has)
        return treedef, leaves, values, [(False,) * len(axes)] * len(values)
    form: list[Any] = []

    def apply(*values):
        out = fn(rebuild(site.treedef, site.leaves, values))
        arrays, *form[:] = take_apart(out)
        return list(map(jnp.asarray, arrays))

    # There may be no values.
    none = (False,) * len(axes)
    over = either(none, *has)
    out = None
    with calling(what, site):
        if is_backward(site.mode) and any(h != over for h in has):
            # What is computed from the total of all lanes is not a value of a lane.
            shapes = [
                shape_like(x, x.shape[sum(h) :], spec_of(x)[sum(h) :])
                for x, h in zip(values, has)
            ]
            read = _inputs_read(jax.make_jaxpr(apply)(*shapes))
            out = [either(none, *[has[i] for i in of]) for of in read]
        values = for_each_lane(apply, axes, has, out)(*values)
    treedef, leaves = form
    return treedef, leaves, list(values), out or [over] * len(values)


def _of_all_lanes(
    fn: Batched, site: Site, values: Sequence[Any], has: Sequence[tuple[bool, ...]]
) -> tuple[Const, tuple[Any, ...], list[Any]]:
    """What is returned for the value with the axes of the lanes in front."""
    if site.guards:
        raise SowError(
            f"`transform=batched(...)`: `sow(..., {site.name!r})` at {site.where} is "
            "in a branch or a loop that only some lanes of a `jax.vmap` run: there is "
            "no value of all lanes. Leave `batched` out for this name, and reduce what "
            "comes back where its `count` is not zero."
        )
    over = either((False,) * len(site.axes), *has)
    if not is_backward(site.mode):
        # Else it is the total, see `final_axes`.
        values = [broadcast(x, h, over, site.axes) for x, h in zip(values, has)]
    told = dict(name=site.name, where=site.where)
    values = [
        x if x.dtype == jax.dtypes.float0 else all_lanes_p.bind(x, **told)
        for x in values
    ]
    lead = [a.size for a, h in zip(site.axes, over) if h]
    out = fn.fn(rebuild(site.treedef, site.leaves, values, lead))
    arrays, treedef, leaves = take_apart(out)
    return treedef, leaves, list(map(jnp.asarray, arrays))


def _inputs_read(closed: Any) -> list[set[int]]:
    """For each output of a jaxpr, the inputs that it may depend on."""
    jaxpr, _ = _compat.open_jaxpr(closed)
    read = {v: {i} for i, v in enumerate(jaxpr.invars)}

    def by(atoms) -> set[int]:
        variables = [v for v in atoms if not isinstance(v, jexc.Literal)]
        return set().union(*[read.get(v, set()) for v in variables])

    for eqn in jaxpr.eqns:
        read.update(dict.fromkeys(eqn.outvars, by(eqn.invars)))
    return [by([v]) for v in jaxpr.outvars]


def for_each_lane(
    fn: Callable,
    axes: Sequence[Axis],
    has: Sequence[Sequence[bool]],
    out: Sequence[Sequence[bool]] | None = None,
) -> Callable:
    """`fn`, of values as the code at the sow sees them, as a function of operands.
    `out` says which axes each of its results has; else, they have all."""
    for k in reversed(range(len(axes))):
        if any(h[k] for h in has):
            fn = jax.vmap(
                fn,
                in_axes=tuple(0 if h[k] else None for h in has),
                out_axes=0 if out is None else [0 if h[k] else None for h in out],
                axis_size=axes[k].size,
            )
    return fn


def in_each_iteration(site: Site, step: Callable[[Any], Any], carry: Any) -> Any:
    """The carry after a sow: one that JAX moved out of its loop runs in each iteration
    all the same."""
    times = math.prod(a.size for a in site.axes if not a.lane)
    if times == 1:
        return step(carry)
    return jax.lax.fori_loop(0, times, lambda _, c: step(c), carry)


def keeps_one(entry: Entry) -> bool:
    """Whether of the scan that it is in only one iteration is kept."""
    return bool(entry.at) and entry.at[-1] is not None


def stacked(entry: Entry, length: int) -> Entry:
    """An entry of a loop body, once each of its arrays has a new leading axis; or once
    the scan is over, if it keeps one iteration."""
    if keeps_one(entry):
        return dc.replace(left_loop(entry), at=entry.at[:-1])
    entry = dc.replace(entry, at=entry.at[:-1])
    loop = Axis(length, (True,) * len(entry.arrays), lane=False)
    n, axes = out_of_loop(entry.site.axes, loop)
    arrays = [
        jnp.moveaxis(x, 0, to) if (to := sum(entry.site.has(i)[:n])) else x
        for i, x in enumerate(entry.arrays)
    ]
    return entry.replace(arrays, axes)


def on_device(entry: Entry, axes: dict[Any, int], varying: Callable):
    """An entry of one device, with an axis of size one for each mesh axis that the
    array varies over. In the result, the entry of all devices. Also the
    `PartitionSpec`s."""
    over = [varying(x) for x in entry.arrays]
    names = [a for a in axes if any(a in v for v in over)]
    arrays = tuple(x[(None,) * len(v)] for x, v in zip(entry.arrays, over))
    mesh = tuple(
        Axis(axes[a], tuple(a in v for v in over), lane=False, mesh=a, spec=a)
        for a in names
    )
    entry = entry.replace(arrays, (*mesh, *entry.site.axes))
    specs = tuple(jax.sharding.PartitionSpec(*v) for v in over)
    return entry, dc.replace(entry, arrays=specs)


def left_loop(entry: Entry) -> Entry:
    """An entry of a loop body that keeps no axis for the loop."""
    _, axes = out_of_loop(entry.site.axes, None)
    return entry.replace(entry.arrays, axes)


def with_count(entry: Entry) -> Entry:
    if entry.counted:
        return entry
    axes = [a._replace(has=(*a.has, False)) for a in entry.site.axes]
    entry = entry.replace((*entry.arrays, jnp.ones((), jnp.int32)), axes)
    return dc.replace(entry, counted=True)


def final_axes(site: Site, counted: bool) -> list[tuple[bool, ...]]:
    """Which of the axes each array of an entry has in what comes back: all that any of
    them varies over. But a cotangent has its own lanes only: that of a leaf which is
    the same for all lanes is their total, and would be wrong in each of them."""
    n_values = sum(leaf is OPERAND for leaf in site.leaves)
    varies = [not a.lane or any(a.has) for a in site.axes]
    own = is_backward(site.mode)
    return [
        tuple(
            v and (h or not (own and a.lane and i < n_values))
            for v, h, a in zip(varies, site.has(i), site.axes)
        )
        for i in range(n_values + counted)
    ]


class Result(NamedTuple):
    """What comes back for a `Site.key`: its value, and its count if it has one. The
    other fields say what their arrays are, see `Intermediates`. With `Append` all have
    one entry for each place."""

    value: Any = None
    count: Any = None
    axes: tuple[Leading, ...] | list[Any] = ()
    count_axes: tuple[Leading, ...] | list[Any] = ()


def named_axes(site: Site, route: Scan = ()) -> list[NamedAxis]:
    """What each axis is, in the words of `Intermediates.axes`, where in the name the
    index of a loop stands, see `Label`, and which of the scans on the `route` it is."""
    ways = [
        route[: i + 1] for i, (_, reverse) in enumerate(route) if reverse is not None
    ]
    n_loops = sum(not a.lane and a.mesh is None for a in site.axes)
    # JAX may have moved a sow out of a loop.
    scans = iter(ways if len(ways) == n_loops else ())
    after = iter(site.label.after)

    def one(axis: Axis) -> NamedAxis:
        if axis.mesh is not None:
            return f"device:{axis.mesh}", None, None
        if axis.lane:
            return "vmap", None, None
        return "loop", next(after, None), next(scans, None)

    return list(map(one, site.axes))


def axes_of_arrays(
    value: Any,
    site: Site,
    has: Sequence[Sequence[bool]],
    axes: Sequence[NamedAxis],
) -> tuple[Leading, ...]:
    """Of a value that comes back. `has` says which of the axes those arrays have that
    are operands."""
    of_operand = iter(has)
    found = []
    for x, leaf in zip(jtu.tree_leaves(value), site.leaves):
        own = [isinstance(leaf, NoTangent)] * len(axes)
        if leaf is OPERAND:
            own = next(of_operand)
        if eqx.is_array(x):
            found.append((tuple(it.compress(axes, own)), x.shape))
    return tuple(found)


def axes_of_count(
    count: Any, axes: Sequence[NamedAxis], has: Sequence[bool]
) -> tuple[Leading, ...]:
    """Of a count; or of what has the axes of a count."""
    own = tuple(it.compress(axes, has))
    return tuple((own, x.shape) for x in jtu.tree_leaves(count))


def full(entry: Entry) -> Entry:
    """With its `final_axes`, and without the vmaps that it does not vary over."""
    if not entry.site.axes:
        return entry
    axes = entry.site.axes
    final = final_axes(entry.site, entry.counted)
    arrays = [
        broadcast(x, entry.site.has(i), has, axes)
        for i, (x, has) in enumerate(zip(entry.arrays, final))
    ]
    axes = [a for a in with_has(axes, final) if not a.lane or any(a.has)]
    return entry.replace(arrays, axes)
