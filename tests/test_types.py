"""What type checkers know of the public functions. The calls are in `types/`."""

import importlib.resources
import inspect
import re
import runpy
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import equinox as eqx
import eqx_sow
import jax
import jax.numpy as jnp
import pytest
from beartype import beartype
from eqx_sow._values.modes import as_mode, Mode
from jaxtyping import Array, Float, jaxtyped


pytestmark = pytest.mark.sample(1)


CALLS = Path(__file__).parent / "types"
RIGHT, WRONG = CALLS / "right_calls.py", CALLS / "wrong_calls.py"
CHECKERS = {
    "mypy": ["--python-executable", sys.executable, "--cache-dir", "cache"],
    "pyright": ["--pythonpath", sys.executable],
}


@pytest.mark.types
@pytest.mark.parametrize("checker", CHECKERS)
def test_checker_finds_what_is_wrong(checker, tmp_path):
    # Away from the repository, so that it is the installed package that has types.
    for path in (RIGHT, WRONG):
        shutil.copy(path, tmp_path)
    files = [RIGHT.name, WRONG.name]
    run = subprocess.run(
        [checker, *CHECKERS[checker], *files],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    output = run.stdout + run.stderr
    found = re.findall(r"(\w+\.py):(\d+):(?:\d+ -)? error", output)
    wanted = {
        (WRONG.name, i)
        for i, line in enumerate(WRONG.read_text().splitlines(), 1)
        if line.endswith("  # error")
    }
    assert len(wanted) > 90
    assert {(file, int(line)) for file, line in found} == wanted, output


@pytest.mark.filterwarnings("ignore:.*found no mark")
@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_right_calls_run():
    runpy.run_path(str(RIGHT))
    jax.effects_barrier()


def test_the_package_says_that_it_is_typed():
    assert (importlib.resources.files(eqx_sow) / "py.typed").is_file()


@pytest.mark.parametrize("fn", [eqx_sow.save_intermediates, eqx_sow.tap])
def test_overloads_have_all_options(fn):
    options = {
        name: p.annotation
        for name, p in inspect.signature(fn).parameters.items()
        if p.kind is p.KEYWORD_ONLY
    }
    for overload in typing.get_overloads(fn):
        (declared,) = typing.get_args(typing.get_type_hints(overload)["options"])
        assert typing.get_type_hints(declared).keys() == options.keys()


def test_all_options_may_be_left_out():
    for fn in (eqx_sow.save_intermediates, eqx_sow.tap):
        for overload in typing.get_overloads(fn):
            (declared,) = typing.get_args(typing.get_type_hints(overload)["options"])
            assert not declared.__required_keys__


def test_modes():
    for mode in typing.get_args(Mode):
        assert as_mode("modes", mode) == mode


# --- at run time ---


def _sum(x: Float[Array, " n"], scale=1.0) -> Float[Array, ""]:
    return scale * eqx_sow.sow(x, "x").sum()


class _Model(eqx.Module):
    def __call__(self, x: Array) -> Array:
        return eqx_sow.sow(x, "x")


def test_signature_has_the_pair():
    signature = inspect.signature(eqx_sow.save_intermediates(_sum))
    own = inspect.signature(_sum)
    assert signature.parameters == own.parameters
    returns = tuple[own.return_annotation, eqx_sow.Intermediates]
    assert signature.return_annotation == returns
    of_model = inspect.signature(eqx_sow.save_intermediates(_Model()))
    assert of_model.return_annotation == tuple[Array, eqx_sow.Intermediates]
    of_lambda = inspect.signature(eqx_sow.save_intermediates(lambda x: x))
    assert of_lambda.return_annotation == tuple[typing.Any, eqx_sow.Intermediates]
    for same in (eqx_sow.plant(_sum, {"x": abs}), eqx_sow.tap(_sum)):
        assert inspect.signature(same) == own


def test_beartype_knows_of_the_pair():
    saved = eqx_sow.save_intermediates(_sum)
    out, intermediates = beartype(saved)(jnp.ones(3))
    assert out == 3 and list(intermediates) == ["x"]
    # What `_sum` is annotated with is as it was.
    assert beartype(_sum)(jnp.ones(3)) == 3


def test_a_check_inside_sees_the_function():
    @eqx_sow.save_intermediates(names="x")
    @jaxtyped(typechecker=beartype)
    def fn(x: Float[Array, " n"], y: Float[Array, " n"]) -> Float[Array, ""]:
        return eqx_sow.sow(x * y, "x").sum()

    out, intermediates = fn(jnp.ones(3), jnp.ones(3))
    assert out == 3 and list(intermediates) == ["x"]
    with pytest.raises(TypeError, match="Type-check error"):
        fn(jnp.ones(3), jnp.ones(4))
