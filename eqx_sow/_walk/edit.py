"""Changing a jaxpr in place: the sites in it, or which equations it has."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jexc

from .. import _compat
from .._mark.primitive import sow_effect, sow_p
from .._mark.site import Site
from .find import has_sow, is_loop, jaxprs_in, sows


def map_params(params: dict[str, Any], fn: Callable[[Any], Any]) -> dict[str, Any]:
    """The parameters, with `fn` applied to every jaxpr in there."""

    def visit(x):
        if _compat.is_jaxpr(x):
            jaxpr, consts = _compat.open_jaxpr(x)
            new, _ = _compat.open_jaxpr(fn(jaxpr))
            return new if jaxpr is x and not consts else jexc.ClosedJaxpr(new, consts)
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
        site = fn(eqn.params["site"], len(eqn.invars), loops)
        return eqn.replace(params=dict(site=site))
    if not has_sow(eqn):
        return eqn
    loops += is_loop(eqn)

    def inside(jaxpr):
        return jaxpr.replace(eqns=[with_sites(e, fn, loops) for e in jaxpr.eqns])

    return eqn.replace(params=map_params(eqn.params, inside))


def seen_as(closed: Any, see: Callable[[Site], Site]) -> Any:
    """A closed jaxpr with each `Site` as one sees it: the same jaxpr, if it is so
    already."""
    jaxpr, consts = _compat.open_jaxpr(closed)
    if all(see(s) is s for s, _ in sows(jaxpr)):
        return closed
    eqns = [with_sites(e, lambda s, *_: see(s)) for e in jaxpr.eqns]
    return jexc.ClosedJaxpr(jaxpr.replace(eqns=eqns), consts)


def without_prints(jaxpr: Any) -> Any:
    """A jaxpr without the equations that only have an effect, sows aside."""
    opened, consts = _compat.open_jaxpr(jaxpr)
    if not any(e != sow_effect for e in opened.effects):
        return jaxpr

    def kept(eqn):
        if eqn.primitive is sow_p or not eqn.effects:
            return eqn
        params = map_params(eqn.params, without_prints)
        subjaxprs = list(jaxprs_in(params))
        if not subjaxprs:
            return eqn if eqn.outvars else None
        effects = frozenset().union(*[j.effects for j in subjaxprs])
        return eqn.replace(params=params, effects=effects)

    eqns = [e for e in map(kept, opened.eqns) if e is not None]
    effects = frozenset().union(*[e.effects for e in eqns])
    return jexc.ClosedJaxpr(opened.replace(eqns=eqns, effects=effects), consts)


def without_sows(x: Any) -> Any:
    """An equation, or a jaxpr without constants, with no sows in it."""
    if isinstance(x, jexc.JaxprEqn):
        effects = frozenset(e for e in x.effects if e != sow_effect)
        return x.replace(params=map_params(x.params, without_sows), effects=effects)
    same = {}
    eqns = []

    def source(v):
        return v if isinstance(v, jexc.Literal) else same.get(v, v)

    for e in x.eqns:
        if e.primitive is sow_p:
            same.update(zip(e.outvars, map(source, e.invars)))
            continue
        e = e.replace(invars=list(map(source, e.invars)))
        eqns.append(without_sows(e) if has_sow(e) else e)
    outvars = list(map(source, x.outvars))
    effects = frozenset().union(*[e.effects for e in eqns])
    return x.replace(eqns=eqns, outvars=outvars, effects=effects)
