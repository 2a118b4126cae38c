"""Values that `plant` takes apart: those for all layers of a list, and those that have
their axes elsewhere than the program has them."""

import itertools as it
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._errors import SowError
from .._globs import is_glob, layers_in
from .._mark.static import Const, OPERAND
from .._names import Named, with_indices
from .._results.layers import axes_of_each, of_layers, OfRuns, OfValue
from .._results.leaves import is_value
from .._results.nodes import axes_given
from .._results.stacks import fits_along, grid
from .._values.assemble import named_axes
from .._values.axes import final_axes
from .._values.entry import Entry
from .placement import At, Surveyed
from .program import Program


def by_layer(
    chosen: dict[str, dict[At, Any]],
    together: dict[str, dict[Any, list[At]]],
    given: Mapping[str, Any],
    marks: Mapping[str, Sequence[tuple[str, At]]],
    survey: Surveyed,
    program: Program,
) -> None:
    """Takes those values apart that are for all layers of a list, in what is `chosen`
    and planted `together`."""
    for pattern, found in marks.items():
        value = given[pattern]
        if callable(value) or not is_glob(pattern):
            continue
        known = axes_given(given, pattern, program.options.mode)
        parts = _in_layers(pattern, value, known, found, survey, program)
        for name in dict.fromkeys(name for name, _ in parts):
            for at in together[name].pop(pattern, ()):
                together[name][pattern, at] = [at]
                chosen[name][at] = parts[name, at]


class _Array(NamedTuple):
    """An array that is planted, and what would be captured there."""

    x: Any
    # In what would be captured, which axes are those of the layers, in the order of
    # their names; and the shape without them, of which so many axes are leading ones.
    layers: list[int]
    shape: tuple[Any, ...]
    n_leading: int
    # Which axes of the array are those of the layers, if that is known; else none.
    given: list[int]

    def is_ambiguous(self, sizes: Sequence[int], is_whole: bool) -> bool:
        """Whether its shape is right for a list as for a stack, but means another thing
        there: `[4, 4, 3]` has 4 layers in front if it is of a list, and behind 4 lanes
        if it is of a stack. `is_whole`: whether this program has a stack."""
        fits = fits_along(self.x.shape, sizes, self.shape, self.n_leading)
        in_front = {(*range(len(sizes)),)}
        if is_whole:
            return bool(fits & in_front - {(*self.layers,)})
        return bool(fits & in_front and fits - in_front)

    def part(self, index: Any, given: Sequence[int]) -> Any:
        """That of these layers, with their axes where they would be captured."""
        move: Any = np if isinstance(self.x, np.ndarray) else jnp
        x = move.moveaxis(self.x, given, range(len(given)))[index]
        return move.moveaxis(x, range(len(self.layers)), self.layers)


class _Part(NamedTuple):
    """A name that a pattern fits, or some iterations of it."""

    name: str
    at: At
    # Of the loops over layers that are left, in the order in which the name has them,
    # how many layers each is over. And what these would be called in lists.
    lengths: list[int]
    layers: list[str]
    # What would be captured there, for each run.
    entries: list[Entry]

    def mapped(
        self, fn: Callable[[_Array], Any], value: Any, known: OfValue | OfRuns
    ) -> Any:
        """A value with what `fn` makes of each array; `None` if it does not have the
        structure of what would be captured."""
        runs, new = self._runs(value), []
        if runs is None:
            return None
        each = known if isinstance(known, list) else [known]
        if len(each) != len(runs):
            each = [()] * len(runs)
        for of_run, (x, entry) in zip(each, runs):
            if entry is None:
                new.append(None)
                continue
            form = entry.site.form
            leaves, treedef = jtu.tree_flatten(x)
            if Const(treedef) != form.treedef:
                return None
            axes, own = iter(axes_of_each(of_run, x)), self._own(entry)
            for i, (leaf, of_mark) in enumerate(zip(leaves, form.leaves)):
                given = of_layers(is_value(leaf) and next(axes) or ())
                if of_mark is OPERAND:
                    leaves[i] = fn(_Array(leaf, *next(own), given))
            new.append(jtu.tree_unflatten(treedef, leaves))
        return (*new,) if self._is_of_runs(value) else new[0]

    def _own(self, entry: Entry) -> Iterator[tuple[list[int], tuple[Any, ...], int]]:
        """Of each array, what `_Array` says of that which would be captured."""
        names, axes = named_axes(entry.site, entry.route), entry.site.axes
        loops = [k for k, (kind, *_) in enumerate(names) if kind == "loop"]
        gone = {k for k, i in zip(loops, self.at) if i is not None}
        for x, final in zip(entry.arrays, final_axes(entry.site)):
            kept = [k for k, is_there in enumerate(final) if is_there and k not in gone]
            rest = [axes[k].size for k in kept if names[k][1] is None]
            shape = *rest, *x.shape[len(axes) :]
            yield of_layers([names[k] for k in kept]), shape, len(rest)

    def _runs(self, value: Any) -> list[tuple[Any, Entry | None]] | None:
        """The value of each run, `(None, None)` for one that is left as it is."""
        if not self._is_of_runs(value):
            return [(value, self.entries[0])] if len(self.entries) == 1 else None
        entries = iter(self.entries)
        if len(value) == len(self.entries):
            return [(x, None if x is None else e) for x, e in zip(value, entries)]
        # A run without a derivative has no entry.
        if sum(x is not None for x in value) != len(self.entries):
            return None
        return [(x, None if x is None else next(entries)) for x in value]

    def _is_of_runs(self, value: Any) -> bool:
        form = self.entries[0].site.form
        is_one = Const(jtu.tree_structure(value)) == form.treedef
        return type(value) in (tuple, list) and not is_one


def _in_layers(
    pattern: str,
    value: Any,
    known: OfValue | OfRuns,
    found: Sequence[tuple[str, At]],
    survey: Surveyed,
    program: Program,
) -> dict[tuple[str, At], Any]:
    """The parts of a value that has the axes of `intermediates[pattern]`, for each name
    and iterations that the pattern fits: of `f32[3,8]` under `blocks/*/attn`, `f32[8]`
    for each of three layers in a list. None if it is for each as it is.

    Those of a list have the axes of the layers in front, and those of a stack have them
    where the loops are. If it is not `known` which axes these are, they are where this
    program has them."""
    parts = _parts(found, survey, program)
    if not parts:
        return {}
    one = parts[0]
    is_whole = (
        len(parts) == 1 and one.lengths != [] and not layers_in(one.name, pattern)
    )
    try:
        names, sizes = grid(pattern, [layer for part in parts for layer in part.layers])
    except SowError:  # it cannot be looked up, either
        return {}
    form, mode = one.entries[0].site.form, program.options.mode
    if isinstance(value, Mapping) and Const(jtu.tree_structure(value)) != form.treedef:
        value = value.get(mode, value)
    n = len(sizes)
    arrays: list[_Array] = []
    noted = lambda x: arrays.append(x) or x.x
    each = [part.mapped(noted, value, known) for part in parts]
    has_layers = lambda x: getattr(x.x, "ndim", None) == n + len(x.shape)
    if any(x is None for x in each) or not all(map(has_layers, arrays)):
        return {}
    is_known = all(len(x.given) == n for x in arrays)
    for x in () if is_known else arrays:
        if x.is_ambiguous(sizes, is_whole):
            raise SowError(
                f"`plant`: the value for {pattern!r} has a leaf "
                f"{x.x.dtype}{list(x.x.shape)}, and two of its axes are equally long, "
                "so it is not known which one is that of the layers: a list has it in "
                "front, and a stack behind those of `vmap`s and loops around. Plant "
                f"`intermediates[{pattern!r}]` as you looked it up, which knows it, or "
                f"a value for each layer, such as {names[0]!r}, or a function."
            )
    if is_whole and (not is_known or all(x.given == x.layers for x in arrays)):
        # It is as this program has it.
        return {}
    in_front = [*range(n)]
    where = dict(zip(names, it.product(*map(range, sizes))))
    new = {}
    for part in parts:
        index = np.array([where[layer] for layer in part.layers])
        index = (*np.moveaxis(index.reshape(*part.lengths, n), -1, 0),)
        if part.lengths == sizes and part.layers == names:
            index = ()
        elif not part.lengths:
            index = (*map(int, index),)

        def moved(x):
            given = x.given if is_known else in_front
            if [x.x.shape[i] for i in given] != sizes:
                dtype, shape = x.x.dtype, [*sizes, *x.shape]
                raise SowError(
                    f"`plant`: the value for {pattern!r} has a leaf "
                    f"{dtype}{list(x.x.shape)}, but {dtype}{shape} is what all layers "
                    f"have together, from {names[0]!r} to {names[-1]!r}. Plant an "
                    "array of that shape, or a function."
                )
            return x.part(index, given)

        new[part.name, part.at] = part.mapped(moved, value, known)
    return new


def _parts(
    found: Iterable[tuple[str, At]], survey: Surveyed, program: Program
) -> list[_Part]:
    """What a pattern fits, of the mode that is planted. Nothing, if runs of one name
    are in different loops over layers, or in those of symbolic lengths."""
    entries: dict[str, list[Entry]] = defaultdict(list)
    for (name, *_), of_key in survey.of_key.items():
        entries[name] += of_key
    each: dict[str, dict[Named, None]] = defaultdict(dict)
    for x, named in program.named:
        each[x.site.name][named] = None
    parts = []
    for name, at in dict.fromkeys(found):
        if not entries[name]:
            continue
        (fixed, left), *others = dict.fromkeys(_over_layers(x, at) for x in each[name])
        lengths = [n for _, n in left]
        alike = not others and (len(each[name]) == 1 or set(at) <= {None})
        if not alike or not all(isinstance(n, int) for n in lengths):
            return []
        layers = [
            with_indices(name, [*zip((place for place, _ in left), layer), *fixed])
            for layer in it.product(*map(range, lengths))
        ]
        parts.append(_Part(name, at, lengths, layers, entries[name]))
    return parts


def _over_layers(named: Named, at: At) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The iterations `at`, with their places in the name; and the loops over layers
    that are left, in the order in which the name has them."""
    pairs = [*it.zip_longest(named.loops, at)]
    left = [x for x, i in pairs if i is None and x.place is not None]
    return tuple((x.place, i) for x, i in pairs if i is not None), (*sorted(left),)
