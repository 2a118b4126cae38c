"""A function, traced so that its sows can be seen; and what is checked then: that the
options select something, and that it can be captured."""

import contextlib
import dataclasses as dc
import functools as ft
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from .. import _compat
from .._errors import SowError
from .._frames import warn
from .._mark.listening import Listening, listening
from .._mark.noting import listening_as, within
from .._mark.primitive import widened
from .._mark.site import Site
from .._mark.sow import UnnamedSowError
from .._mark.staging import to_jaxpr, types_of
from .._mark.static import Form, take_apart
from .._modules import capture as _capture
from .._modules.places import roots
from .._names import (
    check_known,
    every_selected,
    has_traced_number,
    in_a_list,
    matches,
    Selected,
)
from .._values.modes import labels
from .._walk.executions import with_executions
from .._walk.handler import Given, Handler, is_solver, Taken
from .._walk.interpreter import evaluate, Interpret
from .._walk.jax_rules import check_wrapped
from .._walk.sows import Found, recomputed, seen_as, sows
from .options import Options


@dc.dataclass(frozen=True)
class Program:
    """What `trace` made of one call of a function.

    `closed` is the jaxpr, in which the sows have their names, and `inputs` are its
    arrays. `out` is the output of the function without its arrays. `roots` is where the
    models of captured calls are, such as `("model",)`.
    """

    closed: Any
    inputs: list[Any]
    out: Form
    roots: tuple[str, ...]
    options: Options

    def evaluate(self, handler: Handler, given: Given) -> tuple[list, Taken]:
        """The arrays of the output, and what the handler took from the sows."""

        def run(given, inputs):
            return evaluate(Interpret(handler), given, self.closed, *inputs)

        outer = listening.value
        if outer is None or not outer.scope:
            return run(given, self.inputs)
        # The sows that are left for an outer transformation are in the user's
        # `eqx_sow.scope` around this call.
        closed, treedef = to_jaxpr(run)(given, self.inputs)
        closed = seen_as(closed, sows(closed), lambda s: s.in_scope(outer.scope))
        leaves = _compat.inline_or_call(closed, jax.tree.leaves((given, self.inputs)))
        return jax.tree.unflatten(treedef, leaves)

    def with_executions(self, several: Callable[[Site], bool]) -> "Program":
        """The same program, in which sows know which executions they are, where it
        matters. `several` says of a sow whether its name may have more than one."""
        closed = with_executions(
            self.closed,
            self.found,
            lambda site: site.tag == self.options.tag,
            several,
        )
        return self if closed is self.closed else dc.replace(self, closed=closed)

    def listens(self, names: Any) -> dict[str, Any]:
        """What `Collect` and `Tap` have in common, given the option `names`."""
        # A linear solver evaluates its function over and over, so that no value can be
        # had there.
        elsewhere = frozenset(
            x.site.name for x in self.mine if not any(map(is_solver, x.eqns))
        )
        return dict(
            tag=self.options.tag,
            names=names,
            spelled_out=self.names,
            elsewhere=elsewhere,
            has_outer=listening.value is not None,
        )

    def survey(self, handler: Handler) -> Any:
        """What the handler would take, `Taken.entries`, with types for arrays."""

        def run(inputs):
            program = dc.replace(self, inputs=inputs)
            return program.evaluate(handler, Given())[1].entries

        return types_of(run, self.inputs)

    def output(self, outs: list[Any]) -> Any:
        """What the function returns, from the arrays in that."""
        return self.out.with_arrays(outs)

    def check_recomputed(
        self, keys: Iterable[Any], remedy: str, *, planted: bool = False
    ) -> None:
        """Raises if a backward pass of a `jax.checkpoint` computes a value once more,
        past its sow, and one of these `Site.key`s depends on it: what is `planted` at
        the sow, or a derivative that flows backward from there."""
        keys = set(keys)
        # How many derivatives the values are that are computed again.
        depths = {s.splits[-1]: len(s.modes) for s in recomputed(self.closed) if keys}
        for site, *_ in self.mine:
            split = [x for x in site.splits if x in depths] if site.key in keys else ()
            if any(planted or "cotangent" in site.modes[depths[x] :] for x in split):
                raise SowError(
                    f"{site.said} is in a `jax.checkpoint` that was differentiated: "
                    "the backward pass computes the value again, without the sow. "
                    f"{remedy}"
                )

    @ft.cached_property
    def found(self) -> list[Found]:
        """The sows that there are."""
        return list(sows(self.closed))

    @ft.cached_property
    def mine(self) -> list[Found]:
        """Those of the tag."""
        return [x for x in self.found if x.site.tag == self.options.tag]

    @ft.cached_property
    def names(self) -> frozenset[str]:
        return frozenset(x.site.name for x in self.mine)

    def hint(self, pattern: Any, close: Sequence[str]) -> str:
        """For `check_known`: what else a pattern may have been meant for, if there are
        no `close` matches."""
        if not isinstance(pattern, str):
            return ""
        if has_traced_number(pattern):
            return (
                " A name cannot contain a traced number. Select all layers, and use "
                "the number in the functions that you plant, or to index what comes "
                "back."
            )
        for name, one in self.selected(pattern):
            if one.at:
                return (
                    f" One iteration of {name!r} is a value of its own only if `names` "
                    f"asks for it: pass `names={pattern!r}`, too."
                )
            return f" All iterations of {name!r} are one value: write {name!r}."
        is_index = lambda part: part.lstrip("-").isdecimal()
        without = lambda name: "/".join(x for x in name.split("/") if not is_index(x))
        plain = without(pattern)
        alike = [x for x in self.mine if matches(plain, without(x.site.name))]
        if plain != pattern and alike:
            site, loops = alike[0].site, alike[0].loops
            if not loops and without(site.name) != site.name:
                numbers = lambda name: [int(x) for x in name.split("/") if is_index(x)]
                names = sorted((x.site.name for x in alike), key=numbers)
                return (
                    " In a list, each has a name of its own, from "
                    f"{names[0]!r} to {names[-1]!r}, the last one."
                )
            places = (*site.label.after, *[None] * len(loops))
            called = lambda indices: in_a_list(site.name, zip(places, indices))
            first, last = called([0] * len(loops)), called([n - 1 for n in loops])
            they = f"they are {first!r} to {last!r}"
            they = they if loops else "it is in no loop of known length"
            return f" There is no such iteration of {site.name!r}: {they}."
        for site, *_ in self.found:
            if site.label in site.labels and matches(pattern, site.name):
                return f" {site.name!r} has the tag {site.tag!r}: pass it as `tag=`."
        if self.options.capture is not None:
            if not pattern.endswith(".inputs") or self.options.inputs:
                return ""
            return (
                " Inputs are captured with `inputs=True`. `plant` cannot change them: "
                "plant the output of the module before."
            )
        if close:
            return ""
        return (
            " Did you mean `capture=True`? It marks the output of each module. "
            "(`scope=True` puts the path of the module before the name of a sow.)"
        )

    def selected(self, pattern: Any) -> list[tuple[str, Selected]]:
        """What a pattern selects: the name of a sow, and which iterations of it."""
        return [
            (x.site.name, one)
            for x in self.mine
            for one in every_selected(
                [pattern], x.site.name, x.site.label.after, x.loops, self.names
            )
        ]

    def check_selected(self, call: str, **by_name: Any) -> None:
        """Raises if anything in the option `names`, or a key of those options that are
        dicts of names, selects no sow, nor an iteration of one."""
        known = {x.site.name: None for x in self.mine}
        unknown = []
        for pattern in self.options.names or ():
            found = self.selected(pattern)
            known |= {one.name: None for _, one in found}
            unknown += [] if found else [pattern]
        options: dict[str, Iterable[Any]] = dict(names=unknown)
        options |= {k: v for k, v in by_name.items() if isinstance(v, Mapping)}
        of_all = {x.site.label.of_all for x in self.mine}
        for option, some in options.items():
            some = [x for x in some if not any(matches(x, name) for name in of_all)]
            check_known(f"{call}(..., {option}=...)", some, known, hint=self.hint)

    def wanted(
        self, call: str, keys: Iterable[Any], others: Iterable[str] = ()
    ) -> dict[Any, str]:
        """What the modes are called of those `Site.key`s that the option `modes`
        selects. `others` are names of modes that it may have, too."""
        modes = self.options.modes
        mode_of = labels(keys)
        check_known(
            f"{call}(..., modes=...)",
            modes,
            [*others, *mode_of.values()],
            "is a mode that no selected sow of this program has",
            kind="modes",
            hint=lambda mode, close: _DERIVATIVE.get(mode, "") if not close else "",
        )
        mode_of = {k: m for k, m in mode_of.items() if modes is None or m in modes}
        self.check_recomputed(
            [k for k in mode_of if "cotangent" in k[1]],
            "Leave out the derivative that is taken last: pass the other modes as "
            "`modes=`. Or remove the `jax.checkpoint`.",
        )
        return mode_of

    def warn_unmarked(self, call: str, fn: Any) -> None:
        """Warns if there is nothing that could be selected. What was asked for by name
        is an error before that."""
        options = self.options
        if self.mine or options.names is not None or options.capture is not None:
            return
        fn = inspect.unwrap(fn)
        name = getattr(fn, "__name__", type(fn).__name__)
        # Calls that are only noted have no name, of whatever tag.
        others = {repr(s.tag): None for s, *_ in self.found if s.label in s.labels}
        if others:
            warn(
                f"`{call}` found no mark with the tag {options.tag!r} in `{name}`. The "
                f"tags there are: {', '.join(others)}. Pass one of these as `tag=`."
            )
            return
        warn(
            f"`{call}` found no mark in `{name}`. Pass `capture=True` for the output "
            "of each module, or mark values with `eqx_sow.sow`. A function that was "
            "traced before, by `jax.vjp` or `jax.linearize`, has lost its marks: call "
            "these inside `fn`. If a `save_intermediates` inside took those of the tag "
            f"{options.tag!r}, give one of the two another `tag`."
        )


_DERIVATIVE = {
    "cotangent": " A value has a cotangent if `fn` computes a gradient, such as "
    "`eqx.filter_grad(loss)`, and the value depends on what is differentiated there.",
    "tangent": " A value has a tangent if `fn` calls `jax.jvp`.",
}


def trace(fn: Callable, args: tuple, kwargs: dict, options: Options) -> Program:
    """Traces `fn(*args, **kwargs)` while `sow` marks. Arrays are traced, all else is
    static, as in `eqx.filter_jit`."""
    _compat.check_supported()
    check_wrapped()
    try:
        return _trace(fn, args, kwargs, options)
    except UnnamedSowError:
        if options.search:
            raise
        return _trace(fn, args, kwargs, dc.replace(options, search=True))
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


def _trace(fn: Callable, args: tuple, kwargs: dict, options: Options) -> Program:
    inputs, form = take_apart((fn, args, kwargs))
    out: Any = None

    def traced(inputs):
        nonlocal out
        called = form.with_arrays(inputs)
        with within(depth, lambda: roots(*called)):
            fn, args, kwargs = called
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
        new = Listening(captures=outer.captures, depth=depth, leafwise=leafwise)
        with listening_as(options.noted(new)):
            closed = jax.make_jaxpr(traced)(inputs)
            return closed, list(sows(closed))

    try:
        made = closed_jaxpr(outer.leafwise)
    except (SowError, RecursionError):
        raise
    except _NOT_DIFFERENTIABLE as e:
        if "`compiler_options` can only" in str(e):
            e.add_note(_TOP_LEVEL)
        if not widened.once:
            raise
        # If a leaf of a value is differentiated, so are all. Perhaps another one comes
        # from a `while_loop`, which cannot be, and would not be without the sow. What
        # is raised may be an error of JAX's, or of a derivative rule of the user's.
        made = None
        with contextlib.suppress(Exception):
            made = closed_jaxpr(leafwise=True)
        if made is None:
            raise
    (closed, found), called = made, (fn, args, kwargs)
    named, model_roots = _capture.name(closed, found, called, depth, options)
    if named is not closed:
        found = sows(named)
    # What a transformation inside captured for itself is not for this one.
    closed = seen_as(named, found, lambda s: s.seen_from(depth, options.tag))
    return Program(closed, inputs, out, model_roots, options)
