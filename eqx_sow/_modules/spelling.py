"""How the places of modules are written, such that no two things share a name.

    model = {"a": {"b": first}, "a/b": second}

Keys are joined by slashes, so the places `("a", "b")` and `("a/b",)` would both be
`a/b`. Of such places, which are seldom, the first in the order of `jax.tree.leaves` is
written so, and the other one is `a/b#1`, and so is what is in it. This depends on the
model alone, not on what is called.

What is in no tree has a number behind that: the method `enc` of a module at `a`, beside
a key `"a.enc"`, is `a.enc#1`.
"""

import itertools as it
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from .._mark.calls import Path


class Thing(NamedTuple):
    """What has a name: where it is; which entries of stacks, each as the keys in front
    and the index; which method of that, and what of a call; and the scope around."""

    path: Path
    indices: tuple[tuple[int, int], ...] = ()
    method: str = "__call__"
    what: tuple[str, ...] = ()
    scope: str = ""


def numbered(path: Path, n: int) -> Path:
    """A path of which the last key has this number. 0 is none."""
    return (*path[:-1], type(path[-1])(f"{path[-1]}#{n}")) if n else path


class Spelling:
    """Spells the places of the modules in trees, and gives names to things, of which
    all have to be added before the first one gets its own."""

    def __init__(self, places: Iterable[Path]):
        self._places = dict.fromkeys(places)
        # The keys as they are written, and what begins with them.
        self._keys: dict[Path, Path] = {(): ()}
        self._written: dict[str, Path] = {}
        for path in self._places:
            for n in range(len(path)):
                if path[: n + 1] not in self._keys:
                    self._add(path[: n + 1])
        # By what would be its name.
        self._things: dict[str, set[Thing]] = defaultdict(set)

    def _add(self, path: Path) -> None:
        for n in it.count():
            keys = numbered((*self._keys[path[:-1]], path[-1]), n)
            if self._written.setdefault("/".join(keys), path) == path:
                break
        self._keys[path] = keys

    def keys(self, path: Path) -> Path:
        """The keys of a place, as they are written."""
        if path in self._keys:
            return self._keys[path]
        n = next(n for n in range(len(path), -1, -1) if path[:n] in self._keys)
        return (*self._keys[path[:n]], *path[n:])

    def add(self, name: str, thing: Thing) -> None:
        self._things[name].add(thing)

    def unique(self, name: str, thing: Thing) -> str:
        """The name; with a number, if something else has it."""
        there = self._written.get(name)
        is_there = lambda x: x.path == there and x[1:] == Thing(())[1:]
        if is_there(thing) or len(self._things[name]) == 1 and there is None:
            return name
        others = sorted(x for x in self._things[name] if not is_there(x))
        n = others.index(thing) + (there in self._places)
        every = (f"{name}#{k}" for k in it.count(1))
        free = (x for x in every if x not in self._written and x not in self._things)
        return next(it.islice(free, n - 1, None)) if n else name
