"""From what was captured to `intermediates[name][mode]`."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from .._errors import SowError
from .._mark.static import rebuild
from .._results.intermediates import in_order, Intermediates, with_axes
from . import entry as _entry, reduce as _reduce
from .entry import Entry, Result
from .modes import is_backward
from .reduce import Reducers, ReducerState
from .sown import Sown


def assemble(
    sown: Sown,
    states: Mapping[Any, ReducerState],
    reducers: Reducers,
    wanted: Mapping[Any, str],
) -> Intermediates:
    """`intermediates[name][mode]`, in order of execution. `states` are those of the
    reducers that have one. `wanted` says for each `Site.key` that comes back what its
    mode is called."""
    results = _placed(sown.entries, reducers)
    for key, state in states.items():
        results[key] = _reduce.finished(reducers(key[0]), state)
    out: dict[str, dict[str, Any]] = {name: {} for name, _ in sown.seen}
    counts: dict[str, Result] = {}
    axes = {}
    for key, result in results.items():
        name, mode = key[0], wanted.get(key)
        if mode is not None:
            out[name][mode] = result.value
            axes[name, mode] = result.axes
        if result.count is not None:
            counts.setdefault(name, result)
    for name, result in counts.items():
        if out[name]:
            out[name]["count"] = result.count
            axes[name, "count"] = result.count_axes
    there = {name: in_order(modes) for name, modes in out.items() if modes}
    return with_axes(there, axes)


def _placed(entries: Sequence[Entry], reducers: Reducers) -> dict[Any, Result]:
    """What comes back for each `Site.key` that is not reduced; of each place, where
    there may be several."""
    results = {}
    by_name = _entry.grouped(entries, lambda site: site.name)
    for key, same in _entry.grouped(entries).items():
        conditional = any(e.counted for e in same)
        if reducers(key[0]) is not None:
            places = _in_order(same, by_name[key[0]])
            places = [_finished(e, conditional) for e in places]
            values, counts, axes, count_axes = zip(*places)
            counts = counts if conditional else None
            results[key] = Result(values, counts, [*axes], [*count_axes])
        else:
            # `gather` lets no other name have several.
            (one,) = same
            results[key] = _finished(one, conditional)
    return results


def _finished(entry: Entry | None, conditional: bool) -> Result:
    if entry is None:
        return Result()
    entry = _entry.full(_entry.with_count(entry) if conditional else entry)
    site = entry.site
    *values, count = entry.arrays if conditional else (*entry.arrays, None)
    lead = tuple(a.size for a in site.axes)
    value = rebuild(site.treedef, site.leaves, values, lead, jnp)
    has = [site.has(i) for i in range(len(entry.arrays))]
    named = _entry.named_axes(site, entry.route)
    axes = _entry.axes_of_arrays(value, site, has, named)
    count_axes = _entry.axes_of_count(count, named, has[-1]) if conditional else ()
    return Result(value, count, axes, count_axes)


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
