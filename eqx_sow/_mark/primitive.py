"""The primitive underneath `sow`.

A call of `sow` becomes one equation whose operands are the array leaves of the value
and whose single parameter, a `Site`, is everything static about it. Differentiation and
batching rewrite the `Site`; nothing about a sow is ever kept outside of its equation.
"""

import dataclasses as dc
from typing import Any

import jax
import jax.core
import jax.extend.core as jexc
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir, partial_eval as pe

from .. import _compat
from .._errors import SowError
from .listening import around, listening
from .site import Axis, with_has
from .static import NoTangent, OPERAND


class _SowPrimitive(jexc.Primitive):
    """Does nothing outside a capture: a derivative rule may have kept a jaxpr with
    sows, and be called after the program that it belongs to was looked at."""

    multiple_results = True

    def bind(self, *operands, site):
        here = listening.value
        if here is not None and here.found is None:
            return super().bind(*operands, site=site)
        if here is not None:
            here.found(site)
        return list(operands)


sow_p = _SowPrimitive("sow")
sow_effect = _compat.SowEffect()


def _sow_impl(*operands, site) -> Any:
    if listening.value is None:
        return operands
    raise SowError(
        f"`sow(..., {site.name!r})` at {site.where} was executed while the program "
        "around it was only being traced (by `jax.ensure_compile_time_eval`, or a "
        "function that was compiled ahead of time in there), so its value cannot be "
        "captured. Move the sow out of that part."
    )


def _sow_abstract_eval(*avals, site):
    return avals, {sow_effect}


def _sow_jvp(primals, tangents, *, site):
    n = site.differentiated
    out = sow_p.bind(*primals, site=site._replace(differentiated=n + 1))
    n_guards = len(site.guards)
    keep = [i < n_guards or not isinstance(t, ad.Zero) for i, t in enumerate(tangents)]
    operand = iter(range(n_guards, len(primals)))
    leaves = []
    for leaf in site.leaves:
        if leaf is OPERAND and not keep[i := next(operand)]:
            shape = site.shape(i, jnp.shape(primals[i]))
            dtype = jexc.primal_dtype_to_tangent_dtype(jnp.result_type(primals[i]))
            leaf = NoTangent(shape, dtype, dtype)
        leaves.append(leaf)
    tangent_site = site._replace(
        leaves=tuple(leaves),
        modes=(*site.modes, "tangent"),
        orders=(*site.orders, n),
        differentiated=0,
        axes=with_has(site.axes, [site.has(i) for i, k in enumerate(keep) if k]),
        spec=None,
        fixed=(),
    )
    kept = [
        *primals[:n_guards],
        *[t for t, k in zip(tangents[n_guards:], keep[n_guards:]) if k],
    ]
    tangent_out = iter(sow_p.bind(*kept, site=tangent_site))
    tangent_out = [next(tangent_out) if k else t for t, k in zip(tangents, keep)]
    # Guards are not differentiated: what came back for them is not a tangent.
    tangent_out[:n_guards] = tangents[:n_guards]
    return out, tangent_out


def _sow_transpose(cts, *operands, site):
    n_guards = len(site.guards)
    modes = site.modes[:-1] if site.modes[-1:] == ("tangent",) else site.modes
    cts = cts[n_guards:]
    leaves = tuple(
        dc.replace(x, dtype=jax.dtypes.float0) if isinstance(x, NoTangent) else x
        for x in site.leaves
    )
    # A value that was moved out of its loop has one cotangent: the total.
    axes = tuple(a for a in site.axes if a.lane)
    sown = sow_p.bind(
        *operands[:n_guards],
        *map(ad.instantiate_zeros, cts),
        site=site._replace(
            modes=(*modes, "cotangent"), leaves=leaves, axes=axes, spec=None
        ),
    )
    return [None] * n_guards + [
        None if not ad.is_undefined_primal(x) else ct if type(ct) is ad.Zero else s
        for x, ct, s in zip(operands[n_guards:], cts, sown[n_guards:])
    ]


def _sow_batch(axis_data, operands, dims, *, site):
    # Also if nothing varies: so all sows under the same vmaps have the same axes.
    has = tuple(d is not None for d in dims)
    loops, conds = around(axis_data)
    axis = Axis(axis_data.size, has, loops, spec=axis_data.explicit_mesh_axis)
    unguarded = any(c not in [g[0] for g in site.guards] for c in conds)
    site = site._replace(unguarded=site.unguarded or unguarded)
    operands = [
        x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims)
    ]
    out = sow_p.bind(*operands, site=site._replace(axes=(axis, *site.axes)))
    return out, [0 if h else d for h, d in zip(has, dims)]


# What `jax.checkpoint` recomputes instead of a sow, so that it need not save the value.
# The site is that of the sow, as it was then.
same_p = jexc.Primitive("same")
same_p.multiple_results = True


def _sow_checkpoint(saveable, unknown, instantiated, eqn):
    del saveable
    missing = [
        x
        for x, i in zip(eqn.invars, instantiated)
        if not i and not isinstance(x, jexc.Literal)
    ]
    every = [True] * len(eqn.outvars)
    if any(unknown):
        return None, eqn, every, every, missing
    again = eqn.replace(primitive=same_p, effects=frozenset())
    return eqn, again, [False] * len(eqn.outvars), every, missing


def _same_jvp(primals, tangents, *, site):
    return same_p.bind(*primals, site=site), tangents


def _same_batch(operands, dims, *, site):
    return same_p.bind(*operands, site=site), dims


same_p.def_impl(lambda *operands, site: list(operands))
same_p.def_abstract_eval(lambda *avals, site: avals)
mlir.register_lowering(same_p, lambda ctx, *operands, site: operands)
ad.primitive_jvps[same_p] = _same_jvp
batching.primitive_batchers[same_p] = _same_batch
pe.partial_eval_jaxpr_custom_rules[sow_p] = _sow_checkpoint
sow_p.def_impl(_sow_impl)
sow_p.def_effectful_abstract_eval(_sow_abstract_eval)
ad.primitive_jvps[sow_p] = _sow_jvp
ad.primitive_transposes[sow_p] = _sow_transpose
batching.fancy_primitive_batchers[sow_p] = _sow_batch
mlir.register_lowering(sow_p, lambda ctx, *xs, site: _sow_impl(*xs, site=site))
