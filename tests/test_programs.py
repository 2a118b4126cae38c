"""Straight-line programs: what each transform and custom rule makes of a sow."""

import functools as ft

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import pytest
from eqx_sow import save_intermediates as S, sow
from jax.sharding import NamedSharding, PartitionSpec as P

from tests.helpers import assert_close, modes_of, primitives, with_mode
from tests.tables import SAVES, under


X = jnp.array([0.3, -1.2, 0.7])
XS = jnp.stack([X, 2 * X])


def _square(x):
    h = sow(jnp.sin(x), "h")
    return jnp.sum(h**2)


# --- jit ---


def test_jitted_and_called_before(call):
    f = jax.jit(_square)
    before = f(X)
    out, got = call(S(f), X)
    assert_close(out, before)
    assert_close(got, {"h": {"primal": jnp.sin(X)}})
    assert_close(f(X), before)


def test_pytree_in_a_function_that_was_traced_before():
    f = jax.jit(lambda x: sow({"a": x, "b": (x * 2,)}, "t")["a"])
    f(X)
    for _ in range(2):
        _, got = S(f)(X)
        assert_close(got["t"]["primal"], {"a": X, "b": (2 * X,)})


def test_same_jitted_function_twice_under_two_names(call):
    inner = jax.jit(lambda x: x * 2)
    _, got = call(S(lambda x: sow(inner(sow(inner(x), "a")), "b")), X)
    assert_close(with_mode(got, "primal"), {"a": 2 * X, "b": 4 * X})


def test_static_arguments(call):
    @ft.partial(jax.jit, static_argnums=1, static_argnames="flip")
    def f(x, n, flip=False):
        return sow(-x if flip else x, f"pow{n}") ** n

    assert_close(S(f)(X, 3), (X**3, {"pow3": {"primal": X}}))
    assert_close(S(f)(X, 2, flip=True), (X**2, {"pow2": {"primal": -X}}))
    _, got = call(lambda x: S(f)(x, 2, flip=True), X)
    assert_close(got, {"pow2": {"primal": -X}})


@pytest.mark.parametrize("way", ["plain", "jit"])
@pytest.mark.parametrize("donate", ["jax", "equinox"])
def test_donated(way, donate):
    def f(x):
        h = sow(x * 2, "h")
        return sow(h + 1, "out")

    jitted = (
        jax.jit(f, donate_argnums=0)
        if donate == "jax"
        else eqx.filter_jit(f, donate="all")
    )
    saved = S(jitted) if way == "plain" else jax.jit(S(jitted))
    for _ in range(2):
        out, got = saved(X + 0)
        assert_close(out, X * 2 + 1)
        assert_close(with_mode(got, "primal"), {"h": X * 2, "out": X * 2 + 1})


def test_out_shardings(call, mesh):
    over = NamedSharding(mesh, P("d"))
    xs = jnp.arange(8.0)
    f = jax.jit(lambda x: sow(x * 2, "a") + 1, out_shardings=over)
    out, got = call(S(f), xs)
    assert_close(out, xs * 2 + 1)
    assert_close(got["a"]["primal"], xs * 2)
    assert out.sharding.is_equivalent_to(over, 1)


def test_sharding_of_captured_values(call, mesh):
    over = NamedSharding(mesh, P("d"))
    xs = jax.device_put(jnp.arange(8.0), over)
    out, got = call(S(jax.jit(lambda x: sow(x * 2, "a") + 1)), xs)
    assert out.sharding.is_equivalent_to(over, 1)
    assert got["a"]["primal"].sharding.is_equivalent_to(over, 1)


def test_sharding_constraint_inside(call, mesh):
    over = NamedSharding(mesh, P("d"))

    def f(x):
        return eqx.filter_shard(sow(eqx.filter_shard(x, over) * 2, "a"), over)

    out, got = call(S(eqx.filter_jit(f)), jnp.arange(8.0))
    assert out.sharding.is_equivalent_to(over, 1)
    assert_close(got["a"]["primal"], 2 * jnp.arange(8.0))


@under("jit inside", "jit outside", of=SAVES)
def test_traced_once(wrap):
    traces = []

    def f(x):
        traces.append(None)
        return _square(x)

    saved = wrap(f)
    for i in range(5):
        saved(X + i)
    assert len(traces) == 1


def test_traced_once_in_a_fresh_save_intermediates_too():
    traces = []

    @eqx.filter_jit
    def f(x):
        traces.append(None)
        return _square(x)

    for i in range(5):
        S(f)(X + i)
    assert len(traces) == 1


def test_an_inner_jit_stays_one():
    jaxpr = jax.make_jaxpr(S(jax.jit(_square)))(X)
    assert "jit" in primitives(jaxpr)


# --- checkpoint ---


@pytest.mark.parametrize(
    "policy",
    [
        None,
        jax.checkpoint_policies.everything_saveable,
        jax.checkpoint_policies.nothing_saveable,
        jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names("kept"),
        jax.checkpoint_policies.save_anything_except_these_names("kept"),
    ],
    ids=["none", "everything", "nothing", "dots", "no_batch", "only", "except"],
)
@under("eager", "jit", argument="jit")
def test_checkpoint_policies(call, policy, jit):
    from jax.ad_checkpoint import checkpoint_name

    def f(x):
        h = checkpoint_name(sow(jnp.sin(x), "h"), "kept")
        sow(h * 2, "unused")
        return jnp.sum(sow(jnp.cos(h), "out"))

    out, got = call(S(jax.grad(jit(jax.checkpoint(f, policy=policy)))), X)
    assert_close(out, -jnp.sin(jnp.sin(X)) * jnp.cos(X))
    h = jnp.sin(X)
    primal = {"h": h, "unused": h * 2, "out": jnp.cos(h)}
    assert_close(with_mode(got, "primal"), primal)
    cotangent = {"h": -jnp.sin(h), "unused": jnp.zeros(3), "out": jnp.ones(3)}
    assert_close(with_mode(got, "cotangent"), cotangent)


def test_checkpoint_is_kept():
    saved = S(jax.checkpoint(_square))
    assert any(
        "remat" in p or "checkpoint" in p for p in primitives(jax.make_jaxpr(saved)(X))
    )


@pytest.mark.parametrize("second", ["forward-reverse", "vmap-grad", "nested"])
def test_checkpoint_composed(call, second):
    f = jax.checkpoint(_square)
    if second == "nested":
        f = jax.checkpoint(lambda x: jax.checkpoint(_square)(x) * 2)
        _, got = call(S(jax.grad(f)), X)
        assert_close(got["h"], {"primal": jnp.sin(X), "cotangent": 4 * jnp.sin(X)})
    elif second == "vmap-grad":
        _, got = call(S(jax.vmap(jax.grad(f))), XS)
        assert_close(got["h"], {"primal": jnp.sin(XS), "cotangent": 2 * jnp.sin(XS)})
    else:
        v = jnp.ones(3)
        _, got = call(S(lambda x: jax.jvp(jax.grad(f), (x,), (v,))[1]), X)
        assert_close(
            got["h"],
            {
                "primal": jnp.sin(X),
                "tangent": jnp.cos(X),
                "cotangent": 2 * jnp.sin(X),
                "cotangent.tangent": 2 * jnp.cos(X),
            },
        )


# --- custom rules. All of them lie about the derivative, so that it shows. ---


@jax.custom_jvp
def _jvp_fn(x):
    return sow(jnp.sin(x), "primal")


@_jvp_fn.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return sow(jnp.sin(x), "rule"), sow(7 * t, "slope")


@jax.custom_vjp
def _vjp_fn(x):
    return sow(jnp.sin(x), "primal")


_vjp_fn.defvjp(
    lambda x: (sow(jnp.sin(x), "fwd"), x),
    lambda x, g: (sow(7 * g, "bwd"),),
)


@eqx.filter_custom_jvp
def _filter_jvp_fn(x, *, flag):
    assert flag == "flag"
    return sow(jnp.sin(x), "primal")


@_filter_jvp_fn.def_jvp
def _(primals, tangents, *, flag):
    (x,), (t,) = primals, tangents
    return sow(jnp.sin(x), "rule"), sow(7 * t, "slope")


@eqx.filter_custom_vjp
def _filter_vjp_fn(x, flag):
    assert flag == "flag"
    return sow(jnp.sin(x), "primal")


@_filter_vjp_fn.def_fwd
def _(perturbed, x, flag):
    return sow(jnp.sin(x), "fwd"), x


@_filter_vjp_fn.def_bwd
def _(residuals, g, perturbed, x, flag):
    return sow(7 * g, "bwd")


_JVPS = {"jax": _jvp_fn, "eqx": lambda x: _filter_jvp_fn(x, flag="flag")}
_VJPS = {"jax": _vjp_fn, "eqx": lambda x: _filter_vjp_fn(x, "flag")}
_jits = pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])


@_jits
@pytest.mark.parametrize("fn", [*_JVPS.values(), *_VJPS.values()])
def test_custom_rule_forward(call, fn, jit):
    out, got = call(S(jit(lambda x: fn(x) * 2)), X)
    assert_close(out, jnp.sin(X) * 2)
    assert_close(got, {"primal": {"primal": jnp.sin(X)}})
    out, got = call(S(jax.vmap(jit(fn))), XS)
    assert_close((out, got), (jnp.sin(XS), {"primal": {"primal": jnp.sin(XS)}}))


@_jits
@pytest.mark.parametrize("fn", _JVPS.values(), ids=_JVPS)
def test_custom_jvp_differentiated(call, fn, jit):
    f = jit(lambda x: jnp.sum(fn(x)))
    out, got = call(S(jax.grad(f)), X)
    assert_close(out, 7 * jnp.ones(3))
    assert_close(with_mode(got, "primal")["rule"], jnp.sin(X))
    assert "primal" not in got
    assert_close(got["slope"]["cotangent"], jnp.ones(3))
    out, got = call(S(lambda x, v: jax.jvp(f, (x,), (v,))[1]), X, X)
    assert_close(out, 7 * jnp.sum(X))
    assert_close(got["rule"]["primal"], jnp.sin(X))
    assert_close(got["slope"]["primal"], 7 * X)


@_jits
@pytest.mark.parametrize("fn", _VJPS.values(), ids=_VJPS)
def test_custom_vjp_differentiated(call, fn, jit):
    f = jit(lambda x: jnp.sum(fn(x)))
    out, got = call(S(jax.grad(f)), X)
    assert_close(out, 7 * jnp.ones(3))
    assert set(got) == {"fwd", "bwd"}
    assert_close(got["fwd"]["primal"], jnp.sin(X))
    assert_close(got["bwd"]["primal"], 7 * jnp.ones(3))
    out, got = call(S(jax.vmap(jax.grad(f))), XS)
    assert_close(out, 7 * jnp.ones((2, 3)))
    assert_close(got["fwd"]["primal"], jnp.sin(XS))


@_jits
@pytest.mark.parametrize("fn", [*_JVPS.values(), *_VJPS.values()])
def test_custom_rule_is_kept_by_save(call, fn, jit):
    """Differentiating what `save_intermediates` returns uses the rule, too."""
    saved = S(jit(lambda x: jnp.sum(fn(x))))
    assert_close(call(jax.grad(lambda x: saved(x)[0]), X), 7 * jnp.ones(3))
    plain = call(jax.grad(lambda x: jnp.sum(saved(x)[1]["primal"]["primal"])), X)
    assert_close(plain, jnp.cos(X))


def test_sow_around_a_custom_rule(call):
    @jax.custom_vjp
    def reverse(x):
        return x

    reverse.defvjp(lambda x: (x, None), lambda _, g: (-g,))

    def f(x):
        return jnp.sum(sow(reverse(sow(x * 2, "before")), "after") ** 2)

    out, got = call(S(jax.grad(f)), X)
    assert_close(out, -8 * X * 2 / 2)
    assert_close(with_mode(got, "cotangent"), {"before": -4 * X, "after": 4 * X})


def test_nondiff_argnums(call):
    @ft.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def f(n, x):
        return sow(x, "primal") ** n

    f.defvjp(
        lambda n, x: (sow(x, "fwd") ** n, x),
        lambda n, x, g: (sow(n * g, "bwd"),),
    )
    _, got = call(S(lambda x: f(3, x)), X)
    assert_close(got, {"primal": {"primal": X}})
    out, got = call(S(jax.grad(lambda x: jnp.sum(f(3, x)))), X)
    assert_close(out, 3 * jnp.ones(3))
    assert_close(got["bwd"]["primal"], 3 * jnp.ones(3))


def test_relu_and_other_custom_rules_of_jax(call):
    def f(x):
        return jnp.sum(sow(jax.nn.relu(sow(jax.nn.silu(x), "a")), "b"))

    out, got = call(S(jax.grad(f)), X)
    assert_close(with_mode(got, "primal")["a"], jax.nn.silu(X))
    assert_close(got["a"]["cotangent"], (jax.nn.silu(X) > 0).astype(jnp.float32))


def test_custom_vmap(call):
    @jax.custom_batching.custom_vmap
    def f(x):
        return sow(jnp.sin(x), "own")

    @f.def_vmap
    def _(axis_size, in_batched, xs):
        del axis_size
        return sow(jnp.sin(xs) * 2, "rule"), in_batched[0]

    assert_close(call(S(f), X), (jnp.sin(X), {"own": {"primal": jnp.sin(X)}}))
    out, got = call(S(jax.vmap(f)), XS)
    assert_close(out, jnp.sin(XS) * 2)
    assert_close(got, {"rule": {"primal": jnp.sin(XS) * 2}})


def test_custom_vmap_in_a_scan(call):
    """The lanes are outside the scan, although the rule maps over them inside."""

    @jax.custom_batching.custom_vmap
    def f(x):
        return sow(jnp.sin(x), "h")

    f.def_vmap(
        lambda n, batched, xs: (jax.vmap(lambda x: sow(jnp.sin(x), "h"))(xs), True)
    )
    scan = lambda x: lax.scan(lambda c, _: (f(c), None), x, length=3)[0]
    xs = XS
    sines = [xs := jnp.sin(xs) for _ in range(3)]
    want = sines[-1], {"h": {"primal": jnp.stack(sines, axis=1)}}
    assert_close(call(S(jax.vmap(scan)), XS), want)
    assert_close(call(jax.vmap(S(scan)), XS), want)


def test_custom_vmap_is_kept_by_save(call):
    @jax.custom_batching.custom_vmap
    def f(x):
        return sow(jnp.sin(x), "own")

    f.def_vmap(lambda n, batched, xs: (jnp.sin(xs) * 2, batched[0]))
    assert_close(call(jax.vmap(lambda x: S(f)(x)[0]), XS), jnp.sin(XS) * 2)


# --- Equinox's transforms ---


class Model(eqx.Module):
    linear: eqx.nn.Linear
    act: object
    n: int

    def __call__(self, x):
        return sow(self.act(sow(self.linear(x), "pre")), "post") * self.n


@pytest.fixture
def model():
    return Model(eqx.nn.Linear(3, 2, key=jr.key(0)), jnp.tanh, 2)


def _pre(model, x):
    return model.linear.weight @ x + model.linear.bias


def test_filter_grad_of_a_model(call, model):
    loss = lambda m, x: jnp.sum(m(x))
    grads, got = call(S(eqx.filter_grad(loss)), model, X)
    expected = eqx.filter_grad(lambda m, x: jnp.sum(jnp.tanh(_pre(m, x)) * 2))
    assert_close(grads, expected(model, X))
    pre = _pre(model, X)
    assert_close(got["pre"]["primal"], pre)
    assert_close(got["pre"]["cotangent"], 2 / jnp.cosh(pre) ** 2)
    assert_close(got["post"]["cotangent"], 2 * jnp.ones(2))


def test_filter_value_and_grad_has_aux(call, model):
    @ft.partial(eqx.filter_value_and_grad, has_aux=True)
    def loss(m, x):
        return jnp.sum(m(x)), ("aux", x, len)

    ((value, aux), grads), got = call(S(loss), model, X)
    assert_close(value, jnp.sum(jnp.tanh(_pre(model, X))) * 2)
    assert aux[0] == "aux" and aux[2] is len
    assert isinstance(grads, Model) and grads.act is None
    assert modes_of(got) == {n: {"primal", "cotangent"} for n in ("pre", "post")}


def test_filter_vmap_of_an_ensemble(call):
    make = lambda key: Model(eqx.nn.Linear(3, 2, key=key), jnp.tanh, 2)
    keys = jr.split(jr.key(0), 4)
    models = eqx.filter_vmap(make)(keys)
    f = eqx.filter_vmap(lambda m, x: m(x), in_axes=(eqx.if_array(0), None))
    out, got = call(S(f), models, X)
    pre = jnp.stack([_pre(make(k), X) for k in keys])
    assert_close(out, jnp.tanh(pre) * 2)
    assert_close(with_mode(got, "primal"), {"pre": pre, "post": jnp.tanh(pre)})


def test_everything_at_once(call, model):
    @eqx.filter_jit
    @ft.partial(eqx.filter_vmap, in_axes=(None, 0))
    @eqx.filter_grad
    @eqx.filter_checkpoint
    def f(m, x):
        return jnp.sum(m(x))

    grads, got = call(S(f), model, XS)
    pre = jnp.stack([_pre(model, x) for x in XS])
    assert_close(grads.linear.bias, 2 / jnp.cosh(pre) ** 2)
    assert_close(got["pre"], {"primal": pre, "cotangent": 2 / jnp.cosh(pre) ** 2})


def test_filter_closure_convert(call, model):
    def f(x):
        return eqx.filter_closure_convert(model, x)(x)

    _, got = call(S(f), X)
    assert_close(got["pre"]["primal"], _pre(model, X))


def test_filter_eval_shape_of_it(model):
    out, got = eqx.filter_eval_shape(S(model), X)
    assert (out.shape, got["pre"]["primal"].shape) == ((2,), (2,))


def test_filter_hessian(call):
    out, got = call(S(eqx.filter_hessian(_square)), X)
    assert_close(out, jnp.diag(2 * jnp.cos(2 * X)))
    assert_close(got["h"]["primal"], jnp.sin(X))


# `eqx.filter_jit` says so of every function that `jax.vmap` made of a module.
@pytest.mark.filterwarnings("ignore:[^A-Za-z]*Possibly assigning")
def test_batch_norm_under_vmap(call):
    class Net(eqx.Module):
        norm: eqx.nn.BatchNorm

        def __call__(self, x, state):
            return sow(self.norm(sow(x, "in"), state), "out")

    net, state = eqx.nn.make_with_state(
        lambda: Net(eqx.nn.BatchNorm(3, axis_name="batch", mode="batch"))
    )()
    plain = jax.vmap(net, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    expected = plain(XS, state)
    (out, new), got = call(S(plain), XS, state)
    assert_close(out, expected[0])
    assert_close(jtu.tree_leaves(new), jtu.tree_leaves(expected[1]))
    assert_close(got["in"]["primal"], XS)
    assert_close(got["out"]["primal"][0], expected[0])


def test_dropout_and_keys(call):
    drop = eqx.nn.Dropout(0.5)

    def f(x, key):
        k1, k2 = sow(jr.split(key), "keys")
        return sow(drop(x, key=k1), "dropped") + jr.normal(k2, (3,))

    key = jr.key(1)
    _, got = call(S(f), X, key)
    assert_close(got["keys"]["primal"], jr.split(key))
    assert_close(got["dropped"]["primal"], drop(X, key=jr.split(key)[0]))


# --- nested save_intermediates ---


def test_nested_with_different_tags(call):
    def f(x):
        a = sow(x * 2, "a", tag="inner")
        sow(a * 3, "unused", tag="inner")
        return sow(a + 1, "b", tag="outer")

    inner = S(f, tag="inner")
    (out, mine), theirs = call(S(inner, tag="outer"), X)
    assert_close(out, X * 2 + 1)
    assert_close(with_mode(mine, "primal"), {"a": X * 2, "unused": X * 6})
    assert_close(with_mode(theirs, "primal"), {"b": X * 2 + 1})


@under("eager", "jit", "checkpoint")
def test_nested_with_different_tags_under_grad(call, wrap):
    def f(x):
        a = sow(jnp.sin(x), "a", tag="inner")
        return jnp.sum(sow(a**2, "b", tag="outer"))

    def loss(x):
        out, mine = S(wrap(f), tag="inner")(x)
        return out + jnp.sum(mine["a"]["primal"]), mine

    (_, mine), theirs = call(S(jax.grad(loss, has_aux=True), tag="outer"), X)
    assert_close(mine, {"a": {"primal": jnp.sin(X)}})
    assert_close(theirs["b"], {"primal": jnp.sin(X) ** 2, "cotangent": jnp.ones(3)})


def test_nested_with_equal_tags_the_inner_one_takes_them(call):
    def f(x):
        sow(x, "outside")
        return S(lambda x: sow(x * 2, "inside"))(x)

    (out, mine), theirs = call(S(f), X)
    assert_close(out, X * 2)
    assert_close(mine, {"inside": {"primal": X * 2}})
    assert_close(theirs, {"outside": {"primal": X}})


def test_nested_same_function_each_its_own_tag(call):
    f = lambda x: sow(sow(x, "n", tag="one") * 2, "n", tag=("two", 2))
    (_, one), two = call(S(S(f, tag="one"), tag=("two", 2)), X)
    assert_close(one, {"n": {"primal": X}})
    assert_close(two, {"n": {"primal": 2 * X}})


def test_other_tags_are_dropped(call):
    f = lambda x: sow(sow(x, "n", tag="one") * 2, "m")
    assert_close(call(S(f), X), (2 * X, {"m": {"primal": 2 * X}}))


# --- callbacks and effects beside a sow ---


def test_pure_callback_and_debug_print_beside_a_sow(call, capfd):
    import numpy as np

    def f(x):
        h = sow(x * 2, "h")
        y = jax.pure_callback(
            lambda v: np.sin(v), jax.ShapeDtypeStruct(x.shape, x.dtype), h
        )
        jax.debug.print("seen {}", x[0])
        return sow(y, "y")

    out, got = call(S(f), X)
    jax.effects_barrier()
    assert "seen" in capfd.readouterr().out
    assert_close(out, jnp.sin(X * 2))
    assert_close(with_mode(got, "primal"), {"h": 2 * X, "y": jnp.sin(2 * X)})


def test_vectorize(call):
    f = jnp.vectorize(lambda x: sow(jnp.sum(x), "s"), signature="(n)->()")
    out, got = call(S(f), jnp.stack([XS, XS]))
    expected = jnp.sum(jnp.stack([XS, XS]), -1)
    assert_close((out, got), (expected, {"s": {"primal": expected}}))


def test_named_call_and_named_scope(call):
    def f(x):
        with jax.named_scope("scope"):
            return jax.named_call(lambda x: sow(x * 2, "a"), name="call")(x)

    assert_close(call(S(f), X), (2 * X, {"a": {"primal": 2 * X}}))


def test_linear_transpose(call):
    f = lambda x: sow(x * 2, "a") * 3
    out, got = call(S(lambda ct: jax.linear_transpose(f, X)(ct)), X)
    assert_close(out, (X * 6,))
    assert_close(got["a"]["cotangent"], X * 3)


def test_lowering_and_compiling_ahead_of_time():
    compiled = jax.jit(S(_square)).lower(X).compile()
    assert_close(compiled(X)[1], {"h": {"primal": jnp.sin(X)}})


@under("eager", "jit", "grad", argument="of")
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, S])
@pytest.mark.filterwarnings("ignore:.*found no mark")
def test_at_compile_time(of, around):
    fn = lambda x: jnp.sum(lax.map(lambda x: sow(jnp.sin(x), "h") * 2, x + 1) + 1)
    got = []

    def outside(x):
        with jax.ensure_compile_time_eval():
            got.append(S(of(fn))(X))
        return x

    around(outside)(X)
    assert_close(got[0][0], of(fn)(X))
    assert_close(got[0][1]["h"]["primal"], jnp.sin(X + 1))


def test_vmap_of_a_collective_over_two_names(call):
    def f(x):
        return sow(lax.psum(sow(lax.pmax(x, "i"), "max"), ("i", "j")), "sum")

    xs = jnp.stack([XS, -XS, XS + 1])
    out, got = call(S(jax.vmap(jax.vmap(f, axis_name="j"), axis_name="i")), xs)
    assert_close(got["max"]["primal"], xs.max(0))
    total = (xs.max(0) * 3).sum(0)
    assert_close(got["sum"]["primal"], total)
    assert_close(out, jnp.broadcast_to(total, (3, 2, 3)))
