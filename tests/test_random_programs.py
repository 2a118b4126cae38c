"""Every law on random programs, against an interpreter in plain Python."""

import time
import zlib

import equinox as eqx
import jax
import jax.dtypes
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

from eqx_sow import Buffer, Fold, Last, save_intermediates, sow
from tests import oracle as orc


LANES = 3
WEIGHTS = np.array([0.7, -1.3], np.float32)


def _inputs(seed):
    rng = np.random.default_rng([seed, 1])
    xs = rng.uniform(-1.5, 1.5, (LANES, orc.SIZE)).astype(np.float32)
    ts = rng.uniform(-1, 1, (LANES, orc.SIZE)).astype(np.float32)
    return xs, ts


def _check_leaf(got, want, what):
    if not hasattr(want, "dtype"):
        assert got == want, what
        return
    assert got.shape == want.shape, f"{what}: {got.shape} instead of {want.shape}"
    if got.dtype == jax.dtypes.float0:
        assert not np.issubdtype(want.dtype, np.floating), what
        return
    assert got.dtype == want.dtype, what
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5, err_msg=what)


def _drop_lane(tree):
    """Without the leading axis, if every lane has the same value."""

    def leaf(x):
        if not hasattr(x, "dtype"):
            return x
        np.testing.assert_allclose(x, np.broadcast_to(x[:1], x.shape), 1e-4, 1e-5)
        return x[0]

    return jtu.tree_map(leaf, tree)


def _ndims(tree):
    return [np.ndim(x) for x in jtu.tree_leaves(tree) if hasattr(x, "dtype")]


def check(got, want, what, loose=False):
    """`loose`: the leading lane axis may be missing from a value that does not vary."""
    assert set(got) == set(want), what
    for name, modes in want.items():
        assert set(got[name]) == set(modes), f"{what}: {name}"
        for mode, value in modes.items():
            label, entry = f"{what}: {name} {mode}", got[name][mode]
            if loose and _ndims(entry) != _ndims(value):
                value = _drop_lane(value)
            assert jtu.tree_structure(entry) == jtu.tree_structure(value), label
            jtu.tree_map(lambda g, w, at=label: _check_leaf(g, w, at), entry, value)


def _stack(trees):
    def leaf(*xs):
        return np.stack(xs) if hasattr(xs[0], "dtype") else xs[0]

    return jtu.tree_map(leaf, *trees)


def _close(a, b, what):
    np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5, err_msg=what)


def _one_of(forms, turn):
    """Compiling is what takes the time, so each program gets one of these in turn."""
    what = list(forms)[turn % len(forms)]
    return {what: forms[what]}


def check_forward(f, program, xs, turn):
    S = save_intermediates
    one, many = orc.Oracle(program, xs[0]), orc.Oracle(program, xs, lanes=True)
    each = _stack([orc.Oracle(program, x).primals() for x in xs])
    forms = {
        "jit(S(f))": eqx.filter_jit(S(f)),
        "S(jit(f))": S(jax.jit(f)),
        "S(checkpoint(f))": S(jax.checkpoint(f)),
    }
    for what, g in {"S(f)": S(f), **_one_of(forms, turn)}.items():
        out, captured = g(xs[0])
        _close(out, one.out, what)
        check(captured, one.primals(), what)
    axis = turn % 2
    out, captured = S(jax.vmap(f, in_axes=axis))(xs.T if axis else xs)
    _close(out, many.out, "S(vmap(f))")
    check(captured, many.primals(), "S(vmap(f))")
    out, captured = eqx.filter_vmap(S(f))(xs)
    _close(out, many.out, "vmap(S(f))")
    check(captured, each, "vmap(S(f))")


def check_tangents(f, program, xs, ts):
    S = save_intermediates
    dot, want = orc.Oracle(program, xs[0]).tangents(ts[0])
    (_, got), captured = S(lambda x, t: jax.jvp(f, (x,), (t,)))(xs[0], ts[0])
    _close(got, dot, "S(jvp(f))")
    check(captured, want, "S(jvp(f))")
    dot, want = orc.Oracle(program, xs, lanes=True).tangents(ts)
    (_, got), captured = S(lambda x, t: jax.jvp(jax.vmap(f), (x,), (t,)))(xs, ts)
    _close(got, dot, "S(jvp(vmap(f)))")
    check(captured, want, "S(jvp(vmap(f)))")


def check_cotangents(f, program, xs, turn):
    S = save_intermediates

    def grad(f):
        return jax.grad(lambda x: (f(x) * WEIGHTS).sum())

    bar, want = orc.Oracle(program, xs[0]).cotangents(WEIGHTS)
    forms = {
        "S(jit(grad(f)))": S(jax.jit(grad(f))),
        "S(grad(jit(f)))": S(grad(jax.jit(f))),
        "S(grad(checkpoint(f)))": S(grad(jax.checkpoint(f))),
    }
    for what, g in {"S(grad(f))": S(grad(f)), **_one_of(forms, turn)}.items():
        got, captured = g(xs[0])
        _close(got, bar, what)
        check(captured, want, what)
    each = [orc.Oracle(program, x).cotangents(WEIGHTS) for x in xs]
    bars, wants = _stack([e[0] for e in each]), _stack([e[1] for e in each])
    got, captured = S(jax.vmap(grad(f)))(xs)
    _close(got, bars, "S(vmap(grad(f)))")
    check(captured, wants, "S(vmap(grad(f)))", loose=True)
    bar, want = orc.Oracle(program, xs, lanes=True).cotangents(WEIGHTS)
    got, captured = S(grad(jax.vmap(f)))(xs)
    _close(got, bar, "S(grad(vmap(f)))")
    check(captured, want, "S(grad(vmap(f)))")


def _arrays(tree):
    return [x for x in jtu.tree_leaves(tree) if hasattr(x, "dtype")]


def _fold_step(acc, value):
    return [(a * 2 - v).astype(a.dtype) for a, v in zip(acc, _arrays(value), strict=True)]


def check_reducers(f, program, xs):
    one = orc.Oracle(program, xs[0])
    last, fold, buffer = {}, {}, {}
    # Where a vmap stands inside the loops is a matter of axis order alone, which the
    # forward laws have settled.
    sites = {
        name: site
        for name, site in one.sites.items()
        if not any(a.is_vmap for a in site.axes)
    }
    if not sites:
        return
    for name, site in sites.items():
        values = [v for _, v in one.at(name)]
        zero = orc._map_arrays(np.zeros_like, orc._template(site.kind))
        count = {"count": np.array(len(values), np.int32)}
        cond = count if site.conditional else {}
        last[name] = {"primal": values[-1] if values else zero, **cond}
        acc = _arrays(zero)
        for v in values:
            acc = _fold_step(acc, v)
        fold[name] = {"primal": acc, **cond}
        shown = values[-2:] + [zero] * (2 - len(values[-2:]))
        buffer[name] = {"primal": _stack(shown), **count}
    # The buffer counts what it holds or what ran; the focused tests say which.
    names = sorted(sites)
    out, got = save_intermediates(f, names=names, reduce=Last())(xs[0])
    _close(out, one.out, "Last")
    check(got, last, "Last")
    reduce = {
        name: Fold(_arrays(orc._map_arrays(jnp.zeros_like, orc._template(s.kind))), _fold_step)
        for name, s in sites.items()
    }
    _, got = save_intermediates(f, names=names, reduce=reduce)(xs[0])
    check(got, fold, "Fold")
    _, got = save_intermediates(f, names=names, reduce=Buffer(2))(xs[0])
    for entry in (*got.values(), *buffer.values()):
        entry["count"] = np.minimum(entry["count"], 2)
    check(got, buffer, "Buffer")


def check_program(seed):
    program = orc.random_program(seed, allow_while=seed % 3 != 0)
    f = orc.to_jax(program, sow)
    xs, ts = _inputs(seed)
    check_forward(f, program, xs, seed)
    check_tangents(f, program, xs, ts)
    if not orc.has_while(program):
        check_cotangents(f, program, xs, seed)
    check_reducers(f, program, xs)


@pytest.mark.parametrize("seed", range(40))
def test_random_program(seed):
    check_program(seed)


@pytest.mark.fuzz
def test_random_programs_within_a_time_budget(request):
    if "fuzz" not in (request.config.getoption("markexpr") or ""):
        pytest.skip("asked for with -m fuzz")
    start = zlib.crc32(str(time.time()).encode()) % 10**6
    end = time.monotonic() + 200
    seed = start
    while time.monotonic() < end:
        try:
            check_program(seed)
        except Exception as error:
            error.add_note(f"seed {seed}: {orc.random_program(seed, seed % 3 != 0)}")
            raise
        jax.clear_caches()
        seed += 1
    assert seed > start
