"""One way to go through a program with something other than numbers.

`evaluate` in `interpreter.py` computes a program. Here it is only looked at: what goes
from equation to equation in the place of numbers is up to a `Domain`, such as the
inputs that a value comes from (`_modules/visits.py`). How it goes into calls,
loops and branches, and comes out of them, is written down once, in the table `rules`.

An example, with "which inputs does it come from" in the place of numbers:

    jit[jaxpr={ lambda; a b. let c = mul a b; d = sin b in (c, d) }] x y

The operands are `{x}` and `{y}`. The rule for calls runs the inner jaxpr with these for
`a` and `b`, and `{x, y}`, `{y}` come out.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jexc

from .. import _compat
from .._mark.primitive import edge_p, sow_p
from .sows import called_by, lengths_of, number, variables, Way, with_sow


class Here(NamedTuple):
    """The place in a program that the pass has come to: an equation or a jaxpr.

    What is around it goes from outside in. So in a scan within a branch of a cond,
    `around` is the equation of the cond and that of the scan.
    """

    # The way there from the outermost jaxpr.
    way: Way = ()
    # The equations around it.
    around: tuple[Any, ...] = ()
    # For each cond around it: the value of its index, and the number of the branch.
    cases: tuple[tuple[Any, int], ...] = ()

    def inside(self, eqn: Any, k: int) -> "Here":
        """The place of jaxpr `k` of an equation, if this is that of the equation."""
        return self._replace(way=(*self.way, k), around=(*self.around, eqn))

    @property
    def scans(self) -> list[Way]:
        """The ways to the scans around it."""
        ends = (2 * i + 1 for i, e in enumerate(self.around) if lengths_of([e]))
        return [self.way[:n] for n in ends]


class Domain:
    """What goes through a program: the values that stand for arrays, and what each kind
    of equation makes of them. There are three: `Visits` in `_modules/visits.py`,
    `Edges` in `table.py`, and `Numbering` in `numbering.py`.

    Only equations that have a mark inside, or lead to one, are looked at. The value of
    what no mark depends on is `None`.
    """

    # How many of the operands of a mark are needed, with the edge first. `None`: all.
    n_needed: int | None = None

    def constant(self, x: Any, aval: Any) -> Any:
        """The value of an array that a jaxpr holds, or of a number in an equation."""
        raise NotImplementedError

    def equation(self, eqn: Any, operands: Sequence[Any], here: Here) -> list[Any]:
        """The values of the outputs of an equation without a rule in `rules`."""
        raise NotImplementedError

    def chosen(self, index: Any, cases: Sequence[Any]) -> Any:
        """The value of an output of a cond, given the values that the branches have for
        it."""
        raise NotImplementedError

    def in_case(self, index: Any, i: int, value: Any) -> Any:
        """The value that an operand of a cond has in branch `i`."""
        return value

    def entry(self, value: Any, here: Here) -> Any:
        """The value of the slice that one iteration of a scan gets of an operand.
        `here` is in the body of the scan."""
        return value

    def stacked(self, value: Any, here: Here) -> Any:
        """The value of what a scan stacks, given that of one iteration."""
        return value

    def carried(
        self, when: str, init: Sequence[Any], after: Sequence[Any], here: Here
    ) -> list[Any]:
        """The values of what a loop carries, `when` an iteration begins or the loop
        ends. They are `init`, or what the iteration before left, `after`. `here` is in
        the body."""
        raise NotImplementedError

    def shard(self, value: Any, mesh: Any, spec: Any) -> Any:
        """The value of what one device has of an operand of a `shard_map`."""
        return value

    def unshard(self, value: Any, mesh: Any, spec: Any) -> Any:
        """The value of an output of a `shard_map`, given that of one device."""
        return value


def run(domain: Domain, jaxpr: Any, args: Sequence[Any], here: Here) -> list[Any]:
    """The values of the outputs of a jaxpr, given those of its inputs."""
    jaxpr, consts = _compat.open_jaxpr(jaxpr)
    env = {v: domain.constant(x, v.aval) for v, x in zip(jaxpr.constvars, consts)}
    env.update(zip(jaxpr.invars, args))

    def read(v):
        is_number = isinstance(v, jexc.Literal)
        return domain.constant(v.val, v.aval) if is_number else env.get(v)

    # What comes out of the program itself does not matter.
    outvars = jaxpr.outvars if here.way else []
    for i, eqn in _leading_to_sows(domain, jaxpr, outvars):
        rule = rules.get(eqn.primitive, _other)
        at = Here((*here.way, i), *here[1:])
        outs = rule(domain, eqn, list(map(read, eqn.invars)), at)
        env.update(zip(eqn.outvars, outs))
    return list(map(read, outvars))


def _leading_to_sows(
    domain: Domain, jaxpr: Any, outvars: Sequence[Any]
) -> list[tuple[int, Any]]:
    """The equations that have a mark inside, or on which one depends, with their
    indices: found backward, as what they depend on comes before."""
    with_sows = with_sow(jaxpr)
    asked = set(variables(outvars))
    found = []
    for i in range(len(jaxpr.eqns) - 1, -1, -1):
        eqn = jaxpr.eqns[i]
        if eqn.primitive is sow_p:
            pairs = zip(eqn.outvars[1:], eqn.invars[1:])
            atoms = [
                *eqn.invars[: domain.n_needed],
                *(v for out, v in pairs if out in asked),
            ]
        elif (
            i in with_sows
            or eqn.primitive is edge_p
            or not asked.isdisjoint(eqn.outvars)
        ):
            atoms = eqn.invars
        else:
            continue
        asked.update(variables(atoms))
        found.append((i, eqn))
    return found[::-1]


def _other(domain: Domain, eqn: Any, operands: list[Any], here: Here) -> list[Any]:
    """An equation without a rule. If it holds one jaxpr of so many operands, it is
    taken for a call, such as that of a jitted function."""
    called = called_by(eqn)
    if called is None:
        return domain.equation(eqn, operands, here)
    k, jaxpr = called
    return run(domain, jaxpr, operands[: len(jaxpr.invars)], here.inside(eqn, k))


def _cond(domain: Domain, eqn: Any, operands: list[Any], here: Here) -> list[Any]:
    index, *operands = operands
    outs = []
    for i, jaxpr in enumerate(eqn.params["branches"]):
        args = [domain.in_case(index, i, x) for x in operands]
        inside = here.inside(eqn, i)._replace(cases=(*here.cases, (index, i)))
        outs.append(run(domain, jaxpr, args, inside))
    return [domain.chosen(index, cases) for cases in zip(*outs)]


def _loop(domain: Domain, init: Sequence[Any], body: Callable, here: Here) -> list[Any]:
    """The values of the outputs of a loop: first what it carries at the end, then what
    a scan stacks. `body(carry)` returns the values that one iteration makes of what it
    begins with. It runs twice, since an iteration may begin with what the one before
    has left. So a domain comes to each place in there twice, and what it has found the
    second time counts."""
    after = body(domain.carried("at first", init, init, here))
    outs = body(domain.carried("before an iteration", init, after, here))
    return [*domain.carried("at the end", init, outs, here), *outs[len(init) :]]


def _scan(domain: Domain, eqn: Any, operands: list[Any], here: Here) -> list[Any]:
    jaxpr = eqn.params["jaxpr"]
    n, m = _compat.scan_arity(eqn.params)
    consts, init, xs = operands[:n], operands[n : n + m], operands[n + m :]
    inside = here.inside(eqn, number(eqn, jaxpr))
    xs = [domain.entry(x, inside) for x in xs]

    def body(carry):
        outs = run(domain, jaxpr, [*consts, *carry, *xs], inside)
        return [*outs[:m], *(domain.stacked(y, inside) for y in outs[m:])]

    return _loop(domain, init, body, inside)


def _while(domain: Domain, eqn: Any, operands: list[Any], here: Here) -> list[Any]:
    p = eqn.params
    n, m = p["cond_nconsts"], p["body_nconsts"]
    consts, init = operands[n : n + m], operands[n + m :]
    inside = here.inside(eqn, number(eqn, p["body_jaxpr"]))
    condition = here.inside(eqn, number(eqn, p["cond_jaxpr"]))

    def body(carry):
        run(domain, p["cond_jaxpr"], [*operands[:n], *carry], condition)
        return run(domain, p["body_jaxpr"], [*consts, *carry], inside)

    return _loop(domain, init, body, inside)


def _shard_map(domain: Domain, eqn: Any, operands: list[Any], here: Here) -> list[Any]:
    p = eqn.params
    args = [domain.shard(x, p["mesh"], s) for x, s in zip(operands, p["in_specs"])]
    outs = _other(domain, eqn, args, here)
    return [domain.unshard(x, p["mesh"], s) for x, s in zip(outs, p["out_specs"])]


rules: dict[Any, Callable] = {
    jexc.primitives.cond_p: _cond,
    jexc.primitives.scan_p: _scan,
    jexc.primitives.while_p: _while,
    _compat.shard_map_p: _shard_map,
}
