"""`eval_shape`, `trace` and `lower`, on what the public functions return."""

import contextlib

import equinox as eqx
import jax
import jax.monitoring as monitoring
import jax.numpy as jnp
import pytest
from eqx_sow import plant, save_intermediates as S, sow, tabulate, tap

from .helpers import assert_close
from .tables import under


X = jnp.array([0.3, -1.2, 0.7])
SHAPE = jax.ShapeDtypeStruct((3,), jnp.float32)
MLP = eqx.nn.MLP(3, 3, 4, 2, key=jax.random.key(0))


def _fn(x, scale="one"):
    return sow(jnp.sin(x), "h") * {"one": 1, "two": 2}[scale], scale, jnp.tanh


EVENTS = []
TRANSFORMED = {
    "save": lambda fn: S(fn),
    "plant": lambda fn: plant(fn, {"h": lambda h: h + 1}),
    "tap": lambda fn: tap(fn, EVENTS.append),
}


@contextlib.contextmanager
def _nothing_runs():
    compiled = []

    def listen(event, duration, **_):
        compiled.extend([event] * ("backend_compile" in event))

    monitoring.register_event_duration_secs_listener(listen)
    jax.jit(lambda x: x)(X)
    assert compiled
    compiled.clear()
    EVENTS.clear()
    yield
    jax.effects_barrier()
    monitoring.unregister_event_duration_listener(listen)
    assert not compiled and not EVENTS


@under("eager", "jit", "filter_jit", argument="jit")
@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
def test_eval_shape(transformed, jit):
    own = eqx.filter_eval_shape(lambda x: _fn(x, "two"), X)
    fn = jit(lambda x: _fn(x, "two")[0]) if jit is jax.jit else jit(_fn)
    own = own[0] if jit is jax.jit else own
    args = () if jit is jax.jit else ("two",)
    with _nothing_runs():
        for x in (X, SHAPE):
            got = transformed(fn).eval_shape(x, *args)
            got = got[0] if transformed is TRANSFORMED["save"] else got
            assert got == own


def test_names_before_running():
    with _nothing_runs():
        out, got = S(eqx.filter_grad(lambda m, x: m(x).sum()), capture=True).eval_shape(
            MLP, SHAPE
        )
        assert list(got) == ["m/layers/0", "m/layers/1", "m/layers/2", "m"]
        assert str(got["m/layers/1"]["cotangent"].shape) == "(4,)"
        assert "'m': {'primal': f32[3], 'cotangent': f32[3]}" in str(got)
        assert "f32[4]" in tabulate(got) and "mean" not in tabulate(got)
    model = eqx.filter_eval_shape(lambda: MLP)
    assert list(S(lambda m, x: m(x), capture=True).eval_shape(model, SHAPE)[1]) == [
        *got
    ]


@pytest.mark.parametrize("shape", [X, SHAPE], ids=["array", "shape"])
@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
def test_lower(transformed, shape):
    fn = transformed(eqx.filter_jit(_fn))
    traced = fn.trace(shape, scale="two")
    lowered = fn.lower(shape, scale="two")
    assert "sine" in lowered.as_text() and "sin" in str(traced.jaxpr)
    compiled = lowered.compile()
    assert compiled.cost_analysis() is not None
    for x in (X, 2 * X):
        assert_close(compiled(x, scale="two"), fn(x, scale="two"))
        assert_close(traced.lower().compile()(x, scale="two"), fn(x, scale="two"))
    with pytest.raises(TypeError, match="other values of those that are not arrays"):
        compiled(X, scale="one")
    with pytest.raises(TypeError, match=r"Write `\w+\(eqx.filter_jit\(fn\), ...\)`"):
        transformed(_fn).lower(X)


class _Model(eqx.Module):
    inner: eqx.nn.MLP

    @S(capture=True)
    def __call__(self, x):
        return self.inner(x)

    @tap(capture=True, callback=EVENTS.append)
    @eqx.filter_jit
    def jitted(self, x):
        return self.inner(x)


def test_methods():
    model = _Model(MLP)
    with _nothing_runs():
        _, got = model.__call__.eval_shape(SHAPE)
        lowered = model.jitted.lower(SHAPE)
    assert list(got) == list(model(X)[1])
    assert_close(lowered.compile()(X), MLP(X))


def test_the_arrays_of_a_model_are_arguments_of_the_program():
    text = S(eqx.filter_jit(MLP), capture=True).lower(SHAPE).as_text()
    arrays = len(jax.tree.leaves(eqx.filter(MLP, eqx.is_array)))
    assert text.split("@main(")[1].split("->")[0].count("%arg") == 1 + arrays
