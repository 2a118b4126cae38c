"""The modes of JAX: each changes what JAX does with any program.

The whole suite runs under strict promotion of dtypes and ranks (`conftest.py`). That of
NumPy, as users have it, is one mode here.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_sow import (
    Append,
    Buffer,
    Fold,
    Last,
    plant,
    save_intermediates as S,
    scope,
    sow,
    SowError,
    SowTypeError,
    summarize,
    Summary,
    tabulate,
    tap,
)
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import hijax
from jaxtyping import Float

from tests.helpers import assert_close, NEXT, next_release, primitives
from tests.tables import under


@contextlib.contextmanager
def _promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


MODES = {
    "x64": lambda: jax.enable_x64(True),
    "promotion": _promotion,
    "checks": lambda: jax.enable_checks(True),
    "debug_nans": lambda: jax.debug_nans(True),
    "disable_jit": jax.disable_jit,
    **({"next": next_release} if NEXT else {}),
}


@pytest.fixture(params=MODES)
def mode(request):
    with MODES[request.param]():
        yield request.param


X = np.array([0.3, -1.2, 0.7], np.float32)


# --- programs, and references without a loop, a branch or a custom rule ---


def _plain(mark, x):
    h = mark(jnp.tanh(x), "h")
    tree = mark({"a": 2 * h, "b": (jnp.sum(h), "static")}, "tree")
    return jnp.sum(tree["a"]) * tree["b"][0]


def _scan(mark, x):
    def body(c, y):
        return mark(jnp.sin(c) * y, "c"), None

    return jnp.sum(lax.scan(body, x, jnp.arange(1, 4, dtype=x.dtype))[0])


def _scan_unrolled(mark, x):
    for y in (1, 2, 3):
        x = mark(jnp.sin(x) * y, "c")
    return jnp.sum(x)


def _checkpoint(mark, x):
    @jax.checkpoint
    def body(c, _):
        return mark(jnp.sin(c), "c"), None

    return jnp.sum(lax.scan(body, x, length=2)[0])


def _checkpoint_around(mark, x):
    @jax.jit
    def step(i, c):
        return mark(jnp.sin(c), "c")

    return jnp.sum(jax.checkpoint(lambda x: lax.fori_loop(0, 2, step, x))(x))


def _sines(mark, x):
    for _ in range(2):
        x = mark(jnp.sin(x), "c")
    return jnp.sum(x)


def _cond(mark, x):
    def yes(x):
        return mark(jnp.sin(x), "yes")

    return jnp.sum(lax.cond(jnp.sum(x) < 0, yes, lambda x: x, x))


def _cond_taken(mark, x):
    return jnp.sum(mark(jnp.sin(x), "yes"))


def _lanes(mark, x):
    def row(v):
        one, other = (lambda v: mark(f(v), "c") for f in (jnp.sin, jnp.cos))
        return lax.cond(v > 0, lambda v: mark(jnp.sin(v), "c"), other, v)

    return jnp.sum(jax.vmap(row)(x))


def _lanes_selected(mark, x):
    return jnp.sum(mark(jnp.where(x > 0, jnp.sin(x), jnp.cos(x)), "c"))


def _custom(mark, x):
    @jax.custom_vjp
    def f(x):
        return mark(jnp.sin(x), "f")

    def fwd(x):
        return mark(jnp.sin(x), "fwd"), x

    f.defvjp(fwd, lambda x, g: (mark(3 * g * jnp.cos(x), "bwd"),))
    return jnp.sum(f(x))


class Case(NamedTuple):
    program: Callable
    reference: Callable
    loops: bool = False


CASES = {
    "plain": Case(_plain, _plain),
    "scan": Case(_scan, _scan_unrolled, True),
    "checkpoint": Case(_checkpoint, _sines, True),
    "checkpoint-around": Case(_checkpoint_around, _sines, True),
    "cond": Case(_cond, _cond_taken),
    "lanes": Case(_lanes, _lanes_selected),
}


def _expected(case: Case, x: Any) -> tuple[Any, dict[str, dict[str, Any]]]:
    """The gradient, and what is to be captured beside it: for each name the values in
    order of execution, and the gradient with respect to a zero added to each."""

    def run(zeros, x):
        seen: dict[str, list[Any]] = {}

        def mark(value, name):
            i = len(seen.setdefault(name, []))
            seen[name].append(value)
            return eqx.apply_updates(value, zeros[name][i]) if zeros else value

        out = case.reference(mark, x)
        return out, eqx.filter(seen, eqx.is_array)

    _, seen = run(None, x)
    zeros = jax.tree.map(jnp.zeros_like, seen)
    grads = jax.grad(lambda z, x: run(z, x)[0], argnums=(0, 1))(zeros, x)
    stack = lambda xs: jax.tree.map(
        lambda *x: jnp.stack(x) if case.loops else x[0], *xs
    )
    names = {n: dict(primal=stack(seen[n]), cotangent=stack(grads[0][n])) for n in seen}
    return grads[1], names


def _arrays(intermediates):
    return {
        name: {m: eqx.filter(v, eqx.is_array) for m, v in entry.items() if m != "count"}
        for name, entry in intermediates.items()
    }


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "scan" else pytest.mark.slow) for n in CASES],
)
def test_gradients(mode, name):
    case = CASES[name]
    x = jnp.asarray(X, jnp.float64 if mode == "x64" else jnp.float32)
    fn = lambda x: case.program(sow, x)
    want, values = _expected(case, x)
    for save in (S(jax.grad(fn)), S(jax.jit(jax.grad(fn)))):
        got, intermediates = save(x)
        assert_close(got, want)
        assert_close(_arrays(intermediates), values)
        for entry in intermediates.values():
            assert entry.get("count", np.int32(0)).dtype == np.int32
    _, plain = S(fn)(x)
    assert_close(
        _arrays(plain), {n: dict(primal=v["primal"]) for n, v in values.items()}
    )
    # What is captured is planted: nothing changes.
    assert_close(plant(fn, plain)(x), fn(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scan", "checkpoint", "lanes"])
def test_vmap(mode, name):
    case = CASES[name]
    xs = jnp.stack([X, -2 * X])
    wants = [_expected(case, x) for x in xs]
    want, values = jax.tree.map(lambda *x: jnp.stack(x), *wants)
    fn = lambda x: case.program(sow, x)
    for outer in (
        jax.vmap(jax.grad(fn)),
        jax.grad(lambda xs: jnp.sum(jax.vmap(fn)(xs))),
    ):
        got, intermediates = S(outer)(xs)
        assert_close(got, want)
        assert_close(_arrays(intermediates), values)


def test_custom_rules(mode):
    fn = lambda x: _custom(sow, x)
    sin, bwd = jnp.sin(X), 3 * jnp.cos(X)
    out, got = S(fn)(jnp.asarray(X))
    assert_close((out, got), (jnp.sum(sin), {"f": {"primal": sin}}))
    for grad in (jax.grad(fn), jax.jit(jax.grad(fn)), jax.grad(jax.checkpoint(fn))):
        out, got = S(grad)(jnp.asarray(X))
        assert_close(out, bwd)
        assert_close(got, {"fwd": {"primal": sin}, "bwd": {"primal": bwd}})
    # The rule is still that of the function.
    assert_close(jax.grad(lambda x: S(fn)(x)[0])(jnp.asarray(X)), bwd)
    # A captured value has its own derivative.
    inside = jax.grad(lambda x: jnp.sum(S(fn)(x)[1]["f"]["primal"]))
    assert_close(inside(jnp.asarray(X)), jnp.cos(X))


def test_a_custom_rule_that_is_batched_before_it_is_differentiated(mode):
    # The axis of the lanes is outside that of the loop.
    def scan(x):
        @jax.custom_vjp
        def f(x):
            return jnp.sin(x)

        def fwd(x):
            return sow(jnp.sin(x), "fwd"), x

        f.defvjp(fwd, lambda x, g: (sow(g * jnp.cos(x), "bwd"),))
        return lax.scan(lambda c, _: (f(c), None), x, length=2)[0]

    xs = jnp.asarray(X)
    one, two = jnp.sin(xs), jnp.sin(jnp.sin(xs))
    last = jnp.cos(one)
    for fn in (
        jax.grad(lambda xs: jnp.sum(jax.vmap(scan)(xs))),
        jax.vmap(jax.grad(scan)),
    ):
        _, got = S(fn)(xs)
        assert_close(got["fwd"]["primal"], jnp.stack([one, two], 1))
        assert_close(got["bwd"]["primal"], jnp.stack([last * jnp.cos(xs), last], 1))


def test_while_loop(mode):
    def fn(x):
        step = lambda c: sow(c * 2, "c")
        return lax.while_loop(lambda c: jnp.sum(c) < 10, step, x)

    x = jnp.array([1.0, 0.5], jnp.float32)
    steps = jnp.stack([2 * x, 4 * x, 8 * x])
    out, got = S(fn)(x)
    three = jnp.asarray(3, jnp.int32)
    assert_close(out, steps[-1])
    assert_close(got["c"], {"primal": steps[-1], "count": three})
    _, got = S(fn, reduce=Buffer(4))(x)
    padded = jnp.concatenate([steps, jnp.zeros_like(steps[:1])])
    assert_close(got["c"], {"primal": padded, "count": three})


def test_reducers(mode):
    values = [np.sin(X)]
    for y in np.array([2, 3], np.float32):
        values.append(y * np.sin(values[-1]))
    values = np.stack(values)
    fn = lambda x: _scan(sow, x)

    def reduced(reducer):
        return S(fn, reduce=reducer)(jnp.asarray(X))[1]["c"]["primal"]

    assert_close(reduced(Last()), jnp.asarray(values[-1]))
    assert_close(reduced(Buffer(2)), jnp.asarray(values[-2:]))
    assert_close(reduced(Append()), (jnp.asarray(values),))
    total = reduced(Fold(lambda: jnp.zeros(3, jnp.float32), lambda a, x: a + x))
    assert_close(total, jnp.asarray(values.sum(0)))
    count = reduced(Fold(0, lambda n, _: n + 1))
    assert count == 3
    summary = reduced(Fold(Summary.empty(), lambda a, x: a + summarize(x)))
    got = [summary.size, summary.mean, summary.std, summary.min, summary.max]
    want = [values.size, values.mean(), values.std(), values.min(), values.max()]
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5)


def test_plant(mode):
    fn = lambda x: _scan(sow, x)
    x = jnp.asarray(X)

    def edited(x):
        return _scan_unrolled(lambda v, _: jnp.where(v > 0.2, v * 2, v), x)

    planted = plant(fn, {"c": lambda v: jnp.where(v > 0.2, v * 2, v)})
    assert_close(planted(x), edited(x))
    assert_close(jax.grad(planted)(x), jax.grad(edited)(x))


def test_tap(mode):
    events = []
    grad = jax.grad(lambda x: _checkpoint(sow, x))
    want, values = _expected(CASES["checkpoint"], jnp.asarray(X))
    assert_close(tap(grad, events.append)(jnp.asarray(X)), want)
    jax.effects_barrier()
    for mode_, order in dict(primal=1, cotangent=-1).items():
        seen = [e.value for e in events if e.mode == mode_]
        np.testing.assert_allclose(seen[::order], values["c"][mode_], rtol=1e-5)
    assert [e.count for e in events] == [0, 1, 0, 1]


@pytest.mark.slow
def test_capture_and_tables(mode):
    model = eqx.nn.MLP(3, 2, 4, 1, dtype=jnp.float32, key=jax.random.key(0))
    x = jnp.asarray(X)

    @eqx.filter_grad
    def grad(model, x):
        return jnp.sum(model(x) ** 2)

    def by_hand(zeros):
        one, two = model.layers
        h = one.weight @ x + one.bias + zeros[0]
        out = two.weight @ jax.nn.relu(h) + two.bias + zeros[1]
        return jnp.sum(out**2), (h, out)

    zeros = jnp.zeros(4, x.dtype), jnp.zeros(2, x.dtype)
    cotangents, primals = jax.grad(by_hand, has_aux=True)(zeros)
    want = {
        f"model/layers/{i}": dict(primal=primals[i], cotangent=cotangents[i])
        for i in range(2)
    }
    _, got = S(grad, capture=eqx.nn.Linear)(model, x)
    assert_close(got, want)
    _, summaries = S(grad, capture=eqx.nn.Linear, transform=summarize)(model, x)
    for name, entry in want.items():
        for mode_, value in entry.items():
            summary = summaries[name][mode_]
            assert_close(summary.mean, jnp.mean(value))
            assert_close(summary.max, jnp.max(value))
    lines = tabulate(summaries).splitlines()
    assert sum("primal" in x or "cotangent" in x for x in lines) == 4


# --- what a mode is for ---


@pytest.mark.parametrize("how", [S, lambda f: jax.jit(S(f)), lambda f: plant(f, {})])
def test_a_nan_in_a_jitted_function(how):
    @jax.jit
    def fn(x):
        return sow(jnp.log(x), "log")

    with jax.debug_nans(True):
        assert how(fn)(jnp.float32(1)) is not None
        with pytest.raises(FloatingPointError, match=r"invalid value \(nan\)"):
            how(fn)(jnp.float32(-1))


@under("eager", "jit", "filter_jit")
@pytest.mark.parametrize(
    "how",
    [
        S,
        lambda f: S(jax.jit(f)),
        lambda f: S(f, reduce=Last()),
        lambda f: plant(f, {"h": jnp.sin}),
        lambda f: tap(f, lambda event: None),
    ],
)
def test_keys_that_are_used_once(how, wrap):
    def fn(key, again=False):
        one, two = jax.random.split(key)
        x = sow(jax.random.normal(one), "x")
        step = lambda x, key: (sow(x + jax.random.normal(key), "h"), None)
        return lax.scan(step, x, jax.random.split(one if again else two, 2))[0]

    with jax.debug_key_reuse(True):
        jax.block_until_ready(wrap(how(fn))(jax.random.key(0)))
        with pytest.raises(jax.errors.KeyReuseError):
            wrap(how(lambda key: fn(key, again=True)))(jax.random.key(1))


# In the gradient of a loop with an effect JAX finds a leak of its own, in that of
# `jax.debug.callback` as well. See also `test_hard_cases.py`.
@pytest.mark.parametrize("name", ["plain", "scan"])
def test_no_leaks(name):
    fn = CASES[name].program
    for outer in [
        lambda f: f,
        jax.jit,
        lambda f: jax.vmap(f, axis_size=1, in_axes=None),
        *([] if CASES[name].loops else [jax.grad]),
    ]:
        quiet, loud = (
            lambda x, m=m: outer(lambda x: fn(m, x))(x) for m in (_callback, sow)
        )
        with jax.checking_leaks():
            want = quiet(jnp.asarray(X))
            got, _ = S(loud)(jnp.asarray(X))
        assert_close(got, want)


def _callback(value, name):
    del name
    jax.debug.callback(lambda x: None, eqx.filter(value, eqx.is_array))
    return value


if NEXT:

    @pytest.mark.parametrize("names", [("kept",), ()])
    def test_next_release_keeps_policies(names):
        # A policy decides what is computed again, with sows as without.
        def fn(x):
            x = checkpoint_name(sow(jnp.sin(x), "s"), "kept")
            return jnp.sum(sow(jnp.cos(x), "c"))

        policy = jax.checkpoint_policies.save_only_these_names(*names)
        grad = jax.grad(jax.checkpoint(fn, policy=policy))
        want = primitives(jax.make_jaxpr(grad)(jnp.asarray(X))).count("sin")
        with next_release():
            got = primitives(jax.make_jaxpr(S(grad))(jnp.asarray(X))).count("sin")
        assert got == want

    def test_a_primitive_with_methods():
        class Double(hijax.HiPrim):
            def __init__(self, fn, aval):
                self.in_avals, self.out_aval, self.params = (aval,), aval, dict(fn=fn)
                super().__init__()

            def expand(self, x):
                return 2 * self.fn(x)

            def jvp(self, primals, tangents):
                (x,), (t,) = primals, tangents
                return self(x), 5 * t

            def batch(self, axis_data, args, dims):
                del axis_data
                return type(self)(self.fn, jax.typeof(args[0]))(*args), dims[0]

        def fn(x):
            return Double(lambda x: sow(jnp.sin(x), "s"), jax.typeof(x))(x)

        def in_scope(x):
            with scope("a"):
                once = jax.jit(fn)(x)
            with scope("b"):
                return fn(x) + once

        x = jnp.asarray(X)
        for f in (fn, jax.jit(fn), jax.vmap(fn)):
            out, got = S(f)(x)
            assert_close((out, got), (2 * jnp.sin(x), {"s": {"primal": jnp.sin(x)}}))
        for f in (in_scope, jax.jit(in_scope), jax.vmap(in_scope)):
            out, got = S(f)(x)
            value = {"primal": jnp.sin(x)}
            assert_close((out, got), (4 * jnp.sin(x), {"a/s": value, "b/s": value}))
        assert_close(jax.jvp(lambda x: S(fn)(x)[0], (x,), (x,))[1], 5 * x)

        def annotated(x):
            inside = lambda x: sow(jnp.sin(x), "s", spec=Float[jax.Array, "3 3"])
            return Double(inside, jax.typeof(x))(x)

        with pytest.raises(SowTypeError, match="cannot be checked: .* `HiPrim`"):
            S(annotated)(x)


@pytest.mark.parametrize(
    "flag", [f for f in ("jax_remat3", "jax_custom_vjp3") if hasattr(jax.config, f)]
)
def test_the_next_release_before_jax_has_it_all(flag, monkeypatch):
    monkeypatch.setattr("eqx_sow._hijax.hi_p", None)
    before = getattr(jax.config, flag)
    jax.config.update(flag, True)
    try:
        with pytest.raises(SowError, match=f"what `{flag.upper()}` makes .* JAX 0.12"):
            S(lambda x: sow(x, "a"))(1.0)
    finally:
        jax.config.update(flag, before)
