"""A function, traced so that its sows can be seen."""

import dataclasses as dc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu

from . import _capture, _compat
from ._capture import Marking
from ._handler import Given, Handler, Taken
from ._interpreter import evaluate
from ._marks import Mark
from ._primitive import Const, Listening, listening


@dc.dataclass(frozen=True)
class Program:
    closed: Any
    leaves: list[Any]
    out_treedef: Any
    out_static: list[tuple[bool, Const]]
    marks: set[Mark]

    def evaluate(self, handler: Handler, given: Given, *leaves) -> tuple[list, Taken]:
        jaxpr, consts = _compat.open_jaxpr(self.closed)
        return evaluate(jaxpr, consts, handler, given, leaves)

    def survey(self, handler: Handler) -> Any:
        """`Taken.rest`, as shapes."""

        def run(*leaves):
            return self.evaluate(handler, Given(), *leaves)[1].rest

        return jax.eval_shape(run, *self.leaves)

    def output(self, outs: list[Any]) -> Any:
        arrays = iter(outs)
        leaves = [next(arrays) if d else x.value for d, x in self.out_static]
        return jtu.tree_unflatten(self.out_treedef, leaves)

    def unmark(self, tree: Any) -> Any:
        return _capture.unmark(tree, self.marks)


def trace(fn: Callable, args: tuple, kwargs: dict, marking: Marking) -> Program:
    """Traces `fn(*args, **kwargs)` while everybody listens. Arrays are traced, all else
    is static, as in `eqx.filter_jit`."""
    inputs, treedef = jtu.tree_flatten((fn, args, kwargs))
    dynamic = [eqx.is_array(x) for x in inputs]
    out_treedef = None
    out_static: list[tuple[bool, Const]] = []
    marks: set[Mark] = set()

    def traced(leaves):
        nonlocal out_treedef, marks
        arrays = iter(leaves)
        filled = [next(arrays) if d else x for d, x in zip(dynamic, inputs)]
        fn, args, kwargs = jtu.tree_unflatten(treedef, filled)
        (fn, args, kwargs), marks = _capture.mark(fn, args, kwargs, marking)
        out = _capture.unmark(fn(*args, **kwargs), marks)
        out, out_treedef = jtu.tree_flatten(out)
        is_array = [isinstance(x, jax.Array) for x in out]
        out_static[:] = [(d, Const(None if d else x)) for x, d in zip(out, is_array)]
        return [x for x, d in zip(out, is_array) if d]

    # Only tracing happens in here: whatever is executed would be compiled once more.
    leaves = [x for x, d in zip(inputs, dynamic) if d]
    with listening(Listening()):
        closed = jax.make_jaxpr(traced)(leaves)
    return Program(closed, leaves, out_treedef, out_static, marks)
