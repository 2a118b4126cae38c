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
  lines: Equinox's checkpointed loops run their body again, and differentiate it, in
  each step of the backward pass.
- In the derivative rule of a `jax.custom_jvp` function, the same equation as in that
  function, if the rule calls the function: with the same inputs, or after a loop.
  optimistix solves in a loop, and then evaluates the function that it solved once more,
  at the solution. If such a function is called in a loop of Equinox, only the backward
  pass runs the rule: see `_other_equations`.

Whatever else a `bwd` marks is an execution of its own. So are the values that
`diffrax.BacksolveAdjoint` visits: it solves another equation in its backward pass.

A third question is about conds of which a `vmap` runs all branches. Of two marks in two
branches only one runs, if they are of one run of the cond: if the index that both have
as an operand was made in one place. In another call of the function it is made in
another one.

A fourth one is about loops that are part of a backward pass: of which iteration of its
value a derivative is (`Run.backward`, `Run.apart`), and whether it runs in each
(`Run.only_if`).

The answers are columns of a table, which has a `Run` for each mark. In

    y = sow[name=h] x          # equation 0 of the program
    z = jit[... sow[name=h] y] # equation 1, and equation 2 in there
    ...
    dy = sow[name=h, modes=(cotangent,)] e dz    # `e` comes out of equation 1

the first mark is run 0 of `h`, with `of={(0,)}`. The second one and the cotangent are
run 1, with `of={(1, 0, 2)}`, which is the way to an equation: see `Way`.
"""

import itertools as it
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

from .. import _compat
from .._mark.primitive import same_p, sow_p
from .._mark.site import Site
from .flow import Domain, Here, run
from .numbering import Numbering
from .repetitions import directions, lacks_iteration, repetitions
from .runs import are_exclusive, branches_by_way, Facts, numbered, Run
from .sows import grouped, is_of_unknown_length, Mark, Way


class Edges(Domain):
    """Follows the edges of marks: what goes from equation to equation are the ways to
    the marks of primals that an edge comes from."""

    n_needed = 1

    def __init__(self):
        # By the ways to derivatives.
        self.of: dict[Way, frozenset[Way]] = {}

    def constant(self, x, aval):
        return _NONE

    def equation(self, eqn, operands, here):
        if eqn.primitive not in (sow_p, same_p):
            return [_NONE.union(*filter(None, operands))] * len(eqn.outvars)
        edge = _NONE
        if eqn.primitive is sow_p:
            edge = operands[0] or _NONE
            if eqn.params["site"].modes:
                self.of[here.way] = edge
            else:
                edge = frozenset([here.way])
        return [edge, *operands[1:]]

    def chosen(self, index, cases):
        return _NONE.union(*filter(None, cases))

    def carried(self, when, init, after, here):
        return [(x or _NONE) | (y or _NONE) for x, y in zip(init, after)]


_NONE: frozenset[Way] = frozenset()


def _are_told_apart(found: Sequence[Mark], several: Collection[str]) -> bool:
    """Whether it must be found out which primals the derivatives are of. `several` are
    the names that may have more than one value, as with `Append`."""
    n = Counter(x.site.key for x in found)

    def asks(site: Site) -> bool:
        primals = n[site.name, "primal", ()]
        return site.name in several or n[site.key] > 1 or primals > 1

    # In many calls of one function, the marks are the same.
    return any(map(asks, {id(x.site): x.site for x in found if x.site.modes}.values()))


def _may_repeat(found: Sequence[Mark]) -> bool:
    """Whether the values of a program must have numbers. They need not if no mark may
    repeat another one, no name is marked several times in branches of which a vmap runs
    all, and each `while_loop` around a derivative is also around its primal."""
    n = Counter(x.site.key for x in found)
    if any(x.site.guards and n[x.site.key] > 1 for x in found):
        return True
    around = {id(eqn): eqn for x in found if not x.site.modes for eqn in x.eqns}
    if any(
        _compat.in_backward_pass(eqn) or _compat.rules_around(eqn)
        for eqn in around.values()
    ):
        return True
    whiles = {
        (x.way[: 2 * i + 1], id(x.site.origin), bool(x.site.modes))
        for x in found
        for i, eqn in enumerate(x.eqns)
        if is_of_unknown_length(eqn)
    }
    return any(
        is_derivative and (way, origin, False) not in whiles
        for way, origin, is_derivative in whiles
    )


def _come_from_several(
    found: Iterable[Mark],
    edges: Mapping[Way, frozenset[Way]],
    primals: Mapping[Way, Site],
) -> bool:
    """Whether the edge of a derivative seems to come from several runs of its name. In

        e, f = cond(i, [sow "g"; zeros], [sow "h"; sow "h"], x)
        e, f = cond(i, [the same], [swapped], e, f)

    each output of the first cond is an edge of one branch or of the other. JAX passes
    them through a second one if a checkpoint keeps them, and if that swaps them in one
    branch, each output may be any of the edges. `Numbering` knows that both conds have
    the same index, so that each branch goes with the same branch."""
    return any(
        sum(
            primals[way].name == x.site.name
            for way in edges.get(x.way, ())
            if way in primals
        )
        > 1
        for x in found
    )


def runs_of(
    closed: Any,
    found: Sequence[Mark],
    several: Collection[str],
    tag: Any,
    with_rows: bool = False,
) -> dict[Way, Run]:
    """Which run of its name each mark is, by the ways to them. All are of the tag, or
    were before an inner transformation took them. `several` are the names that may have
    more than one run. `with_rows`: whether `Run.only_if` matters, as in a `Buffer`."""
    told: Mapping[Way, Mark] = {}
    repeated: Mapping[Way, frozenset[Way]] = {}
    edges: Mapping[Way, frozenset[Way]] = {}
    mine = [x for x in found if x.site.tag == tag]
    primals = {x.way: x.site for x in found if not x.site.modes}
    has_numbers = with_rows or _may_repeat(mine)
    if not has_numbers and _are_told_apart(mine, several):
        follow = Edges()
        run(follow, closed, [_NONE for _ in closed.invars], Here())
        edges = follow.of
        has_numbers = _come_from_several(mine, edges, primals)
    if has_numbers:
        numbers = Numbering({x.way: x.site for x in found})
        run(numbers, closed, [numbers.unlike_any() for _ in closed.invars], Here())
        # Not those of other tags.
        told = {x.way: numbers.marks[x.way] for x in found if x.way in numbers.marks}
        edges = {way: x.edges for way, x in told.items()}
        each = [told[way] for way in primals if way in told]
        repeated = repetitions(each, numbers.at_solution)
    of_call = grouped(primals, lambda way: primals[way].origin)
    marks = {x.way: told.get(x.way, x) for x in found}
    ran = {
        x.site.key
        for x in (found if told else ())
        if not (x.site.modes or x.in_backward_pass)
    }

    def primals_of(x: Mark) -> list[Way]:
        """The marks that a derivative may be of. At the other end of its edge, these
        are of the same call of `sow`, or of another run of the name, if a branch
        chooses residuals. In branches of one `cond`, residuals only share a place."""
        there = [marks[way] for way in edges.get(x.way, ()) if way in primals]
        of = [y for y in there if y.site.origin is x.site.origin]
        others = [y for y in there if y.site.origin is not x.site.origin]
        others = [y for y in others if y.site.name == x.site.name]
        # From what a checkpoint in a `while_loop` computes again, there is no edge. And
        # JAX may trace a `fwd` twice, so that the value is from another call.
        if not of:
            return of_call[x.site.origin] or [y.way for y in others]
        is_apart = lambda y: any(
            are_exclusive(branches_by_way(y), branches_by_way(z)) for z in of
        )
        return [y.way for y in (*of, *it.filterfalse(is_apart, others))]

    def facts(x: Mark) -> Facts:
        of = [x.way]
        if x.site.modes:
            of = primals_of(x)
        executions = frozenset().union(*[repeated.get(p, {p}) for p in of])
        known = Run(None, of=executions, again=x.way in repeated)
        if x.way not in told:
            return Facts(x, known)
        if x.site.modes:
            known = _with_iterations(known, told[x.way], of, told)
            # The tangent of what a loop runs once more is a repetition, too, as in a
            # checkpoint. Equinox runs some iterations several times, and not in the
            # opposite order.
            is_tangent = "cotangent" not in x.site.modes
            if is_tangent and not set(known.backward) <= {False}:
                again = all(p in repeated for p in of)
                known = known._replace(again=again, apart=known.apart and not again)
        # In a branch of a cond that a vmap made a selection of, a value of the forward
        # pass has no longer the number that it had.
        in_branch = any(guard.cond is not None for guard in x.site.guards)
        if not known.again and in_branch and x.in_backward_pass and x.site.key in ran:
            known = known._replace(again=None)
        return Facts(told[x.way], known)

    every = list(map(facts, found))
    if told:
        every = _with_values_apart(_with_repeated_derivatives(every), told)
    return numbered(every)


def _with_iterations(
    known: Run, x: Mark, of: Iterable[Way], told: Mapping[Way, Mark]
) -> Run:
    """What is known of a derivative, with which iterations of loops it belongs to. `of`
    are the marks of its primals."""
    there = lambda ways: [told[way] for way in ways if way in told]
    backward = directions(x, there(of), known.of)
    only_if: frozenset[Hashable] = frozenset()
    # Equinox's loops go back through each iteration, in a branch of theirs.
    if True not in backward:
        only_if = x.branches.difference(*[y.branches for y in there(of)])
    return known._replace(
        backward=backward,
        apart=lacks_iteration(x, there(known.of), backward),
        only_if=only_if,
    )


def _with_repeated_derivatives(every: Sequence[Facts]) -> list[Facts]:
    """The facts, in which some derivatives are repetitions. If a loop that a backward
    pass runs again takes a gradient in its body, it took that in the forward pass, too,
    and what it computes now repeats that."""
    of = lambda x: (x.mark.site.key, x.known.of)
    derivatives = [x for x in every if x.mark.site.modes and not x.known.again]
    before = {of(x) for x in derivatives if True not in x.known.backward}

    def known(x: Facts) -> Run:
        repeats = True in x.known.backward and of(x) in before
        return x.known._replace(again=True) if repeats else x.known

    return [x._replace(known=known(x)) for x in every]


def _with_values_apart(every: Sequence[Facts], told: Mapping[Way, Mark]) -> list[Facts]:
    """The facts, in which a derivative is `apart`, too, if the last value may be that
    of a branch that has no such derivative."""
    have: dict[Any, frozenset[Way]] = defaultdict(frozenset)
    for x in every:
        if x.mark.site.modes:
            have[x.mark.site.key] |= x.known.of
    again = {x.mark.way for x in every if x.known.again}

    def apart(x: Facts) -> bool:
        if True not in x.known.backward:
            return x.known.apart
        name, mine = x.mark.site.name, have[x.mark.site.key]
        others = [
            y
            for way, y in told.items()
            if y.site.name == name and not y.site.modes and way not in mine | again
        ]
        values = [told[p] for p in x.known.of if p in told]
        return x.known.apart or any(
            are_exclusive(dict(v.branches), dict(y.branches))
            for v in values
            for y in others
        )

    return [x._replace(known=x.known._replace(apart=apart(x))) for x in every]
