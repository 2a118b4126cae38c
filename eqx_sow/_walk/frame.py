"""A jaxpr in evaluation."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax.extend.core as jexc
from jax.extend import source_info_util

from .. import _compat
from .._mark.primitive import edge_p, edge_value
from .sows import variables


class Frame:
    """A jaxpr in evaluation.

    Equations without a mark wait until something needs their results, and are then
    evaluated all at once, as one call. Of

        b = sin a
        c = cos b
        d = sow[name=h] c
        e = mul d 2.0

    (without the edges of the mark) the walk defers the first two. At the mark, the
    handler says that `d` is `c` (`alias_outputs`), and that it wants `c` at the end of
    the walk (`want`), or reads it now (`read`). The last equation waits, too. When the
    outputs are read, all that waits is evaluated, and of what it computes only that
    comes out which is read later.

    - `now` and `eqn`: the equation that the walk has come to, and its index.
    - `_pending`: the equations that wait, filled by `defer` and emptied by `_flush`.
    - `_last_read`: for each variable, by its `id`, the index of the last equation that
      reads it, or the number of equations if it is read at the end: an output, or what
      a handler wants.
    - `_same`: for each variable that a mark returns, by its `id`, the one that it
      stands for. (Numbers are among the operands of equations, and not hashable.)
    """

    def __init__(self, jaxpr: Any, values: Sequence[Any]):
        self.jaxpr = jaxpr
        self._env = dict(zip((*jaxpr.constvars, *jaxpr.invars), values))
        self._same: dict[Any, Any] = {}
        self._pending: list[Any] = []
        self._effects_wait = False
        self._last_read = {
            id(v): i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars
        }
        self.now = 0
        self.eqn: Any = None
        self.want(jaxpr.outvars)

    def want(self, atoms) -> None:
        """These are read when the walk is over."""
        at_end = len(self.jaxpr.eqns)
        self._last_read |= {id(v): at_end for v in self._sources(atoms)}

    def _sources(self, atoms: Iterable[Any]) -> list[Any]:
        """The variables that these stand for: themselves, but for what a mark
        returns."""
        same = self._same
        return [same.get(id(v), v) for v in atoms]

    def alias_outputs(self, atoms) -> None:
        """The values that come out of the current mark are these."""
        edge, *outvars = self.eqn.outvars
        last = self._last_read
        if id(edge) in last:
            self._env[edge] = edge_value(edge.aval)
        for out, v in zip(outvars, self._sources(atoms)):
            self._same[id(out)] = v
            last[id(v)] = max(last.get(id(v), -1), last.get(id(out), -1))

    def set(self, outvars, values) -> None:
        self._env.update(zip(outvars, values))

    @contextlib.contextmanager
    def in_scope(self) -> Iterator[None]:
        """What is evaluated in the place of the current equation is called from where
        that was, and has its name stack. So outer transformations see the calls around,
        which loops are Equinox's, and what is part of a backward pass."""
        source = self.eqn.source_info
        stack = source_info_util.current_name_stack() + source.name_stack
        context = source_info_util.user_context(source.traceback, name_stack=stack)
        context.__enter__()
        try:
            yield
        finally:
            # Without an error, to which JAX would add a traceback. Ours say where.
            context.__exit__(None, None, None)

    def defer(self, *eqns: Any) -> None:
        """These equations are to be evaluated in the place of the current one."""
        self._pending += eqns
        self._effects_wait = self._effects_wait or any(e.effects for e in eqns)

    def read(self, atoms) -> list[Any]:
        atoms, env = self._sources(atoms), self._env
        if [v for v in variables(atoms) if v not in env]:
            self._flush()
        return [v.val if isinstance(v, jexc.Literal) else env[v] for v in atoms]

    def read_arrays(self, atoms) -> list[Any]:
        return list(map(_compat.as_array, self.read(atoms)))

    def flush_effects(self) -> None:
        """Evaluates what waits, if any of it has an effect: a `jax.debug.print` keeps
        its place among others, and prints even if no result is used."""
        if self._effects_wait:
            self._flush()

    def _flush(self) -> None:
        """Evaluates all that waits."""
        eqns = [without_donating(self._with_sources(e)) for e in self._pending]
        self._pending, self._effects_wait = [], False
        inputs = dict.fromkeys(variables(v for e in eqns for v in e.invars))
        last, now = self._last_read, self.now
        # An edge that only a mark needed is gone with that.
        eqns = [
            e
            for e in eqns
            if e.primitive is not edge_p
            or any(v in inputs or last.get(id(v), -1) >= now for v in e.outvars)
        ]
        invars = [v for v in inputs if v in self._env]
        outvars = [v for e in eqns for v in e.outvars if last.get(id(v), -1) >= now]
        segment = self.jaxpr.replace(
            constvars=[],
            invars=invars,
            outvars=outvars,
            eqns=eqns,
            effects=frozenset().union(*[e.effects for e in eqns]),
            debug_info=self.jaxpr.debug_info.with_unknown_names(),
        )
        out = _compat.inline_or_call(segment, [self._env[v] for v in invars])
        self.set(outvars, out)

    def _with_sources(self, eqn: Any) -> Any:
        """The equation, without variables that a mark returns."""
        for v in eqn.invars:
            if id(v) in self._same:
                return eqn.replace(invars=self._sources(eqn.invars))
        return eqn


def without_donating(eqn: Any) -> Any:
    """The equation, if it is that of a jitted function, without donating its operands:
    a handler may return them."""
    donated = eqn.params.get("donated_invars", ())
    if not any(donated):
        return eqn
    nothing = (False,) * len(donated)
    return eqn.replace(params={**eqn.params, "donated_invars": nothing})
