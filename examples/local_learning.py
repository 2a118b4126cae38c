"""Learning without backpropagation: a rule for the inputs and outputs of each layer.

The units of this network are -1 or 1. Their derivative is zero, so gradients reach only
the last layer, and backpropagation cannot train the hidden layers. A local learning
rule trains all layers. Direct feedback alignment (Nøkland, 2016) sends the error of the
output to each layer through a fixed random matrix. A weight changes by its input times
this signal, if the unit is near its threshold. For this the rule needs the inputs and
outputs of each layer, and `capture=eqx.nn.Linear, inputs=True` returns both.

For a fair comparison, the same network with tanh instead of sign is trained by
backpropagation through all layers. The task is to tell odd digits from even ones.

    python examples/local_learning.py [FILE.png]

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
from sklearn.linear_model import RidgeClassifier
from sklearn.model_selection import train_test_split


DEPTH, WIDTH, STEPS, BATCH = 3, 256, 2000, 64


def make_model(key: PRNGKeyArray, activation=jnp.sign) -> eqx.nn.Sequential:
    """Hidden layers whose units are -1 or 1, and a last layer for odd and even."""
    *keys, last = jax.random.split(key, DEPTH + 1)
    layers = []
    for i, k in enumerate(keys):
        layers.append(eqx.nn.Linear(WIDTH if i else 64, WIDTH, key=k))
        layers.append(eqx.nn.Lambda(activation))
    return eqx.nn.Sequential([*layers, eqx.nn.Linear(WIDTH, 2, key=last)])


def predict(
    model: eqx.nn.Sequential, images: Float[Array, "batch 64"]
) -> Float[Array, "batch 2"]:
    return jax.vmap(model)(images)


def linears(model):
    return [layer for layer in model.layers if isinstance(layer, eqx.nn.Linear)]


def weights(model):
    return [x for layer in linears(model) for x in (layer.weight, layer.bias)]


# Returns the logits, and what each linear layer was called with and returned.
look = save_intermediates(predict, capture=eqx.nn.Linear, calls=True, names="**/*.call")


def inputs_and_outputs(intermediates):
    """Of each layer."""
    for call in intermediates.primals.values():
        yield call.args[0], call.out


def local_rule(
    model: eqx.nn.Sequential,
    images: Float[Array, "batch 64"],
    labels: Int[Array, " batch"],
    feedback: Float[Array, "depth 2 width"],
) -> eqx.nn.Sequential:
    """The change of each weight. It takes the place of a gradient."""
    logits, intermediates = look(model, images)
    error = (jax.nn.softmax(logits) - jax.nn.one_hot(labels, 2)) / len(labels)
    changes = []
    for i, (x, y) in enumerate(inputs_and_outputs(intermediates)):
        if i < DEPTH:
            near_threshold = 1 - jnp.tanh(y) ** 2
            signal = (error @ feedback[i]) * near_threshold
        else:
            signal = error
        changes += [signal.T @ x, signal.sum(axis=0)]
    return eqx.tree_at(weights, eqx.filter(model, eqx.is_inexact_array), changes)


def loss(model, images, labels) -> Float[Array, ""]:
    logits = predict(model, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def gradient_rule(model, images, labels, feedback):
    """Backpropagation, for comparison."""
    del feedback
    return eqx.filter_grad(loss)(model, images, labels)


def accuracy(model, images, labels) -> float:
    return float(jnp.mean(predict(model, images).argmax(axis=1) == labels))


def train(model, rule, rate, feedback, train_data, test_data):
    images, labels = train_data
    optimiser = optax.adam(optax.cosine_decay_schedule(rate, STEPS))
    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, images, labels):
        changes = rule(model, images, labels, feedback)
        updates, state = optimiser.update(changes, state)
        return eqx.apply_updates(model, updates), state

    rng = np.random.default_rng(0)
    scores = [accuracy(model, *test_data)]
    for i in range(STEPS):
        batch = rng.integers(len(images), size=BATCH)
        model, state = step(model, state, images[batch], labels[batch])
        if (i + 1) % 100 == 0:
            scores.append(accuracy(model, *test_data))
    return model, scores


def load_data():
    """1,797 handwritten digits, which come with scikit-learn."""
    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    images -= images.mean(axis=0)
    odd = digits.target.astype(np.int32) % 2
    return train_test_split(images, odd, test_size=0.2, random_state=0)


def check_rule(model, images, labels, feedback):
    """Compares with the rule in plain NumPy: one image, layer and unit at a time."""
    images, labels = images[:8], labels[:8]
    expected = [np.zeros(x.shape) for x in weights(model)]
    for image, label in zip(images, labels):
        x, seen = image, []
        for layer in linears(model):
            y = np.asarray(layer.weight) @ x + np.asarray(layer.bias)
            seen.append((x, y))
            x = np.sign(y)
        p = np.exp(y) / np.exp(y).sum()
        error = (p - np.eye(2)[label]) / len(images)
        for i, (x, y) in enumerate(seen):
            for unit in range(len(y)):
                signal = error[unit] if i == DEPTH else error @ feedback[i][:, unit]
                signal *= 1 if i == DEPTH else 1 / np.cosh(y[unit]) ** 2
                expected[2 * i][unit] += signal * x
                expected[2 * i + 1][unit] += signal
    changes = weights(local_rule(model, images, labels, feedback))
    for change, by_hand in zip(changes, expected):
        assert np.allclose(change, by_hand, atol=1e-5)


def check_no_gradient(model, images, labels):
    """Gradients do not pass through the network, and the local rule needs none."""
    _, intermediates = look(model, images)
    assert all(list(modes) == ["primal"] for modes in intermediates.values())

    # Under a gradient, the same capture shows that only the last layer gets one.
    _, intermediates = save_intermediates(
        eqx.filter_grad(loss), capture=eqx.nn.Linear, modes="cotangent"
    )(model, images, labels)
    arrives = [bool(jnp.any(x)) for x in intermediates.cotangents.values()]
    assert arrives == [False] * DEPTH + [True]


def read_layers(model, train_data, test_data):
    """The accuracy of a linear classifier on the inputs of each layer."""
    scores = []
    _, train_seen = look(model, train_data[0])
    _, test_seen = look(model, test_data[0])
    pairs = zip(inputs_and_outputs(train_seen), inputs_and_outputs(test_seen))
    for (train_x, _), (test_x, _) in pairs:
        classifier = RidgeClassifier(alpha=10.0).fit(train_x, train_data[1])
        scores.append(classifier.score(test_x, test_data[1]))
    return scores, np.asarray(test_x)


def plot(file: str, curves, reads, codes, labels):
    plt.rcParams.update({"font.size": 11, "axes.titlesize": 12})
    blue, red, grey = "#1f6f8b", "#c0392b", "#7f8c8d"
    figure, axes = plt.subplot_mosaic(
        "AAABBB;CCCDDD", figsize=(6.6, 6.4), layout="constrained"
    )
    for (label, scores), colour in zip(curves.items(), (red, grey, blue)):
        steps = np.linspace(0, STEPS, len(scores))
        label = f"{label}: {scores[-1]:.0%}".replace(", ", ",\n")
        axes["A"].plot(steps, 100 * np.array(scores), color=colour, lw=2, label=label)
    axes["A"].set(title="odd or even?", xlabel="training step")
    axes["A"].set(ylabel="test accuracy, %", xticks=[0, 1000, 2000])
    for (label, scores), colour in zip(reads.items(), (grey, blue)):
        axes["B"].plot(100 * np.array(scores), "o-", color=colour, lw=2, label=label)
    axes["B"].set(title="linear classifier\non a layer of sign units", xlabel="layer")
    axes["B"].set(ylabel="test accuracy, %")
    axes["B"].set_xticks(range(DEPTH + 1), ["pixels", *range(1, DEPTH + 1)])
    for key in "AB":
        axes[key].set_ylim(45, 100)
        axes[key].legend(loc="lower right", frameon=False, fontsize=9.5)
    for key, (label, code) in zip("CD", codes.items()):
        # The first two principal components.
        u, s, _ = np.linalg.svd(code - code.mean(axis=0), full_matrices=False)
        for odd, colour in ((0, blue), (1, red)):
            x, y = (u * s)[labels == odd, :2].T
            axes[key].scatter(x, y, s=6, color=colour, label="odd" if odd else "even")
        axes[key].set(title=f"last hidden layer,\n{label}", xticks=[], yticks=[])
        axes[key].set(xlabel="1st principal component")
        axes[key].set(ylabel="2nd principal component")
        axes[key].legend(loc="best", markerscale=2, fontsize=9.5, handletextpad=0)
    figure.savefig(file, dpi=280)


def main():
    train_images, test_images, train_labels, test_labels = load_data()
    train_data, test_data = (train_images, train_labels), (test_images, test_labels)
    model = make_model(jax.random.key(0))
    feedback = jax.random.normal(jax.random.key(1), (DEPTH, 2, WIDTH)) / np.sqrt(2)

    smooth = make_model(jax.random.key(0), jnp.tanh)
    curves = {}
    trained = {"untrained": model}
    # Backpropagation through tanh works best at a lower rate: we tried 3e-4, 1e-3 and
    # 4e-3.
    for label, start, rule, rate in (
        ("backpropagation, sign units", model, gradient_rule, 4e-3),
        ("backpropagation, tanh units", smooth, gradient_rule, 1e-3),
        ("local rule, sign units", model, local_rule, 4e-3),
    ):
        trained[label], curves[label] = train(
            start, rule, rate, feedback, train_data, test_data
        )

    # Before learning and after it.
    for m in (model, trained["local rule, sign units"]):
        check_rule(m, *train_data, feedback)
        check_no_gradient(m, *train_data)
    # Backpropagation has not changed the hidden layers of sign units.
    unchanged = weights(trained["backpropagation, sign units"])[:-2]
    for x, y in zip(unchanged, weights(model)):
        assert np.array_equal(x, y)

    reads, codes = {}, {}
    for label, name in (
        ("untrained", "untrained"),
        ("local rule", "local rule, sign units"),
    ):
        reads[label], codes[label] = read_layers(trained[name], train_data, test_data)

    print("Is a digit odd or even? Test accuracy:")
    print(f"{'linear classifier on the pixels':50} {reads['untrained'][0]:6.1%}")
    for label, scores in curves.items():
        print(f"{f'{DEPTH} hidden layers of {WIDTH}, {label}':50} {scores[-1]:6.1%}")
    print("\nA linear classifier on   pixels", end="")
    print(*(f"  layer {i + 1}" for i in range(DEPTH)))
    for label, scores in reads.items():
        print(f"{label:22}", *(f"{score:8.1%}" for score in scores))

    blocked, full, local = (scores[-1] for scores in curves.values())
    assert min(local, full) > 0.94 and abs(local - full) < 0.03
    assert local > blocked + 0.05 and local > reads["untrained"][0] + 0.02
    assert all(x > y for x, y in zip(reads["untrained"][1:], reads["untrained"][2:]))
    assert reads["local rule"][-1] > max(reads["local rule"][:2]) + 0.01

    if len(sys.argv) > 1:
        plot(sys.argv[1], curves, reads, codes, test_labels)

    print(
        """
What to notice:
- The rule needs the inputs of each layer, and its outputs before the threshold.
  `capture=eqx.nn.Linear, inputs=True` returned both for a plain `eqx.nn.Sequential`.
- Gradients do not pass through sign units. The captured gradients are exactly zero in
  each hidden layer, and backpropagation left the weights of these layers unchanged to
  the last bit: it trained the last layer only.
- The local rule trained all layers of the same network. It does as well as
  backpropagation through the same network with tanh units, the fair comparison.
- Without training, each layer of sign units after the first makes it harder for a
  linear classifier to find the answer. After training with the local rule, depth makes
  it easier.
- The changes of the weights were compared with the rule in plain NumPy, for one image,
  one layer and one unit at a time, before and after learning."""
    )


if __name__ == "__main__":
    main()
