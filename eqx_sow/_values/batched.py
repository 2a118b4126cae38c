"""`batched`: a transform that sees all lanes."""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax.extend.core as jexc
from jax.interpreters import ad, batching, mlir

from .._errors import SowError
from .._frames import api_boundary


_T = TypeVar("_T")


class Batched(eqx.Module):
    """What `batched` returns. `entry.transformed` knows it, and calls `fn` itself."""

    fn: Callable[[Any], Any]

    @api_boundary
    def __call__(self, value: Any) -> Any:
        raise TypeError(
            "What `eqx_sow.batched(fn)` returns cannot be called: it is for "
            "`transform=`, alone or in a dict of names. To compute several things, put "
            "it around all: `batched(lambda x: {'norm': ..., 'mean': ...})`."
        )


@api_boundary
def batched(fn: Callable[[Any], _T]) -> Callable[[Any], _T]:
    """For `transform=`: a function that sees all lanes of the `vmap`s around a sow.

    A transform sees the value as the code at the sow does: of a model under `jax.vmap`,
    that of one example. `batched(fn)` sees the whole batch, and what it returns is one
    value for it. So a norm over the batch, `x.T @ x / len(x)` or a histogram is one
    reduction, and nothing of the size of the batch is kept.

    **Arguments:**

    - `fn`: a function of the value, in which arrays have a leading axis for each
        `vmap` that the value varies over, outermost first. Loops give none: each
        iteration is transformed by itself. An array that is the same for all lanes has
        one cotangent, the total, and that comes without an axis.

    **Returns:**

    Something to pass as `transform=`, or as a value of the dict there, to
    [`eqx_sow.save_intermediates`][] or [`eqx_sow.tap`][]. What comes back has no axes
    for the lanes. A batch that is sharded over a mesh is reduced over its devices; in a
    `jax.shard_map`, each device sees its own part.

    **Raises:**

    `TypeError` if `fn` is not a function. [`eqx_sow.SowError`][], when it is used, if
    the sow is in a branch or a loop that only some lanes run, or if a `jax.vmap` comes
    after `save_intermediates`: put it inside, `save_intermediates(jax.vmap(fn))`.

    !!! example

        ```python
        import equinox as eqx
        import eqx_sow
        import jax
        import jax.numpy as jnp

        model = eqx.nn.MLP(2, 1, 8, 2, key=jax.random.key(0))
        norms = eqx_sow.save_intermediates(
            jax.vmap(model),
            capture=eqx.nn.Linear,
            transform=eqx_sow.batched(jnp.linalg.norm),
        )
        _, intermediates = norms(jnp.ones((16, 2)))
        intermediates["layers/0"]["primal"].shape  # ()
        ```
    """
    if not callable(fn):
        raise TypeError(
            f"`eqx_sow.batched(fn)` takes a function of the value, not {fn!r}. Write "
            "`eqx_sow.batched(jnp.linalg.norm)`."
        )
    return Batched(fn)


# Marks that no more lanes may come: a value of all of them has been computed. Tangents
# are not marked, as there may be several for one value (`jax.jacfwd`).
all_lanes_p = jexc.Primitive("all_lanes")


def _more_lanes(operands, dims, *, name, where):
    raise SowError(
        f"`transform=batched(...)` was applied to `sow(..., {name!r})` at {where}, and "
        "a `jax.vmap` came after that, whose lanes it has not seen. Put the vmap "
        "inside: `save_intermediates(jax.vmap(fn), ...)`."
    )


all_lanes_p.def_impl(lambda x, **_: x)
all_lanes_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(all_lanes_p, lambda ctx, x, **_: [x])
batching.primitive_batchers[all_lanes_p] = _more_lanes
ad.primitive_jvps[all_lanes_p] = lambda primals, tangents, **params: (
    all_lanes_p.bind(*primals, **params),
    *tangents,
)
