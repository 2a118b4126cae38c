"""Whether anyone listens, and what surrounds a vmap."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.core

from .static import Same


class Listening(NamedTuple):
    """`loops`: how many loops are around whatever is being vmapped right now. `scope`:
    what goes before the names of the sows that follow. `found`: a list to which sows
    add their sites, and do nothing else. `outside`: which variables of the program hold
    marked modules."""

    loops: int = 0
    scope: str = ""
    found: "Same | None" = None
    outside: tuple[Hashable, ...] = ()


# Not `None` while somebody traces a program in order to see or change its sows. It is
# part of the key of every cache of JAX's, so a jitted function is traced once for each
# value.
listening = jax.make_user_context(None)


class Around(NamedTuple):
    """What is between a vmap and what is being batched: how many loops, and which conds
    and loops run for some lanes only, as `Site.guards` has them."""

    loops: int = 0
    conds: tuple[Any, ...] = ()


def around(axis_data: Any) -> Around:
    # Some rules of JAX's, as that of `shard_map`, make other axis data.
    here = listening.value or Listening()
    return getattr(axis_data, "around", Around(here.loops))
