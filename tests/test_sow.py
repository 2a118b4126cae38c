"""`sow` and `Sow`: an identity if nothing is captured, any value if it is."""

import dataclasses as dc

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from eqx_sow import Append, Last, plant, save_intermediates as S, Sow, sow

from tests.helpers import assert_close, modes_of
from tests.tables import named, under


X = jnp.array([0.5, -1.0, 2.0])

VALUES = {
    "float": lambda x: x * 2,
    "scalar": lambda x: x[0],
    "int": lambda x: (x > 0).astype(jnp.int32),
    "uint8": lambda x: (x > 0).astype(jnp.uint8),
    "bool": lambda x: x > 0,
    "bfloat16": lambda x: x.astype(jnp.bfloat16),
    "float16": lambda x: x.astype(jnp.float16),
    "complex": lambda x: lax.complex(x, 2 * x),
    "zero-size": lambda x: x[:0],
    "zero-size-matrix": lambda x: jnp.zeros((0, 3)) + x[None],
    "key": lambda x: jr.fold_in(jr.key(0), x[0].astype(jnp.int32)),
    "keys": lambda x: jr.split(jr.fold_in(jr.key(0), x[0].astype(jnp.int32)), 3),
    "raw-key": lambda x: jr.PRNGKey(0) + x[0].astype(jnp.uint32),
    "tuple": lambda x: (x, x[0]),
    "named": lambda x: {"b": x, "a": [x[0], (x[1],)]},
    "none": lambda x: (None, x),
    "mixed": lambda x: {"f": x, "i": x.astype(jnp.int32), "n": 3, "s": "text"},
    "module": lambda x: eqx.tree_at(
        lambda m: m.weight,
        eqx.nn.Linear(3, 2, key=jr.key(0)),
        x[None] * jnp.ones((2, 1)),
    ),
    "empty": lambda x: {"a": (), "b": {}},
}

WRAPS = "jit", "grad", "jit-grad-jit", "grad-checkpoint", "jvp", "vmap-grad", "vmap-jit"


CASES = [
    pytest.param(
        transform,
        value,
        used,
        # What these consist of is run more often.
        marks=pytest.mark.slow if transform in ("jit-grad-jit", "vmap-jit") else (),
    )
    for transform in WRAPS
    for value in VALUES
    for used in (True, False)
    if used or value in ("float", "int", "key", "mixed")
]


@pytest.mark.sample(5)
@pytest.mark.parametrize("transform, value, used", CASES)
def test_values(transform, value, used):
    make, wrap = VALUES[value], named(transform)

    def f(x):
        sown = sow(make(x), "v")
        if used:
            leaves = [v for v in jtu.tree_leaves(sown) if eqx.is_inexact_array(v)]
            return sum((jnp.sum(jnp.abs(v)).astype("float32") for v in leaves), x[0])
        return x[0] * 1

    def plain(x):
        leaves = [v for v in jtu.tree_leaves(make(x)) if eqx.is_inexact_array(v)]
        if used:
            return sum((jnp.sum(jnp.abs(v)).astype("float32") for v in leaves), x[0])
        return x[0] * 1

    lanes = transform.startswith("vmap")
    args = jnp.stack([X, X + 1]) if lanes else X
    out, got = S(wrap(f))(args)
    assert_close(out, wrap(plain)(args))
    if not lanes:
        expected = make(args)
    else:
        rows = [make(r) for r in args]
        expected = jtu.tree_map(
            lambda *xs: jnp.stack(xs) if eqx.is_array(xs[0]) else xs[0], *rows
        )
    assert_close(got["v"]["primal"], expected)
    jitted, again = eqx.filter_jit(S(wrap(f)))(args)
    assert_close(again["v"]["primal"], expected)
    assert_close(jitted, out)


def test_float0_cotangents(call):
    def f(x):
        v = sow({"i": (x > 0).astype(jnp.int32), "f": x * 2, "b": x > 0}, "v")
        return jnp.sum(v["f"] ** 2)

    _, got = S(jax.grad(f))(X)
    none = np.zeros((3,), jax.dtypes.float0)
    assert_close(got["v"]["cotangent"], {"i": none, "f": 4 * X, "b": none})
    _, got = S(jax.vmap(jax.grad(f)))(jnp.stack([X, X]))
    none = np.zeros((2, 3), jax.dtypes.float0)
    xs = jnp.stack([X, X])
    assert_close(got["v"]["cotangent"], {"i": none, "f": 4 * xs, "b": none})
    _, got = S(lambda x: jax.jvp(f, (x,), (X,)))(X)
    none = np.zeros((3,), jax.dtypes.float0)
    assert_close(got["v"]["tangent"], {"i": none, "f": 2 * X, "b": none})


def test_integer_alone_under_grad(call):
    def f(x):
        sow((x > 0).astype(jnp.int32), "i")
        return jnp.sum(x**2)

    _, got = call(S(jax.grad(f)), X)
    assert_close(got["i"]["primal"], jnp.array([1, 0, 1], jnp.int32))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_dtype_of_cotangents(call, dtype):
    def f(x):
        return jnp.sum(sow(x.astype(dtype) * 2, "v").astype(jnp.float32))

    _, got = call(S(jax.grad(f)), X)
    assert_close(got["v"]["cotangent"], jnp.ones(3, dtype))


def test_complex_cotangent(call):
    def f(mark, x):
        z = mark(lax.complex(x, 2 * x))
        return jnp.sum(jnp.real(z * z) + jnp.imag(z))

    _, got = call(S(jax.grad(lambda x: f(lambda v: sow(v, "z"), x))), X)
    zero = jnp.zeros(3, jnp.complex64)
    expected = jax.grad(lambda eps: f(lambda v: v + eps, X))(zero)
    assert_close(got["z"]["cotangent"], expected)


def test_weak_types(call):
    def f(x):
        weak = sow(lax.convert_element_type(x[0], float), "weak")
        return weak, sow(jnp.asarray(2.0), "constant"), sow(x * 2.0, "strong")

    def plain(x):
        weak = lax.convert_element_type(x[0], float)
        return weak, jnp.asarray(2.0), x * 2.0

    out, got = call(S(f), X)
    expected = eqx.filter_jit(plain)(X)
    assert_close(out, expected, weak=True)
    names = "weak", "constant", "strong"
    assert_close(tuple(got[n]["primal"] for n in names), expected, weak=True)


def test_numpy_arrays(call):
    array = np.arange(3, dtype=np.float32)

    def f(x):
        return x + sow({"array": array, "x": x}, "v")["array"]

    out, got = call(S(f), X)
    assert_close(out, X + array)
    assert_close(got["v"]["primal"], {"array": jnp.asarray(array), "x": X})
    _, got = call(S(jax.jit(f)), X)
    assert_close(got["v"]["primal"], {"array": jnp.asarray(array), "x": X})


def test_constant_from_outside(call):
    _, got = call(S(lambda x: x + sow(jnp.arange(3.0), "c")), X)
    assert_close(got, {"c": {"primal": jnp.arange(3.0)}})


# --- nothing is captured ---

OBJECTS = [X, np.ones(2), 1, 2.5, True, "text", None, {"a": 1}, {1, 2}, len, object()]


@pytest.mark.parametrize("value", OBJECTS, ids=lambda v: type(v).__name__)
def test_off_returns_the_very_object(value):
    assert sow(value, "a") is value
    assert Sow("a")(value) is value
    assert Sow()(value, key=jr.key(0)) is value


@pytest.mark.parametrize("transform", WRAPS)
def test_off_under_transforms(transform):
    wrap = named(transform)
    args = jnp.stack([X, X + 1]) if transform.startswith("vmap") else X
    out = wrap(lambda x: jnp.sum(sow(x, "a") ** 2))(args)
    assert_close(out, wrap(lambda x: jnp.sum(x**2))(args))


def test_off_again_after_listening():
    f = lambda x: sow(x * 2, "a")
    jitted = jax.jit(f)
    assert_close(jitted(X), X * 2)
    assert_close(S(jitted)(X), (X * 2, {"a": {"primal": X * 2}}))
    assert_close(jitted(X), X * 2)
    assert not jax.make_jaxpr(jitted)(X).effects
    assert sow(X, "a") is X


def test_off_again_after_an_error():
    def f(x):
        sow(x, "a")
        raise RuntimeError("from inside")

    with pytest.raises(RuntimeError, match="from inside"):
        S(f)(X)
    assert sow(X, "a") is X


# --- Sow ---


def test_layer(call, getkey):
    k1, k2 = getkey(), getkey()
    first, last = eqx.nn.Linear(3, 4, key=k1), eqx.nn.Linear(4, 2, key=k2)
    model = eqx.nn.Sequential([first, Sow("hidden"), eqx.nn.Lambda(jnp.tanh), last])
    out, got = call(S(model), X)
    assert_close(out, last(jnp.tanh(first(X))))
    assert_close(got, {"hidden": {"primal": first(X)}})


def test_layer_fields():
    layer = Sow("a", "spec", tag="t")
    assert (layer.name, layer.spec, layer.tag) == ("a", "spec", "t")
    assert Sow().name is None and Sow().tag == "intermediates"
    assert jtu.tree_leaves(layer) == []


def test_layer_tag(call):
    model = eqx.nn.Sequential([Sow("a", tag="t"), Sow("b")])
    _, got = call(S(model, tag="t"), X)
    assert modes_of(got) == {"a": {"primal"}}


def test_layer_without_a_name_takes_its_path(call, getkey):
    linear = eqx.nn.Linear(3, 4, key=getkey())
    model = eqx.nn.Sequential([linear, Sow(), eqx.nn.Lambda(jnp.tanh)])
    _, got = call(S(model), X)
    assert_close(got, {"layers/1": {"primal": linear(X)}})


@dc.dataclass(frozen=True)
class Point:
    x: float


def test_layer_passes_anything(call):
    _, got = call(S(Sow("a")), {"x": X, "p": Point(1.0), "n": None})
    assert_close(got["a"]["primal"], {"x": X, "p": Point(1.0), "n": None})


@under("eager", "filter_jit", argument="jit")
def test_the_first_glob_that_matches_wins(jit):
    fn = lambda x: sow(x, "scan")
    for first, want in (("s*", -3), ("*", 9)):
        by_glob = {"s*": jnp.negative, "*": jnp.square}
        by_glob = {first: by_glob.pop(first), **by_glob}
        _, got = jit(S(fn, transform=by_glob))(jnp.array(3))
        assert got["scan"]["primal"] == want
        assert jit(plant(fn, by_glob))(jnp.array(3)) == want
    by_glob = {"s*": Append(), "*": Last()}
    _, got = jit(S(fn, reduce=by_glob))(jnp.array(3))
    assert got["scan"]["primal"] == (3,)
