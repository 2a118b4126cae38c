"""What a backward pass computes once more is not a second execution.

Two kinds of it can be told. In straight-line code, a value that is computed as in the
forward pass, from the same inputs: a `bwd` that differentiates the forward function
where it was. And in a loop of unknown length, the same equation, called from the same
place: Equinox's checkpointed loops run their body anew in each step of the backward
pass. Whatever else a `bwd` sows is an execution of its own, as the values at other
states of `diffrax.BacksolveAdjoint`, which solves another equation there.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.extend.core as jexc

from .. import _compat
from .._mark.site import Site
from .._values.entry import Path
from .._values.sown import LOOP
from .._walk.frame import Frame


# For each execution in the forward pass, the `Site.key` and the path.
Ran = frozenset[tuple[Any, Path]]


class Inside(NamedTuple):
    """Where a walk is. `backward`: in a backward pass. `calls` is then what is between
    the innermost loop of unknown length there and here, if there is such a loop."""

    backward: bool = False
    calls: Path | None = None

    def within(self, eqn: Any) -> "Inside":
        backward = self.is_backward(eqn)
        if self.calls is None and eqn.primitive is jexc.primitives.custom_vjp_call_p:
            # Not differentiated, so nothing in there has run before.
            return Inside()
        if backward and eqn.primitive is jexc.primitives.while_p:
            return Inside(True, ())
        calls = None if self.calls is None else (*self.calls, *call_of(eqn))
        return Inside(backward, calls)

    def is_backward(self, eqn: Any) -> bool:
        return self.backward or _compat.in_backward_pass(eqn)

    def replayed(self, site: Site) -> Path | None:
        """See `Entry.replayed`."""
        if site.modes or self.calls is None:
            return None
        return (*self.calls, site.origin)


def call_of(eqn: Any) -> Path:
    """What an equation adds to the path of a sow inside."""
    if eqn.primitive is jexc.primitives.while_p:
        return (LOOP,)
    # Its branches may become one.
    if eqn.primitive is jexc.primitives.cond_p:
        return ()
    return (_compat.call_site(eqn),)


def has_run(key: Any, replayed: Path | None, ran: Ran) -> bool:
    return replayed is not None and any(
        key == of and path[-len(replayed) :] == replayed for of, path in ran
    )


def recomputed(
    site: Site, atoms: Any, earlier: Iterable[tuple[int, Any]], frame: Frame
) -> int | None:
    """Which of the sows that the same jaxpr has had before is computed once more;
    these have a `site` and `operands`. `site.replay`: it is in a backward pass."""
    form = site.key, site.treedef, site.leaves
    for i, x in earlier if site.replay else ():
        if (
            not x.site.replay
            and (x.site.key, x.site.treedef, x.site.leaves) == form
            and frame.same_values(x.operands, atoms)
        ):
            return i
    return None
