"""What errors say."""

import equinox as eqx
import eqx_sow
import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_sow import (
    Append,
    DuplicateSowError,
    Fold,
    Last,
    plant,
    save_intermediates as S,
    Sow,
    sow,
    SowError,
    tap,
    UnknownSowError,
    UnsupportedPrimitiveError,
)
from jax import lax


X = jnp.ones(3)


def _twice(x):
    a = sow(x, "name")
    b = sow(a * 2, "name")
    return b


def _layers(x):
    return sow(sow(sow(x, "layers/0"), "layers/1"), "head")


def test_hierarchy():
    for error, base in (
        (eqx_sow.DuplicateSowError, ValueError),
        (eqx_sow.UnknownSowError, ValueError),
        (eqx_sow.SowTypeError, TypeError),
        (eqx_sow.UnsupportedPrimitiveError, NotImplementedError),
    ):
        assert issubclass(error, SowError) and issubclass(error, base)
        assert error.__module__ == "eqx_sow" and error.__doc__


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint, jax.vmap])
def test_duplicate(call, wrap):
    line = _twice.__code__.co_firstlineno
    with pytest.raises(DuplicateSowError, match="`name`") as info:
        call(S(wrap(_twice)), X)
    message = str(info.value)
    for part in (f"test_errors.py:{line + 1}", f"test_errors.py:{line + 2}"):
        assert part in message
    assert "Append()" in message and "Last()" in message


@pytest.mark.parametrize("scope", ["transpose(x)", "conv_transpose(3x3)", "jvp()"])
def test_a_scope_does_not_hide_a_duplicate(scope):
    def fn(x):
        x = sow(jnp.sin(x), "h")
        with jax.named_scope(scope):
            return sow(jnp.sin(x), "h")

    with pytest.raises(DuplicateSowError):
        S(fn)(X)
    first, second = S(fn, reduce=Append())(X)[1]["h"]["primal"]
    np.testing.assert_allclose(second, np.sin(first))


def test_duplicate_by_a_function_called_twice(call):
    inner = jax.jit(lambda x: sow(x * 2, "h"))
    with pytest.raises(DuplicateSowError, match="`h` is sown twice"):
        call(S(lambda x: inner(inner(x))), X)


@pytest.mark.parametrize(
    "run, what",
    [
        (lambda f: S(f, transform=lambda x: x.nothing)(X), "transform"),
        (lambda f: S(f, reduce=Fold(0.0, lambda acc, x: x.nothing))(X), "reducer"),
        (lambda f: plant(f, {"h": lambda x: x.nothing})(X), "planted function"),
    ],
)
def test_errors_of_a_users_function_say_which_sow(run, what):
    fn = lambda x: lax.map(lambda x: sow(x, "h"), x)
    with pytest.raises(AttributeError) as info:
        run(fn)
    (note,) = [n for n in info.value.__notes__ if what in n]
    assert "'h'" in note and "test_errors.py" in note


def test_planted_cotangent_where_there_is_none():
    with pytest.raises(UnknownSowError, match="is sown, but has no cotangent"):
        plant(lambda x: sow(x, "h"), {"h": lambda x: x}, mode="cotangent")(X)


def test_not_a_duplicate(call):
    one = lambda x: sow(x, "n", tag="one")
    _, got = call(S(lambda x: sow(2 * one(x), "n")), X)
    np.testing.assert_array_equal(got["n"]["primal"], 2 * X)
    assert call(S(_twice, tag="another"), X)[1] == {}
    _, got = call(S(_twice, reduce=Append()), X)
    np.testing.assert_array_equal(got["name"]["primal"], (X, 2 * X))
    _, got = call(S(_twice, reduce={"name": Last()}), X)
    np.testing.assert_array_equal(got["name"]["primal"], 2 * X)


@pytest.mark.parametrize("option", ["names", "reduce", "transform", "spec"])
def test_unknown_name(call, option):
    what = {
        "names": "layer/0",
        "reduce": {"layer/0": Last()},
        "transform": {"layer/0": jnp.sum},
        "spec": {"layer/0": object},
    }[option]
    with pytest.raises(UnknownSowError, match=f"{option}.*'layer/0'") as info:
        call(S(_layers, **{option: what}), X)
    message = str(info.value)
    assert "'layers/0', 'layers/1', 'head'" in message
    assert "Did you mean 'layers/0'" in message


def test_unknown_name_of_a_program_without_sows(call):
    with pytest.raises(UnknownSowError, match="none at all"):
        call(S(jnp.sin, names="a"), X)


@pytest.mark.parametrize("names", [["head", "nope*"], lambda name: False])
def test_every_pattern_has_to_select(call, names):
    with pytest.raises(UnknownSowError, match="selects no sow"):
        call(S(_layers, names=names), X)


@pytest.mark.parametrize("name", [3, None, ("a",)])
def test_name_is_a_string(call, name):
    with pytest.raises(TypeError, match="takes a string as name"):
        call(S(lambda x: sow(x, name)), X)


def test_tag_is_hashable(call):
    with pytest.raises(TypeError, match="'a'.*hashable tag"):
        call(S(lambda x: sow(x, "a", tag=[1])), X)
    with pytest.raises(TypeError, match="hashable"):
        S(_layers, tag=[1])
    with pytest.raises(TypeError, match="hashable"):
        Sow(tag=[1])


@pytest.mark.parametrize("modes", ["primals", "tangent.primal", ["primal", ""], [3], 3])
def test_no_such_mode(modes):
    with pytest.raises(ValueError, match="save_intermediates.*modes=.* is not a mode"):
        S(_layers, modes=modes)


@pytest.mark.parametrize("transform", [S, lambda f, **k: tap(f, print, **k)])
@pytest.mark.parametrize(
    "fn, modes, there",
    [
        (_layers, "cotangent", "'primal'"),
        (_layers, ("primal", "tangent"), "'primal'"),
        (jnp.sin, "primal", "none at all"),
        (jax.grad(lambda x: sow(x, "h").sum()), "tangent", "'primal', 'cotangent'"),
    ],
)
def test_mode_that_no_name_has(transform, fn, modes, there):
    match = f"modes=.*no selected sow of this program has. The modes there are: {there}"
    with pytest.raises(UnknownSowError, match=match):
        transform(fn, modes=modes)(X)


def test_mode_that_only_another_name_has(call):
    grad = jax.grad(lambda x: (sow(x, "h") + sow(jnp.ones(3), "constant")).sum())
    _, got = call(S(grad, names="h", modes="cotangent"), X)
    assert set(got["h"]) == {"cotangent"}
    with pytest.raises(UnknownSowError, match="'cotangent' is a mode that no"):
        call(S(grad, names="constant", modes="cotangent"), X)


@pytest.mark.parametrize("mode", [None, "primals", ["primal"]])
def test_no_such_mode_to_plant(mode):
    with pytest.raises(ValueError, match="plant.*mode"):
        plant(_layers, {"a": X}, mode=mode)


def test_planted_values_of_another_form():
    for value in (jnp.ones(7), (X,)):
        with pytest.raises(SowError, match=r"'a'\)` at .*test_errors.py:\d+ has"):
            plant(lambda x: sow(x, "a"), {"a": value})(X)
    twice = plant(lambda x: sow(x, "a") + sow(2 * x, "a"), {"a": X})
    with pytest.raises(DuplicateSowError, match="or plant a function"):
        twice(X)


@pytest.mark.parametrize(
    "option, value",
    [
        ("names", 3),
        ("names", (3,)),
        ("reduce", "last"),
        ("transform", 3),
        ("spec", [1]),
        ("capture", "layers/0"),
        ("capture", [eqx.nn.Linear]),
        ("capture", eqx.nn.Identity()),
        ("methods", 3),
        ("methods", ["encode", 3]),
        ("inputs", "yes"),
        ("scope", 1),
        ("reduce", {0: Last()}),
        ("transform", {0: jnp.sum}),
        ("spec", {("a",): object}),
    ],
)
def test_options_of_a_wrong_type(option, value):
    with pytest.raises(TypeError, match=f"save_intermediates.*{option}"):
        S(_layers, **{option: value})


@pytest.mark.parametrize(
    "fn",
    [
        lambda: S(_layers, inputs=True),
        lambda: S(_layers, methods="encode"),
        lambda: plant(_layers, {}, methods="encode"),
    ],
)
def test_options_that_do_nothing_without_capture(fn):
    with pytest.raises(ValueError, match="without `capture`"):
        fn()


def test_keys_that_are_no_names():
    with pytest.raises(TypeError, match="plant.*values=.*and 0 is neither"):
        plant(_layers, {0: X})
    with pytest.raises(
        TypeError, match="save_intermediates.*reduce=.*and 0 is neither"
    ):
        S(_layers, reduce={0: Last()})


def test_message_says_which_key():
    with pytest.raises(TypeError, match="reduce.*not 'last' for 'head'"):
        S(_layers, reduce={"layers/0": Last(), "head": "last"})


def test_fold_that_changes_a_shape_names_the_sow():
    fold = Fold(jnp.zeros(()), lambda acc, x: acc + x)
    with pytest.raises(SowError, match=r"'head'\)` at .*test_errors.py:\d+: `fn` must"):
        S(_layers, reduce={"head": fold})(X)


@pytest.mark.parametrize(
    "planted, message",
    [
        (lambda v: None, "returned None; did it forget `return`\\?"),
        (lambda v: v[0], "what the function returned .* Return an array of that shape"),
        (lambda v: (v,), "what the function returned .* Return a value of that struc"),
    ],
)
def test_planted_function_that_returns_something_else(planted, message):
    with pytest.raises(SowError, match=message) as info:
        plant(_layers, {"head": planted})(X)
    assert "or a function" not in str(info.value)
    assert "'head'" in str(info.value)


def test_forgotten_capture():
    model = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    hint = "Nothing is marked here. Did you mean `capture=True`"
    for fn, args in (
        (plant(model, {"layers/1": lambda y: y}), (X,)),
        (S(model, names="layers/1"), (X,)),
        (S(eqx.filter_jit(model), names="layers/1"), (X,)),
        (S(lambda m, x: m(x), reduce={"m/layers/1": Last()}), (model, X)),
        (S(lambda x: model(x), names="model/layers/1"), (X,)),
    ):
        with pytest.raises(UnknownSowError, match=hint):
            fn(*args)
    with pytest.raises(UnknownSowError) as info:
        S(eqx.filter_jit(jnp.sin), names="a")(X)
    assert "none at all" in str(info.value) and "capture" not in str(info.value)


def test_a_name_that_runs_three_times():
    inner = jax.jit(lambda x: sow(x * 2, "h"))
    with pytest.raises(DuplicateSowError, match="which runs more than once"):
        S(lambda x: inner(inner(inner(x))))(X)


def test_not_a_function():
    with pytest.raises(TypeError, match="save_intermediates.*takes a function"):
        S(3)


def _reduce(x):
    return jax.lax.reduce(x, 0.0, lambda a, b: sow(a + b, "inside"), (0,))


def test_unsupported_primitive(call):
    with pytest.raises(UnsupportedPrimitiveError, match="`reduce`") as info:
        call(S(_reduce), X)
    message = str(info.value)
    assert "'inside'" in message and "register_rule" in message
    assert "test_errors.py" in message


def test_sow_in_the_condition_of_a_while_loop(call):
    def f(x):
        cond = lambda c: sow(c[0] < 2, "cond")
        return jax.lax.while_loop(cond, lambda c: c + 1, x)

    with pytest.raises(UnsupportedPrimitiveError, match="'cond'"):
        call(S(f), X)


def test_executed_while_tracing():
    def f(x):
        with jax.ensure_compile_time_eval():
            sow(jnp.ones(2), "early")
        return x

    with pytest.raises(SowError, match="'early'.*only being traced"):
        S(f)(X)


def test_nothing_is_swallowed():
    def f(x):
        return eqx.error_if(sow(x, "a"), True, "from the user")

    with pytest.raises(Exception, match="from the user"):
        S(f)(X)


# --- JAX is not what it was ---


def test_a_part_of_jax_that_has_moved(monkeypatch):
    from eqx_sow import _compat

    monkeypatch.setattr(_compat, "_moved", [])
    assert _compat.find("the fifth wheel", lambda: jax.fifth_wheel, "spare") == "spare"
    with pytest.raises(SowError, match=r"JAX \d.*the fifth wheel \(AttributeError"):
        S(lambda x: sow(x, "a"))(1.0)


def test_a_rule_that_another_library_has_replaced(monkeypatch):
    from jax.interpreters import batching

    table, scan_p = batching.fancy_primitive_batchers, jexc.primitives.scan_p
    monkeypatch.setitem(table, scan_p, lambda *args, **params: None)
    with pytest.raises(SowError, match="`scan`.*Import eqx_sow after"):
        S(lambda x: sow(x, "a"))(1.0)
