"""`summarize`, against NumPy in float64, and law 11."""

import functools as ft
import math
import re
import warnings

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from eqx_sow import (
    Append,
    Fold,
    Last,
    save_intermediates as S,
    sow,
    SowError,
    summarize,
    Summary,
    tabulate,
)
from jax.extend.core import Jaxpr, Literal
from jax.sharding import NamedSharding, PartitionSpec as P


FIELDS = ("size", "mean", "std", "rms", "min", "max", "zeros", "not_finite")
EDGES = (-1.0, -0.5, 0.0, 0.1, 2.0)


def _reference(*arrays):
    """Of all entries, by NumPy in float64."""
    entries = []
    for x in arrays:
        x = np.asarray(x)
        x = np.abs(x) if np.iscomplexobj(x) else x
        entries.append(x.astype(np.float64).ravel())
    x = np.concatenate(entries)
    finite = x[np.isfinite(x)]
    nan = np.nan
    return dict(
        size=x.size,
        mean=finite.mean() if finite.size else nan,
        std=finite.std() if finite.size else nan,
        rms=np.linalg.norm(finite) / finite.size**0.5 if finite.size else nan,
        min=finite.min() if finite.size else nan,
        max=finite.max() if finite.size else nan,
        zeros=np.sum(finite == 0),
        not_finite=x.size - finite.size,
        histogram=np.histogram(finite, EDGES)[0],
    )


def _check(summary, *arrays, rtol=1e-5, shape=()):
    assert type(summary) is Summary
    want = _reference(*arrays)
    largest = np.nan_to_num(max(abs(want["min"]), abs(want["max"])))
    for field in FIELDS:
        got = getattr(summary, field)
        assert got.shape == shape, field
        assert got.dtype in (jnp.float32, jnp.float64), field
        # A mean near zero has the rounding of what it is the mean of.
        atol = rtol * largest if field == "mean" else 0
        np.testing.assert_allclose(got, want[field], rtol, atol, err_msg=field)
    if summary.edges is not None:
        np.testing.assert_array_equal(summary.histogram, want["histogram"])


def _normal(*shape, key=0):
    return jr.normal(jr.key(key), shape)


ARRAYS = {
    "scalar": lambda: jnp.float32(-3),
    "vector": lambda: _normal(7),
    "matrix": lambda: _normal(40, 33),
    "rows": lambda: _normal(3, 5000),
    "long": lambda: 0.1 + _normal(70_001),
    "prime": lambda: _normal(10_007),
    "thin": lambda: _normal(9001, 2),
    "constant": lambda: jnp.full(300_000, 0.1),
    "far from zero": lambda: 1e6 + _normal(100, 50),
    "zeros": lambda: jnp.zeros((3, 4)),
    "some zeros": lambda: _normal(50, 50).at[::3].set(0.0),
    "nan": lambda: _normal(50, 50).at[3].set(jnp.nan),
    "inf": lambda: _normal(6).at[1].set(jnp.inf).at[2].set(-jnp.inf),
    "one finite": lambda: jnp.array([jnp.nan, 2.0, jnp.inf]),
    "large": lambda: jnp.array([1e38, -3e38, 3e38, 2e37]),
    "small": lambda: 1e-30 * _normal(20),
    "large and small": lambda: jnp.array([1e30, 1e-30, 0.0]),
    "bfloat16": lambda: _normal(100, 70).astype(jnp.bfloat16),
    "float16": lambda: (3e4 * jnp.sign(_normal(100, 70))).astype(jnp.float16),
    "float8": lambda: _normal(10, 7).astype(jnp.float8_e4m3fn),
    "bool": lambda: _normal(10) > 0,
    "int8": lambda: jnp.arange(-100, 100, dtype=jnp.int8),
    "uint8": lambda: jnp.arange(200, dtype=jnp.uint8),
    "int32": lambda: jnp.array([-(2**31), 2**31 - 1, 5], jnp.int32),
    "complex": lambda: lax.complex(_normal(9), _normal(9, key=1)),
    "numpy": lambda: np.arange(5.0),
    "numpy int64": lambda: np.array([2**40, -5, 3]),
}


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", ARRAYS)
def test_against_numpy(name):
    x = ARRAYS[name]()
    fn = ft.partial(summarize, edges=EDGES)
    _check(fn(x), x)
    # JAX casts what NumPy has in 64 bits on the way into a jitted function.
    if not isinstance(x, np.ndarray):
        _check(jax.jit(fn)(x), x)


@pytest.mark.parametrize(
    "x", [jnp.zeros(0), jnp.zeros((0, 3)), jnp.full(4, jnp.nan), jnp.full(4, jnp.inf)]
)
def test_nothing_finite(x):
    _check(summarize(x, edges=EDGES), x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_no_copy_of_the_input(dtype):
    x = jax.ShapeDtypeStruct((1024, 1024), dtype)
    for fn in (summarize, ft.partial(summarize, edges=EDGES)):
        memory = jax.jit(fn).lower(x).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 0.1 * x.size


def test_x64():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=1000) + 1e9)
        _check(summarize(x), x, rtol=1e-12)
        assert summarize(x).mean.dtype == jnp.float64
        x = jnp.arange(2**40, 2**40 + 7)
        _check(summarize(x), x, rtol=1e-14)
        assert summarize(x.astype(jnp.float32)).mean.dtype == jnp.float32


def test_edges():
    # As in NumPy, where 0.1 in float32 is above 0.1 and 0.7 is below 0.7.
    x = jnp.array([0.1, 0.7, 0.3, 1.0, -1.0, 5.0])
    for edges in ([0.1, 0.3, 0.7, 1.0], np.linspace(-1, 5, 40), [-np.inf, 0.3, np.inf]):
        got = summarize(x, edges=edges)
        np.testing.assert_array_equal(got.histogram, np.histogram(x, edges)[0])
        assert got.edges == tuple(np.asarray(edges).tolist())
    assert summarize(x, edges=jnp.array([0.0, 1.0])).edges == (0.0, 1.0)
    assert summarize(x).edges is None and summarize(x).histogram is None


def test_edges_beyond_float32():
    x = _normal(100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = summarize(x, edges=[-1e300, 0.0, 1e300])
        largest = float(jnp.finfo(jnp.float32).max)
        summarize(x, edges=[0.0, largest])
    np.testing.assert_array_equal(got.histogram, [(x < 0).sum(), (x >= 0).sum()])


def test_wrong_edges():
    for edges in ([1.0], [], [1.0, 1.0], [2.0, 1.0], [[0.0, 1.0]], [0.0, np.nan]):
        with pytest.raises(ValueError, match="summarize.*increasing order"):
            summarize(jnp.ones(3), edges=edges)
    with pytest.raises(ValueError, match="summarize.*edges.*numpy.linspace.*traced"):
        jax.jit(lambda e: summarize(jnp.ones(3), edges=e))(jnp.arange(3.0))
    with pytest.raises(ValueError, match="Summary.empty.*increasing order"):
        Summary.empty(edges=[1.0])


def test_of_a_pytree():
    x = _normal(4)
    key = jr.key(0)
    value = {"a": (x, "text", 3.0), "b": [jnp.sin, key, None, x > 0]}
    got = summarize(value)
    a, text, number = got["a"]
    fn, key, nothing, flags = got["b"]
    assert text is number is fn is key is nothing is None
    _check(a, x)
    _check(flags, x > 0)
    assert summarize(np.zeros(3, jax.dtypes.float0)) is None
    linear = eqx.nn.Linear(2, 3, key=jr.key(1))
    _check(summarize(linear).weight, linear.weight)


def test_under_vmap():
    x = _normal(4, 3, 5)
    got = jax.vmap(jax.vmap(ft.partial(summarize, edges=EDGES)))(x)
    assert got.mean.shape == (4, 3) and got.histogram.shape == (4, 3, 4)
    for i in range(4):
        one = jtu.tree_map(lambda s: s[i], got)
        _check(jtu.tree_map(lambda s: s[1], one), x[i, 1])
        _check(one.merge(), x[i])
        _check(jtu.tree_map(lambda s: s[i], got.merge(axis=1)), x[i])
        _check(jtu.tree_map(lambda s: s[i], got.merge(axis=(-1,))), x[i])
    for axis in (None, (0, 1), (-1, 0)):
        _check(got.merge(axis), x)
    _check(jtu.tree_map(lambda s: s[2], got.merge(axis=0)), x[:, 2])
    _check(got.merge(()).merge(), x)
    for axis in (2, -3, (0, 2), (0, 0), (1, -1), True, (0, False)):
        with pytest.raises(ValueError, match="2 axes to merge.*\\(4, 3\\)"):
            got.merge(axis)


@pytest.mark.parametrize("offset", [0.0, 1e4, 1e30, 1e-30])
def test_adding(offset):
    parts = [
        (1 if offset < 1e20 else offset) * _normal(n, key=n) + offset
        for n in (1, 3, 100, 7)
    ]
    if offset == 1e-30:
        parts = [1e-30 * p for p in parts]
    parts += [jnp.array([jnp.nan]), jnp.zeros(0)]
    each = [summarize(p, edges=EDGES) for p in parts]
    a, b = each[2], each[3]
    # What the means differ by is rounded as they are.
    check = ft.partial(_check, rtol=1e-4 if offset == 1e4 else 1e-5)
    check(a + b, parts[2], parts[3])
    check(b + a, parts[2], parts[3])
    check(sum(each), *parts)
    check(sum(each, Summary.empty(edges=EDGES)), *parts)
    stacked = jtu.tree_map(lambda *x: jnp.stack(x), *each)
    check(stacked.merge(), *parts)


def test_means_further_apart_than_the_largest_number():
    rows = jnp.array([[3e38, 2.8e38], [-3e38, -3e38], [3e38, 2.9e38]], jnp.bfloat16)
    each = jax.vmap(summarize)(rows)
    _check(each.merge(), rows)
    first, second, _ = (jtu.tree_map(lambda x, i=i: x[i], each) for i in range(3))
    _check(first + second, rows[:2])
    # Those that are small are as exact beside them.
    small = summarize(jnp.array([1e-30, 3e-30]))
    _check(small + summarize(jnp.array([2e-30])), jnp.array([1e-30, 3e-30, 2e-30]))


@pytest.mark.parametrize("seed", range(8))
def test_merging_lanes_of_any_scale(seed):
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-36, 37, (5, 1) if seed % 2 else ())
    x = np.float32(scale * (rng.normal(size=(5, 8)) + 1e3 * (seed % 3 == 0)))
    got, exact = jax.vmap(summarize)(jnp.asarray(x)).merge(), np.float64(x)
    largest = np.abs(exact).max()
    for field, expected in (
        ("mean", exact.mean()),
        ("std", exact.std()),
        ("rms", np.sqrt((exact**2).mean())),
    ):
        assert abs(float(getattr(got, field)) - expected) < 3e-7 * largest


def test_nothing_added():
    x = _normal(5)
    empty = Summary.empty()
    _check(empty, jnp.zeros(0))
    _check(empty + summarize(x), x)
    _check(summarize(x) + empty, x)
    _check(empty + empty, jnp.zeros(0))
    # What stands for a value that did not run.
    zeros = jtu.tree_map(jnp.zeros_like, empty)
    _check(zeros + summarize(x + 5), x + 5)
    _check(summarize(x - 5) + zeros, x - 5)
    assert Summary.empty((2, 3), edges=EDGES).histogram.shape == (2, 3, 4)
    _check(Summary.empty((2, 3)).merge(), jnp.zeros(0))


def test_large_counts():
    # More than an int32 could hold.
    one = eqx.tree_at(lambda s: s.size, summarize(_normal(5)), jnp.float32(2**31))
    assert (one + one).size == 2.0**32
    assert jtu.tree_map(lambda x: jnp.stack([x] * 8), one).merge().size == 2.0**34


def test_what_cannot_be_added():
    x = jnp.ones(3)
    with pytest.raises(SowError, match="different edges, none and .*Summary.empty"):
        summarize(x) + summarize(x, edges=EDGES)
    with pytest.raises(SowError, match="leading axes, \\(\\) and \\(3,\\).*merge"):
        summarize(x) + jax.vmap(summarize)(x)
    with pytest.raises(TypeError):
        summarize(x) + 1
    with pytest.raises(TypeError):
        1 + summarize(x)


@pytest.mark.parametrize("field", ["mean", "std", "rms", "min", "max"])
@pytest.mark.parametrize("merge", [False, True])
def test_gradients(field, merge):
    x = _normal(6).at[2].set(jnp.nan)
    ok = jnp.isfinite(x)
    y = x[np.flatnonzero(ok)]
    plain = {
        "mean": jnp.mean,
        "std": jnp.std,
        "rms": lambda y: jnp.sqrt(jnp.mean(y**2)),
        "min": jnp.min,
        "max": jnp.max,
    }[field]

    def of_summary(x):
        s = summarize(x[:3]) + summarize(x[3:]) if merge else summarize(x)
        return getattr(s, field)

    got = jax.grad(of_summary)(x)
    np.testing.assert_allclose(got[ok], jax.grad(plain)(y), rtol=1e-5, atol=1e-6)
    assert got[2] == 0
    tangent = jax.jvp(of_summary, (x,), (jnp.where(ok, jnp.cos(x), 0),))[1]
    want = jax.jvp(plain, (y,), (jnp.cos(y),))[1]
    np.testing.assert_allclose(tangent, want, rtol=1e-5)


@pytest.mark.parametrize("x", [jnp.zeros(3), jnp.ones(3), jnp.full(3, jnp.nan)])
def test_gradients_where_there_is_none(x):
    total = lambda s: sum(jnp.nan_to_num(getattr(s, f)) for f in ("std", "rms"))
    assert jnp.all(jnp.isfinite(jax.grad(lambda x: total(summarize(x)))(x)))
    both = lambda x: total(summarize(x) + summarize(2 * x))
    assert jnp.all(jnp.isfinite(jax.grad(both)(x)))


def test_a_loss_is_not_disturbed():
    """Outputs of a scan that are not used have cotangents of zero."""

    def f(x):
        layer = lambda x, _: (sow(jnp.tanh(x), "h"), None)
        return lax.scan(jax.checkpoint(layer), x, None, length=3)[0]

    def loss(x):
        out, got = S(f, transform=summarize)(x)
        return out.sum(), got

    for x in (jnp.zeros(4), _normal(4)):
        got, aux = jax.jit(jax.grad(loss, has_aux=True))(x)
        np.testing.assert_allclose(got, jax.grad(lambda x: f(x).sum())(x), rtol=1e-6)
        assert aux["h"]["primal"].mean.shape == (3,)


@pytest.mark.slow
def test_fold():
    x = _normal(8)

    def f(x):
        return lax.fori_loop(0, 20, lambda i, x: sow(jnp.sin(x) + i, "x"), x)

    def add(acc, x):
        return acc + summarize(x, edges=EDGES)

    total = Fold(Summary.empty(edges=EDGES), add)
    values = S(f)(x)[1]["x"]["primal"]
    _check(S(f, reduce=total)(x)[1]["x"]["primal"], values)
    _check(jax.jit(S(f, reduce=total))(x)[1]["x"]["primal"], values)
    lanes = S(jax.vmap(f), reduce=total)(jnp.stack([x, 2 * x]))[1]["x"]["primal"]
    _check(jtu.tree_map(lambda s: s[0], lanes), values)


SPECS = [P("d"), P(None, "d"), P("d", None, "e"), P(("d", "e")), P()]


@pytest.mark.sample(6)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("type_", ["Auto", "Explicit"])
@pytest.mark.parametrize("shape", [(16, 8, 64), (16, 2000, 4)])
def test_sharded(spec, type_, shape):
    types = (getattr(jax.sharding.AxisType, type_),) * 2
    mesh = jax.make_mesh((4, 2), ("d", "e"), axis_types=types)
    x = _normal(*shape)
    xs = jax.device_put(x, NamedSharding(mesh, spec))
    fn = jax.jit(ft.partial(summarize, edges=EDGES))
    got = fn(xs)
    _check(got, x)
    assert all(s.sharding.is_fully_replicated for s in jtu.tree_leaves(got))
    # Partial results go from one device to another, not the entries.
    text = fn.lower(xs).compile().as_text()
    gathered = re.findall(r"\[([\d,]+)\]\S* all-gather\(", text)
    assert all(math.prod(map(int, g.split(","))) < x.size / 8 for g in gathered)


@pytest.mark.slow
def test_a_long_sharded_vector():
    mesh = jax.make_mesh((8,), ("d",))
    for n in (8 * 5000, 8 * 4999):
        x = _normal(n)
        _check(summarize(jax.device_put(x, NamedSharding(mesh, P("d")))), x)


@pytest.mark.slow
def test_in_shard_map():
    mesh = jax.make_mesh((8,), ("d",))
    x = _normal(16, 3)
    xs = jax.device_put(x, NamedSharding(mesh, P("d")))
    f = jax.shard_map(
        lambda x: sow(jnp.sin(x), "h"), mesh=mesh, in_specs=P("d"), out_specs=P("d")
    )
    got = jax.jit(S(f, transform=summarize))(xs)[1]["h"]["primal"]
    assert got.mean.shape == (8,)
    _check(got.merge(), jnp.sin(x))


def test_does_not_run_eagerly(call):
    x = _normal(5)
    f = lambda x: sow(jnp.sin(x), "h")
    _check(call(S(f, transform=summarize), x)[1]["h"]["primal"], jnp.sin(x))


def test_a_dict_for_a_logger():
    def loss(x):
        return sow(jnp.sin(x), "layers/3").sum()

    got = S(jax.grad(loss), transform=summarize)(_normal(3))[1]
    flat = {
        jtu.keystr(path, simple=True, separator="."): x
        for path, x in jtu.tree_leaves_with_path(got)
    }
    assert flat["layers/3.cotangent.rms"] == 1
    assert set(flat) == {
        f"layers/3.{m}.{f}" for m in ("primal", "cotangent") for f in FIELDS
    }


# Law 11.


def _mlp(x):
    for i in range(3):
        x = sow(jnp.tanh(x @ W + i), f"h{i}")
    return sow({"a": jnp.sum(x), "b": (x > 0, x.astype(jnp.bfloat16))}, "tree")["a"]


W = 0.5 * jr.normal(jr.key(5), (4, 4))
X = jr.normal(jr.key(6), (6, 4))


def _scan(x):
    body = lambda x, w: (sow(jnp.tanh(x @ w), "h"), sow(x[..., 0], "first"))
    return lax.scan(jax.checkpoint(body), x, jnp.stack([W, 2 * W, -W]))[0].sum()


def _conditions(x):
    def body(x, i):
        x = lax.cond(i % 2 == 1, lambda x: sow(x + 5, "odd"), lambda x: x - 1, x)
        x = lax.while_loop(
            lambda x: jnp.sum(x) < 40, lambda x: sow(x + 1, "while"), sow(x, "before")
        )
        return x, None

    return lax.scan(body, x, jnp.arange(4))[0].sum()


def _nan(x):
    x = sow(x, "z")
    x = sow(jnp.where(x > 0.5, jnp.nan, x), "m")
    return jnp.sum(sow(x / 0, "a"))


def _mesh(x):
    mesh = jax.make_mesh((2,), ("d",))
    x = jax.device_put(x, NamedSharding(mesh, P("d")))
    f = lambda x: sow(jnp.sin(x), "h")
    return jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(x)


def _lanes(x):
    return jax.vmap(lambda x: lax.cond(x[0] > 0, _scan, jnp.sum, x))(x)


PROGRAMS = {
    "mlp": _mlp,
    "grad of mlp": jax.grad(_mlp),
    "scan": _scan,
    "grad of scan": jax.grad(_scan),
    "vmap of scan": jax.vmap(_scan),
    "vmap of grad": jax.vmap(jax.grad(_mlp)),
    "grad of vmap": jax.grad(lambda x: jnp.sum(jax.vmap(_scan)(x))),
    "conditions": _conditions,
    "vmap of conditions": jax.vmap(_conditions),
    "scan in lanes of a branch": _lanes,
    "nan": _nan,
    "shard_map": _mesh,
    "jvp": lambda x: jax.jvp(_scan, (x,), (x,)),
}


def _table(text):
    """The cells of each row, without the shapes."""
    # A row that has no statistics has no summary.
    lines = [line for line in text.splitlines() if "float0" not in line]
    columns = [lines[0].index(c) for c in ("mode", "shape")]
    end = lines[0].index("shape") + max(
        len(line[columns[1] :].split("  ")[0].rstrip()) for line in lines[2:]
    )
    del lines[1]
    return [(line[: columns[1]].split(), line[end:].split()) for line in lines]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(
    "jit", [pytest.param(False, marks=pytest.mark.slow), True], ids=["eager", "jit"]
)
def test_law_11(name, jit):
    f = PROGRAMS[name]
    run = eqx.filter_jit if jit else lambda f: f
    values = tabulate(run(S(f))(X)[1])
    summaries = tabulate(run(S(f, transform=summarize))(X)[1])
    assert _table(values) == _table(summaries)
    assert "entries" in summaries and "entries" not in values


@pytest.mark.slow
@pytest.mark.parametrize("reduce", [Append(), Last()])
def test_law_11_with_reducers(reduce):
    def f(x):
        for i in range(3):
            x = lax.cond(x[0, 0] > i, lambda x: sow(x - 1, "h"), lambda x: x, x)
        return x

    for x in (X.at[0, 0].set(1.5), X.at[0, 0].set(5.0)):
        values = tabulate(S(f, reduce=reduce)(x)[1])
        summaries = tabulate(S(f, reduce=reduce, transform=summarize)(x)[1])
        assert _table(values) == _table(summaries)


def test_law_11_of_keys():
    f = lambda x: sow((x, jr.key(0)), "h")[0]
    values = tabulate(S(f)(X)[1]).splitlines()
    summaries = tabulate(S(f, transform=summarize)(X)[1]).splitlines()
    # There is nothing to say of a key, and no row for it.
    assert len(values) == 4 and len(summaries) == 3
    assert "h[1]" in values[3] and values[2].split()[0] == summaries[2].split()[0]


def test_values_and_summaries_together():
    got = S(_mlp, transform={"h*": summarize})(X)[1]
    text = tabulate(got)
    assert "24 entries" in text and "f32[]" in text
    shapes = tabulate(jax.eval_shape(S(_mlp, transform=summarize), X)[1])
    assert "summary" in shapes and "mean" not in shapes


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for param in eqn.params.values():
            inside = getattr(param, "jaxpr", param)
            if isinstance(inside, Jaxpr):
                yield from _equations(inside)


def test_reductions_begin_with_numbers():
    # In a branch that some lanes take, what is computed is one of each lane, also what
    # is the same for all; and JAX has no rule for a reduction that begins with that.
    closed = jax.make_jaxpr(lambda x: summarize(x, edges=(0.0, 1.0)))(jnp.ones(9))
    reductions = [
        e
        for e in _equations(getattr(closed, "jaxpr", closed))
        if e.primitive.name == "reduce"
    ]
    assert reductions
    for eqn in reductions:
        n = len(eqn.outvars)
        assert all(isinstance(x, Literal) for x in eqn.invars[n:])
