"""The handler of `save_intermediates`."""

import dataclasses as dc
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .._arrays import differentiable_where
from .._errors import SowError
from .._mark.site import Site
from .._mark.static import SameParts
from .._values import entry as _entry, state as _state
from .._values.entry import Entry
from .._values.merge import duplicate, Entries, gather
from .._values.modes import without_order
from .._values.reduce import Append, IfSeveral, Reducer
from .._walk.frame import Frame
from .._walk.handler import check_guarded, Given, Handler
from .._walk.plan import NOTHING, Slot, UNCLEAR
from .._walk.sows import Found, Way
from .asked import is_some, leave, of_one, reached, Selector


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
    here: Any
    slot: int | None

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
        # `Append` needs the primals too: cotangents are put in their order.
        reducer = self.reducer(site.name)
        return not site.modes and reducer is not None and not reducer.has_state

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

    def reducer(self, name: str) -> Reducer | None:
        reduce = self.reduce.value
        return reduce.get(name) if isinstance(reduce, Mapping) else reduce

    def reduces(self, site: Site) -> bool:
        """Whether a reducer may say what becomes of several executions."""
        return any(self.reducer(one.name) for one, _ in self.asked(site))

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
            check_guarded(site, frame.slot == UNCLEAR)
        for one, at in () if frame.slot == NOTHING else wanted:
            transform = of_one(self.transform.value, site, one)
            here = reached(at, given.iterations) if is_some(at) else None
            new = _Marked(one, atoms, transform, at, here, frame.slot)
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
        state = _state.stepped(reducer, old, entry, new.here)
        return given._replace(carry={**given.carry, key: state})

    def end_jaxpr(self, found, frame: Frame) -> Entries:
        def pair(x):
            if not isinstance(x, _Marked):
                return x, _entry.FINISHED
            read = x.read(frame)
            return _entry.unfinished(x.site, read, x.at, x.slot), x.transform

        return gather(map(pair, found), lambda name: self.reducer(name) is not None)

    def check_distinct(
        self, found: Iterable[Found], slots: Mapping[Way | None, Slot | int]
    ) -> None:
        """Raises if a name has several values, and no reducer says what becomes of
        them."""
        first: dict[Any, tuple[Site, Any]] = {}
        for x in found:
            slot = slots.get(x.way)
            for one, _ in self.wanted(x.site, x.loops):
                if slot == UNCLEAR:
                    check_guarded(one, True)
                if not isinstance(slot, Slot) or self.reducer(one.name) is not None:
                    continue
                site, other = first.setdefault(one.key, (one, slot))
                if other is not slot:
                    late = slot.in_backward_pass and not other.in_backward_pass
                    raise duplicate(site, one, late)

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
    have = frozenset().union(*[e.slot.of for e in derivatives if e.slot])
    derivative = derivatives[0].site
    for site, slot in [(e.site, e.slot) for e in values if e.slot]:
        if not (slot.of <= have or slot.of.isdisjoint(have)):
            raise SowError(
                f"`{site.name}` is kept in a `Buffer`. Several branches mark it, at "
                f"{site.where}, but it has a {derivative.mode} only at "
                f"{derivative.where}: elsewhere it does not depend on what is "
                "differentiated. So the rows of the two would not be of the same "
                "executions. Give the marks different names, or leave the "
                f"{derivative.mode} out, by `modes`."
            )
