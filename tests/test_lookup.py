"""`intermediates[name]` for what is no key: what `names=name` would have captured, or
an error that says why there is nothing."""

import copy
import pickle
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from eqx_sow import (
    Append,
    Intermediates,
    Last,
    plant,
    save_intermediates as S,
    sow,
    SowError,
    UnknownSowError,
)
from jax import lax

from .helpers import assert_close


X = jnp.array([0.3, -1.2, 0.7])
A = jnp.array([0.5, -2.0])
XS = jnp.stack([X, 2 * X])


class Block(eqx.Module):
    mlp: eqx.nn.Linear

    def __call__(self, x):
        return jnp.tanh(self.mlp(x))


def _block(key):
    return Block(eqx.nn.Linear(3, 3, key=key))


class Stack(eqx.Module):
    blocks: Block

    def __call__(self, x):
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        body = lambda x, one: (eqx.combine(one, static)(x), None)
        return lax.scan(body, x, arrays)[0]


class List(eqx.Module):
    blocks: list[Block]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


KEYS = jax.random.split(jax.random.key(0), 4)
STACK = Stack(eqx.filter_vmap(_block)(KEYS))
LIST = List([_block(key) for key in KEYS])


def _scanned(m, x):
    return lax.scan(lambda c, a: (c + m(a * x).sum(), None), 0.0, A)[0]


def _branches(m, x):
    return lax.cond(x[0] > 0, lambda x: m(x), lambda x: x, x).sum()


# With what a loop around and a vmap do to the axes, also outside of the call.
PROGRAMS = {
    "once": lambda m, x: m(x).sum(),
    "vmap": lambda m, x: jax.vmap(lambda a: m(a * x))(A).sum(),
    "scan": _scanned,
    "cond": _branches,
    "vmap of cond": lambda m, x: jax.vmap(lambda a: _branches(m, a * x))(A).sum(),
}
CALLS = {
    "plain": lambda fn, m: fn(m, X),
    "jit": lambda fn, m: eqx.filter_jit(fn)(m, X),
    "vmap outside": lambda fn, m: jax.vmap(lambda x: fn(m, x))(XS),
}


@pytest.mark.parametrize(
    "model, program, call",
    [
        (STACK, "once", "jit"),
        (STACK, "vmap", "plain"),
        (STACK, "scan", "plain"),
        (STACK, "cond", "vmap outside"),
        (STACK, "vmap of cond", "jit"),
        (LIST, "vmap of cond", "plain"),
    ],
)
def test_it_is_what_names_returns(model, program, call):
    fn, run = eqx.filter_grad(PROGRAMS[program]), CALLS[call]
    _, whole = run(S(fn, capture=True), model)
    for name in ("m/blocks/2/mlp", "blocks/-1"):
        _, alone = run(S(fn, capture=True, names=name), model)
        (wanted,) = dict(alone).values()
        got = whole[name]
        assert list(got) == list(wanted)
        assert_close(got, wanted)
        for mode in got if call != "vmap outside" else ():
            assert whole.axes(name, mode) == alone.axes(*alone, mode)


@pytest.mark.parametrize("model", [STACK, LIST])
def test_all_ways_to_look_up_agree(model):
    _, got = S(eqx.filter_grad(PROGRAMS["vmap"]), capture=True)(model, X)
    there = ("m", "blocks/2/mlp", "m/blocks/-1", "blocks/-4/mlp")
    others = ("blocks/4", "m/blocks/9/mlp", "blocks", "*", "", 0, None)
    for name in (*got, *there, *others):
        views = (got, got.primals, got.cotangents)
        is_there = name in got
        assert is_there or name not in there
        # Nothing is computed to know that.
        found = []
        jaxpr = jax.make_jaxpr(lambda i: found.extend(name in v for v in views))(got)
        assert not jaxpr.eqns and found == [is_there] * 3
        for view in views:
            assert (view.get(name, view) is not view) == is_there
        if is_there:
            for mode, view in zip(("primal", "cotangent"), views[1:]):
                assert_close(view[name], got[name][mode])
                assert_close(view.get(name), got.get(name)[mode])
        else:
            for view in views:
                with pytest.raises(UnknownSowError, match="is not a name here"):
                    view[name]
    # What changes the dict is about its own keys.
    assert got.pop("blocks/0", None) is None and list(got | {}) == list(got)


def test_a_view_of_a_mode_that_a_name_does_not_have():
    _, got = S(_grad)(X)
    assert "fixed" not in got.cotangents and got.cotangents.get("fixed") is None
    with pytest.raises(KeyError, match="'fixed' has no mode 'cotangent'.*one: 'h'"):
        got.cotangents["fixed"]


@pytest.mark.parametrize("name", ["h/1", "h/-1", "h/1/2", "h/-2/-1"])
def test_iterations_of_two_loops(name):
    def fn(x):
        inner = lambda c, y: (c, sow({"a": c * y, "kind": "static"}, "h")["a"])
        return lax.scan(lambda c, y: lax.scan(inner, c * y, X), x, A)[1].sum()

    _, whole = S(jax.grad(fn))(1.0)
    (wanted,) = S(jax.grad(fn), names=name)(1.0)[1].values()
    assert_close(whole[name], wanted)
    # The reference knows nothing of names.
    at = tuple(map(int, name.split("/")[1:]))
    hand = jnp.outer(jnp.cumprod(A), X)
    assert_close(whole["h"]["primal"]["a"], hand)
    assert_close(whole[name]["primal"], {"a": hand[at], "kind": "static"})


def test_iterations_with_append():
    def fn(x):
        x = lax.scan(lambda c, y: (sow(c * y, "h"), None), x, X)[0]
        x = lax.scan(lambda c, y: (sow(c + y, "h"), None), x, A)[0]
        return sow(x, "h")

    _, whole = S(jax.grad(fn), reduce=Append())(1.0)
    for name in ("h/1", "h/2", "h/-1"):
        (wanted,) = S(jax.grad(fn), names=name, reduce=Append())(1.0)[1].values()
        assert_close(whole[name], wanted)
    assert [len(whole[name]["primal"]) for name in ("h", "h/1", "h/2")] == [3, 2, 1]


def test_shapes_and_tracers():
    _, shapes = S(STACK, capture=True).eval_shape(X)
    assert shapes["blocks/2"]["primal"].shape == (3,)
    assert shapes["blocks/*"]["primal"].shape == (4, 3)
    _, whole = S(STACK, capture=True)(X)
    traced = jax.jit(lambda i: (i["blocks/-1"], i["blocks/*"]))(whole)
    for got, name in zip(traced, ("blocks/-1", "blocks/*")):
        assert_close(got, whole[name])


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies(again):
    _, whole = S(STACK, capture=True)(X)
    assert_close(again(whole)["blocks/2/mlp"], whole["blocks/2/mlp"])
    entry = again(whole["blocks/*"])
    assert type(entry) is dict
    assert_close(entry, whole["blocks/*"])


def test_an_entry_is_a_dict_and_a_pytree():
    _, got = S(lambda x: sow(x, "h"))(X)
    entry = got["h"]
    assert isinstance(entry, dict) and repr(entry) == repr({"primal": X})
    assert jax.tree.map(jnp.sin, entry).keys() == {"primal"}
    path, _ = jtu.tree_leaves_with_path(entry)[0]
    assert path == (jtu.DictKey("primal"),)
    # Its modes stay in order, and it still says what is not there.
    again = jax.jit(lambda e: e)(S(jax.grad(lambda x: sow(x, "h").sum()))(X)[1]["h"])
    assert list(again) == ["primal", "cotangent"]
    with pytest.raises(KeyError, match="'h' has no mode 'tangent'"):
        again["tangent"]
    # What is set there is set in the whole, whose form is that of plain dicts.
    got["h"]["twice"] = 2 * X
    assert_close(got["h"].pop("primal"), X)
    assert list(got["h"]) == list(dict(got)["h"]) == ["twice"]
    plain = Intermediates({"h": {"twice": X}})
    assert jtu.tree_structure(got) == jtu.tree_structure(plain)
    plain["h"] = got["h"]
    assert jtu.tree_structure(got) == jtu.tree_structure(plain)
    # It keeps no other value alive.
    assert not any(isinstance(x, Intermediates) for x in vars(entry).values())


# What is done with an array. The value is not the entry, but in it.
USES = [
    *(lambda e: e.shape, lambda e: e.T, lambda e: e.sum(), lambda e: e.reshape(3, 1)),
    *(lambda e: e + 1, lambda e: 2 * e, lambda e: X * e, lambda e: np.ones(3) - e),
    *(lambda e: e / X, lambda e: e @ X, lambda e: X @ e, lambda e: e**2, lambda e: -e),
    *(abs, lambda e: e > 0, lambda e: X < e, float, int, round, np.asarray),
    *(jnp.asarray, jnp.sum, jnp.sin, jnp.linalg.norm, jax.nn.relu),
    *(np.mean, np.sin, np.linalg.norm),
    lambda e: np.testing.assert_allclose(e, X),
]
INDICES = (0, slice(1), (slice(None), 0), ..., None, X, X > 0, np.arange(2))


@pytest.mark.parametrize("use", USES)
def test_an_entry_that_is_used_as_an_array(use):
    _, got = S(_grad)(X)
    says = (
        r"`intermediates\['h'\].*modes 'primal' and 'cotangent': write `.*\['primal'\]"
    )
    for entry in (got["h"], jax.tree.map(lambda x: x, got["h"])):
        with pytest.raises((TypeError, AttributeError), match=says):
            use(entry)


@pytest.mark.parametrize("index", INDICES, ids=repr)
def test_an_entry_that_is_indexed_as_an_array(index):
    _, got = S(_grad)(X)
    with pytest.raises(KeyError, match="no mode .*For a part of .*`\\['primal'\\]"):
        got["h"][index]


def test_an_attribute_that_is_a_mode():
    entry = S(_grad)(X)[1]["h"]
    for name, mode in (("cotangent", "cotangent"), ("grad", "cotangent")):
        says = (
            rf"`intermediates\['h'\].{name}`.*write `intermediates\['h'\]\['{mode}'\]`"
        )
        with pytest.raises(AttributeError, match=says):
            getattr(entry, name)
    assert not hasattr(entry, "shape") and "shape" not in dir(entry)


def _grad(x):
    loss = lambda x: sow(x * sow(X, "fixed"), "h").sum()
    return jax.grad(loss)(x)


@pytest.mark.parametrize(
    "fn, name, mode, says",
    [
        (_grad, "fixed", "cotangent", ("'primal'.", "does not depend", "one: 'h'")),
        (jnp.sin, "h", "cotangent", ("write `save_intermediates(eqx.filter_grad(",)),
        (jnp.sin, "h", "grad", ("called 'cotangent'. No value has one",)),
        (_grad, "h", "gradient", ("called 'cotangent'.",)),
        (_grad, "h", "value", ("called 'primal'.",)),
        (jnp.sin, "h", "tangent", ("`jax.jvp`",)),
        (_grad, "h", "count", ("under a condition",)),
        (_grad, "h", "primals", ("Did you mean 'primal'?",)),
        (_grad, "h", "rms", ("write `['primal']['rms']`",)),
        (_grad, "h", 0, ("write `['primal'][0]`",)),
    ],
)
def test_a_mode_that_is_not_there(fn, name, mode, says):
    fn = fn if fn is _grad else lambda x: jnp.sin(sow(x, "h"))
    _, got = eqx.filter_jit(S(fn))(X)
    with pytest.raises(KeyError, match=f"{name!r} has no mode {mode!r}") as info:
        got[name][mode]
    assert isinstance(info.value, UnknownSowError) and isinstance(info.value, SowError)
    for part in ("Its modes are: 'primal'", *says):
        assert part in str(info.value)
    assert got[name].get(mode) is None and mode not in got[name]


def test_a_mode_that_was_left_out():
    _, got = S(_grad, modes="primal")(X)
    with pytest.raises(KeyError, match="`modes=` selected 'primal' only"):
        got["h"]["cotangent"]


def _two(x):
    return lax.scan(lambda c, y: (sow(c * y, "h"), sow(y, "y")), x, X)[0]


@pytest.mark.parametrize(
    "options, name, says",
    [
        ({}, "h/3", "no such iteration of 'h': they are 'h/0' to 'h/2'"),
        ({}, "hh", "Did you mean 'h'"),
        ({}, "layers/0", "captured with `capture=True`"),
        ({}, "layers/0.inputs", "marked with `inputs=True`"),
        ({}, "layers/0.call", "marked with `calls=True`"),
        ({}, "z*", "The names there are: 'h', 'y'"),
        ({}, 0, r"`intermediates\[name\]\[mode\]`"),
        (dict(names="y"), "h", "`names=` or `modes=` left it out"),
        (dict(names="y"), "h/1", "`names=` or `modes=` left it out"),
        (dict(reduce=Last()), "h/1", "with `names='h/1'`"),
    ],
)
def test_a_name_that_is_not_there(options, name, says):
    _, got = S(_two, **options)(1.0)
    with pytest.raises(KeyError, match=says) as info:
        got[name]
    assert f"{name!r} is not a name here. The names there are: " in str(info.value)


# What is not layer 7 of 4, and what has a typo behind the index. No suggestion may be
# that of all layers.
@pytest.mark.parametrize(
    "name, says",
    [
        ("blocks/7", "'m/blocks/*': they are 'm/blocks/0' to 'm/blocks/3'."),
        ("blocks/-5/mlp", "they are 'm/blocks/0/mlp' to 'm/blocks/3/mlp'."),
        ("m/blocks/*/mlp/2", "they are 'm/blocks/0/mlp' to 'm/blocks/3/mlp'."),
        ("blocks/2/mpl", "Did you mean 'm/blocks/2/mlp' or 'm/blocks/2'?"),
        ("m/blocks/-1/mp", "Did you mean 'm/blocks/-1/mlp' or 'm/blocks/-1'?"),
        ("m/blocks/7/mpl", "The names there are: 'm/blocks/*/mlp', 'm/blocks/*', 'm'."),
    ],
)
def test_an_index_that_selects_no_layer_of_a_stack(name, says):
    fn = lambda m, x: m(x)
    _, got = S(fn, capture=True)(STACK, X)
    for ask in (
        lambda: got[name],
        lambda: S(fn, capture=True, names=name)(STACK, X),
        lambda: plant(fn, {name: jnp.zeros_like}, capture=True)(STACK, X),
    ):
        with pytest.raises(UnknownSowError) as info:
            ask()
        assert str(info.value).endswith(says)


@pytest.mark.parametrize("model", [STACK, LIST])
@pytest.mark.parametrize(
    "name, close",
    [
        ("blocks", "m/blocks/*"),
        ("m/block", "m/blocks/*"),
        ("blocks/mpl", "m/blocks/*/mlp"),
    ],
)
def test_what_is_close_to_a_name_without_an_index_is_all_layers(model, name, close):
    _, got = S(lambda m, x: m(x), capture=True)(model, X)
    says = re.escape(f"Did you mean {close!r}")
    with pytest.raises(KeyError, match=says) as info:
        got[name]
    assert not re.search(r"\d", str(info.value).split("Did you mean")[1])


@pytest.mark.parametrize(
    "name, close",
    [("hh/1", "'h/1'"), ("hh/1/-2", "'h/1/-2'"), ("hh", "'h'")],
)
def test_a_typo_before_the_indices_of_two_loops(name, close):
    inner = lambda x, i: lax.scan(lambda x, j: (sow(x + i, "h"), None), x, XS)
    fn = lambda x: lax.scan(lambda x, i: inner(x, i), x, jnp.arange(2.0))[0]
    with pytest.raises(UnknownSowError, match=rf"Did you mean {close}\?"):
        S(fn, names=name)(X)


@pytest.mark.filterwarnings("ignore:.*found no mark")
def test_capture_was_forgotten():
    _, got = S(LIST)(X)
    with pytest.raises(KeyError, match="none at all.*`capture=True`"):
        got["blocks/0"]


def test_what_was_computed_with_has_no_iterations():
    got = jax.tree.map(lambda x: x.sum(), S(_two)(1.0)[1])
    with pytest.raises(KeyError, match="you have computed with the values"):
        got["h/1"]


@pytest.mark.parametrize("jacobian", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("n", [2, 3])
def test_an_iteration_in_a_jacobian(jacobian, n):
    def f(x):
        return lax.scan(lambda c, y: (sow(c * y + x.sum(), "h"), None), 1.0, X)[0]

    x = jnp.arange(1.0, 1.0 + n)
    jac = jacobian(lambda x: S(f)(x)[1])(x)
    assert jac["h"]["primal"].shape == (3, n)
    if n == 2:
        (alone,) = jacobian(lambda x: S(f, names="h/1")(x)[1])(x).primals.values()
        assert_close(jac["h/1"]["primal"], alone)
        return
    # As many iterations as inputs: which of the two axes is which?
    assert "h/1" not in jac and jac.primals.get("h/1") is None
    with pytest.raises(KeyError, match="The axis of the loop in 'h' is not known"):
        jac["h/1"]


def test_names_in_messages_are_few():
    model = eqx.nn.MLP(3, 3, 4, 15, key=jax.random.key(0))
    _, got = S(lambda m, x: m(x), capture=eqx.nn.Linear)(model, X)
    for ask in (
        lambda: got["nothing"],
        lambda: S(model, capture=eqx.nn.Linear, names="nothing")(X),
        lambda: plant(model, {"nothing": X}, capture=eqx.nn.Linear)(X),
        lambda: S(model, capture=eqx.nn.Conv)(X),
    ):
        with pytest.raises(UnknownSowError, match=r"layers/\{0\.\.15\}") as info:
            ask()
        assert "layers/3" not in str(info.value)
    with pytest.raises(KeyError, match="'n0', .*'n11', and 18 more"):
        Intermediates({f"n{i}": {} for i in range(30)})["x"]


def test_entries_are_alike_whatever_made_them():
    eager = S(_grad)(X)[1]
    others = [jax.jit(S(_grad))(X)[1], jax.tree.map(jnp.copy, eager)]
    for other in [*others, copy.deepcopy(eager), pickle.loads(pickle.dumps(eager))]:
        for a, b in [(eager["h"], other["h"]), (dict(eager), dict(other))]:
            assert jtu.tree_structure(a) == jtu.tree_structure(b)
            assert_close(a, b)
        with pytest.raises(KeyError, match="'h' has no mode 'tangent'"):
            other["h"]["tangent"]


def test_what_is_compiled_for_one_order_of_axes_is_not_used_for_another():
    mark = lambda x, w: sow(jnp.sin(w * x), "h")
    loop = lambda fn: (
        lambda x: lax.scan(lambda x, w: (fn(x, w), None), x, jnp.arange(1.0, 5.0))
    )
    xs = jnp.arange(8.0).reshape(4, 2)
    within = loop(jax.vmap(mark, (0, None)))
    saved = [S(fn)(xs)[1] for fn in (jax.vmap(loop(mark)), within)]
    assert [x.axes("h") for x in saved] == [("vmap", "loop"), ("loop", "vmap")]
    look_up = jax.jit(lambda saved: saved["h/1"])
    for one in (*saved, *saved[::-1]):
        assert_close(look_up(one)["primal"], one["h/1"]["primal"])


# --- patterns of which some names lack a mode ---
def _one_without_cotangent(x):
    for i in range(3):
        x = x * sow(X if i == 1 else jnp.sin(x), f"b/{i}/h")
    return x.sum()


@pytest.mark.parametrize("how", ["eager", "jit", "shapes", "tree.map"])
def test_views_agree_where_not_all_have_a_mode(how):
    saved = S(jax.grad(_one_without_cotangent))
    if how == "shapes":
        got = saved.eval_shape(X)[1]
    else:
        got = (jax.jit(saved) if how == "jit" else saved)(X)[1]
    cotangents = got.cotangents
    if how == "tree.map":
        cotangents = jax.tree.map(lambda x: 2 * x, cotangents)
    for name in ("b/*/h", "b/[02]/h", "b/0/h", "b/1/h", "b/-1/h", "**", "none"):
        modes = got.get(name, {})
        assert (name in got.primals) == ("primal" in modes)
        assert (name in cotangents) == ("cotangent" in modes)
        if "cotangent" in modes:
            assert cotangents[name].shape == modes["cotangent"].shape
        else:
            said = "has no mode 'cotangent'. Its modes are: 'primal'"
            with pytest.raises(UnknownSowError, match=said if modes else "not a name"):
                cotangents[name]
    # What is taken out is not selected either.
    del got["b/1/h"]
    assert got.cotangents["b/*/h"].shape == got["b/*/h"]["cotangent"].shape == (2, 3)
