"""See, and change, what happens inside of Equinox models and JAX programs."""

from importlib.metadata import version as _version

from . import _rules, _wrapped  # noqa: F401
from ._errors import (
    DuplicateSowError as DuplicateSowError,
    SowError as SowError,
    SowTypeError as SowTypeError,
    UnknownSowError as UnknownSowError,
    UnsupportedPrimitiveError as UnsupportedPrimitiveError,
)
from ._interpreter import register_rule as register_rule
from ._plant import plant as plant
from ._reduce import (
    Append as Append,
    Buffer as Buffer,
    Fold as Fold,
    Last as Last,
)
from ._save import save_intermediates as save_intermediates
from ._sow import Sow as Sow, sow as sow
from ._tabulate import tabulate as tabulate


__version__ = _version("eqx_sow")
