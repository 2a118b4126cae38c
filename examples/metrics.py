"""Metrics of every layer on some steps only, in one compiled, sharded training step.

Training frameworks want what https://github.com/marin-community/marin/issues/4232 asks
for: sizes of the inputs and outputs of attention and MLP and of each block, the largest
attention logit, and the share of inactive units; computed inside a stack of blocks
that is scanned, checkpointed and spread over a mesh; every few steps, without a second
compiled program. Here the model does not know about any of it. A second model returns
the same metrics by hand. The script checks that the numbers are equal, and shows what
the compiled steps do: floating-point operations, memory, and messages between devices.

    python examples/metrics.py
"""

import os
import re


os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from eqx_sow import save_intermediates
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


LAYERS, HEADS, WIDTH, VOCABULARY, BATCH, LENGTH = 4, 4, 64, 64, 16, 32


# --- a model, with its layers stacked ---
def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


class Attention(eqx.Module):
    qkv: jax.Array
    out: jax.Array

    def __init__(self, key):
        k1, k2 = jr.split(key)
        self.qkv = jr.normal(k1, (WIDTH, 3, HEADS, WIDTH // HEADS)) / WIDTH**0.5
        self.out = jr.normal(k2, (HEADS, WIDTH // HEADS, WIDTH)) / WIDTH**0.5

    def logits(self, x):
        q, k, v = jnp.moveaxis(jnp.einsum("btd,dnhe->btnhe", x, self.qkv), 2, 0)
        logits = jnp.einsum("bthe,bshe->bhts", q, k) / q.shape[-1] ** 0.5
        mask = jnp.tril(jnp.ones(logits.shape[-2:], bool))
        return jnp.where(mask, logits, -1e9), v

    def __call__(self, x):
        logits, v = self.logits(x)
        pattern = jax.nn.softmax(logits)
        return jnp.einsum("bhts,bshe,hed->btd", pattern, v, self.out)


class MLP(eqx.Module):
    up: jax.Array
    down: jax.Array

    def __init__(self, key):
        k1, k2 = jr.split(key)
        self.up = jr.normal(k1, (WIDTH, 4 * WIDTH)) / WIDTH**0.5
        self.down = jr.normal(k2, (4 * WIDTH, WIDTH)) / (4 * WIDTH) ** 0.5

    def __call__(self, x):
        return jax.nn.relu(x @ self.up) @ self.down


class Block(eqx.Module):
    attention: Attention
    mlp: MLP

    def __init__(self, key):
        k1, k2 = jr.split(key)
        self.attention, self.mlp = Attention(k1), MLP(k2)

    def __call__(self, x):
        x = x + self.attention(norm(x))
        return x + self.mlp(norm(x))


class Transformer(eqx.Module):
    embed: jax.Array
    blocks: Block

    def __init__(self, key):
        k1, k2 = jr.split(key)
        self.embed = jr.normal(k1, (VOCABULARY, WIDTH)) / WIDTH**0.5
        self.blocks = eqx.filter_vmap(Block)(jr.split(k2, LAYERS))

    def __call__(self, tokens):
        run = jax.checkpoint(lambda x, block: (block(x), None))
        x, _ = jax.lax.scan(run, self.embed[tokens], self.blocks)
        return norm(x) @ self.embed.T


def loss(model, tokens):
    scores = jax.nn.log_softmax(model(tokens[:, :-1]))
    return -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1).mean()


# --- the metrics, which are computed on some steps only ---
def rms(x):
    return jnp.sqrt(jnp.mean(x**2))


def inactive(x):
    return jnp.mean(x == 0)


def when(watch, metric):
    """`metric` on the steps that `watch` selects, and 0 on the others."""
    return lambda x: jax.lax.cond(watch, metric, lambda x: jnp.zeros(()), x)


def update(model, grads):
    return jax.tree.map(lambda w, g: w - 0.1 * g, model, grads)


def first_argument(metric):
    return lambda inputs: metric(inputs[0][0])


def step(watch, model, tokens):
    metrics = {
        "blocks/*": rms,
        "blocks/*.inputs": first_argument(rms),
        "blocks/*/attention": rms,
        "blocks/*/attention.inputs": first_argument(rms),
        "blocks/*/attention/softmax.inputs": first_argument(jnp.max),
        "blocks/*/mlp": rms,
        "blocks/*/mlp.inputs": first_argument(rms),
        "blocks/*/mlp/relu": inactive,
    }
    grad = save_intermediates(
        eqx.filter_value_and_grad(loss),
        capture=(Block, Attention, MLP, jax.nn.softmax, jax.nn.relu),
        inputs=True,
        names=list(metrics),
        modes="primal",
        transform={name: when(watch, metric) for name, metric in metrics.items()},
    )
    (value, grads), found = grad(model, tokens)
    found = {name.removeprefix("model/"): x for name, x in found.primals.items()}
    return update(model, grads), value, found


# --- the same by hand: a second version of each class, and of the loss ---
def attention_by_hand(self, x, see):
    logits, v = self.logits(x)
    see("blocks/*/attention/softmax.inputs", jnp.max, logits)
    pattern = jax.nn.softmax(logits)
    return jnp.einsum("bhts,bshe,hed->btd", pattern, v, self.out)


def mlp_by_hand(self, x, see):
    hidden = jax.nn.relu(x @ self.up)
    see("blocks/*/mlp/relu", inactive, hidden)
    return hidden @ self.down


def block_by_hand(self, x, watch):
    found = {}

    def see(name, metric, x):
        found[name] = when(watch, metric)(x)

    see("blocks/*.inputs", rms, x)
    h = norm(x)
    see("blocks/*/attention.inputs", rms, h)
    h = attention_by_hand(self.attention, h, see)
    see("blocks/*/attention", rms, h)
    x = x + h
    h = norm(x)
    see("blocks/*/mlp.inputs", rms, h)
    h = mlp_by_hand(self.mlp, h, see)
    see("blocks/*/mlp", rms, h)
    x = x + h
    see("blocks/*", rms, x)
    return x, found


def loss_by_hand(model, tokens, watch):
    run = jax.checkpoint(lambda x, block: block_by_hand(block, x, watch))
    x, found = jax.lax.scan(run, model.embed[tokens[:, :-1]], model.blocks)
    scores = jax.nn.log_softmax(norm(x) @ model.embed.T)
    value = -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1).mean()
    return value, found


def step_by_hand(watch, model, tokens):
    grad = eqx.filter_value_and_grad(loss_by_hand, has_aux=True)
    (value, found), grads = grad(model, tokens, watch)
    return update(model, grads), value, found


def step_without(watch, model, tokens):
    value, grads = eqx.filter_value_and_grad(loss)(model, tokens)
    return update(model, grads), value, {}


# --- on a mesh: examples over `data`, heads and hidden units over `model` ---
def sharded(model, mesh):
    blocks = model.blocks
    specs = eqx.tree_at(
        lambda m: (m.blocks.attention, m.blocks.mlp, m.embed),
        model,
        (
            eqx.tree_at(
                lambda a: (a.qkv, a.out),
                blocks.attention,
                (P(None, None, None, "model"), P(None, "model")),
            ),
            eqx.tree_at(
                lambda m: (m.up, m.down),
                blocks.mlp,
                (P(None, None, "model"), P(None, "model")),
            ),
            P(),
        ),
    )
    put = lambda w, spec: jax.device_put(w, NamedSharding(mesh, spec))
    return jax.tree.map(put, model, specs)


COLLECTIVE = re.compile(r"= .*?\b(?:all-reduce|all-gather|all-to-all|reduce-scatter)\(")
BRANCHES = re.compile(r"(?:true|false|branch)_computations?=(\{[^}]*\}|%[\w.-]+)")


def described(compiled):
    # The text of a program is a list of computations, such as `%name (...) -> ... {`.
    text = compiled.as_text()
    parts = re.split(r"\n(?=%|ENTRY)", text)
    branches = set(re.findall(r"%[\w.-]+", " ".join(BRANCHES.findall(text))))
    in_branches = [part for part in parts if part.split()[0] in branches]
    messages = sum(len(COLLECTIVE.findall(part)) for part in parts)
    sometimes = sum(len(COLLECTIVE.findall(part)) for part in in_branches)
    return {
        "floating-point operations": f"{compiled.cost_analysis()['flops']:.4g}",
        "temporary memory": f"{compiled.memory_analysis().temp_size_in_bytes} bytes",
        "messages in every step": messages - sometimes,
        "messages only if watched": sometimes,
    }


def main():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    model = sharded(Transformer(jr.key(0)), mesh)
    tokens = jr.randint(jr.key(1), (BATCH, LENGTH + 1), 0, VOCABULARY)
    tokens = jax.device_put(tokens, NamedSharding(mesh, P("data")))

    steps = {
        "without metrics": step_without,
        "with eqx_sow": step,
        "by hand": step_by_hand,
    }
    compiled = {
        name: jax.jit(f).lower(jnp.array(True), model, tokens).compile()
        for name, f in steps.items()
    }
    table = {name: described(program) for name, program in compiled.items()}
    for row in table["by hand"]:
        print(row)
        for name, found in table.items():
            print(f"    {name:16} {found[row]}")
    assert table["with eqx_sow"] == table["by hand"]
    always = "messages in every step"
    assert table["with eqx_sow"][always] == table["without metrics"][always]

    here = there = model
    for i in range(6):
        watch = jnp.array(i % 5 == 0)
        here, value, found = compiled["with eqx_sow"](watch, here, tokens)
        there, by_hand, expected = compiled["by hand"](watch, there, tokens)
        assert value == by_hand
        assert set(found) == set(expected)
        for name in found:
            np.testing.assert_array_equal(found[name], expected[name])
            assert watch == np.any(found[name] != 0)
        if watch:
            print(f"step {i}, loss {value:.3f}")
            for name, numbers in found.items():
                print(f"    {name:32}", *(f"{x:.3f}" for x in numbers))


if __name__ == "__main__":
    main()
