"""The variables that functions read from outside: what they close over, globals,
defaults.

While a function is traced, a model in such a variable makes way for its marked copy.
This is done in place. So every function is the object that it always was: JAX finds
what it has compiled for it, it can be a key, and what it writes stays written.
"""

import contextlib
import dis
import functools as ft
import inspect
import sysconfig
import types
import weakref
from collections import defaultdict, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax.tree_util as jtu
import numpy as np

from .. import _compat
from .._frames import is_library
from .._mark.listening import changes
from .._mark.static import Const
from .marks import Jacobian


class Variable(NamedTuple):
    """Where a value is: in a cell, or under a key in a dict, a list, the defaults of a
    function or a partial. `where` tells variables apart, and is the same for all
    functions that one `def` makes."""

    holder: Any
    key: Any
    name: str
    where: Hashable

    @property
    def value(self) -> Any:
        holder, key = self.holder, self.key
        if isinstance(holder, types.CellType):
            return holder.cell_contents
        if isinstance(holder, types.FunctionType):
            return (holder.__defaults__ or ())[key]
        if isinstance(holder, ft.partial):
            if key is None:
                return holder.func
            values: Any = holder.args if isinstance(key, int) else holder.keywords
            return values[key]
        return holder[key]

    def put(self, value: Any) -> None:
        holder, key = self.holder, self.key
        if isinstance(holder, types.CellType):
            holder.cell_contents = value
        elif isinstance(holder, types.FunctionType):
            defaults = holder.__defaults__ or ()
            holder.__defaults__ = (*defaults[:key], value, *defaults[key + 1 :])
        elif isinstance(holder, ft.partial):
            fn, args, kwargs = holder.func, holder.args, dict(holder.keywords)
            if key is None:
                fn = value
            elif isinstance(key, int):
                args = (*args[:key], value, *args[key + 1 :])
            else:
                kwargs[key] = value
            holder.__setstate__((fn, args, kwargs, vars(holder)))  # pyright: ignore[reportAttributeAccessIssue]
        else:
            holder[key] = value


class Replaced:
    """The variables that a program reads, some of which have another value for a while.
    `unmark` is for what the program writes there meanwhile."""

    def __init__(self, unmark: Callable[[Any], Any]):
        self._unmark = unmark
        self._read: list[tuple[Variable, Any]] = []
        self._replaced: list[tuple[Variable, Any, Any]] = []
        self._key: list[Hashable] = []

    def read(self, variable: Variable) -> None:
        self._read.append((variable, variable.value))

    def put(self, variable: Variable, new: Any, marks: Hashable = ()) -> None:
        self._replaced.append((variable, variable.value, new))
        self._key.append((variable.where, marks))
        variable.put(new)

    @property
    def key(self) -> tuple[Const, ...]:
        """Equal if the same variables have the same marks: part of the key of JAX's
        caches, as a function that is jitted may read them."""
        return (_interned(tuple(self._key)),) if self._key else ()

    @contextlib.contextmanager
    def lasting(self) -> Iterator[None]:
        """Everything is put back in the end."""
        changes.append(self)
        try:
            yield
        finally:
            changes.remove(self)
            self._restore()

    def _restore(self) -> None:
        for variable, old, new in reversed(self._replaced):
            with contextlib.suppress(LookupError, ValueError):  # deleted
                if variable.value is new:
                    variable.put(old)
        moved = {id(new): old for _, old, new in self._replaced}
        for variable, before in self._read:
            with contextlib.suppress(LookupError, ValueError):
                now = variable.value
                written = [variable] if now is not before else []
                if is_container(now) and may_hold(now):
                    written = list(items(variable))
                for v in written:
                    x = v.value
                    plain = moved[id(x)] if id(x) in moved else self._unmark(x)
                    if plain is not x:
                        v.put(plain)

    def for_later(self, fn: Any) -> Callable | None:
        """For a function that JAX calls when the variables are restored. Nothing else
        is kept for it."""
        if not self._replaced:
            return None
        read = {(id(v.holder), v.key) for v in _reached(fn)}
        again = [x for x in self._replaced if (id(x[0].holder), x[0].key) in read]
        return ft.partial(_again, again, self._unmark) if again else None


@contextlib.contextmanager
def _again(replaced: list, unmark: Callable[[Any], Any]) -> Iterator[None]:
    here = Replaced(unmark)
    with here.lasting():
        for variable, old, new in replaced:
            if variable.value is old:
                here.put(variable, new)
        yield


def _reached(fn: Any) -> Iterator[Variable]:
    """What a function reads, and the functions that it calls; also what is in a
    container there, whose items were replaced in place."""
    seen, todo = {}, [fn]
    while todo:
        x = todo.pop()
        if id(x) in seen or not may_hold(x):
            continue
        seen[id(x)] = x
        if is_function(x) or is_container(x):
            is_read = variables(x) if is_function(x) else items(Variable([x], 0, "", 0))
            found = list(is_read)
            yield from found
            todo += [v.value for v in found] + [wrapped(x)]
        elif isinstance(x, _compat.FilterJit):
            todo.append(x.__wrapped__)
        else:
            todo += jtu.tree_leaves(x)


# With an old key at hand, comparing is `is`.
@ft.lru_cache(1024)
def _interned(key: Hashable) -> Const:
    return Const(key)


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


def wrapped(fn: Any) -> Any:
    """The function that another one is made of, where no variable holds it."""
    if isinstance(fn, types.FunctionType | ft.partial):
        return None
    return getattr(fn, "__func__", None) or getattr(fn, "__wrapped__", None)


def variables(fn: Any) -> Iterator[Variable]:
    """What a function reads, that may be or hold a model."""
    if isinstance(fn, types.FunctionType):
        yield from _of_function(fn)
    elif type(fn) is ft.partial:
        names = positional_names(fn.func, len(fn.args))
        for key, name in (
            (None, ""),
            *enumerate(names),
            *zip(fn.keywords, fn.keywords),
        ):
            yield Variable(fn, key, name, ("partial", key))
    elif _is_of_jax(fn):
        for name, x in list(vars(fn).items()):
            if callable(x):
                yield Variable(vars(fn), name, "", (type(fn).__name__, name))


def _of_function(fn: types.FunctionType) -> Iterator[Variable]:
    code = fn.__code__
    theirs = is_library(code.co_filename)
    at = fn.__module__, fn.__qualname__, code.co_firstlineno
    for name, cell in zip(code.co_freevars, fn.__closure__ or ()):
        if cell == types.CellType():  # not assigned yet
            continue
        if isinstance(module := cell.cell_contents, types.ModuleType):
            yield from _globals(vars(module), _names_in(code)[1], fn)
        else:
            yield Variable(cell, None, "" if theirs else name, (*at, name))
    defaults = fn.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) :]
    for i, name in zip(range(len(defaults)), names):
        yield Variable(fn, i, name, (*at, name))
    for name in fn.__kwdefaults__ or {}:
        yield Variable(fn.__kwdefaults__, name, name, (*at, name))
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
            yield Variable(space, name, name, (space.get("__name__"), name))


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


def methods(cls: type) -> Iterator[Any]:
    """The functions in a class of the user's."""
    for c in cls.__mro__:
        if c not in eqx.Module.__mro__:
            for x in list(vars(c).values()):
                fn = getattr(x, "fget", None) or getattr(x, "__func__", x)
                if callable(fn) and _is_at_home(fn, None):
                    yield fn


_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, np.ndarray))
_IN_PLACE = list, dict, OrderedDict, defaultdict


def is_container(x: Any) -> bool:
    """A container whose items can be replaced in place."""
    return type(x) in _IN_PLACE


def items(variable: Variable) -> Iterator[Variable]:
    container, name, where = variable.value, variable.name, variable.where
    keys = range(len(container)) if type(container) is list else list(container)
    for key in keys:
        yield Variable(
            container, key, f"{name}/{key}" if name else str(key), (where, str(key))
        )


def may_hold(x: Any, within: Any = ()) -> bool:
    """Whether there is a module or a function in a PyTree. That there is none in a long
    list of numbers shows at a glance."""
    if type(x) in _PLAIN or isinstance(x, types.ModuleType | type):
        return False
    if isinstance(x, eqx.Module) or is_function(x):
        return True
    if type(x) in (tuple, *_IN_PLACE):
        inside = x.values() if isinstance(x, dict) else x
        if id(x) in within or set(map(type, inside)) <= _PLAIN:
            return False
        return any(may_hold(y, (*within, id(x))) for y in inside)
    leaves = jtu.tree_leaves(x, is_leaf=lambda y: isinstance(y, eqx.Module))
    return any(y is not x and may_hold(y, within) for y in leaves)
