"""Which sows of a program are executions, and to which of them a derivative belongs.

A sow in the forward pass is an execution. A derivative belongs to one: the edge that
is its first operand comes out of the equation of its primal (`_mark/primitive.py`),
through whatever calls, loops, branches and checkpoints there are between.

What a backward pass computes once more is a repetition, which is no execution. There
are three kinds of it:

- A value that is computed as in the forward pass, from the same inputs: a `bwd` that
  calls `jax.vjp(forward, x)` with the `x` of the forward pass. To tell, every value of
  the program has a number: two have the same one if they are computed alike, from the
  same inputs.
- In a loop of Equinox that takes derivatives, the same equation, called from the same
  lines: Equinox's checkpointed loops run their body anew, and differentiate it, in each
  step of the backward pass.
- In the derivative rule of a `jax.custom_jvp` function, the same equation as in that
  function, if the rule calls the function: with the same inputs, or after a loop.
  optimistix solves in a loop, and then evaluates the function that it solved once more,
  at the solution.

Whatever else a `bwd` sows is an execution of its own. So are the values that
`diffrax.BacksolveAdjoint` visits: it solves another equation in its backward pass.

A third question is about conds of which a `vmap` runs all branches. Of two sows in two
branches only one runs, if they are of one run of the cond: if the index that both have
as an operand was made in one place. In another call of the function it is made in
another one.

The answers are written into the sites: `Site.of`, `again`, `backward` and `guards`. In

    y = sow[name=h] x          # equation 0 of the program
    z = jit[... sow[name=h] y] # equation 1, and equation 2 in there
    ...
    dy = sow[name=h, modes=(cotangent,)] e dz    # `e` comes out of equation 1

the first sow has `of={(0,)}`, and the second one and the cotangent `of={(1, 0, 2)}`,
which is the path of an equation: see `Path`.
"""

import itertools as it
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np

from .. import _compat
from .._frames import is_of_equinox
from .._mark.primitive import same_p, sow_p
from .._mark.site import Site
from .flow import Domain, Here, run
from .sows import Found, jaxprs_of, kept_with_jaxpr, loop_of, Path, with_sites


def with_executions(
    closed: Any,
    found: Iterable[Found],
    wants: Callable[[Site], bool],
    several: Callable[[Site], bool],
) -> Any:
    """A program in which the sites that are wanted, of those that are `found` in it,
    say which executions they are. `several` says of a site whether its name may have
    more than one, as with `Append`.

    It is the same program if that is obvious: there is no primal in a backward pass,
    and no name has derivatives, or is in branches, and also has more than one sow."""
    wanted = [x for x in found if wants(x.site)]
    n = Counter(x.site.key for x in wanted)

    def asks(site: Site, eqns: Sequence[Any]) -> bool:
        if n[site.key] > 1 and (site.modes or site.guards):
            return True
        if site.modes:
            return several(site) or n[site.name, "primal", ()] > 1
        return any(map(_compat.in_backward_pass, eqns))

    if not any(asks(x.site, x.eqns) for x in wanted):
        return closed
    told = _Numbers()
    run(told, closed, [told.new() for _ in closed.invars], Here())
    return with_sites(closed, _sites([x for x in told.sows if wants(x.site)]))


class _Sow(NamedTuple):
    """A sow that the pass came by."""

    site: Site
    # Its place; the last of the equations around it is its own.
    here: Here
    # The paths of the executions that its edge comes from.
    edges: frozenset[Path]
    # Equal for two sows of equal values.
    value: Hashable
    # For each guard, where its operand was made: tells runs of one cond apart.
    runs: tuple[Hashable, ...]

    @property
    def backward(self) -> bool:
        return any(map(_compat.in_backward_pass, self.here.around))

    @property
    def cases(self) -> frozenset[tuple[int, int]]:
        return frozenset((index.number, i) for index, i in self.here.cases)


def _sites(found: Sequence[_Sow]) -> dict[Path, Site]:
    """The sites that have the answers, by the paths of their equations."""
    primals = [x for x in found if not x.site.modes]
    # For each repetition, the executions that it repeats.
    repeated: dict[Path, frozenset[Path]] = {}
    by_value = defaultdict(list)
    for x in primals:
        by_value[x.value].append(x)
    for alike in by_value.values():
        repeated.update(_repeated_values(alike))
    repeated.update(_replayed([x for x in primals if x.here.path not in repeated]))
    ran = {x.site.key for x in primals if not x.backward}
    of_call = defaultdict(list)
    for x in primals:
        of_call[x.site.origin].append(x.here.path)
    sites = {}
    for x in found:
        path, of = x.here.path, [x.here.path]
        if x.site.modes:
            # A derivative may be of one primal or another, if a branch decides. Where
            # no edge leads to a primal, it is of any from this call of `sow`: from
            # what a checkpoint in a `while_loop` computes again, there is none.
            any_of = of_call[x.site.origin]
            of = x.edges.intersection(any_of) or any_of
        # In a branch of a cond that a vmap made a selection of, a value of the forward
        # pass has no longer the number that it had.
        again: bool | None = path in repeated
        in_branch = any(guard.cond is not None for guard in x.site.guards)
        if not again and x.backward and in_branch and x.site.key in ran:
            again = None
        sites[path] = x.site._replace(
            of=frozenset().union(*[repeated.get(p, {p}) for p in of]),
            again=again,
            backward=not x.site.modes and x.backward,
            guards=tuple(g._replace(run=r) for g, r in zip(x.site.guards, x.runs)),
        )
    return sites


def _repetitions(
    sows: Iterable[_Sow],
    is_repetition: Callable[[_Sow], bool],
    repeats: Callable[[_Sow, _Sow], bool],
    choose: Callable[[list[Path], int, int], Iterable[Path]],
) -> Iterator[tuple[Path, frozenset[Path]]]:
    """Of some sows, in the order of the program, the repetitions, each with the
    executions that it may repeat.

    In a backward pass there are several repetitions, one after another. They are of
    executions before it. Of those that it `repeats`, number `i` of `n` repetitions is
    one of those that `choose(executions, i, n)` returns. If the program takes the same
    gradient twice, each backward pass repeats its own forward pass.
    """
    ran: list[_Sow] = []
    repeated: set[Path] = set()
    for is_backward, some in it.groupby(sows, is_repetition):
        if not is_backward:
            ran += some
            continue
        again, found = list(some), {}
        for i, x in enumerate(again):
            executions = [y.here.path for y in ran if repeats(x, y)]
            executions = [p for p in executions if p not in repeated] or executions
            if executions:
                found[x.here.path] = frozenset(choose(executions, i, len(again)))
        yield from found.items()
        repeated.update(*found.values())


# --- values that are computed twice ---
def _repeated_values(alike: Sequence[_Sow]) -> Iterator[tuple[Path, frozenset[Path]]]:
    """Of sows of one value, the repetitions, each with the execution that it repeats.

    A backward pass goes backward: if `f(x) + f(x) ** 2` runs the sow twice, and its
    gradient repeats both, then the first repetition is of the second execution. With 2
    executions and 4 repetitions, it is the first two that are of the second one.
    """
    return _repetitions(
        alike,
        lambda x: x.backward,
        # Only executions in the branches of cond around the repetition: elsewhere, one
        # may not have run when the repetition does.
        lambda x, y: y.cases <= x.cases,
        lambda executions, i, n: [executions[-1 - i * len(executions) // n]],
    )


_NONE: frozenset[Path] = frozenset()


class _Value(NamedTuple):
    """What goes through the program, in the place of an array.

    `number`: equal for values that are computed alike from the same inputs. `made`:
    the place where the value was made, whatever transposed or reshaped it since. If a
    function is called twice with the same argument, what it computes has one number,
    but is made in two places. `edges`: of an edge, the executions that it comes from.
    """

    number: int
    made: Hashable = None
    edges: frozenset[Path] = _NONE


def _edges(values: Sequence[_Value]) -> frozenset[Path]:
    return _NONE.union(*[x.edges for x in values])


class _Numbers(Domain):
    """Gives numbers to values: those that are computed alike have the same number.

    What is said of a value in a scan holds for each iteration by itself. So a residual
    that one scan stacks, and another one takes apart, has the number that it had in the
    first. The same goes for the branches of one index, and for the devices of a mesh.
    """

    def __init__(self):
        # How a value is computed: by what, and from the values with which numbers. For
        # each, the parameters of such equations, and the number of the result. These
        # need not be hashable.
        self._known: dict[Hashable, list[tuple[Any, int]]] = {}
        # By number, how that value is computed.
        self._computed: dict[int, tuple[Hashable, tuple[int, ...]]] = {}
        self._next = it.count()
        self.sows: list[_Sow] = []

    def new(self, edges: frozenset[Path] = _NONE) -> _Value:
        """A value that is equal to no other one."""
        number = next(self._next)
        return _Value(number, number, edges)

    def _number(
        self, how: Hashable, operands: Sequence[int] = (), params: Any = None
    ) -> int:
        computed = how, tuple(operands)
        candidates = self._known.setdefault(computed, [])
        for x, number in candidates:
            if x is params or _equal(x, params):
                return number
        number = next(self._next)
        candidates.append((params, number))
        self._computed[number] = computed
        return number

    def literal(self, literal):
        number = self._number(("literal", literal.aval), params=literal.val)
        return _Value(number, number)

    def constant(self, x):
        # Each trace of `x * jnp.array([1.0, 2.0])` makes an array of its own.
        number = self._number(("const", _content(x)))
        return _Value(number, number)

    # --- equations ---
    def equation(self, eqn, operands, here):
        primitive = eqn.primitive
        if primitive is sow_p:
            return [self._sow(eqn, operands, here), *operands[1:]]
        if primitive is same_p:
            return [self.new(), *operands[1:]]
        if _is_identity(eqn):
            return [*operands]
        if primitive is jax.lax.select_n_p:
            return [self.chosen(operands[0], operands[1:])]
        if eqn.effects or _is_users(eqn):
            numbers = [next(self._next) for _ in eqn.outvars]
        elif primitive is jax.lax.transpose_p:
            numbers = [self._transposed(operands[0], eqn.params["permutation"])]
        else:
            n = self._number(primitive, [x.number for x in operands], eqn.params)
            numbers = [self._number(("out", i), (n,)) for i in range(len(eqn.outvars))]
        edges = _edges(operands)
        moved = operands[0].made if primitive in _MOVES else None
        return [
            # Edges are of size 0, wherever they are stacked or sliced.
            _Value(n, moved or (here.path, i), edges if _is_edge(v) else _NONE)
            for i, (n, v) in enumerate(zip(numbers, eqn.outvars))
        ]

    def _sow(self, eqn: Any, operands: Sequence[_Value], here: Here) -> _Value:
        site: Site = eqn.params["site"]
        edge, *operands = operands
        if here.final:
            here = here._replace(around=(*here.around, eqn))
            runs = tuple(x.made for x in operands[: len(site.guards)])
            value = self._value_at(site, operands)
            self.sows.append(_Sow(site, here, edge.edges, value, runs))
        return self.new(edge.edges if site.modes else frozenset([here.path]))

    def _value_at(self, site: Site, operands: Sequence[_Value]) -> Hashable:
        """Equal for two sows of equal values."""
        branches = tuple(guard.branch for guard in site.guards)
        # The value has its lanes in front, wherever the operand has them.
        pairs = zip(operands, site.permutations)
        numbers = tuple(self._transposed(x, p) if p else x.number for x, p in pairs)
        return site.tag, site.key, site.form, branches, numbers

    def _transposed(self, value: _Value, permutation: Sequence[int]) -> int:
        # `vmap` moves the axis of its lanes to the front where a scan ends in another
        # one, and back where the backward pass takes apart what that has stacked.
        number = value.number
        how, operands = self._computed.get(number, (None, ()))
        if isinstance(how, tuple) and how[0] == "transposed":
            (number,) = operands
            permutation = [how[1][i] for i in permutation]
        if list(permutation) == list(range(len(permutation))):
            return number
        return self._number(("transposed", tuple(permutation)), [number])

    # --- loops ---
    def loop(self, init, body, here):
        # What a scan carries is the same as in another scan, if both begin with the
        # same, and make the same of it in each iteration. To learn that, the body runs
        # first with names in the place of what is carried.
        def carried(when: Hashable, after: Sequence[_Value]) -> list[_Value]:
            return [
                _Value(self._number((when, i)), (here.path, when, i), _edges(pair))
                for i, pair in enumerate(zip(init, after))
            ]

        depth, n = len(here.scans), len(init)
        after = body(carried(depth, init), here._replace(final=False))[:n]
        eqn = here.around[-1]
        loop = loop_of(eqn), depth, *(x.number for x in (*init, *after))
        if _is_of_unknown_length(eqn):
            loop = (next(self._next),)
        outs = body(carried(("before an iteration", loop), after), here)
        return [*carried(("at the end", loop), outs), *outs[n:]]

    # --- what is put together, and taken apart again ---
    # The cases of a cond, the iterations that a scan stacks, the parts of an array on
    # the devices of a mesh. `how` is the same for both ways.
    def _together(
        self, how: Hashable, parts: Sequence[_Value], params: Any = None
    ) -> _Value:
        number = self._number(how, [x.number for x in parts], params)
        return _Value(number, (how, *[x.made for x in parts]), _edges(parts))

    def _part(self, how: Hashable, whole: _Value, i: int = 0) -> int | None:
        """The number of a part of what was put together so; `None` for other values."""
        its_how, parts = self._computed.get(whole.number, (None, ()))
        return parts[i] if its_how == how else None

    def _slice(self, how: Hashable, whole: _Value) -> _Value:
        number = self._part(how, whole)
        if number is None:
            number = self._number(("slice", how), (whole.number,))
        return whole._replace(number=number, made=(how, whole.made))

    def chosen(self, index, cases):
        if len({x.number for x in cases}) == 1:
            return cases[0]._replace(edges=_edges(cases))
        value = self._together(("cases", index.number), cases)
        return value._replace(made=(index.made, value.made))

    def in_case(self, index, i, value):
        number = self._part(("cases", index.number), value, i)
        return value if number is None else value._replace(number=number)

    def stacked(self, value, here):
        loop = loop_of(here.around[-1])
        return self._together(("stack", len(here.scans)), [value], loop)

    def entry(self, value, here):
        # Loops around a pullback, as in `lax.map(pullback, basis)`, need not have been
        # around the forward pass that stacked the value.
        depth, scan_p = len(here.scans), jexc.primitives.scan_p
        forward = _around_backward_pass(here)
        further_out = depth - sum(e.primitive is scan_p for e in forward)
        how, _ = self._computed.get(value.number, (None, ()))
        if further_out and how in [("stack", d) for d in range(further_out, depth)]:
            return self._slice(how, value)
        return self._slice(("stack", depth), value)

    def unshard(self, value, mesh, spec):
        return self._together(("shards", mesh, spec), [value])

    def shard(self, value, mesh, spec):
        return self._slice(("shards", mesh, spec), value)


_MOVES = (
    jax.lax.broadcast_in_dim_p,
    jax.lax.transpose_p,
    jax.lax.reshape_p,
    jax.lax.squeeze_p,
)
_IDENTITIES = jexc.primitives.name_p, jexc.primitives.stop_gradient_p


def _is_identity(eqn: Any) -> bool:
    if eqn.primitive is jax.lax.reduce_precision_p:
        # A checkpoint whose policy keeps a value keeps that of all bits.
        bits = jnp.finfo(eqn.outvars[0].aval.dtype)
        kept = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
        return kept == (bits.nexp, bits.nmant)
    return eqn.primitive in _IDENTITIES


def _equal(x: Any, y: Any) -> bool:
    try:
        return bool(x == y)
    except ValueError:  # arrays
        return False


def _content(x: Any) -> Hashable:
    """Equal for equal arrays, if they are small. Larger ones are not fetched from a
    device, and are rarely made anew."""
    is_there = isinstance(x, np.ndarray)
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
        is_there = x.is_fully_addressable and not key
    if not is_there or x.nbytes > 2**20:
        return id(x)
    return x.dtype, x.shape, np.asarray(x).tobytes()


def _is_edge(v: Any) -> bool:
    return v.aval.shape[-1:] == (0,)


def _is_users(eqn: Any) -> bool:
    """Whether its program is the user's, which is traced anew each time."""
    return eqn.primitive is _compat.hi_p and _compat.is_users(eqn.params["_prim"])


# --- equations that run again ---
_CUSTOM_VJP = jexc.primitives.custom_vjp_call_p, _compat.hi_p


def _replayed(primals: Sequence[_Sow]) -> Iterator[tuple[Path, frozenset[Path]]]:
    """The repetitions in a loop of a backward pass, or in a derivative rule, each with
    the executions that it may repeat."""

    def repeats(x, y):
        if y.site.key != x.site.key or y.site.origin is not x.site.origin:
            return False
        same = any(_is_in(loop, y) for loop in _backward_loops(x)[:1])
        is_called = same and not _is_recomputed(x)
        is_replayed = not is_called and _has_calls(y, _calls_in_loop(x))
        loops = _loops(y.here.around)
        if is_replayed and loops in _loops_of_replayed(x):
            return True
        # The rule may evaluate the function at another point, too. Of what a solver
        # evaluates in a loop, the last point may be the one, and is not known.
        is_solved = x.value == y.value or len(_loops(x.here.around)) < len(loops)
        return is_solved and _rule(x) in _rules(y)

    return _repetitions(
        primals,
        lambda x: _calls_in_loop(x) is not None or _rule(x) is not None,
        repeats,
        lambda executions, i, n: executions,
    )


def _around_backward_pass(here: Here) -> list[Any]:
    """The equations around a place that are around the backward pass that it is in."""
    return [*it.takewhile(lambda e: not _compat.in_backward_pass(e), here.around)]


def _is_of_unknown_length(eqn: Any) -> bool:
    loop = loop_of(eqn)
    return loop is not None and loop.length is None


def _calls(eqns: Iterable[Any]) -> list[Any]:
    """Where in a user's code these equations were called. Not where a cond was: under a
    vmap its branches become one."""
    cond_p = jexc.primitives.cond_p
    return [e.source_info.traceback for e in eqns if e.primitive is not cond_p]


def _backward_loops(x: _Sow) -> list[Any]:
    """The loops of unknown length around a sow that are in a backward pass, if they run
    anew what ran before: the outermost one is Equinox's, and there is a backward pass
    in it, too; or a checkpoint runs them. Others, such as that of a solver that a `bwd`
    calls, do not."""
    backward, loops = False, []
    for eqn in x.here.around[:-1]:
        backward = backward or _compat.in_backward_pass(eqn)
        if backward and _is_of_unknown_length(eqn):
            loops.append(eqn)
        elif not loops and eqn.primitive in _CUSTOM_VJP:
            # Not differentiated, so nothing in there has run before.
            backward = False
    if _is_recomputed(x):
        return loops
    bodies = [j for loop in loops[:1] if is_of_equinox(loop) for j in jaxprs_of(loop)]
    return loops if any(map(_has_backward_pass, bodies)) else []


@kept_with_jaxpr
def _has_backward_pass(jaxpr: Any) -> bool:
    """Whether there is a backward pass in a jaxpr, at any depth."""
    return any(
        _compat.in_backward_pass(e) or any(map(_has_backward_pass, jaxprs_of(e)))
        for e in _compat.open_jaxpr(jaxpr)[0].eqns
    )


def _loops(around: Iterable[Any]) -> list[int | None]:
    """How many iterations the loops among these equations have."""
    return [loop.length for loop in map(loop_of, around) if loop is not None]


def _loops_of_replayed(x: _Sow) -> list[list[int | None]]:
    """The loops that may be around what a sow repeats, from outside in. A loop that
    runs a body anew stands in the place of the one that ran it first. If a `bwd` calls
    a solver in a loop of its own, there is one more. Those around a pullback, as in
    `lax.map(pullback, basis)`, need not be around the forward pass."""
    loops, n = _loops(x.here.around), len(_loops(_around_backward_pass(x.here)))
    return [loops[:i] + loops[n:] for i in range(n + 1)]


def _is_in(loop: Any, x: _Sow) -> bool:
    """Whether a sow is in a loop that carries the same. Of two calls of one solver that
    takes derivatives, the second one, in a `bwd`, is no repetition: it may have another
    input. The loops that do run a body anew carry cotangents."""
    like = lambda e: (e.primitive, [v.aval for v in e.outvars])
    return like(loop) in map(like, x.here.around)


def _calls_in_loop(x: _Sow) -> list[Any] | None:
    """If a sow is in such a loop: the calls between the innermost one and the sow."""
    loops, (*around, _) = _backward_loops(x), x.here.around
    after = it.dropwhile(lambda e: e is not loops[-1], around)
    return _calls(list(after)[1:]) if loops else None


def _has_calls(y: _Sow, last: list[Any] | None) -> bool:
    """Whether these are the last calls that lead to a sow of the forward pass."""
    *around, _ = y.here.around
    calls = _calls(around)
    if last is None or calls[len(calls) - len(last) :] == last:
        return last is not None
    # If a checkpoint is differentiated, its values are computed outside of it. A scan
    # in it is then called where the checkpoint was.
    return _in_checkpoint(y) and set(last) <= set(calls)


def _is_recomputed(x: _Sow) -> bool:
    """Whether it is in a checkpoint that was differentiated, which runs its loops once
    more as they are."""
    remats = [e for e in x.here.around if e.primitive is jexc.primitives.remat_p]
    return any(e.params["differentiated"] for e in remats)


def _in_checkpoint(x: _Sow) -> bool:
    return any(e.primitive is jexc.primitives.remat_p for e in x.here.around)


def _rules(x: _Sow) -> list[str]:
    """The derivative rules of `jax.custom_jvp` functions that a sow is in."""
    return [rule for eqn in x.here.around for rule in _compat.rules_around(eqn)]


def _rule(x: _Sow) -> str | None:
    """The derivative rule that a sow is in, unless it is in a function with such a rule
    that this one calls."""
    rule = None
    for eqn in x.here.around:
        rule = (rule, *_compat.rules_around(eqn))[-1]
        if eqn.primitive is jexc.primitives.custom_jvp_call_p:
            rule = None
    return rule
