"""`eqx_sow.scope`: names are as if they were written out."""

import threading

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_sow import (
    Buffer,
    DuplicateSowError,
    plant,
    save_intermediates as S,
    scope,
    Sow,
    sow,
    SowError,
    tap,
    UnknownSowError,
)

from .helpers import assert_close


X = jnp.array([0.3, -1.2, 0.7])
XS = jnp.stack([X, 2 * X])


def _functions(prefix):
    """Functions with rules, that sow under names that begin so."""

    @jax.custom_jvp
    def sine(x):
        return sow(jnp.sin(x), f"{prefix}sine")

    @sine.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents
        return sine(x), sow(t * jnp.cos(x), f"{prefix}rule")

    @jax.custom_vjp
    def twice(x):
        return sow(2 * x, f"{prefix}twice")

    def fwd(x):
        return sow(2 * x, f"{prefix}fwd"), None

    twice.defvjp(fwd, lambda _, ct: (sow(2 * ct, f"{prefix}bwd"),))
    return sine, twice, jax.jit(lambda x: sow(x / 2, f"{prefix}jitted"))


_PLAIN = _functions("")


def _block(x, prefix="", functions=_PLAIN):
    sine, twice, jitted = functions

    def step(x, _):
        branch = lambda x: sow(sine(x), f"{prefix}branch")
        x = lax.cond(x[0] > 9, jnp.cos, branch, x)
        return sow(x + 1, f"{prefix}step"), None

    x, _ = lax.scan(step, x, length=3)
    grow = lambda x: sow(x + 1, f"{prefix}while")
    y = lax.while_loop(lambda x: x.sum() < 9, grow, lax.stop_gradient(x))
    x = jax.checkpoint(lambda x: sow(twice(x), f"{prefix}kept"))(x)
    return jitted(x + y)


def _scoped(x):
    with scope("first"):
        x = _block(x)
    with scope("second"), scope("inner"):
        return _block(x).sum()


def _written_out(x):
    x = _block(x, "first/", _functions("first/"))
    return _block(x, "second/inner/", _functions("second/inner/")).sum()


def _slow(*args):
    return pytest.param(*args, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "wrap, x",
    [
        (lambda f: f, X),
        _slow(jax.jit, X),
        (jax.grad, X),
        _slow(lambda f: jax.vmap(f), XS),
        _slow(lambda f: jax.vmap(jax.grad(f)), XS),
        _slow(lambda f: jax.grad(jax.checkpoint(f)), X),
        _slow(lambda f: jax.jit(jax.value_and_grad(jax.jit(f))), X),
    ],
    ids=["plain", "jit", "grad", "vmap", "vmap-grad", "grad-checkpoint", "jit-grad"],
)
def test_names_are_as_if_written_out(call, wrap, x):
    # Under `checkpoint`, JAX asks for the rules when the scopes are over.
    out, got = call(S(wrap(_scoped)), x)
    expected_out, expected = call(S(wrap(_written_out)), x)
    assert list(got) == list(expected)
    assert {name.split("/")[0] for name in got} == {"first", "second"}
    assert_close(got, expected)
    assert_close(out, expected_out)


@pytest.mark.slow
def test_a_loop_that_a_backward_pass_replays():
    def loop(x, name):
        grow = lambda x: sow(jnp.sin(x) + 1, name)
        going = lambda x: x.sum() < 9
        return eqxi.while_loop(going, grow, x, max_steps=3, kind="checkpointed")

    def scoped(x):
        with scope("a"):
            x = loop(x, "h")
        with scope("b"):
            return loop(x, "h").sum()

    def written_out(x):
        return loop(loop(x, "a/h"), "b/h").sum()

    saved = S(jax.grad(scoped), reduce=Buffer(4))
    _, expected = S(jax.grad(written_out), reduce=Buffer(4))(X)
    assert_close(saved(X)[1], expected)
    assert set(expected) == {"a/h", "b/h"} and "cotangent" in expected["a/h"]


def test_one_function_compiled_in_two_scopes():
    traces = []

    @jax.jit
    def fn(x):
        traces.append(x)
        return sow(jnp.sin(x), "h")

    def run(x):
        with scope("a"):
            x = fn(x)
        with scope("b"):
            x = fn(x)
        return fn(x)

    fn(X)
    for _ in range(2):
        assert list(S(run)(X)[1]) == ["a/h", "b/h", "h"]
        # Not compiled for the capture, and once for each scope.
        assert len(traces) == 4


def _clean(x):
    return jnp.tanh(x)


def test_off_is_free():
    @scope("dec")
    def decorated(x):
        return jnp.tanh(x)

    def scoped(x):
        with scope("a"), scope("b"):
            return decorated(x)

    text = lambda f: jax.jit(f).lower(X).as_text().replace("scoped", "_clean")
    assert str(jax.make_jaxpr(scoped)(X)) == str(jax.make_jaxpr(_clean)(X))
    assert text(scoped) == text(_clean)


def test_decorator():
    @scope("decorated")
    def fn(x, *, n=1):
        """Text."""
        return sow(n * x, "h") if n == 2 else fn(x, n=2)

    assert fn.__name__ == "fn" and fn.__doc__ == "Text."
    assert list(S(fn)(X)[1]) == ["decorated/decorated/h"]
    assert list(S(jax.jit(fn))(X)[1]) == ["decorated/decorated/h"]
    assert list(S(scope("two")(jax.jit(fn)))(X)[1]) == ["two/decorated/decorated/h"]


class Layer(eqx.Module):
    w: jax.Array
    marks: list[Sow]

    @scope("call")
    def __call__(self, x):
        return self.marks[1](self.marks[0](sow(self.w * x, "h")))


def _layer():
    return Layer(X, [Sow("named"), Sow()])


def test_with_modules():
    def fn(model, x):
        with scope("once"):
            x = model(x)
        with scope("again"):
            return model(x)

    def names(**options):
        return list(S(fn, **options)(_layer(), X)[1])

    def expected(*order):
        return [name.format(s) for s in ("once", "again") for name in order]

    h, named, unnamed = "{}/call/h", "{}/call/named", "{}/call/model/marks/1"
    assert names() == expected(h, named, unnamed)
    # The path of the module, the scopes, the name.
    h, named = "model/{}/call/h", "model/marks/0/{}/call/named"
    assert names(scope=True) == expected(h, named, unnamed)
    # The path is the name of what is captured.
    got = names(capture=Layer, names="*/model")
    assert got == expected("{}/model")
    got = names(capture=Layer, inputs=True, names="*/model.inputs")
    assert got == expected("{}/model.inputs")


def test_a_name_that_marks_two_places_is_told_of_scopes():
    with pytest.raises(DuplicateSowError, match=r"eqx_sow\.scope\(.first.\)"):
        S(lambda x: sow(sow(x, "h"), "h"))(X)


def test_a_model_that_is_never_called_in_a_scope_either():
    def fn(model, other, x):
        with scope("a"):
            return other(sow(x, "h"))

    linear = eqx.nn.Linear(3, 3, key=jr.key(0))
    with pytest.raises(UnknownSowError, match="selects nothing that is called"):
        choose = lambda path, module: path == "model"
        S(fn, capture=choose)(linear, eqx.nn.Lambda(jnp.sin), X)
    assert list(S(fn, capture=eqx.nn.Lambda)(linear, eqx.nn.Lambda(jnp.sin), X)[1]) == [
        "a/h",
        "a/other",
    ]


def test_plant_and_tap_by_scoped_names():
    def fn(x):
        with scope("a"):
            x = sow(x, "h")
        with scope("b"):
            return sow(2 * x, "h")

    assert_close(plant(fn, {"a/h": jnp.zeros_like})(X), 0 * X)
    events = []
    tap(fn, events.append, names="b/*")(X)
    jax.effects_barrier()
    assert [e.name for e in events] == ["b/h"]


def test_transformations_inside_a_scope(call):
    g = lambda x: sow(sow(2 * x, "h"), "metric", tag="other")

    def run(x):
        with scope("first"):
            x = plant(g, {"h": lambda h: h + 1})(x)
        with scope("second"):
            x, inside = S(g, tag="other")(x)
        with scope("third"):
            return jax.vmap(tap(g, lambda event: None))(x), inside

    (out, inside), got = call(S(run), X)
    a = 2 * X + 1
    assert_close(
        got,
        {
            "first/h": {"primal": a},
            "second/h": {"primal": 2 * a},
            "third/h": {"primal": 4 * a},
        },
    )
    assert_close(inside, {"metric": {"primal": 2 * a}})
    assert_close(out, run(X)[0])


def test_a_scope_around_a_capture_is_not_part_of_its_names():
    with scope("outside"):
        assert list(S(lambda x: sow(x, "h"))(X)[1]) == ["h"]


def test_exceptions_leave_the_scope():
    def fn(x):
        with pytest.raises(ZeroDivisionError), scope("a"):
            raise ZeroDivisionError
        return sow(x, "h")

    assert list(S(fn)(X)[1]) == ["h"]


def test_one_object_many_times_and_in_threads():
    a = scope("a")
    barrier = threading.Barrier(2)
    names = {}

    def fn(x):
        with a, scope("b"), a:
            return sow(x, "h")

    def thread(i):
        with a:
            barrier.wait(10)
            sow(X, "h")
            names[i] = list(S(fn)(X)[1])

    threads = [threading.Thread(target=thread, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert names == dict.fromkeys(range(2), ["a/b/a/h"])


def _suspended(x):
    with scope("suspended"):
        yield sow(x, "h")


def test_scopes_that_cross():
    def fn(x):
        one, two = _suspended(x), _suspended(x)
        next(one), next(two)
        list(one)

    with pytest.raises(SowError, match="'suspended'.*before each `yield`"):
        S(fn)(X)
    assert list(S(lambda x: sow(x, "h"))(X)[1]) == ["h"]


def test_a_scope_that_is_left_after_the_capture():
    left = []

    def fn(x):
        left.append(_suspended(x))
        return next(left[0])

    assert list(S(fn)(X)[1]) == ["suspended/h"]
    list(left[0])
    assert sow(X, "h") is X


async def _coroutine():
    pass


def _generator():
    yield


@pytest.mark.sample(1)
@pytest.mark.parametrize("fn", [_coroutine, _generator, Layer, 3])
def test_what_cannot_be_decorated(fn):
    with pytest.raises(TypeError, match="decorates a function"):
        scope("a")(fn)


@pytest.mark.parametrize("name", [None, 3, jnp.sin, ("a",)])
def test_a_scope_has_a_string_as_name(name):
    with pytest.raises(TypeError, match="takes a string"):
        scope(name)
    with pytest.raises(ValueError, match="non-empty"):
        scope("")
