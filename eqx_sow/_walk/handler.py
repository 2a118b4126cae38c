"""A handler says what becomes of the marks in a program.

The walk in `interpreter.py`, and its rules, run the program, and ask the handler at
each mark. `Given` is what a handler passes down to the marks, and `Taken` what it gets
back from them. In `save_intermediates`, `Given.carry` has the states of reducers, and
`Taken.entries` what was captured.

| called by | method | for |
|---|---|---|
| `evaluate` | `sow` | each mark, in order of execution |
| | `concerns` | a mark inside an equation: may that stay as it is? |
| | `for_inside` | an equation with a mark inside, before its rule |
| | `end_jaxpr` | the end of a jaxpr: what was captured in there |
| rule for `scan` | `sliced_by_scan` | which values have an axis for the iterations |
| | `needs_iteration` | a mark: does it matter in which iteration it is? |
| rule for `shard_map` | `values_on_devices`, `carry_on_devices` | what goes inside |
| | `needs_order` | a mark: does the order of its executions matter? |
| rules for `custom_*` | `replaces` | a mark: is the derivative rule still right? |
| | `differentiable` | is what was taken ever differentiated? |
| `refuse` | `wants` | a mark that cannot be had: is it an error? |
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax

from .. import _compat
from .._errors import SowError, SowTypeError, UnsupportedPrimitiveError
from .._mark.objects import Holder
from .._mark.site import Site
from .._mark.static import Const
from .._values.merge import Entries
from .frame import Frame
from .sows import sites


class Given(NamedTuple):
    """What a handler passes down to the marks: a PyTree.

    `carry` goes from each execution to the next. `values` are the same for all, save
    that a loop may slice them. `iterations` says which one of each scan around this is,
    from outside in, for a handler that `needs_iteration`: in a scan over tokens within
    a scan over layers, `(layer, token)`, both int32. See also `counts_whiles`.
    """

    carry: dict[Any, Any] = {}
    values: Any = ()
    iterations: tuple[Any, ...] = ()


class Taken(NamedTuple):
    """What a handler gets back from the marks: a PyTree."""

    carry: dict[Any, Any]
    entries: Entries


class Handler:
    """What to do with marks. A handler is hashable and holds no state: whatever it
    finds out leaves the walk in `Taken`. So JAX may cache what it made of a jaxpr."""

    # Whether another transformation around this one may want the marks that this
    # handler does not want. Then they stay in the program.
    has_outer: bool = True

    # The names that are also marked outside of linear solvers. Within one, a mark of
    # such a name may be left out.
    elsewhere: frozenset[str] = frozenset()

    # Whether what the handler makes of a jaxpr may be kept for other calls. Not if it
    # holds functions of a user's, which might hold tracers.
    cacheable: bool = True

    # Whether `Given.iterations` has an entry for each `while_loop`, too.
    counts_whiles: bool = False

    # Whether what is taken at the marks may be differentiated further.
    differentiable: bool = True

    def sow(self, found: list, given: Given, site: Site, atoms, frame: Frame) -> Given:
        """Sees to the mark `frame.eqn`, with the operands `atoms` after its edge. Tells
        `frame` what its outputs are, and appends to `found` whatever `end_jaxpr` wants
        to know. Returns the `Given` of the next mark."""
        raise NotImplementedError

    def end_jaxpr(self, found: list, frame: Frame) -> Entries:
        """What was captured in a jaxpr. In `found` is also each `Entry` that was
        captured inside one of its equations."""
        return ()

    def wants(self, site: Site) -> bool:
        """Whether a mark must not be lost."""
        return False

    def concerns(self, site: Site) -> bool:
        """Whether the handler has anything to do with a mark: if that is not left to
        outer transformations as it is."""
        return self.wants(site)

    def for_inside(self, eqn: Any) -> "Handler":
        """The handler for what is inside an equation."""
        return self

    def replaces(self, site: Site) -> bool:
        """Whether a function with the mark inside computes something else now, so that
        its derivative rule is no longer right."""
        return False

    def needs_order(self, site: Site) -> bool:
        """Whether the order of the executions of a mark matters."""
        return False

    def needs_iteration(self, site: Site) -> bool:
        """Whether a mark asks for `Given.iterations`."""
        return False

    def sliced_by_scan(self, values: Any, jaxpr: Any) -> Any:
        """For a scan: in the place of each of `Given.values`, or of several, whether it
        has a leading axis for the iterations. The others are the same in all."""
        return False

    def values_on_devices(
        self, values: Any, jaxpr: Any, devices: Sequence[Any]
    ) -> tuple[Any, Any]:
        """For a `shard_map`: those of `Given.values` that go inside, and their
        `PartitionSpec`s, of which each is as long as there are leading axes that a
        device has one entry of. `devices` are the mesh axes."""
        return values, jax.sharding.PartitionSpec()

    def carry_on_devices(self, carry: dict[Any, Any]) -> dict[Any, Any]:
        """For a `shard_map`: those of `Given.carry` that go inside, arrays with a
        leading axis for each mesh axis."""
        return {}


# --- marks that a handler cannot see to ---
def check_guarded(site: Site, unclear: bool = False) -> None:
    """Raises if it cannot be told whether a mark runs, or if it is `unclear` whether it
    only runs again; or if what it marks is not a PyTree."""
    for x in site.form.leaves:
        if isinstance(x, Const) and isinstance(x.value, Holder):
            what, leaf, where = x.value
            # The code that is called so may not be the user's.
            or_leave_out = (
                f". To leave it out, write `names=lambda name: name != {site.name!r}`."
            )
            raise SowTypeError(
                f"{site.said}: {f'the leaf `{leaf}` of the value' if leaf else 'it'} "
                f"is {what}, which is not a PyTree, and holds a traced array: "
                f"`{where}`. So JAX does not see that array, and it cannot be captured "
                "or planted. Register the class as a PyTree (`eqx.Module`, "
                "`jax.tree_util.register_dataclass`; for a function with its "
                "arguments, `jax.tree_util.Partial`), or mark the arrays"
                f"{or_leave_out if site.note else '.'}"
            )
    if unclear or site.execution.again is None:
        raise SowError(
            f"{site.said} is in the `bwd` of a `jax.custom_vjp` that only some lanes "
            "of a `jax.vmap` call, and the forward pass has a mark of that name. "
            "eqx_sow cannot tell whether the `bwd` repeats that one. Give it another "
            "name, with `eqx_sow.scope(...)`, or leave it out, by `names` or another "
            "`tag`."
        )
    if site.unguarded:
        raise SowError(
            f"{site.said} is in the derivative rule of a function (`jax.custom_jvp`, "
            "`jax.custom_vjp`) that only some lanes of a `jax.vmap` call, and the vmap "
            "came first, so eqx_sow cannot tell whether the mark runs. Write "
            "`jax.vmap(jax.grad(fn))`, or leave it out, by `names` or another `tag`."
        )


def is_solver(eqn: Any) -> bool:
    """Whether it evaluates a linear function over and over, and leaves its effects
    out."""
    primitive, _ = _compat.unmapped(eqn)
    return primitive.name in ("linear_solve", "custom_linear_solve")


def refuse_unknown(handler: Handler, eqn: Any) -> None:
    """Raises if the handler wants any of the marks in an equation without a rule. Who
    calls a linear solver usually evaluates the same function elsewhere, too, where the
    marks are seen."""
    inside, remedy = sites(eqn), "Move the mark out of it."
    if is_solver(eqn):
        why = "it evaluates its function over and over"
        inside = [site for site in inside if site.name not in handler.elsewhere]
    else:
        why = "eqx_sow has no rule for it"
        remedy += (
            " If the primitive is yours, `@eqx_sow.register_rule(primitive)` teaches "
            "eqx_sow about it."
        )
    refuse(handler, eqn, inside, why, remedy)


def refuse(
    handler: Handler, eqn: Any, inside: Iterable[Site], why: str, remedy: str
) -> None:
    """Raises if the handler wants any of the marks inside an equation."""
    for site in filter(handler.wants, inside):
        primitive, _ = _compat.unmapped(eqn)
        raise UnsupportedPrimitiveError(
            f"{site.said} is inside the primitive `{primitive}`: {why}, so the value "
            f"cannot be captured or planted. {remedy} Or leave it out, by `names` or "
            "another `tag`."
        )
