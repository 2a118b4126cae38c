"""What the leaves of a value are."""

from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np


def is_value(x: Any) -> bool:
    """Whether a leaf is an array, or the shape of one."""
    return eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def arrays_in(value: Any) -> list[Any]:
    return [*filter(is_value, jtu.tree_leaves(value))]


def shape_of(x: Any) -> Any:
    """An array without its numbers; any other leaf as it is."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_value(x) else x


def is_numeric(x: Any) -> bool:
    """Whether it has statistics."""
    # A `float0` is a number to none of these.
    return is_value(x) and (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool)


def is_key(x: Any) -> bool:
    return is_value(x) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def long_as_float(x: Any) -> Any:
    """NumPy's integers as numbers of which JAX does not cut off the upper 32 bits."""
    if isinstance(x, np.ndarray | np.generic) and x.dtype in (np.int64, np.uint64):
        return x.astype(np.float64)
    return x


def is_state(x: Any) -> bool:
    return isinstance(x, eqx.nn.State)


def type_of(x: Any) -> str:
    """Such as `f32[3]`."""
    if not is_value(x):
        return ""
    return jax.core.ShapedArray(x.shape, x.dtype).str_short(short_dtypes=True)
