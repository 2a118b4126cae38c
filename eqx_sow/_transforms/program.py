"""A function, traced so that its sows can be seen."""

import contextlib
import dataclasses as dc
import functools as ft
import inspect
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax

from .. import _compat
from .._errors import SowError
from .._mark.listening import Listening, listening, tracing
from .._mark.noting import listening_as, within
from .._mark.site import Site
from .._mark.sow import UnnamedSowError
from .._mark.staging import to_jaxpr, types_of
from .._mark.static import Const, rebuild, take_apart
from .._modules import capture as _capture
from .._modules.capture import Marking
from .._modules.places import roots
from .._walk.executions import with_executions
from .._walk.handler import Given, Handler, is_solver, Taken
from .._walk.interpreter import evaluate
from .._walk.jax_rules import check_wrapped
from .._walk.sows import lengths_of, recomputed, seen_as, sites, sows


@dc.dataclass(frozen=True)
class Program:
    """What `trace` made of one call of a function.

    `closed` is the jaxpr, in which the sows have their names, and `inputs` are its
    arrays. `out` is what to rebuild the output of the function from, beside its arrays:
    treedef and static leaves. `roots` is where the models of captured calls are, such
    as `("model",)`. `depth` is how many transformations trace the function, one within
    the other. `again` traces it once more, with other options. `taken` are the tags
    of which a transformation inside took sows.
    """

    closed: Any
    inputs: list[Any]
    out: tuple[Const, tuple[Any, ...]]
    roots: tuple[str, ...]
    marking: Marking
    depth: int
    again: Callable[[Marking], "Program"]
    taken: frozenset[Hashable]

    def evaluate(self, handler: Handler, given: Given) -> tuple[list, Taken]:
        """The arrays of the output, and what the handler took from the sows."""
        run = ft.partial(evaluate, *_compat.open_jaxpr(self.closed), handler)
        outer = listening.value
        if outer is None or not outer.scope:
            return run(given, self.inputs)
        # The sows that are left for an outer transformation are in the user's
        # `eqx_sow.scope` around this call.
        closed, treedef = to_jaxpr(run)(given, self.inputs)
        closed = seen_as(closed, lambda s: s.in_scope(outer.scope))
        leaves = _compat.inline_or_call(closed, jax.tree.leaves((given, self.inputs)))
        return jax.tree.unflatten(treedef, leaves)

    def with_executions(self, several: Callable[[str], bool]) -> "Program":
        """The same program, in which sows know which executions they are, where it
        matters. `several` says of a name whether it may have more than one."""
        closed = with_executions(
            self.closed,
            lambda site: site.tag == self.marking.tag,
            lambda site: several(site.name),
        )
        return dc.replace(self, closed=closed)

    def survey(self, handler: Handler) -> Any:
        """What the handler would take, `Taken.values`, with types for arrays."""

        def run(inputs):
            program = dc.replace(self, inputs=inputs)
            return program.evaluate(handler, Given())[1].values

        return types_of(run, self.inputs)

    def output(self, outs: list[Any]) -> Any:
        """What the function returns, from the arrays in that."""
        treedef, leaves = self.out
        return rebuild(treedef, leaves, outs)

    def check_recomputed(
        self, keys: Iterable[Any], remedy: str, *, planted: bool = False
    ) -> None:
        """Raises if a backward pass of a `jax.checkpoint` computes a value once more,
        past its sow, and one of these `Site.key`s depends on it: what is `planted` at
        the sow, or a derivative that flows backward from there."""
        keys, tag = list(keys), self.marking.tag
        repeated = list(recomputed(self.closed)) if keys else []
        # Of two sows with one name, only one may be in the checkpoint.
        origins = defaultdict(set)
        for site in sites(self.closed) if repeated else ():
            origins[site.key].add(site.origin)
        for site in repeated:
            site = site.seen_from(self.depth, tag)
            mine = [k for k in keys if site.origin in origins.get(k, {site.origin})]
            if site.tag == tag and any(_goes_past(site, key, planted) for key in mine):
                raise SowError(
                    f"`sow(..., {site.name!r})` at {site.where} is in a "
                    "`jax.checkpoint` that was differentiated: the backward pass "
                    f"computes the value once more, past the sow. {remedy}"
                )

    @property
    def has_sows(self) -> bool:
        """Whether there are any with a name, whatever their tag: calls that are only
        noted have none."""
        return any(s.label in s.labels for s in sites(self.closed))

    @property
    def names(self) -> frozenset[str]:
        return frozenset(s.name for s in sites(self.closed))

    @property
    def names_outside_of_solvers(self) -> frozenset[str]:
        """The names that also run where a value can be had: a linear solver evaluates
        its function over and over."""
        return frozenset(
            site.name
            for site, eqns, _ in sows(self.closed)
            if site.tag == self.marking.tag and not any(map(is_solver, eqns))
        )

    @ft.cached_property
    def in_loops(self) -> list[tuple[Site, tuple[int, ...]]]:
        """The sows that there are, each with the numbers of iterations of the loops
        around it, from outside in."""
        return [
            (site, lengths_of(eqns))
            for site, eqns, _ in sows(self.closed)
            if site.tag == self.marking.tag
        ]

    def new_names(self, known: Iterable[str], option: str) -> list[str]:
        """The names that there would be besides, with `capture=True` or
        `scope=True`."""
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
    """Whether the value or derivative `key` depends on one that is computed once more,
    instead of that of `site`. A derivative that was complete before does not."""
    name, mode, orders = key
    n = len(site.orders)
    if (name, orders[:n]) != (site.name, site.orders):
        return False
    late = [order >= site.differentiated for order in orders[n : n + 1]]
    return all(late) if planted else any(late) and "cotangent" in mode.split(".")[n:]


# The tags of which sows were taken by transformations inside the program that is being
# traced. Only one thread traces at a time.
tags_taken: list[Hashable] = []


def trace(fn: Callable, args: tuple, kwargs: dict, marking: Marking) -> Program:
    """Traces `fn(*args, **kwargs)` while `sow` marks. Arrays are traced, all else is
    static, as in `eqx.filter_jit`."""
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
# What JAX, Equinox, and most derivative rules raise for what cannot be differentiated.
_NOT_DIFFERENTIABLE = ValueError, NotImplementedError, RuntimeError, TypeError
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
        with within(depth, lambda: roots(*called)):
            fn, args, kwargs = called
            outs, *out = take_apart(fn(*args, **kwargs))
        return outs

    # JAX names the traced function in its error messages.
    called = inspect.unwrap(fn)
    traced.__wrapped__ = called if inspect.isroutine(called) else type(called).__call__
    traced.__signature__ = inspect.Signature()
    outer = listening.value or Listening()
    depth = outer.depth + 1

    # Nothing must be executed in here: in this context, JAX would compile it once more.
    def closed_jaxpr(leafwise):
        new = Listening(captures=outer.captures, depth=depth, leafwise=leafwise)
        with listening_as(marking.noted(new)):
            return jax.make_jaxpr(traced)(inputs)

    n_taken = len(tags_taken)
    try:
        closed = closed_jaxpr(outer.leafwise)
    except (SowError, RecursionError):
        raise
    except _NOT_DIFFERENTIABLE:
        # If a leaf of a value is differentiated, so are all. Perhaps another one comes
        # from a `while_loop`, which cannot be, and would not be without the sow. What
        # is raised may be an error of JAX's, or of a derivative rule of the user's.
        closed = None
        with contextlib.suppress(Exception):
            closed = closed_jaxpr(leafwise=True)
        if closed is None:
            raise
    finally:
        inside = frozenset(tags_taken[n_taken:])
        del tags_taken[n_taken:]
    closed, model_roots = _capture.name(closed, (fn, args, kwargs), depth, marking)
    # What a transformation inside captured for itself is not for this one.
    closed = seen_as(closed, lambda s: s.seen_from(depth, marking.tag))
    again = ft.partial(trace, fn, args, kwargs)
    out = tuple(out)
    return Program(closed, inputs, out, model_roots, marking, depth, again, inside)
