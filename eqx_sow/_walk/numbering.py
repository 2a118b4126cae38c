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

import itertools as it
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
from .repetitions import around_backward_pass, Sown
from .sows import is_of_unknown_length, lengths_of, loop_of, Way


class Numbered(NamedTuple):
    """What goes through the program, in the place of an array.

    `number`: equal for values that are computed alike from the same inputs. `made`:
    the place where the value was made, whatever transposed or reshaped it since. If a
    function is called twice with the same argument, what it computes has one number,
    but is made in two places. `filled`: whether it is computed from numbers in the
    source alone, such as an array of zeros.
    """

    number: int
    made: Hashable
    filled: bool = False


class _While:
    """A loop of unknown length, each time that the pass comes by one. It is equal to no
    other one. `way`: the way to its body."""

    def __init__(self, way: Way):
        self.way = way


class Numbering(Domain):
    """Gives numbers to values: those that are computed alike have the same number.

    What is said of a value in a scan holds for each iteration by itself. So a residual
    that one scan stacks, and another one takes apart, has the number that it had in the
    first. The same goes for the branches of one index, and for the devices of a mesh.
    """

    def __init__(self, sites: Mapping[Way, Site]):
        # What marks are called, by the ways to them.
        self._sites = sites
        # How a value is computed: by what, and from the values with which numbers. For
        # each, the parameters of such equations, and the number of the result. These
        # need not be hashable.
        self._known: dict[Hashable, list[tuple[Any, int]]] = {}
        # By number, how that value is computed, and with which parameters.
        self._computed: dict[int, tuple[Hashable, tuple[int, ...]]] = {}
        self._params: dict[int, Any] = {}
        # By number, of an edge, the executions that it comes from.
        self._edges: dict[int, frozenset[Way]] = {}
        self._next = it.count()
        # The marks, by the ways to their equations.
        self.sows: dict[Way, Sown] = {}

    def unlike_any(self) -> Numbered:
        """A value that is equal to no other one."""
        number = self._number(object())
        return Numbered(number, number)

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
        self._params[number] = params
        edges = [self._edges[n] for n in operands if n in self._edges]
        if edges:
            self._edges[number] = frozenset().union(*edges)
        return number

    def constant(self, x, aval):
        # Each trace of `x * jnp.array([1.0, 2.0])` makes an array of its own.
        number = self._number(("const", aval, _content(x)))
        return Numbered(number, number, filled=not aval.shape)

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
        how = object() if eqn.effects or _is_users(eqn) else primitive
        n = self._number(how, [x.number for x in operands], eqn.params)
        numbers = [self._number(("out", i), (n,)) for i in range(len(eqn.outvars))]
        filled = bool(operands) and all(x.filled for x in operands) and not eqn.effects
        filled |= primitive.name in _EMPTY
        return [Numbered(n, (here.way, i), filled) for i, n in enumerate(numbers)]

    def _moved(self, eqn: Any, operands: Sequence[Numbered]) -> int:
        if eqn.primitive is jax.lax.transpose_p:
            return self._transposed(operands[0], eqn.params["permutation"])
        # A scalar that leaves a mesh for its backward pass, such as the index of a
        # cond, gets an axis for the devices, and loses it again in there.
        if eqn.primitive is jax.lax.squeeze_p and not eqn.outvars[0].aval.shape:
            how, of = self._computed.get(operands[0].number, (None, ()))
            if how == "of a scalar":
                return of[0]
        is_scalar = not eqn.invars[0].aval.shape
        how = "of a scalar" if is_scalar else eqn.primitive
        return self._number(how, [x.number for x in operands], eqn.params)

    def _sow(self, eqn: Any, operands: Sequence[Numbered], here: Here) -> Numbered:
        site = self._sites.get(here.way, eqn.params["site"])
        edge, *operands = operands
        at = here._replace(around=(*here.around, eqn))
        edges = self._edges.get(edge.number, frozenset())
        runs = tuple(x.made for x in operands[: len(site.guards)])
        value = self._value_at(site, operands)
        self.sows[here.way] = Sown(site, at, edges, value, runs)
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
        how, operands = self._computed.get(number, (None, ()))
        if isinstance(how, tuple) and how[0] == "transposed":
            (number,) = operands
            permutation = [how[1][i] for i in permutation]
        if list(permutation) == list(range(len(permutation))):
            return number
        return self._number(("transposed", tuple(permutation)), [number])

    # --- loops ---
    def carried(self, when, init, after, here):
        # What a scan carries is the same as in another scan, if both begin with the
        # same, and make the same of it in each iteration. To learn that, the body runs
        # first with names in the place of what is carried.
        eqn, depth = here.around[-1], len(here.scans)
        pairs = [(x.number, y.number) for x, y in zip(init, after)]
        loop: Hashable = loop_of(eqn), depth, *pairs
        if when == "at first":
            loop = depth
        elif is_of_unknown_length(eqn):
            loop = _While(here.way)
        numbers = (self._number((when, loop, i), pair) for i, pair in enumerate(pairs))
        return [Numbered(n, (here.way, when, i)) for i, n in enumerate(numbers)]

    def at_solution(self, x: Sown, y: Sown) -> bool:
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
        todo, seen = list(zip(pairs, numbers)), set()
        while todo:
            pair = todo.pop()
            if pair[0] == pair[1] or pair in seen:
                continue
            seen.add(pair)
            if self._ends_loop_around(y, pair[0]):
                continue
            operands = self._computed_alike(*pair)
            if operands is None:
                return False
            todo += operands
        return True

    def _ends_loop_around(self, y: Sown, number: int) -> bool:
        """Whether it is what a loop of unknown length around a mark carries at the
        end."""
        match self._computed[number][0]:
            case ("at the end", _While(way=way), _):
                return y.here.way[: len(way)] == way
        return False

    def _computed_alike(self, a: int, b: int) -> list[tuple[int, int]] | None:
        """The operands of two values that are computed alike, in pairs."""
        (how, of), (other, of_other) = self._computed[a], self._computed[b]
        pairs = list(zip(of, of_other))
        match how, other:
            case (("cases", i), ("cases", j)):
                pairs.append((i, j))
            case ((when, loop, i), (then, its, j)) if (when, i) == (then, j):
                # Of scans, what they carry, too.
                if isinstance(loop, tuple) and isinstance(its, tuple):
                    if loop[:2] != its[:2] or len(loop) != len(its):
                        return None
                    every: Any = zip(loop[2:], its[2:])
                    for x, y in every:
                        pairs += zip(x, y)
                elif type(loop) is not type(its):
                    return None
            case _ if how != other:
                return None
        params = self._params[a], self._params[b]
        alike = len(of) == len(of_other) and (params[0] is params[1] or _equal(*params))
        return pairs if alike else None

    # --- what is put together, and taken apart again ---
    # The cases of a cond, the iterations that a scan stacks, the parts of an array on
    # the devices of a mesh. `how` is the same for both ways. A part is again the value
    # that it was, made where that was made. `also` tells two apart with the same parts.
    #
    # What one branch keeps for its backward pass, the others have as well: each fills
    # in zeros of its own. Where they are made says nothing beside the value kept.
    def _together(
        self,
        how: Hashable,
        parts: Sequence[Numbered],
        params: Any = None,
        also: Hashable = None,
    ) -> Numbered:
        number = self._number(how, [x.number for x in parts], params)
        filled = all(x.filled for x in parts)
        made = [x.made if filled or not x.filled else None for x in parts]
        return Numbered(number, (how, *made, also), filled)

    def _part(self, how: Hashable, whole: Numbered, i: int = 0) -> Numbered | None:
        """A part of what was put together so; `None` for other values."""
        its_how, parts = self._computed.get(whole.number, (None, ()))
        if its_how != how:
            return None
        made = whole.made
        if isinstance(made, tuple) and made[0] == how:
            made = made[1 + i]
        return whole._replace(number=parts[i], made=made)

    def _slice(self, how: Hashable, whole: Numbered) -> Numbered:
        if (part := self._part(how, whole)) is not None:
            return part
        number = self._number(("slice", how), (whole.number,))
        return whole._replace(number=number, made=(how, whole.made))

    def chosen(self, index, cases):
        if len({x.number for x in cases}) == 1:
            return cases[0]
        return self._together(("cases", index.number), cases, also=index.made)

    def in_case(self, index, i, value):
        return self._part(("cases", index.number), value, i) or value

    def stacked(self, value, here):
        loop = loop_of(here.around[-1])
        return self._together(("stack", len(here.scans)), [value], loop)

    def entry(self, value, here):
        # A forward pass with one scan stacks at depth 1. In `lax.map(pullback, basis)`
        # its backward pass is within one scan more, and takes the value apart at depth
        # 2. So what was stacked at a depth less is taken apart, too, as far as scans
        # are around the backward pass alone.
        depth = len(here.scans)
        least = depth - len(lengths_of(around_backward_pass(here)))
        how, _ = self._computed.get(value.number, (None, ()))
        if least and how in [("stack", d) for d in range(least, depth)]:
            return self._slice(how, value)
        return self._slice(("stack", depth), value)

    def unshard(self, value, mesh, spec):
        return self._together(("shards", mesh, spec), [value])

    def shard(self, value, mesh, spec):
        how = "shards", mesh, spec
        # What is not sharded, such as a constant, is on each device as it was.
        if spec == jax.sharding.PartitionSpec():
            return self._part(how, value) or value
        return self._slice(how, value)


_MOVES = (
    jax.lax.broadcast_in_dim_p,
    jax.lax.transpose_p,
    jax.lax.reshape_p,
    jax.lax.squeeze_p,
)
# What JAX fills in where any array will do.
_EMPTY = "empty", "empty2"
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
    """Equal for equal arrays of one type, if they are small. Larger ones are not
    fetched from a device, and are rarely made anew."""
    is_there = isinstance(x, np.ndarray | np.generic | int | float | complex)
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
        is_there = x.is_fully_addressable and not key
    if not is_there or getattr(x, "nbytes", 0) > 2**20:
        return id(x)
    return np.asarray(jax.device_get(x)).tobytes()


def _is_users(eqn: Any) -> bool:
    """Whether its program is the user's, which is traced anew each time."""
    return eqn.primitive is _hijax.hi_p and _hijax.is_users(eqn.params["_prim"])
