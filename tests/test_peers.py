"""The scenarios that other libraries get wrong or right, by number."""

import functools as ft

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_sow import (
    Append,
    Buffer,
    plant,
    save_intermediates as S,
    sow,
    UnknownSowError,
)
from jax.sharding import NamedSharding, PartitionSpec as P

from tests.helpers import (
    assert_close,
    cotangents,
    primals,
    primitives,
    tangents,
    with_mode,
)


X = jnp.array([0.3, -1.2, 0.7])
V = jnp.array([1.0, 0.5, -2.0])
XS = jnp.stack([X, 2 * X])
ONES = jnp.ones(3)

ROWS = {}


def _row(name):
    def register(fn):
        assert name not in ROWS
        ROWS[name] = fn
        return fn

    return register


def test_all_rows_are_here():
    numbers = "01 02 03 04 04b 05a 05b 05c 06a 06b 07a 07b 07c 07d 07e 07f 07g 08a 08b "
    numbers += "09a 09b 10a 10b 10c 10d 11 12a 12b 13a 13b 13c 13d 14a 14b 14c 15a 15b "
    numbers += (
        "15c 15d 15e 16a 16b 16c 16d 17a 17d 17b 17c 18a 18b 18c 18d 18e 18f 19a "
    )
    numbers += (
        "19b 19c 19d 20 21a 21b 22a 22e 22b 22c 22d 23a 23b 23c 24 25 26a 26b 27 "
    )
    numbers += "28 29a 29b 29c 29d 29e 29f 30a 30b 30c 30d 30e 30f"
    assert list(ROWS) == numbers.split() and len(ROWS) == 87


def _f(mark, x):
    h = mark(jnp.sin(x), "h")
    return jnp.sum(mark(h * x, "y") ** 2)


_sown = ft.partial(_f, sow)
PRIMALS = primals(_f, X)
COTANGENTS = cotangents(_f, X)


def _check(got, **modes):
    """`name=value` is the primal, `name__mode=value` another one."""
    for key, value in modes.items():
        name, _, mode = key.partition("__")
        assert_close(got[name][mode or "primal"], value)


def _f_primals(got, expected=PRIMALS):
    assert_close(with_mode(got, "primal"), expected)


@_row("01")
def _():
    out, got = S(_sown)(X)
    assert_close(out, jnp.sum((jnp.sin(X) * X) ** 2))
    _f_primals(got)


@_row("02")
def _():
    _f_primals(S(jax.jit(_sown))(X)[1])


@_row("03")
def _():
    _f_primals(jax.jit(S(_sown))(X)[1])


@_row("04")
def _():
    _, got = S(lambda x: sow({"a": x, "b": (x * 2, None)}, "t")["a"])(X)
    _check(got, t={"a": X, "b": (X * 2, None)})


@_row("04b")
def _():
    f = jax.jit(lambda x: sow({"a": x, "b": (x * 2, None)}, "t")["a"])
    f(X)
    for _ in range(2):
        _check(S(f)(X)[1], t={"a": X, "b": (X * 2, None)})


def _unused(x):
    sow(x * 2, "u")
    return jnp.sum(x**2)


@_row("05a")
def _():
    _check(S(_unused)(X)[1], u=X * 2)


@_row("05b")
def _():
    _check(S(jax.jit(_unused))(X)[1], u=X * 2)


@_row("05c")
def _():
    _check(S(jax.grad(jax.jit(_unused)))(X)[1], u=X * 2)


@_row("06a")
def _():
    make = lambda x: {"b": (x, [x[0]]), "a": {"c": x}}
    out, _ = S(lambda x: make(sow(x * 2, "a")))(X)
    assert_close(out, make(X * 2))


@_row("06b")
def _():
    assert_close(S(lambda x: (sow(x, "a"),))(X)[0], (X,))
    assert_close(S(lambda x: (sow(x, "a"), None))(X)[0], (X, None))


@_row("07a")
def _():
    out, got = S(lambda d: sow(d["x"] * d["y"][0], "a"))({"x": X, "y": (V,)})
    assert_close(out, X * V)
    _check(got, a=X * V)


@_row("07b")
def _():
    _check(S(lambda x, *, y: sow(x * y, "a"))(X, y=V)[1], a=X * V)


@_row("07c")
def _():
    f = lambda x, how: sow(x * 2 if how == "double" else x, "a")
    _check(S(f)(X, "double")[1], a=X * 2)
    _check(S(eqx.filter_jit(f))(X, "double")[1], a=X * 2)


@_row("07d")
def _():
    f = lambda x, fn: sow(fn(x), "a")
    _check(S(f)(X, jnp.cos)[1], a=jnp.cos(X))
    _check(S(eqx.filter_jit(f))(X, jnp.cos)[1], a=jnp.cos(X))


@_row("07e")
def _():
    _check(S(lambda x, none: sow(x if none is None else -x, "a"))(X, None)[1], a=X)


MLP = eqx.nn.MLP(3, 2, 4, 1, key=jr.key(0))


@_row("07f")
def _():
    _check(S(lambda m, x: sow(m(x), "a"))(MLP, X)[1], a=MLP(X))


@_row("07g")
def _():
    f = lambda x: jnp.sum(sow(MLP(x), "a"))
    _check(S(eqx.filter_jit(f))(X)[1], a=MLP(X))
    _, got = S(eqx.filter_grad(f))(X)
    _check(got, a=MLP(X), a__cotangent=jnp.ones(2))
    _check(S(eqx.filter_vmap(f))(XS)[1], a=jax.vmap(lambda x: MLP(x))(XS))


@_row("08a")
def _():
    f = lambda x: sow(sow(x * 2, "a") * 2, "a")
    _check(S(f, reduce=Append())(X)[1], a=(X * 2, X * 4))


class Linear(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x, *, key=None):
        return sow(self.linear(x), "a")


@_row("08b")
def _():
    layer = Linear(eqx.nn.Linear(3, 3, key=jr.key(0)))
    f = lambda m, x: m(m(x))
    once = layer.linear(X)
    _check(S(f, reduce=Append())(layer, X)[1], a=(once, layer.linear(once)))


@_row("09a")
def _():
    f = lambda x: sow(sow(x, "a", tag="one") * 2, "b", tag="two")
    assert_close(S(f, tag="one")(X)[1], {"a": {"primal": X}})
    assert_close(S(f, tag="two")(X)[1], {"b": {"primal": X * 2}})


@_row("09b")
def _():
    _, got = S(_sown, names=["y"])(X)
    assert_close(got, {"y": {"primal": PRIMALS["y"]}})


def _scan(body):
    return lambda x: lax.scan(lambda c, v: (body(c, v), None), x, jnp.arange(3.0))[0]


def _steps(x, body):
    carries = []
    for i in range(3):
        x = body(x, jnp.float32(i))
        carries.append(x)
    return jnp.stack(carries)


_plain_body = lambda c, v: jnp.sin(c) + v
_body = lambda c, v: sow(_plain_body(c, v), "c")


@_row("10a")
def _():
    _check(S(_scan(_body))(X)[1], c=_steps(X, _plain_body))


@_row("10b")
def _():
    body = lambda c, v: sow(_scan(_body)(c) + v, "o")
    _, got = S(_scan(body))(X)
    outer, inner, x = [], [], X
    for i in range(3):
        inner.append(_steps(x, _plain_body))
        x = inner[-1][-1] + i
        outer.append(x)
    _check(got, o=jnp.stack(outer), c=jnp.stack(inner))


@_row("10c")
def _():
    _check(S(_scan(jax.jit(_body)))(X)[1], c=_steps(X, _plain_body))


def _scan_cotangents(x):
    def f(eps):
        for i in range(3):
            x_ = f.x = _plain_body(f.x, jnp.float32(i)) + eps[i]
        return jnp.sum(x_**2)

    f.x = x
    return jax.grad(f)(jnp.zeros((3, 3)))


@_row("10d")
def _():
    f = _scan(jax.checkpoint(_body))
    _, got = S(jax.grad(lambda x: jnp.sum(f(x) ** 2)))(X)
    _check(got, c=_steps(X, _plain_body), c__cotangent=_scan_cotangents(X))


@_row("11")
def _():
    f = lambda x: lax.fori_loop(0, 3, lambda i, c: sow(jnp.sin(c), "c"), x)
    _check(S(f)(X)[1], c=_steps(X, lambda c, _: jnp.sin(c)))


def _while(x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: sow(c + 1, "c"), x)


@_row("12a")
def _():
    _, got = S(_while)(X)
    _check(got, c=X + 3, c__count=jnp.int32(3))


@_row("12b")
def _():
    _, got = S(_while, reduce=Buffer(5))(X)
    some = jnp.stack([X + 1, X + 2, X + 3, 0 * X, 0 * X])
    _check(got, c=some, c__count=jnp.int32(3))


@_row("13a")
def _():
    f = lambda x: lax.cond(
        x[0] > 0, lambda x: sow(x * 2, "a"), lambda x: sow(x * 3, "a"), x
    )
    one = jnp.int32(1)
    _check(S(f)(X)[1], a=X * 2, a__count=one)
    _check(S(f)(-X)[1], a=-X * 3, a__count=one)


@_row("13b")
def _():
    f = lambda x: lax.cond(x[0] > 0, lambda x: sow(x * 2, "a"), lambda x: x, x)
    _check(S(f)(X)[1], a=X * 2, a__count=jnp.int32(1))
    _check(S(f)(-X)[1], a=X * 0, a__count=jnp.int32(0))


@_row("13c")
def _():
    f = lambda i, x: lax.switch(
        i, [lambda x, k=k: sow(x * k, "a") for k in range(3)], x
    )
    for i in range(3):
        _check(S(f)(jnp.int32(i), X)[1], a=X * i, a__count=jnp.int32(1))


@_row("13d")
def _():
    f = lambda x: lax.cond(
        x[0] > 0, lambda x: sow(x * 2, "a"), lambda x: sow(x, "b") * 3, x
    )
    _, got = S(jax.vmap(f))(jnp.stack([X, -X]))
    yes, no = jnp.array([1, 0], jnp.int32), jnp.array([0, 1], jnp.int32)
    _check(got, a=jnp.stack([2 * X, 0 * X]), b=jnp.stack([0 * X, -X]))
    _check(got, a__count=yes, b__count=no)


@_row("14a")
def _():
    _f_primals(S(jax.checkpoint(_sown))(X)[1])


@_row("14b")
def _():
    _, got = S(jax.grad(jax.checkpoint(_sown)))(X)
    _f_primals(got)
    _, got = S(jax.grad(jax.checkpoint(_sown)), reduce=Append())(X)
    assert all(len(entry["primal"]) == 1 for entry in got.values())


@_row("14c")
def _():
    _, got = S(jax.grad(jax.checkpoint(_sown)))(X)
    assert_close(with_mode(got, "cotangent"), COTANGENTS)


@jax.custom_jvp
def _cjvp(x):
    return sow(jnp.sin(x), "p")


@_cjvp.defjvp
def _(primals, tangents):
    return sow(jnp.sin(primals[0]), "r"), 7 * tangents[0]


@jax.custom_vjp
def _cvjp(x):
    return sow(jnp.sin(x), "p")


_cvjp.defvjp(
    lambda x: (sow(jnp.sin(x), "fwd"), None), lambda _, g: (sow(7 * g, "bwd"),)
)


@_row("15a")
def _():
    _check(S(_cjvp)(X)[1], p=jnp.sin(X))


@_row("15b")
def _():
    out, got = S(jax.grad(lambda x: jnp.sum(_cjvp(x))))(X)
    assert_close(out, 7 * ONES)
    _check(got, r=jnp.sin(X))


@_row("15c")
def _():
    _check(S(_cvjp)(X)[1], p=jnp.sin(X))


@_row("15d")
def _():
    out, got = S(jax.grad(lambda x: jnp.sum(_cvjp(x))))(X)
    assert_close(out, 7 * ONES)
    _check(got, fwd=jnp.sin(X))


@_row("15e")
def _():
    _check(S(jax.grad(lambda x: jnp.sum(_cvjp(x))))(X)[1], bwd=7 * ONES)


@_row("16a")
def _():
    _f_primals(S(jax.grad(_sown))(X)[1])


@_row("16b")
def _():
    _, got = S(jax.grad(_sown))(X)
    assert_close(with_mode(got, "cotangent"), COTANGENTS)


@_row("16c")
def _():
    loss = jax.value_and_grad(lambda x: (_sown(x), {"aux": (x,)}), has_aux=True)
    ((value, aux), grad), got = S(loss)(X)
    plain = lambda x: jnp.sum((jnp.sin(x) * x) ** 2)
    assert_close((value, grad), jax.value_and_grad(plain)(X))
    assert_close(aux, {"aux": (X,)})
    _f_primals(got)


@_row("16d")
def _():
    _, got = S(jax.grad(_unused))(X)
    _check(got, u=X * 2, u__cotangent=0 * X)


@_row("17a")
def _():
    _, got = S(lambda x, v: jax.jvp(_sown, (x,), (v,)))(X, V)
    assert_close(with_mode(got, "tangent"), tangents(_f, X, V))


@_row("17d")
def _():
    (_, got), (_, pushed) = jax.jvp(S(_sown), (X,), (V,))
    _f_primals(got)
    assert_close(with_mode(pushed, "primal"), tangents(_f, X, V))


@_row("17b")
def _():
    _, got = S(jax.jacfwd(_sown))(X)
    _f_primals(got)
    basis = jax.vmap(lambda v: tangents(_f, X, v))(jnp.eye(3))
    assert_close(with_mode(got, "tangent"), basis)


@_row("17c")
def _():
    f = lambda mark, x: mark(jnp.sin(x), "h") * x
    _, got = S(jax.jacrev(ft.partial(f, sow)))(X)
    _check(got, h=jnp.sin(X), h__cotangent=jnp.diag(X))


@_row("18a")
def _():
    _f_primals(S(jax.vmap(_sown))(XS)[1], jax.vmap(lambda x: primals(_f, x))(XS))


@_row("18b")
def _():
    got = S(jax.vmap(_sown, in_axes=1))(XS.T)
    assert_close(got, jax.vmap(S(_sown), in_axes=1)(XS.T))
    _f_primals(got[1], jax.vmap(lambda x: primals(_f, x))(XS))


@_row("18c")
def _():
    f = jax.vmap(lambda x, y: x + sow(y * 2, "a"), (0, None))
    _check(S(f)(XS, V)[1], a=V * 2)


@_row("18d")
def _():
    xs = jnp.stack([XS.T, -XS.T, XS.T - 1, XS.T + 1])
    _, got = S(jax.vmap(jax.vmap(_sown, in_axes=1), in_axes=0))(xs)
    _check(got, h=jnp.sin(jnp.moveaxis(xs, 2, 1)))


@_row("18e")
def _():
    _, got = S(jax.vmap(_sown, spmd_axis_name="i"))(XS)
    _check(got, h=jnp.sin(XS))


@_row("18f")
def _():
    _, got = S(jax.vmap(jax.grad(_sown)))(XS)
    expected = jax.vmap(lambda x: cotangents(_f, x))(XS)
    _check(got, h=jnp.sin(XS), h__cotangent=expected["h"])


@_row("19a")
def _():
    grad, got = jax.grad(S(_sown), has_aux=True)(X)
    assert_close(grad, jax.grad(lambda x: jnp.sum((jnp.sin(x) * x) ** 2))(X))
    _f_primals(got)


@_row("19b")
def _():
    _check(jax.vmap(S(_sown))(XS)[1], h=jnp.sin(XS))


@_row("19c")
def _():
    f = lambda x: jnp.sum(sow(_cvjp(x), "after"))
    grad, got = jax.grad(S(f), has_aux=True)(X)
    assert_close(grad, 7 * ONES)
    _check(got, p=jnp.sin(X), after=jnp.sin(X))


@_row("19d")
def _():
    grad, got = jax.grad(S(lambda x: jnp.sum(_cjvp(x))), has_aux=True)(X)
    assert_close(grad, 7 * ONES)
    _check(got, p=jnp.sin(X))


@_row("20")
def _():
    _, got = S(lambda x, v: jax.jvp(jax.grad(_sown), (x,), (v,)))(X, V)
    _f_primals(got)
    assert_close(with_mode(got, "tangent"), tangents(_f, X, V))
    cot, cot_tan = jax.jvp(lambda x: cotangents(_f, x), (X,), (V,))
    assert_close(with_mode(got, "cotangent"), cot)
    assert_close(with_mode(got, "cotangent.tangent"), cot_tan)


@_row("21a")
def _():
    _, got = S(jax.grad(lambda x: jnp.sum(_scan(_body)(x) ** 2)))(X)
    _check(got, c=_steps(X, _plain_body))


@_row("21b")
def _():
    _, got = S(jax.grad(lambda x: jnp.sum(_scan(_body)(x) ** 2)))(X)
    _check(got, c__cotangent=_scan_cotangents(X))


ROWS_8 = jnp.arange(16.0).reshape(8, 2)


def _sharded(mesh, f):
    return jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d"))


@_row("22a")
def _(mesh):
    f = jax.jit(_sharded(mesh, lambda x: sow(x * 2, "a") + 1))
    out, got = S(f)(ROWS_8)
    assert_close(out, ROWS_8 * 2 + 1)
    _check(got, a=ROWS_8[:, None] * 2)
    assert got["a"]["primal"].sharding.spec[0] == "d"


@_row("22e")
def _(mesh):
    out, got = _sharded(mesh, S(lambda x: sow(x * 2, "a") + 1))(ROWS_8)
    assert_close(out, ROWS_8 * 2 + 1)
    _check(got, a=ROWS_8 * 2)


@_row("22b")
def _(mesh):
    over = NamedSharding(mesh, P("d"))
    x = jax.device_put(ROWS_8, over)
    _, got = S(jax.jit(lambda x: sow(x * 2, "a")))(x)
    _check(got, a=ROWS_8 * 2)
    assert got["a"]["primal"].sharding.is_equivalent_to(over, 2)


@_row("22c")
def _(mesh):
    over = NamedSharding(mesh, P("d"))
    f = jax.jit(lambda x: (sow(x * 2, "a"), x.sum()), out_shardings=(over, None))
    out, got = S(f)(ROWS_8)
    assert out[0].sharding.is_equivalent_to(over, 2)
    _check(got, a=ROWS_8 * 2)


@_row("22d")
def _(mesh):
    f = jax.jit(_sharded(mesh, lambda x: sow(x * 2, "a") ** 2))
    assert_close(f(ROWS_8), (ROWS_8 * 2) ** 2)
    assert_close(jax.grad(lambda x: f(x).sum())(ROWS_8), 8 * ROWS_8)


def _loss(x):
    return jnp.sum(sow(jnp.sin(x), "h") * x)


@_row("23a")
def _():
    assert_close(plant(_loss, {"h": V})(X), jnp.sum(V * X))
    assert_close(eqx.filter_jit(plant(jax.jit(_loss), {"h": V}))(X), jnp.sum(V * X))
    assert_close(plant(_loss, S(_loss)(X)[1])(X), _loss(X))


@_row("23b")
def _():
    out = plant(_loss, {"h": lambda h: h * 2})(X)
    assert_close(out, jnp.sum(2 * jnp.sin(X) * X))


@_row("23c")
def _():
    grad = jax.grad(lambda h: plant(_loss, {"h": h})(X))(jnp.sin(X))
    assert_close(grad, X)
    assert_close(S(jax.grad(_loss))(X)[1]["h"]["cotangent"], X)


@_row("24")
def _():
    first, last = MLP.layers
    pre = first(X)
    _, got = S(MLP, capture=eqx.nn.Linear)(X)
    assert_close(with_mode(got, "primal"), {"layers/0": pre, "layers/1": MLP(X)})
    only = lambda path, module: path == "layers/1"
    _, got = S(MLP, capture=only)(X)
    assert_close(with_mode(got, "primal"), {"layers/1": MLP(X)})
    assert last(jax.nn.relu(pre)).shape == (2,)


@_row("25")
def _():
    make = lambda seed: Linear(eqx.nn.Linear(3, 3, key=jr.key(seed)))
    model = eqx.nn.Sequential([make(0), make(1)])
    one = model.layers[0].linear(X)
    _, got = S(model, scope=True)(X)
    expected = {"layers/0/a": one, "layers/1/a": model.layers[1].linear(one)}
    assert_close(with_mode(got, "primal"), expected)


def _count_traces(make):
    traces = []

    def f(x):
        traces.append(None)
        return _sown(x)

    saved = make(f)
    for i in range(5):
        saved(X + i)
    return len(traces)


@_row("26a")
def _():
    assert _count_traces(lambda f: S(jax.jit(f))) == 1


@_row("26b")
def _():
    assert _count_traces(lambda f: jax.jit(S(f))) == 1


@_row("27")
def _():
    def f(x):
        return _f(sow, x)

    def g(x):
        return _f(lambda v, _: v, x)

    text = jax.jit(f).lower(X).as_text()
    assert text == jax.jit(g).lower(X).as_text().replace("jit_g", "jit_f")


@_row("28")
def _():
    with pytest.raises(UnknownSowError, match="'nope'.*'h', 'y'"):
        S(_sown, names="nope")(X)
    # A tag without a sow: a name that is asked for there is told.
    with pytest.raises(UnknownSowError, match="none at all"):
        S(_sown, tag="nope", names="h")(X)


def _typed(make):
    def f(x):
        sow(make(x), "v")
        return jnp.sum(x**2)

    return f


@_row("29a")
def _():
    make = lambda x: jr.fold_in(jr.key(0), x.astype(jnp.int32)[1])
    _check(S(_typed(make))(X)[1], v=make(X))


@_row("29b")
def _():
    make = lambda x: (x * 3).astype(jnp.int32)
    f = lambda x: jnp.sum(sow({"i": make(x), "x": x * 2}, "v")["x"])
    _, got = S(jax.grad(f))(X)
    cotangent = {"i": np.zeros(3, jax.dtypes.float0), "x": ONES}
    _check(got, v={"i": make(X), "x": X * 2}, v__cotangent=cotangent)


@_row("29c")
def _():
    _check(S(jax.grad(_typed(lambda x: x > 0)))(X)[1], v=X > 0)


@_row("29d")
def _():
    f = lambda x: jnp.sum(sow(x.astype(jnp.bfloat16), "v").astype(jnp.float32))
    _, got = S(jax.grad(f))(X)
    _check(got, v=X.astype(jnp.bfloat16), v__cotangent=jnp.ones(3, jnp.bfloat16))


@_row("29e")
def _():
    _check(S(jax.grad(_typed(lambda x: x[:0])))(X)[1], v=X[:0], v__cotangent=X[:0])


@_row("29f")
def _():
    make = lambda x: jr.split(jr.key(3), 2)
    _check(S(jax.grad(_typed(make)))(X)[1], v=make(X))


@_row("30a")
def _():
    _check(S(lambda xs: lax.map(_sown, xs))(XS)[1], h=jnp.sin(XS))


@_row("30b")
def _():
    f = lambda x: lax.associative_scan(lambda a, b: sow(a + b, "s"), x)
    x = jnp.arange(4.0)
    out, got = S(f, reduce=Append())(x)
    assert_close(out, jnp.cumsum(x))
    seen = []

    def add(a, b):
        seen.append(a + b)
        return seen[-1]

    lax.associative_scan(add, x)
    _check(got, s=tuple(seen))


@_row("30c")
def _():
    f = jnp.vectorize(lambda x: sow(jnp.sum(x), "s"), signature="(n)->()")
    _check(S(f)(XS)[1], s=jnp.sum(XS, -1))


@_row("30d")
def _():
    @jax.custom_batching.custom_vmap
    def f(x):
        return sow(jnp.sin(x), "own")

    @f.def_vmap
    def _(axis_size, in_batched, xs):
        return sow(jnp.sin(xs), "rule"), in_batched[0]

    _check(S(f)(X)[1], own=jnp.sin(X))
    assert_close(S(jax.vmap(f))(XS)[1], {"rule": {"primal": jnp.sin(XS)}})


@_row("30e")
def _():
    def f(x, v):
        out, push = jax.linearize(_sown, x)
        return out, push(v)

    _, got = S(f)(X, V)
    _f_primals(got)
    assert_close(with_mode(got, "tangent"), tangents(_f, X, V))


@_row("30f")
def _():
    def f(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return sow(jax.pure_callback(lambda v: np.asarray(v) * 2, shape, x), "a")

    _check(S(f)(X)[1], a=X * 2)
    assert "pure_callback" in primitives(jax.make_jaxpr(S(f))(X))


@pytest.mark.parametrize("number", ROWS)
def test_row(number, mesh):
    run = ROWS[number]
    run(mesh) if run.__code__.co_argcount else run()
