"""Meshes with explicit axes, which is what `jax.make_mesh` makes: there a sharding is
part of the type of an array. The values are those of the same program on one device,
and are sharded as the value is where it is sown."""

import contextlib
import functools as ft
import re
from typing import Any, NamedTuple

import equinox as eqx
import eqx_sow
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_sow import Buffer, Fold, Last, plant, save_intermediates as S, tap
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from .tables import REDUCERS, under


pytestmark = pytest.mark.sample(5)


X = jnp.arange(32.0).reshape(8, 4) / 32 + 0.1


class Mesh(NamedTuple):
    shape: tuple[int, ...]
    names: tuple[str, ...]
    spec: tuple[Any, ...]
    # Whether JAX is told of the mesh, or finds it in the types of the arrays only.
    told: bool

    def make(self):
        return jax.make_mesh(self.shape, self.names)

    def context(self):
        return jax.set_mesh(self.make()) if self.told else contextlib.nullcontext()

    def put(self, x):
        return jax.device_put(x, NamedSharding(self.make(), P(*self.spec)))


MESHES = {
    "one axis": Mesh((8,), ("d",), ("d", None), True),
    "two axes": Mesh((4, 2), ("d", "m"), ("d", "m"), True),
    "both at once": Mesh((4, 2), ("d", "m"), (("d", "m"), None), True),
    "not set": Mesh((4, 2), ("d", "m"), ("d", "m"), False),
}


# --- programs ---
def plain(x, sow):
    return jnp.sin(sow(jnp.sin(x), "a"))


def unused(x, sow):
    sow(jnp.sin(x), "a")
    return x * 2


def tree(x, sow):
    return sow((jnp.sin(x), jnp.float32(2), jnp.arange(3.0)), "a")[0] * 2


def scan(x, sow):
    body = lambda c, i: (sow(jnp.sin(c) * i, "a"), None)
    return lax.scan(body, x, jnp.arange(1.0, 4.0))[0]


def hoisted(x, sow):
    body = lambda c, _: (c * sow(jnp.sin(x), "a"), None)
    return lax.scan(body, x, None, length=3)[0]


def fori(x, sow):
    return lax.fori_loop(0, 3, lambda i, c: sow(jnp.sin(c), "a"), x)


def cond(x, sow):
    run = lambda x: sow(jnp.sin(x), "a")
    return lax.cond(x.sum() > 0, run, lambda x: x * 2, x)


def not_run(x, sow):
    run = lambda x: sow(jnp.sin(x), "a")
    return lax.cond(x.sum() < 0, run, lambda x: x * 2, x)


def both(x, sow):
    sin, double = lambda x: sow(jnp.sin(x), "a"), lambda x: sow(x * 2, "a")
    return lax.cond(x.sum() > 0, sin, double, x)


def cond_in_scan(x, sow):
    def body(c, i):
        run = lambda c: sow(jnp.sin(c), "a")
        return lax.cond(i > 1, run, lambda c: c * 2, c), None

    return lax.scan(body, x, jnp.arange(4.0))[0]


def scan_in_cond(x, sow):
    return lax.cond(x.sum() > 0, lambda x: scan(x, sow), lambda x: x, x)


def while_(x, sow):
    body = lambda c: (sow(jnp.sin(c[0]), "a"), c[1] + 1)
    return lax.while_loop(lambda c: c[1] < 3, body, (x, 0))[0]


def until(x, sow):
    return lax.while_loop(lambda c: c.sum() < 30, lambda c: sow(c * 2, "a"), x)


def lanes(f, axis=0):
    def mapped(x, sow):
        return jax.vmap(lambda x: f(x, sow), axis, axis)(x)

    return mapped


def lanes_in_scan(x, sow):
    body = lambda c, _: (lanes(both)(c, sow), None)
    return lax.scan(body, x, None, length=3)[0]


# Each with the leading axes of what is captured: "d" and "m" for lanes that are the
# axes of `X` that are sharded over these, `None` for loops.
PROGRAMS = {
    "plain": (plain, ()),
    "unused": (unused, ()),
    "tree": (tree, ()),
    "scan": (scan, (None,)),
    "hoisted": (hoisted, (None,)),
    "fori": (fori, (None,)),
    "cond": (cond, ()),
    "not run": (not_run, ()),
    "both branches": (both, ()),
    "cond in scan": (cond_in_scan, (None,)),
    "scan in cond": (scan_in_cond, (None,)),
    "while": (while_, ()),
    "until": (until, ()),
    "vmap": (lanes(plain), ("d",)),
    "vmap, axis 1": (lanes(plain, 1), ("m",)),
    "vmap of tree": (lanes(tree), ("d",)),
    "vmap of scan": (lanes(scan), ("d", None)),
    "vmap of hoisted": (lanes(hoisted), ("d", None)),
    "vmap of cond": (lanes(cond), ("d",)),
    "vmap of both": (lanes(both), ("d",)),
    "vmap of cond in scan": (lanes(cond_in_scan), ("d", None)),
    "vmap of while": (lanes(while_), ("d",)),
    "vmap of until": (lanes(until), ("d",)),
    "vmap of vmap": (lanes(lanes(plain)), ("d", "m")),
    "vmap of vmap of cond": (lanes(lanes(cond)), ("d", "m")),
    "vmap in scan": (lanes_in_scan, (None, "d")),
}
NO_GRAD = {"while", "until", "vmap of while", "vmap of until"}
# JAX refuses the programs themselves: it selects by lane only if nothing but the lanes
# is sharded.
NO_OTHER_AXIS = {"vmap of cond", "vmap of both", "vmap in scan"}


# --- uses ---
def _grad(f):
    return jax.grad(lambda x: (f(x) ** 2).sum())


def _first(value):
    return jax.tree.leaves(value)[0]


def _double(value):
    return jax.tree.map(lambda x: x * 2, value)


def _planted_back(f):
    return lambda x: plant(f, S(f)(x)[1])(x)


def _gradient_of_planted(f):
    def gradient(x):
        value = S(f)(x)[1]["a"]["primal"]
        return jax.grad(lambda value: (plant(f, {"a": value})(x) ** 2).sum())(value)

    return gradient


def _tapped(f):
    def run(x):
        events = []

        def add(event):
            events.append((event.mode, event.count, event.value, event.ran))

        out = jax.jit(tap(f, add))(x)
        jax.block_until_ready(out)
        jax.effects_barrier()
        modes = sorted({e[0] for e in events})
        return out, {m: [e[1:] for e in events if e[0] == m] for m in modes}

    return run


ALL = "eager", "jit outside", "jit inside", "grad", "grad of checkpoint"
USES: dict[str, Any] = {
    "eager": S,
    "jit outside": lambda f: jax.jit(S(f)),
    "jit inside": lambda f: S(jax.jit(f)),
    "grad": lambda f: S(jax.jit(_grad(f))),
    "grad of checkpoint": lambda f: jax.jit(S(_grad(jax.checkpoint(f)))),
}
_LARGEST = Fold(
    lambda value: jax.tree.map(jnp.zeros_like, value),
    lambda acc, x: jax.tree.map(jnp.maximum, acc, x),
)
ROWS = {}  # of the uses that reduce
for name, row in REDUCERS.items():
    ROWS |= dict.fromkeys((name, f"{name}, eager", f"{name} of grad"), row)
    USES[name] = lambda f, r=row.reducer: jax.jit(S(f, reduce=r))
    USES[f"{name}, eager"] = lambda f, r=row.reducer: S(f, reduce=r)
    USES[f"{name} of grad"] = lambda f, r=row.reducer: jax.jit(S(_grad(f), reduce=r))
USES |= {
    "transform": lambda f: jax.jit(S(f, transform=lambda x: _first(x).mean())),
    "summarize of grad": lambda f: jax.jit(S(_grad(f), transform=eqx_sow.summarize)),
    "plant": lambda f: jax.jit(plant(f, {"a": _double})),
    "plant, captured": lambda f: jax.jit(S(plant(f, {"a": _double}))),
    "grad of plant": lambda f: jax.jit(_grad(plant(f, {"a": _double}))),
    "planted back": lambda f: jax.jit(_planted_back(f)),
    "gradient of planted": lambda f: jax.jit(_gradient_of_planted(f)),
    "tap": _tapped,
    "tap of grad": lambda f: _tapped(_grad(f)),
}
# What is captured there is not the value as it was sown.
OTHER_SHAPE = {"transform", "summarize of grad"}
OTHER_SHAPE |= {use for use, row in ROWS.items() if not row.like_the_value}


OFTEN = "eager", "grad of checkpoint"
SOMETIMES = "last of grad", "fold", "planted back"


def _cases():
    for mesh in MESHES:
        for program in PROGRAMS:
            for use in USES:
                differentiates = "grad" in use or use == "planted back"
                if program in NO_GRAD and differentiates:
                    continue
                if program in NO_OTHER_AXIS and "m" in MESHES[mesh].spec:
                    continue
                # JAX cannot make a gradient that is zero there.
                if (mesh, program, use) == ("not set", "unused", "gradient of planted"):
                    continue
                if mesh == "two axes" and use in OFTEN:
                    marks: Any = ()
                elif mesh == "two axes" and use in SOMETIMES:
                    marks = pytest.mark.slow
                else:
                    marks = pytest.mark.every
                yield pytest.param(mesh, program, use, marks=marks)


def assert_same(value, reference):
    assert jax.tree.structure(value) == jax.tree.structure(reference)
    for x, y in zip(jax.tree.leaves(value), jax.tree.leaves(reference)):
        assert np.shape(x) == np.shape(y)
        if getattr(x, "dtype", None) == jax.dtypes.float0:
            continue
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-5, atol=1e-6)


def spec_of(x):
    """Without the forms that `PartitionSpec` has for the same."""
    aval = jax.typeof(x) if isinstance(x, jax.Array) else x
    one = lambda a: a[0] if isinstance(a, tuple) and len(a) == 1 else a
    spec = list(map(one, aval.sharding.spec))
    return (*spec, *[None] * (aval.ndim - len(spec)))


@pytest.mark.parametrize("mesh, program, use", list(_cases()))
def test_program(mesh, program, use):
    mesh, (fn, lead), use_of = MESHES[mesh], PROGRAMS[program], USES[use]
    seen = []

    def marked(value, name):
        seen.append(jax.tree.map(jax.typeof, value))
        return eqx_sow.sow(value, name)

    reference = use_of(ft.partial(fn, sow=marked))(X)
    seen.clear()
    with mesh.context():
        out = use_of(ft.partial(fn, sow=marked))(mesh.put(X))
    assert_same(out, reference)
    saved = type(out) is tuple and isinstance(out[1], eqx_sow.Intermediates)
    captured = out[1]["a"] if saved else {}
    if use in OTHER_SHAPE or not mesh.told:
        return
    if use in ROWS and ROWS[use].in_order:
        lead = [a for a in lead if a is not None] + [None] * len(ROWS[use].lead)
    over = dict(zip("dm", mesh.spec))
    lead = [over.get(a) for a in lead]
    for mode in captured.keys() - {"count"}:
        value, sown = _first(captured[mode]), _first(seen)
        expected = (*lead, *spec_of(sown))
        assert spec_of(value) == expected[len(expected) - value.ndim :], mode


# --- `jax.shard_map` over one of two axes ---
TYPES = {t.name[0]: t for t in (AxisType.Explicit, AxisType.Auto)}
INSIDE = "plain", "tree", "scan", "hoisted", "cond", "both branches", "vmap"
INSIDE = *INSIDE, "cond in scan", "while"


def _cases_inside():
    for types in ("EE", "EA", "AE", "AA"):
        for told in (True, False):
            for program in INSIDE:
                for use in ("jit outside", "grad of checkpoint", "planted back"):
                    if program in NO_GRAD and use != "jit outside":
                        continue
                    if not told or use != OFTEN[-1]:
                        marks: Any = pytest.mark.every
                    elif (types, program) == ("EA", "cond in scan"):
                        marks = ()
                    else:
                        marks = pytest.mark.slow
                    yield pytest.param(types, told, program, use, marks=marks)


@pytest.mark.parametrize("types, told, program, use", list(_cases_inside()))
def test_shard_map_over_one_axis(types, told, program, use):
    fn, use_of = PROGRAMS[program][0], USES[use]
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=tuple(TYPES[t] for t in types))

    def on_devices(x):
        part = ft.partial(fn, sow=eqx_sow.sow)
        over = P("d")
        return jax.shard_map(
            part, mesh=mesh, in_specs=over, out_specs=over, axis_names={"d"}
        )(x)

    spec = P("d" if types[0] == "E" else None, "m" if types[1] == "E" else None)
    with jax.set_mesh(mesh) if told else contextlib.nullcontext():
        out = use_of(on_devices)(jax.device_put(X, NamedSharding(mesh, spec)))
    rows = [use_of(ft.partial(fn, sow=eqx_sow.sow))(x) for x in X.reshape(4, 2, 4)]
    if use == "planted back":
        np.testing.assert_allclose(out, np.concatenate(rows), rtol=1e-5)
        return
    np.testing.assert_allclose(out[0], np.concatenate([r[0] for r in rows]), rtol=1e-5)
    for mode, value in out[1]["a"].items():
        expected = jax.tree.map(
            lambda *xs: np.stack(xs), *[r[1]["a"][mode] for r in rows]
        )
        # What is the same on all devices has no axis for them.
        assert_same(_first(value), _first(expected))
        if mode != "count" and told:
            over = spec_of(_first(value))
            assert over[0] == (None if types[0] == "A" else "d")
            # JAX 0.10 forgets it where a `shard_map` over an automatic axis ends.
            if types[1] == "E" and (types[0] == "E" or jax.__version_info__ > (0, 11)):
                assert over[-1] == "m"


# --- a model ---
@pytest.mark.slow
@pytest.mark.parametrize("told", [True, False])
def test_capture(told):
    mesh = jax.make_mesh((8,), ("d",))
    model = eqx.nn.MLP(4, 3, 8, 2, key=jax.random.key(0))

    @eqx.filter_grad
    def grad(model, x):
        return (jax.vmap(model)(x) ** 2).sum()

    saved = eqx.filter_jit(S(grad, capture=True))
    expected = saved(model, X)
    on_mesh = eqx.filter_shard(model, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh) if told else contextlib.nullcontext():
        grads, captured = saved(on_mesh, jax.device_put(X, NamedSharding(mesh, P("d"))))
    assert_same((eqx.filter(grads, eqx.is_array), captured), expected)
    for modes in captured.values():
        for value in modes.values():
            assert value.sharding.spec[0] == "d"


def test_nothing_is_gathered():
    mesh = MESHES["one axis"]
    for fn in (cond, cond_in_scan, lanes(both), lanes_in_scan, while_):
        with mesh.context():
            saved = jax.jit(S(ft.partial(fn, sow=eqx_sow.sow)))
            text = saved.lower(mesh.put(X)).compile().as_text()
        assert "all-gather" not in text, fn


@pytest.mark.slow
def test_plant_on_a_mesh_that_only_the_shard_map_knows(call):
    mesh = jax.make_mesh((8,), ("d",))

    def f(x, sow=eqx_sow.sow):
        x = jax.sharding.reshard(x, NamedSharding(mesh, P("d")))
        body = lambda x: sow(jnp.sin(x), "a") * 2
        return jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(x)

    # Neither the input nor what is planted is on the mesh.
    new = jnp.arange(32.0).reshape(8, 1, 4)
    got = call(plant(f, {"a": new}), X)
    np.testing.assert_allclose(got, 2 * new.reshape(8, 4))
    events = []
    call(tap(f, events.append), X)
    jax.effects_barrier()
    assert {e.device["d"] for e in events} == {*range(8)}


def test_plant_where_the_axis_of_the_shard_map_is_automatic(call):
    types = AxisType.Explicit, AxisType.Auto
    mesh = jax.make_mesh((2, 4), ("m", "d"), axis_types=types)
    f = jax.shard_map(
        lambda x: eqx_sow.sow(jnp.sin(x), "a") * 2,
        mesh=mesh,
        in_specs=P("d"),
        out_specs=P("d"),
        axis_names={"d"},
    )
    new = np.arange(32.0, dtype=np.float32).reshape(4, 2, 4)
    x = jax.device_put(X, NamedSharding(mesh, P()))
    got = call(plant(f, {"a": new}), x)
    np.testing.assert_allclose(got, 2 * new.reshape(8, 4))


@pytest.mark.parametrize("checkpointed", ["inside", "outside"])
def test_plant_in_a_derivative_of_a_shard_map(call, checkpointed):
    """The derivative is a `shard_map` of its own, in which nothing is planted."""
    mesh = jax.make_mesh((8,), ("d",))
    inside, outside = [jax.checkpoint, lambda f: f][
        :: 1 if checkpointed == "inside" else -1
    ]

    def f(x):
        body = inside(lambda x: jnp.sin(eqx_sow.sow(jnp.sin(x), "a")))
        return jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(x)

    def linearized(x):
        x = jax.sharding.reshard(x, NamedSharding(mesh, P("d")))
        return jax.linearize(f, x)[1](x)

    want = jax.jvp(lambda x: jnp.sin(jnp.sin(x)), (X,), (X,))[1]
    saved = outside(linearized)
    _, got = call(S(saved), X)
    values = {"a": got["a"]["primal"]}
    if checkpointed == "outside":
        np.testing.assert_allclose(call(plant(saved, values), X), want, rtol=1e-5)
    else:
        with pytest.raises(eqx_sow.SowError, match="again, without the mark"):
            call(plant(saved, values), X)
    tangents = {"a": got["a"]["tangent"]}
    again = plant(saved, tangents, mode="tangent")
    np.testing.assert_allclose(call(again, X), want, rtol=1e-5)


@under("eager", "checkpoint", argument="around")
def test_vmap_of_the_derivative_of_a_branch_on_devices(call, around):
    """What a branch keeps for the derivative leaves the first `shard_map`."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

    def body(x):
        sown = lambda x: jnp.sin(eqx_sow.sow(x * x, "a"))
        return lax.cond(x[0, 0] > 0.5, sown, lambda x: 3 * x, x)

    def linearized(x):
        f = jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
        return jax.linearize(f, x)[1](jnp.ones_like(x))

    xs = jnp.stack([X, 1 - X])
    runs = xs[:, :, :1] > 0.5
    out, got = call(jax.vmap(S(around(linearized))), xs)
    np.testing.assert_allclose(out, jnp.where(runs, 2 * xs * jnp.cos(xs * xs), 3), 1e-6)
    for mode, want in {"primal": xs * xs, "tangent": 2 * xs}.items():
        want = jnp.where(runs, want, 0)[:, :, None]
        np.testing.assert_allclose(got["a"][mode].reshape(want.shape), want, 1e-6)


def _on_two_devices(fn):
    def f(x):
        mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
        x = jax.sharding.reshard(x, NamedSharding(mesh, P("d")))
        return jax.shard_map(fn, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(x)

    return f


@pytest.mark.slow
def test_plant_of_a_value_for_each_iteration_on_a_device(call):
    def on_device(x):
        body = lambda c, _: (c * eqx_sow.sow(jnp.sin(x), "a"), None)
        return lax.scan(body, x, None, length=3)[0].sum()

    new = jnp.arange(1.0, 25).reshape(2, 3, 1, 4)
    got = call(plant(_on_two_devices(jax.grad(on_device)), {"a": new}), X[:2])
    others = sum(new[:, i - 1, 0] * new[:, i - 2, 0] for i in range(3))
    want = new.prod(1)[:, 0] + jnp.cos(X[:2]) * X[:2] * others
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_plant_of_one_value_for_all_lanes_on_a_device(call):
    def on_device(x):
        pair = lambda y: eqx_sow.sow((jnp.sin(x), y), "a")[1]
        return jax.vmap(pair)(x[0])

    f = _on_two_devices(on_device)
    captured = S(f)(X[:2])[1]
    with pytest.raises(
        eqx_sow.SowError, match="cannot be checked in a `jax.shard_map`"
    ):
        call(plant(f, captured), X[:2])
    # Of a single lane, there is nothing to check.
    f = _on_two_devices(lambda x: on_device(x[:, :1]))
    double = jax.tree.map(lambda x: 2 * x, S(f)(X[:2])[1])
    np.testing.assert_array_equal(call(plant(f, double), X[:2]), 2 * X[:2, 0])


def test_cotangent_of_a_leaf_that_all_devices_share(call):
    mesh = jax.make_mesh((2,), ("d",))
    f = jax.shard_map(
        lambda x, w: jnp.add(*eqx_sow.sow((x * w, w), "a")),
        mesh=mesh,
        in_specs=(P("d"), P()),
        out_specs=P("d"),
    )
    x = jax.device_put(X[:2], NamedSharding(mesh, P("d")))
    grad = jax.jit(jax.grad(lambda w: f(x, w).sum()))
    w = jax.device_put(X[:1], NamedSharding(mesh, P()))
    _, captured = call(S(grad), w)
    product, shared = captured["a"]["primal"]
    assert product.shape == shared.shape == (2, 1, 4)
    of_product, of_shared = captured["a"]["cotangent"]
    np.testing.assert_allclose(of_product, np.ones((2, 1, 4)))
    # The gradient with respect to a zero that is added to it: the total.
    assert of_shared.shape == w.shape
    np.testing.assert_allclose(of_shared, np.full((1, 4), 2.0))
    again = call(plant(grad, captured, mode="cotangent"), w)
    np.testing.assert_allclose(again, grad(w), rtol=1e-6)


def _grad_on_two_devices(loss):
    mesh = jax.make_mesh((2,), ("d",), (AxisType.Auto,), devices=jax.devices()[:2])
    grad = lambda x: jax.grad(loss)(x[0])[None]
    return jax.shard_map(grad, mesh=mesh, in_specs=P("d"), out_specs=P("d"))


@pytest.mark.parametrize("shared", [jnp.ones(4), np.ones(4, np.float32)])
def test_cotangent_of_a_leaf_that_all_devices_share_and_others_plant(call, shared):
    """It is still one for all of them: the program does not know what is planted."""

    def loss(x):
        h, c = eqx_sow.sow((x * 2, shared), "a")
        return (jnp.sin(h) * c).sum()

    h, c = X[:2] + 1, X[2:4]
    planted = plant(_grad_on_two_devices(loss), {"a": (h, c)})
    out, captured = call(S(planted), X[:2])
    np.testing.assert_allclose(out, 2 * jnp.cos(h) * c, rtol=1e-6)
    for got, want in zip(captured["a"]["primal"], (h, c)):
        np.testing.assert_array_equal(got, want)
    of_h, of_shared = captured["a"]["cotangent"]
    np.testing.assert_allclose(of_h, jnp.cos(h) * c, rtol=1e-6)
    np.testing.assert_allclose(of_shared, jnp.sin(h).sum(0), rtol=1e-6)


@pytest.mark.parametrize("planted", [False, True])
def test_a_total_in_a_branch_of_some_devices(planted):
    """JAX would let the devices there wait for the others, for ever."""

    def make(vary):
        def branch(x):
            c = jnp.full(4, 3.0)
            c = lax.pcast(c, "d", to="varying") if vary else c
            h, c = eqx_sow.sow((x * 2, c), "a")
            return (jnp.sin(h) * c).sum()

        f = _grad_on_two_devices(lambda x: lax.cond(x[0] > 0, branch, jnp.sum, x))
        return plant(f, {"a": lambda a: (a[0], a[1] / 2)}) if planted else f

    x = jnp.stack([X[0], X[0].at[0].set(-1.0)])
    where = r"The cotangent of .*'a'.* along the mesh axis 'd'.* would wait"
    for wrap in S, ft.partial(plant, values={"a": lambda a: a}, mode="cotangent"):
        with pytest.raises(eqx_sow.UnsupportedPrimitiveError, match=where):
            wrap(make(False))(x)
    factor = 1.5 if planted else 3.0
    want = np.stack([2 * factor * np.cos(2 * x[0]), np.ones(4)])
    for vary, modes in (False, "primal"), (True, None):
        out, captured = S(make(vary), modes=modes)(x)
        np.testing.assert_allclose(out, want, rtol=1e-5)
        assert captured["a"]["count"].tolist() == [1, 0]
        h, c = captured["a"]["primal"]
        np.testing.assert_allclose(h[0], 2 * x[0])
        np.testing.assert_allclose(c[0], np.full(4, factor))
    of_h, of_c = captured["a"]["cotangent"]
    np.testing.assert_allclose(
        of_h, [factor * np.cos(2 * x[0]), np.zeros(4)], rtol=1e-5
    )
    # What is planted takes part in the derivative, as a function of what was there.
    total = np.sin(2 * x[0])
    np.testing.assert_allclose(of_c, [total, np.zeros(4)], rtol=1e-5)


# --- meshes within a mesh ---
def _inside(fn, spec=P("d", "m"), axes=None):
    return jax.sharding.auto_axes(fn, axes=axes, out_sharding=spec)


def _explicit_inside(fn):
    return jax.sharding.explicit_axes(fn, in_sharding=P("d", "m"))


W = jnp.eye(4) + 0.1


def _layer(x, sow):
    return jnp.tanh(sow(jnp.sin(x @ W), "a"))


def _product(x, sow):
    return jnp.tanh(sow(jnp.sin(x) * x, "a"))


def _layers(x, sow, one=_layer, around=lambda fn: fn):
    body = lambda c, i: (around(lambda c: one(c, sow))(c) * i, None)
    return lax.scan(body, x, jnp.arange(1.0, 4.0))[0]


# Each as it is written for meshes, given what changes the mesh; and around which types
# of axes. The same program without any mesh is one with `around=lambda fn: fn`.
WITHIN = {
    "auto": ("E", _inside, lambda x, sow, around: around(lambda x: _layer(x, sow))(x)),
    "auto over one axis": (
        "E",
        ft.partial(_inside, axes="m"),
        lambda x, sow, around: around(lambda x: _layer(x, sow))(x),
    ),
    "scan inside": (
        "E",
        _inside,
        lambda x, sow, around: around(lambda x: _layers(x, sow))(x),
    ),
    "inside a scan": (
        "E",
        _inside,
        lambda x, sow, around: _layers(x, sow, around=around),
    ),
    "checkpoint in a scan": (
        "E",
        _inside,
        lambda x, sow, around: _layers(
            x, sow, around=lambda fn: jax.checkpoint(around(fn))
        ),
    ),
    "cond, jit": (
        "E",
        _inside,
        lambda x, sow, around: around(
            jax.jit(lambda x: lax.cond(x.sum() > 0, lambda x: _layer(x, sow), abs, x))
        )(x),
    ),
    "explicit": (
        "A",
        _explicit_inside,
        lambda x, sow, around: around(lambda x: _layers(x, sow, _product))(x),
    ),
    "vmap in explicit": (
        "A",
        _explicit_inside,
        lambda x, sow, around: around(jax.vmap(lambda x: _product(x, sow)))(x),
    ),
    "explicit in auto": (
        "E",
        lambda fn: _inside(_explicit_inside(fn)),
        lambda x, sow, around: around(lambda x: _product(x, sow))(x),
    ),
}


def _everything(fn, x, sow=eqx_sow.sow):
    """What all the options make of a function: in one program, as compiling is slow."""
    f = lambda x: fn(x, sow)
    total = Fold(jnp.zeros(4), lambda acc, x: acc + x.sum(0))
    saved = S(f)(x)[1]
    scaled = lambda x: (x * 2).mean(-1)
    captured_loss = lambda x: sum(
        (v**2).sum() for v in jax.tree.leaves(S(f)(x)[1]["a"]["primal"])
    )
    return dict(
        saved=saved["a"]["primal"],
        later=saved["a"]["primal"].mean(-1) + 1,
        transform=S(f, transform=scaled)(x)[1]["a"]["primal"],
        summary=S(f, transform=eqx_sow.summarize)(x)[1]["a"]["primal"].rms,
        batched=S(f, transform=eqx_sow.batched(jnp.max))(x)[1]["a"]["primal"],
        last=S(f, reduce=Last())(x)[1]["a"]["primal"],
        fold=S(f, reduce=total)(x)[1]["a"]["primal"],
        largest=S(f, reduce=_LARGEST)(x)[1]["a"]["primal"],
        buffer=S(f, reduce=Buffer(2))(x)[1]["a"]["primal"],
        centered=plant(f, {"a": lambda a: a - a.mean()})(x),
        doubled=plant(f, {"a": saved["a"]["primal"] * 2})(x),
        loss=jax.grad(captured_loss)(x),
        cotangent=S(_grad(f))(x)[1]["a"]["cotangent"],
    )


@pytest.mark.parametrize("program", WITHIN)
def test_mesh_within_a_mesh(program):
    types, around, fn = WITHIN[program]
    plain = lambda x, sow: fn(x, sow, lambda fn: fn)
    reference = jax.jit(ft.partial(_everything, plain))(X)
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(TYPES[types],) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("d", "m")))
        got = jax.jit(ft.partial(_everything, lambda x, sow: fn(x, sow, around)))(x)
        tapped = _tapped(lambda x: fn(x, eqx_sow.sow, around))(x)[1]["primal"]
        eager = S(lambda x: fn(x, eqx_sow.sow, around))(x)[1]
        eqx_sow.tabulate(eager)
    assert_same(got, reference)
    values = reference["saved"].reshape(-1, *X.shape)
    for i, value, _ in tapped:
        np.testing.assert_allclose(value, values[i], rtol=1e-5)
    assert len(tapped) == len(values)
    if types == "E":
        n = reference["saved"].ndim
        assert spec_of(got["saved"])[n - 2] == "d"
        assert spec_of(got["largest"]) == spec_of(got["last"])
        assert spec_of(eager["a"]["primal"])[n - 2] == "d"


def test_collectives_of_a_mesh_within_a_mesh():
    """No more of them than in the program that returns the value by hand."""
    mesh = jax.make_mesh((4, 2), ("d", "m"))

    def collectives(fn, x):
        text = jax.jit(fn).lower(x).compile().as_text()
        names = "all-gather", "all-reduce", "all-to-all", "collective-permute"
        return {n: len(re.findall(rf" {n}(?:-start)?\(", text)) for n in names}

    def attention(q, sow):
        scores = sow(jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, q)), "a")
        return jnp.einsum("bhst,bthd->bshd", scores, q)

    over, scores = P("d", None, "m"), P("d", "m")

    def by_hand(q):
        def inside(q):
            kept = []
            out = attention(q, lambda x, _: kept.append(x) or x)
            return out, *kept

        return jax.sharding.auto_axes(inside, out_sharding=(over, scores))(q)

    def marked(q):
        inside = lambda q: attention(q, eqx_sow.sow)
        return jax.sharding.auto_axes(inside, out_sharding=over)(q)

    with jax.set_mesh(mesh):
        q = jax.sharding.reshard(jnp.ones((4, 3, 2, 5)), over)
        saved = lambda q: S(marked)(q)[1]["a"]["primal"]
        assert collectives(saved, q) == collectives(lambda q: by_hand(q)[1], q)
        np.testing.assert_allclose(jax.jit(saved)(q), by_hand(q)[1], rtol=1e-6)
        # Of a loss as well, and its gradient.
        loss = lambda fn: lambda q: (fn(q) ** 2).sum()
        assert collectives(jax.grad(loss(saved)), q) == collectives(
            jax.grad(loss(lambda q: by_hand(q)[1])), q
        )


def test_mesh_within_a_shard_map_over_one_axis():
    mesh = jax.make_mesh((4, 2), ("d", "m"))

    def f(x):
        inside = _inside(lambda x: _product(x, eqx_sow.sow), P(None, "m"), "m")
        specs = dict(in_specs=P("d", None), out_specs=P("d", None))
        return jax.shard_map(inside, axis_names={"d"}, **specs)(x)

    def run(x):
        saved = S(f)(x)[1]["a"]["primal"]
        means = S(f, transform=lambda x: x.mean())(x)[1]["a"]["primal"]
        return saved, means, plant(f, {"a": lambda a: a * 2})(x)

    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("d", None)))
        saved, means, doubled = jax.jit(run)(x)
    want = jnp.sin(X) * X
    np.testing.assert_allclose(saved, want.reshape(4, 2, 4), rtol=1e-5)
    np.testing.assert_allclose(means, want.reshape(4, -1).mean(1), rtol=1e-5)
    np.testing.assert_allclose(doubled, jnp.tanh(2 * want), rtol=1e-5)


@under("checkpoint", "jit", "eager", argument="around")
def test_counts_after_a_branch_on_a_mesh_within_a_mesh(call, around):
    """An eager checkpoint leaves a count on the mesh inside, if nothing else does."""
    mark = eqx_sow.sow

    def inner(x):
        return lax.cond(x.sum() > 0, lambda x: mark(x * 2, "a"), lambda x: x, x)

    def f(x):
        auto = jax.sharding.auto_axes(inner, axes="d", out_sharding=P("d", "m"))
        x = around(lambda x: auto(x))(x)
        return mark(mark(x, "a", tag="other") + 1, "b")

    events = []
    add = Fold(0.0, lambda acc, x: acc + x.sum())
    mesh = jax.make_mesh((4, 2), ("d", "m"), (AxisType.Explicit,) * 2)
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    with jax.set_mesh(mesh):
        on_mesh = jax.device_put(x, NamedSharding(mesh, P("d", "m")))
        call(tap(f, lambda e: events.append((e.name, e.count))), on_mesh)
        jax.effects_barrier()
        _, got = call(S(f, reduce=add), on_mesh)
    assert set(events) == {("a", 0), ("b", 0)}
    assert float(got["a"]["primal"]) == 2 * x.sum()
    assert float(got["b"]["primal"]) == (2 * x + 1).sum()


@pytest.mark.parametrize("init", [jnp.zeros((4, 4)), lambda: jnp.zeros((4, 4))])
def test_a_fold_of_what_the_mesh_around_could_not_compute(init):
    """On an explicit mesh, JAX asks how a product over a sharded axis is sharded."""
    mesh = jax.make_mesh((4, 2), ("d", "m"), (AxisType.Explicit,) * 2)
    fold = Fold(init, lambda acc, x: acc + x.T @ x)
    over = P("d", "m")
    f = jax.sharding.auto_axes(lambda x: eqx_sow.sow(2 * x, "a"), out_sharding=over)
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    with jax.set_mesh(mesh):
        _, got = S(f, reduce=fold)(jax.device_put(x, NamedSharding(mesh, over)))
    np.testing.assert_allclose(got["a"]["primal"], 4 * x.T @ x)


def test_counts_of_devices_after_a_scan_on_a_mesh_within_a_mesh(call):
    """The count of `b` is on the mesh around before the scan, as after it."""
    mesh = jax.make_mesh((4, 2), ("d", "m"), (AxisType.Explicit,) * 2)
    over = P("d", "m")

    def f(x):
        inside = lambda x: eqx_sow.sow(jnp.sin(x), "a")
        inside = jax.sharding.auto_axes(inside, out_sharding=over)
        x, _ = lax.scan(lambda x, _: (inside(x), None), x, length=2)
        on_devices = lambda x: eqx_sow.sow(2 * x, "b")
        on_devices = jax.shard_map(on_devices, in_specs=over, out_specs=over)
        return jax.sharding.auto_axes(on_devices, axes="d", out_sharding=over)(x)

    events = []
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    with jax.set_mesh(mesh):
        out = call(tap(f, events.append), jax.device_put(x, NamedSharding(mesh, over)))
        jax.block_until_ready(out)
        jax.effects_barrier()
    want = 2 * np.sin(np.sin(x))
    np.testing.assert_allclose(out, want, rtol=1e-5)
    assert {(e.name, e.count) for e in events} == {("a", 0), ("a", 1), ("b", 0)}
    parts = [np.split(rows, 2, axis=1) for rows in np.split(want, 4)]
    for e in events:
        if e.name == "b":
            part = parts[e.device["d"]][e.device["m"]]
            np.testing.assert_allclose(e.value, part, rtol=1e-5)


def test_a_shard_map_over_an_axis_that_is_explicit_only_inside():
    """What goes in comes from a mesh where it is not known to be sharded."""
    mesh = jax.make_mesh((4,), ("d",), (AxisType.Auto,))

    def f(x):
        inside = lambda x: 2 * eqx_sow.sow(jnp.sin(x), "a")
        inside = jax.shard_map(inside, in_specs=P("d"), out_specs=P("d"))
        return jax.sharding.explicit_axes(inside, in_sharding=P("d"))(x)

    events = []
    with jax.set_mesh(mesh):
        again = jax.jit(lambda x: plant(f, S(f)(x)[1])(x))(X)
        out = jax.jit(tap(f, events.append))(X)
        jax.effects_barrier()
    for got in again, out:
        np.testing.assert_allclose(got, 2 * jnp.sin(X), rtol=1e-6)
    want = np.split(np.sin(X), 4)
    for e in events:
        np.testing.assert_allclose(e.value, want[e.device["d"]], rtol=1e-6)
    assert len(events) == 4


def test_a_shard_map_that_checks_nothing_in_one_that_does():
    """After the inner one JAX forgets what varies over the axis of the outer one."""
    mesh = jax.make_mesh((4, 2), ("d", "m"))

    def inside(x):
        return 2 * eqx_sow.sow(x * x, "inside")

    def on_columns(x):
        inner = jax.shard_map(
            inside, in_specs=P("d"), out_specs=P("d"), axis_names={"d"}, check_vma=False
        )
        return eqx_sow.sow(inner(x), "after")

    def f(x):
        over = P(None, "m")
        return jax.shard_map(
            on_columns, in_specs=over, out_specs=over, axis_names={"m"}
        )(x)

    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("d", "m")))
        got = jax.jit(S(f))(x)[1]
    assert got.axes("inside", "primal") == ("device:m", "device:d")
    columns = np.split(np.asarray(X * X), 2, 1)
    rows = [np.split(column, 4) for column in columns]
    np.testing.assert_allclose(got["inside"]["primal"], rows, rtol=1e-6)
    np.testing.assert_allclose(got["after"]["primal"], 2 * np.stack(columns), 1e-6)


# --- the same uses on each kind of mesh ---
_FOUR = P("d")


def _by_device(fn):
    mesh = jax.make_mesh((4,), ("d",))
    return jax.shard_map(fn, mesh=mesh, in_specs=_FOUR, out_specs=_FOUR)


KINDS = {
    "explicit": lambda fn: fn,
    "auto": lambda fn: _inside(fn, _FOUR),
    "shard_map": _by_device,
}
KIND = pytest.mark.parametrize("kind", KINDS)


@contextlib.contextmanager
def _on_four():
    """Gives the rows of `X`, of which each of four devices has two."""
    mesh = jax.make_mesh((4,), ("d",))
    with jax.set_mesh(mesh):
        yield jax.device_put(X, NamedSharding(mesh, _FOUR))


def _parts(x, kind):
    return np.reshape(x, (4, 2, 4)) if kind == "shard_map" else np.asarray(x)


def _rows(x):
    return jax.vmap(lambda x: 2 * eqx_sow.sow(jnp.sin(x), "s"))(x)


def _steps(x):
    step = lambda x, i: (eqx_sow.sow(jnp.sin(x) + i, "s"), None)
    return lax.scan(step, x, jnp.arange(3.0))[0]


@KIND
def test_planting_what_is_computed_from_all_lanes(kind):
    plan = {"s": eqx_sow.batched(lambda s: s / (1 + jnp.sum(s)))}
    fn = KINDS[kind](_rows)
    with _on_four() as x:
        got = jax.jit(plant(fn, plan))(x)
        grad = jax.jit(jax.grad(lambda x: jnp.sum(plant(fn, plan)(x))))(x)
    # The lanes are those of one device in a `shard_map`.
    sums = jnp.sin(_parts(X, kind)).sum(axis=(-2, -1), keepdims=True)
    np.testing.assert_allclose(
        _parts(got, kind), 2 * jnp.sin(_parts(X, kind)) / (1 + sums), rtol=1e-5
    )
    want = 2 * jnp.cos(_parts(X, kind)) / (1 + sums) ** 2
    np.testing.assert_allclose(_parts(grad, kind), want, rtol=1e-4)


@KIND
def test_iterations_of_events(kind):
    events = []
    with _on_four() as x:
        tap(KINDS[kind](_steps), events.append)(x)
        jax.effects_barrier()
    assert {(e.path, e.iterations) for e in events} == {
        (f"s/{i}", (i,)) for i in range(3)
    }
    x = X
    for i in range(3):
        x = jnp.sin(x) + i
        got = sorted(e.value.tolist() for e in events if e.iterations == (i,))
        want = _parts(x, kind) if kind == "shard_map" else [x]
        np.testing.assert_allclose(got, sorted(np.asarray(want).tolist()), rtol=1e-5)


class _Sin(eqx.Module):
    def __call__(self, x):
        return jnp.sin(x)


@KIND
def test_several_runs_of_a_layer(kind):
    layer = _Sin()
    fn = KINDS[kind](lambda x: layer(layer(x) + 1))
    grad = jax.grad(lambda x: jnp.sum(fn(x)))
    events = []
    with _on_four() as x:
        (got,) = jax.jit(S(grad, capture=_Sin))(x)[1].values()
        planted = jax.jit(plant(fn, {"**": lambda y: 2 * y}, capture=_Sin))(x)
        jax.jit(tap(fn, events.append, capture=_Sin))(x)
        jax.effects_barrier()
    first, g = jnp.sin(X), jnp.cos(jnp.sin(X) + 1)
    for mode, want in {
        "primal": (first, jnp.sin(first + 1)),
        "cotangent": (g, jnp.ones_like(X)),
    }.items():
        for a, b in zip(got[mode], want, strict=True):
            np.testing.assert_allclose(a, _parts(b, kind), rtol=1e-5)
    np.testing.assert_allclose(planted, 2 * jnp.sin(2 * first + 1), rtol=1e-5)
    assert len(events) == (8 if kind == "shard_map" else 2)


@KIND
def test_tables_and_what_is_tapped_only_sometimes(kind):
    fn = KINDS[kind](_rows)
    want = {"s": {"primal": _parts(jnp.sin(X), kind)}}
    for least in (0.5, 9.0):
        events = []
        with _on_four() as x:
            _, got = jax.jit(S(fn))(x)
            when = lambda s, least=least: jnp.max(s) > least
            jax.jit(tap(fn, events.append, when=when))(x)
            jax.effects_barrier()
            assert eqx_sow.tabulate(got) == eqx_sow.tabulate(want)
            assert eqx_sow.compare(got, want).first is None
            wrong = {"s": {"primal": want["s"]["primal"] + 1}}
            assert eqx_sow.compare(got, wrong).first == ("s", "primal")
        # For each device, if any of its lanes is wanted.
        ran = _parts(jnp.sin(X), kind).reshape(-1, 2 if kind == "shard_map" else 8, 4)
        ran = [values for values in ran if values.max() > least]
        by_max = lambda values: values.max()
        got = sorted((e.value for e in events), key=by_max)
        np.testing.assert_allclose(got, sorted(ran, key=by_max), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_while_of_lanes_on_devices(check_vma):
    """Each lane stops by itself, so the counter varies over the devices, of which the
    program does not know. What walks it once more is to find that."""

    def lane(v):
        def body(s):
            h = eqx_sow.sow(s[1] * 1.5, "h")
            return s[0] + 1, eqx_sow.sow(h, "b", tag="other")

        go_on = lambda s: (s[0] < 4) & (s[1].sum() < 2)
        return lax.while_loop(go_on, body, (0, v))[1]

    def fn(x):
        types = (AxisType.Auto,)
        mesh = jax.make_mesh((2,), ("d",), types, devices=jax.devices()[:2])
        lanes = ft.partial(jax.shard_map, in_specs=P("d"), out_specs=P("d"))
        return lanes(jax.vmap(lane), mesh=mesh, check_vma=check_vma)(x)

    def by_hand(v, factor):
        n = 0
        while n < 4 and v.sum() < 2:
            v, n = v * np.float32(factor), n + 1
        return v

    x = np.asarray([[0.1, 0.2], [0.4, 0.6], [0.9, 0.9], [0.2, 0.4]], np.float32)
    for f, factor in (fn, 1.5), (plant(fn, {"h": lambda h: h * 1.2}), 1.8):
        want = np.stack([by_hand(v, factor) for v in x])
        (out, got), other = S(S(f), tag="other")(x)
        for last in out, got["h"]["primal"], other["b"]["primal"]:
            last = np.asarray(last).reshape(want.shape)
            np.testing.assert_allclose(last, want, rtol=1e-5)


def _twice(w):
    return eqx_sow.sow(w, "w") * 2 + 1


@pytest.mark.parametrize(
    "around",
    [
        _twice,
        lambda w: jax.jit(_twice)(w) * 3,
        lambda w: jax.checkpoint(_twice)(w) * 3,
        lambda w: jax.grad(lambda w: (_twice(w) ** 2).sum())(w),
    ],
    ids=["straight", "jit", "checkpoint", "grad"],
)
def test_planting_on_devices_what_varies_where_the_mark_does_not(around):
    fn = lambda v: around(jnp.ones((1, 4))) * v
    planted = lambda v: plant(fn, {"w": lambda _: v})(v)
    mesh = jax.make_mesh((2,), ("d",), (AxisType.Auto,), devices=jax.devices()[:2])
    on_device = ft.partial(jax.shard_map, in_specs=P("d"), out_specs=P("d"))
    got = on_device(planted, mesh=mesh)
    want = lambda x: jnp.concatenate([planted(x[:1]), planted(x[1:])])
    grad = lambda f: jax.grad(lambda x: (f(x) ** 2).sum())
    for one, other in (got, want), (grad(got), grad(want)):
        np.testing.assert_allclose(one(X[:2]), other(X[:2]), rtol=1e-5)


# --- names of vmapped axes, and counts of layers ---
@pytest.mark.sample(1)
@pytest.mark.parametrize("types", ["AA", "EE"])
def test_names_of_vmapped_axes(call, types):
    """On an explicit mesh, JAX itself has no collectives in a jitted vmap."""
    if types == "EE" and call.__name__ == "_jit":
        return
    names, types = ("d", "m"), tuple(TYPES[t] for t in types)
    mesh = jax.make_mesh((4, 2), names, axis_types=types)
    f = lambda sow: jax.vmap(lambda x: jnp.cos(sow(jnp.sin(x))), axis_name="i")
    marked = f(lambda h: eqx_sow.sow(h, "a"))
    centred = lambda h: h - lax.pmean(h, "i")
    largest = lambda h: lax.pmax(h, "i")
    h = jnp.sin(X)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P(*names)))
        _, got = call(S(marked, transform=largest), x)
        np.testing.assert_allclose(got["a"]["primal"], h.max(0))
        _, got = call(S(marked, transform=centred), x)
        np.testing.assert_allclose(got["a"]["primal"], h - h.mean(0)[None], atol=1e-6)
        out = call(plant(marked, {"a": centred}), x)
        np.testing.assert_allclose(out, jnp.cos(h - h.mean(0)[None]), atol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_names_of_vmapped_axes_on_devices(check_vma):
    """The names of the mesh are known, too. (With `check_vma`, JAX has no collectives
    over other names.)"""
    mesh = jax.make_mesh((4,), ("d",))

    def on_device(x):
        return jax.vmap(lambda x: eqx_sow.sow(jnp.sin(x), "a"), axis_name="i")(x)

    over = P("d")
    f = jax.shard_map(
        on_device, mesh=mesh, in_specs=over, out_specs=over, check_vma=check_vma
    )
    h = jnp.sin(X)
    transforms = {
        "i": h.reshape(4, 2, 4).max(1),
        "d": h.reshape(4, 2, 4).max(0),
        ("i", "d"): h.max(0),
    }
    transforms = {k: v for k, v in transforms.items() if k == "d" or not check_vma}
    with jax.set_mesh(mesh):
        for names, expected in transforms.items():
            x = jax.device_put(X, NamedSharding(mesh, over))
            _, got = jax.jit(S(f, transform=lambda h: lax.pmax(h, names)))(x)
            value = np.asarray(got["a"]["primal"])
            np.testing.assert_allclose(value, np.broadcast_to(expected, value.shape))


@pytest.mark.sample(1)
@pytest.mark.parametrize("on_devices", [False, True])
@pytest.mark.parametrize("told", [False, True])
def test_every_counts_for_each_layer(on_devices, told):
    mesh = jax.make_mesh((4,), ("d",))
    layers = [eqx.nn.Linear(4, 4, key=jax.random.key(i)) for i in range(3)]
    stack = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)

    def run(model, x):
        def step(x, _):
            over = lambda x, layer: (jnp.sin(jax.vmap(layer)(x)), None)
            return lax.scan(over, x, model["layers"])[0], None

        return lax.scan(step, x, length=5)[0]

    if on_devices:
        run = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    events = []
    with jax.set_mesh(mesh) if told else contextlib.nullcontext():
        x = jax.device_put(X, NamedSharding(mesh, P("d")))
        model = jax.device_put(dict(layers=stack), NamedSharding(mesh, P()))
        tapped = tap(run, events.append, capture=eqx.nn.Linear, every=3)
        jax.block_until_ready(jax.jit(tapped)(model, x))
        jax.effects_barrier()
    expected = [(i, k) for i in (0, 3) for k in range(3)] * (4 if on_devices else 1)
    assert sorted(e.iterations for e in events) == sorted(expected)


@pytest.mark.sample(1)
def test_spmd_axis_name_in_a_transform():
    """A constraint there is one of all lanes, as at the mark."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    whole = lambda h: lax.with_sharding_constraint(h, P(None))
    over = lambda mark: jax.vmap(lambda x: mark(jnp.sin(x)), spmd_axis_name="d")

    def specs(fn):
        eqns = jax.make_jaxpr(fn)(X).eqns
        found = [e for e in eqns if e.primitive.name == "sharding_constraint"]
        return [tuple(e.params["sharding"].spec) for e in found]

    with jax.set_mesh(mesh):
        saved = S(over(lambda h: eqx_sow.sow(h, "a")), transform=whole)
        assert specs(saved) == specs(over(whole)) != []
