"""The option `transform`: applying a function of the user's to what is marked. And
`batched`, which `plant` takes, too."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast, NamedTuple, TypeVar

import equinox as eqx
import jax.numpy as jnp

from .. import _compat
from .._errors import calling, SowError
from .._frames import api_boundary
from .._mark.listening import listening
from .._mark.site import Site
from .._mark.static import Form, take_apart
from .axes import (
    aligned,
    as_operand,
    either,
    for_each_lane,
    results_vary,
    total_over,
    Varies,
    whole,
    with_known_names,
)


_Fn = TypeVar("_Fn", bound=Callable[..., Any])


class Batched(eqx.Module):
    """What `batched` returns. `transformed` knows it, and calls `fn` itself."""

    fn: Callable[..., Any]

    @api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "What `eqx_sow.batched(fn)` returns cannot be called: it is for "
            "`transform=`, alone or in a dict of names, and for a value of `plant`. To "
            "compute several things, put it around all: `batched(lambda x: {'norm': "
            "..., 'mean': ...})`."
        )


@api_boundary
def batched(fn: _Fn) -> _Fn:
    """Makes a function for `transform=` or `plant` that receives the whole batch.

    Without it, a function receives the value as the code at the mark sees it: for a
    model under `jax.vmap`, the value of one example.

    As a transform, `fn` returns one result for all. So a norm over the batch is one
    reduction, and no value of the size of the batch is kept. In [`eqx_sow.plant`][],
    `fn` returns the value of all lanes (examples). So it can change one head of an
    attention layer that maps over its heads.

    **Arguments:**

    - `fn`: a function of the value, in which arrays have a leading axis for each `vmap`
        that the value varies over, outermost first. Loops add no axis: each iteration
        is transformed separately. An array that is the same for all lanes has a single
        cotangent, the sum over the lanes, which has no axis for them.

    **Returns:**

    A function for `transform=` of [`eqx_sow.save_intermediates`][] and
    [`eqx_sow.tap`][], and for the values of [`eqx_sow.plant`][], where `fn` takes
    `(value, index)` under `with_index=True`.

    The result of a transform has no axes for the lanes. A planted function returns
    arrays of the shapes that it was given. If the program has a single array for all
    lanes, the planted entries must all be equal, which is checked while the program
    runs.

    The lanes are axes of the value here, so `fn` does not know the `axis_name` of their
    `vmap`. Reducers such as [`eqx_sow.Fold`][] combine its results, even if one batch
    is larger than another.

    A batch that is sharded over a mesh is reduced over its devices; in a
    `jax.shard_map`, each device sees its own part.

    An outer `vmap` adds an axis as usual: `batched` only sees `vmap`s inside
    `save_intermediates`. For one value of all examples, write
    `save_intermediates(jax.vmap(f), ...)`. In `tap`, where all lanes are one event,
    `fn` also sees the lanes of a `vmap` around the `tap`.

    **Raises:**

    `TypeError` if `fn` is not a function. [`eqx_sow.SowError`][], when it is used, if
    the mark is in a branch or a loop that only some lanes run, if `fn` uses the name of
    a vmapped axis, or if a `jax.vmap` is
    around a compiled `tap`, as in `jax.vmap(jax.jit(tap(f, ...)))`.

    !!! example

        ```python
        import equinox as eqx
        import eqx_sow
        import jax
        import jax.numpy as jnp

        model = eqx.nn.MLP(2, 1, 8, 2, key=jax.random.key(0))
        norms = eqx_sow.save_intermediates(
            jax.vmap(model),
            capture=eqx.nn.Linear,
            transform=eqx_sow.batched(jnp.linalg.norm),
        )
        _, intermediates = norms(jnp.ones((16, 2)))
        intermediates["layers/0"]["primal"].shape  # ()

        # Give each example what the next one has in the first layer:
        roll = eqx_sow.batched(lambda x: jnp.roll(x, -1, axis=0))
        rolled = eqx_sow.plant(jax.vmap(model), {"layers/0": roll}, capture=True)
        rolled(jnp.ones((16, 2))).shape  # (16, 1)
        ```
    """
    if not callable(fn):
        raise TypeError(
            f"`eqx_sow.batched(fn)` takes a function of the value, not {fn!r}. Write "
            "`eqx_sow.batched(jnp.linalg.norm)`."
        )
    with warnings.catch_warnings():
        # Equinox warns of functions that JAX transformed, as attributes.
        warnings.simplefilter("ignore")
        return cast(_Fn, Batched(fn))


class Value(NamedTuple):
    """A PyTree, taken apart. The arrays are aligned, and `varies` says over which
    axes."""

    form: Form
    arrays: Sequence[Any]
    varies: Sequence[Varies]


def transformed(
    fn: Callable,
    site: Site,
    value: Value,
    run_varies: Varies = (),
    option: str = "transform",
) -> Value:
    """What `fn` returns for a value as the code at the mark sees it, for each lane; or
    if `fn` is `batched`, for the value of all lanes at once. No `sow` in `fn` marks.
    `run_varies`: the axes along which only some lanes run the mark."""
    what = f"function that you passed as `{option}`"
    if isinstance(fn, Batched):
        with calling_at(what, site, fn) as watched, listening(None):
            return _of_all_lanes(watched(fn.fn), site, value)
    # No `when` is `batched`.
    is_transform = option == "transform"
    at_mark = (
        calling_at(what, site, fn)
        if is_transform
        else calling(what, site, "", _NOT_ALL_RUN)
    )
    with at_mark as watched, listening(None):
        axes = with_known_names(site.axes, run_varies)
        return _of_each_lane(watched(fn), site._replace(axes=axes), value)


# Why a function does not know the name of a vmap.
_AT_ONCE = (
    "The function sees all lanes of that `jax.vmap` at once, as a leading axis of the "
    "value: reduce that axis, as in `x.max(axis=0)`. Or leave `batched` out: a "
    "function that sees one lane knows the name."
)
_NOT_ALL_RUN = (
    "The mark is in a branch or a loop that only some lanes of that `jax.vmap` run: "
    "there is no value of all lanes. Mark a value outside of it."
)


def calling_at(what: str, site: Site, fn: Callable, hint: str = "") -> Any:
    """`calling`, for a function that may be `batched`."""
    if isinstance(fn, Batched):
        return calling(what, site, hint, _AT_ONCE)
    return calling(what, site, _of_one_lane(site) + hint, _NOT_ALL_RUN)


def _of_one_lane(site: Site) -> str:
    """For `calling`: says that a function does not see the batch, where that is so."""
    if not any(
        v and a.lane for varies in site.varies for a, v in zip(site.axes, varies)
    ):
        return ""
    return (
        ", the value of one lane of the `jax.vmap` around (one example of the batch). "
        "To pass all lanes to the function at once, write `batched(fn)`"
    )


def _of_each_lane(fn: Callable, site: Site, value: Value) -> Value:
    form: Any = None

    def apply(*arrays):
        nonlocal form
        new, form = take_apart(fn(value.form.with_arrays(arrays)))
        return list(map(jnp.asarray, new))

    axes = site.axes
    every = either((False,) * len(axes), *value.varies)
    operands = list(map(as_operand, value.arrays, value.varies))
    varies = None
    # In `grad(vmap(f))`, the cotangent of `w` in a value `(x, w)` is the total of all
    # lanes, if these share it. So its norm is one number, and not one for each lane.
    totals = any(total_over(site)) and any(v != every for v in value.varies)
    if totals or any(a.name is not None for a in axes):
        varies = results_vary(apply, axes, value.varies, operands)
    arrays = for_each_lane(apply, axes, value.varies, varies)(*operands)
    varies = varies or [every] * len(arrays)
    return Value(form, list(map(aligned, arrays, varies)), varies)


def keeping_lanes(fn: Callable, site: Site) -> Callable:
    """A function of the value as the code at the mark sees it, as a function of
    operands. Its results must vary over the lanes that the operands vary over."""
    n = len(site.guards)
    guards, varies = site.varies[:n], site.varies[n:]

    def checked(k, fn):
        def call(*values):
            new = fn(*values)
            if any(not v[k] and _compat.has_lanes([x]) for x, v in zip(new, varies)):
                raise SowError(
                    f"`plant`: at {site.said} the program has one value for all lanes "
                    "of a `jax.vmap`, but the function that you planted returned one "
                    "for each. Return what is the same for all lanes: with `batched`, "
                    "or an `axis_name`, the function can reduce over them."
                )
            return new

        return call

    axes = with_known_names(site.axes, either(*guards) if guards else ())
    return for_each_lane(fn, axes, varies, varies, checked)


def _of_all_lanes(fn: Callable, site: Site, value: Value) -> Value:
    check_all_lanes(
        site,
        "transform=batched(...)",
        "Leave `batched` out for this name, and reduce what comes back where its "
        "`count` is not zero.",
    )
    none = (False,) * len(site.axes)
    site = site._replace(form=value.form, varies=tuple(value.varies))
    new, form = take_apart(fn(whole(site, value.arrays)))
    arrays = [aligned(jnp.asarray(x), none) for x in new]
    return Value(form, arrays, [none] * len(new))


def check_all_lanes(site: Site, option: str, remedy: str) -> None:
    """Raises if only some lanes run a mark."""
    if site.guards:
        raise SowError(
            f"`{option}`: {site.said} is in a branch or a loop that only some lanes of "
            f"a `jax.vmap` run: there is no value of all lanes. {remedy}"
        )
