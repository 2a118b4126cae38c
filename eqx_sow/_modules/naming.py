"""What captured calls are called: the place that their arrays come from.

    def f(model, x):                      # under a capture
        half = jax.tree.map(lambda a: a.astype("bfloat16"), model)
        return half.layers[0](x)          # a `Linear`, with arrays `weight` and `bias`

The edge of the call has the two arrays as operands. They come from the inputs at
`model/layers/0/weight` and `model/layers/0/bias`, with nothing computed on the way. The
path of the first one in the `Linear` is `weight`, so what is left is the name:
`model/layers/0`.

`visits.py` goes over the program, and finds the calls and what their arrays come from.
Here it is decided what each call is called. The program stays as it is: the names are
in the rows of its marks (`Program.marks`), where they are like those of `sow`.

An array may come from several places. `Naming._best_fit` says which of them is
preferred, and `Naming._locate` what a module is called to which no array leads.
"""

import functools as ft
import itertools as it
from collections import Counter, defaultdict
from collections.abc import Container, Hashable
from typing import Any

import equinox as eqx

from .._errors import SowError
from .._mark.calls import NotedCall, Path
from .._mark.site import Label, Site
from .._names import join, with_stars
from .._values.modes import without_order
from .._walk.sows import Way
from .fits import Fits
from .origins import FAR, TRANSPOSED
from .places import is_internal, is_like, Places, root_of
from .spelling import numbered, Spelling, Thing
from .visits import Mark, StackIndex, Visit, Visits


# For a plain function, which would be taken for a predicate.
TO_CAPTURE_CALLS = (
    "To capture the calls of a function, decorate it with `jax.jit` where it is "
    "defined, or `sow` what it returns."
)


class Naming:
    """Names the marks of one program, for the transformation at this depth."""

    def __init__(self, seen: Visits, places: Places, depth: int, marking: Any):
        self._seen = seen
        self._places = places
        self._depth = depth
        self._marking = marking
        self._classes = marking.selected[0]
        self._fits = Fits(places, seen.visits.values())
        # By their paths, the place and the class of each module, or the function.
        self._owner: dict[Path, tuple[Path, Any]] = {}
        # By their names and their identities, the numbers of functions: those that are
        # captured have theirs in the order of the option.
        self._functions: dict[str, dict[int, int]] = defaultdict(dict)
        for fn in marking.selected[1]:
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
        self._left_out: set[Path] = set()
        # For messages: the modules that are called.
        self.seen: dict[str, type] = {}
        # The arguments and variables that have captured modules in them; and with
        # `scope=True`, those with modules in which there are marks.
        self.roots: dict[str, None] = {}
        self.roots_of_sows: dict[str, None] = {}

    @ft.cached_property
    def _spelling(self) -> Spelling:
        """Of the places, when all paths are known: variables have been looked at by
        then, if something is there."""
        return Spelling(it.chain(*self._places.everywhere.maps))

    def sites(self) -> dict[Way, Site]:
        """The sites that have new names."""
        marks = self._seen.marks
        for visit in self._seen.visits.values():
            self._path(visit)
        things = {
            way: self._thing(mark)
            for way, mark in marks.items()
            if mark.visits and mark.site.note and self._mine(mark.site)
        }
        for name, thing in things.values():
            self._spelling.add(name, thing)
        named = {way: self._named(mark, things.get(way)) for way, mark in marks.items()}
        return {way: x for way, x in named.items() if x is not marks[way].site}

    # --- the places of modules ---
    def _path(self, visit: Visit) -> Path:
        if visit.path is None:
            path = self._locate(visit)
            visit.indices = self._indices(visit, path)
            visit.path = self._of_class(path, visit.call)
            if visit.fits:
                self._previous = visit.path
        return visit.path

    def _locate(self, visit: Visit) -> Path:
        """The place of a module: where its arrays say that it is, or that of one like
        it which nothing else is called by, or else its class. A function is behind the
        module that calls it."""
        call = visit.call
        outer = self._path(visit.running[-1]) if visit.running else None
        if call.is_function:
            return (*(outer or ()), call.value_name or self._function(call.cls))
        path = self._best_fit(visit, outer)
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

    def _function(self, fn: Any) -> str:
        """What a function is called: `forward`, or `forward#1` for another one."""
        alike = self._functions[fn.__name__]
        n = alike.setdefault(id(fn), len(alike))
        return f"{fn.__name__}#{n}" if n else fn.__name__

    def _indices(self, visit: Visit, path: Path) -> tuple[StackIndex, ...]:
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
        found: list[StackIndex] = []
        for i, cut in enumerate(cuts):
            outside = [v.call for v in around if len(v.indices) <= i]
            apart = self._fits.sliced(i, cut)
            at = self._fits.keys_to_stack(path, levels, apart, outside)
            before = found[-1].at if found else 0
            found.append(StackIndex(max(before, len(path) if at is None else at), cut))
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

    def _best_fit(self, visit: Visit, outer: Path | None) -> Path | None:
        """The place that the arrays say, or if they say none, where what holds the
        module has it. For

            mean = jax.tree.map(lambda a, b: (a + b) / 2, student, teacher)
            mean(x) + student(x)

        the arrays of `mean` lead to both, with as much computed between. But the second
        call has the very arrays of `student`, so that the first one is `teacher`.
        """
        call, fits, held = visit.call, visit.fits, self._held(visit)
        # Another call fits these better.
        taken = {p for p, fit in fits.items() if self._fits.best[p] < min(fit, (FAR,))}
        # A hypernetwork made some of its arrays, but does not hold it: the call of the
        # hypernetwork is nearer.
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
                # better.
                path in taken and 1 + fits[path][0] - self._fits.best[path][0],
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
            is_best = self._fits.best[path] == fit
            return is_best and is_like(self._places.everywhere.get(path), call)
        return self._is_there(path, call)

    def _alike(self, call: NotedCall, outer: Path, own: Container[Path]) -> Path | None:
        """The place of a module that is like that of a call, and to which the arrays of
        no call lead, or its `own`: in the tree at `outer`, if there is one."""
        alike = self._places.alike(call)
        found = [path for path in alike if path in own or path not in self._fits.best]
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
        is_layer = any(path[:n] in self._fits.stacks for n in ends)
        return path[: len(outer)] == outer and not is_layer

    def _unknown(self, visit: Visit) -> Path:
        """The class, with a number if another one of it was called before."""
        call, name = visit.call, visit.call.cls.__name__
        of_class = self._nowhere[name]
        if not of_class and any(p[:1] == (name,) for p in self._places.everywhere):
            of_class[None] = 0  # an argument, or a variable, is called like the class
        made = visit.arrays[0].made if visit.arrays else id(call.module)
        n = of_class.setdefault(made, len(of_class))
        name = f"{name}#{n}" if n else name
        if call.module is not None or is_internal(call.cls):
            self._left_out.add((name,))
        return (name,)

    def _keys_to_stacks(self, mark: Mark) -> list[int | None]:
        """For each scan around a mark, how many keys of its name lead to the stack that
        it goes over, or `None` if that is not in the name. In the scan of
        `Fits.keys_to_stack` that is 2: the name is `model/blocks/*/attn`."""
        visit = mark.visits[0]
        path = self._path(visit)
        around = [(v.call, self._path(v)) for v in (*visit.running, visit)]
        levels = [(call, len(p)) for call, p in around if p == path[: len(p)]]

        def place(way: Way) -> int | None:
            scan = self._seen.scans.get(way)
            n = self._fits.keys_to_stack(path, levels, *(scan or (set(), ())))
            if n is None:
                return None
            # Of a stack of stacks, the index stands behind those that were there first.
            before = (
                i.at < n or i.at == n and i.cut.way[: len(way)] != way
                for i in visit.indices
            )
            return n + sum(before)

        return list(map(place, mark.scans))

    # --- the names of marks ---
    def _keys(self, visit: Visit) -> Path:
        """The path of a module with the indices, as it is written: `blocks/2/attn` for
        `blocks/attn`."""
        if visit.keys is None:
            keys = self._spelling.keys(self._path(visit))
            for index in reversed(visit.indices):
                keys = (*keys[: index.at], str(index.cut.i), *keys[index.at :])
            visit.keys = keys
        return visit.keys

    def _thing(self, mark: Mark) -> tuple[str, Thing]:
        """What a mark of a call is of, and the name that it would have."""
        visit, note = mark.visits[0], mark.site.note
        assert note is not None
        call, indices = note.call, tuple((x.at, x.cut.i) for x in visit.indices)
        thing = Thing(self._path(visit), indices, call.method, note.what, note.scope)
        method = () if call.method == "__call__" else (call.method,)
        path, _ = with_stars(self._keys(visit), self._keys_to_stacks(mark))
        name = ".".join(("/".join(path), *method, *note.what))
        return join(note.scope, name or "."), thing

    def _mine(self, site: Site) -> list[Label]:
        """The labels that wait for a name."""
        return [x for x in site.labels if x.is_unnamed and x.depth == self._depth]

    def _named(self, mark: Mark, thing: tuple[str, Thing] | None) -> Site:
        """The site of a mark, with its names. `thing` is what one of a call is of."""
        site, note, modes = mark.site, mark.site.note, self._marking.modes
        mine = self._mine(site)
        if not (mine if note else self._marking.scope and not site.scoped):
            return site
        paths = list(dict.fromkeys(map(self._keys, mark.visits)))
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
        path, places = with_stars(paths[0], self._keys_to_stacks(mark))
        if note is None:
            self.roots_of_sows["/".join(root_of(path))] = None
            site = site.in_scope("/".join(path))._replace(scoped=True)
            labels = tuple(x._replace(places=places) for x in site.labels)
            return site._replace(labels=labels)
        if not (note.is_sow or self._chooses(note.call, path)):
            return site._replace(labels=others)
        new = Label("", mine[0].tag, self._depth, places).in_scope(note.scope)
        assert thing is not None
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
            return issubclass(call.cls, by_class) or path[:1] not in self._left_out
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


def _n_shared(a: Path, b: Path) -> int:
    """How many keys two paths begin with that are the same."""
    different = (i for i, (x, y) in enumerate(zip(a, b)) if x != y)
    return next(different, min(len(a), len(b)))
