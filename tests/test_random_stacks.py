"""Random programs with all features, under stacks of four transformations, against the
same programs with their values threaded out by hand. See tests/fuzz.py."""

import os

import jax
import jax.tree_util as jtu
import pytest
from eqx_sow import sow

from tests import fuzz, oracle as orc


def _check(seed):
    report = fuzz.Report()
    report.run(seed)
    assert not report.failing, f"{fuzz.plan(seed)}\n{report}"


_DEFAULT = (2, 3)
_SLOW = [pytest.param(s, marks=pytest.mark.slow) for s in (*range(2), *range(4, 6))]


@pytest.mark.parametrize("seed", [*_DEFAULT, *_SLOW])
def test_random_stack(seed):
    _check(seed)


def _scaled(value, name, **options):
    scale = lambda x: x * 1.01 if hasattr(x, "dtype") and x.dtype == "float32" else x
    sow(jtu.tree_map(scale, value), name, **options)
    return value


def _renamed(value, name, **options):
    return sow(value, f"{name}_", **options)


def _lost(value, name, **options):
    return sow(value, name, **{**options, "tag": "another"})


def _wrong_cotangent(value, name, **options):
    return jtu.tree_map(
        lambda x: 2 * x - jax.lax.stop_gradient(x) if hasattr(x, "dtype") else x,
        sow(value, name, **options),
    )


@pytest.mark.filterwarnings("ignore:.*found no mark")
@pytest.mark.parametrize("mark", [_scaled, _renamed, _lost, _wrong_cotangent])
def test_a_wrong_value_is_found(mark):
    program = orc.Seq((orc.Op(0, 0.9), orc.Sow("h", "v"), orc.Op(0, 0.7)))
    a_plan = fuzz.Plan(0, program, ("grad",), 1, "none", False)
    assert fuzz.check(a_plan) == "values"
    with pytest.raises(fuzz.Wrong):
        fuzz.check(a_plan, mark)


def test_an_undocumented_exception_is_a_failure(monkeypatch):
    def fail(the_plan):
        raise ValueError("marks more than one value")

    monkeypatch.setattr(fuzz, "check", fail)
    report = fuzz.Report()
    report.run(0)
    assert list(report.failing) == [0] and not report.exceptions


@pytest.mark.fuzz
def test_random_stacks_within_a_budget():
    """`FUZZ_SEED` for other ones, `FUZZ_SECONDS` for more."""
    start = int(os.environ.get("FUZZ_SEED", "1000"))
    seconds = float(os.environ.get("FUZZ_SECONDS", "60"))
    report = fuzz.many(start, 100_000, seconds)
    print(report)
    assert report.programs and not report.failing, report
