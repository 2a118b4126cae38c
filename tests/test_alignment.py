"""Values of one name that vary over different vmaps of one size are not mixed up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_sow import Append, Fold, Last, plant, save_intermediates as S, sow
from jax import lax


X = jnp.arange(3.0)
Y = 10 * jnp.arange(3.0)


def _either(p, x, y):
    return lax.cond(p, lambda: sow(x * 2, "a"), lambda: sow(y * 3, "a"))


@pytest.mark.parametrize("p", [True, False])
def test_branches_over_different_vmaps(p):
    fn = jax.vmap(jax.vmap(_either, (None, None, 0)), (None, 0, None))
    _, got = S(fn)(p, X, Y)
    want = np.broadcast_to((X * 2)[:, None] if p else (Y * 3)[None], (3, 3))
    np.testing.assert_allclose(got["a"]["primal"], want)


P = jnp.array([True, False, True])
WANT = np.where(P[None], (X * 2)[:, None], 21.0)


def _predicate_inside():
    return jax.vmap(jax.vmap(_either, (0, None, None)), (None, 0, None))


def test_predicate_over_the_inner_value_over_the_outer():
    out, got = S(_predicate_inside())(P, X, jnp.array(7.0))
    np.testing.assert_allclose(got["a"]["primal"], WANT)
    np.testing.assert_array_equal(got["a"]["count"], np.ones((3, 3)))
    np.testing.assert_allclose(
        plant(_predicate_inside(), got)(P, X, jnp.array(7.0)), out
    )


@pytest.mark.parametrize("reducer", [Last(), Fold(0.0, lambda acc, x: acc + x)])
def test_reduced(reducer):
    _, got = S(_predicate_inside(), reduce=reducer)(P, X, jnp.array(7.0))
    np.testing.assert_allclose(got["a"]["primal"], WANT)


def test_appended():
    _, got = S(_predicate_inside(), reduce=Append())(P, X, jnp.array(7.0))
    (value,) = got["a"]["primal"]
    np.testing.assert_allclose(value, WANT)


def test_value_that_does_not_vary_has_no_axis():
    fn = jax.vmap(lambda x: jnp.sum(sow(jnp.ones(2), "c")) + x)
    for options in ({}, {"reduce": Last()}):
        _, got = S(fn, **options)(X)
        assert got["c"]["primal"].shape == (2,)
