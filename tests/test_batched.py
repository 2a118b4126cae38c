"""`transform=batched(fn)`: what `fn` returns for the values of all lanes, that is for
what comes back without it."""

import equinox as eqx
import eqx_sow
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_sow import (
    batched,
    Buffer,
    Fold,
    Last,
    plant,
    save_intermediates as S,
    sow,
    SowError,
    tabulate,
    tap,
)
from jax.sharding import PartitionSpec as P

from .helpers import assert_close


X = jnp.array([0.3, -1.2, 0.7])
XS = jnp.stack([X, 2 * X, 0.5 * X, -X])
MODEL = eqx.nn.MLP(3, 2, 5, 2, key=jr.key(0))


def _moment(x):
    """A Kronecker factor, of which a batch has another than its examples together."""
    assert x.ndim == 2
    return x.T @ x / len(x)


def _loss(model, xs):
    return jnp.mean(jax.vmap(model)(xs) ** 2)


def _of_what_comes_back(fn, batch, values):
    return {
        name: {mode: fn(x) for mode, x in modes.items()}
        for name, modes in values.items()
    }


RUNS = {
    "plain": lambda f: f,
    "jit": eqx.filter_jit,
    "checkpoint": eqx.filter_checkpoint,
}


@pytest.mark.parametrize("wrap", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_activations_and_gradients_of_a_batch(wrap, inside):
    grad = eqx.filter_grad(_loss)
    options = dict(capture=eqx.nn.Linear, transform=batched(_moment))
    saved = S(wrap(grad), **options) if inside else wrap(S(grad, **options))
    grads, got = saved(MODEL, XS)
    expected_grads, values = S(grad, capture=eqx.nn.Linear)(MODEL, XS)
    assert_close(grads, expected_grads)
    assert set(got["model/layers/0"]) == {"primal", "cotangent"}
    assert_close(dict(got), _of_what_comes_back(_moment, XS, values))
    assert got.axes("model/layers/0", "cotangent") == ()


@pytest.mark.slow
def test_it_is_differentiated():
    def total(fn, xs):
        _, got = S(jax.vmap(fn), transform={"h": batched(_moment)})(xs)
        return jnp.sum(jnp.sin(got["h"]["primal"]))

    f = lambda x: sow(jnp.sin(x), "h").sum()
    by_hand = lambda xs: jnp.sum(jnp.sin(_moment(jnp.sin(xs))))
    for derive in (jax.grad, jax.jacfwd, jax.jacrev, jax.hessian):
        assert_close(derive(lambda xs: total(f, xs))(XS), derive(by_hand)(XS))


def test_what_it_closes_over_is_differentiated_and_batched():
    def scores(w, xs):
        f = lambda x: sow(jnp.sin(x), "h")
        return S(jax.vmap(f), transform=batched(lambda h: jnp.sum(h @ w)))(xs)[1]

    by_hand = lambda w, xs: {"h": {"primal": jnp.sum(jnp.sin(xs) @ w)}}
    sum_ = lambda fn: lambda w: jnp.sin(fn(w, XS)["h"]["primal"])
    assert_close(jax.grad(sum_(scores))(X), jax.grad(sum_(by_hand))(X))
    every = jax.vmap(scores, (0, None))(XS, XS)
    assert_close(dict(every), jax.vmap(by_hand, (0, None))(XS, XS))


def _layers(x):
    step = lambda x, w: (sow(jnp.sin(w * x), "h"), None)
    return jnp.cos(lax.scan(step, x, jnp.arange(1.0, 4.0))[0]).sum()


@pytest.mark.parametrize("derive", [lambda f: f, jax.grad], ids=["primal", "grad"])
@pytest.mark.parametrize(
    "program",
    [
        # Around a loop, in a loop, and around a loop that is computed again.
        lambda derive, xs: jax.vmap(derive(_layers))(xs),
        lambda derive, xs: lax.map(jax.vmap(derive(_layers)), jnp.stack([xs, 2 * xs])),
        lambda derive, xs: jax.vmap(derive(jax.checkpoint(_layers)))(xs),
        lambda derive, xs: derive(lambda xs: jax.vmap(_layers)(xs).sum())(xs),
    ],
    ids=["around", "in", "checkpoint", "grad of vmap"],
)
def test_each_iteration_by_itself(program, derive):
    run = lambda xs: program(derive, xs)
    _, got = S(run, transform=batched(_moment))(XS)
    _, values = S(run)(XS)
    loops = [i for i, kind in enumerate(values.axes("h")) if kind == "loop"]
    for mode, x in values["h"].items():
        x = jnp.moveaxis(x, loops, range(len(loops)))
        each = _moment
        for _ in loops:
            each = jax.vmap(each)
        assert_close(got["h"][mode], each(x))
        assert got.axes("h", mode) == ("loop",) * len(loops)


def test_reducers_over_batches():
    batches = jnp.stack([XS, 2 * XS, jnp.sin(XS)])
    f = lambda x: sow(jnp.sin(x), "h").sum()
    train = lambda xs: lax.map(jax.vmap(f), xs)
    each = jax.vmap(_moment)(jnp.sin(batches))
    for reducer, expected in (
        (Fold(jnp.zeros((3, 3)), jnp.add), each.sum(0)),
        (Last(), each[-1]),
        (Buffer(2), each[1:]),
    ):
        _, got = S(train, transform=batched(_moment), reduce=reducer)(batches)
        assert_close(got["h"]["primal"], expected)


def test_nested_vmaps():
    seen = []

    def look(x):
        seen.append(x.shape)
        return jnp.linalg.norm(x)

    f = lambda x, y: sow(x * y, "h")
    ys = jnp.arange(1.0, 3.0)
    nested = jax.vmap(jax.vmap(f, (None, 0)), (0, None))
    _, got = S(nested, transform=batched(look))(XS, ys)
    assert set(seen) == {(4, 2, 3)}
    assert_close(got["h"]["primal"], jnp.linalg.norm(XS[:, None] * ys[None, :, None]))
    # Not the lanes that a value does not vary over.
    seen.clear()
    only = jax.vmap(jax.vmap(lambda x, y: sow(2 * y, "h") * x, (None, 0)), (0, None))
    _, got = S(only, transform=batched(look))(XS, jnp.stack([X, X]))
    assert set(seen) == {(2, 3)}


def test_axes_of_a_tree():
    def look(value):
        x, y, name = value
        assert (x.shape, y.shape, name) == ((4, 3), (4,), "text")
        return {"sum": x.sum(0) + y.sum(), "name": name}

    f = lambda x, y: sow((x, y, "text"), "h")[0]
    _, got = S(jax.vmap(f, (0, None)), transform=batched(look))(XS, jnp.float32(2))
    assert got["h"]["primal"]["name"] == "text"
    assert_close(got["h"]["primal"]["sum"], XS.sum(0) + 8)
    # The cotangent of what all lanes share is the total.
    g = lambda y: jax.vmap(lambda x: jnp.dot(*sow((x, y * X), "h")))(XS).sum()
    second = batched(lambda value: value[1] + 1)
    _, got = S(jax.grad(g), transform=second, modes="cotangent")(2.0)
    assert_close(got["h"]["cotangent"], XS.sum(0) + 1)


def test_a_condition_that_lanes_share():
    def f(go, x):
        return lax.cond(go, lambda x: sow(jnp.sin(x), "h"), jnp.cos, x)

    run = S(jax.vmap(f, (None, 0)), transform=batched(_moment))
    for go in (True, False):
        _, got = run(go, XS)
        expected = _moment(jnp.sin(XS)) if go else jnp.zeros((3, 3))
        assert_close(got["h"]["primal"], expected)
        assert got["h"]["count"] == int(go)


def _branch(x):
    return lax.cond(x[0] > 0, lambda x: sow(jnp.sin(x), "h"), jnp.cos, x)


def _loop(x):
    return lax.while_loop(lambda x: x.sum() < 9, lambda x: sow(x + 1, "h"), jnp.abs(x))


@pytest.mark.parametrize("fn", [_branch, _loop])
def test_a_condition_that_they_do_not_share_is_an_error(fn):
    for listen in (S, tap):
        with pytest.raises(SowError, match="only some lanes .* no value of all lanes"):
            listen(jax.vmap(fn), transform=batched(_moment))(XS)


def test_one_that_all_branches_have_is_an_error_too():
    def f(x):
        go = lambda g: lambda x: sow(g(x), "h")
        return lax.cond(x[0] > 0, go(jnp.sin), go(jnp.cos), x)

    with pytest.raises(SowError, match="only some lanes .* no value of all lanes"):
        S(jax.vmap(f), transform=batched(_moment))(XS)
    # The remedy.
    outside = lambda x: sow(f(x), "out")
    _, got = S(jax.vmap(outside), names="out", transform=batched(_moment))(XS)
    expected = jnp.where(XS[:, :1] > 0, jnp.sin(XS), jnp.cos(XS))
    assert_close(got["out"]["primal"], _moment(expected))


def _shared(x):
    return lax.cond(x.sum() > 0, jax.vmap(_layers), lambda x: x.sum(1), x)


def _until(x):
    step = jax.vmap(lambda x: sow(jnp.abs(x) + 1, "h"))
    return lax.while_loop(lambda x: x.sum() < 30, step, x)


BATCHES = {
    "vmap": jax.vmap(_layers),
    "no vmap": lambda x: _layers(x[0]),
    "grad": jax.vmap(jax.grad(_layers)),
    "grad of vmap": jax.grad(lambda x: jax.vmap(jax.checkpoint(_layers))(x).sum()),
    "jvp": lambda x: jax.jvp(jax.vmap(_layers), (x,), (jnp.cos(x),)),
    # All lanes of a batch share the condition, but not those of the vmap outside.
    "cond": jax.grad(lambda x: _shared(x).sum()),
    "while": _until,
    "plant": plant(jax.vmap(jax.grad(_layers)), {"h": jnp.cos}, mode="cotangent"),
    "tap": tap(jax.vmap(_layers), lambda event: None),
}
REDUCERS = {"all": None, "fold": Fold(jnp.zeros(3), jnp.add), "buffer": Buffer(2)}


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "reduce",
    [
        pytest.param(x, id=k, marks=pytest.mark.slow if k == "buffer" else ())
        for k, x in REDUCERS.items()
    ],
)
@pytest.mark.parametrize("fn", BATCHES.values(), ids=BATCHES)
def test_a_vmap_around_has_a_batch_in_each_lane(fn, reduce):
    many = jnp.stack([XS[:2], -XS[:2], jnp.sin(XS[1:3])])
    of_batch = batched(lambda h: jnp.cumsum(h.reshape(-1, 3), 0)[-1])
    saved = S(fn, transform=of_batch, reduce=reduce)
    each = [saved(xs) for xs in many]
    expected = jax.tree.map(lambda *xs: jnp.stack(xs), *each)
    for run in (jax.vmap(saved), jax.jit(jax.vmap(saved)), jax.vmap(jax.jit(saved))):
        assert_close(run(many), expected)


def test_a_vmap_inside_and_one_around_by_hand():
    f = lambda x: sow(jnp.sin(x), "h").sum()
    run = lambda xs: S(jax.vmap(f), transform=batched(_moment))(xs)[1]["h"]["primal"]
    many = jnp.stack([XS, 2 * XS])
    hand = lambda xs: _moment(jnp.sin(xs))
    assert_close(jax.vmap(run)(many), jax.vmap(hand)(many))
    total = lambda fn: lambda xs: jnp.sum(jnp.cos(fn(xs)))
    assert_close(
        jax.vmap(jax.grad(total(run)))(many), jax.vmap(jax.grad(total(hand)))(many)
    )
    # One value of all examples: both vmaps are inside.
    _, got = S(jax.vmap(jax.vmap(f)), transform=batched(jnp.linalg.norm))(many)
    assert_close(got["h"]["primal"], jnp.linalg.norm(jnp.sin(many)))


def test_in_a_lambda_it_cannot_be_called():
    f = jax.vmap(lambda x: sow(x, "h"))
    with pytest.raises(TypeError, match="put it around all"):
        S(f, transform=lambda x: {"norm": batched(jnp.linalg.norm)(x)})(XS)
    with pytest.raises(TypeError, match="takes a function of the value, not 3"):
        batched(3)


@pytest.mark.parametrize("vmap_outside", [False, True])
def test_tap(vmap_outside):
    events = []
    options = dict(transform=batched(_moment))
    if vmap_outside:
        run = jax.vmap(tap(jax.grad(_layers), events.append, **options))
    else:
        run = tap(jax.vmap(jax.grad(_layers)), events.append, **options)
    assert_close(run(XS), jax.vmap(jax.grad(_layers))(XS))
    jax.effects_barrier()
    _, got = S(jax.vmap(jax.grad(_layers)), **options)(XS)
    for mode, order in (("primal", 1), ("cotangent", -1)):
        mine = sorted((e for e in events if e.mode == mode), key=lambda e: e.count)
        values = np.stack([e.value for e in mine][::order])
        assert_close(values, np.asarray(got["h"][mode]))


@pytest.mark.parametrize("derive", [lambda f: f, jax.grad], ids=["primal", "grad"])
def test_tap_sees_the_lanes_of_all_vmaps(derive):
    many = jnp.stack([XS, 2 * XS])
    f = derive(lambda x: sow(jnp.sin(x), "h").sum())
    norm = batched(jnp.linalg.norm)
    _, got = S(jax.vmap(jax.vmap(f)), transform=norm)(many)
    for run in (
        lambda tapped: tapped(jax.vmap(jax.vmap(f))),
        lambda tapped: jax.vmap(tapped(jax.vmap(f))),
        lambda tapped: jax.jit(jax.vmap(jax.vmap(tapped(f)))),
    ):
        events = []
        run(lambda f: tap(f, events.append, transform=norm))(many)
        jax.effects_barrier()
        assert len(events) == len(got["h"])
        for e in events:
            assert_close(jnp.asarray(e.value), got["h"][e.mode])


def test_a_vmap_around_a_compiled_tap_is_an_error():
    f = lambda x: sow(jnp.sin(x), "h").sum()
    tapped = jax.jit(tap(jax.vmap(f), print, transform=batched(jnp.sum)))
    with pytest.raises(SowError, match=r"cannot see the lanes.*tap\(jax.vmap\(fn\)"):
        jax.vmap(tapped)(XS[None])
    with pytest.raises(SowError, match="cannot see the lanes"):
        jax.vmap(jax.grad(lambda xs: tapped(xs).sum()))(XS[None])
    # Of lanes that the value does not vary over it need not know.
    events = []
    tapped = jax.jit(tap(jax.vmap(f), events.append, transform=batched(jnp.sum)))
    jax.vmap(lambda y: (y, tapped(XS)))(XS)
    jax.effects_barrier()
    assert_close(events[0].value, np.asarray(jnp.sin(XS).sum()))


def test_on_a_mesh(mesh):
    xs = jnp.arange(24.0).reshape(8, 3) / 10
    f = lambda x: sow(jnp.sin(x), "h")
    squares = lambda x: jnp.einsum("ni,nj->ij", x, x)
    expected = squares(jnp.sin(xs))
    spread = jax.device_put(xs, jax.NamedSharding(mesh, P("d")))
    saved = S(jax.vmap(f), transform=batched(squares))
    for run in (saved, jax.jit(saved)):
        assert_close(run(spread)[1]["h"]["primal"], expected)
    # In a `shard_map` each device sees its own part.
    local = jax.shard_map(jax.vmap(f), mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    _, got = S(local, transform=batched(squares))(xs)
    assert_close(got["h"]["primal"], jax.vmap(squares)(jnp.sin(xs)[:, None]))
    assert got.axes("h") == ("device:d",)


def test_on_an_explicit_mesh():
    xs = jnp.arange(24.0).reshape(8, 3) / 10
    expected = jnp.einsum("ni,nj->ij", jnp.sin(xs), jnp.sin(xs))
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    squares = lambda x: jnp.einsum("ni,nj->ij", x, x, out_sharding=P())
    saved = S(jax.vmap(lambda x: sow(jnp.sin(x), "h")), transform=batched(squares))
    with jax.set_mesh(mesh):
        spread = jax.device_put(xs, P("d"))
        for run in (saved, jax.jit(saved)):
            value = run(spread)[1]["h"]["primal"]
            assert jax.typeof(value).sharding.spec == P(None, None)
            assert_close(value, np.asarray(expected))


def test_a_norm_is_that_of_the_table():
    saved = lambda **options: S(
        eqx.filter_grad(_loss), capture=eqx.nn.Linear, **options
    )(MODEL, XS)[1]
    norms = saved(transform=batched(jnp.linalg.norm)).flat()
    rows = str(tabulate(saved())).splitlines()[2:]
    shown = [float(row.split()[-2]) for row in rows]
    assert np.allclose(list(norms.values()), shown, rtol=1e-2)


def test_it_costs_what_it_costs_by_hand():
    saved = S(lambda xs: jax.vmap(_layers)(xs), transform=batched(_moment))

    def by_hand(xs):
        step = lambda xs, w: (h := jnp.sin(w * xs), _moment(h))
        xs, moments = lax.scan(step, xs, jnp.arange(1.0, 4.0))
        return jnp.cos(xs).sum(-1), moments

    cost = lambda f: jax.jit(f).lower(jnp.ones((64, 32))).compile().cost_analysis()
    assert cost(saved)["flops"] <= 1.01 * cost(by_hand)["flops"]


def test_is_public():
    assert eqx_sow.batched is batched


# --- `plant` ---


def _center(x):
    return x - x.mean(0, keepdims=True)


def _pair_in_a_loop(mark):
    """Under a vmap over `x`: a value of which one leaf is the same for all lanes."""

    def fn(x, w):
        def body(x, i):
            x, v = mark((jnp.sin(x) + i, w))
            return x, x * v.sum()

        return lax.scan(body, x, jnp.arange(3.0))

    return fn


@pytest.mark.parametrize("wrap", RUNS.values(), ids=RUNS)
def test_plant_all_lanes(wrap):
    w = jnp.array([1.0, 2.0])
    fn = jax.vmap(_pair_in_a_loop(lambda v: sow(v, "h")), (0, None))
    by_hand = _pair_in_a_loop(lambda v: (_center(v[0]), 3 * v[1]))

    def whole(xs, w):
        x, ys = by_hand(xs, w)
        return x, jnp.moveaxis(ys, 1, 0)

    # Returned as `fn` sees it: `w` has lanes beside `x`, and stays the same for all.
    new = batched(lambda v: (_center(v[0]), 3 * v[1]))
    planted = wrap(plant(fn, {"h": new}))
    assert_close(planted(XS, w), whole(XS, w))
    loss = lambda f: lambda xs: jnp.sum(f(xs, w)[1] ** 2)
    assert_close(jax.grad(loss(planted))(XS), jax.grad(loss(whole))(XS))
    if wrap is RUNS["jit"]:
        other = batched(lambda v: (v[0], v[1] * jnp.arange(4.0)[:, None]))
        with pytest.raises(Exception, match="must not vary along it"):
            eqx.filter_jit(plant(fn, {"h": other}))(XS, w)[1].block_until_ready()


def test_plant_all_lanes_by_iteration():
    fn = jax.vmap(_pair_in_a_loop(lambda v: sow(v, "h")), (0, None))
    one = plant(fn, {"h/1": batched(lambda v: (_center(v[0]), v[1]))})
    at = lambda v, i: (jnp.where(i[0] == 1, _center(v[0]), v[0]), v[1])
    index = plant(fn, {"h": batched(at)}, with_index=True)
    w = jnp.ones(2)
    assert_close(one(XS, w), index(XS, w))
    x = XS
    for i in range(3):
        x = jnp.sin(x) + i
        x = _center(x) if i == 1 else x
    assert_close(one(XS, w)[0], x)


def test_plant_one_head():
    mha = eqx.nn.MultiheadAttention(2, 4, key=jr.key(0))
    x = jr.normal(jr.key(1), (3, 4))
    kill = {"*softmax": batched(lambda p: p.at[1].set(0))}
    got = plant(lambda x: mha(x, x, x), kill, capture=jax.nn.softmax)(x)
    split = lambda f: jax.vmap(f)(x).reshape(3, 2, 2)
    q, k, v = map(split, (mha.query_proj, mha.key_proj, mha.value_proj))
    p = jax.nn.softmax(jnp.einsum("shd,thd->hst", q / jnp.sqrt(2), k), axis=-1)
    heads = jnp.einsum("hst,thd->shd", p.at[1].set(0), v).reshape(3, 4)
    assert_close(got, jax.vmap(mha.output_proj)(heads))


def test_plant_cotangents_of_all_lanes():
    loss = lambda xs: jnp.sum(jax.vmap(lambda x: sow(jnp.sin(x), "h"))(xs) ** 2)
    got = plant(jax.grad(loss), {"h": batched(_center)}, mode="cotangent")(XS)
    assert_close(got, _center(2 * jnp.sin(XS)) * jnp.cos(XS))


@pytest.mark.slow
def test_plant_lanes_that_differ():
    some = lambda x: lax.cond(x[0] > 0, lambda x: sow(x, "h"), lambda x: x, x)
    with pytest.raises(SowError, match="only some lanes.*Without `batched`"):
        plant(jax.vmap(some), {"h": batched(_center)})(XS)
    every = jax.vmap(lambda x: sow(x, "h"))
    with pytest.raises(SowError, match="all lanes, as leading axes, and returns it so"):
        plant(every, {"h": batched(lambda x: x[0])})(XS)
    # A branch that all lanes run.
    same = lambda p, xs: lax.cond(p, every, lambda xs: xs, xs)
    assert_close(plant(same, {"h": batched(_center)})(True, XS), _center(XS))
    # A `vmap` around `plant` maps it.
    around = jax.vmap(plant(lambda x: sow(x, "h"), {"h": batched(_center)}))
    assert_close(around(XS), jax.vmap(_center)(XS))


@pytest.mark.filterwarnings("error")
def test_a_model_that_is_mapped_over_all_lanes_needs_no_warning():
    # Equinox warns of a field that JAX transformed.
    layer = eqx.nn.Linear(3, 3, key=jr.key(0))
    f = jax.vmap(lambda x: sow(jnp.sin(x), "h"))
    want = jax.vmap(layer)(jnp.sin(XS))
    assert_close(plant(f, {"h": batched(jax.vmap(layer))})(XS), want)
    got = S(f, transform=batched(jax.vmap(layer)))(XS)[1]
    assert_close(got["h"]["primal"], want)
