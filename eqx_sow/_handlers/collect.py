"""The handler of `save_intermediates`."""

import dataclasses as dc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._mark.site import Site
from .._mark.static import SameParts
from .._names import lookup
from .._values import entry as _entry, merge as _merge, reduce as _reduce
from .._values.entry import Entry
from .._values.modes import without_order
from .._values.reduce import Reducer, ReducerState
from .._values.sown import Check, gather, Sown, to_one_form, Uncollected
from .._walk.frame import Frame
from .._walk.handler import (
    check_guarded,
    Given,
    Handler,
    is_solver,
    OVER_AND_OVER,
    Taken,
    unsupported,
)
from .._walk.sows import loop_of, sites
from .asked import Asked, reached


# Of each place that sows a name there is an entry.
EACH_PLACE = SameParts(_reduce.Append())


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
    frame.defer(eqn)
    return eqn.outvars[1:]


@dc.dataclass(frozen=True)
class Collect(Handler):
    """Takes the values of all sows of one tag.

    Sows of other tags stay in the program if `has_outer`, which is when another
    transformation further out may want them.
    """

    tag: Any
    modes: tuple[str, ...] | None
    asked: Asked
    reduce: SameParts
    transform: SameParts
    has_outer: bool

    @property
    def cacheable(self):
        return self.reduce.value is None and self.transform.value is None

    def wants(self, site):
        return site.tag == self.tag and bool(self.asked.perhaps(site))

    keeps_iterations = True

    def needs_iterations(self, jaxpr):
        return self.asked.iterations_in(jaxpr, self.tag)

    def needs_order(self, site):
        return self.folds(site.name)

    def keeps_intact(self, eqn):
        return self.has_outer and all(s.tag != self.tag for s in sites(eqn))

    def for_inside(self, eqn):
        asked = self.asked.within(eqn)
        return self if asked == self.asked else dc.replace(self, asked=asked)

    def reducer(self, name: str) -> Reducer | None:
        return lookup(self.reduce.value, name)

    def folds(self, name: str) -> bool:
        """Whether the name has a state that goes through loops."""
        reducer = self.reducer(name)
        return reducer is not None and reducer.has_state

    def _chooses(self, site: Site) -> bool:
        if self.modes is None or site.mode in map(without_order, self.modes):
            return True
        # The order of cotangents goes by that of the primals.
        reducer = self.reducer(site.name)
        return not site.modes and reducer is not None and not reducer.has_state

    def sow(self, found, given, site: Site, atoms, frame: Frame):
        if site.tag != self.tag:
            pass_by(self, atoms, frame)
            return given
        left = site.without(site.tag)
        if left is not None and self.has_outer:
            atoms = leave_to_others(left, frame)
        else:
            frame.alias_outputs(atoms)
        asked = self.asked.of(site)
        # The name is there, though perhaps only an iteration of it is asked for.
        if [x.name for x, _ in asked] != [site.name]:
            found.append(Taken(values=Sown(seen=((site.name, None),))))
        if not asked:
            return given
        check_guarded(site)
        if site.again:
            return given
        transform = lookup(self.transform.value, site.name)
        for one, at in asked:
            seen = Sown(seen=((one.name, one.mode),), checks=_checks(one, atoms))
            found.append(Taken(values=seen))
            cases = (one.cases,) if one.cases else ()
            mine = lookup(self.transform.value, one.name) or transform
            new = Uncollected(Entry(tuple(atoms), one, cases=cases, at=at), mine)
            given = self._take(found, given, new, frame)
        return given

    def _take(self, found: list, given: Given, new: Uncollected, frame: Frame) -> Given:
        site, atoms = new.entry.site, new.entry.arrays
        if not self._chooses(site):
            return given
        if not self.folds(site.name):
            found.append(new)
            frame.want(atoms)
            return given
        # One more execution for a reducer, whose state goes through the loops around.
        values = tuple(frame.read_arrays(atoms))
        entry = _entry.captured(Entry(values, site), new.transform)
        reducer: Any = self.reducer(site.name)
        old = given.carry[site.key]
        state = _reduce.stepped(reducer, old, entry)
        # With `names="h/3"`, only if it is that iteration.
        if new.entry.at:
            here = reached(new.entry.at, given.iterations)
            state = jtu.tree_map(lambda x, y: jnp.where(here, x, y), state, old)
        return given._replace(carry={**given.carry, site.key: state})

    def meet_unknown(self, found, eqn):
        if not is_solver(eqn):
            return super().meet_unknown(found, eqn)
        # Who solves evaluates the function elsewhere too.
        wanted = filter(self.wants, sites(eqn))
        hidden = tuple((s.name, unsupported(s, eqn, OVER_AND_OVER)) for s in wanted)
        found.append(Taken(values=Sown(hidden=hidden)))

    def end_jaxpr(self, found, given, frame: Frame) -> Taken:
        # Until now, entries had variables of the jaxpr in the place of arrays.
        def read(x: Uncollected) -> Uncollected:
            arrays = tuple(frame.read_arrays(x.entry.arrays))
            return x._replace(entry=dc.replace(x.entry, arrays=arrays))

        parts = [read(x) if isinstance(x, Uncollected) else x.values for x in found]
        keeps_all = lambda name: self.reducer(name) is not None
        return Taken(given.carry, gather(parts, keeps_all))

    def leave_equation(self, values: Sown, frame: Frame) -> Sown:
        eqn = frame.eqn
        loop = loop_of(eqn)
        step = frame.now, loop.reverse if loop else None

        return values.map(lambda e: dc.replace(e, route=(step, *e.route)))

    def only_iterations(self, values: Sown) -> Sown:
        def only(e):
            n = e.at[-1] if _entry.keeps_one(e) else -1
            return dc.replace(e, arrays=(n,) * len(e.arrays))

        return values.map(only)

    def stack_iterations(self, values: Sown, length: int) -> Sown:
        return values.map(lambda e: _entry.stacked(e, length))

    def stack_devices(self, values: Sown, axes, varying):
        pairs = [_entry.on_device(e, axes, varying) for e in values.entries]
        entries, specs = zip(*pairs) if pairs else ((), ())
        return dc.replace(values, entries=entries), dc.replace(values, entries=specs)

    def unify_branches(self, all_values: Sequence[Sown]):
        return to_one_form(all_values)

    def before_first_iteration(self, values: Sown) -> Sown:
        left = values.map(_entry.left_loop)
        return left.map(lambda e: _merge.zeros(_merge.unify([e])))

    def after_iteration(self, old: Sown, new: Sown) -> Sown:
        new = new.map(_entry.left_loop)
        entries = tuple(
            _merge.latest(o, _merge.conform(n, o))
            for o, n in zip(old.entries, new.entries)
        )
        return dc.replace(old, entries=entries)

    def started(self, survey: Callable[[Handler], Sown]) -> dict[Any, ReducerState]:
        """The states of all reducers before the first execution. `survey` looks at what
        a handler finds in the program."""
        reducers = self.reduce.value
        reducers = reducers.values() if isinstance(reducers, Mapping) else [reducers]
        if not any(r is not None and r.has_state for r in reducers):
            return {}
        entries = survey(dc.replace(self, reduce=EACH_PLACE)).entries
        entries = [
            e for e in entries if self.folds(e.site.name) and self._chooses(e.site)
        ]
        return _reduce.started(self.reducer, entries)


def _checks(site: Site, atoms: Sequence[Any]) -> tuple[Check, ...]:
    if not site.spec:
        return ()
    shapes = [
        jax.ShapeDtypeStruct(site.shape(i, v.aval.shape), v.aval.dtype)
        for i, v in enumerate(atoms)
    ]
    return (Check(site, tuple(shapes[len(site.guards) :])),)
