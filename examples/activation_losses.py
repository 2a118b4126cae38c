"""Losses on values inside a network: sparse activations, and distillation.

Captured values are ordinary outputs, so a loss can depend on them. The first loss
penalises the activations of a network, so that most of its units become zero. The
second makes the hidden features of a small network, which has few labels to learn from,
similar to those of a large network. Both networks are plain `eqx.nn.Sequential`s that
do not return their activations, and neither is edited.

    python examples/activation_losses.py [FILE.png]

With a file name it draws a picture as well.
"""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from eqx_sow import save_intermediates
from jaxtyping import Array, Float, Int, PRNGKeyArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


STRENGTHS = [0, 0.1, 0.3, 1, 3]
LABELS_PER_DIGIT = 3


def make_model(width: int, *, key: PRNGKeyArray) -> eqx.nn.Sequential:
    k1, k2, k3 = jax.random.split(key, 3)
    return eqx.nn.Sequential(
        [
            eqx.nn.Linear(64, width, key=k1),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Linear(width, width, key=k2),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Linear(width, 10, key=k3),
        ]
    )


def predict(
    model: eqx.nn.Sequential, images: Float[Array, "batch 64"]
) -> Float[Array, "batch 10"]:
    return jax.vmap(model)(images)


# Returns the logits, and the outputs of both `Lambda` layers: the activations. They are
# at "primal", JAX's word for a value itself, as opposed to its derivatives.
look = save_intermediates(predict, capture=eqx.nn.Lambda)
FIRST, SECOND = "model/layers/1", "model/layers/3"

# The same, but instead of each activation it returns the mean of the absolute values:
# one number for each image.
size = save_intermediates(
    predict, capture=eqx.nn.Lambda, transform=lambda x: jnp.abs(x).mean()
)


def cross_entropy(
    logits: Float[Array, "batch 10"], labels: Int[Array, " batch"]
) -> Float[Array, ""]:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def sparse_loss(model, strength: float, images, labels):
    """The usual loss, and an L1 penalty on all activations."""
    logits, sizes = size(model, images)
    penalty = sizes[FIRST]["primal"].mean() + sizes[SECOND]["primal"].mean()
    return cross_entropy(logits, labels) + strength * penalty


def distillation_loss(student_and_projection, few_images, few_labels, images, features):
    """The usual loss for the few images with labels. For the many images without, a
    projection of the student's features should match the teacher's features."""
    student, projection = student_and_projection
    loss = cross_entropy(predict(student, few_images), few_labels)
    _, seen = look(student, images)
    error = jax.vmap(projection)(seen[SECOND]["primal"]) - features
    return loss + jnp.mean(error**2) / jnp.var(features)


def train(model, loss, data, *, steps=600, batch_size=64, watch=None):
    """Minimises `loss(model, *batch)`. Calls `watch(model)` now and then."""
    optimiser = optax.adam(optax.cosine_decay_schedule(3e-3, steps))
    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, *batch):
        grads = eqx.filter_grad(loss)(model, *batch)
        updates, state = optimiser.update(grads, state)
        return eqx.apply_updates(model, updates), state

    rng = np.random.default_rng(0)
    watched = []
    for i in range(steps):
        batch = rng.integers(len(data[0]), size=batch_size)
        model, state = step(model, state, *(x[batch] for x in data))
        if watch is not None and (i + 1) % 25 == 0:
            watched.append(watch(model))
    return model, watched


def load_data():
    """1,797 handwritten digits, which come with scikit-learn."""
    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    return train_test_split(images, labels, test_size=0.2, random_state=0)


def accuracy(model, images, labels) -> float:
    return float(jnp.mean(predict(model, images).argmax(axis=1) == labels))


def by_hand(model, images):
    """The network, layer by layer."""
    x = jax.nn.relu(jax.vmap(model[0])(images))
    y = jax.nn.relu(jax.vmap(model[2])(x))
    return jax.vmap(model[4])(y), x, y


def same(x, y):
    assert eqx.tree_equal(x, y, rtol=1e-4, atol=1e-6)


def check_sparse(model, images, labels):
    def loss(model, strength, images, labels):
        logits, x, y = by_hand(model, images)
        penalty = jnp.mean(jnp.abs(x)) + jnp.mean(jnp.abs(y))
        return cross_entropy(logits, labels) + strength * penalty

    for strength in STRENGTHS:
        same(
            eqx.filter_grad(sparse_loss)(model, strength, images, labels),
            eqx.filter_grad(loss)(model, strength, images, labels),
        )


def check_distillation(both, *data):
    def loss(both, few_images, few_labels, images, features):
        student, projection = both
        logits, _, _ = by_hand(student, few_images)
        _, _, y = by_hand(student, images)
        error = y @ projection.weight.T + projection.bias - features
        return cross_entropy(logits, few_labels) + jnp.mean(error**2) / features.var()

    expected = eqx.filter_grad(loss)(both, *data)
    same(eqx.filter_grad(distillation_loss)(both, *data), expected)


def run_sparse(train_data, test_data):
    """For each strength: accuracy, share of active units, activations."""
    model = make_model(128, key=jax.random.key(0))
    check_sparse(model, *(x[:100] for x in train_data))
    results = []
    for strength in STRENGTHS:
        loss = lambda model, *batch: sparse_loss(model, strength, *batch)
        trained, _ = train(model, loss, train_data)
        _, seen = look(trained, test_data[0])
        active = [float(jnp.mean(seen[k]["primal"] > 0)) for k in (FIRST, SECOND)]
        results.append((accuracy(trained, *test_data), active, seen[FIRST]["primal"]))
        _, *expected = by_hand(trained, test_data[0])
        assert np.allclose(active, [jnp.mean(x > 0) for x in expected], atol=1e-3)
    return results


def run_distillation(train_data, test_data):
    images, labels = train_data
    score = lambda model: accuracy(model, *test_data)
    few = np.concatenate(
        [np.flatnonzero(labels == i)[:LABELS_PER_DIGIT] for i in range(10)]
    )
    few_data = images[few], labels[few]

    plain_loss = lambda model, x, y: cross_entropy(predict(model, x), y)
    teacher, _ = train(make_model(128, key=jax.random.key(0)), plain_loss, train_data)
    _, seen = look(teacher, images)
    features = seen[SECOND]["primal"]

    student = make_model(32, key=jax.random.key(1))
    _, alone = train(student, plain_loss, few_data, watch=score)
    both = student, eqx.nn.Linear(32, 128, key=jax.random.key(2))
    check_distillation(both, *few_data, images[:100], features[:100])
    _, distilled = train(
        both,
        lambda both, *batch: distillation_loss(both, *few_data, *batch),
        (images, np.asarray(features)),
        watch=lambda both: score(both[0]),
    )
    return score(teacher), alone, distilled


def plot(file: str, sparse, distillation):
    plt.rcParams.update({"font.size": 11, "axes.titlesize": 12})
    blue, red = "#1f6f8b", "#c0392b"
    figure, axes = plt.subplot_mosaic("AD;BC", figsize=(6.6, 6), layout="constrained")
    share = [100 * np.mean(active) for _, active, _ in sparse]
    axes["A"].plot(share, [100 * s for s, _, _ in sparse], "o-", color=blue, lw=2)
    for x, (score, _, _), strength in zip(share, sparse, STRENGTHS):
        at, below = (x, 100 * score), (4, -17)
        axes["A"].annotate(strength, at, below, textcoords="offset points", ha="center")
    axes["A"].set(xlabel="active units, %", ylabel="test accuracy, %", ylim=(40, 104))
    axes["A"].set(title="L1 penalty\n(numbers: its strength)", xlim=(0, 80))
    for key, strength in (("B", 0), ("C", 1)):
        activations = sparse[STRENGTHS.index(strength)][2][:48]
        image = axes[key].imshow(
            activations,
            aspect="auto",
            cmap="Blues",
            vmin=0,
            vmax=1.2,
            interpolation="nearest",
        )
        axes[key].set(title=f"activations, strength {strength}", ylabel="image")
        axes[key].set(xlabel="unit of the first layer")
    bar = figure.colorbar(image, ax=[axes["B"], axes["C"]], location="bottom")
    bar.set_label("activation")

    teacher, alone, distilled = distillation
    steps = 25 * np.arange(1, len(alone) + 1)
    axes["D"].axhline(100 * teacher, color="grey", ls="--", label="teacher, all labels")
    for scores, colour, label in (
        (distilled, blue, "student, 30 labels\nand features"),
        (alone, red, "student, 30 labels"),
    ):
        axes["D"].plot(steps, 100 * np.array(scores), color=colour, lw=2, label=label)
    axes["D"].set(xlabel="training step", ylabel="test accuracy, %", ylim=(5, 104))
    axes["D"].set(title="distillation\nof the teacher's features")
    axes["D"].legend(loc="lower right", frameon=False)
    figure.savefig(file, dpi=280)


def main():
    train_images, test_images, train_labels, test_labels = load_data()
    train_data, test_data = (train_images, train_labels), (test_images, test_labels)

    sparse = run_sparse(train_data, test_data)
    print("L1 penalty on the activations:")
    print(f"{'strength':>10} {'active, first':>14} {'second':>8} {'accuracy':>10}")
    for strength, (score, (first, second), _) in zip(STRENGTHS, sparse):
        print(f"{strength:10} {first:14.0%} {second:8.0%} {score:10.1%}")

    teacher, alone, distilled = distillation = run_distillation(train_data, test_data)
    print("\nDistillation of features:")
    print(f"teacher, 128 units, all labels              {teacher:6.1%}")
    print(f"student, 32 units, 30 labels                {alone[-1]:6.1%}")
    print(f"student, 30 labels and teacher's features   {distilled[-1]:6.1%}")

    scores, shares, _ = zip(*sparse)
    one = STRENGTHS.index(1)
    assert np.mean(shares[one]) < 0.4 * np.mean(shares[0])
    assert min(scores[: one + 1]) > 0.95
    assert teacher > 0.95 and distilled[-1] > alone[-1] + 0.05

    if len(sys.argv) > 1:
        plot(sys.argv[1], sparse, distillation)

    print(
        """
What to notice:
- Neither model returns its activations. `capture=eqx.nn.Lambda` captures them, and
  `eqx.filter_grad` differentiates the losses that depend on them.
- With the penalty most units are zero for most images, and the accuracy stays the same.
  If the penalty is too strong, it also switches off units that are needed.
- The penalty needs only one number for each image, so `transform=` computes the mean
  inside the program, which then does not return the activations.
- From the features, the student learned what it did not learn from 30 labels. Teacher
  and student have different widths. A linear map between them is trained together with
  the student, and thrown away afterwards.
- All gradients of both losses were compared with those of a network that is written out
  layer by layer."""
    )


if __name__ == "__main__":
    main()
