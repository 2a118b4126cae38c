"""The errors that say what cannot be right, and what to write instead."""

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import lineax as lx
import pytest
from eqx_sow import (
    DuplicateSowError,
    Fold,
    Last,
    plant,
    save_intermediates as S,
    Sow,
    sow,
    SowError,
    SowTypeError,
    UnsupportedPrimitiveError,
)
from jax import lax
from jax.extend.core import jaxpr_as_fun, Primitive
from jax.sharding import PartitionSpec as P


X = jnp.arange(1.0, 4.0)


def test_branches_with_different_vmaps_inside():
    mark = lambda x: sow(x, "a")

    def f(xs):
        once = lambda: jax.vmap(mark)(xs[0])[None] * jnp.ones((3, 1))
        twice = lambda: jax.vmap(jax.vmap(mark))(xs)
        return lax.cond(xs[0, 0] > 0, once, twice)

    with pytest.raises(SowError, match="`a` .*different axes: sizes .*different names"):
        S(f)(jnp.ones((3, 3)))


def test_fold_that_changes_shape():
    grow = Fold(jnp.zeros(1), lambda acc, x: jnp.concatenate([acc, x]))
    with pytest.raises(SowError, match="`fn` must return what `acc` looks like"):
        S(lambda x: sow(x, "a"), reduce=grow)(X)


def _scan(x, w):
    def body(c, _):
        return c * jnp.sum(sow(jnp.sin(w), "a")), sow(c, "a")

    return jnp.sum(lax.scan(body, x, None, length=2)[0])


def test_order_that_is_lost():
    with pytest.raises(DuplicateSowError, match="`a` is sown twice"):
        S(jax.grad(_scan))(X, X)
    with pytest.raises(SowError, match="order of the executions is lost"):
        S(jax.grad(_scan), reduce=Last(), modes="primal")(X, X)
    _, got = S(_scan, reduce=Last())(X, X)
    assert jnp.array_equal(got["a"]["primal"], X * jnp.sum(jnp.sin(X)))


def test_hoisted_in_a_custom_rule():
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

    with pytest.raises(SowError, match="`sow\\(..., 'a'\\)`.*Sow the value before the"):
        S(jax.grad(lambda x: jnp.sum(f(x))))(X)


def test_value_that_is_no_array():
    with pytest.raises(SowError, match="'a'.*cannot mark a leaf of type"):
        S(lambda x: sow(jax.new_ref(x), "a")[...])(X)


def test_layer_with_no_name_and_no_place():
    with pytest.raises(SowError, match="`Sow\\(\\)` has no name"):
        S(lambda x: Sow()(x))(X)


def test_annotation_that_is_none():
    with pytest.raises(SowTypeError, match="does not understand the annotation 3"):
        S(lambda x: sow(x, "a"), spec={"a": 3})(X)


def test_order_over_devices():
    spec = jax.sharding.PartitionSpec("a")
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    fn = lambda x: sow(x, "a")
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(UnsupportedPrimitiveError, match="no order of execution over"):
        S(mapped, reduce=Last())(jnp.ones(4))


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
    "as it is": lambda f: f,
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None]),
    "vmap of vmap": lambda f: lambda x: jax.vmap(jax.vmap(f))(x[None, None]),
    "jit": jax.jit,
    "jit in jit": lambda f: jax.jit(lambda x: jnp.sin(jax.jit(f)(x))),
    "scan": lambda f: (
        lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]
    ),
    "cond of lanes": lambda f: (
        lambda x: jax.vmap(
            lambda p: lax.cond(p, lambda: sow(f(x), "b"), lambda: x), axis_size=2
        )(jnp.array([True, False]))
    ),
    "planted": lambda f: plant(lambda x: sow(f(x), "b"), {"b": lambda x: x}),
}


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
def test_where_nobody_can_look(fn):
    # Since JAX 0.11 a `custom_root` does not show what is inside.
    with pytest.raises(UnsupportedPrimitiveError):
        S(fn)(X)


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


def _in_condition(x):
    return lax.while_loop(
        lambda x: sow(x.sum(), "c", tag="theirs") < 20, lambda x: sow(2 * x, "b"), x
    )


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
