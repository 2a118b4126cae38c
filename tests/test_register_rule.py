"""Higher-order primitives of a user's own, with and without a rule."""

import equinox as eqx
import eqx_sow
import jax
import jax.core
import jax.extend.core as jexc
import jax.numpy as jnp
import pytest
from eqx_sow import (
    plant,
    save_intermediates as S,
    sow,
    SowError,
    UnsupportedPrimitiveError,
)
from jax import lax
from jax.interpreters import mlir

from tests.helpers import assert_close, primitives

from .tables import REDUCERS


X = jnp.array([0.5, -1.0, 2.0])


def _make(name, run):
    """A primitive that runs jaxprs as `run(*args, **params)` says."""
    primitive = jexc.Primitive(name)
    primitive.multiple_results = True

    def abstract_eval(*avals, **params):
        effects = [j.effects for j in jexc.jaxprs_in_params(params)]
        out = jax.eval_shape(lambda *xs: run(*xs, **params), *avals)
        avals = [jax.core.ShapedArray(x.shape, x.dtype) for x in out]
        return avals, frozenset().union(*effects)

    primitive.def_impl(run)
    primitive.def_effectful_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))
    return primitive


def _twice(*args, jaxpr):
    return [2 * x for x in jexc.jaxpr_as_fun(jaxpr)(*args)]


def _repeat(x, *, jaxpr, n):
    body = jexc.jaxpr_as_fun(jaxpr)
    return [lax.scan(lambda x, _: (body(x)[0], None), x, length=n)[0]]


def _either(x, *, jaxprs):
    return lax.cond(jnp.sum(x) > 0, *map(jexc.jaxpr_as_fun, jaxprs), x)


twice_p, unknown_p = _make("twice", _twice), _make("unknown", _twice)
repeat_p, either_p = _make("repeat", _repeat), _make("either", _either)
_rule = eqx_sow.register_rule(twice_p)(_twice)
eqx_sow.register_rule(repeat_p)(_repeat)
eqx_sow.register_rule(either_p)(_either)


def _calls(primitive):
    def call(fn, x):
        (out,) = primitive.bind(x, jaxpr=jax.make_jaxpr(fn)(x))
        return out

    return call


twice, unknown = _calls(twice_p), _calls(unknown_p)


def loops(mark, x, own):
    body = lambda x: mark(jnp.sin(x), "h") * 2
    if own:
        (x,) = repeat_p.bind(x, jaxpr=jax.make_jaxpr(body)(x), n=4)
        return x
    return lax.fori_loop(0, 4, lambda _, x: body(x), x)


def branches(mark, x, own):
    fns = lambda x: mark(jnp.sin(x), "h") * 2, lambda x: mark(x * x, "g")
    if own:
        (x,) = either_p.bind(x, jaxprs=tuple(jax.make_jaxpr(f)(x) for f in fns))
        return x
    return lax.cond(jnp.sum(x) > 0, *fns, x)


def calls(mark, x, own):
    inside = lambda x: mark(jnp.sin(x), "h")
    return twice(inside, x) if own else 2 * inside(x)


def in_each_other(mark, x, own):
    def body(x):
        return x + calls(mark, x, own)

    if own:
        (x,) = repeat_p.bind(x, jaxpr=jax.make_jaxpr(body)(x), n=3)
        return x
    return lax.fori_loop(0, 3, lambda _, x: body(x), x)


XS = jnp.stack([X, -X])
total = lambda f: lambda x: jnp.sum(f(x))
USES = {
    "plain": lambda f: S(f)(X),
    "jit outside": lambda f: jax.jit(S(f))(X),
    "jit inside": lambda f: S(jax.jit(f))(X),
    "vmap inside": lambda f: S(jax.vmap(f))(XS),
    "vmap outside": lambda f: jax.vmap(S(f))(XS),
    "grad": lambda f: S(jax.grad(total(f)))(X),
    "jit of grad": lambda f: S(jax.jit(jax.grad(total(f))))(X),
    "vmap of grad": lambda f: S(jax.vmap(jax.grad(total(f))))(XS),
    "grad of vmap": lambda f: S(jax.grad(total(jax.vmap(f))))(XS),
    "grad of checkpoint": lambda f: S(jax.grad(total(jax.checkpoint(f))))(X),
    "scan": lambda f: S(lambda x: lax.scan(lambda c, x: (c, f(x)), 0, x))(XS),
    **{
        name: lambda f, r=row.reducer: S(jax.vmap(f), reduce={"h": r})(XS)
        for name, row in REDUCERS.items()
    },
    "fold of grad": lambda f: S(
        jax.grad(total(f)), reduce={"h": REDUCERS["fold"].reducer}
    )(X),
    "plant": lambda f: plant(f, {"h": jnp.cos})(X),
    "grad of plant": lambda f: jax.grad(total(plant(f, {"h": jnp.cos})))(X),
    "plant what came": lambda f: plant(f, S(f, names="h")(X)[1])(X),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("program", [loops, branches, calls, in_each_other])
def test_as_the_program_that_the_rule_is(program, use):
    """A primitive with a rule is as good as the loops and branches of JAX."""
    got = use(lambda x: program(sow, x, own=True))
    assert_close(got, use(lambda x: program(sow, x, own=False)))


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
    assert _rule is _twice


def test_a_rule_that_returns_something_else():
    primitive = _make("odd", _twice)
    eqx_sow.register_rule(primitive)(lambda x, *, jaxpr: [jnp.ones(2)])
    fn = lambda x: _calls(primitive)(lambda x: sow(x, "h"), x)
    with pytest.raises(SowError, match=r"`odd` returned.*f(loat)?32\[2\]"):
        S(fn)(X)
    # The last registration counts, and nothing of it is used without a sow.
    eqx_sow.register_rule(primitive)(_twice)
    assert_close(S(fn)(X)[0], 2 * X)


def test_off_the_primitive_stays():
    fn = lambda x: loops(sow, x, own=True)
    assert "repeat" in primitives(jax.make_jaxpr(fn)(X))
    assert "repeat" not in primitives(jax.make_jaxpr(S(fn))(X))
    assert_close(eqx.filter_jit(fn)(X), S(fn)(X)[0])


def test_not_a_primitive():
    with pytest.raises(TypeError, match="register_rule.*Primitive.*'twice'"):
        eqx_sow.register_rule("twice")
