import math
import threading

import equinox as eqx
import equinox.internal as eqxi
import eqx_sow
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from eqx_sow import (
    Append,
    Buffer,
    plant,
    save_intermediates,
    sow,
    summarize,
    tabulate,
    tap,
    TapEvent,
)
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from tests import oracle as orc
from tests.helpers import assert_close, primitives
from tests.tables import under


X = jnp.array([0.3, -0.7, 1.1])
XS = jnp.array([[0.3, -0.7, 1.1], [1.9, 0.4, -0.2]])
ROOM = 40


def watch(fn, *args, **options):
    """The output, and the events in the order in which they came."""
    events = []
    out = tap(fn, events.append, **options)(*args)
    jax.block_until_ready(jtu.tree_leaves(out))
    jax.effects_barrier()
    return out, events


def by_name(events):
    log = {}
    for e in events:
        log.setdefault((e.name, e.mode), []).append(e)
    return log


def seen(events):
    """The counts of each name and mode. Between names there is no order."""
    return {key: [e.count for e in mine] for key, mine in by_name(events).items()}


def values(events, name, mode="primal"):
    return [e.value for e in events if (e.name, e.mode) == (name, mode)]


def assert_same_events(events, want):
    assert seen(events) == seen(want)
    want = by_name(want)
    for key, mine in by_name(events).items():
        for e, w in zip(mine, want[key], strict=True):
            assert_close((e.value, e.ran), (w.value, w.ran))


def _numpy(tree):
    return jtu.tree_map(lambda x: np.asarray(x) if eqx.is_array(x) else x, tree)


def _at(tree, index):
    at = lambda x: np.asarray(x[index]) if eqx.is_array(x) else x
    return jtu.tree_map(at, tree)


def _lanes_of(buffer):
    """How many lanes there are in front of the axis of the buffer."""
    arrays = [x for x in jtu.tree_leaves(buffer) if eqx.is_array(x)]
    return arrays[0].shape.index(ROOM)


def assert_law_10(fn, *args):
    """The events, of each lane, are what a buffer with enough room has of it."""
    plain = fn(*args)
    out, events = watch(fn, *args)
    assert_close(_numpy(out), _numpy(plain))
    _, intermediates = save_intermediates(fn, reduce=Buffer(ROOM))(*args)
    intermediates = _numpy(intermediates)
    log = by_name(events)
    ran = {
        (name, mode)
        for name, modes in intermediates.items()
        for mode in modes
        if mode != "count" and modes["count"].any()
    }
    assert set(log) == ran
    for name, mode in ran:
        mine = log[name, mode]
        assert [e.count for e in mine] == list(range(len(mine)))
        entry = intermediates[name]
        assert entry["count"].max() <= ROOM
        n = _lanes_of(entry[mode])
        for lane in np.ndindex(entry["count"].shape):
            here = [e for e in mine if e.ran is None or e.ran[lane]]
            assert len(here) == entry["count"][lane]
            for i, e in enumerate(here):
                assert isinstance(e, TapEvent)
                # What does not vary over the lanes has none.
                assert_close(_at(e.value, lane[:n]), _at(entry[mode], (*lane[:n], i)))
    return events


# --- The law ---


def straight(x):
    return sow(2 * sow(jnp.sin(x), "a"), "b").sum()


def scanned(x):
    def body(c, x):
        c = sow(jnp.sin(c) * x, "c")
        return c, sow(c.sum(), "s")

    c, ys = lax.scan(body, x, jnp.arange(1.0, 4.0))
    return sow(c, "end").sum() + ys.sum()


def reversed_scan(x):
    def body(c, x):
        return sow(jnp.sin(c) * x, "c"), None

    return lax.scan(body, x, jnp.arange(1.0, 4.0), reverse=True)[0].sum()


def loops(x):
    def inner(i, x):
        return sow(jnp.cos(x), "inner")

    def outer(i, x):
        return sow(lax.fori_loop(0, 3, inner, x) * 2.0, "outer")

    return lax.fori_loop(0, 2, outer, x).sum()


def branches(x):
    def body(c, i):
        def double(c):
            return sow(2 * c, "double")

        def both(c):
            return sow(c + 1, "both") * 0.3

        c = lax.cond(c[0] < 0.5, lambda c: both(double(c)), both, c)
        return sow(c, "c"), None

    return lax.scan(body, x, jnp.arange(4))[0].sum()


def switched(x):
    def case(k):
        return lambda x: sow(x * float(k + 1), "case")

    def body(c, i):
        return lax.switch(i, [case(0), lambda x: x / 2, case(2)], c), None

    return lax.scan(body, x, jnp.array([2, 0, 1, 1, 0]))[0].sum()


def never(x):
    return lax.cond(x[0] > 100, lambda x: sow(x, "never"), lambda x: x, x).sum()


def constant_in_loop(x):
    def body(c, i):
        return c * sow(jnp.sin(x), "same") + sow(c, "c"), None

    return lax.scan(body, x, length=3)[0].sum()


def checkpointed(x):
    @jax.checkpoint
    def body(c, i):
        return sow(jnp.sin(c), "c") * 2, None

    return sow(lax.scan(body, x, length=3)[0], "end").sum()


@jax.custom_vjp
def _clipped(x):
    return sow(jnp.sin(x), "primal only")


def _clipped_forward(x):
    y = sow(jnp.sin(x), "forward")
    return y, x


def _clipped_backward(x, ct):
    return (sow(jnp.clip(ct, -1, 1), "backward") * jnp.cos(x),)


_clipped.defvjp(_clipped_forward, _clipped_backward)


def custom_vjp(x):
    return (3 * sow(_clipped(2 * x), "out")).sum()


@jax.custom_jvp
def _scaled(x):
    return sow(x * 2, "inside")


@_scaled.defjvp
def _scaled_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return x * 2, sow(t * 5, "rule")


def custom_jvp(x):
    return lax.scan(lambda c, _: (_scaled(c) / 3, None), x, length=2)[0].sum()


def tree(x):
    y = sow({"x": x * 2, "n": jnp.arange(2), "text": "static", "one": 1}, "tree")
    return y["x"].sum()


def replayed(x):
    def body(c):
        return sow(jnp.sin(c) * 1.5, "c")

    return eqxi.while_loop(
        lambda c: c[0] > -100, body, x, max_steps=3, kind="checkpointed"
    ).sum()


def twice(x):
    return sow(sow(x * 2, "x") * 3, "x").sum()


DIFFERENTIABLE = [
    straight,
    scanned,
    reversed_scan,
    loops,
    branches,
    switched,
    never,
    checkpointed,
    custom_vjp,
    tree,
    replayed,
]


def counted_while(x):
    def body(c):
        i, x = c
        return i + 1, sow(jnp.sin(x) + 1, "x")

    return lax.while_loop(lambda c: c[0] < 5, body, (0, x))[1].sum()


def while_of_value(x):
    def body(x):
        y = lax.scan(lambda c, _: (sow(c / 1.5, "inner"), None), x, length=2)[0]
        return sow(y, "x")

    return lax.while_loop(lambda x: x.sum() > 0.2, body, x).sum()


def _named(fns):
    return pytest.mark.parametrize("fn", fns, ids=lambda f: f.__name__)


@_named([*DIFFERENTIABLE, custom_jvp, constant_in_loop, counted_while, while_of_value])
def test_law_10(fn):
    assert_law_10(fn, X)
    assert_law_10(jax.jit(fn), X)


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(f, marks=pytest.mark.slow if f in (branches, replayed) else ())
        for f in (*DIFFERENTIABLE, constant_in_loop)
    ],
    ids=lambda f: f.__name__,
)
def test_law_10_cotangents(fn):
    events = assert_law_10(jax.grad(fn), X)
    assert fn is never or any(e.mode == "cotangent" for e in events)
    assert_law_10(jax.jit(jax.grad(fn)), X)


@_named([straight, scanned, branches, custom_jvp, counted_while])
def test_law_10_tangents(fn):
    def along(x, t):
        return jax.jvp(fn, (x,), (t,))

    events = assert_law_10(along, X, X[::-1])
    assert fn is custom_jvp or any(e.mode == "tangent" for e in events)


@pytest.mark.slow
def test_law_10_second_order():
    def forward_over_reverse(x, t):
        return jax.jvp(jax.grad(scanned), (x,), (t,))

    def reverse_over_forward(x, t):
        return jax.grad(lambda x: jax.jvp(scanned, (x,), (t,))[1])(x)

    events = assert_law_10(forward_over_reverse, X, X[::-1])
    assert "cotangent.tangent" in {e.mode for e in events}
    events = assert_law_10(reverse_over_forward, X, X[::-1])
    assert "tangent.cotangent" in {e.mode for e in events}


@_named([scanned, branches, switched, constant_in_loop, while_of_value, checkpointed])
def test_law_10_under_vmap(fn):
    events = assert_law_10(jax.vmap(fn), XS)
    assert all(e.value.shape[0] == 2 for e in events)
    if fn in (branches, while_of_value):
        assert any(e.ran is not None and not e.ran.all() for e in events)


@pytest.mark.slow
@_named([scanned, branches, checkpointed, custom_vjp])
def test_law_10_gradients_under_vmap(fn):
    assert_law_10(jax.vmap(jax.grad(fn)), XS)
    assert_law_10(jax.grad(lambda x: jax.vmap(fn)(x).sum()), XS)


def test_nested_lanes():
    def fn(x):
        inner = jax.vmap(lambda y: sow(x * y, "xy") + sow(jnp.sin(y), "y"), in_axes=1)
        return lax.scan(lambda c, _: (c + inner(XS).sum(), None), 0.0, length=2)[0]

    _, events = watch(jax.vmap(fn), jnp.arange(4.0))
    xy = values(events, "xy")
    assert len(xy) == 2
    want = np.arange(4.0)[:, None, None] * np.asarray(XS).T[None]
    np.testing.assert_allclose(xy[0], want, rtol=1e-6)
    # It does not vary over the outer one.
    assert values(events, "y")[0].shape == (3, 2)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [False, True], ids=["one", "lanes"])
@pytest.mark.parametrize("seed", [1, 5])
def test_law_10_random_programs(seed, lanes):
    program = orc.random_program(seed)
    f = orc.to_jax(program, sow)
    rng = np.random.default_rng([seed, 1])
    x = jnp.asarray(rng.uniform(-1.5, 1.5, (2, orc.SIZE)).astype(np.float32))

    def total(x):
        return f(x).sum()

    fn, x = (jax.vmap(total), x) if lanes else (total, x[0])
    _same_as_a_buffer(fn, x)
    if not orc.has_while(program):
        _same_as_a_buffer(jax.grad(lambda x: jnp.sum(fn(x))), x)


def _same_as_a_buffer(fn, x):
    try:
        save_intermediates(fn, reduce=Buffer(ROOM))(x)
    except eqx_sow.SowError:
        with pytest.raises(eqx_sow.SowError):
            watch(fn, x)
        return
    _, intermediates = save_intermediates(fn, reduce=Buffer(1))(x)
    most = max([int(np.max(m["count"])) for m in intermediates.values()], default=0)
    if most <= ROOM:
        assert_law_10(fn, x)


# --- Outputs and gradients ---


def test_output_is_that_of_fn(call):
    def fn(x, flag):
        y = sow(x * 2, "y")
        return {"y": y, "weak": sow(jnp.asarray(1.0), "w"), "text": "t", "flag": flag}

    got = call(lambda x: tap(fn, lambda e: None)(x, "flag"), X)
    assert_close(got, fn(X, "flag"), weak=True)


@_named(DIFFERENTIABLE)
def test_gradient_through_it(fn):
    events = []
    got = jax.grad(tap(fn, events.append))(X)
    jax.effects_barrier()
    assert_close(got, jax.grad(fn)(X))
    assert {e.mode for e in events} <= {"primal"}


def test_gradient_of_a_checkpointed_tap_tells_once():
    events = []

    @jax.jit
    @jax.grad
    @jax.checkpoint
    def grad(x):
        return tap(scanned, events.append)(x)

    assert_close(grad(X), jax.grad(scanned)(X))
    jax.effects_barrier()
    assert [e.count for e in events if e.name == "c"] == [0, 1, 2]


def test_custom_rules_are_kept():
    @jax.custom_jvp
    def f(x):
        return sow(jnp.sin(x), "y")

    f.defjvp(lambda x, t: (jnp.sin(x[0]), 7 * t[0]))
    events = []
    assert jax.grad(tap(f, events.append))(1.0) == 7
    jax.effects_barrier()
    assert seen(events) == {("y", "primal"): [0]}


def test_wrapped_model_is_a_pytree_with_the_arrays_of_fn():
    model = eqx.nn.Linear(2, 2, key=jr.key(0))
    tapped = tap(model, print, capture=True)
    assert jtu.tree_leaves(tapped) == jtu.tree_leaves(model)
    assert tapped.in_features == 2 if hasattr(tapped, "in_features") else True


# --- vmap of a tap ---


@_named([scanned, branches, switched, while_of_value, checkpointed])
def test_law_3(fn):
    _, want = watch(jax.vmap(fn), XS)
    events = []
    out = jax.vmap(tap(fn, events.append))(XS)
    jax.effects_barrier()
    assert_close(out, jax.vmap(fn)(XS))
    assert_same_events(events, want)


def test_law_3_of_two(call):
    events = []

    def fn(x, y):
        return sow(x + y, "z")

    def run(x):
        inner = jax.vmap(tap(fn, events.append), in_axes=(None, 0))
        return jax.vmap(inner, in_axes=(0, None), out_axes=1)(x, 10 * x)

    out = call(run, jnp.arange(3.0))
    jax.effects_barrier()
    x = np.arange(3.0, dtype=np.float32)
    want = x[:, None] + 10 * x
    assert_close(np.asarray(out), want.T)
    assert len(events) in (1, 2)  # `call` may run it twice
    for e in events:
        assert_close(e.value, want)


def test_vmap_of_a_tap_keeps_what_has_no_lanes():
    state = jnp.arange(2.0)
    fn = tap(lambda x: (sow(x, "x"), state * 2), lambda e: None)
    out, same = jax.vmap(fn, out_axes=(0, None))(XS)
    assert_close(out, XS)
    assert_close(same, state * 2)


def test_vmap_of_a_tap_with_collectives():
    events = []

    def fn(x):
        first = (lax.axis_index("lanes") == 0).astype(jnp.float32)
        return lax.psum(sow(x, "x"), "lanes") * first

    out = jax.vmap(tap(fn, events.append), axis_name="lanes")(XS)
    jax.effects_barrier()
    assert_close(out, jax.vmap(fn, axis_name="lanes")(XS))
    assert_close([e.value for e in events], [np.asarray(XS)])


@pytest.mark.parametrize("how", ["grad", "jit", "scan", "closure"])
def test_vmap_that_comes_later_is_one_event(how):
    events = []
    tapped = tap(scanned, events.append)
    fns = {
        "grad": jax.grad(tapped),
        "jit": jax.jit(tapped),
        "scan": lambda x: lax.scan(lambda c, _: (c, tapped(x)), 0, length=1)[1],
        "closure": lambda x: tap(lambda: scanned(x), events.append)(),
    }
    jax.vmap(fns[how])(XS)
    jax.effects_barrier()
    _, want = watch(jax.vmap(scanned), XS)
    assert_same_events(events, want)


def test_a_vmap_that_comes_later_knows_what_no_lanes_share():
    def fn(x, w):
        def outer(x, i):
            inner = lambda x, k: (sow((x * k, w, i), "h")[0], None)
            return lax.scan(inner, x, jnp.arange(2.0))[0], None

        return lax.scan(outer, x, jnp.arange(2.0))[0]

    events = []
    tapped = jax.jit(lambda x, w: tap(fn, events.append, extra=x)(x, w))
    w = jnp.arange(4.0)
    lanes = lambda f: jax.vmap(jax.vmap(f, (0, None)), (0, None))
    jax.block_until_ready(lanes(tapped)(XS, w))
    jax.effects_barrier()
    _, want = watch(lanes(fn), XS, w)
    assert len(want) == 4
    assert_same_events(events, want)
    for e in events:
        assert [x.shape for x in e.value] == [(2, 3), (2, 3, 4), (2, 3)]
        assert_close(e.value[1], np.broadcast_to(w, (2, 3, 4)))


@_named([branches, while_of_value])
def test_lanes_that_cannot_be_told_are_an_error(fn):
    with pytest.raises(eqx_sow.SowError, match=r"cannot tell which lanes run"):
        jax.vmap(jax.jit(tap(fn, print)))(XS)


def test_vmap_that_comes_later_of_a_gradient():
    """A cotangent that does not vary is really the same in each lane, not their total:
    the event has the axis on all leaves."""

    def loss(w, x):
        product, shared = sow((w * x, w), "h")
        return jnp.sum(product**2) + jnp.sum(shared**2)

    grad, args = jax.grad(loss), (jnp.array(0.5), X)
    events = []
    jax.vmap(jax.jit(tap(grad, events.append)), (None, 0))(*args)
    jax.effects_barrier()
    assert_same_events(events, watch(jax.vmap(grad, (None, 0)), *args)[1])
    (cotangent,) = values(events, "h", "cotangent")
    assert_close(cotangent, (np.asarray(X), np.ones_like(X)))


def test_save_of_vmap_of_tap():
    events = []
    fn = jax.vmap(tap(branches, events.append))
    out, intermediates = save_intermediates(fn)(XS)
    jax.effects_barrier()
    assert_close((out, intermediates), save_intermediates(jax.vmap(branches))(XS))
    _, want = watch(jax.vmap(branches), XS)
    assert seen(events) == seen(want)


# --- Options ---


def test_every():
    _, events = watch(scanned, X, every=2)
    assert seen(events) == {
        ("c", "primal"): [0, 2],
        ("s", "primal"): [0, 2],
        ("end", "primal"): [0],
    }
    _, every = watch(scanned, X)
    assert_close(values(events, "c"), values(every, "c")[::2])


def test_every_is_any_integer():
    _, events = watch(scanned, X, every=2)
    _, same = watch(scanned, X, every=np.int64(2))
    assert seen(events) == seen(same)


def test_every_in_a_backward_pass():
    _, events = watch(jax.grad(loops), X, every=4, names="inner")
    want = {("inner", "primal"): [0, 4], ("inner", "cotangent"): [0, 4]}
    assert seen(events) == want


# --- `every` in stacks ---
BLOCKS = [eqx.nn.Linear(3, 3, key=k) for k in jr.split(jr.key(0), 4)]
STACK = jtu.tree_map(lambda *xs: jnp.stack(xs), *BLOCKS)
N_STEPS = 7


def _list_of(blocks, x, call):
    for block in blocks:
        x = call(block, x)
    return x


def _stack_of(blocks, x, call):
    return lax.scan(lambda x, block: (call(block, x), None), x, blocks)[0]


def _reversed_stack_of(blocks, x, call):
    body = lambda x, block: (call(block, x), None)
    return lax.scan(body, x, blocks, reverse=True)[0]


def _steps(layers, model, x, call=lambda block, x: jnp.tanh(block(x))):
    step = lambda x, _: (layers(model["blocks"], x, call), None)
    return lax.scan(step, x, length=N_STEPS)[0].sum()


def _sent(layers, blocks, f=_steps, call=None, **options):
    """The paths of what is sent, and its value. In a list, only the step is an
    iteration, and the layer is in the name."""
    more = {} if call is None else dict(call=call)
    run = lambda model, x: f(layers, model, x, **more)
    wrap = options.pop("wrap", lambda f: f)
    _, events = watch(wrap(run), dict(blocks=blocks), X, **options)
    return {(e.path, e.mode): e.value for e in events}


@under("eager", "jit", "filter_grad", "filter_checkpoint")
@pytest.mark.parametrize("every", [2, 3])
def test_every_counts_for_each_layer(wrap, every):
    """A list of layers, and the same layers in a stack, send the same."""
    options = dict(capture=eqx.nn.Linear, every=every, wrap=wrap)
    of_list = _sent(_list_of, BLOCKS, **options)
    of_stack = _sent(_stack_of, STACK, **options)
    assert_close(of_stack, of_list)
    steps = {int(path.split("/")[-1]) for path, mode in of_stack if mode == "primal"}
    assert steps == set(range(0, N_STEPS, every))


def test_every_counts_for_each_layer_with_other_options():
    options = dict(capture=eqx.nn.Linear, every=3)
    for more in (
        dict(names="**/blocks/2"),
        dict(names=["**/blocks/*", "**/blocks/-1"]),
        dict(when=lambda x: x[0] > 0),
        dict(wrap=lambda f: lambda m, x: jax.vmap(f, (None, 0))(m, jnp.stack([x, -x]))),
    ):
        of_list = _sent(_list_of, BLOCKS, **options, **more)
        assert of_list
        assert_close(_sent(_stack_of, STACK, **options, **more), of_list)


def test_every_counts_for_each_layer_of_those_that_run():
    """Some steps leave out a layer."""

    def f(layers, model, x, call):
        def step(x, i):
            def sometimes(block, x):
                skip = jnp.int32(10 * x.sum()) % 3 == 0
                return lax.cond(skip, lambda x: x + 1, lambda x: call(block, x), x)

            return layers(model["blocks"], x, sometimes), None

        return lax.scan(step, x, jnp.arange(N_STEPS))[0].sum()

    options = dict(f=f, call=lambda block, x: jnp.sin(3 * block(x)), every=2)
    of_list = _sent(_list_of, BLOCKS, capture=eqx.nn.Linear, **options)
    of_stack = _sent(_stack_of, STACK, capture=eqx.nn.Linear, **options)
    assert_close(of_stack, of_list)
    all_of = _sent(_list_of, BLOCKS, capture=eqx.nn.Linear, **options | dict(every=1))
    assert len(of_list) < len(all_of) < 4 * N_STEPS


def test_every_in_stacks_of_stacks():
    """Both loops are over layers."""
    stages = [[*BLOCKS[:2]], [*BLOCKS[2:]]]
    stacked = jtu.tree_map(lambda x: x.reshape(2, 2, *x.shape[1:]), STACK)

    def nested(layers):
        return lambda stages, x, call: layers(
            stages, x, lambda stage, x: layers(stage, x, call)
        )

    options = dict(capture=eqx.nn.Linear, every=3)
    of_list = _sent(nested(_list_of), stages, **options)
    assert len(of_list) == 4 * 3
    assert_close(_sent(nested(_stack_of), stacked, **options), of_list)


def test_every_in_a_reversed_stack_and_with_scope():
    """A `sow` with the path of its layer counts for each, too."""

    class Block(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            return sow(jnp.tanh(self.linear(x)), "h")

    blocks = [Block(x) for x in BLOCKS]
    stack = jtu.tree_map(lambda *xs: jnp.stack(xs), *blocks)
    options = dict(scope=True, every=3, call=lambda block, x: block(x))
    of_list = _sent(_list_of, blocks[::-1], **options)
    of_stack = _sent(_reversed_stack_of, stack, **options)
    back = {f"blocks/{i}/": f"blocks/{3 - i}/" for i in range(4)}

    def renamed(path):
        old = next(k for k in back if k in path)
        return path.replace(old, back[old])

    want = {(renamed(path), mode): x for (path, mode), x in of_list.items()}
    assert len(want) == 4 * 3
    assert_close(of_stack, want)


def test_every_counts_a_plain_name_in_all_layers():
    """`h` is one name, in a list as in a stack. So is a loop over steps alone."""
    call = lambda block, x: sow(jnp.tanh(block(x)), "h")
    in_order = lambda layers, blocks: [
        e.count
        for e in watch(
            lambda m, x: _steps(layers, m, x, call), dict(blocks=blocks), X, every=3
        )[1]
    ]
    assert in_order(_list_of, BLOCKS) == in_order(_stack_of, STACK)
    assert in_order(_stack_of, STACK) == [*range(0, 4 * N_STEPS, 3)]


def test_the_count_of_an_event_is_that_of_the_stack():
    """By it, events are in the order of execution."""
    run = lambda m, x: _steps(_stack_of, m, x)
    _, events = watch(run, dict(blocks=STACK), X, capture=eqx.nn.Linear, every=5)
    assert [e.count for e in events] == [0, 1, 2, 3, 20, 21, 22, 23]
    assert [e.iterations for e in events[4:]] == [(5, i) for i in range(4)]


def test_every_counts_lanes_once():
    _, all_events = watch(jax.vmap(while_of_value), XS, names="x")
    _, events = watch(jax.vmap(while_of_value), XS, names="x", every=3)
    assert [e.count for e in events] == [e.count for e in all_events][::3]


def test_when():
    _, every = watch(counted_while, X)
    _, events = watch(counted_while, X, when=lambda x: x[0] > 1.8)
    want = [e.count for e in every if e.value[0] > 1.8]
    assert 0 < len(want) < len(every)
    assert [e.count for e in events] == want


def test_when_and_every():
    _, every = watch(counted_while, X)
    options = dict(when=lambda x: x[0] > 1.8, every=2)
    _, events = watch(counted_while, X, **options)
    want = [e.count for e in every if e.value[0] > 1.8 and e.count % 2 == 0]
    assert [e.count for e in events] == want


def test_when_sees_one_lane_and_sends_all():
    shapes = []

    def when(x):
        shapes.append(x.shape)
        return x[0] > 1

    def fn(x):
        return lax.scan(lambda c, _: (sow(c + 0.5, "c"), None), x, length=3)[0]

    _, events = watch(jax.vmap(fn), jnp.zeros((2, 3)).at[1].set(-0.5), when=when)
    assert set(shapes) == {(3,)}
    assert [e.count for e in events] == [2]
    np.testing.assert_allclose(events[0].value[:, 0], [1.5, 1.0])


def test_when_of_lanes_that_did_not_run_does_not_count():
    def fn(x):
        def alive(x):
            return sow(jnp.log(x), "log")

        return lax.cond(x[0] > 0, alive, lambda x: x, x)

    xs = jnp.array([[1.0], [-1.0]])
    alarm = lambda x: ~jnp.isfinite(x).all()
    assert watch(jax.vmap(fn), xs, when=alarm)[1] == []
    (event,) = watch(jax.vmap(fn), xs)[1]
    assert event.ran.tolist() == [True, False]
    np.testing.assert_array_equal(event.value, [[0.0], [0.0]])


def test_when_of_a_constant_and_of_no_boolean():
    _, events = watch(scanned, X, when=lambda x: x.ndim == 0)
    assert {e.name for e in events} == {"s"}
    with pytest.raises(eqx_sow.SowError, match=r"(?s)single boolean.*\.any\(\)"):
        watch(scanned, X, when=lambda x: x > 0)


def test_alarm_in_the_backward_pass():
    def fn(x):
        y = sow(jnp.where(x > 0, x, 0.0), "y")
        return sow(jnp.sqrt(y), "root").sum()

    def alarm(x):
        return ~jnp.isfinite(x).all()

    _, events = watch(jax.grad(fn), jnp.array([1.0, -1.0]), when=alarm)
    assert seen(events) == {("y", "cotangent"): [0]}


def test_transform():
    def size(x):
        return {"mean": x.mean(), "ndim": x.ndim}

    _, events = watch(jax.vmap(scanned), XS, transform={"c": size}, names=["c", "s"])
    _, plain = watch(jax.vmap(scanned), XS)
    for e, w in zip(values(events, "c"), values(plain, "c")):
        assert_close(e, {"mean": w.mean(1), "ndim": 1})
    assert_close(values(events, "s"), values(plain, "s"))


def test_transform_with_traced_values():
    @jax.jit
    def fn(scale):
        def body(c, _):
            return sow(c + 1, "c"), None

        def run(x):
            return lax.scan(body, x, length=2)[0]

        return tap(run, events.append, transform=lambda x: x * scale)(0.0)

    events = []
    fn(10.0)
    jax.effects_barrier()
    assert [float(e.value) for e in events] == [10, 20]


def test_names_and_modes():
    _, events = watch(jax.grad(scanned), X, names=["e*", "s"], modes="cotangent")
    assert {(e.name, e.mode) for e in events} == {
        ("end", "cotangent"),
        ("s", "cotangent"),
    }


def test_capture():
    model = eqx.nn.MLP(3, 1, 4, 2, key=jr.key(0))

    @eqx.filter_grad
    def grad(model, x):
        return model(x)[0]

    options = dict(capture=eqx.nn.Linear, inputs=True)
    got, events = watch(grad, model, X, **options)
    assert_close(got, grad(model, X))
    _, intermediates = save_intermediates(grad, **options)(model, X)
    want = {(n, m) for n, modes in intermediates.items() for m in modes}
    assert {(e.name, e.mode) for e in events} == want
    for e in events:
        assert_close(e.value, _numpy(intermediates[e.name][e.mode]))


def test_scope_and_methods():
    class Model(eqx.Module):
        layer: eqx.nn.Linear

        def encode(self, x):
            return sow(self.layer(x), "h")

        def __call__(self, x):
            return self.encode(x)

    model = Model(eqx.nn.Linear(3, 3, key=jr.key(0)))
    _, events = watch(model, X, scope=True)
    assert [e.name for e in events] == ["h"]
    _, events = watch(model, X, capture=Model, methods="encode")
    assert [e.name for e in events] == ["h", "..encode"] or len(events) == 2


def test_decorator_and_method():
    events = []

    @tap(callback=events.append, names="a")
    def fn(x):
        return straight(x)

    class Model(eqx.Module):
        w: jax.Array

        @tap(callback=events.append)
        def __call__(self, x):
            return sow(self.w * x, "wx")

    fn(X)
    Model(X)(X)
    assert seen(events) == {("a", "primal"): [0], ("wx", "primal"): [0]}
    assert fn.__name__ == "fn"


@pytest.mark.parametrize(
    "options, error",
    [
        (dict(every=0), ValueError),
        (dict(every=1.5), TypeError),
        (dict(every=True), TypeError),
        (dict(every=np.True_), TypeError),
        (dict(when=3), TypeError),
        (dict(callback=3), TypeError),
        (dict(transform=3), TypeError),
        (dict(modes="gradient"), ValueError),
        (dict(names=3), TypeError),
        (dict(tag=[]), TypeError),
    ],
)
def test_wrong_options(options, error):
    with pytest.raises(error, match="tap"):
        tap(straight, **options)


@pytest.mark.parametrize(
    "options",
    [dict(names="c"), dict(modes="cotangent"), dict(transform={"c": jnp.sum})],
)
def test_what_selects_nothing(options):
    with pytest.raises(eqx_sow.UnknownSowError, match="tap"):
        watch(straight, X, **options)


@pytest.mark.filterwarnings("ignore:.*found no mark")
def test_no_sow():
    assert watch(jnp.sin, X)[1] == []


# --- Values ---


def test_values_are_numpy_arrays_of_their_own():
    _, events = watch(scanned, X)
    for e in events:
        assert type(e.value) is np.ndarray and type(e.count) is int
        assert e.value.flags.writeable and e.value.flags.owndata
    c = values(events, "c")
    assert len({x.tobytes() for x in c}) == 3


def test_kinds_of_leaves(call):
    key = jr.key(3)

    def fn(x):
        value = {
            "key": key,
            "bf16": x.astype(jnp.bfloat16),
            "bool": x > 0,
            "int": jnp.arange(3),
            "complex": x.astype(jnp.complex64),
            "empty": jnp.zeros((0, 2)),
            "numpy": np.arange(2.0),
            "text": "text",
            "none": None,
            "fn": jnp.sin,
        }
        sow(value, "all")
        return x

    events = []
    call(tap(fn, events.append), X)
    jax.effects_barrier()
    got = events[-1].value
    assert got["bf16"].dtype == jnp.bfloat16 and got["bool"].dtype == bool
    np.testing.assert_array_equal(got["key"], jr.key_data(key))
    assert got["empty"].shape == (0, 2) and got["complex"].dtype == np.complex64
    np.testing.assert_array_equal(got["numpy"], [0, 1])
    assert (got["text"], got["none"], got["fn"]) == ("text", None, jnp.sin)


def test_keys_under_vmap():
    def fn(key):
        return sow(jr.split(key)[0], "key")

    keys = jr.split(jr.key(0), 3)
    _, events = watch(jax.vmap(fn), keys)
    want = jr.key_data(jax.vmap(lambda k: jr.split(k)[0])(keys))
    np.testing.assert_array_equal(events[0].value, want)


def test_integers_have_float0_cotangents():
    _, events = watch(jax.grad(tree), X, modes="cotangent")
    (value,) = values(events, "tree", "cotangent")
    assert value["n"].dtype == jax.dtypes.float0 and value["n"].shape == (2,)
    np.testing.assert_array_equal(value["x"], np.ones(3))


def test_values_of_float0():
    """As a jitted function gets them, which is given a cotangent of integers."""
    zeros, xs = np.zeros((2, 3), jax.dtypes.float0), jnp.arange(2.0)
    mark = lambda x, z: sow((x, z), "h")

    def scan(xs, zs):
        return lax.scan(lambda c, xz: (c, mark(*xz)), 0, (xs, zs))[1]

    for fn in (jax.jit(mark), jax.vmap(mark), scan):
        for transform in (None, lambda value: value):
            _, events = watch(fn, xs, zeros, transform=transform)
            _, got = save_intermediates(fn, transform=transform)(xs, zeros)
            x, z = got["h"]["primal"]
            n = len(events)
            assert n == (2 if fn is scan else 1)
            assert z.shape == (2, 3) and z.dtype == jax.dtypes.float0
            for i, event in enumerate(events):
                of_event = (x[i], z[i]) if fn is scan else (x, z)
                assert_close(event.value, tuple(map(np.asarray, of_event)))


def test_cotangent_of_what_all_lanes_share_is_the_total():
    def fn(w, xs):
        def one(x):
            y = sow({"w": w * 2, "x": x}, "y")
            return (y["w"] * y["x"]).sum()

        return jax.vmap(one)(xs).sum()

    _, events = watch(jax.grad(fn, (0, 1)), X, XS, modes="cotangent")
    (value,) = values(events, "y", "cotangent")
    np.testing.assert_allclose(value["w"], np.asarray(XS).sum(0), rtol=1e-6)
    assert value["x"].shape == (2, 3)


def test_one_name_in_several_places():
    _, events = watch(twice, X)
    assert [e.count for e in events] == [0, 1]
    assert_close(values(events, "x"), [np.asarray(2 * X), np.asarray(6 * X)])
    _, intermediates = save_intermediates(twice, reduce=Append())(X)
    assert_close(values(events, "x"), list(_numpy(intermediates["x"]["primal"])))


def test_the_order_of_a_value_that_is_the_same_in_each_iteration():
    def fn(x):
        def body(c, i):
            return c * sow(jnp.sin(x), "x") + sow(c, "x"), None

        return lax.scan(body, x, length=3)[0].sum()

    want, c = [], X
    for _ in range(3):
        want += [np.sin(np.asarray(X)), np.asarray(c)]
        c = c * jnp.sin(X) + c
    for wrap in (lambda fn: fn, jax.grad, lambda fn: jax.grad(jax.checkpoint(fn))):
        _, events = watch(wrap(fn), X)
        assert_close(values(events, "x"), want)


@pytest.mark.slow
def test_the_order_of_branches_that_are_the_same_in_each_iteration():
    def fn(x, first="y", second="z"):
        def body(c, i):
            branches = lambda x: sow(x, first), lambda x: sow(x * 2, second)
            return c * lax.cond(x[0] > 0, *branches, x), None

        return lax.scan(body, x, length=3)[0].sum()

    for sign in (1, -1):
        _, events = watch(jax.grad(lambda x: fn(x, "y", "y")), X * sign)
        want = np.asarray(X if X[0] * sign > 0 else -2 * X)
        assert_close(values(events, "y"), [want] * 3)
        events = assert_law_10(jax.grad(fn), X * sign)
        assert len(values(events, "y") + values(events, "z")) == 3


@pytest.mark.parametrize("why", ["condition", "solver"])
def test_what_cannot_be_had_is_an_error(why):
    def condition(x):
        return lax.while_loop(lambda x: sow(x, "p") < 3, lambda x: x + 1, 0.0)

    def solver(x):
        def matvec(y):
            return sow(2 * y, "p")

        solve = lambda _, b: b / 2
        return lax.custom_linear_solve(matvec, x, solve, symmetric=True)

    with pytest.raises(eqx_sow.UnsupportedPrimitiveError):
        watch({"condition": condition, "solver": solver}[why], X)


# --- Together with others ---


def test_a_tapped_sow_is_still_a_sow():
    events = []
    saved = save_intermediates(tap(jax.grad(scanned), events.append))
    out, intermediates = saved(X)
    jax.effects_barrier()
    want = save_intermediates(jax.grad(scanned))(X)
    assert_close((out, intermediates), want)
    assert seen(events) == seen(watch(jax.grad(scanned), X)[1])


def test_what_an_inner_save_takes_is_not_tapped():
    def fn(x):
        (y, intermediates) = save_intermediates(straight)(x)
        return sow(y, "y") + intermediates["a"]["primal"].sum()

    assert [e.name for e in watch(fn, X)[1]] == ["y"]


def test_taps_and_plants():
    planted = plant(straight, {"a": jnp.zeros(3)})
    _, events = watch(planted, X)
    assert_close(values(events, "a"), [np.zeros(3, np.float32)])
    events = []
    out = plant(tap(straight, events.append), {"a": jnp.ones_like})(X)
    jax.effects_barrier()
    assert out == 6
    assert_close(values(events, "a"), [np.ones(3, np.float32)])
    assert_close(values(events, "b"), [np.full(3, 2, np.float32)])


def test_two_taps_and_tags():
    def fn(x):
        def body(c, _):
            return sow(sow(c + 1, "c"), "t", tag="other"), None

        return lax.scan(body, x, length=2)[0]

    inner, outer = [], []
    tap(tap(fn, inner.append, every=2), outer.append)(0.0)
    jax.effects_barrier()
    assert seen(inner) == {("c", "primal"): [0]}
    assert seen(outer) == {("c", "primal"): [0, 1]}
    inner, outer = [], []
    tap(tap(fn, inner.append, tag="other"), outer.append)(0.0)
    jax.effects_barrier()
    assert [e.name for e in inner] == ["t", "t"]
    assert [e.name for e in outer] == ["c", "c"]


def test_nothing_is_left_in_the_program():
    jaxpr = jax.make_jaxpr(tap(jax.grad(scanned), print))(X)
    assert "sow" not in primitives(jaxpr)
    jaxpr = jax.make_jaxpr(tap(straight, print, names=[]))(X)
    assert {"sow", "tap"}.isdisjoint(primitives(jaxpr))


def test_traced_once():
    traces = []

    @eqx.filter_jit
    def fn(x):
        traces.append(None)
        return scanned(x)

    events = []
    for tapped in (
        eqx.filter_jit(tap(scanned, events.append)),
        tap(fn, events.append),
        tap(fn, events.append),
    ):
        before = len(traces)
        for _ in range(3):
            tapped(X)
        assert len(traces) - before <= 1
    assert len(traces) == 1
    jax.effects_barrier()
    assert len(events) == 9 * 7


def test_each_call_counts_for_itself():
    logs = [[] for _ in range(4)]

    def callback(event):
        by_value[float(event.value)].append(event.count)

    @jax.jit
    def fn(x):
        def run(x):
            return lax.fori_loop(0, 50, lambda i, x: sow(x + 0, "x"), x)

        return tap(run, callback)(x)

    by_value = {float(i): log for i, log in enumerate(logs)}
    fn(0.0)
    jax.effects_barrier()
    logs[0].clear()
    threads = [threading.Thread(target=fn, args=(float(i),)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    jax.effects_barrier()
    assert logs == [list(range(50))] * 4


def test_ordered():
    def fn(x):
        def body(c, i):
            return sow(c + 1, "c"), None

        x = sow(x, "first")
        x = lax.cond(x > 0, lambda x: x, lambda x: sow(x, "branch"), x)
        return sow(lax.scan(body, x, length=2)[0], "last")

    want = [("first", 0), ("branch", 0), ("c", 0), ("c", 1), ("last", 0)]
    for wrap in (lambda f: f, jax.jit):
        events = []
        wrap(tap(fn, events.append, ordered=True))(0.0)
        jax.effects_barrier()
        assert [(e.name, e.count) for e in events] == want
    events = []
    jax.jit(tap(fn, events.append, ordered=True, every=2))(0.0)
    jax.effects_barrier()
    assert [(e.name, e.count) for e in events] == [w for w in want if w[1] == 0]


# --- Without a callback ---


def test_lines(capsys):
    def fn(x):
        sow((x, "static", jnp.array([True, False])), "pair")
        return sow(jnp.log(x), "log")

    tap(fn)(jnp.array([0.0, 1.0, 4.0, -1.0], jnp.bfloat16))
    jax.effects_barrier()
    pair, log = capsys.readouterr().out.splitlines()
    assert pair.startswith("pair primal [0]  [0]: bf16[4]  mean 1  std 1.87  min -1")
    assert "[2]: bool[2]  mean 0.5" in pair
    assert log.startswith("log primal [0]  bf16[4]  mean 0.69")
    assert log.endswith("zeros 50%  not finite 2/4")


def test_lines_of_lanes(capsys):
    def fn(x):
        return lax.cond(x > 0, lambda x: sow(x, "x"), lambda x: x, x)

    tap(jax.vmap(fn))(jnp.array([1.0, -1.0, 2.0]))
    jax.effects_barrier()
    line = capsys.readouterr().out
    assert line.startswith("x primal [0]  f32[3]  mean 1 ")
    assert "ran in 2 of 3 lanes" in line


def test_lines_of_devices(mesh, capsys):
    local = lambda x: sow(x, "x")
    spread = jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    tap(spread)(jnp.arange(16.0))
    jax.effects_barrier()
    lines = capsys.readouterr().out.splitlines()
    assert sorted(x.split("  on device ")[1] for x in lines) == [
        f"d={i}" for i in range(8)
    ]
    for line in lines:
        i = int(line[-1])
        assert line.startswith(f"x primal [0]  f32[2]  mean {2 * i + 0.5:.3g} ")


@pytest.mark.parametrize("lanes", [(), (4,), (3, 4)])
@pytest.mark.parametrize("first", [[3, 1, 4, 1, 5], [1, 0, np.nan, 0, 2], [np.inf] * 5])
def test_lines_of_summaries(lanes, first, capsys):
    def fn(x):
        return lax.cond(x[0] > 0, lambda x: sow(x, "h") * 2, lambda x: x, x)

    xs = jr.normal(jr.key(0), (12, 5)).at[0].set(jnp.array(first, jnp.float32))
    xs = xs[: math.prod(lanes)].reshape(*lanes, 5)
    for _ in lanes:
        fn = jax.vmap(fn)
    tap(fn, transform=summarize)(xs)
    jax.effects_barrier()
    line = capsys.readouterr().out
    modes = save_intermediates(fn, transform=summarize)(xs)[1]["h"]
    table = tabulate({"h": {"primal": modes["primal"]}})
    row = table.splitlines()[2].removesuffix("<- first").split()
    name, mode, _, *numbers = line.split("  ran in")[0].split()
    assert [name, mode] == row[:2]
    words = "mean", "std", "min", "max", "norm", "zeros", "not", "finite"
    assert [x for x in numbers if x not in words] == row[2:]


def test_lines_of_keys(capsys):
    fn = lambda x: sow({"x": x, "key": jr.split(jr.key(0), 2)}, "h")["x"]
    tap(fn)(jnp.ones(4))
    tap(lambda x: sow(jr.key(x), "key"))(3)
    jax.effects_barrier()
    both, key = capsys.readouterr().out.splitlines()
    assert both.startswith("h primal [0]  ['key']: key<fry>[2]  ['x']: f32[4]  mean 1")
    assert key == "key primal [0]  key<fry>[]"


# --- Callbacks that fail ---


class Boom(Exception):
    pass


def _failing(at, log):
    def callback(event):
        log.append(event)
        if event.count == at:
            raise Boom("no room for it")

    return callback


@pytest.mark.parametrize(
    "wrap",
    [
        lambda cb: tap(counted_while, cb),
        lambda cb: tap(jax.jit(counted_while), cb),
        lambda cb: tap(eqx.filter_jit(scanned), cb, names="c"),
        lambda cb: tap(jax.grad(scanned), cb, modes="cotangent", names="c"),
        lambda cb: tap(twice, cb),
    ],
    ids=["eager", "tap(jit)", "tap(filter_jit)", "cotangent", "straight"],
)
def test_failing_callback(wrap, caplog):
    log = []
    with pytest.raises(eqx_sow.SowError, match=r"sow\(\.\.\., '[xc]'\)") as e:
        out = wrap(_failing(1, log))(X)
        jax.block_until_ready(out)
        jax.effects_barrier()
    assert type(e.value.__cause__) is Boom and "no room for it" in str(e.value)
    assert [x.count for x in log] == [0, 1]
    # All is as it was.
    log.clear()
    out = wrap(_failing(-1, log))(X)
    jax.block_until_ready(out)
    jax.effects_barrier()
    assert len(log) >= 2


@pytest.mark.parametrize(
    "error, said",
    [
        (KeyboardInterrupt(), "raised KeyboardInterrupt, for"),
        (SystemExit(3), "raised SystemExit: 3, for"),
        (Boom("no room\n  for it\n"), "raised Boom: no room for it, for"),
    ],
)
@under("eager", "jit", argument="jit")
def test_whatever_a_callback_raises_is_reported_in_one_line(error, said, jit, caplog):
    def callback(event):
        if event.count == 1:
            raise error

    fn = jit(tap(jax.jit(counted_while), callback))
    with pytest.raises((eqx_sow.SowError, jax.errors.JaxRuntimeError)) as e:
        jax.block_until_ready(fn(X))
        jax.effects_barrier()
    last_line = str(e.value).splitlines()[-1]
    assert said in last_line and "sow(..., 'x')" in last_line
    assert last_line.endswith("primal, with 1 execution before it.")
    if isinstance(e.value, eqx_sow.SowError):
        assert e.value.__cause__ is error


def test_the_cause_is_what_was_raised_in_this_call(caplog):
    def failing(error):
        def callback(event):
            raise error

        return callback

    def raised(wrap, error):
        with pytest.raises((eqx_sow.SowError, jax.errors.JaxRuntimeError)) as e:
            jax.block_until_ready(wrap(failing(error))(X))
            jax.effects_barrier()
        return e.value

    mark = lambda x: sow(2 * x, "x")
    once, outside = Boom("no room"), Boom("no room")
    raised(lambda cb: tap(mark, cb), once)
    raised(lambda cb: jax.jit(tap(mark, cb)), outside)
    for _ in range(2):
        error = Boom("no room")
        assert raised(lambda cb: tap(jax.jit(mark), cb), error).__cause__ is error


def test_failing_callback_under_jit(caplog):
    log = []
    fn = jax.jit(tap(counted_while, _failing(2, log)))
    for _ in range(2):
        log.clear()
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"Boom: no room") as e:
            jax.block_until_ready(fn(X))
            jax.effects_barrier()
        last_line = str(e.value).splitlines()[-1]
        for said in ("Boom: no room", "sow(..., 'x')", "primal, with 2 executions b"):
            assert said in last_line
        assert [x.count for x in log] == [0, 1, 2]
    log.clear()
    fn = jax.jit(tap(counted_while, _failing(-1, log)))
    assert_close(fn(X), counted_while(X))
    jax.effects_barrier()
    assert len(log) == 5


# --- Many devices ---


MESHES = [AxisType.Auto, AxisType.Explicit]


@pytest.mark.parametrize("kind", MESHES, ids=str)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_shard_map(kind, jit):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    spec = P("a", "b")

    def on_device(x):
        def body(c, _):
            return sow(c + 1, "c"), None

        return lax.scan(body, x, length=2)[0]

    def fn(x):
        inner = jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec)
        return lax.scan(lambda c, _: (inner(c), None), x, length=2)[0]

    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(8.0).reshape(4, 2), NamedSharding(mesh, spec))
        fn = jax.jit(fn) if jit else fn
        out, events = watch(fn, x)
        assert_close(np.asarray(out), np.asarray(x) + 4)
    assert len(events) == 8 * 4
    for a in range(4):
        for b in range(2):
            mine = [e for e in events if e.device == {"a": a, "b": b}]
            assert [e.count for e in mine] == list(range(4))
            got = np.stack([e.value for e in mine]).ravel()
            np.testing.assert_array_equal(got, 2 * a + b + np.arange(1.0, 5.0))


@pytest.mark.parametrize("kind", MESHES, ids=str)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_transformed_tap_of_a_shard_map_without_set_mesh(kind, jit):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    xs = jax.device_put(x, NamedSharding(mesh, P(None, "d")))
    events = []

    def seen(fn, *args):
        events.clear()
        out = (jax.jit(fn) if jit else fn)(*args)
        jax.effects_barrier()
        assert sorted(e.device["d"] for e in events) == list(range(8))
        assert {e.count for e in events} == {0}
        in_order = sorted(events, key=lambda e: e.device["d"])
        return out, np.concatenate([e.value for e in in_order], axis=-1)

    def on_device(x):
        return 2 * sow(jnp.cos(x), "y")

    inner = jax.shard_map(on_device, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    tapped = tap(inner, events.append, modes="primal")
    both = jax.vmap(tapped), jax.vmap(jax.vmap(tapped)), lambda x: jax.vjp(tapped, x)[0]
    for fn, arg, want in zip(both, (xs, xs[None], xs[0]), (x, x[None], x[0])):
        out, values = seen(fn, arg)
        assert_close(np.asarray(out), 2 * np.cos(want))
        assert_close(values, np.cos(want))
    # The context is as it was.
    assert jax.sharding.get_abstract_mesh().empty


def test_event_of_a_device():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

    def on_device(x):
        return sow(x, "x")

    events = []
    tapped = tap(on_device, events.append, when=lambda x: x[0] > 3)
    fn = jax.shard_map(tapped, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    jax.jit(fn)(jnp.arange(8.0))
    jax.effects_barrier()
    assert sorted(e.device["d"] for e in events) == [4, 5, 6, 7]
    assert {float(e.value[0]) for e in events} == {4, 5, 6, 7}
    name, mode, value, count, ran = events[0]
    assert (name, mode, count, ran) == ("x", "primal", 0, None)
    assert f"device={events[0].device!r}" in repr(events[0])
    assert TapEvent("x", "primal", value, 0, None).device is None


def test_an_event_shows_what_there_is():
    _, (event,) = watch(lambda x: sow(x, "h"), 1)
    fields = "name='h', mode='primal', value=1, count=0, ran=None"
    assert repr(event) == f"TapEvent({fields})"
    loop = lambda x: lax.scan(lambda c, _: (sow(c, "h"), None), x, length=1)[0]
    _, (event,) = watch(loop, jnp.int32(1), extra=7)
    more = "extra=7, iterations=(0,), path='h/0'"
    assert (
        repr(event)
        == f"TapEvent({fields.replace('1', 'array(1, dtype=int32)')}, {more})"
    )


@pytest.mark.slow
def test_gradient_in_shard_map():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

    def on_device(x):
        return sow(jnp.sin(x), "y")

    def fn(x):
        inner = jax.shard_map(on_device, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
        return (inner(x) ** 2).sum()

    x = jnp.arange(8.0)
    out, events = watch(jax.grad(fn), x)
    assert_close(out, jax.grad(fn)(x))
    log = by_name(events)
    cts = {e.device["d"]: float(e.value[0]) for e in log["y", "cotangent"]}
    assert_close([cts[i] for i in range(8)], [float(y) for y in 2 * jnp.sin(x)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", MESHES, ids=str)
def test_sharded_values_are_one_event(kind):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    x = jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P("d")))
    for fn in (counted_while, jax.jit(counted_while), jax.grad(scanned)):
        with jax.set_mesh(mesh):
            x16 = x[:16]
            fn = jax.grad(lambda x: straight(x)) if fn is scanned else fn
            _, events = watch(fn, x16, every=2)
        assert events and all(e.device is None for e in events)
        assert events[0].value.shape == (16,)


# --- What it costs ---


@pytest.fixture
def optimised():
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def _ignore(*args):
    del args


def _indices(ws):
    """`event.iterations` needs them, by hand or not."""
    return jnp.arange(len(ws), dtype=jnp.int32)


def _by_hand(ws, x):
    def body(c, w):
        (i, x), (k, w) = c, w
        x = jnp.tanh(x @ w)
        jax.debug.callback(_ignore, i, k, x)
        return (i + 1, x), None

    (_, x), _ = lax.scan(body, (0, x), (_indices(ws), ws))
    jax.debug.callback(_ignore, np.int32(0), x)
    return x.sum()


def _tapped(ws, x):
    def body(x, w):
        return sow(jnp.tanh(x @ w), "h"), None

    return sow(lax.scan(body, x, ws)[0], "end").sum()


def _every_by_hand(ws, x):
    def body(c, w):
        (i, x), (k, w) = c, w
        x = jnp.tanh(x @ w)
        lax.cond(
            i % 10 == 0, lambda: jax.debug.callback(_ignore, i, k, x), lambda: None
        )
        return (i + 1, x), None

    (_, x), _ = lax.scan(body, (0, x), (_indices(ws), ws))
    return x.sum()


def _when_by_hand(ws, x):
    def body(c, w):
        (i, x), (k, w) = c, w
        x = jnp.tanh(x @ w)
        alarm = ~jnp.isfinite(x).all()
        lax.cond(alarm, lambda: jax.debug.callback(_ignore, i, k, x), lambda: None)
        return (i + 1, x), None

    (_, x), _ = lax.scan(body, (0, x), (_indices(ws), ws))
    return x.sum()


def not_finite(x):
    return ~jnp.isfinite(x).all()


@pytest.mark.parametrize(
    "options, by_hand",
    [
        ({}, _by_hand),
        (dict(names="h", every=10), _every_by_hand),
        (dict(names="h", when=not_finite), _when_by_hand),
    ],
    ids=["all", "every", "when"],
)
def test_same_program_as_by_hand(optimised, options, by_hand):
    # Here, as importing that module sets flags of XLA.
    from tests.benchmarks.timing import costs

    ws, x = jnp.ones((30, 16, 16)), jnp.ones((8, 16))
    tapped = tap(_tapped, _ignore, **options)
    got, want = (costs(jax.jit(f).lower(ws, x).compile()) for f in (tapped, by_hand))
    assert got.temporaries <= 1.01 * want.temporaries
    assert got.instructions <= 1.01 * want.instructions


@pytest.mark.slow
def test_memory_does_not_grow():
    def rss():
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * 4096

    def fn(x, n):
        return lax.fori_loop(0, n, lambda i, x: sow(x + 1, "x"), x)

    count = [0]

    def callback(event):
        count[0] += 1

    x = jnp.zeros(250_000)  # 1 MB
    run = jax.jit(tap(fn, callback))
    run(x, 100).block_until_ready()
    jax.effects_barrier()
    before = rss()
    run(x, 1000).block_until_ready()
    jax.effects_barrier()
    assert count[0] == 1100
    assert rss() - before < 100e6


def test_captured_but_never_called():
    model = eqx.nn.Linear(3, 3, key=jax.random.key(0))
    with pytest.raises(eqx_sow.UnknownSowError, match="selects nothing that is called"):
        tap(lambda m, x: x, print, capture=True)(model, jnp.ones(3))


def test_no_derivative_but_that_of_the_rule():
    @jax.custom_jvp
    def fn(x):
        return 2 * sow(jnp.sin(x), "a")

    fn.defjvp(lambda xs, ts: (fn(*xs), 3 * ts[0]))
    tapped = jax.grad(tap(fn, lambda event: None))
    assert "cos" not in primitives(jax.make_jaxpr(tapped)(1.0))
    assert tapped(1.0) == 3
