"""Programs where a sow is hard to see: the right value, or an error; never nothing."""

import functools
import itertools as it

import diffrax
import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
from eqx_sow import (
    Append,
    Buffer,
    DuplicateSowError,
    Last,
    plant,
    save_intermediates as S,
    sow,
    SowError,
    tap,
)
from jax import lax
from jax.experimental import jet, sparse
from jax.sharding import PartitionSpec as P

from .helpers import assert_close, close, primitives, unmarked, with_mode
from .tables import REDUCERS, under


X = jnp.array([0.5, 1.5])
KINDS = ("lax", "bounded", "checkpointed")


def right_or_refused(fn, *args):
    """What `S(fn)` captures, or `None` if it raises one of our errors."""
    try:
        return S(fn)(*args)[1]
    except SowError as error:
        assert "a" in str(error)
        return None


def eqx_while(kind, steps=3):
    def f(x):
        return eqxi.while_loop(
            lambda s: s[0] < steps,
            lambda s: (s[0] + 1, sow(s[1] * 2, "a")),
            (jnp.array(0), x),
            max_steps=4,
            kind=kind,
            **({"checkpoints": 2} if kind == "checkpointed" else {}),
        )[1]

    return f


@pytest.mark.parametrize("kind", KINDS)
def test_equinox_while_loop(kind):
    f = eqx_while(kind)
    for g in (S(f), S(jax.jit(f)), eqx.filter_jit(S(f))):
        out, captured = g(X)
        close(out, 8 * X)
        if kind == "bounded":
            # A nest of scans: one axis for each, and `count` says which entries ran.
            ran = np.asarray(captured["a"]["count"]) == 1
            close(np.asarray(captured["a"]["primal"])[ran], [2 * X, 4 * X, 8 * X])
        else:
            close(captured["a"]["primal"], 8 * X)
            assert captured["a"]["count"] == 3


@pytest.mark.parametrize("kind", KINDS)
def test_equinox_while_loop_with_a_buffer(kind):
    _, captured = S(eqx_while(kind), reduce=Buffer(4))(X)
    close(captured["a"]["primal"], [2 * X, 4 * X, 8 * X, 0 * X])
    assert captured["a"]["count"] == 3


@pytest.mark.parametrize("kind", ["bounded", "checkpointed"])
def test_equinox_while_loop_under_grad(kind):
    def loss(x):
        return eqx_while(kind)(x).sum()

    for g in (jax.grad(loss), jax.jit(jax.grad(loss))):
        grads, captured = S(g)(X)
        close(grads, [8, 8])
        entry = captured["a"]
        if kind == "bounded":
            ran = np.asarray(entry["count"]) == 1
            close(np.asarray(entry["primal"])[ran], [2 * X, 4 * X, 8 * X])
            ones = np.ones(2, np.float32)
            close(np.asarray(entry["cotangent"])[ran], [4 * ones, 2 * ones, ones])
        else:
            close(entry["primal"], 8 * X)
            assert entry["count"] == 3
    if kind == "checkpointed":
        _, captured = S(jax.grad(loss), reduce=Buffer(4))(X)
        close(captured["a"]["primal"], [2 * X, 4 * X, 8 * X, 0 * X])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bounded", "checkpointed"])
def test_values_of_an_equinox_while_loop_beside_a_gradient(kind):
    def loss(x):
        return (eqx_while(kind)(x) ** 2).sum()

    wanted = jax.grad(lambda x: ((8 * x) ** 2).sum())(X)
    _, alone = S(loss)(X)
    saved = S(loss)
    for g in (
        jax.grad(saved, has_aux=True),
        jax.jit(jax.grad(saved, has_aux=True)),
        jax.grad(jax.jit(saved), has_aux=True),
        jax.grad(S(jax.jit(loss)), has_aux=True),
    ):
        grads, captured = g(X)
        close(grads, wanted)
        assert_close(captured, alone)
    grads, captured = jax.vmap(jax.grad(saved, has_aux=True))(X[None])
    close(grads[0], wanted)
    assert_close(jax.tree.map(lambda x: x[0], captured), alone)


@pytest.mark.parametrize("kind", ["lax", "checkpointed"])
def test_equinox_scan(kind):
    def f(x):
        more = {"checkpoints": 2} if kind == "checkpointed" else {}
        return eqxi.scan(
            lambda c, w: (sow(c * w, "a"), None),
            x,
            jnp.arange(1.0, 4),
            kind=kind,
            **more,
        )[0]

    _, captured = S(f)(X)
    grads, under = S(jax.grad(lambda x: f(x).sum()))(X)
    close(grads, [6, 6])
    for entry in (captured["a"], under["a"]):
        if kind == "lax":
            close(entry["primal"], [X, 2 * X, 6 * X])
        else:
            close(entry["primal"], 6 * X)
            assert entry["count"] == 3


# --- loops whose backward pass is a loop of its own ---
def _eqx_loop(**options):
    def loop(n, body, x):
        step = lambda c: (c[0] + 1, body(*c))
        going = lambda c: c[0] < n
        return eqxi.while_loop(going, step, (0, x), kind="checkpointed", **options)[1]

    return loop


def _eqx_scan(n, body, x):
    step = lambda x, i: (body(i, x), None)
    return eqxi.scan(step, x, jnp.arange(n), kind="checkpointed", checkpoints=2)[0]


def _unrolled(n, body, x):
    for i in range(n):
        x = body(i, x)
    return x


def _scan_in_loop(loop, cond, mark, x):
    def body(i, x):
        ws = (1.0, 1.5)
        if loop is _unrolled:
            for w in ws:
                x = mark(jnp.sin(w * x))
            return x + 0.5
        step = lambda x, w: (mark(jnp.sin(w * x)), None)
        return lax.scan(step, x, jnp.array(ws))[0] + 0.5

    return loop(3, body, x)


def _nested(loop, cond, mark, x):
    inner = lambda x: loop(2, lambda i, x: mark(x**2 * 0.9), x)
    return loop(3, lambda i, x: jnp.sin(inner(x)) + 0.5, x)


def _branch(loop, cond, mark, x):
    yes, no = lambda x: mark(jnp.sin(x)), lambda x: 2 * x
    return loop(4, lambda i, x: cond(i, yes, no, x), x)


def _two_branches(loop, cond, mark, x):
    yes, no = lambda x: mark(jnp.sin(x)), lambda x: mark(2 * x)
    return loop(4, lambda i, x: cond(i, yes, no, x), x)


def _checkpoint_in_loop(loop, cond, mark, x):
    step = lambda x: mark(jnp.sin(x))
    step = step if loop is _unrolled else jax.checkpoint(step)
    return loop(3, lambda i, x: 2 * step(x), x)


# Each with how many of the last executions come back, on a leading axis.
OWN_LOOPS = {
    "loop": (lambda loop, cond, mark, x: loop(3, lambda i, x: mark(x**2 * 0.9), x), ()),
    "nested": (_nested, ()),
    "in a branch": (_branch, ()),
    "in two branches": (_two_branches, ()),
    "scan in it": (_scan_in_loop, (2,)),
    "a checkpoint in it": (_checkpoint_in_loop, ()),
}
LOOPS = {
    "one checkpoint": _eqx_loop(checkpoints=1),
    "all checkpoints": _eqx_loop(max_steps=4),
    "scan": _eqx_scan,
}


def _by_hand(program, x):
    """The values, and the gradients with respect to a zero added to each."""

    def run(eps, x):
        left, values = iter(eps), []

        def mark(value):
            values.append(value + next(left))
            return values[-1]

        # Python chooses the branch of iteration `i`.
        cond = lambda i, yes, no, x: yes(x) if i % 2 == 0 else no(x)
        return program(_unrolled, cond, mark, x), values

    cotangents, values = jax.grad(run, has_aux=True)([0.0] * 99, x)
    return np.array(values), np.array(cotangents[: len(values)])


def _alternating(i, yes, no, x):
    return lax.cond(i % 2 == 0, yes, no, x)


@pytest.mark.parametrize("program", OWN_LOOPS)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_cotangent_is_of_the_iteration_that_the_value_is_of(program, loop):
    fn, lead = OWN_LOOPS[program]
    mark = lambda value: sow(value, "a")
    grad = jax.grad(lambda x: fn(LOOPS[loop], _alternating, mark, x))
    values, cotangents = _by_hand(fn, 1.1)
    (n,) = lead or (1,)
    last = lambda xs: xs[-n:].reshape(lead)
    _, got = jax.jit(S(grad))(1.1)
    close(got["a"]["primal"], last(values))
    close(got["a"]["cotangent"], last(cotangents))
    # It does not depend on what else is asked for.
    _, alone = S(jax.jit(grad), modes="cotangent")(1.1)
    close(alone["a"]["cotangent"], last(cotangents))
    close(alone["a"]["count"], got["a"]["count"])


def _in_a_bounded_loop(step):
    def run(x):
        counted = lambda c: (c[0] + 1, step(c[1]))
        options = dict(kind="bounded", max_steps=2, base=2)
        return eqxi.while_loop(lambda c: c[0] < 2, counted, (0, x), **options)[1]

    return run


def _in_a_scan_of_a_cond(step):
    branch = lambda x: lax.cond(x > 0, step, lambda x: x, x)
    return lambda x: lax.scan(lambda x, _: (branch(x), None), x, length=2)[0]


@pytest.mark.parametrize("inner", [_in_a_bounded_loop, _in_a_scan_of_a_cond])
@pytest.mark.parametrize("keep", [jax.checkpoint, jax.jit, lambda step: step])
def test_a_branch_in_a_loop_that_a_backward_pass_runs_again(inner, keep):
    step = inner(keep(lambda x: sow(jnp.sin(x), "a")))
    loop = _eqx_loop(checkpoints=1)
    _, got = jax.jit(S(jax.grad(lambda x: loop(3, lambda i, x: step(x), x))))(1.1)
    sines = lambda eps, x: functools.reduce(lambda x, e: jnp.sin(x) + e, eps, x)
    cotangents = jax.grad(sines)([0.0] * 6, 1.1)
    close(got["a"]["primal"], [sines([0.0] * n, 1.1) for n in (5, 6)])
    close(got["a"]["cotangent"], cotangents[-2:])
    close(got["a"]["count"], [3, 3])


@pytest.mark.parametrize("loop", LOOPS)
def test_a_gradient_in_a_loop_that_a_backward_pass_runs_again(loop):
    body = lambda i, x: jax.grad(lambda x: sow(jnp.sin(x), "a") * x)(x)
    scan = lambda n, body, x: lax.scan(lambda x, i: (body(i, x), None), x, np.arange(n))
    grad = lambda loop: jax.grad(lambda x: loop(3, body, x))
    _, each = jax.jit(S(grad(lambda *args: scan(*args)[0])))(0.5)
    _, got = jax.jit(S(grad(LOOPS[loop])))(0.5)
    got = got["a"]
    assert got.pop("count") == 3
    assert len(got) == 4
    assert_close(got, jax.tree.map(lambda x: x[-1], dict(each["a"])))


@pytest.mark.parametrize("outside", ["vmap", "grad"])
def test_lanes_of_different_lengths_in_a_loop_with_a_backward_pass(outside):
    xs, ns = jnp.array([1.1, 1.2, 1.3]), jnp.array([3, 1, 0])
    run = lambda x, n: _eqx_loop(max_steps=4)(n, lambda i, x: sow(x**2, "a"), x)
    if outside == "vmap":
        fn = jax.vmap(jax.grad(run))
    else:
        fn = jax.grad(lambda xs, ns: jax.vmap(run)(xs, ns).sum())

    # Equinox steps all lanes to the end, and leaves those as they are that are done.
    def by_hand(eps):
        x = xs
        for i in range(3):
            value = x**2 + eps[i]
            x = jnp.where(i < ns, value, x)
        return x.sum(), value

    cotangents, value = jax.grad(by_hand, has_aux=True)(jnp.zeros((3, 3)))
    _, got = S(fn)(xs, ns)
    close(got["a"]["primal"], value)
    close(got["a"]["cotangent"], cotangents[-1])
    _, got = S(fn, modes="cotangent")(xs, ns)
    close(got["a"]["cotangent"], cotangents[-1])


def test_tangents_of_a_backward_pass_that_is_a_loop_of_its_own():
    fn, _ = OWN_LOOPS["loop"]
    along = lambda grad, x: jax.jvp(grad, (x,), (jnp.float32(2.0),))
    mark = lambda value: sow(value, "a")
    # With one checkpoint, the backward pass runs the first iteration three times.
    loop = _eqx_loop(checkpoints=1)
    grad = jax.grad(lambda x: fn(loop, _alternating, mark, x) ** 2)
    _, got = jax.jit(S(lambda x: along(grad, x)))(jnp.float32(1.1))
    got = got["a"]
    eps = jnp.zeros(())

    def last(eps, x):
        x = _unrolled(2, lambda i, x: x**2 * 0.9, x)
        return (x**2 * 0.9 + eps) ** 2, x**2 * 0.9

    at_last = jax.grad(last, has_aux=True)
    (ct, value), (dct, dvalue) = along(lambda x: at_last(eps, x), jnp.float32(1.1))
    want = {"primal": value, "tangent": dvalue, "cotangent": ct}
    want |= {"cotangent.tangent": dct, "count": 3}
    assert got.keys() == want.keys()
    for mode, x in want.items():
        close(got[mode], x)


@pytest.mark.slow
def test_cotangent_of_a_solver_with_its_default_adjoint():
    def euler(loop, cond, mark, y):
        return loop(4, lambda i, y: y + 0.25 * mark(-(y**2)), y)

    def solved(y0):
        term = diffrax.ODETerm(lambda t, y, args: sow(-(y**2), "a"))
        args = term, diffrax.Euler(), 0.0, 1.0, 0.25, y0
        return diffrax.diffeqsolve(*args, max_steps=8).ys[-1]

    values, cotangents = _by_hand(euler, 1.0)
    _, got = S(jax.grad(solved))(jnp.array(1.0))
    close(got["a"]["primal"], values[-1])
    close(got["a"]["cotangent"], cotangents[-1])


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("modes", [None, "cotangent"])
def test_last_value_in_a_branch_that_is_not_differentiated(lanes, modes):
    def run(x):
        one, two = lambda x: sow(jnp.sin(x), "a"), lambda x: x * sow(X[0], "a")
        return _eqx_loop(max_steps=4)(4, lambda i, x: lax.cond(x > 0, one, two, x), x)

    fn, x = jax.grad(run), X[0]
    if lanes:
        fn, x = jax.vmap(fn), X
    with pytest.raises(SowError, match="which iteration of it belongs to the value"):
        S(fn, modes=modes)(x)
    assert list(S(fn, modes="primal")(x)[1]["a"]) == ["primal", "count"]
    assert "cotangent" in S(fn, reduce=Last())(x)[1]["a"]


@pytest.mark.parametrize("kind", ["while", "scan"])
@pytest.mark.parametrize("modes", [None, "cotangent"])
def test_a_bwd_with_a_loop_of_its_own(kind, modes):
    """It evaluates the steps once more, in an order that eqx_sow does not know."""
    step = lambda x: sow(jnp.sin(x), "a")
    forward = lambda x: lax.scan(lambda x, _: (step(x), x), x, None, length=3)
    f = jax.custom_vjp(lambda x: forward(x)[0])

    def back(ct, x):
        return jax.vjp(step, x)[1](ct)[0]

    def bwd(xs, ct):
        if kind == "scan":
            return (lax.scan(lambda ct, x: (back(ct, x), None), ct, xs[::-1])[0],)
        loop = lambda c: (c[0] - 1, back(c[1], xs[c[0]]))
        return (lax.while_loop(lambda c: c[0] >= 0, loop, (2, ct))[1],)

    f.defvjp(forward, bwd)
    with pytest.raises(DuplicateSowError, match="also in a backward pass"):
        S(jax.grad(f), modes=modes)(0.5)
    _, got = S(jax.grad(f), reduce=Append(), modes=modes)(0.5)
    first, second = got["a"]["cotangent"]
    assert first is None
    # The `while_loop` comes to the first iteration last.
    cotangents = [np.cos(np.sin(np.sin(0.5))), np.cos(np.sin(0.5))]
    each = [1, cotangents[0], cotangents[0] * cotangents[1]]
    close(second, each if kind == "scan" else each[-1])


@pytest.mark.parametrize("modes", [None, "cotangent"])
def test_a_while_that_takes_the_pullbacks_of_a_scan_apart(modes):
    def run(whole, x):
        step = lambda x, _: jax.vjp(lambda x: sow(jnp.sin(x), "a"), x)
        _, pulls = lax.scan(step, x, None, length=3)

        def back(i, ct):
            if not whole:
                return jax.tree.map(lambda r: r[2 - i], pulls)(ct)[0]
            one = lambda ct, pull: (*pull(ct), None)
            return lax.scan(one, ct, pulls, reverse=True)[0]

        loop = lambda c: (c[0] + 1, back(*c))
        return lax.while_loop(lambda c: c[0] < 3, loop, (0, 1.0))[1]

    with pytest.raises(SowError, match="which iteration of it belongs to the value"):
        S(functools.partial(run, False), modes=modes)(0.5)
    # A loop around the whole backward pass has nothing to do with it.
    _, got = S(functools.partial(run, True), modes=modes)(0.5)
    assert got["a"]["cotangent"].shape == (3,)


@pytest.mark.parametrize("modes", ["tangent", "cotangent"])
def test_what_a_derivative_belongs_to_does_not_depend_on_modes(modes):
    one, two = lambda x: sow(jnp.sin(x), "a") * x, lambda x: sow(X[1], "a") * x
    step = lambda i, x: lax.cond(i < 2, one, two, x)
    if modes == "cotangent":
        body = lambda i, x: x - 0.1 * jax.grad(lambda x: step(i, x))(x)
    else:
        body = step

    def run(x):
        loop = lambda c: (c[0] + 1, body(*c))
        return lax.while_loop(lambda c: c[0] < 3, loop, (0, x))[1]

    fn = run if modes == "cotangent" else lambda x: jax.jvp(run, (x,), (1.0,))
    every, alone = S(fn)(0.5)[1]["a"], S(fn, modes=modes)(0.5)[1]["a"]
    # The last value is that of the constant.
    close(every["primal"], X[1])
    close(every[modes], 0)
    assert_close(alone, {k: every[k] for k in (modes, "count")})


def _events(fn, *args):
    events = []
    jax.block_until_ready(tap(fn, events.append)(*args))
    jax.effects_barrier()
    return [(e.mode, e.iterations, e.path) for e in events]


def test_no_iteration_where_a_backward_pass_is_a_loop_of_its_own():
    loop = lambda n, x: _eqx_loop(max_steps=2)(n, lambda i, x: sow(jnp.sin(x), "a"), x)
    assert _events(jax.grad(lambda x: loop(2, x)), 0.5) == [
        ("primal", (0,), "a/0"),
        ("primal", (1,), "a/1"),
        ("cotangent", None, "a"),
        ("cotangent", None, "a"),
    ]

    # That of a scan around is known.
    def in_a_scan(x):
        return lax.scan(lambda x, n: (loop(n, x), None), x, jnp.array([1, 2]))[0]

    assert _events(jax.grad(in_a_scan), 0.5)[3:] == [
        ("cotangent", None, "a/1"),
        ("cotangent", None, "a/1"),
        ("cotangent", None, "a/0"),
    ]

    # A gradient that is taken in each iteration is of that iteration.
    def descent(x):
        step = lambda c: (c[0] + 1, jax.grad(lambda x: sow(x, "a") ** 2)(c[1]))
        return lax.while_loop(lambda c: c[0] < 2, step, (0, x))[1]

    assert _events(descent, 0.5)[2:] == [
        ("primal", (1,), "a/1"),
        ("cotangent", (1,), "a/1"),
    ]


def test_error_if():
    def f(x):
        x = eqx.error_if(sow(x, "before"), x.sum() < 0, "negative")
        return sow(x * 2, "a")

    for g in (f, jax.jit(f)):
        _, captured = S(g)(X)
        close(captured["before"]["primal"], X)
        close(captured["a"]["primal"], 2 * X)
        with pytest.raises(Exception, match="negative"):
            jax.block_until_ready(S(g)(-X))
    _, captured = S(jax.grad(lambda x: f(x).sum()))(X)
    close(captured["before"]["cotangent"], [2, 2])
    _, captured = S(jax.vmap(f))(X[None])
    close(captured["a"]["primal"], 2 * X[None])


def solve(y0, **kwargs):
    term = diffrax.ODETerm(lambda t, y, args: sow(-y, "a"))
    solution = diffrax.diffeqsolve(
        term, diffrax.Euler(), 0.0, 1.0, 0.25, y0, max_steps=8, **kwargs
    )
    return solution.ys[-1]


@pytest.mark.slow
def test_diffeqsolve():
    out, captured = S(solve)(X)
    close(out, solve(X))
    entry = captured["a"]
    assert entry["count"].shape == ()
    # Euler evaluates the field once a step, at the value before it.
    close(entry["primal"], -X * 0.75**3)
    assert entry["count"] == 4


@pytest.mark.slow
def test_diffeqsolve_under_grad():
    def loss(y0):
        return solve(y0).sum()

    grads, captured = S(jax.grad(loss))(X)
    close(grads, np.full(2, 0.75**4))
    close(captured["a"]["primal"], -X * 0.75**3)
    # The backward pass replays the steps: no second execution.
    assert captured["a"]["count"] == 4
    _, captured = S(jax.grad(loss), reduce=Buffer(4))(X)
    close(captured["a"]["primal"], [-X * 0.75**i for i in range(4)])


@pytest.mark.slow
def test_values_of_diffeqsolve_beside_a_gradient():
    def loss(mark, rate):
        term = diffrax.ODETerm(lambda t, y, args: mark(-rate * y, "a"))
        solver = diffrax.Heun()
        return diffrax.diffeqsolve(term, solver, 0.0, 1.0, 0.25, X).ys.sum()

    for jit in (lambda fn: fn, jax.jit):
        saved = S(functools.partial(loss, sow))
        grad, captured = jit(jax.grad(saved, has_aux=True))(0.3)
        close(grad, jax.grad(functools.partial(loss, unmarked))(0.3))
        assert captured["a"]["count"] == 8
        assert_close(captured, saved(0.3)[1])


@pytest.mark.slow
@pytest.mark.parametrize("solver", [diffrax.ImplicitEuler, diffrax.Kvaerno3])
def test_an_implicit_solver_under_grad(solver):
    def solve(x, mark):
        root = diffrax.VeryChord(1e-3, 1e-3)
        term = diffrax.ODETerm(lambda t, y, args: -mark(jnp.sin(y), "a"))
        return diffrax.diffeqsolve(
            term, solver(root_finder=root), 0, 1, 0.25, x, max_steps=4
        ).ys

    told = []

    def told_of(value, name):
        jax.debug.callback(told.append, value)
        return value

    solve(X, told_of)
    jax.effects_barrier()
    loss = lambda x: solve(x, sow).sum()
    # Neither the steps that the backward pass takes again, nor what the derivative
    # of the root finder evaluates, are executions.
    _, got = S(jax.grad(loss), reduce=Last(), modes="primal")(X)
    close(got["a"]["primal"], told[-1])
    assert got["a"]["count"] == len(told)


def test_diffeqsolve_with_direct_adjoint():
    def loss(y0):
        return solve(y0, adjoint=diffrax.DirectAdjoint()).sum()

    grads, captured = S(jax.grad(loss))(X)
    close(grads, np.full(2, 0.75**4))
    ran = np.asarray(captured["a"]["count"]) > 0
    assert ran.sum() == 4
    close(np.asarray(captured["a"]["primal"])[ran][-1], -X * 0.75**3)


def _newton(c, eps=0.0, mark=sow):
    def residual(y, c):
        c, eps = c
        return mark(y**2 - c, "a") + eps

    solver = optx.Newton(rtol=1e-5, atol=1e-5)
    return optx.root_find(residual, solver, jnp.array(1.0), (c, eps), throw=False)


def _cosine(c, eps=0.0, mark=sow):
    def fn(y, c):
        c, eps = c
        return mark(c * jnp.cos(y), "a") + eps

    solver = optx.FixedPointIteration(rtol=1e-5, atol=1e-5)
    return optx.fixed_point(fn, solver, jnp.array(1.0), (c, eps), throw=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solve", "wrap"),
    [
        (_newton, lambda f: f),
        (_cosine, jax.jit),
        pytest.param(_newton, jax.jit, marks=pytest.mark.slow),
        pytest.param(_cosine, jax.checkpoint, marks=pytest.mark.slow),
    ],
)
def test_implicit_derivatives_are_no_executions(solve, wrap):
    """What optimistix evaluates at the solution, for the derivative, is a replay."""
    c = jnp.array(0.9)
    _, plain = S(lambda c: solve(c).value, modes="primal")(c)
    # Newton's method differentiates the function by itself.
    modes = "primal", "cotangent"
    fn = wrap(lambda c: jnp.sin(solve(c).value))
    _, got = S(jax.grad(fn), modes=modes)(c)
    assert got["a"]["count"] == plain["a"]["count"] > 1
    close(got["a"]["primal"], plain["a"]["primal"])
    perturbed = lambda eps: jnp.sin(solve(c, eps, unmarked).value)
    close(got["a"]["cotangent"], jax.grad(perturbed)(0.0), 1e-4)
    _, kept = S(jax.grad(fn), modes=modes, reduce=Buffer(40))(c)
    _, alone = S(lambda c: solve(c).value, modes="primal", reduce=Buffer(40))(c)
    close(kept["a"]["primal"], alone["a"]["primal"])
    assert kept["a"]["count"] == alone["a"]["count"]
    events = []
    tapped = tap(jax.grad(fn), lambda e: events.append(e.mode), modes="primal")
    jax.block_until_ready(tapped(c))
    jax.effects_barrier()
    assert len(events) == plain["a"]["count"]


POINTS = {
    "elsewhere": lambda x, z: x + 100,
    "near the solution": lambda x, z: z + 1,
    "at the start": lambda x, z: x,
    "at the solution": lambda x, z: z,
}


@pytest.mark.parametrize("loop", ["scan", "while"])
@pytest.mark.parametrize("where", POINTS)
def test_a_derivative_rule_that_differentiates_at_another_point(loop, where, call):
    g, point = jax.jit(lambda x: sow(jnp.sin(x), "a")), POINTS[where]

    @jax.custom_jvp
    def f(x):
        if loop == "scan":
            return lax.fori_loop(0, 3, lambda i, x: g(x), x)
        step = lambda c: (c[0] + 1, g(c[1]))
        return lax.while_loop(lambda c: c[0] < 3, step, (0, x))[1]

    @f.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents
        z = f(x)
        return z, t * jax.value_and_grad(g)(point(x, z))[0]

    fn = jax.grad(lambda x: f(x))
    z = np.sin(np.sin(np.sin(0.5)))
    if loop == "while" and where == "at the solution":
        # What a solver evaluates in a loop, and then once more.
        _, got = call(S(fn), jnp.float32(0.5))
        close(got["a"]["primal"], z)
        assert got["a"]["count"] == 3
        return
    with pytest.raises(DuplicateSowError, match="`a` marks more than one value"):
        call(S(fn), jnp.float32(0.5))
    _, got = call(S(fn, reduce=Append()), jnp.float32(0.5))
    in_loop, in_rule = got["a"]["primal"]
    close(np.ravel(in_loop)[-1], z)
    close(in_rule, np.sin(point(0.5, z)), 1e-4)
    assert got["a"]["cotangent"][0] is None
    close(got["a"]["cotangent"][1], 1.0)


def test_a_derivative_rule_beside_a_branch_that_lanes_choose():
    """The rule differentiates at another point, so this is an execution, too."""
    g = jax.jit(lambda x: sow(jnp.sin(x), "a"))
    step = lambda c: (c[0] + 1, lax.cond(c[1] > -1, g, lambda x: x, c[1]))
    f = jax.custom_jvp(lambda x: lax.while_loop(lambda c: c[0] < 3, step, (0, x))[1])
    f.defjvp(lambda x, t: (f(*x), t[0] * jax.value_and_grad(g)(x[0] + 100)[0]))
    xs = jnp.array([0.5, 0.6])
    with pytest.raises(DuplicateSowError, match="`a` marks more than one value"):
        S(jax.vmap(jax.grad(f)))(xs)
    _, got = S(jax.vmap(jax.grad(f)), reduce=Append())(xs)
    in_loop, in_rule = got["a"]["primal"]
    close(in_loop.reshape(-1, 2)[-1], np.sin(np.sin(np.sin(xs))))
    close(in_rule, np.sin(xs + 100), 1e-4)


def _in_lanes(f):
    return lambda c: jax.vmap(f)(jnp.stack([c, c + 0.1])).sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solve", "wrap"),
    [
        (_newton, lambda f: f),
        (_cosine, _in_lanes),
        pytest.param(_cosine, lambda f: f, marks=pytest.mark.slow),
        pytest.param(_newton, _in_lanes, marks=pytest.mark.slow),
        pytest.param(
            _newton, lambda f: jax.checkpoint(jax.jit(f)), marks=pytest.mark.slow
        ),
    ],
)
def test_gradient_of_a_capture_with_implicit_derivatives(solve, wrap):
    """The rule compares the function with one that Equinox has hidden from JAX."""
    c = jnp.array(0.9)
    fn = wrap(lambda c, mark=sow: jnp.sin(solve(c, 0.0, mark).value))
    plain = wrap(lambda c: jnp.sin(solve(c, 0.0, unmarked).value))
    captured = lambda c: S(fn, modes="primal")(c)
    grad, got = jax.grad(captured, has_aux=True)(c)
    close(grad, jax.grad(plain)(c))
    assert_close(got, captured(c)[1])
    tapped = tap(fn, lambda event: None, modes="primal")
    close(jax.grad(tapped)(c), jax.grad(plain)(c))


@pytest.mark.slow
def test_gradient_of_a_capture_around_a_jitted_function_of_a_solver():
    """The backward pass of the checkpoint splits the loop of the linear solver."""

    def f(c, mark=sow):
        fn = jax.jit(lambda y, c: mark(y - 0.3 * jnp.tanh(c * y + c), "a"))
        solver = optx.LevenbergMarquardt(rtol=1e-6, atol=1e-6)
        return optx.least_squares(fn, solver, jnp.zeros(2), c).value.sum()

    captured = jax.checkpoint(lambda c: S(f, modes="primal")(c)[0])
    close(jax.grad(captured)(0.5), jax.grad(f)(0.5, unmarked))


@pytest.mark.slow
def test_gradient_of_a_capture_of_what_a_loop_linearizes():
    """As diffrax's implicit solvers do: an edge is among what a function returns."""

    def f(c, mark=sow):
        linear = jax.jit(
            lambda y: jax.linearize(lambda y: mark(jnp.sin(c * y), "a"), y)
        )
        body = lambda loop: (linear(loop[0])[1](loop[0]), loop[1] + 1)
        going = lambda loop: loop[1] < 3
        return eqxi.while_loop(going, body, (c, 0), max_steps=4, kind="checkpointed")[0]

    c = jnp.array(0.3)
    grad = jax.grad(lambda c: S(f, modes="primal")(c)[0])(c)
    close(grad, jax.grad(f)(c, unmarked))


def test_another_call_of_what_a_custom_jvp_function_calls():
    """Neither in the rule, nor where the rule does not call the function."""
    inner = jax.jit(lambda x: sow(jnp.sin(x), "a"))
    own, alone = jax.custom_jvp(inner), jax.custom_jvp(lambda x: jnp.sin(x))
    own.defjvp(lambda x, t: (own(*x), jnp.cos(x[0]) * t[0]))
    alone.defjvp(lambda x, t: (alone(*x), inner(x[0] + 0.5 * jnp.pi) * t[0]))
    for f in (lambda x: own(x) + inner(2 * x), lambda x: own(x) * alone(3 * x)):
        with pytest.raises(DuplicateSowError):
            S(jax.grad(f), modes="primal")(0.5)
    _, got = S(jax.grad(f), modes="primal", reduce=Append())(0.5)
    close(got["a"]["primal"][0], np.sin(0.5))
    close(got["a"]["primal"][1], np.cos(1.5))


def _repeated_sine(x):
    body = lambda c, _: (jnp.sin(c), sow(jnp.cos(c), "a"))
    return lax.scan(body, x, length=1)[1][0]


@pytest.mark.parametrize(
    "inner", [jax.jit(lambda x: sow(jnp.cos(x), "a")), jax.jit(_repeated_sine)]
)
@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_a_derivative_rule_that_differentiates_the_function(inner, shift):
    """At the same point this is a replay, at another one an execution."""
    own = jax.custom_jvp(lambda x: inner(x))
    own.defjvp(lambda x, t: (own(*x), jax.jvp(inner, (x[0] + shift,), t)[1]))
    f = jax.grad(own)
    _, got = S(f, reduce=Append())(0.5)
    primals = [np.cos(0.5), np.cos(0.5 + shift)]
    want = primals if shift else primals[:1]
    close(np.ravel(got["a"]["primal"]), want)
    events = []
    tap(f, events.append, modes="primal")(0.5)
    jax.effects_barrier()
    close(np.sort([e.value for e in events]), np.sort(want))
    if shift:
        with pytest.raises(DuplicateSowError):
            S(f)(0.5)


def test_least_squares():
    def f(c):
        solver = optx.LevenbergMarquardt(rtol=1e-4, atol=1e-4)
        return optx.least_squares(
            lambda y, c: sow(y - c, "a"), solver, jnp.zeros(2), c, throw=False
        ).value

    captured = right_or_refused(f, X)
    if captured is not None:
        assert "a" in captured


def test_custom_linear_solve():
    matrix = jnp.array([[2.0, 1.0], [1.0, 3.0]])

    def f(b):
        return lax.custom_linear_solve(
            lambda v: sow(matrix @ v, "a"),
            b,
            lambda _, b: jnp.linalg.solve(matrix, b),
            symmetric=True,
        )

    captured = right_or_refused(f, X)
    assert captured is None or "a" in captured


def test_sow_in_the_solver_of_custom_linear_solve():
    def f(b):
        return lax.custom_linear_solve(
            lambda v: 2 * v, b, lambda _, b: sow(b / 2, "a"), symmetric=True
        )

    captured = right_or_refused(f, X)
    if captured is not None:
        close(captured["a"]["primal"], X / 2)


def test_custom_root():
    def f(x):
        return lax.custom_root(
            lambda y: y - x,
            x * 0,
            lambda fn, y: sow(y - fn(y), "a"),
            lambda g, y: y / g(jnp.ones_like(y)),
        )

    captured = right_or_refused(f, X)
    if captured is not None:
        close(captured["a"]["primal"], X)
    # JAX itself drops effects from the solver on some versions.
    assert captured is None or captured


@pytest.mark.filterwarnings("ignore:.*found no mark")
def test_linearized_function_captured_later():
    _, linear = jax.linearize(lambda x: sow(jnp.sin(x), "a"), X)
    # Traced without a capture: there is no sow in it, as `linear` was made outside.
    out, captured = S(linear)(X)
    close(out, jnp.cos(X) * X)
    assert captured == {}


def test_linearize_inside():
    def f(x):
        out, linear = jax.linearize(lambda x: sow(jnp.sin(x), "a"), x)
        return out, linear(jnp.ones_like(x))

    _, captured = S(f)(X)
    close(captured["a"]["primal"], jnp.sin(X))
    close(captured["a"]["tangent"], jnp.cos(X))


@pytest.mark.slow
def test_taylor_series(call):
    def fn(x, mark):
        return jnp.cos(mark(2 * jnp.sin(x), "a")) ** 2

    series = jnp.ones(2), jnp.zeros(2)
    taylor = lambda mark: lambda x: jet.jet(lambda x: fn(x, mark), (x,), (series,))
    out, captured = call(S(taylor(sow)), X)
    assert_close(out, taylor(unmarked)(X))
    assert_close(captured, {"a": {"primal": 2 * jnp.sin(X)}})

    # The series of a weight goes through the call of the layer.
    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))

    def of_weight(w):
        return jnp.tanh(eqx.tree_at(lambda m: m.weight, linear, w)(X))

    series = jnp.ones((2, 2)), jnp.zeros((2, 2))
    taylor = lambda w: jet.jet(of_weight, (w,), (series,))
    out, captured = call(S(taylor, capture=True), linear.weight)
    assert_close(out, taylor(linear.weight))
    (entry,) = captured.values()
    assert_close(entry, {"primal": linear(X)})

    # The name comes from the arrays, all of which have a series here.
    keys = jax.random.split(jax.random.key(1))
    model = [eqx.nn.Linear(2, 2, use_bias=False, key=k) for k in keys]

    def of_weights(*weights):
        new = [eqx.tree_at(lambda m: m.weight, model[0], w) for w in weights]
        return new[1](new[0](X))

    taylor = lambda model: jet.jet(of_weights, [m.weight for m in model], [series] * 2)
    out, captured = call(S(taylor, capture=True), model)
    assert_close(out, taylor(model))
    hidden = model[0](X)
    assert_close(with_mode(captured, "primal"), {"model/0": hidden, "model/1": out[0]})


def test_a_layer_with_a_sparse_weight():
    """The other arrays say which layer it is."""
    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    weight = sparse.BCOO.fromdense(linear.weight)

    def f(use_tracer, weight, model, x):
        run = lambda w, m, x: eqx.tree_at(lambda m: m.weight, m, w)(x)
        return sparse.sparsify(run, use_tracer=use_tracer)(weight, model, x)

    out, got = S(functools.partial(f, True), capture=True)(weight, linear, X)
    assert_close(out, linear(X))
    assert_close(dict(got), {"model": {"primal": linear(X)}})
    with pytest.raises(NotImplementedError, match="rule for edge is not implemented"):
        S(functools.partial(f, False), capture=True)(weight, linear, X)


def test_a_checkpoint_in_what_keeps_its_own_rule(call):
    checkpointed = jax.checkpoint(lambda x: 2 * sow(jnp.sin(x), "a"))
    with_rule = jax.custom_jvp(checkpointed)
    with_rule.defjvp(lambda xs, ts: (checkpointed(*xs), 3 * ts[0]))
    total = lambda x: with_rule(x).sum()
    out, got = call(S(total), X)
    assert_close((out, got["a"]["primal"]), (2 * jnp.sin(X).sum(), jnp.sin(X)))
    assert_close(call(S(jax.grad(total)), X)[0], jnp.full_like(X, 3))
    # Nothing is left of what was taken.
    assert not jax.make_jaxpr(S(total))(X).effects


def test_a_checkpoint_in_the_condition_of_a_loop(call):
    look = jax.checkpoint(lambda x: sow(x, "c", tag="other").sum() < 9)
    fn = lambda x: lax.while_loop(look, lambda x: sow(2 * x, "a"), x)
    x = jnp.abs(X)
    out, got = call(S(fn), x)
    assert_close((out, got["a"]["primal"]), (fn(x), fn(x)))


def test_noinline():
    @eqxi.noinline
    def inner(x):
        return sow(x * 2, "a")

    captured = right_or_refused(lambda x: inner(x) + 1, X)
    if captured is not None:
        close(captured["a"]["primal"], 2 * X)


def test_pure_callback_beside_a_sow():
    def f(x):
        x = sow(x, "a")
        y = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return sow(y, "b")

    for g in (f, jax.jit(f)):
        _, captured = S(g)(X)
        close(captured["a"]["primal"], X)
        close(captured["b"]["primal"], jnp.sin(X))


def test_reduce_with_a_body_of_ones_own():
    def f(x):
        return lax.reduce(x, jnp.array(0.0), lambda a, b: sow(a + b, "a"), (0,))

    with pytest.raises(SowError, match="reduce"):
        S(f)(X)


def test_compiled_function_is_refused_or_has_nothing():
    compiled = jax.jit(lambda x: sow(x * 2, "a")).lower(X).compile()
    # JAX compiles it without the sow and cannot trace it again.
    close(compiled(X), 2 * X)
    with pytest.raises((SowError, TypeError)):
        S(lambda x: compiled(x))(X)


def test_bwd_that_recomputes_the_forward():
    def forward(x):
        return sow(jnp.sin(x), "a") * 2

    @jax.custom_vjp
    def f(x):
        return forward(x)

    def bwd(x, g):
        _, pull = jax.vjp(forward, x)
        return pull(g)

    f.defvjp(lambda x: (forward(x), x), bwd)
    grads, captured = S(jax.grad(lambda x: f(x).sum()))(X)
    close(grads, 2 * jnp.cos(X))
    # The replay is no second execution, but its cotangent counts.
    close(captured["a"]["primal"], jnp.sin(X))
    close(captured["a"]["cotangent"], [2, 2])


def test_name_that_only_a_bwd_sows():
    @jax.custom_vjp
    def f(x):
        return x * 2

    f.defvjp(lambda x: (x * 2, None), lambda _, g: (sow(g * 2, "g"),))

    def loop(x):
        return lax.scan(lambda c, _: (f(c), None), x, None, length=3)[0].sum()

    _, captured = S(jax.grad(lambda x: f(x).sum()))(X)
    close(captured["g"]["primal"], [2, 2])
    _, captured = S(jax.grad(loop))(X)
    close(captured["g"]["primal"], np.array([[8, 8], [4, 4], [2, 2]], np.float32))


def test_custom_vjp_in_a_loop_forward():
    @jax.custom_vjp
    def f(x):
        return sow(x * 2, "primal")

    f.defvjp(lambda x: (sow(x * 2, "fwd"), None), lambda _, g: (g * 7,))

    def loop(x):
        return lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0].sum()

    _, captured = S(loop)(X)
    assert list(captured) == ["primal"]
    close(captured["primal"]["primal"], [2 * X, 4 * X])
    grads, captured = S(jax.grad(loop))(X)
    close(grads, [49, 49])
    close(captured["fwd"]["primal"], [2 * X, 4 * X])
    grads = jax.grad(lambda x: S(loop)(x)[0])(X)
    close(grads, [49, 49])


@under("eager", "jit", "checkpoint")
def test_a_literal_before_a_call(wrap, call):
    def fn(x):
        two = sow(np.float32(2.0), "two")
        return wrap(lambda y: sow(y * 3, "a"))(jnp.sin(x)) * two

    out, got = call(S(fn), jnp.array(1.0))
    expected = np.sin(1.0) * 3
    np.testing.assert_allclose(out, 2 * expected, rtol=1e-6)
    np.testing.assert_allclose(got["a"]["primal"], expected, rtol=1e-6)
    np.testing.assert_allclose(got["two"]["primal"], 2.0)


@pytest.mark.parametrize(
    "p", [[False, True, True], [True, False, True], [False, False, True]]
)
@pytest.mark.parametrize("both", [True, False])
def test_plant_where_a_value_does_not_vary(p, both, call):
    def fn(p, x):
        other = lambda: sow(x, "a") if both else x
        return lax.cond(p, lambda: sow(jnp.ones(2), "a") * x, other)

    args = jnp.array(p), jnp.arange(6.0).reshape(3, 2) + 5
    out, got = S(jax.vmap(fn))(*args)
    np.testing.assert_array_equal(out, jax.vmap(fn)(*args))
    np.testing.assert_array_equal(call(plant(jax.vmap(fn), got), *args), out)


@under("eager", "jit")
@pytest.mark.parametrize("fourth", [True, False])
def test_a_name_in_many_branches(wrap, fourth, call):
    """One branch with a `jit`, and maybe one that does not sow."""
    branches = [
        lambda x: sow(x, "a"),
        wrap(lambda x: sow(2 * x, "a")),
        lambda x: sow(3 * x, "a"),
        lambda x: sow(4 * x, "a") if fourth else 4 * x,
    ]
    fn = lambda i, x: lax.switch(i, branches, x)
    i, x = jnp.array([3, 0, 2, 1, 7, -1]), jnp.arange(1.0, 7.0)
    _, got = call(S(jax.vmap(fn)), i, x)
    which = np.clip(i, 0, 3)
    runs = fourth | (which != 3)
    values = runs * (which + 1) * np.asarray(x)
    np.testing.assert_array_equal(got["a"]["primal"], values)
    np.testing.assert_array_equal(got["a"]["count"], runs.astype(np.int32))


@pytest.mark.slow
@pytest.mark.parametrize("check", [True, False])
def test_a_constant_in_a_branch_on_each_device(check, mesh, call):
    def fn(i, x):
        return lax.switch(i, [lambda x: sow(jnp.sin(x), "a"), lambda x: 2.0 * x], x)

    spec = P("d")
    mapped = jax.shard_map(
        jax.vmap(fn), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check
    )
    i, x = jnp.arange(16) % 2, jnp.arange(16.0)
    _, got = call(S(mapped), i, x)
    expected = np.where(i == 0, np.sin(x), 0)
    np.testing.assert_allclose(got["a"]["primal"].reshape(16), expected, rtol=1e-6)
    np.testing.assert_array_equal(got["a"]["count"].reshape(16), 1 - i)


def test_numpy_arrays_in_a_loop():
    w = np.array([1.0, 2.0], np.float32)

    def f(x):
        return lax.scan(lambda c, _: (sow(jnp.sin(c * w), "a"), None), x, length=2)[0]

    first = np.sin(X * w)
    both = np.stack([first, np.sin(first * w)])
    out, got = S(f)(X)
    close(out, both[1])
    close(got["a"]["primal"], both)
    close(plant(f, {"a": got["a"]["primal"]})(X), both[1])


@jax.checkpoint
def _twofold(p, x):
    double, triple = (lambda: sow(2 * x, "a")), (lambda: sow(3 * x, "a"))
    return lax.cond(p, double, triple)


@under("eager", "jit", "checkpoint")
def test_one_cond_in_two_branches(wrap):
    inner = wrap(jax.vmap(_twofold))

    def f(q, p, r, x):
        return lax.cond(q, lambda: inner(p, x), lambda: inner(r, x))

    q, p, x = jnp.array([True, False]), jnp.ones((2, 1), bool), jnp.ones((2, 1))
    _, got = S(jax.vmap(f))(q, p, ~p, x)
    close(got["a"]["primal"], [[2.0], [3.0]])
    grad = jax.grad(lambda *args: f(*args).sum(), 3)
    _, got = S(jax.vmap(grad))(q, p, ~p, x)
    close(got["a"]["primal"], [[2.0], [3.0]])
    close(got["a"]["cotangent"], [[1.0], [1.0]])


@under("eager", "jit")
def test_one_cond_that_runs_twice(wrap):
    @wrap
    def g(p, x, y):
        cond = lambda p, x, y: lax.cond(
            p, lambda: sow(2 * x, "a"), lambda: sow(3 * y, "a")
        )
        return jax.vmap(cond)(p, x, y)

    p, c, x = jnp.array([True, False]), jnp.array([5.0, 7.0]), jnp.array([1.0, 2.0])
    # Each of the two branches is differentiated in one of the calls.
    f = lambda x: g(p, x, c) + g(p, c, x)
    df = lambda x: jax.jvp(f, (x,), (jnp.ones(2),))
    _, got = S(df, reduce=Append())(x)
    close(got["a"]["primal"][0], [2.0, 21.0])
    close(got["a"]["primal"][1], [10.0, 6.0])
    close(got["a"]["tangent"][0], [2.0, 0.0])
    close(got["a"]["tangent"][1], [0.0, 3.0])
    _, got = S(jax.grad(lambda x: f(x).sum()), reduce=Append())(x)
    close(got["a"]["cotangent"][0], [1.0, 0.0])
    close(got["a"]["cotangent"][1], [0.0, 1.0])
    with pytest.raises(SowError, match="`a` marks more than one value"):
        S(df, modes="tangent")(x)


@jax.custom_jvp
def _with_jvp(x):
    return jnp.sin(x)


@_with_jvp.defjvp
def _with_jvp_rule(primals, tangents):
    (x,), (t,) = primals, tangents
    return sow(jnp.sin(x), "a"), t * jnp.cos(x)


@jax.custom_vjp
def _with_vjp(x):
    return jnp.sin(x)


_with_vjp.defvjp(
    lambda x: (sow(jnp.sin(x), "a"), x), lambda x, ct: (sow(ct * jnp.cos(x), "b"),)
)


@pytest.mark.parametrize("fn", [_with_jvp, _with_vjp])
@pytest.mark.parametrize("loops", [1, 2])
def test_rules_in_a_loop_of_lanes(fn, loops):
    def f(x):
        once = lambda c: lax.scan(lambda c, _: (fn(c), None), c, length=2)[0]
        if loops == 1:
            return once(x)
        return lax.scan(lambda c, _: (once(c), None), x, length=2)[0]

    _, got = S(jax.grad(lambda xs: jax.vmap(f)(xs).sum()))(X)
    _, want = S(jax.vmap(jax.grad(f)))(X)
    x, sines = np.asarray(X), []
    for _ in range(2**loops):
        x = np.sin(x)
        sines.append(x)
    close(got["a"]["primal"], np.stack(sines, 1).reshape(2, *[2] * loops))
    for name in got:
        close(got[name]["primal"], want[name]["primal"])


def _sin_of_sin(x):
    return jnp.sin(sow(jnp.sin(x), "a")) ** 2


CHECKPOINTS = {
    "plain": lambda: jax.checkpoint(_sin_of_sin),
    "jit": lambda: jax.jit(jax.checkpoint(_sin_of_sin)),
    "scan": lambda: (
        lambda x: lax.scan(
            lambda c, _: (jax.checkpoint(_sin_of_sin)(c), None), x, None, length=1
        )[0]
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("value", [2.0, lambda a: 2.0 + 0 * a])
def test_plant_in_a_checkpoint(name, value):
    f, values = CHECKPOINTS[name](), {"a": value}
    if not callable(value):
        values = {"a": jnp.full(() if name != "scan" else 1, value)}
    want = jax.value_and_grad(plant(_sin_of_sin, {"a": lambda a: 2.0 + 0 * a}))(0.5)
    got = jax.value_and_grad(plant(f, values))(0.5)
    close(jnp.stack(got), jnp.stack(want))
    with pytest.raises(SowError, match="again, without the mark"):
        plant(jax.value_and_grad(f), values)(0.5)
    close(plant(f, values)(0.5), want[0])
    double = lambda ct: 2 * ct
    got = plant(jax.grad(f), {"a": double}, mode="cotangent")(0.5)
    close(got, 2 * jax.grad(_sin_of_sin)(0.5))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_second_derivatives_of_a_checkpoint(name):
    f = CHECKPOINTS[name]()
    with pytest.raises(SowError, match="again, without the mark"):
        S(jax.grad(jax.grad(f)))(0.5)
    want = S(jax.grad(jax.grad(_sin_of_sin)))(0.5)[1]["a"]
    got = S(jax.grad(jax.grad(f)), modes=("primal", "cotangent"))(0.5)[1]["a"]
    assert list(got) == ["primal", "cotangent"]
    for mode in got:
        close(got[mode].reshape(()), want[mode])


@pytest.mark.parametrize("x", [0.5, -0.5])
def test_constant_and_value_of_one_name_in_a_checkpoint(x):
    constant = lambda x: x * sow(jnp.array(2.0), "a")
    f = lambda x: lax.cond(x > 0, _sin_of_sin, constant, x)
    want = S(jax.grad(f))(x)[1]["a"]
    got = S(jax.grad(jax.checkpoint(f)))(x)[1]["a"]
    assert got.keys() == want.keys() >= {"cotangent"}
    for mode in got:
        close(got[mode], want[mode])


def test_rules_that_share_a_jitted_function_in_a_checkpoint():
    forward = jax.jit(lambda x: jnp.tanh(sow(2 * x, "a")))
    f = jax.custom_vjp(forward)
    bwd = lambda x, ct: jax.vjp(forward, x)[1](ct)
    f.defvjp(lambda x: (forward(x), x), bwd)

    @jax.checkpoint
    def looped(x):
        return lax.scan(lambda x, _: (f(x), None), x, length=2)[0]

    def by_hand(x, eps):
        values = []
        for e in eps:
            values.append(2 * x + e)
            x = jnp.tanh(values[-1])
        return x, jnp.stack(values)

    zeros = jnp.zeros(2)
    (dx, cts), values = jax.grad(by_hand, (0, 1), has_aux=True)(0.3, zeros)
    out, got = S(jax.grad(looped))(0.3)
    close(out, dx)
    close(got["a"]["primal"], values)
    close(got["a"]["cotangent"], cts)
    with pytest.raises(SowError, match="again, without the mark"):
        plant(jax.grad(looped), {"a": values})(0.3)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_gradient_of_a_linearized_checkpoint(name):
    linearized = lambda f: lambda x: jax.linearize(f, x)[1](1.0)
    f = linearized(CHECKPOINTS[name]())
    # The way that leads through the value goes past the sow.
    with pytest.raises(SowError, match="again, without the mark"):
        S(jax.grad(f))(0.5)
    kept = ("primal", "tangent", "tangent.cotangent")
    got = S(jax.grad(f), modes=kept)(0.5)[1]["a"]
    assert tuple(got) == kept
    want = S(jax.grad(linearized(_sin_of_sin)))(0.5)[1]["a"]
    for mode in got:
        close(got[mode].reshape(()), want[mode])
    # A jvp computes nothing once more.
    twice = lambda x: jax.jvp(CHECKPOINTS[name](), (x,), (1.0,))[1]
    got = S(jax.grad(twice))(0.5)[1]["a"]
    assert got.keys() == want.keys()
    for mode in got:
        close(got[mode].reshape(()), want[mode])


def test_second_derivative_of_what_is_the_same_in_each_iteration():
    def f(x, eps):
        body = lambda c, e: (c * (sow(jnp.sin(x), "a") + e), None)
        return lax.scan(body, x, eps)[0]

    _, captured = S(jax.grad(jax.grad(f)))(0.5, jnp.zeros(3))
    each = jax.grad(jax.grad(f), 1)(0.5, jnp.zeros(3))
    close(captured["a"]["primal.cotangent"], each)


@jax.custom_jvp
def _in_the_rule(x):
    return jnp.sin(x)


_in_the_rule.defjvp(
    lambda x, t: (sow(jnp.sin(x[0]), "a"), t[0] * jnp.cos(x[0])),
)


@jax.custom_jvp
def _in_both(x):
    return sow(jnp.sin(x), "a")


_in_both.defjvp(lambda x, t: (_in_both(*x), t[0] * jnp.cos(x[0])))


@jax.custom_vjp
def _in_the_backward_pass(x):
    return jnp.sin(x)


_in_the_backward_pass.defvjp(
    lambda x: (jnp.sin(x), x), lambda x, ct: (sow(ct * jnp.cos(x), "a"),)
)


@pytest.mark.parametrize("fn", [_in_the_rule, _in_both, _in_the_backward_pass])
def test_derivative_rules_that_only_some_lanes_run(fn):
    branch = lambda p, x: lax.cond(p, fn, lambda x: x, x)
    p = jnp.array([True, False])
    with pytest.raises(SowError, match="only some lanes"):
        S(jax.grad(lambda x: jax.vmap(branch)(p, x).sum()))(X)
    _, captured = S(jax.vmap(jax.grad(branch, 1)))(p, X)
    close(captured["a"]["count"], [1, 0])
    every = lambda x: jax.vmap(lambda x: lax.cond(True, fn, lambda x: x, x))(x).sum()
    _, captured = S(jax.grad(every))(X)
    assert captured["a"]["primal"].shape == (2,)


def test_derivative_rules_in_a_loop_that_only_some_lanes_run():
    def f(n, x):
        loop = lambda c: (c[0] + 1, _in_both(c[1]))
        return lax.while_loop(lambda c: c[0] < n, loop, (0, x))[1]

    n = jnp.array([0, 2])
    tangent = lambda f: lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))
    with pytest.raises(SowError, match="only some lanes"):
        S(tangent(lambda x: jax.vmap(f)(n, x)))(X)
    _, captured = S(jax.vmap(lambda n, x: tangent(lambda x: f(n, x))(x)))(n, X)
    close(captured["a"]["count"], [0, 2])


@pytest.mark.filterwarnings("ignore:.*found no mark")
@pytest.mark.parametrize("fn", [_in_the_rule, _in_both, _in_the_backward_pass])
def test_derivative_rules_around_another_handler(fn):
    outer = lambda x: sow(fn(x), "b")
    want = S(jax.grad(outer))(0.5)[1]
    for inner in (
        plant(outer, {"b": lambda b: b}),
        lambda x: S(outer, tag="another")(x)[0],
    ):
        got = S(jax.grad(inner))(0.5)[1]
        assert list(got) == list(want)
        close(got["a"]["primal"], want["a"]["primal"])


def _marked(x):
    sow(x, "b", tag="another")
    return sow(jnp.sin(x), "a")


def _of_its_own(fwd):
    fn = jax.custom_vjp(_marked)
    fn.defvjp(lambda x: (fwd(x), x), lambda x, ct: (ct * jnp.cos(x),))
    return fn


def _in_a_loop(fn, x):
    step = lambda c: (c[0] + 1, fn(c[1]))
    return eqxi.while_loop(
        lambda c: c[0] < 2, step, (0, x), max_steps=2, kind="checkpointed"
    )[1]


def _solved(x):
    term = diffrax.ODETerm(lambda t, y, args: _marked(y))
    return diffrax.diffeqsolve(term, diffrax.Euler(), 0, 1, 0.25, x).ys


@pytest.mark.parametrize(
    "fn",
    [
        _in_both,
        _of_its_own(_marked),
        _of_its_own(_of_its_own(_marked)),
        _of_its_own(lambda x: jnp.sin(x)),
    ],
    ids=["custom_jvp", "custom_vjp", "custom_vjp twice", "not in the rule"],
)
def test_rules_in_a_loop_that_a_backward_pass_runs_again(fn, call):
    loop = lambda x: _in_a_loop(lambda x: 2 * fn(x), x)
    grad = jax.grad(lambda x: loop(x).sum())
    kept = jax.grad(jax.checkpoint(lambda x: loop(x).sum()))
    for f, x in ((grad, X), (jax.vmap(grad), X[None]), (kept, X)):
        _, got = call(S(f, reduce=Last()), x)
        close(jnp.reshape(got["a"]["primal"], X.shape), jnp.sin(2 * jnp.sin(X)))
        close(jnp.squeeze(got["a"]["count"]), 2)


# Equinox comes back to a step from the last checkpoint before it, and differentiates
# all steps on the way.
@pytest.mark.parametrize(
    "options, steps",
    [
        (dict(checkpoints=1), [0, 1, 2, 0, 1, 0]),
        (dict(checkpoints=2), [1, 2, 1, 0]),
        (dict(max_steps=3, checkpoints=3), [2, 1, 0]),
    ],
)
def test_a_rule_that_a_backward_pass_runs_again(options, steps):
    fn = jax.custom_jvp(lambda x: 2 * x)
    ran = []

    @fn.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents
        jax.debug.callback(lambda x: ran.append(x.item()), x)
        return 2 * x, t * sow(2 * x, "a")

    f = jax.grad(lambda x: _eqx_loop(**options)(3, lambda i, x: fn(x), x))
    _, got = jax.jit(S(f, reduce=Buffer(len(steps))))(0.5)
    close(got["a"]["primal"], [2.0**i for i in steps])
    close(got["a"]["count"], len(steps))
    jax.effects_barrier()
    assert ran == [0.5 * 2.0**i for i in steps]


def test_a_module_whose_pullback_a_loop_keeps(call):
    """Of what its `fwd` calls, Equinox's checkpointed loop has two traces."""
    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    fn = jax.custom_vjp(lambda m, x: jnp.tanh(m(x)))

    def fwd(m, x):
        y, pull = jax.vjp(lambda m, x: m(x), m, x)
        return jnp.tanh(y), (y, pull)

    fn.defvjp(fwd, lambda res, ct: res[1](ct / jnp.cosh(res[0]) ** 2))
    x = jnp.array([0.3, -0.7])

    def by_hand(eps):
        first = linear(x) + eps[0]
        last = linear(jnp.tanh(first)) + eps[1]
        return jnp.tanh(last).sum(), (first, last)

    eps = [jnp.zeros(2)] * 2
    cotangents, values = jax.grad(by_hand, has_aux=True)(eps)
    f = jax.grad(lambda m: _in_a_loop(lambda x: fn(m, x), x).sum())
    _, got = call(S(f, capture=True, reduce=Buffer(2)), linear)
    (entry,) = got.values()
    close(entry["primal"], values)
    close(entry["cotangent"], cotangents[::-1])


def test_a_bwd_at_another_point_in_a_loop_that_a_backward_pass_runs_again():
    fn = jax.custom_vjp(_marked)
    fn.defvjp(lambda x: (fn(x), x), lambda x, ct: (ct * jnp.cos(fn(x + 1)),))
    f = jax.grad(lambda x: _in_a_loop(fn, x).sum())
    with pytest.raises(DuplicateSowError):
        S(f)(X)
    _, got = S(f, reduce=Append())(X)
    first, second = got["a"]["primal"]
    close(first, jnp.sin(jnp.sin(X)))
    close(second, jnp.sin(X + 1))


_jitted = jax.jit(_marked)
_descent = jax.jit(
    lambda x: _in_a_loop(lambda x: x - jax.grad(lambda x: _jitted(x).sum())(x), x)
)


def _with_rules(fn, fwd, bwd):
    with_rules = jax.custom_vjp(lambda x: fn(x))
    with_rules.defvjp(fwd, bwd)
    return with_rules


@pytest.mark.parametrize(
    "f, n",
    [
        (
            lambda x: _in_a_loop(
                _with_rules(
                    _jitted,
                    lambda x: (_jitted(x), _jitted(x + 1)),
                    lambda res, ct: (res * ct,),
                ),
                x,
            ),
            3,
        ),
        (
            lambda x: _in_a_loop(
                _with_rules(
                    _jitted,
                    lambda x: (_jitted(x), x),
                    lambda x, ct: (ct * _jitted(x + 1),),
                ),
                x,
            ),
            2,
        ),
        (
            _with_rules(
                _descent,
                lambda x: (_descent(x), x),
                lambda x, ct: (ct * _descent(x + 1),),
            ),
            2,
        ),
        (lambda x: _in_a_loop(_jitted, _jitted(x)), 2),
    ],
    ids=["fwd", "bwd", "a solver in bwd", "before the loop"],
)
def test_one_equation_at_another_point_is_no_repetition(f, n):
    """A jitted function has one jaxpr, wherever it is called."""
    grad = jax.grad(lambda x: f(x).sum())
    with pytest.raises(DuplicateSowError):
        S(grad).eval_shape(X)
    _, got = S(grad, reduce=Append()).eval_shape(X)
    assert len(got["a"]["primal"]) == n


@pytest.mark.filterwarnings("ignore:.*found no mark")
@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "inner",
    [
        lambda f: tap(f, lambda event: None),
        lambda f: tap(f, lambda event: None, tag="another"),
        lambda f: lambda x: S(f, tag="another")(x)[0],
    ],
    ids=["tap", "tap of another tag", "save_intermediates"],
)
@pytest.mark.parametrize(
    "fn",
    [
        _of_its_own(_marked),
        _of_its_own(jnp.sin),
        _of_its_own(_of_its_own(_marked)),
        pytest.param(
            lambda x: _in_a_loop(_marked, x),
            marks=pytest.mark.slow,
        ),
        lambda x: _in_a_loop(_of_its_own(_marked), x),
        pytest.param(
            lambda x: _in_a_loop(lambda x: _in_a_loop(_marked, x), x),
            marks=pytest.mark.every,
        ),
        pytest.param(
            lambda x: _in_a_loop(
                jax.checkpoint(
                    lambda x: lax.scan(lambda x, _: (_marked(x), None), x, length=2)[0]
                ),
                x,
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(_solved, marks=pytest.mark.slow),
    ],
    ids=[
        "in the rule",
        "not in the rule",
        "in a rule in the rule",
        "loop",
        "rule in a loop",
        "loop in a loop",
        "checkpoint in a loop",
        "diffrax",
    ],
)
def test_a_derivative_rule_around_and_inside_another_handler(fn, inner, call):
    loss = lambda x: fn(x).sum()
    want = S(jax.grad(loss))(X)[1]
    for f in (jax.grad(inner(loss)), inner(jax.grad(loss))):
        out, got = call(S(f), X)
        close(out, jax.grad(loss)(X))
        assert_close(got, want)


def test_a_rule_in_a_loop_inside_another_handler():
    # One case of the test above that finds what others of it do not.
    loss = lambda x: _in_a_loop(_of_its_own(_marked), x).sum()
    inner = lambda f: lambda x: S(f, tag="another")(x)[0]
    want = S(jax.grad(loss))(X)[1]
    assert_close(S(jax.grad(inner(loss)))(X)[1], want)
    assert_close(S(inner(jax.grad(loss)))(X)[1], want)


@pytest.mark.slow
@pytest.mark.parametrize("fn", [_of_its_own(_marked), lambda x: _in_a_loop(_marked, x)])
def test_what_is_tapped_inside_a_gradient_is_told_once(fn, call):
    told = []
    loss = tap(lambda x: fn(x).sum(), lambda event: told.append(event.value))
    call(S(jax.grad(loss)), X)
    jax.effects_barrier()
    once = []
    call(
        jax.grad(tap(lambda x: fn(x).sum(), lambda event: once.append(event.value))), X
    )
    jax.effects_barrier()
    assert_close(told, once)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda fn: jax.vmap(lambda x: lax.cond(x > 0, fn, lambda x: x, x)),
        lambda fn: lambda x: S(fn, tag="another")(x)[0],
        lambda fn: tap(fn, lambda event: None),
    ],
    ids=["some lanes", "a capture inside", "a tap inside"],
)
@pytest.mark.parametrize("value", [lambda a: a**2, jnp.ones(2)])
def test_plant_around_another_handler_drops_the_rule(wrap, value, call):
    planted = plant(wrap(_of_its_own(_marked)), {"a": value})
    by_hand = lambda x: value(jnp.sin(x)) if callable(value) else value
    close(call(planted, X), by_hand(X))
    got = call(jax.grad(lambda x: planted(x).sum()), X)
    close(got, jax.grad(lambda x: by_hand(x).sum())(X))


@pytest.mark.parametrize(
    "inner",
    [
        lambda f: tap(f, lambda event: None),
        lambda f: lambda x: S(f, tag="b")(x)[0],
        lambda f: lambda x: lax.cond(x > 0, f, lambda x: x, x),
    ],
    ids=["tap", "save_intermediates", "cond"],
)
def test_plant_around_another_handler_drops_a_batching_rule(inner, call):
    fn = jax.custom_batching.custom_vmap(
        lambda x: sow(jnp.sin(x), "a") * sow(x, "b", tag="b")
    )
    fn.def_vmap(lambda n, batched, x: (jax.vmap(fn.fun)(x), True))
    planted = lambda f: plant(f, {"a": lambda a: a + 1})
    want = (jnp.sin(X) + 1) * X
    close(call(planted(inner(fn)), X[0]), want[0])
    close(call(planted(jax.vmap(inner(fn))), X), want)
    close(call(jax.vmap(planted(inner(fn))), X), want)


def test_what_is_planted_around_a_tap_is_told_in_a_function_with_a_rule(call):
    layer = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    fn = jax.custom_vjp(lambda x: layer(x))
    fn.defvjp(lambda x: (layer(x), None), lambda _, ct: (ct,))
    told = []
    tapped = tap(fn, lambda event: told.append(event.value), capture=True)
    out = call(plant(tapped, {"layer": lambda y: y + 10}, capture=True), X)
    jax.effects_barrier()
    assert told
    for value in told:
        close(value, layer(X) + 10)
    close(out, layer(X) + 10)


@pytest.mark.filterwarnings("ignore:.*found no mark")
@pytest.mark.parametrize(
    "wrap",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
        lambda f: lambda x: lax.cond(x > 0, f, lambda x: x, x),
    ],
    ids=["jit", "checkpoint", "scan", "cond"],
)
def test_a_mark_that_is_not_in_the_rule_around_a_tap(wrap, call):
    inner = wrap(lambda x: sow(jnp.sin(x), "a"))
    fn = jax.custom_vjp(lambda x: inner(x) * sow(x, "b", tag="b"))
    fn.defvjp(lambda x: (jnp.sin(x) * x, None), lambda _, ct: (3 * ct,))
    tapped = tap(fn, lambda event: None, tag="b")
    assert list(call(S(tapped), 0.5)[1]) == ["a"]
    # As without the tap, the rule runs in the place of the function.
    gradient, captured = call(S(jax.grad(tapped)), 0.5)
    assert captured == {}
    close(gradient, 3.0)


def test_functions_with_rules_within_each_other_in_nested_captures():
    def nested(depth):
        if depth == 0:
            return lambda x: sow(jnp.sin(x), "a")
        inner = nested(depth - 1)
        fn = jax.custom_vjp(lambda x: inner(x) + sow(x, f"b{depth}", tag="b"))
        fn.defvjp(lambda x: (inner(x), None), lambda _, ct: (ct,))
        return fn

    def size(depth):
        return len(primitives(jax.make_jaxpr(S(S(nested(depth)), tag="b"))(1.0).jaxpr))

    # What the walk makes does not double with each function.
    assert size(8) < 10 * size(4)


@pytest.mark.filterwarnings("ignore:.*found no mark")
@under("eager", "jit", "checkpoint")
@pytest.mark.parametrize("kind", ["custom_jvp", "custom_vjp"])
def test_a_mark_in_a_rule_that_does_not_run(wrap, kind):
    if kind == "custom_jvp":
        inside = jax.custom_jvp(lambda x: x * x)
        inside.defjvp(lambda x, t: (x[0] ** 2, 2 * sow(x[0], "rule") * t[0]))
    else:
        inside = jax.custom_vjp(lambda x: x * x)
        inside.defvjp(lambda x: (x * x, sow(x, "rule")), lambda x, ct: (2 * x * ct,))
    fn = jax.custom_jvp(lambda x: sow(jnp.sin(wrap(inside)(x)), "a", tag="inner"))
    fn.defjvp(lambda x, t: (jnp.cos(x[0]), 3 * t[0]))

    save = lambda fn, tag: lambda x: S(fn, tag=tag)(x)[0]
    send = lambda fn, tag: tap(fn, lambda event: None, tag=tag)
    for inner, outer in it.product((save, send), repeat=2):
        called = inner(fn, "inner")
        for use in (called, outer(called, "outer")):
            for run in (jax.grad(use), jax.grad(lambda x: jax.grad(use)(x) ** 2)):
                assert S(run)(0.5)[1] == {}
    once = S(jax.grad(save(lambda x: inside(save(fn, "inner")(x)), "outer")))
    assert list(once(0.5)[1]) == ["rule"]


@pytest.mark.filterwarnings("ignore:.*found no mark")
def test_a_mark_that_is_not_in_the_rule_in_a_branch_of_some_lanes():
    fn = _of_its_own(jnp.sin)
    branch = lambda p, x: lax.cond(p, fn, lambda x: x, x)
    p = jnp.array([True, False])
    _, captured = S(jax.vmap(branch))(p, X)
    close(captured["a"]["primal"], [jnp.sin(X[0]), 0.0])
    # As without the vmap, the rule runs in the place of the function.
    assert S(jax.grad(lambda x: branch(True, x)))(0.5)[1] == {}
    assert S(jax.grad(lambda x: jax.vmap(branch)(p, x).sum()))(X)[1] == {}
    # What was captured can be differentiated all the same.
    got = jax.grad(lambda x: S(jax.vmap(branch))(p, x)[1]["a"]["primal"].sum())(X)
    close(got, [jnp.cos(X[0]), 0.0])


def test_a_function_with_a_rule_that_has_no_derivative_of_its_own():
    @jax.custom_jvp
    def sine(x):
        y = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return sow(y, "inside")

    sine.defjvp(lambda x, t: (sine(*x), jnp.cos(*x) * t[0]))
    outside = S(lambda x: sow(sine(x), "outside").sum(), names="outside")
    gradient, captured = jax.grad(outside, has_aux=True)(X)
    close(gradient, jnp.cos(X))
    close(captured["outside"]["primal"], jnp.sin(X))
    _, captured = S(jax.grad(lambda x: sine(x).sum()))(X)
    close(captured["inside"]["primal"], jnp.sin(X))
    # What is captured inside has the derivative of the callback, which has none.
    with pytest.raises(ValueError, match="callbacks do not support JVP"):
        jax.grad(lambda x: S(sine)(x)[0].sum())(X)


def test_a_rule_that_has_another_value_than_the_function():
    @jax.custom_jvp
    def rounded(x):
        return sow(jnp.round(x), "a")

    rounded.defjvp(lambda x, t: (x[0], t[0]))
    plain = jax.jvp(rounded, (0.7,), (1.0,))
    assert jax.jvp(lambda x: S(rounded)(x)[0], (0.7,), (1.0,)) == plain


@under("checkpoint", "eager", argument="keep")
def test_nested_loops_that_a_backward_pass_runs_again(keep):
    def loop(body, x):
        step = lambda c: (c[0] + 1, body(c[1]))
        return eqxi.while_loop(
            lambda c: c[0] < 2, step, (0, x), max_steps=2, kind="checkpointed"
        )[1]

    inner = lambda x: loop(lambda x: sow(jnp.sin(x), "a"), x)
    _, captured = S(jax.grad(keep(lambda x: loop(inner, x))))(0.5)
    close(captured["a"]["primal"], np.sin(np.sin(np.sin(np.sin(0.5)))))
    close(captured["a"]["count"], 4)


def _repeated_sines(n):
    """Of `sin(... sin(X))`, the cotangents of all values, and the values."""

    def unrolled(eps, x):
        values = []
        for e in eps:
            x = jnp.sin(x) + e
            values.append(x)
        return x.sum(), values

    return jax.grad(unrolled, has_aux=True)(jnp.zeros((n, *X.shape)), X)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda scan, step: jax.checkpoint(scan(step)),
        lambda scan, step: scan(jax.checkpoint(step)),
        lambda scan, step: jax.checkpoint(jax.jit(scan(step))),
        lambda scan, step: scan(jax.jit(jax.checkpoint(step))),
    ],
    ids=["outside", "inside", "jit in it", "in a jit"],
)
def test_a_checkpoint_in_a_loop_that_a_backward_pass_runs_again(wrap, call):
    def scan(step):
        return lambda x: lax.scan(lambda x, _: (step(x), None), x, length=2)[0]

    body = wrap(scan, lambda x: sow(jnp.sin(x), "a"))

    def f(x):
        step = lambda c: (c[0] + 1, body(c[1]))
        return eqxi.while_loop(
            lambda c: c[0] < 3, step, (0, x), max_steps=3, kind="checkpointed"
        )[1].sum()

    cotangents, values = _repeated_sines(6)
    _, got = call(S(jax.grad(f)), X)
    close(got["a"]["primal"], values[-2:])
    close(got["a"]["cotangent"], cotangents[-2:])
    close(got["a"]["count"], [3, 3])


@pytest.mark.parametrize(
    "inner",
    [
        lambda f: tap(f, lambda event: None),
        lambda f: plant(f, {"a": lambda ct: ct}, mode="cotangent"),
        lambda f: lambda x: S(f, tag="another")(x)[0],
    ],
    ids=["tap", "plant", "save_intermediates"],
)
def test_a_loop_that_a_backward_pass_runs_again_below_another_handler(inner):
    def forward(x):
        sow(x, "b", tag="another")
        return sow(jnp.sin(x), "a")

    f = jax.custom_vjp(forward)
    f.defvjp(lambda x: (forward(x), x), lambda x, ct: jax.vjp(forward, x)[1](ct))
    loop = lambda x: lax.scan(lambda x, _: (f(x), None), x, length=3)[0].sum()

    cotangents, values = _repeated_sines(3)
    _, got = S(inner(jax.grad(loop)))(X)
    close(got["a"]["primal"], values)
    close(got["a"]["cotangent"], cotangents)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_lanes_of_nested_loops_that_a_backward_pass_runs_again(depth, call):
    def forward(c):
        return jnp.tanh(sow(2 * c, "a"))

    with_rule = jax.custom_vjp(forward)
    with_rule.defvjp(lambda c: (forward(c), c), lambda c, t: jax.vjp(forward, c)[1](t))
    loop = with_rule
    for _ in range(depth):
        loop = functools.partial(
            lambda body, c: lax.scan(lambda c, _: (body(c), None), c, length=2)[0],
            loop,
        )
    x = jnp.array([[0.3, -0.8], [0.6, 0.1], [1.0, 0.2]])

    def unrolled(eps, x):
        for e in eps:
            x = jnp.tanh(2 * x + e)
        return x.sum()

    eps = jnp.zeros((2**depth, 2))
    expected = jax.vmap(jax.grad(unrolled), in_axes=(None, 0))(eps, x)
    _, got = call(S(jax.vmap(jax.grad(lambda x: loop(x).sum()))), x)
    close(got["a"]["cotangent"].reshape(expected.shape), expected)


# --- beside leaves that are not differentiated ---


def _mixed(mark, x, y):
    a, b = mark((x, y), "a")
    doubled = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, b))
    return a * doubled[1]


@under("eager", "jit", "checkpoint")
def test_leaves_that_are_not_differentiated_stay_so(wrap):
    """JAX refuses the reverse mode of a while loop: `b` must not become perturbed."""
    x, y = jnp.array(2.0), jnp.array(3.0)
    fn = jax.value_and_grad(wrap(lambda x, y: _mixed(sow, x, y)))
    out, got = S(fn)(x, y)
    assert_close(out, jax.value_and_grad(lambda x: _mixed(unmarked, x, y))(x))
    assert_close(got["a"]["primal"], (x, y))
    of_x, of_y = got["a"]["cotangent"]
    assert_close(of_x, jnp.array(24.0))
    assert of_y.dtype == jax.dtypes.float0
    _, got = S(lambda x: jax.jvp(lambda x: _mixed(sow, x, y), (x,), (x,)))(x)
    close(got["a"]["tangent"][0], 2.0)
    close(got["a"]["tangent"][1], 0.0)


# --- donated values ---

_donates = jax.jit(lambda x: x + 1, donate_argnums=0)
_sows = jax.jit(lambda x: sow(x, "a") * 2)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: _donates(sow(2 * x, "a")),
        lambda x: (lambda y: _sows(y) + _donates(y))(2 * x),
        lambda x: _donates(sow(jnp.sin(2 * x), "b") + sow(2 * x, "a")),
    ],
)
@under(of=REDUCERS, argument="row")
def test_what_is_captured_is_not_donated(fn, row):
    assert_close(S(fn)(X)[1]["a"]["primal"], 2 * X)
    got = S(fn, reduce={"a": row.reducer})(X)[1]["a"]["primal"]
    assert_close(got, row.by_hand([2 * X], 0 * X))


# --- effects ---


def _ordered(x):
    log = lambda name: jax.debug.print(name, ordered=True)
    log("a")
    x = sow(x * 2, "a")
    log("b")
    loop = lambda x, _: (log("c"), (sow(jnp.sin(x), "c"), None))[1]
    x, _ = lax.scan(loop, x, length=2)
    log("d")
    log("e")
    return x


@under("eager", "jit")
@pytest.mark.parametrize(
    "way", [S, lambda f: plant(f, {"a": jnp.cos}), lambda f: S(f, reduce=Last())]
)
def test_effects_keep_their_order(wrap, way, capfd):
    wrap(way(_ordered))(X)
    jax.effects_barrier()
    assert capfd.readouterr().out.split() == ["a", "b", "c", "c", "d", "e"]


# --- leaks ---


def _scanned(x):
    step = lambda c, t: (sow(jnp.sin(c * t), "a"), None)
    return jnp.sum(lax.scan(step, x, jnp.arange(3.0))[0])


# JAX finds a leak of its own in the gradient of a loop with an effect, save in a
# `jax.checkpoint`.
@pytest.mark.slow
@pytest.mark.parametrize(
    "fn", [_scanned, jax.jit(_scanned), jax.grad(jax.checkpoint(_scanned))]
)
def test_under_checking_leaks(fn):
    want = S(fn)(X)
    with jax.checking_leaks():
        assert_close(S(fn)(X), want)
