"""Which execution a derivative belongs to, where its edge alone tells.

`executions.py` looks at each equation of a program, in each call of a jitted function.
Of

    for _ in range(100):
        x = block(x)               # a jitted function with a mark

under `jax.grad`, this looks once at the jaxpr of `block`, and once at that of its
backward pass. What it finds out, it says by the inputs of the jaxpr: the edge comes out
of equation 3 in here, or in at input 2. Each call then only puts its own in their
place. The sites stay as they are, so that the jaxpr is also walked once for all calls.

It gives up, and returns `None`, where a value may be computed again, or may not run: if
a primal is in a backward pass or in a derivative rule, if there are branches, or loops
of unknown length.

Edges are also followed in `_modules/visits.py`, before marks have names, and in
`numbering.py`, each beside what it is there for. Which primals the edge of a derivative
leads to, all three ask `primals_of`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jexc

from .. import _compat
from .._mark.primitive import sow_p
from .._mark.site import Site
from .sows import Found, jaxprs_in, jaxprs_of, kept_with_jaxpr, Way, with_sow


# Where an edge comes from: the number of an input, or the way to a mark.
_Sources = frozenset[int | Way]
_NONE: _Sources = frozenset()


class _Edges(NamedTuple):
    """What is known of a jaxpr: of the edge of each derivative in there, and of each
    output, where it comes from."""

    sows: tuple[tuple[Way, _Sources], ...]
    outs: tuple[_Sources, ...]

    def placed(self, operands: Sequence[_Sources], way: Way) -> "_Edges":
        """The same, if the inputs come from there, and the way leads to the jaxpr."""

        def place(sources: _Sources) -> _Sources:
            each = (
                operands[x] if isinstance(x, int) else frozenset([(*way, *x)])
                for x in sources
            )
            return _NONE.union(*each)

        sows = tuple(((*way, *inner), place(x)) for inner, x in self.sows)
        return _Edges(sows, tuple(map(place, self.outs)))


def primals_of(site: Site, edge: Iterable[Way], sites: Mapping[Way, Site]) -> list[Way]:
    """The marks that a derivative may be of: those at the other end of its edge that
    are of the same call of `sow`, of the ones that are given by the ways to them."""
    return [way for way in edge if way in sites and sites[way].origin is site.origin]


_CALLS = {jexc.primitives.jit_p, jexc.primitives.remat_p}


def by_edges(closed: Any, found: Sequence[Found]) -> dict[Way, frozenset[Way]] | None:
    """`Execution.of` for these marks of a program, by the ways to them, if all are
    executions or derivatives of one."""
    for x in found:
        around = x.eqns[:-1]
        rules_or_backward = not x.site.modes and any(
            _compat.in_backward_pass(e) or _compat.rules_around(e) for e in x.eqns
        )
        known = all(
            e.primitive in _CALLS or e.primitive is jexc.primitives.scan_p
            for e in around
        )
        if x.way is None or x.site.guards or rules_or_backward or not known:
            return None
    edges = _edges(closed)
    if edges is None:
        return None
    sources = dict(edges.sows)
    primals: dict[Any, Site] = {x.way: x.site for x in found if not x.site.modes}
    calls = {site.origin for site in primals.values()}
    of: dict[Way, frozenset[Way]] = {}
    for x in found:
        way: Any = x.way
        of[way] = frozenset([way])
        if x.site.modes:
            edge: Any = sources.get(way, _NONE)
            of[way] = frozenset(primals_of(x.site, edge, primals))
            # Something on the way is not a call: it is looked at more closely.
            if not of[way] and x.site.origin in calls:
                return None
    return of


@kept_with_jaxpr
def _edges(jaxpr: Any) -> _Edges | None:
    jaxpr, _ = _compat.open_jaxpr(jaxpr)
    inside = with_sow(jaxpr)
    known: dict[Any, _Sources] = {
        v: frozenset([i]) for i, v in enumerate(jaxpr.invars) if _may_be_edge(v)
    }
    sows: list[tuple[Way, _Sources]] = []

    def read(v):
        return _NONE if isinstance(v, jexc.Literal) else known.get(v, _NONE)

    for i, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive is sow_p:
            # A derivative hands on the edge of its primal.
            here: _Sources = frozenset([(i,)])
            if eqn.params["site"].modes:
                here = read(eqn.invars[0])
                sows.append(((i,), here))
            known[eqn.outvars[0]] = here
            continue
        operands = list(map(read, eqn.invars))
        if i not in inside and not any(operands):
            continue
        through = _through(eqn, operands, (i,))
        if through is None:
            return None
        sows += through.sows
        pairs = zip(eqn.outvars, through.outs)
        known.update((v, x) for v, x in pairs if x and _may_be_edge(v))
    return _Edges(tuple(sows), tuple(map(read, jaxpr.outvars)))


def _may_be_edge(v: Any) -> bool:
    return 0 in getattr(v.aval, "shape", ())


def _through(eqn: Any, operands: list[_Sources], way: Way) -> _Edges | None:
    """What is known of an equation, from the sources of its operands."""
    if not jaxprs_of(eqn):
        every = _NONE.union(*operands)
        return _Edges((), (every,) * len(eqn.outvars))
    is_scan = eqn.primitive is jexc.primitives.scan_p
    if not (is_scan or eqn.primitive in _CALLS):
        return None
    (jaxpr,) = jaxprs_in(eqn.params)
    edges = _edges(jaxpr)
    if edges is None:
        return None
    if is_scan:
        n, m = _compat.scan_arity(eqn.params)
        before = None
        # An iteration begins with what any before it has left.
        while before != operands:
            before = list(operands)
            outs = edges.placed(operands, (*way, 0)).outs
            operands[n : n + m] = map(_NONE.union, operands[n : n + m], outs)
        outs = [*operands[n : n + m], *outs[m:]]
        return edges.placed(operands, (*way, 0))._replace(outs=tuple(outs))
    return edges.placed(operands, (*way, 0))
