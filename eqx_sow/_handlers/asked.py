"""What handlers have in common: which marks, and which iterations of them, the option
`names` asks for, and what becomes of other marks.
"""

import functools as ft
import itertools as it
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._errors import SowError
from .._mark.site import Label, Site
from .._mark.static import SameParts
from .._names import Named
from .._selection import Selection
from .._walk.frame import Frame
from .._walk.handler import Handler
from .._walk.sows import loop_of, Mark


def reached(at: Iterable[int | None], iterations: Iterable[Any]) -> Any:
    """Whether the walk is in the iteration that is asked for. `at` has an entry for
    each scan around it, from outside in: which iteration, or `None` for all. In a scan
    over layers and one over tokens, `(3, None)` is all tokens of layer 3.
    `Given.iterations` says which ones run now."""
    matches = [i == n for i, n in zip(iterations, at) if n is not None]
    return ft.reduce(operator.and_, matches, np.True_)


def is_some(at: Iterable[int | None]) -> bool:
    """Whether not all iterations are asked for."""
    return any(n is not None for n in at)


def layer(places: Iterable[int | None], iterations: Iterable[Any]) -> tuple[Any, ...]:
    """The index in each stack of layers around, in these iterations of loops, given the
    `places` of their indices in a name: those of other loops are `None`."""
    return tuple(i for place, i in zip(places, iterations) if place is not None)


def layer_in(
    at: Iterable[int | None], label: Label, iterations: Iterable[Any]
) -> tuple[Any, ...]:
    """The index in each stack of layers around, of those of which all layers are asked
    for: see `Ask`."""
    each = it.chain(at, it.repeat(None))
    return layer(label.places, (i for i, n in zip(iterations, each) if n is None))


def for_each_loop(mark: Mark, of_scans: Iterable[Any]) -> tuple[Any, ...]:
    """What there is for each loop around a mark, from outside in, given what there is
    for the scans among them: `None` for a `while_loop`, and for those scans that
    `of_scans` does not reach to."""
    left = it.chain(of_scans, it.repeat(None))
    loops = filter(None, map(loop_of, mark.eqns))
    return tuple(None if x.length is None else next(left) for x in loops)


def when(mark: Mark, iterations: Iterable[int | None]) -> tuple[float, ...]:
    """When a mark runs in these iterations of the loops around it, as a key to sort by:
    the way to it, with the iteration behind each equation. If all iterations of a loop
    are meant (`None`), the first one counts."""
    left = iter(iterations)
    key: list[float] = []
    for k, eqn in enumerate(mark.eqns[:-1]):
        loop = loop_of(eqn)
        i = None if loop is None else next(left)
        step = -math.inf if i is None else -i if loop and loop.reverse else i
        key += [mark.way[2 * k], step, mark.way[2 * k + 1]]
    return (*key, mark.way[-1])


class Indices(tuple):
    """What functions get with `with_index=True`. Of any other tuple, `index == 2` is
    false: what is planted for iteration 2 would be planted in none."""

    def __eq__(self, other: Any) -> bool:
        if isinstance(other, tuple):
            return super().__eq__(other)
        raise SowError(
            f"`index` was compared with {other!r}, but with `with_index=True` it is a "
            "tuple with the iteration of each loop around the mark. Write `index[0] == "
            "...`, or `index[-1]` for the innermost loop."
        )

    def __ne__(self, other: Any) -> bool:
        return not self == other

    __hash__ = tuple.__hash__


jtu.register_pytree_node(
    Indices, lambda x: (tuple(x), None), lambda _, entries: Indices(entries)
)


class InList(NamedTuple):
    """A function of `(value, index)` for a mark in a list of layers. It gets the index
    that it would get if the layers were a stack: `layers` has the number of each list
    around, and how many of the loops are around that. It is a PyTree, as the function
    may be."""

    fn: Callable[[Any, Any], Any]
    layers: tuple[tuple[int, int], ...]

    def __call__(self, value: Any, index: tuple[Any, ...]) -> Any:
        new = list(index)
        for k, (n_loops, number) in enumerate(self.layers):
            new.insert(n_loops + k, jnp.int32(number))
        return self.fn(value, Indices(new))


class Asked(NamedTuple):
    """What the option `names` asks for of a mark. With `names=("h", "h/3")` there are
    two for `h` in a loop: all of it, and its iteration 3. `site` is then the same, but
    called `h/3`, and `at` says which iteration: see `Ask`."""

    mark: Mark
    site: Site
    at: tuple[int | None, ...] = ()


def asked_of(
    named: Iterable[tuple[Mark, Named]], names: Selection | None
) -> list[Asked]:
    """What is asked for of these marks, in order of execution. That of iterations is
    not that of the marks: `h/0` and `k/1` run before `h/2`."""
    if names is None:
        return [Asked(mark, mark.site) for mark, _ in named]
    each = []
    for mark, of_mark in named:
        label, *others = mark.site.labels
        for one in names.all_of(of_mark):
            new = label._replace(name=one.name, places=one.places)
            site = mark.site._replace(labels=(new, *others))
            each.append(Asked(mark, site, one.at))
    if any(x.at for x in each):
        each.sort(key=lambda x: when(x.mark, for_each_loop(x.mark, x.at)))
    return each


_NO_FUNCTION = SameParts(None)


def function_for(option: Any, whole: str, one: str) -> SameParts:
    """The function, or `None`, that an option which may be a dict of names has for a
    mark, or for `one` iteration of the `whole`, such as `h/3`."""
    fn = option.get(one, option.get(whole)) if isinstance(option, Mapping) else option
    # There may be thousands of marks, of which most have none.
    return _NO_FUNCTION if fn is None else SameParts(fn)


def leave(
    handler: Handler, site: Site | None, atoms: Sequence[Any], frame: Frame
) -> Sequence[Any]:
    """Sees to a mark with the operands `atoms` whose value stays as it is. For outer
    transformations, if there are any, it is still one, as `site`. Returns the variables
    that the program goes on with: others may plant there."""
    if site is None or not handler.has_outer:
        frame.alias_outputs(atoms)
        return atoms
    eqn = frame.eqn.replace(params=dict(site=site))
    frame.want(eqn.outvars)
    frame.defer(eqn)
    return eqn.outvars[1:]
