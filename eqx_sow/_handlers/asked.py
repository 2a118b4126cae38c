"""What handlers have in common: which marks, and which iterations of them, the option
`names` asks for, and what becomes of other marks.
"""

import dataclasses as dc
import functools as ft
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.tree_util as jtu
import numpy as np

from .._errors import SowError
from .._mark.site import Site
from .._mark.static import SameParts
from .._names import in_loops
from .._selection import Selection
from .._walk.frame import Frame
from .._walk.handler import Handler
from .._walk.sows import Found, lengths_of, loop_of


# The site of what is asked for of a mark, with `Entry.at`.
Asked = tuple[Site, tuple[int | None, ...]]


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


@dc.dataclass(frozen=True, kw_only=True)
class Selector(Handler):
    """What `Collect` and `Tap` have in common: they look at the marks of one tag that
    are asked for, and leave the program as it is."""

    tag: Any
    # What that option selects. `None` asks for everything.
    names: Selection | None
    # The option of that name, or a dict of names to what it says of each.
    transform: SameParts
    # See `Handler`.
    elsewhere: frozenset[str]
    # Whether an outer transformation may want other marks: if so, these stay in the
    # program.
    has_outer: bool
    # How many iterations the scans around what is walked over have, from outside in. It
    # is kept only if `names` is not `None`.
    loops: tuple[int, ...] = ()

    @property
    def cacheable(self):
        return self.transform.value is None

    def wants(self, site):
        return site.tag == self.tag and bool(self.wanted(site))

    def needs_iteration(self, site):
        return site.tag == self.tag and any(at for _, at in self.wanted(site))

    def for_inside(self, eqn):
        lengths = () if self.names is None else lengths_of([eqn])
        return dc.replace(self, loops=(*self.loops, *lengths)) if lengths else self

    def asked(self, site: Site, loops: tuple[int, ...] | None = None) -> list[Asked]:
        """What `names` asks for of a mark in these loops; or what it may ask for,
        whatever loops are around it. With `names=("h", "h/3")` that is the whole `h`,
        and its iteration 3: the same site, but called `h/3`."""
        if self.names is None:
            return [(site, ())]
        label, others = site.label, site.labels[1:]
        if loops is None:
            each = self.names.in_any_loops(label.name, label.after)
        else:
            each = self.names.all_of(in_loops(label.name, label.after, loops))
        new = [label._replace(name=x.name, after=x.after) for x in each]
        return [(site._replace(labels=(n, *others)), x.at) for n, x in zip(new, each)]

    def wanted(self, site: Site, loops: tuple[int, ...] | None = None) -> list[Asked]:
        """The same, without what `modes` leaves out."""
        raise NotImplementedError

    def everywhere(self, found: Iterable[Found]) -> list[tuple[Site, Found]]:
        """What is asked for of these marks, each with the mark, in order of execution.
        That of iterations is not that of the marks: `h/0` and `k/1` run before `h/2`.
        """
        each = [(x, *one) for x in found for one in self.asked(x.site, x.loops)]
        if any(at for *_, at in each) and all(x.way for x, *_ in each):
            each.sort(key=lambda found: _when(found[0], found[2]))
        return [(one, x) for x, one, _ in each]


def _when(found: Found, at: Iterable[int | None]) -> list[float]:
    """Sorts iterations `at` of marks by when they run: the way to a mark, with the
    iteration behind each equation. If all are asked for, the first one counts."""
    way: Any = found.way
    iterations = iter(at)
    key: list[float] = []
    for k, eqn in enumerate(found.eqns[:-1]):
        loop, iteration = loop_of(eqn), None
        if loop is not None and loop.length is not None:
            iteration = next(iterations, None)
        backward = loop is not None and loop.reverse
        step = -math.inf if iteration is None else iteration * (-1 if backward else 1)
        key += [way[2 * k], step, way[2 * k + 1]]
    return [*key, way[-1]]


def of_one(option: Any, whole: Site, one: Site) -> Any:
    """What an option that may be a dict of names says of a mark, or of `one` iteration
    of the `whole`, such as `h/3`."""
    if not isinstance(option, Mapping):
        return option
    return option.get(one.name, option.get(whole.name))


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
