"""`tabulate`."""

import re

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_sow import Append, Buffer, save_intermediates as S, sow, SowError, tabulate
from jax.sharding import NamedSharding, PartitionSpec as P

from .helpers import assert_close


X = jnp.array([0.0, -1.2, 0.7])


def _rows(text):
    """The titles of the columns, and the lines below the rule."""
    lines = text.splitlines()
    rows = [line for line in lines[1:] if set(line) - set(" -")]
    return re.findall(r"\S+(?: \S+)*", lines[0]), rows


def _check_width(text, width=100):
    assert all(len(line) <= width for line in text.splitlines())
    assert all(line == line.rstrip() for line in text.splitlines())


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, 3)
        self.norm = eqx.nn.LayerNorm(4)
        self.attention = eqx.nn.MultiheadAttention(2, 4, key=keys[0])
        self.up = eqx.nn.Linear(4, 8, key=keys[1])
        self.down = eqx.nn.Linear(8, 4, key=keys[2])

    def __call__(self, xs):
        h = jax.vmap(self.norm)(xs)
        xs = xs + self.attention(h, h, h)
        return xs + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(xs)))


class Transformer(eqx.Module):
    blocks: list

    def __init__(self, n, key):
        self.blocks = [Block(k) for k in jr.split(key, n)]

    def __call__(self, xs):
        for block in self.blocks:
            xs = block(xs)
        return xs


def test_mlp():
    mlp = eqx.nn.MLP(3, 2, 4, 2, key=jr.key(0))
    loss = lambda model, x: jnp.sum(model(x) ** 2)
    _, got = S(eqx.filter_grad(loss), capture=eqx.nn.Linear)(mlp, X)
    text = tabulate(got)
    _check_width(text)
    titles, rows = _rows(text)
    for title in ("name", "mode", "shape", "mean", "std", "min", "max", "norm"):
        assert title in titles
    assert "zeros" in titles
    assert len(rows) == 6
    for i, shape in enumerate(("4", "4", "2")):
        primal, cotangent = rows[2 * i : 2 * i + 2]
        assert f"model/layers/{i}" in primal and "primal" in primal
        assert "cotangent" in cotangent
        assert f"f32[{shape}]" in primal


def test_numbers_are_right():
    values = np.array([[0.0, 1.0], [2.0, 5.0]], np.float32)
    _, got = S(lambda x: sow(x, "h"))(jnp.asarray(values))
    (row,) = _rows(tabulate(got))[1]
    statistics = (values.mean(), values.std(), 0.0, 5.0, np.linalg.norm(values))
    numbers = [float(cell) for cell in row.split()[-6:-1]]
    assert_close(np.array(numbers), np.array(statistics, np.float64), rtol=1e-2)
    assert row.endswith("25%")


@pytest.mark.parametrize("bad", [False, True])
def test_transformer_of_twelve_blocks(bad):
    model = Transformer(12, jr.key(0))
    xs = jr.normal(jr.key(1), (3, 4))
    if bad:
        xs = xs.at[0, 0].set(jnp.nan)
    loss = lambda model, xs: jnp.mean(model(xs) ** 2)
    _, got = S(eqx.filter_grad(loss), capture=True)(model, xs)
    text = tabulate(got)
    _check_width(text)
    _, rows = _rows(text)
    assert len(rows) == sum(len(modes) for modes in got.values())
    assert len(rows) >= 150
    # Each name can be told from the others.
    shown = [row.split(" primal")[0].strip() for row in rows if " primal" in row]
    assert len(shown) == len(got)
    assert len(set(shown)) == len(got)


def test_very_long_names_stay_in_the_columns():
    long = "/".join(["a_rather_long_name_of_a_field"] * 6)
    got = S(lambda x: sow(sow(x, long + "/first"), long + "/second"))(X)[1]
    text = tabulate(got)
    _check_width(text)
    _, rows = _rows(text)
    assert len(set(rows)) == 2
    assert "first" in rows[0] and "second" in rows[1]


def test_stacked_layers():
    layers = eqx.filter_vmap(lambda k: eqx.nn.Linear(3, 3, key=k))(
        jr.split(jr.key(0), 4)
    )

    def forward(layers, x):
        dynamic, static = eqx.partition(layers, eqx.is_array)
        body = lambda x, layer: (eqx.combine(layer, static)(x), None)
        return lax.scan(body, x, dynamic)[0]

    text = tabulate(S(forward, capture=True)(layers, X)[1])
    assert "[4,3]" in text.replace(" ", "")
    _check_width(text)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_not_finite(bad):
    def f(x):
        x = sow(x, "fine")
        x = sow(x.at[1].set(bad), "first")
        return sow(x * 2, "second")

    text = tabulate(S(f)(X)[1])
    _check_width(text)
    _, rows = _rows(text)
    fine, first, second = rows
    # The name of it, and the mark.
    assert first.count("first") == 2
    assert "first" not in second and "first" not in fine
    assert "1/3" in first and "1/3" in second and "1/3" not in fine


def test_everything_finite_has_no_mark():
    assert "first" not in tabulate(S(lambda x: sow(x, "h"))(X)[1])


def test_counts():
    def f(x):
        go = lambda s: s[0] < 3
        x = lax.while_loop(go, lambda s: (s[0] + 1, sow(s[1] * 2, "loop")), (0, x))[1]
        return lax.cond(x[0] > 1, lambda x: sow(x, "branch"), lambda x: x, sow(x, "h"))

    text = tabulate(S(f)(X)[1])
    titles, rows = _rows(text)
    assert "count" in titles
    loop, h, branch = rows
    assert re.search(r"\b3\b", loop.split("]", 1)[1])
    assert re.search(r"\s0\b", branch.split("]", 1)[1])
    assert "h" in h


def test_count_over_lanes_and_of_a_buffer():
    def f(x):
        return lax.while_loop(
            lambda s: s < 5.0, lambda s: sow(s + 1, "s"), jnp.sum(x * 0)
        )

    text = tabulate(S(f, reduce=Buffer(3))(X)[1])
    assert "[3]" in text and re.search(r"\b5\b", text)
    text = tabulate(S(jax.vmap(f))(jnp.stack([X, X]))[1])
    assert re.search(r"\b10\b", text)


@pytest.mark.parametrize("shapes", [jax.eval_shape, eqx.filter_eval_shape])
def test_shapes_only(shapes):
    f = lambda x: sow({"a": jnp.sin(x), "b": x > 0}, "h")["a"]
    text = tabulate(shapes(S(f), X)[1])
    _check_width(text)
    titles, rows = _rows(text)
    assert len(rows) == 2
    assert "mean" not in titles and "norm" not in titles
    assert all("[3]" in row for row in rows)


def test_shapes_of_a_condition():
    f = lambda x: lax.cond(x[0] > 0, lambda x: sow(x, "h"), lambda x: x, x)
    text = tabulate(jax.eval_shape(S(f), X)[1])
    assert "[3]" in text


@pytest.mark.parametrize("transform", [jax.jit, eqx.filter_jit, jax.vmap, jax.grad])
def test_tracers(transform):
    def f(x):
        _, got = S(lambda x: sow(x, "h"))(x)
        tabulate(got)
        return jnp.sum(x)

    with pytest.raises(SowError, match="tabulate.*h"):
        transform(f)(jnp.ones(3))


def test_empty():
    text = tabulate({})
    assert isinstance(text, str)
    _check_width(text)
    assert _rows(text)[1] == []
    assert tabulate(S(lambda x: x)(X)[1]) == text


@pytest.mark.parametrize(
    "wrong, got",
    [
        (lambda model, pair: pair, "tuple"),
        (lambda model, pair: model, "MLP"),
        (lambda model, pair: pair[1]["layers/0"], "ArrayImpl"),
        (lambda model, pair: None, "NoneType"),
    ],
)
def test_not_intermediates(wrong, got):
    model = eqx.nn.MLP(3, 2, 4, 2, key=jr.key(0))
    pair = S(model, capture=True)(X)
    with pytest.raises(TypeError, match=f"`tabulate\\(intermediates\\)` takes.*{got}"):
        tabulate(wrong(model, pair))


def test_one_name():
    _, got = S(lambda x: sow(sow(x, "g"), "h"))(X)
    (row,) = _rows(tabulate({"h": got["h"]}))[1]
    assert row.startswith("h ")


def test_values_of_any_kind():
    def f(x):
        sow({"a": x, "b": (x[:2], "text")}, "tree")
        sow(jr.key(0), "key")
        sow(x > 0, "flags")
        sow(jnp.arange(3), "ints")
        sow(x.astype(jnp.bfloat16), "half")
        sow(lax.complex(x, x), "complex")
        sow(jnp.zeros((0, 3)), "empty")
        sow("only text", "static")
        sow(jnp.float32(3), "scalar")
        return x

    text = tabulate(S(f)(X)[1])
    _check_width(text)
    for piece in ("tree", "key", "flags", "ints", "half", "complex", "empty", "scalar"):
        assert piece in text
    assert "bf16[3]" in text


def test_float0_cotangents():
    def loss(x):
        i, y = sow((jnp.argmax(x), x * 2), "h")
        return y[i]

    text = tabulate(S(jax.grad(loss))(X)[1])
    assert "cotangent" in text and "float0[]" in text
    _check_width(text)


def test_append():
    f = lambda x: sow(sow(x, "h") * 2, "h")
    text = tabulate(S(f, reduce=Append())(X)[1])
    assert len(_rows(text)[1]) == 2


def test_of_sharded_values(mesh):
    xs = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("d")))
    text = tabulate(jax.jit(S(lambda x: sow(x * 2, "h")))(xs)[1])
    assert "[8]" in text and "14" in text


def test_in_order_of_execution():
    f = lambda x: sow(sow(x, "z") * 2, "a")
    _, rows = _rows(tabulate(S(f)(X)[1]))
    assert "z" in rows[0] and "a" in rows[1]
