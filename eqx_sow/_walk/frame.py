"""A jaxpr in evaluation."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp

from .. import _compat
from .._mark.primitive import edge_p, edge_value
from .sows import variables


class Frame:
    """A jaxpr in evaluation.

    Equations without a sow wait until something needs their results, and are then
    evaluated all at once, as one call. Of

        b = sin a
        c = cos b
        d = sow[name=h] c
        e = mul d 2.0

    (without the edges of the sow) the walk defers the first two. At the sow, the
    handler says that `d` is `c` (`alias_outputs`), and that it wants `c` (`want`), or
    reads it now (`read`). The last equation waits, too. When the outputs are read, all
    that waits is evaluated, and of what it computes only that comes out which is wanted
    or read later.

    - `_pending`: the equations that wait, filled by `defer` and emptied by `_flush`.
    - `_wanted_at_end`: variables that are read when the walk is over: the outputs, and
      what handlers `want`.
    - `_not_donated`: variables whose arrays a handler may return, so that no jitted
      function may get their memory.
    - `_same`: the variables that a sow returns, each with the one that it stands for.
    """

    def __init__(self, jaxpr: Any, values: Sequence[Any]):
        self._env = dict(zip((*jaxpr.constvars, *jaxpr.invars), values))
        self._same: dict[Any, Any] = {}
        self._pending: list[Any] = []
        self._effects_wait = False
        self._wanted_at_end: set[Any] = set()
        self._not_donated: list[Any] = []
        self._last: dict[Any, int] | None = None
        self._jaxpr = jaxpr
        self.now = 0
        self.eqn: Any = None
        self.want(jaxpr.outvars)

    def want(self, atoms) -> None:
        """These are read when the walk is over."""
        self._wanted_at_end.update(variables(map(self.source, atoms)))

    def forbid_donation(self, atoms) -> None:
        """A handler may return these as they are, so their memory is not to be used
        for something else."""
        self._not_donated += atoms

    def without_donating(self, eqn: Any) -> Any:
        """The equation, if it is that of a jitted function, without donating what must
        not be."""
        donated = eqn.params.get("donated_invars", ())
        if not any(donated):
            return eqn
        forbidden = set(variables(map(self.source, self._not_donated)))
        allowed = tuple(
            d and (isinstance(v, jexc.Literal) or self.source(v) not in forbidden)
            for d, v in zip(donated, eqn.invars)
        )
        return eqn.replace(params={**eqn.params, "donated_invars": allowed})

    def source(self, v: Any) -> Any:
        """The variable that this one stands for: itself, but for what a sow returns."""
        if isinstance(v, jexc.Literal):
            return v
        return self._same.get(v, v)

    def alias_outputs(self, atoms) -> None:
        """The values that come out of the current sow are these."""
        edge, *outvars = self.eqn.outvars
        self._env[edge] = edge_value(edge.aval)
        for out, v in zip(outvars, atoms):
            self._same[out] = v = self.source(v)
            if out in self._wanted_at_end:
                self.want([v])
            if self._last is not None and not isinstance(v, jexc.Literal):
                self._last[v] = max(self._last.get(v, -1), self._last.get(out, -1))

    def set(self, outvars, values) -> None:
        self._env.update(zip(outvars, values))

    def defer(self, eqn: Any) -> None:
        """This equation is to be evaluated in the place of the current one."""
        self._pending.append(eqn)
        if eqn.effects:
            self._effects_wait = True

    def read(self, atoms) -> list[Any]:
        atoms = [self.source(v) for v in atoms]
        if any(v not in self._env for v in variables(atoms)):
            self._flush()
        return [v.val if isinstance(v, jexc.Literal) else self._env[v] for v in atoms]

    def flush_effects(self) -> None:
        """Evaluates what waits, if any of it has an effect: a `jax.debug.print` keeps
        its place among others, and prints even if no result is used."""
        if self._effects_wait:
            self._flush()

    def read_arrays(self, atoms) -> list[Any]:
        return [_as_array(v, x) for v, x in zip(atoms, self.read(atoms))]

    def _wanted(self) -> Callable[[Any], bool]:
        """A test of whether a variable is read from here on."""
        all_eqns = self._jaxpr.eqns
        if self.now == len(all_eqns):
            return self._wanted_at_end.__contains__
        if self._last is None:
            self._last = {
                v: i
                for i, eqn in enumerate(all_eqns)
                for v in variables(map(self.source, eqn.invars))
            }
        last = self._last
        return lambda v: v in self._wanted_at_end or last.get(v, -1) >= self.now

    def _flush(self) -> None:
        eqns, self._pending = self._pending, []
        effects = [e.effects for e in eqns] if self._effects_wait else ()
        self._effects_wait = False
        env, same = self._env, self._same
        invars: dict[Any, None] = {}
        for i, eqn in enumerate(eqns):
            for v in eqn.invars:
                if isinstance(v, jexc.Literal):
                    continue
                if v in env:
                    invars[v] = None
                elif v in same:
                    atoms = [self.source(v) for v in eqn.invars]
                    eqns[i] = eqn.replace(invars=atoms)
                    invars.update((v, None) for v in variables(atoms) if v in env)
                    break
        wanted = self._wanted()
        # An edge that only a sow needed is gone with that.
        read = {v for e in eqns for v in e.invars if not isinstance(v, jexc.Literal)}
        eqns = [
            e
            for e in eqns
            if e.primitive is not edge_p
            or any(v in read or wanted(v) for v in e.outvars)
        ]
        outvars = [v for e in eqns for v in e.outvars if wanted(v)]
        segment = self._jaxpr.replace(
            constvars=[],
            invars=list(invars),
            outvars=outvars,
            eqns=eqns,
            effects=frozenset().union(*effects),
            debug_info=self._jaxpr.debug_info.with_unknown_names(),
        )
        out = _compat.inline_or_call(segment, [self._env[v] for v in invars])
        self.set(outvars, out)


def _as_array(atom: Any, x: Any) -> Any:
    if isinstance(x, jax.Array):
        return x
    if atom.aval.weak_type:
        return jnp.asarray(x)
    return jnp.asarray(x, atom.aval.dtype)
