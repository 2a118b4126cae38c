"""The same numbers as flax finds, on the same weights."""

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_sow import save_intermediates as S, sow
from flax import nnx

from .helpers import assert_close, with_mode


pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("standard_promotion"),
]


X = jnp.array([0.3, -1.2, 0.7])
XS = jnp.stack([X, -X, 2 * X, 0.1 * X])
SIZES = (3, 5, 4, 2)


class Ours(eqx.Module):
    layers: list

    def __init__(self, key):
        keys = jr.split(key, len(SIZES) - 1)
        self.layers = [
            eqx.nn.Linear(i, o, key=k) for i, o, k in zip(SIZES, SIZES[1:], keys)
        ]

    def __call__(self, x):
        for i, layer in enumerate(self.layers[:-1]):
            x = sow(jnp.tanh(layer(x)), f"h{i}")
        return self.layers[-1](x)


class Linen(linen.Module):
    def setup(self):
        self.layers = [linen.Dense(n) for n in SIZES[1:]]

    def __call__(self, x):
        for i, layer in enumerate(self.layers[:-1]):
            x = jnp.tanh(layer(x))
            self.sow("intermediates", f"h{i}", x)
            x = self.perturb(f"h{i}", x)
        return self.layers[-1](x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List(
            [nnx.Linear(i, o, rngs=rngs) for i, o in zip(SIZES, SIZES[1:])]
        )

    def __call__(self, x):
        for i, layer in enumerate(self.layers[:-1]):
            x = jnp.tanh(layer(x))
            self.sow(nnx.Intermediate, f"h{i}", x)
            x = self.perturb(f"h{i}", x)
        return self.layers[-1](x)


@pytest.fixture
def ours():
    return Ours(jr.key(0))


@pytest.fixture
def params(ours):
    return {
        f"layers_{i}": {"kernel": layer.weight.T, "bias": layer.bias}
        for i, layer in enumerate(ours.layers)
    }


@pytest.fixture
def nnx_model(ours):
    model = Nnx(nnx.Rngs(0))
    for mine, theirs in zip(ours.layers, model.layers):
        theirs.kernel[...] = mine.weight.T
        theirs.bias[...] = mine.bias
    return model


def _loss(model, x):
    return jnp.sum(model(x) ** 2)


def test_linen_sow(ours, params, call):
    y, state = Linen().apply({"params": params}, X, mutable=["intermediates"])
    out, got = call(S(ours), X)
    assert_close(out, y)
    # A tuple, since flax appends.
    theirs = {n: v[0] for n, v in state["intermediates"].items()}
    assert_close(with_mode(got, "primal"), theirs)


def test_linen_sow_of_a_batch(ours, params, call):
    y, state = Linen().apply({"params": params}, XS, mutable=["intermediates"])
    out, got = call(S(jax.vmap(lambda x: ours(x))), XS)
    assert_close(out, y)
    theirs = {n: v[0] for n, v in state["intermediates"].items()}
    assert_close(with_mode(got, "primal"), theirs)


def test_linen_capture_intermediates(ours, params, call):
    y, state = Linen().apply(
        {"params": params},
        X,
        mutable=["intermediates"],
        capture_intermediates=lambda m, _: isinstance(m, linen.Dense),
    )
    out, got = call(S(ours, capture=eqx.nn.Linear, names="layers/*"), X)
    assert_close(out, y)
    theirs = {
        f"layers/{i}": state["intermediates"][f"layers_{i}"]["__call__"][0]
        for i in range(3)
    }
    assert_close(with_mode(got, "primal"), theirs)


def test_linen_capture_everything(ours, params, call):
    _, state = Linen().apply(
        {"params": params},
        X,
        mutable=["intermediates"],
        capture_intermediates=True,
    )
    theirs = dict(state["intermediates"])
    expected = {".": theirs.pop("__call__")[0]}
    for name, value in theirs.items():
        if name.startswith("layers"):
            expected[name.replace("_", "/")] = value["__call__"][0]
        else:
            expected[name] = value[0]
    _, got = call(S(ours, capture=True), X)
    assert_close(with_mode(got, "primal"), expected)


@pytest.mark.slow
def test_linen_perturb(ours, params, call):
    variables = Linen().init(jr.key(0), X)
    zeros = variables["perturbations"]

    def loss(params, perturbations):
        variables = {"params": params, "perturbations": perturbations}
        return jnp.sum(Linen().apply(variables, X) ** 2)

    theirs_params, theirs = jax.grad(loss, argnums=(0, 1))(params, zeros)
    grads, got = call(S(eqx.filter_grad(_loss)), ours, X)
    assert_close(with_mode(got, "cotangent"), dict(theirs))
    for i, layer in enumerate(grads.layers):
        assert_close(layer.weight, theirs_params[f"layers_{i}"]["kernel"].T)
        assert_close(layer.bias, theirs_params[f"layers_{i}"]["bias"])


def _plain(state):
    """The arrays in a `State`, by path."""
    pure = nnx.to_pure_dict(state)
    leaves, _ = jax.tree_util.tree_flatten_with_path(pure)
    return {
        "/".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path): leaf
        for path, leaf in leaves
    }


def test_nnx_sow(ours, nnx_model, call):
    y, state = nnx.capture(nnx_model, nnx.Intermediate)(X)
    out, got = call(S(ours), X)
    assert_close(out, y)
    theirs = _plain(state)
    for name in ("h0", "h1"):
        (value,) = (v for k, v in theirs.items() if k.split("/")[0] == name)
        assert_close(got[name]["primal"], value)


def test_nnx_method_outputs(ours, nnx_model, call):
    y, state = nnx.capture(
        nnx_model, nnx.Intermediate, method_outputs=nnx.Intermediate
    )(X)
    out, got = call(S(ours, capture=eqx.nn.Linear), X)
    assert_close(out, y)
    theirs = _plain(state)
    for i in range(3):
        (value,) = (v for k, v in theirs.items() if k.startswith(f"layers/{i}/"))
        assert_close(got[f"layers/{i}"]["primal"], value)


def test_nnx_perturb(ours, nnx_model, call):
    run = lambda model, x: model(x)
    _, zeros = nnx.capture(run, nnx.Perturbation)(nnx_model, X)

    def loss(model, perturbations, x):
        forward = nnx.capture(run, nnx.Intermediate, init=perturbations)
        out, _ = forward(model, x)
        return jnp.sum(out**2)

    theirs = _plain(nnx.grad(loss, argnums=1)(nnx_model, zeros, X))
    _, got = call(S(eqx.filter_grad(_loss)), ours, X)
    assert_close(with_mode(got, "cotangent"), theirs)
