"""What JAX and Equinox keep from one call to the next is never out of date."""

import gc
import sys
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_sow import (
    Append,
    batched,
    Buffer,
    compare,
    Fold,
    Last,
    plant,
    save_intermediates as S,
    sow,
    summarize,
    tap,
    UnknownSowError,
)
from eqx_sow._mark import static
from jax import lax

from .tables import pick, SAVES, under


XS = jnp.array([10.0, 20.0, 30.0])


def _sum(c, t):
    return sow(c + t, "h"), None


def _scan(x):
    return lax.scan(_sum, x, XS)[0]


ways = under(argument="way", of=SAVES)


@ways
def test_reducers_that_hold_arrays(way):
    scaled = lambda scale, acc, x: acc + scale * x
    for k in (1.0, 5.0, 7.0):
        folds = (
            Fold(k, lambda acc, x: acc + x),
            Fold(jnp.array(k), lambda acc, x: acc + x),
            Fold(jnp.array(k), eqx.Partial(scaled, jnp.array(1.0))),
        )
        for fold in folds:
            _, got = way(_scan, reduce=fold)(jnp.array(1.0))
            np.testing.assert_allclose(got["h"]["primal"], k + 11 + 31 + 61)


@ways
@pytest.mark.parametrize("shape", [(), (1,)])
def test_numpy_arrays_that_change_between_calls(way, shape):
    by = np.ones(shape, np.float32)
    scale = eqx.Partial(lambda by, x: jnp.sum(by) * x, by)
    add = eqx.Partial(lambda by, acc, x: acc + jnp.sum(by) * x, by)
    steps = np.array([11, 31, 61])
    # One object, and one that is made anew.
    of_all = way(_scan, transform=scale), way(_scan, reduce=Fold(0.0, add))
    for k in (1, 5, 1):
        by[...] = k
        new = np.full(shape, k, np.float32)
        again = way(_scan, transform=eqx.Partial(scale.func, new))
        for fn in (of_all[0], again):
            got = fn(jnp.array(1.0))[1]["h"]["primal"]
            np.testing.assert_allclose(got, k * steps)
        got = of_all[1](jnp.array(1.0))[1]["h"]["primal"]
        np.testing.assert_allclose(got, k * steps.sum())


@ways
def test_other_options_on_the_same_function(way):
    for k in (1.0, 2.0):
        transform = eqx.Partial(lambda k, x: k * x, jnp.array(k))
        _, got = way(_scan, transform=transform)(jnp.array(1.0))
        np.testing.assert_allclose(got["h"]["primal"], k * np.array([11, 31, 61]))
    for names in ("h", "*"):
        assert set(way(_scan, names=names)(jnp.array(1.0))[1]) == {"h"}
    with pytest.raises(UnknownSowError, match="'cotangent' is a mode that no"):
        way(_scan, modes="cotangent")(jnp.array(1.0))


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


@pytest.mark.parametrize(
    "run",
    [
        lambda f, m: S(f)(m),
        lambda f, m: S(f, capture=True)(m),
        lambda f, m: S(jax.grad(lambda s: f(m) * s))(2.0),
        lambda f, m: S(eqx.filter_jit(f))(m),
        lambda f, m: eqx.filter_jit(S(f))(m),
        lambda f, m: S(lambda x: jax.jit(lambda x: f(m) + x)(x))(1.0),
        lambda f, m: S(f, reduce=Fold(m.bias, lambda acc, x: acc + x))(m),
        lambda f, m: plant(f, {"h": lambda h: h * m.weight[0, 0]})(m),
    ],
)
def test_no_cache_keeps_a_model(run):
    def fn(model):
        body = lambda c, _: (jnp.tanh(sow(model(c), "h")), None)
        return jnp.sum(lax.scan(body, XS, length=2)[0])

    model = eqx.nn.Linear(3, 3, key=jax.random.key(0))
    alive = [weakref.ref(model), weakref.ref(model.weight)]
    jax.block_until_ready(jax.tree.leaves(run(fn, model)))
    del model
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_clear_caches():
    kept = []

    def fn(x):
        kept.append(x)
        return sow(x, "h")

    saved = S(jax.jit(fn))
    saved(XS), saved(XS)
    assert len(kept) == 1
    jax.clear_caches()
    saved(XS)
    assert len(kept) == 2


@under("jit", "map", "checkpoint", argument="transform")
def test_a_shared_function_is_walked_once(transform):
    walks = 0

    def counted(x):
        nonlocal walks
        walks += 1
        return jnp.sum(x)

    inner = jax.jit(lambda x: sow(x * 2, "h"))
    if transform is lax.map:
        again = lambda x: lax.map(inner, x)
    else:
        again = transform(inner)

    def fn(x):
        for _ in range(20):
            x = again(x)
        return x

    _, got = S(fn, transform=counted, reduce=Append())(XS)
    assert len(got["h"]["primal"]) == 20
    assert walks == 1


@under("jit", "checkpoint")
def test_walks_do_not_grow_with_depth(wrap):
    walks = 0

    def counted(x):
        nonlocal walks
        walks += 1
        return x

    fn = lambda x: sow(x * 2, "h")
    for _ in range(12):
        fn = wrap(lambda x, fn=fn: fn(x) + 1)
    S(fn, transform=counted)(XS)
    assert walks <= 2


def test_order_of_execution_within_jit():
    fn = lambda x: sow(sow(x, "b", tag="t") + 1, "a", tag="t")
    grad = jax.grad(lambda x: jnp.sum(fn(x)))
    for jitted in (jax.jit, eqx.filter_jit):
        assert list(S(jitted(fn), tag="t")(XS)[1]) == ["b", "a"]
        _, got = S(jitted(grad), tag="t")(XS)
        assert [list(modes) for modes in got.values()] == [["primal", "cotangent"]] * 2


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


@pytest.mark.parametrize(
    "way", [lambda fn: S(fn), lambda fn: plant(fn, {"h": _negated})]
)
@pytest.mark.parametrize("constant", [1.0, np.arange(3.0, dtype="float32"), 2 * XS])
def test_jitted_inside_is_compiled_once(way, constant):
    compilations = 0

    def count(event, _, **kwargs):
        nonlocal compilations
        compilations += event == "/jax/core/compile/backend_compile_duration"

    inner = jax.jit(lambda x: sow(jnp.sin(x) + constant, "h") * 2)
    fn = way(lambda x: inner(x))
    # An addition is compiled, too, if it is the first one.
    other = XS + 1
    fn(XS)
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        for _ in range(3):
            fn(other)
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert compilations == 0


def _negated(x):
    return -x


def _iteration(c, t):
    return sow(jnp.sin(c + t), "scan"), None


def _yes(x):
    return sow(jnp.cos(x), "cond")


def _no(x):
    return sow(x + 1, "cond")


def _going(carry):
    return carry[0] < 3


def _step(carry):
    i, x = carry
    return i + 1, sow(x * 2, "while")


def _module_level(x):
    x, _ = lax.scan(_iteration, x, XS)
    x = lax.cond(x > 0, _yes, _no, x)
    return lax.while_loop(_going, _step, (0, x))[1]


_EAGER = {
    "save": lambda: S(_module_level),
    "transform": lambda: S(_module_level, transform=_negated),
    "transforms": lambda: S(_module_level, transform={"w*": _negated, "*": _negated}),
    "last": lambda: S(_module_level, reduce={"scan": Last(), "w*": Buffer(4)}),
    "fold": lambda: S(_module_level, reduce=Fold(_zero, _add)),
    "plant": lambda: plant(_module_level, {"scan": jnp.ones(3), "cond": _negated}),
    "tap": lambda: tap(_module_level, _ignored),
}


def _zero():
    return jnp.zeros(())


def _add(acc, x):
    return acc + x


def _ignored(event):
    pass


@pytest.mark.parametrize("way", _EAGER)
def test_eager_calls_compile_once(way):
    compiled = []

    def count(event, _, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(kwargs.get("fun_name"))

    make = _EAGER[way]
    jax.block_until_ready(make()(1.0))
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        # Neither with the same, nor with one that is made in the same way.
        fn = make()
        for x in (1.0, 2.0, -3.0):
            jax.block_until_ready(fn(x))
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert compiled == []


@pytest.mark.slow
def test_other_options_of_functions_that_jax_knows():
    """What is kept of an eager loop belongs to the options it was made for."""
    once = np.sin(1 + 10.0)
    twice = np.sin(once + 20)
    steps = np.array([once, twice, np.sin(twice + 30)])
    globs = {"s*": _negated, "*n": jnp.square}, {"*n": jnp.square, "s*": _negated}
    signs = [-steps, steps**2, -steps]
    for transform, want in zip((*globs, globs[0]), signs):
        _, got = S(_module_level, names="scan", transform=transform)(1.0)
        np.testing.assert_allclose(got["scan"]["primal"], want, rtol=1e-5)
    for k in (1.0, 5.0, 1, jnp.array(7.0), 5.0):
        fold = Fold(k, eqx.Partial(lambda k, acc, x: acc + k * x, jnp.asarray(2.0 * k)))
        got = S(_module_level, reduce={"scan": fold})(1.0)[1]["scan"]["primal"]
        np.testing.assert_allclose(got, k + 2 * k * steps.sum(), rtol=1e-5)
        planted = plant(_module_level, {"scan": eqx.Partial(jnp.add, jnp.asarray(k))})
        _, got = S(planted)(1.0)
        x = 1.0
        for t in (10, 20, 30):
            x = np.sin(x + t) + k
        np.testing.assert_allclose(got["scan"]["primal"][-1], x, rtol=1e-5)
    for n in (2, 4):
        got = S(_module_level, reduce={"scan": Buffer(n)})(1.0)[1]["scan"]["primal"]
        assert got.shape == (n,)


def _mean(x):
    return x.mean()


def _compared(f):
    return lambda *args: compare(S(f)(*args)[1], S(f)(*args)[1]).first


_LOOKED_UP = {
    "save": S,
    "capture": lambda f: S(f, capture=True, inputs=True),
    "transform": lambda f: S(f, transform={"h": _mean}),
    "reduce": lambda f: S(f, reduce={"h": Buffer(2)}),
    "plant": lambda f: plant(f, {"h": XS}),
    "plant functions": lambda f: plant(f, {"h": _negated}),
    "tap": lambda f: tap(f, _ignored),
    "compare": _compared,
    "save in a jit": lambda f: eqx.filter_jit(S(f)),
    "jitted transform": lambda f: S(f, transform=eqx.filter_jit(lambda x: x.mean())),
}


def _calls(fn, *args):
    """How many functions are called to hash and to compare what is static."""
    n = 0

    def count(frame, event, _):
        nonlocal n
        n += event == "call" and frame.f_code.co_filename == static.__file__

    for _ in range(2):
        jax.block_until_ready(jax.tree.leaves(fn(*args)))
    jax.effects_barrier()
    gc.collect()
    gc.disable()
    sys.setprofile(count)
    try:
        fn(*args)
    finally:
        sys.setprofile(None)
        gc.enable()
    jax.effects_barrier()
    return n


@under("filter_jit", "jit", "eager", argument="jit")
@pytest.mark.parametrize("way", _LOOKED_UP)
def test_a_look_up_costs_the_same_however_many_functions_there_are(way, jit):
    layer = eqx.nn.Linear(3, 3, key=jax.random.key(0))

    def make():
        # One body, which eager loops share, and another function each time.
        f = lambda layer, x: sow(layer(_scan_once(x)), "h")
        return _LOOKED_UP[way](jit(f))

    first = make()
    before = _calls(first, layer, XS)
    others = [make() for _ in range(3)]
    for fn in others:
        fn(layer, XS)
    assert _calls(first, layer, XS) == _calls(others[-1], layer, XS) == before


def _scan_once(x):
    return lax.scan(lambda c, _: (sow(c + 1, "c"), None), x, length=1)[0]


def test_many_functions_stay_compiled():
    """More than are kept for one function with ever new options."""
    compiled = []

    def count(event, _, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(kwargs.get("fun_name"))

    every = [S(eqx.filter_jit(lambda x: sow(x, "h"))) for _ in range(70)]
    for fn in every:
        fn(XS)
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        for fn in every:
            fn(XS)
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert compiled == []


def test_what_is_in_structures_is_hashed():
    """Static fields and keys tell programs apart; equal ones are found again."""

    class Static(eqx.Module):
        field: object = eqx.field(static=True)

    def trees():
        fn, other = jnp.sin, jnp.cos
        jitted = [eqx.filter_jit(f) for f in (fn, other)]
        return [
            *map(Static, (1, 2, "a", fn, other, (fn,), (other,), [3], {"k": 4})),
            *({"a": 0}, {"b": 0}, {"a": 0, "b": 0}, [0], (0,), None, *jitted),
            *(Static((1, fn)), Static((2, fn)), Static({1, 2})),
        ]

    def const(tree):
        return static.Const(jax.tree.structure(tree))

    every, again = ([const(tree) for tree in trees()] for _ in range(2))
    assert len({hash(x) for x in every}) >= len(every) - 3
    for i, x in enumerate(every):
        for j, y in enumerate(again):
            assert (x == y) == (i == j)
            assert x != y or hash(x) == hash(y)


_outlives = jax.jit(lambda x: sow(jnp.sin(x), "h"))


@pytest.mark.parametrize(
    "way",
    [
        lambda y: S(_outlives, transform=lambda x: x * y),
        lambda y: S(_outlives, reduce=Fold(y, lambda acc, x: acc + x)),
        lambda y: plant(_outlives, {"h": lambda x: x * y}),
        lambda y: plant(_outlives, {"h": y}),
    ],
)
@under("jit", "vmap")
def test_no_cache_keeps_a_tracer(way, wrap):
    with jax.checking_leaks():
        wrap(lambda x, y: way(y)(x))(XS, 2 * XS)


def _log(held, event):
    del held


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    "way",
    [
        lambda f, held: S(f),
        lambda f, held: S(f, capture=True, transform=lambda v: jnp.sum(v) * held[0]),
        lambda f, held: S(f, names=lambda name: held.shape == (3,)),
        lambda f, held: S(f, reduce=Fold(held[0], lambda acc, v: acc + v.sum())),
        lambda f, held: plant(f, {"h": held}),
        lambda f, held: plant(f, {"h": lambda h: h * held}),
        lambda f, held: tap(f, eqx.Partial(_log, held), when=lambda v: v[0] > held[0]),
        lambda f, held: S(plant(f, {"h": lambda h: h * held})),
        lambda f, held: S(f, transform=batched(lambda v: v.sum() + held[0])),
        lambda f, held: S(f, transform=lambda v: summarize(v * held)),
        lambda f, held: lambda x: str(compare(S(f)(x)[1], S(f)(2 * x)[1])),
        lambda f, held: lambda x: S(f).eval_shape(x),
        lambda f, held: lambda x: S(f).lower(x).compile()(x * held),
        lambda f, held: lambda x: S(jax.vmap(jax.grad(f)))(jnp.stack((x, x))),
    ],
)
def test_a_jitted_function_is_freed_when_its_owner_lets_go(way):
    def trial():
        model = eqx.nn.Linear(3, 3, key=jax.random.key(0))
        held = jnp.ones(3)
        f = jax.jit(lambda x: jnp.sum(sow(model(x), "h")))
        fn = way(f, held)
        jax.block_until_ready(jax.tree.leaves([fn(XS), way(f, held)(2 * XS)]))
        jax.effects_barrier()
        return [weakref.ref(x) for x in (model, model.weight, held, f, fn)]

    alive = [ref for _ in range(2) for ref in trial()]
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)


@pytest.mark.parametrize(
    "way",
    [
        lambda f: S(f),
        lambda f: jax.jit(lambda x: S(f)(x)[0]),
        lambda f: S(f, reduce=Last()),
        lambda f: S(jax.grad(f)),
        lambda f: S(jax.grad(jax.checkpoint(f))),
        lambda f: S(lambda x: lax.map(f, x[None])),
        lambda f: lambda x: S(jax.vmap(f))(x[None]),
        lambda f: S(lambda x: lax.cond(x[0] > 0, f, lambda x: jnp.sum(x), x)),
        lambda f: plant(f, {"h": lambda h: h}),
        lambda f: tap(f, lambda event: None),
    ],
)
def test_what_is_static_in_a_value_is_freed(way):
    def trial():
        held = jnp.ones(3)
        act = lambda x: x * held
        f = lambda x: jnp.sum(sow((act, act(x)), "h")[1])
        way(f)(XS)
        jax.effects_barrier()
        return [weakref.ref(x) for x in (act, held)]

    alive = [ref for _ in range(2) for ref in trial()]
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)


_TRIALS = {
    "save": lambda f, held: S(jax.jit(f)),
    "jit of save": lambda f, held: jax.jit(S(f)),
    "capture": lambda f, held: S(jax.jit(f), capture=True),
    "grad": lambda f, held: S(jax.jit(jax.grad(f)), transform=lambda h: h * held),
    "plant": lambda f, held: plant(jax.jit(f), {"h": held}),
    "plant a function": lambda f, held: jax.jit(plant(f, {"h": lambda h: h * held})),
    "tap": lambda f, held: tap(jax.jit(f), lambda event: held),
}


@pytest.mark.slow
def test_trials_in_a_loop_hold_what_those_of_jit_hold():
    """Each has a model, a function and a wrapper of its own. No cache is cleared."""

    def trial(i, way):
        model, held = eqx.nn.Linear(3, 3, key=jax.random.key(i)), jnp.full(3, float(i))
        fn = way(lambda x: jnp.sum(sow(model(x), "h") * held), held)
        jax.block_until_ready(jax.tree.leaves(fn(XS)))
        return [weakref.ref(x) for x in (model, model.weight, held, fn)]

    def kept(*ways):
        def trials(numbers):
            alive = [ref for i in numbers for ref in trial(i, ways[i % len(ways)])]
            jax.effects_barrier()
            gc.collect()
            assert not any(ref() is not None for ref in alive)
            return len(gc.get_objects())

        before = trials(range(21))
        return trials(range(21, 321)) - before

    plain = kept(lambda f, held: jax.jit(f))
    assert kept(*_TRIALS.values()) < plain + 300


@pytest.mark.slow
def test_what_was_compiled_for_a_jitted_function_is_bounded():
    """If the function itself lives on, and what it is captured with is made anew."""
    f = jax.jit(lambda x: sow(x * 2, "h"))
    alive = []
    for k in range(70):
        held = jnp.full(3, float(k))
        S(f, transform=lambda v, held=held: v + held)(XS)
        alive.append(weakref.ref(held))
    del held
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= 64


def test_errors_of_the_users_are_raised_in_the_first_trace():
    traces = []

    def fn(x):
        traces.append(x)
        sow(jnp.sin(x), "h")
        raise ValueError("of the user's")

    for f in (fn, jax.grad(fn)):
        traces.clear()
        with pytest.raises(ValueError, match="of the user's"):
            S(f)(1.0)
        assert len(traces) == 1


def _widening(inside):
    """Of a pair, one leaf goes into a loop that has no gradient, and needs none."""
    inner = inside(lambda x, y: sow((jnp.sin(x), y), "h"))

    def fn(x, z):
        x, y = inner(x, z)
        return x * lax.while_loop(lambda y: y < 3, lambda y: 2 * y, y)

    return fn


_KEEPERS = {
    **pick("jit", "jit-jit", "checkpoint"),
    "scan": lambda fn: jax.jit(
        lambda *xs: lax.scan(lambda c, _: (fn(*c), None), xs, length=2)[0]
    ),
    "cond": lambda fn: jax.jit(
        lambda *xs: lax.cond(xs[1] > 0, fn, lambda *xs: xs, *xs)
    ),
}


@pytest.mark.parametrize("inside", _KEEPERS.values(), ids=_KEEPERS)
def test_a_value_that_was_widened_in_a_trace_that_jax_kept(inside):
    fn = _widening(inside)
    want = jax.grad(fn)(0.5, 1.0)
    for f in (fn, fn, lambda x, z: 2 * fn(x, z)):
        out, got = S(jax.grad(f))(0.5, 1.0)
        np.testing.assert_allclose(out, want if f is fn else 2 * want, rtol=1e-5)
        assert {"primal", "cotangent"} <= set(got["h"])


def test_a_value_that_was_widened_in_another_program():
    """An error of the user is raised in the first trace, whatever there was before."""
    before, other, traces = _widening(jax.jit), jax.jit(jnp.add), []
    S(jax.grad(before))(0.5, 1.0)

    def wrong(x, z):
        traces.append(x)
        raise ValueError(f"of the user's: {(before if z else other)(x, 1.0)}")

    # What it calls before the error may be why there is one.
    for z, n in ((0, 1), (1, 2)):
        traces.clear()
        with pytest.raises(ValueError, match="of the user's"):
            S(jax.grad(lambda x, z=z: wrong(x, z)))(1.0)
        assert len(traces) == n


@pytest.mark.parametrize(
    "options", [{}, dict(static_argnames="n"), dict(keep_unused=True, donate_argnums=0)]
)
def test_compiler_options_are_those_of_the_program_that_runs(options):
    given = {"xla_embed_ir_in_executable": True}
    jitted = jax.jit(
        lambda x, n=2: n * sow(jnp.sin(x), "h"), compiler_options=given, **options
    )
    more = {"n": 3} if "static_argnames" in options else {}
    out, got = S(jitted)(jnp.array(1.0), **more)
    np.testing.assert_allclose(out, more.get("n", 2) * got["h"]["primal"])
    out = plant(jitted, {"h": jnp.array(5.0)})(jnp.array(1.0), **more)
    assert out == 5 * more.get("n", 2)
    wrong = jax.jit(lambda x: sow(x, "h"), compiler_options={"no_such_option": True})
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        S(wrong)(1.0)
    with pytest.raises(ValueError, match="can only be passed to top-level") as caught:
        S(lambda x: jitted(x))(1.0)
    assert any("outermost `jax.jit`" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("transformed", [S, lambda f: plant(f, {"h": 1.0})])
def test_a_transformed_function_is_equal_to_itself(transformed):
    """Its arrays are not compared: while another program is traced, nothing can be."""
    fn = transformed(eqx.nn.Linear(3, 3, key=jax.random.key(0)))
    assert (fn == fn) is True
    assert len(jax.make_jaxpr(lambda x: x if fn == fn else 2 * x)(1.0).eqns) == 0
