"""From what was captured to `intermediates[name][mode]`."""

import dataclasses as dc
import functools as ft
import itertools as it
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from .._errors import SowError
from .._mark.site import Axis, Site
from .._mark.static import NoTangent, OPERAND
from .._results.intermediates import Intermediates
from .._results.layers import Known, Leading, NamedAxis, Scan
from .._results.nodes import made, modes_in_order
from .axes import as_operand, broadcast, final_axes, kept_axes, whole
from .entry import Entry, grouped, with_count
from .reduce import Reducers


def assemble(
    found: Sequence[Entry],
    when: Mapping[str, Sequence[int]],
    reducers: Reducers,
    wanted: Mapping[Any, str],
    known: Known,
    runs: Sequence[int | None],
) -> Intermediates:
    """`intermediates[name][mode]`. `when` has the names, in order of execution, and
    says where in that order the marks of each are. `wanted` says for each `Site.key`
    that comes back what its mode is called. `known` is all that is known beside the
    axes; `runs` says of each slot which run of its name it is."""
    by_name = grouped(found, lambda site: site.name)
    out: dict[str, dict[str, Any]] = {name: {} for name in when}
    counts: dict[str, _Returned] = {}
    axes: dict[tuple[str, str], Any] = {}
    appended = set()
    for key, of_key in grouped(found).items():
        (name, *_), mode = key, wanted.get(key)
        reducer: Any = reducers(name)
        # No other name has several: see `Taking.duplicate`.
        several = reducer is not None and not reducer.has_state
        if reducer is not None and reducer.bare_if_one:
            several = runs_several_times(of_key, by_name[name])
        elif several:
            appended.add(name)
        entries: Sequence[Entry | None] = of_key
        if several:
            entries = [e for _, e in by_run(of_key, by_name[name], runs)]
        lead = () if reducer is None else reducer.lead
        if mode is not None:
            value = ft.partial(_value_of, buffers=lead)
            out[name][mode], axes[name, mode] = _returned(value, entries, several)
        # A backward pass may be in a branch or a loop that the value is not in: how
        # often that ran is not how often the value did.
        counts_here = not of_key[0].site.modes or all(
            e.site.modes for e in by_name[name]
        )
        if counts_here and any(e.counted for e in entries if e):
            counts.setdefault(name, _returned(_count_of, entries, several))
    for name, (count, of_count) in counts.items():
        if out[name]:
            out[name]["count"], axes[name, "count"] = count, of_count
    there = {name: modes_in_order(modes) for name, modes in out.items() if modes}
    # Of several marks in branches that make one run, the first counts.
    n_runs = {name: sum(not e.site.modes for e in by_name[name]) for name in there}
    order = {
        name: tuple(when[name][:n] if len(when[name]) == n else when[name][:1])
        for name, n in n_runs.items()
    }
    known = dc.replace(known, axes=axes, appended=frozenset(appended), order=order)
    return made(Intermediates, there, known)


# What comes back, and what the axes of its arrays are, see `Intermediates`.
_Returned = tuple[Any, tuple[Leading, ...] | list[Any]]


def _returned(
    of: Callable[[Entry], _Returned], entries: Sequence[Entry | None], several: bool
) -> _Returned:
    """From the entries of one `Site.key`: that of the only one, or with `Append`, of
    each place, of which some have none."""
    values, axes = zip(*[(None, ()) if e is None else of(e) for e in entries])
    return (values, [*axes]) if several else (values[0], axes[0])


def _value_of(entry: Entry, buffers: Sequence[int]) -> _Returned:
    """`buffers` are the sizes of `Reducer.lead`."""
    site = entry.site
    if not site.axes and not buffers and site.form.leaves == (OPERAND,):
        # As nearly all values are that are not in a loop.
        x = entry.arrays[0]
        return site.form.with_arrays([x]), (((), x.shape),)
    value = whole(site, entry.arrays, *buffers)
    names = named_axes(site, entry.route) + [_BUFFER] * len(buffers)
    kept, of_operand = kept_axes(site), iter(final_axes(site))
    axes = []
    for x, leaf in zip(jtu.tree_leaves(value), site.form.leaves):
        # A leaf that is static in the program is what it is.
        own: Iterable[NamedAxis] = ()
        if leaf is OPERAND or isinstance(leaf, NoTangent):
            varies = next(of_operand) if leaf is OPERAND else kept
            own = it.compress(names, [*varies, *[True] * len(buffers)])
        if eqx.is_array(x):
            axes.append((tuple(own), x.shape))
    return value, tuple(axes)


def _count_of(entry: Entry) -> _Returned:
    entry = with_count(entry)
    site, kept = entry.site, kept_axes(entry.site)
    count = as_operand(broadcast(entry.arrays[-1], kept, site.axes), kept)
    names = named_axes(site, entry.route)
    return count, ((tuple(it.compress(names, kept)), count.shape),)


_BUFFER = "buffer", None, None


def named_axes(site: Site, route: Scan) -> list[NamedAxis]:
    """What each axis is, in the words of `Intermediates.axes`, where in the name the
    index of a loop stands, see `Label`, and which of the scans on the `route` it is."""
    scan = (
        route[: i + 1] for i, (_, reverse) in enumerate(route) if reverse is not None
    )
    place = iter(site.label.places)

    def name(axis: Axis) -> NamedAxis:
        if axis.mesh is not None:
            return f"device:{axis.mesh}", None, None
        if axis.lane:
            return "vmap", None, None
        return "loop", next(place, None), next(scan, None)

    return list(map(name, site.axes))


def runs_several_times(mine: Sequence[Entry], entries: Sequence[Entry]) -> bool:
    """Whether there is a tuple for the entries of one key, given all of its name."""
    return len(mine) > 1 or sum(not e.site.modes for e in entries) > 1


def by_run(
    mine: Sequence[Entry], entries: Sequence[Entry], runs: Sequence[int | None]
) -> list[tuple[int | None, Entry | None]]:
    """The entries of one key, given all of its name, each with the number of its run.
    Derivatives are in the order of their primals: a backward pass goes first through
    what ran last, and not every run need have one."""
    run_of: Any = lambda e: None if e.slot is None else runs[e.slot]
    own: list[tuple[Any, Any]] = [(run_of(e), e) for e in mine]
    mode, primals = mine[0].site.mode, [e for e in entries if not e.site.modes]
    unclear = [e for run, e in own if run is None]
    if unclear and "cotangent" not in mode and len(mine) == len(primals):
        return own
    for e in unclear:
        raise SowError(
            f"`{e.site.name}` runs several times (one is at {e.site.where}), and "
            f"eqx_sow cannot tell which {mode} belongs to which primal: one may belong "
            "to several, as in branches that differentiate different values, or in a "
            "loop that a backward pass runs again. Give the values different names, or "
            f"leave the {mode} out, by `modes`."
        )
    of_run = dict(own)
    return [(run, of_run.get(run)) for run in sorted({*map(run_of, primals), *of_run})]
