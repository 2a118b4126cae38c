"""Where the arrays and the modules of a program are: in its arguments, and in variables
that it reads.

A place is a path: a tuple of keys, as strings. What is in the function itself has no
more in front of that, what is in an argument begins with the name of the parameter, and
what is in a variable with the name of that. Nothing is changed, only looked at.
"""

import functools as ft
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu

from .._mark.calls import Path
from .._mark.noting import is_part, is_wrapper, keys, modules
from .._mark.static import SameParts, take_apart
from .variables import children, positional_names, reached, Variable


class Places:
    """The places of what a function is called with, and of what it reads from outside.

    Every array that a value may come from has a number, its source: first the inputs of
    the program in their order, then the arrays that the program holds.
    """

    def __init__(self, fn: Callable, args: tuple, kwargs: dict):
        self._called = fn, args, kwargs
        self._roots = list(roots(fn, args, kwargs))
        self.modules = list(modules(self._roots))
        self.classes = {path: type(x) for path, x in self.modules}
        # An array may be in several places, and is then several inputs.
        of_array: dict[int, list[Path]] = defaultdict(list)
        for path, tree in self._roots:
            for at, x in jtu.tree_leaves_with_path(tree):
                of_array[id(x)].append((*path, *keys(at)))
        self._arrays, *_ = take_apart(self._called)
        self.n_inputs = len(self._arrays)
        self._paths: dict[int, list[Path]] = defaultdict(list)
        for i, x in enumerate(self._arrays):
            places = of_array[id(x)] or [("?",)]
            self._paths[i] = [places.pop(0) if len(places) > 1 else places[0]]
        self._sources: dict[int, int] = {}

    def source(self, array: Any) -> int:
        """The number of an array that the program holds."""
        if id(array) not in self._sources:
            self._sources[id(array)] = len(self._arrays)
            self._arrays.append(array)
        return self._sources[id(array)]

    def paths(self, source: int) -> list[Path]:
        """The places of an array. (The first time that it is none of the inputs, all
        variables are looked at, when all sources have their numbers.)"""
        if source >= self.n_inputs:
            _ = self._outside
        return self._paths[source]

    @ft.cached_property
    def _outside(self) -> list[tuple[Path, Any]]:
        """The modules in variables."""
        found = []
        for path, x in reached(*self._called):
            if isinstance(x, eqx.Module):
                if is_part(x):
                    found.append((path, x))
                    self.classes.setdefault(path, type(x))
            elif id(x) in self._sources:
                self._paths[self._sources[id(x)]].append(path)
        return found

    def root_of(self, path: Path) -> Path:
        """The path of the argument, or of the variable, that a place is in."""
        if path and isinstance(path[0], Variable):
            return path[:1]
        heads = (head for head, _ in self._roots if path[: len(head)] == head)
        return max(heads, key=len, default=())

    def sources_in(self, path: Path) -> set[int]:
        """The sources in the tree at a place, as far as they are inexact numbers."""
        n = len(path)
        return {
            source
            for source, places in self._paths.items()
            if any(place[:n] == path for place in places)
            if jnp.issubdtype(self._arrays[source].dtype, jnp.inexact)
        }

    def alike(self, module: SameParts) -> list[Path]:
        """The places of modules without arrays that are like this one."""
        found = [path for path, x in self.modules if SameParts(x) == module]
        found = found or [path for path, x in self._outside if SameParts(x) == module]
        return list(dict.fromkeys(found))

    def of_shared(self, path: Path, cls: type, leaf: Path) -> Path | None:
        """Where a module of this class is that shares its array `leaf` with the module
        at `path`, as `eqx.nn.Shared` has it: it has none there of its own."""
        root = self.root_of(path)
        arrays = {place for places in self._paths.values() for place in places}
        found = [
            place
            for place, other in self.classes.items()
            if other is cls and place[: len(root)] == root
            if (*place, *leaf) not in arrays
        ]
        return found[0] if len(found) == 1 else None


def roots(fn: Any, args: tuple, kwargs: dict) -> Iterator[tuple[Path, Any]]:
    """What has a path of its own in a call: the function, and the arguments. A
    transformed function, such as `eqx.filter_grad(loss)`, is what it was made of."""
    names = positional_names(fn, len(args))
    todo = [
        *((tuple(name.split("/")), x) for name, x in zip(names, args)),
        *(((name,), x) for name, x in kwargs.items()),
    ]
    todo = [((), fn), *todo][::-1]
    while todo:
        path, x = todo.pop()
        if is_wrapper(x) or isinstance(x, jtu.Partial):
            todo += reversed(list(children(x, path)))
        else:
            yield path, x
