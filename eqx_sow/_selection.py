"""What the patterns of an option select among the marks of a program."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ._errors import SowError
from ._globs import compiled, is_glob, lengths_of_lists
from ._names import join, last_in_lists, Named, Selected, selected, whole


class Selection:
    """What some patterns select of the marks that are `found` in a program. For `h` in
    a loop of 4 iterations,

        "h"     all of it
        "h/3"   iteration 3
        "h/-1"  the same
        "h/4"   nothing

    and for `blocks/*/attn` in a loop over layers, `"blocks/2/attn"` is layer 2,
    `"blocks/*/attn"` all of it, and `"blocks/[12]/attn"` two layers: a stack goes by
    the names of a list.

    What is the name of a mark means that mark: if there is a mark `h/0`, no pattern
    means iteration 0 of `h` by that. A pattern that fits nothing may lack the root of a
    model, one of `roots`, if it fits behind one root only. What a pattern selects does
    not depend on the others.

    With `whole`, a pattern selects no iterations, only all of them.
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
        # One layer of a stack may be called by itself, and all of them in a loop.
        self._lengths = lengths_of_lists(
            name for x in found for name in (x.name, *last_in_lists(x))
        )
        self._every = dict.fromkeys((*found, *also))
        self.names = frozenset(x.name for x in self._every)
        # A `*` for the layers of a stack is one in a pattern, too, which fits lists.
        self._exact_names = frozenset(
            x.name for x in self._every if all(n.place is None for n in x.loops)
        )
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
        # With and without its root, a name is two patterns.
        self._exact: dict[str, list[int]] = {}
        for i, p in paths.items():
            if p in self._exact_names:
                self._exact.setdefault(p, []).append(i)
        others = {i: p for i, p in paths.items() if p not in self._exact_names}
        self._numbers, self._root = list(others), compiled(tuple(others.values()))
        self._kept: dict[Named, dict[int, list[Selected]]] = {}
        fit = {i for named in self._every for i in self.of(named)}
        # The numbers of those that select nothing.
        self.missing = [i for i in range(len(self.patterns)) if i not in fit]

    def _behind_a_root(
        self, missing: Mapping[int, str], roots: Iterable[str]
    ) -> dict[int, str]:
        several: dict[int, list[str]] = {i: [] for i in missing}
        for root in roots:
            paths = {i: _behind(root, p) for i, p in missing.items()}
            these = Selection(paths.values(), self._every, whole=self._whole)
            unfit = {these.patterns[n] for n in these.missing}
            for i, p in paths.items():
                several[i] += [] if p in unfit else [p]
        self.ambiguous = {missing[i]: x for i, x in several.items() if len(x) > 1}
        return {i: x[0] for i, x in several.items() if len(x) == 1}

    def of(self, named: Named) -> Mapping[int, list[Selected]]:
        """What is selected of a mark, by the numbers of the patterns."""
        if named not in self._kept:
            self._kept[named] = dict(sorted(self._of(named)))
        return self._kept[named]

    def all_of(self, named: Named) -> Iterable[Selected]:
        """What all patterns select of a mark."""
        return {x.name: x for some in self.of(named).values() for x in some}.values()

    def _of(self, named: Named) -> Iterator[tuple[int, list[Selected]]]:
        said = (i for i, p in self._predicates.items() if _says(p, named))
        for i in (*self._exact.get(named.name, ()), *said):
            yield i, [whole(named)]
        if not self._numbers:
            return
        # If there is a mark `h/0`, that is not an iteration of `h`.
        others = self.names - {named.name}
        found = selected(self._root, named, self._lengths, self._whole)
        for n, some in found.items():
            if some := [x for x in some if x.name not in others]:
                yield self._numbers[n], some

    def order(self, i: int) -> tuple[bool, bool, int]:
        """What is spelled out goes before globs, and these go in their order."""
        p = self.patterns[i]
        return p not in self._exact_names, self._is_spread(i), i

    def _is_spread(self, i: int) -> bool:
        p = self.patterns[i]
        return p not in self._exact_names and is_glob(p)

    def check_values(self, call: str, values: Mapping[str, Any]) -> None:
        """Raises if several keys of a dict spell out the same, as `h/3` and `h/-1` do,
        or a name with and without its root, but have different values. (Under `h/3` and
        `h/-1` there may be one value that was captured under both.)"""
        for named in self._every:
            found: dict[tuple[int | None, ...], tuple[str, str]] = {}
            for i, some in self.of(named).items():
                key = self.patterns[i]
                for x in () if self._is_spread(i) else some:
                    name, first = found.setdefault(x.at, (x.name, key))
                    both = values[first], values[key]
                    captured = all(isinstance(v, Mapping) for v in both)
                    if both[0] is not both[1] and not (captured and name != x.name):
                        raise SowError(
                            f"`{call}`: {first!r} and {key!r} both mean {x.name!r}, "
                            "with different values. Leave one of them out."
                        )

    def first(self, *names: Named) -> int | None:
        """The number of the pattern that goes before all others which fit one of these:
        the first that is spelled out, or else the first glob."""
        fit = {i for named in names for i in self.of(named)}
        there = reversed(list(enumerate(names)))
        place = {x.name: k for k, x in there if x.name in self._exact_names}
        order = lambda i: (place.get(self.patterns[i], len(names)), *self.order(i))
        return min(fit, key=order, default=None)


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
