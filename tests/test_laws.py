"""The laws of `save_intermediates`, over programs and transforms."""

import functools as ft
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from eqx_sow import Last, plant, save_intermediates as S, sow, tap

from tests.helpers import (
    assert_close,
    close,
    cotangents,
    modes_of,
    perturb,
    primals,
    primitives,
    tangents,
    thread,
    unmarked,
    with_mode,
    zeros,
)
from tests.tables import named, pick, under


pytestmark = pytest.mark.sample(5)


W = jnp.array([[0.5, -0.2, 0.1], [0.3, 0.8, -0.4], [-0.6, 0.2, 0.7]])
C = jnp.array([1.0, -0.5])
X = jnp.array([0.3, -1.2, 0.7])
V = jnp.array([1.0, 0.5, -2.0])
XS = jnp.stack([X, 2 * X])
VS = jnp.stack([V, V - 1])
NAMES = {"h", "tree", "unused", "z"}


def _mlp(mark, x):
    h = mark(jnp.tanh(W @ x), "h")
    tree = mark({"a": jnp.sin(h[:2]), "b": (h * h,)}, "tree")
    mark(x * 3, "unused")
    return mark(jnp.sum(tree["a"]) + jnp.sum(tree["b"][0]), "z")


def _jitted(mark, x):
    return jax.jit(ft.partial(_mlp, mark))(x)


def _checkpointed(mark, x):
    return jax.checkpoint(ft.partial(_mlp, mark))(x)


def _nested(mark, x):
    @jax.jit
    def inner(h):
        return mark({"a": jnp.sin(h[:2]), "b": (h * h,)}, "tree")

    @jax.checkpoint
    def middle(x):
        h = mark(jnp.tanh(W @ x), "h")
        return jax.jit(inner)(h)

    @jax.jit
    def outer(x):
        mark(x * 3, "unused")
        tree = middle(x)
        return jnp.sum(tree["a"]) + jnp.sum(tree["b"][0])

    return mark(outer(x), "z")


def _vmapped(mark, x):
    def row(r, c):
        h = mark(jnp.tanh(W @ r) * c, "h")
        tree = mark({"a": jnp.sin(h[:2]), "b": (h * h,)}, "tree")
        mark(r * 3, "unused")
        return jnp.sum(tree["a"]) + jnp.sum(tree["b"][0])

    return mark(jnp.sum(jax.vmap(row, (1, 0))(x[:, None] * C[None], C)), "z")


def _vmapped_reference(mark, x):
    rows = C[:, None] * x[None, :]
    h = mark(jnp.tanh(rows @ W.T) * C[:, None], "h")
    tree = mark({"a": jnp.sin(h[:, :2]), "b": (h * h,)}, "tree")
    mark(rows * 3, "unused")
    return mark(jnp.sum(tree["a"]) + jnp.sum(tree["b"][0]), "z")


# Each program with one that computes the same and has no transform in it.
PROGRAMS = {
    "plain": (_mlp, _mlp),
    "jitted": (_jitted, _mlp),
    "checkpointed": (_checkpointed, _mlp),
    "nested": (_nested, _mlp),
    "vmapped": (_vmapped, _vmapped_reference),
}


class Case(NamedTuple):
    wrap: Callable
    args: tuple
    modes: dict[str, Callable]


def _first(program, *args):
    return primals(program, args[0])


def _cot(program, x, *_):
    return cotangents(program, x)


def _over(reference, in_axes):
    def mapped(program, *args):
        return jax.vmap(ft.partial(reference, program), in_axes)(*args)

    return mapped


def _basis(tree):
    return jtu.tree_map(lambda j: jnp.moveaxis(j, -1, 0), tree)


def _jac_tangents(program, x):
    return _basis(jax.jacfwd(lambda x: primals(program, x))(x))


def _jac_cotangents(program, x):
    return jtu.tree_map(lambda c: c[None], cotangents(program, x))


def _cot_tan(program, x, v):
    return jax.jvp(lambda x: cotangents(program, x), (x,), (v,))[1]


def _tan_cot(program, x, v):
    eps = zeros(program, x)

    def along(delta):
        return jax.jvp(perturb(program), (eps, x), (delta, v))[1]

    return jax.grad(along)(eps)


def _cot_of_jvp(program, x, v):
    def along(e):
        return jax.jvp(lambda x: perturb(program)(e, x), (x,), (v,))[1]

    return jax.grad(along)(zeros(program, x))


def _grad_aux(f):
    return jax.value_and_grad(lambda x: (f(x), {"twice": 2 * x}), has_aux=True)


def _vjp(f):
    def fn(x):
        out, pull = jax.vjp(f, x)
        return out, pull(jnp.ones_like(out))

    return fn


def _linearize(f):
    def fn(x, v):
        out, push = jax.linearize(f, x)
        return out, push(v)

    return fn


def _hvp_forward_reverse(f):
    return lambda x, v: jax.jvp(jax.grad(f), (x,), (v,))[1]


def _hvp_reverse_forward(f):
    return lambda x, v: jax.grad(lambda x: jax.jvp(f, (x,), (v,))[1])(x)


_GRAD = {"primal": _first, "cotangent": _cot}
_JVP = {"primal": _first, "tangent": tangents}
_PLAIN = {"primal": _first}
_JACFWD = {"primal": _first, "tangent": _jac_tangents}
_JACREV = {"primal": _first, "cotangent": _jac_cotangents}
_GRAD_OF_ROWS = {"primal": _over(_first, 0), "cotangent": _over(_cot, 0)}


def _cases(modes, *names, args=(X,)):
    return {name: Case(named(name), args, modes) for name in names}


TRANSFORMS = {
    **_cases(_PLAIN, "eager", "jit", "jit-jit", "filter_jit"),
    **_cases(_PLAIN, "checkpoint", "filter_checkpoint"),
    **_cases(_GRAD, "grad", "jit-grad", "grad-jit"),
    **_cases(_GRAD, "filter_grad", "filter_value_and_grad"),
    "value_and_grad-has_aux": Case(_grad_aux, (X,), _GRAD),
    "vjp": Case(_vjp, (X,), _GRAD),
    "filter_vjp": Case(
        lambda f: lambda x: eqx.filter_vjp(f, x)[1](jnp.ones(())), (X,), _GRAD
    ),
    **_cases(_GRAD, "grad-checkpoint", "grad-checkpoint_everything"),
    **_cases(_GRAD, "grad-checkpoint_dots", "filter_grad-filter_checkpoint"),
    **_cases(_JVP, "jvp", "jvp-jit", args=(X, V)),
    "filter_jvp": Case(
        lambda f: lambda x, v: eqx.filter_jvp(f, (x,), (v,)), (X, V), _JVP
    ),
    "linearize": Case(_linearize, (X, V), _JVP),
    **_cases(_JACFWD, "jacfwd", "filter_jacfwd"),
    **_cases(_JACREV, "jacrev", "filter_jacrev"),
    **_cases({"primal": _over(_first, 0)}, "vmap", "filter_vmap", args=(XS,)),
    "vmap-1": Case(
        lambda f: jax.vmap(f, in_axes=1), (XS.T,), {"primal": _over(_first, 1)}
    ),
    "vmap-negative": Case(
        lambda f: jax.vmap(f, in_axes=-1), (XS.T,), {"primal": _over(_first, -1)}
    ),
    "vmap-vmap": Case(
        lambda f: jax.vmap(jax.vmap(f, in_axes=1)),
        (jnp.stack([XS.T, -XS.T, XS.T - 1]),),
        {"primal": _over(_over(_first, 1), 0)},
    ),
    "vmap-spmd": Case(
        lambda f: jax.vmap(f, spmd_axis_name="i"), (XS,), {"primal": _over(_first, 0)}
    ),
    **_cases(_GRAD_OF_ROWS, "vmap-grad", "grad-total-vmap", args=(XS,)),
    **_cases(
        {"primal": _over(_first, 0), "tangent": _over(tangents, 0)},
        "vmap-jvp",
        args=(XS, VS),
    ),
    "hvp-forward-reverse": Case(
        _hvp_forward_reverse,
        (X, V),
        {**_GRAD, **_JVP, "cotangent.tangent": _cot_tan},
    ),
    "hvp-reverse-forward": Case(
        _hvp_reverse_forward,
        (X, V),
        {**_JVP, "cotangent": _cot_of_jvp, "tangent.cotangent": _tan_cot},
    ),
}


def _assert_close_where_it_varies(got, expected):
    """An entry may lack the first axis if the expected one is the same all along it."""
    assert set(got) == set(expected)
    for name, value in expected.items():
        first = jtu.tree_map(lambda x: x[0], value)
        shapes = [x.shape for x in jtu.tree_leaves(got[name])]
        if shapes == [x.shape for x in jtu.tree_leaves(first)]:
            same = jtu.tree_map(lambda x, y: jnp.broadcast_to(x, y.shape), first, value)
            assert_close(value, same)
            value = first
        assert_close(got[name], value)


def _assert_close_where_it_depends(got, expected):
    """A cotangent that depends on nothing has no tangent."""
    assert "h" in got
    for name, value in expected.items():
        if name not in got:
            assert_close(value, jtu.tree_map(jnp.zeros_like, value))
        else:
            assert_close(got[name], value, rtol=1e-4)


_programs = pytest.mark.parametrize("program", PROGRAMS)
_transforms = pytest.mark.parametrize("transform", TRANSFORMS)


# Here a cotangent or tangent may be the same all along the new axis.
_MAPPED = ("vmap-grad", "vmap-jvp", "jacrev", "filter_jacrev")


@ft.cache
def _expected(program, transform):
    case, (marked, reference) = TRANSFORMS[transform], PROGRAMS[program]
    out = case.wrap(ft.partial(marked, unmarked))(*case.args)
    return out, {m: fn(reference, *case.args) for m, fn in case.modes.items()}


# All are run with the program that has the most in it, below.
_FEWER = ("eager", "grad", "jvp", "vmap", "jit-grad", "checkpoint")


@pytest.mark.parametrize(
    "program, transform",
    [
        pytest.param(p, t, marks=() if t in _FEWER else pytest.mark.slow)
        for p in PROGRAMS
        if p != "nested"
        for t in TRANSFORMS
    ],
)
def test_laws_1_4_and_8(program, transform):
    _check_laws_1_4_and_8(S, program, transform)


@_transforms
@pytest.mark.parametrize(
    "call", ["plain", pytest.param("jit", marks=pytest.mark.slow)], indirect=True
)
def test_laws_1_4_and_8_in_every_way(call, transform):
    _check_laws_1_4_and_8(lambda f: ft.partial(call, S(f)), "nested", transform)


def _check_laws_1_4_and_8(save, program, transform):
    case = TRANSFORMS[transform]
    out, got = save(case.wrap(ft.partial(PROGRAMS[program][0], sow)))(*case.args)
    expected_out, modes = _expected(program, transform)
    assert_close(out, expected_out, weak=True)
    assert set(got) == NAMES
    for mode, expected in modes.items():
        if "." in mode:
            _assert_close_where_it_depends(with_mode(got, mode), expected)
        elif mode != "primal" and transform in _MAPPED:
            _assert_close_where_it_varies(with_mode(got, mode), expected)
        else:
            assert_close(with_mode(got, mode), expected)


@pytest.mark.parametrize(
    "transform", [t for t, c in TRANSFORMS.items() if c.modes is _GRAD]
)
def test_law_4_primals_are_those_of_grad_of_save(transform):
    case = TRANSFORMS[transform]
    f = ft.partial(_mlp, sow)
    _, got = S(case.wrap(f))(X)
    _, expected = jax.grad(S(f), has_aux=True)(X)
    assert_close(with_mode(got, "primal"), with_mode(expected, "primal"))


def test_order_of_execution():
    _, got = S(ft.partial(_mlp, sow))(X)
    assert list(got) == ["h", "tree", "unused", "z"]
    _, got = S(jax.jit(ft.partial(_mlp, sow)))(X)
    assert list(got) == ["h", "tree", "unused", "z"]


@_programs
def test_law_1_gradient_through_it(call, program):
    marked, reference = PROGRAMS[program]
    f = S(ft.partial(marked, sow))
    got = call(jax.grad(lambda x: f(x)[0]), X)
    assert_close(got, jax.grad(ft.partial(reference, unmarked))(X))


@_programs
@under(
    "jit",
    "filter_jit",
    "checkpoint",
    "filter_checkpoint",
    "checkpoint_nothing",
    argument="jit",
)
@pytest.mark.parametrize("inner", ["eager", "grad", "vmap"])
def test_law_2(program, jit, inner):
    case = TRANSFORMS[inner]
    f = case.wrap(ft.partial(PROGRAMS[program][0], sow))
    assert_close(S(jit(f))(*case.args), jit(S(f))(*case.args))


@_programs
@pytest.mark.parametrize("inner", ["eager", "jit-grad", "jacrev"])
@pytest.mark.parametrize("in_axes", [0, 1])
def test_law_3(program, inner, in_axes):
    f = TRANSFORMS[inner].wrap(ft.partial(PROGRAMS[program][0], sow))
    xs = XS if in_axes == 0 else XS.T
    out, got = S(jax.vmap(f, in_axes))(xs)
    expected_out, expected = jax.vmap(S(f), in_axes)(xs)
    assert_close(out, expected_out)
    assert_close(with_mode(got, "primal"), with_mode(expected, "primal"))
    _assert_close_where_it_varies(
        with_mode(got, "cotangent"), with_mode(expected, "cotangent")
    )


def test_law_3_two_arguments(call):
    def f(x, y, z):
        a = sow(x * y, "a")
        b = sow(a + z["k"], "b")
        return sow(b - z["j"], "c")

    x = jnp.arange(6.0).reshape(2, 3)
    z = {"k": jnp.arange(6.0).reshape(3, 2), "j": jnp.ones((3,))}
    axes = (0, None, {"k": 1, "j": None})
    got = call(S(jax.vmap(f, axes)), x, x[0], z)
    assert_close(got, jax.vmap(S(f), axes)(x, x[0], z))


def test_value_that_does_not_vary_has_no_axis(call):
    def f(x, y):
        a = sow(y * 2, "fixed")
        return sow(a + x, "varies")

    out, got = call(S(jax.vmap(f, (0, None))), XS, X)
    assert_close(out, XS + 2 * X[None])
    assert_close(got["fixed"]["primal"], 2 * X)
    assert_close(got["varies"]["primal"], XS + 2 * X[None])


def test_one_batched_leaf_batches_the_captured_tree_only(call):
    def f(x, y):
        a, b = sow((x, y), "pair")
        return a * 2, b

    batched = jax.vmap(f, (0, None), out_axes=(0, None))
    out, got = call(S(batched), XS, X)
    assert_close(out, (XS * 2, X))
    assert_close(got["pair"]["primal"], (XS, jnp.stack([X, X])))


def test_inner_axis_does_not_vary(call):
    def f(x):
        return jax.vmap(lambda y: sow(x, "outer") + sow(y, "both"))(x)

    _, got = call(S(jax.vmap(f, 1)), XS.T)
    assert_close(got["outer"]["primal"], XS)
    assert_close(got["both"]["primal"], XS)


@pytest.mark.parametrize("in_axes", [0, 1])
def test_collectives(call, in_axes):
    def f(x):
        total = sow(lax.psum(x, "i"), "total")
        centred = sow(x - lax.pmean(x, "i"), "centred")
        return sow(lax.axis_index("i"), "index"), total, centred

    xs = XS if in_axes == 0 else XS.T
    out, got = call(S(jax.vmap(f, in_axes, axis_name="i")), xs)
    total, centred = XS.sum(0), XS - XS.mean(0)[None]
    index = jnp.arange(2, dtype=jnp.int32)
    assert_close(out, (index, jnp.stack([total, total]), centred))
    assert_close(got["total"]["primal"], total)
    assert_close(got["centred"]["primal"], centred)
    assert_close(got["index"]["primal"], index)


# Where both levels are of the same kind, the outer one's mode begins with "primal".


def test_reverse_over_reverse(call):
    def hvp(x):
        return jax.grad(lambda x: jnp.vdot(jax.grad(ft.partial(_mlp, sow))(x), V))(x)

    def slope(eps):
        return jnp.vdot(jax.grad(ft.partial(perturb(_mlp), eps))(X), V)

    out, got = call(S(hvp), X)
    _, along = jax.jvp(jax.grad(ft.partial(_mlp, unmarked)), (X,), (V,))
    assert_close(out, along)
    assert_close(with_mode(got, "primal"), primals(_mlp, X))
    assert_close(with_mode(got, "cotangent"), cotangents(_mlp, X))
    outer = jax.grad(slope)(zeros(_mlp, X))
    assert_close(with_mode(got, "primal.cotangent"), outer)
    both = with_mode(got, "cotangent.cotangent")
    # The other cotangents do not depend on `x`.
    assert_close(both, {"h": tangents(_mlp, X, V)["h"]})


def test_forward_over_forward(call):
    def along(x, v, u):
        return jax.jvp(
            lambda x: jax.jvp(ft.partial(_mlp, sow), (x,), (v,))[1], (x,), (u,)
        )[1]

    u = jnp.array([0.1, 0.2, 0.3])
    out, got = call(S(along), X, V, u)
    assert_close(out, V @ jax.hessian(ft.partial(_mlp, unmarked))(X) @ u)
    assert_close(with_mode(got, "primal"), primals(_mlp, X))
    assert_close(with_mode(got, "tangent"), tangents(_mlp, X, V))
    assert_close(with_mode(got, "primal.tangent"), tangents(_mlp, X, u))
    _, second = jax.jvp(lambda x: tangents(_mlp, x, V), (X,), (u,))
    _assert_close_where_it_depends(with_mode(got, "tangent.tangent"), second)


@pytest.mark.parametrize("inner", ["eager", "jit", "checkpoint"])
def test_hessian(call, inner):
    f = TRANSFORMS[inner].wrap(ft.partial(_mlp, sow))
    out, got = call(S(jax.hessian(f)), X)
    assert_close(out, jax.hessian(ft.partial(_mlp, unmarked))(X), rtol=1e-4)
    # `jacfwd` around `jacrev`: the basis of the latter is the inner axis.
    cot_tan = jax.vmap(lambda v: _cot_tan(_mlp, X, v))(jnp.eye(3))
    got = with_mode(got, "cotangent.tangent")
    expected = jtu.tree_map(lambda x: x[:, None], cot_tan)
    _assert_close_where_it_depends(got, expected)


@_programs
@pytest.mark.parametrize("how", ["grad", "jacrev-vmap", "jvp"])
def test_law_7(program, how):
    marked, reference = PROGRAMS[program]

    def penalty(values):
        return sum(jnp.sum(x**3) for x in jtu.tree_leaves(values))

    def got(x):
        out, values = S(ft.partial(marked, sow))(x)
        return out + penalty(values)

    def expected(x):
        out, values = thread(reference)(x)
        return out + penalty(values)

    if how == "grad":
        assert_close(jax.grad(got)(X), jax.grad(expected)(X), rtol=1e-4)
    elif how == "jvp":
        along = named("jvp")
        assert_close(along(got)(X, V), along(expected)(X, V), rtol=1e-4, atol=1e-4)
    else:
        got, expected = (jax.jit(jax.vmap(jax.jacrev(f)))(XS) for f in (got, expected))
        assert_close(got, expected, rtol=1e-4)


def test_law_7_through_captured_cotangents(call):
    f = ft.partial(_mlp, sow)

    def got(x):
        _, values = S(jax.grad(f))(x)
        return jnp.sum(values["h"]["cotangent"] ** 2)

    def expected(x):
        return jnp.sum(cotangents(_mlp, x)["h"] ** 2)

    assert_close(call(jax.grad(got), X), jax.grad(expected)(X))


@pytest.mark.filterwarnings("ignore:.*found no mark")
def test_no_sow_is_an_empty_dict(call):
    assert_close(call(S(jnp.sin), X), (jnp.sin(X), {}))


def test_dependence_decides_whether_there_is_a_cotangent(call):
    def f(x, y):
        sow(y * 2, "independent")
        sow(x * 2, "unreached")
        return jnp.sum(sow(x * y, "reached"))

    _, got = call(S(jax.grad(f)), X, V)
    assert modes_of(got) == {
        "independent": {"primal"},
        "unreached": {"primal", "cotangent"},
        "reached": {"primal", "cotangent"},
    }
    assert_close(got["unreached"]["cotangent"], jnp.zeros(3))
    assert_close(got["reached"]["cotangent"], jnp.ones(3))


# --- every kind of argument ---


def _custom_jvp(f):
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return g


def _custom_vjp(f):
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: jax.vjp(f, x), lambda pull, ct: pull(ct))
    return g


ARGUMENTS = {
    "float": 0.7,
    "int": 3,
    "bool": True,
    "complex": 0.7 - 0.2j,
    "numpy-float32": np.float32(0.7),
    "numpy-float64": np.float64(0.7),
    "numpy-bool": np.True_,
    "numpy-array": np.array([0.7, -0.2], np.float32),
    "weak": jnp.asarray(0.7),
    "array": X,
    "key": jax.random.key(0),
}
CALLS = {
    **pick("jit", "checkpoint", "checkpoint_dots"),
    "custom_jvp": _custom_jvp,
    "custom_vjp": _custom_vjp,
    "nested": lambda f: jax.checkpoint(_custom_jvp(jax.checkpoint(f))),
    "cond": lambda f: lambda x: lax.cond(True, f, f, x),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (c, f(c)), x, length=2)[1],
}


def _passed_on(mark, x):
    """Nothing is computed, a literal is marked, and one is returned."""
    y = mark(x, "x")
    return mark({"x": y, "two": jnp.asarray(2.0)}, "both")["x"], 3.0


def _last(wrap, tree):
    return jtu.tree_map(lambda x: x[-1], tree) if wrap == "scan" else tree


@pytest.mark.parametrize("wrap", CALLS)
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_every_kind_of_argument(call, kind, wrap):
    f, x = CALLS[wrap](ft.partial(_passed_on, sow)), ARGUMENTS[kind]
    # JAX takes them all; what it returns of a literal is one.
    want, seen = jtu.tree_map(jnp.asarray, CALLS[wrap](thread(_passed_on))(x))
    out, got = call(S(f), x)
    assert_close(out, want, weak=True)
    assert_close(with_mode(got, "primal"), seen)
    last = call(S(f, reduce=Last()), x)[1]
    assert_close(with_mode(last, "primal"), _last(wrap, seen))
    assert_close(call(plant(f, got), x), want, weak=True)
    doubled = plant(f, {"x": lambda y: jnp.zeros_like(y)})
    assert_close(call(doubled, x)[0], jtu.tree_map(jnp.zeros_like, want[0]))
    events = []
    assert_close(tap(f, events.append, names="both")(x), want, weak=True)
    jax.effects_barrier()
    two = 2 if wrap == "scan" else 1
    assert [event.value["two"] for event in events] == [2.0] * two


# Rules that JAX calls with what it makes of a Python number.
def _rule_of_vjp(mark):
    f = jax.custom_vjp(lambda x: mark(x, "x") * 2)
    f.defvjp(lambda x: (mark(x, "x") * 2, None), lambda _, ct: (mark(ct, "ct") * 2,))
    return f


def _rule_of_jvp(mark):
    f = jax.custom_jvp(lambda x: mark(x, "x") * 2)
    f.defjvp(lambda xs, ts: (mark(xs[0], "x") * 2, ts[0] * 2))
    return f


@pytest.mark.parametrize("make", [_rule_of_vjp, _rule_of_jvp])
@under("grad", "value_and_grad")
@pytest.mark.parametrize("kind", ["float", "numpy-float32", "weak"])
def test_a_rule_that_is_called_with_a_literal(call, kind, wrap, make):
    x = ARGUMENTS[kind]
    want = jtu.tree_map(jnp.asarray, wrap(make(lambda v, name: v))(x))
    for options in ({}, dict(reduce=Last()), dict(transform=lambda v: 1 * v)):
        out, got = call(S(wrap(make(sow)), **options), x)
        assert_close(out, want, weak=True)
        assert_close(got["x"]["primal"], jnp.asarray(x), weak=True)
        assert "x/primal" in got.flat()
    planted = {"x": lambda v: jnp.ones_like(v)}
    if make is _rule_of_vjp and wrap is jax.value_and_grad:
        assert call(plant(wrap(make(sow)), planted), x)[0] == 2


def _smooth(mark, x):
    y = mark(jnp.sin(mark(x, "x")) * 2, "y")
    return jnp.sum(mark(lax.cond(True, lambda y: y, lambda y: 0 * y, y), "z"))


@pytest.mark.parametrize(
    "wrap", ["checkpoint", "checkpoint_dots", "custom_jvp", "nested"]
)
@pytest.mark.parametrize("kind", ["float", "numpy-float32", "numpy-array", "weak"])
def test_every_kind_of_argument_differentiated(call, kind, wrap):
    wrap, x = CALLS[wrap], ARGUMENTS[kind]
    reference = cotangents(_smooth, jnp.asarray(x))
    f = ft.partial(_smooth, sow)
    for g in (wrap(jax.grad(f)), jax.grad(wrap(f)), wrap(jax.grad(wrap(f)))):
        out, got = call(S(g), x)
        assert_close(with_mode(got, "cotangent"), reference)
        assert_close(out, reference["x"])
    # The tangent is a literal, and an operand of the sow.
    tangent = 1.0 if kind == "float" else np.ones(np.shape(x), jnp.result_type(x))
    along = lambda x: jax.jvp(wrap(f), (x,), (tangent,))
    _, got = call(S(along, reduce=Last()), x)
    assert_close(got["x"]["tangent"], jnp.ones(np.shape(x), jnp.result_type(x)))


def test_literals_inside(call):
    def f(x):
        y = sow(2.0 * x, "y")
        one = sow(jnp.asarray(1.0), "one")
        body = lambda i, c: sow(c * 0.5, "carry")
        start_at_literal = lax.fori_loop(0, 2, body, 1.0)
        branch = lambda: sow(jnp.asarray(3.0), "branch")
        chosen = lax.cond(y > 0, branch, lambda: 4.0)
        return one + start_at_literal + chosen

    want = dict(y=2.0, one=1.0, carry=np.array([0.5, 0.25]), branch=3.0)
    for g in (f, jax.checkpoint(f), jax.jit(f)):
        out, got = call(S(g), jnp.asarray(1.0))
        close(out, 4.25)
        for name, value in want.items():
            close(got[name]["primal"], value)


def test_no_equation_for_a_literal():
    f = jax.checkpoint(ft.partial(_passed_on, sow))
    closed = jax.make_jaxpr(lambda: S(f)(1.0))()
    assert set(primitives(closed)) == {"remat2"}
