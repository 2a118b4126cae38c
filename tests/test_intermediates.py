"""`Intermediates`: a dict whose names stay in order."""

import copy
import io
import pickle

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from eqx_sow import Append, Intermediates, plant, save_intermediates as S, sow

from .helpers import assert_close
from .tables import under


pytestmark = pytest.mark.sample(1)


X = jnp.array([0.3, -1.2, 0.7])
# Twelve, so that sorted as strings the order would be another.
NAMES = [f"h{i}" for i in (2, 10, 1, 0, 3, 11, 4, 5, 9, 6, 8, 7)]


def _chain(x):
    for name in NAMES:
        x = sow(jnp.sin(x), name)
    return x


def _by_hand(x):
    values = {}
    for name in NAMES:
        x = values[name] = jnp.sin(x)
    return values


def _check(got, values):
    assert type(got) is Intermediates
    assert list(got) == NAMES
    for name, value in values.items():
        assert_close(got[name]["primal"], value)


def _scanned(x):
    return lax.scan(lambda c, x: (c, S(_chain)(x)[1]), 0, x)[1]


@pytest.mark.parametrize(
    "run",
    [
        lambda x: S(_chain)(x)[1],
        lambda x: jax.jit(S(_chain))(x)[1],
        lambda x: S(jax.jit(_chain))(x)[1],
        lambda x: eqx.filter_jit(S(_chain))(x)[1],
        lambda x: S(eqx.filter_jit(_chain))(x)[1],
        lambda x: jax.tree.map(lambda y: y, S(_chain)(x)[1]),
        lambda x: jax.checkpoint(S(_chain))(x)[1],
        lambda x: lax.cond(True, S(_chain), S(_chain), x)[1],
        lambda x: jtu.tree_map(lambda y: y[0], _scanned(x[None])),
        lambda x: jtu.tree_map(lambda y: y[0], jax.vmap(S(_chain))(x[None])[1]),
        lambda x: jax.grad(
            lambda x: (lambda out, got: (out.sum(), got))(*S(_chain)(x)), has_aux=True
        )(x)[1],
    ],
)
def test_order_under_transformations(run):
    _check(run(X), _by_hand(X))


@pytest.mark.parametrize("shapes", [jax.eval_shape, eqx.filter_eval_shape])
def test_order_of_shapes(shapes):
    got = shapes(S(_chain), X)[1]
    assert type(got) is Intermediates and list(got) == NAMES


def test_order_of_modes():
    def f(x):
        go = lambda x: sow(jnp.sin(x), "h")
        return jnp.sum(lax.cond(x[0] > 0, go, lambda x: x, x))

    def both(x):
        return jax.jvp(S(jax.grad(f)), (x,), (x,))[0]

    for run in (S(jax.grad(f)), jax.jit(S(jax.grad(f))), both):
        (modes,) = run(X)[1].values()
        assert isinstance(modes, dict)
        assert list(modes) == ["primal", "cotangent", "count"]
    forward = lambda x: jax.jvp(jax.grad(f), (x,), (x,))
    for run in (S(forward), jax.jit(S(forward))):
        modes = list(run(X)[1]["h"])
        assert modes[0] == "primal" and modes[-1] == "count"
        assert modes.index("tangent") < modes.index("cotangent")


def test_the_cotangent_of_an_integer_is_printed_with_its_dtype():
    fn = lambda x: sow({"n": jnp.arange(3), "x": x}, "h")["x"].sum()
    _, got = S(jax.grad(fn))(jnp.ones(2))
    assert "'cotangent': {'n': float0[3], 'x': f32[2]}" in repr(got)


@pytest.mark.filterwarnings("ignore:.*found no mark")
def test_is_a_dict():
    got = S(lambda x: sow(x, "h") + sow({"a": x}, "g")["a"])(2.0 * X[0])[1]
    assert isinstance(got, dict)
    assert (
        repr(got) == str(got) == "{'h': {'primal': 0.6}, 'g': {'primal': {'a': 0.6}}}"
    )
    plain = {"h": {"primal": 1}}
    assert Intermediates(plain) == plain and plain == Intermediates(plain)
    assert Intermediates(plain) != {"h": {"primal": 2}}
    assert S(lambda x: x)(X)[1] == {}
    assert not Intermediates()
    assert type(dict(got)) is dict and list(dict(got)) == list(got)
    assert type(got.copy()) is Intermediates and list(got.copy()) == list(got)


def test_union():
    a = Intermediates({"z": {"primal": 1}, "a": {"primal": 2}})
    for union in (a | {"m": {}}, a | Intermediates({"m": {}})):
        assert type(union) is Intermediates and list(union) == ["z", "a", "m"]
    union = {"m": {}} | a
    assert type(union) is Intermediates and list(union) == ["m", "z", "a"]
    assert list(a) == ["z", "a"]
    with pytest.raises(TypeError):
        a | [("m", {})]


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies(again):
    got = again(S(_chain)(X)[1])
    _check(got, _by_hand(X))


def test_a_copy_is_another_dict():
    a = Intermediates({"z": {"primal": 1}})
    b = copy.copy(a)
    b["y"] = {}
    assert list(a) == ["z"]


def test_paths_are_those_of_a_dict():
    got = S(_chain)(X)[1]
    paths = [p for p, _ in jtu.tree_leaves_with_path(got)]
    keys = jtu.DictKey(NAMES[0]), jtu.DictKey("primal")
    assert paths[0] == keys
    assert [jtu.keystr(p) for p in paths] == [f"['{n}']['primal']" for n in NAMES]


def test_treedefs():
    first, second = S(_chain)(X)[1], jax.jit(S(_chain))(2 * X)[1]
    assert jtu.tree_structure(first) == jtu.tree_structure(second)
    assert hash(jtu.tree_structure(first)) == hash(jtu.tree_structure(second))
    other = Intermediates(sorted(first.items()))
    assert jtu.tree_structure(first) != jtu.tree_structure(other)
    total = jax.tree.map(jnp.add, first, second)
    _check(total, jax.tree.map(jnp.add, _by_hand(X), _by_hand(2 * X)))


def test_beside_a_plain_dict():
    got = S(_chain)(X)[1]
    plain = dict(got)
    with pytest.raises(ValueError):
        jax.tree.map(jnp.add, got, plain)
    _check(jax.tree.map(jnp.subtract, got, Intermediates(plain)), _zeros())
    assert type(jax.tree.map(jnp.add, dict(got), plain)) is dict


def _zeros():
    return jax.tree.map(jnp.zeros_like, _by_hand(X))


def test_no_compilation_for_a_second_call():
    traces = []

    @jax.jit
    def f(got):
        traces.append(None)
        return jax.tree.map(jnp.sum, got)

    f(S(_chain)(X)[1])
    f(jax.jit(S(_chain))(X)[1])
    assert len(traces) == 1


def test_tree_at_and_serialisation():
    got = S(_chain)(X)[1]
    new = eqx.tree_at(lambda i: i["h1"]["primal"], got, jnp.zeros(3))
    _check(new, _by_hand(X) | {"h1": jnp.zeros(3)})
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, got)
    file.seek(0)
    _check(eqx.tree_deserialise_leaves(file, jax.jit(S(_chain))(2 * X)[1]), _by_hand(X))


def test_partition():
    got = S(lambda x: sow((x, "text"), "h")[0])(X)[1]
    arrays, rest = eqx.partition(got, eqx.is_array)
    assert rest["h"]["primal"] == (None, "text")
    assert type(eqx.combine(arrays, rest)) is Intermediates


def test_can_be_planted():
    got = jax.jit(S(_chain))(X)[1]
    assert_close(plant(_chain, got)(X), _chain(X))


def test_append():
    f = lambda x: sow(sow(x, "h") * 2, "h")
    got = jax.jit(S(f, reduce=Append()))(X)[1]
    assert type(got["h"]["primal"]) is tuple


def test_a_name_that_is_not_there():
    got = S(_chain)(X)[1]
    with pytest.raises(KeyError, match=f"'{NAMES[0]}0' is not a name .*Did you mean"):
        got[f"{NAMES[0]}0"]
    assert "no" not in got and got.get("no") is None and got.pop("no", 1) == 1
    with pytest.raises(KeyError, match="none at all"):
        Intermediates()["h"]


def test_in_a_notebook():
    got = S(_chain)(X)[1]
    table = got._repr_html_()
    assert "<table>" in table
    at = [table.index(f">{name}<") for name in NAMES]
    assert at == sorted(at)
    assert "mean" in table
    # Only shapes, where there are no numbers.
    assert "mean" not in jax.eval_shape(S(_chain), X)[1]._repr_html_()
    deleted = S(_chain)(X)[1]
    deleted["h2"]["primal"].delete()
    assert "f32[3]" in deleted._repr_html_()
    assert Intermediates(h=1)._repr_html_() is None


@under("jit", "vmap", "grad", argument="transform")
def test_tracers_in_a_notebook(transform):
    def f(x):
        got = S(_chain)(x)[1]
        got["constant"] = {"primal": X}
        repr(got)
        shown.append(got._repr_html_())
        return jnp.sum(x)

    shown = []
    transform(f)(jnp.ones(3) if transform is not jax.vmap else jnp.ones((2, 3)))
    assert "h2" in shown[0] and "f32[" in shown[0]
