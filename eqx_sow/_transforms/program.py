"""A function, traced so that its sows can be seen; and what is checked then: that the
options select something, and that it can be captured."""

import dataclasses as dc
import inspect
import itertools as it
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax

from .. import _compat, _unknown
from .._errors import SowError, UnknownSowError
from .._frames import warn
from .._globs import fits
from .._handlers.asked import Asked, asked_of
from .._handlers.collect import Collect, Slot, Taking
from .._mark.listening import listening
from .._mark.static import Form
from .._names import has_traced_number, in_loops, Named
from .._results.layers import Known
from .._selection import Selection
from .._staging import to_jaxpr, types_of
from .._values.merge import Entries
from .._values.modes import labels
from .._walk.handler import Given, Handler, is_solver, Taken
from .._walk.interpreter import evaluate, Interpret, renamed
from .._walk.plan import Placed
from .._walk.rewrite import with_names
from .._walk.runs import Run
from .._walk.sows import Mark, recomputed, sows, Way
from .._walk.table import runs_of
from .options import Options


@dc.dataclass(frozen=True)
class Program:
    """What `trace` made of one call of a function.

    `closed` is the jaxpr, `marks` are those in it, each as this transformation calls
    it, and `inputs` are its arrays. `out` is the output of the function without its
    arrays. `roots` is where the models are whose paths are in names, such as
    `("model",)`. `asks` is what the option `names` selects, if it was given.
    """

    closed: Any
    marks: list[Mark]
    inputs: list[Any]
    out: Form
    roots: tuple[str, ...]
    options: Options
    # The same call, traced once more, with more in `Listening.replaced`; and what is
    # there now.
    again: Callable[[frozenset[Any]], "Program"]
    replaced: frozenset[Any]
    asks: Selection | None = None
    # Whether it is being compiled, for any numbers in the arrays of the options.
    compiled: bool = False
    # Of `plant`: see `Replace`.
    left: frozenset[Any] = frozenset()

    def evaluate(
        self, handler: Handler, plan: Placed, given: Given
    ) -> tuple[list, Taken]:
        """The arrays of the output, and what the handler took from the sows."""

        def run(given, inputs):
            interpret = Interpret(handler, plan=plan.plan)
            given = interpret.given(given, plan)
            outs, taken = evaluate(interpret, given, self.closed, *inputs)
            return outs, renamed(taken, plan)

        outer = listening.value
        if outer is None or not outer.scope:
            return run(given, self.inputs)
        # The sows that are left for an outer transformation are in the user's
        # `eqx_sow.scope` around this call.
        closed, treedef = to_jaxpr(run)(given, self.inputs)
        in_scope = lambda x: x._replace(site=x.site.in_scope(outer.scope))
        closed = with_names(closed, map(in_scope, sows(closed)))
        leaves = _compat.inline_or_call(closed, jax.tree.leaves((given, self.inputs)))
        return jax.tree.unflatten(treedef, leaves)

    def types_of(
        self, handler: Handler, plan: Placed, given: Given = Given()
    ) -> Entries:
        """What the handler would take, `Taken.entries`, with types for arrays."""

        def run(inputs, given):
            program = dc.replace(self, inputs=inputs)
            return program.evaluate(handler, plan, given)[1].entries

        return types_of(run, self.inputs, given)

    def survey(
        self, taking: Taking, asked: Sequence[Asked], runs: Mapping[Way, Run]
    ) -> tuple[Entries, Sequence[Slot]]:
        """What would be taken, with types for arrays, and the slots of it."""
        plan, slots = taking.plan(list(filter(self.is_seen, asked)), runs)
        return self.types_of(self.collect(taking), plan), slots

    def collect(self, taking: Taking) -> Collect:
        return Collect(
            tag=self.options.tag,
            has_outer=listening.value is not None,
            cacheable=taking.cacheable,
            all_modes=taking.modes is None,
        )

    def runs(
        self, several: Collection[str] | None, with_rows: bool = False
    ) -> Mapping[Way, Run]:
        """Which run of its name each sow is. `several` are the names that may have more
        than one; if it is `None`, it does not matter, and is not found out. For
        `with_rows`, see `runs_of`."""
        if several is None:
            return {x.way: Run(None, of=frozenset([x.way])) for x in self.marks}
        # Also those that an inner transformation took: their derivatives are there.
        tag = self.options.tag
        every = [x for x in self.marks if tag in (x.site.tag, *x.site.taken)]
        return runs_of(self.closed, every, several, tag, with_rows)

    def asked_by(self, names: Selection | None) -> list[Asked]:
        """What is asked for of each sow."""
        return asked_of(self.named, names)

    @_compat.cached_property
    def asked(self) -> list[Asked]:
        """What the option `names` asks for of each sow."""
        return self.asked_by(self.asks)

    def is_seen(self, asked: Asked) -> bool:
        """Whether a value can be had of it. A linear solver evaluates its function over
        and over; in one, a sow is left out whose name there is elsewhere, too."""
        mark = asked.mark
        in_solver = any(map(is_solver, mark.eqns))
        return not in_solver or mark.site.name not in self._elsewhere

    @_compat.cached_property
    def _elsewhere(self) -> frozenset[str]:
        return frozenset(
            x.site.name for x in self.mine if not any(map(is_solver, x.eqns))
        )

    @property
    def known(self) -> Known:
        """What an `Intermediates` knows of the program, beside the axes."""
        options = self.options
        found = tuple(dict.fromkeys(named for _, named in self.named))
        return Known(
            found=found,
            roots=self.roots,
            capture=options.capture,
            modes=options.modes,
        )

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
        may_be = [x.site for x in self.mine if x.site.splits and x.site.key in keys]
        # How many derivatives the values are that are computed again.
        again = recomputed(self.closed) if may_be else ()
        depths = {s.splits[-1]: len(s.modes) for s in again}
        for site in may_be:
            split = [x for x in site.splits if x in depths]
            if any(planted or "cotangent" in site.modes[depths[x] :] for x in split):
                raise SowError(
                    f"{site.said_first} is in a `jax.checkpoint` that was "
                    "differentiated: the backward pass computes the value again, "
                    "without the mark. "
                    f"{remedy}"
                )

    @_compat.cached_property
    def mine(self) -> list[Mark]:
        """The marks of the tag."""
        return [x for x in self.marks if x.site.tag == self.options.tag]

    @_compat.cached_property
    def named(self) -> list[tuple[Mark, Named]]:
        """The marks of the tag, each with what it is to patterns."""
        # In many calls of one function, the sites are the same.
        kept: dict[Any, Named] = {}
        for x in self.mine:
            key = id(x.site), x.loops
            if key not in kept:
                kept[key] = in_loops(x.site.name, x.site.label.places, x.loops)
        return [(x, kept[id(x.site), x.loops]) for x in self.mine]

    def select(self, patterns: Iterable[Any], **options: Any) -> Selection:
        found = dict.fromkeys(named for _, named in self.named)
        return Selection(patterns, found, self.roots, **options)

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
        names = [x.site.name for x in self.mine]
        entry = _unknown.entry_of_value(pattern, names, self.roots, _AS_A_WHOLE)
        if said := entry or _unknown.across_slashes(pattern, names):
            return said
        iterations = self.select([pattern])
        for name, one in [
            (x.site.name, one)
            for x, named in self.named
            for one in iterations.all_of(named)
        ]:
            if one.at:
                return (
                    f" One iteration of {name!r} is a value of its own only if `names` "
                    f"asks for it: pass `names={pattern!r}`, too."
                )
            return f" All iterations of {name!r} are one value: write {name!r}."
        every = [named for _, named in self.named]
        is_planted = any(x.site.note and not x.site.note.is_sow for x in self.mine)
        if is_planted and self.options.capture is None:
            return f" The modules here are those that are planted inside.{_CAPTURE}"
        if iterations := _unknown.no_such_iteration(pattern, every, self.roots):
            return iterations
        for site, *_ in self.marks:
            if site.label in site.labels and fits(pattern, site.name):
                return f" {site.name!r} has the tag {site.tag!r}: pass it as `tag=`."
        if self.options.capture is not None:
            return _unknown.without_option(pattern, names)
        if close:
            return ""
        return (
            f"{_CAPTURE} (`scope=True` puts the path of the module before the name of "
            "a mark.)"
        )

    def check_selected(
        self, call: str, selection: Selection, also: Iterable[str] = ()
    ) -> None:
        """Raises if any of its patterns selects nothing."""
        unknown = [selection.patterns[i] for i in selection.missing]
        for pattern in unknown:
            if several := selection.ambiguous.get(pattern):
                raise UnknownSowError(
                    f"`{call}`: {pattern!r} may be {' or '.join(map(repr, several))}. "
                    "Write which one."
                )
        n_runs = Counter(x.site.name for x in self.mine if not x.site.modes)
        _unknown.check_no_entry(
            call, selection.patterns, n_runs, self.roots, _AS_A_WHOLE
        )
        names = dict.fromkeys((*(x.site.name for x in self.mine), *also))
        found = [named for _, named in self.named]
        _unknown.check_known(call, unknown, names, hint=self.hint, found=found)

    def by_name(self, call: str, **options: Any) -> dict[str, Any]:
        """Options that may be dicts of patterns, each as a dict of the names that are
        asked for, such as `h`, or for one iteration `h/3`. Raises if anything in them,
        or in the option `names`, selects nothing."""
        if self.asks is not None:
            self.check_selected(f"{call}(..., names=...)", self.asks)
        by_pattern = {k: v for k, v in options.items() if isinstance(v, Mapping) and v}
        if not by_pattern:
            return options
        pairs = [(named, one) for _, named in self.named for one in self._asked(named)]
        also = {one for named, one in pairs if one.name != named.name}
        new = dict(options)
        for option, value in by_pattern.items():
            selection = self.select(value, also=also, whole=True)
            names = [one.name for one in also]
            self.check_selected(f"{call}(..., {option}=...)", selection, names)
            selection.check_values(f"{call}(..., {option}=...)", value)
            found = {one.name: selection.first(one, whole) for whole, one in pairs}
            new[option] = {
                name: value[selection.patterns[i]]
                for name, i in found.items()
                if i is not None
            }
        return new

    def _asked(self, named: Named) -> list[Named]:
        """What is asked for of a sow, as if each iteration were one."""
        if self.asks is None:
            return [named]

        def left(at):
            pairs = it.zip_longest(named.loops, at)
            return [x.length for x, i in pairs if i is None]

        each = self.asks.all_of(named)
        return [in_loops(one.name, one.places, left(one.at)) for one in each]

    def wanted(
        self, call: str, keys: Iterable[Any], others: Iterable[str] = ()
    ) -> dict[Any, str]:
        """What the modes are called of those `Site.key`s that the option `modes`
        selects. `others` are names of modes that it may have, too."""
        modes = self.options.modes
        mode_of = labels(keys)
        _unknown.check_known(
            f"{call}(..., modes=...)",
            modes,
            [*others, *mode_of.values()],
            "is a mode that no selected mark of this program has",
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
        others = {repr(s.tag): None for s, *_ in self.marks if s.label in s.labels}
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
            "these inside `fn`. A `save_intermediates` inside `fn` takes the marks "
            "that it returns. With `names=` or `modes=` it leaves the others to this "
            "one."
        )


_CAPTURE = " Did you mean `capture=True`? It marks the output of each module."
_AS_A_WHOLE = (
    " Options select values as a whole. If a name runs several times, `plant` takes a "
    "tuple for it, with `None` for each run that stays as it is."
)
_DERIVATIVE = {
    "cotangent": " A value has a cotangent if `fn` computes a gradient, such as "
    "`eqx.filter_grad(loss)`, and the value depends on what is differentiated there.",
    "tangent": " A value has a tangent if `fn` calls `jax.jvp`.",
}
