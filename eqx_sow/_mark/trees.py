"""PyTrees with modules in them: what each node holds, and under which key."""

import functools as ft
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from .._frames import is_installed
from .calls import Path


class Root(str):
    """The name of an argument or a variable, at the beginning of a path."""


def numbered(path: Path, n: int) -> Path:
    """A path of which the last key has this number. 0 is none."""
    return (*path[:-1], type(path[-1])(f"{path[-1]}#{n}")) if n else path


# No `__wrapped__` tells what this is.
_Jacobian: Any = type(eqx.filter_jacrev(lambda: None))
# How the key `""` is written. Elsewhere, "" is no key.
_EMPTY = "''"
# Where something that was made of a function, or of a method, holds that.
INNER = "__wrapped__", "__self__", "__func__", "fget", "fun"


def is_wrapper(x: Any) -> bool:
    """Whether it is a transformed function of Equinox's, a partial that is a PyTree, or
    a method of a module. Most are modules, too, but not part of a model."""
    of_module = is_module(x) and _is_class_of_wrappers(type(x))
    return of_module or isinstance(x, jtu.Partial)


@ft.cache
def _is_class_of_wrappers(cls: type) -> bool:
    return (
        issubclass(cls, eqx.Partial | _Jacobian)
        or "__self__" in cls.__dataclass_fields__
        or isinstance(getattr(cls, "__wrapped__", None), property)
        and is_installed(cls.__module__)  # one of the user's is part of a model
    )


def is_part(x: Any) -> bool:
    """Whether it is a module that is part of a model."""
    return is_module(x) and not _is_class_of_wrappers(type(x))


def is_module(x: Any) -> bool:
    # This is asked of every node of a model, and `isinstance` of a class with `abc`'s
    # metaclass takes five times as long.
    return eqx.Module in type(x).__mro__


def walk(roots: Iterable[tuple[Path, Any]]) -> Iterator[tuple[Path, Any]]:
    """All that is in these trees, each with its path, in the order of
    `jax.tree.leaves`. Wrappers have no keys of their own: the arrays of a `Linear` in
    `[eqx.filter_checkpoint(linear)]` are at `0/weight` and `0/bias`."""
    todo = [*roots][::-1]
    while todo:
        path, x = todo.pop()
        yield path, x
        held = children(x) or ()
        todo += [((*path, key) if key else path, y) for key, y in held][::-1]


def children(x: Any) -> list[tuple[str, Any]] | None:
    """What a node holds, each with its key. `None` if it is a leaf."""
    if is_wrapper(x):
        return inside(x)
    fields = getattr(x, "_fields", None)
    if fields is not None and isinstance(x, tuple):
        # JAX 0.10 gives all fields of a named tuple the key of the first one.
        return list(zip(fields, x))
    try:
        found = jtu.default_registry.flatten_one_level_with_keys(x)
    except ValueError:
        # Of a variable: a dict whose keys cannot be sorted, such as 1 and "1".
        return _apart([(str(key) or _EMPTY, y) for key, y in x.items()])
    return found and _apart([(keys((key,))[0], y) for key, y in found[0]])


def _apart(held: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """What a node holds, with numbers for further keys that are alike as strings."""
    if len(held) == len({key for key, _ in held}):
        return held
    before: Counter[str] = Counter()
    new = []
    for key, y in held:
        new.append((f"{key}#{before[key]}" if before[key] else key, y))
        before[key] += 1
    return new


def leaf_paths(x: Any, leaves: Iterable[tuple[Any, Any]]) -> tuple[Path, ...]:
    """The paths that `walk` has for these leaves of a PyTree, given those of JAX."""
    leaves = list(leaves)
    if not any([_leads_into_wrapper(x, path) for path, _ in leaves]):
        return tuple([keys(path) for path, _ in leaves])
    found = {id(y): path for path, y in walk([((), x)])}
    return tuple(found.get(id(y), keys(path)) for path, y in leaves)


def _leads_into_wrapper(x: Any, path: Any) -> bool:
    for key in path[:-1]:
        if type(key) is jtu.GetAttrKey:
            x = getattr(x, key.name, None)
        elif type(key) is jtu.SequenceKey and isinstance(x, list | tuple):
            x = x[key.idx]
        elif type(key) is jtu.DictKey and isinstance(x, dict):
            x = x[key.key]
        else:
            return False
        if is_wrapper(x):
            return True
    return False


def keys(path: Any) -> Path:
    """The keys of a path in a PyTree, as strings."""
    return tuple(
        [
            key.name
            if type(key) is jtu.GetAttrKey
            else jtu.keystr((key,), simple=True) or _EMPTY
            for key in path
        ]
    )


def inside(x: Any) -> list[tuple[str, Any]]:
    """What a wrapper, or a partial, was made of. The function is at the path of the
    whole, and has no key of its own; the arguments have their names."""
    if not isinstance(x, eqx.Partial | ft.partial):
        return [("", getattr(x, name)) for name in INNER if hasattr(x, name)]
    names = positional_names(x.func, len(x.args))
    named = [*zip(names, x.args), *sorted(x.keywords.items())]
    # The module that a method is bound to has no name.
    return [
        ("", x.func),
        *(("", y) for name, y in named if name == "self"),
        *beside(x.func, [(name, y) for name, y in named if name != "self"]),
    ]


def beside(fn: Any, named: Iterable[tuple[str, Any]]) -> list[tuple[Root, Any]]:
    """The arguments of a function, with their names. One that is called like what is in
    the function has a number."""
    own = own_keys(fn)
    return [(Root(f"{name}#1" if name in own else name), x) for name, x in named]


def own_keys(fn: Any) -> set[str]:
    """The keys of what is in a function, if it is a module or one of its methods."""
    found, todo = set(), [fn]
    while todo:
        for key, x in children(todo.pop()) or ():
            if key:
                found.add(key)
            else:
                todo.append(x)
    return found


def positional_names(fn: Any, n: int) -> list[str]:
    """What a function calls its first `n` arguments."""
    while isinstance(fn, _Jacobian):
        fn = fn.fun
    try:
        arguments = inspect.signature(fn).bind_partial(*range(n)).arguments
    except (TypeError, ValueError):  # of a builtin
        arguments = {"args": tuple(range(n))}
    names = []
    for name, x in arguments.items():
        several = isinstance(x, tuple)  # of `*args`
        names += [f"{name}/{i}" for i in range(len(x))] if several else [name]
    return names
