"""What a handler of sows has to say for itself.

The walk in `_interpreter.py` knows nothing of what becomes of a sow; a handler knows
nothing of loops and branches, but for how its results go through them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TYPE_CHECKING

import jax

from .._mark.site import Site
from .find import sites
from .refuse import is_solver, NO_RULE, OVER_AND_OVER, refuse, TEACH


if TYPE_CHECKING:
    from .frame import Frame


class Given(NamedTuple):
    """What a handler passes down to the sows: a PyTree.

    `carry` goes from each execution to the next. `rest` is the same for all, save that
    a loop may slice it.
    """

    carry: Any = ()
    rest: Any = ()


class Taken(NamedTuple):
    """What a handler gets back from the sows: a PyTree."""

    carry: Any = ()
    rest: Any = ()


class Handler:
    """What to do with sows. Handlers are hashable, and hold no state: whatever they
    find out leaves the walk in `Taken`, so that JAX may cache it."""

    def sow(
        self, found: list, given: Given, site: Site, atoms, frame: "Frame"
    ) -> Given:
        """Sees to one sow: `frame` takes what its outputs are, `found` whatever `join`
        wants to know. Returns what the next sow is given."""
        raise NotImplementedError

    # Whether the sows that it does not want are left for somebody further out.
    outer: bool = True

    # Whether it holds nothing of a user's, which might hold tracers.
    lasting: bool = True

    # Whether what becomes of the sows may be differentiated further out.
    differentiable: bool = True

    def wants(self, site: Site) -> bool:
        """Whether a sow must not be lost."""
        del site
        return False

    def leaves(self, eqn: Any) -> bool:
        """Whether everything inside of an equation stays as it is."""
        del eqn
        return False

    def changes(self, eqn: Any) -> bool:
        """Whether what is inside of an equation will compute something else."""
        del eqn
        return False

    def without_rule(self, found: list, eqn: Any) -> None:
        """Takes note of an equation for which there is no rule."""
        del found
        why = (OVER_AND_OVER,) if is_solver(eqn) else (NO_RULE, TEACH)
        refuse(self, eqn, sites(eqn), *why)

    def join(self, found: list, given: Given, frame: "Frame") -> Taken:
        """One `Taken` from all that `sow` and the rules put into `found`."""
        del found, frame
        return Taken(given.carry)

    def ordered(self, site: Site) -> bool:
        """Whether it counts in which order the executions of a sow come."""
        del site
        return False

    def within(self, eqn: Any) -> "Handler":
        """The handler for what is inside of an equation."""
        del eqn
        return self

    def unstack(self, rest: Any, jaxpr: Any) -> tuple[Any, Callable[[Any], Any]]:
        """For a loop: what of `Given.rest` has an entry for each iteration, and a
        function that puts that of one iteration back."""
        del jaxpr
        return (), lambda xs: rest

    def unspread(
        self, rest: Any, jaxpr: Any, devices: Sequence[Any]
    ) -> tuple[Any, Callable[[Any], Any], Any]:
        """For mesh axes: what of `Given.rest` has an axis for each of them, a function
        that puts that of one device back, and `PartitionSpec`s."""
        del jaxpr, devices
        return (), lambda xs: rest, ()

    def on_devices(
        self, carry: Any, axes: Sequence[Any]
    ) -> tuple[Any, Callable[[Any], Any]]:
        """For mesh axes: what of `Given.carry` goes inside, each array of which has a
        leading axis for each of them, and a function that puts what comes back into
        the carry."""
        del axes
        return (), lambda new: carry

    def enter(self, rest: Any, frame: "Frame") -> Any:
        """`Taken.rest` of what is inside of an equation: `frame.eqn`."""
        del frame
        return rest

    def stack(self, rest: Any, length: int) -> Any:
        """For a loop: `Taken.rest`, once each array in it has a new leading axis."""
        del length
        return rest

    def spread(self, rest: Any, axes: dict[Any, int], varying: Callable) -> Any:
        """For one device of many: `Taken.rest`, with an axis of size one for each mesh
        axis that it is `varying` over, and the matching `PartitionSpec`s."""
        del axes, varying
        return rest, jax.sharding.PartitionSpec()

    def branch(self, rests: Sequence[Any]) -> Callable[[Any], Any]:
        """For exclusive branches, given their `Taken.rest` as shapes: a function that
        brings each to one form."""
        del rests
        return lambda rest: rest

    def empty(self, rest: Any) -> Any:
        """For a loop of unknown length, given `Taken.rest` of its body as shapes: what
        there is before the first iteration."""
        return rest

    def again(self, old: Any, new: Any) -> Any:
        """For a loop of unknown length: `Taken.rest` after one more iteration."""
        del old
        return new
