"""What `save_intermediates`, `plant` and `tap` return."""

import difflib
import functools as ft
import inspect
import types
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, cast, ClassVar, TypeVar

import equinox as eqx
import jax

from .. import _compat
from .._arrays import in_mesh_of
from .._frames import api_boundary
from .._mark.static import Const, Form, is_operand, take_apart
from .options import checked
from .program import Program, trace


_F = TypeVar("_F", bound=Callable)


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
        arrays, form = _jitted(form, *arrays)
        return form.with_arrays(arrays)

    @api_boundary
    def eval_shape(self, /, *args, **kwargs):
        """What a call would return, with a `jax.ShapeDtypeStruct` for each array.
        Nothing is computed, compiled or sent to a callback. The arguments are those of
        a call, or `jax.ShapeDtypeStruct`s in place of arrays."""
        return eqx.filter_eval_shape(self, *args, **kwargs)

    @api_boundary
    def lower(self, /, *args, **kwargs):
        """The lowered program of a call, if the function is jitted, as from
        `jax.jit(...).lower`: `.as_text()` prints it, and `.compile()(...)` runs it. The
        arguments are as for `eval_shape`."""
        return self.trace(*args, **kwargs).lower()

    @api_boundary
    def trace(self, /, *args, **kwargs):
        """The same, before it is lowered: `.jaxpr` is the program."""
        if not _is_jitted(self._fn):
            call = f"{self._call}(fn, ...)"
            raise TypeError(
                f"`{call}`: `lower` and `trace` are there if `fn` is jitted. Write "
                f"`{self._call}(eqx.filter_jit(fn), ...)`, or `jax.jit({call})`."
            )
        arrays, form = take_apart((self, args, kwargs), _is_array_or_shape)
        return Stage(_jitted.trace(form, *arrays), self, form)

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
        method: Any = _Method
        return self if instance is None else method(self, instance)


class _Method(eqx.Partial):
    """A `Transformed` that is a method of a module, bound to one."""

    # What it holds is of that class, which a type checker does not know.
    def eval_shape(self, /, *args, **kwargs):
        fn: Any = self.func
        return fn.eval_shape(*self.args, *args, **kwargs)

    def lower(self, /, *args, **kwargs):
        return self.trace(*args, **kwargs).lower()

    def trace(self, /, *args, **kwargs):
        fn: Any = self.func
        return fn.trace(*self.args, *args, **kwargs).bound_to(*self.args)


def _is_array_or_shape(x: Any) -> bool:
    return is_operand(x) or isinstance(x, jax.ShapeDtypeStruct)


class Stage:
    """One of `jax.stages`: a program that was traced, lowered or compiled for certain
    arguments. It is called with arguments like these."""

    def __init__(self, stage: Any, fn: Any, form: Form, bound: tuple = ()):
        self._stage, self._fn, self._form, self._bound = stage, fn, form, bound

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def _next(self, stage: Any) -> "Stage":
        return Stage(stage, self._fn, self._form, self._bound)

    def bound_to(self, *args: Any) -> "Stage":
        return Stage(self._stage, self._fn, self._form, args)

    def lower(self, **options: Any) -> "Stage":
        return self._next(self._stage.lower(**options))

    def compile(self, *args: Any, **options: Any) -> "Stage":
        return self._next(self._stage.compile(*args, **options))

    @api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arrays, form = take_apart((self._fn, (*self._bound, *args), kwargs))
        if form != self._form:
            raise TypeError(
                "This program was compiled for arguments of another structure, or with "
                "other values of those that are not arrays. Lower it again."
            )
        arrays, form = self._stage(*arrays)
        return form.with_arrays(arrays)


def _run(self, args, kwargs):
    # A program is traced, and a loop in it is to be seen as one. So `jax.disable_jit`
    # has nothing to show in here.
    with jax.disable_jit(False), _compat.public_nan_errors():
        program = trace(self._fn, args, kwargs, self._options.value)
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


def of_function(call: _F) -> _F:
    """For the public functions: says what to write if somebody passes the arguments of
    `fn` along with it, as in `save_intermediates(model, x)`."""
    signature = inspect.signature(call)

    @ft.wraps(call)
    def checked_call(*args, **kwargs):
        try:
            signature.bind(*args, **kwargs)
        except TypeError as e:
            name, known = call.__name__, signature.parameters
            for key in kwargs.keys() - known:
                if close := difflib.get_close_matches(key, known, n=1):
                    text = f"`{name}`: {e}. Did you mean `{close[0]}`?"
                    raise TypeError(text) from None
            given = "fn, values" if "values" in known else "fn"
            raise TypeError(
                f"`{name}`: {e}. The arguments of the function go to what `{name}` "
                f"returns: write `{name}({given})(x)`."
            ) from None
        return call(*args, **kwargs)

    return cast(_F, checked_call)


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
    return take_apart(_run(self, args, kwargs))


def _is_jitted(fn: Any) -> bool:
    if isinstance(fn, eqx.Partial):
        return _is_jitted(fn.func)
    return isinstance(fn, _compat.Jitted)
