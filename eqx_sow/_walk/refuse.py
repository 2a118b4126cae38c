"""Errors about sows whose value cannot be had where they are."""

from collections.abc import Iterable
from typing import Any, TYPE_CHECKING

from .. import _compat
from .._errors import SowError, UnsupportedPrimitiveError
from .._mark.site import Site


if TYPE_CHECKING:
    from .handler import Handler


def check_guarded(site: Site) -> None:
    """Raises if it cannot be told whether a sow runs, or only runs again."""
    if site.again is None:
        raise SowError(
            f"`sow(..., {site.name!r})` at {site.where} is in the `bwd` of a "
            "`jax.custom_vjp` that only some lanes of a `jax.vmap` call, and its name "
            "is that of a sow in the forward pass: whether it repeats that one cannot "
            "be told. Give it another name, with `eqx_sow.scope(...)` in the `bwd`, or "
            "leave the sow out, by `names` or another `tag`."
        )
    if site.unguarded:
        raise SowError(
            f"`sow(..., {site.name!r})` at {site.where} is in the derivative rule of a "
            "function (`jax.custom_jvp`, `jax.custom_vjp`) that only some lanes of a "
            "`jax.vmap` call, and the vmap came before the derivative: whether the sow "
            "runs cannot be told. Take the derivative inside the vmap, "
            "`jax.vmap(jax.grad(fn))`, or leave the sow out, by `names` or another "
            "`tag`."
        )


_MOVE = "Move the sow out of it."
NO_RULE = "eqx_sow has no rule for it"
TEACH = (
    f"{_MOVE} If the primitive is yours, `@eqx_sow.register_rule(primitive)` teaches "
    "eqx_sow about it."
)
OVER_AND_OVER = "it evaluates its function over and over"


def is_solver(eqn: Any) -> bool:
    """Whether it evaluates a linear function over and over, and leaves its effects
    out."""
    primitive, _ = _compat.unmapped(eqn)
    return primitive.name in ("linear_solve", "custom_linear_solve")


def refuse(
    handler: "Handler", eqn: Any, inside: Iterable[Site], why: str, remedy: str = _MOVE
) -> None:
    """Raises if the handler wants any of the sows inside an equation."""
    for site in filter(handler.wants, inside):
        raise UnsupportedPrimitiveError(unsupported(site, eqn, why, remedy))


def unsupported(site: Site, eqn: Any, why: str, remedy: str = _MOVE) -> str:
    primitive, _ = _compat.unmapped(eqn)
    return (
        f"`sow(..., {site.name!r})` at {site.where} is inside the primitive "
        f"`{primitive}`: {why}, so the value cannot be captured or planted. "
        f"{remedy} Or leave it out, by `names` or another `tag`."
    )
