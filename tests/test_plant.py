"""`plant`: replacing what is sown."""

import functools as ft

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from eqx_sow import (
    plant,
    save_intermediates as S,
    Sow,
    sow,
    SowError,
    UnknownSowError,
)
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from .helpers import assert_close, Encoder, modes_of, with_mode
from .tables import pick, under


X = jnp.array([0.3, -1.2, 0.7])
XS = jnp.stack([X, 2 * X, -X, 0.5 * X])


# --- The programs of the round trip ---


def straight(x):
    h = sow(jnp.sin(x), "h")
    return jnp.sum(sow(h * x, "k") ** 2)


def pytree(x):
    t = sow({"a": jnp.sin(x), "b": (x * 2, "text", None), "f": jnp.tanh, "n": 3}, "t")
    return jnp.sum(t["f"](t["a"]) * t["b"][0] * t["n"])


def integers(x):
    i = sow(jnp.argmax(x), "i")
    flags = sow(x > 0, "flags")
    key = sow(jr.key(3), "key")
    return jnp.sum(jnp.where(flags, x[i], 0.0) + jr.normal(key, x.shape))


def scan(x):
    def body(c, y):
        c = sow(jnp.tanh(c + y), "c")
        return c, sow(c * y, "y")

    c, ys = lax.scan(body, x, jnp.arange(4.0)[:, None] * jnp.ones((4, 3)))
    return jnp.sum(c) + jnp.sum(ys**2)


def reversed_scan(x):
    def body(c, y):
        return sow(jnp.sin(c) + y, "c"), None

    return jnp.sum(lax.scan(body, x, XS, reverse=True)[0] ** 2)


def nested_scan(x):
    def inner(c, y):
        return sow(jnp.tanh(c) + y, "inner"), None

    def outer(c, y):
        c = lax.scan(inner, c, jnp.stack([y, -y]))[0]
        return sow(c * 0.5, "outer"), None

    return jnp.sum(lax.scan(outer, x, XS)[0] ** 2)


def fori(x):
    body = lambda i, c: sow(jnp.sin(c) + i.astype(c.dtype), "c")
    return jnp.sum(lax.fori_loop(0, 5, body, x))


def mapped_loop(x):
    return jnp.sum(lax.map(lambda y: sow(jnp.sin(y * x), "m"), XS))


def constant_in_loop(x):
    def body(c, _):
        return c + sow(jnp.sin(x), "const"), None

    return jnp.sum(lax.scan(body, x, None, length=3)[0])


def cond(x):
    yes = lambda x: sow(jnp.sin(x), "yes")
    no = lambda x: sow(jnp.cos(x), "no")
    both = lax.cond(x[0] > 0, lambda x: sow(x, "s"), lambda x: sow(-x, "s"), x)
    return jnp.sum(lax.cond(x[0] > 0, yes, no, x) * both)


def switch(x):
    i = (jnp.abs(x[1]) * 2).astype(jnp.int32)
    branches = [lambda x: x, lambda x: sow(x * 2, "one"), lambda x: sow(x * 3, "two")]
    return jnp.sum(lax.switch(i, branches, x) ** 2)


def cond_in_scan(x):
    def body(c, y):
        grow = lambda c: sow(c * 2, "grown")
        return lax.cond(y[0] > 0, grow, lambda c: c, c), None

    return jnp.sum(lax.scan(body, x, XS)[0])


def scan_in_cond(x):
    body = lambda c, y: (sow(jnp.tanh(c + y), "c"), None)
    return jnp.sum(lax.cond(x[0] > 0, lambda x: lax.scan(body, x, XS)[0], jnp.sin, x))


def jitted(x):
    return jnp.sum(jax.jit(lambda x: sow(jnp.sin(x), "j") * 2)(x))


def checkpointed(x):
    return jnp.sum(jax.checkpoint(lambda x: sow(jnp.sin(x), "j") * x)(x))


def checkpointed_scan(x):
    body = jax.checkpoint(lambda c, y: (sow(jnp.tanh(c + y), "c"), None))
    return jnp.sum(lax.scan(body, x, XS)[0] ** 2)


def vmapped(x):
    f = lambda y: sow(jnp.sin(y) * x, "v") ** 2
    return jnp.sum(jax.vmap(f)(XS))


def vmapped_out_axes(x):
    f = lambda y: sow(jnp.sin(y), "v")
    return jnp.sum(jax.vmap(f, in_axes=1, out_axes=1)(XS) @ x)


def vmapped_scan(x):
    body = lambda c, y: (sow(jnp.tanh(c * y), "c"), None)
    f = lambda c: lax.scan(body, c, XS)[0]
    return jnp.sum(jax.vmap(f)(jnp.stack([x, -x])))


def scan_of_vmap(x):
    f = lambda c, y: sow(jnp.tanh(c * y), "c")
    body = lambda c, y: (jax.vmap(f, in_axes=(0, None))(c, y), None)
    return jnp.sum(lax.scan(body, jnp.stack([x, -x]), XS)[0])


def vmapped_cond(x):
    f = lambda y: lax.cond(
        y[0] > 0.2, lambda y: sow(jnp.sin(y), "yes"), lambda y: y * x, y
    )
    return jnp.sum(jax.vmap(f)(XS))


def unbatched_leaf(x):
    def f(y):
        t = sow({"y": y * 2, "x": jnp.sin(x)}, "t")
        return jnp.sum(t["y"] * t["x"])

    return jnp.sum(jax.vmap(f)(XS))


def grad(x):
    return jnp.sum(jax.grad(lambda x: jnp.sum(sow(jnp.sin(x), "h") ** 2))(x))


def grad_of_scan(x):
    return jnp.sum(jax.grad(lambda x: reversed_scan(x) ** 2)(x))


def jvp(x):
    return jnp.sum(jax.jvp(straight, (x,), (jnp.ones_like(x),))[1])


def custom_vjp(x):
    @jax.custom_vjp
    def f(x):
        return sow(jnp.sin(x), "s") * 2

    f.defvjp(lambda x: (f(x), x), lambda x, g: (g * x,))
    return jnp.sum(f(x))


def filtered(x):
    model = eqx.nn.Sequential([eqx.nn.Lambda(jnp.tanh), Sow("h")])
    return jnp.sum(eqx.filter_jit(eqx.filter_vmap(model))(XS) @ x)


PROGRAMS = {
    f.__name__: f
    for f in (
        straight,
        pytree,
        integers,
        scan,
        reversed_scan,
        nested_scan,
        fori,
        mapped_loop,
        constant_in_loop,
        cond,
        switch,
        cond_in_scan,
        scan_in_cond,
        jitted,
        checkpointed,
        checkpointed_scan,
        vmapped,
        vmapped_out_axes,
        vmapped_scan,
        scan_of_vmap,
        vmapped_cond,
        unbatched_leaf,
        grad,
        grad_of_scan,
        jvp,
        custom_vjp,
        filtered,
    )
}

program = pytest.mark.parametrize("f", PROGRAMS.values(), ids=PROGRAMS)


def _primal(got):
    return with_mode(got, "primal")


@pytest.mark.sample(9)
@program
@pytest.mark.parametrize("sign", [1, -1])
def test_round_trip(f, sign, call):
    expected = f(sign * X)
    out, got = S(f)(sign * X)
    assert got
    assert_close(call(plant(f, got), sign * X), expected)
    assert_close(call(plant(f, _primal(got)), sign * X), expected)


@program
def test_round_trip_under_jit(f):
    _, got = S(jax.jit(f))(X)
    assert_close(plant(jax.jit(f), got)(X), f(X))
    assert_close(eqx.filter_jit(plant(f, got))(X), f(X))


@pytest.mark.slow
@program
def test_round_trip_under_vmap(f):
    g = jax.vmap(f)
    _, got = S(g)(XS)
    assert_close(plant(g, got)(XS), g(XS))


@pytest.mark.slow
@program
def test_round_trip_in_a_scan(f):
    def g(xs):
        return lax.scan(lambda c, x: (c + f(x), None), 0.0, xs)[0]

    _, got = S(g)(XS)
    assert_close(plant(g, got)(XS), g(XS))


@pytest.mark.sample(6)
@program
def test_each_entry_matters(f):
    """What is planted is what the program goes on with: values of another input give
    the result of that input, where everything goes through the sows."""
    _, got = S(f)(X)
    out, again = S(plant(f, got))(X)
    assert_close(_primal(again), _primal(got))
    assert_close(out, f(X))


def test_round_trip_through_grad(call):
    loss = lambda x: jnp.sum(sow(jnp.sin(x), "h") ** 2)
    f = jax.value_and_grad(loss)
    _, got = S(f)(X)
    assert_close(call(plant(f, _primal(got)), X), f(X))


def test_round_trip_on_eight_devices(mesh, call):
    def local(x):
        return lax.psum(jnp.sum(sow(jnp.sin(x), "s") ** 2), "d")

    f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P()))
    xs = jnp.arange(16.0)
    out, got = S(f)(xs)
    assert_close(call(plant(f, got), xs), out)
    doubled = {"s": 2 * got["s"]["primal"]}
    assert_close(call(plant(f, doubled), xs), 4 * out)
    assert_close(call(plant(f, {"s": jnp.ones_like}), xs), jnp.array(16.0))


def test_round_trip_of_a_scan_on_eight_devices(mesh):
    def local(x):
        body = lambda c, _: (sow(jnp.sin(c), "s"), None)
        return lax.scan(body, x, None, length=3)[0]

    f = jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    xs = jnp.arange(8.0)
    out, got = S(f)(xs)
    assert_close(plant(f, got)(xs), out)


def test_round_trip_of_what_jit_returned():
    # `jax.jit` sorts the keys of dicts.
    def f(x):
        return sow(sow(x * 2, "z") + 1, "a")

    _, got = jax.jit(S(f))(X)
    assert_close(plant(f, got)(X), f(X))


# --- Other values: the same as editing the program ---


def test_value(call):
    f = lambda x: jnp.sum(sow(jnp.sin(x), "h") * x)
    assert_close(call(plant(f, {"h": 2 * X}), X), jnp.sum(2 * X * X))


def test_python_numbers_and_numpy_arrays():
    f = lambda x: sow(jnp.sum(x), "s") * 2.0
    assert_close(plant(f, {"s": 3.0})(X), jnp.array(6.0))
    assert_close(plant(f, {"s": np.float32(3.0)})(X), jnp.array(6.0))


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint64, np.complex128])
def test_numpy_arrays_are_taken_as_jax_takes_them(call, dtype):
    value = np.arange(3).astype(dtype)
    there = jnp.asarray(value)
    f = lambda x: sow(x, "h")
    assert_close(call(plant(f, {"h": value}), 2 * there), there)
    assert_close(call(plant(f, {"h": lambda _: value}), 2 * there), there)
    assert_close(call(plant(f, {"h": value[1]}), 2 * there[1]), there[1])


def test_numpy_arrays_of_64_bits():
    f = lambda x: sow(x, "h")
    with jax.enable_x64(True):
        out = plant(f, {"h": np.arange(3.0)})(jnp.zeros(3))
        assert_close(np.asarray(out), np.arange(3.0))
        match = r"a leaf float64\[3\] where float32\[3\] is marked"
        with pytest.raises(SowError, match=match):
            plant(f, {"h": np.arange(3.0)})(jnp.zeros(3, jnp.float32))


@pytest.mark.parametrize(
    "value, match",
    [
        (np.zeros(3), r"float32\[3\]"),
        (np.zeros(3, bool), r"bool\[3\]"),
        (np.zeros((2, 3), int), r"int32\[2, 3\]"),
        (np.float64(3.5), r"float32\[\]"),
        (np.array([None] * 3), r"object\[3\]"),
        (np.array(["a"] * 3), r"<U1\[3\]"),
    ],
)
def test_numpy_arrays_that_do_not_fit(value, match):
    match = rf"a leaf {match} where int32\[3\] is marked"
    with pytest.raises(SowError, match=match):
        plant(lambda x: sow(x, "h"), {"h": value})(jnp.arange(3))


def test_a_numpy_number_is_no_python_number():
    match = r"a leaf float32\[\] where int32\[\] is marked"
    with pytest.raises(SowError, match=match):
        plant(lambda x: sow(x, "h"), {"h": np.float64(3.5)})(jnp.int32(3))


def test_pytree_value(call):
    def f(x):
        t = sow({"a": x, "b": (2 * x,)}, "t")
        return t["a"] - t["b"][0]

    assert_close(call(plant(f, {"t": {"a": 3 * X, "b": (X,)}}), X), 2 * X)


def test_value_per_iteration(call):
    def f(x):
        return lax.scan(lambda c, _: (sow(c + 1, "c"),) * 2, x, None, length=3)[1]

    values = jnp.arange(9.0).reshape(3, 3)
    assert_close(call(plant(f, {"c": values}), X), values)


def test_value_per_iteration_of_a_reversed_scan(call):
    def f(x):
        body = lambda c, y: (sow(c + y, "c"),) * 2
        return lax.scan(body, x, XS, reverse=True)[1]

    values = jnp.arange(12.0).reshape(4, 3)
    assert_close(call(plant(f, {"c": values}), X), values)


def test_value_per_iteration_of_nested_loops(call):
    def f(x):
        inner = lambda c, _: (sow(c * 2, "c"),) * 2
        outer = lambda c, _: lax.scan(inner, c, None, length=2)
        return lax.scan(outer, x, None, length=3)[1]

    values = jnp.arange(18.0).reshape(3, 2, 3)
    assert_close(call(plant(f, {"c": values}), X), values)


def test_value_per_lane(call):
    values = jnp.arange(12.0).reshape(4, 3)
    f = jax.vmap(lambda x: sow(jnp.sin(x), "h"))
    assert_close(call(plant(f, {"h": values}), XS), values)
    g = jax.vmap(lambda x: sow(jnp.sin(x), "h"), in_axes=1, out_axes=1)
    assert_close(call(plant(g, {"h": values}), XS.T), values.T)


def test_value_of_a_scan_under_vmap(call):
    def f(x):
        return lax.scan(lambda c, _: (sow(c + 1, "c"),) * 2, x, None, length=2)[1]

    _, got = S(jax.vmap(f))(XS)
    values = jnp.arange(24.0).reshape(got["c"]["primal"].shape)
    out = call(plant(jax.vmap(f), {"c": values}), XS)
    # The vmap is outermost.
    assert values.shape == (4, 2, 3)
    assert_close(out, values)


def test_the_same_value_in_every_iteration_of_a_while_loop(call):
    def f(x):
        go = lambda s: s[0] < 3
        body = lambda s: (s[0] + 1, s[1] + sow(s[1] * 2, "h"))
        return lax.while_loop(go, body, (0, x))[1]

    assert_close(call(plant(f, {"h": jnp.ones(3)}), X), X + 3)


def test_only_the_branch_that_runs_sees_it(call):
    def f(x):
        return lax.cond(x[0] > 0, lambda x: sow(x * 2, "h"), lambda x: x * 3, x)

    planted = plant(f, {"h": jnp.ones(3)})
    assert_close(call(planted, X), jnp.ones(3))
    assert_close(call(planted, -X), -3 * X)


def test_one_name_in_several_branches(call):
    def f(x):
        branches = [lambda x, n=n: sow(x * n, "h") + n for n in (1.0, 2.0, 3.0)]
        return lax.switch(1, branches, x)

    assert_close(call(plant(f, {"h": jnp.zeros(3)}), X), 2 * jnp.ones(3))


def test_names_that_are_not_planted_stay():
    f = lambda x: sow(sow(x * 2, "a") + 1, "b")
    assert_close(plant(f, {"a": X})(X), X + 1)
    out, got = S(plant(f, {"a": X}))(X)
    assert_close(_primal(got), {"a": X, "b": X + 1})


def test_nothing_to_plant():
    assert_close(plant(straight, {})(X), straight(X))


def test_tag():
    f = lambda x: sow(x * 2, "h", tag="a") + sow(x * 3, "h", tag="b")
    assert_close(plant(f, {"h": X}, tag="a")(X), 4 * X)
    assert_close(plant(f, {"h": X}, tag="b")(X), 3 * X)
    with pytest.raises(UnknownSowError):
        plant(f, {"h": X})(X)


def test_sow_called_twice_by_one_name():
    def f(x):
        return sow(x * 2, "h") + sow(x * 3, "h")

    # Both are the value sown there, and a function is right for both.
    assert_close(plant(f, {"h": lambda h: h + 1})(X), 5 * X + 2)
    with pytest.raises(SowError, match="h"):
        plant(f, {"h": X})(X)


def _with_custom_vjp(x):
    @jax.custom_vjp
    def f(x):
        return sow(jnp.sin(x), "h") * 2

    f.defvjp(lambda x: (sow(jnp.sin(x), "h") * 2, x), lambda x, ct: (7 * ct,))
    return jnp.sum(f(x))


def _with_custom_jvp(x):
    @jax.custom_jvp
    def f(x):
        return sow(jnp.sin(x), "h") * 2

    @f.defjvp
    def _(primals, tangents):
        return sow(jnp.sin(primals[0]), "h") * 2, 7 * tangents[0]

    return jnp.sum(f(x))


@pytest.mark.parametrize("f", [_with_custom_vjp, _with_custom_jvp])
def test_inside_custom_rules(f, call):
    for value in (jnp.ones(3), jnp.ones_like):
        assert_close(call(plant(f, {"h": value}), X), jnp.array(6.0))
        planted = plant(jax.value_and_grad(f), {"h": value})
        assert_close(call(planted, X), (jnp.array(6.0), 7 * jnp.ones(3)))


# --- Functions and globs ---


def test_function(call):
    f = lambda x: sow(jnp.sin(x), "h") * 2
    assert_close(call(plant(f, {"h": lambda h: h + 1}), X), 2 * jnp.sin(X) + 2)


def test_function_sees_what_the_code_there_sees(call):
    shapes = []

    def look(h):
        shapes.append(h.shape)
        return h * jnp.sum(h)

    def f(x):
        body = lambda c, _: (jax.vmap(lambda y: sow(y * 2, "h"))(c), None)
        return lax.scan(body, x, None, length=2)[0]

    def by_hand(x):
        for _ in range(2):
            x = 2 * x
            x = x * jnp.sum(x, axis=1, keepdims=True)
        return x

    assert_close(call(plant(f, {"h": look}), XS), by_hand(XS))
    assert set(shapes) == {(3,)}


@program
def test_the_identity_function_changes_nothing(f, call):
    assert_close(call(plant(f, {"*": lambda value: value}), X), f(X))


def test_function_of_a_pytree():
    def f(x):
        t = sow({"a": x, "s": "text"}, "t")
        assert t["s"] == "text"
        return t["a"]

    fn = lambda t: {**t, "a": t["a"] * 2}
    assert_close(plant(f, {"t": fn})(X), 2 * X)


def test_function_in_a_branch_and_a_while_loop(call):
    def f(x):
        go = lambda s: s[0] < 3
        grow = lambda s: (
            s[0] + 1,
            lax.cond(s[0] > 0, lambda y: sow(y, "h"), lambda y: y, s[1]),
        )
        return lax.while_loop(go, grow, (0, x))[1]

    assert_close(call(plant(f, {"h": lambda h: h * 2}), X), 4 * X)


def test_globs(call):
    def f(x):
        a = sow(x, "blocks/0/act")
        b = sow(x, "blocks/1/act")
        return jnp.stack([a, b, sow(x, "head")])

    out = call(plant(f, {"blocks/**": jnp.zeros_like}), X)
    assert_close(out, jnp.stack([0 * X, 0 * X, X]))
    out = call(plant(f, {"blocks/*/act": 2 * X, "head": X + 1}), X)
    assert_close(out, jnp.stack([2 * X, 2 * X, X + 1]))


def test_exact_names_go_before_globs():
    f = lambda x: sow(x, "a") + sow(x, "b")
    assert_close(plant(f, {"*": 2 * X, "a": X})(X), 3 * X)


# --- Captured modules ---


def _mlp():
    return eqx.nn.MLP(3, 3, 3, 2, activation=jnp.tanh, key=jr.key(0))


def test_captured_modules_by_path(call):
    mlp = _mlp()
    out = call(plant(mlp, {"layers/1": jnp.zeros(3)}, capture=eqx.nn.Linear), X)
    assert_close(out, mlp.layers[2](jnp.zeros(3)))
    fn = plant(lambda net, x: net(x), {"net/layers/*": jnp.zeros_like}, capture=True)
    assert_close(call(fn, mlp, X), jnp.zeros(3))


def test_round_trip_of_captured_modules(call):
    mlp = _mlp()
    _, got = S(mlp, capture=True)(X)
    assert_close(call(plant(mlp, got, capture=True), X), mlp(X))
    # The model is patched with what ran on another input.
    _, other = S(mlp, capture=eqx.nn.Linear)(2 * X)
    patched = plant(mlp, {"layers/1": other["layers/1"]}, capture=eqx.nn.Linear)
    assert_close(call(patched, X), mlp(2 * X))


def _double_first(mlp):
    where = lambda m: (m.layers[0].weight, m.layers[0].bias)
    return eqx.tree_at(where, mlp, replace_fn=lambda w: 2 * w)


def test_gradient_of_a_planted_program(call):
    mlp = _mlp()
    loss = lambda net, x: jnp.sum(net(x) ** 2)
    planted = plant(loss, {"net/layers/0": lambda h: h * 2}, capture=eqx.nn.Linear)
    grads = call(eqx.filter_grad(planted), mlp, X)
    # Once for the point, and once for the chain rule.
    assert_close(grads, _double_first(eqx.filter_grad(loss)(_double_first(mlp), X)))
    assert type(grads) is eqx.nn.MLP and type(grads.layers[0]) is eqx.nn.Linear


def test_planting_in_a_gradient_leaves_what_flows_back(call):
    """Otherwise the round trip of a gradient would lose it."""
    mlp = _mlp()
    loss = lambda net, x: jnp.sum(net(x) ** 2)
    planted = plant(
        eqx.filter_grad(loss), {"net/layers/0": lambda h: h * 2}, capture=eqx.nn.Linear
    )
    grads = call(planted, mlp, X)
    assert_close(grads, eqx.filter_grad(loss)(_double_first(mlp), X))
    assert type(grads) is eqx.nn.MLP and type(grads.layers[0]) is eqx.nn.Linear


def test_methods_by_name():
    fn = lambda m, x: m(x)
    planted = plant(fn, {"m.encode": X}, capture=Encoder, methods=("encode",))
    assert_close(planted(Encoder(X), X), X + 1)


def test_captured_in_both_is_one_site(call):
    mlp = _mlp()
    zero = plant(mlp, {"layers/1": jnp.zeros(3)}, capture=eqx.nn.Linear)
    out, got = call(S(zero, capture=eqx.nn.Linear), X)
    assert set(got) == {f"layers/{i}" for i in range(3)}
    assert_close(got["layers/1"]["primal"], jnp.zeros(3))
    assert_close(got["layers/2"]["primal"], out)
    assert_close(out, mlp.layers[2](jnp.zeros(3)))


def test_captured_in_both_of_a_plain_function():
    mlp = _mlp()
    fn = plant(lambda net, x: net(x), {"net/layers/1": 2 * X}, capture=True)
    _, got = S(fn, capture=True)(mlp, X)
    assert set(got) == {"net", *(f"net/layers/{i}" for i in range(3))}
    assert_close(got["net/layers/1"]["primal"], 2 * X)


# --- Cotangents and tangents ---


def test_cotangent_is_what_flows_back(call):
    f = jax.grad(lambda x: jnp.sum(sow(jnp.sin(x), "h") ** 2))
    planted = plant(f, {"h": jnp.ones(3)}, mode="cotangent")
    assert_close(call(planted, X), jnp.cos(X))
    clip = plant(f, {"h": lambda g: jnp.clip(g, -0.1, 0.1)}, mode="cotangent")
    expected = jnp.cos(X) * jnp.clip(2 * jnp.sin(X), -0.1, 0.1)
    assert_close(call(clip, X), expected)


def test_gradient_reversal_of_a_layer(call):
    mlp = _mlp()
    loss = lambda net, x: jnp.sum(net(x) ** 2)
    f = eqx.filter_grad(loss)
    reverse = plant(
        f, {"net/layers/1": jnp.negative}, mode="cotangent", capture=eqx.nn.Linear
    )
    expected = f(mlp, X)
    sign = lambda m: (m.layers[0], m.layers[1])
    expected = eqx.tree_at(
        sign, expected, replace_fn=lambda l: jtu.tree_map(jnp.negative, l)
    )
    assert_close(call(reverse, mlp, X), expected)


def test_cotangents_in_a_scan(call):
    def loss(x):
        body = lambda c, y: (sow(jnp.sin(c) * y, "c"), None)
        return jnp.sum(lax.scan(body, x, XS)[0] ** 2)

    f = jax.grad(loss)
    _, got = S(f)(X)
    assert_close(call(plant(f, got, mode="cotangent"), X), f(X))
    zero = plant(f, {"c": jnp.zeros((4, 3))}, mode="cotangent")
    assert_close(call(zero, X), jnp.zeros(3))
    only = got["c"]["cotangent"].at[1:].set(0)
    assert_close(call(plant(f, {"c": only}, mode="cotangent"), X), f(X))


@pytest.mark.slow
def test_cotangents_round_trip_in_many_programs():
    for f in (straight, scan, nested_scan, fori, checkpointed_scan, vmapped, cond):
        g = jax.grad(f)
        _, got = S(g)(X)
        cts = with_mode(got, "cotangent")
        assert cts
        assert_close(plant(g, cts, mode="cotangent")(X), g(X))


def test_tangent(call):
    f = lambda x: jax.jvp(lambda x: sow(jnp.sin(x), "h") ** 2, (x,), (jnp.ones(3),))
    value, tangent = call(plant(f, {"h": X}, mode="tangent"), X)
    assert_close(value, jnp.sin(X) ** 2)
    assert_close(tangent, 2 * jnp.sin(X) * X)
    double = plant(f, {"h": lambda t: 2 * t}, mode="tangent")
    assert_close(call(double, X)[1], 4 * jnp.sin(X) * jnp.cos(X))
    _, got = S(f)(X)
    assert_close(plant(f, got, mode="tangent")(X), f(X))


def _beside_what_has_no_tangent(x):
    a, b, c, i = sow((jnp.sin(x), np.full(3, 2.0), jnp.cos(X), jnp.arange(3)), "h")
    return a * jnp.asarray(b, jnp.float32) * c + i.astype(jnp.float32)


def _with_tangent(x):
    return jax.jvp(_beside_what_has_no_tangent, (x,), (jnp.ones(3),))


@pytest.mark.parametrize("leaf", [1, 2, 3])
@under("eager", "vmap", argument="lanes")
def test_only_zeros_fit_where_there_is_no_tangent(leaf, lanes, call):
    """A NumPy array, what does not depend on `x`, and integers."""
    fn, x = lanes(_with_tangent), XS if lanes is jax.vmap else X
    _, got = S(fn)(x)
    tangent = got["h"]["tangent"]
    double = (2 * tangent[0], *tangent[1:])
    by_hand = lanes(lambda x: 4 * jnp.cos(x) * jnp.cos(X))(x)
    out = call(plant(fn, {"h": double}, mode="tangent"), x)
    assert_close(out, (fn(x)[0], by_hand))
    ones = np.ones(np.shape(tangent[leaf]), np.float32)
    wrong = (*double[:leaf], ones, *double[leaf + 1 :])
    same = lambda t: (2 * t[0], jnp.zeros_like(t[1]), *t[2:])
    assert_close(call(plant(fn, {"h": same}, mode="tangent"), x), out)

    def other(t):
        return (2 * t[0], *t[1:leaf], np.ones(3, np.float32), *t[leaf + 1 :])

    for value in (wrong, other):
        with pytest.raises(SowError, match="'h'.* without a tangent .*only zeros fit"):
            plant(fn, {"h": value}, mode="tangent")(x)


def test_only_zeros_fit_where_the_value_is_traced():
    def planted(value):
        return plant(_with_tangent, {"h": value}, mode="tangent")(X)

    def by_function(x):
        fn = lambda t: (t[0], jnp.cos(x), *t[2:])
        return plant(_with_tangent, {"h": fn}, mode="tangent")(x)

    _, got = S(_with_tangent)(X)
    tangent = got["h"]["tangent"]
    arrays = jax.tree.map(jnp.asarray, tangent[:3])
    assert_close(
        eqx.filter_jit(planted)((*arrays, tangent[3])),
        _with_tangent(X),
    )
    with pytest.raises(Exception, match="only zeros fit"):
        jax.block_until_ready(eqx.filter_jit(planted)((*[X] * 3, tangent[3])))
    with pytest.raises(Exception, match="only zeros fit"):
        jax.block_until_ready(eqx.filter_jit(by_function)(X))


def test_only_zeros_fit_where_there_is_no_cotangent():
    fn = jax.grad(lambda x: jnp.sum(sow((jnp.sin(x), jnp.arange(3)), "h")[0]))
    _, got = S(fn)(X)
    assert_close(plant(fn, got, mode="cotangent")(X), fn(X))
    ones = (jnp.ones(3), jnp.ones(3))
    with pytest.raises(SowError, match="without a cotangent"):
        plant(fn, {"h": ones}, mode="cotangent")(X)


def test_a_mode_that_is_not_there():
    with pytest.raises(UnknownSowError, match="cotangent"):
        plant(straight, {"h": X}, mode="cotangent")(X)


# --- Derivatives ---


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "f", [straight, cond, jitted, checkpointed, vmapped, mapped_loop, filtered]
)
def test_gradient_for_a_planted_value_is_the_cotangent_there(f, call):
    _, got = S(jax.grad(f))(X)
    values, cts = _primal(got), with_mode(got, "cotangent")
    for name in set(values) & set(cts):
        grad = jax.grad(lambda v: plant(f, {name: v})(X))
        assert_close(call(grad, values[name]), cts[name])


@pytest.mark.parametrize(
    "f",
    [
        straight,
        scan,
        reversed_scan,
        nested_scan,
        fori,
        constant_in_loop,
        cond,
        cond_in_scan,
        checkpointed_scan,
        vmapped,
        vmapped_scan,
        scan_of_vmap,
        vmapped_cond,
    ],
)
def test_gradient_for_planted_values_is_the_cotangent_in_the_planted_program(f, call):
    """A value planted in a later iteration cuts what an earlier one has to say."""
    values = _primal(S(f)(X)[1])
    grads, got = call(S(jax.grad(lambda v: plant(f, v)(X))), values)
    assert_close(with_mode(got, "cotangent"), grads)
    nudged = lambda e: plant(f, jtu.tree_map(jnp.add, values, e))(X)
    assert_close(jax.grad(nudged)(jtu.tree_map(jnp.zeros_like, values)), grads)


def test_gradient_for_the_last_iteration_is_the_cotangent_there():
    _, got = S(jax.grad(reversed_scan))(X)
    grads = jax.grad(lambda v: plant(reversed_scan, {"c": v})(X))(got["c"]["primal"])
    # A reversed scan ends with index 0; all others are cut off.
    assert_close(grads[0], got["c"]["cotangent"][0])
    assert_close(grads[1:], jnp.zeros((3, 3)))


def test_grad_through_a_planted_function_for_the_arguments(call):
    f = lambda x: jnp.sum(sow(jnp.sin(x), "h") * x)
    planted = plant(f, {"h": lambda h: h**2})
    expected = jax.grad(lambda x: jnp.sum(jnp.sin(x) ** 2 * x))
    assert_close(call(eqx.filter_grad(planted), X), expected(X))
    constant = plant(f, {"h": 2 * X})
    assert_close(call(eqx.filter_grad(constant), X), 2 * X)


def test_vmap_over_planted_values(call):
    f = lambda x: jnp.sum(sow(jnp.sin(x), "h") * x)
    run = jax.vmap(lambda v: plant(f, {"h": v})(X))
    assert_close(call(run, XS), XS @ X)


def test_new_values_under_jit_do_not_retrace():
    traces = []

    def f(x):
        traces.append(None)
        return scan(x)

    run = jax.jit(lambda values, x: plant(f, values)(x))
    _, got = S(scan)(X)
    values = _primal(got)
    for i in range(4):
        run(jtu.tree_map(lambda v: v + i, values), X)
    assert len(traces) == 1


# --- Chains ---


def test_a_value_planted_early_reaches_later_sites(call):
    def f(x):
        a = sow(x * 2, "a")
        b = sow(a + 1, "b")
        return sow(b**2, "c")

    _, got = call(S(plant(f, {"a": X})), X)
    assert_close(_primal(got), {"a": X, "b": X + 1, "c": (X + 1) ** 2})


def test_plants_of_plants(call):
    def f(x):
        a = sow(x * 2, "a")
        return sow(a + 1, "b") * a

    both = plant(plant(f, {"a": X}), {"b": lambda b: b * 10})
    assert_close(call(both, X), 10 * (X + 1) * X)
    other = plant(plant(f, {"b": lambda b: b * 10}), {"a": X})
    assert_close(call(other, X), 10 * (X + 1) * X)


def test_the_outer_plant_sees_what_the_inner_planted():
    f = lambda x: sow(x * 2, "a")
    assert_close(plant(plant(f, {"a": X}), {"a": lambda a: a + 1})(X), X + 1)
    assert_close(plant(plant(f, {"a": lambda a: a + 1}), {"a": 5 * X})(X), 5 * X)


@program
def test_what_was_planted_is_captured(f, call):
    _, got = S(f)(X)
    inexact = lambda v: eqx.is_inexact_array(v)
    values = jtu.tree_map(lambda v: v + 1 if inexact(v) else v, _primal(got))
    _, again = call(S(plant(f, values)), X)
    again = _primal(again)
    for name, entry in got.items():
        ran = entry.get("count", 1)
        for a, b in zip(
            jtu.tree_leaves(eqx.filter(again[name], inexact)),
            jtu.tree_leaves(eqx.filter(values[name], inexact)),
        ):
            ran_here = jnp.reshape(
                ran, jnp.shape(ran) + (1,) * (a.ndim - jnp.ndim(ran))
            )
            assert_close(a, jnp.where(ran_here > 0, b, 0))


def test_captured_within_a_cotangent_plant():
    f = jax.grad(lambda x: jnp.sum(sow(jnp.sin(x), "h") ** 2))
    _, got = S(plant(f, {"h": jnp.ones(3)}, mode="cotangent"))(X)
    assert modes_of(got) == {"h": {"primal", "cotangent"}}
    assert_close(got["h"], {"primal": jnp.sin(X), "cotangent": jnp.ones(3)})


def test_off_is_free():
    sown = jax.make_jaxpr(plant(lambda x: sow(jnp.sin(x), "h") * 2, {"h": lambda h: h}))
    plain = jax.make_jaxpr(lambda x: jnp.sin(x) * 2)
    assert str(sown(X)) == str(plain(X))


# --- Signature and output ---


def test_arguments_and_output_of_any_kind():
    def f(x, how, *, g, extra=None):
        assert how == "up" and extra is None
        return {"y": g(sow(x, "h")), "how": how, "g": g}

    out = plant(f, {"h": 2 * X})(X, "up", g=jnp.sin)
    assert out["how"] == "up" and out["g"] is jnp.sin
    assert_close(out["y"], jnp.sin(2 * X))


def test_of_a_method_and_of_a_model():
    class Model(eqx.Module):
        w: Array

        def __call__(self, x):
            return sow(self.w * x, "h") + 1

    model = Model(X)
    assert_close(plant(model, {"h": X})(X), X + 1)
    assert_close(plant(model.__call__, {"h": X})(X), X + 1)
    assert_close(plant(Model.__call__, {"h": X})(model, X), X + 1)


def test_name_and_documentation():
    planted = plant(straight, {"h": X})
    assert planted.__name__ == "straight"


# --- Errors ---


def _pair(x):
    return sow({"a": x, "b": (x[:2], "text")}, "pair")["a"]


@pytest.mark.parametrize(
    "value, match",
    [
        ({"a": X}, "structure"),
        (X, "structure"),
        ({"a": X[:2], "b": (X[:2], "text")}, r"float32\[2\]"),
        ({"a": X.astype(jnp.int32), "b": (X[:2], "text")}, "int32"),
        ({"a": X, "b": (X[:2], "other")}, "other"),
        ({"a": "no array", "b": (X[:2], "text")}, "no array"),
    ],
)
def test_a_value_that_does_not_fit(value, match):
    with pytest.raises(SowError, match=match) as e:
        plant(_pair, {"pair": value})(X)
    assert "pair" in str(e.value)


@pytest.mark.parametrize(
    "fn, match",
    [
        (lambda t: t["a"], "structure"),
        (lambda t: {**t, "a": t["a"][:1]}, r"float32\[1\]"),
        (lambda t: {**t, "b": (t["b"][0], "other")}, "other"),
    ],
)
def test_a_function_whose_result_does_not_fit(fn, match):
    with pytest.raises(SowError, match=match) as e:
        plant(_pair, {"pair": fn})(X)
    assert "pair" in str(e.value)


def test_shape_without_the_axis_of_the_loop():
    _, got = S(scan)(X)
    with pytest.raises(SowError, match=r"float32\[3\].*"):
        plant(scan, {"c": got["c"]["primal"][0]})(X)


def test_unknown_names():
    with pytest.raises(UnknownSowError, match="(?s)h.*k|k.*h"):
        plant(straight, {"nothing": X})(X)
    with pytest.raises(UnknownSowError, match="blocks"):
        plant(straight, {"h": X, "blocks/*": X})(X)
    with pytest.raises(UnknownSowError, match="layers/0"):
        plant(_mlp(), {"layer/0": X}, capture=True)(X)
    with pytest.raises(UnknownSowError):
        plant(lambda x: x, {"h": X})(X)


def test_no_module_selected():
    with pytest.raises(UnknownSowError, match="selects nothing.*layers/0"):
        plant(_mlp(), {"layers/0": X}, capture=eqx.nn.Conv2d)(X)


def test_arguments_that_are_wrong():
    with pytest.raises(TypeError, match="dict"):
        plant(straight, [("h", X)])
    with pytest.raises((TypeError, ValueError), match="plant"):
        plant("not a function", {})
    with pytest.raises((TypeError, ValueError)):
        plant(straight, {"h": X}, mode="nonsense")(X)


def test_partial_as_function():
    assert_close(plant(ft.partial(straight), {"h": X})(X), jnp.sum((X * X) ** 2))


# --- Second order ---


@pytest.mark.parametrize(
    "mode", ["cotangent", "primal.cotangent", "cotangent.cotangent"]
)
def test_second_order(mode, call):
    f = lambda x: jnp.sum(sow(jnp.sin(x), "h") ** 3)
    second = jax.grad(lambda x: jax.grad(f)(x).sum())
    expected = second(X)
    _, got = S(second)(X)
    planted = plant(second, {"h": got["h"][mode]}, mode=mode)
    np.testing.assert_allclose(call(planted, X), expected, rtol=1e-5)
    # The gradient is `cos * (3 sin^2)`; the parts of its derivative that go through
    # the cosine and through the square.
    cosine, square = -3 * jnp.sin(X) ** 3, 6 * jnp.sin(X) * jnp.cos(X) ** 2
    factors = {"cotangent": (7, 1)}.get(mode, (1, 7))
    planted = plant(second, {"h": lambda x: 7 * x}, mode=mode)
    want = factors[0] * cosine + factors[1] * square
    np.testing.assert_allclose(call(planted, X), want, rtol=1e-5)


@pytest.mark.parametrize(
    "value, sown",
    [(2.5, jnp.array(3)), (2**40, jnp.array(3)), (2.5j, X[0]), (1, jnp.array(True))],
)
def test_python_numbers_that_do_not_fit(value, sown):
    with pytest.raises(SowError, match="has a leaf"):
        plant(lambda x: sow(x, "h"), {"h": value})(sown)


@under("eager", "jit")
def test_one_value_for_all_lanes_cannot_be_planted_for_each(wrap):
    def f(w, xs):
        def lane(x):
            v, x = sow((w, x), "v")
            return (v * x).sum()

        return jax.vmap(lane)(xs)

    w, xs = jnp.array([2.0, 3.0]), jnp.arange(6.0).reshape(3, 2)
    f = wrap(f)
    planted = (jnp.tile(5 * w, (3, 1)), 2 * xs)
    want = (10 * xs * w[None]).sum(1)
    np.testing.assert_allclose(plant(f, {"v": planted})(w, xs), want)
    for lane in range(3):
        wrong = planted[0].at[lane, 1].add(1.0), planted[1]
        with pytest.raises(Exception, match="must not vary along it"):
            jax.block_until_ready(plant(f, {"v": wrong})(w, xs))


@under("eager", "jit")
def test_a_nan_for_all_lanes_is_one_value(wrap):
    def f(w, xs):
        return jax.vmap(lambda x: (sow((w, x), "v")[0] * x).sum())(xs)

    w, xs, f = jnp.array([2.0, 3.0]), jnp.ones((3, 2)), wrap(f)
    nan = np.array([np.nan, 3.0], np.float32)
    out = plant(f, {"v": (np.tile(nan, (3, 1)), xs)})(w, xs)
    np.testing.assert_array_equal(out, np.full(3, np.nan))
    for lanes in ([nan, w, w], [w, nan, w], [nan, nan, w]):
        with pytest.raises(Exception, match="must not vary along it"):
            jax.block_until_ready(plant(f, {"v": (np.stack(lanes), xs)})(w, xs))


@under("eager", "vmap", argument="lanes")
def test_tangent_beside_one_that_is_zero(call, lanes):
    """The zero comes first: it is captured, but the program has no such operand."""

    def f(x):
        _, h = sow((np.ones(3, np.float32), jnp.sin(x)), "h")
        return jnp.sum(h**2)

    g = lanes(lambda x: jax.jvp(f, (x,), (jnp.ones(3),)))
    x = XS if lanes is jax.vmap else X
    _, got = S(g)(x)
    assert_close(call(plant(g, got, mode="tangent"), x), g(x))
    zero, tangent = got["h"]["tangent"]
    planted = {"h": (zero, 2 * tangent)}
    out, changed = call(plant(g, planted, mode="tangent"), x)
    assert_close(out, g(x)[0])
    by_hand = lanes(lambda x: 4 * jnp.sum(jnp.sin(x) * jnp.cos(x)))
    assert_close(changed, by_hand(x))
    _, again = S(plant(g, planted, mode="tangent"))(x)
    assert_close(again["h"]["tangent"], planted["h"])


def _model(i):
    return eqx.nn.MLP(2, 2, 4, 1, key=jr.key(i))


@pytest.mark.slow
def test_what_a_model_captured_in_a_function_of_it(call):
    model, x, y = _model(0), jnp.ones(2), jnp.array([1.0, -1.0])
    _, got = S(model, capture=True)(x)
    assert list(got) == ["layers/0", "layers/1", "."]
    loss = lambda net, x: jnp.sum(net(x) ** 2)
    for fn, args in (
        (loss, (model, y)),
        (lambda y: loss(model, y), (y,)),
        (eqx.Partial(loss, model), (y,)),
    ):
        assert_close(call(plant(fn, got, capture=True), *args), loss(model, x))
        only = {"layers/0": got["layers/0"]}
        assert_close(call(plant(fn, only, capture=True), *args), loss(model, x))
    planted = plant(eqx.filter_grad(loss), got, capture=True)
    hand = plant(
        eqx.filter_grad(loss),
        {
            "net/layers/0": got["layers/0"],
            "net/layers/1": got["layers/1"],
            "net": got["."],
        },
        capture=True,
    )
    assert_close(call(planted, model, y), hand(model, y))


def test_one_of_two_models_cannot_be_told():
    _, got = S(_model(0), capture=True)(jnp.ones(2))
    fn = lambda a, b, x: b(a(x))
    match = "'layers/0' may be 'a/layers/0' or 'b/layers/0'. Write which one"
    with pytest.raises(UnknownSowError, match=match):
        only = {"layers/0": got["layers/0"]}
        plant(fn, only, capture=True)(_model(0), _model(1), jnp.ones(2))
    with pytest.raises(UnknownSowError):
        plant(fn, got, capture=True)(_model(0), _model(1), jnp.ones(2))
    # Not a part of a model, nor another model.
    one = lambda a, x: a(x)
    for name in ("0", "layers/2", "b/layers/0"):
        with pytest.raises(UnknownSowError):
            plant(one, {name: jnp.sin}, capture=True)(_model(0), jnp.ones(2))
    # A name that is there is that one.
    marked = lambda a, x: sow(a(x), "layers/0")
    out = plant(marked, {"layers/0": jnp.zeros_like}, capture=True)
    assert_close(out(_model(0), jnp.ones(2)), jnp.zeros(2))


TABLE = np.array([0.1, 0.2])


def _with_numpy(x):
    value = sow({"x": 2 * x, "table": TABLE}, "v")
    return value["x"] * np.sum(value["table"], dtype=np.float32)


def _with_numpy_in_a_loop(x):
    return lax.scan(lambda c, _: (_with_numpy(c), None), x, length=3)[0]


@pytest.mark.sample(6)
@pytest.mark.parametrize("f", [_with_numpy, _with_numpy_in_a_loop])
@under("eager", "jit", "checkpoint", "vmap")
def test_what_was_captured_beside_a_numpy_array_can_be_planted(call, f, wrap):
    """Law 6."""
    times = 2 if f is _with_numpy else 8
    f = wrap(f)
    out, got = S(f)(jnp.ones(2))
    assert_close(call(plant(f, got), jnp.ones(2)), out)
    doubled = plant(f, {"v": lambda v: {**v, "x": 2 * v["x"]}})
    assert_close(call(doubled, jnp.ones(2)), times * out)
    spelled_out = plant(f, {"v": lambda v: {"x": v["x"], "table": TABLE.copy()}})
    assert_close(call(spelled_out, jnp.ones(2)), out)
    both = plant(f, {"v": lambda v: jax.tree.map(lambda x: 2 * x, v)})
    assert_close(call(both, jnp.ones(2)), times**2 * out)


def test_another_array_in_the_place_of_a_numpy_array():
    other = {"x": jnp.ones(2), "table": 2 * TABLE.astype(np.float32)}
    want = jnp.full(2, np.sum(2 * TABLE, dtype=np.float32))
    assert_close(plant(_with_numpy, {"v": other})(jnp.ones(2)), want)


def _where_it_is_large(f):
    return lambda x: lax.cond(x.sum() > 3, f, lambda x: x, x)


_AROUND = {
    **pick("jit", "filter_jit", "checkpoint", "grad-total", "map", "vmap-map"),
    "cond": _where_it_is_large,
    "vmap of cond": lambda f: jax.vmap(_where_it_is_large(f)),
    "while_loop": lambda f: (
        lambda x: lax.while_loop(lambda x: x.sum() < 99, lambda x: f(x + 1), x)
    ),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", _AROUND)
def test_another_array_in_the_place_of_a_numpy_array_that_is_traced(name):
    """Law 6. Lanes in which it did not run have zeros, and one number is none."""
    around = _AROUND[name]
    table = np.array([1.0, np.nan], np.float32)

    def one(x, table):
        value = sow({"x": x, "table": table}, "v")
        return value["x"] * jnp.broadcast_to(value["table"], x.shape)

    f = around(lambda x: one(x, table))
    xs = jnp.arange(6.0).reshape(3, 2)
    xs = xs[None] if name == "vmap-map" else xs
    out, got = S(f)(xs)
    want = around(lambda x: one(x, 5 * table))(xs)
    five = plant(f, {"v": lambda v: {**v, "table": 5 * v["table"]}})
    assert_close(five(xs), want)
    assert_close(jax.jit(five)(xs), want)
    if name == "while_loop":
        return
    planted = plant(f, got)
    assert_close(planted(xs), out)
    assert_close(jax.jit(planted)(xs), out)
    value = got["v"]["primal"]
    other = lambda t: plant(f, {"v": {**value, "table": t}})(xs)
    assert_close(other(5 * value["table"]), want)
    assert_close(jax.jit(other)(5 * value["table"]), want)
    assert_close(S(lambda: other(5 * value["table"]))()[0], want)


@pytest.mark.slow
def test_a_planted_numpy_array_has_derivatives(call):
    """What is planted there is an input of the program like any other."""
    table = np.array([1.0, 2.0], np.float32)
    g = lambda x: x * sow(table, "t")
    x = jnp.array([3.0, 4.0])
    for fn in (g, jax.jit(g), lambda x: lax.map(g, x[None])[0], jax.checkpoint(g)):
        into = lambda t, fn=fn: plant(fn, {"t": t})(x).sum()
        at = S(fn)(x)[1]["t"]["primal"]
        assert_close(call(jax.grad(into), at), jnp.reshape(x, at.shape))
        both = lambda t, x, fn=fn: plant(fn, {"t": lambda v: t * v})(x).sum()
        assert_close(call(jax.grad(both), x, x), x * table)
        assert_close(call(jax.jvp, both, (x, x), (x, x))[1], (2 * x * x * table).sum())


ORDER = np.array([2, 0, 1])


def _indexing(x, order=ORDER):
    value = sow({"x": jnp.sin(x), "at": order}, "v")
    return value["x"][np.nan_to_num(np.asarray(value["at"])).astype(int)]


_MIXED = jnp.array([[1.0, 2.0, 3.0], [0.0, -1.0, 1.0]])


@pytest.mark.parametrize(
    "around, x",
    [
        (jax.jit, X),
        (_AROUND["grad-total"], X),
        (_AROUND["vmap-map"], X[None, None]),
        (_AROUND["cond"], X),  # where it does not run
        (_AROUND["vmap of cond"], _MIXED),
        (lambda f: _AROUND["map"](jax.jit(_where_it_is_large(f))), _MIXED),
        (lambda f: jax.vmap(_AROUND["grad-total"](_where_it_is_large(f))), _MIXED),
    ],
)
def test_what_was_captured_in_a_program_that_indexes_with_it(around, x):
    f = around(_indexing)
    out, got = S(f)(x)
    assert_close(plant(f, got)(x), out)
    assert_close(jax.jit(plant(f, got))(x), out)
    assert_close(S(plant(f, got))(x), (out, got))


def test_nan_in_what_a_program_indexes_with():
    """It is equal to itself."""
    order = np.array([2, np.nan, 1], np.float32)
    f = _AROUND["vmap of cond"](lambda x: _indexing(x, order))
    out, got = S(f)(_MIXED)
    assert_close(plant(f, got)(_MIXED), out)


def test_an_index_where_it_did_not_run():
    """The zeros there are not planted in silence where it runs."""
    f = _where_it_is_large(_indexing)
    _, got = S(f)(X)
    with pytest.raises(RuntimeError, match="zeros are planted"):
        plant(f, got)(X + 3)
    mapped = jax.vmap(f)
    _, got = S(mapped)(_MIXED)
    with pytest.raises(RuntimeError, match="zeros are planted|must not vary"):
        plant(mapped, got)(_MIXED + 9)


@pytest.mark.parametrize("nested", [False, True])
def test_another_index(nested):
    """Where the program needs the numbers, JAX raises, with a note."""
    inner = S(lambda x: _indexing(sow(x, "x")), names="x")
    f = (lambda x: inner(x)[0]) if nested else _indexing
    jax_error = jax.errors.TracerArrayConversionError
    for planted in (ORDER[::-1], lambda v: {**v, "at": v["at"][::-1]}):
        if not callable(planted):
            planted = {"x": X, "at": planted}
        with pytest.raises(jax_error) as caught:
            plant(f, {"v": planted})(X)
        (note,) = [n for n in caught.value.__notes__ if "NumPy" in n]
        assert "`sow(..., 'v')`" in note and "plant the NumPy array" in note
    planted = {"x": 2 * X, "at": ORDER}
    assert_close(plant(f, {"v": planted})(X), 2 * X[ORDER])


def test_only_the_numpy_array_that_is_planted():
    """Others, of the same sow or of another one, stay what they are."""

    def f(x):
        size = sow((np.int32(2), np.int32(3)), "sizes")[0]
        other = sow((np.int32(4), x), "other")[0]
        return jnp.ones(int(size)) * sow(np.float32(5), "scale"), jnp.ones(int(other))

    planted = plant(f, {"scale": 6.0, "sizes": (np.int32(2), jnp.int32(7))})
    assert_close(planted(X), (jnp.full(2, 6.0), jnp.ones(4)))
    planted = plant(plant(f, {"scale": 6.0}), {"scale": lambda s: s + 1})
    assert_close(planted(X), (jnp.full(2, 7.0), jnp.ones(4)))
    assert_close(f(X), (jnp.full(2, 5.0), jnp.ones(4)))


def test_no_name_has_a_cotangent():
    f = lambda x: sow(sow(2 * x, "h"), "g").sum()
    said = "'h' is marked, but has no cotangent .* with a cotangent .* none at all"
    with pytest.raises(UnknownSowError, match=said):
        plant(f, {"h": jnp.sin}, mode="cotangent")(X)


def test_a_name_in_branches_with_other_loops(call):
    one = lambda x: sow(x + 1, "h")
    loop = lambda x: lax.scan(lambda c, _: (one(c), None), x, length=3)[0]
    f = lambda x: lax.cond(x.sum() > 2, one, loop, x)
    _, got = call(S(f), X)
    for values in (got, {"h/1": jnp.zeros_like}):
        with pytest.raises(SowError, match=r"\[\] and \[3\] iterations"):
            call(plant(f, values), X)
    for x in (X, X + 3):
        assert_close(call(plant(f, {"h": jnp.zeros_like}), x), 0 * x)


def test_no_lanes():
    """Of a value that is the same in all lanes, there is none to plant."""
    fn = lambda x, w: (sow((jnp.sin(x), jnp.cos(w)), "h"), jnp.sum(x))
    mapped = jax.vmap(fn, in_axes=(0, None), out_axes=((0, None), 0))
    x, w = jnp.zeros((0, 3)), jnp.ones(3)
    out, saved = S(mapped)(x, w)
    assert_close(plant(mapped, saved)(x, w), out)


def test_a_glob_plants_what_has_a_cotangent():
    fn = lambda w, x: sow(w, "w") @ sow(x, "input")
    double = {"*": lambda v: 2 * v}
    assert_close(plant(jax.grad(fn), double, mode="cotangent")(X, X + 1), 2 * (X + 1))
    with pytest.raises(UnknownSowError, match="'input' is marked, but has no"):
        plant(jax.grad(fn), {"in*": jnp.sin, **double}, mode="cotangent")(X, X)


def test_a_value_for_those_layers_that_have_a_cotangent():
    def fn(w, x):
        each = sow(w, "h/0"), sow(2 * w, "h/1"), sow(x, "h/2")
        return sum(jnp.sum(jnp.sin(y)) for y in each)

    cts = jnp.stack([X, X + 1])
    got = plant(jax.grad(fn), {"h/*": cts}, mode="cotangent")(X, X)
    assert_close(got, cts[0] + 2 * cts[1])


def test_one_that_is_compiled_inside_another_program():
    # A cache of JAX compares the function with itself there.
    planted = jax.jit(plant(lambda x: sow(2 * x, "h") + x, {"h": 3 * X}))
    saved = jax.jit(S(eqx.Partial(lambda w, x: sow(w * x, "h"), X)))
    for _ in range(2):
        assert_close(jax.jit(planted)(X), 4 * X)
        out, found = S(planted)(X)
        assert_close((out, found["h"]["primal"]), (4 * X, 3 * X))
        out, found = jax.jit(saved)(X)
        assert_close((out, found["h"]["primal"]), (X**2, X**2))


@pytest.mark.slow
@under("eager", "filter_jit")
def test_a_function_that_replaces_a_numpy_array_evaluates_nothing_twice(wrap, capfd):
    """It is found out before the program around has any mark or print of this one."""

    def f(x):
        x = sow(x + 1, "a")
        jax.debug.print("once")
        return x * sow(np.array([1.0, 2.0, 3.0], np.float32), "c")

    out, got = wrap(S(plant(f, {"c": lambda c: c - 1})))(X)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("once") == 1
    assert_close(out, (X + 1) * jnp.arange(3.0))
    assert list(got) == ["a", "c"]
    assert_close(got["c"]["primal"], jnp.arange(3.0))
