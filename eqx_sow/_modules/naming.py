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
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import equinox as eqx

from .._errors import SowError
from .._mark.calls import Call, calls_around, Path
from .._mark.primitive import edge_p, same_p, sow_p
from .._mark.site import Label, Site
from .._names import join
from .._values.modes import without_order
from .._walk.flow import Domain, Here
from .places import Places
from .sources import (
    at_source,
    Candidate,
    CONTRACTS,
    Distances,
    Edge,
    either,
    FAR,
    MOVES,
    NOTHING,
    Place,
    Source,
    Value,
    Visit,
)
from .variables import is_internal


class Naming(Domain):
    """Names the sows of one program, for the transformation at this depth."""

    def __init__(self, places: Places, depth: int, marking: Any):
        self._places = places
        self._depth = depth
        self._marking = marking
        self._calls: dict[Call, Visit] = {}
        self._numbers: dict[str, dict[Any, int]] = {}
        self._visits: list[Visit] = []
        # How near any call is to a place.
        self._nearest: dict[Path, int] = {}
        # Arrays that the program holds, by their ids; and, of each scan, the sources
        # that it takes apart.
        self._constants: dict[int, Any] = {}
        self._taken_apart: dict[tuple[int, ...], set[tuple[int, int | None]]] = {}
        # The sows, by the way to their equations, with the call that they are in: more
        # than one, if a branch decides of which call a derivative is.
        self._sows: dict[tuple[int, ...], tuple[Site, list[Visit]]] = {}
        # What there is to choose from, for messages.
        self.seen: dict[str, type] = {}
        self.captured: set[str] = set()
        # How the paths of the models begin that captured calls are in.
        self.roots: dict[str, None] = {}

    def sites(self) -> dict[tuple[int, ...], Site]:
        """The sites that have new names, by the way to their equations."""
        nearest = self._nearest
        for candidates in (x for visit in self._visits for x in visit.found):
            for c in candidates:
                nearest[c.path] = min(c.distance, nearest.get(c.path, c.distance))
        for visit in self._visits:
            self._place(visit)
        named = {
            path: self._named(site, self._one_of(visits, site))
            for path, (site, visits) in self._sows.items()
        }
        return {path: x for path, x in named.items() if x is not self._sows[path][0]}

    # --- what goes through the program ---
    def asks(self, sow):
        return sow.invars[:1]

    def literal(self, literal):
        return self.constant(getattr(literal, "val", None))

    def constant(self, x):
        if not getattr(x, "shape", None) and not eqx.is_array(x):
            return NOTHING
        self._constants[id(x)] = x
        return at_source(Source(1 << 30, id(x)), ("constant", id(x)))

    def either(self, values):
        return either(values, made=values[0].made)

    def chosen(self, index, cases):
        return either(cases, made=cases[0].made)._replace(cases=(index.made, cases))

    def in_case(self, index, i, value):
        if value.cases is not None and value.cases[0] == index.made is not None:
            return value.cases[1][i]
        return value

    def entry(self, value, here):
        scan = here.scans[-1]
        sources = {
            s._replace(entry_of=(*s.entry_of, scan)): n
            for s, n in value.sources.items()
        }
        apart = self._taken_apart.setdefault(scan, set())
        apart.update((s.of, s.constant) for s, n in value.sources.items() if not n)
        return value._replace(distances=Distances(sources))

    def stacked(self, value, here):
        scan = here.scans[-1]
        sources = {
            s._replace(entry_of=tuple(x for x in s.entry_of if x != scan)): n
            for s, n in value.sources.items()
        }
        return value._replace(distances=Distances(sources))

    def equation(self, eqn, operands, here):
        primitive = eqn.primitive
        if primitive is sow_p:
            return [self._sow(eqn, operands[0], here), *operands[1:]]
        if primitive is edge_p and "call" not in eqn.params:
            # What was an edge in one branch or another.
            return [either(operands)]
        if primitive is edge_p:
            return [Value(edges=(Edge(self._edge(eqn, operands, here)),))]
        if primitive is same_p:
            return [self._sow(eqn, operands[0], here), *operands[1:]]
        if primitive.name not in MOVES:
            made = here.path
            value = either(operands, FAR if primitive in CONTRACTS else 1, made)
        elif primitive.name == "select_n":
            value = either(operands[1:], 0, operands[1].made)
        else:
            value = either(operands, 0, operands[0].made if operands else here.path)
        return [value] * len(eqn.outvars)

    # --- modules ---
    def _edge(self, eqn: Any, arrays: Sequence[Value], here: Here) -> Visit:
        call = eqn.params["call"]
        within = None if call.within is None else self._calls.get(call.within[0])
        if call.is_function:
            within = next(iter(self._around(here, eqn)), None)
        visit = Visit(
            call,
            list(map(self._candidates, call.leaves, arrays)),
            within,
            arrays[0].made if arrays else call.identity,
            here.scans,
        )
        self._calls[call] = visit
        if here.final:
            self._visits.append(visit)
        return visit

    def _candidates(self, leaf: Path, array: Value) -> list[Candidate]:
        """The places of a module, given where one of its arrays is in the module, and
        what that comes from."""
        found = []
        for source, distance in array.sources.items():
            if source.constant is None:
                paths = [self._places.inputs[source.of]]
            else:
                paths = self._places.of_constant(self._constants[source.constant])
            for n, path in enumerate(paths):
                at = _last(leaf, path, len(self._places.root_of(path)))
                if at is not None:
                    tail = len(path) - at
                    head = path[:at]
                    found.append(
                        Candidate(distance, tail, source.of, n, head, source.entry_of)
                    )
        return found

    def _place(self, visit: Visit) -> Place:
        if visit.place is None:
            visit.place = self._settled(visit)
        return visit.place

    def _settled(self, visit: Visit) -> Place:
        call = visit.call
        if call.is_function:
            place = Place("") if visit.within is None else self._place(visit.within)
            return place._replace(name=join(place.name, call.cls.__name__), path=None)
        # A place, or `None`, by each of the witnesses that come from somewhere.
        votes = [
            self._chosen(visit, leaf, found)
            for leaf, found in zip(call.leaves, visit.found)
            if found
        ]
        same_class = [p for p in votes if p is not None and self._is_of_class(p, call)]
        among = [p for p in votes if p is None or not same_class or p in same_class]
        path = max(among, key=among.count, default=None)
        if path is not None:
            after = self._after(visit, path)
            return Place("/".join(path), path, after=after)
        # It has no arrays of its own, or they were made on the way.
        outer = visit.within or self._calls.get(call.within[0]) if call.within else None
        if outer is not None and call.within is not None:
            place, inside = self._place(outer), call.within[1]
            path = None if place.path is None else (*place.path, *inside)
            return place._replace(
                name="/".join(x for x in (place.name, *inside) if x), path=path
            )
        if call.form is not None:
            known = call.given.get(self._depth)
            of_form = self._places.of_form(call.form) if known is None else [known]
            if len(of_form) == 1:
                return Place("/".join(of_form[0]), of_form[0])
        return self._unknown(visit)

    def _chosen(
        self,
        visit: Visit,
        leaf: Path,
        found: Sequence[Candidate],
    ) -> Path | None:
        call = visit.call
        # Of the weights that a hypernetwork returns, those of the hypernetwork are no
        # place, if it is called there itself.
        found = [c for c in found if c.distance < FAR or self._nearest[c.path] >= FAR]
        if not found:
            return None
        distance = min(c.distance for c in found)
        near = [c for c in found if c.distance == distance]
        if len(near) > 1:
            # A mean of a student and a teacher is the teacher, if the student is
            # called.
            near = [c for c in near if self._nearest[c.path] == distance] or near
            near = [c for c in near if self._is_where_called(c.path, visit)] or near
            common = _in_common([c.path for c in near])
            if common is not None:
                return common
        best = min(near, key=lambda c: (not self._is_of_class(c.path, call), c))
        if not self._is_of_class(best.path, call):
            shared = self._places.of_shared(best.path, call.cls, leaf)
            return shared or best.path
        return best.path

    def _after(self, visit: Visit, path: Path) -> tuple[int | None, ...]:
        """For each scan around a call, where in its path the index of an iteration
        stands: behind the tree that the scan takes apart. That is the highest node of
        which it takes all arrays apart, or that of a list that was stacked before."""
        candidates = [c for found in visit.found for c in found]

        def of_scan(scan):
            heads = {c.path for c in candidates if scan in c.entry_of}
            if path not in heads:
                # Stacked: the paths of the layers of a list have one more key.
                at = [i for h in heads for i in range(len(h)) if _without(h, i) == path]
                return min(at, default=None)
            apart, of = self._taken_apart[scan], self._places.sources_in
            first = len(self._places.root_of(path))
            # A model that has nothing but `blocks` is no stack itself.
            first += len(path) > first and of(path[: first + 1]) == of(path[:first])
            levels = range(first, len(path) + 1)
            return next((n for n in levels if of(path[:n]) <= apart), None)

        return tuple(map(of_scan, visit.scans))

    def _is_of_class(self, path: Path, call: Call) -> bool:
        return self._places.classes.get(path) is call.cls

    def _is_where_called(self, path: Path, visit: Visit) -> bool:
        """Whether a place is that in the module which is running."""
        if visit.call.within is None:
            return False
        _, inside = visit.call.within
        place = None if visit.within is None else visit.within.place
        known = None if place is None else place.path
        return path[-len(inside) :] == inside and known in (None, path[: -len(inside)])

    def _unknown(self, visit: Visit) -> Place:
        """The class, with a number if another one of it was called before."""
        name = visit.call.cls.__name__
        of_class = self._numbers.setdefault(name, {})
        n = of_class.setdefault(visit.identity, len(of_class))
        is_held = visit.call.form is None and not is_internal(visit.call.cls)
        return Place(f"{name}#{n}" if n else name, None, is_held)

    # --- sows ---
    def _sow(self, eqn: Any, edge: Value, here: Here) -> Value:
        site: Site = eqn.params["site"]
        if site.modes:
            visits = [e.visit for e in edge.edges if e.origin is site.origin]
        elif site.note is None:
            visits = self._around(here, eqn)
        else:
            visits = [e.visit for e in edge.edges[:1]]
        if here.final:
            self._sows[here.path] = site, visits
        return Value(edges=tuple(Edge(visit, site.origin) for visit in visits))

    def _one_of(self, visits: Sequence[Visit], site: Site) -> Place | None:
        """The place of all these calls."""
        places = {(place := self._place(v)).name: place for v in visits}
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

    def _around(self, here: Here, eqn: Any) -> list[Visit]:
        """The innermost call that is running, if there is one."""
        calls = (*here.running, *calls_around(eqn))
        return [self._calls[c] for c in calls if c in self._calls][-1:]

    def _named(self, site: Site, place: Place | None) -> Site:
        if site.note is None:
            return self._scoped(site, place)
        waiting = [x for x in site.waiting if x[0] == self._depth]
        if not waiting:
            return site
        left = tuple(x for x in site.waiting if x[0] != self._depth)
        if place is None:
            if not self._is_asked_for(site):
                return site._replace(waiting=left)
            raise SowError(
                f"A {site.mode} of a captured call, {site.note.call!r}, at "
                f"{site.where} has lost the way to its primal, so it cannot be named. "
                "Leave this mode out, by `modes`, or mark the value with `sow`."
            )
        note = site.note
        if not (note.tag is not None or self._chooses(note.call, place)):
            return site._replace(waiting=left)
        name = join(note.scope, label(place.name, note.call.method, *note.what))
        self.captured.add(name)
        for root in (self._places.root_of(place.path),) if place.path else ():
            self.roots["/".join(root)] = None
        # Of a `Sow` without a name, the path is the name of a sow of the user's.
        (_, tag), *_ = waiting
        labels = (self._label(name, tag, note.scope, place), *site.labels)
        return site._replace(labels=labels, waiting=left)

    def _label(self, name: str, tag: Hashable, scope: str, place: Place) -> Label:
        before = len(scope.split("/")) if scope else 0
        after = tuple(None if n is None else before + n for n in place.after)
        return Label(name, tag, self._depth, after)

    def _scoped(self, site: Site, place: Place | None) -> Site:
        if not self._marking.scope or site.scoped or place is None:
            return site
        return site.in_scope(place.name)._replace(scoped=True)

    def _chooses(self, call: Call, place: Place) -> bool:
        capture = self._marking.capture
        if capture is True:
            chosen = place.is_held
        elif self._marking.classes is not None:
            chosen = True
        else:
            chosen = self._ask(capture, place.name or ".", call.outline)
        if not call.is_function:
            self.seen.setdefault(place.name or ".", call.cls)
        return bool(chosen)

    def _ask(self, predicate: Callable, path: str, outline: Any) -> bool:
        try:
            chosen = predicate(path, outline)
            if not eqx.is_array(chosen):
                return bool(chosen)
            problem, cause = "it returned an array", None
        except (TypeError, AttributeError) as e:
            problem, cause = str(e), e
        raise TypeError(
            f"`capture={predicate!r}` failed for the module at {path!r}: {problem}. A "
            "predicate is asked about a module with shapes in the place of arrays, "
            "whose values are not known yet. Return a bool: decide by the path, or by "
            "what is static about the module, such as its type or its shapes. To "
            "capture what a function returns, `jax.jit` it, or `sow` there."
        ) from cause


def label(path: str, method: str, *more: str) -> str:
    methods = () if method == "__call__" else (method,)
    return ".".join((path, *methods, *more)) or "."


def _last(part: Path, path: Path, begin: int) -> int | None:
    """Where a path is in another one, behind its beginning, and as far to the end as it
    can be."""
    n = len(part)
    for i in range(len(path) - n, begin - 1, -1):
        if path[i : i + n] == part:
            return i
    return None


def _without(path: Path, i: int) -> Path:
    return (*path[:i], *path[i + 1 :])


def _in_common(paths: Sequence[Path]) -> Path | None:
    """The path of arrays that were stacked: that of the layers of a list, without their
    numbers."""
    first, *others = dict.fromkeys(paths)
    if not others or any(len(p) != len(first) for p in others):
        return None
    differ = {i for p in others for i in range(len(p)) if p[i] != first[i]}
    if len(differ) != 1:
        return None
    (at,) = differ
    if not all(p[at].isdigit() for p in (first, *others)):
        return None
    return _without(first, at)
