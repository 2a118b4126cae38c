"""Rows of `docs/what-comes-back.md`: a primitive, and what becomes of a sow inside."""

import contextlib
import functools
import importlib
import inspect
import itertools as it
import pathlib
from collections.abc import Callable

import equinox as eqx
import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_sow import (
    Buffer,
    Fold,
    plant,
    save_intermediates as S,
    Sow,
    sow,
    SowError,
    tap,
    UnknownSowError,
    UnsupportedPrimitiveError,
)
from eqx_sow._walk import interpreter
from jax import lax
from jax.experimental import (
    checkify,
    hijax,
    io_callback,
    pallas as pl,
    scheduling_groups,
    xla_metadata,
)
from jax.experimental.custom_partitioning import custom_partitioning

from .helpers import assert_close
from .tables import named, pick


ROOT = pathlib.Path(__file__).parents[1]


X = jnp.arange(4.0)


def _pallas(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = sow(x_ref[...] * 2, "a")

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x)


def _custom_partitioning(x):
    fn = custom_partitioning(lambda x: sow(x * 2, "a"))
    fn.def_partition(
        partition=lambda *_: None,
        infer_sharding_from_operands=lambda *_: None,
        sharding_rule="i -> i",
    )
    return fn(x)


def _reduce(x):
    return lax.reduce(x, 0.0, lambda a, b: sow(a + b, "a"), (0,))


def _scatter(x):
    # JAX's `scatter` has a function only here.
    return x.at[0].set(1.0).at[1].apply(lambda x: sow(x * 2, "a"))


def _condition_of_a_while(x):
    return lax.while_loop(lambda x: sow(x[1], "a") < 5, lambda x: x + 1, x)


def _noinline(x):
    return eqx.internal.noinline(lambda x: sow(x * 2, "a"))(x)


def _only_in_a_linear_solve(x):
    return lax.custom_linear_solve(
        lambda v: sow(2 * v, "a"), x, lambda matvec, b: b / 2, symmetric=True
    )


@pytest.mark.parametrize(
    "fn",
    [
        _pallas,
        _custom_partitioning,
        _reduce,
        _scatter,
        _condition_of_a_while,
        _noinline,
        _only_in_a_linear_solve,
    ],
)
def test_refused(fn):
    with pytest.raises(UnsupportedPrimitiveError, match="'a'"):
        S(fn)(X)
    with pytest.raises(UnsupportedPrimitiveError, match="'a'"):
        eqx.filter_jit(S(fn))(X)


class Two(eqx.Module):
    inner: Callable
    first: eqx.nn.Linear
    second: eqx.Module

    def __call__(self, x):
        return jax.jit(lambda x: self.inner(self.second)(self.first(x)))(x)


if hasattr(hijax, "HiPrim"):

    class _Call(hijax.HiPrim):
        def __init__(self, fn, x):
            self.in_avals = (jax.typeof(x),)
            self.out_aval, self.params = jax.typeof(x), dict(fn=fn)
            super().__init__()

        def expand(self, x):
            return self.fn(x)

    def _in_hi(fn):
        weight, bias = np.ones((4, 4)), np.ones(4)
        if isinstance(fn, eqx.nn.Linear):
            fn = eqx.tree_at(lambda m: (m.weight, m.bias), fn, (weight, bias))
        return lambda x: _Call(fn, x)(x)


@pytest.mark.filterwarnings("ignore:.*found no mark")
@pytest.mark.parametrize("inner", ["noinline", "hi"])
@pytest.mark.parametrize("second", [eqx.nn.Linear, Sow])
def test_a_hidden_call(inner, second):
    if inner == "hi" and not hasattr(hijax, "HiPrim"):
        pytest.skip("Until JAX before 0.12, which has no `HiPrim`, is dropped")
    key = jax.random.key(0)
    first = eqx.nn.Linear(4, 4, key=key)
    last = Sow() if second is Sow else eqx.nn.Linear(4, 4, key=key)
    model = Two(eqx.internal.noinline if inner == "noinline" else _in_hi, first, last)
    what = r"layer `Sow\(\)`" if second is Sow else "output of a `Linear`"
    hidden = rf"^The {what} \(called at .*\) is inside"
    options = [dict(capture=c) for c in (True, eqx.nn.Linear, lambda *_: True)]
    for option in [{}] if second is Sow else options:
        for fn in (S(model, **option), S(S(model, tag="b", capture=Two), **option)):
            with pytest.raises(UnsupportedPrimitiveError, match=hidden):
                fn(X)
    if second is not Sow:
        assert list(S(model, capture=Two)(X)[1]) == ["."]
        S(model, scope=True)(X)
    else:
        # One of another tag is not asked for.
        last = eqx.tree_at(lambda m: m.second, model, Sow(tag="another"))
        assert list(S(lambda x: sow(last(x), "out"))(X)[1]) == ["out"]


def _custom_jvp(fn):
    fn = jax.custom_jvp(fn)
    fn.defjvp(lambda x, t: (x[0], t[0]))
    return fn


def _custom_vjp(fn):
    fn = jax.custom_vjp(fn)
    fn.defvjp(lambda x: (x, None), lambda _, ct: (ct,))
    return fn


def _custom_vmap(fn):
    fn = jax.custom_batching.custom_vmap(fn)
    fn.def_vmap(lambda n, batched, x: (x, batched[0]))
    return fn


@pytest.mark.filterwarnings("ignore:.*found no mark")
@pytest.mark.parametrize("wrap", [lambda fn: fn, _custom_jvp, _custom_vjp])
def test_a_transform_that_prints_and_sows(wrap):
    heard = []
    fn = wrap(lambda x: sow(2 * x, "a"))
    linear = eqx.nn.Linear("scalar", "scalar", key=jax.random.key(0))

    def transform(x):
        jax.debug.callback(heard.append, x)
        return linear(sow(x, "b", tag="outer"))

    def check(use, *want):
        heard.clear()
        got = use(jnp.ones(()))
        jax.effects_barrier()
        assert heard == list(want)
        return got

    fold = Fold(0.0, lambda acc, x: acc + sow(x, "c", tag="outer"))
    saved = S(fn, transform=transform, reduce=fold)
    tapped = tap(fn, lambda event: None, transform=transform)
    for run in (lambda x: saved(x)[0], lambda x: saved(x)[1]["a"]["primal"], tapped):
        for use in (run, jax.grad(run)):
            check(use, 2)
            assert check(S(use, tag="outer"), 2)[1] == {}
            with pytest.raises(UnknownSowError, match="selects nothing"):
                S(use, capture=True, tag="outer")(jnp.ones(()))
        check(plant(lambda x: run(sow(x, "p")), {"p": lambda x: 2 * x}), 4)
    check(plant(tapped, {"a": lambda x: 3 * x}), 6)


@pytest.mark.filterwarnings("ignore:.*found no mark")
@pytest.mark.parametrize("wrap", [_custom_jvp, _custom_vjp, _custom_vmap])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_callback_that_would_happen_twice(wrap, ordered):
    calls = []

    def called(x):
        calls.append(x)
        return x

    @wrap
    def inner(x):
        x = io_callback(called, jax.typeof(x), x, ordered=ordered)
        return sow(x * 2, "a")

    fn = lambda x: sow(inner(x) + 1, "b")
    with pytest.raises(UnsupportedPrimitiveError, match="'a'.*would happen twice"):
        S(fn)(X)
    jax.effects_barrier()
    assert not calls
    for saved in (S(fn, names="b"), S(S(fn, names="b"), tag="other")):
        out = jax.jit(saved)(X)
        jax.effects_barrier()
        assert len(calls) == 1
        np.testing.assert_array_equal(jax.tree.leaves(out)[0], 2 * X + 1)
        calls.clear()


def _ahead_of_time(x):
    fn = jax.jit(lambda x: sow(x * 2, "a"))
    return x + fn.lower(jnp.ones(4)).compile()(jnp.ones(4))


def _at_compile_time(x):
    with jax.ensure_compile_time_eval():
        return x + sow(jnp.ones(4) * 2, "a")


@pytest.mark.parametrize("fn", [_ahead_of_time, _at_compile_time])
def test_executed_while_traced(fn):
    with pytest.raises(SowError, match="'a'.* was executed while"):
        S(fn)(X)


def test_compiled_before():
    compiled = jax.jit(lambda x: sow(x * 2, "a")).lower(X).compile()
    with pytest.raises(TypeError, match="Cannot apply JAX transformations"):
        S(lambda x: compiled(x))(X)


@pytest.mark.filterwarnings("ignore:.*found no mark")
def test_linearized_before():
    out, linear = jax.linearize(lambda x: sow(jnp.sin(x), "a"), X)
    assert S(lambda t: linear(t))(X)[1] == {}
    np.testing.assert_allclose(S(lambda t: linear(t))(X)[0], jnp.cos(X) * X)


def _mutable_array(x):
    ref = jax.new_ref(x)
    ref[...] = sow(ref[...] * 2, "a")
    ref[...] += 1
    return ref[...]


def _closure_converted(x):
    return eqx.filter_closure_convert(lambda x: sow(x * 2, "a"), x)(x)


def _checkified(x):
    return checkify.checkify(lambda x: sow(x * 2, "a"))(x)[1]


def _next_to_a_callback(x):
    jax.debug.print("{}", x[0])
    other = jax.pure_callback(lambda x: np.asarray(x), x, x)
    return sow(x * 2, "a") + other


def _error_if(x):
    return eqx.error_if(sow(x * 2, "a"), x[0] > 10, "large")


@pytest.mark.parametrize(
    "fn",
    [_mutable_array, _closure_converted, _checkified, _next_to_a_callback, _error_if],
)
@pytest.mark.parametrize("way", [S, lambda fn: eqx.filter_jit(S(fn))])
def test_captured(fn, way, capsys):
    out, got = way(fn)(X)
    jax.effects_barrier()
    np.testing.assert_allclose(got["a"]["primal"], 2 * X)
    np.testing.assert_allclose(out, fn(X))
    jax.effects_barrier()
    # Effects happen once for each call, of which there were two.
    prints = 2 if fn is _next_to_a_callback else 0
    assert len(capsys.readouterr().out.splitlines()) == prints


def test_effect_after_the_last_sow(capsys):
    def fn(x):
        x = sow(x * 2, "a")
        jax.debug.print("after {}", x[1])
        return x

    S(fn)(X)
    jax.effects_barrier()
    assert capsys.readouterr().out == "after 2.0\n"


def test_pmap():
    xs = jnp.arange(8.0)
    _, got = S(lambda xs: eqx.filter_pmap(lambda x: sow(x * 2, "a"))(xs))(xs)
    np.testing.assert_allclose(got["a"]["primal"], 2 * xs)


def test_custom_vjp_that_optimizes_remat():
    def f(x):
        return sow(jnp.sin(x), "a")

    def fwd(x):
        return sow(jnp.sin(x), "fwd"), x

    f = jax.custom_vjp(f)
    f.defvjp(fwd, lambda x, g: (3 * g,), optimize_remat=True)
    _, got = S(f)(X)
    np.testing.assert_allclose(got["a"]["primal"], jnp.sin(X))
    try:
        grad, got = S(jax.grad(lambda x: f(x).sum()))(X)
    except UnsupportedPrimitiveError as error:
        assert "'fwd'" in str(error)
    else:
        np.testing.assert_allclose(grad, jnp.full(4, 3.0))
        np.testing.assert_allclose(got["fwd"]["primal"], jnp.sin(X))


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_loops_and_branches_in_shard_map(check_vma):
    spec = jax.sharding.PartitionSpec("a", "b")
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=kinds)

    def f(x):
        mean = sow(lax.pmean(jnp.mean(x), "a"), "mean")
        body = lambda c, _: (sow(c * 2, "scan"), None)
        x = lax.scan(body, x, None, length=3)[0]
        x = lax.cond(x[0, 0] > 0, lambda x: sow(x * 3, "cond"), lambda x: x, x)
        body = lambda c: (c[0] + 1, sow(c[1] * 2, "while"))
        return lax.while_loop(lambda c: c[0] < 2, body, (0, x))[1] + mean

    mapped = jax.shard_map(
        f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    x = jnp.arange(32.0).reshape(8, 4) - 15
    blocks = np.asarray(x).reshape(4, 2, 2, 2).transpose(0, 2, 1, 3)
    yes = blocks[:, :, :1, :1] > 0
    for fn in (mapped, jax.jit(mapped)):
        out, got = S(fn)(x)
        np.testing.assert_allclose(out, mapped(x), rtol=1e-6)
        scale = np.array([2, 4, 8]).reshape(3, 1, 1)
        scan = blocks[:, :, None] * scale
        np.testing.assert_allclose(got["scan"]["primal"], scan)
        assert got["scan"]["primal"].sharding.spec == spec
        np.testing.assert_allclose(got["cond"]["primal"], blocks * 24 * yes)
        np.testing.assert_array_equal(got["cond"]["count"], yes[:, :, 0, 0])
        after = blocks * np.where(yes, 24, 8) * 4
        np.testing.assert_allclose(got["while"]["primal"], after)
        np.testing.assert_array_equal(got["while"]["count"], np.full((4, 2), 2))
        mean = blocks.mean((0, 2, 3))
        mean = mean if check_vma else np.broadcast_to(mean, (4, 2))
        np.testing.assert_allclose(got["mean"]["primal"], mean)


def test_sow_in_a_function_of_an_option():
    f = lambda x: sow(jnp.sin(x), "h").sum()
    more = lambda h: sow(h * 2, "new")
    assert list(S(f, transform=more)(X)[1]) == ["h"]
    fold = Fold(0.0, lambda acc, h: acc + sow(h.sum(), "new"))
    assert list(S(f, reduce=fold)(X)[1]) == ["h"]
    assert set(S(plant(f, {"h": more}))(X)[1]) == {"h", "new"}
    names = []
    when = lambda h: more(h).sum() > 0
    tap(f, lambda event: names.append(event.name), transform=more, when=when)(X)
    jax.effects_barrier()
    assert names == ["h"]


@pytest.mark.parametrize("apart", [False, True])
def test_counts_of_a_buffer(apart):
    def f(x, w):
        body = lambda c, _: (sow(jnp.sin(c), "h"), None)
        y = lax.scan(body, x, None, length=3)[0]
        if apart:
            sow(w * 2, "h")
        return y

    saved = S(jax.grad(f), reduce=Buffer(5))
    if apart:
        with pytest.raises(SowError, match="there is not one cotangent for each value"):
            saved(0.5, jnp.float32(1))
        return
    got = saved(0.5, jnp.float32(1))[1]["h"]
    assert got["count"] == 3
    a, b, _ = jnp.cos(got["primal"][:3])
    backward = got["cotangent"][: got["count"]][::-1]
    np.testing.assert_allclose(backward, jnp.array([a * b, b, 1.0]), rtol=1e-6)


# --- calls that only say something about a function ---


def _annotations():
    found = {
        "composite": lambda fn: lax.composite(fn, "test.op"),
        "scheduling_group": scheduling_groups.scheduling_group("test.op"),
    }
    if hasattr(xla_metadata, "xla_metadata_call"):
        found["metadata"] = xla_metadata.xla_metadata_call(op="test.op")
    with contextlib.suppress(ImportError):
        overlap = importlib.import_module("jax.experimental.overlap")
        found["order"] = overlap.program_order(enforce=True)
        found["no order"] = overlap.program_order(enforce=False)
    return found


ANNOTATIONS = _annotations()


def _marks(x):
    sow(3 * x, "unused")
    x, _ = lax.scan(lambda c, _: (sow(jnp.sin(c), "loop"), None), x, length=2)
    x = lax.cond(x[0] > 9, lambda x: sow(2 * x, "cond"), lambda x: -x, x)
    return sow(x, "h") * x


UNDER = {
    **pick("eager", "jit", "scan", "lanes", "grad-total", "jit-grad-total-jit"),
    "unused": lambda fn: named("jit-grad-total")(lambda x: (fn(x), x * x)[1]),
    **pick("grad-total-checkpoint", "grad-total-scan", "lanes-grad-total", "jvp"),
}


@pytest.mark.parametrize("under", UNDER)
@pytest.mark.parametrize("name", ANNOTATIONS)
def test_an_annotated_function_is_one_that_is_called(name, under):
    # JAX has neither derivatives nor a batching rule for composites.
    if name == "composite" and under not in ("eager", "jit", "scan"):
        pytest.skip("Until JAX differentiates and batches composites")
    if name in ("scheduling_group", "metadata") and under == "grad-total-checkpoint":
        pytest.skip("Until JAX can do that if there is a loop inside")
    wrapped = UNDER[under](ANNOTATIONS[name](_marks))
    called = UNDER[under](jax.jit(_marks))
    # Compiled as a whole, which is quicker.
    run = (lambda fn: fn(X)) if under == "eager" else lambda fn: jax.jit(fn)(X)
    assert_close(run(S(wrapped)), run(S(called)), rtol=1e-5)
    if under in ("eager", "scan"):
        options = dict(reduce=Fold(0.0, _total), names="loop")
        got, want = (run(S(fn, **options)) for fn in (wrapped, called))
        assert_close(got, want, rtol=1e-5)


def _total(acc, x):
    return acc + jnp.sum(x)


def _called(layer, x):
    return layer(x)


@pytest.mark.parametrize("name", ANNOTATIONS)
def test_an_annotated_layer(name):
    """It does not stop the capture of the others, and can be planted and tapped."""
    first, last = (eqx.nn.Linear(4, 4, key=jax.random.key(i)) for i in range(2))
    wrapped = lambda model, x: model[1](ANNOTATIONS[name](_called)(model[0], x))
    called = lambda model, x: model[1](jax.jit(_called)(model[0], x))
    model = [first, last]
    want = S(called, capture=True)(model, X)
    assert list(want[1]) == ["model/0", "model/1"]
    assert_close(S(wrapped, capture=True)(model, X), want, rtol=1e-5)
    planted = plant(wrapped, {"0": jnp.ones(4)}, capture=True)
    assert_close(planted(model, X), last(jnp.ones(4)), rtol=1e-5)
    assert_close(S(planted, capture=True)(model, X)[1]["0"]["primal"], jnp.ones(4))
    events = []
    tap(wrapped, lambda e: events.append((e.name, jnp.asarray(e.value))), capture=True)(
        model, X
    )
    jax.effects_barrier()
    assert_close(dict(events), {k: v["primal"] for k, v in want[1].items()}, rtol=1e-5)
    if name != "composite":
        loss = lambda fn: eqx.filter_grad(lambda model, x: fn(model, x).sum())
        got, want = (S(loss(f), capture=True)(model, X) for f in (wrapped, called))
        assert_close(got, want, rtol=1e-5)


@pytest.mark.parametrize("name", ANNOTATIONS)
def test_annotations_stay(name):
    """All do where nothing inside is asked for, and those of the scheduler always."""
    if name == "order":
        pytest.skip("Until JAX leaves it in the lowered program")
    inside = ANNOTATIONS[name](lambda x: sow(jnp.sin(x), "inside") * 2)
    text = lambda **options: str(
        jax.make_jaxpr(S(lambda x: sow(inside(x), "out"), **options))(X)
    )
    said = "program_order" if name == "no order" else "test.op"
    assert said in text(names="out")
    if name in ("scheduling_group", "metadata"):
        assert said in text()
        lowered = jax.jit(S(inside)).lower(X).as_text()
        assert said in lowered


# What holds a function or a jaxpr, and has no rule: what `docs/limits.md` calls it.
_NO_RULE = {
    "a Pallas kernel": "pallas_call mpmd_map core_map run_scoped run_state fusible "
    "custom_fusion jaxpr_call",
    "`lax.custom_linear_solve`": "custom_linear_solve",
    "`lax.linear_call`": "linear_call",
    "`compute_on`": "compute_on",
    "`fused`": "fused_call",
    "`cudnn_fusion`": "cudnn_fusion",
    "`custom_partitioning`": "custom_partitioning",
    "`lax.reduce`": "reduce reduce_window select_and_scatter",
    "`x.at[...].apply`": "scatter scatter-add scatter-max scatter-min scatter-mul "
    "scatter-sub",
    "`thunky`": "thunky.async_start thunky.call_jax thunky.call_thunky_nested "
    "thunky.collective_group thunky.cond thunky.while",
    "`jax.pure_callback`": "pure_callback io_callback debug_callback buffer_callback "
    "inspect_sharding",
    "forward rule of a `custom_vjp` with `optimize_remat=True`": "remat_opt",
    # What JAX makes of functions that it has traced before.
    "": "custom_lin call_hi_primitive_linearized call_hi_primitive eval_jaxpr",
}


def _functions(x, depth=0):
    """The Python functions that one consists of."""
    if isinstance(x, functools.partial):
        x = x.func
    x = inspect.unwrap(x) if callable(x) else x
    if depth > 4 or not hasattr(x, "__code__"):
        return
    yield x
    for cell in x.__closure__ or ():
        with contextlib.suppress(ValueError):
            yield from _functions(cell.cell_contents, depth + 1)


def _rules_of(primitive):
    return [*it.chain(*map(_functions, (primitive.abstract_eval, primitive.impl)))]


def _holds(primitive):
    """Whether a primitive is defined with a jaxpr or a function among its parameters,
    as far as its rules tell."""
    words = "branches", "call", "fn", "callback", "_prim", "bwd"
    for fn in _rules_of(primitive):
        code = fn.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        only = code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount]
        if any("jaxpr" in n for n in names) or any(n in words for n in only):
            return True
    return False


def test_every_primitive_of_jax_that_holds_a_function_has_a_rule_or_a_limit(
    all_objects,
):
    for name in ("fused", "compute_on", "overlap", "thunky", "sparse"):
        with contextlib.suppress(ImportError):
            importlib.import_module(f"jax.experimental.{name}")
    every = [
        x for x in all_objects() if isinstance(x, jexc.Primitive) and _is_of_jax(x)
    ]
    holding = {x for x in every if _holds(x)}
    known = {p for p in interpreter.rules if p is not None}
    # It finds at least these of those that have rules.
    assert {"jit", "scan", "while", "cond", "composite"} <= {p.name for p in holding}
    limits = (ROOT / "docs" / "limits.md").read_text()
    assert [said for said in _NO_RULE if said not in limits] == []
    names = set(" ".join(_NO_RULE.values()).split())
    assert {p.name for p in holding - known} <= names


def _is_of_jax(primitive):
    """Whether it is one of JAX's. Other tests make some, and other libraries have
    some."""
    roots = {str(fn.__module__).split(".")[0] for fn in _rules_of(primitive)}
    return "jax" in roots and roots <= {"jax", "eqx_sow"}
