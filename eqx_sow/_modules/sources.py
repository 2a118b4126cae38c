"""What goes through a program in the place of numbers, to find where the arrays of a
module come from: see `naming.py`.

    flat = concatenate a b       # `a` and `b` are inputs
    c = mul flat 0.5
    d = slice[0:3] c

Here `flat` is at a distance of 0 from both inputs, since it only moves their entries.
`c` is at a distance of 1. `d` has entries of `a` only, so it is at a distance of 1 from
that, and does not come from `b`.
"""

import itertools as it
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax


# The way to an equation, as `Here.path` has it.
Way = tuple[int, ...]
# What moves numbers and leaves them as they are, more or less. (Some edges come out of
# one branch or another, and go through the primitive for edges once more.)
_MOVES = frozenset(
    (
        "all_gather all_to_all broadcast_in_dim concatenate convert_element_type copy "
        "copy_p device_put dynamic_slice dynamic_update_slice edge expand_dims gather "
        "name optimization_barrier pad pbroadcast pcast ppermute pvary "
        "reduce_precision reshape reshard rev select_n sharding_constraint slice "
        "split squeeze stop_gradient"
    ).split()
)
# What makes new arrays of several, rather than changing one: it counts as `FAR`.
_CONTRACTS = jax.lax.dot_general_p, jax.lax.conv_general_dilated_p
FAR = 1 << 16
# A transposition is half a computation: nothing else has such a distance.
TRANSPOSED = 1
# Of the sources of a value, so many are kept: the nearest.
_NEAREST = 8


class Value(NamedTuple):
    """What goes through the program in the place of an array.

    `distances`: how many computations there are between the array and each of its
    sources (see `Places`), in the order of the operands of these. `made`: which
    equation computed it, moves aside. `edges`: if it is an edge, the ways to the
    equations that it comes out of. `cases`: if it comes out of a cond, what it is in
    each branch, with what made the index. `parts`: if it is a concatenation, what it
    consists of.
    """

    distances: Mapping[int, int] = {}
    made: Hashable = None
    edges: tuple[Way, ...] = ()
    cases: "tuple[Hashable, Sequence[Value]] | None" = None
    parts: "Parts | None" = None


class Parts(NamedTuple):
    """What an array was concatenated of, along an axis, and the length of each part: so
    that what is sliced out of it comes from its own part only.

    `ravel_pytree` concatenates the arrays of a model, and takes them apart again. What
    was computed in between entry by entry, such as `2 * flat`, has the same parts.
    """

    axis: int
    lengths: tuple[int, ...]
    values: tuple[Value, ...]

    def between(self, start: int, stop: int) -> "Value":
        """What the entries from `start` to `stop` come from."""
        inside, begin = [], 0
        for length, value in zip(self.lengths, self.values):
            if start < begin + length and begin < stop:
                cut = max(start, begin), min(stop, begin + length)
                inside.append((cut[1] - cut[0], value))
            begin += length
        if len(inside) == 1:
            return inside[0][1]
        lengths, values = zip(*inside) if inside else ((), ())
        value = one_of(values, 0, values[0].made if values else None)
        return value._replace(parts=Parts(self.axis, lengths, values))


def _parts_of(eqn: Any, operands: Sequence[Value], step: int) -> Parts | None:
    """Those of what comes out of an equation, if it has any."""
    if eqn.primitive is jax.lax.concatenate_p:
        axis = eqn.params["dimension"]
        lengths = tuple(v.aval.shape[axis] for v in eqn.invars)
        return Parts(axis, lengths, tuple(operands))
    known = next((x.parts for x in operands if x.parts is not None), None)
    shapes = {v.aval.shape for v in (*eqn.invars, *eqn.outvars)} - {()}
    if known is None or len(shapes) > 1 or len(eqn.outvars) > 1:
        return None
    # Entry by entry. An operand that has other parts is taken as a whole.
    alike = [
        x.parts.values
        if x.parts is not None and x.parts[:2] == known[:2]
        else [x] * len(known.values)
        for x in operands
    ]
    values = tuple(one_of(column, step, column[0].made) for column in zip(*alike))
    return known._replace(values=values)


def _sliced(eqn: Any, whole: Value) -> list[Value] | None:
    """What comes out of an equation that takes slices of a concatenation."""
    if whole.parts is None:
        return None
    parts, p = whole.parts, eqn.params
    if eqn.primitive is jax.lax.slice_p:
        start, stop = (p[k][parts.axis] for k in ("start_indices", "limit_indices"))
        return [parts.between(start, stop)]
    if eqn.primitive is jax.lax.split_p and p["axis"] == parts.axis:
        ends = list(it.accumulate(p["sizes"]))
        return [parts.between(end - n, end) for n, end in zip(p["sizes"], ends)]
    return None


def one_of(values: Sequence[Value], step: int = 0, made: Hashable = None) -> Value:
    """The value of an equation with these operands, which adds `step` to the distances.
    With a step of 0, also what is one of several values, and it is not known which."""
    known = {id(v.distances): v.distances for v in values if v.distances}
    if len(known) == 1 and not step:
        (distances,) = known.values()
    else:
        distances = {}
        for one in known.values():
            for source, n in one.items():
                distances[source] = min(n + step, distances.get(source, 1 << 30))
        if len(distances) > _NEAREST:
            nearest = sorted(distances.items(), key=lambda item: item[1])
            distances = dict(nearest[:_NEAREST])
    edges = dict.fromkeys(e for v in values for e in v.edges)
    return Value(distances, made, tuple(edges))


def in_order(cases: Sequence[Value]) -> Sequence[Value]:
    """Of two cases, as of `jnp.where(p, a, b)`, JAX has the second one first."""
    return cases[::-1] if len(cases) == 2 else cases


def computed(eqn: Any, operands: Sequence[Value], way: Way) -> list[Value]:
    """What comes out of an equation that is neither a sow nor an edge."""
    primitive, name = eqn.primitive, eqn.primitive.name
    if operands and (slices := _sliced(eqn, operands[0])) is not None:
        return slices
    if name == "select_n":
        operands = in_order(operands[1:])
    step = 0 if name in _MOVES else FAR if primitive in _CONTRACTS else 2
    step = TRANSPOSED if name == "transpose" else step
    made = operands[0].made if operands and not step else way
    value = one_of(operands, step, made)
    parts = _parts_of(eqn, operands, step)
    value = value if parts is None else value._replace(parts=parts)
    return [value] * len(eqn.outvars)
