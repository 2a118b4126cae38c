"""As a decorator, on functions and methods; as a PyTree; and the options."""

import functools as ft
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import pytest
from eqx_sow import Append, Last, save_intermediates as S, sow, UnknownSowError

from tests.helpers import assert_close, modes_of, with_mode


pytestmark = pytest.mark.sample(1)


X = jnp.array([0.5, -1.0, 2.0])


@S
def _bare(x: int, *, flag: bool = False) -> str:
    """The doc."""
    return sow(x * (2 if flag else 3), "a")


@S(names="a")
def _with_options(x, *, flag=False):
    """The doc."""
    sow(x, "other")
    return sow(x * (2 if flag else 3), "a")


class Model(eqx.Module):
    linear: eqx.nn.Linear

    @S
    def bare(self, x, *, scale=1):
        """The doc."""
        return sow(self.linear(x), "h") * scale

    @S(tag="t")
    def with_options(self, x, *, scale=1):
        return sow(self.linear(x), "h", tag="t") * scale

    @eqx.filter_jit
    @S
    def jitted(self, x, *, scale=1):
        return sow(self.linear(x), "h") * scale

    @S
    @eqx.filter_jit
    def jits(self, x, *, scale=1):
        return sow(self.linear(x), "h") * scale

    @S()
    def empty(self, x, *, scale=1):
        return sow(self.linear(x), "h") * scale

    def plain(self, x, *, scale=1):
        return sow(self.linear(x), "h") * scale

    def __call__(self, x, *, scale=1):
        return sow(self.linear(x), "h") * scale


@pytest.fixture
def model():
    return Model(eqx.nn.Linear(3, 2, key=jr.key(0)))


@pytest.mark.parametrize("fn", [_bare, _with_options])
def test_function(call, fn):
    assert_close(call(fn, X), (X * 3, {"a": {"primal": X * 3}}))
    assert_close(call(fn, X, flag=True), (X * 2, {"a": {"primal": X * 2}}))


@pytest.mark.parametrize(
    "name", ["bare", "with_options", "jitted", "jits", "empty", "plain", "__call__"]
)
def test_method(call, model, name):
    method = getattr(model, name)
    if name in ("plain", "__call__"):
        method = S(method)
    h = model.linear(X)
    assert_close(call(method, X, scale=2), (h * 2, {"h": {"primal": h}}))


class _Doubled(Model):
    def __call__(self, x, *, scale=1):
        out, got = S(super().__call__)(x, scale=scale)
        return out + got["h"]["primal"]


def test_the_method_of_a_base_class(call, model):
    doubled = _Doubled(model.linear)
    h = model.linear(X)
    assert_close(call(doubled, X, scale=2), 3 * h)
    grads = eqx.filter_grad(lambda m: m(X).sum())(doubled)
    assert_close(grads.linear.bias, 2 * jnp.ones(2))


def test_name_doc_and_signature(model):
    assert _bare.__name__ == "_bare" and _bare.__qualname__ == "_bare"
    assert _bare.__doc__ == "The doc." and _bare.__module__ == __name__
    assert list(inspect.signature(_bare).parameters) == ["x", "flag"]
    assert inspect.signature(_bare).parameters["flag"].default is False
    assert _with_options.__name__ == "_with_options"
    assert _bare.__wrapped__(X) is not None
    assert Model.bare.__name__ == "bare" and Model.bare.__doc__ == "The doc."
    assert isinstance(S(model), eqx.Module)
    assert_close(S(model).__wrapped__, model)


def test_name_survives_flattening():
    leaves, treedef = jtu.tree_flatten(_bare)
    assert jtu.tree_unflatten(treedef, leaves).__name__ == "_bare"


def test_leaves_are_those_of_the_model(model):
    arrays = [x for x in jtu.tree_leaves(S(model)) if eqx.is_array(x)]
    assert all(a is b for a, b in zip(arrays, jtu.tree_leaves(model), strict=True))
    bound = [x for x in jtu.tree_leaves(S(model.plain)) if eqx.is_array(x)]
    assert all(a is b for a, b in zip(bound, jtu.tree_leaves(model), strict=True))
    assert not [x for x in jtu.tree_leaves(S(model)) if isinstance(x, str)]
    # So what JAX takes, it takes.
    assert_close(jax.jit(lambda f, x: f(x))(S(model), X), S(model)(X))


def test_gradient_with_respect_to_the_wrapped_model(call, model):
    loss = lambda saved, x: jnp.sum(saved(x)[1]["h"]["primal"] ** 2)
    grads = call(eqx.filter_grad(loss), S(model), X)
    expected = eqx.filter_grad(lambda m, x: jnp.sum(m.linear(x) ** 2))(model, X)
    assert_close(grads.__wrapped__.linear, expected.linear)


def test_partial_and_lambda(call, model):
    assert_close(call(S(ft.partial(model, scale=2)), X)[0], model(X) * 2)
    assert_close(call(S(eqx.Partial(model, scale=2)), X)[0], model(X) * 2)
    assert_close(call(S(lambda x: model(x)), X)[0], model(X))


def test_keyword_and_default_arguments(call):
    def f(a, /, b=1.0, *rest, c, **more):
        return sow(a * b + sum(rest) * c + more["d"], "out")

    out, _ = call(S(f), X, 2.0, 3.0, c=X, d=X)
    assert_close(out, X * 2 + 3 * X + X)
    _, got = S(lambda fn, self: sow(fn + self, "s"))(fn=X, self=X)
    assert_close(got["s"]["primal"], 2 * X)


# --- options ---


def _net(x):
    for i in range(3):
        x = sow(x * 2, f"blocks/{i}/attn")
        x = sow(x + 1, f"blocks/{i}/mlp")
    return jnp.sum(sow(x**2, "head"))


ATTN = [f"blocks/{i}/attn" for i in range(3)]


@pytest.mark.parametrize(
    "names, expected",
    [
        ("head", ["head"]),
        ("blocks/*/attn", ATTN),
        (["head", "blocks/*/attn"], [*ATTN, "head"]),
        (("blocks/[01]/attn",), ATTN[:2]),
        (lambda name: name.endswith("0/mlp"), ["blocks/0/mlp"]),
        ([lambda name: name == "head"], ["head"]),
        (None, None),
    ],
)
def test_names(call, names, expected):
    _, everything = S(_net)(X)
    out, got = call(S(_net, names=names), X)
    assert_close(out, _net(X))
    expected = list(everything) if expected is None else expected
    assert set(got) == set(expected)
    assert_close(got, {n: everything[n] for n in expected})


@pytest.mark.parametrize("modes", ["primal", "cotangent", ["cotangent", "primal"]])
def test_modes(call, modes):
    _, everything = S(jax.grad(_net))(X)
    _, got = call(S(jax.grad(_net), modes=modes), X)
    wanted = {modes} if isinstance(modes, str) else set(modes)
    assert modes_of(got) == {n: wanted for n in everything}
    for mode in wanted:
        assert_close(with_mode(got, mode), with_mode(everything, mode))


def test_mode_that_nothing_has(call):
    with pytest.raises(UnknownSowError, match="modes=.*'tangent'.*'primal'"):
        call(S(_net, modes="tangent"), X)


@pytest.mark.filterwarnings("ignore:.*found no mark")
def test_tags_are_any_hashable(call):
    f = lambda x: sow(sow(x, "a", tag=("t", 1)) * 2, "b", tag=None)
    assert_close(call(S(f, tag=("t", 1)), X)[1], {"a": {"primal": X}})
    assert_close(call(S(f, tag=None), X)[1], {"b": {"primal": X * 2}})
    assert call(S(f), X)[1] == {}


def test_transform(call):
    out, got = call(S(jax.grad(_net), transform=jnp.mean, names="head"), X)
    _, plain = S(jax.grad(_net), names="head")(X)
    assert_close(out, jax.grad(_net)(X))
    assert_close(got["head"], {k: jnp.mean(v) for k, v in plain["head"].items()})


def test_transform_sees_one_lane(call):
    f = jax.vmap(lambda x: sow(x, "a"))
    _, got = call(S(f, transform=jnp.max), jnp.stack([X, -X]))
    assert_close(got["a"]["primal"], jnp.array([2.0, 1.0]))


def test_transform_by_name(call):
    functions = {"head": lambda x: {"max": x.max()}, "blocks/*/attn": jnp.sum}
    _, got = call(S(_net, transform=functions), X)
    _, plain = S(_net)(X)
    for name, entry in plain.items():
        value = entry["primal"]
        if name == "head":
            value = {"max": value.max()}
        elif name.endswith("attn"):
            value = value.sum()
        assert_close(got[name]["primal"], value)


def _repeat(x):
    for _ in range(3):
        x = sow(x * 2, "same")
    return jnp.sum(sow(x, "once"))


def test_append(call):
    _, got = call(S(jax.grad(_repeat), reduce=Append()), X)
    assert_close(got["same"]["primal"], (X * 2, X * 4, X * 8))
    ones = jnp.ones(3)
    assert_close(got["same"]["cotangent"], (ones * 4, ones * 2, ones))
    assert_close(got["once"]["primal"], (X * 8,))


def test_append_is_differentiable_and_batched(call):
    f = lambda x: sum(map(jnp.sum, S(_repeat, reduce=Append())(x)[1]["same"]["primal"]))
    assert_close(call(jax.grad(f), X), jnp.full(3, 14.0))
    _, got = call(S(jax.vmap(_repeat), reduce=Append()), jnp.stack([X, X]))
    assert got["same"]["primal"][2].shape == (2, 3)


def test_append_of_different_shapes(call):
    f = lambda x: (sow(x, "a"), sow(x[:2].astype(jnp.int32), "a"), sow({"d": x}, "a"))
    _, got = call(S(f, reduce=Append()), X)
    assert_close(got["a"]["primal"], (X, X[:2].astype(jnp.int32), {"d": X}))


def test_last(call):
    _, got = call(S(_repeat, reduce=Last()), X)
    assert_close(with_mode(got, "primal"), {"same": X * 8, "once": X * 8})
    _, got = call(S(jax.grad(_repeat), reduce={"same": Last()}), X)
    # A cotangent runs backward: its last execution belongs to the first place.
    last = {"primal": X * 8, "cotangent": 4 * jnp.ones(3)}
    assert_close({m: got["same"][m] for m in last}, last)


def test_reduce_by_glob(call):
    _, got = call(S(_repeat, reduce={"sa*": Append()}), X)
    assert len(got["same"]["primal"]) == 3
    assert_close(got["once"]["primal"], X * 8)
