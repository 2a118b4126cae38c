"""Random objects that are not PyTrees, in random programs. One that holds a traced
array is an error, and any other comes back as the object that it was."""

import dataclasses as dc
import functools as ft
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_sow import plant, save_intermediates as S, sow, SowTypeError, tap
from jax import lax

from tests.trees import within_a_budget

from .tables import pick


@dc.dataclass
class Data:
    first: object
    second: object = None

    def method(self):
        return self.first


class Slots:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held

    def __eq__(self, other):
        raise AssertionError("nobody may ask")

    __hash__ = None


class Module(eqx.Module):
    held: object = eqx.field(static=True)


def _closure(held):
    return lambda: held


# Of what is held. The lists and dicts are PyTrees, but inside of an object.
AROUND = {
    "data": Data,
    "second": lambda held: Data("text", held),
    "slots": Slots,
    "namespace": lambda held: types.SimpleNamespace(a=1, held=held),
    "closure": _closure,
    "default": lambda held: lambda x, held=held: x,
    "partial": lambda held: ft.partial(print, held, 2),
    "keyword": lambda held: ft.partial(print, end=held),
    "method": lambda held: Data(held).method,
    "jit": lambda held: jax.jit(_closure(held)),
    "list": lambda held: [1, held],
    "tuple": lambda held: ("text", held, None),
    "dict": lambda held: {"a": 2, "b": held},
}
PYTREES = "list", "tuple", "dict"
INNERMOST = "text", None, 3, np.float32(2), np.arange(3.0), jnp.arange(3.0), jnp.sin


def _made(kinds, held):
    for kind in kinds:
        held = AROUND[kind](held)
    return held


# Around a function `f` that marks; `x` and what `f` returns are vectors.
INSIDE = {
    **pick("jit", "filter_jit", "checkpoint", "scan", "while"),
    "cond": lambda f: lambda x: lax.cond(x[0] < 9, f, jnp.cos, x),
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])).sum(0),
    "grad": lambda f: jax.grad(lambda x: (f(x) ** 2).sum()),
}


def _jit_of_save(f):
    """Equinox's `filter_jit` would compare the objects in what comes out."""

    def run(x):
        kept: list = []

        def inside(x):
            arrays, static = eqx.partition(S(f)(x), eqx.is_array)
            kept[:] = [static]
            return arrays

        return eqx.combine(jax.jit(inside)(x), kept[0])

    return run


USES = {
    "save": S,
    "transform": lambda f: S(f, transform=lambda value: value),
    "plant": lambda f: S(plant(f, {"n": lambda value: value})),
    "tap": lambda f: S(tap(f, lambda event: None)),
    "jit of save": _jit_of_save,
}


class Plan:
    def __init__(self, seed):
        rng = np.random.default_rng([seed, 43])
        n = int(rng.integers(1, 5))
        kinds = [str(k) for k in rng.choice(list(AROUND), n)]
        # Outermost an object: a tree of arrays is one more value.
        outer = [k for k in AROUND if k not in PYTREES]
        self.kinds = [*kinds, str(rng.choice(outer))]
        self.traced = bool(rng.random() < 0.5)
        self.innermost = INNERMOST[int(rng.integers(len(INNERMOST)))]
        words = [str(w) for w in rng.choice(list(INSIDE), int(rng.integers(0, 4)))]
        # The derivative of a while is not there, nor are those of derivatives here.
        ways = [w for w in words if w in ("while", "grad")][1:]
        self.words = [w for w in words if w not in ways]
        self.use = str(rng.choice(list(USES)))
        self.beside = bool(rng.random() < 0.5)
        self.seed = seed

    def __str__(self):
        held = "a traced array" if self.traced else repr(self.innermost)
        words = " ".join([self.use, *reversed(self.words)])
        return f"seed {self.seed}: {words}, {' in '.join([held, *self.kinds])}"


def _run(plan):
    x = jnp.array([0.3, -0.7])
    given = _made(plan.kinds, plan.innermost)
    beside = {"k": [plan.innermost]}

    def f(x):
        h = jnp.sin(x)
        held = _made(plan.kinds, 2 * h) if plan.traced else given
        value = (h, held, beside) if plan.beside else [held, h]
        got = sow(value, "n")
        assert got[int(plan.beside)] is held
        return got[int(not plan.beside)] * 2

    for word in plan.words:
        f = INSIDE[word](f)
    use = USES[plan.use]
    if plan.traced:
        with pytest.raises(SowTypeError) as caught:
            jax.block_until_ready(use(f)(x))
        text = str(caught.value)
        assert "'n'" in text and "register_dataclass" in text, text
        return "refused"
    out, got = use(f)(x)
    np.testing.assert_allclose(out, f(x), rtol=1e-5)
    for mode, value in got["n"].items():
        if mode != "count":
            assert value[int(plan.beside)] is given, mode
            assert eqx.is_array(value[int(not plan.beside)])
    return "came back"


def check(seed):
    plan = Plan(seed)
    try:
        return _run(plan)
    except BaseException as error:
        error.add_note(str(plan))
        raise


@pytest.mark.parametrize("seed", range(8))
def test_random_object(seed):
    check(seed)


@pytest.mark.fuzz
def test_random_objects_within_a_budget():
    within_a_budget(check)
