"""What `save_intermediates`, `plant` and `tap` return."""

import dataclasses as dc
import functools as ft
import types
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax

from .. import _compat
from .._arrays import in_mesh_of
from .._frames import api_boundary
from .._handlers.fixed import NotFixed
from .._mark.static import Const, take_apart
from .options import checked
from .program import Program, trace


class Transformed(eqx.Module):
    """A function around `_fn`: a PyTree with the arrays of `_fn`, that can be a
    method."""

    # What it is a call of, for messages.
    _call: ClassVar[str]
    _fn: Callable
    # Holds the `Options`.
    _options: Const = eqx.field(static=True, repr=False)
    # Those options that may hold arrays.
    _others: dict[str, Any]

    @property
    def __wrapped__(self):
        return self._fn

    @abstractmethod
    def _result(self, program: Program) -> Any:
        """What a call returns, once the function has been traced."""

    @api_boundary
    def __call__(self, /, *args, **kwargs):
        if not (_is_jitted(self._fn) and _compat.is_eager()):
            return _run(self, args, kwargs)
        # `S(jit(f))` is `jit(S(f))`: so it is traced and compiled when `jit(f)` would
        # be.
        arrays, form = take_apart((self, args, kwargs))
        try:
            arrays, form = _jitted(form, *arrays)
        except NotFixed:
            return _run(self, args, kwargs)
        return form.with_arrays(arrays)

    def __hash__(self):
        # `jax.jit` takes only what is hashable, and dicts are not.
        try:
            return super().__hash__()
        except TypeError:
            return id(self)

    def __eq__(self, other):
        # A cache of JAX compares a jitted function with itself while another program is
        # traced. Then the comparison of arrays would be traced, too.
        return True if self is other else super().__eq__(other)

    def __get__(self, instance, owner):
        del owner
        return self if instance is None else eqx.Partial(self, instance)


def _run(self, args, kwargs, compiled=False):
    # A program is traced, and a loop in it is to be seen as one. So `jax.disable_jit`
    # has nothing to show in here.
    with jax.disable_jit(False), _compat.public_nan_errors():
        program = trace(self._fn, args, kwargs, self._options.value)
        program = dc.replace(program, compiled=compiled)
        # Where new arrays are made, they can be put beside the inputs. Not
        # `self._result`: for a method, Equinox makes a module that holds `self`, and
        # warns if JAX transformed what is in there.
        with in_mesh_of(program.inputs):
            return type(self)._result(self, program)


# Python keeps frames in chunks of 16 kB, and where a call does not fit into the last
# one, it asks the system for memory, each time. Tracing nests deep enough for that to
# be up to a third of its time. A frame that is too large gets a chunk with room for
# more.
_run.__code__ = _run.__code__.replace(co_stacksize=2**15)


def _unbound(fn: Any) -> Any:
    """A method that Python bound to a module, as a PyTree that holds the module."""
    module = getattr(fn, "__self__", None)
    if not (isinstance(fn, types.MethodType) and isinstance(module, eqx.Module)):
        return fn
    # That of `super().__call__` is another one.
    is_own = fn.__func__ is type(module).__call__
    return module if is_own else eqx.Partial(fn.__func__, module)


def wrap(cls: type[Transformed], fn: Any, given: Mapping[str, Any]) -> Any:
    """`fn`, transformed as the options say that were `given`."""
    static, others = checked(cls._call, fn, given)
    with warnings.catch_warnings():
        # Equinox warns of functions that JAX transformed, as attributes.
        warnings.simplefilter("ignore")
        transformed = cls(_fn=_unbound(fn), _options=Const(static), _others=others)
        return eqx.module_update_wrapper(transformed)


@ft.partial(jax.jit, static_argnums=0)
def _jitted(form, *arrays):
    self, args, kwargs = form.with_arrays(arrays)
    return take_apart(_run(self, args, kwargs, compiled=True))


def _is_jitted(fn: Any) -> bool:
    if isinstance(fn, eqx.Partial):
        return _is_jitted(fn.func)
    return isinstance(fn, _compat.Jitted)
