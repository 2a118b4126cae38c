"""Functions as jaxprs, and the types of what they return."""

import functools as ft
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax

from . import _compat


# The treedef of what was traced last, in this thread.
_here = threading.local()


def to_jaxpr(fn: Callable) -> Callable[..., tuple[Any, Any]]:
    """`jax.make_jaxpr`, which also returns the treedef of what `fn` returns. JAX is not
    told of treedefs: version 0.10 looks for one among all that are alike but for what
    is static in them, one by one."""

    @ft.cache
    def flat(inputs):
        treedefs: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

        def run(*leaves):
            outs = fn(*jax.tree.unflatten(inputs, leaves))
            leaves, _here.treedef = jax.tree.flatten(outs)
            return leaves

        # `jax.make_jaxpr` makes a jitted function in each call. JAX then takes thirty
        # times as long to find the jaxpr.
        jitted, make = jax.jit(run), jax.make_jaxpr(run)

        # Nothing is locked in here: what is traced calls functions of the user's, such
        # as a `transform`, which may wait for another thread.
        def call(leaves):
            _here.treedef = None
            closed = jitted.trace(*leaves).jaxpr
            jaxpr, _ = _compat.open_jaxpr(closed)
            if _here.treedef is None and jaxpr not in treedefs:
                # Another thread has just made it, and not come to the next line.
                jax.make_jaxpr(lambda *leaves: run(*leaves))(*leaves)
            if _here.treedef is not None:
                treedefs[jaxpr] = _here.treedef
            if len(closed.in_avals) > len(leaves):
                # Its constants are among the inputs. This is a new jaxpr each time.
                closed = make(*leaves)
            # It holds what is static in the values.
            _here.treedef = None
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
