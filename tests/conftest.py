import os
import pathlib


# Before jax is imported: eight devices for the sharded programs.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
        " --xla_cpu_multi_thread_eigen=false"  # the arrays are small
    )

import gc
import random
from collections import defaultdict

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
import pytest

from .helpers import is_literal


# JAX keeps millions of objects. To look through them was a fifth of the time.
gc.set_threshold(200_000, 20, 100)
jax.config.update("jax_platforms", "cpu")
# Compiling is most of what these tests do, and they are small.
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
    # Many of the programs are the same, within a run and from one run to the next.
    if config.pluginmanager.hasplugin("cacheprovider"):
        directory = config.cache.mkdir("jax")
        jax.config.update("jax_compilation_cache_dir", str(directory))


# By default, other cases run with the oldest JAX than with later ones.
_DRAWN = 0 if jax.__version_info__ < (0, 11) else 1

# A file of the cases that have passed, to which a run adds its own. The marks of a run
# are those of the file before it.
_PASSED = pathlib.Path(os.environ.get("EQX_SOW_PASSED", os.devnull))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """By default, one in five of the cases of each test runs, and at least one. The
    others have the mark `rest`. With `pytest.mark.sample(n)`, at a test or for a file,
    one in `n` runs, two are the `rest`, and the others have the mark `every`. So do all
    but two in `n` of its slow cases.

    Which it is of the first `n` cases depends on how long the name of the test is, and
    it is the next one in the next `n`. So both of `plain` and `jit` run, of one test or
    of another. With the oldest JAX it is another one than with later ones. A case that
    is chosen by its whole name is the only one, and runs.

    What is in the file `EQX_SOW_PASSED` has the mark `passed`, if it is of the `rest`:
    what has run with the oldest JAX need not run with the newest as well."""
    passed = set(_PASSED.read_text().splitlines()) if _PASSED.exists() else ()
    tests = defaultdict(list)
    for item in items:
        if not any(map(item.get_closest_marker, ("every", "fuzz", "types"))):
            slow = item.get_closest_marker("slow") is not None
            tests[item.function, slow].append(item)
    for (test, slow), cases in tests.items():
        mark = cases[0].get_closest_marker("sample")
        n = min(mark.args[0] if mark else 5, len(cases))
        most = n if mark is None else 2 if slow else 3
        for i, case in enumerate(cases):
            place = (i + i // n + len(test.__name__)) % n
            if place >= most:
                case.add_marker("every")
            elif not slow and place != _DRAWN % n:
                case.add_marker("rest")
                if case.nodeid in passed:
                    case.add_marker("passed")


def pytest_runtest_logreport(report):
    # The workers tell the main process.
    if report.when == "call" and report.passed:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            with _PASSED.open("a") as file:
                print(report.nodeid, file=file)


def pytest_collection_finish():
    """What the modules have made stays, and no `gc.collect` of a test looks at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def all_objects():
    """`gc.get_objects` has those of the modules as well."""
    gc.unfreeze()
    yield gc.get_objects
    gc.collect()
    gc.freeze()


def _same(x, y):
    assert not is_literal(x) and not is_literal(y)
    if eqx.is_array(x) and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        np.testing.assert_array_equal(x, y)


def _plain(fn, *args, **kwargs):
    first = fn(*args, **kwargs)
    second = fn(*args, **kwargs)
    jax.tree.map(_same, first, second)
    return second


def _jit(fn, *args, **kwargs):
    return eqx.filter_jit(fn)(*args, **kwargs)


_CALLS = {"plain": _plain, "jit": _jit}


@pytest.fixture(params=_CALLS)
def call(request):
    """Runs a function as it is, twice (with cold and warm caches), and under jit."""
    return _CALLS[request.param]


@pytest.fixture(autouse=True, scope="module")
def _clear_caches():
    """JAX keeps all programs, several gigabytes of them, and JAX 0.10 looks for
    one among all that are alike, one by one."""
    yield
    jax.clear_caches()


@pytest.fixture
def getkey():
    def _getkey():
        return jr.key(random.randint(0, 2**31 - 1))

    return _getkey


@pytest.fixture
def standard_promotion():
    """NumPy's, as users have it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
