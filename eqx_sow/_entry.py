"""What has been captured of one name and mode so far, on its way out of a program.

The arrays of an `Entry` keep only the axes that they really vary over. `Site.axes` says
which axes the entry has in all; they are filled in once, at the very end.
"""

import dataclasses as dc
import functools as ft
import itertools as it
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ._errors import calling, DuplicateSowError, SowError
from ._primitive import Axis, Const, Located, NoTangent, OPERAND, Site


@jtu.register_dataclass
@dc.dataclass(frozen=True)
class Entry:
    """What was captured, and the site as it would be if `arrays` were its operands.

    If `counted`, the last array is the count: how many times the sow ran. `guards` has
    those of each sow that the entry was made of; the site has none any more.
    """

    arrays: tuple[Any, ...]
    site: Site = dc.field(metadata=dict(static=True))
    counted: bool = dc.field(default=False, metadata=dict(static=True))
    guards: tuple[Located, ...] = dc.field(default=(), metadata=dict(static=True))

    def core_shape(self, i: int) -> tuple[int, ...]:
        """The shape of array `i` without its leading axes."""
        return self.site.shape(i, jnp.shape(self.arrays[i]))

    def replace(self, arrays: Sequence[Any], axes: Sequence[Axis]) -> "Entry":
        site = self.site._replace(axes=tuple(axes))
        return dc.replace(self, arrays=tuple(arrays), site=site)


def _align(x, has: Sequence[bool], want: Sequence[bool]):
    """Gives `x` an axis of size one wherever it has none of the axes in `want`."""
    index = tuple(slice(None) if h else None for h, w in zip(has, want) if h or w)
    return x if all(h or not w for h, w in zip(has, want)) else x[index]


def _broadcast(x, has, want, axes: Sequence[Axis]):
    if tuple(has) == tuple(want):
        return x
    x = _align(x, has, want)
    lead = tuple(a.size for a, h, w in zip(axes, has, want) if h or w)
    shape = (*lead, *jnp.shape(x)[len(lead) :])
    return x if jnp.shape(x) == shape else jnp.broadcast_to(x, shape)


def _where(mask, x, y):
    mask = jnp.reshape(mask, jnp.shape(mask) + (1,) * (jnp.ndim(x) - jnp.ndim(mask)))
    return jnp.where(mask, x, y)


def _over(has: Sequence[bool], other: Sequence[bool]) -> tuple[bool, ...]:
    return tuple(map(any, zip(has, other)))


def from_site(site: Site, operands: Sequence[Any], transform: Callable | None) -> Entry:
    """The entry of one sow."""
    guard = len(site.guards)
    if transform is None and not guard:
        return Entry(tuple(operands), site)
    axes = site.axes
    has = [site.has(i) for i in range(len(operands))]
    treedef, leaves = site.treedef, site.leaves
    values, value_has = list(operands[guard:]), has[guard:]
    if transform is not None:
        treedef, leaves, values, value_has = _transform(
            transform, site, values, value_has
        )
    if guard:
        run_has = tuple(map(any, zip(*has[:guard])))
        run = ft.reduce(
            operator.and_,
            [_align(x, h, run_has) for x, h in zip(runs(site, operands), has)],
        )
        values = [_mask(run, run_has, x, h, axes) for x, h in zip(values, value_has)]
        value_has = [_over(h, run_has) for h in value_has]
        values.append(run.astype(jnp.int32))
        value_has.append(run_has)
    axes = _with_has(axes, value_has)
    new = site._replace(treedef=treedef, leaves=leaves, axes=axes, guards=())
    return Entry(tuple(values), new, bool(guard))


def runs(site: Site, operands: Sequence[Any]) -> list[Any]:
    """For each guard, given its operand, whether the sow runs."""
    return [
        x if x.dtype == bool else x == branch
        for x, (_, branch, _) in zip(operands, site.guards)
    ]


def choose(sites: Sequence[Site], operands: Sequence[Sequence[Any]]):
    """One sow, and its operands, from one in each branch of a cond. The values are
    selected as JAX does it for the outputs of the branches."""
    site = sites[0]
    *outer, _ = site.guards
    n = len(outer)
    has = [site.has(i) for i in range(len(operands[0]))]
    for s in sites[1:]:
        new = [s.has(i) for i in range(len(has))]
        has[n + 1 :] = map(_over, has[n + 1 :], new[n + 1 :])
    values_has = [_over(h, has[n]) for h in has[n + 1 :]]
    values = []
    for i, to in enumerate(values_has, start=n + 1):
        cases = [
            _broadcast(x[i], s.has(i), to, site.axes) for s, x in zip(sites, operands)
        ]
        index = _align(operands[0][n], has[n], to)
        index = jnp.reshape(index, (*index.shape, *[1] * (cases[0].ndim - index.ndim)))
        index = jnp.broadcast_to(index, cases[0].shape)
        values.append(jax.lax.select_n(index, *cases))
    axes = _with_has(site.axes, [*has[:n], *values_has])
    site = site._replace(guards=tuple(outer), axes=axes)
    return site, [*operands[0][:n], *values]


def _mask(run, run_has, x, has, axes):
    both = _over(has, run_has)
    x = _broadcast(x, has, both, axes)
    return _where(_align(run, run_has, both), x, jnp.zeros_like(x))


def _with_has(axes: Sequence[Axis], has: Sequence[Sequence[bool]]) -> tuple[Axis, ...]:
    return tuple(a._replace(has=tuple(h[i] for h in has)) for i, a in enumerate(axes))


def _transform(fn, site, values, has):
    """Applies `fn` to the value as the code at the sow sees it, for each lane."""
    static = []

    def apply(*values):
        out = fn(rebuild(site.treedef, site.leaves, values))
        leaves, treedef = jtu.tree_flatten(out)
        is_array = [isinstance(x, jax.Array | np.ndarray | np.generic) for x in leaves]
        static[:] = [
            Const(treedef),
            tuple(OPERAND if d else Const(x) for x, d in zip(leaves, is_array)),
        ]
        return [jnp.asarray(x) for x, d in zip(leaves, is_array) if d]

    over = tuple(any(h[i] for h in has) for i in range(len(site.axes)))
    for i in reversed(range(len(site.axes))):
        if over[i]:
            apply = jax.vmap(
                apply,
                in_axes=tuple(0 if h[i] else None for h in has),
                axis_size=site.axes[i].size,
            )
    with calling("transform", site.name, site.where):
        values = apply(*values)
    return *static, values, [over] * len(values)


def rebuild(
    treedef: Const, leaves: Sequence[Any], values: Sequence[Any], lead=()
) -> Any:
    """The PyTree. Leaves with no tangent are zeros of JAX's dtype `float0`."""
    operand = iter(values)
    return jtu.tree_unflatten(
        treedef.value,
        [
            next(operand)
            if x is OPERAND
            else np.zeros((*lead, *x.shape), jax.dtypes.float0)
            if isinstance(x, NoTangent)
            else x.value
            for x in leaves
        ],
    )


def out_of_loop(
    axes: Sequence[Axis], loop: Axis | None
) -> tuple[int, tuple[Axis, ...]]:
    """The axes outside of one more loop, which has the axis `loop`: inside of the axes
    whose vmap is around the loop. Also how many those are."""
    around = list(it.takewhile(lambda a: a.loops > 0, axes))
    n = len(around)
    around = [a._replace(loops=a.loops - 1) for a in around]
    return n, (*around, *([] if loop is None else [loop]), *axes[n:])


def stacked(entry: Entry, length: int) -> Entry:
    """An entry of a loop body, once each of its arrays has a new leading axis."""
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
    arrays = tuple(
        jnp.reshape(x, (1,) * len(v) + jnp.shape(x)) for x, v in zip(entry.arrays, over)
    )
    mesh = tuple(
        Axis(axes[a], tuple(a in v for v in over), lane=False, mesh=a) for a in names
    )
    entry = entry.replace(arrays, (*mesh, *entry.site.axes))
    specs = tuple(jax.sharding.PartitionSpec(*v) for v in over)
    return entry, dc.replace(entry, arrays=specs)


def left_loop(entry: Entry) -> Entry:
    """An entry of a loop body that keeps no axis for the loop."""
    _, axes = out_of_loop(entry.site.axes, None)
    return entry.replace(entry.arrays, axes)


def counted(entry: Entry) -> Entry:
    if entry.counted:
        return entry
    axes = [a._replace(has=(*a.has, False)) for a in entry.site.axes]
    entry = entry.replace((*entry.arrays, jnp.ones((), jnp.int32)), axes)
    return dc.replace(entry, counted=True)


def _common_axes(entries: Sequence[Entry]) -> list[Axis]:
    """The axes that entries of the same name have in all. An entry may lack some, if it
    does not vary over a vmap."""

    sites = [e.site for e in entries]
    longest = max((s.axes for s in sites), key=len)
    for s in sites:
        if _embeddings([a.kind for a in s.axes], [a.kind for a in longest]) != 1:
            raise SowError(
                f"`{s.name}` is sown in several places that vary over different "
                f"axes: sizes {[a.size for a in longest]} at {sites[0].where} "
                f"and {[a.size for a in s.axes]} at {s.where}. They cannot "
                "become one value: give them different names."
            )
    return list(longest)


def _embeddings(few: Sequence[Any], many: Sequence[Any]) -> int:
    """In how many ways the first is a subsequence of the second."""
    ways = [1] + [0] * len(few)
    for x in many:
        for i in reversed(range(len(few))):
            if few[i] == x:
                ways[i + 1] += ways[i]
    return ways[-1]


def unify(entries: Sequence[Entry]) -> Entry:
    """A counted entry, as shapes, that has room for each of `entries`."""
    entries = [jax.eval_shape(counted, e) for e in entries]
    first = entries[0]
    for e in entries[1:]:
        _check_same(first, e)
    axes = _common_axes(entries)
    has = [placed(e, axes, i) for e in entries for i in range(len(e.arrays))]
    n = len(first.arrays)
    has = [tuple(map(any, zip(*has[i::n]))) for i in range(n)]
    # Wherever the count varies, the value does too: it may not have run there.
    has = [_over(h, has[-1]) for h in has]
    arrays = tuple(
        jax.ShapeDtypeStruct(
            (*(a.size for a, h in zip(axes, has[i]) if h), *first.core_shape(i)),
            first.arrays[i].dtype,
        )
        for i in range(n)
    )
    guards = ()
    if all(e.guards for e in entries):
        guards = tuple(dict.fromkeys(g for e in entries for g in e.guards))
    entry = first.replace(arrays, _with_has(axes, has))
    return dc.replace(entry, guards=guards)


def placed(entry: Entry, axes: Sequence[Axis], i: int) -> tuple[bool, ...]:
    """`entry.site.has(i)`, in terms of axes among which the entry's own are."""
    own = list(zip(entry.site.axes, entry.site.has(i)))
    return tuple(
        own.pop(0)[1] if own and own[0][0].kind == a.kind else False for a in axes
    )


def conform(entry: Entry, target: Entry) -> Entry:
    """`entry`, in the form of `target`, which came from `unify`."""
    entry = counted(entry)
    axes = target.site.axes
    arrays = tuple(
        _broadcast(x, placed(entry, axes, i), target.site.has(i), axes)
        for i, x in enumerate(entry.arrays)
    )
    return dc.replace(target, arrays=arrays)


def zeros(target: Entry) -> Entry:
    arrays = tuple(jnp.zeros(x.shape, x.dtype) for x in target.arrays)
    return dc.replace(target, arrays=arrays)


def latest(old: Entry, new: Entry) -> Entry:
    """For entries of one form: `new` where it ran, otherwise `old`."""
    *old_values, old_count = old.arrays
    *new_values, new_count = new.arrays
    n = len(new_values)
    ran, ran_has = new_count > 0, new.site.has(n)
    values = [
        _where(_align(ran, ran_has, new.site.has(i)), x, y)
        for i, (x, y) in enumerate(zip(new_values, old_values))
    ]
    return dc.replace(new, arrays=(*values, old_count + new_count))


def exclusive(a: Entry, b: Entry, execution: Callable[[Any], Any]) -> bool:
    """Whether the two are in different branches of one cond. `execution` says of the
    operand of a guard to which execution of the cond it belongs."""

    def apart(x: Located, y: Located) -> bool:
        where = {(cond, execution(of)): branch for cond, branch, _, of in x}
        return any(
            where.get((cond, execution(of)), branch) != branch
            for cond, branch, _, of in y
        )

    return all(apart(x, y) for x in a.guards or [()] for y in b.guards or [()])


def relocated(entry: Entry, where: Callable[[Any], Any]) -> Entry:
    """An entry that enters a jaxpr, or leaves it: `where` says what the operand of a
    guard is there. Guards that nobody else there can have (`None`) are left out."""
    if not entry.guards:
        return entry

    def there(guards: Located) -> Located:
        new = [(cond, branch, n, where(of)) for cond, branch, n, of in guards]
        return tuple(guard for guard in new if guard[-1] is not None)

    return dc.replace(entry, guards=tuple(map(there, entry.guards)))


def merge(a: Entry, b: Entry) -> Entry:
    """One entry from two of the same name, in exclusive branches."""
    target = unify([a, b])
    return latest(conform(a, target), conform(b, target))


def duplicate(a: Site, b: Site, remedy: str = "") -> DuplicateSowError:
    twice = a.where == b.where
    places = f"at {a.where}" + (", which runs twice" if twice else f" and at {b.where}")
    remedy = remedy or (
        f"or say how to combine them: `save_intermediates(..., reduce={{{a.name!r}: "
        "eqx_sow.Append()})` returns a tuple of both, `eqx_sow.Last()` the later one."
    )
    return DuplicateSowError(
        f"`{a.name}` is sown twice ({a.mode}): {places}. Give the two values different "
        f"names (`scope=True` puts the paths of modules before them), {remedy}"
    )


def _check_same(a: Entry, b: Entry) -> None:
    def describe(e):
        values = [
            jax.ShapeDtypeStruct(e.core_shape(i), x.dtype)
            for i, x in enumerate(e.arrays[:-1])
        ]
        return rebuild(e.site.treedef, e.site.leaves, values)

    same = (
        (a.site.treedef, a.site.leaves) == (b.site.treedef, b.site.leaves)
        and len(a.arrays) == len(b.arrays)
        and all(
            a.core_shape(i) == b.core_shape(i)
            and a.arrays[i].dtype == b.arrays[i].dtype
            for i in range(len(a.arrays))
        )
    )
    if not same:
        raise SowError(
            f"`{a.site.name}` is sown in several branches, and their values differ in "
            f"structure, shape or dtype: {describe(a)} at {a.site.where}, but "
            f"{describe(b)} at {b.site.where}. Sow values of one form, or give the "
            "sows different names."
        )


def varying(entry: Entry) -> Entry:
    """Without the vmaps that it does not vary over."""
    if not entry.site.axes:
        return entry
    axes = [a for a in entry.site.axes if not a.lane or any(a.has)]
    return entry.replace(entry.arrays, axes)


def full(entry: Entry) -> Entry:
    """With all its axes on each array."""
    if not entry.site.axes:
        return entry
    entry = varying(entry)
    axes = entry.site.axes
    every = (True,) * len(axes)
    arrays = [
        _broadcast(x, entry.site.has(i), every, axes)
        for i, x in enumerate(entry.arrays)
    ]
    return entry.replace(arrays, _with_has(axes, [every] * len(arrays)))


def value(entry: Entry) -> Any:
    """The PyTree, of an entry from `full`."""
    lead = tuple(a.size for a in entry.site.axes)
    values = entry.arrays[:-1] if entry.counted else entry.arrays
    return rebuild(entry.site.treedef, entry.site.leaves, values, lead)
