"""The handler of `save_intermediates`."""

import dataclasses as dc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu

from .. import _compat
from .._mark.site import Located, Site
from .._mark.static import Const, Same
from .._names import lookup, matches
from .._values import entry as _entry, merge as _merge, reduce as _reduce
from .._values.entry import Entry
from .._values.reduce import Append, Reducer
from .._walk.find import sites
from .._walk.frame import Frame
from .._walk.handler import Handler, Taken
from .._walk.refuse import check_guarded, is_solver, OVER_AND_OVER, unsupported


@dc.dataclass(frozen=True)
class Check:
    """A sow with an annotation, and what the leaves there look like."""

    site: Site
    spec: Const
    shapes: tuple[Any, ...]


@jtu.register_dataclass
@dc.dataclass(frozen=True)
class Sown:
    """`Taken.rest` of `Collect`. `hidden`: names that run where no value can be had,
    and what to say of it unless they run elsewhere too."""

    entries: tuple[Entry, ...] = ()
    seen: tuple[str, ...] = dc.field(default=(), metadata=dict(static=True))
    checks: tuple[Check, ...] = dc.field(default=(), metadata=dict(static=True))
    hidden: tuple[tuple[str, str], ...] = dc.field(
        default=(), metadata=dict(static=True)
    )


class _Captured(NamedTuple):
    """A sow that is captured. `conditional`: it has a count, though its guards may be
    gone."""

    site: Site
    operands: Sequence[Any]
    transform: Any
    checks: tuple[Check, ...]
    guards: Located
    conditional: bool = False


@dc.dataclass(frozen=True)
class Collect(Handler):
    """Takes the values of all sows of one tag.

    The options are wrapped, which makes them hashable. Sows of other tags
    stay in the program if `outer`, which is when somebody further out may want them.
    With `survey`, nothing is reduced over loops: that shows what there is to reduce.
    `backward` is true inside of a backward pass: what runs there again ran before, in
    the forward pass, if it is one of `ran`.
    """

    tag: Any
    names: Const
    modes: tuple[str, ...] | None
    reduce: Same
    transform: Same
    outer: bool
    survey: bool = False
    backward: bool = False
    ran: frozenset[Any] = frozenset()

    @property
    def lasting(self):
        return self.reduce.value is None and self.transform.value is None

    def wants(self, site):
        names = self.names.value
        return site.tag == self.tag and (names is None or matches(names, site.name))

    def ordered(self, site):
        return self.folds(site.name)

    def leaves(self, eqn):
        return self.outer and all(s.tag != self.tag for s in sites(eqn))

    def within(self, eqn):
        if self.backward or not _compat.in_backward_pass(eqn):
            return self
        return dc.replace(self, backward=True)

    def has(self, mode: str) -> bool:
        """Whether this mode, one of `labels`, is asked for."""
        return self.modes is None or mode in self.modes

    def reducer(self, name: str) -> Reducer | None:
        return lookup(self.reduce.value, name)

    def reduces(self, name: str) -> bool:
        return isinstance(self.reducer(name), Reducer)

    def appends(self, name: str) -> bool:
        return isinstance(self.reducer(name), Append)

    def folds(self, name: str) -> bool:
        return not self.survey and _reduce.folds(self.reducer(name))

    def sow(self, found, given, site: Site, atoms, frame: Frame):
        if site.tag != self.tag:
            if self.outer:
                frame.leave(frame.eqn)
            else:
                frame.alias(atoms)
            return given
        frame.alias(atoms)
        if not self.wants(site):
            found.append(_seen(site))
            return given
        check_guarded(site)
        checks = _checks(site, atoms) if site.spec is not None else ()
        transform = lookup(self.transform.value, site.name)
        replay = self.backward or _compat.in_backward_pass(frame.eqn)
        if replay:
            site = site._replace(replay=True)
        chosen = self.modes is None or site.mode in map(_plain, self.modes)
        # The order of cotangents goes by that of the primals.
        chosen = chosen or (not site.modes and self.appends(site.name))
        folds = self.folds(site.name)
        if folds or not chosen:
            found.append(_seen(site, checks))
        if not chosen or (folds and replay and site.key in self.ran):
            return given
        if folds:
            entry = _entry.from_site(site, frame.read(atoms), transform)
            state = _reduce.step(self.reducer(site.name), given.carry[site.key], entry)
            given = given._replace(carry={**given.carry, site.key: state})
        else:
            frame.keep(atoms)
            guards = ()
            if site.guards:
                guards = tuple((*g, frame.root(v)) for g, v in zip(site.guards, atoms))
            found.append(_Captured(site, atoms, transform, checks, guards))
        return given

    def without_rule(self, found, eqn):
        if not is_solver(eqn):
            return super().without_rule(found, eqn)
        # Who solves evaluates the function elsewhere too.
        wanted = filter(self.wants, sites(eqn))
        hidden = tuple((s.name, unsupported(s, eqn, OVER_AND_OVER)) for s in wanted)
        found.append(Taken(rest=Sown(hidden=hidden)))

    def join(self, found, given, frame: Frame) -> Taken:
        entries: list[Entry | None] = []
        places: dict[Any, list[int]] = {}
        seen: dict[str, None] = {}
        checks: dict[Check, None] = {}
        hidden: dict[Any, None] = {}
        atoms = [v for x in found if isinstance(x, _Captured) for v in x.operands]
        arrays = iter(frame.read_arrays(atoms))
        for i, x in enumerate(found):
            if isinstance(x, _Captured):
                values = [next(arrays) for _ in x.operands]
                found[i] = x._replace(operands=values)
        for item in _chosen(found, frame.execution):
            if isinstance(item, _Captured):
                entry = _entry.from_site(item.site, item.operands, item.transform)
                if item.guards:
                    entry = dc.replace(entry, guards=(item.guards,))
                if item.conditional:
                    entry = _entry.with_count(entry)
                self._add(entries, places, entry, frame)
                seen[item.site.name] = None
                checks.update(dict.fromkeys(item.checks))
                continue
            sown = item.rest
            for entry in sown.entries:
                self._add(entries, places, entry, frame)
            seen.update(dict.fromkeys(sown.seen))
            checks.update(dict.fromkeys(sown.checks))
            hidden.update(dict.fromkeys(sown.hidden))
        flat = tuple(
            _merge.relocated(e, frame.place) if e.guards else e
            for e in entries
            if e is not None
        )
        sown = Sown(flat, tuple(seen), tuple(checks), tuple(hidden))
        return Taken(given.carry, sown)

    def _add(self, entries: list, places: dict, new: Entry, frame: Frame) -> None:
        """Adds an entry. `places` tells where those of its name and mode are."""
        same = places.setdefault(new.site.key, [])
        first = entries[same[0]] if same else new
        if first.site.replay != new.site.replay:
            if new.site.replay:
                return
            for i in same:
                entries[i] = None
            same.clear()
        for i in same if new.guards else ():
            if _merge.exclusive(entries[i], new, frame.execution):
                entries[i] = _merge.merge(entries[i], new)
                return
        # Two that a backward pass runs again: the one execution may be still to come.
        if same and not (new.site.replay or self.reduces(new.site.name)):
            raise _merge.duplicate(first.site, new.site)
        same.append(len(entries))
        entries.append(new)

    def enter(self, rest: Sown, operand) -> Sown:
        return self._map(rest, lambda e: _merge.relocated(e, operand))

    def stack(self, rest: Sown, length: int) -> Sown:
        return self._map(rest, lambda e: _entry.stacked(e, length))

    def spread(self, rest: Sown, axes, varying):
        pairs = [_entry.on_device(e, axes, varying) for e in rest.entries]
        entries, specs = zip(*pairs) if pairs else ((), ())
        return dc.replace(rest, entries=entries), dc.replace(rest, entries=specs)

    def _map(self, rest: Sown, fn) -> Sown:
        return dc.replace(rest, entries=tuple(map(fn, rest.entries)))

    def branch(self, rests: Sequence[Sown]):
        slots = [_slots(r.entries) for r in rests]
        keys = dict.fromkeys(k for s in slots for k in s)
        targets = {k: _merge.unify([s[k] for s in slots if k in s]) for k in keys}
        seen = tuple(dict.fromkeys(n for r in rests for n in r.seen))
        checks = tuple(dict.fromkeys(c for r in rests for c in r.checks))
        hidden = tuple(dict.fromkeys(h for r in rests for h in r.hidden))

        def to_one_form(rest: Sown) -> Sown:
            mine = _slots(rest.entries)
            entries = tuple(
                _merge.conform(mine[k], target) if k in mine else _merge.zeros(target)
                for k, target in targets.items()
            )
            return Sown(entries, seen, checks, hidden)

        return to_one_form

    def empty(self, rest: Sown) -> Sown:
        return self._map(
            self._leave_loop(rest), lambda e: _merge.zeros(_merge.unify([e]))
        )

    def _leave_loop(self, rest: Sown) -> Sown:
        return self._map(rest, _entry.left_loop)

    def again(self, old: Sown, new: Sown) -> Sown:
        new = self._leave_loop(new)
        entries = tuple(
            _merge.latest(o, _merge.conform(n, o))
            for o, n in zip(old.entries, new.entries)
        )
        return dc.replace(old, entries=entries)


def _seen(site: Site, checks: tuple[Check, ...] = ()) -> Taken:
    return Taken(rest=Sown(seen=(site.name,), checks=checks))


def _checks(site: Site, atoms: Sequence[Any]) -> tuple[Check, ...]:
    shapes = [
        jax.ShapeDtypeStruct(site.shape(i, v.aval.shape), v.aval.dtype)
        for i, v in enumerate(atoms)
    ]
    assert site.spec is not None
    return (Check(site, site.spec, tuple(shapes[len(site.guards) :])),)


def _chosen(found: list[Any], execution: Callable[[Any], Any]) -> list[Any]:
    """What was found, with one sow where every branch of a cond has one of that
    name."""
    groups: dict[Any, list[int]] = {}
    # Beside one in a call, which of them belong together shows only further out.
    in_calls = {
        e.site.key
        for item in found
        if not isinstance(item, _Captured)
        for e in item.rest.entries
        if e.guards
    }
    for i, item in enumerate(found):
        if isinstance(item, _Captured) and item.guards:
            if item.site.key in in_calls:
                continue
            *outer, (cond, _, size, of) = item.guards
            key = item.site.key, *outer, cond, execution(of), size
            groups.setdefault(key, []).append(i)
    chosen: dict[int, Any] = {}
    for (*_, size), places in groups.items():
        branches = {found[i].guards[-1][1]: found[i] for i in places}
        if len(places) != size or sorted(branches) != list(range(size)):
            continue
        first, *others = cases = [branches[i] for i in range(size)]
        if any(_form(x) != _form(first) for x in others):
            continue
        site, operands = _merge.choose(
            [x.site for x in cases], [x.operands for x in cases]
        )
        checks = tuple(c for x in cases for c in x.checks)
        chosen.update(dict.fromkeys(places))
        chosen[places[0]] = _Captured(
            site, operands, first.transform, checks, first.guards[:-1], True
        )
    if not chosen:
        return found
    found = [chosen.get(i, x) for i, x in enumerate(found)]
    # What was chosen may be in a branch of another cond.
    return _chosen([x for x in found if x is not None], execution)


def _form(x: _Captured) -> Any:
    site = x.site
    values = [
        (site.shape(i, v.shape), v.dtype)
        for i, v in enumerate(x.operands)
        if i >= len(site.guards)
    ]
    axes = [a.kind for a in site.axes]
    return site.treedef, site.leaves, site.replay, axes, values


def _slots(entries: Sequence[Entry]) -> dict[Any, Entry]:
    """Entries by name, mode and how many of the same there were before; in a backward
    pass, how many there are after it."""
    places: dict[Any, list[Entry]] = {}
    for e in entries:
        places.setdefault(e.site.key, []).append(e)
    slots = {
        id(e): (key, i)
        for key, same in places.items()
        for i, e in enumerate(same[::-1] if is_backward(key) else same)
    }
    return {slots[id(e)]: e for e in entries}


def is_backward(key: Any) -> bool:
    return key[1].count("cotangent") % 2 == 1


def reductions(collect: Collect, survey: Sown) -> tuple[Collect, dict[Any, Any]]:
    """The handler, and the states to begin with, from a survey of the program."""
    by_key: dict[Any, list[Entry]] = {}
    for e in survey.entries:
        if collect.folds(e.site.name):
            by_key.setdefault(e.site.key, []).append(e)
    states = {
        key: _reduce.start(collect.reducer(key[0]), entries)
        for key, entries in by_key.items()
    }
    ran = frozenset(k for k, es in by_key.items() if not es[0].site.replay)
    return dc.replace(collect, ran=ran), states


def _plain(mode: str) -> str:
    while mode.startswith("primal."):
        mode = mode.removeprefix("primal.")
    return mode
