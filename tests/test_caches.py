"""What JAX and Equinox keep from one call to the next is never out of date."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_sow import Fold, plant, save_intermediates as S, sow
from jax import lax


XS = jnp.array([10.0, 20.0, 30.0])


def _scan(x):
    return lax.scan(lambda c, t: (sow(c + t, "h"), None), x, XS)[0]


WAYS = {
    "eager": lambda fn, **options: S(fn, **options),
    "inner": lambda fn, **options: S(jax.jit(fn), **options),
    "outer": lambda fn, **options: eqx.filter_jit(S(fn, **options)),
    "both": lambda fn, **options: eqx.filter_jit(S(eqx.filter_jit(fn), **options)),
}


@pytest.mark.parametrize("way", WAYS)
def test_reducers_that_hold_arrays(way):
    scaled = lambda scale, acc, x: acc + scale * x
    for k in (1.0, 5.0, 7.0):
        folds = (
            Fold(k, lambda acc, x: acc + x),
            Fold(jnp.array(k), lambda acc, x: acc + x),
            Fold(jnp.array(k), eqx.Partial(scaled, jnp.array(1.0))),
        )
        for fold in folds:
            _, got = WAYS[way](_scan, reduce=fold)(jnp.array(1.0))
            np.testing.assert_allclose(got["h"]["primal"], k + 11 + 31 + 61)


@pytest.mark.parametrize("way", WAYS)
def test_other_options_on_the_same_function(way):
    for k in (1.0, 2.0):
        transform = eqx.Partial(lambda k, x: k * x, jnp.array(k))
        _, got = WAYS[way](_scan, transform=transform)(jnp.array(1.0))
        np.testing.assert_allclose(got["h"]["primal"], k * np.array([11, 31, 61]))
    with_mode = WAYS[way](_scan, modes="cotangent")
    assert with_mode(jnp.array(1.0))[1] == {}


def test_traced_once():
    traces = 0

    def fn(layer, x):
        nonlocal traces
        traces += 1
        return sow(layer(x), "h")

    for jitted in (eqx.filter_jit(fn), jax.jit(fn)):
        saved = S(jitted)
        traces = 0
        for seed in range(3):
            layer = eqx.nn.Linear(3, 2, key=jax.random.key(seed))
            _, got = saved(layer, XS)
            np.testing.assert_allclose(got["h"]["primal"], layer(XS), rtol=1e-5)
        assert traces == 1
        saved(layer, XS.astype(jnp.float16).astype(jnp.float32)[:3])
        assert traces == 1
        saved(eqx.nn.Linear(4, 2, key=jax.random.key(0)), jnp.ones(4))
        assert traces == 2


def test_config_takes_effect():
    saved = S(jax.jit(lambda x: sow(jnp.ones(2) * x, "h")))
    assert saved(1)[1]["h"]["primal"].dtype == jnp.float32
    with jax.enable_x64(True):
        assert saved(1)[1]["h"]["primal"].dtype == jnp.float64
    assert saved(1)[1]["h"]["primal"].dtype == jnp.float32


def test_planted_values_do_not_retrace():
    traces = 0

    def fn(x):
        nonlocal traces
        traces += 1
        return sow(x * 2, "h") + 1

    planted = eqx.filter_jit(lambda value, x: plant(fn, {"h": value})(x))
    for k in range(3):
        np.testing.assert_allclose(planted(XS * k, XS), XS * k + 1)
    assert traces == 1
