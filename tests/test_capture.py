"""`capture=`: submodules of a model as it is."""

import abc
import copy
import dataclasses as dc
import functools as ft
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from beartype import beartype
from eqx_sow import (
    Append,
    plant,
    save_intermediates as S,
    Sow,
    sow,
    SowError,
    tap,
    UnknownSowError,
)
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, jaxtyped

from .helpers import assert_close, Encoder, modes_of, with_mode
from .tables import under


X = jnp.array([0.3, -1.2, 0.7])
XS = jnp.stack([X, 2 * X, -X, 0 * X])


def _mlp(seed=0, depth=2):
    return eqx.nn.MLP(3, 2, 4, depth, activation=jnp.tanh, key=jr.key(seed))


def _by_hand(mlp, x, prefix="", eps=None):
    """The output of an `_mlp`, and those of its layers with `eps` added to them."""
    seen = {}
    for i, layer in enumerate(mlp.layers):
        x = layer.weight @ x + layer.bias
        if eps is not None:
            x = x + eps[f"{prefix}layers/{i}"]
        seen[f"{prefix}layers/{i}"] = x
        if i + 1 < len(mlp.layers):
            x = jnp.tanh(x)
    return x, seen


def _loss(model, x):
    return jnp.sum(model(x) ** 2)


def _cotangents(mlp, x, prefix=""):
    zeros = jtu.tree_map(jnp.zeros_like, _by_hand(mlp, x, prefix)[1])
    return jax.grad(lambda e: jnp.sum(_by_hand(mlp, x, prefix, e)[0] ** 2))(zeros)


class Tower(eqx.Module):
    """Children in a list, a dict and a tuple in a tuple."""

    blocks: list
    heads: dict
    deep: tuple

    def __init__(self, key):
        keys = jr.split(key, 6)
        make = lambda k: eqx.nn.Linear(3, 3, key=k)
        self.blocks = [make(keys[0]), make(keys[1])]
        self.heads = {"mean": make(keys[2]), "scale": make(keys[3])}
        self.deep = ((make(keys[4]),), make(keys[5]))

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        x = self.heads["mean"](x) + self.heads["scale"](x)
        return self.deep[1](self.deep[0][0](x))


# --- What is selected ---


def test_true_marks_every_module_with_a_call(call):
    mlp = _mlp()
    out, got = call(S(mlp, capture=True), X)
    expected, seen = _by_hand(mlp, X)
    assert_close(out, expected)
    assert_close(with_mode(got, "primal"), {**seen, ".": expected})


def test_order_of_execution():
    tower = Tower(jr.key(0))
    _, got = S(tower, capture=True)(X)
    assert list(got) == [
        "blocks/0",
        "blocks/1",
        "heads/mean",
        "heads/scale",
        "deep/0/0",
        "deep/1",
        ".",
    ]


def test_class(call):
    mlp = _mlp()
    _, got = call(S(mlp, capture=eqx.nn.Linear), X)
    assert_close(with_mode(got, "primal"), _by_hand(mlp, X)[1])


def test_tuple_of_classes():
    model = eqx.nn.Sequential(
        [
            eqx.nn.Linear(3, 3, key=jr.key(0)),
            eqx.nn.LayerNorm(3),
            eqx.nn.Lambda(jnp.tanh),
        ]
    )
    _, got = S(model, capture=(eqx.nn.LayerNorm, eqx.nn.Lambda))(X)
    assert list(got) == ["layers/1", "layers/2"]
    assert_close(got["layers/2"]["primal"], jnp.tanh(got["layers/1"]["primal"]))


def test_base_class_selects_subclasses():
    class MyLinear(eqx.nn.Linear):
        pass

    model = eqx.nn.Sequential([MyLinear(3, 3, key=jr.key(0))])
    assert list(S(model, capture=eqx.nn.Linear)(X)[1]) == ["layers/0"]


def test_predicate_is_given_name_and_module():
    mlp = _mlp()
    asked = {}

    def pick(path, module):
        asked[path] = type(module)
        return path.endswith("1")

    _, got = S(mlp, capture=pick)(X)
    assert list(got) == ["layers/1"]
    linear = eqx.nn.Linear
    # The path is the string that is used as the name.
    assert asked == {
        ".": eqx.nn.MLP,
        "layers/0": linear,
        "layers/1": linear,
        "layers/2": linear,
    }


def test_predicate_on_the_module():
    big = lambda path, m: isinstance(m, eqx.nn.Linear) and m.out_features == 2
    assert list(S(_mlp(), capture=big)(X)[1]) == ["layers/2"]


def test_names_and_modes_select_among_the_captured(call):
    model = _mlp()
    grad = eqx.filter_grad(_loss)
    saved = S(grad, capture=True, names="model/layers/[01]", modes="cotangent")
    _, got = call(saved, model, X)
    expected = _cotangents(model, X, "model/")
    names = ["model/layers/0", "model/layers/1"]
    assert_close(got, {n: {"cotangent": expected[n]} for n in names})


def test_transform_and_spec_for_captured_modules(call):
    mlp = _mlp()
    saved = S(
        mlp,
        capture=eqx.nn.Linear,
        transform={"layers/*": jnp.sum},
        spec={"layers/*": Float[Array, ""]},
    )
    _, got = call(saved, X)
    expected = {n: jnp.sum(v) for n, v in _by_hand(mlp, X)[1].items()}
    assert_close(with_mode(got, "primal"), expected)


def test_tag_holds_for_captured_modules():
    mlp = _mlp()

    def fn(mlp, x):
        return sow(mlp(x), "out")

    _, got = S(fn, capture=eqx.nn.Linear, tag="layers")(mlp, X)
    assert list(got) == [f"mlp/layers/{i}" for i in range(3)]
    (_, inner), outer = S(S(fn, capture=eqx.nn.Linear, tag="layers"))(mlp, X)
    assert list(outer) == ["out"] and list(inner) == list(got)


def test_methods():
    class Codec(eqx.Module):
        inner: eqx.nn.Linear

        def encode(self, x):
            return self.inner(x)

        def decode(self, x, *, shift=0.0):
            return self.inner.weight.T @ (x - self.inner.bias) + shift

    class Model(eqx.Module):
        codec: Codec

        def __call__(self, x):
            return self.codec.decode(self.codec.encode(x), shift=1.0)

    model = Model(Codec(eqx.nn.Linear(3, 3, key=jr.key(0))))
    out, got = S(model, capture=Codec, methods=("encode", "decode"))(X)
    assert_close(
        with_mode(got, "primal"),
        {"codec.encode": model.codec.inner(X), "codec.decode": out},
    )
    _, got = S(model, capture=True, methods=("__call__", "encode"))(X)
    assert list(got) == ["codec/inner", "codec.encode", "."]
    _, got = S(model, capture=Codec, methods="encode", inputs=True)(X)
    assert list(got) == ["codec.encode.inputs", "codec.encode"]


def test_a_method_that_is_mapped(call):
    class Model(eqx.Module):
        linear: eqx.nn.Linear

        def encode(self, x):
            return self.linear(x)

        def __call__(self, xs):
            return jax.vmap(self.encode)(xs)

    model = Model(eqx.nn.Linear(3, 2, key=jr.key(0)))
    out, got = call(S(model, capture=Model, methods=("encode",)), XS)
    assert_close([e["primal"] for e in got.values()], [out])


def test_inputs(call):
    class Model(eqx.Module):
        linear: eqx.nn.Linear
        drop: eqx.nn.Dropout

        def __call__(self, x, key):
            return self.drop(self.linear(x), key=key)

    model = Model(eqx.nn.Linear(3, 3, key=jr.key(0)), eqx.nn.Dropout(0.5))
    key = jr.key(1)
    out, got = call(
        S(model, capture=(eqx.nn.Linear, eqx.nn.Dropout), inputs=True), X, key
    )
    h = model.linear(X)
    assert_close(
        with_mode(got, "primal"),
        {
            "linear.inputs": ((X,), {}),
            "linear": h,
            "drop.inputs": ((h,), {"key": key}),
            "drop": out,
        },
    )


def test_inputs_have_cotangents(call):
    mlp = _mlp()
    _, got = call(S(eqx.filter_grad(_loss), capture=eqx.nn.Linear, inputs=True), mlp, X)
    out = _cotangents(mlp, X, "model/")
    for i in (1, 2):
        back = mlp.layers[i].weight.T @ out[f"model/layers/{i}"]
        (ct,), _ = got[f"model/layers/{i}.inputs"]["cotangent"]
        assert_close(ct, back)


def test_inputs_of_any_kind(call):
    class Layer(eqx.Module):
        def __call__(self, x, how, scale=2.0, *, extra):
            assert how == "up" and extra["f"] is jnp.tanh
            return x * scale

    layer = Layer()

    def fn(layer, x):
        return layer(x, "up", extra={"f": jnp.tanh, "none": None, "x": x})

    _, got = call(S(fn, capture=True, inputs=True), layer, X)
    args, kwargs = got["layer.inputs"]["primal"]
    assert_close(args[0], X)
    assert args[1] == "up" and kwargs["extra"]["f"] is jnp.tanh
    assert kwargs["extra"]["none"] is None
    assert_close(got["layer"]["primal"], 2 * X)


def test_an_output_of_any_kind(call):
    class Layer(eqx.Module):
        def __call__(self, x):
            return {"x": x, "what": "a string", "f": jnp.tanh, "none": None}

    _, got = call(S(lambda layer, x: layer(x)["x"], capture=True), Layer(), X)
    value = got["layer"]["primal"]
    assert value["what"] == "a string" and value["f"] is jnp.tanh
    assert value["none"] is None
    assert_close(value["x"], X)


# --- Unnamed `Sow()` ---


def test_unnamed_sow_is_named_by_its_path(call):
    model = eqx.nn.Sequential([eqx.nn.Lambda(jnp.sin), Sow(), eqx.nn.Lambda(jnp.cos)])
    out, got = call(S(model), X)
    assert_close(out, jnp.cos(jnp.sin(X)))
    assert_close(got, {"layers/1": {"primal": jnp.sin(X)}})
    _, got = call(S(lambda net, x: net(x)), model, X)
    assert list(got) == ["net/layers/1"]


def test_unnamed_sow_under_capture_is_one_site():
    model = eqx.nn.Sequential([eqx.nn.Lambda(jnp.sin), Sow()])
    _, got = S(model, capture=True)(X)
    assert list(got) == ["layers/0", "layers/1", "."]


def test_unnamed_sow_has_a_tag_and_a_spec():
    model = eqx.nn.Sequential([Sow(tag="a"), Sow(spec=Float[Array, " 3"])])
    assert list(S(model)(X)[1]) == ["layers/1"]
    assert list(S(model, tag="a")(X)[1]) == ["layers/0"]


def test_unnamed_sow_is_nothing_without_a_capture():
    model = eqx.nn.Sequential([Sow()])
    assert model(X) is X


# --- Where the model may be ---


@pytest.mark.parametrize(
    "where",
    [
        "fn",
        "bound method",
        "positional",
        "keyword",
        "tuple",
        "dict",
        "nested",
        "partial",
        "filter_jit",
        "argument filter_jit",
        "filter_vmap",
        "filter_checkpoint",
        "bound __call__",
    ],
)
def test_where_the_model_is(where, call):
    class Model(eqx.Module):
        mlp: eqx.nn.MLP

        def predict(self, x):
            return self.mlp(x)

        def __call__(self, x):
            return self.predict(x)

    mlp = _mlp()
    model = Model(mlp)
    x = X
    if where == "fn":
        fn, args, kwargs, prefix = mlp, (X,), {}, ""
    elif where == "bound method":
        fn, args, kwargs, prefix = model.predict, (X,), {}, "mlp/"
    elif where == "bound __call__":
        fn, args, kwargs, prefix = model.__call__, (X,), {}, "mlp/"
    elif where == "positional":
        fn, args, kwargs, prefix = lambda net, x: net(x), (mlp, X), {}, "net/"
    elif where == "keyword":
        fn = lambda x, *, net: net(x)
        args, kwargs, prefix = (X,), {"net": mlp}, "net/"
    elif where == "tuple":
        fn = lambda pair: pair[1](pair[0])
        args, kwargs, prefix = ((X, mlp),), {}, "pair/1/"
    elif where == "dict":
        fn = lambda d: d["net"](d["x"])
        args, kwargs, prefix = ({"net": mlp, "x": X},), {}, "d/net/"
    elif where == "nested":
        fn = lambda *stuff: stuff[1]["a"][0](stuff[0])
        args, kwargs, prefix = (X, {"a": [mlp]}), {}, "stuff/1/a/0/"
    elif where == "partial":
        fn, args, kwargs, prefix = eqx.Partial(mlp), (X,), {}, ""
    elif where == "filter_jit":
        fn, args, kwargs, prefix = eqx.filter_jit(mlp), (X,), {}, ""
    elif where == "argument filter_jit":
        fn = eqx.filter_jit(lambda net, x: net(x))
        args, kwargs, prefix = (mlp, X), {}, "net/"
    elif where == "filter_vmap":
        fn, args, kwargs, prefix = eqx.filter_vmap(mlp), (XS,), {}, ""
        x = XS
    else:
        fn, args, kwargs, prefix = eqx.filter_checkpoint(mlp), (X,), {}, ""
    out, got = call(S(fn, capture=eqx.nn.Linear), *args, **kwargs)
    by_hand = lambda x: _by_hand(mlp, x, prefix)
    expected, seen = jax.vmap(by_hand)(x) if x is XS else by_hand(x)
    assert_close(out, expected)
    assert_close(with_mode(got, "primal"), seen)


def test_several_models(call):
    a, b, c = _mlp(0), _mlp(1, 1), _mlp(2)

    def fn(first, x, *, second, rest):
        return first(x) + second(x) + rest[0](x)

    out, got = call(S(fn, capture=eqx.nn.Linear), a, X, second=b, rest=[c])
    expected = {}
    total = 0
    for mlp, prefix in ((a, "first/"), (b, "second/"), (c, "rest/0/")):
        y, seen = _by_hand(mlp, X, prefix)
        total = total + y
        expected.update(seen)
    assert_close(out, total)
    assert_close(with_mode(got, "primal"), expected)


def test_the_model_after_the_data(call):
    model = Tower(jr.key(0))
    out, got = call(S(lambda x, tower: tower(x), capture=Tower), X, model)
    assert_close(got, {"tower": {"primal": out}})


GLOBAL = eqx.nn.MLP(3, 2, 4, 1, activation=jnp.tanh, key=jr.key(7))


def _closed_over_global(x):
    return GLOBAL(x)


def _global_in_a_nested_function(x):
    return (lambda x: (lambda: GLOBAL(x))())(x)


def _captured(fn, mlp, *args):
    out, got = S(fn, capture=eqx.nn.Linear)(*args)
    expected, seen = _by_hand(mlp, args[0])
    assert_close(out, expected)
    values = with_mode(got, "primal")
    assert_close(list(values.values()), list(seen.values()))
    assert [n[-len("layers/0") :] for n in values] == list(seen)


# The same warning as for `eqx.filter_jit(jax.vmap(model))`.
@pytest.mark.filterwarnings("ignore:\\s*Possibly assigning")
@pytest.mark.parametrize(
    "wrap",
    [
        lambda mlp: lambda x: mlp(x),
        lambda mlp: _closed_over_global,
        lambda mlp: _global_in_a_nested_function,
        lambda mlp: eqx.filter_jit(lambda x: mlp(x)),
        lambda mlp: jax.jit(lambda x: mlp(x)),
        lambda mlp: ft.partial(lambda m, x: m(x), mlp),
        lambda mlp: ft.partial(mlp),
        lambda mlp: jtu.Partial(mlp),
        lambda mlp: jtu.Partial(lambda m, x: m(x), mlp),
        lambda mlp: eqx.filter_jit(eqx.Partial(mlp)),
        lambda mlp: eqx.Partial(lambda m, x: m(x), mlp),
        lambda mlp: (lambda inner: lambda x: inner(x))(lambda x: mlp(x)),
        lambda mlp: (lambda nets: lambda x: nets["net"](x))({"net": mlp}),
    ],
)
def test_a_model_that_is_hard_to_see(wrap):
    _captured(wrap(GLOBAL), GLOBAL, X)


@under("jit", "filter_jit", argument="jit")
def test_a_method_that_was_jitted(jit):
    _, got = S(jit(GLOBAL.__call__), capture=eqx.nn.Linear)(X)
    assert_close(with_mode(got, "primal"), _by_hand(GLOBAL, X, "")[1])


# The same warning as for `eqx.filter_jit(functools.wraps(model)(...))`.
@pytest.mark.filterwarnings("ignore:\\s*Possibly assigning")
@pytest.mark.parametrize(
    "wrap, prefix",
    [
        (lambda m: lambda x: m(x), "m/"),
        (lambda m: (lambda inner: lambda x: inner(x))(lambda x: m(x)), "m/"),
        (lambda m: ft.wraps(m)(lambda x: m(x)), ""),
        (lambda m: ft.partial(m), ""),
        (lambda m: ft.partial(lambda model, x: model(x), m), "model/"),
        (lambda m: ft.partial(lambda x, model: model(x), model=m), "model/"),
        (lambda m: jax.checkpoint(lambda x: m(x)), "m/"),
        (lambda m: eqx.filter_checkpoint(m), ""),
        (lambda m: eqx.filter_jit(m), ""),
        (lambda m: eqx.filter_jit(ft.partial(lambda model, x: model(x), m)), "model/"),
    ],
)
def test_names_inside_a_wrapper(wrap, prefix, call):
    mlp = _mlp()
    out, got = call(S(wrap(mlp), capture=eqx.nn.Linear), X)
    expected, seen = _by_hand(mlp, X, prefix)
    assert_close((out, with_mode(got, "primal")), (expected, seen))


@pytest.mark.parametrize(
    "wrap, prefix",
    [
        (lambda m: jax.grad(m), ""),
        (lambda m: jax.grad(lambda x: m(x)), "m/"),
        (lambda m: eqx.filter_grad(m), ""),
        (lambda m: eqx.filter_grad(lambda x: m(x)), "m/"),
        (lambda m: eqx.filter_value_and_grad(m), ""),
        (lambda m: eqx.filter_jacrev(m), ""),
        (lambda m: jax.jacrev(m), ""),
    ],
)
def test_names_inside_a_derivative(wrap, prefix):
    mlp = eqx.nn.MLP(3, "scalar", 4, 1, key=jr.key(0))
    _, got = S(wrap(mlp), capture=eqx.nn.Linear)(X)
    assert list(got) == [f"{prefix}layers/0", f"{prefix}layers/1"]
    eps = jnp.zeros(4)
    inner = lambda e: mlp.layers[1](jax.nn.relu(mlp.layers[0](X) + e))
    cotangent = got[f"{prefix}layers/0"]["cotangent"]
    assert_close(cotangent.reshape(4), jax.grad(lambda e: jnp.sum(inner(e)))(eps))


class _Doubled(eqx.Module):
    """A wrapper as in the documentation of `eqx.module_update_wrapper`."""

    fn: Callable

    @property
    def __wrapped__(self):
        return self.fn

    def __call__(self, x):
        return 2 * self.fn(x)


def test_a_wrapper_of_the_users(call):
    linear = eqx.nn.Linear(3, 3, key=jr.key(0))
    model = eqx.module_update_wrapper(_Doubled(linear))
    _, got = call(S(lambda model, x: model(x), capture=True), model, X)
    want = {"model/fn": linear(X), "model": 2 * linear(X)}
    assert_close(with_mode(got, "primal"), want)
    _, got = call(S(model, capture=_Doubled), X)
    assert_close(with_mode(got, "primal"), {".": 2 * linear(X)})


@pytest.mark.parametrize(
    "jacobian", [eqx.filter_jacrev, eqx.filter_jacfwd, eqx.filter_hessian]
)
def test_names_of_the_arguments_of_a_jacobian(jacobian):
    mlp = eqx.nn.MLP(3, "scalar", 4, 1, key=jr.key(0))
    fn = jacobian(lambda x, m: m(x))
    _, got = S(fn, capture=eqx.nn.Linear)(X, mlp)
    assert list(got) == ["m/layers/0", "m/layers/1"]


class _Documented(eqx.Module):
    """JAX formats this: {x}."""

    linear: eqx.nn.Linear

    def __call__(self, x):
        return self.linear(x)


def test_docstrings_do_not_change_names():
    model = _Documented(eqx.nn.Linear(3, 3, key=jr.key(0)))
    _, got = S(jax.vmap(model), capture=True)(XS)
    assert list(got) == ["linear", "."]


def test_defaults_and_partials_in_closures():
    first, second, third = (eqx.nn.Linear(3, 3, key=jr.key(i)) for i in range(3))
    by_name = ft.partial(lambda layer, x: layer(x), third)

    def fn(x, a=first, *, b=second):
        return by_name(b(a(x)))

    out, got = S(fn, capture=eqx.nn.Linear)(X)
    values = [first(X), second(first(X)), third(second(first(X)))]
    assert list(got) == ["a", "b", "layer"]
    assert_close(list(with_mode(got, "primal").values()), values)
    assert_close(out, values[-1])


def test_functions_that_share_a_variable():
    def make():
        layer = eqx.nn.Linear(3, 3, key=jr.key(0))

        def double():
            nonlocal layer
            layer = eqx.tree_at(lambda m: m.weight, layer, 2 * layer.weight)

        def fn(x):
            before = layer(x)
            double()
            return before + layer(x)

        return fn

    out, got = S(make(), capture=True, reduce=Append())(X)
    assert_close(out, make()(X))
    assert_close(sum(got["layer"]["primal"]), out)


_calls = 0


def test_global_variables_can_be_written():
    layer = eqx.nn.Linear(3, 3, key=jr.key(0))

    def fn(x):
        global _calls
        _calls += 1
        return layer(x)

    S(fn, capture=True)(X)
    assert _calls == 1


def _mapped(model, xs):
    return jax.vmap(model)(xs)


@pytest.mark.parametrize(
    "wrap, name",
    [
        (lambda m: jax.vmap(m), "layers/1"),
        (lambda m: ft.partial(_mapped, m), "model/layers/1"),
        (lambda m: (lambda f: lambda x: f(x))(lambda x: _mapped(m, x)), "m/layers/1"),
    ],
)
def test_an_unnamed_sow_that_is_hard_to_see(wrap, name):
    model = eqx.nn.Sequential([eqx.nn.Linear(3, 2, key=jr.key(0)), Sow()])
    out, got = S(wrap(model))(XS)
    assert_close(got, {name: {"primal": out}})


def test_a_function_that_calls_itself():
    mlp = _mlp()

    def fn(x, again=True):
        return fn(x, False) if again else mlp(x)

    _captured(fn, mlp, X)


# The same warning as for `eqx.filter_jit(jax.vmap(model))`.
@pytest.mark.filterwarnings("ignore:\\s*Possibly assigning")
@pytest.mark.parametrize(
    "wrap",
    [
        lambda mlp: eqx.filter_vmap(lambda x: mlp(x)),
        lambda mlp: jax.vmap(mlp),
        lambda mlp: jax.vmap(lambda x: mlp(x)),
    ],
)
def test_a_mapped_model_that_is_hard_to_see(wrap):
    out, got = S(wrap(GLOBAL), capture=eqx.nn.Linear)(XS)
    expected, seen = jax.vmap(lambda x: _by_hand(GLOBAL, x))(XS)
    assert_close(out, expected)
    assert_close(
        list(with_mode(got, "primal").values()),
        list(seen.values()),
    )


def test_a_closed_over_model_is_not_changed():
    mlp = _mlp()
    S(lambda x: mlp(x), capture=True)(X)
    assert type(mlp) is eqx.nn.MLP and type(mlp.layers[0]) is eqx.nn.Linear
    assert type(GLOBAL.layers[0]) is eqx.nn.Linear


def test_a_model_behind_two_closures():
    mlp = _mlp()

    def inner(x):
        return mlp(x)

    def fn(x):
        return inner(x)

    _captured(fn, mlp, X)


def test_nothing_found_tells_what_to_do():
    mlp = _mlp()
    with pytest.raises(UnknownSowError, match=r"layers/0 \(Linear\)"):
        S(mlp, capture=eqx.nn.Conv2d)(X)
    with pytest.raises(UnknownSowError, match="No module is in .* variables. Only"):
        S(lambda x: x, capture=True)(X)
    with pytest.raises(UnknownSowError, match="layers/0"):
        S(mlp, capture=lambda path, module: False)(X)


@pytest.mark.parametrize(
    "wrap",
    [jax.vmap, lambda m: jax.jit(lambda xs: m(xs[0])), lambda m: lambda xs: m(xs[0])],
)
def test_nothing_found_lists_the_modules_in_variables(wrap):
    fn = wrap(_mlp())
    said = r"modules in the arguments and variables are: .*layers/0 \(Linear\)"
    with pytest.raises(UnknownSowError, match=said) as e:
        S(fn, capture=eqx.nn.Lambda)(XS)
    assert "Only modules of Equinox" not in str(e.value)
    assert "layers/0" in ",".join(S(fn, capture=True)(XS)[1])


def test_nothing_found_where_a_model_is_made_inside():
    fn = lambda x: _mlp()(x)
    remedy = "Pass `capture=True` to see which are made and called inside"
    with pytest.raises(UnknownSowError, match=remedy):
        S(fn, capture=eqx.nn.Lambda)(X)
    assert len(S(fn, capture=True)(X)[1]) > 1


def test_what_capture_takes():
    mlp = _mlp()
    with pytest.raises(TypeError, match=r"capture=True, names='layers/\*'"):
        S(mlp, capture="layers/*")
    for wrong in (lambda m: True, lambda a, b, c: True, lambda *, path, module: True):
        with pytest.raises(TypeError, match=r"`\(path, module\) -> bool`.*takes \("):
            S(mlp, capture=wrong)
    for right in (
        lambda *args: True,
        lambda a, b, c=0: True,
        ft.partial(max, 0, key=id),
    ):
        S(mlp, capture=right)
    arrays = lambda path, m: jnp.any(jnp.array([True]))
    with pytest.raises(TypeError, match=r"for the module at '.*returned an array"):
        S(mlp, capture=arrays)(X)


def test_a_method_that_no_module_has():
    there = r"'encode' is a method of no selected module.*there are: '__call__'"
    with pytest.raises(UnknownSowError, match=there):
        S(_mlp(), capture=True, methods=("__call__", "encode"))(X)
    with pytest.raises(UnknownSowError, match=there):
        S(_mlp(), capture=eqx.nn.Linear, methods="encode")(X)


class _Forward(eqx.Module):
    w: jax.Array

    def forward(self, x):
        return self.w * x


class _OfForward(eqx.Module):
    layers: list

    def forward(self, x):
        return self.layers[1].forward(self.layers[0].forward(x))

    def __call__(self, x):
        return self.forward(x)


@pytest.mark.parametrize(
    "capture",
    [_Forward, (_Forward, eqx.nn.Linear), lambda path, m: isinstance(m, _Forward)],
)
@pytest.mark.parametrize("fn", [_OfForward.forward, _OfForward.__call__])
def test_modules_that_have_another_method_only(capture, fn):
    """It says what to write, and that then works."""
    net = _OfForward([_Forward(X), _Forward(X + 1)])
    with pytest.raises(UnknownSowError, match=r"Write `methods='forward'`") as e:
        S(fn, capture=capture)(net, X)
    assert " at 0x" not in str(e.value)
    _, got = S(fn, capture=capture, methods="forward")(net, X)
    assert list(got) == ["self/layers/0.forward", "self/layers/1.forward"]


def test_a_call_of_another_method_than_that_of_all_modules():
    net = _OfForward([_Forward(X), _Forward(X + 1)])
    with pytest.raises(UnknownSowError, match=r"method called\? Write .*'forward'`"):
        S(lambda net, x: net.forward(x), capture=True)(net, X)


def test_a_function_that_is_never_called():
    fn = jax.jit(lambda x: jax.nn.silu(x))
    said = r"`capture=\(relu, softmax\)` selects nothing that is called"
    with pytest.raises(UnknownSowError, match=said) as e:
        S(fn, capture=(jax.nn.relu, jax.nn.softmax))(X)
    assert "The modules" not in str(e.value)


@under("eager", "filter_jit", "filter_grad")
def test_selected_but_never_called(wrap):
    fn = wrap(lambda x, net: jnp.sum(x * 2))
    saved = S(fn, capture=eqx.nn.MLP)
    for _ in range(2):
        with pytest.raises(UnknownSowError, match=r"Another model|net \(MLP\)") as e:
            saved(X, _mlp())
        assert "defined again" not in str(e.value)


def test_a_call_that_is_a_generator():
    class Layers(eqx.Module):
        layers: list

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
                yield x

    def fn(layers, x):
        return sum(layers(x))

    linear = eqx.nn.Linear(3, 3, key=jr.key(0))
    _, got = S(fn, capture=True)(Layers([linear]), X)
    assert_close(got, {"layers/layers/0": {"primal": linear(X)}})
    with pytest.raises(UnknownSowError, match="`Layers.__call__` is a generator"):
        S(fn, capture=Layers)(Layers([linear]), X)


def test_called_once_in_a_cached_jit():
    calls = []

    @eqx.filter_jit
    def step(net, x):
        calls.append(None)
        return net(x)

    for _ in range(2):
        _, got = S(lambda net, x: step(net, x), capture=eqx.nn.MLP)(_mlp(), X)
        assert list(got) == ["net"]
    assert len(calls) == 1


# --- Shared layers, stacked layers ---


def test_an_aliased_layer_has_two_paths(call):
    linear = eqx.nn.Linear(3, 3, key=jr.key(0))
    _, got = call(S(eqx.nn.Sequential([linear, linear]), capture=eqx.nn.Linear), X)
    h = linear(X)
    assert_close(with_mode(got, "primal"), {"layers/0": h, "layers/1": linear(h)})


def test_append_has_cotangents_too(call):
    linear = eqx.nn.Linear(3, 3, key=jr.key(0))
    loss = lambda net, x: jnp.sum(net(net(x)) ** 2)
    _, got = call(S(eqx.filter_grad(loss), capture=True, reduce=Append()), linear, X)

    def by_hand(eps):
        h = linear(X) + eps[0]
        return jnp.sum((linear(h) + eps[1]) ** 2)

    expected = jax.grad(by_hand)((jnp.zeros(3), jnp.zeros(3)))
    assert_close(got["net"]["cotangent"], expected)


def test_layers_stacked_by_vmap_in_a_scan(call):
    stacked = eqx.filter_vmap(lambda k: eqx.nn.Linear(3, 3, key=k))(
        jr.split(jr.key(0), 4)
    )

    def forward(layers, x):
        dynamic, static = eqx.partition(layers, eqx.is_array)

        def body(x, layer):
            return jnp.tanh(eqx.combine(layer, static)(x)), None

        return lax.scan(body, x, dynamic)[0]

    def by_hand(eps):
        x, seen = X, []
        for i in range(4):
            x = stacked.weight[i] @ x + stacked.bias[i] + eps[i]
            seen.append(x)
            x = jnp.tanh(x)
        return jnp.sum(x**2), (x, jnp.stack(seen))

    cts, (x, seen) = jax.grad(by_hand, has_aux=True)(jnp.zeros((4, 3)))
    out, got = call(S(forward, capture=True), stacked, X)
    assert_close(out, x)
    assert_close(got, {"layers/*": {"primal": seen}})
    loss = lambda layers, x: jnp.sum(forward(layers, x) ** 2)
    grads, got = call(S(eqx.filter_grad(loss), capture=True), stacked, X)
    assert_close(grads, eqx.filter_grad(loss)(stacked, X))
    assert_close(got, {"layers/*": {"primal": seen, "cotangent": cts}})


def test_stacked_layers_in_a_checkpointed_scan(call):
    stacked = eqx.filter_vmap(lambda k: _mlp_like(k))(jr.split(jr.key(0), 3))

    def loss(layers, x):
        dynamic, static = eqx.partition(layers, eqx.is_array)

        @jax.checkpoint
        def body(x, layer):
            return eqx.combine(layer, static)(x), None

        return jnp.sum(lax.scan(body, x, dynamic)[0] ** 2)

    grads, got = call(S(eqx.filter_grad(loss), capture=eqx.nn.Linear), stacked, X)
    assert_close(grads, eqx.filter_grad(loss)(stacked, X))
    assert modes_of(got) == {
        "layers/*/layers/0": {"primal", "cotangent"},
        "layers/*/layers/1": {"primal", "cotangent"},
    }
    assert got["layers/*/layers/0"]["primal"].shape == (3, 4)
    assert got["layers/*/layers/1"]["cotangent"].shape == (3, 3)


def _mlp_like(key):
    return eqx.nn.MLP(3, 3, 4, 1, activation=jnp.tanh, key=key)


def test_ensemble(call):
    models = eqx.filter_vmap(_mlp_like)(jr.split(jr.key(0), 5))
    run = eqx.filter_vmap(lambda m, x: m(x), in_axes=(eqx.if_array(0), None))
    out, got = call(S(run, capture=eqx.nn.Linear), models, X)
    assert out.shape == (5, 3)
    assert list(got) == ["m/layers/0", "m/layers/1"]
    pick = lambda i: jtu.tree_map(lambda x: x[i] if eqx.is_array(x) else x, models)
    expected = jtu.tree_map(
        lambda *x: jnp.stack(x), *(_by_hand(pick(i), X, "m/")[1] for i in range(5))
    )
    assert_close(with_mode(got, "primal"), expected)


def test_shared(call):
    class Model(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self, key):
            k0, k1 = jr.split(key)
            embedding = eqx.nn.Embedding(5, 3, key=k0)
            head = eqx.nn.Linear(3, 5, key=k1)
            where = lambda pair: pair[1].weight
            get = lambda pair: pair[0].weight
            self.shared = eqx.nn.Shared((embedding, head), where, get)

        def __call__(self, i):
            embedding, head = self.shared()
            return head(embedding(i))

    model = Model(jr.key(0))
    i = jnp.array(2)
    out, got = call(S(model, capture=(eqx.nn.Embedding, eqx.nn.Linear)), i)
    assert_close(out, model(i))
    values = list(with_mode(got, "primal").values())
    assert len(values) == 2
    assert any(v.shape == (3,) for v in values)
    assert any(v.shape == (5,) and jnp.allclose(v, out, 1e-5, 1e-5) for v in values)


def test_a_module_that_is_returned_with_numpy_arrays(call):
    class Output(eqx.Module):
        table: np.ndarray
        size: int = eqx.field(static=True)

    class Model(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return self.weight * x, Output(np.arange(3.0), 3)

    model = Model(X)
    out, got = call(S(model, capture=True), X)
    assert_close(got["."]["primal"], out)
    assert got["."]["primal"][1].size == 3


def test_a_module_that_is_returned_beside_a_part(call):
    class Pair(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            # A part of this module, and a module that is a value.
            return (
                self.linear,
                eqx.nn.Linear(3, 2, key=jr.key(1)),
                eqx.nn.Lambda(abs),
                x,
            )

    def f(pair, x):
        part, made, no_arrays, x = pair(x)
        return made(part(no_arrays(x)))

    pair = Pair(eqx.nn.Linear(3, 3, key=jr.key(0)))
    out, got = call(S(f, capture=Pair), pair, X)
    assert_close(out, f(pair, X))
    part, made, no_arrays, x = got["pair"]["primal"]
    assert part is None and no_arrays is None
    assert_close(made.weight, eqx.nn.Linear(3, 2, key=jr.key(1)).weight)
    assert_close(x, X)


# --- Kinds of layers ---


def test_batch_norm_with_state(call):
    make = lambda key: eqx.nn.Sequential(
        [
            eqx.nn.Linear(3, 4, key=key),
            eqx.nn.BatchNorm(4, "batch", mode="ema"),
            eqx.nn.Lambda(jnp.tanh),
        ]
    )
    model, state = eqx.nn.make_with_state(make)(jr.key(0))

    def forward(model, state, xs):
        run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        return run(xs, state)

    xs = jr.normal(jr.key(1), (5, 3))
    expected, new_state = forward(model, state, xs)
    (out, out_state), got = call(S(forward, capture=True), model, state, xs)
    assert_close(out, expected)
    assert_close(jtu.tree_leaves(out_state), jtu.tree_leaves(new_state))
    assert jtu.tree_structure(out_state) == jtu.tree_structure(new_state)
    assert set(got) == {f"model/layers/{i}" for i in range(3)} | {"model"}
    h = jax.vmap(model.layers[0])(xs)
    assert_close(got["model/layers/0"]["primal"], h)
    value, _ = got["model/layers/1"]["primal"]
    assert value.shape == (5, 4)
    assert_close(jnp.tanh(value), expected)
    assert_close(got["model/layers/2"]["primal"], expected)


@pytest.mark.slow
def test_batch_norm_under_grad(call):
    make = lambda key: eqx.nn.Sequential(
        [eqx.nn.Linear(3, 4, key=key), eqx.nn.BatchNorm(4, "batch", mode="ema")]
    )
    model, state = eqx.nn.make_with_state(make)(jr.key(0))

    def loss(model, state, xs):
        run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        out, state = run(xs, state)
        return jnp.mean(out**3), state

    xs = jr.normal(jr.key(1), (5, 3))
    grad = eqx.filter_grad(loss, has_aux=True)
    expected, new_state = grad(model, state, xs)
    (grads, out_state), got = call(S(grad, capture=eqx.nn.Linear), model, state, xs)
    assert_close(grads, expected)
    assert jtu.tree_structure(out_state) == jtu.tree_structure(new_state)
    assert_close(jtu.tree_leaves(out_state), jtu.tree_leaves(new_state))

    def by_hand(eps):
        h = jax.vmap(model.layers[0])(xs) + eps
        norm = jax.vmap(
            model.layers[1],
            axis_name="batch",
            in_axes=(0, None),
            out_axes=(0, None),
        )
        return jnp.mean(norm(h, state)[0] ** 3), h

    ct, h = jax.grad(by_hand, has_aux=True)(jnp.zeros((5, 4)))
    assert_close(got, {"model/layers/0": {"primal": h, "cotangent": ct}})


def test_attention(call):
    attention = eqx.nn.MultiheadAttention(2, 4, key=jr.key(0))
    xs = jr.normal(jr.key(1), (3, 4))
    out, got = call(S(attention, capture=True), xs, xs, xs)
    assert_close(out, attention(xs, xs, xs))
    assert {"query_proj", "key_proj", "value_proj", "output_proj", "."} <= set(got)
    for name in ("query_proj", "key_proj", "value_proj"):
        expected = jax.vmap(getattr(attention, name))(xs)
        assert_close(got[name]["primal"], expected)
    assert_close(got["output_proj"]["primal"], out)


@pytest.mark.slow
@pytest.mark.parametrize("cell", [eqx.nn.GRUCell, eqx.nn.LSTMCell])
def test_cells_in_a_scan(cell, call):
    cell = cell(3, 4, key=jr.key(0))
    lstm = isinstance(cell, eqx.nn.LSTMCell)
    init = (jnp.zeros(4), jnp.zeros(4)) if lstm else jnp.zeros(4)

    def forward(cell, xs):
        return lax.scan(lambda h, x: (cell(x, h), None), init, xs)[0]

    def by_hand(eps):
        h, seen = init, []
        for i, x in enumerate(XS):
            e = jtu.tree_map(lambda e: e[i], eps)
            h = jtu.tree_map(jnp.add, cell(x, h), e)
            seen.append(h)
        seen = jtu.tree_map(lambda *h: jnp.stack(h), *seen)
        return jnp.sum(jtu.tree_leaves(h)[0] ** 2), (h, seen)

    zeros = jtu.tree_map(lambda h: jnp.zeros((len(XS), *h.shape)), init)
    cts, (h, seen) = jax.grad(by_hand, has_aux=True)(zeros)
    out, got = call(S(forward, capture=True), cell, XS)
    assert_close(out, h)
    assert_close(got["cell"], {"primal": seen})
    loss = lambda cell, xs: jnp.sum(jtu.tree_leaves(forward(cell, xs))[0] ** 2)
    grads, got = call(S(eqx.filter_grad(loss), capture=True), cell, XS)
    assert_close(grads, eqx.filter_grad(loss)(cell, XS))
    assert_close(got["cell"], {"primal": seen, "cotangent": cts})


def test_convolutions(call):
    keys = jr.split(jr.key(0), 3)
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, 2, 3, key=keys[0]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.Conv2d(2, 3, 2, key=keys[1]),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(3, 2, key=keys[2]),
        ]
    )
    image = jr.normal(jr.key(1), (1, 6, 6))
    out, got = call(S(model, capture=True), image)
    x = image
    for i, layer in enumerate(model.layers):
        x = layer(x)
        assert_close(got[f"layers/{i}"]["primal"], x)
    assert_close(out, x)


def test_dropout(call):
    model = eqx.nn.Sequential([eqx.nn.Dropout(0.5), eqx.nn.Lambda(jnp.sin)])
    key = jr.key(3)
    out, got = call(
        S(lambda m, x, key: m(x, key=key), capture=eqx.nn.Dropout), model, X, key
    )
    assert_close(out, model(X, key=key))
    assert_close(jnp.sin(got["m/layers/0"]["primal"]), out)


def test_other_layers_of_equinox(call):
    key = jr.key(0)
    model = eqx.nn.Sequential(
        [
            eqx.nn.LayerNorm(3),
            eqx.nn.RMSNorm(3),
            eqx.nn.WeightNorm(eqx.nn.Linear(3, 3, key=key)),
            eqx.nn.Lambda(eqx.nn.PReLU()),
            eqx.nn.Identity(),
            eqx.nn.Lambda(lambda x: x.reshape(3, 1)),
            eqx.nn.Conv1d(3, 2, 1, key=key),
            eqx.nn.GroupNorm(1, 2),
        ]
    )
    out, got = call(S(model, capture=True), X)
    assert_close(out, model(X))
    assert "layers/3/fn" in got and "layers/7" in got
    assert_close(got["."]["primal"], out)


# --- Kinds of classes ---


def test_init_subclass():
    registry = []

    class Registered(eqx.Module):
        def __init_subclass__(cls, *, kind, **kwargs):
            super().__init_subclass__(**kwargs)
            registry.append((cls, kind))

    class Layer(Registered, kind="layer"):
        w: Array

        def __call__(self, x):
            return self.w * x

    layer = Layer(X)
    before = list(registry)
    _, got = S(layer, capture=True)(X)
    assert_close(got, {".": {"primal": X * X}})
    assert registry == before


def test_abstract_classes(call):
    class AbstractLayer(eqx.Module):
        width: eqx.AbstractVar[int]
        kind: eqx.AbstractClassVar[str]

        @abc.abstractmethod
        def inner(self, x): ...

        def __call__(self, x):
            assert self.kind == "scale"
            return self.inner(x) * self.width

    class Layer(AbstractLayer, strict=True):
        w: Array
        width: int = eqx.field(static=True)
        kind = "scale"

        def inner(self, x):
            return self.w * x

    layer = Layer(X, 2)
    _, got = call(S(layer, capture=AbstractLayer, methods=("__call__", "inner")), X)
    values = list(with_mode(got, "primal").values())
    assert len(values) == 2
    assert_close(got["."]["primal"], 2 * X * X)


def test_inherited_call_and_super():
    class Base(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            return self.linear(x)

    class Child(Base):
        scale: float = 2.0

        def __call__(self, x):
            return super().__call__(x) * self.scale

    class Grandchild(Child):
        pass

    model = Grandchild(eqx.nn.Linear(3, 3, key=jr.key(0)))
    out, got = S(model, capture=True)(X)
    assert_close(
        with_mode(got, "primal"), {"linear": model.linear(X), ".": 2 * model.linear(X)}
    )
    assert_close(out, model(X))


class Linearly:
    """A mixin, which is no module, with the methods of those that are."""

    linear: Any

    def __call__(self, x):
        return self.project(x)

    def project(self, x):
        return sow(self.linear(x), "h")


class Mixed(Linearly, eqx.Module):
    linear: eqx.nn.Linear


@pytest.mark.parametrize("capture", [True, Mixed, Linearly])
def test_methods_of_a_base_class_that_is_no_module(capture):
    code = Linearly.__call__.__code__
    k1, k2 = jr.split(jr.key(0))
    first, second = (
        Mixed(eqx.nn.Linear(3, 3, key=k1)),
        Mixed(eqx.nn.Linear(3, 3, key=k2)),
    )
    fn = lambda a, b, x: b(a(x))
    h = first.linear(X)
    expected = {"a": h, "a/h": h, "b": second.linear(h), "b/h": second.linear(h)}
    methods = {"a.project": h, "b.project": second.linear(h)}

    def captured(**options):
        _, got = S(fn, capture=capture, scope=True, **options)(first, second, X)
        return {n: x["primal"] for n, x in got.items() if not n.endswith("linear")}

    assert_close(captured(), expected)
    got = captured(methods=("__call__", "project"))
    assert_close(got, expected | methods)
    planted = plant(fn, {"a": jnp.zeros_like}, capture=capture, scope=True)
    assert_close(planted(first, second, X), second.linear(0 * X))
    assert Linearly.__call__.__code__ is code


def test_a_node_with_the_keys_of_a_dict_that_is_none():
    class Box:
        def __init__(self, h):
            self.h = h

    jtu.register_pytree_with_keys(
        Box, lambda box: (((jtu.DictKey("h"), box.h),), None), lambda _, h: Box(*h)
    )

    class Boxed(eqx.Module):
        box: Box

        def __call__(self, x):
            return self.box.h["w"] * x

    fn = lambda boxed, x: boxed(x)
    _, got = S(fn, capture=True)(Boxed(Box({"w": 2 * X})), X)
    assert_close(with_mode(got, "primal"), {"boxed": 2 * X**2})


def test_the_classes_of_python_are_left_alone():
    class Table(eqx.Module, Mapping):
        arrays: dict[str, Array]

        def __getitem__(self, key):
            return self.arrays[key]

        def __iter__(self):
            return iter(self.arrays)

        def __len__(self):
            return len(self.arrays)

        def __call__(self, x):
            return self.get("a") * x

    code = Mapping.get.__code__

    def fn(table, x):
        assert Mapping.get.__code__ is code
        return table(x)

    _, got = S(fn, capture=True, scope=True)(Table({"a": 2 * X}), X)
    assert_close(with_mode(got, "primal"), {"table": 2 * X**2})


def test_a_class_with_a_mixin_that_is_made_while_the_program_is_traced():
    def fn(x):
        class Doubles:
            def __call__(self, x):
                return 2 * x

        class Here(Doubles, eqx.Module):
            w: Array

        return Here(x)(x)

    _, got = S(fn, capture=True)(X)
    assert_close(with_mode(got, "primal"), {"Here": 2 * X})


def test_user_made_init_converters_and_properties():
    inits = []

    class Layer(eqx.Module):
        w: Array = eqx.field(converter=jnp.asarray)
        twice: Array

        def __init__(self, w):
            inits.append("init")
            self.w = w
            self.twice = 2 * jnp.asarray(w)

        def __check_init__(self):
            inits.append("check")

        @property
        def total(self):
            return self.twice.sum()

        def __call__(self, x):
            return self.twice * x + self.total

    layer = Layer([1.0, 2.0, 3.0])
    before = list(inits)
    out, got = S(layer, capture=True)(X)
    assert inits == before
    assert_close(got["."]["primal"], out)


def test_jaxtyped_class(call):
    @jaxtyped(typechecker=beartype)
    class Layer(eqx.Module):
        w: Float[Array, " n"]

        def __call__(self, x: Float[Array, " n"]) -> Float[Array, " n"]:
            return self.w * x

    layer = Layer(X)
    _, got = call(S(layer, capture=True), X)
    assert_close(got, {".": {"primal": X * X}})


def test_jaxtyped_call(call):
    class Layer(eqx.Module):
        w: Array

        @jaxtyped(typechecker=beartype)
        def __call__(self, x: Float[Array, " n"]) -> Float[Array, " n"]:
            return self.w * x

    _, got = call(S(Layer(X), capture=True), X)
    assert_close(got, {".": {"primal": X * X}})


@pytest.mark.parametrize(
    "decorate",
    [eqx.filter_jit, jax.named_scope("layer"), eqx.filter_checkpoint, jax.jit],
)
def test_decorated_call(decorate, call):
    class Layer(eqx.Module):
        inner: eqx.nn.Linear

        @decorate
        def __call__(self, x):
            return jnp.tanh(self.inner(x))

    layer = Layer(eqx.nn.Linear(3, 3, key=jr.key(0)))
    layer(X)
    out, got = call(S(layer, capture=True), X)
    assert_close(out, jnp.tanh(layer.inner(X)))
    expected = {"inner": layer.inner(X), ".": out}
    assert_close(with_mode(got, "primal"), expected)
    loss = lambda m, x: jnp.sum(m(x) ** 2)
    grads, got = call(S(eqx.filter_grad(loss), capture=True), layer, X)
    assert_close(grads, eqx.filter_grad(loss)(layer, X))
    assert_close(got["m"]["cotangent"], 2 * out)


def test_bound_methods_and_wrappers_in_fields(call):
    class Model(eqx.Module):
        linear: eqx.nn.Linear
        mapped: object
        partial: object
        checkpointed: object

        def __call__(self, xs):
            return self.checkpointed(self.partial(self.mapped(xs)))

    k = jr.split(jr.key(0), 3)
    layers = [eqx.nn.Linear(3, 3, key=key) for key in k]
    model = Model(
        layers[0],
        eqx.filter_vmap(layers[0]),
        eqx.Partial(_each, layers[1]),
        eqx.filter_checkpoint(eqx.filter_vmap(layers[2])),
    )
    out, got = call(S(model, capture=eqx.nn.Linear), XS)
    h0 = jax.vmap(layers[0])(XS)
    h1 = jax.vmap(layers[1])(h0)
    h2 = jax.vmap(layers[2])(h1)
    assert_close(out, h2)
    values = with_mode(got, "primal")
    assert len(values) == 3
    for name, h in (("mapped", h0), ("partial", h1), ("checkpointed", h2)):
        (value,) = (v for n, v in values.items() if n.startswith(name))
        assert_close(value, h)


def _each(layer, xs):
    return jax.vmap(layer)(xs)


def test_inference_mode_tree_at_and_filter_shard_inside(call, mesh):
    model = eqx.nn.Sequential([eqx.nn.Linear(8, 8, key=jr.key(0)), eqx.nn.Dropout(0.5)])
    over = NamedSharding(mesh, P())

    def fn(model, x):
        model = eqx.nn.inference_mode(model)
        where = lambda m: m.layers[0].bias
        model = eqx.tree_at(where, model, replace_fn=lambda b: b + 1)
        return eqx.filter_shard(model, over)(x)

    x = jnp.arange(8.0)
    out, got = call(S(fn, capture=True), model, x)
    h = model.layers[0](x) + 1
    assert_close(out, h)
    names = ("model/layers/0", "model/layers/1", "model")
    assert_close(with_mode(got, "primal"), dict.fromkeys(names, h))


class _Scale(eqx.Module):
    w: Array
    tags: list = eqx.field(default_factory=list)

    def __call__(self, x):
        return self.w * x

    def twice(self):
        return type(self)(2 * self.w)


class _WithInit(eqx.Module):
    w: Array
    extra: Array

    def __init__(self, w, extra=None):
        self.w = w
        self.extra = w if extra is None else extra

    def __call__(self, x):
        return self.w * x + self.extra


class _CopiesItself(_Scale):
    def __deepcopy__(self, memo):
        return dc.replace(self, w=copy.deepcopy(self.w, memo) + 1)


COPIES = {
    "replace": lambda m: dc.replace(m, w=2 * m.w),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "deepcopy in a list": lambda m: copy.deepcopy([m, m])[1],
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("cls", [_Scale, _WithInit, _CopiesItself])
def test_copies_keep_their_name(way, cls, call):
    model = cls(X)
    fn = lambda m, x: COPIES[way](m)(x)
    expected = fn(model, X)
    for wrap in (lambda f: f, eqx.filter_jit):
        out, got = call(S(wrap(fn), capture=True), model, X)
        assert_close(out, expected)
        assert_close(got, {"m": {"primal": expected}})


def test_copies_are_copies():
    def fn(m, x):
        shallow, deep = copy.copy(m), copy.deepcopy(m)
        assert shallow.tags is m.tags and deep.tags is not m.tags
        assert deep.tags == m.tags and deep.tags[0] is not m.tags[0]
        assert shallow is not m and type(shallow) is type(deep) is type(m)
        first, second = copy.deepcopy((m, m))
        assert first is second
        return (m, shallow, deep, dc.replace(m), m.twice(), x)

    model = _Scale(X, [["tag"]])
    (*models, _), _ = S(lambda m, x: (fn(m, x), m(x))[0], capture=True)(model, X)
    assert {type(m) for m in models} == {_Scale}
    assert_close(models[-1].w, 2 * X)
    assert [jtu.tree_structure(m) for m in models[:4]] == [
        jtu.tree_structure(model)
    ] * 4


# What a marked module cannot hide.


def test_nothing_shows_of_a_capture():
    seen = {}

    def look(m, n):
        seen.update(
            type=type(m) is _Scale,
            exact=m.__class__ is _Scale,
            structures=jtu.tree_structure(m) == jtu.tree_structure(n),
            registry={_Scale: "known"}.get(type(m)),
            vars=set(vars(m)),
        )

    one, two = _Scale(X), _Scale(2 * X)
    plain = lambda m, n: (look(m, n), m(X) + n(X))[1]
    expected = plain(one, two)
    before = dict(seen)
    assert_close(S(plain, capture=True)(one, two)[0], expected)
    assert (
        seen
        == before
        == {
            "type": True,
            "exact": True,
            "structures": True,
            "registry": "known",
            "vars": {"w", "tags"},
        }
    )


def test_what_does_not_show_of_a_mark():
    single = ft.singledispatch(lambda m: "other")
    single.register(_Scale, lambda m: "scale")

    def look(m):
        leaves = jtu.tree_leaves_with_path(m)
        return (
            isinstance(m, _Scale),
            type(m).__name__,
            type(m).__qualname__,
            type(m).__module__,
            [f.name for f in dc.fields(m)],
            list(dc.asdict(m)),
            repr(eqx.filter_eval_shape(lambda m: m, m)),
            [jtu.keystr(path) for path, _ in leaves],
            single(m),
            len(eqx.tree_flatten_one_level(m)[0]),
        )

    seen = []
    S(lambda m: (seen.append(look(m)), m(X))[1], capture=True)(_Scale(X))
    assert seen == [look(_Scale(X))]


def test_a_layer_replaced_inside_has_its_place():
    mlp = _mlp(depth=1)

    def fn(mlp, x):
        new = eqx.nn.Linear(3, 4, key=jr.key(5))
        return eqx.tree_at(lambda m: m.layers[0], mlp, new)(x)

    _, got = S(fn, capture=eqx.nn.Linear)(mlp, X)
    assert list(got) == ["mlp/layers/0", "mlp/layers/1"]


def test_isinstance_len_iteration_and_match_inside():
    model = eqx.nn.Sequential(
        [eqx.nn.Linear(3, 3, key=jr.key(0)), eqx.nn.Lambda(jnp.tanh)]
    )
    seen = []

    def fn(model, x):
        assert len(model) == 2
        for layer in model:
            match layer:
                case eqx.nn.Linear(weight=w):
                    seen.append(w.shape)
                case eqx.nn.Lambda():
                    seen.append("lambda")
            x = layer(x)
        return x

    _, got = S(fn, capture=True)(model, X)
    assert seen == [(3, 3), "lambda"]
    assert list(got) == ["model/layers/0", "model/layers/1"]


def test_containers_of_modules_are_found():
    class Model(eqx.Module):
        stuff: dict

        def __call__(self, x):
            return self.stuff["a"][1](x)

    model = Model({"a": (None, eqx.nn.Linear(3, 3, key=jr.key(0))), "b": 3})
    assert list(S(model, capture=eqx.nn.Linear)(X)[1]) == ["stuff/a/1"]


# --- Under `eqx.filter_grad` ---


def test_activation_and_gradient_of_every_layer_in_one_call(call):
    mlp = _mlp()
    grads, got = call(S(eqx.filter_grad(_loss), capture=eqx.nn.Linear), mlp, X)
    seen = _by_hand(mlp, X, "model/")[1]
    cts = _cotangents(mlp, X, "model/")
    assert_close(got, {n: {"primal": seen[n], "cotangent": cts[n]} for n in seen})
    assert_close(grads, eqx.filter_grad(_loss)(mlp, X))
    assert type(grads) is eqx.nn.MLP and type(grads.layers[0]) is eqx.nn.Linear
    assert jtu.tree_structure(grads) == jtu.tree_structure(
        eqx.filter_grad(_loss)(mlp, X)
    )


def test_value_and_grad_with_aux(call):
    mlp = _mlp()

    def loss(model, x):
        return _loss(model, x), (model, model.layers[0])

    f = eqx.filter_value_and_grad(loss, has_aux=True)
    ((value, (model, layer)), grads), got = call(S(f, capture=True), mlp, X)
    assert_close(value, _loss(mlp, X))
    assert_close((model, layer), (mlp, mlp.layers[0]))
    assert type(model) is eqx.nn.MLP and type(layer) is eqx.nn.Linear
    assert_close(grads, eqx.filter_grad(_loss)(mlp, X))
    assert set(got) == {f"model/layers/{i}" for i in range(3)} | {"model"}


def test_gradient_of_a_batch(call):
    mlp = _mlp()
    loss = lambda model, xs: jnp.mean(jax.vmap(lambda x: _loss(model, x))(xs))
    grads, got = call(S(eqx.filter_grad(loss), capture=eqx.nn.Linear), mlp, XS)
    assert_close(grads, eqx.filter_grad(loss)(mlp, XS))
    seen = jax.vmap(lambda x: _by_hand(mlp, x, "model/")[1])(XS)
    cts = jax.vmap(lambda x: _cotangents(mlp, x, "model/"))(XS)
    cts = jtu.tree_map(lambda c: c / len(XS), cts)
    assert_close(got, {n: {"primal": seen[n], "cotangent": cts[n]} for n in seen})


def test_gradients_per_example(call):
    mlp = _mlp()
    grad = eqx.filter_vmap(eqx.filter_grad(_loss), in_axes=(None, 0))
    grads, got = call(S(grad, capture=eqx.nn.Linear), mlp, XS)
    assert type(grads.layers[0]) is eqx.nn.Linear
    cts = jax.vmap(lambda x: _cotangents(mlp, x, "model/"))(XS)
    assert_close(with_mode(got, "cotangent"), cts)


@pytest.mark.parametrize("jitted", ["outside", "inside", "no"])
@jax.numpy_dtype_promotion("standard")
def test_a_training_step(jitted):
    optim = optax.adamw(1e-2)

    def step(model, opt_state, x):
        loss, grads = eqx.filter_value_and_grad(_loss)(model, x)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optim.update(grads, opt_state, params)
        return eqx.apply_updates(model, updates), opt_state, loss

    model = _mlp()
    opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))
    by_hand = eqx.filter_jit(step)
    expected = by_hand(model, opt_state, X)
    if jitted == "inside":
        saved = S(eqx.filter_jit(step), capture=eqx.nn.Linear)
    else:
        saved = S(step, capture=eqx.nn.Linear)
        saved = eqx.filter_jit(saved) if jitted == "outside" else saved
    plain = by_hand(*expected[:2], X)
    out, got = saved(model, opt_state, X)
    assert_close(out, expected)
    assert jtu.tree_structure(out) == jtu.tree_structure(expected)
    out, got = saved(*out[:2], X)
    assert_close(out, plain)
    assert modes_of(got) == {
        f"model/layers/{i}": {"primal", "cotangent"} for i in range(3)
    }
    types = [type(m) for m in jtu.tree_leaves(out[1], is_leaf=_is_mlp) if _is_mlp(m)]
    assert types == [eqx.nn.MLP, eqx.nn.MLP]


def _is_mlp(x):
    return isinstance(x, eqx.nn.MLP)


def test_training_in_a_scan(call):
    optim = optax.sgd(0.1, momentum=0.9)
    model = _mlp(depth=1)
    opt_state = optim.init(eqx.filter(model, eqx.is_array))

    def train(model, opt_state, xs):
        dynamic, static = eqx.partition(model, eqx.is_array)

        def body(carry, x):
            dynamic, opt_state = carry
            model = eqx.combine(dynamic, static)
            grads = eqx.filter_grad(_loss)(model, x)
            updates, opt_state = optim.update(grads, opt_state)
            model = eqx.apply_updates(model, updates)
            return (eqx.filter(model, eqx.is_array), opt_state), None

        (dynamic, opt_state), _ = lax.scan(body, (dynamic, opt_state), xs)
        return eqx.combine(dynamic, static), opt_state

    expected = train(model, opt_state, XS)
    out, got = call(S(train, capture=eqx.nn.Linear), model, opt_state, XS)
    assert_close(out, expected)
    assert jtu.tree_structure(out) == jtu.tree_structure(expected)
    assert got["model/layers/0"]["cotangent"].shape == (4, 4)


def test_a_loss_that_is_a_method():
    class Trainer(eqx.Module):
        model: eqx.nn.MLP

        def loss(self, x):
            return _loss(self.model, x)

    trainer = Trainer(_mlp())
    _, got = S(trainer.loss, capture=eqx.nn.Linear)(X)
    assert list(got) == [f"model/layers/{i}" for i in range(3)]
    grad = lambda trainer, x: eqx.filter_grad(lambda t: t.loss(x))(trainer)
    grads, got = S(grad, capture=eqx.nn.Linear)(trainer, X)
    assert type(grads) is Trainer and type(grads.model.layers[0]) is eqx.nn.Linear
    assert_close(
        with_mode(got, "cotangent"), _cotangents(trainer.model, X, "trainer/model/")
    )


def test_jvp_and_second_order(call):
    mlp = _mlp(depth=1)

    def fn(model, x):
        return jax.jvp(model, (x,), (jnp.ones_like(x),))

    _, got = call(S(fn, capture=eqx.nn.Linear), mlp, X)
    assert modes_of(got) == {
        f"model/layers/{i}": {"primal", "tangent"} for i in range(2)
    }
    assert_close(got["model/layers/0"]["tangent"], mlp.layers[0].weight @ jnp.ones(3))


def test_a_penalty_on_activations(call):
    mlp = _mlp()

    def loss(model, x):
        _, got = S(model, capture=eqx.nn.Linear)(x)
        return sum(jnp.sum(v**2) for v in with_mode(got, "primal").values())

    def by_hand(model, x):
        return sum(jnp.sum(v**2) for v in _by_hand(model, x)[1].values())

    grads = call(eqx.filter_grad(loss), mlp, X)
    assert_close(grads, eqx.filter_grad(by_hand)(mlp, X))
    assert type(grads.layers[0]) is eqx.nn.Linear


# --- Composition ---


def test_captured_inside_captured():
    mlp = _mlp()
    inner = lambda net, x: S(net, capture=eqx.nn.Linear)(x)
    # With the same tag, the inner one takes them.
    assert list(S(inner, capture=True)(mlp, X)[1]) == ["net"]
    with pytest.raises(UnknownSowError, match="another `tag`"):
        S(inner, capture=eqx.nn.Linear)(mlp, X)
    first = lambda net, x: S(net, capture=eqx.nn.Linear, names="layers/0")(x)
    (_, inside), outside = S(first, capture=eqx.nn.Linear)(mlp, X)
    assert list(inside) == ["layers/0"]
    assert list(outside) == ["net/layers/1", "net/layers/2"]
    both = lambda net, x: (inner(net, x), net(x))
    ((out, inside), again), outside = S(both, capture=eqx.nn.Linear)(mlp, X)
    assert {f"layers/{i}" for i in range(3)} <= set(inside)
    assert list(outside) == [f"net/layers/{i}" for i in range(3)]
    assert_close((out, again), (mlp(X), mlp(X)))


def test_different_tags_see_their_own():
    mlp = _mlp()
    both = S(S(mlp, capture=eqx.nn.Linear, tag="a"), capture=eqx.nn.MLP, tag="b")
    (out, inner), outer = both(X)
    assert list(inner) == [f"layers/{i}" for i in range(3)]
    assert_close(list(with_mode(outer, "primal").values()), [out])


def test_what_one_does_not_select_is_left_to_others():
    mlp, found = _mlp(), []
    layers = [f"layers/{i}" for i in range(3)]

    def fn(net, x):
        out, got = S(net, capture=eqx.nn.MLP)(x)
        found.extend(got)
        return out

    (_, inner), outer = S(S(mlp, capture=eqx.nn.Linear), capture=eqx.nn.MLP)(X)
    assert (list(inner), list(outer)) == (layers, ["."])
    _, outer = S(fn, capture=eqx.nn.Linear)(mlp, X)
    assert (found, list(outer)) == (["."], [f"net/{name}" for name in layers])
    assert_close(list(with_mode(outer, "primal").values())[-1], mlp(X))


def _edited(h):
    return 2 * h + 1


def _inside(how, seen):
    """A transformation that marks what it is given for itself."""

    def transformed(fn):
        if how == "plant":
            return plant(fn, {"**/layers/1": _edited}, capture=True)
        if how == "tap":
            return tap(fn, lambda event: seen.append(event.name), capture=True)

        def saved(*args):
            out, got = S(fn, capture=True, tag="inner")(*args)
            seen.extend(got)
            return out

        return saved

    return transformed


def _edited_by_hand(mlp, x, edit, eps):
    """As an `_mlp` that another transformation has marked runs, and what its modules
    return, with `eps` added to that."""
    seen = []
    for i, layer in enumerate(mlp.layers):
        x = layer.weight @ x + layer.bias
        x = (_edited(x) if edit and i == 1 else x) + eps[i]
        seen.append(x)
        x = jnp.tanh(x) if i + 1 < len(mlp.layers) else x
    x = x + eps[-1]
    return jnp.sum(x**2), [*seen, x]


def _loss_around(form, transformed, mlp):
    """A loss, its arguments, and what its model is called outside and inside."""
    if form == "argument":
        return lambda m, x: jnp.sum(transformed(m)(x) ** 2), (mlp, X), "m", ""
    if form == "closure":
        model = mlp
        return lambda x: jnp.sum(transformed(model)(x) ** 2), (X,), "model", ""
    inner = transformed(lambda net, x: jnp.sum(net(x) ** 2))
    return lambda model, x: inner(model, x), (mlp, X), "model", "net"


def _paths(prefix, parts=("layers/0", "layers/1", "layers/2", "")):
    return ["/".join(filter(None, (prefix, part))) or "." for part in parts]


@pytest.mark.parametrize(
    "wrap, form",
    [
        (wrap, form)
        for wrap in ("", "filter_jit", "jitted", "filter_grad")
        for form in ("argument", "closure", "other name")
        if wrap == "filter_grad" or form == "argument"
    ],
)
@pytest.mark.parametrize("how", ["plant", "tap", "save"])
def test_marked_by_one_inside_too_is_one_site(how, form, wrap):
    mlp, seen = _mlp(), []
    fn, args, name, inner_name = _loss_around(form, _inside(how, seen), mlp)
    zeros = [jnp.zeros(n) for n in (4, 4, 2, 2)]
    by_hand = lambda eps: _edited_by_hand(mlp, X, how == "plant", eps)
    expected, values = by_hand(zeros)
    modes = {"primal": values}
    if wrap == "filter_jit":
        fn = eqx.filter_jit(fn)
    if wrap == "filter_grad":
        fn = eqx.filter_value_and_grad(fn)
        modes["cotangent"] = jax.grad(by_hand, has_aux=True)(zeros)[0]
    saved = S(fn, capture=True)
    out, got = (eqx.filter_jit(saved) if wrap == "jitted" else saved)(*args)
    jax.effects_barrier()
    assert_close(out[0] if wrap == "filter_grad" else out, expected)
    assert list(got) == _paths(name)
    for mode, values in modes.items():
        assert_close(list(with_mode(got, mode).values()), values)
    assert set(seen) == (set() if how == "plant" else set(_paths(inner_name)))


@pytest.mark.filterwarnings("ignore:.*found no mark")
@pytest.mark.parametrize("how", ["plant", "tap", "save"])
def test_what_one_inside_marked_is_not_for_others(how):
    """Save what it planted."""
    mlp, seen, events = _mlp(), [], []
    fn, args, *_ = _loss_around("argument", _inside(how, seen), mlp)
    eps = [jnp.zeros(n) for n in (4, 4, 2, 2)]
    expected, values = _edited_by_hand(mlp, X, how == "plant", eps)
    planted = {"layers/1": values[1]} if how == "plant" else {}
    out, got = S(fn)(*args)
    assert_close(out, expected)
    assert_close(with_mode(got, "primal"), planted)
    out, got = S(fn, capture=lambda path, _: path == "m/layers/0")(*args)
    assert_close(out, expected)
    assert_close(with_mode(got, "primal"), {"m/layers/0": values[0], **planted})
    watched = tap(fn, events.append, capture=lambda path, _: path == "m/layers/0")
    assert_close(watched(*args), expected)
    jax.effects_barrier()
    assert [e.name for e in events] == ["m/layers/0", *planted]


@pytest.mark.parametrize("how", ["tap", "save"])
def test_planted_outside_is_what_those_inside_see(how):
    mlp, events = _mlp(), []

    def fn(m, x):
        if how == "tap":
            return tap(m, events.append, capture=True)(x), {}
        return S(m, capture=True, tag="inner")(x)

    out, got = plant(fn, {"m/layers/1": _edited}, capture=True)(mlp, X)
    jax.effects_barrier()
    got = (
        with_mode(got, "primal") if how == "save" else {e.name: e.value for e in events}
    )
    eps = [jnp.zeros(n) for n in (4, 4, 2, 2)]
    values = _edited_by_hand(mlp, X, True, eps)[1]
    assert list(got) == _paths("")
    assert_close([jnp.asarray(x) for x in got.values()], values)
    assert_close(out, values[-1])


def test_a_planted_cotangent_of_a_module_that_is_marked_by_both():
    mlp = _mlp()
    inner = plant(
        eqx.filter_grad(lambda net, x: jnp.sum(net(x) ** 2)),
        {"net/layers/1": lambda g: 3 * g},
        mode="cotangent",
        capture=True,
    )
    grads, got = S(lambda model, x: inner(model, x), capture=True)(mlp, X)
    h0, h1, h2 = _by_hand(mlp, X)[1].values()
    g2 = 2 * h2
    g1 = 3 * (1 - jnp.tanh(h1) ** 2) * (mlp.layers[2].weight.T @ g2)
    g0 = (1 - jnp.tanh(h0) ** 2) * (mlp.layers[1].weight.T @ g1)
    assert list(got) == _paths("model")
    assert_close(list(with_mode(got, "primal").values()), [h0, h1, h2, h2])
    assert_close(list(with_mode(got, "cotangent").values()), [g0, g1, g2, g2])
    assert_close(grads.layers[0].bias, g0)
    # Without a mark of its own, the outer one sees all modes of what is planted.
    _, got = S(lambda model, x: inner(model, x))(mlp, X)
    assert_close(got, {"net/layers/1": {"primal": h1, "cotangent": g1}})


def test_what_is_marked_by_both_in_a_checkpoint_is_not_planted_in_part():
    tapped = lambda net, x: tap(net, print, capture=True)(x)
    loss = lambda net, x: jnp.sum(jax.checkpoint(lambda x: tapped(net, x))(x))
    planted = {"net/layers/0": jnp.ones_like}
    with pytest.raises(SowError, match="computes the value again"):
        plant(eqx.filter_grad(loss), planted, capture=True)(_mlp(), X)


def test_inputs_and_methods_that_are_marked_by_both():
    both = dict(methods=("__call__", "encode"), capture=True, inputs=True)
    names = []
    inner = lambda net, x: tap(net, lambda e: names.append(e.name), **both)(x)
    _, got = S(inner, **both)(Encoder(X), 2 * X)
    jax.effects_barrier()
    assert set(names) == {".", ".inputs", ".encode", ".encode.inputs"}
    assert list(got) == ["net.inputs", "net.encode.inputs", "net.encode", "net"]
    assert_close(got["net.encode"]["primal"], 2 * X * X)
    assert_close(got["net.encode.inputs"]["primal"], ((2 * X,), {}))
    only = plant(Encoder(X), {".encode": _edited}, capture=True, methods="encode")
    _, got = S(lambda x: only(x), **both)(2 * X)
    assert_close(got["only.encode"]["primal"], 4 * X * X + 1)
    assert_close(got["only"]["primal"], 4 * X * X + 2)


def test_marked_by_three_in_a_loop():
    mlp, events = eqx.nn.MLP(3, 3, 4, 1, key=jr.key(0)), []
    double = lambda h: 2 * h
    planted = lambda net, x: plant(net, {"layers/0": double}, capture=True)(x)

    def run(model, x):
        tapped = tap(planted, events.append, capture=eqx.nn.Linear)
        body = lambda x, _: (eqx.filter_jit(tapped)(model, x), None)
        return lax.scan(body, x, length=3)[0]

    out, got = S(run, capture=eqx.nn.Linear)(mlp, X)
    jax.effects_barrier()
    x, hidden = X, []
    for _ in range(3):
        hidden.append(2 * (mlp.layers[0].weight @ x + mlp.layers[0].bias))
        x = mlp.layers[1](jax.nn.relu(hidden[-1]))
    assert_close(out, x)
    assert list(got) == ["model/layers/0", "model/layers/1"]
    assert_close(got["model/layers/0"]["primal"], jnp.stack(hidden))
    seen = [e.value for e in events if e.name == "net/layers/0"]
    assert_close(jnp.stack(seen), jnp.stack(hidden))
    assert {e.name for e in events} == {"net/layers/0", "net/layers/1"}


def test_unnamed_sow_that_two_can_see_is_one_site():
    model, events = eqx.nn.Sequential([eqx.nn.Lambda(jnp.sin), Sow()]), []
    fn = lambda net, x: tap(net, events.append)(x)
    _, got = S(fn)(model, X)
    jax.effects_barrier()
    assert_close(got, {"net/layers/1": {"primal": jnp.sin(X)}})
    assert [e.name for e in events] == ["layers/1"]
    # Each of them knows where the model is.
    hidden = lambda net, x: tap(net, events.append)(x)
    assert list(S(lambda x: hidden(model, x))(X)[1]) == ["model/layers/1"]


def test_sows_in_the_model_as_well(call):
    class Model(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            return sow(jnp.tanh(self.linear(x)), "act")

    model = Model(eqx.nn.Linear(3, 3, key=jr.key(0)))
    out, got = call(S(model, capture=True), X)
    h = model.linear(X)
    assert_close(
        with_mode(got, "primal"), {"linear": h, "act": jnp.tanh(h), ".": jnp.tanh(h)}
    )


def test_jit_in_either_order():
    mlp = _mlp()
    plain = S(mlp, capture=True)(X)
    assert_close(eqx.filter_jit(S(mlp, capture=True))(X), plain)
    assert_close(S(eqx.filter_jit(mlp), capture=True)(X), plain)


def test_a_dict_of_layers():
    """JAX sorts the keys."""

    def fn(layers, x):
        for layer in layers.values():
            x = layer(x)
        return x

    layers = {key: eqx.nn.Linear(3, 3, key=jr.key(i)) for i, key in enumerate("ba")}
    out, got = S(fn, capture=True)(layers, X)
    assert list(got) == ["layers/a", "layers/b"]
    assert_close(out, layers["b"](layers["a"](X)))
    assert_close(out, eqx.filter_jit(fn)(layers, X))


def test_vmap_in_either_order():
    mlp = _mlp()
    inside = S(eqx.filter_vmap(mlp), capture=True)(XS)
    outside = eqx.filter_vmap(S(mlp, capture=True))(XS)
    assert_close(inside, outside)


def test_traced_once():
    traces = []

    class Layer(eqx.Module):
        w: Array

        def __call__(self, x):
            traces.append(None)
            return self.w * x

    run = eqx.filter_jit(lambda m, x: S(lambda m, x: m(x), capture=True)(m, x))
    for i in range(4):
        run(Layer(X + i), X)
    assert len(traces) == 1
    traces.clear()
    saved = S(eqx.filter_jit(lambda m, x: m(x)), capture=True)
    for i in range(4):
        saved(Layer(X + i), X)
    assert len(traces) == 1


def test_as_a_decorator_of_a_method(call):
    class Model(eqx.Module):
        linear: eqx.nn.Linear

        @S(capture=True)
        def predict(self, x):
            return jnp.tanh(self.linear(x))

    model = Model(eqx.nn.Linear(3, 3, key=jr.key(0)))
    out, got = call(model.predict, X)
    assert_close(out, jnp.tanh(model.linear(X)))
    (name,) = got
    assert name.endswith("linear")
    assert_close(got[name]["primal"], model.linear(X))


def test_a_model_that_leaves_in_the_output():
    mlp = _mlp()
    (out, model), _ = S(lambda m, x: (m(x), m), capture=True)(mlp, X)
    assert type(model) is eqx.nn.MLP
    assert_close(model, mlp)
    assert jtu.tree_structure(model) == jtu.tree_structure(mlp)


def test_a_module_returned_by_a_module_and_sown():
    class Maker(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, scale):
            return eqx.tree_at(
                lambda l: l.bias, self.linear, replace_fn=lambda b: b * scale
            )

    maker = Maker(eqx.nn.Linear(3, 3, key=jr.key(0)))
    out, got = S(lambda m, x: m(jnp.array(2.0))(x), capture=Maker)(maker, X)
    value = got["m"]["primal"]
    assert type(value) is eqx.nn.Linear
    assert_close(value(X), out)


def test_the_methods_option_takes_a_string_or_a_sequence():
    mlp = _mlp()
    for methods in ("__call__", ["__call__"], ("__call__",)):
        assert len(S(mlp, capture=True, methods=methods)(X)[1]) == 4


def test_off_after_capture():
    mlp = _mlp()
    before = jax.make_jaxpr(lambda x: mlp(x))(X)
    S(mlp, capture=True)(X)
    after = jax.make_jaxpr(lambda x: mlp(x))(X)
    assert str(before) == str(after)


def test_dots_in_a_path_stay():
    layers = {"a..b": eqx.nn.Linear(2, 2, key=jr.key(0))}
    saved = S(lambda layers, x: layers["a..b"](x), capture=True, inputs=True)
    assert list(saved(layers, X[:2])[1]) == ["layers/a..b.inputs", "layers/a..b"]


def _halves(m):
    return eqx.partition(m, eqx.is_inexact_array)


def test_halves_of_a_model_fit_together():
    mlp = _mlp()
    diff, static = _halves(mlp)
    want = jax.grad(lambda d: eqx.combine(d, static)(X).sum())(diff)
    loss = lambda diff, static, x: eqx.combine(diff, static)(x).sum()
    for fn, args in (
        (eqx.filter_grad(loss), (diff, static, X)),
        (eqx.filter_grad(lambda d: loss(d, static, X)), (diff,)),
        (jax.grad(lambda d: loss(d, static, X)), (diff,)),
    ):
        for options in ({}, {"scope": True}):
            got, captured = S(fn, capture=eqx.nn.Linear, **options)(*args)
            assert_close(eqx.filter(got, eqx.is_array), want)
            first = next(iter(captured))
            assert first in ("diff/layers/0", "d/layers/0")
            assert len(captured) == len(mlp.layers)


def test_flags_fit_their_model():
    mlp = _mlp()
    flags = jax.tree.map(lambda _: False, mlp)
    flags = eqx.tree_at(lambda m: m.layers[-1], flags, True)

    def fn(m, x):
        diff, static = eqx.partition(m, flags)
        return eqx.filter_grad(lambda d: eqx.combine(d, static)(x).sum())(diff)

    _, captured = S(fn, capture=eqx.nn.Linear)(mlp, X)
    last = f"m/layers/{len(mlp.layers) - 1}"
    assert with_mode(captured, "cotangent").keys() == {last}


def test_two_models_of_one_type_keep_their_names():
    one, two = _mlp(), _mlp()
    _, captured = S(lambda a, b: a(X) + b(X), capture=eqx.nn.Linear)(one, two)
    assert {name.split("/")[0] for name in captured} == {"a", "b"}
    mean = lambda a, b: jax.tree.map(lambda x, y: x, a, b)
    _, captured = S(lambda a, b: (a(X), mean(a, b)), capture=eqx.nn.Linear)(one, two)
    assert {name.split("/")[0] for name in captured} == {"a"}
    # What would be an error without capturing stays that error.
    with pytest.raises(ValueError):
        S(lambda a, b: (a(X), mean(a, {"b": b})), capture=eqx.nn.Linear)(one, two)


def _in_a_container(ps, x):
    return eqx.combine(*ps)(x)


def test_halves_in_containers_and_closures():
    linear = eqx.nn.Linear(3, 3, key=jr.key(0))
    nested = eqx.nn.Sequential([eqx.nn.Sequential([linear])])
    diff, static = _halves(nested)
    for fn, args, name in (
        (_in_a_container, ((diff, static), X), "ps/0/layers/0/layers/0"),
        (lambda p: eqx.combine(p, static)(X), (diff,), "p/layers/0/layers/0"),
        (
            lambda d: eqx.combine(d["params"], static)(X),
            ({"params": diff},),
            "d/params/layers/0/layers/0",
        ),
    ):
        _, captured = S(fn, capture=eqx.nn.Linear)(*args)
        assert list(captured) == [name]
        assert_close(captured[name]["primal"], linear(X))


def test_what_only_looks_like_a_half():
    linear = eqx.nn.Linear(3, 3, key=jr.key(0))
    inner = eqx.nn.Sequential([eqx.nn.Lambda(jnp.tanh)])
    model = eqx.nn.Sequential([linear, inner])
    _, captured = S(lambda m, x: m(x), capture=True)(model, X)
    assert list(captured) == ["m/layers/0", "m/layers/1/layers/0", "m/layers/1", "m"]
    rounded = jax.tree.map(lambda w: w.astype(int), linear)
    fn = lambda a, b, x: (a(x), b(x.astype(int)))
    _, captured = S(fn, capture=True)(linear, rounded, X)
    assert list(captured) == ["a", "b"]


def test_a_tangent_in_a_branch_that_some_lanes_run():
    def fn(m, x):
        return jax.lax.cond(x.sum() > 0, lambda: jnp.sin(m(x)), lambda: m(2 * x))

    def pushed(m, xs):
        return jax.vmap(lambda x: jax.linearize(lambda x: fn(m, x), x)[1](x))(xs)

    linear, xs = eqx.nn.Linear(3, 3, key=jr.key(0)), jnp.stack([X, -X])
    _, got = S(pushed, capture=True)(linear, xs)
    positive = (xs.sum(1) > 0)[:, None]
    expected = jnp.where(positive, xs, 2 * xs) @ linear.weight.T
    assert_close(got["m"]["tangent"], expected)


# --- functions that nobody wrote as a module ---


def _attention_by_hand(att, x):
    heads = lambda proj: jax.vmap(proj)(x).reshape(x.shape[0], att.num_heads, -1)
    q, k = heads(att.query_proj), heads(att.key_proj)
    logits = jnp.einsum("shd,thd->hst", q, k) / jnp.sqrt(q.shape[-1])
    return jax.nn.softmax(logits)


@pytest.mark.slow
def test_a_function_of_jax(call):
    att = eqx.nn.MultiheadAttention(2, 8, key=jr.key(0))
    x = jr.normal(jr.key(1), (5, 8))
    _, got = call(S(att, capture=jax.nn.softmax), x, x, x)
    assert_close(got, {"softmax": {"primal": _attention_by_hand(att, x)}})
    fn = lambda a, x: a(x, x, x)
    _, got = call(S(fn, capture=(jax.nn.softmax, eqx.nn.Linear)), att, x)
    assert list(got)[:4] == [
        *(f"a/{name}_proj" for name in ("query", "key", "value")),
        "a/softmax",
    ]
    several = lambda layers, x: layers[1](*[layers[0](x, x, x)] * 3)
    layers = [att, eqx.nn.MultiheadAttention(2, 8, key=jr.key(2))]
    _, got = call(S(several, capture=jax.nn.softmax), layers, x)
    assert list(got) == ["layers/0/softmax", "layers/1/softmax"]
    _, got = call(S(fn, capture=(True, jax.nn.softmax)), att, x)
    assert {"a/softmax", "a/query_proj", "a"} <= got.keys()
    planted = plant(att, {"softmax": jnp.zeros_like}, capture=jax.nn.softmax)
    assert_close(call(planted, x, x, x), jnp.zeros((5, 8)))


def test_the_cotangent_of_a_function():
    w = jr.normal(jr.key(0), (3,))
    fn = lambda x: jnp.sum(jax.nn.softmax(w * x) ** 2)
    _, got = S(jax.grad(fn), capture=jax.nn.softmax)(X)
    p = jax.nn.softmax(w * X)
    assert_close(got, {"softmax": {"primal": p, "cotangent": 2 * p}})


_rounded = jax.custom_vjp(lambda x: jnp.round(x))
_rounded.defvjp(lambda x: (_jit_rounded(x), None), lambda _, ct: (2 * ct,))
_jit_rounded = jax.jit(_rounded)
_relu = lambda x: jnp.maximum(x, 0)


@pytest.mark.parametrize(
    "fn, value, factor",
    [
        (jax.nn.relu, _relu, lambda x: jnp.where(x > 0, 1.0, 0.0)),
        (_jit_rounded, jnp.round, lambda x: 2 + 0 * x),
    ],
    ids=["relu", "round"],
)
@under("eager", "jit", "checkpoint")
def test_derivatives_of_a_function_with_a_rule(fn, value, factor, wrap):
    def run(x, zero=0.0):
        step = lambda x, zero: (fn(2 * x) + zero, None)
        return jnp.sum(lax.scan(wrap(step), x, zero * jnp.ones((2, 1)))[0] ** 2)

    values = jnp.stack([value(2 * X), value(2 * value(2 * X))])
    last = 2 * values[1]
    first = last * factor(2 * values[0]) * 2
    cotangents = jnp.stack([first, last])
    grads, got = wrap(S(jax.grad(run), capture=fn))(X)
    assert_close(grads, first * factor(2 * X) * 2)
    (name,) = got
    assert_close(got, {name: {"primal": values, "cotangent": cotangents}})
    xs = jnp.stack([X, X])
    _, got = S(wrap(jax.vmap(jax.grad(run))), capture=fn)(xs)
    assert_close(got[name]["cotangent"], jnp.stack([cotangents] * 2))
    stopped = plant(
        jax.grad(run), {name: lambda ct: 0 * ct}, capture=fn, mode="cotangent"
    )
    assert_close(stopped(X), 0 * X)
    assert_close(plant(run, {name: lambda x: x + 1}, capture=fn)(X), run(X, 1.0))


def test_the_tangent_of_a_function_with_a_rule():
    jvp = lambda x: jax.jvp(lambda x: jax.nn.relu(2 * x), (x,), (x,))
    _, got = S(jvp, capture=jax.nn.relu)(X)
    by_hand = {"primal": _relu(2 * X), "tangent": 2 * _relu(X)}
    assert_close(got, {"relu": by_hand})
    hvp = lambda x: jax.jvp(jax.grad(lambda x: jnp.sum(jvp(x)[0] ** 3)), (x,), (X,))
    assert "cotangent.tangent" in S(hvp, capture=jax.nn.relu)(X)[1]["relu"]


@pytest.mark.slow
@under("jit", "filter_jit", argument="jit")
def test_a_function_that_jit_made(jit):
    scaled = jit(lambda x: 2 * x)
    fn = lambda x: jnp.sin(scaled(x))
    _, got = S(fn, capture=scaled)(X)
    assert_close(got, {"<lambda>": {"primal": 2 * X}})
    _, got = S(lambda x: scaled(scaled(x)), capture=scaled)(X)
    assert_close(got, {"<lambda>": {"primal": (2 * X, 4 * X)}})
    with pytest.raises(UnknownSowError, match="selects nothing that is called"):
        S(lambda x: x, capture=scaled)(X)
    for capture in ((eqx.nn.Linear, len), eqx.filter_jit(eqx.nn.Lambda(jnp.sin))):
        with pytest.raises(
            TypeError, match="takes `True`, a class(?s:.*)give its class"
        ):
            S(fn, capture=capture)


def _doubled(x):
    return 2 * x


def _added(x, y):
    return x.T + y.T


@pytest.mark.parametrize("capture", [_doubled, (_doubled, eqx.nn.Linear), _added])
def test_a_function_that_was_not_compiled(capture):
    linear = eqx.nn.Linear(3, 3, key=jr.key(0))
    with pytest.raises(TypeError, match="decorate it with `jax.jit` where it is"):
        S(lambda m, x: _doubled(m(x)), capture=capture)(linear, X)


def _with_a_jvp():
    @jax.custom_jvp
    def scaled(x, y):
        return jnp.sin(x) * y

    # Three times the derivative, so that it is seen.
    rule = lambda p, t: (scaled(*p), 3 * jnp.cos(p[0]) * p[1] * t[0])
    scaled.defjvp(rule)
    return scaled


def _with_a_vjp():
    @jax.custom_vjp
    def scaled(x, y):
        return jnp.sin(x) * y

    backward = lambda xy, g: (3 * jnp.cos(xy[0]) * xy[1] * g, jnp.zeros_like(xy[1]))
    scaled.defvjp(lambda x, y: (scaled(x, y), (x, y)), backward)
    return scaled


@pytest.mark.parametrize("make", [_with_a_jvp, _with_a_vjp])
@pytest.mark.parametrize("several", [lambda f: f, lambda f: [f, eqx.nn.Linear]])
def test_a_function_with_a_derivative_rule(call, make, several):
    scaled, w = make(), jnp.array([2.0, -1.0, 0.5])
    linear = eqx.nn.Linear(3, 3, key=jr.key(0))
    loss = lambda m, x: jnp.sum(scaled(m(x), w) ** 2)
    saved = S(eqx.filter_grad(loss), capture=several(scaled))
    out, got = call(saved, linear, X)
    h = linear(X)
    assert_close(out, eqx.filter_grad(loss)(linear, X))
    assert_close(got["scaled"]["primal"], jnp.sin(h) * w)
    assert_close(got["scaled"]["cotangent"], 2 * jnp.sin(h) * w)
    if "m" in got:
        # Through the rule.
        seen = 2 * jnp.sin(h) * w * 3 * jnp.cos(h) * w
        assert_close(got["m"]["cotangent"], seen)
    zeroed = plant(loss, {"scaled": jnp.zeros_like}, capture=several(scaled))
    assert call(zeroed, linear, X) == 0


@pytest.mark.parametrize("of", [list, set, frozenset])
def test_capture_takes_several(call, of):
    model = eqx.nn.Sequential(
        [
            eqx.nn.Linear(3, 3, key=jr.key(0)),
            eqx.nn.LayerNorm(3),
            eqx.nn.Lambda(jnp.sin),
        ]
    )
    classes = eqx.nn.Linear, eqx.nn.LayerNorm
    (_, got), (_, want) = [
        call(S(model, capture=several), X) for several in (of(classes), classes)
    ]
    assert list(got) == ["layers/0", "layers/1"]
    assert_close(got, want)
