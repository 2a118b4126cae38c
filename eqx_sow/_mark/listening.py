"""Whether sows are marked now, and what surrounds a vmap."""

import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.core


class Capture(NamedTuple):
    """Calls of which a transformation wants a note: those of these methods, of modules
    of these `classes` (`None`: of all), and of these `functions`. `outlines`: a
    predicate will want to see the modules. `depth`: of that transformation."""

    depth: int
    tag: Hashable
    methods: tuple[str, ...] = ()
    classes: tuple[type, ...] | None = None
    functions: tuple[Any, ...] = ()
    inputs: bool = False
    scope: bool = False


class Listening(NamedTuple):
    """`loops`: how many loops are around whatever is being vmapped right now. `scope`:
    the user's scopes. `found`: is told of the site of each sow, which does nothing
    else. `captures`: of which calls of modules there is to be a note. `depth`: how many
    transformations trace the program, one within the other. `leafwise`: of a value,
    only the leaves that the program itself differentiates are."""

    loops: int = 0
    scope: str = ""
    found: Callable[[Any], None] | None = None
    captures: tuple[Capture, ...] = ()
    depth: int = 0
    leafwise: bool = False


# Not `None` while a program is traced in order to see or change its sows. It is
# part of the key of every cache of JAX's, so a jitted function is traced once for each
# value.
listening = jax.make_user_context(None)


# While a program is traced, methods of modules take note of their calls, and they are
# another thread's, too.
tracing = threading.RLock()


class Around(NamedTuple):
    """What is between a vmap and what is being batched: how many loops, and which conds
    and loops run for some lanes only, as `Site.guards` has them."""

    loops: int = 0
    conds: tuple[Any, ...] = ()


def around(axis_data: Any) -> Around:
    # Some rules of JAX's, as that of `shard_map`, make other axis data.
    here = listening.value or Listening()
    return getattr(axis_data, "around", Around(here.loops))
