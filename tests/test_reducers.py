"""All reducers, everywhere that a sow can run."""

import functools as ft
import itertools as it

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_sow import (
    Append,
    Buffer,
    DuplicateSowError,
    Fold,
    Last,
    plant,
    save_intermediates as S,
    sow,
    SowError,
)
from jax import lax

from .helpers import assert_close, close
from .tables import buffer, IN_ORDER, REDUCERS, SAVES, under


X = jnp.array([0.5, 1.5])


def line(x):
    for i in range(3):
        x = sow(x + i, "a")
    return x


def loops(x):
    def outer(c, _):
        return lax.fori_loop(0, 2, lambda i, c: sow(c + 1, "a"), c), None

    return lax.scan(outer, x, None, length=2)[0]


def reverse(x):
    def body(c, w):
        return sow(c + w, "a"), None

    return lax.scan(body, x, jnp.arange(3.0), reverse=True)[0]


def mixed(x):
    x = sow(x, "a")
    x = lax.scan(lambda c, _: (sow(c + 1, "a"), None), x, None, length=2)[0]
    return lax.cond(x[0] > 0, lambda x: sow(x * 2, "a"), lambda x: x, x)


def looping(x):
    return lax.while_loop(lambda c: c.sum() < 10, lambda c: sow(c * 2, "a"), x)


def never(x):
    return lax.while_loop(lambda c: c.sum() < 0, lambda c: sow(c * 2, "a"), x)


# What each runs, in order of execution.
RUNS = {
    line: [X, X + 1, X + 3],
    loops: [X + 1, X + 2, X + 3, X + 4],
    reverse: [X + 2, X + 3, X + 3],
    mixed: [X, X + 1, X + 2, 2 * X + 4],
    looping: [2 * X, 4 * X, 8 * X],
    never: [],
}
CONDITIONAL = (mixed, looping, never)
every = pytest.mark.parametrize("f", RUNS, ids=lambda f: f.__name__)
wraps = under("eager", "jit inside", of=SAVES)
in_order = under(of=IN_ORDER, argument="row")
BUFFERS = {"room for all": buffer(6), "first two": buffer(2, "first")}


def test_two_executions_need_a_reducer():
    with pytest.raises(DuplicateSowError) as error:
        S(line)(X)
    assert "backward pass" not in str(error.value)


@every
@wraps
@under(of=IN_ORDER | BUFFERS, argument="row")
def test_in_order_of_execution(f, wrap, row):
    _, captured = wrap(f, reduce=row.reducer)(X)
    close(captured["a"]["primal"], row.by_hand(RUNS[f], 0 * X))
    assert ("count" in captured["a"]) == (row.counts or f in CONDITIONAL)
    if "count" in captured["a"]:
        assert captured["a"]["count"].dtype == jnp.int32
        assert captured["a"]["count"] == len(RUNS[f])


def constant_in_one_branch(x, runs):
    def body(x, i):
        branches = lambda x: sow(jnp.sin(x), "a") * x, lambda x: x * sow(0 * X, "a")
        return lax.switch(i, branches, x), None

    return lax.scan(body, x, runs)[0]


@under("eager", "jit", "checkpoint")
def test_rows_of_a_buffer_that_do_not_belong_together(wrap):
    runs = jnp.array([1, 0, 1])
    f = wrap(lambda x: constant_in_one_branch(x, runs))
    forward = lambda x: jax.jvp(f, (x,), (x,))
    backward = jax.grad(lambda x: f(x).sum())
    for fn, mode in ((forward, "tangent"), (backward, "cotangent")):
        said = f"`a` is kept in a `Buffer`. .* but it has a {mode} only at"
        with pytest.raises(SowError, match=said):
            S(fn, reduce=Buffer(3))(X)
        # One of the two alone has rows of its own.
        rows = S(fn, reduce=Buffer(3), modes=mode)(X)[1]["a"][mode]
        close(rows[1:], np.zeros((2, 2)))
        rows = S(fn, reduce=Buffer(3), modes="primal")(X)[1]["a"]["primal"]
        close(rows[::2], np.zeros((2, 2)))


def test_rows_of_a_buffer_with_a_derivative_in_each_branch():
    def f(x):
        def body(x, i):
            branches = lambda x: sow(jnp.sin(x), "a") * x, lambda x: sow(x + 1, "a")
            return lax.switch(i, branches, x), None

        return lax.scan(body, x, jnp.array([1, 0, 1]))[0]

    stack = S(jax.grad(lambda x: f(x).sum()))(X)[1]["a"]
    buffer = S(jax.grad(lambda x: f(x).sum()), reduce=Buffer(3))(X)[1]["a"]
    close(buffer["primal"], stack["primal"])
    close(buffer["cotangent"][::-1], stack["cotangent"])


def _in_while(step, n=3):
    def run(x):
        loop = lambda c: (c[0] + 1, step(*c))
        return lax.while_loop(lambda c: c[0] < n, loop, (0, x))[1]

    return run


def _with_pullback(x):
    return jax.vjp(lambda x: sow(x * x, "a"), x)


def _on_even_steps(i, x):
    y, pull = _with_pullback(x)
    return x - 0.1 * lax.cond(i % 2 == 0, lambda: pull(y)[0], lambda: jnp.ones_like(x))


def _while_large(i, x):
    y, pull = _with_pullback(x)
    return x - 0.1 * lax.cond(x > 0.95, lambda: pull(y)[0], lambda: jnp.ones_like(x))


def _after_a_value(i, x):
    # As in a line search, whose last evaluation has no gradient.
    y, pull = _with_pullback(x)
    x = x - 0.1 * pull(y)[0]
    return x + 0 * sow(x * x, "a")


def _rows(step, x, n=3):
    """The values, and for each its cotangent, or zero."""
    values, cotangents = [], []
    for i in range(n):
        values.append(x * x)
        if step is _after_a_value or (x > 0.95 if step is _while_large else i % 2 == 0):
            cotangents.append(x * x)
            x = x - 0.1 * 2 * x * x * x
        else:
            cotangents.append(0)
            x = x - 0.1
        if step is _after_a_value:
            values.append(x * x)
            cotangents.append(0)
    return np.stack(values), np.stack(cotangents)


@pytest.mark.parametrize("step", [_on_even_steps, _while_large, _after_a_value])
@pytest.mark.parametrize("buffer", [Buffer(7), Buffer(2), Buffer(2, "first")])
def test_rows_of_executions_without_a_cotangent_are_zeros(step, buffer):
    def kept(rows):
        n, size = len(rows), buffer.size
        rows = rows[:size] if buffer.keep == "first" else rows[-size:]
        return [*rows, *[0] * (size - n)]

    lanes = jax.jit(S(jax.vmap(_in_while(step)), reduce=buffer))
    xs = np.array([1.0, 0.4], np.float32)
    _, of_lanes = lanes(jnp.asarray(xs))
    for k, x in enumerate(xs):
        values, cotangents = _rows(step, x)
        _, alone = S(_in_while(step), reduce=buffer)(jnp.asarray(x))
        for got in (alone["a"], jax.tree.map(lambda x, k=k: x[k], of_lanes["a"])):
            close(got["primal"], kept(values))
            close(got["cotangent"], kept(cotangents))
            assert got["count"] == len(values)


def test_rows_of_a_loop_that_begins_without_a_cotangent():
    """It has a branch that is not there where the values are."""
    on_odd_steps = lambda i, x: _on_even_steps(i + 1, x)
    _, got = S(_in_while(on_odd_steps), reduce=Buffer(3))(jnp.array(1.0))
    values = np.square([1.0, 0.9, 0.9 - 0.1 * 2 * 0.9**3])
    close(got["a"]["primal"], values)
    close(got["a"]["cotangent"], values * [0, 1, 0])


def _scanned(x):
    step = lambda x, _: (jnp.sin(sow(x * x, "a")), None)
    return lax.scan(step, x, None, length=3)[0]


def _twice(x):
    y, pull = _with_pullback(x)
    return pull(y)[0] + pull(2 * y)[0]


def _two_in_an_iteration(i, x):
    both = lambda x: sow(sow(x * x, "a") * x, "a")
    return x - 0.1 * jax.grad(both)(x)


def _solves_with_a_pullback(x):
    y, pull = _with_pullback(x)
    return _in_while(lambda i, ct: pull(ct)[0])(y)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: _scanned(x) + jax.grad(_scanned)(x),
        _twice,
        _in_while(_two_in_an_iteration),
        _solves_with_a_pullback,
    ],
    ids=["a run without one", "twice", "two in an iteration", "in a loop"],
)
def test_rows_of_a_buffer_of_other_executions(fn, call):
    x = jnp.array(0.7)
    with pytest.raises(SowError, match="is kept in a `Buffer`, but there is not one"):
        call(S(fn, reduce=Buffer(9)), x)
    for modes in ("primal", "cotangent"):
        assert modes in call(S(fn, reduce=Buffer(9), modes=modes), x)[1]["a"]


def test_rows_of_a_gradient_after_the_loop():
    """That of the last iteration: the loop passes on what the derivative needs."""
    x = jnp.array(0.7)

    def fn(x):
        structure = None

        def square(x):
            nonlocal structure
            y, pull = _with_pullback(x)
            needs, structure = jax.tree.flatten(pull)
            return y, needs

        start = x, jax.tree.map(jnp.zeros_like, jax.eval_shape(square, x)[1])
        y, needs = _in_while(lambda i, c: square(c[0]))(start)
        return jax.tree.unflatten(structure, needs)(2 * y)[0]

    values, cotangents = [x**2, x**4, x**8], [0, 0, 2 * x**8]
    for size, kept in ((2, lambda rows: rows[1:]), (4, lambda rows: [*rows, 0])):
        got = jax.jit(S(fn, reduce=Buffer(size)))(x)[1]["a"]
        close(got["primal"], kept(values))
        close(got["cotangent"], kept(cotangents))


def test_rows_of_a_buffer_whose_derivatives_are_in_any_order():
    values = [1.0, 4.0, 9.0]

    def fn(x, order):
        one = lambda x: sow(x * x, "a")
        pulls = [jax.vjp(one, k * x)[1] for k in (1.0, 2.0, 3.0)]
        return sum(pulls[k](values[k] * x)[0] for k in order)

    for order in it.permutations(range(3)):
        saved = S(lambda x, order=order: fn(x, order), reduce=Buffer(3))
        if order not in ((0, 1, 2), (2, 1, 0)):
            with pytest.raises(SowError, match="there is not one cotangent"):
                saved(jnp.ones(()))
            continue
        got = saved(jnp.ones(()))[1]["a"]
        close(got["primal"], values)
        close(got["cotangent"], [values[k] for k in order])


def test_rows_of_a_buffer_with_branches_that_lanes_choose():
    """Each lane runs all branches, backward in the order in which it runs them forward,
    and goes back through the iterations."""

    def f(x, runs):
        def body(x, i):
            branches = lambda x: sow(jnp.sin(x), "a") * x, lambda x: sow(x + 1, "a")
            return lax.switch(i, branches, x), None

        return lax.scan(body, x, runs)[0]

    xs, runs = jnp.array([0.7, -0.4]), jnp.array([[1, 0, 1], [0, 0, 1]])
    _, got = S(jax.vmap(jax.grad(f)), reduce=Buffer(3))(xs, runs)
    for lane, (x, i) in enumerate(zip(xs, runs)):
        stack = S(jax.grad(f))(x, i)[1]["a"]
        close(got["a"]["primal"][lane], stack["primal"])
        close(got["a"]["cotangent"][lane][::-1], stack["cotangent"])


@pytest.mark.parametrize("reverse", [(False,), (True,), (False, True)])
def test_rows_of_two_marks_in_one_iteration(reverse):
    """In the backward pass of a loop, that of the second one comes first."""
    factors = np.array([0.5, 2.0, 3.0], np.float32)

    def loops(x, run):
        step = lambda x, factor, mark: mark(factor * mark(jnp.sin(x)))
        for from_end in reverse:
            x = run(step, x, from_end)
        return x

    def scan(step, x, from_end):
        mark = lambda x: sow(x, "a")
        one = lambda x, factor: (step(x, factor, mark), None)
        return lax.scan(one, x, jnp.asarray(factors), reverse=from_end)[0]

    def by_hand(more, x, values):
        def mark(x):
            values.append(x + more[len(values)])
            return values[-1]

        def unrolled(step, x, from_end):
            for factor in factors[:: -1 if from_end else 1]:
                x = step(x, factor, mark)
            return x

        return loops(x, unrolled), values

    x, n = jnp.float32(0.7), 6 * len(reverse)
    fn = jax.grad(lambda x: loops(x, scan))
    _, got = S(fn, reduce=Buffer(n + 1))(x)
    cotangents, values = jax.grad(by_hand, has_aux=True)(jnp.zeros(n), x, [])
    close(got["a"]["primal"], np.array([*values, 0]))
    close(got["a"]["cotangent"], np.array([*cotangents[::-1], 0]))


def test_a_buffer_of_what_has_no_value():
    """A transposed function has cotangents alone."""
    f = lambda x: lax.scan(lambda c, _: (sow(2 * c, "a"), None), x, length=2)[0]
    fn = lambda ct: jax.linear_transpose(f, X)(ct)
    _, got = S(fn, reduce=Buffer(3))(X)
    assert "primal" not in got["a"]
    close(got["a"]["cotangent"], np.stack([X, 2 * X, 0 * X]))


@pytest.mark.parametrize("there", [True, False])
def test_a_whole_backward_pass_in_a_branch(there, call):
    def fn(x, there):
        y, pull = jax.vjp(_scanned, x)
        return lax.cond(there, lambda: pull(y)[0], lambda: y)

    stack = S(jax.grad(_scanned))(jnp.array(0.7))[1]["a"]
    _, got = call(S(fn, reduce=Buffer(3)), jnp.array(0.7), jnp.array(there))
    y = _scanned(jnp.array(0.7))
    close(got["a"]["primal"], stack["primal"])
    close(got["a"]["cotangent"][::-1], np.float32(there) * y * stack["cotangent"])


@wraps
def test_append_has_one_entry_for_each_place(wrap):
    _, captured = wrap(line, reduce=Append())(X)
    assert isinstance(captured["a"]["primal"], tuple)
    for got, want in zip(captured["a"]["primal"], RUNS[line], strict=True):
        close(got, want)
    _, captured = wrap(mixed, reduce=Append())(X)
    first, stacked, branch = captured["a"]["primal"]
    close(first, X)
    close(stacked, [X + 1, X + 2])
    close(branch, 2 * X + 4)


def test_append_of_a_loop_and_of_a_while():
    (stacked,) = S(loops, reduce=Append())(X)[1]["a"]["primal"]
    close(stacked, np.stack(RUNS[loops]).reshape(2, 2, 2))
    (last,) = S(looping, reduce=Append())(X)[1]["a"]["primal"]
    close(last, 8 * X)


@pytest.mark.sample(9)
@every
@under(of=REDUCERS, argument="row")
def test_lanes_are_reduced_apart(f, row):
    xs = jnp.array([[0.5, 1.5], [-2.0, 7.0], [20.0, 1.0]])
    _, got = S(jax.vmap(f), reduce=row.reducer)(xs)
    _, want = eqx.filter_vmap(S(f, reduce=row.reducer))(xs)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(close, got, want)


@in_order
def test_lanes_inside_a_loop_keep_their_axis(row):
    def f(xs):
        def body(c, _):
            return jax.vmap(lambda x: sow(x * 2, "a"))(c), None

        return lax.scan(body, xs, None, length=3)[0]

    xs = jnp.stack([X, 2 * X, 3 * X])
    want = np.stack([row.by_hand([2 * x, 4 * x, 8 * x], 0 * x) for x in xs])
    close(S(f, reduce=row.reducer)(xs)[1]["a"]["primal"], want)


@pytest.mark.slow
@in_order
@under("grad", "jit-grad", "grad-checkpoint")
def test_cotangents_run_backward(wrap, row):
    def f(x):
        def body(c, w):
            return sow(c, "a") * w, None

        return lax.scan(body, x, jnp.array([2.0, 3.0, 5.0]))[0].sum()

    # The cotangents by index, and in order of execution from the end.
    by_index = [30.0, 15.0, 5.0]
    ones = np.ones(2, np.float32)
    close(S(wrap(f))(X)[1]["a"]["cotangent"], [c * ones for c in by_index])
    captured = S(wrap(f), reduce=row.reducer)(X)[1]["a"]
    backward = [c * ones for c in by_index[::-1]]
    close(captured["cotangent"], row.by_hand(backward, 0 * X))
    close(captured["primal"], row.by_hand([X, 2 * X, 6 * X], 0 * X))


@in_order
def test_cotangents_of_straight_line_code_run_backward(row):
    def f(x):
        for w in (2.0, 3.0, 5.0):
            x = sow(x, "a") * w
        return x.sum()

    captured = S(jax.grad(f), reduce=row.reducer)(X)[1]["a"]
    backward = [np.full(2, c, np.float32) for c in (5, 15, 30)]
    close(captured["cotangent"], row.by_hand(backward, 0 * X))
    close(captured["primal"], row.by_hand([X, 2 * X, 6 * X], 0 * X))


def test_fold_takes_values_of_any_structure():
    def f(x):
        def body(c, _):
            c = sow({"v": c * 2, "n": "static"}, "a")["v"]
            return c, None

        return lax.scan(body, x, None, length=3)[0]

    reduce = {"a": Fold(jnp.array(0.0), lambda acc, v: acc + v["v"].sum())}
    _, captured = S(f, reduce=reduce)(X)
    close(captured["a"]["primal"], (X * 14).sum())


def test_fold_of_keys():
    def f(key):
        return lax.fori_loop(0, 3, lambda i, k: sow(jax.random.fold_in(k, i), "k"), key)

    key = jax.random.key(0)
    last, captured = S(f, reduce=Fold(key, lambda acc, k: k))(key)
    assert captured["k"]["primal"] == last


def test_where_a_fold_begins():
    f = lambda x: sow(x, "x")
    # A model can be called, but is a value: `acc` has its arrays.
    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    add = lambda acc, x: eqx.tree_at(lambda m: m.bias, acc, acc.bias + x)
    got = S(f, reduce=Fold(linear, add))(X)[1]["x"]["primal"]
    assert isinstance(got, eqx.nn.Linear)
    close(got.bias, linear.bias + X)
    for first in (lambda: jnp.ones(2), jnp.ones(2)):
        got = S(f, reduce=Fold(first, lambda acc, x: acc + x))(X)
        close(got[1]["x"]["primal"], 1 + X)
    assert repr(Fold(0.0, jnp.add)).startswith("Fold(init=0.0, fn=")


@under("eager", "jit")
def test_append_of_cotangents_alone_is_in_the_order_of_the_primals(wrap):
    def f(w, x):
        sow(x, "h")  # which does not depend on `w`
        return sow(w * x, "h") + 0 * sow(2.0 * w, "h")

    g = wrap(jax.grad(f))
    _, captured = S(g, reduce=Append(), modes="cotangent")(2.0, 7.0)
    assert captured["h"] == {"cotangent": (None, 1.0, 0.0)}


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2", None])
def test_size_of_a_buffer(size):
    with pytest.raises(ValueError, match="positive integer"):
        Buffer(size)
    assert Buffer(np.int64(2)) == Buffer(2)


def test_fold_does_not_stack():
    def f(x):
        return lax.scan(lambda c, _: (sow(c + 1, "a"), None), x, None, length=1000)[0]

    fold = REDUCERS["fold"].reducer
    jaxpr = jax.make_jaxpr(lambda x: S(f, reduce=fold)(x))(X)
    assert "1000,2]" not in str(jaxpr)


def test_reducers_by_name():
    def f(x):
        def body(c, _):
            return sow(sow(c * 2, "a") + 1, "b"), None

        return lax.scan(body, x, None, length=2)[0]

    _, captured = S(f, reduce={"a": Last()})(X)
    close(captured["a"]["primal"], X * 4 + 2)
    assert captured["b"]["primal"].shape == (2, 2)


def test_gradient_goes_through_a_reducer():
    def loss(x):
        fold = REDUCERS["fold"].reducer
        return S(loops, reduce=fold)(x * x)[1]["a"]["primal"].sum()

    close(jax.grad(loss)(X), 15 * 2 * X)


@in_order
def test_a_loop_that_never_runs(row):
    def f(x):
        return lax.scan(lambda c, _: (sow(c, "a"), None), x, None, length=0)[0]

    close(S(f, reduce=row.reducer)(X)[1]["a"]["primal"], row.by_hand([], 0 * X))


def _discriminate(w, x):
    return sow(w * x, "d")


@under("eager", "jit")
def test_append_of_several_backward_passes(wrap):
    d = wrap(_discriminate)

    def step(w, x):
        first = jax.grad(lambda w: 2.0 * d(w, 1.0))(w)
        return first, jax.grad(lambda x: 30.0 * d(w, x))(x)

    _, captured = S(step, reduce=Append())(1.0, 5.0)
    assert captured["d"]["primal"] == (1.0, 5.0)
    assert captured["d"]["cotangent"] == (2.0, 30.0)
    _, captured = S(step, reduce=Append(), modes="cotangent")(1.0, 5.0)
    assert captured["d"] == {"cotangent": (2.0, 30.0)}


def test_append_where_a_place_has_no_cotangent():
    def f(w, x):
        sow(x, "h")
        return sow(w * x, "h")

    _, captured = S(jax.grad(f), reduce=Append())(2.0, 7.0)
    assert captured["h"] == {"primal": (7.0, 14.0), "cotangent": (None, 1.0)}


def _unlike(p, x):
    return lax.cond(
        p,
        lambda x: sow(2 * x, "a"),
        lambda x: sow(5 * sow(3 * x, "a"), "a"),
        x,
    )


@pytest.mark.parametrize("p", [True, False])
def test_append_of_unlike_branches(p):
    loss = lambda p, x: _unlike(p, x) ** 2
    _, captured = S(jax.grad(loss, 1), reduce=Append())(p, 0.5)
    want = ((1.0, 0.0), (2.0, 0.0)) if p else ((1.5, 7.5), (75.0, 15.0))
    assert (captured["a"]["primal"], captured["a"]["cotangent"]) == want
    ps = jnp.array([p, not p])
    batched = lambda x: jax.vmap(loss)(ps, x).sum()
    _, captured = S(jax.grad(batched), reduce=Append())(X)
    each = [S(jax.grad(loss, 1), reduce=Append())(p, x)[1]["a"] for p, x in zip(ps, X)]
    jax.tree.map(close, captured["a"], jax.tree.map(lambda *xs: jnp.stack(xs), *each))


@under("eager", "jit", argument="around")
def test_append_of_branches_that_differentiate_unlike_sows(around):
    @around
    def loss(p, x, c):
        first = lambda: sow(c, "a") * sow(2 * x, "a")
        return lax.cond(p, first, lambda: sow(3 * x, "a") * sow(5 * x, "a"))

    for p, primal, cotangent in (
        (True, (2.0, 2.0), (0.0, 2.0)),  # of `c` there is none
        (False, (3.0, 5.0), (5.0, 3.0)),
    ):
        _, found = S(jax.grad(loss, 1), reduce=Append())(p, 1.0, jnp.float32(2.0))
        assert (found["a"]["primal"], found["a"]["cotangent"]) == (primal, cotangent)


def test_append_in_branches_commutes_with_vmap():
    inner = jax.jit(lambda x: sow(x + 1, "a"))

    def f(p, x):
        first = lambda x: sow(inner(x) + 1, "a")
        return lax.cond(p, first, lambda x: sow(x + 10, "a"), x)

    p = jnp.array([True, False])
    _, inside = S(jax.vmap(f), reduce=Append())(p, 0 * X)
    _, outside = jax.vmap(S(f, reduce=Append()))(p, 0 * X)
    for got, want in zip(inside["a"]["primal"], outside["a"]["primal"], strict=True):
        close(got, want)
    close(inside["a"]["primal"][0], [1, 10])


def _square(x):
    return sow(x * x, "d")


@under("eager", "jit", "checkpoint")
@pytest.mark.parametrize(
    "second, want",
    [
        (lambda x: jnp.array(3.0), (3.0, None)),
        (lax.stop_gradient, (3.0, None)),
        (lambda x: 2 * x, (3.0, 5.0)),
    ],
)
def test_append_of_one_line_that_runs_twice(wrap, second, want):
    d = wrap(_square)
    loss = lambda x: d(x) * 3.0 + d(second(x)) * 5.0
    _, captured = S(jax.grad(loss), reduce=Append())(2.0)
    assert captured["d"]["cotangent"] == want
    batched = lambda x: jax.vmap(loss)(x).sum()
    _, captured = S(jax.grad(batched), reduce=Append())(X)
    for got, value in zip(captured["d"]["cotangent"], want, strict=True):
        assert (got is None) == (value is None)
        if got is not None:
            close(got, [value, value])


def test_append_of_one_line_in_a_scan():
    def f(c, es):
        body = lambda c, e: (_square(c * e) * 0.5 + _square(e), None)
        return lax.scan(body, c, es)[0]

    _, captured = S(jax.grad(f), reduce=Append())(2.0, jnp.array([1.0, 2.0]))
    close(captured["d"]["cotangent"][0], [6.0, 0.5])
    assert captured["d"]["cotangent"][1] is None


def _either(p, x, y):
    first = lambda: sow(2 * x, "a")
    second = lambda: sow(3 * y, "a")
    return lax.cond(p, first, second)


@pytest.mark.parametrize(
    "calls, want",
    [
        ([("x", "c"), ("c", "x")], ([1, 0], [0, 1])),
        ([("x", "c"), ("c", "c")], ([1, 0], None)),
        ([("c", "c"), ("x", "c")], (None, [1, 0])),
        ([("x", "c"), ("c", "x"), ("x", "x")], ([1, 0], [0, 1], [1, 1])),
    ],
)
def test_append_of_branches_of_which_some_have_a_derivative(calls, want):
    c = jnp.array(5.0)

    def f(p, x):
        named = {"x": x, "c": c}
        return sum(_either(p, named[a], named[b]) for a, b in calls)

    p = jnp.array([True, False])
    loss = lambda x: jax.vmap(f)(p, x).sum()
    for _, captured in (
        S(jax.grad(loss), reduce=Append())(X),
        S(jax.vmap(jax.grad(f, 1)), reduce=Append())(p, X),
    ):
        for got, value in zip(captured["a"]["cotangent"], want, strict=True):
            assert (got is None) == (value is None)
            if got is not None:
                close(got, value)


@in_order
def test_a_gradient_inside_a_vmap_that_is_differentiated(row):
    def f(w, x):
        step = lambda w: jnp.sin(sow(w * x, "a"))
        return step(w - jax.grad(step)(w))

    grad = jax.grad(lambda w: jax.vmap(f, (None, 0))(w, X).sum())
    first = jnp.cos(0.5 * X)
    second = jnp.cos((0.5 - X * first) * X)
    want = [row.by_hand(list(lane), 0 * lane[0]) for lane in zip(first, second)]
    _, captured = S(grad, modes="cotangent", reduce=row.reducer)(0.5)
    close(captured["a"]["cotangent"], np.stack(want))


def test_append_of_gradients_one_after_another_that_are_differentiated():
    def f(w):
        step = jax.grad(lambda w, x: jnp.sin(sow(w * x, "a")))
        return step(w, 1.0) + step(w, 2.0) + 0 * step(w, 3.0)

    _, captured = S(jax.grad(f), reduce=Append())(0.5)
    # The gradients with respect to the three cotangents.
    assert captured["a"]["cotangent.cotangent"] == (1.0, 2.0, 0.0)


# --- structures ---
def _registered(equality, static):
    """A class of PyTrees. `==` of it is not to be called, nor that of what is static in
    it, of which there is a new object each time."""

    def refuse(self, other):
        raise AssertionError

    class Config:
        def __init__(self):
            self.sizes = np.arange(3)

        __hash__ = lambda self: 3
        __eq__ = refuse if equality == "refused" else lambda a, b: a.sizes == b.sizes

    class Q:
        def __init__(self, a, config=None):
            self.a = a
            self.config = Config() if static and config is None else config

    if equality == "elementwise":
        Q.__eq__ = lambda self, other: self.a == other.a
    elif equality == "refused":
        Q.__eq__, Q.__hash__ = refuse, None
    make = lambda config, children: Q(*children, config)
    jax.tree_util.register_pytree_node(Q, lambda q: ((q.a,), q.config), make)
    return Q


@pytest.mark.sample(2)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("equality", [None, "elementwise", "refused"])
def test_classes_without_an_equality_of_structures(equality, static):
    Q = _registered(equality, static)

    def f(x):
        def body(x, i):
            branches = [lambda x: sow(Q(x + 1), "h").a, lambda x: sow(Q(2 * x), "h").a]
            return lax.switch(i % 2, branches, x), x

        x, _ = lax.scan(body, x, jnp.arange(3))
        return lax.while_loop(lambda x: x < 99, lambda x: sow(Q(3 * x), "w").a, x)

    values = [2.0, 4.0, 5.0]
    fold = lambda acc, q: Q(acc.a + q.a)
    for init in (Q(jnp.float32(0)), lambda: Q(jnp.float32(0))):
        for wrap in (lambda f: f, jax.jit, _mapped):
            saved = S(wrap(f), names="h", reduce=Fold(init, fold))
            got = saved(jnp.float32(1))[1]["h"]["primal"]
            assert type(got) is Q
            assert_close(np.ravel(got.a)[0], np.float32(sum(values)))
    reduced = [
        (Last(), values[-1]),
        (Buffer(2), values[-2:]),
        (None, values),
    ]
    for reduce, want in reduced:
        _, got = S(f, reduce=reduce)(jnp.float32(1))
        assert_close(got["h"]["primal"].a, jnp.float32(want))
        assert_close(jnp.ravel(got["w"]["primal"].a)[-1], jnp.float32(135))
    assert_close(plant(f, {"h": lambda q: Q(q.a)})(jnp.float32(1)), jnp.float32(135))
    (both,) = S(lambda x: sow(Q(x), "h").a, reduce=Append())(X)[1]["h"]["primal"]
    assert_close(both.a, X)
    with pytest.raises(SowError, match="must keep the structure"):
        S(f, names="h", reduce=Fold(Q(jnp.float32(0)), lambda acc, q: q.a))(1.0)


def _mapped(f):
    return jax.vmap(f, in_axes=None, axis_size=2)


def only_some_run(x, limits=(1.0, 3.0, 4.0)):
    def body(c, limit):
        return lax.cond(c > limit, lambda c: sow(c, "h") * 2, lambda c: c + 1, c), None

    return lax.scan(body, x, jnp.array(limits))[0]


def test_a_fold_has_no_derivative_where_a_lane_does_not_run():
    """The logarithm, or its derivative, is not finite at the zeros that stand there."""
    reduce = Fold(1.0, lambda acc, x: acc * jnp.log(x))

    def by_hand(x, limits=(1.0, 3.0, 4.0)):
        acc = jnp.array(1.0)
        for limit in limits:
            ran = x > limit
            acc = acc * jnp.log(x) if ran else acc
            x = 2 * x if ran else x + 1
        return acc

    value = lambda fn: lambda x: S(fn, reduce=reduce)(x)[1]["h"]["primal"].sum()
    xs = jnp.array([1.5, 2.5, 0.0])
    want = np.stack([jax.grad(by_hand)(x) for x in xs])
    close(jax.grad(value(jax.vmap(only_some_run)))(xs), want)
    close(jax.grad(lambda xs: jax.vmap(value(only_some_run))(xs).sum())(xs), want)
    tangents = jax.jacfwd(value(jax.vmap(only_some_run)))(xs)
    close(tangents, want)


@pytest.mark.parametrize("at", ["h/1", "h/-1", ("h/1", "h/2")])
@pytest.mark.parametrize("reduce", [None, "fold"])
def test_one_iteration_has_the_derivatives_of_that_one(at, reduce):
    """The derivative of a square root is not finite in the first iteration."""
    f = lambda x: lax.scan(lambda c, _: (sow(c, "h") + 1, None), x, length=3)[0]
    ats = (at,) if isinstance(at, str) else at
    options: dict = {"names": at}
    if reduce == "fold":
        options["reduce"] = Fold(1.0, lambda acc, x: acc * jnp.sqrt(x))
    else:
        options["transform"] = jnp.sqrt

    def total(x):
        _, captured = S(f, **options)(x)
        return sum(captured[name]["primal"] for name in ats)

    want = lambda x: sum(jnp.sqrt(x + {"h/-1": 2, "h/1": 1, "h/2": 2}[n]) for n in ats)
    for derive in (jax.grad, jax.jacfwd):
        close(derive(total)(0.0), derive(want)(0.0))


@under("last", "total", "buffer", "first", of=REDUCERS, argument="row")
def test_a_transform_gives_values_of_several_shapes_one(row):
    """As of a prompt, and then of one token after another."""

    def generate(xs):
        h = sow(jnp.sin(xs), "h")[-1]
        return lax.scan(lambda h, _: (sow(jnp.sin(h), "h"), None), h, None, length=3)[0]

    xs = jnp.arange(8.0).reshape(4, 2)
    with pytest.raises(SowError, match="pass a `transform` to one shape"):
        S(generate, reduce=row.reducer)(xs)
    _, got = S(generate, reduce=row.reducer, transform=jnp.mean)(xs)
    hand = [jnp.sin(xs)]
    for _ in range(3):
        hand.append(jnp.sin(hand[-1] if hand[-1].ndim == 1 else hand[-1][-1]))
    means = [h.mean() for h in hand]
    close(got["h"]["primal"], row.by_hand(means, 0 * means[0]))


# --- `init` ---
LAYERS = [
    eqx.nn.Linear(2, 3, key=jax.random.key(0)),
    eqx.nn.Linear(3, 4, key=jax.random.key(1)),
]
LARGEST = Fold(jnp.zeros_like, jnp.maximum)


def _layers(layers, xs):
    first, second = layers
    step = lambda total, x: (total + second(jnp.sin(first(x))).sum(), None)
    return lax.scan(step, jnp.float32(0), xs)[0]


@pytest.mark.parametrize("grad", [False, True])
def test_zeros_like_the_value_of_each_layer(grad):
    """The largest output of each channel, for layers of all shapes."""
    xs = jnp.stack([X, -X, 2 * X])
    f = eqx.filter_grad(_layers) if grad else _layers
    _, got = S(f, capture=eqx.nn.Linear, transform=jnp.abs, reduce=LARGEST)(LAYERS, xs)
    _, every = S(f, capture=eqx.nn.Linear)(LAYERS, xs)
    assert len(got) == 2
    expected = jax.tree.map(lambda x: jnp.abs(x).max(0), dict(every))
    assert_close(dict(got), expected)


@pytest.mark.parametrize("run", [True, False])
def test_zeros_like_the_value_of_what_may_not_run(run):
    f = lambda x: lax.cond(run, lambda x: sow(x, "a"), jnp.cos, x)
    _, got = S(jax.jit(f), reduce=Fold(lambda v: v - 1, jnp.maximum))(X)
    assert_close(got["a"]["primal"], X if run else -jnp.ones(2))


def test_zeros_like_the_value_of_a_lane():
    shapes = []

    def init(v):
        shapes.append(v.shape)
        return jnp.full_like(v, -jnp.inf)

    _, got = S(jax.vmap(line), reduce=Fold(init, jnp.maximum))(jnp.stack([X, -X]))
    assert set(shapes) == {(2,)}
    _, every = S(jax.vmap(line), reduce=Append())(jnp.stack([X, -X]))
    assert_close(got["a"]["primal"], jnp.stack(every["a"]["primal"]).max(0))


def test_zeros_like_a_tree_after_the_transform():
    f = lambda x: sow({"x": x, "name": "a"}, "a")
    init = lambda v: jax.tree.map(jnp.zeros_like, v)
    transform = lambda v: (v["x"].sum(), v["x"])
    add = lambda acc, v: jax.tree.map(jnp.add, acc, v)
    _, got = S(f, transform=transform, reduce=Fold(init, add))(X)
    assert_close(got["a"]["primal"], (X.sum(), X))


class _Start:
    """Its signature is that of a builtin: there is none."""

    __signature__ = "none"

    def __call__(self, *args):
        assert not args
        return jnp.zeros(2)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "init",
    [
        lambda: jnp.zeros(2),
        lambda v=None: jnp.zeros(2),
        lambda *vs: jnp.zeros(len(vs) + 2),
        ft.partial(jnp.zeros, 2),
        jnp.zeros_like,
        ft.partial(jnp.full_like, fill_value=0),
        lambda v, scale=2: v,
        _Start(),
        jnp.zeros(2),
    ],
)
def test_inits_of_none_and_of_one(init):
    add = Fold(init, jnp.add)
    _, got = S(line, reduce=add)(X)
    assert_close(got["a"]["primal"], X + (X + 1) + (X + 3))


def test_an_init_of_two():
    with pytest.raises(TypeError, match="or of one, which gets zeros like the value"):
        Fold(lambda x, y: x, jnp.add)


# --- no lanes ---
NONE = jnp.zeros((0, 2))


@under(of=REDUCERS, argument="row")
def test_what_no_lanes_share(row):
    """It is what `vmap` returns with `out_axes=None`."""

    def f(x):
        for _ in range(2):
            sow(jnp.cos(X), "a")
        return x

    expected = row.by_hand([jnp.cos(X)] * 2, 0 * X)
    for xs in (NONE, jnp.ones((3, 2))):
        _, got = S(jax.vmap(f), reduce=row.reducer)(xs)
        assert_close(got["a"]["primal"], expected)
        _, got = S(jax.vmap(jax.vmap(f)), reduce=row.reducer)(xs[None])
        assert_close(got["a"]["primal"], expected)


@in_order
@pytest.mark.parametrize("grad", [False, True])
def test_what_no_lanes_share_beside_what_varies(row, grad):
    """The entries have the shapes that they have for some lanes, but for the lanes."""

    def f(c, xs):
        lane = lambda x: sum(map(jnp.sum, sow((jnp.cos(c), x * c), "a")))
        return jax.vmap(lane)(xs).sum()

    f = jax.grad(f, (0, 1)) if grad else f
    _, none = S(f, reduce=row.reducer)(X, NONE)
    _, some = S(f, reduce=row.reducer)(X, jnp.ones((7, 2)))
    shapes = lambda got, n: [
        tuple(0 if k == n else k for k in x.shape) for x in jax.tree.leaves(dict(got))
    ]
    assert shapes(none, 0) == shapes(some, 7)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(dict(none)))
    if grad and row is REDUCERS["last"]:
        # The total of no lanes.
        assert_close(none["a"]["cotangent"][0], jnp.zeros(2))


class _LastOfTwo(Last):
    """The last of every two iterations of the innermost scan."""

    needs_iteration = True

    def step(self, acc, x):
        keep = x.iteration[-1] % 2 == 1
        return [jnp.where(keep, v, a) for a, v in zip(acc, x.values)]


@under("eager", "jit", "vmap")
def test_a_reducer_may_read_the_iteration(wrap):
    def loss(x):
        step = lambda c, i: (sow(jnp.sin(c) * i, "h"), None)
        rows = lambda c, _: (jax.lax.scan(step, c, jnp.arange(1.0, 6.0))[0], None)
        return jax.lax.scan(rows, x, None, length=3)[0].sum()

    xs = jnp.ones((2, 3))
    _, got = wrap(S(jax.grad(loss), reduce=_LastOfTwo()))(xs)
    _, every = wrap(S(jax.grad(loss)))(xs)
    axis = 1 if wrap is jax.vmap else 0
    index = lambda *at: (slice(None),) * axis + at
    assert_close(got["h"]["primal"], every["h"]["primal"][index(2, 3)])
    # A backward pass runs from the end.
    assert_close(got["h"]["cotangent"], every["h"]["cotangent"][index(0, 1)])
