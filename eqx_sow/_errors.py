"""What goes wrong with a sow."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any


class SowError(Exception):
    """Base class of all errors of eqx_sow."""


class DuplicateSowError(SowError, ValueError):
    """A `sow` marks several places in straight-line code with one name, and no reducer
    says how to combine the values; or one value is planted in several places."""


class UnknownSowError(SowError, ValueError):
    """A name, a pattern or a filter selects nothing in this program."""


class SowTypeError(SowError, TypeError):
    """A marked value does not match its jaxtyping annotation."""


class UnsupportedPrimitiveError(SowError, NotImplementedError):
    """A marked value cannot be captured where it is: in a primitive without a rule, in
    a linear solve, in the condition of a `while_loop`, or, with a reducer, in a
    `shard_map`."""


for _error in (SowError, *SowError.__subclasses__()):
    _error.__module__ = "eqx_sow"


@contextlib.contextmanager
def calling(what: str, site: Any, hint: str = "") -> Iterator[None]:
    """Errors of a user's function say for which sow it was called: that of a `Site`."""
    try:
        yield
    except Exception as e:  # whatever it raises, which goes on its way
        if site.where not in str(e):
            e.add_note(f"This is from the {what} of {site.said}.{hint}")
        raise


def check_arity(option: str, fn: Callable, form: str, *hints: str) -> None:
    """Raises if it cannot be called as in `form`, such as `(path, module) -> bool`."""
    names = form[1 : form.index(")")]
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # of a builtin
        return
    try:
        signature.bind(*names.split(", "))
    except TypeError as e:
        what = f"`{option}` takes a function `{form}`, but {fn!r} takes {signature}."
        instead = f"Write `lambda {names}: ...`."
        raise TypeError(" ".join((what, instead, *hints))) from e
