"""Where the values of `plant` belong: the marks and iterations that a name or a pattern
is for, and which run, where a name runs several times."""

import itertools as it
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.tree_util as jtu

from .._errors import DuplicateSowError, SowError
from .._globs import head_of, is_number, layers_in
from .._handlers.asked import InList
from .._handlers.collect import Taking
from .._handlers.replace import Planted
from .._mark.site import Site
from .._mark.static import Const
from .._names import Named
from .._unknown import check_known
from .._values.assemble import by_run, runs_several_times
from .._values.entry import Entry, grouped
from .._values.modes import labels
from .._values.transform import Batched, batched
from .._walk.handler import check_clear
from .._walk.plan import Ask, NOTHING, Placed, planned, Wanted
from .._walk.runs import Run
from .._walk.sows import lengths_of, Mark, Way
from .program import Program


# Which iteration of each loop around a sow is planted, or `None` for all of a loop.
At = tuple[int | None, ...]


def marks_for(
    values: Mapping[str, Any], program: Program
) -> dict[str, list[tuple[str, At]]]:
    """The names and iterations that each key of these fits: of `h/3`, `h` and `(3,)`.
    What is spelled out goes before globs, and these go in their order."""
    selection = program.select(values)
    program.check_selected("plant(fn, values)", selection)
    selection.check_values("plant(fn, values)", values)
    every = [(x.site.name, selection.of(named)) for x, named in program.named]
    return {
        selection.patterns[i]: [
            (name, one.at) for name, found in every for one in found.get(i, ())
        ]
        for i in sorted(range(len(selection.patterns)), key=selection.order)
    }


def by_iteration(
    given: Mapping[str, Any],
    marks: Mapping[str, Sequence[tuple[str, At]]],
    program: Program,
) -> tuple[dict[str, dict[At, Any]], dict[str, dict[str, list[At]]]]:
    """For each name, what is planted in which iterations: `{"h/3": v}` is
    `{"h": {(3,): v}}`; and which of the iterations come from the same pattern. With
    `with_index=True`, functions for a list of layers know which one it is."""
    chosen: dict[str, dict[At, Any]] = defaultdict(dict)
    together: dict[str, dict[str, list[At]]] = defaultdict(dict)
    for pattern, found in marks.items():
        for name, at in found:
            if at not in chosen[name]:
                value = given[pattern]
                if program.options.with_index:
                    value = _in_lists(value, pattern, name, program)
                chosen[name][at] = value
                together[name].setdefault(pattern, []).append(at)
    return chosen, together


# --- functions for lists of layers ---
def _in_lists(value: Any, pattern: str, name: str, program: Program) -> Any:
    """What is planted under a name, with the numbers of layers that the globs in the
    pattern stand for."""
    mine = [pair for pair in program.named if pair[0].site.name == name]
    if type(value) in (tuple, list):
        # One for each run, or a value, in which functions are static leaves.
        if len({x.way for x, _ in mine if not x.site.modes}) < 2:
            return value
        return type(value)(_in_lists(x, pattern, name, program) for x in value)
    ways = {_layers(pattern, *pair, program) for pair in mine if callable(value)}
    if len(ways) > 1:
        raise SowError(
            f"`plant`: {name!r} is in several places, with different loops around the "
            "list of layers, so no index is right for all. Plant a function under each "
            "name, without `with_index`."
        )
    layers = next(iter(ways), ())
    if not layers:
        return value
    if isinstance(value, Batched):
        return batched(InList(value.fn, layers))
    return InList(value, layers)


def _layers(
    pattern: str, found: Mark, named: Named, program: Program
) -> tuple[tuple[int, int], ...]:
    """The numbers of layers in a name that a glob in the pattern stands for, each with
    how many loops are around the list."""
    parts = named.name.split("/")
    numbers = ((k, head_of(parts[k])[0]) for k in layers_in(named.name, pattern))
    n_around = lambda k: _n_loops_around(k, found, named, program)
    return tuple((n_around(k), int(head)) for k, head in numbers)


def _n_loops_around(k: int, found: Mark, named: Named, program: Program) -> int:
    """How many of the loops around a mark are around the list whose number is part `k`
    of its name, too: those over stacks that stand before it in the name, and those that
    other layers of the list are in as well."""
    name, (_, *key) = named.name, found.site.key

    def without_number(name):
        parts = name.split("/")
        head, rest = head_of(parts[k]) if k < len(parts) else ("", "")
        return (*parts[:k], rest, *parts[k + 1 :]) if is_number(head) else None

    others = [x for x in program.mine if x.site.key[1:] == (*key,)]
    others = [x for x in others if x.site.name != name]
    mine = without_number(name)
    others = [x for x in others if without_number(x.site.name) == mine]
    shared = {id(eqn) for x in others for eqn in x.eqns}
    loops = [eqn for eqn in found.eqns if lengths_of([eqn])]
    n = 0
    for eqn, (place, _) in zip(loops, named.loops):
        if place is None and not others:
            raise SowError(
                f"`plant`: {name!r} is the only layer of its list, so it is not known "
                "whether the loop around it is in the list, or around it. Plant a "
                f"function under {name!r}, whose `index` has no entry for the list."
            )
        n += id(eqn) in shared if place is None else place < k
    return n


class Surveyed(NamedTuple):
    """What would be captured, as shapes."""

    # For each `Site.key` that is planted.
    of_key: dict[Any, list[Entry]]
    # For each name, with its primals.
    of_name: dict[str, list[Entry]]
    # Of each slot, which run of its name it is.
    runs: Sequence[int | None]


def surveyed(
    program: Program,
    runs: Mapping[Way, Run],
    places: Mapping[str, Sequence[tuple[str, At]]],
) -> Surveyed:
    """What would be captured of the names that patterns fit. One of those that a
    pattern fits has to have a value of the mode."""
    fitted = [[name for name, _ in found] for found in places.values()]
    chosen = program.select(tuple(dict.fromkeys(it.chain(*fitted))))
    mode = program.options.mode
    taking = Taking((mode,)).for_each_place
    found, slots = program.survey(taking, program.asked_by(chosen), runs)
    mode_of = labels({e.site.key for e in found})
    entries = grouped([e for e in found if mode_of[e.site.key] == mode])
    there = dict.fromkeys(name for name, *_ in entries)
    without = [x for names in fitted if there.keys().isdisjoint(names) for x in names]
    check_known(
        f"plant(fn, values, mode={mode!r})",
        without,
        there,
        f"is marked, but has no {mode} here (a cotangent is in "
        "`plant(eqx.filter_grad(fn), ...)`)",
        kind=f"names with a {mode}",
    )
    by_name = grouped(found, lambda site: site.name)
    return Surveyed(entries, by_name, [slot.run.run for slot in slots])


class Place(NamedTuple):
    """Where something is planted: at one run of a `Site.key`, or at all (`None`).
    `entry` is what would be captured there, `marks` are the marks, and `values` is what
    is planted in which iterations."""

    run: int | None
    entry: Entry
    marks: list[Mark]
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


def _that_has(run: Iterable[Mark], ats: Iterable[At]) -> list[At]:
    """Those of the iterations that a run has."""
    are_there = lambda at, loops: all(i is None or i < n for i, n in zip(at, loops))
    has = lambda x, at: not at or len(at) == len(x.loops) and are_there(at, x.loops)
    return [at for at in ats if any(has(x, at) for x in run)]


def places_of(
    key: Any,
    survey: Surveyed,
    found: Mapping[int | None, Sequence[Mark]],
    values: dict[At, Any],
    together: Iterable[Sequence[At]],
    mode: str,
) -> list[Place]:
    """Where a `Site.key` is planted, given all marks of that name by their runs. Of
    each iteration, those runs are planted that have it. `together` are the iterations
    of one pattern: layer 2 is `(2,)` for a run in a loop over layers, and `(None, 2)`
    for another one, around which there is a loop over steps."""
    mine, entries = survey.of_key[key], survey.of_name[key[0]]
    of_key = lambda marks: [x for x in marks if x.site.key == key]
    every = [x for marks in found.values() for x in of_key(marks)]
    functions = all(map(callable, values.values()))
    alike = len({x.loops for x in every}) == 1
    if not runs_several_times(mine, entries) or (
        functions and (alike or not any(values))
    ):
        site = mine[0].site
        only = {at: _one_by_one(x, site, [site], mode)[0] for at, x in values.items()}
        return [Place(None, mine[0], every, only)]
    runs = by_run(mine, entries, survey.runs)
    of_run = dict(runs)
    # If there is no derivative, the values are.
    around = {run: of_key(found[run]) or found[run] for run, _ in runs}
    given: dict[Any, dict[At, Any]] = {run: {} for run, _ in runs}
    for ats in together:
        fits = {run: _that_has(around[run], ats) for run, _ in runs}
        fits = {run: here for run, here in fits.items() if here}
        where = [around[run][0].site for run in fits]
        each = _one_by_one(values[ats[0]], mine[0].site, where, mode)
        for (run, here), x in zip(fits.items(), each):
            if x is None:
                continue
            if of_run[run] is None and not callable(x):
                raise SowError(
                    f"`plant`: run {list(of_run).index(run)} of {key[0]!r}, at "
                    f"{around[run][0].site.where}, has no {mode}. Leave None there, as "
                    "it was captured."
                )
            given[run] |= dict.fromkeys(here, x)
    return [
        Place(run, entry, of_key(found[run]), given[run])
        for run, entry in runs
        if entry is not None and given[run]
    ]


def to_plant(
    marks: Sequence[Mark],
    runs: Mapping[Way, Run],
    slots: Mapping[Any, Mapping[int | None, int]],
    planted: Sequence[tuple[Planted, ...]],
) -> Placed:
    """The plan. `slots` says where each run of a `Site.key` is among what is `planted`,
    or all of them (`None`)."""
    slots = {key: of_key for key, of_key in slots.items() if of_key}
    names = {name for name, *_ in slots}
    rows: list[Wanted] = []
    for mark in marks:
        if mark.site.name not in names:
            continue
        of_key, run = slots.get(mark.site.key, {}), runs[mark.way]
        slot = of_key.get(None, NOTHING)
        if of_key and None not in of_key:
            if run.run is None:
                site = mark.site
                alike = [x for x in marks if x.site.name == site.name]
                n = len({runs[x.way].run for x in alike} - {None})
                raise SowError(
                    f"`plant`: {site.name!r} runs {n} times, and eqx_sow cannot tell "
                    f"which of these runs a {site.mode} at {site.where} belongs to, as "
                    "in a backward pass that computes values again. Plant a function, "
                    "which is called at each."
                )
            slot = of_key.get(run.run, NOTHING)
        if slot != NOTHING:
            check_clear(mark.site, run.again)
        what = () if slot == NOTHING else planted[slot]
        rows.append(Wanted(mark, [Ask(slot, mark.site.labels, (), what)]))
    return planned(rows)


def _one_by_one(given: Any, site: Site, runs: Sequence[Site], mode: str) -> Any:
    """What is planted in each of these runs: of a tuple, the entries."""
    form = site.form.treedef
    has_form = lambda x: Const(jtu.tree_structure(x)) == form
    value: Any = given
    if callable(value):
        return [value] * len(runs)
    if isinstance(value, Mapping) and not has_form(value):
        value = value.get(mode, value)
    is_tuple = type(value) in (tuple, list) and len(value) == len(runs)
    if len(runs) == 1:
        # `Append` makes a tuple of a single run, too.
        of_run = is_tuple and not has_form(value) and has_form(value[0])
        return [*value] if of_run and not callable(value[0]) else [value]
    # The value of a single run may also be a tuple.
    has_form_of_run = lambda x: x is None or has_form(x)
    if is_tuple and (not has_form(value) or any(map(has_form_of_run, value))):
        return value
    n = len(runs)
    where = " and at ".join(dict.fromkeys(x.where for x in runs))
    raise DuplicateSowError(
        f"`plant`: {site.name!r} runs {n} times: at {where}. Plant a tuple of {n} "
        "values, one for each run in order of execution, as `save_intermediates` "
        "returns it (None leaves a run as it is); or plant a function, which is called "
        "at each of them."
    )
