"""Notices modules that `capture` selects by class, and that run without a mark: they
are held where the search does not look, and would be missing."""

import contextlib
import functools as ft
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax.core
import jax.tree_util as jtu

from .._errors import SowError
from .._frames import user_line
from .._mark.listening import listening
from .marks import is_part, plain_type


@contextlib.contextmanager
def noticed(methods: Sequence[str]) -> Iterator[None]:
    """The methods of all classes of modules take note, as long as this lasts. They do
    so in this thread alone, where `Listening.selected` is."""
    changed = []
    try:
        for cls in _classes():
            for name in methods:
                plain = vars(cls).get(name)
                if plain is not None and not hasattr(plain, "_eqx_sow_notices"):
                    changed.append((cls, name, plain))
                    setattr(cls, name, _noticing(cls, name, plain))
        yield
    finally:
        for cls, name, plain in changed:
            setattr(cls, name, plain)


def _classes() -> Iterator[type]:
    """All classes of modules, save those of marked ones."""
    found, todo = {eqx.Module}, [eqx.Module]
    while todo:
        new = set(todo.pop().__subclasses__()) - found
        found |= new
        todo += new
        yield from (cls for cls in new if "_unmarked" not in vars(cls))


def _noticing(cls: type, name: str, plain: Any) -> Callable:
    def method(self, /, *args, **kwargs):
        here = listening.value
        if here is not None and _is_missed(self, here.selected):
            raise SowError(
                f"`capture=` selects the class `{cls.__name__}`, and a module of it "
                f"runs at {user_line()} that cannot be seen, so what it "
                "returns would be missing. Pass the model as an argument, "
                "`save_intermediates(fn, capture=...)(model, x)`, or leave this "
                "module out, by a function `capture=lambda path, module: ...`."
            )
        return plain.__get__(self, type(self))(*args, **kwargs)

    ft.update_wrapper(method, plain)
    method._eqx_sow_notices = True
    return method


def _is_missed(module: Any, selected: Any) -> bool:
    # A module made within the function holds tracers, and is not part of a model.
    return (
        isinstance(module, selected)
        and type(module) is plain_type(module)
        and is_part(module)
        and any(
            eqx.is_inexact_array(x) and not isinstance(x, jax.core.Tracer)
            for x in jtu.tree_leaves(module)
        )
    )
