"""Leaves that are no arrays come back as they were."""

import dataclasses as dc
import enum
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from eqx_sow import plant, save_intermediates as S, sow, SowError
from eqx_sow._mark.static import Const

from tests.helpers import assert_close
from tests.tables import pick, under


X = jnp.array([0.5, -1.0, 2.0])


class OddEq:
    """Equal to nothing, in a way that fits no `if`."""

    __hash__ = None

    def __eq__(self, other):
        return np.array([True, False])


class RaisingEq:
    def __eq__(self, other):
        raise RuntimeError("do not compare")

    def __hash__(self):
        raise RuntimeError("do not hash")


@dc.dataclass
class Mutable:
    x: list


@dc.dataclass(frozen=True)
class Frozen:
    x: int


class Colour(enum.Enum):
    red = 1


LEAVES = {
    "str": "text",
    "bytes": b"bytes",
    "int": 3,
    "float": 2.5,
    "nan": math.nan,
    "complex": 1j,
    "bool": True,
    "function": math.sin,
    "lambda": lambda x: x,
    "jitted": jax.jit(jnp.sin),
    "class": int,
    "set": {1, 2},
    "frozenset": frozenset({1}),
    "odd-eq": OddEq(),
    "raising-eq": RaisingEq(),
    "mutable-dataclass": Mutable([1]),
    "frozen-dataclass": Frozen(1),
    "enum": Colour.red,
    "dtype": jnp.dtype("float32"),
    "ellipsis": ...,
    "range": range(3),
    "module": math,
}

TRANSFORMS = {
    **pick("eager", "jit", "filter_jit", "jit-grad", "grad-jit", "grad-checkpoint"),
    **pick("lanes", "jvp"),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (c, f(x)), 0, None, length=2),
    "cond": lambda f: lambda x: jax.lax.cond(x[0] > 0, f, f, x),
}


# Every leaf under some transforms, and some leaves under all.
CASES = [
    (leaf, transform)
    for leaf in LEAVES
    for transform in TRANSFORMS
    if leaf in ("lambda", "set", "odd-eq") or transform in ("eager", "grad-jit", "scan")
]


@pytest.mark.parametrize("leaf, transform", CASES)
def test_static_leaf(leaf, transform):
    value = LEAVES[leaf]

    def f(x):
        back = sow({"static": value, "x": x, "again": [value]}, "v")
        assert back["static"] is value and back["again"][0] is value
        return jnp.sum(back["x"])

    saved = S(TRANSFORMS[transform](f))
    # Equinox compares what a jitted function returns: it cannot return such leaves.
    jitted = [] if leaf in ("odd-eq", "raising-eq") else [eqx.filter_jit(saved)]
    for run in (saved, saved, *jitted):
        _, got = run(X)
        for mode, tree in got["v"].items():
            if mode != "count":
                assert tree["static"] is value and tree["again"][0] is value


@pytest.mark.parametrize("transform", ["eager", "jit", "scan", "grad-jit"])
def test_only_static_leaves(transform):
    def f(x):
        sow(("text", None, 3), "v")
        return jnp.sum(x)

    _, got = S(TRANSFORMS[transform](f))(X)
    assert got["v"]["primal"] == ("text", None, 3)
    assert type(got["v"]["primal"][2]) is int


def test_equal_leaves_of_different_types_are_told_apart(call):
    def inner(flag):
        return jax.jit(lambda x: sow({"flag": flag, "x": x}, "v")["x"])

    flags = (1, 1.0, True, 0.0, -0.0)
    for flag in flags:
        _, got = call(S(inner(flag)), X)
        back = got["v"]["primal"]["flag"]
        assert type(back) is type(flag) and repr(back) == repr(flag)
    # No cache of ours takes one for another, and `plant` does not either.
    for i, one in enumerate(flags):
        for j, other in enumerate(flags):
            assert (Const(one) == Const(other)) == (i == j)
            planted = plant(inner(one), {"v": {"flag": other, "x": X}})
            if i == j:
                planted(X)
                continue
            with pytest.raises(SowError, match="static leaf"):
                planted(X)


def test_python_scalars_in_arguments_are_static(call):
    def f(x, n, pair):
        assert type(n) is int and type(pair[0]) is float
        return sow({"n": n, "x": x * n}, "v")["x"] * pair[0]

    out, got = call(S(f), X, 3, (2.0, "s"))
    assert_close(out, X * 6)
    assert_close(got["v"]["primal"], {"n": 3, "x": X * 3})


def test_arguments_may_be_anything(call):
    odd = OddEq()

    def f(x, fn, text, none, obj, *, model, table):
        assert text == "text" and none is None and obj is odd
        return sow(fn(x), "fn"), model, table["f"], obj, "out", None

    model = eqx.nn.MLP(3, 2, 4, 1, key=jr.key(0))
    out, got = S(f)(X, jnp.sin, "text", None, odd, model=model, table={"f": len})
    assert_close(got["fn"]["primal"], jnp.sin(X))
    assert_close(out[0], jnp.sin(X))
    assert jtu.tree_structure(out[1]) == jtu.tree_structure(model)
    assert out[1].activation is model.activation
    assert out[2] is len and out[3] is odd and out[4:] == ("out", None)


def test_structure_of_the_output(call):
    def f(x):
        sow(x, "a")
        return {"b": (x, None, {"c": [x[0]]}), "a": (x,), "n": 3, "np": "str"}

    out, _ = call(S(f), X)
    assert_close(out, {"b": (X, None, {"c": [X[0]]}), "a": (X,), "n": 3, "np": "str"})


def test_order_of_keys_in_a_sown_dict():
    _, got = S(lambda x: sow({"b": x, "a": x}, "v")["a"])(X)
    assert set(got["v"]["primal"]) == {"a", "b"}


def test_output_that_is_an_argument_or_a_constant(call):
    array = np.arange(3.0, dtype=np.float32)
    f = lambda x: (x, sow(x, "a"), array, 1.5, True)
    out, _ = call(S(f), X)
    assert_close(out[:2], (X, X))
    assert np.array_equal(out[2], array)
    assert out[3:] == (1.5, True) and type(out[3]) is float


def test_no_arguments_and_no_outputs(call):
    def f():
        sow(jnp.ones(2), "a")

    assert_close(call(S(f)), (None, {"a": {"primal": jnp.ones(2)}}))


def test_jax_output_that_does_not_depend_on_the_input(call):
    out, got = call(S(lambda x: sow(jnp.ones(2), "a")), X)
    assert_close((out, got), (jnp.ones(2), {"a": {"primal": jnp.ones(2)}}))


# --- NumPy ---


@under("eager", "jit", "filter_jit")
def test_numpy_arrays_stay_what_they_are(wrap):
    mask, names = np.array([True, False, True]), np.array(["a", "b"])

    def fn(x):
        n = int(sow(np.array(2), "n"))
        assert isinstance(sow(np.float32(1), "scalar"), np.float32)
        assert sow((names, x), "names")[0] is names
        return x[sow(mask, "mask")].reshape(n, 1)

    out, got = S(wrap(fn))(X)
    assert_close(out, jnp.array([[0.5], [2.0]]))
    assert_close(got["mask"]["primal"], jnp.asarray(mask))
    assert_close(got["n"]["primal"], jnp.array(2))
    assert got["names"]["primal"][0] is names


def test_numpy_arrays_under_vmap_and_in_a_loop():
    fn = lambda x: x * sow(np.arange(3.0, dtype=np.float32), "k")
    _, got = S(jax.vmap(fn))(jnp.stack([X, X]))
    assert_close(got["k"]["primal"], jnp.arange(3.0))
    _, got = S(lambda x: jax.lax.scan(lambda c, _: (fn(c), None), x, length=2))(X)
    assert_close(got["k"]["primal"], jnp.stack([jnp.arange(3.0)] * 2))


def test_what_is_planted_in_the_place_of_a_numpy_array():
    fn = lambda x: x * sow({"k": np.arange(3.0, dtype=np.float32), "x": x}, "v")["k"]
    captured = S(fn)(X)[1]
    assert_close(plant(fn, captured)(X), fn(X))
    assert_close(plant(fn, {"v": lambda v: {**v, "x": -v["x"]}})(X), fn(X))
    assert_close(plant(fn, {"v": lambda v: {**v, "k": 2 * v["k"]}})(X), 2 * fn(X))
    assert_close(plant(fn, {"v": {"k": jnp.ones(3), "x": X}})(X), X)
