"""Finds the modules of a model, and marks them.

They are marked on the way into a traced function, and restored on the way out.
"""

import contextlib
import dataclasses as dc
import functools as ft
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from .. import _compat
from .._errors import SowError, UnknownSowError
from .._mark.listening import listening
from .._mark.sow import Sow
from .._mark.static import Const
from .._names import join
from . import closures
from .closures import Variable
from .marks import (
    has_method,
    is_part,
    is_wrapper,
    label,
    Mark,
    marks_of,
    own_methods,
    plain_type,
    with_marks,
)
from .unmarked import noticed


@dc.dataclass(frozen=True)
class Marking:
    """The options of a transformation that have to do with modules. `search` is true
    once an unnamed `Sow` has run whose place is not known."""

    capture: Any = None
    tag: Hashable = "intermediates"
    methods: tuple[str, ...] = ("__call__",)
    inputs: bool = False
    scope: bool = False
    search: bool = False

    def chooses(self, path: str, module: eqx.Module) -> bool:
        if self.capture is None:
            return False
        if self.capture is True:
            return has_method(type(module), "__call__") or self.applies(module)
        if isinstance(self.capture, type | tuple):
            return isinstance(module, self.capture)
        chosen = self.capture(path or ".", module)
        if eqx.is_array(chosen):
            raise TypeError(
                f"`capture={self.capture!r}` returned an array for the module at "
                f"{path or '.'!r}, and what is traced is not known yet. Return a bool: "
                "decide by the path, or by what is static about the module, such as "
                "its type or its shapes."
            )
        return bool(chosen)

    @property
    def classes(self) -> tuple[Any, ...]:
        """What is selected by class, and not by a function."""
        if self.capture is True:
            return (eqx.Module,)
        return (self.capture,) if isinstance(self.capture, type | tuple) else ()

    def applies(self, module: eqx.Module) -> bool:
        return any(has_method(type(module), m) for m in self.methods)


def _with_children(node: Any, visit: Callable[[str, Any], Any]) -> Any:
    """The node with `visit(key, child)` in the place of each child."""
    children, treedef = jtu.tree_flatten_with_path(
        node, is_leaf=lambda x: x is not node
    )
    new = [visit(jtu.keystr(path, simple=True), child) for path, child in children]
    if all(x is child for x, (_, child) in zip(new, children)):
        return node
    return jtu.tree_unflatten(treedef, new)


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
    """The modules in a PyTree that are not part of another, and their paths."""
    is_module = lambda x: isinstance(x, eqx.Module)
    for path, x in jtu.tree_leaves_with_path(tree, is_leaf=is_module):
        if is_module(x):
            inside = jtu.keystr(path, simple=True, separator="/")
            yield (join(name, inside) if inside else name), x


class _Walk:
    """One pass over a function, its arguments, and the variables that it reads.

    A function, or what was made of one, leads to the model without a name of its own;
    in a model every step is one more key of the path.
    """

    def __init__(self, marking: Marking):
        self.marking = marking
        here: Any = listening.value
        self.depth: int = here.depth
        self.outside = marking.search or marking.capture is not None or marking.scope
        self.seen: list[str] = []
        self.made: list[Mark] = []
        self.methods: set[str] = set()
        self.chosen = False
        made = self.made
        self.replaced = closures.Replaced(lambda x: unmark(x, set(made)))
        # Functions, classes and variables, of which each is looked at once.
        self.entered: dict[Any, Any] = {}
        # By class, the path of the first model: optimiser states look like it.
        self.models: dict[type, str] = {}
        # The paths of models that are not part of another.
        self.roots: dict[str, None] = {}
        # Models that have arrays, and their paths: the half without these, from
        # `eqx.partition`, has to fit, and so have flags.
        self.wholes: list[tuple[str, eqx.Module]] = []

    def call(self, fn: Callable, args: tuple, kwargs: dict, path: str = "") -> tuple:
        """A function and its arguments."""
        names = closures.positional_names(fn, len(args))
        return (
            self.visit_function(fn, path),
            tuple(self.visit_root(x, name) for name, x in zip(names, args)),
            {name: self.visit_root(x, name) for name, x in kwargs.items()},
        )

    def visit_function(self, fn: Any, path: str = "", inside: Any = None) -> Any:
        """What is called. `inside`: what it is a transformation of, as
        `jax.vmap(model)` is a function that closes over the model."""
        if is_part(fn):
            return self.visit_model(fn, path)
        if isinstance(fn, _compat.FilterJit):
            new = self.visit_function(fn.__wrapped__, path)
            return fn if new is fn.__wrapped__ else eqx.filter_jit(new)
        if isinstance(fn, eqx.Module):
            return self._visit_wrapper(fn, path)
        # A partial of JAX's is a PyTree, and is made anew in every call as it is.
        if isinstance(fn, ft.partial) and type(fn) is not ft.partial:
            inner, args, kwargs = self.call(fn.func, fn.args, fn.keywords, path)
            return type(fn)(inner, *args, **kwargs)
        if self.outside and closures.is_function(fn):
            self._look_into(fn, path, inside)
        return fn

    def _visit_wrapper(self, node: Any, path: str) -> Any:
        def visit(key, child):
            if key in _WRAPPED:
                return self.visit_function(child, path)
            return self.visit_root(child, join(path, key))

        return self._bind(_with_children(node, visit))

    def _bind(self, node: Any) -> Any:
        """A bound method of a marked module is bound again, to what it is there."""
        if isinstance(getattr(node, "__self__", None), eqx.Module):
            name = getattr(node, "__name__", "")
            if name in self.marking.methods or (name and self.marking.scope):
                return eqx.Partial(getattr(type(node.__self__), name), node.__self__)
        return node

    def visit_root(self, node: Any, path: str) -> Any:
        """Visits what is not part of a module."""
        if is_part(node):
            self.roots[path] = None
        wholes = (name for name, whole in self.wholes if _is_half(node, whole))
        return self.visit_model(node, next(wholes, path))

    def visit_model(self, node: Any, path: str) -> Any:
        """A module, or a PyTree of them."""
        if isinstance(node, _compat.FilterJit) or closures.is_function(node):
            return self.visit_function(node, path)
        if jtu.all_leaves((node,)):
            return node
        state = isinstance(node, tuple) and hasattr(node, "_fields")
        inside = self.visit_model if isinstance(node, eqx.Module) else self.visit_root

        def visit(key, child):
            if not (state and isinstance(child, eqx.Module)):
                return inside(child, join(path, key))
            model = self.models.get(plain_type(child))
            return child if model is None else self.visit_model(child, model)

        return self._mark(_with_children(node, visit), path)

    def _look_into(self, fn: Any, path: str = "", inside: Any = None) -> None:
        """The variables that a function reads."""
        if not self._enter(id(fn), fn):
            return
        if hasattr(fn, "__wrapped__"):
            inside = inspect.unwrap(fn)
        for variable in closures.variables(fn):
            if isinstance(fn, ft.partial) and not variable.name:
                variable = variable._replace(name=path)
            self._visit_variable(variable, inside)
        inner = closures.wrapped(fn)
        if closures.is_function(inner):
            self._look_into(inner, path, inside)

    def _visit_variable(self, variable: Variable, inside: Any = None) -> None:
        x, name = variable.value, variable.name
        key = id(variable.holder), variable.key
        if not self._enter(key, variable):
            return
        self.replaced.read(variable)
        if not closures.may_hold(x):
            return
        # JAX leaves `__wrapped__` out if there is a brace in the docstring of a model.
        name = "" if x is inside else name
        if closures.is_container(x):
            for item in closures.items(variable._replace(name=name)):
                self._visit_variable(item)
            return
        start = len(self.made)
        if is_wrapper(x) or closures.is_function(x):
            new = self.visit_function(x, name, inside)
        else:
            new = self.visit_root(x, name)
        if new is not x:
            self.replaced.put(variable, new, tuple(self.made[start:]))

    def _enter(self, key: Hashable, kept: Any) -> bool:
        """Whether this is the first time. What is kept keeps its `id`."""
        first = key not in self.entered
        self.entered[key] = kept
        return first

    def _mark(self, node: Any, path: str) -> Any:
        if not is_part(node):
            return node
        m, cls = self.marking, plain_type(node)
        if self.outside and self._enter(cls, cls):
            for fn in closures.methods(cls):
                if not is_part(fn):
                    self.visit_function(fn)
        scoped = own_methods(cls) if m.scope else ()
        chosen = m.chooses(path, node)
        emit = m.methods if chosen and m.applies(node) else ()
        self.chosen |= chosen
        if has_method(cls, "__call__"):
            self.seen.append(f"{path or '.'} ({cls.__name__})")
        self.methods.update(x for x in emit if has_method(cls, x))
        if isinstance(node, Sow) and node.name is None:
            methods = ("__call__",)
            spec = None if node.spec is None else Const(node.spec)
            # The first of its names is for all: it is a sow of the user's.
            depth = self.depth if marks_of(node) else 0
            new = Mark(path, node.tag, methods, methods, False, m.scope, spec, depth)
        elif emit or scoped:
            methods = tuple(dict.fromkeys((*emit, *scoped)))
            new = Mark(path, m.tag, methods, emit, m.inputs, m.scope, depth=self.depth)
        else:
            return node
        self.made.append(new)
        return with_marks(node, (*marks_of(node), new))


def _modules_in(tree: Any, cls: type = eqx.Module) -> list[Any]:
    """The outermost modules of a class in a PyTree."""
    is_one = lambda x: isinstance(x, cls)
    return list(filter(is_one, jtu.tree_leaves(tree, is_leaf=is_one)))


@contextlib.contextmanager
def marked(
    fn: Callable, args: tuple, kwargs: dict, marking: Marking
) -> Iterator[tuple[tuple, set[Mark], tuple[str, ...]]]:
    """`(fn, args, kwargs)` with the modules in there marked, the marks, and the names
    that models have there. Those that the function reads from outside are marked in the
    meantime."""
    walk = _Walk(marking)
    sow_layers = _modules_in((fn, args, kwargs), Sow)
    if not (walk.outside or any(s.name is None for s in sow_layers)):
        yield (fn, args, kwargs), set(), ()
        return
    names = closures.positional_names(fn, len(args))
    for name, x in (*zip(names, args), *kwargs.items()):
        if isinstance(x, eqx.Module):
            walk.models.setdefault(plain_type(x), name)
        walk.wholes += ((path, m) for path, m in _roots(x, name) if _has_inexact(m))
    with walk.replaced.lasting():
        new = walk.call(fn, args, kwargs)
        if marking.capture is not None:
            _check_found(walk)
        here = listening.value
        outside = (*here.outside, *walk.replaced.key)
        selected = (*here.selected, *marking.classes)
        with listening(here._replace(outside=outside, selected=selected)):
            with noticed(marking.methods if marking.classes else ()):
                yield new, set(walk.made), tuple(walk.roots)


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
    raise UnknownSowError(f"{what} The modules in sight are: {modules}. {_HIDDEN}")


_HIDDEN = (
    "A module cannot be seen in a `jax.jit(module)`, or in an object that is not a "
    "PyTree: write `eqx.filter_jit` there, or pass the model as an argument, "
    "`save_intermediates(fn, capture=...)(model, x)`."
)


def check_called(marks: Iterable[Mark], marking: Marking, names: Iterable[str]) -> None:
    """Raises if nothing that `capture` selects is among the names in the program."""
    if marking.capture is None:
        return
    labels = dict.fromkeys(
        label(m.path, method)
        for m in marks
        if m.tag == marking.tag
        for method in m.emit
    )
    ends = tuple(f"/{name}" for name in labels)  # in a scope
    if not any(n in labels or n.endswith(ends) for n in names):
        selected = ", ".join(map(repr, sorted(labels)))
        raise UnknownSowError(
            f"`capture={marking.capture!r}` selects {selected}, "
            "but none of these is called in the program. Is another model called? "
            f"{_HIDDEN} If a `save_intermediates` inside has captured them, give one "
            "of the two another `tag`."
        )


@contextlib.contextmanager
def explained(marking: Marking) -> Iterator[None]:
    """Errors about modules that do not fit together say why."""
    try:
        yield
    except ValueError as e:
        message = str(e)
        if not (marking.capture is not None or marking.scope) or isinstance(
            e, SowError
        ):
            raise
        # Of one class twice, as a marked module has the name of its class.
        names = _compat.classes_that_differ(message)
        if "Mark(" in message or len(names) > len(set(names)):
            raise SowError(
                "`capture=` and `scope=True` give names to the modules of a model, and "
                "here two trees of one model meet, as in `eqx.combine` or "
                "`jax.tree.map`, that have different names: one of them cannot be "
                f"seen, or they are two models. {_HIDDEN} Or mark the values with "
                "`sow`."
            ) from e
        raise


def unmark(tree: Any, made: set[Mark]) -> Any:
    """Takes off the marks that `marked` made."""
    if not _modules_in(tree):
        return tree
    tree = _with_children(tree, lambda _, child: unmark(child, made))
    if isinstance(tree, eqx.Module) and type(tree) is not plain_type(tree):
        marks = marks_of(tree)
        if not marks or marks[-1] in made:
            tree = with_marks(tree, marks[:-1])
    return tree
