"""Where the arrays of a program are: in its arguments, and in variables that it reads.

A place is a path: a tuple of keys, as strings. What is in the function itself has no
more in front of that, what is in an argument begins with the name of the parameter, and
what is in a variable with the name of that. Nothing is changed, only looked at.
"""

import functools as ft
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu

from .. import _compat
from .._mark.calls import Path
from .._mark.noting import form_of, is_part, is_wrapper, keys, modules
from .._mark.static import Const, take_apart
from . import variables


class Places:
    """Those of a function and its arguments, and of what these read from outside."""

    def __init__(self, fn: Callable, args: tuple, kwargs: dict):
        self._called = fn, args, kwargs
        # What has a path of its own: the function, arguments, variables.
        self.roots = list(_roots(fn, args, kwargs))
        # The places of the inputs of the program, one after the other. An array may be
        # in several places, and is then several inputs.
        of_array: dict[int, list[Path]] = {}
        for path, tree in self.roots:
            for at, x in jtu.tree_leaves_with_path(tree):
                of_array.setdefault(id(x), []).append((*path, *keys(at)))
        inputs, *_ = take_apart(self._called)
        self.inputs: list[Path] = [
            places.pop(0) if len(places) > 1 else places[0]
            for places in (of_array.get(id(x), [("?",)]) for x in inputs)
        ]

    @ft.cached_property
    def modules(self) -> list[tuple[Path, Any]]:
        return list(modules(self.roots))

    @ft.cached_property
    def _outside(self) -> list[tuple[Path, Any]]:
        """The arrays and the modules in variables that the function and its arguments
        read."""
        return list(variables.reached(*self._called))

    @ft.cached_property
    def _of_constants(self) -> dict[int, tuple[Any, list[Path]]]:
        found: dict[int, tuple[Any, list[Path]]] = {}
        for path, x in self._outside:
            if not isinstance(x, eqx.Module):
                _, paths = found.setdefault(id(x), (x, []))
                paths.append(path)
        return found

    def root_of(self, path: Path) -> Path:
        """The path of the argument, or the variable, that a place is in."""
        if path and isinstance(path[0], variables.Variable):
            return path[:1]
        heads = (head for head, _ in self.roots if path[: len(head)] == head)
        return max(heads, key=len, default=())

    @ft.cached_property
    def _sources(self) -> list[tuple[Path, tuple[int, int | None]]]:
        """The places of all arrays with inexact numbers, and the sources they are."""
        inputs, *_ = take_apart(self._called)
        found: list[tuple[Path, tuple[int, int | None]]] = [
            (path, (i, None))
            for i, (path, x) in enumerate(zip(self.inputs, inputs))
            if jnp.issubdtype(x.dtype, jnp.inexact)
        ]
        for x, paths in self.__dict__.get("_of_constants", {}).values():
            if eqx.is_inexact_array(x):
                found += [(path, (1 << 30, id(x))) for path in paths]
        return found

    def sources_in(self, path: Path) -> set[tuple[int, int | None]]:
        """What is in the tree at a place: see `Source` in `naming.py`."""
        n = len(path)
        return {source for at, source in self._sources if at[:n] == path}

    def of_constant(self, x: Any) -> list[Path]:
        """The places of an array that the program holds."""
        _, paths = self._of_constants.get(id(x), (x, []))
        return paths

    def of_form(self, form: Const) -> list[Path]:
        """The places of modules without arrays that are like this."""
        is_like = lambda x: form_of(x) == form
        found = [path for path, x in self.modules if is_like(x)]
        found = found or [p for p, x in self._outside if is_part(x) and is_like(x)]
        return list(dict.fromkeys(found))

    def of_shared(self, path: Path, cls: type, leaf: Path) -> Path | None:
        """Where a module of this class is that shares its array `leaf` with the module
        at `path`, as `eqx.nn.Shared` has it: it has none there of its own."""
        root = self.root_of(path)
        arrays = set(self.inputs)
        found = [
            place
            for place, other in self.classes.items()
            if other is cls and place[: len(root)] == root
            if (*place, *leaf) not in arrays
        ]
        return found[0] if len(found) == 1 else None

    @ft.cached_property
    def classes(self) -> dict[Path, type]:
        """The classes of the modules at their places."""
        outside = self.__dict__.get("_outside", ())
        found = {path: type(x) for path, x in outside if is_part(x)}
        return {**found, **{path: type(x) for path, x in self.modules}}


def modules_without_arrays(roots: Any) -> dict[int, Path]:
    has_arrays = lambda x: any(map(eqx.is_array, jtu.tree_leaves(x)))
    return {id(x): path for path, x in modules(roots) if not has_arrays(x)}


def _roots(fn: Any, args: tuple, kwargs: dict) -> Iterator[tuple[Path, Any]]:
    """What a call is made of, as PyTrees with their paths."""
    names = variables.positional_names(fn, len(args))
    todo = [
        *((tuple(name.split("/")), x) for name, x in zip(names, args)),
        *(((name,), x) for name, x in kwargs.items()),
    ]
    todo = [((), fn), *todo][::-1]
    while todo:
        path, x = todo.pop()
        if isinstance(x, _compat.FilterJit):
            todo.append((path, x.__wrapped__))
        elif is_wrapper(x) or isinstance(x, jtu.Partial):
            todo += reversed(list(variables.children(x, path)))
        else:
            yield path, x
