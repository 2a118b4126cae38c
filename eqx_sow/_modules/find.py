"""Finds the modules of a model that nobody edits, and marks them.

They are marked on the way into a traced function, and restored on the way out.
"""

import contextlib
import dataclasses as dc
import functools as ft
import inspect
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from .. import _compat
from .._errors import UnknownSowError
from .._mark.sow import Sow
from .._mark.static import Const
from .marks import has_method, Mark, marks_of, own_methods, plain_type, with_marks


@dc.dataclass(frozen=True)
class Marking:
    """The options of a transformation that have to do with modules."""

    capture: Any
    tag: Hashable
    methods: tuple[str, ...]
    inputs: bool
    scope: bool

    def chooses(self, path: str, module: eqx.Module) -> bool:
        if self.capture is None:
            return False
        if self.capture is True:
            return has_method(type(module), "__call__") or self.applies(module)
        if isinstance(self.capture, type | tuple):
            return isinstance(module, self.capture)
        return bool(self.capture(path or ".", module))

    def applies(self, module: eqx.Module) -> bool:
        return any(has_method(type(module), m) for m in self.methods)


def _children(node: Any) -> tuple[list[tuple[str, Any]], Any]:
    children, treedef = jtu.tree_flatten_with_path(
        node, is_leaf=lambda x: x is not node
    )
    return [(jtu.keystr(path, simple=True), child) for path, child in children], treedef


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


def _has_inexact(tree: Any) -> bool:
    return any(map(eqx.is_inexact_array, jtu.tree_leaves(tree)))


def _is_half(node: Any, whole: eqx.Module) -> bool:
    """Whether it looks like a model, or the first levels of one, but has none of its
    arrays."""
    if plain_type(node) is not plain_type(whole):
        return False
    leaves, treedef = jtu.tree_flatten(node, is_leaf=lambda x: x is None)
    try:
        parts = treedef.flatten_up_to(whole)
    except ValueError:
        return False
    return not any(eqx.is_array(x) and _has_inexact(p) for x, p in zip(leaves, parts))


def _roots(tree: Any, name: str) -> Iterator[tuple[str, eqx.Module]]:
    """The modules in a PyTree that are no part of another, and their paths."""
    is_module = lambda x: isinstance(x, eqx.Module)
    for path, x in jtu.tree_leaves_with_path(tree, is_leaf=is_module):
        if is_module(x):
            inside = jtu.keystr(path, simple=True, separator="/")
            yield (_join(name, inside) if inside else name), x


def _is_part(x: Any) -> bool:
    """Whether it is a module that is part of a model."""
    return isinstance(x, eqx.Module) and not _is_wrapper(x)


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
        self.closed_over: dict[types.FunctionType, types.CellType] = {}
        self.cells: dict[int, types.CellType] = {}
        # By class, the path of the first model: optimiser states look like it.
        self.models: dict[type, str] = {}
        # Models that have arrays, and their paths: the half without these, from
        # `eqx.partition`, has to fit, and so have flags.
        self.wholes: list[tuple[str, eqx.Module]] = []

    def call(self, fn: Callable, args: tuple, kwargs: dict, path: str = "") -> tuple:
        """A function and its arguments."""
        names = _positional_names(fn, len(args))
        wrapper = not _is_part(fn)
        return (
            self.visit(fn, path, wrapper),
            tuple(self.visit_root(x, name) for name, x in zip(names, args)),
            {name: self.visit_root(x, name) for name, x in kwargs.items()},
        )

    def visit_root(self, node: Any, path: str, wrapper: bool = False) -> Any:
        """Visits what is no part of a module."""
        wholes = (name for name, whole in self.wholes if _is_half(node, whole))
        return self.visit(node, next(wholes, path), wrapper)

    def visit(self, node: Any, path: str, wrapper: bool = False) -> Any:
        if wrapper and isinstance(node, types.FunctionType):
            return self._close_over(node)
        if wrapper and isinstance(node, ft.partial):
            fn, args, kwargs = self.call(node.func, node.args, node.keywords, path)
            return ft.partial(fn, *args, **kwargs)
        if jtu.all_leaves((node,)):
            return node
        if isinstance(node, _compat.FilterJit):
            inside = not _is_part(node.__wrapped__)
            new = self.visit(node.__wrapped__, path, inside)
            return node if new is node.__wrapped__ else eqx.filter_jit(new)
        children, treedef = _children(node)
        if not children:
            return node if wrapper else self._mark(node, path)
        state = isinstance(node, tuple) and hasattr(node, "_fields")
        new = []
        for key, child in children:
            if wrapper and key in _WRAPPED:
                inside = not _is_part(child)
                child = self.visit(child, path, inside)
            elif not (state and isinstance(child, eqx.Module)):
                visit = self.visit if isinstance(node, eqx.Module) else self.visit_root
                child = visit(child, _join(path, key))
            elif (model := self.models.get(plain_type(child))) is not None:
                child = self.visit(child, model)
            new.append(child)
        if any(x is not child for x, (_, child) in zip(new, children)):
            node = jtu.tree_unflatten(treedef, new)
        return self._bind(node) if wrapper else self._mark(node, path)

    def _bind(self, node: Any) -> Any:
        """A bound method of a marked module is bound again, to what it is there."""
        if isinstance(getattr(node, "__self__", None), eqx.Module):
            name = getattr(node, "__name__", "")
            if name in self.marking.methods or (name and self.marking.scope):
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
        # JAX leaves `__wrapped__` out if there is a brace in the docstring of a model.
        theirs = _compat.is_library(fn.__code__.co_filename)
        code, cells, defaults = fn.__code__, fn.__closure__ or (), fn.__defaults__ or ()
        new_cells = [
            self._cell("" if theirs else name, cell, inside)
            for name, cell in zip(code.co_freevars, cells)
        ]
        outer = {
            name: self.visit_root(x, name, _is_wrapper(x))
            for name, x in _globals(fn).items()
            if _has_modules(x)
        }
        outer = {n: x for n, x in outer.items() if x is not fn.__globals__[n]}
        names = code.co_varnames[code.co_argcount - len(defaults) :]
        new_defaults = tuple(map(self._variable, names, defaults))
        keywords = fn.__kwdefaults__ or {}
        new_keywords = {n: self._variable(n, x) for n, x in keywords.items()}
        new = fn
        if (
            outer
            or any(x is not y and x is not here for x, y in zip(new_cells, cells))
            or any(x is not y for x, y in zip(new_defaults, defaults))
            or any(x is not keywords[n] for n, x in new_keywords.items())
        ):
            new = types.FunctionType(
                code,
                {**fn.__globals__, **outer} if outer else fn.__globals__,
                fn.__name__,
                new_defaults or None,
                tuple(new_cells),
            )
            new.__kwdefaults__ = new_keywords or None
            ft.update_wrapper(new, fn)
        here.cell_contents = new
        return new

    def _cell(self, name: str, cell: types.CellType, inside: Any) -> types.CellType:
        """A variable that a function closes over. Functions that share it still do."""
        x = _contents(cell)
        if isinstance(x, types.FunctionType) and x in self.closed_over:
            return self.closed_over[x]  # functions that call each other
        if id(cell) not in self.cells:
            new = self._variable("" if x is inside else name, x, inside)
            self.cells[id(cell)] = cell if new is x else types.CellType(new)
        return self.cells[id(cell)]

    def _variable(self, name: str, x: Any, inside: Any = None) -> Any:
        if isinstance(x, types.FunctionType):
            return self._close_over(x, inside)
        if isinstance(x, ft.partial) or _has_modules(x):
            wrapper = isinstance(x, ft.partial) or _is_wrapper(x)
            return self.visit_root(x, name, wrapper)
        return x

    def _mark(self, node: Any, path: str) -> Any:
        m = self.marking
        if not _is_part(node):
            return node
        cls = plain_type(node)
        is_callable = has_method(cls, "__call__")
        scoped = own_methods(cls) if m.scope else ()
        chosen = m.chooses(path, node)
        emit = chosen and m.applies(node)
        self.chosen |= chosen
        if is_callable:
            self.seen.append(f"{path or '.'} ({cls.__name__})")
        if emit:
            self.methods.update(x for x in m.methods if has_method(cls, x))
        if isinstance(node, Sow) and node.name is None:
            methods = ("__call__",)
            spec = None if node.spec is None else Const(node.spec)
            new = Mark(path, node.tag, methods, methods, False, m.scope, spec)
        elif emit or scoped:
            emit = m.methods if emit else ()
            methods = tuple(dict.fromkeys((*emit, *scoped)))
            new = Mark(path, m.tag, methods, emit, m.inputs, m.scope)
        else:
            return node
        self.made.add(new)
        return with_marks(node, (*marks_of(node), new))


def _has_modules(x: Any) -> bool:
    if isinstance(x, types.ModuleType | type):
        return False
    leaves = jtu.tree_leaves(x, is_leaf=lambda y: isinstance(y, eqx.Module))
    return any(isinstance(y, eqx.Module) for y in leaves)


def _has_unnamed(x: Any) -> bool:
    leaves = jtu.tree_leaves(x, is_leaf=lambda y: isinstance(y, Sow))
    return any(isinstance(y, Sow) and y.name is None for y in leaves)


def _positional_names(fn: Callable, n: int) -> list[str]:
    while isinstance(fn, _Jacobian):
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


def mark(fn: Callable, args: tuple, kwargs: dict, marking: Marking) -> tuple:
    """`(fn, args, kwargs)` with the modules in there marked, and the marks."""
    walk = _Walk(marking)
    if marking.capture is None and not marking.scope:
        if not _has_unnamed((fn, args, kwargs)):
            # Functions may still close over one.
            if not _is_part(fn):
                fn = walk.visit(fn, "", True)
            return (fn, args, kwargs), walk.made
    names = _positional_names(fn, len(args))
    for name, x in (*zip(names, args), *kwargs.items()):
        if isinstance(x, eqx.Module):
            walk.models.setdefault(plain_type(x), name)
        walk.wholes += ((path, m) for path, m in _roots(x, name) if _has_inexact(m))
    marked = walk.call(fn, args, kwargs)
    if marking.capture is not None:
        _check_found(walk)
    return marked, walk.made


@contextlib.contextmanager
def explained(marking: Marking) -> Iterator[None]:
    """Errors about modules that do not fit together say why."""
    try:
        yield
    except ValueError as e:
        if (marking.capture is not None or marking.scope) and (
            "Mark(" in str(e) or "type mismatch" in str(e) or "ifferent types" in str(e)
        ):
            e.add_note(
                "This may be from `capture=` or `scope=True`: they give names to the "
                "modules, and two trees of one model that have different names do not "
                "fit together, as in `jax.tree.map` or `eqx.combine`. Capture what is "
                "called with one of them only, or mark the values with `sow`."
            )
        raise


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
    if isinstance(tree, eqx.Module) and (marks := marks_of(tree)):
        if marks[-1] in made:
            tree = with_marks(tree, marks[:-1])
    return tree
