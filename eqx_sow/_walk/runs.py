"""Which marks of a program are one run of their name.

Of the marks of a name, those that can never both run are one run of it: they are in
different branches of a `lax.cond`, or of a cond that a vmap made a selection of. A
derivative is of the run that its primal is.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jexc

from .sows import grouped, Mark, Way


class Run(NamedTuple):
    """Which run of its name a mark is, or is a derivative of. Marks of one `Site.key`
    and one run are one value: at most one of them runs."""

    # `None` if it cannot be told. Of a repetition, it is that of what is repeated.
    run: int | None
    # The executions that the mark is, or is a derivative of, by the ways to their
    # equations. There are several if it is in several branches. Empty if it is not
    # known.
    of: frozenset[Way] = frozenset()
    # Whether it is a repetition of these, which is not an execution of its own. `None`
    # if that cannot be told.
    again: bool | None = False
    # For a derivative, of each `while_loop` around it, from outside in: `False` if the
    # loop is also around the value, so that both are of the same iteration; `True` if
    # it goes through the iterations of the value from the last one; `None` otherwise.
    backward: tuple[bool | None, ...] = ()
    # Whether it cannot be told which of the iterations of such a loop is that of the
    # value.
    apart: bool = False
    # For a derivative, the branches that it is in and its value is not: of which cond,
    # and which branch.
    only_if: frozenset[Hashable] = frozenset()


class Facts(NamedTuple):
    """What is known of a mark before its run has a number."""

    mark: Mark
    known: Run


def numbered(found: Sequence[Facts]) -> dict[Way, Run]:
    """The run of each mark, by the ways to them."""
    which: dict[Way, int | None] = {}
    for group in grouped(found, lambda x: x.mark.site.name).values():
        every = _alternatives(
            [x for x in group if not (x.mark.site.modes or x.known.again)]
        )
        number = {x.mark.way: i for i, run in enumerate(every) for x in run}
        which |= number
        repeated = (x for x in group if x.known.again)
        which |= {x.mark.way: _only(_may_be(x, number)) for x in repeated}
        derivatives = [x for x in group if x.mark.site.modes and not x.known.again]
        for mine in grouped(derivatives, lambda x: x.mark.site.key).values():
            which |= _of_derivatives(mine, number, len(every))
    return {x.mark.way: x.known._replace(run=which[x.mark.way]) for x in found}


def _may_be(x: Facts, number: Mapping[Way, int]) -> set[int]:
    """The runs of the executions that a mark belongs to."""
    return {number[p] for p in x.known.of if p in number}


def _only(runs: set[int]) -> int | None:
    return min(runs) if len(runs) == 1 else None


def _of_derivatives(
    mine: Sequence[Facts], number: Mapping[Way, int], n: int
) -> dict[Way, int | None]:
    """The runs of the derivatives of one key. `number` says which of the `n` runs of
    the name a primal is."""
    runs: dict[Way, int | None] = {}
    taken: dict[int, list[Facts]] = defaultdict(list)
    others = []

    def are_apart(x: Facts, y: Facts) -> bool:
        of, other = x.known.of, y.known.of
        told_apart = bool(of and other and of.isdisjoint(other))
        return told_apart or are_exclusive(
            branches_by_way(x.mark), branches_by_way(y.mark)
        )

    # If the function is called twice, and a gradient is taken of both, what belongs to
    # the second call comes first.
    *inner, last = mine[0].mark.site.modes
    turned = last == "cotangent" and any(mode != "primal" for mode in inner)
    for x in reversed(mine) if turned else mine:
        may_be = _may_be(x, number)
        run = _only(may_be)
        if run is not None and all(are_apart(x, y) for y in taken[run]):
            taken[run].append(x)
        elif len(may_be) < 2:
            others.append(x)
            continue
        runs[x.mark.way] = run
    # Its value may never have run forward, or a function from `jax.vjp` is called
    # twice. They are in the order of their primals, those of others, too.
    others.sort(key=lambda x: min(x.known.of - number.keys(), default=()))
    for i, run in enumerate(_alternatives(others)):
        runs |= {x.mark.way: n + i for x in run}
    return runs


def _alternatives(found: Sequence[Facts]) -> list[list[Facts]]:
    """The marks, of which those are together that can never both run: each goes to the
    first ones of which all are exclusive to it, and so have a cond in common."""
    every: list[list[Facts]] = []
    by_cond: dict[Any, list[int]] = defaultdict(list)
    for x in found:
        conds = branches_by_way(x.mark)
        near = sorted({i for cond in conds for i in by_cond[cond]})
        fits = (
            i
            for i in near
            if all(are_exclusive(conds, branches_by_way(y.mark)) for y in every[i])
        )
        i = next(fits, len(every))
        if i == len(every):
            every.append([])
        every[i].append(x)
        for cond in conds:
            by_cond[cond].append(i)
    return every


def branches_by_way(mark: Mark) -> dict[Any, int]:
    """In which branch a mark is, of each cond around it, and of each run of a cond that
    a vmap made a selection of."""
    way, found = mark.way, {}
    for i, eqn in enumerate(mark.eqns):
        if eqn.primitive is jexc.primitives.cond_p:
            found[way[: 2 * i + 1]] = way[2 * i + 1]
    for guard, made in zip(mark.site.guards, mark.made):
        found[guard.cond, made] = guard.branch
    return found


def are_exclusive(mine: Mapping[Any, int], others: Mapping[Any, int]) -> bool:
    """Whether two marks are in different branches of one run of a cond, given the
    branches that each is in, by conds."""
    return any(others.get(cond, i) != i for cond, i in mine.items())
