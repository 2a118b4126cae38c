"""Fit a neural ODE to real data, then look at every evaluation of the solver.

The data are the numbers of pelts of snowshoe hares and of lynxes, in thousands, that
the Hudson's Bay Company bought in each year from 1900 to 1920. The vector field is a
small network. diffrax solves the equation with adaptive steps, in a while loop.

`capture=` selects the vector field, and `Buffer` keeps all its evaluations with their
times and states, including those in steps that the solver rejected. Under
`eqx.filter_grad` the same call also returns the gradient with respect to each
evaluation (its "cotangent"), with diffrax's default adjoint.

With a file name, `python examples/neural_ode.py FILE.png` also draws the picture.
"""

import sys

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.legend_handler
import matplotlib.pyplot as plt
import numpy as np
import optax
from eqx_sow import Buffer, save_intermediates
from jaxtyping import Array, Float


# The checks below are for float32, on a GPU too.
jax.config.update("jax_default_matmul_precision", "highest")

HARES = """30 47.2 70.2 77.4 36.3 20.6 18.1 21.4 22 25.4 27.1
           40.3 57 76.6 52.3 19.5 11.2 7.6 14.6 16.2 24.7"""
LYNXES = """4 6.1 9.8 35.2 59.4 41.7 19 13 8.3 9.1 7.4
            8 12.3 19.5 45.7 51.1 29.7 15.8 9.7 10.1 8.6"""
YEARS = jnp.arange(21.0)
PELTS = np.array([HARES.split(), LYNXES.split()], np.float32).T
MEAN, STD = np.log(PELTS).mean(axis=0), np.log(PELTS).std(axis=0)
DATA = jnp.asarray((np.log(PELTS) - MEAN) / STD)


class Field(eqx.Module):
    mlp: eqx.nn.MLP

    def __call__(self, t, y: Float[Array, "2"], args) -> Float[Array, "2"]:
        return self.mlp(y)


class Model(eqx.Module):
    field: Field
    start: Float[Array, "2"]


def solve(field: Field, start: Float[Array, "2"], saveat: diffrax.SaveAt, t1=20.0):
    return diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Tsit5(),
        t0=0.0,
        t1=t1,
        dt0=0.1,
        y0=start,
        saveat=saveat,
        stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-4),
        max_steps=256,
    )


def loss(model: Model) -> Float[Array, ""]:
    ys = solve(model.field, model.start, diffrax.SaveAt(ts=YEARS)).ys
    return jnp.mean((ys - DATA) ** 2)


def loss_of_short_runs(model: Model, years: int = 3) -> Float[Array, ""]:
    """Starts from the data again in each year, which makes learning much easier."""
    saveat = diffrax.SaveAt(ts=YEARS[1 : years + 1])
    starts = DATA[:-years]
    run = lambda start: solve(model.field, start, saveat, t1=float(years)).ys
    targets = jnp.stack([DATA[i + 1 : i + 1 + years] for i in range(len(starts))])
    return jnp.mean((jax.vmap(run)(starts) - targets) ** 2)


def train(model, loss, *, steps):
    optimiser = optax.adam(optax.cosine_decay_schedule(1e-2, steps))
    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state):
        grads = eqx.filter_grad(loss)(model)
        updates, state = optimiser.update(grads, state)
        return eqx.apply_updates(model, updates), state

    for _ in range(steps):
        model, state = step(model, state)
    return model


class Record(eqx.Module):
    """The steps that a solve tried. Tsit5 evaluates the vector field once before the
    first step, and then six times in each step, the last time at its end."""

    t: Float[np.ndarray, "step 6"]
    y: Float[np.ndarray, "step 6 2"]
    f: Float[np.ndarray, "step 6 2"]
    first: tuple[np.ndarray, np.ndarray, np.ndarray]

    @property
    def accepted(self):
        """A step was accepted if the next one begins where it ended."""
        start, end, _ = self.ends
        next_start = np.append(start[1:], end[-1])
        return np.isclose(next_start, end, atol=1e-4)

    @property
    def ends(self):
        first = diffrax.Tsit5.tableau.c[0]
        size = (self.t[:, -1] - self.t[:, 0]) / (1 - first)
        return self.t[:, -1] - size, self.t[:, -1], size


def make_record(intermediates) -> Record:
    (t, y, _), _ = intermediates["field.inputs"]["primal"]
    f, count = intermediates["field"]["primal"], intermediates["field"]["count"]
    t, y, f = (np.asarray(x[:count]) for x in (t, y, f))
    assert count == len(t) and (count - 1) % 6 == 0
    in_steps = lambda x: x[1:].reshape(-1, 6, *x.shape[1:])
    return Record(in_steps(t), in_steps(y), in_steps(f), (t[0], y[0], f[0]))


def check_record(record: Record, solution: diffrax.Solution, field: Field):
    """Compares with diffrax's own records, and with the tableau of the method."""
    accepted = record.accepted
    assert len(accepted) == solution.stats["num_steps"]
    assert accepted.sum() == solution.stats["num_accepted_steps"]
    assert (~accepted).sum() == solution.stats["num_rejected_steps"] > 0

    # The solution continues from the last evaluation of an accepted step.
    n = accepted.sum()
    assert np.allclose(record.t[accepted, -1], solution.ts[:n], atol=1e-5)
    assert np.allclose(record.y[accepted, -1], solution.ys[:n], atol=1e-5)

    # Each evaluation has the time and the state that the method prescribes.
    assert np.allclose(record.f, jax.vmap(jax.vmap(field.mlp))(record.y), atol=1e-5)
    tableau = diffrax.Tsit5.tableau
    t, y, f = record.first
    for i in range(len(accepted)):
        size = record.ends[2][i]
        slopes = np.concatenate([f[None], record.f[i]])
        for j, (c, a) in enumerate(zip(tableau.c, tableau.a_lower)):
            assert np.isclose(record.t[i, j], t + c * size, atol=1e-4)
            expected = y + size * a @ slopes[: j + 1]
            assert np.allclose(record.y[i, j], expected, atol=1e-4)
        if accepted[i]:
            t, y, f = record.t[i, -1], record.y[i, -1], record.f[i, -1]


def check_gradients(grads: Model, intermediates, record: Record):
    """The gradient of a layer's parameters is the sum over all its evaluations."""
    count = 1 + record.t.size
    hidden = intermediates["model/field/mlp/layers/0"]
    out = intermediates["model/field/mlp/layers/1"]
    layers = grads.field.mlp.layers
    assert hidden["count"] == out["count"] == count

    # The backward pass goes through the evaluations from the last to the first.
    backward = lambda x: np.asarray(x[:count][::-1])
    y = np.concatenate([record.first[1][None], record.y.reshape(-1, 2)])
    inputs = y, jnp.tanh(hidden["primal"][:count])
    for layer, x, saved in zip(layers, inputs, (hidden, out)):
        cotangent = backward(saved["cotangent"])
        assert np.allclose(layer.bias, cotangent.sum(axis=0), atol=1e-5)
        assert np.allclose(layer.weight, cotangent.T @ x, atol=1e-5)

    field = intermediates["model/field"]
    assert np.array_equal(field["cotangent"], out["cotangent"])
    size = np.linalg.norm(backward(field["cotangent"])[1:], axis=1).reshape(-1, 6)
    assert not size[~record.accepted].any()
    return size


def draw(file, model, record, size_of_gradient):
    plt.rcParams.update({"font.size": 11, "axes.titlesize": 12})
    figure, (top, middle, bottom) = plt.subplots(
        3, 1, figsize=(6.6, 7), height_ratios=[2, 1.5, 1], sharex=True,
        layout="constrained",
    )  # fmt: skip
    accepted = record.accepted
    pelts = lambda y: np.exp(np.asarray(y) * STD + MEAN)
    fine = jnp.linspace(0, 20, 400)
    curves = pelts(solve(model.field, model.start, diffrax.SaveAt(ts=fine)).ys)
    for i, (name, colour) in enumerate(
        [("hares", "tab:blue"), ("lynxes", "tab:orange")]
    ):
        top.plot(1900 + fine, curves[:, i], color=colour, lw=1.2)
        top.plot(1900 + YEARS, PELTS[:, i], "s", color=colour, ms=5, mfc="w")
        top.plot([], [], "s-", color=colour, ms=5, mfc="w", label=f"{name}, and fit")
        for which, style in (accepted, dict(c=colour)), (~accepted, dict(c="tab:red")):
            t, y = record.t[which].ravel(), pelts(record.y[which])[..., i].ravel()
            marker = "." if which is accepted else "x"
            top.scatter(1900 + t, y, marker=marker, s=22, lw=1, **style)
    top.set_ylabel("pelts, in thousands")
    top.set_ylim(0, 1.8 * PELTS.max())
    both = [top.plot([], [], ".", color=f"tab:{c}")[0] for c in ("blue", "orange")]
    rejected = top.plot([], [], "x", color="tab:red")[0]
    handles, labels = top.get_legend_handles_labels()
    top.legend(
        [*handles, tuple(both), rejected],
        [*labels, "evaluation", "in a rejected step"],
        handler_map={tuple: matplotlib.legend_handler.HandlerTuple(None)},
        ncols=2,
        loc="upper center",
        frameon=False,
    )

    start, end, _ = record.ends
    for i, ok in enumerate(accepted):
        colour = "0.25" if ok else "tab:red"
        middle.plot([1900 + start[i], 1900 + end[i]], [i, i], color=colour, lw=1.2)
        middle.plot(1900 + record.t[i], [i] * 6, "." if ok else "x", color=colour, ms=5)
    middle.set_ylabel("attempted step")
    middle.invert_yaxis()

    t = 1900 + record.t[accepted].ravel()
    bottom.vlines(t, 0, size_of_gradient[accepted].ravel(), color="tab:green", lw=1.5)
    bottom.set_ylim(0)
    bottom.set_ylabel("size of the\ngradient there")
    bottom.set_xticks(range(1900, 1921, 4))
    bottom.set_xlabel("year")
    figure.align_ylabels()
    figure.savefig(file, dpi=280)


def main():
    mlp = eqx.nn.MLP(2, 2, width_size=24, depth=1, activation=jnp.tanh,
                     key=jax.random.key(0))  # fmt: skip
    model = Model(Field(mlp), DATA[0])
    model = train(model, loss_of_short_runs, steps=300)
    model = train(model, loss, steps=500)
    print(f"Trained. The error is {float(loss(model)):.0%} of the data's variance.\n")
    assert loss(model) < 0.15

    # What the solver evaluated, in the while loop. `inputs=True` keeps (t, y, args).
    saved = save_intermediates(solve, capture=Field, inputs=True, reduce=Buffer(512))
    solution, intermediates = eqx.filter_jit(saved)(
        model.field, model.start, diffrax.SaveAt(steps=True)
    )
    record = make_record(intermediates)
    check_record(record, solution, model.field)

    # The gradient at each evaluation, with diffrax's default adjoint.
    grad = eqx.filter_grad(loss)
    saved = save_intermediates(grad, capture=(Field, eqx.nn.Linear), reduce=Buffer(512))
    grads, intermediates = eqx.filter_jit(saved)(model)
    plain = eqx.filter_jit(grad)(model)
    assert eqx.tree_equal(grads, plain, rtol=1e-4, atol=1e-6)
    size_of_gradient = check_gradients(grads, intermediates, record)

    print("attempt  from    to      size   |gradient|")
    for i, (start, end, size) in enumerate(zip(*record.ends)):
        what = f"{size_of_gradient[i].sum():9.4f}" if record.accepted[i] else "rejected"
        print(f"{i:5}  {1900 + start:7.2f} {1900 + end:7.2f} {size:6.2f}    {what:>9}")
    rejected = (~record.accepted).sum()
    print(
        f"\n{1 + record.t.size} evaluations, {6 * rejected} of them in "
        f"{rejected} rejected steps."
    )

    if len(sys.argv) > 1:
        draw(sys.argv[1], model, record, size_of_gradient)

    print(
        """
What to notice:
- Neither the vector field nor diffrax was edited. From a while loop you get the last
  value only; with `reduce=Buffer(512)` all evaluations come back in order, and their
  number as "count".
- The rejected steps are included. diffrax counts them, but does not say where they are.
  The evaluations were compared with diffrax's own times, states and counts, and each
  state with the Runge-Kutta tableau.
- The gradient with respect to each evaluation comes from diffrax's default adjoint,
  which solves parts of the equation again on the way back. This does not count as a
  second execution: the count is that of the forward solve. Rejected evaluations have a
  gradient of zero.
- The products of these gradients and the inputs of the layer, summed over all
  evaluations, are the gradient of the loss with respect to the weights."""
    )


if __name__ == "__main__":
    main()
