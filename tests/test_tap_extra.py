"""`tap(..., extra=...)`: what every event carries."""

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_sow import save_intermediates as S, sow, tap
from jax.sharding import PartitionSpec as P

from .helpers import assert_close
from .tables import under


X = jnp.array([0.3, -1.2, 0.7])
XS = jnp.stack([X, 2 * X])


def _program(x):
    def step(x, w):
        x = lax.cond(w > 1, lambda x: sow(jnp.sin(w * x), "h"), lambda x: x, x)
        return x, None

    return jnp.cos(lax.scan(step, x, jnp.arange(4.0))[0]).sum()


def _while(x):
    grow = lambda x: sow(x + 1, "h")
    return lax.while_loop(lambda x: x.sum() < 6, grow, x).sum()


runs = under("eager", "filter_jit", "checkpoint")


@pytest.mark.sample(6)
@runs
@pytest.mark.parametrize(
    "fn, x",
    [
        (_program, X),
        (jax.grad(_program), X),
        (jax.grad(jax.checkpoint(_program)), X),
        (_while, X),
        (jax.vmap(_program), XS),
        (jax.vmap(_while), XS),
        (jax.vmap(jax.grad(_program)), XS),
    ],
    ids=["loop", "grad", "checkpoint", "while", "vmap", "vmap-while", "vmap-grad"],
)
def test_every_event_has_it(fn, x, wrap):
    events, plain = [], []

    def step(i, x):
        extra = {"step": i, "lr": (0.1 * X, "text")}
        return tap(fn, events.append, extra=extra)(x)

    run = wrap(step)
    for i in range(3):
        assert_close(run(jnp.int32(i), x), fn(x))
        jax.effects_barrier()
        assert events
        for event in events:
            assert set(event.extra) == {"step", "lr"}
            assert isinstance(event.extra["step"], np.ndarray | np.generic)
            assert event.extra["step"] == i and event.extra["step"].dtype == np.int32
            assert event.extra["lr"][1] == "text"
            assert_close(event.extra["lr"][0], np.asarray(0.1 * X))
        tap(fn, plain.append)(x)
        jax.effects_barrier()
        key = lambda e: (e.mode, e.count)
        assert len(events) == len(plain)
        for a, b in zip(sorted(events, key=key), sorted(plain, key=key)):
            assert b.extra is None and a.device is None
            assert_close(tuple(a), tuple(b))
        events.clear(), plain.clear()


def test_one_compilation_in_a_training_loop():
    traces, events = [], []
    model = eqx.nn.MLP(3, 1, 4, 1, key=jr.key(0))

    @eqx.filter_jit
    def step(i, model, x):
        traces.append(None)
        loss = lambda model, x: jnp.sum(model(x) ** 2)
        grad = tap(
            eqx.filter_grad(loss),
            events.append,
            capture=eqx.nn.Linear,
            when=lambda x: ~jnp.isfinite(x).all(),
            extra={"step": i},
        )
        grads = grad(model, x)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))

    for i in range(5):
        x = X.at[1].set(jnp.inf) if i == 3 else X
        model = step(jnp.int32(i), model, x)
    jax.effects_barrier()
    assert len(traces) == 1
    assert {int(e.extra["step"]) for e in events} == {3, 4}


@pytest.mark.slow
@pytest.mark.parametrize("fn", [_program, jax.grad(_program)])
def test_vmap_of_both_or_of_one(fn):
    steps = jnp.arange(2)
    events = []

    def run(i, x):
        return tap(fn, events.append, extra={"step": i})(x)

    for in_axes, args in (
        ((0, 0), (steps, XS)),
        ((None, 0), (steps[1], XS)),
        ((0, None), (steps, X)),
    ):
        for wrap in (lambda f: f, jax.jit):
            events.clear()
            expected = jax.vmap(lambda i, x: fn(x), in_axes)(*args)
            assert_close(wrap(jax.vmap(run, in_axes))(*args), expected)
            jax.effects_barrier()
            assert events
            for event in events:
                assert_close(event.extra["step"], np.asarray(args[0]))
                assert event.value.shape == args[1].shape


def test_on_a_mesh(mesh):
    events = []
    xs = jnp.arange(16.0).reshape(8, 2)
    local = lambda x: lax.scan(lambda x, i: (sow(x + i, "h"), i), x, jnp.arange(2.0))[0]
    spread = jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    tap(spread, events.append, extra=jnp.float32(7))(xs)
    jax.effects_barrier()
    assert len(events) == 16
    assert all(e.extra == 7 and e.device.keys() == {"d"} for e in events)
    assert "device=" in repr(events[0]) and "extra=" in repr(events[0])


def test_what_is_printed(capsys):
    tap(_program, extra={"step": jnp.int32(12)}, every=9)(X)
    jax.effects_barrier()
    assert capsys.readouterr().out.rstrip().endswith("step 12")


def test_keys_and_several_taps():
    mine, other = [], []
    fn = tap(_program, mine.append, extra=jr.key(3))
    _, got = S(tap(fn, other.append, extra=2 * X))(X)
    jax.effects_barrier()
    assert_close(mine[0].extra, np.asarray(jr.key_data(jr.key(3))))
    assert_close(other[0].extra, np.asarray(2 * X))
    assert len(mine) == len(other) == 2 == int(got["h"]["count"].sum())


def test_when_reads_it(capfd):
    f = lambda x: sow(2 * x, "h")
    events = []
    when = lambda value, extra: (extra["step"] % 2 == 0) & (value > 0)

    @jax.jit
    def step(i, x):
        return tap(f, events.append, when=when, extra={"step": i})(x)

    for i in range(5):
        step(i, jnp.float32(1 - i // 4))
    jax.effects_barrier()
    assert [int(e.extra["step"]) for e in events] == [0, 2]


# --- Iterations ---


class Stack(eqx.Module):
    blocks: eqx.nn.Linear

    def __call__(self, x):
        step = lambda x, block: (jnp.tanh(block(x)), None)
        return lax.scan(step, x, self.blocks)[0].sum()


def _told(fn, *args, **options):
    events = []
    tap(fn, events.append, **options)(*args)
    jax.effects_barrier()
    events.sort(key=lambda e: (e.mode, e.count))
    return [(e.name, e.mode, e.iterations, e.path) for e in events]


@runs
def test_iterations_of_layers(wrap):
    keys = jr.split(jr.key(0), 3)
    model = Stack(eqx.filter_vmap(lambda k: eqx.nn.Linear(3, 3, key=k))(keys))
    wrap = eqx.filter_checkpoint if wrap is jax.checkpoint else wrap
    fn = wrap(eqx.filter_grad(lambda m, x: m(x)))
    said = lambda mode, i: ("m/blocks/*", mode, (i,), f"m/blocks/{i}")
    want = [said("cotangent", i) for i in (2, 1, 0)]
    want += [said("primal", i) for i in range(3)]
    assert _told(fn, model, X, capture=eqx.nn.Linear) == want
    one = _told(fn, model, X, capture=eqx.nn.Linear, names="m/blocks/1")
    path = "m/blocks/1"
    assert one == [(path, mode, (1,), path) for mode in ("cotangent", "primal")]


def _nested(x):
    """A scan in a `while_loop` of three iterations."""
    inner = lambda x: lax.fori_loop(0, 2, lambda i, x: sow(x + i, "h"), x)
    return lax.while_loop(lambda x: x < 3, inner, x)


def _moved(x):
    """JAX moves the sine out of the loop, under `grad`."""
    body = lambda c, y: (c * y * sow(jnp.sin(x), "h"), None)
    return lax.scan(body, 1.0, jnp.arange(1.0, 4.0), reverse=True)[0]


@under("eager", "jit")
def test_iterations_of_other_loops(wrap):
    each = [(i, j) for i in range(3) for j in range(2)]
    want = [("h", "primal", ij, "h/{}/{}".format(*ij)) for ij in each]
    assert _told(wrap(_nested), 0.0) == want
    # Lanes that have finished are told beside those that run.
    assert _told(wrap(jax.vmap(_nested)), jnp.array([2.0, 0.0])) == want
    every = [("h/1", "primal", ij, "h/{}/{}".format(*ij)) for ij in each if ij[1]]
    assert _told(wrap(_nested), 0.0, names="h/1") == every
    said = lambda mode, i: ("h", mode, (i,), f"h/{i}")
    want = [said("cotangent", i) for i in range(3)]
    want += [said("primal", i) for i in (2, 1, 0)]
    assert _told(wrap(jax.grad(_moved)), 0.5) == want
    assert _told(lambda x: sow(x, "h"), 0.5) == [("h", "primal", (), "h")]


def test_the_line_has_the_path(capfd):
    tap(_nested, names="h")(2.0)
    jax.effects_barrier()
    assert capfd.readouterr().out.startswith("h/0/0 primal [0]  f32[]")
