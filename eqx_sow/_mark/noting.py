"""Takes note of the calls of modules, while a program is traced.

Nothing of the user's is changed but the methods of the classes, and these for as long
as the trace takes: `Linear.__call__` calls what it was before, and marks what that
returned. It does so only where `Listening.captures` asks for it, which is in this
thread. A module that is an argument, in a variable, in an object that is not a PyTree,
or that the program makes on the way: all of them call the method of their class.
"""

import contextlib
import contextvars
import functools as ft
import inspect
import itertools as it
import sys
import threading
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.ad_checkpoint import checkpoint_name

from .. import _compat
from .calls import Call, Note, NotedCall, Path
from .listening import Capture, Listening, listening
from .primitive import edge_p, sow_p
from .site import Label, Site
from .sow import bind_sow, Sow
from .static import Const, take_apart
from .trees import is_module, is_part, leaf_paths, walk


def own_methods(cls: type) -> tuple[str, ...]:
    """The methods that a user gave to a class of modules."""
    own = [c for c in cls.__mro__ if c not in eqx.Module.__mro__]
    names = dict.fromkeys([name for c in own for name in vars(c)])
    fields = getattr(cls, "__dataclass_fields__", {})  # a mixin has none
    methods = types.FunctionType | _compat.Jitted
    return tuple(
        [
            name
            for name in names
            if name == "__call__"
            or not (name.startswith("__") or name in fields)
            and isinstance(inspect.getattr_static(cls, name), methods)
        ]
    )


def why_not_noted(cls: type, name: str) -> str:
    """Says what an attribute of a class is, if its calls as a method are not noted."""
    static = inspect.getattr_static(cls, name, None)
    for kind, said in _NOT_NOTED.items():
        if isinstance(static, kind):
            return said
    fn = inspect.unwrap(static) if callable(static) else None
    flags = getattr(getattr(fn, "__code__", None), "co_flags", 0)
    return next((said for flag, said in _SUSPENDED.items() if flags & flag), "")


_NOT_NOTED: dict[type, str] = {
    property: "a property",
    ft.cached_property: "a property",
    classmethod: "a class method",
    staticmethod: "a static method",
}
# What these do, they do after the call.
_SUSPENDED = {
    inspect.CO_GENERATOR: "a generator",
    inspect.CO_COROUTINE: "an async method",
    inspect.CO_ASYNC_GENERATOR: "an async generator",
}


# --- methods that take note ---
# What each trace that is under way, in whatever thread, does to classes of modules. All
# is put back when the last of them is over. Nothing is locked while a trace lasts: the
# traced function may wait for another thread, which traces as well.
_under_way: list[Callable[[Iterable[type]], None]] = []
_put_back = contextlib.ExitStack()
_exchanging = threading.Lock()


@contextlib.contextmanager
def listening_as(here: Listening) -> Iterator[None]:
    """Listens to what is traced as long as this lasts. If calls are to be noted, the
    functions and the methods of modules do so. For `scope=True`, all methods of users'
    do: any may call `sow`."""
    captures = here.captures
    if not captures:
        with listening(here):
            yield
        return
    # Of two names of one method, the first counts.
    names = dict.fromkeys((*(m for c in captures for m in c.methods), "__call__"))
    scoped = any(c.scope for c in captures)

    def exchange_methods(owners):
        for cls in owners:
            for name in (*names, *own_methods(cls)) if scoped else names:
                method = vars(cls).get(name)
                # Somebody may have a bound method already.
                is_jitted = isinstance(method, _compat.Jitted)
                fn = inspect.unwrap(method) if is_jitted else method
                if isinstance(fn, types.FunctionType):
                    _exchange_code(fn, ft.partial(_noting_method, name, method))
                elif callable(method) and not isinstance(method, staticmethod):
                    # Any other object that can be called.
                    new = _noting_method(name, method, method)
                    _exchange(cls, name, ft.update_wrapper(new, method))

    with _exchanging:
        if not _under_way:
            _exchange(eqx.Module, "__init_subclass__", classmethod(_init_subclass))
        _under_way.append(exchange_methods)
    try:
        with _exchanging:
            exchange_methods(classes())
            for fn in [f for c in captures for f in c.functions]:
                if fn is checkpoint_name:
                    _exchange_code(fn, _noting_names)
                elif isinstance(fn, types.FunctionType):
                    _exchange_code(fn, ft.partial(_noting_function, fn))
                else:  # `jax.nn.relu` is a `jax.custom_jvp`
                    call: Any = type(fn).__call__
                    _exchange_code(call, _noting_rules)
        with listening(here):
            yield
    finally:
        with _exchanging:
            _under_way.remove(exchange_methods)
            if not _under_way:
                _put_back.close()


def classes() -> Iterable[type]:
    """All classes with methods of modules that may be part of a model."""
    found, todo = {eqx.Module}, [eqx.Module]
    while todo:
        new = set(todo.pop().__subclasses__()) - found
        found |= new
        todo += new
    return _owners(found)


def _owners(classes: Iterable[type]) -> Iterable[type]:
    """The classes among these that may be part of a model, and those bases of them that
    are no modules, such as a mixin with their `__call__`. Python's own are left alone:
    `typing.Generic`, `Mapping`."""
    owners: dict[type, None] = {}
    for cls in classes:
        if cls.__module__.startswith(_NO_MODELS):
            continue
        owners[cls] = None
        for base in cls.__mro__:
            own = base.__module__.split(".")[0] in sys.stdlib_module_names
            if not own and eqx.Module not in base.__mro__:
                owners[base] = None
    return owners


_NO_MODELS = "equinox._", "equinox.internal", "eqx_sow._transforms"


def _init_subclass(cls, **kwargs):
    """Notes classes of modules as well that come to be while a program is traced: it
    imports them, or a function makes them."""
    super(eqx.Module, cls).__init_subclass__(**kwargs)
    with _exchanging:
        for exchange_methods in _under_way:
            exchange_methods(_owners([cls]))


def _exchange(owner: Any, name: str, new: Any) -> None:
    """Gives a class or a function another attribute."""
    if name in vars(owner):
        _put_back.callback(setattr, owner, name, vars(owner)[name])
    else:
        _put_back.callback(delattr, owner, name)
    setattr(owner, name, new)


def _exchange_code(
    fn: types.FunctionType, instead: Callable[[types.FunctionType], Callable]
) -> None:
    """Makes a function call `instead(plain)`, where `plain` does what the function did
    before. It stays the same object, with other code: so a call is also noted where
    somebody has the function already, as `jax.jit(model.__call__)` does.

    The other code is that of `_call_instead`. Code has no variables of its own to hold
    `instead(plain)`, so that becomes one of the constants in it."""
    code = fn.__code__
    # Python wants to forbid that a generator or a coroutine gets the code of a plain
    # function.
    if code.co_filename == _CODE.co_filename or code.co_flags & sum(_SUSPENDED):
        return
    plain = types.FunctionType(
        code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    plain.__kwdefaults__ = fn.__kwdefaults__
    plain.__annotations__ = fn.__annotations__
    consts = list(_CODE.co_consts)
    consts[consts.index(_NOTE)] = instead(plain)
    # A function takes the code of one that closes over as many variables.
    fn.__code__ = _CODE.replace(co_consts=tuple(consts), co_freevars=code.co_freevars)
    _put_back.callback(setattr, fn, "__code__", code)
    # Libraries, and users' functions, may look at the signature.
    if not (hasattr(fn, "__wrapped__") or hasattr(fn, "__signature__")):
        if fn not in _signatures:
            _signatures[fn] = inspect.signature(plain)
        _exchange(fn, "__signature__", _signatures[fn])


# It takes long to make one, and each trace looks at all methods.
_signatures: weakref.WeakKeyDictionary[types.FunctionType, inspect.Signature] = (
    weakref.WeakKeyDictionary()
)


def _call_instead(*args, **kwargs):
    note: Any = "eqx_sow: what takes note of a call"
    return note(*args, **kwargs)


# The code of that, and the constant in whose place comes what takes note.
_CODE = _call_instead.__code__
_NOTE = "eqx_sow: what takes note of a call"


def _wanted() -> tuple[Capture, ...]:
    """The transformations that want a note of calls now, in this thread."""
    return getattr(listening.value, "captures", ())


def _noting_function(
    fn: Callable, plain: Callable, value_name: str | None = None
) -> Callable:
    """What is called in the place of a function that is captured."""

    def function(*args, **kwargs):
        chosen = [c for c in _wanted() if fn in c.functions]
        if not chosen:
            return plain(*args, **kwargs)
        call = NotedCall(fn, value_name=value_name)

        # A function has no arrays of its own: it is called by the module around. What
        # is marked is the operand of the edge, so that JAX does not move the edge out
        # of the loop or the branch that the call is in.
        def edge(value):
            return edge_p.bind(*_arrays(value), call=call)

        marks = _Marks(Note(call, scope=listening.value.scope), chosen, edge)
        args, kwargs, went_in = marks.before(args, kwargs)
        out = plain(*args, **kwargs)
        return marks.after(went_in, out) if _arrays(out) else out

    return function


def _noting_names(plain: Callable) -> Callable:
    """What is called in the place of `checkpoint_name`. The value is marked under its
    name, and before JAX gives it that: what a policy saves is then what is planted."""

    def named(x, name):
        mark = _noting_function(checkpoint_name, lambda x: x, name)
        return plain(mark(x), name)

    return named


def _noting_rules(plain: Callable) -> Callable:
    """What is called in the place of `jax.custom_jvp.__call__`. What such a function
    returns is marked outside of it, where it has derivatives."""

    def call(self, /, *args, **kwargs):
        if all(self not in c.functions for c in _wanted()):
            return plain(self, *args, **kwargs)
        inner = object.__new__(type(self))
        vars(inner).update(vars(self))
        for name in {"jvp", "fwd", "bwd"} & vars(self).keys():
            setattr(inner, name, _unnoted(self, getattr(self, name)))
        return _noting_function(self, ft.partial(plain, inner))(*args, **kwargs)

    return call


def _unnoted(fn: Any, rule: Any) -> Any:
    """A derivative rule of a function, which calls the function itself, mostly to
    return its value. That is not a call of its own."""

    @ft.wraps(rule)
    def unnoted(*args, **kwargs):
        here = listening.value
        if here is None:
            return rule(*args, **kwargs)
        others = lambda c: tuple(f for f in c.functions if f is not fn)
        captures = tuple(c._replace(functions=others(c)) for c in here.captures)
        with listening(here._replace(captures=captures)):
            return rule(*args, **kwargs)

    return unnoted if callable(rule) else rule


def _noting_method(name: str, method: Any, plain: Any) -> Callable:
    """What is called in the place of a method of a class. `plain` does what the method
    did before."""

    def noting(self, /, *args, **kwargs):
        call = plain.__get__(self, type(self))
        if not (_wanted() and is_part(self)):
            return call(*args, **kwargs)
        # A class that calls the method of its base class makes no further call.
        classes = (c for c in type(self).__mro__ if name in vars(c))
        found = vars(next(classes, type(self))).get(name)
        if found is method or found is noting:
            return _note(self, name, call, args, kwargs)
        return call(*args, **kwargs)

    return noting


# --- what is running ---
# What may hold the modules that are called in this thread, from outside in: a module
# whose method is running, or the variables and the arguments of a transformation, as
# `NotedCall.holder` has it; and what tells where the modules in there are.
_running: contextvars.ContextVar[tuple[tuple[NotedCall | int, Callable], ...]]
_running = contextvars.ContextVar("running", default=())


@contextlib.contextmanager
def within(holder: NotedCall | int, held: Callable[[], Iterable[tuple[Path, Any]]]):
    """As long as this lasts, the modules that are called may be in this holder: `held`
    lists what is in there, each with its path."""
    places = ft.cache(lambda: _places_of(held()))
    before = _running.set((*_running.get(), (holder, places)))
    try:
        yield
    finally:
        _running.reset(before)


def _places_of(held: Iterable[tuple[Path, Any]]) -> tuple[Any, dict[int, Any]]:
    """The modules among these; and the places of each, by its id. One that is in
    several places is called in one after the other."""
    # As long as they are kept, no other module has the id of one.
    parts = [(path, x) for path, x in held if is_part(x)]
    places = defaultdict(list)
    for path, x in parts:
        places[id(x)].append(path)
    return parts, {key: it.cycle(paths) for key, paths in places.items()}


def _held(module: Any, has_arrays: bool) -> tuple[NotedCall | int, Path] | None:
    """`NotedCall.holder`. The arguments do not hold a module with arrays: where these
    come from says more."""
    for holder, places in reversed(_running.get()):
        may_hold = not (has_arrays and isinstance(holder, int))
        if may_hold and (turns := places()[1].get(id(module))):
            return holder, next(turns)
    return None


# --- taking note ---
def _note(module: Any, method: str, plain: Callable, args: tuple, kwargs: dict) -> Any:
    here: Any = listening.value
    captures = [c for c in here.captures if method in c.methods]
    chosen = [c for c in captures if c.classes is None or isinstance(module, c.classes)]
    call, edge = _call(module, method, any(c.classes is None for c in chosen))
    note = Note(call, scope=here.scope)
    if isinstance(module, Sow) and module.name is None:
        labels = tuple([Label(None, module.tag, d) for d in range(here.depth, 0, -1)])
        spec = None if module.spec is None else Const(module.spec)
        note = note._replace(is_sow=True)
        return bind_sow(plain(*args, **kwargs), labels, edge, note=note, spec=spec)
    if not chosen:
        # The names of what is called inside need this edge. JAX removes what is not
        # used, but no mark, which has an effect.
        sow_p.bind(edge, site=Site((), _NOTHING, note=note))
    marks = _Marks(note, chosen, lambda value: edge)
    args, kwargs, went_in = marks.before(args, kwargs)
    with within(call, lambda: walk([((), module)])), call.running():
        out = plain(*args, **kwargs)
    if not chosen:
        return out
    if isinstance(out, jax.Array):  # as nearly all are
        return marks.after(went_in, out)
    values, parts = _without_parts(out, module)
    if jtu.tree_leaves(parts) and not jtu.tree_leaves(values):
        return out
    return eqx.combine(marks.after(went_in, values), parts, is_leaf=is_module)


_, _NOTHING = take_apart(())


class _Marks(NamedTuple):
    """What is marked of one call, for the transformations that are `chosen`: what it
    returned, and of what else there is (`Capture.kinds`) that which they want."""

    note: Note
    chosen: Sequence[Capture]
    # The edge of a value that is marked.
    edge: Callable[[Any], Any]

    def mark(self, value: Any, *kind: str) -> Any:
        wanted = [c for c in self.chosen[::-1] if c.kinds.issuperset(kind)]
        if not wanted:
            return value
        # They have yet to find the name.
        labels = tuple([Label(None, c.tag, c.depth) for c in wanted])
        note = self.note._replace(what=kind)
        return bind_sow(value, labels, self.edge(value), note=note)

    def before(self, args: tuple, kwargs: dict) -> tuple[tuple, dict, Any]:
        """The arguments that the program goes on with; and what `after` wants to know
        of them. That is taken apart now: the call may change a list among them, and it
        uses up an `eqx.nn.State`."""
        args, kwargs = self.mark((args, kwargs), "inputs")
        is_whole = any("call" in c.kinds for c in self.chosen)
        return args, kwargs, take_apart((args, kwargs)) if is_whole else None

    def after(self, went_in: Any, out: Any) -> Any:
        """What the program goes on with in the place of what the call returned."""
        out = self.mark(out)
        if went_in is None:
            return out
        arrays, form = went_in
        args, kwargs = form.with_arrays(arrays)
        return self.mark(Call(args, kwargs, out), "call").out


def _without_parts(out: Any, module: Any) -> tuple[Any, Any]:
    """What a module returned, without modules that are parts of itself, which
    `eqx.nn.Shared` returns: they are not values. And these."""
    own = set(map(id, _arrays(module)))
    is_value = lambda x: not (is_module(x) and own.issuperset(map(id, _arrays(x))))
    return eqx.partition(out, is_value, is_leaf=is_module)


def _arrays(x: Any) -> list[Any]:
    return list(filter(eqx.is_array, jtu.tree_leaves(x)))


# So many of the arrays of a module are operands of its edge.
_WITNESSES = 5


def _call(module: Any, method: str, outline: bool) -> tuple[NotedCall, Any]:
    """A call, and its edge."""
    leaves = jtu.tree_leaves_with_path(module)
    arrays = [(path, x) for path, x in leaves if eqx.is_array(x)]
    # Some from all over the module, and no scalars if there are others.
    large = [(path, x) for path, x in arrays if x.ndim] or arrays
    n = min(len(large), _WITNESSES)
    picked = [large[i * len(large) // n] for i in range(n)]
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_array(x) else x
    call = NotedCall(
        type(module),
        method,
        form=take_apart(module)[1],
        holder=_held(module, bool(arrays)),
        outline=jtu.tree_map(shape, module) if outline else None,
        module=None if arrays else module,
    )

    def edge(operands):
        call.leaves = leaf_paths(module, operands)
        call.shapes = tuple([x.shape for _, x in operands])
        return edge_p.bind(*[x for _, x in operands], call=call)

    try:
        return call, edge(picked)
    except Exception:  # whatever another library raises
        # Some of its arrays are not operands of primitives that it does not know, as
        # those of quax that must not be made.
        return call, edge([(path, x) for path, x in picked if _can_be_bound(x)])


def _can_be_bound(x: Any) -> bool:
    try:
        edge_p.bind(x)
    except Exception:  # as above
        return False
    return True
