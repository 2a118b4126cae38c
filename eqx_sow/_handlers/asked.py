"""Which sows, and which iterations of them, the option `names` asks for."""

import dataclasses as dc
import functools as ft
import operator
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from .._mark.site import Site
from .._names import ANY_LOOPS, Selected, selected
from .._walk.sows import loop_of, loops_around, sites


# A name with an index in it.
_INDEX = re.compile(r"(^|/)(-?\d+|\*)(/|$)")


def reached(at: Iterable[int | None], iterations: Iterable[Any]) -> Any:
    """Whether these are the iterations `at` which something is asked for."""
    each = [i == n for i, n in zip(iterations, at) if n is not None]
    return ft.reduce(operator.and_, each, np.True_)


@dc.dataclass(frozen=True)
class Asked:
    """`names` is that option. `spelled_out` are the names that there are as they stand:
    what looks like an index in these is none. `loops` are those around the walk, see
    `loops_around`, if an iteration is asked for."""

    names: tuple[Any, ...] | None = None
    spelled_out: frozenset[str] = frozenset()
    loops: tuple[int | None, ...] = ()

    def _selected(self, site: Site, loops: tuple[int, ...]) -> Iterable[Selected]:
        label = site.label
        if self.names is None:
            return [Selected(label.name, (), label.after)]
        found = [
            selected(p, label.name, label.after, loops)
            for p in self.names
            if label.name == p or p not in self.spelled_out
        ]
        return {x.name: x for x in found if x is not None}.values()

    def perhaps(self, site: Site) -> Iterable[Selected]:
        """What may be asked for of a sow, whatever loops are around it."""
        return self._selected(site, ANY_LOOPS)

    def of(self, site: Site) -> list[tuple[Site, tuple[int | None, ...]]]:
        """What is asked for of a sow, as sites of their own: all of it, or one
        iteration, and which one of each scan around the walk that is."""
        loops = loops_around(site, self.loops)
        found = []
        for x in self._selected(site, tuple(n for n, _ in loops)):
            if not x.at:
                found.append((site, ()))
                continue
            # What JAX moved out of a loop is the same in each iteration of it.
            gone = [axis for i, (_, axis) in zip(x.at, loops) if i is not None]
            axes = tuple(a for k, a in enumerate(site.axes) if k not in gone)
            label = site.label._replace(name=x.name, after=x.after)
            one = site._replace(labels=(label, *site.labels[1:]), axes=axes)
            at = tuple(i for i, (_, axis) in zip(x.at, loops) if axis is None)
            found.append((one, at if any(i is not None for i in at) else ()))
        return found

    @property
    def by_iteration(self) -> bool:
        """Whether an iteration may be asked for."""
        return any(isinstance(p, str) and _INDEX.search(p) for p in self.names or ())

    def iterations_in(self, jaxpr: Any, tag: Any) -> bool:
        """Whether one of a sow in there may be asked for."""
        return self.by_iteration and any(
            x.at for s in sites(jaxpr) if s.tag == tag for x in self.perhaps(s)
        )

    def within(self, eqn: Any) -> "Asked":
        loop = loop_of(eqn)
        if not (self.by_iteration and loop):
            return self
        return dc.replace(self, loops=(*self.loops, loop.length))
