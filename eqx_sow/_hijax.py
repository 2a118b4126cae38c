"""Primitives that are objects with methods.

`jax.experimental.hijax.HiPrim` is public. The primitive underneath is not, nor are
JAX's own subclasses (`JAX_CUSTOM_VJP3`, `JAX_REMAT3`).
"""

import contextlib
import copy
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.hijax
import jax.extend.core as jexc

from ._compat import equation, find
from ._errors import SowError


def _hi_primitive() -> jexc.Primitive:
    class Identity(HiPrim):
        def __init__(self, aval):
            self.in_avals, self.out_aval, self.params = (aval,), aval, {}
            super().__init__()

    return equation(lambda x: Identity(jax.typeof(x))(x)).primitive


# From JAX 0.12 on. Else no object is one, and the primitive is `None`.
HiPrim: Any = getattr(jax.experimental.hijax, "HiPrim", ())
hi_p: Any = find("the primitive of `HiPrim`", _hi_primitive) if HiPrim else None


def hi_with_params(prim: Any, fn: Callable[[Any], Any]) -> Any:
    """The same `HiPrim`, with `fn` applied to each of its parameters. Its effects are
    those of the jaxprs in there: JAX's constructors each take something else."""
    new = copy.copy(prim)
    new.params = {name: fn(x) for name, x in prim.params.items()}
    solver = new.params.get("solve_jaxpr")
    if solver is not prim.params.get("solve_jaxpr"):
        # A `lax.custom_root` holds it as a function, too.
        run = jexc.jaxpr_as_fun(solver)
        solve = lambda *args: prim.out_tree.unflatten(run(*jax.tree.leaves(args)))
        new.params["solve"] = solve
    new.__dict__.update(new.params)
    before, after = (
        {e for x in p.params.values() for e in getattr(x, "effects", ())}
        for p in (prim, new)
    )
    new.effects = frozenset(prim.effects - (before - after) | (after - before))
    return new


# Weak, so that a class which a function makes is freed.
_within: weakref.WeakValueDictionary[type, Any] = weakref.WeakValueDictionary()


def _hi_within(cls: Any) -> Any:
    if cls in _within or cls in _within.values():
        return _within.get(cls, cls)

    def method(name):
        def call(self, *args):
            with self._within():
                return getattr(super(new, self), name)(*args)

        return call

    # What is not overridden stays so: JAX looks.
    names = [n for n in _HI_METHODS if getattr(cls, n, None) is not getattr(HiPrim, n)]
    body = {
        **{name: method(name) for name in names},
        "__module__": cls.__module__,
        # A jaxpr that JAX keeps for one of them has the names of its scope.
        "__eq__": lambda self, other: (
            cls.__eq__(self, other) and self._within == other._within
        ),
        "__hash__": cls.__hash__,
        "_within": contextlib.nullcontext,
    }
    new: Any = type(cls.__name__, (cls,), body)
    _within[cls] = new
    return new


# Those that call functions of the user's.
_HI_METHODS = [
    *("expand", "batch", "transpose", "remat", "jvp", "lin", "linearized"),
    *("vjp_fwd", "vjp_bwd", "vjp_bwd_retval", "vjp_bwd_retval_logs"),
]


def hi_within(prim: Any, context: Callable[[], Any]) -> Any:
    """The same `HiPrim`, whose methods are called in the context that `context`, which
    is compared, returns. What is such a one already stays as it is."""
    if "_within" in vars(prim):
        return prim
    new = copy.copy(prim)
    new.__class__ = _hi_within(type(prim))
    # No parameter: a user's `batch` may pass those on to the class.
    new._within = context
    return new


def is_users(prim: Any) -> bool:
    """Whether a `HiPrim` is not one of JAX's, which hold jaxprs: it may call a function
    that has never been traced."""
    return not type(prim).__module__.startswith("jax.")


def classic_form(prim: Any) -> tuple[jexc.Primitive, dict[str, Any]] | None:
    """What `jax.checkpoint` and `checkpoint_name` bind without `JAX_REMAT3`, for what
    they bind with it. In the new form JAX evaluates the jaxpr a second time, for the
    backward pass, and only a private table could tell that from the first."""
    kind, params = type(prim).__name__, prim.params
    if params.keys() == {"jaxpr", "policy", "prevent_cse"}:
        return jexc.primitives.remat_p, {**params, "differentiated": False}
    if kind == "CheckpointName" and params.keys() == {"name"}:
        return jexc.primitives.name_p, params
    return None


# What JAX will do one day, and can be asked to do now.
_NEXT = "jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3"


def check_supported() -> None:
    """Raises if JAX is asked to do so, and is too old for that."""
    early = [f for f in _NEXT if hi_p is None and getattr(jax.config, f, False)]
    if early:
        raise SowError(
            f"With JAX {jax.__version__}, eqx_sow cannot see what `{early[0].upper()}` "
            "makes of `jax.checkpoint` and custom derivative rules. Leave it off, or "
            "use JAX 0.12 or later."
        )
