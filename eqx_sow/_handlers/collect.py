"""The handler of `save_intermediates`."""

import dataclasses as dc
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .._arrays import differentiable_where
from .._errors import SowError
from .._mark.site import Execution, Site
from .._mark.static import SameParts
from .._values import entry as _entry, state as _state
from .._values.entry import Entry, grouped
from .._values.merge import Entries, gather
from .._values.modes import without_order
from .._values.reduce import Append, IfSeveral, Reducer
from .._walk.frame import Frame
from .._walk.handler import check_guarded, Given, Handler
from .._walk.sows import Found, in_loop_of_backward_pass, is_of_unknown_length
from .asked import is_some, leave, of_one, reached, Selector
from .rows import Row, values_open_rows


# For a survey of the program: of each place that marks a name there is an entry.
EACH_PLACE = SameParts(Append())
_IF_SEVERAL = IfSeveral()


class _Marked(NamedTuple):
    """A mark that `Collect` came by. Its operands are variables of the jaxpr, which are
    read all at once when that has been walked."""

    site: Site
    operands: Sequence[Any]
    transform: Any
    # See `Entry.at`.
    at: tuple[int | None, ...]
    # Whether the walk is in that iteration, if not in all.
    here: Any = None

    def read(self, frame: Frame) -> Sequence[Any]:
        operands = frame.read_arrays(self.operands)
        if self.here is None or self.transform is None:
            return operands
        return [differentiable_where(self.here, x) for x in operands]


@dc.dataclass(frozen=True, kw_only=True)
class Collect(Selector):
    """Takes the values of the marks that are asked for."""

    modes: tuple[str, ...] | None
    # A reducer for all names, or a dict of one for each.
    reduce: SameParts
    # The `Site.key`s of what is returned, which outer transformations do not see.
    returned: frozenset[Any] = frozenset()
    # The names that have a derivative in a `while_loop`, or a primal in a loop of a
    # backward pass. What a derivative belongs to does not depend on `modes`, so their
    # primals are taken, too.
    beside: frozenset[str] = frozenset()
    # The `Site.key`s of derivatives whose rows in a `Buffer` the value opens: see
    # `stepped`.
    filled: frozenset[Any] = frozenset()

    @property
    def cacheable(self):
        return super().cacheable and not any(r and r.has_state for r in self._reducers)

    @property
    def _reducers(self) -> Iterable[Reducer | None]:
        reduce = self.reduce.value
        return reduce.values() if isinstance(reduce, Mapping) else (reduce,)

    def needs_order(self, site):
        return any(self.folds(one.name) for one, _ in self.wanted(site))

    def wanted(self, site, loops=None):
        return [x for x in self.asked(site, loops) if self._has_mode(x[0])]

    def _has_mode(self, site: Site) -> bool:
        """Whether `modes` asks for the mode of a mark."""
        if self.modes is None or site.mode in map(without_order, self.modes):
            return True
        if site.modes:
            return False
        # `Append` needs the primals too: cotangents are put in their order.
        reducer = self.reducer(site.name)
        if reducer is None:
            return site.name in self.beside
        return not reducer.has_state

    def _left(self, site: Site) -> Site | None:
        """What is left of a mark for outer transformations. One of which only some
        iterations are returned is left as it is."""
        here = [one for one, at in self.asked(site, self.loops) if not is_some(at)]
        if all(one.key not in self.returned for one in here):
            return site
        if self.modes is None:
            return site.without(self.tag)
        return site.without_this_mode(self.tag)

    def with_reducers(self, found: Iterable[Found]) -> "Collect":
        """The same, in which a captured name that several equations mark, and that no
        reducer is given for, has `IfSeveral`. Captured names are not chosen by the
        user, so that they need not differ."""
        reduce = self.reduce.value
        if isinstance(reduce, Reducer):
            return self
        pairs = [(x.site, one) for x in found for one, _ in self.asked(x.site, x.loops)]
        by_user = {one.name for site, one in pairs if site.note is None}
        each = dict(reduce or {})
        for (name, *_), n in Counter(one.key for _, one in pairs).items():
            if n > 1 and name not in by_user:
                each.setdefault(name, _IF_SEVERAL)
        return dc.replace(self, reduce=SameParts(each)) if each else self

    def with_primals(self, found: Iterable[Found]) -> "Collect":
        """The same, knowing of which names it takes the primals beside the modes that
        it is asked for."""
        if self.modes is None:
            return self
        found = list(found)
        wanted = frozenset(
            one.name
            for x in found
            if x.site.modes
            for one, _ in self.wanted(x.site, x.loops)
        )
        in_loops = frozenset(
            one.name
            for x in found
            if (any(map(is_of_unknown_length, x.eqns)) and x.site.modes)
            or (in_loop_of_backward_pass(x.eqns) and not x.site.modes)
            for one, _ in self.asked(x.site, x.loops)
        )
        return dc.replace(self, beside=wanted & in_loops)

    def reducer(self, name: str) -> Reducer | None:
        reduce = self.reduce.value
        return reduce.get(name) if isinstance(reduce, Mapping) else reduce

    def reduces(self, site: Site) -> bool:
        """Whether a reducer may say what becomes of several executions."""
        return any(self.reducer(one.name) for one, _ in self.asked(site))

    def keeps_order(self, found: Iterable[Found]) -> bool:
        """Whether the values of each name are taken in the order of its marks. Of a
        single iteration, they leave a loop before those that are stacked."""
        return not any(at for x in found for _, at in self.asked(x.site, x.loops))

    def with_executions(
        self, entries: Sequence[Entry], found: Iterable[Found], of: Iterable[Any]
    ) -> list[Entry]:
        """The entries with `Execution.of`, which is given for each of the marks that
        are `found`. Each of these is an execution, so that it has an entry of its own.
        """
        by_key: dict[Any, list[Any]] = {}
        for x, executions in zip(found, of):
            for one, _ in self.asked(x.site, x.loops):
                by_key.setdefault(one.key, []).append(executions)
        return [
            dc.replace(e, site=e.site._replace(execution=Execution(executions)))
            for key, group in grouped(entries).items()
            for e, executions in zip(group, by_key[key], strict=True)
        ]

    def folds(self, name: str) -> bool:
        """Whether a reducer with a state says what becomes of the name. The state goes
        through loops as part of `Given.carry`."""
        reducer = self.reducer(name)
        return reducer is not None and reducer.has_state

    def sow(self, found, given, site: Site, atoms, frame: Frame):
        if site.tag != self.tag:
            leave(self, site, atoms, frame)
            return given
        atoms = leave(self, self._left(site), atoms, frame)
        wanted = self.wanted(site, self.loops)
        if wanted:
            check_guarded(site)
        for one, at in () if site.execution.again else wanted:
            transform = of_one(self.transform.value, site, one)
            here = reached(at, given.iterations) if is_some(at) else None
            new = _Marked(one, atoms, transform, at, here)
            if self.folds(one.name):
                given = self._fold(given, new, frame)
            else:
                found.append(new)
                frame.want(atoms)
        return given

    def _fold(self, given: Given, new: _Marked, frame: Frame) -> Given:
        """One more execution for a reducer, whose state goes through the loops
        around."""
        key = new.site.key
        reducer: Any = self.reducer(new.site.name)
        old = given.carry[key]
        entry = _entry.captured(new.site, new.read(frame), new.transform, new.at)
        how = "fills" if key in self.filled else "next"
        states = {key: _state.stepped(reducer, old, entry, new.here, how)}
        for other in () if new.site.modes else self.filled:
            if other[0] == new.site.name:
                old = given.carry[other]
                states[other] = _state.stepped(reducer, old, entry, new.here, "opens")
        return given._replace(carry={**given.carry, **states})

    def end_jaxpr(self, found, frame: Frame) -> Entries:
        def pair(x):
            if not isinstance(x, _Marked):
                return x, _entry.FINISHED
            return _entry.unfinished(x.site, x.read(frame), x.at), x.transform

        return gather(map(pair, found), lambda name: self.reducer(name) is not None)

    def check_iterations(self, asked: Iterable[tuple[Site, Any]]) -> None:
        """Raises if a derivative that comes back would be that of another iteration
        than the value."""
        for site, _ in asked:
            if not site.execution.apart or self.folds(site.name):
                continue
            if site.key in self.returned:
                raise SowError(
                    f"The {site.mode} of {site.said} is computed in a loop of the "
                    "backward pass, and eqx_sow cannot tell which iteration of it "
                    "belongs to the value that comes back. (The last value may be that "
                    "of a branch that is not differentiated.) If several branches mark "
                    f"it, give the marks different names. Or look at every {site.mode} "
                    f"with `eqx_sow.tap` or `eqx_sow.Fold`, or leave the {site.mode} "
                    "out, by `modes`."
                )

    def with_rows(self, found: Iterable[Found], of: Iterable[Any]) -> "Collect":
        """The same, knowing which rows of a `Buffer` a value opens. Raises if the rows
        of a value and of its derivatives would not belong together."""
        have_rows = any(r and r.lead for r in self._reducers)
        if not have_rows:
            return self
        by_key: dict[Any, list[Row]] = {}
        for x, executions in zip(found, of):
            if not x.site.execution.again and x.way is not None:
                for one, at in self.asked(x.site, x.loops):
                    row = Row(x._replace(site=one), executions, at)
                    by_key.setdefault(one.key, []).append(row)
        filled = set()
        for key, rows in by_key.items():
            reducer = self.reducer(key[0])
            values = by_key.get((key[0], "primal", ()), [])
            is_derivative = bool(rows[0].found.site.modes)
            if reducer is None or not reducer.lead or not (is_derivative and values):
                continue
            both = [self._has_mode(some[0].found.site) for some in (values, rows)]
            # Of single iterations, rows are not many.
            if all(both) and not any(x.at for x in (*values, *rows)):
                if values_open_rows(values, rows):
                    filled.add(key)
        return dc.replace(self, filled=frozenset(filled))

    def started(
        self, found: Sequence[Found], survey: Callable[[Handler], Entries]
    ) -> dict[Any, _state.ReducerState]:
        """The states of all reducers before the first execution of the marks that are
        `found`. `survey` looks at what a handler finds in the program."""
        have_state = any(r and r.has_state for r in self._reducers)
        if not have_state or not any(self.needs_order(x.site) for x in found):
            return {}
        by_key = _entry.grouped(survey(dc.replace(self, reduce=EACH_PLACE)))
        for (name, *_), derivatives in by_key.items():
            reducer = self.reducer(name)
            values = by_key.get((name, "primal", ()), [])
            if reducer is not None and reducer.lead and values:
                if self._has_mode(values[0].site):
                    _check_side_by_side(values, derivatives)
        eqns = {one.name: x.eqns[-1] for one, x in self.everywhere(found)}
        states = {}
        for key, entries in by_key.items():
            reducer: Any = self.reducer(key[0])
            if self.folds(key[0]) and self._has_mode(entries[0].site):
                states[key] = _state.started(reducer, entries, eqns[key[0]])
        return states


def _check_side_by_side(values: Sequence[Entry], derivatives: Sequence[Entry]) -> None:
    """Raises if a value that is marked in several branches has a derivative in some of
    them only: in a `Buffer`, that would be in the row of another value."""
    have = frozenset().union(*[e.site.execution.of for e in derivatives])
    derivative = derivatives[0].site
    for site in [e.site for e in values]:
        if not (site.execution.of <= have or site.execution.of.isdisjoint(have)):
            raise SowError(
                f"`{site.name}` is kept in a `Buffer`. Several branches mark it, at "
                f"{site.where}, but it has a {derivative.mode} only at "
                f"{derivative.where}: elsewhere it does not depend on what is "
                "differentiated. So the rows of the two would not be of the same "
                "executions. Give the marks different names, or leave the "
                f"{derivative.mode} out, by `modes`."
            )
