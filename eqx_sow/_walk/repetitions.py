"""What a backward pass computes once more, and is not an execution. `table.py`
says why; here is how each of the three kinds is told.

The same value, `_same_values`. The `bwd` runs the forward function again, at the same
point, so both marks have a value of the same number:

    f.defvjp(lambda x: (forward(x), x), lambda x, ct: jax.vjp(forward, x)[1](ct))

The same equation, `_same_equations`. Of a loop of Equinox that takes derivatives, JAX
makes

    y = while[body={ ... sow[name=h] ... }] x                     # the forward pass
    dx = while[body={ ... sow[name=h] ...; its derivative }] dy   # the backward pass

where the second one runs the body from a checkpoint, once for each step back. Values in
there have no numbers that could be compared. But the equation was called from the same
lines, in a loop of Equinox that has a backward pass in it. The other case is the rule
of a `jax.custom_jvp` function that calls the function.

Another equation, `_other_equations`. If such a loop calls a `jax.custom_jvp` function,
then its forward pass runs the function, and only the backward pass its rule, with marks
of its own.

In doubt a mark is an execution: then it is an error, or one more entry of a tuple. One
that is taken for a repetition has no value at all. Most of what is asked below is there
because a mark that was computed at another point would else be missing.
"""

import functools as ft
import itertools as it
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jexc

from .. import _compat, _hijax
from .._frames import is_called_by_equinox, is_of_equinox
from .._mark.site import Site
from .flow import Here
from .sows import (
    is_kept_in_loop,
    is_of_unknown_length,
    jaxprs_of,
    kept_with_jaxpr,
    lengths_of,
    loop_of,
    Way,
)


class Sown(NamedTuple):
    """A mark that the pass came by."""

    site: Site
    # Its place; the last of the equations around it is its own.
    here: Here
    # The ways of the executions that its edge comes from.
    edges: frozenset[Way]
    # Equal for two marks of equal values.
    value: Hashable
    # For each guard, where its operand was made: tells runs of one cond apart.
    runs: tuple[Hashable, ...]

    @property
    def in_backward_pass(self) -> bool:
        return any(map(_compat.in_backward_pass, self.here.around))

    @property
    def cases(self) -> frozenset[tuple[int, int]]:
        return frozenset((index.number, i) for index, i in self.here.cases)

    @property
    def branches(self) -> frozenset[tuple[Hashable, int]]:
        """The branches that it is in, also of conds that a vmap made selections of. Two
        marks are in branches of one run of a cond if the index is the same."""
        guards = zip(self.runs, self.site.guards)
        return self.cases | {(run, g.branch) for run, g in guards if g.cond is not None}


# The repetitions, each with the executions that it may repeat.
Repeated = Iterator[tuple[Way, frozenset[Way]]]


# Whether a mark has the value of another one.
Same = Callable[[Sown, Sown], bool]


def repetitions(
    primals: Sequence[Sown], at_solution: Same
) -> dict[Way, frozenset[Way]]:
    """Of the primals of a program, the repetitions, each with the executions that it
    may repeat. `at_solution` is that of `Numbering`."""
    repeated: dict[Way, frozenset[Way]] = {}
    by_value = defaultdict(list)
    for x in primals:
        by_value[x.value].append(x)
    for alike in by_value.values():
        repeated.update(_same_values(alike))
    same_equations = ft.partial(_same_equations, at_solution=at_solution)
    for kind in (same_equations, _other_equations):
        rest = [x for x in primals if x.here.way not in repeated]
        repeated.update(kind(rest))
    return repeated


# Marks that may be repetitions, each with executions that it may repeat.
Row = Sequence[tuple[Sown, list[Sown]]]


def _matched(
    sows: Iterable[Sown],
    may_repeat: Callable[[Sown], bool],
    repeats: Callable[[Sown, Sown], bool],
    choose: Callable[[Row], Iterable[tuple[Sown, list[Sown]]]] = lambda row: row,
) -> Repeated:
    """Goes over some marks in the order of the program, and matches those that
    `may_repeat` others with executions before them that they `repeat`. `choose` picks
    some of these executions, for the repetitions in a row.

    If the program takes the same gradient twice, each backward pass repeats its own
    forward pass: what was repeated before comes last.
    """
    ran: list[Sown] = []
    repeated: set[Way] = set()
    for again, some in it.groupby(sows, may_repeat):
        if not again:
            ran += some
            continue
        row = []
        for x in some:
            executions = [y for y in ran if repeats(x, y)]
            first = [y for y in executions if y.here.way not in repeated]
            if executions := first or executions:
                row.append((x, executions))
        ways = lambda chosen: frozenset(y.here.way for y in chosen)
        found = {x.here.way: ways(chosen) for x, chosen in choose(row)}
        yield from found.items()
        repeated.update(*found.values())


# --- values that are computed twice ---
def _same_values(alike: Sequence[Sown]) -> Repeated:
    """Of marks of one value, the repetitions, each with the execution that it repeats.

    It is one that was called from the same lines, as far as that tells. Among these, a
    backward pass goes backward: if `f(x) + f(x) ** 2` runs the mark twice, and its
    gradient repeats both, then the first repetition is of the second execution. With 2
    executions and 4 repetitions, it is the first two that are of the second one. What
    one `bwd` computes again is in the order of the forward pass, however.
    """

    def choose(row: Row) -> Iterator[tuple[Sown, list[Sown]]]:
        groups = defaultdict(list)
        for x, executions in row:
            n_alike = [_n_alike(x, y) for y in executions]
            best = max(n_alike)
            near = [y for y, n in zip(executions, n_alike) if n == best]
            groups[tuple(y.here.way for y in near)].append((x, near))
        for group in groups.values():
            calls = it.groupby(group, lambda pair: _call_of_bwd(pair[0]))
            backward = [pair for _, call in calls for pair in reversed([*call])]
            for i, (x, near) in enumerate(backward):
                yield x, [near[-1 - i * len(near) // len(group)]]

    return _matched(
        alike,
        lambda x: x.in_backward_pass,
        # Only executions in the branches of cond around the repetition: elsewhere, one
        # may not have run when the repetition does.
        lambda x, y: y.cases <= x.cases,
        choose,
    )


def _n_alike(x: Sown, y: Sown) -> tuple[int, int]:
    """How many calls led to both marks, from inside out: calls in the user's code, and
    those that equations have. A jitted function is traced once for two calls, and what
    a `bwd` computes in one has the traceback of the call in the forward pass."""
    calls = zip(x.site.origin.calls, y.site.origin.calls)
    traceback = lambda eqn: eqn.source_info.traceback
    around = [map(traceback, reversed(z.here.around)) for z in (x, y)]
    n_calls = len([*it.takewhile(lambda pair: pair[0] == pair[1], calls)])
    n_equations = len([*it.takewhile(lambda pair: pair[0] is pair[1], zip(*around))])
    return n_calls, n_equations


def _call_of_bwd(x: Sown) -> Hashable:
    """Equal for marks from one call of a `bwd`. JAX gives all of its equations the
    traceback of the call of the function that it is the `bwd` of."""
    i, eqn = [
        (i, e) for i, e in enumerate(x.here.around) if _compat.in_backward_pass(e)
    ][-1]
    return x.here.way[: 2 * i], id(eqn.source_info.traceback)


# --- equations that run again ---
_CUSTOM_VJP = jexc.primitives.custom_vjp_call_p, _hijax.hi_p
_CUSTOM = *_CUSTOM_VJP, jexc.primitives.custom_jvp_call_p


def _same_equations(primals: Sequence[Sown], at_solution: Same) -> Repeated:
    """The repetitions in a loop that runs again, or in a derivative rule, each with the
    executions that it may repeat: they come from the same call of `sow`."""
    of_call = defaultdict(list)
    for x in primals:
        of_call[x.site.key, x.site.origin].append(x)

    def repeats(x, y):
        mine = x.site.key, x.site.origin
        if mine != (y.site.key, y.site.origin):
            return False
        if _runs_anew(x, y):
            return True
        # The rule may evaluate the function at another point, too. What a solver
        # evaluates in a loop is evaluated once more at the solution. In a loop that
        # runs anew, it is the rule of what is `y` there.
        return any(
            _rule(x) in _rules(z) and (x.value == z.value or at_solution(x, z))
            for z in of_call[mine]
            if z is y or _runs_anew(z, y)
        )

    return _matched(
        primals,
        lambda x: bool(_rerun_loops(x)[0]) or _rule(x) is not None,
        repeats,
    )


def _other_equations(primals: Sequence[Sown]) -> Repeated:
    """The repetitions in the derivative rules of functions that are called in a loop of
    Equinox. The forward pass runs the functions, and the backward pass their rules, in
    which each mark is another one. If there are as many of a name, they are these."""
    ran, again = defaultdict(list), defaultdict(list)
    for x in primals:
        loops = filter(is_of_unknown_length, x.here.around)
        has_rule = any(e.primitive in _CUSTOM for e in x.here.around)
        rerun, within = _rerun_loops(x)
        # Not in the `bwd` of a function that the loop calls.
        if rerun and not any(map(_compat.in_backward_pass, within)):
            again[x.site.key].append(x.here.way)
        elif has_rule and not x.in_backward_pass and any(map(is_of_equinox, loops)):
            ran[x.site.key].append(x.here.way)
    for key, ways in again.items():
        if len(ways) == len(ran[key]):
            yield from ((way, frozenset(ran[key])) for way in ways)


def around_backward_pass(here: Here) -> list[Any]:
    """The equations around a place that are around the backward pass that it is in."""
    return [*it.takewhile(lambda e: not _compat.in_backward_pass(e), here.around)]


# --- loops that a backward pass runs again ---
def _rerun_loops(x: Sown) -> tuple[list[Any], list[Any]]:
    """The loops of unknown length around a mark that are in a backward pass, if they
    run anew what ran before; and the equations from within the innermost one, up to
    that of the mark.

    That is so from the first one that is Equinox's and has a backward pass in it, too;
    or of all, if a checkpoint runs them. The loop of a solver that a `bwd` calls is
    also in a backward pass, but there is none in it. A `while_loop` of a `bwd` that
    calls `jax.vjp` runs each of its steps once."""
    backward, loops, within = False, [], []
    for eqn in x.here.around:
        backward = backward or _compat.in_backward_pass(eqn)
        within.append(eqn)
        if backward and is_of_unknown_length(eqn):
            loops.append(eqn)
            within = []
        elif not loops and eqn.primitive in _CUSTOM_VJP:
            # Not differentiated, so nothing in there has run before.
            backward = False
    if not _is_recomputed(x):
        loops = [*it.dropwhile(lambda e: not _goes_backward(e), loops)]
    return (loops, within) if loops else ([], [])


def _goes_backward(loop: Any) -> bool:
    """Whether a loop is Equinox's, with a backward pass in it. It takes the iterations
    of the forward pass from the last one, as the cotangent of each is made of that of
    the next."""
    return is_of_equinox(loop) and any(map(_has_backward_pass, jaxprs_of(loop)))


def directions(
    x: Sown, marks: Iterable[Sown], executions: Iterable[Way]
) -> tuple[bool | None, ...]:
    """`Run.backward` of a derivative of these marks of primals, which are or
    repeat these executions."""
    reruns = [loops for y in marks for loops in [_rerun_loops(y)[0]]]
    goes_back = (loops for loops in reruns if any(map(_goes_backward, loops[:1])))
    reversed_loops = [e for loops in goes_back for e in loops]

    def direction(way: Way, loop: Any) -> bool | None:
        if any(of[: len(way)] == way for of in executions):
            return False
        return any(loop is e for e in reversed_loops) or None

    return tuple(
        direction(x.here.way[: 2 * i + 1], eqn)
        for i, eqn in enumerate(x.here.around)
        if is_of_unknown_length(eqn)
    )


@kept_with_jaxpr
def _has_backward_pass(jaxpr: Any) -> bool:
    """Whether there is a backward pass in a jaxpr, at any depth."""
    return any(
        _compat.in_backward_pass(e) or any(map(_has_backward_pass, jaxprs_of(e)))
        for e in _compat.open_jaxpr(jaxpr)[0].eqns
    )


def _runs_anew(x: Sown, y: Sown) -> bool:
    """Whether `x` is what a backward pass makes of `y`, in a loop that it runs again:
    called from the same lines, with the same loops around."""
    loops, within = _rerun_loops(x)
    if not loops or not _is_called_alike(y, within):
        return False
    # In a `bwd`, lines do not tell what a rule of a function in the loop runs anew, and
    # what it runs at another point. (Equinox's loops are such functions, too.)
    inner = it.dropwhile(lambda e: not is_of_unknown_length(e), y.here.around)
    if not is_called_by_equinox(loops[0]) and any(
        e.primitive in _CUSTOM and not is_of_equinox(inside)
        for e, inside in it.pairwise(inner)
    ):
        return False
    # If a `bwd` calls the solver of the forward pass, which takes derivatives, once
    # more, then the two loops carry the same. That is not a repetition: it may have
    # another input. A loop that does run a body anew carries cotangents beside.
    is_new = _is_in_loop_like(loops[0], y) and not _is_recomputed(x)
    return not is_new and _lengths(y.here.around) in _lengths_before(x)


def _is_called_alike(y: Sown, within: list[Any]) -> bool:
    """Whether the last calls that lead to a mark of the forward pass are those of these
    equations. With

        f = jax.custom_vjp(lambda x: g(x))           # `g` is jitted, with a mark
        f.defvjp(lambda x: (g(x), g(x + 1)), bwd)

    a loop over `f` calls `g` once in each iteration, and in each step back twice, from
    another line, and at another point: these are not repetitions."""
    calls, last = _calls(y.here.around[:-1]), _calls(within[:-1])
    # If a checkpoint is differentiated, its values are computed outside of it. A scan
    # in it is then called where the checkpoint was.
    return calls[len(calls) - len(last) :] == last or (
        bool(_checkpoints(y)) and set(last) <= set(calls)
    )


def _calls(eqns: Iterable[Any]) -> list[Any]:
    """Where in a user's code these equations were called. Not where a cond was: under a
    vmap its branches become one. And not where one was kept in its loop."""
    cond_p = jexc.primitives.cond_p
    calls = (e for e in eqns if e.primitive is not cond_p and not is_kept_in_loop(e))
    return [e.source_info.traceback for e in calls]


def _is_in_loop_like(loop: Any, y: Sown) -> bool:
    """Whether a mark is in a loop that carries arrays of the same types."""
    like = lambda e: (e.primitive, [v.aval for v in e.outvars])
    return like(loop) in map(like, y.here.around)


def _lengths(around: Iterable[Any]) -> list[int | None]:
    """How many iterations the loops among these equations have."""
    return [loop.length for loop in map(loop_of, around) if loop is not None]


def _lengths_before(x: Sown) -> list[list[int | None]]:
    """The lengths of the loops that may be around what a mark repeats, from outside in.

    A loop that runs a body anew stands in the place of the one that ran it first. So
    with a scan of 5 steps in the body, it is `[None, 5]` in both passes. (If a `bwd`
    calls a solver in a loop of its own, there is one more, so that it repeats nothing.)
    Loops around a pullback need not be around the forward pass. If a `lax.map` over a
    basis of 3 is around this one, it is `[3, None, 5]` here, and what ran before may
    have been in `[None, 5]` or in `[3, None, 5]`."""
    lengths, n = _lengths(x.here.around), len(_lengths(around_backward_pass(x.here)))
    return [lengths[:i] + lengths[n:] for i in range(n + 1)]


def lacks_iteration(
    x: Sown, executions: Iterable[Sown], backward: Sequence[bool | None]
) -> bool:
    """Whether a derivative is computed in a loop of its own, of which it is not known
    how it goes through the iterations of its value. A loop around the whole backward
    pass has nothing to do with these: of

        ys, pulls = lax.scan(lambda x, _: jax.vjp(step, x), x, None, length=3)
        lax.while_loop(..., lambda c: pull_back(pulls, c[1]), ...)

    the cotangents are stacked if `pull_back` is a scan, and are one after the other if
    the `while_loop` is what takes `pulls` apart."""
    if None not in backward:
        return False

    def apart(of: Sown) -> bool:
        pairs = enumerate(zip(x.here.around, of.here.around))
        same = it.takewhile(lambda p: _is_way_to(of, x, p[0]), pairs)
        n = len(list(same))
        mine, others = x.here.around[n:], of.here.around[n:]
        if any(map(is_of_unknown_length, others)):
            return True
        return len(lengths_of(mine)) < len(lengths_of(others))

    return any(map(apart, executions))


def _is_way_to(x: Sown, y: Sown, i: int) -> bool:
    """Whether the first equations around, up to `i`, are the same."""
    n = 2 * i + 1
    return x.here.way[:n] == y.here.way[:n]


def are_in_two_branches(x: Sown, y: Sown) -> bool:
    """Whether one of two marks of the forward pass runs, or the other one."""
    others = dict(y.branches)
    return any(others.get(index, i) != i for index, i in x.branches)


# --- checkpoints and derivative rules ---
def _is_recomputed(x: Sown) -> bool:
    """Whether it is in a checkpoint that was differentiated, which runs its loops once
    more as they are. The `bwd` of a function in there has not run before."""
    backward = False
    for eqn, inside in it.pairwise(x.here.around):
        backward = backward or _compat.in_backward_pass(eqn)
        if eqn.primitive is jexc.primitives.remat_p and eqn.params["differentiated"]:
            if _compat.is_recomputed(inside) or not backward:
                return True
    return False


def _checkpoints(x: Sown) -> list[Any]:
    return [e for e in x.here.around if e.primitive is jexc.primitives.remat_p]


def _rules(x: Sown) -> list[str]:
    """The derivative rules of `jax.custom_jvp` functions that a mark is in."""
    return [rule for eqn in x.here.around for rule in _compat.rules_around(eqn)]


def _rule(x: Sown) -> str | None:
    """The derivative rule that a mark is in, unless it is in a function with such a
    rule that this one calls."""
    rule = None
    for eqn in x.here.around:
        rule = (rule, *_compat.rules_around(eqn))[-1]
        if eqn.primitive is jexc.primitives.custom_jvp_call_p:
            rule = None
    return rule
