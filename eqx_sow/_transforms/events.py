"""What `tap` sends, and who gets it, on the host."""

import collections
import dataclasses as dc
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._errors import SowError
from .._mark.static import Const, rebuild, Same
from .._values.entry import align
from .._values.modes import is_backward
from .._values.summarize import is_numeric, Summary


class TapEvent(NamedTuple):
    """One execution of a sow, as the callback of [`eqx_sow.tap`][] gets it.

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
        boolean array with the axes of the lanes that says which of them ran. The value
        is zero for the others. Each branch that has the name is an event of its own.

    An event from a `jax.shard_map` has also `event.device`, a dict of mesh axis to the
    index of the device along it. Elsewhere that is `None`.

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

    # Not a field: there are five to unpack.
    @property
    def device(self) -> dict[Hashable, int] | None:
        return None


TapEvent.__module__ = "eqx_sow"


class _DeviceEvent(TapEvent):
    """An event that knows its device."""

    device: Any = None

    def __repr__(self):
        fields = ", ".join(f"{k}={v!r}" for k, v in self._asdict().items())
        return f"TapEvent({fields}, device={self.device!r})"


# What callbacks raised, until they are raised. JAX reports only the text of it.
failures: collections.deque[SowError] = collections.deque(maxlen=8)


@dc.dataclass(frozen=True)
class Delivery:
    """Calls the callback. `lanes` are the sizes of the leading axes, outermost first;
    `has` says which of them each operand has, of which the first tells what ran if
    `guarded`."""

    callback: Const | Same
    name: str
    mode: str
    where: str
    treedef: Const
    leaves: tuple[Any, ...]
    lanes: tuple[int, ...]
    has: tuple[tuple[bool, ...], ...]
    guarded: bool
    devices: tuple[Hashable, ...]
    ordered: bool

    def __call__(self, count: Any, *operands: Any) -> None:
        n = len(self.devices)
        event = self._event(int(count), operands[n:])
        if n:
            event = _DeviceEvent(*event)
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

    def _event(self, count: int, operands: Sequence[Any]) -> TapEvent:
        # Copies: what the callback keeps must not change when a buffer is used again.
        arrays = [np.array(x) for x in operands]
        axes = [i for i in range(len(self.lanes)) if any(h[i] for h in self.has)]
        lead = tuple(self.lanes[i] for i in axes)
        has = [tuple(h[i] for i in axes) for h in self.has]
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
        if isinstance(x, Summary):
            text = _of_summary(x)
        else:
            text = _shape(x) + _statistics(x)
        parts.append(f"{label}{text}")
    if event.ran is not None:
        parts.append(f"ran in {event.ran.sum()} of {event.ran.size} lanes")
    device: Any = event.device
    if device is not None:
        where = ", ".join(f"{axis}={i}" for axis, i in device.items())
        parts.append(f"on device {where}")
    return "  ".join(parts)


# Of a key there is only the shape.
_VALUES = np.ndarray, Summary, jax.ShapeDtypeStruct


def _shape(x: Any) -> str:
    return jax.core.ShapedArray(x.shape, x.dtype).str_short(short_dtypes=True)


def _statistics(x: Any) -> str:
    if not is_numeric(x):
        return ""
    is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
    x = (np.abs(x) if is_complex else x).astype(np.float64)
    finite = x[np.isfinite(x)]
    numbers = {}
    if finite.size:
        numbers = dict(
            mean=finite.mean(),
            std=finite.std(),
            min=finite.min(),
            max=finite.max(),
            norm=np.linalg.norm(finite),
        )
    return _text(numbers, np.sum(finite == 0), finite.size, x.size)


def _of_summary(s: Summary) -> str:
    """What the values would have. By NumPy, as the host must not call JAX here."""
    fields = s.size, s.not_finite, s.zeros, s.mean, s.std, s.rms, s.min, s.max
    x = np.stack([np.ravel(np.asarray(x, np.float64)) for x in fields])
    size, not_finite, zeros = map(round, x[:3].sum(1))
    all_, bad, _, mean, std, rms, least, most = x[:, x[0] > x[1]]
    n = all_ - bad
    numbers = {}
    if n.size:
        about = np.average(mean, weights=n)
        numbers = dict(
            mean=about,
            std=np.linalg.norm(np.sqrt(n / n.sum()) * [std, mean - about]),
            min=least.min(),
            max=most.max(),
            norm=np.linalg.norm(np.sqrt(n) * rms),
        )
    entries = f"{size} {'entry' if size == 1 else 'entries'}"
    return entries + _text(numbers, zeros, size - not_finite, size)


def _text(numbers: Mapping[str, Any], zeros: int, finite: int, size: int) -> str:
    text = "".join(f"  {k} {v:.3g}" for k, v in numbers.items())
    if finite:
        text += f"  zeros {zeros / finite:.0%}"
    if finite < size:
        text += f"  not finite {size - finite}/{size}"
    return text
