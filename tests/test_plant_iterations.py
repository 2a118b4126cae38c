"""`plant(fn, {"h/3": ...})`: one iteration of a loop is planted as if the loop were
written out, with a name for each iteration."""

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_sow import (
    DuplicateSowError,
    plant,
    save_intermediates as S,
    sow,
    SowError,
    UnknownSowError,
)
from jax.sharding import PartitionSpec as P

from .helpers import assert_close
from .tables import under


X = jnp.array([0.3, 0.5])
XS = jnp.stack([X, 2 * X])


def _step(x, i, name="h"):
    return sow(jnp.sin(x) + i, name)


def _by_scan(x):
    return lax.scan(lambda x, i: (_step(x, i), x), x, jnp.arange(4.0))[0].sum()


def _reversed(x):
    step = lambda x, i: (_step(x, i), x)
    return lax.scan(step, x, jnp.arange(4.0), reverse=True)[0].sum()


def _by_fori_loop(x):
    return lax.fori_loop(0, 4, lambda i, x: _step(x, i.astype(x.dtype)), x).sum()


def _checkpointed(x):
    step = jax.checkpoint(lambda x, i: (_step(x, i), x))
    return lax.scan(step, x, jnp.arange(4.0))[0].sum()


def _jitted(x):
    step = jax.jit(lambda x, i: (_step(x, i), x))
    return lax.scan(step, x, jnp.arange(4.0), unroll=2)[0].sum()


def _in_a_branch(x):
    def step(x, i):
        return lax.cond(i >= 0, lambda x: _step(x, i), jnp.cos, x), x

    return lax.scan(step, x, jnp.arange(4.0))[0].sum()


def _unrolled(x, order=range(4)):
    for i in order:
        x = _step(x, i, f"h/{i}")
    return x.sum()


def _unrolled_reversed(x):
    return _unrolled(x, range(3, -1, -1))


LOOPS = {
    "scan": (_by_scan, _unrolled),
    "reversed": (_reversed, _unrolled_reversed),
    "fori_loop": (_by_fori_loop, _unrolled),
    "checkpoint": (_checkpointed, _unrolled),
    "jit": (_jitted, _unrolled),
    "cond": (_in_a_branch, _unrolled),
}
# Not finite, and with no finite gradient, where iteration 2 is not.
ROOT = lambda x: jnp.sqrt(x - 2.5) * 3


@under("eager", "grad-checkpoint", "jit-lanes-value_and_grad")
@pytest.mark.parametrize("loop, unrolled", LOOPS.values(), ids=LOOPS)
def test_as_if_the_loop_were_written_out(loop, unrolled, wrap):
    fn = ROOT if unrolled is _unrolled else jnp.cos
    out = wrap(plant(loop, {"h/2": fn}))(X)
    assert np.isfinite(jax.tree.leaves(out)[0]).all()
    assert_close(out, wrap(plant(unrolled, {"h/2": fn}))(X))


# A primal in a checkpoint that was differentiated cannot be planted at all.
@pytest.mark.parametrize(
    "name, mode",
    [(n, "cotangent") for n in LOOPS]
    + [(n, "primal") for n in LOOPS if n != "checkpoint"],
)
def test_in_a_gradient_computation(name, mode):
    loop, unrolled = LOOPS[name]
    values = {"h/2": lambda x: 10 * x}
    out = plant(jax.vmap(jax.grad(loop)), values, mode=mode)(XS)
    assert_close(out, plant(jax.vmap(jax.grad(unrolled)), values, mode=mode)(XS))


@pytest.mark.parametrize("name", ["scan", "reversed", "cond"])
def test_values(name):
    loop, unrolled = LOOPS[name]

    def planted(fn):
        return lambda x, v: plant(fn, {"h/1": v, "h/2": {"primal": v + 1}})(x)

    got = jax.value_and_grad(planted(loop), 1)(X, X)
    assert_close(got, jax.value_and_grad(planted(unrolled), 1)(X, X))
    got = plant(jax.vmap(loop), {"h/1": XS})(XS)
    assert_close(got, plant(jax.vmap(unrolled), {"h/1": XS})(XS))


def test_several_of_one_name(call):
    # All iterations, of which one is another, and all but that.
    add, triple = lambda x: x + 1, lambda x: 3 * x
    values = {"h/0": triple, "h": add, "h/2": 5 * X}
    expected = {"h/0": triple, "h/1": add, "h/2": 5 * X, "h/3": add}
    out = call(plant(_by_scan, values), X)
    assert_close(out, plant(_unrolled, expected)(X))
    # What is for fewer iterations is not computed where another one counts.
    fixed = {f"h/{i}": X for i in range(3)}
    got = jax.value_and_grad(plant(_by_scan, {"h": ROOT, **fixed}))(X)
    want = jax.value_and_grad(plant(_unrolled, {"h/3": ROOT, **fixed}))(X)
    assert np.isfinite(want[0])
    assert_close(got, want)
    # A name that is spelled out goes before a glob.
    out = plant(_by_scan, {"*/2": jnp.zeros_like, "h/2": jnp.ones_like})(X)
    assert_close(out, plant(_unrolled, {"h/2": jnp.ones_like})(X))


def _nested(x, mark):
    def outer(x, i):
        x = jax.vmap(lambda x: mark(x + i, "lane"))(x)
        return lax.scan(lambda x, j: (mark(jnp.sin(x) + j, "h"), x), x, jnp.arange(2.0))

    return lax.scan(outer, x, jnp.arange(3.0))[0].sum()


def _nested_unrolled(x, mark):
    for i in range(3):
        x = jax.vmap(lambda x, i=i: mark(x + i, f"lane/{i}"))(x)
        for j in range(2):
            x = mark(jnp.sin(x) + j, f"h/{i}/{j}")
    return x.sum()


@pytest.mark.parametrize(
    "values, expected",
    [
        ({"h/1/0": jnp.cos, "lane/2": X}, {"h/1/0": jnp.cos, "lane/2": X}),
        ({"h/1": jnp.cos}, {"h/1/0": jnp.cos, "h/1/1": jnp.cos}),
        ({"h/1": XS}, {"h/1/0": XS[0], "h/1/1": XS[1]}),
        ({"h/1/0": X, "h/1": jnp.cos}, {"h/1/0": X, "h/1/1": jnp.cos}),
        ({"h/1/0": jnp.exp, "h/1": jnp.cos}, {"h/1/0": jnp.exp, "h/1/1": jnp.cos}),
    ],
    ids=["inner", "outer", "value", "both", "two functions"],
)
def test_nested_loops(values, expected):
    loop = lambda x: _nested(x, sow)
    unrolled = lambda x: _nested_unrolled(x, sow)
    got = jax.value_and_grad(plant(loop, values))(X)
    assert_close(got, jax.value_and_grad(plant(unrolled, expected))(X))


def test_it_is_what_is_captured():
    _, got = S(plant(_by_scan, {"h/2": jnp.zeros_like}))(X)
    _, expected = S(plant(_unrolled, {"h/2": jnp.zeros_like}))(X)
    expected = jnp.stack([expected[f"h/{i}"]["primal"] for i in range(4)])
    assert_close(got["h"]["primal"], expected)
    # Entry 2 of what was captured, planted in iteration 2, changes nothing.
    _, got = S(_by_scan)(X)
    assert_close(plant(_by_scan, {"h/2": got["h"]["primal"][2]})(X), _by_scan(X))


class Block(eqx.Module):
    linear: eqx.nn.Linear

    def __init__(self, key):
        self.linear = eqx.nn.Linear(2, 2, key=key)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class Stacked(eqx.Module):
    blocks: Block

    def __call__(self, x):
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        step = lambda x, layer: (eqx.combine(layer, static)(x), None)
        return lax.scan(step, x, arrays)[0]


class Listed(eqx.Module):
    blocks: list[Block]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.slow
def test_a_stack_is_planted_like_a_list():
    keys = jr.split(jr.key(0), 4)
    stacked = Stacked(eqx.filter_vmap(Block)(keys))
    listed = Listed([Block(key) for key in keys])
    values = {"blocks/3": jnp.cos, "blocks/0": X}
    out = plant(stacked, values, capture=Block)(X)
    assert_close(out, plant(listed, values, capture=Block)(X))
    loss = lambda model, x: jnp.sum(model(x) ** 2)
    values = {"**/blocks/2": lambda g: 5 * g}
    planted = plant(eqx.filter_grad(loss), values, capture=Block, mode="cotangent")
    expected = [b.linear.weight for b in planted(listed, X).blocks]
    assert_close(planted(stacked, X).blocks.linear.weight, jnp.stack(expected))


def test_a_name_that_is_there_goes_before_an_iteration():
    def fn(x):
        x, _ = lax.scan(lambda x, _: (sow(x + 1, "h"), None), x, length=3)
        return sow(x, "h/1")

    assert_close(plant(fn, {"h/1": jnp.zeros_like})(X), 0 * X)
    assert_close(plant(fn, {"h/2": jnp.zeros_like})(X), 0 * X)
    assert_close(plant(fn, {"h/0": jnp.zeros_like})(X), 0 * X + 2)


def test_an_index_that_is_traced():
    @jax.jit
    def without(i):
        zero = lambda value, index: jnp.where(index[0] == i, jnp.zeros(2), value)
        return plant(_by_scan, {"h": zero}, with_index=True)(X)

    for i in range(4):
        expected = plant(_by_scan, {f"h/{i}": jnp.zeros_like})(X)
        assert_close(without(i), expected)


def test_leaves_that_are_no_jax_arrays():
    def fn(x):
        def step(x, i):
            value = sow({"x": x + i, "at": np.array([1, 0]), "fn": jnp.cos}, "h")
            return value["fn"](value["x"])[value["at"]], None

        return lax.scan(step, x, jnp.arange(3.0))[0]

    def swap(value):
        return {**value, "x": -value["x"]}

    by_hand = X
    for i in range(3):
        x = by_hand + i
        by_hand = jnp.cos(-x if i == 1 else x)[np.array([1, 0])]
    assert_close(plant(fn, {"h/1": swap})(X), by_hand)
    by_hand = X
    for i in range(3):
        by_hand = jnp.cos(by_hand + i)[np.array([0, 1] if i == 1 else [1, 0])]
    turned = plant(fn, {"h/1": lambda v: {**v, "at": v["at"][::-1]}})
    assert_close(turned(X), by_hand)


def test_in_a_while_loop_inside_or_outside(call):
    def inside(x):
        def outer(x, i):
            grow = lambda x: sow(x + 1 + i, "h")
            return lax.while_loop(lambda x: x.sum() < 5 * (i + 1), grow, x), x

        return lax.scan(outer, x, jnp.arange(3.0))[0]

    def by_hand(x):
        for i in range(3):
            while x.sum() < 5 * (i + 1):
                x = x + 1 + i
                x = 2 * x if i == 1 else x
        return x

    assert_close(call(plant(inside, {"h/1": lambda x: 2 * x}), X), by_hand(X))
    fn = lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: sow(x + 1, "h"), x)
    with pytest.raises(
        UnknownSowError, match="no such iteration.* not in a loop of known"
    ):
        plant(fn, {"h/1": jnp.cos})(X)


def test_on_a_mesh(mesh):
    xs = jnp.arange(16.0).reshape(8, 2)
    local = lambda x: lax.scan(lambda x, i: (_step(x, i), None), x, jnp.arange(4.0))[0]
    spread = jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d"))

    def unrolled(x):
        for i in range(4):
            x = _step(x, i, f"h/{i}")
        return x

    for value in (jnp.zeros_like, jnp.cos):
        out = plant(spread, {"h/2": value})(xs)
        assert_close(out, plant(unrolled, {"h/2": value})(xs))
    values = jnp.arange(16.0).reshape(8, 1, 2)
    out = plant(spread, {"h/2": values})(xs)
    assert_close(out, plant(unrolled, {"h/2": values[:, 0]})(xs))


@pytest.mark.parametrize(
    "values, error, match",
    [
        (
            {"h/4": jnp.cos},
            UnknownSowError,
            "no such iteration of 'h': they are 'h/0' to 'h/3'",
        ),
        (
            {"h/1/0": jnp.cos},
            UnknownSowError,
            "no such iteration of 'h': they are 'h/0' to 'h/3'",
        ),
        ({"g/1": jnp.cos}, UnknownSowError, "'g/1' selects no mark"),
        ({"h/x": jnp.cos}, UnknownSowError, "'h/x' selects no mark"),
        ({"h/-5": jnp.cos}, UnknownSowError, "no such iteration"),
        ({"h/1": jnp.ones(3)}, SowError, r"float32\[3\] where float32\[2\]"),
        ({"h/1": jnp.ones((4, 2))}, SowError, r"float32\[4, 2\] where"),
    ],
)
def test_errors(values, error, match):
    with pytest.raises(error, match=match):
        plant(_by_scan, values)(X)


def test_an_iteration_of_what_is_the_same_in_each():
    def fn(x, w):
        step = lambda x, _: (x * sow(jnp.sin(w), "h"), None)
        return lax.scan(step, x, length=3)[0].sum()

    planted = lambda fn: plant(fn, {"h/1": jnp.cos})
    for got in (planted(jax.grad(fn))(X, X), jax.grad(planted(fn))(X, X)):
        assert_close(got, jnp.sin(X) ** 2 * jnp.cos(jnp.sin(X)))
    # The cotangent of iteration 1 is that of the program without.
    ones = {"h/1": jnp.ones_like}
    got = plant(jax.grad(fn, 1), ones, mode="cotangent")(X, X)
    assert_close(got, jnp.cos(X) * (2 * X * jnp.sin(X) ** 2 + 1))


def test_a_name_in_several_places():
    def fn(x, step=_step):
        body = lambda x, i: (step(step(x, i), i), None)
        x, _ = lax.scan(body, x, jnp.arange(3.0))
        return lax.scan(body, x, jnp.arange(3.0))[0]

    def by_hand(x, i):
        x = jnp.sin(x) + i
        return jnp.where(i == 1, jnp.cos(x), x)

    # A function is called at each of them, as without an index.
    assert_close(plant(fn, {"h/1": jnp.cos})(X), fn(X, by_hand))
    with pytest.raises(DuplicateSowError):
        plant(fn, {"h/1": jnp.ones(2)})(X)


def _three_loops(x, mark):
    """Of 3 and 5 iterations, and one of 3 in one of 2."""
    for n in (3, 5):
        x = lax.scan(lambda x, _: (mark(jnp.sin(x)), None), x, length=n)[0]
    inner = lambda x, _: (mark(jnp.cos(x)), None)
    outer = lambda x, _: (lax.scan(inner, x, length=3)[0], None)
    return lax.scan(outer, x, length=2)[0]


def _three_loops_unrolled(x, mark):
    for loop, n in (("a", 3), ("b", 5)):
        for i in range(n):
            x = mark(jnp.sin(x), f"{loop}/{i}")
    for i in range(2):
        for j in range(3):
            x = mark(jnp.cos(x), f"c/{i}/{j}")
    return x


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "values, expected",
    [
        ({"h/4": 5 * X}, {"b/4": 5 * X}),
        ({"h/2": (X, 2 * X)}, {"a/2": X, "b/2": 2 * X}),
        ({"h/2": (None, 2 * X)}, {"b/2": 2 * X}),
        (
            {"h/1": (X, None, jnp.stack([X, XS[1], 3 * X]))},
            {"a/1": X, "c/1/0": X, "c/1/1": XS[1], "c/1/2": 3 * X},
        ),
        ({"h/1/2": X}, {"c/1/2": X}),
        ({"h/1/2": jnp.exp, "h/4": X}, {"c/1/2": jnp.exp, "b/4": X}),
        (
            {"h/1": jnp.exp},
            {name: jnp.exp for name in ("a/1", "b/1", "c/1/0", "c/1/1", "c/1/2")},
        ),
    ],
)
def test_iterations_that_not_every_run_has(values, expected):
    def mark(x, name):
        value = expected.get(name, x)
        return value(x) if callable(value) else value

    marked = lambda x: _three_loops(x, lambda x: sow(x, "h"))
    run = lambda fn: jax.value_and_grad(lambda x: fn(x).sum())(X)
    want = run(lambda x: _three_loops_unrolled(x, mark))
    assert_close(run(plant(marked, values)), want)


def test_a_value_for_an_iteration_that_two_runs_have():
    marked = lambda x: _three_loops(x, lambda x: sow(x, "h"))
    with pytest.raises(DuplicateSowError, match="'h' runs 2 times"):
        plant(marked, {"h/2": X})(X)
    with pytest.raises(UnknownSowError, match="no such iteration"):
        plant(marked, {"h/5": X})(X)
