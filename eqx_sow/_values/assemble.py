"""From what was captured to `intermediates[name][mode]`."""

import itertools as it
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax.tree_util as jtu

from .._errors import SowError
from .._mark.site import Axis, Site
from .._mark.static import NoTangent, OPERAND, rebuild
from .._results.intermediates import (
    Axis as NamedAxis,
    in_order,
    Intermediates,
    Leading,
    Scan,
    with_axes,
)
from .axes import as_operand, broadcast, final_axes, kept_axes
from .entry import Entry, grouped, with_count
from .merge import Sown
from .modes import is_backward
from .reduce import finished, Reducers, ReducerState


def assemble(
    sown: Sown,
    states: Mapping[Any, ReducerState],
    reducers: Reducers,
    wanted: Mapping[Any, str],
) -> Intermediates:
    """`intermediates[name][mode]`, in order of execution. `states` are those of the
    reducers that have one. `wanted` says for each `Site.key` that comes back what its
    mode is called."""
    by_name = grouped(sown.entries, lambda site: site.name)
    places: dict[Any, Sequence[Entry | None]] = {
        key: of_key if reducers(key[0]) is None else _in_order(of_key, by_name[key[0]])
        for key, of_key in grouped(sown.entries).items()
    }
    for key, state in states.items():
        places[key] = [finished(reducers(key[0]), state)]
    out: dict[str, dict[str, Any]] = {name: {} for name, _ in sown.seen}
    counts: dict[str, _Returned] = {}
    axes = {}
    for key, entries in places.items():
        name, mode = key[0], wanted.get(key)
        returned = _of_places(entries, reducers(name))
        if mode is not None:
            out[name][mode] = returned.value
            axes[name, mode] = returned.axes
        if returned.count is not None:
            counts.setdefault(name, returned)
    for name, returned in counts.items():
        if out[name]:
            out[name]["count"] = returned.count
            axes[name, "count"] = returned.count_axes
    there = {name: in_order(modes) for name, modes in out.items() if modes}
    return with_axes(there, axes)


class _Returned(NamedTuple):
    """What comes back for a `Site.key`: its value, and its count if it has one. The
    other fields say what their arrays are, see `Intermediates`. With `Append` each is a
    sequence with one item for each place."""

    value: Any = None
    count: Any = None
    axes: tuple[Leading, ...] | list[Any] = ()
    count_axes: tuple[Leading, ...] | list[Any] = ()


def _of_places(entries: Sequence[Entry | None], reducer: Any) -> _Returned:
    """From the entries of one `Site.key`. `None` stands for a place that has none."""
    counted = any(e.counted for e in entries if e)
    lead = () if reducer is None else reducer.lead
    each = [_of_entry(e, counted, lead) if e else _Returned() for e in entries]
    if reducer is None or reducer.has_state:
        # `gather` lets no such name have several.
        (one,) = each
        return one
    values, counts, axes, count_axes = zip(*each)
    return _Returned(values, counts if counted else None, [*axes], [*count_axes])


def _of_entry(entry: Entry, counted: bool, buffers: Sequence[int]) -> _Returned:
    """From an entry, in which arrays have axes of size one: what is the same in all
    lanes is repeated for each. `buffers` are the sizes of `Reducer.lead`, axes that
    stand between those of the site and those of the value."""
    if counted:
        entry = with_count(entry)
    site = entry.site
    kept, final = kept_axes(site), final_axes(site, counted)
    arrays = [
        as_operand(broadcast(x, varies, site.axes), varies)
        for x, varies in zip(entry.arrays, final)
    ]
    count = arrays.pop() if counted else None
    lead = [*it.compress([a.size for a in site.axes], kept), *buffers]
    value = rebuild(site.treedef, site.leaves, arrays, lead)

    names = _named_axes(site, entry.route) + [_BUFFER] * len(buffers)
    of_operand = iter(final)
    axes = []
    for x, leaf in zip(jtu.tree_leaves(value), site.leaves):
        # A leaf that is static in the program is what it is.
        own: Iterable[NamedAxis] = ()
        if leaf is OPERAND or isinstance(leaf, NoTangent):
            varies = next(of_operand) if leaf is OPERAND else kept
            own = it.compress(names, [*varies, *[True] * len(buffers)])
        if eqx.is_array(x):
            axes.append((tuple(own), x.shape))
    count_axes = ()
    if count is not None:
        count_axes = ((tuple(it.compress(names, kept)), count.shape),)
    return _Returned(value, count, tuple(axes), count_axes)


_BUFFER = "buffer", None, None


def _named_axes(site: Site, route: Scan) -> list[NamedAxis]:
    """What each axis is, in the words of `Intermediates.axes`, where in the name the
    index of a loop stands, see `Label`, and which of the scans on the `route` it is."""
    scans = [
        route[: i + 1] for i, (_, reverse) in enumerate(route) if reverse is not None
    ]
    scan = iter(scans)
    place = iter(site.label.after)

    def name(axis: Axis) -> NamedAxis:
        if axis.mesh is not None:
            return f"device:{axis.mesh}", None, None
        if axis.lane:
            return "vmap", None, None
        return "loop", next(place, None), next(scan, None)

    return list(map(name, site.axes))


def _in_order(mine: Sequence[Entry], entries: Sequence[Entry]) -> list[Entry | None]:
    """The entries of one key, given all of its name. Those of a backward pass, which
    goes first through what ran last, are put in the order of their primals."""
    primals = [e for e in entries if not e.site.modes]
    if not is_backward(mine[0].site.mode) or not primals:
        return list(mine)
    order: list[Entry | None] = [None] * len(primals)
    others = []
    for e in mine:
        fits = [i for i, p in enumerate(primals) if not p.site.of.isdisjoint(e.site.of)]
        if len(fits) > 1:
            raise _unclear(e)
        # It may never have run forward, or a function from `jax.vjp` is called twice.
        if not fits or order[fits[0]] is not None:
            others.append(e)
        else:
            order[fits[0]] = e
    return [*order, *others]


def _unclear(e: Entry) -> SowError:
    mode = e.site.mode
    return SowError(
        f"`{e.site.name}` is sown several times (one is at {e.site.where}), and not "
        f"each branch differentiates the same of them: which {mode} belongs to which "
        "primal differs from branch to branch. Give the values different names."
    )
