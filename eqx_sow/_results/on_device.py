"""Computing numbers of arrays where they are."""

from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .at_hand import can_be_read, computing, is_at_hand
from .leaves import long_as_float


def computed(fn: Callable, value: Any, *others: Any) -> Any:
    """Starts to compute on the device. `None` if there are only shapes. Each process
    gets all of the result."""
    leaves = jtu.tree_leaves((value, others))
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        return None
    # Host arrays go to wherever the others are.
    local = lambda x: not isinstance(x, jax.Array) or is_at_hand(x)
    others = jtu.tree_map(lambda x: np.asarray(x) if local(x) else x, others)
    shardings = [x.sharding for x in leaves if isinstance(x, jax.Array)]
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    everywhere = NamedSharding(meshes[0], PartitionSpec()) if meshes else None
    with computing():
        # JAX finds what it has compiled by the function.
        return jax.jit(fn, out_shardings=everywhere)(long_as_float(value), *others)


def on_host(x: Any) -> Any:
    """An array as NumPy's, from wherever it is, in each process. `None` if there are
    only shapes."""
    return np.asarray(x) if can_be_read(x) else computed(itself, x)


def itself(x: Any) -> Any:
    return x
