"""Which marks of a program are executions, and to which of them a derivative belongs.

A mark in the forward pass is an execution. A derivative belongs to one: the edge that
is its first operand comes out of the equation of its primal (`_mark/primitive.py`),
through whatever calls, loops, branches and checkpoints there are between.

What a backward pass computes once more is a repetition, not an execution. There are
three kinds of it:

- A value that is computed as in the forward pass, from the same inputs: a `bwd` that
  calls `jax.vjp(forward, x)` with the `x` of the forward pass. To tell, every value of
  the program has a number (`numbering.py`).
- In a loop of Equinox that takes derivatives, the same equation, called from the same
  lines: Equinox's checkpointed loops run their body anew, and differentiate it, in each
  step of the backward pass.
- In the derivative rule of a `jax.custom_jvp` function, the same equation as in that
  function, if the rule calls the function: with the same inputs, or after a loop.
  optimistix solves in a loop, and then evaluates the function that it solved once more,
  at the solution. If such a function is called in a loop of Equinox, only the backward
  pass runs the rule: see `_in_other_rules`.

Whatever else a `bwd` marks is an execution of its own. So are the values that
`diffrax.BacksolveAdjoint` visits: it solves another equation in its backward pass.

A third question is about conds of which a `vmap` runs all branches. Of two marks in two
branches only one runs, if they are of one run of the cond: if the index that both have
as an operand was made in one place. In another call of the function it is made in
another one.

The answers are written into the sites, as `Site.execution`. In

    y = sow[name=h] x          # equation 0 of the program
    z = jit[... sow[name=h] y] # equation 1, and equation 2 in there
    ...
    dy = sow[name=h, modes=(cotangent,)] e dz    # `e` comes out of equation 1

the first mark has `of={(0,)}`, and the second one and the cotangent `of={(1, 0, 2)}`,
which is the way to an equation: see `Way`.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .. import _compat
from .._mark.site import Execution, Site
from .flow import Here, run
from .numbering import Numbering
from .plan import Inner, NOTHING, planned, Row, Slot, UNCLEAR
from .repetitions import repetitions, Sown
from .rewrite import with_sites
from .runs import Run, runs as _runs
from .sows import Found, Way


def needs_executions(found: Sequence[Found], several: Callable[[Site], bool]) -> bool:
    """Whether it matters which executions these marks are. `several` says of a site
    whether its name may have more than one, as with `Append`.

    It does not if there is no primal in a backward pass, and no name has derivatives,
    or is in branches, and also has more than one mark."""
    n = Counter(x.site.key for x in found)

    def asks(site: Site) -> bool:
        if n[site.key] > 1:
            return True
        return bool(site.modes) and (several(site) or n[site.name, "primal", ()] > 1)

    # In many calls of one function, the marks and the equations around are the same.
    if any(map(asks, {id(x.site): x.site for x in found}.values())):
        return True
    around = {id(eqn): eqn for x in found if not x.site.modes for eqn in x.eqns}
    return any(map(_compat.in_backward_pass, around.values()))


class Planned(NamedTuple):
    """What is to be done at the marks of a program: its plan, with its slots. Also
    those of each mark, by the ways to them."""

    plan: Inner = Inner()
    slots: Mapping[Way | None, Slot | int] = {}


def primals_of(site: Site, edge: Iterable[Way], sites: Mapping[Way, Site]) -> list[Way]:
    """The marks that a derivative may be of: those at the other end of its edge that
    are of the same call of `sow`, of the ones that are given by the ways to them."""
    return [way for way in edge if way in sites and sites[way].origin is site.origin]


def with_executions(closed: Any, wants: Callable[[Site], bool]) -> tuple[Any, Planned]:
    """A program in which the sites that are wanted say which executions they are. Also
    its plan."""
    found = _numbered(closed, wants)
    executions = _executions(found)
    new = {x.here.way: x.site._replace(execution=executions[x.here.way]) for x in found}
    return with_sites(closed, new), _planned(found, executions)


def with_plan(closed: Any, wants: Callable[[Site], bool]) -> Planned:
    """Which of the marks that are wanted are which value."""
    found = _numbered(closed, wants)
    return _planned(found, _executions(found))


def _planned(found: Sequence[Sown], executions: Mapping[Way, Execution]) -> Planned:
    numbers: dict[Any, int] = {}
    rows, members = [], defaultdict(list)
    for x in found:
        way, e = x.here.way, executions[x.here.way]
        if e.again is False:
            # Of what is not known, each is a value of its own.
            one = *x.site.key, e.run, way if e.run is None else None
            number = numbers.setdefault(one, len(numbers))
            members[number].append(e)
        else:
            number = NOTHING if e.again else UNCLEAR
        rows.append(Row(way, x.here.around, number))
    table = []
    for (*key, n_run, _), number in numbers.items():
        first = members[number][0]
        of = frozenset().union(*[e.of for e in members[number]])
        slot = Slot(n_run, first.may_be, of, first.in_backward_pass)
        table.append((tuple(key), slot))
    plan, own = planned(rows, table)
    slot_of = lambda number: number if number < 0 else table[number][1]
    slots = {row.way: slot_of(row.slot) for row in rows}
    return Planned(Inner(plan, tuple(map(slot_of, own))), slots)


def _numbered(closed: Any, wants: Callable[[Site], bool]) -> list[Sown]:
    told = Numbering()
    run(told, closed, [told.unlike_any() for _ in closed.invars], Here())
    return [x for x in told.sows.values() if wants(x.site)]


def _executions(found: Sequence[Sown]) -> dict[Way, Execution]:
    """The answers, by the ways to the equations."""
    primals = [x for x in found if not x.site.modes]
    repeated = repetitions(primals)
    ran = {x.site.key for x in primals if not x.in_backward_pass}
    by_way = {x.here.way: x.site for x in primals}
    of_call = defaultdict(list)
    for way, site in by_way.items():
        of_call[site.origin].append(way)
    ofs: dict[Way, frozenset[Way]] = {}
    for x in found:
        of = [x.here.way]
        if x.site.modes:
            # A derivative may be of one primal or another, if a branch decides. Where
            # no edge leads to a primal, it is of any from this call of `sow`: from
            # what a checkpoint in a `while_loop` computes again, there is none.
            of = primals_of(x.site, x.edges, by_way) or of_call[x.site.origin]
        ofs[x.here.way] = frozenset().union(*[repeated.get(p, {p}) for p in of])
    runs_of_names = _runs(found, ofs, repeated)
    executions = {}
    for x in found:
        way = x.here.way
        # In a branch of a cond that a vmap made a selection of, a value of the forward
        # pass has no longer the number that it had.
        again: bool | None = way in repeated
        in_branch = any(guard.cond is not None for guard in x.site.guards)
        if not again and x.in_backward_pass and in_branch and x.site.key in ran:
            again = None
        of_name = runs_of_names.get(way, Run(None))
        executions[way] = Execution(
            of=ofs[way],
            again=again,
            in_backward_pass=not x.site.modes and x.in_backward_pass,
            run=of_name.run,
            may_be=of_name.may_be,
        )
    return executions
