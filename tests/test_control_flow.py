"""The rows of "what comes back" that speak of loops, branches and vmap."""

import functools
import itertools

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_sow import (
    Append,
    DuplicateSowError,
    Fold,
    save_intermediates,
    sow,
    SowError,
    UnsupportedPrimitiveError,
)
from jax import lax

from tests.helpers import assert_close, close, modes_of, unmarked
from tests.tables import SAVES, under


S = save_intermediates
X = jnp.array([0.5, 1.5])
ALL = "eager", "jit inside", "jit outside"


def scanned(length=3, **kwargs):
    def f(x):
        def body(c, _):
            return sow(c * 2, "a"), None

        return lax.scan(body, x, None, length=length, **kwargs)[0]

    return f


@under(*ALL, of=SAVES)
@pytest.mark.parametrize("unroll", [1, 2, True])
def test_scan_has_a_leading_axis(wrap, unroll):
    out, captured = wrap(scanned(unroll=unroll))(X)
    close(out, X * 8)
    assert modes_of(captured) == {"a": {"primal"}}
    close(captured["a"]["primal"], [X * 2, X * 4, X * 8])


@pytest.mark.parametrize("length", [0, 1])
def test_scan_of_length_zero_and_one(length):
    _, captured = S(scanned(length))(X)
    close(captured["a"]["primal"], np.array([X * 2] * length).reshape(length, 2))


def test_reversed_scan_goes_by_index_for_cotangents_too():
    weights = jnp.array([1.0, 2.0, 3.0])

    def loss(x):
        def body(c, w):
            c = sow(c + w * x, "a")
            return c, c * w

        c, ys = lax.scan(body, x, weights, reverse=True)
        return (c + ys.sum(0)).sum()

    _, captured = S(jax.grad(loss))(X)
    # The last index runs first.
    close(captured["a"]["primal"], [7 * X, 6 * X, 4 * X])
    ones = np.ones(2, np.float32)
    close(captured["a"]["cotangent"], [2 * ones, 4 * ones, 7 * ones])


@under(*ALL, of=SAVES)
def test_nested_loops_put_the_outer_one_first(wrap):
    def f(x):
        def outer(i, c):
            def inner(j, c):
                return sow(c + 1, "a")

            return lax.fori_loop(0, 3, inner, c)

        return lax.fori_loop(0, 2, outer, x)

    _, captured = wrap(f)(X)
    close(captured["a"]["primal"], np.asarray(X) + np.arange(1.0, 7).reshape(2, 3, 1))


@under("jit", "checkpoint", "filter_checkpoint", argument="inner")
def test_loop_invariant_value_has_the_loop_axis(inner):
    def f(x):
        def body(c, _):
            y = inner(lambda c: c * sow(jnp.sin(x), "a"))(c)
            return y, None

        return lax.scan(body, x, None, length=3)[0].sum()

    want = np.broadcast_to(np.sin(X), (3, 2))
    s, c = np.sin(X), np.cos(X)
    for g in (f, jax.jit(f), jax.checkpoint(f)):
        close(S(g)(X)[1]["a"]["primal"], want)
        grads, captured = S(jax.grad(g))(X)
        close(grads, s**3 + X * 3 * s**2 * c)
        close(captured["a"]["primal"], want)
        close(captured["a"]["cotangent"], np.broadcast_to(X * s**2, (3, 2)))
        _, captured = S(jax.jit(jax.grad(g)))(X)
        close(captured["a"]["primal"], want)


def test_loop_invariant_value_in_nested_loops_under_grad():
    def f(x):
        def outer(i, c):
            def inner(j, c):
                sow(x, "unused")
                return c * sow(jnp.cos(x), "a")

            return lax.fori_loop(0, 3, jax.jit(inner), c)

        return lax.fori_loop(0, 2, outer, x).sum()

    for g in (jax.grad(f), jax.jit(jax.grad(f)), jax.grad(jax.checkpoint(f))):
        _, captured = S(g)(X)
        close(captured["a"]["primal"], np.broadcast_to(np.cos(X), (2, 3, 2)))
        close(
            captured["a"]["cotangent"], np.broadcast_to(X * np.cos(X) ** 5, (2, 3, 2))
        )
        close(captured["unused"]["primal"], np.broadcast_to(X, (2, 3, 2)))
        close(captured["unused"]["cotangent"], np.zeros((2, 3, 2)))
    _, captured = S(jax.vmap(jax.grad(f)))(X[None])
    close(captured["a"]["primal"], np.broadcast_to(np.cos(X), (1, 2, 3, 2)))


def test_value_that_does_not_depend_on_the_input_has_no_cotangent():
    def f(x):
        def body(c, w):
            return c * sow(w, "w"), None

        return lax.scan(body, x, jnp.arange(3.0))[0].sum()

    _, captured = S(jax.grad(f))(X)
    assert modes_of(captured) == {"w": {"primal"}}
    close(captured["w"]["primal"], [0, 1, 2])


def test_stacked_layers():
    layers = eqx.filter_vmap(lambda k: eqx.nn.Linear(2, 2, key=k))(
        jr.split(jr.key(0), 3)
    )
    arrays, static = eqx.partition(layers, eqx.is_array)

    def f(x):
        def body(x, layer):
            return sow(jnp.tanh(eqx.combine(layer, static)(x)), "h"), None

        return lax.scan(body, x, arrays)[0]

    want, x = [], X
    for i in range(3):
        x = jnp.tanh(layers.weight[i] @ x + layers.bias[i])
        want.append(x)
    out, captured = S(f)(X)
    close(out, x)
    close(captured["h"]["primal"], want)
    _, captured = S(jax.vmap(f))(X[None])
    close(captured["h"]["primal"], np.array(want)[None])


def test_map_has_the_axis_of_the_elements():
    def f(xs):
        return lax.map(lambda x: sow(x**2, "a"), xs)

    _, captured = S(f)(jnp.arange(5.0))
    close(captured["a"]["primal"], np.arange(5.0) ** 2)


@pytest.mark.parametrize("batch_size", [2, 3])
def test_map_in_batches_is_right_or_refused(batch_size):
    xs = jnp.arange(6.0)

    def f(xs):
        return lax.map(lambda x: sow(x**2, "a"), xs, batch_size=batch_size)

    _, captured = S(f)(xs)
    close(captured["a"]["primal"], np.arange(6.0).reshape(-1, batch_size) ** 2)


def test_map_in_batches_with_a_remainder_runs_twice_in_straight_line():
    with pytest.raises(SowError, match="'?a'?"):
        S(lambda xs: lax.map(lambda x: sow(x, "a"), xs, batch_size=2))(jnp.arange(5.0))


def test_associative_scan_is_straight_line_code():
    def combine(x, y):
        return sow(x + y, "a")

    with pytest.raises(SowError):
        S(lambda x: lax.associative_scan(combine, x))(jnp.arange(4.0))
    f = S(lambda x: lax.associative_scan(combine, x), reduce=Append())
    out, captured = f(jnp.arange(4.0))
    close(out, [0, 1, 3, 6])
    close(captured["a"]["primal"][0], [1, 5])


@under(*ALL, of=SAVES)
def test_branch_that_ran(wrap):
    def f(x):
        return lax.cond(
            x[0] > 0, lambda x: sow(x * 2, "yes"), lambda x: sow(x * 3, "no"), x
        )

    for x, yes, no in ((X, X * 2, 0 * X), (-X, 0 * X, -X * 3)):
        _, captured = wrap(f)(x)
        close(captured["yes"]["primal"], yes)
        close(captured["no"]["primal"], no)
        for name, ran in (("yes", x[0] > 0), ("no", x[0] <= 0)):
            count = captured[name]["count"]
            assert count.dtype == jnp.int32 and count.shape == ()
            assert count == int(ran)


@pytest.mark.parametrize("index", [-1, 0, 1, 2, 5])
def test_switch_with_one_name_in_several_branches(index):
    def f(i, x):
        branches = [lambda x: sow(x * 2, "a"), lambda x: x, lambda x: sow(x * 4, "a")]
        return lax.switch(i, branches, x)

    _, captured = S(f)(jnp.array(index), X)
    ran = min(max(index, 0), 2)
    close(captured["a"]["primal"], [2 * X, 0 * X, 4 * X][ran])
    assert captured["a"]["count"] == int(ran != 1)


@pytest.mark.parametrize(
    "other, shown",
    [
        (lambda x: sow(x[:1], "a"), (r"f32\[1\]", r"f32\[2\]")),
        (lambda x: sow(x.astype(jnp.float16), "a"), ("f32", "f16")),
        (lambda x: sow({"k": x}, "a"), ("k", "f32")),
    ],
)
def test_branches_that_disagree(other, shown):
    def f(x):
        def no(x):
            other(x)
            return x

        return lax.cond(x[0] > 0, lambda x: sow(x, "a"), no, x)

    for one in shown:
        with pytest.raises(SowError, match=one):
            S(f)(X)


def test_the_gradient_through_a_transform_is_finite_where_the_sow_does_not_run():
    def f(x):
        return lax.cond(x > 0, lambda x: sow(x, "a"), lambda x: -x, x)

    def loss(x):
        _, captured = S(jax.vmap(f), transform=jnp.log)(x)
        return captured["a"]["primal"].sum()

    close(jax.grad(loss)(jnp.array([4.0, 0.0])), [0.25, 0.0])


def test_platform_dependent():
    def f(x):
        return lax.platform_dependent(
            x, cpu=lambda x: sow(x * 2, "a"), default=lambda x: sow(x * 3, "a")
        )

    out, captured = S(f)(X)
    close(captured["a"]["primal"], out)
    assert captured["a"]["count"] == 1


def doubled(limit=10.0):
    def f(x):
        return lax.while_loop(lambda c: c.sum() < limit, lambda c: sow(c * 2, "a"), x)

    return f


@under(*ALL, of=SAVES)
def test_while_has_the_last_value_and_a_count(wrap):
    out, captured = wrap(doubled())(X)
    close(captured["a"]["primal"], out)
    assert captured["a"]["count"] == 3
    _, captured = wrap(doubled(0.0))(X)
    close(captured["a"]["primal"], 0 * X)
    assert captured["a"]["count"] == 0 and captured["a"]["count"].dtype == jnp.int32


def test_fori_loop_with_a_traced_bound_is_a_while():
    @jax.jit
    def f(n, x):
        return lax.fori_loop(0, n, lambda i, c: sow(c + 1, "a"), x)

    _, captured = S(f)(4, X)
    close(captured["a"]["primal"], X + 4)
    assert captured["a"]["count"] == 4


def test_sow_in_a_while_condition_is_refused():
    def f(x):
        return lax.while_loop(lambda c: sow(c.sum(), "a") < 10, lambda c: c * 2, x)

    for g in (f, jax.jit(f), jax.vmap(f)):
        with pytest.raises(UnsupportedPrimitiveError, match="a"):
            S(g)(X[None])


def test_lanes_of_a_while_whose_condition_has_a_sow_that_is_not_asked_for():
    def f(n):
        return lax.while_loop(
            lambda c: sow(c[0], "limit") < n,
            lambda c: (c[0] + 1, sow(c[1] * 2, "a")),
            (0, 1.0),
        )

    out, captured = S(jax.vmap(f), names="a")(jnp.array([0, 2, 5]))
    close(out[1], [1, 4, 32])
    close(captured["a"]["primal"], [0, 4, 32])
    close(captured["a"]["count"], [0, 2, 5])


def _waits_for_all_lanes(c):
    return (c < 8) & ((c < 3) | (lax.pmin(c, "lane") >= 3))


def _waits_for_all_lanes_without_a_name(c):
    return (c < 8) & ((c < 3) | ~eqxi.unvmap_any(c < 3))


def _has_a_loop(c):
    # This never ends for a negative number, which only a finished lane would have.
    steps = lax.while_loop(
        lambda t: t[0] != 0, lambda t: (t[0] - 1, t[1] + 1), (8 - c, 0)
    )
    return steps[1] > 0


def _may_raise(c):
    return eqx.error_if(c, c > 8, "one iteration too many") < 8


def _prints(c):
    jax.debug.print("limit {}", c)
    return c < 8


@pytest.mark.parametrize(
    "going",
    [
        _waits_for_all_lanes,
        _waits_for_all_lanes_without_a_name,
        _has_a_loop,
        _may_raise,
        _prints,
    ],
)
def test_lanes_of_a_while_are_those_that_jax_sees(going, capfd):
    def f(x):
        return lax.while_loop(going, lambda c: sow(c + 1, "a"), x)

    def by_hand(x):
        def body(state):
            c, _, n = state
            return c + 1, c + 1, n + 1

        return lax.while_loop(lambda s: going(s[0]), body, (x, 0, 0))

    x = jnp.array([0, 3, 6])
    y, a, n = jax.vmap(by_hand, axis_name="lane")(x)
    jax.effects_barrier()
    printed = sorted(capfd.readouterr().out)
    for jit in (lambda fn: fn, jax.jit):
        out, captured = jit(S(jax.vmap(f, axis_name="lane")))(x)
        jax.effects_barrier()
        assert_close(out, y)
        assert_close(captured["a"]["primal"], a)
        assert_close(captured["a"]["count"], n)
        assert sorted(capfd.readouterr().out) == printed


def test_lanes_of_a_while_that_writes_to_a_mutable_array():
    def f(mark, x):
        total = jax.new_ref(0.0)

        def body(c):
            total[...] = total[...] + c
            return mark(c * 2, "a")

        return lax.while_loop(lambda c: c < 8, body, x), total[...]

    x = jnp.array([0.5, 2.0, 9.0])
    plain = jax.vmap(functools.partial(f, unmarked))(x)
    for jit in (lambda fn: fn, jax.jit):
        out, captured = jit(S(jax.vmap(functools.partial(f, sow))))(x)
        assert_close(out, plain)
        close(captured["a"]["count"], [4, 2, 0])


def test_lanes_of_a_while_that_are_sharded():
    def f(x):
        return lax.while_loop(lambda c: c < 8, lambda c: c * 2, sow(x, "a"))

    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.array([0.5, 2.0, 9.0]), jax.P("d"))
        out, captured = S(jax.vmap(f))(x)
        close(out, [8, 8, 9])
        close(captured["a"]["primal"], x)


def test_count_has_the_axes_of_the_value():
    def f(x):
        def inner(c, _):
            return sow(c + 1, "inner"), None

        def body(c, i):
            c = lax.cond(i % 2 == 0, lambda c: sow(c * 2, "even"), lambda c: c, c)
            c = lax.cond(
                i > 0, lambda c: lax.scan(inner, c, None, length=2)[0], lambda c: c, c
            )
            return c, None

        return lax.scan(body, x, jnp.arange(3))[0]

    _, captured = S(f)(X)
    assert captured["even"]["count"].tolist() == [1, 0, 1]
    assert captured["inner"]["count"].tolist() == [[0, 0], [1, 1], [1, 1]]
    assert captured["inner"]["primal"].shape == (3, 2, 2)


def marked_by_one_of_three(i, x):
    """The sine of `x` in branch 0, a constant in branch 1, and nothing in branch 2."""
    branches = (
        lambda x: x * sow(jnp.sin(x), "a"),
        lambda x: x * sow(jnp.full(2, 2.0), "a"),
        lambda x: x + 1,
    )
    return lax.switch(i, branches, x)


# Which branch each iteration runs: the value is that of the last one that has it.
RUNS = [(0, 1), (1, 0), (0, 1, 2), (0, 2), (1, 2), (2, 2), (0, 1, 0), (1, 2, 0, 1, 2)]


def looped(body):
    def f(runs, x):
        state = 0, x
        return lax.while_loop(
            lambda s: runs[s[0]] >= 0,
            lambda s: (s[0] + 1, body(runs[s[0]], s[1])),
            state,
        )[1]

    return f


def runs_of(which):
    return jnp.array([*which, *[-1] * (6 - len(which))])


@pytest.mark.parametrize("way", ["alone", "vmap of jvp", "jvp of vmap", "in a while"])
def test_a_tangent_in_a_while_is_of_the_iteration_that_the_value_is_of(way):
    def in_a_while(runs, x):
        inner = looped(marked_by_one_of_three)
        return looped(lambda _, x: inner(runs, x))(runs_of([0]), x)

    f = in_a_while if way == "in a while" else looped(marked_by_one_of_three)
    every, t = jnp.stack(list(map(runs_of, RUNS))), jnp.array([1.0, -0.5])
    along = lambda f, runs: lambda x, t: jax.jvp(lambda x: f(runs, x), (x,), (t,))
    if way == "vmap of jvp":
        got = S(jax.vmap(lambda runs: along(f, runs)(X, t)))(every)[1]["a"]
    elif way == "jvp of vmap":
        xs, ts = jnp.tile(X, (len(RUNS), 1)), jnp.tile(t, (len(RUNS), 1))
        got = S(along(jax.vmap(f), every))(xs, ts)[1]["a"]
    else:
        each = [S(along(f, runs))(X, t)[1]["a"] for runs in every]
        got = jax.tree.map(lambda *xs: jnp.stack(xs), *each)

    # By hand: the value of the last iteration that has one, threaded through the loop.
    def last(which, x):
        value = jnp.zeros(2)
        for i in which:
            value = [jnp.sin(x), jnp.full(2, 2.0), value][i]
            x = [x * jnp.sin(x), 2 * x, x + 1][i]
        return value

    for k, which in enumerate(RUNS):
        value, tangent = jax.jvp(lambda x: last(which, x), (X,), (t,))
        close(got["primal"][k], value)
        close(got["tangent"][k], tangent)
        assert got["count"][k] == sum(i < 2 for i in which)


@pytest.mark.parametrize("way", ["alone", "vmap", "jacrev"])
def test_a_cotangent_in_a_while_is_of_the_iteration_that_the_value_is_of(way):
    def step(i, x):
        if way == "jacrev":
            return x - 0.1 * jax.jacrev(marked_by_one_of_three, 1)(i, x).sum(0)
        return x - 0.1 * jax.grad(lambda x: marked_by_one_of_three(i, x).sum())(x)

    every = jnp.stack(list(map(runs_of, RUNS)))
    f = lambda runs: looped(step)(runs, X)
    if way == "vmap":
        got = S(jax.vmap(f))(every)[1]["a"]
    else:
        each = [S(f)(runs)[1]["a"] for runs in every]
        got = jax.tree.map(lambda *xs: jnp.stack(xs), *each)
    for k, which in enumerate(RUNS):
        x, value, cotangent = X, jnp.zeros(2), jnp.zeros(2)
        for i in which:
            if i < 2:
                value = [jnp.sin(x), jnp.full(2, 2.0)][i]
                # The value is multiplied by `x`; the constant has no cotangent.
                cotangent = [x, jnp.zeros(2)][i]
            x = step(i, x)
        close(got["primal"][k], value)
        want = jnp.diag(cotangent) if way == "jacrev" else cotangent
        close(got["cotangent"][k], want)


def test_scan_in_a_while_keeps_its_axis_and_counts_each_entry():
    def f(x):
        def body(c):
            return lax.scan(lambda c, _: (sow(c * 2, "a"), None), c, None, length=2)[0]

        return lax.while_loop(lambda c: c.sum() < 20, body, x)

    _, captured = S(f)(X)
    close(captured["a"]["primal"], [X * 8, X * 16])
    assert captured["a"]["count"].tolist() == [2, 2]


def test_while_in_a_scan():
    def f(x):
        def body(c, limit):
            return doubled_to(c, limit), None

        def doubled_to(c, limit):
            return lax.while_loop(
                lambda c: c.sum() < limit, lambda c: sow(c * 2, "a"), c
            )

        return lax.scan(body, x, jnp.array([3.0, 1.0, 30.0]))[0]

    _, captured = S(f)(X)
    assert captured["a"]["count"].tolist() == [1, 0, 3]
    close(captured["a"]["primal"], [X * 2, X * 0, X * 16])


XS = jnp.array([[0.5, 1.5], [-1.0, 0.2], [3.0, 4.0]])


@pytest.mark.parametrize("axis", [0, 1])
def test_batched_predicate(axis):
    def f(x):
        def body(c):
            c = lax.cond(c[0] > 1, lambda c: sow(c + 1, "big"), lambda c: c, c)
            sow(jnp.ones(2), "const")
            return sow(c * 2, "w")

        return lax.while_loop(lambda c: jnp.abs(c).sum() < 6, body, x)

    xs = XS if axis == 0 else XS.T
    _, got = S(jax.vmap(f, axis))(xs)
    _, want = eqx.filter_vmap(S(f), in_axes=axis)(xs)
    assert modes_of(got) == modes_of(want)
    jax.tree.map(close, got, want)
    assert got["const"]["primal"].shape == (3, 2)
    assert got["w"]["count"].tolist() == [S(f)(x)[1]["w"]["count"] for x in XS]


def test_batched_predicate_under_grad():
    def f(x):
        def body(c, _):
            c = lax.cond(
                c[0] > 0, lambda c: sow(jnp.sin(c), "a"), lambda c: sow(c**2, "a"), c
            )
            i = (c[1] * 3).astype(jnp.int32)
            c = lax.switch(i, [jnp.cos, lambda c: sow(c * x, "b"), jnp.tanh], c)
            return c, None

        return lax.scan(body, x, None, length=2)[0].sum()

    _, got = S(jax.vmap(jax.grad(f)))(XS)
    _, want = eqx.filter_vmap(S(jax.grad(f)))(XS)
    assert modes_of(got) == {n: {"primal", "cotangent", "count"} for n in "ab"}
    jax.tree.map(close, got, want)
    _, mapped = S(jax.grad(lambda xs: jax.vmap(f)(xs).sum()))(XS)
    jax.tree.map(close, mapped, want)


def test_axes_of_loops_and_vmaps_stand_in_nesting_order():
    def f(x):
        def lane(y):
            return sow(y, "a")

        def body(c, _):
            return jax.vmap(lane, in_axes=1)(c).T, None

        return lax.scan(body, x, None, length=4)[0]

    xs = jr.normal(jr.key(0), (5, 2, 3))
    _, captured = S(jax.vmap(f))(xs)
    want = np.broadcast_to(np.asarray(xs).transpose(0, 2, 1)[:, None], (5, 4, 3, 2))
    close(captured["a"]["primal"], want)
    _, captured = S(jax.grad(lambda xs: jax.vmap(f)(xs).sum()))(xs)
    close(captured["a"]["primal"], want)
    close(captured["a"]["cotangent"], np.ones((5, 4, 3, 2)))


def test_a_vmap_in_a_loop_in_a_vmap_in_a_loop():
    ys, zs = jnp.arange(1.0, 3.0), jnp.arange(1.0, 6.0)

    def inner(c, _):
        return jax.vmap(lambda y: sow(c * y, "a"))(ys).sum() * 0.1, None

    def lane(c, z):
        return lax.scan(inner, c + z, None, length=3)[0]

    def outer(c, _):
        return jax.vmap(lane, (None, 0))(c, zs).sum() * 0.1, None

    want = np.zeros((4, 5, 3, 2), np.float32)
    c = 0.5
    for i in range(4):
        total = 0.0
        for j, z in enumerate(np.asarray(zs)):
            d = c + z
            for k in range(3):
                want[i, j, k] = d * np.asarray(ys)
                d = want[i, j, k].sum() * 0.1
            total += d
        c = total * 0.1

    f = lambda x: lax.scan(outer, x, None, length=4)[0]
    for g in (f, jax.jit(f), jax.grad(f), jax.grad(jax.checkpoint(f))):
        _, captured = S(g)(0.5)
        close(captured["a"]["primal"], want)
    assert captured["a"]["cotangent"].shape == (4, 5, 3, 2)


def test_value_that_does_not_vary_has_no_axis():
    def f(x, y):
        return jax.vmap(lambda x: x + sow(y, "y") + sow((x, y), "both")[1])(x)

    _, captured = S(f)(XS, X)
    close(captured["y"]["primal"], X)
    # One leaf varies, so the entry has the axis on all of them.
    assert [v.shape for v in captured["both"]["primal"]] == [(3, 2), (3, 2)]


@pytest.mark.parametrize("nested", [False, True])
def test_a_name_in_branches_is_transformed_once(nested):
    """Two of three branches sow it, or those of a cond in one of them."""
    inner = lambda x: lax.cond(x[1] > 0, first, second, x)
    first = lambda x: sow(jnp.sin(x), "h")
    second = lambda x: sow(2 * x, "h")
    branches = (inner if nested else first, inner if nested else second, jnp.cos)
    traced = []

    def squares(x):
        traced.append(x)
        return (x**2).sum()

    def f(x):
        index = jnp.where(x[0] > 1, 2, jnp.where(x[1] > 0, 0, 1))
        return lax.switch(index, branches, x)

    x = jnp.array([[0.5, 1.5], [0.5, -1.5], [1.5, 0.5]])
    _, captured = S(jax.vmap(f), transform=squares)(x)
    want = [(jnp.sin(x[0]) ** 2).sum(), 4 * (x[1] ** 2).sum(), 0]
    close(captured["h"]["primal"], want)
    close(captured["h"]["count"], [1, 1, 0])
    assert len(traced) == 1


def test_names_modes_and_transform_act_inside_the_loop():
    def f(x):
        def body(c, _):
            sow(jnp.outer(c, c), "big")
            return sow(c * 2, "a"), None

        return lax.scan(body, x, None, length=3)[0].sum()

    _, captured = S(f, names="a")(X)
    assert list(captured) == ["a"]
    _, captured = S(f, transform={"big": jnp.mean})(X)
    assert captured["big"]["primal"].shape == (3,)
    jaxpr = jax.make_jaxpr(lambda x: S(f, transform={"big": jnp.mean})(x))(X)
    assert "3,2,2]" not in str(jaxpr)
    assert "3,2,2]" not in str(jax.make_jaxpr(lambda x: S(f, names="a")(x))(X))
    _, captured = S(jax.grad(f), modes="cotangent")(X)
    assert modes_of(captured) == {"big": {"cotangent"}, "a": {"cotangent"}}


def test_a_mode_that_is_left_out_may_have_several_values():
    """In a `while_loop`, too, where a derivative that is asked for needs its primal."""

    def run(x):
        step = lambda c: (c[0] + 1, sow(sow(2 * c[1], "twice"), "twice"))
        return sow(lax.while_loop(lambda c: c[0] < 3, step, (0, x))[1], "out")

    derivative = lambda x: jax.jvp(run, (x,), (x,))[1]
    one = lambda x: jax.grad(lambda x: sow(jnp.sin(x), "once").sum())(x)
    for fn in (run, derivative):
        _, got = S(lambda x, fn=fn: (fn(x), one(x)), modes="cotangent")(X)
        assert_close(got, {"once": {"cotangent": jnp.ones_like(X)}})
        for mode in ("primal", "tangent")[: 2 if fn is derivative else 1]:
            with pytest.raises(DuplicateSowError):
                S(fn, modes=mode)(X)


def test_jitted_and_checkpointed_bodies():
    def body(c, x):
        return sow(jnp.sin(c) + x, "a"), None

    def f(body, x):
        return lax.scan(body, x, jnp.stack([x, 2 * x]))[0].sum()

    want = S(jax.grad(lambda x: f(body, x)))(X)[1]
    for wrap in (jax.jit, jax.checkpoint, lambda b: jax.jit(jax.checkpoint(b))):
        got = S(jax.grad(lambda x, b=wrap(body): f(b, x)))(X)[1]
        assert modes_of(got) == {"a": {"primal", "cotangent"}}
        jax.tree.map(close, got, want)


def test_loss_on_captured_values_of_loops_and_branches():
    def f(x):
        def body(c, i):
            c = lax.cond(i == 1, lambda c: sow(jnp.sin(c), "a"), lambda c: c * 2, c)
            return c, None

        return lax.scan(body, x, jnp.arange(3))[0]

    grads = jax.grad(lambda x: S(f)(x)[1]["a"]["primal"].sum())(X)
    close(grads, 2 * np.cos(2 * X))


def test_names_come_in_order_of_execution():
    def f(x):
        x = sow(x, "z")
        x = lax.scan(lambda c, _: (sow(c, "m"), None), x, None, length=2)[0]
        x = lax.cond(x[0] > 0, lambda x: sow(x, "c"), lambda x: sow(x, "b"), x)
        return sow(x, "a")

    names = list(S(f)(X)[1])
    assert (
        names[:2] == ["z", "m"] and names[-1] == "a" and set(names[2:4]) == {"b", "c"}
    )


# --- sows that only a derivative rule has ---


def _in_fwd(mark):
    @jax.custom_vjp
    def f(w, c):
        return w * c

    def fwd(w, c):
        return w * c, (w, c, mark(jnp.sin(w), "res"))

    f.defvjp(fwd, lambda r, ct: (ct * r[1], ct * r[0]))
    return f


def _in_jvp_rule(mark):
    @jax.custom_jvp
    def f(w, c):
        return w * c

    @f.defjvp
    def _(primals, tangents):
        (w, c), (dw, dc) = primals, tangents
        mark(jnp.sin(w), "res")
        return w * c, w * dc + c * dw

    return f


@pytest.mark.parametrize("make", [_in_fwd, _in_jvp_rule])
@under("eager", "jit", "checkpoint")
def test_a_rule_runs_in_each_iteration(make, wrap, call):
    """Also if what it sows does not depend on the iteration."""
    f = make(sow)
    loop = lambda w, x: jnp.sum(lax.scan(lambda c, _: (f(w, c), None), x, length=3)[0])
    w, x = jnp.array([0.3, 0.7]), jnp.array([2.0, 3.0])
    fn = jax.grad(wrap(loop), 1)
    _, got = call(S(fn), w, x)
    assert_close(got["res"]["primal"], jnp.tile(jnp.sin(w), (3, 1)))
    add = Fold(jnp.zeros(()), lambda acc, v: acc + jnp.sum(v))
    _, got = call(S(fn, reduce=add), w, x)
    assert_close(got["res"]["primal"], 3 * jnp.sum(jnp.sin(w)))
    ws, xs = jnp.stack([w, 2 * w]), jnp.stack([x, x])
    _, got = call(S(jax.vmap(fn)), ws, xs)
    assert_close(got["res"]["primal"], jnp.tile(jnp.sin(ws)[:, None], (1, 3, 1)))


@pytest.mark.parametrize("inner", ["p", "q"])
def test_conds_in_branches_under_a_vmap_for_each_predicate(inner):
    def f(p, q, x):
        doubled = lambda: lax.cond(q, lambda: sow(2 * x, "n"), lambda: 3 * x)
        return lax.cond(p, doubled, lambda: sow(5 * x, "n"))

    x, runs = jnp.arange(1.0, 4.0), jnp.array([True, False])
    first, second = (0, None, None), (None, 0, None)
    if inner == "q":
        first, second = second, first
    _, captured = S(jax.vmap(jax.vmap(f, first), second))(runs, runs, x)
    for i, j in np.ndindex(2, 2):
        p, q = (j == 0, i == 0) if inner == "p" else (i == 0, j == 0)
        want = (2 if q else 0) * x if p else 5 * x
        assert captured["n"]["count"][i, j] == int(q or not p)
        assert jnp.array_equal(captured["n"]["primal"][i, j], want)


_if = lambda f: lambda x, z, o: lax.cond(o > 0, f, lambda x, z, o: 2 * x, x, z, o)
_loop = lambda f: lambda x, zs, o: lax.scan(lambda c, z: (f(c, z, o), None), x, zs)[0]
_MESH = jax.make_mesh(
    (2,), ("d",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
)
_mesh = lambda f: jax.shard_map(f, mesh=_MESH, in_specs=jax.P(), out_specs=jax.P())
_AROUND = {
    "cond": _if,
    "cond, cond": lambda f: _if(_if(f)),
    "cond, checkpoint": lambda f: _if(jax.checkpoint(f)),
    "cond, jit": lambda f: _if(jax.jit(f)),
    "scan, cond": lambda f: _loop(_if(f)),
    "cond, scan": lambda f: _if(_loop(f)),
    "cond, scan, cond": lambda f: _if(_loop(_if(f))),
    "mesh, cond": lambda f: _mesh(_if(f)),
}


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("around", _AROUND)
def test_derivatives_of_a_name_in_branches_within_a_branch(around, each):
    """A `vmap` makes a selection of the innermost cond, and with `each` another one of
    the conds around it. What the branch around it keeps for the backward pass, the
    other branch has as well, without a mark."""

    def loss(x, zeros, o, mark):
        def choose(x, z, o):
            first = lambda x: jnp.sin(mark(2 * x, z)) * o
            return lax.cond(x.sum() > 0, first, lambda x: mark(x - o, z) ** 2 / 4, x)

        lane = lambda x, z: _AROUND[around](choose)(x, z, o)
        return jax.vmap(lane)(x, zeros).sum()

    x, o = jnp.array([[1.0, 2.0, 3.0], [-1.0, -2.0, 0.5]]), jnp.array(0.7)
    zeros = jnp.zeros((2, 4, 3) if "scan" in around else (2, 3))
    marked = lambda x, o: loss(x, zeros, o, lambda y, z: sow(y, "h"))
    fn = jax.grad(marked, (0, 1))
    want = lambda x, o: jax.grad(lambda z: loss(x, z, o, jnp.add))(zeros)
    if each:
        fn, want = jax.vmap(fn), jax.vmap(want)
        x, o = jnp.stack([x, x + 1, -x]), jnp.array([0.7, -0.7, 0.3])
    # Op by op, JAX compiles a thousand programs for the mesh.
    run = jax.jit if each or "mesh" in around else lambda f: f
    (_, captured), want = run(S(fn))(x, o), run(want)(x, o)
    close(captured["h"]["cotangent"], want)
    # Where the branch does not run that has the mark, `want` and the count are zero.
    assert np.array_equal(np.all(want == 0, axis=-1), captured["h"]["count"] == 0)


def test_a_constant_predicate_within_a_branch():
    """What both branches keep for the backward pass is then made of constants alone."""

    def loss(x, zeros, o, mark):
        def lane(p, x, z):
            first = lambda x: jnp.sin(mark(2 * x, z))
            inner = lambda x: lax.cond(p, first, lambda x: mark(x - 1, z) ** 2, x)
            return lax.cond(o > 0, inner, lambda x: 2 * x, x)

        return jax.vmap(lane)(jnp.array([True, False]), x, zeros).sum()

    xs, zeros = jnp.linspace(0.1, 1.3, 6).reshape(3, 2), jnp.zeros(2)
    o = jnp.array([0.7, -0.7, 0.3])
    marked = lambda x, o: loss(x, zeros, o, lambda y, _: sow(y, "h"))
    _, captured = S(jax.vmap(jax.grad(marked)))(xs, o)
    want = lambda x, o: jax.grad(lambda z: loss(x, z, o, jnp.add))(zeros)
    close(captured["h"]["cotangent"], jax.vmap(want)(xs, o))


def test_a_function_with_branches_that_runs_twice_within_a_branch():
    """With one predicate. Each branch is differentiated in one of the calls."""
    c = jnp.array([[5.0], [7.0]])

    def loss(x, zeros, o, mark):
        @jax.jit
        def choose(p, x, y, z):
            first = lambda: jnp.sin(mark(2 * x, z))
            return lax.cond(p, first, lambda: mark(3 * y, z) ** 2)

        def lane(p, x, c, z):
            twice = lambda x, z: choose(p, x, c, z[0]) + choose(p, c, x, z[1])
            return lax.cond(o > 0, twice, lambda x, z: 2 * x, x, z)

        return jax.vmap(lane)(jnp.array([True, False]), x, c, zeros).sum()

    x, zeros = jnp.linspace(-0.9, 1.3, 6).reshape(3, 2, 1), jnp.zeros((2, 2, 1))
    o = jnp.array([0.7, -0.7, 0.3])
    marked = lambda x, o: loss(x, zeros, o, lambda y, _: sow(y, "h"))
    _, captured = jax.jit(S(jax.vmap(jax.grad(marked)), reduce=Append()))(x, o)
    want = lambda x, o: jax.grad(lambda z: loss(x, z, o, jnp.add))(zeros)
    # What is made of `c` alone has no cotangent: zeros.
    want = jax.jit(jax.vmap(want))(x, o) * jnp.eye(2)[None, ..., None]
    close(jnp.stack(captured["h"]["cotangent"], axis=2), want)


@pytest.mark.parametrize("by", ["jvp", "vjp"])
def test_loops_around_a_mark_in_a_rule_count_for_its_lanes(by):
    """The inner loop is batched before the mark can be seen."""

    def rule(x):
        return sow(jnp.cos(x), "h")

    if by == "jvp":
        fn = jax.custom_jvp(jnp.sin)
        fn.defjvp(lambda x, t: (jnp.sin(*x), t[0] * rule(*x)))
    else:
        fn = jax.custom_vjp(jnp.sin)
        fn.defvjp(lambda x: (jnp.sin(x), rule(x)), lambda cos, g: (g * cos,))

    def inner(x):
        return lax.scan(lambda c, y: (fn(c * y), None), x, jnp.array([0.5, 2.0]))[0]

    def outer(xs):
        return lax.scan(lambda c, _: (jax.vmap(inner)(c), None), xs, length=3)[0]

    xs = jnp.linspace(0.1, 0.9, 8).reshape(4, 2)
    got = S(jax.grad(lambda xs: jax.vmap(outer)(xs).sum()))(xs)[1]
    assert got.axes("h", "primal") == ("vmap", "loop", "vmap", "loop")
    want = np.zeros((4, 3, 2, 2))
    for i, k in itertools.product(range(4), range(2)):
        x = xs[i, k]
        for j, m in itertools.product(range(3), range(2)):
            want[i, j, k, m] = jnp.cos(x * (0.5, 2.0)[m])
            x = jnp.sin(x * (0.5, 2.0)[m])
    np.testing.assert_allclose(got["h"]["primal"], want, rtol=1e-5)
