"""From what was captured to `intermediates[name][mode]`."""

from collections.abc import Iterable, Sequence
from typing import Any

from .._errors import SowError
from .._transforms.collect import Collect, is_backward, Sown
from .._walk.handler import Taken
from . import entry as _entry, merge as _merge, reduce as _reduce
from .entry import Entry


def assemble(
    collect: Collect, taken: Taken, order: Sequence[Any]
) -> dict[str, dict[str, Any]]:
    """`intermediates[name][mode]`, in order of execution; `order` is that of the keys
    that have a state."""
    sown: Sown = taken.rest
    values: dict[Any, Any] = {}
    counts: dict[str, Any] = {}
    places: dict[Any, list[Entry]] = {}
    named: dict[str, list[Entry]] = {}
    for e in sown.entries:
        places.setdefault(e.site.key, []).append(e)
        named.setdefault(e.site.name, []).append(e)
    for key, entries in places.items():
        append = collect.appends(key[0])
        if len(entries) > 1 and not append:
            raise _merge.duplicate(entries[0].site, entries[1].site)
        conditional = any([e.counted for e in entries])
        full: list[Any] = _in_order(key, named[key[0]]) if append else entries
        if conditional:
            full = [e and _entry.with_count(e) for e in full]
        full = [e and _entry.full(e) for e in full]
        value = tuple(e and _entry.value(e) for e in full)
        values[key] = value if append else value[0]
        if conditional:
            count = tuple(e and e.arrays[-1] for e in full)
            counts.setdefault(key[0], count if append else count[0])
    for key in order:
        state = taken.carry[key]
        reducer = collect.reducer(key[0])
        values[key], count = _reduce.finish(reducer, state)
        if state.conditional or isinstance(reducer, _reduce.Buffer):
            counts.setdefault(key[0], count)
    mode_of = labels(values)
    out: dict[str, dict[str, Any]] = {name: {} for name in sown.seen}
    for key, value in values.items():
        if collect.has(mode_of[key]):
            out[key[0]][mode_of[key]] = value
    for name, count in counts.items():
        if out[name]:
            out[name]["count"] = count
    return {name: modes for name, modes in out.items() if modes}


def _in_order(key: Any, entries: Sequence[Entry]) -> list[Entry | None]:
    """For `Append`, the entries of one key, from all of its name. Those of a backward
    pass, which goes first through what ran last, are put in the order of their
    primals."""
    mine = [e for e in entries if e.site.key == key]
    primals = [e for e in entries if not e.site.modes]
    if not is_backward(key) or not primals:
        return list(mine)
    order: list[Entry | None] = [None] * len(primals)
    # The primals whose cotangent is still to come, and the lines of their sows.
    waiting: list[tuple[int, set[str]]] = []
    unclear = len(mine) > 1 and any(len(e.guards) > 1 for e in mine)
    n = 0
    for e in entries:
        if not e.site.modes:
            if e.site.differentiated > key[2][0]:
                waiting.append((n, set(_merge.places(e.site))))
            n += 1
        elif e.site.key == key:
            lines = _merge.places(e.site)
            same = [w for w in waiting if not w[1].isdisjoint(lines)]
            if not same:
                unclear = True
                break
            order[same[-1][0]] = e
            waiting.remove(same[-1])
    if unclear or waiting:
        site = mine[0].site
        raise SowError(
            f"`{site.name}` is sown several times (one is at {site.where}): which "
            f"{site.mode} belongs to which primal cannot be told. Give the values "
            "different names."
        )
    return order


def labels(keys: Iterable[Any]) -> dict[Any, str]:
    """What to call the mode of each `Site.key`. Where a value was differentiated twice
    by one mode, the outer derivative is called `primal.cotangent`."""
    taken: set[tuple[str, str]] = set()
    found = {}
    for key in sorted(keys, key=lambda k: k[2]):
        name, label, _ = key
        while (name, label) in taken:
            label = f"primal.{label}"
        taken.add((name, label))
        found[key] = label
    return found
