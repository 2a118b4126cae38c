"""Programs in which the arrays of a model come to its call by some way. See
`meeting.py`."""

import diffrax
import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import optimistix as optx
import paramax

from tests.meeting import (
    Act,
    descend,
    Layer,
    Lora,
    make_net,
    mapped,
    ONE,
    program,
    TWO,
    X,
)


@program(ONE, TWO)
def half_of_another(run):
    def fn(a, b, x):
        c = eqx.tree_at(lambda m: m.layers[0], a, b.layers[0])
        return run(c, x, "a", {"layers/0": "b/layers/0"})

    return fn


@program(ONE, TWO)
def a_layer_from_another_place(run):
    def fn(a, b, x):
        c = eqx.tree_at(lambda m: m.layers[1].b, a, b.layers[0].b)
        return run(c, x, "a")

    return fn


@program(ONE, TWO)
def compared(run):
    def fn(a, b, x):
        assert jax.tree.structure(a) == jax.tree.structure(b)
        same = jnp.asarray(eqx.tree_equal(a, b))
        return jnp.where(same, run(a, x, "a"), run(b, x, "b"))

    return fn


@program(ONE, TWO)
def stopped(run):
    def fn(m, old, x):
        target = run(lax.stop_gradient(old), x, "old")
        return jnp.sum((run(m, x, "m") - target) ** 2)

    return fn


@program(ONE)
def cast(run):
    def fn(m, x):
        m = mapped(lambda p: p.astype(jnp.bfloat16), m)
        return run(m, x.astype(jnp.bfloat16), "m")

    return fn


@program(ONE)
def normalised(run):
    def fn(m, x):
        m = mapped(lambda p: p / jnp.linalg.norm(p), m)
        return run(m, x, "m")

    return fn


@program(lambda: Lora(Layer(X, X + 1), X + 2, X + 3), TWO)
def lora(run):
    return lambda m, net, x: run(net, run(m, x, "m"), "net")


def _positive(net):
    exp = paramax.Parameterize(jnp.exp, net.layers[0].w)
    return eqx.tree_at(lambda m: m.layers[0].w, net, exp)


@program(lambda: _positive(make_net(0)))
def unwrapped(run):
    return lambda m, x: run(paramax.unwrap(m), x, "m")


try:
    import quax
except TypeError:
    # The releases beside the oldest of everything cannot be imported.
    pass
else:

    @program(ONE)
    def quaxified(run):
        return quax.quaxify(lambda m, x: run(m, x, "m"))


def _one_by_one(run, wrap):
    call = wrap(lambda layer, x, name: jnp.tanh(run(layer, x, name)))

    def fn(m, x):
        for i, layer in enumerate(m.layers):
            x = call(layer, x, run.static(f"m/layers/{i}"))
        return x

    return fn


@program(ONE)
def one_jitted_function(run):
    return _one_by_one(run, eqx.filter_jit)


@program(ONE)
def one_checkpointed_function(run):
    return _one_by_one(run, eqx.filter_checkpoint)


@program(ONE)
def one_jitted_function_in_a_loop(run):
    inner = _one_by_one(run, eqx.filter_jit)
    return lambda m, x: lax.fori_loop(0, 3, lambda _, x: inner(m, x), x)


@program(ONE)
def one_jitted_gradient(run):
    call = eqx.filter_jit(lambda layer, x, name: run.grad(layer, x, name))

    def fn(m, x):
        names = [run.static(f"m/layers/{i}") for i in range(2)]
        return [call(m, x, n) for m, n in zip(m.layers, names)]

    return fn


@program(ONE)
def stacked_inside(run):
    def fn(m, x):
        stack = mapped(lambda *p: jnp.stack(p), *m.layers)
        step = lambda x, layer: (jnp.tanh(run(layer, x, "m/layers/*")), None)
        return lax.scan(step, x, stack)[0]

    return fn


@program(lambda: [make_net(0), make_net(1)])
def nets_stacked_inside(run):
    def fn(nets, x):
        stack = mapped(lambda *p: jnp.stack(p), *nets)
        return lax.scan(lambda x, net: (run(net, x, "nets/*"), None), x, stack)[0]

    return fn


@program(lambda: mapped(lambda *p: jnp.stack(p), make_net(0), make_net(1), make_net(2)))
def stacked_before(run):
    def fn(nets, x):
        step = jax.checkpoint(lambda x, net: (run(net, x, "nets/*"), None))
        return lax.scan(step, x, nets)[0]

    return fn


@program(ONE, without=("grad",))
def in_a_while_loop(run):
    def fn(m, x):
        step = lambda s: (s[0] + 1, jnp.tanh(run(m, s[1], "m")))
        return lax.while_loop(lambda s: s[0] < 3, step, (0, x))[1]

    return fn


@program(ONE)
def trained_in_a_loop(run):
    def fn(m, x):
        step = lambda i, m: descend(m, run.grad(m, x, "m"))
        return lax.fori_loop(0, 3, step, m)

    return fn


@program(ONE)
def through_a_flat_vector(run):
    def fn(m, x):
        flat, unravel = jax.flatten_util.ravel_pytree(m)
        return run(unravel(0.9 * flat), x, "m")

    return fn


@program(lambda: jax.flatten_util.ravel_pytree(make_net(0))[0])
def from_a_flat_vector(run):
    _, unravel = jax.flatten_util.ravel_pytree(make_net(0))
    return lambda theta, x: run(unravel(theta), x, "Net")


@program(lambda: X + 1)
def made_inside(run):
    def fn(scale, x):
        one = Layer(scale * x, scale)
        two = Layer(2 * scale, scale * x)
        return run(two, run(one, x, "Layer"), "Layer#1")

    return fn


@program(ONE, without=("grad", "vmap", "jvp"))
def fixed_point(run):
    def fn(m, x):
        step = lambda y, m: 0.3 * jnp.tanh(run(m, y, "m"))
        solver = optx.FixedPointIteration(rtol=1e-2, atol=1e-2)
        return optx.fixed_point(step, solver, x, args=m, max_steps=8).value

    return fn


@program(lambda: X + 2, lambda: X + 1)
def from_arguments(run):
    return lambda w, b, x: run(Layer(w, b), x, "Layer")


@program(lambda: {"w": X, "b": X + 1})
def from_a_dict(run):
    return lambda params, x: run(Layer(**params), x, "params")


@program(ONE, lambda: Act("sin"))
def modules_without_arrays(run):
    return lambda m, act, x: run(m, run(act, x, "act"), "m")


@program(ONE, without=("jvp", "planted"))
def neural_ode(run):
    def fn(m, x):
        term = diffrax.ODETerm(lambda t, y, m: jnp.tanh(run(m, y, "m")))
        more = dict(saveat=diffrax.SaveAt(t1=True), max_steps=4)
        solve = diffrax.diffeqsolve(term, diffrax.Euler(), 0.0, 1.0, 0.5, x, m, **more)
        return solve.ys

    return fn
