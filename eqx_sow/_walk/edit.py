"""Changing a jaxpr in place: the sites in it, or which equations it has."""

import itertools as it
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.extend.core as jexc

from .. import _compat
from .._mark.primitive import edge_p, same_p, sow_effect, sow_p
from .._mark.site import Site
from .find import has_sow, is_loop, jaxprs_in, sows


def map_jaxprs(params: dict[str, Any], fn: Callable[[Any], Any]) -> dict[str, Any]:
    """The parameters, with `fn` applied to every jaxpr in there, open or closed."""

    def visit(x):
        if _compat.is_jaxpr(x):
            return fn(x)
        if isinstance(x, jax.stages.Traced):
            return _compat.traced_with_jaxpr(x, visit(x.jaxpr))
        if _compat.is_hi_prim(x):
            return _compat.hi_with_params(x, visit)
        if isinstance(x, tuple):
            new = [visit(v) for v in x]
            return type(x)(*new) if hasattr(x, "_fields") else tuple(new)
        return x

    return {name: visit(x) for name, x in params.items()}


def with_sites(eqn: Any, fn: Callable[[Site, int, int], Site], loops: int = 0) -> Any:
    """An equation, with the `Site` of each sow in it replaced; `fn` is also told the
    number of its operands, and how many loops of the equation are around it."""
    if eqn.primitive is sow_p:
        site = fn(eqn.params["site"], len(eqn.invars) - 1, loops)
        return eqn.replace(params=dict(site=site))
    if not has_sow(eqn):
        return eqn
    loops += is_loop(eqn)

    def inside(jaxpr):
        eqns = [with_sites(e, fn, loops) for e in jaxpr.eqns]
        return _compat.with_changes(jaxpr, eqns=eqns)

    return eqn.replace(params=map_jaxprs(eqn.params, inside))


def with_sites_at(x: Any, sites: Mapping[tuple[int, ...], Site]) -> Any:
    """A jaxpr in which the sows at these paths (`Here.path` in `flow.py`) have other
    sites. The same jaxpr each time for the same sites, so that what JAX has compiled
    for it is found."""
    if not sites:
        return x
    made = _with_sites.setdefault(x, {})
    key = frozenset(sites.items())
    if key not in made:
        of_eqn: dict[int, dict[tuple[int, ...], Site]] = {}
        for (i, *rest), site in sites.items():
            of_eqn.setdefault(i, {})[tuple(rest)] = site
        eqns = list(x.eqns)
        for i, inside in of_eqn.items():
            eqns[i] = _with_sites_in(eqns[i], inside)
        made[key] = _compat.with_changes(x, eqns=eqns)
    return made[key]


_with_sites: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = (
    weakref.WeakKeyDictionary()
)


def _with_sites_in(eqn: Any, sites: Mapping[tuple[int, ...], Site]) -> Any:
    if eqn.primitive in (sow_p, same_p):
        return eqn.replace(params=dict(site=sites[()]))
    number = it.count()

    def inside(jaxpr):
        n = next(number)
        return with_sites_at(
            jaxpr, {tuple(path): site for (k, *path), site in sites.items() if k == n}
        )

    return eqn.replace(params=map_jaxprs(eqn.params, inside))


def seen_as(closed: Any, see: Callable[[Site], Site]) -> Any:
    """A closed jaxpr with each `Site` as one sees it: the same jaxpr, if it is so
    already."""
    if all(see(s) is s for s, _ in sows(closed)):
        return closed
    eqns = [with_sites(e, lambda s, *_: see(s)) for e in closed.eqns]
    return _compat.with_changes(closed, eqns=eqns)


def without_prints(jaxpr: Any) -> Any:
    """A jaxpr without the equations that only have an effect, sows aside."""
    if not any(e != sow_effect for e in jaxpr.effects):
        return jaxpr

    def kept(eqn):
        if eqn.primitive is sow_p or not eqn.effects:
            return eqn
        params = map_jaxprs(eqn.params, without_prints)
        subjaxprs = list(jaxprs_in(params))
        if not subjaxprs:
            return eqn if eqn.outvars else None
        effects = frozenset().union(*[j.effects for j in subjaxprs])
        return eqn.replace(params=params, effects=effects)

    eqns = [e for e in map(kept, jaxpr.eqns) if e is not None]
    effects = frozenset().union(*[e.effects for e in eqns])
    return _compat.with_changes(jaxpr, eqns=eqns, effects=effects)


def _edge_alone(sow: Any) -> Any:
    """An equation for the edge that comes out of a sow, which may be a residual."""
    return sow.replace(
        primitive=edge_p,
        invars=[],
        outvars=sow.outvars[:1],
        params={},
        effects=frozenset(),
    )


def without_sows(x: Any) -> Any:
    """An equation, or a jaxpr, with no sows in it."""
    if isinstance(x, jexc.JaxprEqn):
        effects = frozenset(e for e in x.effects if e != sow_effect)
        return x.replace(params=map_jaxprs(x.params, without_sows), effects=effects)
    same = {}
    eqns = []

    def source(v):
        return v if isinstance(v, jexc.Literal) else same.get(v, v)

    for e in x.eqns:
        if e.primitive is sow_p:
            same.update(zip(e.outvars[1:], map(source, e.invars[1:])))
            eqns.append(_edge_alone(e))
            continue
        e = e.replace(invars=list(map(source, e.invars)))
        eqns.append(without_sows(e) if has_sow(e) else e)
    outvars = list(map(source, x.outvars))
    effects = frozenset().union(*[e.effects for e in eqns])
    return _compat.with_changes(x, eqns=eqns, outvars=outvars, effects=effects)
