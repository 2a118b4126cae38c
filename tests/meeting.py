"""Models, and programs of them, for law 13.

A program is a function of `run`. Under test, `run(model, x, name)` is `model(x)`. In
the reference it does by hand what the model does, and passes each output to `mark`,
with the name that follows from the rule: `name` is where the arrays of the model come
from. The programs are in `meeting_trees.py` and `meeting_ways.py`.
"""

import collections
import dataclasses as dc
import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from eqx_sow import Append, tap
from jaxtyping import Array


# --- Models, and what they do ---


class Act(eqx.Module):
    """Has no arrays, and no leaves."""

    kind: str = eqx.field(static=True, default="tanh")

    def __call__(self, x):
        return getattr(jnp, self.kind)(x)


class Layer(eqx.Module):
    w: Array
    b: Array

    def __call__(self, x):
        return self.w * x + self.b


class Net(eqx.Module):
    layers: list[Layer]
    act: Act
    gain: Array

    def __call__(self, x):
        first, second = self.layers
        return self.gain * second(self.act(first(x)))


class Lora(eqx.Module):
    inner: Layer
    down: Array
    up: Array

    def __call__(self, x):
        w = self.inner.w + self.up * self.down
        return eqx.tree_at(lambda layer: layer.w, self.inner, w)(x)


def make_net(seed):
    a, b, c, d, e = 0.3 + jr.uniform(jr.key(seed), (5, 3))
    return Net([Layer(a, b), Layer(c, d)], Act(), e)


def at(*parts):
    return "/".join(filter(None, parts)) or "."


@dc.dataclass(frozen=True)
class Run:
    """`mark(value, name, module)` is called in the reference, and `before` with what
    the module is called with. Without a `mark`, models are called."""

    mark: Callable | None = None
    before: Callable = lambda x, name, module: x

    def __call__(self, module, x, name, moved=None):
        if self.mark is None:
            return module(x)

        def call(fn, x, part, of):
            path = (moved or {}).get(part, at(name, part))
            return self.mark(fn(self.before(x, path, of)), path, of)

        def net(x):
            first, second = module.layers
            x = call(lambda x: first.w * x + first.b, x, "layers/0", first)
            x = call(jnp.tanh, x, "act", module.act)
            x = call(lambda x: second.w * x + second.b, x, "layers/1", second)
            return module.gain * x

        def lora(x):
            inner = module.inner
            w = inner.w + module.up * module.down
            return call(lambda x: w * x + inner.b, x, "inner", inner)

        act = lambda x: getattr(jnp, module.kind)(x)
        kinds = {Net: net, Lora: lora, Act: act}
        plain = lambda x: module.w * x + module.b
        return call(kinds.get(type(module), plain), x, "", module)

    def static(self, name):
        """For functions that JAX traces once: nothing under test."""
        return None if self.mark is None else name

    def loss(self, module, x, name):
        return jnp.sum(self(module, x, name) ** 2)

    def grad(self, module, x, name):
        return eqx.filter_grad(lambda m: self.loss(m, x, name))(module)


# --- Programs ---


@dc.dataclass(frozen=True)
class Program:
    make: Callable
    # All but the last, which is data.
    models: tuple
    options: dict
    # What JAX or Equinox refuses, by words in the names of the uses.
    without: tuple[str, ...]

    def args(self):
        return (*(m() if callable(m) else m for m in self.models), X)


X = jnp.array([0.3, -0.7, 1.1])
XS = jnp.stack([X, -X])
APPEND = {"reduce": Append()}


def ONE():
    return make_net(0)


def TWO():
    return make_net(1)


# Those of `meeting_trees.py` and `meeting_ways.py`, by name, once they are imported.
PROGRAMS: dict[str, Program] = {}


def program(*models, without=(), **options):
    """A decorator that adds a program, of `(*models, X)`."""

    def register(make):
        PROGRAMS[make.__name__] = Program(make, models, options, without)
        return make

    return register


def mapped(fn, *trees) -> Any:
    return jax.tree.map(lambda *x: fn(*x) if eqx.is_array(x[0]) else x[0], *trees)


def mix(a, b, t=0.1):
    return mapped(lambda p, q: (1 - t) * p + t * q, a, b)


def descend(m, g, rate=0.1):
    return eqx.apply_updates(m, mapped(lambda g: -rate * g, g))


def leaves(tree):
    return [x for x in jtu.tree_leaves(tree) if eqx.is_inexact_array(x)]


def total(tree):
    """A loss on whatever a program returns."""
    return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in leaves(tree))


def over_data(fn, args):
    axes = (*(None for _ in args[:-1]), 0)
    return eqx.filter_vmap(fn, in_axes=axes), (*args[:-1], XS)


def like(fn, new):
    """With the parameters of `fn`: names of modules begin with them."""
    new.__signature__ = inspect.signature(fn)
    return new


def loss_of(fn):
    return like(fn, lambda *args: total(fn(*args)))


def edit(h):
    return 2 * h + 1


def events_of(fn, args, **options):
    found = collections.defaultdict(list)
    record = lambda e: found[e.name, e.mode].append((e.count, e.ran, e.value))
    out = eqx.filter_jit(tap(fn, record, **options))(*args)
    jax.effects_barrier()
    by_count = lambda event: event[0]
    return out, {key: sorted(events, key=by_count) for key, events in found.items()}
