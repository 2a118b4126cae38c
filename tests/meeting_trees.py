"""Programs in which two trees of one model meet. See `meeting.py`."""

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import optax

from tests.meeting import (
    APPEND,
    descend,
    make_net,
    mapped,
    mix,
    ONE,
    program,
    TWO,
)


@program(ONE)
def a_model(run):
    return lambda m, x: run(m, x, "m")


@program(ONE, TWO)
def average(run):
    def fn(e, m, x):
        e = mix(e, m)
        return run(e, x, "e"), e

    return fn


@program(ONE, TWO)
def average_and_both(run):
    def fn(e, m, x):
        y = run(m, x, "m")
        e = optax.incremental_update(m, e, 0.1)
        return y + run(e, x, "e"), e

    return fn


@program(ONE, TWO)
def average_of_what_was_trained(run):
    def fn(e, m, x):
        m = descend(m, run.grad(m, x, "m"))
        e = optax.incremental_update(m, e, 0.1)
        return run(e, x, "e"), e, m

    return fn


@program(ONE, TWO)
def student_first(run):
    def fn(student, teacher, x):
        # Equally near to both, but the student is called itself.
        teacher = mix(teacher, student)
        return run(student, x, "student") - run(teacher, x, "teacher")

    return fn


@program(ONE, TWO)
def average_in_a_scan(run):
    def fn(e, m, x):
        def step(carry, x):
            e, m = carry
            m = descend(m, run.grad(m, x, "m"))
            e = mix(e, m)
            return (e, m), run(e, x, "e")

        return lax.scan(step, (e, m), jnp.stack([x, 2 * x, -x]))

    return fn


@program(ONE, TWO)
def mean_teacher(run):
    def fn(teacher, student, x):
        target = run(teacher, x, "teacher")
        loss = lambda s: jnp.sum((run(s, x, "student") - target) ** 2)
        student = descend(student, eqx.filter_grad(loss)(student))
        return mix(teacher, student), student, target

    return fn


@program(ONE, TWO)
def gradient_as_an_argument(run):
    return lambda m, g, x: run(eqx.apply_updates(m, g), x, "m")


@program(ONE, TWO, **APPEND)
def accumulated_gradient(run):
    def fn(m, acc, x):
        acc = mapped(jnp.add, acc, run.grad(m, x, "m"))
        return run(descend(m, acc), x, "m"), acc

    return fn


@program(ONE, TWO)
def interpolated(run):
    def fn(a, b, x):
        # One operation from `b`, three from `a`.
        c = mapped(lambda p, q: q + 0.3 * (p - q), a, b)
        return run(c, x, "b")

    return fn


@program(ONE, TWO)
def distance(run):
    def fn(a, b, x):
        apart = optax.tree.norm(mapped(jnp.subtract, a, b))
        return apart * (run(a, x, "a") - run(b, x, "b"))

    return fn


@program(lambda: [make_net(0), make_net(1)])
def ensemble(run):
    def fn(pair, x):
        stack = mapped(lambda p, q: jnp.stack([p, q]), *pair)
        return jax.vmap(lambda m: run(m, x, "pair"))(stack)

    return fn


@program(lambda: [make_net(0), make_net(1)])
def soup(run):
    def fn(nets, x):
        mean = mapped(lambda *p: jnp.stack(p).mean(0), *nets)
        return run(mean, x, "nets")

    return fn


@program(ONE, TWO)
def hvp_of_an_argument(run):
    def fn(m, v, x):
        g = lambda m: run.grad(m, x, "m")
        return eqx.filter_jvp(g, (m,), (v,))

    return fn


@program(ONE)
def hvp_of_what_is_closed_over(run):
    v = make_net(1)

    def fn(m, x):
        dot = lambda m: optax.tree.vdot(run.grad(m, x, "m"), v)
        return eqx.filter_grad(dot)(m)

    return fn


@program(ONE, TWO)
def weights_by_cond(run):
    def fn(a, b, x):
        c = lax.cond(jnp.sum(x) > 0, lambda: a, lambda: b)
        return run(c, x, "a")

    return fn


@program(ONE, TWO)
def calls_by_cond(run):
    def fn(a, b, x):
        in_a, in_b = (lambda x: run(a, x, "a")), (lambda x: run(b, x, "b"))
        return lax.cond(jnp.sum(x) > 0, in_a, in_b, x)

    return fn


@program(ONE, TWO)
def weights_by_where(run):
    def fn(a, b, x):
        c = mapped(lambda p, q: jnp.where(jnp.sum(x) > 0, p, q), a, b)
        return run(c, x, "a")

    return fn


@program(ONE, TWO)
def proximal(run):
    def fn(m, center, x):
        near = lambda m: optax.tree.norm(mapped(jnp.subtract, m, center), squared=True)
        return eqx.filter_grad(lambda m: run.loss(m, x, "m") + near(m))(m)

    return fn


@program(lambda: optax.LookaheadParams(make_net(0), make_net(1)))
def lookahead(run):
    def fn(params, x):
        fast, slow = params
        fast = descend(fast, run.grad(fast, x, "params/fast"))
        slow = mapped(lambda s, f: s + 0.5 * (f - s), slow, fast)
        return run(slow, x, "params/slow"), optax.LookaheadParams(slow, slow)

    return fn


@program(ONE, **APPEND)
def sam(run):
    def fn(m, x):
        g = run.grad(m, x, "m")
        scale = 0.05 / optax.tree.norm(g)
        up = mapped(lambda p, g: p + scale * g, m, g)
        return descend(m, run.grad(up, x, "m"))

    return fn


@program(ONE, **APPEND)
def maml(run):
    def fn(m, x):
        meta = lambda m: run.loss(descend(m, run.grad(m, x, "m")), 2 * x, "m")
        return eqx.filter_value_and_grad(meta)(m)

    return fn


@program(ONE, without=("grad",))
def hessian_over_parameters(run):
    return lambda m, x: jax.hessian(lambda m: run.loss(m, x, "m"))(m)
