"""`plant(..., with_index=True)`: a function that knows its iteration is, in a loop that
is written out, a function for each iteration."""

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_sow import batched, plant, save_intermediates as S, sow, SowError
from jax.sharding import PartitionSpec as P

from .helpers import assert_close
from .tables import under
from .test_plant_iterations import _nested, _nested_unrolled, LOOPS


X = jnp.array([0.3, 0.5])
XS = jnp.stack([X, 2 * X])


def _scale(value, index):
    factor = 1.5
    for k, i in enumerate(index):
        factor = factor + 3**k * jnp.asarray(i, jnp.float32)
    return factor * value


def _written_out(names, values=_scale):
    """Of names with their iterations at the end."""
    return {
        name: lambda v, at=tuple(map(int, name.split("/")[1:])): values(v, at)
        for name in names
    }


NAMES = [f"h/{i}" for i in range(4)]


@pytest.mark.parametrize(
    "compare", [lambda i: i == 2, lambda i: i != 2, lambda i: jnp.int32(2) == i]
)
def test_an_index_that_is_compared_as_if_it_were_a_number(compare):
    loop, _ = LOOPS["scan"]
    patch = lambda x, index: jnp.where(compare(index), 0, x)
    with pytest.raises(SowError, match=r"it is a tuple .* Write `index\[0\] == "):
        plant(loop, {"h": patch}, with_index=True)(X)


def test_an_index_is_a_tuple():
    seen = []

    def patch(x, index):
        assert isinstance(index, tuple) and index == tuple(index)
        ((i,), (j,)) = index, jax.jit(lambda index: index)(index)
        seen.append(jax.tree.map(jnp.shape, index))
        return jnp.where((i == 2) & (j == 2), 0 * x, x)

    loop, unrolled = LOOPS["scan"]
    got = plant(loop, {"h": patch}, with_index=True)(X)
    assert_close(got, plant(unrolled, {"h/2": jnp.zeros_like})(X))
    assert seen[0] == ((),)


@under("eager", "grad-checkpoint", "jit-lanes-value_and_grad", "jacfwd-jit")
@pytest.mark.parametrize("loop, unrolled", LOOPS.values(), ids=LOOPS)
def test_as_if_the_loop_were_written_out(loop, unrolled, wrap):
    out = wrap(plant(loop, {"h": _scale}, with_index=True))(X)
    assert_close(out, wrap(plant(unrolled, _written_out(NAMES)))(X))


@pytest.mark.parametrize(
    "name, mode",
    [(n, "cotangent") for n in LOOPS]
    + [(n, "primal") for n in LOOPS if n != "checkpoint"],
)
@under("grad", "vmap-grad", argument="grad")
def test_in_a_gradient_computation(name, mode, grad):
    loop, unrolled = LOOPS[name]
    x = X if grad is jax.grad else XS
    out = plant(grad(loop), {"h": _scale}, mode=mode, with_index=True)(x)
    assert_close(out, plant(grad(unrolled), _written_out(NAMES), mode=mode)(x))


@under("eager", "jit", "value_and_grad")
def test_nested_loops(wrap):
    got = wrap(plant(lambda x: _nested(x, sow), {"*": _scale}, with_index=True))(X)
    names = [f"h/{i}/{j}" for i in range(3) for j in range(2)]
    names += [f"lane/{i}" for i in range(3)]
    expected = plant(lambda x: _nested_unrolled(x, sow), _written_out(names))
    assert_close(got, wrap(expected)(X))


def test_a_traced_layer_compiles_once():
    loop, unrolled = LOOPS["scan"]
    traces = []

    def patched(at, x):
        def here(value, index):
            traces.append(None)
            (i,) = index
            assert i.dtype == jnp.int32 and i.shape == ()
            return jnp.where(i == at, 7 * value, value)

        return plant(loop, {"h": here}, with_index=True)(x)

    expected = [plant(unrolled, {f"h/{i}": lambda v: 7 * v})(X) for i in range(4)]
    layers = jnp.arange(4)
    assert_close(jax.vmap(patched, (0, None))(layers, X), jnp.stack(expected))
    assert_close(lax.map(lambda i: patched(i, X), layers), jnp.stack(expected))
    compiled = jax.jit(patched)
    compiled(0, X)
    traces.clear()
    assert_close([compiled(i, X) for i in range(4)], expected)
    assert not traces


def test_one_iteration_and_values():
    # What is for one iteration knows it as well, and a value knows of none.
    loop, unrolled = LOOPS["scan"]
    values = {"h/2": _scale, "h/1": X}
    got = plant(loop, values, with_index=True)(X)
    expected = plant(unrolled, {"h/1": X, "h/2": lambda v: _scale(v, (2,))})(X)
    assert_close(got, expected)
    outside = lambda x: sow(jnp.sin(x), "h")
    see = lambda value, index: value if index == () else None
    assert_close(plant(outside, {"h": see}, with_index=True)(X), jnp.sin(X))


def test_while_loops_count_for_nothing():
    def fn(x):
        grow = lambda x: sow(x + 1, "h")
        step = lambda x, i: (
            lax.while_loop(lambda x: x.sum() < 4 * (i + 1), grow, x),
            i,
        )
        return lax.scan(step, x, jnp.arange(3.0))[0]

    x = X
    for i in range(3):
        while x.sum() < 4 * (i + 1):
            x = (x + 1) * (1.5 + i)
    assert_close(plant(fn, {"h": _scale}, with_index=True)(X), x)


@pytest.mark.parametrize(
    "fn, error", [(lambda x, i: i[0] * x, IndexError), (lambda x: x, TypeError)]
)
def test_errors_name_the_sow_and_say_what_the_index_is(fn, error):
    body = lambda x: sow(2 * x, "h")
    loop = lambda x: lax.while_loop(lambda x: x[0] < 9, body, x)
    with pytest.raises(error) as e:
        plant(loop, {"h": fn}, with_index=True)(X)
    said = "\n".join(e.value.__notes__)
    for part in ("'h'", "test_plant_index.py", "`(value, index)`", "has length 0 here"):
        assert part in said


def test_it_is_what_is_captured():
    loop, unrolled = LOOPS["scan"]
    _, got = S(plant(loop, {"h": _scale}, with_index=True))(X)
    _, expected = S(plant(unrolled, _written_out(NAMES)))(X)
    expected = jnp.stack([expected[n]["primal"] for n in NAMES])
    assert_close(got["h"]["primal"], expected)


def test_on_a_mesh(mesh):
    xs = jnp.arange(16.0).reshape(8, 2)
    step = lambda x, i: (sow(jnp.sin(x) + i, "h"), None)
    local = lambda x: lax.scan(step, x, jnp.arange(4.0))[0]
    spread = jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    out = plant(spread, {"h": _scale}, with_index=True)(xs)
    assert_close(out, plant(local, {"h": _scale}, with_index=True)(xs))
    # A loop around the mesh.
    around = lambda x: lax.scan(lambda x, i: (spread(x + i), None), x, jnp.arange(2.0))[
        0
    ]
    plain = lambda x: lax.scan(lambda x, i: (local(x + i), None), x, jnp.arange(2.0))[0]
    out = plant(around, {"h": _scale}, with_index=True)(xs)
    assert_close(out, plant(plain, {"h": _scale}, with_index=True)(xs))


def test_a_value_that_is_the_same_in_each_iteration():
    def fn(x, w):
        step = lambda x, _: (x * sow(jnp.sin(w), "h"), None)
        return lax.scan(step, x, length=3)[0].sum()

    planted = lambda fn: plant(fn, {"h": _scale}, with_index=True)
    for got in (planted(jax.grad(fn))(X, X), jax.grad(planted(fn))(X, X)):
        assert_close(got, jnp.sin(X) ** 3 * np.prod([1.5, 2.5, 3.5]))


def test_without_an_index_nothing_is_added():
    loop, _ = LOOPS["scan"]
    count = lambda fn, **options: str(
        jax.make_jaxpr(plant(loop, {"h": fn}, **options))(X)
    ).count("iota")
    plain = str(jax.make_jaxpr(loop)(X)).count("iota")
    assert count(jnp.cos) == plain
    assert count(_scale, with_index=True) == plain + 1


# --- lists of layers ---
class Block(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return jnp.sin(self.w * x)


WEIGHTS = jnp.array([0.5, -1.5, 2.5])
BLOCKS = [Block(w) for w in WEIGHTS]


def _one_by_one(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def _one_scan(blocks, x):
    return lax.scan(lambda x, block: (block(x), None), x, blocks)[0]


def _in_time(layers):
    """With a loop around the layers."""
    return lambda blocks, x: lax.scan(lambda x, _: (layers(blocks, x), 0), x, length=2)[
        0
    ]


def _times(blocks, x):
    """With a loop in each layer."""
    for block in blocks:
        x = lax.scan(lambda x, _, block=block: (block(x), None), x, length=2)[0]
    return x


def _times_in_a_scan(blocks, x):
    step = lambda x, block: lax.scan(lambda x, _: (block(x), None), x, length=2)
    return lax.scan(step, x, blocks)[0]


STACK = Block(WEIGHTS)
MODELS = {
    "layers": (_one_by_one, _one_scan, 1),
    "layers in time": (_in_time(_one_by_one), _in_time(_one_scan), 2),
    "time in layers": (_times, _times_in_a_scan, 2),
}


@under("eager", "jit", "grad")
@pytest.mark.parametrize("pattern", ["blocks/*", "*", "**", "blocks/[01]"])
@pytest.mark.parametrize("model", MODELS)
def test_a_list_has_the_index_of_a_stack(model, pattern, wrap):
    in_list, in_stack, n = MODELS[model]
    lengths = []

    def patch(value, index):
        lengths.append(len(index))
        return _scale(value, index)

    def run(fn, blocks):
        planted = plant(fn, {pattern: patch}, capture=True, with_index=True)
        return wrap(lambda x: planted(blocks, x).sum())(X.sum())

    assert_close(run(in_list, BLOCKS), run(in_stack, STACK))
    assert set(lengths) == {n}


def test_lists_and_stacks_in_one_another():
    stages = [Block(WEIGHTS), Block(-WEIGHTS)]
    as_lists = [[Block(w) for w in stage.w] for stage in stages]
    as_stacks = Block(jnp.stack([stage.w for stage in stages]))

    def of_stacks(stages, x):
        for stage in stages:
            x = _one_scan(stage, x)
        return x

    def of_lists(stages, x):
        for stage in stages:
            x = _one_by_one(stage, x)
        return x

    def all_stacks(stages, x):
        return lax.scan(lambda x, stage: (_one_scan(stage, x), None), x, stages)[0]

    def run(fn, stages):
        planted = {"stages/*/*": _scale}
        return plant(fn, planted, capture=True, with_index=True)(stages, X)

    want = run(all_stacks, as_stacks)
    assert_close(run(of_lists, as_lists), want)
    assert_close(run(of_stacks, stages), want)


ALL = slice(None)
# What NumPy would write for the layers `stages/0/layers/0` to `stages/1/layers/2`.
OF_TWO_LISTS = {
    "stages/*/layers/*": (ALL, ALL),
    "stages/1/layers/*": (1, ALL),
    "stages/[1]/layers/*": ([1], ALL),
    "stages/-1/layers/*": (1, ALL),
    "stages/*/layers/-1": (ALL, 2),
    "stages/1/**": (1, ALL),
    "stages/**/[2]": (ALL, [2]),
    "model/*/*/*/2": (ALL, 2),
    "model/**": (ALL, ALL),
    "**": (ALL, ALL),
    "**/layers/*": (ALL, ALL),
    "**/layers/2": (ALL, 2),
    "**/stages/1/**": (1, ALL),
    "**/-1/layers/**": (1, ALL),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("pattern", OF_TWO_LISTS)
def test_an_index_for_each_axis_of_what_is_looked_up(pattern):
    class Model(eqx.Module):
        stages: list

        def __call__(self, x):
            return [block(x) for stage in self.stages for block in stage["layers"]]

    blocks = [Block(i + WEIGHTS[0]) for i in range(6)]
    model = Model([{"layers": blocks[:3]}, {"layers": blocks[3:]}])
    run = lambda model, x: model(x)
    seen = []
    noted = lambda value, index: seen.append(tuple(map(int, index))) or value
    values = {pattern: noted}
    outs = plant(run, values, capture=Block, with_index=True)(model, X)
    of_layers = jnp.stack(outs).reshape(2, 3, 2)[OF_TWO_LISTS[pattern]]
    _, intermediates = S(run, capture=Block)(model, X)
    assert_close(intermediates[pattern]["primal"], of_layers)
    # Which layer it is, along each of these axes.
    at = np.stack(np.indices((2, 3)), -1)[OF_TWO_LISTS[pattern]]
    varies = [k for k, i in enumerate(OF_TWO_LISTS[pattern]) if i not in (1, 2)]
    assert seen == [tuple(x) for x in at[..., varies].reshape(-1, len(varies)).tolist()]


def test_several_runs_in_a_list():
    def twice(blocks, x):
        return _one_by_one(blocks, _one_by_one(blocks, x))

    planted = {"blocks/*": _scale}
    got = plant(twice, planted, capture=True, with_index=True)(BLOCKS, X)
    in_stack = lambda blocks, x: _one_scan(blocks, _one_scan(blocks, x))
    assert_close(got, plant(in_stack, planted, capture=True, with_index=True)(STACK, X))


def test_all_lanes_of_a_layer_in_a_list():
    lanes = lambda blocks, xs: jax.vmap(lambda x: _one_by_one(blocks, x))(xs)
    center = lambda v, index: v - v.mean(0, keepdims=True) * jnp.float32(index[0])
    by_hand = XS
    for i, block in enumerate(BLOCKS):
        by_hand = block(by_hand)
        by_hand = by_hand - by_hand.mean(0, keepdims=True) * i
    planted = {"blocks/*": batched(center)}
    got = plant(lanes, planted, capture=True, with_index=True)(BLOCKS, XS)
    assert_close(got, by_hand)


def test_a_sweep_over_a_list_compiles_once():
    traces = []

    @jax.jit
    def without(layer, x):
        traces.append(None)
        skip = lambda value, index: jnp.where(index[0] == layer, 0.1, value)
        return plant(_one_by_one, {"blocks/*": skip}, capture=True, with_index=True)(
            BLOCKS, x
        )

    for i in range(3):
        by_hand = {f"blocks/{i}": lambda v: jnp.full_like(v, 0.1)}
        assert_close(
            without(i, X), plant(_one_by_one, by_hand, capture=True)(BLOCKS, X)
        )
    assert len(traces) == 1


def test_a_name_that_is_spelled_out_has_no_index_of_the_list():
    def patch(value, index):
        assert index == ()
        return 2 * value

    got = plant(_one_by_one, {"blocks/1": patch}, capture=True, with_index=True)
    want = plant(_one_by_one, {"blocks/1": lambda v: 2 * v}, capture=True)
    assert_close(got(BLOCKS, X), want(BLOCKS, X))


def test_a_list_of_one_layer_in_a_loop():
    fn = _in_time(_one_by_one)
    with pytest.raises(SowError, match="'blocks/0' is the only layer of its list"):
        plant(fn, {"blocks/*": _scale}, capture=True, with_index=True)(BLOCKS[:1], X)


def test_a_loop_that_another_list_is_in_too():
    """Each layer of `a` has a loop of its own, which `b` is in, too."""

    def fn(mark, x, i, k):
        return jnp.sin(mark(jnp.cos(mark(x, f"a/{i}", k)), f"b/{i}", k))

    def looped(x):
        for i in range(2):
            mark = lambda x, name, _: sow(x, name)
            step = lambda x, k, i=i, mark=mark: (fn(mark, x, i, k), None)
            x, _ = lax.scan(step, x, jnp.arange(3))
        return x

    def by_hand(x):
        for i, k in np.ndindex(2, 3):
            of_a = lambda x, name, k: (
                _scale(x, (int(name[2:]), k)) if "a" in name else x
            )
            x = fn(of_a, x, i, k)
        return x

    assert_close(plant(looped, {"a/*": _scale}, with_index=True)(X), by_hand(X))


def test_a_list_in_different_loops():
    fn = lambda blocks, x: _in_time(_one_by_one)(blocks, _one_by_one(blocks, x))
    with pytest.raises(SowError, match="different loops around the list of layers"):
        plant(fn, {"blocks/*": _scale}, capture=True, with_index=True)(BLOCKS, X)
    # What is one function for each name gets the loops alone.
    each = {f"blocks/{i}": _scale for i in range(3)}
    plant(fn, each, capture=True, with_index=True)(BLOCKS, X)


def test_tuples_in_a_list():
    # Of one for each run, and a value with a function in it.
    twice = lambda blocks, x: _one_by_one(blocks, _one_by_one(blocks, x))
    each = {"blocks/*": (_scale, None)}
    got = plant(twice, each, capture=True, with_index=True)(BLOCKS, X)
    first = plant(_one_by_one, {"blocks/*": _scale}, capture=True, with_index=True)
    assert_close(got, _one_by_one(BLOCKS, first(BLOCKS, X)))
    fn = lambda x: sow((x, jnp.tanh), "h/0")[0]
    assert_close(plant(fn, {"h/*": (XS[1], jnp.tanh)}, with_index=True)(X), XS[1])
