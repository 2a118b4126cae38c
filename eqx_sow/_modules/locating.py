"""Where the modules are that a program calls: the places that their arrays come from.

    def f(model, x):                      # under a capture
        half = jax.tree.map(lambda a: a.astype("bfloat16"), model)
        return half.layers[0](x)          # a `Linear`, with arrays `weight` and `bias`

The edge of the call has the two arrays as operands. They come from the inputs at
`model/layers/0/weight` and `model/layers/0/bias`, with nothing computed on the way. The
path of the first one in the `Linear` is `weight`, so what is left is the place:
`model/layers/0`.

An array may come from several places. `Locating._best` says which of them is preferred,
and `Locating._locate` where a module is to which no array leads.
"""

import itertools as it
from collections import Counter, defaultdict
from collections.abc import Container, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

from .._mark.calls import NotedCall, Path
from .._mark.trees import numbered
from .origins import closed, Cut, FAR, in_common, Origin, TRANSPOSED
from .places import is_internal, is_like, Places, root_of
from .visits import Visit, VisitedMark, Visits


class StackIndex(NamedTuple):
    """An entry of a stack: its index stands behind `at` keys of the path."""

    at: int
    cut: Cut


class Located(NamedTuple):
    """Where a module is. If that is not known, the first key is the name of a class:
    `("MLP#1", "layers", "0")`. `indices`: which entries of stacks it is in, from left
    to right in the path."""

    path: Path
    indices: tuple[StackIndex, ...] = ()


class Fit(NamedTuple):
    """How well the arrays of a module fit a place: how much is computed between, and
    how many lead there, with a minus. Smaller is better."""

    distance: int
    n_arrays: int


class Candidates(NamedTuple):
    """The places to which the arrays of a module lead, and for each the constant
    indices that it was taken out by. `is_made`: whether some of the arrays were made of
    others, rather than changed."""

    fits: Mapping[Path, Fit] = {}
    cuts: Mapping[Path, tuple[Cut, ...]] = {}
    is_made: bool = False


class Locating:
    """Locates the modules of all visits, for the transformation at this depth.
    `functions` are captured, and have their numbers in this order."""

    def __init__(
        self, seen: Visits, places: Places, depth: int, functions: Iterable[Any]
    ):
        self._places = places
        self._scans = seen.scans
        self._depth = depth
        # For each place, how well it fits the call that it fits best.
        self._best_fits: dict[Path, Fit] = {}
        # The places of lists whose layers were stacked on the way, and their sources.
        self._stacks: dict[Path, set[int]] = defaultdict(set)
        # The sources that the modules come from. And by the number of slices before and
        # the length of the stack, those of which a constant index takes an entry.
        self._used: set[int] = set()
        self._sliced: dict[tuple[int, int], set[int]] = defaultdict(set)
        # By their paths, the place and the class of each module, or the function.
        self._owner: dict[Path, tuple[Path, Any]] = {}
        # By their names and their identities, the numbers of functions.
        self._functions: dict[str, dict[int, int]] = defaultdict(dict)
        for fn in functions:
            self._function(fn)
        # The place of the last call of a module with arrays; and how often each place
        # was taken for one of several modules that are alike.
        self._previous: Path = ()
        self._n_calls: Counter[Path | None] = Counter()
        # By the name of a class, the modules of it of which no place is known, by their
        # identities, and the number of each: 1 for `MLP#1`.
        self._nowhere: dict[str, dict[Hashable, int]] = defaultdict(dict)
        # What `capture=True` leaves out, unless its class is selected, too. Something
        # in there begins with the same key.
        self.left_out: set[Path] = set()
        self._located: dict[Visit, Located] = {}
        self._candidates: dict[Visit, Candidates] = defaultdict(Candidates)
        for visit in seen.visits.values():
            self._candidates[visit] = self._candidates_of(visit)
        for visit in seen.visits.values():
            self.at(visit)

    # --- the places to which arrays lead ---
    def _candidates_of(self, visit: Visit) -> Candidates:
        """The places that a module may have.

        If the `weight` of a `Linear` comes from `model/layers/0/weight`, that is
        `model/layers/0`: without the path that it has in the `Linear`. Of each array,
        the nearest sources count. The first come first."""
        fits: dict[Path, Fit] = {}
        cuts: dict[Path, tuple[Cut, ...]] = {}
        is_made, is_new, is_along = False, False, self._is_along(visit)
        arrays = zip(visit.call.leaves, visit.arrays, visit.lanes)
        for leaf, array, lanes in arrays:
            leads = [
                (distance, path[:at], source)
                for source, distance in array.distances.items()
                for path in self._places.paths(source)
                if (at := _last(leaf, path, len(root_of(path)))) is not None
            ]
            nearest = min([distance for distance, *_ in leads], default=0)
            sources = {p: s for distance, p, s in leads if distance == nearest}
            is_made |= nearest >= FAR
            is_new |= not leads and max(array.distances.values(), default=0) >= FAR
            self._used.update(array.distances)
            for path in self._as_stacked(sources):
                distance, n = fits.get(path, (nearest, 0))
                fits[path] = Fit(min(distance, nearest), n - 1)
                layers = self._layers(array, sources.get(path, -1), lanes, is_along)
                cuts[path] = in_common([layers, cuts.get(path, layers)])
                for i, cut in enumerate(layers):
                    self._sliced[i, cut.n].add(sources[path])
        # If a `Linear` makes the `scale` and the `bias` of a layer, its own `bias` is
        # only added to the other one. There is no place that has the `scale`.
        is_made |= is_new and any(map(self._places.everywhere.get, fits))
        for path, fit in fits.items():
            self._best_fits[path] = min(fit, self._best_fits.get(path, fit))
        return Candidates(fits, cuts, is_made)

    def _layers(
        self, array: Origin, source: int, lanes: Container[int], is_along: bool
    ) -> tuple[Cut, ...]:
        """The slices that are layers of a stack. The axes of that are in front of those
        that the module has itself, if it was not stacked along another one
        (`is_along`). In

            one = jax.tree.map(lambda a: a[:, 2], blocks)

        there is an axis of `blocks` in front of the one that the slice is along: that
        is no layer. The axes of vmaps, `lanes`, do not count. What an array was
        reshaped or repeated to has axes of other lengths."""
        shape = self._places.arrays[source].shape
        cuts = closed(array.cuts.get(source, ()))
        if not cuts:
            return ()
        own = [k for i, of in enumerate(array.axes) if i not in lanes for k in of]

        def is_layer(cut):
            if cut.axis is None or shape[cut.axis] != cut.n:
                return False
            return is_along or all(k > cut.axis for k in own)

        known = it.takewhile(lambda cut: cut.axis is not None, cuts)
        layers = it.takewhile(is_layer, sorted(known, key=lambda cut: cut.axis or 0))
        # Of another array of the module, it may be another axis.
        return tuple(cut._replace(axis=None) for cut in layers)

    def _is_along(self, visit: Visit) -> bool:
        """Whether what a module was taken out of is a stack along another axis than the
        first, as `eqx.filter_vmap(make, out_axes=1)` makes it. If a static field of a
        `Linear` says that it has 5 outputs, its `weight` of shape `(5, 3, 4)` is a
        stack along the second axis."""
        found = False
        for shape, array in zip(visit.call.shapes, visit.arrays):
            for source, cuts in array.cuts.items():
                whole = self._places.arrays[source].shape
                sizes = self._places.sizes(source)
                if len(closed(cuts)) != 1 or len(whole) != len(shape) + 1:
                    return False
                if not sizes.issuperset(shape):
                    return False
                found |= not sizes.issuperset(whole[1:])
        return found

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

    # --- the place of a module ---
    def at(self, visit: Visit) -> Located:
        """Where the module of a visit is: those of earlier calls take their places
        first."""
        if visit not in self._located:
            path = self._locate(visit)
            indices = self._indices(visit, path)
            self._located[visit] = Located(self._of_class(path, visit.call), indices)
            if self._candidates[visit].fits:
                self._previous = self._located[visit].path
        return self._located[visit]

    def _locate(self, visit: Visit) -> Path:
        """The place of a module: where its arrays say that it is, or that of one like
        it which nothing else is called by, or else its class. A function is behind the
        module that calls it."""
        call, fits = visit.call, self._candidates[visit].fits
        outer = self.at(visit.running[-1]).path if visit.running else None
        if call.is_function:
            name = call.value_name
            return (*(outer or ()), *((name,) if name else self._function(call.cls)))
        path = self._best(visit, outer)
        if path is not None and self._is_sure(path, visit):
            return path
        if fits or call.module is not None:
            # It has no arrays of its own, or those that lead to it are another
            # module's: tied weights, or made by a hypernetwork.
            around = root_of(path or next(iter(fits), ()))
            around = around if outer is None else outer
            alike = self._alike(call, around, fits if path is None else ())
            if alike is not None:
                return alike
        return self._unknown(visit) if path is None else path

    def _of_class(self, place: Path, call: NotedCall) -> Path:
        """The place itself, if a module of this class is there. One of another class
        that is made of the arrays there has its class behind that. If nothing is there,
        the first that is called has the place. A function that is called like a module
        has a number."""
        for n in it.count():
            more = (call.cls.__name__,) * n
            path = numbered(place, n) if call.is_function else (*place, *more)
            there = self._places.everywhere.get(path)
            is_free = there is None or not n and type(there) is call.cls
            of = place, call.cls
            if is_free and self._owner.setdefault(path, of) == of:
                break
        return path

    def _function(self, fn: Any) -> Path:
        """What a function is called: `forward`, or `forward#1` for another one."""
        alike = self._functions[fn.__name__]
        return numbered((fn.__name__,), alike.setdefault(id(fn), len(alike)))

    def _held(self, visit: Visit) -> Path | None:
        """The place in what holds the very module: one that is running, or the
        arguments."""
        holder, inside = visit.call.holder or (None, ())
        if holder == self._depth:
            return inside
        around = next((v for v in reversed(visit.running) if v.call is holder), None)
        return around and (*self.at(around).path, *inside)

    def _best(self, visit: Visit, outer: Path | None) -> Path | None:
        """The place that the arrays say, or if they say none, where what holds the
        module has it. For

            mean = jax.tree.map(lambda a, b: (a + b) / 2, student, teacher)
            mean(x) + student(x)

        the arrays of `mean` lead to both, with as much computed between. But the second
        call has the very arrays of `student`, so that the first one is `teacher`.
        """
        call, held = visit.call, self._held(visit)
        fits, _, is_made = self._candidates[visit]
        best = self._best_fits
        # Another call fits these better.
        taken = {path for path, fit in fits.items() if best[path] < min(fit, (FAR,))}
        # A hypernetwork made some of its arrays, but does not hold it: the call of the
        # hypernetwork is nearer.
        makers = taken - {outer} if is_made else ()
        return min(
            (path for path in fits if path not in makers),
            key=lambda path: (
                # A tied weight is at two places.
                not self._is_there(path, call),
                # What most of the arrays say.
                fits[path].n_arrays,
                # Of several places that one array has.
                path != held,
                # If another call fits this place better, prefer it less, by how much
                # better.
                path in taken and 1 + fits[path].distance - best[path].distance,
            ),
            default=held,
        )

    def _is_there(self, path: Path, call: NotedCall) -> bool:
        return type(self._places.everywhere.get(path)) is call.cls

    def _is_sure(self, path: Path, visit: Visit) -> bool:
        """Whether the place is that of the module. Otherwise all that it has are tied
        weights: arrays of another module that were put into this one, whose own arrays
        no call has."""
        fit, call = self._candidates[visit].fits.get(path), visit.call
        if fit is None:
            return True
        if fit.distance == TRANSPOSED:
            is_best = self._best_fits[path] == fit
            return is_best and is_like(self._places.everywhere.get(path), call)
        return self._is_there(path, call)

    def _alike(self, call: NotedCall, outer: Path, own: Container[Path]) -> Path | None:
        """The place of a module that is like that of a call, and to which the arrays of
        no call lead, or its `own`: in the tree at `outer`, if there is one."""
        alike = self._places.alike(call)
        found = [path for path in alike if path in own or path not in self._best_fits]
        inside = [path for path in found if self._is_in(outer, path)]
        if call.module is None:
            return inside[0] if len(inside) == 1 else None
        # Such as a layer without arrays, of which `eqx.filter_checkpoint(layer)` calls
        # a copy. Of several that are alike, one that was not called yet; then the one
        # that is nearest to where the arrays before came from: behind `decoder/linear`,
        # `decoder/dropout` and not `encoder/dropout`.
        order = lambda path: (self._n_calls[path], -_n_shared(path, self._previous))
        path = min(inside or found, key=order, default=None)
        self._n_calls[path] += 1
        return path

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
        if not of_class and any(p[:1] == (name,) for p in self._places.everywhere):
            of_class[None] = 0  # an argument, or a variable, is called like the class
        made = visit.arrays[0].made if visit.arrays else id(call.module)
        path = numbered((name,), of_class.setdefault(made, len(of_class)))
        if call.module is not None or is_internal(call.cls):
            self.left_out.add(path)
        return path

    # --- stacks ---
    def _around(self, visit: Visit, path: Path) -> list[tuple[NotedCall, Located]]:
        """The modules that are running, and hold what is at a path."""
        every = [
            (v.call, self._located[v]) for v in visit.running if v in self._located
        ]
        return [(call, at) for call, at in every if at.path == path[: len(at.path)]]

    def _indices(self, visit: Visit, path: Path) -> tuple[StackIndex, ...]:
        """Where the index stands of each slice of a stack that a module is: behind the
        highest tree of which all arrays are sliced so. Something without arrays is in
        the entries that the module around is."""
        around = self._around(visit, path)
        inherited = around[-1][1].indices if around else ()
        cuts = self._candidates[visit].cuts.get(path, ())
        if len(cuts) <= len(inherited):
            return inherited
        indices: list[StackIndex] = []
        for i, cut in enumerate(cuts):
            outside = [call for call, at in around if len(at.indices) <= i]
            # With those that may be part of the same stack, and are not used.
            apart = self._sliced[i, cut.n] | self._places.of_length(cut.n, self._used)
            n = self._keys_to_stack(visit, path, apart, outside)
            before = indices[-1].at if indices else 0
            indices.append(StackIndex(max(before, len(path) if n is None else n), cut))
        return tuple(indices)

    def keys_to_stacks(self, mark: VisitedMark) -> list[int | None]:
        """For each scan around a mark, how many keys of its name lead to the stack that
        it goes over, or `None` if that is not in the name. In the scan of
        `_keys_to_stack` that is 2: the name is `model/blocks/*/attn`."""
        found: list[int | None] = []
        for way in mark.scans:
            path, indices = self.at(mark.visits[0])
            scan = self._scans.get(way) or (set(), ())
            n = self._keys_to_stack(mark.visits[0], path, *scan)
            if n is not None:
                # Of a stack of stacks, the index stands behind those that were there
                # first: not behind those of slices in this scan.
                in_scan = lambda i: i.cut.way[: len(way)] == way
                n += sum(i.at < n or i.at == n and not in_scan(i) for i in indices)
            found.append(n)
        return found

    def _keys_to_stack(
        self, visit: Visit, path: Path, apart: set[int], outside: Container[NotedCall]
    ) -> int | None:
        """How many keys of a path lead to the stack that is taken `apart`, given by its
        sources: to the highest tree that has no others. In

            lax.scan(lambda x, block: (block.attn(x), None), x, model.blocks)

        the path of the call is `model/blocks/attn`, and two keys lead to
        `model/blocks`: all that is in there is taken apart, and in `model` there is
        more. What is called `outside` holds the tree as it was before.
        """
        # The modules on the path, and how many keys there are to each.
        called = [(call, len(at.path)) for call, at in self._around(visit, path)]
        called.append((visit.call, len(path)))
        root = len(root_of(path))
        begin = max([root, *(n + 1 for call, n in called if call in outside)])
        ends = range(begin, len(path) + 1)
        for n in ends:
            if not apart.isdisjoint(self._stacks.get(path[:n], ())):
                return n
        every = [self._places.sources_in.get(path[:n], set()) for n in ends]
        within = [x & self._places.inexact for x in every]
        whole = next((x for x in within if x and x <= apart), None)
        # If a model has nothing but `blocks`, both are such trees. It is the one that
        # holds what else is taken apart, such as a permutation beside the layers; that
        # is called; or the innermost, of modules if there are any inside.
        same = [n for n, x in zip(ends, within) if x == whole]
        n_apart = {n: len(x & apart) for n, x in zip(ends, every) if n in same}
        same = [n for n in same if n_apart[n] == max(n_apart.values())]
        of_calls = {n for _, n in called}
        modules = [n for n in same if n > root and path[:n] in self._places.modules]
        innermost = (modules or same or [None])[-1]
        highest = next((n for n in same if n in of_calls), innermost)
        # A module that is called in the loop is an entry of the stack, also if some of
        # its arrays are not used, so that JAX does not take these apart.
        inside = [n for call, n in called if n >= begin and call not in outside]
        entries = (n for n in inside if not apart.isdisjoint(within[n - begin]))
        found = [n for n in (highest, next(entries, None)) if n is not None]
        return min(found, default=None)


def _last(part: Path, path: Path, begin: int) -> int | None:
    """Where a path is in another one, behind its beginning, and as far to the end as it
    can be."""
    n = len(part)
    places = range(len(path) - n, begin - 1, -1)
    return next((i for i in places if path[i : i + n] == part), None)


def _n_shared(a: Path, b: Path) -> int:
    """How many keys two paths begin with that are the same."""
    different = (i for i, (x, y) in enumerate(zip(a, b)) if x != y)
    return next(different, min(len(a), len(b)))
