# %% [markdown]
# # Why does a deep network not learn?
#
# Look at every layer during training. Two networks of 24 layers learn to read digits.
# They differ in one thing: the second has a LayerNorm in each layer. The training step
# is ordinary, and does not mention eqx_sow. `capture=` selects the layers from outside,
# and `transform=` reduces each activation ("primal") and the gradient with respect to
# it ("cotangent") to one number. The same pass that trains the network returns these
# numbers.
#
# As a script, `python examples/gradient_flow.py FILE.png` also saves the picture.

# %%
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from eqx_sow import Fold, save_intermediates
from jaxtyping import Array, Float, Int, PRNGKeyArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


DEPTH, WIDTH, BATCH, STEPS = 24, 64, 64, 600
optimiser = optax.adam(3e-4)

# %% [markdown]
# ## The networks, and a training step


# %%
class Block(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.LayerNorm | None

    def __init__(self, normalise: bool, *, key: PRNGKeyArray):
        self.linear = eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=key)
        self.norm = eqx.nn.LayerNorm(WIDTH) if normalise else None

    def __call__(self, x: Float[Array, " width"]) -> Float[Array, " width"]:
        x = self.linear(x)
        if self.norm is not None:
            x = self.norm(x)
        return jax.nn.relu(x)


class Network(eqx.Module):
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, normalise: bool, *, key: PRNGKeyArray):
        *keys, last = jax.random.split(key, DEPTH + 1)
        self.blocks = [Block(normalise, key=k) for k in keys]
        self.head = eqx.nn.Linear(WIDTH, 10, key=last)

    def __call__(self, x: Float[Array, " 64"]) -> Float[Array, " 10"]:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(
    model: Network, images: Float[Array, "batch 64"], labels: Int[Array, " batch"]
) -> Float[Array, ""]:
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def step(model, state, images, labels):
    """One step of training, as usual."""
    grads = eqx.filter_grad(loss)(model, images, labels)
    updates, state = optimiser.update(grads, state)
    return eqx.apply_updates(model, updates), state


# %% [markdown]
# ## The same step, watched
#
# It also returns the root mean square (rms) of each activation and gradient.
# `mean_square` is applied where the value is captured, inside `jax.vmap`, so it
# receives the values for one image. What comes back has an axis for the batch, and we
# take the mean over it.


# %%
def mean_square(x: Float[Array, " width"]) -> Float[Array, ""]:
    return jnp.mean(x**2)


@eqx.filter_jit
def watched_step(model, state, images, labels):
    out, squares = save_intermediates(step, capture=Block, transform=mean_square)(
        model, state, images, labels
    )
    assert list(squares) == [f"model/blocks/{i}" for i in range(DEPTH)]
    rms = {
        mode: jnp.sqrt(jnp.stack([x[mode].mean() for x in squares.values()]))
        for mode in ("primal", "cotangent")
    }
    return out, rms


# %% [markdown]
# A whole run can also be one `lax.scan`, watched from outside the loop. `Fold` keeps
# the largest gradient of each layer so far, in memory that does not grow with the
# number of steps.


# %%
@eqx.filter_jit
def largest_gradients(model, state, images, labels):

    def run(model, state):
        body = lambda carry, batch: (step(*carry, *batch), None)
        return jax.lax.scan(body, (model, state), (images, labels))[0]

    largest = Fold(0.0, lambda acc, x: jnp.maximum(acc, jnp.abs(x).max()))
    (model, _), found = save_intermediates(
        run, capture=Block, modes="cotangent", reduce=largest
    )(model, state)
    return model, jnp.stack([x["cotangent"].max() for x in found.values()])


# %% [markdown]
# ## Data and training
#
# 1,797 handwritten digits, which come with scikit-learn.


# %% aside
def load_data():
    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    images -= images.mean(axis=0)
    labels = digits.target.astype(np.int32)
    return train_test_split(images, labels, test_size=0.2, random_state=0)


def make_batches(images, labels):
    """Images and labels, with a leading axis for the steps."""
    rng = np.random.default_rng(0)
    at = rng.integers(len(images), size=(STEPS, BATCH))
    return images[at], labels[at]


# %%
def start(normalise: bool):
    model = Network(normalise, key=jax.random.key(0))
    return model, optimiser.init(eqx.filter(model, eqx.is_inexact_array))


def train(normalise: bool, images, labels):
    model, state = start(normalise)
    history = []
    for batch in zip(images, labels):
        (model, state), rms = watched_step(model, state, *batch)
        history.append(rms)
    # For each mode an array with a row for each step and a column for each layer.
    return model, jax.tree.map(lambda *x: np.stack(x), *history)


def accuracy(model, images, labels) -> float:
    return float(np.mean(jax.vmap(model)(images).argmax(axis=1) == labels))


# %% [markdown]
# ## Is it right?
#
# A few steps are compared with the same values by hand: run one layer at a time, add a
# zero after each, and differentiate with respect to the zeros.


# %% aside
@eqx.filter_jit
def by_hand(model, images, labels):

    def perturbed(zeros):
        activations, x = [], images
        for block, zero in zip(model.blocks, zeros):
            x = jax.vmap(block)(x) + zero
            activations.append(x)
        logits = jax.vmap(model.head)(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), jnp.stack(activations)

    zeros = [jnp.zeros((BATCH, WIDTH))] * DEPTH
    gradients, activations = jax.grad(perturbed, has_aux=True)(zeros)
    return activations, jnp.stack(gradients)


def check(normalise: bool, images, labels, steps=5):
    images, labels = images[:steps], labels[:steps]
    model, state = watched, watched_state = start(normalise)
    largest = np.zeros(DEPTH)
    for batch in zip(images, labels):
        activations, gradients = by_hand(model, *batch)
        model, state = eqx.filter_jit(step)(model, state, *batch)
        (watched, watched_state), rms = watched_step(watched, watched_state, *batch)
        for mode, x in (("primal", activations), ("cotangent", gradients)):
            expected = np.sqrt(np.mean(np.asarray(x, np.float64) ** 2, axis=(1, 2)))
            assert np.allclose(rms[mode], expected, rtol=1e-2, atol=0), mode
        largest = np.maximum(largest, np.abs(gradients).max(axis=(1, 2)))

    # Watched or not, the network that comes out is the same.
    assert eqx.tree_equal(watched, model, rtol=1e-3, atol=1e-4)
    folded_model, folded = largest_gradients(*start(normalise), images, labels)
    assert eqx.tree_equal(folded_model, model, rtol=1e-3, atol=1e-4)
    assert np.allclose(folded, largest, rtol=1e-2, atol=0)


# %% aside
def print_table(history, largest):
    print(f"{'layer':>5} {'activation rms':>22} {'gradient rms':>21} {'largest':>9}")
    print(f"{'':5} {'first step':>11} {'last':>10} {'first step':>10} {'last':>10}")
    for i in range(DEPTH - 1, -1, -1):
        if i in (0, DEPTH - 1) or (i + 1) % 8 == 0:
            first, last = ({m: x[at, i] for m, x in history.items()} for at in (0, -1))
            print(
                f"{i + 1:5} {first['primal']:11.1e} {last['primal']:10.1e} "
                f"{first['cotangent']:10.1e} {last['cotangent']:10.1e} "
                f"{largest[i]:9.1e}"
            )
    print()


# %% [markdown]
# ## Train both

# %%
train_images, test_images, train_labels, test_labels = load_data()
images, labels = make_batches(train_images, train_labels)

results = {}
for title, normalise in (("Without normalisation", False), ("With LayerNorm", True)):
    check(normalise, images, labels)
    begin = time.perf_counter()
    model, history = train(normalise, images, labels)
    seconds = time.perf_counter() - begin
    score = accuracy(model, test_images, test_labels)
    results[title] = history, score
    before, after = (m.blocks[0].linear.weight for m in (start(normalise)[0], model))
    moved = jnp.abs(after - before).max()
    assert moved > 1e-2 if normalise else moved < 1e-3
    _, largest = largest_gradients(*start(normalise), images, labels)
    print(f"{title}: trained in {seconds:.0f} s, test accuracy {score:.0%}.\n")
    print_table(history, largest)

# %% aside
(dead, dead_score), (alive, alive_score) = results.values()
assert dead_score < 0.2 and alive_score > 0.85
# Both signals lose eight orders of magnitude or more, in each step of training.
assert (dead["primal"][:, -1] < 1e-8 * dead["primal"][:, 0]).all()
assert (dead["cotangent"][:, 0] < 1e-8 * dead["cotangent"][:, -1]).all()
# With LayerNorm, the layers stay close to each other, except for a few steps.
for mode in ("primal", "cotangent"):
    middle = np.median(alive[mode], axis=0)
    assert middle.max() < 100 * middle.min()


# %% alt="Heat maps by layer and step: without normalisation both signals fade"
def plot(results):
    plt.rcParams.update({"font.size": 11, "axes.titlesize": 12})
    figure, axes = plt.subplots(
        2, 2, figsize=(6.6, 4.2), sharex=True, sharey=True, layout="constrained"
    )
    texts = [
        "the signal fades\non its way up",
        "every layer passes\nthe signal on",
        "the gradient fades\non its way down",
        "every layer\ngets a gradient",
    ]
    panels = [(mode, *r) for mode in ("primal", "cotangent") for r in results.items()]
    for axis, text, (mode, title, (history, score)) in zip(axes.flat, texts, panels):
        groups = np.log10(history[mode]).reshape(60, -1, DEPTH)
        image = axis.imshow(
            groups.mean(axis=1).T,
            aspect="auto",
            origin="lower",
            extent=(0, STEPS, 0.5, DEPTH + 0.5),
            cmap="magma",
            vmin=-12,
            vmax=0.6,
        )
        box = dict(boxstyle="round,pad=0.35", fc="black", ec="none", alpha=0.6)
        middle = dict(ha="center", va="center", transform=axis.transAxes)
        axis.text(0.5, 0.5, text, color="white", bbox=box, size=12, **middle)
        axis.set_yticks([1, 8, 16, 24])
        axis.set_xticks([0, 200, 400, 600])
        if mode == "primal":
            axis.set_title(f"{title}:\n{score:.0%} correct")
        else:
            axis.set_xlabel("training step")
    axes[0, 0].set_ylabel("activation\nof layer")
    axes[1, 0].set_ylabel("gradient\nat layer")
    bar = figure.colorbar(image, ax=axes, pad=0.015, aspect=25)
    bar.set_label("root mean square")
    decades = (-12, -9, -6, -3, 0)
    bar.set_ticks(decades, labels=[f"$10^{{{n}}}$" for n in decades])
    return figure


figure = plot(results)
if sys.argv[1:] and sys.argv[1].endswith(".png"):
    figure.savefig(sys.argv[1], dpi=280)

# %% [markdown]
# What to notice:
#
# - Neither the model nor the training step was changed. The step that is watched is the
#   step that trains, and both end with the same weights (checked).
# - Without normalisation each layer passes on less than half of its input. The
#   activation fades on its way up, the gradient on its way down, and almost no gradient
#   reaches the first layer: after 600 steps its weights have hardly moved.
# - `transform=` saw one image at a time, inside `jax.vmap`. Of 24 activations of 64 by
#   64 numbers, 24 by 64 numbers left the program.
# - The last column comes from a second run, a single `lax.scan` over all steps. `Fold`
#   kept the largest gradient so far, and did not store a history.
