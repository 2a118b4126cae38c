"""Objects that are not PyTrees: those that hold traced arrays are an error where they
are wanted, and others come back as they are."""

import dataclasses
import functools as ft
import time
import types
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_sow import plant, save_intermediates as S, sow, SowTypeError, tap
from jax import lax

from .helpers import assert_close


X = jnp.array([0.3, -1.2])
OTHER = jnp.ones(2)


@dataclasses.dataclass
class Output:
    logits: Any


class Slots:
    __slots__ = ("empty", "h")

    def __init__(self, h):
        self.h = h


class Hostile:
    """It may not be asked anything."""

    def __init__(self, h):
        self.parts = {"k": [1, (h,)]}
        self.me = self

    def _refuse(self, *_):
        raise AssertionError

    __eq__ = __getattr__ = __repr__ = __bool__ = __len__ = __iter__ = _refuse
    __hash__ = object.__hash__
    dtype = shape = h = property(_refuse)


class WithMethod:
    def __init__(self, h):
        self.h = h

    def method(self):
        return self.h


class Strings(str):
    pass


def _closure(h):
    return lambda y: y * h


def _in_array(h):
    array = np.empty(2, object)
    array[1] = h
    return array


# Each with where the array is in it.
_OBJECTS = {
    "dataclass": (Output, ".logits"),
    "slots": (Slots, ".h"),
    "namespace": (lambda h: types.SimpleNamespace(a=[{"b": h}]), ".a[0]['b']"),
    "hostile": (Hostile, ".parts['k'][1][0]"),
    "closure": (_closure, ".__closure__['h']"),
    "default": (lambda h: lambda y, h=h: y * h, ".__defaults__[0]"),
    "partial": (lambda h: ft.partial(jnp.add, y=h), ".keywords['y']"),
    "method": (lambda h: WithMethod(h).method, ".__self__.h"),
    "jit": (lambda h: jax.jit(_closure(h)), ".__wrapped__.__closure__['h']"),
    "custom_jvp": (lambda h: jax.custom_jvp(_closure(h)), "__closure__['h']"),
    "deep": (lambda h: Output(Slots({1: Output([h])})), ".logits.h[1].logits[0]"),
    "objects": (_in_array, ".flat[1]"),
}

_WAYS = {
    "save": S,
    "transform": lambda f: S(f, transform=lambda v: 0),
    "tap": lambda f: tap(f, print),
    "plant": lambda f: plant(f, {"n": lambda v: v}),
    "grad": lambda f: S(jax.grad(f)),
    "jit": lambda f: jax.jit(lambda x: S(f)(x)[0]),
    "vmap": lambda f: lambda x: S(jax.vmap(f))(x[None]),
    "scan": lambda f: S(lambda x: lax.map(f, x[None])),
    "cond": lambda f: S(lambda x: lax.cond(x[0] > 0, f, f, x)),
}


@pytest.mark.parametrize("way", ["save", "tap"])
@pytest.mark.parametrize("name", _OBJECTS)
def test_where_the_array_is(name, way):
    make, where = _OBJECTS[name]
    held = []

    def f(x, h):
        made = make(h(x))
        held.append((made, sow((x, made), "n")[1]))
        return jnp.sum(jnp.sin(sow(x, "other")))

    with pytest.raises(SowTypeError) as caught:
        _WAYS[way](lambda x: f(x, lambda x: 2 * x))(X)
    text = str(caught.value)
    assert "`sow(..., 'n')` at" in text and f"{where}`" in text and "`[1]`" in text
    assert "register_dataclass" in text
    # The program has the object that it had, and others do not mind.
    with jax.checking_leaks():
        del held[:]
        _, got = S(lambda x: (f(x, lambda x: 2 * x), held.clear())[0], names="other")(X)
    assert_close(got["other"]["primal"], X)
    # One that holds an array of another kind comes back.
    _, got = S(lambda x: f(x, lambda _: OTHER))(X)
    assert got["n"]["primal"][1] is held[-1][0] is held[-1][1]


@pytest.mark.parametrize("way", _WAYS)
def test_every_way(way):
    def f(x):
        return jnp.sum(sow(Output(jnp.sin(x)), "n").logits)

    with pytest.raises(SowTypeError, match=r"(?s)'n'.*it is an object.*`Output`"):
        _WAYS[way](f)(X)


class Layer(eqx.Module):
    linear: eqx.nn.Linear
    wrap: Any = eqx.field(static=True, default=Output)

    def __call__(self, x):
        return self.wrap(self.linear(x))


class Head(eqx.Module):
    def __call__(self, out):
        return jnp.sum(out.logits)


def test_modules():
    layer = Layer(eqx.nn.Linear(2, 2, key=jax.random.key(0)))
    head = Head()
    loss = lambda layer, x: head(layer(x))
    step = eqx.filter_grad(loss)
    for options in (dict(capture=Layer), dict(capture=True)):
        with pytest.raises(SowTypeError, match=r"(?s)of `layer`.*`Output`"):
            S(step, **options)(layer, X)
    with pytest.raises(
        SowTypeError, match=r"(?s)inputs of `head`.*`\[0\]\[0\]`.*`Output`"
    ):
        S(step, capture=Head, inputs=True)(layer, X)
    _, got = S(step, capture=True, names="layer/linear")(layer, X)
    assert set(got["layer/linear"]) == {"primal", "cotangent"}
    Registered = jax.tree_util.register_dataclass(
        dataclasses.make_dataclass("Registered", ["logits"])
    )
    _, got = S(step, capture=Layer)(
        eqx.tree_at(lambda m: m.linear, Layer(layer.linear, Registered), layer.linear),
        X,
    )
    assert_close(got["layer"]["cotangent"].logits, jnp.ones(2))


def test_functions_without_traced_arrays():
    mlp = eqx.nn.MLP(2, 2, 2, 1, activation=jax.nn.relu, key=jax.random.key(0))
    fns = (
        jax.nn.gelu,
        jax.nn.relu,
        jnp.sin,
        jax.jit(jnp.sin),
        eqx.filter_jit(mlp),
        print,
    )
    others = "a", Strings("b"), Output, np.dtype("int8"), Output(OTHER), time, np.add
    _, got = S(lambda x: sow((x, mlp, fns, others), "n")[0])(X)
    _, model, got_fns, got_others = got["n"]["primal"]
    is_static = lambda x: not eqx.is_array(x)
    assert all(a is b for a, b in zip(got_others, others, strict=True))
    for a, b in ((model, mlp), (got_fns, fns)):
        leaves = zip(
            *(filter(is_static, jax.tree.leaves(t)) for t in (a, b)), strict=True
        )
        assert all(x is y for x, y in leaves)


def test_the_search_has_an_end():
    chain: Any = None
    for _ in range(100_000):
        chain = [chain]
    held = types.SimpleNamespace(chain=chain, many=[object() for _ in range(100_000)])
    start = time.perf_counter()
    _, got = S(lambda x: sow((x, held), "n")[0])(X)
    assert got["n"]["primal"][1] is held
    assert time.perf_counter() - start < 5


class Mapped(eqx.Module):
    def __call__(self, x):
        return self.map(lambda y: y * x)

    class Map(eqx.Module):
        def __call__(self, fn):
            return fn(OTHER)

    map: Any = Map()


def test_the_code_of_others():
    """An argument that cannot be captured can be left out."""
    options = dict(capture=True, inputs=True)
    with pytest.raises(
        SowTypeError, match="write `names=(lambda .*'map.inputs')`"
    ) as e:
        S(Mapped(), **options)(X)
    names = eval(str(e.value).split("`names=")[1].split("`")[0])
    assert list(S(Mapped(), names=names, **options)(X)[1]) == [
        ".inputs",
        "map",
        ".",
    ]
