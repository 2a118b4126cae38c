"""Objects that are not PyTrees: whether they hold traced arrays."""

import contextlib
import inspect
import types
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.core
import jax.tree_util as jtu
import numpy as np

from .static import state_of


# What holds nothing that is traced, or nothing that anybody put there.
_PLAIN = (
    *(str, bytes, int, float, complex, type, types.NoneType, types.ModuleType),
    *(types.CodeType, np.dtype, np.generic, np.ufunc, inspect.Signature),
    *(jax.Array, type(jtu.tree_structure(0))),
)
_SEQUENCES: tuple[Any, ...] = list, tuple, set, frozenset, deque
# So many objects are looked at, in one: enough for all that a person would write.
_MOST = 2000


class Holder(NamedTuple):
    """What a `Site` knows of a leaf that is not a PyTree and holds a traced array: the
    leaf itself must not outlive the trace."""

    # What the leaf is, where it is in the value, and where in it the array is.
    what: str
    leaf: str
    where: str


def holder(value: Any, i: int, leaf: Any) -> Holder | None:
    """For `leaf`, which is leaf `i` of a value and no array."""
    where = _where_traced(leaf)
    if where is None:
        return None
    path, _ = jtu.tree_leaves_with_path(value)[i]
    what = f"an object of the class `{type(leaf).__qualname__}`"
    if type(leaf) in (types.FunctionType, types.MethodType):
        what = f"the function `{leaf.__qualname__}`"
    return Holder(what, jtu.keystr(path), where)


def _where_traced(x: Any) -> str | None:
    """Where in an object there is a traced array, such as `.parts[0]['h']`, or `None`.
    No property of it is called, and no `==`."""
    if issubclass(type(x), _PLAIN):
        return None
    todo, seen = deque([("", x)]), {id(x): x}
    while todo:
        where, outer = todo.popleft()
        for key, y in _inside(outer):
            if issubclass(type(y), jax.core.Tracer):
                return where + key
            if issubclass(type(y), _PLAIN) or id(y) in seen or len(seen) == _MOST:
                continue
            # It is kept: no other object has its id.
            seen[id(y)] = y
            todo.append((where + key, y))
    return None


def _inside(x: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, and how to get there."""
    kind = type(x)
    if issubclass(kind, dict):
        for key, y in dict.items(x):
            # The `repr` of any other object may do anything.
            yield f"[{key!r}]" if type(key) in (str, int) else "[...]", y
    for base in _SEQUENCES:
        if issubclass(kind, base):
            yield from ((f"[{i}]", y) for i, y in enumerate(base.__iter__(x)))
    if kind is np.ndarray and x.dtype == object:
        yield from ((f".flat[{i}]", y) for i, y in enumerate(x.flat))
    if kind in (types.MethodType, types.BuiltinMethodType):
        yield ".__self__", x.__self__
    if kind is types.MethodType:
        yield ".__func__", x.__func__
    if kind is types.FunctionType:
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or ()):
            with contextlib.suppress(ValueError):  # it is empty
                yield f".__closure__[{name!r}]", cell.cell_contents
        yield ".__defaults__", x.__defaults__
        yield ".__kwdefaults__", x.__kwdefaults__
    yield from ((f".{name}", y) for name, y in state_of(x).items())
