"""`names="h/3"`: one iteration of a loop is captured as if the loop were written out,
with a name for each iteration; in a stack by the names of a list."""

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_sow import (
    Append,
    batched,
    Buffer,
    Fold,
    Last,
    plant,
    save_intermediates as S,
    sow,
    SowError,
    SowTypeError,
    summarize,
    tap,
    UnknownSowError,
)
from eqx_sow._names import in_loops
from eqx_sow._selection import Selection
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from .helpers import assert_close
from .tables import REDUCERS, under
from .test_plant_iterations import _nested, _nested_unrolled, LOOPS
from .test_results import sow_in_stack


X = jnp.array([0.3, 0.5])
XS = jnp.stack([X, 2 * X])
wraps = under("eager", "filter_jit", "grad", "grad-checkpoint", "lanes-grad")


@wraps
@pytest.mark.parametrize("loop, unrolled", LOOPS.values(), ids=LOOPS)
@under("eager", "jit", argument="jit")
def test_as_if_the_loop_were_written_out(loop, unrolled, wrap, jit):
    names = ["h/2", "h/1"]
    out, got = jit(S(wrap(loop), names=names))(X)
    expected_out, expected = S(wrap(unrolled), names=names)(X)
    assert set(got) == set(names)
    assert_close(out, expected_out)
    for name in names:
        count = got[name].pop("count", None)  # of the branch
        assert count is None or int(np.max(count)) == 1
        assert_close(got[name], expected[name])


def test_all_and_one_and_from_the_end():
    loop, _ = LOOPS["scan"]
    whole = S(jax.grad(loop))(X)[1]["h"]
    _, got = S(jax.grad(loop), names=["h", "h/1", "h/-1", "*/2"])(X)
    assert set(got) == {"h", "h/1", "h/-1", "h/2"}
    for mode in ("primal", "cotangent"):
        assert_close(got["h"][mode], whole[mode])
        for name, i in (("h/1", 1), ("h/2", 2), ("h/-1", 3)):
            assert_close(got[name][mode], whole[mode][i])
    assert got.axes("h") == ("loop",) and got.axes("h/1") == ()


@under("eager", "grad", argument="derive")
def test_nested_loops(derive):
    loop = derive(lambda x: _nested(x, sow))
    unrolled = derive(lambda x: _nested_unrolled(x, sow))
    _, got = S(loop, names=["h/1", "h/2/0", "lane/-1"])(X)
    _, expected = S(unrolled)(X)
    for mode in got["h/1"]:
        inner = [expected[f"h/1/{j}"][mode] for j in range(2)]
        assert_close(got["h/1"][mode], jnp.stack(inner))
        assert_close(got["h/2/0"][mode], expected["h/2/0"][mode])
        assert_close(got["lane/-1"][mode], expected["lane/2"][mode])
    assert got.axes("h/1") == ("loop",)


def _stack(x, places=(1,)):
    mark = lambda x: sow_in_stack(x, "blocks/*/attn", places)
    return lax.scan(lambda x, w: (mark(jnp.sin(w * x)), None), x, 1 + jnp.arange(4.0))[
        0
    ]


def _list(x):
    for i in range(4):
        x = sow(jnp.sin((1.0 + i) * x), f"blocks/{i}/attn")
    return x


def _loss(fn):
    return lambda x: jnp.cos(fn(x)).sum()


@wraps
def test_a_stack_goes_by_the_names_of_a_list(wrap):
    for pattern in (
        "blocks/2/attn",
        ["blocks/0/attn", "blocks/3/attn"],
        "*/1/*",
        "**/1/**",
    ):
        _, got = S(wrap(_loss(_stack)), names=pattern)(X)
        _, expected = S(wrap(_loss(_list)), names=pattern)(X)
        assert_close(dict(got), dict(expected))
    _, got = S(wrap(_loss(_stack)), names="blocks/*/attn")(X)
    assert list(got) == ["blocks/*/attn"]
    # In a loop over batches all batches have that layer.
    steps = lambda fn: lambda xs: lax.map(wrap(_loss(fn)), xs)
    of_batch = lambda x: _stack(x, (None, 1))
    xs = jnp.stack([X, 3 * X, jnp.cos(X)])
    _, got = S(steps(of_batch), names="blocks/-2/attn")(xs)
    _, expected = S(steps(_list), names="blocks/2/attn")(xs)
    assert_close(got["blocks/-2/attn"], expected["blocks/2/attn"])
    assert set(got.axes("blocks/-2/attn")) <= {"loop", "vmap"}


def test_a_stack_is_planted_by_the_names_of_a_list():
    for values in (
        {"blocks/2/attn": jnp.cos, "blocks/0/attn": X},
        {"blocks/*/attn": jnp.cos},
        {"*/3/*": jnp.cos, "blocks/3/attn": jnp.exp},
    ):
        assert_close(plant(_stack, values)(X), plant(_list, values)(X))
    last = {"blocks/-1/attn": jnp.exp}
    expected = plant(_list, {"blocks/3/attn": jnp.exp})
    assert_close(plant(_stack, last)(X), expected(X))
    steps = lambda fn: lambda xs: lax.map(fn, xs)
    of_batch = lambda x: _stack(x, (None, 1))
    for value in (jnp.exp, 2 * XS):
        got = plant(steps(of_batch), {"blocks/3/attn": value})(XS)
        assert_close(got, plant(steps(_list), {"blocks/3/attn": value})(XS))
    _, layer = S(_stack, names="blocks/1/attn")(X)
    assert_close(plant(_stack, layer)(X), _stack(X))


@pytest.mark.parametrize("listen", [S, lambda f, names: plant(f, {names: jnp.cos})])
def test_the_index_stands_where_a_list_has_it(listen):
    with pytest.raises(UnknownSowError, match="'blocks/0/attn' to 'blocks/3/attn'"):
        listen(_stack, names="blocks/*/attn/2")(X)
    with pytest.raises(UnknownSowError, match="are 'blocks/0/attn' to 'blocks/3/attn'"):
        listen(_stack, names="blocks/4/attn")(X)


def test_an_iteration_in_other_options():
    spec = Float[Array, "2"]
    for option, x in dict(reduce=Last(), transform=jnp.sum, spec=spec).items():
        for pattern in ("blocks/2/attn", "blocks/-1/attn", "blocks/[12]/attn"):
            for names in (None, "blocks/*/attn", "blocks/0/attn"):
                with pytest.raises(UnknownSowError) as e:
                    S(_stack, names=names, **{option: {pattern: x}})(X)
                assert f"asks for it: pass `names={pattern!r}`, too." in str(e.value)
            # The remedy.
            _, got = S(_stack, names=pattern, **{option: {pattern: x}})(X)
            shape = () if option == "transform" else (2,)
            assert {modes["primal"].shape for modes in got.values()} == {shape}
        with pytest.raises(UnknownSowError, match="are one value: write 'h'"):
            S(LOOPS["scan"][0], **{option: {"h/*": x}})(X)


@under(of=REDUCERS, argument="row")
def test_a_reducer_of_all_layers(row):
    every = "blocks/*/attn"
    for fn in (_stack, jax.grad(_loss(_stack))):
        _, got = S(fn, reduce={every: row.reducer})(X)
        for mode, xs in S(fn)(X)[1][every].items():
            # Each layer runs once.
            each = [row.by_hand([x], 0 * x) for x in xs]
            want = jax.tree.map(lambda *xs: np.stack(xs), *each)
            assert_close(got[every][mode], want)


def test_all_layers_in_options():
    every = "blocks/*/attn"
    # Globs go in their order, and the name of a stack is one, as in a list.
    fold, last = Fold(jnp.zeros(2), lambda acc, h: acc + 2 * h), Last()
    x = S(_stack)(X)[1]["blocks/*/attn"]["primal"]
    for reduce, expected in (
        ({"**/attn": last, every: fold}, x),
        ({every: fold, "**": last}, 2 * x),
        ({"**": fold, "**/attn": last}, 2 * x),
    ):
        _, got = S(_stack, reduce=reduce)(X)
        assert_close(got["blocks/*/attn"]["primal"], expected)
    for transform in ({"**": jnp.max, every: jnp.sum}, {every: jnp.sum, "**": jnp.max}):
        _, got = S(_stack, transform=transform)(X)
        _, expected = S(_list, transform=transform)(X)
        assert_close(got[every]["primal"], expected[every]["primal"])
    S(_stack, spec={every: Float[Array, "4 2"]})(X)
    with pytest.raises(SowTypeError, match=r"blocks/\*/attn"):
        S(_stack, spec={every: Float[Array, "4 3"]})(X)


def test_reducers_and_transforms():
    train = lambda xs: lax.map(lambda x: _stack(x, (None, 1)), xs)
    _, layers = S(train)(XS)
    layer = layers["blocks/*/attn"]["primal"][:, 2]
    name = "blocks/2/attn"
    for options, expected in (
        (dict(reduce=Last()), layer[-1]),
        (dict(reduce=Fold(jnp.zeros(2), jnp.add)), layer.sum(0)),
        (dict(transform={"blocks/*/attn": jnp.sum}), layer.sum(-1)),
        (dict(transform={name: jnp.sum}, reduce={name: Last()}), layer[-1].sum()),
        (dict(transform=lambda x: summarize(x).max), layer.max(-1)),
    ):
        _, got = S(train, names=name, **options)(XS)
        assert_close(got[name]["primal"], expected)
        # A glob for the others, before or after it, changes nothing.
        transform = options.get("transform")
        if isinstance(transform, dict) and name in transform:
            for both in ({**transform, "**": jnp.max}, {"**": jnp.max, **transform}):
                _, got = S(train, names=name, **{**options, "transform": both})(XS)
                assert_close(got[name]["primal"], expected)
    _, got = S(jax.vmap(_stack), names=name, transform=batched(jnp.sum))(XS)
    assert_close(got[name]["primal"], layer.sum())


def test_one_layer_of_what_was_reduced_over_other_loops():
    """The loop that is left is the one that has its index in the name."""
    train = lambda xs: lax.map(lambda x: _stack(x, (None, 1)), xs)
    twice = lambda xs: lax.map(
        lambda x: lax.map(lambda x: _stack(x, (None,) * 2 + (1,)), x), xs
    )
    every = "blocks/*/attn"
    for fn, xs in ((train, XS), (twice, XS[None])):
        _, got = S(fn, reduce={every: Last()})(xs)
        whole = S(_stack)(XS[-1])[1][every]["primal"]
        assert list(got.unstack()) == [f"blocks/{i}/attn" for i in range(4)]
        for i in range(4):
            assert_close(got[f"blocks/{i}/attn"]["primal"], whole[i])


@wraps
@pytest.mark.parametrize("loop", [f for f, _ in LOOPS.values()], ids=LOOPS)
def test_tap(loop, wrap):
    events = []
    names = ["h/1", "h/-1"]
    out = tap(wrap(loop), events.append, names=names)(X)
    expected, got = S(wrap(loop), names=names)(X)
    jax.effects_barrier()
    assert_close(out, expected)
    seen = {(e.name, e.mode): e for e in events}
    assert len(seen) == len(events) and all(e.count == 0 for e in events)
    there = {(n, m) for n, modes in got.items() for m in modes if m != "count"}
    assert set(seen) == there
    for (name, mode), event in seen.items():
        assert_close(event.value, np.asarray(got[name][mode]))


def test_tap_with_a_transform_of_one_iteration():
    events = []
    by_name = {"blocks/2/attn": lambda x: x[0]}
    tap(_stack, events.append, names="blocks/2/attn", transform=by_name)(X)
    jax.effects_barrier()
    (event,) = events
    expected = S(_stack)(X)[1]["blocks/*/attn"]["primal"][2, 0]
    assert_close(event.value, np.asarray(expected))


def test_tap_of_a_stack_and_of_nested_loops():
    events = []
    tap(_stack, events.append, names=["blocks/2/attn", "blocks/*/attn"])(X)
    jax.effects_barrier()
    whole = S(_stack)(X)[1]["blocks/*/attn"]["primal"]
    one = [e.value for e in events if e.name == "blocks/2/attn"]
    assert_close(one, [np.asarray(whole[2])])
    assert sum(e.name == "blocks/*/attn" for e in events) == 4
    events.clear()
    tap(lambda x: _nested(x, sow), events.append, names="h/1")(X)
    jax.effects_barrier()
    assert sorted(e.count for e in events) == [0, 1]
    with pytest.raises(UnknownSowError, match="'blocks/0/attn' to 'blocks/3/attn'"):
        tap(_stack, events.append, names="blocks/*/attn/2")(X)


def test_tap_of_all_iterations():
    events = []
    tap(_stack, events.append, names="blocks/*/attn")(X)
    nested = tap(lambda x: _nested(x, sow), events.append, names=["h/*", "lane/*"])
    nested(X)
    jax.effects_barrier()
    seen = [(e.name, e.count) for e in events]
    stack = [("blocks/*/attn", i) for i in range(4)]
    nested = [("h", i) for i in range(6)] + [("lane", i) for i in range(3)]
    assert sorted(seen) == sorted(stack + nested)


def test_a_value_that_is_the_same_in_each_iteration():
    def fn(x, w):
        step = lambda x, _: (x * sow(jnp.sin(w), "h"), None)
        return lax.scan(step, x, length=3)[0].sum()

    _, got = S(jax.grad(fn), names="h/1")(X, X)
    assert_close(got["h/1"]["primal"], jnp.sin(X))


def test_a_name_with_another_tag_that_looks_like_an_iteration():
    def fn(x):
        x, _ = lax.scan(lambda x, _: (sow(x + 1, "h"), None), x, length=3)
        return sow(x, "h/1", tag="other")

    assert_close(S(fn, names="h/1")(X)[1], {"h/1": {"primal": X + 2}})
    assert_close(S(fn, names="h/1", tag="other")(X)[1], {"h/1": {"primal": X + 3}})
    events = []
    jax.block_until_ready(tap(fn, events.append, names="h/1")(X))
    jax.effects_barrier()
    assert_close([jnp.asarray(e.value) for e in events], [X + 2])
    assert_close(plant(fn, {"h/1": 10 * X})(X), 10 * X + 1)


def test_an_option_that_reads_a_traced_array():
    loop = lambda x: lax.fori_loop(0, 4, lambda i, x: sow(x + i, "h"), x)

    @jax.jit
    def one(c):
        return S(loop, names="h/2", transform=lambda v: v * c)(X)[1]["h/2"]["primal"]

    assert_close(one(2.0), 2 * (X + 3))
    assert_close(jax.grad(lambda c: one(c).sum())(2.0), (X + 3).sum())


def test_in_a_while_loop():
    def fn(x):
        def outer(x, i):
            grow = lambda x: sow(x + 1 + i, "h")
            return lax.while_loop(lambda x: x.sum() < 5 * (i + 1), grow, x), x

        return lax.scan(outer, x, jnp.arange(3.0))[0]

    whole, got = S(fn)(X)[1], S(fn, names="h/1")(X)[1]
    for mode in ("primal", "count"):
        assert_close(got["h/1"][mode], whole["h"][mode][1])
    only = lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: sow(x + 1, "h"), x)
    with pytest.raises(UnknownSowError, match="not in a loop of known length"):
        S(only, names="h/1")(X)


def test_on_a_mesh(mesh):
    xs = jnp.arange(16.0).reshape(8, 2)
    local = lambda x: lax.map(lambda i: sow(x + i, "h"), jnp.arange(3.0))
    out = P(None, "d")
    spread = jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=out)
    _, got = S(spread, names="h/2")(xs)
    assert_close(got["h/2"]["primal"], xs[:, None] + 2)
    assert got.axes("h/2") == ("device:d",)


def test_memory_of_one():
    def fn(x):
        return lax.scan(lambda x, _: (sow(jnp.sin(x), "h"), None), x, length=1000)[0]

    def by_hand(x):
        def step(carry, i):
            x, kept = carry
            x = jnp.sin(x)
            return (x, jnp.where(i == 500, x, kept)), None

        return lax.scan(step, (x, jnp.zeros_like(x)), jnp.arange(1000))[0]

    def size(f):
        memory = jax.jit(f).lower(jnp.ones(1000)).compile().memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    one = size(S(fn, names="h/500"))
    assert one <= 1.05 * size(by_hand) + 8192 and 50 * one < size(S(fn))


def _selected(pattern, *of_sow):
    named = in_loops(*of_sow)
    return list(Selection([pattern], [named]).all_of(named))


@pytest.mark.parametrize(
    "pattern, name, places, loops, expected",
    [
        ("h", "h", (), (4,), ("h", ())),
        ("h/3", "h", (), (4,), ("h/3", (3,))),
        ("h/-1", "h", (), (4,), ("h/-1", (3,))),
        ("h/4", "h", (), (4,), None),
        ("h/1/0", "h", (), (4, 2), ("h/1/0", (1, 0))),
        ("h/1", "h", (), (4, 2), ("h/1", (1, None))),
        ("h/*/0", "h", (), (4, 2), ("h/*/0", (None, 0))),
        ("b/2/a", "b/*/a", (1,), (4,), ("b/2/a", (2,))),
        ("b/*/a", "b/*/a", (1,), (4,), ("b/*/a", ())),
        ("b/a", "b/*/a", (1,), (4,), None),
        ("**/2/a", "m/b/*/a", (2,), (4,), ("m/b/2/a", (2,))),
        ("b/*/a/2", "b/*/a", (1,), (4,), None),
        ("b/2/a/1", "b/*/a", (None, 1), (4, 5), ("b/2/a/1", (1, 2))),
        ("b/2/a", "b/*/a", (None, 1), (4, 5), ("b/2/a", (None, 2))),
        ("s/1/b/2/m", "s/*/b/*/m", (1, 3), (4, 5), ("s/1/b/2/m", (1, 2))),
        ("s/*/b/2/m", "s/*/b/*/m", (1, 3), (4, 5), ("s/*/b/2/m", (None, 2))),
        ("b/2", "b/*", (1,), (4,), ("b/2", (2,))),
        ("b/2", "b/*", (None, 1), (4, 5), ("b/2", (None, 2))),
        ("b/2/3", "b/*", (None, 1), (4, 5), ("b/2/3", (3, 2))),
        ("b/2.m", "b/*.m", (1,), (4,), ("b/2.m", (2,))),
    ],
)
def test_what_a_pattern_selects(pattern, name, places, loops, expected):
    found = _selected(pattern, name, places, loops)
    assert [x[:2] for x in found] == ([] if expected is None else [expected])


@under("eager", "vmap", "filter_jit")
def test_one_iteration_of_an_inner_loop(wrap):
    """It is not called as one of the outer loop is."""

    def fn(x):
        def outer(x, i):
            inner = lambda x, j: (sow(jnp.sin(x + i * j), "h"), None)
            return lax.scan(inner, x, jnp.arange(3.0))[0], None

        return lax.scan(outer, x, jnp.arange(3.0))[0]

    fn, x = wrap(fn), jnp.arange(4.0)
    # The axis of the lanes is the first one.
    last = lambda x: jnp.moveaxis(x, 0, -1) if wrap is jax.vmap else x
    whole = last(S(fn)(x)[1]["h"]["primal"])
    _, got = S(fn, names=["h/0", "h/*/0"])(x)
    values = {k: last(v["primal"]) for k, v in got.items()}
    assert_close(values, {"h/0": whole[0], "h/*/0": whole[:, 0]})
    for name, entry in got.items():
        assert_close(plant(fn, {name: entry})(x), fn(x))


@pytest.mark.parametrize(
    "pattern, name, places, left",
    [
        ("b/2/a/*/m", "b/*/a/*/m", (1, 3), (3,)),
        ("b/*/a/2/m", "b/*/a/*/m", (1, 3), (1,)),
        # A layer goes before other loops, whichever is outside.
        ("b/2", "b/*", (None, 1), (None,)),
        ("b/*/2", "b/*", (None, 1), (1,)),
        ("b/*/2", "b/*", (1, None), (1,)),
    ],
)
def test_where_the_index_of_another_loop_then_stands(pattern, name, places, left):
    (found,) = _selected(pattern, name, places, (4, 4))
    assert found.places == left


def test_an_iteration_of_a_loop_around_a_stack():
    """`blocks/*/attn/2` is iteration 2 of the outer loop, for all layers at once."""
    train = lambda xs: lax.map(lambda x: _stack(x, (None, 1)), xs)
    xs = jnp.stack([X, 2 * X, 3 * X])
    whole = S(train)(xs)[1]["blocks/*/attn"]["primal"]
    assert whole.shape == (3, 4, 2)
    for pattern, name, value in (
        ("blocks/*/attn/2", "blocks/*/attn/2", whole[2]),
        ("blocks/1/attn", "blocks/1/attn", whole[:, 1]),
        ("blocks/1/attn/2", "blocks/1/attn/2", whole[2, 1]),
    ):
        _, got = S(train, names=pattern)(xs)
        assert list(got) == [name]
        assert_close(got[name]["primal"], value)


def test_rows_of_one_iteration_belong_together():
    def value_first(mark, x):
        y, pull = jax.vjp(lambda x: mark((x + 1) ** 2), x + 0 * mark(x))
        return x - 0.1 * pull(y)[0]

    def value_last(mark, x):
        y, pull = jax.vjp(lambda x: mark((x + 1) ** 2), x)
        return x - 0.1 * pull(y)[0] + 0 * mark(x)

    def two(mark, x):
        return x - 0.1 * jax.grad(lambda x: mark(mark(x * x) * x))(x)

    def twice(mark, x):
        y, pull = jax.vjp(lambda x: mark(x * x), x)
        return pull(y)[0] + pull(2 * y)[0]

    def in_scan(step):
        one = lambda x, _: (step(lambda x: sow(x, "h"), x), None)
        return lambda x: lax.scan(one, x, length=3)[0]

    x = jnp.array(0.7)
    y = lambda x: (x + 1) ** 2
    for step, values, cotangents in (
        (value_first, lambda x: [x, y(x)], lambda x: [0, y(x)]),
        (value_last, lambda x: [y(x), x], lambda x: [y(x), 0]),
        (two, lambda x: [x**2, x**3], lambda x: [1, x]),
    ):
        saved = S(in_scan(step), names="h/1", reduce=Buffer(3))
        got, x1 = jax.jit(saved)(x)[1]["h/1"], step(lambda x: x, x)
        np.testing.assert_allclose(got["primal"], [*values(x1), 0], rtol=1e-5)
        np.testing.assert_allclose(got["cotangent"], [*cotangents(x1), 0], rtol=1e-5)
    with pytest.raises(SowError, match="there is not one cotangent for each value"):
        S(in_scan(twice), names="h/1", reduce=Buffer(3))(x)


@pytest.mark.slow
def test_rows_of_one_layer_and_of_one_step_belong_together():
    """In each step, a gradient comes after a value that has none."""
    loss = _loss(lambda x: _stack(x, (None, 1)))
    step = lambda x: (loss(2 * x), jax.grad(loss)(x))
    xs = jnp.stack([X, 2 * X, 3 * X])
    every = "blocks/*/attn"
    of = lambda fn, xs: jax.vmap(lambda x: S(fn)(x)[1][every])(xs)
    alone, pair = of(_stack, 2 * xs)["primal"], of(jax.grad(_loss(_stack)), xs)
    pairs = {
        "primal": np.stack([alone, pair["primal"]], 1),
        "cotangent": np.stack([0 * alone, pair["cotangent"]], 1),
    }
    asked = {
        every: lambda x: np.moveaxis(x.reshape(6, 4, 2), 1, 0),
        "blocks/1/attn": lambda x: x.reshape(6, 4, 2)[:, 1],
        "blocks/*/attn/2": lambda x: np.moveaxis(x[2], 1, 0),
        "blocks/1/attn/2": lambda x: x[2, :, 1],
    }
    saved = S(lambda xs: lax.map(step, xs), names=[*asked], reduce=Buffer(6))
    _, got = jax.jit(saved)(xs)
    for name, rows in asked.items():
        for mode, x in pairs.items():
            want = jnp.asarray(rows(x))
            kept, rest = jnp.split(got[name][mode], [want.shape[-2]], axis=-2)
            assert_close(kept, want)
            assert not jnp.any(rest)

    def in_while(xs):
        loss = _loss(_stack)  # no `while_loop` has an index in the name
        step = lambda x: loss(2 * x) + jax.grad(loss)(x).sum()
        one = lambda c: (c[0] + 1, c[1] + step(xs[c[0]]))
        return lax.while_loop(lambda c: c[0] < 3, one, (0, 0.0))

    _, in_steps = jax.jit(
        S(in_while, names=[every, "blocks/1/attn"], reduce=Buffer(6))
    )(xs)
    for name, modes in in_steps.items():
        for mode in pairs:
            assert_close(modes[mode], got[name][mode])


@pytest.mark.parametrize("pattern", ["*/0", "h/[01]"])
def test_a_sow_with_the_name_of_an_iteration_goes_before_it(pattern):
    def f(x):
        x, _ = lax.scan(lambda c, _: (sow(jnp.sin(c), "h"), None), x, length=3)
        return sow(2 * x, "h/0")

    one, two = jnp.sin(X), jnp.sin(jnp.sin(X))
    expected = {"h/0": 2 * jnp.sin(two)} | ({"h/1": two} if pattern != "*/0" else {})
    _, got = S(f, names=pattern)(X)
    assert {name: list(modes) for name, modes in got.items()} == {
        name: ["primal"] for name in expected
    }
    for name, value in expected.items():
        assert_close(got[name]["primal"], value)

    events = []
    tap(f, events.append, names=pattern)(X)
    jax.effects_barrier()
    assert {e.name: e.count for e in events} == dict.fromkeys(expected, 0)
    assert len(events) == len(expected)

    planted = S(plant(f, {pattern: jnp.zeros_like}))(X)[1]
    assert_close(planted["h"]["primal"][0], one)
    assert_close(planted["h/0"]["primal"], jnp.zeros(2))


class _Layer(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return jnp.sin(self.weight * x)

    def encode(self, x):
        return jnp.cos(self.weight * x)


def test_methods_and_inputs_of_a_stack_have_the_names_of_a_list():
    blocks = [_Layer(jnp.float32(i + 1)) for i in range(3)]
    stack = jax.tree.map(lambda *xs: jnp.stack(xs), *blocks)

    def of_list(blocks, x):
        for block in blocks:
            x = block(x) + block.encode(x)
        return x

    def of_stack(blocks, x):
        return lax.scan(lambda x, b: (b(x) + b.encode(x), None), x, blocks)[0]

    options = dict(capture=_Layer, methods=["__call__", "encode"])
    save = lambda f, **more: S(f, **options, inputs=True, **more)
    expected = save(of_list)(blocks, X)[1]
    names = ["blocks/1.encode", "blocks/-1.inputs", "blocks/[01].encode.inputs"]
    _, got = save(of_stack, names=names)(stack, X)
    last = {"blocks/2.inputs": got.pop("blocks/-1.inputs")}
    names = ["1.encode", "2.inputs", "0.encode.inputs", "1.encode.inputs"]
    assert_close(
        dict(got | last), {f"blocks/{n}": expected[f"blocks/{n}"] for n in names}
    )

    every = save(of_stack, names="blocks/*.encode")(stack, X)[1]
    assert list(every) == ["blocks/*.encode"]
    stacked = expected["blocks/*.encode"]["primal"]
    assert_close(every["blocks/*.encode"]["primal"], stacked)
    assert_close(every["blocks/[12].encode"]["primal"], stacked[1:])

    value = {"blocks/1.encode": jnp.zeros(2)}
    planted = lambda f, blocks: plant(f, value, **options)(blocks, X)
    assert_close(planted(of_stack, stack), planted(of_list, blocks))

    with pytest.raises(UnknownSowError, match="'blocks/0.encode' to 'blocks/2.encode'"):
        save(of_stack, names="blocks/*.encode/1")(stack, X)


@pytest.mark.parametrize("pattern", ["h/1", "h*", "h"])
@under(of=REDUCERS, argument="row")
def test_a_reducer_by_the_name_of_all_or_of_one_iteration(row, pattern):
    def inner(x, i):
        step = lambda x, j: (sow(jnp.sin(x) + i + j, "h"), None)
        return lax.scan(step, x, jnp.arange(3.0), reverse=True)

    loop = lambda x: lax.scan(inner, x, jnp.arange(4.0))[0].sum()

    def unrolled(x):
        for i in range(4):
            for j in (2.0, 1.0, 0.0):
                x = jnp.sin(x) + i + j
                x = sow(x, "h/1") if i == 1 else x
        return x.sum()

    names = ["h/1", "h"] if pattern == "h" else "h/1"
    _, got = S(jax.grad(loop), names=names, reduce={pattern: row.reducer})(X)
    if not row.in_order:  # the inner loop is one place
        _, each = S(jax.grad(unrolled), reduce=Append())(X)
        stack = lambda xs: (jnp.stack(xs[::-1]),)
        assert_close(got["h/1"], {mode: stack(xs) for mode, xs in each["h/1"].items()})
    else:
        _, expected = S(jax.grad(unrolled), reduce=row.reducer)(X)
        assert_close(got["h/1"], expected["h/1"])


@pytest.mark.parametrize("reverse", [False, True])
def test_iterations_are_in_the_order_in_which_they_run(reverse):
    def fn(x):
        def body(x, i):
            x = sow(jnp.sin(x + i), "a")
            x = lax.scan(lambda x, i: (sow(x + i, "b"), None), x, jnp.arange(2.0))[0]
            return sow(x * i, "c"), None

        return lax.scan(body, x, jnp.arange(3.0), reverse=reverse)[0]

    each = [[f"a/{i}", f"b/{i}/0", f"b/{i}/1", f"c/{i}"] for i in range(3)]
    ran = sum(each[::-1] if reverse else each, [])
    for names in (ran, ran[::-1], ran[::3], ["c/0", "a/2"], ["c/2", "b/1/1", "a/1"]):
        got = S(fn, names=names)(jnp.ones(2))[1]
        assert list(got) == [name for name in ran if name in names]
    # Of all iterations, the first one counts.
    got = S(fn, names=["c/1", "b", "a/1", "a"])(jnp.ones(2))[1]
    assert list(got) == ["a", "b", "a/1", "c/1"]
