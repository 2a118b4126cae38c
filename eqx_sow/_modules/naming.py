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

An array may come from several places. `Naming._rank` says which of them is preferred,
and `Naming._found` what a module is called to which no array leads.
"""

import dataclasses as dc
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import equinox as eqx

from .._errors import SowError
from .._mark.calls import Call, calls_around, Path
from .._mark.primitive import edge_p, same_p, sow_p
from .._mark.site import Label, Site
from .._values.modes import without_order
from .._walk.flow import Domain, Here
from .._walk.sows import loops_around, loops_of
from .places import is_internal, Places
from .sources import computed, FAR, in_order, one_of, Value, Way


class _Candidate(NamedTuple):
    """A place that a module may have, by one of its arrays, which comes from `source`:
    how much was computed between, and how long the path is that the source has in the
    tree at this place."""

    distance: int
    tail: int
    path: Path
    source: int


class _Place(NamedTuple):
    """Where a module is. If that is not known, the first key is the name of a class:
    `("MLP#1", "layers", "0")`. `is_held`: it is somewhere, or has arrays of its own.
    `found`: the call whose arrays led there, which may be that of a module around, and
    where they did."""

    path: Path
    is_known: bool = True
    is_held: bool = True
    found: "tuple[_Visit, Path] | None" = None

    @property
    def name(self) -> str:
        return "/".join(self.path)


@dc.dataclass(eq=False)
class _Visit:
    """A call of a module, each time that the pass over the program comes to it: a
    jitted function that is called three times has one `Call` inside, with three visits,
    which may be of three modules."""

    call: Call
    # The operands of its edge.
    arrays: Sequence[Value]
    # The visit of the module that holds it, whose method is running.
    around: "_Visit | None"
    # The innermost module whose method is running, whether it holds this one or not.
    running: "_Visit | None"
    # For each of the arrays, the places that it may say. These, and the place that is
    # chosen, are known once the pass is over.
    candidates: list[list[_Candidate]] = dc.field(default_factory=list)
    place: _Place | None = None

    @property
    def identity(self) -> Hashable:
        """What two calls of one module have in common, if nothing is known of it."""
        module = getattr(self.call.module, "value", None)
        return self.arrays[0].made if self.arrays else id(module)


class _Sow(NamedTuple):
    """A sow, and the calls that it is in, or is the output of. There may be several: if
    a branch decides of which call a derivative is.

    `loops`: of each loop that it has an axis for, from outside in, the way to the scan,
    or `None` if JAX moved the sow out of it. `primal` is that of a derivative.
    """

    site: Site
    visits: list[_Visit]
    loops: list[Way | None]
    primal: "_Sow | None" = None


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
        # For each place, the smallest distance of any call from it, and how many arrays
        # of calls have none that is nearer.
        self._nearest: dict[Path, int] = {}
        self._claims: Counter[Path] = Counter()
        # How often one of these places was chosen, where modules are alike.
        self._called_alike: Counter[tuple[Path, ...]] = Counter()
        # By the name of a class, the modules of it of which no place is known, by their
        # identities, and the number of each: 1 for `MLP#1`.
        self._nowhere: dict[str, dict[Hashable, int]] = defaultdict(dict)
        # For messages: the modules that are called, and the names of what is captured.
        self.seen: dict[str, type] = {}
        self.captured: set[str] = set()
        # The paths of the arguments and variables that have captured modules in them.
        self.roots: dict[str, None] = {}

    def sites(self) -> dict[Way, Site]:
        """The sites that have new names."""
        for visit in self._visits.values():
            visit.candidates = list(
                map(self._candidates, visit.call.leaves, visit.arrays)
            )
            for c in (c for found in visit.candidates for c in found):
                near = self._nearest.get(c.path, c.distance)
                self._nearest[c.path] = min(near, c.distance)
            for found in filter(None, visit.candidates):
                nearest = min(c.distance for c in found)
                self._claims.update({c.path for c in found if c.distance == nearest})
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
            self._visit(eqn, operands, here)
            return [Value(edges=(here.path,))]
        return computed(eqn, operands, here.path)

    def _visit(self, eqn: Any, arrays: Sequence[Value], here: Here) -> None:
        call = eqn.params["call"]
        running = next(iter(self._running(here, eqn)), None)
        around = running if call.is_function else None
        if call.holder is not None:
            around = self._latest.get(call.holder[0])
        visit = _Visit(call, arrays, around, running)
        self._visits[here.path] = self._latest[call] = visit

    def _sow(self, eqn: Any, edge: Value, here: Here) -> None:
        site: Site = eqn.params["site"]
        primal = None
        if site.modes:
            # Of a derivative, the edge comes out of the sow of its primal.
            primals = [self._sows[way] for way in edge.edges if way in self._sows]
            primals = [sow for sow in primals if sow.site.origin is site.origin]
            visits = [v for sow in primals for v in sow.visits]
            primal = next(iter(primals), None)
        elif site.note is None:
            visits = self._running(here, eqn)
        else:
            visits = [self._visits[way] for way in edge.edges[:1]]
        lengths = [loop.length for loop in loops_of(here.around)]
        scans = iter(here.scans)
        loops = [
            next(scans) if axis is None else None
            for _, axis in loops_around(site, lengths)
        ]
        self._sows[here.path] = _Sow(site, visits, loops, primal)

    def _running(self, here: Here, eqn: Any) -> list[_Visit]:
        """The innermost call that is running, if there is one."""
        calls = (*here.running, *calls_around(eqn))
        return [self._latest[c] for c in calls if c in self._latest][-1:]

    # --- the places of modules ---
    def _candidates(self, leaf: Path, array: Value) -> list[_Candidate]:
        """The places of a module, given where one of its arrays is in the module, and
        what that comes from. The first come first."""
        found = []
        for source, distance in array.distances.items():
            for path in self._places.paths(source):
                root = self._places.root_of(path)
                at = _last(leaf, path, len(root))
                if at is not None:
                    tail = len(path) - at
                    found.append(_Candidate(distance, tail, path[:at], source))
        return found

    def _place(self, visit: _Visit) -> _Place:
        if visit.place is None:
            visit.place = self._found(visit)
        return visit.place

    def _found(self, visit: _Visit) -> _Place:
        call = visit.call
        holder, inside = call.holder or (None, ())
        # The edge of a module without arrays may have been moved out of a loop, to
        # before that of the module around.
        visit.around = visit.around or self._latest.get(holder)
        around = None if visit.around is None else self._place(visit.around)
        if call.is_function:
            place = around or _Place(())
            return place._replace(path=(*place.path, call.cls.__name__))
        # What most of the arrays say, and most of those that say a place where a module
        # of this class is. They may also say that it is at no place.
        votes = [
            self._chosen(visit, leaf, found)
            for leaf, found in zip(call.leaves, visit.candidates)
            if found
        ]
        # Of equally many, those that fewer arrays of other calls say.
        fits = lambda path: path is None or self._is_of_class(path, call)
        path = max(
            votes,
            key=lambda p: (fits(p), votes.count(p), -self._claims[p or ()]),
            default=None,
        )
        running = None if visit.running is None else self._place(visit.running)
        if path is not None:
            found = visit, path
            if running is not None and running.path == path and not fits(path):
                # A layer makes another one of its own arrays, and calls that.
                path = (*path, call.cls.__name__)
            return _Place(path, found=found)
        # It has no arrays of its own, or they were made on the way.
        if holder == self._depth:
            return _Place(inside)
        if around is not None:
            return around._replace(path=(*around.path, *inside))
        if call.module is not None:
            alike = self._places.alike(call.module)
            if running is not None and running.is_known:
                inside = [p for p in alike if p[: len(running.path)] == running.path]
                alike = inside or alike
            if alike:
                # `eqx.filter_checkpoint(layer)` calls a copy of a layer. Which one of
                # those that are alike is told by the order of the calls.
                n = self._called_alike[tuple(alike)]
                self._called_alike[tuple(alike)] += 1
                return _Place(alike[n % len(alike)])
        return self._unknown(visit)

    def _chosen(
        self, visit: _Visit, leaf: Path, candidates: Sequence[_Candidate]
    ) -> Path | None:
        """The place that one of the arrays says, which is at `leaf` in the module."""
        call = visit.call
        # Of the weights that a hypernetwork returns, those of the hypernetwork are no
        # place, if it is called there itself.
        candidates = [
            c for c in candidates if c.distance < FAR or self._nearest[c.path] >= FAR
        ]
        if not candidates:
            return None
        ranks = [self._rank(c, visit) for c in candidates]
        equal = [c for c, rank in zip(candidates, ranks) if rank == min(ranks)]
        stacked = _in_common([c.path for c in equal])
        if stacked is not None:
            return stacked
        best = min(equal, key=lambda c: (not self._is_of_class(c.path, call), c.tail))
        is_nearer = self._nearest[best.path] < best.distance
        if not is_nearer and self._places.is_of_form(best.path, call.cls, call.treedef):
            return best.path
        # A tied weight: the array of another module was put into this one.
        outer = self._places.root_of(best.path)
        if visit.running is not None and self._place(visit.running).is_known:
            outer = self._place(visit.running).path
        tied = self._places.replaced(call.cls, call.treedef, outer, self._nearest)
        if tied is None and not self._is_of_class(best.path, call):
            tied = self._places.of_shared(best.path, call.cls, leaf)
        return tied or best.path

    def _rank(self, candidate: _Candidate, visit: _Visit) -> tuple[int, bool, bool]:
        """Which candidates are preferred: those with a smaller one."""
        path, distance = candidate.path, candidate.distance
        is_where_called = False
        if visit.call.holder is not None and visit.around is not None:
            _, inside = visit.call.holder
            around = self._place(visit.around)
            n = len(path) - len(inside)
            is_where_called = path[n:] == inside and (
                not around.is_known or around.path == path[:n]
            )
        return (
            distance,
            # A mean of a student and a teacher is the teacher, if the student is
            # called: another call is nearer to that.
            self._nearest[path] < distance,
            # The place in the module that is running, of several for one array.
            not is_where_called,
        )

    def _after(self, sow: _Sow, place: _Place) -> list[int | None]:
        """For each loop around a sow, where in its name the index of an iteration
        stands: behind the tree that the scan takes apart. That is the highest node of
        which it takes all arrays apart, or that of a list that was stacked before."""
        if sow.primal is not None:
            # A loop of the backward pass need not go over the arrays themselves.
            after, loops = self._after(sow.primal, place), sow.primal.loops
            if len(after) == len(sow.loops):
                return after
            # The cotangent of what was moved out of a loop is the total.
            return [n for n, loop in zip(after, loops) if loop is not None]
        if place.found is None:
            return []
        visit, path = place.found
        candidates = [c for found in visit.candidates for c in found]

        def of_scan(scan):
            if scan is None:
                return None
            apart, within = self._taken_apart[scan], self._places.sources_in
            paths = {c.path for c in candidates if c.source in apart}
            if path not in paths:
                # Stacked: the paths of the layers of a list have one more key.
                at = [i for p in paths for i in range(len(p)) if _without(p, i) == path]
                return min(at, default=None)
            first = len(self._places.root_of(path))
            # A model that has nothing but `blocks` is no stack itself.
            if len(path) > first and within(path[: first + 1]) == within(path[:first]):
                first += 1
            # A module that is called outside the loop is not what the loop takes apart.
            for place in map(self._place, self._around_scan[scan]):
                if place.is_known and path[: len(place.path)] == place.path != path:
                    first = max(first, len(place.path) + 1)
            levels = range(first, len(path) + 1)
            return next((n for n in levels if within(path[:n]) <= apart), None)

        return list(map(of_scan, sow.loops))

    def _is_of_class(self, path: Path, call: Call) -> bool:
        return self._places.is_of_class(path, call.cls)

    def _unknown(self, visit: _Visit) -> _Place:
        """The class, with a number if another one of it was called before."""
        call, name = visit.call, visit.call.cls.__name__
        of_class = self._nowhere[name]
        n = of_class.setdefault(visit.identity, len(of_class))
        is_held = call.module is None and not is_internal(call.cls)
        return _Place((f"{name}#{n}" if n else name,), False, is_held)

    # --- the names of sows ---
    def _place_of_all(self, sow: _Sow) -> _Place | None:
        """The place of all calls of a sow."""
        site = sow.site
        places = {(place := self._place(v)).name: place for v in sow.visits}
        if len(places) > 1 and self._is_asked_for(site):
            names = " or ".join(map(repr, places))
            raise SowError(
                f"A {site.mode} at {site.where} may be that of {names}: which of them "
                "cannot be told. Take the gradient of each of them by itself, or leave "
                "this mode out, by `modes`."
            )
        return next(iter(places.values()), None)

    def _is_asked_for(self, site: Site) -> bool:
        modes = self._marking.modes
        return modes is None or site.mode in map(without_order, modes)

    def _named(self, sow: _Sow) -> Site:
        site, place = sow.site, self._place_of_all(sow)
        note = site.note
        if note is None:
            if place is None or site.scoped or not self._marking.scope:
                return site
            after = tuple(self._after(sow, place))
            site = site.in_scope(place.name)._replace(scoped=True)
            labels = tuple(x._replace(after=after) for x in site.labels)
            return site._replace(labels=labels)
        mine = [x for x in site.labels if x.name is None and x.depth == self._depth]
        if not mine:
            return site
        others = tuple(x for x in site.labels if x not in mine)
        if place is None and self._is_asked_for(site):
            raise SowError(
                f"A {site.mode} of a captured call, {note.call!r}, at {site.where} has "
                "lost the way to its primal, so it cannot be named. Leave this mode "
                "out, by `modes`, or mark the value with `sow`."
            )
        is_unnamed_sow = note.tag is not None
        if place is None or not (is_unnamed_sow or self._chooses(note.call, place)):
            return site._replace(labels=others)
        method = () if note.call.method == "__call__" else (note.call.method,)
        name = ".".join((place.name, *method, *note.what)) or "."
        after = tuple(self._after(sow, place))
        new = Label(name, mine[0].tag, self._depth, after).in_scope(note.scope)
        self.captured.add(new.name)
        if place.is_known and place.path:
            self.roots["/".join(self._places.root_of(place.path))] = None
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
            if not eqx.is_array(chosen):
                return bool(chosen)
            problem, cause = "it returned an array", None
        except (TypeError, AttributeError) as e:
            problem, cause = str(e), e
        raise TypeError(
            f"`capture={capture!r}` failed for the module at {name!r}: {problem}. A "
            "predicate is asked about a module with shapes in the place of arrays, "
            "whose values are not known yet. Return a bool: decide by the path, or by "
            "what is static about the module, such as its type or its shapes. To "
            "capture what a function returns, `jax.jit` it, or `sow` there."
        ) from cause


def _last(part: Path, path: Path, begin: int) -> int | None:
    """Where a path is in another one, behind its beginning, and as far to the end as it
    can be."""
    n = len(part)
    places = range(len(path) - n, begin - 1, -1)
    return next((i for i in places if path[i : i + n] == part), None)


def _without(path: Path, i: int) -> Path:
    return (*path[:i], *path[i + 1 :])


def _in_common(paths: Sequence[Path]) -> Path | None:
    """The path of arrays that were stacked, such as `layers/weight` of those at
    `layers/0/weight` and `layers/1/weight`: without the numbers in the list."""
    if len(paths) == 1 or len(set(map(len, paths))) > 1:
        return None
    columns = enumerate(zip(*paths))
    differ = [(i, keys) for i, keys in columns if len(set(keys)) > 1]
    if len(differ) != 1 or not all(key.isdigit() for key in differ[0][1]):
        return None
    return _without(paths[0], differ[0][0])
