"""`save_intermediates`."""

import dataclasses as dc
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu

from . import _compat, _spec
from ._collect import assemble, Collect, reductions
from ._interpreter import evaluate, Given
from ._reduce import Append, Reducer
from ._select import check_known
from ._sow import Const, listening


class _Hashable(eqx.Module):
    """Options, as a static field."""


@dc.dataclass(frozen=True)
class Options:
    tag: Hashable
    names: Any
    modes: tuple[str, ...] | None
    spec: Any


class _SaveIntermediates(eqx.Module):
    _fn: Callable
    _reduce: Any
    _transform: Any
    _options: Const = eqx.field(static=True)

    @property
    def __wrapped__(self):
        return self._fn

    def __call__(self, /, *args, **kwargs):
        options: Options = self._options.value
        outer = listening.value is not None
        program = trace(self._fn, args, kwargs)
        collect = Collect(
            tag=options.tag,
            names=Const(options.names),
            modes=options.modes,
            reduce=Const(self._reduce),
            transform=Const(self._transform),
            outer=outer,
        )
        carry: Any = ()
        if any(map(_has_state, _values(self._reduce))):
            survey = dc.replace(collect, survey=True)
            shape = jax.eval_shape(lambda *xs: program.evaluate(survey, Given(), xs)[1], *program.leaves)
            carry = reductions(collect, shape)
        outs, taken = program.evaluate(collect, Given(carry), program.leaves)
        intermediates = assemble(collect, taken)
        self._check(options, taken.rest.seen)
        _spec.check(taken.rest.checks, options.spec, intermediates)
        return program.output(outs), intermediates

    def _check(self, options, seen):
        call = "save_intermediates(..., {}=...)".format
        check_known(call("names"), options.names, seen)
        for name, option in (
            ("reduce", self._reduce),
            ("transform", self._transform),
            ("spec", options.spec),
        ):
            if isinstance(option, Mapping):
                check_known(call(name), option, seen)

    def __get__(self, instance, owner):
        if instance is None:
            return self
        return eqx.Partial(self, instance)


def _values(option):
    return list(option.values()) if isinstance(option, Mapping) else [option]


def _has_state(reducer):
    return isinstance(reducer, Reducer) and not isinstance(reducer, Append)


@dc.dataclass(frozen=True)
class Program:
    """A function, traced with its sows."""

    closed: Any
    leaves: list[Any]
    out_treedef: Any
    out_static: list[Any]

    def evaluate(self, handler, given, leaves):
        jaxpr, consts = _compat.open_jaxpr(self.closed)
        return evaluate(jaxpr, consts, handler, given, leaves)

    def output(self, outs):
        outs = iter(outs)
        leaves = [next(outs) if d else x.value for d, x in self.out_static]
        return jtu.tree_unflatten(self.out_treedef, leaves)


def trace(fn: Callable, args: tuple, kwargs: dict) -> Program:
    """Traces `fn(*args, **kwargs)` while everybody listens. Arrays are traced, all else
    is static, as in `eqx.filter_jit`."""
    dynamic, static = eqx.partition((fn, args, kwargs), eqx.is_array)
    leaves, treedef = jtu.tree_flatten(dynamic)
    out_treedef, out_static = None, []

    def traced(*leaves):
        nonlocal out_treedef
        dynamic = jtu.tree_unflatten(treedef, leaves)
        fn, args, kwargs = eqx.combine(dynamic, static)
        out, out_treedef = jtu.tree_flatten(fn(*args, **kwargs))
        is_array = [isinstance(x, jax.Array) for x in out]
        out_static[:] = [(d, Const(None if d else x)) for x, d in zip(out, is_array)]
        return [x for x, d in zip(out, is_array) if d]

    with listening(0):
        closed = jax.make_jaxpr(traced)(*leaves)
    return Program(closed, leaves, out_treedef, out_static)


_MODES = ("primal", "tangent", "cotangent")


def save_intermediates(
    fn: Callable = None,
    *,
    tag: Hashable = "intermediates",
    names: Any = None,
    modes: str | Sequence[str] | None = None,
    reduce: Any = None,
    transform: Any = None,
    spec: Mapping[str, Any] | None = None,
) -> Callable:
    if fn is None:
        def decorate(fn): 
            return save_intermediates(fn, tag=tag, names=names, modes=modes, reduce=reduce, transform=transform, spec=spec)
        return decorate
    modes = (modes,) if isinstance(modes, str) else None if modes is None else tuple(modes)
    for m in modes or ():
        if not m or any(part not in _MODES for part in m.split(".")):
            raise ValueError(f"`save_intermediates(..., modes=...)`: {m!r}")
    if not isinstance(names, str) and isinstance(names, Sequence):
        names = tuple(names)
    return eqx.module_update_wrapper(
        _SaveIntermediates(fn, reduce, transform, Const(Options(tag, names, modes, spec)))
    )
