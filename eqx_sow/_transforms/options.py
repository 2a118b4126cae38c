"""The options that the public functions take.

An option is declared in four places: in the signature of the public function, which
documents it; in a `TypedDict`, which type checkers see; in `_TAKES` or `_CHECKS`, for
what it takes; and, if it holds no arrays, as a field of `Options`, which reaches the
handler as one object. An option that may hold arrays is a field of the function's
`Transformed` class instead.
"""

import dataclasses as dc
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypedDict

import equinox as eqx

from .._arrays import as_integer
from .._errors import check_arity
from .._handlers.events import print_event
from .._mark.sow import check_tag
from .._mark.static import Const
from .._modules.capture import is_function_to_capture, Marking
from .._values.modes import as_mode, as_modes, Mode
from .._values.reduce import Reducer


# What type checkers know of the options.
Names = str | Sequence[str] | Callable[[str], bool] | None
Modes = Mode | Sequence[Mode] | None
Capture = bool | type | tuple[Any, ...] | Callable[..., Any] | None
Methods = str | Sequence[str]
Transform = Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None


class Selecting(TypedDict, total=False):
    """Of `save_intermediates` and `tap`."""

    tag: Hashable
    names: Names
    modes: Modes
    capture: Capture
    methods: Methods
    inputs: bool
    scope: bool
    transform: Transform


class Saving(Selecting, total=False):
    """Of `save_intermediates`."""

    reduce: Reducer | Mapping[str, Reducer] | None
    spec: Mapping[str, Any] | None


class Tapping(Selecting, total=False):
    """Of `tap`."""

    when: Callable[[Any], Any] | None
    every: int
    ordered: bool
    extra: Any


@dc.dataclass(frozen=True)
class Options(Marking):
    """The options of one call that hold no arrays, checked: these, and `Marking`."""

    names: tuple[Any, ...] | None = None
    mode: str = "primal"
    spec: Mapping[str, Any] | None = None
    every: int = 1
    ordered: bool = False
    with_index: bool = False
    callback: Const | None = None

    @property
    def said(self) -> dict[str, Any]:
        """Only what was said, for a user to read."""
        plain = {f.name: f.default for f in dc.fields(self)}
        said = {k: v for k, v in vars(self).items() if v not in (plain.get(k), _PRINT)}
        return {k: v.value if isinstance(v, Const) else v for k, v in said.items()}

    def __repr__(self):
        return f"Options({', '.join(f'{k}={v!r}' for k, v in self.said.items())})"


_PRINT = Const(print_event)


def checked(call: str, fn: Any, given: Mapping[str, Any]) -> tuple[Options, Any]:
    """The options that were `given` to a `call`, such as `plant`: those for `Options`,
    and a dict of the others."""
    if not callable(fn):
        raise TypeError(f"`{call}(fn)` takes a function or a model, not {fn!r}.")
    # Its message has the value, and so no need of the name of an option.
    check_tag(call, given["tag"])
    options = {k: _checked(call, k, v) for k, v in given.items() if k != "tag"}
    for name in ("inputs", "methods"):
        plain = getattr(Options, name)
        if options.get(name, plain) == plain:
            continue
        option = f"{call}(..., {name}={options[name]!r})"
        if options["capture"] is None:
            raise ValueError(
                f"`{option}` does nothing without `capture`, which says what to mark. "
                "Write `capture=True` for every module."
            )
        if Marking(options["capture"]).classes == ():
            raise ValueError(
                f"`{option}` is about modules, and `capture` has functions only, of "
                "which the output is marked. Leave it out, or write `capture=True`."
            )
    fields = {field.name for field in dc.fields(Options)}
    static = {k: v for k, v in options.items() if k in fields}
    others = {k: v for k, v in options.items() if k not in static}
    return Options(tag=given["tag"], **static), others


def _checked(call: str, name: str, value: Any) -> Any:
    """The value of an option, as the library wants it."""
    option = f"{call}(..., {name}=...)"
    if name in _TAKES and (value is not None or name not in _OPTIONAL):
        what, fits = _TAKES[name]
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str):
                    raise TypeError(
                        f"`{option}` takes a dict whose keys are names or globs, and "
                        f"{key!r} is neither."
                    )
            # As a PyTree, a `dict` would be sorted, and globs go in their order.
            value = OrderedDict(value)
        if not fits(value):
            got = eqx.tree_pformat(dict(value) if isinstance(value, dict) else value)
            raise TypeError(f"`{option}` takes {what}, not {got}.")
    return _CHECKS[name](option, value) if name in _CHECKS else value


# --- what fits ---
def _is_flag(x: Any) -> bool:
    return isinstance(x, bool)


def _is_dict(x: Any) -> bool:
    return isinstance(x, Mapping)


def _one_or_several(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    several = Sequence | set | frozenset
    return lambda x: fits(x) or (isinstance(x, several) and all(map(fits, x)))


def _one_or_by_name(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: all(map(fits, x.values())) if _is_dict(x) else fits(x)


_REDUCERS = (
    "`eqx_sow.Append()`, `eqx_sow.Last()`, `eqx_sow.Fold(init, fn)` or "
    "`eqx_sow.Buffer(size)`, or a dict of names to them"
)
# What each option takes, for a message, and whether a value is that.
_TAKES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "names": (
        "a name, a glob, a sequence of them, or a function of a name",
        _one_or_several(lambda x: isinstance(x, str) or callable(x)),
    ),
    "methods": (
        "the name of a method, or a sequence of them",
        _one_or_several(lambda x: isinstance(x, str)),
    ),
    "reduce": (_REDUCERS, _one_or_by_name(lambda x: isinstance(x, Reducer))),
    "transform": (
        "a function of the value, or a dict of names to functions",
        _one_or_by_name(callable),
    ),
    "spec": ("a dict of names to annotations", _is_dict),
    "values": ("a dict of names to values, such as `{'h': jnp.zeros(3)}`", _is_dict),
    "when": ("a function of the value", callable),
    "every": ("an integer", lambda x: as_integer(x) is not None),
    "callback": ("a function of an event", callable),
    **dict.fromkeys(
        ("inputs", "scope", "ordered", "with_index"), ("`True` or `False`", _is_flag)
    ),
}
# Those that may be `None`.
_OPTIONAL = {"names", "reduce", "transform", "spec", "when", "callback"}


# --- checks of their own, and in what form the library wants a value ---
def _as_tuple(x: Any) -> tuple[Any, ...]:
    return (x,) if isinstance(x, str) or callable(x) else tuple(x)


def _names(option: str, names: Any) -> tuple[Any, ...] | None:
    if names is None:
        return None
    for predicate in filter(callable, _as_tuple(names)):
        check_arity(option, predicate, "(name) -> bool")
    return _as_tuple(names)


_JIT_IT = "To capture what a function returns, `jax.jit` it, or `sow` there."


def _capture(option: str, capture: Any) -> Any:
    """`None` for no capture."""
    several = capture if isinstance(capture, tuple) else (capture,)
    if capture is None or capture is False:
        return None
    if capture is True or all(isinstance(c, type) for c in several):
        return capture
    if isinstance(capture, tuple) or is_function_to_capture(capture):
        for fn in (c for c in several if not isinstance(c, type)):
            _check_function(option, fn)
        return capture
    if isinstance(capture, str):
        raise TypeError(
            f"`{option}` takes no path. To choose by path, write `capture=True, "
            f"names={capture!r}`."
        )
    if isinstance(capture, eqx.Module):
        raise TypeError(
            f"`{option}` takes no module. To choose by path, write "
            '`lambda path, module: path == "layers/0"`.'
        )
    if not callable(capture):
        raise TypeError(
            f"`{option}` takes `True`, a class, a function of JAX's or one that "
            "`jax.jit` or `eqx.filter_jit` made, a tuple of these, or a predicate "
            f"`(path, module) -> bool`, not {capture!r}. To choose by path, write a "
            "predicate."
        )
    check_arity(option, capture, "(path, module) -> bool", _JIT_IT)
    return capture


def _check_function(option: str, fn: Any) -> None:
    if not isinstance(inspect.unwrap(fn), types.FunctionType):
        raise TypeError(
            f"`{option}` takes classes and functions, and {fn!r} is neither. Of a "
            "module that was compiled, give the class."
        )
    if not is_function_to_capture(fn):
        raise TypeError(
            f"`{option}` takes functions that were compiled, and {fn!r} was not. "
            f"{_JIT_IT}"
        )


def _every(option: str, every: Any) -> int:
    n: Any = as_integer(every)
    if n < 1:
        raise ValueError(f"`{option}` is at least 1, not {n}.")
    return n


def _callback(option: str, callback: Any) -> Const:
    del option
    callback = print_event if callback is None else callback
    plain = types.FunctionType, types.MethodType, types.BuiltinFunctionType
    if not isinstance(callback, plain):
        # It may hold arrays. A bound method is compared by which object it is of.
        callback = types.MethodType(type(callback).__call__, callback)
    return Const(callback)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "names": _names,
    "modes": as_modes,
    "mode": as_mode,
    "capture": _capture,
    "methods": lambda option, methods: _as_tuple(methods),
    "every": _every,
    "callback": _callback,
}
