"""Train on eight devices, and look inside without moving anything between them.

The mesh has four rows of two devices. The batch is divided among the rows, and the
hidden units among the two devices of each row. `jax.jit` divides the work according to
the shardings of its arguments. Captured values have the same sharding as in the model,
and the compiled program does not communicate more than without the capture. The
activations are at "primal", JAX's word for a value itself, and the gradients with
respect to them at "cotangent".

Then the same model runs under `jax.shard_map`, where each row computes a gradient.
Captured values have an axis for the rows. So you can compare the gradients of the rows
before they are averaged: the less they agree, the more noise is in a batch.

The devices are parts of the CPU, so the script runs anywhere.
"""

import os


os.environ["JAX_PLATFORMS"] = "cpu"
if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from eqx_sow import save_intermediates, sow
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray
from sklearn.datasets import load_digits


class Model(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: PRNGKeyArray):
        k1, k2 = jax.random.split(key)
        self.up = eqx.nn.Linear(64, 128, key=k1)
        self.down = eqx.nn.Linear(128, 10, key=k2)

    def __call__(self, x: Float[Array, "64"]) -> Float[Array, "10"]:
        hidden = sow(jax.nn.relu(self.up(x)), "hidden")
        # This is a sum over the hidden units, which are on several devices, so JAX has
        # to know the sharding of the result.
        logits = jnp.dot(hidden, self.down.weight.T, out_sharding=P())
        return sow(logits + self.down.bias, "logits")


def shard_model(model: Model, mesh: Mesh) -> Model:
    """The hidden units are divided among the two devices of each row."""
    specs = [P("model"), P("model"), P(None, "model"), P()]
    where = lambda m: [m.up.weight, m.up.bias, m.down.weight, m.down.bias]
    new = [
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(where(model), specs)
    ]
    return eqx.tree_at(where, model, new)


def loss(
    model: Model, images: Float[Array, "batch 64"], labels: Int[Array, " batch"]
) -> Float[Array, ""]:
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def update(model, grads):
    return jax.tree.map(lambda p, g: p - 0.5 * g, model, grads)


def step(model, images, labels):
    value, grads = eqx.filter_value_and_grad(loss)(model, images, labels)
    return update(model, grads), value


def step_by_rows(model, images, labels, mesh: Mesh):
    """The same, but each row computes the gradient for its own part of the batch. Only
    the axis "data" is manual; `jax.jit` still divides the hidden units."""

    def of_row(model, images, labels):
        model = jax.lax.pcast(model, "data", to="varying")
        grads = eqx.filter_grad(loss)(model, images, labels)
        return jax.lax.pmean(sow(grads, "gradients"), "data")

    grads = jax.shard_map(
        of_row,
        mesh=mesh,
        in_specs=(P(), P("data"), P("data")),
        out_specs=P(),
        axis_names={"data"},
    )(model, images, labels)
    return update(model, grads)


def batches(mesh: Mesh, size=256, epochs=1):
    """Handwritten digits, which come with scikit-learn."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    rng = np.random.default_rng(0)
    sharding = NamedSharding(mesh, P("data"))
    for _ in range(epochs):
        order = rng.permutation(len(images))
        for i in range(0, len(images) - size + 1, size):
            batch = order[i : i + size]
            yield jax.device_put((images[batch], labels[batch]), sharding)


def communication(fn, *args) -> list[tuple[str, str]]:
    """The communication between devices in the compiled program: operations, shapes."""
    text = jax.jit(fn).lower(*args).compile().as_text()
    operations = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    found = re.findall(rf"= (.*?) ({operations})(?:-start)?\(", text)
    return sorted((operation, shape) for shape, operation in found)


def agreement(gradients) -> Float[Array, ""]:
    """1 if all rows have the same gradient, 1/4 if they have nothing in common."""
    square = lambda tree: sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))
    mean = jax.tree.map(lambda x: x.mean(axis=0), gradients)
    return square(mean) / (square(gradients) / 4)


def assert_close(tree, other):
    """On the host: the two may live on different devices."""
    tree, other = jax.device_get((tree, other))
    assert eqx.tree_equal(tree, other, rtol=1e-4, atol=1e-6)


def on_one_device(fn, *args):
    mesh = jax.make_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        return fn(*jax.device_put(jax.device_get(args), NamedSharding(mesh, P())))


def print_table(intermediates):
    for name, modes in intermediates.items():
        for mode, tree in modes.items():
            for path, x in jax.tree_util.tree_leaves_with_path(tree):
                full = name + jax.tree_util.keystr(path)
                part, spec = x.sharding.shard_shape(x.shape), x.sharding.spec
                print(f"{full:23} {mode:10} {str(x.shape):14} {str(part):13} {spec}")


HEADER = f"{'name':23} {'mode':10} {'shape':14} {'on a device':13} sharding"


def check_under_jit(model, images, labels, mesh, intermediates):
    specs = {"hidden": P("data", "model"), "logits": P("data")}
    assert sorted(intermediates) == sorted(specs)
    for name, modes in intermediates.items():
        assert sorted(modes) == ["cotangent", "primal"]
        for x in modes.values():
            expected = NamedSharding(mesh, specs[name])
            assert x.sharding.is_equivalent_to(expected, x.ndim), (name, x.sharding)
            assert len(x.addressable_shards) == 8

    # The same numbers as on one device.
    alone = eqx.filter_jit(save_intermediates(step))
    assert_close(intermediates, on_one_device(alone, model, images, labels)[1])

    # Nothing is gathered, and nothing is sent that is not sent without the capture.
    args = model, images, labels
    sent = communication(save_intermediates(step), *args)
    assert sent == communication(step, *args)
    assert {operation for operation, _ in sent} == {"all-reduce"}
    return sent


def check_by_rows(model, images, labels, mesh, intermediates, under_jit):
    hidden = intermediates["hidden"]["primal"]
    assert hidden.shape == (4, 64, 128)
    expected = NamedSharding(mesh, P("data", None, "model"))
    assert hidden.sharding.is_equivalent_to(expected, hidden.ndim), hidden.sharding
    for x in jax.tree.leaves(intermediates["gradients"]["primal"]):
        assert x.shape[0] == 4 and x.sharding.spec[0] == "data"

    # The same numbers, in four parts. The loss of a row is the mean over a quarter.
    for name, modes in under_jit.items():
        for mode, factor in ("primal", 1), ("cotangent", 4):
            rows = jax.device_get(intermediates[name][mode])
            assert_close(rows.reshape(256, -1), factor * modes[mode])

    # Row i has the gradient that one device computes for part i of the batch, without
    # eqx_sow.
    gradients = jax.device_get(intermediates["gradients"]["primal"])
    for i, part in enumerate(np.split(np.arange(256), 4)):
        images_of_row, labels_of_row = jax.device_get((images, labels))
        alone = on_one_device(
            eqx.filter_grad(loss), model, images_of_row[part], labels_of_row[part]
        )
        row = jax.tree.map(lambda x: x[i], gradients)
        assert_close(row, alone)

    # JAX 0.10 gathers at both ends of a `shard_map` over one axis, captured or not.
    if jax.__version_info__ >= (0, 11):
        args = model, images, labels
        by_rows = lambda *args: step_by_rows(*args, mesh)
        sent = communication(save_intermediates(by_rows), *args)
        assert sent == communication(by_rows, *args)


def main():
    assert len(jax.devices()) >= 8
    mesh = jax.make_mesh((4, 2), ("data", "model"), devices=jax.devices()[:8])
    with jax.set_mesh(mesh):
        run(mesh)


def run(mesh: Mesh):
    start = shard_model(Model(jax.random.key(0)), mesh)
    images, labels = next(batches(mesh))

    # This is the one call. The arguments determine the sharding, as always in JAX.
    saved = eqx.filter_jit(save_intermediates(step))
    (model, _), under_jit = saved(start, images, labels)
    assert jax.tree.all(
        jax.tree.map(
            lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim), model, start
        )
    )
    sent = check_under_jit(start, images, labels, mesh, under_jit)
    print(HEADER)
    print_table(under_jit)
    print("\nSent between devices, with capture and without:")
    for operation, shape in sent:
        print(f"  {operation} {re.sub(r'{.*?}', '', shape)}")

    by_rows = lambda *args: step_by_rows(*args, mesh)
    saved = eqx.filter_jit(save_intermediates(by_rows))
    after, intermediates = saved(start, images, labels)
    assert_close(after, model)
    check_by_rows(start, images, labels, mesh, intermediates, under_jit)
    print(f"\n{HEADER}")
    print_table(intermediates)

    # Train, and capture only the gradients of the rows.
    @eqx.filter_jit
    def train_step(model, images, labels):
        save = save_intermediates(by_rows, names="gradients", modes="primal")
        model, intermediates = save(model, images, labels)
        return model, agreement(intermediates["gradients"]["primal"])

    print("\nAgreement of the rows' gradients during training")
    model, history = start, []
    for images, labels in batches(mesh, epochs=30):
        model, agreed = train_step(model, images, labels)
        history.append(float(agreed))
    epochs = np.reshape(history, (30, -1)).mean(axis=1)
    for epoch in (0, 1, 2, 4, 9, 19, 29):
        print(f"  epoch {epoch + 1:2}  {epochs[epoch]:.2f}")
    predicted = jax.vmap(model)(images).argmax(axis=1)
    print(f"  accuracy on the last batch: {jnp.mean(predicted == labels):.0%}")
    assert epochs[0] > 0.45 and epochs[-1] < 0.35
    assert jnp.mean(predicted == labels) > 0.9

    print(
        """
What to notice:
- Activations and gradients come back with the sharding that they have in the model:
  each device holds a quarter of the batch and half of the hidden units. Capturing them
  does not change how the program is sharded.
- The compiled program has the same communication as without the capture, operation by
  operation: it sums gradients, and does not gather.
- Under `jax.shard_map` each value has one more axis, for the rows of the mesh, and is
  sharded over this axis. The gradients are PyTrees of type `Model`, and each array has
  the axis.
- Each row agrees with what one device computes for that part of the batch. At first the
  gradients of the rows are similar. At the end mostly noise is left (pure noise gives
  0.25), so larger batches or smaller steps would help."""
    )


if __name__ == "__main__":
    main()
