"""What a backward pass computes once more, and is not an execution. `table.py`
says why; here is how each of the three kinds is told.

The same value, `_same_value`. The `bwd` runs the forward function again, at the same
point, so both marks have a value of the same number:

    f.defvjp(lambda x: (forward(x), x), lambda x, ct: jax.vjp(forward, x)[1](ct))

The same equation, `_same_equation`. Of a loop of Equinox that takes derivatives, JAX
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

import itertools as it
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.extend.core as jexc

from .. import _compat, _hijax
from .._frames import is_called_by_equinox, is_of_equinox
from .sows import (
    around_backward_pass,
    grouped,
    is_kept_in_loop,
    is_of_unknown_length,
    jaxprs_of,
    kept_with_jaxpr,
    lengths_of,
    loop_of,
    Mark,
    Way,
)


# The repetitions, each with the executions that it may repeat.
Repeated = Iterator[tuple[Way, frozenset[Way]]]
# Whether some mark repeats this execution, which is before it in the program.
Repeats = Callable[[Mark], bool]
# What tells the executions that a mark repeats. `None`: it is an execution itself.
Matcher = Callable[[Mark], Repeats | None]
# Whether a mark has the value of another one.
Same = Callable[[Mark, Mark], bool]


def repetitions(
    primals: Sequence[Mark], at_solution: Same
) -> dict[Way, frozenset[Way]]:
    """Of the primals of a program, the repetitions, each with the executions that it
    may repeat. `at_solution` is that of `Numbering`.

    The first of these that finds an execution decides: a mark in a backward pass
    repeats one of its value; one in a loop that runs again, or in a derivative rule,
    those of its equation; one in the rule of a function that such a loop calls, those
    in the function."""
    repeated: dict[Way, frozenset[Way]] = {}
    for alike in grouped(primals, lambda x: x.value).values():
        repeated.update(_matched(alike, _same_value, _in_order))
    rest = [x for x in primals if x.way not in repeated]
    repeated.update(_matched(rest, _same_equation(rest, at_solution)))
    rest = [x for x in primals if x.way not in repeated]
    repeated.update(_other_equations(rest))
    return repeated


# Marks that may be repetitions, each with executions that it may repeat.
Row = Iterable[tuple[Mark, list[Mark]]]


def _matched(
    sows: Iterable[Mark], matcher: Matcher, choose: Callable[[Row], Row] = list
) -> Repeated:
    """Goes over some marks in the order of the program, and matches repetitions with
    executions before them. `choose` picks some of these, for the repetitions in a row.

    If the program takes the same gradient twice, each backward pass repeats its own
    forward pass: what was repeated before comes last.
    """
    ran: list[Mark] = []
    repeated: set[Way] = set()
    pairs = ((x, matcher(x)) for x in sows)
    for is_execution, some in it.groupby(pairs, lambda pair: pair[1] is None):
        if is_execution:
            ran += [x for x, _ in some]
            continue
        row = []
        for x, repeats in some:
            executions = [y for y in ran if repeats and repeats(y)]
            first = [y for y in executions if y.way not in repeated]
            if executions := first or executions:
                row.append((x, executions))
        found = {x.way: frozenset(y.way for y in chosen) for x, chosen in choose(row)}
        yield from found.items()
        repeated.update(*found.values())


# --- the same value ---
def _same_value(x: Mark) -> Repeats | None:
    """What tells the executions that a mark in a backward pass repeats, of those of its
    value."""
    # Only executions in the branches of cond around it: others may not have run.
    return (lambda y: y.cases <= x.cases) if x.in_backward_pass else None


def _in_order(row: Row) -> Row:
    """For each repetition, the execution from the same call and the same lines, as far
    as these can be told. All that it may repeat, if the order does not tell either.

    A backward pass goes backward: if `f(x) + f(x) ** 2` runs the mark twice, and its
    gradient repeats both, then the first repetition is of the second execution. With 2
    executions and 4 repetitions, it is the first two that are of the second one; with 4
    executions and 2 repetitions, these are of the last two. But what one `bwd` computes
    again is in the order of the forward pass."""
    near = ((x, _of_alike_lines(x, _of_one_call(x, ys))) for x, ys in row)
    for group in grouped(near, lambda pair: tuple(y.way for y in pair[1])).values():
        # A `bwd` may compute it more than once, on other lines each time.
        by_lines = grouped(group, lambda pair: tuple(pair[0].site.origin.calls))
        for some in [group] if _is_told(group) else by_lines.values():
            backward = [pair for call in _calls_of_bwd(some) for pair in reversed(call)]
            for i, (x, ys) in enumerate(backward):
                last = -1 - i * min(len(ys), len(some)) // len(some)
                yield x, [ys[last]] if _is_told(some) else ys


def _is_told(group: Sequence[tuple[Mark, list[Mark]]]) -> bool:
    """Whether the order tells which of the executions each of some marks repeats, which
    all may repeat the same ones."""
    n = len(group[0][1])
    return n >= len(group) or n <= len(_calls_of_bwd(group))


def _calls_of_bwd(row: Row) -> list[list[tuple[Mark, list[Mark]]]]:
    """The marks from each call of a `bwd`. JAX gives all of its equations the traceback
    of the call of the function that it is the `bwd` of."""

    def call(pair):
        around = pair[0].eqns
        i = max(i for i, eqn in enumerate(around) if _compat.in_backward_pass(eqn))
        return pair[0].way[: 2 * i], id(around[i].source_info.traceback)

    return [[*some] for _, some in it.groupby(row, call)]


def _of_one_call(x: Mark, executions: list[Mark]) -> list[Mark]:
    """Those from the call of a function in whose `bwd` a mark is, if that can be told.
    JAX gives all equations of a `bwd` the traceback of that call, and in a jitted
    function also those of the forward pass. Of other equations, such as what a jitted
    function has inside, it is that of the first call, so the outermost ones count."""
    n = 0
    while len({y.way[: 2 * n + 1] for y in executions}) == 1 < len(executions):
        n += 1
    of_call = grouped(executions, lambda y: id(y.eqns[n].source_info.traceback))
    mine = (id(e.source_info.traceback) for e in x.eqns)
    call = next(filter(of_call.__contains__, mine), None)
    return executions if call is None else of_call[call]


def _of_alike_lines(x: Mark, executions: list[Mark]) -> list[Mark]:
    """Those that have the most calls in the user's code in common with a mark, from
    inside out."""

    def n_alike(y):
        pairs = zip(x.site.origin.calls, y.site.origin.calls)
        return len([*it.takewhile(lambda pair: pair[0] == pair[1], pairs)])

    most = max(map(n_alike, executions))
    return [y for y in executions if n_alike(y) == most]


# --- the same equation, and another one ---
_CUSTOM_VJP = jexc.primitives.custom_vjp_call_p, _hijax.hi_p
_CUSTOM = *_CUSTOM_VJP, jexc.primitives.custom_jvp_call_p


def _same_equation(primals: Sequence[Mark], at_solution: Same) -> Matcher:
    """The matcher for loops that run again, and for derivative rules: of executions of
    the same call of `sow`."""
    call = lambda x: (x.site.key, x.site.origin)
    of_call = grouped(primals, call)
    in_loops = {x.way: _in_loop(x) for x in primals}

    def in_loop(x, y):
        repeats = in_loops[x.way]
        return repeats is not None and repeats(y)

    def in_rule(x, rule, y):
        # The rule may evaluate the function at another point, too. What a solver
        # evaluates in a loop is evaluated once more at the solution. In a loop that
        # runs again, it is the rule of what is `y` there.
        return any(
            rule in _rules(z.eqns) and (x.value == z.value or at_solution(x, z))
            for z in of_call[call(x)]
            if z is y or in_loop(z, y)
        )

    def matcher(x):
        rule = _rule(x)
        if in_loops[x.way] is None and rule is None:
            return None
        of_either = lambda y: in_loop(x, y) or rule is not None and in_rule(x, rule, y)
        return lambda y: call(x) == call(y) and of_either(y)

    return matcher


def _other_equations(primals: Sequence[Mark]) -> Repeated:
    """The repetitions in the derivative rules of functions that are called in a loop of
    Equinox. The forward pass runs the functions, and the backward pass their rules, in
    which each mark is another one. If there are as many of a name, they are these."""
    ran, in_rules = defaultdict(list), defaultdict(list)
    for x in primals:
        loops = filter(is_of_unknown_length, x.eqns)
        has_rule = any(e.primitive in _CUSTOM for e in x.eqns)
        run_again, within = _loops_run_again(x)
        # Not in the `bwd` of a function that the loop calls.
        if run_again and not any(map(_compat.in_backward_pass, within)):
            in_rules[x.site.key].append(x.way)
        elif has_rule and not x.in_backward_pass and any(map(is_of_equinox, loops)):
            ran[x.site.key].append(x.way)
    for key, ways in in_rules.items():
        if len(ways) == len(ran[key]):
            yield from ((way, frozenset(ran[key])) for way in ways)


# --- loops that a backward pass runs again ---
def _loops_run_again(x: Mark) -> tuple[list[Any], list[Any]]:
    """The loops of unknown length around a mark that are in a backward pass, if they
    run again what ran before; and the equations from within the innermost one, up to
    that of the mark.

    That is so from the first one that is Equinox's and has a backward pass in it, too;
    or of all, if a checkpoint runs them. The loop of a solver that a `bwd` calls is
    also in a backward pass, but there is none in it. A `while_loop` of a `bwd` that
    calls `jax.vjp` runs each of its steps once."""
    backward, loops, within = False, [], []
    for eqn in x.eqns:
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
    x: Mark, marks: Iterable[Mark], executions: Iterable[Way]
) -> tuple[bool | None, ...]:
    """`Run.backward` of a derivative of these marks of primals, which are or
    repeat these executions."""
    run_again = [_loops_run_again(y)[0] for y in marks]
    goes_back = (loops for loops in run_again if any(map(_goes_backward, loops[:1])))
    reversed_loops = [e for loops in goes_back for e in loops]

    def direction(way: Way, loop: Any) -> bool | None:
        if any(of[: len(way)] == way for of in executions):
            return False
        return any(loop is e for e in reversed_loops) or None

    return tuple(
        direction(x.way[: 2 * i + 1], eqn)
        for i, eqn in enumerate(x.eqns)
        if is_of_unknown_length(eqn)
    )


@kept_with_jaxpr
def _has_backward_pass(jaxpr: Any) -> bool:
    """Whether there is a backward pass in a jaxpr, at any depth."""
    return any(
        _compat.in_backward_pass(e) or any(map(_has_backward_pass, jaxprs_of(e)))
        for e in _compat.open_jaxpr(jaxpr)[0].eqns
    )


def _in_loop(x: Mark) -> Repeats | None:
    """What tells the executions that a mark repeats in a loop that a backward pass runs
    again: those called from the same lines, with the same loops around."""
    loops, within = _loops_run_again(x)
    if not loops:
        return None
    last, lengths = _calls(within[:-1]), _lengths_before(x)
    in_bwd, is_as_it_was = not is_called_by_equinox(loops[0]), _is_recomputed(x)
    like = lambda e: (e.primitive, [v.aval for v in e.outvars])

    def repeats(y):
        around = y.eqns
        if not _are_called_alike(around, last):
            return False
        # In a `bwd`, lines do not tell what a rule of a function in there runs again,
        # and what at another point. (Equinox's loops are such functions, too.)
        inner = it.dropwhile(lambda e: not is_of_unknown_length(e), around)
        if in_bwd and any(
            e.primitive in _CUSTOM and not is_of_equinox(inside)
            for e, inside in it.pairwise(inner)
        ):
            return False
        # If a `bwd` calls the solver of the forward pass once more, which takes
        # derivatives, then the two loops carry the same. That is not a repetition: it
        # may have another input. A loop that runs again carries cotangents beside.
        if not is_as_it_was and like(loops[0]) in map(like, around):
            return False
        return _lengths(around) in lengths

    return repeats


def _are_called_alike(around: Sequence[Any], last: list[Any]) -> bool:
    """Whether the last calls that lead to a mark of the forward pass are these. With

        f = jax.custom_vjp(lambda x: g(x))           # `g` is jitted, with a mark
        f.defvjp(lambda x: (g(x), g(x + 1)), bwd)

    a loop over `f` calls `g` once in each iteration, and in each step back twice, from
    another line, and at another point: these are not repetitions."""
    calls = _calls(around[:-1])
    # If a checkpoint is differentiated, its values are computed outside of it. A scan
    # in it is then called where the checkpoint was.
    in_checkpoint = any(e.primitive is jexc.primitives.remat_p for e in around)
    are_last = calls[len(calls) - len(last) :] == last
    return are_last or in_checkpoint and set(last) <= set(calls)


def _calls(eqns: Iterable[Any]) -> list[Any]:
    """Where in a user's code these equations were called. Not where a cond was: under a
    vmap its branches become one. And not where one was kept in its loop."""
    cond_p = jexc.primitives.cond_p
    calls = (e for e in eqns if e.primitive is not cond_p and not is_kept_in_loop(e))
    return [e.source_info.traceback for e in calls]


def _lengths(around: Iterable[Any]) -> list[int | None]:
    """How many iterations the loops among these equations have."""
    return [loop.length for loop in map(loop_of, around) if loop is not None]


def _lengths_before(x: Mark) -> list[list[int | None]]:
    """The lengths of the loops that may be around what a mark repeats, from outside in.

    A loop that runs a body again stands in the place of the one that ran it first. So
    with a scan of 5 steps in the body, it is `[None, 5]` in both passes. (If a `bwd`
    calls a solver in a loop of its own, there is one more, so that it repeats nothing.)
    Loops around a pullback need not be around the forward pass. If a `lax.map` over a
    basis of 3 is around this one, it is `[3, None, 5]` here, and what ran before may
    have been in `[None, 5]` or in `[3, None, 5]`."""
    lengths, n = _lengths(x.eqns), len(_lengths(around_backward_pass(x.eqns)))
    return [lengths[:i] + lengths[n:] for i in range(n + 1)]


def lacks_iteration(
    x: Mark, executions: Iterable[Mark], backward: Sequence[bool | None]
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

    def apart(of: Mark) -> bool:
        ends = range(1, 2 * min(len(x.eqns), len(of.eqns)), 2)
        same = it.takewhile(lambda n: x.way[:n] == of.way[:n], ends)
        n = len(list(same))
        mine, others = x.eqns[n:], of.eqns[n:]
        if any(map(is_of_unknown_length, others)):
            return True
        return len(lengths_of(mine)) < len(lengths_of(others))

    return any(map(apart, executions))


# --- checkpoints and derivative rules ---
def _is_recomputed(x: Mark) -> bool:
    """Whether it is in a checkpoint that was differentiated, which runs its loops again
    as they are. The `bwd` of a function in there has not run before."""
    backward = False
    for eqn, inside in it.pairwise(x.eqns):
        backward = backward or _compat.in_backward_pass(eqn)
        if eqn.primitive is jexc.primitives.remat_p and eqn.params["differentiated"]:
            if _compat.is_recomputed(inside) or not backward:
                return True
    return False


def _rules(around: Iterable[Any]) -> list[str]:
    """The derivative rules of `jax.custom_jvp` functions that are among these."""
    return [rule for eqn in around for rule in _compat.rules_around(eqn)]


def _rule(x: Mark) -> str | None:
    """The derivative rule that a mark is in, unless it is in a function with such a
    rule that this one calls."""
    is_rule_of = lambda e: e.primitive is not jexc.primitives.custom_jvp_call_p
    within = [*it.takewhile(is_rule_of, x.eqns[::-1])]
    return (None, *_rules(within[::-1]))[-1]
