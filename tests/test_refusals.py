"""The errors that say what cannot be right, and what to write instead."""

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from eqx_sow import (
    Buffer,
    DuplicateSowError,
    Last,
    plant,
    save_intermediates as S,
    sow,
    SowError,
    tap,
    UnsupportedPrimitiveError,
)
from jax import lax
from jax.extend.core import jaxpr_as_fun, Primitive
from jax.sharding import PartitionSpec as P

from .tables import pick


X = jnp.arange(1.0, 4.0)


def test_branches_with_different_vmaps_inside():
    mark = lambda x: sow(x, "a")

    def f(xs):
        once = lambda: jax.vmap(mark)(xs[0])[None] * jnp.ones((3, 1))
        twice = lambda: jax.vmap(jax.vmap(mark))(xs)
        return lax.cond(xs[0, 0] > 0, once, twice)

    with pytest.raises(SowError, match="`a` .*different axes: sizes .*different names"):
        S(f)(jnp.ones((3, 3)))


def _scan(x, w):
    def body(c, _):
        return c * jnp.sum(sow(jnp.sin(w), "a")), sow(c, "a")

    return jnp.sum(lax.scan(body, x, None, length=2)[0])


def test_the_order_in_a_loop_that_is_differentiated():
    """One of the two values is the same in each iteration."""
    with pytest.raises(DuplicateSowError, match="`a` marks more than one value"):
        S(jax.grad(_scan))(X, X)
    for fn in (_scan, jax.grad(_scan), jax.grad(jax.checkpoint(_scan))):
        _, got = S(fn, reduce=Last(), modes="primal")(X, X)
        assert jnp.array_equal(got["a"]["primal"], X * jnp.sum(jnp.sin(X)))
        _, got = S(fn, reduce=Buffer(4), modes="primal")(X, X)
        want = jnp.stack([jnp.sin(X), X, jnp.sin(X), X * jnp.sum(jnp.sin(X))])
        np.testing.assert_allclose(got["a"]["primal"], want, rtol=1e-6)


def test_a_value_that_is_the_same_in_each_iteration_in_a_rule():
    @jax.custom_jvp
    def f(x):
        return x

    @f.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents

        def body(c, _):
            y, t = c
            sow(jnp.sin(X), "a")
            return (y * 2, t * 2), None

        return lax.scan(body, (x, t), None, length=3)[0]

    _, got = S(jax.grad(lambda x: jnp.sum(f(x))))(X)
    np.testing.assert_allclose(got["a"]["primal"], jnp.tile(jnp.sin(X), (3, 1)))


def _solve(b):
    matrix = 2 * jnp.eye(3)
    return lax.custom_linear_solve(
        lambda x: sow(matrix @ x, "a"), b, lambda _, b: jnp.linalg.solve(matrix, b)
    )


def _hidden(b):
    return eqxi.noinline(lambda x: sow(2 * x, "a"))(b)


def _lineax(fn, b):
    psd = lx.positive_semidefinite_tag
    operator = lx.FunctionLinearOperator(fn, jax.typeof(b), tags=psd)
    return lx.linear_solve(operator, b, lx.CG(1e-5, 1e-5)).value


def _closure_in_a_solver(b):
    return _lineax(lambda x: sow(x * (1 + b**2), "a"), b)


def _loop_in_a_solver(b):
    def fn(x):
        return lax.scan(lambda c, y: (sow(c * y, "a"), None), x, 1 + b[None] ** 2)[0]

    return _lineax(fn, b)


def _function_in_a_solver(b):
    # Equinox keeps one that closes over nothing as it is, and not as a jaxpr.
    return _lineax(lambda x: sow(2 * x, "a"), b)


def _hidden_in_a_kept_jaxpr(b):
    fn = eqx.filter_closure_convert(jax.jit(lambda x: sow(2 * x, "a")), b)
    return eqxi.noinline(fn)(b)


def _hidden_in_a_condition(x):
    return lax.while_loop(lambda x: _hidden(x).sum() < 9, lambda x: sow(x + 1, "b"), x)


def _hidden_beside_one_in_a_solver(b):
    out = lax.custom_linear_solve(
        lambda x: 2 * x, b, lambda _, b: sow(b / 2, "c") + 0 * _hidden(b)
    )
    return sow(out, "c")


HIDE = [
    _solve,
    _hidden,
    _closure_in_a_solver,
    _loop_in_a_solver,
    _function_in_a_solver,
    _hidden_in_a_kept_jaxpr,
    _hidden_in_a_condition,
    _hidden_beside_one_in_a_solver,
]
WRAPS = {
    **pick("eager", "lanes", "lanes-lanes", "jit", "jit-jit", "scan"),
    "cond of lanes": lambda f: (
        lambda x: jax.vmap(
            lambda p: lax.cond(p, lambda: sow(f(x), "b"), lambda: x), axis_size=2
        )(jnp.array([True, False]))
    ),
    "planted": lambda f: plant(lambda x: sow(f(x), "b"), {"b": lambda x: x}),
}


@pytest.mark.sample(9)
@pytest.mark.parametrize("hide", HIDE)
@pytest.mark.parametrize("wrap", WRAPS)
def test_hidden_at_any_depth(hide, wrap):
    with pytest.raises(UnsupportedPrimitiveError, match="'a'.*inside the primitive"):
        S(WRAPS[wrap](hide))(X)


def _root(x):
    return lax.custom_root(
        lambda y: y - x, x, lambda fn, y: sow(2 * y, "a"), lambda g, y: y / g(y)
    )


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: lax.while_loop(
            lambda x: _root(x).sum() < 9, lambda x: sow(x + 1, "b"), x
        ),
        lambda b: lax.custom_linear_solve(
            lambda x: 2 * x, b, lambda _, b: b / 2 + 0 * _root(b)
        ),
    ],
)
def test_where_eqx_sow_cannot_look(fn):
    # Since JAX 0.11 a `custom_root` does not show what is inside.
    with pytest.raises(UnsupportedPrimitiveError):
        S(fn)(X)


def test_the_gradient_of_a_root():
    """On JAX 0.10 its function is called twice, and seen."""

    def root(x):
        find = lambda fn, y: lax.fori_loop(0, 20, lambda _, y: y - fn(y) / (2 * y), y)
        return lax.custom_root(
            lambda y: sow(y * y, "a") - x,
            jnp.ones_like(x),
            find,
            lambda g, y: y / g(jnp.ones_like(y)),
        )

    error = UnsupportedPrimitiveError, DuplicateSowError
    said = r"`RootLinearMap`, which .*test_refusals.*mark what it returns|more than one"
    with pytest.raises(error, match=said):
        S(jax.grad(root))(jnp.array(2.0))


def test_planted_in_a_solver():
    fn = lambda b: sow(_solve(b), "a")
    with pytest.raises(UnsupportedPrimitiveError, match="'a'.*over and over"):
        plant(fn, {"a": lambda x: 2 * x})(X)


twice_p = Primitive("twice_in_tests")
twice_p.def_abstract_eval(lambda x, *, jaxpr: jaxpr.out_avals[0])
twice_p.def_impl(lambda x, *, jaxpr: jaxpr_as_fun(jaxpr)(x)[0])


def _in_unknown_primitive(x):
    jaxpr = jax.make_jaxpr(lambda x: sow(2 * x, "c", tag="theirs"))(x)
    return sow(twice_p.bind(x, jaxpr=jaxpr), "b")


def test_hidden_where_nothing_can_be_batched():
    def in_noinline(x):
        kept = eqx.filter_closure_convert(jax.jit(lambda x: sow(2 * x, "a")), x)
        jaxpr = jax.make_jaxpr(jnp.sin)(x)
        return eqxi.noinline(lambda x: twice_p.bind(kept(x), jaxpr=jaxpr))(x)

    for fn in (in_noinline, jax.jit(in_noinline)):
        with pytest.raises(UnsupportedPrimitiveError, match="'a'.*inside the prim"):
            S(fn)(X)


def test_noinline_is_traced_once_more():
    traces = []

    def fn(x):
        return eqxi.noinline(lambda x: (traces.append(1), jnp.sin(x))[1])(x)

    jax.make_jaxpr(fn)(X)
    once = len(traces)
    jax.make_jaxpr(S(lambda x: fn(sow(x, "a"))))(X)
    assert len(traces) == once + 2 * once


def _in_condition(x):
    return lax.while_loop(
        lambda x: sow(x.sum(), "c", tag="theirs") < 20, lambda x: sow(2 * x, "b"), x
    )


@pytest.mark.filterwarnings("ignore:.*found no mark")
@pytest.mark.parametrize("fn", [_in_unknown_primitive, _in_condition])
def test_only_what_is_asked_for_is_refused(fn):
    out, got = S(fn)(X)
    assert list(got) == ["b"]
    assert jnp.array_equal(got["b"]["primal"], out)
    assert jnp.array_equal(plant(fn, {"b": lambda x: x})(X), out)
    with pytest.raises(UnsupportedPrimitiveError, match="'c'"):
        S(fn, tag="theirs")(X)
    (_, inner), outer = S(S(fn), tag="another")(X)
    assert list(inner) == ["b"] and outer == {}
    with pytest.raises(UnsupportedPrimitiveError, match="'c'"):
        S(S(fn), tag="theirs")(X)


def test_a_mode_that_is_not_asked_for_is_not_refused():
    def fn(x):
        x = lax.while_loop(lambda x: sow(x.sum(), "h") < 20, lambda x: 2 * x, x)
        return jax.grad(lambda x: sow(jnp.sin(x), "h").sum())(x)

    _, got = S(fn, modes="cotangent")(X)
    assert got == {"h": {"cotangent": got["h"]["cotangent"]}}
    assert jnp.array_equal(got["h"]["cotangent"], jnp.ones(3))
    events = []
    tap(fn, events.append, modes="cotangent")(X)
    jax.effects_barrier()
    assert [e.mode for e in events] == ["cotangent"]
    with pytest.raises(UnsupportedPrimitiveError, match="'h'.*condition"):
        S(fn)(X)


def test_order_counts_only_inside_a_shard_map(mesh):
    def fn(x):
        spec = P("d")
        double = lambda x: sow(2 * x, "b")
        mapped = jax.shard_map(double, mesh=mesh, in_specs=spec, out_specs=spec)
        return mapped(sow(x, "a"))

    x = jnp.arange(8.0)
    _, got = S(fn, reduce={"a": Last()})(x)
    assert jnp.array_equal(got["a"]["primal"], x)
    assert jnp.array_equal(got["b"]["primal"].reshape(8), 2 * x)
    with pytest.raises(UnsupportedPrimitiveError, match="'b'.*order of execution"):
        S(fn, reduce=Last())(x)


def _inner_loop_that_is_the_same(x, w, outer, mark=sow):
    def step(x, _):
        inner = lambda a, t: (mark(jnp.sin(a * t), "in"), a)
        a, _ = lax.scan(inner, 0.5, w)
        return x * a, None

    return lax.scan(step, x, length=outer)[0]


@pytest.mark.parametrize("outer", [2, 3])
def test_a_loop_that_is_the_same_in_each_iteration(outer):
    w = jnp.array([1.0, 2.0])
    loop = lambda x, w: _inner_loop_that_is_the_same(x, w, outer)
    a = jnp.sin(0.5 * w[0])
    expected = jnp.tile(jnp.stack([a, jnp.sin(a * w[1])]), (outer, 1))
    np.testing.assert_allclose(S(loop)(2.0, w)[1]["in"]["primal"], expected)
    for wrap in (lambda f: f, jax.checkpoint):
        gradient, got = S(jax.grad(wrap(loop)))(2.0, w)
        np.testing.assert_allclose(got["in"]["primal"], expected, rtol=1e-6)
    _, got = S(jax.grad(lambda x, w: jax.vmap(loop)(x, w).sum()))(
        jnp.ones(5), jnp.tile(w, (5, 1))
    )
    np.testing.assert_allclose(
        got["in"]["primal"], jnp.tile(expected, (5, 1, 1)), rtol=1e-6
    )
    # Each iteration of the inner loop gets its own value.
    values = jnp.tile(jnp.array([3.0, 5.0]), (outer, 1))
    planted = plant(jax.grad(loop), {"in": values})
    np.testing.assert_allclose(planted(2.0, w), 5.0**outer, rtol=1e-6)
    out = plant(jax.grad(loop), {"in": got["in"]["primal"][0]})(2.0, w)
    np.testing.assert_allclose(out, gradient, rtol=1e-6)
    _, got = S(jax.grad(loop), reduce=Last())(2.0, w)
    np.testing.assert_allclose(got["in"]["primal"], expected[0, 1], rtol=1e-6)


def test_the_order_in_a_loop_that_is_the_same_in_each_iteration():
    args = 2.0, jnp.array([1.0, 2.0])
    loop = lambda x, w: _inner_loop_that_is_the_same(x, w, 3)
    grad, events = jax.grad(loop), []
    a = jnp.sin(0.5 * args[1][0])
    b = jnp.sin(a * args[1][1])
    _, got = S(grad, reduce=Buffer(3))(*args)
    np.testing.assert_allclose(got["in"]["primal"], [b, a, b], rtol=1e-6)
    tap(grad, events.append)(*args)
    jax.effects_barrier()
    np.testing.assert_allclose([e.value for e in events], [a, b] * 3, rtol=1e-6)
    assert [e.count for e in events] == list(range(6))
    for name in ("in/1", "in/1/0"):
        got = plant(grad, {name: jnp.cos})(*args)
        np.testing.assert_allclose(got, jax.grad(plant(loop, {name: jnp.cos}))(*args))


@pytest.mark.slow
def test_a_leaf_of_all_lanes_in_one_branch_and_of_each_in_another():
    """Of the gradient of a vmap, its cotangent in one branch is the total of the
    lanes. Of a vmap of gradients it is that of each."""

    def make(mark):
        def fn(x, p):
            one = lambda x: jnp.prod(jnp.stack(mark((x, jnp.ones(())))))
            other = lambda x: jnp.prod(jnp.stack(mark((x, jnp.sin(x)))))
            return jax.lax.cond(p, one, other, x)

        return fn

    xs, ps = jnp.arange(1.0, 5.0), jnp.array([True, False, True, False])
    fn = make(lambda value: sow(value, "h"))
    with pytest.raises(SowError, match="A leaf is the same for all lanes"):
        S(jax.grad(lambda xs: jnp.sum(jax.vmap(fn)(xs, ps))))(xs)
    zeros = jnp.zeros(()), jnp.zeros(())
    by_hand = lambda x, p: jax.grad(
        lambda z: make(lambda v: (v[0] + z[0], v[1] + z[1]))(x, p)
    )(zeros)
    _, got = S(jax.vmap(jax.grad(fn)))(xs, ps)
    want = jax.vmap(by_hand)(xs, ps)
    for a, b in zip(got["h"]["cotangent"], want, strict=True):
        assert jnp.allclose(a, b)
