"""Random programs with all features, under stacks of four transformations, against the
same programs with their values threaded out by hand. See tests/fuzz.py."""

import collections
import os

import jax
import jax.tree_util as jtu
import pytest
from eqx_sow import sow
from eqx_sow._walk import repetitions, table

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


def _kinds(node):
    """What a program is made of, with the kinds of loops and of gradients."""
    for n in orc.walk(node):
        kind = getattr(n, "how", None) if isinstance(n, orc.Own) else None
        kind = n.loop if isinstance(n, orc.Again) else kind
        kind = "twice" if isinstance(n, orc.Grad) and n.twice else kind
        kind = n.scopes == (None, None) if isinstance(n, orc.Twice) else kind
        yield type(n).__name__, kind
        if isinstance(n, orc.Cond) and any(map(orc.has_gradient, n.branches)):
            yield "Cond", "with a gradient"


def test_what_is_drawn():
    """Each of these in a few of two hundred programs."""
    n = collections.Counter()
    for seed in range(200):
        n.update(set(_kinds(fuzz.plan(seed).program)))
    loops = "bounded", "lax", "checkpointed", "one checkpoint", "scan"
    for kind in (
        *(("Own", how) for how in loops),
        ("Grad", None),
        ("Grad", "twice"),
        ("Beside", None),
        # One name, which runs twice.
        ("Twice", True),
        ("Cond", "with a gradient"),
    ):
        assert n[kind] >= 5, n
    assert sum(n["Again", loop] for loop in ("whole", "scan", "fori", "while")) >= 10, n


# A gradient of each of Equinox's loops with checkpoints, and of a function whose `bwd`
# has a loop of its own.
_MARKED = orc.Seq((orc.Op(0, 1.2), orc.Sow("h", "dict"), orc.Op(3, 0.7)))
_LOOPS = {
    **{
        how: orc.Own(how, "length", _MARKED, 3)
        for how in ("checkpointed", "one checkpoint", "scan")
    },
    **{
        f"bwd {loop}": orc.Again("f", loop, _MARKED, 3)
        for loop in ("whole", "scan", "while")
    },
}


@pytest.mark.parametrize("loop", _LOOPS)
def test_a_backward_pass_with_a_loop_of_its_own(loop):
    program = orc.Seq((_LOOPS[loop], orc.Op(0, 0.9)))
    assert fuzz.check(fuzz.Plan(2, program, ("grad",), 1, "none", False)) == "values"


@pytest.mark.parametrize("how", ["one checkpoint", "scan"])
def test_another_iteration_is_found(how, monkeypatch):
    """As if the backward pass began with the first one."""
    directions = repetitions.directions
    forward = lambda *args: tuple(d and False for d in directions(*args))
    monkeypatch.setattr(table, "directions", forward)
    program = orc.Seq((_LOOPS[how], orc.Op(0, 0.9)))
    a_plan = fuzz.Plan(2, program, ("grad",), 1, "none", False)
    with pytest.raises(fuzz.Wrong, match="h cotangent"):
        fuzz.check(a_plan)


def _seq(*nodes):
    return orc.Seq((orc.Op(0, 0.9), *nodes, orc.Op(0, 0.7)))


_h = orc.Sow("h", "v")
# Of what is linear, so that it is the same for each input, and of something else.
_CONSTANT = orc.Grad(False, orc.Seq((orc.Op(4, 0.8),)))
_VARYING = orc.Grad(False, orc.Seq((orc.Op(0, 0.8),)))
_BRANCHES = (
    orc.Seq((orc.Sow("h", "outer_unused"), orc.Op(2, 0.8))),
    orc.Seq((_h, orc.Op(0, 0.8))),
)
_WHAT_JAX_DOES = {
    # No rule of a function that is called with a constant, and no cotangent of one.
    "jvp rule of a constant": (_seq(_CONSTANT, orc.Rule("jvp", "g", 0.9)), ("grad",)),
    "vjp rule of a constant": (_seq(_CONSTANT, orc.Rule("vjp", "g", 0.9)), ("grad",)),
    "cotangent of a constant": (_seq(_CONSTANT, _h), ("grad",)),
    "cotangent of one in a branch": (
        _seq(orc.Cond("v", (orc.Seq((_CONSTANT, _h)), orc.Seq((_h, orc.Op(0, 0.8)))))),
        ("vmap", "grad"),
    ),
    # What is unused has a cotangent of zeros, which depends on nothing.
    "second cotangent of one in a branch": (
        _seq(orc.Cond("v", _BRANCHES)),
        ("vmap", "vjp", "vjp"),
    ),
    # All lanes have one cotangent of the constant, and so one total.
    "second cotangent of a constant beside lanes": (
        _seq(orc.Grad(False, orc.Seq((orc.Sow("h", orc.BESIDE), orc.Op(3, 0.9))))),
        ("vmap", "vjp"),
    ),
    # `jax.linearize` runs such a loop twice.
    "a value and a gradient in a loop": (
        _seq(orc.While(orc.Beside(True, True, _seq(_h)), 2, False)),
        ("linearize",),
    ),
    "two gradients in a loop": (
        _seq(orc.While(orc.Grad(True, _seq(_h)), 2, False)),
        ("linearize",),
    ),
    # The backward pass runs the rule of some steps several times.
    **{
        f"a rule in {how} of {n}": (
            _seq(orc.Own(how, "length", _seq(orc.Rule("jvp", "g", 0.9)), n)),
            ("grad",),
        )
        for how in ("checkpointed", "one checkpoint", "scan")
        for n in (1, 2, 3)
    },
}


@pytest.mark.parametrize("case", _WHAT_JAX_DOES)
def test_what_jax_does(case):
    program, words = _WHAT_JAX_DOES[case]
    a_plan = fuzz.Plan(1, program, words, len(words), "modes", False)
    assert fuzz.check(a_plan) == "modes"


def _without_rules(value, name, **options):
    return sow(
        value, name, tag="another" if name.endswith("_rule") else "intermediates"
    )


def _without_cotangents(value, name, **options):
    sow(jax.lax.stop_gradient(value), name, **options)
    return value


@pytest.mark.parametrize(
    "node, mark",
    [
        (orc.Rule("jvp", "g", 0.9), _without_rules),
        (orc.Rule("vjp", "g", 0.9), _without_rules),
        (_h, _without_cotangents),
    ],
)
def test_what_jax_does_not_do_is_found(node, mark):
    fuzz.check(fuzz.Plan(1, _seq(_CONSTANT, node), ("grad",), 1, "none", False), mark)
    with pytest.raises(fuzz.Wrong):
        fuzz.check(
            fuzz.Plan(1, _seq(_VARYING, node), ("grad",), 1, "none", False), mark
        )


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
