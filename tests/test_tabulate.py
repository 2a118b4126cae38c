"""`tabulate`."""

import copy
import functools as ft
import os
import pickle
import re
import socket
import subprocess
import sys
import textwrap

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from eqx_sow import (
    Append,
    Buffer,
    Intermediates,
    save_intermediates as S,
    sow,
    SowError,
    summarize,
    tabulate,
)
from jax.sharding import NamedSharding, PartitionSpec as P

from .helpers import assert_close
from .tables import REDUCERS, under


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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "make",
    [
        lambda: jr.normal(jr.key(0), (600, 1000)) + 100,
        lambda: 1e38 * jr.normal(jr.key(1), (64, 64, 128)),
        lambda: jr.normal(jr.key(2), (2**18,)).at[::7].set(0).at[3].set(jnp.nan),
        lambda: jnp.full((2**18 + 1,), jnp.inf).at[5].set(-2),
        lambda: jnp.arange(2**20, dtype=jnp.bfloat16),
        lambda: jnp.full((2**20,), jnp.nan).at[2**19 :].set(3).at[2**19].set(4),
        lambda: jax.device_put(
            jr.normal(jr.key(3), (1024, 1024)),
            NamedSharding(jax.make_mesh((1,), ("d",)), P("d")),
        ),
        lambda: jax.device_put(
            jr.normal(jr.key(4), (1024, 1024)),
            NamedSharding(jax.make_mesh((8,), ("d",)), P()),
        ),
    ],
    ids=[
        *("far from zero", "huge", "not finite", "of an odd size", "growing"),
        *("half of it not finite", "on one device of a mesh", "on each device"),
    ],
)
def test_large_arrays(make):
    x = make()
    values = np.asarray(x, np.float64)
    some = values[np.isfinite(values)]
    want = some.mean(), some.std(), some.min(), some.max(), np.linalg.norm(some)
    _, (line, *_) = _rows(tabulate({"a": {"primal": x}}))
    got = line.split()[3:]
    for text, number in zip(got, want):
        assert float(text) == pytest.approx(number, rel=6e-3, abs=1e-9)
    assert got[5] == f"{(values == 0).mean():.0%}"


def test_large_arrays_of_64_bits():
    with jax.enable_x64(True):
        x = jnp.linspace(-1, 0.9, 2**20) * 1.7e308
        _, (line, *_) = _rows(tabulate({"a": {"primal": x}}))
    got = [float(text) / 1.7e308 for text in line.split()[3:7]]
    assert got == pytest.approx([-0.05, 1.9 / 12**0.5, -1, 0.9], 6e-3)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [False, True])
def test_transformer_of_twelve_blocks(bad):
    model = Transformer(12, jr.key(0))
    xs = jr.normal(jr.key(1), (3, 4))
    if bad:
        xs = xs.at[0, 0].set(jnp.nan)
    loss = lambda model, xs: jnp.mean(model(xs) ** 2)
    _, got = S(eqx.filter_grad(loss), capture=True)(model, xs)
    text = tabulate(got)
    # Names are whole; the other columns have their width.
    _check_width(text, max(map(len, got)) + 85)
    _, rows = _rows(text)
    assert len(rows) == sum(len(modes) for modes in got.values())
    assert len(rows) >= 150
    # Each name can be told from the others.
    shown = [row.split(" primal")[0].strip() for row in rows if " primal" in row]
    assert len(shown) == len(got)
    assert len(set(shown)) == len(got)


def test_names_are_whole():
    """So that they can be copied, however long they are."""
    around = "transformer/encoder/layers/" + "/".join(map(str, range(10, 40)))
    names = [f"{around}/post_attention_layernorm/{last}" for last in ("conv1", "cell")]

    def f(x):
        x = sow(x, names[0])
        return sow({"hidden": x / 0, "heavy": [x, 1.23456e-9 * x]}, names[1])

    text = tabulate(S(f)(X)[1])
    _, rows = _rows(text)
    paths = ("['heavy'][0]", "['heavy'][1]", "['hidden']")
    want = [names[0], *(names[1] + path for path in paths)]
    assert [row.split()[0] for row in rows] == want
    # A column more takes no digits from the others.
    assert "not finite" in text and "-1.48e-09" in rows[2]


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


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("jacobian", [jax.jacfwd, jax.jacrev])
def test_a_jacobian_of_what_did_not_always_run(jacobian, lanes):
    def f(x):
        def step(x, i):
            run = lambda x: sow(jnp.sin(x), "h")
            return lax.cond(i > 1, run, lambda x: x, x), None

        return lax.scan(step, x, jnp.arange(5))[0]

    fn, x = jacobian(f), jnp.array([0.3, 0.6])
    fn, x = (jax.vmap(fn), jnp.stack([x, -x, 2 * x])) if lanes else (fn, x)
    _, row = _rows(tabulate(S(fn)(x)[1]))[1]
    _, like = _rows(tabulate(S(fn, transform=summarize)(x)[1]))[1]
    # All but the shape, or the number of entries.
    assert row.split()[-6:] == like.split()[-6:]


def test_count_over_lanes_and_of_a_buffer():
    def f(x):
        return lax.while_loop(
            lambda s: s < 5.0, lambda s: sow(s + 1, "s"), jnp.sum(x * 0)
        )

    text = tabulate(S(f, reduce=Buffer(3))(X)[1])
    assert "[3]" in text and re.search(r"\b5\b", text)
    text = tabulate(S(jax.vmap(f))(jnp.stack([X, X]))[1])
    assert re.search(r"\b10\b", text)


def test_counts_of_lanes_on_devices():
    # The counts come to the host, and then go to a mesh with explicit axes again.
    branch = lambda x: sow(2 * x, "x")
    f = jax.vmap(lambda x: lax.cond(x[0] > 1, branch, lambda x: x, x))
    xs = jnp.arange(12.0).reshape(4, 3)
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        got = S(jax.jit(f))(jax.device_put(xs, NamedSharding(mesh, P("d"))))[1]
        assert tabulate(got) == tabulate(S(f)(xs)[1])


@pytest.mark.parametrize("keep", ["first", "last"])
def test_the_empty_places_of_a_buffer_count_nothing(keep):
    def f(x):
        return lax.while_loop(lambda x: x < 50, lambda x: sow(2 * x, "x"), x)

    def numbers(text):
        return _rows(text)[1][0].split("]", 1)[1].split()

    S_ = lambda g: S(g, reduce=Buffer(8, keep))
    found = numbers(tabulate(S_(f)(jnp.array(3.0))[1]))
    ran = np.float32([6, 12, 24, 48, 96])
    assert found == ["5", *numbers(tabulate({"x": {"primal": ran}}))]
    # Each lane has places of its own.
    found = numbers(tabulate(S_(jax.vmap(f))(jnp.array([3.0, 20.0]))[1]))
    ran = np.float32([6, 12, 24, 48, 96, 40, 80])
    assert found == ["7", *numbers(tabulate({"x": {"primal": ran}}))]
    # Also if they are spread over devices.
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
    xs = jax.device_put(jnp.array([3.0, 20.0]), NamedSharding(mesh, P("d")))
    with jax.set_mesh(mesh):
        assert numbers(tabulate(S_(jax.vmap(f))(xs)[1])) == found
    # So does a gradient.
    loop = lambda x: eqx.internal.while_loop(
        lambda x: x < 50, lambda x: sow(2 * x, "x"), x, max_steps=16, kind="bounded"
    )
    got = S_(jax.grad(loop))(jnp.array(3.0))[1]
    rows = _rows(tabulate(got))[1]
    ran = np.float32([1, 2, 4, 8, 16])
    by_hand = numbers(tabulate({"x": {"primal": ran}}))
    assert rows[1].split("]", 1)[1].split() == ["5", *by_hand]


@pytest.mark.slow
def test_a_state_has_no_row():
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    xs = jr.normal(jr.key(0), (5, 3))

    def f(norm, xs, state):
        call = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        out, state = call(sow(xs, "x"), state)
        return jnp.sum(sow(out, "out") ** 2), state

    grad = eqx.filter_grad(f, has_aux=True)
    for axis in (None, 0):
        # Those behind the state have their own axes all the same.
        fn = eqx.filter_vmap(grad, in_axes=(None, axis, None)) if axis == 0 else grad
        x = xs if axis is None else jnp.stack([xs, 2 * xs])
        both = S(fn, capture=True)(norm, x, state)[1]
        first = lambda v: v[0] if isinstance(v, tuple) else v
        alone = S(fn, capture=True, transform=first)(norm, x, state)[1]
        assert tabulate(both) == tabulate(alone)
    assert "norm " in tabulate(both) and "[" not in _rows(tabulate(both))[1][1][:9]


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


@under("jit", "filter_jit", "vmap", "grad", argument="transform")
def test_tracers(transform):
    def f(x):
        _, got = S(lambda x: sow(x, "h"))(x)
        tabulate(got)
        return jnp.sum(x)

    with pytest.raises(SowError, match="tabulate.*h"):
        transform(f)(jnp.ones(3))


@pytest.mark.filterwarnings("ignore:.*found no mark")
def test_empty():
    text = tabulate({})
    assert isinstance(text, str)
    _check_width(text)
    assert "Nothing was captured" in text and "capture=True" in text
    assert tabulate(S(lambda x: x)(X)[1]) == text
    assert "<p>Nothing" in text._repr_html_() and "`modes=`" in text._repr_html_()


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


def test_values_without_arrays():
    def f(x):
        sow(3.5, "loss")
        sow(None, "nothing")
        sow({"a": "text", "b": 1}, "static")
        return lax.cond(x[0] > 1, lambda x: (sow(2, "branch"), x)[1], lambda x: x, x)

    _, rows = _rows(tabulate(S(f)(X)[1]))
    want = ["loss primal", "nothing primal", "static primal", "branch primal 0"]
    assert [" ".join(row.split()) for row in rows] == want


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


# Where the first NaN is.


def _marked(text):
    """The rows with an arrow: name and mode."""
    name, found = None, []
    for line in text.splitlines()[2:]:
        *words, mode = re.split(r"  +(?:b?f\d|\d+ entr)", line)[0].split()
        name = words[0] if words else name
        if line.endswith("<- first"):
            found.append((name, mode))
    return found


class Bad(eqx.Module):
    """Twelve layers, the third of which makes a NaN."""

    layers: list

    def __init__(self):
        self.layers = [eqx.nn.Linear(3, 3, key=jr.key(i)) for i in range(12)]
        bad = jnp.full((3, 3), jnp.nan)
        self.layers[2] = eqx.tree_at(lambda m: m.weight, self.layers[2], bad)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


@under("eager", "filter_jit", argument="jit")
def test_arrow_at_the_third_of_twelve_layers(jit):
    saved = jit(S(Bad(), capture=eqx.nn.Linear))
    got = saved(X)[1]
    assert _marked(tabulate(got)) == [("layers/2", "primal")]
    # JAX has sorted these.
    got = jax.jit(lambda x: dict(S(Bad(), capture=eqx.nn.Linear)(x)[1]))(X)
    text = tabulate(got)
    assert _marked(text) == []
    assert [line.split()[0] for line in text.splitlines()[2:]] == list(got)


def test_arrow_in_a_chain():
    def f(x):
        x = sow(x, "z_input")
        x = sow(jnp.log(-jnp.abs(x)), "m_log")
        return sow(x + 1, "a_out")

    for saved in (S(f), jax.jit(S(f))):
        assert _marked(tabulate(saved(X)[1])) == [("m_log", "primal")]
    # JAX may have sorted this one.
    assert _marked(tabulate(dict(S(f)(X)[1]))) == []
    names = sorted(S(f)(X)[1])
    chosen = Intermediates((n, S(f)(X)[1][n]) for n in names)
    assert _marked(tabulate(chosen)) == [("a_out", "primal")]


def test_arrow_in_a_backward_pass():
    def f(x):
        x = sow(jnp.sin(x), "a")
        x = sow(x * 0, "b")
        x = sow(jnp.sqrt(x), "c")
        return jnp.sum(sow(x + 1, "d"))

    got = jax.jit(S(jax.grad(f)))(X)[1]
    for name in "abcd":
        assert jnp.all(jnp.isfinite(got[name]["primal"]))
    assert jnp.all(jnp.isfinite(got["c"]["cotangent"]))
    assert not jnp.any(jnp.isfinite(got["a"]["cotangent"]))
    # It goes from the end to the beginning.
    assert _marked(tabulate(got)) == [("b", "cotangent")]


def test_arrow_in_a_second_backward_pass():
    def f(x):
        x = sow(x, "a")
        x = sow(x**1.5, "b")
        return jnp.sum(sow(x + 1, "c"))

    zero = jnp.zeros(3)
    first = S(jax.grad(f))(zero)[1]
    assert "not finite" not in tabulate(first)
    got = S(jax.grad(lambda x: jnp.sum(jax.grad(f)(x))))(zero)[1]
    text = tabulate(got)
    if "not finite" in text:
        ((_, mode),) = _marked(text)
        assert "." in mode


# In a loop, the row of the first iteration with an entry that is not finite. What comes
# first is what the table of the unrolled program says.


def _two(x, bad, at=""):
    x = sow(jnp.sin(x) * bad[0], f"a{at}")
    # The gradient is infinite where this is zero; the value is not.
    x = sow(jnp.cos(jnp.where(bad[2] > 0, jnp.sqrt(jnp.abs(x) * 0), x)), f"b{at}")
    return sow(jnp.tanh(x) * bad[1], f"c{at}")


def _looped(x, bads, reverse=False):
    step = lambda x, bad: (_two(x, bad), None)
    x, _ = lax.scan(step, sow(x, "before"), bads, reverse=reverse)
    return jnp.sum(sow(x, "after"))


def _unrolled(x, bads, reverse=False):
    x = sow(x, "before")
    for i in range(len(bads))[:: -1 if reverse else 1]:
        x = _two(x, bads[i], f":{i}")
    return jnp.sum(sow(x, "after"))


def _bads(seed):
    rng = np.random.default_rng(seed)
    bads = np.tile(np.array([1, 1, 0], np.float32), (6, 1))
    for _ in range(seed % 3):
        bads[rng.integers(6), rng.integers(2)] = np.inf
    for _ in range(2):
        bads[rng.integers(6), 2] = 1
    return jnp.asarray(bads)


def _first(text):
    ((name, mode),) = _marked(text)
    return name.split(":")[0], mode


STACKS = {
    "plain": lambda saved: saved,
    "jit": jax.jit,
    "a tree map": lambda saved: lambda *args: jtu.tree_map(jnp.copy, saved(*args)),
    "a vmap": lambda saved: lambda x, bads: jax.vmap(saved)(x[None], bads[None]),
    "a pickle": lambda saved: lambda *args: pickle.loads(pickle.dumps(saved(*args))),
    "copies": lambda saved: lambda *args: tuple(map(copy.copy, saved(*args))),
}


_SLOW = [pytest.param(x, marks=pytest.mark.slow) for x in ("jit", "a pickle", "copies")]


@pytest.mark.slow
@pytest.mark.parametrize("transform", [None, summarize])
@pytest.mark.parametrize("stack", ["plain", "a tree map", "a vmap", *_SLOW])
def test_arrow_in_a_loop(stack, transform):
    for seed in range(6):
        bads, reverse = _bads(seed), seed > 3
        want = S(jax.grad(ft.partial(_unrolled, reverse=reverse)))(X, bads)[1]
        looped = jax.grad(ft.partial(_looped, reverse=reverse))
        got = STACKS[stack](S(looped, transform=transform))(X, bads)[1]
        assert _first(tabulate(got)) == _first(tabulate(want)), seed


@pytest.mark.slow
def test_arrow_in_loops_in_loops():
    def body(x, bads):
        return lax.scan(lambda x, bad: (_two(x, bad), None), x, bads)[0]

    def nested(x, bads):
        step = lambda x, bads: (sow(body(x, bads), "d"), None)
        return lax.scan(step, x, bads.reshape(3, 2, 3))[0]

    def by_hand(x, bads):
        for i in range(6):
            x = _two(x, bads[i], f":{i}")
            x = sow(x, f"d:{i}") if i % 2 else x
        return x

    # One after the other, that are of one length: the first comes first.
    def in_turn(x, bads):
        x = lax.scan(lambda x, bad: (sow(x * bad[1], "c"), None), x, bads)[0]
        return lax.scan(lambda x, bad: (sow(x * bad[0], "a"), None), x, bads)[0]

    for seed in range(1, 6):
        want = _marked(tabulate(S(by_hand)(X, _bads(seed))[1]))
        if want:
            got = tabulate(S(jax.jit(nested))(X, _bads(seed))[1])
            assert _first(got) == (want[0][0].split(":")[0], "primal")
    bads = jnp.ones((6, 3)).at[5, 1].set(jnp.inf).at[2, 0].set(jnp.inf)
    for f in (in_turn, jax.jit(in_turn)):
        assert _marked(tabulate(S(f)(1 + X, bads)[1])) == [("c", "primal")]


def test_arrow_in_a_loop_around_the_capture():
    def step(x, i):
        bads = jnp.ones((6, 3)).at[2, 1].set(jnp.where(i == 1, jnp.nan, 1))
        out, got = S(_looped)(x, bads.at[:, 2].set(0))
        return x + out, got

    # In the next step, all of it is not finite.
    for run in (lax.scan, jax.jit(lax.scan, static_argnums=0)):
        assert _marked(tabulate(run(step, X, jnp.arange(4))[1])) == [("c", "primal")]


@under(of=REDUCERS, argument="row")
def test_arrow_of_what_was_reduced_in_a_loop_around_the_capture(row):
    def f(x, bad):
        return sow(sow(x, "a") * bad[1], "b") * bad[0]

    # `b` in the second step, and so `a` only in the third.
    bads = jnp.ones((4, 2)).at[1, 1].set(jnp.inf)
    for reduce in (None, row.reducer):
        step = lambda x, bad, reduce=reduce: S(f, reduce=reduce)(x, bad)
        assert _marked(tabulate(lax.scan(step, X, bads)[1])) == [("b", "primal")]


def test_arrow_in_a_loop_on_devices():
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])

    def step(x, bad):
        return sow(sow(jnp.tanh(x), "norm") * bad, "mlp"), None

    body = lambda x, bads: lax.scan(step, x, bads)[0]
    f = jax.shard_map(body, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    bads = jnp.ones(6).at[3].set(jnp.nan)
    x = jax.device_put(jnp.ones((2, 3)), NamedSharding(mesh, P("d")))
    assert _marked(tabulate(S(f)(x, bads)[1])) == [("mlp", "primal")]


def test_arrow_beside_a_leaf_that_is_not_differentiated():
    def f(x, bads):
        def step(x, bad):
            x = sow((jnp.arange(3), x), "a")[1]
            x = jnp.where(bad > 0, jnp.sqrt(x * 0), x)
            return sow((jnp.arange(3), x), "b")[1], None

        return jnp.sum(lax.scan(step, x, bads)[0])

    # Backward, from the last iteration: `a` before `b`, that of the iteration before.
    got = S(jax.grad(f), modes="cotangent")(1 + jnp.abs(X), jnp.eye(6)[3])[1]
    assert _marked(tabulate(got))[0][0].startswith("a")


def test_arrow_where_an_axis_has_gone():
    got = S(_looped)(X, _bads(1).at[:, 2].set(0))[1]
    got = jtu.tree_map(lambda x: x.sum(0), got)
    assert len(_marked(tabulate(got))) == 1


@pytest.mark.parametrize("lanes", [3, 5])
def test_arrow_where_a_vmap_outside_has_added_an_axis(lanes):
    def f(x, bad):
        def step(x, bad):
            x = sow(jnp.where(bad[0], jnp.nan, x), "a")
            return sow(jnp.where(bad[1], jnp.nan, x), "b") * 0 + 1, None

        return lax.scan(step, x, bad)[0]

    # `a` in the second iteration of the first lane, `b` in the first of the second one.
    bads = jnp.zeros((lanes, 3, 2), bool).at[0, 1, 0].set(True).at[1, 0, 1].set(True)
    save = lambda bad: S(f)(jnp.ones(7), bad)[1]
    got = jax.vmap(save, out_axes=1)(bads)
    # Of three lanes it is not known which axis is that of the three iterations.
    assert _marked(tabulate(got)) == [("a" if lanes == 3 else "b", "primal")]


def test_modes_of_a_sorted_dict():
    f = lambda x: sow(jnp.sin(x), "h").sum()
    got = jax.jit(lambda x: dict(S(jax.grad(f))(x)[1]))(X)
    first, second = _rows(tabulate(got))[1]
    assert "primal" in first and "cotangent" in second


# What did not run.


def test_entries_that_did_not_run():
    def f(x):
        return lax.cond(x[0] > 0, lambda x: sow(x + 5, "h"), lambda x: x, x)

    xs = jnp.stack([X, X + 1, X + 2])
    (row,) = _rows(tabulate(S(jax.vmap(f))(xs)[1]))[1]
    ran = np.asarray(xs)[1:] + 5
    assert row.split()[2:] == [
        "f32[3,3]",
        "2",
        *(f"{n:.3g}" for n in (ran.mean(), ran.std(), ran.min(), ran.max())),
        f"{np.linalg.norm(ran):.3g}",
        "0%",
    ]
    (row,) = _rows(tabulate(S(f)(X)[1]))[1]
    assert row.split() == ["h", "primal", "f32[3]", "0"]


def test_a_cotangent_without_the_axis_of_the_lanes():
    def f(w, xs):
        def one(x):
            y, _ = sow((w, x), "h")
            go = lambda y: sow(y * x, "in")
            return lax.cond(x[0] > 0, go, lambda y: y, y).sum()

        return jax.vmap(one)(xs).sum()

    xs = jnp.stack([X, X + 1, X + 2])
    got = S(jax.grad(f))(X, xs)[1]
    cotangent = got["in"]["cotangent"]
    row = [r for r in _rows(tabulate(got))[1] if "f32[3,3]" in r and "cotang" in r][-1]
    ran = np.asarray(cotangent)[1:]
    assert row.split()[3] == f"{ran.mean():.3g}"


def test_counts_of_any_size():
    counts = jnp.array([2**31 - 1] * 5 + [3], jnp.int32)
    text = tabulate({"h": {"primal": jnp.ones((6, 2)), "count": counts}})
    assert str(5 * (2**31 - 1) + 3) in text


# What is returned.


def test_is_a_string():
    text = tabulate(S(lambda x: sow(x, "h"))(X)[1])
    assert isinstance(text, str)
    assert str(text) == repr(text) == "".join(text)
    assert type(str(text)) is str
    assert text.splitlines()[0].startswith("name")
    for again in (copy.deepcopy(text), pickle.loads(pickle.dumps(text))):
        assert again == text and again._repr_html_() == text._repr_html_()


def test_html():
    long = "/".join(["a_rather_long_name_of_a_field"] * 6)

    def f(x):
        x = sow(x, "<b>")
        return sow({"k": x / 0}, long)["k"]

    html = tabulate(S(f)(X)[1])._repr_html_()
    assert "&lt;b&gt;" in html and "<b>" not in html
    assert f">{long}<" in html
    for cell in ("primal", "f32[3]", "mean", "not finite", "3/3 &lt;- first"):
        assert f">{cell}<" in html, cell
    assert html.count("<tr") == 3 and html.count("font-weight: bold") == 1


def test_no_numbers_of_the_host():
    got = S(lambda x: sow({"a": x, "b": x}, "h")["a"])(X)[1]
    text = tabulate(got)
    host = jax.tree.map(np.asarray, got)
    assert tabulate(host) == text
    big = {"h": {"primal": np.array([2**40, 2**40])}}
    assert "1.1e+12" in tabulate(big)


def _compilations(caplog, fn):
    caplog.clear()
    with jax.log_compiles(), caplog.at_level("WARNING"):
        fn()
    return [r.message for r in caplog.records if "Finished XLA" in r.message]


def test_no_compilation_for_each_shape(caplog):
    def values(n):
        shapes = [(n + i, i, 2) for i in range(1, 8)]
        return {str(s): {"primal": jnp.asarray(np.ones(s, "f"))} for s in shapes}

    first, second, x = values(3), values(23), jnp.asarray(np.ones((2, 9)))
    tabulate(first)
    assert _compilations(caplog, lambda: summarize(x))
    assert not _compilations(caplog, lambda: tabulate(second))


def test_statistics_of_each_kind_of_array():
    """Of several that share a row, of those that have many, and of all dtypes."""
    rng = np.random.default_rng(0)
    big = rng.normal(size=(2 * 1024 * 1024 + 5,)).astype("f")
    big[7], big[-1], big[5] = np.nan, 12, 0
    arrays = dict(
        a=big,
        b=jnp.asarray(rng.normal(size=(3, 1025)) > 0.3),
        c=jnp.asarray(rng.normal(size=1024), jnp.bfloat16),
        d=rng.normal(size=(2, 3)) + 1j * rng.normal(size=(2, 3)),
        e=rng.integers(-5, 5, (700, 700)),
        f=np.zeros((0, 3)),
        g=jax.device_put(
            rng.normal(size=(8, 999)).astype("f"),
            NamedSharding(jax.make_mesh((4, 2), ("d", "e")), P("d")),
        ),
        h=np.float32(3),
    )
    _, rows = _rows(tabulate({k: {"primal": v} for k, v in arrays.items()}))
    for row, x in zip(rows, arrays.values(), strict=True):
        x = np.asarray(x)
        x = (np.abs(x) if np.iscomplexobj(x) else x).astype(np.float64)
        x = x[np.isfinite(x)]
        if not x.size:
            assert row.split()[1:] == ["primal", "f64[0,3]"]
            continue
        want = x.mean(), x.std(), x.min(), x.max(), np.linalg.norm(x)
        got = [float(n) for n in row.split()[3:8]]
        assert got == pytest.approx(want, rel=6e-3, abs=1e-6)
        assert row.split()[8] == f"{(x == 0).mean():.0%}"
    assert "1/2097157" in rows[0]


def test_of_numbers_under_jit():
    """Those that are there already, in a function that is traced."""
    got = S(lambda x: sow(x, "h"))(X)[1]
    text = tabulate(got)
    shown = []
    jax.jit(lambda x: shown.append(tabulate(got)) or x)(X)
    assert shown == [text]


@pytest.mark.parametrize("type_", ["Auto", "Explicit"])
@pytest.mark.parametrize("spec", [P("d"), P(None, "d")], ids=str)
def test_of_sharded_values_and_counts(type_, spec):
    types = (getattr(jax.sharding.AxisType, type_),)
    mesh = jax.make_mesh((8,), ("d",), axis_types=types)
    xs = jr.normal(jr.key(0), (8, 16))

    def f(x):
        return lax.cond(x[0] > 0, lambda x: sow(x + 5, "h"), lambda x: x, sow(x, "g"))

    want = tabulate(S(jax.vmap(f))(xs)[1])
    got = S(jax.vmap(f))(xs)[1]
    sharded = NamedSharding(mesh, spec)
    for name in got:
        got[name]["primal"] = jax.device_put(got[name]["primal"], sharded)
    assert tabulate(got) == want


_PROCESS = """
import sys, jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize("localhost:" + sys.argv[1], 2, int(sys.argv[2]))
import eqx_sow, jax.numpy as jnp
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((2,), ("d",))
xs = jax.make_array_from_callback(
    (4, 3), jax.NamedSharding(mesh, P("d")), lambda i: jnp.arange(12.0).reshape(4, 3)[i]
)

def one(x):
    h = eqx_sow.sow(jnp.log(x), "h")
    return jax.lax.cond(x[0] > 4, lambda h: eqx_sow.sow(h, "in"), lambda h: h, h)

fn = jax.vmap(one)
for transform in (None, eqx_sow.summarize):
    got = jax.jit(eqx_sow.save_intermediates(fn, transform=transform))(xs)[1]
    if transform is None:
        assert not got["h"]["primal"].is_fully_addressable
    print(eqx_sow.tabulate(got))
    assert "mean" not in got._repr_html_() or transform is not None
"""


@pytest.mark.slow
def test_spread_over_processes():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_PROCESS), str(port), str(i)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
        )
        for i in range(2)
    ]
    outs = [p.communicate(timeout=240) for p in processes]
    assert all(p.returncode == 0 for p in processes), outs
    # Gloo says who it is.
    first, second = (out[out.index("name ") :] for out, _ in outs)
    assert first == second
    assert "f32[4,3]" in first and "1/12 <- first" in first
