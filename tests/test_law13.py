"""Law 13: `capture=` leaves everything as it is, and names follow the data. What is
captured is what the same program captures that does by hand what its models do, with
`sow` and the names that follow from the rule."""

import collections

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_sow import plant, save_intermediates as S, sow

from tests import meeting_trees, meeting_ways  # noqa: F401
from tests.helpers import assert_close
from tests.meeting import (
    edit,
    events_of,
    like,
    loss_of,
    mapped,
    over_data,
    PROGRAMS,
    Run,
    total,
    X,
)


pytestmark = pytest.mark.sample(5)


XS = jnp.stack([X, -X])
BY_HAND = Run(lambda value, name, of: sow(value, name))


# --- Uses: of `save`, which makes a function return `(out, captured)` ---


def _vmap(save, fn, args):
    fn, args = over_data(fn, args)
    return save(fn)(*args)


def _vmap_outside(save, fn, args):
    saved, args = over_data(save(fn), args)
    return saved(*args)


def _vmap_of_models(save, fn, args):
    several = mapped(lambda p: jnp.stack([p, 2 * p]), args)
    return save(eqx.filter_vmap(fn))(*several)


def _grad(save, fn, args):
    return save(eqx.filter_grad(loss_of(fn)))(*args)


def _grad_of_lanes(save, fn, args):
    fn, args = over_data(fn, args)
    return save(eqx.filter_jit(eqx.filter_grad(loss_of(fn))))(*args)


def _grad_outside(save, fn, args):
    def loss(*args):
        out, got = save(fn)(*args)
        return total(out), got

    return eqx.filter_grad(loss, has_aux=True)(*args)


def _checkpointed_grad(save, fn, args):
    return save(eqx.filter_grad(eqx.filter_checkpoint(loss_of(fn))))(*args)


def _jvp(save, fn, args):
    both = lambda *args: eqx.filter_jvp(fn, args, eqx.filter(args, eqx.is_array))
    return save(like(fn, both))(*args)


USES = {
    "S": lambda save, fn, args: save(fn)(*args),
    "S(jit)": lambda save, fn, args: save(eqx.filter_jit(fn))(*args),
    "jit(S)": lambda save, fn, args: eqx.filter_jit(save(fn))(*args),
    "S(vmap)": _vmap,
    "vmap(S)": _vmap_outside,
    "S(vmap of models)": _vmap_of_models,
    "S(grad)": _grad,
    "S(jit(grad(vmap)))": _grad_of_lanes,
    "grad(S)": _grad_outside,
    "S(grad(checkpoint))": _checkpointed_grad,
    "S(jvp)": _jvp,
}


def _plain(fn):
    return lambda *args: (fn(*args), {})


SLOW = ("hessian_over_parameters", "maml", "neural_ode")


def _cases():
    """All uses of all programs; of each program, two are quick to run."""
    for i, (name, program) in enumerate(PROGRAMS.items()):
        uses = [u for u in USES if not any(word in u for word in program.without)]
        quick = uses[i % len(uses)], uses[-i % len(uses)]
        for use in uses:
            is_quick = use in quick and name not in SLOW
            yield pytest.param(name, use, marks=() if is_quick else pytest.mark.every)


ALL = [pytest.param(n, marks=pytest.mark.every) if n in SLOW else n for n in PROGRAMS]


@pytest.mark.parametrize("name, use", list(_cases()))
def test_program(name, use):
    program = PROGRAMS[name]
    captured = lambda fn: S(fn, capture=True, **program.options)
    by_hand = lambda fn: S(fn, **program.options)

    def run(args):
        model, reference = program.make(Run()), program.make(BY_HAND)
        return (
            USES[use](_plain, model, args),
            USES[use](by_hand, reference, args),
            USES[use](captured, model, args),
        )

    # Compiled in one piece, but for the plainest.
    args = program.args()
    results = run(args) if use == "S" else eqx.filter_jit(run)(args)
    (out, _), (_, want), (got_out, got) = results
    assert_close(got_out, out, weak=True)
    assert list(got) == list(want)
    assert_close(got, want)


def _rows(entry):
    return [np.asarray(v).reshape(-1, X.size) for v in jax.tree.leaves(entry)]


def _are_among(rows, others):
    for row in rows:
        assert any(np.allclose(row, other, 1e-2, 1e-3) for other in others), row


@pytest.mark.parametrize("name", ALL)
def test_values_as_the_program_runs(name):
    """Those that the program itself sends to the host, without the library."""
    program = PROGRAMS[name]
    seen = collections.defaultdict(list)

    def mark(value, name, of):
        jax.debug.callback(lambda v: seen[name].extend(_rows(v)), value)
        return value

    args = program.args()
    eqx.filter_jit(program.make(Run(mark)))(*args)
    jax.effects_barrier()
    saved = S(program.make(Run()), capture=True, **program.options)
    _, got = eqx.filter_jit(saved)(*args)
    assert {n for n, entry in got.items() if np.any(entry.get("count", 1))} == set(seen)
    for name, rows in seen.items():
        captured = np.concatenate(_rows(got[name]["primal"]))
        _are_among(captured, np.concatenate(rows))
        if "count" not in got[name]:
            _are_among(np.concatenate(rows), captured)


def _names(program):
    shapes = eqx.filter_eval_shape(
        lambda args: S(program.make(BY_HAND), **program.options)(*args)[1],
        program.args(),
    )
    return list(shapes)


@pytest.mark.parametrize("name", ALL)
def test_planted(name):
    program = PROGRAMS[name]
    names = _names(program)
    values = {names[len(names) // 2]: edit}

    def run(args):
        outs = []
        for how, options in ((Run(), {"capture": True}), (BY_HAND, {})):
            planted = plant(program.make(how), values, **options)
            refused = {"grad", "planted"} & {*program.without}
            grad = None if refused else eqx.filter_grad(loss_of(planted))(*args)
            outs.append((planted(*args), grad))
        return outs

    out, want = eqx.filter_jit(run)(program.args())
    assert_close(out, want)


@pytest.mark.parametrize("name", ALL)
def test_tapped(name):
    program = PROGRAMS[name]
    args = program.args()
    out, events = events_of(program.make(Run()), args, capture=True)
    expected, want = events_of(program.make(BY_HAND), args)
    assert_close(out, expected)
    assert events.keys() == want.keys()
    assert_close(events, want)
