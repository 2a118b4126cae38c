# %% [markdown]
# # Every layer of a trained network
#
# Trains a small convolutional network on handwritten digits, then looks at every layer.
#
# The model has a `Sow` layer after each layer that we may want to look at. These cost
# nothing during training, because we do not capture there. Afterwards one call returns
# the activations of all marked layers, and the gradients that flow back through them.

# %%
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from eqx_sow import save_intermediates, Sow, tabulate
from jaxtyping import Array, Float, Int, PRNGKeyArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


# %% [markdown]
# ## The model
#
# A convolutional network for one image of 8 by 8 pixels. Each `Sow` has a name and a
# shape. This is the shape for one image, although the loss maps the model over a batch.


# %%
def make_model(key: PRNGKeyArray) -> eqx.nn.Sequential:
    k1, k2, k3 = jax.random.split(key, 3)
    return eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, 16, kernel_size=3, padding=1, key=k1),
            eqx.nn.Lambda(jax.nn.relu),
            Sow("conv1", Float[Array, "16 8 8"]),
            eqx.nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1, key=k2),
            eqx.nn.Lambda(jax.nn.relu),
            Sow("conv2", Float[Array, "32 4 4"]),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(32 * 4 * 4, 10, key=k3),
            Sow("logits", Float[Array, " 10"]),
        ]
    )


def loss(
    model: eqx.nn.Sequential,
    images: Float[Array, "batch 1 8 8"],
    labels: Int[Array, " batch"],
) -> Float[Array, ""]:
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# %% [markdown]
# ## The data
#
# 1,797 handwritten digits, which come with scikit-learn.

# %%
digits = load_digits()
train_images, test_images, train_labels, test_labels = train_test_split(
    (digits.images[:, None] / 16).astype(np.float32),
    digits.target.astype(np.int32),
    test_size=0.2,
    random_state=0,
)


# %% [markdown]
# ## Training, as usual


# %%
def train(model, images, labels, *, epochs=15, batch_size=64):
    optimiser = optax.adam(3e-3)
    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, images, labels):
        grads = eqx.filter_grad(loss)(model, images, labels)
        updates, state = optimiser.update(grads, state)
        return eqx.apply_updates(model, updates), state

    rng = np.random.default_rng(0)
    for _ in range(epochs):
        order = rng.permutation(len(images))
        for i in range(0, len(images) - batch_size + 1, batch_size):
            batch = order[i : i + batch_size]
            model, state = step(model, state, images[batch], labels[batch])
    return model


start = time.perf_counter()
model = train(make_model(jax.random.key(0)), train_images, train_labels)
seconds = time.perf_counter() - start
accuracy = float(np.mean(jax.vmap(model)(test_images).argmax(axis=1) == test_labels))
print(f"Trained in {seconds:.0f} s. Test accuracy: {accuracy:.1%}\n")
assert accuracy > 0.95

# %% [markdown]
# ## The one call
#
# `save_intermediates` wraps the function that we have anyway, the gradient of the loss.
# The result is what this function returns, and in addition all marked values.

# %%
images, labels = test_images[:32], test_labels[:32]
grad = eqx.filter_jit(eqx.filter_grad(loss))
grads, intermediates = save_intermediates(grad)(model, images, labels)
print(tabulate(intermediates))

# %% [markdown]
# ## Is it right?
#
# Compare with the same values computed by hand.

# %%
# The gradients of the parameters are what they are without eqx_sow.
assert eqx.tree_equal(grads, grad(model, images, labels), rtol=1e-4, atol=1e-6)

shapes = {"conv1": (16, 8, 8), "conv2": (32, 4, 4), "logits": (10,)}
assert list(intermediates) == list(shapes)
for name, shape in shapes.items():
    assert list(intermediates[name]) == ["primal", "cotangent"]
    for x in intermediates[name].values():
        assert x.shape == (32, *shape)

# The activations: run the model only as far as the second convolution.
front, back = model[:5], model[5:]
conv2 = jax.vmap(front)(images)
assert np.allclose(intermediates["conv2"]["primal"], conv2, atol=1e-5)


# The gradient at a layer: add a zero there, and differentiate with respect to it.
def perturbed(zero):
    return loss(back, conv2 + zero, labels)


by_hand = jax.grad(perturbed)(jnp.zeros_like(conv2))
assert np.allclose(intermediates["conv2"]["cotangent"], by_hand, atol=1e-6)

# The gradient at the logits is known in closed form.
logits = intermediates["logits"]["primal"]
error = (jax.nn.softmax(logits) - jax.nn.one_hot(labels, 10)) / len(images)
assert np.allclose(intermediates["logits"]["cotangent"], error, atol=1e-6)

# %% [markdown]
# What to notice:
#
# - Neither the training step nor the loss knows that it is watched.
# - All shapes begin with the 32 images of the batch. The annotations in the model,
#   which were checked, are for one image, as the code inside `jax.vmap` sees it.
# - The share of zeros shows what ReLU switched off. The gradient is dense there all the
#   same: the `Sow` comes after the ReLU, and the gradient has not gone through it yet.
