"""Features that were made apart from each other, in one program: a list of layers, its
stack, and the stack unrolled, of which everything has to say the same."""

import warnings

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_sow import compare, plant, save_intermediates as S, tabulate

from .helpers import assert_close


X = jnp.array([0.3, -1.2, 0.7])
ALL = dict(capture=True, inputs=True, calls=True)


class Block(eqx.Module):
    attn: eqx.nn.Linear
    mlp: eqx.nn.Linear

    def __init__(self, key):
        a, b = jr.split(key)
        self.attn, self.mlp = eqx.nn.Linear(3, 3, key=a), eqx.nn.Linear(3, 3, key=b)

    def __call__(self, x):
        return self.mlp(jnp.tanh(self.attn(jnp.sin(self.attn(x)))))


class Model(eqx.Module):
    blocks: list[Block] | Block
    way: str

    def __call__(self, x):
        if self.way == "stack":
            return lax.scan(lambda x, block: (block(x), None), x, self.blocks)[0]
        for i in range(3):
            of_stack = lambda: jax.tree.map(lambda a: a[i], self.blocks)
            x = (self.blocks[i] if self.way == "list" else of_stack())(x)
        return x


KEYS = jr.split(jr.key(0), 3)
STACK = eqx.filter_vmap(Block)(KEYS)
LIST = Model([Block(key) for key in KEYS], "list")
LOSS = eqx.filter_grad(lambda model, x: model(x).sum())


@pytest.mark.parametrize("fn", [lambda model, x: model(x), LOSS])
@pytest.mark.parametrize("way", ["stack", "unrolled"])
def test_a_stack_is_as_a_list(way, fn):
    model = Model(STACK, way)
    (_, want), (out, got) = [S(fn, **ALL)(m, X) for m in (LIST, model)]
    assert list(got.unstack()) == list(want)
    # In a scan, the input of the first layer has a cotangent, in a list it has none.
    assert compare(got, want).first is compare(want, got).first is None
    assert {*got.unstack().flat()} >= {*want.flat()} and tabulate(got.unstack())
    for name, modes in want.items():
        assert_close(got[name]["primal"], modes["primal"])
        assert_close(got[name.replace("/2/", "/-1/")], got[name])
    for values in (got, got.unstack(), want, {"blocks/1/attn": got["blocks/1/attn"]}):
        assert_close(plant(fn, values, **ALL)(model, X), out)
    call = "blocks/-1/attn.call"
    skip = {call: (None, lambda call: call._replace(out=2 * call.args[0]))}
    ones = {"**/blocks/1/mlp.inputs": lambda v: jax.tree.map(jnp.ones_like, v)}
    for edit in (skip, ones, {"blocks/*/attn": lambda x: -x}):
        outs = [S(plant(fn, edit, **ALL), **ALL)(m, X)[1] for m in (LIST, model)]
        assert compare(outs[1], outs[0]).first is None
        assert compare(outs[1], want).first is not None


def test_of_a_derivative_that_one_run_lacks_there_is_nothing_to_compare():
    (_, a), (_, b) = [S(LOSS, **ALL)(m, X) for m in (LIST, Model(STACK, "stack"))]
    missing = "model/blocks/0/attn.inputs[0] (cotangent)"
    assert f"Only in the second: model/blocks/0.inputs (cotangent), {missing}" in str(
        compare(a, b)
    )
    assert missing in str(compare(b, a)).split("Only in the first")[1]


def test_no_warning_of_equinox():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        S(jax.vmap(LIST), capture=True).eval_shape(X[None])
        S(jax.jit(lambda x: LIST(x)), capture=True).lower(X)


def _prompt_and_steps(model, x):
    step = lambda x, _: (model(x), None)
    return lax.scan(step, model(x), length=2)[0]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["list", "stack"])
def test_runs_in_different_loops(way):
    model = LIST if way == "list" else Model(STACK, way)
    saved = lambda m, **options: S(_prompt_and_steps, **ALL, **options)(m, X)
    (out, got), (_, want) = saved(model), saved(LIST)
    assert compare(got, want).first is None
    for values in (got.unstack(), want, {"blocks/2/attn": got["blocks/2/attn"]}):
        assert_close(plant(_prompt_and_steps, values, **ALL)(model, X), out)
    layer = got.unstack()
    assert layer.axes("blocks/2/attn") == got.axes("blocks/2/attn")
    assert layer.axes("blocks/2/attn") == ((), (), ("loop",), ("loop",))
    # The second call of the model has no iteration 1 but in the loop over steps.
    for name in ("model/1", "blocks/2/attn/1", "blocks/2/attn"):
        ((_, one),) = saved(model, names=name)[1].items()
        assert jax.tree.structure(dict(got[name])) == jax.tree.structure(one)
        assert_close(got[name], one)
        assert_close(plant(_prompt_and_steps, {name: got[name]}, **ALL)(model, X), out)
    ones = plant(_prompt_and_steps, {"model/1": jnp.ones(3)}, **ALL)
    assert_close(ones(model, X), jnp.ones(3))
