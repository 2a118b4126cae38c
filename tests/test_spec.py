"""Jaxtyping annotations."""

from collections import Counter
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from beartype.vale import Is
from eqx_sow import save_intermediates as S, Sow, sow, SowTypeError
from jaxtyping import Array, Float, Int, Key, PyTree

from tests.helpers import assert_close
from tests.tables import under


pytestmark = pytest.mark.sample(1)


X = jnp.ones(3)
XS = jnp.ones((2, 3))


def test_fits(call):
    f = lambda x: sow(x * 2, "a", spec=Float[Array, "batch dim"])
    assert_close(call(S(f), XS), (XS * 2, {"a": {"primal": XS * 2}}))


@pytest.mark.parametrize(
    "annotation, value",
    [
        (Float[Array, " n"], XS),
        (Int[Array, "b n"], XS),
        (Float[Array, "b 4"], XS),
        (Float[Array, "n n"], XS),
        (dict[str, Float[Array, " n"]], {"a": X, "b": XS}),
        (tuple[Float[Array, " n"], Float[Array, " n"]], (X, jnp.ones(4))),
        (list[Float[Array, " n"]], [X, jnp.ones(4)]),
        (PyTree[Float[Array, " n"]], {"a": (X, XS)}),
        (Float[Array, " n"], {"a": X}),
        (Float[Array, " n"] | None, XS),
        (Key[Array, ""], X),
        (str, X),
    ],
)
def test_does_not_fit(call, annotation, value):
    with pytest.raises(SowTypeError, match="`a`"):
        call(S(lambda v: sow(v, "a", spec=annotation)), value)


@pytest.mark.parametrize(
    "annotation, value",
    [
        (Float[Array, " n"] | None, None),
        (Float[Array, " n"] | None, X),
        (dict[str, Float[Array, " n"]], {"a": X, "b": X * 2}),
        (PyTree[Float[Array, "..."]], {"a": (X, XS)}),
        (tuple[Float[Array, "b n"], str], (XS, "text")),
        (list[Float[Array, " n"]], [X, X]),
        (Key[Array, ""], jr.key(0)),
        (Float[Array, "0 n"], jnp.ones((0, 3))),
        (eqx.nn.Linear, eqx.nn.Linear(3, 2, key=jr.key(0))),
    ],
)
def test_nested_annotations_that_fit(call, annotation, value):
    out, got = call(S(lambda v: sow(v, "a", spec=annotation)), value)
    assert_close(got["a"]["primal"], out)


def test_message():
    def f(x, y):
        sow(x, "first", spec=Float[Array, "batch dim"])
        return sow(y, "second", spec=Float[Array, "batch dim"])

    with pytest.raises(SowTypeError) as info:
        S(f)(XS, jnp.ones((5, 3)))
    message = str(info.value)
    for part in ("`second`", "batch dim", "f32[5,3]", "batch=2", "dim=3"):
        assert part in message


def test_axis_names_are_shared_by_all_sows(call):
    f = lambda x, y: (
        sow(x, "x", spec=Float[Array, " n"]),
        sow(y, "y", spec=Float[Array, " n"]),
    )
    call(S(f), X, X)
    with pytest.raises(SowTypeError, match="`y`.*n=3"):
        call(S(f), X, jnp.ones(4))


def test_axis_names_are_not_shared_by_calls(call):
    f = S(lambda x, y: (sow(x, "x", spec=N), sow(y, "y", spec=N)))
    N = Float[Array, " n"]
    for n in (3, 4):
        _, got = call(f, jnp.ones(n), jnp.ones(n))
        assert got["x"]["primal"].shape == got["y"]["primal"].shape == (n,)
    # Within one call they are.
    with pytest.raises(SowTypeError, match="`y`.*n=3"):
        call(f, jnp.ones(3), jnp.ones(4))


@under("jit", "vmap", "checkpoint")
def test_checked_as_the_code_there_sees_it(call, wrap):
    f = wrap(lambda x: sow(x, "x", spec=Float[Array, "*batch 3"]))
    call(S(f), XS)
    row = jax.vmap(lambda x: sow(x, "x", spec=Float[Array, "3"]))
    _, got = call(S(row), XS)
    assert got["x"]["primal"].shape == (2, 3)
    with pytest.raises(SowTypeError, match="`x`"):
        call(S(jax.vmap(lambda x: sow(x, "x", spec=Float[Array, "b 3"]))), XS)


def test_under_grad_only_the_primal_is_checked(call):
    def f(x):
        v = sow({"i": (x > 0).astype(jnp.int32), "x": x}, "v", spec=annotation)
        return jnp.sum(v["x"])

    annotation = dict[str, Float[Array, "3"] | Int[Array, "3"]]
    _, got = S(jax.grad(f))(X)
    assert set(got["v"]) == {"primal", "cotangent"}


def test_layer(call):
    model = eqx.nn.Sequential(
        [eqx.nn.Linear(3, 4, key=jr.key(0)), Sow("hidden", Float[Array, "4"])]
    )
    call(S(model), X)
    with pytest.raises(SowTypeError, match="`hidden`"):
        call(S(eqx.nn.Sequential([Sow("hidden", Float[Array, "4"])])), X)


def test_on_what_comes_back(call):
    f = jax.vmap(lambda x: sow(sow(x, "a/0") * 2, "a/1"))
    call(S(f, spec={"a/*": Float[Array, "batch 3"]}), XS)
    with pytest.raises(SowTypeError, match="`a/0`"):
        call(S(f, spec={"a/*": Float[Array, "3"]}), XS)


def test_sites_and_what_comes_back_share_axis_names(call):
    f = jax.vmap(lambda x: sow(x, "a", spec=Float[Array, " dim"]))
    call(S(f, spec={"a": Float[Array, "batch dim"]}), XS)
    with pytest.raises(SowTypeError, match="dim=3"):
        call(S(f, spec={"a": Float[Array, "dim dim"]}), XS)


def test_off_it_is_not_checked():
    assert sow(X, "a", spec=Int[Array, "7"]) is X


def test_not_an_annotation(call):
    match = r"`a` \(as marked at .*test_spec.*\): beartype does not understand"
    with pytest.raises(SowTypeError, match=match) as e:
        call(S(lambda x: sow(x, "a", spec=3.5)), X)
    assert "not a string" not in str(e.value)


@pytest.mark.parametrize("axis", ["{n}", "n+1"])
def test_a_size_that_is_not_known(call, axis):
    with pytest.raises(SowTypeError, match=r"cannot be checked .* Write a name") as e:
        call(S(lambda x: sow(x, "a", spec=Float[Array, axis])), X)
    assert "decorator" not in str(e.value)


@pytest.mark.parametrize(
    "annotation", ["Float[Array, 'n']", "Float", "not a name!", list["Float"]]
)
def test_a_string_is_no_annotation(call, annotation):
    value = X if isinstance(annotation, str) else [X]
    match = "`a` .*beartype does not understand.*`Float\\[Array, 'n'\\]`.*not a string"
    with pytest.raises(SowTypeError, match=match):
        call(S(lambda x: sow(x, "a", spec=annotation)), value)
    with pytest.raises(SowTypeError, match=match):
        call(S(lambda x: sow(x, "a"), spec={"a": annotation}), value)


def test_containers_with_parameters_of_their_own(call):
    count = lambda *keys: lambda x: sow(Counter(keys), "words") and x
    call(S(count("a", "b", "a"), spec={"words": Counter[str]}), X)
    with pytest.raises(SowTypeError, match="`words`"):
        call(S(count("a", 3), spec={"words": Counter[str]}), X)


def test_a_name_goes_before_globs(call):
    spec = {"*": Float[Array, "a b"], "a": Float[Array, " a"]}
    program = lambda x: sow(x, "a") + sow(jnp.outer(x, x), "b").sum()
    _, got = call(S(program, spec=spec), jnp.ones(3))
    assert got["a"]["primal"].shape == (3,)
    with pytest.raises(SowTypeError, match="`a` "):
        S(program, spec={"*": Float[Array, "a b"]})(jnp.ones(3))


class _Named(eqx.Module):
    array: jax.Array


def test_what_beartype_ignores():
    ignored = Annotated[_Named, "batch dim"]
    wanted = "holds 'batch dim', which beartype ignores"
    with pytest.raises(SowTypeError, match=wanted):
        Sow("a", ignored)
    for annotation in (ignored, dict[str, ignored], ignored | None):
        with pytest.raises(SowTypeError, match=wanted):
            S(lambda x: sow(x, "a"), spec={"a": annotation})
        with pytest.raises(SowTypeError, match=wanted):
            S(lambda x: sow(_Named(x), "a", spec=annotation))(X)
    checked = Annotated[object, Is[lambda x: x.shape == (3,)]]
    fn = lambda x: sow(x, "a", spec=checked)
    S(fn)(X)
    with pytest.raises(SowTypeError, match="does not match"):
        S(fn)(XS)
