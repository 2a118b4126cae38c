"""The primitive underneath `sow`.

A call of `sow` becomes one equation. Its first operand is an edge, then come the array
leaves of the value; its single parameter, a `Site`, is everything static about it.
Differentiation and batching rewrite the `Site`; nothing about a sow is ever kept
outside its equation.

An edge is an array of size 0. It holds nothing, so it costs nothing to keep it for a
backward pass or to stack it in a loop. It says what belongs together: in

    e1 = edge(weight, bias)           # a linear layer is called, with these arrays
    e2, h = sow(e1, y)                # and this is what it returned
    _, dh = sow(e2, dy)               # the tangent of that, or after transposition ...

the way from `weight` to `e1` says where the layer is (`_modules/locating.py`), and that
from `e2` to the last line says of which value `dh` is the derivative. Both ways go
through calls, loops, branches and checkpoints, as those of any array do. A sow that is
not a call of a module has the number 0.0 as its first operand.
"""

import contextlib
import dataclasses as dc
import functools as ft
import itertools as it
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.core
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import jet
from jax.interpreters import ad, batching, mlir, partial_eval as pe

from .. import _compat
from .._errors import SowError
from .listening import around, listening
from .site import Axis
from .static import NoTangent, OPERAND


def _runs_as(primitive: jexc.Primitive, fn: Callable) -> None:
    """`fn` is what runs, eagerly and compiled."""
    primitive.def_impl(fn)
    rule = mlir.lower_fun(fn, multiple_results=primitive.multiple_results)
    mlir.register_lowering(primitive, rule)
    _compat.stage_without_cache(primitive)


# --- edges ---
edge_p = jexc.Primitive("edge")
NO_EDGE = 0.0
_EDGE = jax.ShapeDtypeStruct((0,), np.float32)


def edge_aval(*avals: Any) -> jax.core.ShapedArray:
    """The type of an edge. In a `jax.shard_map`, it varies over the mesh axes that its
    operands vary over. In

        lax.cond(x > 0, lambda x: sow(jnp.sin(x), "h"), jnp.cos, x)

    the edge is kept for the backward pass, with whatever else comes out of the
    branches. Under a vmap these are selected, and the selection varies over what
    `x > 0` varies over."""
    return _compat.varying_like(avals, _EDGE.shape, _EDGE.dtype)


def edge_value(aval: Any = None) -> Any:
    """The array that takes the place of an edge, in a program without sows."""
    axes = tuple(_compat.varying(aval)) if aval is not None else ()
    if not axes:
        return np.zeros(_EDGE.shape, _EDGE.dtype)
    # Made by an equation, here. A constant would become an operand of the equation
    # around, and would already vary there, under a vmap.
    return lax.pcast(lax.full(_EDGE.shape, 0, _EDGE.dtype), axes, to="varying")


def _edge_tangent(edge: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(edge).to_tangent_aval())


def _edge_jvp(primals, tangents, **params):
    del tangents
    out = edge_p.bind(*primals, **params)
    return out, _edge_tangent(out)


def _edge_linearize(is_vjp, nonzeros, *primals, **params):
    """What `_edge_jvp` returns, as JAX's linearization wants it. From that rule, JAX
    would trace a linear part, for each edge, to find that there is none."""
    del is_vjp, nonzeros
    out = edge_p.bind(*primals, **params)
    zero = _edge_tangent(out)
    return _compat.linearization(out, False, [], lambda *, tangents: zero)


_runs_as(edge_p, lambda *arrays, **params: jnp.asarray(edge_value()))
edge_p.def_abstract_eval(lambda *avals, **params: edge_aval(*avals))
ad.primitive_jvps[edge_p] = _edge_jvp
_compat.primitive_linearizations[edge_p] = _edge_linearize
# The series of an edge is one of zeros, and empty. That of a value stays as it is.
jet.jet_rules[edge_p] = lambda primals, series, **params: (
    out := edge_p.bind(*primals, **params),
    [jnp.zeros_like(out)] * len(series[0]),
)


def _edge_batch(arrays, dims, *, lanes=(), **params):
    """There is one edge for all lanes of a vmap. That of a call knows for each operand
    which of its axes these are."""
    if params:
        each = zip(dims, lanes or [()] * len(dims))
        params["lanes"] = tuple(
            of if d is None else (d, *(k + (k >= d) for k in of)) for d, of in each
        )
    return edge_p.bind(*arrays, **params), None


batching.primitive_batchers[edge_p] = _edge_batch


# --- sows ---
class _SowPrimitive(jexc.Primitive):
    """Adds no equation outside a capture. That happens where a derivative rule
    kept a jaxpr with sows, and JAX evaluates it after the capture is over."""

    multiple_results = True

    def bind(self, edge, *operands, site):
        here = listening.value
        if here is not None and here.report is None:
            return super().bind(edge, *operands, site=site)
        if here is not None:
            here.report(site)
        return _sow_off(edge, *operands)


def _sow_off(edge, *operands):
    # Where JAX differentiates a branch, a NumPy array would be an error.
    return [_compat.as_array(edge_value()), *operands]


sow_p = _SowPrimitive("sow")
sow_effect = _compat.SowEffect()


def _sow_impl(edge, *operands, site) -> Any:
    if listening.value is None:
        return _sow_off(edge, *operands)
    raise SowError(
        f"{site.said_first} was executed while the program around it was only being "
        "traced (by `jax.ensure_compile_time_eval`, or in a function that was compiled "
        "ahead of time): its value cannot be captured. Move the mark out of that part."
    )


def _sow_abstract_eval(edge, *avals, site):
    return [edge_aval(edge, *avals), *avals], {sow_effect}


class _Widened(threading.local):
    # In this trace.
    here = False
    # Anywhere, so far. Where nothing widens, each call of a jitted function, such as
    # `jnp.sin`, asks for this alone.
    ever = False

    def happens(self) -> None:
        self.here = _Widened.ever = True

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Within this, `here` is whether it happened within this."""
        before, self.here = self.here, False
        try:
            yield
        finally:
            self.here = before or self.here

    def since(self, before: bool, jaxprs: Iterable[Any]) -> None:
        """What happened since `here` was `before`, and then `False`, is due to these
        jaxprs. JAX keeps what it makes of them when it differentiates, and does not
        call the rule of a sow again: so it is taken to happen each time, if it happened
        once."""
        of = [_compat.open_jaxpr(jaxpr)[0] for jaxpr in jaxprs]
        if self.here:
            _widening.update(of)
        self.here = before or self.here or not _widening.isdisjoint(of)


_widening: weakref.WeakSet[Any] = weakref.WeakSet()
# Whether, in this trace, a leaf has got a tangent that it would not have without its
# sow.
widened = _Widened()


def _differentiated(nonzeros, avals, site, is_vjp: bool) -> list[bool]:
    """Which operands have a tangent.

    If the tangents are to be transposed (`is_vjp`) and any leaf of the value has one,
    all leaves get one: under `grad` with respect to `x` alone, `sow((x, y), "pair")`
    has the cotangents of both. NumPy arrays stay as they are.

    In forward mode a leaf without a tangent stays without. A zero in its place would
    be computed with: `jnp.sqrt(y)` at 0 has the derivative `inf`, and `0 * inf` is NaN.
    """
    first = 1 + len(site.guards)
    fixed = {first + x.i for x in site.fixed}
    whole = is_vjp and listening.value is not None and not listening.value.leafwise

    def is_inexact(i):
        dtype = jexc.primal_dtype_to_tangent_dtype(avals[i].dtype)
        return dtype != jax.dtypes.float0 and i not in fixed

    new = [
        i >= first and (nz or (whole and is_inexact(i)))
        for i, nz in enumerate(nonzeros)
    ]
    if any(x and not nz for x, nz in zip(new, nonzeros)):
        widened.happens()
    return new


def _sow_jvp(primals, tangents, *, site):
    nonzeros = [type(t) is not ad.Zero for t in tangents]
    is_vjp = listening.value is not None and listening.value.is_vjp
    out, _, residuals, tangent = _sow_linearized(nonzeros, primals, site, is_vjp)
    return out, tangent(*residuals, tangents=tangents)


def _sow_linearize(is_vjp, nonzeros, *primals, site):
    """What `_sow_jvp` returns, as JAX's linearization wants it. This rule is told
    whether the tangents will be transposed (`is_vjp`): what has one depends on that."""
    return _compat.linearization(*_sow_linearized(nonzeros, primals, site, is_vjp))


def _sow_linearized(nonzeros, primals, site, is_vjp):
    avals = list(map(jax.typeof, primals))
    nonzeros = _differentiated(nonzeros, avals, site, is_vjp)
    n = site.differentiated
    out = sow_p.bind(*primals, site=site._replace(differentiated=n + 1))
    residuals = out[0], *primals[1 : 1 + len(site.guards)]
    tangent = ft.partial(_sow_tangent, nonzeros, avals, site)
    return out, nonzeros, residuals, tangent


def _sow_tangent(nonzeros, avals, site, edge, *guards, tangents):
    """Sows the tangents of a value, with the edge of their primal. Guards have none."""
    n = 1 + len(guards)
    of_guards, tangents = tangents[1:n], tangents[n:]
    avals, keep = avals[n:], nonzeros[n:]
    operand = iter(range(len(keep)))
    leaves = []
    for leaf in site.form.leaves:
        if leaf is OPERAND and not keep[i := next(operand)]:
            shape = site.shape(len(guards) + i, avals[i].shape)
            dtype = jexc.primal_dtype_to_tangent_dtype(avals[i].dtype)
            leaf = NoTangent(shape, dtype)
        leaves.append(leaf)
    kept = [True] * len(guards) + keep
    tangent_site = site._replace(
        form=site.form._replace(leaves=tuple(leaves)),
        modes=(*site.modes, "tangent"),
        orders=(*site.orders, site.differentiated),
        differentiated=0,
        spec=None,
        fixed=(),
        taken=(),
        varies=tuple(it.compress(site.varies, kept)),
        permutations=tuple(it.compress(site.permutations, kept)),
    )
    values = [ad.instantiate_zeros(t) for t, k in zip(tangents, keep) if k]
    _, *sown = sow_p.bind(edge, *guards, *values, site=tangent_site)
    sown = iter(sown[len(guards) :])
    out = [next(sown) if k else t for t, k in zip(tangents, keep)]
    return [_edge_tangent(edge), *of_guards, *out]


def _sow_transpose(cts, edge, *operands, site):
    n_guards = len(site.guards)
    modes = site.modes[:-1] if site.modes[-1:] == ("tangent",) else site.modes
    cts = cts[1 + n_guards :]
    leaves = tuple(
        dc.replace(x, dtype=jax.dtypes.float0) if isinstance(x, NoTangent) else x
        for x in site.form.leaves
    )
    form = site.form._replace(leaves=leaves)
    _, *sown = sow_p.bind(
        edge,
        *operands[:n_guards],
        *map(ad.instantiate_zeros, cts),
        site=site._replace(modes=(*modes, "cotangent"), form=form, spec=None, taken=()),
    )
    return [None] * (1 + n_guards) + [
        None if not ad.is_undefined_primal(x) else ct if type(ct) is ad.Zero else s
        for x, ct, s in zip(operands[n_guards:], cts, sown[n_guards:])
    ]


def _with_axis(permutation, x, d):
    """That of an operand to which a vmap gave one more axis, as its axis `d`."""
    if d is None or not (d or permutation):
        return permutation
    others = permutation or range(x.ndim - 1)
    return (d, *(k + (k >= d) for k in others))


def _sow_batch(axis_data, operands, dims, *, site):
    (edge, *operands), (edge_dim, *dims) = operands, dims
    if edge_dim is not None:
        # It came out of one branch or another, chosen for each lane.
        edge = edge_p.bind(edge)
    # Also if nothing varies: so all sows under the same vmaps have the same axes.
    varies = tuple((d is not None, *v) for d, v in zip(dims, site.varies))
    n_loops, conds = around(axis_data)
    axis = Axis(
        axis_data.size,
        n_loops,
        spec=axis_data.explicit_mesh_axis,
        name=_compat.name_of(axis_data),
        spmd_name=axis_data.spmd_name,
        flows_backward=site.flows_backward,
    )
    unguarded = any(c not in [g.cond for g in site.guards] for c in conds)
    # The axis stays where it is. To move it would add equations to the user's program,
    # and more of them to its derivatives.
    site = site._replace(
        axes=(axis, *site.axes),
        varies=varies,
        permutations=tuple(map(_with_axis, site.permutations, operands, dims)),
        unguarded=site.unguarded or unguarded,
    )
    return sow_p.bind(edge, *operands, site=site), [None, *dims]


def _sow_jet(primals, series, *, site):
    out = sow_p.bind(*primals, site=site)
    return out, [[jnp.zeros_like(out[0])] * len(series[0]), *series[1:]]


# What `jax.checkpoint` recomputes instead of a sow, so that it need not save the value.
# The site is that of the sow, as it was then.
same_p = jexc.Primitive("same")
same_p.multiple_results = True


def computed_again(saveable, unknown, instantiated, eqn):
    """How `jax.checkpoint` splits an equation of which it saves nothing: what is known
    before the backward pass, and what is computed in there; of the outputs, which are
    unknown, and which come out there; and what else it needs there."""
    del saveable
    every = [True] * len(eqn.outvars)
    pairs = zip(eqn.invars, instantiated)
    missing = [x for x, i in pairs if not i and isinstance(x, jexc.Var)]
    if any(unknown):
        return None, eqn, every, every, missing
    return eqn, eqn, [False] * len(every), every, missing


def _sow_checkpoint(*args):
    known, again, unknown, instantiated, missing = computed_again(*args)
    if known is None:
        return known, again, unknown, instantiated, missing
    site = known.params["site"]
    site = site._replace(splits=(*site.splits, object()))
    known = known.replace(params=dict(site=site))
    again = known.replace(primitive=same_p, effects=frozenset())
    edge, *outvars = known.outvars
    here = listening.value
    if here is None or here.in_while or type(edge) is not jexc.Var:
        return known, again, unknown, instantiated, missing
    # The edge is kept, which costs nothing. So what is computed again is needed for its
    # values only.
    again = again.replace(outvars=[jexc.Var(edge.aval), *outvars])
    return known, again, unknown, [False, *instantiated[1:]], [*missing, edge]


def _same_jvp(primals, tangents, *, site):
    _, *tangents = tangents
    out = same_p.bind(*primals, site=site)
    return out, [_edge_tangent(out[0]), *tangents]


def _same_batch(operands, dims, *, site):
    return same_p.bind(*operands, site=site), [None, *dims[1:]]


_runs_as(same_p, lambda *operands, site: _sow_off(*operands))
same_p.def_abstract_eval(lambda edge, *avals, site: [edge_aval(edge, *avals), *avals])
ad.primitive_jvps[same_p] = _same_jvp
batching.primitive_batchers[same_p] = _same_batch
pe.partial_eval_jaxpr_custom_rules[sow_p] = _sow_checkpoint
_runs_as(sow_p, _sow_impl)
sow_p.def_effectful_abstract_eval(_sow_abstract_eval)
ad.primitive_jvps[sow_p] = _sow_jvp
jet.jet_rules[sow_p] = _sow_jet
_compat.primitive_linearizations[sow_p] = _sow_linearize
ad.primitive_transposes[sow_p] = _sow_transpose
batching.fancy_primitive_batchers[sow_p] = _sow_batch
