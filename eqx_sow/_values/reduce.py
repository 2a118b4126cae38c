"""How several executions of one name become one value."""

import dataclasses as dc
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._errors import calling, SowError
from .._mark.site import Axis, Site
from .._mark.static import rebuild
from . import entry as _entry, merge as _merge
from .entry import Entry


class Reducer(eqx.Module):
    """For `save_intermediates(..., reduce=...)`."""

    def _finish(self, acc: Any, count: Any) -> Any:
        del count
        return acc


class Append(Reducer):
    """All places: a tuple with one entry for each place in the straight-line code at
    which the name is sown, in order of execution. A place in a loop is stacked.

    Cotangents, which are computed backward, are in the same order: the first entry is
    that of the first place, or `None` if that has none.

    !!! example

        ```python
        import eqx_sow
        import jax.numpy as jnp

        def f(x):
            return eqx_sow.sow(eqx_sow.sow(jnp.sin(x), "x") * 2, "x")

        saved = eqx_sow.save_intermediates(f, reduce={"x": eqx_sow.Append()})
        _, intermediates = saved(jnp.ones(3))
        first, second = intermediates["x"]["primal"]  # both of shape (3,)
        ```
    """


class Last(Reducer):
    """The last execution, in order of execution.

    A reversed scan runs from its end, and so does the backward pass of a scan: there
    the last cotangent is that of the first iteration.

    !!! example

        ```python
        import eqx_sow
        import jax
        import jax.numpy as jnp

        def f(x):
            return jax.lax.fori_loop(0, 10, lambda i, x: eqx_sow.sow(x + i, "x"), x)

        saved = eqx_sow.save_intermediates(f, reduce={"x": eqx_sow.Last()})
        out, intermediates = saved(jnp.ones(3))
        intermediates["x"]["primal"]  # of shape (3,): the same as `out`
        ```
    """

    def _init(self, values, build):
        del build
        return [jnp.zeros_like(x) for x in values]

    def _step(self, acc, count, values, build):
        del acc, count, build
        return values


def _as_dtype_of(x: Any, y: Any) -> Any:
    y = jnp.asarray(y)
    # Keys have no other dtype to go to.
    return y if y.dtype == x.dtype else y.astype(x.dtype)


class Fold(Reducer):
    """`acc = fn(acc, value)` over all executions in order, loops included, in memory
    that does not grow with the number of iterations.

    Under `vmap` every lane folds for itself.

    !!! example

        ```python
        import eqx_sow
        import jax
        import jax.numpy as jnp

        def f(x):
            def body(i, x):
                return eqx_sow.sow(jnp.cos(x), "x")
            return jax.lax.fori_loop(0, 10, body, x)

        largest = eqx_sow.Fold(-jnp.inf, lambda acc, x: jnp.maximum(acc, x.max()))
        _, intermediates = eqx_sow.save_intermediates(f, reduce=largest)(jnp.ones(3))
        intermediates["x"]["primal"].shape  # ()
        ```
    """

    initial: Any
    fn: Callable[[Any, Any], Any]

    def __init__(self, init: Any, fn: Callable[[Any, Any], Any]):
        """**Arguments:**

        - `init`: the first `acc`, any PyTree of arrays; or a function of no arguments
            that returns it.
        - `fn`: a function `(acc, value) -> acc`. Shapes must stay as they are; the
            dtype of `init` becomes that of the result.

        **Raises:**

        [`eqx_sow.SowError`][], when it is used, if `fn` changes a shape or the
        structure.
        """
        self.initial = init
        self.fn = fn

    def _init(self, values, build):
        init = self.initial() if callable(self.initial) else self.initial
        init = jtu.tree_map(jnp.asarray, init)
        new = jax.eval_shape(lambda *xs: self.fn(init, build(xs)), *values)
        if jtu.tree_structure(new) != jtu.tree_structure(init) or any(
            a.shape != b.shape
            for a, b in zip(jtu.tree_leaves(new), jtu.tree_leaves(init))
        ):
            raise SowError(
                "`eqx_sow.Fold(init, fn)`: `fn` must return what `acc` looks like. "
                f"`acc` is {jax.eval_shape(lambda: init)}, and `fn` returned {new}."
            )
        return jtu.tree_map(_as_dtype_of, new, init)

    def _step(self, acc, count, values, build):
        del count
        new = self.fn(acc, build(values))
        return jtu.tree_map(_as_dtype_of, acc, new)


class Buffer(Reducer):
    """The first or the last executions, on a leading axis, oldest first.

    The answer for a `while_loop`, whose number of iterations is not known. What comes
    back has a `"count"` too: how many executions there were. If there were fewer than
    `size`, zeros fill the end. A backward pass runs backward: cotangents are in the
    order opposite to that of the primals, `cotangent[:count][::-1]` in the same.

    !!! example

        ```python
        import eqx_sow
        import jax
        import jax.numpy as jnp

        def f(x):
            return jax.lax.while_loop(
                lambda x: x.sum() < 100, lambda x: eqx_sow.sow(2 * x, "x"), x
            )

        saved = eqx_sow.save_intermediates(f, reduce={"x": eqx_sow.Buffer(4)})
        _, intermediates = saved(jnp.ones(3))
        intermediates["x"]["primal"].shape  # (4, 3)
        intermediates["x"]["count"]  # 6
        ```
    """

    size: int = eqx.field(static=True)
    keep: Literal["first", "last"] = eqx.field(static=True)

    def __init__(self, size: int, keep: Literal["first", "last"] = "last"):
        """**Arguments:**

        - `size`: how many executions to keep: the length of the leading axis.
        - `keep`: which of them, if there are more.

        **Raises:**

        `ValueError` if `size` is no positive integer, or `keep` is anything else.
        """
        if isinstance(size, bool) or not hasattr(size, "__index__") or size < 1:
            raise ValueError(
                f"`eqx_sow.Buffer(size)` takes a positive integer, not {size!r}."
            )
        if keep not in ("first", "last"):
            raise ValueError(
                '`eqx_sow.Buffer(size, keep)`: `keep` is "first" or "last", not '
                f"{keep!r}."
            )
        self.size = operator.index(size)
        self.keep = keep

    def _init(self, values, build):
        del build
        return [jnp.zeros_like(x, shape=(self.size, *x.shape)) for x in values]

    def _step(self, acc, count, values, build):
        del build
        at = count % self.size if self.keep == "last" else count
        # An index past the end is dropped: that is `keep="first"`.
        return [a.at[at].set(x, mode="drop") for a, x in zip(acc, values)]

    def _finish(self, acc, count):
        if self.keep == "first":
            return acc
        shift = jnp.where(count > self.size, -(count % self.size), 0)
        return [jnp.roll(a, shift, axis=0) for a in acc]


def folds(reducer: Reducer | None) -> bool:
    """Whether a reducer has a state that goes through loops."""
    return not (reducer is None or isinstance(reducer, Append))


@jtu.register_dataclass
@dc.dataclass(frozen=True)
class Reduction:
    """The state of a reducer for one name and mode.

    The arrays of `acc` and `count` have a leading axis for each of `lanes`. `places` is
    how many sows of the name there are in the program.
    """

    acc: Any
    count: Any
    site: Site = dc.field(metadata=dict(static=True))
    lanes: tuple[Axis, ...] = dc.field(metadata=dict(static=True))
    places: int = dc.field(metadata=dict(static=True))
    conditional: bool = dc.field(metadata=dict(static=True))


def start(reducer: Any, entries: Sequence[Entry]) -> Reduction:
    """The state before the first execution. `entries` is what would be captured at each
    place without the reducer."""
    entries = [_shapes_of_one(e) for e in entries]
    form = entries[0] if len(entries) == 1 else _merge.unify(entries)
    lanes = form.site.axes
    values = [
        jnp.zeros_like(x, shape=form.core_shape(i))
        for i, x in enumerate(form.arrays[: len(form.arrays) - form.counted])
    ]
    with calling("reducer", form.site):
        acc = reducer._init(values, _build(form.site))
    sizes = tuple(a.size for a in lanes)
    acc = jtu.tree_map(lambda x: jnp.broadcast_to(x, (*sizes, *x.shape)), acc)
    count = jnp.zeros(sizes, jnp.int32)
    conditional = any(e.counted for e in entries)
    return Reduction(acc, count, form.site, lanes, len(entries), conditional)


def step(reducer: Any, state: Reduction, entry: Entry) -> Reduction:
    """The state after one more execution."""
    site, counted = entry.site, entry.counted
    loops = [a.size for a in site.axes if not a.lane]
    if loops and state.places > 1:
        raise SowError(
            f"`{site.name}` is sown in {state.places} places, and its value at "
            f"{site.where} is the same in each iteration of a loop, so JAX moved it "
            "out of the loop: the order of the executions is lost. Give that sow a "
            "name of its own."
        )
    entry = _entry.with_count(_lanes_only(entry))
    has = [_merge.placed(entry, state.lanes, i) for i in range(len(entry.arrays))]

    def one(acc, count, *arrays):
        *values, run = arrays
        new = reducer._step(acc, count, values, _build(site))
        if not counted:
            return new, count + 1
        new = jtu.tree_map(lambda x, y: jnp.where(run > 0, x, y), new, acc)
        return new, count + run

    every = (True,) * len(state.lanes)
    one = _entry.for_each_lane(one, state.lanes, [every, every, *has])
    acc, count = state.acc, state.count
    if loops:
        acc, count = jax.lax.fori_loop(
            0, math.prod(loops), lambda _, c: one(*c, *entry.arrays), (acc, count)
        )
    else:
        acc, count = one(acc, count, *entry.arrays)
    return dc.replace(state, acc=acc, count=count)


def finish(reducer: Any, state: Reduction) -> tuple[Any, Any]:
    """The value and the count. Arrays have the axes of the lanes first."""
    every = (True,) * len(state.lanes)
    finish = _entry.for_each_lane(reducer._finish, state.lanes, [every, every])
    acc = finish(state.acc, state.count)
    varies = [any(a.has) for a in state.lanes]
    one_of_same = tuple(slice(None) if v else 0 for v in varies)
    acc, count = jtu.tree_map(lambda x: x[one_of_same], (acc, state.count))
    if isinstance(reducer, Fold):
        return acc, count
    lead = [a.size for a, v in zip(state.lanes, varies) if v]
    if isinstance(reducer, Buffer):
        lead.append(reducer.size)
    return rebuild(state.site.treedef, state.site.leaves, acc, lead), count


def _build(site: Site) -> Callable[[Any], Any]:
    return lambda values: rebuild(site.treedef, site.leaves, values)


def _lanes_only(entry: Entry) -> Entry:
    """The entry of a single execution. A sow that was moved out of its loop has an axis
    for the loop, but none in its arrays."""
    lanes = [a._replace(loops=0) for a in entry.site.axes if a.lane]
    return entry.replace(entry.arrays, lanes)


def _shapes_of_one(entry: Entry) -> Entry:
    """The same as shapes, from an entry that has axes for loops."""
    arrays = []
    for i, x in enumerate(entry.arrays):
        has = [a.lane for a, h in zip(entry.site.axes, entry.site.has(i)) if h]
        lanes = [n for n, lane in zip(x.shape, has) if lane]
        arrays.append(jax.ShapeDtypeStruct((*lanes, *entry.core_shape(i)), x.dtype))
    return _lanes_only(dc.replace(entry, arrays=tuple(arrays)))
