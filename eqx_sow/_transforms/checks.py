"""What is checked once a program has been traced: that options select something, and
that what they select can be had."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from .._names import check_known
from .._values.modes import is_outer_cotangent
from .options import Options
from .program import Program


def is_unmarked(options: Options, *args: Any) -> bool:
    """Whether there is a model among the arguments, and nothing asks for its layers."""
    if options.capture is not None:
        return False
    leaves = jtu.tree_leaves(args, is_leaf=_is_model)
    functions = [x for x in leaves if inspect.isfunction(x)]
    held = [x for f in functions for x in inspect.getclosurevars(f).nonlocals.values()]
    return any(map(_is_model, [*leaves, *held]))


def _is_model(x: Any) -> bool:
    wrapper = isinstance(x, eqx.Partial) or hasattr(type(x), "__wrapped__")
    return isinstance(x, eqx.Module) and not wrapper


def check_modes(call: str, options: Options, there: Iterable[str]) -> None:
    check_known(
        f"{call}(..., modes=...)",
        options.modes,
        there,
        "is a mode that no selected sow of this program has",
        kind="modes",
    )


def wanted(options: Options, mode_of: Mapping[Any, str]) -> dict[Any, str]:
    """Of the labels of modes, those that are asked for."""
    modes = options.modes
    return {k: m for k, m in mode_of.items() if modes is None or m in modes}


def check_second_derivatives(
    program: Program, options: Options, mode_of: Mapping[Any, str]
) -> None:
    program.check_recomputed(
        [key for key, mode in mode_of.items() if is_outer_cotangent(mode)],
        options.tag,
        'Leave this derivative out, `modes=("primal", "cotangent")`, or take the '
        "`jax.checkpoint` away.",
    )
