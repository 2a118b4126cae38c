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
from .tables import IN_ORDER, REDUCERS, under


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


runs = under("eager", "filter_jit", "filter_checkpoint")


@runs
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


@under("eager", "grad", argument="derive")
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


@under(of=IN_ORDER, argument="row")
def test_reducers_over_batches(row):
    batches = jnp.stack([XS, 2 * XS, jnp.sin(XS)])
    f = lambda x: sow(jnp.sin(x), "h").sum()
    train = lambda xs: lax.map(jax.vmap(f), xs)
    each = jax.vmap(_moment)(jnp.sin(batches))
    _, got = S(train, transform=batched(_moment), reduce=row.reducer)(batches)
    assert_close(got["h"]["primal"], row.by_hand(list(each), 0 * each[0]))


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


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "reduce",
    [
        None,
        REDUCERS["fold"].reducer,
        *(
            pytest.param(row.reducer, id=name, marks=pytest.mark.slow)
            for name, row in REDUCERS.items()
            if name != "fold"
        ),
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


@under("eager", "grad", argument="derive")
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


@runs
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
    if wrap is eqx.filter_jit:
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


# --- reducers of what `batched` returns ---
def _two_batches(layer, a, b):
    return (
        jax.vmap(layer)(a).sum() + jax.vmap(jax.vmap(layer))(b).sum() + layer(X).sum()
    )


LAYER = eqx.nn.Linear(3, 2, key=jr.key(1))
BATCHES = XS, jnp.sin(jnp.arange(36.0)).reshape(2, 6, 3)
LARGEST = batched(lambda h: jnp.abs(h).max())


@under("eager", "filter_grad", argument="derive")
@under(of=IN_ORDER, argument="row")
def test_reducers_combine_batches_of_all_sizes(derive, row):
    """A calibration: the same layer runs for 4 rows, for 2 times 6, and for one."""
    f = derive(_two_batches)
    _, got = S(f, capture=True, transform=LARGEST, reduce=row.reducer)(LAYER, *BATCHES)
    a, b = BATCHES
    each = [jnp.abs(jax.vmap(LAYER)(xs)).max() for xs in (a, b.reshape(12, 3), X[None])]
    zero = jnp.float32(0)
    assert_close(got["layer"]["primal"], row.by_hand(each, zero))
    if "cotangent" in got["layer"]:
        assert_close(got["layer"]["cotangent"], row.by_hand([zero + 1] * 3, zero))


@under("vmap", "jit", argument="around")
def test_reducers_combine_batches_in_a_vmap_around(around):
    saved = S(
        _two_batches, capture=True, transform=LARGEST, reduce=Fold(0.0, jnp.maximum)
    )
    each = lambda *batches: saved(LAYER, *batches)[1]["layer"]["primal"]
    a, b = BATCHES
    if around is jax.jit:
        assert_close(jax.jit(each)(a, b), each(a, b))
        return
    more = jnp.stack([a, 3 * a]), jnp.stack([b, b / 2])
    want = jnp.stack([each(a, b), each(3 * a, b / 2)])
    assert_close(jax.vmap(each)(*more), want)


def test_branches_with_batches_of_different_sizes():
    def f(p, a, b):
        mark = jax.vmap(lambda x: sow(jnp.sin(x), "h"))
        return lax.cond(p, lambda: mark(a).sum(), lambda: mark(b).sum())

    a, b = XS, jnp.concatenate([XS, 3 * XS])
    for p, xs in [(True, a), (False, b)]:
        _, got = S(f, transform=LARGEST)(p, a, b)
        assert_close(got["h"]["primal"], jnp.abs(jnp.sin(xs)).max())
        assert got["h"]["count"] == 1


def test_batches_of_different_sizes_that_are_not_reduced():
    with pytest.raises(SowError, match=r"vary over different axes: sizes \[2, 6\] at"):
        S(_two_batches, capture=True, reduce=Last())(LAYER, *BATCHES)


# --- names of vmapped axes ---
def _marked(name, mark):
    """Programs with a mark, and what they are mapped over."""

    def scanned(x):
        return lax.scan(lambda c, y: (mark(jnp.tanh(c + y)), None), x, X)[0]

    @jax.custom_vjp
    def custom(x):
        return mark(jnp.tanh(x))

    custom.defvjp(lambda x: (mark(jnp.tanh(x)), x), lambda x, g: (2 * g,))
    programs = {
        "plain": lambda x: mark(jnp.tanh(x)),
        "shared": lambda x: x * mark(jnp.tanh(X)),
        "scan": scanned,
        "while": lambda x: lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, mark(jnp.sin(c[1]))), (0, x)
        )[1],
        "branch": lambda x: lax.cond(X[0] > 0, lambda x: mark(jnp.sin(x)), jnp.cos, x),
        "checkpoint": jax.checkpoint(lambda x: mark(jnp.tanh(x))),
        "custom": custom,
    }
    return programs[name]


PROGRAMS = "plain", "shared", "scan", "while", "branch", "checkpoint", "custom"
BY_NAME = {
    "pmax": lambda h: lax.pmax(h.max(), "i"),
    "centred": lambda h: h - lax.pmean(h, "i"),
    "index": lambda h: lax.axis_index("i"),
    "size": lambda h: lax.psum(1, "i"),
    "ring": lambda h: lax.ppermute(h, "i", [(k, (k + 1) % 4) for k in range(4)]),
}
_inner = lambda f, name: lambda x: jax.vmap(lambda y: f(x + y), axis_name=name)(X)
MAPPED = {
    "vmap": lambda f: jax.vmap(f, axis_name="i"),
    "jit": lambda f: jax.jit(jax.vmap(jax.jit(f), axis_name="i")),
    "filter_vmap": lambda f: eqx.filter_vmap(f, axis_name="i"),
    "spmd": lambda f: jax.vmap(f, axis_name="i", spmd_axis_name="devices"),
    "outer": lambda f: jax.vmap(_inner(f, "j"), axis_name="i"),
    "inner": lambda f: jax.vmap(
        lambda x: jax.vmap(lambda y: f(x + y), axis_name="i")(XS), axis_name="j"
    ),
    "shadowed": lambda f: jax.vmap(
        lambda x: jax.vmap(lambda y: f(x + y), axis_name="i")(XS), axis_name="i"
    ),
    "grad": lambda f: jax.grad(lambda xs: jax.vmap(f, axis_name="i")(xs).sum()),
    "per example": lambda f: jax.vmap(jax.grad(lambda x: f(x).sum()), axis_name="i"),
}


def _skipped(program, mapped):
    return program == "while" and mapped in ("grad", "per example")


@pytest.mark.parametrize("mapped", MAPPED)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("fn", BY_NAME.values(), ids=BY_NAME)
@pytest.mark.sample(5)
def test_names_of_axes_in_a_transform(fn, program, mapped):
    """It is as if the code at the mark had marked the result."""
    if _skipped(program, mapped):
        return
    over = MAPPED[mapped]
    f = over(_marked(program, lambda h: sow(h, "h")))
    # JAX has no derivative of `pmax`.
    edit = lambda h: (sow(fn(lax.stop_gradient(h)), "h"), h)[1]
    edited = over(_marked(program, edit))
    _, got = S(f, transform=fn, modes="primal")(XS)
    _, expected = S(edited, modes="primal")(XS)
    assert_close(dict(got), dict(expected))
    assert got.axes("h", "primal") == expected.axes("h", "primal")


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("fn", BY_NAME.values(), ids=BY_NAME)
@pytest.mark.sample(5)
def test_names_of_axes_in_a_vmap_around(fn, program):
    f = _marked(program, lambda h: sow(h, "h"))
    edited = _marked(program, lambda h: (sow(fn(h), "h"), h)[1])
    got = jax.vmap(S(f, transform=fn), axis_name="i")(XS)
    assert_close(got, jax.vmap(S(edited), axis_name="i")(XS))


@pytest.mark.parametrize("mapped", list(MAPPED)[:-2])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.sample(5)
def test_names_of_axes_in_plant(program, mapped):
    over, centred = MAPPED[mapped], BY_NAME["centred"]
    f = over(_marked(program, lambda h: sow(h, "h")))
    assert_close(plant(f, {"h": centred})(XS), over(_marked(program, centred))(XS))


def test_names_of_axes_for_derivatives():
    f = jax.vmap(lambda x, w: jnp.sum(sow(w * jnp.sin(x), "h") ** 2), axis_name="i")
    ws = jnp.arange(12.0).reshape(4, 3)
    h, d = ws * jnp.sin(XS), ws * jnp.cos(XS)
    spread = lambda v: lax.pmax(v, "i") - lax.pmin(v, "i")
    expected = lambda v: v.max(0) - v.min(0)
    _, got = S(jax.grad(lambda xs, ws: f(xs, ws).sum()), transform=spread)(XS, ws)
    assert_close(got["h"]["primal"], expected(h))
    assert_close(got["h"]["cotangent"], expected(2 * h))
    tangent = lambda xs: jax.jvp(lambda xs: f(xs, ws), [xs], [jnp.ones_like(xs)])
    _, got = S(tangent, transform=spread)(XS)
    assert_close(got["h"]["tangent"], expected(d))
    # What is planted in place of a cotangent: that of all lanes, on average.
    grad = jax.grad(lambda xs: f(xs, ws).sum())
    mean = lambda g: lax.pmean(g, "i")
    out = plant(grad, {"h": mean}, mode="cotangent")(XS)
    assert_close(out, (2 * h).mean(0)[None] * d)


def test_names_of_axes_in_a_total():
    """`w` is shared: in the gradient its cotangent is the total of all lanes."""
    f = lambda w: jax.vmap(lambda x: _product(sow((x, w), "p")), axis_name="i")(
        XS
    ).sum()
    norms = lambda p: (lax.psum(jnp.sum(p[0]), "i"), jnp.sum(p[1]))
    _, got = S(jax.grad(f), transform=norms)(X)
    assert_close(got["p"]["cotangent"], (4 * X.sum(), XS.sum()))


def _product(pair):
    return jnp.sum(pair[0] * pair[1])


def test_names_of_axes_with_a_reducer():
    """Of different batches, as with `batched`."""

    def f(a, b):
        mark = jax.vmap(lambda x: sow(jnp.sin(x), "h"), axis_name="i")
        return mark(a), mark(b)

    largest = lambda h: lax.pmax(jnp.abs(h).max(), "i")
    a, b = XS, 2 * XS[:3]
    _, got = S(f, transform=largest, reduce=Fold(0.0, jnp.maximum))(a, b)
    expected = jnp.maximum(jnp.abs(jnp.sin(a)).max(), jnp.abs(jnp.sin(b)).max())
    assert_close(got["h"]["primal"], expected)


def test_names_of_axes_of_no_lanes():
    f = jax.vmap(lambda x: sow(jnp.sin(x), "h"), axis_name="i")
    _, got = S(f, transform=lambda h: lax.psum(h, "i"))(XS[:0])
    assert_close(got["h"]["primal"], jnp.zeros(3))


def _some_lanes(x):
    go_on = lambda c: c.sum() < 2
    x = lax.while_loop(go_on, lambda c: sow(c + 1, "loop"), x)
    return lax.cond(x[0] > 0, lambda x: sow(jnp.sin(x), "branch"), jnp.cos, x)


@pytest.mark.parametrize("name", ["loop", "branch"])
@pytest.mark.parametrize("option", ["transform", "plant", "when"])
def test_names_of_axes_where_only_some_lanes_run(name, option):
    f, fn = jax.vmap(_some_lanes, axis_name="i"), lambda h: lax.pmax(h, "i")
    calls = {
        "transform": S(f, names=name, transform=fn),
        "plant": plant(f, {name: fn}),
        "when": tap(f, lambda event: None, names=name, when=lambda h: fn(h).sum() > 0),
    }
    with pytest.raises(
        SowError, match="axis name 'i', which is not known there. The m"
    ):
        calls[option](XS)


def test_names_of_axes_where_all_lanes_run_one_branch():
    """The predicate varies over the outer vmap alone."""

    def f(x):
        branch = lambda y: lax.cond(x[0] > 0, lambda y: sow(y * x, "h"), jnp.cos, y)
        return jax.vmap(branch, axis_name="j")(XS)

    _, got = S(jax.vmap(f, axis_name="i"), transform=lambda h: lax.pmax(h, "j"))(XS)
    expected = jnp.where(XS[:, :1] > 0, (XS[:, None] * XS[None]).max(1), 0)
    assert_close(got["h"]["primal"], expected)
    with pytest.raises(SowError, match="axis name 'i', which is not known there"):
        S(jax.vmap(f, axis_name="i"), transform=lambda h: lax.pmax(h, "i"))(XS)


@pytest.mark.parametrize("call", [S, plant])
def test_batched_knows_no_names(call):
    """The lanes are a leading axis there."""
    f = jax.vmap(lambda x: sow(jnp.sin(x), "h"), axis_name="i")
    fn = batched(lambda h: lax.pmax(h, "i"))
    run = S(f, transform=fn) if call is S else plant(f, {"h": fn})
    with pytest.raises(SowError, match="sees all lanes of that `jax.vmap` at once"):
        run(XS)


def test_a_name_that_there_is_not():
    f = jax.vmap(lambda x: sow(jnp.sin(x), "h"), axis_name="i")
    with pytest.raises(NameError, match="unbound axis name: batch"):
        S(f, transform=lambda h: lax.pmax(h, "batch"))(XS)


@pytest.mark.parametrize(
    "fn",
    [
        lambda p: (p[0] + p[1], p[1]),
        lambda p: (p[0] + lax.axis_index("i").astype(jnp.float32), p[1]),
    ],
    ids=["value", "index"],
)
def test_plant_of_what_differs_between_lanes_for_one_value(fn):
    f = jax.vmap(lambda x: _product(sow((X, x), "p")), axis_name="i")
    with pytest.raises(
        SowError, match="has one value for all lanes of a `jax.vmap`, b"
    ):
        plant(f, {"p": fn})(XS)
    reduced = lambda p: (lax.pmean(fn(p)[0], "i"), p[1])
    expected = jax.vmap(lambda x: _product(reduced((X, x))), axis_name="i")(XS)
    assert_close(plant(f, {"p": reduced})(XS), expected)


def test_a_fold_knows_no_names():
    f = jax.vmap(lambda x: sow(jnp.sin(x), "h"), axis_name="i")
    largest = Fold(0.0, lambda acc, h: jnp.maximum(acc, lax.pmax(h.max(), "i")))
    with pytest.raises(SowError, match="is not known there. A reducer sees one lane."):
        S(f, reduce=largest)(XS)


def test_names_of_axes_in_when():
    """All lanes are one event, which some of them may ask for, or all together."""

    def sent(when):
        f = jax.vmap(lambda x: sow(jnp.sin(x), "h"), axis_name="i")
        events = []
        tap(f, events.append, when=when)(XS)
        jax.effects_barrier()
        return len(events)

    total = jnp.sin(XS).sum()
    for least in (total - 0.1, total + 0.1):
        above = lambda h, least=least: lax.psum(h.sum(), "i") > least
        assert sent(above) == int(total > least)


def test_one_function_under_several_names():
    """Nothing that is kept from one call counts in the next."""
    f = jax.jit(lambda x: sow(jnp.sin(x), "h"))
    h = jnp.sin(XS)
    for _ in range(2):
        for name in ("i", "j", None, "i"):
            largest = lambda h, name=name: lax.pmax(h, name) if name else -h
            mapped = jax.vmap(f, axis_name=name)
            _, got = S(mapped, transform=largest)(XS)
            assert_close(got["h"]["primal"], h.max(0) if name else -h)
