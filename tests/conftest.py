import os


# Before jax is imported: eight devices for the sharded programs.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )

import random

import equinox as eqx
import jax
import jax.random as jr
import pytest


jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def _plain(fn, *args, **kwargs):
    return fn(*args, **kwargs)


def _jit(fn, *args, **kwargs):
    return eqx.filter_jit(fn)(*args, **kwargs)


def _twice(fn, *args, **kwargs):
    fn(*args, **kwargs)
    return fn(*args, **kwargs)


@pytest.fixture(params=[_plain, _jit, _twice], ids=["plain", "jit", "twice"])
def call(request):
    """Runs a function as it is, under jit, and a second time (with warm caches)."""
    return request.param


@pytest.fixture
def getkey():
    def _getkey():
        return jr.key(random.randint(0, 2**31 - 1))

    return _getkey


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
