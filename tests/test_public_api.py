import importlib.metadata
import inspect

import eqx_sow
import pytest


PUBLIC = {
    "sow": "(value, name, *, tag='intermediates', spec=None)",
    "Sow": "(name=None, spec=None, *, tag='intermediates')",
    "save_intermediates": (
        "(fn, *, tag='intermediates', names=None, modes=None, capture=None, "
        "methods=('__call__',), inputs=False, scope=False, reduce=None, "
        "transform=None, spec=None)"
    ),
    "plant": (
        "(fn, values, *, mode='primal', tag='intermediates', capture=None, "
        "methods=('__call__',), scope=False)"
    ),
    "tap": (
        "(fn, callback=None, *, tag='intermediates', names=None, modes=None, "
        "capture=None, methods=('__call__',), inputs=False, scope=False, "
        "transform=None, when=None, every=1, ordered=False)"
    ),
    "TapEvent": "(name, mode, value, count, ran)",
    "Append": "()",
    "Last": "()",
    "Fold": "(init, fn)",
    "Buffer": "(size, keep='last')",
    "summarize": "(value, *, edges=None)",
    "tabulate": "(intermediates)",
    "register_rule": "(primitive)",
}
# Made by the library, and rarely by a user.
RESULTS = ["Intermediates", "Summary"]
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


def test_version():
    assert eqx_sow.__version__ == importlib.metadata.version("eqx_sow")
