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


def _loops_in_a_branch(x):
    def loops(x):
        def inner(c, _):
            sow(jnp.cos(x), "a")
            return jnp.sin(c), None

        def outer(c, _):
            return lax.scan(inner, c, None, length=2)[0] * 0.5, None

        return lax.scan(outer, x, None, length=3)[0]

    return jnp.sum(lax.cond(x[0] > 0, loops, lambda x: x, x))


def test_moved_out_of_two_loops_in_a_branch():
    xs = jnp.array([[1.0, 2.0], [-1.0, 2.0]])
    mapped = jax.vmap(_loops_in_a_branch)
    _, want = S(mapped)(xs)
    ran = np.array([1, 0]).reshape(2, 1, 1, 1)
    cosines = np.broadcast_to(jnp.cos(xs)[:, None, None], (2, 3, 2, 2))
    np.testing.assert_allclose(want["a"]["primal"], cosines * ran, rtol=1e-6)
    for wrap in (lambda f: f, jax.jit, jax.checkpoint):
        _, got = S(jax.grad(lambda xs: jnp.sum(wrap(mapped)(xs))))(xs)
        for mode, value in want["a"].items():
            np.testing.assert_allclose(got["a"][mode], value)


def test_checkpoint_in_a_scan():
    def f(x):
        def outer(c, _):
            return jax.checkpoint(_loops_in_a_branch)(c) * c, None

        return jnp.sum(lax.scan(outer, x, None, length=2)[0])

    x = jnp.array([0.5, 1.0])
    _, want = S(f)(x)
    _, got = S(jax.grad(f))(x)
    for mode, value in want["a"].items():
        np.testing.assert_allclose(got["a"][mode], value, rtol=1e-6)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_effects_of_custom_rules_happen_once(wrap, capsys):
    def f(x):
        jax.debug.print("f")
        return sow(x * 2, "h")

    custom_jvp = jax.custom_jvp(f)
    custom_jvp.defjvp(lambda p, t: (custom_jvp(*p), t[0] * 2))
    custom_vjp = jax.custom_vjp(f)
    custom_vjp.defvjp(lambda x: (f(x), None), lambda _, g: (g * 2,))
    for fn in (custom_jvp, custom_vjp):
        for g in (fn, jax.grad(fn)):
            S(wrap(g))(1.0)
            jax.effects_barrier()
            assert capsys.readouterr().out == "f\n"
