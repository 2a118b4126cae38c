"""A program with other marks, or without them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax.extend.core as jexc
import jax.extend.linear_util as lu

from .. import _compat
from .._mark.listening import listening
from .._mark.primitive import edge_aval, edge_p, same_p, sow_effect, sow_p
from .._mark.site import Site
from .sows import (
    has_sow,
    is_filtered,
    jaxprs_in,
    jaxprs_of,
    kept_with_jaxpr,
    map_jaxprs,
    Mark,
    Way,
)


# --- other sites ---
def with_sites(x: Any, sites: Mapping[Way, Site]) -> Any:
    """A jaxpr in which the marks that these ways lead to have other sites. The same
    jaxpr each time for the same sites, so that what JAX has compiled for it is found.
    """
    return _with_sites(x, frozenset(sites.items())) if sites else x


@kept_with_jaxpr
def _with_sites(jaxpr, sites):
    by_eqn: dict[int, dict[Way, Site]] = {}
    for (i, *rest), site in sites:
        by_eqn.setdefault(i, {})[tuple(rest)] = site
    eqns = list(jaxpr.eqns)
    for i, inside in by_eqn.items():
        eqns[i] = _eqn_with_sites(eqns[i], inside)
    return _compat.with_changes(jaxpr, eqns=eqns)


def _eqn_with_sites(eqn: Any, sites: Mapping[Way, Site]) -> Any:
    if eqn.primitive in (sow_p, same_p):
        return eqn.replace(params=dict(site=sites[()]))
    by_jaxpr: list[dict[Way, Site]] = [{} for _ in jaxprs_in(eqn.params)]
    for (k, *rest), site in sites.items():
        by_jaxpr[k][tuple(rest)] = site
    inside = iter(by_jaxpr)
    return eqn.replace(
        params=map_jaxprs(eqn.params, lambda jaxpr: with_sites(jaxpr, next(inside)))
    )


def seen_as(x: Any, found: Iterable[Mark], see: Callable[[Site], Site]) -> Any:
    """A jaxpr with each `Site` that is `found` in it as one sees it."""
    changed = {}
    for mark in found:
        new = see(mark.site)
        if new is not mark.site and mark.holder is None:
            changed[mark.way] = new
    return with_sites(x, changed)


# --- equations that are gone ---
class Equations(NamedTuple):
    """A kind of equations."""

    # Whether an equation is of this kind.
    fits: Callable[[Any], bool]
    # Whether some may be inside a jaxpr or an equation.
    may_be_in: Callable[[Any], bool]


MARKS = Equations(lambda eqn: eqn.primitive is sow_p, has_sow)
# What only has an effect.
PRINTS = Equations(
    lambda eqn: bool(eqn.effects) and not (eqn.outvars or jaxprs_of(eqn)),
    lambda x: any(e != sow_effect for e in x.effects),
)


def without(x: Any, gone: Equations, in_rules: bool = False) -> Any:
    """A jaxpr or an equation, without the equations of this kind that are inside it. In
    the place of what a mark returns, the program has what is marked.

    Without marks, there are none in a derivative rule either that is traced outside a
    capture, or with `in_rules` in any: JAX would keep them though nothing asks for
    them."""
    is_eqn = isinstance(x, jexc.JaxprEqn)
    has_rules = in_rules and (not is_eqn or jaxprs_of(x))
    if not (has_rules or gone.may_be_in(x)):
        return x
    return (_eqn_without if is_eqn else _jaxpr_without)(x, gone, in_rules)


def _eqn_without(eqn: Any, gone: Equations, in_rules: bool) -> Any:
    _, old = _compat.unmapped(eqn)
    # Equinox compares these jaxprs with others that it hides from JAX. It evaluates
    # them, so that the marks in there do nothing.
    params = dict(eqn.params)
    if not is_filtered(old):
        params = map_jaxprs(params, lambda jaxpr: without(jaxpr, gone, in_rules))
    left = _effects(jaxprs_in(params))
    effects = eqn.effects - (_effects(jaxprs_in(eqn.params)) - left)
    if gone is MARKS:
        effects -= {sow_effect}
        for name in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk"):
            if name in params:
                params[name] = _without_marks(params[name], in_rules)
    return eqn.replace(params=params, effects=effects)


@lu.transformation2
def _without_marks(rule, always, *zeros):
    jaxpr, *rest = rule(*zeros)
    if always or listening.value is None:
        jaxpr = without(jaxpr, MARKS)
    return jaxpr, *rest


@kept_with_jaxpr
def _jaxpr_without(jaxpr: Any, gone: Equations, in_rules: bool) -> Any:
    # The variables that marks return, each with the atom that it is equal to.
    equal_to: dict[Any, Any] = {}

    def source(v):
        return v if isinstance(v, jexc.Literal) else equal_to.get(v, v)

    eqns = []
    for e in jaxpr.eqns:
        if not gone.fits(e):
            e = without(e, gone, in_rules)
            eqns.append(e.replace(invars=list(map(source, e.invars))))
            continue
        # The edge that comes out of a mark may be kept for a backward pass. In the
        # place of what prints there is one, too: a plan knows equations by index.
        outvars = [jexc.Var(_NO_EDGE)]
        if e.primitive is sow_p:
            equal_to.update(zip(e.outvars[1:], map(source, e.invars[1:])))
            outvars = e.outvars[:1]
        edge = dict(primitive=edge_p, invars=[], outvars=outvars, params={})
        eqns.append(e.replace(effects=frozenset(), **edge))
    outvars = list(map(source, jaxpr.outvars))
    effects = _effects(eqns)
    return _compat.with_changes(jaxpr, eqns=eqns, outvars=outvars, effects=effects)


_NO_EDGE = edge_aval()


def _effects(xs: Iterable[Any]) -> frozenset[Any]:
    return frozenset().union(*[x.effects for x in xs])
