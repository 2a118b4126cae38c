"""Law 9, and its counterpart: nothing of a sow is left in what has been captured."""

import re
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import pytest
from eqx_sow import save_intermediates as S, Sow, sow

from tests.helpers import primitives


X = jnp.arange(3.0)
XS = jnp.ones((2, 3))


class Net(eqx.Module):
    first: eqx.nn.Linear
    mark: object
    last: eqx.nn.Linear

    def __init__(self, mark):
        k1, k2 = jr.split(jr.key(0))
        self.first = eqx.nn.Linear(3, 4, key=k1)
        self.last = eqx.nn.Linear(4, 2, key=k2)
        self.mark = mark

    def __call__(self, x):
        def step(c, _):
            return self.mark(c * 2), self.mark({"c": c})

        h = jnp.tanh(self.mark(self.first(x)))
        h, _ = jax.lax.scan(step, h, None, length=2)
        self.mark((h, "unused", 3))
        return self.mark(self.last(h))


def _sown(x):
    return sow(x, "name")


def _same(x):
    return x


WAYS = {
    "model": lambda net: (lambda x: net(x), X),
    "jit": lambda net: (jax.jit(lambda x: net(x)), X),
    "filter_jit": lambda net: (lambda x: eqx.filter_jit(net)(x), X),
    "grad": lambda net: (
        lambda w, x: jax.grad(lambda w: _loss(net, w, x))(w),
        net.first.weight,
        X,
    ),
    "vmap": lambda net: (jax.vmap(net), XS),
    "vmap-grad": lambda net: (jax.vmap(jax.grad(lambda x: jnp.sum(net(x)))), XS),
    "checkpoint-grad": lambda net: (
        jax.grad(jax.checkpoint(lambda x: jnp.sum(net(x)))),
        X,
    ),
    "jvp": lambda net: (lambda x: jax.jvp(net, (x,), (x,)), X),
    "hessian": lambda net: (jax.hessian(lambda x: jnp.sum(net(x))), X),
}


def _loss(net, weight, x):
    return jnp.sum(eqx.tree_at(lambda n: n.first.weight, net, weight)(x))


def _anonymous(text):
    return text.replace("_sown", "_same")


@pytest.mark.parametrize("layer", [_sown, Sow("name")], ids=["sow", "Sow"])
@pytest.mark.parametrize("way", WAYS)
def test_law_9(way, layer):
    fn, *args = WAYS[way](Net(layer))
    plain, *plain_args = WAYS[way](Net(_same))
    jaxpr, expected = (
        jax.make_jaxpr(f)(*a) for f, a in ((fn, args), (plain, plain_args))
    )
    assert str(jaxpr) == str(expected)
    assert not jaxpr.effects
    text = jax.jit(fn).lower(*args).as_text()
    assert _anonymous(text) == jax.jit(plain).lower(*plain_args).as_text()


def test_law_9_after_listening():
    net, plain = Net(_sown), Net(_same)

    def f(x):
        return jnp.sum(sow(jnp.sin(x), "a"))

    def g(x):
        return jnp.sum(jnp.sin(x))

    jitted = jax.jit(f)
    S(jitted)(X)
    expected = jax.jit(g).lower(X).as_text()
    assert jitted.lower(X).as_text() == expected.replace("jit_g", "jit_f")
    assert str(jax.make_jaxpr(lambda x: net(x))(X)) == str(
        jax.make_jaxpr(lambda x: plain(x))(X)
    )


def _f(x):
    h = sow(jnp.sin(x), "h")
    sow(h * 2, "unused")
    return jnp.sum(jax.jit(lambda h: sow(h**2, "jitted"))(h))


@pytest.mark.filterwarnings("ignore:.*found no mark")
@pytest.mark.parametrize(
    "fn, x",
    [
        (S(_f), X),
        (S(jax.grad(_f)), X),
        (S(jax.grad(jax.checkpoint(_f))), X),
        (S(jax.vmap(jax.grad(_f))), XS),
        (S(jax.jit(jax.jacfwd(_f))), X),
        (S(_f, tag="another"), X),
        (S(_f, names="h"), X),
        (S(jax.grad(_f), modes="cotangent"), X),
        (jax.vmap(S(_f)), XS),
        (jax.grad(lambda x: S(_f)(x)[0]), X),
        (S(S(_f), tag="another"), X),
    ],
)
def test_no_sow_and_no_effect_is_left(fn, x):
    jaxpr = jax.make_jaxpr(jax.jit(fn))(x)
    assert "sow" not in primitives(jaxpr)
    assert not jaxpr.effects
    assert "sow" not in str(jaxpr)


def test_an_edge_is_an_array_of_no_numbers():
    """Also where a scan stacks it for the backward pass."""

    def f(x):
        body = lambda x, _: (jnp.sin(sow(x, "h")), None)
        return jax.lax.scan(body, x, None, length=4)[0].sum()

    text = str(jax.make_jaxpr(S(jax.grad(f)))(jnp.ones(3)))
    assert not re.search(r"f32\[(4,)?1\]", text)


def test_what_is_not_selected_is_not_computed():
    def f(x):
        sow(jnp.sin(x), "a")
        sow(jnp.cosh(x), "b")
        return x * 2

    compiled = jax.jit(S(f, names="a")).lower(X).compile().as_text()
    plain = jax.jit(lambda x: (x * 2, jnp.sin(x))).lower(X).compile().as_text()
    assert "cosh" not in compiled and "exponential" not in compiled
    assert compiled.count(" = ") == plain.count(" = ")


def test_same_program_as_one_written_by_hand():
    def f(x):
        h = sow(jnp.sin(x), "h")
        return jnp.sum(sow(h * 2, "y"))

    def by_hand(x):
        h = jnp.sin(x)
        y = h * 2
        return jnp.sum(y), {"h": {"primal": h}, "y": {"primal": y}}

    cost = lambda fn: jax.jit(fn).lower(X).compile().cost_analysis()
    keys = "flops", "bytes accessed"
    saved, written = cost(S(f)), cost(by_hand)
    assert {k: saved.get(k) for k in keys} == {k: written.get(k) for k in keys}


def test_weights_are_not_baked_in():
    model = eqx.nn.MLP(3, 2, 4, 1, key=jr.key(0))
    saved = S(eqx.nn.Sequential([model, Sow("out")]))
    arrays = [x for x in jtu.tree_leaves(saved) if eqx.is_array(x)]
    weights = [x for x in jtu.tree_leaves(model) if eqx.is_array(x)]
    assert [id(x) for x in arrays] == [id(x) for x in weights]

    dynamic, static = eqx.partition(saved, eqx.is_array)
    run = lambda dynamic, x: eqx.combine(dynamic, static)(x)
    closed = jax.make_jaxpr(run)(dynamic, X)
    assert not [c for c in closed.consts if jnp.size(c) > 1]
    text = eqx.filter_jit(saved).lower(X).as_text()
    assert text.count("%arg") >= len(weights) + 1
    shapes = {"tensor<4x3xf32>", "tensor<2x4xf32>"}
    constants = [line for line in text.splitlines() if "stablehlo.constant" in line]
    assert not [line for line in constants if any(s in line for s in shapes)]


def test_a_new_model_is_not_a_new_trace():
    traces = []

    @eqx.filter_jit
    def run(saved, x):
        traces.append(None)
        return saved(x)

    model = eqx.nn.Sequential([eqx.nn.Linear(3, 2, key=jr.key(0)), Sow("out")])
    for i in range(3):
        scaled = jtu.tree_map(lambda w: w * i if eqx.is_array(w) else w, model)
        out, got = run(S(scaled), X)
        assert jnp.allclose(got["out"]["primal"], scaled(X))
    assert len(traces) == 1


@pytest.mark.slow
def test_importing_starts_no_backend():
    """What has to be said to JAX before it starts can be said after the import."""
    program = (
        "import eqx_sow, jax; jax.config.update('jax_num_cpu_devices', 3); "
        "jax.config.update('jax_platforms', 'cpu'); assert len(jax.devices()) == 3"
    )
    env = {"PATH": "", "XLA_FLAGS": ""}
    subprocess.run([sys.executable, "-c", program], check=True, env=env, timeout=120)
