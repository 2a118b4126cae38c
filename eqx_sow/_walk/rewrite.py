"""A program with other marks, or without them."""

import itertools as it
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax.extend.core as jexc
import jax.extend.linear_util as lu

from .. import _compat
from .._mark.listening import listening
from .._mark.primitive import edge_aval, edge_p, sow_effect, sow_p
from .plan import Ask, Placed, planned, Wanted
from .sows import (
    has_sow,
    is_filtered,
    jaxprs_in,
    jaxprs_of,
    kept_with_jaxpr,
    map_jaxprs,
    Mark,
)


# --- other names ---
def with_names(closed: Any, marks: Iterable[Mark]) -> Any:
    """A program in which its marks are called as these are. The same jaxpr each time
    for the same names, so that what JAX has compiled for it is found."""
    rows = [Wanted(x, [Ask(0, x.site.labels)]) for x in marks if x.holder is None]
    return _with_names(closed, planned(rows).plan) if rows else closed


@kept_with_jaxpr
def _with_names(jaxpr, plan):
    eqns = list(jaxpr.eqns)
    for i, (ask,) in plan.marks.items():
        site = ask.seen(eqns[i].params["site"])
        eqns[i] = eqns[i].replace(params=dict(site=site))
    for i, placed in plan.inside.items():
        eqns[i] = _eqn_with_names(eqns[i], placed.plan.inside)
    return _compat.with_changes(jaxpr, eqns=eqns)


def _eqn_with_names(eqn: Any, inside: Mapping[int, Placed]) -> Any:
    numbers = it.count()

    def named(jaxpr):
        placed = inside.get(next(numbers))
        return jaxpr if placed is None else _with_names(jaxpr, placed.plan)

    return eqn.replace(params=map_jaxprs(eqn.params, named))


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
