"""Everything that depends on the version of JAX, or on a part of JAX or Equinox that is
not public: each of these says why no public way will do.

Supported: JAX 0.10.2 to 0.12.
"""

import contextlib
import copy
import dataclasses as dc
import functools as ft
import importlib
import itertools as it
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import equinox as eqx
import equinox.internal
import jax
import jax.core
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.interpreters import ad
from jax.sharding import PartitionSpec as P

from ._errors import SowError


NEWEST_TESTED = "0.12.0.1"
_T = TypeVar("_T")


def _numbers(version: str) -> tuple[int, ...]:
    """`(0, 13, 0)`, of `0.13.0.dev20270101` as well."""
    parts = it.takewhile(str.isdecimal, version.split("."))
    return tuple(map(int, parts))


def is_untested() -> bool:
    """Whether JAX is newer than all that were tested."""
    return _numbers(jax.__version__) > _numbers(NEWEST_TESTED)


class cached_property(Generic[_T]):
    """That of Python 3.12. In Python 3.11, that of `functools` holds a lock for all
    objects while it computes, which may be to trace functions of the user's: if these
    wait for another thread, that must not wait for the lock."""

    def __init__(self, fn: Callable[[Any], _T]):
        self._fn = fn

    def __set_name__(self, owner: Any, name: str):
        self._name = name

    def __get__(self, instance: Any, owner: Any) -> _T:
        return instance.__dict__.setdefault(self._name, self._fn(instance))


# What was not found where it was. Importing never fails for it: `check_supported` does.
_moved: list[str] = []


def find(what: str, look: Callable[[], Any], otherwise: Any = None) -> Any:
    """A part of JAX or Equinox that is not public, where `look` finds it. `what` is how
    the message of `check_supported` calls it, if it has moved."""
    try:
        return look()
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


def _in_jax(module: str, name: str) -> Callable[[], Any]:
    """A private name. Each use has a comment that says why no public one will do."""
    return lambda: getattr(importlib.import_module(f"jax._src.{module}"), name)


# How a primitive is linearized is in no public table. `_walk/jax_rules.py` says what
# for. JAX linearizes what is not in there by the other one.
primitive_linearizations = find(
    "JAX's table of linearizations",
    _in_jax("interpreters.ad", "primitive_linearizations"),
    {},
)
linearize_by_tangents: Any = find(
    "JAX's linearization by tangents",
    _in_jax("interpreters.ad", "fallback_linearize_rule"),
)


# The rule that JAX 0.10 transposes a scan by is in no public table. It takes zeros for
# all iterations, of an output that does not matter, for those of one.
fancy_transposes: dict[Any, Any] = {}
if jax.__version_info__ < (0, 11):
    fancy_transposes = find(
        "JAX's table of transpositions",
        _in_jax("interpreters.ad", "fancy_transposes"),
        {},
    )


def with_zeros(rule: Callable, cts: Sequence[Any], *args: Any, **params: Any) -> Any:
    """A rule of that table, given all zeros as arrays."""
    return rule([*map(ad.instantiate_zeros, cts)], *args, **params)


# JAX keeps the parameters of the latest 2,048 equations, to find their types again. In
# those of a mark is whatever is static in the value, for which that is too long; and no
# two calls of `sow` have the same. No primitive of others can be without that.
_staging_rules = find(
    "JAX's table of staging rules",
    _in_jax("interpreters.partial_eval", "custom_staging_rules"),
    {},
)


def stage_without_cache(primitive: jexc.Primitive) -> None:
    """Nothing but its equations keeps the parameters of a primitive."""

    def stage(trace, source_info, *tracers, **params):
        avals, effects = primitive.abstract_eval(*[x.aval for x in tracers], **params)
        avals = avals if primitive.multiple_results else [avals]
        outs = trace.emit_eqn(tracers, avals, primitive, params, effects, source_info)
        return outs if primitive.multiple_results else outs[0]

    _staging_rules[primitive] = stage


def _seen(look: Callable, *args: Any, trace: Callable = lambda fn: fn) -> Any:
    """What `look` finds in a function that is being traced. Nothing runs: importing
    eqx_sow starts no backend."""
    found = []
    jax.make_jaxpr(trace(lambda *xs: found.append(look(*xs))))(*args)
    return found[0]


def _size_of_linearization() -> int:
    rule = primitive_linearizations[jax.lax.sin_p]
    return len(_seen(lambda x: rule(False, [True], x, accuracy=None), 1.0))


_SIZE = find("what JAX's linearization rules return", _size_of_linearization)


def linearization(
    outs: Any, nonzeros: Any, residuals: Sequence[Any], tangent: Callable
) -> tuple[Any, ...]:
    """What a rule in that table returns. `tangent(*residuals, tangents=...)` is the
    linear part. JAX 0.12 has one more entry, before the last."""

    def linear(residuals, *tangents):
        return tangent(*residuals, tangents=tangents[_SIZE - 4 :])

    return (outs, nonzeros, residuals, *[None] * (_SIZE - 4), linear)


def _debug_effect(ordered: bool) -> Any:
    printing = lambda: jax.debug.print("", ordered=ordered)
    (effect,) = jax.make_jaxpr(printing)().effects
    return effect


# The type of effect that `jax.debug.print` has is allowed everywhere and is kept by
# partial evaluation, and so is a subclass of it. It has no public name.
DebugEffect: Any = find(
    "the effect of `jax.debug.print`", lambda: type(_debug_effect(False)), jexc.Effect
)
# That of `jax.debug.callback(..., ordered=True)`, which has no public name either.
ordered_effect = find("the effect of ordered callbacks", lambda: _debug_effect(True))


def _axis_effect() -> Any:
    summed = lambda x: jax.lax.psum(x, "i")
    (effect,) = jax.make_jaxpr(summed, axis_env=[("i", 1)])(0.0).effects
    return type(effect)


# What an equation has that uses the name of a vmapped axis. Nothing happens by it.
AxisEffect: Any = find("the effect of the name of an axis", _axis_effect, ())


# All of one class are equal.
@dc.dataclass(frozen=True)
class SowEffect(DebugEffect):
    __str__ = lambda self: "Sow"


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """The jaxpr without its constants, and these. One class since JAX 0.11."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def with_changes(jaxpr: Any, **changes: Any) -> Any:
    """`jaxpr.replace`, which keeps the constants of a closed one."""
    opened, consts = open_jaxpr(jaxpr)
    new = opened.replace(**changes)
    is_open = opened is jaxpr and not consts
    return new if is_open else jexc.ClosedJaxpr(new, consts)


def is_jaxpr(x: Any) -> bool:
    return isinstance(x, (jexc.Jaxpr, jexc.ClosedJaxpr))


def scan_arity(params: dict[str, Any]) -> tuple[int, int]:
    """How many constants and carries a scan has. FlatTrees since JAX 0.11."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def is_exported(lowering: Any) -> bool:
    """Whether the context of a lowering rule is that of a `jax.export`, which says so
    in an attribute without documentation."""
    parameters = getattr(lowering.module_context, "lowering_parameters", None)
    return getattr(parameters, "for_export", False)


def current_trace() -> Any:
    with jexc.take_current_trace() as trace:
        return trace


def _eval_trace_type() -> type:
    # What imports eqx_sow may be a function that is being traced.
    with jax.core.eval_context():
        return type(current_trace())


_StagingTrace = find(
    "the trace of `jax.make_jaxpr`", lambda: _seen(lambda: type(current_trace()))
)
_EvalTrace = find("the trace of eager calls", _eval_trace_type)


def is_eager() -> bool:
    """Whether nothing is being traced."""
    return type(current_trace()) is _EvalTrace


def set_mesh_of(x: Any) -> contextlib.AbstractContextManager[Any] | None:
    """`jax.set_mesh` for the mesh of `x`, if no program is being traced: also in an
    eager `jax.vmap` or derivative, where `jax.set_mesh` refuses, and the arrays that
    the tracers hold have no public name."""
    trace: Any = current_trace()
    while type(trace) is not _StagingTrace and hasattr(trace, "parent_trace"):
        trace = trace.parent_trace
    if type(trace) is not _EvalTrace:
        return None
    while isinstance(x, jax.core.Tracer):
        x = getattr(x, "val", getattr(x, "primal", None))
    try:
        with jax.core.eval_context():
            return jax.set_mesh(x.sharding.mesh)
    except (AttributeError, ValueError):  # another tracer; a `jax.vmap(axis_name=)`
        return None


_BatchTracer: Any = find(
    "the tracer of `jax.vmap`",
    lambda: _seen(type, jax.ShapeDtypeStruct((1,), "float32"), trace=jax.vmap),
    (),
)


def has_lanes(xs: Sequence[Any]) -> bool:
    """Whether a `jax.vmap` is what is being traced right now, and any of these vary
    over it. There is no public way to ask."""
    trace = current_trace()
    return any(isinstance(x, _BatchTracer) and x._trace is trace for x in xs)


# What JAX calls the axis of a `jax.vmap` without an `axis_name`: an object that is in
# no public module.
_no_name = find(
    "the name of an axis without a name",
    lambda: _seen(
        lambda _: current_trace().axis_data.name,
        jax.ShapeDtypeStruct((1,), "float32"),
        trace=jax.vmap,
    ),
)


def name_of(axis_data: Any) -> Any:
    """The `axis_name` of a `jax.vmap`, or `None`."""
    return None if axis_data.name is _no_name else axis_data.name


def as_array(x: Any) -> Any:
    """JAX keeps a literal as a number or a NumPy array, and returns that where it
    evaluates eagerly what only passes it on: `jax.checkpoint(lambda x: x)(1.0)`."""
    known = isinstance(x, int | float | complex | np.ndarray | np.generic)
    known = known and getattr(x, "dtype", None) != jax.dtypes.float0
    return jnp.asarray(x) if known else x


_call_p = jexc.primitives.closed_call_p


def as_call(fn: Callable) -> Callable:
    """`fn`, as one equation that calls its jaxpr. No public function makes one."""

    def call(x):
        jaxpr = jax.make_jaxpr(fn)(x)
        if _call_p.call_primitive:  # up to JAX 0.10
            return fn(x)
        return _call_p.bind(x, call_jaxpr=jaxpr)[0]

    return call


def inline_or_call(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr, open or closed. While another is being built, that is one
    equation: to bind each of its equations again would double the time that tracing
    takes."""
    trace = current_trace()
    jaxpr, consts = open_jaxpr(jaxpr)
    if _vary_more(jaxpr, args):
        return _evaluate_varying(jaxpr, consts, args)
    atoms = (*jaxpr.invars, *jaxpr.outvars)
    if (
        type(trace) is not _StagingTrace
        # One equation is as cheap to bind, save a call: see below.
        or (len(jaxpr.eqns) < 2 and all(e.primitive is not _call_p for e in jaxpr.eqns))
        # Sows of different branches are to be found side by side.
        or any(_call_p.call_primitive or type(e) is SowEffect for e in jaxpr.effects)
        or not all(isinstance(v.aval, jax.core.ShapedArray) for v in atoms)
        # JAX takes a key that comes out of a call for one that was used.
        or getattr(jax.config, "jax_debug_key_reuse", False)
        # In `jax.ensure_compile_time_eval`, nothing is built of what is known.
        or not any(isinstance(x, jax.core.Tracer) for x in (*consts, *args))
    ):
        return list(map(as_array, jax.core.eval_jaxpr(jaxpr, consts, *args)))
    jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    params = dict(call_jaxpr=jexc.ClosedJaxpr(jaxpr, ()))
    # NumPy arrays that a function closes over stay what they are in its jaxpr.
    args = list(map(as_array, (*consts, *args)))
    if not _call_p.call_primitive:  # JAX 0.11 and later
        return _call_p.bind(*args, **params)
    # Up to JAX 0.10 binding it evaluates the jaxpr once more. The method does not.
    return trace.process_primitive(_call_p, args, params)


@ft.cache
def _with_around(cls: type) -> type:
    return dc.make_dataclass(cls.__name__, [("around", Any)], bases=(cls,), frozen=True)


def with_around(axis_data: Any, around: Any) -> Any:
    """The data of a mapped axis, which JAX hands to its batching rules, with one more
    field: what is between the vmap and the equation that is batched. JAX calls the
    rules of a `jax.custom_jvp` function later, and hands them these data too."""
    fields = {f.name: getattr(axis_data, f.name) for f in dc.fields(axis_data)}
    cls = type(axis_data) if "around" in fields else _with_around(type(axis_data))
    return cls(**{**fields, "around": around})


def equation(fn: Callable) -> Any:
    """The last equation of a function of one number. It is traced, not run: importing
    eqx_sow starts no backend."""
    return jax.make_jaxpr(fn)(0.0).eqns[-1]


def _primitive(name: str, wrap: Callable[[Callable], Callable]) -> Any:
    """The primitive, which has no public name, that a wrapped function binds."""
    look = lambda: equation(wrap(lambda x: x)).primitive
    return find(f"the primitive of `{name}`", look)


def _on_mesh(fn: Callable) -> Callable:
    mesh = jax.sharding.AbstractMesh((1,), ("x",))
    return jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P())


custom_vmap_p = _primitive("custom_vmap", jax.custom_batching.sequential_vmap)
shard_map_p = _primitive("shard_map", _on_mesh)


# Those of the transformations below that this JAX has, each under its name.
annotations: dict[str, Callable[[Callable], Callable]] = {}


def _annotation(name: str, wrap: Callable[[Any, Callable], Callable]) -> Any:
    """The primitive of a call that only says something about a function, which has no
    public name either. `None`, if this JAX has none.

    Some of them hide the effects of the jaxpr that they call. JAX would drop the
    equation, and with it the marks, if nothing is done with what it returns."""
    module, name = name.rsplit(".", 1)
    try:
        fn = getattr(importlib.import_module(module), name)
        primitive: Any = equation(wrap(fn, lambda x: x)).primitive
    except Exception:  # this version of JAX has none, or has it elsewhere
        return None
    annotations[name] = ft.partial(wrap, fn)
    plain = primitive.abstract_eval

    @primitive.def_effectful_abstract_eval
    def _(*avals, **params):
        outs, effects = plain(*avals, **params)
        hidden = (e for x in params.values() if is_jaxpr(x) for e in x.effects)
        return outs, {*effects, *(e for e in hidden if type(e) is SowEffect)}

    return primitive


composite_p = _annotation("jax.lax.composite", lambda call, f: call(f, "eqx_sow"))
# It is that of `xla_metadata_call`, too.
metadata_p = _annotation(
    "jax.experimental.scheduling_groups.scheduling_group", lambda call, f: call("")(f)
)
program_order_p = _annotation(
    "jax.experimental.overlap.program_order", lambda call, f: call(f, enforce=False)
)
noinline_p = _primitive("noinline", lambda f: eqx.internal.noinline(f))
# A loop of Equinox that can be differentiated, and runs its body again for that.
checkpointed_loop: Any = find(
    "the `while_loop` of Equinox",
    lambda: ft.partial(
        eqx.internal.while_loop, kind="checkpointed", max_steps=2, checkpoints=2
    ),
)
# What `eqx.filter_jit` and `jax.jit` make.
Jitted: Any = type(eqx.filter_jit(lambda x: x)) | type(jax.jit(lambda x: x))


@ft.cache
def unspecified() -> tuple[dict[str, Any], dict[str, Any]]:
    """What `jax.jit` puts for each input, and for each output, that has
    no specified sharding or layout."""
    p = equation(jax.jit(lambda x: x)).params
    inputs = ("in_shardings", "in_layouts", "donated_invars")
    outputs = ("out_shardings", "out_layouts")
    return {k: p[k][0] for k in inputs}, {k: p[k][0] for k in outputs}


def compiler_options(jitted: Any) -> dict[str, Any]:
    """The option of that name that a function was given by `jax.jit`, which says of its
    options nowhere else."""
    info = getattr(jitted, "_jit_info", None)
    return dict(getattr(info, "compiler_options_kvs", ()))


def without_compiler_options(jitted: Any) -> Any:
    """The same function made by `jax.jit`, which refuses these in a program around."""
    if not compiler_options(jitted):
        return jitted
    info, nothing = jitted._jit_info, unspecified()[1]["out_shardings"]
    same = "static_argnums", "static_argnames", "keep_unused", "inline"
    options = {name: getattr(info, name) for name in same}
    for name in ("in_shardings", "out_shardings"):
        leaves = getattr(info, f"{name}_leaves")
        if any(x is not nothing for x in leaves):
            treedef = getattr(info, f"{name}_treedef")
            options[name] = jax.tree.unflatten(treedef, leaves)
    return jax.jit(jitted.__wrapped__, **options)


def _transposed() -> Any:
    eqn = equation(lambda x: jax.linear_transpose(jax.lax.neg, x)(x))
    return eqn.source_info.name_stack.stack[0]


# What transposition writes on a name stack. A user's scope of that name is equal to it,
# and has another type.
_TRANSPOSED = find("what transposition leaves on a name stack", _transposed)


def in_backward_pass(eqn: Any) -> bool:
    """Whether an equation was put there by transposition."""
    stack = eqn.source_info.name_stack.stack
    return any(type(x) is type(_TRANSPOSED) and x == _TRANSPOSED for x in stack)


def is_recomputed(eqn: Any) -> bool:
    """Whether an equation in the backward pass of a checkpoint is of the forward pass,
    rather than one of the transposed ones, which need have no name there."""
    stack = eqn.source_info.name_stack.stack
    return any(getattr(x, "name", None) == "rematted_computation" for x in stack)


_RULE = "eqx_sow.rule."
_rules = it.count()


def derivative_rule() -> contextlib.AbstractContextManager[Any]:
    """Marks the equations that are made in this context as those of one call of a
    derivative rule, see `rules_around`."""
    return jax.named_scope(f"{_RULE}{next(_rules)}")


def rules_around(eqn: Any) -> tuple[str, ...]:
    """The calls of derivative rules that made an equation, from outside in."""
    names = (getattr(x, "name", None) for x in eqn.source_info.name_stack.stack)
    return tuple(x for x in names if isinstance(x, str) and x.startswith(_RULE))


def noinlined(eqn: Any) -> Any:
    """The jaxpr of the function that an equation of `noinline` holds. Its parameters
    are not public, and JAX never sees a jaxpr."""

    def look(index, fn, transforms, args):
        del index
        call = lambda args: fn(args[0], *args[1], **args[2])
        for transform in transforms[1:]:  # the first one calls what is not abstract
            call = transform(call)
        return eqx.filter_make_jaxpr(call)(args)[0]

    params = {**eqn.params, "flatten": lambda jaxpr: jaxpr}
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    return eqx.internal.filter_primitive_def(look)(*avals, **params)


@contextlib.contextmanager
def public_nan_errors() -> Iterator[None]:
    """What `jax_debug_nans` raises in a jitted function is turned into a
    `FloatingPointError` by `jax.jit`. One that is evaluated as an equation raises it as
    it is, of a class that is not public."""
    try:
        yield
    except Exception as e:  # its class is private: only the name tells
        if type(e).__name__ != "InternalFloatingPointError":
            raise
        name, kind = e.args
        raise FloatingPointError(f"invalid value ({kind}) encountered in {name}") from e


def traced_with_jaxpr(traced: Any, jaxpr: Any) -> Any:
    """The same `jax.stages.Traced`, of another jaxpr, for which it has no method."""
    new = copy.copy(traced)
    new._params = {**traced._params, "jaxpr": jaxpr}
    new._lojax = new._closure_converted = None
    return new


# With `JAX_REMAT3`, what a backward pass computes again instead of a primitive. There
# is no public way to say so: `jax.debug.callback` is called twice for want of it.
remat_rules = find(
    "JAX's table of rematerialization rules", _in_jax("interpreters.remat", "rules"), {}
)


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
    return aval.mat.varying


def vary(x: Any, axes: frozenset[Any]) -> Any:
    """Inside a `jax.shard_map`: `x`, varying over these axes, too."""
    missing = tuple(axes - varying(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _vary_more(jaxpr: Any, args: Sequence[Any]) -> bool:
    """Whether operands vary over mesh axes over which the jaxpr says they do not."""
    given = ((v.aval, x) for v, x in zip(jaxpr.invars, args, strict=True))
    return any(
        isinstance(x, jax.core.Tracer) and varying(x) and varying(x) - varying(aval)
        for aval, x in given
        if isinstance(aval, jax.core.ShapedArray)
    )


def _evaluate_varying(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list:
    """Evaluates a jaxpr of which operands vary over more mesh axes than where it was
    traced. Such an operand is the counter of a loop under a vmap: on each device it
    stops when the lanes there have finished. So in `add i 1`, the `1` has to vary."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atoms):
        return [
            as_array(v.val if isinstance(v, jexc.Literal) else env[v]) for v in atoms
        ]

    for eqn in jaxpr.eqns:
        source = eqn.source_info
        stack = source_info_util.current_name_stack() + source.name_stack
        context = source_info_util.user_context(source.traceback, name_stack=stack)
        with context, eqn.ctx.manager:
            outs = _bind_varying(eqn, read(eqn.invars))
        env.update(zip(eqn.outvars, outs, strict=True))
    return read(jaxpr.outvars)


def _bind_varying(eqn: Any, args: Sequence[Any]) -> Sequence[Any]:
    inner = eqn.params.get("call_jaxpr", eqn.params.get("jaxpr"))
    if eqn.primitive in (_call_p, jexc.primitives.jit_p):
        return inline_or_call(inner, args)
    if eqn.primitive.name == "pvary":  # it refuses what varies already
        return [vary(x, frozenset(eqn.params["axes"])) for x in args]
    # What computes takes operands that vary alike. A mark, which has an effect, takes
    # the cotangent of each device beside the total of all of them.
    has_jaxpr = any(map(is_jaxpr, jax.tree.leaves(list(eqn.params.values()))))
    if not has_jaxpr and not eqn.effects:
        axes = frozenset().union(*map(varying, args))
        args = [vary(x, axes) for x in args]
    outs = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return outs if eqn.primitive.multiple_results else [outs]


def varying_like(avals: Sequence[Any], shape, dtype) -> jax.core.ShapedArray:
    """The aval of an array that varies over the mesh axes that any of these do."""
    vary: Any = [a for a in avals if a.mat.varying]
    if not vary:
        return jax.core.ShapedArray(shape, dtype)
    like, axes = vary[0], frozenset().union(*map(varying, vary))
    return jax.core.ShapedArray(
        shape,
        dtype,
        sharding=like.sharding.update(spec=P(*[None] * len(shape))),
        manual_axis_type=type(like.mat)(varying=axes),
    )
