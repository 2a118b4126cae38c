"""What one walk over a program, or a part of it, has found.

Each jaxpr yields one `Sown`. Those of its calls, loops and branches come in one by one,
and `gather` makes one of them, in order of execution.
"""

import dataclasses as dc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.tree_util as jtu

from .._mark.site import Site
from . import entry as _entry, merge as _merge
from .entry import Entry
from .modes import is_backward


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
    they run elsewhere too."""

    entries: tuple[Entry, ...] = ()
    seen: tuple[tuple[str, str | None], ...] = _static()
    checks: tuple[Check, ...] = _static()
    hidden: tuple[tuple[str, str], ...] = _static()

    def map(self, fn: Callable[[Entry], Entry]) -> "Sown":
        return dc.replace(self, entries=tuple(map(fn, self.entries)))


class Uncollected(NamedTuple):
    """A sow that is captured, once the jaxpr around it has been walked. Until then the
    `entry` has the operands of the sow."""

    entry: Entry
    transform: Any

    def as_sown(self) -> Sown:
        return Sown((_entry.captured(self.entry, self.transform),))


def gather(found: list[Sown | Uncollected], keeps_all: Callable[[str], bool]) -> Sown:
    """All that was found in a jaxpr, as one. `keeps_all` says of a name whether it may
    have several entries."""
    parts = [x.as_sown() if isinstance(x, Uncollected) else x for x in found]
    entries: list[Entry] = []
    of_key: dict[Any, list[int]] = {}
    for new in sorted((e for part in parts for e in part.entries), key=_of_primal):
        same = of_key.setdefault(new.site.key, [])
        for i in same if new.cases else ():
            if _merge.exclusive(entries[i], new):
                entries[i] = _merge.merge(entries[i], new)
                break
        else:
            if same and not keeps_all(new.site.name):
                raise _merge.duplicate(entries[same[0]].site, new.site)
            same.append(len(entries))
            entries.append(new)
    return _all_of(parts, entries)


def _of_primal(entry: Entry) -> Any:
    """Sorts what a backward pass, which runs backward, has found by its primals."""
    of = entry.site.of if is_backward(entry.site.mode) else ()
    return min(of, default=())


def _all_of(parts: Sequence[Sown], entries: Iterable[Entry]) -> Sown:
    def union(field: str) -> tuple:
        return tuple(dict.fromkeys(x for p in parts for x in getattr(p, field)))

    return Sown(tuple(entries), union("seen"), union("checks"), union("hidden"))


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
    """Entries by name, mode and how many of the same there were before."""
    return {
        (key, i): e
        for key, same in _entry.grouped(entries).items()
        for i, e in enumerate(same)
    }
