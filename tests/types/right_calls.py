"""Calls in which a type checker finds no error. The program runs as well."""

from collections.abc import Callable
from typing import Any, assert_type

import equinox as eqx
import eqx_sow
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from eqx_sow import Intermediates, plant, save_intermediates, sow, tap
from jax import Array
from jaxtyping import Float


x = jnp.ones(3)


# --- sow ---


def f(x: Array, scale: float = 1.0) -> Array:
    h = sow(jnp.sin(x), "h")
    assert_type(h, Array)
    pair = sow((h, scale), "pair", tag=("a", "hashable"))
    assert_type(pair, tuple[Array, float])
    items = sow({"a": h}, "items", tag=1, spec=dict[str, Array])
    assert_type(items, dict[str, Array])
    return scale * sow(h, "end", spec=Float[Array, " n"])


assert_type(eqx_sow.Sow("hidden")(x), Array)
assert_type(eqx_sow.Sow("hidden", Float[Array, " n"], tag=1)(x, key=None), Array)
eqx.nn.Sequential([eqx_sow.Sow("a"), eqx_sow.Sow(), eqx_sow.Sow(name="b", spec=None)])


# --- save_intermediates ---

saved = save_intermediates(f)
assert_type(saved(x), tuple[Array, Intermediates])
assert_type(saved(x, scale=2.0), tuple[Array, Intermediates])
out, intermediates = saved(x, 2.0)
assert_type(out, Array)
assert_type(intermediates["h"], dict[str, Any])
assert_type(intermediates | {}, Intermediates)
assert_type(intermediates.copy(), Intermediates)
assert_type(intermediates.flat(), dict[str, Any])
assert_type(intermediates.flat(sep="."), dict[str, Any])
assert_type(intermediates.axes("h", "primal"), tuple[Any, ...])
assert_type(intermediates["e*"], dict[str, Any])
assert_type("e*" in intermediates, bool)
assert_type(intermediates.primals["e*"], Any)
assert_type(intermediates.unstack(), Intermediates)
assert_type(intermediates.primals, dict[str, Any])
assert_type(intermediates.tangents | intermediates.cotangents, dict[str, Any])
names: list[str] = list(intermediates)
function: Callable[[Array], tuple[Array, Intermediates]] = saved


@save_intermediates
def bare(x: Array) -> Array:
    return sow(x, "x")


@save_intermediates(names="x", modes="primal")
def with_options(x: Array, *, flag: bool = False) -> dict[str, Array]:
    return {"x": sow(x, "x")}


assert_type(bare(x), tuple[Array, Intermediates])
assert_type(with_options(x, flag=True), tuple[dict[str, Array], Intermediates])
assert_type(save_intermediates(bare)(x)[0], tuple[Array, Intermediates])


class Model(eqx.Module):
    linear: eqx.nn.Linear

    @save_intermediates
    def __call__(self, x: Array) -> Array:
        return sow(self.linear(x), "linear")

    @save_intermediates(capture=True)
    def loss(self, x: Array, *, power: int = 2) -> Array:
        return jnp.sum(self.linear(x) ** power)

    @tap(callback=lambda event: None)
    def watched(self, x: Array) -> Array:
        return sow(self.linear(x), "linear")

    def plain(self, x: Array) -> Array:
        return sow(self.linear(x), "linear")


model = Model(eqx.nn.Linear(3, 3, key=jax.random.key(0)))
assert_type(model(x), tuple[Array, Intermediates])
assert_type(model.loss(x), tuple[Array, Intermediates])
assert_type(model.loss(x, power=3), tuple[Array, Intermediates])
assert_type(Model.loss(model, x, power=3), tuple[Array, Intermediates])
assert_type(model.watched(x), Array)
assert_type(save_intermediates(model.plain)(x), tuple[Array, Intermediates])
assert_type(save_intermediates(Model.plain)(model, x), tuple[Array, Intermediates])
assert_type(save_intermediates(model.__call__)(x)[0], tuple[Array, Intermediates])

# Before running.
shape = jax.ShapeDtypeStruct((3,), jnp.float32)
assert_type(saved.eval_shape(shape), tuple[Array, Intermediates])
assert_type(model.loss.eval_shape(shape, power=3)[1], Intermediates)
assert_type(tap(f).eval_shape(x), Array)
assert_type(plant(f, {"h": x}).eval_shape(x), Array)
save_intermediates(eqx.filter_jit(f)).lower(shape).compile()(x)
tap(jax.jit(f)).lower(x).as_text()
print(plant(jax.jit(f), {"h": x}).trace(x).jaxpr)


# Modules, and functions that JAX and Equinox transformed.
mlp = eqx.nn.MLP(3, 1, 8, 2, key=jax.random.key(0))
y, of_mlp = save_intermediates(mlp, capture=True)(x)
assert_type(of_mlp, Intermediates)
assert_type(y, Array)


def loss(weight: Array, x: Array) -> Float[Array, ""]:
    return jnp.sum(weight * f(x))


jitted = save_intermediates(eqx.filter_jit(f))
assert_type(jitted(x, scale=2.0), tuple[Array, Intermediates])
assert_type(eqx.filter_jit(save_intermediates(f))(x), tuple[Array, Intermediates])
_, of_jit = save_intermediates(jax.jit(f))(x)
assert_type(of_jit, Intermediates)
_, of_vmap = save_intermediates(jax.vmap(f))(x[None])
assert_type(of_vmap, Intermediates)
_, of_grad = save_intermediates(eqx.filter_grad(loss))(x, x)
assert_type(of_grad, Intermediates)
_, of_grad = save_intermediates(jax.grad(loss))(x, x=x)
assert_type(of_grad, Intermediates)
(value, grads), _ = save_intermediates(eqx.filter_value_and_grad(loss))(x, x)
# What is differentiated may return the pair as the function and its auxiliary value.
grads, aux = eqx.filter_grad(save_intermediates(loss), has_aux=True)(x, x)
assert_type(aux, Intermediates)
_, of_lambda = save_intermediates(lambda x: sow(x, "x"))(x)
assert_type(of_lambda, Intermediates)


# Every option.
linear = eqx.nn.Linear
save_intermediates(f, tag="mine")
save_intermediates(f, tag=("mine", 1), names="h")
save_intermediates(f, names=["h", "*d"], modes=["primal", "cotangent"])
save_intermediates(f, names=("h",), modes=("cotangent.tangent", "primal.cotangent"))
save_intermediates(f, names=lambda name: name.startswith("h"), modes="tangent")
save_intermediates(mlp, capture=linear, names=None, modes=None)
save_intermediates(mlp, capture=(linear, eqx.nn.MLP), methods="encode")
save_intermediates(mlp, capture=[linear, jax.nn.relu])
save_intermediates(mlp, capture=True, methods=["__call__", "encode"], inputs=True)
save_intermediates(mlp, capture=lambda path, module: isinstance(module, linear))
save_intermediates(f, scope=True, capture=False, methods=("__call__",))
save_intermediates(f, reduce=eqx_sow.Append())
save_intermediates(f, reduce={"h": eqx_sow.Last(), "e*": eqx_sow.Buffer(3, "first")})
save_intermediates(f, reduce=eqx_sow.Fold(0.0, lambda acc, x: acc + x.sum()))
save_intermediates(f, reduce=eqx_sow.Fold(lambda: x, lambda acc, x: acc + x))
save_intermediates(f, transform=jnp.mean)
save_intermediates(f, transform=eqx_sow.summarize)
save_intermediates(f, transform={"h": jnp.linalg.norm, "end": lambda x: x[0]})
save_intermediates(f, spec={"h": Float[Array, " n"], "pair": tuple[Array, str]})


# --- plant ---

planted = plant(f, {"h": jnp.zeros(3)})
assert_type(planted(x, scale=2.0), Array)
assert_type(plant(f, intermediates)(x), Array)
assert_type(plant(model.plain, {"linear": jnp.zeros_like})(x), Array)
both = save_intermediates(plant(f, {"h": jnp.zeros_like}))
assert_type(both(x), tuple[Array, Intermediates])
plant(jax.grad(lambda x: f(x).sum()), {"h": 2 * x}, mode="cotangent")(x)
plant(f, {"*": lambda x: x}, tag="mine", capture=(linear,), methods="encode")
plant(mlp, {"layers/0": jnp.zeros_like}, capture=True)(x)
plant(f, {"h": lambda value, index: value}, with_index=True)(x)
plant(mlp, {"layers/1.inputs": lambda v: v}, capture=True, inputs=True)(x)
skip = {"layers/1.call": lambda c: c._replace(out=c.args[0])}
plant(mlp, skip, capture=True, calls=True)(x)
call = eqx_sow.Call((x,), {}, x)
assert_type(call.args, tuple[Any, ...])
save_intermediates(
    mlp, capture=True, calls=True, transform={"layers/1.call": lambda c: c.out}
)(x)
plant(jax.vmap(f), {"h": eqx_sow.batched(lambda h: h - h.mean(0))})(jnp.ones((2, 3)))
index: Callable[[Any, Any], Array] = eqx_sow.batched(lambda value, index: value)
tap(f, print, extra={"step": jnp.int32(3)})(x)
tap(f, print, extra=x, when=lambda value, extra: extra.sum() > 0, calls=False)(x)

# --- batched ---

norm: Callable[[Any], Array] = eqx_sow.batched(jnp.linalg.norm)
save_intermediates(jax.vmap(f), transform=norm)(jnp.ones((2, 3)))
tap(jax.vmap(f), transform={"h": eqx_sow.batched(lambda h: h.sum())})(jnp.ones((2, 3)))


# --- tap ---


def show(event: eqx_sow.TapEvent) -> None:
    assert_type(event.name, str)
    assert_type(event.count, int)
    if event.device is not None:
        for index in event.device.values():
            assert_type(index, int)
    name, mode, value, count, ran = event
    assert_type(mode, str)


assert_type(tap(f)(x, scale=2.0), Array)
tap(f, lambda event: print(event.path, event.iterations))(x)
assert_type(tap(f, show, every=10, ordered=True)(x), Array)
assert_type(tap(f, print, when=lambda x: x.sum() > 0, transform=jnp.mean)(x), Array)
assert_type(save_intermediates(tap(f, show))(x), tuple[Array, Intermediates])
assert_type(plant(tap(f, show, names="h", modes="primal"), {"h": x})(x), Array)


@tap(callback=show, names=["h"])
def tapped(h: Array, times: int) -> Array:
    return sow(times * h, "h")


assert_type(tapped(x, times=2), Array)


# --- tabulate, summarize, register_rule, errors ---

assert_type(eqx_sow.tabulate(intermediates), str)
assert_type(eqx_sow.tabulate({"h": intermediates["h"]}), str)
comparison = eqx_sow.compare(intermediates, intermediates.unstack(), rtol=0, atol=0.1)
assert_type(comparison, eqx_sow.Comparison)
assert_type(comparison.first, tuple[str, str] | None)
eqx_sow.compare(intermediates, {"h": np.ones(3)}).splitlines()
summary = eqx_sow.summarize(x)
assert_type(summary, eqx_sow.Summary)
assert_type(summary.mean, Array)
assert_type(summary + eqx_sow.Summary.empty(), eqx_sow.Summary)
assert_type(eqx_sow.Summary.empty((2,)).merge(axis=0), eqx_sow.Summary)
eqx_sow.summarize({"a": x, "b": "static"})["a"].rms.sum()
eqx_sow.summarize(intermediates["h"]["primal"], edges=[0, 1, 2]).std.sum()
eqx_sow.summarize(x, edges=np.linspace(0, 1, 3))
eqx_sow.summarize(x, edges=jnp.linspace(0, 1, 3))
total: Any = sum([summary, summary])

primitive = jax.extend.core.Primitive("p")


@eqx_sow.register_rule(primitive)
def rule(x: Array, *, n: int) -> list[Array]:
    return n * [x]


assert_type(rule(x, n=2), list[Array])

try:
    saved(x)
except (eqx_sow.DuplicateSowError, eqx_sow.UnknownSowError) as error:
    assert_type(error.args, tuple[Any, ...])
except eqx_sow.SowError:
    pass
