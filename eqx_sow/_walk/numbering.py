"""Numbers for the values of a program: equal for two that are computed alike, from the
same inputs.

    ys = scan[body={ x. y = sin x; in y }] xs                  # a forward pass
    ... = scan[body={ x y_. y = sin x; ... in ... }] xs ys     # its backward pass

Both scans take `xs` apart, so `x` has the same number in both, and so has `y`, and `y_`
as well, which is an entry of what the first scan stacked. If the `y` are marked, the
second mark is known to repeat the first one (`repetitions.py`).

On the way, the pass follows the edges of marks, and notes where each value was made,
for `table.py`.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np

from .. import _hijax
from .._mark.primitive import same_p, sow_p
from .._mark.site import Site
from .flow import Domain, Here
from .sows import (
    around_backward_pass,
    is_of_unknown_length,
    lengths_of,
    loop_of,
    Mark,
    Way,
)


class How(NamedTuple):
    """By what something is computed, or where it is made.

    `by` is a primitive, or a word such as `"stack"`, and `which` tells apart what is
    `by` the same: the outputs of an equation, scans at several depths. Or they are the
    way to an equation, and the output of that.
    """

    by: Hashable
    which: Hashable = None
    # The numbers of other values on which this depends, as on the index of a cond.
    given: tuple[int, ...] = ()
    # Tells apart what is computed alike, as two loops of unknown length are.
    own: Hashable = None


class Made(NamedTuple):
    """How a value is made, and of which ones. `of` are their numbers; or, if this says
    where the value is made, how each of them is made."""

    how: How
    of: tuple[Any, ...] = ()

    def part(self, how: How, i: int) -> Any:
        """A part of what was put together so; `None` of anything else."""
        return self.of[i] if self.how == how else None


class Numbered(NamedTuple):
    """What goes through the program, in the place of an array.

    `number`: equal for values that are computed alike from the same inputs. `made`:
    the place where the value was made, whatever transposed or reshaped it since. If a
    function is called twice with the same argument, what it computes has one number,
    but is made in two places.
    """

    number: int
    made: Made


class Numbering(Domain):
    """Gives numbers to values: those that are computed alike have the same number.

    What is said of a value in a scan holds for each iteration by itself. So a residual
    that one scan stacks, and another one takes apart, has the number that it had in the
    first. The same goes for the branches of one index, and for the devices of a mesh.
    """

    def __init__(self, sites: Mapping[Way, Site]):
        # What marks are called, by the ways to them.
        self._sites = sites
        # For what is computed so: the parameters of such equations, which need not be
        # hashable, each with the number of the result.
        self._known: dict[Made, list[tuple[Any, int]]] = {}
        # By number, how that value is computed, and with which parameters.
        self._computed: list[Made] = []
        self._params: list[Any] = []
        # By number, of an edge, the executions that it comes from.
        self._edges: dict[int, frozenset[Way]] = {}
        # The marks, by the ways to their equations.
        self.marks: dict[Way, Mark] = {}

    def unlike_any(self) -> Numbered:
        """A value that is equal to no other one."""
        return self._input(How(object()))

    def _input(self, how: How) -> Numbered:
        return Numbered(self._number(how), Made(how))

    def _number(self, how: How, of: Sequence[int] = (), params: Any = None) -> int:
        computed = Made(how, tuple(of))
        candidates = self._known.setdefault(computed, [])
        for x, number in candidates:
            if _equal(x, params):
                return number
        number = len(self._computed)
        candidates.append((params, number))
        self._computed.append(computed)
        self._params.append(params)
        edges = [self._edges[n] for n in of if n in self._edges]
        if edges:
            self._edges[number] = frozenset().union(*edges)
        return number

    def constant(self, x, aval):
        # Each trace of `x * jnp.array([1.0, 2.0])` makes an array of its own.
        return self._input(How("constant", (aval, _content(x))))

    # --- equations ---
    def equation(self, eqn, operands, here):
        primitive = eqn.primitive
        if primitive is sow_p:
            return [self._sow(eqn, operands, here), *operands[1:]]
        if primitive is same_p:
            return [self.unlike_any(), *operands[1:]]
        if _is_identity(eqn):
            return [*operands]
        if primitive is jax.lax.select_n_p:
            return [self.chosen(operands[0], operands[1:])]
        if primitive in _MOVES:
            return [operands[0]._replace(number=self._moved(eqn, operands))]
        # What has an effect may be something else each time.
        by = object() if eqn.effects or _is_users(eqn) else primitive
        of, p = [x.number for x in operands], eqn.params
        numbers = [self._number(How(by, i), of, p) for i in range(len(eqn.outvars))]
        return [Numbered(n, Made(How(here.way, i))) for i, n in enumerate(numbers)]

    def _moved(self, eqn: Any, operands: Sequence[Numbered]) -> int:
        if eqn.primitive is jax.lax.transpose_p:
            return self._transposed(operands[0], eqn.params["permutation"])
        # A scalar that leaves a mesh for its backward pass, such as the index of a
        # cond, gets an axis for the devices, and loses it again in there.
        if eqn.primitive is jax.lax.squeeze_p and not eqn.outvars[0].aval.shape:
            scalar = self._computed[operands[0].number].part(_OF_A_SCALAR, 0)
            if scalar is not None:
                return scalar
        is_scalar = not eqn.invars[0].aval.shape
        how = _OF_A_SCALAR if is_scalar else How(eqn.primitive)
        return self._number(how, [x.number for x in operands], eqn.params)

    def _sow(self, eqn: Any, operands: Sequence[Numbered], here: Here) -> Numbered:
        site = self._sites.get(here.way, eqn.params["site"])
        edge, *operands = operands
        self.marks[here.way] = Mark(
            site,
            (*here.around, eqn),
            here.way,
            edges=self._edges.get(edge.number, frozenset()),
            value=self._value_at(site, operands),
            cases=frozenset((index.number, i) for index, i in here.cases),
            made=tuple(x.made for x in operands[: len(site.guards)]),
        )
        if site.modes:
            return edge
        edge = self.unlike_any()
        self._edges[edge.number] = frozenset([here.way])
        return edge

    def _value_at(self, site: Site, operands: Sequence[Numbered]) -> Hashable:
        """Equal for two marks of equal values."""
        branches = tuple(guard.branch for guard in site.guards)
        # The value has its lanes in front, wherever the operand has them.
        pairs = zip(operands, site.permutations)
        numbers = tuple(self._transposed(x, p) if p else x.number for x, p in pairs)
        return site.tag, site.key, site.form, branches, numbers

    def _transposed(self, value: Numbered, permutation: Sequence[int]) -> int:
        # `vmap` moves the axis of its lanes to the front where a scan ends in another
        # one, and back where the backward pass takes apart what that has stacked.
        number = value.number
        how, of = self._computed[number]
        if how.by is jax.lax.transpose_p:
            before: Any = how.which
            (number,), permutation = of, [before[i] for i in permutation]
        if list(permutation) == list(range(len(permutation))):
            return number
        return self._number(How(jax.lax.transpose_p, tuple(permutation)), [number])

    # --- loops ---
    def carried(self, when, init, after, here):
        # What a scan carries is the same as in another scan, if both begin with the
        # same, and make the same of it in each iteration. To learn that, the body runs
        # first with names in the place of what is carried.
        eqn, depth = here.around[-1], len(here.scans)
        pairs = [(x.number, y.number) for x, y in zip(init, after)]
        loop, own = (loop_of(eqn), depth), None
        # Each depends on all that the scan carries.
        given = tuple(number for pair in pairs for number in pair)
        if when == "at first":
            loop, given, own = None, (), depth
        elif is_of_unknown_length(eqn):
            loop, given, own = None, (), (here.way, object())
        hows = [How(when, (loop, i), given, own) for i in range(len(pairs))]
        return [
            Numbered(self._number(how, pair), Made(How(here.way, (when, i))))
            for i, (how, pair) in enumerate(zip(hows, pairs))
        ]

    def at_solution(self, x: Mark, y: Mark) -> bool:
        """Whether `x` is computed as `y` is in a `while_loop`, but from what the loop
        carries at the end. Of the three marks that come of

            z = lax.while_loop(..., lambda z: z - g(z) / 2, x)
            g(z), g(z + 1)

        with a mark of `sin(z)` in `g`, this is so for the second one, not for the third
        one. At which point a solver evaluates `g` in the loop does not matter."""
        of_x: Any = x.value
        of_y: Any = y.value
        (*mine, pairs), (*others, numbers) = of_x, of_y
        if mine != others:
            return False
        todo, seen, here = list(zip(pairs, numbers)), set(), y.way
        while todo:
            pair = todo.pop()
            if pair[0] == pair[1] or pair in seen:
                continue
            seen.add(pair)
            match self._computed[pair[0]].how:
                # What a loop of unknown length around `y` carries at the end.
                case How(by="at the end", own=(way, _)) if here[: len(way)] == way:
                    continue
            operands = self._computed_alike(*pair)
            if operands is None:
                return False
            todo += operands
        return True

    def _computed_alike(self, a: int, b: int) -> list[tuple[int, int]] | None:
        """The operands of two values that are computed alike, in pairs. Two loops of
        unknown length may be, though what they carry is not equal."""
        (how, of), (other, of_other) = self._computed[a], self._computed[b]
        mine, others = (*how.given, *of), (*other.given, *of_other)
        alike = how[:2] == other[:2] and len(mine) == len(others)
        alike = alike and _equal(self._params[a], self._params[b])
        return [*zip(mine, others)] if alike else None

    # --- what is put together, and taken apart again ---
    # The cases of a cond, the iterations that a scan stacks, the parts of an array on
    # the devices of a mesh. `how` is the same for both ways. A part is again the value
    # that it was, made where that was made. `also` tells two apart with the same parts.
    def _together(
        self,
        how: How,
        parts: Sequence[Numbered],
        params: Any = None,
        also: Hashable = None,
    ) -> Numbered:
        number = self._number(how, [x.number for x in parts], params)
        return Numbered(number, Made(how, (*[x.made for x in parts], also)))

    def _part(self, how: How, whole: Numbered, i: int = 0) -> Numbered | None:
        """A part of what was put together so; `None` for other values."""
        number = self._computed[whole.number].part(how, i)
        if number is None:
            return None
        made = whole.made.part(how, i) or whole.made
        return whole._replace(number=number, made=made)

    def _slice(self, how: How, whole: Numbered) -> Numbered:
        if (part := self._part(how, whole)) is not None:
            return part
        number = self._number(How("slice", how), (whole.number,))
        return whole._replace(number=number, made=Made(how, (whole.made,)))

    def chosen(self, index, cases):
        if len({x.number for x in cases}) == 1:
            return cases[0]
        how = How("cases", given=(index.number,))
        return self._together(how, cases, also=index.made)

    def in_case(self, index, i, value):
        return self._part(How("cases", given=(index.number,)), value, i) or value

    def stacked(self, value, here):
        loop = loop_of(here.around[-1])
        return self._together(How("stack", len(here.scans)), [value], loop)

    def entry(self, value, here):
        # A forward pass with one scan stacks at depth 1. In `lax.map(pullback, basis)`
        # its backward pass is within one scan more, and takes the value apart at depth
        # 2. So what was stacked at a depth less is taken apart, too, as far as scans
        # are around the backward pass alone.
        depth = len(here.scans)
        least = depth - len(lengths_of(around_backward_pass(here.around)))
        how = self._computed[value.number].how
        if how not in [How("stack", d) for d in range(least or depth, depth)]:
            how = How("stack", depth)
        return self._slice(how, value)

    def unshard(self, value, mesh, spec):
        return self._together(How("shards", (mesh, spec)), [value])

    def shard(self, value, mesh, spec):
        how = How("shards", (mesh, spec))
        # What is not sharded, such as a constant, is on each device as it was.
        if spec == jax.sharding.PartitionSpec():
            return self._part(how, value) or value
        return self._slice(how, value)


_OF_A_SCALAR = How("of a scalar")
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
        return x is y or bool(x == y)
    except ValueError:  # arrays
        return False


def _content(x: Any) -> Hashable:
    """Equal for equal arrays of one type, if they are small. Larger ones are not
    fetched from a device, and are rarely made anew."""
    is_there = isinstance(x, np.ndarray | np.generic | int | float | complex)
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
        is_there = x.is_fully_addressable and not key
    if not is_there or getattr(x, "nbytes", 0) > 2**20:
        return id(x)
    return np.asarray(jax.device_get(x) if isinstance(x, jax.Array) else x).tobytes()


def _is_users(eqn: Any) -> bool:
    """Whether its program is the user's, which is traced anew each time."""
    return eqn.primitive is _hijax.hi_p and _hijax.is_users(eqn.params["_prim"])
