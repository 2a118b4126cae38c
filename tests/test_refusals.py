"""The errors that say what cannot be right, and what to write instead."""

import jax
import jax.numpy as jnp
import pytest
from eqx_sow import (
    DuplicateSowError,
    Fold,
    Last,
    save_intermediates as S,
    Sow,
    sow,
    SowError,
    SowTypeError,
    UnsupportedPrimitiveError,
)
from jax import lax


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
