"""On a JAX that is newer than all that were tested, small programs are tried first."""

import contextlib
import importlib
import inspect
import types
from concurrent.futures import ThreadPoolExecutor

import equinox as eqx
import eqx_sow
import jax
import jax.numpy as jnp
import pytest
from eqx_sow import _compat, _hijax, Last, save_intermediates as S, scope, sow, SowError
from eqx_sow._mark.listening import listening
from eqx_sow._mark.primitive import sow_p
from eqx_sow._transforms import canaries, trace
from eqx_sow._walk import interpreter, jax_rules
from eqx_sow._walk.sows import variables
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import primitives as prims
from jax.interpreters import batching, partial_eval as pe

from tests.helpers import next_release, tree_allclose


pytestmark = pytest.mark.sample(1)


# What JAX binds one day, and can be asked to bind now.
_NEXT = _hijax.hi_p


@pytest.fixture
def untested(monkeypatch):
    monkeypatch.setattr(_compat, "NEWEST_TESTED", "0.1")
    monkeypatch.setattr(canaries, "_found", [])


def _saved():
    return S(lambda x: sow(jnp.sin(x), "h"))(1.0)[1]


def test_versions(monkeypatch):
    for version, want in {
        "0.10.2": False,
        "0.12.0.1": False,
        "0.12.1": True,
        "0.13.0.dev20270101": True,
        "1.0": True,
    }.items():
        monkeypatch.setattr(jax, "__version__", version)
        assert _compat.is_untested() is want


def test_nothing_happens_on_a_tested_version(monkeypatch):
    assert not _compat.is_untested()
    monkeypatch.setattr(canaries, "check", lambda: 1 / 0)
    assert set(_saved()) == {"h"}


def test_once_in_a_process(untested, monkeypatch):
    runs = []
    found = canaries.found
    monkeypatch.setattr(canaries, "found", lambda *a: runs.append(a) or found(*a))
    assert set(_saved()) == {"h"}
    assert len(runs) == len(canaries.CANARIES)
    eqx_sow.plant(lambda x: sow(x, "h"), {"h": jnp.ones(())})(jnp.zeros(()))
    assert len(runs) == len(canaries.CANARIES)


@pytest.mark.parametrize(
    "contexts",
    [
        (lambda: jax.numpy_dtype_promotion("standard"), lambda: jax.enable_x64(True)),
        (lambda: jax.set_mesh(jax.make_mesh((1,), ("x",))), jax.checking_leaks),
        (jax.disable_jit, lambda: jax.transfer_guard("disallow_explicit")),
    ],
)
def test_inside_of_other_transformations(untested, contexts):
    x = jnp.ones(2)
    fn = jax.vmap(S(jax.grad(lambda x: sow(jnp.sin(x), "h"))))
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        jax.eval_shape(jax.jit(fn), x)
    assert canaries._found == [[]]


@pytest.mark.slow
def test_what_the_user_set_for_the_process(untested):
    options = {
        "jax_transfer_guard": "disallow_explicit",
        "jax_enable_x64": True,
        "jax_disable_jit": True,
        "jax_debug_nans": True,
        "jax_default_matmul_precision": "highest",
    }
    before = {name: getattr(jax.config, name) for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        canaries.check()
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_two_threads_that_capture_first(untested):
    with ThreadPoolExecutor(2) as threads:
        results = [threads.submit(_saved) for _ in range(2)]
        assert [set(x.result()) for x in results] == [{"h"}, {"h"}]
    assert canaries._found == [[]]


@pytest.mark.parametrize("again", [False, True])
def test_the_message(untested, monkeypatch, again):
    monkeypatch.setattr(trace, "check_wrapped", lambda: None)
    _break_a_table(monkeypatch, *jax_rules._wrapped[-1])
    for _ in range(1 + again):
        with pytest.raises(SowError) as caught:
            _saved()
    message = str(caught.value)
    assert f"tested up to JAX 0.1, and JAX {jax.__version__} behaves" in message
    assert "'error' is missing, and must be raised f32[3]" in message
    assert "Install a newer eqx_sow, or JAX 0.1." in message


def _break_a_table(monkeypatch, table, primitive, chosen):
    monkeypatch.setitem(table, primitive, chosen.__wrapped__)


def _break_bind(monkeypatch, primitive, bind):
    monkeypatch.setattr(primitive, "bind", bind)


def _binds():
    """The functions that were put before the `bind` of primitives."""
    if _NEXT is not None:
        yield pytest.param(_NEXT, jax_rules._bind_hi, id=f"{_NEXT}-bind")
    for primitive in filter(None, interpreter.rules):
        bind = primitive.bind
        while "bind" in (inside := inspect.getclosurevars(bind).nonlocals):
            bind = inside["bind"]
            yield pytest.param(primitive, bind, id=f"{primitive}-{bind.__qualname__}")


def _first_difference(monkeypatch, primitive=None):
    monkeypatch.setattr(trace, "check_wrapped", lambda: None)
    jax.clear_caches()
    with next_release() if primitive is _NEXT else contextlib.nullcontext():
        return next(canaries.differences(), None)


def _all_differences(monkeypatch):
    monkeypatch.setattr(trace, "check_wrapped", lambda: None)
    jax.clear_caches()
    return list(canaries.differences())


@pytest.mark.parametrize("primitive", [None, _NEXT] if _NEXT else [None], ids=str)
def test_all_live(monkeypatch, primitive):
    assert _first_difference(monkeypatch, primitive) is None


@pytest.mark.slow
@pytest.mark.parametrize("i", range(len(jax_rules._wrapped)))
def test_a_canary_dies_without_each_rule(monkeypatch, i):
    table, primitive, chosen = jax_rules._wrapped[i]
    if table is _compat.fancy_transposes:
        pytest.skip("It is wrapped until JAX 0.10, which was tested")
    _break_a_table(monkeypatch, table, primitive, chosen)
    assert _first_difference(monkeypatch, primitive) is not None


def test_a_canary_dies_if_a_cond_without_marks_tells_nothing(monkeypatch):
    # Of the marks in a derivative rule, the rule for the cond sees none. If it says
    # nothing of the cond, all other canaries live.
    within = jax_rules._within

    def without(axis_data, *conds, **changes):
        conds = [cond for cond in conds if cond is not jax_rules._NO_COND]
        return within(axis_data, *conds, **changes)

    monkeypatch.setattr(jax_rules, "_within", without)
    name = "gradient of a cond under a vmap"
    assert _all_differences(monkeypatch) == [
        f"{name}: 'error' is missing, and must be raised f32[3]"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("primitive, bind", list(_binds()))
def test_a_canary_dies_without_each_bind(monkeypatch, primitive, bind):
    if primitive.call_primitive:
        pytest.skip("Until JAX 0.10, which binds no call with a sow inside, is dropped")
    _break_bind(monkeypatch, primitive, bind)
    assert _first_difference(monkeypatch, primitive) is not None


def test_a_canary_dies_if_a_composite_hides_its_marks(monkeypatch):
    # JAX's own rule says nothing of what happens inside.
    composite_p = _compat.composite_p
    plain = inspect.getclosurevars(composite_p.abstract_eval).nonlocals["plain"]
    monkeypatch.setattr(composite_p, "abstract_eval", composite_p.abstract_eval)
    composite_p.def_effectful_abstract_eval(lambda *a, **params: plain(*a, **params))
    said = _first_difference(monkeypatch)
    assert said is not None and "'composite' is" in said


@pytest.mark.slow
def test_a_canary_dies_if_sows_move_out_of_loops(monkeypatch):
    monkeypatch.delitem(pe.custom_partial_eval_rules, sow_p)
    assert _first_difference(monkeypatch) is not None


# --- changes of JAX that nobody would notice ---
#
# Each of these changes JAX so that the program beside it becomes wrong without an
# error: the order of its values, their axes, or which of them there are.


def _private(module, name):
    return _compat._in_jax(module, name)()


def _grad(fn):
    return jax.grad(lambda x: jnp.sum(fn(x)))


def _sin(x, name="h"):
    return sow(jnp.sin(x), name)


def _twice(step):
    return lambda x: lax.scan(lambda c, _: (step(c, x), None), x, length=2)[0]


def _pair(x):
    x, y = sow((jnp.sin(x), jnp.float32(2)), "pair")
    return x * y


def _product(x):
    return lax.scan(lambda c, k: (sow(c * k, "h"), None), x, jnp.array([2.0, 3.0]))[0]


def _reverse_product(x):
    step = lambda c, k: (sow(c * k, "h"), None)
    return lax.scan(step, x, jnp.array([2.0, 3.0]), reverse=True)[0]


def _cond(x):
    return lax.cond(x[0] > 0, _sin, lambda x: x, x)


def _lanes(fn):
    """Of which some take the branch, and run the loop longer."""
    return lambda x: jax.vmap(fn)(x - 0.5)


def _branch(x):
    return lax.cond(x > 0, _sin, lambda x: x, x)


def _until(x):
    return lax.while_loop(lambda x: x < 1, lambda x: sow(x + 1, "h"), x)


def _constant_in_loop(fn):
    def program(x):
        constant = lax.stop_gradient(x)
        return _twice(lambda c, _: c * fn(constant))(x)

    return program


def _with_jvp(x):
    fn = jax.custom_jvp(jnp.sin)
    fn.defjvp(lambda xs, ts: (fn(*xs), ts[0] * sow(jnp.cos(*xs), "jvp")))
    with scope("s"):
        return fn(x)


def _with_vjp(x):
    fn = jax.custom_vjp(jnp.sin)
    fn.defvjp(
        lambda x: (fn(x), sow(jnp.cos(x), "fwd")), lambda c, t: (sow(c * t, "bwd"),)
    )
    with scope("s"):
        return fn(x)


def _rule_with_loop(x):
    fn = jax.custom_jvp(jnp.sin)

    @fn.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents
        return fn(x), _twice(lambda t, _: t * _sin(lax.stop_gradient(x)))(t)

    return fn(x)


def _unused(fn):
    return lambda x: x * fn(lambda x: jnp.argmax(_sin(x)).astype("float32"))(x)


def _checkpointed_cond(fn):
    return jax.checkpoint(lambda x: lax.cond(x[0] > 0, fn, lambda x: 0.0, x))


def _rerun(x):
    loop = eqx.internal.while_loop
    body = lambda x: sow(2 * x, "h")
    return loop(lambda x: x[0] < 3, body, x, kind="checkpointed", checkpoints=1)


def _three(x):
    return sow(x + 1, "z") * sow(2 * x, "a") * sow(jnp.sin(x), "m")


def _flip_backward_scans(change):
    bind = prims.scan_p.bind

    def flipped(*args, **params):
        here = types.SimpleNamespace(source_info=source_info_util.current())
        if not (params["reverse"] and _compat.in_backward_pass(here)):
            return bind(*args, **params)
        n, m = _compat.scan_arity(params)
        turned = lambda xs: [lax.rev(x, (0,)) for x in xs]
        params = {**params, "reverse": False}
        outs = bind(*args[: n + m], *turned(args[n + m :]), **params)
        return [*outs[:m], *turned(outs[m:])]

    change.setattr(prims.scan_p, "bind", flipped)


def _flip_reverse_scans(change):
    def scan(*args, reverse=False, scan=lax.scan, **options):
        if not reverse:
            return scan(*args, **options)
        turned = lambda tree: jax.tree.map(lambda x: lax.rev(x, (0,)), tree)
        fn, init, xs = args
        carry, ys = scan(fn, init, turned(xs), **options)
        return carry, turned(ys)

    change.setattr(lax, "scan", scan)


def _hide_vjp_in_jaxprs(change):
    ad = _private("interpreters", "ad")
    linearize = ad.linearize_jaxpr
    change.setattr(
        ad,
        "linearize_jaxpr",
        lambda *args, **options: linearize(*args, **{**options, "is_vjp": False}),
    )


def _hide_vjp_in_scans(change):
    table = _compat.primitive_linearizations
    rule = table[prims.scan_p]
    hidden = lambda _, *args, **params: rule(False, *args, **params)
    change.setitem(table, prims.scan_p, hidden)


def _drop_tracebacks_and_names(change):
    # Either of them tells which loops are Equinox's.
    info = importlib.import_module(source_info_util.current.__module__)
    current = info.current
    change.setattr(info, "current", lambda: current().replace(traceback=None))

    @contextlib.contextmanager
    def unnamed(name):
        yield

    change.setattr(info, "extend_name_stack", unnamed)


def _leave_no_trace_of_transposition(change):
    info = importlib.import_module(source_info_util.current.__module__)
    name = info.transform_name_stack
    none = contextlib.nullcontext()
    unless = lambda x: none if x == "transpose" else name(x)
    change.setattr(info, "transform_name_stack", unless)


def _renew_axis_data(change):
    change.setattr(_compat, "with_around", lambda axis_data, around: axis_data)


def _forget_context(change):
    config = type(listening._obj)(
        "changed", None, include_in_jit_key=True, include_in_trace_context=False
    )
    change.setattr(listening, "_obj", config)


def _reorder(change):
    """Each jaxpr has the equations in an order in which what comes last, and can come
    first, does."""
    frame = _private("interpreters.partial_eval", "JaxprStackFrame")
    to_jaxpr = frame.to_jaxpr

    def reordered(*args):
        jaxpr, consts = to_jaxpr(*args)
        left, eqns = list(jaxpr.eqns), []
        while left:
            missing = {v for eqn in left for v in eqn.outvars}
            ready = [e for e in left if missing.isdisjoint(variables(e.invars))]
            eqns.append(ready[-1])
            left = [e for e in left if e is not ready[-1]]
        return jaxpr.replace(eqns=eqns), consts

    change.setattr(frame, "to_jaxpr", reordered)


def _drop_effects(change):
    kept = _private("effects", "partial_eval_kept_effects")
    change.setattr(kept, "_effect_types", set())


def _take_away(table, primitive):
    """JAX no longer asks for this rule."""

    def apply(change):
        for rules_, p, chosen in jax_rules._wrapped:
            if rules_ is table and p is primitive:
                change.setitem(table, primitive, chosen.__wrapped__)

    return apply


def _drop_partial_eval(change):
    change.delitem(pe.custom_partial_eval_rules, sow_p)


def _drop_bind(primitive):
    """JAX no longer calls the method that was put in its place."""

    def apply(change):
        change.delattr(primitive, "bind")

    return apply


_batchers = batching.fancy_primitive_batchers
_linearizations = _compat.primitive_linearizations
_jitted = jax.jit(_sin)
_OF_A_LOOP = _grad(_rerun), Last()

CHANGES = {
    "backward scans run over flipped arrays": (_flip_backward_scans, _grad(_product)),
    "reverse scans run over flipped arrays": (_flip_reverse_scans, _reverse_product),
    "pairs in a jit": (_hide_vjp_in_jaxprs, _grad(jax.jit(_pair))),
    "pairs in a cond": (
        _hide_vjp_in_jaxprs,
        _grad(lambda x: lax.cond(x[0] > 0, _pair, lambda x: x, x)),
    ),
    "pairs in a scan": (_hide_vjp_in_scans, _grad(_twice(lambda c, x: c * _pair(x)))),
    "pairs in a checkpoint": (
        _take_away(_linearizations, prims.remat_p),
        _grad(jax.checkpoint(_pair)),
    ),
    "no tracebacks, and no names": (_drop_tracebacks_and_names, *_OF_A_LOOP),
    "no transposition on name stacks": (
        _leave_no_trace_of_transposition,
        *_OF_A_LOOP,
    ),
    "axis data made anew in loops": (
        _renew_axis_data,
        _grad(jax.vmap(_twice(lambda c, x: _with_vjp(c)))),
    ),
    "no context in keys of traces": (
        _forget_context,
        lambda x: _jitted(x) + sow(x, "x"),
    ),
    "equations in another order": (_reorder, _three),
    "equations in another order, in a scan": (_reorder, _twice(lambda c, x: _three(c))),
    "effects do not keep equations": (_drop_effects, _grad(_unused(jax.checkpoint))),
    "vmap of a scan": (_take_away(_batchers, prims.scan_p), jax.vmap(_product)),
    "vmap of a while_loop": (_take_away(_batchers, prims.while_p), _lanes(_until)),
    "vmap of a cond": (_take_away(_batchers, prims.cond_p), _lanes(_branch)),
    "partial evaluation of a cond": (
        _take_away(pe.custom_partial_eval_rules, prims.cond_p),
        _grad(_unused(_checkpointed_cond)),
    ),
    "partial evaluation of a checkpoint": (
        _take_away(pe.custom_partial_eval_rules, prims.remat_p),
        _grad(_unused(jax.checkpoint)),
    ),
    "linearization of a scan": (
        _take_away(_linearizations, prims.scan_p),
        _grad(_constant_in_loop(_sin)),
    ),
    "partial evaluation of a scan": (
        _take_away(pe.custom_partial_eval_rules, prims.scan_p),
        _grad(_rule_with_loop),
    ),
    "checkpoint of a scan": (
        _take_away(pe.partial_eval_jaxpr_custom_rules, prims.scan_p),
        _grad(jax.checkpoint(_constant_in_loop(_sin))),
    ),
    "partial evaluation of a mark": (
        _drop_partial_eval,
        _grad(_constant_in_loop(_sin)),
    ),
    **{
        f"call of a {name}": (_drop_bind(p), _grad(_constant_in_loop(hold(_sin))))
        for name, p, hold in (
            ("cond", prims.cond_p, lambda fn: _cond),
            ("checkpoint", prims.remat_p, jax.checkpoint),
            ("jit", prims.jit_p, jax.jit),
            ("scan", prims.scan_p, lambda fn: _twice(lambda c, x: fn(x))),
        )
    },
    "call of a custom_jvp": (
        _drop_bind(prims.custom_jvp_call_p),
        _grad(jax.jit(_with_jvp)),
    ),
    "call of a custom_vjp": (_drop_bind(prims.custom_vjp_call_p), _grad(_with_vjp)),
}


@pytest.fixture
def changed(monkeypatch):
    monkeypatch.setattr(trace, "check_wrapped", lambda: None)
    monkeypatch.setattr(canaries, "_found", [])
    yield monkeypatch
    monkeypatch.undo()
    jax.clear_caches()


# The first ones, which are of no rule that is wrapped. All others are slow together,
# and a loop of Equinox takes seconds to compile.
_QUICK = [name for name in list(CHANGES)[:12] if CHANGES[name][1:] != _OF_A_LOOP]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow)
        for name in CHANGES
    ],
)
def test_a_change_that_nobody_would_notice(changed, name):
    apply, fn, *reduce = CHANGES[name]
    x = jnp.array([0.3, 0.7, 1.1])
    saved = lambda: jax.jit(S(fn, reduce=reduce[0] if reduce else None))(x)[1]
    want = saved()
    apply(changed)
    jax.clear_caches()
    jax.eval_shape(fn, x)  # without a capture
    got = saved()
    assert list(got) != list(want) or not tree_allclose(got, want)
    with pytest.raises(SowError, match="behaves differently"):
        canaries.check()
    if apply is _reorder:
        assert any("the order is" in said for said in canaries._found[0])
