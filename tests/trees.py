"""Random programs as trees, each of which runs in two ways: as a JAX program, and by
hand, with a Python loop for each loop, each lane and each device, where every execution
of a mark is written down. The nodes for meshes are in test_random_meshes.py, those for
symbolic sizes in test_random_sizes.py."""

import collections
import dataclasses as dc
import functools as ft
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from eqx_sow import (
    batched,
    compare,
    plant,
    save_intermediates as S,
    sow,
    SowError,
    summarize,
)
from jax import lax

from .tables import IN_ORDER, pick


class Here(NamedTuple):
    """Where the program is: an index in each axis around, and whether this is run."""

    # Of ("loop" | "vmap" | "device", index, size), outermost first.
    axes: tuple = ()
    ran: bool = True
    conditional: bool = False

    def at(self, kind, i, size):
        return self._replace(axes=(*self.axes, (kind, i, size)))

    def branch(self, ran):
        return self._replace(ran=self.ran and bool(ran), conditional=True)


class Node:
    """`run(x, mark)` is the JAX program, and `by_hand(x, mark, here)` the reference,
    in which `mark` takes `here`, too."""

    def run(self, x, mark) -> Any:
        raise NotImplementedError

    def by_hand(self, x, mark, here) -> Any:
        raise NotImplementedError


@dc.dataclass(frozen=True)
class Op(Node):
    kind: int
    c: float

    def run(self, x, mark=None, here=None):
        c = np.float32(self.c)
        if self.kind == 0:
            return jnp.sin(x) * c
        if self.kind == 1:
            return jnp.tanh(x) * c + np.float32(0.3) * x
        if self.kind == 2:
            return x - c * x.mean()
        if self.kind == 3:
            return x * jnp.cos(c * x)
        return x / (1 + (x * x).sum(-1, keepdims=True)) + c

    by_hand = run


def _marked(kind, x, mark):
    if kind == "dict":
        return mark({"v": x, "sum": x.sum(), "text": "static"})["v"]
    if kind == "unused":
        mark(x * 2)
        return x
    return mark(x)


@dc.dataclass(frozen=True)
class Mark(Node):
    name: str
    kind: str

    def run(self, x, mark):
        return _marked(self.kind, x, lambda v: mark(v, self.name))

    def by_hand(self, x, mark, here):
        return _marked(self.kind, x, lambda v: mark(v, self.name, here))


@dc.dataclass(frozen=True)
class Seq(Node):
    nodes: tuple

    def run(self, x, mark):
        for node in self.nodes:
            x = node.run(x, mark)
        return x

    def by_hand(self, x, mark, here):
        for node in self.nodes:
            x = node.by_hand(x, mark, here)
        return x


@dc.dataclass(frozen=True)
class Scan(Node):
    body: Any
    length: int
    reverse: bool

    def run(self, x, mark):
        body = lambda c, t: (self.body.run(c * t, mark), None)
        ts = 1 + np.float32(0.1) * jnp.arange(self.length, dtype=np.float32)
        return lax.scan(body, x, ts, reverse=self.reverse)[0]

    def by_hand(self, x, mark, here):
        steps = range(self.length)
        for i in reversed(steps) if self.reverse else steps:
            t = np.float32(1 + 0.1 * i)
            x = self.body.by_hand(x * t, mark, here.at("loop", i, self.length))
        return x


@dc.dataclass(frozen=True)
class While(Node):
    body: Any
    n: int

    def run(self, x, mark):
        step = lambda s: (s[0] + 1, self.body.run(s[1], mark))
        return lax.while_loop(lambda s: s[0] < self.n, step, (0, x))[1]

    def by_hand(self, x, mark, here):
        self.body.by_hand(x, mark, here.branch(False))
        for _ in range(self.n):
            x = self.body.by_hand(x, mark, here.branch(True))
        return x


@dc.dataclass(frozen=True)
class Cond(Node):
    branches: tuple
    least: float

    def run(self, x, mark):
        no, yes = (lambda x, b=b: b.run(x, mark) for b in self.branches)
        return lax.cond(x.sum() > np.float32(self.least), yes, no, x)

    def by_hand(self, x, mark, here):
        which = bool(x.sum() > np.float32(self.least))
        runs = (not which, which)
        outs = [b.by_hand(x, mark, here.branch(r)) for b, r in zip(self.branches, runs)]
        return outs[which]


CALLS = pick("jit", "checkpoint", "filter_jit", "checkpoint_dots")


@dc.dataclass(frozen=True)
class Call(Node):
    how: str
    body: Any

    def run(self, x, mark):
        return CALLS[self.how](lambda x: self.body.run(x, mark))(x)

    def by_hand(self, x, mark, here):
        return self.body.by_hand(x, mark, here)


@dc.dataclass(frozen=True)
class Rows(Node):
    """A vmap over the leading axis."""

    body: Any

    def run(self, x, mark):
        return jax.vmap(lambda x: self.body.run(x, mark))(x)

    def by_hand(self, x, mark, here):
        n = len(x)
        return jnp.stack(
            [self.body.by_hand(x[i], mark, here.at("vmap", i, n)) for i in range(n)]
        )


def walk(node):
    yield node
    children = getattr(node, "nodes", ()) or getattr(node, "branches", ())
    for child in children or ((node.body,) if hasattr(node, "body") else ()):
        yield from walk(child)


def has(node, *kinds):
    return any(isinstance(n, kinds) for n in walk(node))


# --- by hand ---


def _arrays(tree):
    return [x for x in jtu.tree_leaves(tree) if eqx.is_array(x)]


def _map(fn, *trees) -> Any:
    leaf = lambda x, *xs: fn(x, *xs) if eqx.is_array(x) else x
    return jtu.tree_map(leaf, *trees)


class Execution(NamedTuple):
    name: str
    here: Here
    value: Any

    @property
    def loops(self):
        return tuple(a for a in self.here.axes if a[0] == "loop")

    @property
    def lanes(self):
        return tuple(a for a in self.here.axes if a[0] == "vmap")

    @property
    def on_devices(self):
        return any(a[0] == "device" for a in self.here.axes)


def by_hand(program, x, edit=None):
    """The output, and each execution of each mark."""
    taken: list[Execution] = []

    def mark(value, name, here):
        value = edit(value, name, len(taken)) if edit else value
        taken.append(Execution(name, here, value))
        return value

    return program.by_hand(x, mark, Here()), taken


def cotangents(program, x, loss):
    """Of each execution: the gradient with respect to a zero that is added there."""
    zeros = [_map(jnp.zeros_like, e.value) for e in by_hand(program, x)[1]]
    arrays, static = eqx.partition(zeros, eqx.is_array)

    def perturbed(arrays):
        zeros = eqx.combine(arrays, static)
        add = lambda value, _, i: _map(jnp.add, value, zeros[i])
        return loss(by_hand(program, x, add)[0])

    return eqx.combine(jax.grad(perturbed)(arrays), static)


def gathered(taken, values=None):
    """What has to come back: `{name: (value, count)}`. The last execution of an entry
    is what it has."""
    values = [e.value for e in taken] if values is None else values
    entries = {}
    for e, value in zip(taken, values, strict=True):
        sizes = tuple(size for *_, size in e.here.axes)
        at = tuple(i for _, i, _ in e.here.axes)
        if e.name not in entries:
            zeros = _map(lambda v: np.zeros(sizes + v.shape, v.dtype), value)
            counts = np.zeros(sizes, np.int32) if e.here.conditional else None
            entries[e.name] = zeros, counts
        into, counts = entries[e.name]
        if e.here.ran:
            _map(lambda a, v: a.__setitem__(at, v), into, value)
            if counts is not None:
                counts[at] += 1
    return entries


def agree(got, want, mode="primal"):
    assert set(got) == set(want), f"{sorted(got)} instead of {sorted(want)}"
    for name, (value, count) in want.items():
        assert mode in got[name], f"{name} has no {mode}"
        close(got[name][mode], value, f"{name} {mode}")
        assert ("count" in got[name]) == (count is not None), f"{name}: a count"
        if count is not None:
            close(got[name]["count"], count, f"{name} count")


def close(got, want, what):
    here, there = jtu.tree_structure(got), jtu.tree_structure(want)
    assert here == there, f"{what}: {here} instead of {there}"
    for a, b in zip(jtu.tree_leaves(got), jtu.tree_leaves(want)):
        if not eqx.is_array(b):
            assert a == b, f"{what}: {a} instead of {b}"
            continue
        assert a.shape == b.shape, f"{what}: {a.shape} instead of {b.shape}"
        assert a.dtype == b.dtype, f"{what}: {a.dtype} instead of {b.dtype}"
        b = np.asarray(b)
        scale = np.max(np.abs(b), initial=1.0)
        np.testing.assert_allclose(a, b, rtol=5e-4, atol=3e-5 * scale, err_msg=what)


# --- what is asked of a program ---


NOTHING = "what is captured, as there is nothing else to ask"


class Run(NamedTuple):
    program: Any
    # Of one device, and of a concrete size.
    x: Any
    # Runs a function of the input.
    way: Callable
    rng: np.random.Generator

    def f(self, x):
        return self.program.run(x, sow)

    def by_hand(self, edit=None):
        return by_hand(self.program, self.x, edit)

    def pick(self, wanted):
        """A name of whose executions all are wanted."""
        names = collections.defaultdict(list)
        for e in self.by_hand()[1]:
            names[e.name].append(e)
        names = [n for n, es in names.items() if all(map(wanted, es))]
        return names and str(names[self.rng.integers(len(names))]) or None


def _loss(out):
    return (out**2).sum()


def _saved(run):
    got = run.way(S(run.f))
    out, taken = run.by_hand()
    close(got[0], out, "out")
    agree(got[1], gathered(taken))


def _gradient(run):
    _, got = run.way(S(jax.grad(lambda x: _loss(run.f(x)))))
    _, taken = run.by_hand()
    agree(got, gathered(taken))
    values = cotangents(run.program, run.x, _loss)
    agree(got, gathered(taken, values), "cotangent")


def _tangent(run):
    along = lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1]
    got = run.way(S(along(run.f)))
    static: list = []

    def values(x):
        out, taken = by_hand(run.program, x)
        arrays, rest = eqx.partition([e.value for e in taken], eqx.is_array)
        static[:] = rest
        return out, arrays

    out, tangents = along(values)(run.x)
    close(got[0], out, "out")
    _, taken = run.by_hand()
    agree(got[1], gathered(taken))
    agree(got[1], gathered(taken, eqx.combine(tangents, static)), "tangent")


def _loss_of_saved(run):
    def loss(x):
        values = [modes["primal"] for modes in S(run.f)(x)[1].values()]
        return sum((v**2).sum() for v in _arrays(values))

    def by_hand_(x):
        values = [e.value for e in by_hand(run.program, x)[1] if e.here.ran]
        return sum((v**2).sum() for v in _arrays(values))

    close(run.way(jax.grad(loss)), jax.grad(by_hand_)(run.x), "gradient of a loss")


def _transform(run):
    mean = lambda value: sum(v.mean() for v in _arrays(value))
    _, got = run.way(S(run.f, transform=mean))
    _, taken = run.by_hand()
    agree(got, gathered(taken, [mean(e.value) for e in taken]))


def _summaries(run):
    first = lambda value: summarize(_arrays(value)[0])
    _, got = run.way(S(run.f, transform=first))
    got = {n: {**e, "primal": e["primal"].rms} for n, e in got.items()}
    _, taken = run.by_hand()
    rms = [jnp.sqrt((_arrays(e.value)[0] ** 2).mean()) for e in taken]
    agree(got, gathered(taken, rms))


def _batched(run):
    def all_lanes(e):
        axes = [a[0] for a in e.here.axes]
        return not (e.here.conditional and "vmap" in axes) and e.here.ran

    name = run.pick(all_lanes)
    if name is None:
        return NOTHING
    first = lambda value: _arrays(value)[0]
    most = batched(lambda value: jnp.max(first(value)))
    _, got = run.way(S(run.f, names=name, transform=most))
    best: dict = {}
    taken = [e for e in run.by_hand()[1] if e.name == name]
    for e in taken:
        axes = tuple(a for a in e.here.axes if a[0] != "vmap")
        value = np.max(first(e.value))
        here = e.here._replace(axes=axes)
        if e.here.conditional or axes not in best:
            best[axes] = Execution(name, here, value)
        else:
            best[axes] = Execution(name, here, max(value, best[axes].value))
    (got,) = got.values()
    want = gathered(list(best.values()))[name][0]
    close(got["primal"], jnp.asarray(want), f"batched {name}")


def _in_order(taken):
    """`{name: {lanes: values}}`, of each lane in order of execution."""
    order: dict = collections.defaultdict(lambda: collections.defaultdict(list))
    for e in taken:
        values = order[e.name][e.lanes]
        if e.here.ran:
            values.append(e.value)
    return order


def _reduced(run, row):
    # There is no order of execution over devices.
    taken = [e for e in run.by_hand()[1] if not e.on_devices]
    if not taken:
        return NOTHING
    names = sorted({e.name for e in taken})
    _, got = run.way(S(run.f, names=names, reduce=row.reducer))
    zeros = {e.name: _map(jnp.zeros_like, e.value) for e in taken}
    order = _in_order(taken)
    made = [
        Execution(name, Here(lanes), row.by_hand(values, zeros[name]))
        for name, by_lane in order.items()
        for lanes, values in by_lane.items()
    ]
    want = gathered(made)
    assert set(got) == set(want)
    for name, (value, _) in want.items():
        close(got[name]["primal"], value, f"{name}, {row.reducer}")
    return None


def _double(value):
    return _map(lambda x: x * 2 + 1, value)


def _of(name, fn):
    return lambda value, at, i: fn(value, i) if at == name else value


def _plant_function(run):
    name = run.pick(lambda e: True)
    if name is None:
        return NOTHING
    got = run.way(S(plant(run.f, {name: _double})))
    out, taken = run.by_hand(_of(name, lambda value, _: _double(value)))
    close(got[0], out, f"out with {name} planted")
    agree(got[1], gathered(taken))


def _in_while(run):
    inside = [n for w in walk(run.program) if isinstance(w, While) for n in walk(w)]
    return {n.name for n in inside if isinstance(n, Mark)}


def _plant_values(run):
    """What was captured, a bit changed, and the gradient with respect to it, which is
    the cotangent there."""
    in_while = _in_while(run)
    name = run.pick(lambda e: e.name not in in_while)
    if name is None:
        return NOTHING
    change = lambda value: _map(lambda x: x * np.float32(0.9) + 0.05, value)
    differentiable = not in_while

    def planted(x):
        value = change(S(run.f)(x)[1][name]["primal"])
        arrays, static = eqx.partition(value, eqx.is_array)

        def f(arrays):
            return plant(run.f, {name: eqx.combine(arrays, static)})(x)

        grad = jax.grad(lambda arrays: _loss(f(arrays)))
        return f(arrays), eqx.combine(grad(arrays), static) if differentiable else None

    out, grad = run.way(planted)
    # The values that it has without them, whatever is planted before.
    before = run.by_hand()[1]
    new = [_map(lambda v: v, change(e.value)) for e in before]
    edit = _of(name, lambda _, i: new[i])
    want, taken = run.by_hand(edit)
    close(out, want, f"out with values of {name} planted")
    if differentiable:
        arrays, static = eqx.partition(new, eqx.is_array)

        def loss(arrays):
            values = eqx.combine(arrays, static)
            return _loss(run.by_hand(_of(name, lambda _, i: values[i]))[0])

        grads = eqx.combine(jax.grad(loss)(arrays), static)
        close(grad, gathered(taken, grads)[name][0], f"gradient of planted {name}")


def _plant_saved(run):
    if has(run.program, While):
        return NOTHING
    again = lambda x: plant(run.f, S(run.f)(x)[1])(x)
    close(run.way(again), run.by_hand()[0], "out with what was saved planted")


def _iteration(run):
    """The last one, of a loop around."""
    in_while = _in_while(run)
    one = lambda e: len(e.loops) == 1 == len(e.here.axes) and e.name not in in_while
    name = run.pick(one)
    if name is None:
        return NOTHING
    _, got = run.way(S(run.f, names=f"{name}/-1"))
    taken = [e for e in run.by_hand()[1] if e.name == name]
    ((_, _, size),) = taken[0].here.axes
    last = [e for e in taken if e.here.axes[0][1] == size - 1]
    here = lambda e: e.here._replace(axes=())
    want = gathered([Execution(name, here(e), e.value) for e in last])
    (entry,) = got.values()
    agree({name: entry}, want)


def _compared(run):
    _, got = run.way(S(run.f))
    want = {
        name: {"primal": value}
        for name, (value, _) in gathered(run.by_hand()[1]).items()
    }
    assert compare(got, want, rtol=2e-3, atol=1e-4).first is None
    if want:
        name = run.pick(lambda e: True)
        value = want[name]["primal"]
        wrong = {**want, name: {"primal": _map(lambda x: x + 1, value)}}
        assert compare(got, wrong).first == (name, "primal")


# Those that differentiate backwards, and need programs without a `while_loop`.
REVERSE = {"gradient": _gradient, "loss of saved": _loss_of_saved}
FEATURES = {
    "saved": _saved,
    "tangent": _tangent,
    "transform": _transform,
    "summaries": _summaries,
    "batched": _batched,
    **{name: ft.partial(_reduced, row=row) for name, row in IN_ORDER.items()},
    "plant a function": _plant_function,
    "plant values": _plant_values,
    "plant what was saved": _plant_saved,
    "iteration": _iteration,
    "compare": _compared,
    **REVERSE,
}


# --- drawing them ---


class Names:
    def __init__(self):
        self.n = 0

    def __call__(self):
        self.n += 1
        return f"n{self.n}"


def draw_op(rng):
    return Op(int(rng.integers(5)), round(float(rng.uniform(0.5, 1.2)), 2))


def draw_mark(rng, names):
    return Mark(names(), str(rng.choice(["v", "v", "dict", "unused"])))


# --- running them ---


class Plan(NamedTuple):
    seed: int
    feature: str
    program: Any
    # On one device, and of a concrete size.
    x: Any
    # Runs a function of the input.
    way: Callable
    rng: np.random.Generator
    about: str

    def __str__(self):
        return f"seed {self.seed}: {self.feature}, {self.about}\n{self.program}"

    def unmarked(self):
        """What the feature does, without the library."""
        f = lambda x: self.program.run(x, lambda value, name: value)
        if self.feature in (*REVERSE, "plant values"):
            return jax.grad(lambda x: _loss(f(x)))
        if self.feature == "tangent":
            return lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1]
        return f


def check(plan: Plan, features=FEATURES, documented: Mapping[str, str] = {}) -> str:
    """What was checked, or why it was not. Of exceptions that JAX has without the
    library, nothing is asked."""
    run = Run(plan.program, plan.x, plan.way, plan.rng)
    try:
        if nothing := features[plan.feature](run):
            _saved(run)
            return nothing
        return plan.feature
    except Exception as error:
        text = " ".join(str(error).split())
        for label, pattern in documented.items():
            if not isinstance(error, AssertionError) and re.search(pattern, text):
                return f"documented: {label}"
        if not isinstance(error, AssertionError | SowError):
            try:
                plan.way(plan.unmarked())
            except Exception as same:
                return f"JAX without a mark: {type(same).__name__}"
        error.add_note(str(plan))
        raise


def within_a_budget(check_seed):
    """`FUZZ_SEED` for other ones, `FUZZ_SECONDS` for more."""
    seed = int(os.environ.get("FUZZ_SEED", "1000"))
    end = time.monotonic() + float(os.environ.get("FUZZ_SECONDS", "60"))
    checked = collections.Counter()
    while time.monotonic() < end:
        try:
            checked[check_seed(seed)] += 1
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        seed += 1
        if seed % 10 == 0:
            jax.clear_caches()
    print(jax.__version__, sum(checked.values()), checked)
