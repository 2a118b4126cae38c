"""What `Intermediates` is good for once it is there: `flat`, `axes`, look-ups by
patterns, `unstack`."""

import io
import pickle

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_sow import (
    Append,
    Buffer,
    Fold,
    Intermediates,
    Last,
    save_intermediates as S,
    sow,
    SowError,
    summarize,
    Summary,
    UnknownSowError,
)
from eqx_sow._mark.site import Label
from eqx_sow._mark.sow import bind_sow
from jax.sharding import PartitionSpec as P

from .helpers import assert_close
from .tables import named, under


X = jnp.array([0.3, -1.2, 0.7])
XS = jnp.stack([X, 2 * X])


def sow_in_stack(value, name, places=(1,)):
    """As a captured call in a stack is marked."""
    label = Label(name, "intermediates", places=places)
    return bind_sow(value, (label,), spec=None)


def _layers(x, mark=sow_in_stack):
    step = lambda x, w: (mark(jnp.sin(w * x), "blocks/*/mlp"), None)
    return jnp.cos(lax.scan(step, x, jnp.arange(1.0, 5.0))[0]).sum()


def _list(x):
    for i in range(4):
        x = sow(jnp.sin((i + 1.0) * x), f"blocks/{i}/mlp")
    return jnp.cos(x).sum()


# --- flat ---
def _values(x):
    h = sow({"b": jnp.sin(x), "a": (2 * x, "text", None)}, "layers/0")
    return sow(h["b"], "layers/1").sum()


def test_flat():
    _, got = S(jax.grad(_values), transform={"layers/1": summarize})(X)
    flat = got.flat()
    assert type(flat) is dict
    fields = "size mean std rms min max zeros not_finite".split()
    assert list(flat) == [
        "layers/0/primal/a/0",
        "layers/0/primal/b",
        "layers/0/cotangent/a/0",
        "layers/0/cotangent/b",
        *[f"layers/1/primal/{field}" for field in fields],
        *[f"layers/1/cotangent/{field}" for field in fields],
    ]
    assert_close(flat["layers/0/primal/a/0"], 2 * X)
    rms = flat["layers/1/primal/rms"]
    assert type(rms) is np.float32 and rms == got["layers/1"]["primal"].rms
    dotted = got.flat(sep=".")
    assert "layers/1.cotangent.rms" in dotted and len(dotted) == len(flat)


@pytest.mark.parametrize(
    "run",
    [
        jax.jit(lambda x: S(_values)(x)[1].flat()),
        lambda x: S(jax.jit(_values))(x)[1].flat(),
        lambda x: jax.checkpoint(lambda x: S(_values)(x)[1].flat())(x),
        lambda x: jax.eval_shape(lambda: S(_values)(x)[1].flat()),
    ],
)
def test_flat_under_transformations(run):
    got, expected = run(X), S(_values)(X)[1].flat()
    assert jax.tree.map(jnp.shape, dict(got)) == jax.tree.map(jnp.shape, expected)
    assert set(got) == set(expected)


def test_flat_leaves_out_what_is_no_array():
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")

    def f(x):
        out, _ = jax.vmap(
            norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
        )(x, state)
        return sow((out, jnp.tanh, 3, "text"), "h")[0]

    _, got = S(f, capture=True)(jnp.ones((4, 3)))
    assert isinstance(got["norm"]["primal"][1], eqx.nn.State)
    assert [k for k in got.flat() if k.startswith("norm")] == ["norm/primal/0"]
    assert "h/primal/0" in got.flat() and "h/primal/1" not in got.flat()
    assert "State(...)" in repr(got)
    # The cotangent of integers holds nothing.
    g = lambda x: sow((x, jnp.arange(3)), "h")[0].sum()
    assert list(S(jax.grad(g))(X)[1].flat()) == [
        "h/primal/0",
        "h/primal/1",
        "h/cotangent/0",
    ]


def test_flat_of_a_key():
    key = jr.key(0)
    flat = S(lambda key: sow(key, "key"))(key)[1].flat()
    assert_close(flat["key/primal"], jr.key_data(key))


def test_flat_to_disk():
    file = io.BytesIO()
    _, got = S(jax.grad(_values))(X)
    np.savez(file, **got.flat())
    file.seek(0)
    loaded = np.load(file)
    assert list(loaded) == list(got.flat())
    assert_close(got.flat(), dict(loaded))


def test_flat_has_each_array():
    got = Intermediates({"a": {"primal": {"b/c": X, "b": {"c": X}}}})
    with pytest.raises(SowError, match="two arrays would have the key 'a/primal/b/c'"):
        got.flat()
    assert len(got.flat(sep=".")) == 2


# --- axes ---
def _in_a_vmap(x):
    return jax.vmap(_layers)(x)


@pytest.mark.parametrize(
    "fn, x, options, axes",
    [
        (lambda x: sow(x, "blocks/*/mlp"), X, {}, ()),
        (_layers, X, {}, ("loop",)),
        (_in_a_vmap, XS, {}, ("vmap", "loop")),
        (_in_a_vmap, XS, dict(transform=summarize), ("vmap", "loop")),
        (_in_a_vmap, XS, dict(reduce=Last()), ("vmap", "loop")),
        (_in_a_vmap, XS, dict(reduce=Buffer(3)), ("vmap", "loop", "buffer")),
        (_in_a_vmap, XS, dict(reduce=Append()), (("vmap", "loop"),)),
        (
            _in_a_vmap,
            XS,
            dict(reduce=Fold(0.0, lambda acc, x: acc + x.sum())),
            ("vmap", "loop"),
        ),
        (
            lambda x: lax.map(lambda x: jax.vmap(_layers)(x), x),
            XS[None],
            {},
            ("loop", "vmap", "loop"),
        ),
    ],
)
@under("eager", "jit", argument="jit")
def test_axes(fn, x, options, axes, jit):
    _, got = jit(S(fn, **options))(x)
    assert got.axes("blocks/*/mlp", "primal") == axes
    assert pickle.loads(pickle.dumps(got)).axes("blocks/*/mlp") == axes
    inside = (("outside", *axes[0]),) if axes[:1] == (("vmap", "loop"),) else None
    _, got = jax.vmap(S(fn, **options))(jnp.stack([x] * 7))
    assert got.axes("blocks/*/mlp", "primal") == (inside or ("outside", *axes))


def test_axes_of_cotangents_and_counts():
    def f(x):
        def step(x, w):
            go = lambda x: sow(jnp.sin(w * x), "h")
            return lax.cond(w > 2, go, lambda x: x, x), None

        return lax.scan(step, x, jnp.arange(1.0, 5.0))[0].sum()

    _, got = S(jax.vmap(jax.grad(f)))(XS)
    for mode, value in got["h"].items():
        assert got.axes("h", mode) == ("vmap", "loop")
        assert value.shape[:2] == (2, 4)
    # That of a value which is the same for all lanes is the total.
    f = lambda x, y: sow((x, y), "h")[0].sum() * y
    _, got = S(jax.grad(lambda y: jax.vmap(f, (0, None))(XS, y).sum()))(1.0)
    assert got.axes("h", "primal") == ("vmap",)


def test_axes_of_devices():
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    f = jax.shard_map(_layers_of_lanes, mesh=mesh, in_specs=P("data"), out_specs=P())
    _, got = S(f)(jnp.ones((4, 3)))
    assert got.axes("blocks/*/mlp") == ("device:data", "vmap", "loop")


def _layers_of_lanes(x):
    return lax.psum(jax.vmap(_layers)(x).sum(), "data")


def test_axes_are_not_known():
    _, got = S(_in_a_vmap)(XS)
    for changed in (
        jax.tree.map(lambda x: x[0], got),
        jax.tree.map(lambda x: x.sum(-1), got),
        Intermediates(got),
    ):
        with pytest.raises(SowError, match=r"axes\('blocks/\*/mlp', 'primal'\)"):
            changed.axes("blocks/*/mlp")
    with pytest.raises(KeyError):
        got.axes("blocks/*/mlp", "cotangent")
    assert got.copy().axes("blocks/*/mlp") == ("vmap", "loop")


# --- patterns ---
OTHER_AXIS_IN_FRONT = "vmap-grad", "map-grad"
wraps = pytest.mark.parametrize(
    "wrap", ["grad", "jit-grad", "grad-checkpoint", *OTHER_AXIS_IN_FRONT]
)


def _of_layers(wrap):
    """The transformation, its argument, and the place of the loop over layers."""
    x = XS if wrap in OTHER_AXIS_IN_FRONT else X
    return named(wrap), x, (None, 1) if wrap == "map-grad" else (1,)


@pytest.mark.parametrize("mode", ["primal", "cotangent"])
@wraps
def test_a_pattern_is_the_same_for_a_list_and_for_a_stack(wrap, mode):
    axis_in_front = wrap in OTHER_AXIS_IN_FRONT
    wrap, x, places = _of_layers(wrap)
    mark = lambda x, name: sow_in_stack(x, name, places)
    in_list = S(wrap(_list))(x)[1]
    in_stack = S(wrap(lambda x: _layers(x, mark)))(x)[1]
    expected = jnp.stack([in_list[f"blocks/{i}/mlp"][mode] for i in range(4)])
    # Of a whole stack it is the value as it is, with the lanes in front.
    stored = in_stack["blocks/*/mlp"][mode]
    layer = 1 if axis_in_front else 0
    assert stored is dict(in_stack)["blocks/*/mlp"][mode]
    assert_close(jnp.moveaxis(stored, layer, 0), expected)
    for pattern in ("blocks/*/mlp", "*/*/mlp", "**/mlp", "blocks/**", "**"):
        assert_close(in_list[pattern][mode], expected)
        assert_close(in_stack[pattern][mode], stored)
    for got in (in_list, in_stack):
        assert_close(got["blocks/[13]/mlp"][mode], expected[1::2])
        assert_close(got["blocks/2/mlp"][mode], expected[2])
    # Traced, and with axes of transformations around.
    assert_close(jax.jit(lambda i: i["blocks/[13]/*"][mode])(in_stack), expected[1::2])
    both = lambda x: jnp.stack([x, 2 * x])
    for got in (in_list, in_stack):
        twice = jax.tree.map(both, got)["blocks/[13]/mlp"][mode]
        assert_close(twice, jnp.moveaxis(both(expected[1::2]), 0, 1))


def test_a_star_for_the_layers_means_these_alone():
    names = ["b/0.inputs", "b/0", "b/0/b", "b/1.inputs", "b/1", "b/1/b"]
    values = {name: {"primal": X + i} for i, name in enumerate(names)}
    got = Intermediates(values)
    assert_close(got["b/*"]["primal"], jnp.stack([X + 1, X + 4]))
    assert_close(got["b/*.inputs"]["primal"], jnp.stack([X, X + 3]))
    assert "b/*" in got and got.primals["b/*"].shape == (2, 3)


def test_patterns_of_a_stack_of_stacks():
    name = "stages/*/blocks/*/mlp"

    def stages(x):
        mark = lambda x, _: sow_in_stack(x, name, (1, 3))
        return lax.map(lambda w: _layers(w * x, mark), jnp.arange(1.0, 3.0)).sum()

    def in_lists(x):
        for i in range(2):
            y = (i + 1.0) * x
            for j in range(4):
                y = sow(jnp.sin((j + 1.0) * y), f"stages/{i}/blocks/{j}/mlp")
        return y

    a, b = S(stages)(X)[1], S(in_lists)(X)[1]
    shapes = {"**": (2, 4), name: (2, 4), "stages/1/**": (4,), "**/3/mlp": (2,)}
    shapes |= {"stages/-1/*/1/mlp": (1,), "stages/*/blocks/[02]/mlp": (2, 2)}
    for pattern, shape in shapes.items():
        value = b[pattern]["primal"]
        assert value.shape == (*shape, 3)
        assert_close(a[pattern]["primal"], value)
        assert_close(a.primals[pattern], value)


def test_a_star_is_one_axis_of_a_stack_of_stacks():
    def f(x):
        mark = lambda x: sow_in_stack(x, "b/*/*", (1, 2))
        layer = lambda x, w: (mark(jnp.sin(w * x)), None)
        step = lambda x, ws: lax.scan(layer, x, ws)
        return lax.scan(step, x, jnp.arange(1.0, 9.0).reshape(2, 4))[0]

    _, got = S(f)(X)
    hand, x = [], X
    for w in range(1, 9):
        hand.append(x := jnp.sin(w * x))
    hand = jnp.stack(hand)
    by_stage = hand.reshape(2, 4, 3)
    # As for a list of two lists of four.
    names = [f"b/{i}/{j}" for i in range(2) for j in range(4)]
    lists = Intermediates({n: {"primal": x} for n, x in zip(names, hand)})
    for one in (got, lists):
        assert_close(one["b/*/*"]["primal"], by_stage)
        assert_close(one["b/**"]["primal"], by_stage)
        assert_close(one["b/*/2"]["primal"], by_stage[:, 2])
        assert_close(one["b/-1/*"]["primal"], by_stage[1])
        assert_close(one["b/-1/-2"]["primal"], by_stage[1, 2])
        assert "b/*" not in one and "b/1" not in one
    # A list of two stacks of four, and a stack of two whose layers are called twice.
    one = Intermediates({f"b/{i}": {"primal": x} for i, x in enumerate(by_stage)})
    assert_close(one["b/*"]["primal"], by_stage)


# --- axes that others have added, or taken away ---
def _mapped(fn):
    return lambda f, xs: jax.tree.map(fn, f(xs[0]))


def _sum(h):
    return h.sum(-1)


# What was done with `h` of `[layers, width]`; and what the leading axes are then, if
# that can be known: of a batch as long as there are layers, it cannot.
OUTSIDE = {
    "arithmetic": (_mapped(jnp.sin), "loop"),
    "vmap": (lambda f, xs: jax.vmap(f)(xs), "outside loop"),
    "out_axes=1": (lambda f, xs: jax.vmap(f, out_axes=1)(xs), "loop outside"),
    "out_axes=-1": (lambda f, xs: jax.vmap(f, out_axes=-1)(xs), "loop"),
    "scan": (lambda f, xs: lax.map(f, xs), "outside loop"),
    "jacfwd": (lambda f, xs: jax.jacfwd(lambda w: f(w @ xs))(xs[:, 0]), "loop"),
    "jacrev": (lambda f, xs: jax.jacrev(lambda w: f(w @ xs))(xs[:, 0]), "loop"),
    "a new axis": (_mapped(lambda h: h[..., None]), "loop"),
    "sum": (_mapped(_sum), ""),
    "part": (_mapped(lambda h: h[:2]), ""),
    "flat": (_mapped(jnp.ravel), ""),
    "transposed": (_mapped(jnp.transpose), ""),
    "lanes": (lambda f, xs: _mapped(_sum)(jax.vmap(f), [xs]), ""),
}
NOT_KNOWN_OF_FOUR = "vmap", "out_axes=1", "scan"


@pytest.mark.parametrize("n", [3, 4, 5])
@pytest.mark.parametrize("how", OUTSIDE)
def test_an_axis_that_was_added_outside_is_known_or_an_error(how, n):
    """With as many lanes, or inputs, as there are features, or layers, or neither."""
    run, axes = OUTSIDE[how]
    xs = jnp.cos(jnp.arange(n * 3.0)).reshape(n, 3)
    got = run(lambda x: S(_layers)(x)[1], xs)
    h = got["blocks/*/mlp"]["primal"]
    for i in range(4):
        views = (
            lambda: got[f"blocks/{i}/mlp"]["primal"],
            lambda: got.primals[f"blocks/{i - 4}/mlp"],
            lambda: got.unstack()[f"blocks/{i}/mlp"]["primal"],
            lambda: got[f"blocks/[{i}]/mlp"]["primal"][0],
        )
        is_known = axes != "" and not (n == 4 and how in NOT_KNOWN_OF_FOUR)
        assert (f"blocks/{i}/mlp" in got) == is_known
        for view in views:
            if is_known:
                assert_close(view(), jnp.take(h, i, axes.split().index("loop")))
            else:
                with pytest.raises(SowError, match="no.* known"):
                    view()
    # What else has come before the features may be one of these.
    others = ("out_axes=1", "out_axes=-1", "jacfwd", "jacrev")
    if not is_known or n == 3 and how in others:
        with pytest.raises(SowError, match="their axes are not known"):
            got.axes("blocks/*/mlp")
    else:
        assert got.axes("blocks/*/mlp") == tuple(axes.split())


# --- unstack ---
def _two_in_stack(x, places=(1,), reverse=False):
    mark = lambda x, name: sow_in_stack(x, f"blocks/*/{name}", places)

    def step(x, w):
        x = mark({"a": jnp.sin(w * x), "s": "text"}, "attn")["a"]
        x = lax.cond(x[0] > 0, lambda x: mark(2 * x, "in"), lambda x: x, x)
        return mark(jnp.cos(x), "mlp"), None

    x = lax.scan(step, sow(x, "x"), jnp.arange(1.0, 4.0), reverse=reverse)[0]
    return jnp.sum(sow(x, "end") ** 2)


def _two_in_list(x, reverse=False):
    x = sow(x, "x")
    for i in (2, 1, 0) if reverse else (0, 1, 2):
        x = sow({"a": jnp.sin((i + 1.0) * x), "s": "text"}, f"blocks/{i}/attn")["a"]
        go = lambda x, i=i: sow(2 * x, f"blocks/{i}/in")
        x = sow(jnp.cos(lax.cond(x[0] > 0, go, lambda x: x, x)), f"blocks/{i}/mlp")
    return jnp.sum(sow(x, "end") ** 2)


@pytest.mark.parametrize("reverse", [False, True])
@wraps
def test_unstacked_is_what_a_list_gives(wrap, reverse):
    wrap, x, places = _of_layers(wrap)
    in_list = S(wrap(lambda x: _two_in_list(x, reverse)))(x)[1]
    in_stack = S(wrap(lambda x: _two_in_stack(x, places, reverse)))(x)[1]
    got = in_stack.unstack()
    # With the names, and modes, in the same order.
    assert list(got) == list(in_list)
    assert {n: list(m) for n, m in got.items()} == {
        n: list(m) for n, m in in_list.items()
    }
    assert_close(got, in_list)
    for name, modes in got.items():
        for mode in modes:
            assert got.axes(name, mode) == in_list.axes(name, mode)
    assert list(got.unstack()) == list(got) == list(in_list.unstack())
    # Of shapes, traced, and with an axis in front.
    shapes = eqx.filter_eval_shape(lambda: in_stack).unstack()
    shape = lambda tree: eqx.filter_eval_shape(lambda: tree)
    assert shape(dict(shapes)) == shape(dict(got))
    assert_close(eqx.filter_jit(lambda i: i.unstack())(in_stack), got)
    twice = jax.tree.map(lambda x: jnp.stack([x, 2 * x]) if eqx.is_array(x) else x, got)
    both = lambda x: jnp.stack([x, 2 * x]) if eqx.is_array(x) else x
    assert_close(jax.tree.map(both, in_stack).unstack(), twice)


def test_unstack_of_several_runs_and_loops():
    def once(x, places=(1,), name="blocks/*/mlp"):
        step = lambda x, w: (sow_in_stack(jnp.sin(w * x), name, places), None)
        return lax.scan(step, x, jnp.arange(1.0, 4.0))[0]

    def f(x):
        # The second time in a loop that is none over layers.
        return lax.map(lambda x: once(x, (None, 1)), once(x)[None] * jnp.ones((2, 1)))

    got = S(f, reduce=Append())(X)[1]
    first, second = got["blocks/*/mlp"]["primal"]
    unstacked = got.unstack()
    assert list(unstacked) == [f"blocks/{i}/mlp" for i in range(3)]
    for i, modes in enumerate(unstacked.values()):
        assert_close(modes["primal"], (first[i], second[:, i]))
    # Of stacks of stacks.
    name = "stages/*/blocks/*/mlp"
    stages = lambda x: lax.map(lambda w: once(w * x, (1, 3), name), jnp.ones(2))
    names = [f"stages/{i}/blocks/{j}/mlp" for i in range(2) for j in range(3)]
    got = S(stages)(X)[1]
    assert list(got.unstack()) == names
    assert_close(got.unstack()[names[4]]["primal"], got[name]["primal"][1, 1])


def test_unstack_of_runs_in_loops_over_stacks_of_other_lengths():
    """A list has one length, so their value stays as it is."""

    def f(x):
        for ws in (jnp.arange(4.0), jnp.arange(2.0)):
            step = lambda x, w: (sow_in_stack(jnp.sin(w * x), "blocks/*/mlp"), None)
            x = lax.scan(step, sow(x, f"x{len(ws)}"), ws)[0]
        return x

    got = S(f, reduce={"blocks/*/mlp": Append()})(X)[1]
    assert list(got.unstack()) == list(got)
    assert_close(got.unstack(), got)


def test_unstack_of_what_has_changed():
    _, got = S(_layers)(X)
    norms = jax.tree.map(lambda h: jnp.linalg.norm(h, axis=-1), got)
    with pytest.raises(SowError, match="values of 'blocks/./mlp' have other shapes"):
        norms.unstack()
    norms = jax.tree.map(jnp.linalg.norm, got.unstack())
    assert norms["blocks/2/mlp"]["primal"] == jnp.linalg.norm(
        got["blocks/*/mlp"]["primal"][2]
    )
    f = lambda x: _layers(sow(x, "blocks/2/mlp"))
    with pytest.raises(SowError, match="would be called 'blocks/2/mlp', and so is"):
        S(f)(X)[1].unstack()


def test_views():
    got = S(jax.grad(_layers))(X)[1] | {"z": {"tangent": X}}
    assert got.primals == {"blocks/*/mlp": got["blocks/*/mlp"]["primal"]}
    assert list(got.cotangents) == ["blocks/*/mlp"] and list(got.tangents) == ["z"]
    # A PyTree in the same order, of any transformation.
    assert jax.tree.map(jnp.sin, got.primals).keys() == {"blocks/*/mlp"}
    two = S(lambda x: sow(sow(x, "z") * 2, "a"))(X)[1]
    assert list(jax.jit(lambda i: i.primals)(two)) == ["z", "a"]


def test_scalars_are_numbers():
    f = lambda x: sow(x.astype(jnp.bfloat16)[0], "b").astype(float) + sow(3, "n")
    got = S(f, transform={"b": lambda x: {"z": x, "a": x > 0, "k": jr.key(0)}})(X)[1]
    shown = repr(got)
    assert "'z': 0.300781" in shown and "'a': True" in shown and "key<fry>[]" in shown
    flat = got.flat()
    assert isinstance(flat["b/primal/a"], np.bool_) and flat["b/primal/z"].ndim == 0
    assert "f32[]" in repr(jax.eval_shape(S(lambda x: sow(x[0], "h")), X)[1])
    shown = []
    jax.jit(lambda x: shown.append(repr(S(lambda x: sow(x[0], "h"))(x)[1])) or x)(X)
    assert "f32[]" in shown[0]


def test_flat_has_the_edges_of_histograms():
    edges = (-1.0, 0.0, 2.0)
    stats = lambda x: {"s": summarize(x, edges=edges)}
    flat = S(lambda x: sow(x, "h"), transform=stats)(X)[1].flat()
    assert list(flat)[-2:] == ["h/primal/s/histogram", "h/primal/s/edges"]
    assert flat["h/primal/s/edges"].tolist() == list(edges)
    assert_close(flat["h/primal/s/histogram"], jnp.array([0.0, 2.0]))


def test_a_pattern_keeps_structure():
    def f(x):
        for i in range(3):
            x = sow({"a": x * i, "b": (2 * x, "text")}, f"h{i}")["a"]
        return sow(x, "k")

    got = S(f, transform={"h1": lambda x: x})(X)[1]
    value = got["h*"]["primal"]
    assert value["b"][1] == "text" and value["a"].shape == (3, 3)
    summaries = S(f, transform=summarize)(X)[1]["h*"]["primal"]
    assert isinstance(summaries["a"], Summary)
    kinds = r"'h0' is \{'a': f32\[3\], .*\} and 'k' is f32\[3\]\. Select"
    with pytest.raises(SowError, match=rf"(?s)\['\*'\]`: the values differ.*{kinds}"):
        got["*"]
    assert "*" not in got and "*" not in got.primals and got.get("*") is None
    with pytest.raises(UnknownSowError, match="are: 'h0', 'h1', 'h2', 'k'"):
        got["blocks/*"]
    with pytest.raises(UnknownSowError, match="'h.*' has no mode 'cotangent'"):
        got["h*"]["cotangent"]


def test_patterns_after_a_reduction_of_the_values():
    got = S(_layers)(X)[1]
    rows = jax.tree.map(lambda h: jnp.linalg.norm(h, axis=-1), got)
    # The whole stack is what is there; of a part of it, the axis is not known.
    assert_close(rows["blocks/*/mlp"], dict(rows)["blocks/*/mlp"])
    for pattern in ("blocks/[12]/mlp", "blocks/2/mlp"):
        assert pattern in got and pattern not in rows
        with pytest.raises(UnknownSowError, match="The axis of the loop .* not known"):
            rows[pattern]
    appended = S(_layers, reduce=Append())(X)[1]
    for pattern in ("blocks/[12]/mlp", "blocks/2/mlp", "**/mlp"):
        assert_close(appended[pattern]["primal"], (got[pattern]["primal"],))
