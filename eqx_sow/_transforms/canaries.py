"""Small programs that show whether a JAX that was not tested behaves as eqx_sow needs.

Names that moved are found by `_compat.py`. But JAX may also batch a branch on another
way, or move a value out of its loop: then what comes back would be wrong, without a
word. So before the first capture under a JAX that is newer than all that were
tested, these programs are traced, with types for values: nothing is compiled or run.
What comes back must have the shapes that are written here.

For each rule of JAX's that `_walk/jax_rules.py` wraps there is a program that would
come out differently without it.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from .. import _compat
from .._errors import SowError
from .._mark.listening import listening, scope
from .._mark.sow import sow
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


def _pair(x):
    x, y = sow((lax.sin(x), jnp.float32(2)), "pair")
    return x * y


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
    return jax.checkpoint(scan)(jax.checkpoint(_pair)(x)) * (
        indices[0] * indices[1]
    ) + jax.checkpoint(_counted)(x)


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
}


def _differentiated(x):
    constant = lax.stop_gradient(x)

    def step(c, x):
        for name, hold in _HOLDERS.items():
            c = c * hold(_named(name))(constant)
        return c * _sin(x)

    in_lanes = jax.vmap(_twice(lambda c, x: _with_rules()(c)))
    return _twice(step)(x) + in_lanes(x)


def _layers(x):
    new = lambda: eqx.nn.Linear(3, 3, dtype=jnp.float32, key=jax.random.key(0))
    return S(eqx.nn.Sequential([new(), new()]), capture=eqx.nn.Linear)(x)


def _refused(x):
    """Whether it is known that a loop under a vmap runs for some lanes only."""
    try:
        S(jax.vmap(_until), transform=batched(jnp.sum))(x)
    except SowError:
        return x, {"error": {"there": x}}
    return x, {}


def _not_told(x):
    """Whether it is known that a branch under a vmap runs for some lanes only, if its
    one mark is in a derivative rule, where the rule for the cond cannot see it."""
    branch = lambda x: lax.cond(x > 0, _with_rules(), lambda x: x, x)
    try:
        S(_grad(jax.vmap(branch)))(x)
    except SowError:
        return x, {"error": {"there": x}}
    return x, {}


def _explained(x):
    """Whether the error of a loop that eqx_sow made is explained."""
    try:
        jax.grad(lambda x: S(_until)(x)[0])(x[0])
    except ValueError as e:
        if any("eqx_sow" in note for note in getattr(e, "__notes__", ())):
            return x, {"error": {"there": x}}
    return x, {}


_ONE, _TWO = "float32[3]", "float32[2, 3]"
_MODES = "primal", "cotangent"
# What each is called in the message; a function of three numbers; and what comes back.
CANARIES: list[tuple[str, Callable, dict[str, str]]] = [
    (
        "vmap of a cond and of loops",
        S(jax.vmap(_mapped)),
        {
            "cond primal": _ONE,
            "cond count": "int32[3]",
            "while primal": _ONE,
            "while count": "int32[3]",
            "scan primal": "float32[3, 2]",
        },
    ),
    ("vmap of a while_loop, transformed", _refused, {"error there": _ONE}),
    ("gradient of a cond under a vmap", _not_told, {"error there": _ONE}),
    (
        "gradients of checkpoints",
        S(_grad(_checkpointed)),
        {
            **{f"{name} {m}": _ONE for name in ("argmax", "if") for m in _MODES},
            "if count": "int32[]",
            **{f"pair {m}": f"{_ONE}, float32[]" for m in _MODES},
            **{f"scan {m}": _TWO for m in _MODES},
            "while primal": "float32[]",
            "while count": "int32[]",
        },
    ),
    (
        "gradient of loops",
        S(_grad(_differentiated)),
        {
            **{f"{name} primal": _TWO for name in _HOLDERS},
            "scan primal": "float32[2, 2, 3]",
            "cond count": "int32[2]",
            "while count": "int32[2]",
            **{f"h {m}": _TWO for m in _MODES},
            "s/jvp primal": "float32[3, 2, 2]",
            "s/fwd primal": "float32[3, 2]",
            "s/bwd primal": "float32[3, 2]",
        },
    ),
    ("captured layers", _layers, {f"layers/{i} primal": _ONE for i in (0, 1)}),
    ("gradient of a captured while_loop", _explained, {"error there": _ONE}),
]


# --- what comes back ---
def found(fn: Callable) -> dict[str, str]:
    """For each name and mode, the types of the arrays that come back."""
    x = jax.ShapeDtypeStruct((3,), "float32")
    with listening(None):
        there = jax.eval_shape(lambda x: fn(x)[1], x)
    return {
        f"{name} {mode}": ", ".join(
            f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(value)
        )
        for name, modes in there.items()
        for mode, value in modes.items()
    }


def differences() -> Iterator[str]:
    """What does not come back as it has to."""
    for name, fn, want in CANARIES:
        try:
            got = found(fn)
        except Exception as e:  # whatever comes of another version of JAX
            yield f"{name}: {type(e).__name__}: {str(e)[:200]}"
            continue
        for k in {**want, **got}:
            is_there, must_be = (x.get(k, "missing") for x in (got, want))
            if is_there != must_be:
                yield f"{name}: {k!r} is {is_there}, and must be {must_be}"


_checking = threading.RLock()
# What was found, once that is known. While it is not, the programs above are traced.
_found: list[list[str]] = []


def check() -> None:
    """Raises if this JAX does not behave as those that were tested."""
    with _checking:
        if not _found:
            _found.append([])
            _found[0] = list(differences())
    if _found[0]:
        raise SowError(
            f"eqx_sow was tested up to JAX {_compat.NEWEST_TESTED}, and JAX "
            f"{jax.__version__} behaves differently, so values that come back could be "
            f"wrong. In small programs of eqx_sow's own: {'; '.join(_found[0][:3])}. "
            f"Install a newer eqx_sow, or JAX {_compat.NEWEST_TESTED}."
        )
