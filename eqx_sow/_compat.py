"""Everything that depends on the version of JAX, or on a part of JAX or Equinox that is
not public: each of these says why no public way will do.

Supported: JAX 0.10 to 0.12.
"""

import dataclasses as dc
import functools as ft
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import equinox.internal
import jax
import jax.core
import jax.extend.core as jexc
import jax.numpy as jnp

from ._errors import SowError


# What was not found where it was. Importing never fails for it: `check_supported` does.
_moved: list[str] = []


def find(what: str, find: Callable[[], Any], otherwise: Any = None) -> Any:
    try:
        return find()
    except Exception as e:  # whatever comes of another version of JAX
        _moved.append(f"{what} ({type(e).__name__}: {e})")
        return otherwise


def check_supported() -> None:
    """Raises if this version of JAX or Equinox is not what eqx_sow was written for."""
    if _moved:
        raise SowError(
            f"This version of eqx_sow does not work with JAX {jax.__version__} and "
            f"Equinox {eqx.__version__}. It needs, and does not find: "
            f"{'; '.join(_moved)}. Install a newer eqx_sow, or an older JAX."
        )


def _linearizations() -> dict[Any, Callable]:
    from jax._src.interpreters import ad

    return ad.primitive_linearizations


# No public table: how a primitive is linearized. `_walk/jax_rules.py` says what for.
primitive_linearizations = find("JAX's table of linearizations", _linearizations, {})


def _debug_effect() -> type:
    (effect,) = jax.make_jaxpr(lambda: jax.debug.print(""))().effects
    return type(effect)


# The type of effect that `jax.debug.print` has is allowed everywhere and is kept by
# partial evaluation, and so is a subclass of it. It has no public name.
_DebugEffect: Any = find("the effect of `jax.debug.print`", _debug_effect, jexc.Effect)


class SowEffect(_DebugEffect):
    def __eq__(self, other):
        return type(other) is SowEffect

    def __hash__(self):
        return hash(SowEffect)

    def __repr__(self):
        return "Sow"

    __str__ = __repr__


class TapEffect(_DebugEffect):
    def __eq__(self, other):
        return type(other) is TapEffect

    def __hash__(self):
        return hash(TapEffect)

    def __repr__(self):
        return "Tap"

    __str__ = __repr__


def _ordered_debug_effect() -> Any:
    printing = lambda: jax.debug.print("", ordered=True)
    (effect,) = jax.make_jaxpr(printing)().effects
    return effect


# That of `jax.debug.callback(..., ordered=True)`, which has no public name.
ordered_effect = find("the effect of ordered callbacks", _ordered_debug_effect)


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """The jaxpr without its constants, and these. One class since JAX 0.11."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def close_jaxpr(jaxpr: Any) -> Any:
    return jexc.ClosedJaxpr(jaxpr, ())


def is_jaxpr(x: Any) -> bool:
    return isinstance(x, jexc.Jaxpr | jexc.ClosedJaxpr)


def scan_arity(params: dict[str, Any]) -> tuple[int, int]:
    """How many constants and carries a scan has. FlatTrees since JAX 0.11."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def manual_axes(params: dict[str, Any]) -> frozenset[Any]:
    """The mesh axes that a `jax.shard_map` makes manual. Renamed in JAX 0.10.2."""
    name = "newly_manual_axes"
    return params[name] if name in params else params["manual_axes"]


def _current_trace() -> Any:
    with jexc.take_current_trace() as trace:
        return trace


def _staging_trace_type() -> type:
    found = []
    jax.make_jaxpr(lambda: found.append(type(_current_trace())))()
    return found[0]


_StagingTrace = find("the trace of `jax.make_jaxpr`", _staging_trace_type)
_EvalTrace = find("the trace of eager calls", lambda: type(_current_trace()))


def is_eager() -> bool:
    """Whether nothing is being traced."""
    return type(_current_trace()) is _EvalTrace


def _batch_tracer_type() -> type:
    found = []
    look = jax.vmap(lambda x: found.append(type(x)))
    jax.make_jaxpr(look)(jax.ShapeDtypeStruct((1,), "float32"))
    return found[0]


_BatchTracer: Any = find("the tracer of `jax.vmap`", _batch_tracer_type, ())


def has_lanes(xs: Sequence[Any]) -> bool:
    """Whether a `jax.vmap` is what is being traced right now, and any of these vary
    over it. There is no public way to ask."""
    trace = _current_trace()
    return any(isinstance(x, _BatchTracer) and x._trace is trace for x in xs)


_call_p = jexc.primitives.closed_call_p


def splice(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr. While a jaxpr is being built, that is one equation: binding
    each of the equations again would double the time that tracing takes."""
    trace = _current_trace()
    atoms = (*jaxpr.invars, *jaxpr.outvars)
    if (
        type(trace) is not _StagingTrace
        # One equation is as cheap to bind, save a call: see below.
        or (len(jaxpr.eqns) < 2 and all(e.primitive is not _call_p for e in jaxpr.eqns))
        # Sows of different branches are to be found side by side.
        or any(_call_p.call_primitive or type(e) is SowEffect for e in jaxpr.effects)
        or not all(isinstance(v.aval, jax.core.ShapedArray) for v in atoms)
    ):
        return jax.core.eval_jaxpr(jaxpr, consts, *args)
    jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    params = dict(call_jaxpr=close_jaxpr(jaxpr))
    # NumPy arrays that a function closes over stay what they are in its jaxpr.
    args = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in (*consts, *args)]
    if not _call_p.call_primitive:  # JAX 0.11 and later
        return _call_p.bind(*args, **params)
    # Up to JAX 0.10 binding it evaluates the jaxpr once more. The method does not.
    return trace.process_primitive(_call_p, args, params)


@ft.cache
def _with_around(cls: type) -> type:
    return dc.make_dataclass(cls.__name__, [("around", Any)], bases=(cls,), frozen=True)


def with_around(axis_data: Any, around: Any) -> Any:
    """What JAX's batching rules are told of an axis, and what is between the vmap and
    what they batch. JAX calls the rules of a custom_jvp function later, where nothing
    else would tell."""
    fields = {f.name: getattr(axis_data, f.name) for f in dc.fields(axis_data)}
    cls = type(axis_data) if "around" in fields else _with_around(type(axis_data))
    return cls(**{**fields, "around": around})


def _custom_vmap_primitive() -> jexc.Primitive:
    fn = jax.custom_batching.custom_vmap(lambda x: x)
    fn.def_vmap(lambda size, batched, x: (x, batched[0]))
    return jax.make_jaxpr(fn)(0).eqns[0].primitive


def _noinline_cache() -> Any:
    from equinox.internal import _noinline

    return _noinline._cache_filter_eval_shape


_noinline_shapes = find("Equinox's cache of `noinline`", _noinline_cache)


def forget_noinline() -> None:
    """Equinox keeps the shapes of noinlined functions where JAX's caches do not reach,
    and has no public way to look at the functions again."""
    _noinline_shapes.cache_clear()


def _shard_map_primitive() -> jexc.Primitive:
    spec = jax.sharding.PartitionSpec()
    mesh = jax.sharding.AbstractMesh((1,), ("x",))
    fn = jax.shard_map(lambda x: x, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.make_jaxpr(fn)(0).eqns[0].primitive


def _jit_equation() -> Any:
    return jax.make_jaxpr(jax.jit(lambda x: x))(0).eqns[0]


@ft.cache
def unspecified() -> tuple[dict[str, Any], dict[str, Any]]:
    """What `jax.jit` puts for each input, and for each output, that has
    no specified sharding or layout."""
    p = _jit_equation().params
    inputs = ("in_shardings", "in_layouts", "donated_invars")
    outputs = ("out_shardings", "out_layouts")
    return {k: p[k][0] for k in inputs}, {k: p[k][0] for k in outputs}


def call_that_keeps_effects(eqn: Any) -> Any:
    """A call as an equation of `jax.jit`, if JAX's partial evaluation (up to 0.10)
    would lose the effects in it."""
    if eqn.primitive is not _call_p or not _call_p.call_primitive:
        return eqn
    template = _jit_equation()
    inputs, outputs = unspecified()
    params = {
        **template.params,
        **{k: (v,) * len(eqn.invars) for k, v in inputs.items()},
        **{k: (v,) * len(eqn.outvars) for k, v in outputs.items()},
        "jaxpr": eqn.params["call_jaxpr"],
    }
    return eqn.replace(primitive=template.primitive, params=params)


def _transposed() -> Any:
    # Traced, not run: importing starts no backend.
    double = lambda x: jax.linear_transpose(lambda x: 2.0 * x, x)(x)
    return jax.make_jaxpr(double)(1.0).eqns[-1].source_info.name_stack.stack[0]


# What transposition writes on a name stack: not a string, as users' scopes may be any.
_TRANSPOSED = find("what transposition leaves on a name stack", _transposed)


def in_backward_pass(eqn: Any) -> bool:
    """Whether an equation was put there by transposition."""
    return _TRANSPOSED in eqn.source_info.name_stack.stack


def _noinline_primitive() -> jexc.Primitive:
    fn = eqx.internal.noinline(lambda x: x)
    return jax.make_jaxpr(fn)(0).eqns[-1].primitive


# These have no public name.
noinline_p: Any = find("the primitive of `noinline`", _noinline_primitive)
custom_vmap_p: Any = find("the primitive of `custom_vmap`", _custom_vmap_primitive)
shard_map_p: Any = find("the primitive of `shard_map`", _shard_map_primitive)
FilterJit: Any = type(eqx.filter_jit(lambda x: x))
Jit: Any = type(jax.jit(lambda x: x))


def unmapped(eqn: Any) -> tuple[jexc.Primitive, dict[str, Any]]:
    """The primitive of an equation, and its parameters. Under a vmap, primitives of
    Equinox are among the parameters of another one."""
    primitive, params = eqn.primitive, eqn.params
    while primitive.name == "vprim":
        primitive, params = params["prim"], dict(params["params"])
    return primitive, params


def varying(x: Any) -> frozenset[Any]:
    """The mesh axes that an array (or its aval), inside a `jax.shard_map`, varies
    over."""
    aval: Any = x if isinstance(x, jax.core.AbstractValue) else jax.typeof(x)
    return aval.mat.varying if hasattr(aval, "mat") else aval.vma


_libraries = tuple(
    str(Path(str(module.__file__)).parent) + "/"
    for module in (jax, eqx, sys.modules["eqx_sow"])
)


def is_library(file: str) -> bool:
    return file.startswith(_libraries)


def user_line() -> str:
    """`file:line` of the innermost frame that is neither ours nor JAX's nor
    Equinox's."""
    frame = sys._getframe(2)
    file = frame.f_code.co_filename
    while is_library(file) and frame.f_back is not None:
        frame = frame.f_back
        file = frame.f_code.co_filename
    return f"{file}:{frame.f_lineno}"


@dc.dataclass(frozen=True)
class CallSite:
    """Where in a user's code an equation was traced: for each frame, from outside in,
    its code and the position in there. Differentiation keeps it. Two calls in one line
    have two, but all iterations of a Python loop have one."""

    frames: tuple[tuple[Any, int], ...]
    _hash: int

    def __hash__(self):
        return self._hash

    def is_after(self, other: "CallSite") -> bool:
        """Whether this code comes after the other in one function. Unless that has a
        loop, it runs later."""
        for (code, at), (other_code, other_at) in zip(self.frames, other.frames):
            if (code, at) != (other_code, other_at):
                return code is other_code and at > other_at
        return False


def call_site(eqn: Any) -> CallSite:
    traceback = eqn.source_info.traceback
    frames = [] if traceback is None else list(zip(*traceback.raw_frames()))
    own = tuple((c, at) for c, at in frames[::-1] if not is_library(c.co_filename))
    return CallSite(own, hash(own))
