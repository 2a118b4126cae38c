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
the edge of its primal, and so its name. At the end, each mark is replaced by one with
its names (`_walk/sows.py`); from there on they are like those of `sow`.

An array may come from several places. `Naming._nearest` says which of them is
preferred, and `Naming._found` what a module is called to which no array leads.
"""

import itertools as it
from collections import Counter, defaultdict
from collections.abc import Container, Hashable, Iterable, Iterator, Sequence
from typing import Any

import equinox as eqx

from .._errors import SowError
from .._mark.calls import calls_around, NotedCall, Path
from .._mark.primitive import edge_p, same_p, sow_p
from .._mark.site import Label, Site
from .._values.modes import without_order
from .._walk.flow import Domain, Here
from .._walk.sows import Way
from .cuts import closed, in_common, number_of, OF_SHARD
from .places import is_internal, is_like, Places, root_of
from .sources import computed, FAR, in_order, Origin, TRANSPOSED, undecided
from .visits import Index, Mark, Visit


class Naming(Domain):
    """Names the marks of one program, for the transformation at this depth."""

    n_needed = 1

    def __init__(self, places: Places, depth: int, marking: Any):
        self._places = places
        self._depth = depth
        self._marking = marking
        self._classes, _ = marking.selected
        # By the ways to their equations, the calls, and the marks.
        self._visits: dict[Way, Visit] = {}
        self._sows: dict[Way, Mark] = {}
        self._latest: dict[Any, Visit] = {}
        # By the way to a scan, the sources that it takes apart: those that are nearest
        # to the arrays that it goes over. And the calls that are running around it.
        self._scans: dict[Way, tuple[set[int], Sequence[NotedCall]]] = {}
        # For each place, how well it fits the call that it fits best.
        self._best: dict[Path, tuple[int, int]] = {}
        # The places of lists whose layers were stacked on the way, and their sources.
        self._stacks: dict[Path, set[int]] = defaultdict(set)
        # The sources that the modules come from. And by the number of slices before and
        # the length of the stack, those of which a constant index takes an entry.
        self._used: set[int] = set()
        self._cut: dict[tuple[int, int], set[int]] = defaultdict(set)
        # By their places, the classes of modules; and what is no module, but called.
        self._class_at: dict[Path, Any] = {}
        # The places of modules that are alike, one after the other.
        self._turns: dict[tuple[Path, ...], Iterator[Path]] = {}
        # By the name of a class, the modules of it of which no place is known, by their
        # identities, and the number of each: 1 for `MLP#1`.
        self._nowhere: dict[str, dict[Hashable, int]] = defaultdict(dict)
        # What `capture=True` leaves out, unless its class is selected, too. Something
        # in there begins with the same key.
        self._left_out: set[Path] = set()
        # For messages: the modules that are called.
        self.seen: dict[str, type] = {}
        # The arguments and variables that have captured modules in them; and with
        # `scope=True`, those with modules in which there are marks.
        self.roots: dict[str, None] = {}
        self.roots_of_sows: dict[str, None] = {}

    def sites(self) -> dict[Way, Site]:
        """The sites that have new names."""
        for visit in self._visits.values():
            self._fit(visit)
        for visit in self._visits.values():
            self._path(visit)
        named = {way: self._named(sow) for way, sow in self._sows.items()}
        return {way: x for way, x in named.items() if x is not self._sows[way].site}

    # --- what goes through the program ---
    def inputs(self) -> list[Origin]:
        return [self._at_source(i) for i in range(self._places.n_inputs)]

    def _at_source(self, source: int) -> Origin:
        return Origin({source: 0}, ("source", source), is_whole=True)

    def constant(self, x, aval):
        if not getattr(x, "shape", None) and not eqx.is_array(x):
            return Origin(number=number_of(x, aval))
        source = self._at_source(self._places.source(x))
        return source._replace(number=number_of(x, aval))

    def chosen(self, index, cases):
        return undecided(in_order(cases))._replace(cases=(index.made, cases))

    def in_case(self, index, i, value):
        if value.cases is not None and value.cases[0] == index.made is not None:
            return value.cases[1][i]
        return value

    def entry(self, value, here):
        nearest = min(value.distances.values(), default=0)
        sources = (s for s, n in value.distances.items() if n == nearest)
        apart, _ = self._scans.setdefault(here.scans[-1], (set(), here.running))
        apart.update(sources)
        return value.along(-1).changing()

    def stacked(self, value, here):
        return value.along(1).changing()

    def carried(self, when, init, after, here):
        return [undecided(pair).changing() for pair in zip(init, after)]

    def shard(self, value, mesh, spec):
        value = value._replace(parts=None)
        is_split = spec is not None and len(spec) > 0 and spec[0] is not None
        return value.cut([OF_SHARD]) if is_split else value

    def equation(self, eqn, operands, here):
        primitive = eqn.primitive
        if primitive in (sow_p, same_p):
            self._sow(eqn, operands[0], here)
            return [Origin(edges=(here.way,)), *operands[1:]]
        if primitive is edge_p and eqn.params:
            call, running = eqn.params["call"], self._running(here, eqn)
            visit = Visit(call, operands, running)
            self._visits[here.way] = self._latest[call] = visit
            return [Origin(edges=(here.way,))]
        return computed(eqn, operands, here.way)

    def _sow(self, eqn: Any, edge: Origin, here: Here) -> None:
        site: Site = eqn.params["site"]
        scans = here.scans
        if site.modes:
            # Of a derivative, the edge comes out of the mark of its primal.
            primals = [self._sows[way] for way in edge.edges if way in self._sows]
            # Equinox's loops may trace their body twice: then it is the same line.
            of_call = [sow for sow in primals if sow.site.origin is site.origin]
            of_line = [sow for sow in primals if sow.site.where == site.where]
            primals = of_call or of_line
            visits = [v for sow in primals for v in sow.visits]
            scans = primals[0].scans if primals else scans
        elif site.note is None:
            visits = self._running(here, eqn)[-1:]
        else:
            visits = [self._visits[way] for way in edge.edges[:1]]
            # The edge of a module without arrays may have been moved out of a loop, to
            # where fewer calls are running, and to before the edges of these.
            for visit in visits:
                visit.running = max(self._running(here, eqn), visit.running, key=len)
        self._sows[here.way] = Mark(site, visits, scans)

    def _running(self, here: Here, eqn: Any) -> list[Visit]:
        calls = [*here.running, *calls_around(eqn)]
        return [self._latest[c] for c in calls if c in self._latest]

    # --- the places of modules ---
    def _fit(self, visit: Visit) -> None:
        """Finds the nearest places of a module, given where its arrays are in the
        module, and what they come from. The first come first."""
        is_new = False
        for leaf, array in zip(visit.call.leaves, visit.arrays):
            found = [
                (distance, path[:at], source)
                for source, distance in array.distances.items()
                for path in self._places.paths(source)
                if (at := _last(leaf, path, len(root_of(path)))) is not None
            ]
            nearest = min((distance for distance, *_ in found), default=0)
            sources = {p: s for distance, p, s in found if distance == nearest}
            visit.is_made |= nearest >= FAR
            is_new |= not found and max(array.distances.values(), default=0) >= FAR
            self._used.update(array.distances)
            for path in self._as_stacked(sources):
                distance, n = visit.fits.get(path, (nearest, 0))
                visit.fits[path] = min(distance, nearest), n - 1
                cuts = closed(array.cuts.get(sources.get(path, -1), ()))
                visit.cuts[path] = in_common([cuts, visit.cuts.get(path, cuts)])
                for i, cut in enumerate(cuts):
                    self._cut[i, cut.n].add(sources[path])
        # If a `Linear` makes the `scale` and the `bias` of a layer, its own `bias` is
        # only added to the other one. There is no place that has the `scale`.
        visit.is_made |= is_new and any(map(self._places.everywhere.get, visit.fits))
        for path, fit in visit.fits.items():
            self._best[path] = min(fit, self._best.get(path, fit))

    def _as_stacked(self, sources: dict[Path, int]) -> Iterable[Path]:
        """If some of these are the layers of a list, whose arrays were stacked: their
        path without the index, such as `layers` for `layers/0` and `layers/1`."""
        found = {path: {source} for path, source in sources.items()}
        if len(set(sources.values())) < max(len(sources), 2):
            # One array may also be in several places.
            return found
        for i in reversed(range(max(map(len, found), default=0))):
            indexed = [path for path in found if path[i:] and path[i].isdigit()]
            shorter = {path: path[:i] + path[i + 1 :] for path in indexed}
            layers = Counter(shorter.values())
            before, found = found, defaultdict(set)
            for path, of_path in before.items():
                if path in shorter and layers[shorter[path]] > 1:
                    if path[:i] not in self._stacks:
                        self._places.stack(path[:i], path[i])
                    self._stacks[path[:i]] |= of_path
                    path = shorter[path]
                found[path] |= of_path
        return found

    def _path(self, visit: Visit) -> Path:
        if visit.path is None:
            path = self._found(visit)
            visit.indices = self._indices(visit, path)
            visit.path = self._of_class(path, visit.call)
        return visit.path

    def _found(self, visit: Visit) -> Path:
        call = visit.call
        outer = self._path(visit.running[-1]) if visit.running else None
        if call.is_function:
            return (*(outer or ()), call.cls.__name__)
        path = self._nearest(visit, outer)
        if path is not None and self._is_sure(path, visit):
            return path
        if visit.fits or call.module is not None:
            # It has no arrays of its own, or those that lead to it are another
            # module's: tied weights, or made by a hypernetwork.
            around = root_of(path or next(iter(visit.fits), ()))
            around = around if outer is None else outer
            alike = self._alike(call, around, visit.fits if path is None else ())
            if alike is not None:
                return alike
        return self._unknown(visit) if path is None else path

    def _of_class(self, path: Path, call: NotedCall) -> Path:
        """The place itself, if a module of this class is there. One of another class
        that is made of the arrays there has its class behind that. If nothing is there,
        the first that is called has the place."""
        while True:
            there = self._places.everywhere.get(path)
            of = call.cls if there is None else type(there)
            if self._class_at.setdefault(path, of) is call.cls:
                return path
            path = (*path, call.cls.__name__)

    def _indices(self, visit: Visit, path: Path) -> tuple[Index, ...]:
        """Where the index stands of each slice of a stack that a module is: behind the
        highest tree of which all arrays are sliced so. Something without arrays is in
        the entries that the module around is."""
        around = [v for v in visit.running if v.path == path[: len(v.path or ())]]
        inherited = around[-1].indices if around else ()
        cuts = visit.cuts.get(path, ())
        if len(cuts) <= len(inherited):
            return inherited
        levels = [(v.call, len(v.path or ())) for v in around]
        levels.append((visit.call, len(path)))
        found: list[Index] = []
        for i, cut in enumerate(cuts):
            apart = self._cut[i, cut.n] | self._places.of_length(cut.n, self._used)
            outside = [v.call for v in around if len(v.indices) <= i]
            at = self._behind(path, levels, apart, outside)
            before = found[-1].at if found else 0
            found.append(Index(max(before, len(path) if at is None else at), cut))
        return tuple(found)

    def _held(self, visit: Visit) -> Path | None:
        """The place in what holds the very module: one that is running, or the
        arguments."""
        holder, inside = visit.call.holder or (None, ())
        if holder == self._depth:
            return inside
        of_holder = (v for v in reversed(visit.running) if v.call is holder)
        around = next(of_holder, None)
        return around and (*self._path(around), *inside)

    def _nearest(self, visit: Visit, outer: Path | None) -> Path | None:
        """The place that the arrays say, or if they do not, what holds the module."""
        call, fits, held = visit.call, visit.fits, self._held(visit)
        # Another call fits these better.
        taken = {p for p, fit in fits.items() if self._best[p] < min(fit, (FAR,))}
        # A hypernetwork made some of its arrays, and is no place of it: that is nearer
        # to the call of the hypernetwork.
        makers = taken - {outer} if visit.is_made else ()
        return min(
            (path for path in fits if path not in makers),
            key=lambda path: (
                # A tied weight is at two places.
                not self._is_there(path, call),
                # What most of the arrays say.
                fits[path][1],
                # Of several places that one array has.
                path != held,
                # If another call fits this place better, prefer it less, by how much
                # better: a mean of a student and a teacher is the teacher, if the
                # student is called, too.
                path in taken and 1 + fits[path][0] - self._best[path][0],
            ),
            default=held,
        )

    def _is_there(self, path: Path, call: NotedCall) -> bool:
        return type(self._places.everywhere.get(path)) is call.cls

    def _is_sure(self, path: Path, visit: Visit) -> bool:
        """Whether the place is that of the module. Otherwise all that it has are tied
        weights: arrays of another module that were put into this one, whose own arrays
        no call has."""
        fit, call = visit.fits.get(path), visit.call
        if fit is None:
            return True
        if fit[0] == TRANSPOSED:
            is_best = self._best[path] == fit
            return is_best and is_like(self._places.everywhere.get(path), call)
        return self._is_there(path, call)

    def _alike(self, call: NotedCall, outer: Path, own: Container[Path]) -> Path | None:
        """The place of a module that is like that of a call, and to which the arrays of
        no call lead, or its `own`: in the tree at `outer`, if there is one."""
        alike = self._places.alike(call)
        found = [path for path in alike if path in own or path not in self._best]
        inside = [path for path in found if self._is_in(outer, path)]
        if call.module is None:
            return inside[0] if len(inside) == 1 else None
        # Such as a layer without arrays, of which `eqx.filter_checkpoint(layer)` calls
        # a copy: the first call of several that are alike is that of the first one.
        places = tuple(inside or found)
        return next(self._turns.setdefault(places, it.cycle(places)), None)

    def _is_in(self, outer: Path, path: Path) -> bool:
        """Whether a place is in the tree at `outer`. Of a list whose layers were
        stacked, that is the place in the stack, and none in one of the layers."""
        ends = (n for n in range(len(outer), len(path)) if path[n].isdigit())
        is_layer = any(path[:n] in self._stacks for n in ends)
        return path[: len(outer)] == outer and not is_layer

    def _unknown(self, visit: Visit) -> Path:
        """The class, with a number if another one of it was called before."""
        call, name = visit.call, visit.call.cls.__name__
        of_class = self._nowhere[name]
        made = visit.arrays[0].made if visit.arrays else id(call.module)
        n = of_class.setdefault(made, len(of_class))
        name = f"{name}#{n}" if n else name
        if call.module is not None or is_internal(call.cls):
            self._left_out.add((name,))
        return (name,)

    def _behind(
        self,
        path: Path,
        called: Sequence[tuple[NotedCall, int]],
        apart: set[int],
        outside: Container[NotedCall],
    ) -> int | None:
        """How many keys there are up to the highest tree on a path of which all sources
        are taken `apart`. `called`: the modules on the path, and how many keys there
        are to each. Those that are called `outside` hold the tree as it was before."""
        root = len(root_of(path))
        begin = max([root, *(n + 1 for call, n in called if call in outside)])
        ends = range(begin, len(path) + 1)
        for n in ends:
            if not apart.isdisjoint(self._stacks[path[:n]]):
                return n
        within = [self._places.sources_in.get(path[:n], set()) for n in ends]
        whole = next((x for x in within if x and x <= apart), None)
        # If a model has nothing but `blocks`, both are such trees: it is the one that
        # is called, or the innermost.
        same = [n for n, x in zip(ends, within) if x == whole]
        of_calls = {n for _, n in called}
        return next((n for n in same if n in of_calls), same[-1] if same else None)

    def _after(self, sow: Mark) -> list[int | None]:
        """For each scan around a mark, where in its name the index of an iteration
        stands: behind the highest tree that the scan takes apart as a whole, or where
        that of a list stood that was stacked before. For an iteration of
        `model/blocks/attn`, in a scan over the arrays in `blocks`, it is
        `model/blocks/2/attn`."""
        visit = sow.visits[0]
        path = self._path(visit)
        around = [(v.call, self._path(v)) for v in (*visit.running, visit)]
        levels = [(call, len(p)) for call, p in around if p == path[: len(p)]]

        def of_scan(scan):
            apart, outside = self._scans.get(scan, (set(), ()))
            n = self._behind(path, levels, apart, outside)
            # Of a stack of stacks, the index stands behind those that were there first.
            before = (
                i
                for i in visit.indices
                if n is not None
                and (i.at < n or i.at == n and i.cut.way[: len(scan)] != scan)
            )
            return n if n is None else n + sum(1 for _ in before)

        return list(map(of_scan, sow.scans))

    # --- the names of marks ---
    def _name(self, visit: Visit) -> Path:
        self._path(visit)
        return visit.name

    def _named(self, sow: Mark) -> Site:
        site, note, modes = sow.site, sow.site.note, self._marking.modes
        mine = [x for x in site.labels if x.name is None and x.depth == self._depth]
        if not (mine if note else self._marking.scope and not site.scoped):
            return site
        paths = list(dict.fromkeys(map(self._name, sow.visits)))
        is_asked_for = modes is None or site.mode in map(without_order, modes)
        if is_asked_for and (len(paths) > 1 or note and not paths):
            calls = map(repr, map("/".join, paths) if paths else [note and note.call])
            raise SowError(
                f"eqx_sow cannot tell which module a {site.mode} at {site.where} "
                f"belongs to: it may be that of {' or '.join(calls)}. Differentiate "
                "each call by itself, mark the value with `sow`, or leave this mode "
                "out, by `modes`."
            )
        others = tuple(x for x in site.labels if x not in mine)
        if not paths:
            return site if note is None else site._replace(labels=others)
        path = paths[0]
        after = tuple(n and len("/".join(path[:n])) for n in self._after(sow))
        if note is None:
            self.roots_of_sows["/".join(root_of(path))] = None
            site = site.in_scope("/".join(path))._replace(scoped=True)
            labels = tuple(x._replace(after=after) for x in site.labels)
            return site._replace(labels=labels)
        if not (note.is_sow or self._chooses(note.call, path)):
            return site._replace(labels=others)
        method = () if note.call.method == "__call__" else (note.call.method,)
        name = ".".join(("/".join(path), *method, *note.what)) or "."
        new = Label(name, mine[0].tag, self._depth, after).in_scope(note.scope)
        self.roots["/".join(filter(None, (note.scope, *root_of(path))))] = None
        return site._replace(labels=(new, *others))

    def _chooses(self, call: NotedCall, path: Path) -> bool:
        capture, name = self._marking.capture, "/".join(path) or "."
        if call.is_function:
            return True
        self.seen.setdefault(name, call.cls)
        if self._classes is not None:
            by_class = tuple(c for c in self._classes if c is not object)
            return issubclass(call.cls, by_class) or path[:1] not in self._left_out
        try:
            chosen = capture(name, call.outline)
            if eqx.is_array(chosen):
                raise TypeError("it returned an array")
            return bool(chosen)
        except (TypeError, AttributeError) as e:
            raise TypeError(
                f"`capture={capture!r}` failed for the module at {name!r}: {e}. A "
                "predicate receives the module with shapes in place of its arrays, "
                "whose values are not known yet. Return a bool: decide by the path, or "
                "by something static in the module, such as its type or its shapes. "
                "To capture what a function returns, `jax.jit` it, or `sow` there."
            ) from e


def _last(part: Path, path: Path, begin: int) -> int | None:
    """Where a path is in another one, behind its beginning, and as far to the end as it
    can be."""
    n = len(part)
    places = range(len(path) - n, begin - 1, -1)
    return next((i for i in places if path[i : i + n] == part), None)
