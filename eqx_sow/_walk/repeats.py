"""Which sows of a backward pass compute once more what the forward pass has computed.

Every value of a program has a number: two have the same one if they are computed alike,
from the same inputs. Calls are looked through. What is said of a value in a loop holds
for each iteration by itself, so that a residual, which one scan stacks and another one
takes apart, has the number that it had in the first. Likewise for branches of one
index, and for the devices of a mesh.
"""

import dataclasses as dc
import itertools as it
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jexc

from .. import _compat
from .._mark.primitive import same_p, sow_p
from .._mark.site import Site
from .find import equal, expanded, sows


class Execution(NamedTuple):
    """What is to be said of a sow that a backward pass repeats: the origins of the
    repetitions, and how often these are differentiated."""

    origins: frozenset[Any]
    differentiated: int

    @staticmethod
    def of(site: Site) -> "Execution":
        return Execution(frozenset((site.origin,)), site.differentiated)


def _as_one(same: Sequence[Execution]) -> Execution:
    origins = frozenset().union(*[x.origins for x in same])
    return Execution(origins, max(x.differentiated for x in same))


@dc.dataclass(frozen=True)
class Repeats:
    """Sows of a jaxpr by the indices of the equations that lead to them, from outside
    in, and by their origin. `None` is said of one that is not an execution."""

    notes: frozenset[tuple[tuple[int, ...], Any, Execution | None]] = frozenset()

    def inside(self, at: int) -> "Repeats":
        """Those in one equation."""
        if not self.notes:
            return self
        inside = ((path[1:], x, y) for path, x, y in self.notes if path[0] == at)
        # Another branch may have a sow at this index.
        return Repeats(frozenset(note for note in inside if note[0]))

    def of(self, at: int, site: Site) -> Execution | None:
        for path, origin, note in self.notes:
            if path == (at,) and origin is site.origin and not site.modes:
                return note
        return Execution.of(site)


def repeats(jaxpr: Any, wants: Callable[[Site], bool]) -> Repeats:
    """Those of a program, of the sows that are wanted."""
    backward = (
        site
        for site, path in sows(jaxpr)
        if not site.modes and any(map(_compat.in_backward_pass, path))
    )
    if not any(map(wants, backward)):
        return Repeats()
    numbers = _Numbers()
    opened, _ = _compat.open_jaxpr(jaxpr)
    numbers.run(jaxpr, numbers.new(len(opened.invars)), _Here())
    by_value: dict[Hashable, list[_Sow]] = {}
    for x in numbers.sows:
        if not x.site.modes and wants(x.site):
            by_value.setdefault(x.value, []).append(x)
    notes: dict[Any, list[Execution | None]] = {}
    for x, note in it.chain.from_iterable(map(_notes, by_value.values())):
        notes.setdefault((x.here.path, x.site.origin), []).append(note)
    # A function may be in several branches, at the same place in each.
    ran = {key: [x for x in found if x is not None] for key, found in notes.items()}
    return Repeats(
        frozenset((*key, _as_one(same) if same else None) for key, same in ran.items())
    )


_Cases = frozenset[tuple[int, int]]


class _Here(NamedTuple):
    """Where a jaxpr is in the program. `cases`: in which branches, each with the number
    of the index. `loops`: in how many scans. `known`: what a scan carries has its
    number already."""

    path: tuple[int, ...] = ()
    backward: bool = False
    cases: _Cases = frozenset()
    loops: int = 0
    known: bool = True

    def within(self, at: int, eqn: Any) -> "_Here":
        backward = self.backward or _compat.in_backward_pass(eqn)
        return self._replace(path=(*self.path, at), backward=backward)


class _Sow(NamedTuple):
    site: Site
    here: _Here
    value: Hashable


def _notes(same: Sequence[_Sow]) -> Iterator[tuple[_Sow, Execution | None]]:
    """What is to be said of sows of one value."""
    ran = [x for x in same if not x.here.backward]
    repeated = [x for x in same if x.here.backward]
    executions = [[Execution.of(x.site)] for x in ran]
    for j, x in enumerate(repeated):
        # Where it runs, so does that; and what ran last is repeated first.
        of = [i for i, y in enumerate(ran) if y.here.cases <= x.here.cases]
        new = Execution.of(x.site)
        if of:
            executions[of[-1 - j * len(of) // len(repeated)]].append(new)
        yield x, None if of else new
    for x, each in zip(ran, executions):
        yield x, _as_one(each)


class _Description(NamedTuple):
    """How a value is computed. `params` need not be hashable."""

    how: Hashable
    of: tuple[int, ...] = ()
    params: Any = None


class _Numbers:
    """Numbers of values: equal ones are those of equal descriptions."""

    def __init__(self):
        self._known: dict[Hashable, list[tuple[Any, int]]] = {}
        self._descriptions: dict[int, _Description] = {}
        # What a branch, or a `select_n`, chooses by an index: that, and from what.
        self._chosen: dict[int, tuple[int, Sequence[int]]] = {}
        self._given: dict[_Cases, dict[int, int]] = {}
        self._next = it.count()
        self.sows: list[_Sow] = []

    def new(self, n: int) -> list[int]:
        return list(it.islice(self._next, n))

    def number(self, how: Hashable, of: Sequence[int] = (), params: Any = None) -> int:
        new = _Description(how, tuple(of), params)
        same = self._known.setdefault(new[:2], [])
        for x, number in same:
            if x is params or equal(x, params):
                return number
        (number,) = self.new(1)
        same.append((params, number))
        self._descriptions[number] = new
        return number

    def part(self, how: tuple[str, Hashable], inverse: str, whole: int) -> int:
        """That of which `whole` was made, if that is known."""
        _, where = how
        found = self._descriptions.get(whole)
        if found is not None and found.how == (inverse, where):
            return found.of[0]
        return self.number(how, (whole,))

    def given(self, x: int, cases: _Cases) -> int:
        """The value, where these branches run."""
        of_index = dict(cases)
        done = self._given.setdefault(cases, {})
        # Not by recursion: a program may be long.
        waiting = [x]
        while waiting:
            y = waiting[-1]
            index, choices = self._chosen.get(y, (None, ()))
            description = self._descriptions.get(y, _Description(None))
            below = description.of
            if index in of_index:
                below = (choices[of_index[index]],)
            missing = [z for z in below if z not in done]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            new = tuple(done[z] for z in below)
            if index in of_index:
                (done[y],) = new
            elif new == below:
                done[y] = y
            else:
                done[y] = self.number(description.how, new, description.params)
        return done[x]

    def run(self, jaxpr: Any, args: Sequence[int], here: _Here) -> list[int]:
        jaxpr, consts = _compat.open_jaxpr(jaxpr)
        env = {
            v: self.number(("const", id(x))) for v, x in zip(jaxpr.constvars, consts)
        }
        env.update(zip(jaxpr.invars, args))

        def read(v):
            if isinstance(v, jexc.Literal):
                return self.number(("literal", v.aval), params=v.val)
            return env[v]

        for i, eqn in enumerate(jaxpr.eqns):
            operands = list(map(read, eqn.invars))
            primitive = eqn.primitive
            rule = _rules.get(primitive)
            if rule is not None:
                outs = rule(self, eqn, operands, here.within(i, eqn))
            elif eqn.effects:
                outs = self.new(len(eqn.outvars))
            else:
                n = self.number(primitive, operands, eqn.params)
                outs = [self.number(("out", i), (n,)) for i in range(len(eqn.outvars))]
            env.update(zip(eqn.outvars, outs))
        return list(map(read, jaxpr.outvars))

    def sow(self, eqn: Any, operands: Sequence[int], here: _Here) -> Sequence[int]:
        site = eqn.params["site"]
        if here.known:
            branches = tuple(branch for _, branch, _ in site.guards)
            form = site.tag, site.key, site.treedef, site.leaves, branches
            values: Sequence[int] = operands[1:]
            if branches:
                cases = frozenset(zip(values, branches))
                values = [self.given(x, cases) for x in values]
            self.sows.append(_Sow(site, here, (form, tuple(values))))
        return operands

    def same(self, eqn: Any, operands: Sequence[int], here: _Here) -> Sequence[int]:
        del eqn, here
        return operands

    def call(self, eqn: Any, operands: Sequence[int], here: _Here) -> Sequence[int]:
        (jaxpr,) = filter(_compat.is_jaxpr, eqn.params.values())
        return self.run(jaxpr, operands, here)

    def hi(self, eqn: Any, operands: Sequence[int], here: _Here) -> Sequence[int]:
        if _compat.is_users(eqn.params["_prim"]):
            # Its program is traced anew each time, and so are the sows in it.
            return self.new(len(eqn.outvars))
        return self.run(expanded(eqn), operands, here)

    def cond(self, eqn: Any, operands: Sequence[int], here: _Here) -> Sequence[int]:
        index, *operands = operands
        outs = []
        for i, jaxpr in enumerate(eqn.params["branches"]):
            inside = here._replace(cases=here.cases | {(index, i)})
            args = [
                self._chosen[x][1][i]
                if x in self._chosen and self._chosen[x][0] == index
                else x
                for x in operands
            ]
            outs.append(self.run(jaxpr, args, inside))
        return [self._one_of("cond", index, same) for same in zip(*outs)]

    def select_n(self, eqn: Any, operands: Sequence[int], here: _Here):
        del here
        index, *choices = operands
        if len(set(choices)) == 1:
            return choices[:1]
        return [self._one_of("select_n", index, choices)]

    def _one_of(self, how: str, index: int, choices: Sequence[int]) -> int:
        number = self.number(how, (index, *choices))
        # JAX gives an index, of which there is one for each lane, the shape of a value.
        while (found := self._descriptions.get(index)) and found.how == ("out", 0):
            made = self._descriptions[found.of[0]]
            if made.how is not jax.lax.broadcast_in_dim_p:
                break
            over = made.params["broadcast_dimensions"]
            if tuple(over) != tuple(range(len(over))):
                break
            index = made.of[0]
        self._chosen[number] = index, choices
        return number

    def scan(self, eqn: Any, operands: Sequence[int], here: _Here) -> Sequence[int]:
        p = eqn.params
        n, m = _compat.scan_arity(p)
        consts, init, xs = operands[:n], operands[n : n + m], operands[n + m :]
        loop = here.loops
        xs = [self.part(("entry", loop), "stack", x) for x in xs]
        inside = here._replace(loops=loop + 1)

        def body(carry, here):
            outs = self.run(p["jaxpr"], [*consts, *carry, *xs], here)
            return outs[:m], outs[m:]

        # First with names for what it carries, which says what that is.
        carry = [self.number(("carried", loop, i)) for i in range(m)]
        after, _ = body(carry, inside._replace(known=False))
        how = p["length"], p["reverse"], loop, tuple(init), tuple(after)
        carry = [
            x if u == v else self.number(("carry", i, how))
            for i, (x, u, v) in enumerate(zip(init, carry, after))
        ]
        last, ys = body(carry, inside)
        last = [
            x if x == u else self.number(("last", i, how))
            for i, (x, u) in enumerate(zip(init, carry))
        ]
        return [*last, *(self.number(("stack", loop), (y,), p["length"]) for y in ys)]

    def shard_map(self, eqn: Any, operands: Sequence[int], here: _Here):
        p = eqn.params
        where = [(p["mesh"], s) for s in (*p["in_specs"], *p["out_specs"])]
        pairs = zip(where, operands)
        args = [self.part(("shard", at), "shards", x) for at, x in pairs]
        outs = self.run(p["jaxpr"], args, here)
        pairs = zip(where[len(operands) :], outs)
        return [self.number(("shards", at), (x,)) for at, x in pairs]


_rules: dict[Any, Callable] = {
    sow_p: _Numbers.sow,
    same_p: _Numbers.same,
    jexc.primitives.name_p: _Numbers.same,
    jexc.primitives.stop_gradient_p: _Numbers.same,
    jexc.primitives.jit_p: _Numbers.call,
    jexc.primitives.call_p: _Numbers.call,
    jexc.primitives.closed_call_p: _Numbers.call,
    jexc.primitives.remat_p: _Numbers.call,
    jexc.primitives.custom_jvp_call_p: _Numbers.call,
    jexc.primitives.custom_vjp_call_p: _Numbers.call,
    _compat.custom_vmap_p: _Numbers.call,
    jexc.primitives.cond_p: _Numbers.cond,
    jax.lax.select_n_p: _Numbers.select_n,
    jexc.primitives.scan_p: _Numbers.scan,
    _compat.shard_map_p: _Numbers.shard_map,
    # `None`, which no primitive is, if there is none.
    _compat.hi_p: _Numbers.hi,
}
