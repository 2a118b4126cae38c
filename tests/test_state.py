"""What outlives a call, and what can be copied and written to a file."""

import asyncio
import collections
import concurrent.futures as cf
import copy
import gc
import io
import pickle
import resource
import subprocess
import sys
import threading

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_sow import (
    Append,
    Buffer,
    Fold,
    Intermediates,
    Last,
    plant,
    save_intermediates as S,
    scope,
    Sow,
    sow,
    summarize,
    tap,
)
from jax import lax

from .helpers import assert_close
from .tables import under


X = jnp.arange(1.0, 4.0)


def _fn(x):
    return sow(jnp.sin(x), "h") * sow(2 * x, "g")


class Layer(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return self.encode(x) + 1

    def encode(self, x):
        return sow(self.weight * x, "inside")


class Jitted(eqx.Module):
    """Its method is no function. While that takes note, a function is in its place."""

    @eqx.filter_jit
    def __call__(self, x):
        return x


class Model(eqx.Module):
    first: Layer
    last: Layer

    def __init__(self, key):
        self.first, self.last = (Layer(k) for k in jr.normal(key, (2, 3)))

    def __call__(self, x):
        return self.last(self.first(x))


MODEL = Model(jr.key(0))


def _works():
    """The library is as it was at first."""
    assert sow(X, "h") is X
    assert type(MODEL.first) is Layer
    assert "sow" not in str(jax.make_jaxpr(_fn)(X))
    h, g = jnp.sin(X), 2 * X
    assert_close(S(_fn)(X), (h * g, {"h": {"primal": h}, "g": {"primal": g}}))
    assert_close(plant(_fn, {"h": X})(X), X * g)
    a = MODEL.first.weight * X + 1
    b = MODEL.last.weight * a + 1
    out, got = S(MODEL, capture=Layer, tag="none")(X)
    assert_close((out, got), (b, {"first": {"primal": a}, "last": {"primal": b}}))
    names = []
    tap(_fn, lambda event: names.append(event.name))(X)
    jax.effects_barrier()
    assert sorted(names) == ["g", "h"]


# --- threads ---


def _grad(x):
    return jax.grad(lambda x: jnp.sum(_fn(x)))(x)


def _tapped(fn):
    def run(x):
        events = []
        out = tap(fn, lambda event: events.append(event.value), names="h")(x)
        jax.block_until_ready(out)
        jax.effects_barrier()
        return out, [jnp.asarray(value) for value in events]

    return run


H, G = jnp.sin(X), 2 * X
# Eight uses of one function, and what comes back.
USES = [
    (lambda fn: fn, H * G),
    (lambda fn: S(fn), (H * G, {"h": {"primal": H}, "g": {"primal": G}})),
    (lambda fn: S(fn, names="h"), (H * G, {"h": {"primal": H}})),
    (
        lambda fn: S(fn, names="h", transform=jnp.sum),
        (H * G, {"h": {"primal": jnp.sum(H)}}),
    ),
    (
        lambda fn: S(fn, names="g", reduce=Buffer(2)),
        (H * G, {"g": {"primal": jnp.stack([G, 0 * G]), "count": jnp.int32(1)}}),
    ),
    (lambda fn: plant(fn, {"g": X}), H * X),
    (
        lambda fn: S(jax.grad(lambda x: jnp.sum(fn(x))), modes="cotangent", names="h"),
        (jnp.cos(X) * G + 2 * H, {"h": {"cotangent": G}}),
    ),
    (_tapped, (H * G, [H])),
]


@pytest.mark.slow
@under("jit", "filter_jit", argument="jitted")
def test_eight_threads_on_one_jitted_function(jitted):
    start = threading.Barrier(len(USES))

    def work(fns, use, want):
        for fn in fns:
            start.wait(60)
            # At first all of them trace it, then all of them call it.
            for _ in range(2):
                assert_close(use(fn)(X), want)

    fns = [jitted(lambda x: _fn(x)) for _ in range(3)]
    with cf.ThreadPoolExecutor(len(USES)) as pool:
        tasks = [pool.submit(work, fns, use, want) for use, want in USES]
        for task in tasks:
            task.result(120)
    _works()


@pytest.mark.parametrize(
    "fn, name",
    [
        (eqx.filter_jit(lambda model, x: model(x)), "model"),
        # A global variable, which is another while the function is traced.
        (lambda model, x: MODEL(x), "MODEL"),
    ],
)
def test_eight_threads_capture_one_model(fn, name):
    options = [dict(capture=True, tag=i, scope=i % 2 == 0) for i in range(8)]
    start = threading.Barrier(8)

    def work(options):
        start.wait(60)
        for _ in range(5):
            out, got = S(fn, **options)(MODEL, X)
            assert_close(out, MODEL(X))
            assert list(got) == [f"{name}/first", f"{name}/last", name]
            assert_close(got[name]["primal"], out)

    with cf.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, options))
    _works()


@pytest.fixture
def threads_in_turn():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.slow
@pytest.mark.usefixtures("threads_in_turn")
def test_eight_threads_find_one_jaxpr():
    """That of a function which was traced before, and which none of them has walked."""
    for _ in range(20):
        step = lambda c, _: (sow(jnp.sin(c), "h"), None)
        fn = jax.jit(lambda x, step=step: lax.scan(step, x, length=3)[0])
        jax.make_jaxpr(fn)(X)
        saved = S(lambda x, fn=fn: fn(x))
        start = threading.Barrier(8)

        def work(_, saved=saved, start=start):
            start.wait(60)
            return jax.jit(lambda x: saved(x)).trace(X).out_info[1]

        with cf.ThreadPoolExecutor(8) as pool:
            for got in pool.map(work, range(8)):
                assert got["h"]["primal"].shape == (3, *X.shape)


def _loop(x):
    return lax.scan(lambda c, _: (sow(jnp.sin(c), "h"), None), x, length=2)[0]


def _waits(fn=lambda x: x):
    """A function that waits for another thread, which captures from a jitted one."""

    def wait(*args):
        got = []

        def capture():
            saved = S(jax.jit(lambda x: _loop(x)), transform=lambda h: 2 * h)
            got.append(np.asarray(saved(np.ones(3, np.float32))[0]))

        thread = threading.Thread(target=capture, daemon=True)
        thread.start()
        thread.join(10)
        np.testing.assert_allclose(got, [np.sin(np.sin(np.ones(3)))], rtol=1e-5)
        return fn(*args)

    return wait


def _hashed_after_waiting(fn):
    class Waits:
        def __call__(self, event):
            fn(event)

        __hash__ = _waits(lambda self: 0)

    return Waits()


# Where functions of the user's are called while a program is traced.
WAITING = {
    "fn": lambda: S(lambda x: _loop(_waits()(x))),
    "noinline": lambda: S(lambda x: _fn(eqx.internal.noinline(_waits())(x))),
    "transform": lambda: S(_loop, transform=_waits()),
    "reduce": lambda: S(_loop, reduce=Fold(0.0, _waits(lambda acc, x: acc + x.sum()))),
    "names": lambda: S(_loop, names=_waits(lambda name: True)),
    "capture": lambda: S(MODEL, tag=0, capture=_waits(lambda path, module: True)),
    "plant": lambda: plant(_loop, {"h": _waits()}),
    "when": lambda: tap(_loop, lambda event: None, when=_waits(lambda h: h[0] > 9)),
    "hash": lambda: tap(jax.jit(_loop), _hashed_after_waiting(lambda event: None)),
}


@pytest.mark.parametrize("where", WAITING)
def test_code_of_the_users_may_wait_for_another_thread(where):
    """No lock is held while it runs."""
    jax.block_until_ready(jax.tree.leaves(WAITING[where]()(X)))


# --- exceptions ---


class _FailedError(Exception):
    pass


def _fail(*args):
    raise _FailedError


def _fails_while_traced(x):
    _fail(sow(x, "h"))


def _fails_in_a_loop(x):
    return lax.scan(lambda c, _: _fail(sow(c, "h")), x, None, length=2)


def _fails_while_it_runs(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return sow(jax.pure_callback(_fail, shape, sow(x, "h")), "g")


def _fails_inside(x):
    return S(_fails_while_traced)(sow(x, "h"))


FAILURES = {
    "fn": lambda wrap: wrap(S(_fails_while_traced))(X),
    "fn in a loop": lambda wrap: wrap(S(_fails_in_a_loop))(X),
    "fn that runs": lambda wrap: wrap(S(_fails_while_it_runs))(X),
    "fn of a fn": lambda wrap: wrap(S(_fails_inside))(X),
    "fn under plant": lambda wrap: wrap(plant(_fails_while_traced, {"h": X}))(X),
    "fn under tap": lambda wrap: wrap(tap(_fails_while_traced))(X),
    "model": lambda wrap: wrap(S(lambda m, x: _fail(m(x)), capture=True))(MODEL, X),
    "names": lambda wrap: wrap(S(_fn, names=lambda name: _fail()))(X),
    "capture": lambda wrap: wrap(S(MODEL, capture=lambda path, m: _fail()))(X),
    "transform": lambda wrap: wrap(S(_fn, transform=_fail))(X),
    "reducer": lambda wrap: wrap(S(_fn, reduce=Fold(0.0, lambda a, x: _fail())))(X),
    "init": lambda wrap: wrap(S(_fn, reduce=Fold(_fail, lambda a, x: a)))(X),
    "planted function": lambda wrap: wrap(plant(_fn, {"h": _fail}))(X),
    "when": lambda wrap: wrap(tap(_fn, when=_fail))(X),
    "callback": lambda wrap: wrap(tap(_fn, _fail))(X),
    "name": lambda wrap: wrap(S(lambda x: sow(x, _fail())))(X),
}


@under("eager", "filter_jit")
@pytest.mark.parametrize("name", FAILURES)
def test_an_exception_leaves_nothing_behind(name, wrap):
    with pytest.raises(Exception) as info:
        jax.block_until_ready(FAILURES[name](wrap))
        jax.effects_barrier()
    assert "_FailedError" in repr(info.value) + str(info.value)
    _works()


# --- generators and coroutines ---


def test_generators():
    def halves(x):
        while True:
            x = sow(x / 2, "half")
            yield x

    # One that `fn` runs is a part of it, also if it was made outside.
    other = halves(X)

    def fn(x):
        mine = halves(x)
        return next(mine) + next(mine) + next(other)

    out, got = S(fn, reduce=Append())(X)
    assert_close(got["half"]["primal"], (X / 2, X / 4, X / 2))

    # One that captures, and is left and resumed.
    def captures(k):
        for i in range(3):
            yield S(lambda x: sow(k * x, f"{k}"))(X + i)

    for i, (one, two) in enumerate(zip(captures(1.0), captures(2.0))):
        assert sow(X, "h") is X
        assert_close(one[1], {"1.0": {"primal": X + i}})
        assert_close(two[1], {"2.0": {"primal": 2 * (X + i)}})


def test_asyncio():
    async def layer(x, name):
        await asyncio.sleep(0)
        return sow(2 * x, name)

    async def both(x):
        return await asyncio.gather(layer(x, "a"), layer(x, "b"))

    # An event loop that `fn` runs is a part of it.
    _, got = S(lambda x: asyncio.run(both(x)))(X)
    assert_close(got, {n: {"primal": 2 * X} for n in ("a", "b")})

    async def task(use, want):
        for _ in range(3):
            assert_close(use(_fn)(X), want)
            await asyncio.sleep(0)
            assert sow(X, "h") is X
            assert_close(await asyncio.to_thread(use(_fn), X), want)

    async def all_tasks():
        await asyncio.gather(*(task(*use) for use in USES))

    asyncio.run(all_tasks())
    _works()


# --- memory ---


def _changing(i):
    """Functions and models that were not there before."""
    model = Model(jr.wrap_key_data(np.array([0, i], np.uint32)))
    tag = f"tag {i}"
    S(lambda x: sow(x * 2, "h", tag=tag), tag=tag, transform=lambda x: x + 1)(X)
    S(model, capture=True, tag="none")(X)
    S(lambda m, x: m(x), capture=lambda path, m: path != ".", tag="none")(model, X)
    S(model, scope=True, reduce=Fold(model.first.weight, lambda acc, x: acc + x))(X)
    S(model, capture=Layer, methods="encode", inputs=True, tag="none")(X)
    plant(model, {"first": lambda x: x * i, "last": X}, capture=True)(X)


def _counts():
    gc.collect()
    classes = [len(cls.__subclasses__()) for cls in (Layer, Model)]
    return collections.Counter(map(type, gc.get_objects())), classes


@pytest.mark.slow
def test_captures_leave_no_objects_behind():
    def clear(numbers):
        for i in numbers:
            _changing(i)
        # JAX's own caches remember a number of programs, whatever these are.
        jax.clear_caches()
        return _counts()

    clear(range(5))
    objects, classes = clear(range(5, 10))
    more_objects, more_classes = clear(range(10, 60))
    assert more_classes == classes == [0, 0]
    new = more_objects - objects
    assert sum(new.values()) < 50, new.most_common(9)


@pytest.mark.slow
def test_thousands_of_captures():
    def change(i):
        model = Layer(jnp.full(3, float(i)))
        S(lambda x: sow(x * 2, f"{i}"))(X)
        S(model, capture=True)(X)

    # As many as JAX's caches hold.
    for i in range(1000):
        change(i)
    objects, classes = _counts()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(1000, 3000):
        change(i)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    more_objects, more_classes = _counts()
    assert more_classes == classes
    assert sum((more_objects - objects).values()) < 1000
    assert (after - before) / 1024 < 50


@pytest.mark.slow
def test_jax_keeps_no_treedefs():
    """JAX 0.10 compares each new one with all that it has kept."""

    def trace(*transformations):
        def f(x):
            step = lambda c, _: (sow(jax.jit(jnp.sin)(c), "in a loop"), None)
            x = lax.scan(step, x, length=2)[0]
            go = lambda x: sow(jnp.sin(x), "in a branch")
            x = jax.checkpoint(lambda x: lax.cond(x[0] > 0, go, jnp.cos, x))(x)
            again = lambda x: sow(x + 1, "in a while loop")
            return jnp.sum(lax.while_loop(lambda x: x[0] < 3, again, x))

        for transform in transformations:
            jax.jit(transform(f)).trace(X)

    def kept(*transformations):
        def treedefs():
            gc.collect()
            return sum(type(x) is jax.tree_util.PyTreeDef for x in gc.get_objects())

        trace(*transformations)
        before = treedefs()
        for _ in range(10):
            trace(*transformations)
        return treedefs() - before

    plain = lambda f: lambda x: f(x)
    assert kept(S, lambda f: S(f, reduce=Append())) < 3 * kept(plain, plain)


def test_no_class_is_made_and_none_is_changed():
    class Own(eqx.Module):
        def __call__(self, x):
            return self.encode(x)

        def encode(self, x):
            return sow(2 * x, "h")

    def run(**options):
        for _ in range(2):
            S(Own(), tag=options.pop("tag", "intermediates"), **options)(X)

    before = dict(vars(Own))
    code = Own.__call__.__code__
    run(capture=True)
    run(capture=Own, inputs=True, tag="a")
    run(capture=lambda path, module: True, scope=True)
    run(scope=True)
    run(capture=True, methods="encode")
    run(capture=True, methods=("encode", "__call__"))
    S(S(Own(), capture=True), capture=True, tag="b")(X)
    assert not Own.__subclasses__() and dict(vars(Own)) == before
    assert Own.__call__.__code__ is code and not hasattr(Own.__call__, "__wrapped__")


# --- files ---


def _model():
    return eqx.nn.Sequential(
        [eqx.nn.Linear(3, 3, key=jr.key(1)), Sow("named", spec=object), Sow()]
    )


def _captured():
    def fn(x):
        x = lax.fori_loop(0, 3, lambda i, x: sow(jnp.sin(x), "z"), x)
        return sow({"x": x, "kind": "text"}, "a")["x"]

    return S(jax.grad(lambda x: jnp.sum(fn(x))), reduce={"z": Buffer(2)})(X)[1]


COPIES = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def _from_file(x):
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, x)
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, eqx.filter_eval_shape(lambda: x))


@pytest.mark.parametrize("way", [*COPIES, "file"])
def test_copies_of_intermediates(way):
    got = _captured()
    assert list(got) == ["z", "a"]
    new = COPIES.get(way, _from_file)(got)
    assert type(new) is Intermediates and list(new) == list(got)
    assert [list(modes) for modes in new.values()] == [list(m) for m in got.values()]
    assert_close(new, got)
    summed = S(_fn, transform=summarize)(X)[1]
    assert_close(COPIES.get(way, _from_file)(summed), summed)
    assert_close(plant(_fn, COPIES.get(way, _from_file)(S(_fn)(X)[1]))(X), _fn(X))


@pytest.mark.parametrize("way", [*COPIES, "file"])
def test_copies_of_a_model(way):
    model = _model()
    copied = COPIES.get(way, _from_file)
    captured = S(model, capture=True)
    assert_close(copied(model), model)
    assert_close(S(copied(model), capture=True)(X), captured(X))
    assert_close(copied(captured)(X), captured(X))


@pytest.mark.parametrize("way", COPIES)
def test_copies_of_what_is_transformed(way):
    copied = COPIES[way]
    for fn in (S(_fn), plant(_fn, {"h": X}), S(_fn, reduce=Last(), names="h")):
        assert_close(copied(fn)(X), fn(X))
    assert list(S(copied(scope("first"))(_fn))(X)[1]) == ["first/h", "first/g"]
    summary = summarize(X, edges=[0, 2, 4])
    assert_close(copied(summary), summary)


def test_a_model_is_copied_while_it_is_captured():
    def fn(model, x):
        return copy.copy(model)(x) + copy.deepcopy(model)(x)

    out, got = S(fn, capture=Layer, tag="other", reduce=Append())(Layer(X), X)
    assert_close(out, 2 * (X * X + 1))
    assert_close(got["model"]["primal"], (X * X + 1,) * 2)


def _exported():
    return jax.export.export(jax.jit(S(_fn)))(X).serialize()


def test_export():
    out, got = jax.export.deserialize(bytearray(_exported())).call(X)
    assert type(got) is Intermediates and list(got) == ["h", "g"]
    assert_close((out, got), S(_fn)(X))


def test_export_of_a_summary():
    export = lambda fn: jax.export.export(jax.jit(fn))(X).serialize()
    with pytest.raises(ValueError, match="containing an unregistered type"):
        export(S(_fn, transform=summarize))
    assert export(S(_fn, transform=lambda x: summarize(x).rms))


@pytest.mark.slow
def test_export_to_a_fresh_process(tmp_path):
    file = tmp_path / "exported"
    file.write_bytes(_exported())
    program = f"""
import eqx_sow, jax.export, jax.numpy as jnp
loaded = jax.export.deserialize(bytearray(open({str(file)!r}, "rb").read()))
out, got = loaded.call(jnp.arange(1.0, 4.0))
print(type(got).__name__, list(got), got["g"]["primal"])
"""
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert done.stdout == "Intermediates ['h', 'g'] [2. 4. 6.]\n"
