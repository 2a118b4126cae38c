"""`compare`."""

import copy
import enum
import functools as ft
import io
import json
import pickle
import random
import re

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from eqx_sow import (
    Append,
    Call,
    compare,
    Comparison,
    Intermediates,
    plant,
    save_intermediates as S,
    sow,
    SowError,
    summarize,
    tabulate,
    UnknownSowError,
)
from eqx_sow._results import difference as module
from jax.sharding import NamedSharding, PartitionSpec as P

from .tables import pick


pytestmark = pytest.mark.sample(1)


X = jnp.array([0.3, -1.2, 0.7])


class Block(eqx.Module):
    attn: eqx.nn.Linear
    mlp: eqx.nn.Linear

    def __init__(self, key):
        a, b = jr.split(key)
        self.attn, self.mlp = eqx.nn.Linear(3, 3, key=a), eqx.nn.Linear(3, 3, key=b)

    def __call__(self, x):
        return jnp.sin(self.mlp(jnp.tanh(self.attn(x))))


class Stack(eqx.Module):
    blocks: Block

    def __call__(self, x):
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        step = lambda x, block: (eqx.combine(block, static)(x), None)
        return lax.scan(step, x, arrays)[0].sum()


class List(eqx.Module):
    blocks: list[Block]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x.sum()


BLOCKS = eqx.filter_vmap(Block)(jr.split(jr.key(0), 4))
# The third of four layers has another bias.
WRONG = eqx.tree_at(lambda b: b.mlp.bias, BLOCKS, replace_fn=lambda b: b.at[2].add(1))


def _in_list(blocks):
    at = lambda i: jax.tree.map(lambda a: a[i] if eqx.is_array(a) else a, blocks)
    return List([at(i) for i in range(4)])


def _save(model, transform=None, of=None, **options):
    options = dict(capture=eqx.nn.Linear, transform=of, **options)
    saved = S(eqx.filter_grad(lambda m, x: m(x)), **options)
    return (transform or (lambda f: f))(saved)(model, X)[1]


@pytest.mark.parametrize("transform", [None, eqx.filter_jit])
def test_finds_the_layer_in_a_list_and_in_a_stack(transform):
    lists = _save(_in_list(WRONG), transform), _save(_in_list(BLOCKS), transform)
    stacks = _save(Stack(WRONG), transform), _save(Stack(BLOCKS), transform)
    layer = "m/blocks/2/mlp", "primal"
    table = compare(*lists)
    assert table.first == layer
    assert compare(lists[0], stacks[1]).first == layer
    assert (
        compare(stacks[0], lists[1]) == table == compare(*[x.unstack() for x in stacks])
    )
    # It is the first in time, though `attn` of the next layer stands above. What is
    # counted is that layer's.
    of_stacks = compare(*stacks)
    assert of_stacks.first == layer
    row = lambda table: [x.split() for x in table.splitlines() if x.endswith("first")]
    assert row(of_stacks) == row(table)
    for right in (lists[1], stacks[1]):
        assert compare(stacks[1], right).first is None


def _of_no_axes(stack, tmp_path):
    """What a file, or a user's own dict, has of a stack."""
    file = tmp_path / "stack.npz"
    np.savez(file, **stack.flat())
    text = json.loads(
        json.dumps({k: np.asarray(x).tolist() for k, x in stack.flat().items()})
    )
    return [dict(stack), stack.flat(), np.load(file), text]


@pytest.mark.parametrize(
    "transform", [None, summarize, lambda h: {"h": h, "n": (h[0], 1)}]
)
def test_a_stack_of_no_known_axes_is_compared_with_a_list(transform, tmp_path):
    layer = ("m/blocks/2/mlp", "primal")
    right, wrong = (_save(_in_list(x), of=transform) for x in (BLOCKS, WRONG))
    for given in _of_no_axes(_save(Stack(WRONG), of=transform), tmp_path):
        assert (
            compare(given, wrong).first is None and compare(wrong, given).first is None
        )
        assert compare(given, wrong.flat()).first is None
        for table in (compare(given, right), compare(right, given)):
            # The rows are those of the lists, one for each leaf.
            assert table.first == layer and "Only in" not in table
            assert "m/blocks/3/mlp" in table


@pytest.mark.parametrize("n", [3, 4])
def test_the_axis_of_layers_is_found_by_lengths(n, tmp_path):
    """With a `vmap` around, it is behind the lanes."""
    over = lambda model: S(jax.vmap(model), capture=eqx.nn.Linear)(jnp.ones((n, 3)))[1]
    stack, layers = over(Stack(BLOCKS)), over(_in_list(BLOCKS))
    for given in _of_no_axes(stack, tmp_path):
        for pair in ((given, layers), (layers, given)):
            if n != 4:
                assert compare(*pair).first is None
                continue
            said = r"'blocks/\*/attn', .*\[4,4,3\], is compared with .* save `inter"
            with pytest.raises(SowError, match=said):
                compare(*pair)
    for pair in ((stack.unstack().flat(), layers), (layers, stack.unstack().flat())):
        assert compare(*pair).first is None


def test_the_names_that_are_to_be_changed_are_of_the_same_layers():
    layers = {"x": X, **{f"blocks/{i}/mlp": X for i in range(4)}}
    stack = {"y": X, "m/blocks/*/mlp": jnp.stack([X] * 4)}
    for pair, said in (
        ((layers, stack), "'blocks/*/mlp': reference['m/blocks/*/mlp']"),
        ((stack, layers), "'m/blocks/0/mlp': reference['blocks/0/mlp']"),
    ):
        with pytest.raises(UnknownSowError, match=re.escape(f"`{{{said}}}`")):
            compare(*pair)
    renamed = {"blocks/*/mlp": stack["m/blocks/*/mlp"]}
    assert compare(layers, renamed).first is None


@pytest.mark.parametrize("with_input", [False, True])
def test_a_stack_is_compared_with_some_layers_of_another_library(with_input):
    """A port has the outputs of the blocks, and not of what is in these."""
    run = lambda m, x: m(sow(x, "x"))
    _, mine = S(run, capture=True)(Stack(WRONG), X)
    _, right = S(run, capture=Block)(_in_list(BLOCKS), X)
    port = {
        n: np.asarray(x) for n, x in right.primals.items() if with_input or n != "x"
    }
    assert compare(mine, port).first == ("m/blocks/2", "primal")
    assert compare(port, mine).first == ("m/blocks/2", "primal")


def test_cotangents_go_backward():
    def f(scale, x):
        for i in range(4):
            x = sow(jnp.sin(x * (scale if i == 2 else 1)), f"h{i}")
        return x.sum()

    save = lambda scale, **o: S(jax.grad(f, 1), **o)(scale, X)[1]
    assert compare(save(1.1), save(1.0)).first == ("h2", "primal")
    only = [save(scale, modes="cotangent") for scale in (1.1, 1.0)]
    assert compare(*only).first == ("h2", "cotangent")
    # The last that is the same is the last layer.
    assert compare(only[0], only[0]).first is None


def _rows(table):
    lines = table.split("\n\n")[0].splitlines()[2:]
    return [line.split() for line in lines]


def _by_hand(x, y, rtol, atol):
    x, y = (np.asarray(z).astype(np.complex128) for z in (x, y))
    both = np.isfinite(x) & np.isfinite(y)
    beyond = ~both & ~((x == y) | (np.isnan(x) & np.isnan(y)))
    x, y = x[both], y[both]
    far = abs(x - y) > atol + rtol * abs(y)
    norms = np.linalg.norm(x), np.linalg.norm(y)
    return (
        abs(x - y).max(),
        norms[0] / norms[1] - 1,
        np.vdot(y, x).real / norms[0] / norms[1],
        beyond.sum() + far.sum(),
    )


def _near(x, scale=0.01):
    return x * (1 + scale * np.random.default_rng(1).normal(size=x.shape))


N = np.random.default_rng(0).normal(size=(8, 700))
PAIRS = {
    "float32": (_near(N).astype("f"), N.astype("f")),
    "float64 of the host": (_near(N).astype("f"), N),
    "bfloat16": (jnp.asarray(N, jnp.bfloat16), jnp.asarray(N, jnp.float32)),
    "complex": ((_near(N) + 1j * N).astype("F"), (N + 1j * N).astype("F")),
    "integers": (np.arange(9) * 100, np.arange(9) * 100 + (np.arange(9) == 4)),
    "booleans": (N > 0, N > 0.1),
    "not finite": (
        np.where(N > 1, np.nan, np.where(N < -2, np.inf, N)).astype("f"),
        np.where(N > 1.1, np.nan, np.where(N < -2, np.inf, N)).astype("f"),
    ),
    "another infinity": (
        np.float32([1, np.inf, -np.inf]),
        np.float32([1, np.inf, np.inf]),
    ),
    "huge": (_near(3e37 * N).astype("f"), (3e37 * N).astype("f")),
}


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_numbers_are_right(pair, where, monkeypatch):
    if where == "device":
        # As if it were not one that can be read.
        monkeypatch.setattr(module, "can_be_read", lambda x: False)
        monkeypatch.setattr(module, "_beside", lambda x, other: jnp.asarray(x))
        pair = tuple(map(jnp.asarray, pair))
    a, b = pair
    table = compare({"h": a}, {"h": b}, rtol=0.01, atol=1e-4)
    exact = all(x.dtype.kind in "ib" for x in pair)
    tolerance = (0, 0) if exact else (0.01, 1e-4)
    largest, norm, cosine, beyond = _by_hand(a, b, *tolerance)
    (row,) = table.splitlines()[2:]
    numbers = row.split("]")[-1].split()
    assert float(numbers[0]) == pytest.approx(largest, rel=6e-3)
    assert float(numbers[1]) == pytest.approx(norm, rel=0.06, abs=2e-7)
    assert float(numbers[2]) == pytest.approx(cosine, abs=6e-6)
    assert (numbers[3] == f"{beyond}/{a.size}") if beyond else len(numbers) == 3
    assert table.first == (("h", "primal") if beyond else None)
    if a.dtype != b.dtype:
        assert " / " in row


# Two that are not the same, though in float32 or in float64 they would be.
CLOSE = {
    "int32": (jnp.int32([2**24 + 1, 1]), jnp.int32([2**24, 1])),
    "uint32": (jnp.uint32([2**32 - 1]), jnp.uint32([2**32 - 2])),
    "two signs": (jnp.int32([-1]), jnp.uint32([2**32 - 1])),
    "int8": (jnp.int8([-1]), jnp.uint8([255])),
    "int64 of the host": (jnp.int32([1, 5]), np.int64([2**32 + 1, 5])),
    "int64": (np.int64([2**53 + 1]), np.int64([2**53])),
    "uint64": (np.uint64([2**64 - 1]), np.int64([-1])),
    "a Python number": (2**53 + 1, 2**53),
    "booleans": (jnp.array([True, False]), jnp.array([True, True])),
    "integers and floats": (jnp.int32([2**24 + 1]), jnp.float32([2**24])),
    "float64 of the host": (jnp.float32([0.1]), np.float64([0.1])),
    "larger than any": (jnp.float32([np.inf]), np.float64([1e300])),
}


def _not_readable(monkeypatch):
    """JAX's arrays, as on an accelerator."""
    is_ours = lambda x: isinstance(x, jax.Array)
    one = lambda value: not any(map(is_ours, jtu.tree_leaves(value)))
    monkeypatch.setattr(module, "can_be_read", one)


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("pair", CLOSE.values(), ids=CLOSE)
def test_nothing_is_rounded(pair, where, monkeypatch):
    if where == "device":
        _not_readable(monkeypatch)
    exact = {"rtol": 0, "atol": 0}
    for a, b in (pair, pair[::-1]):
        table = compare({"h": a}, {"h": b}, **exact)
        (row,) = table.splitlines()[2:]
        assert table.first == ("h", "primal") and f" 1/{np.size(a)}" in row
        assert (
            float(row.split("]")[-1].split()[0]) > 0 or pair is CLOSE["larger than any"]
        )
        for x in (a, b):
            assert compare({"h": x}, {"h": x}, **exact).first is None
            same = (
                np.asarray(x).astype({"i": "i8", "f": "f8"}.get(x.dtype.kind))
                if (hasattr(x, "dtype") and x.dtype.kind in "if")
                else x
            )
            assert compare({"h": x}, {"h": same}, **exact).first is None
    # Of integers, tolerances mean nothing.
    if not any(jnp.issubdtype(np.asarray(x).dtype, jnp.floating) for x in pair):
        assert compare({"h": a}, {"h": b}, rtol=10, atol=1e6).first is not None


@pytest.mark.parametrize("type_", ["Auto", "Explicit"])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("pair", ["not finite", "booleans"])
def test_sharded(pair, type_, which, monkeypatch):
    """In one of the two, or in both in other ways; read in place, or where it is."""
    types = (getattr(jax.sharding.AxisType, type_),)
    mesh = jax.make_mesh((4,), ("d",), axis_types=types, devices=jax.devices()[:4])
    a, b = map(jnp.asarray, PAIRS[pair])
    if pair == "booleans":
        # Of two signs, so that no type of 32 bits has both.
        a, b = a.astype(jnp.int32) - 1, b.astype(jnp.uint32)
    want = compare({"h": a}, {"h": b})
    if which in (0, 2):
        a = jax.device_put(a, NamedSharding(mesh, P("d")))
    if which in (1, 2):
        b = jax.device_put(b, NamedSharding(mesh, P(None, "d")))
    assert compare({"h": a}, {"h": b}) == want
    sharded = lambda x: len(getattr(x, "devices", set)()) > 1
    one = lambda pair: not any(map(sharded, jtu.tree_leaves(pair)))
    monkeypatch.setattr(module, "can_be_read", one)
    assert compare({"h": a}, {"h": b}) == want


def _values(x, static="text"):
    sow(jr.key(0), "key")
    h = sow({"a": x, "b": (x[:2], static), "n": jnp.arange(3)}, "tree")["a"]
    h = lax.cond(h[0] > 0, lambda h: sow(h * 2, "branch"), lambda h: h, h)
    for i in range(3):
        h = sow(h * i, "several")
    return sow(h, "end")


def _saved(x=X, fn=_values, **options):
    return S(fn, reduce={"several": Append()}, **options)(x)[1]


def test_values_of_any_kind():
    same = compare(_saved(), _saved())
    assert same.first is None and "first" not in same.lower()
    names = [line.split()[0] for line in same.splitlines()[2:]]
    assert names[:4] == ["key", "tree['a']", "tree['b'][0]", "tree['n']"]
    assert names[4:6] == ["branch", "count"] and names[6:9] == [
        f"several[{i}]" for i in range(3)
    ]
    changed = compare(_saved(-X), _saved())
    assert changed.first == ("tree", "primal")
    (count,) = [row for row in _rows(changed) if row[0] == "count"]
    assert count[-1] == "1/1"
    other = _saved()
    other["key"]["primal"] = jr.key(1)
    assert compare(_saved(), other, atol=10, rtol=10).first == ("key", "primal")
    del other["key"]
    other["several"]["primal"] = other["several"]["primal"][:2]
    other["end"]["primal"] = jnp.ones((3, 1))
    table = compare(_saved(), other)
    assert table.first == ("several", "primal") and "f32[3] / nothing" in table
    assert "f32[3] / f32[3,1]" in table and "Only in the first: key (primal)" in table


def test_summaries():
    edges = [-1.0, 0.0, 1.0]
    save = lambda x: S(
        lambda x: sow(sow(x, "a") * x, "b"),
        transform=lambda v: summarize(v, edges=edges),
    )(x)[1]
    assert compare(save(X), save(X)).first is None
    # The mean and the rms differ only in what follows.
    assert compare(save(X[::-1]), save(X)).first is None
    assert compare(save(2 * X), save(X)).first == ("a", "primal")
    nothing = jtu.tree_map(lambda x: x * jnp.nan, X)
    assert compare(save(nothing), save(nothing)).first is None
    plain = S(lambda x: sow(x, "a"))(X)[1]
    assert compare(save(X), plain).first == ("a", "primal")


class Tensor:
    """What NumPy can read, as a tensor of PyTorch."""

    dtype = "torch.float32"

    def __init__(self, x):
        self.x = np.asarray(x)

    def __array__(self, dtype=None, copy=None):
        return self.x


def test_plain_mappings():
    got = _save(_in_list(WRONG))
    right = _save(_in_list(BLOCKS)).primals
    for make in (np.asarray, Tensor, lambda x: (Tensor(x),)):
        reference = {name: make(x) for name, x in right.items()}
        table = compare(got, reference)
        assert table.first == ("m/blocks/2/mlp", "primal")
        assert "Only in the first: m/blocks/0/attn (cotangent)" in table
        assert compare(reference, right).first is None
    # A dict may have been sorted: the order is that of the other one.
    assert compare(dict(sorted(got.items())), Intermediates(got)).first is None
    stacked = {
        n: np.stack([right[f"m/blocks/{i}/{n}"] for i in range(4)]) for n in ("mlp",)
    }
    table = compare({"m/blocks/*/mlp": stacked["mlp"]}, _save(Stack(BLOCKS)))
    assert table.first is None


def test_plain_dicts_of_more_than_ten_layers():
    """JAX would have `layers/10` before `layers/2`."""
    right = eqx.nn.MLP(2, 2, 4, 11, key=jax.random.key(0))
    bias = lambda m: m.layers[2].bias
    wrong = eqx.tree_at(bias, right, replace_fn=lambda b: b + 1)
    loss = lambda m, x: jnp.sum(m(x) ** 2)
    saved = S(eqx.filter_grad(loss), capture=eqx.nn.Linear)
    got, want = (saved(m, jnp.ones(2))[1] for m in (wrong, right))
    for make in (
        dict,
        lambda i: i.primals,
        lambda i: {k: dict(v) for k, v in i.items()},
    ):
        assert compare(make(got), make(want)).first == ("m/layers/2", "primal")
    # As in a file. Then cotangents are what they are, too.
    for a, b in [(got.flat(), want.flat()), (got, want.flat()), (got.flat(), want)]:
        assert compare(a, b) == compare(got, want)
        assert (
            compare(a, b).first == compare(got, want).first == ("m/layers/2", "primal")
        )
    several = S(lambda x: sow((x, 2 * x), "h"))(X)[1].flat()
    other = several | {"h/primal/1": X}
    assert compare(several, several).first is None
    assert compare(other, several).first == ("h", "primal")


def test_shapes_only():
    saved = S(_in_list(BLOCKS), capture=eqx.nn.Linear)
    shapes = eqx.filter_eval_shape(saved, X)[1]
    table = compare(shapes, saved(X)[1])
    assert table.first is None and "0.0" not in table
    shapes["blocks/1/mlp"]["primal"] = jax.ShapeDtypeStruct((4,), jnp.float32)
    assert compare(shapes, saved(X)[1]).first == ("blocks/1/mlp", "primal")


def test_is_a_string():
    table = compare(_save(_in_list(WRONG)), _save(_in_list(BLOCKS)))
    assert isinstance(table, str) and type(table) is Comparison
    assert repr(table) == str(table) and "&lt;- first" in table._repr_html_()
    for again in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert again == table and again.first == table.first


def test_nothing_to_compare():
    with pytest.raises(UnknownSowError, match="no name and mode is in both.*'a'.*'b'"):
        compare({"a": X}, {"b": X})
    assert compare({}, {}).first is None
    for a, b, says in (
        (
            {"a": X, "c": X},
            {"m/a": X, "z": X},
            "of the other: `{'a': reference['m/a']}`.",
        ),
        ({"a": {"primal": X}}, {"a": {"cotangent": X}}, "the same modes in both."),
        ({"a": X}, {}, "Names in the second: none."),
    ):
        with pytest.raises(UnknownSowError) as e:
            compare(a, b)
        assert str(e.value).endswith(says)
    for wrong in ((X, {}), ({}, (X, {}))):
        with pytest.raises(
            TypeError, match="must be the second output of `save_intermediates`"
        ):
            compare(*wrong)
    with pytest.raises(SowError, match="`compare`: the value of 'a' is a tracer"):
        jax.jit(lambda x: compare({"a": x}, {"a": x}))(X)


def _two_cells(first, second, xs):
    a = b = jnp.zeros(3)
    for x in xs:
        a = jnp.tanh(first(x + a))
        b = jnp.tanh(second(a))
        a = a + b
    return b.sum()


@pytest.mark.sample(3)
@pytest.mark.parametrize("mode", ["primal", "cotangent"])
@pytest.mark.parametrize("cell", ["first", "second"])
@pytest.mark.parametrize("run", range(3))
def test_the_first_of_runs_that_take_turns(run, cell, mode):
    """All runs of a name are in rows that follow one another."""
    cells = [eqx.nn.Linear(3, 3, key=key) for key in jr.split(jr.key(0))]
    xs = jr.normal(jr.key(1), (3, 3))
    fn = eqx.filter_grad(_two_cells) if mode == "cotangent" else _two_cells
    change = lambda by: tuple(by if i == run else None for i in range(3))
    saved = lambda fn: S(fn, capture=True)(*cells, xs)[1]
    planted = lambda by: plant(fn, {cell: change(by)}, capture=True, mode=mode)
    table = compare(saved(planted(lambda h: h + 1)), saved(fn))
    assert table.first == (cell, mode)
    (row,) = [line for line in str(table).splitlines() if "<- first" in line]
    assert row.startswith(f"{cell}[{run}]")
    table = tabulate(saved(planted(lambda h: h * jnp.nan)))
    (row,) = [line for line in str(table).splitlines() if "<- first" in line]
    assert row.startswith(f"{cell}[{run}] ") and f" {mode} " in row


# --- every kind of value ---
class Odd:
    """What must not be compared."""

    def __init__(self, n=0):
        self.n = n

    def __eq__(self, other):
        raise RuntimeError("do not compare")

    __hash__ = None


class Colour(enum.Enum):
    RED, BLUE = 1, 2


class Pair(eqx.Module):
    x: object
    y: object


def _far(x):
    """With another last entry."""
    x = np.array(x)
    x.reshape(-1)[-1] = x.reshape(-1)[-1] + 1
    return x


F = np.float32([[0.5, -1.0, np.nan], [np.inf, 2.0, 3.0]])
# Each with another one.
LEAVES = {
    "float32": (jnp.asarray(F), jnp.asarray(_far(F))),
    "float64": (F.astype(float), _far(F.astype(float))),
    "bfloat16": (jnp.bfloat16([1, 2]), jnp.bfloat16([1, 3])),
    "float8": (jnp.float8_e4m3fn([1, 2]), jnp.float8_e4m3fn([1, 3])),
    "complex": (jnp.complex64([1j, 2]), jnp.complex64([-1j, 2])),
    "a scalar": (np.float32(0.5), np.float32(0.6)),
    "int64": (np.int64([2**53, -1]), np.int64([2**53 + 1, -1])),
    "uint64": (np.uint64([2**64 - 1]), np.uint64([2**64 - 2])),
    "int8": (jnp.int8([-128, 127]), jnp.int8([127, 127])),
    "uint32": (jnp.uint32([2**32 - 1]), jnp.uint32([2**32 - 2])),
    "bool": (jnp.array([True, False]), jnp.array([True, True])),
    "of no entries": (np.zeros((0, 3), "f"), np.zeros((3, 0), "f")),
    "a key": (jr.key(0), jr.key(1)),
    "keys": (jr.split(jr.key(0), 3), jr.split(jr.key(1), 3)),
    "summary": (summarize(X), summarize(2 * X)),
    "histogram": [summarize(x, edges=(-9.0, 0.0, 9.0)) for x in (X, -X)],
    "number": (3.0, 3.1),
    "integer": (2**53, 2**53 + 1),
    "a long integer": (2**80, 2**80 + 1),
    "list": ([1.0, 2.0], [1.0, 3.0]),
    "list of integers": ([2**63, 1], [2**63, 2]),
    "list of lists": ([[1, 2], [3, 4]], [[1, 2], [3, 5]]),
    "string": ("text", "other text"),
    "bytes": (b"a", b"b"),
    "strings": (np.array(["a", "b"]), np.array(["a", "c"])),
    "dates": [np.array([x], "M8[s]") for x in (1, 2)],
    "objects": [np.array([Odd(), x], object) for x in ("a", "b")],
    "function": (jnp.tanh, jax.nn.relu),
    "partial": (ft.partial(jnp.tanh), ft.partial(jnp.sin)),
    "class": (Odd, Colour),
    "enum": (Colour.RED, Colour.BLUE),
    "object": (Odd(1), Append()),
    "dtype": (np.dtype("f4"), np.dtype("f8")),
    "float0": [np.zeros(n, jax.dtypes.float0) for n in (2, 3)],
}
IN = {
    "alone": lambda x: x,
    "tuple": lambda x: (X, x),
    "list": lambda x: [x, (X,)],
    "dict": lambda x: {"b": x, "a/b": {"c": X}, "a": {"b/c": 2 * X}},
    "module": lambda x: Pair((x,), X),
    "call": lambda x: Call((x,), {"k": X}, X),
}


def _of(value):
    return Intermediates({"h": {"primal": X}, "v": {"primal": value}})


@pytest.mark.sample(6)
@pytest.mark.parametrize("inside", IN.values(), ids=IN)
@pytest.mark.parametrize("pair", LEAVES.values(), ids=LEAVES)
def test_another_value_is_found(pair, inside):
    x, other = pair
    again = pickle.loads(pickle.dumps(x)) if eqx.is_array_like(x) else x
    assert compare(_of(inside(x)), _of(inside(again))).first is None
    here = _of(inside(x))
    for wrong in (other, None, (x, x), {"x": x}, X[:1], "else"):
        table = compare(here, _of(inside(wrong)))
        assert table.first == ("v", "primal"), table
        assert compare(_of(inside(wrong)), here).first == ("v", "primal")
    # Other containers are not other values.
    if inside is IN["tuple"]:
        assert compare(here, _of([X, x])).first is None
    assert compare(here.primals, _of(inside(other)).primals).first == ("v", "primal")
    assert compare(here.primals, here).first is compare(here, dict(here)).first is None


def _random(rng, depth=0):
    """A value, whose leaves are keys of `LEAVES`."""
    kind = rng.choice(
        ["leaf", "tuple", "list", "dict", "module"] if depth < 3 else ["leaf"]
    )
    if kind == "leaf" and depth:
        return rng.choice([*LEAVES])
    parts = [_random(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    match kind:
        case "dict":
            return {
                rng.choice(["a", "a/0", "primal", "1"]) + str(i): x
                for i, x in enumerate(parts)
            }
        case "module":
            return Pair(tuple(parts), rng.choice([*LEAVES]))
        case "list":
            return parts
        case _:
            return tuple(parts)


@pytest.mark.parametrize("seed", range(30))
def test_what_differs_is_named(seed):
    """One leaf of random values is another one, is missing, or holds more."""
    rng = random.Random(seed)
    names = ["x/primal", "y", "y/count", "z"]
    kinds = Intermediates({name: {"primal": _random(rng)} for name in names})
    paths = jtu.tree_leaves_with_path(kinds)
    chosen, kind = rng.choice(paths)
    right = jax.tree.map(lambda kind: LEAVES[kind][0], kinds)
    new = rng.choice([LEAVES[kind][1], None, {"deeper": LEAVES[kind][0]}, Odd()])
    if kind == "object" and isinstance(new, Odd):
        new = None
    replaced = [new if path == chosen else LEAVES[k][0] for path, k in paths]
    wrong = jtu.tree_structure(kinds).unflatten(replaced)
    assert compare(right, right).first is None
    for a, b in ((wrong, right), (right, wrong)):
        table = compare(a, b)
        assert table.first == (chosen[0].key, "primal"), (chosen, new)
        (row,) = [line for line in table.splitlines() if "<- first" in line]
        label = chosen[0].key + jtu.keystr(chosen[2:])
        assert row.startswith(label) or row.split()[0] == chosen[0].key, row


def _npz(flat):
    file = io.BytesIO()
    np.savez(file, **flat)
    file.seek(0)
    return np.load(file)


def _json(flat):
    def as_list(x):
        x = np.asarray(x)
        return (x if x.dtype.kind in "biu" else x.astype(float)).tolist()

    return json.loads(json.dumps({key: as_list(x) for key, x in flat.items()}))


FILES = {"flat": dict, "npz": _npz, "json": _json}
# What has no numbers is in no file.
NUMBERS = [*LEAVES][: [*LEAVES].index("number")]


@pytest.mark.sample(6)
@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
@pytest.mark.parametrize("inside", IN.values(), ids=IN)
@pytest.mark.parametrize("kind", LEAVES)
def test_a_file_of_it_is_the_same(kind, inside, file):
    if (
        file is not dict
        and kind not in NUMBERS
        or (file is _json and kind == "complex")
    ):
        return
    if inside is IN["dict"]:
        inside = lambda x: {"b": x, "a/b": {"c": X}}
    here, wrong = (_of(inside(x)) for x in LEAVES[kind])
    flat = file(here.flat())
    for a, b in ((here, flat), (flat, here), (flat, flat), (dict(here), flat)):
        assert compare(a, b).first is None, compare(a, b)
    if kind in NUMBERS:
        for a, b in ((wrong, flat), (flat, wrong), (wrong.flat(), flat)):
            assert compare(a, b).first == ("v", "primal"), compare(a, b)


def test_python_numbers():
    saved = lambda x: S(lambda x: sow(2 * x, "h"))(x)[1]
    assert compare(saved(2.0), saved(3.0)).first == ("h", "primal")
    assert compare(saved(2.0), saved(2.0)).first is None
    for a, b in (
        ({"a": [1.0, 2.0]}, {"a": [3.0, 4.0]}),
        ({"a": [1.0, 2.0]}, {"a": [1.0, 4.0]}),
        ({"a": [1.0, 2.0]}, {"a": [1.0]}),
        ({"a": [1.0]}, {"a": []}),
        ({"a": jnp.ones(2)}, {"a": [1.0, 2.0]}),
        ({"a": (jnp.ones(2), jnp.ones(2))}, {"a": [[1.0, 1.0], [1.0, 2.0]]}),
        ({"a": jnp.ones(())}, {"a": 2}),
        ({"a": True}, {"a": False}),
    ):
        assert compare(a, b).first == compare(b, a).first == ("a", "primal")
        assert compare(a, a).first is compare(b, b).first is None
    one = np.float32(1)
    for x in ([1.0, 1.0], (1, 1), [1, one], [one, one], np.ones(2), Tensor(np.ones(2))):
        is_array = not isinstance(x, tuple)
        first = compare({"a": jnp.ones(2)}, {"a": x}).first
        assert (first is None) == is_array
        assert compare({"a": [1.0, 1.0]}, {"a": x}).first is None


def _of_many_kinds(x):
    """Names that contain names of modes, and values with parts that are called so."""
    a = sow((x, 2 * x), "a/tangent")[0]
    b = sow({"count": jnp.sin(a), "y": (a, "text")}, "x")["count"]
    b = sow(b, "x/cotangent/y")
    b = sow([b, {"rms": (b,)}], "a/primal")[0]
    sow(b.sum(), "model/count")
    sow(Call((b,), {"k": b}, jnp.arange(3)), "x/primal.call")
    sow((summarize(b), b), "cotangent/summary")
    b = lax.cond(b[0] > 0, lambda b: sow(b * 2, "cond/count"), lambda b: b, b)
    for i in range(3):
        b = sow(b * (i + 1), "several/count")
    step = lambda c, _: (sow(jnp.sin(c), "tangent/steps"), None)
    return lax.scan(step, b, length=3)[0].sum()


WAYS = {
    **pick("eager", "grad", "jvp"),
    "second": lambda f: jax.grad(lambda x: jax.grad(f)(x).sum()),
}


@ft.cache
def _captured(way):
    several = {"several/count": Append()}
    return S(WAYS[way](_of_many_kinds), reduce=several)(jnp.abs(X))[1]


@pytest.mark.sample(3)
@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
@pytest.mark.parametrize("way", WAYS)
def test_each_entry_of_a_file_counts(way, file):
    got = _captured(way)
    want = file(got.flat())
    assert compare(got, want).first is compare(got.flat(), want).first is None
    assert "Only" not in compare(got, want) + compare(want, got.flat())
    places = [
        (name, mode, inside)
        for name, modes in got.items()
        for mode, value in modes.items()
        for inside in Intermediates({"": {"": value}}).flat()
    ]
    for name, mode, inside in random.Random(way).sample(places, 4):
        key = "/".join(filter(None, (name, mode, inside)))
        wrong = dict(got.flat())
        wrong[key] = _far(wrong[key])
        for a, b in ((got, wrong), (wrong, got), (wrong, want), (want, wrong)):
            assert compare(a, b).first == (name, mode), (key, compare(a, b))
        del wrong[key]
        if mode == "primal" and inside:
            table = compare(got, wrong)
            assert table.first == (name, mode) and "/ nothing" in table


@pytest.mark.parametrize("of", [(0,), (1,), (0, 1)], ids=str)
def test_order_in_files(of):
    def f(scale, x):
        for name in "zyxw":
            x = sow(jnp.sin(x * (scale if name == "y" else 1)), name)
        return x.sum()

    # Going backward, `w` has a gradient of ones, and `x` has one of another value.
    for mode, first in (("primal", "y"), ("cotangent", "x")):
        saved = lambda scale: S(jax.grad(f, 1), modes=mode)(scale, X)[1]
        pair = [saved(1.1), saved(1.0)]
        for i in of:
            # Where the other one has an order, that of a file does not count.
            flat = pair[i].flat()
            pair[i] = flat if len(of) == 2 else dict(sorted(flat.items()))
        assert compare(*pair).first == compare(*pair[::-1]).first == (first, mode)


def test_stacks_in_files():
    right, wrong = _save(Stack(BLOCKS)), _save(Stack(WRONG))
    in_list = _save(_in_list(BLOCKS))
    layer = "m/blocks/2/mlp", "primal"
    for want in (right.unstack().flat(), in_list.flat(), right.unstack()):
        for got in (wrong, wrong.unstack(), wrong.unstack().flat()):
            assert compare(got, want).first == compare(want, got).first == layer
        assert compare(right, want).first is compare(want, right).first is None
    assert compare(wrong, right.flat()).first == layer


def test_states():
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    axes = {"axis_name": "batch", "in_axes": (0, None), "out_axes": (0, None)}
    f = lambda x: jax.vmap(norm, **axes)(x, state)[0]
    got = S(f, capture=True)(jnp.ones((4, 3)))[1]
    out, held = got["norm"]["primal"]
    other = {"norm": {"primal": (out, jax.tree.map(lambda x: x + 1, held))}}
    assert compare(got, other).first == compare(other, got).first == ("norm", "primal")
    # Other libraries have none, and no file has.
    for reference in (got.flat(), {"norm": out}, {"norm": (out,)}):
        assert compare(got, reference).first is compare(reference, got).first is None
    assert compare(got, {"norm": {"primal": (out,)}}).first == ("norm", "primal")


def test_values_that_look_like_modes():
    for value in ({"count": X}, {"primal": X, "cotangent": X}, {"tangent": (X, X)}):
        got = Intermediates({"h": {"primal": value}, "k": {"primal": X}})
        for same in (got.primals, dict(got), got.flat(), got):
            assert compare(got, same).first is compare(same, got).first is None
            assert "Only" not in compare(got, same)
    same = Intermediates({"h": X})
    assert compare(same, {"h": X}).first is None
    assert compare(same, {"h": 2 * X}).first == ("h", "primal")
    assert compare(got, got.flat() | {"step": 3}).first is None
