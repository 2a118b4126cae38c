"""Values of one name that vary over different vmaps of one size are not mixed up."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_sow import Append, Fold, Last, plant, save_intermediates as S, sow, tap
from jax import lax

from .helpers import assert_close, primitives
from .tables import IN_ORDER, under


pytestmark = pytest.mark.sample(1)


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


@under(of=IN_ORDER, argument="row")
def test_reduced(row):
    _, got = S(_predicate_inside(), reduce=row.reducer)(P, X, jnp.array(7.0))
    want = [[row.by_hand([x], 0 * x) for x in xs] for xs in np.float32(WANT)]
    np.testing.assert_allclose(got["a"]["primal"], want)


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


@pytest.mark.slow
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


@under("eager", "jit")
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


# --- lanes that are not in front ---
CUBE = jnp.cos(jnp.arange(24.0)).reshape(3, 4, 2)


def _cubed(mark, x):
    def positive(x):
        return mark(x * x, "positive")

    x = mark({"sin": jnp.sin(x), "n": 3}, "h")["sin"]
    return jnp.sum(lax.cond(x[0] > 0, positive, lambda x: x**3, x))


def _behind(mark, cube):
    return jax.vmap(jax.vmap(ft.partial(_cubed, mark), in_axes=1), in_axes=2)(cube)


def _in_front(mark, cube):
    return jax.vmap(jax.vmap(ft.partial(_cubed, mark)))(cube.T)


BEHIND = {
    "values": lambda f: S(f),
    "gradients": lambda f: S(jax.grad(lambda cube: f(cube).sum())),
    "second derivatives": lambda f: S(
        lambda cube: jax.jvp(jax.grad(lambda x: f(x).sum()), (cube,), (cube,))[1]
    ),
    "reduced": lambda f: S(
        f, reduce={"h": Fold(0.0, lambda acc, x: acc + jnp.sum(x["sin"]))}
    ),
    "transformed": lambda f: S(f, transform={"h": lambda h: h["sin"][0]}),
    "planted": lambda f: plant(f, {"h": lambda h: {"sin": h["sin"][::-1], "n": 3}}),
    "planted arrays": lambda f: plant(f, {"h": {"sin": jnp.sin(CUBE + 1).T, "n": 3}}),
    "planted and seen": lambda f: S(plant(f, {"positive": lambda x: x.at[1].set(9.0)})),
}


@pytest.mark.parametrize("use", BEHIND.values(), ids=BEHIND)
def test_lanes_that_are_not_in_front(use):
    got, want = (use(ft.partial(f, sow))(CUBE) for f in (_behind, _in_front))
    assert_close(got, want)


def test_lanes_that_are_not_in_front_by_hand():
    _, values = S(ft.partial(_behind, sow))(CUBE)
    sine = np.sin(np.asarray(CUBE)).T
    ran = sine[..., 0] > 0
    assert_close(values["h"]["primal"], {"sin": jnp.asarray(sine), "n": 3})
    assert_close(values["positive"]["count"], jnp.asarray(ran.astype(np.int32)))
    square = np.where(ran[..., None], sine**2, 0)
    assert_close(values["positive"]["primal"], jnp.asarray(square))


def test_events_of_lanes_that_are_not_in_front():
    events = []
    tap(ft.partial(_behind, sow), events.append, names="h")(CUBE)
    jax.effects_barrier()
    (event,) = events
    np.testing.assert_allclose(event.value["sin"], np.sin(CUBE).T, rtol=1e-6)


def test_no_lanes_are_moved_but_those_of_what_comes_back():
    def loss(cube):
        return jnp.sum(jax.vmap(lambda x: 2 * sow(jnp.sin(x), "h"), 1, 1)(cube))

    def moved(**options):
        program = jax.make_jaxpr(S(jax.grad(loss), **options))(CUBE)
        return primitives(program).count("transpose")

    assert moved() == 2
    assert moved(modes="primal") == 1
