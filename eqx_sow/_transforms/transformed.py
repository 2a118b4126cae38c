"""What `save_intermediates`, `plant` and `tap` return."""

import dataclasses as dc
import difflib
import functools as ft
import inspect
import types
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import (
    Any,
    cast,
    ClassVar,
    Concatenate,
    overload,
    ParamSpec,
    Protocol,
    TypeVar,
)

import equinox as eqx
import jax

from .. import _compat
from .._arrays import in_mesh_of
from .._frames import api_boundary
from .._handlers.numpy_arrays import NotFixed
from .._mark.static import Const, Form, is_operand, take_apart
from .options import checked, Options
from .program import Program
from .trace import trace


_F = TypeVar("_F", bound=Callable)
_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_T_co = TypeVar("_T_co", covariant=True)


class _partial:
    """Decorates a method of a module that holds what JAX transformed. Of a plain
    method, Equinox makes a module that holds `self`, and warns of what is in there."""

    def __init__(self, fn: Callable):
        self.fn = fn

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self.fn if instance is None else eqx.Partial(self.fn, instance)


class Transformed(eqx.Module):
    """A function around `_fn`: a PyTree with the arrays of `_fn`, that can be a
    method."""

    # What it is a call of, for messages.
    _call: ClassVar[str]
    _fn: Callable
    _options: Options = eqx.field(static=True, repr=False)
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
        jitted = _jitted_in(self._fn)
        if jitted is None or not _compat.is_eager():
            return _run(self, args, kwargs)
        # `S(jit(f))` is `jit(S(f))`: so it is traced and compiled when `jit(f)` would
        # be.
        arrays, form = take_apart((self, args, kwargs))
        try:
            arrays, form = _compiled_of(jitted, form)(*arrays)
        except NotFixed:
            return _run(self, args, kwargs)
        return form.with_arrays(arrays)

    @_partial
    @api_boundary
    def eval_shape(self, /, *args, **kwargs):
        """What a call would return, with a `jax.ShapeDtypeStruct` for each array.
        Nothing is computed, compiled or sent to a callback. The arguments are those of
        a call, or `jax.ShapeDtypeStruct`s in place of arrays."""
        return eqx.filter_eval_shape(self, *args, **kwargs)

    @_partial
    @api_boundary
    def lower(self, /, *args, **kwargs):
        """The lowered program of a call, if the function is jitted, as from
        `jax.jit(...).lower`: `.as_text()` prints it, and `.compile()(...)` runs it. The
        arguments are as for `eval_shape`."""
        return self.trace(*args, **kwargs).lower()

    @_partial
    @api_boundary
    def trace(self, /, *args, **kwargs):
        """The traced program of a call, if the function is jitted, as from
        `jax.jit(...).trace`: `.jaxpr` is the program. The arguments are as for
        `eval_shape`."""
        jitted = _jitted_in(self._fn)
        if jitted is None:
            call = f"{self._call}(fn, ...)"
            raise TypeError(
                f"`{call}`: `lower` and `trace` are there if `fn` is jitted. Write "
                f"`{self._call}(eqx.filter_jit(fn), ...)`, or `jax.jit({call})`."
            )
        arrays, form = take_apart((self, args, kwargs), _is_array_or_shape)
        return Stage(_compiled_of(jitted, form).trace(*arrays), self, form)

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


class Function(Protocol[_P, _T_co]):
    """What type checkers know of a `Transformed`: it has the parameters of `fn`, which
    can be a method."""

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _T_co: ...

    # What stands for an array has the type of one.
    def eval_shape(self, *args: Any, **kwargs: Any) -> _T_co: ...

    def lower(self, *args: Any, **kwargs: Any) -> Stage: ...

    def trace(self, *args: Any, **kwargs: Any) -> Stage: ...

    @overload
    def __get__(self, instance: None, owner: Any) -> "Function[_P, _T_co]": ...

    @overload
    def __get__(
        self: "Function[Concatenate[Any, _Q], _T_co]",
        instance: object,
        owner: Any,
    ) -> "Function[_Q, _T_co]": ...


def _run(self, args, kwargs, compiled=False):
    # A program is traced, and a loop in it is to be seen as one. So `jax.disable_jit`
    # has nothing to show in here.
    with jax.disable_jit(False), _compat.public_nan_errors():
        if _compat.is_untested():
            # It uses `save_intermediates`, which uses this.
            from .canaries import check

            check()
        program = trace(self._fn, args, kwargs, self._options)
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
            unknown = [key for key in kwargs if key not in known]
            said = ""
            for key in unknown:
                if key == "names" and "values" in known:
                    text = "The keys of `values` select: `plant(fn, {'h': value})`."
                    raise TypeError(f"`{name}`: {e}. {text}") from None
                if close := difflib.get_close_matches(key, known, n=1):
                    text = f"`{name}`: {e}. Did you mean `{close[0]}`?"
                    raise TypeError(text) from None
                options = [k for k, p in known.items() if p.kind is p.KEYWORD_ONLY]
                said = f" The options are: {', '.join(f'`{k}`' for k in options)}."
            given = "fn, values" if "values" in known else "fn"
            raise TypeError(
                f"`{name}`: {e}.{said} The arguments of the function go to what "
                f"`{name}` returns: write `{name}({given})(x)`."
            ) from None
        return call(*args, **kwargs)

    return cast(_F, checked_call)


def wrap(cls: type[Transformed], fn: Any, given: Mapping[str, Any]) -> Any:
    """`fn`, transformed as the options say that were `given`."""
    static, others = checked(cls._call, fn, given)
    with warnings.catch_warnings():
        # Equinox warns of functions that JAX transformed, as attributes.
        warnings.simplefilter("ignore")
        transformed = cls(_fn=_unbound(fn), _options=static, _others=others)
        return eqx.module_update_wrapper(transformed)


def _jitted_in(fn: Any) -> Any:
    """The function made by `jax.jit` or `eqx.filter_jit` that `fn` is, if it is one."""
    if isinstance(fn, eqx.Partial):
        return _jitted_in(fn.func)
    return fn if isinstance(fn, _compat.Jitted) else None


# --- what was compiled for a jitted function ---
class _Ref(weakref.ref):
    """Stands for a function made by `jax.jit` in a static leaf."""


def _to_ref(x: Any) -> Any:
    return _Ref(x) if isinstance(x, _compat.Jitted) else x


def _from_ref(x: Any) -> Any:
    return _compat.without_compiler_options(x()) if isinstance(x, _Ref) else x


def _map_static(fn: Callable[[Any], Any], form: Form) -> Form:
    leaves = (Const(fn(x.value)) if type(x) is Const else x for x in form.leaves)
    return form._replace(leaves=tuple(leaves))


def _new_compiled(at_most: int) -> Callable[[Form, Any], Callable]:
    # A user may write the options anew in each call, and with a function that is made
    # anew each time, every program is another one. So there is a bound.
    @ft.lru_cache(maxsize=at_most)
    def compiled(form, options):
        @ft.partial(jax.jit, compiler_options=dict(options) or None)
        def run(*arrays):
            self, args, kwargs = _map_static(_from_ref, form).with_arrays(arrays)
            return take_apart(_run(self, args, kwargs, compiled=True))

        return run

    return compiled


# For each function made by `jax.jit`, for as long as that is there. Nothing in here
# holds on to it: then it is freed when its owner lets go, as are all the arrays that it
# closes over. Equinox itself keeps what `eqx.filter_jit` is given, so here is what was
# compiled for all such functions.
_compiled: weakref.WeakKeyDictionary[Any, Callable] = weakref.WeakKeyDictionary()
_compiled_of_equinox = _new_compiled(512)


def _compiled_of(jitted: Any, form: Form) -> Any:
    """What was compiled for this function and `Form`: a jitted function of arrays."""
    if isinstance(jitted, eqx.Module):
        compiled = _compiled_of_equinox
    else:
        if jitted not in _compiled:
            _compiled.setdefault(jitted, _new_compiled(64))
        compiled = _compiled[jitted]
    # The compiler options of `jit(f)`, which no program around it can have.
    options = tuple(_compat.compiler_options(jitted).items())
    return compiled(_map_static(_to_ref, form), options)
