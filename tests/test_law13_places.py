"""Where a model may be, and what its modules are called there."""

import functools as ft
import itertools
import types

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
import optimistix as optx
import pytest
from eqx_sow import (
    Append,
    Last,
    plant,
    save_intermediates as S,
    sow,
    UnsupportedPrimitiveError,
)
from jax.flatten_util import ravel_pytree

from tests.helpers import assert_close, with_mode
from tests.meeting import at, Layer, make_net, Run, X
from tests.tables import under


pytestmark = pytest.mark.sample(5)


GLOBAL = make_net(5)
STRUCTURE = jtu.tree_structure(GLOBAL)


def _values(net, prefix, x=X):
    """What the modules of a net return, by name."""
    seen = {}
    Run(lambda v, name, of: seen.setdefault(name, v))(net, x, prefix)
    return seen


class Shelf:
    net = GLOBAL


class Holder:
    def __init__(self, net):
        self.held = net

    def predict(self, x):
        return self.held(x)


class Slots:
    __slots__ = ("held",)

    def __init__(self, net):
        self.held = net


def _rule(net, kind):
    f = kind(lambda x: net(x))
    if kind is jax.custom_jvp:
        f.defjvp(lambda p, t: (net(p[0]), 2 * t[0]))
    else:
        f.defvjp(lambda x: (net(x), x), lambda x, ct: (2 * ct,))
    return f


def _closure_of_two(net):
    inner = lambda x: net(x)
    return lambda x: inner(x)


def _attribute(net, holder):
    return lambda x: holder.held(x)


def _made(how):
    def fn(x):
        arrays = [jnp.asarray(a.tolist()) for a in jtu.tree_leaves(GLOBAL)]
        return how(jtu.tree_unflatten(STRUCTURE, arrays))(x)

    return fn


def _from_an_iterator(net):
    nets = itertools.repeat(net)
    return lambda x: next(nets)(x)


PLACES = {
    "itself": (lambda net: net, ""),
    "its method": (lambda net: net.__call__, ""),
    "compiled itself": (lambda net: eqx.filter_jit(net), ""),
    "its compiled method": (lambda net: jax.jit(net.__call__), ""),
    "closure": (lambda net: lambda x: net(x), "net"),
    "closure of two": (_closure_of_two, "net"),
    "global": (lambda net: lambda x: GLOBAL(x), "GLOBAL"),
    "list": (lambda net: (lambda nets: lambda x: nets[0](x))([net]), "nets/0"),
    "dict": (lambda net: (lambda d: lambda x: d["a"](x))({"a": net}), "d/a"),
    "default": (lambda net: lambda x, net=net: net(x), "net"),
    "partial": (lambda net: ft.partial(lambda m, x: m(x), net), "m"),
    "compiled": (lambda net: jax.jit(lambda x: net(x)), "net"),
    "checkpoint": (lambda net: jax.checkpoint(lambda x: net(x)), "net"),
    "custom_jvp": (lambda net: _rule(net, jax.custom_jvp), "net"),
    "custom_vjp": (lambda net: _rule(net, jax.custom_vjp), "net"),
    "compiled in a closure": (
        lambda net: (lambda call: lambda x: call(x))(jax.jit(net.__call__)),
        "call",
    ),
    "object": (lambda net: _attribute(net, Holder(net)), "holder/held"),
    "slots": (lambda net: _attribute(net, Slots(net)), "holder/held"),
    "namespace": (
        lambda net: _attribute(net, types.SimpleNamespace(held=net)),
        "holder/held",
    ),
    "method of an object": (lambda net: Holder(net).predict, "held"),
    "class attribute": (lambda net: lambda x: Shelf.net(x), "Shelf/net"),
    "made inside": (lambda net: _made(lambda m: m), "Net"),
    "compiled, made inside": (lambda net: _made(lambda m: jax.jit(m.__call__)), "Net"),
    "iterator": (_from_an_iterator, "Net"),
}
# Where the function itself holds the model, another function has that in its variable.
HELD = [
    "itself",
    "its method",
    "compiled itself",
    "its compiled method",
    "method of an object",
]
FORMS = {
    "S": lambda save, fn: save(fn),
    "jit(S)": lambda save, fn: eqx.filter_jit(save(fn)),
    "S(jit)": lambda save, fn: save(eqx.filter_jit(fn)),
    "S(vmap)": lambda save, fn: (
        lambda x: jtu.tree_map(lambda a: a[0], save(jax.vmap(fn))(x[None]))
    ),
    "S(grad)": lambda save, fn: save(jax.value_and_grad(lambda x: fn(x).sum())),
}


@pytest.mark.filterwarnings("ignore:\\s*Possibly assigning")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", PLACES)
def test_where_the_model_is(place, form):
    build, prefix = PLACES[place]
    fn = build(GLOBAL)
    out, got = FORMS[form](lambda fn: S(fn, capture=True), fn)(X)
    if place in HELD and form == "S(grad)":
        prefix = at("fn", prefix)
    want = _values(GLOBAL, prefix)
    value = out[0] if form == "S(grad)" else out
    assert_close(value, GLOBAL(X).sum() if form == "S(grad)" else GLOBAL(X))
    assert list(got) == list(want)
    assert_close(with_mode(got, "primal"), want)


@pytest.mark.parametrize("form", FORMS)
def test_numpy_weights_in_variables(form):
    net, other = jtu.tree_map(np.array, (GLOBAL, GLOBAL))
    layers = {"head": net}
    fn = lambda x: other(layers["head"](x)) * 1.0
    out, got = FORMS[form](lambda fn: S(fn, capture=True), fn)(X)
    want = _values(GLOBAL, "layers/head") | _values(GLOBAL, "other", GLOBAL(X))
    assert list(got) == list(want)
    assert_close(with_mode(got, "primal"), want)


def test_several_made_inside():
    def fn(x):
        for _ in range(3):
            x = _made(lambda m: m)(x)
        return x

    out, got = S(fn, capture=True)(X)
    want, x = {}, X
    for prefix in ("Net", "Net#1", "Net#2"):
        want |= _values(GLOBAL, prefix, x)
        x = want[prefix]
    assert list(got) == list(want)
    assert_close((out, with_mode(got, "primal")), (x, want))


class Cell(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, z, x):
        return jnp.tanh(self.linear(z) + x)


def _root(of, solver):
    def solve(c, x):
        return of(c, solver(1e-3, 1e-3), x, x, max_steps=8, throw=False).value

    return solve


def _stiff(c, x):
    return diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, args: c(y, -y)),
        diffrax.Kvaerno3(),
        *(0.0, 1.0, 0.5, x),
        stepsize_controller=diffrax.PIDController(1e-2, 1e-2),
    ).ys


_SOLVED = {
    "fixed point": _root(optx.fixed_point, optx.FixedPointIteration),
    "newton": _root(optx.root_find, optx.Newton),
    "damped": _root(optx.least_squares, optx.LevenbergMarquardt),
    "stiff": _stiff,
    "operator": lambda c, x: (
        lx.linear_solve(lx.JacobianLinearOperator(c, x, x), x).value
    ),
}


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("standard_promotion")
@under("eager", "filter_grad", "filter_jit", argument="way")
@pytest.mark.parametrize(
    "solve",
    [pytest.param(x, marks=pytest.mark.slow if x == "stiff" else ()) for x in _SOLVED],
)
def test_what_libraries_make_on_the_way(solve, way):
    """Their wrappers of functions and operators are no parts of the model."""
    cell = Cell(eqx.nn.Linear(2, 2, key=jax.random.key(0)))
    fn = way(lambda c, x: _SOLVED[solve](c, x).sum())
    args = cell, jnp.array([0.3, -0.2])
    _, got = S(fn, capture=True, reduce=Append())(*args)
    assert got.keys() == {"c/linear", "c"}


@pytest.mark.slow
def test_derivatives_of_one_module_that_a_branch_chooses():
    """Of the residuals of the last step that was accepted, or of those before."""
    mlp = eqx.nn.MLP(1, 1, 4, 1, key=jax.random.key(0))
    p, static = eqx.partition(mlp, eqx.is_array)
    x = jnp.linspace(-1, 1, 6)[:, None]

    def fit(p, mark):
        def residual(p, _):
            model = eqx.combine(p, static)
            return jax.vmap(lambda x: mark(model(x), "p")[0] - jnp.sin(x[0]))(x)

        solver = optx.LevenbergMarquardt(1e-2, 1e-2)
        return optx.least_squares(residual, solver, p, max_steps=4, throw=False).value

    reduce = Last()
    _, want = S(lambda p: fit(p, sow), reduce=reduce)(p)
    _, got = S(lambda p: fit(p, lambda x, _: x), capture=eqx.nn.MLP, reduce=reduce)(p)
    assert got["p"].keys() == {"primal", "tangent", "count"}
    assert_close(got, want)


def test_derivatives_of_one_jitted_function_in_two_branches():
    """In each branch of the backward pass, the edge is that of the same branch."""
    models = [
        eqx.nn.Linear(3, 3, key=key) for key in jax.random.split(jax.random.key(0))
    ]
    call = eqx.filter_jit(lambda model, x: model(x))

    def grad(mark):
        def loss(models, x, first):
            branches = [
                lambda x, i=i: mark(call(models[i], x), f"models/{i}") for i in (1, 0)
            ]
            return jnp.sum(jax.lax.cond(first, *branches[::-1], x) ** 2)

        return eqx.filter_grad(loss)

    for first in (True, False):
        args = models, X, jnp.array(first)
        _, want = S(grad(sow))(*args)
        _, got = S(grad(lambda x, name: x), capture=True)(*args)
        assert_close(got, want)


def test_a_module_that_is_called_in_a_solver_only():
    linear = eqx.nn.Linear(2, 2, use_bias=False, key=jax.random.key(0))

    def fn(m, x):
        operator = lx.FunctionLinearOperator(m, jax.eval_shape(lambda: x))
        return lx.linear_solve(operator, x, lx.GMRES(1e-3, 1e-3), throw=False).value

    with pytest.raises(UnsupportedPrimitiveError, match=r"Linear\.__call__, but all"):
        S(fn, capture=True)(linear, X[:2])


@under("eager", "vmap", "checkpoint", argument="transform")
def test_a_module_that_a_custom_root_calls(transform):
    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))

    def root(x):
        return jax.lax.custom_root(
            lambda y: y - 0.3 * linear(y) - x,
            jnp.zeros_like(x),
            lambda f, y: jax.lax.fori_loop(0, 3, lambda _, y: y - f(y), y),
            lambda g, y: jnp.linalg.solve(jax.jacobian(g)(y), y),
        )

    def by_hand(x):
        y, heard = jnp.zeros_like(x), []
        for _ in range(3):
            heard.append(linear(y))
            y = 0.3 * heard[-1] + x
        return y, jnp.stack(heard)

    x = jnp.array([[0.3, -0.7], [1.1, 0.2]])
    x, by_hand = (x, jax.vmap(by_hand)) if transform is jax.vmap else (x[0], by_hand)
    out, got = S(transform(root), capture=True)(x)
    assert_close((out, got["linear"]["primal"]), by_hand(x))


def _hypernetwork(in_size):
    """A model that makes the weights of another one, and a template for that."""
    k1, k2 = jax.random.split(jax.random.key(0))
    template = eqx.nn.MLP(in_size, 1, 4, 1, key=k1)
    flat, unravel = ravel_pytree(eqx.filter(template, eqx.is_array))
    make = lambda flat: eqx.combine(unravel(flat), template)
    return eqx.nn.MLP(2, flat.size, 4, 1, key=k2), make


@pytest.mark.parametrize("form", ["S", "S(grad)", "S(jit)"])
@pytest.mark.parametrize("closed_over", [False, True])
def test_weights_that_another_model_makes(form, closed_over):
    """They are its output, and it is at its place. So the other one is called by its
    class, although the last bias of the first one is only added to what becomes the
    last bias of the other."""
    hyper, make = _hypernetwork(3)
    z = jnp.array([0.3, -0.2])

    def fn(h, x):
        return make(h(z))(x).sum()

    run = {"S": fn, "S(grad)": eqx.filter_grad(fn), "S(jit)": eqx.filter_jit(fn)}[form]
    if closed_over:
        h, inner = hyper, run
        run = lambda x: inner(h, x)
    args = (X[:3],) if closed_over else (hyper, X[:3])
    _, got = S(run, capture=True)(*args)
    want = {f"h{k[1:]}": v for k, v in _of_mlp(hyper, z).items()}
    want |= {f"MLP{k[1:]}": v for k, v in _of_mlp(make(hyper(z)), X[:3]).items()}
    assert list(got) == list(want)
    assert_close(with_mode(got, "primal"), want)


def _of_mlp(mlp, x):
    h = mlp.layers[0](x)
    out = mlp.layers[1](jax.nn.relu(h))
    return {"./layers/0": h, "./layers/1": out, ".": out}


def test_a_weighted_average_has_the_name_of_the_models():
    models = [make_net(i) for i in range(3)]
    stacked = jtu.tree_map(lambda *xs: jnp.stack(xs), *models)
    w = jnp.array([0.2, 0.5, 0.3])
    soup = lambda nets, x: jtu.tree_map(lambda a: jnp.tensordot(w, a, 1), nets)(x)
    _, got = S(soup, capture=True)(stacked, X)
    average = jtu.tree_map(lambda *xs: sum(a * b for a, b in zip(w, xs)), *models)
    want = _values(average, "nets")
    assert list(got) == list(want)
    assert_close(with_mode(got, "primal"), want)


def _embedding_and_head():
    k1, k2 = jax.random.split(jax.random.key(0))
    embedding = eqx.nn.Embedding(5, 3, key=k1)
    return embedding, eqx.nn.Linear(3, 5, use_bias=False, key=k2)


class Tied(eqx.Module):
    shared: eqx.nn.Shared

    def __call__(self, i):
        embedding, head = self.shared()
        return head(embedding(i))


@pytest.mark.parametrize("closed_over", [False, True])
def test_tied_weights(closed_over):
    weight = lambda pair: pair[0].weight
    tied = eqx.nn.Shared(_embedding_and_head(), lambda pair: pair[1].weight, weight)
    model, i = Tied(tied), jnp.array(2)
    fn, args = ((lambda i: model(i)), (i,)) if closed_over else (model, (i,))
    out, got = S(fn, capture=(eqx.nn.Embedding, eqx.nn.Linear))(*args)
    prefix = "model/" if closed_over else ""
    row = tied.pytree[0].weight[2]
    want = {"0": row, "1": tied.pytree[0].weight @ row}
    want = {f"{prefix}shared/pytree/{i}": v for i, v in want.items()}
    assert_close((out, with_mode(got, "primal")), (model(i), want))


@pytest.mark.parametrize("closed_over", [False, True])
def test_one_array_at_two_places(closed_over):
    embedding, head = _embedding_and_head()
    head = eqx.tree_at(lambda m: m.weight, head, embedding.weight)
    fn = lambda embedding, head, i: head(embedding(i))
    models = (embedding, head)
    if closed_over:
        fn, models = (lambda i: head(embedding(i))), ()
    _, got = S(fn, capture=True)(*models, jnp.array(2))
    assert list(got) == ["embedding", "head"]


class Keyed(Layer):
    """As `eqx.nn.Sequential` calls it."""

    def __call__(self, x, *, key=None):
        return super().__call__(x)


@pytest.mark.parametrize("closed_over", [False, True])
def test_one_layer_at_two_places(closed_over):
    layer = Keyed(X, X + 1)
    model = eqx.nn.Sequential([layer, eqx.nn.Lambda(jnp.sin), layer])
    fn, args = ((lambda x: model(x)), ()) if closed_over else (_call, (model,))
    _, got = S(fn, capture=Keyed)(*args, X)
    h = layer(X)
    want = {"model/layers/0": h, "model/layers/2": layer(jnp.sin(h))}
    assert_close(with_mode(got, "primal"), want)


def _call(model, x):
    return model(x)


@pytest.mark.parametrize("partial", [False, True])
def test_one_module_as_two_keywords(partial):
    """JAX sorts them."""
    layer = Layer(X, X + 1)
    fn, layers = (lambda x, *, b, a: a(b(x))), {"b": layer, "a": layer}
    if partial:
        fn, layers = eqx.Partial(fn, **layers), {}
    _, got = S(fn, capture=Layer)(X, **layers)
    want = {"b": layer(X), "a": layer(layer(X))}
    assert list(got) == list(want)
    assert_close(with_mode(got, "primal"), want)


class WithShared(eqx.Module):
    shared = Layer(X, X)
    own: Layer

    def __call__(self, x):
        return self.shared(self.own(x))


@pytest.mark.parametrize("closed_over", [False, True])
def test_a_module_that_the_class_of_a_module_has(closed_over):
    net = WithShared(Layer(X, X + 1))
    fn, args = (
        ((lambda x: net(x)), ()) if closed_over else ((lambda net, x: net(x)), (net,))
    )
    _, got = S(fn, capture=Layer)(*args, X)
    want = {"net/own": net.own(X), "net/shared": net(X)}
    assert_close(with_mode(got, "primal"), want)


_WRAPPERS = (
    eqx.filter_checkpoint,
    eqx.filter_jit,
    eqx.Partial,
    jtu.Partial,
    lambda layer: eqx.filter_checkpoint(eqx.filter_jit(layer)),
    lambda layer: eqx.filter_vmap(layer, in_axes=None, axis_size=1, out_axes=None),
)


@pytest.mark.parametrize("wrapper", _WRAPPERS)
@pytest.mark.parametrize("root", ["", "net/"])
def test_layers_that_are_wrapped_in_a_model(wrapper, root):
    class Wrapped(eqx.Module):
        layers: list

        def __call__(self, x):
            return self.layers["b"](self.layers["a"][0](x))

    linear = eqx.nn.Linear(*X.shape, *X.shape, key=jax.random.key(0))
    a, b = Layer(X, X + 1), eqx.nn.Sequential([linear, eqx.nn.Identity()])
    net = Wrapped({"a": [wrapper(a)], "b": wrapper(b)})
    h, out = a(X), b(a(X))
    want = {
        "layers/a/0": h,
        "layers/b/layers/0": out,
        "layers/b/layers/1": out,
        "layers/b": out,
        "": out,
    }
    want = {f"{root}{name}".strip("/") or ".": x for name, x in want.items()}
    fn = lambda net, x: net(x)
    calls = {
        "": [lambda: S(net, capture=True)(X)],
        "net/": [
            lambda: S(lambda x: net(x), capture=True)(X),
            lambda: S(fn, capture=True)(net, X),
            lambda: eqx.filter_jit(S(fn, capture=True))(net, X),
        ],
    }
    for call in calls[root]:
        _, got = call()
        assert list(got) == list(want)
        assert_close(with_mode(got, "primal"), want)
    loss = lambda net, x: jnp.sum(net(x))
    _, got = S(eqx.filter_grad(loss), capture=(Layer, eqx.nn.Linear))(net, X)
    assert list(got) == ["net/layers/a/0", "net/layers/b/layers/0"]
    planted = plant(loss, {"net/layers/a/0": jnp.zeros_like}, capture=True)
    assert_close(planted(net, X), loss(b, jnp.zeros_like(X)))
