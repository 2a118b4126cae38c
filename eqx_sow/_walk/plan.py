"""What the walk does at each mark, decided before it.

A `Slot` is one value that comes back: what is known of its marks, at most one of which
runs. A `Plan` says of a jaxpr which of its marks is which slot. It is relative to that
jaxpr: slots are numbered within it, in the order in which the walk comes to them, and
for what an equation has inside there is the plan of that, with the numbers which its
slots have here. So many calls of one function have one plan. In

    y = jit[jaxpr={ sow[name=h] ... }] x     # the plan inside: `{0: 0}`, seen as (0,)
    z = jit[jaxpr={ sow[name=h] ... }] y     # the same one, seen as (1,)

Plans are interned, so that what is made of a jaxpr by way of one is found again.
"""

import dataclasses as dc
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jexc

from .sows import Way


# In the place of the number of a slot: the mark repeats another one, or may do so.
NOTHING, UNCLEAR = -1, -2


class Slot(NamedTuple):
    """A value that comes back: see `Execution`. `of` are the ways to the marks that it
    is of, or a derivative of."""

    run: int | None
    may_be: tuple[int, ...] = ()
    of: frozenset[Way] = frozenset()
    in_backward_pass: bool = False


class Inner(NamedTuple):
    """What is inside: its plan, and which slots here those of the plan are."""

    plan: "Plan | None" = None
    slots: tuple[int, ...] = ()

    @property
    def is_same(self) -> bool:
        return self.slots == tuple(range(len(self.slots)))


@dc.dataclass(frozen=True, eq=False)
class Plan:
    """Of a jaxpr: the slot of each mark, by its equation, and what is inside others. Of
    an equation: what is inside each jaxpr, by its number; then there are no marks."""

    marks: Mapping[int, int]
    inside: Mapping[int, Inner]
    # Of a loop of unknown length: which derivatives are not of which values.
    apart: frozenset[tuple[int, int]] = frozenset()


_NONE = Inner()


def inner(plan: Plan | None, i: int | None) -> Inner:
    return _NONE if plan is None or i is None else plan.inside.get(i, _NONE)


class Row(NamedTuple):
    """A mark, to be planned. The last of `eqns` is its own."""

    way: Way
    eqns: Sequence[Any]
    slot: int


# Of plans that are in use, by what they say.
_interned: weakref.WeakValueDictionary[Any, Plan] = weakref.WeakValueDictionary()


def _plan(marks, inside, apart=frozenset()) -> Plan:
    key = tuple(marks.items()), tuple(inside.items()), apart
    plan = _interned.get(key)
    if plan is None:
        plan = _interned[key] = Plan(marks, inside, apart)
    return plan


class _Own(dict):
    """The own number of each slot."""

    def __call__(self, slot: int) -> int:
        return slot if slot < 0 else self.setdefault(slot, len(self))


def planned(rows: Iterable[Row], table: Sequence[tuple[Any, Slot]]) -> Inner:
    """The plan of a program, given all of its marks that have slots, which are numbers
    in the table of the `Site.key` and the `Slot` of each."""
    return _of_jaxpr(sorted(rows, key=lambda row: row.way), 0, table)


def _of_jaxpr(rows: Sequence[Row], depth: int, table) -> Inner:
    own, marks, by_eqn = _Own(), {}, {}
    for row in rows:
        i = row.way[depth]
        if len(row.way) == depth + 1:
            marks[i] = own(row.slot)
        else:
            by_eqn.setdefault(i, []).append(row)
    inside = {}
    for i, group in by_eqn.items():
        plan, slots = _of_equation(group, depth, table)
        inside[i] = Inner(plan, tuple(map(own, slots)))
    return Inner(_plan(marks, inside), tuple(own))


def _of_equation(rows: Sequence[Row], depth: int, table) -> Inner:
    own, by_jaxpr, inside = _Own(), {}, {}
    for row in rows:
        by_jaxpr.setdefault(row.way[depth + 1], []).append(row)
    for k, group in by_jaxpr.items():
        plan, slots = _of_jaxpr(group, depth + 2, table)
        inside[k] = Inner(plan, tuple(map(own, slots)))
    is_while = rows[0].eqns[depth // 2].primitive is jexc.primitives.while_p
    apart = _apart(own, table) if is_while else frozenset()
    return Inner(_plan({}, inside, apart), tuple(own))


def _apart(own: Mapping[int, int], table) -> frozenset[tuple[int, int]]:
    found = set()
    for d, i in own.items():
        (name, mode, _), of_d = table[d]
        for v, j in own.items() if mode != "primal" else ():
            key, of_v = table[v]
            if key[:2] == (name, "primal") and of_d.of and of_d.of.isdisjoint(of_v.of):
                found.add((i, j))
    return frozenset(found)
