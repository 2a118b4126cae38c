"""Programs with symbolic sizes, for `jax.export`: what comes back of an exported
program is what comes back without exporting it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_sow import (
    batched,
    plant,
    save_intermediates as S,
    sow,
    SowError,
    summarize,
    tap,
)
from jax import lax

from .tables import REDUCERS


def _scan(xs):
    body = lambda c, x: (sow(jnp.sin(c + x), "a"), None)
    return lax.scan(body, jnp.zeros(xs.shape[1:]), xs)[0].sum()


def _lanes(xs):
    return jax.vmap(lambda x: sow(jnp.sin(x), "a") * 2)(xs).sum()


def _branches(xs):
    run = lambda x: sow(jnp.sin(x), "a")
    return jax.vmap(lambda x: lax.cond(x.sum() > 0.5, run, jnp.cos, x))(xs).sum()


def _while(xs):
    body = lambda xs: sow(xs * 2, "a")
    return lax.while_loop(lambda xs: xs.sum() < 50, body, xs).sum()


PROGRAMS = {
    "scan": _scan,
    "gradient of scan": jax.grad(_scan),
    "checkpoint": jax.grad(jax.checkpoint(_scan)),
    "vmap of scan": lambda xs: jax.vmap(_scan)(xs).sum(),
    "vmap": _lanes,
    "vmap of cond": _branches,
    "while": _while,
}
NO_PLANT = {"checkpoint"}
NO_BATCHED = {"vmap of cond"}


def _everything(name, f, x):
    """What all the options make of a function: in one program, as exporting is slow."""
    double = {"a": lambda a: a * 2}
    saved = S(f)(x)[1]
    got = [
        saved,
        summarize(saved),
        S(f, transform=summarize)(x),
        *(S(f, reduce=row.reducer)(x) for row in REDUCERS.values()),
    ]
    if name not in NO_BATCHED:
        got.append(S(f, transform=batched(jnp.max))(x))
    if name not in NO_PLANT:
        got += [plant(f, double)(x), plant(f, saved)(x), S(plant(f, double))(x)]
    if "scan" in name:
        got += [S(f, names="a/1")(x), S(f, names="a/-1")(x)]
        got.append(
            plant(f, {"a": lambda a, i: a * i[0].astype(a.dtype)}, with_index=True)(x)
        )
    return jax.tree.leaves(got)


OFTEN = {"gradient of scan"}
SELDOM = [
    pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow)
    for name in PROGRAMS
]


@pytest.mark.slow
@pytest.mark.parametrize("name", SELDOM)
def test_export_with_symbolic_sizes(name):
    fn = lambda x: _everything(name, PROGRAMS[name], x)
    n, m = jax.export.symbolic_shape("n, m", constraints=["n >= 2", "m >= 2"])
    exported = jax.export.export(jax.jit(fn))(jax.ShapeDtypeStruct((n, m), "float32"))
    exported = jax.export.deserialize(exported.serialize())
    x = np.linspace(0.05, 1, 15, dtype="float32").reshape(5, 3)
    for got, want in zip(exported.call(x), jax.jit(fn)(x), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_summary_of_many_numbers_of_a_symbolic_size():
    """In float32, adding up one after the other would be wrong in the third digit."""
    n, *_ = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(summarize))(
        jax.ShapeDtypeStruct((n,), "float32")
    )
    x = np.random.default_rng(0).random(2_000_000, "float32") + 10
    got = exported.call(x)
    assert got.size == len(x) and got.not_finite == 0
    np.testing.assert_allclose(got.std, x.astype(float).std(), rtol=1e-4)
    np.testing.assert_allclose(got.mean, x.astype(float).mean(), rtol=1e-6)


@pytest.mark.parametrize("pattern", ["a/1", "a/[01]"])
def test_iteration_that_there_may_not_be(pattern):
    n, *_ = jax.export.symbolic_shape("n")
    shape = jax.ShapeDtypeStruct((n, 2), "float32")
    with pytest.raises(SowError, match="loop of the symbolic length n, so it is not"):
        jax.export.export(jax.jit(S(_scan, names=pattern)))(shape)


def test_iterations_that_there_are_at_least():
    n, *_ = jax.export.symbolic_shape("n", constraints=["n >= 3"])
    shape, xs = jax.ShapeDtypeStruct((n, 2), "float32"), np.ones((3, 2), "float32")
    _, every = S(_scan)(xs)
    for i in (0, 2, -1, -3):
        fn = jax.jit(S(_scan, names=f"a/{i}"))
        _, got = jax.export.export(fn)(shape).call(xs)
        np.testing.assert_allclose(
            got[f"a/{i}"]["primal"], every["a"]["primal"][i], rtol=1e-6
        )
    for i in (3, -4):
        with pytest.raises(SowError, match="constraints="):
            jax.export.export(jax.jit(S(_scan, names=f"a/{i}")))(shape)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("callback", [None, lambda event: None])
def test_a_tap_cannot_be_exported(symbolic, callback):
    """With symbolic sizes, JAX raises a `std::bad_cast` for its own callbacks."""
    n, *_ = jax.export.symbolic_shape("n") if symbolic else (3,)
    fn = jax.jit(tap(lambda x: sow(jnp.sin(x), "h") * 2, callback))
    with pytest.raises(
        SowError, match="with a `tap`, .*'h'.* cannot be exported, since"
    ):
        jax.export.export(fn)(jax.ShapeDtypeStruct((n,), "float32"))
    assert fn.lower(jax.ShapeDtypeStruct((3,), "float32"))
