"""The frames of a user's code: in messages and in tracebacks."""

import contextlib
import functools as ft
import sys
import sysconfig
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast, TypeVar

import equinox as eqx
import jax
from jax.extend import source_info_util


_folders = {
    module.__name__: str(Path(str(module.__file__)).parent) + "/"
    for module in (jax, eqx, sys.modules["eqx_sow"])
}
_libraries = tuple(_folders.values())
_installed = tuple(
    map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
)
# JAX hides its own frames. Those of Equinox may be of a layer, or how it calls methods.
_hidden = (
    _folders["jax"],
    _folders["eqx_sow"],
    _folders["equinox"] + "_module/",
    str(contextlib.__file__),
)
# What JAX says of where something was traced is about the user's code, too.
source_info_util.register_exclusion(_folders["eqx_sow"])

_F = TypeVar("_F", bound=Callable)


@ft.cache
def is_library(file: str) -> bool:
    return file.startswith(_libraries)


def is_installed(module: str) -> bool:
    """Whether a module is part of Python or of a package, rather than the user's."""
    if module == "__main__" or module not in sys.modules:
        return False
    file = getattr(sys.modules[module], "__file__", None)
    return file is None or file.startswith(_installed) or is_library(file)


def api_boundary(fn: _F) -> _F:
    """Tracebacks of exceptions that leave `fn` have no frames of ours, unless JAX keeps
    its own. JAX has this for itself alone."""

    @ft.wraps(fn)
    def call(*args, **kwargs):
        try:
            return fn(*args, **kwargs)
        except Exception as e:  # all of them go on to the user
            config: Any = jax.config
            if config.jax_traceback_filtering != "off":
                e.__traceback__ = _without_libraries(e.__traceback__)
            # This adds no frame, not even that of `call`.
            raise

    return cast(_F, call)


def _without_libraries(
    traceback: types.TracebackType | None,
) -> types.TracebackType | None:
    kept = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(_hidden):
            kept.append(traceback)
        traceback = traceback.tb_next
    for t in reversed(kept):
        traceback = types.TracebackType(traceback, t.tb_frame, t.tb_lasti, t.tb_lineno)
    return traceback


def user_line() -> str:
    """`file:line` of the innermost frame that is neither ours nor JAX's nor
    Equinox's."""
    frame, _ = _user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class SowCall:
    """A call of `sow`: the calls in a user's code around it, from inside out, each as
    its code and the index of an instruction; and the `Sow` that made it, if one did. No
    two are equal."""

    __slots__ = ("calls", "layer")

    def __init__(self, layer: Any = None):
        self.layer = layer
        self.calls: list[tuple[types.CodeType, int]] = []
        frame = sys._getframe(1)
        while frame is not None:
            if not is_library(frame.f_code.co_filename):
                self.calls.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back


def _line_in(code: types.CodeType, instruction: int) -> str:
    line, *_ = list(code.co_positions())[instruction // 2]
    return f"{code.co_filename}:{line}"


def parting(a: SowCall, b: SowCall) -> tuple[str, str, bool] | None:
    """Where the calls that led to two calls of `sow` part: the lines in a user's code,
    and whether these are the calls of `sow` themselves. `None` if they never do, as
    those in a Python loop."""
    xs, ys = a.calls[::-1], b.calls[::-1]
    for i, (x, y) in enumerate(zip(xs, ys)):
        if x != y:
            is_last = len(xs) == len(ys) == i + 1
            return _line_in(*x), _line_in(*y), is_last
    return None


def line_of(eqn: Any) -> str:
    """The line in the user's code that made an equation, or an empty string if that is
    not known."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if not is_library(frame.file_name):
            return f"{frame.file_name}:{frame.line_num}"
    return ""


_warned: set[tuple[str, str, int]] = set()


def warn(message: str) -> None:
    """A warning at that line, once for each. (Python has this too, but forgets it
    wherever a library uses `warnings.catch_warnings`.)"""
    frame, level = _user_frame()
    key = message, frame.f_code.co_filename, frame.f_lineno
    if key not in _warned:
        warnings.warn(message, stacklevel=level)
        # Not if the warning is an error.
        _warned.add(key)


def _user_frame() -> tuple[types.FrameType, int]:
    """That frame, and its `stacklevel` for whoever called this."""
    frame, level = sys._getframe(2), 2
    while is_library(frame.f_code.co_filename) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return frame, level


_LOOPS_OF_EQUINOX = frozenset(f"checkpointed-{x}" for x in ("no-vjp", "fwd", "bwd"))


def is_of_equinox(eqn: Any) -> bool:
    """Whether an equation is Equinox's, as its loops are. In the `bwd` of a function,
    every equation has the traceback of the call of that function, so only the name that
    Equinox gives to a loop tells."""
    names = (getattr(x, "name", None) for x in eqn.source_info.name_stack.stack)
    return is_called_by_equinox(eqn) or not _LOOPS_OF_EQUINOX.isdisjoint(names)


def is_called_by_equinox(eqn: Any) -> bool:
    """Whether it is Equinox that calls what an equation computes, by its traceback."""
    traceback = eqn.source_info.traceback
    files = [frame.file_name for frame in traceback.frames] if traceback else []
    callers = [file for file in files if not file.startswith(_hidden)]
    return bool(callers) and callers[0].startswith(_folders["equinox"])
