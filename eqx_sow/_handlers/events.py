"""What `tap` sends, and who gets it, on the host."""

import collections
import dataclasses as dc
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np

from .._errors import SowError
from .._mark.static import Const, OPERAND, rebuild
from .._results.line import in_one_line
from .._results.summarize import Summary
from .._values.entry import align
from .._values.modes import is_backward


class TapEvent(NamedTuple):
    """One execution of a sow, as the callback of [`eqx_sow.tap`][] receives it.

    **Attributes:**

    - `name`: the name of the sow.
    - `mode`: `"primal"`, `"tangent"`, `"cotangent"`, or of second order, such as
        `"cotangent.tangent"`.
    - `value`: the PyTree that was sown, after `transform`. Arrays are NumPy arrays,
        with a leading axis for each `vmap` that the value varies over, and none for
        loops; a key is its `jax.random.key_data`. All other leaves are what they were.
    - `count`: how many executions of this name and mode came before it in this call, an
        `int`. One that was not sent counts too.
    - `ran`: `None`; or, where a condition differs between the lanes of a `vmap`, a
        boolean array that says which of them ran, with the axes of the lanes. The value
        is zero for the others. Each branch that contains the name is an event of its
        own.

    Two more are no fields, so that there are five to unpack:

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

    name: str
    mode: str
    value: Any
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    ran: Any

    @property
    def device(self) -> dict[Hashable, int] | None:
        return None

    @property
    def extra(self) -> Any:
        return None


TapEvent.__module__ = "eqx_sow"


class _Event(TapEvent):
    """An event with a device, or with something extra."""

    device: Any = None
    extra: Any = None

    def __repr__(self):
        more = dict(device=self.device, extra=self.extra)
        fields = self._asdict() | {k: v for k, v in more.items() if v is not None}
        return f"TapEvent({', '.join(f'{k}={v!r}' for k, v in fields.items())})"


# What callbacks raised, until they are raised. JAX reports only the text of it.
failures: collections.deque[SowError] = collections.deque(maxlen=8)


@dc.dataclass(frozen=True)
class Delivery:
    """Calls the callback. `extra` is the treedef and the leaves of what every event
    carries, whose arrays come first among the operands. `lanes` are the sizes of the
    leading axes, outermost first; `has` says which of them each operand has, of which
    the first after those of `extra` tells what ran if `guarded`."""

    callback: Const
    name: str
    mode: str
    where: str
    treedef: Const
    leaves: tuple[Any, ...]
    lanes: tuple[int, ...]
    has: tuple[tuple[bool, ...], ...]
    guarded: bool
    extra: tuple[Const, tuple[Any, ...]]
    devices: tuple[Hashable, ...]
    ordered: bool

    def __call__(self, count: Any, *operands: Any) -> None:
        # Copies: what the callback keeps must not change when a buffer is used again.
        n, m = len(self.devices), self.extra[1].count(OPERAND)
        arrays = [np.array(x) for x in operands[n:]]
        event: Any = self._event(int(count), arrays[m:], self.has[m:])
        extra = rebuild(*self.extra, arrays[:m])
        if n or extra is not None:
            event = _Event(*event)
            event.extra = extra
        if n:
            event.device = dict(zip(self.devices, map(int, operands[:n])))
        try:
            self.callback.value(event)
        except Exception as e:  # whatever it raises, which ends the run
            failure = SowError(
                f"The callback of `tap` raised {type(e).__name__}: {e} (at "
                f"`sow(..., {self.name!r})` at {self.where}, {self.mode}, with "
                f"{event.count} executions before it)."
            )
            failures.append(failure)
            raise failure from e

    def _event(
        self, count: int, arrays: list[Any], has: Sequence[tuple[bool, ...]]
    ) -> TapEvent:
        axes = [i for i in range(len(self.lanes)) if any(h[i] for h in has)]
        lead = tuple(self.lanes[i] for i in axes)
        has = [tuple(h[i] for i in axes) for h in has]
        every = (True,) * len(axes)
        # The cotangent of what is the same for all lanes is a total.
        total = is_backward(self.mode)

        def full(x, has):
            core = x.shape[sum(has) :]
            return np.broadcast_to(align(x, has, every), (*lead, *core)).copy()

        ran = None
        if self.guarded:
            ran, has = full(arrays.pop(0), has[0]), has[1:]
        for i, x in enumerate(arrays):
            if has[i] != every:
                if total:
                    continue
                arrays[i] = x = full(x, has[i])
            if ran is not None:
                x[~ran] = 0
        value = rebuild(self.treedef, self.leaves, arrays, lead)
        if ran is not None and not axes:
            ran = None
        return TapEvent(self.name, self.mode, value, count, ran)


def print_event(event: TapEvent) -> None:
    """The callback that is there without one."""
    print(_line(event), flush=True)


def _line(event: TapEvent) -> str:
    parts = [f"{event.name} {event.mode} [{event.count}]"]
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
