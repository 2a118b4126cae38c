"""Every law on random programs, against an interpreter in plain Python. With more
features, and under stacks of transformations: tests/test_random_stacks.py."""

import os
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.dtypes
import jax.tree_util as jtu
import numpy as np
import pytest
from eqx_sow import save_intermediates, sow

from tests import oracle as orc

from .tables import IN_ORDER


LANES = 2
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


class Case(NamedTuple):
    run: Callable
    args: tuple
    out: Any
    captured: dict
    loose: bool = False


def forward_cases(f, program, xs):
    S = save_intermediates
    one, many = orc.Oracle(program, xs[0]), orc.Oracle(program, xs, lanes=True)
    each = _stack([orc.Oracle(program, x).primals() for x in xs])
    alone, mapped = one.primals(), many.primals()
    return {
        "S(f)": Case(S(f), (xs[0],), one.out, alone),
        "S(jit(f))": Case(S(jax.jit(f)), (xs[0],), one.out, alone),
        "S(checkpoint(f))": Case(S(jax.checkpoint(f)), (xs[0],), one.out, alone),
        "S(vmap(f))": Case(S(jax.vmap(f)), (xs,), many.out, mapped),
        "S(vmap(f, 1))": Case(S(jax.vmap(f, 1)), (xs.T,), many.out, mapped),
        "vmap(S(f))": Case(eqx.filter_vmap(S(f)), (xs,), many.out, each),
    }


def tangent_cases(f, program, xs, ts):
    def along(f):
        return save_intermediates(lambda x, t: jax.jvp(f, (x,), (t,))[1])

    one, many = orc.Oracle(program, xs[0]), orc.Oracle(program, xs, lanes=True)
    return {
        "S(jvp(f))": Case(along(f), (xs[0], ts[0]), *one.tangents(ts[0])),
        "S(jvp(vmap(f)))": Case(along(jax.vmap(f)), (xs, ts), *many.tangents(ts)),
    }


def cotangent_cases(f, program, xs):
    S = save_intermediates

    def grad(f):
        return jax.grad(lambda x: (f(x) * np.broadcast_to(WEIGHTS, x.shape)).sum())

    one = orc.Oracle(program, xs[0]).cotangents(WEIGHTS)
    many = orc.Oracle(program, xs, lanes=True).cotangents(WEIGHTS[None])
    each = [orc.Oracle(program, x).cotangents(WEIGHTS) for x in xs]
    each = _stack([e[0] for e in each]), _stack([e[1] for e in each])
    ckpt = jax.checkpoint(f)
    return {
        "S(grad(f))": Case(S(grad(f)), (xs[0],), *one),
        "S(jit(grad(f)))": Case(S(jax.jit(grad(f))), (xs[0],), *one),
        "S(grad(jit(f)))": Case(S(grad(jax.jit(f))), (xs[0],), *one),
        "S(grad(checkpoint(f)))": Case(S(grad(ckpt)), (xs[0],), *one),
        "S(vmap(grad(f)))": Case(S(jax.vmap(grad(f))), (xs,), *each, loose=True),
        "S(grad(vmap(f)))": Case(S(grad(jax.vmap(f))), (xs,), *many),
    }


def reducer_cases(f, program, xs):
    one = orc.Oracle(program, xs[0])
    # Where a vmap stands among the loops is a matter of axis order alone, which the
    # forward laws settle.
    sites = {
        name: site
        for name, site in one.sites.items()
        if not any(a.is_vmap for a in site.axes)
    }
    if not sites:
        return {}

    def returned(row, name, site):
        values = [v for _, v in one.at(name)]
        zero = orc._map_arrays(np.zeros_like, orc._template(site.kind))
        counted = row.counts or site.conditional
        count = {"count": np.array(len(values), np.int32)} if counted else {}
        return {"primal": row.by_hand(values, zero), **count}

    return {
        what: Case(
            save_intermediates(f, names=sorted(sites), reduce=row.reducer),
            (xs[0],),
            one.out,
            {name: returned(row, name, site) for name, site in sites.items()},
        )
        for what, row in IN_ORDER.items()
    }


# Compiling is what takes the time: of each of these a program gets one in turn.
IN_TURN = (
    ("S(jit(f))", "S(checkpoint(f))", "S(f)"),
    ("S(vmap(f))", "S(vmap(f, 1))"),
    ("S(jvp(f))", "S(jvp(vmap(f)))"),
    ("S(grad(f))", "S(jit(grad(f)))", "S(grad(jit(f)))", "S(grad(checkpoint(f)))"),
    ("S(vmap(grad(f)))", "S(grad(vmap(f)))"),
    tuple(IN_ORDER),
)


def _take_turns(cases, turn):
    skipped = {w for forms in IN_TURN for w in forms}
    skipped -= {forms[turn % len(forms)] for forms in IN_TURN}
    return {what: case for what, case in cases.items() if what not in skipped}


def check_program(seed, everything=False):
    program = orc.random_program(seed, allow_while=seed % 3 != 0)
    f = orc.to_jax(program, sow)
    xs, ts = _inputs(seed)
    cases = forward_cases(f, program, xs) | tangent_cases(f, program, xs, ts)
    if not orc.has_while(program):
        cases |= cotangent_cases(f, program, xs)
    cases |= reducer_cases(f, program, xs)
    if not everything:
        cases = _take_turns(cases, zlib.crc32(str(seed).encode()))
    args = {what: case.args for what, case in cases.items()}

    def run(args):
        return {what: case.run(*args[what]) for what, case in cases.items()}

    # All in one piece, for the same reason; some op by op.
    results = run(args) if seed % 8 == 0 else eqx.filter_jit(run)(args)
    for what, case in cases.items():
        out, captured = results[what]
        _close(out, case.out, what)
        check(captured, case.captured, what, case.loose)


# A program may have no sow.
pytestmark = pytest.mark.filterwarnings("ignore:.*found no mark")


@pytest.fixture(autouse=True)
def compile_fast():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


_SLOW = [pytest.param(s, marks=pytest.mark.slow) for s in (0, *range(2, 6))]


@pytest.mark.parametrize("seed", [1, *_SLOW])
def test_random_program(seed):
    check_program(seed)


@pytest.mark.fuzz
def test_random_programs_within_a_budget():
    """40 more programs, or as many as there is time for; `FUZZ_SEED` for others."""
    start = int(os.environ.get("FUZZ_SEED", "1000"))
    end = time.monotonic() + float(os.environ.get("FUZZ_SECONDS", "60"))
    for seed in range(start, start + 40):
        try:
            check_program(seed, everything=True)
        except Exception as error:
            error.add_note(f"seed {seed}: {orc.random_program(seed, seed % 3 != 0)}")
            raise
        jax.clear_caches()
        if time.monotonic() > end:
            break
