"""`capture=jax.ad_checkpoint.checkpoint_name`: the values that the authors of a model
have named for the policies of `jax.checkpoint`. The reference is the same model without
these names, which hands out the values, and zeros added to them."""

import collections
import functools

import equinox as eqx
import jax
import jax.extend.core as jexc
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_sow import (
    Last,
    plant,
    save_intermediates as S,
    sow,
    SowError,
    tap,
    UnknownSowError,
)
from jax.ad_checkpoint import checkpoint_name

from .helpers import assert_close


X = jnp.array([0.3, -1.2, 0.7])
KEYS = jr.split(jr.key(0), 3)
CAPTURE = dict(capture=checkpoint_name)


class Block(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        a, b = jr.split(key)
        self.up = eqx.nn.Linear(3, 5, key=a)
        self.down = eqx.nn.Linear(5, 3, key=b)

    def __call__(self, x):
        h = checkpoint_name(jnp.sin(self.up(x)), "mlp_hidden")
        return x + checkpoint_name(jnp.tanh(self.down(h)), name="mlp_out")


class Model(eqx.Module):
    blocks: Block | list[Block]
    policy: object = eqx.field(static=True)

    def __call__(self, x):
        @functools.partial(jax.checkpoint, policy=self.policy)
        def step(x, block):
            return block(x), None

        if isinstance(self.blocks, list):
            for block in self.blocks:
                x, _ = step(x, block)
            return x
        return lax.scan(step, x, self.blocks)[0]


def by_hand(blocks, x, zeros):
    """Zeros are added to the values, which come back beside the output."""
    values = []
    for block, (hidden, out) in zip(blocks, zeros):
        h = jnp.sin(block.up(x)) + hidden
        y = jnp.tanh(block.down(h)) + out
        values.append((h, y))
        x = x + y
    return x, values


BLOCKS = [Block(key) for key in KEYS]
STACK = eqx.filter_vmap(Block)(KEYS)
ZEROS = [(jnp.zeros(5), jnp.zeros(3))] * 3
NAMES = ["mlp_hidden", "mlp_out"]


def _loss(m, x):
    return jnp.sum(m(x) ** 2)


GRAD = eqx.filter_grad(_loss)


def _want():
    """The values, and their cotangents, by the names in a list."""
    _, values = by_hand(BLOCKS, X, ZEROS)
    loss = lambda zeros: jnp.sum(by_hand(BLOCKS, X, zeros)[0] ** 2)
    cotangents = jax.grad(loss)(ZEROS)
    return {
        f"m/blocks/{i}/{name}": {"primal": x, "cotangent": g}
        for i in range(3)
        for name, x, g in zip(NAMES, values[i], cotangents[i])
    }


_POLICIES = jax.checkpoint_policies
POLICIES = {
    "none": None,
    "everything": _POLICIES.everything_saveable,
    "nothing": _POLICIES.nothing_saveable,
    "dots": _POLICIES.dots_saveable,
    "checkpoint_dots": _POLICIES.checkpoint_dots,
    "no batch": _POLICIES.dots_with_no_batch_dims_saveable,
    "checkpoint no batch": _POLICIES.checkpoint_dots_with_no_batch_dims,
    "these": _POLICIES.save_only_these_names("mlp_out"),
    "hidden": _POLICIES.save_only_these_names("mlp_hidden"),
    "both": _POLICIES.save_only_these_names(*NAMES),
    "another": _POLICIES.save_only_these_names("attn"),
    "any but": _POLICIES.save_any_names_but_these("mlp_out"),
    "anything but": _POLICIES.save_anything_except_these_names("mlp_hidden"),
    "two": _POLICIES.save_from_both_policies(
        _POLICIES.dots_saveable, _POLICIES.save_only_these_names("mlp_hidden")
    ),
}
MODELS = {
    "list": lambda policy: Model(BLOCKS, policy),
    "stack": lambda policy: Model(STACK, policy),
}


def _equations(jaxpr, counts):
    """How often each primitive is in a jaxpr, and in those inside."""
    for eqn in jaxpr.eqns:
        counts[eqn.primitive.name] += 1
        for x in jax.tree.leaves([*eqn.params.values()], is_leaf=_is_jaxpr):
            if _is_jaxpr(x):
                _equations(getattr(x, "jaxpr", x), counts)
    return counts


def _is_jaxpr(x):
    return isinstance(x, jexc.Jaxpr | jexc.ClosedJaxpr)


def _counted(fn, model):
    arrays, static = eqx.partition(model, eqx.is_array)
    run = lambda arrays, x: eqx.filter(fn(eqx.combine(arrays, static), x), eqx.is_array)
    jaxpr = jax.make_jaxpr(run)(arrays, X)
    counts = _equations(jaxpr.jaxpr, collections.Counter())
    return {name: counts[name] for name in ("dot_general", "tanh", "sin", "cos")}


# --- policies ---
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_stay_as_they_are(policy, kind):
    """What is computed again in the backward pass is what it was without."""
    model = MODELS[kind](POLICIES[policy])
    without = _counted(GRAD, model)
    # An output that is kept is one that is not computed again.
    primals = lambda m, x: S(GRAD, modes="primal", **CAPTURE)(m, x)[0]
    whole = lambda m, x: S(GRAD, **CAPTURE)(m, x)
    edited = eqx.filter_grad(plant(_loss, {"**/mlp_*": lambda v: v}, **CAPTURE))
    for fn in (primals, whole, edited):
        assert _counted(fn, model) == without
    assert _counted(tap(GRAD, lambda event: None, **CAPTURE), model) == without


def test_the_policies_differ():
    """So that the test above is about something."""
    counts = {
        name: str(_counted(GRAD, MODELS["stack"](p))) for name, p in POLICIES.items()
    }
    assert len({*counts.values()}) >= 4, counts
    assert counts["hidden"] != counts["nothing"]
    assert counts["everything"] != counts["nothing"] == counts["another"]


class Edited(Block):
    def __call__(self, x):
        h = checkpoint_name(jnp.cos(jnp.sin(self.up(x))), "mlp_hidden")
        return x + checkpoint_name(jnp.tanh(self.down(h)), name="mlp_out")


@pytest.mark.parametrize("policy", ["hidden", "nothing"])
def test_what_a_policy_saves_is_what_was_planted(policy):
    edit = {"blocks/*/mlp_hidden": jnp.cos}
    got = eqx.filter_grad(plant(_loss, edit, **CAPTURE))
    by_hand = Model(eqx.filter_vmap(Edited)(KEYS), POLICIES[policy])
    want = _counted(GRAD, by_hand)
    assert _counted(got, MODELS["stack"](POLICIES[policy])) == want


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("policy", POLICIES)
def test_values_and_cotangents(policy, kind):
    model, want = MODELS[kind](POLICIES[policy]), _want()
    grads, got = eqx.filter_jit(S(GRAD, **CAPTURE))(model, X)
    assert_close(grads, eqx.filter_jit(GRAD)(model, X))
    if kind == "stack":
        assert list(got) == [f"m/blocks/*/{name}" for name in NAMES]
    assert list(got.unstack()) == list(want)
    for name, modes in want.items():
        assert_close(got[name], modes)
    for name in NAMES:
        each = [want[f"m/blocks/{i}/{name}"]["cotangent"] for i in range(3)]
        assert_close(got[f"**/{name}"]["cotangent"], jnp.stack(each))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("policy", POLICIES)
def test_planted(policy, kind):
    model = MODELS[kind](POLICIES[policy])

    def edited(blocks, x):
        for i, block in enumerate(blocks):
            h = jnp.sin(block.up(x))
            y = jnp.tanh(block.down(jnp.cos(h) if i == 1 else h))
            x = x + 2 * y
        return jnp.sum(x**2)

    edit = {"blocks/*/mlp_out": lambda v: 2 * v, "blocks/1/mlp_hidden": jnp.cos}
    # Around the gradient, and inside of it.
    inside = eqx.filter_grad(plant(_loss, edit, **CAPTURE))
    want = eqx.filter_grad(edited)(BLOCKS, X)
    if kind == "stack":
        want = jax.tree.map(lambda *xs: jnp.stack(xs), *want)
    assert_close(eqx.filter_jit(inside)(model, X).blocks, want)
    # A planted cotangent.
    double = {"blocks/2/mlp_out": lambda g: 2 * g}
    doubled = plant(GRAD, double, mode="cotangent", **CAPTURE)
    grads = eqx.filter_jit(lambda m, x: (GRAD(m, x), doubled(m, x)))(model, X)
    down = lambda m, i: (
        m.blocks[i].down.weight if kind == "list" else m.blocks.down.weight[i]
    )
    assert_close(down(grads[1], 2), 2 * down(grads[0], 2))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("policy", ["none", "these", "dots", "everything"])
def test_events(policy, kind):
    """One for each value, though it is computed again."""
    events = []
    fn = tap(GRAD, events.append, **CAPTURE)
    model = MODELS[kind](POLICIES[policy])
    assert_close(eqx.filter_jit(fn)(model, X), GRAD(model, X))
    jax.effects_barrier()
    want = _want()
    assert len(events) == 2 * len(want)
    for event in events:
        value = jax.tree.map(jnp.asarray, event.value)
        assert_close(value, want[event.path][event.mode])


# --- names ---
class Twice(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x):
        for _ in range(2):
            x = checkpoint_name(jnp.tanh(self.linear(x)), "h")
        return checkpoint_name(x, "end")


def test_several_runs_are_a_tuple(call):
    model = Twice(eqx.nn.Linear(3, 3, key=KEYS[0]))
    fn = eqx.filter_grad(lambda m, x: m(x).sum())
    _, got = call(S(fn, **CAPTURE), model, X)
    first = jnp.tanh(model.linear(X))
    second = jnp.tanh(model.linear(first))
    assert list(got) == ["m/h", "m/end"]
    assert_close(got["m/h"]["primal"], (first, second))
    assert_close(got["m/end"]["primal"], second)
    above = jax.grad(lambda h: jnp.tanh(model.linear(h)).sum())(first)
    assert_close(got["m/h"]["cotangent"], (above, jnp.ones(3)))
    _, last = call(S(fn, reduce={"m/h": Last()}, modes="primal", **CAPTURE), model, X)
    assert_close(last["m/h"]["primal"], second)
    planted = plant(lambda m, x: m(x), {"h": (X, 2 * X)}, **CAPTURE)
    assert_close(call(planted, model, X), 2 * X)


def test_beside_classes_and_functions():
    fn = lambda m, x: jax.nn.softmax(m(x))
    model, options = Model(STACK, None), (eqx.nn.Linear, checkpoint_name)
    for capture in ((*options, jax.nn.softmax), [*options, jax.nn.softmax]):
        out, got = S(fn, capture=capture)(model, X)
        inside = ("up", "mlp_hidden", "down", "mlp_out")
        assert list(got) == [*(f"m/blocks/*/{name}" for name in inside), "softmax"]
        assert_close(got["softmax"]["primal"], out)
    up = got["m/blocks/*/up"]["primal"]
    assert_close(got["m/blocks/*/mlp_hidden"]["primal"], jnp.sin(up))
    # They are no modules, and no functions that are captured by themselves.
    for capture in (True, eqx.nn.Linear, jax.nn.softmax):
        _, got = S(fn, capture=capture)(model, X)
        assert not any("mlp_" in name for name in got)


def test_in_functions_and_scopes():
    @jax.jit
    def act(x):
        return checkpoint_name(jnp.sin(x), "act")

    fn = lambda x: checkpoint_name(act(sow(2 * x, "h")), "end")
    out, got = S(fn, **CAPTURE)(X)
    assert {*got} == {"h", "act", "end"}
    assert_close(got["act"]["primal"], jnp.sin(2 * X))
    assert_close(out, jnp.sin(2 * X))
    # A tree has one name, as the value of `checkpoint_name` is one.
    pair = lambda x: checkpoint_name({"a": x, "b": 2 * x}, "pair")
    assert_close(S(pair, **CAPTURE)(X)[1]["pair"]["primal"], {"a": X, "b": 2 * X})


@pytest.mark.parametrize("kind", MODELS)
def test_one_lane_and_one_layer(kind):
    """Under `vmap`, and selected by `names=`."""
    model, xs = MODELS[kind](None), jnp.stack([X, -X])
    fn = lambda m, x: jax.vmap(m)(x)
    _, got = S(fn, names="blocks/1/mlp_out", **CAPTURE)(model, xs)
    assert list(got) == ["m/blocks/1/mlp_out"]
    want = [by_hand(BLOCKS, x, ZEROS)[1][1][1] for x in xs]
    assert_close(got["m/blocks/1/mlp_out"]["primal"], jnp.stack(want))


def test_without_the_capture_nothing_is_marked():
    model = Model(STACK, None)
    with pytest.raises(UnknownSowError):
        S(GRAD, names="**/mlp_out", capture=True)(model, X)
    arrays, static = eqx.partition(model, eqx.is_array)
    run = lambda fn: str(
        jax.make_jaxpr(lambda a, x: fn(eqx.combine(a, static), x))(arrays, X)
    )
    before = run(_loss)
    S(_loss, **CAPTURE)(model, X)
    assert run(_loss) == before


def test_what_is_wrong():
    model = Model(STACK, None)
    with pytest.raises(SowError, match="`m/blocks/./mlp_out`"):
        plant(_loss, {"blocks/1/mlp_out": X[:2]}, **CAPTURE)(model, X)
    with pytest.raises(UnknownSowError, match="blocks/0/mlp_out' to 'm/blocks/2/mlp"):
        S(_loss, names="blocks/7/mlp_out", **CAPTURE)(model, X)
    with pytest.raises(UnknownSowError, match="selects nothing that is called"):
        S(jnp.sin, **CAPTURE)(X)
