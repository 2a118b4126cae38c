"""References that know nothing of the library.

A program is a function `program(mark, *args)` that calls `mark(value, name)` where it
would call `sow`. With `mark=sow` it is the program under test; `thread` makes the
marked values outputs, and `perturb` adds a zero at each of them.
"""

import collections
import contextlib
import re

import equinox as eqx
import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.experimental import hijax


def unmarked(value, name):
    del name
    return value


def thread(program):
    def fn(*args):
        seen = {}

        def mark(value, name):
            assert name not in seen
            seen[name] = value
            return value

        out = program(mark, *args)
        return out, seen

    return fn


def perturb(program):
    def fn(eps, *args):
        def mark(value, name):
            return eqx.apply_updates(value, eps[name])

        return program(mark, *args)

    return fn


def zeros(program, *args):
    seen = eqx.filter_eval_shape(lambda *a: thread(program)(*a)[1], *args)
    inexact = eqx.filter(
        seen,
        lambda s: (
            isinstance(s, jax.ShapeDtypeStruct) and jnp.issubdtype(s.dtype, jnp.inexact)
        ),
    )
    return jtu.tree_map(lambda s: jnp.zeros(s.shape, s.dtype), inexact)


def primals(program, *args):
    return thread(program)(*args)[1]


def cotangents(program, *args):
    eps = zeros(program, *args)
    return jax.grad(lambda e: perturb(program)(e, *args))(eps)


def tangents(program, x, v):
    return jax.jvp(lambda x: primals(program, x), (x,), (v,))[1]


def with_mode(intermediates, mode):
    """`{name: value}` of the names that have this mode."""
    return {n: e[mode] for n, e in intermediates.items() if mode in e}


def modes_of(intermediates):
    return {name: set(entry) for name, entry in intermediates.items()}


def is_key(x):
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_literal(x):
    """What JAX keeps of a scalar in a jaxpr: a number or an array of NumPy's that has a
    dtype of its own, and that no program should get to see."""
    numpy = type(x) is np.ndarray or isinstance(x, np.generic)
    known = numpy or isinstance(x, jax.Array | jax.ShapeDtypeStruct)
    return hasattr(x, "dtype") and not known


def _leaf_equal(x, y, rtol, atol, weak):
    if is_literal(x):
        return False
    # JAX itself returns one that an eager call only passes on.
    y = jnp.asarray(y) if is_literal(y) else y
    x_array, y_array = (isinstance(z, jax.Array | np.ndarray) for z in (x, y))
    if x_array != y_array:
        return False
    if not x_array:
        return x is y or (type(x) is type(y) and bool(x == y))
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if x.dtype == jax.dtypes.float0:
        return True
    # What comes back is an array of JAX's; what is expected may be NumPy's.
    if isinstance(y, jax.Array) and not isinstance(x, jax.Array):
        return False
    if is_key(x):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    elif weak and getattr(x, "weak_type", False) != getattr(y, "weak_type", False):
        return False
    x, y = np.asarray(x), np.asarray(y)
    if x.dtype == jnp.bfloat16:
        x, y, rtol, atol = x.astype("float32"), y.astype("float32"), 2e-2, 2e-2
    if not np.issubdtype(x.dtype, np.inexact):
        return bool(np.array_equal(x, y))
    return bool(np.allclose(x, y, rtol=rtol, atol=atol, equal_nan=True))


def _as_dicts(tree):
    # Those of `Intermediates`, and of its entries.
    is_ours = lambda x: isinstance(x, dict) and type(x) is not dict
    plain = lambda x: {k: _as_dicts(v) for k, v in x.items()} if is_ours(x) else x
    return jtu.tree_map(plain, tree, is_leaf=is_ours)


def tree_allclose(x, y, *, rtol=1e-5, atol=1e-5, weak=False):
    """Same structure, leaf types, shapes and dtypes; near values. An `Intermediates` is
    a dict. Arrays of `x` are JAX's where those of `y` are."""
    x, y = map(_as_dicts, (x, y))
    x_leaves, x_def = jtu.tree_flatten(x)
    y_leaves, y_def = jtu.tree_flatten(y)
    return x_def == y_def and all(
        _leaf_equal(a, b, rtol, atol, weak)
        for a, b in zip(x_leaves, y_leaves, strict=True)
    )


def assert_close(x, y, **kwargs):
    assert tree_allclose(x, y, **kwargs), f"\n{x}\n!=\n{y}"


def close(got, want, rtol=1e-5):
    want = np.asarray(want)
    assert not is_literal(got)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-6)


def _subjaxprs(jaxpr):
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    yield jaxpr
    for eqn in jaxpr.eqns:
        for sub in jexc.jaxprs_in_params(eqn.params):
            yield from _subjaxprs(sub)


def primitives(jaxpr):
    """Names of all primitives, those of inner jaxprs too."""
    return [eqn.primitive.name for sub in _subjaxprs(jaxpr) for eqn in sub.eqns]


def instructions(text):
    """Counts of the opcodes in the text of a compiled program."""
    opcodes = collections.Counter(re.findall(r"= \S+ ([a-z\-]+)\(", text))
    for free in ("parameter", "constant", "get-tuple-element", "tuple", "bitcast"):
        del opcodes[free]
    # Where a loop's carry is copied is up to XLA's assignment of buffers.
    del opcodes["copy"]
    return opcodes


class Encoder(eqx.Module):
    """A model with a method that another one calls."""

    w: jax.Array

    def encode(self, x):
        return self.w * x

    def __call__(self, x):
        return self.encode(x) + 1


# What a later release of JAX does by itself. Before JAX 0.12 it is not complete.
NEXT = (
    ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")
    if hasattr(hijax, "HiPrim")
    else ()
)


@contextlib.contextmanager
def next_release():
    before = {name: getattr(jax.config, name) for name in NEXT}
    for name in NEXT:
        jax.config.update(name, True)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
