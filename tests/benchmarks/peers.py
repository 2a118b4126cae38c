"""One model and one task in several libraries: an MLP, the values of all its hidden
layers, and the gradients there.

`hooks` is another task, a sweep of patches in PyTorch.

What is not installed is left out. None of these is needed elsewhere: `pip install flax
penzai tesseract-core tesseract-jax` next to eqx_sow. (Released versions of penzai and
tesseract-jax may need an older JAX, and then Python 3.11.)
"""

import functools as ft
import importlib.metadata
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from eqx_sow import save_intermediates, sow

from tests.helpers import thread


class Way(NamedTuple):
    """`forward(*args)` and `gradient(*args)` are not jitted yet. `read` takes the
    hidden values out of the result of the first; `read_gradient` the gradients of the
    parameters (in any form), the hidden values and their gradients out of that of the
    second."""

    forward: Callable
    gradient: Callable | None
    args: tuple
    read: Callable
    read_gradient: Callable | None
    jit: Callable = jax.jit


def weights(width: int, depth: int) -> list[tuple]:
    keys = jr.split(jr.key(0), depth)
    return [(jr.normal(k, (width, width)) / width**0.5, jnp.zeros(width)) for k in keys]


def _mlp(mark, ws, x):
    for i, (w, b) in enumerate(ws):
        x = mark(jnp.tanh(x @ w + b), f"h{i}")
    return jnp.sum(x**2)


def by_hand(ws, x):
    def gradient(ws, x):
        def loss(ws, eps):
            add = lambda mark: lambda v, name: mark(v + eps[name], name)
            return thread(lambda mark: _mlp(add(mark), ws, x))()

        eps = {f"h{i}": jnp.zeros_like(x) for i in range(len(ws))}
        (grads, cotangents), primals = jax.grad(loss, (0, 1), has_aux=True)(ws, eps)
        return grads, primals, cotangents

    return Way(
        thread(_mlp),
        gradient,
        (ws, x),
        lambda out: list(out[1].values()),
        lambda out: (out[0], list(out[1].values()), list(out[2].values())),
    )


def _read(out, mode):
    return [entry[mode] for entry in out[1].values()]


def eqx_sow(ws, x):
    fn = ft.partial(_mlp, sow)
    return Way(
        save_intermediates(fn),
        save_intermediates(jax.grad(fn)),
        (ws, x),
        lambda out: _read(out, "primal"),
        lambda out: (out[0], _read(out, "primal"), _read(out, "cotangent")),
    )


def tesseract_jax(ws, x):
    from tesseract_jax import save_intermediates, sow

    # It takes arrays, and no PyTrees of them.
    def fn(x, *leaves):
        return _mlp(sow, list(zip(leaves[::2], leaves[1::2])), x)

    argnums = tuple(range(1, 2 * len(ws) + 1))
    return Way(
        save_intermediates(fn),
        save_intermediates(jax.grad(fn, argnums)),
        (x, *jax.tree.leaves(ws)),
        lambda out: _read(out, "primal"),
        lambda out: (out[0], _read(out, "primal"), _read(out, "cotangent")),
    )


def flax_linen(ws, x):
    from flax import linen

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            for i, (w, _) in enumerate(ws):
                x = jnp.tanh(linen.Dense(w.shape[1], name=f"layer{i}")(x))
                self.sow("intermediates", f"h{i}", x)
                x = self.perturb(f"h{i}", x)
            return jnp.sum(x**2)

    net = Net()
    names = [f"h{i}" for i in range(len(ws))]
    params = {f"layer{i}": {"kernel": w, "bias": b} for i, (w, b) in enumerate(ws)}

    def apply(params, eps, x):
        variables = {"params": params, "perturbations": eps}
        return net.apply(variables, x, mutable=["intermediates"])

    def forward(params, x):
        return net.apply({"params": params}, x, mutable=["intermediates"])

    def gradient(params, x):
        eps = {name: jnp.zeros_like(x) for name in names}
        return jax.grad(apply, (0, 1), has_aux=True)(params, eps, x)

    # flax appends each value to a tuple.
    values = lambda state: [state["intermediates"][name][0] for name in names]
    return Way(
        forward,
        gradient,
        (params, x),
        lambda out: values(out[1]),
        lambda out: (out[0][0], values(out[1]), [out[0][1][n] for n in names]),
    )


def _nnx(ws):
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            make = lambda w: nnx.Linear(*w.shape, rngs=rngs)
            self.layers = nnx.List([make(w) for w, _ in ws])

        def __call__(self, x):
            for i, layer in enumerate(self.layers):
                x = jnp.tanh(layer(x))
                self.sow(nnx.Intermediate, f"h{i}", x)
                x = self.perturb(f"h{i}", x)
            return jnp.sum(x**2)

    net = Net()
    for (w, b), layer in zip(ws, net.layers):
        layer.kernel[...], layer.bias[...] = w, b

    run = lambda net, x: net(x)

    def forward(net, x):
        return nnx.capture(run, nnx.Intermediate)(net, x)

    def gradient(zeros, net, x):
        def loss(net, eps):
            return nnx.capture(run, nnx.Intermediate, init=eps)(net, x)

        eps = jax.tree.map(jnp.zeros_like, zeros)
        return nnx.grad(loss, argnums=(0, 1), has_aux=True)(net, eps)

    def value(state, name):
        (leaf,) = jax.tree.leaves(state[name])
        return leaf

    names = [f"h{i}" for i in range(len(ws))]
    values = lambda state: [value(state, n) for n in names]
    zeros = lambda x: nnx.capture(run, nnx.Perturbation)(net, x)[1]
    read = lambda out: values(out[1])
    read_gradient = lambda out: (out[0][0], values(out[1]), values(out[0][1]))
    return nnx, net, forward, gradient, zeros, read, read_gradient


def flax_nnx(ws, x):
    nnx, net, forward, gradient, zeros, read, read_gradient = _nnx(ws)
    gradient = ft.partial(gradient, zeros(x))
    return Way(forward, gradient, (net, x), read, read_gradient, nnx.jit)


def flax_nnx_split(ws, x):
    """The same, with the model taken apart by hand before `jax.jit`."""
    nnx, net, forward, gradient, zeros, read, read_gradient = _nnx(ws)
    zeros = zeros(x)
    graph, state = nnx.split(net)
    return Way(
        lambda state, x: forward(nnx.merge(graph, state), x),
        lambda state, x: gradient(zeros, nnx.merge(graph, state), x),
        (state, x),
        read,
        read_gradient,
    )


def penzai(ws, x):
    from penzai import pz
    from penzai.toolshed.save_intermediates import SaveIntermediate

    @pz.pytree_dataclass
    class Dense(pz.nn.Layer):
        w: Any
        b: Any

        def __call__(self, x, **_):
            return jnp.tanh(x @ self.w + self.b)

    layers = [layer for w, b in ws for layer in (Dense(w, b), SaveIntermediate())]
    model, variables = pz.unbind_variables(pz.nn.Sequential(layers), freeze=True)

    def forward(model, variables, x):
        model = pz.bind_variables(model, variables, unfreeze_as_copy=True)
        out = model(x)
        _, variables = pz.unbind_variables(model, freeze=True)
        return jnp.sum(out**2), variables

    read = lambda out: [v.value for v in out[1]]
    return Way(forward, None, (model, variables, x), read, None)


def hooks(blocks, new, x):
    """A function that runs the blocks of `run.Heads` in PyTorch, once for each layer
    and position at which a hook puts `new`; or `None` if PyTorch is not installed."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)
    there = lambda a: torch.tensor(np.asarray(a))
    start, new = there(x), there(new)

    class Block(torch.nn.Module):
        def __init__(self, split, merge):
            super().__init__()
            self.split, self.merge = split, merge

        def forward(self, x):
            q, k, v = torch.einsum("nd,kdhf->khnf", x, self.split)
            z = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            return x + torch.tanh(torch.einsum("hnf,hfd->nd", z, self.merge))

    weights = zip(there(blocks.split), there(blocks.merge))
    model = torch.nn.Sequential(*(Block(*w) for w in weights))

    def patched(layer, position):
        def hook(module, args, out):
            out = out.clone()
            out[position] = new[layer, position]
            return out

        handle = model[layer].register_forward_hook(hook)
        try:
            return float((model(start) ** 2).mean())
        finally:
            handle.remove()

    @torch.no_grad()
    def all_of_them():
        return [patched(*at) for at in np.ndindex(new.shape[:2])]

    return all_of_them


PEERS = {
    "eqx_sow": (eqx_sow, "eqx_sow"),
    "tesseract-jax": (tesseract_jax, "tesseract-jax"),
    "flax linen": (flax_linen, "flax"),
    "flax nnx, nnx.jit": (flax_nnx, "flax"),
    "flax nnx, split and jax.jit": (flax_nnx_split, "flax"),
    "penzai": (penzai, "penzai"),
}


def installed(ws, x) -> tuple[dict[str, Way], list[str]]:
    """What there is, by name and version, and the names of what there is not."""
    ways, missing = {}, []
    for name, (peer, package) in PEERS.items():
        try:
            way = peer(ws, x)
        except ImportError:
            missing.append(name)
        else:
            ways[f"{name} {importlib.metadata.version(package)}"] = way
    return ways, missing
