"""Random programs, and an interpreter of them that knows nothing of eqx_sow.

A program is a small tree of the nodes below. `to_jax` turns it into a JAX function with
sows in it; `Oracle` runs it as plain Python (a `for` for every loop and every lane) and
writes down each execution of each sow. What `save_intermediates` must return follows
from that record and from where the site sits in the tree.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from eqx_sow import scope
from jax import lax
from jaxtyping import Array, Float


SIZE = 2


# The nodes. Every program maps a vector `v` to a vector; `o` is a second vector in
# scope, which loops and vmaps set to the value that they were entered with.


@dataclass(frozen=True)
class Op:
    kind: int
    c: float


@dataclass(frozen=True)
class Sow:
    name: str | None
    kind: str
    tag: str = "intermediates"
    spec: bool = False


@dataclass(frozen=True)
class Seq:
    nodes: tuple


@dataclass(frozen=True)
class Scan:
    body: Any
    length: int
    reverse: bool
    xs: bool


@dataclass(frozen=True)
class Fori:
    body: Any
    length: int


@dataclass(frozen=True)
class Map:
    body: Any
    length: int


@dataclass(frozen=True)
class While:
    body: Any
    bound: int
    on_carry: bool


@dataclass(frozen=True)
class Cond:
    on: str
    branches: tuple


@dataclass(frozen=True)
class Call:
    how: str
    body: Any


@dataclass(frozen=True)
class Vmap:
    body: Any
    size: int
    in_axis: int


# With `features`. `expand` makes the first three of the nodes above.


@dataclass(frozen=True)
class Scope:
    name: str
    body: Any


@dataclass(frozen=True)
class Twice:
    """One function, which may be jitted, in two scopes. Without, its marks run twice.
    `expand` gives those of the second run other names."""

    scopes: tuple
    jit: bool
    body: Any


@dataclass(frozen=True)
class Layer:
    """A module, for `capture=`, and how its array comes to its call."""

    index: int
    c: float
    way: str = "as it is"


@dataclass(frozen=True)
class Rule:
    """A function with a derivative that is not its own, and sows in its rule."""

    how: str
    name: str
    c: float


@dataclass(frozen=True)
class Own:
    """A loop of Equinox's. The backward pass of some is a loop of its own. Those of no
    known length end by what `on` says: as they are made, on `v`, or on the carry."""

    how: str
    on: str
    body: Any
    length: int


@dataclass(frozen=True)
class Again:
    """A function whose `bwd` differentiates each step once more in a `loop` of its own,
    where it also marks the cotangent; or the function as a whole."""

    name: str | None
    loop: str
    body: Any
    length: int


@dataclass(frozen=True)
class Grad:
    """The gradient of a function. With `twice`, what `jax.vjp` returned is called a
    second time."""

    twice: bool
    body: Any


@dataclass(frozen=True)
class Beside:
    """A function that runs without a backward pass, and with one. `expand` makes
    `again`: what runs second, whose names are other ones."""

    grad_first: bool
    jit: bool
    body: Any
    again: Any = None


# Arithmetic, shared by both executions. `xp` is numpy or jax.numpy.


def _op(xp, node, v, o):
    c = np.float32(node.c)
    if node.kind == 0:
        return xp.sin(v) * c
    if node.kind == 1:
        return v * c + np.float32(0.3) * o
    if node.kind == 2:
        return xp.tanh(v + c * o[::-1])
    if node.kind == 3:
        return v * v[::-1] * np.float32(0.4) + c
    return v[::-1] * c


VECTOR_KINDS = ("v", "unused", "outer", "outer_unused", "const")
KINDS = (*VECTOR_KINDS, "dict", "mixed")
# Leaves that vary, leaves that do not, and static ones.
BESIDE = "beside"
# A NumPy array beside a leaf that varies. It stays one, in the program under test, too.
NUMPY = "numpy"


def _sown(xp, kind, v, o):
    if kind in ("v", "unused"):
        return v
    if kind in ("outer", "outer_unused"):
        return o
    if kind == "const":
        return xp.asarray(np.array([1.5, -0.5], np.float32))
    if kind == "dict":
        return {"vec": v, "sum": v.sum(), "text": "static"}
    if kind == BESIDE:
        const = xp.asarray(np.array([1.5, -0.5], np.float32))
        return {"const": const, "n": 3, "outer": o, "text": "static", "vec": v}
    if kind == NUMPY:
        return {"const": np.array([1.5, -0.5], np.float32), "vec": v}
    return {"vec": v, "int": xp.asarray(np.array([3, 4], np.int32))}


def _after_sow(kind, v, sown):
    if kind == "v":
        return sown
    if kind in ("outer", "const"):
        return v + np.float32(0.1) * sown
    if kind == "dict":
        return sown["vec"] + np.float32(0.1) * sown["sum"]
    if kind == "mixed":
        return sown["vec"]
    if kind == BESIDE:
        return sown["vec"] + np.float32(0.1) * sown["outer"]
    if kind == NUMPY:
        return sown["vec"] * sown["const"]
    return v


def _weights(n):
    return (1 + np.arange(n, dtype=np.float32)) * np.float32(0.15)


def _spread(xp, v, n):
    return xp.asarray((1 + 0.2 * np.arange(n, dtype=np.float32))[:, None]) * v[None]


def _bump(xp, c, i):
    return c + np.float32(0.1) * xp.asarray(i, np.float32)


def _pred(node, v, o):
    u = v if node.on == "v" else o
    if len(node.branches) == 2:
        return u[0] > np.float32(0.137)
    return abs(u.sum() * np.float32(5.3)) % np.float32(len(node.branches))


def _trips(node, v):
    return abs(v.sum() * np.float32(7.3)) % np.float32(node.bound + 1)


def _go_on(node, i, trips, c):
    going = i < node.bound
    return going & (c.sum() < np.float32(1.613)) if node.on_carry else i < trips


def _as_while(node):
    """Of an `Own`, what says when it ends."""
    return While(node.body, node.length, node.on == "carry")


def _own_trips(node, v):
    as_made = np.int32(node.length)
    return as_made if node.on == "length" else _trips(_as_while(node), v)


def weights(shape):
    n = int(np.prod(shape))
    return np.cos(1.7 * np.arange(n, dtype=np.float32)).reshape(shape)


def _of_gradients(first, second):
    return jnp.tanh(first) + np.float32(0.3) * second


def _of_runs(value, grad):
    return value + np.float32(0.5) * jnp.tanh(grad)


# As a JAX function.


class Module(eqx.Module):
    c: jax.Array

    def __call__(self, v):
        return jnp.sin(v) * self.c


_call = jax.jit(lambda module, v: module(v))
_remat = jax.checkpoint(lambda module, v: module(v))


def _mean(*modules):
    return jtu.tree_map(lambda a, b: 0.5 * (a + b), *modules)


def _one_of_two(module, v):
    return lax.cond(v.sum() > 0, lambda: module, lambda: jtu.tree_map(jnp.copy, module))


# Whatever is done to it on the way, the name is that of where it comes from.
WAYS = {
    "as it is": lambda m, v: m(v),
    "a compiled function of all layers": lambda m, v: _call(m, v),
    "a checkpointed function of all layers": lambda m, v: _remat(m, v),
    "the mean of two": lambda m, v: _mean(m, m)(v),
    "a step away": lambda m, v: eqx.apply_updates(m, jtu.tree_map(jnp.zeros_like, m))(
        v
    ),
    "made anew": lambda m, v: Module(m.c)(v),
    "one of two": lambda m, v: _one_of_two(m, v)(v),
    "one of a stack": lambda m, v: jtu.tree_map(lambda a: jnp.stack([a, a])[1], m)(v),
}


def to_layers(node) -> list[Module]:
    found = {n.index: n.c for n in walk(node) if isinstance(n, Layer)}
    return [
        Module(jnp.float32(found.get(i, 0))) for i in range(1 + max(found, default=-1))
    ]


POLICIES = {
    "checkpoint": None,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
}


def _wrapped(how):
    if how == "jit":
        return jax.jit
    if how == "filter_jit":
        return eqx.filter_jit
    return lambda fn: jax.checkpoint(fn, policy=POLICIES[how])


SLOPE = np.float32(0.8)


def _with_rule(node, sow):
    c = np.float32(node.c)
    if node.how == "jvp":

        @jax.custom_jvp
        def g(v):
            return sow(jnp.sin(v) * c, node.name)

        @g.defjvp
        def _(primals, tangents):
            (v,), (t,) = primals, tangents
            y = sow(jnp.sin(v) * c, node.name)
            return y, SLOPE * t * sow(jnp.cos(v), f"{node.name}_rule")

        return g

    @jax.custom_vjp
    def g(v):
        return sow(jnp.sin(v) * c, node.name)

    def bwd(v, ct):
        ct = sow(ct, f"{node.name}_ct")
        return (SLOPE * ct * sow(jnp.cos(v), f"{node.name}_rule"),)

    g.defvjp(lambda v: (sow(jnp.sin(v) * c, node.name), v), bwd)
    return g


def _gradients(f, v, n):
    """For `n` cotangents of the result."""
    y, pull = jax.vjp(f, v)
    cts = (lax.stop_gradient(y) * 0 + weights(y.shape) for _ in range(n))
    return [pull(ct * np.float32(1 + i))[0] for i, ct in enumerate(cts)]


def _own_loop(node, step, v):
    """`step` of Equinox's loops takes the carry and what a scan has beside."""
    n = node.length
    if node.how == "scan":

        def body(c, x):
            c = step(c + x)
            return c, c.sum()

        xs = np.float32(0.1) * _spread(jnp, v, n)
        options: Any = dict(kind="checkpointed", checkpoints=1 + n // 2)
        c, ys = eqxi.scan(body, v, xs, **options)
        return c + (ys * _weights(n)).sum()
    trips = jnp.asarray(_own_trips(node, v)).astype(jnp.int32)
    options = {
        "lax": {"kind": "lax"},
        "bounded": {"kind": "bounded", "max_steps": n, "base": n},
        "checkpointed": {"kind": "checkpointed", "max_steps": n},
        "one checkpoint": {"kind": "checkpointed", "checkpoints": 1},
    }[node.how]
    going = lambda s: _go_on(_as_while(node), s[0], trips, s[1])
    return eqxi.while_loop(going, lambda s: (s[0] + 1, step(s[1])), (0, v), **options)[
        1
    ]


def _with_loop(node, step, unmarked_step, sow):
    """The function of an `Again`."""
    n = node.length
    repeat = lambda step: (
        lambda v: lax.scan(lambda c, _: (step(c), c), v, None, length=n)
    )
    marked, unmarked = repeat(step), repeat(unmarked_step)

    def back(ct, x):
        ct = sow(ct, f"{node.name}_ct")
        return jax.vjp(step, x)[1](ct)[0]

    def bwd(xs, ct):
        match node.loop:
            case "whole":
                return jax.vjp(lambda v: marked(v)[0], xs)[1](ct)
            case "scan":
                one = lambda ct, x: (back(ct, x), None)
                return (lax.scan(one, ct, xs, reverse=True)[0],)
            case "fori":
                one = lambda i, ct: back(ct, xs[n - 1 - i])
                return (lax.fori_loop(0, n, one, ct),)
            case "while":
                one = lambda s: (s[0] - 1, back(s[1], xs[s[0]]))
                return (lax.while_loop(lambda s: s[0] >= 0, one, (n - 1, ct))[1],)
        raise AssertionError(node)

    if node.loop == "whole":
        f = jax.custom_vjp(lambda v: marked(v)[0])
        f.defvjp(lambda v: (marked(v)[0], v), bwd)
    else:
        f = jax.custom_vjp(lambda v: unmarked(v)[0])
        f.defvjp(unmarked, bwd)
    return f


def _unmarked(value, name, **options):
    return value


def _options(node):
    options = {} if node.tag == "intermediates" else {"tag": node.tag}
    if node.spec:
        vector = Float[Array, str(SIZE)]
        options["spec"] = vector if node.kind in VECTOR_KINDS else dict
    return options


def to_jax(node, sow: Callable, layers=()) -> Callable:
    def run(node, v, o):
        match node:
            case Op():
                return _op(jnp, node, v, o)
            case Sow():
                sown = sow(_sown(jnp, node.kind, v, o), node.name, **_options(node))
                return _after_sow(node.kind, v, sown)
            case Scope():
                with scope(node.name):
                    return run(node.body, v, o)
            case Twice():
                once = lambda v, o: run(node.body, v, o)
                once = eqx.filter_jit(once) if node.jit else once
                for name in node.scopes:
                    v = (scope(name)(once) if name else once)(v, o)
                return v
            case Layer():
                return WAYS[node.way](layers[node.index], v)
            case Rule():
                return _with_rule(node, sow)(v)
            case Own():
                return _own_loop(node, lambda c: run(node.body, c, v), v)
            case Again():
                step = lambda c: run(node.body, c, c)
                unmarked = to_jax(node.body, _unmarked, layers)
                return _with_loop(node, step, unmarked, sow)(v)
            case Grad():
                f = lambda v: run(node.body, v, v)
                first, *second = _gradients(f, v, 1 + node.twice)
                return _of_gradients(first, second[0]) if second else first
            case Beside():
                f = lambda v: run(node.body, v, v)
                f = eqx.filter_jit(f) if node.jit else f
                runs = [f, lambda v: _gradients(f, v, 1)[0]]
                order = -1 if node.grad_first else 1
                return _of_runs(*[run(v) for run in runs[::order]][::order])
            case Seq():
                for child in node.nodes:
                    v = run(child, v, o)
                return v
            case Scan():
                n = node.length

                def body(c, x):
                    if node.xs:
                        c = c + x
                    c = run(node.body, c, v)
                    return c, c.sum()

                xs = np.float32(0.1) * _spread(jnp, v, n) if node.xs else None
                c, ys = lax.scan(body, v, xs, length=n, reverse=node.reverse)
                return c + (ys * _weights(n)).sum()
            case Fori():

                def step(i, c):
                    return run(node.body, _bump(jnp, c, i), v)

                return lax.fori_loop(0, node.length, step, v)
            case Map():
                n = node.length
                ys = lax.map(lambda x: run(node.body, x, v), _spread(jnp, v, n))
                return v + (ys * _weights(n)[:, None]).sum(0)
            case While():
                trips = _trips(node, v).astype(jnp.int32)
                _, c = lax.while_loop(
                    lambda s: _go_on(node, s[0], trips, s[1]),
                    lambda s: (s[0] + 1, run(node.body, s[1], v)),
                    (0, v),
                )
                return c
            case Cond():
                pred = _pred(node, v, o)
                fns = [lambda v, o, b=b: run(b, v, o) for b in node.branches]
                if len(fns) == 2:
                    return lax.cond(pred, fns[1], fns[0], v, o)
                return lax.switch(pred.astype(jnp.int32), fns, v, o)
            case Call():
                return _wrapped(node.how)(lambda v: run(node.body, v, o))(v)
            case Vmap():
                xs = _spread(jnp, v, node.size)
                lane = jax.vmap(lambda x: run(node.body, x, v), in_axes=node.in_axis)
                ys = lane(xs.T if node.in_axis else xs)
                return v + (ys * _weights(node.size)[:, None]).sum(0)
        raise AssertionError(node)

    return lambda x: run(node, x, x)


def children(node) -> tuple:
    if isinstance(node, Seq):
        return node.nodes
    if isinstance(node, Cond):
        return node.branches
    if isinstance(node, Beside):
        return tuple(filter(None, (node.body, node.again)))
    return (node.body,) if hasattr(node, "body") else ()


def walk(node):
    yield node
    for child in children(node):
        yield from walk(child)


CAPTURED = "layers"
# `h@1` is the second run of `h`, or its second cotangent.
RUN = "@"


def _renamed(node, change):
    """With other names for all marks."""
    if isinstance(node, Sow | Again):
        node = replace(node, name=node.name and change(node.name))
    if isinstance(node, Seq):
        return Seq(tuple(_renamed(n, change) for n in node.nodes))
    if isinstance(node, Cond):
        return replace(node, branches=tuple(_renamed(n, change) for n in node.branches))
    return replace(node, body=_renamed(node.body, change)) if children(node) else node


def _second_run(node):
    return _renamed(node, lambda name: f"{name}{RUN}1")


def names(node) -> set[str]:
    """Of all that may be captured from it."""
    found = {n.name for n in walk(node) if isinstance(n, Sow)}
    ends = {Rule: ("", "_rule", "_ct"), Again: ("_ct",)}
    for n in walk(node):
        found |= {f"{n.name}{end}" for end in ends.get(type(n), ()) if n.name}
        if isinstance(n, Grad) and n.twice:
            found |= {f"{name}{RUN}1" for name in names(n.body)}
    return found - {None}


def only_backward(node) -> set[str]:
    """Of all that may be captured from a program that is differentiated, what its
    backward pass alone runs."""
    found = set()
    for n in walk(node):
        if isinstance(n, Again) and n.loop != "whole":
            found |= names(as_scan(n))
        elif isinstance(n, Rule):
            found |= {f"{n.name}{end}" for end in ("_rule", "_ct")}
    return found


def run_again(node) -> dict[str, int]:
    """Of an `Own` whose backward pass steps from checkpoints, the marks in the rules of
    `jax.custom_jvp` functions, and the step of its last checkpoint. To come back to a
    step, it runs those from there once more, each with its derivative, so that such a
    rule runs again: with one checkpoint, that of step 0 three times for three steps."""

    def found(node):
        if isinstance(node, Rule) and node.how == "jvp" and node.name:
            yield f"{node.name}_rule"
        # The backward pass of a loop in the loop is in that of each step.
        if not (isinstance(node, Own) and node.how not in ("lax", "bounded")):
            for child in children(node):
                yield from found(child)

    # How many checkpoints Equinox makes, of up to three steps.
    n = {"one checkpoint": 1, "scan": 1 + node.length // 2}.get(
        node.how, 1 if node.length < 3 else 2
    )
    return {name: n - 1 for name in found(node.body)}


def without_marks(node):
    return _renamed(node, lambda name: None)


def as_scan(node):
    """Of an `Again`, the body of a scan with the marks of its backward pass."""
    if node.loop == "whole" or node.name is None:
        return node.body
    return Seq((node.body, Sow(f"{node.name}_ct", "v")))


def expand(node, tag="intermediates", capture=False, prefix=""):
    """Without scopes, modules, and sows of another tag."""
    go = lambda node, prefix=prefix: expand(node, tag, capture, prefix)
    match node:
        case Sow():
            name = f"{prefix}{node.name}" if node.tag == tag else None
            return replace(node, name=name)
        case Rule():
            # Of one tag, and known to the rule by its name.
            name = f"{prefix}{node.name}" if tag == "intermediates" else None
            return replace(node, name=name)
        case Again():
            name = f"{prefix}{node.name}" if tag == "intermediates" else None
            return replace(node, name=name, body=go(node.body))
        case Beside():
            first = go(node.body)
            return replace(node, body=first, again=_second_run(first))
        case Scope():
            return go(node.body, f"{prefix}{node.name}/")
        case Twice((None, None)):
            first = go(node.body)
            return Seq((first, _second_run(first)))
        case Twice():
            return Seq(tuple(go(node.body, f"{prefix}{s}/") for s in node.scopes))
        case Layer():
            name = f"{prefix}{CAPTURED}/{node.index}" if capture else None
            return Seq((Op(0, node.c), Sow(name, "v")))
        case Seq():
            return Seq(tuple(map(go, node.nodes)))
        case Cond():
            return replace(node, branches=tuple(map(go, node.branches)))
        case Op():
            return node
    return replace(node, body=go(node.body))


# As plain Python.


@dataclass
class Run:
    """One execution: what was sown, at which place, in order."""

    decisions: list | None = None
    zeros: dict | None = None
    records: list = field(default_factory=list)
    made: list = field(default_factory=list)

    def decide(self, value):
        # Under differentiation the choices of the primal run are taken again.
        choice = int(value()) if self.decisions is None else self.decisions.pop(0)
        self.made.append(choice)
        return choice

    def sow(self, node, where, value):
        # A constant has no cotangent, also where another branch gives its name one.
        if node.name is None:
            return value
        if self.zeros is not None and node.kind != "const":
            value = jtu.tree_map(_add, value, self.zeros[node.name, where])
        self.records.append((node.name, where, value))
        return value


def _is_float(x):
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def _add(x, zero):
    return x + zero if _is_float(x) else x


def execute(xp, node, v, run: Run, where=()):
    def go(node, v, o, where):
        match node:
            case Op():
                return _op(xp, node, v, o)
            case Sow():
                sown = run.sow(node, where, _sown(xp, node.kind, v, o))
                return _after_sow(node.kind, v, sown)
            case Rule():
                assert run.decisions is None, "derivatives: see tests/threaded.py"
                sown = Sow(node.name, "v")
                return run.sow(sown, where, np.sin(v) * np.float32(node.c))
            case Seq():
                for child in node.nodes:
                    v = go(child, v, o, where)
                return v
            case Scan():
                n = node.length
                c, ys = v, [None] * n
                xs = np.float32(0.1) * _spread(xp, v, n)
                for i in reversed(range(n)) if node.reverse else range(n):
                    c = go(node.body, c + xs[i] if node.xs else c, v, (*where, i))
                    ys[i] = c.sum()
                return c + sum(y * w for y, w in zip(ys, _weights(n), strict=True))
            case Fori():
                c = v
                for i in range(node.length):
                    c = go(node.body, _bump(xp, c, i), v, (*where, i))
                return c
            case Map() | Vmap():
                n = node.length if isinstance(node, Map) else node.size
                xs, total = _spread(xp, v, n), v
                for i, w in enumerate(_weights(n)):
                    total = total + w * go(node.body, xs[i], v, (*where, i))
                return total
            case While():
                trips = run.decide(lambda: _trips(node, v))
                i, c = 0, v
                while run.decide(lambda i=i, c=c: _go_on(node, i, trips, c)):
                    i, c = i + 1, go(node.body, c, v, where)
                return c
            case Own():
                assert node.on == "length", "lanes end together: tests/threaded.py"
                n, is_scan = node.length, node.how == "scan"
                c, ys = v, []
                for x in np.float32(0.1) * _spread(xp, v, n):
                    c = go(node.body, c + x if is_scan else c, v, where)
                    ys.append(c.sum())
                weighted = sum(y * w for y, w in zip(ys, _weights(n), strict=True))
                return c + weighted if is_scan else c
            case Cond():
                return go(
                    node.branches[run.decide(lambda: _pred(node, v, o))], v, o, where
                )
            case Call():
                return go(node.body, v, o, where)
        raise AssertionError(node)

    return go(node, v, v, where)


# Where each site sits, and what its value varies over.


@dataclass(frozen=True)
class Axis:
    id: int
    is_vmap: bool
    size: int


@dataclass(frozen=True)
class Site:
    kind: str
    axes: tuple
    varies: frozenset
    conditional: bool
    in_rule: bool = False
    # Whether a backward pass is what runs it.
    replayed: bool = False
    # Whether it is a second cotangent of one value.
    pulled: bool = False

    @property
    def kept(self):
        return [not a.is_vmap or a.id in self.varies for a in self.axes]


X = "x"


def find_sites(
    node, root_lanes: int | None = None, derivative: str | None = None
) -> dict[str, Site]:
    """The sites in order. `varies` holds the vmaps that a value varies over, and `X` if
    it depends on the input. `derivative`: "jvp" or "vjp", if rules run."""
    sites: dict[str, Site] = {}
    ids: dict[int, Axis] = {}

    def axis(node, is_vmap, size):
        return ids.setdefault(id(node), Axis(len(ids), is_vmap, size))

    def fixpoint(body, v, go):
        while True:
            out = go(body, v) | v
            if out == v:
                return v
            v = out

    def go(node, v, o, axes, lanes, conditional, derivative=derivative):
        match node:
            case Op():
                return v | o if node.kind in (1, 2) else v
            case Sow():
                if node.kind in ("outer", "outer_unused"):
                    sown = o
                elif node.kind == BESIDE:
                    sown = v | o
                else:
                    sown = frozenset() if node.kind == "const" else v
                if node.name is None:
                    return v | o if node.kind in ("outer", BESIDE) else v
                before = sites.get(node.name)
                varies = sown | lanes | (before.varies if before else frozenset())
                sites[node.name] = Site(node.kind, axes, varies, conditional)
                return v | o if node.kind in ("outer", BESIDE) else v
            case Rule():
                ends = {None: [""], "jvp": ["", "_rule"], "vjp": ["", "_rule", "_ct"]}
                if node.name is not None:
                    how = derivative and node.how
                    for end in ends[how]:
                        sites[f"{node.name}{end}"] = Site(
                            "v", axes, v | lanes, conditional, derivative is not None
                        )
                return v
            case Seq():
                for child in node.nodes:
                    v = go(child, v, o, axes, lanes, conditional, derivative)
                return v
            case Scan() | Fori():
                inner = (*axes, axis(node, False, node.length))
                return fixpoint(
                    node.body,
                    v,
                    lambda b, c: go(b, c, v, inner, lanes, conditional, derivative),
                )
            case Map():
                inner = (*axes, axis(node, False, node.length))
                return v | go(node.body, v, v, inner, lanes, conditional, derivative)
            case Vmap():
                ax = axis(node, True, node.size)
                inner = (*axes, ax)
                out = go(
                    node.body, v | {ax.id}, v, inner, lanes, conditional, derivative
                )
                return v | (out - {ax.id})
            case While():

                def body(b, c):
                    over = ((c if node.on_carry else v) - {X}) | lanes
                    return go(b, c, v, axes, over, True, derivative) | (over - lanes)

                return fixpoint(node.body, v, body)
            case Own():
                if node.how == "bounded":
                    axes = (*axes, axis(node, False, node.length))
                differ = {"v": v, "carry": v, "length": frozenset()}[node.on] - {X}
                return fixpoint(
                    node.body,
                    v,
                    lambda b, c: go(b, c, v, axes, lanes, True, derivative) | differ,
                )
            case Again():
                if derivative is None and node.loop != "whole":
                    return go(without_marks(node.body), v, v, axes, lanes, conditional)
                body = as_scan(node)
                if node.loop == "while":
                    conditional = True
                else:
                    axes = (*axes, axis(node, False, node.length))
                out = go(body, v, v, axes, lanes, conditional, derivative)
                for name in names(body):
                    in_rule = body is not node.body and name == f"{node.name}_ct"
                    new = {"replayed": True, "in_rule": in_rule}
                    sites[name] = replace(sites[name], **new)
                return out
            case Grad():
                out = go(node.body, v, v, axes, lanes, conditional, "vjp")
                for name in names(node.body) & set(sites) if node.twice else ():
                    new = replace(sites[name], pulled=True)
                    sites[f"{name}{RUN}1"] = new
                return out
            case Beside():
                for run in (node.body, node.again):
                    is_grad = (run is node.body) == node.grad_first
                    how = "vjp" if is_grad else derivative
                    v = v | go(run, v, v, axes, lanes, conditional, how)
                return v
            case Cond():
                over = (v if node.on == "v" else o) - {X}
                out = over
                for b in node.branches:
                    out = out | go(b, v, o, axes, lanes | over, True, derivative)
                return out
            case Call():
                return go(node.body, v, o, axes, lanes, conditional, derivative)
        raise AssertionError(node)

    if root_lanes is None:
        go(node, frozenset({X}), frozenset({X}), (), frozenset(), False)
    else:
        ax = axis(None, True, root_lanes)
        v = frozenset({X, ax.id})
        go(node, v, v, (ax,), frozenset(), False)
    return sites


def _template(kind):
    return _sown(np, kind, np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32))


def _map_arrays(fn, *trees):
    def leaf(*xs):
        return fn(*xs) if hasattr(xs[0], "dtype") else xs[0]

    return jtu.tree_map(leaf, *trees)


def _assemble(site, found, summed):
    """`found`: (where, value) in order; the last one at each place stays."""
    sizes = tuple(a.size for a in site.axes)
    n_axes = len(sizes)

    def place(template, *values):
        out = np.zeros(sizes + template.shape, template.dtype)
        for (where, _), value in zip(found, values, strict=True):
            out[where] = np.asarray(value)
        for i in reversed(range(n_axes)):
            if not site.kept[i]:
                if summed:
                    out = out.sum(i, dtype=out.dtype)
                else:
                    assert np.allclose(out, out.take([0], i), rtol=1e-5, atol=1e-5)
                    out = out.take(0, i)
        return out

    return _map_arrays(place, _template(site.kind), *(v for _, v in found))


def _counts(site, found):
    out = np.zeros([a.size for a in site.axes], np.int32)
    for where, _ in found:
        out[where] += 1
    for i in reversed(range(len(site.axes))):
        if not site.kept[i]:
            out = out.take(0, i)
    return out


class Oracle:
    """What `save_intermediates` must return for `program` at `x`.

    With `lanes`, the program is mapped over the leading axis of `x`.
    """

    def __init__(self, program, x, lanes: bool = False):
        self.program = program
        self.x = np.asarray(x, np.float32)
        self.lanes = lanes
        self.sites = find_sites(program, len(self.x) if lanes else None)
        run = Run()
        self.out = self._run(np, self.x, run)
        self.decisions = run.made
        self.records = run.records

    def _run(self, xp, x, run):
        if not self.lanes:
            return execute(xp, self.program, x, run)
        return xp.stack(
            [execute(xp, self.program, x[i], run, (i,)) for i in range(len(self.x))]
        )

    def at(self, name, records=None):
        records = self.records if records is None else records
        return [(w, v) for n, w, v in records if n == name]

    def primals(self):
        out = {}
        for name, site in self.sites.items():
            found = self.at(name)
            out[name] = {"primal": _assemble(site, found, False)}
            if site.conditional:
                out[name]["count"] = _counts(site, found)
        return out

    def _with_mode(self, mode, records, summed):
        out = self.primals()
        for name, site in self.sites.items():
            if X in site.varies:
                found = self.at(name, records)
                out[name][mode] = _assemble(site, found, summed)
        return out

    def tangents(self, t):
        """For `jax.jvp(f, (x,), (t,))`: the output's tangent, and what is captured."""

        def replay(x):
            run = Run(list(self.decisions))
            out = self._run(jnp, x, run)
            floats = [_floats(v) for _, _, v in run.records]
            return out, floats

        _, (out, dots) = jax.jvp(replay, (jnp.asarray(self.x),), (jnp.asarray(t),))
        records = [
            (n, w, _fill(v, dot))
            for (n, w, v), dot in zip(self.records, dots, strict=True)
        ]
        return out, self._with_mode("tangent", records, False)

    def cotangents(self, weights):
        """For the gradient of `(f(x) * weights).sum()`: the gradient, and what is
        captured. Only for programs without a while loop, where a place runs once."""
        zeros = {(n, w): _map_arrays(np.zeros_like, v) for n, w, v in self.records}
        floats = {k: _floats(z) for k, z in zeros.items()}

        def replay(x, floats):
            full = {k: _fill(zeros[k], floats[k]) for k in zeros}
            out = self._run(jnp, x, Run(list(self.decisions), full))
            return (out * weights).sum()

        grad, bars = jax.grad(replay, (0, 1))(jnp.asarray(self.x), floats)
        records = [(n, w, _fill(z, bars[n, w])) for (n, w), z in zeros.items()]
        return grad, self._with_mode("cotangent", records, True)


def _floats(tree):
    return [x for x in jtu.tree_leaves(tree) if _is_float(x)]


def _fill(tree, floats):
    """Integer leaves become zeros: there is nothing to compare in a float0."""
    floats = iter(floats)

    def leaf(x):
        return next(floats) if _is_float(x) else np.zeros_like(x)

    return _map_arrays(leaf, tree)


# Programs at random.


def has_while(node) -> bool:
    """Whether there is a loop of unknown length, of which the last value comes back."""
    return any(
        isinstance(n, While)
        or (isinstance(n, Own) and n.how != "bounded")
        or (isinstance(n, Again) and n.loop == "while")
        for n in walk(node)
    )


def has_gradient(node) -> bool:
    """Whether the program takes a gradient itself."""
    return any(isinstance(n, Grad | Beside) for n in walk(node))


FORWARD, REVERSE = "jvp", "vjp"


class Generator:
    """With `features`, also what `expand` takes away. `around` are the derivatives that
    are taken of the program, "jvp" or "vjp", from the first one; if it is `None`, no
    derivatives are drawn."""

    def __init__(self, seed, allow_while: bool = True, features=None, around=None):
        self.rng = np.random.default_rng(seed)
        self.names = 0
        self.layers = 0
        self.budget = 7
        self.allow_while = allow_while
        self.features = features
        self.around = around
        # What a feature of tests/fuzz.py does not go with.
        self.allow_derivatives = self.allow_runs = self.allow_ends = True
        # Of Equinox's loops, those that are no scans, and any.
        self.allow_unknown = self.allow_own = True
        # Whether there are lanes, of which some may run a branch.
        self.has_lanes = False
        # Whether the program itself runs what is drawn, and once.
        self.once = True
        # Whether it is run twice, so that nothing in there is to be run four times.
        self.is_twice = False

    @contextlib.contextmanager
    def inside(self, *derivatives, once=False):
        """Of what is drawn here, these are taken first."""
        before = self.around, self.once, self.allow_while
        self.around, self.once = (*derivatives, *(self.around or ())), once
        self.allow_while = self.allow_while and REVERSE not in derivatives
        yield
        self.around, self.once, self.allow_while = before

    @contextlib.contextmanager
    def twice(self):
        before = self.once, self.is_twice
        self.once, self.is_twice = False, True
        yield
        self.once, self.is_twice = before

    def seq_in(self, depth, lanes=False, unknown=True):
        """A body that may have `lanes`, and loops whose length is `unknown`."""
        before = self.has_lanes, self.allow_unknown
        self.has_lanes = lanes or self.has_lanes
        self.allow_unknown = unknown and self.allow_unknown
        node = self.seq(depth)
        self.has_lanes, self.allow_unknown = before
        return node

    def derivatives(self):
        """The kinds of nodes that go with the derivatives around."""
        if self.around is None or not self.features:
            return []
        kinds = ["own", "own"] * self.allow_own
        unknown = self.allow_own and self.allow_unknown
        if (
            unknown
            and FORWARD not in self.around[:1]
            and REVERSE not in self.around[1:]
        ):
            kinds += ["own checkpointed"] * 3
        if self.once and self.allow_derivatives and len(self.around) < 2:
            kinds += ["gradient", "gradient", "rule jvp"]
            kinds += ["twice pulled", "beside"] * self.allow_runs
            if FORWARD not in self.around:
                kinds += ["rule vjp", "again", "again"]
        return kinds

    def name(self):
        self.names += 1
        return f"s{self.names}"

    def pick(self, *options):
        return options[self.rng.integers(len(options))]

    def op(self):
        return Op(int(self.rng.integers(5)), float(self.rng.uniform(-1.2, 1.2)))

    def sow(self, name=None, kinds=KINDS):
        if not self.features or name:
            return Sow(name or self.name(), self.pick(*kinds))
        kind = self.pick(*kinds, BESIDE, BESIDE, NUMPY)
        tag = self.pick(
            *["intermediates"] * 3, "other" if self.once else "intermediates"
        )
        return Sow(self.name(), kind, tag, bool(self.rng.random() < 0.2))

    def program(self):
        node = self.seq(0)
        return node if self.names else Seq((*node.nodes, self.sow()))

    def seq(self, depth):
        nodes = [self.op()]
        for _ in range(self.rng.integers(1, 4)):
            nodes.append(self.node(depth))
        return Seq(tuple(nodes))

    def node(self, depth):
        roll = self.rng.random()
        if depth >= 4 or self.budget <= 0 or roll < 0.35 - 0.1 * (depth == 0):
            return self.sow() if self.rng.random() < 0.7 else self.op()
        self.budget -= 1
        inner = depth + 1
        kinds = ["scan", "fori", "map", "cond", "cond", "switch", "call", "vmap"]
        if self.allow_while:
            kinds += ["while", "while"]
        if self.features:
            kinds += ["scope", "twice", "policy"]
            kinds += ["layer"] * 2 * self.once
            kinds += self.derivatives()
        length = int(self.pick(0, 1, 2, 2, 3))
        match self.pick(*kinds):
            case "scan":
                reverse, xs = self.rng.random(2) < 0.5
                return Scan(self.seq(inner), length, bool(reverse), bool(xs))
            case "fori":
                return Fori(self.seq(inner), length)
            case "map":
                return Map(self.seq(inner), length)
            case "cond":
                return self.cond(inner, 2)
            case "switch":
                return self.cond(inner, 3)
            case "call":
                return Call(self.pick("jit", "checkpoint"), self.seq(inner))
            case "scope":
                return Scope(self.name(), self.seq(inner))
            case "twice":
                jit = bool(self.pick(0, 1))
                if self.allow_runs and not self.is_twice and self.rng.random() < 0.4:
                    with self.twice():
                        return Twice((None, None), jit, self.seq(inner))
                return Twice((self.name(), self.name()), jit, self.seq(inner))
            case "layer":
                self.layers += 1
                c = float(self.rng.uniform(0.5, 1.2))
                way = [*WAYS][int(1e6 * c) % len(WAYS)]
                return Layer(self.layers - 1, c, way)
            case "policy":
                hows = "nothing", "everything", "dots", "filter_jit"
                return Call(self.pick(*hows), self.seq(inner))
            case "rule jvp" | "rule vjp" as kind:
                c = float(self.rng.uniform(0.5, 1.2))
                return Rule(kind.split()[1], self.name(), c)
            case "own" | "own checkpointed" as kind:
                return self.own(kind, inner)
            case "again":
                loop = self.pick("whole", "scan", "fori", "while")
                name = self.name()
                # A loop that is run anew as a whole is another one.
                with self.inside():
                    body = self.seq_in(inner, unknown=loop != "whole")
                return Again(name, loop, body, max(length, 1))
            case "gradient":
                with self.inside(REVERSE, once=True):
                    return Grad(False, self.seq(inner))
            case "twice pulled":
                with self.inside(REVERSE), self.twice():
                    return Grad(True, self.seq(inner))
            case "beside":
                first, jit = self.rng.random(2) < 0.5
                with self.inside(REVERSE), self.twice():
                    return Beside(bool(first), bool(jit), self.seq(inner))
            case "vmap":
                body = self.seq_in(inner, lanes=bool(self.features))
                return Vmap(body, int(self.pick(1, 2)), int(self.pick(0, 1)))
            case "while":
                carry = bool(self.rng.random() < 0.5)
                return While(self.seq(inner), int(self.pick(1, 2, 3)), carry)

    def own(self, kind, depth):
        hows = ["bounded", *["lax"] * (self.allow_while and self.allow_unknown)]
        if kind == "own checkpointed":
            hows = ["checkpointed", "one checkpoint", "scan"]
        how, n = self.pick(*hows), int(self.pick(1, 2, 3, 3))
        on = self.pick("length", "v", "carry")
        on = "length" if how == "scan" or not self.allow_ends else on
        n = max(n, 2) if how == "bounded" else n
        # A forward pass that is not differentiated has no tangents.
        is_last = kind == "own checkpointed" and FORWARD in self.around
        return Own(how, on, self.seq_in(depth, unknown=not is_last), n)

    def cond(self, depth, n):
        # The checkpoints of Equinox's loops cannot differ between lanes.
        unknown = not (self.has_lanes and self.around)
        branches = [self.seq_in(depth, unknown=unknown) for _ in range(n)]
        if self.rng.random() < 0.5:
            shared = self.name()
            for i in range(int(self.pick(1, 2))):
                nodes = branches[i].nodes
                at = int(self.rng.integers(len(nodes) + 1))
                sow = self.sow(shared, VECTOR_KINDS)
                branches[i] = replace(
                    branches[i], nodes=(*nodes[:at], sow, *nodes[at:])
                )
        return Cond(self.pick("v", "v", "o"), tuple(branches))


def random_program(seed: int, allow_while: bool = True):
    return Generator(seed, allow_while).program()
