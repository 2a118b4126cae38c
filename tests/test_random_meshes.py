"""Random programs with meshes within meshes: `auto_axes` in an explicit mesh,
`explicit_axes` in an automatic one, and `shard_map` over some axes, nested, in loops,
checkpoints, gradients and vmaps. The reference is the program by hand on one device."""

import collections
import contextlib
import dataclasses as dc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from eqx_sow import tap
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from tests import trees
from tests.trees import Call, Cond, Node, Rows, Scan, Seq, While


MESH = {"d": 4, "m": 2}
SHAPE = 8, 4
TYPES = {"E": AxisType.Explicit, "A": AxisType.Auto}


@dc.dataclass(frozen=True)
class Auto(Node):
    axes: str | None
    spec: tuple
    body: Any

    def run(self, x, mark):
        body = lambda x: self.body.run(x, mark)
        return jax.sharding.auto_axes(body, axes=self.axes, out_sharding=P(*self.spec))(
            x
        )

    def by_hand(self, x, mark, here):
        return self.body.by_hand(x, mark, here)


@dc.dataclass(frozen=True)
class Explicit(Auto):
    def run(self, x, mark):
        body = lambda x: self.body.run(x, mark)
        inside = jax.sharding.explicit_axes
        return inside(body, axes=self.axes, in_sharding=P(*self.spec))(x)


@dc.dataclass(frozen=True)
class Devices(Node):
    """A `shard_map` over the mesh axis `axis`, which the dimension `dim` is cut by."""

    axis: str
    dim: int
    check_vma: bool
    body: Any

    def run(self, x, mark):
        over = P(*[None] * self.dim, self.axis)
        specs = dict(in_specs=over, out_specs=over, check_vma=self.check_vma)
        body = lambda x: self.body.run(x, mark)
        return jax.shard_map(body, axis_names={self.axis}, **specs)(x)

    def by_hand(self, x, mark, here):
        n = MESH[self.axis]
        parts = jnp.split(x, n, self.dim)
        outs = [
            self.body.by_hand(part, mark, here.at("device", i, n))
            for i, part in enumerate(parts)
        ]
        return jnp.concatenate(outs, self.dim)


class _Draw:
    def __init__(self, rng, allow_while):
        self.rng, self.names, self.allow_while = rng, trees.Names(), allow_while
        # Where one checks and one in it does not, JAX has wrong types.
        self.check_vma = bool(rng.random() < 0.8)

    def block(self, depth, types, dims):
        """`types` of the axes of the mesh; which of them cuts each dimension."""
        rng, nodes = self.rng, [trees.draw_op(self.rng)]
        for _ in range(int(rng.integers(1, 3))):
            if depth and rng.random() < 0.8:
                nodes.append(self.node(depth - 1, types, dims))
            else:
                nodes += [trees.draw_mark(rng, self.names), trees.draw_op(rng)]
        return Seq((*nodes, trees.draw_mark(rng, self.names), trees.draw_op(rng)))

    def node(self, depth, types, dims):
        rng = self.rng
        kinds = ["scan", "call", *self.meshes(types, dims) * 2]
        # JAX selects by lane only if nothing but the lanes is sharded.
        kinds += ["cond"] if len(dims) == len(SHAPE) else []
        kinds += ["while"] if self.allow_while else []
        # Devices come before lanes.
        kinds += ["rows"] if len(dims) == len(SHAPE) else []
        kind = str(rng.choice(kinds))
        inside = lambda types=types, dims=dims: self.block(depth, types, dims)
        if kind == "scan":
            return Scan(inside(), int(rng.integers(1, 4)), bool(rng.random() < 0.3))
        if kind == "while":
            return While(inside(), int(rng.integers(0, 4)))
        if kind == "cond":
            least = float(rng.choice([-1e3, 1e3, 0.1]))
            return Cond((inside(), inside()), least)
        if kind == "call":
            return Call(str(rng.choice(list(trees.CALLS))), inside())
        if kind == "rows":
            return Rows(inside(dims=dims[1:]))
        how, axis = kind.split(" ")
        change = {"auto": "A", "explicit": "E", "devices": "M"}[how]
        new = {a: change if axis in (a, "all") else t for a, t in types.items()}
        if how == "devices":
            dim, dims = dims.index(axis), tuple(a if a != axis else None for a in dims)
            return Devices(axis, dim, self.check_vma, inside(new, dims))
        # Sharded as before, or as the explicit axes say.
        told = new if how == "explicit" else types
        spec = tuple(a if told.get(a) == "E" else None for a in dims)
        node = Explicit if how == "explicit" else Auto
        return node(None if axis == "all" else axis, spec, inside(new))

    def meshes(self, types, dims):
        kinds = []
        # JAX refuses all of them where one is manual.
        if "M" not in types.values():
            kinds += ["auto all"] * 2 if "E" in types.values() else []
            kinds += ["explicit all"] * 2 if "A" in types.values() else []
        for axis, kind in types.items():
            if kind == "E":
                kinds += [f"auto {axis}"]
            if kind == "A":
                kinds += [f"explicit {axis}"]
            if kind != "M" and axis in dims and len(dims) == len(SHAPE):
                kinds += [f"devices {axis}"]
        return kinds


def _tapped(run):
    """One event for each execution, and for each device that has one."""
    events = []
    out = run.way(tap(run.f, events.append))
    jax.block_until_ready(out)
    jax.effects_barrier()
    want, taken = run.by_hand()
    trees.close(out, want, "out of tap")
    got = collections.defaultdict(list)
    for e in events:
        got[e.name].append(e.value)
    for e in taken:
        if any(axis == "vmap" for axis, *_ in e.here.axes):
            got.pop(e.name, None)
        elif e.here.ran:
            for i, value in enumerate(left := got[e.name]):
                with contextlib.suppress(AssertionError):
                    trees.close(value, e.value, e.name)
                    del left[i]
                    break
            else:
                raise AssertionError(f"no event of {e}, but of {left}")
    assert not any(got.values()), f"{got} in addition"


FEATURES = {**trees.FEATURES, "tap": _tapped}


def _plan(seed):
    rng = np.random.default_rng([seed, 41])
    feature = str(rng.choice(list(FEATURES)))
    types = {a: str(rng.choice(["E", "E", "A"])) for a in MESH}
    draw = _Draw(rng, rng.random() < 0.3 and feature not in trees.REVERSE)
    program = draw.block(3, types, tuple(MESH))
    while not trees.has(program, Auto, Explicit, Devices):
        program = draw.block(3, types, tuple(MESH))
    # JAX 0.10 has no eager `shard_map` over some axes only.
    hows = ["jit", "jit", "jit of jit"]
    hows += [] if trees.has(program, Devices) else ["eager", "eager"]
    how = str(rng.choice(hows))
    x = jnp.asarray(rng.uniform(-1, 1, SHAPE).astype(np.float32))

    def way(fn):
        spec = P(*[a if t == "E" else None for a, t in types.items()])
        kinds = tuple(TYPES[t] for t in types.values())
        mesh = jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=kinds)
        if how == "jit of jit":
            inner = eqx.filter_jit(fn)
            fn = lambda x: inner(x)
        fn = fn if how == "eager" else eqx.filter_jit(fn)
        with jax.set_mesh(mesh):
            out = fn(jax.device_put(x, NamedSharding(mesh, spec)))
        # What is compared on devices is so on those of the mesh.
        return out if feature == "compare" else _fetched(out)

    about = f"{how}, {''.join(types.values())}"
    return trees.Plan(seed, feature, program, x, way, rng, about)


def _fetched(tree):
    array = lambda x: np.asarray(x) if isinstance(x, jax.Array) else x
    return jtu.tree_map(array, tree)


# What docs/api/errors.md says.
DOCUMENTED = {
    "rule that only some lanes run": r"derivative rule of a function .* some lanes",
    "total in a branch of some devices": r"run this branch or iteration would wait",
    "plant in a shard_map": r"cannot be checked in a `jax.shard_map`",
    "tap in a shard_map of explicit axes": r"Closing over inputs to shard_map",
}


def check(seed):
    return trees.check(_plan(seed), FEATURES, DOCUMENTED)


_DEFAULT = (10, 17, 23)
# The last one has a value of which only its part on a device looks sharded.
_SLOW = [pytest.param(s, marks=pytest.mark.slow) for s in (*range(4), 28000008)]


@pytest.mark.parametrize("seed", [*_DEFAULT, *_SLOW])
def test_random_program_on_meshes(seed):
    check(seed)


@pytest.mark.fuzz
def test_random_programs_on_meshes_within_a_budget():
    trees.within_a_budget(check)
