"""On a JAX that is newer than all that were tested, small programs are traced first."""

import contextlib
import inspect

import eqx_sow
import jax
import jax.numpy as jnp
import pytest
from eqx_sow import _compat, _hijax, save_intermediates as S, sow, SowError
from eqx_sow._mark.primitive import sow_p
from eqx_sow._transforms import canaries, trace
from eqx_sow._walk import interpreter, jax_rules
from jax.interpreters import partial_eval as pe

from tests.helpers import next_release


pytestmark = pytest.mark.sample(1)


# What JAX binds one day, and can be asked to bind now.
_NEXT = _hijax.hi_p


@pytest.fixture
def untested(monkeypatch):
    monkeypatch.setattr(_compat, "NEWEST_TESTED", "0.1")
    monkeypatch.setattr(canaries, "_found", [])


def _saved():
    return S(lambda x: sow(jnp.sin(x), "h"))(1.0)[1]


def test_versions(monkeypatch):
    for version, want in {
        "0.10.2": False,
        "0.12.0.1": False,
        "0.12.1": True,
        "0.13.0.dev20270101": True,
        "1.0": True,
    }.items():
        monkeypatch.setattr(jax, "__version__", version)
        assert _compat.is_untested() is want


def test_nothing_happens_on_a_tested_version(monkeypatch):
    assert not _compat.is_untested()
    monkeypatch.setattr(canaries, "check", lambda: 1 / 0)
    assert set(_saved()) == {"h"}


def test_once_in_a_process(untested, monkeypatch):
    runs = []
    found = canaries.found
    monkeypatch.setattr(canaries, "found", lambda fn: runs.append(fn) or found(fn))
    assert set(_saved()) == {"h"}
    assert len(runs) == len(canaries.CANARIES)
    eqx_sow.plant(lambda x: sow(x, "h"), {"h": jnp.ones(())})(jnp.zeros(()))
    assert len(runs) == len(canaries.CANARIES)


def test_inside_of_other_transformations(untested):
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(True):
        jax.jit(jax.vmap(S(jax.grad(lambda x: sow(jnp.sin(x), "h")))))(jnp.ones(2))


@pytest.mark.parametrize("again", [False, True])
def test_the_message(untested, monkeypatch, again):
    monkeypatch.setattr(trace, "check_wrapped", lambda: None)
    _break_a_table(monkeypatch, *jax_rules._wrapped[-1])
    for _ in range(1 + again):
        with pytest.raises(SowError) as caught:
            _saved()
    message = str(caught.value)
    assert f"tested up to JAX 0.1, and JAX {jax.__version__} behaves" in message
    assert "'error there' is missing, and must be float32[3]" in message
    assert "Install a newer eqx_sow, or JAX 0.1." in message


def _break_a_table(monkeypatch, table, primitive, chosen):
    monkeypatch.setitem(table, primitive, chosen.__wrapped__)


def _break_bind(monkeypatch, primitive, bind):
    monkeypatch.setattr(primitive, "bind", bind)


def _binds():
    """The functions that were put before the `bind` of primitives."""
    if _NEXT is not None:
        yield pytest.param(_NEXT, jax_rules._bind_hi, id=f"{_NEXT}-bind")
    for primitive in filter(None, interpreter.rules):
        bind = primitive.bind
        while "bind" in (inside := inspect.getclosurevars(bind).nonlocals):
            bind = inside["bind"]
            yield pytest.param(primitive, bind, id=f"{primitive}-{bind.__qualname__}")


def _first_difference(monkeypatch, primitive=None):
    monkeypatch.setattr(trace, "check_wrapped", lambda: None)
    jax.clear_caches()
    with next_release() if primitive is _NEXT else contextlib.nullcontext():
        return next(canaries.differences(), None)


def _all_differences(monkeypatch):
    monkeypatch.setattr(trace, "check_wrapped", lambda: None)
    jax.clear_caches()
    return list(canaries.differences())


@pytest.mark.parametrize("primitive", [None, _NEXT] if _NEXT else [None], ids=str)
def test_all_live(monkeypatch, primitive):
    assert _first_difference(monkeypatch, primitive) is None


@pytest.mark.slow
@pytest.mark.parametrize("i", range(len(jax_rules._wrapped)))
def test_a_canary_dies_without_each_rule(monkeypatch, i):
    table, primitive, chosen = jax_rules._wrapped[i]
    _break_a_table(monkeypatch, table, primitive, chosen)
    assert _first_difference(monkeypatch, primitive) is not None


def test_a_canary_dies_if_a_cond_without_marks_tells_nothing(monkeypatch):
    # Of the marks in a derivative rule, the rule for the cond sees none. If it says
    # nothing of the cond, all other canaries live.
    within = jax_rules._within

    def without(axis_data, *conds, **changes):
        conds = [cond for cond in conds if cond is not jax_rules._NO_COND]
        return within(axis_data, *conds, **changes)

    monkeypatch.setattr(jax_rules, "_within", without)
    name = "gradient of a cond under a vmap"
    assert _all_differences(monkeypatch) == [
        f"{name}: 'error there' is missing, and must be float32[3]"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("primitive, bind", list(_binds()))
def test_a_canary_dies_without_each_bind(monkeypatch, primitive, bind):
    if primitive.call_primitive:
        pytest.skip("Until JAX 0.10, which binds no call with a sow inside, is dropped")
    _break_bind(monkeypatch, primitive, bind)
    assert _first_difference(monkeypatch, primitive) is not None


@pytest.mark.slow
def test_a_canary_dies_if_sows_move_out_of_loops(monkeypatch):
    monkeypatch.delitem(pe.custom_partial_eval_rules, sow_p)
    assert _first_difference(monkeypatch) is not None
