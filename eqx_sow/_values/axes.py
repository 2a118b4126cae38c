"""The leading axes of captured arrays, which vmaps, loops and devices gave them.

An operand of a mark has only the axes that it varies over. `Site.varies` says for each
which of `Site.axes` these are: a tuple of booleans. Of a value `(c, y)` in a vmap of 5
lanes and one of 2 lanes within it, where `c` varies over the outer lanes and `y` over
the inner ones,

| | `varies` | operand | `aligned` | `broadcast` to both axes |
|---|---|---|---|---|
| `c` | `(True, False)` | `f32[5]` | `f32[5,1]` | `f32[5,2]` |
| `y` | `(False, True)` | `f32[2]` | `f32[1,2]` | `f32[5,2]` |

In an `Entry` all arrays are aligned: axis `k` of the site is axis `k` of each array.

In the program these axes may stand anywhere in an operand: see `Site.permutations`. Who
reads operands calls `in_front` first. From there on they are in front, as in the table.
"""

import itertools as it
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .. import _compat
from .._arrays import broadcast_to
from .._mark.site import Axis, Site


Varies = Sequence[bool]


def either(*varies: Varies) -> tuple[bool, ...]:
    """The axes that at least one of several operands varies over."""
    return tuple(map(any, zip(*varies)))


def aligned(x: Any, varies: Varies) -> Any:
    """An operand, with an axis of size one wherever it has none."""
    if all(varies):
        return x
    return x[tuple(slice(None) if v else None for v in varies)]


def as_operand(x: Any, varies: Varies) -> Any:
    """An aligned array, without the axes that it does not vary over."""
    gone = tuple(k for k, v in enumerate(varies) if not v)
    return x.squeeze(gone) if gone else x


def broadcast(x: Any, varies: Varies, axes: Sequence[Axis]) -> Any:
    """An aligned array, repeated along those of these axes that it shall vary over."""
    n = len(axes)
    lead = [a.size if v else k for a, v, k in zip(axes, varies, x.shape)]
    if lead == list(x.shape[:n]):
        return x
    specs = [a.spec if v else None for a, v in zip(axes, varies)]
    return broadcast_to(x, (*lead, *x.shape[n:]), specs)


def with_known_names(axes: Sequence[Axis], run_varies: Varies) -> tuple[Axis, ...]:
    """The axes, without the names of those along which only some lanes run a mark:
    there is no value of all lanes for `lax.pmax` to see. An empty `run_varies` says
    that all run."""
    none = (False,) * len(axes)
    pairs = zip(axes, run_varies or none)
    return tuple(a._replace(name=None) if v else a for a, v in pairs)


def for_each_lane(
    fn: Callable,
    axes: Sequence[Axis],
    varies: Sequence[Varies],
    out_varies: Sequence[Varies] | None = None,
    within: Callable[[int, Callable], Callable] = lambda k, fn: fn,
) -> Callable:
    """A function of values as the code at the mark sees them, as a function of
    operands. It may use the names of the vmaps, as the code at the mark may.

    `out_varies` is for its results; without it they vary over all axes that are mapped:
    those that any operand varies over, and those that have a name. `within` is called
    with the function inside each of these."""
    for k, axis in reversed([*enumerate(axes)]):
        if axis.name is not None or any(v[k] for v in varies):
            fn = jax.vmap(
                within(k, fn),
                in_axes=tuple(0 if v[k] else None for v in varies),
                out_axes=0
                if out_varies is None
                else [0 if v[k] else None for v in out_varies],
                axis_size=axis.size,
                axis_name=axis.name,
                spmd_axis_name=axis.spmd_name,
            )
    return fn


def results_vary(
    fn: Callable,
    axes: Sequence[Axis],
    varies: Sequence[Varies],
    operands: Sequence[Any],
) -> list[Varies]:
    """The axes that each result of such a function varies over. For `x` in a vmap that
    is called `"batch"`, `lax.pmax(x, "batch")` varies over none, and
    `lax.axis_index("batch")` does, even if `x` does not."""
    found: dict[int, list[bool]] = {}

    def noting(k, fn):
        def call(*xs):
            outs = fn(*xs)
            found[k] = [_compat.has_lanes([x]) for x in outs]
            return outs

        return call

    of_lanes = for_each_lane(fn, axes, varies, within=noting)
    none = [False] * len(jax.eval_shape(of_lanes, *operands))
    return [*zip(*[found.get(k, none) for k in range(len(axes))])]


def kept_axes(site: Site) -> tuple[bool, ...]:
    """Which axes there are in what comes back: all but the vmaps that no array of the
    value varies over."""
    some = either((False,) * len(site.axes), *site.varies)
    return tuple(v or not a.lane for a, v in zip(site.axes, some))


def total_over(site: Site) -> list[bool]:
    """Over which axes an array that is the same all along them is a total. In
    `grad(vmap(f))` that is the cotangent of a leaf that all lanes share: it would be
    wrong in each of them. In `vmap(grad(f))` it is really the same in each. The
    cotangent of a total is that, too. Over the devices of a `shard_map`, the cotangent
    of a leaf that all share is always a total."""
    back = site.flows_backward
    return [
        a.flows_backward != back if a.lane else a.mesh is not None and back
        for a in site.axes
    ]


def final_axes(site: Site) -> list[tuple[bool, ...]]:
    """Which axes each array of the value has in what comes back: all that are kept, but
    not those over which it is a total."""
    kept = kept_axes(site)
    total = total_over(site)
    return [
        tuple(k and (v or not t) for k, v, t in zip(kept, varies, total))
        for varies in site.varies[: site.form.n_operands]
    ]


def whole(site: Site, arrays: Sequence[Any], *more: int) -> Any:
    """The value with all of its axes, from aligned arrays: what is the same in all
    lanes is repeated for each. `more` are the sizes of axes that stand between those of
    the site and those of the value."""
    final = final_axes(site)
    arrays = [as_operand(broadcast(x, v, site.axes), v) for x, v in zip(arrays, final)]
    lead = it.compress([a.size for a in site.axes], kept_axes(site))
    return site.form.with_arrays(arrays, [*lead, *more])
