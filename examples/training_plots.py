# %% [markdown]
# # A training run in plots
#
# The plots show for each layer and each step how large activations and gradients are,
# which share of the units is off, and how the values are distributed. The training step
# is an ordinary one, wrapped in `save_intermediates`. `summarize` reduces each
# activation ("primal") and the gradient with respect to it ("cotangent") to a few
# numbers where they are computed.

# %%
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from eqx_sow import save_intermediates, summarize, tabulate
from jaxtyping import Array, Float, Int
from sklearn.datasets import load_digits


DEPTH, WIDTH, BATCH, STEPS = 5, 64, 64, 400
plt.rcParams.update({"font.size": 9, "axes.titlesize": 10})

# %% [markdown]
# ## A network and its training step
#
# 1,797 handwritten digits, which come with scikit-learn, and a network with five hidden
# layers.

# %%
digits = load_digits()
images = (digits.data / 16).astype(np.float32)
labels = digits.target.astype(np.int32)
optimiser = optax.adam(3e-3)


def make_model() -> eqx.nn.Sequential:
    *keys, last = jax.random.split(jax.random.key(0), DEPTH + 1)
    hidden = [eqx.nn.Linear(64, WIDTH, key=k) for k in keys]
    layers = [x for linear in hidden for x in (linear, eqx.nn.Lambda(jax.nn.relu))]
    return eqx.nn.Sequential([*layers, eqx.nn.Linear(WIDTH, 10, key=last)])


def loss(
    model: eqx.nn.Sequential,
    images: Float[Array, "batch 64"],
    labels: Int[Array, " batch"],
) -> Float[Array, ""]:
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def step(model, state, images, labels):
    value, grads = eqx.filter_value_and_grad(loss)(model, images, labels)
    updates, state = optimiser.update(grads, state)
    return eqx.apply_updates(model, updates), state, value


# %% [markdown]
# ## The same step, watched
#
# `capture=eqx.nn.Lambda` selects the ReLUs. Their outputs are what each layer passes
# on. With `edges`, a summary has a histogram. Here it is a histogram of magnitudes, so
# the edges are powers of ten.

# %%
DECADES = np.linspace(-7, 1, 33)


def statistics(x):
    return summarize(jnp.abs(x), edges=10.0**DECADES)


watched = save_intermediates(step, capture=eqx.nn.Lambda, transform=statistics)


@eqx.filter_jit
def watched_step(model, state, images, labels):
    out, found = watched(model, state, images, labels)
    # There is a summary for each image: make one of them.
    return out, {
        mode: [modes[mode].merge() for modes in found.values()]
        for mode in ("primal", "cotangent")
    }


model = make_model()
state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
rng = np.random.default_rng(0)
losses, history = [], []
start = time.perf_counter()
for _ in range(STEPS):
    at = rng.integers(len(images), size=BATCH)
    (model, state, value), found = watched_step(model, state, images[at], labels[at])
    losses.append(float(value))
    history.append(found)
print(f"{STEPS} steps in {time.perf_counter() - start:.0f} s, loss {losses[-1]:.3f}")
# For each mode and layer a summary in which every number has an axis for the steps.
history = jax.tree.map(lambda *x: np.stack(x), *history)

# %% [markdown]
# ## Sizes, and units that are off

# %% alt="Loss, size of activations and gradients, and share of zeros, by step"
colours = plt.get_cmap("viridis")(np.linspace(0, 0.9, DEPTH))
figure, axes = plt.subplots(2, 2, figsize=(7, 4.6), layout="constrained", sharex=True)
axes[0, 0].semilogy(losses, color="black")
axes[0, 0].set_title("loss")
for i, colour in enumerate(colours):
    activations, gradients = history["primal"][i], history["cotangent"][i]
    axes[0, 1].plot(activations.zeros / activations.size, color=colour)
    axes[1, 0].semilogy(activations.rms, color=colour, label=f"layer {i}")
    axes[1, 1].semilogy(gradients.rms, color=colour)
axes[0, 1].set_title("units that are off")
axes[0, 1].set_ylim(0, 1)
axes[1, 0].set_title("activations, root mean square")
axes[1, 1].set_title("gradients, root mean square")
axes[1, 0].legend(fontsize=7)
for axis in axes[1]:
    axis.set_xlabel("step")

# %% [markdown]
# ## Distributions
#
# Each column is the histogram of one step, and the colour shows how many of the entries
# have that size. Zeros are below every edge, so they are not shown.


# %% alt="Histograms of activations and of gradients by step, of two layers"
figure, axes = plt.subplots(2, 2, figsize=(7, 4.2), layout="constrained", sharex=True)
for row, i in zip(axes, (DEPTH - 1, 0)):
    for axis, mode in zip(row, ("primal", "cotangent")):
        s = history[mode][i]
        share = (s.histogram / s.size[:, None]).T
        extent = (0, STEPS, DECADES[0], DECADES[-1])
        axis.imshow(share, aspect="auto", origin="lower", extent=extent, cmap="magma")
        axis.set_ylabel(f"layer {i}: power of ten")
axes[0, 0].set_title("activations")
axes[0, 1].set_title("gradients")
for axis in axes[1]:
    axis.set_xlabel("step")

# %% [markdown]
# ## A table
#
# `tabulate` takes captured values as well as summaries of them. It returns a string,
# which `print` shows as a table in plain text. In a notebook, as the last line of a
# cell, it is shown as a table in HTML, and so are the captured values themselves.

# %%
grad = eqx.filter_jit(eqx.filter_grad(loss))
_, found = save_intermediates(grad, capture=eqx.nn.Lambda)(model, images, labels)
tabulate(found)

# %% [markdown]
# ## Is it right?
#
# The last step is compared with the same values by hand: run one layer after the other,
# add a zero after each, and differentiate with respect to the zeros.


# %% aside
def perturbed(zeros):
    x, activations = images, []
    for i, zero in enumerate(zeros):
        x = jax.vmap(model[2 * i : 2 * i + 2])(x) + zero
        activations.append(x)
    logits = jax.vmap(model[-1])(x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), activations


zeros = [jnp.zeros((len(images), WIDTH))] * DEPTH
gradients, activations = jax.grad(perturbed, has_aux=True)(zeros)
assert len(found) == DEPTH
for modes, activation, gradient in zip(found.values(), activations, gradients):
    assert np.allclose(modes["primal"], activation, atol=1e-4)
    assert np.allclose(modes["cotangent"], gradient, atol=1e-6)

# And the statistics of a step are those of its values.
_, again = watched_step(model, state, images, labels)
for i in range(DEPTH):
    for mode, by_hand in (("primal", activations), ("cotangent", gradients)):
        x = np.asarray(by_hand[i], np.float64)
        s = again[mode][i]
        assert np.isclose(s.rms, np.sqrt(np.mean(x**2)), rtol=1e-3)
        assert s.size == x.size and abs(int(s.zeros) - (x == 0).sum()) < 0.01 * x.size
assert np.mean(losses[-20:]) < 0.3
