"""Which primal a cotangent belongs to, what a backward pass runs once more, and leaves
that only some lanes, or some branches, differentiate."""

import functools as ft

import diffrax
import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_sow import (
    Append,
    batched,
    Buffer,
    DuplicateSowError,
    Fold,
    Last,
    plant,
    save_intermediates as S,
    scope,
    sow,
    SowError,
    tabulate,
    tap,
)
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from .helpers import assert_close, close
from .tables import named, REDUCERS, under


X = jnp.array([0.3, 0.7])
_xfail = ft.partial(
    pytest.mark.xfail,
    getattr(jax.config, "jax_custom_vjp3", False),
    reason="Until Equinox's checkpointed loop runs with JAX_CUSTOM_VJP3",
    raises=AttributeError,
)
_needs_checkpointed_loop = _xfail()
# Some of these loops run, such as those in the `bwd` of a function.
_may_need_checkpointed_loop = _xfail(strict=False)


# --- a leaf that is the same for all lanes ---
W = jnp.array([2.0, 3.0])
XS = jnp.arange(6.0).reshape(3, 2)


def _pair(w, x, mark=sow):
    a, b = mark((jnp.tanh(w), x * w), "v")
    return (a * b).sum()


def _batched(w, xs):
    return jax.vmap(lambda x: _pair(w, x))(xs).sum()


# The zero that is added is one for all lanes where the leaf is.
def _perturbed(eps, w, xs):
    one, each = eps

    def lane(x, e):
        return _pair(w, x, lambda v, name: (v[0] + one, v[1] + e))

    return jax.vmap(lane)(xs, each).sum()


WANT = jax.grad(_perturbed)((jnp.zeros(2), jnp.zeros((3, 2))), W, XS)
grad_batched = jax.grad(_batched)


@under("eager", "jit", "checkpoint")
def test_cotangent_of_a_leaf_that_is_the_same_for_all_lanes_is_the_total(wrap):
    _, got = S(jax.grad(wrap(_batched)))(W, XS)
    assert_close(got["v"]["cotangent"], WANT)
    # The primal is one value: it has the axis on all its leaves.
    assert [x.shape for x in got["v"]["primal"]] == [(3, 2), (3, 2)]
    _, got = S(grad_batched, reduce=Append())(W, XS)
    assert_close(got["v"]["cotangent"], (WANT,))


# The cotangent of the second leaf does not depend on `x`: it is the same in each lane.
@under("eager", "jit", "checkpoint")
@pytest.mark.parametrize(
    "options",
    [{}, dict(reduce=Last()), dict(transform=lambda v: (v[1], v[0]))],
    ids=["plain", "last", "transform"],
)
def test_cotangent_that_is_the_same_in_each_lane_has_the_axis_of_the_others(
    wrap, options
):
    def f(w, x):
        a, b = sow((jnp.sin(x * w), x * w), "v")
        return (a**2 + 3.0 * b).sum()

    def in_loop(w, x):
        return lax.scan(lambda c, _: (f(c, x) * w, None), w, None, length=2)[0].sum()

    for fn in (f, in_loop):
        derive = jax.grad(wrap(fn))
        _, got = S(jax.vmap(derive, (None, 0)), **options)(W, XS)
        _, want = jax.vmap(S(derive, **options), (None, 0))(W, XS)
        assert_close(got, want)
        shapes = [{x.shape for x in v} for v in got["v"].values()]
        assert len(shapes) == 2 and shapes[0] == shapes[1] and len(shapes[0]) == 1


def test_second_cotangent_of_what_is_the_same_for_all_lanes_is_the_total():
    # The cotangent of `a` is `b`, which all lanes share.
    def f(w, x, name="v"):
        a, b = sow((jnp.sin(x * w), jnp.cos(w)), name)
        return (a * b + b**2).sum()

    def penalty(w, *args):
        return (jax.grad(f)(w, *args) ** 2).sum()

    mode = "cotangent.cotangent"
    in_lanes = lambda w: jax.vmap(penalty, (None, 0))(w, XS).sum()
    written_out = lambda w: sum(penalty(w, x, f"v/{i}") for i, x in enumerate(XS))
    _, want = S(jax.grad(written_out))(W)
    a, b = (jnp.stack(x) for x in zip(*(modes[mode] for modes in want.values())))
    _, got = S(jax.grad(in_lanes))(W)
    assert_close(got["v"][mode], (a.sum(0), b))
    _, got = S(jax.grad(in_lanes), transform=lambda v: 2 * v[0])(W)
    assert_close(got["v"][mode], 2 * a.sum(0))
    # And with lanes around both derivatives, each has its own.
    ws = jnp.stack([W, 2 * W])
    _, got = S(jax.vmap(jax.grad(in_lanes)))(ws)
    _, want = jax.vmap(S(jax.grad(in_lanes)))(ws)
    assert_close(got, want)


def test_batched_sees_all_lanes_of_a_cotangent_that_is_the_same_in_each():
    def f(x):
        a, b = sow((jnp.sin(x), x), "v")
        return (a**2 + 3.0 * b).sum()

    norms = batched(lambda v: (v[0] ** 2).sum() + (v[1] ** 2).sum())
    _, got = S(jax.vmap(jax.grad(f)), transform=norms)(XS)
    a, b = 2 * jnp.sin(XS), jnp.full_like(XS, 3.0)
    assert_close(got["v"]["cotangent"], (a**2).sum() + (b**2).sum())


def test_reducers_of_a_total():
    _, got = S(grad_batched, reduce=Last())(W, XS)
    assert_close(got["v"]["cotangent"], WANT)
    _, got = S(grad_batched, reduce=Buffer(1))(W, XS)
    # The lanes come before the executions.
    total, each = got["v"]["cotangent"]
    assert_close((total[0], each[:, 0]), WANT)
    _, got = S(grad_batched, transform=lambda v: (2 * v[0], v[0] + v[1]))(W, XS)
    total, each = WANT
    assert_close(got["v"]["cotangent"], (2 * total, total[None] + each))


def test_a_total_in_a_scan_has_the_axis_of_the_loop():
    def loop(w, xs):
        def body(c, _):
            return c + jax.vmap(lambda x: _pair(c, x))(xs).sum(), None

        return lax.scan(body, w, None, length=2)[0].sum()

    _, got = S(jax.grad(loop))(W, XS)
    total, each = got["v"]["cotangent"]
    assert (total.shape, each.shape) == ((2, 2), (2, 3, 2))
    unrolled = lambda e, w: loop_by_hand(e, w, XS)

    def loop_by_hand(e, w, xs):
        for one, each in e:
            step = lambda x, each, w=w, one=one: _pair(
                w, x, lambda v, name: (v[0] + one, v[1] + each)
            )
            w = w + jax.vmap(step)(xs, each).sum()
        return w.sum()

    zeros = [(jnp.zeros(2), jnp.zeros((3, 2)))] * 2
    want = jax.grad(unrolled)(zeros, W)
    close(total, np.stack([t for t, _ in want]), rtol=1e-4)
    close(each, np.stack([e for _, e in want]), rtol=1e-4)


def test_a_total_can_be_planted():
    out, got = S(grad_batched)(W, XS)
    close(plant(grad_batched, got, mode="cotangent")(W, XS), out)
    doubled = jax.tree.map(lambda x: 2 * x, got["v"]["cotangent"])
    close(plant(grad_batched, {"v": doubled}, mode="cotangent")(W, XS), 2 * out)
    wrong = (jnp.ones((3, 2)), doubled[1])
    with pytest.raises(SowError, match=r"float32\[3, 2\] where float32\[2\] is marked"):
        plant(grad_batched, {"v": wrong}, mode="cotangent")(W, XS)
    assert "f32[2]" in tabulate(got) and "f32[3,2]" in tabulate(got)


def test_a_total_beside_values_of_each_lane_in_branches():
    def f(p, w, x):
        one = lambda: sow((w, x), "v")
        return (lambda v: v[0] * v[1])(lax.cond(p, one, lambda: sow((w * x, x), "v")))

    loss = lambda w, xs: jax.vmap(lambda x: f(True, w, x))(xs).sum()
    with pytest.raises(SowError, match="where its cotangent is the total"):
        S(jax.grad(lambda w, xs, p: jax.vmap(lambda x: f(p, w, x))(xs).sum()))(
            W, XS, True
        )
    assert S(loss)(W, XS)[1]["v"]["primal"][0].shape == (3, 2)


# --- leaves that are differentiated in one branch only ---
Y = jnp.array(3.0)


def _branches(p, x):
    def both(x):
        return sow((2 * x, 3 * x), "v")

    def first(x):
        return sow((5 * x, 7 * Y), "v")

    a, b = lax.cond(p, both, first, x)
    return a * b


def _cotangent(p, x):
    return (3 * x, 2 * x) if p else (7 * Y, 5 * x)


@pytest.mark.parametrize("p", [True, False])
def test_one_branch_differentiates_a_leaf_and_the_other_does_not(p):
    x = jnp.array(2.0)
    g = jax.grad(_branches, 1)
    for options in ({}, {"reduce": Last()}, {"reduce": Append()}):
        _, got = S(g, **options)(p, x)
        value = got["v"]["cotangent"]
        value = value[0] if "reduce" in options and len(value) == 1 else value
        for mine, want in zip(value, _cotangent(p, x), strict=True):
            close(mine, want)
    captured = S(g)(p, x)[1]
    for mode in ("primal", "cotangent"):
        close(plant(g, captured, mode=mode)(p, x), g(p, x))
    twice = {"v": lambda v: jax.tree.map(lambda t: 2 * t, v)}
    close(plant(g, twice, mode="cotangent")(p, x), 2 * g(p, x))
    tangents = lambda x: jax.jvp(lambda x: _branches(p, x), (x,), (jnp.ones(()),))
    _, got = S(tangents)(x)
    for mine, want in zip(got["v"]["tangent"], (2, 3) if p else (5, 0), strict=True):
        close(mine, want)


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
def test_a_numpy_array_in_one_branch_is_an_error(as_array):
    def f(x):
        def no(x):
            a, b = sow((2 * x, as_array(np.ones(2, np.float32))), "v")
            return a * b[0]

        return lax.cond(x > 0, lambda x: sow((x, 3 * x * jnp.ones(2)), "v")[0], no, x)

    assert S(f)(jnp.array(2.0))[1]["v"]["count"] == 1
    if as_array is jnp.asarray:
        close(S(jax.grad(f))(jnp.array(-2.0))[1]["v"]["cotangent"][1], [-4.0, 0.0])
    else:
        with pytest.raises(SowError, match=r"has no cotangent, .* `jnp.asarray\("):
            S(jax.grad(f))(jnp.array(2.0))


P = jnp.array([True, False])


def test_branches_of_which_each_lane_takes_one():
    lanes = jax.vmap(jax.grad(_branches, 1))
    inside = jax.grad(lambda p, x: jax.vmap(_branches)(p, x).sum(), 1)
    want = [jnp.stack(z) for z in zip(*[_cotangent(bool(p), x) for p, x in zip(P, X)])]
    for g in (lanes, inside):
        out, got = S(g)(P, X)
        for mine, value in zip(got["v"]["cotangent"], want, strict=True):
            close(mine, value)
        close(plant(g, got, mode="cotangent")(P, X), out)


@under(of=REDUCERS, argument="row")
def test_places_that_differentiate_different_leaves(row):
    def f(x):
        a, b = sow((2 * x, 3 * x), "v")
        c, d = sow((5 * x, 7 * Y), "v")
        return a * b + c * d

    x = jnp.array(2.0)
    _, got = S(jax.grad(f), reduce=row.reducer)(x)
    places = [(6 + 0 * x, 4 + 0 * x), (21 + 0 * x, 10 + 0 * x)]
    # The backward pass has the last one first.
    want = row.by_hand(places[::-1] if row.in_order else places, (0 * x, 0 * x))
    assert_close(got["v"]["cotangent"], want)


# --- leaves that nothing differentiates, beside others ---
def _as_custom_jvp(f):
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return g


def _in_cond(f):
    return lambda x, y: lax.cond(x[0] < 9, f, lambda x, y: 0.0, x, y)


def _xy(value):
    return {k: value[k] for k in "xy"}


def _both(mark, x, y):
    ints = {"i": jnp.arange(2), "numpy": np.ones(2, np.float32)}
    t = mark({"x": jnp.sin(x), "y": y, **ints}, "both")
    return jnp.sum(t["x"] * jnp.cos(t["y"]))


def _scanned(eps, x, y, mark=lambda v, eps: jax.tree.map(jnp.add, v, eps)):
    def body(c, eps):
        x, y = mark((jnp.sin(c[0]) * c[1], c[1]), eps)
        return (x, 1.1 * y), None

    x, y = lax.scan(body, (x, y), eps)[0]
    return jnp.sum(x * jnp.cos(y))


NO_EPS = (jnp.zeros((3, 2)),) * 2
every_call = under("eager", "jit", "checkpoint", _as_custom_jvp, _in_cond)


@every_call
def test_the_cotangent_of_a_value_is_that_of_all_of_it(call, wrap):
    """Law 4, differentiated with respect to `x` alone."""
    y = jnp.array([2.0, -1.0])
    _, got = call(S(jax.grad(wrap(ft.partial(_both, sow)))), X, y)
    cotangent = got["both"]["cotangent"]
    add = lambda eps: lambda v, name: {**v, **jax.tree.map(jnp.add, _xy(v), eps)}
    zeros = dict(x=jnp.zeros(2), y=jnp.zeros(2))
    want = jax.grad(lambda eps: _both(add(eps), X, y))(zeros)
    assert_close(_xy(cotangent), want)
    for name in ("i", "numpy"):
        assert cotangent[name].dtype == jax.dtypes.float0


@every_call
def test_the_cotangent_of_a_value_is_that_of_all_of_it_in_loops(call, wrap):
    y = jnp.array([2.0, -1.0])
    f = wrap(lambda x, y: _scanned(NO_EPS, x, y, lambda v, _: sow(v, "both")))
    want = jax.grad(_scanned)(NO_EPS, X, y)
    _, got = call(S(jax.grad(f)), X, y)
    assert_close(got["both"]["cotangent"], want)
    xs = jnp.stack([X, 2 * X])
    each = jax.vmap(jax.grad(_scanned), (None, 0, None))
    want = each(NO_EPS, xs, y)
    _, got = call(S(jax.vmap(jax.grad(f), (0, None))), xs, y)
    assert_close(got["both"]["cotangent"], want)


def test_in_every_mode():
    y = jnp.array([2.0, -1.0])
    f = lambda x: _both(sow, x, y)
    _, got = S(lambda x: jax.jvp(jax.grad(f), (x,), (x,)))(X)
    assert_close(_xy(got["both"]["tangent"]), dict(x=jnp.cos(X) * X, y=jnp.zeros(2)))
    want = dict(x=jnp.zeros(2), y=-jnp.sin(y) * jnp.cos(X) * X)
    assert_close(_xy(got["both"]["cotangent.tangent"]), want)


# The derivative of the square root at 0 is infinite: times a tangent of zeros, rather
# than none at all, it would be NaN.
def _beside_a_root(mark, x):
    h = mark({"x": x, "y": jnp.zeros(2)}, "h")
    return jnp.sum(h["x"] * jnp.sqrt(h["y"]))


def _beside_a_wall(mark, x):
    h = mark({"x": x, "y": jnp.ones(2)}, "h")
    return jnp.sum(h["x"] * eqx.internal.nondifferentiable(h["y"]))


def _beside_a_refusal(mark, x):
    @jax.custom_jvp
    def refuse(y):
        return y

    @refuse.defjvp
    def _(primals, tangents):
        raise RuntimeError("cannot be differentiated")

    h = mark({"x": x, "y": jnp.ones(2)}, "h")
    return jnp.sum(h["x"] * refuse(h["y"]))


def _in_scan(f):
    return lambda x: lax.scan(lambda c, _: (c * f(x), None), 1.0, None, length=2)[0]


@pytest.mark.parametrize("f", [_beside_a_root, _beside_a_wall, _beside_a_refusal])
@under("eager", "jit", "checkpoint", _in_scan)
@pytest.mark.parametrize(
    "derivative",
    [
        jax.grad,
        lambda f: lambda x: jax.jvp(f, (x,), (x,)),
        lambda f: lambda x: jax.linearize(f, x)[1](x),
        jax.hessian,
        lambda f: jax.grad(lambda x: jax.jvp(f, (x,), (x,))[1]),
    ],
    ids=["grad", "jvp", "linearize", "hessian", "grad of jvp"],
)
def test_a_leaf_that_the_program_does_not_differentiate_changes_nothing(
    f, wrap, derivative
):
    """Law 1, and law 10: with a capture or without, the same numbers."""
    run = lambda mark: derivative(wrap(lambda x: f(mark, x)))
    want = run(lambda v, name: v)(X)
    got, intermediates = S(run(sow))(X)
    assert_close(got, want)
    assert eqx.is_array(intermediates["h"]["primal"]["y"])
    assert_close(S(run(sow), modes="primal")(X)[0], want)
    assert_close(tap(run(sow), lambda event: None)(X), want)


def test_a_value_of_which_no_leaf_is_differentiated_has_no_cotangent():
    _, got = S(jax.grad(lambda x, y: (x * sow((y, 2 * y), "y")[0]).sum()))(X, X)
    assert set(got["y"]) == {"primal"}


# --- which cotangent belongs to which primal ---
def _square(x):
    return sow(x * x, "d")


wraps = under("eager", "jit", "filter_jit")


@wraps
@pytest.mark.parametrize("first", [0, 1])
def test_functions_from_vjp_in_any_order(wrap, first):
    d = wrap(_square)

    def f(x):
        _, one = jax.vjp(d, x)
        _, two = jax.vjp(d, 2 * x)
        calls = [lambda: one(3.0), lambda: two(5.0)]
        return calls[first](), calls[1 - first]()

    _, got = S(f, reduce=Append())(2.0)
    assert got["d"] == {"primal": (4.0, 16.0), "cotangent": (3.0, 5.0)}


@under("jit", "checkpoint")
@pytest.mark.parametrize("backward", [False, True])
def test_calls_of_one_function_in_any_order(wrap, backward):
    d = wrap(_square)

    def f(x):
        pulls = [jax.vjp(d, x * i)[1] for i in (1.0, 2.0)]
        pulls = list(zip(pulls, (3.0, 5.0), strict=True))
        return [pull(ct) for pull, ct in (pulls[::-1] if backward else pulls)]

    _, got = S(f, reduce=Append())(2.0)
    assert got["d"] == {"primal": (4.0, 16.0), "cotangent": (3.0, 5.0)}
    _, got = S(lambda x: f(x), reduce=Last())(2.0)
    assert got["d"] == {"primal": 16.0, "cotangent": 3.0 if backward else 5.0}


def test_pullbacks_of_unrelated_calls_that_need_each_other():
    d = jax.jit(_square)

    def f(x, ct):
        pulls = [jax.vjp(d, x * i)[1] for i in (1.0, 2.0)]
        for pull in pulls:
            (ct,) = pull(ct)
        return ct

    _, got = S(f, reduce=Append())(2.0, 3.0)
    assert got["d"] == {"primal": (4.0, 16.0), "cotangent": (3.0, 3.0 * 4.0)}


@under("eager", "jit", "vmap", argument="around")
@pytest.mark.parametrize("fn", [lambda x: x * x, jnp.exp])
@pytest.mark.parametrize(
    "order", [(2, 1, 0), (0, 1, 2), (1, 0, 2), (2, 0, 1), (0, 1), (1,)]
)
def test_pullbacks_of_a_function_called_on_its_own_result(fn, around, order):
    d = jax.jit(lambda x: sow(fn(x), "d"))

    def f(x, ct, d=d):
        pulls = []
        for _ in range(3):
            x, pull = jax.vjp(d, x)
            pulls.append(pull)
        seen = [None] * 3
        for i in order:
            seen[i] = ct
            (ct,) = pulls[i](ct)
        return seen

    _, got = S(around(f), reduce=Append())(0.1 * X, X)
    want = around(lambda x, ct: f(x, ct, fn))(0.1 * X, X)
    for mine, theirs in zip(got["d"]["cotangent"], want, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            close(mine, theirs)


def _three_times(f):
    return lambda x: lax.scan(lambda c, _: (1.1 * c, f(c)), x, None, length=3)[1]


@pytest.mark.parametrize("around", [jax.jit, jax.vmap, _three_times])
@under("jit", "checkpoint", _as_custom_jvp)
@pytest.mark.parametrize("fn", [jnp.sin, lambda x: 2 * x])
def test_pullbacks_in_any_order_in_calls_and_loops(fn, wrap, around):
    def pulled(d):
        def f(x):
            pulls = [jax.vjp(d, x * i)[1] for i in (1, 2, 3)]
            second = pulls[1](x)[0]
            return pulls[2](second)[0], pulls[0](jnp.cos(x))[0], second

        return f

    _, got = S(around(pulled(wrap(lambda x: sow(fn(x), "d")))), reduce=Append())(X)
    cts = around(lambda x: (jnp.cos(x), x, pulled(fn)(x)[2]))(X)
    jax.tree.map(close, got["d"]["cotangent"], cts)


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_two_functions_from_vjp(used):
    d = jax.jit(_square)

    def f(x):
        pulls = jax.vjp(d, x)[1], jax.vjp(d, 2 * x)[1]
        return pulls[used](3.0)

    _, got = S(f, reduce=Append())(2.0)
    want = (3.0, None) if used == 0 else (None, 3.0)
    assert got["d"]["cotangent"] == want


def test_a_function_from_vjp_that_is_called_twice():
    """The first cotangents are those of the primals, in their order."""

    def f(x):
        pulls = [jax.vjp(_square, x * i)[1] for i in (1, 2)]
        return pulls[1](5.0)[0] + pulls[0](3.0)[0] + pulls[1](7.0)[0]

    _, got = S(f, reduce=Append())(2.0)
    assert got["d"]["primal"] == (4.0, 16.0)
    assert got["d"]["cotangent"] == (3.0, 5.0, 7.0)


@under("eager", "jit", "checkpoint")
def test_gradients_of_a_function_from_vjp_that_is_called_twice(wrap):
    """Those of each cotangent stand where it does."""

    def f(x):
        pull = jax.vjp(lambda x: sow(jnp.sin(x), "h") * x, x)[1]
        return jnp.tanh(pull(1.0)[0]) + 0.3 * pull(2.0)[0] ** 2 + pull(3.0)[0]

    def by_hand(eps, x):
        cts = [(w * x + e, w) for w, e in zip((1.0, 2.0, 3.0), eps, strict=True)]
        a, b, c = (ct * jnp.cos(x) + w * jnp.sin(x) for ct, w in cts)
        return jnp.tanh(a) + 0.3 * b**2 + c, [ct for ct, _ in cts]

    want, cotangents = jax.grad(by_hand, has_aux=True)((0.0,) * 3, 0.5)
    got = S(jax.grad(wrap(f)), reduce=Append())(0.5)[1]["h"]
    close(jnp.stack(got["cotangent"]), cotangents)
    close(jnp.stack(got["cotangent.cotangent"]), want)


@under("jit", "checkpoint", "filter_jit")
def test_layers_in_a_python_loop_that_share_a_jitted_function(wrap):
    d = wrap(_square)

    def f(x, eps=(0.0, 0.0, 0.0), run=d):
        for e in eps:
            x = run(x) + e
        return x

    _, got = S(jax.grad(f), reduce=Append())(1.1)
    plain = lambda e: f(1.1, e, lambda x: x * x)
    for mine, want in zip(got["d"]["cotangent"], jax.grad(plain)((0.0,) * 3)):
        close(mine, want)


def test_linear_transpose_of_what_never_ran_forward():
    def f(x):
        y = sow(2 * x, "h")
        g = lambda v: sow(sow(3 * v, "h") * 2, "h")
        return jax.linear_transpose(g, x)(y)[0]

    _, got = S(f, reduce=Append())(X)
    close(got["h"]["primal"][0], 2 * X)
    none, last, first = got["h"]["cotangent"]
    assert none is None
    close(last, 2 * X)
    close(first, 4 * X)


def test_what_was_linearized_in_a_capture_is_called_after_it():
    """There the marks of what JAX has kept are off."""
    f = lambda x: sow(jnp.sin(x), "h") * 2
    for wrap in (lambda f: f, jax.jit, jax.checkpoint):
        (_, pull), got = S(lambda x, wrap=wrap: jax.vjp(wrap(f), x))(X)
        close(got["h"]["primal"], np.sin(X))
        close(pull(np.ones_like(X))[0], 2 * np.cos(X))
        (_, push), _ = S(lambda x, wrap=wrap: jax.linearize(wrap(f), x))(X)
        close(push(np.ones_like(X)), 2 * np.cos(X))


def test_a_program_that_cannot_be_differentiated_runs_once():
    """But for one in which a leaf has a derivative due to the mark alone."""
    runs = []

    def loss(x, mark):
        runs.append(x)
        x = mark(x)
        return lax.while_loop(lambda x: x[0] < 3, lambda x: x + 1, x).sum()

    with pytest.raises(ValueError, match="while_loop"):
        S(jax.grad(lambda x: loss(x, lambda x: sow(x, "h"))))(X)
    assert len(runs) == 1


# --- what a backward pass runs once more ---
def _with_rules(fwd, bwd):
    f = jax.custom_vjp(fwd)
    f.defvjp(lambda x: (fwd(x), x), bwd)
    return jax.grad(lambda x: f(x).sum())


def _sine(x):
    return sow(jnp.sin(x), "net")


@under("eager", "jit")
def test_other_values_that_a_bwd_sows_are_executions(wrap):
    g = wrap(_with_rules(_sine, lambda x, ct: (ct * _sine(-5 * x),)))
    first, second = S(g, reduce=Append())(X)[1]["net"]["primal"]
    close(first, np.sin(X))
    close(second, np.sin(-5 * X))
    close(S(g, reduce=Last())(X)[1]["net"]["primal"], np.sin(-5 * X))
    buffer = S(g, reduce=Buffer(2))(X)[1]["net"]
    close(buffer["primal"], [np.sin(X), np.sin(-5 * X)])
    assert buffer["count"] == 2
    with pytest.raises(DuplicateSowError, match="in a backward pass"):
        S(g)(X)
    events = []
    tap(g, events.append)(X)
    jax.effects_barrier()
    assert sorted(e.count for e in events) == [0, 1]


@under("eager", "jit")
def test_a_loop_of_a_bwd_that_calls_the_forward_function(wrap):
    sine = wrap(_sine)

    def bwd(x, ct):
        body = lambda i, c: c + sine(-5.0 * x * i)
        return (ct * lax.fori_loop(1, 4, body, x),)

    g = _with_rules(sine, bwd)
    first, others = S(g, reduce=Append())(X)[1]["net"]["primal"]
    close(first, np.sin(X))
    close(others, np.stack([np.sin(-5 * X * i) for i in (1, 2, 3)]), rtol=1e-4)
    assert S(g, reduce=Buffer(8))(X)[1]["net"]["count"] == 4
    with pytest.raises(DuplicateSowError):
        S(g)(X)


_A = jnp.array([[2.0, 0.5], [0.5, 3.0]])


# JAX keeps the jaxpr of a loop whose functions it has seen, so that both of its calls
# have the same equations inside, as those of a jitted function do.
def _more(c):
    return c[0] < 30


def _richardson(c):
    n, x, b = c
    return n + 1, sow(x + 0.3 * (b - _A @ x), "x"), b


def _descent(c):
    n, x, b = c
    error = lambda x: x @ _A @ x / 2 - b @ sow(x, "x")
    return n + 1, x - 0.3 * jax.grad(error)(x), b


@pytest.mark.sample(6)
@under("eager", "jit")
@pytest.mark.parametrize("inner", [lambda f: f, lambda f: tap(f, lambda event: None)])
@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("step", [_richardson, _descent])
def test_a_bwd_that_calls_the_same_solver(wrap, inner, length, jitted, step):
    def solve(b):
        return lax.while_loop(_more, step, (0, 0 * b, b))[1]

    solve = jax.jit(solve) if jitted else solve
    f = jax.custom_vjp(lambda b: solve(b))
    f.defvjp(lambda b: (solve(b), None), lambda _, ct: (solve(ct),))
    steps = lambda b: lax.scan(lambda b, _: (f(b), None), b, length=length)[0]
    g = wrap(inner(jax.grad(lambda b: (f if length == 1 else steps)(b).sum())))

    def solutions(b):
        found = [b := np.linalg.solve(_A, b) for _ in range(length)]
        return found[0] if length == 1 else np.stack(found)

    forward, backward = S(g, reduce=Append())(X)[1]["x"]["primal"]
    close(forward, solutions(X), rtol=1e-4)
    # A backward pass goes from the last iteration to the first.
    want = solutions(np.ones(2))
    close(backward, want if length == 1 else want[::-1], rtol=1e-4)
    with pytest.raises(DuplicateSowError, match="in a backward pass"):
        S(g)(X)


def _momentum(c):
    n, x, v, b = c
    error = lambda x: x @ _A @ x / 2 - b @ sow(x, "x")
    v = 0.1 * v - 0.3 * jax.grad(error)(x)
    return n + 1, x + v, v, b


@under("eager", "jit")
def test_a_bwd_that_calls_the_same_solver_in_a_loop(wrap):
    solve = wrap(lambda b: lax.while_loop(_more, _momentum, (0, 0 * b, 0 * b, b))[1])

    def bwd(_, ct):
        again = lambda c: (c[0] + 1, solve(c[1]))
        return (lax.while_loop(lambda c: c[0] < 2, again, (0, ct))[1],)

    g = _with_rules(lambda b: solve(b), bwd)
    first, last = S(g, reduce=Append())(X)[1]["x"]["primal"]
    inverse = np.linalg.inv(_A)
    close(first, inverse @ X, rtol=1e-4)
    close(last, inverse @ inverse @ np.ones(2), rtol=1e-4)
    with pytest.raises(DuplicateSowError, match="in a backward pass"):
        S(g)(X)


@pytest.mark.parametrize("n", [1, 2])
def test_a_loop_of_a_bwd_that_evaluates_at_other_points(n):
    def repeated(x):
        for_each = lambda c, _: (_sine(c), None)
        return _sine(x) if n == 1 else lax.scan(for_each, x, length=n)[0]

    def sines(x):
        found = [x := np.sin(x) for _ in range(n)]
        return found[0] if n == 1 else np.stack(found)

    once = jax.jit(repeated)
    checkpointed = jax.checkpoint(once)
    # JAX takes jaxprs of these from the first program for the second and the third.
    programs = (
        (repeated, checkpointed),
        (checkpointed, once),
        (checkpointed, checkpointed),
    )
    for forward, again in programs:

        def bwd(x, ct):
            step = lambda c: (c[0] + 1, again(c[1]))
            return (ct * lax.while_loop(lambda c: c[0] < 3, step, (0, x + 1))[1],)

        g = _with_rules(forward, bwd)
        first, last = S(g, reduce=Append())(X)[1]["net"]["primal"]
        close(first, sines(X))
        begin = X + 1
        for _ in range(2 * n):
            begin = np.sin(begin)
        close(last, sines(begin))
        with pytest.raises(DuplicateSowError, match="in a backward pass"):
            S(g)(X)


@under("eager", "jit")
@pytest.mark.parametrize("length", [None, 3])
def test_a_loop_of_a_bwd_that_differentiates_at_other_points(wrap, length):
    """What it differentiates is in a checkpoint, which JAX traces once."""
    sine = jax.checkpoint(_sine)

    def forward(x):
        if length is None:
            step = lambda c: (c[0] + 1, sine(c[1]))
            return lax.while_loop(lambda c: c[0] < 3, step, (0, x))[1]
        return lax.scan(lambda c, _: (sine(c), None), x, length=length)[0]

    def bwd(x, ct):
        def step(c):
            n, x, _ = c
            return n + 1, x + jax.grad(lambda x: sine(x).sum())(x), x

        return (lax.while_loop(lambda c: c[0] < 2, step, (0, x + 1, x))[1] * ct,)

    g = wrap(_with_rules(forward, bwd))
    first, last = S(g, reduce=Append())(X)[1]["net"]["primal"]
    sines = [np.sin(X), np.sin(np.sin(X)), np.sin(np.sin(np.sin(X)))]
    close(first, np.stack(sines) if length else sines[-1])
    close(last, np.sin(X + 1 + np.cos(X + 1)))
    assert S(g, reduce=Buffer(9))(X)[1]["net"]["count"] == 5
    with pytest.raises(DuplicateSowError, match="in a backward pass"):
        S(g)(X)


@under("eager", "jit")
@pytest.mark.parametrize("policy", ["dots_saveable", "everything_saveable"])
def test_a_bwd_that_computes_again_what_a_checkpoint_keeps(wrap, policy):
    policy = getattr(jax.checkpoint_policies, policy)

    def step(c, _):
        return jnp.tanh(_A @ sow(c, "net")), None

    def f(x):
        return lax.scan(jax.checkpoint(step, policy=policy), x, length=3)[0]

    g = wrap(_with_rules(f, lambda x, ct: jax.vjp(f, x)[1](ct)))
    plain = jax.grad(lambda x: lax.scan(step, x, length=3)[0].sum())
    assert_close(S(g)(X), S(plain)(X))
    assert len(S(g, reduce=Append())(X)[1]["net"]["primal"]) == 1


def test_a_bwd_that_computes_again_from_constants():
    """Each trace makes an array of its own; of a key, the content is not compared."""
    numbers, key = np.array([2.0, 3.0], np.float32), jax.random.key(0)

    def of_its_own():
        with jax.ensure_compile_time_eval():
            return jnp.asarray(numbers) + 1

    constants = {
        "numpy": (numbers.copy, numbers),
        "jax": (of_its_own, numbers + 1),
        "key": (lambda: jax.random.normal(key, (2,)), jax.random.normal(key, (2,))),
    }

    def value(constant):
        forward = lambda x: sow(jnp.sin(x) * constant(), "net")
        g = _with_rules(forward, lambda x, ct: jax.vjp(forward, x)[1](ct))
        return S(g)(X)[1]["net"]["primal"]

    for constant, want in constants.values():
        close(value(constant), np.sin(X) * want)


@under("eager", "jit")
def test_what_is_computed_once_more_from_the_same_is_no_execution(wrap):
    pull = lambda x, ct: jax.vjp(_sine, x)[1](ct)
    g = wrap(_with_rules(_sine, pull))
    for options in ({}, {"reduce": Last()}):
        _, got = S(g, **options)(X)
        close(got["net"]["primal"], np.sin(X))
        close(got["net"]["cotangent"], [1, 1])
    _, got = S(g, reduce=Append())(X)
    assert len(got["net"]["primal"]) == len(got["net"]["cotangent"]) == 1
    total = Fold(jnp.zeros(2), lambda acc, v: acc + v)
    close(S(g, reduce=total)(X)[1]["net"]["primal"], np.sin(X))


def _recomputing(impl, bwd=None, fwd=None):
    """`impl`, with a backward pass that runs it, or something else, once more."""
    f = jax.custom_vjp(impl)
    f.defvjp(
        lambda x: ((fwd or impl)(x), x), lambda x, ct: jax.vjp(bwd or impl, x)[1](ct)
    )
    return f


KS = jnp.array([1.0, 2.0, 3.0])


def _looped(f):
    return lambda x: lax.scan(lambda c, _: (f(c), None), x, length=2)[0]


def _branched(f):
    return lambda x: lax.cond(x.sum() > 0, f, lambda x: x, x)


def _both_branches(f):
    return lambda x: lax.cond(x.sum() > 0, f, lambda x: f(2 * x), x)


def _summed(f):
    return lambda x: f(x).sum()


# What is around the function, within `jax.grad`; what is around that; and how often it
# runs.
AROUND = {
    "grad": (lambda f: f, lambda g: g, 1),
    "jit(grad)": (lambda f: f, jax.jit, 1),
    "grad(jit)": (jax.jit, lambda g: g, 1),
    "jit(grad(jit))": (jax.jit, jax.jit, 1),
    "vmap(grad(jit))": (jax.jit, jax.vmap, 1),
    "grad(cond)": (_branched, lambda g: g, 1),
    "grad(cond), both": (_both_branches, lambda g: g, 1),
    "grad(scan)": (_looped, lambda g: g, 2),
    "grad(scan(jit))": (lambda f: _looped(jax.jit(f)), lambda g: g, 2),
    "grad(scan(checkpoint))": (lambda f: _looped(jax.checkpoint(f)), jax.jit, 2),
    "grad(jit(scan(cond)))": (lambda f: jax.jit(_looped(_branched(f))), jax.jit, 2),
    "grad(checkpoint)": (jax.checkpoint, lambda g: g, 1),
    "grad(checkpoint(jit))": (lambda f: jax.checkpoint(jax.jit(f)), lambda g: g, 1),
}


def _tripled(x):
    return sow(jnp.sin(x), "net") * 3


def _tripled_by_an_array(x):
    return _tripled(x * np.ones(2, np.float32))  # another array in each trace


RULES = {
    "plain": lambda: _recomputing(_tripled),
    "jitted": lambda: _recomputing(jax.jit(_tripled)),
    "jitted in bwd": lambda: _recomputing(_tripled, bwd=jax.jit(_tripled)),
    "jitted in fwd": lambda: _recomputing(_tripled, fwd=jax.jit(_tripled)),
    "fwd calls it": lambda: _recomputing(_tripled, fwd=_recomputing(_tripled)),
    "with an array of its own": lambda: _recomputing(_tripled_by_an_array),
}


def _expected(steps, x):
    """The values of `_tripled` run so often, and their cotangents."""
    values, c = [], x
    for _ in range(steps):
        values.append(np.sin(c))
        c = 3 * values[-1]

    def rest(eps):
        c = x
        for e in eps:
            c = (jnp.sin(c) + e) * 3
        return c.sum()

    return np.stack(values), jax.grad(rest)(jnp.zeros((steps, *x.shape)))


def _run_around(rule, around):
    """The program, its input, and what is to come of it, with an axis for the steps."""
    inside, outside, steps = AROUND[around]
    g = outside(jax.grad(_summed(inside(RULES[rule]()))))
    if outside is not jax.vmap:
        return g, X, *_expected(steps, X)
    xs = jnp.stack([X, -X])
    branch = 2 if inside is _both_branches else 1
    lanes = [_expected(steps, X), _expected(steps, -branch * X)]
    return g, xs, *(np.stack(x, 1) for x in zip(*lanes))


@pytest.mark.parametrize(
    "rule, around",
    [
        (r, a)
        for r in RULES
        for a in AROUND
        if r == "plain" or a in ("grad(jit)", "grad(scan)")
    ],
)
def test_a_recomputing_bwd_is_no_execution(rule, around):
    g, x, values, cotangents = _run_around(rule, around)
    one = (lambda v: v) if len(values) > 1 else (lambda v: v[0])
    grads, got = S(g)(x)
    close(grads, g(x))
    close(got["net"]["primal"], one(values))
    # One that is the same for all lanes has no axis for them.
    close(np.asarray(got["net"]["cotangent"]) + 0 * one(cotangents), one(cotangents))
    count = got["net"].get("count")
    assert count is None or np.all(count == 1)
    _, got = S(g, reduce=Append())(x)
    (primal,), (cotangent,) = got["net"]["primal"], got["net"]["cotangent"]
    close(primal, one(values))
    close(np.asarray(cotangent) + 0 * one(cotangents), one(cotangents))
    _, got = S(g, reduce=Last())(x)
    close(got["net"]["primal"], values[-1])
    close(np.asarray(got["net"]["cotangent"]) + 0 * cotangents[0], cotangents[0])
    _, got = S(g, reduce=Fold(0, lambda n, v: n + 1))(x)
    assert np.all(got["net"]["primal"] == len(values))
    assert np.all(got["net"]["cotangent"] == len(values))


@pytest.mark.parametrize("nested", [False, True])
def test_a_recomputing_bwd_whose_pullback_runs_in_a_loop(nested):
    f = _looped(_recomputing(_tripled))
    steps, f = (4, _looped(f)) if nested else (2, f)

    def rows(x):
        _, pullback = jax.vjp(f, x)
        return lax.map(lambda ct: pullback(ct)[0], jnp.eye(2))

    def by_hand(eps):
        c = X
        for e in eps:
            c = (jnp.sin(c) + e) * 3
        return c

    _, got = S(rows)(X)
    values, _ = _expected(steps, X)
    cotangents = jax.jacrev(by_hand)(jnp.zeros((steps, 2)))
    close(got["net"]["primal"].reshape(steps, 2), values)
    close(got["net"]["cotangent"].reshape(2, steps, 2), cotangents)


@pytest.mark.parametrize("options", [{}, dict(reduce=Append())])
def test_a_recomputing_bwd_in_lanes_that_take_different_branches(options):
    xs = jnp.stack([X, -X])
    f = _both_branches(_recomputing(_tripled))
    with pytest.raises(SowError, match="cannot tell whether the `bwd` repeats"):
        S(jax.vmap(jax.grad(_summed(f))), **options)(xs)

    def renamed(x):
        with scope("again"):
            return _tripled(x)

    f = _both_branches(_recomputing(_tripled, bwd=renamed))
    _, got = S(jax.vmap(jax.grad(_summed(f))), **options)(xs)
    values = np.sin(np.stack([X, -2 * X]))
    for name in ("net", "again/net"):
        (primal,) = [got[name]["primal"]] if not options else got[name]["primal"]
        close(primal, values)


@pytest.mark.parametrize("around", ["grad", "grad(jit)", "grad(cond)", "grad(scan)"])
def test_no_event_of_a_recomputing_bwd(around):
    g, x, values, cotangents = _run_around("plain", around)
    events = []
    tap(g, events.append)(x)
    jax.effects_barrier()
    by_mode = {m: [e for e in events if e.mode == m] for m in ("primal", "cotangent")}
    close(np.stack([e.value for e in by_mode["primal"]]), values)
    close(np.stack([e.value for e in by_mode["cotangent"]]), cotangents[::-1])


@pytest.mark.parametrize("around", [a for a in AROUND if a.startswith("grad(")])
def test_a_bwd_at_another_point_is_an_execution(around):
    inside, outside, steps = AROUND[around]
    f = _recomputing(_tripled, bwd=lambda x: _tripled(5 * x))
    g = outside(jax.grad(_summed(inside(f))))
    x = jnp.stack([X, -X]) if outside is jax.vmap else X
    _, got = S(g, reduce=Fold(0, lambda n, v: n + 1))(x)
    assert np.all(got["net"]["primal"] == 2 * steps)
    with pytest.raises(DuplicateSowError, match="in a backward pass"):
        S(g)(x)
    if steps == 1 and x is X:
        _, got = S(g, reduce=Append())(x)
        first, second = got["net"]["primal"]
        close(first, np.sin(X))
        close(second, np.sin(5 * X))
        none, cotangent = got["net"]["cotangent"]
        assert none is None
        close(cotangent, [3, 3])


@under("eager", "jit")
@pytest.mark.parametrize("rule", RULES)
def test_two_calls_of_a_recomputing_function(rule, wrap):
    f = wrap(RULES[rule]())
    for g, calls in (
        (lambda f, x: f(x) * f(2 * x), (1, 2)),
        (lambda f, x: f(x) + f(x) ** 2, (1, 1)),
    ):
        _, got = S(jax.grad(wrap(_summed(lambda x: g(f, x)))), reduce=Append())(X)

        def perturbed(eps):
            each = iter(eps)
            return g(lambda x: (jnp.sin(x) + next(each)) * 3, X).sum()

        for mine, n in zip(got["net"]["primal"], calls, strict=True):
            close(mine, np.sin(n * X))
        for mine, want in zip(
            got["net"]["cotangent"], jax.grad(perturbed)(jnp.zeros((2, 2))), strict=True
        ):
            close(mine, want)


@under("eager", "jit", "checkpoint", "vmap", "map", "map-jit")
@pytest.mark.parametrize("jitted", ["", "term", "forward"])
@pytest.mark.parametrize("lines", [1, 2])
def test_a_recomputing_bwd_of_a_function_that_marks_one_value_twice(
    lines, jitted, wrap
):
    """What it computes again is in the order of the forward pass. What two calls of it
    compute is not: the second call comes first."""

    def forward(term, x):
        if lines == 2:
            return 2 * term(x, 1.0) + term(x, 3.0) ** 2
        first, second = (term(x, w) for w in (1.0, 3.0))
        return 2 * first + second**2

    marked = lambda x, w: jnp.sin(w * sow(x, "h"))
    fwd = ft.partial(forward, jax.jit(marked) if jitted == "term" else marked)
    fwd = jax.jit(fwd) if jitted == "forward" else fwd
    recomputing = jax.custom_vjp(fwd)
    recomputing.defvjp(lambda x: (fwd(x), x), lambda x, ct: jax.vjp(fwd, x)[1](ct))

    def call(f, n):
        if n == 2:
            return lambda x: f(x) + f(x) ** 2

        def one_after_the_other(x):
            y = 1.0
            for _ in range(n):
                y = y * f(x)
            return y

        return one_after_the_other

    xs = X if wrap in map(named, ("eager", "jit", "checkpoint")) else X[None]
    for n in (1, 2, 3):
        f = wrap(call(recomputing, n))
        _, got = S(jax.grad(lambda x: f(x).sum()), reduce=Append())(xs)

        def by_hand(eps):
            each = iter(eps)
            term = lambda x, w: jnp.sin(w * (x + next(each)))
            return call(ft.partial(forward, term), n)(X).sum()

        want = jax.grad(by_hand)(jnp.zeros((2 * n, 2)))
        close(np.stack(got["h"]["cotangent"]).reshape(want.shape), want)


@pytest.mark.parametrize("jitted", [False, True])
def test_a_bwd_that_computes_a_function_on_two_lines(jitted):
    """It marks one value twice, each time. A jitted function is traced once, so that
    there nothing tells which of the four marks is of which run."""
    term = lambda x, w: jnp.sin(w * sow(x, "h"))
    term = jax.jit(term) if jitted else term
    fwd = lambda x: sum(c * term(x, w) for c, w in ((2.0, 1.0), (5.0, 3.0)))

    def bwd(x, ct):
        again = fwd(x)
        return (jax.vjp(fwd, x)[1](ct)[0] + 0 * again,)

    f = jax.custom_vjp(fwd)
    f.defvjp(lambda x: (fwd(x), x), bwd)
    saved = S(jax.grad(lambda x: f(x).sum()), reduce=Append())
    if jitted:
        with pytest.raises(SowError, match="which cotangent belongs to which primal"):
            saved(X)
        return
    close(
        np.stack(saved(X)[1]["h"]["cotangent"]), [2 * jnp.cos(X), 15 * jnp.cos(3 * X)]
    )


@under("eager", "jit")
def test_a_recomputed_loop(wrap):
    def impl(x):
        return lax.scan(lambda c, k: (sow(jnp.sin(c) * k, "s"), None), x, KS)[0]

    g = jax.grad(wrap(_summed(_looped(_recomputing(impl)))))
    plain = jax.grad(_summed(_looped(impl)))
    for options in ({}, dict(reduce=Append()), dict(reduce=Buffer(6))):
        assert_close(S(g, **options)(X), S(plain, **options)(X))


@under("eager", "jit")
def test_a_recomputed_value_that_the_loop_does_not_change(wrap):
    def loss(f):
        return lambda w: lax.scan(lambda c, _: (c + f(w), None), X, length=3)[0].sum()

    g = jax.grad(wrap(loss(_recomputing(_tripled))))
    _, got = S(g)(X)
    close(got["net"]["primal"], np.stack([np.sin(X)] * 3))
    assert S(g, reduce=Buffer(5))(X)[1]["net"]["count"] == 3


@under("eager", "jit")
def test_a_branch_that_recomputes_beside_one_that_does_not(wrap):
    elsewhere = _recomputing(_tripled, bwd=lambda x: _tripled(5 * x))
    here = _recomputing(_tripled)
    g = jax.grad(wrap(lambda x: lax.cond(x.sum() > 0, here, elsewhere, x).sum()))
    for x, n in ((X, 1), (-X, 2)):
        got = S(g, reduce=Fold(0, lambda n, v: n + 1))(x)[1]["net"]
        assert got["primal"] == got["count"] == n
        assert got["cotangent"] == 1


@under("eager", "jit")
def test_a_loop_where_another_branch_has_a_value(wrap):
    """Both are the first of their branch."""
    recomputing = _recomputing(_tripled)
    value = lambda x: jnp.sin(sow(x, "first"))
    loop = _looped(jax.jit(_tripled))
    f = lambda g: lambda x: lax.cond(x.sum() > 0, value, loop, g(x)).sum()
    g = jax.grad(wrap(f(recomputing)))
    plain = jax.grad(wrap(f(_tripled)))
    for x in (X, -X):
        assert_close(S(g, reduce=Append())(x), S(plain, reduce=Append())(x))


@pytest.mark.slow
@under("eager", "jit")
def test_steps_of_a_checkpointed_loop_are_replayed(wrap):
    sine = wrap(_sine)

    def loss(x):
        body = lambda c: sine(c) + 1.0
        going = lambda c: c.sum() < 3.0
        return eqxi.while_loop(going, body, x, kind="checkpointed", max_steps=8).sum()

    steps, c = [], X
    while c.sum() < 3.0:
        steps.append(np.sin(c))
        c = steps[-1] + 1
    _, got = S(jax.grad(loss), reduce=Buffer(len(steps)))(X)
    assert got["net"]["count"] == len(steps)
    close(got["net"]["primal"], np.stack(steps))
    _, got = S(jax.grad(loss), reduce=Append())(X)
    assert len(got["net"]["primal"]) == len(got["net"]["cotangent"]) == 1


def test_a_bwd_that_repeats_a_counter_in_a_scan():
    """JAX counts outside of both loops then, so that nothing is computed alike."""
    count = lambda c: lax.fori_loop(0, 2, lambda i, c: _sine(c + i), c)
    f = lambda x: lax.scan(lambda c, _: (count(c), None), x, length=2)[0]
    g = _recomputing(f)
    gradient = jax.grad(lambda x: g(x).sum())
    with pytest.raises(DuplicateSowError, match="also in a backward pass"):
        S(gradient)(X)
    first, again = S(gradient, reduce=Append())(X)[1]["net"]["primal"]
    close(first, again)


def _checkpointed(step, x, n=3):
    body = lambda c: (c[0] + 1, step(c[1]))
    loop = dict(kind="checkpointed", max_steps=n)
    return eqxi.while_loop(lambda c: c[0] < n, body, (0, x), **loop)[1]


@_needs_checkpointed_loop
@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
@pytest.mark.parametrize("length", [2, 0])
def test_a_scan_in_a_checkpointed_loop_in_a_checkpoint(policy, length):
    """The checkpoint and the loop both compute the scan once more."""

    def step(c, mark):
        one = lambda c, _: (jnp.sin(mark(c)), None)
        return 1.5 * lax.scan(one, c, length=length)[0]

    def f(x):
        return _checkpointed(lambda c: step(c, lambda v: sow(v, "h")), x)

    f = jax.checkpoint(f, policy=policy)
    out, got = S(jax.jit(jax.grad(lambda x: f(x).sum())))(X)

    def by_hand(zeros, x):
        values, n = [], 3 * length
        for i in range(3):
            for j in range(length):
                values.append(x + zeros[j] if i == 2 else x)
                x = jnp.sin(values[-1])
            x = 1.5 * x
        return x.sum(), values[n - length :]

    zeros = jnp.zeros((length, 2))
    grads = jax.jit(jax.grad(by_hand, (0, 1), has_aux=True))
    (cts, grad), values = grads(zeros, X)
    close(out, grad)
    close(got["h"]["primal"], np.reshape(values, (length, 2)))
    close(got["h"]["cotangent"], cts)
    close(got["h"]["count"], 3 * np.ones(length))


@_may_need_checkpointed_loop
@pytest.mark.parametrize("sign", [1, -1])
def test_a_name_in_branches_of_which_a_checkpointed_loop_takes_one(sign):
    """The predicate is the same in the forward pass and in the replay."""

    def run(x, *marks):
        def step(c, mark):
            one, two = lambda c: jnp.sin(mark(c + x)), lambda c: jnp.cos(mark(2 * c))
            return lax.cond(sign * x[0] > 0, one, two, c)

        if not marks:
            return _checkpointed(lambda c: step(c, lambda v: sow(v, "h")), x).sum()
        c = x
        for mark in marks:
            c = step(c, mark)
        return c.sum()

    out, got = S(jax.jit(jax.grad(run)))(X)
    same = lambda v: v
    by_hand = lambda zero, x: run(x, same, same, lambda v: v + zero)
    cotangent, grad = jax.jit(jax.grad(by_hand, (0, 1)))(0 * X, X)
    c = X
    for _ in range(3):
        value = c + X if sign > 0 else 2 * c
        c = jnp.sin(value) if sign > 0 else jnp.cos(value)
    close(out, grad)
    close(got["h"]["primal"], value)
    close(got["h"]["cotangent"], cotangent)


@pytest.mark.slow
@_needs_checkpointed_loop
def test_the_tangent_of_a_checkpointed_loop_in_a_checkpoint():
    """Law 2: the checkpoint computes the tangent once more, too."""
    f = lambda x: _checkpointed(lambda c: jnp.sin(sow(c, "h")), x).sum()
    second = lambda f: jax.jit(lambda x: jax.jvp(jax.grad(f), (x,), (2 * x,))[1])
    plain, checkpointed = (S(second(g))(X) for g in (f, jax.checkpoint(f)))
    assert {*plain[1]["h"]} >= {"primal", "tangent", "cotangent.tangent"}
    assert_close(checkpointed, plain)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("around", [lambda f: f, jax.checkpoint])
def test_two_runs_of_one_value_in_a_checkpointed_loop(jitted, around):
    """The loop computes both again, and in the same order."""
    o = jnp.array([1.5, -0.5])

    def gradient(v, w, value):
        term = lambda v, o: (value(o) ** 2 * jnp.sin(v * w)).sum()
        return jax.grad(jax.jit(term) if jitted else term, (0, 1))(v, o)

    def step(v, values=(lambda o: sow(o, "h"),) * 2, plus=(0.0, 0.0)):
        (a, b), (c, d) = (gradient(v, w, f) for w, f in zip((1.0, 2.0), values))
        return a * (b + plus[0]) + c + jnp.cos(d + plus[1])

    f = around(jax.grad(lambda x: _checkpointed(step, x, 1).sum()))
    _, got = S(f, reduce=Append())(X)
    by_hand = lambda plus: step(X, (lambda o: o,) * 2, plus).sum()
    cotangents = jax.grad(by_hand)((jnp.zeros(2), jnp.zeros(2)))
    assert_close(got["h"]["cotangent.cotangent"], cotangents)


def _two_steps(step, unmarked, loop):
    """`step` twice, with a `bwd` that differentiates each step where it goes back."""
    if loop is None:
        f = jax.custom_vjp(unmarked)
        bwd = lambda x, ct: jax.vjp(step, x)[1](ct)
        f.defvjp(lambda x: (unmarked(x), x), bwd)
        return lambda x: f(f(x))
    run = lambda x: lax.scan(lambda c, _: (unmarked(c), c), x, length=2)
    back = lambda ct, x: jax.vjp(step, x)[1](ct)[0]

    def bwd(xs, ct):
        if loop == "scan":
            return (lax.scan(lambda c, x: (back(c, x), None), ct, xs, reverse=True)[0],)
        one = lambda s: (s[0] - 1, back(s[1], xs[s[0]]))
        return (lax.while_loop(lambda s: s[0] >= 0, one, (1, ct))[1],)

    f = jax.custom_vjp(lambda x: run(x)[0])
    f.defvjp(run, bwd)
    return f


def _in_another(loop, step):
    around = lambda c: loop(step, c)
    return lambda x: loop(around, x, 2)


@pytest.mark.slow
@_may_need_checkpointed_loop
@pytest.mark.sample(4)
@pytest.mark.parametrize("loop", [None, "scan", "while"])
@pytest.mark.parametrize(
    ("inside", "around"),
    [
        ("", "jit"),
        ("", "checkpoint"),
        ("checkpoint", ""),
        ("checkpointed step", "vmap"),
        ("nested", "checkpoint"),
        ("", "checkpoints"),
    ],
)
def test_a_bwd_that_differentiates_a_checkpointed_loop(loop, inside, around):
    """Only the `bwd` marks what it differentiates: the replay in there is none."""

    def make(mark):
        one = lambda c: jnp.sin(mark(1.5 * c))
        one = jax.checkpoint(one) if inside == "checkpointed step" else one
        step = lambda x: _checkpointed(one, x)
        step = _in_another(_checkpointed, one) if inside == "nested" else step
        return jax.checkpoint(step) if inside == "checkpoint" else step

    f = _two_steps(make(lambda x: sow(x, "h")), make(lambda x: x), loop)
    wraps = {"": lambda f: f, "vmap": jax.vmap, "jit": jax.jit}
    again = lambda f: jax.checkpoint(jax.jit(jax.checkpoint(f)))
    f = (wraps | {"checkpoint": jax.checkpoint, "checkpoints": again})[around](f)
    x = jnp.stack([X, -X]) if around == "vmap" else X
    reduce = Append() if loop is None else None
    out, got = S(jax.jit(jax.grad(lambda x: f(x).sum())), reduce=reduce)(x)

    # By hand: each step of the loops from the first one, and a zero added at the last
    # one of each of the two steps.
    n, zeros = 3 if inside != "nested" else 6, [0 * x, 0 * x]

    def by_hand(zeros, x):
        values = []
        for zero in zeros:
            for i in range(n):
                x = 1.5 * x + (zero if i == n - 1 else 0)
                value, x = x, jnp.sin(x)
            values.append(value)
        return x.sum(), values

    grads = jax.jit(jax.grad(by_hand, (0, 1), has_aux=True))
    (cts, grad), values = grads(zeros, x)
    close(out, grad)
    if loop is None:  # the backward pass begins with the second step
        close(got["h"]["primal"][0], values[1])
        close(got["h"]["primal"][1], values[0])
        close(got["h"]["cotangent"][0], cts[1])
        close(got["h"]["cotangent"][1], cts[0])
        return
    axis = 1 if around == "vmap" else 0
    values, cts = (np.stack(v, axis) for v in (values, cts))
    count = n * np.ones(x.shape[:-1] + (2,), int)
    if loop == "while":  # it ends with the first step
        values, cts, count = values[..., 0, :], cts[..., 0, :], 2 * n
    close(got["h"]["primal"], values)
    close(got["h"]["cotangent"], cts)
    assert np.all(np.asarray(got["h"]["count"]) == count)


@pytest.mark.parametrize("loop", [None, "scan", "while"])
@pytest.mark.parametrize("rule", ["fwd", "bwd", "jvp"])
def test_a_rule_at_another_point_in_such_a_loop(loop, rule):
    """It is an execution, as what is in a `bwd` is called from one line."""

    def make(mark):
        g = jax.jit(lambda x: jnp.sin(mark(x)))
        f = (jax.custom_jvp if rule == "jvp" else jax.custom_vjp)(lambda x: g(x))
        if rule == "jvp":
            f.defjvp(lambda x, t: (g(*x), t[0] * g(x[0] + 1)))
        else:
            at_fwd = lambda x: (g(x), g(x + 1) if rule == "fwd" else x)
            f.defvjp(at_fwd, lambda r, ct: (ct * (r if rule == "fwd" else g(r + 1)),))
        return lambda x: _checkpointed(f, x)

    f = _two_steps(make(lambda x: sow(x, "h")), make(lambda x: x), loop)
    with pytest.raises(DuplicateSowError):
        S(jax.grad(lambda x: f(x).sum()))(X)
    if loop:
        with pytest.raises(DuplicateSowError, match="runs more than once"):
            S(jax.grad(lambda x: f(x).sum()), modes="primal")(X)


def _solve(wrap, adjoint):
    field = wrap(lambda t, y, args: -sow(y, "y"))

    def loss(y0):
        term, solver = diffrax.ODETerm(field), diffrax.Euler()
        sol = diffrax.diffeqsolve(term, solver, 0.0, 1.0, 0.25, y0, adjoint=adjoint)
        return sol.ys.sum()

    return loss


@pytest.mark.slow
@under("eager", "filter_jit")
def test_backsolve_adjoint_evaluates_at_other_states(wrap):
    steps = [X * 0.75**i for i in range(4)]
    back = [X * 0.75**4 * 1.25**i for i in range(4)]
    backsolve = jax.grad(_solve(wrap, diffrax.BacksolveAdjoint()))
    _, got = S(backsolve, reduce=Buffer(8))(X)
    close(got["y"]["primal"], np.stack([*steps, *back]), rtol=1e-4)
    first, second = S(backsolve, reduce=Append())(X)[1]["y"]["primal"]
    close(first, steps[-1])
    close(second, back[-1], rtol=1e-4)
    with pytest.raises(DuplicateSowError):
        S(backsolve)(X)


@pytest.mark.slow
@_needs_checkpointed_loop
@under("eager", "filter_jit")
def test_recursive_checkpoint_adjoint_evaluates_at_the_same_states(wrap):
    replayed = jax.grad(_solve(wrap, diffrax.RecursiveCheckpointAdjoint()))
    _, got = S(replayed, reduce=Buffer(8))(X)
    assert got["y"]["count"] == 4


@under("eager", "jit", argument="jit")
def test_a_cotangent_that_does_not_depend_on_the_input_has_no_derivative(jit):
    f = jit(lambda x: sow(jnp.sin(x), "v"))

    def second(ct):
        return jax.grad(lambda x: (jax.vjp(f, x)[1](ct(x))[0] ** 2).sum())

    _, got = S(jit(second(jnp.ones_like)))(X)
    assert set(got["v"]) == {"primal", "cotangent", "primal.cotangent"}
    _, got = S(jit(second(jnp.tanh)))(X)
    # The pullback is `ct * cos(x)`, so its square has this gradient for `ct`.
    close(got["v"]["cotangent.cotangent"], 2 * jnp.tanh(X) * jnp.cos(X) ** 2)


def test_a_scan_whose_outputs_do_not_matter(call):
    """As of an RNN that returns all its states, for a loss on the last one."""

    def loss(w):
        last, states = lax.scan(lambda c, _: (w * c, c), jnp.ones(2), length=4)
        sow(states, "states")
        return sow(last, "last").sum()

    out, got = call(S(jax.grad(loss)), X)
    close(out, 4 * X**3)
    states = jnp.stack([X**i for i in range(4)])
    values = {"primal": states, "cotangent": jnp.zeros((4, 2))}
    assert_close(got["states"], values)
    assert_close(got["last"], {"primal": X**4, "cotangent": jnp.ones(2)})


def test_second_derivative_through_a_scan():
    def fn(x):
        ys = lax.map(lambda y: jnp.tanh(y + x), jnp.stack([x, 2 * x]))
        return sow(ys.sum(0), "a")

    def pushed(x):
        return jax.linearize(fn, x)[1](jnp.ones_like(x)).sum()

    out, got = S(jax.grad(pushed))(X)
    assert jnp.allclose(out, jax.grad(pushed)(X))
    assert jnp.allclose(got["a"]["primal"], fn(X))


# --- values that are computed again, when there are several executions of one value ---
def _plain(x):
    return sow(jnp.sin(x), "h")


_again = jax.custom_vjp(_plain)
_again.defvjp(lambda x: (_plain(x), x), lambda x, ct: jax.vjp(_plain, x)[1](ct))


# The cotangents that belong to each call, in order. `None`: it is not differentiated.
SAME_VALUE = {
    "after": (lambda x: jax.grad(_again)(x) + _plain(x), (1.0, None)),
    "before": (lambda x: _plain(x) + jax.grad(_again)(x), (None, 1.0)),
    "both": (
        lambda x: _plain(x) + jax.grad(_again)(x) + _plain(x),
        (None, 1.0, None),
    ),
    "three before two": (
        lambda x: (
            sum(_plain(x) for _ in range(3))
            + jax.grad(lambda x: _again(x) + 3 * _again(x))(x)
        ),
        (None, None, None, 1.0, 3.0),
    ),
    "two gradients": (
        lambda x: jax.grad(_again)(x) + jax.grad(lambda x: 2 * _again(x))(x),
        (1.0, 2.0),
    ),
    "two, and one between": (
        lambda x: (
            jax.grad(_again)(x)
            + _plain(x)
            + jax.grad(lambda x: _again(x) + 3 * _again(x))(x)
        ),
        (1.0, None, 1.0, 3.0),
    ),
}


@under("eager", "jit")
@pytest.mark.parametrize("name", SAME_VALUE)
def test_what_is_repeated_ran_before(name, wrap):
    f, want = SAME_VALUE[name]
    _, got = S(wrap(f), reduce=Append())(0.5)
    assert [x if x is None else float(x) for x in got["h"]["cotangent"]] == [*want]
    close(jnp.stack(got["h"]["primal"]), [np.sin(0.5)] * len(want))


def _pulled_in_a_branch(p, x):
    y, pull = jax.vjp(lambda x: sow(jnp.sin(x), "h") * x, x)
    return y, lax.cond(p, lambda ct: pull(ct)[0], jnp.zeros_like, y)


def _pulled_in_a_loop(p, x):
    y, pull = jax.vjp(lambda x: sow(jnp.sin(x), "h") * x, x)
    step = lambda c: (c[0] + 1, pull(c[1])[0])
    return y, lax.while_loop(lambda c: c[0] < 3, step, (0, y))


@pytest.mark.parametrize("fn", [_pulled_in_a_branch, _pulled_in_a_loop])
@pytest.mark.parametrize("p", [True, False])
def test_a_backward_pass_in_a_branch_that_the_value_is_not_in(fn, p):
    """The count of a name is that of its value, which ran once."""
    x = jnp.array([0.3, jnp.nan])
    _, got = S(fn)(p, x)
    assert list(got["h"]) == ["primal", "cotangent"]
    assert "1/2 <- first" in tabulate(got)
    _, got = S(fn, modes="cotangent")(p, x)
    if fn is _pulled_in_a_branch:
        assert int(got["h"]["count"]) == int(p)
    else:
        assert "count" not in got["h"]
    _, got = S(jax.vmap(fn))(jnp.array([p, not p]), X)
    assert "count" not in got["h"]


def _fori(x, n):
    return lax.fori_loop(0, n, lambda i, x: 1.1 * jnp.sin(x), x)


def _while(x, n):
    step = lambda c: (c[0] + 1, 1.1 * jnp.sin(c[1]))
    return lax.while_loop(lambda c: c[0] < n, step, (0, x))[1]


@pytest.mark.parametrize("loop, n", [(_fori, 4), (_while, 3), (_while, 4)])
def test_a_backward_pass_with_a_loop_of_another_length(loop, n):
    """Only a scan of the same length computes the same. How long a `while_loop` runs
    is not known."""
    mark = lambda x, n: sow(loop(x, n), "h")
    f = jax.custom_vjp(lambda x: mark(x, 3))
    f.defvjp(lambda x: (mark(x, 3), x), lambda x, ct: (ct * mark(x, n),))
    _, got = S(jax.grad(f), reduce=Append())(0.5)
    close(jnp.stack(got["h"]["primal"]), [loop(0.5, 3), loop(0.5, n)])
    with pytest.raises(DuplicateSowError, match="also in a backward pass"):
        S(jax.grad(f))(0.5)


def test_a_backward_pass_that_repeats_a_scan():
    mark = lambda x: sow(_fori(x, 3), "h")
    f = jax.custom_vjp(mark)
    f.defvjp(lambda x: (mark(x), x), lambda x, ct: (ct * mark(x),))
    _, got = S(jax.grad(f))(0.5)
    close(got["h"]["primal"], _fori(0.5, 3))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_backward_pass_that_repeats_what_each_device_has(kind):
    """A constant of a jitted function comes into the `shard_map` of the backward pass
    from outside. That of another mark is not a repetition."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.devices()[:2])
    over = PartitionSpec("d")

    def forward(constant, x):
        constant = np.array([constant], np.float32)
        times = jax.jit(lambda c, x: (sow(jnp.asarray(constant), "h"), c * x)[1])
        return lax.scan(lambda c, _: (times(c, x), None), x, length=3)[0]

    def gradient(constant):
        first, second = (ft.partial(forward, c) for c in (2.0, constant))
        f = jax.custom_vjp(first)
        f.defvjp(lambda x: (first(x), x), lambda x, ct: jax.vjp(second, x)[1](ct))
        f = jax.shard_map(f, mesh=mesh, in_specs=over, out_specs=over)
        return jax.grad(lambda x: f(x).sum())

    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.sharding.NamedSharding(mesh, over))
        out, got = S(gradient(2.0))(x)
        close(out, 4 * X**3)
        close(got["h"]["primal"], [[2.0]] * 3)
        with pytest.raises(DuplicateSowError, match="also in a backward pass"):
            S(gradient(3.0))(x)


@pytest.mark.parametrize("again", [True, False])
def test_a_backward_pass_in_a_branch_of_some_lanes(again):
    """What it computes as in the forward pass is not one more execution. Of anything
    else, it cannot be told; nor with JAX 0.10, where the `x` of the backward pass is
    one that was selected among the branches."""
    forward = lambda x: sow(jnp.cos(x), "h") * x
    backward = forward if again else lambda x: sow(jnp.sin(x), "h") * x
    f = jax.custom_vjp(forward)
    f.defvjp(lambda x: (forward(x), x), lambda x, ct: jax.vjp(backward, x)[1](ct))
    fn = jax.vmap(jax.grad(lambda x, p: lax.cond(p, f, jnp.negative, x)))
    xs, p = jnp.array([0.3, 0.5, 0.7]), jnp.array([True, False, True])
    if not again or jax.__version_info__ < (0, 11):
        with pytest.raises(SowError, match="forward pass has a mark of that name"):
            S(fn)(xs, p)
        return
    _, got = S(fn)(xs, p)
    close(got["h"]["count"], [1, 0, 1])
    close(got["h"]["primal"], jnp.where(p, jnp.cos(xs), 0))
    close(got["h"]["cotangent"], jnp.where(p, xs, 0))


@pytest.mark.slow
@_needs_checkpointed_loop
@pytest.mark.parametrize("around", [lambda f: f, _looped], ids=["alone", "in a scan"])
def test_a_pullback_of_a_solver_in_a_loop(around):
    term = diffrax.ODETerm(lambda t, y, args: sow(-(y**2), "f"))

    def solve(y):
        return diffrax.diffeqsolve(term, diffrax.Euler(), 0.0, 1.0, 0.25, y).ys[-1]

    def rows(y):
        _, pullback = jax.vjp(around(solve), y)
        return lax.map(lambda ct: pullback(ct)[0], jnp.eye(2))

    # The value is that of the last step, and the cotangent belongs to it.
    def by_hand(eps):
        y = X
        for zero in eps:
            for i in range(4):
                y = y + 0.25 * (-(y**2) + (zero if i == 3 else 0.0))
        return y

    _, got = S(rows)(X)
    counts = got["f"]["count"]
    cotangents = jax.jacrev(by_hand)(jnp.zeros((counts.size, 2)))
    assert np.all(counts == 4)
    close(got["f"]["cotangent"].reshape(cotangents.shape), cotangents)


@pytest.mark.slow
@_needs_checkpointed_loop
def test_two_gradients_through_a_solver():
    # One jaxpr for all three solutions.
    term = diffrax.ODETerm(lambda t, y, k: sow(-k * y, "f"))

    def solve(k, y):
        out = diffrax.diffeqsolve(term, diffrax.Euler(), 0.0, 1.0, 0.25, y, args=k)
        return out.ys.sum()

    def steps(k, y):
        k = k - jax.grad(solve)(k, y)
        return k - jax.grad(solve)(k, y), solve(k, y)

    _, got = S(steps, reduce={"f": Append()})(jnp.array(0.5), X)
    first, second, third = got["f"]["cotangent"]

    # Euler's method by hand, with a zero added to what was sown last.
    def by_hand(zero, k):
        y = X
        for i in range(4):
            y = y + 0.25 * (-k * y + (zero if i == 3 else 0.0))
        return y.sum()

    k = jnp.array(0.5)
    for cotangent in (first, second):
        assert_close(cotangent, jax.grad(by_hand)(jnp.zeros(2), k))
        k = k - jax.grad(by_hand, 1)(jnp.zeros(2), k)
    assert third is None


# --- what does not reach the result ---
def _dead(y):
    sow(jnp.sin(y), "h")
    return y


def _branch(y):
    return lax.cond(y > 0, _dead, lambda y: y, y)


def _index(y):
    return jnp.argmax(sow(jnp.sin(y * jnp.arange(3.0)), "h")).astype(jnp.float32)


def _index_branch(y):
    return lax.cond(y > 0, _index, lambda y: jnp.float32(0), y)


def _unused_branch(y):
    lax.cond(y > 0, lambda y: 2 * _dead(y), lambda y: y, y)
    return y


def _loop(body):
    return lambda y: lax.scan(lambda c, _: (2 * body(c), None), y, None, length=2)[0]


_PLACES = {
    "checkpoint": lambda ck, f: ck(f),
    "of_jit": lambda ck, f: ck(jax.jit(f)),
    "in_jit": lambda ck, f: jax.jit(ck(f)),
    "of_checkpoint": lambda ck, f: ck(ck(f)),
    "in_branch": lambda ck, f: lambda y: lax.cond(y > 0, ck(f), f, y),
    "of_scan": lambda ck, f: ck(_loop(lambda y: y * (1 + f(y)))),
    "in_scan": lambda ck, f: _loop(lambda y: y * (1 + ck(f)(y))),
    "of_both": lambda ck, f: ck(_loop(lambda y: y * (1 + ck(jax.jit(f))(y)))),
}
_everything = ft.partial(
    jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable
)


@pytest.mark.parametrize(
    "f, place, ck",
    [
        (f, place, ck)
        for f in (_dead, _branch, _index, _index_branch, _unused_branch)
        for place in _PLACES
        for ck in (jax.checkpoint, eqx.filter_checkpoint, _everything)
        if (f in (_branch, _index) and ck is jax.checkpoint) or place == "checkpoint"
    ],
)
def test_what_does_not_reach_the_result_has_zeros_in_a_checkpoint(f, place, ck):
    def grad(ck):
        fn = _PLACES[place](ck, f)
        return jax.grad(lambda x: fn(x) * x)

    out, got = S(grad(ck))(1.0)
    close(out, grad(ck)(1.0))
    want_out, want = S(grad(lambda f: f))(1.0)
    close(out, want_out)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert_close(got, want)
    primal = got["h"]["primal"]
    shape = (2,) * ("scan" in place or place == "of_both")
    assert primal.shape == shape + (3,) * (f in (_index, _index_branch))
    np.testing.assert_array_equal(got["h"]["cotangent"], np.zeros_like(primal))


def test_zeros_in_a_checkpoint_are_events():
    events = []
    tap(jax.grad(lambda x: jax.checkpoint(_branch)(x) * x), events.append)(1.0)
    jax.effects_barrier()
    assert sorted(e.mode for e in events) == ["cotangent", "primal"]
    np.testing.assert_allclose(sorted(e.value for e in events), [0, np.sin(1.0)])


def test_derivatives_of_zeros_in_a_checkpoint():
    def modes(ck, derive):
        fn = lambda x: ck(_branch)(x) * x
        return set(S(derive(fn))(1.0)[1]["h"])

    def linearized(f):
        return lambda x: jax.linearize(f, x)[1](x)

    def twice(f):
        return jax.grad(jax.grad(f))

    for derive in (linearized, twice, lambda f: jax.jacfwd(jax.grad(f))):
        plain = modes(lambda f: f, derive)
        assert modes(jax.checkpoint, derive) == plain > {"primal", "count"}


@pytest.mark.slow
def test_zeros_that_do_not_leave_a_shard_map():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec()
    mapped = lambda f: jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)

    def modes(fn):
        return set(S(jax.grad(lambda x: fn(x) * x))(jnp.ones(()))[1]["h"])

    assert modes(mapped(_index)) == {"primal", "cotangent"}
    assert modes(mapped(jax.checkpoint(_index))) == {"primal", "cotangent"}
    # A limit, see docs/limits.md.
    assert modes(jax.checkpoint(mapped(_index))) == {"primal"}
