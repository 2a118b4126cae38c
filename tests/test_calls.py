"""Whole calls (`calls=True`) and inputs: of modules and of functions, in
`save_intermediates`, `plant` and `tap`."""

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_sow import Call, plant, save_intermediates as S, SowError, tap, UnknownSowError

from .helpers import assert_close
from .tables import under


X = jnp.array([0.3, -1.2, 0.7])
XS = jnp.stack([X, 2 * X])
_lanes = lambda f: jax.vmap(f, (None, 0))
runs = under("eager", "filter_jit", "filter_checkpoint", _lanes)


class Stack(eqx.Module):
    """Layers with a residual, in a scan, and a function."""

    blocks: eqx.nn.Linear

    def __init__(self):
        self.blocks = eqx.filter_vmap(lambda k: eqx.nn.Linear(3, 3, key=k))(
            jr.split(jr.key(0), 4)
        )

    def __call__(self, x):
        step = lambda x, block: (jnp.sin(block(x)), None)
        return jax.nn.softmax(lax.scan(step, x, self.blocks)[0], axis=-1)


def by_hand(model, x, zeros=None, skip=None):
    """The output, and the inputs and outputs of all layers. `zeros`: added to these."""
    ins, outs = [], []
    for i in range(4):
        block = jax.tree.map(lambda a: a[i], model.blocks)
        x = x if zeros is None else x + zeros[0][i]
        ins.append(x)
        x = x if i == skip else block(x)
        x = x if zeros is None else x + zeros[1][i]
        outs.append(x)
        x = jnp.sin(x)
    return jax.nn.softmax(x), (jnp.stack(ins), jnp.stack(outs)), x


MODEL = Stack()
CAPTURE = dict(capture=(eqx.nn.Linear, jax.nn.softmax), calls=True, inputs=True)
run = lambda model, x: model(x)


@runs
def test_what_went_in_and_what_came_out(wrap):
    x = XS if wrap is _lanes else X
    out, got = S(wrap(run), **CAPTURE)(MODEL, x)
    want, (ins, outs), last = wrap(by_hand)(MODEL, x)
    assert_close(out, want)
    names = ["model/blocks/*.inputs", "model/blocks/*", "model/blocks/*.call"]
    names += ["model/softmax.inputs", "model/softmax", "model/softmax.call"]
    assert list(got) == names
    whole = got["model/blocks/*.call"]["primal"]
    assert type(whole) is Call
    assert_close(whole, Call((ins,), {}, outs))
    assert_close(got["model/blocks/*.inputs"]["primal"], ((ins,), {}))
    assert_close(got["model/softmax.call"]["primal"], Call((last,), {"axis": -1}, want))
    assert_close(got["model/softmax.inputs"]["primal"], ((last,), {"axis": -1}))


@pytest.mark.parametrize("checkpoint", [False, True])
def test_cotangents_of_the_parts(checkpoint):
    fn = jax.checkpoint(run) if checkpoint else run
    loss = lambda m, x: fn(m, x)[0]
    _, got = jax.jit(S(jax.grad(loss), **CAPTURE))(MODEL, X)
    zeros = (jnp.zeros((4, 3)),) * 2
    of_hand = jax.grad(lambda zeros: by_hand(MODEL, X, zeros)[0][0])(zeros)
    ct = got["m/blocks/*.call"]["cotangent"]
    # The program goes on with the output alone.
    assert_close(ct, Call((0 * of_hand[0],), {}, of_hand[1]))
    assert_close(got["m/blocks/*.inputs"]["cotangent"], ((of_hand[0],), {}))
    # A loss on a captured part.
    part = lambda x: S(run, **CAPTURE)(MODEL, x)[1]["model/blocks/*.call"]["primal"]
    of_part = jax.grad(lambda x: (part(x).args[0] * part(x).out).sum())(X)
    hand = lambda x: by_hand(MODEL, x)[1]
    assert_close(of_part, jax.grad(lambda x: (hand(x)[0] * hand(x)[1]).sum())(X))


@runs
def test_a_layer_is_skipped(wrap):
    x = XS if wrap is _lanes else X
    skip = {"model/blocks/2.call": lambda c: c._replace(out=c.args[0])}
    want, (ins, outs), _ = wrap(lambda m, x: by_hand(m, x, skip=2))(MODEL, x)
    skipped = plant(wrap(run), skip, **CAPTURE)
    assert_close(skipped(MODEL, x), want)
    grad = jax.grad(lambda x: skipped(MODEL, x).ravel()[0])(x)
    by = lambda m, x: by_hand(m, x, skip=2)[0]
    assert_close(grad, jax.grad(lambda x: wrap(by)(MODEL, x).ravel()[0])(x))
    # It is still a mark, and what was captured fits.
    out, got = S(skipped)(MODEL, x)
    assert_close(got["model/blocks/*.call"]["primal"], Call((ins,), {}, outs))
    _, got = S(wrap(run), **CAPTURE)(MODEL, x)
    assert_close(plant(wrap(run), got, **CAPTURE)(MODEL, x), wrap(run)(MODEL, x))


def test_planted_inputs():
    zero = lambda v: ((jnp.zeros_like(v[0][0]),), v[1])
    got = plant(run, {"model/blocks/3.inputs": zero}, **CAPTURE)(MODEL, X)
    last = jnp.sin(MODEL.blocks.bias[3])
    assert_close(got, jax.nn.softmax(last))
    got = plant(run, {"model/softmax.inputs": zero}, **CAPTURE)(MODEL, X)
    assert_close(got, jnp.full(3, 1 / 3))
    # The gradient that leaves through the input.
    loss = lambda m, x: m(x)[0]
    none = {"model/blocks/0.inputs": zero}
    grad = jax.grad(lambda x: plant(run, none, **CAPTURE)(MODEL, x)[0])(X)
    assert_close(grad, jnp.zeros(3))
    stop = plant(
        jax.grad(loss, 1), {"m/blocks/1.inputs": zero}, mode="cotangent", **CAPTURE
    )
    assert_close(stop(MODEL, X), jnp.zeros(3))


def test_one_transform_sees_both():
    norm = jnp.linalg.norm
    growth = lambda c: norm(c.out) / norm(c.args[0])
    options = dict(CAPTURE, names="*/blocks/*.call", transform=growth)
    _, got = S(run, **options)(MODEL, X)
    _, (ins, outs), _ = by_hand(MODEL, X)
    want = norm(outs, axis=-1) / norm(ins, axis=-1)
    assert_close(got["model/blocks/*.call"]["primal"], want)
    events = []
    tap(run, events.append, **options)(MODEL, X)
    jax.effects_barrier()
    events.sort(key=lambda e: e.count)
    assert_close(jnp.stack([e.value for e in events]), want)
    assert [e.path for e in events] == [f"model/blocks/{i}.call" for i in range(4)]


def test_arguments_are_as_they_were_before_the_call():
    class Norm(eqx.Module):
        norm: eqx.nn.BatchNorm

        def __call__(self, x, state, log):
            log.append(x)
            return self.norm(x, state)

    make = lambda: Norm(eqx.nn.BatchNorm(3, "batch", mode="batch"))
    model, state = eqx.nn.make_with_state(make)()

    def fn(x, state):
        return model(x, state, [])

    mapped = jax.vmap(fn, (0, None), (0, None), axis_name="batch")
    (out, new), got = S(mapped, capture=Norm, calls=True)(XS, state)
    call = got["model.call"]["primal"]
    assert_close(call.args[0], XS)
    assert call.args[2] == []
    assert_close((out, new), mapped(XS, state))
    # A state that was captured before the call can be used.
    old = jax.tree.leaves(state)
    assert [x.shape[1:] for x in jax.tree.leaves(call.args[1])] == [
        x.shape for x in old
    ]


def test_what_is_wrong():
    options = dict(capture=eqx.nn.Linear, calls=True)
    wrong = {"model/blocks/*.call": lambda c: c._replace(out=c.args[0][:2])}
    with pytest.raises(SowError, match=r"float32\[2\] where float32\[3\] is marked"):
        plant(run, wrong, **options)(MODEL, X)
    with pytest.raises(UnknownSowError, match="Whole calls are marked with `calls"):
        plant(run, {"model/blocks/*.call": X}, capture=True)(MODEL, X)
