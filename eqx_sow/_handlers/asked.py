"""What handlers have in common: which sows, and which iterations of them, the option
`names` asks for, and what becomes of other sows.
"""

import dataclasses as dc
import functools as ft
import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .._mark.site import Site
from .._mark.static import SameParts
from .._names import ANY_LOOPS, lookup, Selected, selected
from .._walk.find import loop_of, loops_around, sites
from .._walk.frame import Frame
from .._walk.handler import Handler
from .._walk.refuse import is_solver, OVER_AND_OVER, refuse


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


@dc.dataclass(frozen=True, kw_only=True)
class Listens(Handler):
    """A handler that looks at the sows of one tag, and leaves the program as it is.

    Sows that it does not take stay in the program if `has_outer`, which is when another
    transformation further out may want them. `transform` is the option of that name.
    """

    tag: Any
    asked: Asked
    transform: SameParts
    # The names that there are outside of linear solvers.
    elsewhere: frozenset[str]
    has_outer: bool

    @property
    def cacheable(self):
        return self.transform.value is None

    def wants(self, site):
        return site.tag == self.tag and bool(self.asked.perhaps(site))

    def needs_iterations(self, jaxpr):
        return self.asked.iterations_in(jaxpr, self.tag)

    def for_inside(self, eqn):
        asked = self.asked.within(eqn)
        return self if asked == self.asked else dc.replace(self, asked=asked)

    def meet_unknown(self, found, eqn):
        if not is_solver(eqn):
            return super().meet_unknown(found, eqn)
        # Who solves evaluates the function elsewhere, too.
        hidden = [s for s in sites(eqn) if s.name not in self.elsewhere]
        refuse(self, eqn, hidden, OVER_AND_OVER)

    def transform_of(self, whole: Site, one: Site) -> Any:
        """The transform of a sow, or of `one` iteration, which goes by its own name or
        by that of the `whole`."""
        found = lookup(self.transform.value, one.name)
        return found or lookup(self.transform.value, whole.name)


# --- sows that are left to others ---
def pass_by(handler: Handler, atoms, frame: Frame) -> None:
    """A sow that is not the handler's is left for what is further out, or is an
    identity."""
    if handler.has_outer:
        frame.defer(frame.eqn)
    else:
        frame.alias_outputs(atoms)


def leave_to_others(site: Site, frame: Frame) -> Sequence[Any]:
    """A sow of the handler's that those further out see as `site`. Returns what the
    program goes on with, once they are done."""
    eqn = frame.eqn.replace(params=dict(site=site))
    frame.want(eqn.outvars)
    frame.forbid_donation(eqn.outvars)
    frame.defer(eqn)
    return eqn.outvars[1:]
