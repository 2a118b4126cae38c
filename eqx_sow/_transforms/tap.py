"""`tap`."""

import dataclasses as dc
import functools as ft
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, ClassVar, overload, ParamSpec, Protocol, TypeVar, Unpack

import equinox as eqx
import jax
import jax.core
import jax.extend.core as jexc
import jax.numpy as jnp
from jax.interpreters import batching

from .. import _compat
from .._frames import api_boundary
from .._handlers.delivery import failures, TapEvent
from .._handlers.tapping import Tap, to_send
from .._mark.listening import Listening, listening
from .._mark.static import SameParts, take_apart
from .._walk.handler import Given
from .._walk.interpreter import consts_as_args
from .._walk.rewrite import with_names
from .._walk.sows import sows
from .options import Tapping
from .program import Program
from .transformed import Function, of_function, Transformed, wrap


# Binds a tapped program that a vmap is around. It exists for its batching rule alone.
over_lanes_p = jexc.Primitive("tap_over_lanes")
over_lanes_p.multiple_results = True
batching.fancy_primitive_batchers[over_lanes_p] = lambda *args, run: run(*args)


class _Tapped(Transformed):
    _call: ClassVar[str] = "tap"

    def _result(self, program: Program) -> Any:
        extra, _ = take_apart(self._others["extra"])
        outs = _evaluate(self, program, extra)
        program.warn_unmarked(self._call, self._fn)
        return program.output(outs)

    @api_boundary
    def __call__(self, /, *args, **kwargs):
        try:
            return super().__call__(*args, **kwargs)
        except jax.errors.JaxRuntimeError as e:
            # The newest first: one that was raised elsewhere may say the same.
            for failure in list(failures)[::-1]:
                if str(failure) in str(e):
                    failures.remove(failure)
                    raise failure from failure.__cause__
            raise


def _evaluate(self: _Tapped, program: Program, extra: list[Any]) -> list[Any]:
    """The outputs of the program. `extra` are the arrays of that option.

    Under a `jax.vmap` around the tap, the program is first batched, so that a mark in
    there sees all lanes, and then walked over, as for a `tap` around the `vmap`.
    """
    _, consts = _compat.open_jaxpr(program.closed)
    inputs = [*consts, *program.inputs]
    if not _compat.has_lanes([*inputs, *extra]):
        return _walk(self, program, extra)
    jaxpr = consts_as_args(with_names(program.closed, program.marks))

    def over_lanes(axis_data, operands, dims):
        n = len(inputs)
        pairs = zip(operands[n:], dims[n:])
        extra = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in pairs]
        dims_out: list[int | None] = []

        def lane(*operands):
            outs = _compat.inline_or_call(jaxpr, operands)
            dims_out[:] = [0 if _compat.has_lanes([x]) else None for x in outs]
            return outs

        batched = ft.partial(
            jax.vmap,
            lane,
            in_axes=tuple(dims[:n]),
            axis_size=axis_data.size,
            axis_name=axis_data.name,
            spmd_axis_name=axis_data.spmd_name,
        )
        with listening(Listening()):
            # Only then is it known which outputs have lanes.
            jax.eval_shape(batched(), *operands[:n])
            over = batched(out_axes=list(dims_out))
            closed = jax.make_jaxpr(over)(*operands[:n])
        marks = list(sows(closed))
        inside = dc.replace(program, closed=closed, marks=marks, inputs=operands[:n])
        return _evaluate(self, inside, extra), dims_out

    return over_lanes_p.bind(*inputs, *extra, run=over_lanes)


def _walk(self: _Tapped, program: Program, extra: list[Any]) -> list[Any]:
    by_name = program.by_name("tap", transform=self._others["transform"])
    _, form = take_apart(self._others["extra"])
    asked = list(filter(program.is_seen, program.asked))
    mode_of = program.wanted("tap", [x.site.key for x in asked])
    when, transform = self._others["when"], by_name["transform"]
    runs, every = program.runs(()), self._options.every
    plan, counts = to_send(asked, runs, mode_of, transform, every)
    handler = Tap(
        options=self._options,
        when=SameParts(when),
        extra=form,
        has_outer=listening.value is not None,
        cacheable=when is None and transform is None,
    )
    outs, _ = program.evaluate(handler, plan, Given(counts, extra))
    return outs


_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Decorator(Protocol):
    def __call__(self, fn: Callable[_P, _T], /) -> Function[_P, _T]: ...


@overload
def tap(
    fn: Callable[_P, _T],
    callback: Callable[[TapEvent], Any] | None = ...,
    **options: Unpack[Tapping],
) -> Function[_P, _T]: ...


@overload
def tap(
    *,
    callback: Callable[[TapEvent], Any] | None = ...,
    **options: Unpack[Tapping],
) -> _Decorator: ...


@api_boundary
@of_function
def tap(
    fn: Any = ...,
    callback: Callable[[TapEvent], Any] | None = None,
    *,
    tag: Hashable = "intermediates",
    names: str | Sequence[str] | Callable[[str], bool] | None = None,
    modes: str | Sequence[str] | None = None,
    capture: bool | type | Collection[type | Callable] | Callable | None = None,
    methods: str | Sequence[str] = ("__call__",),
    inputs: bool = False,
    calls: bool = False,
    scope: bool = False,
    transform: Callable | Mapping[str, Callable] | None = None,
    when: Callable[..., Any] | None = None,
    every: int = 1,
    ordered: bool = False,
    extra: Any = None,
) -> Callable:
    """Sends marked values to a callback while a function runs.

    `tap(fn)` computes what `fn` computes, and has the same gradients. The events of one
    name and mode, sorted by `count`, are what `save_intermediates(fn)` stacks.

    **Arguments:**

    - `fn`: a function, a model, or a transformed function such as
        `eqx.filter_grad(loss)` or `eqx.filter_jit(model)`. If you leave it out, you get
        a decorator.
    - `callback`: a function of an [`eqx_sow.TapEvent`][], called on the host each time
        a selected mark runs, while the program continues. Without one, each event is
        printed as one line: path, mode, count, shape, the statistics of
        [`eqx_sow.tabulate`][], and `extra`.
    - `tag`, `names`, `modes`, `capture`, `methods`, `inputs`, `calls`, `scope`: as in
        [`eqx_sow.save_intermediates`][]. Cotangents arrive while the backward pass
        runs, last iteration first.
    - `transform`: a function of the value, or a dict of names or globs to functions,
        that is applied on the device, so that only its result goes to the host. A `sow`
        inside it, or inside `when`, is ignored: it is not part of `fn`.
    - `when`: a function of the value, before `transform`, that returns a single
        boolean. It is evaluated on the device, and if it is false, nothing is sent. A
        function of two arguments also receives `extra`: `lambda value, extra:
        extra["step"] % 10 == 0` sends every tenth step of a training loop. Under `vmap`
        it receives the value of one lane (one example), and the whole `extra`. If it is
        true for any lane, the values of all are sent.
    - `every`: send only every `every`-th execution of a name and mode, beginning with
        the first; of a stack of layers, every `every`-th of each layer, as in a list.
        For the others, `when` is not evaluated either. Each call counts from the start:
        for every tenth step of a loop written in Python, use `when` and `extra`.
    - `ordered`: events arrive in the order of the program, across all names, with the
        limits of JAX's ordered effects, such as programs on a single device. Otherwise
        events may arrive out of order, even those of one mark: sort them by `count`.
    - `extra`: a PyTree of arrays that every event carries as `event.extra`, such as the
        number of the training step, `{"step": step}`. It may be traced, such as an
        argument of a compiled step. Under `vmap`, it has a leading axis if it is not
        the same for all lanes.

    **Returns:**

    A function with the signature and the output of `fn`. What is tapped is still
    marked: `save_intermediates(tap(fn))` captures it, and several taps can see it. A
    `tap` does not see values already captured by a `save_intermediates` inside `fn`.
    The modules that `capture` selects are marked for this `tap` alone. The function has
    the methods `.eval_shape`, `.lower` and `.trace` of
    [`eqx_sow.save_intermediates`][], and you can decorate methods.

    All lanes of a `vmap` are one event, for `tap(vmap(fn))` and for `vmap(tap(fn))`. A
    value that a backward pass computes again is not an event; its cotangent is one. In
    a `jax.shard_map` there is an event for each device, and `event.device` says which.
    If you `tap` inside a branch of a batched `cond`, you get every lane, including
    those that did not take the branch: tap the whole function instead.

    The callback must be fast, as the program may wait for it, and it must not call JAX,
    which may in turn wait for the program. `jax.effects_barrier()` waits until all
    callbacks have been called.

    An exception in the callback ends the run. You get it as the cause of an
    [`eqx_sow.SowError`][] that names the mark, or, if JAX notices it first (under a
    `jax.jit` around the `tap`, or when you wait for the result), as a
    `jax.errors.JaxRuntimeError` with the same text.

    **Raises:**

    `TypeError` and `ValueError` if an option is not of the kind above. When called,
    [`eqx_sow.UnknownSowError`][] if an option selects nothing,
    [`eqx_sow.UnsupportedPrimitiveError`][] if a value cannot be sent from where it is
    marked, and [`eqx_sow.SowError`][] if eqx_sow cannot tell when, or in which lanes, a
    mark runs.

    You get a warning, once for each line of your code, if nothing in `fn` is marked.

    !!! example

        ```python
        import eqx_sow
        import jax
        import jax.numpy as jnp

        def fn(x):
            def body(i, x):
                return eqx_sow.sow(x / 2, "x")
            return jax.lax.fori_loop(0, 100, body, x)

        def progress(event):
            print(f"{event.path} is {event.value}")  # "x/20 is ..."

        out = eqx_sow.tap(fn, progress, every=20)(1.0)

        # An alarm for what is not finite, and where it was first:
        not_finite = lambda x: ~jnp.isfinite(x).all()
        out = eqx_sow.tap(jax.grad(fn), when=not_finite)(1.0)
        ```
    """
    options = {k: v for k, v in locals().items() if k != "fn"}
    if fn is ...:
        return ft.partial(tap, **options)
    _check_order(fn, callback)
    return wrap(_Tapped, fn, options)


def _check_order(fn: Any, callback: Any) -> None:
    """Raises if the callback stands first, and then what is to be tapped."""
    is_model = lambda x: isinstance(x, eqx.Module | _compat.Jitted)
    if is_model(callback) and not is_model(fn):
        name = getattr(fn, "__name__", "callback")
        what = type(callback).__name__
        if not isinstance(callback, eqx.Module):
            what = "a function made by `jax.jit`"
        raise TypeError(
            f"`tap(fn, callback)` takes a function of an event as its second argument, "
            f"not {what}. First comes what is tapped: write `tap(model, {name})`."
        )
