"""What handlers have in common: which sows, and which iterations of them, the option
`names` asks for, and what becomes of other sows.
"""

import dataclasses as dc
import functools as ft
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from .._mark.site import Site
from .._mark.static import SameParts
from .._names import ANY_LOOPS, every_selected, lookup, Selected
from .._walk.frame import Frame
from .._walk.handler import Handler
from .._walk.sows import Found, lengths_of, sites


def reached(at: Iterable[int | None], iterations: Iterable[Any]) -> Any:
    """Whether the walk is in the iteration that is asked for. `at` has an entry for
    each scan around it, from outside in: which iteration, or `None` for all. In a scan
    over layers and one over tokens, `(3, None)` is all tokens of layer 3.
    `Given.iterations` says which ones run now."""
    matches = [i == n for i, n in zip(iterations, at) if n is not None]
    return ft.reduce(operator.and_, matches, np.True_)


@dc.dataclass(frozen=True)
class Asked:
    """What the option `names` asks for, as it stands in one place of the program."""

    # The option. `None` asks for everything.
    names: tuple[Any, ...] | None = None
    # The names of all sows. If one of them is asked for as it is written, what looks
    # like an index in it is none.
    spelled_out: frozenset[str] = frozenset()
    # How many iterations the scans around this place have, from outside in. It is kept
    # only if `names` is not `None`.
    loops: tuple[int, ...] = ()

    def _selected(self, site: Site, loops: tuple[int, ...]) -> Iterable[Selected]:
        label = site.label
        if self.names is None:
            return [Selected(label.name, (), label.after)]
        by_pattern = [
            every_selected(p, label.name, label.after, loops)
            for p in self.names
            if label.name == p or p not in self.spelled_out
        ]
        return {x.name: x for found in by_pattern for x in found}.values()

    def perhaps(self, site: Site) -> Iterable[Selected]:
        """What may be asked for of a sow, whatever loops are around it."""
        return self._selected(site, ANY_LOOPS)

    def of(self, site: Site) -> list[tuple[Site, tuple[int | None, ...]]]:
        """What is asked for of a sow, each as a site of its own, with `Entry.at`. With
        `names=("h", "h/3")` that is the whole `h`, and its iteration 3: the same site,
        but called `h/3`."""
        if self.names is None:
            return [(site, ())]
        sites_at = []
        for x in self._selected(site, self.loops):
            one = site
            if x.at:
                label = site.label._replace(name=x.name, after=x.after)
                one = site._replace(labels=(label, *site.labels[1:]))
            sites_at.append((one, x.at))
        return sites_at

    def everywhere(
        self, found: Iterable[Found], tag: Any
    ) -> Iterator[tuple[Site, Any]]:
        """What is asked for of these sows, each with its equation."""
        for site, eqns, _ in found:
            if site.tag == tag:
                here = dc.replace(self, loops=lengths_of(eqns))
                for one, _ in here.of(site):
                    yield one, eqns[-1]

    def iterations_in(self, jaxpr: Any, tag: Any) -> bool:
        """Whether an iteration of a sow in this jaxpr may be asked for."""
        return self.names is not None and any(
            x.at for s in sites(jaxpr) if s.tag == tag for x in self.perhaps(s)
        )

    def within(self, eqn: Any) -> "Asked":
        """The same, for what is inside an equation."""
        if self.names is None:
            return self
        return dc.replace(self, loops=(*self.loops, *lengths_of([eqn])))


@dc.dataclass(frozen=True, kw_only=True)
class Listens(Handler):
    """What `Collect` and `Tap` have in common: they look at the sows of one tag that
    are asked for, and leave the program as it is."""

    tag: Any
    asked: Asked
    # The option of that name, which may be a dict.
    transform: SameParts
    # See `Handler`.
    elsewhere: frozenset[str]
    # Whether another transformation further out may want other sows: if so, these stay
    # in the program.
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

    def transform_of(self, whole: Site, one: Site) -> Any:
        """The transform of a sow, or of `one` iteration of the `whole`, such as `h/3`:
        one for that name, or else one for `h`."""
        transform = self.transform.value
        if transform is None:
            return None
        names = one.name, whole.name, whole.label.of_all
        return next(filter(None, (lookup(transform, n) for n in names)), None)


# --- sows that are left to others ---
def pass_by(handler: Handler, atoms, frame: Frame) -> None:
    """Sees to a sow that is none of the handler's: it stays in the program for those
    further out, if there are any. Otherwise it returns its operands, `atoms`."""
    if handler.has_outer:
        frame.defer(frame.eqn)
    else:
        frame.alias_outputs(atoms)


def leave_to_others(site: Site, frame: Frame) -> Sequence[Any]:
    """Sees to a sow of the handler's that is also one, as `site`, for those further
    out. Returns the variables that the program goes on with: others may plant there."""
    eqn = frame.eqn.replace(params=dict(site=site))
    frame.want(eqn.outvars)
    frame.defer(eqn)
    return eqn.outvars[1:]
