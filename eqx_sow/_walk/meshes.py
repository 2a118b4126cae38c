"""Meshes within a mesh: `jax.sharding.auto_axes` and `explicit_axes`.

They change the types of the axes of the mesh for a part of the program. An array there
is on the mesh of that part, and can only be used there. So what a handler does at a
mark is done on the mesh of the mark: what the handler passes down is brought there, and
what it takes comes back to the mesh around. No equation is needed for it but `reshard`,
which moves nothing if the array is sharded on one mesh as on the other.

On an explicit mesh the type of an array says how it is sharded, and on an automatic one
that is not known before the program is compiled. So it is found out as if the mesh were
explicit there too: from what is computed of what. Where JAX has no answer, an array is
sharded along the axes that have the sizes of sharded axes of what it is computed from.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jexc
from jax.sharding import NamedSharding

from .. import _compat
from .._arrays import onto, spec_of, with_spec
from .._values.entry import Entry
from .handler import Given
from .sows import called_by, jaxprs_of, kept_with_jaxpr, loop_of


Spec = tuple[Any, ...]
# The shape of an array, and how it is sharded.
KnownSpec = tuple[Sequence[int], Spec]


def given_inside(given: Given, mesh: Any) -> Given:
    """What is passed down, on the mesh of an equation."""
    return jax.tree.map(lambda x: onto(x, mesh, spec_of(x)), given)


def carry_outside(new: dict[Any, Any], old: dict[Any, Any]) -> dict[Any, Any]:
    """`Given.carry` after an equation, sharded as it was before."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.tree.map(lambda x, y: onto(x, mesh, spec_of(y)), new, old)


def entries_outside(
    entries: Iterable[Entry], jaxpr: Any, eqn: Any
) -> tuple[Entry, ...]:
    """What was taken in an equation of a jaxpr, on the mesh around."""
    mesh = jax.sharding.get_abstract_mesh()
    specs = _specs_on(jaxpr, mesh)
    known = _known(eqn.invars, [_spec_of(specs, v) for v in eqn.invars])

    def divides(axes, n):
        names = axes if isinstance(axes, tuple) else (axes,)
        return n % math.prod(mesh.shape[name] for name in names) == 0

    def outside(x):
        spec = _spec_in(x) or _spec_like(x.shape, known)
        # What is known may be of a part of an array, inside a `shard_map`.
        fit = (s if s and divides(s, n) else None for s, n in zip(spec, x.shape))
        return onto(x, mesh, tuple(fit))

    return tuple(e.replace(list(map(outside, e.arrays))) for e in entries)


def _spec_in(x: Any) -> Spec | None:
    """How an array is sharded that has been computed."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x.sharding, NamedSharding):
        return None
    spec = x.sharding.spec
    return (*spec, *[None] * (x.ndim - len(spec)))


def _spec_like(shape: Sequence[int], known: Iterable[KnownSpec]) -> Spec:
    """How an array of this shape is sharded, if it is sharded as one of those that are
    `known`: the one that has the most sharded axes in common with it."""

    def like(shape_of, spec):
        if tuple(shape_of) == tuple(shape):
            return spec
        left, found = list(zip(shape_of, spec)), []
        for n in shape:
            k = next((k for k, (m, _) in enumerate(left) if m == n), None)
            found.append(None if k is None else left.pop(k)[1])
        return tuple(found)

    every = [like(*x) for x in known]
    nothing = (None,) * len(shape)
    return min(every, key=lambda spec: spec.count(None), default=nothing)


def _known(atoms: Iterable[Any], specs: Iterable[Spec | None]) -> list[KnownSpec]:
    return [(v.aval.shape, s) for v, s in zip(atoms, specs) if s]


def _spec_of(specs: dict[Any, Spec], v: Any) -> Spec | None:
    return None if isinstance(v, jexc.Literal) else specs.get(v)


def _spec_in_type(aval: Any) -> Spec | None:
    return spec_of(aval) if isinstance(aval, jax.core.ShapedArray) else None


@kept_with_jaxpr
def _specs_on(jaxpr: Any, mesh: Any) -> dict[Any, Spec]:
    """How the variables of a jaxpr are sharded, were the types of all mesh axes those
    of this mesh."""
    given = [_spec_in_type(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)]
    return _propagated(jaxpr, mesh, given)


def _propagated(jaxpr: Any, mesh: Any, given: Sequence[Any]) -> dict[Any, Spec]:
    specs = dict(zip((*jaxpr.constvars, *jaxpr.invars), given))
    for eqn in jaxpr.eqns:
        of_operands = [_spec_of(specs, v) for v in eqn.invars]
        out = _spec_of_outputs(eqn, mesh, of_operands)
        specs.update((v, s) for v, s in zip(eqn.outvars, out) if s is not None)
    return {v: s for v, s in specs.items() if s is not None}


def _spec_of_outputs(eqn: Any, mesh: Any, given: Sequence[Any]) -> Sequence[Any]:
    avals = [v.aval for v in eqn.outvars]
    own = list(map(_spec_in_type, avals))
    if any(s and any(s) for s in own):
        return own
    if eqn.primitive.name in ("reshard", "sharding_constraint"):
        sharding = eqn.params.get("sharding")
        if isinstance(sharding, NamedSharding) and sharding.spec:
            n = len(avals[0].shape)
            return [(*sharding.spec, *[None] * n)[:n]]
        return given
    of_body = _spec_of_body(eqn, mesh, given)
    if of_body is not None:
        return of_body
    try:
        operands = [
            v.aval.update(sharding=with_spec(mesh, s or (None,) * len(v.aval.shape)))
            for v, s in zip(eqn.invars, given)
        ]
        new, _ = eqn.primitive.abstract_eval(*operands, **eqn.params)
    except Exception:  # whatever JAX or another library says of such types
        known = _known(eqn.invars, given)
        return [s and _spec_like(x.shape, known) for x, s in zip(avals, own)]
    new = new if eqn.primitive.multiple_results else [new]
    return list(map(_spec_in_type, new))


def _spec_of_body(eqn: Any, mesh: Any, given: Sequence[Any]) -> list[Any] | None:
    """How the outputs of a call or a scan are sharded. `None` for other equations."""
    called = called_by(eqn)
    is_scan = eqn.primitive is jexc.primitives.scan_p
    if called is None or (loop_of(eqn) and not is_scan):
        return None
    body, _ = _compat.open_jaxpr(called[1])
    n_same = n_carry = len(given)
    if is_scan:
        n_consts, n_carry = _compat.scan_arity(eqn.params)
        n_same = n_consts + n_carry
    # Of a scan over a sharded axis, JAX has no slices.
    given = [*given[:n_same], *[s and s[1:] for s in given[n_same:]]]
    specs = _propagated(body, mesh, [*[None] * len(body.constvars), *given])
    out = [_spec_of(specs, v) for v in body.outvars]
    return [*out[:n_carry], *[s if s is None else (None, *s) for s in out[n_carry:]]]


@kept_with_jaxpr
def forgets(jaxpr: Any) -> bool:
    """Whether JAX forgets over which mesh axes the values of a jaxpr vary: in a
    `shard_map` with `check_vma=False`, and after it."""
    jaxpr, _ = _compat.open_jaxpr(jaxpr)
    return any(
        not eqn.params.get("check_vma", True) or any(map(forgets, jaxprs_of(eqn)))
        for eqn in jaxpr.eqns
    )


def adds_up(jaxpr: Any, axes: frozenset[Any]) -> bool:
    """Whether a jaxpr has a sum over any of these mesh axes. Transposition puts one
    where an array that does not vary over them meets one that does."""
    return any(
        any(adds_up(inner, axes) for inner in jaxprs_of(eqn))
        or eqn.primitive.name.startswith("psum")
        and not axes.isdisjoint(eqn.params["axes"])
        for eqn in _compat.open_jaxpr(jaxpr)[0].eqns
    )
