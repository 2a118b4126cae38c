"""Which sows of a program are executions, and of which a derivative is.

A sow in the forward pass is an execution. A derivative belongs to one: the edge that
is its first operand comes out of the equation of its primal (`_mark/primitive.py`),
through whatever calls, loops, branches and checkpoints there are between.

What a backward pass computes once more is a repetition, which is no execution. There
are three kinds of it:

- A value that is computed as in the forward pass, from the same inputs: a `bwd` that
  differentiates the forward function where it was. To tell, every value of the program
  has a number: two have the same one if they are computed alike, from the same inputs.
- In a loop of unknown length, the same equation, called from the same lines: Equinox's
  checkpointed loops run their body anew in each step of the backward pass.
- In the derivative rule of a `jax.custom_jvp` function, the same equation as in that
  function, if the rule calls it: optimistix solves, and evaluates what it solved once
  more at the solution.

Whatever else a `bwd` sows is an execution of its own, as the values at other states of
`diffrax.BacksolveAdjoint`, which solves another equation there.

Last, of two sows in branches of one cond, as a `vmap` leaves them, only one runs: if
the index of both is made in one place. In another call of the function it is another.

The answers are written into the sites: `Site.of`, `again`, `backward` and `cases`. Of

    y = sow[name=h] x          # equation 0 of the program
    z = jit[... sow[name=h] y] # equation 1, and equation 2 in there
    ...
    dy = sow[name=h, modes=(cotangent,)] e dz    # `e` comes out of equation 1

the first sow is `of` `{(0,)}`, the second one and the cotangent of `{(1, 0, 2)}`: a way
to an equation, as `Here.path` has it.
"""

import itertools as it
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jexc

from .. import _compat
from .._frames import call_site
from .._mark.primitive import same_p, sow_p
from .._mark.site import Site
from .edit import with_sites_at
from .find import equal, loop_of, sows
from .flow import Domain, Here, run


Path = tuple[int, ...]


def with_executions(
    closed: Any, wants: Callable[[Site], bool], several: Callable[[Site], bool]
) -> Any:
    """A program in which the sites that are wanted say which executions they are. The
    same program, if there is nothing to ask: neither a primal in a backward pass, nor
    derivatives or branches of a name that has more than one sow. Nor derivatives of one
    that may have `several`."""
    found = [(site, path) for site, path in sows(closed) if wants(site)]
    n = Counter(site.key for site, _ in found)

    def asks(site: Site, path: Sequence[Any]) -> bool:
        if n[site.key] > 1 and (site.modes or site.guards):
            return True
        if site.modes:
            return several(site) or n[site.name, "primal", ()] > 1
        return any(map(_compat.in_backward_pass, path))

    if not any(asks(*x) for x in found):
        return closed
    told = _Numbers()
    run(told, closed, [told.new() for _ in closed.invars], Here())
    return with_sites_at(closed, _sites([x for x in told.sows if wants(x.site)]))


class _Sow(NamedTuple):
    """One that the pass came by. `edges`: the executions that its edge comes from.
    `value` is equal for sows of equal values."""

    site: Site
    here: Here
    edges: frozenset[Path]
    value: Hashable
    runs: tuple[Hashable, ...]

    @property
    def backward(self) -> bool:
        return any(map(_compat.in_backward_pass, self.here.around))

    @property
    def cases(self) -> frozenset[tuple[int, int]]:
        return frozenset((index.number, i) for index, i in self.here.cases)


def _sites(found: Sequence[_Sow]) -> dict[Path, Site]:
    """The sites that say it, by the way to their equations."""
    primals = [x for x in found if not x.site.modes]
    # For each repetition, the executions that it repeats.
    repeated: dict[Path, frozenset[Path]] = {}
    by_value = defaultdict(list)
    for x in primals:
        by_value[x.value].append(x)
    for same in by_value.values():
        repeated.update(_repeated_values(same))
    repeated.update(_replayed([x for x in primals if x.here.path not in repeated]))
    of_call = defaultdict(list)
    for x in primals:
        of_call[x.site.origin].append(x.here.path)
    sites = {}
    for x in found:
        path, of = x.here.path, [x.here.path]
        if x.site.modes:
            # Edges of several branches may come out of one place. Where nothing leads
            # to the primal, it is any from this call of `sow`.
            any_of = of_call[x.site.origin]
            of = x.edges.intersection(any_of) or any_of
        sites[path] = x.site._replace(
            of=frozenset().union(*[repeated.get(p, {p}) for p in of]),
            again=path in repeated,
            backward=not x.site.modes and x.backward,
            cases=tuple((*guard, run) for guard, run in zip(x.site.guards, x.runs)),
        )
    return sites


# --- values that are computed twice ---
def _repeated_values(same: Sequence[_Sow]) -> Iterator[tuple[Path, frozenset[Path]]]:
    """Of sows of one value, the repetitions: of 2 executions that are repeated twice in
    all, the first repetition is of the last execution, and the second one of the first.
    If they are repeated 4 times, it is 2 each."""
    ran = [x for x in same if not x.backward]
    repeated = [x for x in same if x.backward]
    for j, x in enumerate(repeated):
        # Where it runs, so does that; and what ran last is repeated first.
        of = [y for y in ran if y.cases <= x.cases]
        if of:
            execution = of[-1 - j * len(of) // len(repeated)]
            yield x.here.path, frozenset([execution.here.path])


_NONE: frozenset[Path] = frozenset()


class _Value(NamedTuple):
    """What goes through the program: the number of a value, and where it was made,
    moves aside; of an edge, also the executions that it comes from. In two calls of one
    function, a value with one number is made in two places."""

    number: int
    made: Hashable = None
    edges: frozenset[Path] = _NONE


def _edges(values: Sequence[_Value]) -> frozenset[Path]:
    return _NONE.union(*[x.edges for x in values])


class _Description(NamedTuple):
    """How a value is computed. `params` need not be hashable."""

    how: Hashable
    of: tuple[int, ...] = ()
    params: Any = None


class _Numbers(Domain):
    """Numbers of values: equal ones are those of equal descriptions.

    What is said of a value in a loop holds for each iteration by itself, so that a
    residual, which one scan stacks and another one takes apart, has the number that it
    had in the first. Likewise for branches of one index, and for the devices of a mesh.
    """

    def __init__(self):
        self._known: dict[Hashable, list[tuple[Any, int]]] = {}
        self._descriptions: dict[int, _Description] = {}
        # What a branch, or a `select_n`, chooses by an index: that, and from what.
        self._chosen: dict[int, tuple[int, Sequence[_Value]]] = {}
        self._given: dict[Any, dict[int, int]] = {}
        self._loops: dict[Path, Hashable] = {}
        self._next = it.count()
        self.sows: list[_Sow] = []

    def new(self, edges: frozenset[Path] = _NONE) -> _Value:
        """A value that is equal to no other one."""
        number = next(self._next)
        return _Value(number, number, edges)

    def _number(self, how: Hashable, of: Sequence[int] = (), params: Any = None) -> int:
        new = _Description(how, tuple(of), params)
        same = self._known.setdefault(new[:2], [])
        for x, number in same:
            if x is params or equal(x, params):
                return number
        number = next(self._next)
        same.append((params, number))
        self._descriptions[number] = new
        return number

    def literal(self, literal):
        number = self._number(("literal", literal.aval), params=literal.val)
        return _Value(number, number)

    def constant(self, x):
        number = self._number(("const", id(x)))
        return _Value(number, number)

    # --- equations ---
    def equation(self, eqn, operands, here):
        primitive = eqn.primitive
        if primitive is sow_p:
            return [self._sow(eqn, operands, here), *operands[1:]]
        if primitive is same_p:
            return [self._recomputed(eqn, operands), *operands[1:]]
        if primitive in _SAME:
            return [*operands]
        if primitive is jax.lax.select_n_p:
            return [self.chosen(operands[0], operands[1:])]
        edges = _edges(operands)
        if eqn.effects or _is_users(eqn):
            outs = [next(self._next) for _ in eqn.outvars]
        else:
            n = self._number(primitive, [x.number for x in operands], eqn.params)
            outs = [self._number(("out", i), (n,)) for i in range(len(eqn.outvars))]
        # Edges are of size 0, wherever they are stacked or sliced.
        is_edge = [v.aval.shape[-1:] == (0,) for v in eqn.outvars]
        moved = operands[0].made if primitive in _MOVES else None
        return [
            _Value(n, moved or (here.path, i), edges if e else _NONE)
            for i, (n, e) in enumerate(zip(outs, is_edge))
        ]

    def _sow(self, eqn: Any, operands: Sequence[_Value], here: Here) -> _Value:
        site: Site = eqn.params["site"]
        edge, *operands = operands
        if here.final:
            here = here._replace(around=(*here.around, eqn))
            value = self._form(site, operands)
            runs = tuple(x.made for x in operands[: len(site.guards)])
            self.sows.append(_Sow(site, here, edge.edges, value, runs))
        return self.new(edge.edges if site.modes else frozenset([here.path]))

    def _form(self, site: Site, operands: Sequence[_Value]) -> Hashable:
        branches = tuple(branch for _, branch, _ in site.guards)
        numbers = [x.number for x in operands]
        if branches:
            cases = frozenset(zip(numbers, branches))
            numbers = [self._in_cases(n, cases) for n in numbers]
        return site.tag, site.key, site.treedef, site.leaves, branches, tuple(numbers)

    def _recomputed(self, eqn: Any, operands: Sequence[_Value]) -> _Value:
        """The edge where a checkpoint in a `while` computes it again, see
        `_mark/primitive.py`."""
        site = eqn.params["site"]
        value = self._form(site, operands[1:])
        same = [x for x in self.sows if x.site.origin is site.origin]
        alike = [x for x in same if x.value == value] or same
        return self.new(frozenset(x.here.path for x in alike))

    # --- branches ---
    def in_case(self, index, i, value):
        chosen_by, choices = self._chosen.get(value.number, (None, ()))
        return choices[i] if chosen_by == index.number else value

    def chosen(self, index, cases):
        edges = _edges(cases)
        if len({x.number for x in cases}) == 1:
            return cases[0]._replace(edges=edges)
        by = self._without_broadcast(index.number)
        number = self._number("chosen", (by, *[x.number for x in cases]))
        self._chosen[number] = by, cases
        return _Value(number, (index.made, *[x.made for x in cases]), edges)

    def _without_broadcast(self, index: int) -> int:
        """JAX gives an index, of which there is one for each lane, the shape of a
        value."""
        while (found := self._descriptions.get(index)) and found.how == ("out", 0):
            made = self._descriptions[found.of[0]]
            if made.how is not jax.lax.broadcast_in_dim_p:
                break
            over = made.params["broadcast_dimensions"]
            if tuple(over) != tuple(range(len(over))):
                break
            index = made.of[0]
        return index

    def _in_cases(self, x: int, cases: frozenset[tuple[int, int]]) -> int:
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
                below = (choices[of_index[index]].number,)
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
                done[y] = self._number(description.how, new, description.params)
        return done[x]

    # --- loops ---
    def carried(self, eqn, operands, init, body, here):
        # First with names for what it carries, which says what that is.
        loop = len(here.scans)
        named = [
            _Value(self._number(("carried", loop, i)), None, x.edges)
            for i, x in enumerate(init)
        ]
        after = body(named, here._replace(final=False))
        inside, self._loops[here.path] = self._loop(eqn, operands, init, after, loop)
        carry = [
            x if u.number == v.number else None for x, u, v in zip(init, named, after)
        ]
        return self._through(carry, inside, init, after, here)

    def left(self, init, carry, last, here):
        same = [x if x.number == u.number else None for x, u in zip(init, carry)]
        return self._through(same, self._loops[here.path], init, last, here)

    def _through(self, known, how, init, after, here):
        """What a loop carries: what is known, or what `how` says it is."""
        return [
            _Value(
                self._number((i, how)) if x is None else x.number,
                (here.path, how[0], i) if x is None else x.made,
                _edges([first, new]),
            )
            for i, (x, first, new) in enumerate(zip(known, init, after))
        ]

    def _loop(self, eqn, operands, init, after, depth) -> tuple[Hashable, Hashable]:
        """What it is that two loops carry, if it is the same; and what comes out."""
        if not _is_of_unknown_length(eqn):
            numbers = [tuple(x.number for x in xs) for xs in (init, after)]
            how = loop_of(eqn), depth, *numbers
            return ("carry", how), ("last", how)
        unknown = next(self._next)
        if eqn.effects:
            return ("carry", unknown), ("last", unknown)
        # Nothing in there is equal to anything in another loop. Their results may be.
        n = self._number(eqn.primitive, [x.number for x in operands], eqn.params)
        return ("carry", unknown), ("last", n)

    def _part(self, how: tuple[str, Hashable], inverse: str, whole: _Value) -> _Value:
        """That of which `whole` was made, if that is known."""
        _, where = how
        found = self._descriptions.get(whole.number)
        if found is not None and found.how == (inverse, where):
            return whole._replace(number=found.of[0], made=(how, whole.made))
        number = self._number(how, (whole.number,))
        return whole._replace(number=number, made=(how, whole.made))

    def entry(self, value, here):
        return self._part(("entry", len(here.scans)), "stack", value)

    def stacked(self, value, here):
        loop = loop_of(here.around[-1])
        number = self._number(("stack", len(here.scans)), (value.number,), loop)
        return value._replace(number=number)

    def shard(self, value, mesh, spec):
        return self._part(("shard", (mesh, spec)), "shards", value)

    def unshard(self, value, mesh, spec):
        number = self._number(("shards", (mesh, spec)), (value.number,))
        return value._replace(number=number)


_MOVES = (
    jax.lax.broadcast_in_dim_p,
    jax.lax.transpose_p,
    jax.lax.reshape_p,
    jax.lax.squeeze_p,
)
_SAME = jexc.primitives.name_p, jexc.primitives.stop_gradient_p


def _is_users(eqn: Any) -> bool:
    """Whether its program is the user's, which is traced anew each time."""
    return eqn.primitive is _compat.hi_p and _compat.is_users(eqn.params["_prim"])


# --- equations that run again ---
Calls = tuple[Any, ...]
# Among calls: a loop of unknown length, within which they begin anew.
_LOOP = object()
_CUSTOM = jexc.primitives.custom_vjp_call_p, _compat.hi_p


def _replayed(primals: Sequence[_Sow]) -> Iterator[tuple[Path, frozenset[Path]]]:
    """The repetitions in a loop of a backward pass, or in a derivative rule."""
    may = {x.here.path: _replays(x) for x in primals}
    ran = [x for x in primals if may[x.here.path] is None]
    for x in primals:
        replays = may[x.here.path]
        if replays is None:
            continue
        of = [
            y.here.path
            for y in ran
            if y.site.key == x.site.key
            and y.site.origin is x.site.origin
            and _is_replay(replays, _calls(y))
        ]
        if of:
            yield x.here.path, frozenset(of)


def _is_of_unknown_length(eqn: Any) -> bool:
    loop = loop_of(eqn)
    return loop is not None and loop.length is None


def _call_of(eqn: Any) -> Calls:
    """What an equation adds to the calls around a sow."""
    rules = _compat.rules_around(eqn)
    if _is_of_unknown_length(eqn):
        return (*rules, _LOOP)
    # Its branches may become one.
    if eqn.primitive is jexc.primitives.cond_p:
        return rules
    return (call_site(eqn), *rules)


def _calls(x: _Sow) -> Calls:
    *around, _ = x.here.around
    return tuple(it.chain.from_iterable(map(_call_of, around)))


def _replays(x: _Sow) -> Calls | None:
    """The calls between a sow and the innermost loop of unknown length around it that
    is in a backward pass; or the derivative rule that it is in; or `None`."""
    *around, sow = x.here.around
    backward, calls, rule = False, None, None
    for eqn in around:
        rule = (rule, *_compat.rules_around(eqn))[-1]
        if eqn.primitive is jexc.primitives.custom_jvp_call_p:
            rule = None
        backward = backward or _compat.in_backward_pass(eqn)
        if backward and _is_of_unknown_length(eqn):
            calls = ()
        elif calls is not None:
            calls = (*calls, *_call_of(eqn))
        elif eqn.primitive in _CUSTOM:
            # Not differentiated, so nothing in there has run before.
            backward = False
    rule = (rule, *_compat.rules_around(sow))[-1]
    return calls if calls is not None or rule is None else (rule,)


def _is_replay(replays: Calls, calls: Calls) -> bool:
    if replays and isinstance(replays[0], str):
        return replays[0] in calls
    return calls[len(calls) - len(replays) :] == replays
