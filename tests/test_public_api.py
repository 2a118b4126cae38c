import importlib.metadata
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import eqx_sow
import pytest
from eqx_sow._values.reduce import Reducer

from .tables import REDUCERS


pytestmark = pytest.mark.sample(1)


PUBLIC = {
    "sow": "(value, name, *, tag='intermediates', spec=None)",
    "scope": "(name)",
    "Sow": "(name=None, spec=None, *, tag='intermediates')",
    "save_intermediates": (
        "(fn, *, tag='intermediates', names=None, modes=None, capture=None, "
        "methods=('__call__',), inputs=False, calls=False, scope=False, "
        "reduce=None, transform=None, spec=None)"
    ),
    "plant": (
        "(fn, values, *, mode='primal', tag='intermediates', capture=None, "
        "methods=('__call__',), inputs=False, calls=False, scope=False, "
        "with_index=False)"
    ),
    "tap": (
        "(fn, callback=None, *, tag='intermediates', names=None, modes=None, "
        "capture=None, methods=('__call__',), inputs=False, calls=False, "
        "scope=False, transform=None, when=None, every=1, ordered=False, extra=None)"
    ),
    "Call": "(args, kwargs, out)",
    "TapEvent": "(name, mode, value, count, ran)",
    "Append": "()",
    "Last": "()",
    "Fold": "(init, fn)",
    "Buffer": "(size, keep='last')",
    "summarize": "(value, *, edges=None)",
    "tabulate": "(intermediates)",
    "compare": "(intermediates, reference, *, rtol=0.001, atol=1e-06)",
    "batched": "(fn)",
    "register_rule": "(primitive)",
}
# Made by the library, and rarely by a user.
RESULTS = ["Intermediates", "Summary", "Comparison"]
ERRORS = [
    "SowError",
    "DuplicateSowError",
    "UnknownSowError",
    "SowTypeError",
    "UnsupportedPrimitiveError",
]


def test_names():
    public = {
        n
        for n, v in vars(eqx_sow).items()
        if not n.startswith("_") and not inspect.ismodule(v)
    }
    assert public == {*PUBLIC, *RESULTS, *ERRORS}


def test_tests_go_through_all_reducers():
    classes = filter(inspect.isclass, vars(eqx_sow).values())
    public = {c for c in classes if issubclass(c, Reducer)}
    assert public == {type(row.reducer) for row in REDUCERS.values()}


@pytest.mark.parametrize("name", PUBLIC)
def test_signature(name):
    parameters = inspect.signature(getattr(eqx_sow, name)).parameters.values()
    bare = []
    for p in parameters:
        default = p.empty if p.name == "fn" else p.default
        bare.append(p.replace(annotation=p.empty, default=default))
    assert str(inspect.Signature(bare)) == PUBLIC[name]


@pytest.mark.parametrize("name", [*PUBLIC, *RESULTS, *ERRORS])
def test_documented(name):
    assert inspect.getdoc(getattr(eqx_sow, name))


@pytest.mark.slow
def test_import_brings_no_other_library():
    code = """
import sys
import equinox
libraries = lambda: {name.partition(".")[0] for name in sys.modules}
before = libraries()
import eqx_sow
print(*libraries() - before - sys.stdlib_module_names)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.split() == ["eqx_sow"], run.stderr


@pytest.mark.slow
def test_imported_by_a_function_that_is_being_traced():
    code = """
import jax

@jax.jit
def fn(x):
    import eqx_sow
    return eqx_sow.sow(2 * x, "a")

jax.grad(lambda x: jax.named_scope("a")(fn)(x))(1.0)
from eqx_sow import _compat, save_intermediates
print(_compat.is_eager())
jax.jit(lambda: print(_compat.is_eager()))()
print(save_intermediates(fn)(1.0)[1]["a"]["primal"])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.split() == ["True", "False", "2.0"], run.stderr


def test_version():
    assert eqx_sow.__version__ == importlib.metadata.version("eqx_sow")


def test_the_oldest_of_everything_is_what_the_metadata_say():
    root = Path(__file__).parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lines = (root / "tests/constraints-oldest.txt").read_text().splitlines()
    bounds = [line.replace("==", ">=") for line in lines if line[0] != "#"]
    assert bounds == project["dependencies"]
