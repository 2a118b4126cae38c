"""To which places the arrays of a module lead: see `naming.py` for which of them it is.

A `Linear` is called, with arrays `weight` and `bias`. The first one comes from the
input at `model/layers/0/weight`: without the path that it has in the `Linear`, that is
`model/layers/0`, which is a place that fits.
"""

import itertools as it
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence

from .._mark.calls import NotedCall, Path
from .origins import closed, Cut, FAR, in_common, Origin
from .places import Places, root_of
from .visits import Visit


class Fits:
    """Fills in `Visit.fits` and `Visit.cuts`, and knows the stacks that modules are
    taken out of."""

    def __init__(self, places: Places, visits: Iterable[Visit]):
        self._places = places
        # For each place, how well it fits the call that it fits best.
        self.best: dict[Path, tuple[int, int]] = {}
        # The places of lists whose layers were stacked on the way, and their sources.
        self.stacks: dict[Path, set[int]] = defaultdict(set)
        # The sources that the modules come from. And by the number of slices before and
        # the length of the stack, those of which a constant index takes an entry.
        self.used: set[int] = set()
        self._sliced: dict[tuple[int, int], set[int]] = defaultdict(set)
        for visit in visits:
            self._add(visit)

    def _add(self, visit: Visit) -> None:
        """Finds the places that a module may have, and how well each fits.

        If the `weight` of a `Linear` comes from `model/layers/0/weight`, that is
        `model/layers/0`. Of each array, the nearest sources count. The first come
        first."""
        is_new, is_along = False, self._is_along(visit)
        arrays = zip(visit.call.leaves, visit.arrays, visit.lanes)
        for leaf, array, lanes in arrays:
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
            self.used.update(array.distances)
            for path in self._as_stacked(sources):
                distance, n = visit.fits.get(path, (nearest, 0))
                visit.fits[path] = min(distance, nearest), n - 1
                source = sources.get(path, -1)
                cuts = self._layers(array, source, lanes, is_along)
                visit.cuts[path] = in_common([cuts, visit.cuts.get(path, cuts)])
                for i, cut in enumerate(cuts):
                    self._sliced[i, cut.n].add(sources[path])
        # If a `Linear` makes the `scale` and the `bias` of a layer, its own `bias` is
        # only added to the other one. There is no place that has the `scale`.
        visit.is_made |= is_new and any(map(self._places.everywhere.get, visit.fits))
        for path, fit in visit.fits.items():
            self.best[path] = min(fit, self.best.get(path, fit))

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
        shape = self._places.array(source).shape
        cuts = closed(array.cuts.get(source, ()))
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
                whole = self._places.array(source).shape
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
                    if path[:i] not in self.stacks:
                        self._places.stack(path[:i], path[i])
                    self.stacks[path[:i]] |= of_path
                    path = shorter[path]
                found[path] |= of_path
        return found

    def sliced(self, i: int, cut: Cut) -> set[int]:
        """The sources that slices such as this one take apart, after `i` others; and
        those that may be part of the same stack, and are not used."""
        return self._sliced[i, cut.n] | self._places.of_length(cut.n, self.used)

    def keys_to_stack(
        self,
        path: Path,
        called: Sequence[tuple[NotedCall, int]],
        apart: set[int],
        outside: Container[NotedCall],
    ) -> int | None:
        """How many keys of a path lead to the stack that is taken `apart`, given by its
        sources: to the highest tree that has no others. In

            lax.scan(lambda x, block: (block.attn(x), None), x, model.blocks)

        the path of the call is `model/blocks/attn`, and two keys lead to
        `model/blocks`: all that is in there is taken apart, and in `model` there is
        more. `called`: the modules on the path, and how many keys there are to each.
        Those that are called `outside` hold the tree as it was before.
        """
        root = len(root_of(path))
        begin = max([root, *(n + 1 for call, n in called if call in outside)])
        ends = range(begin, len(path) + 1)
        for n in ends:
            if not apart.isdisjoint(self.stacks.get(path[:n], ())):
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
