"""Read, differentiate and replace intermediate values of Equinox models.

`sow` marks a value, and so does `Sow`, a layer. The option `capture=` marks the outputs
of modules, without editing the model. Then

- `save_intermediates` makes a function also return the marked values, and under
  `eqx.filter_grad` the gradients with respect to them,
- `plant` replaces them, and
- `tap` shows them while the program runs.

`tabulate` prints a table of what was captured, and `compare` shows where two runs first
differ.
"""

from importlib.metadata import version as _version

from ._errors import (
    DuplicateSowError as DuplicateSowError,
    SowError as SowError,
    SowTypeError as SowTypeError,
    UnknownSowError as UnknownSowError,
    UnsupportedPrimitiveError as UnsupportedPrimitiveError,
)
from ._handlers.delivery import TapEvent as TapEvent
from ._mark.calls import Call as Call
from ._mark.listening import scope as scope
from ._mark.sow import Sow as Sow, sow as sow
from ._results.compare import compare as compare, Comparison as Comparison
from ._results.intermediates import Intermediates as Intermediates
from ._results.summarize import summarize as summarize, Summary as Summary
from ._results.tabulate import tabulate as tabulate
from ._transforms.plant import plant as plant
from ._transforms.save import save_intermediates as save_intermediates
from ._transforms.tap import tap as tap
from ._values.reduce import (
    Append as Append,
    Buffer as Buffer,
    Fold as Fold,
    Last as Last,
)
from ._values.transform import batched as batched
from ._walk import jax_rules as _jax_rules, rules as _rules  # noqa: F401
from ._walk.register import register_rule as register_rule


__version__ = _version("eqx_sow")
