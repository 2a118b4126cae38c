"""Names, and what patterns select among them."""

import difflib
import fnmatch
import itertools as it
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ._errors import shown, SowError, UnknownSowError
from ._globs import (
    compiled,
    fits,
    fitting,
    Index,
    is_glob,
    lengths_of_lists,
    Part,
    parts_of,
    Tree,
)


def join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


class Named(NamedTuple):
    """What a mark is to patterns: its name, and the loops around it.

    `after` is that of its `Label`. `loops` are the numbers of iterations, from outside
    in.
    """

    name: str
    after: tuple[int | None, ...] = ()
    loops: tuple[int, ...] = ()


class Selected(NamedTuple):
    """What a pattern selects of a mark: all of it, under its own `name`; or, with an
    index in the pattern, one iteration of a loop, under the name with that index. A
    layer of a list that is counted from the end has that name, too.

    `at` has an entry for each loop around the mark, from outside in: which iteration is
    meant, or `None` for all. `after` is `Label.after` for the loops of which all are
    meant, in the new name.
    """

    name: str
    at: tuple[int | None, ...] = ()
    after: tuple[int | None, ...] = ()


# Loops that have any iteration one may ask for, around a mark that a rule of a user's
# makes.
ANY_LOOPS = (2**62,) * 8


def _with_indices(
    named: Named, parts: Sequence[Part], loops: Sequence[int]
) -> list[Part | Index]:
    """A name, with an index for each of these loops: `blocks/attn` is then
    `blocks/*/attn`."""
    name, places = named.name, places_of(named)
    index = lambda k, rest="": Index(k, named.loops[k], rest)
    new: list[Part | Index] = [index(k) for k in loops if places[k] == 0]
    for part in parts:
        inside = [k for k in loops if part.start < (places[k] or 0) <= part.end]
        if not inside:
            new.append(part)
            continue
        cut = places[inside[0]]
        rest = name[cut : part.end]
        text, from_end = part.text, part.from_end
        text = text.removesuffix(rest)
        from_end = from_end and from_end.removesuffix(rest)
        new.append(Part(part.start, part.end - len(rest), text, from_end))
        *others, last = inside
        new += [*map(index, others), index(last, rest)]
    return [*new, *[index(k) for k in loops if places[k] is None]]


def places_of(named: Named) -> tuple[int | None, ...]:
    """For each loop, where its index stands, as in `Label.after`."""
    return (*named.after, *[None] * len(named.loops))[: len(named.loops)]


def _forms(
    places: Sequence[int | None], most: int, whole: bool
) -> Iterator[tuple[bool, list[int]]]:
    """Which of the loops around a mark may have their index in a name, those first that
    a list of layers would have: whether it is one of these, and the loops. Of those
    with an index at the end, the inner ones need the outer ones. `blocks/2` is a layer,
    also in a loop over batches: a list has that name. `most`: so many indices, beside
    those of all iterations."""
    inside = [k for k, place in enumerate(places) if place is not None]
    at_end = [k for k, place in enumerate(places) if place is None]
    at_end = [] if whole else at_end[:most]
    for m in range(len(at_end) + 1):
        yield True, [*inside, *at_end[:m]]
    if whole:
        yield from [(False, [])] if inside else []
        return
    for n in range(most + 1):
        for m in range(min(n, len(at_end)) + 1):
            for some in it.combinations(inside, n - m):
                if len(some) < len(inside):
                    yield False, [*some, *at_end[:m]]


def _of_sow(
    tree: Tree, named: Named, lengths: Mapping[str, int], whole: bool = False
) -> dict[int, tuple[bool, list[Selected]]]:
    """The patterns that fit a mark, and what each selects of it; also whether it fits
    the name that a list would have. For the pattern `h/*/0` and `h` in two loops, the
    names are `h`, `h/*` and `h/*/*`; the first counts that fits."""
    found: dict[int, tuple[bool, list[Selected]]] = {}
    parts = parts_of(named.name, lengths)
    for in_list, loops in _forms(places_of(named), tree.n_indices, whole):
        name = _with_indices(named, parts, loops)
        for i, choices in fitting(tree.root, name, whole).items():
            if i not in found:
                each = [x for x in map(dict, choices) if _is_there(named, x)]
                if each:
                    some = [_selected(named, x) for x in _without_parts(each)]
                    found[i] = in_list, some
    return found


def _is_there(named: Named, choice: Mapping[Any, Any]) -> bool:
    """Whether a loop has the iterations that are chosen, if its length is symbolic."""
    for x, i in choice.items():
        if not isinstance(x, Index) or i == "*" or isinstance(x.n, int):
            continue
        try:
            if not -x.n <= i < x.n:
                return False
        except Exception:  # JAX has no public name for what it raises
            raise SowError(
                f"{named.name!r} is in a loop of the symbolic length {x.n}, so it is "
                f"not known whether there is an iteration {i}. Say how long it is at "
                f"least: `jax.export.symbolic_shape({str(x.n)!r}, "
                f"constraints=['{x.n} >= 8'])`."
            ) from None
    return True


def _without_parts(each: list[dict[Any, Any]]) -> list[dict[Any, Any]]:
    """`h/1/0` is part of `h/*/0`."""

    def is_part(x, whole):
        return x is not whole and all(whole.get(k) in ("*", i) for k, i in x.items())

    return [x for x in each if not any(is_part(x, whole) for whole in each)]


# What is written into a name: in which order (from the left), where what is there
# begins and ends, and the new text.
_Edit = tuple[tuple[bool, int, int], int, int, str]


def _edits(named: Named, choice: Mapping[Any, Any]) -> list[_Edit]:
    places, last = places_of(named), len(named.name)
    edits = []
    for x, new in choice.items():
        if isinstance(x, Part):
            edits.append(((False, x.start, -1), x.start, x.end, new))
            continue
        place = places[x.loop]
        at = last if place is None else place
        text = f"/{new}" if at else f"{new}/"
        edits.append(((place is None, at, x.loop), at, at, text))
    return sorted(edits)


def _edited(name: str, edits: Sequence[_Edit]) -> str:
    for _, start, stop, text in reversed(edits):
        name = name[:start] + text + name[stop:]
    return name


def _selected(named: Named, choice: Mapping[Any, Any]) -> Selected:
    """What is selected by such a `Choice`."""
    some = {x: i for x, i in choice.items() if i != "*"}
    given = {x.loop: i for x, i in some.items() if isinstance(x, Index)}
    edits = _edits(named, some)
    # An index moves those to the right that stand behind it.
    moved = lambda k, place: sum(
        len(text) - (stop - start)
        for order, start, stop, text in edits
        if order < (False, place, k)
    )
    after = tuple(
        None if place is None else place + moved(k, place)
        for k, place in enumerate(places_of(named))
        if k not in given
    )
    name = _edited(named.name, edits)
    if not given:
        return Selected(name, (), after)
    # Not `%`: the length may be symbolic.
    from_start = lambda i, n: i if i >= 0 else n + i
    at = tuple(
        from_start(given[k], n) if k in given else None
        for k, n in enumerate(named.loops)
    )
    if len(some) < len(choice):
        named_so = _of_sow(compiled((name,)), named, {})
        if [x.at for _, some in named_so.values() for x in some] != [at]:
            # For `h/*/0`, that is `h/0`, which is another one.
            name, after = (
                _edited(named.name, _edits(named, choice)),
                (None,) * len(after),
            )
    return Selected(name, at, after)


# --- what patterns select in a program ---
class Selection:
    """What some patterns select of the marks that are `found` in a program. For `h` in
    a loop of 4 iterations,

        "h"     all of it
        "h/3"   iteration 3
        "h/-1"  the same
        "h/4"   nothing

    and for `blocks/attn` in a loop over layers, with an `after` of `(6,)`,
    `"blocks/2/attn"` is layer 2, `"blocks/*/attn"` all of it, and `"blocks/[12]/attn"`
    two layers: a stack goes by the names of a list. Only where a pattern fits none of
    these, the names of the stack itself count: `"blocks/*"` is `blocks`, or if that is
    not there, `blocks/attn`.

    What is the name of a mark means that mark: if there is a mark `h/0`, no pattern
    means iteration 0 of `h` by that. A pattern that fits nothing may lack the root of a
    model, one of `roots`, if it fits behind one root only; or, of several patterns, if
    there is one root behind which all of them fit.

    With `whole`, a pattern selects no iterations, only all of them.

    It is equal to another one that selects the same, whatever the mark.
    """

    def __init__(
        self,
        patterns: Iterable[Any],
        found: Iterable[Named],
        roots: Iterable[str] = (),
        *,
        also: Iterable[Named] = (),
        whole: bool = False,
    ):
        """`also`: iterations that are selected, as if they were marks."""
        self.patterns = tuple(dict.fromkeys(patterns))
        found = list(found)
        self._lengths = lengths_of_lists(x.name for x in found)
        self._every = dict.fromkeys((*found, *also))
        self.names = frozenset(x.name for x in self._every)
        self._loops: dict[Any, list[tuple[int, ...]]] = {}
        for name, after, loops in self._every:
            self._loops.setdefault((name, after), []).append(loops)
        self._whole = whole
        # Those that fit behind several roots, and what they are behind each of them.
        self.ambiguous: dict[str, list[str]] = {}
        numbered = list(enumerate(self.patterns))
        self._predicates = {i: p for i, p in numbered if not isinstance(p, str)}
        paths = {i: p for i, p in numbered if isinstance(p, str)}
        self._settle(paths)
        missing = {i: p for i, p in paths.items() if i in self.missing}
        roots = [root for root in dict.fromkeys(roots) if root]
        if missing and roots:
            self._settle(paths | self._behind_a_root(missing, roots))

    def _settle(self, paths: Mapping[int, str]) -> None:
        """Finds out what the patterns are for, by their numbers."""
        self._exact = {p: i for i, p in paths.items() if p in self.names}
        others = {i: p for i, p in paths.items() if p not in self.names}
        self._numbers, self._tree = list(others), compiled(tuple(others.values()))
        # Which of these fit names that a list would have.
        has_stacks = any(place is not None for x in self._every for place in x.after)
        self._in_list = frozenset(
            n
            for named in (self._every if has_stacks else ())
            for n, (in_list, _) in self._fitting(named).items()
            if in_list
        )
        self._kept: dict[Named, dict[int, list[Selected]]] = {}
        fit = {i for named in self._every for i in self.of(named)}
        # The numbers of those that select nothing.
        self.missing = [i for i in range(len(self.patterns)) if i not in fit]
        of_sows = tuple(paths.items()), self.names, self._in_list
        self._key = (*self._predicates.items(), *of_sows, self._whole)
        self._hash = hash(self._key)

    def _behind_a_root(
        self, missing: Mapping[int, str], roots: Iterable[str]
    ) -> dict[int, str]:
        behind = []
        for root in roots:
            paths = {i: _behind(root, p) for i, p in missing.items()}
            these = Selection(paths.values(), self._every, whole=self._whole)
            unfit = {these.patterns[n] for n in these.missing}
            behind.append({i: p for i, p in paths.items() if p not in unfit})
        of_all = [paths for paths in behind if len(paths) == len(missing)]
        if len(of_all) == 1:
            return of_all[0]
        found = {}
        for i, p in missing.items():
            several = [paths[i] for paths in behind if i in paths]
            if len(several) > 1:
                self.ambiguous[p] = several
            found |= {i: several[0]} if len(several) == 1 else {}
        return found

    def _fitting(self, named: Named) -> dict[int, tuple[bool, list[Selected]]]:
        if not self._numbers:
            return {}
        return _of_sow(self._tree, named, self._lengths, self._whole)

    def of(self, named: Named) -> Mapping[int, list[Selected]]:
        """What is selected of a mark, by the numbers of the patterns."""
        if named not in self._kept:
            self._kept[named] = dict(sorted(self._of(named)))
        return self._kept[named]

    def all_of(self, named: Named) -> Iterable[Selected]:
        """What all patterns select of a mark."""
        return {x.name: x for some in self.of(named).values() for x in some}.values()

    def in_any_loops(
        self, name: str, after: tuple[int | None, ...]
    ) -> Iterable[Selected]:
        """What they may select of it, whatever loops it is in."""
        known = self._loops.get((name, after), (ANY_LOOPS,))
        each = [self.all_of(Named(name, after, loops)) for loops in known]
        return dict.fromkeys(it.chain(*each))

    def _of(self, named: Named) -> Iterator[tuple[int, list[Selected]]]:
        whole = [Selected(named.name, (), named.after)]
        if named.name in self._exact:
            yield self._exact[named.name], whole
        yield from [(i, whole) for i, p in self._predicates.items() if _says(p, named)]
        for n, (in_list, some) in self._fitting(named).items():
            if in_list or n not in self._in_list:
                # If there is a mark `h/0`, that is no iteration of `h`.
                mine = {named.name} | {x.name for x in some} - self.names
                some = [x for x in some if x.name in mine]
                if some:
                    yield self._numbers[n], some

    def order(self, i: int) -> tuple[bool, bool, int]:
        """What is spelled out goes before globs, and these go in their order."""
        p = self.patterns[i]
        return p not in self.names, is_glob(p) and p not in self.names, i

    def first(self, *names: Named) -> int | None:
        """The number of the pattern that goes before all others which fit one of these:
        the first that is spelled out, or else the first glob."""
        fit = {i for named in names for i in self.of(named)}
        place = {named.name: k for k, named in reversed(list(enumerate(names)))}
        order = lambda i: (place.get(self.patterns[i], len(names)), *self.order(i))
        return min(fit, key=order, default=None)

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        return self is other or (type(other) is Selection and self._key == other._key)


def _behind(root: str, pattern: str) -> str:
    # `.` is the module that is `fn` itself, and `.encode` a method of it.
    is_method = pattern.startswith(".")
    return root + pattern.removesuffix(".") if is_method else join(root, pattern)


def _says(predicate: Callable[[str], Any], named: Named) -> bool:
    selects = predicate(named.name)
    try:
        return bool(selects)
    except Exception as e:  # of an array, NumPy's or JAX's
        raise TypeError(
            f"`names={predicate!r}` returned {selects!r} for {named.name!r}. Return "
            "`True` or `False`."
        ) from e


def in_a_list(name: str, indices: Iterable[tuple[int | None, Any]]) -> str:
    """The name of an iteration. Each index, from outside in, comes with its place:
    after so many characters of the name, or behind all others (`None`). For
    `blocks/attn` and `[(6, 2)]` that is `blocks/2/attn`, as it would be called in a
    list of layers, and for `blocks.encode` it is `blocks/2.encode`.
    """
    end = len(name)
    in_order = sorted(indices, key=lambda pair: (pair[0] is None, pair[0] or 0))
    # From the back, so that the other places stay where they are.
    for place, i in reversed(in_order):
        at = end if place is None else place
        name = f"{name[:at]}/{i}{name[at:]}" if at else f"{i}/{name}"
    return name


# --- for messages ---
def has_traced_number(name: str) -> bool:
    """Whether an f-string has put one into it, as in `h/JitTracer(int32[])`."""
    return "Trace" in name and re.search(r"Trace[rd]\W", name) is not None


def across_slashes(pattern: str, names: Iterable[str]) -> str:
    """Says what to write instead of a pattern that fits nothing, but would fit some
    names if `*` did not stop at a slash."""
    there = dict.fromkeys(names)
    meant = set(filter(re.compile(fnmatch.translate(pattern)).match, there))
    if not (is_glob(pattern) and meant):
        return ""
    each = [_or_more(part) for part in pattern.split("/")[:_MOST_PARTS]]
    rest = pattern.split("/")[_MOST_PARTS:]
    longer = ["/".join((*parts, *rest)) for parts in it.product(*each)]
    fit = {p: {name for name in there if fits(p, name)} for p in longer}
    right = [p for p in longer if fit[p] == meant]
    right = right or [p for p in longer if fit[p] > meant]
    right = sorted(right, key=lambda p: (len(p), p))[:2]
    what = " or ".join(map(repr, right)) or "`**` for any number of parts"
    return f" `*` stops at a slash: write {what}."


_MOST_PARTS = 4


def _or_more(part: str) -> list[str]:
    """A part of a pattern, and what fits more parts than that."""
    if part == "*":
        return [part, "*/*", "**"]
    front, star, back = part.partition("*")
    if not star or part == "**":
        return [part]
    apart = ["/".join(filter(None, (front, x, back))) for x in ("*", "**")]
    ends = [x.join((f"{front}*", f"*{back}")) for x in ("/", "/**/")]
    return [part, *apart, f"**/{part}", f"{part}/**", *ends]


def no_such_iteration(pattern: str, found: Iterable[Named]) -> str:
    """Says which iterations or layers there are, if a pattern fits a name but for its
    indices."""
    is_index = lambda part: part.lstrip("-").isdecimal()
    without = lambda name: "/".join(x for x in name.split("/") if not is_index(x))
    plain = without(pattern)
    alike = [x for x in found if fits(plain, without(x.name))]
    if plain == pattern or not alike:
        return ""
    one, loops = alike[0], alike[0].loops
    if not loops and without(one.name) != one.name:
        numbers = lambda name: [int(x) for x in name.split("/") if is_index(x)]
        names = sorted((x.name for x in alike), key=numbers)
        return (
            " In a list, each has a name of its own, from "
            f"{names[0]!r} to {names[-1]!r}, the last one."
        )
    called = lambda indices: in_a_list(one.name, zip(places_of(one), indices))
    first, last = called([0] * len(loops)), called([n - 1 for n in loops])
    they = f"they are {first!r} to {last!r}"
    they = they if loops else "it is in no loop of known length"
    return f" There is no such iteration of {one.name!r}: {they}."


def check_known(
    call: str,
    option: Iterable[Any] | None,
    there: Iterable[str],
    problem: str = "selects no mark of this program",
    *,
    kind: str = "names",
    hint: Callable[[Any, Sequence[str]], str] = lambda pattern, close: "",
) -> None:
    """Raises if anything in `option` is not `there`. `hint` says more about it, given
    those names that are close to it."""
    known = dict.fromkeys(there)
    for pattern in option or ():
        if isinstance(pattern, str) and pattern in known:
            continue
        said = listed(pattern, known, kind, hint)
        raise UnknownSowError(f"`{call}`: {pattern!r} {problem}. {said}")


def listed(
    pattern: Any,
    there: Iterable[str],
    kind: str = "names",
    hint: Callable[[Any, Sequence[str]], str] = lambda pattern, close: "",
) -> str:
    """What a message about a pattern that selects nothing says of what there is."""
    there = list(map(str, there))
    close = difflib.get_close_matches(str(pattern), there, n=3)
    more = hint(pattern, close)
    if close and not more:
        more = f" Did you mean {' or '.join(map(repr, close))}?"
    return f"The {kind} there are: {shown(there)}.{more}"
