"""What `tap` does on the host: the event, and the call of the callback."""

import collections
import dataclasses as dc
import itertools as it
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np

from .._errors import SowError
from .._mark.site import Axis, Label, Site
from .._mark.static import Const, Form
from .._names import with_indices
from .._results.summarize import Summary
from .._results.tabulate import in_one_line
from .._values.axes import aligned, final_axes, kept_axes


class _Fields(NamedTuple):
    name: str
    mode: str
    value: Any
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    ran: Any


class TapEvent(_Fields):
    """Describes one execution of a mark, for the callback of [`eqx_sow.tap`][].

    **Attributes:**

    - `name`: the name of the mark.
    - `mode`: `"primal"`, `"tangent"`, `"cotangent"`, or of second order, such as
        `"cotangent.tangent"`.
    - `value`: the marked PyTree, after `transform`. Arrays are NumPy arrays,
        with a leading axis for each `vmap` that the value varies over, and none for
        loops; a key is its `jax.random.key_data`. All other leaves are what they were.
    - `count`: how many executions of this name and mode came before it in this call, an
        `int`. This includes executions that were not sent.
    - `ran`: `None`; or, if a condition differs between the lanes of a `vmap`, a boolean
        array with the axes of the lanes, which says which of them ran. The value is
        zero for the others. Each branch that contains the name has its own event.

    Also available as attributes, but not when you unpack the tuple:

    - `iterations`: the iteration of each loop around the mark, outermost first, a tuple
        of `int`s. In a reversed scan, iteration `i` has `xs[i]`. A cotangent has the
        iteration of its primal, or `None` if the backward pass computes it in a
        `while_loop` of its own, as in loops of Equinox and diffrax.
    - `path`: the name with the iterations in it, as if the loops were lists:
        `"blocks/3/attn"` in a scan over stacked blocks, `"h/17"` in any other loop.
        Outside loops, or if the iteration is not known, it is the name.
    - `device`: in a `jax.shard_map`, a dict from mesh axes to the index of the device
        along each. Elsewhere `None`.
    - `extra`: what was passed to `tap` as `extra`, its arrays as NumPy arrays.

    !!! example

        ```python
        import eqx_sow
        import jax
        import jax.numpy as jnp

        events = []
        fn = eqx_sow.tap(lambda x: eqx_sow.sow(jnp.sin(x), "sin"), events.append)
        fn(jnp.ones(3))
        jax.effects_barrier()
        name, mode, value, count, ran = events[0]  # "sin", "primal", ..., 0, None
        ```
    """

    device: dict[Hashable, int] | None = None
    extra: Any = None
    iterations: tuple[int, ...] | None = ()
    _path: str = ""

    @property
    def path(self) -> str:
        return self._path or self.name

    def __repr__(self):
        more = dict(device=self.device, extra=self.extra)
        if self.iterations:
            more |= dict(iterations=self.iterations, path=self.path)
        fields = self._asdict() | {k: v for k, v in more.items() if v is not None}
        return f"TapEvent({', '.join(f'{k}={v!r}' for k, v in fields.items())})"


TapEvent.__module__ = "eqx_sow"


# What callbacks raised, until they are raised. JAX reports only the text of it.
failures: collections.deque[SowError] = collections.deque(maxlen=8)


@dc.dataclass(frozen=True)
class Delivery:
    """Calls the callback, given the count before an execution, the iterations of the
    loops around, the indices of the device, and arrays: those of `extra`, then those of
    the value."""

    callback: Const
    mode: str
    # Of the value: its form, and the axes of lanes that its arrays have, as operands
    # have them. With `counted`, the last array says in which lanes the mark ran.
    site: Site
    counted: bool
    # That of the option `extra`.
    extra: Form
    devices: tuple[Hashable, ...]
    ordered: bool
    # What all iterations of the mark are called. `places` has an entry for each loop.
    whole: Label
    # What messages say of the mark.
    said: str
    # Of each loop, whether its iteration is that of the value.
    of_value: tuple[bool, ...]

    def with_lane(self, size: int, varies: Sequence[bool]) -> "Delivery":
        """After one more vmap, over which these arrays of the value vary."""
        axis = Axis(size, flows_backward=self.site.flows_backward)
        axes = axis, *self.site.axes
        each = tuple((v, *own) for v, own in zip(varies, self.site.varies))
        return dc.replace(self, site=self.site._replace(axes=axes, varies=each))

    def __call__(self, count: Any, *operands: Any) -> None:
        # Copies: what the callback keeps must not change when a buffer is used again.
        name, places = self.whole.name, self.whole.places
        k, n, m = len(places), len(self.devices), self.extra.n_operands
        iterations, operands = tuple(map(int, operands[:k])), operands[k:]
        device = dict(zip(self.devices, map(int, operands[:n])))
        arrays = [np.array(x) for x in operands[n:]]
        value, ran = self._value(arrays[m:])
        event = TapEvent(self.site.name, self.mode, value, int(count), ran)
        event.device = device or None
        event.extra = self.extra.with_arrays(arrays[:m])
        event.iterations = iterations if all(self.of_value) else None
        known = it.compress(zip(places, iterations), self.of_value)
        event._path = with_indices(name, known)
        try:
            self.callback.value(event)
        # Whatever it raises ends the run. Of an interrupt, too, JAX reports only text.
        except BaseException as e:
            # In one line, since the last line of JAX's report is what is looked at.
            raised = " ".join(f"{type(e).__name__}: {e}".split()).rstrip(":")
            failure = SowError(
                f"The callback of `tap` raised {raised}, for {self.said}: {self.mode}, "
                f"with {event.count} execution{'s' * (event.count != 1)} before it."
            )
            failures.append(failure)
            raise failure from e

    def _value(self, arrays: Sequence[Any]) -> tuple[Any, Any]:
        """The value, and in which lanes the mark ran."""
        site = self.site
        kept = kept_axes(site)

        def full(x, varies, final):
            x = aligned(x, list(it.compress(varies, final)))
            lead = [a.size for a in it.compress(site.axes, final)]
            return np.broadcast_to(x, (*lead, *x.shape[len(lead) :])).copy()

        arrays = list(map(full, arrays, site.varies, [*final_axes(site), kept]))
        ran = arrays.pop().astype(bool) if self.counted else None
        lead = [a.size for a in it.compress(site.axes, kept)]
        value = site.form.with_arrays(arrays, lead)
        return value, ran if lead else None


def print_event(event: TapEvent) -> None:
    """The callback that is there without one."""
    print(_line(event), flush=True)


def _line(event: TapEvent) -> str:
    parts = [f"{event.path} {event.mode} [{event.count}]"]
    is_summary = lambda x: isinstance(x, Summary)
    leaves: Any = jtu.tree_leaves_with_path(event.value, is_leaf=is_summary)
    values = [(path, x) for path, x in leaves if isinstance(x, _VALUES)]
    for path, x in values:
        label = f"{jtu.keystr(path)}: " if len(values) > 1 else ""
        parts.append(f"{label}{in_one_line(x)}")
    if event.ran is not None:
        parts.append(f"ran in {event.ran.sum()} of {event.ran.size} lanes")
    device: Any = event.device
    if device is not None:
        where = ", ".join(f"{axis}={i}" for axis, i in device.items())
        parts.append(f"on device {where}")
    for path, x in jtu.tree_leaves_with_path(event.extra):
        if np.size(x) == 1:
            parts.append(f"{jtu.keystr(path, simple=True, separator='/')} {x}".strip())
    return "  ".join(parts)


_VALUES = np.ndarray, Summary, jax.ShapeDtypeStruct
