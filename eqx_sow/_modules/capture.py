"""What `capture=` and `scope=True` do to a program: see `noting.py` for how calls of
modules get into it, and `naming.py` for what they are called."""

import dataclasses as dc
import difflib
import inspect
from collections.abc import Hashable
from typing import Any

from .. import _compat
from .._errors import UnknownSowError, UnsupportedPrimitiveError
from .._frames import is_library
from .._mark.listening import Capture, Listening
from .._mark.noting import has_method, own_methods
from .._walk.flow import Here, run
from .._walk.sows import sites, with_sites
from .naming import Naming
from .places import modules_without_arrays, Places
from .sources import at_source, Source


def is_function_to_capture(capture: Any) -> bool:
    """Whether it is a function whose calls are captured, such as `jax.nn.softmax`,
    rather than a predicate: one of JAX's or Equinox's, or one that `jax.jit` or
    `eqx.filter_jit` made."""
    if isinstance(capture, _compat.Jit | _compat.FilterJit):
        return True
    code = (
        getattr(inspect.unwrap(capture), "__code__", None)
        if callable(capture)
        else None
    )
    return code is not None and is_library(code.co_filename)


@dc.dataclass(frozen=True)
class Marking:
    """The options of a transformation that have to do with modules. `search` is true
    once an unnamed `Sow` has run. Of a mode that is none of the `modes`, it does not
    matter if it cannot be named."""

    capture: Any = None
    tag: Hashable = "intermediates"
    methods: tuple[str, ...] = ("__call__",)
    inputs: bool = False
    scope: bool = False
    search: bool = False
    modes: tuple[str, ...] | None = None

    def noted(self, here: Listening) -> Listening:
        """With a note of the calls that are wanted."""
        if self.capture is None and not (self.scope or self.search):
            return here
        captures = (*here.captures, self._capture(here.depth))
        return here._replace(captures=captures)

    @property
    def classes(self) -> tuple[type, ...] | None:
        """What is selected by class, or `None` if that is not known before the calls
        have their names."""
        one = isinstance(self.capture, type | tuple)
        if one or is_function_to_capture(self.capture):
            return tuple(c for c in self._several if isinstance(c, type))
        return None

    @property
    def functions(self) -> tuple[Any, ...]:
        """The functions that are selected, as they were before `jax.jit`."""
        if self.classes is None:
            return ()
        functions = (c for c in self._several if not isinstance(c, type))
        return tuple(map(inspect.unwrap, functions))

    @property
    def _several(self) -> tuple[Any, ...]:
        return self.capture if isinstance(self.capture, tuple) else (self.capture,)

    def _capture(self, depth: int) -> Capture:
        if self.capture is None:
            return Capture(depth, self.tag, scope=self.scope)
        return Capture(
            depth,
            self.tag,
            self.methods,
            self.classes,
            self.functions,
            inputs=self.inputs,
            scope=self.scope,
            outlines=self.classes is None and self.capture is not True,
        )


@dc.dataclass(frozen=True)
class Named:
    """A program in which the sows have names. `roots`: with what those of captured
    calls begin, where the models are."""

    closed: Any
    roots: tuple[str, ...] = ()


def given(fn: Any, args: tuple, kwargs: dict) -> dict[int, tuple[str, ...]]:
    """The places of the modules without arrays among arguments, by their ids."""
    return modules_without_arrays(Places(fn, args, kwargs).roots)


def name(closed: Any, called: tuple, depth: int, marking: Marking) -> Named:
    """Names the sows of a program, `called` with `(fn, args, kwargs)`."""
    if marking.capture is None and not _has_notes(closed, marking):
        return Named(closed)
    places = Places(*called)
    naming = Naming(places, depth, marking)
    inputs = [at_source(Source(i), ("input", i)) for i in range(len(places.inputs))]
    run(naming, closed, inputs, Here())
    sites = naming.sites()
    if marking.capture is not None:
        _check_found(closed, places, marking, naming)
    return Named(with_sites(closed, sites), tuple(naming.roots))


def _has_notes(closed: Any, marking: Marking) -> bool:
    return any(marking.scope or s.note is not None for s in sites(closed))


def _check_found(closed: Any, places: Places, marking: Marking, naming: Naming) -> None:
    """Raises if the options select nothing, and says what there would have been."""
    there = {"/".join(path) or ".": type(x) for path, x in places.modules}
    there.update(naming.seen)
    fits = {
        path: cls
        for path, cls in there.items()
        if marking.classes is None or issubclass(cls, marking.classes)
    }
    for method in marking.methods if fits else ():
        if not any(has_method(cls, method) for cls in fits.values()):
            raise _no_method(method, fits, marking)
    if naming.captured:
        return
    hidden = next((s.note for s in sites(closed) if s.waiting and s.note), None)
    if hidden is not None and not naming.seen:
        raise UnsupportedPrimitiveError(
            f"`capture={marking.capture!r}` selects calls such as {hidden.call!r}, but "
            "all are inside a primitive such as `lineax.linear_solve`, which "
            "evaluates its function over and over, so that values in there cannot be "
            "captured. Call the module once outside, too."
        )
    what = "The modules that are called" if naming.seen else "The modules in sight"
    raise UnknownSowError(
        f"`capture={marking.capture!r}` selects nothing that is called in the program. "
        f"{what} are: {_listed(naming.seen or there)}. Is another model called? If a "
        "`save_intermediates` inside has captured it, give one of the two another "
        "`tag`."
    )


def _no_method(method: str, fits: dict[str, type], marking: Marking) -> UnknownSowError:
    option = f"`capture={marking.capture!r}, methods={marking.methods!r}`"
    of_modules = {
        path: [m for m in own_methods(cls) if m != "__call__"]
        for path, cls in fits.items()
    }
    for path, methods in of_modules.items():
        close = difflib.get_close_matches(method, methods, 1)
        hint = f"Did you mean {close[0]!r}?" if close else ""
        if methods and len(fits) == 1 and not close:
            hint = f"It has {methods[0]!r}: write `methods={methods[0]!r}`."
        if hint:
            return UnknownSowError(
                f"{option}: {path} ({fits[path].__name__}) has no method {method!r}. "
                f"{hint}"
            )
    listed = ", ".join(
        f"{path} ({fits[path].__name__}: {', '.join(methods) or 'none'})"
        for path, methods in of_modules.items()
    )
    return UnknownSowError(
        f"{option}: no selected module has a method {method!r}. The methods that they "
        f"have are: {listed}."
    )


def _listed(classes: dict[str, type]) -> str:
    items = [f"{path} ({cls.__name__})" for path, cls in classes.items()]
    return ", ".join(items) or "none at all"
