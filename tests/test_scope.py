"""`scope=True`: names of sows inside a module begin with the module's path."""

import contextlib
import dataclasses as dc
from collections.abc import Callable

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_sow import (
    DuplicateSowError,
    plant,
    save_intermediates as S,
    scope,
    Sow,
    sow,
    UnknownSowError,
)
from jaxtyping import Array

from .helpers import assert_close, with_mode
from .tables import under


X = jnp.array([0.3, -1.2, 0.7])
XS = jnp.stack([X, 2 * X])


class Block(eqx.Module):
    w: Array

    def __call__(self, x):
        return sow(jnp.tanh(self.w * x), "act")


class Net(eqx.Module):
    blocks: list[Block]
    head: Block

    def __init__(self):
        self.blocks = [Block(X), Block(1 - X)]
        self.head = Block(2 * X)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return sow(self.head(x), "out")


def _by_hand(net, x, prefix=""):
    a = jnp.tanh(net.blocks[0].w * x)
    b = jnp.tanh(net.blocks[1].w * a)
    c = jnp.tanh(net.head.w * b)
    names = ("blocks/0/act", "blocks/1/act", "head/act", "out")
    return dict(zip((prefix + n for n in names), (a, b, c, c)))


def test_without_scope_the_names_clash():
    with pytest.raises(DuplicateSowError):
        S(Net())(X)


def test_of_fn_itself(call):
    net = Net()
    out, got = call(S(net, scope=True), X)
    assert_close(with_mode(got, "primal"), _by_hand(net, X))
    assert_close(out, net(X))


def test_of_an_argument(call):
    net = Net()

    def fn(model, x):
        return sow(model(sow(x, "in")), "after")

    out, got = call(S(fn, scope=True), net, X)
    expected = {"in": X, **_by_hand(net, X, "model/"), "after": out}
    assert_close(with_mode(got, "primal"), expected)


@pytest.mark.parametrize(
    "wrap",
    [
        eqx.filter_jit,
        eqx.filter_checkpoint,
        eqx.Partial,
        lambda net: net.__call__,
        lambda net: eqx.filter_jit(eqx.filter_checkpoint(net)),
    ],
)
def test_through_wrappers(wrap, call):
    net = Net()
    _, got = call(S(wrap(net), scope=True), X)
    assert_close(with_mode(got, "primal"), _by_hand(net, X))


def test_under_vmap_and_grad(call):
    net = Net()
    _, got = call(S(eqx.filter_vmap(net), scope=True), XS)
    expected = jax.vmap(lambda x: _by_hand(net, x))(XS)
    assert_close(with_mode(got, "primal"), expected)

    def loss(net, x):
        return jnp.sum(net(x) ** 2)

    grads, got = call(S(eqx.filter_grad(loss), scope=True), net, X)
    assert type(grads) is Net and type(grads.blocks[0]) is Block
    seen = _by_hand(net, X, "net/")
    assert_close(with_mode(got, "primal"), seen)
    assert_close(got["net/out"]["cotangent"], 2 * seen["net/out"])
    assert set(with_mode(got, "cotangent")) == set(seen)


def test_in_a_scan(call):
    stacked = eqx.filter_vmap(Block)(jnp.stack([X, 2 * X, 3 * X]))

    def fn(layers, x):
        return lax.scan(lambda x, layer: (layer(x), None), x, layers)[0]

    _, got = call(S(fn, scope=True), stacked, X)
    a = jnp.tanh(X * X)
    b = jnp.tanh(2 * X * a)
    c = jnp.tanh(3 * X * b)
    assert_close(got, {"layers/*/act": {"primal": jnp.stack([a, b, c])}})


def test_functions_called_by_a_module_are_inside_it():
    def helper(x):
        return sow(x + 1, "helped")

    class Model(eqx.Module):
        def __call__(self, x):
            return helper(x)

    _, got = S(lambda m, x: helper(m(x)), scope=True)(Model(), X)
    assert list(got) == ["m/helped", "helped"]


def test_a_function_jitted_before_is_in_the_scope_of_its_caller():
    helper = jax.jit(lambda x: sow(x + 1, "helped"))
    helper(X)

    class Model(eqx.Module):
        def __call__(self, x):
            return helper(x)

    def fn(a, b, x):
        return a(b(x))

    for _ in range(2):
        _, got = S(fn, scope=True)(Model(), Model(), X)
        assert list(got) == ["b/helped", "a/helped"]


def test_other_methods_called_from_call():
    class Model(eqx.Module):
        def encode(self, x):
            return sow(x * 2, "encoded")

        def __call__(self, x):
            return self.encode(x)

    assert list(S(lambda m, x: m(x), scope=True)(Model(), X)[1]) == ["m/encoded"]


def test_captured_modules_have_their_own_path():
    net = Net()
    _, got = S(net, capture=Block, scope=True)(X)
    values = with_mode(got, "primal")
    expected = _by_hand(net, X)
    for name in ("blocks/0", "blocks/1", "head"):
        expected[name] = expected[f"{name}/act"]
    assert_close(values, expected)


def test_sow_modules():
    # A `Sow` is a module too.
    model = eqx.nn.Sequential([Sow("named"), Sow(), eqx.nn.Sequential([Sow("deep")])])
    assert list(S(model, scope=True)(X)[1]) == [
        "layers/0/named",
        "layers/1",
        "layers/2/layers/0/deep",
    ]


def test_globs_select_scoped_names():
    net = Net()
    _, got = S(net, scope=True, names="blocks/*/act")(X)
    assert list(got) == ["blocks/0/act", "blocks/1/act"]
    with pytest.raises(UnknownSowError, match="blocks/0/act"):
        S(net, scope=True, names="act")(X)


def test_plant_by_scoped_name():
    net = Net()
    out = plant(net, {"head/act": lambda h: 2 * h}, scope=True)(X)
    assert_close(out, 2 * net(X))
    planted = plant(net, {"blocks/0/act": jnp.zeros(3)}, scope=True)
    assert_close(planted(X), jnp.zeros(3))


def test_the_index_of_a_layer_behind_the_scope_of_a_user():
    keys = jr.split(jr.key(0), 3)
    stack = eqx.filter_vmap(lambda key: eqx.nn.Linear(3, 3, key=key))(keys)
    arrays, static = eqx.partition(stack, eqx.is_array)

    def fn(arrays, x):
        with scope("first"):
            step = lambda x, layer: (eqx.combine(layer, static)(x), None)
            return jax.lax.scan(step, x, arrays)[0]

    _, got = S(fn, capture=True, names="first/arrays/1")(arrays, X)
    one = lambda i: eqx.combine(jax.tree.map(lambda a: a[i], arrays), static)
    assert_close(dict(got), {"first/arrays/1": {"primal": one(1)(one(0)(X))}})


@pytest.mark.filterwarnings("ignore:.*found no mark")
def test_scope_of_a_model_without_sows():
    assert S(eqx.nn.Linear(3, 3, key=jr.key(0)), scope=True)(X)[1] == {}


def test_what_comes_back_is_plain():
    net = Net()
    (out, back), _ = S(lambda n, x: (n(x), n), scope=True)(net, X)
    assert type(back) is Net and type(back.blocks[0]) is Block


class _Coder(eqx.Module):
    linear: eqx.nn.Linear
    activation: Callable = jnp.tanh

    def encode(self, x):
        return sow(self.activation(self._linear(x)), "h")

    def _linear(self, x):
        return sow(self.linear(x), "linear")

    @staticmethod
    def twice(x):
        return 2 * x


class _Coders(eqx.Module):
    one: _Coder
    two: _Coder

    def __call__(self, x):
        return self.two.encode(self.one.encode(self.one.twice(x)))


def test_methods():
    linear = eqx.nn.Linear(3, 3, key=jr.key(0))
    model = _Coders(_Coder(linear), _Coder(linear, jnp.sin))
    out, got = S(model, scope=True)(jnp.ones(3))
    assert list(got) == ["one/linear", "one/h", "two/linear", "two/h"]
    assert_close(out, model(jnp.ones(3)))
    _, got = S(lambda m, x: m.one.encode(x), scope=True)(model, jnp.ones(3))
    assert list(got) == ["m/one/linear", "m/one/h"]


class _Jitted(eqx.Module):
    w: Array

    @eqx.filter_jit
    def __call__(self, x):
        return sow(self.w * x, "h")

    @eqx.filter_jit
    def other(self, x):
        return sow(self.w + x, "h")


class _Replaced(eqx.Module):
    w: Array

    def go(self, x):
        return sow(self.w * x, "h")

    def __call__(self, x):
        return dc.replace(self, w=2 * self.w).go(x)


def test_methods_under_jit():
    for fn in (lambda m, x: m(x), lambda m, x: m.other(x)):
        _, got = S(fn, scope=True)(_Jitted(X), X)
        assert list(got) == ["m/h"]


class _Used(eqx.Module):
    w: Array

    @property
    def of_property(self):
        return sow(self.w, "property")

    @staticmethod
    def static(x):
        return sow(x, "static")

    @classmethod
    def of_class(cls, x):
        return sow(x, "class")

    def generator(self, x):
        yield sow(self.w * x, "generator")


class _User(eqx.Module):
    used: _Used

    def __call__(self, x):
        m = self.used
        return m.of_property + m.static(x) + m.of_class(x) + next(m.generator(x))


def test_what_is_no_method_has_the_path_of_who_uses_it():
    _, got = S(lambda m, x: m(x), scope=True)(_User(_Used(X)), X)
    assert list(got) == ["m/property", "m/static", "m/class", "m/generator"]


def test_a_method_that_the_class_gets_later():
    class Late(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return sow(x, "h")

    layers = [Late(X), Late(2 * X)]
    assert list(S(lambda m, x: m[1](x), scope=True)(layers, X)[1]) == ["m/1/h"]
    Late.scale = lambda self, x: sow(self.weight * x, "h")
    _, got = S(lambda m, x: m[1].scale(m[0].scale(x)), scope=True)(layers, X)
    assert_close(got["m/0/h"]["primal"], X * X)
    assert_close(got["m/1/h"]["primal"], 2 * X * X * X)


@pytest.mark.parametrize("options", [{}, {"capture": True, "methods": "go"}])
def test_a_module_that_makes_another(options):
    out, got = S(lambda m, x: m(x), scope=True, **options)(_Replaced(X), X)
    expected = dict.fromkeys(["m/h", "m.go"] if options else ["m/h"], 2 * X * X)
    assert_close(with_mode(got, "primal"), expected)
    assert_close(out, 2 * X * X)


@under("eager", "vmap", "jit", "checkpoint")
@pytest.mark.parametrize("inner", ["plant", "capture", "both"])
def test_what_listens_inside_without_scope_changes_no_name(inner, wrap):
    net, x = Net(), XS if wrap is jax.vmap else X
    fn = lambda f: f
    if inner != "capture":
        fn = lambda f: plant(f, {"act": lambda h: 2 * h})
    if inner != "plant":
        planted = fn
        fn = lambda f: S(planted(f), tag="other", capture=True)
    _, got = S(fn(wrap(lambda x: net(x))), scope=True)(x)

    def by_hand(x):
        factor = 1 if inner == "capture" else 2
        a = factor * jnp.tanh(net.blocks[0].w * x)
        b = factor * jnp.tanh(net.blocks[1].w * a)
        c = factor * jnp.tanh(net.head.w * b)
        names = "blocks/0/act", "blocks/1/act", "head/act", "out"
        return {f"net/{name}": y for name, y in zip(names, (a, b, c, c))}

    expected = jax.vmap(by_hand)(x) if wrap is jax.vmap else by_hand(x)
    assert_close(with_mode(got, "primal"), expected)


def test_modules_whose_calls_raise():
    """They return nothing that could be marked, but have names."""

    class Fails(eqx.Module):
        w: jax.Array

        def __call__(self, x):
            sow(self.w * x, "before")
            raise ValueError

    class Model(eqx.Module):
        layers: list

        def __call__(self, x):
            for layer in self.layers:
                with contextlib.suppress(ValueError):
                    layer(x)
            return 2 * x

    x = jnp.array([0.3, 0.5])
    model = Model([Fails(x), Fails(x + 1)])
    _, got = S(lambda m, x: m(x), scope=True, capture=True)(model, x)
    assert list(got) == ["m/layers/0/before", "m/layers/1/before", "m"]
    for i in range(2):
        assert_close(got[f"m/layers/{i}/before"]["primal"], model.layers[i].w * x)
