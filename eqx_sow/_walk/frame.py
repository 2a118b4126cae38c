"""A jaxpr in evaluation."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp

from .. import _compat
from .find import root, variables


class Frame:
    """A jaxpr in evaluation. Equations without a sow wait until something needs their
    results, and are then evaluated all at once."""

    def __init__(self, jaxpr: Any, values: Sequence[Any]):
        self._env = dict(zip((*jaxpr.constvars, *jaxpr.invars), values))
        self._same: dict[Any, Any] = {}
        self._pending: list[Any] = []
        self._unsettled = False
        self._kept: set[Any] = set()
        self._held: list[Any] = []
        self._last: dict[Any, int] | None = None
        self._jaxpr = jaxpr
        self.now = 0
        self.eqn: Any = None
        self.keep(jaxpr.outvars)

    def keep(self, atoms) -> None:
        """These are wanted at the end."""
        self._kept.update(variables(map(self.source, atoms)))

    def hold(self, atoms) -> None:
        """A handler may return these as they are."""
        self._held += atoms

    def without_donating(self, eqn: Any) -> Any:
        """The equation, of a jitted function, without donating what is held."""
        donated = eqn.params.get("donated_invars", ())
        if not any(donated):
            return eqn
        held = set(variables(map(self.source, self._held)))
        kept = tuple(
            d and (isinstance(v, jexc.Literal) or self.source(v) not in held)
            for d, v in zip(donated, eqn.invars)
        )
        return eqn.replace(params={**eqn.params, "donated_invars": kept})

    def source(self, v: Any) -> Any:
        if isinstance(v, jexc.Literal):
            return v
        return self._same.get(v, v)

    def alias(self, atoms) -> None:
        """The outputs of the current equation are these."""
        for out, v in zip(self.eqn.outvars, atoms):
            self._same[out] = v = self.source(v)
            if out in self._kept:
                self.keep([v])
            if self._last is not None and not isinstance(v, jexc.Literal):
                self._last[v] = max(self._last.get(v, -1), self._last.get(out, -1))

    def root(self, v: Any) -> Any:
        """What the index of a branch comes from, see `Located`."""
        return root(self._jaxpr, self.source(v))

    def execution(self, v: Any) -> Any:
        """Whatever made the root of an index. All that came in, came in together."""
        return None if v in self._jaxpr.invars else v

    def place(self, v: Any) -> int | None:
        """Where a variable is among the inputs, counted from the last one."""
        invars = self._jaxpr.invars
        return invars.index(v) - len(invars) if v in invars else None

    def depends(self, later: int, earlier: int) -> bool:
        """Whether an equation needs what an earlier one makes."""
        eqns = self._jaxpr.eqns
        made = set(eqns[earlier].outvars)
        for eqn in eqns[earlier + 1 : later]:
            if not made.isdisjoint(variables(eqn.invars)):
                made.update(eqn.outvars)
        return not made.isdisjoint(variables(eqns[later].invars))

    def takes_from(self, later: int, earlier: int) -> bool:
        """Whether an equation has as an operand what an earlier one makes."""
        made = set(self._jaxpr.eqns[earlier].outvars)
        return not made.isdisjoint(variables(self._jaxpr.eqns[later].invars))

    def set(self, outvars, values) -> None:
        self._env.update(zip(outvars, values))

    def leave(self, eqn: Any) -> None:
        """This equation is to be evaluated in the place of the current one."""
        self._pending.append(eqn)
        if eqn.effects:
            self._unsettled = True

    def read(self, atoms) -> list[Any]:
        atoms = [self.source(v) for v in atoms]
        if any(v not in self._env for v in variables(atoms)):
            self._flush()
        return [v.val if isinstance(v, jexc.Literal) else self._env[v] for v in atoms]

    def settle(self) -> None:
        """Evaluates what waits, if any of it has an effect: effects keep their order,
        and happen even if no result is used."""
        if self._unsettled:
            self._flush()

    def read_arrays(self, atoms) -> list[Any]:
        return [_as_array(v, x) for v, x in zip(atoms, self.read(atoms))]

    def _wanted(self) -> Callable[[Any], bool]:
        """Whether a variable is read from here on."""
        all_eqns = self._jaxpr.eqns
        if self.now == len(all_eqns):
            return self._kept.__contains__
        if self._last is None:
            self._last = {
                v: i
                for i, eqn in enumerate(all_eqns)
                for v in variables(map(self.source, eqn.invars))
            }
        last = self._last
        return lambda v: v in self._kept or last.get(v, -1) >= self.now

    def _flush(self) -> None:
        eqns, self._pending = self._pending, []
        effects = [e.effects for e in eqns] if self._unsettled else ()
        self._unsettled = False
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
        outvars = [v for e in eqns for v in e.outvars if wanted(v)]
        segment = self._jaxpr.replace(
            constvars=[],
            invars=list(invars),
            outvars=outvars,
            eqns=eqns,
            effects=frozenset().union(*effects),
            debug_info=self._jaxpr.debug_info.with_unknown_names(),
        )
        out = _compat.splice(segment, (), [self._env[v] for v in invars])
        self.set(outvars, out)


def _as_array(atom: Any, x: Any) -> Any:
    if isinstance(x, jax.Array):
        return x
    if atom.aval.weak_type:
        return jax.device_put(x)
    return jnp.asarray(x, atom.aval.dtype)
