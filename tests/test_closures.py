"""`capture=` and models that functions close over, read from globals, or hold in
objects and in functions that were made of them."""

import contextlib
import dataclasses as dc
import functools as ft
import gc
import threading
import types
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_sow import Append, plant, save_intermediates as S, Sow, sow

from tests.helpers import assert_close, modes_of, with_mode
from tests.tables import under


X = jnp.array([0.3, -1.2, 0.7])


def _linear(seed=0):
    return eqx.nn.Linear(3, 3, key=jr.key(seed))


def _primals(fn, *args, **options):
    out, got = S(fn, **{"capture": True, **options})(*args)
    assert_close(out, fn(*args))
    return with_mode(got, "primal")


@contextlib.contextmanager
def _compilations():
    count = 0

    def listen(event, _, **kwargs):
        nonlocal count
        count += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield lambda: count
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


# --- Functions that call functions ---


ONE, TWO, THREE = map(_linear, range(3))


def _helper(x):
    return TWO(x)


def _even(x, n=3):
    return _odd(x, n - 1) if n else THREE(x)


def _odd(x, n):
    return _even(x, n - 1) if n else ONE(x)


@jax.jit
def _jitted_helper(x):
    return _helper(x)


@ft.lru_cache
def _cached(scale):
    return lambda x: scale * TWO(x)


def test_helpers_among_the_globals(call):
    fn = lambda x: ONE(x) + _helper(x)
    _, got = call(S(fn, capture=True), X)
    assert_close(with_mode(got, "primal"), {"ONE": ONE(X), "TWO": TWO(X)})
    fn = lambda x: ONE(x) + _jitted_helper(x)
    assert_close(_primals(fn, X), {"ONE": ONE(X), "TWO": TWO(X)})


def test_helpers_that_call_each_other():
    assert _primals(lambda x: _even(x) + _helper(x), X).keys() == {"ONE", "TWO"}
    assert_close(_primals(lambda x: _even(x, 2), X), {"THREE": THREE(X)})


def test_helpers_of_another_module(monkeypatch):
    other = types.ModuleType("other")
    exec(
        compile("def helper(x):\n    return net(x) * SCALE", "other.py", "exec"),
        vars(other),
    )
    other.net, other.SCALE = _linear(5), 2.0
    monkeypatch.setitem(globals(), "other", other)
    assert_close(_primals(lambda x: other.helper(x), X), {"net": other.net(X)})
    assert_close(_primals(lambda x: other.net(x), X), {"net": other.net(X)})
    assert type(other.net) is eqx.nn.Linear


class _WithMethods(eqx.Module):
    own: eqx.nn.Linear

    def __call__(self, x):
        return _helper(self.own(x))


def test_methods_of_modules_read_globals():
    model = _WithMethods(_linear(4))
    got = _primals(lambda m, x: m(x), model, X)
    assert list(got) == ["m/own", "TWO", "m"]


def _long_list(x):
    return ONE(x) * LONG[1]


LONG = list(map(float, range(100_000)))


def test_a_name_of_an_attribute_is_not_a_global():
    class Holder:
        ONE = staticmethod(lambda x: x)

    holder = Holder()
    assert_close(_primals(lambda x: TWO(holder.ONE(x)), X), {"TWO": TWO(X)})
    assert list(_primals(_long_list, X)) == ["ONE"]


# --- Functions that JAX and Python made ---


def _custom_jvp(net):
    fn = jax.custom_jvp(lambda x: net(x))
    fn.defjvp(lambda p, t: (net(p[0]), 2 * t[0]))
    return fn


def _custom_vjp(net):
    fn = jax.custom_vjp(lambda x: net(x))
    fn.defvjp(lambda x: (net(x), x), lambda x, ct: (2 * ct,))
    return fn


def _with_default(net):
    return lambda x, net=net: net(x)


def _with_keyword(net):
    return lambda x, *, net=net: net(x)


WRAPS = {
    "jit": lambda net: jax.jit(lambda x: net(x)),
    "jit static": lambda net: ft.partial(
        jax.jit(lambda n, x: n * net(x), static_argnums=0), 1
    ),
    "filter_jit": lambda net: eqx.filter_jit(lambda x: net(x)),
    "filter_jit model": eqx.filter_jit,
    "checkpoint": lambda net: jax.checkpoint(lambda x: net(x)),
    "custom_jvp": _custom_jvp,
    "custom_vjp": _custom_vjp,
    "jit custom_jvp": lambda net: jax.jit(_custom_jvp(net)),
    "partial": lambda net: ft.partial(lambda net, x: net(x), net),
    "partial keyword": lambda net: ft.partial(lambda x, net: net(x), net=net),
    "jit partial": lambda net: jax.jit(ft.partial(lambda net, x: net(x), net)),
    "default": _with_default,
    "keyword": _with_keyword,
    "list": lambda net: lambda x, nets=[net]: nets[0](x),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("beside", [False, True])
def test_models_inside_of_functions(wrap, beside, call):
    net, other = _linear(1), _linear(2)
    inner = WRAPS[wrap](net)
    fn = (lambda m, x: m(inner(x))) if beside else lambda m, x: inner(x)
    out, got = call(S(fn, capture=eqx.nn.Linear), other, X)
    y = other(net(X)) if beside else net(X)
    assert_close(out, y)
    (name,) = got.keys() - {"m"}
    assert_close(got[name], {"primal": net(X)})
    assert_close(got, {name: got[name], **({"m": {"primal": y}} if beside else {})})


@pytest.mark.parametrize("wrap", ["jit", "custom_jvp", "custom_vjp", "jit custom_jvp"])
def test_their_derivatives(wrap, call):
    net = _linear(1)
    inner = WRAPS[wrap](net)
    fn = jax.grad(lambda x: jnp.sum(inner(x) ** 2))
    grads, got = call(S(fn, capture=True), X)
    assert_close(grads, fn(X))
    assert_close(with_mode(got, "primal"), {"net": net(X)})
    rule = {"net": {"primal"} if "custom" in wrap else {"primal", "cotangent"}}
    assert modes_of(got) == rule


def test_a_model_that_only_a_rule_has():
    in_rule = _linear(2)

    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    f.defjvp(lambda p, t: (jnp.sin(*p), t[0] * in_rule(p[0])))
    _, got = S(jax.grad(lambda x: f(x).sum()), capture=True)(X)
    assert_close(got["in_rule"]["primal"], in_rule(X))


# --- What a function is, and what it writes, stays ---


def test_functions_are_keys(call):
    net = _linear()
    key = lambda x: net(x)
    table = {key: 2.0}
    out, got = call(S(lambda x: table[key] * key(x), capture=True), X)
    assert_close((out, got["net"]["primal"]), (2 * net(X), net(X)))


_calls = 0
_last = None


def _counts(x, fail=False):
    global _calls, _last
    _calls += 1
    _last = ONE
    assert _read_calls() == _calls
    if fail:
        raise KeyError
    return ONE(x)


def _read_calls():
    return _calls


def test_globals_are_written():
    before = _calls
    _, got = S(_counts, capture=True)(X)
    assert_close(got["ONE"]["primal"], ONE(X))
    assert _calls == before + 1
    with pytest.raises(KeyError):
        S(_counts, capture=True)(X, fail=True)
    assert _calls == before + 2
    assert type(_last) is eqx.nn.Linear


def test_cells_and_containers_are_written():
    nets, log, count = {"a": _linear(), "b": _linear(1)}, [], 0
    order = [nets["a"], nets["b"]]

    def fn(x):
        nonlocal count, nets
        count += 1
        nets["c"] = nets["a"]
        log.append(count)
        order.reverse()
        return nets["b"](x) + order[1](x)

    a, b = order
    _, got = S(fn, capture=True)(X)
    assert list(got) == ["nets/b", "nets/a"]
    assert count == 1 and log == [1] and set(nets) == {"a", "b", "c"}
    assert order[0] is b and order[1] is a
    assert nets["a"] is nets["c"] is a and nets["b"] is b


@pytest.mark.parametrize("fail", [False, True])
def test_everything_is_put_back(fail):
    net, nets, default = _linear(), [_linear(1)], _linear(2)
    part = ft.partial(lambda p, x: p(x), default)

    def fn(x, d=default, *, k=_linear(3)):
        if fail:
            raise RuntimeError
        return net(x) + nets[0](x) + k(x) + part(x) + ONE(x)

    inside = nets[0]
    cells = [c.cell_contents for c in fn.__closure__]
    one = ONE
    call = eqx.nn.Linear.__call__
    with pytest.raises(RuntimeError) if fail else contextlib.nullcontext():
        S(fn, capture=True, scope=True)(X)
    assert all(c.cell_contents is x for c, x in zip(fn.__closure__, cells))
    assert nets == [inside] and nets[0] is inside
    assert fn.__defaults__[0] is default
    assert part.args[0] is default and ONE is one
    assert eqx.nn.Linear.__call__ is call


def test_nested_captures_put_everything_back():
    net = _linear()
    inner = lambda x: net(x)

    def outer(x):
        y, inside = S(inner, capture=True, tag="inner")(x)
        assert list(inside) == ["net"]
        return net(y)

    _, got = S(outer, capture=True, reduce=Append())(X)
    assert_close(got["net"]["primal"], (net(X), net(net(X))))
    assert type(net) is eqx.nn.Linear


# --- Caches ---


INNER = eqx.filter_jit(lambda x: ONE(x) + _helper(x))
BODY = lambda c, _: (jnp.tanh(ONE(c)), None)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: INNER(x),
        lambda x: _jitted_helper(ONE(x)),
        lambda x: _jitted_helper(x) + jnp.linalg.norm(x),
        ft.partial(lambda net, x: _jitted_helper(net(x)), THREE),
    ],
)
def test_what_is_jitted_inside_is_compiled_once(fn):
    saved, x = S(fn, capture=True), X + 1
    saved(X), saved(X)
    with _compilations() as count:
        saved(x)
    assert count() == 0


def test_a_closure_made_anew_traces_nothing_again():
    traces = []

    @jax.jit
    def helper(x):
        traces.append(None)
        return jnp.sin(x)

    def run(net):
        return S(lambda x: helper(net(x)), capture=True)(X)

    for seed in range(3):
        net = _linear(seed)
        assert_close(run(net)[1]["net"]["primal"], net(X))
    assert len(traces) == 1


@pytest.mark.filterwarnings("ignore:.*found no mark")
@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("wrap", [w for w in WRAPS if w != "filter_jit model"])
def test_uses_do_not_change_each_other(wrap):
    """Whatever was done before with the same functions."""
    net = _linear(1)
    loss = lambda f: lambda x: jnp.sum(f(x) ** 2)
    uses = {
        "plain": lambda f: f(X),
        "S": lambda f: S(lambda x: f(x))(X),
        "S capture": lambda f: S(lambda x: f(x), capture=True)(X),
        "S scope": lambda f: S(lambda x: f(x), scope=True)(X),
        "S capture other": lambda f: S(
            lambda m, x: m(f(x)), capture=eqx.nn.Linear, tag="other"
        )(net, X),
        "S grad": lambda f: S(jax.grad(loss(f)), capture=True)(X),
        "grad S": lambda f: jax.grad(S(loss(f), capture=True), has_aux=True)(X),
        "jvp S": lambda f: jax.jvp(S(lambda x: f(x), capture=True), (X,), (X,)),
    }
    if "vjp" in wrap:
        del uses["jvp S"]
    alone = {name: use(WRAPS[wrap](net)) for name, use in uses.items()}
    for first in uses:
        f = WRAPS[wrap](net)
        uses[first](f)
        for name, use in uses.items():
            assert_close(use(f), alone[name])


@pytest.mark.filterwarnings("ignore:.*found no mark")
def test_nothing_is_kept():
    def run():
        net = _linear()
        inner = jax.jit(lambda x: jax.nn.softplus(net(x)))
        rule = _custom_jvp(net)
        fn = lambda x: jnp.sum(rule(inner(x)))
        options = {"capture": True, "reduce": Append()}
        S(fn, **options)(X)
        jax.grad(S(fn, **options), has_aux=True)(X)
        S(jax.grad(fn), scope=True)(X)
        return [weakref.ref(x) for x in (net, net.weight, fn, inner)]

    alive = run()
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4


@pytest.mark.parametrize("hold", ["list", "dict", "dict of lists", "tuple"])
def test_after_a_rule_that_reads_a_container(hold):
    """A jitted function in the rule is not left without marks for the next use."""
    nets = _linear(0), _linear(1)
    where = {"a": 0, "b": 1}
    held = {
        "list": list(nets),
        "dict": dict(zip("ab", nets)),
        "dict of lists": {k: [net] for k, net in zip("ab", nets)},
        "tuple": nets,
    }[hold]

    def net(k):
        found = held[k if isinstance(held, dict) else where[k]]
        return found[0] if isinstance(found, list) else found

    inner = jax.jit(lambda x: net("a")(x))
    f = jax.custom_jvp(lambda x: 2 * x)
    f.defjvp(lambda p, t: (2 * p[0], inner(t[0])))
    jax.grad(lambda x: S(lambda x: f(net("b")(x)).sum(), capture=True)(x)[0])(X)
    _, got = S(lambda x: inner(x) + net("b")(x), capture=True)(X)
    assert len(got) == 2
    for entry, one in zip(got.values(), nets):
        assert_close(entry, {"primal": one(X)})


_ruled = jax.jit(_custom_jvp(ONE))


@pytest.mark.slow
def test_a_rule_keeps_only_what_it_reads():
    def run():
        other = _linear()
        with_argument = lambda m, x: jnp.sum(_ruled(m(x)))
        with jax.checking_leaks():
            jax.grad(lambda x: S(with_argument, capture=True)(other, x)[0])(X)
        grad = jax.grad(with_argument, argnums=1)
        assert list(S(grad, capture=True)(other, X)[1]) == ["m", "net"]
        fn = lambda x: _ruled(other(x)).sum()
        jax.grad(S(fn, capture=True), has_aux=True)(X)
        return weakref.ref(other)

    alive = run()
    gc.collect()
    assert alive() is None


@under("jit", "vmap")
def test_no_tracer_is_kept(wrap):
    def fn(w):
        net = eqx.tree_at(lambda m: m.weight, ONE, w)
        inner = jax.jit(lambda x: net(x))
        return S(lambda x: inner(net(x)), capture=True, reduce=Append())(X)

    with jax.checking_leaks():
        wrap(fn)(jnp.ones((3, 3)) if wrap is jax.jit else jnp.ones((1, 3, 3)))


@pytest.mark.filterwarnings("ignore:.*found no mark")
def test_threads():
    nets = {i: _linear(i) for i in range(4)}
    fns = {i: (lambda x, i=i: nets[i](x) + ONE(x)) for i in nets}
    got, failed = {}, []

    def run(i):
        try:
            for _ in range(3):
                names = ["nets/0", "nets/1", "nets/2", "nets/3"]
                out, values = S(fns[i], capture=True)(X + i)
                assert list(values) == [names[i], "ONE"]
                assert S(fns[i])(X)[1] == {}
                got[i] = values[names[i]]["primal"]
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=run, args=(i,)) for i in nets]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failed
    assert_close(got, {i: nets[i](X + i) for i in nets})
    assert {type(m) for m in (*nets.values(), ONE)} == {eqx.nn.Linear}


# --- The halves of a model ---


@pytest.mark.filterwarnings("ignore:.*found no mark")
@under("jit", "filter_jit", "eager", argument="jit")
def test_a_static_half_that_a_jitted_function_closes_over(jit, call):
    mlp = eqx.nn.MLP(3, 2, 4, 1, key=jr.key(0))
    params, static = eqx.partition(mlp, eqx.is_array)

    @jit
    def step(params, x):
        return jnp.sum(eqx.combine(params, static)(x) ** 2)

    names = ["params/layers/0", "params/layers/1", "params"]
    h = mlp.layers[0](X)
    y = mlp.layers[1](jax.nn.relu(h))
    out, got = call(S(step, capture=True), params, X)
    assert_close(with_mode(got, "primal"), dict(zip(names, (h, y, y))))
    assert_close(out, step(params, X))
    assert S(step, scope=True)(params, X)[1] == {}
    planted = plant(step, {"params/layers/1": jnp.ones_like}, capture=True)
    assert_close(call(planted, params, X), jnp.array(2.0))
    for grad in (jax.grad, jax.value_and_grad):
        out, got = call(S(grad(step), capture=eqx.nn.Linear), params, X)
        assert_close(out, grad(step)(params, X))
        assert_close(got["params/layers/1"]["cotangent"], 2 * y)


# --- No capturing: no search ---


@jax.tree_util.register_pytree_node_class
class _Counted:
    looks = 0

    def tree_flatten(self):
        _Counted.looks += 1
        return (), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        del aux, children
        return cls()


COUNTED = _Counted()


def test_without_capture_nothing_is_looked_at():
    fn = lambda x: (COUNTED, sow(x, "h"))[1]
    for use in (S(fn), plant(fn, {"h": X})):
        _Counted.looks = 0
        use(X)
        assert _Counted.looks == 0
    S(lambda x: (COUNTED, ONE(x))[1], capture=True)(X)
    assert _Counted.looks > 0


SOWS = eqx.nn.Sequential([eqx.nn.Lambda(jnp.sin), Sow()])


def test_an_unnamed_sow_in_a_closure(call):
    runs = []

    def fn(x):
        runs.append(None)
        return SOWS(x)

    out, got = call(S(fn), X)
    assert_close(got, {"SOWS/layers/1": {"primal": jnp.sin(X)}})
    planted = plant(lambda x: SOWS(x), {"SOWS/layers/1": X})
    assert_close(planted(X), X)
    runs.clear()
    S(lambda x: sow(fn(x), "x"), names="x")(X)
    # Traced once more, with what was found.
    assert len(runs) == 2


def test_an_unnamed_sow_beside_a_jitted_one(call):
    jitted = jax.jit(lambda x: SOWS(x))
    model = eqx.nn.Sequential([Sow()])
    _, got = call(S(lambda m, x: jitted(m(x))), model, X)
    assert got.keys() == {"m/layers/0", "SOWS/layers/1"}


# --- Modules that cannot be seen ---


class _Plain:
    def __init__(self, net):
        self.net = net

    def __call__(self, x):
        return self.net(x)


@dc.dataclass
class _Data:
    net: eqx.nn.Linear

    def __call__(self, x):
        return self.net(x)


def _class_attribute(net):
    class Holder:
        inside = net

    return lambda x: Holder.inside(x)


HIDDEN = {
    "object": _Plain,
    "dataclass": _Data,
    "class attribute": _class_attribute,
    "method": lambda net: _Plain(net).__call__,
    "function in an object": lambda net: _Plain(jax.jit(lambda x: net(x))),
}


@pytest.mark.parametrize("hide", HIDDEN)
@pytest.mark.parametrize("capture", [True, eqx.nn.Linear, (eqx.nn.Linear, _Plain)])
def test_a_module_behind_something_else(hide, capture):
    hidden = HIDDEN[hide](net := _linear(1))
    fn = lambda m, x: m(hidden(x))
    expected = fn(_linear(), X)
    for _ in range(2):  # though JAX may have traced it
        out, got = S(fn, capture=capture)(_linear(), X)
        assert_close(out, expected)
        first, *_ = got
        assert first.startswith(("hidden", "net", "Holder/inside")) and "m" in got
        assert_close(got[first]["primal"], net(X))


class _Base(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return self.w * x


class _Child(_Base):
    def __call__(self, x):
        return super().__call__(x) + _Base.__call__(self, x)


def test_modules_of_all_kinds():
    child = _Child(X)
    _, got = S(lambda m, x: m(x), capture=_Base)(child, X)
    assert_close(got, {"m": {"primal": 2 * X * X}})
    # Made within the function, of another one's arrays, or without arrays of its own.
    made = lambda m, n, x: _Base(2 * n.w)(x) + m(x)
    assert list(S(made, capture=True)(child, child, X)[1]) == ["n/_Base", "m"]
    new = lambda m, x: eqx.nn.Linear(3, 3, key=jr.key(0))(m(x))
    assert list(S(new, capture=True)(child, X)[1]) == ["m", "Linear"]
    lambdas = _Plain(eqx.nn.Lambda(jnp.sin))
    found = S(lambda m, x: lambdas(m(x)), capture=True)(child, X)[1]
    assert list(found) == ["m", "lambdas/net"]
    # By a method that was taken before.
    layer = _linear()
    for wrap in (lambda f: f, jax.jit, eqx.filter_jit, jax.checkpoint):
        taken = wrap(layer.__call__)
        for capture in (True, eqx.nn.Linear, lambda path, m: True):
            _, got = S(lambda m, x: taken(m(x)), capture=capture)(_linear(), X)
            assert list(got) == ["m", "taken"]
    assert list(S(layer.__call__, capture=True)(X)[1]) == ["."]
    # Of another class.
    hidden = _Plain(_linear())
    assert list(S(lambda m, x: hidden(m(x)), capture=_Base)(child, X)[1]) == ["m"]


def test_a_static_half_in_an_object():
    params, static = eqx.partition(_linear(), eqx.is_array)
    hidden = _Plain(static)
    fn = lambda params, x: eqx.combine(params, hidden.net)(x)
    assert list(S(fn, capture=True)(params, X)[1]) == ["params"]


# --- Objects that hold a model or were made of one ---


class _Jitted(eqx.Module):
    linear: eqx.nn.Linear

    @eqx.filter_jit
    def by_equinox(self, x):
        return self.linear(x)

    @jax.jit
    def by_jax(self, x):
        return self.linear(x)

    def plain(self, x):
        return self.linear(x)


@pytest.mark.parametrize("method", ["plain", "by_jax", "by_equinox"])
def test_a_bound_method_has_the_paths_of_its_model(method):
    bound = getattr(_Jitted(_linear()), method)
    assert list(_primals(bound, X, capture=eqx.nn.Linear)) == ["linear"]
    # It was bound before the capture, to whatever was in the class then.
    assert list(_primals(bound, X, capture=_Jitted, methods=method)) == [f".{method}"]
    name = f"model.{method}"
    got = _primals(
        lambda model, x: getattr(model, method)(x),
        _Jitted(_linear()),
        X,
        capture=_Jitted,
        methods=method,
    )
    assert list(got) == [name]


class _Holder:
    def __init__(self):
        self.model = ONE

    def run(self, x):
        return self.model(x)


def test_the_model_in_an_object_before_the_global_that_it_came_from():
    run = lambda holder, x: holder.run(x)
    assert list(_primals(run, _Holder(), X)) == ["holder/model"]


def test_a_jitted_layer_in_a_list_has_the_path_of_the_list():
    layers = [
        eqx.filter_jit(_linear(0)),
        eqx.filter_jit(eqx.nn.MLP(3, 3, 3, 1, key=jr.key(1))),
    ]
    got = _primals(lambda m, x: m[1](m[0](x)), layers, X)
    assert list(got) == ["m/0", "m/1/layers/0", "m/1/layers/1", "m/1"]


class _Nothing(eqx.Module):
    def __call__(self, x):
        return None


def test_a_layer_that_returns_none():
    _, got = S(lambda layer, x: layer(x), capture=_Nothing)(_Nothing(), X)
    assert got == {"layer": {"primal": None}}
