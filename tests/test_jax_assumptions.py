"""What eqx_sow assumes of JAX and Equinox, and they do not document.

With a new version of one of them, run this file first. Each test is one assumption, and
says when it fails what has changed, and which file uses it. Nothing here imports
eqx_sow, which may not even import then. This is the one test file that uses private
modules: the two that `eqx_sow/_compat.py` uses.
"""

import ast
import dataclasses as dc
import functools as ft
import gc
import sys
import types
import weakref
from pathlib import Path

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.extend.core as jexc
import jax.extend.linear_util as lu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import hijax
from jax.interpreters import ad, batching, mlir, partial_eval as pe
from jax.sharding import PartitionSpec as P


pytestmark = pytest.mark.sample(1)


SOURCE = Path(__file__).parent.parent / "eqx_sow"
prims = jexc.primitives


def assumed(sentence, *files):
    """A test of an assumption, which only these files of eqx_sow use."""
    assert files and all((SOURCE / f).exists() for f in files), files

    def decorate(check):
        @ft.wraps(check)
        def test(*args, **kwargs):
            try:
                check(*args, **kwargs)
            except Exception as e:
                pytest.fail(
                    f"With JAX {jax.__version__} and Equinox {eqx.__version__} it is "
                    f"no longer so: {sentence} See eqx_sow/"
                    f"{', eqx_sow/'.join(files)}. ({type(e).__name__}: {e})"
                )

        return test

    return decorate


def opened(jaxpr):
    return getattr(jaxpr, "jaxpr", jaxpr)


def jaxpr_of(fn, *args):
    return opened(jax.make_jaxpr(fn)(*args))


def equation(name, fn, *args):
    """The last equation of that primitive, at any depth."""
    found = [e for e in equations(jaxpr_of(fn, *args)) if e.primitive.name == name]
    return found[-1]


def equations(jaxpr):
    for eqn in opened(jaxpr).eqns:
        yield eqn
        for inside in jexc.jaxprs_in_params(eqn.params):
            yield from equations(inside)


class Spy:
    """Stands for a rule in one of JAX's tables, and keeps what it was called with."""

    def __init__(self, monkeypatch, table, primitive):
        self.calls = []
        self.results = []
        rule = table[primitive]

        def spying(*args, **kwargs):
            out = rule(*args, **kwargs)
            self.calls.append((args, kwargs))
            self.results.append(out)
            return out

        monkeypatch.setitem(table, primitive, spying)


# --- what is told of a failure ---


def test_a_failure_says_what_changed_and_where():
    @assumed("One is two.", "_compat.py")
    def wrong():
        assert 1 == 2

    with pytest.raises(pytest.fail.Exception, match=r"One is two\. See .*_compat\.py"):
        wrong()


def test_every_parameter_and_table_is_named_here():
    """So that what the library uses in addition is checked as well."""
    parameters, tables = set(), set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                of = ast.unparse(node.value).split(".")[-1]
                if of in ("p", "params") and isinstance(node.slice.value, str):
                    parameters.add(node.slice.value)
            elif isinstance(node, ast.Attribute):
                if ast.unparse(node.value) in ("ad", "batching", "mlir", "pe", "lu"):
                    tables.add(ast.unparse(node))
    here = Path(__file__).read_text()
    assert len(parameters) > 15 and len(tables) > 10
    own = {"site", "lanes"}
    assert {x for x in parameters - own if f'"{x}"' not in here} == set()
    assert {x for x in tables if x not in here} == set()


# --- effects ---


def debug_effect(**options):
    (effect,) = jax.make_jaxpr(lambda: jax.debug.print("", **options))().effects
    return effect


@assumed(
    "`jax.tree_util.default_registry` tells what one node of a PyTree holds.",
    "_mark/trees.py",
)
def test_one_level_of_a_tree():
    one_level = jax.tree_util.default_registry.flatten_one_level_with_keys
    module = eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0))
    for tree in (
        module,
        [1, (2, 3)],
        {"b": 1, "a": [2]},
        jax.tree_util.Partial(abs, 1),
    ):
        want = jax.tree.leaves_with_path(tree, is_leaf=lambda x: x is not tree)
        assert [(path, id(x)) for path, x in want] == [
            ((key,), id(x)) for key, x in one_level(tree)[0]
        ]
    assert one_level(3.0) is None and not one_level(None)[0]
    with pytest.raises(ValueError):
        one_level({1: 1, "a": 2})


@assumed("`jax.debug.print` has one effect, and another one if ordered.", "_compat.py")
def test_effects_of_printing():
    assert isinstance(debug_effect(), jexc.Effect)
    assert debug_effect() != debug_effect(ordered=True)


def marker():
    """A primitive as `sow_p`: an identity with an effect, of the value and of its
    tangent."""

    class MarkEffect(type(debug_effect())):
        __eq__ = lambda self, other: type(other) is MarkEffect
        __hash__ = lambda self: hash(MarkEffect)

    mark_p = jexc.Primitive("mark")
    mark_p.multiple_results = True
    mark_p.def_impl(lambda x: [x])
    mark_p.def_effectful_abstract_eval(lambda x: ([x], {MarkEffect()}))
    ad.primitive_jvps[mark_p] = lambda xs, ts: (mark_p.bind(*xs), ts)
    batching.primitive_batchers[mark_p] = lambda xs, dims: (mark_p.bind(*xs), dims)
    mlir.register_lowering(mark_p, lambda ctx, x: [x])
    return mark_p


def scan(fn):
    return lambda x: jax.lax.scan(lambda c, _: (fn(c), None), x, length=2)[0]


def repeat(fn):
    return lambda x: jax.lax.while_loop(lambda x: x < 3, lambda x: fn(x) + 1, x)


def branch(fn):
    return lambda x: jax.lax.cond(x > 0, fn, lambda x: x, x)


def with_jvp(fn):
    out = jax.custom_jvp(fn)
    out.defjvp(lambda xs, ts: jax.jvp(fn, xs, ts))
    return out


def with_vjp(fn):
    out = jax.custom_vjp(fn)
    out.defvjp(lambda x: jax.vjp(fn, x), lambda pull, ct: pull(ct))
    return out


def with_vmap(fn):
    out = jax.custom_batching.custom_vmap(fn)
    out.def_vmap(lambda size, batched, x: (jax.vmap(fn)(x), batched[0]))
    return out


INSIDE = [jax.jit, scan, repeat, branch, jax.checkpoint, with_jvp, with_vjp]


@pytest.mark.parametrize("inside", INSIDE)
@assumed(
    "An effect whose type is a subclass of that of `jax.debug.print` is allowed in "
    "every loop, branch and call, and the equations and jaxprs around it tell of it.",
    "_compat.py",
    "_mark/primitive.py",
    "_walk/sows.py",
)
def test_effect_is_allowed(inside):
    mark_p = marker()
    jaxpr = jaxpr_of(inside(lambda x: mark_p.bind(jnp.sin(x))[0]), 1.0)
    (effect,) = jaxpr.effects
    assert isinstance(effect, type(debug_effect()))
    assert any(effect in e.effects for e in jaxpr.eqns)
    assert any(e.primitive is mark_p for e in equations(jaxpr))


@pytest.mark.parametrize("inside", [i for i in INSIDE if i is not repeat])
@pytest.mark.parametrize("outside", [lambda f: f, scan], ids=["alone", "scan"])
@assumed(
    "Differentiation keeps an equation with an effect whose type is a subclass of "
    "that of `jax.debug.print`, though nothing uses its result.",
    "_compat.py",
    "_mark/primitive.py",
)
def test_effect_is_kept(outside, inside):
    mark_p = marker()

    def unused(x):
        mark_p.bind(jnp.sin(x))
        return 2 * x

    jaxpr = jaxpr_of(jax.grad(outside(inside(unused))), 1.0)
    assert any(e.primitive is mark_p for e in equations(jaxpr))


@assumed(
    "A program with an effect whose type is a subclass of that of `jax.debug.print` "
    "is lowered and runs.",
    "_handlers/tapping.py",
)
def test_effect_is_lowered():
    mark_p = marker()
    assert jax.jit(lambda x: mark_p.bind(x)[0])(2.0) == 2.0


# --- jaxprs ---


@assumed(
    "A jaxpr is equal to itself alone, and can be the key of a `WeakKeyDictionary`; a "
    "variable is a key of a dict.",
    "_walk/sows.py",
    "_walk/frame.py",
)
def test_jaxprs_as_keys():
    one, other = (jaxpr_of(lambda x: jnp.sin(x), 1.0) for _ in range(2))
    table = weakref.WeakKeyDictionary({one: 1, other: 2})
    assert table[one] == 1 and table[other] == 2
    assert {one.invars[0]: 1}[one.eqns[0].invars[0]] == 1


@assumed(
    "`jexc.ClosedJaxpr(jaxpr, consts)` has `jaxpr`, `consts`, `eqns`, `in_avals`, "
    "`out_avals` and `effects`, and `jexc.jaxpr_as_fun` runs it.",
    "_compat.py",
    "_walk/jax_rules.py",
)
def test_closed_jaxprs():
    closed = jax.make_jaxpr(lambda x: jnp.sin(x) + np.arange(3.0, dtype="f4"))(1.0)
    again = jexc.ClosedJaxpr(opened(closed), closed.consts)
    assert isinstance(again, jexc.Jaxpr | jexc.ClosedJaxpr)
    assert [a.shape for a in again.out_avals] == [(3,)] and not again.effects
    assert [a.shape for a in again.in_avals] == [()] and again.eqns
    assert len(opened(again).constvars) == len(again.consts)
    (out,) = jexc.jaxpr_as_fun(again)(0.0)
    assert out.tolist() == [0, 1, 2]


@assumed(
    "`jaxpr.replace` takes the variables, equations, effects and debug info, of which "
    "`with_unknown_names()` fits other variables.",
    "_walk/frame.py",
    "_walk/rewrite.py",
    "_walk/interpreter.py",
    "_compat.py",
)
def test_changing_a_jaxpr():
    jaxpr = jaxpr_of(lambda x: jnp.cos(jnp.sin(x)), 0.0)
    new = jaxpr.replace(
        constvars=[],
        invars=jaxpr.invars,
        outvars=[*jaxpr.eqns[0].outvars, *jaxpr.invars],
        eqns=jaxpr.eqns[:1],
        effects=frozenset(),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    assert jax.core.eval_jaxpr(new, (), 0.5) == [jnp.sin(0.5), 0.5]


@assumed(
    "`eqn.replace` takes the primitive, parameters, inputs and effects; `eqn.ctx."
    "manager` is a context manager; a `jexc.Literal` has its value in `val`.",
    "_walk/rewrite.py",
    "_walk/frame.py",
    "_walk/interpreter.py",
    "_compat.py",
)
def test_changing_an_equation():
    jaxpr = jaxpr_of(lambda x: jnp.sin(x) * 2, 0.0)
    sin, mul = jaxpr.eqns
    assert isinstance(sin, jexc.JaxprEqn)
    (two,) = [x for x in mul.invars if isinstance(x, jexc.Literal)]
    assert two.val == 2
    cos = sin.replace(
        primitive=prims.cos_p, params={**sin.params}, invars=[two], effects=frozenset()
    )
    with cos.ctx.manager:
        out = jax.core.eval_jaxpr(jaxpr.replace(eqns=[cos, mul]), (), 0.0)
    assert out == [2 * jnp.cos(2.0)]


@assumed(
    "`jax.make_jaxpr(fn)` traces once for each kind of input, and keeps what it found "
    "no longer than `fn` lives.",
    "_walk/interpreter.py",
)
def test_traces_are_kept_with_the_function():
    traces = []

    def fn(x):
        traces.append(x.shape)
        return jnp.sin(x)

    make = jax.make_jaxpr(fn)
    first = opened(make(1.0))
    assert opened(make(2.0)) is first and opened(make(jnp.ones(2))) is not first
    assert traces == [(), (2,)]
    kept = weakref.ref(first)
    del fn, make, first
    traces.clear()
    gc.collect()
    assert kept() is None


# --- what is going on ---

context = jax.make_user_context(None)


@pytest.mark.parametrize("inside", [jax.jit, scan, jax.checkpoint, branch, repeat])
@assumed(
    "The value of a `jax.make_user_context` is part of the key of JAX's caches: what "
    "is traced with one is not found with another, and is found again later.",
    "_mark/listening.py",
)
def test_context_is_in_the_key(inside):
    values = []

    def fn(x):
        values.append(context.value)
        return jnp.sin(x)

    program = jax.jit(inside(fn))

    def traced_with(value):
        values.clear()
        with context(value):
            jax.make_jaxpr(program)(1.0)
        return set(values)

    assert traced_with(None) == {None}
    assert traced_with("a") == {"a"}
    assert traced_with(None) == traced_with("a") == set()


@assumed(
    "`jexc.take_current_trace` gives one type of trace to eager calls, another to "
    "whatever is staged, at any depth, and a third under `jax.vmap`, whose tracers "
    "have it as `_trace`.",
    "_compat.py",
)
def test_traces():
    def now():
        with jexc.take_current_trace() as trace:
            return trace

    found = {}

    def note(key):
        def fn(x):
            found[key] = type(now()), getattr(x, "_trace", None) is now()
            return x

        return fn

    note("eager")(1.0)
    for key, inside in dict(jit=jax.jit, scan=scan, checkpoint=jax.checkpoint).items():
        jax.make_jaxpr(inside(note(key)))(1.0)
    jax.vmap(note("vmap"))(jnp.ones(2))
    jax.make_jaxpr(jax.vmap(note("staged vmap")))(jnp.ones(2))
    staged = found["jit"][0]
    assert found["scan"][0] is found["checkpoint"][0] is staged
    assert found["vmap"] == found["staged vmap"] == (found["vmap"][0], True)
    assert len({found["eager"][0], staged, found["vmap"][0]}) == 3


# --- primitives and their parameters ---


def devices(fn):
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((1,), ("d",), axis_types=kinds)
    return jax.shard_map(fn, mesh=mesh, in_specs=P("d"), out_specs=P("d"))


def jitted(names):
    return f"jaxpr {names} in_shardings in_layouts out_shardings out_layouts"


PARAMETERS = {
    "jit_p": (jax.jit(jnp.sin), jitted("donated_invars")),
    "remat_p": (jax.checkpoint(jnp.sin), "jaxpr"),
    "scan_p": (scan(jnp.sin), "jaxpr length reverse unroll"),
    "while_p": (repeat(jnp.sin), "cond_jaxpr cond_nconsts body_jaxpr body_nconsts"),
    "cond_p": (branch(jnp.sin), "branches"),
    "custom_jvp_call_p": (with_jvp(jnp.sin), "call_jaxpr jvp_jaxpr_fun"),
    "custom_vjp_call_p": (with_vjp(jnp.sin), "call_jaxpr fwd_jaxpr_thunk"),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name):
    fn, names = PARAMETERS[name]

    @assumed(
        f"`jexc.primitives.{name}` is the primitive of its public function, and has "
        f"the parameters {names}.",
        "_walk/rules.py",
    )
    def check():
        (eqn,) = [e for e in jaxpr_of(fn, 1.0).eqns if e.primitive in (primitive(),)]
        assert set(names.split()) <= eqn.params.keys()

    def primitive():
        return getattr(prims, name)

    check()


@pytest.mark.parametrize("name", PARAMETERS)
@assumed(
    "`primitive.get_bind_params(eqn.params)` is a dict, with which `primitive.bind` "
    "makes the equation again.",
    "_walk/rules.py",
)
def test_binding_again(name):
    fn, _ = PARAMETERS[name]
    eqn = next(e for e in jaxpr_of(fn, 1.0).eqns if e.primitive is getattr(prims, name))

    def again(*args):
        return eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))

    args = [jnp.ones(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    new = next(e for e in jaxpr_of(again, *args).eqns if e.primitive is eqn.primitive)
    assert new.params.keys() == eqn.params.keys()


@assumed(
    'A scan has as operands constants, carries and slices; `"num_consts"` and '
    '`"num_carry"`, or `"ft_in".unpack()`, say how many.',
    "_compat.py",
    "_walk/rules.py",
)
def test_scan():
    k = jnp.ones(2)

    def fn(c, d, xs):
        body = lambda c, x: ((c[0] + k.sum(), 2 * c[1]), x)
        return jax.lax.scan(body, (c, d), xs)

    eqn = equation("scan", fn, 0.0, jnp.ones(7), jnp.ones((3, 5)))
    params = eqn.params
    if "num_consts" in params:
        n, m = params["num_consts"], params["num_carry"]
    else:
        consts, carry, slices = params["ft_in"].unpack()
        n, m = len(consts), len(carry)
        assert len(slices) == 1
    shapes = [v.aval.shape for v in eqn.invars]
    assert shapes[n : n + m] == [(), (7,)] and shapes[n + m :] == [(3, 5)]
    assert (params["length"], params["reverse"], params["unroll"]) == (3, False, 1)


@assumed(
    "A cond has its index as first operand, and as many branches as there are, each "
    "a closed jaxpr of the other operands; an index made by a rule can be bound.",
    "_walk/rules.py",
    "_walk/jax_rules.py",
)
def test_cond():
    eqn = equation("cond", branch(jnp.sin), 1.0)
    assert eqn.invars[0].aval.dtype == jnp.int32 and len(eqn.params["branches"]) == 2
    bind = lambda i, x: eqn.primitive.bind(i, x, **eqn.params)
    outs = [jax.jit(bind)(jnp.int32(i), 2.0)[0] for i in (0, 1)]
    assert outs == [2.0, jax.jit(jnp.sin)(2.0)]


@assumed(
    "A while loop has as operands the constants of its condition, those of its body, "
    "and its carry.",
    "_walk/rules.py",
    "_walk/jax_rules.py",
)
def test_while():
    a, b, c = jnp.ones(2), jnp.ones(3), jnp.ones((1, 4))
    going = lambda x: (x[0, 0] < a[0]) & (x[0, 1] < a[1])
    fn = lambda x: jax.lax.while_loop(going, lambda x: x * b[0] * c.sum(), x)
    eqn = equation("while", fn, jnp.ones((5, 5)))
    n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    shapes = [v.aval.shape for v in eqn.invars]
    assert shapes[:n] == [(2,)] and set(shapes[n : n + m]) == {(3,), (1, 4)}
    assert shapes[n + m :] == [(5, 5)]
    assert len(eqn.params["cond_jaxpr"].in_avals) == n + 1
    assert len(eqn.params["body_jaxpr"].in_avals) == m + 1


@assumed(
    "A `shard_map` has the parameters jaxpr, mesh (whose `shape` is a dict), in_specs, "
    "out_specs, check_vma and `newly_manual_axes`; the type of what varies over a mesh "
    "axis has it in `vma` or `mat.varying`.",
    "_compat.py",
    "_handlers/tapping.py",
    "_walk/rules.py",
)
def test_shard_map():
    types_ = []

    def local(x):
        types_.append(jax.typeof(x))
        return x

    eqn = equation("shard_map", devices(local), jnp.ones(1))
    p = eqn.params
    assert (p["check_vma"], dict(p["mesh"].shape)) == (True, {"d": 1})
    assert len(p["in_specs"]) == len(p["out_specs"]) == len(p["jaxpr"].invars) == 1
    assert set(p["newly_manual_axes"]) == {"d"}
    (aval,) = types_
    varying = aval.mat.varying if hasattr(aval, "mat") else aval.vma
    assert varying == {"d"}


@assumed("What makes a value vary is a `pvary`, which has the `axes`.", "_compat.py")
def test_what_makes_a_value_vary():
    fn = devices(lambda x: x + jax.lax.pcast(1.0, "d", to="varying"))
    assert set(equation("pvary", fn, jnp.ones(1)).params["axes"]) == {"d"}


@assumed(
    "In a `shard_map`, the mesh of `jax.sharding.get_abstract_mesh()` has its axes in "
    "`manual_axes`.",
    "_transforms/tap.py",
)
def test_manual_axes():
    found = [jax.sharding.get_abstract_mesh().manual_axes]
    note = lambda x: (found.append(jax.sharding.get_abstract_mesh().manual_axes), x)[1]
    jaxpr_of(devices(note), jnp.ones(1))
    assert found == [(), ("d",)]


@assumed(
    "A jit has one entry for each input and output in its shardings and layouts, the "
    "same for all that are not specified, and runs with one more of each.",
    "_compat.py",
    "_walk/rules.py",
)
def test_jit_with_another_output():
    eqn = equation("jit", jax.jit(lambda x: jnp.cos(jnp.sin(x))), 0.5)
    jaxpr = opened(eqn.params["jaxpr"])
    closed = jexc.ClosedJaxpr(
        jaxpr.replace(outvars=[*jaxpr.outvars, *jaxpr.invars]), ()
    )
    p = {**eqn.params, "jaxpr": closed}
    for name in ("out_shardings", "out_layouts"):
        p[name] = (*p[name], p[name][0])
    assert len(p["in_shardings"]) == len(p["in_layouts"]) == len(p["donated_invars"])
    bind = lambda x: eqn.primitive.bind(x, **eqn.primitive.get_bind_params(p))
    assert [float(x) for x in jax.jit(bind)(0.5)][1] == 0.5


@assumed(
    "`closed_call_p` has `call_primitive`; while a jaxpr is being built it can be "
    "bound (up to JAX 0.10 by `trace.process_primitive`), with the parameter "
    "`call_jaxpr`, and is one equation.",
    "_compat.py",
    "_walk/rules.py",
)
def test_calls():
    call_p = prims.closed_call_p
    assert isinstance(prims.call_p, jexc.Primitive)
    inside = jax.make_jaxpr(lambda x: jnp.cos(jnp.sin(x)))(1.0)

    def call(x):
        if not call_p.call_primitive:
            return call_p.bind(x, call_jaxpr=inside)
        with jexc.take_current_trace() as trace:
            pass
        return trace.process_primitive(call_p, [x], dict(call_jaxpr=inside))

    (eqn,) = jaxpr_of(call, 1.0).eqns
    assert eqn.primitive is call_p and "call_jaxpr" in eqn.params
    assert jax.jit(call)(0.5)[0] == jax.jit(lambda x: jnp.cos(jnp.sin(x)))(0.5)


@assumed(
    'A `custom_vmap` function is one equation, with its jaxpr in `"call"`.',
    "_compat.py",
    "_walk/rules.py",
)
def test_custom_vmap():
    (eqn,) = jaxpr_of(with_vmap(lambda x: 2 * x), 1.0).eqns
    assert isinstance(eqn.params["call"], jexc.Jaxpr | jexc.ClosedJaxpr)


@pytest.mark.parametrize("name", ["custom_jvp_call_p", "custom_vjp_call_p"])
@assumed(
    "The primitive of a function with a derivative rule is bound with the parameter "
    "`subfuns`: the function, the rule (whose `f` is called), and for a vjp the "
    "backward rule. `lu.transformation2` wraps the rule.",
    "_walk/jax_rules.py",
)
def test_binding_a_custom_rule(name, monkeypatch):
    primitive, called = getattr(prims, name), []

    @lu.transformation2
    def noting(rule, *args):
        called.append(name)
        return rule(*args)

    def bind(*args, bind=primitive.bind, **params):
        fn, rule, *backward = params["subfuns"]
        assert callable(rule.f)
        params["subfuns"] = fn, noting(rule), *backward
        return bind(*args, **params)

    monkeypatch.setattr(primitive, "bind", bind)
    fn = PARAMETERS[name][0]
    jaxpr = jaxpr_of(fn, 1.0)
    assert not called
    jaxpr_of(jax.grad(lambda x: jax.core.eval_jaxpr(jaxpr, (), x)[0]), 1.0)
    assert set(called) == {name}


@pytest.mark.parametrize(
    "name, rule",
    [("custom_jvp_call_p", "jvp_jaxpr_fun"), ("custom_vjp_call_p", "fwd_jaxpr_thunk")],
)
@assumed(
    "The derivative rule in an equation can be wrapped by `lu.wrap_init`, with its "
    "`debug_info`; its `call_wrapped` returns a jaxpr first, and memoizes it.",
    "_walk/rewrite.py",
)
def test_memoized_rules(name, rule):
    seen = []
    primitive = getattr(prims, name)
    (eqn,) = jaxpr_of(PARAMETERS[name][0], 1.0).eqns
    old = eqn.params[rule]

    def call(*zeros):
        out = old.call_wrapped(*zeros)
        seen.append(out[0])
        assert old.call_wrapped(*zeros)[0] is out[0]
        return out

    new = lu.wrap_init(call, debug_info=old.debug_info)
    eqn = eqn.replace(params={**eqn.params, rule: new})
    params = primitive.get_bind_params(eqn.params)
    assert jax.grad(lambda x: primitive.bind(x, **params)[0])(0.0) == 1
    assert seen and all(isinstance(j, jexc.Jaxpr | jexc.ClosedJaxpr) for j in seen)


@assumed(
    "`vars(jexc.primitives)` has the primitives of `jax.numpy` and `jax.lax`.",
    "_walk/sows.py",
)
def test_table_of_primitives():
    there = {p for p in vars(prims).values() if isinstance(p, jexc.Primitive)}
    fn = lambda x: jnp.where(x > 0, jnp.tanh(x @ x.T), scan(jnp.exp)(x.sum()))
    used = {e.primitive for e in equations(jaxpr_of(fn, jnp.ones((2, 2))))}
    assert len(used) > 5 and used <= there


@assumed(
    "A vmap selects the operands of a branch by `select_n(runs, stop_gradient(x), x)`.",
    "_walk/numbering.py",
)
def test_operands_of_batched_branches():
    jaxpr = jaxpr_of(jax.vmap(branch(jnp.sin)), jnp.ones(3))
    makers = {v: e for e in jaxpr.eqns for v in e.outvars}
    (sin,) = [e for e in jaxpr.eqns if e.primitive.name == "sin"]
    select = makers[sin.invars[0]]
    assert select.primitive.name == "select_n"
    _, stopped, x = select.invars
    assert x is jaxpr.invars[0]
    stop = makers[stopped]
    assert stop.primitive.name == "stop_gradient" and stop.invars[0] is x


@assumed(
    "Moving an array is one of the primitives broadcast_in_dim, transpose, reshape "
    "and squeeze, with the array as first operand.",
    "_walk/numbering.py",
)
def test_movements():
    x = jnp.ones((1, 2))
    for fn in (lambda x: x[None], lambda x: x.T, jnp.ravel, lambda x: x.squeeze(0)):
        found = [
            e for e in equations(jaxpr_of(fn, x)) if e.primitive is not prims.jit_p
        ]
        names = {e.primitive.name for e in found}
        assert names <= {"broadcast_in_dim", "transpose", "reshape", "squeeze"}
        assert names


@assumed(
    "The primitive of `jax.lax.custom_linear_solve` has the name custom_linear_solve.",
    "_walk/handler.py",
)
def test_solver():
    solve = lambda b: jax.lax.custom_linear_solve(
        lambda x: 2.0 * x, b, lambda matvec, b: b / 2, symmetric=True
    )
    assert equation("custom_linear_solve", solve, 1.0)


@assumed(
    "If the equation of a `jax.lax.custom_root` is a `HiPrim`, then its parameters "
    '"solve_jaxpr" and "solve" are the jaxpr of its solver, of its first operands, and '
    "a function that evaluates that.",
    "_compat.py",
    "_walk/flow.py",
)
def test_root():
    solve = lambda x: jax.lax.custom_root(
        lambda y: y - x, x, lambda f, y: y - f(y), lambda g, y: y / g(1.0)
    )
    eqn = jaxpr_of(solve, 1.0).eqns[-1]
    if "_prim" in eqn.params:
        prim = eqn.params["_prim"]
        jaxpr, n = prim.params["solve_jaxpr"], len(eqn.invars)
        assert len(jaxpr.in_avals) <= n and callable(prim.params["solve"])
        assert prim.solve is prim.params["solve"]


@assumed(
    "A `bind` that is set on a primitive is what JAX calls, and `abstract_eval` "
    "returns the types of the outputs and the effects.",
    "_walk/register.py",
    "_walk/jax_rules.py",
    "_walk/sows.py",
)
def test_replacing_bind(monkeypatch):
    toy_p, seen = toy("toy"), []
    closed = jax.make_jaxpr(toy_p.bind)(1.0)
    bind = toy_p.bind
    monkeypatch.setattr(toy_p, "bind", lambda x: (seen.append(x), bind(x))[1])
    jax.make_jaxpr(jexc.jaxpr_as_fun(closed))(1.0)
    assert seen
    aval, effects = toy_p.abstract_eval(closed.in_avals[0])
    assert aval == closed.in_avals[0] and not effects


@assumed(
    "`str_short` writes a type as `f32[2]` or `float32[2]`.",
    "_walk/register.py",
    "_results/leaves.py",
)
def test_names_of_types():
    aval = jax.typeof(jnp.ones(2))
    assert aval.str_short() == "float32[2]"
    assert aval.str_short(short_dtypes=True) == "f32[2]"


# --- tables of rules ---


def toy(name):
    p = jexc.Primitive(name)
    p.def_impl(lambda x: x)
    p.def_abstract_eval(lambda x: x)
    return p


@assumed(
    "JAX looks in `ad.primitive_jvps` and `ad.primitive_transposes` when it needs a "
    "rule. Tangents that are zero are `ad.Zero`, linear operands satisfy "
    "`ad.is_undefined_primal`, and `ad.instantiate_zeros` makes an array of a zero.",
    "_mark/primitive.py",
)
def test_derivative_rules():
    toy_p, seen = jexc.Primitive("toy"), {}
    toy_p.multiple_results = True
    toy_p.def_impl(lambda *xs: list(xs))
    toy_p.def_abstract_eval(lambda *avals: list(avals))

    def jvp(xs, ts):
        seen["zero"] = [type(t) is ad.Zero for t in ts]
        ts = map(ad.instantiate_zeros, ts)
        return toy_p.bind(*xs), toy_p.bind(*ts)

    def transpose(cts, *operands):
        seen["linear"] = [ad.is_undefined_primal(x) for x in operands]
        seen["ct"] = [type(ct) is ad.Zero for ct in cts]
        return [ad.instantiate_zeros(ct) for ct in cts]

    ad.primitive_jvps[toy_p] = jvp
    ad.primitive_transposes[toy_p] = transpose

    def fn(x, y):
        a, b = toy_p.bind(x, y)
        return a

    assert jax.grad(fn)(1.0, 2.0) == 1
    assert seen["zero"] == [False, True]
    assert jax.linear_transpose(fn, 1.0, 2.0)(3.0) == (3, 0)
    assert seen["linear"] == [True, True] and seen["ct"] == [False, True]
    assert jexc.primal_dtype_to_tangent_dtype(jnp.int32) == jax.dtypes.float0


@assumed(
    "A rule in `batching.fancy_primitive_batchers` is called with the axis data, the "
    "operands and their dims, where `None` is no axis, and one in "
    "`batching.primitive_batchers` without the first. The axis data are a dataclass "
    "with `name`, `size` and `spmd_name`.",
    "_mark/primitive.py",
    "_walk/jax_rules.py",
    "_handlers/tapping.py",
    "_transforms/tap.py",
)
def test_batching_rules():
    seen = []
    fancy_p, plain_p = toy("fancy"), toy("plain")

    def fancy(axis_data, xs, dims):
        seen.append((axis_data.size, axis_data.name, axis_data.spmd_name, dims))
        assert {"size", "name"} <= {f.name for f in dc.fields(axis_data)}
        return xs[0], dims[0]

    def plain(xs, dims):
        seen.append(tuple(dims))
        return xs[0], dims[0]

    batching.fancy_primitive_batchers[fancy_p] = fancy
    batching.primitive_batchers[plain_p] = plain
    fn = lambda x: plain_p.bind(fancy_p.bind(x))
    jax.vmap(fn, in_axes=1, axis_name="i")(jnp.ones((2, 3)))
    assert seen[0][:3] == (3, "i", None) and tuple(seen[0][3]) == seen[1] == (1,)
    pair_p = jexc.Primitive("pair")
    pair_p.def_abstract_eval(lambda x, y: x)
    batching.fancy_primitive_batchers[pair_p] = lambda axis_data, xs, dims: (
        seen.append(tuple(dims)),
        (xs[0], dims[0]),
    )[1]
    jax.make_jaxpr(lambda x, y: jax.vmap(lambda x: pair_p.bind(x, y))(x))(
        jnp.ones(2), 1.0
    )
    assert seen[-1] == (0, None)


@pytest.mark.parametrize(
    "name, inside",
    [("scan_p", scan), ("while_p", repeat), ("cond_p", branch)],
    ids=["scan", "while", "cond"],
)
@assumed(
    "The rule in `batching.fancy_primitive_batchers` of a scan, while or cond is "
    "called with (axis data, operands, dims, parameters), and returns outputs and "
    "their dims. It gives the axis data that it got, of whatever class, to the rules "
    "inside.",
    "_walk/jax_rules.py",
    "_compat.py",
)
def test_batching_of_loops(name, inside, monkeypatch):
    primitive = getattr(prims, name)
    seen = []
    toy_p = toy("toy")

    def batch(axis_data, xs, dims):
        seen.append(getattr(axis_data, "extra", None))
        return xs[0], dims[0]

    batching.fancy_primitive_batchers[toy_p] = batch
    rule = batching.fancy_primitive_batchers[primitive]

    def with_extra(axis_data, args, dims, **params):
        fields = {f.name: getattr(axis_data, f.name) for f in dc.fields(axis_data)}
        cls = type(axis_data)
        new = dc.make_dataclass("New", [("extra", object)], bases=(cls,), frozen=True)
        out = rule(new(**fields, extra="told"), args, dims, **params)
        outs, dims_out = out
        assert len(outs) == len(dims_out) == 1
        assert set(params) >= set(PARAMETERS[name][1].split())
        return out

    monkeypatch.setitem(batching.fancy_primitive_batchers, primitive, with_extra)
    jax.vmap(inside(lambda x: toy_p.bind(x) * 1.0))(jnp.ones(2))
    assert seen and set(seen) == {"told"}


@assumed(
    "The axis data that the rule of a loop passed on also reach the batching rules in "
    "the derivative rule of a function, which JAX calls later.",
    "_compat.py",
    "_walk/jax_rules.py",
)
@pytest.mark.parametrize("custom", [with_jvp, with_vjp])
def test_axis_data_reach_derivative_rules(custom, monkeypatch):
    seen = []
    toy_p = toy("toy")
    batching.fancy_primitive_batchers[toy_p] = lambda axis_data, xs, dims: (
        seen.append(hasattr(axis_data, "extra")),
        (xs[0], dims[0]),
    )[1]
    ad.primitive_jvps[toy_p] = lambda xs, ts: (toy_p.bind(*xs), toy_p.bind(*ts))
    ad.primitive_transposes[toy_p] = lambda ct, x: [toy_p.bind(ct)]
    rule = batching.fancy_primitive_batchers[prims.scan_p]

    def with_extra(axis_data, args, dims, **params):
        fields = {f.name: getattr(axis_data, f.name) for f in dc.fields(axis_data)}
        cls = type(axis_data)
        new = dc.make_dataclass("New", [("extra", object)], bases=(cls,), frozen=True)
        return rule(new(**fields, extra="told"), args, dims, **params)

    monkeypatch.setitem(batching.fancy_primitive_batchers, prims.scan_p, with_extra)
    fn = scan(custom(lambda x: toy_p.bind(x) * 2.0))
    jax.grad(lambda x: jax.vmap(fn)(x).sum())(jnp.ones(2))
    assert len(seen) >= 2 and all(seen)


@assumed(
    "The batching rule of a while loop binds the loop last. Under a predicate that "
    "varies, its condition returns one for each lane.",
    "_walk/jax_rules.py",
    "_walk/rules.py",
)
def test_batched_while():
    rule = batching.fancy_primitive_batchers[prims.while_p]
    fn = lambda x: jax.lax.while_loop(lambda x: x < 3, lambda x: x + 1, x)
    params = equation("while", fn, 1.0).params
    seen = []

    def batch(axis_data, xs, dims):
        look = lambda *xs: rule(axis_data, xs, dims, **params)[0]
        seen.append(jaxpr_of(look, *xs).eqns[-1])
        return xs[0], dims[0]

    toy_p = toy("toy")
    batching.fancy_primitive_batchers[toy_p] = batch
    jax.vmap(toy_p.bind)(jnp.ones(4))
    (loop,) = seen
    assert loop.primitive is prims.while_p
    assert [a.shape for a in loop.params["cond_jaxpr"].out_avals] == [(4,)]


def loop_with_a_constant(x):
    """Of which something does not depend on the iteration."""
    body = lambda c, _: (c * jnp.sin(jnp.cos(x)), None)
    return jax.lax.scan(body, x, length=2)[0]


def check_hoisted(jaxpr):
    *hoisted, loop = jaxpr.eqns
    assert loop.primitive is prims.scan_p
    assert all(e.primitive is not prims.scan_p for e in hoisted)


@assumed(
    "`jax._src.interpreters.ad.primitive_linearizations` has a rule for scan, which is "
    "called with (is_vjp, nonzeros, operands, parameters). It evaluates what it moves "
    "out of the scan in a trace whose `parent_trace` is the one that it is called in. "
    "Each primitive with a rule in `pe.custom_partial_eval_rules` is asked, and what "
    "`instantiate_const` returns is not known, and stays in the loop. Functions with "
    "rules of their own and `jax.shard_map` are bound in that trace.",
    "_compat.py",
    "_walk/jax_rules.py",
)
def test_what_is_moved_out_of_a_scan(monkeypatch):
    from jax._src.interpreters import ad as private

    seen = []

    @jax.custom_jvp
    def custom(x):
        return x * 2

    custom.defjvp(lambda xs, ts: (xs[0] * 2, ts[0] * 2))
    mesh = jax.sharding.AbstractMesh((1,), ("x",))
    shard = jax.shard_map(lambda x: x * 3, mesh=mesh, in_specs=P(), out_specs=P())
    (shard_map_p,) = [e.primitive for e in jaxpr_of(shard, jnp.ones(2)).eqns]

    def here():
        with jexc.take_current_trace() as trace:
            return trace

    def stay(trace, *tracers, **params):
        if trace.parent_trace is seen[-1]:
            seen.append("asked")
            tracers = map(trace.instantiate_const, tracers)
        return trace.default_process_primitive(jax.lax.cos_p, tracers, params)

    def spy(primitive):
        bind = primitive.bind

        def spying(*args, **params):
            if "asked" in seen and hasattr(here(), "instantiate_const"):
                assert here().to_jaxpr_tracer(args[0]).is_known()
                seen.append(primitive)
            return bind(*args, **params)

        monkeypatch.setattr(primitive, "bind", spying)

    def linearize(rule, is_vjp, nonzeros, *primals, **params):
        seen.append(here())
        return rule(is_vjp, nonzeros, *primals, **params)

    table = private.primitive_linearizations
    monkeypatch.setitem(table, prims.scan_p, ft.partial(linearize, table[prims.scan_p]))
    monkeypatch.setitem(pe.custom_partial_eval_rules, jax.lax.cos_p, stay)
    for primitive in (prims.custom_jvp_call_p, shard_map_p):
        spy(primitive)

    def loop(x, y):
        def body(c, _):
            return c * jnp.cos(jnp.sin(y)) * custom(y) * shard(y), None

        return jax.lax.scan(body, x, length=2)[0].sum()

    jaxpr = jaxpr_of(jax.grad(loop), jnp.ones(2), jnp.ones(2))
    outside = [e.primitive for e in jaxpr.eqns]
    assert jax.lax.sin_p in outside and jax.lax.cos_p not in outside
    assert seen[1:] == ["asked", prims.custom_jvp_call_p, shard_map_p]


@assumed(
    "A `concatenate` has its axis as `dimension`; a `slice` has `start_indices`, "
    "`limit_indices` and `strides`, `None` for steps of 1; a `dynamic_slice` has "
    "`slice_sizes`, and of its operands those after the first say where it begins, as "
    "literals if they are numbers; a `split` has `sizes` and an `axis`.",
    "_modules/origins.py",
)
def test_concatenations():
    x = jnp.ones(3)
    (whole,) = jaxpr_of(lambda a, b: jax.lax.concatenate([a, b], 0), x, x).eqns
    assert whole.primitive is jax.lax.concatenate_p and whole.params["dimension"] == 0
    (part,) = jaxpr_of(lambda a: jax.lax.slice(a, (1,), (3,)), x).eqns
    assert part.primitive is jax.lax.slice_p
    assert part.params["start_indices"] == (1,)
    assert part.params["limit_indices"] == (3,) and part.params["strides"] is None
    (part,) = jaxpr_of(lambda a: jax.lax.slice(a, (0,), (3,), (2,)), x).eqns
    assert part.params["strides"] == (2,)
    *_, part = jaxpr_of(lambda a: jax.lax.dynamic_slice(a, (1,), (2,)), x).eqns
    assert part.primitive is jax.lax.dynamic_slice_p
    assert part.params["slice_sizes"] == (2,) and part.invars[1].val == 1
    (parts,) = jaxpr_of(lambda a: jax.lax.split(a, (1, 2), 0), x).eqns
    assert parts.primitive is jax.lax.split_p
    assert tuple(parts.params["sizes"]) == (1, 2) and parts.params["axis"] == 0


@assumed(
    "A `squeeze` has the `dimensions` that go. A `gather` has `slice_sizes`, and its "
    "`dimension_numbers` say along which axes it begins at its second operand, and "
    "which axes go.",
    "_modules/origins.py",
)
def test_entries_of_an_array():
    x = jnp.ones((1, 3))
    (out,) = jaxpr_of(lambda a: jax.lax.squeeze(a, (0,)), x).eqns
    assert out.primitive is jax.lax.squeeze_p and out.params["dimensions"] == (0,)
    gather = equation("gather", lambda a: a[:, jnp.array([1])], x)
    numbers = gather.params["dimension_numbers"]
    assert numbers.start_index_map == (1,) and numbers.collapsed_slice_dims == (1,)
    assert gather.params["slice_sizes"] == (1, 1)


@assumed(
    "A `transpose` has its `permutation`, and a `broadcast_in_dim` its "
    "`broadcast_dimensions`.",
    "_modules/origins.py",
    "_walk/numbering.py",
)
def test_transpositions():
    (eqn,) = jaxpr_of(lambda x: jax.lax.transpose(x, (1, 0)), jnp.ones((2, 3))).eqns
    assert eqn.primitive is jax.lax.transpose_p
    assert tuple(eqn.params["permutation"]) == (1, 0)
    wider = lambda x: jax.lax.broadcast_in_dim(x, (3, 2), (1,))
    (eqn,) = jaxpr_of(wider, jnp.ones(2)).eqns
    assert eqn.primitive is jax.lax.broadcast_in_dim_p
    assert eqn.params["broadcast_dimensions"] == (1,)


@assumed(
    "A `checkpoint` that was differentiated says so, and one that was not, does not.",
    "_walk/repetitions.py",
)
def test_differentiated_checkpoint():
    fn = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))
    of = lambda fn: [
        e.params["differentiated"]
        for e in jaxpr_of(fn, 1.0).eqns
        if e.primitive is prims.remat_p
    ]
    assert of(fn) == [False] and of(jax.grad(fn)) == [True]


@assumed(
    "What a policy of a checkpoint keeps may go through a `reduce_precision` to all "
    "bits.",
    "_walk/numbering.py",
)
def test_what_a_policy_keeps():
    policy = jax.checkpoint_policies.dots_saveable
    fn = jax.checkpoint(lambda x: jnp.tanh(jnp.ones((2, 2)) @ x).sum(), policy=policy)
    every = equations(jaxpr_of(jax.grad(fn), jnp.ones(2)))
    (kept,) = [e for e in every if e.primitive is jax.lax.reduce_precision_p]
    assert kept.params["exponent_bits"] == jnp.finfo(jnp.float32).nexp
    assert kept.params["mantissa_bits"] == jnp.finfo(jnp.float32).nmant


@assumed(
    "`pe.dce_jaxpr` returns a jaxpr without what is not used, and which inputs are.",
    "_values/transform.py",
)
def test_dead_code():
    jaxpr = opened(jax.make_jaxpr(lambda x, y: (jnp.sin(x), y + 1))(1.0, 2.0))
    new, used, *_ = pe.dce_jaxpr(jaxpr, [True, False])
    assert used == [True, False] and len(new.eqns) == 1


@assumed(
    "`jax._src.interpreters.ad.fallback_linearize_rule` is how a primitive without a "
    "rule for that is linearized: by its rule for tangents. A checkpoint is one. Rules "
    "are told whether the tangents will be transposed.",
    "_compat.py",
    "_walk/jax_rules.py",
)
def test_linearization_of_checkpoint(monkeypatch):
    from jax._src.interpreters import ad as private

    # As it is without eqx_sow, which adds the rule.
    rule = ft.partial(private.fallback_linearize_rule, prims.remat_p)
    told = []

    def linearize(is_vjp, nonzeros, *primals, **params):
        told.append(is_vjp)
        return rule(is_vjp, nonzeros, *primals, **params)

    f = jax.checkpoint(jnp.sin)
    want = jax.grad(jnp.sin)(1.0)
    monkeypatch.setitem(private.primitive_linearizations, prims.remat_p, linearize)
    assert jax.grad(f)(1.0) == want
    assert jax.linearize(f, 1.0)[1](1.0) == want
    assert told == [True, False]


@assumed(
    "The rule for scan in `pe.partial_eval_jaxpr_custom_rules`, which checkpoint uses, "
    "is called with (saveable, unknown, instantiated, equation), and returns as first "
    "of five a call of what it moves out of the scan, and then the scan.",
    "_walk/jax_rules.py",
)
def test_checkpoint_of_scan(monkeypatch):
    spy = Spy(monkeypatch, pe.partial_eval_jaxpr_custom_rules, prims.scan_p)
    policy = jax.checkpoint_policies.dots_saveable
    jax.grad(jax.checkpoint(loop_with_a_constant, policy=policy))(1.0)
    ((_, unknown, instantiated, eqn), kwargs), *_ = spy.calls
    assert not kwargs and eqn.primitive is prims.scan_p
    assert len(unknown) == len(instantiated) == len(eqn.invars)
    known, *rest = spy.results[0]
    assert len(rest) == 4 and known.primitive is prims.closed_call_p
    check_hoisted(opened(known.params["call_jaxpr"]))


@assumed(
    "A rule in `pe.partial_eval_jaxpr_custom_rules` returns the equation that is run, "
    "the one that is run again, which outputs of these are unknown, which are made "
    "again, and the residuals; either equation can be `None`.",
    "_mark/primitive.py",
    "_handlers/tapping.py",
)
def test_checkpoint_rules():
    mark_p, again_p = marker(), toy("again")
    again_p.multiple_results = True
    again_p.def_impl(lambda x: [x])
    again_p.def_abstract_eval(lambda x: [x])
    ad.primitive_jvps[again_p] = lambda xs, ts: (again_p.bind(*xs), ts)

    def rule(saveable, unknown, instantiated, eqn):
        assert callable(saveable) and not any(unknown)
        again = eqn.replace(primitive=again_p, effects=frozenset())
        missing = [x for x, i in zip(eqn.invars, instantiated) if not i]
        return eqn, again, [False], [True], missing

    pe.partial_eval_jaxpr_custom_rules[mark_p] = rule
    fn = jax.checkpoint(lambda x: jnp.sin(mark_p.bind(jnp.sin(x))[0]))
    jaxpr = jaxpr_of(jax.grad(fn), 1.0)
    (remat,) = [e for e in jaxpr.eqns if e.primitive is prims.remat_p]
    inside = [e.primitive for e in equations(remat.params["jaxpr"])]
    assert again_p in inside and mark_p not in inside
    assert [e.primitive for e in jaxpr.eqns].count(mark_p) == 1

    pe.partial_eval_jaxpr_custom_rules[mark_p] = lambda saveable, unknown, _, eqn: (
        *(eqn, None),
        *([False], [False], []),
    )
    unused = jax.checkpoint(lambda x: (mark_p.bind(jnp.sin(x)), jnp.cos(x))[1])
    jaxpr = jaxpr_of(jax.grad(unused), 1.0)
    assert [e.primitive for e in equations(jaxpr)].count(mark_p) == 1


@assumed(
    "The rule for scan in `pe.custom_partial_eval_rules` is called with a trace, which "
    "has a list `effect_handles`, its tracers, and the parameters.",
    "_walk/jax_rules.py",
)
def test_partial_evaluation_of_scan(monkeypatch):
    spy = Spy(monkeypatch, pe.custom_partial_eval_rules, prims.scan_p)
    jax.linearize(with_jvp(loop_with_a_constant), 1.0)
    ((trace, *tracers), params), *_ = spy.calls
    assert isinstance(trace.effect_handles, list) and "jaxpr" in params
    assert len(tracers) == len(params["jaxpr"].in_avals)


@assumed(
    "`mlir.lower_fun` makes a lowering of a function, and `mlir.register_lowering` "
    "takes one for a platform, which is not cached if `cacheable=False`.",
    "_handlers/tapping.py",
    "_mark/primitive.py",
)
def test_lowering():
    toy_p = toy("toy")
    lowering = mlir.lower_fun(lambda x: 2 * x, multiple_results=False)
    mlir.register_lowering(toy_p, lowering)
    mlir.register_lowering(toy_p, lowering, platform="tpu", cacheable=False)
    assert jax.jit(toy_p.bind)(2.0) == 4


# --- where an equation comes from ---


@assumed(
    "Transposition leaves an object on the name stack of an equation, whose type is "
    "not that of a scope; no other transformation does.",
    "_compat.py",
    "_walk/table.py",
    "_walk/repetitions.py",
)
def test_name_stacks():
    def fn(x):
        with jax.named_scope("transpose"):
            return jnp.sin(scan(jnp.cos)(x))

    linear = lambda x: jax.linear_transpose(lambda x: 2.0 * x, x)(x)
    mark = jaxpr_of(linear, 1.0).eqns[-1].source_info.name_stack.stack[0]

    def is_marked(eqn):
        stack = eqn.source_info.name_stack.stack
        return any(type(x) is type(mark) and x == mark for x in stack)

    def marked(fn):
        return list(map(is_marked, jaxpr_of(fn, jnp.ones(())).eqns))

    assert not any(marked(fn))
    assert not any(marked(lambda x: jax.jvp(fn, (x,), (x,))))
    assert not any(marked(lambda x: jax.vmap(fn)(x[None])))
    backward = marked(jax.grad(fn))
    assert not backward[0] and backward[-1]
    scans = [
        is_marked(e)
        for e in jaxpr_of(jax.grad(fn), 1.0).eqns
        if e.primitive is prims.scan_p
    ]
    assert scans == [False, True]


@assumed(
    "`eqn.source_info.traceback` is equal for equations of one call, differs for two "
    "calls in one line, and is kept by differentiation.",
    "_walk/repetitions.py",
)
def test_tracebacks():
    def inner(x):
        return jnp.sin(x)

    def fn(x):
        return inner(x) + inner(2 * x)

    def tracebacks(program):
        eqns = jaxpr_of(program, 1.0).eqns
        return [e.source_info.traceback for e in eqns if e.primitive.name == "sin"]

    closed = jax.make_jaxpr(fn)(1.0)
    first, second = [
        e.source_info.traceback for e in closed.eqns if e.primitive.name == "sin"
    ]
    assert first is not None
    assert first != second
    evaluated = jexc.jaxpr_as_fun(closed)
    assert tracebacks(evaluated) == [first, second]
    assert tracebacks(jax.grad(lambda x: evaluated(x)[0])) == [first, second]


@assumed(
    "What JAX and Equinox put between a function and its caller are frames of their "
    "own files.",
    "_frames.py",
)
def test_frames():
    ours = [Path(x.__file__).parent for x in (jax, eqx)]
    seen = []

    def fn(x):
        frame = sys._getframe(1)
        while (file := frame.f_code.co_filename) != __file__:
            seen.append(Path(file))
            frame = frame.f_back
        return x

    for wrap in (
        jax.named_scope("a"),
        jax.jit,
        jax.vmap,
        jax.checkpoint,
        eqx.filter_jit,
    ):
        jax.make_jaxpr(wrap(fn))(jnp.ones(2))
    eqx.nn.Sequential([eqx.nn.Lambda(fn)])(jnp.ones(2))
    assert len(seen) > 5
    assert all(any(f.is_relative_to(p) for p in ours) for f in seen)


# --- functions and modules ---


@assumed(
    "What `jax.jit` and `eqx.filter_jit` return has a type of its own, and a "
    "`__wrapped__`; so has what `jax.vmap` and `jax.grad` return, which close over it.",
    "_compat.py",
    "_modules/places.py",
)
def test_functions_of_functions():
    fn = lambda x: x
    assert type(jax.jit(fn)) is not types.FunctionType and jax.jit(fn).__wrapped__ is fn
    assert isinstance(eqx.filter_jit(fn), type(eqx.filter_jit(jnp.sin)))
    assert eqx.filter_jit(fn).__wrapped__ is fn

    def reached(f):
        yield f
        for cell in getattr(f, "__closure__", None) or ():
            yield from reached(cell.cell_contents)

    for transform in (jax.vmap, jax.grad, jax.checkpoint, jax.jacrev):
        out = transform(fn)
        assert type(out) is types.FunctionType and hasattr(out, "__wrapped__")
        assert any(f is fn for f in reached(out))


@assumed(
    "A function with a derivative rule is an object of a class of JAX's, whose "
    "`__dict__` has the functions.",
    "_modules/places.py",
)
def test_objects_of_jax():
    fn = lambda x: x
    for custom in (with_jvp, with_vjp, with_vmap):
        made = custom(fn)
        assert type(made).__module__.startswith("jax.")
        assert fn in vars(made).values()


@assumed(
    "Equinox's transformed functions are modules, with the function in a field "
    "`_fun`, `fun`, `fn`, `func`, `__wrapped__` or `_fun_value_and_grad`; their types "
    "have a property `__wrapped__`, save those of `eqx.filter_jacrev` and `eqx."
    "Partial`.",
    "_mark/trees.py",
)
def test_wrappers_of_equinox():
    inside = {"__wrapped__", "_fn", "fn", "func", "_fun", "fun", "_fun_value_and_grad"}
    fn = lambda x: x
    wrappers = {
        t.__name__: t(fn)
        for t in (eqx.filter_grad, eqx.filter_value_and_grad, eqx.filter_vmap)
        + (eqx.filter_checkpoint, eqx.filter_custom_vjp, eqx.filter_custom_jvp)
        + (eqx.filter_jacrev, eqx.filter_jacfwd, eqx.filter_hessian, eqx.Partial)
    }
    for name, made in wrappers.items():
        if not isinstance(made, eqx.Module):
            assert "custom" in name, name
            continue
        fields = {f.name for f in dc.fields(made)}
        assert fields & inside, name
        if name not in ("filter_jacrev", "filter_jacfwd", "filter_hessian", "Partial"):
            assert isinstance(type(made).__wrapped__, property), name
    jac = type(wrappers["filter_jacrev"])
    assert isinstance(wrappers["filter_hessian"], jac)
    assert wrappers["filter_jacfwd"].fun is fn


@assumed(
    "A method of a module is a module with `__self__` and `__func__`.",
    "_mark/trees.py",
)
def test_methods_of_modules():
    class Model(eqx.Module):
        def method(self):
            return self

    model = Model()
    assert isinstance(model.method, eqx.Module)
    assert isinstance(model.method.__self__, Model) and model.method.__func__


@assumed(
    "`eqxi.filter_primitive_def` gives what the primitive of `noinline` is bound with: "
    "an index, a function of the function's arrays and arguments, transforms of which "
    "the first stands for calling it, and all it is called with.",
    "_compat.py",
)
def test_noinline():
    def fn(x, *, y):
        return jnp.sin(x) * y

    seen = []
    bound = jax.vmap(lambda x: eqxi.noinline(fn)(x, y=2.0))
    eqn = jaxpr_of(bound, jnp.ones(3)).eqns[-1]
    assert {"static", "treedef"} <= eqn.params.keys()
    look = eqxi.filter_primitive_def(lambda *args: seen.append(args))
    params = {**eqn.params, "flatten": lambda _: None}
    look(*(v.aval for v in eqn.invars), **params)
    ((_, function, transforms, ((arrays, args, kwargs))),) = seen
    assert len(transforms) == 2 and not jax.tree.leaves(arrays)
    called = lambda all: function(all[0], *all[1], **all[2])
    out = transforms[1](called)((arrays, (jnp.ones(3),), kwargs))
    assert jnp.array_equal(out, jnp.sin(jnp.ones(3)) * 2)


@assumed(
    "Under a vmap, a primitive that `eqxi.create_vprim` made is in the parameter "
    "`prim` of one called vprim, and its parameters are pairs in `params`.",
    "_compat.py",
    "_walk/sows.py",
)
def test_vprim():
    inside = jax.make_jaxpr(jnp.sin)(1.0)
    toy_p = eqxi.create_vprim(
        "toy",
        lambda x, jaxpr: [x],
        lambda x, jaxpr: [x],
        lambda xs, ts, jaxpr: (xs, ts),
        lambda cts, x, jaxpr: cts,
    )
    fn = jax.vmap(lambda x: toy_p.bind(x, jaxpr=inside)[0])
    (eqn,) = jaxpr_of(fn, jnp.ones(2)).eqns
    assert eqn.primitive.name == "vprim"
    assert eqn.params["prim"] is toy_p
    assert dict(eqn.params["params"]) == {"jaxpr": inside}


# --- running ---


@assumed(
    "The text of the error of a program whose callback failed has that of the "
    "callback's exception.",
    "_transforms/tap.py",
)
def test_failing_callbacks():
    def callback():
        raise ValueError("this is the text")

    with pytest.raises(jax.errors.JaxRuntimeError, match="this is the text"):
        jax.jit(lambda x: (jax.debug.callback(callback), x)[1])(1.0).block_until_ready()
        jax.effects_barrier()


# --- what is computed once more ---


@assumed(
    "`stop_gradient` of a traced value is a primitive of that name; and a `cond` whose "
    "index is batched becomes `select_n`, of the index with the axes of the value "
    "behind its own.",
    "_walk/numbering.py",
)
def test_what_a_batched_cond_selects_by():
    (eqn,) = jaxpr_of(jax.lax.stop_gradient, 1.0).eqns
    assert eqn.primitive.name == "stop_gradient"
    choose = lambda p, x: jax.lax.cond(p, jnp.sin, jnp.cos, x)
    batched = jax.vmap(choose, in_axes=(0, None))
    jaxpr = jaxpr_of(batched, jnp.array([True, False]), jnp.ones(3))
    select = [e for e in jaxpr.eqns if e.primitive is jax.lax.select_n_p][-1]
    makers = {v: e for e in jaxpr.eqns for v in e.outvars}
    index = makers[select.invars[0]]
    assert index.primitive is jax.lax.broadcast_in_dim_p
    assert index.params["broadcast_dimensions"] == (0,)


# --- the next release ---

if hasattr(hijax, "HiPrim"):

    class Square(hijax.HiPrim):
        def __init__(self, aval, jaxpr):
            self.in_avals, self.out_aval = (aval,), aval
            self.params = {"jaxpr": jaxpr}
            super().__init__()

        def expand(self, x):
            return x * x

    @assumed(
        "A `HiPrim` is the parameter `_prim` of its equation; `in_tree`, `params` and "
        "`effects` are attributes, and `expand` is the program.",
        "_compat.py",
        "_walk/sows.py",
        "_walk/jax_rules.py",
        "_walk/rules.py",
    )
    def test_hi_primitives():
        inside = jax.make_jaxpr(jnp.sin)(1.0)
        fn = lambda x: Square(jax.typeof(x), inside)(x)
        (eqn,) = jaxpr_of(fn, 3.0).eqns
        prim = eqn.params["_prim"]
        assert prim.params == {"jaxpr": inside}
        assert prim.effects == frozenset()
        assert prim.expand(*jax.tree.unflatten(prim.in_tree, [3.0])) == 9
