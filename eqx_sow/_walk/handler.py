"""A handler says what becomes of the marks in a program.

The walk in `interpreter.py`, and its rules, run the program, and ask the handler at
each mark. `Given` is what a handler passes down to the marks, and `Taken` what it gets
back from them. In `save_intermediates`, `Given.carry` has the states of reducers, and
`Taken.entries` what was captured.

What it is to do where is in a `Plan` (`plan.py`), which was made before. The walk gives
it the asks at a mark, and at an equation, those at the marks inside.

| called by | method | for |
|---|---|---|
| `evaluate` | `sow` | each mark, in order of execution |
| | `end_jaxpr` | the end of a jaxpr: what was captured in there |
| | `values_inside` | an equation or a jaxpr: what is passed down |
| rules for loops | `needs_iteration` | does it matter in which iteration a mark is? |
| rule for `scan` | `sliced_by_scan` | which values have an axis for the iterations |
| rule for `shard_map` | `specs_on_devices`, `carry_on_devices` | what goes inside |
| | `needs_order` | does the order of the executions of a mark matter? |
| rules for `custom_*` | `replaces` | is the derivative rule still right? |
| | `differentiable` | is what was taken ever differentiated? |
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax

from .. import _compat
from .._errors import SowError, SowTypeError, UnsupportedPrimitiveError
from .._mark.site import Site
from .._mark.static import Const, Holder
from .._values.merge import Entries
from .frame import Frame
from .plan import Ask
from .sows import Mark


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

    # Whether another transformation around this one may want the marks at which this
    # handler does nothing. Then they stay in the program.
    has_outer: bool = True

    # Whether what the handler makes of a jaxpr may be kept for other calls. Not if its
    # asks hold functions of a user's, which might hold tracers.
    cacheable: bool = True

    # Whether `Given.iterations` has an entry for each `while_loop`, too.
    counts_whiles: bool = False

    # Whether what is taken at the marks may be differentiated further.
    differentiable: bool = True

    # Whether a function with an asked mark inside computes something else now, so that
    # its derivative rule is no longer right.
    replaces: bool = False

    def sow(
        self,
        found: list,
        given: Given,
        site: Site,
        asks: Sequence[Ask],
        atoms: Sequence[Any],
        frame: Frame,
    ) -> Given:
        """Sees to the mark `frame.eqn`, with the operands `atoms` after its edge. Tells
        `frame` what its outputs are, and appends to `found` whatever `end_jaxpr` wants
        to know. Returns the `Given` of the next mark."""
        raise NotImplementedError

    def end_jaxpr(self, found: list, frame: Frame) -> Entries:
        """What was captured in a jaxpr. In `found` is also each `Entry` that was
        captured inside one of its equations."""
        return ()

    def values_inside(self, values: Any, slots: Sequence[int]) -> Any:
        """`Given.values` for a jaxpr or an equation, whose slots are called so here."""
        return values

    def needs_iteration(self, ask: Ask) -> bool:
        """Whether `Given.iterations` is asked for."""
        return False

    def needs_order(self, ask: Ask) -> bool:
        """Whether the order of the executions of a mark matters."""
        return False

    def sliced_by_scan(self, values: Any, inside: Iterable[tuple[Mark, Ask]]) -> Any:
        """For a scan: in the place of each of `Given.values`, or of several, whether it
        has a leading axis for the iterations. The others are the same in all."""
        return False

    def specs_on_devices(
        self, inside: Iterable[tuple[Mark, Ask]], devices: Sequence[Any]
    ) -> Any:
        """For a `shard_map`: the `PartitionSpec`s of `Given.values`, of which each is
        as long as there are leading axes that a device has one entry of. `devices` are
        the mesh axes."""
        return jax.sharding.PartitionSpec()

    def carry_on_devices(
        self, carry: dict[Any, Any], inside: Iterable[tuple[Mark, Ask]]
    ) -> dict[Any, Any]:
        """For a `shard_map`: those of `Given.carry` that go inside, arrays with a
        leading axis for each mesh axis."""
        return {}


# --- marks that a handler cannot see to ---
def check_guarded(site: Site) -> None:
    """Raises if it cannot be told whether a mark runs, or if what it marks is not a
    PyTree."""
    for x in site.form.leaves:
        if isinstance(x, Const) and isinstance(x.value, Holder):
            what, leaf, where = x.value
            # The code that is called so may not be the user's.
            or_leave_out = (
                f". To leave it out, write `names=lambda name: name != {site.name!r}`."
            )
            raise SowTypeError(
                f"{site.said_first}: "
                f"{f'the leaf `{leaf}` of the value' if leaf else 'it'} is {what}, "
                f"which is not a PyTree, and holds a traced array: `{where}`. So JAX "
                "does not see that array, and it cannot be captured or planted. "
                "Register the class as a PyTree (`eqx.Module`, "
                "`jax.tree_util.register_dataclass`; for a function with its "
                "arguments, `jax.tree_util.Partial`), or mark the arrays"
                f"{or_leave_out if site.note else '.'}"
            )
    if site.unguarded:
        raise SowError(
            f"{site.said_first} is in the derivative rule of a function "
            "(`jax.custom_jvp`, `jax.custom_vjp`) that only some lanes of a `jax.vmap` "
            "call, and the vmap came first, so eqx_sow cannot tell whether the mark "
            "runs. Write `jax.vmap(jax.grad(fn))`, or leave it out, by `names` or "
            "another `tag`."
        )


def check_clear(site: Site, again: bool | None) -> None:
    """Raises if it cannot be told whether a mark only runs `again`."""
    if again is None:
        raise SowError(
            f"{site.said_first} is in the `bwd` of a `jax.custom_vjp` that only some "
            "lanes of a `jax.vmap` call, and the forward pass has a mark of that name. "
            "eqx_sow cannot tell whether the `bwd` repeats that one. Give it another "
            "name, with `eqx_sow.scope(...)`, or leave it out, by `names` or another "
            "`tag`."
        )


def is_solver(eqn: Any) -> bool:
    """Whether it evaluates a linear function over and over, and leaves its effects
    out."""
    primitive, _ = _compat.unmapped(eqn)
    return primitive.name in ("linear_solve", "custom_linear_solve")


def refuse_unknown(eqn: Any, inside: Sequence[tuple[Mark, Ask]]) -> None:
    """Raises if anything is asked inside an equation without a rule."""
    remedy = "Move the mark out of it."
    if is_solver(eqn):
        why = "it evaluates its function over and over"
    else:
        why = "eqx_sow has no rule for it"
        remedy += (
            " If the primitive is yours, `@eqx_sow.register_rule(primitive)` teaches "
            "eqx_sow about it."
        )
    refuse(eqn, inside, why, remedy)


def refuse(eqn: Any, inside: Iterable[tuple[Mark, Ask]], why: str, remedy: str) -> None:
    """Raises if there is anything asked inside an equation."""
    for mark, _ in inside:
        primitive, _ = _compat.unmapped(eqn)
        raise UnsupportedPrimitiveError(
            f"{mark.site.said_first} is inside the primitive `{primitive}`: {why}, so "
            f"the value cannot be captured or planted. {remedy} Or leave it out, by "
            "`names` or another `tag`."
        )
