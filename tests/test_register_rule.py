"""A higher-order primitive of a user's own, with and without a rule."""

import eqx_sow
import jax
import jax.core
import jax.extend.core as jexc
import jax.numpy as jnp
import pytest
from eqx_sow import save_intermediates as S, sow, UnsupportedPrimitiveError
from jax.interpreters import batching, mlir

from tests.helpers import assert_close, primitives


X = jnp.array([0.5, -1.0, 2.0])


def _make(name):
    """A primitive that runs its jaxpr and returns the double."""
    primitive = jexc.Primitive(name)
    primitive.multiple_results = True

    def run(*args, jaxpr):
        return [2 * x for x in jexc.jaxpr_as_fun(jaxpr)(*args)]

    def abstract_eval(*avals, jaxpr):
        del avals
        return [jax.core.ShapedArray(a.shape, a.dtype) for a in jaxpr.out_avals], set(
            jaxpr.effects
        )

    def batch(args, dims, *, jaxpr):
        outs = jax.vmap(lambda *xs: run(*xs, jaxpr=jaxpr), dims)(*args)
        return outs, [0] * len(outs)

    primitive.def_impl(run)
    primitive.def_effectful_abstract_eval(abstract_eval)
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))

    def call(fn, *args):
        (out,) = primitive.bind(*args, jaxpr=jax.make_jaxpr(fn)(*args))
        return out

    return primitive, call


twice_p, twice = _make("twice")
unknown_p, unknown = _make("unknown")


@eqx_sow.register_rule(twice_p)
def _rule(interpret, given, eqn, *args):
    outs, taken = interpret(eqn.params["jaxpr"])(given, *args)
    return [2 * x for x in outs], taken


def _program(mark, call, x):
    inner = lambda x: mark(jnp.sin(x), "in") + 1
    return mark(call(inner, mark(x * 3, "before")), "after")


def test_rule(call):
    out, got = call(S(lambda x: _program(sow, twice, x)), X)
    expected = 2 * (jnp.sin(X * 3) + 1)
    assert_close(out, expected)
    values = {"before": X * 3, "in": jnp.sin(X * 3), "after": expected}
    assert_close(got, {n: {"primal": v} for n, v in values.items()})


def test_rule_inside_other_transforms(call):
    f = jax.jit(lambda x: _program(sow, twice, x))
    _, got = call(S(f), X)
    assert_close(got["in"]["primal"], jnp.sin(X * 3))
    loop = lambda x: jax.lax.map(lambda x: _program(sow, twice, x), x)
    _, got = call(S(loop), X)
    assert_close(got["in"]["primal"], jnp.sin(X * 3))
    _, got = call(S(jax.vmap(f)), jnp.stack([X, -X]))
    assert_close(got["in"]["primal"], jnp.sin(jnp.stack([X, -X]) * 3))
    saved = S(lambda x: _program(sow, twice, x))
    assert_close(call(jax.grad(lambda x: jnp.sum(saved(x)[0])), X), 6 * jnp.cos(X * 3))


def test_rule_nested(call):
    f = lambda x: twice(lambda y: twice(lambda z: sow(z + 1, "deep"), y), x)
    assert_close(call(S(f), X), (4 * (X + 1), {"deep": {"primal": X + 1}}))


def test_rule_with_options_and_plant(call):
    f = lambda x: _program(sow, twice, x)
    _, got = call(S(f, names="in", transform=jnp.sum), X)
    assert_close(got, {"in": {"primal": jnp.sum(jnp.sin(X * 3))}})
    out = call(eqx_sow.plant(f, {"in": jnp.zeros(3)}), X)
    assert_close(out, 2 * jnp.ones(3))


def test_without_a_rule(call):
    with pytest.raises(UnsupportedPrimitiveError, match="`unknown`") as info:
        call(S(lambda x: _program(sow, unknown, x)), X)
    message = str(info.value)
    assert "'in'" in message and "register_rule" in message


def test_without_a_rule_and_without_a_sow_inside(call):
    f = lambda x: unknown(jnp.sin, sow(x, "before"))
    assert_close(call(S(f), X), (2 * jnp.sin(X), {"before": {"primal": X}}))
    jaxpr = jax.make_jaxpr(S(f))(X)
    assert "unknown" in primitives(jaxpr)


def test_returns_the_rule():
    assert callable(_rule) and _rule.__name__ == "_rule"


def test_not_a_primitive():
    with pytest.raises(TypeError, match="register_rule.*Primitive.*'twice'"):
        eqx_sow.register_rule("twice")
