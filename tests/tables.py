"""What tests go through: the transformations around a function, each under one name,
and the reducers, each with what it returns by hand.

    @under("eager", "jit", "grad-checkpoint")
    def test_law(wrap):
        S(wrap(f))(x)

    @under(of=REDUCERS, argument="row")
    def test_law_of_reducers(row):
        S(f, reduce=row.reducer)(x)

What a test needs beside them is in its file."""

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from eqx_sow import Append, Buffer, Fold, Last, save_intermediates as S


_POLICIES = jax.checkpoint_policies

WORDS = {
    # What these return is what `f` returns.
    "eager": lambda f: f,
    "jit": jax.jit,
    "filter_jit": eqx.filter_jit,
    "checkpoint": jax.checkpoint,
    "filter_checkpoint": eqx.filter_checkpoint,
    "checkpoint_nothing": ft.partial(jax.checkpoint, policy=_POLICIES.nothing_saveable),
    "checkpoint_everything": ft.partial(
        jax.checkpoint, policy=_POLICIES.everything_saveable
    ),
    "checkpoint_dots": ft.partial(jax.checkpoint, policy=_POLICIES.dots_saveable),
    # Over the first axis of the arguments.
    "vmap": jax.vmap,
    "filter_vmap": eqx.filter_vmap,
    "map": lambda f: lambda xs: lax.map(f, xs),
    # With the arguments of `f`: two lanes, or two iterations.
    "lanes": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
    "while": lambda f: (
        lambda x: lax.while_loop(
            lambda s: s[0] < 2, lambda s: (s[0] + 1, f(s[1])), (0, x)
        )[1]
    ),
    # Of a function that returns a number, as `total` makes of others.
    "total": lambda f: lambda *args: jnp.sum(f(*args)),
    "grad": jax.grad,
    "value_and_grad": jax.value_and_grad,
    "filter_grad": eqx.filter_grad,
    "filter_value_and_grad": eqx.filter_value_and_grad,
    "jvp": lambda f: lambda x, *v: jax.jvp(f, (x,), v or (x,)),
    "jacfwd": jax.jacfwd,
    "jacrev": jax.jacrev,
    "filter_jacfwd": eqx.filter_jacfwd,
    "filter_jacrev": eqx.filter_jacrev,
}

# Ways to save what a function marks, with the options of `save_intermediates`.
SAVES = {
    "eager": S,
    "jit inside": lambda f, **options: S(jax.jit(f), **options),
    "jit outside": lambda f, **options: eqx.filter_jit(S(f, **options)),
    "both": lambda f, **options: eqx.filter_jit(S(eqx.filter_jit(f), **options)),
}


def named(name):
    """`named("jit-grad")(f)` is `jax.jit(jax.grad(f))`."""
    first, *others = name.split("-")
    around = WORDS[first]
    return (lambda f: around(named("-".join(others))(f))) if others else around


def pick(*names):
    """For a test that has more of its own, or that asks for the name."""
    return {name: named(name) for name in names}


def under(*given, argument="wrap", of=None):
    """One case for each name, or function of the test, or for all in a dict."""
    given = given or tuple(of)
    find = of.__getitem__ if of else named
    return pytest.mark.parametrize(
        argument,
        [find(x) if isinstance(x, str) else x for x in given],
        ids=[x if isinstance(x, str) else x.__name__ for x in given],
    )


class Reduced(NamedTuple):
    """A reducer, and in NumPy what it makes of the values in one lane, in the order in
    which they were computed. `zero` is like one of them."""

    reducer: Any
    by_hand: Callable[[list, Any], Any]
    # If not, there is an entry for each place in straight-line code.
    in_order: bool = True
    # The axes in front of those of the value, and whether there always is a count.
    lead: tuple[int, ...] = ()
    counts: bool = False
    # Whether the arrays are like those of the value, but for these axes.
    like_the_value: bool = True


def _twice_and_one_more(acc, value):
    """Which tells one order from another."""
    arrays = eqx.filter(value, eqx.is_array)
    return jtu.tree_map(lambda a, x: (2 * a + x).astype(a.dtype), acc, arrays)


def _twice_and_total(acc, value):
    arrays = jtu.tree_leaves(eqx.filter(value, eqx.is_array))
    return 2 * acc + sum(x.sum().astype("float32") for x in arrays)


def _fold(init, fn, **properties):
    def by_hand(values, zero):
        acc = init(zero) if callable(init) else init
        return jtu.tree_map(np.asarray, ft.reduce(fn, values, acc))

    return Reduced(Fold(init, fn), by_hand, **properties)


def buffer(size, keep="last"):
    def by_hand(values, zero):
        kept = values[:size] if keep == "first" else values[-size:]
        stack = lambda x, *xs: np.stack([x, *xs]) if eqx.is_array(x) else x
        return jtu.tree_map(stack, *kept, *[zero] * (size - len(kept)))

    return Reduced(Buffer(size, keep), by_hand, lead=(size,), counts=True)


REDUCERS = {
    "append": Reduced(Append(), lambda values, _: tuple(values), in_order=False),
    "last": Reduced(Last(), lambda values, zero: [zero, *values][-1]),
    "fold": _fold(lambda v: eqx.filter(v, eqx.is_array), _twice_and_one_more),
    "total": _fold(np.float32(0), _twice_and_total, like_the_value=False),
    "buffer": buffer(2),
    "first": buffer(5, "first"),
}
IN_ORDER = {name: row for name, row in REDUCERS.items() if row.in_order}
