"""The primitive underneath `sow`.

A call of `sow` becomes one equation whose operands are the array leaves of the value
and whose single parameter, a `Site`, is everything static about it. Differentiation and
batching rewrite the `Site`; nothing about a sow is ever kept outside of its equation.
"""

import dataclasses as dc
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.extend.core as jexc
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.interpreters import ad, batching, mlir, partial_eval as pe

from . import _compat
from ._errors import SowError


class Const:
    """A static leaf, compared so that two leaves are equal only if no program could
    tell them apart: `1`, `1.0` and `True` differ, and so do `0.0` and `-0.0`."""

    __slots__ = ("value", "_hash")

    def __init__(self, value: Any):
        self.value = value
        try:
            self._hash = hash((type(value), value))
        except Exception:  # A user's `__hash__` may raise anything.
            self._hash = id(value)

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        if type(other) is not Const:
            return False
        a, b = self.value, other.value
        if a is b:
            return True
        if type(a) is not type(b):
            return False
        if isinstance(a, float):
            return a == b and math.copysign(1, a) == math.copysign(1, b)
        if isinstance(a, complex):
            return repr(a) == repr(b)
        try:
            return bool(a == b)
        except Exception:  # A user's `__eq__` may, and NumPy's `__bool__` does.
            return False

    def __repr__(self):
        return repr(self.value)


class Same:
    """Something that is equal to itself alone. To compare what may hold arrays would
    compute, and add to the program."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self):
        return id(self.value)

    def __eq__(self, other):
        return type(other) is Same and self.value is other.value


@dc.dataclass(frozen=True)
class NoTangent:
    """A leaf (an integer, a key) that has no tangent, of this shape."""

    shape: tuple[int, ...]


class _Operand:
    """A leaf that is an operand of the equation."""

    def __repr__(self):
        return "*"


OPERAND = _Operand()


def take_apart(tree: Any) -> tuple[list[Any], Const, tuple[Any, ...]]:
    """The arrays of a PyTree, its treedef, and for each leaf `OPERAND` or a `Const`."""
    leaves, treedef = jtu.tree_flatten(tree)
    found = list(map(eqx.is_array, leaves))
    static = tuple(OPERAND if d else Const(x) for d, x in zip(found, leaves))
    return [x for d, x in zip(found, leaves) if d], Const(treedef), static


def rebuild(
    treedef: Const, leaves: Sequence[Any], values: Sequence[Any], lead=()
) -> Any:
    """The PyTree. Leaves with no tangent are zeros of JAX's dtype `float0`."""
    operand = iter(values)
    return jtu.tree_unflatten(
        treedef.value,
        [
            next(operand)
            if x is OPERAND
            else np.zeros((*lead, *x.shape), jax.dtypes.float0)
            if isinstance(x, NoTangent)
            else x.value
            for x in leaves
        ],
    )


class Axis(NamedTuple):
    """A leading axis of a sow, which a vmap or a loop gave to it.

    `lane` is true if it is that of a vmap. `loops` is how many loops run between the
    vmap and the sow: the axis belongs outside of theirs. `has` says which operands
    really have the axis; the others are the same all along it. An axis of a `shard_map`
    has the name of the `mesh` axis.
    """

    size: int
    has: tuple[bool, ...]
    loops: int = 0
    lane: bool = True
    mesh: Hashable = None

    @property
    def kind(self) -> Hashable:
        return self.size, self.loops, self.lane, self.mesh


Guards = tuple[tuple[Any, int, int], ...]

# The same, each with where its operand comes from: a variable of the jaxpr at hand;
# outside of that jaxpr, its place among the operands of the equation, counted from the
# last one. A cond in a jaxpr that runs twice is told apart by it.
Located = tuple[tuple[Any, int, int, Any], ...]


class Site(NamedTuple):
    """The static part of a sow.

    For each of `guards` there is one more operand, before the others: a boolean that
    says whether the sow really runs, as in a loop under a batched predicate, or the
    index of the branch that does. The guard then says which cond, which of its branches
    the sow is in, and how many there are.

    `replay` is only set on what was captured: a backward pass ran it once more.
    `unguarded` says that there should be more guards: JAX calls derivative rules when
    it is too late for these.
    `differentiated` is how many derivatives of it there are already. `orders` tells,
    for each of `modes`, how many there were before that one: two derivatives of one
    value, as in `grad(grad(f))`, are told apart by it.
    """

    name: str
    tag: Hashable
    treedef: Const
    leaves: tuple[Any, ...]
    modes: tuple[str, ...] = ()
    orders: tuple[int, ...] = ()
    differentiated: int = 0
    axes: tuple[Axis, ...] = ()
    guards: Guards = ()
    replay: bool = False
    unguarded: bool = False
    spec: Const | None = None
    where: str = ""

    @property
    def mode(self) -> str:
        return ".".join(self.modes) if self.modes else "primal"

    @property
    def key(self) -> tuple[str, str, tuple[int, ...]]:
        return self.name, self.mode, self.orders

    def __repr__(self):
        return f"{self.name}:{self.mode}"

    def select(self, keep: list[bool]) -> tuple[Axis, ...]:
        """The axes, once only the operands in `keep` are left."""
        return tuple(
            a._replace(has=tuple(h for h, k in zip(a.has, keep) if k))
            for a in self.axes
        )

    def has(self, i: int) -> tuple[bool, ...]:
        """Which of the axes operand `i` has."""
        return tuple(a.has[i] for a in self.axes)

    def shape(self, i: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that the code at the sow sees, from that of operand `i`."""
        return tuple(shape[sum(self.has(i)) :])


class Listening(NamedTuple):
    """`loops`: how many loops are around whatever is being vmapped right now. `scope`:
    what goes before the names of the sows that follow. `found`: a list to which sows
    add their sites, and do nothing else."""

    loops: int = 0
    scope: str = ""
    found: "Same | None" = None


# Not `None` while somebody traces a program in order to see or change its sows. It is
# part of the key of every cache of JAX's, so a jitted function is traced once for each
# value.
listening = jax.make_user_context(None)


class Around(NamedTuple):
    """What is between a vmap and what is being batched: how many loops, and which conds
    and loops run for some lanes only, as `Site.guards` has them."""

    loops: int = 0
    conds: tuple[Any, ...] = ()


def around(axis_data: Any) -> Around:
    # Some rules of JAX's, as that of `shard_map`, make other axis data.
    here = listening.value or Listening()
    return getattr(axis_data, "around", Around(here.loops))


class _SowPrimitive(jexc.Primitive):
    """Does nothing while nobody listens: a derivative rule may have kept a jaxpr with
    sows, and be called after the program that it belongs to was looked at."""

    multiple_results = True

    def bind(self, *operands, site):
        here = listening.value
        if here is not None and here.found is None:
            return super().bind(*operands, site=site)
        if here is not None:
            here.found.value.append(site)
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


def _is_zero(tangent, primal):
    """Whether a tangent is zero, and could be otherwise."""
    dtype = jexc.primal_dtype_to_tangent_dtype(jnp.result_type(primal))
    return isinstance(tangent, ad.Zero) and dtype != jax.dtypes.float0


def _sow_jvp(primals, tangents, *, site):
    n = site.differentiated
    out = sow_p.bind(*primals, site=site._replace(differentiated=n + 1))
    tangents = [
        ad.instantiate_zeros(t) if _is_zero(t, x) else t
        for t, x in zip(tangents, primals)
    ]
    n_guards = len(site.guards)
    keep = [i < n_guards or not isinstance(t, ad.Zero) for i, t in enumerate(tangents)]
    operand = iter(range(n_guards, len(primals)))
    leaves = []
    for leaf in site.leaves:
        if leaf is OPERAND and not keep[i := next(operand)]:
            leaf = NoTangent(site.shape(i, jnp.shape(primals[i])))
        leaves.append(leaf)
    tangent_site = site._replace(
        leaves=tuple(leaves),
        modes=(*site.modes, "tangent"),
        orders=(*site.orders, n),
        differentiated=0,
        axes=site.select(keep),
        spec=None,
    )
    kept = [
        *primals[:n_guards],
        *[t for t, k in zip(tangents[n_guards:], keep[n_guards:]) if k],
    ]
    tangent_out = iter(sow_p.bind(*kept, site=tangent_site))
    tangent_out = [next(tangent_out) if k else t for t, k in zip(tangents, keep)]
    # Guards are not differentiated: what came back for them is no tangent.
    tangent_out[:n_guards] = tangents[:n_guards]
    return out, tangent_out


def _sow_transpose(cts, *operands, site):
    n_guards = len(site.guards)
    modes = site.modes[:-1] if site.modes[-1:] == ("tangent",) else site.modes
    cts = cts[n_guards:]
    # A value that was moved out of its loop has one cotangent: the total.
    axes = tuple(a for a in site.axes if a.lane)
    sown = sow_p.bind(
        *operands[:n_guards],
        *map(ad.instantiate_zeros, cts),
        site=site._replace(modes=(*modes, "cotangent"), axes=axes, spec=None),
    )
    return [None] * n_guards + [
        None if not ad.is_undefined_primal(x) else ct if type(ct) is ad.Zero else s
        for x, ct, s in zip(operands[n_guards:], cts, sown[n_guards:])
    ]


def _sow_batch(axis_data, operands, dims, *, site):
    # Also if nothing varies: so all sows under the same vmaps have the same axes.
    has = tuple(d is not None for d in dims)
    loops, conds = around(axis_data)
    axis = Axis(axis_data.size, has, loops)
    unguarded = any(c not in [g[0] for g in site.guards] for c in conds)
    site = site._replace(unguarded=site.unguarded or unguarded)
    operands = [
        x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims)
    ]
    out = sow_p.bind(*operands, site=site._replace(axes=(axis, *site.axes)))
    return out, [0 if h else d for h, d in zip(has, dims)]


def _sow_lowering(ctx, *operands, site):
    del ctx
    return _sow_impl(*operands, site=site)


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
mlir.register_lowering(sow_p, _sow_lowering)
