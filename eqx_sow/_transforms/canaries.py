"""Small programs that show whether a JAX that was not tested behaves as eqx_sow needs.

Names that moved are found by `_compat.py`. But JAX may also batch a branch in another
way, or move a value out of its loop: then what comes back would be wrong, without a
word. So before the first capture under a JAX that is newer than all that were tested,
these programs are captured from. What comes back must have the names, in their order,
and the types that are written here. One program is also compiled and run, for the
numbers in it. All others are only traced.

For each rule of JAX's that `_walk/jax_rules.py` wraps, and for what else JAX may change
so that nobody would notice (`tests/test_canaries.py` has a list), there is a program
that would come out differently.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _compat
from .._errors import SowError
from .._mark.listening import scope
from .._mark.sow import sow
from .._results.leaves import type_of
from .._values.transform import batched
from .save import save_intermediates as S


# --- the programs ---
def _sin(x: Any, name: str = "h") -> Any:
    return sow(lax.sin(x), name)


def _named(name: str) -> Callable:
    return lambda x: _sin(x, name)


def _grad(fn: Callable) -> Callable:
    return jax.grad(lambda x: lax.reduce_sum(fn(x), axes=(0,)))


def _twice(step: Callable) -> Callable:
    """A scan of two iterations."""
    return lambda x: lax.scan(lambda c, _: (step(c, x), None), x, length=2)[0]


def _if(fn: Callable) -> Callable:
    return lambda x: lax.cond(x[0] > 0, fn, lambda x: x, x)


def _until(x):
    return lax.while_loop(lambda x: x < 9, lambda x: sow(2 * x, "while"), x)


def _with_rules() -> Callable:
    """A function whose derivative rules mark values, called in a scope that is left
    when JAX calls the rules. There is a loop in one, of which JAX moves out what is
    known, by its rule for partial evaluation."""

    @jax.custom_jvp
    def with_jvp(x):
        return lax.sin(x)

    @with_jvp.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents
        loop = lax.scan(lambda t, _: (t * _sin(x, "jvp"), None), t, length=2)
        return lax.sin(x), loop[0]

    @jax.custom_vjp
    def with_vjp(x):
        return lax.sin(x)

    def bwd(cos, g):
        return (sow(g * cos, "bwd"),)

    with_vjp.defvjp(lambda x: (lax.sin(x), _sin(x, "fwd")), bwd)

    def call(x):
        with scope("s"):
            return with_jvp(x) + with_vjp(x)

    return call


def _mapped(x):
    y = lax.cond(x > 0, lambda x: _sin(x, "cond"), lambda x: x, x) + _until(x)
    z = _twice(lambda c, x: _sin(c, "scan"))(x)
    return y + z


def _counted(x):
    body = lambda c: (c[0] + 1, sow(2 * c[1], "while"))
    _, n = lax.while_loop(lambda c: c[0] < 3, body, (0, jnp.float32(1)))
    return n * lax.sin(x)


def _best(name: str) -> Callable:
    return lambda x: lax.argmax(_sin(x, name), 0, "int32")


def _checkpointed(x):
    indices = (
        _best("argmax"),
        lambda x: lax.cond(x[0] > 0, _best("if"), lambda x: jnp.int32(0), x),
    )
    indices = [jax.checkpoint(fn)(x).astype("float32") for fn in indices]
    scan = _twice(lambda c, x: c * _sin(x, "scan"))
    return jax.checkpoint(scan)(x) * (indices[0] * indices[1]) + jax.checkpoint(
        _counted
    )(x)


def _one_device(fn: Callable) -> Callable:
    mesh = jax.sharding.AbstractMesh((1,), ("d",))
    p = jax.sharding.PartitionSpec()
    return jax.shard_map(fn, mesh=mesh, in_specs=p, out_specs=p)


def _custom_jvp(fn: Callable) -> Callable:
    fn = jax.custom_jvp(fn)
    fn.defjvps(lambda t, y, x: t)
    return fn


def _custom_vjp(fn: Callable) -> Callable:
    new = jax.custom_vjp(fn)
    new.defvjp(lambda x: (fn(x), None), lambda _, g: (g,))
    return new


# Everything that may have a mark inside, and that JAX could move out of a loop.
_HOLDERS: dict[str, Callable] = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": _if,
    "scan": lambda fn: _twice(lambda c, x: fn(x)),
    "while": lambda fn: lambda x: lax.while_loop(lambda x: x[0] < 0, fn, x),
    "custom_jvp": _custom_jvp,
    "custom_vjp": _custom_vjp,
    "custom_vmap": jax.custom_batching.sequential_vmap,
    "shard_map": _one_device,
    "call": _compat.as_call,
    **_compat.annotations,
}


def _differentiated(x):
    constant = lax.stop_gradient(x)

    def step(c, x):
        for name, hold in _HOLDERS.items():
            c = c * hold(_named(name))(constant)
        return c * _sin(x)

    in_lanes = jax.vmap(_twice(lambda c, x: _with_rules()(c)))
    return _twice(step)(x) + in_lanes(x)


def _pairs(x):
    """In each holder a value, of which one leaf alone depends on `x`."""

    def pair(name):
        return lambda x: lax.mul(*sow((lax.sin(x), jnp.ones(3, "float32")), name))

    for name in ("jit", "checkpoint", "scan", "cond"):
        x = _HOLDERS[name](pair(name))(x)
    return x


def _rerun(x):
    """A loop whose backward pass runs its body again."""
    body = lambda x: sow(2 * x, "while")
    return _compat.checkpointed_loop(lambda x: x[0] < 3, body, x)


def _traced_before(x):
    """A function that JAX knows, without marks."""
    step = lambda c, _: (_sin(c, "scan"), None)
    jitted, checkpointed = jax.jit(_named("jit")), jax.checkpoint(_named("checkpoint"))

    def fn(x):
        return lax.scan(step, checkpointed(jitted(x)), length=2)[0]

    jax.eval_shape(fn, x)
    return S(fn)(x)


def _product(x: Any, name: str, **options: Any) -> Any:
    step = lambda c, factor: (sow(c * factor, name), None)
    return lax.scan(step, x[0], np.array([2, 3], "float32"), **options)[0]


def _products(x):
    grad = jax.grad(lambda x: _product(x, "forward"))(x)
    return grad, _product(x, "reverse", reverse=True)


def _layers(x):
    new = lambda: eqx.nn.Linear(3, 3, dtype=jnp.float32, key=jax.random.key(0))
    return S(eqx.nn.Sequential([new(), new()]), capture=eqx.nn.Linear)(x)


_RAISED = {"error": "raised f32[3]"}


def _refused(x):
    """Whether it is known that a loop under a vmap runs for some lanes only."""
    try:
        S(jax.vmap(_until), transform=batched(jnp.sum))(x)
    except SowError:
        return x, {"error": {"raised": x}}
    return x, {}


def _not_told(x):
    """Whether it is known that a branch under a vmap runs for some lanes only, if its
    one mark is in a derivative rule, where the rule for the cond cannot see it."""
    branch = lambda x: lax.cond(x > 0, _with_rules(), lambda x: x, x)
    try:
        S(_grad(jax.vmap(branch)))(x)
    except SowError:
        return x, {"error": {"raised": x}}
    return x, {}


def _explained(x):
    """Whether the error of a loop that eqx_sow made is explained."""
    try:
        jax.grad(lambda x: S(_until)(x)[0])(x[0])
    except ValueError as e:
        if any("eqx_sow" in note for note in getattr(e, "__notes__", ())):
            return x, {"error": {"raised": x}}
    return x, {}


def _numbers(fn: Callable, x: Any) -> Any:
    """What a function returns. A CPU takes the least time to compile for."""
    try:
        device, *_ = jax.local_devices(backend="cpu")
    except RuntimeError:  # there is none
        device = None
    with jax.default_device(device), jax.transfer_guard("allow"):
        with jax.disable_jit(False):
            return jax.jit(fn)(x)


# What each is called in the message; what to look at, types or numbers; a function of
# three ones; and what comes back, in this order.
_TYPES = jax.eval_shape
CANARIES: list[tuple[str, Callable, Callable, dict[str, str]]] = [
    (
        "vmap of a cond and of loops",
        _TYPES,
        S(jax.vmap(_mapped)),
        {
            "cond": "primal f32[3], count i32[3]",
            "while": "primal f32[3], count i32[3]",
            "scan": "primal f32[3,2]",
        },
    ),
    ("vmap of a while_loop, transformed", _TYPES, _refused, _RAISED),
    ("gradient of a cond under a vmap", _TYPES, _not_told, _RAISED),
    (
        "gradients of checkpoints",
        _TYPES,
        S(_grad(_checkpointed)),
        {
            "argmax": "primal f32[3], cotangent f32[3]",
            "if": "primal f32[3], cotangent f32[3], count i32[]",
            "scan": "primal f32[2,3], cotangent f32[2,3]",
            "while": "primal f32[], count i32[]",
        },
    ),
    (
        "gradients of pairs",
        _TYPES,
        S(_grad(_pairs)),
        {
            "jit": "primal f32[3] f32[3], cotangent f32[3] f32[3]",
            "checkpoint": "primal f32[3] f32[3], cotangent f32[3] f32[3]",
            "scan": "primal f32[2,3] f32[2,3], cotangent f32[2,3] f32[2,3]",
            "cond": "primal f32[3] f32[3], cotangent f32[3] f32[3], count i32[]",
        },
    ),
    (
        "gradient of loops",
        _TYPES,
        S(_grad(_differentiated)),
        {name: "primal f32[2,3]" for name in _HOLDERS}
        | {
            "cond": "primal f32[2,3], count i32[2]",
            "scan": "primal f32[2,2,3]",
            "while": "primal f32[2,3], count i32[2]",
            "h": "primal f32[2,3], cotangent f32[2,3]",
            "s/jvp": "primal f32[3,2,2]",
            "s/fwd": "primal f32[3,2]",
            "s/bwd": "primal f32[3,2]",
        },
    ),
    (
        "gradient of a checkpointed while_loop of Equinox",
        _TYPES,
        S(_grad(_rerun)),
        {"while": "primal f32[3], cotangent f32[3], count i32[]"},
    ),
    (
        "function that was traced before",
        _TYPES,
        _traced_before,
        {
            "jit": "primal f32[3]",
            "checkpoint": "primal f32[3]",
            "scan": "primal f32[2,3]",
        },
    ),
    (
        "scans, and a gradient of one",
        _numbers,
        S(_products),
        {
            "forward": "primal [2.0, 6.0], cotangent [3.0, 1.0]",
            "reverse": "primal [6.0, 3.0]",
        },
    ),
    (
        "captured layers",
        _TYPES,
        _layers,
        {"layers/0": "primal f32[3]", "layers/1": "primal f32[3]"},
    ),
    ("gradient of a captured while_loop", _TYPES, _explained, _RAISED),
]


# --- what comes back ---
def _described(x: Any) -> str:
    return type_of(x) if isinstance(x, jax.ShapeDtypeStruct) else str(x.tolist())


def found(look: Callable, fn: Callable) -> dict[str, str]:
    """For each name, the modes, with the types of the arrays that come back, or the
    numbers in them."""
    there = look(lambda x: fn(x)[1], np.ones(3, "float32"))
    return {
        name: ", ".join(
            " ".join([mode, *map(_described, jax.tree.leaves(value))])
            for mode, value in modes.items()
        )
        for name, modes in there.items()
    }


def differences() -> Iterator[str]:
    """What does not come back as it has to."""
    for name, look, fn, want in CANARIES:
        try:
            got = found(look, fn)
        except Exception as e:  # whatever comes of another version of JAX
            yield f"{name}: {type(e).__name__}: {str(e)[:200]}"
            continue
        for k in {**want, **got}:
            is_there, must_be = (x.get(k, "missing") for x in (got, want))
            if is_there != must_be:
                yield f"{name}: {k!r} is {is_there}, and must be {must_be}"
        if got == want and list(got) != list(want):
            yield f"{name}: the order is {list(got)}, and must be {list(want)}"


class _Thread(threading.local):
    is_checking = False


_thread = _Thread()
_checking = threading.Lock()
# What was found, once that is known.
_found: list[list[str]] = []


def _differences() -> list[str]:
    _thread.is_checking = True
    return list(differences())


def check() -> None:
    """Raises if this JAX does not behave as those that were tested."""
    if _thread.is_checking:
        return
    with _checking:
        if not _found:
            # In a thread of its own: JAX knows nothing there of the program that is
            # being traced here, or of the mesh and other contexts around.
            with ThreadPoolExecutor(1) as thread:
                _found.append(thread.submit(_differences).result())
    if _found[0]:
        raise SowError(
            f"eqx_sow was tested up to JAX {_compat.NEWEST_TESTED}, and JAX "
            f"{jax.__version__} behaves differently, so values that come back could be "
            f"wrong. In small programs of eqx_sow's own: {'; '.join(_found[0][:3])}. "
            f"Install a newer eqx_sow, or JAX {_compat.NEWEST_TESTED}."
        )
