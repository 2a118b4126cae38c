"""What captured calls are called in programs that people write: each name has the value
that the module there returns, computed by hand."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from eqx_sow import (
    Append,
    plant,
    save_intermediates as S,
    Sow,
    sow,
    UnknownSowError,
)
from jax.flatten_util import ravel_pytree

from tests.helpers import assert_close, with_mode
from tests.tables import under


pytestmark = pytest.mark.sample(5)


X = jnp.linspace(-1.0, 1.0, 3)
KEYS = jax.random.split(jax.random.key(0), 8)


def _linear(i, **options):
    return eqx.nn.Linear(3, 3, key=KEYS[i], **options)


def _check(fn, args, want, **options):
    """`want`: the values by name, in order of execution."""
    options = {"capture": True, **options}
    out, got = S(fn, **options)(*args)
    assert_close(out, fn(*args))
    values = with_mode(got, "primal")
    assert list(values) == list(want)
    for name, value in want.items():
        assert_close(values[name], value)


# --- modules that Equinox rebuilds on the way ---
def _called(layer, x):
    return layer(x)


_JITTED = eqx.filter_jit(_called)
CALLS = {
    "plain": _called,
    "checkpoint": lambda q, x: eqx.filter_checkpoint(q)(x),
    "vmap": lambda q, x: eqx.filter_vmap(q)(x[None])[0],
    "jit": lambda q, x: eqx.filter_jit(q)(x),
    "jit of one function": lambda q, x: _JITTED(q, x),
    "jax.checkpoint": lambda q, x: jax.checkpoint(q.__call__)(x),
}


class Chain(eqx.Module):
    layers: list
    how: str = eqx.field(static=True)

    def __call__(self, x):
        for layer in self.layers:
            x = CALLS[self.how](layer, x)
        return x


def _by_hand(layers, x, prefix):
    values = {}
    for i, layer in enumerate(layers):
        x = values[f"{prefix}layers/{i}"] = layer(x)
    return values


def _layers():
    tanh, dropout = eqx.nn.Lambda(jnp.tanh), eqx.nn.Dropout(inference=True)
    # Two that are alike, and none of them has an array.
    return [_linear(0), tanh, _linear(1), eqx.nn.Lambda(jnp.tanh), dropout, dropout]


def _lanes(value, how):
    return value[None] if how == "vmap" else value


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("inside", [False, True])
def test_layers_without_arrays(how, inside):
    model = Chain(_layers(), how)
    want = _by_hand(model.layers, X, "model/")
    want = {name: _lanes(value, how) for name, value in want.items()}

    def outside(model, x):
        for layer in model.layers:
            x = CALLS[how](layer, x)
        return x

    if inside:
        _check(lambda model, x: model(x), (model, X), {**want, "model": model(X)})
    else:
        _check(outside, (model, X), want)
    lambdas = {k: want[k] for k in ("model/layers/1", "model/layers/3")}
    fn = (lambda model, x: model(x)) if inside else outside
    _check(fn, (model, X), lambdas, capture=eqx.nn.Lambda)


def test_a_copy_of_an_argument_without_arrays():
    """Nothing in the module around is like it."""

    class Net(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x, act):
            return eqx.filter_checkpoint(act)(self.linear(x))

    net, act = Net(_linear(0)), eqx.nn.Lambda(jnp.tanh)
    h = net.linear(X)
    want = {"net/linear": h, "act": jnp.tanh(h), "net": jnp.tanh(h)}
    _check(lambda net, act, x: net(x, act), (net, act, X), want)


def test_a_copy_in_a_loop_of_a_layer_without_arrays():
    """Under a gradient, its edge moves out of the loop, and none is running there."""

    class Repeat(eqx.Module):
        act: eqx.nn.Lambda

        def __call__(self, x):
            step = lambda x, _: (eqx.filter_checkpoint(self.act)(x), None)
            return jax.lax.scan(step, x, length=2)[0]

    class Net(eqx.Module):
        act: eqx.nn.Lambda
        repeat: Repeat

        def __call__(self, x):
            return self.repeat(self.act(x))

    act = lambda: eqx.nn.Lambda(jnp.tanh)
    net = Net(act(), Repeat(act()))
    h = jnp.tanh(X)
    twice = jnp.stack([jnp.tanh(h), jnp.tanh(jnp.tanh(h))])
    want = {"net/act": h, "net/repeat/act": twice}
    grad = jax.grad(lambda x, net: net(x).sum())
    _check(lambda net, x: grad(x, net), (net, X), want, capture=eqx.nn.Lambda)


def test_a_layer_without_arrays_in_each_of_two_stacks():
    class Block(eqx.Module):
        linear: eqx.nn.Linear
        act: eqx.nn.Lambda

        def __call__(self, x):
            return self.act(self.linear(x))

    def loss(a, b, x):
        for blocks in (a, b):
            arrays, rest = eqx.partition(blocks, eqx.is_array)
            step = lambda x, y: (eqx.combine(y, rest)(x), None)
            x, _ = jax.lax.scan(step, x, arrays)
        return x.sum()

    make = eqx.filter_vmap(lambda key: Block(eqx.nn.Linear(3, 3, key=key), act))
    act = eqx.nn.Lambda(jnp.tanh)
    blocks = make(KEYS[:2]), make(KEYS[2:4])
    x, want = X, {}
    for name, of in zip(("a/*/act", "b/*/act"), blocks):
        xs = []
        for i in range(2):
            x = jnp.tanh(of.linear.weight[i] @ x + of.linear.bias[i])
            xs.append(x)
        want[name] = jnp.stack(xs)
    _check(eqx.filter_grad(loss), (*blocks, X), want, capture=eqx.nn.Lambda)


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("derivative", [False, True])
def test_sows_without_a_name(how, derivative):
    model = Chain([_linear(0), Sow(), _linear(1), Sow()], how)

    def loss(model, x):
        for layer in model.layers:
            x = CALLS[how](layer, x)
        return x.sum()

    fn = eqx.filter_grad(loss) if derivative else loss
    _, got = S(fn)(model, X)
    assert list(got) == ["model/layers/1", "model/layers/3"]
    values = _by_hand(model.layers, X, "model/")
    for name in got:
        assert_close(got[name]["primal"], _lanes(values[name], how))


# --- tied weights ---
class Tied(eqx.Module):
    e: eqx.nn.Embedding
    l: eqx.nn.Linear

    def __call__(self, i):
        head = eqx.tree_at(lambda l: l.weight, self.l, self.e.weight)
        return head(self.e(i))


class Autoencoder(eqx.Module):
    enc: eqx.nn.Linear
    dec: eqx.nn.Linear

    def __call__(self, x):
        dec = eqx.tree_at(lambda d: d.weight, self.dec, self.enc.weight.T)
        return dec(self.enc(x))


@pytest.mark.parametrize("use_bias", [False, True])
def test_tied_weights(use_bias):
    linear = _linear(0, use_bias=use_bias)
    tied = Tied(eqx.nn.Embedding(3, 3, key=KEYS[1]), linear)
    h = tied.e(1)
    _check(tied, (jnp.array(1),), {"e": h, "l": tied(1), ".": tied(1)})
    _check(tied, (jnp.array(1),), {"l": tied(1)}, capture=eqx.nn.Linear)
    model = Autoencoder(linear, _linear(1, use_bias=use_bias))
    _check(model, (X,), {"enc": model.enc(X), "dec": model(X), ".": model(X)})


def test_the_decoder_of_tied_weights_alone():
    """Its form tells it from the encoder, which is not called."""
    enc = eqx.nn.Linear(2, 3, use_bias=False, key=KEYS[0])
    dec = eqx.nn.Linear(3, 2, use_bias=False, key=KEYS[1])
    at = lambda model: eqx.tree_at(lambda d: d.weight, model.dec, model.enc.weight.T)
    fn = lambda model, x: at(model)(x)
    want = {"model/dec": enc.weight.T @ X}
    _check(fn, (Autoencoder(enc, dec), X), want)


def test_a_module_with_its_own_weight_transposed():
    """It is not the one beside it, which has the same form, and is not called."""
    models = [_linear(i, use_bias=False) for i in range(2)]
    turned = lambda m: eqx.tree_at(lambda m: m.weight, m, m.weight.T)
    fn = lambda models, x: turned(models[0])(x)
    _check(fn, (models, X), {"models/0": models[0].weight.T @ X})


# --- what is not tied ---
class State(eqx.Module):
    """With a copy of the model that is not called in the step."""

    model: eqx.nn.Linear
    ema: eqx.nn.Linear

    def __call__(self, x):
        return _step(self.model, x)


def _step(model, x):
    grads = eqx.filter_grad(lambda m: m(x).sum())(model)
    return eqx.apply_updates(model, grads)(model(x))


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("of_function", [False, True])
def test_an_updated_model_is_not_the_copy_beside_it(use_bias, of_function):
    state = State(*[_linear(i, use_bias=use_bias) for i in range(2)])
    fn = (lambda state, x: _step(state.model, x)) if of_function else state
    args = (state, X) if of_function else (X,)
    out, got = S(fn, capture=eqx.nn.Linear, reduce=Append())(*args)
    name = "state/model" if of_function else "model"
    assert list(got) == [name]
    values = state.model(X), state.model(X), out
    assert_close(got[name]["primal"], values)


class Scale(eqx.Module):
    w: jax.Array
    train: bool = eqx.field(static=True)

    def __call__(self, x):
        return self.w * x if self.train else x / self.w


def test_a_model_in_another_mode_is_not_the_copy_beside_it():
    models = [Scale(X + 2, True), Scale(X + 3, False)]
    fn = lambda models, x: Scale(models[0].w, False)(models[0](x))
    _check(fn, (models, X), {"models/0": ((X + 2) * X, X)}, reduce=Append())


# --- arrays that were one array on the way ---
@pytest.mark.parametrize("depth", [1, 2, 6])
def test_raveled(depth):
    model = eqx.nn.MLP(3, 3, 4, depth, key=KEYS[0])
    params, static = eqx.partition(model, eqx.is_array)

    def fn(model, x):
        params, static = eqx.partition(model, eqx.is_array)
        flat, unravel = ravel_pytree(params)
        return eqx.combine(unravel(2 * flat), static)(x)

    double = eqx.combine(jtu.tree_map(lambda a: 2 * a, params), static)
    _, want = S(lambda model, x: model(x), capture=True)(double, X)
    _check(fn, (model, X), with_mode(want, "primal"))


def _over_noise(call, flat):
    return jax.vmap(lambda e: call(flat + e))(jnp.ones((2, flat.size)))


def _over_columns(call, flat):
    return jax.vmap(call, in_axes=1)(flat[:, None] + jnp.ones((1, 2)))


def _one_after_the_other(call, flat):
    return jax.lax.map(call, jnp.broadcast_to(flat, (2, flat.size)) + 1)


def _in_a_loop(call, flat):
    return jax.lax.scan(lambda p, _: (p + 1, call(p + 1)), flat, length=2)[1]


def _after_a_branch(call, flat):
    return call(jax.lax.cond(flat[0] < 9, lambda p: p + 1, lambda p: p, flat))


def _with_an_entry_changed(call, flat):
    return call((flat + 1).at[-1].add(1).at[-1].add(-1))


@pytest.mark.parametrize(
    "way, more",
    [
        (_over_noise, jnp.ones((2, 1))),
        (_over_columns, jnp.ones((2, 1))),
        (_one_after_the_other, jnp.ones((2, 1))),
        (_in_a_loop, jnp.array([[1.0], [2.0]])),
        (_after_a_branch, jnp.ones(1)),
        (_with_an_entry_changed, jnp.ones(1)),
    ],
)
def test_raveled_parameters_that_are_changed(way, more):
    """As evolution strategies, samplers and solvers do. `a` is not called."""
    model = {"a": _linear(0), "b": _linear(1)}

    def fn(model, x):
        params, static = eqx.partition(model, eqx.is_array)
        flat, unravel = ravel_pytree(params)
        return way(lambda p: eqx.combine(unravel(p), static)["b"](x), flat)

    with jax.numpy_rank_promotion("allow"):
        value = model["b"](X) + (X.sum() + 1) * more
    # A loop over rows of parameters is one over a stack of models.
    name = "model/*/b" if way is _one_after_the_other else "model/b"
    _check(fn, (model, X), {name: value})


def test_raveled_parameters_that_a_matrix_mixes():
    """Then each array is made of those of all layers, and belongs to none of them."""
    model = [_linear(0), _linear(1)]
    flat, unravel = ravel_pytree(model)
    subspaces = jax.random.normal(KEYS[2], (2, flat.size, flat.size))

    def fn(model, x):
        flat, _ = ravel_pytree(model)
        rows = subspaces @ flat
        return jax.lax.map(lambda p: unravel(p)[1](x), rows)

    value = jnp.stack([unravel(s @ flat)[1](X) for s in subspaces])
    _check(fn, (model, X), {"model/*": value})


class Attention(eqx.Module):
    q: eqx.nn.Linear
    k: eqx.nn.Linear
    v: eqx.nn.Linear

    def __call__(self, x):
        parts = self.q, self.k, self.v
        weights = jnp.concatenate([p.weight for p in parts])
        rows = jnp.split(weights, 3)
        at = lambda p, w: eqx.tree_at(lambda p: p.weight, p, w)
        return sum(at(p, w)(x) for p, w in zip(parts, rows))


@pytest.mark.parametrize("start", [9, 100])
def test_concatenated_and_sliced(start):
    """A start beyond the end is moved back by JAX."""

    def fn(a, b, x):
        flat = 2 * jnp.concatenate([a.weight.ravel(), b.weight.ravel()])
        weight = jax.lax.dynamic_slice_in_dim(flat, start, 9).reshape(3, 3)
        return eqx.tree_at(lambda b: b.weight, b, weight)(x)

    a, b = (_linear(i, use_bias=False) for i in range(2))
    _check(fn, (a, b, X), {"b": 2 * b.weight @ X})


@pytest.mark.parametrize("use_bias", [False, True])
def test_concatenated_and_split(use_bias):
    model = Attention(*[_linear(i, use_bias=use_bias) for i in range(3)])
    want = {name: getattr(model, name)(X) for name in "qkv"}
    _check(model, (X,), {**want, ".": model(X)})


@pytest.mark.parametrize("unstack", [list, jnp.unstack])
def test_stacked_and_unstacked(unstack):
    def fn(layers, x):
        weights = 2 * jnp.stack([layer.weight for layer in layers])
        for layer, w in zip(layers, unstack(weights)):
            x = eqx.tree_at(lambda l: l.weight, layer, w)(x)
        return x

    layers, x, want = [_linear(i, use_bias=False) for i in range(3)], X, {}
    for i, layer in enumerate(layers):
        x = want[f"layers/{i}"] = 2 * layer.weight @ x
    _check(fn, (layers, X), want)


# --- helpers that a layer makes of its own arrays ---
class Lora(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    a: jax.Array
    b: jax.Array

    def __call__(self, x, *, key=None):
        linear = eqx.nn.Linear(3, 3, key=jax.random.key(0))
        arrays = self.weight + self.b @ self.a, self.bias
        return eqx.tree_at(lambda l: (l.weight, l.bias), linear, arrays)(x)


def test_a_layer_that_a_layer_makes():
    make = lambda i: Lora(_linear(i).weight, X, jnp.ones((1, 3)), jnp.ones((3, 1)))
    model = eqx.nn.Sequential([make(0), make(1)])
    first = model.layers[0](X)
    want = {
        "layers/0/Linear": first,
        "layers/0": first,
        "layers/1/Linear": model(X),
        "layers/1": model(X),
        ".": model(X),
    }
    _check(model, (X,), want)
    _check(model, (X,), {k: want[k] for k in ("layers/0", "layers/1")}, capture=Lora)


# --- one method under two names ---
class Alias(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return self.w * x

    forward = __call__


@pytest.mark.parametrize("methods", [("__call__", "forward"), ("forward", "__call__")])
def test_two_names_of_a_method(methods):
    fn = lambda m, x: m.forward(m(x))
    _, got = S(fn, capture=Alias, methods=methods, reduce=Append())(Alias(X), X)
    first = "m" if methods[0] == "__call__" else "m.forward"
    assert_close(with_mode(got, "primal"), {first: (X * X, X**3)}, atol=1e-6)
    _, got = S(fn, capture=Alias, methods="forward", reduce=Append())(Alias(X), X)
    assert list(got) == ["m.forward"]


# --- classes that come to be while the program is traced ---
def _factory():
    class Late(eqx.Module):
        w: jax.Array

        def __call__(self, x):
            return self.w * x

    return Late


@pytest.mark.parametrize("capture", [True, eqx.Module])
def test_a_class_that_is_made_on_the_way(capture):
    fn = lambda m, x: _factory()(x)(m(x))
    for _ in range(2):
        _, got = S(fn, capture=capture)(_linear(0), X)
        assert len(got) == 2 and "m" in got


# --- variables that lead to a model ---
OVER_LANES = jax.vmap(_linear(1))
COMPILED = jax.jit(_linear(2).__call__)
KEPT = jax.checkpoint(_linear(3).__call__)


def test_functions_in_globals_that_hold_a_model():
    fn = lambda x: COMPILED(x) + KEPT(x) + OVER_LANES(x[None])[0]
    _, got = S(fn, capture=True)(X)
    assert list(got) == ["COMPILED", "KEPT", "OVER_LANES"]


def _calling(model):
    return lambda x: model(x)


@under("eager", "jit")
def test_two_variables_of_one_name(wrap):
    student, teacher, other = map(_linear, range(3))
    of_teacher, again, of_other = map(_calling, (teacher, teacher, other))
    of_teacher = wrap(of_teacher)

    def loss(model, x):
        return model(x) - of_teacher(x) + again(x) * of_other(x)

    values = student(X), teacher(X), other(X)
    want = {"model": values[0], "model#1": (values[1],) * 2, "model#2": values[2]}
    _check(loss, (student, X), want)
    out = plant(loss, {"model": jnp.zeros_like}, capture=True)(student, X)
    assert_close(out, loss(student, X) - values[0])
    # An argument that is in a variable, too, is one tree.
    fn = lambda model, x: model(x) - of_teacher(x)
    _check(fn, (teacher, X), {"model": (values[1],) * 2})


def test_models_of_classes():
    class First:
        net = _linear(0)

        def __call__(self, x):
            return self.net(x)

    class Second(First):
        net = _linear(1)

    a, b = First(), Second()
    _, got = S(lambda x: a(x) + b(x), capture=True)(X)
    assert list(got) == ["a/net", "b/net"]


# --- of two trees of one model ---
def _updated(grads, model, x):
    return eqx.apply_updates(model, grads)(x)


def _moved(momentum, model, x):
    return jtu.tree_map(lambda p, m: p - 0.1 * m, model, momentum)(x)


def _averaged(model, ema, x):
    return jtu.tree_map(lambda e, m: 0.9 * e + 0.1 * m, ema, model)(x)


@pytest.mark.parametrize(
    "fn, expected", [(_updated, "model"), (_moved, "model"), (_averaged, "ema")]
)
def test_the_tree_that_was_changed(fn, expected):
    _, got = S(fn, capture=True)(_linear(0), _linear(1), X)
    assert list(got) == [expected]


def test_the_target_that_was_updated_twice():
    """The other one is called, and as near."""
    mean = lambda online, target: jtu.tree_map(
        lambda o, t: 0.1 * o + 0.9 * t, online, target
    )

    def fn(online, target, x):
        y = online(x) + mean(online, target)(x)
        grow = lambda model: jtu.tree_map(lambda a: a + 0.1, model)
        return y + mean(grow(online), grow(target))(x)

    online, target = _linear(0), _linear(1)
    first = mean(online, target)(X)
    second = fn(online, target, X) - online(X) - first
    want = {"online": (online(X),), "target": (first, second)}
    _check(fn, (online, target, X), want, reduce=Append())


# --- layers of a list that are stacked on the way ---
def _stack(layers):
    return jtu.tree_map(lambda *xs: jnp.stack(xs), *layers)


@pytest.mark.parametrize("n", [2, 12])
def test_one_of_a_stack_of_changed_layers(n):
    """Neither the index nor the factor is what its arrays are made of."""

    def fn(layers, i, x):
        layers = jtu.tree_map(lambda a: 0.9 * a + 0.1, layers)
        return jtu.tree_map(lambda a: a[i], _stack(layers))(x)

    layers = [eqx.nn.Linear(3, 3, key=k) for k in jax.random.split(KEYS[0], n)]
    want = (0.9 * layers[1].weight + 0.1) @ X + 0.9 * layers[1].bias + 0.1
    _check(fn, (layers, jnp.array(1), X), {"layers": want})


def test_a_stack_of_averages():
    def fn(ema, nets, x):
        means = jtu.tree_map(lambda e, n: 0.9 * e + 0.1 * n, ema, nets)
        return jax.vmap(lambda net: net(x))(_stack(means))

    ema, nets = ([_linear(i), _linear(i + 1)] for i in (0, 2))
    values = [0.9 * e(X) + 0.1 * n(X) for e, n in zip(ema, nets)]
    _check(fn, (ema, nets, X), {"ema": jnp.stack(values)})


def test_a_stack_of_lists():
    nets = [[_linear(0), _linear(1)], [_linear(2), _linear(3)]]

    def fn(nets, x):
        stacks = _stack([_stack(net) for net in nets])
        return jax.vmap(jax.vmap(lambda net: net(x)))(stacks)

    values = jnp.stack([jnp.stack([layer(X) for layer in net]) for net in nets])
    _check(fn, (nets, X), {"nets": values})


def test_a_stack_of_which_one_was_changed():
    def fn(layers, x):
        half = eqx.tree_at(lambda l: l.weight, layers[0], 0.5 * layers[0].weight)
        return jax.vmap(lambda layer: layer(x))(_stack([half, layers[1]]))

    layers = [_linear(i, use_bias=False) for i in range(2)]
    want = jnp.stack([0.5 * layers[0](X), layers[1](X)])
    _check(fn, (layers, X), {"layers": want})


class TiedWithCopy(Tied):
    act: eqx.nn.Lambda

    def __call__(self, i):
        return eqx.filter_checkpoint(self.act)(super().__call__(i))


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("plain_too", [False, True])
def test_a_stack_of_tied_models(use_bias, plain_too):
    """The `l` of the stack is called by its own name, although its arrays are those of
    `e`, and the copy of `act` as well."""
    make = lambda i: TiedWithCopy(
        eqx.nn.Embedding(3, 3, key=KEYS[i]),
        _linear(i + 2, use_bias=use_bias),
        eqx.nn.Lambda(jnp.tanh),
    )

    def fn(nets, i):
        arrays, static = zip(*[eqx.partition(net, eqx.is_array) for net in nets])
        call = lambda arrays: eqx.combine(arrays, static[0])(i)
        out = jax.vmap(call)(_stack(arrays))
        return (out, nets[0](i)) if plain_too else out

    def by_hand(net):
        e = net.e.weight[1]
        l = net.e.weight @ e + (net.l.bias if use_bias else 0.0)
        return {"/e": e, "/l": l, "/act": jnp.tanh(l), "": jnp.tanh(l)}

    nets = [make(0), make(1)]
    values = list(map(by_hand, nets))
    want = {f"nets{k}": jnp.stack([v[k] for v in values]) for k in values[0]}
    if plain_too:
        want |= {f"nets/0{k}": v for k, v in values[0].items()}
    _check(fn, (nets, jnp.array(1)), want)


@pytest.mark.parametrize("use_bias", [False, True])
def test_a_stack_of_hypernetworks(use_bias):
    def fn(nets, x):
        return jax.vmap(lambda net: net(x))(_stack(nets))

    make = lambda i: Hyper(
        eqx.nn.Linear(3, 9, key=KEYS[i]), _linear(i + 2, use_bias=use_bias)
    )
    nets = [make(0), make(1)]
    made = [net.net.weight @ X + net.net.bias for net in nets]
    bias = [net.main.bias if use_bias else 0.0 for net in nets]
    out = jnp.stack([w.reshape(3, 3) @ X + b for w, b in zip(made, bias)])
    want = {"nets/net": jnp.stack(made), "nets/main": out, "nets": out}
    _check(fn, (nets, X), want)


def test_parts_of_a_stack_in_a_loop():
    """Of the arrays that are concatenated, the loop goes over another axis."""
    nets = [_stack([_linear(i, use_bias=False) for i in (n, n + 1)]) for n in (0, 2)]
    layer = _linear(0, use_bias=False)
    called = lambda w, x: eqx.tree_at(lambda l: l.weight, layer, w)(x)

    def fn(a, b, x):
        step = lambda x, w: (called(w[3:], called(w[:3], x)), None)
        return jax.lax.scan(step, x, jnp.concatenate([a.weight, b.weight], 1))[0]

    x, values = X, {"a/*": [], "b/*": []}
    for i in range(2):
        for name, net in zip(values, nets):
            x = net.weight[i] @ x
            values[name].append(x)
    want = {name: jnp.stack(value) for name, value in values.items()}
    _check(fn, (*nets, X), want)


def test_iterations_over_what_was_concatenated():
    """What one iteration takes apart has nothing to do with the parts."""

    def fn(nets, x):
        weights = jnp.concatenate([net.weight[None] for net in nets])
        step = lambda x, w: (Scale(w[1], True)(x), None)
        return jax.lax.scan(step, x, weights)[0]

    class Net(eqx.Module):
        weight: jax.Array

    class Scale(eqx.Module):
        weight: jax.Array
        train: bool

        def __call__(self, x):
            return self.weight * x

    nets = [Net(jnp.stack([X, X + i])) for i in (2, 3)]
    values = jnp.stack([X * (X + 2), X * (X + 2) * (X + 3)])
    _check(fn, (nets, X), {"nets/*/Scale": values})


# --- all arrays of a layer are made by others ---
class Conditioned(eqx.Module):
    norm: eqx.nn.LayerNorm
    to_weight: eqx.nn.Linear
    to_bias: eqx.nn.Linear

    def __call__(self, x):
        arrays = self.to_weight(x), self.to_bias(x)
        return eqx.tree_at(lambda n: (n.weight, n.bias), self.norm, arrays)(x)


def _conditioned(model, x):
    arrays = model["to_weight"](x), model["to_bias"](x)
    return eqx.tree_at(lambda n: (n.weight, n.bias), model["norm"], arrays)(x)


@pytest.mark.parametrize("of_function", [False, True])
def test_a_layer_with_all_its_arrays_made_by_others(of_function):
    norm, weight, bias = eqx.nn.LayerNorm(3), _linear(0), _linear(1)
    plain = eqx.nn.LayerNorm(3, use_weight=False, use_bias=False)
    values = {
        "model/to_weight": weight(X),
        "model/to_bias": bias(X),
        "model/norm": weight(X) * plain(X) + bias(X),
    }
    if of_function:
        fn, model = _conditioned, {"norm": norm, "to_weight": weight, "to_bias": bias}
    else:
        fn, model = (lambda model, x: model(x)), Conditioned(norm, weight, bias)
        values["model"] = values["model/norm"]
    _check(fn, (model, X), values)


class Hyper(eqx.Module):
    net: eqx.nn.Linear
    main: eqx.nn.Linear

    def __call__(self, x):
        weight = self.net(x).reshape(3, 3)
        return eqx.tree_at(lambda l: l.weight, self.main, weight)(x)


def test_a_layer_beside_one_that_is_called():
    """Of two that are alike, what others make is the one that nothing else leads to."""

    def fn(model, x):
        arrays = model["to_weight"](x).reshape(3, 3), model["to_bias"](x)
        made = eqx.tree_at(lambda l: (l.weight, l.bias), model["b"], arrays)
        return made(model["a"](x))

    to_weight = eqx.nn.Linear(3, 9, key=KEYS[0])
    to_bias = _linear(1, use_bias=False)
    model = {"a": _linear(2), "b": _linear(3)}
    model |= {"to_weight": to_weight, "to_bias": to_bias}
    values = {
        "model/to_weight": to_weight(X),
        "model/to_bias": to_bias(X),
        "model/a": model["a"](X),
    }
    made = values["model/to_weight"].reshape(3, 3) @ values["model/a"]
    values["model/b"] = made + values["model/to_bias"]
    _check(fn, (model, X), values)


def test_what_a_hypernetwork_makes_keeps_its_name_after_an_update():
    net = eqx.nn.Linear(3, 9, key=KEYS[0])
    fn = lambda model, x: model(x) + _step(model, x)
    out, got = S(fn, capture=eqx.nn.Linear, modes="primal", reduce=Append())(
        Hyper(net, _linear(1)), X
    )
    assert list(got) == ["model/net", "model/main"]
    assert [len(x["primal"]) for x in got.values()] == [4, 4]
    ends = got["model/main"]["primal"]
    assert_close(ends[0] + ends[3], out)


class Film(eqx.Module):
    scale: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return self.scale * x + self.bias


@pytest.mark.parametrize("factor", [1.0, 0.5])
@under("eager", "filter_jit")
def test_a_layer_of_another_form_that_is_made_by_others(factor, wrap):
    """The `bias` of the one that makes it is only added to what becomes its `bias`."""

    @wrap
    def fn(net, x):
        return Film(*jnp.split(factor * net(x), 2))(x)

    net = eqx.nn.Linear(3, 6, key=KEYS[0])
    made = net.weight @ X + net.bias
    film = factor * made[:3] * X + factor * made[3:]
    _check(fn, (net, X), {"net": made, "Film": film})


def test_a_layer_of_another_form_after_an_update():
    """What it is made of has no module of its own."""

    def fn(params, x):
        loss = lambda p: jnp.sum((jnp.ones((2, 3)) @ Film(p["w"], p["bias"])(x)) ** 2)
        p = eqx.apply_updates(params, jax.grad(loss)(params))
        return Film(p["w"], p["bias"])(x)

    saved = S(fn, capture=True, modes="primal", reduce=Append())
    out, got = saved({"w": X, "bias": X}, X)
    assert list(got) == ["params"]
    assert_close(got["params"]["primal"][1], out)


# --- stacks within modules that have nothing else ---
class Unit(eqx.Module):
    lin: eqx.nn.Linear

    def __call__(self, x):
        return jnp.tanh(self.lin(x))


class Stack(eqx.Module):
    layers: Unit

    def __call__(self, x):
        params, static = eqx.partition(self.layers, eqx.is_array)
        step = lambda x, p: (eqx.combine(p, static)(x), None)
        return jax.lax.scan(step, x, params)[0]


class Block(eqx.Module):
    inner: eqx.Module

    def __call__(self, x):
        return self.inner(x)


class Listed(eqx.Module):
    layers: list

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Whole(eqx.Module):
    body: eqx.Module
    head: eqx.nn.Linear | None = None

    def __call__(self, x):
        x = self.body(x)
        return x if self.head is None else self.head(x)


class Blocks(eqx.Module):
    blocks: list

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def _units(n=3, first=0):
    return [Unit(_linear(i + first)) for i in range(n)]


def _stacked(units):
    return jtu.tree_map(lambda *xs: jnp.stack(xs), *units)


MODELS = {
    "alone": lambda body: body(0),
    "in a module": lambda body: Whole(body(0)),
    "beside another": lambda body: Whole(body(0), _linear(7)),
    "in a module in a module": lambda body: Whole(Whole(body(0), _linear(7))),
    "in a list": lambda body: Blocks([body(0), body(3)]),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("where", MODELS)
@pytest.mark.parametrize("as_argument", [False, True])
def test_a_stack_has_the_names_of_a_list(where, as_argument):
    listed = MODELS[where](lambda first: Listed(_units(first=first)))
    stacked = MODELS[where](lambda first: Stack(_stacked(_units(first=first))))
    run = (lambda net, x: net(x)) if as_argument else None
    call = lambda net, **o: (
        S(run, capture=True, **o)(net, X) if run else S(net, capture=True, **o)(X)
    )
    _, want = call(listed)
    for name in want:
        if "layers" in name:
            _, one = call(stacked, names=name)
            assert_close(one[name]["primal"], want[name]["primal"], atol=1e-6)
    inner = [n for n in want if n.endswith("/lin")]
    pattern = inner[0].replace("layers/0", "layers/*")
    _, all_ = call(stacked)
    assert_close(all_[pattern], want[pattern], atol=1e-6)
    zero = {inner[1]: jnp.zeros_like}
    planted = lambda net: (
        plant(run, zero, capture=True)(net, X)
        if run
        else plant(net, zero, capture=True)(X)
    )
    assert_close(planted(stacked), planted(listed), atol=1e-6)


def test_a_stack_that_is_an_argument():
    """It has one layer only, but the loop calls what has that."""
    units = _units()

    def fn(units, x):
        params, static = eqx.partition(units, eqx.is_array)
        step = lambda x, p: (eqx.combine(p, static)(x), None)
        return jax.lax.scan(step, x, params)[0]

    for name, value in _by_hand(units, X, "").items():
        name = name.replace("layers", "units")
        _, got = S(fn, capture=True, names=name)(_stacked(units), X)
        assert_close(with_mode(got, "primal"), {name: value})
    _, got = S(fn, capture=True, names="units/1/lin")(_stacked(units), X)
    value = units[1].lin(units[0](X))
    assert_close(with_mode(got, "primal"), {"units/1/lin": value})


@pytest.mark.parametrize("n, of", [(2, 3), (12, 12)])
def test_a_loop_over_layers_that_are_stacked_on_the_way(n, of):
    """Some of a list, and more than the pass remembers sources of one array."""

    def fn(units, x):
        return Stack(_stacked(units[:n]))(x)

    keys = jax.random.split(KEYS[0], of)
    units = [Unit(eqx.nn.Linear(3, 3, key=key)) for key in keys]
    _, got = S(fn, capture=True, names="units/1/lin")(units, X)
    value = units[1].lin(units[0](X))
    assert_close(with_mode(got, "primal"), {"units/1/lin": value})


class TwoStacks(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __call__(self, x):
        params, static = eqx.partition((self.first, self.second), eqx.is_array)

        def step(x, params):
            first, second = eqx.combine(params, static)
            return second(jnp.tanh(first(x))), None

        return jax.lax.scan(step, x, params)[0]


def test_two_stacks_that_one_loop_takes_apart():
    """The module around has nothing else, but the loop is inside its method."""
    layers = [[_linear(i + first) for i in range(3)] for first in (0, 3)]
    h, want = X, {}
    for i, (first, second) in enumerate(zip(*layers)):
        want[f"net/first/{i}"] = first(h)
        h = want[f"net/second/{i}"] = second(jnp.tanh(first(h)))
    net = TwoStacks(*map(_stacked, layers))
    for name, value in want.items():
        _, got = S(lambda net, x: net(x), capture=True, names=name)(net, X)
        assert_close(with_mode(got, "primal"), {name: value}, atol=1e-6)


def test_the_index_behind_a_key_with_a_slash():
    units = {"a/b": _stacked(_units()), "c": _linear(6)}

    def fn(units, x):
        params, static = eqx.partition(units["a/b"], eqx.is_array)
        step = lambda x, p: (eqx.combine(p, static)(x), None)
        return units["c"](jax.lax.scan(step, x, params)[0])

    _, got = S(fn, capture=True, names="units/a/b/1/lin")(units, X)
    value = _units()[1].lin(_units()[0](X))
    assert_close(with_mode(got, "primal"), {"units/a/b/1/lin": value})
    _, every = S(fn, capture=True)(units, X)
    assert_close(every["units/a/b/1/lin"]["primal"], value)
    assert_close(every.unstack()["units/a/b/1/lin"]["primal"], value)
    name = "args/0/a/b/1/lin"
    _, got = S(lambda *args: fn(*args), capture=True, names=name)(units, X)
    assert_close(with_mode(got, "primal"), {name: value})


# With a loop around that over the layers. A gradient moves what does not depend on the
# iteration of the outer loop out of that: the arrays are sliced in another place.
_STEPS = {
    "carried": lambda net, xs: jax.lax.scan(lambda c, x: (net(c + x), None), X, xs)[0],
    "mapped": lambda net, xs: jax.lax.map(net, xs),
    "the same": lambda net, xs: jax.lax.scan(lambda c, x: (c + net(X), x), X, xs)[0],
    "vmap": lambda net, xs: jax.vmap(lambda x: jax.lax.map(net, x[None]))(xs),
}


@pytest.mark.slow
@pytest.mark.parametrize("derive", [False, True])
@pytest.mark.parametrize("steps", _STEPS.values(), ids=_STEPS)
def test_a_stack_in_another_loop_has_the_names_of_a_list(steps, derive):
    xs = jnp.stack([X, 2 * X, jnp.cos(X), -X])
    loss = lambda net, xs: jnp.sum(jnp.sin(steps(net, xs)))
    run = eqx.filter_grad(loss) if derive else loss
    listed, stacked = Listed(_units()), Stack(_stacked(_units()))
    names = ["net/layers/1/lin", "net/layers/2", "net/layers/0"]
    _, want = S(run, capture=True, names=names)(listed, xs)
    _, got = S(run, capture=True, names=names)(stacked, xs)
    assert_close({name: got[name] for name in want}, dict(want), atol=1e-6)
    double = {name: lambda x: 2 * x for name in names[:2]}
    planted = lambda net: plant(loss, double, capture=True)(net, xs)
    assert_close(planted(stacked), planted(listed), atol=1e-6)
    for pattern, cls in (("net/layers/*/lin", eqx.nn.Linear), ("net/layers/*", Unit)):
        want, got = (
            S(run, capture=cls)(net, xs)[1][pattern] for net in (listed, stacked)
        )
        # Of a stack, the axes of the vmap and of the other loop come first.
        axis = 2 if steps is _STEPS["vmap"] else 1
        assert list(got) == list(want)
        for mode in want:
            layers_first = jnp.moveaxis(got[mode], axis, 0)
            assert_close(layers_first, want[mode], atol=1e-6)


@pytest.mark.parametrize("how", ["plain", "checkpoint"])
def test_an_iteration_of_a_backward_pass_without_the_arrays(how):
    """The loop backward has no need of the biases, and does not take them apart."""

    class Shift(eqx.Module):
        bias: jax.Array

        def __call__(self, x):
            return x + self.bias

    model = Stack(_stacked([Block(Shift(X * i)) for i in range(3)]))
    fn = eqx.filter_grad(lambda x, net: jnp.sum(CALLS[how](net, x) ** 2))
    _, got = S(fn, capture=True, names="net/layers/1/inner")(X, model)
    assert list(got) == ["net/layers/1/inner"]
    want = {"primal": 2 * X, "cotangent": 2 * 4 * X}
    assert_close(got["net/layers/1/inner"], want)


def test_a_sow_in_a_stack_is_called_as_in_a_list():
    class Block(eqx.Module):
        lin: eqx.nn.Linear

        def __call__(self, x):
            return sow(jnp.tanh(self.lin(x)), "h")

    blocks = [Block(_linear(i)) for i in range(3)]
    listed, stacked = Listed(blocks), Stack(_stacked(blocks))
    run = eqx.filter_grad(lambda net, x: net(x).sum())
    _, want = S(run, scope=True, names="net/layers/1/h")(listed, X)
    _, got = S(run, scope=True, names="net/layers/1/h")(stacked, X)
    assert_close(dict(got), dict(want), atol=1e-6)
    of_all = lambda net: S(run, scope=True)(net, X)[1]["net/layers/*/h"]
    assert_close(of_all(stacked), of_all(listed), atol=1e-6)
    with pytest.raises(UnknownSowError, match="'net/layers/0/h' to 'net/layers/2/h'"):
        S(run, scope=True, names="net/layers/*/h/1")(stacked, X)


@pytest.mark.slow
def test_globs_of_a_stack():
    stacked, listed = Stack(_stacked(_units())), Listed(_units())
    for pattern in ("layers/[12]/lin", "layers/?/lin", "layers/*/lin"):
        _, want = S(listed, capture=True, names=pattern)(X)
        _, got = S(stacked, capture=True, names=pattern)(X)
        assert_close(got[pattern], want[pattern], atol=1e-6)
        double = {pattern: lambda v: 2 * v}
        a, b = (plant(m, double, capture=True)(X) for m in (stacked, listed))
        assert_close(a, b, atol=1e-6)
    norm = {"layers/*/lin": jnp.linalg.norm}
    _, got = S(stacked, capture=True, transform=norm)(X)
    assert got["layers/*/lin"]["primal"].shape == (3,)
    with pytest.raises(UnknownSowError, match="layers"):
        S(stacked, capture=True, names="layers/[78]/lin")(X)
