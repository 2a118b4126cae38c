"""Sows in a jaxpr: finding them, and changing what is static about them in place."""

from collections.abc import Callable
from typing import Any

import jax.extend.core as jexc

from . import _compat
from ._primitive import Site, sow_effect, sow_p


def has_sow(x: Any) -> bool:
    """Whether an equation or a jaxpr has a sow inside."""
    return bool(x.effects) and sow_effect in x.effects


# Types of parameters in which there is no need to look for a jaxpr.
_PLAIN = frozenset({type(None), bool, int, float, str})


def holds_sow(eqn: Any) -> bool:
    """The same of an equation, by looking: some primitives hide effects."""
    if eqn.effects and sow_effect in eqn.effects:
        return True
    for x in eqn.params.values():
        if type(x) not in _PLAIN:
            return any(map(has_sow, jexc.jaxprs_in_params(eqn.params)))
    return False


def sites(x: Any) -> list[Site]:
    """All sites in an equation or a jaxpr."""
    if isinstance(x, jexc.JaxprEqn):
        if x.primitive is sow_p:
            return [x.params["site"]]
        return [s for j in jexc.jaxprs_in_params(x.params) for s in sites(j)]
    return [
        s for eqn in _compat.open_jaxpr(x)[0].eqns if has_sow(eqn) for s in sites(eqn)
    ]


def map_params(params: dict[str, Any], fn: Callable[[Any], Any]) -> dict[str, Any]:
    """The parameters, with `fn` applied to every jaxpr in there."""

    def visit(x):
        if _compat.is_jaxpr(x):
            jaxpr, consts = _compat.open_jaxpr(x)
            new, _ = _compat.open_jaxpr(fn(jaxpr))
            return new if jaxpr is x and not consts else jexc.ClosedJaxpr(new, consts)
        if isinstance(x, tuple):
            new = [visit(v) for v in x]
            return type(x)(*new) if hasattr(x, "_fields") else tuple(new)
        return x

    return {name: visit(x) for name, x in params.items()}


def with_sites(eqn: Any, fn: Callable[[Site, int], Site]) -> Any:
    """An equation, with the `Site` of each sow in it replaced; `fn` is also told the
    number of its operands."""
    if eqn.primitive is sow_p:
        site = fn(eqn.params["site"], len(eqn.invars))
        return eqn.replace(params=dict(site=site))
    if not has_sow(eqn):
        return eqn

    def inside(jaxpr):
        return jaxpr.replace(eqns=[with_sites(e, fn) for e in jaxpr.eqns])

    return eqn.replace(params=map_params(eqn.params, inside))


def without_prints(jaxpr: Any) -> Any:
    """A jaxpr without the equations that only have an effect, sows aside."""
    opened, consts = _compat.open_jaxpr(jaxpr)
    if not any(e != sow_effect for e in opened.effects):
        return jaxpr

    def kept(eqn):
        if eqn.primitive is sow_p or not eqn.effects:
            return eqn
        params = map_params(eqn.params, without_prints)
        subjaxprs = list(jexc.jaxprs_in_params(params))
        if not subjaxprs:
            return eqn if eqn.outvars else None
        effects = frozenset().union(*[j.effects for j in subjaxprs])
        return eqn.replace(params=params, effects=effects)

    eqns = [e for e in map(kept, opened.eqns) if e is not None]
    effects = frozenset().union(*[e.effects for e in eqns])
    return jexc.ClosedJaxpr(opened.replace(eqns=eqns, effects=effects), consts)


def without_sows(eqn: Any) -> Any:
    """An equation, with no sows in it."""

    def inside(jaxpr):
        same = {}
        eqns = []

        def source(v):
            return v if isinstance(v, jexc.Literal) else same.get(v, v)

        for e in jaxpr.eqns:
            if e.primitive is sow_p:
                same.update(zip(e.outvars, map(source, e.invars)))
                continue
            e = e.replace(invars=list(map(source, e.invars)))
            eqns.append(without_sows(e) if holds_sow(e) else e)
        outvars = list(map(source, jaxpr.outvars))
        effects = frozenset().union(*[e.effects for e in eqns])
        return jaxpr.replace(eqns=eqns, outvars=outvars, effects=effects)

    effects = frozenset(e for e in eqn.effects if e != sow_effect)
    return eqn.replace(params=map_params(eqn.params, inside), effects=effects)
