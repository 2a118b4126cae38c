"""What the walk does at each mark, decided before it.

An `Ask` is what a transformation does at a mark, and a slot is one value that it takes
from the program, or puts into it: several marks have one slot if at most one of them
runs. A `Plan` has the asks of a jaxpr. It is relative to that jaxpr: slots are numbered
within it, in the order in which the walk comes to them. For what an equation has inside
there is the plan of that, with the numbers which its slots have here. So many calls of
one function have one plan. In

    y = jit[jaxpr={ sow[name=h] ... }] x     # inside, the mark has slot 0; here, 0 is 0
    z = jit[jaxpr={ sow[name=h] ... }] y     # the same plan; here, its 0 is 1

Plans are interned, so that what is made of a jaxpr by way of one is found again. They
hold no way, site or jaxpr.
"""

import dataclasses as dc
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .._mark.site import Label, Site
from .sows import grouped, is_of_unknown_length, Mark, sows, Way


# In the place of a slot: nothing is taken at the mark, or put there. It may be that it
# repeats another one.
NOTHING = -1


class Ask(NamedTuple):
    """What is done at a mark. `labels` are what the mark has for the transformation,
    with `h/3` as the first one for iteration 3 of `h` alone, and `at` is that
    iteration: for each scan around the mark, from outside in, its number, or `None` for
    all. For `Tap`, there is an entry for each `while_loop`, too. `action` is hashable,
    and up to the handler."""

    slot: int
    labels: tuple[Label, ...]
    at: tuple[int | None, ...] = ()
    action: Any = None

    @property
    def label(self) -> Label:
        """What the mark is called."""
        return self.labels[0]

    def seen(self, site: Site) -> Site:
        """The site that the program has at the mark, called so."""
        return site.called(self.labels)


class Placed(NamedTuple):
    """A plan, in its place: `slots` are what the slots of the plan are around it."""

    plan: "Plan"
    slots: tuple[int, ...] = ()

    def outside(self, ask: Ask) -> Ask:
        """One that is inside, as it is seen from around."""
        return ask if ask.slot < 0 else ask._replace(slot=self.slots[ask.slot])


@dc.dataclass(frozen=True, eq=False)
class Plan:
    """Of a jaxpr: what is asked at each mark, by the index of its equation, and what is
    inside other equations. Of an equation: what is inside each jaxpr, by its number.
    """

    marks: Mapping[int, tuple[Ask, ...]]
    inside: Mapping[int, Placed]
    # Of a `while_loop`, the slots of derivatives with those of values that they are
    # known not to be of.
    apart: frozenset[tuple[int, int]] = frozenset()
    # Of a `while_loop`, the slots of derivatives for which it goes through the
    # iterations of the value from the last one.
    backward: frozenset[int] = frozenset()

    def at(self, way: Way) -> tuple[Ask, ...]:
        """What is asked at the mark to which a way leads."""
        i, *rest = way
        if not rest:
            return self.marks.get(i, ())
        placed = self.inside.get(i, EMPTY)
        return tuple(map(placed.outside, placed.plan.at(tuple(rest))))


def asked(placed: Placed, x: Any) -> list[tuple[Mark, Ask]]:
    """What is asked at the marks in a jaxpr, or within an equation, of which this is
    the plan, each with the mark as it is called; not those where nothing is done."""
    if not (placed.plan.marks or placed.plan.inside):
        return []
    pairs = ((mark, ask) for mark in sows(x) for ask in placed.plan.at(mark.way))
    return [
        (mark._replace(site=ask.seen(mark.site)), placed.outside(ask))
        for mark, ask in pairs
        if ask.slot != NOTHING
    ]


# Plans that are in use, by what they say.
_interned: weakref.WeakValueDictionary[Any, Plan] = weakref.WeakValueDictionary()


def _plan(
    marks: Mapping[int, tuple[Ask, ...]],
    inside: Mapping[int, Placed],
    apart: frozenset[tuple[int, int]] = frozenset(),
    backward: frozenset[int] = frozenset(),
) -> Plan:
    key = tuple(marks.items()), tuple(inside.items()), apart, backward
    plan = _interned.get(key)
    if plan is None:
        plan = _interned[key] = Plan(marks, inside, apart, backward)
    return plan


EMPTY = Placed(_plan({}, {}))


class _Numbers(dict):
    """The numbers that slots have inside."""

    def __call__(self, slot: int) -> int:
        return slot if slot < 0 else self.setdefault(slot, len(self))


class Wanted(NamedTuple):
    """A mark, with all that is asked there. Slots are numbered for the whole program.
    `backward` is that of its `Run`."""

    mark: Mark
    asks: list[Ask]
    backward: tuple[bool | None, ...] = ()


# Of two slots of the whole program: whether the one is of a derivative, and known not
# to be of the value that the other one is of.
AreApart = Callable[[int, int], bool]


def planned(
    rows: Iterable[Wanted], are_apart: AreApart = lambda derivative, value: False
) -> Placed:
    """The plan of a program."""
    return _placed(sorted(rows, key=lambda row: row.mark.way), 0, are_apart)


def _placed(rows: Sequence[Wanted], depth: int, are_apart: AreApart) -> Placed:
    """The plan of what the first `depth` numbers of these ways lead to: a jaxpr if they
    are even in number, else an equation."""
    own, marks, further, inside = _Numbers(), {}, [], {}
    for row in rows:
        if len(row.mark.way) > depth + 1:
            further.append(row)
        else:
            asks = [Ask(own(x.slot), *x[1:]) for x in row.asks]
            marks[row.mark.way[depth]] = tuple(asks)
    for i, group in grouped(further, lambda row: row.mark.way[depth]).items():
        plan, slots = _placed(group, depth + 1, are_apart)
        inside[i] = Placed(plan, tuple(map(own, slots)))
    around = rows[0].mark.eqns[: depth // 2 + 1] if depth % 2 else ()
    if not (around and is_of_unknown_length(around[-1])):
        return Placed(_plan(marks, inside), tuple(own))
    pairs = frozenset((own[d], own[v]) for d in own for v in own if are_apart(d, v))
    k = sum(map(is_of_unknown_length, around)) - 1
    backward = frozenset(
        own[x.slot]
        for row in rows
        if row.backward[k : k + 1] == (True,)
        for x in row.asks
        if x.slot in own
    )
    return Placed(_plan(marks, inside, pairs, backward), tuple(own))
