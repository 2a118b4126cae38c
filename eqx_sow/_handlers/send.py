"""How `tap` sends from the device to the host: two primitives."""

import dataclasses as dc
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.extend.core as jexc
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir, partial_eval as pe

from .. import _compat
from .._errors import SowError
from .._walk.sows import variables


_effect = _compat.TapEffect()

# Operands: the count, the indices of the device, what ran if `guarded`, the values.
send_p = jexc.Primitive("tap")
send_p.multiple_results = True


def _send_effects(*avals, delivery):
    del avals
    return [], {_compat.ordered_effect if delivery.ordered else _effect}


def _send_impl(*operands, delivery):
    delivery(*operands)
    return []


def _send_lowered(*operands, delivery):
    jax.debug.callback(delivery, *operands, ordered=delivery.ordered)
    return []


def _send_batch(axis_data, operands, dims, *, delivery):
    n = 1 + len(delivery.devices)
    if dims[0] is not None:
        # So it is inside a loop or a branch with a predicate that has lanes.
        raise SowError(
            f"`sow(..., {delivery.name!r})` at {delivery.where} is tapped in a loop or "
            "a branch that only some lanes of a `jax.vmap` run, and the vmap came "
            "after the tap: which lanes run cannot be told. Put the vmap inside: "
            "`tap(jax.vmap(fn), ...)`."
        )
    has = tuple(
        (d is not None, *h) for d, h in zip(dims[n:], delivery.has, strict=True)
    )
    operands = [
        x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims)
    ]
    lanes = (axis_data.size, *delivery.lanes)
    send_p.bind(*operands, delivery=dc.replace(delivery, lanes=lanes, has=has))
    return [], []


def _send_checkpoint(saveable, unknown, instantiated, eqn):
    del saveable
    if any(unknown):
        missing = [x for x, i in zip(eqn.invars, instantiated) if not i]
        return None, eqn, [], [], variables(missing)
    # What a backward pass computes again is not told again.
    return eqn, None, [], [], []


def _send_remat(trace, *operands, **params):
    del trace
    return send_p.bind(*operands, **params), (), lambda *_: []


send_p.def_impl(_send_impl)
send_p.def_effectful_abstract_eval(_send_effects)
ad.primitive_jvps[send_p] = lambda primals, tangents, **params: (
    send_p.bind(*primals, **params),
    [],
)
ad.primitive_transposes[send_p] = lambda cts, *operands, **params: (
    [None] * len(operands)
)
batching.fancy_primitive_batchers[send_p] = _send_batch
pe.partial_eval_jaxpr_custom_rules[send_p] = _send_checkpoint
_compat.remat_rules[send_p] = _send_remat
_lowering = mlir.lower_fun(_send_lowered, multiple_results=True)
mlir.register_lowering(send_p, _lowering)
# As for JAX's own callbacks, which have a channel each there.
mlir.register_lowering(send_p, _lowering, platform="tpu", cacheable=False)


# A `lax.cond` on it stays one under the vmaps to come.
@jax.custom_batching.custom_vmap
def any_lane(x: Any) -> Any:
    """Whether it is true in any lane."""
    return jnp.any(x)


@any_lane.def_vmap
def _any_lane_batch(size, batched, x):
    del size, batched
    return any_lane(x), False


def only_if(predicate: Any, fn: Callable[[], None]) -> None:
    if isinstance(predicate, jax.core.Tracer):
        jax.lax.cond(predicate, lambda: fn(), lambda: None)
    elif predicate:
        fn()
