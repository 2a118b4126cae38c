"""Find the mistake in a port from PyTorch, and what bfloat16 changes.

The first part writes a small network of PyTorch's in Equinox, with its weights, and
with a mistake that nothing reports: the shapes are right, and the output looks
plausible. `compare` shows the first layer that computes something else. Neither model
is edited: PyTorch's values come from hooks, those of the port from `capture=`.

The second part compares the port in bfloat16 with itself in float32, values and
gradients, layer by layer.

    python examples/port_from_pytorch.py
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from eqx_sow import compare, Intermediates, save_intermediates
from jaxtyping import Array, Float


try:
    import torch
except ImportError as e:
    raise SystemExit("This example compares with PyTorch: `pip install torch`.") from e


WIDTH, DEPTH = 32, 3

# The tolerances below are for float32, on a GPU too.
jax.config.update("jax_default_matmul_precision", "highest")


# --- The original ---
class TorchBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([TorchBlock() for _ in range(DEPTH)])
        self.head = torch.nn.Linear(WIDTH, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def record(net: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output of each module, under the name that the port has for it."""
    outputs = {}
    for name, module in net.named_modules():
        path = name.replace(".", "/") or "."

        def hook(module, args, out, path=path):
            outputs[path] = out

        module.register_forward_hook(hook)
    with torch.no_grad():
        net(x)
    return outputs


# --- The port ---
class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: Callable = eqx.field(static=True)

    def __call__(self, x: Float[Array, " d"]) -> Float[Array, " d"]:
        return x + self.down(self.activation(self.up(self.norm(x))))


class Net(eqx.Module):
    blocks: list[Block]
    head: eqx.nn.Linear

    def __call__(self, x: Float[Array, " d"]) -> Float[Array, " 10"]:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def port(weights: dict[str, torch.Tensor], activation: Callable) -> Net:
    def filled(layer, name):
        new = [jnp.asarray(weights[f"{name}.{x}"].numpy()) for x in ("weight", "bias")]
        return eqx.tree_at(lambda m: (m.weight, m.bias), layer, new)

    def linear(n_in, n_out, name):
        return filled(eqx.nn.Linear(n_in, n_out, key=jax.random.key(0)), name)

    def block(name):
        norm = filled(eqx.nn.LayerNorm(WIDTH), f"{name}.norm")
        up = linear(WIDTH, 4 * WIDTH, f"{name}.up")
        down = linear(4 * WIDTH, WIDTH, f"{name}.down")
        return Block(norm, up, down, activation)

    blocks = [block(f"blocks.{i}") for i in range(DEPTH)]
    return Net(blocks, linear(WIDTH, 10, "head"))


def save(model: Net, xs: Float[Array, "batch d"]) -> Intermediates:
    call = save_intermediates(model, capture=True)
    return eqx.filter_jit(eqx.filter_vmap(call))(xs)[1]


def find_the_mistake() -> Net:
    torch.manual_seed(0)
    original, xs = TorchNet(), torch.randn(16, WIDTH)
    want = record(original, xs)

    comparison = compare(
        save(port(original.state_dict(), jax.nn.gelu), jnp.asarray(xs.numpy())), want
    )
    print("The port, against PyTorch:\n")
    print(comparison)
    # `up` is right, and `down` is not. So what is between them differs: `jax.nn.gelu`
    # is an approximation unless one asks for what PyTorch computes.
    assert comparison.first == ("blocks/0/down", "primal")

    mended = port(original.state_dict(), lambda x: jax.nn.gelu(x, approximate=False))
    comparison = compare(save(mended, jnp.asarray(xs.numpy())), want)
    print("\nWith `approximate=False`:\n")
    print(comparison)
    # In a test, this is the line to write.
    assert comparison.first is None
    return mended


# --- bfloat16 ---
def save_gradients(model: Net, xs: Float[Array, "batch d"]) -> Intermediates:
    def loss(model, xs):
        return jnp.mean(jax.vmap(model)(xs).astype(jnp.float32) ** 2)

    call = save_intermediates(eqx.filter_grad(loss), capture=eqx.nn.Linear)
    return eqx.filter_jit(call)(model, xs)[1]


def compare_precisions(model: Net) -> None:
    xs = jax.random.normal(jax.random.key(1), (16, WIDTH))
    as_half = lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x
    half = jax.tree.map(as_half, model)
    ours, theirs = save_gradients(half, as_half(xs)), save_gradients(model, xs)
    # bfloat16 has three digits. Of numbers near zero fewer are right, as they are
    # differences of larger ones.
    comparison = compare(ours, theirs, rtol=0.1, atol=0.02)
    print("\nbfloat16, against float32:\n")
    print(comparison)
    assert comparison.first is None


if __name__ == "__main__":
    compare_precisions(find_the_mistake())
