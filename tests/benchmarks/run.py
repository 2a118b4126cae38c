"""The figures of the library, each as a ratio to a baseline measured in the same run.

    python tests/benchmarks/run.py [repeats]

Times are medians of interleaved runs; the spread is that of the ratios, from the first
to the last decile. Nothing is asserted here.
"""

import statistics
import sys
import time
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from eqx_sow import Fold, save_intermediates, sow
from jax import lax


REPEATS = int(sys.argv[1]) if len(sys.argv) > 1 else 30


def interleaved(fn: Callable, baseline: Callable, inner: int = 1):
    """Median ratio of the times of two functions, its spread, and the median time."""

    def run(f):
        start = time.perf_counter()
        for _ in range(inner):
            out = f()
        jax.block_until_ready(eqx.filter(out, eqx.is_array))
        return (time.perf_counter() - start) / inner

    for f in (fn, baseline):
        run(f), run(f)
    pairs = [(run(fn), run(baseline)) for _ in range(REPEATS)]
    ratios = sorted(a / b for a, b in pairs)
    tenth = len(ratios) // 10
    median = statistics.median(a for a, _ in pairs)
    return statistics.median(ratios), ratios[tenth], ratios[-1 - tenth], median


def row(what, reach, ratio, low=None, high=None, seconds=None):
    spread = "" if low is None else f"{low:.2f} to {high:.2f}"
    each = "" if seconds is None else f"{seconds * 1e6:,.1f} us"
    print(f"{what:<58} {reach:>9} {ratio:>9.3f}  {spread:<14} {each:>14}", flush=True)


class Net(eqx.Module):
    layers: list
    mark: Callable = eqx.field(static=True)

    def __call__(self, x):
        for i, layer in enumerate(self.layers):
            x = self.mark(jnp.tanh(layer(x)), f"h{i}")
        return x


class ByHand(eqx.Module):
    layers: list

    def __call__(self, x):
        hidden = []
        for layer in self.layers:
            x = jnp.tanh(layer(x))
            hidden.append(x)
        return x, hidden


def unmarked(x, name):
    del name
    return x


def layers(width=128, depth=3):
    keys = jr.split(jr.key(0), depth)
    return [eqx.nn.Linear(width, width, key=k) for k in keys]


def dispatch():
    x = jnp.ones((32, 128))
    marked, by_hand = Net(layers(), sow), ByHand(layers())
    call = lambda model, x: jax.vmap(model)(x)
    baseline = eqx.filter_jit(call)
    outer = eqx.filter_jit(save_intermediates(call))
    inner = save_intermediates(eqx.filter_jit(call))
    run = lambda: baseline(by_hand, x)
    row(
        "filter_jit(S(f)), small MLP, per call",
        "1.05",
        *interleaved(lambda: outer(marked, x), run, 20),
    )
    row(
        "S(filter_jit(f)), small MLP, per call",
        "1.3",
        *interleaved(lambda: inner(marked, x), run, 20),
    )

    start = time.perf_counter()
    for _ in range(100_000):
        sow(x, "a")
    row("sow(x, 'a'), off, in microseconds", "1", (time.perf_counter() - start) * 10)


def run_time():
    ws, x = jr.normal(jr.key(0), (12, 256, 256)) / 16, jnp.ones((64, 256))

    def chain(mark, eps=None):
        def loss(ws, x):
            for i in range(len(ws)):
                x = mark(jnp.tanh(x @ ws[i]), i)
            return jnp.sum(x**2)

        return loss

    def forward(ws, x):
        marked = {}
        out = chain(lambda v, i: marked.setdefault(i, v))(ws, x)
        return out, marked

    named = chain(lambda v, i: sow(v, f"h{i}"))
    fn, baseline = jax.jit(save_intermediates(named)), jax.jit(forward)
    row(
        "jit(S(f)), 12 layers, run time",
        "1.05",
        *interleaved(lambda: fn(ws, x), lambda: baseline(ws, x), 5),
    )

    def gradient(ws, x):
        def loss(ws, eps):
            marked = {}
            add = lambda v, i: marked.setdefault(i, v + eps[i])
            return chain(add)(ws, x), marked

        eps = jnp.zeros((12, 64, 256))
        return jax.grad(loss, (0, 1), has_aux=True)(ws, eps)

    fn = jax.jit(save_intermediates(jax.grad(named)))
    baseline_gradient = jax.jit(gradient)
    row(
        "jit(S(grad(f))) against a zero perturbation, run time",
        "1.00",
        *interleaved(lambda: fn(ws, x), lambda: baseline_gradient(ws, x), 5),
    )

    def scanned(ws, x):
        def body(c, w):
            return sow(jnp.tanh(c @ w), "h"), None

        return jnp.sum(lax.scan(jax.checkpoint(body), x, ws)[0] ** 2)

    def scanned_by_hand(ws, x):
        def loss(ws, eps):
            def body(c, we):
                w, e = we
                c = jnp.tanh(c @ w) + e
                return c, c

            c, h = lax.scan(jax.checkpoint(body), x, (ws, eps))
            return jnp.sum(c**2), h

        eps = jnp.zeros((12, 64, 256))
        return jax.grad(loss, (0, 1), has_aux=True)(ws, eps)

    fn = jax.jit(save_intermediates(jax.grad(scanned)))
    by_hand = jax.jit(scanned_by_hand)
    row(
        "the same through a checkpointed scan",
        "1.05",
        *interleaved(lambda: fn(ws, x), lambda: by_hand(ws, x), 5),
    )


def tracing():
    def chain(n, mark):
        def fn(x):
            for i in range(n):
                for _ in range(5):
                    x = lax.sin(lax.cos(x))
                x = mark(x, f"s{i}")
            return x

        return fn

    x = jnp.ones(3)
    for n in (100, 500, 1000):
        # A new function each time: JAX keeps what it traced.
        plain = lambda: jax.jit(chain(n, unmarked)).trace(x).jaxpr.eqns and x
        saved = lambda: jax.jit(save_intermediates(chain(n, sow))).trace(x) and x
        row(
            f"tracing jit(S(f)), {10 * n} equations, {n} sows",
            "1.5",
            *interleaved(saved, plain),
        )

    model = eqx.nn.Sequential([eqx.nn.Linear(4, 4, key=jr.key(0)) for _ in range(100)])
    plain = lambda: jax.jit(lambda x: model(x)).trace(jnp.ones(4)) and x
    call = lambda model, x: model(x)
    saved = save_intermediates(call, capture=True)
    captured = lambda: jax.jit(lambda x: saved(model, x)).trace(jnp.ones(4)) and x
    row("tracing with capture=True, 101 modules", "2.3", *interleaved(captured, plain))


def memory():
    def many(x):
        def body(c, _):
            for i in range(10):
                c = sow(jnp.sin(c) * 1.01, f"n{i}")
            return c, None

        return lax.scan(body, x, None, length=10_000)[0]

    def by_hand(x):
        def body(carry, _):
            c, acc = carry
            for i in range(10):
                c = jnp.sin(c) * 1.01
                acc = acc + jnp.sum(c) if i == 3 else acc
            return (c, acc), None

        return lax.scan(body, (x, 0.0), None, length=10_000)[0]

    def size(fn):
        memory = jax.jit(fn).lower(jnp.ones(1000)).compile().memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    fold = Fold(0.0, lambda acc, v: acc + jnp.sum(v))
    saved = save_intermediates(many, names="n3", reduce=fold)
    row(
        "Fold over 10,000 iterations, compiled memory", "1", size(saved) / size(by_hand)
    )


if __name__ == "__main__":
    print(f"JAX {jax.__version__}, Equinox {eqx.__version__}, {jax.devices()[0]}")
    print(f"{'':<58} {'at most':>9} {'ratio':>9}  {'spread':<14} {'median':>14}")
    dispatch()
    run_time()
    tracing()
    memory()
