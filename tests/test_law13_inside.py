"""Law 13: what a program sees of its models under a capture is what it sees without."""

import copy
import functools as ft
import gc
import inspect

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from eqx_sow import plant, save_intermediates as S, tap

from tests.helpers import assert_close
from tests.meeting import Act, Layer, make_net, mapped, Net, Run, X

from .tables import pick


pytestmark = pytest.mark.sample(5)


GLOBAL = make_net(5)
STRUCTURE = jtu.tree_structure(GLOBAL)
REGISTRY = {Net: "net", Layer: "layer", Act: "act"}
PARTS = ("layers/0", "act", "layers/1", "")


@ft.singledispatch
def _kind(module):
    return "unknown"


_kind.register(Layer, lambda module: "layer")
_kind.register(Net, lambda module: "net")


def _values(net, prefix, x=X):
    """What the modules of a net return, by name."""
    seen = {}
    Run(lambda v, name, of: seen.setdefault(name, v))(net, x, prefix)
    return seen


# --- What is seen inside ---


def _facts(net):
    modules = (net, *net.layers, net.act)
    structure = jtu.tree_structure(net)
    cast = mapped(lambda p: p.astype(jnp.bfloat16), net)
    return {
        "types": [type(m) for m in modules],
        "registry": [REGISTRY[type(m)] for m in modules],
        "dispatch": [_kind(m) for m in modules],
        "mro": [type(m).__mro__ for m in modules],
        "structure": (structure, hash(structure), structure == STRUCTURE),
        "paths": [path for path, _ in jtu.tree_leaves_with_path(net)],
        "shapes": jtu.tree_map(lambda p: (p.shape, str(p.dtype)), net),
        "static": (net.act == Act(), hash(net.act) == hash(Act())),
        "with another": type(mapped(jnp.add, net, GLOBAL)),
        "copies": [type(copy.copy(m)) for m in (*modules, cast)],
        "attributes": [list(vars(m)) for m in modules],
        "class": [(list(vars(type(m))), type(m).__subclasses__()) for m in modules],
        "call": [_of_call(type(m).__call__) for m in modules],
        "bound": [_of_call(m.__call__) for m in modules],
        "with annotations": _of_call(eqx.nn.Lambda.__call__),
        "repr": repr(eqx.filter(net, lambda _: False)),
        "variables": [id(x) for x in (GLOBAL, GLOBAL.layers, *jtu.tree_leaves(GLOBAL))],
    }


def _of_call(call):
    return str(inspect.signature(call)), call.__name__, call.__qualname__, call.__doc__


class Watched(eqx.Module):
    net: Net
    seen: list = eqx.field(static=True)

    def __call__(self, x):
        self.seen.append(_facts(self.net))
        return self.net(x)


def _as_argument(seen):
    def fn(net, x):
        seen.append(_facts(net))
        return net(x)

    return fn, (make_net(0),)


def _in_a_closure(seen):
    net = make_net(0)

    def fn(x):
        seen.append([*_facts(net).items(), id(net), id(net.layers[0].w)])
        return net(x)

    # What it sees is compared between two calls of one function.
    return fn, ()


WATCHED = {
    "argument": _as_argument,
    "closure": _in_a_closure,
    "itself": lambda seen: (Watched(make_net(0), seen), ()),
    "method": lambda seen: (Watched(make_net(0), seen).__call__, ()),
}
WRAPS = {
    **pick("eager", "filter_jit"),
    "grad": lambda fn: eqx.filter_grad(lambda *args: jnp.sum(fn(*args) ** 2)),
    "vmap": lambda fn: (
        lambda *args: eqx.filter_vmap(lambda x: fn(*args[:-1], x))(
            jnp.stack([args[-1]] * 2)
        )
    ),
}
LISTENERS = {
    "capture": lambda fn: S(fn, capture=True),
    "a class": lambda fn: S(fn, capture=Layer),
    "a predicate": lambda fn: S(fn, capture=lambda path, m: type(m) is Layer),
    "scope": lambda fn: S(fn, capture=True, scope=True, inputs=True),
    "plant": lambda fn: plant(fn, {"**/layers/1": lambda h: 2 * h}, capture=True),
    "tap": lambda fn: tap(fn, lambda event: None, capture=True),
    "two": lambda fn: S(S(fn, capture=Layer, tag="a"), capture=True),
}


@pytest.mark.parametrize("listen", LISTENERS)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("where", WATCHED)
def test_what_is_seen_inside(where, wrap, listen):
    seen = []
    fn, args = WATCHED[where](seen)
    # A compiled function is traced once, so each call has its own.
    WRAPS[wrap](lambda *args: fn(*args))(*args, X)
    before = _classes()
    LISTENERS[listen](WRAPS[wrap](fn))(*args, X)
    _same_classes(before)
    assert len(seen) == 2
    assert seen[0] == seen[1]


def _classes():
    found, todo = {}, [eqx.Module]
    while todo:
        cls = todo.pop()
        found[cls] = dict(vars(cls))
        todo += [c for c in type.__subclasses__(cls) if c not in found]
    return found


def _same_classes(before):
    after = _classes()
    for cls, entries in before.items():
        if cls in after:
            assert list(after[cls]) == list(entries)
            assert all(after[cls][k] is entries[k] for k in entries if k != "__doc__")


def _count_of_classes():
    gc.collect()
    kinds = [o for o in gc.get_objects() if isinstance(o, type)]
    return sum(eqx.Module in type.mro(o) for o in kinds if o is not type)


@pytest.mark.slow
def test_no_class_is_made():
    counts = []

    def fn(net, x):
        counts.append(_count_of_classes())
        return net(x)

    fn(make_net(0), X)
    saved = S(lambda net, x: fn(net, x), capture=True, scope=True)
    saved(make_net(0), X)
    saved(make_net(1), X)
    assert len({*counts, _count_of_classes()}) == 1


@pytest.mark.parametrize("listen", LISTENERS)
def test_classes_after_an_exception(listen):
    def fn(net, x):
        raise ArithmeticError

    before = _classes()
    with pytest.raises(ArithmeticError):
        LISTENERS[listen](fn)(make_net(0), X)
    _same_classes(before)


def test_the_call_of_a_class():
    fn = lambda a, b, x: Layer.__call__(b, a.__call__(x))
    a, b = Layer(X, X), Layer(X, 2 * X)
    out, got = S(fn, capture=True)(a, b, X)
    want = {"a": {"primal": a(X)}, "b": {"primal": b(a(X))}}
    assert_close((out, got), (b(a(X)), want))
    assert list(got) == ["a", "b"]
