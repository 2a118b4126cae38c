"""A captured module or function that runs several times: a tuple, in order."""

import contextlib

import equinox as eqx
import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_sow import (
    Append,
    DuplicateSowError,
    Last,
    plant,
    save_intermediates as S,
    scope,
    Sow,
    sow,
    SowError,
    SowTypeError,
    tabulate,
    tap,
    UnknownSowError,
)
from jax import lax
from jaxtyping import Array, Float

from .helpers import assert_close
from .tables import under


X = jnp.array([0.5, -1.5, 2.0])


class Net(eqx.Module):
    shared: eqx.nn.Linear
    once: eqx.nn.Linear

    def __init__(self):
        self.shared, self.once = (
            eqx.nn.Linear(3, 3, key=k) for k in jr.split(jr.key(0))
        )

    def __call__(self, x):
        a = self.shared(x)
        b = self.shared(jnp.sin(self.once(a)))
        step = lambda c, _: (self.shared(jnp.sin(c)), None)
        return lax.scan(step, b, None, length=2)[0]


NET = Net()


def loss(net, x):
    return jnp.sum(net(x) ** 2)


def zeros():
    return dict(shared=(jnp.zeros(3), jnp.zeros(3), jnp.zeros((2, 3))), once=X * 0)


def by_hand(eps, net, x):
    """The loss, with a zero added to what each run returns; and the values."""
    a = net.shared(x) + eps["shared"][0]
    once = net.once(a) + eps["once"]
    b = net.shared(jnp.sin(once)) + eps["shared"][1]

    def step(c, e):
        c = net.shared(jnp.sin(c)) + e
        return c, c

    c, cs = lax.scan(step, b, eps["shared"][2])
    return jnp.sum(c**2), dict(shared=(a, b, cs), once=once)


def gradients_by_hand(net, x):
    cotangents, values = jax.grad(by_hand, has_aux=True)(zeros(), net, x)
    return {
        f"net/{name}": {"primal": values[name], "cotangent": cotangents[name]}
        for name in values
    }


GRADIENT = eqx.filter_grad(loss)


@pytest.mark.parametrize("how", ["jit inside", "jit outside", "vmap", "checkpoint"])
def test_each_run_is_an_entry_and_can_be_planted(how):
    """Laws 2, 3, 4 and 6, for values, for cotangents, and in loops."""
    fn, x, reference = GRADIENT, X, gradients_by_hand
    if how == "vmap":
        x = jnp.stack([X, 2 * X])
        fn, reference = (eqx.filter_vmap(f, in_axes=(None, 0)) for f in (fn, reference))
    if how == "checkpoint":
        fn = eqx.filter_grad(eqx.filter_checkpoint(loss))
    if how == "jit inside":
        fn = eqx.filter_jit(fn)

    def all_of_it(net, x):
        grads, got = S(fn, capture=eqx.nn.Linear)(net, x)
        # The derivatives are in order even if nobody asks for the primals.
        _, alone = S(fn, capture=eqx.nn.Linear, modes="cotangent")(net, x)
        # The backward pass of a checkpoint computes the values again.
        modes = () if how == "checkpoint" else ("primal", "cotangent")
        again = [
            plant(fn, got, capture=eqx.nn.Linear, mode=mode)(net, x) for mode in modes
        ]
        return grads, got, alone, again

    run = all_of_it if how == "jit inside" else eqx.filter_jit(all_of_it)
    grads, got, alone, again = run(NET, x)
    want = eqx.filter_jit(reference)(NET, x)
    assert_close(got, want)
    both = want["net/shared"]
    assert_close(alone["net/shared"], {"cotangent": both["cotangent"]})
    for other in again:
        assert_close(other, grads)


@pytest.mark.slow
def test_other_values_are_as_if_the_program_were_edited():
    values = S(NET, capture=eqx.nn.Linear)(X)[1]["shared"]["primal"]
    new = (None, 2 * values[1], -values[2])

    def edited(x):
        # The first run stays, and the loop goes on from what is planted there.
        NET.shared(x)
        return -values[2][-1]

    for planted in (new, list(new), (lambda v: v, lambda v: 2 * v, new[2])):
        got = plant(NET, {"shared": planted}, capture=True)(X)
        assert_close(got, edited(X))
    second = plant(NET, {"shared": (None, new[1], None)}, capture=True)
    eps = dict(zeros(), shared=(jnp.zeros(3), values[1], jnp.zeros((2, 3))))
    assert_close(jnp.sum(second(X) ** 2), by_hand(eps, NET, X)[0])
    # A gradient with respect to what is planted is the cotangent there.
    planted = lambda v: loss(plant(NET, {"shared": (v, None, None)}, capture=True), X)
    reference = gradients_by_hand(NET, X)["net/shared"]["cotangent"]
    assert_close(jax.grad(planted)(values[0]), reference[0])
    # Of iteration 1, there is one run: that of the loop.
    first = lambda v: plant(NET, {"shared/1": v}, capture=True)(X)
    _, got = S(NET, capture=True, names="shared/1")(X)
    assert_close(got["shared/1"]["primal"], values[2][1])
    assert_close(first(got["shared/1"]), NET(X))
    assert_close(first(2 * X), 2 * X)
    assert_close(first(lambda v: 2 * v), 2 * NET(X))


@under("eager", "jit", argument="jit")
def test_a_run_without_a_derivative_has_none_in_its_place(jit):
    relu = jax.jit(lambda x: x**2)
    fn = jit(lambda x: jnp.sum(relu(X) * jnp.sin(relu(x))))
    name = "<lambda>"
    grads, got = S(jax.grad(fn), capture=relu)(X)
    primal, cotangent = got[name]["primal"], got[name]["cotangent"]
    assert_close(primal, (X**2, X**2))
    assert cotangent[0] is None
    assert_close(cotangent[1], X**2 * jnp.cos(X**2))
    assert_close(plant(jax.grad(fn), got, capture=relu, mode="cotangent")(X), grads)
    with pytest.raises(SowError, match="run 0 of '<lambda>'.* has no cotangent"):
        both = {name: (X, X)}
        plant(jax.grad(fn), both, capture=relu, mode="cotangent")(X)
    _, got = S(lambda x: jax.jvp(fn, (x,), (jnp.ones(3),)), capture=relu)(X)
    assert got[name]["tangent"][0] is None
    assert_close(got[name]["tangent"][1], 2 * X)


def test_branches_and_loops_of_unknown_length(call):
    relu = jax.jit(lambda x: jnp.maximum(x, 0) + 1)

    def fn(x):
        twice = lambda x: relu(relu(x))
        x = lax.cond(x[0] > 0, twice, relu, x)
        going = lambda c: c.sum() < 60
        return relu(lax.while_loop(going, lambda c: 2 * relu(c), x))

    for x in (X, -X):
        first = relu(x)
        second = relu(first) if x[0] > 0 else jnp.zeros(3)
        c = second if x[0] > 0 else first
        n = 0
        last = jnp.zeros(3)
        while c.sum() < 60:
            last, n = relu(c), n + 1
            c = 2 * last
        out, got = call(S(fn, capture=relu), x)
        assert_close(got["<lambda>"]["primal"], (first, second, last, relu(c)))
        assert [int(n) for n in got["<lambda>"]["count"]] == [1, int(x[0] > 0), n, 1]
        given = got["<lambda>"]["primal"]
        # A loop of unknown length takes one value for all iterations.
        planted = (given[0], given[1], None, given[3])
        assert_close(plant(fn, {"<lambda>": planted}, capture=relu)(x), out)


@pytest.mark.slow
def test_options():
    both = lambda net, x: (net(x), net.shared(x))
    run = lambda **kw: S(both, capture=eqx.nn.Linear, **kw)(NET, X)[1]["net/shared"]
    values = S(both, capture=eqx.nn.Linear)(NET, X)[1]["net/shared"]["primal"]
    assert [x.shape for x in values] == [(3,), (3,), (2, 3), (3,)]
    assert_close(run(reduce=Append())["primal"], values)
    assert_close(run(reduce={"net/once": Append()})["primal"], values)
    assert_close(run(reduce=Last())["primal"], values[3])
    maxima = run(transform={"*shared": jnp.max})["primal"]
    assert_close(maxima, tuple(jnp.max(v, -1) for v in values))
    one, many = Float[Array, "n"], Float[Array, "m n"]
    run(spec={"net/shared": tuple[one, one, many, one]})
    with pytest.raises(SowTypeError, match="net/shared"):
        run(spec={"net/shared": one})
    inputs = S(both, capture=eqx.nn.Linear, inputs=True)(NET, X)[1]
    (args, _), *_, (last, _) = inputs["net/shared.inputs"]["primal"]
    assert_close((args[0], last[0]), (X, X))
    # Nested captures, and a scope, see the same.
    inner = lambda net, x: S(both, capture=eqx.nn.Linear, tag="inner")(net, x)
    (_, one), two = S(inner, capture=eqx.nn.Linear)(NET, X)
    assert_close(
        (one["net/shared"]["primal"], two["net/shared"]["primal"]), (values, values)
    )
    assert_close(run(scope=True)["primal"], values)
    events = []
    tap(both, events.append, capture=eqx.nn.Linear, names="net/shared")(NET, X)
    jax.effects_barrier()
    sent = [e.value for e in sorted(events, key=lambda e: int(e.count))]
    np.testing.assert_allclose(sent, np.stack([*values[:2], *values[2], values[3]]))
    # A name that runs once is the value alone.
    once = S(both, capture=eqx.nn.Linear)(NET, X)[1]["net/once"]["primal"]
    assert once.shape == (3,)


def test_unnamed_layers_and_planted_names():
    layer = eqx.nn.Sequential([eqx.nn.Lambda(jnp.sin), Sow()])
    fn = lambda layer, x: layer(layer(x))
    _, got = S(fn)(layer, X)
    want = jnp.sin(X), jnp.sin(jnp.sin(X))
    assert_close(got, {"layer/layers/1": {"primal": want}})
    doubled = plant(fn, {"layer": lambda v: 2 * v}, capture=eqx.nn.Sequential)
    _, got = S(doubled)(layer, X)
    want = 2 * jnp.sin(X), 2 * jnp.sin(2 * jnp.sin(X))
    assert_close(got["layer"]["primal"], want)


class _Steps(eqx.Module):
    cell: eqx.nn.Linear
    scoped: bool = False

    def __call__(self, x):
        for i in range(3):
            with scope(f"step{i}") if self.scoped else contextlib.nullcontext():
                x = jnp.tanh(self.cell(x))
        return x


def _asked(fn, name, *args):
    """Each way to ask for a name."""
    return (
        lambda: S(fn, capture=True)(*args)[1][name],
        lambda: S(fn, capture=True, names=name)(*args),
        lambda: plant(fn, {name: jnp.sin}, capture=True)(*args),
    )


@pytest.mark.parametrize("name", ["cell[1]", "m/cell[1]"])
def test_a_row_of_a_table_is_not_a_name(name):
    fn, args = lambda m, x: m(x), (_Steps(NET.once), X)
    got = S(fn, capture=True)(*args)[1]
    assert "m/cell[1]" in tabulate(got)
    lookup, *options = _asked(fn, name, *args)
    remedy = "of the value of 'm/cell': write `intermediates['m/cell']['primal'][1]`."
    with pytest.raises(UnknownSowError) as e:
        lookup()
    assert str(e.value).endswith(f"{name!r} is the entry `[1]` {remedy}")
    for ask in options:
        with pytest.raises(UnknownSowError) as e:
            ask()
        assert f"{remedy} Options select values as a whole." in str(e.value)
    # The remedies.
    second = got["m/cell"]["primal"][1]
    planted = plant(fn, {"m/cell": (None, second, None)}, capture=True)
    assert_close(planted(*args), fn(*args))


def test_an_iteration_of_a_python_loop():
    net = _Steps(NET.once)
    for ask in _asked(net, "cell/2", X):
        with pytest.raises(UnknownSowError) as e:
            ask()
        assert "'cell', which is not in a loop of known length." in str(e.value)
        assert "write `intermediates['cell']['primal'][2]`." in str(e.value)
        assert 'write `with eqx_sow.scope(f"step{i}"):`' in str(e.value)
    # The remedies.
    _, got = S(net, capture=True)(X)
    _, apart = S(_Steps(NET.once, scoped=True), capture=True)(X)
    assert_close(apart["step2/cell"]["primal"], got["cell"]["primal"][2])


def test_an_entry_of_a_value_that_is_a_tree():
    fn = lambda x: sow({"a": (x, 2 * x)}, "h")["a"][0]
    _, got = S(fn)(X)
    with pytest.raises(UnknownSowError, match="primal") as e:
        got["h['a'][1]"]
    assert str(e.value).endswith("write `intermediates['h']['primal']['a'][1]`.")
    assert_close(got["h"]["primal"]["a"][1], 2 * X)


def test_what_cannot_be_planted():
    pair = jax.jit(lambda x: (x, 2 * x))
    fn = lambda x: pair(pair(x)[0])
    name = {"capture": pair}
    _, got = S(fn, **name)(X)
    assert_close(plant(fn, got, **name)(X), fn(X))
    for wrong in (X, (X, X), (got["<lambda>"]["primal"][0],) * 3, {"primal": X}):
        with pytest.raises(
            DuplicateSowError, match="'<lambda>' runs 2 times: at .*py:"
        ):
            plant(fn, {"<lambda>": wrong}, **name)(X)
    # What a `sow` marks stays an error, but what `Append` returned can be planted.
    twice = lambda x: sow(sow(x, "h") + 1, "h")
    with pytest.raises(DuplicateSowError, match="twice in the line"):
        S(twice)(X)
    _, got = S(twice, reduce=Append())(X)
    assert_close(plant(twice, got)(2 * X), twice(X))
    with pytest.raises(DuplicateSowError, match="a module has this path, and a `sow`"):
        net = lambda net, x: sow(net.once(x), "net/once")
        S(net, capture=eqx.nn.Linear)(NET, X)


def test_values_that_a_backward_pass_computes_once_more_cannot_be_planted():
    """It does so three times in one line: nothing tells which of the two these are."""
    once = lambda x: sow(jnp.sin(x), "h")
    bwd = lambda x, ct: (sum(jax.vjp(once, x)[1](ct)[0] for _ in range(3)),)
    fn = jax.custom_vjp(lambda x: once(x) + once(x))
    fn.defvjp(lambda x: (once(x) + once(x), x), bwd)
    out = lambda y: sow(sow(sow(y, "out"), "out"), "out")
    grad = jax.grad(lambda x: out(fn(x)).sum())
    _, got = S(grad, reduce=Append(), modes="primal")(X)
    assert_close(got["h"]["primal"], (jnp.sin(X), jnp.sin(X)))
    with pytest.raises(SowError, match="'h' runs 2 times, .* cannot tell which"):
        plant(grad, {"h": (X, X)})(X)


@pytest.mark.parametrize(
    ("mode", "names"),
    [("primal", None), ("primal", "h/1"), ("primal", "**"), ("cotangent", None)],
)
def test_append_of_what_runs_once_can_be_planted(mode, names):
    """A tuple of one is that run, also where the value is a tuple of one itself."""

    def fn(x):
        def step(c, _):
            return jnp.sin(sow({"c": c, "text": "static"}, "h")["c"]), None

        x = lax.scan(step, x, length=2)[0]
        (x,) = lax.cond(x.sum() > 0, lambda x: sow((x,), "k"), lambda x: (-x,), x)
        return jnp.sum(sow(x**2, "last"))

    _, got = S(jax.grad(fn), reduce=Append(), names=names)(X)
    assert all(type(entry[mode]) is tuple for entry in got.values())
    other = jax.grad(fn) if mode == "cotangent" else fn
    assert_close(plant(other, got, mode=mode)(X), other(X))
    primals = {name: entry["primal"] for name, entry in got.items()}
    if mode == "primal":
        assert_close(plant(fn, primals)(X), fn(X))
        assert_close(plant(fn, {"last": (X,)})(X), jnp.sum(X))
    wrong = "has the structure PyTreeDef\\(\\(\\*, \\*\\)\\)"
    with pytest.raises(SowError, match=wrong):
        plant(fn, {"last": (X, X)})(X)


class Encoder(eqx.Module):
    encoder: eqx.nn.MLP

    def __call__(self, a, b):
        return jnp.sum(self.encoder(a) * self.encoder(b))


class Recurrent(eqx.Module):
    cell: eqx.nn.LSTMCell

    def __call__(self, xs):
        state = jnp.zeros(3), jnp.zeros(3)
        for x in xs:
            state = self.cell(x, state)
        return state


class Generator(eqx.Module):
    embed: eqx.nn.Embedding
    block: eqx.nn.MLP

    def __call__(self, prompt):
        def step(c, token):
            c = c + self.block(self.embed(token))
            return c, jnp.argmax(c)

        carry = step(jnp.zeros(3), prompt[0])
        carry = step(carry[0], prompt[1])
        return lax.scan(lambda c, _: (step(*c), c[1]), carry, None, length=3)


class Equilibrium(eqx.Module):
    layer: eqx.nn.Linear

    def __call__(self, x):
        f = lambda z: jnp.tanh(self.layer(z) / 2 + x)
        z = lax.fori_loop(0, 4, lambda _, z: f(z), jnp.zeros(3))
        return f(lax.stop_gradient(z))


def _mlp():
    return eqx.nn.MLP(3, 3, 4, 1, key=jr.key(0))


MODELS = {
    "encoder of two inputs": lambda: (Encoder(_mlp()), (X, -X), ["encoder"]),
    "cell in a Python loop": lambda: (
        Recurrent(eqx.nn.LSTMCell(3, 3, key=jr.key(0))),
        (jnp.stack([X, -X, X]),),
        ["cell"],
    ),
    "a prompt, then steps": lambda: (
        Generator(eqx.nn.Embedding(3, 3, key=jr.key(1)), _mlp()),
        (jnp.array([1, 2]),),
        ["embed", "block", "block/layers/0"],
    ),
    "deep equilibrium": lambda: (
        Equilibrium(eqx.nn.Linear(3, 3, key=jr.key(0))),
        (X,),
        ["layer"],
    ),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_the_first_call_and_each_name_planted(make):
    model, args, several = make()
    out, got = S(model, capture=True)(*args)
    tuples = {name for name, axes in got._known.axes.items() if isinstance(axes, list)}
    assert {name for name, _ in tuples} >= set(several)
    assert_close(out, model(*args))
    for name in got:
        again = plant(model, {name: got[name]}, capture=True)
        assert_close(again(*args), out)


def _jaxprs(jaxpr):
    for eqn in jaxpr.eqns:
        for x in eqn.params.values():
            if isinstance(x, jexc.Jaxpr | jexc.ClosedJaxpr):
                inside = getattr(x, "jaxpr", x)
                yield inside
                yield from _jaxprs(inside)


@under("eager", "grad")
def test_many_calls_of_one_function_are_traced_once(wrap):
    block = jax.jit(lambda x: jnp.sin(sow(jnp.cos(x), "h")))

    def n_programs(n):
        def fn(x):
            for _ in range(n):
                x = block(x)
            return x.sum()

        saved = S(wrap(fn), reduce=Append())
        jaxpr = jax.make_jaxpr(saved)(X).jaxpr
        return len({id(x) for x in _jaxprs(jaxpr)})

    assert n_programs(9) == n_programs(3)


@pytest.mark.slow
def test_cotangents_of_many_calls_are_in_order():
    """In nested calls, in a scan, and where the functions from `jax.vjp` are called in
    another order than the primals."""
    scaled = jax.jit(lambda w, x: sow(w * x, "h"))
    twice = jax.jit(lambda w, x: scaled(w, scaled(w, x)))

    def fn(x):
        y, first = jax.vjp(lambda x: twice(2.0, x), x)
        z, second = jax.vjp(lambda y: scaled(5.0, y), y)
        step = lambda c, w: (scaled(w, c), None)
        last, third = jax.vjp(lambda z: lax.scan(step, z, jnp.array([3.0, 7.0]))[0], z)
        return last, first(1.0), third(10.0), second(100.0)

    for run in (fn, jax.jit(fn)):
        _, got = S(run, reduce=Append())(jnp.float32(1))
        cotangents = got["h"]["cotangent"]
        assert [float(ct) for ct in cotangents[:3]] == [2.0, 1.0, 100.0]
        np.testing.assert_allclose(cotangents[3], [70.0, 10.0])


def _tangents_of(f, g, x, ts):
    """Some tangents of `f`, and of `g` behind it, in the order of `ts`."""
    y, of_f = jax.linearize(f, x)
    _, of_g = jax.linearize(g, y)
    return [{"f": of_f, "g": of_g}[which](t) for which, t in ts]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("called", ["gf", "fg", "gg", "g", "ggf"])
def test_tangents_in_another_order_than_the_values(called, jit):
    layer, module = NET.shared, lambda x: jnp.tanh(NET.shared(x))
    t = {"g": jnp.array([1.0, 0.0, 2.0]), "f": jnp.array([0.0, 1.0, -1.0])}
    ts = [(which, (k + 1) * t[which]) for k, which in enumerate(called)]

    def program(net, x):
        f = lambda x: jnp.tanh(net.shared(x))
        return _tangents_of(f, f, x, ts)

    fn = eqx.filter_jit(program) if jit else program
    _, got = S(fn, capture=eqx.nn.Linear)(NET, X)
    # The layer is linear: a tangent is multiplied by its weight.
    first = {which: layer.weight @ t for which, t in reversed(ts)}
    want = [first.get("f"), first.get("g")]
    seen: set[str] = set()
    for which, t in ts:
        want += [layer.weight @ t] if which in seen else []
        seen.add(which)
    entry = got["net/shared"]
    assert_close(entry["primal"], (layer(X), layer(module(X))))
    assert_close(entry["tangent"], tuple(want))


def _swapped_runs(net, x):
    return jnp.sum(jnp.tanh(net.shared(jnp.sin(net.shared(x)))) ** 2)


@under("eager", "filter_jit")
def test_cotangents_of_values_that_an_inner_capture_takes(wrap):
    def inner(net, x):
        value, taken = S(_swapped_runs, modes="primal", capture=eqx.nn.Linear)(net, x)
        return value, taken["net/shared"]["primal"]

    fn = wrap(eqx.filter_grad(inner, has_aux=True))
    (grads, primals), got = S(fn, capture=eqx.nn.Linear)(NET, X)
    want = S(eqx.filter_grad(_swapped_runs), capture=eqx.nn.Linear)(NET, X)[1]
    assert_close(primals, want["net/shared"]["primal"])
    assert_close(got["net/shared"]["cotangent"], want["net/shared"]["cotangent"])
    # One of the two planted: by hand, the layer whose gradient is not wanted is frozen.
    planted = {"net/shared": (lambda ct: 0 * ct, None)}
    grads, _ = plant(fn, planted, mode="cotangent", capture=eqx.nn.Linear)(NET, X)

    def frozen(net, x):
        inside = jax.lax.stop_gradient(net.shared)(x)
        return jnp.sum(
            jnp.tanh(net.shared(jax.lax.stop_gradient(jnp.sin(inside)))) ** 2
        )

    assert_close(grads.shared.weight, eqx.filter_grad(frozen)(NET, X).shared.weight)


def test_cotangents_of_values_that_an_inner_append_takes():
    def runs(w):
        return sow(jnp.sin(sow(w * 2, "h")) * w, "h").sum()

    reduce = {"h": Append()}
    inner = lambda w: S(runs, modes="primal", reduce=reduce)(w)[0]
    got = S(jax.grad(inner), reduce=reduce)(X)[1]["h"]["cotangent"]
    want = S(jax.grad(runs), reduce=reduce)(X)[1]["h"]["cotangent"]
    assert_close(got, want)
    assert not np.allclose(want[0], want[1])


@pytest.mark.parametrize("transform", [jax.vjp, jax.linearize])
def test_a_branch_chooses_what_a_derivative_is_computed_from(transform):
    """So that it is of one run or of another one."""
    marked = lambda x: sow(jnp.sin(x), "h")

    def fn(first, x):
        (_, one), (_, other) = transform(marked, x), transform(marked, 2 * x)
        leaves, treedef = jax.tree.flatten(one)
        others = jax.tree.leaves(other)
        chosen = lax.cond(first, lambda: leaves, lambda: others)
        return jax.tree.unflatten(treedef, chosen)(jnp.ones(()))

    for first in (True, False):
        with pytest.raises(SowError, match="cannot tell which"):
            S(fn, reduce=Append())(first, jnp.ones(()))


@under("eager", "filter_jit", "vmap")
@pytest.mark.parametrize("policy", ["dots_saveable", "everything_saveable"])
def test_runs_in_a_branch_that_a_checkpoint_keeps_residuals_of(policy, wrap):
    """In a place that the residuals of the other branch are in, too."""
    policy = getattr(jax.checkpoint_policies, policy)

    def fn(x, first, zeros):
        one = lambda x, zero: jnp.sin(sow(x + zero, "h"))
        both = lambda x: one(one(x, zeros[0]), zeros[1])
        branches = lambda x: lax.cond(first, both, lambda x: sow(2 * x, "g"), x)
        return jax.checkpoint(branches, policy=policy)(x).sum()

    first, zeros = jnp.array([True, False]), (jnp.zeros((2, 3)),) * 2
    xs = jnp.stack([X, X + 1])
    want = jax.vmap(jax.grad(fn, 2))(xs, first, zeros)
    for i in range(2):
        grad = wrap(lambda x, i=i: jax.grad(fn)(x, first[i], (0.0, 0.0)))
        got = S(grad, reduce=Append())(xs[i])[1]["h"]
        assert all(np.all(n == 1 - i) for n in got["count"])
        assert_close(got["cotangent"], tuple(x[i] for x in want))


class Numbered(eqx.Module):
    fc: eqx.nn.Linear
    fc1: eqx.nn.Linear
    fc12: eqx.nn.Linear

    def __call__(self, x):
        return self.fc12(self.fc1(self.fc(self.fc(x))))


def test_a_row_of_a_table_that_fits_another_name_as_a_glob():
    model = Numbered(*[eqx.nn.Linear(3, 3, key=key) for key in jr.split(jr.key(0), 3)])
    within = lambda model, x: model(x)
    said = r"'fc\[1\]' is the entry `\[1\]` of the value of '(model/)?fc': write"
    for fn, args in ((model, (X,)), (within, (model, X))):
        with pytest.raises(UnknownSowError, match=said):
            S(fn, capture=True, names="fc[1]")(*args)
        with pytest.raises(UnknownSowError, match=said):
            plant(fn, {"fc[1]": jnp.zeros_like}, capture=True)(*args)
    # `fc` has no such entries.
    assert list(S(model, capture=True, names="fc[12]")(X)[1]) == ["fc1"]
    # And what runs once has none at all.
    fn = lambda x: sow(sow(x, "h1") + 1, "h")
    assert list(S(fn, names="h[1]")(X)[1]) == ["h1"]
