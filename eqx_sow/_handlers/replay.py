"""What a derivative computes once more is not a second execution.

Three kinds of it can be told. A value that is computed as in the forward pass, from the
same inputs: a `bwd` that differentiates the forward function where it was. For that see
`_walk/repeats.py`. In a loop of unknown length, the same equation, called from the same
place: Equinox's checkpointed loops run their body anew in each step of the backward
pass. And in the derivative rule of a `jax.custom_jvp` function, the same equation as in
that function, if the rule calls it: optimistix solves, and evaluates what it solved
once more at the solution. Whatever else a `bwd` sows is an execution of its own, as the
values at other states of `diffrax.BacksolveAdjoint`, which solves another equation
there.
"""

from typing import Any, NamedTuple

import jax.extend.core as jexc

from .. import _compat
from .._frames import call_site
from .._values.entry import Path
from .._values.sown import is_replay_of, LOOP
from .._walk.repeats import Repeats


_CUSTOM = jexc.primitives.custom_vjp_call_p, _compat.hi_p
# Of each execution the `Site.key` and the path.
Ran = frozenset[tuple[Any, Path]]


class Inside(NamedTuple):
    """Where a walk is. `backward`: in a backward pass. `calls` is then what is between
    the innermost loop of unknown length there and here, if there is such a loop.
    `rule`: in the derivative rule of a `jax.custom_jvp` function. `repeats`: what is
    known of the sows from here on. `ran`: the executions in the forward pass, of the
    whole program."""

    backward: bool = False
    calls: Path | None = None
    rule: str | None = None
    repeats: Repeats = Repeats()
    ran: Ran = frozenset()

    def within(self, eqn: Any, at: int) -> "Inside":
        """Inside of an equation, the one `at` this index of its jaxpr."""
        calls = None if self.calls is None else (*self.calls, *call_of(eqn))
        backward, rule = self.is_backward(eqn), self._rule(eqn)
        if eqn.primitive is jexc.primitives.custom_jvp_call_p:
            rule = None
        if calls is None and eqn.primitive in _CUSTOM:
            # Not differentiated, so nothing in there has run before.
            backward = False
        elif backward and eqn.primitive is jexc.primitives.while_p:
            calls = ()
        return Inside(backward, calls, rule, self.repeats.inside(at), self.ran)

    def is_backward(self, eqn: Any) -> bool:
        return self.backward or _compat.in_backward_pass(eqn)

    def _rule(self, eqn: Any) -> str | None:
        return (self.rule, *_compat.rules_around(eqn))[-1]

    def replayed(self, eqn: Any) -> Path | None:
        """See `Entry.replayed`, of a sow."""
        site = eqn.params["site"]
        rule = self._rule(eqn)
        if site.modes or (self.calls is None and rule is None):
            return None
        return (*((rule,) if self.calls is None else self.calls), site.origin)

    def has_run(self, eqn: Any) -> bool:
        """Whether a sow replays one of the executions that `ran`."""
        key, replayed = eqn.params["site"].key, self.replayed(eqn)
        return replayed is not None and any(
            key == of and is_replay_of(replayed, path) for of, path in self.ran
        )

    def is_again(self, eqn: Any, at: int) -> bool:
        """Whether a sow is not an execution of its own."""
        return self.repeats.of(at, eqn.params["site"]) is None or self.has_run(eqn)


def call_of(eqn: Any) -> Path:
    """What an equation adds to the path of a sow inside."""
    rules = _compat.rules_around(eqn)
    if eqn.primitive is jexc.primitives.while_p:
        return (*rules, LOOP)
    # Its branches may become one.
    if eqn.primitive is jexc.primitives.cond_p:
        return rules
    return (call_site(eqn), *rules)
