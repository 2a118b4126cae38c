"""Where the values of `plant` belong: the marks and iterations that a name or a pattern
is for, and which run, where a name runs several times."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.tree_util as jtu

from .._errors import DuplicateSowError, SowError
from .._handlers.collect import Collect, EACH_PLACE
from .._mark.site import Site
from .._mark.static import Const, SameParts
from .._unknown import check_known
from .._values.assemble import by_run, runs_several_times
from .._values.entry import Entry, grouped
from .._values.modes import labels
from .._walk.sows import Found
from .program import Program


# Which iteration of each loop around a sow is planted, or `None` for all of a loop.
At = tuple[int | None, ...]


def marks_for(
    patterns: Collection[str], program: Program
) -> dict[str, list[tuple[str, At]]]:
    """The names and iterations that each pattern fits: of `h/3`, `h` and `(3,)`. What
    is spelled out goes before globs, and these go in their order."""
    selection = program.select(patterns)
    program.check_selected("plant(fn, values)", selection)
    every = [(x.site.name, selection.of(named)) for x, named in program.named]
    return {
        selection.patterns[i]: [
            (name, one.at) for name, found in every for one in found.get(i, ())
        ]
        for i in sorted(range(len(selection.patterns)), key=selection.order)
    }


def by_iteration(
    given: Mapping[str, Any], marks: Mapping[str, Sequence[tuple[str, At]]]
) -> tuple[dict[str, dict[At, Any]], dict[str, dict[str, list[At]]]]:
    """For each name, what is planted in which iterations: `{"h/3": v}` is
    `{"h": {(3,): v}}`; and which of the iterations come from the same pattern."""
    chosen: dict[str, dict[At, Any]] = defaultdict(dict)
    together: dict[str, dict[str, list[At]]] = defaultdict(dict)
    for pattern, found in marks.items():
        for name, at in found:
            if at not in chosen[name]:
                chosen[name][at] = given[pattern]
                together[name].setdefault(pattern, []).append(at)
    return chosen, together


def entries_of(
    program: Program, places: Mapping[str, Sequence[tuple[str, At]]]
) -> tuple[dict[Any, list[Entry]], dict[str, list[Entry]]]:
    """What would be captured, as shapes, for each `Site.key` that is planted; and for
    each name, with its primals. One of the names that a pattern fits has to have a
    value of the mode."""
    chosen = tuple(
        dict.fromkeys(name for found in places.values() for name, _ in found)
    )
    mode = program.options.mode
    survey = Collect(
        **program.listens(program.select(chosen)),
        modes=(mode,),
        reduce=EACH_PLACE,
        transform=SameParts(None),
    )
    found = program.survey(survey)
    mode_of = labels({e.site.key for e in found})
    entries = grouped([e for e in found if mode_of[e.site.key] == mode])
    there = dict.fromkeys(name for name, *_ in entries)
    without = [
        name
        for found in places.values()
        if there.keys().isdisjoint(name for name, _ in found)
        for name, _ in found
    ]
    check_known(
        f"plant(fn, values, mode={mode!r})",
        without,
        there,
        f"is marked, but has no {mode} here (a cotangent is in "
        "`plant(eqx.filter_grad(fn), ...)`)",
        kind=f"names with a {mode}",
    )
    return entries, grouped(found, lambda site: site.name)


class Run(NamedTuple):
    """Where something is planted: at one run of a `Site.key`, number `run`, or at all
    (`None`). `entry` is what would be captured there, `found` the sows, and `values`
    what is planted in which iterations."""

    run: int | None
    entry: Entry
    found: list[Found]
    values: dict[At, Any]


def check_one_place(site: Site, loops: Collection[tuple[int, ...]]) -> None:
    """Raises if a value, or an index, cannot be for all places of a run. In `loops` are
    the numbers of iterations around each place."""
    if len(loops) > 1:
        found = " and ".join(str(list(x)) for x in sorted(loops))
        raise SowError(
            f"`plant`: {site.said} is in several branches, with different loops around "
            f"it: {found} iterations, outermost first. No value has the axes of all, "
            "and no index is right for all. Plant a function under the name without an "
            "index, or give the values different names."
        )


def _has(loops: Sequence[int], at: At) -> bool:
    """Whether what is in these loops has the iteration."""
    return not at or (
        len(at) == len(loops) and all(i is None or i < n for i, n in zip(at, loops))
    )


def _that_has(run: Iterable[Found], ats: Iterable[At]) -> list[At]:
    """Those of the iterations that a run has."""
    loops = {x.loops for x in run}
    return [at for at in ats if any(_has(x, at) for x in loops)]


def runs_to_plant(
    mine: list[Entry],
    entries: list[Entry],
    found: list[Found],
    values: dict[At, Any],
    together: Iterable[Sequence[At]],
    mode: str,
) -> tuple[list[Run], Sequence[frozenset] | None]:
    """Where a `Site.key` is planted, given its entries, and those of its name, with all
    sows of that name; and `Site.of` of each run, if they are planted one by one. Of
    each iteration, those runs are planted that have it. `together` are the iterations
    of one pattern: layer 2 is `(2,)` for a run in a loop over layers, and `(None, 2)`
    for another one, around which there is a loop over steps."""
    key = mine[0].site.key
    of_key = [x for x in found if x.site.key == key]
    functions = all(map(callable, values.values()))
    alike = len({x.loops for x in of_key}) == 1
    if not runs_several_times(mine, entries) or (
        functions and (alike or not any(values))
    ):
        return [Run(None, mine[0], of_key, values)], None
    primals = [e for e in entries if not e.site.modes]
    runs = by_run(mine, entries)
    ofs = [_of(e or primals[i]) for i, e in enumerate(runs)]
    sows = [[x for x in of_key if not x.site.execution.of.isdisjoint(of)] for of in ofs]
    around = [
        xs or [x for x in found if not x.site.execution.of.isdisjoint(of)]
        for xs, of in zip(sows, ofs)
    ]
    given: list[dict[At, Any]] = [{} for _ in runs]
    for ats in together:
        fits = {i: _that_has(xs, ats) for i, xs in enumerate(around)}
        fits = {i: here for i, here in fits.items() if here}
        where = [around[i][0].site for i in fits]
        each = _one_by_one(values[ats[0]], mine[0].site, where, mode)
        for (i, here), x in zip(fits.items(), each):
            if x is None:
                continue
            if runs[i] is None and not callable(x):
                raise SowError(
                    f"`plant`: run {i} of {key[0]!r}, at {where[0].where}, has no "
                    f"{mode}. Leave None there, as it was captured."
                )
            given[i] |= dict.fromkeys(here, x)
    return [
        Run(i, e, xs, of_run)
        for i, (e, xs, of_run) in enumerate(zip(runs, sows, given))
        if e is not None and of_run
    ], ofs


def _of(entry: Entry) -> frozenset[Any]:
    return frozenset() if entry.slot is None else entry.slot.of


def _one_by_one(given: Any, site: Site, runs: Sequence[Site], mode: str) -> Any:
    """What is planted in each of these runs: of a tuple, the entries."""
    form = site.form.treedef
    has_form = lambda x: Const(jtu.tree_structure(x)) == form
    value: Any = given
    if callable(value):
        return [value] * len(runs)
    if isinstance(value, Mapping) and not has_form(value):
        value = value.get(mode, value)
    if len(runs) == 1:
        return [value]
    if type(value) in (tuple, list) and len(value) == len(runs):
        # The value of a single run may also be a tuple.
        single = has_form(value) and not any(x is None or has_form(x) for x in value)
        if not single:
            return value
    n = len(runs)
    where = " and at ".join(dict.fromkeys(x.where for x in runs))
    raise DuplicateSowError(
        f"`plant`: {site.name!r} runs {n} times: at {where}. Plant a tuple of {n} "
        "values, one for each run in order of execution, as `save_intermediates` "
        "returns it (None leaves a run as it is); or plant a function, which is called "
        "at each of them."
    )
