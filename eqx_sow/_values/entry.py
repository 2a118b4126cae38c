"""What has been captured of one name and mode so far, on its way out of a program.

An example of how axes come about: a vmap of 2 lanes in a scan of 3 iterations in a vmap
of 5 lanes,

    def f(x):                                            # under vmap, 5 lanes
        def body(c, _):                                  # 3 iterations
            jax.vmap(lambda y: sow((c, y), "a"))(ys)     # 2 lanes
            return jnp.sin(c), None
        return lax.scan(body, x, None, length=3)

where `c` varies over the outer lanes and `y` over the inner ones. As JAX traces it, the
inner vmap comes first. It gives the mark `Axis(2, n_loops=0)`, and `c` does not vary
over it. The outer vmap batches the scan, and the mark inside as part of that: its axis,
of which `n_loops=1` says that a loop is between it and the mark, goes in front,
`Axis(5, n_loops=1)`. So the axes are (5, 2), and the operands are `c[5]` and `y[2]`,
since they have only the axes that they vary over: `varies` is `(True, False)` for `c`,
and `(False, True)` for `y`. `captured` makes an `Entry` of them, in which each array
has all axes of the site, some of size one: `c[5, 1]` and `y[1, 2]`.

When the walk leaves the scan, each array has a new leading axis: `c[3, 5, 1]`, `y[3, 1,
2]`. `stacked` moves it inside the axes that are outside of the loop (those with
`n_loops > 0`, which count one less now): `c[5, 3, 1]`, `y[1, 3, 2]`, and the axes are
(5, 3, 2), as the program is nested. At the end `assemble.py` repeats both along the
axes of size one: `[5, 3, 2]`.
"""

import dataclasses as dc
import functools as ft
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._arrays import select, shape_like, spec_of
from .._mark.site import Axis, Guard, out_of_loop, Site
from .._mark.static import NoTangent, OPERAND
from .._results.layers import Scan
from .axes import aligned, broadcast, either
from .transform import transformed, Value


# The guards of a mark.
Guards = tuple[Guard, ...]


@jtu.register_dataclass
@dc.dataclass(frozen=True)
class Entry:
    """What was captured of a name and mode: by one mark, or by several in branches.

    `captured` makes it of a mark. `stacked`, `on_device` and the functions in
    `merge.py` take it out of loops, devices and branches, and `assemble.py` makes of it
    what comes back.
    """

    # Each has all axes of `site` in front, in that order: of size one where it does not
    # vary over the axis. The count, if there is one, is the last array.
    arrays: tuple[Any, ...]
    # That of the mark. Its `axes` are those that the arrays have now, among which there
    # are not guards.
    site: Site = dc.field(metadata=dict(static=True))
    # Whether there is a count of how many times the mark ran.
    counted: bool = dc.field(default=False, metadata=dict(static=True))
    # The guards of each mark that it was made of, if any has some.
    cases: tuple[Guards, ...] = dc.field(default=(), metadata=dict(static=True))
    # The way to the equation of the mark: of each equation around it, from outside in,
    # the index, and whether it is a reversed scan (`None` if it is not a scan).
    route: Scan = dc.field(default=(), metadata=dict(static=True))
    # Of each scan that is still around it, from outside in, which iteration alone is
    # kept, or `None` for all. Empty if all are kept of all.
    at: tuple[int | None, ...] = dc.field(default=(), metadata=dict(static=True))
    # Which slot it has in the plan of the jaxpr that it is captured in, or of what is
    # around that: see `_walk/plan.py`. `None` for the result of a reducer.
    slot: Any = dc.field(default=None, metadata=dict(static=True))

    def shape(self, i: int, axes: Iterable[Axis], varies: Iterable[bool]) -> Any:
        """The type of array `i`, if it varied so over these axes instead of its own."""
        x, n = self.arrays[i], len(self.site.axes)
        lead = [(a.size, a.spec) if v else (1, None) for a, v in zip(axes, varies)]
        shape = (*[size for size, _ in lead], *x.shape[n:])
        return shape_like(x, shape, (*[spec for _, spec in lead], *spec_of(x)[n:]))

    def with_slot(self, slot: int, *steps: tuple[int, bool | None]) -> "Entry":
        """This entry in another slot, seen from outside the equations of these steps,
        if any. There are many, and `dc.replace` takes three times as long."""
        route = (*steps, *self.route)
        rest = self.counted, self.cases, route, self.at, slot
        return Entry(self.arrays, self.site, *rest)

    def replace(self, arrays: Sequence[Any], **of_site: Sequence[Any]) -> "Entry":
        site = self.site._replace(**{k: tuple(v) for k, v in of_site.items()})
        return dc.replace(self, arrays=tuple(arrays), site=site)

    def with_only(self, kept: Sequence[int] = ()) -> "Entry":
        """An entry of one place along all but these of its axes, as shapes."""
        site = self.site
        axes = [site.axes[k] for k in kept]
        varies = [tuple(v[k] for k in kept) for v in site.varies]
        shapes = [self.shape(i, axes, v) for i, v in enumerate(varies)]
        return self.replace(shapes, axes=axes, varies=varies)


def grouped(
    entries: Sequence[Entry], key: Callable[[Site], Any] = lambda site: site.key
) -> dict[Any, list[Entry]]:
    groups: dict[Any, list[Entry]] = {}
    for e in entries:
        groups.setdefault(key(e.site), []).append(e)
    return groups


# --- one mark ---
def in_front(site: Site, operands: Sequence[Any]) -> tuple[Site, list[Any]]:
    """A mark as if it had operands with their leading axes in front."""
    if not any(site.permutations):
        return site, [*operands]
    pairs = zip(operands, site.permutations)
    moved = [jax.lax.transpose(x, p) if p else x for x, p in pairs]
    return site._replace(permutations=()), moved


def in_place(site: Site, operands: Sequence[Any]) -> list[Any]:
    """Operands with their leading axes in front, as the mark has them."""
    pairs = zip(operands, map(np.argsort, site.permutations))
    return [jax.lax.transpose(x, p) if p.size else x for x, p in pairs]


def captured(
    site: Site,
    operands: Sequence[Any],
    transform: Callable | None,
    at: tuple[int | None, ...] = (),
) -> Entry:
    """The entry of one mark: its value, transformed, and a count in the place of
    guards. Lanes in which the mark does not run are zeros."""
    return finished(unfinished(site, operands, at), transform)


def unfinished(
    site: Site,
    operands: Sequence[Any],
    at: tuple[int | None, ...] = (),
    slot: Any = None,
) -> Entry:
    """The entry of one mark before it is `finished`. In the place of a count it has
    booleans that say in which lanes the mark runs. In others, the value is anything."""
    site, operands = in_front(site, operands)
    case = site.guards
    entry = Entry((), site, cases=(case,) if case else (), at=at, slot=slot)
    return _of_value(entry, value_of(site, operands), *running(site, operands))


def _of_value(
    entry: Entry, value: Value, count: Any, count_varies: Sequence[bool]
) -> Entry:
    """The entry with another value, and this count, or none."""
    arrays, varies = [*value.arrays], [*value.varies]
    if count is not None:
        arrays.append(count)
        varies.append(count_varies)
    site = entry.site._replace(form=value.form, varies=tuple(varies))
    counted = count is not None
    return dc.replace(entry, arrays=tuple(arrays), site=site, counted=counted)


# In the place of a transform: there is nothing left to do.
FINISHED: Any = object()


def finished(entry: Entry, transform: Callable | None) -> Entry:
    """The entry of one mark, or of several in branches, transformed, with a count and
    with zeros where none of them runs."""
    if transform is FINISHED or (transform is None and not entry.counted):
        return entry
    site, arrays = entry.site, list(entry.arrays)
    varies = [*site.varies]
    run, run_varies = None, ()
    if entry.counted:
        run, run_varies = arrays.pop(), varies.pop()
        run = None if _are_all_branches(entry.cases) else run
    value = Value(site.form, arrays, varies)
    if transform is not None:
        # It may have a gradient that is not finite where the mark does not run.
        value = _where_it_runs(run, run_varies, value)
        varies = () if run is None else run_varies
        value = transformed(transform, site, value, varies)
    if run is not None:
        varies = [either(v, run_varies) for v in value.varies]
        arrays = [broadcast(x, v, site.axes) for x, v in zip(value.arrays, varies)]
        value = value._replace(arrays=arrays, varies=varies)
        value = _where_it_runs(run, run_varies, value)
        run = run.astype(jnp.int32)
    done = _of_value(entry, value, run, run_varies)
    return with_count(done) if entry.counted else done


def _are_all_branches(cases: Sequence[Guards]) -> bool:
    """Whether in each lane one of several marks runs: they are in all branches of a
    cond, or within a branch in all of another cond, and so on."""
    if () in cases:
        return True
    by_cond: dict[Any, dict[int, list[Guards]]] = {}
    for guard, *inside in cases:
        of_cond = guard.cond, guard.n_branches
        by_branch = by_cond.setdefault(of_cond, {})
        by_branch.setdefault(guard.branch, []).append(tuple(inside))
    return any(
        by_branch.keys() == set(range(n))
        and all(map(_are_all_branches, by_branch.values()))
        for (*_, n), by_branch in by_cond.items()
    )


def value_of(site: Site, operands: Sequence[Any]) -> Value:
    """The value that is marked: what the operands are but for the guards. A tangent
    that is zero, and so no operand, is an array of zeros from here on."""
    n = len(site.guards)
    known = iter(zip(operands[n:], site.varies[n:]))
    leaves, pairs = [], []
    for leaf in site.form.leaves:
        is_zero = isinstance(leaf, NoTangent) and leaf.dtype != jax.dtypes.float0
        if is_zero:
            zeros = jnp.zeros(leaf.shape, leaf.dtype)
            pairs.append((zeros, (False,) * len(site.axes)))
        elif leaf is OPERAND:
            pairs.append(next(known))
        leaves.append(OPERAND if is_zero else leaf)
    arrays = [aligned(x, v) for x, v in pairs]
    form = site.form._replace(leaves=tuple(leaves))
    return Value(form, arrays, [v for _, v in pairs])


def running(site: Site, operands: Sequence[Any]) -> tuple[Any, tuple[bool, ...]]:
    """In which lanes a mark with guards runs, an aligned boolean, and which axes that
    varies over. `None` for a mark without guards, which runs in all."""
    if not site.guards:
        return None, ()
    each = []
    for x, v, guard in zip(operands, site.varies, site.guards):
        each.append(aligned(x if x.dtype == bool else _is(x, guard), v))
    return ft.reduce(operator.and_, each), either(*site.varies[: len(site.guards)])


def _is(index: Any, guard: Guard) -> Any:
    """Whether an index selects the branch of a guard. It is compared as JAX does to
    select the outputs, so that XLA selects values with the same boolean."""
    branch = guard.branch
    if branch == 0:
        return index < 1
    is_last = branch == guard.n_branches - 1
    return ~(index < branch) if is_last else index == branch


def _where_it_runs(run: Any, run_varies: Sequence[bool], value: Value) -> Value:
    """The value with zeros where the mark does not run. What varies over fewer axes
    stays as it is, so that it is still transformed once."""
    if run is None:
        return value
    arrays = [
        select(run, x, jnp.zeros_like(x)) if either(v, run_varies) == v else x
        for x, v in zip(value.arrays, value.varies)
    ]
    return value._replace(arrays=arrays)


# --- loops and devices ---
def keeps_one(entry: Entry) -> bool:
    """Whether of the scan that it is in only one iteration is kept."""
    return bool(entry.at) and entry.at[-1] is not None


def stacked(entry: Entry, length: int) -> Entry:
    """An entry of a loop body, once each of its arrays has a new leading axis; or once
    the scan is over, if it keeps one iteration."""
    left = dc.replace(entry, at=entry.at[:-1])
    if keeps_one(entry):
        return left_loop(left)
    n, axes = out_of_loop(entry.site.axes, Axis(length, lane=False))
    varies = [(*v[:n], True, *v[n:]) for v in entry.site.varies]
    arrays = [jnp.moveaxis(x, 0, n) for x in entry.arrays]
    return left.replace(arrays, axes=axes, varies=varies)


def left_loop(entry: Entry) -> Entry:
    """An entry of a loop body that keeps no axis for the loop."""
    _, axes = out_of_loop(entry.site.axes, None)
    return entry.replace(entry.arrays, axes=axes)


def on_device(
    entry: Entry, axes: dict[Any, int], varying: Callable
) -> tuple[Entry, Entry]:
    """An entry of one device, with an axis of size one for each mesh axis that any of
    its arrays varies over. In the result it is the entry of all devices. Also the
    `PartitionSpec`s of its arrays."""
    over = [varying(x) for x in entry.arrays]
    names = [a for a in axes if any(a in v for v in over)]
    arrays = [x[(None,) * len(names)] for x in entry.arrays]
    mesh = [Axis(axes[a], lane=False, mesh=a, spec=a) for a in names]
    pairs = zip(over, entry.site.varies)
    varies = [(*[a in v for a in names], *own) for v, own in pairs]
    entry = entry.replace(arrays, axes=(*mesh, *entry.site.axes), varies=varies)
    specs = [
        jax.sharding.PartitionSpec(*[a if a in v else None for a in names])
        for v in over
    ]
    return entry, dc.replace(entry, arrays=tuple(specs))


def with_count(entry: Entry) -> Entry:
    """The entry with a count of one, if it has none yet."""
    if entry.counted:
        return entry
    n = len(entry.site.axes)
    arrays = *entry.arrays, jnp.ones((1,) * n, jnp.int32)
    varies = *entry.site.varies, (False,) * n
    return dc.replace(entry.replace(arrays, varies=varies), counted=True)
