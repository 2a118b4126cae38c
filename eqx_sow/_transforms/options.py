"""The options that the public functions take.

An option is declared in four places: in the signature of the public function, which
documents it; in a `TypedDict`, which type checkers see; in `_CHECKS`, where its value
is checked; and, if it holds no arrays, as a field of `Options`, which reaches the
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

    def __repr__(self):
        # Only what was said.
        plain = {f.name: f.default for f in dc.fields(self)}
        said = {k: v for k, v in vars(self).items() if plain.get(k) != v}
        return f"Options({', '.join(f'{k}={v!r}' for k, v in said.items())})"


def checked(call: str, fn: Any, given: Mapping[str, Any]) -> tuple[Options, Any]:
    """The options that a call was given: those for `Options`, and a dict of the
    others."""
    if not callable(fn):
        raise TypeError(f"`{call}(fn)` takes a function or a model, not {fn!r}.")
    # Its message has the value, and so no need of the name of an option.
    check_tag(call, given["tag"])
    options = {
        name: check(f"{call}(..., {name}=...)", given[name])
        for name, check in _CHECKS.items()
        if name in given
    }
    for name in ("inputs", "methods"):
        plain = getattr(Options, name)
        if options["capture"] is None and options.get(name, plain) != plain:
            raise ValueError(
                f"`{call}(..., {name}={options[name]!r})` does nothing without "
                "`capture`, which says what to mark. Write `capture=True` for every "
                "module."
            )
    fields = {field.name for field in dc.fields(Options)}
    static = {k: v for k, v in options.items() if k in fields}
    others = {k: v for k, v in options.items() if k not in static}
    return Options(tag=given["tag"], **static), others


_JIT_IT = "To capture what a function returns, `jax.jit` it, or `sow` there."


def as_capture(option: str, capture: Any) -> Any:
    """`None` for no capture."""
    if capture is None or capture is False:
        return None
    if isinstance(capture, str):
        raise TypeError(
            f"`{option}` takes no path. To choose by path, write `capture=True, "
            f"names={capture!r}`."
        )
    classes = capture if isinstance(capture, tuple) else (capture,)
    if capture is True or all(isinstance(c, type) for c in classes):
        return capture
    if isinstance(capture, tuple) or is_function_to_capture(capture):
        for fn in (c for c in classes if not isinstance(c, type)):
            if not isinstance(inspect.unwrap(fn), types.FunctionType):
                raise TypeError(
                    f"`{option}` takes classes and functions, and {fn!r} is neither. "
                    "Of a module that was compiled, give the class."
                )
            if not is_function_to_capture(fn):
                raise TypeError(
                    f"`{option}` takes functions that were compiled, and {fn!r} was "
                    f"not. {_JIT_IT}"
                )
        return capture
    if isinstance(capture, eqx.Module):
        raise TypeError(
            f"`{option}` takes no module. To choose by path, write "
            '`lambda path, module: path == "layers/0"`.'
        )
    if callable(capture):
        check_arity(option, capture, "(path, module) -> bool", _JIT_IT)
        return capture
    raise TypeError(
        f"`{option}` takes `True`, a class, a function of JAX's or one that `jax.jit` "
        "or `eqx.filter_jit` made, a tuple of these, or a predicate "
        "`(path, module) -> bool`, not "
        f"{capture!r}. To choose by path, write a predicate."
    )


def as_methods(option: str, methods: Any) -> tuple[str, ...]:
    if isinstance(methods, str):
        return (methods,)
    if isinstance(methods, Sequence) and all(isinstance(m, str) for m in methods):
        return tuple(methods)
    raise TypeError(
        f"`{option}` takes the name of a method, or a sequence of them, not "
        f"{methods!r}."
    )


def as_flag(option: str, flag: Any) -> bool:
    if not isinstance(flag, bool):
        raise TypeError(f"`{option}` takes `True` or `False`, not {flag!r}.")
    return flag


def as_names(option: str, names: Any) -> tuple[Any, ...] | None:
    if names is None:
        return None
    if isinstance(names, str) or callable(names):
        names = (names,)
    if isinstance(names, Sequence | set | frozenset):
        if all(isinstance(name, str) or callable(name) for name in names):
            for predicate in filter(callable, names):
                check_arity(option, predicate, "(name) -> bool")
            return tuple(names)
    raise TypeError(
        f"`{option}` takes a name, a glob, a sequence of them, or a function of a "
        f"name, not {names!r}."
    )


def by_name(option: str, values: Any) -> Mapping[str, Any]:
    """A dict of names or globs to something. As a PyTree, a `dict` would be sorted, and
    globs go in their order."""
    for key in values:
        if not isinstance(key, str):
            raise TypeError(
                f"`{option}` takes a dict whose keys are names or globs, and "
                f"{key!r} is neither."
            )
    return OrderedDict(values)


def _each(option: str, value: Any, check: Callable[[Any], bool], takes: str) -> Any:
    """One thing for all names, or a dict of names to such things; or `None`."""
    named = isinstance(value, Mapping)
    value = by_name(option, value) if named else value
    for key, x in value.items() if named else [(None, value)]:
        if not check(x) and (named or x is not None):
            of = f" for {key!r}" if named else ""
            raise TypeError(f"`{option}` takes {takes}, not {x!r}{of}.")
    return value


def as_reduce(option: str, reduce: Any) -> Any:
    takes = (
        "`eqx_sow.Append()`, `eqx_sow.Last()`, `eqx_sow.Fold(init, fn)` or "
        "`eqx_sow.Buffer(size)`, or a dict of names to them"
    )
    return _each(option, reduce, lambda r: isinstance(r, Reducer), takes)


def as_transform(option: str, transform: Any) -> Any:
    takes = "a function of the value, or a dict of names to functions"
    return _each(option, transform, callable, takes)


def as_spec(option: str, spec: Any) -> Mapping[str, Any] | None:
    if spec is None or isinstance(spec, Mapping):
        return spec if spec is None else by_name(option, spec)
    raise TypeError(f"`{option}` takes a dict of names to annotations, not {spec!r}.")


def as_values(option: str, values: Any) -> Mapping[str, Any]:
    if isinstance(values, Mapping):
        return by_name(option, values)
    raise TypeError(
        f"`{option}` takes a dict of names to values, such as `{{'h': jnp.zeros(3)}}`, "
        f"not {type(values).__name__}."
    )


def as_when(option: str, when: Any) -> Any:
    if when is None or callable(when):
        return when
    raise TypeError(f"`{option}` takes a function of the value, not {when!r}.")


def as_every(option: str, every: Any) -> int:
    n = as_integer(every)
    if n is None:
        raise TypeError(f"`{option}` takes an integer, not {every!r}.")
    if n < 1:
        raise ValueError(f"`{option}` is at least 1, not {n}.")
    return n


_FUNCTIONS = types.FunctionType, types.MethodType, types.BuiltinFunctionType


def as_callback(option: str, callback: Any) -> Const:
    del option
    callback = print_event if callback is None else callback
    if not callable(callback):
        raise TypeError(
            f"`tap(fn, callback)` takes a function of an event, not {callback!r}."
        )
    if not isinstance(callback, _FUNCTIONS):
        # It may hold arrays. A bound method is compared by which object it is of.
        callback = types.MethodType(type(callback).__call__, callback)
    return Const(callback)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "names": as_names,
    "modes": as_modes,
    "mode": as_mode,
    "capture": as_capture,
    "methods": as_methods,
    "inputs": as_flag,
    "scope": as_flag,
    "reduce": as_reduce,
    "transform": as_transform,
    "spec": as_spec,
    "values": as_values,
    "when": as_when,
    "every": as_every,
    "ordered": as_flag,
    "with_index": as_flag,
    "callback": as_callback,
    "extra": lambda option, extra: extra,
}
