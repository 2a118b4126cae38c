"""What a marked module does.

It is an instance of a subclass made on the fly: the same fields, and its marks in a
static field. So the marks go wherever the module goes, through every transformation,
and `isinstance` and the paths in the PyTree stay as they were.
"""

import copy
import dataclasses as dc
import functools as ft
import inspect
import types
import warnings
from collections.abc import Hashable
from typing import Any

import equinox as eqx

from .. import _compat
from .._mark.listening import listening
from .._mark.site import Label
from .._mark.sow import bind
from .._mark.static import Const
from .._names import join


@dc.dataclass(frozen=True)
class Mark:
    """What to do when one of `methods` is called: sow the output (and inputs) of those
    in `emit`, and if `scope`, put the path before the names of the sows inside.
    `depth`: of the transformation that made it, see `Label`."""

    path: str
    tag: Hashable
    methods: tuple[str, ...]
    emit: tuple[str, ...]
    inputs: bool
    scope: bool
    spec: Const | None = None
    depth: int = 0


class _Quiet:
    """First among the bases: the user's `__init_subclass__` is not for our
    subclasses."""

    def __init_subclass__(cls, **kwargs):
        pass


# No `__wrapped__` tells what this is.
Jacobian: Any = type(eqx.filter_jacrev(lambda: None))


def is_wrapper(node: Any) -> bool:
    """Whether a module is a transformed function, rather than part of a model."""
    if isinstance(node, eqx.Partial | Jacobian):
        return True
    return isinstance(node, eqx.Module) and (
        isinstance(getattr(type(node), "__wrapped__", None), property)
        or hasattr(node, "__self__")
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


# JAX never forgets a PyTree class, so there has to be one for each type of module.
@ft.cache
def _subclass(cls: type, methods: tuple[str, ...]) -> type:
    def override(name):
        @ft.wraps(getattr(cls, name))
        def method(self, /, *args, **kwargs):
            plain = getattr(super(marked, self), name)
            return _call(marks_of(self), name, plain, args, kwargs)

        return method

    @ft.wraps(cls.__init__)
    def init(self, /, *args, _marks=(), **kwargs):
        super(marked, self).__init__(*args, **kwargs)
        self._marks = _marks

    def fill(namespace):
        namespace["__annotations__"] = {"_marks": tuple}
        namespace["_marks"] = eqx.field(static=True, repr=False, default=())
        namespace["__init__"] = init
        namespace["__module__"] = cls.__module__
        namespace["__qualname__"] = cls.__qualname__
        namespace["__doc__"] = cls.__doc__
        namespace["__reduce__"] = _reduce
        for method, fn in (("__copy__", _copy), ("__deepcopy__", _deepcopy)):
            if not has_method(cls, method):
                namespace[method] = fn
        namespace["_unmarked"] = cls
        namespace.update({name: override(name) for name in methods})

    with warnings.catch_warnings():
        # Equinox warned of what it sees in the class when the user made it.
        warnings.simplefilter("ignore")
        marked = types.new_class(cls.__name__, (_Quiet, cls), {}, fill)
    # To JAX the marks are a field. To `dataclasses.fields` they are none, and to
    # `dataclasses.replace` they are an argument that the new module gets, too.
    marked.__dataclass_fields__["_marks"] = _Argument.__dataclass_fields__["_marks"]
    return marked


@dc.dataclass
class _Argument:
    _marks: dc.InitVar[tuple] = ()


def _reduce(self):
    fields = {k: v for k, v in self.__dict__.items() if k != "_marks"}
    return _rebuild, (type(self)._unmarked, fields)


def _copy(self):
    return _rebuild(type(self), self.__dict__)


def _deepcopy(self, memo):
    memo[id(self)] = new = _rebuild(type(self), {})
    for name, x in self.__dict__.items():
        new.__dict__[name] = x if name == "_marks" else copy.deepcopy(x, memo)
    return new


def _rebuild(cls, fields):
    new = object.__new__(cls)
    new.__dict__.update(fields)
    return new


def _call(marks, name, plain, args, kwargs):
    here = listening.value
    # The last one is the innermost.
    marks = [m for m in reversed(marks) if name in m.methods]
    if here is None or not marks:
        return plain(*args, **kwargs)

    def marked(value, marks, *more):
        if not marks:
            return value
        # One site, whoever asks: so all have what the program goes on with.
        labels = (
            Label(join(here.scope, label(m.path, name, *more)), m.tag, m.depth)
            for m in marks
        )
        return bind(value, tuple(labels), marks[0].spec, captured=True)

    emit = [m for m in marks if name in m.emit]
    args, kwargs = marked((args, kwargs), [m for m in emit if m.inputs], "inputs")
    path = next((m.path for m in marks if m.scope), here.path)
    with listening(here._replace(path=path)):
        out = plain(*args, **kwargs)
    return marked(out, emit)


def label(path: str, method: str, *more: str) -> str:
    methods = () if method == "__call__" else (method,)
    return ".".join((path, *methods, *more)) or "."


def with_marks(module: eqx.Module, marks: tuple[Mark, ...]) -> eqx.Module:
    cls = plain_type(module)
    fields = {k: v for k, v in module.__dict__.items() if k != "_marks"}
    if marks:
        # All methods, whatever is marked: that is one class for all options.
        own = own_methods(cls)
        wanted = {m for mark in marks for m in mark.methods if has_method(cls, m)}
        cls = _subclass(cls, (*own, *sorted(wanted.difference(own))))
        fields["_marks"] = marks
    return _rebuild(cls, fields)


def marks_of(module: eqx.Module) -> tuple[Mark, ...]:
    return module.__dict__.get("_marks", ())


def plain_type(module: Any) -> type:
    return getattr(type(module), "_unmarked", type(module))
