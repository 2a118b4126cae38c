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
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from .. import _compat
from .._mark.site import Execution, Site
from .edges import primals_of
from .flow import Here, run
from .numbering import Numbering
from .repetitions import (
    are_in_two_branches,
    directions,
    lacks_iteration,
    repetitions,
    Same,
    Sown,
)
from .rewrite import with_sites
from .sows import Found, is_of_unknown_length, Way


def needs_executions(found: Sequence[Found], several: Callable[[Site], bool]) -> bool:
    """Whether it matters which executions these marks are. `several` says of a site
    whether its name may have more than one, as with `Append`.

    It does not if there is no primal in a backward pass, no name has derivatives, or is
    in branches, and also has more than one mark, and each `while_loop` around a
    derivative is also around its primal."""
    n = Counter(x.site.key for x in found)

    def asks(site: Site) -> bool:
        if n[site.key] > 1 and (site.modes or site.guards):
            return True
        return bool(site.modes) and (several(site) or n[site.name, "primal", ()] > 1)

    # In many calls of one function, the marks and the equations around are the same.
    if any(map(asks, {id(x.site): x.site for x in found}.values())):
        return True
    around = {id(eqn): eqn for x in found if not x.site.modes for eqn in x.eqns}
    if any(map(_compat.in_backward_pass, around.values())):
        return True
    whiles = {
        (x.way[: 2 * i + 1], id(x.site.origin), bool(x.site.modes))
        for x in found
        for i, eqn in enumerate(x.eqns)
        if x.way and is_of_unknown_length(eqn)
    }
    return any(
        is_derivative and (way, origin, False) not in whiles
        for way, origin, is_derivative in whiles
    )


def with_executions(closed: Any, wants: Callable[[Site], bool]) -> Any:
    """A program in which the sites that are wanted say which executions they are."""
    told = Numbering()
    run(told, closed, [told.unlike_any() for _ in closed.invars], Here())
    sows = [x for x in told.sows.values() if wants(x.site)]
    return with_sites(closed, _sites(sows, told.at_solution))


def _sites(found: Sequence[Sown], at_solution: Same) -> dict[Way, Site]:
    """The sites that have the answers, by the ways to their equations."""
    primals = [x for x in found if not x.site.modes]
    repeated = repetitions(primals, at_solution)
    ran = {x.site.key for x in primals if not x.in_backward_pass}
    by_way = {x.here.way: x for x in primals}
    origins = {way: x.site for way, x in by_way.items()}
    of_call = defaultdict(list)
    for way, site in origins.items():
        of_call[site.origin].append(way)
    sites: dict[Way, Site] = {}
    # For each `Site.key` of derivatives, the executions that have one.
    have: dict[Any, frozenset[Way]] = defaultdict(frozenset)
    for x in found:
        way, of = x.here.way, [x.here.way]
        backward: tuple[bool | None, ...] = ()
        if x.site.modes:
            # A derivative may be of one primal or another, if a branch decides. Where
            # no edge leads to a primal, it is of any from this call of `sow`: from
            # what a checkpoint in a `while_loop` computes again, there is none.
            of = primals_of(x.site, x.edges, origins) or of_call[x.site.origin]
            # JAX may trace a `fwd` twice, so that the value is from another call.
            named = [p for p in x.edges if p in origins]
            of = of or [p for p in named if origins[p].name == x.site.name]
        executions = frozenset().union(*[repeated.get(p, {p}) for p in of])
        apart, only_if = False, frozenset[Hashable]()
        if x.site.modes:
            backward = directions(x, [by_way[p] for p in of], executions)
            ran_at = [by_way[p] for p in executions]
            apart = lacks_iteration(x, ran_at, backward)
            have[x.site.key] |= executions
            # Equinox's loops go back through each iteration, in a branch of theirs.
            if True not in backward:
                only_if = x.branches.difference(*[by_way[p].branches for p in of])
        # In a branch of a cond that a vmap made a selection of, a value of the forward
        # pass has no longer the number that it had.
        again: bool | None = way in repeated
        in_branch = any(guard.cond is not None for guard in x.site.guards)
        # The tangent of what a loop runs once more is a repetition, too. Equinox runs
        # some iterations several times, and not in the opposite order.
        if True in backward and "cotangent" not in x.site.modes:
            again = again or all(p in repeated for p in of)
        if not again and x.in_backward_pass and in_branch and x.site.key in ran:
            again = None
        execution = Execution(
            of=executions,
            again=again,
            in_backward_pass=not x.site.modes and x.in_backward_pass,
            runs=x.runs,
            backward=backward,
            apart=apart,
            only_if=only_if,
        )
        sites[way] = x.site._replace(execution=execution)
    return {way: _checked(site, by_way, have[site.key]) for way, site in sites.items()}


def _checked(site: Site, by_way: Mapping[Way, Sown], have: frozenset[Way]) -> Site:
    """The site, which is `apart`, too, if the last value may be that of a branch that
    has no such derivative. `have` are the executions that have one."""
    execution = site.execution
    if True not in execution.backward or execution.apart:
        return site
    others = [y for way, y in by_way.items() if way not in have]
    apart = any(
        x.site.name == y.site.name and are_in_two_branches(x, y)
        for x in [by_way[p] for p in execution.of]
        for y in others
    )
    return site._replace(execution=execution._replace(apart=apart))
