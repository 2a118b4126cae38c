"""What `capture=` and `scope=True` do to a program: see `noting.py` for how calls of
modules get into it, and `naming.py` for what they are called."""

import dataclasses as dc
import inspect
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import equinox as eqx
import jax

from .. import _compat
from .._errors import shown, UnknownSowError, UnsupportedPrimitiveError
from .._frames import is_library
from .._mark.calls import Note, Path
from .._mark.listening import Capture, Listening
from .._mark.noting import own_methods, why_not_noted
from .._mark.site import Label
from .._unknown import check_known
from .._walk.flow import Here, run
from .._walk.handler import is_solver
from .._walk.sows import Mark
from .naming import Naming, TO_CAPTURE_CALLS
from .places import Places
from .visits import Visits


WITH_RULES = jax.custom_jvp, jax.custom_vjp


def is_function_to_capture(capture: Any) -> bool:
    """Whether it is a function whose calls are captured, such as `jax.nn.softmax`,
    rather than a predicate: one of JAX's or Equinox's, one that `jax.jit` or
    `eqx.filter_jit` made, or one with a derivative rule."""
    if isinstance(capture, (_compat.Jitted, *WITH_RULES)):
        return True
    code = getattr(inspect.unwrap(capture), "__code__", None)
    return code is not None and is_library(code.co_filename)


@dc.dataclass(frozen=True)
class Marking:
    """The options of a transformation that have to do with modules.

    `search` is true once an unnamed `Sow` has run: the program is traced again, with a
    note of all calls. `modes` are those that the user asks for: no others have to find
    their names.
    """

    capture: Any = None
    tag: Hashable = "intermediates"
    methods: tuple[str, ...] = ("__call__",)
    inputs: bool = False
    calls: bool = False
    scope: bool = False
    search: bool = False
    modes: tuple[str, ...] | None = None

    def noted(self, here: Listening) -> Listening:
        """What listens to the calls, too, that these options ask for."""
        if self.capture is None and not (self.scope or self.search):
            return here
        methods = () if self.capture is None else self.methods
        asked = {"inputs": self.inputs, "call": self.calls}
        kinds = frozenset([kind for kind, on in asked.items() if on])
        options = methods, *self.selected, kinds, self.scope
        capture = Capture(here.depth, self.tag, *options)
        return here._replace(captures=(*here.captures, capture))

    @property
    def selected(self) -> tuple[tuple[type, ...] | None, tuple[Any, ...]]:
        """The classes that are selected, or `None` if a predicate selects; and the
        functions, as they were before `jax.jit`. `True` selects what is an `object`."""
        several = self.capture if isinstance(self.capture, tuple) else (self.capture,)
        several = [object if c is True else c for c in several]
        classes = tuple(c for c in several if isinstance(c, type))
        functions = [c for c in several if not isinstance(c, type)]
        if not all(map(is_function_to_capture, functions)):
            return None, ()
        # A function with a derivative rule is called as a whole.
        stop = lambda fn: isinstance(fn, WITH_RULES)
        return classes, tuple(inspect.unwrap(fn, stop=stop) for fn in functions)


def named(
    closed: Any, found: list[Mark], called: tuple, depth: int, marking: Marking
) -> tuple[list[Mark], tuple[str, ...]]:
    """The marks that are `found` in a program, which was `called` with `(fn, args,
    kwargs)`, each with its name; and with what those begin that are paths of modules,
    where the models are."""
    is_off = marking.capture is None and not marking.scope
    if is_off and not any([x.site.note for x in found]):
        return found, ()
    label = Label(None, marking.tag, depth)
    for mark in found:
        site, holder = mark.site, mark.holder
        is_mine = site.note is not None and label in site.labels
        if is_mine and not (holder is None or is_solver(holder)):
            raise UnsupportedPrimitiveError(
                f"{site.said_first} is inside the primitive `{holder.primitive}`, "
                "where eqx_sow cannot tell which module is called. Call it outside, or "
                "select other classes with `capture=`."
            )
    places = Places(*called)
    seen = Visits(places)
    run(seen, closed, seen.inputs(), Here())
    naming = Naming(seen, places, depth, marking)
    sites = naming.sites()
    if marking.capture is not None:
        waiting = [x.site.note for x in found if label in x.site.labels]
        _check_found(waiting, places, marking, naming)
    all_roots = dict.fromkeys((*naming.roots, *naming.roots_of_sows))
    marks = [x._replace(site=sites.get(x.way, x.site)) for x in found]
    return marks, tuple(all_roots)


def _check_found(
    notes: list[Note | None], places: Places, marking: Marking, naming: Naming
) -> None:
    """Raises if the options select nothing, and says what there would have been.
    `notes` are those of the marks that wait for a name."""
    option = f"capture={_shown(marking.capture)}"
    in_sight = _classes(places.modules)
    classes, functions = marking.selected
    is_predicate = classes is None
    classes = classes or (() if functions else (eqx.Module,))
    every = dict.fromkeys((in_sight | naming.seen).values())
    fits = [c for c in every if issubclass(c, classes)]
    own = [(cls, method) for cls in fits for method in own_methods(cls)]
    methods = dict.fromkeys(name for cls, name in own if not why_not_noted(cls, name))
    others = tuple(m for m in methods if m not in marking.methods)
    others = others[0] if len(others) == 1 else others
    hint = f" Is another method called? Write `methods={others!r}`." if others else ""
    if fits:
        _check_are_methods(option, marking.methods, fits)
        check_known(
            f"{option}, methods={marking.methods!r}",
            marking.methods,
            methods,
            "is a method of no selected module",
            kind="methods",
            hint=lambda *_: hint,
        )
    if naming.roots:
        return
    hidden = next(filter(None, notes), None)
    if hidden is not None and not naming.seen:
        raise UnsupportedPrimitiveError(
            f"`{option}` selects calls such as {hidden.call!r}, but "
            "all are inside a primitive such as `lineax.linear_solve`, which "
            "evaluates its function over and over, so that values in there cannot be "
            "captured. Call the module once outside, too."
        )
    # In `jax.vmap(model)`, the model is in a variable.
    items = (naming.seen or _classes(places.outside) | in_sight).items()
    there = shown([f"{path} ({cls.__name__})" for path, cls in items], str)
    where = "that are called" if naming.seen else "in the arguments and variables"
    said = f" The modules {where} are: {there}." if classes else ""
    if classes and not items:
        said = " No module is in the arguments or variables."
        if object not in classes:
            said += " Pass `capture=True` to see which are made and called inside."
        said += " Only modules of Equinox are captured: `sow` what others return."
    if is_predicate:
        said += " A predicate is called with `(path, module)`, in this order."
        said += f" {TO_CAPTURE_CALLS}"
    full = lambda cls: (cls.__module__, cls.__qualname__)
    passed_over = {full(cls) for _, cls in items if not issubclass(cls, classes)}
    for _, cls in passed_over.intersection(map(full, classes)):
        hint += (
            f" `{cls}` was defined again after the model was made, as happens in a "
            "notebook: make the model again."
        )
    raise UnknownSowError(
        f"`{option}` selects nothing that is called in the program.{said}{hint}"
        f" Check that the program calls this {'model' if classes else 'function'}. If "
        "a `save_intermediates` inside has captured it, give one of the two another "
        "`tag`."
    )


def _classes(modules: Mapping[Path, Any]) -> dict[str, type]:
    return {"/".join(path) or ".": type(x) for path, x in modules.items()}


def _check_are_methods(capture: str, methods: Iterable[str], fits: list[type]) -> None:
    """Raises if what the option `methods` names is another attribute of all classes
    that are selected."""
    for name in methods:
        there = [cls for cls in fits if hasattr(cls, name)]
        kinds = [why_not_noted(cls, name) for cls in there]
        if kinds and all(kinds):
            raise UnknownSowError(
                f"`{capture}, methods={name!r}`: `{there[0].__name__}.{name}` is "
                f"{kinds[0]}. Only methods that return their result are captured: "
                "`sow` the value in there."
            )


def _shown(capture: Any) -> str:
    """The option as the user wrote it, as far as that is known."""
    if isinstance(capture, tuple):
        return f"({', '.join(map(_shown, capture))})"
    return getattr(capture, "__name__", repr(capture))
