"""The options that the public functions take.

An option is declared in four places: in the signature of the public function, which
documents it; in a `TypedDict`, which type checkers see; in `_TAKES` or `_CHECKS`, for
what it takes; and, if it holds no arrays, as a field of `Options`, which reaches the
handler as one object. One that may hold arrays is in `Transformed._others` instead.
"""

import dataclasses as dc
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence, Set
from typing import Any, TypedDict

import equinox as eqx
import jax.numpy as jnp

from .. import _compat
from .._arrays import as_integer
from .._errors import check_arity
from .._handlers.delivery import print_event
from .._mark.noting import classes
from .._mark.sow import check_spec, check_tag
from .._mark.static import Const
from .._modules.capture import (
    is_function_to_capture,
    Marking,
    WITH_RULES,
)
from .._modules.naming import TO_CAPTURE_CALLS
from .._results.nodes import OfMode
from .._values.modes import as_mode, as_modes, Mode
from .._values.reduce import Reducer


# What type checkers know of the options.
class Selecting(TypedDict, total=False):
    """Of `save_intermediates` and `tap`."""

    tag: Hashable
    names: str | Sequence[str] | Callable[[str], bool] | None
    modes: Mode | Sequence[Mode] | None
    capture: bool | type | Collection[type | Callable] | Callable | None
    methods: str | Sequence[str]
    inputs: bool
    calls: bool
    scope: bool
    transform: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None


class Saving(Selecting, total=False):
    """Of `save_intermediates`."""

    reduce: Reducer | Mapping[str, Reducer] | None
    spec: Mapping[str, Any] | None


class Tapping(Selecting, total=False):
    """Of `tap`."""

    when: Callable[[Any], Any] | Callable[[Any, Any], Any] | None
    every: int
    ordered: bool
    extra: Any


@dc.dataclass(frozen=True, eq=False)
class Options(Marking):
    """The options of one call that hold no arrays, checked: these, and `Marking`.

    Two are equal if no program could tell them apart, as for a `Const`. What was
    compiled for a user who writes them anew in each call is then found again. It is
    asked in each of these calls.
    """

    names: tuple[Any, ...] | None = None
    mode: str = "primal"
    spec: Mapping[str, Any] | None = None
    every: int = 1
    ordered: bool = False
    with_index: bool = False
    callback: Const | None = None

    @_compat.cached_property
    def _parts(self) -> tuple[Const, ...]:
        return tuple(Const(getattr(self, field.name)) for field in dc.fields(self))

    @_compat.cached_property
    def _hash(self) -> int:
        return hash(self._parts)

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        return type(other) is Options and self._parts == other._parts


def checked(call: str, fn: Any, given: Mapping[str, Any]) -> tuple[Options, Any]:
    """The options that were `given` to a `call`, such as `plant`: those for `Options`,
    and a dict of the others."""
    if not callable(fn):
        instead = (
            f"The arguments of the function go to what `{call}` returns: "
            f"`{call}(fn)(x)`."
        )
        if isinstance(fn, eqx.Module):
            instead = (
                "It has no `__call__`: pass one of its methods, as `model.encode`."
            )
        raise TypeError(
            f"`{call}(fn)` takes a function or a model, not {_in_short(fn)}. {instead}"
        )
    options = {k: _checked(call, k, v) for k, v in given.items()}
    _check_capture(call, options)
    fields = {field.name for field in dc.fields(Options)}
    static = {k: v for k, v in options.items() if k in fields}
    others = {k: v for k, v in options.items() if k not in static}
    return Options(**static), others


def _check_capture(call: str, options: Mapping[str, Any]) -> None:
    """Raises if an option is about captured calls, and there are none of that kind."""
    capture = options["capture"]
    of_modules = capture and Marking(capture).selected[0] != ()
    what = {
        "inputs": ("calls", capture),
        "calls": ("calls", capture),
        "methods": ("modules", of_modules),
    }
    for name, (kind, is_fine) in what.items():
        if not is_fine and options[name] != getattr(Options, name):
            raise ValueError(
                f"`{call}(..., {name}={options[name]!r})` is about {kind}, and "
                "`capture` selects none. Leave it out, or write `capture=True` for "
                "every module."
            )


# What each option takes, for a message; of which type a value is; and of which one a
# container of such values, if there may be several.
_TAKES: dict[str, tuple[str, Any, Any]] = {
    "names": (
        "a name, a glob, a sequence of them, or a function of a name",
        (str, Callable, types.NoneType),
        (Sequence, Set),
    ),
    "methods": ("the name of a method, or a sequence of them", str, (Sequence, Set)),
    "reduce": (
        "`eqx_sow.Append()`, `eqx_sow.Last()`, `eqx_sow.Fold(init, fn)` or "
        "`eqx_sow.Buffer(size)`, or a dict of names to them",
        (Reducer, types.NoneType),
        Mapping,
    ),
    "transform": (
        "a function of the value, or a dict of names to functions",
        (Callable, types.NoneType),
        Mapping,
    ),
    "spec": ("a dict of names to annotations", (Mapping, types.NoneType), ()),
    "values": (
        "a dict `{'h': value}` of names to values, such as the second output of "
        "`save_intermediates(fn)(...)`",
        Mapping,
        (),
    ),
    "when": ("a function of the value", (Callable, types.NoneType), ()),
    "callback": ("a function of an event", (Callable, types.NoneType), ()),
    **dict.fromkeys(
        ("inputs", "calls", "scope", "ordered", "with_index"),
        ("`True` or `False`", bool, ()),
    ),
}


def _checked(call: str, name: str, value: Any) -> Any:
    """The value of an option, as the library wants it."""
    option = f"{call}(..., {name}=...)"
    what, one, several = _TAKES.get(name, ("", object, ()))
    if not isinstance(value, one):
        parts = value if isinstance(value, several) else [value]
        parts = parts.values() if isinstance(parts, Mapping) else parts
        if not all(isinstance(x, one) for x in parts):
            got = eqx.tree_pformat(dict(value) if isinstance(value, dict) else value)
            raise TypeError(f"`{option}` takes {what}, not {got}.")
    if isinstance(value, Mapping) and name in _TAKES:
        for key in value:
            if not isinstance(key, str):
                raise TypeError(
                    f"`{option}` takes a dict whose keys are names or globs, and "
                    f"{key!r} is neither."
                )
        # As a PyTree, a `dict` would be sorted, and globs go in their order.
        value = value if isinstance(value, OfMode) else OrderedDict(value)
    return _CHECKS[name](option, value) if name in _CHECKS else value


# --- checks of their own, and in what form the library wants a value ---
def _as_tuple(x: Any) -> tuple[Any, ...]:
    return (x,) if isinstance(x, str) or callable(x) else tuple(x)


def _names(option: str, names: Any) -> tuple[Any, ...] | None:
    if names is None:
        return None
    for predicate in filter(callable, _as_tuple(names)):
        check_arity(option, predicate, "(name) -> bool")
    return _as_tuple(names)


def _capture(option: str, capture: Any) -> Any:
    """`None` for no capture."""
    capture = tuple(capture) if isinstance(capture, list | Set) else capture
    several = capture if isinstance(capture, tuple) else (capture,)
    if capture is None or capture is False:
        return None
    if all(map(_may_be_one_of_several, several)):
        return capture
    for ufunc in several:
        if isinstance(ufunc, jnp.ufunc):
            name = getattr(ufunc, "__name__", "ufunc")
            raise TypeError(
                f"`{option}`: the calls of `jnp.{name}`, a ufunc, cannot be captured. "
                f"Put it into a function of your own, decorate that with `jax.jit`, "
                "and capture that function. Or `sow` the result."
            )
    no_predicate = isinstance(capture, eqx.Module) or is_function_to_capture(capture)
    if no_predicate or not callable(capture):
        name = capture if isinstance(capture, str) else ""
        # The fields that paths consist of are written in lower case.
        is_class = name.isidentifier() and name[0].isupper()
        path = "layers/0" if is_class else name or "layers/0"
        shown, inner = _in_short(capture), getattr(capture, "__wrapped__", capture)
        if isinstance(inner, eqx.Module):
            shown = f"a module of class `{type(inner).__name__}`"
        if (module := _module_of_method(capture)) is not None:
            shown = f"a method of one `{type(module).__name__}`"
        instead = ""
        if is_class:
            cls = f"eqx.nn.{name}" if hasattr(eqx.nn, name) else name
            instead = f" Write `capture={cls}`, the class itself, not its name."
        raise TypeError(
            f"`{option}` takes `True`, a class, a JAX function, a function made by "
            "`jax.jit` or `eqx.filter_jit`, several of these, or a predicate "
            f"`(path, module) -> bool`, not {shown}.{instead} To choose by path, write "
            f"`capture=True, names={path!r}`. For a module, give its class "
            f"(and `methods=` for a method other than `__call__`). {TO_CAPTURE_CALLS}"
        )
    if (cls := _class_of_method(capture)) is not None:
        what, name = cls.__name__, capture.__name__
        methods = f", methods={name!r}" * (name != "__call__")
        raise TypeError(
            f"`{option}`: `{what}.{name}` is a method of modules, not a predicate "
            f"`(path, module) -> bool`. Write `capture={what}{methods}`."
        )
    check_arity(option, capture, "(path, module) -> bool", TO_CAPTURE_CALLS)
    return capture


def _may_be_one_of_several(x: Any) -> bool:
    # A module that was compiled is none: its class is. Nor is a method of one module.
    is_function = isinstance(inspect.unwrap(x), types.FunctionType)
    is_function |= isinstance(x, WITH_RULES)
    is_function &= _module_of_method(x) is None
    is_class = x is True or isinstance(x, type)
    return is_class or (is_function_to_capture(x) and is_function)


def _class_of_method(x: Any) -> type | None:
    """The class of modules that a function is a method of, if it is one."""
    if not isinstance(x, types.FunctionType) or x.__code__.co_varnames[:1] != ("self",):
        return None
    return next((cls for cls in classes() if vars(cls).get(x.__name__) is x), None)


def _in_short(x: Any) -> str:
    # What a large model prints would hide what to write instead.
    is_module = lambda x: isinstance(x, eqx.Module)
    return eqx.tree_pformat(x, struct_as_array=True, truncate_leaf=is_module)


def _module_of_method(x: Any) -> eqx.Module | None:
    module = getattr(x, "__self__", None)
    return module if isinstance(module, eqx.Module) else None


def _spec(option: str, spec: Any) -> Any:
    for annotation in (spec or {}).values():
        check_spec(option, annotation)
    return spec


def _every(option: str, every: Any) -> int:
    n = as_integer(every)
    if n is None:
        raise TypeError(f"`{option}` takes an integer, not {every!r}.")
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


# Each gets what messages call the option, such as `tap(..., every=...)`, and the value.
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "tag": check_tag,
    "names": _names,
    "modes": as_modes,
    "mode": as_mode,
    "capture": _capture,
    "methods": lambda option, methods: _as_tuple(methods),
    "spec": _spec,
    "every": _every,
    "callback": _callback,
}
