"""What functions read from outside: what they close over, globals, defaults, and what
these lead to. It is only looked at."""

import dataclasses as dc
import dis
import functools as ft
import inspect
import itertools as it
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
import numpy as np

from .. import _compat
from .._frames import is_library
from .._mark.calls import Path
from .._mark.noting import is_wrapper, Jacobian, keys


class Variable(str):
    """The name of a variable, at the beginning of a path."""


def positional_names(fn: Callable, n: int) -> list[str]:
    """What a function calls its first `n` arguments."""
    while isinstance(fn, Jacobian):
        fn = fn.fun
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = []
    for p in parameters:
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            names.append(p.name)
        elif p.kind == p.VAR_POSITIONAL:
            names += [f"{p.name}/{i}" for i in range(n - len(names))]
    return [*names, *(f"args/{i}" for i in range(len(names), n))][:n]


def reached(fn: Any, args: tuple, kwargs: dict) -> Iterator[tuple[Path, Any]]:
    """The arrays and the modules that a function reads from outside, and their paths:
    each begins with the name of the variable that is nearest. What a function leads to
    without a name, as `jax.vmap(model)` leads to the model, is at the path of that
    function."""
    seen: dict[int, Any] = {}
    todo: list[tuple[Path, Any]] = [((), x) for x in (*kwargs.values(), *args, fn)]
    while todo:
        path, x = todo.pop()
        if type(x) in _PLAIN:
            continue
        if isinstance(x, eqx.Module) or eqx.is_array_like(x):
            yield path, x
        # A module may be in two places, and both count.
        if id(x) in seen and not isinstance(x, eqx.Module):
            continue
        seen[id(x)] = x
        todo += reversed(list(_steps(x, path)))


def _steps(x: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """What one gets to from an object."""
    if isinstance(x, _compat.FilterJit):
        yield path, x.__wrapped__
    elif is_function(x):
        for name, value in _variables(x):
            yield ((Variable(name),) if name else path), value
        inner = _wrapped(x)
        if inner is not None:
            yield path, inner
    elif isinstance(x, types.ModuleType):
        return
    elif isinstance(x, type):
        for name, value in vars(x).items() if not _is_installed(x) else ():
            yield (*path, name), value
    elif isinstance(x, dict):
        for key, value in x.items():
            yield (*path, str(key)), value
    elif not jtu.all_leaves((x,)):
        yield from children(x, path)
        if isinstance(x, eqx.Module) and not _is_installed(type(x)):
            yield from (((), method) for method in _methods(type(x)))
    elif type(x) is types.SimpleNamespace or not _is_installed(type(x)):
        yield from _attributes(x, path)


def _attributes(x: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Of an object that is no PyTree, of a class of the user's: its class, and all that
    it holds."""
    yield (), type(x)
    slots = [getattr(c, "__slots__", ()) for c in type(x).__mro__]
    for name in it.chain(vars(x) if hasattr(x, "__dict__") else (), *slots):
        if not name.startswith("__") and hasattr(x, name):
            yield (*path, name), getattr(x, name)


# The fields in which transformed functions hold the function, Equinox's and ours.
_WRAPPED = frozenset(
    "__wrapped__ __self__ __func__ _fn fn func _fun fun _fun_value_and_grad".split()
)


def children(node: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """The children of a PyTree, one level down, and their paths. A function that was
    made of another one leads there without a key of its own: in
    `eqx.filter_vmap(model)`, `model` is at the path of the whole."""
    if isinstance(node, eqx.Partial | jtu.Partial):
        names = positional_names(node.func, len(node.args))
        for name, x in zip(names, node.args):
            yield (*path, *name.split("/")), x
        for name, x in node.keywords.items():
            yield (*path, name), x
        yield path, node.func
        return
    is_child = lambda x: x is not node
    transformed = is_wrapper(node)
    for at, child in jtu.tree_leaves_with_path(node, is_leaf=is_child):
        (key,) = keys(at)
        yield (path if transformed and key in _WRAPPED else (*path, key)), child


def is_internal(cls: type) -> bool:
    """Whether a library makes modules of this class for itself, on the way: one that is
    private, as `_Damped` of optimistix, or around a function, as its `OutAsArray`."""
    names = {f.name for f in dc.fields(cls)}
    return _is_installed(cls) and (
        cls.__name__.startswith("_") or not _WRAPPED.isdisjoint(names)
    )


def _methods(cls: type) -> Iterator[Any]:
    """The functions in a class of modules."""
    for c in cls.__mro__:
        if c not in eqx.Module.__mro__:
            for x in list(vars(c).values()):
                fn = getattr(x, "fget", None) or getattr(x, "__func__", x)
                if is_function(fn) and _is_at_home(fn, None):
                    yield fn


def is_function(x: Any) -> bool:
    """Whether it is called, and is not a PyTree: functions, methods, partials, and what
    JAX and Python make of them."""
    if isinstance(x, types.FunctionType | types.MethodType | ft.partial):
        return True
    if isinstance(x, type | eqx.Module) or not callable(x):
        return False
    return hasattr(x, "__wrapped__") or _is_of_jax(x)


def _is_of_jax(x: Any) -> bool:
    """An object that holds functions, such as a `jax.custom_jvp`."""
    return type(x).__module__.startswith("jax.") and hasattr(x, "__dict__")


def _wrapped(fn: Any) -> Any:
    """The function, or the module, that another function is made of, where no variable
    holds it."""
    if isinstance(fn, types.MethodType):
        return fn.__self__
    if isinstance(fn, types.FunctionType | ft.partial):
        return None
    return getattr(fn, "__wrapped__", None)


def _variables(fn: Any) -> Iterator[tuple[str, Any]]:
    """What a function reads, and what it calls that."""
    if isinstance(fn, types.MethodType):
        yield "", fn.__func__
    elif isinstance(fn, types.FunctionType):
        yield from _of_function(fn)
    elif isinstance(fn, ft.partial):
        yield "", fn.func
        yield from zip(positional_names(fn.func, len(fn.args)), fn.args)
        yield from fn.keywords.items()
    elif _is_of_jax(fn):
        for x in list(vars(fn).values()):
            if callable(x):
                yield "", x


def _of_function(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = fn.__code__
    theirs = is_library(code.co_filename)
    for name, cell in zip(code.co_freevars, fn.__closure__ or ()):
        if cell == types.CellType():  # not assigned yet
            continue
        x = cell.cell_contents
        # `jax.vmap(model)` closes over the model, and has no name for it.
        same = x is getattr(fn, "__wrapped__", None)
        if isinstance(x, types.ModuleType):
            yield from _globals(vars(x), _names_in(code)[1], fn)
        else:
            yield ("" if theirs or same else name), x
    defaults = fn.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) :], defaults)
    yield from (fn.__kwdefaults__ or {}).items()
    if theirs:
        return
    space = fn.__globals__
    for name in _names_in(code)[0]:
        if isinstance(module := space.get(name), types.ModuleType):
            yield from _globals(vars(module), _names_in(code)[1], fn)
        else:
            yield from _globals(space, [name], fn)


def _globals(space: dict, names: list[str], fn: types.FunctionType):
    for name in names:
        x = space.get(name)
        if name in space and (not is_function(x) or _is_at_home(x, fn.__module__)):
            yield name, x


_names: weakref.WeakKeyDictionary[types.CodeType, Any] = weakref.WeakKeyDictionary()


def _names_in(code: types.CodeType) -> tuple[list[str], list[str]]:
    """The globals that code reads or writes, and all its names of attributes."""
    if code not in _names:
        found = dict.fromkeys(
            i.argval
            for i in dis.get_instructions(code)
            if i.opname in ("LOAD_GLOBAL", "STORE_GLOBAL")
        )
        attributes = dict.fromkeys(code.co_names)
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                more, names = _names_in(inner)
                found.update(dict.fromkeys(more))
                attributes.update(dict.fromkeys(names))
        _names[code] = list(found), list(attributes)
    return _names[code]


_installed = (
    "<frozen",
    *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
)


def _is_installed(cls: type) -> bool:
    """Whether a class is part of Python or of a package, rather than the user's."""
    module = inspect.getmodule(cls)
    file = getattr(module, "__file__", None)
    if module is None or module.__name__ == "__main__":
        return False
    return file is None or file.startswith(_installed)


def _is_at_home(fn: Any, origin: str | None) -> bool:
    """Whether a function is the user's, or from the package of the module `origin`. To
    follow all would lead through half of what is installed."""
    module = getattr(fn, "__module__", None) or ""
    if origin and module.split(".")[0] == origin.split(".")[0]:
        return True
    while hasattr(inner := getattr(fn, "func", fn), "__wrapped__"):
        fn = inner.__wrapped__
    code = getattr(inner, "__code__", None)
    return code is not None and not code.co_filename.startswith(_installed)


_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, np.ndarray))
