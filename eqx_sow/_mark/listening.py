"""Whether sows are marked now, and what surrounds a vmap."""

import contextlib
import threading
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import jax
import jax.core

from .static import Same


class Listening(NamedTuple):
    """`loops`: how many loops are around whatever is being vmapped right now. `path`:
    that of the module around, under `scope=True`. `scope`: the user's scopes. `found`:
    a list to which sows add their sites, and do nothing else. `outside`: which
    variables of the program hold marked modules. `selected`: the classes whose modules
    must not run unmarked. `depth`: how many transformations trace the program, one
    within the other."""

    loops: int = 0
    path: str = ""
    scope: str = ""
    found: "Same | None" = None
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


@contextlib.contextmanager
def listening_again(here: Listening, changed: tuple[Any, ...]) -> Iterator[None]:
    """What was so when a function was given to JAX, which calls it later."""
    with tracing, contextlib.ExitStack() as stack:
        for change in changed:
            stack.enter_context(change())
        stack.enter_context(listening(here))
        yield


def changes_for(fn: Any) -> tuple[Any, ...]:
    return tuple(c for c in (x.for_later(fn) for x in changes) if c is not None)


class Around(NamedTuple):
    """What is between a vmap and what is being batched: how many loops, and which conds
    and loops run for some lanes only, as `Site.guards` has them."""

    loops: int = 0
    conds: tuple[Any, ...] = ()


def around(axis_data: Any) -> Around:
    # Some rules of JAX's, as that of `shard_map`, make other axis data.
    here = listening.value or Listening()
    return getattr(axis_data, "around", Around(here.loops))
