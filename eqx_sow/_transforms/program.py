"""A function, traced so that its sows can be seen."""

import contextlib
import dataclasses as dc
import functools as ft
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from .. import _compat
from .._arrays import to_jaxpr, types_of
from .._errors import SowError
from .._mark.listening import Listening, listening, tracing
from .._mark.noting import called_with, listening_as
from .._mark.site import Label, Site
from .._mark.sow import UnnamedSowError
from .._mark.static import Const, rebuild, take_apart
from .._modules import capture as _capture
from .._modules.capture import Marking, Named
from .._walk.edit import seen_as
from .._walk.executions import with_executions
from .._walk.find import loop_of, loops_around, recomputed, sites, sows
from .._walk.handler import Given, Handler, Taken
from .._walk.interpreter import evaluate
from .._walk.jax_rules import check_wrapped
from .._walk.refuse import is_solver


@dc.dataclass(frozen=True)
class Program:
    closed: Any
    inputs: list[Any]
    out: tuple[Const, tuple[Any, ...]]
    named: Named
    marking: Marking
    depth: int
    again: Callable[[Marking], "Program"]

    def evaluate(self, handler: Handler, given: Given) -> tuple[list, Taken]:
        run = ft.partial(evaluate, *_compat.open_jaxpr(self.closed), handler)
        here = listening.value
        if here is None or not here.scope:
            return run(given, self.inputs)
        # What is left for whoever listens is in the scope around this call.
        closed, treedef = to_jaxpr(run)(given, self.inputs)
        closed = seen_as(closed, lambda s: s.in_scope(here.scope))
        leaves = _compat.inline_or_call(closed, jax.tree.leaves((given, self.inputs)))
        return jax.tree.unflatten(treedef, leaves)

    def with_executions(self, several: Callable[[str], bool]) -> "Program":
        """The same program. Its sows know which executions they are, where it matters;
        `several` says of a name whether it may have more than one."""
        closed = with_executions(
            self.closed,
            lambda site: site.tag == self.marking.tag,
            lambda site: several(site.name),
        )
        return dc.replace(self, closed=closed)

    def survey(self, handler: Handler) -> Any:
        """`Taken.values`, as types."""

        def run(inputs):
            program = dc.replace(self, inputs=inputs)
            return program.evaluate(handler, Given())[1].values

        return types_of(run, self.inputs)

    def output(self, outs: list[Any]) -> Any:
        treedef, leaves = self.out
        return rebuild(treedef, leaves, outs)

    def check_recomputed(
        self, keys: Iterable[Any], remedy: str, *, planted: bool = False
    ) -> None:
        """Raises if a `jax.checkpoint` goes around any of these `Site.key`s: what is
        `planted` there, or what of it flows backward."""
        keys, tag = list(keys), self.marking.tag
        again = list(recomputed(self.closed)) if keys else []
        # Another sow of the same name may not be computed once more.
        origins = defaultdict(set)
        for site, _ in sows(self.closed) if again else ():
            origins[site.key].add(site.origin)
        for site in again:
            site = site.seen_from(self.depth, tag)
            alike = [k for k in keys if site.origin in origins.get(k, {site.origin})]
            if site.tag == tag and any(_goes_past(site, key, planted) for key in alike):
                raise SowError(
                    f"`sow(..., {site.name!r})` at {site.where} is in a "
                    "`jax.checkpoint` that was differentiated: the backward pass "
                    f"computes the value once more, past the sow. {remedy}"
                )

    @property
    def names(self) -> frozenset[str]:
        return frozenset(s.name for s in sites(self.closed))

    @property
    def names_outside_of_solvers(self) -> frozenset[str]:
        """The names that also run where a value can be had: a linear solver evaluates
        its function over and over."""
        return frozenset(
            site.name
            for site, path in sows(self.closed)
            if site.tag == self.marking.tag and not any(map(is_solver, path))
        )

    def _in_loops(self) -> Iterator[tuple[Site, tuple[int, ...]]]:
        for site, path in sows(self.closed):
            if site.tag == self.marking.tag:
                around = [x.length for x in map(loop_of, path) if x]
                yield site, tuple(n for n, _ in loops_around(site, around))

    def in_loops(self) -> dict[tuple[Label, tuple[int, ...]], None]:
        """The sows that there are, each in the loops around it from outside in: how
        many iterations they have."""
        return dict.fromkeys((site.label, loops) for site, loops in self._in_loops())

    def loops_by_key(self) -> dict[Any, set[tuple[int, ...]]]:
        """The same by `Site.key`."""
        found = defaultdict(set)
        for site, loops in self._in_loops():
            found[site.key].add(loops)
        return found

    def new_names(self, known: Iterable[str], option: str) -> list[str]:
        """The names that there are too with `capture=True` or `scope=True`."""
        if getattr(self.marking, option):
            return []
        try:
            program = self.again(dc.replace(self.marking, **{option: True}))
        except Exception:  # a hint never hides the error that it is for
            return []
        tag = self.marking.tag
        names = dict.fromkeys(s.name for s in sites(program.closed) if s.tag == tag)
        return [name for name in names if name not in known]


def _goes_past(site: Site, key: Any, planted: bool) -> bool:
    """Whether a value that is computed once more, instead of that of `site`, is what a
    derivative of it depends on; a derivative from before that is complete."""
    name, mode, orders = key
    n = len(site.orders)
    if (name, orders[:n]) != (site.name, site.orders):
        return False
    late = [order >= site.differentiated for order in orders[n : n + 1]]
    return all(late) if planted else any(late) and "cotangent" in mode.split(".")[n:]


def trace(fn: Callable, args: tuple, kwargs: dict, marking: Marking) -> Program:
    """Traces `fn(*args, **kwargs)` so that its sows are seen. Arrays are traced, all
    else is static, as in `eqx.filter_jit`."""
    _compat.check_supported()
    check_wrapped()
    with tracing:
        try:
            return _trace(fn, args, kwargs, marking)
        except UnnamedSowError:
            if marking.search:
                raise
            return _trace(fn, args, kwargs, dc.replace(marking, search=True))
        except _NOT_CONCRETE as e:
            if _TRACED not in getattr(e, "__notes__", ()):
                e.add_note(_TRACED)
            raise


_NOT_CONCRETE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
# What JAX, and Equinox, raise for what cannot be differentiated.
_NOT_DIFFERENTIABLE = ValueError, NotImplementedError
_TRACED = (
    "eqx_sow traces the function that it is given, as `jax.jit` does. Where the value "
    "of an array decides, write `jnp.where` or `jax.lax.cond`."
)


def _trace(fn: Callable, args: tuple, kwargs: dict, marking: Marking) -> Program:
    inputs, treedef, static = take_apart((fn, args, kwargs))
    out: Any = None

    def traced(inputs):
        nonlocal out
        called = rebuild(treedef, static, inputs)
        with called_with(depth, lambda: _capture.given(*called)):
            fn, args, kwargs = called
            outs, *out = take_apart(fn(*args, **kwargs))
        return outs

    # JAX says what was traced when it says what is wrong with it.
    called = inspect.unwrap(fn)
    traced.__wrapped__ = called if inspect.isroutine(called) else type(called).__call__
    traced.__signature__ = inspect.Signature()
    here = listening.value or Listening()
    depth = here.depth + 1

    # Only tracing happens in here: whatever is executed would be compiled once more.
    def closed_jaxpr(leafwise):
        new = Listening(captures=here.captures, depth=depth, leafwise=leafwise)
        with listening_as(marking.noted(new)):
            return jax.make_jaxpr(traced)(inputs)

    try:
        closed = closed_jaxpr(here.leafwise)
    except _NOT_DIFFERENTIABLE:
        # Such as a `while_loop` with a leaf that only a sow differentiates.
        closed = None
        with contextlib.suppress(Exception):
            closed = closed_jaxpr(leafwise=True)
        if closed is None:
            raise
    named = _capture.name(closed, (fn, args, kwargs), depth, marking)
    # What a transformation inside captured for itself is not for others.
    closed = seen_as(named.closed, lambda s: s.seen_from(depth, marking.tag))
    again = ft.partial(trace, fn, args, kwargs)
    return Program(closed, inputs, tuple(out), named, marking, depth, again)
