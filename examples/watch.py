"""Watch a small GPT while it trains, and a stiff equation while it is solved.

Every 20th training step also returns statistics and histograms of the activations
("primal", in JAX's words) and gradients ("cotangent") of each block. Then something
goes wrong, and an alarm names the block and the step while the program is still
running. At the end, a callback shows the progress of a solver from inside diffrax's
while loop. Neither the model nor the solver is edited.

With a file name, `python examples/watch.py FILE.png` also draws the picture.
"""

import argparse
import pathlib
import sys
import time

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from eqx_sow import save_intermediates, sow, summarize, tap
from jaxtyping import Array, Float, Int, PRNGKeyArray


LAYERS, HEADS, WIDTH, LENGTH, VOCABULARY = 4, 4, 64, 64, 128
BATCH, STEPS, EVERY = 8, 240, 20
optimiser = optax.adam(2e-3)


def unit(x: Float[Array, "length heads size"]) -> Float[Array, "length heads size"]:
    return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-6)


class Block(eqx.Module):
    """A block that normalises queries and keys, as many recent models do."""

    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]

    def __init__(self, key: PRNGKeyArray):
        k1, k2, k3 = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=k1)
        self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=k2)
        self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=k3)
        self.norms = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)

    def __call__(self, x: Float[Array, "length width"]) -> Float[Array, "length width"]:
        first, second = self.norms
        causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        h = jax.vmap(first)(x)
        scaled = lambda q, k, v: (8 * unit(q), unit(k), v)
        x = x + self.attention(h, h, h, mask=causal, process_heads=scaled)
        h = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(second)(x)))
        return x + jax.vmap(self.down)(h)


class GPT(eqx.Module):
    """The blocks are one module whose arrays have a leading axis for the layers. They
    run in a scan, and under `jax.checkpoint`, so the backward pass recomputes the
    values inside each block."""

    tokens: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: Block
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key: PRNGKeyArray):
        k1, k2, k3, k4 = jax.random.split(key, 4)
        self.tokens = eqx.nn.Embedding(VOCABULARY, WIDTH, key=k1)
        self.positions = eqx.nn.Embedding(LENGTH, WIDTH, key=k2)
        self.blocks = eqx.filter_vmap(Block)(jax.random.split(k3, LAYERS))
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, key=k4)

    def __call__(self, tokens: Int[Array, " length"]) -> Float[Array, "length tokens"]:
        x = jax.vmap(self.tokens)(tokens) + self.positions.weight
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        @jax.checkpoint
        def body(x, arrays):
            return eqx.combine(arrays, static)(x), None

        x, _ = jax.lax.scan(body, x, arrays)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def loss(model: GPT, text: Int[Array, "batch length+1"]) -> Float[Array, ""]:
    half = lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x
    logits = jax.vmap(jax.tree.map(half, model))(text[:, :-1])
    logits = logits.astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
    return losses.mean()


def step(model, state, text, loss=loss):
    """One step of training, as usual."""
    value, grads = eqx.filter_value_and_grad(loss)(model, text)
    updates, state = optimiser.update(grads, state)
    return eqx.apply_updates(model, updates), state, value


def start():
    model = GPT(jax.random.key(0))
    return model, optimiser.init(eqx.filter(model, eqx.is_inexact_array))


# The text: the source of one module of Python's standard library.
source = pathlib.Path(argparse.__file__).read_bytes()
source = np.array([c for c in source if c < VOCABULARY], np.int32)


def make_batches(steps: int) -> np.ndarray:
    at = np.random.default_rng(0).integers(
        len(source) - LENGTH - 1, size=(steps, BATCH, 1)
    )
    return source[at + np.arange(LENGTH + 1)]


# `summarize` is applied to each value where it is computed: inside the scan, and in its
# backward pass. Only its results leave the scan. The edges of the histogram are powers
# of ten, so it is a histogram of magnitudes.
DECADES = np.linspace(-7, 1, 41)


def statistics(x):
    return summarize(jnp.abs(x), edges=10.0**DECADES)


watched = save_intermediates(step, capture=Block, transform=statistics)


def compiled(step):
    return eqx.filter_jit(step).lower(*start(), make_batches(1)[0]).compile()


def train(plain_step, watched_step):
    model, state = start()
    losses, history = [], []
    for i, text in enumerate(make_batches(STEPS)):
        if i % EVERY:
            model, state, value = plain_step(model, state, text)
        else:
            (model, state, value), found = watched_step(model, state, text)
            # There is a summary for each example and layer. Merge over the examples.
            found = {m: s.merge(axis=0) for m, s in found["model/blocks/*"].items()}
            history.append(jax.tree.map(np.asarray, found))
        losses.append(value)
    # For each mode, a summary whose arrays have an axis for the steps and then an axis
    # for the layers.
    return model, np.array(losses), jax.tree.map(lambda *x: np.stack(x), *history)


def print_memory(plain_step, watched_step):
    """The temporary memory of the compiled steps, as XLA reports it. Under
    `jax.checkpoint` a step keeps the input of each block, an array of shape
    `[layers, batch, length, width]`. The statistics do not add another one."""
    sizes = [
        step.compiled.memory_analysis().temp_size_in_bytes
        for step in (plain_step, watched_step)
    ]
    one = LAYERS * BATCH * LENGTH * WIDTH * jnp.bfloat16.dtype.itemsize
    print(f"temporaries of the step:             {sizes[0]:10,} bytes")
    print(f"with summaries and histograms:       {sizes[1]:10,} bytes")
    print(f"one [layers, batch, length, width]:  {one:10,} bytes\n")
    assert sizes[1] - sizes[0] < one / 4


@eqx.filter_jit
def by_hand(model, text):
    """Runs one block after the other, adds a zero after each, and differentiates with
    respect to the zeros."""
    half = lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x
    model = jax.tree.map(half, model)

    def perturbed(zeros):
        embed = lambda t: jax.vmap(model.tokens)(t) + model.positions.weight
        x, activations = jax.vmap(embed)(text[:, :-1]), []
        for i, zero in enumerate(zeros):
            slice = lambda x: x[i] if eqx.is_array(x) else x
            x = jax.vmap(jax.tree.map(slice, model.blocks))(x) + zero
            activations.append(x)
        logits = jax.vmap(jax.vmap(lambda x: model.head(model.norm(x))))(x)
        logits = logits.astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
        return losses.mean(), jnp.stack(activations)

    zeros = [jnp.zeros((BATCH, LENGTH, WIDTH), jnp.bfloat16)] * LAYERS
    gradients, activations = jax.grad(perturbed, has_aux=True)(zeros)
    return {"primal": activations, "cotangent": jnp.stack(gradients)}


def check(model, found):
    """Compares what was found in the first step."""
    for mode, x in by_hand(model, make_batches(STEPS)[0]).items():
        x = np.abs(np.asarray(x, np.float64)).reshape(LAYERS, -1)
        s = jax.tree.map(lambda x: x[0], found[mode])
        assert (s.size == BATCH * LENGTH * WIDTH).all() and not s.not_finite.any()
        expected = np.sqrt(np.mean(x**2, axis=1))
        assert np.allclose(s.rms, expected, rtol=2e-2, atol=0), (s.rms, expected)
        # Rounding in bfloat16 moves some entries to the next bin.
        bins = np.stack([np.histogram(row, 10.0**DECADES)[0] for row in x])
        assert np.abs(bins - s.histogram).sum() < 0.1 * bins.sum()


# Now something goes wrong. The query weights of one block fade: in each step they are
# multiplied by 1/100. All values stay finite. But the squares of such small numbers are
# zero in bfloat16, and the derivative of the square root overflows there: `unit` should
# have added its constant to the squares, not to the norm.
#
# The whole run is one compiled program. `when=` is evaluated on the device, and the
# callback is called only if it is true.
FADING, FADING_STEPS = 2, 16
weight_of_queries = lambda model: model.blocks.attention.query_proj.weight


def fade(model, i):
    fading = lambda w: w.at[FADING].multiply(0.01**i)
    return eqx.tree_at(weight_of_queries, model, replace_fn=fading)


def run(model, state, text):
    """All steps, in one scan."""
    arrays, static = eqx.partition((model, state), eqx.is_array)

    def body(arrays, x):
        i, text = x
        model, state = eqx.combine(arrays, static)
        faded_loss = lambda model, text: loss(fade(model, i), text)
        model, state, value = step(model, state, text, faded_loss)
        sow(value, "loss")
        return eqx.filter((model, state), eqx.is_array), None

    arrays, _ = jax.lax.scan(body, arrays, (jnp.arange(len(text)), text))
    return eqx.combine(arrays, static)


def chosen(path, module):
    return isinstance(module, Block) or path.endswith("query_proj")


def not_finite(x):
    return ~jnp.isfinite(x).all()


def place(event):
    """The step and the block of an event. The backward pass starts at the last."""
    i, block = divmod(event.count, LAYERS)
    return i, block if event.mode == "primal" else LAYERS - 1 - block


def watch_run(model, state):
    alarms, log = [], []

    def alarm(event):
        i, block = place(event)
        alarms.append((event.name, event.mode, i, block))
        log.append("alarm")
        if len(alarms) <= 2:
            n = int(event.value.not_finite.sum())
            print(
                f"  ALARM at step {i}: {event.name}, block {block}, {event.mode}: "
                f"{n:,} of {int(event.value.size.sum()):,} are not finite"
            )

    def progress(event):
        log.append(event.count)
        print(f"  step {event.count}, loss {event.value:.2f}")

    layers = ("model/blocks/**",)
    fn = tap(
        run,
        alarm,
        capture=chosen,
        names=layers,
        when=not_finite,
        transform=summarize,
        ordered=True,
    )
    fn = tap(fn, progress, names="loss", every=3, ordered=True)
    # You can capture what you tap. We need this for the picture.
    fn = save_intermediates(fn, capture=chosen, names=layers, transform=summarize)
    _, found = eqx.filter_jit(fn)(model, state, make_batches(FADING_STEPS))
    jax.effects_barrier()
    name, mode, i, block = alarms[0]
    # The alarm came at once, and the run continued.
    assert 0 < log.index("alarm") < len(log) - 1 and log[-1] == 15
    assert (name, mode) == ("model/blocks/*/attention/query_proj", "cotangent")
    assert block == FADING
    # The second alarm is the gradient that this block passes to the block before it.
    assert alarms[1] == ("model/blocks/*", "cotangent", i, FADING - 1)
    # Merge over examples and positions: one summary for each step and block.
    gradients = {
        "output": found["model/blocks/*"]["cotangent"].merge(axis=1),
        "queries": found[name]["cotangent"].merge(axis=(1, 3)),
    }
    gradients = jax.tree.map(np.asarray, gradients)
    # What the picture shows: the alarm came from the first gradient that is not finite.
    assert not gradients["output"].not_finite[i, FADING]
    assert gradients["queries"].not_finite[i, FADING]
    return i, gradients


def check_alarm(model, state, i):
    """The same run by hand, up to the alarm."""
    text = make_batches(FADING_STEPS)

    @eqx.filter_jit
    def one_step(model, state, text, i):
        faded_loss = lambda model: loss(fade(model, i), text)
        value, grads = eqx.filter_value_and_grad(faded_loss)(model)
        updates, state = optimiser.update(grads, state)
        return eqx.apply_updates(model, updates), state, value, grads.blocks

    for j in range(i + 1):
        model, state, value, grads = one_step(model, state, text[j], jnp.array(j))
        assert np.isfinite(value)
        gone = {
            "attention": ~jnp.isfinite(grads.attention.query_proj.weight),
            "down": ~jnp.isfinite(grads.down.weight),
        }
        gone = {name: x.any(axis=(1, 2)).tolist() for name, x in gone.items()}
        layers = range(LAYERS)
        # Weights after these queries get a finite gradient, and weights before do not.
        assert gone["attention"] == [j == i and n <= FADING for n in layers]
        assert gone["down"] == [j == i and n < FADING for n in layers]


# The van der Pol oscillator moves slowly for a long time, then jumps. An implicit
# solver takes long steps, and then very short ones. How far has it got? `capture=`
# selects the step-size controller. diffrax calls its method `adapt_step_size` in a
# while loop, once for each step that it tries.
END = 300.0


def van_der_pol(t, y, args):
    x, v = y
    return v, 100 * (1 - x**2) * v - x


def solve(y, controller):
    return diffrax.diffeqsolve(
        diffrax.ODETerm(van_der_pol),
        diffrax.Kvaerno5(),
        t0=0.0,
        t1=END,
        dt0=1e-3,
        y0=y,
        stepsize_controller=controller,
    )


def watch_solve():
    steps = []

    def progress(event):
        kept, start, stop, *_ = event.value
        steps.append((float(start), float(stop - start), bool(kept)))
        if len(steps) % 20 == 0:
            bar = ("#" * int(30 * start / END)).ljust(30, ".")
            print(
                f"\r  [{bar}] t = {start:5.1f}, {len(steps)} steps", end="", flush=True
            )

    fn = tap(solve, progress, capture=diffrax.PIDController, methods="adapt_step_size")
    controller = diffrax.PIDController(rtol=1e-3, atol=1e-6)
    solution = eqx.filter_jit(fn)((2.0, 0.0), controller)
    jax.effects_barrier()
    print()
    kept = sum(kept for _, _, kept in steps)
    assert len(steps) == solution.stats["num_steps"]
    assert kept == solution.stats["num_accepted_steps"]
    print(f"  {len(steps)} steps, of which {len(steps) - kept} were rejected.\n")
    return np.array(steps)


def plot(history, gradients, alarm, steps):
    plt.rcParams.update({"font.size": 11, "axes.titlesize": 12})
    figure, axes = plt.subplots(2, 2, figsize=(6.6, 5.6), layout="constrained")
    ranges = {"primal": (-2, 1), "cotangent": (-6, -3)}
    titles = ("activations", "gradients")
    for axis, title, (mode, (low, high)) in zip(axes[0], titles, ranges.items()):
        s = history[mode]
        shown = (DECADES[:-1] > low - 0.01) & (DECADES[1:] < high + 0.01)
        image = s.histogram[..., shown]
        # The blocks are stacked on top of each other; within each are the magnitudes.
        image = np.moveaxis(image, 0, -1).reshape(-1, len(image))
        extent = (-EVERY / 2, STEPS - EVERY / 2, 0, LAYERS)
        axis.imshow(image, aspect="auto", origin="lower", extent=extent, cmap="magma")
        at = EVERY * np.arange(len(s.rms))
        for block in range(LAYERS):
            height = (np.log10(s.rms[:, block]) - low) / (high - low)
            axis.plot(at, block + height, color="white", lw=1.5)
        axis.set_yticks(np.arange(LAYERS) + 0.5, labels=range(LAYERS))
        axis.hlines(range(1, LAYERS), *extent[:2], color="gray", lw=0.8)
        axis.set(xlabel="training step", xlim=extent[:2], xticks=(0, 100, 200))
        axis.set_title(f"{title}: $10^{{{low}}}$ to $10^{{{high}}}$")
    axes[0, 0].set_ylabel("block")

    axis = axes[1, 0]
    # The gradient reaches the output of a block first, and then its queries.
    rows = [(block, kind) for block in range(LAYERS) for kind in ("queries", "output")]
    pick = lambda of: np.stack([of(gradients[kind])[:, b] for b, kind in rows])
    bad, rms = pick(lambda s: s.not_finite > 0), pick(lambda s: s.rms)
    image = np.ma.masked_array(np.log10(np.where(bad, 1, rms)), bad)
    colours = plt.get_cmap("magma").with_extremes(bad="tab:red")
    axis.imshow(image, aspect="auto", origin="lower", cmap=colours)
    axis.set(xlabel="step of the fading run", title="gradients, red: not finite")
    axis.set_yticks(range(len(rows)), [f"{b}: {kind}" for b, kind in rows], size=9)
    axis.annotate(
        f"alarm: step {alarm},\nqueries of block {FADING}",
        (alarm, rows.index((FADING, "queries"))),
        (0.2, 0.3),
        color="white",
        size=9,
        arrowprops=dict(color="white", arrowstyle="->", lw=1.5, shrinkB=0),
        bbox=dict(boxstyle="round,pad=0.3", fc="black", ec="none", alpha=0.7),
    )

    axis = axes[1, 1]
    at, size, kept = steps.T
    kept = kept.astype(bool)
    axis.semilogy(at[kept], size[kept], ".", color="tab:blue", ms=3, label="kept")
    axis.semilogy(at[~kept], size[~kept], "x", color="tab:red", ms=4, label="rejected")
    axis.set(xlabel="time", title="size of the solver's steps")
    axis.legend(loc="lower right", fontsize=10)
    return figure


def main():
    plain_step, watched_step = compiled(step), compiled(watched)
    print_memory(plain_step, watched_step)

    begin = time.perf_counter()
    model, losses, history = train(plain_step, watched_step)
    seconds = time.perf_counter() - begin
    print(
        f"Trained for {STEPS} steps in {seconds:.0f} s. The loss went from "
        f"{losses[0]:.2f} to {losses[-20:].mean():.2f}.\n"
    )
    check(start()[0], history)
    assert losses[-20:].mean() < 0.65 * losses[0]

    print("A run in which the queries of one block fade:")
    alarm, gradients = watch_run(model, start()[1])
    check_alarm(model, start()[1], alarm)

    print("\nA stiff equation:")
    steps = watch_solve()

    if len(sys.argv) > 1:
        plot(history, gradients, alarm, steps).savefig(sys.argv[1], dpi=280)

    print(
        """What to notice:
- Neither the model nor the training step was changed for this, and the watched steps
  are part of the training. The statistics were compared with values computed by hand.
- The blocks are one module in a scan under `jax.checkpoint`. Only a few numbers leave
  each block, in the forward and in the backward pass. Apart from these, the compiled
  program uses the same temporary memory.
- The picture shows magnitudes. Each band is one block, and each column in it is the
  histogram of one step. The line is the root mean square.
- The alarm came while the program ran, and named the place: the gradient is not finite
  at the queries of one block, in the backward pass only. The loss was finite until
  then. In this step, the blocks before it get no usable gradient, and from the next
  step on the whole run is lost.
- The solver's loop belongs to diffrax. `capture=` selects a method of its controller,
  and each call of this method is an event, including those for rejected steps."""
    )


if __name__ == "__main__":
    main()
