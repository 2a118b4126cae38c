"""A function, traced so that its sows can be seen."""

import dataclasses as dc
from collections.abc import Callable, Iterable
from typing import Any

import jax

from .. import _compat
from .._errors import SowError
from .._mark.listening import Listening, listening, tracing
from .._mark.sow import UnnamedSowError
from .._mark.static import Const, rebuild, take_apart
from .._modules import find as _capture
from .._modules.find import Marking
from .._modules.marks import Mark
from .._walk.find import recomputed
from .._walk.handler import Given, Handler, Taken
from .._walk.interpreter import evaluate
from .._walk.jax_rules import check_wrapped


@dc.dataclass(frozen=True)
class Program:
    closed: Any
    inputs: list[Any]
    out: tuple[Const, tuple[Any, ...]]
    marks: set[Mark]
    marking: Marking

    def evaluate(self, handler: Handler, given: Given, *inputs) -> tuple[list, Taken]:
        jaxpr, consts = _compat.open_jaxpr(self.closed)
        return evaluate(jaxpr, consts, handler, given, inputs)

    def survey(self, handler: Handler) -> Any:
        """`Taken.values`, as shapes."""

        def run(*inputs):
            return self.evaluate(handler, Given(), *inputs)[1].values

        return jax.eval_shape(run, *self.inputs)

    def output(self, outs: list[Any]) -> Any:
        treedef, leaves = self.out
        return rebuild(treedef, leaves, outs)

    def check_recomputed(self, keys: Iterable[Any], tag: Any, remedy: str) -> None:
        """Raises if a `jax.checkpoint` goes around any of these `Site.key`s."""
        keys = list(keys)
        for site in recomputed(self.closed) if keys else ():
            # A derivative from before the recomputation was there is complete.
            if site.tag == tag and any(
                name == site.name and all(n >= site.differentiated for n in orders[:1])
                for name, _, orders in keys
            ):
                raise SowError(
                    f"`sow(..., {site.name!r})` at {site.where} is in a "
                    "`jax.checkpoint` that was differentiated: the backward pass "
                    f"computes the value once more, past the sow. {remedy}"
                )

    def check_called(self, names: Iterable[str]) -> None:
        """Raises if of the modules that are captured none is called."""
        _capture.check_called(self.marks, self.marking, names)

    def unmark(self, tree: Any) -> Any:
        return _capture.unmark(tree, self.marks)


def trace(fn: Callable, args: tuple, kwargs: dict, marking: Marking) -> Program:
    """Traces `fn(*args, **kwargs)` while everybody listens. Arrays are traced, all else
    is static, as in `eqx.filter_jit`."""
    _compat.check_supported()
    check_wrapped()
    with tracing:
        try:
            return _trace(fn, args, kwargs, marking)
        except UnnamedSowError:
            if marking.search:
                raise
            return _trace(fn, args, kwargs, dc.replace(marking, search=True))


def _trace(fn: Callable, args: tuple, kwargs: dict, marking: Marking) -> Program:
    inputs, treedef, static = take_apart((fn, args, kwargs))
    out: Any = None
    marks: set[Mark] = set()

    def traced(inputs):
        nonlocal out, marks
        fn, args, kwargs = rebuild(treedef, static, inputs)
        with _capture.marked(fn, args, kwargs, marking) as ((fn, args, kwargs), marks):
            outs, *out = take_apart(_capture.unmark(fn(*args, **kwargs), marks))
        return outs

    here = listening.value or Listening()
    here = Listening(outside=here.outside, selected=here.selected)
    # Only tracing happens in here: whatever is executed would be compiled once more.
    with listening(here), _capture.explained(marking):
        closed = jax.make_jaxpr(traced)(inputs)
    return Program(closed, inputs, tuple(out), marks, marking)
