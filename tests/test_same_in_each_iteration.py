"""A sow in a scan whose value is the same in each iteration. When JAX differentiates
the scan, it computes such values once, before the loop; the sow runs in each iteration
all the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_sow import Append, plant, save_intermediates as S, sow, tap
from jax import lax
from jax.sharding import PartitionSpec as P

from .tables import pick


N = 3
X, W = jnp.array([1.0, 2.0, 0.5]), jnp.array([0.3, 0.7, 1.1])


def _sin(w):
    return sow(jnp.sin(w), "a")


@jax.custom_jvp
def _with_jvp(w):
    return _sin(w)


_with_jvp.defjvp(lambda ws, ts: (_sin(*ws), 7 * ts[0]))


@jax.custom_vjp
def _with_vjp(w):
    return _sin(w)


_with_vjp.defvjp(lambda w: (_sin(w), None), lambda _, ct: (9 * ct,))


@jax.custom_batching.custom_vmap
def _with_vmap(w):
    return _sin(w)


_with_vmap.def_vmap(lambda n, batched, w: (_with_vmap(w), True))


def _in_a_while(w):
    body = lambda c: (c[0] + 1, _sin(c[1]))
    return lax.while_loop(lambda c: c[0] < 1, body, (0, w))[1]


def _on_devices(fn, *specs):
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("d",), axis_types=kinds, devices=jax.devices()[:1])
    return jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P())


def _of_nothing():
    return _sin(jnp.asarray(np.asarray(W)))


def _scan_of_nothing():
    return lax.scan(lambda c, _: (c, _of_nothing()), 0.0, length=1)[1][0]


_of_nothing_with_jvp = jax.custom_jvp(_of_nothing)
_of_nothing_with_jvp.defjvp(lambda ws, ts: (_of_nothing(), jnp.zeros(3)))
_PLACES = {
    "plain": _sin,
    "jit": jax.jit(_sin),
    "cond": lambda w: lax.cond(w[0] > 0, _sin, jnp.cos, w),
    "both branches": lambda w: lax.cond(w[0] > 0, _sin, lambda w: sow(w, "a"), w),
    "scan": lambda w: lax.scan(lambda c, _: (_sin(w) + c, None), 0 * w, length=1)[0],
    "while": _in_a_while,
    "checkpoint": jax.checkpoint(_sin),
    "custom_jvp": _with_jvp,
    "custom_vjp": _with_vjp,
    "custom_vmap": _with_vmap,
    "shard_map": lambda w: _on_devices(_sin, P())(w),
    "jit of nothing": lambda _: jax.jit(_of_nothing)(),
    "scan of nothing": lambda _: _scan_of_nothing(),
    "custom_jvp of nothing": lambda _: _of_nothing_with_jvp(),
    "shard_map of nothing": lambda _: _on_devices(_of_nothing)(),
}
_RUNS = {
    **pick("grad", "grad-jit", "grad-checkpoint"),
    "linearize": lambda f: lambda x, w: jax.linearize(f, x, w)[1](x, 0 * w),
}


def _loop(place, use):
    def f(x, w):
        def body(c, _):
            value = _PLACES[place](w)
            return c * (1 + jnp.sum(value * w)) if use else c * 1.1, None

        return lax.scan(body, x, length=N)[0].sum()

    return f


_CASES = [
    *((place, "grad", use) for place in _PLACES for use in (True, False)),
    *((place, "grad-checkpoint", False) for place in _PLACES),
    *(
        (place, run, True)
        for place in ("plain", "jit", "cond", "scan")
        for run in _RUNS
    ),
]


@pytest.mark.parametrize("place, run, use", dict.fromkeys(_CASES))
def test_it_runs_in_each(place, run, use):
    f = _loop(place, use)
    want, fn = _RUNS[run](f)(X, W), _RUNS[run](f)
    out, got = S(fn)(X, W)
    np.testing.assert_allclose(out, want, rtol=1e-5)
    value = np.sin(np.asarray(W))
    primal = np.asarray(got["a"]["primal"]).reshape(N, 3)
    np.testing.assert_allclose(primal, np.tile(value, (N, 1)), rtol=1e-6)
    events = []
    out = tap(fn, events.append, modes="primal")(X, W)
    jax.effects_barrier()
    np.testing.assert_allclose(out, want, rtol=1e-5)
    ran = [e for e in events if e.ran is None or e.ran.any()]
    assert [e.count for e in ran] == list(range(N))
    for e in ran:
        np.testing.assert_allclose(e.value, value, rtol=1e-6)


def _by_hand(x, w, eps):
    """What `_loop("plain", True)` computes, with something added at the sow."""
    for e in eps:
        x = x * (1 + jnp.sum((jnp.sin(w) + e) * w))
    return x.sum()


@pytest.mark.parametrize("place", ["plain", "jit", "cond", "both branches"])
def test_cotangents_of_each(place):
    _, got = S(jax.grad(_loop(place, True), (0, 1)))(X, W)
    want = jax.grad(_by_hand, 2)(X, W, jnp.zeros((N, 3)))
    np.testing.assert_allclose(got["a"]["cotangent"], want, rtol=1e-5)
    _, got = S(jax.grad(lambda w: jax.grad(_loop(place, True))(X, w).sum()))(W)
    second = jax.grad(lambda eps: jax.grad(_by_hand)(X, W, eps).sum(), argnums=0)(
        jnp.zeros((N, 3))
    )
    (mode,) = set(got["a"]) - {"primal", "count"}
    np.testing.assert_allclose(got["a"][mode], second, rtol=1e-5)


# The other two can be planted before the derivative only.
@pytest.mark.parametrize("place", sorted({*_PLACES} - {"custom_vmap", "checkpoint"}))
def test_plant_in_one(place):
    f, cube = _loop(place, True), lambda value: value**3
    names = {"a/1": cube}
    got = plant(jax.grad(f), names)(X, W)
    factors = [np.sin(np.asarray(W)) ** (3 if i == 1 else 1) for i in range(N)]
    want = np.prod([1 + np.sum(s * np.asarray(W)) for s in factors])
    np.testing.assert_allclose(got, np.full(3, want), rtol=1e-5)


@pytest.mark.parametrize("place", ["custom_jvp", "custom_vjp"])
def test_rules_are_kept(place):
    second = lambda f: jax.grad(lambda w: jax.grad(f)(X, w).sum())
    f = _loop(place, True)
    out, _ = S(second(f), reduce=Append())(W)
    np.testing.assert_allclose(out, second(f)(W), rtol=1e-5)


def test_what_is_before_the_sow_is_computed_once():
    jaxpr = jax.make_jaxpr(lambda *args: S(jax.grad(_loop("plain", True)))(*args))
    outside = [e.primitive for e in jaxpr(X, W).eqns]
    inside = str([e.params for e in jaxpr(X, W).eqns if e.primitive.name == "scan"])
    assert jax.lax.sin_p in outside and " sin " not in inside


@pytest.mark.slow
def test_in_one_branch_of_a_cond():
    def f(x, w):
        def body(c, _):
            branches = lambda c: _sin(w) * c, lambda c: sow(jnp.cos(c), "a")
            return lax.cond(w[0] > 0, *branches, c), None

        return lax.scan(body, x, None, length=N)[0].sum()

    for wrap in (lambda f: f, jax.checkpoint):
        for w in (W, -W):
            _, want = S(f)(X, w)
            _, got = S(jax.grad(wrap(f), (0, 1)))(X, w)
            for mode in ("primal", "count"):
                np.testing.assert_allclose(got["a"][mode], want["a"][mode], rtol=1e-6)
