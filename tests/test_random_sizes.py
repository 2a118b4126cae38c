"""Random programs of symbolic sizes, exported, written to bytes and read again. The
reference is the program by hand, of one concrete size."""

import dataclasses as dc
from typing import Any

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax import lax

from tests import trees
from tests.trees import Call, Cond, Node, Rows, Scan, Seq, While


@dc.dataclass(frozen=True)
class ScanRows(Node):
    """A loop of symbolic length, over the leading axis."""

    body: Any
    reverse: bool

    def run(self, x, mark):
        def step(c, row):
            c = self.body.run(c * np.float32(0.5) + row, mark)
            return c, c

        return lax.scan(step, x[0], x, reverse=self.reverse)[1]

    def by_hand(self, x, mark, here):
        n, c, rows = len(x), x[0], [None] * len(x)
        for i in reversed(range(n)) if self.reverse else range(n):
            inside = here.at("loop", i, n)
            c = self.body.by_hand(c * np.float32(0.5) + x[i], mark, inside)
            rows[i] = c
        return jnp.stack(rows)


@dc.dataclass(frozen=True)
class WhileRows(Node):
    """As many iterations as there are rows. (A `fori_loop` would be a scan where that
    number is known, as that of columns is for `n, 3`.)"""

    body: Any

    def run(self, x, mark):
        n = jnp.asarray(x.shape[0], jnp.int32)
        step = lambda s: (s[0] + 1, self.body.run(s[1], mark))
        return lax.while_loop(lambda s: s[0] < n, step, (jnp.int32(0), x))[1]

    def by_hand(self, x, mark, here):
        return While(self.body, len(x)).by_hand(x, mark, here)


RESIZES = {
    "twice": lambda x: jnp.concatenate([x, -x]),
    "one less": lambda x: x[1:],
    "one more": lambda x: jnp.concatenate([x, x[:1] * 2]),
    "flat": lambda x: x.reshape(-1),
    "transposed": lambda x: jnp.moveaxis(x, 0, -1),
    "products": lambda x: x[:, None] * x[None],
}


@dc.dataclass(frozen=True)
class Resize(Node):
    """Something that is done to arrays of another size, and comes back as a mean."""

    how: str
    body: Any

    def run(self, x, mark):
        return x * (1 + self.body.run(RESIZES[self.how](x), mark).mean())

    def by_hand(self, x, mark, here):
        other = RESIZES[self.how](x)
        return x * (1 + self.body.by_hand(other, mark, here).mean())


class _Draw:
    def __init__(self, rng, allow_while):
        self.rng, self.names, self.allow_while = rng, trees.Names(), allow_while

    def block(self, depth, ndim):
        rng, nodes = self.rng, [trees.draw_op(self.rng)]
        for _ in range(int(rng.integers(1, 3))):
            if depth and rng.random() < 0.8:
                nodes.append(self.node(depth - 1, ndim))
            else:
                nodes += [trees.draw_mark(rng, self.names), trees.draw_op(rng)]
        return Seq((*nodes, trees.draw_mark(rng, self.names), trees.draw_op(rng)))

    def node(self, depth, ndim):
        rng = self.rng
        kinds = ["scan", "call", "cond", "resize", "resize"]
        kinds += ["scan rows", "rows"] * 2 if ndim > 1 else []
        kinds += ["while", "while rows"] if self.allow_while else []
        kind = str(rng.choice(kinds))
        inside = lambda ndim=ndim: self.block(depth, ndim)
        if kind == "scan":
            return Scan(inside(), int(rng.integers(1, 4)), bool(rng.random() < 0.3))
        if kind == "scan rows":
            return ScanRows(inside(ndim - 1), bool(rng.random() < 0.3))
        if kind == "rows":
            return Rows(inside(ndim - 1))
        if kind == "while":
            return While(inside(), int(rng.integers(0, 4)))
        if kind == "while rows":
            return WhileRows(inside())
        if kind == "cond":
            least = float(rng.choice([-1e3, 1e3, 0.1]))
            return Cond((inside(), inside()), least)
        if kind == "call":
            return Call(str(rng.choice(list(trees.CALLS))), inside())
        hows = list(RESIZES)
        hows = [h for h in hows if ndim > 1 or h not in ("flat", "transposed")]
        hows = [h for h in hows if ndim < 2 or h != "products"]
        how = str(rng.choice(hows))
        other = {"flat": 1, "products": ndim + 1}
        return Resize(how, inside(other.get(how, ndim)))


SYMBOLIC = {
    "n, m": ["n >= 2", "m >= 2"],
    "n, 3": ["n >= 2"],
    "2*n, m": ["n >= 1", "m >= 2"],
    "n, n": ["n >= 2"],
}


# `compare` takes concrete arrays.
FEATURES = {k: v for k, v in trees.FEATURES.items() if k != "compare"}


def _plan(seed):
    rng = np.random.default_rng([seed, 42])
    feature = str(rng.choice(list(FEATURES)))
    allow_while = rng.random() < 0.3 and feature not in trees.REVERSE
    program = _Draw(rng, allow_while).block(2, 2)
    symbolic = str(rng.choice(list(SYMBOLIC)))
    n, m = rng.integers(2, 5, 2)
    shape = {"n, m": (n, m), "n, 3": (n, 3), "2*n, m": (2, m), "n, n": (n, n)}
    x = jnp.asarray(rng.uniform(-1, 1, shape[symbolic]).astype(np.float32))

    def way(fn):
        constraints = SYMBOLIC[symbolic]
        shape = jax.export.symbolic_shape(symbolic, constraints=constraints)
        static: list = []

        @jax.jit
        def leaves(x):
            arrays, rest = eqx.partition(fn(x), eqx.is_array)
            static[:] = [rest, jtu.tree_structure(arrays)]
            return jtu.tree_leaves(arrays)

        exported = jax.export.export(leaves)(jax.ShapeDtypeStruct(shape, np.float32))
        exported = jax.export.deserialize(exported.serialize())
        rest, treedef = static
        return eqx.combine(treedef.unflatten(exported.call(x)), rest)

    about = f"({symbolic}) as {x.shape}"
    return trees.Plan(seed, feature, program, x, way, rng, about)


def check(seed):
    return trees.check(_plan(seed), FEATURES)


_DEFAULT = (10, 12, 22)
_SLOW = [pytest.param(s, marks=pytest.mark.slow) for s in range(8)]


@pytest.mark.parametrize("seed", [*_DEFAULT, *_SLOW])
def test_random_program_of_symbolic_sizes(seed):
    check(seed)


@pytest.mark.fuzz
def test_random_programs_of_symbolic_sizes_within_a_budget():
    trees.within_a_budget(check)
