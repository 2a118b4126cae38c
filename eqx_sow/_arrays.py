"""Helpers for arrays."""

import jax.numpy as jnp


def leading(x, ndim: int):
    """Gives `x` more axes of size one, behind its own."""
    return jnp.reshape(x, jnp.shape(x) + (1,) * (ndim - jnp.ndim(x)))


def select(mask, x, y):
    return jnp.where(leading(mask, jnp.ndim(x)), x, y)
