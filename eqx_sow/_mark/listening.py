"""Whether sows are marked now, and what is around the code that is being traced."""

import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.core


class Capture(NamedTuple):
    """The calls that a transformation wants a note of, from its options `capture`,
    `methods`, `inputs` and `scope`."""

    # How many transformations there are around the program, this one included.
    depth: int
    tag: Hashable
    methods: tuple[str, ...] = ()
    # Of modules of these classes, or of all, of which a predicate will choose (`None`).
    classes: tuple[type, ...] | None = None
    functions: tuple[Any, ...] = ()
    inputs: bool = False
    scope: bool = False


class Listening(NamedTuple):
    """What sows have to know of the transformations that trace the program."""

    # How many loops are around whatever is being vmapped right now.
    loops: int = 0
    # The user's scopes, as `"outer/inner"`.
    scope: str = ""
    # If it is not `None`, a sow does nothing but tell it of its `Site`.
    found: Callable[[Any], None] | None = None
    # The calls of modules to take note of, for all the transformations.
    captures: tuple[Capture, ...] = ()
    # How many transformations there are, one within the other.
    depth: int = 0
    # Whether JAX makes the tangents of a `jax.checkpoint` that it will transpose.
    backward: bool = False
    # Whether, of a value, only those leaves are differentiated that the program itself
    # differentiates, instead of all. This is a second try, after an error of JAX's.
    leafwise: bool = False
    # Whether JAX moves something out of a scan, see `_walk/jax_rules.py`.
    moving: bool = False


# Not `None` while a program is traced in order to see or change its sows. It is
# part of the key of every cache of JAX's, so a jitted function is traced once for each
# value.
listening = jax.make_user_context(None)


# One thread at a time traces: as long as it does, methods of modules take note of their
# calls, and other threads have the same methods.
tracing = threading.RLock()


class Around(NamedTuple):
    """What is between a vmap and the equation that it batches now: how many loops, and
    which conds and loops that run for some lanes only, as `Site.guards` has them."""

    loops: int = 0
    conds: tuple[Any, ...] = ()


def around(axis_data: Any) -> Around:
    # Some rules of JAX's, as that of `shard_map`, make other axis data.
    here = listening.value or Listening()
    return getattr(axis_data, "around", Around(here.loops))
