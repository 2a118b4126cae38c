"""Captures, plants and taps within each other, of one tag: the inner capture takes what
it returns, and leaves all else to those around."""

import itertools as it

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_sow import plant, save_intermediates as S, sow, tap
from jax import lax

from .helpers import assert_close, with_mode
from .tables import REDUCERS, under


X = jnp.array([0.3, -1.2])


def _layer(x, name):
    return sow(jnp.sin(x) + x, name)


def _line(x):
    return _layer(_layer(_layer(x, "a"), "b"), "c").sum()


def _looping(x):
    def body(x, _):
        x = lax.cond(x.sum() > 0, lambda x: _layer(x, "a"), lambda x: -x, x)
        return _layer(x, "b"), None

    return _layer(lax.scan(body, x, None, length=3)[0], "c").sum()


_PROGRAMS = {
    "line": _line,
    "looping": _looping,
    "grad": jax.grad(_line),
    "grad of checkpointed loop": jax.grad(jax.checkpoint(_looping)),
    "vmap of grad": lambda x: jax.vmap(jax.grad(_line))(jnp.stack([x, 2 * x])),
    "jit of jvp": jax.jit(lambda x: jax.jvp(_looping, (x,), (x + 1,))[1]),
}


def _both(one, other):
    """What two captures have, of which none has anything of the other."""
    every = {name: dict(entry) for name, entry in one.items()}
    for name, entry in other.items():
        mine = every.setdefault(name, {})
        assert not (mine.keys() & entry.keys()) - {"count"}
        mine.update(entry)
    return every


def _all_pairs(f, seed):
    """Names and modes of an inner capture, at random."""
    rng = np.random.default_rng(seed)
    _, got = S(f)(X)
    modes = sorted({m for entry in got.values() for m in entry} - {"count"})
    some = [n for n in "abc" if rng.random() < 0.6] or ["b"]
    which = str(rng.choice([*modes, "all"]))
    return got, some, None if which == "all" else which


@pytest.mark.parametrize("program", _PROGRAMS)
def test_the_inner_one_takes_what_it_returns(program):
    f = _PROGRAMS[program]
    for seed in range(3):
        want, names, modes = _all_pairs(f, seed)
        pair = S(S(f, names=names, modes=modes))
        (out, mine), rest = (jax.jit if seed else lambda f: f)(pair)(X)
        assert set(mine) <= set(names)
        assert_close(_both(mine, rest), {n: dict(e) for n, e in want.items()})
        assert_close(out, f(X))


@under("eager", "jit", "checkpoint")
def test_derivatives_of_what_is_left(wrap):
    f = wrap(_line)
    _, every = S(jax.grad(f))(X)
    inner = lambda x: S(f, names="c")(x)[1]["c"]["primal"].sum()
    _, rest = S(jax.grad(inner))(X)
    assert_close(dict(rest), {n: dict(every[n]) for n in "ab"})
    # It returns no derivative.
    inner = lambda x: S(f, modes="primal")(x)[1]["c"]["primal"].sum()
    _, rest = S(jax.grad(inner))(X)
    assert_close(with_mode(rest, "cotangent"), with_mode(every, "cotangent"))
    assert all(set(entry) == {"cotangent"} for entry in rest.values())


def test_the_advice_where_nothing_is_left():
    inner = lambda x: S(_line)(x)[1]["c"]["primal"].sum()
    with pytest.warns(UserWarning, match="With `names=` or `modes=` it leaves"):
        assert S(jax.grad(inner))(X)[1] == {}


@under(of=REDUCERS, argument="row")
def test_reducers(row):
    f = jax.grad(_line)
    pair = S(S(f, names="b", modes="cotangent", reduce=row.reducer))
    (_, mine), rest = pair(X)
    _, want = S(f)(X)
    cotangent = want["b"]["cotangent"]
    assert_close(mine["b"]["cotangent"], row.by_hand([cotangent], 0 * cotangent))
    left = {
        n: {m: v for m, v in e.items() if (n, m) != ("b", "cotangent")}
        for n, e in want.items()
    }
    assert_close({n: dict(e) for n, e in rest.items()}, left)


def test_one_iteration_is_no_mark_of_its_own():
    (_, mine), rest = S(S(_looping, names="b/1"))(X)
    _, want = S(_looping)(X)
    assert_close(mine["b/1"]["primal"], want["b"]["primal"][1])
    assert_close(dict(rest), dict(want))


def test_which_of_two_cotangents():
    """The second derivative is left, if only the first is returned."""
    f = jax.grad(lambda x: jax.grad(lambda x: jnp.sum(sow(x**3, "h")))(x).sum())
    _, want = S(f)(X)
    for mode in want["h"]:
        (_, mine), rest = S(S(f, modes=mode))(X)
        assert list(mine["h"]) == [mode]
        left = [m for m in want["h"] if m != mode]
        assert len(rest["h"]) == len(left)


def _transforms():
    """Each with what it does to the values of `a`, and what it shows."""
    events = []
    shown = lambda: sorted({(e.name, e.mode) for e in events})
    return (
        events,
        shown,
        {
            "plant": lambda f: plant(f, {"a": lambda v: 2 * v}),
            "tap": lambda f: tap(f, events.append),
            "save": lambda f: lambda x: S(f, names="b")(x)[0],
        },
    )


@pytest.mark.parametrize("order", list(it.permutations(["plant", "tap", "save"])))
@under("eager", "grad", argument="derive")
def test_orders(order, derive):
    """From inside out. Only who is around the capture does not see what it took."""
    events, shown, ways = _transforms()
    double = lambda x: _layer(_layer(2 * _layer(x, "a"), "b"), "c").sum()
    f = _line
    for way in order:
        f = ways[way](f)
    out, rest = S(derive(f))(X)
    jax.effects_barrier()
    assert_close(out, derive(double)(X))
    assert set(rest) == {"a", "c"}
    tap_sees_b = order.index("tap") < order.index("save")
    names = {name for name, _ in shown()}
    assert names == ({"a", "b", "c"} if tap_sees_b else {"a", "c"})


@pytest.mark.slow
def test_modules():
    mlp = eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(0))
    loss = lambda net, x: jnp.sum(net(x) ** 2)
    step = eqx.filter_grad(loss)
    _, want = S(step, capture=eqx.nn.Linear)(mlp, X)
    inner = S(step, capture=eqx.nn.Linear, names="net/layers/1", modes="primal")
    (_, mine), rest = S(inner, capture=eqx.nn.Linear)(mlp, X)
    assert_close(_both(mine, rest), {n: dict(e) for n, e in want.items()})
    assert list(mine) == ["net/layers/1"] and set(rest["net/layers/1"]) == {"cotangent"}
    planted = plant(inner, {"net/layers/0": jnp.zeros_like}, capture=eqx.nn.Linear)
    by_hand = plant(step, {"net/layers/0": jnp.zeros_like}, capture=eqx.nn.Linear)
    assert_close(planted(mlp, X)[0], by_hand(mlp, X))
