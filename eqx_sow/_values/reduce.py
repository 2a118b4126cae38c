"""Reducers: how several executions of one name become one value."""

import functools as ft
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._arrays import as_integer, broadcast_to, onto, sharding_with, spec_of
from .._errors import SowError
from .._frames import api_boundary
from .._mark.site import Site
from .._mark.static import same


class Execution(NamedTuple):
    """One execution of a mark, in one lane. `values` are the array leaves of the value
    as the code at the mark sees it, of any dtype except float0, and maybe keys; `site`
    says what the others are. `count` is how many executions there were before.
    `iteration` says which one of each scan around this is, from outside in, for a
    reducer that `needs_iteration`."""

    site: Site
    values: Sequence[Any]
    count: Any
    iteration: tuple[Any, ...] = ()


class Reducer(eqx.Module):
    """For `save_intermediates(..., reduce=...)`.

    A reducer says how a state, `acc`, goes through the executions of a mark. `acc` is a
    PyTree of arrays whose shapes and dtypes stay as they are. This one keeps the last
    of every two iterations of the innermost scan:

        class LastOfTwo(Last):
            needs_iteration = True

            def step(self, acc, x):
                keep = x.iteration[-1] % 2 == 1
                return [jnp.where(keep, v, a) for a, v in zip(acc, x.values)]
    """

    # Whether it has a state at all. If not, each place in straight-line code keeps an
    # entry of its own.
    has_state: ClassVar[bool] = True
    # Whether what `finish` returns has one array for each of `values`, so that the
    # PyTree of the value is also that of the result.
    keeps_structure: ClassVar[bool] = True
    # Whether the count of executions is part of the result.
    counts: ClassVar[bool] = False
    # Whether a name with one execution comes back as it would without a reducer.
    bare_if_one: ClassVar[bool] = False
    # Whether `step` reads `Execution.iteration`.
    needs_iteration: ClassVar[bool] = False

    @property
    def lead(self) -> tuple[int, ...]:
        """The axes that the arrays in the result have before those of the value."""
        return ()

    def start(self, site: Site, values: Sequence[Any]) -> Any:
        """`acc` before the first execution, given zeros for the values."""
        del site
        lead = self.lead
        return [broadcast_to(x, (*lead, *x.shape), [None] * len(lead)) for x in values]

    def step(self, acc: Any, x: Execution) -> Any:
        """`acc` after one more execution."""
        raise NotImplementedError

    def finish(self, acc: Any, count: Any) -> Any:
        """The result, after the last execution."""
        del count
        return acc


class Append(Reducer):
    """Returns a tuple with one entry for each place in straight-line code that the name
    marks, in order of execution. The entry of a place in a loop is stacked. For
    captured modules and functions that run several times this is the default.

    Cotangents are in the same order: the first entry belongs to the first place, and is
    `None` if that has no cotangent. Further cotangents of the same value come last, and
    so do cotangents of marks that never ran forward, as in `jax.linear_transpose`.

    Each entry has the shape and dtype that it would have without a reducer. If an entry
    has a `"count"`, that is a tuple, too.

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

    has_state = False


class IfSeveral(Append):
    """What a captured name has that may run several times, if no other reducer is
    given: a tuple where it does, and the value alone where it runs once."""

    bare_if_one = True


class Last(Reducer):
    """Keeps only the last execution.

    The backward pass of a scan runs from its end, so `Last` of a cotangent gives
    iteration 0.

    The shape and dtype are as at the mark, with leading axes for `vmap`s and for the
    layers of a stack, and none for other loops. If the mark never ran, the value is
    zeros.

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

    def step(self, acc, x):
        del acc
        return x.values


def _as_dtype_of(x: Any, y: Any) -> Any:
    y = jnp.asarray(y)
    # Keys have no other dtype to go to.
    return y if y.dtype == x.dtype else y.astype(x.dtype)


def _is_function(init: Any) -> bool:
    # A PyTree that can be called, such as a model, is a value all the same.
    return callable(init) and jtu.all_leaves([init])


def _takes_value(init: Callable) -> bool:
    """Whether an `init` is called with zeros like the value: if it cannot be called
    with nothing. `jnp.zeros_like` takes an array, and `Summary.empty` has a default for
    all that it takes. What has no signature, such as some classes of C, is called with
    nothing."""
    try:
        signature = inspect.signature(init)
    except (TypeError, ValueError):
        return False
    for args in [(), (None,)]:
        try:
            signature.bind(*args)
        except TypeError:
            continue
        return bool(args)
    raise TypeError(
        "`eqx_sow.Fold(init, fn)`: `init` is a value, or a function of no arguments, "
        f"or of one, which gets zeros like the value. {init!r} takes {signature}. "
        "Write `eqx_sow.Fold(jnp.zeros_like, fn)`."
    )


class Fold(Reducer):
    """Accumulates `acc = fn(acc, value)` over all executions in order, loops included,
    in memory that does not grow with the number of iterations.

    Under `vmap` each lane (each example) has its own result, along a leading axis, and
    so has each layer of a stack. If the mark never ran, the result is `init`. A `sow`
    inside `fn` is not captured.

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

    keeps_structure = False

    init: Any
    fn: Callable[[Any, Any], Any]

    @api_boundary
    def __init__(self, init: Any, fn: Callable[[Any, Any], Any]):
        """**Arguments:**

        - `init`: the first `acc`, any PyTree of arrays; or a function that returns it:
            of no arguments, or of one, which gets zeros like the value. With
            `Fold(jnp.zeros_like, jnp.maximum)`, the values of different names may have
            different shapes.
        - `fn`: a function `(acc, value) -> acc` of the value as the code at the mark
            sees it. It must keep the structure and the shapes of `acc`. `init` is
            converted to the dtypes that `fn` returns.

        **Raises:**

        `TypeError` if `fn` is not a function, or `init` is one that needs more
        arguments. [`eqx_sow.SowError`][], when it is used, if `fn` changes a shape or
        the structure.
        """
        if not callable(fn):
            raise TypeError(
                f"`eqx_sow.Fold(init, fn)` takes a function `(acc, value) -> acc`, not "
                f"{fn!r}. Write `eqx_sow.Fold(0.0, lambda acc, x: acc + x.sum())`."
            )
        if _is_function(init):
            _takes_value(init)
        self.init = init
        self.fn = fn

    def start(self, site, values):
        init = self.init
        if _is_function(init):
            value = [site.form.with_arrays(values)] if _takes_value(init) else []
            init = init(*value)
        mesh = jax.sharding.get_abstract_mesh()
        first = jtu.tree_map(lambda x: onto(jnp.asarray(x), mesh, ()), init)
        leaves, structure = jtu.tree_flatten(first)
        returned: Any = None

        def apply(*xs):
            # JAX is not told of the structure, which it would compare with others.
            nonlocal returned
            new, returned = jtu.tree_flatten(self.fn(first, site.form.with_arrays(xs)))
            return new

        new = jax.eval_shape(apply, *values)
        shapes = lambda xs: list(map(jnp.shape, xs))
        if not same(returned, structure) or shapes(new) != shapes(leaves):
            new = jtu.tree_unflatten(returned, new)
            show = ft.partial(eqx.tree_pformat, struct_as_array=True)
            raise SowError(
                f"`eqx_sow.Fold(init, fn)` for {site.said}: `fn` must keep the "
                f"structure and the shapes of `acc`. `acc` is {show(first)}, and `fn` "
                f"returned {show(new)}. Reduce the value, `lambda acc, x: acc + "
                "x.sum()`, or pass an `init` like the result."
            )
        return jtu.tree_unflatten(structure, map(_as_dtype_of, new, leaves))

    def step(self, acc, x):
        new = self.fn(acc, x.site.form.with_arrays(x.values))
        leaves, structure = jtu.tree_flatten(acc)
        new = map(_as_dtype_of, leaves, jtu.tree_leaves(new))
        return jtu.tree_unflatten(structure, new)


class Buffer(Reducer):
    """Keeps the first or the last `size` executions, on a leading axis, oldest first.

    Use it for a `while_loop`, whose number of iterations is not known. For a value of
    shape `shape` at the mark, the result has the shape `(size, *shape)`, after leading
    axes for `vmap`s and for the layers of a stack, and the dtype of the value. It comes
    with a `"count"`, an int32: how many executions there were. If there were fewer than
    `size`, the rest is zeros. The backward pass runs backward, so
    `cotangent[:count][::-1]` is in the order of the primals. If each value is followed
    by its derivative, as in a `while_loop` that takes a gradient in some of its
    iterations, the two are in one order, with zeros for values that have none. In any
    other order they are an error.

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

    counts = True

    size: int = eqx.field(static=True)
    keep: Literal["first", "last"] = eqx.field(static=True)

    @api_boundary
    def __init__(self, size: int, keep: Literal["first", "last"] = "last"):
        """**Arguments:**

        - `size`: how many executions to keep: the length of the leading axis.
        - `keep`: which ones to keep if there are more, the first or the last.

        **Raises:**

        `ValueError` if `size` is not a positive integer, or `keep` is another string.
        """
        length = as_integer(size)
        if length is None or length < 1:
            raise ValueError(
                f"`eqx_sow.Buffer(size)` takes a positive integer, not {size!r}. It is "
                "the length of an axis: it cannot be traced."
            )
        if keep not in ("first", "last"):
            raise ValueError(
                '`eqx_sow.Buffer(size, keep)`: `keep` is "first" or "last", not '
                f"{keep!r}."
            )
        self.size = length
        self.keep = keep

    @property
    def lead(self):
        return (self.size,)

    def step(self, acc, x):
        at = x.count % self.size if self.keep == "last" else x.count
        # An index past the end is dropped: that is `keep="first"`.
        return [
            a.at[at].set(v, mode="drop", out_sharding=sharding_with(a, spec_of(a)))
            for a, v in zip(acc, x.values)
        ]

    def finish(self, acc, count):
        if self.keep == "first":
            return acc
        shift = jnp.where(count > self.size, -(count % self.size), 0)
        return [jnp.roll(a, shift, axis=0) for a in acc]


Reducers = Callable[[str], Any]
