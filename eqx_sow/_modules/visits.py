"""Which modules a program calls, and which of its marks belong to each call.

    @jax.jit
    def run(linear, x):          # traced once, so there is one `NotedCall` in there
        return linear(x)

    run(a, x) + run(b, x)        # two visits of it: the arrays come from `a`, or `b`

The pass in `Visits` tells of each variable the inputs that it comes from, and how much
was computed between. It goes into a function that was traced once for each of its
calls. A derivative takes the edge of its primal, and so belongs to the same visit.
"""

import dataclasses as dc
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx

from .._mark.calls import calls_around, NotedCall
from .._mark.primitive import edge_p, same_p, sow_p
from .._mark.site import Site
from .._walk.flow import Domain, Here
from .._walk.sows import Way
from .origins import (
    in_order,
    number_of,
    Origin,
    OTHER_ENTRIES,
    outputs_of,
    undecided,
)
from .places import Places


@dc.dataclass(eq=False)
class Visit:
    """A call of a module, each time that the pass over the program comes to it: a
    jitted function that is called three times has one `NotedCall` inside, with three
    visits, which may be of three modules."""

    call: NotedCall
    # The operands of its edge.
    arrays: Sequence[Origin]
    # For each of them, which axes are those of vmaps.
    lanes: Sequence[tuple[int, ...]]
    # The modules whose methods are running, from outside in.
    running: "list[Visit]"


class VisitedMark(NamedTuple):
    """A mark, and the visits that it is in, or is the output of. There may be several:
    if a branch decides of which call a derivative is. `scans`: the ways to the scans
    around it; for a derivative, around its primal, since a scan of the backward pass
    need not go over the arrays themselves."""

    site: Site
    visits: list[Visit]
    scans: list[Way]


class ScanSources(NamedTuple):
    """A scan, given by the sources that it takes apart: those that are nearest to the
    arrays that it goes over. And the calls that are running around it."""

    sources: set[int]
    around: Sequence[NotedCall]


class Visits(Domain):
    """Finds the visits, the marks and the scans of a program, by the ways to their
    equations."""

    n_needed = 1

    def __init__(self, places: Places):
        self._places = places
        self.visits: dict[Way, Visit] = {}
        self.marks: dict[Way, VisitedMark] = {}
        self.scans: dict[Way, ScanSources] = {}
        # Of each call, the visit that the pass is in, or was in last.
        self._latest: dict[NotedCall, Visit] = {}

    def inputs(self) -> list[Origin]:
        return [self._at_source(i) for i in range(self._places.n_inputs)]

    def _at_source(self, source: int) -> Origin:
        axes = tuple(zip(range(self._places.arrays[source].ndim)))
        return Origin({source: 0}, ("source", source), is_whole=True, axes=axes)

    def constant(self, x, aval):
        is_array = getattr(x, "shape", None) or eqx.is_array(x)
        value = self._at_source(self._places.source(x)) if is_array else Origin()
        return value._replace(number=number_of(x, aval))

    def chosen(self, index, cases):
        return undecided(in_order(cases))._replace(cases=(index.made, cases))

    def in_case(self, index, i, value):
        if value.cases is not None and value.cases[0] == index.made is not None:
            return value.cases[1][i]
        return value

    def entry(self, value, here):
        nearest = min(value.distances.values(), default=0)
        sources = {s for s, n in value.distances.items() if n == nearest}
        around = _calls(here.around)
        scan = self.scans.setdefault(here.scans[-1], ScanSources(set(), around))
        if value.each is None:
            scan.sources.update(sources)
            return value.along(-1).changing()
        # It is again what it was in the scan that stacked it. Of the weights that each
        # iteration keeps for the backward pass, those are the layers of a stack that
        # came apart in the forward pass. The others are copies of the whole.
        way, inside = value.each
        there = self.scans.get(way)
        scan.sources.update(sources & there.sources if there else ())
        return inside

    def stacked(self, value, here):
        value = value.changing()
        return value.along(1)._replace(each=(here.scans[-1], value))

    def carried(self, when, init, after, here):
        return [undecided(pair).changing() for pair in zip(init, after)]

    def shard(self, value, mesh, spec):
        value = value._replace(parts=None)
        is_split = spec is not None and len(spec) > 0 and spec[0] is not None
        return value.cut([OTHER_ENTRIES]) if is_split else value

    def equation(self, eqn, operands, here):
        primitive = eqn.primitive
        if primitive in (sow_p, same_p):
            self.marks[here.way] = self._mark(eqn, operands[0], here)
            return [Origin(edges=(here.way,)), *operands[1:]]
        if primitive is edge_p and eqn.params:
            call = eqn.params["call"]
            lanes = eqn.params.get("lanes", [()] * len(operands))
            visit = Visit(call, operands, lanes, self._running(eqn, here))
            self.visits[here.way] = self._latest[call] = visit
            return [Origin(edges=(here.way,))]
        return outputs_of(eqn, operands, here.way)

    def _mark(self, eqn: Any, edge: Origin, here: Here) -> VisitedMark:
        site: Site = eqn.params["site"]
        if site.modes:
            # Of a derivative, the edge comes out of the mark of its primal.
            there = {w: self.marks[w].site for w in edge.edges if w in self.marks}
            # Equinox's loops may trace their body twice: then it is the same line.
            of_line = [w for w, x in there.items() if x.where == site.where]
            of_call = [w for w, x in there.items() if x.origin is site.origin]
            of = of_call or of_line
            primals = [self.marks[way] for way in of]
            visits = [v for mark in primals for v in mark.visits]
            scans = primals[0].scans if primals else here.scans
            return VisitedMark(site, visits, scans)
        running = self._running(eqn, here)
        if site.note is None:
            return VisitedMark(site, running[-1:], here.scans)
        visits = [self.visits[way] for way in edge.edges[:1]]
        # The edge of a module without arrays may have been moved out of a loop, to
        # where fewer calls are running, and to before the edges of these.
        for visit in visits:
            visit.running = max(running, visit.running, key=len)
        return VisitedMark(site, visits, here.scans)

    def _running(self, eqn: Any, here: Here) -> list[Visit]:
        """The visits in which an equation runs, from outside in."""
        calls = _calls((*here.around, eqn))
        return [self._latest[c] for c in calls if c in self._latest]


def _calls(eqns: Sequence[Any]) -> list[NotedCall]:
    """The calls of modules that are running around the last of some equations."""
    return [call for eqn in eqns for call in calls_around(eqn)]
