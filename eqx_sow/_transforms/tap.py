"""`tap`."""

import dataclasses as dc
import functools as ft
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, overload, ParamSpec, TypeVar, Unpack

import equinox as eqx
import jax
import jax.core
import jax.extend.core as jexc
from jax.interpreters import batching

from .. import _compat
from .._frames import api_boundary
from .._mark.listening import Listening, listening
from .._mark.static import Const, Same, SameParts
from .._names import check_known, matches
from .._walk.handler import Given
from .._walk.repeats import repeats
from . import options as opt
from .checks import hints, wanted
from .events import failures, TapEvent
from .options import Options, Tapping
from .program import Program
from .replay import Inside
from .tapping import check_order, Place, places_in, Tap
from .transformed import Transformed, wrap


# What a vmap does to a tapped program: it goes inside. The rule is all there is to it.
over_lanes_p = jexc.Primitive("tap_over_lanes")
over_lanes_p.multiple_results = True


batching.fancy_primitive_batchers[over_lanes_p] = lambda *args, run: run.value(*args)


class _Tapped(Transformed):
    _fn: Callable
    # These may hold arrays.
    _transform: Any
    _when: Any
    _options: Const = eqx.field(static=True)

    def _result(self, program: Program) -> Any:
        return program.output(_evaluate(self, program))

    @api_boundary
    def __call__(self, /, *args, **kwargs):
        try:
            return super().__call__(*args, **kwargs)
        except jax.errors.JaxRuntimeError as e:
            for failure in list(failures):
                if str(failure) in str(e):
                    failures.remove(failure)
                    raise failure from failure.__cause__
            raise


def _evaluate(self: _Tapped, program: Program) -> list[Any]:
    jaxpr, consts = _compat.open_jaxpr(program.closed)
    operands = [*consts, *program.inputs]
    if not _compat.has_lanes(operands):
        return _walk(self, program)

    def over_lanes(axis_data, operands, dims):
        dims_out: list[int | None] = []

        def batched(*operands):
            same: list[Any] = []

            def lane(*operands):
                outs = _compat.splice(
                    jaxpr, operands[: len(consts)], operands[len(consts) :]
                )
                dims_out[:] = [0 if _compat.has_lanes([x]) else None for x in outs]
                same[:] = outs
                return [x for x, d in zip(outs, dims_out) if d is not None]

            outs = iter(
                jax.vmap(
                    lane,
                    in_axes=tuple(dims),
                    axis_size=axis_data.size,
                    axis_name=axis_data.name,
                    spmd_axis_name=axis_data.spmd_name,
                )(*operands)
            )
            return [x if d is None else next(outs) for x, d in zip(same, dims_out)]

        with listening(Listening()):
            closed = jax.make_jaxpr(batched)(*operands)
        inside = dc.replace(program, closed=closed, inputs=operands)
        return _evaluate(self, inside), dims_out

    return over_lanes_p.bind(*operands, run=Same(over_lanes))


def _walk(self: _Tapped, program: Program) -> list[Any]:
    options: Options = self._options.value
    names, tag, closed = options.names, options.tag, program.closed
    nowhere: Any = None
    everything = [p for p in places_in(closed, Place(nowhere)) if p.site.tag == tag]
    known = dict.fromkeys(p.site.name for p in everything)
    check_known("tap(..., names=...)", names, known, hint=hints(program))
    program.check_called(known)
    if isinstance(self._transform, Mapping):
        check_known("tap(..., transform=...)", self._transform, known)
    places = [p for p in everything if names is None or matches(names, p.site.name)]
    chosen = wanted("tap", program, options, {p.site.key for p in places})
    places = [p for p in places if p.site.key in chosen]
    check_order(closed, places)
    counts = {p.slot: p.start() for p in places}
    handler = Tap(
        options=self._options,
        chosen=tuple(chosen.items()),
        elsewhere=frozenset(p.site.name for p in places if not p.solver),
        inside=Inside(
            repeats=repeats(closed, lambda site: site.tag == tag),
            ran=frozenset(
                (p.site.key, (*p.calls, p.site.origin))
                for p in places
                if not p.replayed
            ),
        ),
        slots=tuple(counts),
        transform=SameParts(self._transform),
        when=SameParts(self._when),
        has_outer=listening.value is not None,
        devices=jax.sharding.get_abstract_mesh().manual_axes,
    )
    carry = {str(i): count for i, count in enumerate(counts.values())}
    outs, _ = program.evaluate(handler, Given(carry))
    return outs


_P = ParamSpec("_P")
_T = TypeVar("_T")


@overload
def tap(
    fn: Callable[_P, _T],
    callback: Callable[[TapEvent], Any] | None = ...,
    **options: Unpack[Tapping],
) -> Callable[_P, _T]: ...


@overload
def tap(
    *,
    callback: Callable[[TapEvent], Any] | None = ...,
    **options: Unpack[Tapping],
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]: ...


@api_boundary
def tap(
    fn: Any = ...,
    callback: Callable[[TapEvent], Any] | None = None,
    *,
    tag: Hashable = "intermediates",
    names: str | Sequence[str] | Callable[[str], bool] | None = None,
    modes: str | Sequence[str] | None = None,
    capture: bool | type | tuple[type, ...] | Callable[[str, Any], bool] | None = None,
    methods: str | Sequence[str] = ("__call__",),
    inputs: bool = False,
    scope: bool = False,
    transform: Callable | Mapping[str, Callable] | None = None,
    when: Callable[[Any], Any] | None = None,
    every: int = 1,
    ordered: bool = False,
) -> Callable:
    """Shows what is sown in a function while it runs.

    The law: `tap(fn)` computes what `fn` does, and so do its gradients. The events of
    one name and mode, sorted by `count`, are what `save_intermediates(fn)` stacks.

    **Arguments:**

    - `fn`: a function, a model, or a transformed function such as
        `eqx.filter_grad(loss)` or `eqx.filter_jit(model)`. Without it this returns a
        decorator.
    - `callback`: a function of an [`eqx_sow.TapEvent`][], called on the host each time
        that a selected sow runs, while the program goes on. Without one, each event is
        printed as one line: name, mode, count, shape, and the statistics of
        [`eqx_sow.tabulate`][].
    - `tag`, `names`, `modes`, `capture`, `methods`, `inputs`, `scope`: as in
        [`eqx_sow.save_intermediates`][]. Cotangents arrive while the backward pass
        runs, backward in time.
    - `transform`: a function of the value, or a dict of names or globs to functions,
        that is applied on the device where the value is sown: only its result goes to
        the host. What it sows is not seen: it is not part of `fn`, and nor is `when`.
    - `when`: a function of the value as it is sown, before `transform`, that returns a
        single boolean. It is evaluated on the device; where it is false, nothing goes
        to the host. Under `vmap` it sees one lane, and the value of all lanes is sent
        if it is true for any.
    - `every`: only each `every`-th execution of a name and mode, beginning with the
        first. Nothing of the others goes to the host, nor is `when` evaluated.
    - `ordered`: events come in the order of the program, also those of different names,
        as with `jax.debug.callback(..., ordered=True)`, and with the limits that JAX
        has for this, such as programs on a single device. Without it, events may
        overtake each other, also those of one sow, as in `jax.lax.scan(..., unroll=3)`.
        Their `count` is right all the same: sort by it.

    **Returns:**

    A function with the signature and the output of `fn`. A tapped sow is still a sow:
    `save_intermediates(tap(fn))` captures it, and several taps see it. What
    `save_intermediates` inside `fn` takes, `tap` does not see. The modules that
    `capture` selects are marked for this `tap` alone.

    Like `eqx.filter_vmap`, what is returned is a PyTree whose leaves are those of `fn`,
    and it can be used as a decorator of methods.

    All lanes of a `vmap` are one event, whether it is `tap(vmap(fn))` or
    `vmap(tap(fn))`. A sow that a backward pass computes again is not an event; its
    cotangent is one. In a `jax.shard_map` there is an event for each device, and
    `event.device` says which. A `tap` that is called within a branch of a `cond` sees
    all lanes of a later `vmap` over it, as `jax.debug.callback` does: tap the whole
    function instead.

    The callback must be fast, for the program may wait for it, and it must not call
    JAX, which may wait for the program. `jax.effects_barrier()` waits until all
    callbacks have been called.

    An exception in the callback ends the run. What is raised is an
    [`eqx_sow.SowError`][] that names the sow, with that exception as its cause; or,
    where only JAX notices (under a `jax.jit` around the `tap`, or when the result is
    awaited), a `jax.errors.JaxRuntimeError` whose text tells the same. Catch exceptions
    in the callback if watching a run must never end it.

    **Raises:**

    `TypeError` and `ValueError` if an option is not of the kind above. When called,
    [`eqx_sow.UnknownSowError`][] if an option selects nothing,
    [`eqx_sow.UnsupportedPrimitiveError`][] if a value cannot be had where it is sown,
    and [`eqx_sow.SowError`][] if it cannot be told when, or in which lanes, a sow runs.

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
            print(f"{event.name} is {event.value} after {event.count} iterations")

        out = eqx_sow.tap(fn, progress, every=20)(1.0)

        # An alarm for what is not finite, and where it was first:
        not_finite = lambda x: ~jnp.isfinite(x).all()
        out = eqx_sow.tap(jax.grad(fn), when=not_finite)(1.0)
        ```
    """
    options = {k: v for k, v in locals().items() if k != "fn"}
    if fn is ...:
        return ft.partial(tap, **options)
    static, arrays = opt.checked("tap", fn, options)
    return wrap(_Tapped, fn, arrays["transform"], arrays["when"], Const(static))
