"""Law 14: a list and a stack are one. The same layers in a list, in a scan over their
stack, in a checkpointed one, and in an unrolled loop over slices of the stack give the
same results for the same strings.

The models are random: lists of lists of layers, in which each level is in one of these
forms, with some kind of block, and perhaps a loop over time around. What the lists give
is the reference; that this is right is what the other tests are about."""

import dataclasses as dc
import functools
import itertools as it
import math
import random
from typing import Any

import equinox as eqx
import esm2quinox
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_sow import (
    Append,
    Buffer,
    compare,
    Fold,
    Intermediates,
    Last,
    plant,
    save_intermediates as S,
    sow,
    SowError,
    SowTypeError,
    tap,
    UnsupportedPrimitiveError,
)
from eqx_sow._mark.site import Label
from eqx_sow._mark.sow import bind_sow
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float

from .helpers import assert_close
from .tables import IN_ORDER, REDUCERS, under


X = jnp.array([0.3, -0.7])
XS = jnp.stack([X, 2 * X, -X, jnp.cos(X)])


def _same(got, want, *said):
    """`said`: which case it is, and which string."""
    try:
        assert_close(got, want, rtol=1e-4, atol=1e-5)
    except AssertionError as e:
        e.add_note(" ".join(map(str, said)))
        raise


# --- models ---
class Block(eqx.Module):
    attn: eqx.nn.Linear | None
    layers: list[eqx.nn.Linear]
    act: eqx.nn.Lambda
    kind: str = eqx.field(static=True)

    def __init__(self, key, kind):
        linears = [eqx.nn.Linear(2, 2, key=k) for k in jr.split(key, 3)]
        # Those that it calls. Of others, see the test below.
        n = {"layers": 2, "two": 1, "unused": 1}.get(kind, 0)
        self.attn, self.layers = linears[2] if kind != "layers" else None, linears[:n]
        self.act, self.kind = eqx.nn.Lambda(jnp.tanh), kind

    def __call__(self, x):
        match self.kind:
            case "layers":
                return self.layers[1](self.act(self.layers[0](x)))
            case "twice":
                return self.attn(jnp.sin(self.attn(x)))
            case "time inside":
                step = lambda x, _: (jnp.tanh(self.attn(x)), None)
                return x + lax.scan(step, x, length=2)[0]
            case "unused":
                return x + self.act(self.attn(x))
            case _:
                return x + self.layers[0](self.act(self.attn(x)))


class Stage(eqx.Module):
    blocks: Any
    form: str = eqx.field(static=True)

    def __call__(self, x):
        return run_layers(self.blocks, x, self.form)


class Net(eqx.Module):
    stages: Any
    head: eqx.nn.Linear
    form: str = eqx.field(static=True)

    def __call__(self, x):
        return self.head(run_layers(self.stages, x, self.form))


def run_layers(layers, x, form):
    if form == "list":
        for layer in layers:
            x = layer(x)
        return x
    arrays, static = eqx.partition(layers, eqx.is_array)
    step = lambda x, one: (eqx.combine(one, static)(x), None)
    if form == "unrolled":
        for i in range(len(jax.tree.leaves(arrays)[0])):
            x, _ = step(x, jax.tree.map(lambda a: a[i], arrays))
        return x
    return lax.scan(jax.checkpoint(step) if form == "checkpoint" else step, x, arrays)[
        0
    ]


def stacked(layers):
    return jax.tree.map(
        lambda *xs: jnp.stack(xs) if eqx.is_array(xs[0]) else xs[0], *layers
    )


@dc.dataclass(frozen=True)
class Plan:
    """`sizes`: how many stages (none for a list of blocks), and blocks in each."""

    sizes: tuple[int, ...]
    kind: str
    time_around: bool = False

    def net(self, *forms):
        """Each level in one of the forms, from outside in."""
        keys = iter(jr.split(jr.key(0), 20))

        def layers(sizes, forms):
            n, form = sizes[0], forms[0]
            if len(sizes) > 1:
                new = [Stage(layers(sizes[1:], forms[1:]), forms[1]) for _ in range(n)]
            elif self.kind == "linear":
                new = [eqx.nn.Linear(2, 2, key=next(keys)) for _ in range(n)]
            else:
                new = [Block(next(keys), self.kind) for _ in range(n)]
            return new if form == "list" else stacked(new)

        head = eqx.nn.Linear(2, 2, key=jr.key(1))
        return Net(layers(self.sizes, forms), head, forms[0])

    @property
    def lists(self):
        return self.net(*["list"] * len(self.sizes))

    def __call__(self, m, x):
        if not self.time_around:
            return m(x)
        steps = jnp.array([0.5, -1.0, 2.0])
        return lax.scan(lambda x, t: (jnp.sin(m(t * x)), None), x, steps)[0]


def of_form(value, depth=0):
    """The arrays of such a tree, stacked whatever its form."""
    if isinstance(value, Net):
        # Of a stack of stages, the lists within have their axis behind that.
        depth = int(isinstance(value.stages, Stage))
        return of_form(value.stages, depth), jax.tree.leaves(value.head)
    if isinstance(value, Stage):
        return of_form(value.blocks, depth)
    if isinstance(value, list) and value and isinstance(value[0], eqx.Module):
        each = [of_form(x) for x in value]
        return jax.tree.map(lambda *xs: jnp.stack(xs, depth), *each)
    if isinstance(value, eqx.Module):
        if isinstance(value, Block | eqx.nn.Linear):
            return jax.tree.leaves(value)
    return value


# --- the programs ---
def plain(plan):
    return lambda m, x: plan(m, x)


def grad(plan):
    return eqx.filter_grad(lambda m, x: jnp.sum(plan(m, x) ** 2))


def jit(plan):
    return eqx.filter_jit(grad(plan))


def vmap(plan):
    def fn(m, x):
        return jax.vmap(lambda x: plan(m, x))(x)

    return fn


def grad_of_vmap(plan):
    return eqx.filter_grad(lambda m, x: jnp.sum(vmap(plan)(m, x) ** 2))


def on_a_mesh(plan):
    mesh = jax.make_mesh((2,), ("d",), (AxisType.Auto,))

    def fn(m, x):
        arrays, static = eqx.partition(m, eqx.is_array)
        rows = lambda arrays, x: vmap(plan)(eqx.combine(arrays, static), x)
        specs = dict(in_specs=(P(), P("d")), out_specs=P("d"))
        return jax.shard_map(rows, mesh=mesh, **specs)(arrays, x)

    return fn


# With how many axes that come before those of the layers.
WRAPS = {
    "plain": (plain, X, 0),
    "grad": (grad, X, 0),
    "jit": (jit, X, 0),
    "vmap": (vmap, XS, 1),
    "grad of vmap": (grad_of_vmap, XS, 1),
    "mesh": (on_a_mesh, XS, 2),
}
KINDS = ["linear", "two", "layers", "twice", "time inside"]
FORMS = ["scan", "checkpoint", "unrolled"]


@dc.dataclass
class Case:
    """A plan, and what is drawn for it: the forms of its levels, and strings."""

    seed: int
    wrap: str

    def __post_init__(self):
        rng = self.rng = random.Random(f"{self.seed} {self.wrap}")
        nested = rng.random() < 0.4
        sizes = (rng.choice([1, 2]), rng.choice([1, 2])) if nested else ()
        sizes = sizes or (rng.choice([1, 2, 3, 3]),)
        self.plan = Plan(sizes, rng.choice(KINDS), rng.random() < 0.3)
        forms = [rng.choice(["list", *FORMS]) for _ in sizes]
        if {*forms} == {"list"}:
            forms[rng.randrange(len(forms))] = rng.choice(FORMS)
        self.forms = tuple(forms)
        self.make, self.x, n = WRAPS[self.wrap]
        self.run = lambda m, x: self.plan(m, x)
        self.fn = self.make(self.run)
        self.n_in_front = n + self.plan.time_around

    # Made by the case that runs, not by all that are collected.
    @functools.cached_property
    def lists(self):
        return self.plan.lists

    @functools.cached_property
    def net(self):
        return self.plan.net(*self.forms)

    def both(self, run):
        """What `run` gives for the lists, and for the other form."""
        each = lambda *models: tuple(map(run, models))
        run_both = each if self.wrap == "plain" else eqx.filter_jit(each)
        return run_both(self.lists, self.net)

    def save(self, model, **options):
        return S(self.fn, capture=True, **options)(model, self.x)[1]

    def names(self, model, **options):
        saved = S(self.fn, capture=True, **options)
        return list(saved.eval_shape(model, self.x)[1])

    def strings(self, names, n):
        """Names of layers as lists have them, and globs that fit some of them."""
        names = [name for name in names if "stages" in name]
        for k in range(n):
            parts = self.rng.choice(names).split("/")
            if k:
                parts = [self._changed(part, k, n) for part in parts]
            start = 0 if parts[0] != "m" else self.rng.choice([0, 1])
            yield "/".join(parts[start:])

    def _changed(self, part, k, n):
        if not part.isdigit():
            return part
        size = max(self.plan.sizes)
        some = ["*", f"[0{size - 1}]", "*", part, "?"]
        return "*" if k == n - 1 else self.rng.choice(some)

    def with_layers_first(self, pattern, entry, names, n_gone=0):
        """An entry as lists have it. Of a whole stack it is the value as it is, with
        the axes that come from outside in front."""
        n_digits = lambda name: sum(map(str.isdigit, name.split("/")))
        is_whole = len(names) == 1 and n_digits(names[0]) == n_digits(pattern)
        n_stars = names[0].count("*") if is_whole and "*" in pattern else 0
        n = self.n_in_front - n_gone
        places = [n + i for i in range(n_stars)]
        first = lambda a: jnp.moveaxis(a, places, range(n_stars))
        return {mode: jax.tree.map(first, x) for mode, x in entry.items()}

    def __str__(self):
        return f"{self.plan}, {self.forms}, {self.wrap}"


def _cases(n, every=1, wraps=WRAPS):
    return [
        pytest.param(Case(seed, wrap), id=f"{wrap}-{seed}")
        for seed, wrap in it.product(range(n), wraps)
    ][::every]


# --- the laws ---
@pytest.mark.sample(9)
@pytest.mark.parametrize("case", _cases(4))
def test_look_ups(case):
    want, got = case.both(case.save)
    assert list(got.unstack()) == list(want)
    assert compare(got, want).first is None and compare(want, got).first is None
    assert compare(got.unstack(), want).first is None
    for name, modes in want.items():
        assert list(got[name]) == list(modes)
        _same(got[name], modes, name, case)
    for pattern in (*case.strings(want, 4), "stages/**", "**/attn"):
        assert (pattern in got) == (pattern in want), (pattern, case)
        if pattern not in want:
            assert got.get(pattern) is None and pattern not in got.primals
            continue
        of_list = want[pattern]
        names = case.names(case.net, names=pattern)
        entry = case.with_layers_first(pattern, got[pattern], names)
        assert list(entry) == list(of_list)
        _same(entry, dict(of_list), pattern, case)
        _same(got.get(pattern), dict(got[pattern]))
        _same(got.primals[pattern], got[pattern]["primal"])
        if "cotangent" in of_list:
            _same(got.cotangents[pattern], got[pattern]["cotangent"])


@pytest.mark.sample(9)
@pytest.mark.parametrize("case", _cases(3))
def test_names(case):
    names = case.names(case.lists)
    for pattern in case.strings(names, 2):
        want, got = case.both(lambda m: case.save(m, names=pattern))
        assert list(got.unstack()) == list(want), (pattern, case)
        for name, modes in want.items():
            _same(got[name], modes, name, case)
    # Several at once.
    some = [*case.strings(names, 2)]
    want, got = case.both(lambda m: case.save(m, names=some))
    for name, modes in want.items():
        _same(got[name], modes, name, case)


def _halved(value):
    return jax.tree.map(lambda a: a / 2, value)


@pytest.mark.sample(9)
@pytest.mark.parametrize("case", _cases(3))
def test_functions_planted(case):
    """Inside of a gradient, and in place of cotangents around it."""
    names = case.names(case.lists)
    patterns = [*case.strings(names, 2)]
    if case.plan.time_around:
        # One iteration of a loop that is none over layers.
        patterns += [f"{patterns[1]}/1", f"{patterns[0]}/-1"]
    for pattern in patterns:
        edited = case.make(plant(case.run, {pattern: _halved}, capture=True))
        want, got = case.both(lambda m: of_form(edited(m, case.x)))
        _same(got, want, pattern, case)
    if "grad" in case.wrap:
        halved = {patterns[1]: _halved}
        fn = plant(case.fn, halved, mode="cotangent", capture=True)
        want, got = case.both(lambda m: of_form(fn(m, case.x)))
        _same(got, want, patterns[1], case)


@pytest.mark.parametrize("case", _cases(3, wraps=["plain", "vmap", "mesh"]))
def test_values_planted(case):
    """Also those that another form has captured."""
    saved, of_net = case.both(case.save)
    (name,) = case.strings(saved, 1)
    value = {name: _halved(saved[name]["primal"])}
    for planted in (value, saved, of_net.unstack()):
        fn = plant(case.fn, planted, capture=True)
        want, got = case.both(lambda m: fn(m, case.x))
        _same(got, want, [*planted], case)
    again = plant(case.fn, of_net, capture=True)
    _same(again(case.net, case.x), case.fn(case.net, case.x), case)


@pytest.mark.sample(6)
@pytest.mark.parametrize("case", _cases(4))
def test_values_planted_under_a_pattern(case):
    """What is looked up by a pattern can be planted under it, as if it were planted
    under the name of each layer."""
    saved, of_net = case.both(case.save)
    mode = "cotangent" if "cotangent" in next(iter(saved.values())) else "primal"
    for pattern in case.strings(saved, 3):
        if pattern not in saved or mode not in saved[pattern]:
            continue
        each = {
            name: _halved(saved[name][mode])
            for name in case.names(case.lists, names=pattern)
        }
        by_pattern = [{pattern: _halved(x[pattern])} for x in (saved, of_net)]
        planted = lambda m, values: of_form(
            plant(case.fn, values, mode=mode, capture=True)(m, case.x)
        )
        run = lambda *ms: [*map(planted, ms, (each, *by_pattern, *by_pattern))]
        run = run if case.wrap == "plain" else eqx.filter_jit(run)
        # What is looked up in one form may be planted in the other.
        models = case.lists, case.lists, case.net, case.net, case.lists
        want, *others = run(*models)
        for got in others:
            _same(got, want, pattern, case)


# As many layers as lanes, and as steps, and as layers in each. A list has their axes
# first, a stack where its loops are.
def _layers(x, ws, forms, lanes, parts=("b",), places=()):
    """What comes out of the last layer, and a sum of all, each times its weight."""
    if ws.ndim == 0:
        label = Label("/".join(parts), "intermediates", 0, places)
        layer = lambda x: bind_sow(jnp.sin(ws * x) + 1, (label,), spec=None)
        x = (jax.vmap(layer) if lanes else layer)(x)
        return x, ws * x
    if forms[0] == "list":
        total = jnp.zeros_like(x)
        for i, w in enumerate(ws):
            new = (*parts, str(i)), places
            x, of_layer = _layers(x, w, forms[1:], lanes, *new)
            total += of_layer
        return x, total
    new = (*parts, "*"), (*places, len(parts))
    step = lambda x, w: _layers(x, w, forms[1:], lanes, *new)
    x, totals = lax.scan(step, x, ws)
    return x, jnp.sum(totals, 0)


_TIME = jnp.array([0.5, -1.0, 2.0, 0.7])
AROUND = {
    "plain": lambda f, x: f(x),
    "vmap": lambda f, x: jax.vmap(f)(x),
    "time": lambda f, x: lax.map(lambda t: f(t * x), _TIME[: len(x)]),
    "vmap of time": lambda f, xs: jax.vmap(
        lambda x: lax.map(lambda t: f(t * x), _TIME[: len(xs)])
    )(xs),
    "vmap in each": lambda f, x: f(x),
}
SIZES = {"4": (4,), "2x2": (2, 2)}


def _equally_long(around, sizes):
    """The program for each of the forms, a batch, and what a program without marks
    gives if each value is halved."""
    ws = jnp.linspace(0.5, 2, math.prod(sizes)).reshape(sizes)
    x = XS[: sizes[0]]
    x = X if around == "plain" else x
    lanes, places = around == "vmap in each", (None,) if "time" in around else ()

    def program(*forms):
        fn = lambda x: _layers(x, ws, forms, lanes, places=places)[1]
        return lambda x: AROUND[around](fn, x)

    def by_hand(x):
        total = 0
        for w in ws.ravel():
            x = jnp.sin(w * x) + 1
            total += w * x / 2
        return total

    return program, x, AROUND[around](by_hand, x)


_FORMS = {
    sizes: [*it.product(["list", "scan"], repeat=len(n))] for sizes, n in SIZES.items()
}


@pytest.mark.sample(9)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(
    "sizes, source, target",
    [(s, *pair) for s, forms in _FORMS.items() for pair in it.product(forms, forms)],
    ids=str,
)
def test_equally_long_axes_are_not_mixed_up(around, sizes, source, target):
    pattern = "b/*" if sizes == "4" else "b/*/*"
    program, x, want = _equally_long(around, SIZES[sizes])
    out, saved = S(program(*source))(x)
    into = program(*target)
    fn = lambda values: plant(into, values)(x)
    for one in (saved, saved.unstack()):
        _same(fn({pattern: _halved(one[pattern].copy())}), want)
        _same(fn({"**": _halved(one["**"])}), want)
        _same(jax.jit(lambda one: fn({pattern: _halved(one[pattern])}))(one), want)
    _same(fn(_halved(saved.unstack())), want)
    _same(fn(_halved(saved.unstack()).primals), want)
    if source == target or "list" not in source:
        _same(fn(_halved(saved)), want)
        _same(fn(_halved(saved).primals), want)
    # An array does not say which axis is which, unless they are in front in a stack as
    # in a list.
    array = _halved(saved[pattern]["primal"])
    in_front = "list" not in target and around == "vmap in each"
    if in_front or around == "plain":
        _same(fn({pattern: array}), want)
    else:
        for value in (array, np.asarray(array), {"primal": array}):
            with pytest.raises(
                SowError, match="equally long, so it is not known which"
            ):
                fn({pattern: value})


@pytest.mark.parametrize("form", ["list", "scan"])
def test_axes_of_what_a_pattern_gives(form):
    names = {"vmap": "vmap", "time": "loop", "vmap in each": "vmap"}
    for around, name in names.items():
        program, x, _ = _equally_long(around, (4,))
        _, saved = S(program(form))(x)
        is_first = form == "list" or around == "vmap in each"
        axes = ("loop", name) if is_first else (name, "loop")
        assert saved.axes("b/*") == saved.axes("**") == axes
    program, x, _ = _equally_long("vmap of time", (2, 2))
    _, saved = S(program(form, "list"))(x)
    assert saved.axes("b/*/*") == ("loop", "loop", "vmap", "loop")


@pytest.mark.parametrize("source, target", [*it.product(["list", "scan"], repeat=2)])
def test_axes_from_outside_that_are_equally_long(source, target):
    """Of `jax.vmap(save_intermediates(fn))` it cannot be told which axis is which."""
    (inside, _, _), (around, xs, want) = (
        _equally_long(name, (4,)) for name in ("plain", "vmap")
    )
    _, saved = jax.vmap(S(inside(source)))(xs)
    fn = lambda values: plant(around(target), values)(xs)
    if source == "list":
        _same(fn({"b/*": _halved(saved["b/*"])}), want)
    _, entry = jax.vmap(lambda x: (0, S(inside(source))(x)[1]["b/*"]))(xs)
    with pytest.raises(SowError, match="equally long, so it is not known which"):
        fn({"b/*": entry})
    if source == "scan":
        with pytest.raises(SowError, match="equally long, so it is not known which"):
            fn(saved)
    # Where they are not, it can.
    _, entry = jax.vmap(lambda x: (0, S(inside(source))(x)[1]["b/*"]))(xs[:3])
    _same(
        plant(around(target), {"b/*": _halved(entry)})(xs[:3]),
        jax.tree.map(lambda x: x[:3], want),
    )


@pytest.mark.parametrize("source, target", [*it.product(["list", "scan"], repeat=2)])
def test_runs_in_different_loops_over_as_many_layers(source, target):
    """The second one in a loop over as many steps as there are layers."""
    plan = Plan((4,), "linear")

    def fn(m, x):
        steps = lax.map(lambda t: run_layers(m.stages, t * x, m.form), _TIME)
        return run_layers(m.stages, x, m.form) + steps.sum(0)

    _, in_list = S(fn, capture=True)(plan.lists, X)
    want = plant(fn, _halved(in_list), capture=True)(plan.lists, X)
    _, saved = S(fn, capture=True)(plan.net(source), X)
    values = {"stages/*": _halved(saved["stages/*"])}
    _same(plant(fn, values, capture=True)(plan.net(target), X), want)


def test_what_is_compiled_for_a_list_is_not_used_for_a_stack():
    program, x, want = _equally_long("vmap", (4,))
    entries = [_halved(S(program(form))(x)[1]["b/*"]) for form in ("list", "scan")]
    for target in ("list", "scan"):
        for order in (entries, entries[::-1]):
            one = jax.jit(lambda entry: plant(program(target), {"b/*": entry})(x))
            several = jax.jit(lambda values: plant(program(target), values)(x))
            for entry in order:
                _same(one(entry), want)
                _same(several(Intermediates({"b/*": entry})), want)
    # Without lanes, both are of one form.
    saved = [S(_equally_long("plain", (4,))[0](f))(X)[1] for f in ("list", "scan")]
    zeros = jax.tree.map(jnp.subtract, *[x["b/*"] for x in saved])
    _same(zeros["primal"], jnp.zeros((4, 2)))
    # And a `vmap` may be inside or outside.
    (one, _, _), (batch, xs, _) = (_equally_long(n, (4,)) for n in ("plain", "vmap"))
    both = jax.vmap(S(one("scan")))(xs)[1], S(batch("scan"))(xs)[1]
    zeros = jax.tree.map(jnp.subtract, *both)
    _same(zeros["b/*"]["primal"], jnp.zeros((4, 4, 2)))
    with pytest.raises(ValueError, match="layers 0, vmap"):
        jax.tree.map(jnp.subtract, *entries)
    # In one loop, another axis is the layers'.
    programs = [_equally_long(name, (4,))[0] for name in ("vmap", "vmap in each")]
    look_up = jax.jit(lambda saved: saved["b/1"]["primal"])
    for program in (*programs, *programs[::-1]):
        (_, saved), (_, in_list) = (S(program(f))(x) for f in ("scan", "list"))
        _same(look_up(saved), in_list["b/1"]["primal"])


@pytest.mark.parametrize("form", ["list", *FORMS])
def test_an_array_for_all_layers(form):
    plan = Plan((3,), "two")
    m = plan.net(form)
    name = "stages/*/attn"
    value = jnp.arange(6.0).reshape(3, 2)
    each = lambda value: {f"m/stages/{i}/attn": value[i] for i in range(3)}
    want = plant(plan, each(value), capture=True)(plan.lists, X)
    loss = lambda value: jnp.sum(plant(plan, {name: value}, capture=True)(m, X) ** 2)
    # NumPy's, traced, as an entry, and with one layer that has a value of its own.
    for values in ({name: value}, {name: np.asarray(value)}):
        _same(plant(plan, values, capture=True)(m, X), want)
    entry = {name: {"primal": value}}
    _same(jax.jit(lambda x: plant(plan, entry, capture=True)(m, x))(X), want)
    own = {name: value.at[1].set(jnp.nan), "stages/1/attn": value[1]}
    _same(plant(plan, own, capture=True)(m, X), want)
    by_hand = lambda value: jnp.sum(
        plant(plan, each(value), capture=True)(plan.lists, X) ** 2
    )
    _same(jax.grad(loss)(value), jax.grad(by_hand)(value))
    for wrong in (value[:2], jnp.zeros((3, 1)), jnp.zeros((2, 3, 2))):
        with pytest.raises(SowError, match="has a leaf float32"):
            plant(plan, {name: wrong}, capture=True)(m, X)


def test_an_array_for_all_layers_is_said_to_be_of_another_shape():
    plan = Plan((3,), "two")
    said = (
        r"the value for 'stages/\*/attn' has a leaf float32\[2, 2\], "
        r"but float32\[3, 2\]"
        ".* from 'm/stages/0/attn' to 'm/stages/2/attn'. Plant an array of that shape"
    )
    with pytest.raises(SowError, match=said):
        plant(plan, {"stages/*/attn": jnp.ones((2, 2))}, capture=True)(plan.lists, X)


class Scale(eqx.Module):
    w: jax.Array

    def __call__(self):
        return jnp.sin(self.w)


@pytest.mark.sample(1)
@pytest.mark.parametrize("bare", [False, True], ids=["looked up", "array"])
@pytest.mark.parametrize("form", ["list", "stack"])
def test_values_that_are_the_same_in_all_lanes_are_planted(form, bare):
    """There are as many lanes as layers, but no axis is theirs."""
    ws = jnp.array([[1.0, 2.0], [0.5, -1.0], [0.2, 0.3]])
    xs = jnp.stack([X, 2 * X, -X])

    def run(scales, x):
        step = lambda x, scale: (jnp.cos(x) * scale(), None)
        if form == "stack":
            return lax.scan(step, x, scales)[0]
        for scale in scales:
            x, _ = step(x, scale)
        return x

    scales = Scale(ws) if form == "stack" else list(map(Scale, ws))
    fn = lambda scales, xs: jax.vmap(lambda x: run(scales, x))(xs)
    _, intermediates = S(fn, capture=Scale)(scales, xs)
    found = intermediates["scales/*"]
    assert_close(found["primal"], jnp.sin(ws))
    new = jax.tree.map(lambda x: 2 * x, found)
    values = {"scales/*": new["primal"] if bare else new}
    want = xs
    for w in ws:
        want = jnp.cos(want) * (2 * jnp.sin(w))[None]
    assert_close(plant(fn, values, capture=Scale)(scales, xs), want)


@pytest.mark.parametrize("form", ["list", "scan"])
def test_values_for_each_run_of_all_layers(form):
    plan = Plan((3,), "twice")
    name, m = "stages/*/attn", plan.net(form)
    first, second = S(plan, capture=True)(m, X)[1][name]["primal"]
    values = [{f"stages/{i}/attn": (None, 2 * second[i]) for i in range(3)}]
    values += [{name: (None, 2 * second)}]
    want, got = (plant(plan, x, capture=True)(m, X) for x in values)
    _same(got, want)
    # As many as there are runs.
    for wrong in ((first,), (first, second, second)):
        with pytest.raises(SowError, match="attn"):
            plant(plan, {name: wrong}, capture=True)(m, X)


@pytest.mark.sample(1)
@pytest.mark.parametrize("without", [(0, 1), (1,), (2,), ()])
def test_cotangents_for_each_run_of_all_layers(without):
    """Some of three runs have none."""

    def layers(x):
        for i in range(3):
            x = sow((i + 1) * jnp.sin(x), f"b/{i}")
        return x

    def fn(x):
        for run in range(3):
            # What is computed of a constant is not differentiated.
            x = layers(jnp.float32(0.3)) + x if run in without else layers(x)
        return x

    x = jnp.float32(0.5)
    _, got = S(jax.grad(fn), reduce=Append())(x)
    each = got["b/*"]["cotangent"]
    assert tuple(i for i in range(3) if each[i] is None) == without
    new = jax.tree.map(lambda ct: ct + jnp.arange(1.0, 4), each)
    out = plant(jax.grad(fn), {"b/*": new}, mode="cotangent")(x)
    # It goes on from what is planted in the first layer of the first of those.
    first = min({0, 1, 2} - {*without})
    _same(out, new[first][0] * jnp.cos(x + first * layers(jnp.float32(0.3))))


@pytest.mark.sample(9)
@pytest.mark.parametrize("case", _cases(3))
def test_transform_and_spec(case):
    saved = case.save(case.lists)
    norm = lambda value: jax.tree.map(jnp.linalg.norm, value)
    for pattern in case.strings(saved, 2):
        transform = {pattern: norm, "**": lambda value: jax.tree.map(jnp.sum, value)}
        want, got = case.both(
            lambda m: case.save(m, names=pattern, transform=transform)
        )
        for name, modes in want.items():
            _same(got[name], modes, name, case)
        right, wrong = ({pattern: Float[Array, f"*any {n}"]} for n in (2, 3))
        is_tuple = isinstance(
            jax.tree.leaves(saved, is_leaf=lambda x: isinstance(x, tuple))[0], tuple
        )
        if is_tuple:
            continue
        case.both(lambda m: case.save(m, names=pattern, spec=right))
        for model in (case.lists, case.net):
            with pytest.raises(SowTypeError):
                case.save(model, names=pattern, spec=wrong)


@pytest.mark.sample(6)
@pytest.mark.parametrize("case", _cases(4, wraps=[w for w in WRAPS if w != "mesh"]))
def test_reduce(case):
    """Over the executions of each layer: a loop over time is what is reduced."""
    one, *_, pattern = case.strings(case.names(case.lists), 3)
    row, *others = case.rng.sample(list(REDUCERS.values()), 2)
    reducer, other = row.reducer, others[0].reducer
    for options in (
        dict(names=one, reduce={one: reducer}),
        dict(names=pattern, reduce=reducer),
        dict(reduce={pattern: reducer, "**": other}),
    ):
        want, got = case.both(lambda m: case.save(m, **options))
        assert compare(got, want).first is None
        assert {*got.unstack()} == {*want}
        for name, modes in want.items():
            assert list(got[name]) == list(modes)
            _same(got[name], modes, name, options, case)
        if options.get("names") == pattern:
            # No axis of the time is left in front of the layers.
            n = case.plan.time_around * row.in_order
            entry = case.with_layers_first(pattern, got[pattern], [*got], n)
            _same(entry, dict(want[pattern]), pattern, case)


def test_reducers_of_layers_in_a_shard_map_are_an_error():
    case = Case(0, "mesh")
    for model in (case.lists, case.net):
        with pytest.raises(UnsupportedPrimitiveError, match="no order of execution"):
            case.save(model, reduce=Last())


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@under(of=IN_ORDER, argument="row")
def test_reduce_on_a_mesh(row, axis_type):
    plan = Plan((2, 3), "two", time_around=True)
    mesh = jax.make_mesh((2,), ("d",), (axis_type,))
    x = jax.device_put(XS, NamedSharding(mesh, P("d")))

    def save(m):
        with jax.set_mesh(mesh):
            return S(grad_of_vmap(plan), capture=True, reduce=row.reducer)(m, x)[1]

    want, got = save(plan.lists), save(plan.net("scan", "checkpoint"))
    assert [*got.unstack()] == [*want]
    for name, modes in want.items():
        _same(got[name], modes, name)
        for a, b in zip(*map(jax.tree.leaves, (dict(got[name]), dict(modes)))):
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_reducers_of_stacks_of_different_lengths():
    """In two places of one name: layer 2 has run once, and the others twice."""
    marks = lambda x: bind_sow(x, (Label("b/*", "intermediates", 0, (1,)),), spec=None)
    layer = lambda x, w: (marks(jnp.sin(w * x)), None)
    ws = jnp.arange(1.0, 4.0)
    fn = lambda x: lax.scan(layer, lax.scan(layer, x, ws)[0], ws[:2])[0]
    values, x = [], X
    for w in (1, 2, 3, 1, 2):
        values.append(x := jnp.sin(w * x))
    last = jnp.stack([values[3], values[4], values[2]])
    _, got = S(fn, reduce=Last())(X)
    _same(got["b/*"]["primal"], last)
    _, got = S(fn, reduce=Buffer(2))(X)
    _same(got["b/*"]["count"], jnp.array([2, 2, 1]))
    _same(got["b/2"]["primal"], jnp.stack([values[2], 0 * X]))
    _same(got["b/1"]["primal"], jnp.stack([values[1], values[4]]))
    fold = Fold(jnp.zeros(2), jnp.add)
    _same(S(fn, reduce=fold)(X)[1].primals["b/0"], values[0] + values[3])


def test_a_mark_outside_of_a_loop_that_is_called_like_all_layers():
    layer = lambda x, w: (
        bind_sow(jnp.sin(w * x), (Label("b/*", "intermediates", 0, (1,)),), spec=None),
        None,
    )
    fn = lambda x: sow(lax.scan(layer, x, jnp.arange(1.0, 4.0))[0], "b/*")
    with pytest.raises(SowError, match=r"over different axes: sizes \[3\] at .* \[\]"):
        S(fn, reduce=Last())(X)


def test_rows_of_a_layer_that_is_differentiated_in_each_step():
    """In a list, a value is followed by its derivative before it is marked again. In a
    stack, other layers are in between."""
    plan = Plan((3,), "unused")
    grad = eqx.filter_grad(lambda x, m: jnp.sum(m(x) ** 2))

    def descend(m, x):
        step = lambda carry: (carry[0] - 0.1 * grad(carry[0], m), carry[1] + 1)
        return lax.while_loop(lambda carry: carry[1] < 3, step, (x, 0))

    saved = S(descend, capture=True, reduce=Buffer(4))
    want, got = (saved(m, 2 * X)[1] for m in (plan.lists, plan.net("scan")))
    for name in (f"m/stages/{i}/attn" for i in range(3)):
        assert want[name]["count"] == 3
        _same(dict(got[name]), dict(want[name]), name)


@pytest.mark.sample(9)
@pytest.mark.parametrize("case", _cases(4))
def test_events(case):
    def events_of(model, **options):
        events = []
        tap(case.fn, events.append, capture=True, **options)(model, case.x)
        jax.effects_barrier()
        found: dict[Any, Any] = {}
        for event in sorted(events, key=lambda e: (e.count, str(e.device))):
            found.setdefault((event.path, event.mode), []).append(event.value)
        return dict(sorted(found.items()))

    names = case.names(case.lists)
    *_, pattern = case.strings(names, 2)
    for options in ({}, dict(names=pattern), dict(names="stages/**", modes="primal")):
        want, got = case.both(lambda m: events_of(m, **options))
        assert list(got) == list(want), (options, case)
        _same(got, want, options, case)


@pytest.mark.parametrize("wrap", ["plain", "grad"])
@pytest.mark.parametrize("form", FORMS)
def test_a_stack_with_arrays_that_are_not_used(form, wrap):
    """In another loop. A gradient moves what the loops take apart to other places."""
    plan = Plan((2,), "unused", time_around=True)
    fn = WRAPS[wrap][0](plan)
    save = eqx.filter_jit(lambda m: S(fn, capture=True)(m, X)[1])
    want, got = save(plan.lists), save(plan.net(form))
    assert list(got.unstack()) == list(want)
    for name, modes in want.items():
        _same(got[name], modes, name)


# --- lists, which have the shape of stacks ---
def _nested(x):
    for i, j in it.product(range(2), range(4)):
        x = sow(jnp.sin((4 * i + j + 1) * x), f"b/{i}/{j}")
    return x


def _nested_in_stacks(x):
    mark = lambda x: bind_sow(
        x, (Label("b/*/*", "intermediates", 0, (1, 2)),), spec=None
    )
    layer = lambda x, w: (mark(jnp.sin(w * x)), None)
    step = lambda x, ws: lax.scan(layer, x, ws)
    return lax.scan(step, x, jnp.arange(1.0, 9.0).reshape(2, 4))[0]


PATTERNS = {
    "b/*/*": (2, 4),
    "b/1/*": (4,),
    "b/-1/*": (4,),
    "b/-1/[12]": (2,),
    # The index of the first list is that of some layers of the second one.
    "b/1/[12]": (2,),
    "b/[1]/*": (1, 4),
    "b/*/-1": (2,),
    "b/*/1": (2,),
    "b/-1/-1": (),
    "b/?/[03]": (2, 2),
    "**": (2, 4),
    "**/-2": (2,),
}


@pytest.mark.parametrize("fn", [_nested, _nested_in_stacks], ids=["lists", "stacks"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_each_glob_is_an_axis_and_an_index_is_none(pattern, fn):
    _, got = S(fn)(X)
    values, x = [], X
    for w in range(1, 9):
        values.append(x := jnp.sin(w * x))
    rows, columns = _chosen(pattern)
    want = jnp.stack(values).reshape(2, 4, 2)[rows][:, columns]
    want = want.reshape(*PATTERNS[pattern], 2)
    assert pattern in got
    _same(got[pattern]["primal"], want, pattern)
    _same(got.primals[pattern], want, pattern)


def _chosen(pattern):
    """Which layers of the two lists these are."""
    some = pattern.removeprefix("b/").split("/")
    some = ["**"] * (2 - len(some)) + some
    each = []
    for part, n in zip(some, (2, 4)):
        digits = part.strip("[]")
        if part in ("*", "?", "**"):
            each.append(list(range(n)))
        elif part.startswith("["):
            each.append([int(i) for i in digits])
        else:
            each.append([int(part) % n])
    return [jnp.array(indices) for indices in each]


@pytest.mark.parametrize("forms", [*it.product(["list", "scan", "unrolled"], repeat=2)])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (1, 1)])
def test_a_list_of_one_has_an_axis(sizes, forms):
    plan = Plan(sizes, "two")
    _, got = S(lambda m, x: m(x), capture=True)(plan.net(*forms), X)
    want = S(lambda m, x: m(x), capture=True)(plan.lists, X)[1]
    for pattern in ("stages/*/blocks/*/attn", "**/attn", "stages/[0]/**/attn"):
        shape = (1 if "[0]" in pattern else sizes[0], sizes[1], 2)
        assert got[pattern]["primal"].shape == shape
        _same(got[pattern]["primal"], want[pattern]["primal"], pattern, forms)


# --- an unedited model that scans its layers ---
class ListOfLayers(eqx.Module):
    """The same as `esm2quinox.ESM2`, with a list of its layers."""

    layers: list[Any]
    layer_norm: eqx.nn.LayerNorm
    logit_head: Any

    def __init__(self, model):
        at = lambda i: lambda a: a[i] if eqx.is_array(a) else a
        self.layers = [jax.tree.map(at(i), model.layers) for i in range(3)]
        self.layer_norm, self.logit_head = model.layer_norm, model.logit_head

    def __call__(self, tokens):
        weight = self.logit_head.linear2.weight
        embedding = eqx.nn.Embedding(weight=weight)
        not_pad, is_mask = tokens != 1, tokens == 32
        x = jnp.where(is_mask[:, None], 0, jax.vmap(embedding)(tokens))
        x = x * ((1 - 0.15 * 0.8) / (1 - is_mask.sum() / not_pad.sum()))
        x = jnp.where(not_pad[:, None], x, 0)
        for layer in self.layers:
            x = layer(x, is_pad=~not_pad)
        hidden = jax.vmap(self.layer_norm)(x)
        return esm2quinox.ESM2Result(hidden, jax.vmap(self.logit_head)(hidden))


ESM2 = esm2quinox.ESM2(3, 8, 2, token_dropout=True, key=jr.key(0))
TOKENS = jnp.asarray(esm2quinox.tokenise(["SP#DERM#N", "FOO"]))


@functools.cache
def _esm2():
    def loss(m, tokens):
        return jnp.sum(jax.vmap(m)(tokens).logits ** 2)

    save = S(eqx.filter_grad(loss), capture=True)
    both = eqx.filter_jit(lambda *models: [save(m, TOKENS)[1] for m in models])
    return loss, *both(ESM2, ListOfLayers(ESM2))


@pytest.mark.slow
def test_esm2_is_looked_up_as_a_list():
    _, got, want = _esm2()
    assert compare(got, want).first is None and compare(want, got).first is None
    assert [*got.unstack()] == [*want]
    assert any("layers/2/" in name for name in want)
    for name, modes in want.items():
        _same(got[name], modes, name)
    patterns = ["layers/*", "layers/[02]", "layers/-1"]
    patterns += [name.replace("layers/1", "layers/*") for name in want]
    for pattern in patterns:
        assert pattern in got and pattern in want
        # The axis of the proteins comes first if the whole stack is selected.
        is_whole = f"m/{pattern.removeprefix('m/')}" in dict(got) and "*" in pattern
        first = lambda a: jnp.moveaxis(a, 1, 0) if is_whole else a
        entry = {mode: jax.tree.map(first, x) for mode, x in got[pattern].items()}
        _same(entry, dict(want[pattern]), pattern)


@pytest.mark.slow
def test_esm2_is_planted_and_tapped_as_a_list():
    loss, got, want = _esm2()
    models = ESM2, ListOfLayers(ESM2)
    linear = next(n for n in want if "layers/1/" in n and n.count("/") > 2)
    pattern = linear.replace("m/layers/1", "layers/*")
    for values in (
        {"layers/1": lambda x: x / 2},
        {"layers/-1": lambda x: x[::-1], pattern: jnp.sin},
        {linear: want[linear]["primal"] * 2},
        {linear: got[linear]["primal"] * 2},
    ):
        fn = plant(loss, values, capture=True)
        a, b = eqx.filter_jit(lambda *ms, fn=fn: [fn(m, TOKENS) for m in ms])(*models)
        _same(a, b, [*values])
    events = []
    options = dict(capture=True, names=["layers/*", linear])
    for model in models:
        events.append([])
        tap(loss, events[-1].append, **options)(model, TOKENS)
    jax.effects_barrier()
    paths = [sorted(e.path for e in some) for some in events]
    assert (
        paths[0] == paths[1] == sorted([*(f"m/layers/{i}" for i in range(3)), linear])
    )
