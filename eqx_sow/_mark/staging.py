"""Functions as jaxprs, and the types of what they return."""

import functools as ft
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax

from .. import _compat


# Another thread might find in JAX's cache what this one has just made, whose treedef is
# not known yet.
_making = threading.RLock()


def to_jaxpr(fn: Callable) -> Callable[..., tuple[Any, Any]]:
    """`jax.make_jaxpr`, which also returns the treedef of what `fn` returns. JAX is not
    told of treedefs: version 0.10 looks for one among all that are alike but for what
    is static in them, one by one."""

    @ft.cache
    def flat(inputs):
        treedefs: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        new = []

        def run(*leaves):
            leaves, treedef = jax.tree.flatten(fn(*jax.tree.unflatten(inputs, leaves)))
            new.append(treedef)
            return leaves

        # `jax.make_jaxpr` makes a jitted function in each call. JAX then takes thirty
        # times as long to find the jaxpr.
        jitted, make = jax.jit(run), jax.make_jaxpr(run)

        def call(leaves):
            with _making:
                closed = jitted.trace(*leaves).jaxpr
                jaxpr, _ = _compat.open_jaxpr(closed)
                if new:
                    treedefs[jaxpr] = new[-1]
                if len(closed.in_avals) > len(leaves):
                    # Its constants are among the inputs. This is a new jaxpr each time.
                    closed = make(*leaves)
                new.clear()
                return closed, treedefs[jaxpr]

        return call

    def to_jaxpr_of_fn(*args):
        leaves, inputs = jax.tree.flatten(args)
        return flat(inputs)(leaves)

    return to_jaxpr_of_fn


def types_of(fn: Callable, *args):
    """What `jax.eval_shape` returns, as types. A `ShapeDtypeStruct` knows nothing of a
    mesh without explicit axes, so JAX refuses one from inside a `jax.shard_map`."""
    closed, treedef = to_jaxpr(fn)(*args)
    return jax.tree.unflatten(treedef, closed.out_avals)
