"""Where the arrays and the modules of a program are: in its arguments, and in variables
that it reads.

A place is a path: a tuple of keys, as strings. What is in the function itself has no
more in front of that, what is in an argument begins with the name of the parameter, and
what is in a variable with the name of that. In

    net = eqx.nn.Linear(3, 3, key=key)
    save_intermediates(lambda m, x: net(m(x)), capture=True)(model, x)

the arrays of `model` are at `m/weight` and `m/bias`, and those of `net` are found at
`net/weight` and `net/bias`. Nothing is changed, only looked at. Variables are looked at
if the program holds an array that is in none of its arguments.
"""

import dataclasses as dc
import dis
import functools as ft
import itertools as it
import types
from collections import ChainMap, defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from .._frames import is_installed, is_library
from .._mark.calls import NotedCall, Path
from .._mark.static import OPERAND, state_of, take_apart
from .._mark.trees import (
    beside,
    children,
    INNER,
    inside,
    is_module,
    is_part,
    numbered,
    own_keys,
    positional_names,
    Root,
    walk,
)


def root_of(path: Path) -> Path:
    """The path of the argument, or of the variable, that a place is in. What is in the
    function itself is in none."""
    return path[:1] if path and isinstance(path[0], Root) else ()


class Places:
    """The places of what a function is called with, and of what it reads from outside.

    Every array that a value may come from has a number, its source: first the inputs of
    the program in their order, then the arrays that the program holds.
    """

    def __init__(self, fn: Callable, args: tuple, kwargs: dict):
        self._roots = roots(fn, args, kwargs)
        # The modules in the arguments; and with those in variables, once these have
        # been looked at.
        self.modules: dict[Path, Any] = {}
        self.everywhere = ChainMap(self.modules)
        # An array may be in several places, and is then several inputs.
        of_array: dict[int, list[Path]] = defaultdict(list)
        for path, x in walk(self._roots):
            if is_part(x):
                self.modules[path] = x
            elif eqx.is_array(x):
                of_array[id(x)].append(path)
        self.arrays, _ = take_apart((fn, args, kwargs))
        self.n_inputs = len(self.arrays)
        self._paths: dict[int, list[Path]] = defaultdict(list)
        for i, x in enumerate(self.arrays):
            places = of_array[id(x)] or [("?",)]
            self._paths[i] = [places.pop(0) if len(places) > 1 else places[0]]
        self._sources: dict[Hashable, int] = {}

    def source(self, array: Any) -> int:
        """The number of an array that the program holds."""
        key = _identity(array)
        if key not in self._sources:
            self._sources[key] = len(self.arrays)
            self.arrays.append(array)
        return self._sources[key]

    def paths(self, source: int) -> list[Path]:
        """The places of an array. (The first time that it is none of the inputs, all
        variables are looked at, when all sources have their numbers.)"""
        if source >= self.n_inputs:
            _ = self.outside
        return self._paths[source]

    @ft.cached_property
    def outside(self) -> dict[Path, Any]:
        """The modules in variables."""
        found: dict[Path, Any] = {}
        self.everywhere.maps.append(found)
        for path, x in reachable(self._roots):
            if is_part(x):
                found.setdefault(path, x)
            elif (key := _identity(x)) in self._sources:
                self._paths[self._sources[key]].append(path)
        return found

    def stack(self, layers: Path, index: str) -> None:
        """What is in a layer of a list that is stacked on the way is in the stack, too,
        as if it had been stacked before."""
        layer = *layers, index
        for path, x in list(self.everywhere.items()):
            if path[: len(layer)] == layer:
                self.modules.setdefault((*layers, *path[len(layer) :]), x)

    @ft.cached_property
    def sources_in(self) -> dict[Path, set[int]]:
        """The sources in the tree at each place."""
        found = defaultdict(set)
        for source, places in self._paths.items():
            for path in places:
                for n in range(len(path) + 1):
                    found[path[:n]].add(source)
        return found

    @ft.cached_property
    def inexact(self) -> set[int]:
        """The sources that are inexact numbers."""
        arrays = enumerate(self.arrays)
        return {i for i, x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)}

    def of_length(self, n: int, used: Container[int]) -> set[int]:
        """The sources that are not `used`, and may be part of a stack of so many,
        perhaps behind the axis of a vmap."""
        arrays = enumerate(self.arrays)
        return {i for i, x in arrays if i not in used and n in x.shape[:2]}

    def sizes(self, source: int) -> set[Any]:
        """The numbers in static fields of the module that has an array, and 1."""
        modules = (self.everywhere.get(path[:-1]) for path in self.paths(source))
        fields = [x for m in modules if m is not None for x in vars(m).values()]
        each = (x if type(x) is tuple else (x,) for x in fields)
        return {1, *(n for n in it.chain(*each) if type(n) is int)}

    def alike(self, call: NotedCall) -> list[Path]:
        """The places of the modules that are like that of a call."""

        def among(modules):
            return [path for path, module in modules.items() if is_like(module, call)]

        return among(self.modules) or among(self.outside)


def _identity(array: Any) -> Hashable:
    """Tells an array from others. A NumPy array is known by its memory: JAX holds it in
    an object of another class."""
    if not isinstance(array, np.ndarray):
        return id(array)
    of_memory = np.asarray(array).__array_interface__
    return of_memory["data"], of_memory["typestr"], array.shape, of_memory["strides"]


def is_like(module: Any, call: NotedCall) -> bool:
    """Whether a module is like that of a call, in all but its arrays."""
    if type(module) is not call.cls:
        return False
    (_, form), called = take_apart(module), call.form
    pairs = zip(form.leaves, called.leaves)
    is_same = all(y is OPERAND or x == y for x, y in pairs)
    return is_same and form.treedef == called.treedef


def roots(fn: Any, args: tuple, kwargs: dict) -> list[tuple[Path, Any]]:
    """What has a path of its own in a call: the function, and the arguments. One that
    is called like a field, as in `def distance(self, net, x): return self.net(x) -
    net(x)`, is at `net#1`."""
    named = [*zip(positional_names(fn, len(args)), args), *sorted(kwargs.items())]
    return [((), fn), *(((name,), x) for name, x in beside(fn, named))]


def reachable(roots: Sequence[tuple[Path, Any]]) -> Iterator[tuple[Path, Any]]:
    """The arrays and the modules that one gets to from a function and its arguments,
    and their paths: each begins with the name of the last variable on the way. If
    there is something else of that name, as in

        teacher = (lambda model: lambda x: model(x))(MLP(...))
        loss = lambda model, x: model(x) - teacher(x)

    it has a number: the variable of `teacher` is `model#1`."""
    seen: dict[int, Any] = {}
    # What has each name, by its `id`, in the order in which it was found.
    of_name: dict[str, dict[int, int]] = defaultdict(dict)
    for path, x in roots:
        for key in path or own_keys(x):
            name, _, n = key.partition("#")
            of_name[name][id(x)] = int(n or 0)
    # The same, of what is in one variable.
    of_key: dict[tuple[int, Path], dict[int, int]] = defaultdict(dict)
    todo = [(path, id(x), x) for path, x in roots][::-1]
    while todo:
        path, variable, x = todo.pop()
        if type(x) in _PLAIN:
            continue
        if is_module(x) or eqx.is_array_like(x):
            root = "".join(root_of(path))
            n = of_name[root].setdefault(variable, len(of_name[root]))
            yield numbered(path[:1], n) + path[1:] if root else path, x
        # A module may be in two places, and both count.
        if id(x) not in seen or is_module(x):
            seen[id(x)] = x
            is_variable = isinstance(x, types.FunctionType) or type(x) is ft.partial
            found = []
            for key, y in _held(x):
                if not key:
                    found.append((path, variable, y))
                elif is_variable:
                    found.append(((Root(key),), id(y), y))
                else:
                    # An object and its class may have different attributes of one name.
                    alike = of_key[variable, (*path, key)]
                    n = alike.setdefault(id(y), len(alike))
                    found.append((numbered((*path, key), n), variable, y))
            todo += found[::-1]


_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))


def _held(x: Any) -> Iterable[tuple[str, Any]]:
    """What an object holds or reads, one step further, and the key of each, or the name
    of a variable. No key: it is at the same place."""
    if isinstance(x, types.FunctionType):
        return _variables(x)
    if isinstance(x, type):
        # Its methods read variables.
        bases = [("", base) for base in x.__bases__]
        return [] if is_installed(x.__module__) else [*bases, *vars(x).items()]
    if isinstance(x, ft.partial):
        return inside(x)
    found = children(x)
    return _attributes(x) if found is None else [*found, ("", type(x))]


def _attributes(x: Any) -> Iterator[tuple[str, Any]]:
    """What an object that is not a PyTree was made of; and if it is of a class of the
    user's, all that it holds, and its class."""
    module, own = type(x).__module__, state_of(x)
    held: dict[str, str] = dict.fromkeys(INNER, "")
    if module.startswith("jax.") and callable(x):
        # Such as a `jax.custom_jvp`, which holds the function and its rules.
        held |= dict.fromkeys(own, "")
    elif type(x) is types.SimpleNamespace or not is_installed(module):
        held |= {name: name for name in own if not name.startswith("__")}
        held["__class__"] = ""
    for name, key in held.items():
        if hasattr(x, name):
            yield key, getattr(x, name)


def _variables(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function reads, and what it calls that. Globals are read of users'
    functions: all would be half of what is installed."""
    code, space = fn.__code__, fn.__globals__
    of_library = is_library(code.co_filename)
    cells = zip(code.co_freevars, fn.__closure__ or ())
    # Without those that are not assigned yet.
    held = [(name, c.cell_contents) for name, c in cells if c != types.CellType()]
    # `jax.vmap(model)` closes over the model, and has no name for it.
    inner = getattr(fn, "__wrapped__", None)
    found = [("" if of_library or x is inner else name, x) for name, x in held]
    defaults = fn.__defaults__ or ()
    found += zip(code.co_varnames[code.co_argcount - len(defaults) :], defaults)
    found += (fn.__kwdefaults__ or {}).items()
    if not (of_library or is_installed(space.get("__name__", ""))):
        names = _names_in(code, "LOAD_GLOBAL")
        found += ((name, space[name]) for name in names if name in space)
    for name, x in found:
        if isinstance(x, types.ModuleType):
            # What the function may read of a Python module.
            names = _names_in(code, "LOAD_ATTR", "LOAD_METHOD")
            yield from ((n, value) for n, value in vars(x).items() if n in names)
        else:
            yield name, x


@ft.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType, *instructions: str) -> dict[str, None]:
    """The names in these instructions of code, and of the functions within it."""
    own = (i.argval for i in dis.get_instructions(code) if i.opname in instructions)
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return dict.fromkeys(it.chain(own, *(_names_in(c, *instructions) for c in inner)))


def is_internal(cls: type) -> bool:
    """Whether a library makes modules of this class for itself, on the way: one that is
    private, as `_Damped` of optimistix, or around a function, as its `OutAsArray`."""
    names = {f.name.strip("_") for f in dc.fields(cls)}
    return is_installed(cls.__module__) and (
        cls.__name__.startswith("_") or not names.isdisjoint(_AROUND_FUNCTION)
    )


_AROUND_FUNCTION = "fn", "fun", "func", "wrapped"
