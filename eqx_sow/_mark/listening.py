"""Whether sows are marked now, and what surrounds a vmap."""

import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.core


class Listening(NamedTuple):
    """`loops`: how many loops are around whatever is being vmapped right now. `path`:
    that of the module around, under `scope=True`. `scope`: the user's scopes. `found`:
    is told of the site of each sow, which does nothing else. `outside`: which
    variables of the program hold marked modules. `selected`: the classes whose modules
    must not run unmarked. `depth`: how many transformations trace the program, one
    within the other."""

    loops: int = 0
    path: str = ""
    scope: str = ""
    found: Callable[[Any], None] | None = None
    outside: tuple[Hashable, ...] = ()
    selected: tuple[type, ...] = ()
    depth: int = 0


# Not `None` while a program is traced in order to see or change its sows. It is
# part of the key of every cache of JAX's, so a jitted function is traced once for each
# value.
listening = jax.make_user_context(None)


# A program may have its variables changed while it is traced, and they are another
# thread's, too.
tracing = threading.RLock()
# Those there are. A change has a method `for_later(fn)`, which returns a function that
# makes a context manager in which `fn` finds the same again, or `None` if it is all the
# same to `fn`.
changes: list[Any] = []


class Around(NamedTuple):
    """What is between a vmap and what is being batched: how many loops, and which conds
    and loops run for some lanes only, as `Site.guards` has them."""

    loops: int = 0
    conds: tuple[Any, ...] = ()


def around(axis_data: Any) -> Around:
    # Some rules of JAX's, as that of `shard_map`, make other axis data.
    here = listening.value or Listening()
    return getattr(axis_data, "around", Around(here.loops))
