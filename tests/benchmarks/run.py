"""The figures of the library, each as a ratio to a baseline in the same process.

    python tests/benchmarks/run.py [--repeats N] [--only SECTION ...] [--markdown]

A ratio is the median over rounds in which the two run one after the other, in an order
that changes; behind it are the first and the last decile. The column "itself" is the
baseline against itself, measured in the same way: what differs less than that from 1
cannot be told apart from 1 on this machine. The column "rounds" counts them: there are
`--repeats`, or, after the second, as many as fit into 0.3 seconds for each. Times are
those of one core, in seconds of the CPU (`--clock wall` for those on the wall).
`--all-cores` uses all of them, and the clock on the wall. Nothing but the values is
asserted.

Other libraries are measured if they are installed; `peers.py` says how.
"""

import argparse
import contextlib
import datetime
import os
import pathlib
import platform
import subprocess
import sys


# Memory that one call frees is there for the next; with large results, page faults
# would be all that is measured. (Settings of glibc, read when a process starts.)
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_TOP_PAD_": str(2**27),
}
if __name__ == "__main__" and not MALLOC.keys() <= os.environ.keys():
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC})

# Before jax is imported: one thread on one core, so that ratios do not depend on what
# else runs, and on which other core it finds its data.
if "--all-cores" not in sys.argv:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
    )
os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import functools as ft
import itertools as it
import time
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from eqx_sow import (
    Append,
    batched,
    Fold,
    plant,
    save_intermediates as S,
    sow,
    summarize,
    tabulate,
    tap,
)
from jax import lax

from tests.benchmarks import peers, timing
from tests.benchmarks.timing import compare, costs, interleaved, ratio
from tests.benchmarks.zoo import Block, cases, zoo
from tests.helpers import assert_close, thread, unmarked


TIMES = "at most", "ratio", "itself", "time", "rounds"
COSTS = "FLOPs", "bytes", "temporaries", "instructions"
WIDTHS = {"what": 62, "time": 10, "at most": 8, "rounds": 6} | dict.fromkeys(COSTS, 12)


class Table:
    """Rows under the title of a section, printed as text at once, or as Markdown."""

    def __init__(self, markdown: bool):
        self.markdown = markdown
        self.columns = ()

    def section(self, title: str, *columns: str):
        self.columns = ("what", *columns)
        print(f"\n### {title}\n" if self.markdown else f"\n{title}")
        self._line(["", *columns])
        if self.markdown:
            self._line(["---", *["---:"] * len(columns)])

    def row(self, what: str, **cells):
        cells = {k.replace("_", " "): v for k, v in cells.items()} | {"what": what}
        assert cells.keys() <= set(self.columns), cells
        self._line([str(cells.get(c, "")) for c in self.columns])

    def times(
        self,
        what: str,
        aim: str,
        fn: Callable,
        baseline: Callable,
        repeats: int,
        sample: float = 4e-3,
        collect: bool = False,
        **cells,
    ):
        """A row for how long two functions take, with more `cells`."""
        result = compare(fn, baseline, repeats, sample, collect)
        self.row(
            what,
            at_most=aim,
            ratio=result.ratio,
            itself=result.itself,
            time=seconds(result.seconds),
            rounds=result.rounds,
            **cells,
        )

    def programs(
        self, what: str, aim: str, fn: Callable, baseline: Callable, args: tuple, *how
    ):
        """A row for two compiled programs: how long they take, and what XLA says."""
        figures = zip(costs(fn), costs(baseline))
        flops, read, temporaries, _, instructions = (over(*f) for f in figures)
        cells = dict(zip(COSTS, (flops, read, temporaries, instructions)))
        self.times(what, aim, lambda: fn(*args), lambda: baseline(*args), *how, **cells)

    def say(self, text: str):
        print(f"\n{text}", flush=True)

    def _line(self, cells):
        if self.markdown:
            print(f"| {' | '.join(cells)} |", flush=True)
        else:
            first, *rest = (
                cell.ljust(WIDTHS.get(c, 22)) for c, cell in zip(self.columns, cells)
            )
            print(first, *rest, sep="  ", flush=True)


def seconds(x: float) -> str:
    return f"{x * 1e3:,.1f} ms" if x > 1e-2 else f"{x * 1e6:,.0f} us"


def size(x: float) -> str:
    return f"{x / 1e6:,.2f} MB" if x > 1e5 else f"{x:,.0f} B"


def over(x: float, y: float) -> str:
    return f"{x / y:.3f}" if y else "1.000" if x == y else f"{x:,.0f} to 0"


def compiled(fn: Callable, *args):
    return jax.jit(fn).lower(*args).compile()


# --- Captured against threaded by hand ------------------------------------------------


def same(table: Table, repeats: int):
    table.section(
        "`jit(S(f))` against the program that returns the same values by hand",
        *TIMES,
        *COSTS,
    )
    for program in zoo():
        for case in cases(program):
            saved, by_hand = (
                compiled(f, *case.args) for f in (case.saved, case.by_hand)
            )
            got, want = saved(*case.args), by_hand(*case.args)
            assert_close(got, want, rtol=1e-3, atol=1e-4)
            what = f"{program.name}: {case.name}"
            table.programs(what, case.aim, saved, by_hand, case.args, repeats)


# --- Off ------------------------------------------------------------------------------


def off(table: Table, repeats: int):
    table.section("While nothing is captured", "at most", "figure")

    def text(fn, mark, *args):
        def loss(params, x):
            return fn(mark, params, x)

        form = jax.value_and_grad(loss) if args[0].reverse else loss
        return jax.jit(form).lower(*args[1:]).as_text()

    programs = zoo()
    identical = 0
    for program in programs:
        args = program, program.params, jax.tree.map(lambda x: x[0], program.xs)
        identical += text(program.fn, sow, *args) == text(program.fn, unmarked, *args)
    table.row(
        "programs above whose lowered text is that without sows",
        at_most="all",
        figure=f"{identical} of {len(programs)}",
    )
    x, n = jnp.ones(3), 10_000
    call = lambda: [sow(x, "a") for _ in range(n)] and x
    (times,) = interleaved([call], repeats)
    table.row(
        '`sow(x, "a")`, eager',
        at_most="1 us",
        figure=f"{sorted(times)[len(times) // 2] / n * 1e6:.3f} us",
    )


# --- Calls ----------------------------------------------------------------------------


class Net(eqx.Module):
    layers: list

    def __init__(self, width, depth=3):
        keys = jr.split(jr.key(0), depth)
        self.layers = [eqx.nn.Linear(width, width, key=k) for k in keys]

    def __call__(self, x, mark):
        for i, layer in enumerate(self.layers):
            x = mark(jnp.tanh(layer(x)), f"h{i}")
        return x


def _marked(model, x):
    return jax.vmap(lambda x: model(x, sow))(x)


def _by_hand(model, x):
    return jax.vmap(thread(lambda mark, x: model(x, mark)))(x)


def dispatch(table: Table, repeats: int):
    table.section(
        "A call of a small MLP (3 layers, 128 wide, batch of 32)",
        *TIMES,
    )
    model, x = Net(128), jnp.ones((32, 128))
    by_hand = eqx.filter_jit(_by_hand)
    outer, inner = eqx.filter_jit(S(_marked)), S(eqx.filter_jit(_marked))
    for what, aim, fn, baseline in (
        ("`filter_jit(S(f))` against `filter_jit` by hand", "1.05", outer, by_hand),
        ("`S(filter_jit(f))` against `filter_jit` by hand", "1.3", inner, by_hand),
        ("`S(f)` against by hand, neither jitted", "", S(_marked), _by_hand),
    ):
        table.times(
            what, aim, lambda: fn(model, x), lambda: baseline(model, x), repeats
        )
    for _ in range(200):
        S(eqx.filter_jit(lambda model, x: _marked(model, x)))(Net(2), x[:, :2])
    table.times(
        "`S(filter_jit(f))`, 200 functions captured before, against `filter_jit`",
        "1.3",
        lambda: inner(model, x),
        lambda: by_hand(model, x),
        repeats,
    )

    for what, transform in (
        ("`filter_jit(S(f))`", lambda f: eqx.filter_jit(S(f))),
        ("`S(filter_jit(f))`", lambda f: S(eqx.filter_jit(f))),
    ):
        traces, compilations = _count(transform, model, x)
        table.row(
            f"{what}: traces and compilations in 10 calls",
            at_most="1 and 1",
            ratio=f"{traces} and {compilations}",
        )
    eager, one = S(_eager), jnp.ones(())
    table.times(
        "`S(f)`, eager, of a scan, a cond and a while_loop, against `f`",
        "3",
        lambda: eager(one),
        lambda: _eager(one),
        repeats,
    )


def _add(x, y):
    return sow(x + y, "scan"), None


def _yes(x):
    return sow(jnp.cos(x), "cond")


def _no(x):
    return sow(jnp.sin(x), "cond")


def _going(x):
    return x < 100


def _double(x):
    return sow(2 * x + 1, "while")


def _eager(x):
    x, _ = lax.scan(_add, x, jnp.ones(5))
    return lax.while_loop(_going, _double, lax.cond(x > 0, _yes, _no, x))


def _count(transform, model, x):
    traces = 0

    def fn(model, x):
        nonlocal traces
        traces += 1
        return _marked(model, x)

    saved = transform(fn)
    with _compilations() as compilations:
        for _ in range(10):
            saved(model, x)
    return traces, len(compilations)


@contextlib.contextmanager
def _compilations():
    """A list that grows with each compilation."""
    found = []

    def compiles(event, _, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(compiles)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(compiles)


# --- Tracing --------------------------------------------------------------------------


def _chain(n, mark):
    def fn(x):
        for i in range(n):
            for _ in range(5):
                x = lax.sin(lax.cos(x))
            x = mark(x, f"s{i}")
        return x

    return fn


def _nested(depth, mark):
    """A function under `jit`s and scans in turn."""
    fn = _chain(10, mark)
    for i in range(depth):
        fn = jax.jit(fn) if i % 2 else _scanned(fn)
    return fn


def _scanned(fn):
    return lambda x: lax.scan(lambda c, _: (fn(c), None), x, length=3)[0]


def _shared(n, mark):
    """One jitted function, called many times."""
    fn = jax.jit(_chain(20, mark))

    def call(x):
        for _ in range(n):
            x = fn(x)
        return x

    return call


def tracing(table: Table, repeats: int):
    table.section(
        "Tracing `jit(S(f))` against tracing `jit(f)`",
        *TIMES,
    )

    def trace(make, x=jnp.ones(3)):
        # A new function each time: JAX keeps what it traced.
        def call():
            fn = make()
            jax.jit(lambda x: fn(x)).trace(x)

        return call

    def row(what, aim, saved, plain):
        table.times(what, aim, saved, plain, repeats, sample=0.02, collect=True)

    for n, aim in ((100, ""), (500, "1.5"), (1000, "")):
        row(
            f"{10 * n:,} equations, {n:,} sows",
            aim,
            trace(lambda: S(_chain(n, sow))),
            trace(lambda: _chain(n, unmarked)),
        )
    row(
        "5,000 equations, 500 sows, against returning the values by hand",
        "",
        trace(lambda: S(_chain(500, sow))),
        trace(lambda: thread(lambda mark, x: _chain(500, mark)(x))),
    )
    row(
        "5,000 equations, 500 sows, the gradient",
        "",
        trace(lambda: S(jax.grad(lambda x: _chain(500, sow)(x).sum()))),
        trace(lambda: jax.grad(lambda x: _chain(500, unmarked)(x).sum())),
    )
    for depth in (1, 3, 6):
        row(
            f"100 equations, 10 sows, nested {depth} deep (scan, `jit`, ...)",
            "",
            trace(lambda: S(_nested(depth, sow))),
            trace(lambda: _nested(depth, unmarked)),
        )
    for n, calls in ((1, "one call"), (100, "100 calls")):
        row(
            f"jitted function, 200 equations, 20 sows, {calls}, `Append`",
            "",
            trace(lambda: S(_shared(n, sow), reduce=Append())),
            trace(lambda: _shared(n, unmarked)),
        )


# --- The first result -----------------------------------------------------------------


class _Deep(eqx.Module):
    layers: list[eqx.nn.Linear]

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def _deep_by_hand(model, x, zeros):
    values = []
    for layer, zero in zip(model.layers, zeros):
        x = layer(x) + zero
        values.append(x)
        x = jnp.tanh(x)
    return x, [*values, x]


def first(table: Table, repeats: int):
    table.section(
        "Time to the first result of `capture=True`, 100 layers (trace, lower, "
        "compile), against a program by hand that returns the same",
        *TIMES,
    )
    keys = jr.split(jr.key(0), 100)
    model, x = _Deep([eqx.nn.Linear(32, 32, key=key) for key in keys]), jnp.ones(32)
    zeros = [jnp.zeros(32)] * 100

    def loss(model, x):
        return model(x).sum()

    def loss_by_hand(model, zeros, x):
        out, values = _deep_by_hand(model, x, zeros)
        return out.sum(), values

    def compiled(make, *args):
        # A new function each time: JAX keeps what it compiled.
        def call():
            fn = make()
            jax.jit(lambda *args: fn(*args)).lower(*args).compile()

        return call

    saved = lambda fn: S(lambda model, x: fn(model, x), capture=True)
    forward = lambda model, x: _deep_by_hand(model, x, [0.0] * 100)
    gradient = jax.grad(loss_by_hand, argnums=(0, 1), has_aux=True)
    for what, ours, by_hand in (
        (
            "forward",
            compiled(lambda: saved(lambda model, x: model(x)), model, x),
            compiled(lambda: forward, model, x),
        ),
        (
            "gradient",
            compiled(lambda: saved(jax.grad(loss)), model, x),
            compiled(lambda: gradient, model, zeros, x),
        ),
    ):
        table.times(what, "1.10", ours, by_hand, repeats, sample=0.1, collect=True)


# --- Patterns -------------------------------------------------------------------------


def _layers(n, x):
    for i in range(n):
        x = sow(jnp.sin(x), f"layers/{i}/h")
    return x.sum()


def patterns(table: Table, repeats: int):
    table.section(
        "Tracing with patterns, against as many names",
        *TIMES,
    )

    def save(fn, some):
        return S(fn, names=some)

    def save_gradient(fn, some):
        return S(jax.grad(fn), names=some)

    def planted(fn, some):
        return plant(fn, dict.fromkeys(some, jnp.cos))

    def transformed(fn, some):
        return S(fn, transform=dict.fromkeys(some, jnp.sum))

    any_layer = "layers/{}/*", "**/{}/h", "l*s/{}/h*"
    n = 150
    for what, way, kinds in (
        ("`names=`", save, any_layer),
        ("`names=`, the gradient", save_gradient, any_layer[1:2]),
        ("`plant`", planted, any_layer[1:2]),
        ("`transform=`", transformed, any_layer[1:2]),
    ):

        def trace(kind):
            some = [kind.format(i) for i in range(n)]
            # A new function each time: JAX keeps what it traced.
            fn = way(lambda x: _layers(n, x), some)
            jax.make_jaxpr(lambda x: fn(x))(jnp.ones(3))

        names = ft.partial(trace, "layers/{}/h")
        for kind in kinds:
            table.times(
                f"{what}, {n} such as `{kind.format(7)}`",
                "1.2",
                ft.partial(trace, kind),
                names,
                repeats,
                sample=0.02,
                collect=True,
            )


# --- Memory ---------------------------------------------------------------------------


def _long(mark):
    def fn(x):
        def body(c, _):
            for i in range(10):
                c = mark(jnp.sin(c) * 1.01, f"n{i}")
            return c, None

        return lax.scan(body, x, None, length=10_000)[0]

    return fn


def _long_by_hand(extra, init):
    """With `extra(acc, value)`, the new `acc` and an output, for the third value."""

    def fn(x):
        def body(carry, _):
            c, acc = carry
            for i in range(10):
                c = jnp.sin(c) * 1.01
                if i == 3:
                    acc, y = extra(acc, c)
            return (c, acc), y

        (c, acc), ys = lax.scan(body, (x, init), None, length=10_000)
        return c, acc if ys is None else ys

    return fn


def memory(table: Table, repeats: int):
    del repeats
    table.section(
        "Outputs and temporaries of a scan of 10,000 iterations with 10 names",
        *("at most", "ratio", "memory"),
    )
    add = lambda acc, v: acc + jnp.sum(v)
    stack = lambda f: _long_by_hand(lambda acc, v: (acc, f(v)), None)
    for what, options, by_hand in (
        ("one name", {}, stack(lambda v: v)),
        ("one name, `transform` to a mean", {"transform": jnp.mean}, stack(jnp.mean)),
        (
            "one name, `Fold` to a sum",
            {"reduce": Fold(0.0, add)},
            _long_by_hand(lambda acc, v: (add(acc, v), None), 0.0),
        ),
    ):
        fn, x = S(_long(sow), names="n3", **options), jnp.ones(100)
        saved, by_hand = compiled(fn, x), compiled(by_hand, x)
        assert_close(saved(x)[1]["n3"]["primal"], by_hand(x)[1], rtol=1e-3)
        got, want = costs(saved).memory, costs(by_hand).memory
        table.row(what, at_most="1.01", ratio=over(got, want), memory=size(got))
    for what, fn in (("all names", S(_long(sow))), ("none", _long(unmarked))):
        table.row(f"{what}, to compare", memory=size(costs(compiled(fn, x)).memory))


# --- What it costs to store values ----------------------------------------------------


def storing(table: Table, repeats: int):
    table.section(
        "`jit(S(f))` against `jit(f)`: what it costs to return values at all",
        *TIMES,
        *COSTS,
    )
    (program,) = (p for p in zoo() if p.name.startswith("GRU"))
    args = program.params, program.xs
    everything = "all", {}
    means = "means, by `transform`", {"transform": jnp.mean}
    cotangents = "cotangents, by `modes`", {"modes": "cotangent"}
    fold = "sum, by `Fold`", {"reduce": Fold(0.0, lambda acc, x: acc + jnp.sum(x))}

    def batch(mark):
        over = jax.vmap(ft.partial(program.fn, mark), (None, 0))
        return lambda params, xs: jnp.mean(over(params, xs))

    for form, derive, variants in (
        ("forward", lambda fn: fn, (everything, means, fold)),
        ("gradient", jax.grad, (everything, cotangents, fold)),
    ):
        plain = compiled(derive(batch(unmarked)), *args)
        for what, options in variants:
            saved = compiled(S(derive(batch(sow)), **options), *args)
            what = f"{program.name}: {form}, {what}"
            table.programs(what, "", saved, plain, args, repeats)


# --- Sweeps ---------------------------------------------------------------------------


class Heads(eqx.Module):
    """A block whose attention heads are marked."""

    split: jax.Array
    merge: jax.Array

    def __init__(self, width, heads, key):
        k1, k2 = jr.split(key)
        size = width // heads
        self.split = jr.normal(k1, (3, width, heads, size)) / width**0.5
        self.merge = jr.normal(k2, (heads, size, width)) / width**0.5

    def __call__(self, x, mark):
        q, k, v = jnp.einsum("nd,kdhf->knhf", x, self.split)
        heads = mark(jax.nn.dot_product_attention(q, k, v), "heads")
        return x + jnp.tanh(jnp.einsum("nhf,hfd->nd", heads, self.merge))


def _last(mark, blocks, x):
    x, _ = lax.scan(lambda x, block: (block(x, mark), None), x, blocks)
    return jnp.mean(x**2)


def _patched(value, i, new, layer, head):
    here = (i == layer) & (jnp.arange(value.shape[1]) == head)
    return jnp.where(here[None, :, None], new[i], value)


def _planted(layer, head, blocks, new, x):
    put = lambda value, index: _patched(value, *index, new, layer, head)
    fn = ft.partial(_last, sow)
    return plant(fn, {"heads": put}, with_index=True)(blocks, x)


def _edited(layer, head, blocks, new, x):
    def body(x, at):
        i, block = at
        return block(x, lambda v, _: _patched(v, i, new, layer, head)), None

    layers = jnp.arange(len(new), dtype=jnp.int32)
    return jnp.mean(lax.scan(body, x, (layers, blocks))[0] ** 2)


def sweeps(table: Table, repeats: int):
    table.section(
        "A head replaced, `plant(..., with_index=True)`, against the edited program",
        *TIMES,
        *COSTS,
    )
    width, layers, heads = 64, 12, 8
    keys = jr.split(jr.key(0), layers)
    blocks = eqx.filter_vmap(lambda key: Heads(width, heads, key))(keys)
    x, other = jr.normal(jr.key(1), (2, 16, width))
    new = S(ft.partial(_last, sow))(blocks, other)[1]["heads"]["primal"]
    every = np.arange(layers, dtype=np.int32), np.arange(heads, dtype=np.int32)

    def sweep(fn):
        of_heads = jax.vmap(fn, (None, 0, None, None, None))
        return jax.vmap(of_heads, (0, None, None, None, None))

    for what, wrap, at in (
        (
            "one of 12 layers and 8 heads, traced",
            lambda fn: fn,
            (np.int32(3), np.int32(5)),
        ),
        ("all of them, by `vmap`", sweep, every),
    ):
        args = *at, blocks, new, x
        planted, edited = (compiled(wrap(f), *args) for f in (_planted, _edited))
        assert_close(planted(*args), edited(*args), rtol=1e-4)
        table.programs(what, "1.05", planted, edited, args, repeats)
    jitted = jax.jit(lambda *args: _planted(*args))
    with _compilations() as compilations:
        for at in it.product(*every):
            jitted(*at, blocks, new, x)
        count = len(compilations)
    table.row("compilations for all of them, one by one", at_most="1", ratio=count)


def _outputs(mark, blocks, x):
    body = lambda x, block: (mark(block(x, unmarked), "block"), None)
    return jnp.mean(lax.scan(body, x, blocks)[0] ** 2)


def _moved(value, i, new, layer, position):
    here = (i == layer) & (jnp.arange(len(value)) == position)
    return jnp.where(here[:, None], new[i], value)


def _planted_position(layer, position, blocks, new, x):
    put = lambda value, index: _moved(value, *index, new, layer, position)
    fn = ft.partial(_outputs, sow)
    return plant(fn, {"block": put}, with_index=True)(blocks, x)


def _edited_position(layer, position, blocks, new, x):
    def body(x, at):
        i, block = at
        return _moved(block(x, unmarked), i, new, layer, position), None

    layers = jnp.arange(len(new), dtype=jnp.int32)
    return jnp.mean(lax.scan(body, x, (layers, blocks))[0] ** 2)


def positions(table: Table, repeats: int):
    layers, length, width, heads = 30, 13, 128, 4
    table.section(
        f"The outputs of {layers} layers replaced at {length} positions: "
        "one program with `plant` against",
        *TIMES,
    )
    keys = jr.split(jr.key(0), layers)
    blocks = eqx.filter_vmap(lambda key: Heads(width, heads, key))(keys)
    x, other = jr.normal(jr.key(1), (2, length, width))
    new = S(ft.partial(_outputs, sow))(blocks, other)[1]["block"]["primal"]
    args = blocks, new, x
    every = [np.arange(n, dtype=np.int32) for n in (layers, length)]

    over_positions = lambda fn: jax.vmap(fn, (None, 0, None, None, None))
    over_layers = lambda fn: jax.vmap(fn, (0, None, None, None, None))
    planted, edited = (
        compiled(over_layers(over_positions(fn)), *every, *args)
        for fn in (_planted_position, _edited_position)
    )
    one = compiled(_edited_position, np.int32(0), np.int32(0), *args)
    row = compiled(over_positions(_edited_position), np.int32(0), every[1], *args)
    ways = {
        "one program, edited by hand": lambda: edited(*every, *args),
        "one by one, edited by hand": lambda: [
            one(*at, *args) for at in it.product(*every)
        ],
        "layer by layer, edited by hand, positions by `vmap`": lambda: [
            row(layer, every[1], *args) for layer in every[0]
        ],
    }
    if hooks := peers.hooks(blocks, new, x):
        ways["one by one, by PyTorch's hooks"] = hooks
    want = np.asarray(planted(*every, *args))
    for what, way in ways.items():
        got = np.array(way(), np.float32).reshape(want.shape)
        assert_close(got, want, rtol=1e-3)
        aim = "1.05" if what.startswith("one program") else ""
        table.times(what, aim, lambda: planted(*every, *args), way, repeats)
    if hooks is None:
        table.say("Not installed, so left out: PyTorch's hooks.")


# --- Whole batches --------------------------------------------------------------------


def _factor(x):
    return x.T @ x / len(x)


def batches(table: Table, repeats: int):
    table.section(
        "`transform=batched(lambda x: x.T @ x / len(x))` of every `Linear`, against "
        "the same by hand",
        *TIMES,
        *COSTS,
    )
    model, xs = Net(128, depth=6), jr.normal(jr.key(1), (256, 128))
    names = [f"model/layers/{i}" for i in range(len(model.layers))]

    def loss(model, xs):
        return jnp.mean(jax.vmap(lambda x: model(x, unmarked))(xs) ** 2)

    def told(model, eps, xs):
        primals = {}
        for name, layer in zip(names, model.layers):
            primals[name] = xs = jax.vmap(layer)(xs) + eps[name]
            xs = jnp.tanh(xs)
        return jnp.mean(xs**2), primals

    def forward(model, xs):
        out, primals = told(model, dict.fromkeys(names, 0.0), xs)
        return out, {name: {"primal": _factor(x)} for name, x in primals.items()}

    def gradient(model, xs):
        eps = dict.fromkeys(names, jnp.zeros_like(xs))
        grad = jax.grad(told, (0, 1), has_aux=True)
        (grads, cotangents), primals = grad(model, eps, xs)
        return grads, {
            name: {"primal": _factor(primals[name]), "cotangent": _factor(ct)}
            for name, ct in cotangents.items()
        }

    for what, fn, by_hand in (
        ("forward", loss, forward),
        ("gradient, of activations and cotangents", jax.grad(loss), gradient),
    ):
        saved = S(fn, capture=eqx.nn.Linear, transform=batched(_factor))
        programs = compiled(saved, model, xs), compiled(by_hand, model, xs)
        got, want = (program(model, xs) for program in programs)
        assert_close(got, want, rtol=1e-3, atol=1e-6)
        table.programs(what, "1.05", *programs, (model, xs), repeats)


# --- Tables of what was captured ------------------------------------------------------


def _by_numpy(x):
    x = np.asarray(x)
    zeros, not_finite = (x == 0).mean(), np.count_nonzero(~np.isfinite(x))
    return x.mean(), x.std(), x.min(), x.max(), np.linalg.norm(x), zeros, not_finite


def tables(table: Table, repeats: int):
    table.section("`tabulate` of 1 GB against the same numbers by NumPy", *TIMES)
    for what, n in (("one array", 1), ("64 arrays", 64)):
        one = jnp.linspace(-1.0, 1.0, 2**28 // n).reshape(-1, 1024)
        arrays = [one + i for i in range(n)]
        captured = {f"h{i}": {"primal": x} for i, x in enumerate(arrays)}
        by_numpy = lambda: list(map(_by_numpy, arrays))
        table.times(what, "1", lambda: tabulate(captured), by_numpy, repeats)

    shapes = {f"h{i}": {"primal": jr.normal(jr.key(i), (4, 20 + i))} for i in range(40)}
    start = time.process_time()
    tabulate(shapes)
    table.row(
        "40 shapes, the first table",
        at_most="2 s",
        time=seconds(time.process_time() - start),
    )


# --- Watching while it runs -----------------------------------------------------------


def _ignore(*args):
    del args


def _not_finite(x):
    return ~jnp.all(jnp.isfinite(x))


def _step(x):
    return jnp.cos(x) * 0.9 + jnp.roll(x, 1) * 0.1


def _loop(n, mark):
    def fn(x):
        return lax.scan(lambda x, _: (mark(_step(x), "x"), None), x, length=n)[0]

    return fn


def _loop_by_hand(n, tell, init=()):
    """`tell(state, i, x)` is called in each iteration."""

    def fn(x):
        def body(carry, _):
            i, state, x = carry
            x = _step(x)
            state = tell(state, i, x)
            return (i + 1, state, x), None

        return lax.scan(body, (0, init, x), length=n)[0]

    return fn


def _callback(state, i, x):
    jax.debug.callback(_ignore, i, x)
    return state


def watching(table: Table, repeats: int):
    table.section(
        "`jit(tap(f))` of a scan, with a callback that does nothing",
        *TIMES,
        *COSTS,
    )
    # As a carried state: XLA does not compute what is not used.
    predicate = lambda bad, i, x: bad | _not_finite(x)
    every, alarm = {"every": 1000}, {"when": _not_finite}
    for n, size_ in ((100_000, 100), (1_000, 50_000)):
        x = jnp.linspace(-1.0, 1.0, size_)
        few, plain = n // 100, _loop(n, unmarked)
        asked = _loop_by_hand(n, predicate, jnp.array(False))
        for what, length, options, baseline, aim in (
            ("each, by hand", few, {}, _loop_by_hand(few, _callback), ""),
            ("every 1,000th, `f`", n, every, plain, "1.05"),
            ("`when`, never true, `f`", n, alarm, plain, ""),
            ("`when`, `f` with the predicate", n, alarm, asked, "1.10"),
        ):
            tapped = compiled(tap(_loop(length, sow), _ignore, **options), x)
            what = f"{length:,} times {size(4 * size_)}: {what}"
            table.programs(what, aim, tapped, compiled(baseline, x), (x,), repeats)
            jax.effects_barrier()


# --- Statistics of a model that is trained --------------------------------------------


def _statistics(x):
    """What `summarize` returns, as it is written when only this is needed."""
    x = x.astype(jnp.float32)
    finite = jnp.isfinite(x)
    n = jnp.sum(finite, dtype=jnp.float32)
    mean = jnp.sum(x, where=finite) / n
    std = jnp.sqrt(jnp.sum((x - mean) ** 2, where=finite) / n)
    return {
        "size": jnp.float32(x.size),
        "mean": mean,
        "std": std,
        "rms": jnp.sqrt(mean**2 + std**2),
        "min": jnp.min(x, where=finite, initial=jnp.inf),
        "max": jnp.max(x, where=finite, initial=-jnp.inf),
        "zeros": jnp.sum(x == 0, dtype=jnp.float32),
        "not_finite": x.size - n,
    }


@jax.custom_vjp
def _probe(x, statistics):
    """The gradient with respect to `statistics` is what is told of that of `x`."""
    del statistics
    return x


_probe.defvjp(lambda x, _: (x, None), lambda _, ct: (ct, _statistics(ct)))


def _blocks(layers, width):
    blocks = [Block(width, k) for k in jr.split(jr.key(0), layers)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *blocks)
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), stacked)


def _trained(mark):
    """A step in bfloat16: blocks that are scanned over and checkpointed."""

    def loss(blocks, xs):
        def body(xs, block):
            block, *rest = block
            told = {}

            def at(value, name):
                value, told[name] = mark(value, name, *rest)
                return value

            return _on_batch(block, at, xs), told

        xs, told = lax.scan(jax.checkpoint(body), xs, blocks)
        return jnp.mean(xs.astype(jnp.float32) ** 2), told

    return loss


def _on_batch(block, mark, xs):
    xs = xs + mark(jax.vmap(block.attention)(xs), "attention")
    return xs + mark(jax.vmap(lambda x: block.mlp(jax.vmap(block.norm2)(x)))(xs), "mlp")


def summaries(table: Table, repeats: int):
    table.section(
        "A training step with `transform=summarize`: activations and gradients",
        *TIMES,
        *COSTS,
    )
    layers, width, batch = 8, 128, (2, 128)
    blocks = _blocks(layers, width)
    xs = jr.normal(jr.key(1), (*batch, width), jnp.bfloat16)

    def step(mark):
        loss = _trained(lambda x, name: (mark(x, name), ()))
        return lambda blocks, xs: jax.grad(lambda b: loss((b,), xs)[0])(blocks)

    def by_hand(blocks, xs):
        def told(x, name, probes):
            return _probe(x, probes[name]), _statistics(x)

        zeros = jax.eval_shape(jax.vmap(_statistics), jnp.ones((layers, 1)))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), zeros)
        probes = {"attention": zeros, "mlp": zeros}
        loss = lambda b, p: _trained(told)((b, p), xs)
        (grads, there), here = jax.grad(loss, (0, 1), has_aux=True)(blocks, probes)
        return grads, {n: {"primal": here[n], "cotangent": there[n]} for n in here}

    args = blocks, xs
    plain = compiled(step(unmarked), *args)
    summed = compiled(S(step(sow), transform=summarize), *args)
    hand = compiled(by_hand, *args)
    got, want = summed(*args), hand(*args)
    as_dict = lambda s: {k: getattr(s, k) for k in _statistics(jnp.ones(1))}
    got = got[0], {n: {m: as_dict(s) for m, s in e.items()} for n, e in got[1].items()}
    assert_close(got, want, rtol=2e-2, atol=1e-6)
    for what, baseline, aim in (
        ("against the same statistics by hand", hand, "1.05"),
        ("against the step without", plain, ""),
    ):
        table.programs(what, aim, summed, baseline, args, repeats)


# --- Other libraries ------------------------------------------------------------------


def other(table: Table, repeats: int):
    forms = ("forward", "gradient")
    table.section(
        "The hidden values of an MLP (8 layers, 128 wide, batch of 32), with their "
        "gradients: jitted, against by hand",
        *("forward", "gradient", "small, forward", "small, gradient"),
        *("tracing forward", "tracing gradient"),
    )
    sizes = {
        s: (peers.weights(w, 8), jr.normal(jr.key(1), (batch, w)))
        for s, (w, batch) in {"": (128, 32), "small, ": (4, 2)}.items()
    }
    cells, missing = {}, []
    for name, inputs in sizes.items():
        by_hand = peers.by_hand(*inputs)
        ways, missing = peers.installed(*inputs)
        ways = {"by hand": by_hand, **ways, "by hand, again": by_hand}
        for form in forms:
            there = {k: w for k, w in ways.items() if getattr(w, form)}
            calls = [_checked(w, by_hand, form) for w in there.values()]
            _compare(cells, f"{name}{form}", there, calls, repeats)
            if not name:
                calls = [_trace(w, form) for w in there.values()]
                _compare(cells, f"tracing {form}", there, calls, repeats, collect=True)
    for way, row in cells.items():
        table.row(way, **row)
    if missing:
        table.say(f"Not installed, so left out: {', '.join(missing)}.")


def _checked(way, by_hand, form):
    fn = way.jit(getattr(way, form))
    expected = getattr(by_hand, form)(*by_hand.args)
    if form == "forward":
        assert_close(way.read(fn(*way.args)), by_hand.read(expected), rtol=1e-3)
    else:
        grads, *rest = way.read_gradient(fn(*way.args))
        expected_grads, *expected_rest = by_hand.read_gradient(expected)
        assert_close(rest, expected_rest, rtol=1e-3, atol=1e-3)
        norm = lambda tree: sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))
        assert_close(norm(grads), norm(expected_grads), rtol=1e-3)
    return lambda: _arrays(fn(*way.args))


def _arrays(out):
    # Not every library returns a PyTree of arrays.
    return [x for x in jax.tree.leaves(out) if isinstance(x, jax.Array)]


def _trace(way, form):
    fn = getattr(way, form)

    def call():
        # A new function each time: JAX keeps what it traced.
        way.jit(lambda *args: fn(*args)).trace(*way.args)

    return call


def _compare(cells, column, ways, calls, repeats, **kwargs):
    baseline, *times = interleaved(calls, repeats, **kwargs)
    cells.setdefault("rounds", {})[column] = len(baseline)
    for way, t in zip(list(ways)[1:], times):
        cells.setdefault(way, {})[column] = ratio(t, baseline)


SECTIONS = {
    "same": same,
    "off": off,
    "dispatch": dispatch,
    "tracing": tracing,
    "first": first,
    "patterns": patterns,
    "memory": memory,
    "storing": storing,
    "sweeps": sweeps,
    "positions": positions,
    "batches": batches,
    "tables": tables,
    "watching": watching,
    "summaries": summaries,
    "peers": other,
}


def _where() -> str:
    """Everything that a table has to say of where it was measured."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    run = subprocess.run(git, capture_output=True, text=True, cwd=ROOT)
    return ", ".join(
        [
            f"{datetime.date.today()}",
            f"commit {run.stdout.strip() or 'unknown'}",
            f"Python {platform.python_version()}",
            f"JAX {jax.__version__}",
            f"Equinox {eqx.__version__}",
            f"{os.cpu_count()} cores, {platform.machine()}",
            jax.devices()[0].device_kind,
        ]
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=10, help="rounds, at most")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--markdown", action="store_true", help="tables for the docs")
    parser.add_argument("--clock", choices=timing.CLOCKS, default=timing.clock)
    parser.add_argument("--all-cores", action="store_true", help="not just one")
    args = parser.parse_args()
    timing.clock = "wall" if args.all_cores else args.clock
    print(_where(), f"up to {args.repeats} rounds", sep=", ")
    table = Table(args.markdown)
    for name in args.only:
        start = time.process_time()
        SECTIONS[name](table, args.repeats)
        table.say(f"Took {time.process_time() - start:.0f} s of the CPU.")
    table.say(f"All of it: {time.process_time() / 60:.1f} minutes of the CPU.")


if __name__ == "__main__":
    main()
