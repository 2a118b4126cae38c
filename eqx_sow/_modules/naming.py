"""What captured calls are called: the place that their arrays come from.

    def f(model, x):                      # under a capture
        half = jax.tree.map(lambda a: a.astype("bfloat16"), model)
        return half.layers[0](x)          # a `Linear`, with arrays `weight` and `bias`

The edge of the call has the two arrays as operands. They come from the inputs at
`model/layers/0/weight` and `model/layers/0/bias`, with nothing computed on the way. The
path of the first one in the `Linear` is `weight`, so what is left is the name:
`model/layers/0`.

One pass over the program (`_walk/flow.py`) tells of each variable the inputs that it
comes from, and how much was computed between. It goes into a function that was traced
once for each of its calls, so each of them gets a name of its own. A derivative takes
the edge of its primal, and so its name. At the end, each sow is replaced by one with
its names (`_walk/sows.py`); from there on they are like those of `sow`.

An array may come from several places. `Naming._chosen` says which of them is preferred,
and `Naming._found` what a module is called to which no array leads.
"""

import dataclasses as dc
import itertools as it
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx

from .._errors import SowError
from .._mark.calls import Call, calls_around, Path
from .._mark.primitive import edge_p, same_p, sow_p
from .._mark.site import Label, Site
from .._values.modes import without_order
from .._walk.flow import Domain, Here
from .places import is_internal, Places, root_of
from .sources import computed, FAR, in_order, one_of, TRANSPOSED, Value, Way


class _Place(NamedTuple):
    """Where a module is. If that is not known, the first key is the name of a class:
    `("MLP#1", "layers", "0")`. `is_held`: it is somewhere, or has arrays of its own.
    `found`: the call whose arrays led there, which may be that of a module around, and
    where they did."""

    path: Path
    is_held: bool = True
    found: "tuple[_Visit, Path] | None" = None

    def inside(self, path: Path) -> "_Place":
        return self._replace(path=(*self.path, *path))

    @property
    def name(self) -> str:
        return "/".join(self.path)


class _Candidate(NamedTuple):
    """A place that a module may have, by one of its arrays, which is at `leaf` in the
    module and comes from `source`, and how much was computed between. `stacked`: the
    module was in a list at the place, and where in its path the index stood."""

    path: Path
    leaf: Path
    distance: int
    source: int
    stacked: int | None = None


@dc.dataclass(eq=False)
class _Visit:
    """A call of a module, each time that the pass over the program comes to it: a
    jitted function that is called three times has one `Call` inside, with three visits,
    which may be of three modules."""

    call: Call
    # The operands of its edge.
    arrays: Sequence[Value]
    # The modules whose methods are running, from outside in.
    running: "list[_Visit]"
    # The nearest places of each of the arrays. These, and the place that is chosen, are
    # known once the pass is over.
    candidates: list[_Candidate] = dc.field(default_factory=list)
    place: _Place | None = None

    def fits(self) -> dict[Path, tuple[int, int]]:
        """How well each place fits: better if the value is smaller. The distance, and
        how many arrays say this place, as a negative number."""
        found: dict[Path, dict[Path, int]] = {}
        for c in self.candidates:
            found.setdefault(c.path, {})[c.leaf] = c.distance
        return {p: (min(by.values()), -len(by)) for p, by in found.items()}


class _Sow(NamedTuple):
    """A sow, and the calls that it is in, or is the output of. There may be several: if
    a branch decides of which call a derivative is. `scans`: the ways to the scans
    around it; for a derivative, around its primal, since a scan of the backward pass
    need not go over the arrays themselves."""

    site: Site
    visits: list[_Visit]
    scans: tuple[Way, ...]


class Naming(Domain):
    """Names the sows of one program, for the transformation at this depth."""

    def __init__(self, places: Places, depth: int, marking: Any):
        self._places = places
        self._depth = depth
        self._marking = marking
        # By the ways to their equations, the calls, and the sows.
        self._visits: dict[Way, _Visit] = {}
        self._sows: dict[Way, _Sow] = {}
        self._latest: dict[Any, _Visit] = {}
        # By the way to a scan, the sources that it takes apart: those that are nearest
        # to the arrays that it goes over.
        self._taken_apart: dict[Way, set[int]] = defaultdict(set)
        # The modules that are running around a scan.
        self._around_scan: dict[Way, list[_Visit]] = {}
        # For each place, how well it fits the call that it fits best.
        self._best: dict[Path, tuple[int, int]] = {}
        # The places of modules that are alike, one after the other.
        self._alike: dict[tuple[Path, ...], Iterator[Path]] = {}
        # By the name of a class, the modules of it of which no place is known, by their
        # identities, and the number of each: 1 for `MLP#1`.
        self._nowhere: dict[str, dict[Hashable, int]] = defaultdict(dict)
        # For messages: the modules that are called, and the arguments and variables
        # that have captured modules in them.
        self.seen: dict[str, type] = {}
        self.roots: dict[str, None] = {}

    def sites(self) -> dict[Way, Site]:
        """The sites that have new names."""
        for visit in self._visits.values():
            pairs = zip(visit.call.leaves, visit.arrays)
            visit.candidates = [c for pair in pairs for c in self._candidates(*pair)]
            for path, fit in visit.fits().items():
                self._best[path] = min(fit, self._best.get(path, fit))
        for visit in self._visits.values():
            self._place(visit)
        named = {way: self._named(sow) for way, sow in self._sows.items()}
        return {way: x for way, x in named.items() if x is not self._sows[way].site}

    # --- what goes through the program ---
    def inputs(self) -> list[Value]:
        return [self._at_source(i) for i in range(self._places.n_inputs)]

    def _at_source(self, source: int) -> Value:
        return Value({source: 0}, ("source", source))

    def asks(self, sow):
        return sow.invars[:1]

    def literal(self, literal):
        return self.constant(getattr(literal, "val", None))

    def constant(self, x):
        if not getattr(x, "shape", None) and not eqx.is_array(x):
            return Value()
        return self._at_source(self._places.source(x))

    def either(self, values):
        return one_of(values, made=values[0].made)

    def chosen(self, index, cases):
        return self.either(in_order(cases))._replace(cases=(index.made, cases))

    def in_case(self, index, i, value):
        if value.cases is not None and value.cases[0] == index.made is not None:
            return value.cases[1][i]
        return value

    def entry(self, value, here):
        nearest = min(value.distances.values(), default=0)
        sources = (s for s, n in value.distances.items() if n == nearest)
        self._taken_apart[here.scans[-1]].update(sources)
        running = [self._latest[c] for c in here.running if c in self._latest]
        self._around_scan[here.scans[-1]] = running
        return value

    def equation(self, eqn, operands, here):
        primitive = eqn.primitive
        if primitive in (sow_p, same_p):
            self._sow(eqn, operands[0], here)
            return [Value(edges=(here.path,)), *operands[1:]]
        if primitive is edge_p and eqn.params:
            call, running = eqn.params["call"], self._running(here, eqn)
            visit = _Visit(call, operands, running)
            self._visits[here.path] = self._latest[call] = visit
            return [Value(edges=(here.path,))]
        return computed(eqn, operands, here.path)

    def _sow(self, eqn: Any, edge: Value, here: Here) -> None:
        site: Site = eqn.params["site"]
        scans = here.scans
        if site.modes:
            # Of a derivative, the edge comes out of the sow of its primal.
            primals = [self._sows[way] for way in edge.edges if way in self._sows]
            primals = [sow for sow in primals if sow.site.origin is site.origin]
            visits = [v for sow in primals for v in sow.visits]
            scans = primals[0].scans if primals else scans
        elif site.note is None:
            visits = self._running(here, eqn)[-1:]
        else:
            visits = [self._visits[way] for way in edge.edges[:1]]
        self._sows[here.path] = _Sow(site, visits, scans)

    def _running(self, here: Here, eqn: Any) -> list[_Visit]:
        calls = (*here.running, *calls_around(eqn))
        return [self._latest[c] for c in calls if c in self._latest]

    # --- the places of modules ---
    def _candidates(self, leaf: Path, array: Value) -> list[_Candidate]:
        """The nearest places of a module, given where one of its arrays is in the
        module, and what that comes from. The first come first."""
        found = [
            _Candidate(path[:at], leaf, distance, source)
            for source, distance in array.distances.items()
            for path in self._places.paths(source)
            if (at := _last(leaf, path, len(root_of(path)))) is not None
        ]
        nearest = min((c.distance for c in found), default=0)
        return _as_stacked([c for c in found if c.distance == nearest])

    def _place(self, visit: _Visit) -> _Place:
        if visit.place is None:
            visit.place = self._found(visit)
        return visit.place

    def _found(self, visit: _Visit) -> _Place:
        call = visit.call
        running = self._place(visit.running[-1]) if visit.running else _Place(())
        if call.is_function:
            return running.inside((call.cls.__name__,))
        held = self._held(visit)
        path = self._chosen(visit, held and held.path)
        if path is None:
            # It has no arrays of its own, or they were made on the way.
            return held or self._copied(visit, running) or self._unknown(visit)
        found = visit, path
        is_other = not self._places.is_of_class(path, call.cls)
        if visit.running and running.path == path and is_other:
            # A layer makes another one of its own arrays, and calls that.
            path = (*path, call.cls.__name__)
        return _Place(path, found=found)

    def _held(self, visit: _Visit) -> _Place | None:
        """The place in what holds the very module: one that is running, or the
        arguments."""
        holder, inside = visit.call.holder or (None, ())
        if holder == self._depth:
            return _Place(inside)
        # The edge of a module without arrays may have been moved out of a loop, to
        # before that of the module around.
        of_holder = (v for v in reversed(visit.running) if v.call is holder)
        around = next(of_holder, self._latest.get(holder))
        return around and self._place(around).inside(inside)

    def _chosen(self, visit: _Visit, held: Path | None) -> Path | None:
        """The place that the arrays say."""
        call, fits = visit.call, visit.fits()
        if any(c.distance >= FAR for c in visit.candidates):
            # A hypernetwork made some of its arrays, and is no place of it: that is
            # nearer to the call of the hypernetwork.
            ok = lambda path, fit: self._best[path] >= min(fit, (FAR,))
            fits = {path: fit for path, fit in fits.items() if ok(path, fit)}
        if not fits:
            return None
        is_of_class = lambda path: self._places.is_of_class(path, call.cls)
        is_taken = lambda path: self._best[path] < fits[path]
        path = min(
            fits,
            key=lambda path: (
                # A tied weight is at two places.
                not is_of_class(path),
                # What most of the arrays say.
                fits[path][1],
                # Of several places that one array has.
                path != held,
                # A mean of a student and a teacher is the teacher, if the student is
                # called: another call fits that better.
                is_taken(path),
            ),
        )
        is_like = self._places.is_like(path, call) and not is_taken(path)
        if is_of_class(path) and (is_like or fits[path][0] != TRANSPOSED):
            return path
        # All that it has are tied weights: arrays of another module that were put into
        # this one, whose own arrays no call has.
        outer = root_of(path)
        if visit.running:
            outer = self._place(visit.running[-1]).path
        return self._places.unused(call, outer, self._best) or path

    def _after(self, sow: _Sow, place: _Place) -> list[int | None]:
        """For each scan around a sow, where in its path the index of an iteration
        stands: behind the tree that the scan takes apart, or where that of the list
        stood that was stacked before. For an iteration of `model/blocks/attn`, in a
        scan over the arrays in `blocks`, it is `model/blocks/2/attn`."""
        if place.found is None:
            return []
        visit, path = place.found
        within = self._places.sources_in
        mine = [c for c in visit.candidates if c.path == path]
        root = len(root_of(path))
        # A model that has nothing but `blocks` is no stack itself.
        is_all = len(path) > root and within[path[: root + 1]] == within[path[:root]]

        def levels(visits):
            paths = [self._place(v).path for v in visits]
            return [len(p) for p in paths if p == path[: len(p)]]

        def of_scan(scan):
            taken = [c for c in mine if c.source in self._taken_apart[scan]]
            if not taken or taken[0].stacked is not None:
                return taken[0].stacked if taken else None
            # A module that is called outside the loop is not what the loop takes apart.
            # One that is called inside may be, but nothing in it is.
            outside = self._around_scan[scan]
            inside = [v for v in visit.running if v not in outside]
            begin = max([root + is_all, *(n + 1 for n in levels(outside))])
            begin, apart = min([begin, *levels(inside)]), self._taken_apart[scan]
            ends = range(begin, len(path) + 1)
            return next((n for n in ends if within[path[:n]] <= apart), None)

        return list(map(of_scan, sow.scans))

    def _copied(self, visit: _Visit, running: _Place) -> _Place | None:
        """Of a module without arrays, the place of one that is alike. Such as a copy
        that `eqx.filter_checkpoint(layer)` calls: the first call of several that are
        alike is that of the first one."""
        module, n = visit.call.module, len(running.path)
        found = [] if module is None else self._places.alike(module)
        found = [path for path in found if path[:n] == running.path] or found
        alike = self._alike.setdefault(tuple(found), it.cycle(found))
        return _Place(next(alike)) if found else None

    def _unknown(self, visit: _Visit) -> _Place:
        """The class, with a number if another one of it was called before."""
        call, name = visit.call, visit.call.cls.__name__
        made = [x.made for x in visit.arrays] or [id(call.module and call.module.value)]
        of_class = self._nowhere[name]
        n = of_class.setdefault(made[0], len(of_class))
        is_held = call.module is None and not is_internal(call.cls)
        return _Place((f"{name}#{n}" if n else name,), is_held)

    # --- the names of sows ---
    def _named(self, sow: _Sow) -> Site:
        site, note, modes = sow.site, sow.site.note, self._marking.modes
        mine = [x for x in site.labels if x.name is None and x.depth == self._depth]
        if not (mine if note else self._marking.scope and not site.scoped):
            return site
        places = {(place := self._place(v)).name: place for v in sow.visits}
        is_asked_for = modes is None or site.mode in map(without_order, modes)
        if is_asked_for and (len(places) > 1 or note and not places):
            of = f"may be that of {' or '.join(map(repr, places))}"
            raise SowError(
                f"A {site.mode} at {site.where} "
                f"{of if places else f'is that of a call, {note and note.call!r}'}: "
                "which of them cannot be told, as it has lost the way to its primal. "
                "Take the gradient of each of them by itself, mark the value with "
                "`sow`, or leave this mode out, by `modes`."
            )
        place = next(iter(places.values()), _Place(()))
        if note is None and not places:
            return site
        segments = lambda path: len("/".join(path).split("/")) if path else 0
        ends = self._after(sow, place) if places else []
        after = tuple(n and segments(place.path[:n]) for n in ends)
        if note is None:
            site = site.in_scope(place.name)._replace(scoped=True)
            labels = tuple(x._replace(after=after) for x in site.labels)
            return site._replace(labels=labels)
        others = tuple(x for x in site.labels if x not in mine)
        is_unnamed_sow = note.tag is not None
        if not places or not (is_unnamed_sow or self._chooses(note.call, place)):
            return site._replace(labels=others)
        method = () if note.call.method == "__call__" else (note.call.method,)
        name = ".".join((place.name, *method, *note.what)) or "."
        new = Label(name, mine[0].tag, self._depth, after).in_scope(note.scope)
        self.roots["/".join(root_of(place.path))] = None
        return site._replace(labels=(new, *others))

    def _chooses(self, call: Call, place: _Place) -> bool:
        capture, name = self._marking.capture, place.name or "."
        if not call.is_function:
            self.seen.setdefault(name, call.cls)
        if capture is True:
            return place.is_held
        if self._marking.classes is not None:
            return True
        try:
            chosen = capture(name, call.outline)
            if eqx.is_array(chosen):
                raise TypeError("it returned an array")
            return bool(chosen)
        except (TypeError, AttributeError) as e:
            raise TypeError(
                f"`capture={capture!r}` failed for the module at {name!r}: {e}. A "
                "predicate is asked about a module with shapes in the place of arrays, "
                "whose values are not known yet. Return a bool: decide by the path, or "
                "by what is static about the module, such as its type or its shapes. "
                "To capture what a function returns, `jax.jit` it, or `sow` there."
            ) from e


def _last(part: Path, path: Path, begin: int) -> int | None:
    """Where a path is in another one, behind its beginning, and as far to the end as it
    can be."""
    n = len(part)
    places = range(len(path) - n, begin - 1, -1)
    return next((i for i in places if path[i : i + n] == part), None)


def _as_stacked(candidates: list[_Candidate]) -> list[_Candidate]:
    """If these are the layers of a list, whose arrays were stacked: their path without
    the index, such as `layers` for `layers/0` and `layers/1`."""
    paths = [c.path for c in candidates]
    # One array may also be in several places.
    is_one = len({c.source for c in candidates}) < len(candidates)
    if is_one or len(set(map(len, paths))) > 1:
        return candidates
    columns = enumerate(map(set, zip(*paths)))
    differ = [(i, keys) for i, keys in columns if len(keys) > 1]
    if len(differ) != 1 or not all(key.isdigit() for key in differ[0][1]):
        return candidates
    at, without = differ[0][0], lambda path, i: path[:i] + path[i + 1 :]
    return [c._replace(path=without(c.path, at), stacked=at) for c in candidates]
