"""Takes note of the calls of modules, while a program is traced.

Nothing of the user's is changed but the methods of the classes, and these for as long
as the trace takes: `Linear.__call__` becomes a function that calls what was there, and
sows what that returned. It does so only where `Listening.captures` asks for it, which
is in this thread. A module that is an argument, in a variable, in an object that is no
PyTree, or that the program makes on the way: all of them call the method of their
class.
"""

import contextlib
import dataclasses as dc
import functools as ft
import inspect
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np

from .. import _compat
from .calls import Call, Note, Path
from .listening import Capture, Listening, listening, tracing
from .primitive import edge_p, sow_p
from .site import Site
from .sow import bind, Sow
from .static import Const


# No `__wrapped__` tells what this is.
Jacobian: Any = type(eqx.filter_jacrev(lambda: None))
_WRAPPERS = {eqx.Partial, Jacobian}


def is_wrapper(module: Any) -> bool:
    """Whether a module is a transformed function, rather than part of a model."""
    cls = type(module)
    return (
        not _WRAPPERS.isdisjoint(cls.__mro__)
        or "__self__" in getattr(cls, "__dataclass_fields__", ())
        or _is_module(module)
        and isinstance(getattr(cls, "__wrapped__", None), property)
    )


def is_part(x: Any) -> bool:
    """Whether it is a module that is part of a model."""
    return isinstance(x, eqx.Module) and not is_wrapper(x)


def has_method(cls: type, name: str) -> bool:
    # Not `hasattr`: the metaclass has a `__call__`.
    return any(name in c.__dict__ for c in cls.__mro__)


@ft.cache
def own_methods(cls: type) -> tuple[str, ...]:
    """The methods that a user gave to a class of modules."""
    fields = {f.name for f in dc.fields(cls)}
    names = {
        n: None for c in cls.__mro__ if c not in eqx.Module.__mro__ for n in c.__dict__
    }

    def is_method(name):
        if name == "__call__" or name.startswith("__") or name in fields:
            return name == "__call__"
        if isinstance(inspect.getattr_static(cls, name), staticmethod):
            return False
        fn = getattr(cls, name)
        return inspect.isfunction(fn) or isinstance(fn, _compat.FilterJit | _compat.Jit)

    return tuple(filter(is_method, names))


# --- methods that take note ---
@contextlib.contextmanager
def listening_as(here: Listening) -> Iterator[None]:
    """What is traced as long as this lasts is listened to. If calls of modules are to
    be noted, the methods of their classes do so."""
    with listening(here):
        if not here.captures or here.captures in _running.noted:
            yield
            return
        with tracing, _noted(here.captures):
            _running.noted.append(here.captures)
            try:
                yield
            finally:
                _running.noted.remove(here.captures)


@contextlib.contextmanager
def _noted(captures: tuple[Capture, ...]) -> Iterator[None]:
    names = {"__call__", *(m for c in captures for m in c.methods)}
    scoped = any(c.scope for c in captures)
    functions, others = [], []
    try:
        for cls in _classes():
            for name in names.union(own_methods(cls)) if scoped else names:
                plain = vars(cls).get(name)
                if plain is None or hasattr(plain, "_eqx_sow_notes"):
                    continue
                if type(plain) is types.FunctionType:
                    functions += _note_function(plain, _noting, name)
                else:
                    others.append((cls, name, plain))
                    setattr(cls, name, _noting(name, plain))
        for fn in (f for c in captures for f in c.functions):
            functions += _note_function(fn, _noting_function)
        yield
    finally:
        for fn in functions:
            _functions.pop(fn).restore(fn)
        for cls, name, plain in others:
            setattr(cls, name, plain)


def _classes() -> Iterator[type]:
    """All classes of modules that may be part of a model."""
    found, todo = {eqx.Module}, [eqx.Module]
    while todo:
        new = set(todo.pop().__subclasses__()) - found
        found |= new
        todo += new
        yield from (c for c in new if not c.__module__.startswith(_NO_MODELS))


_NO_MODELS = "equinox._", "equinox.internal", "eqx_sow._transforms"


class _Function(NamedTuple):
    """A method that takes note: the code for that, and the function as it was."""

    code: types.CodeType
    plain: types.FunctionType

    def restore(self, fn: types.FunctionType) -> None:
        fn.__code__ = self.plain.__code__
        if getattr(fn, "__wrapped__", None) is self.plain:
            del fn.__wrapped__


# Those that take note now.
_functions: dict[types.FunctionType, _Function] = {}


def _note_function(
    fn: types.FunctionType, noting: Callable, *args: Any
) -> list[types.FunctionType]:
    """Gives a method, or a function, other code, if it has not got it yet. The function
    stays the object that it is: so it takes note of a call as well where somebody has
    it already, as `jax.jit(model.__call__)` does."""
    if fn in _functions:
        return []
    new = _functions[fn] = _function(fn, noting, *args)
    fn.__code__ = new.code
    # For the signature, which libraries look at.
    vars(fn).setdefault("__wrapped__", new.plain)
    return [fn]


def _function(fn: types.FunctionType, noting: Callable, *args: Any) -> _Function:
    code = fn.__code__
    plain = types.FunctionType(
        code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    plain.__kwdefaults__ = fn.__kwdefaults__
    note = noting(*args, fn, plain)
    consts = tuple(note if x == _NOTE else x for x in _CODE.co_consts)
    # A function takes the code of one that closes over as many variables.
    freevars = code.co_freevars
    return _Function(_CODE.replace(co_consts=consts, co_freevars=freevars), plain)


# A constant of the code below, in the place of which comes what takes note.
_NOTE = "eqx_sow: what takes note of a call"


def _make_code() -> types.CodeType:
    def method(*args, **kwargs):
        note: Any = "eqx_sow: what takes note of a call"
        return note(*args, **kwargs)

    return method.__code__


_CODE = _make_code()


def _noting_function(fn: types.FunctionType, plain: types.FunctionType) -> Callable:
    """What is called in the place of a function that is captured."""

    def function(*args, **kwargs):
        out = plain(*args, **kwargs)
        here = listening.value
        if here is None or here.found is not None:
            return out
        chosen = [c for c in here.captures if fn in c.functions]
        arrays = [x for x in jtu.tree_leaves(out) if eqx.is_array(x)]
        if not (chosen and arrays):
            return out
        call = Call(fn, "__call__", (), None, None)
        # It has no arrays of its own. The name is that of the module around, and the
        # operands keep the edge where the value is.
        return bind(
            out,
            (),
            edge_p.bind(*arrays, call=call),
            note=Note(call, scope=here.scope),
            waiting=tuple((c.depth, c.tag) for c in reversed(chosen)),
        )

    return function


def _noting(name: str, plain: Any, same: Any = None) -> Callable:
    """What is called in the place of a method. `same` has the code of before."""

    def method(self, /, *args, **kwargs):
        here = listening.value
        call = (plain if same is None else same).__get__(self, type(self))
        if here is None or here.found is not None or not here.captures:
            return call(*args, **kwargs)
        # Not where a class calls the method of its base class.
        if not is_part(self) or _where_defined(type(self), name) is not plain:
            return call(*args, **kwargs)
        return _note(self, name, here.captures, here.scope, call, args, kwargs)

    if not isinstance(plain, types.FunctionType):
        ft.update_wrapper(method, plain)
        method._eqx_sow_notes = plain
    return method


def _where_defined(cls: type, name: str) -> Any:
    """The method of a class, as it was before it took note."""
    method = next((vars(c)[name] for c in cls.__mro__ if name in vars(c)), None)
    return getattr(method, "_eqx_sow_notes", method)


class _Frame(NamedTuple):
    """A call that is running. `parts` has the places of the modules in this one, by
    their ids; and how often each was called so far."""

    module: Any
    call: Call
    parts: dict[int, list[Path]]
    called: dict[int, int]


class _Running(threading.local):
    """`frames`: the calls that are running, from outside in. `noted`: of which captures
    the methods take note already. `called`: by the depths of
    the transformations around, what the programs are called with. `identities`: an
    object for each module without arrays."""

    def __init__(self):
        self.frames: tuple[_Frame, ...] = ()
        self.noted: list[tuple[Capture, ...]] = []
        self.called: dict[int, Any] = {}
        self.identities: dict[int, tuple[Any, Any]] = {}


_running = _Running()


@contextlib.contextmanager
def called_with(depth: int, places: Callable[[], dict[int, Path]]):
    """While a program is traced: `places` returns the places of the modules without
    arrays among its arguments, by their ids."""
    frames, _running.frames = _running.frames, ()
    _running.called[depth] = ft.cache(places)
    try:
        yield
    finally:
        _running.frames = frames
        del _running.called[depth]
        if not _running.called:
            _running.identities.clear()


def _note(module, method, captures, scope, plain, args, kwargs):
    chosen = [c for c in captures if _may_choose(c, module, method)]
    call, arrays = _call(module, method, any(c.outlines for c in chosen))
    edge = _edge(call, arrays)
    note = Note(call, scope=scope)
    if isinstance(module, Sow) and module.name is None:
        return _bind_unnamed(module, note, edge, plain(*args, **kwargs))
    waiting = tuple((c.depth, c.tag) for c in reversed(chosen))
    if not waiting:
        # For whatever is in there: with an effect, it cannot get lost.
        sow_p.bind(edge, site=Site((), _NOTHING, (), note=note))
    inputs = tuple((c.depth, c.tag) for c in reversed(chosen) if c.inputs)
    if inputs:
        args, kwargs = bind(
            (args, kwargs),
            (),
            edge,
            note=note._replace(what=("inputs",)),
            waiting=inputs,
        )
    before = _running.frames
    _running.frames = (*before, _Frame(module, call, {}, {}))
    try:
        with call.running():
            out = plain(*args, **kwargs)
    finally:
        _running.frames = before
    if not waiting:
        return out
    values, parts = _without_parts(out, module)
    if not jtu.tree_leaves(values):
        return out
    values = bind(values, (), edge, note=note, waiting=waiting)
    return values if parts is None else eqx.combine(values, parts, is_leaf=_is_module)


_NOTHING = Const(jtu.tree_structure(()))


def _bind_unnamed(module: Sow, note: Note, edge: Any, out: Any) -> Any:
    here: Any = listening.value
    spec = None if module.spec is None else Const(module.spec)
    waiting = tuple((d, module.tag) for d in range(here.depth, 0, -1))
    note = note._replace(tag=Const(module.tag))
    return bind(out, (), edge, note=note, waiting=waiting, spec=spec)


def _may_choose(capture: Capture, module: Any, method: str) -> bool:
    return method in capture.methods and (
        capture.classes is None or isinstance(module, capture.classes)
    )


def _without_parts(out: Any, module: Any) -> tuple[Any, Any]:
    """What a module returned, without modules that are parts of itself, which
    `eqx.nn.Shared` returns: they are no values. And these, or `None`."""
    if isinstance(out, jax.Array) or not any(
        map(_is_module, jtu.tree_leaves(out, is_leaf=_is_module))
    ):
        return out, None
    arrays = lambda x: [
        id(y)
        for y in jtu.tree_leaves(x)
        if eqx.is_array(y) or isinstance(y, np.ndarray)
    ]
    own = {*arrays(module)}
    is_value = lambda x: not (_is_module(x) and own.issuperset(arrays(x)))
    return eqx.partition(out, is_value, is_leaf=_is_module)


# --- what is known of a call ---
# So many arrays of a module say where it comes from.
_WITNESSES = 5


def _call(module: Any, method: str, outline: bool) -> tuple[Call, list[Any]]:
    arrays = [(p, x) for p, x in jtu.tree_leaves_with_path(module) if eqx.is_array(x)]
    # Those from all over the module, and no scalars if there are others.
    large = [(p, x) for p, x in arrays if x.ndim] or arrays
    n = len(large)
    picked = large if n <= _WITNESSES else [large[i * n // 5] for i in range(5)]
    call = Call(
        type(module),
        method,
        tuple(keys(path) for path, _ in picked),
        _place_within(module),
        _outline(module) if outline else None,
    )
    if not arrays:
        call.form = form_of(module)
        new = module, object()
        _, call.identity = _running.identities.setdefault(id(module), new)
        call.given = {
            depth: places()[id(module)]
            for depth, places in _running.called.items()
            if id(module) in places()
        }
    return call, [x for _, x in picked]


def _edge(call: Call, arrays: list[Any]) -> Any:
    try:
        return edge_p.bind(*arrays, call=call)
    except Exception:  # whatever another library raises
        # Some of its arrays are no operands of primitives that it does not know, as
        # those of quax that must not be made.
        pairs = [(p, x) for p, x in zip(call.leaves, arrays) if _is_operand(x)]
        call.leaves = tuple(p for p, _ in pairs)
        return edge_p.bind(*(x for _, x in pairs), call=call)


def _is_operand(x: Any) -> bool:
    try:
        edge_p.bind(x)
    except Exception:
        return False
    return True


def form_of(module: Any) -> Const:
    """What a module without arrays is compared by."""
    leaves, treedef = jtu.tree_flatten(module)
    return Const((Const(treedef), *map(Const, leaves)))


def keys(path: Any) -> Path:
    """The keys of a path in a PyTree, as strings."""
    if not path:
        return ()
    return tuple(jtu.keystr(path, simple=True, separator="\0").split("\0"))


def _outline(module: Any) -> Any:
    shapes = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_array(x) else x
    return jtu.tree_map(shapes, module)


def _place_within(module: Any) -> tuple[Call, Path] | None:
    """Where a module is in the innermost one that is running and holds it. One that is
    there several times is called at one place after the other."""
    for frame in reversed(_running.frames):
        if not frame.parts:
            for path, part in modules([((), frame.module)]):
                if path:
                    frame.parts.setdefault(id(part), []).append(path)
        places = frame.parts.get(id(module))
        if places:
            n = frame.called[id(module)] = frame.called.get(id(module), -1) + 1
            return frame.call, places[n % len(places)]
    return None


def modules(roots: Iterable[tuple[Path, Any]]) -> Iterator[tuple[Path, Any]]:
    """All modules in PyTrees that are parts of models, and their places."""
    todo = [*roots][::-1]
    while todo:
        path, node = todo.pop()
        if is_part(node):
            yield path, node
        inner = jtu.tree_leaves_with_path(
            node, is_leaf=lambda x, node=node: x is not node and _is_module(x)
        )
        todo += [((*path, *keys(at)), x) for at, x in inner if _is_module(x)][::-1]


def _is_module(x: Any) -> bool:
    return isinstance(x, eqx.Module)
