"""What captured calls are called, given where their modules are: see `locating.py`.

The program stays as it is: the names are in the rows of its marks (`Program.marks`),
where they are like those of `sow`.

No two things share a name. In

    model = {"a": {"b": first}, "a/b": second}

keys are joined by slashes, so the places `("a", "b")` and `("a/b",)` would both be
`a/b`. Of such places, which are seldom, the first in the order of `jax.tree.leaves` is
written so, and the other one is `a/b#1`, and so is what is in it. This depends on the
model alone, not on what is called.

What is in no tree has a number behind that: the method `enc` of a module at `a`, beside
a key `"a.enc"`, is `a.enc#1`.
"""

import itertools as it
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import equinox as eqx

from .._errors import SowError
from .._mark.calls import NotedCall, Path
from .._mark.site import Label, Site
from .._mark.trees import numbered
from .._names import join, with_stars
from .._values.modes import without_order
from .._walk.sows import Way
from .locating import Locating
from .places import Places, root_of
from .visits import Visit, VisitedMark, Visits


# For a plain function, which would be taken for a predicate.
TO_CAPTURE_CALLS = (
    "To capture the calls of a function, decorate it with `jax.jit` where it is "
    "defined, or `sow` what it returns."
)


class Thing(NamedTuple):
    """What has a name: where it is; which entries of stacks, each as the keys in front
    and the index; which method of that, and what of a call; and the scope around."""

    path: Path
    indices: tuple[tuple[int, int], ...] = ()
    method: str = "__call__"
    what: tuple[str, ...] = ()
    scope: str = ""


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
        n = next(n for n in range(len(path), -1, -1) if path[:n] in self._keys)
        return (*self._keys[path[:n]], *path[n:])

    def add(self, name: str, thing: Thing) -> None:
        self._things[name].add(thing)

    def unique(self, name: str, thing: Thing) -> str:
        """The name; with a number, if something else has it."""
        there = self._written.get(name)
        own = None if there is None else Thing(there)
        if thing == own:
            return name
        others = sorted(x for x in self._things[name] if x != own)
        n = others.index(thing) + (there in self._places)
        every = (f"{name}#{k}" for k in it.count(1))
        free = (x for x in every if x not in self._written and x not in self._things)
        return next(it.islice(free, n - 1, None)) if n else name


class Naming:
    """Names the marks of one program, for the transformation at this depth."""

    def __init__(self, seen: Visits, places: Places, depth: int, marking: Any):
        self._marks = seen.marks
        self._depth = depth
        self._marking = marking
        self._classes, functions = marking.selected
        self._locating = Locating(seen, places, depth, functions)
        # All paths are known: variables have been looked at, if something is there.
        self._spelling = Spelling(it.chain(*places.everywhere.maps))
        # For messages: the modules that are called.
        self.seen: dict[str, type] = {}
        # The arguments and variables that have captured modules in them; and with
        # `scope=True`, those with modules in which there are marks.
        self.roots: dict[str, None] = {}
        self.roots_of_sows: dict[str, None] = {}

    def sites(self) -> dict[Way, Site]:
        """The sites that have new names."""
        found = {}
        for way, mark in self._marks.items():
            site = mark.site
            mine = [x for x in site.labels if x.name is None and x.depth == self._depth]
            if not (mine if site.note else self._marking.scope and not site.scoped):
                continue
            paths = list(dict.fromkeys(map(self._keys, mark.visits)))
            thing, starred = None, ((), ())
            if paths:
                n_keys = self._locating.keys_to_stacks(mark)
                starred = with_stars(paths[0], n_keys)
                if site.note:
                    thing = self._thing(mark, starred[0])
                    self._spelling.add(*thing)
            found[way] = site, mine, paths, *starred, thing
        return {way: self._named(*of_mark) for way, of_mark in found.items()}

    def _keys(self, visit: Visit) -> Path:
        """The path of a module with the indices, as it is written: `blocks/2/attn` for
        `blocks/attn`."""
        path, indices = self._locating.at(visit)
        keys = self._spelling.keys(path)
        for index in reversed(indices):
            keys = (*keys[: index.at], str(index.cut.i), *keys[index.at :])
        return keys

    def _thing(self, mark: VisitedMark, path: Path) -> tuple[str, Thing]:
        """What a mark of a call is of, and the name that it would have."""
        note = mark.site.note
        assert note is not None
        place, indices = self._locating.at(mark.visits[0])
        entries, method = tuple((x.at, x.cut.i) for x in indices), note.call.method
        thing = Thing(place, entries, method, note.what, note.scope)
        own = () if method == "__call__" else (method,)
        name = ".".join(("/".join(path), *own, *note.what))
        return join(note.scope, name or "."), thing

    def _named(
        self,
        site: Site,
        mine: list[Label],
        paths: list[Path],
        path: Path,
        places: tuple[int | None, ...],
        thing: tuple[str, Thing] | None,
    ) -> Site:
        """The site of a mark, with its names in the place of those labels that are
        `mine`. `paths` are those of the modules that it may be of, and `path` is the
        first of them, with stars at these `places`. `thing` is what one of a call is
        of."""
        note, modes = site.note, self._marking.modes
        is_asked_for = modes is None or site.mode in map(without_order, modes)
        if is_asked_for and (len(paths) > 1 or note and not paths):
            calls = map(repr, map("/".join, paths) if paths else [note and note.call])
            raise SowError(
                f"eqx_sow cannot tell which module a {site.mode} at {site.where} "
                f"belongs to: it may be that of {' or '.join(calls)}. Differentiate "
                "each call by itself, mark the value with `sow`, or leave this mode "
                "out, by `modes`."
            )
        if note is None and paths:
            self.roots_of_sows["/".join(root_of(path))] = None
            site = site.in_scope("/".join(path))._replace(scoped=True)
            labels = tuple(x._replace(places=places) for x in site.labels)
            return site._replace(labels=labels)
        if note is None:
            return site
        others = tuple(x for x in site.labels if x not in mine)
        if thing is None or not (note.is_sow or self._chooses(note.call, path)):
            return site._replace(labels=others)
        new = Label("", mine[0].tag, self._depth, places).in_scope(note.scope)
        new = new._replace(name=self._spelling.unique(*thing))
        self.roots["/".join(filter(None, (note.scope, *root_of(path))))] = None
        return site._replace(labels=(new, *others))

    def _chooses(self, call: NotedCall, path: Path) -> bool:
        capture, name = self._marking.capture, "/".join(path) or "."
        if call.is_function:
            return True
        self.seen.setdefault(name, call.cls)
        if self._classes is not None:
            by_class = tuple(c for c in self._classes if c is not object)
            return (
                issubclass(call.cls, by_class)
                or path[:1] not in self._locating.left_out
            )
        try:
            chosen = capture(name, call.outline)
            if eqx.is_array(chosen):
                raise TypeError("it returned an array")
            return bool(chosen)
        except (TypeError, AttributeError, ValueError, LookupError) as e:
            raise TypeError(
                f"`capture={capture!r}` failed for the module at {name!r}: {e}. A "
                "predicate receives the module with shapes in place of its arrays, "
                "whose values are not known yet. Return a bool: decide by the path, or "
                "by something static in the module, such as its type or its shapes. "
                f"{TO_CAPTURE_CALLS}"
            ) from e
