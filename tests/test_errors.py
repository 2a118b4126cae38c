"""What errors say."""

import functools
import re
import warnings

import equinox as eqx
import eqx_sow
import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_sow import (
    _frames,
    Append,
    batched,
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

from .helpers import Encoder
from .tables import under


pytestmark = pytest.mark.sample(1)


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


@under("eager", "jit", "checkpoint", "vmap")
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


def test_a_scope_does_not_look_like_a_backward_pass():
    def fn(x):
        first = sow(jnp.sin(x), "h")
        with jax.named_scope("transpose"):
            return first + sow(jnp.sin(x), "h")

    with pytest.raises(DuplicateSowError):
        S(fn)(X)


def test_duplicate_by_a_function_called_twice(call):
    inner = jax.jit(lambda x: sow(x * 2, "h"))
    with pytest.raises(DuplicateSowError, match="`h` marks more than one value"):
        call(S(lambda x: inner(inner(x))), X)


@pytest.mark.parametrize(
    "run, what",
    [
        (lambda f: S(f, transform=lambda x: x.nothing)(X), "as `transform`"),
        (lambda f: S(f, reduce=Fold(0.0, lambda acc, x: x.nothing))(X), "as `reduce`"),
        (lambda f: plant(f, {"h": lambda x: x.nothing})(X), "you planted"),
    ],
)
def test_errors_of_a_users_function_say_which_sow(run, what):
    fn = lambda x: lax.map(lambda x: sow(x, "h"), x)
    with pytest.raises(AttributeError) as info:
        run(fn)
    (note,) = [n for n in info.value.__notes__ if what in n]
    assert "'h'" in note and "test_errors.py" in note


def test_an_error_of_a_transform_says_what_it_gets():
    fn = lambda x: jax.vmap(lambda x: sow(jnp.sin(x), "h"))(x)
    for transform, got in (
        (lambda x: x.mean(axis=1), "f32[3], the value of one lane"),
        (batched(lambda x: x.mean(axis=2)), "f32[2,3]."),
    ):
        with pytest.raises(IndexError) as info:
            S(fn, transform=transform)(jnp.ones((2, 3)))
        (note,) = [n for n in info.value.__notes__ if "as `transform`" in n]
        assert f"It was called with {got}" in note
        assert ("`batched(fn)`" in note) == ("lane" in got)


def test_an_error_of_a_planted_function_says_that_it_sees_one_lane():
    fn = lambda x: jax.vmap(lambda x: sow(jnp.sin(x), "h"))(x)
    with pytest.raises(IndexError) as info:
        plant(fn, {"h": lambda x: x.at[0].set(0)})(X)
    (note,) = [n for n in info.value.__notes__ if "you planted" in n]
    assert (
        "called with f32[], the value of one lane" in note and "`batched(fn)`" in note
    )
    with pytest.raises(IndexError) as info:
        plant(lambda x: sow(x, "h"), {"h": lambda x: x.at[0, 0].set(0)})(X)
    (note,) = [n for n in info.value.__notes__ if "you planted" in n]
    assert "lane" not in note


def test_a_planted_function_of_two_arguments_without_with_index():
    fn = lambda x: lax.map(lambda x: sow(x, "h"), x)
    late = lambda v, i: jnp.where(i[0] > 0, v, jnp.zeros_like(v))
    for planted in (late, batched(late)):
        with pytest.raises(TypeError) as info:
            plant(fn, {"h": planted})(X)
        (note,) = [n for n in info.value.__notes__ if "that you planted" in n]
        assert note.endswith("Pass `with_index=True` to call it with `(value, index)`.")
        plant(fn, {"h": planted}, with_index=True)(X)


def test_a_when_of_two_arguments_without_extra():
    fn, note = lambda x: sow(x, "h"), "`extra` is None, as no `extra=` was passed"
    when = lambda x, extra: extra["step"] > 0
    with pytest.raises(TypeError) as info:
        tap(fn, lambda event: None, when=when)(X)
    assert any(note in n for n in info.value.__notes__)
    tap(fn, lambda event: None, when=when, extra={"step": 1})(X)
    # Not if the predicate does not ask for it, or it is there.
    for predicate, extra in ((lambda x: x["step"], None), (when, {})):
        with pytest.raises((TypeError, KeyError, IndexError)) as info:
            tap(fn, lambda event: None, when=predicate, extra=extra)(X)
        assert not any(note in n for n in info.value.__notes__)


class _Scale(eqx.Module):
    weight: jax.Array
    sow: Sow = Sow()

    def __call__(self, x):
        return self.weight * x

    def half(self, x):
        return self.sow(self.weight * x / 2)


@jax.jit
def double(x):
    return x * 2


def _raises(*_):
    raise ValueError("no")


@pytest.mark.parametrize(
    "raising, says",
    [
        (lambda fn, name, **k: plant(fn, {name: X[:1]}, **k), "the value for "),
        (lambda fn, name, **k: plant(fn, {name: _raises}, **k), "planted, for "),
        (lambda fn, name, **k: plant(fn, {name: lambda _: None}, **k), "function for "),
        (lambda fn, name, **k: S(fn, transform={name: _raises}, **k), "form`, for "),
        (
            lambda fn, name, **k: S(fn, reduce={name: Fold(1.0, _raises)}, **k),
            "as `reduce`, for ",
        ),
        (lambda fn, name, **k: tap(fn, names=name, when=jnp.isnan, **k), "for "),
        (lambda fn, name, **k: tap(fn, _raises, names=name, **k), "ror: no, for "),
    ],
)
@pytest.mark.parametrize(
    "fn, name, options, said",
    [
        (lambda m, x: m(x), "m", {}, "output of `m` (a `_Scale`, called at "),
        (lambda m, x: m(x), "m.inputs", dict(inputs=True), "inputs of `m` (a `_Sca"),
        (lambda m, x: m(x), "m.call", dict(calls=True), "call of `m` (a `_Scale`, "),
        (lambda m, x: m.half(x), "m.half", dict(methods="half"), "output of `m.half` "),
        (lambda m, x: double(x), "double", dict(capture=double), "(the function `dou"),
        (lambda m, x: m.half(x), "m/sow", {}, "layer `Sow()` at `m/sow` (cal"),
    ],
)
def test_what_nobody_sowed_is_not_called_that(raising, says, fn, name, options, said):
    with pytest.raises(Exception) as info:
        call = raising(fn, name, **dict(capture=_Scale) | options)
        jax.block_until_ready(call(_Scale(X), X))
    text = "\n".join([str(info.value), *getattr(info.value, "__notes__", ())])
    assert re.search(rf"{re.escape(says)}the .*?{re.escape(said)}.*test_errors", text)
    assert "sow(..." not in text


def test_it_begins_a_sentence():
    fn = lambda m, x: lax.reduce(x, 0.0, lambda a, b: double(a) + b, (0,))
    with pytest.raises(UnsupportedPrimitiveError, match="^The output of `double` .the"):
        S(fn, capture=double)(_Scale(X), X)


def test_not_a_duplicate(call):
    one = lambda x: sow(x, "n", tag="one")
    _, got = call(S(lambda x: sow(2 * one(x), "n")), X)
    np.testing.assert_array_equal(got["n"]["primal"], 2 * X)
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


def test_a_name_that_has_another_tag(call):
    def f(x):
        return sow(sow(x, "h"), "size", tag="metrics")

    asked = (
        S(f, names="size"),
        S(f, names="s*e"),
        plant(f, {"size": X}),
        tap(f, names="size"),
    )
    for fn in asked:
        with pytest.raises(UnknownSowError, match="has the tag 'metrics'") as info:
            call(fn, X)
        assert "capture=True" not in str(info.value)
    with pytest.raises(UnknownSowError, match=r"`capture=True`"):
        call(S(f, names="nope"), X)


@pytest.mark.parametrize("names", [["head", "nope*"], lambda name: False])
def test_every_pattern_has_to_select(call, names):
    with pytest.raises(UnknownSowError, match="selects no mark"):
        call(S(_layers, names=names), X)


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
    match = f"modes=.*no selected mark of this program has. The modes .*: {there}"
    with pytest.raises(UnknownSowError, match=match):
        transform(fn, modes=modes)(X)


def test_mode_that_only_another_name_has(call):
    grad = jax.grad(lambda x: (sow(x, "h") + sow(jnp.ones(3), "constant")).sum())
    _, got = call(S(grad, names="h", modes="cotangent"), X)
    assert set(got["h"]) == {"cotangent"}
    with pytest.raises(UnknownSowError, match="'cotangent' is a mode that no"):
        call(S(grad, names="constant", modes="cotangent"), X)


def test_forgotten_capture():
    model = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    for fn, args in (
        (plant(model, {"layers/1": lambda y: y}), (X,)),
        (S(model, names="layers/1"), (X,)),
        (tap(model, names="layers/*"), (X,)),
        (S(eqx.filter_jit(model), names="layers/1"), (X,)),
        (S(lambda m, x: m(x), reduce={"m/layers/1": Last()}), (model, X)),
        (plant(lambda x: model(sow(x, "h")), {"model": jnp.sin}), (X,)),
    ):
        with pytest.raises(UnknownSowError, match="Did you mean `capture=True`"):
            fn(*args)
    with pytest.raises(UnknownSowError) as info:
        S(model, names="layers/7", capture=eqx.nn.Linear)(X)
    assert "capture" not in str(info.value)


class _Marked(eqx.Module):
    def __call__(self, x):
        return sow(x, "h")


def test_forgotten_scope():
    fn = lambda first, x: first(x)
    for call in (
        S(fn, names="first/h"),
        plant(fn, {"first/h": jnp.sin}),
        tap(fn, names="first/*"),
    ):
        with pytest.raises(UnknownSowError, match="`scope=True` puts the path"):
            call(_Marked(), X)


@pytest.mark.parametrize("name", ["layer/1", "m/layers/1", "args/0/layers/1"])
def test_a_name_for_a_model_that_is_passed_in_another_way(name):
    model = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    with pytest.raises(UnknownSowError, match="Did you mean 'model/layers/1'"):
        S(lambda model, x: model(x), names=name, capture=True)(model, X)
    assert list(
        S(lambda model, x: model(x), names="**/layers/1", capture=True)(model, X)[1]
    ) == ["model/layers/1"]


@pytest.mark.parametrize("index", [12, -13])
def test_an_index_that_a_list_does_not_have(index):
    model = eqx.nn.MLP(3, 2, 4, 11, key=jax.random.key(0))
    name = f"layers/{index}"
    match = "from 'layers/0' to 'layers/11', the last one"
    known = S(model, names="layers/11", capture=True)(X)[1]
    assert list(known) == ["layers/11"]
    for fn in (
        S(model, names=name, capture=True),
        tap(model, names=name, capture=True),
        plant(model, {name: jnp.sin}, capture=True),
    ):
        with pytest.raises(UnknownSowError, match=match) as info:
            fn(X)
        assert "Did you mean" not in str(info.value)


def test_an_iteration_in_names():
    fn = lambda x: lax.map(lambda x: sow(x, "h/a"), x)
    with pytest.raises(UnknownSowError, match="There is no such iteration of 'h/a'"):
        S(fn, names="h/a/9")(X)
    with pytest.raises(UnknownSowError, match="Did you mean 'h/a/1'"):
        plant(fn, {"h/1/a": jnp.sin})(X)


def test_a_name_that_runs_three_times():
    inner = jax.jit(lambda x: sow(x * 2, "h"))
    with pytest.raises(DuplicateSowError, match="which runs more than once"):
        S(lambda x: inner(inner(inner(x))))(X)


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


def test_a_loss_on_what_was_captured_in_a_loop_of_equinox():
    def fn(x, loop=functools.partial(eqx.internal.while_loop, max_steps=8)):
        grow = lambda x: sow(2 * x, "h")
        return loop(lambda x: x.sum() < 9, grow, x, kind="checkpointed").sum()

    captured = lambda x: S(fn)(x)[1]["h"]["primal"].sum()
    planted = lambda x: plant(fn, {"h": jnp.sin})(x)
    for loss in (captured, planted):
        with pytest.raises(ValueError, match="Reverse-mode") as info:
            jax.grad(loss)(X)
        assert "adjoint=diffrax.DirectAdjoint()" in info.value.__notes__[0]
    with pytest.raises(ValueError, match="Reverse-mode") as info:
        jax.grad(lambda x: lax.while_loop(lambda x: x < 9, lambda x: 2 * x, x))(1.0)
    assert "eqx_sow" not in "".join(info.value.__notes__)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x if x.sum() > 0 else -x,
        lambda x: float(x[0]),
        lambda x: np.asarray(x),
        lambda x: range(3)[x.astype(int)[0]],
    ],
)
@pytest.mark.parametrize("run", [S, jax.jit, lambda fn: S(lambda x: S(fn)(x))])
def test_the_value_of_an_array_is_not_known(fn, run):
    errors = jax.errors.JAXTypeError
    with pytest.raises(errors) as info:
        run(fn)(X)
    notes = [n for n in getattr(info.value, "__notes__", ()) if "eqx_sow traces" in n]
    assert len(notes) == (run is not jax.jit)


@pytest.mark.parametrize(
    "gradient",
    [
        jax.grad,
        jax.value_and_grad,
        eqx.filter_grad,
        eqx.filter_value_and_grad,
        lambda fn: jax.jit(jax.grad(fn)),
        lambda fn: lambda x: jax.vmap(jax.grad(fn))(x[None]),
    ],
)
def test_the_gradient_of_a_loss_and_what_was_captured(gradient):
    def loss(x):
        return sow(jnp.sin(x), "h").sum()

    with pytest.raises(TypeError, match="scalar-output") as info:
        gradient(S(loss))(X)
    message = str(info.value)
    assert "{'h': {'primal': f32[3]}}\nThis is the output of `save_inter" in message
    # Both of what it says to write are right.
    inside, outside = re.findall("`([^`]*loss[^`]*)`", message)
    names = dict(eqx=eqx, save_intermediates=S, loss=loss)
    for code in (inside, outside):
        grads, intermediates = eval(code, names)(X)
        np.testing.assert_allclose(grads, np.cos(X), rtol=1e-6)
        assert "This is" not in repr(intermediates)


def test_other_errors_do_not_speak_of_gradients():
    try:
        jax.grad(lambda x: (x, x))(1.0)
    except TypeError:
        assert "This is" not in repr(S(lambda x: sow(x, "h"))(X)[1])


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: S(_layers, X), "write `save_intermediates(fn)(x)`"),
        (lambda: S(_layers, x=X), "write `save_intermediates(fn)(x)`"),
        (lambda: plant(_layers, {}, X), r"write `plant(fn, values)(x)`"),
        (lambda: tap(_layers, print, X), r"write `tap(fn)(x)`"),
        (lambda: S(_layers, captrue=True), "Did you mean `capture`?"),
        (lambda: S(_layers, capture=jnp.add), "`jnp.add`, a ufunc, cannot be captured"),
        (lambda: S(_layers, capture=(eqx.Module, jnp.add)), "decorate that with `jax."),
    ],
)
def test_a_wrong_call(call, says):
    with pytest.raises(TypeError) as info:
        call()
    assert says in str(info.value)


class _Methods(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return self.w * x + self.double

    @property
    def double(self):
        return 2 * self.w

    async def later(self, x):
        return x

    def each(self, x):
        yield x

    @staticmethod
    def static(x):
        return x

    @classmethod
    def of_class(cls, x):
        return x


@pytest.mark.parametrize(
    "method, what",
    [
        ("double", "a property"),
        ("later", "an async method"),
        ("each", "a generator"),
        ("static", "a static method"),
        ("of_class", "a class method"),
    ],
)
def test_what_is_no_method_that_can_be_captured(method, what):
    fn = lambda m, x: m(x) + m.static(next(m.each(x))) + _Methods.static(m.of_class(x))
    with pytest.raises(UnknownSowError, match=f"`_Methods.{method}` is {what}"):
        S(fn, capture=_Methods, methods=method)(_Methods(X), X)
    # A module of another class may have a method of that name.
    both = lambda m, e, x: fn(m, x) + e.encode(x)
    got = S(both, capture=True, methods=("encode", "__call__"))(
        _Methods(X), Encoder(X), X
    )
    assert list(got[1]) == ["m", "e.encode"]


def _once(x):
    return sow(x, "h")


def _on_two_lines(x):
    x = _once(x)
    return _once(x)


def test_a_duplicate_tells_where_and_what_helps():
    one, inner, first = eqx.nn.Lambda(jnp.sin), jax.jit(_once), _once.__code__
    line, calls = first.co_firstlineno + 1, _on_two_lines.__code__.co_firstlineno
    in_a_loop = lambda x: [_once(x) for _ in range(3)]
    for fn, says, says_not in (
        (
            _on_two_lines,
            f":{line}, which .*:{calls + 1} and .*:{calls + 2} call",
            "line",
        ),
        (in_a_loop, f":{line}, which runs more than once(?s:.*)step{{i}}", " call. "),
        (lambda x: inner(inner(x)), f":{line}, which runs more than once", "step"),
        (lambda x: sow(sow(x, "h"), "h"), "twice in the line", "more than once,"),
        (eqx.nn.Sequential([Sow("h"), Sow("h")]), "by two layers `Sow", "step"),
        (lambda x: sow(sow(x, "a/b"), "a/b"), "`scope=True` begins them", "step"),
    ):
        with pytest.raises(DuplicateSowError, match=says) as info:
            S(fn)(X)
        assert says_not not in str(info.value)
    with pytest.raises(DuplicateSowError, match="a `sow` has this name: choose with"):
        S(lambda layer, x: sow(layer(x), "layer"), capture=True)(one, X)


def test_a_gradient_that_may_be_that_of_either_of_two_modules():
    layers = [eqx.nn.Linear(3, 3, key=k) for k in jax.random.split(jax.random.key(0))]
    call = eqx.filter_jit(lambda layer, x: layer(x))

    def loss(layers, x):
        one, two = layers
        return lax.cond(x[0] > 0, lambda: call(one, x), lambda: call(two, x)).sum()

    # In some lanes the one branch runs and in some the other, and of the function that
    # both of them call there is one derivative.
    batch = jax.vmap(jax.grad(loss, argnums=1), (None, 0))
    xs = jnp.stack([X, -X])
    message = "cannot tell which module .* 'layers/0' or 'layers/1'"
    with pytest.raises(SowError, match=message):
        S(batch, capture=True)(layers, xs)
    _, values = S(batch, capture=True, modes="primal")(layers, xs)
    assert values.keys() == {"layers/0", "layers/1"}
    assert "cotangent" in S(jax.grad(loss), capture=True)(layers, X)[1]["layers/0"]


def test_a_cotangent_of_a_module_that_never_ran_forward():
    linear = eqx.nn.Linear(3, 3, use_bias=False, key=jax.random.key(0))
    transposed = lambda m, x: jax.linear_transpose(m, x)(x)
    with pytest.raises(SowError, match="cannot tell .* that of Linear.__call__. Diff"):
        S(transposed, capture=True)(linear, X)


# --- warnings ---


def _unmarked():
    class Scaled(eqx.Module):
        scale: float

        def __call__(self, x):
            return self.scale * x

    def loss(model, x):
        return model(x).sum()

    return Scaled(2.0), loss


@pytest.mark.parametrize("call", [S, tap])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda run, fn: run(fn),
        lambda run, fn: eqx.filter_jit(run(eqx.filter_grad(fn))),
        lambda run, fn: run(eqx.filter_jit(fn)),
    ],
)
def test_nothing_is_marked(call, wrap, monkeypatch):
    monkeypatch.setattr(_frames, "_warned", set())
    name = "save_intermediates" if call is S else "tap"
    model, fn = _unmarked()
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for _ in range(3):
            # As in a loop of training: made anew in each step, of another model.
            model = eqx.tree_at(lambda m: m.scale, model, model.scale + 1)
            wrap(call, fn)(model, X)
            call(model)(X)
    of_loss, of_model = record
    said = f"`{name}` found no mark in `{{}}`. Pass `capture=True`"
    assert said.format("loss") in str(of_loss.message)
    assert said.format("Scaled") in str(of_model.message)
    assert of_loss.category is UserWarning
    assert of_loss.filename == of_model.filename == __file__
    assert of_model.lineno == of_loss.lineno + 1


def test_a_warning_that_is_an_error_is_one_each_time():
    model, _ = _unmarked()
    for _ in range(2):
        with pytest.raises(UserWarning, match="found no mark"):
            S(model)(X)
        with pytest.raises(UserWarning, match="found no mark"):
            S(model, scope=True, reduce=Last(), transform=jnp.sum)(X)
        with pytest.raises(UserWarning, match=r"`jax.vjp` or .* has lost its marks"):
            S(jax.vjp(lambda x: sow(x, "h"), X)[1])(X)


@pytest.mark.parametrize("call", [S, tap])
def test_marks_that_were_taken_inside(call):
    of_another_tag = S(lambda x: sow(x, "h", tag="another"), tag="another")
    for fn in (
        S(lambda x: sow(x, "h")),
        lambda x: of_another_tag(S(lambda x: sow(x, "h"))(x)[0]),
        S(jax.nn.relu, capture=jax.nn.relu),
    ):
        with pytest.raises(UserWarning, match="inside `fn` takes the marks"):
            call(fn)(X)
    with pytest.raises(UserWarning, match=r"found no mark in .*\. Pass"):
        call(of_another_tag)(X)


@pytest.mark.parametrize(
    "call", [S, functools.partial(tap, callback=lambda event: None)]
)
def test_all_marks_have_another_tag(call):
    fn = lambda x: sow(sow(sow(x, "h"), "i", tag="debug"), "j")
    said = r"the tag 'debgu' in `<lambda>`.* tags there are: 'intermediates', 'debug'"
    with pytest.raises(UserWarning, match=said):
        call(fn, tag="debgu")(X)
    taken = lambda x: S(fn, tag="debug")(x)[0]
    with pytest.raises(UserWarning, match=r"tag 'debug' .* are: 'intermediates'\."):
        call(taken, tag="debug")(X)


@pytest.mark.parametrize(
    "run",
    [
        lambda model, fn: S(model, capture=True),
        lambda model, fn: S(lambda x: sow(fn(model, x), "")),
        lambda model, fn: tap(lambda x: sow(fn(model, x), ""), lambda event: None),
        lambda model, fn: S(lambda x: sow(fn(model, x), "h")),
        lambda model, fn: S(tap(lambda x: sow(fn(model, x), "h"), lambda event: None)),
        lambda model, fn: S(model, names=[]),
        lambda model, fn: plant(lambda x: sow(model(x), "h"), {"h": jnp.sin}),
    ],
)
def test_no_warning(run):
    # Any would be an error.
    run(*_unmarked())(X)


@pytest.mark.parametrize("around", [jax.jit, jax.checkpoint, lambda step: step])
def test_an_error_in_a_loop_is_all_that_is_said(around):
    def step(x, _):
        return sow(sow(x, "h") + 1, "h"), None

    with pytest.raises(DuplicateSowError) as error:
        S(lambda x: lax.scan(around(step), x, None, length=3))(1.0)
    assert error.value.__cause__ is None


@pytest.mark.parametrize(
    "fn, options, says",
    [
        (lambda x: sow((x, lambda: x), "h"), {}, "is the function `<lambda>`,"),
        (lambda x: sow((x, {"f": print, "x": [_Holds(x)]}), "h"), {}, "`_Holds`,"),
        (_twice, dict(capture=jax.ShapeDtypeStruct((2,), "float32")), "not f32[2]."),
    ],
    ids=["function", "object", "shape"],
)
def test_an_object_is_said_in_short(fn, options, says):
    with pytest.raises(TypeError, match=re.escape(says).replace("<lambda>", ".*")):
        S(fn, **options)(X)


class _Holds:
    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("capture", [eqx.nn.MLP, lambda path, module: False])
def test_what_a_predicate_is_called_with(capture):
    """That is said if there is one."""
    linear = eqx.nn.Linear(3, 3, key=jax.random.key(0))
    with pytest.raises(UnknownSowError) as caught:
        S(linear, capture=capture)(X)
    assert ("A predicate is called" in str(caught.value)) == (capture is not eqx.nn.MLP)


def test_an_entry_of_a_name_that_runs_once():
    """A cotangent is no second run."""
    fn = jax.grad(lambda x: sow(jnp.sin(x), "h").sum())
    for f in (fn, lambda x: _twice(x).sum()):
        with pytest.raises(UnknownSowError) as caught:
            plant(f, {"name[1]" if f is not fn else "h[1]": X})(X)
        assert ("selects no mark" in str(caught.value)) == (f is fn)
