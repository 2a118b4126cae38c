"""Calls that a type checker must refuse, each in the line of its comment, and no
other."""

import equinox as eqx
import eqx_sow
import jax
import jax.numpy as jnp
from eqx_sow import compare, plant, save_intermediates, sow, tabulate, tap
from jax import Array
from jaxtyping import Float


x = jnp.ones(3)
mlp = eqx.nn.MLP(3, 1, 8, 2, key=jax.random.key(0))


def f(x: Array, scale: float = 1.0) -> Array:
    return scale * sow(x, "h")


saved = save_intermediates(f)

# The function's own arguments, and its output.
saved()  # error
saved("x")  # error
saved(x, scale="large")  # error
saved(x, 1.0, 2.0)  # error
saved(x, factor=2.0)  # error
saved(x).sum()  # error
saved(x) + 1  # error
out, intermediates, more = saved(x)  # error
number: int = saved(x)[0]  # error
save_intermediates(mlp)("x")  # error
save_intermediates(mlp, capture=True)(x, keys=None)  # error
save_intermediates(eqx.filter_jit(f))(x, factor=2.0)  # error
save_intermediates(3)  # error
save_intermediates(f, "h")  # error

# What comes back.
pair = saved(x)
pair["h"]  # error
tabulate(pair)  # error
tabulate(pair[0])  # error
compare(pair, pair[1])  # error
compare(pair[1], pair[1], 0.1)  # error
compare(pair[1])  # error
pair[1].h  # error
pair[1]["h"].primal  # error
pair[1][0]  # error
pair[1].flat(sep=1)  # error
pair[1].axes(0)  # error
pair[1].stack("h*")  # error
plant(f, pair)  # error

# Options.
save_intermediates(f, name="h")  # error
save_intermediates(f, names=3)  # error
save_intermediates(f, names=["h", 3])  # error
save_intermediates(f, names=lambda: True)  # error
save_intermediates(f, mode="primal")  # error
save_intermediates(f, modes="gradient")  # error
save_intermediates(f, modes=["primal", "cotangnet"])  # error
save_intermediates(mlp, capture="Linear")  # error
save_intermediates(mlp, capture=["Linear"])  # error
save_intermediates(mlp, capture=True, methods=3)  # error
save_intermediates(mlp, capture=True, inputs="yes")  # error
save_intermediates(f, scope="yes")  # error
save_intermediates(f, reduce=eqx_sow.Append)  # error
save_intermediates(f, reduce="last")  # error
save_intermediates(f, reduce={"h": max})  # error
save_intermediates(f, transform="mean")  # error
save_intermediates(f, transform={"h": 3})  # error
save_intermediates(f, transform=lambda: 0)  # error
save_intermediates(f, spec=Float[Array, " n"])  # error
save_intermediates(f, tag=["not hashable"])  # error
eqx_sow.Fold(0.0)  # error
eqx_sow.Fold(0.0, lambda acc: acc)  # error
eqx_sow.Buffer()  # error
eqx_sow.Buffer("4")  # error
eqx_sow.Buffer(4, keep="newest")  # error


# As a decorator.
@save_intermediates
def bare(x: Array) -> Array:
    return x


@save_intermediates(names="h")
def with_options(x: Array) -> Array:
    return x


@save_intermediates(nams="h")  # error
def misspelt(x: Array) -> Array:
    return x


class Model(eqx.Module):
    @save_intermediates
    def __call__(self, x: Array) -> Array:
        return x

    @save_intermediates(modes="primal")
    def encode(self, x: Array) -> Array:
        return x


bare(x).sum()  # error
bare("x")  # error
with_options(x).sum()  # error
with_options()  # error
Model()()  # error
Model()(x).sum()  # error
Model().encode(x, x)  # error
Model().encode(x)["h"]  # error

# `sow`.
sow(x)  # error
sow("h", x)  # error
sow(x, 3)  # error
sow(x, "h", Float[Array, " n"])  # error
sow(x, "h", tags=1)  # error
sow(x, "h", tag={})  # error
sow(x, "h").no_method()  # error
text: str = sow(x, "h")  # error
sow((x, 1), "h").sum()  # error
eqx_sow.Sow(3)  # error
eqx_sow.Sow("h", tag=[])  # error
eqx_sow.Sow("h")()  # error
eqx_sow.Sow("h")(x).no_method()  # error

# `plant`.
plant(f)  # error
plant(f, x)  # error
plant(f, [("h", x)])  # error
plant(f, {0: x})  # error
plant(f, {"h": x}, mode="cotangnet")  # error
plant(f, {"h": x}, modes="primal")  # error
plant(f, {"h": x}, capture="Linear")  # error
plant(f, {"h": x}, calls="yes")  # error
plant(f, {"h": x})("x")  # error
plant(f, {"h": x})(x).no_method()  # error

# `tap`.
tap(f, "print")  # error
tap(f, lambda: None)  # error
tap(f, lambda name, value: None)  # error
tap(f, lambda event: print(event.nam))  # error
tap(f, every=0.5)  # error
tap(f, every="10")  # error
tap(f, when=True)  # error
tap(f, modes="gradient")  # error
tap(f, reduce=eqx_sow.Last())  # error
tap(f)(x, factor=2.0)  # error

# `summarize` and the others.
eqx_sow.summarize(x, bins=10)  # error
eqx_sow.summarize(x, edges="auto")  # error
eqx_sow.summarize(x).median  # error
eqx_sow.summarize(x) + 3  # error
eqx_sow.summarize(x).merge(axis="layer")  # error
eqx_sow.register_rule("scan")  # error
eqx_sow.save_intermediate(f)  # error
