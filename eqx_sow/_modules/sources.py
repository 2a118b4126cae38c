"""What goes through a program to name its captured calls: of each variable the inputs
that it comes from, and the calls that it is an edge of. See `naming.py`."""

import dataclasses as dc
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .._mark.calls import Call, Path


# What moves numbers and leaves them as they are, more or less.
MOVES = frozenset(
    (
        "all_gather all_to_all broadcast_in_dim concatenate convert_element_type copy "
        "copy_p device_put dynamic_slice dynamic_update_slice expand_dims gather "
        "name optimization_barrier pad pbroadcast pcast ppermute pvary "
        "reduce_precision reshape reshard rev select_n sharding_constraint slice "
        "split squeeze stop_gradient transpose"
    ).split()
)
# What makes new arrays of several, rather than changing one: it counts as `FAR`.
CONTRACTS = jax.lax.dot_general_p, jax.lax.conv_general_dilated_p
FAR = 1 << 16
# So many of the nearest sources are kept.
_NEAREST = 8


class Source(NamedTuple):
    """An input of the program, by its number, or an array that it holds, by its id.
    `entry_of`: the scans that took it apart."""

    of: int
    constant: int | None = None
    entry_of: tuple[tuple[int, ...], ...] = ()


class Place(NamedTuple):
    """Where a module is. The `name` is the `path`, if there is one; else it is made of
    the name of the class. `is_held`: it has a place, or arrays of its own. `after`: see
    `Label`."""

    name: str
    path: Path | None = None
    is_held: bool = True
    after: tuple[int | None, ...] = ()


class Candidate(NamedTuple):
    """A place that a module may have, by one of its arrays. The nearest ones are those
    of the smallest `distance`; of these, the first in this order."""

    distance: int
    tail: int
    source: int
    n: int
    path: Path
    entry_of: tuple[tuple[int, ...], ...] = ()


@dc.dataclass(eq=False)
class Visit:
    """A call, each time that the pass comes by. Its place is settled at the end, when
    all are known. `found` has the candidates by each of the witnesses; `within` is the
    visit of the module that is running around it."""

    call: Call
    found: list[list[Candidate]]
    within: "Visit | None"
    identity: Hashable
    scans: tuple[tuple[int, ...], ...]
    place: Place | None = None


class Edge(NamedTuple):
    """What an edge tells: the call of a module, and, if it comes out of a sow, which
    one: its `Site.origin`."""

    visit: Visit
    origin: Any = None


class Distances:
    """How many computations there are between a value and each of its sources. Most
    values are those of no module, so it is found out when somebody asks."""

    def __init__(
        self,
        known: Mapping[Source, int] | None = None,
        of: Sequence["Distances"] = (),
        step: int = 0,
    ):
        self._known = known
        self._of = of
        self._step = step

    def known(self) -> Mapping[Source, int]:
        # Not by recursion: a program may be long.
        waiting = [self]
        while waiting:
            x = waiting[-1]
            missing = [y for y in x._of if y._known is None]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            if x._known is None:
                x._known = _nearest([y._known or {} for y in x._of], x._step)
                x._of = ()
        return self._known or {}


_NOWHERE = Distances({})


class Value(NamedTuple):
    """What goes through a program: of an array, how far it is from its sources; which
    equation made it, moves aside; and the edges it stands for, if it is one. `cases`:
    it comes out of a cond, and what it is in each branch, with the maker of the
    index."""

    distances: Distances = _NOWHERE
    made: Hashable = None
    edges: tuple[Edge, ...] = ()
    cases: tuple[Hashable, tuple["Value", ...]] | None = None

    @property
    def sources(self) -> Mapping[Source, int]:
        return self.distances.known()


NOTHING = Value()


def at_source(source: Source, made: Hashable) -> Value:
    return Value(Distances({source: 0}), made)


def _nearest(maps: Sequence[Mapping[Source, int]], step: int) -> dict[Source, int]:
    out: dict[Source, int] = {}
    for m in maps:
        for source, n in m.items():
            if n + step < out.get(source, 1 << 30):
                out[source] = n + step
    if len(out) > _NEAREST:
        first = sorted(out.items(), key=lambda x: (x[1], x[0].of))
        return dict(first[:_NEAREST])
    return out


def either(values: Sequence[Value], step: int = 0, made: Any = None) -> Value:
    found = [v.distances for v in values if v.distances is not _NOWHERE]
    alone = len(found) == 1 and not step
    distances = found[0] if alone else Distances(of=found, step=step)
    edges = [e for v in values for e in v.edges]
    edges = tuple(dict.fromkeys(edges)) if edges else ()
    return Value(distances if found else _NOWHERE, made, edges)
