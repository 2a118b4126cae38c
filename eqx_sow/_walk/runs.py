"""Which marks of a program are one value.

Of the marks of a name, those that can never both run are one run of it: they are in
different branches of a `lax.cond`, or of a cond that a vmap made a selection of. A
derivative is of the run that its primal is.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jexc

from .repetitions import Sown
from .sows import Way


class Run(NamedTuple):
    run: int | None
    may_be: tuple[int, ...] = ()


def runs(
    found: Sequence[Sown], of: Mapping[Way, frozenset[Way]], again: Mapping[Way, Any]
) -> dict[Way, Run]:
    """The run of each mark, by the ways to them."""
    planned: dict[Way, Run] = {}
    for _, group in _grouped(found, lambda x: x.site.name).items():
        primals = [x for x in group if not x.site.modes and not again.get(x.here.way)]
        every = _alternatives(primals)
        number = {x.here.way: i for i, run in enumerate(every) for x in run}
        planned |= {way: Run(i) for way, i in number.items()}
        derivatives = [x for x in group if x.site.modes]
        for mine in _grouped(derivatives, lambda x: x.site.key).values():
            planned |= _of_derivatives(mine, of, number, len(every))
    return planned


def _of_derivatives(
    mine: Sequence[Sown],
    of: Mapping[Way, frozenset[Way]],
    number: Mapping[Way, int],
    n: int,
) -> dict[Way, Run]:
    planned: dict[Way, Run] = {}
    taken: dict[int, list[Sown]] = defaultdict(list)
    others = []

    def apart(x, y):
        of_x, of_y = of[x.here.way], of[y.here.way]
        return are_exclusive(x, y) or (of_x and of_y and of_x.isdisjoint(of_y))

    for x in mine:
        may_be = sorted({number[p] for p in of[x.here.way] if p in number})
        if len(may_be) > 1:
            planned[x.here.way] = Run(None, tuple(may_be))
        elif may_be and all(apart(x, y) for y in taken[may_be[0]]):
            taken[may_be[0]].append(x)
            planned[x.here.way] = Run(may_be[0])
        else:
            others.append(x)
    # It may never have run forward, or a function from `jax.vjp` is called twice.
    others.sort(key=lambda x: min(of[x.here.way] - number.keys(), default=()))
    for i, run in enumerate(_alternatives(others)):
        planned |= {x.here.way: Run(n + i) for x in run}
    return planned


def _grouped(found, key):
    groups = defaultdict(list)
    for x in found:
        groups[key(x)].append(x)
    return groups


def _alternatives(found: Sequence[Sown]) -> list[list[Sown]]:
    """The marks, of which those are together that can never both run: each goes to the
    first ones of which all are exclusive to it, and so have a cond in common."""
    every: list[list[Sown]] = []
    by_cond: dict[Any, list[int]] = defaultdict(list)
    for x in found:
        conds = branches(x)
        near = sorted({i for cond in conds for i in by_cond[cond]})
        fits = (i for i in near if all(are_exclusive(x, y) for y in every[i]))
        i = next(fits, len(every))
        if i == len(every):
            every.append([])
        every[i].append(x)
        for cond in conds:
            by_cond[cond].append(i)
    return every


def branches(x: Sown) -> dict[Any, int]:
    """In which branch a mark is, of each cond around it, and of each run of a cond that
    a vmap made a selection of."""
    way, around = x.here.way, x.here.around
    return {
        **{
            way[: 2 * i + 1]: way[2 * i + 1]
            for i, eqn in enumerate(around)
            if eqn.primitive is jexc.primitives.cond_p
        },
        **{(g.cond, run): g.branch for g, run in zip(x.site.guards, x.runs)},
    }


def are_exclusive(x: Sown, y: Sown) -> bool:
    """Whether two marks are in different branches of one run of a cond."""
    mine, others = branches(x), branches(y)
    return any(others.get(cond, i) != i for cond, i in mine.items())
