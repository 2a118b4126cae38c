"""The handler of `plant`, and the arrays that it holds."""

import dataclasses as dc
import itertools as it
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import PartitionSpec

from .. import _compat
from .._arrays import as_jax_does, leading, sharded_like, whole_along
from .._errors import SowError, takes_two
from .._mark.primitive import edge_value, sow_p
from .._mark.site import Site
from .._mark.static import Const, NoTangent, numbers_in, OPERAND, SameParts
from .._values.axes import aligned, as_operand, final_axes, whole
from .._values.entry import Entry, in_front, in_place, running
from .._values.merge import own_axes
from .._values.transform import Batched, calling_at, check_all_lanes, keeping_lanes
from .._walk.frame import Frame
from .._walk.handler import check_guarded, Handler
from .._walk.plan import NOTHING
from .._walk.rules import varying_alike
from .asked import Indices, InList, leave, reached
from .numpy_arrays import NotFixed, with_left


@dc.dataclass(frozen=True)
class Replace(Handler):
    """Replaces what is marked. Its actions are tuples of what is `Planted`. There may
    be several, such as one for all iterations of a loop and one for iteration 3: the
    last one counts. `Given.values` has their arrays, by the slots.

    Where nothing is to be done, another mode of the name is planted."""

    has_outer: bool
    cacheable: bool
    # See `with_left`.
    left: frozenset[Any] = frozenset()

    replaces = True

    def sow(self, found, given, site: Site, asks, atoms, frame: Frame):
        del found
        n_guards = len(site.guards)
        # A planted mark is still one for outer transformations, also if it is that of a
        # module that was made for this `plant` alone.
        still, seen = site, asks[0].seen(site) if asks else site
        if asks and seen.label.depth > 0:
            still = site.for_all(seen.label)
        if not asks or asks[0].slot == NOTHING:
            leave(self, still, atoms, frame)
            return given
        (ask,), site = asks, seen
        check_guarded(site)
        at_sow, operands = in_front(site, frame.read_arrays(atoms))
        guards, value = operands[:n_guards], operands[n_guards:]
        planted = [*zip(ask.action, given.values[ask.slot])]
        value = _replaced(planted, at_sow, guards, value, given.iterations)
        given = with_left(self.left, given, at_sow, guards, value)
        edge_out, *_ = frame.eqn.outvars
        new = [edge_value(edge_out.aval), *in_place(site, [*guards, *value])]
        if self.has_outer:
            # Marks before this one that wait come first.
            frame.flush_effects()
            (edge,) = frame.read(frame.eqn.invars[:1])
            with frame.in_scope():
                new = sow_p.bind(edge, *new[1:], site=still)
        frame.set(frame.eqn.outvars, new)
        return given

    def values_inside(self, values, slots):
        return {k: values[slot] for k, slot in enumerate(slots)}

    def needs_iteration(self, ask):
        return any(p.with_index or p.at for p in ask.action)

    def sliced_by_scan(self, values, inside):
        return {
            ask.slot: [p.has_axis_of_scan(len(mark.loops)) for p in ask.action]
            for mark, ask in inside
        }

    def specs_on_devices(self, inside, devices):
        def specs(new):
            if not isinstance(new, Site):
                return []
            on = [(k, a.mesh) for k, a in enumerate(new.axes) if a.mesh in devices]
            return [
                PartitionSpec(*(mesh if v[k] else None for k, mesh in on))
                for v in new.varies
            ]

        return {ask.slot: [specs(p.new) for p in ask.action] for _, ask in inside}


@dc.dataclass(frozen=True)
class Planted:
    """One of the option `values`, for one value of the program."""

    # The site that its arrays are for; or a function of the value. The first axes of
    # the arrays are those of the loops still around the walk.
    new: Site | SameParts
    # Of each scan around it, from outside in, in which iteration alone it is planted,
    # or `None` for all. Its arrays lack the axes of the scans with a number. Empty if
    # all are meant of all.
    at: tuple[int | None, ...] = ()
    # Whether the function is called with the value and `Given.iterations`.
    with_index: bool = False

    def has_axis_of_scan(self, n_within: int) -> bool:
        """Whether the arrays have an axis for a scan, which has so many others within
        it around the mark."""
        return not self.at or self.at[-1 - n_within] is None


def _replaced(
    each: Sequence[tuple[Planted, Sequence[Any]]],
    site: Site,
    guards: Sequence[Any],
    old: list[Any],
    iterations: tuple[Any, ...],
) -> list[Any]:
    """The arrays of the value at a mark, after the last of what is planted there that
    is for this iteration. `each` is that and its arrays."""
    *others, (planted, arrays) = each

    def compute():
        if not isinstance(planted.new, Site):
            fn = planted.new.value
            more = (Indices(iterations),) if planted.with_index else ()
            sees_all = isinstance(fn, Batched)
            apply, called = (_of_all_lanes, fn.fn) if sees_all else (_apply, fn)
            n = len(called.layers) if isinstance(called, InList) else 0
            index = (
                ". With `with_index=True` it is called with `(value, index)`, and "
                f"`index` has length {len(iterations) + n} here: one entry for each "
                "loop around the mark, except for `while_loop`s, and one for each "
                "list of layers, under a glob such as `blocks/*`"
            )
            hint = index if more else ""
            if not more and takes_two(called):
                hint = ". Pass `with_index=True` to call it with `(value, index)`"
            with calling_at("function that you planted", site, fn, hint) as watched:
                watched_fn = watched(called)
                return apply(lambda value: watched_fn(value, *more), site, old)
        return _at_site(site, guards, arrays, planted.new, old)

    if not planted.at:
        return compute()
    can_change = [x.dtype != jax.dtypes.float0 for x in old]
    pick = lambda values: eqx.filter(values, can_change)

    def otherwise(xs):
        if not others:
            return xs
        args = others, site, guards, eqx.combine(xs, old), iterations
        return pick(_replaced(*args))

    # Not `where`: elsewhere a function may have a gradient that is not finite.
    new, rest = varying_alike([lambda _: pick(compute()), otherwise], pick(old))
    is_here = reached(planted.at, iterations)
    return eqx.combine(jax.lax.cond(is_here, new, rest, pick(old)), old)


def _only_zeros(places: Sequence[Site], value: Any, arrays: list[Any]) -> list[Any]:
    """`arrays`, those of a derivative that is planted at all these places. It must be
    zero for each leaf that has none there, as the program would go on without it. What
    is not known yet is checked while the program runs."""
    for i, x in enumerate(jtu.tree_leaves(value)):
        if not all(isinstance(site.form.leaves[i], NoTangent) for site in places):
            continue
        dtype = jnp.result_type(x)
        if dtype == jax.dtypes.float0:
            continue
        is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
        numbers = None if is_key else numbers_in(x)
        known = is_key or numbers is not None
        wrong = is_key or (jnp.any(x != 0) if numbers is None else numbers.any())
        problem = (
            f"`plant`: {places[0].said} has a leaf without a {places[0].mode} (an "
            "integer, a NumPy array, or what does not depend on what is "
            "differentiated), so only zeros fit there. Leave it as it was captured."
        )
        if wrong if known else _compat.varying(wrong):
            raise SowError(problem)
        arrays = arrays if known else eqx.error_if(arrays, wrong, problem)
    return arrays


def _at_site(
    site: Site,
    guards: Sequence[Any],
    arrays: Sequence[Any],
    captured: Site,
    old: Sequence[Any],
) -> list[Any]:
    """The arrays of the value at a mark, `old`, from planted ones, which have all lanes
    of what is `captured` there."""
    lanes = [a for a in captured.axes if a.lane]
    # Which of these axes the mark has, and in which of the lanes it runs.
    own = own_axes([a._replace(n_loops=0) for a in site.axes], lanes)
    run, _ = running(site, guards)
    if run is None:
        run = np.ones((1,) * len(site.axes), bool)
    run = aligned(run, own)
    # A tangent that is zero is captured like any other, but the mark has no operand
    # for it.
    leaves = zip(site.form.leaves, captured.form.leaves)
    is_operand = [own is OPERAND for own, leaf in leaves if leaf is OPERAND]
    return [
        # Of no lanes there is nothing to plant.
        sharded_like(_in_lanes(x, own, varies, run, site), other) if x.size else other
        for x, varies, other in zip(
            it.compress(arrays, is_operand), site.varies[len(guards) :], old
        )
    ]


def _in_lanes(
    x: Any, own: Iterable[bool], varies: Iterable[bool], run: Any, site: Site
) -> Any:
    """A planted array as an operand of the mark, which may vary over fewer lanes: in a
    vmap of 8 over which it does not vary, `f32[8,3]` becomes `f32[3]`. The arrays along
    such an axis must be the same in the lanes that `run`, which is checked while the
    program runs: in others, what was captured is zero."""
    of_own = iter(varies)
    kept = [is_own and next(of_own) for is_own in own]
    is_key = not all(kept) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    data = jax.random.key_data(x) if is_key else x
    for axis in [k for k, is_kept in enumerate(kept) if not is_kept]:
        if data.shape[axis] > 1:
            data = _one_along(data, run, axis, site)
        run = run.any(axis, keepdims=True)
    data = as_operand(data, kept)
    if not is_key:
        return data
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))


def _one_along(x: Any, run: Any, axis: int, site: Site) -> Any:
    x, run = whole_along(x, axis), leading(whole_along(run, axis), x.ndim)
    one = jnp.take_along_axis(x, jnp.argmax(run, axis, keepdims=True), axis)
    if _compat.varying(one):
        # A device that fails alone would leave the others waiting.
        raise SowError(
            f"`plant`: {site.said} has one value for all entries of an axis. Whether a "
            "planted value varies along it cannot be checked in a `jax.shard_map`. "
            "Plant a function."
        )
    is_other = (x != one) & ~((x != x) & (one != one))
    return eqx.error_if(
        one,
        jnp.any(run & is_other),
        f"`plant`: at {site.said} the program has one value for all entries of an "
        "axis: the planted value must not vary along it.",
    )


def _apply(fn: Callable, site: Site, values: Sequence[Any]) -> list[Any]:
    """`fn` of the value as the code at the mark sees it, for each lane."""

    def apply(*values):
        old = site.form.with_arrays(values)
        value = fn(old)
        new = _operands(value, site, values, of_function=True)
        NotFixed().add([site], value, values).check()
        return _only_zeros([site], value, new)

    return keeping_lanes(apply, site)(*values)


def _of_all_lanes(fn: Callable, site: Site, old: list[Any]) -> list[Any]:
    """`fn` of the value of all lanes at once, which it returns so, too."""
    check_all_lanes(
        site,
        "plant(fn, {...: batched(...)})",
        "Without `batched`, the function gets the value of one lane.",
    )
    # No loop is between the mark and what is planted.
    site = site._replace(axes=tuple(a._replace(n_loops=0) for a in site.axes))
    value = whole(site, list(map(aligned, old, site.varies)))
    seen = _operand_leaves(value, site)
    new = fn(value)
    arrays = _operands(new, site, seen, of_function=True, sees_all=True)
    NotFixed().add([site], new, seen).check()
    arrays = _only_zeros([site], new, arrays)
    # What the function leaves as it is needs no check that it does not vary.
    left = [x is y for x, y in zip(_operand_leaves(new, site), seen)]
    arrays = list(map(aligned, arrays, final_axes(site)))
    arrays = _at_site(site, (), arrays, site, old)
    return [x if same else y for x, y, same in zip(old, arrays, left)]


def _operand_leaves(value: Any, site: Site) -> list[Any]:
    """The leaves of a value in the places where arrays are marked."""
    leaves = zip(jtu.tree_leaves(value), site.form.leaves)
    return [x for x, leaf in leaves if leaf is OPERAND]


def _lanes_seen(site: Site, sees_all: bool) -> str:
    """Says what a planted function sees of a batch, where there is one."""
    if not any(axis.lane for axis in site.axes):
        return ""
    what = "one lane"
    if sees_all:
        what = "all lanes, as leading axes, and returns it so"
    return f" The mark is under a `vmap`, so the function gets the value of {what}."


def _or_a_function(site: Site) -> str:
    """Says that a planted value is the whole batch, where that is so."""
    if not site.axes:
        return ", or a function."
    return (
        ", with an axis in front for each loop and `vmap` around the mark. Or plant a "
        "function, which gets the value of one iteration and one lane."
    )


def _operands(
    value: Any,
    site: Site,
    like: Sequence[Any],
    *,
    of_function: bool = False,
    sees_all: bool = False,
) -> list[Any]:
    """The arrays of a value that must have the structure of what is marked. Each must
    have the shape and dtype of that in `like`, and gets its sharding."""
    whose, verb, instead = "the value", "Plant", _or_a_function(site)
    if of_function:
        whose, verb = "what the function returned", "Return"
        instead = "." + _lanes_seen(site, sees_all)
    value_for = f"`plant`: {whose} for {site.said}"
    form = site.form
    leaves, treedef = jtu.tree_flatten(value)
    if Const(treedef) != form.treedef:
        if of_function and value is None:
            raise SowError(
                f"`plant`: the function for {site.said} returned None; did you forget "
                "`return`?"
            )
        raise SowError(
            f"{value_for} has the structure {treedef}, but {form.treedef.value} is "
            f"marked there. {verb} a value of that structure.{site.form_said}"
        )
    new = []
    operand = iter(like)
    for leaf, x in zip(form.leaves, leaves):
        if isinstance(leaf, Const) and leaf != Const(x):
            raise SowError(
                f"{value_for} has the static leaf {x!r}, but {leaf.value!r} is marked "
                "there. Static leaves cannot be changed: plant that one."
            )
        if leaf is not OPERAND:
            continue
        old = next(operand)
        x = as_jax_does(x, old.dtype)
        if not eqx.is_array(x) or (x.shape, x.dtype) != (old.shape, old.dtype):
            got = f"{x.dtype}{list(x.shape)}" if eqx.is_array(x) else repr(x)
            raise SowError(
                f"{value_for} has a leaf {got} where {old.dtype}{list(old.shape)} is "
                f"marked. {verb} an array of that shape and dtype"
                f"{instead}"
            )
        new.append(sharded_like(jnp.asarray(x), old))
    return new


def prepare(
    entry: Entry,
    places: Sequence[Site],
    at: tuple[int | None, ...],
    value: Any,
    options: Any,
    not_fixed: NotFixed,
) -> tuple[Planted, list[Any]]:
    """What to plant at all places of one `Site.key`, and its arrays: aligned, but with
    the axes of loops first. `entry` has the shapes of what would be captured there, at
    the only place of a value. `not_fixed` is told what it replaces."""
    if callable(value):
        return Planted(SameParts(value), at, options.with_index), []
    loops = [i for i, a in enumerate(entry.site.axes) if not a.lane and a.mesh is None]
    gone = [k for k, i in zip(loops, at) if i is not None]
    entry = entry.with_only([k for k in range(len(entry.site.axes)) if k not in gone])
    site = entry.site
    has_form = Const(jtu.tree_structure(value)) == site.form.treedef
    if isinstance(value, Mapping) and not has_form:
        value = value.get(options.mode, value)
    final = final_axes(site)
    own = [[*it.compress(site.axes, varies)] for varies in final]
    like = [entry.shape(i, axes, it.repeat(True)) for i, axes in enumerate(own)]
    arrays = list(map(aligned, _operands(value, site, like), final))
    not_fixed.add(places, value, counted=entry.counted)
    arrays = _only_zeros(places, value, arrays)
    # Those of devices, too: both are in front, for `scan` and `shard_map` to slice.
    to_front = [k for k, a in enumerate(site.axes) if not a.lane]
    return Planted(site._replace(varies=tuple(final)), at), [
        jnp.moveaxis(x, to_front, range(len(to_front))) for x in arrays
    ]
