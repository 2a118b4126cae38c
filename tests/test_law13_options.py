"""Options, and several transformations at once, where two trees of one model meet."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from eqx_sow import plant, save_intermediates as S, Sow, sow

from tests import meeting_trees, meeting_ways  # noqa: F401
from tests.helpers import assert_close
from tests.meeting import (
    Act,
    edit,
    events_of,
    Layer,
    loss_of,
    mapped,
    Net,
    PROGRAMS,
    Run,
    X,
)


pytestmark = pytest.mark.sample(5)


# --- Options, and several of them ---


def _selected(select, **options):
    """`sow`, of those modules that `select(name, module)` selects."""

    def mark(value, name, of):
        return sow(value, name, **options) if select(name, of) else value

    return mark


def _with_inputs(x, name, of):
    return sow(((x,), {}), f"{name}.inputs")[0][0]


OPTIONS = {
    "a class": ({"capture": Net}, {}, lambda name, of: type(of) is Net),
    "classes": ({"capture": (Net, Act)}, {}, lambda name, of: type(of) in (Net, Act)),
    "a path": (
        {"capture": lambda path, module: path.startswith("e/")},
        {},
        lambda name, of: name.startswith("e/"),
    ),
    "a module": (
        {"capture": lambda path, module: type(module) is Layer},
        {},
        lambda name, of: type(of) is Layer,
    ),
    "a name": ({"capture": True}, {"names": "e/layers/*"}, lambda name, of: True),
    "a mode": ({"capture": True}, {"modes": "cotangent"}, lambda name, of: True),
    "a tag": ({"capture": True}, {"tag": "other"}, lambda name, of: True),
    "a transform": (
        {"capture": True},
        {"transform": {"**/layers/**": jnp.mean}},
        lambda name, of: True,
    ),
}
BOTH = PROGRAMS["average_and_both"]


@pytest.mark.parametrize("option", OPTIONS)
def test_options(option):
    capture, options, select = OPTIONS[option]
    tag = {"tag": options.get("tag", "intermediates")}
    grad = lambda run: eqx.filter_grad(loss_of(BOTH.make(run)))
    out, got = S(grad(Run()), **capture, **options)(*BOTH.args())
    by_hand = grad(Run(_selected(select, **tag)))
    expected, want = S(by_hand, **options)(*BOTH.args())
    assert_close((out, got), (expected, want))
    assert list(got) == list(want)


@pytest.mark.parametrize("name", ["average_and_both", "one_jitted_function", "lora"])
def test_inputs(name):
    program = PROGRAMS[name]
    grad = lambda run: eqx.filter_grad(loss_of(program.make(run)))
    args = program.args()
    out, got = S(grad(Run()), capture=True, inputs=True)(*args)
    by_hand = grad(Run(lambda value, name, of: sow(value, name), _with_inputs))
    expected, want = S(by_hand)(*args)
    assert_close((out, got), (expected, want))
    assert list(got) == list(want)


class Coder(eqx.Module):
    w: jax.Array

    def encode(self, x):
        return self.w * x

    def decode(self, x):
        return self.w + x


def test_methods_of_two_that_meet():
    call = eqx.filter_jit(lambda coder, x: coder.encode(x))

    def fn(old, new, coders, x):
        old = mapped(lambda p, q: 0.9 * p + 0.1 * q, old, new)
        for coder in coders:
            x = call(coder, x)
        return new.decode(old.encode(x))

    args = Coder(X), Coder(X + 1), [Coder(X + 2), Coder(X + 3)], X
    out, got = S(fn, capture=Coder, methods=("encode", "decode"))(*args)
    a = (X + 2) * X
    b = (X + 3) * a
    c = (0.9 * X + 0.1 * (X + 1)) * b
    want = {"coders/0.encode": a, "coders/1.encode": b, "old.encode": c}
    assert_close(
        got, {n: {"primal": v} for n, v in (want | {"new.decode": out}).items()}
    )
    assert_close(out, X + 1 + c)


class Sown(eqx.Module):
    """Has a `Sow` that takes its name from its place, and a `sow`."""

    layer: Layer
    here: Sow

    def __call__(self, x):
        return 2 * sow(self.here(self.layer(x)), "h")


@pytest.mark.parametrize("capture", [None, Layer])
def test_names_by_scope(capture):
    def fn(e, m, blocks, x):
        e = mapped(lambda p, q: 0.9 * p + 0.1 * q, e, m)
        call = eqx.filter_jit(lambda block, x: block(x))
        for block in blocks:
            x = call(block, x)
        return m(e(x))

    sown = [Sown(Layer(X + i, X - i), Sow()) for i in range(4)]
    out, got = S(fn, capture=capture, scope=True)(sown[0], sown[1], sown[2:], X)
    e = mapped(lambda p, q: 0.9 * p + 0.1 * q, sown[0], sown[1])
    x, want = X, {}
    named = {"blocks/0": sown[2], "blocks/1": sown[3], "e": e, "m": sown[1]}
    for name, s in named.items():
        x = s.layer.w * x + s.layer.b
        parts = (["layer"] if capture else []) + ["here", "h"]
        want |= {f"{name}/{part}": {"primal": x} for part in parts}
        x = 2 * x
    assert list(got) == list(want)
    assert_close((out, got), (x, want))


MEETINGS = ("average_and_both", "mean_teacher", "hvp_of_an_argument", "lookahead")


@pytest.mark.parametrize("name", MEETINGS)
def test_two_tags(name):
    program = PROGRAMS[name]
    args = program.args()
    fn = program.make(Run())
    (out, inner), outer = S(S(fn, capture=Layer, tag="a"), capture=Net, tag="b")(*args)
    layers = _selected(lambda name, of: type(of) is Layer, tag="a")
    nets = _selected(lambda name, of: type(of) is Net, tag="b")
    both = program.make(Run(lambda v, name, of: nets(layers(v, name, of), name, of)))
    want = S(S(both, tag="a"), tag="b")(*args)
    assert_close(((out, inner), outer), want)


@pytest.mark.parametrize("name", MEETINGS)
def test_plant_inside_save_inside_tap(name):
    program = PROGRAMS[name]
    args = program.args()
    values = {"**/layers/1": edit}
    inside = plant(program.make(Run()), values, capture=True)
    saved = S(inside, capture=True, **program.options)
    (out, got), events = events_of(saved, args, capture=True, tag="other")
    mark = lambda value, name, of: sow(sow(value, name), name, tag="other")
    by_hand = S(plant(program.make(Run(mark)), values), **program.options)
    (expected, want), wanted = events_of(by_hand, args, tag="other")
    assert_close((out, got), (expected, want))
    assert_close(events, wanted)
