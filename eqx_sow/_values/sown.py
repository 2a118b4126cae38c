"""What one walk over a program, or a part of it, has found.

Each jaxpr yields one `Sown`. Those of its calls, loops and branches come in one by one,
and `gather` makes one of them, in order of execution.
"""

import dataclasses as dc
import itertools as it
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TYPE_CHECKING

import jax.tree_util as jtu

from .._frames import CallSite
from .._mark.site import Site
from . import entry as _entry, merge as _merge
from .entry import Entry, Path
from .modes import is_backward


if TYPE_CHECKING:
    from .._walk.frame import Frame


# In a path: a loop of unknown length, within which the path begins anew.
LOOP = object()


@dc.dataclass(frozen=True)
class Check:
    """A sow with an annotation, and what the leaves there look like."""

    site: Site
    shapes: tuple[Any, ...]


def _static(default: Any = ()) -> Any:
    return dc.field(default=default, metadata=dict(static=True))


@jtu.register_dataclass
@dc.dataclass(frozen=True)
class Sown:
    """`seen`: the names that there are, each with the modes of those that are selected.
    `hidden`: names that run where no value can be had, and what to say of it unless
    they run elsewhere too. `at`: which equation of the jaxpr around it this is from."""

    entries: tuple[Entry, ...] = ()
    seen: tuple[tuple[str, str | None], ...] = _static()
    checks: tuple[Check, ...] = _static()
    hidden: tuple[tuple[str, str], ...] = _static()
    at: int = _static(-1)

    def map(self, fn: Callable[[Entry], Entry]) -> "Sown":
        return dc.replace(self, entries=tuple(map(fn, self.entries)))


class Pending(NamedTuple):
    """A sow that is captured, once the jaxpr around it has been walked: what several
    branches of a cond sow is selected before it is transformed. Until then the `entry`
    has the operands of the sow. `conditional`: it has a count, though its guards may be
    gone."""

    entry: Entry
    transform: Any
    checks: tuple[Check, ...]
    at: int
    conditional: bool = False

    @property
    def seen(self) -> tuple[tuple[str, str | None], ...]:
        return ((self.entry.site.name, self.entry.site.mode),)

    def as_sown(self) -> Sown:
        entry = _entry.captured(self.entry, self.transform)
        if self.conditional:
            entry = _entry.with_count(entry)
        return Sown((entry,), self.seen, self.checks, at=self.at)


def gather(
    found: list[Sown | Pending], frame: "Frame", keeps_all: Callable[[str], bool]
) -> Sown:
    """All that was found in a jaxpr, as one. `keeps_all` says of a name whether it may
    have several entries."""
    parts = [
        x.as_sown() if isinstance(x, Pending) else x
        for x in _with_cases_chosen(found, frame.execution)
    ]
    places = _Places(frame, keeps_all)
    for part in parts:
        for entry in part.entries:
            places.add(entry, part.at)
    return _all_of(parts, places.entries)


def _all_of(parts: Sequence[Sown], entries: Iterable[Entry]) -> Sown:
    def union(field: str) -> tuple:
        return tuple(dict.fromkeys(x for p in parts for x in getattr(p, field)))

    return Sown(tuple(entries), union("seen"), union("checks"), union("hidden"))


@dc.dataclass
class _Places:
    """The entries of a jaxpr so far, in order of execution, and from which equation
    each of them is."""

    _frame: "Frame"
    _keeps_all: Callable[[str], bool]
    _all: list[tuple[Entry, int] | None] = dc.field(default_factory=list)
    _of_key: dict[Any, list[int]] = dc.field(default_factory=dict)

    @property
    def entries(self) -> list[Entry]:
        return [place[0] for place in self._all if place is not None]

    def _same(self, new: Entry) -> list[tuple[int, Entry, int]]:
        """Those of its name and mode."""
        places = [(i, self._all[i]) for i in self._of_key.get(new.site.key, ())]
        return [(i, *place) for i, place in places if place is not None]

    def add(self, new: Entry, at: int) -> None:
        same = self._same(new)
        for i, old, place in same:
            # The execution may come first, or what replays it.
            if _replays(new, old):
                self._all[i] = _as_often_differentiated(old, new), place
                return
            if _replays(old, new):
                new = _as_often_differentiated(new, old)
                self._all[i] = None
        same = self._same(new) if same else []
        for i, old, place in same if new.guards else ():
            if _merge.exclusive(old, new, self._frame.execution):
                self._all[i] = _merge.merge(old, new), place
                return
        self._check_duplicate(new, same)
        for i, old, place in same if is_backward(new.site.mode) else ():
            if place != at and not old.origins.isdisjoint(new.origins):
                # A backward pass goes first through what was called last.
                if not (self._in_one_pass(new, at, place) or _called_after(old, new)):
                    new = dc.replace(new, unordered=True)
                    self._all[i] = dc.replace(old, unordered=True), place
        self._of_key.setdefault(new.site.key, []).append(len(self._all))
        self._all.append((new, at))

    def _in_one_pass(self, new: Entry, at: int, earlier: int) -> bool:
        """Whether this part of a backward pass needs the result of an earlier one, and
        the executions, in their order, needed each other's: a function from `jax.vjp`
        may also be given what another one returned. Then it has residuals of an
        execution that came after those of the earlier one."""
        name, *_ = new.site.key
        ran = [
            place
            for old, place in filter(None, self._all)
            if old.site.name == name and not old.site.modes
            if not old.origins.isdisjoint(new.origins)
        ]
        frame = self._frame
        in_order = all(a == b or frame.depends(b, a) for a, b in it.pairwise(ran))
        last = lambda at: max((p for p in ran if frame.takes_from(at, p)), default=-1)
        return in_order and frame.depends(at, earlier) and last(at) <= last(earlier)

    def _check_duplicate(self, new: Entry, same: Sequence[Any]) -> None:
        # Two that may both replay the one execution, which is still to come.
        waits = new.replayed or any(old.replayed for _, old, _ in same)
        if same and not waits and not self._keeps_all(new.site.name):
            raise _merge.duplicate(same[0][1].site, new.site)


def is_replay_of(replayed: Path, path: Path) -> bool:
    """See `Entry.replayed`."""
    first, *_ = replayed
    if isinstance(first, str):
        return first in path and replayed[-1] is path[-1]
    return path[-len(replayed) :] == replayed


def _replays(new: Entry, old: Entry) -> bool:
    """Whether a derivative runs anew what ran before. A `bwd` that sows other values
    under the name has equations of its own, or calls a function from another place."""
    end = new.replayed
    return (
        end is not None
        and old.replayed is None
        and any(is_replay_of(end, path) for path in old.paths)
    )


def _called_after(a: Entry, b: Entry) -> bool:
    return all(
        isinstance(x[0], CallSite)
        and isinstance(y[0], CallSite)
        and x[0].is_after(y[0])
        for x in a.paths
        for y in b.paths
    )


def _as_often_differentiated(entry: Entry, replay: Entry) -> Entry:
    n = max(entry.site.differentiated, replay.site.differentiated)
    return dc.replace(entry, site=entry.site._replace(differentiated=n))


# --- conds of which all branches run ---
def _with_cases_chosen(
    found: list[Any], execution: Callable[[Any], Any]
) -> list[Sown | Pending]:
    """What was found, with one sow where every branch of a cond has one of that
    name."""
    # Beside one in a call, which of them belong together shows only further out.
    in_calls = {
        e.site.key for x in found if isinstance(x, Sown) for e in x.entries if e.guards
    }
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(found):
        entry = x.entry if isinstance(x, Pending) else None
        if entry is not None and entry.guards and entry.site.key not in in_calls:
            *outer, (cond, _, size, of) = entry.guards[0]
            key = entry.site.key, *outer, cond, execution(of), size
            groups.setdefault(key, []).append(i)
    chosen: dict[int, Any] = {}
    for (*_, size), places in groups.items():
        one = _chosen([found[i] for i in places], size)
        if one is not None:
            chosen.update(dict.fromkeys(places))
            chosen[places[0]] = one
    if not chosen:
        return found
    found = [chosen.get(i, x) for i, x in enumerate(found)]
    # What was chosen may be in a branch of another cond.
    return _with_cases_chosen([x for x in found if x is not None], execution)


def _chosen(cases: Sequence[Pending], size: int) -> Pending | None:
    """One sow from those in the branches of a cond, if each branch has one and they are
    of one form."""
    by_branch = {x.entry.guards[0][-1][1]: x for x in cases}
    if len(cases) != size or sorted(by_branch) != list(range(size)):
        return None
    cases = [by_branch[i] for i in range(size)]
    leaves = _merge.common_leaves([x.entry.site for x in cases])
    entries = [_merge.with_leaves(x.entry, leaves) for x in cases]
    if any(_form(e) != _form(entries[0]) for e in entries):
        return None
    checks = tuple(c for x in cases for c in x.checks)
    entry = _merge.choose(entries)
    return cases[0]._replace(entry=entry, checks=checks, conditional=True)


def _form(e: Entry) -> Any:
    return _merge.form(e), e.site.replay, [a.kind for a in e.site.axes]


# --- branches of which one runs ---
def to_one_form(parts: Sequence[Sown]) -> Callable[[Sown], Sown]:
    """For exclusive branches, as shapes: a function that brings each to one form."""
    slots = [_slots(p.entries) for p in parts]
    keys = dict.fromkeys(k for s in slots for k in s)
    targets = {k: _merge.unify([s[k] for s in slots if k in s]) for k in keys}
    whole = _all_of(parts, ())

    def bring(part: Sown) -> Sown:
        mine = _slots(part.entries)
        entries = tuple(
            _merge.conform(mine[k], target) if k in mine else _merge.zeros(target)
            for k, target in targets.items()
        )
        return dc.replace(whole, entries=entries)

    return bring


def _slots(entries: Sequence[Entry]) -> dict[Any, Entry]:
    """Entries by name, mode and how many of the same there were before; in a backward
    pass, how many there are after it."""
    slots = {
        id(e): (key, i)
        for key, same in _entry.grouped(entries).items()
        for i, e in enumerate(same[::-1] if is_backward(key[1]) else same)
    }
    return {slots[id(e)]: e for e in entries}
