"""Names of captured modules say which module it is: laws over random models."""

import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_sow import Append, plant, save_intermediates as S, sow
from jax.sharding import AxisType, PartitionSpec as P

from .helpers import assert_close, cotangents, primals, with_mode
from .tables import pick, under


X = jnp.array([0.3, -1.2, 0.7])


# --- two modules of different classes never share a name ---
class Layer(eqx.Module):
    weight: jax.Array


class Up(Layer):
    def __call__(self, x):
        return jnp.tanh(self.weight @ x)


class Down(Layer):
    def __call__(self, x):
        return self.weight @ x - 1


class Side(Layer):
    bias: jax.Array

    def __call__(self, x):
        return self.weight @ x + self.bias


@eqx.filter_jit
def _make(cls, module, *more):
    """A module of another class, in a function that JAX traces once."""
    return cls(module.weight, *more)


class Plain(eqx.Module):
    up: Up
    down: Down

    def __call__(self, x):
        return self.down(self.up(x))

    def by_hand(self, x, mark):
        x = mark(jnp.tanh(self.up.weight @ x), "/up")
        return mark(self.down.weight @ x - 1, "/down")


class ByProperty(eqx.Module):
    up: Up

    @property
    def made(self):
        return Down(self.up.weight)

    def __call__(self, x):
        return self.made(self.up(x))

    def by_hand(self, x, mark):
        x = mark(jnp.tanh(self.up.weight @ x), "/up")
        return mark(self.up.weight @ x - 1, "/up/Down")


class MadeAlone(eqx.Module):
    up: Up

    def __call__(self, x):
        return Down(self.up.weight.T)(x)

    def by_hand(self, x, mark):
        return mark(self.up.weight.T @ x - 1, "/up/Down")


class ByFunction(eqx.Module):
    down: Down

    def __call__(self, x):
        x = _make(Side, self.down, x)(x)
        return self.down(_make(Up, self.down)(x))

    def by_hand(self, x, mark):
        x = mark(self.down.weight @ x + x, "/down/Side")
        x = mark(jnp.tanh(self.down.weight @ x), "/down/Up")
        return mark(self.down.weight @ x - 1, "/down")


class Replaced(eqx.Module):
    inner: Plain

    def __call__(self, x):
        other = lambda up: Side(up.weight, jnp.ones(3))
        return eqx.tree_at(lambda m: m.inner.up, self, replace_fn=other).inner(x)

    def by_hand(self, x, mark):
        x = mark(self.inner.up.weight @ x + 1, "/inner/up/Side")
        x = mark(self.inner.down.weight @ x - 1, "/inner/down")
        return mark(x, "/inner")


class Tied(Plain):
    turned: bool = False

    def __call__(self, x):
        weight = self.up.weight.T if self.turned else self.up.weight
        return eqx.tree_at(lambda d: d.weight, self.down, weight)(self.up(x))

    def by_hand(self, x, mark):
        weight = self.up.weight.T if self.turned else self.up.weight
        x = mark(jnp.tanh(self.up.weight @ x), "/up")
        return mark(weight @ x - 1, "/down")


class Shared(eqx.Module):
    shared: eqx.nn.Shared
    weight: jax.Array

    def __init__(self, up, down):
        self.weight = up.weight
        at = lambda pair: pair[1].weight, lambda pair: pair[0].weight
        self.shared = eqx.nn.Shared((up, down), *at)

    def __call__(self, x):
        up, down = self.shared()
        return down(up(x))

    def by_hand(self, x, mark):
        x = mark(jnp.tanh(self.weight @ x), "/shared/pytree/0")
        return mark(self.weight @ x - 1, "/shared/pytree/1")


class Packed(eqx.Module):
    """One array that is the weights of three modules."""

    packed: Side

    def __call__(self, x):
        q, k = (jax.tree.map(lambda a: a[i], self.packed) for i in range(2))
        return Up(self.packed.weight[1])(q(x) + k(x))

    def by_hand(self, x, mark):
        w, b = self.packed.weight, self.packed.bias
        q = mark(w[0] @ x + b[0], "/packed/0")
        k = mark(w[1] @ x + b[1], "/packed/1")
        return mark(jnp.tanh(w[1] @ (q + k)), "/packed/1/Up")


class Unrolled(eqx.Module):
    """A stack, taken apart in a Python loop."""

    blocks: ByProperty

    def __call__(self, x):
        for i in range(2):
            x = jax.tree.map(lambda a: a[i], self.blocks)(x)
        return x

    def by_hand(self, x, mark):
        for i in range(2):
            w = self.blocks.up.weight[i]
            x = mark(jnp.tanh(w @ x), f"/blocks/{i}/up")
            x = mark(w @ x - 1, f"/blocks/{i}/up/Down")
            x = mark(x, f"/blocks/{i}")
        return x


def _pair(rng, cls=Plain):
    weights = [jnp.array([[rng.gauss(0, 0.7)] * 3] * 3) for _ in range(2)]
    noise = jr.normal(jr.key(rng.randrange(1 << 30)), (2, 3, 3)) / 2
    return cls(Up(weights[0] + noise[0]), Down(weights[1] + noise[1]))


def _stacked(modules):
    stack = lambda *xs: jnp.stack(xs) if eqx.is_array(xs[0]) else xs[0]
    return jax.tree.map(stack, *modules)


def _packed(rng):
    pair = _pair(rng)
    return Packed(_stacked([Side(m.weight, X) for m in (pair.up, pair.down)]))


KINDS = [
    _pair,
    lambda rng: ByProperty(_pair(rng).up),
    lambda rng: MadeAlone(_pair(rng).up),
    lambda rng: ByFunction(_pair(rng).down),
    lambda rng: Replaced(_pair(rng)),
    lambda rng: _pair(rng, lambda *pair: Tied(*pair, turned=rng.random() < 0.5)),
    lambda rng: _pair(rng, Shared),
    _packed,
    lambda rng: Unrolled(_stacked([ByProperty(_pair(rng).up) for _ in range(2)])),
]


class Model(eqx.Module):
    parts: list

    def __call__(self, x):
        for part in self.parts:
            x = part(x)
        return x

    def by_hand(self, mark, x):
        for i, part in enumerate(self.parts):
            inside = lambda value, name, i=i: mark(value, f"parts/{i}{name}")
            x = inside(part.by_hand(x, inside), "")
        return x


WAYS = [
    *pick("eager", "filter_jit", "filter_checkpoint").values(),
    lambda f: lambda m, x: jax.vmap(f, (None, 0))(m, x[None])[0],
]


@pytest.mark.parametrize("seed", range(6))
def test_names_of_random_models(seed):
    rng = random.Random(seed)
    kinds = rng.sample(KINDS, 3) + [KINDS[seed % len(KINDS)]]
    model = Model([kind(rng) for kind in kinds])
    way = WAYS[seed % len(WAYS)]
    run = way(lambda m, x: m(x))
    lane = (lambda v: v[0]) if way is WAYS[3] else (lambda v: v)
    of_mode = lambda got, mode: {n: lane(v) for n, v in with_mode(got, mode).items()}

    def program(mark, x):
        inside = lambda value, name: mark(value, f"m/{name}")
        return mark(model.by_hand(inside, x), "m")

    _, got = S(run, capture=True)(model, X)
    want = primals(program, X)
    assert list(got) == list(want)
    assert_close(of_mode(got, "primal"), want, atol=1e-5)
    # What is planted at one name changes that module alone.
    factor = {name: 1 + 0.1 * i for i, name in enumerate(want)}
    by_name = {n: (lambda v, n=n: factor[n] * v) for n in want}
    by_hand = program(lambda value, name: factor[name] * value, X)
    assert_close(plant(run, by_name, capture=True)(model, X), by_hand, atol=1e-5)
    # And in the backward pass.
    loss = lambda m, x: jnp.sum(run(m, x))
    graded = S(eqx.filter_grad(loss), capture=True)(model, X)[1]
    cts = cotangents(lambda mark, x: jnp.sum(program(mark, x)), X)
    assert_close(of_mode(graded, "cotangent"), cts, atol=1e-5)


# --- a slice of a stack with a constant index is that layer ---
class Attention(eqx.Module):
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __call__(self, x):
        return self.dropout(jnp.tanh(self.linear(x)), inference=True)


class Block(eqx.Module):
    attn: Attention
    norm: eqx.nn.LayerNorm

    def __call__(self, x):
        return x + self.attn(self.norm(x))


def _blocks(n):
    linears = [eqx.nn.Linear(3, 3, key=key) for key in jr.split(jr.key(0), n)]
    attns = [Attention(linear, eqx.nn.Dropout(0.1)) for linear in linears]
    return [Block(attn, eqx.nn.LayerNorm(3)) for attn in attns]


def _entries(stack, take):
    """Calls layer after layer, which `take(array)` gives for each array of a stack."""
    arrays, static = eqx.partition(stack, eqx.is_array)
    leaves, treedef = jax.tree.flatten(arrays)
    for entry in zip(*map(take, leaves)):
        yield eqx.combine(jax.tree.unflatten(treedef, entry), static)


def _in_a_scan(stack, x):
    arrays, static = eqx.partition(stack, eqx.is_array)
    step = lambda x, layer: (eqx.combine(layer, static)(x), None)
    return jax.lax.scan(step, x, arrays)[0]


def _one_by_one(take):
    def call(stack, x):
        for layer in _entries(stack, take):
            x = layer(x)
        return x

    return call


at_each = lambda index: lambda a: [index(a, i) for i in range(len(a))]
SLICES = {
    "index": at_each(lambda a, i: a[i]),
    "from the end": at_each(lambda a, i: a[i - len(a)]),
    "take": at_each(lambda a, i: jnp.take(a, i, axis=0)),
    "dynamic": at_each(lambda a, i: jax.lax.dynamic_index_in_dim(a, i, keepdims=False)),
    "slice": at_each(
        lambda a, i: jax.lax.slice_in_dim(a, i, i + 1).reshape(a.shape[1:])
    ),
    "unstack": jnp.unstack,
    "iterate": list,
    "split": lambda a: [x.squeeze(0) for x in jnp.split(a, len(a))],
}


class Encoder(eqx.Module):
    blocks: list | Block
    norm: eqx.nn.LayerNorm
    call: Callable = eqx.field(static=True)

    def __call__(self, x):
        return self.norm(self.call(self.blocks, x))


def _encoder(n, call):
    """With a list of `n` blocks, or with a stack of them if `call` takes one."""
    blocks, norm = _blocks(n), eqx.nn.LayerNorm(3)
    is_list = call is _in_a_list
    return Encoder(blocks if is_list else _stacked(blocks), norm, call)


def _in_a_list(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def _loss(m, x):
    return jnp.sum(m(x) ** 2)


def _ensemble(m, x):
    """Of two, so that all arrays have one more axis in front."""
    axes = jax.tree.map(lambda a: 0 if eqx.is_array(a) else None, m)
    return eqx.filter_vmap(lambda m, x: m(x), in_axes=(axes, None))(m, x)


@functools.cache
def _of_a_list(in_ensemble):
    model = _encoder(2, _in_a_list)
    if in_ensemble:
        return S(_ensemble, capture=True)(_stacked([model, model]), X)[1]
    return S(eqx.filter_grad(_loss), capture=True)(model, X)[1]


@pytest.mark.parametrize("i", range(len(SLICES)), ids=SLICES)
def test_an_unrolled_loop_over_a_stack(i):
    """Names, values and gradients are those of a list."""
    model = _encoder(2, _one_by_one([*SLICES.values()][i]))
    wrap = (lambda f: f, eqx.filter_checkpoint, eqx.filter_jit)[i % 3]
    got = S(eqx.filter_grad(wrap(_loss)), capture=True)(model, X)[1]
    assert list(got) == list(_of_a_list(False))
    assert_close(got, _of_a_list(False))
    got = S(_ensemble, capture=True)(_stacked([model, model]), X)[1]
    assert list(got) == list(_of_a_list(True))
    assert_close(got, _of_a_list(True))


def test_a_part_of_a_layer_of_a_stack():
    """Called by itself, so that only some arrays of the layer are taken out."""
    blocks = _blocks(2)
    _, want = S(lambda m, x: m[1].attn.linear(x), capture=True)(blocks, X)

    def fn(m, x):
        return jax.tree.map(lambda a: a[1] if eqx.is_array(a) else a, m).attn.linear(x)

    _, got = S(fn, capture=True)(_stacked(blocks), X)
    assert list(got) == list(want) == ["m/1/attn/linear"]
    assert_close(got, want)


def test_a_layer_of_a_stack_that_is_whole_on_each_device():
    model = _encoder(2, _one_by_one(SLICES["index"]))
    arrays, static = eqx.partition(model, eqx.is_array)
    mesh = jax.make_mesh((4,), ("d",), (AxisType.Auto,))
    run = lambda arrays, x: eqx.combine(arrays, static)(x)

    def fn(arrays, x):
        specs = dict(in_specs=(P(), P("d")), out_specs=P("d"))
        over_rows = lambda arrays, x: jax.vmap(lambda x: run(arrays, x))(x)
        return jax.shard_map(over_rows, mesh=mesh, **specs)(arrays, x)

    _, got = S(fn, capture=True)(arrays, jnp.tile(X, (4, 1)))
    _, want = S(lambda arrays, x: run(arrays, x), capture=True)(arrays, X)
    assert list(got) == list(want)
    for name, value in with_mode(want, "primal").items():
        assert_close(got[name]["primal"], jnp.tile(value, (4, 1, 1)))


PERMUTED = {
    "reversed": lambda a: a[::-1],
    "flipped": lambda a: jnp.flip(a, 0),
    "the first ones": lambda a: a[:2],
    "the last ones": lambda a: a[2:],
    "every other": lambda a: a[::2],
    "by indices": lambda a: a[jnp.array([2, 0])],
    "by a mask": lambda a: a[np.array([True, False, True, True])],
    "a half": lambda a: jnp.split(a, 2)[1],
    "some": lambda a: jax.lax.dynamic_slice_in_dim(a, 1, 2),
    "padded": lambda a: jnp.pad(a, [(1, 0)] + [(0, 0)] * (a.ndim - 1)),
    "rolled": lambda a: jnp.roll(a, -2, 0),
    "repeated": lambda a: jnp.repeat(a, 2, 0)[1:3],
    "in two rows": lambda a: a.reshape(2, 2, *a.shape[1:])[:, 0],
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("permuted", PERMUTED.values(), ids=PERMUTED)
def test_an_entry_of_a_part_of_a_stack_is_not_the_layer_with_that_index(permuted):
    linears = [eqx.nn.Linear(3, 3, key=key) for key in jr.split(jr.key(0), 4)]
    stack = _stacked(linears)

    def fn(stack, x):
        first = next(_entries(stack, lambda a: [a[1]]))(x)
        entries = _entries(jax.tree.map(permuted, stack), lambda a: [a[0], a[1]])
        return first, [entry(x) for entry in entries]

    out, got = S(fn, capture=True)(stack, X)
    assert list(got) == ["stack/1", "stack"]
    assert_close(got["stack/1"]["primal"], linears[1](X))
    assert_close(list(got["stack"]["primal"]), out[1])
    planted = plant(fn, {"stack/1": jnp.zeros_like}, capture=True)(stack, X)
    assert_close(planted, (jnp.zeros(3), out[1]))


@pytest.mark.parametrize("permuted", PERMUTED.values(), ids=PERMUTED)
def test_a_part_of_each_layer_is_no_layer(permuted):
    """As of some heads, or of all in another order."""
    stack = Any(jnp.arange(64.0).reshape(4, 4, 4))
    part = lambda b: eqx.tree_at(lambda b: b.w, b, jax.vmap(permuted)(b.w)[1])()
    out, got = S(part, capture=True)(stack)
    # All of a layer, in another shape, is that layer.
    is_whole = permuted is PERMUTED["in two rows"]
    assert list(got) == ["b/1" if is_whole else "b"]
    assert_close(out, jnp.sum(permuted(stack.w[1])))


def test_entries_of_a_stack_that_is_in_no_place():
    """Nothing but the entry says which one a module is, however it was taken out."""

    def fn(x):
        stack = jnp.sin(x) * jnp.ones((3, 2, 2))
        for i in (1, 2, 1):
            for take in SLICES.values():
                x = Any(take(stack)[i])()
        return x

    _, got = S(fn, capture=Any)(jnp.float32(1))
    n_runs = {name: len(value) for name, value in with_mode(got, "primal").items()}
    assert n_runs == {"Any": 2 * len(SLICES), "Any#1": len(SLICES)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("held", [list, tuple, lambda x: dict(enumerate(x))])
def test_layers_that_are_wrapped_in_a_container(held):
    """Their arrays have the paths that they would have without."""
    nets = [
        [eqx.nn.Linear(3, 3, key=jr.key(2 * i + k)) for k in (0, 1)] for i in (0, 1)
    ]

    def fn(nets, x):
        for net in nets[::-1]:
            x = net(x)
        return x

    want = [Wrapped(held(net)) for net in nets]
    _, want = S(fn, capture=True)(want, X)
    wrapped = [Wrapped(held([eqx.filter_checkpoint(x) for x in net])) for net in nets]
    _, got = S(fn, capture=True)(wrapped, X)
    names = [
        f"nets/{i}{more}" for i in (1, 0) for more in ("/layers/0", "/layers/1", "")
    ]
    assert list(got) == list(want) == names
    assert_close(got, want)


class Wrapped(eqx.Module):
    layers: Sequence | dict

    def __call__(self, x):
        return self.layers[1](self.layers[0](x))


def test_a_layer_from_the_end_of_a_stack_of_which_one_is_called_by_itself():
    linears = [eqx.nn.Linear(3, 3, key=key) for key in jr.split(jr.key(0), 4)]

    def fn(stack, x):
        one = next(_entries(stack, lambda a: [a[1]]))(x)
        return one, _in_a_scan(stack, x)

    _, got = S(fn, capture=True, names="stack/-1")(_stacked(linears), X)
    (value,) = with_mode(got, "primal").values()
    assert_close(value, _in_a_list(linears, X))
    _, got = S(fn, capture=True, names="stack/-3")(_stacked(linears), X)
    runs = with_mode(got, "primal")["stack/-3"]
    assert_close(runs, (linears[1](X), _in_a_list(linears[:2], X)))


@pytest.mark.parametrize("n", [1, 3])
def test_list_scan_and_unrolled_loop_have_the_same_names(n):
    calls = _in_a_list, _one_by_one(SLICES["index"]), _in_a_scan
    listed, unrolled, scanned = (_encoder(n, call) for call in calls)
    fn = eqx.filter_grad(_loss)
    _, want = S(fn, capture=True)(listed, X)
    names = [name for name in want if "blocks" in name]
    last = f"m/blocks/{n - 1}/attn/linear"
    assert {"m/blocks/0", last, "m/blocks/0/attn/dropout"} <= set(names)
    for model in (listed, unrolled, scanned):
        _, got = S(fn, capture=True, names=names)(model, X)
        assert_close({name: got[name] for name in names}, {n: want[n] for n in names})
        _, every = S(fn, capture=True)(model, X)
        pattern = "m/blocks/*/attn"
        assert_close(every[pattern], want[pattern])
        without = {last: jnp.zeros_like, "m/blocks/0/attn": jnp.cos}
        out = plant(lambda m, x: m(x), without, capture=True)(model, X)
        assert_close(out, _planted_by_hand(listed, X))


def _planted_by_hand(model, x):
    for i, block in enumerate(model.blocks):
        is_last = block is model.blocks[-1]
        h = 0 * x if is_last else jnp.tanh(block.attn.linear(block.norm(x)))
        x = x + (jnp.cos(h) if i == 0 else h)
    return model.norm(x)


class Distance(eqx.Module):
    net: eqx.nn.Linear

    def __call__(self, net, x):
        return self.net(x) - net(x)

    def of_other(self, net, x):
        return self(net, x)


@under("eager", "filter_jit")
def test_an_argument_that_is_called_like_a_field(wrap):
    mine, other = (eqx.nn.Linear(3, 3, key=key) for key in jr.split(jr.key(0)))
    module, x = Distance(mine), jnp.arange(3.0)
    for fn in map(wrap, (module, module.of_other)):
        _, got = S(fn, capture=eqx.nn.Linear)(other, x)
        assert list(got) == ["net", "net#1"]
        assert_close(got["net"]["primal"], mine(x))
        assert_close(got["net#1"]["primal"], other(x))
        zeroed = lambda name, fn=fn: plant(fn, {name: jnp.zeros_like}, capture=True)
        assert_close(zeroed("net")(other, x), -other(x))
        assert_close(zeroed("net#1")(other, x), mine(x))
    # A variable of that name is yet another one.
    net = eqx.nn.Linear(3, 3, key=jr.key(7))
    _, got = S(lambda x: module(other, x) + net(x), capture=eqx.nn.Linear)(x)
    assert_close(got["net"]["primal"], net(x))


class Part(eqx.Module):
    drop: eqx.nn.Dropout
    linear: eqx.nn.Linear
    act: eqx.nn.Lambda


def _parts():
    """Two models that are alike in all but the arrays of `linear`."""
    linear = [eqx.nn.Linear(3, 3, key=key) for key in jr.split(jr.key(0))]
    new = lambda x: Part(eqx.nn.Dropout(inference=True), x, eqx.nn.Lambda(jnp.tanh))
    return list(map(new, linear))


_CALLED = {
    "the second": ["second/linear", "second/act"],
    "in turn": [f"{x}/{y}" for x in ("first", "second") for y in ("drop", "linear")],
    "the other way round": [
        f"{x}/{y}" for x in ("second", "first") for y in ("linear", "drop", "act")
    ],
    "some of both": ["first/linear", "first/drop", "second/linear", "second/act"],
}


@pytest.mark.parametrize("called", _CALLED)
@pytest.mark.parametrize(
    "how", ["argument", "jit", "grad", "closure", "jit of closure"]
)
def test_layers_without_arrays_of_models_that_are_alike(how, called):
    def run(first, second, x):
        parts = {"first": first, "second": second}
        for name in _CALLED[called]:
            part, layer = name.split("/")
            x = getattr(parts[part], layer)(x)
        return x.sum()

    first, second = _parts()
    if "closure" in how:
        closed = lambda x: run(first, second, x)
        fn, args = (jax.jit(closed) if "jit" in how else closed), (jnp.ones(3),)
    else:
        wrap = {"jit": eqx.filter_jit, "grad": eqx.filter_grad}.get(how, lambda f: f)
        fn, args = wrap(run), (first, second, jnp.ones(3))
    assert list(S(fn, capture=True)(*args)[1]) == _CALLED[called]


def test_layers_without_arrays_that_are_called_from_the_last():
    """Each is the very module that is there, though all of them are alike."""
    n = 3
    drops = [eqx.nn.Dropout(inference=True) for _ in range(n)]

    def fn(drops, x):
        for drop in reversed(drops):
            x = drop(x + 1)
        return x

    _, got = S(fn, capture=True)(drops, X)
    expected = {f"drops/{n - i}": X + i for i in range(1, n + 1)}
    assert list(got) == list(expected)
    assert_close(with_mode(got, "primal"), expected)


def test_a_layer_and_the_same_with_other_weights():
    """Both are that layer, also beside one like it that nothing calls."""
    pair = [eqx.nn.Linear(3, 3, key=key) for key in jr.split(jr.key(0))]

    def fn(pair, x):
        return jax.tree.map(lambda a: 2 * a, pair[0])(pair[0](x))

    _, got = S(fn, capture=True)(pair, X)
    first = pair[0](X)
    twice = 2 * (pair[0].weight @ first + pair[0].bias)
    assert list(got) == ["pair/0"]
    assert_close(got["pair/0"]["primal"], (first, twice))


def test_what_is_made_of_an_array_that_is_called_like_its_field():
    """The array alone is no module: what is made of it is called by its class."""

    class Weighted(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return self.weight * x

    for fn, args in (
        (lambda weight, x: Weighted(weight)(x), (X, X)),
        ((lambda weight: lambda x: Weighted(weight)(x))(2 * X), (X,)),
    ):
        out, got = S(fn, capture=True)(*args)
        assert list(got) == ["Weighted"]
        assert_close(got["Weighted"]["primal"], out)


def test_an_object_around_a_module_has_the_place_of_it():
    """As a decorator does that is a class, with what it calls in `__wrapped__`."""

    class Decorated:
        def __init__(self, fn):
            self.__wrapped__ = fn

        def __call__(self, x):
            return self.__wrapped__(x)

    net = Decorated(eqx.nn.Linear(3, 3, key=jr.key(0)))
    assert list(S(lambda x: net(x), capture=True)(X)[1]) == ["net"]
    assert list(S(net, capture=True)(X)[1]) == ["."]


# --- no two things share a name, whatever the keys are ---
class Scale(eqx.Module):
    """Its weight may be that of another one, too."""

    weight: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return self.weight.sum() * x + self.bias.mean()

    def enc(self, x):
        return self.weight.sum() * x - self.bias.mean()


def _functions_of_one_name():
    def make(n):
        @jax.jit
        def forward(x):
            return n * x

        return forward

    return make(5.0), make(7.0)


_KEYS = ["a", "b", "a/b", "b/a", "a/b/a", "a.enc", "b.inputs", "a/b.enc", "0", "2"]
_KEYS += ["a/2", "", "''", "a#1", "a.0", "a/forward", "forward", "Scale"]
_TWO_FUNCTIONS = _functions_of_one_name()


def _tree(rng, weights, depth=2):
    """With layers at its leaves, some of them tied, or stacks of two."""
    if depth and rng.random() < 0.8:
        keys = rng.sample(_KEYS, rng.randint(2, 5))
        return {key: _tree(rng, weights, depth - 1) for key in keys}
    array = lambda: jnp.array([rng.gauss(0, 1) for _ in range(3)])
    if rng.random() < 0.4:
        return _stacked([Scale(array(), array()) for _ in range(2)])
    weights.append(rng.choice([array(), *weights]))
    return Scale(weights[-1], array())


def _leaves(tree, path=()):
    for key in sorted(tree):
        x = tree[key]
        yield from _leaves(x, (*path, key)) if type(x) is dict else [((*path, key), x)]


def _calls(rng, tree):
    """Where each call is, the layer, and how it is called."""
    for path, x in _leaves(tree):
        if x.weight.ndim == 1:
            yield path, lambda x: x, "__call__"
            yield path, lambda x: x, "enc"
            continue
        for i in range(2):
            cut = lambda a, i=i: a[i]
            yield path, lambda x, c=cut: jax.tree.map(c, x), f"/{i}"
        rows = lambda a, i=rng.randrange(3): a[:, i]
        yield path, lambda x, c=rows: jax.tree.map(c, x), "rows"
    for i in range(2):
        yield (), None, i


def _run(calls, tree, mark=lambda i, y: y):
    """Each call with an input of its own, and marked by hand."""
    total = 0.0
    for i, (path, take, how) in calls:
        x = X + i / 10
        if take is None:
            y = _TWO_FUNCTIONS[how](x)
        else:
            layer = tree
            for key in path:
                layer = layer[key]
            layer = take(layer)
            y = layer.enc(x) if how == "enc" else layer(x)
        total = total + jnp.sin(mark(i, y)).sum()
    return total


@pytest.mark.parametrize("seed", range(8))
def test_no_two_things_share_a_name(seed):
    rng = random.Random(seed)
    tree, weights = {}, []
    while not 3 < sum(1 for _ in _leaves(tree)) < 16:
        tree = {key: _tree(rng, weights) for key in rng.sample(_KEYS, 3)}
    calls = list(enumerate(_calls(rng, tree)))
    rng.shuffle(calls)
    options = dict(capture=(True, *_TWO_FUNCTIONS), methods=("__call__", "enc"))
    options |= dict(inputs=seed % 2 == 0)
    run = lambda tree, chosen=calls: _run(chosen, tree)
    outs = {}
    _run(calls, tree, lambda i, y: outs.setdefault(i, y))
    wrap = (eqx.filter_jit, eqx.filter_checkpoint, lambda f: f)[seed % 3]
    _, got = S(wrap(run), **options)(tree)

    # There is a name for each call, and it has the value of that.
    names, of_inputs = {}, {}
    for name, value in with_mode(got, "primal").items():
        if isinstance(value, tuple) and isinstance(value[1], dict):
            of_inputs[round(10 * float(value[0][0][0] - X[0]))] = name
        else:
            (i,) = [i for i, y in outs.items() if jnp.allclose(y, value, atol=1e-6)]
            names[i] = name
    assert names.keys() == outs.keys()
    assert of_inputs.keys() == (outs.keys() if options["inputs"] else set())
    assert len(got) == len(names) + len(of_inputs)

    # It does not depend on what else is called, or before.
    is_layer = lambda call: str(call[1][2])[0] == "/"
    some = [c for c in calls if is_layer(c) or rng.random() < 0.3]
    _, fewer = S(lambda tree: run(tree, some), **options)(tree)
    assert {names[i] for i, _ in some} == fewer.keys() - set(of_inputs.values())

    # What is planted there changes that call alone.
    factor = {i: 1 + 0.1 * i for i in names}
    values = {name: (lambda y, i=i: factor[i] * y) for i, name in names.items()}
    planted = plant(run, values, **options)(tree)
    assert_close(planted, _run(calls, tree, lambda i, y: factor[i] * y), atol=1e-3)

    # It is the path, unless something else reads like a part of that.
    nodes = {path[:n] for path, _ in _leaves(tree) for n in range(len(path) + 1)}
    reads = Counter("/".join(key or "''" for key in ("tree", *node)) for node in nodes)
    for i, (path, _, how) in calls:
        keys = ["tree", *(key or "''" for key in path)]
        parts = ["/".join(keys[: n + 1]) for n in range(len(keys))]
        if how == "__call__" and all(reads[part] == 1 for part in parts):
            assert names[i] == parts[-1]


# --- which entries are layers ---
class Any(eqx.Module):
    """Runs whatever shape it has."""

    w: jax.Array

    def __call__(self):
        return jnp.sum(self.w)


def _view(rng, ndim):
    """A random way to look at an array, which NumPy has, too."""
    kind = rng.choice(["entry", "entry", "move", "swap", "flat", "times", "cast"])
    axis, other, i = rng.randrange(ndim), rng.randrange(ndim), rng.randrange(2)
    if kind == "entry" and ndim > 1:
        index = (*[slice(None)] * axis, i)
        if rng.random() < 0.5:
            return lambda np, a: a[index]
        return lambda np, a: np.take(a, i, axis=axis)
    if kind == "move":
        return lambda np, a: np.moveaxis(a, axis, other)
    if kind == "swap":
        return lambda np, a: np.swapaxes(a, axis, other)
    if kind == "flat":
        return lambda np, a: a.reshape(-1).reshape(a.shape)
    if kind == "cast":
        return lambda np, a: a.astype("float16").astype("float32")
    return lambda np, a: a * np.ones((), "float32")


def _layer_of(views, shape):
    """The indices along the first axes at which all entries are that are left."""
    tags = np.stack(np.indices(shape), -1).reshape(-1, len(shape))
    left = np.arange(len(tags), dtype="float32").reshape(shape)
    for view in views:
        left = view(np, left)
    there = tags[left.astype(int).reshape(-1)]
    same = [len(set(axis)) == 1 for axis in there.T]
    return tuple(map(int, there[0][: [*same, False].index(False)]))


@pytest.mark.parametrize("seed", range(12))
def test_a_layer_is_an_entry_along_the_first_axes(seed):
    """Also of a cube, whose shape says nothing; and in a vmap, over any axis."""
    rng = random.Random(seed)
    for _ in range(6):
        shape = rng.choice([(3, 3, 3), (2, 3, 2), (3, 2), (2, 2, 3, 3)])
        views, ndim = [], len(shape)
        for _ in range(rng.randint(1, 5)):
            views.append(_view(rng, ndim))
            ndim = views[-1](np, np.zeros((3,) * ndim)).ndim
        lanes = rng.choice([None, None, *range(len(shape) + 1)])

        def run(b, views=views):
            w = b.w
            for view in views:
                w = view(jnp, w)
            return eqx.tree_at(lambda b: b.w, b, w)()

        way = (lambda f: f, jax.jit, jax.checkpoint, jax.grad)[rng.randrange(4)]
        w = jr.normal(jr.key(seed), shape)
        fn = way(run)
        if lanes is not None:
            fn, w = jax.vmap(fn, lanes), jnp.stack([w, w], lanes)
        _, got = S(fn, capture=True)(Any(w))
        expected = "/".join(map(str, ("b", *_layer_of(views, shape))))
        assert list(got) == [expected], (shape, lanes)


def _taken(cut):
    def fn(b, x):
        return jax.tree.map(lambda a: cut(a) if eqx.is_array(a) else a, b)(x)

    return fn


@under("eager", "filter_jit", "filter_checkpoint")
def test_a_stack_along_another_axis(wrap):
    """Static fields say which axis it is, or else it is not known."""
    make = lambda key: eqx.nn.Linear(3, 5, key=key)
    keys = jr.split(jr.key(0), 4)
    for axis in (0, 1, -1):
        stack = eqx.filter_vmap(make, out_axes=axis)(keys)
        fn = wrap(_taken(lambda a, axis=axis: jnp.take(a, 2, axis=axis)))
        _, got = S(fn, capture=True)(stack, X)
        assert list(got) == ["b/2"]
        assert_close(got["b/2"]["primal"], make(keys[2])(X))
        flat = lambda a: a.reshape(a.shape[0], -1).reshape(a.shape)
        for cut in (
            lambda a, axis=axis: jnp.moveaxis(a, axis, 0)[2],
            lambda a, axis=axis: jnp.take(flat(a), 2, axis=axis),
        ):
            assert list(S(wrap(_taken(cut)), capture=True)(stack, X)[1]) == ["b/2"]
    # Row 2 of each layer of a stack.
    stack = eqx.filter_vmap(make)(keys)
    for row in (lambda a: a[:, 2], lambda a: jnp.swapaxes(a, 0, 1)[2]):
        assert list(S(wrap(_taken(row)), capture=True)(stack, X)[1]) == ["b"]
    # Of as many layers as each has inputs and outputs.
    square = lambda key: eqx.nn.Linear(3, 3, key=key)
    for axis in (0, 1):
        stack = eqx.filter_vmap(square, out_axes=axis)(keys[:3])
        for cut, name in ((lambda a: a[2], "b/2"), (lambda a: a[:, 2], "b")):
            assert list(S(wrap(_taken(cut)), capture=True)(stack, X)[1]) == [name]


def test_modules_that_are_made_of_what_is_computed():
    """Those of one array are one module, also if it is in another shape."""

    class Flat(eqx.Module):
        w: jax.Array

        def __call__(self, x):
            return self.w.reshape(-1) * x

    def runs(fn, x):
        _, got = S(fn, capture=Flat, reduce=Append())(x)
        return {name: len(entry["primal"]) for name, entry in got.items()}

    def moved(x):
        w = jnp.cos(x)
        return Flat(w.reshape(2, 2))(Flat(w)(x))

    def changed(x):
        return Flat(jnp.sin(x))(Flat(jnp.cos(x))(x))

    def concatenated(x):
        sines = jnp.sin(x[2:])
        w = jnp.concatenate([jnp.cos(x[:2]), sines])
        other = jnp.concatenate([x[:2], sines])
        return Flat(w.reshape(2, 2))(Flat(other)(Flat(w)(x)))

    x = jnp.ones(4)
    assert runs(moved, x) == {"Flat": 2}
    assert runs(changed, x) == {"Flat": 1, "Flat#1": 1}
    assert runs(concatenated, x) == {"Flat": 2, "Flat#1": 1}


def test_a_layer_of_a_stack_of_stacks():
    """Its numbers are in the order of the axes, whichever is taken first."""
    make = eqx.filter_vmap(eqx.filter_vmap(lambda key: eqx.nn.Linear(3, 5, key=key)))
    stacks = make(jr.split(jr.key(0), (2, 4)))
    expected = jax.tree.map(lambda a: a[1, 2], stacks)(X)
    for cut in (
        lambda a: a[1, 2],
        lambda a: a[1][2],
        lambda a: a[:, 2][1],
        lambda a: jnp.swapaxes(a, 0, 1)[2][1],
        lambda a: jax.lax.index_in_dim(a, 2, 1, keepdims=False)[1],
        lambda a: a.reshape(*a.shape[:2], -1).reshape(a.shape)[1, 2],
        lambda a: a.reshape(2, -1).reshape(a.shape)[1][2],
        lambda a: a.reshape(2, 4, -1)[1, 2].reshape(a.shape[2:]),
        lambda a: jnp.split(a, 4, 1)[2][1, 0],
    ):
        saved = S(_taken(cut), capture=True)
        assert list(saved.eval_shape(stacks, X)[1]) == ["b/1/2"]
    assert_close(saved(stacks, X)[1]["b/1/2"]["primal"], expected)
    # Of one stack with one layer.
    one = make(jr.split(jr.key(0), (1, 1)))
    for cut in (
        lambda a: jnp.take(jnp.take(a, 0, axis=0), 0, axis=0),
        lambda a: jnp.take(a, 0, axis=1)[0],
    ):
        _, got = S(_taken(cut), capture=True).eval_shape(one, X)
        assert list(got) == ["b/0/0"]


def test_a_layer_of_a_stack_of_stacks_by_one_array_of_indices():
    """It is layer 1 of stack 1, and has both numbers or none, but not one of them."""
    make = eqx.filter_vmap(eqx.filter_vmap(lambda key: eqx.nn.Linear(3, 5, key=key)))
    stacks = make(jr.split(jr.key(0), (2, 4)))

    def cut(a):
        # What `a[1, 1]` makes, but for the indices, which are one number, broadcast.
        behind = tuple(range(a.ndim - 2))
        dims = jax.lax.GatherDimensionNumbers(behind, (0, 1), (0, 1))
        sizes = 1, 1, *a.shape[2:]
        return jax.lax.gather(a, jnp.full(2, 1), dims, sizes, mode="clip")

    (name,), (entry,) = zip(*S(_taken(cut), capture=True)(stacks, X)[1].items())
    assert name in ("b", "b/1/1")
    assert_close(entry["primal"], jax.tree.map(lambda a: a[1, 1], stacks)(X))


def test_layers_of_a_list_that_are_transposed_in_a_loop():
    layers = [eqx.nn.Linear(3, 3, use_bias=False, key=jr.key(i)) for i in range(2)]

    def fn(layers, x):
        step = lambda x, layer: (jax.tree.map(jnp.transpose, layer)(x), None)
        joined = lambda *arrays: jnp.concatenate([a[None] for a in arrays])
        return jax.lax.scan(step, x, jax.tree.map(joined, *layers))[0]

    _, got = S(fn, capture=True)(layers, X)
    first = layers[0].weight.T @ X
    assert_close(
        got["layers/*"]["primal"], jnp.stack([first, layers[1].weight.T @ first])
    )


def test_a_block_of_a_matrix_is_no_layer():
    """As of tensor parallelism: there are four blocks of rows, and four columns."""
    linear = eqx.nn.Linear(4, 8, use_bias=False, key=jr.key(0))

    def fn(m, x):
        split = lambda a: a.reshape(4, 2, *a.shape[1:])[1]
        return jax.tree.map(split, m)(x)

    _, got = S(fn, capture=True)(linear, jnp.ones(4))
    assert_close(dict(got), {"m": {"primal": linear(jnp.ones(4))[2:4]}})


# --- what a scan has stacked, and another one takes apart ---
class Wave(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return jnp.sin(self.w * x)


WAVES = [Wave(jnp.linspace(0.5, 1.2, 3) + 0.1 * i) for i in range(2)]


def _loop(step, x, n, kind):
    going_on, both = lambda c: c[1] < n, lambda c: (step(c[0]), c[1] + 1)
    return eqxi.while_loop(going_on, both, (x, 0), max_steps=n + 1, kind=kind)[0]


def _each_in_a_loop(layers, x, changed):
    """Each of some layers three times, in a loop whose backward pass computes again."""
    for layer in layers:
        x = _loop(changed(layer), x, 3, "checkpointed")
    return x


def _over_layers(stack, x, changed):
    step = lambda x, layer: (_each_in_a_loop([layer], x, changed), None)
    return jax.lax.scan(step, x, stack)[0]


def _smaller(layer):
    return jax.tree.map(lambda w: 0.9 * w, layer)


# A model, how it is called, and the names of its layers.
REPEATED = {
    "a module": (WAVES[0], lambda m, *more: _each_in_a_loop([m], *more), ["m"]),
    "a list": (WAVES, _each_in_a_loop, ["m/0", "m/1"]),
    "a stack": (_stacked(WAVES), _over_layers, ["m/*"]),
    "one of a stack": (
        _stacked(WAVES),
        lambda m, *more: _each_in_a_loop([jax.tree.map(lambda a: a[1], m)], *more),
        ["m/1"],
    ),
}


def _if_positive(step):
    return lambda x: jax.lax.cond(x[0] > 0, step, lambda x: x, x)


@pytest.mark.sample(8)
@pytest.mark.parametrize("kind", ["scan", "bounded"])
@pytest.mark.parametrize("branch", [lambda step: step, _if_positive], ids=["", "cond"])
@pytest.mark.parametrize("changed", [lambda m: m, _smaller], ids=["", "changed"])
@pytest.mark.parametrize("model", REPEATED)
def test_copies_of_weights_for_a_backward_pass_are_no_stack(
    kind, branch, changed, model
):
    """The loop around keeps the weights for each of its iterations: they are a stack of
    layers only if they came apart in the forward pass."""
    m, call, names = REPEATED[model]
    layers = list(map(changed, WAVES))
    layers = layers[1:] if names == ["m/1"] else layers[: 1 + (names != ["m"])]

    def fn(x):
        step = branch(lambda x: call(m, x, changed))
        if kind == "bounded":
            return jnp.sum(_loop(step, x, 2, kind))
        return jnp.sum(jax.lax.scan(lambda x, _: (step(x), None), x, length=2)[0])

    def unrolled(mark, x):
        for i in range(2):
            for k, layer in enumerate(layers):
                x = mark(layer(layer(layer(x))), f"{i}/{k}")
        return jnp.sum(x)

    def by_name(values):
        # The last of the three calls, in each iteration of the loop around.
        each = [jnp.stack([values[f"{i}/{k}"] for i in range(2)]) for k in (0, 1)[:n]]
        return dict(zip(names, each if len(names) == n else [jnp.stack(each, 1)]))

    x, n = jnp.array([0.3, 0.6, 0.9]), len(layers)
    _, forward = S(fn, capture=Wave)(x)
    _, got = S(jax.grad(fn), capture=Wave)(x)
    assert list(forward) == list(got) == names
    # A bounded loop has more iterations than it needs.
    cut = lambda mode: {k: v[:2] for k, v in with_mode(got, mode).items()}
    assert_close(cut("primal"), by_name(primals(unrolled, x)))
    assert_close(cut("cotangent"), by_name(cotangents(unrolled, x)))


@pytest.mark.parametrize(
    "step, name",
    [
        (lambda m, _: (m, m), "m"),
        (lambda m, _: (jax.tree.map(lambda w: 0.9 * w, m), m), "m"),
        (lambda m, layer: (m, jax.tree.map(lambda w: 0.9 * w, layer)), "stack/*"),
    ],
    ids=["copies", "a carry", "layers"],
)
@pytest.mark.parametrize("derive", [False, True])
def test_what_a_scan_has_stacked(step, name, derive):
    """Modules that one scan stacks have the names in the next one that they have in
    the first."""

    def fn(x, m, stack):
        _, every = jax.lax.scan(step, m, stack)
        return jnp.sum(jax.lax.scan(lambda x, m: (m(x), None), x, every)[0])

    model, stack = WAVES[0], _stacked(WAVES)
    _, every = jax.lax.scan(step, model, stack)
    x = jnp.array([0.3, 0.6, 0.9])
    first = jnp.sin(every.w[0] * x)
    want = [first, jnp.sin(every.w[1] * first)]
    _, got = S(jax.grad(fn) if derive else fn, capture=Wave)(x, model, stack)
    assert_close(with_mode(got, "primal"), {name: jnp.stack(want)})


# --- what reads alike, in places that no tree has ---
class Net(eqx.Module):
    net: Scale

    def __call__(self, net, x):
        return self.net(net(x))


class Holder:
    net = Scale(jnp.ones(3), jnp.zeros(3))

    def __init__(self):
        self.net = Scale(2 * jnp.ones(3), jnp.zeros(3))


class Inputs(eqx.Module):
    scale: Scale

    def inputs(self, x):
        return self.scale(x)

    def __call__(self, x):
        return self.inputs(x)


class Outer(eqx.Module):
    Scale: Scale

    def __call__(self, x):
        return Scale(jnp.arange(3.0), jnp.ones(3))(self.Scale(x))


def _scales(n=4):
    return [Scale(jr.normal(jr.key(i), (3,)), jnp.ones(3)) for i in range(n)]


_UNSORTED = dict(zip((1, "1"), _scales()))
_HOLDER = Holder()
_FORWARD, _OTHER = _TWO_FUNCTIONS
READ_ALIKE = {
    "keys of a variable": (
        lambda x: _UNSORTED["1"](_UNSORTED[1](x)),
        (X,),
        {},
        ["_UNSORTED/1", "_UNSORTED/1#1"],
    ),
    "arguments of a partial": (
        lambda p, x: p(x),
        (eqx.Partial(Net(_scales()[0]), _scales()[1]), X),
        {},
        ["p/net#1", "p/net", "p"],
    ),
    "an attribute of the class": (
        lambda x: _HOLDER.net(type(_HOLDER).net(x)),
        (X,),
        {},
        ["_HOLDER/net#1", "_HOLDER/net"],
    ),
    "a method, and what went in": (
        Inputs(_scales()[0]),
        (X,),
        dict(methods=("__call__", "inputs"), inputs=True, names=".inputs*"),
        [".inputs", ".inputs.inputs", ".inputs#1"],
    ),
    "a class, and a field": (
        Outer(_scales()[0]),
        (X,),
        {},
        ["Scale", "Scale#1", "."],
    ),
    "functions, the second first": (
        lambda x: _FORWARD(_OTHER(x)),
        (X,),
        dict(capture=_TWO_FUNCTIONS),
        ["forward#1", "forward"],
    ),
    "functions, the other way round": (
        lambda x: _FORWARD(_OTHER(x)),
        (X,),
        dict(capture=_TWO_FUNCTIONS[::-1]),
        ["forward", "forward#1"],
    ),
    "a function, and a module": (
        lambda forward, x: _FORWARD(forward(x)),
        (_scales()[0], X),
        dict(capture=(Scale, _FORWARD)),
        ["forward", "forward#1"],
    ),
}


@under("eager", "filter_jit")
@pytest.mark.parametrize("case", READ_ALIKE.values(), ids=READ_ALIKE)
def test_what_reads_alike(case, wrap):
    fn, args, options, expected = case
    options = {"capture": True, **options}
    assert list(S(wrap(fn), **options)(*args)[1]) == expected


def test_what_is_in_a_place_that_reads_alike():
    """Its name begins with that: as of layers of a stack, and of marks in modules."""
    trees = {"a": {"b": _stacked(_scales(3))}, "a/b": _stacked(_scales(3)[::-1])}

    def fn(m, x):
        step = lambda x, layer: (layer(x), None)
        x, _ = jax.lax.scan(step, x, m["a/b"])
        return jax.lax.scan(step, x, m["a"]["b"])[0]

    names = ["m/a/b#1/1", "m/a/b/1", "m/a/b#1/*"]
    _, got = S(fn, capture=True, names=names)(trees, X)
    assert set(got) == set(names)
    x = _scales(3)[2](X)
    assert_close(got["m/a/b#1/1"]["primal"], _scales(3)[1](x))
    _, got = S(lambda m, x: m["a"]["b"](m["a/b"](x)), scope=True)(
        {"a": {"b": Marked()}, "a/b": Marked()}, X
    )
    assert list(got) == ["m/a/b#1/h", "m/a/b/h"]


class Marked(eqx.Module):
    def __call__(self, x):
        return sow(x + 1, "h")
