"""The handler of `save_intermediates`, and what it is asked to take."""

import dataclasses as dc
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .._arrays import differentiable_where
from .._errors import SowError
from .._mark.site import Site
from .._mark.static import SameParts
from .._values import entry as _entry, state as _state
from .._values.entry import Entry
from .._values.merge import duplicate, Entries, gather
from .._values.modes import labels, without_order
from .._values.reduce import Append, IfSeveral, Reducer
from .._walk.frame import Frame
from .._walk.handler import check_clear, check_guarded, Given, Handler, Taken
from .._walk.plan import Ask, NOTHING, Placed, planned, Wanted
from .._walk.runs import Run
from .._walk.sows import in_loop_of_backward_pass, is_of_unknown_length, Way
from .asked import Asked, function_for, is_some, layer_in, leave, reached
from .buffers import Buffered, values_open_rows


_APPEND, _IF_SEVERAL = Append(), IfSeveral()


class Take(NamedTuple):
    """What `Collect` does at a mark. There is a `reducer` only if it has a state. What
    is `returned` is not left to outer transformations."""

    transform: SameParts
    reducer: SameParts | None
    returned: bool
    # Of a value, the `Site.key`s of the derivatives for which it opens a row; of such a
    # derivative, whether it fills that row: see `stepped`.
    opens: frozenset[Any] = frozenset()
    fills: bool = False


class Slot(NamedTuple):
    """A value that is taken: its `Site.key`; the name that its marks have; and which
    run of that name it is. With `names="blocks/-2"`, there may be slots of the one key
    `blocks/-2` of marks that are `blocks/2` and `blocks/*`."""

    key: Any
    name: str
    run: Run


def numbers_of_runs(slots: Sequence[Slot]) -> list[int | None]:
    """Of each slot, which run it is of the name that it comes back under, in order of
    execution. Runs without a primal come last."""
    numbers: dict[str, dict[Any, int]] = defaultdict(dict)
    first = {s.name: i for i, s in reversed([*enumerate(slots)])}
    known = [s for s in slots if s.run.run is not None]
    values = [s for s in known if s.key[1] == "primal"]
    others = [s for s in known if s.key[1] != "primal"]
    others.sort(key=lambda s: (first[s.name], s.run.run))
    for s in (*values, *others):
        of_name = numbers[s.key[0]]
        of_name.setdefault((s.name, s.run.run), len(of_name))
    return [numbers[s.key[0]].get((s.name, s.run.run)) for s in slots]


@dc.dataclass(frozen=True)
class Taking:
    """The options that say what is taken."""

    # `None` asks for all.
    modes: tuple[str, ...] | None
    # A reducer for all names, or a dict of one for each.
    reduce: Any = None
    # The option of that name, or a dict of names to what it says of each.
    transform: Any = None
    # See `_with_primals`.
    beside: frozenset[str] = frozenset()
    # The `Site.key`s of what comes back.
    returned: frozenset[Any] = frozenset()

    @staticmethod
    def of(
        asked: Sequence[Asked],
        modes: tuple[str, ...] | None,
        reduce: Any,
        transform: Any,
    ) -> "Taking":
        """What options say, for a program in which this is asked for."""
        mode_of = labels(x.site.key for x in asked)
        returned = [k for k, m in mode_of.items() if modes is None or m in modes]
        taking = Taking(modes, reduce, transform, returned=frozenset(returned))
        return taking._with_reducers(asked)._with_primals(asked)

    @property
    def for_each_place(self) -> "Taking":
        """For a survey of the program: of each place that marks a name, its value."""
        return dc.replace(self, reduce=_APPEND)

    def _with_reducers(self, asked: Sequence[Asked]) -> "Taking":
        """These options, in which a captured name that several equations mark, and that
        no reducer is given for, has `IfSeveral`. Captured names are not chosen by the
        user, so that they need not differ."""
        if isinstance(self.reduce, Reducer):
            return self
        by_user = {x.site.name for x in asked if x.site.note is None}
        each = dict(self.reduce or {})
        for (name, *_), n in Counter(x.site.key for x in asked).items():
            if n > 1 and name not in by_user:
                each.setdefault(name, _IF_SEVERAL)
        return dc.replace(self, reduce=each)

    def _with_primals(self, asked: Iterable[Asked]) -> "Taking":
        """These options, with the primals `beside` the modes that are asked for: of
        names that have a derivative in a `while_loop`, or a primal in a loop of a
        backward pass. What a derivative belongs to does not depend on `modes`."""
        if self.modes is None:
            return self
        derivatives, in_loops = set(), set()
        for mark, site, _ in asked:
            if site.modes and self.has_mode(site):
                derivatives.add(site.name)
            if (
                any(map(is_of_unknown_length, mark.eqns))
                if site.modes
                else in_loop_of_backward_pass(mark.eqns)
            ):
                in_loops.add(site.name)
        return dc.replace(self, beside=frozenset(derivatives & in_loops))

    def with_several_runs(self, asked: Iterable[Asked]) -> frozenset[str]:
        """The names of marks of which there may be several runs."""
        names = {(x.mark.site.name, x.site.name) for x in asked}
        return frozenset(whole for whole, one in names if self.reducer(one))

    def _filled(
        self, asked: Iterable[Asked], runs: Mapping[Way, Run]
    ) -> frozenset[Any]:
        """The `Site.key`s of derivatives for which the value opens rows in a `Buffer`,
        which they fill. Raises if the rows of a value and of its derivatives would not
        belong together."""
        if not self.has_rows:
            return frozenset()
        by_key: dict[Any, list[Buffered]] = defaultdict(list)
        for mark, site, at in asked:
            reducer, run = self.reducer(site.name), runs[mark.way]
            has_rows = reducer is not None and reducer.lead and self.has_mode(site)
            if has_rows and not run.again and mark.holder is None:
                buffered = Buffered(mark._replace(site=site), run, at)
                by_key[site.key].append(buffered)
        filled = set()
        for key in by_key:
            of_value = key[0], "primal", ()
            has_value = key != of_value and of_value in by_key
            if has_value and values_open_rows(by_key[of_value], by_key[key]):
                filled.add(key)
        return frozenset(filled)

    @property
    def has_rows(self) -> bool:
        """Whether anything is kept in a `Buffer`."""
        return any(r and r.lead for r in self._reducers)

    def reducer(self, name: str) -> Reducer | None:
        reduce = self.reduce
        return reduce.get(name) if isinstance(reduce, Mapping) else reduce

    def folds(self, name: str) -> bool:
        """Whether a reducer with a state says what becomes of the name. The state goes
        through loops as part of `Given.carry`."""
        reducer = self.reducer(name)
        return reducer is not None and reducer.has_state

    def has_mode(self, site: Site) -> bool:
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

    def plan(
        self,
        asked: Sequence[Asked],
        runs: Mapping[Way, Run],
    ) -> tuple[Placed, Sequence[Slot]]:
        """The plan of the program, by which what is asked for is taken, and the slots
        in there."""
        filled = self._filled(asked, runs)
        # In many calls of one function, the sites are the same.
        takes: dict[int, Take | None] = {}
        numbers: dict[Any, int] = {}
        rows: dict[Way, Wanted] = {}
        slots: list[Slot] = []
        for mark, site, at in asked:
            if id(site) not in takes:
                takes[id(site)] = self._take(mark.site, site, filled)
            take, run = takes[id(site)], runs[mark.way]
            if take is None:
                continue
            check_clear(site, run.again)
            slot = NOTHING
            if not run.again:
                # Of what is not known, each mark is a value of its own.
                alone = mark.way if run.run is None else None
                name = mark.site.name
                value = name, site.key, run.run, alone
                slot = numbers.setdefault(value, len(numbers))
                if slot == len(slots):
                    slots.append(Slot(site.key, name, run))
                else:
                    of_all = run._replace(of=slots[slot].run.of | run.of)
                    slots[slot] = Slot(site.key, name, of_all)
            row = rows.setdefault(mark.way, Wanted(mark, [], run.backward))
            row.asks.append(Ask(slot, site.labels, at, take))

        def are_apart(derivative: int, value: int) -> bool:
            (name, mode, _), _, run = slots[derivative]
            (other, of_mode, _), _, of_value = slots[value]
            is_pair = name == other and mode != of_mode == "primal"
            return is_pair and bool(run.of) and run.of.isdisjoint(of_value.of)

        return planned(rows.values(), are_apart), slots

    def _take(self, whole: Site, site: Site, filled: Collection[Any]) -> Take | None:
        """What is done at a mark, the `whole`, which is asked for as `site`. `filled`:
        see `_filled`."""
        if not self.has_mode(site):
            return None
        transform = function_for(self.transform, whole.name, site.name)
        folds = self.folds(site.name)
        opens = [] if site.modes else [k for k in filled if k[0] == site.name]
        return Take(
            transform,
            SameParts(self.reducer(site.name)) if folds else None,
            site.key in self.returned,
            frozenset(opens),
            site.key in filled,
        )

    @property
    def _reducers(self) -> Iterable[Reducer | None]:
        reduce = self.reduce
        return reduce.values() if isinstance(reduce, Mapping) else (reduce,)

    @property
    def cacheable(self) -> bool:
        has_state = any(r and r.has_state for r in self._reducers)
        return self.transform is None and not has_state

    def check_iterations(self, asked: Iterable[Asked], runs: Mapping[Way, Run]) -> None:
        """Raises if a derivative that comes back would be that of another iteration
        than the value."""
        for mark, site, _ in asked:
            if not runs[mark.way].apart or self.folds(site.name):
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

    def duplicate(
        self, asked: Iterable[Asked], runs: Mapping[Way, Run]
    ) -> SowError | None:
        """The error, if a name has several values, and no reducer says what becomes of
        them."""
        if isinstance(self.reduce, Reducer):
            return None
        first: dict[Any, tuple[Asked, Any]] = {}
        for x in asked:
            run = runs[x.mark.way]
            skip = run.again or self.reducer(x.site.name) is not None
            if skip or not self.has_mode(x.site):
                continue
            value = x.mark.site.name, run.run
            other, its_value = first.setdefault(x.site.key, (x, value))
            if other is not x and (run.run is None or value != its_value):
                a, b = other.mark.in_backward_pass, x.mark.in_backward_pass
                return duplicate(other.site, x.site, late=b and not a)
        return None

    def started(
        self,
        asked: Sequence[Asked],
        survey: Callable[[], tuple[Entries, Sequence[Slot]]],
    ) -> dict[Any, _state.ReducerState]:
        """The states of all reducers before the first execution. `survey` looks at what
        there is `for_each_place`."""
        if not any(self.folds(x.site.name) and self.has_mode(x.site) for x in asked):
            return {}
        entries, slots = survey()
        by_key = _entry.grouped(entries)
        for (name, *_), derivatives in by_key.items():
            reducer = self.reducer(name)
            values = by_key.get((name, "primal", ()), [])
            if reducer is not None and reducer.lead and values:
                if self.has_mode(values[0].site):
                    _check_side_by_side(values, derivatives, slots)
        eqns = {x.site.name: x.mark.eqns[-1] for x in asked}
        states = {}
        for key, of_key in by_key.items():
            reducer: Any = self.reducer(key[0])
            if self.folds(key[0]) and self.has_mode(of_key[0].site):
                states[key] = _state.started(reducer, of_key, eqns[key[0]])
        return states

    def results(
        self, carry: Mapping[Any, _state.ReducerState], taken: Taken
    ) -> list[Entry]:
        """What the reducers made of their states, in the order of the `carry` that they
        began with: JAX has sorted the keys of what was `taken`."""
        reducer: Any = self.reducer
        return [_state.result_of(reducer(key[0]), taken.carry[key]) for key in carry]


def in_order(
    asked: Sequence[Asked], runs: Mapping[Way, Run]
) -> Mapping[str, Sequence[int]]:
    """All names, in order of execution, and where in that order the marks of each are:
    of primals, without those that are repeated."""
    when: dict[str, list[int]] = {}
    for i, (mark, site, _) in enumerate(asked):
        of_name = when.setdefault(site.name, [])
        of_name += [] if site.modes or runs[mark.way].again else [i]
    return when


def _check_side_by_side(
    values: Sequence[Entry], derivatives: Sequence[Entry], slots: Sequence[Slot]
) -> None:
    """Raises if a value that is marked in several branches has a derivative in some of
    them only: in a `Buffer`, that would be in the row of another value."""
    of = lambda e: slots[e.slot].run.of
    have = frozenset().union(*map(of, derivatives))
    derivative = derivatives[0].site
    for e in values:
        if not (of(e) <= have or of(e).isdisjoint(have)):
            site = e.site
            raise SowError(
                f"`{site.name}` is kept in a `Buffer`. Several branches mark it, at "
                f"{site.where}, but it has a {derivative.mode} only at "
                f"{derivative.where}: elsewhere it does not depend on what is "
                "differentiated. So the rows of the two would not be of the same "
                "executions. Give the marks different names, or leave the "
                f"{derivative.mode} out, by `modes`."
            )


class _Marked(NamedTuple):
    """A mark that `Collect` came by. Its operands are variables of the jaxpr, which are
    read all at once when that has been walked."""

    site: Site
    operands: Sequence[Any]
    ask: Ask
    # Whether the walk is in the iteration that is asked for, if not in all.
    here: Any

    @property
    def transform(self) -> Any:
        return self.ask.action.transform.value

    def read(self, frame: Frame) -> Sequence[Any]:
        operands = frame.read_arrays(self.operands)
        if self.here is None or self.transform is None:
            return operands
        return [differentiable_where(self.here, x) for x in operands]


@dc.dataclass(frozen=True, kw_only=True)
class Collect(Handler):
    """Takes the values of marks. Its actions are `Take`."""

    tag: Any
    has_outer: bool
    cacheable: bool
    # Whether the marks of all modes are taken: then none of their derivatives is left
    # to outer transformations.
    all_modes: bool

    def needs_iteration(self, ask):
        if ask.at or not self.needs_order(ask):
            return bool(ask.at)
        # A reducer has a state for each layer.
        return is_some(ask.label.places) or ask.action.reducer.value.needs_iteration

    def needs_order(self, ask):
        return ask.action.reducer is not None

    def sow(self, found, given, site: Site, asks, atoms, frame: Frame):
        atoms = leave(self, self._left(site, asks), atoms, frame)
        for ask in asks:
            seen = ask.seen(site)
            check_guarded(seen)
            if ask.slot == NOTHING:
                continue
            here = reached(ask.at, given.iterations) if is_some(ask.at) else None
            new = _Marked(seen, atoms, ask, here)
            if ask.action.reducer is not None:
                given = self._fold(given, new, frame)
            else:
                found.append(new)
                frame.want(atoms)
        return given

    def _left(self, site: Site, asks: Sequence[Ask]) -> Site | None:
        """What is left of a mark for outer transformations. One of which only some
        iterations are returned is left as it is."""
        if not any(ask.action.returned and not is_some(ask.at) for ask in asks):
            return site
        if self.all_modes:
            return site.without(self.tag)
        return site.without_this_mode(self.tag)

    def _fold(self, given: Given, new: _Marked, frame: Frame) -> Given:
        """One more execution for a reducer, whose state goes through the loops
        around."""
        action, carry = new.ask.action, given.carry
        entry = _entry.captured(new.site, new.read(frame), new.transform, new.ask.at)
        iteration = given.iterations
        layer = layer_in(new.ask.at, new.ask.label, iteration)
        place = layer, iteration, new.here
        step = lambda key, how: _state.stepped(
            action.reducer.value, carry[key], entry, *place, how
        )
        key = new.site.key
        states = {key: step(key, "fills" if action.fills else "next")}
        states |= {other: step(other, "opens") for other in action.opens}
        return given._replace(carry={**carry, **states})

    def end_jaxpr(self, found, frame: Frame) -> Entries:
        def pair(x):
            if not isinstance(x, _Marked):
                return x, _entry.FINISHED
            ask, operands = x.ask, x.read(frame)
            return _entry.unfinished(x.site, operands, ask.at, ask.slot), x.transform

        return gather(map(pair, found))
