"""Marks submodules of a model that nobody edits.

Each marked module becomes an instance of a subclass made on the fly: the same fields,
and its marks in a static field. So the marks go wherever the module goes, through every
transformation, and `isinstance` and the paths in the PyTree stay as they were. Modules
are marked on the way into a traced function, and restored on the way out.
"""

import dataclasses as dc
import functools as ft
import inspect
import types
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from ._errors import UnknownSowError
from ._primitive import Const, listening
from ._sow import bind, Sow


@dc.dataclass(frozen=True)
class Mark:
    """What to do when one of `methods` is called: sow the output (and inputs) of those
    in `emit`, and if `scope`, put the path before the names of the sows inside."""

    path: str
    tag: Hashable
    methods: tuple[str, ...]
    emit: tuple[str, ...]
    inputs: bool
    scope: bool
    spec: Const = Const(None)


@dc.dataclass(frozen=True)
class Marking:
    """The options of a transformation that have to do with modules."""

    capture: Any
    tag: Hashable
    methods: tuple[str, ...]
    inputs: bool
    scope: bool

    def chooses(self, path: str, module: eqx.Module) -> bool:
        if self.capture in (None, False):
            return False
        if self.capture is True:
            return _has_method(type(module), "__call__") or self.applies(module)
        if isinstance(self.capture, type | tuple):
            return isinstance(module, self.capture)
        return bool(self.capture(path or ".", module))

    def applies(self, module: eqx.Module) -> bool:
        return any(_has_method(type(module), m) for m in self.methods)


class _Quiet:
    """First among the bases: the user's `__init_subclass__` is not for our
    subclasses."""

    def __init_subclass__(cls, **kwargs):
        pass


def _has_method(cls: type, name: str) -> bool:
    # Not `hasattr`: the metaclass has a `__call__`.
    return any(name in c.__dict__ for c in cls.__mro__)


# JAX never forgets a PyTree class, so there has to be one for each type of module.
@ft.cache
def _subclass(cls: type, methods: tuple[str, ...]) -> type:
    def override(name):
        @ft.wraps(getattr(cls, name))
        def method(self, /, *args, **kwargs):
            plain = getattr(super(marked, self), name)
            return _call(self.__dict__["_marks"], name, plain, args, kwargs)

        return method

    def fill(namespace):
        namespace["__annotations__"] = {"_marks": tuple}
        namespace["_marks"] = eqx.field(static=True, init=False, repr=False, default=())
        namespace["__module__"] = cls.__module__
        namespace["__qualname__"] = cls.__qualname__
        namespace["__doc__"] = cls.__doc__
        namespace["__reduce__"] = _reduce
        namespace["_unmarked"] = cls
        namespace.update({name: override(name) for name in methods})

    with warnings.catch_warnings():
        # Equinox warned of what it sees in the class when the user made it.
        warnings.simplefilter("ignore")
        marked = types.new_class(cls.__name__, (_Quiet, cls), {}, fill)
    return marked


def _reduce(self):
    fields = {k: v for k, v in self.__dict__.items() if k != "_marks"}
    return _rebuild, (type(self)._unmarked, fields)


def _rebuild(cls, fields):
    new = object.__new__(cls)
    new.__dict__.update(fields)
    return new


def _call(marks, name, plain, args, kwargs):
    here = listening.value
    if here is None:
        return plain(*args, **kwargs)
    marks = tuple(m for m in dict.fromkeys(marks) if name in m.methods)
    for m in marks:
        if m.inputs and name in m.emit:
            label = f"{_label(m.path, name)}.inputs".replace("..", ".")
            args, kwargs = bind((args, kwargs), label, m.tag, None)
    scope = next((m.path for m in reversed(marks) if m.scope), here.scope)
    with listening(here._replace(scope=scope)):
        out = plain(*args, **kwargs)
    for m in marks:
        if name in m.emit:
            out = bind(out, _label(m.path, name), m.tag, m.spec.value)
    return out


def _label(path: str, method: str) -> str:
    return (path or ".") if method == "__call__" else f"{path}.{method}"


def _with_marks(module: eqx.Module, marks: tuple[Mark, ...]) -> eqx.Module:
    cls = getattr(type(module), "_unmarked", type(module))
    fields = {k: v for k, v in module.__dict__.items() if k != "_marks"}
    if marks:
        methods = dict.fromkeys(m for mark in marks for m in mark.methods)
        cls = _subclass(cls, tuple(m for m in methods if _has_method(cls, m)))
        fields["_marks"] = marks
    return _rebuild(cls, fields)


def _marks_of(module: eqx.Module) -> tuple[Mark, ...]:
    return module.__dict__.get("_marks", ())


def _children(node: Any) -> tuple[list[tuple[str, Any]], Any]:
    children, treedef = jtu.tree_flatten_with_path(
        node, is_leaf=lambda x: x is not node
    )
    return [
        (_key(path[-1]) if path else "", child) for path, child in children
    ], treedef


def _key(key: Any) -> str:
    for attribute in ("name", "idx", "key"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _join(path: str, key: str) -> str:
    return f"{path}/{key}" if path else key


# No `__wrapped__` tells what this is.
_Jacobian: Any = type(eqx.filter_jacrev(lambda: None))


def _is_wrapper(node: Any) -> bool:
    """Whether a module is a transformed function, rather than part of a model."""
    if isinstance(node, eqx.Partial | _Jacobian):
        return True
    return isinstance(node, eqx.Module) and (
        isinstance(getattr(type(node), "__wrapped__", None), property)
        or hasattr(node, "__self__")
    )


# The fields in which such modules hold the function, Equinox's and ours.
_WRAPPED = (
    *("__wrapped__", "__self__", "__func__", "_fn", "fn", "func"),
    *("_fun", "fun", "_fun_value_and_grad"),
)


# What `eqx.filter_jit` returns keeps the function out of its PyTree.
_JitWrapper: Any = type(eqx.filter_jit(lambda: None))


def _is_module(x: Any) -> bool:
    return isinstance(x, eqx.Module)


def _globals(fn: types.FunctionType) -> dict[str, Any]:
    def names(code):
        inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
        return code.co_names + sum(map(names, inner), ())

    return {n: fn.__globals__[n] for n in names(fn.__code__) if n in fn.__globals__}


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


class _Walk:
    """One pass over a function and its arguments."""

    def __init__(self, marking: Marking):
        self.marking = marking
        self.seen: list[str] = []
        self.made: set[Mark] = set()
        self.methods: set[str] = set()
        self.chosen = False
        self.closed_over: dict[types.FunctionType, Any] = {}
        # By class, the path of the first model: optimiser states look like it.
        self.models: dict[type, str] = {}

    def call(self, fn: Callable, args: tuple, kwargs: dict, path: str = "") -> tuple:
        """A function and its arguments."""
        names = _positional_names(fn, len(args))
        wrapper = _is_wrapper(fn) or not isinstance(fn, eqx.Module)
        return (
            self.visit(fn, path, wrapper),
            tuple(self.visit(x, name) for name, x in zip(names, args)),
            {name: self.visit(x, name) for name, x in kwargs.items()},
        )

    def visit(self, node: Any, path: str, wrapper: bool = False) -> Any:
        if wrapper and isinstance(node, types.FunctionType):
            return self._close_over(node)
        if wrapper and isinstance(node, ft.partial):
            fn, args, kwargs = self.call(node.func, node.args, node.keywords, path)
            return ft.partial(fn, *args, **kwargs)
        if jtu.all_leaves((node,)):
            return node
        if isinstance(node, _JitWrapper):
            inside = _is_wrapper(node.__wrapped__) or not _is_module(node.__wrapped__)
            new = self.visit(node.__wrapped__, path, inside)
            return node if new is node.__wrapped__ else eqx.filter_jit(new)
        children, treedef = _children(node)
        if not children:
            return node if wrapper else self._mark(node, path)
        state = isinstance(node, tuple) and hasattr(node, "_fields")
        new = []
        for key, child in children:
            if wrapper and key in _WRAPPED:
                inside = _is_wrapper(child) or not isinstance(child, eqx.Module)
                child = self.visit(child, path, inside)
            elif not (state and isinstance(child, eqx.Module)):
                child = self.visit(child, _join(path, key))
            elif (model := self.models.get(_plain(child))) is not None:
                child = self.visit(child, model)
            new.append(child)
        if any(x is not child for x, (_, child) in zip(new, children)):
            node = jtu.tree_unflatten(treedef, new)
        return self._bind(node) if wrapper else self._mark(node, path)

    def _bind(self, node: Any) -> Any:
        """A bound method of a marked module is bound again, to what it is there."""
        if isinstance(getattr(node, "__self__", None), eqx.Module):
            name = getattr(node, "__name__", None)
            if name in self.marking.methods:
                return eqx.Partial(getattr(type(node.__self__), name), node.__self__)
        return node

    def _close_over(self, fn: types.FunctionType, inside: Any = None) -> Callable:
        """A function whose variables from outside are marked modules. `inside`: what it
        is a transformation of, as `jax.vmap(model)` is a function that closes over the
        model."""
        if fn in self.closed_over:
            return self.closed_over[fn].cell_contents
        self.closed_over[fn] = here = types.CellType()
        if hasattr(fn, "__wrapped__"):
            inside = inspect.unwrap(fn)
        names, cells = fn.__code__.co_freevars, fn.__closure__ or ()
        new_cells = [self._variable(n, c, inside) for n, c in zip(names, cells)]
        outer = {
            name: self.visit(x, name)
            for name, x in _globals(fn).items()
            if _has_modules(x)
        }
        new = fn
        if any(n is not c and n is not here for n, c in zip(new_cells, cells)) or any(
            x is not fn.__globals__[name] for name, x in outer.items()
        ):
            new = types.FunctionType(
                fn.__code__,
                {**fn.__globals__, **outer},
                fn.__name__,
                fn.__defaults__,
                tuple(new_cells),
            )
            new.__kwdefaults__ = fn.__kwdefaults__
            ft.update_wrapper(new, fn)
        here.cell_contents = new
        return new

    def _variable(self, name: str, cell: Any, inside: Any) -> Any:
        """A variable that a function closes over, as a cell."""
        x = _contents(cell)
        if isinstance(x, types.FunctionType):
            if x in self.closed_over:  # functions that call each other
                return self.closed_over[x]
            new = self._close_over(x, inside)
        elif _has_modules(x):
            new = self.visit(x, "" if x is inside else name, _is_wrapper(x))
        else:
            return cell
        return cell if new is x else types.CellType(new)

    def _mark(self, node: Any, path: str) -> Any:
        m = self.marking
        if not isinstance(node, eqx.Module) or _is_wrapper(node):
            return node
        is_callable = _has_method(_plain(node), "__call__")
        chosen = m.chooses(path, node)
        emit = chosen and m.applies(node)
        self.chosen |= chosen
        if is_callable:
            self.seen.append(f"{path or '.'} ({_plain(node).__name__})")
        if emit:
            self.methods.update(x for x in m.methods if _has_method(_plain(node), x))
        if isinstance(node, Sow) and node.name is None:
            methods = ("__call__",)
            spec = Const(node.spec)
            new = Mark(path, node.tag, methods, methods, False, m.scope, spec)
        elif emit or (m.scope and is_callable):
            methods = m.methods if emit else ()
            if m.scope and is_callable:
                methods = tuple(dict.fromkeys((*methods, "__call__")))
            new = Mark(
                path, m.tag, methods, m.methods if emit else (), m.inputs, m.scope
            )
        else:
            return node
        self.made.add(new)
        return _with_marks(node, (*_marks_of(node), new))


def _plain(module: Any) -> type:
    return getattr(type(module), "_unmarked", type(module))


def _has_modules(x: Any) -> bool:
    if isinstance(x, types.ModuleType | type):
        return False
    leaves = jtu.tree_leaves(x, is_leaf=lambda y: isinstance(y, eqx.Module))
    return any(isinstance(y, eqx.Module) for y in leaves)


def _has_unnamed(x: Any) -> bool:
    if isinstance(x, types.FunctionType):
        x = [_globals(x), *map(_contents, x.__closure__ or ())]
    leaves = jtu.tree_leaves(x, is_leaf=lambda y: isinstance(y, Sow))
    return any(isinstance(y, Sow) and y.name is None for y in leaves)


def _positional_names(fn: Callable, n: int) -> list[str]:
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


def mark(fn: Callable, args: tuple, kwargs: dict, marking: Marking) -> tuple:
    """`(fn, args, kwargs)` with the modules in there marked, and the marks."""
    if marking.capture in (None, False) and not marking.scope:
        if not (_has_unnamed(fn) or _has_unnamed((args, kwargs))):
            return (fn, args, kwargs), set()
    walk = _Walk(marking)
    names = _positional_names(fn, len(args))
    for name, x in (*zip(names, args), *kwargs.items()):
        if isinstance(x, eqx.Module):
            walk.models.setdefault(_plain(x), name)
    marked = walk.call(fn, args, kwargs)
    if marking.capture not in (None, False):
        _check_found(walk)
    return marked, walk.made


def _check_found(walk: _Walk) -> None:
    missing = [m for m in walk.marking.methods if m not in walk.methods]
    if walk.chosen and not missing:
        return
    modules = ", ".join(walk.seen) if walk.seen else "none at all"
    what = (
        f"`methods={walk.marking.methods!r}`: no selected module has {missing!r}."
        if walk.chosen
        else f"`capture={walk.marking.capture!r}` selects no module."
    )
    raise UnknownSowError(
        f"{what} The modules in sight are: {modules}. Those that are hidden in a "
        "`jax.jit` or another object that is no PyTree cannot be seen: write "
        "`eqx.filter_jit` there, or pass the model as an argument, "
        "`save_intermediates(fn, capture=...)(model, x)`."
    )


def unmark(tree: Any, made: set[Mark]) -> Any:
    """Takes off the marks that `mark` made."""
    if not made or not _has_modules(tree):
        return tree
    children, treedef = _children(tree)
    if not jtu.treedef_is_leaf(treedef):
        new = [unmark(child, made) for _, child in children]
        tree = jtu.tree_unflatten(treedef, new)
    if isinstance(tree, eqx.Module) and (marks := _marks_of(tree)):
        if marks[-1] in made:
            tree = _with_marks(tree, marks[:-1])
    return tree


def unmark_treedef(treedef: Any, made: set[Mark]) -> Any:
    """The same, for the treedef of a value."""
    if not made:
        return treedef
    tree = jtu.tree_unflatten(treedef, [object()] * treedef.num_leaves)
    return jtu.tree_structure(unmark(tree, made))
