"""Small models of many kinds: each with sows, and with its values threaded by hand.

`Program.fn(mark, params, x)` is a loss that marks values; `Program.by_hand(params, x,
eps)` returns the loss, the values, and how often each of them ran, where that is asked
for. `eps` holds what to add to each value, or is `None`.
"""

import dataclasses as dc
import functools as ft
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from eqx_sow import save_intermediates as S, sow
from jax import lax

from tests.helpers import thread


KEY = jr.key(0)
ONE = jnp.ones((), jnp.int32)


@dc.dataclass(frozen=True)
class Program:
    name: str
    fn: Callable
    by_hand: Callable
    params: Any
    xs: Any  # a batch
    reverse: bool = True
    # At most, for the time of the gradient. Reverse mode through a checkpointed loop
    # computes values twice.
    gradient_aim: str = "1.00"


class Case(NamedTuple):
    name: str
    aim: str
    saved: Callable
    by_hand: Callable
    args: tuple


def cases(program: Program) -> Iterator[Case]:
    """Forward and derivative, each for one input and for a batch."""
    fn = ft.partial(program.fn, sow)
    if program.reverse:
        name, derivative, by_hand = "gradient", jax.grad(fn), _gradient(program.by_hand)
    else:
        name, derivative, by_hand = "tangents", _jvp(fn), _tangents(program.by_hand)
    one = program.params, jax.tree.map(lambda x: x[0], program.xs)
    batch = program.params, program.xs
    over = ft.partial(jax.vmap, in_axes=(None, 0))
    for form, aim, sown, plain in (
        ("forward", "1.05", fn, _forward(program.by_hand)),
        (name, program.gradient_aim, derivative, by_hand),
    ):
        yield Case(form, aim, S(sown), plain, one)
        yield Case(f"vmapped {form}", aim, S(over(sown)), over(plain), batch)


def _entries(**modes):
    """From `mode={name: value}` to `{name: {mode: value}}`."""
    entries = {}
    for mode, values in modes.items():
        for name, value in values.items():
            entries.setdefault(name, {})[mode] = value
    return entries


def _forward(by_hand):
    def forward(params, x):
        out, primal, count = by_hand(params, x, None)
        return out, _entries(primal=primal, count=count)

    return forward


def _gradient(by_hand):
    def gradient(params, x):
        def loss(params, eps):
            out, *captured = by_hand(params, x, eps)
            return out, captured

        shapes = jax.eval_shape(by_hand, params, x, None)[1]
        eps = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        grads, (primal, count) = jax.grad(loss, (0, 1), has_aux=True)(params, eps)
        out, cotangent = grads
        return out, _entries(primal=primal, cotangent=cotangent, count=count)

    return gradient


def _jvp(fn):
    def tangents(params, x):
        return jax.jvp(ft.partial(fn, params), (x,), (x,))

    return tangents


def _tangents(by_hand):
    def tangents(params, x):
        def fn(x):
            out, primal, count = by_hand(params, x, None)
            return (out, primal), count

        outs, pushed, count = jax.jvp(fn, (x,), (x,), has_aux=True)
        (out, primal), (out_tangent, tangent) = outs, pushed
        entries = _entries(primal=primal, tangent=tangent, count=count)
        return (out, out_tangent), entries

    return tangents


def _straight(fn):
    """By hand, for a program without loops and conditions."""

    def by_hand(params, x, eps):
        add = lambda mark: lambda value, name: mark(_add(value, eps, name), name)
        return *thread(lambda mark: fn(add(mark), params, x))(), {}

    return by_hand


def _add(x, eps, name):
    return x if eps is None else x + eps[name]


# --- Straight-line code -------------------------------------------------------------


def _linears(sizes, key=KEY):
    keys = jr.split(key, len(sizes))
    return [eqx.nn.Linear(i, o, key=k) for i, o, k in zip(sizes, sizes[1:], keys)]


def _mlp(mark, layers, x):
    *hidden, last = layers
    for i, layer in enumerate(hidden):
        x = mark(jax.nn.gelu(layer(x)), f"layers/{i}")
    return jnp.sum(last(x) ** 2)


def _cnn(mark, params, x):
    convs, last = params
    for i, conv in enumerate(convs):
        x = mark(jax.nn.relu(conv(x)), f"convs/{i}")
    return jnp.sum(last(mark(jnp.mean(x, (1, 2)), "pooled")) ** 2)


def _convs():
    sizes, strides = (3, 16, 32, 32, 32), (1, 2, 1, 2)
    return [
        eqx.nn.Conv2d(i, o, 3, stride=s, padding=1, key=k)
        for i, o, s, k in zip(sizes, sizes[1:], strides, jr.split(KEY, 4))
    ]


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, size, key):
        k1, k2, k3, k4 = jr.split(key, 4)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(size), eqx.nn.LayerNorm(size)
        self.qkv = eqx.nn.Linear(size, 3 * size, key=k1)
        self.out = eqx.nn.Linear(size, size, key=k2)
        self.up = eqx.nn.Linear(size, 4 * size, key=k3)
        self.down = eqx.nn.Linear(4 * size, size, key=k4)

    def attention(self, x):
        qkv = jax.vmap(self.qkv)(jax.vmap(self.norm1)(x))
        q, k, v = jnp.split(qkv.reshape(len(x), 4, -1), 3, axis=-1)
        return jax.vmap(self.out)(
            jax.nn.dot_product_attention(q, k, v).reshape(x.shape)
        )

    def mlp(self, x):
        return jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))

    def __call__(self, mark, x, path=""):
        x = x + mark(self.attention(x), f"{path}attention")
        return x + mark(self.mlp(jax.vmap(self.norm2)(x)), f"{path}mlp")


def transformer(mark, blocks, x):
    for i, block in enumerate(blocks):
        x = block(mark, x, f"blocks/{i}/")
    return jnp.mean(x**2)


# --- Loops and conditions -----------------------------------------------------------


def _stacked(mark, blocks, x):
    @jax.checkpoint
    def body(x, block):
        return block(mark, x), None

    return jnp.mean(lax.scan(body, x, blocks)[0] ** 2)


def _stacked_by_hand(blocks, x, eps):
    @jax.checkpoint
    def body(x, block_and_eps):
        block, eps = block_and_eps
        attention = _add(block.attention(x), eps, "attention")
        x = x + attention
        mlp = _add(block.mlp(jax.vmap(block.norm2)(x)), eps, "mlp")
        return x + mlp, {"attention": attention, "mlp": mlp}

    x, seen = lax.scan(body, x, (blocks, eps))
    return jnp.mean(x**2), seen, {}


def _rnn(mark, cell, xs):
    def body(h, x):
        return mark(cell(x, h), "h"), None

    h, _ = lax.scan(body, jnp.zeros(cell.hidden_size), xs)
    return jnp.sum(h**2)


def _rnn_by_hand(cell, xs, eps):
    def body(h, x_and_eps):
        x, eps = x_and_eps
        h = _add(cell(x, h), eps, "h")
        return h, {"h": h}

    h, seen = lax.scan(body, jnp.zeros(cell.hidden_size), (xs, eps))
    return jnp.sum(h**2), seen, {}


def _router(params, x):
    return jnp.sum(params[0](x)) > 0


def _cond(mark, layers, x):
    """A mixture of two experts, in which each input goes to one of them."""

    def expert(layers, name):
        def run(x):
            h = mark(jnp.tanh(layers[0](x)), name)
            return mark(layers[1](h), "out")

        return run

    router, left, right = layers
    y = lax.cond(_router(router, x), expert(left, "left"), expert(right, "right"), x)
    return jnp.sum(y**2)


def _cond_by_hand(layers, x, eps):
    def expert(layers, name, other):
        def run(x, eps):
            h = _add(jnp.tanh(layers[0](x)), eps, name)
            out = _add(layers[1](h), eps, "out")
            seen = {name: h, other: jnp.zeros_like(h), "out": out}
            return out, seen, {name: ONE, other: 0 * ONE, "out": ONE}

        return run

    router, left, right = layers
    yes, no = expert(left, "left", "right"), expert(right, "right", "left")
    y, seen, count = lax.cond(_router(router, x), yes, no, x, eps)
    return jnp.sum(y**2), seen, count


def _step(params, x, z):
    return jnp.tanh(params[0](z)), lambda h: jnp.tanh(params[1](h) + x)


def _unfinished(carry):
    i, z, last, *_ = carry
    return (i < 50) & (jnp.max(jnp.abs(z - last)) > 1e-3)


def _while(mark, params, x):
    """Iterates to a fixed point."""

    def body(carry):
        i, z, _ = carry
        h, rest = _step(params, x, z)
        return i + 1, rest(mark(h, "h")), z

    init = 0, jnp.zeros_like(x), jnp.ones_like(x)
    return jnp.sum(lax.while_loop(_unfinished, body, init)[1] ** 2)


def _while_by_hand(params, x, eps):
    assert eps is None

    def body(carry):
        i, z, _, _ = carry
        h, rest = _step(params, x, z)
        return i + 1, rest(h), z, h

    zeros = jnp.zeros_like(x)
    i, z, _, h = lax.while_loop(_unfinished, body, (0, zeros, zeros + 1, zeros))
    return jnp.sum(z**2), {"h": h}, {"h": i}


# --- The zoo ------------------------------------------------------------------------


def zoo() -> list[Program]:
    blocks = [Block(64, k) for k in jr.split(KEY, 6)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *blocks)
    experts = [_linears([256] * n, k) for n, k in zip((2, 3, 3), jr.split(KEY, 3))]
    tokens = jr.normal(KEY, (4, 32, 64))
    vectors = jr.normal(KEY, (4, 256))
    return [
        Program("MLP", _mlp, _straight(_mlp), _linears([256] * 7), vectors),
        Program(
            "CNN",
            _cnn,
            _straight(_cnn),
            (_convs(), eqx.nn.Linear(32, 10, key=KEY)),
            jr.normal(KEY, (4, 3, 32, 32)),
        ),
        Program(
            "transformer, 6 blocks",
            transformer,
            _straight(transformer),
            blocks,
            tokens,
        ),
        Program(
            "the same, checkpointed scan",
            _stacked,
            _stacked_by_hand,
            stacked,
            tokens,
            gradient_aim="1.05",
        ),
        Program(
            "GRU, scan over 50 steps",
            _rnn,
            _rnn_by_hand,
            eqx.nn.GRUCell(64, 128, key=KEY),
            jr.normal(KEY, (8, 50, 64)),
        ),
        Program("cond, two experts", _cond, _cond_by_hand, experts, vectors),
        Program(
            "while, to a fixed point",
            _while,
            _while_by_hand,
            _linears([256] * 3),
            vectors,
            reverse=False,
        ),
    ]
