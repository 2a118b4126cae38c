"""The marks in a program: where they are.

A program is a jaxpr. Its marks may be in jaxprs that are parameters of its equations,
at any depth, and in Python functions that equations hold.
"""

import functools as ft
import itertools as it
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.extend.core as jexc

from .. import _compat, _hijax
from .._errors import UnsupportedPrimitiveError
from .._frames import line_of
from .._mark.listening import Listening, listening
from .._mark.primitive import edge_p, same_p, sow_effect, sow_p
from .._mark.site import Site


# The way to an equation: its index in the program, then the number of a jaxpr among
# those of that equation, the index of an equation in there, and so on.
Way = tuple[int, ...]


def kept_with_jaxpr(make: Callable) -> Callable:
    """A decorator of a function of a jaxpr (and of other things that are hashable): it
    returns the same object each time, for as long as the jaxpr is there. What is made
    must not hold the jaxpr."""
    made: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()

    @ft.wraps(make)
    def kept(jaxpr, *args):
        of_jaxpr = made.setdefault(jaxpr, {})
        if args not in of_jaxpr:
            of_jaxpr[args] = make(jaxpr, *args)
        return of_jaxpr[args]

    return kept


# --- jaxprs in equations ---
def jaxprs_in(x: Any) -> Iterator[Any]:
    """The jaxprs in the parameters of an equation, open or closed. Equinox has some in
    tuples of tuples."""
    if _compat.is_jaxpr(x):
        yield x
    elif isinstance(x, jax.stages.Traced):
        yield from jaxprs_in(x.jaxpr)
    elif isinstance(x, _hijax.HiPrim):
        yield from jaxprs_in(x.params)
    elif isinstance(x, tuple | list | dict):
        for v in x.values() if isinstance(x, dict) else x:
            yield from jaxprs_in(v)


def map_jaxprs(params: dict[str, Any], fn: Callable[[Any], Any]) -> dict[str, Any]:
    """The parameters, with `fn` applied to every jaxpr in there, in the order of
    `jaxprs_in`."""

    def visit(x):
        if _compat.is_jaxpr(x):
            return fn(x)
        if isinstance(x, jax.stages.Traced):
            return _compat.traced_with_jaxpr(x, visit(x.jaxpr))
        if isinstance(x, _hijax.HiPrim):
            return _hijax.hi_with_params(x, visit)
        if isinstance(x, tuple):
            new = [visit(v) for v in x]
            return type(x)(*new) if hasattr(x, "_fields") else tuple(new)
        return x

    return {name: visit(x) for name, x in params.items()}


_of_jax = {p for p in vars(jexc.primitives).values() if isinstance(p, jexc.Primitive)}
# Those of JAX's primitives that have no jaxpr among their parameters, and ours. (Some
# equations of `scatter` have an `update_jaxpr`, and others have `None` in its place.)
_plain: set[jexc.Primitive] = {edge_p, same_p, sow_p}


def jaxprs_of(eqn: Any) -> list[Any]:
    """The jaxprs in an equation: at a glance for most of JAX's primitives."""
    if eqn.primitive in _plain:
        return []
    if eqn.primitive is jexc.primitives.jit_p:
        return [eqn.params["jaxpr"]]
    jaxprs = list(jaxprs_in(eqn.params))
    may_have = any("jaxpr" in name for name in eqn.params)
    if not (jaxprs or may_have) and eqn.primitive in _of_jax:
        _plain.add(eqn.primitive)
    return jaxprs


# What `jax_rules.py` calls a jitted function that it puts around an equation, to keep
# that in its loop.
KEPT_IN_LOOP = "eqx_sow_keeps_in_loop"


def is_kept_in_loop(eqn: Any) -> bool:
    is_jit = eqn.primitive is jexc.primitives.jit_p
    return is_jit and eqn.params["name"] == KEPT_IN_LOOP


def number(eqn: Any, jaxpr: Any) -> int:
    """The number of a jaxpr among those in an equation."""
    return next(k for k, j in enumerate(jaxprs_in(eqn.params)) if j is jaxpr)


def called_by(eqn: Any) -> tuple[int, Any] | None:
    """The jaxpr that an equation calls, and its number, if it holds one with as many
    operands and outputs as it has itself: that of a jitted function, say."""
    n = len(eqn.invars)
    if eqn.primitive is _hijax.hi_p and "solve_jaxpr" in eqn.params["_prim"].params:
        # Behind the operands of a `custom_root` are those of its derivative.
        n = len(eqn.params["_prim"].solve_jaxpr.invars)
    inside = [(k, j) for k, j in enumerate(jaxprs_of(eqn)) if len(j.invars) == n]
    is_call = len(inside) == 1 and len(inside[0][1].outvars) == len(eqn.outvars)
    return inside[0] if is_call else None


def jaxprs_to_run(eqn: Any) -> dict[int, Any]:
    """The jaxprs in an equation that the walk may run, by their numbers. For a `HiPrim`
    it is the one that this calls, if that is known. Else the walk runs what it is
    `expanded` to."""
    if eqn.primitive is not _hijax.hi_p:
        return dict(enumerate(jaxprs_of(eqn)))
    called = None if _hijax.is_users(eqn.params["_prim"]) else called_by(eqn)
    return dict([called]) if called else {}


def grouped(xs: Iterable[Any], key: Callable[[Any], Any]) -> defaultdict[Any, list]:
    """Those with equal keys together, in their order."""
    groups = defaultdict(list)
    for x in xs:
        groups[key(x)].append(x)
    return groups


def variables(atoms: Iterable[Any]) -> list[Any]:
    return [v for v in atoms if not isinstance(v, jexc.Literal)]


def is_lanewise(jaxpr: Any) -> bool:
    """Whether it is sure that under a vmap each lane is computed from that lane alone,
    if the jaxpr has no effects. Other libraries have primitives that look at all
    lanes."""
    return all(
        e.primitive in _of_jax and all(map(is_lanewise, jaxprs_in(e.params)))
        for e in jaxpr.eqns
    )


# --- finding marks ---
def shows_sow(x: Any) -> bool:
    """Whether the effects of an equation or a jaxpr tell of a mark inside."""
    return bool(x.effects) and sow_effect in x.effects


def has_sow(x: Any) -> bool:
    """Whether an equation or a jaxpr has a mark inside, at any depth: some primitives
    hide the effects of what is in there."""
    if shows_sow(x):
        return True
    if not isinstance(x, jexc.JaxprEqn):
        return bool(with_sow(x))
    return x.primitive not in _plain and (
        any(map(has_sow, jaxprs_of(x))) or bool(_in_functions(x))
    )


def with_sow(x: Any) -> dict[int, Any]:
    """The equations of a jaxpr that have a mark inside, or are one, by their
    indices."""
    return _with_sow(_compat.open_jaxpr(x)[0])


@kept_with_jaxpr
def _with_sow(jaxpr):
    return {i: e for i, e in enumerate(jaxpr.eqns) if has_sow(e)}


# In the place of the number of a jaxpr, for what a Python function is traced to.
FUNCTION = -1


class Mark(NamedTuple):
    """A mark in a program. `eqns`: the equations that lead to it, from outside in; the
    last one is that of the mark. `way`: the way to that one.

    A mark may be in a Python function that an equation holds. Then `FUNCTION` is in the
    way, and what follows leads through what that function is traced to.
    """

    site: Site
    eqns: tuple[Any, ...]
    way: Way

    # --- what `Numbering` finds out of it ---
    # The ways of the executions that its edge comes from.
    edges: frozenset[Way] = frozenset()
    # Equal for two marks of equal values.
    value: Hashable = None
    # For each `cond` around it, the number of the index, and that of the branch.
    cases: frozenset[tuple[int, int]] = frozenset()
    # For each guard, where its operand was made. This tells the runs of a cond apart
    # that is in a function which is called twice.
    made: tuple[Hashable, ...] = ()

    @property
    def branches(self) -> frozenset[tuple[Hashable, int]]:
        """The branches that it is in, also of conds that a vmap made selections of. Two
        marks are in branches of one run of a cond if the index is the same."""
        guards = zip(self.made, self.site.guards)
        return self.cases | {(run, g.branch) for run, g in guards if g.cond is not None}

    @property
    def loops(self) -> tuple[int, ...]:
        """How many iterations the scans around it have, from outside in."""
        return lengths_of(self.eqns)

    @property
    def holder(self) -> Any:
        """The equation that holds the Python function that it is in, if any does."""
        k = self.way.index(FUNCTION) if FUNCTION in self.way else None
        return None if k is None else self.eqns[k // 2]

    @property
    def in_backward_pass(self) -> bool:
        """Whether it is in one, and is no derivative."""
        return not self.site.modes and any(map(_compat.in_backward_pass, self.eqns))


def sows(x: Any, eqns: tuple[Any, ...] = (), way: Way = ()) -> Iterator[Mark]:
    """The marks in a jaxpr, or within an equation, to which `eqns` and `way` lead."""
    if not isinstance(x, jexc.JaxprEqn):
        for i, eqn in with_sow(x).items():
            if eqn.primitive is sow_p:
                yield Mark(eqn.params["site"], (*eqns, eqn), (*way, i))
            else:
                yield from sows(eqn, eqns, (*way, i))
        return
    eqns = (*eqns, x)
    found: list[Mark] = []
    for k, jaxpr in jaxprs_to_run(x).items():
        found += sows(jaxpr, eqns, (*way, k))
    found += _in_functions(x, eqns, (*way, FUNCTION))
    if shows_sow(x) and not found:
        primitive, params = _compat.unmapped(x)
        # Of all that are a class, such as `CustomRoot`, the primitive is the same one.
        prim = params.get("_prim")
        what = primitive if prim is None else type(prim).__name__.strip("_")
        where = line_of(x)
        raise UnsupportedPrimitiveError(
            f"There is a mark inside the primitive `{what}`"
            f"{where and f', which {where} calls'}, where eqx_sow cannot look, so its "
            "value cannot be captured or planted. Move the mark out of it: mark what "
            "it returns, or compute the value once more outside and mark that."
        )
    yield from found


def _in_functions(eqn: Any, eqns: tuple[Any, ...] = (), way: Way = ()) -> list[Mark]:
    """The marks in Python functions that an equation holds, to which `eqns` and `way`
    lead: they are traced once more, with a note of the calls that are noted now."""
    primitive, params = _compat.unmapped(eqn)
    noinline = primitive is _compat.noinline_p
    is_hi = primitive is _hijax.hi_p and not jaxprs_to_run(eqn)
    if is_hi and not _hijax.is_users(params["_prim"]):
        is_hi = any(map(has_sow, jaxprs_of(eqn)))
    if noinline or is_hi:
        here = listening.value or Listening()
        new = Listening(
            captures=here.captures, depth=here.depth, replaced=here.replaced
        )
        with listening(new):
            held = (_compat.noinlined if noinline else expanded)(eqn)
            return [*sows(held, eqns, way)]
    found: list[Site] = []
    if is_filtered(params):
        with listening(Listening(report=found.append)):
            avals = [v.aval for v in eqn.invars]
            eqn.primitive.abstract_eval(*avals, **eqn.params)
    return [Mark(site, eqns, (*way, i)) for i, site in enumerate(found)]


def is_filtered(params: dict[str, Any]) -> bool:
    """Whether these are of a primitive of Equinox's, which holds Python functions."""
    return {"static", "treedef"} <= params.keys()


def expanded(eqn: Any) -> Any:
    """What a `HiPrim` computes, as a jaxpr."""
    prim = eqn.params["_prim"]

    def program(*args):
        return jax.tree.leaves(prim.expand(*jax.tree.unflatten(prim.in_tree, args)))

    with listening(listening.value or Listening()):
        return jax.make_jaxpr(program)(*[v.aval for v in eqn.invars])


def recomputed(x: Any) -> Iterator[Site]:
    """The sites of a jaxpr, of which a `jax.checkpoint` computes the value again."""
    for eqn in x.eqns:
        if eqn.primitive is same_p:
            yield eqn.params["site"]
        for jaxpr in jaxprs_of(eqn):
            yield from recomputed(jaxpr)


# --- loops ---
class Loop(NamedTuple):
    """How many iterations a loop has, and whether the last one runs first. `None` for
    both if that is not known before it runs."""

    length: int | None = None
    reverse: bool | None = None


# The primitives that are loops.
_loops: dict[jexc.Primitive, Callable[[dict[str, Any]], Loop]] = {
    jexc.primitives.scan_p: lambda params: Loop(params["length"], params["reverse"]),
    jexc.primitives.while_p: lambda params: Loop(),
}


def loop_of(eqn: Any) -> Loop | None:
    """What an equation is as a loop, if it is one."""
    return _loops[eqn.primitive](eqn.params) if eqn.primitive in _loops else None


def is_of_unknown_length(eqn: Any) -> bool:
    """Whether it is a loop such as a `while_loop`."""
    loop = loop_of(eqn)
    return loop is not None and loop.length is None


def around_backward_pass(eqns: Iterable[Any]) -> list[Any]:
    """Those of the equations around a place that are around the backward pass that it
    is in."""
    return [*it.takewhile(lambda e: not _compat.in_backward_pass(e), eqns)]


def in_loop_of_backward_pass(eqns: Iterable[Any]) -> bool:
    """Whether what these equations lead to is in a backward pass, and in a loop that is
    part of it."""
    within = it.dropwhile(lambda e: not _compat.in_backward_pass(e), eqns)
    return any(loop_of(e) is not None for e in within)


def lengths_of(eqns: Iterable[Any]) -> tuple[int, ...]:
    """How many iterations the scans among some equations have."""
    loops = filter(None, map(loop_of, eqns))
    return tuple(x.length for x in loops if x.length is not None)
