"""From a call of a function to a `Program`: its jaxpr, and the marks in there with
their names."""

import contextlib
import dataclasses as dc
import inspect
from collections.abc import Callable
from typing import Any

import jax

from .. import _compat, _hijax
from .._errors import SowError
from .._mark.listening import Listening, listening
from .._mark.noting import listening_as, within
from .._mark.primitive import widened
from .._mark.sow import UnnamedSowError
from .._mark.static import numbers_known, take_apart
from .._mark.trees import walk
from .._modules import capture as _capture
from .._modules.places import reachable, roots
from .._walk.jax_rules import check_wrapped
from .._walk.sows import sows
from .options import Options
from .program import Program


def trace(
    fn: Callable,
    args: tuple,
    kwargs: dict,
    options: Options,
    replaced: frozenset[Any] = frozenset(),
) -> Program:
    """Traces `fn(*args, **kwargs)` while `sow` marks. Arrays are traced, all else is
    static, as in `eqx.filter_jit`. `replaced`: see `Listening`."""
    _compat.check_supported()
    _hijax.check_supported()
    check_wrapped()
    try:
        return _trace(fn, args, kwargs, options, replaced)
    except UnnamedSowError:
        if options.search:
            raise
        options = dc.replace(options, search=True)
        return _trace(fn, args, kwargs, options, replaced)
    except _NOT_CONCRETE as e:
        if _TRACED not in getattr(e, "__notes__", ()):
            e.add_note(_TRACED)
        raise


_NOT_CONCRETE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
# What JAX, Equinox, and most derivative rules raise for what cannot be differentiated.
_NOT_DIFFERENTIABLE = ValueError, NotImplementedError, RuntimeError, TypeError
_TRACED = (
    "eqx_sow traces the function that it is given, as `jax.jit` does. Where the value "
    "of an array decides, write `jnp.where` or `jax.lax.cond`."
)


_TOP_LEVEL = (
    "eqx_sow traces the function that it is given, as `jax.jit` does. Give the options "
    "to the outermost `jax.jit`, and that to eqx_sow: `save_intermediates(jax.jit(fn, "
    "compiler_options=...))`."
)


def _or_leafwise(closed_jaxpr: Callable[[bool], Any], leafwise: bool) -> Any:
    """If a leaf of a value is differentiated, so are all. Perhaps another one comes
    from a `while_loop`, which cannot be, and would not be without the sow. Then there
    is a second try. What is raised may be an error of JAX's, or of a derivative rule of
    the user's. If there was no such leaf, it is raised in the first try: the program of
    the user runs once."""
    try:
        return closed_jaxpr(leafwise)
    except (SowError, RecursionError):
        raise
    except _NOT_DIFFERENTIABLE as e:
        if "`compiler_options` can only" in str(e):
            e.add_note(_TOP_LEVEL)
        if widened.here:
            with contextlib.suppress(Exception):
                return closed_jaxpr(True)
        raise


def _trace(
    fn: Callable,
    args: tuple,
    kwargs: dict,
    options: Options,
    replaced: frozenset[Any],
) -> Program:
    inputs, form = take_apart((fn, args, kwargs))
    concrete = inputs
    out: Any = None

    def traced(inputs):
        nonlocal out
        fn, args, kwargs = called = form.with_arrays(inputs)
        with (
            numbers_known(inputs, concrete),
            within(depth, lambda: reachable(roots(*called))),
            within(depth, lambda: walk(roots(*called))),
        ):
            outs, out = take_apart(fn(*args, **kwargs))
        return outs

    # JAX names the traced function in its error messages.
    called = inspect.unwrap(fn)
    traced.__wrapped__ = called if inspect.isroutine(called) else type(called).__call__
    traced.__signature__ = inspect.Signature()
    outer = listening.value or Listening()
    depth = outer.depth + 1

    # Nothing must be executed in here: in this context, JAX would compile it once more.
    def closed_jaxpr(leafwise):
        new = Listening(
            captures=outer.captures,
            depth=depth,
            leafwise=leafwise,
            replaced=outer.replaced | replaced,
        )
        with listening_as(options.noted(new)):
            closed = jax.make_jaxpr(traced)(inputs)
            return closed, list(sows(closed))

    with widened.apart():
        closed, found = _or_leafwise(closed_jaxpr, outer.leafwise)
    called = fn, args, kwargs
    named, model_roots = _capture.named(closed, found, called, depth, options)
    marks = [x._replace(site=x.site.visible_to(depth, options.tag)) for x in named]

    def again(more):
        return trace(fn, args, kwargs, options, replaced | more)

    program = Program(closed, marks, inputs, out, model_roots, options, again, replaced)
    if options.names is None:
        return program
    return dc.replace(program, asks=program.select(options.names))
