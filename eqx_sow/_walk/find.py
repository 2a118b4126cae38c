"""Sows in a jaxpr: finding them, and changing what is static about them in place."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jexc

from .. import _compat
from .._errors import UnsupportedPrimitiveError
from .._mark.listening import Listening, listening
from .._mark.primitive import edge_p, same_p, sow_effect, sow_p
from .._mark.site import Site


def shows_sow(x: Any) -> bool:
    """Whether the effects of an equation or a jaxpr tell of a sow inside."""
    return bool(x.effects) and sow_effect in x.effects


def has_sow(x: Any) -> bool:
    """Whether an equation or a jaxpr has a sow inside, at any depth: some primitives
    hide the effects of what is in there."""
    if shows_sow(x):
        return True
    if not isinstance(x, jexc.JaxprEqn):
        return bool(with_sow(x))
    return x.primitive not in _plain and (
        any(map(has_sow, jaxprs_of(x))) or bool(_in_functions(x))
    )


_with_sow: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def with_sow(x: Any) -> list[Any]:
    """The equations of a jaxpr that have a sow inside, or are one. It is asked several
    times of a program."""
    jaxpr, _ = _compat.open_jaxpr(x)
    if jaxpr not in _with_sow:
        _with_sow[jaxpr] = list(filter(has_sow, jaxpr.eqns))
    return _with_sow[jaxpr]


class Loop(NamedTuple):
    """How many iterations a loop has, and whether the last one runs first. `None` for
    both if that is not known before it runs."""

    length: int | None = None
    reverse: bool | None = None


# What counts as a loop, for all that has to know.
_loops: dict[jexc.Primitive, Callable[[dict[str, Any]], Loop]] = {
    jexc.primitives.scan_p: lambda params: Loop(params["length"], params["reverse"]),
    jexc.primitives.while_p: lambda params: Loop(),
}


def loop_of(eqn: Any) -> Loop | None:
    """What an equation is as a loop, if it is one."""
    return _loops[eqn.primitive](eqn.params) if eqn.primitive in _loops else None


def is_loop(eqn: Any) -> bool:
    return eqn.primitive in _loops


def jaxprs_in(x: Any) -> Iterator[Any]:
    """The jaxprs in the parameters of an equation, open or closed. Equinox has some in
    tuples of tuples."""
    if _compat.is_jaxpr(x):
        yield x
    elif isinstance(x, jax.stages.Traced):
        yield from jaxprs_in(x.jaxpr)
    elif _compat.is_hi_prim(x):
        yield from jaxprs_in(x.params)
    elif isinstance(x, tuple | list | dict):
        for v in x.values() if isinstance(x, dict) else x:
            yield from jaxprs_in(v)


def jaxprs_of(eqn: Any) -> list[Any]:
    """The same of an equation, at a glance for most of JAX's primitives."""
    if eqn.primitive in _plain:
        return []
    found = list(jaxprs_in(eqn.params))
    if not found and eqn.primitive in _of_jax:
        _plain.add(eqn.primitive)
    return found


# Those of JAX's primitives that have no jaxpr among their parameters, and ours. (Of a
# few, such as `scatter`, some equations have one, which combines two numbers.)
_plain: set[jexc.Primitive] = {edge_p, same_p, sow_p}


def expanded(eqn: Any) -> Any:
    """What a `HiPrim` computes, as a jaxpr."""
    program = _compat.hi_program(eqn.params["_prim"])
    with listening(listening.value or Listening()):
        return jax.make_jaxpr(program)(*[v.aval for v in eqn.invars])


def _in_functions(eqn: Any) -> list[Site]:
    """The sites of Python functions that an equation holds: they are traced once
    more."""
    primitive, params = _compat.unmapped(eqn)
    if primitive is _compat.noinline_p:
        with listening(Listening()):
            return sites(_compat.noinlined(eqn))
    if primitive is _compat.hi_p and _compat.is_users(params["_prim"]):
        with listening(Listening()):
            return sites(expanded(eqn))
    found: list[Site] = []
    if {"static", "treedef"} <= params.keys():
        with listening(Listening(found=found.append)):
            avals = [v.aval for v in eqn.invars]
            eqn.primitive.abstract_eval(*avals, **eqn.params)
    return found


_of_jax = {p for p in vars(jexc.primitives).values() if isinstance(p, jexc.Primitive)}


def is_lanewise(jaxpr: Any) -> bool:
    """Whether it is sure that under a vmap each lane is computed from that lane alone,
    if the jaxpr has no effects. Other libraries have primitives that look at all."""
    return all(
        e.primitive in _of_jax and all(map(is_lanewise, jaxprs_in(e.params)))
        for e in jaxpr.eqns
    )


def sites(x: Any) -> list[Site]:
    """All sites in an equation or a jaxpr."""
    if isinstance(x, jexc.JaxprEqn):
        if x.primitive is sow_p:
            return [x.params["site"]]
        inside = [s for j in jaxprs_in(x.params) for s in sites(j)] + _in_functions(x)
        if shows_sow(x) and not inside:
            raise UnsupportedPrimitiveError(
                f"There is a sow inside the primitive `{x.primitive}`, where eqx_sow "
                "cannot look, so its value cannot be captured or planted. Move the sow "
                "out of it."
            )
        return inside
    return [s for eqn in with_sow(x) for s in sites(eqn)]


def sows(x: Any, around: tuple[Any, ...] = ()) -> Iterator[tuple[Site, Any]]:
    """The sites in a jaxpr, at any depth, each with the equations that lead there, from
    outside in: the sow is the last one, or the equation that holds a Python function
    with the sow in it."""
    for eqn in with_sow(x):
        path = (*around, eqn)
        inside = list(jaxprs_in(eqn.params))
        for jaxpr in inside:
            yield from sows(jaxpr, path)
        if not inside:
            yield from ((site, path) for site in sites(eqn))


def loops_around(
    site: Site, loops: Sequence[int | None]
) -> list[tuple[int, int | None]]:
    """The loops around a sow that give it an axis, from outside in: how many iterations
    each has, and which of the axes of the site it is, if JAX moved the sow out of that
    loop. `loops` are those that it is in still, `None` for a `while_loop`."""
    found: list[tuple[int | None, int | None]] = [(n, None) for n in loops]
    moved = 0
    for i, axis in enumerate(site.axes):
        if not axis.lane and axis.mesh is None:
            found.insert(len(loops) - axis.loops + moved, (axis.size, i))
            moved += 1
    return [(n, axis) for n, axis in found if n is not None]


def recomputed(x: Any) -> Iterator[Site]:
    """The sites of a jaxpr, of which a `jax.checkpoint` computes the value again."""
    for eqn in x.eqns:
        if eqn.primitive is same_p:
            yield eqn.params["site"]
        else:
            for jaxpr in jaxprs_of(eqn):
                yield from recomputed(jaxpr)


def variables(atoms: Iterable[Any]) -> list[Any]:
    return [v for v in atoms if not isinstance(v, jexc.Literal)]


def equal(x: Any, y: Any) -> bool:
    try:
        return bool(x == y)
    except ValueError:  # arrays
        return False
