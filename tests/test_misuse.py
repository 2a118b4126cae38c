"""A catalogue of misuses: what is raised, and what it says.

Each message names the mark or the option, the line of the mark if there is one, and
what to write instead. The last frame of the traceback is the user's.
`docs/api/errors.md` has the cause and the remedy, under what `page` says.
"""

import pathlib
import re
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import equinox as eqx
import eqx_sow
import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_sow import (
    Buffer,
    DuplicateSowError,
    Fold,
    Last,
    plant,
    register_rule,
    save_intermediates as S,
    Sow,
    sow,
    SowError,
    SowTypeError,
    summarize,
    Summary,
    tabulate,
    tap,
    UnknownSowError,
    UnsupportedPrimitiveError,
)
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float

from .tables import REDUCERS


pytestmark = pytest.mark.sample(1)


X = jnp.ones(3)


class Misuse(NamedTuple):
    """`says` is in the message, or its notes; and so is the second line of the function
    `at`, where the mark is. `page` is in the heading of `docs/api/errors.md`, or
    begins the row there, that tells the remedy."""

    error: type
    do: Callable[[], Any]
    says: tuple[str, ...]
    page: str
    at: Callable | None = None


# --- what the user wrote: a mark is in the second line of its function ---


def _fn(x):
    return sow(jnp.sin(x), "h")


def _twice(x):
    x = [sow(x * 2, "h"), sow(x * 3, "h")]
    return x


def _loop(x):
    body = lambda x: (sow(jnp.sin(x), "h"), None)
    return lax.scan(lambda x, _: body(x), x, None, length=3)[0]


def _batch(x):
    one = lambda x: sow(jnp.sin(x), "h")
    return jax.vmap(one)(x)


def _pair(x):
    return sow({"a": x, "kind": "static"}, "h")["a"]


def _reference(x):
    return sow(jax.new_ref(x), "h")[...]


def _branches(x):
    branches = [lambda: sow(x, "h")[0], lambda: sow(x[0], "h")]
    return lax.cond(x[0] > 0, *branches)


def _shapes(x):
    return sow(sow(x, "h")[0], "h")


def _condition(x):
    going_on = lambda x: sow(x[0], "h") < 5
    return lax.while_loop(going_on, lambda x: x + 1, x)


def _at_compile_time(x):
    early = lambda: sow(jnp.ones(3), "h")
    with jax.ensure_compile_time_eval():
        return x + early()


def _checkpointed(x):
    hidden = lambda x: jnp.sum(jnp.sin(sow(x * 2, "h")))
    return jax.checkpoint(hidden)(x)


twice_p = jexc.Primitive("twice_in_misuse")
twice_p.def_abstract_eval(lambda x, *, jaxpr: jaxpr.out_avals[0])


def _in_a_primitive(x):
    jaxpr = jax.make_jaxpr(lambda x: sow(x * 2, "h"))(x)
    return twice_p.bind(x, jaxpr=jaxpr)


def _in_a_kernel(x):
    add = lambda a, b: sow(a + b, "h")
    return lax.reduce(x, 0.0, add, (0,))


wrong_p = jexc.Primitive("wrong_in_misuse")
wrong_p.def_abstract_eval(lambda x, *, jaxpr: jaxpr.out_avals[0])
register_rule(wrong_p)(lambda x, *, jaxpr: x[0])


def _with_a_wrong_rule(x):
    return wrong_p.bind(x, jaxpr=jax.make_jaxpr(lambda x: sow(x * 2, "h"))(x))


def _over_devices(x):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("d")
    return jax.shard_map(_fn, mesh=mesh, in_specs=spec, out_specs=spec)(x)


class _Leak:
    x: Any = None


def _leaking(x):
    _Leak.x = sow(x * 2, "h")
    return x


def _calls_itself(x):
    return S(_calls_itself)(x)


def _too_deep():
    # What Python frees at the greatest depth fails, too, and pytest would tell of it.
    with mock.patch("sys.unraisablehook", lambda *_: None):
        return S(_calls_itself)(X)


class _Layer(eqx.Module):
    weight: Any

    def __call__(self, x):
        return sow(self.weight * x, "h")


def _defined_again():
    class Again(_Layer):
        pass

    return Again


class _Hides:
    layer = _Layer(X)


def _mix(a, b, x):
    return jax.tree.map(lambda a, b: a + b, a, b)(x)


def _returned(value):
    return {"h": lambda _: value}


class _Foreign:
    def __call__(self, x):
        return x


class _Encoder(eqx.Module):
    def encode(self, x):
        return x


def _model(m, x):
    return m(x)


_INPUTS = dict(capture=True, inputs=True)


def _times(params, x):
    return params * x


def _sum(x):
    return x.sum()


def _never(params, x):
    return False


def _in_a_function(m, x):
    return _times(2.0, m(x))


MODEL = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
TWO = eqx.nn.Sequential([Sow("h"), Sow("h")])
OFF_BY_ONE = Fold(0.0, lambda acc, x: acc + x)

_TAKES_FUNCTION = "takes a function or a model"
_MODES = "Modes are 'primal', 'tangent' and 'cotangent'"
_REDUCERS = [f"`eqx_sow.{type(row.reducer).__name__}(" for row in REDUCERS.values()]
_PREDICATE = "Write `lambda path, module: ...`"
_KEYS = "takes a dict whose keys are names or globs, and 0 is neither"
_DUPLICATE = (
    "`h` marks more than one value",
    "Give the values different names",
    "Append()",
    "select others with `names`",
)
_PLANTED = "`plant`: the value for `sow(..., 'h')`"
_RETURNED = "`plant`: what the function returned for `sow(..., 'h')`"
_THERE = "The names there are: 'h'"
_EDGES = ("edges=...)` takes at least two numbers in increasing", "numpy.linspace(")


MISUSES = {
    # --- what is transformed ---
    "a number": Misuse(
        TypeError, lambda: S(3), ("`save_intermediates(fn)`", _TAKES_FUNCTION), "`fn`"
    ),
    "the output of the function": Misuse(
        TypeError,
        lambda: S(_fn(X)),
        (_TAKES_FUNCTION, "not f32[3]", "returns: `save_intermediates(fn)(x)`"),
        "`fn`",
    ),
    "a model that cannot be called": Misuse(
        TypeError,
        lambda: S(_Encoder(), capture=True),  # pyright: ignore
        (_TAKES_FUNCTION, "not _Encoder(...)", "pass one of its methods"),
        "`fn`",
    ),
    "a list of models": Misuse(
        TypeError,
        lambda: S([MODEL, MODEL]),  # pyright: ignore
        (_TAKES_FUNCTION, "not [MLP(...), MLP(...)]"),
        "`fn`",
    ),
    "plant in an array": Misuse(
        TypeError, lambda: plant(X, {}), ("`plant(fn)`", _TAKES_FUNCTION), "`fn`"
    ),
    "tap an array": Misuse(
        TypeError, lambda: tap(X), ("`tap(fn)`", _TAKES_FUNCTION), "`fn`"
    ),
    "decorate a number": Misuse(
        TypeError, lambda: S(names="h")(3), ("`save_intermediates(fn)`",), "`fn`"
    ),
    "an option that is none": Misuse(
        TypeError,
        lambda: S(_fn, name="h"),  # pyright: ignore
        ("unexpected keyword argument 'name'",),
        "another name",
    ),
    "an option that is like none": Misuse(
        TypeError,
        lambda: S(_fn, filter="h"),  # pyright: ignore
        ("keyword argument 'filter'. The options are: `tag`, `names`, `modes`",),
        "another name",
    ),
    "names in plant": Misuse(
        TypeError,
        lambda: plant(_fn, {"h": X}, names="h"),  # pyright: ignore
        ("argument 'names'. The keys of `values` select: `plant(fn, {'h'",),
        "another name",
    ),
    # --- names, tags and modes ---
    "names: a number": Misuse(
        TypeError, lambda: S(_fn, names=3), ("names=...)` takes a name, a",), "`names`"
    ),
    "names: one is a number": Misuse(
        TypeError, lambda: S(_fn, names=["h", 3]), ("names=...)` takes a",), "`names`"
    ),
    "names: a dict": Misuse(
        TypeError, lambda: S(_fn, names={"h": 1}), ("names=...)` takes a",), "`names`"
    ),
    "names: a predicate without an argument": Misuse(
        TypeError,
        lambda: S(_fn, names=lambda: True),
        ("names=...)` takes a function `(name) -> bool`", "Write `lambda name: ..."),
        "`names`",
    ),
    "names: a predicate that returns an array": Misuse(
        TypeError,
        lambda: S(_fn, names=lambda name: X > 0)(X),
        ("`names=", "for 'h'. Return `True` or `False`"),
        "`names`",
    ),
    "names: a typo": Misuse(
        UnknownSowError,
        lambda: S(lambda x: sow(x, "layers/0"), names="layer/0")(X),
        ("names=...)`: 'layer/0'", "names there are", "Did you mean 'layers/0'?"),
        "selects no mark",
    ),
    "names: a typo in a glob": Misuse(
        UnknownSowError,
        lambda: S(lambda x: sow(x, "layers/0"), names="layer/*")(X),
        ("Did you mean 'layers/*'?",),
        "selects no mark",
    ),
    "names: a regular expression": Misuse(
        UnknownSowError,
        lambda: S(lambda x: sow(x, "layers/0/h"), names="layers/.*/h")(X),
        ("Did you mean 'layers/*/h'?",),
        "selects no mark",
    ),
    "names: of layers, without capture": Misuse(
        UnknownSowError,
        lambda: S(MODEL, names="layers/0")(X),
        ("'layers/0' selects no mark", "Did you mean `capture=True`?"),
        "selects no mark",
    ),
    "modes: a number": Misuse(
        ValueError, lambda: S(_fn, modes=3), ("modes=...)`: 3", _MODES), "`modes`"
    ),
    "modes: no such mode": Misuse(
        ValueError,
        lambda: S(_fn, modes="grad"),
        ("modes=...)`: 'grad'", _MODES),
        "`modes`",
    ),
    "modes: second order, of a primal": Misuse(
        ValueError,
        lambda: S(_fn, modes="tangent.primal"),
        ("modes=...)`: 'tangent.primal'", _MODES),
        "`modes`",
    ),
    "modes: one of them is empty": Misuse(
        ValueError,
        lambda: S(_fn, modes=["primal", ""]),
        ("modes=...)`: ''", _MODES),
        "`modes`",
    ),
    "modes: none has it": Misuse(
        UnknownSowError,
        lambda: S(_fn, modes="cotangent")(X),
        ("modes=...)`: 'cotangent'", "The modes there are: 'primal'", "filter_grad("),
        "`modes`",
    ),
    "tag: a list": Misuse(
        TypeError,
        lambda: S(_fn, tag=[1]),
        ("tag=...)` takes a hashable tag, not [1]",),
        "`tag`",
    ),
    # --- capture ---
    "capture: a path": Misuse(
        TypeError,
        lambda: S(MODEL, capture="layers/0"),
        ("capture=...)` takes `True`", "`capture=True, names='layers/0'`"),
        "`capture`",
    ),
    "capture: a list with a path": Misuse(
        TypeError,
        lambda: S(MODEL, capture=[eqx.nn.Linear, "layers/0"]),
        ("`jax.jit` or `eqx.filter_jit`, several of these, or a predicate",),
        "`capture`",
    ),
    "capture: a plain function": Misuse(
        TypeError,
        lambda: S(_in_a_function, capture=_times)(MODEL, X),
        ("_times", "failed for the module", "decorate it with `jax.jit` where it is"),
        "`capture`",
    ),
    "capture: a plain function of other arguments": Misuse(
        TypeError,
        lambda: S(_in_a_function, capture=_sum)(MODEL, X),
        (_PREDICATE, "To capture the calls of a function, decorate it with `jax.jit`"),
        "`capture`",
    ),
    "capture: a plain function that is false of all": Misuse(
        UnknownSowError,
        lambda: S(_in_a_function, capture=_never)(MODEL, X),
        ("selects nothing", "decorate it with `jax.jit` where it is defined"),
        "selects nothing that is called",
    ),
    "capture: the name of a class": Misuse(
        TypeError,
        lambda: S(MODEL, capture="Linear"),
        ("Write `capture=eqx.nn.Linear`, the class itself", "names='layers/0'`"),
        "`capture`",
    ),
    "capture: the name of a class of the user's": Misuse(
        TypeError,
        lambda: S(MODEL, capture="Encoder"),
        ("Write `capture=Encoder`, the class itself", "names='layers/0'`"),
        "`capture`",
    ),
    "capture: several modules": Misuse(
        TypeError,
        lambda: S(MODEL, capture=MODEL.layers),
        ("not (Linear(...), Linear(...)). To choose by path",),
        "`capture`",
    ),
    "capture: a module": Misuse(
        TypeError,
        lambda: S(MODEL, capture=MODEL.layers[0]),
        (
            "capture=...)` takes `True`",
            "not a module of class `Linear`. To choose by path",
            "`capture=True, names='layers/0'`",
        ),
        "`capture`",
    ),
    "capture: a method of a module": Misuse(
        TypeError,
        lambda: S(MODEL, capture=MODEL.layers[0].__call__),
        ("not a method of one `Linear`", "give its class (and `methods=`"),
        "`capture`",
    ),
    "capture: a method of a class": Misuse(
        TypeError,
        lambda: S(lambda m, x: m.encode(x), capture=_Encoder.encode)(_Encoder(), X),
        (
            "`_Encoder.encode` is a method of modules, not a predicate",
            "Write `capture=_Encoder, methods='encode'`.",
        ),
        "`capture`",
    ),
    "capture: the `__call__` of a class": Misuse(
        TypeError,
        lambda: S(_Layer(X), capture=_Layer.__call__),
        ("`_Layer.__call__` is a method", "Write `capture=_Layer`."),
        "`capture`",
    ),
    "capture: a predicate with its arguments in the wrong order": Misuse(
        UnknownSowError,
        lambda: S(MODEL, capture=lambda m, path: isinstance(m, eqx.nn.Linear))(X),
        ("layers/0 (Linear)", "A predicate is called with `(path, module)`"),
        "selects nothing that is called",
    ),
    "capture: a function that is not called": Misuse(
        UnknownSowError,
        lambda: S(MODEL, capture=jax.nn.softmax)(X),
        ("`capture=softmax` selects nothing", "calls this function."),
        "selects nothing that is called",
    ),
    "capture: a predicate of one argument": Misuse(
        TypeError,
        lambda: S(MODEL, capture=lambda module: True),
        ("capture=...)` takes a function `(path, module) -> bool`", _PREDICATE),
        "`capture`",
    ),
    "capture: a predicate that returns an array": Misuse(
        TypeError,
        lambda: S(lambda m, x: m(x), capture=lambda p, m: m.weight > 0)(_Layer(X), X),
        ("`capture=", "for the module at 'm'", "Return a bool"),
        "`capture`",
    ),
    "capture: a class that is not there": Misuse(
        UnknownSowError,
        lambda: S(MODEL, capture=eqx.nn.Conv)(X),
        ("capture=", "selects nothing that is called", "layers/0 (Linear)"),
        "selects nothing that is called",
    ),
    "capture: a model of another library": Misuse(
        UnknownSowError,
        lambda: S(lambda x: _Foreign()(x), capture=_Foreign)(X),
        ("No module is in the", "Only modules of Equinox are captured: `sow`"),
        "selects nothing that is called",
    ),
    "capture: a class that was defined again": Misuse(
        UnknownSowError,
        lambda: S(_defined_again()(X), capture=_defined_again())(X),
        ("are: . (Again)", "Again` was defined again", "make the model again"),
        "selects nothing that is called",
    ),
    "capture: not called": Misuse(
        UnknownSowError,
        lambda: S(lambda m, x: x, capture=True)(_Layer(X), X),
        (
            "`capture=True` selects nothing",
            "in the arguments and variables are: m (_Layer)",
            "Check that the program calls this model.",
            "`tag`",
        ),
        "selects nothing that is called",
    ),
    "capture: a mark has the name of a module": Misuse(
        DuplicateSowError,
        lambda: S(lambda m, x: sow(m(x), "m"), capture=True)(_Layer(X), X),
        (
            "`m` marks more than one value",
            "Give the values different names",
            "_misuse.py:",
        ),
        "marks more than one value",
    ),
    "methods: a number": Misuse(
        TypeError,
        lambda: S(MODEL, capture=True, methods=3),
        ("methods=...)` takes the name of a method, or a sequence",),
        "`methods`",
    ),
    "methods: no such method": Misuse(
        UnknownSowError,
        lambda: S(MODEL, capture=True, methods="encode")(X),
        ("methods=('encode',)", "'encode' is a method of no selected module"),
        "is a method of no selected module",
    ),
    "methods: without capture": Misuse(
        ValueError,
        lambda: S(_fn, methods="encode"),
        ("methods=('encode',))` is about modules", "or write `capture=True`"),
        "`methods`",
    ),
    "plant, methods: without capture": Misuse(
        ValueError,
        lambda: plant(_fn, {}, methods="encode"),
        ("`plant(..., methods=('encode',))`", "or write `capture=True`"),
        "`methods`",
    ),
    "inputs: text": Misuse(
        TypeError,
        lambda: S(MODEL, capture=True, inputs="yes"),
        ("inputs=...)` takes `True` or `False`",),
        "`inputs`",
    ),
    "calls: without capture": Misuse(
        ValueError,
        lambda: plant(_fn, {}, calls=True),
        ("calls=True)` is about calls", "Leave it out, or write `capture=True`"),
        "`inputs`",
    ),
    "methods: of functions": Misuse(
        ValueError,
        lambda: plant(_fn, {}, capture=(jax.nn.relu,), methods="foo"),
        ("methods=('foo',))` is about modules", "Leave it out"),
        "`methods`",
    ),
    "inputs: without capture": Misuse(
        ValueError,
        lambda: S(_fn, inputs=True),
        ("inputs=True)` is about calls", "or write `capture=True`"),
        "`inputs`",
    ),
    "scope: a number": Misuse(
        TypeError,
        lambda: S(_fn, scope=1),
        ("scope=...)` takes `True` or `False`",),
        "`scope`",
    ),
    # --- reducers ---
    "reduce: text": Misuse(
        TypeError,
        lambda: S(_fn, reduce="last"),
        ("reduce=...)`", *_REDUCERS),
        "`reduce`",
    ),
    "reduce: a class": Misuse(
        TypeError, lambda: S(_fn, reduce=Last), ("reduce=...)`", *_REDUCERS), "`reduce`"
    ),
    "reduce: text for a name": Misuse(
        TypeError,
        lambda: S(_fn, reduce={"h": "last"}),
        ("reduce=...)`", *_REDUCERS, "not {'h': 'last'}"),
        "`reduce`",
    ),
    "reduce: a key that is no name": Misuse(
        TypeError,
        lambda: S(_fn, reduce={0: Last()}),
        ("reduce=...)`", _KEYS),
        "`reduce`",
    ),
    "reduce: no such name": Misuse(
        UnknownSowError,
        lambda: S(_fn, reduce={"x": Last()})(X),
        ("reduce=...)`: 'x'", _THERE),
        "selects no mark",
    ),
    "Fold of a number": Misuse(
        TypeError,
        lambda: Fold(0.0, 3),  # pyright: ignore
        ("Fold(init, fn)` takes a function `(acc, value) -> acc`, not 3", "Write `"),
        "`Fold`",
    ),
    "Fold of an init of two arguments": Misuse(
        TypeError,
        lambda: Fold(lambda acc, x: acc, lambda acc, x: acc),
        ("`init` is a value, or a function", "Fold(jnp.zeros_like, fn)`"),
        "`Fold`",
    ),
    "Fold with its arguments in another order": Misuse(
        TypeError,
        lambda: Fold(lambda acc, x: acc, 0.0),  # pyright: ignore
        ("Fold(init, fn)` takes a function `(acc, value) -> acc`, not 0.0", "Write `"),
        "`Fold`",
    ),
    "Fold of a function of one argument": Misuse(
        TypeError,
        lambda: S(_fn, reduce=Fold(0.0, lambda x: x))(X),
        ("takes 1 positional argument", "as `reduce`, for `sow(..., 'h')`"),
        "`Fold`",
        _fn,
    ),
    "Fold that changes a shape": Misuse(
        SowError,
        lambda: S(_fn, reduce={"h": OFF_BY_ONE})(X),
        ("Fold(init, fn)` for `sow(..., 'h')`", "acc + x.sum()"),
        "changes shape",
        _fn,
    ),
    "Fold that changes the structure": Misuse(
        SowError,
        lambda: S(_fn, reduce=Fold(0.0, lambda acc, x: (acc, x)))(X),
        (
            "Fold(init, fn)` for `sow(..., 'h')`",
            "f32[3])",
            "`init` li",
        ),
        "changes shape",
        _fn,
    ),
    "Fold that forgets return": Misuse(
        SowError,
        lambda: S(_fn, reduce=Fold(0.0, lambda acc, x: None))(X),
        ("Fold(init, fn)` for `sow(..., 'h')`", "`fn` returned None"),
        "changes shape",
        _fn,
    ),
    "Fold that starts with text": Misuse(
        TypeError,
        lambda: S(_fn, reduce=Fold("zero", lambda acc, x: acc))(X),
        ("not a valid JAX", "as `reduce`, for `sow(..., 'h')`"),
        "`Fold`",
        _fn,
    ),
    "Buffer of no length": Misuse(
        ValueError,
        lambda: Buffer(0),
        ("Buffer(size)` takes a positive integer",),
        "`Buffer`",
    ),
    "Buffer of a fraction": Misuse(
        ValueError,
        lambda: Buffer(2.5),  # pyright: ignore
        ("Buffer(size)` takes a positive integer, not 2.5",),
        "`Buffer`",
    ),
    "Buffer of several lengths": Misuse(
        ValueError,
        lambda: Buffer(np.ones(2, int)),  # pyright: ignore
        ("Buffer(size)` takes a positive integer, not array([1, 1])",),
        "`Buffer`",
    ),
    "Buffer of a traced length": Misuse(
        ValueError,
        lambda: jax.jit(lambda n: Buffer(n).size)(3),
        ("Buffer(size)` takes a positive integer", "it cannot be traced"),
        "`Buffer`",
    ),
    "Buffer that keeps the middle": Misuse(
        ValueError,
        lambda: Buffer(2, "middle"),  # pyright: ignore
        ('Buffer(size, keep)`: `keep` is "first" or "last", not \'middle\'',),
        "`Buffer`",
    ),
    "Last over devices": Misuse(
        UnsupportedPrimitiveError,
        lambda: S(_over_devices, reduce=Last())(jnp.ones(4)),
        ("`sow(..., 'h')`", "no order of execution over", "Capture it without a red"),
        "in a `shard_map`",
        _fn,
    ),
    # --- transform and spec ---
    "transform: a number": Misuse(
        TypeError,
        lambda: S(_fn, transform=3),
        ("transform=...)` takes a function",),
        "`transform`",
    ),
    "transform: a number for a name": Misuse(
        TypeError,
        lambda: S(_fn, transform={"h": 3}),
        ("transform=...)` takes a function", "not {'h': 3}"),
        "`transform`",
    ),
    "transform: a key that is no name": Misuse(
        TypeError,
        lambda: S(_fn, transform={0: jnp.sum}),
        ("transform=...)`", _KEYS),
        "`transform`",
    ),
    "transform: no such name": Misuse(
        UnknownSowError,
        lambda: S(_fn, transform={"x": jnp.sum})(X),
        ("transform=...)`: 'x'", _THERE),
        "selects no mark",
    ),
    "transform: of two arguments": Misuse(
        TypeError,
        lambda: S(_loop, transform=lambda a, b: a)(X),
        ("missing 1 required positional", "passed as `transform`, for `sow(..., 'h')`"),
        "`transform`",
        _loop,
    ),
    "transform: raises": Misuse(
        AttributeError,
        lambda: S(_loop, transform=lambda x: x.nothing)(X),
        ("nothing", "passed as `transform`, for `sow(..., 'h')`"),
        "`transform`",
        _loop,
    ),
    "transform: asks for numbers": Misuse(
        jax.errors.ConcretizationTypeError,
        lambda: S(_loop, transform=lambda x: float(x[0]))(X),
        ("`float` function", "passed as `transform`, for `sow(..., 'h')`"),
        "`transform`",
        _loop,
    ),
    "spec: a list": Misuse(
        TypeError,
        lambda: S(_fn, spec=[1]),
        ("spec=...)` takes a dict of names to",),
        "`spec`",
    ),
    "spec: a key that is no name": Misuse(
        TypeError, lambda: S(_fn, spec={0: int}), ("spec=...)`", _KEYS), "`spec`"
    ),
    "spec: no such name": Misuse(
        UnknownSowError,
        lambda: S(_fn, spec={"x": int})(X),
        ("spec=...)`: 'x'", _THERE),
        "selects no mark",
    ),
    "spec: a number": Misuse(
        SowTypeError,
        lambda: S(_fn, spec={"h": 3})(X),
        ("`h` (primal): beartype does not understand the annotation 3", "Write a type"),
        "`spec`",
    ),
    "spec of a mark: a number": Misuse(
        SowTypeError,
        lambda: S(lambda x: sow(x, "h", spec=3))(X),
        ("`h` (as marked at", "test_misuse.py:", "beartype does not understand"),
        "`spec`",
    ),
    "spec: another type": Misuse(
        SowTypeError,
        lambda: S(_fn, spec={"h": int})(X),
        ("`h` (primal) does not match its annotation", "Expected int, got f32[3]"),
        "does not match its annotation",
    ),
    "spec of a mark: a size of nothing": Misuse(
        SowTypeError,
        lambda: S(lambda x: sow(x, "h", spec=Float[Array, "{n}"]))(X),
        (
            "`h` (as marked at",
            "test_misuse.py:",
            "cannot be checked",
            "Write a name, a",
        ),
        "does not match its annotation",
    ),
    "spec of a mark: another type": Misuse(
        SowTypeError,
        lambda: S(eqx.nn.Sequential([Sow("h", spec=int)]))(X),
        ("`h` (as marked at", "test_misuse.py:", "Expected int, got f32[3]"),
        "does not match its annotation",
    ),
    # --- sow ---
    "sow: a number as name": Misuse(
        TypeError,
        lambda: S(lambda x: sow(x, 3))(X),  # pyright: ignore
        ("`eqx_sow.sow(value, name)` takes a string as name, not 3", "Write `eqx_sow."),
        "`sow`",
    ),
    "sow: its arguments in another order": Misuse(
        TypeError,
        lambda: S(lambda x: sow("h", x))(X),
        ("`eqx_sow.sow(value, name)` takes a string as name", "Write `eqx_sow.sow("),
        "`sow`",
    ),
    "sow: its arguments in another order, without a capture": Misuse(
        TypeError,
        lambda: sow("h", X),
        ("takes a string as name, not f32[3]", "Write `eqx_sow.sow("),
        "`sow`",
    ),
    "sow: no name": Misuse(
        TypeError,
        lambda: S(lambda x: sow(x))(X),  # pyright: ignore
        ("sow() missing 1 required positional argument: 'name'",),
        "`sow`",
    ),
    "sow: a list as tag": Misuse(
        TypeError,
        lambda: S(lambda x: sow(x, "h", tag=[1]))(X),  # pyright: ignore
        ("`sow(..., 'h', tag=...)` takes a hashable tag, not [1]",),
        "`tag`",
    ),
    "sow: a traced number in the name": Misuse(
        SowError,
        lambda: S(lambda x: lax.scan(lambda c, i: (sow(c, f"h/{i}"), i), x, X))(1.0),
        ("`sow(value, 'h/", "cannot contain a traced number", "each iteration is"),
        "cannot contain a traced number",
    ),
    "sow: a reference": Misuse(
        SowError,
        lambda: S(_reference)(X),
        ("`sow(..., 'h')` cannot mark a leaf of type", "Mark the value that it holds"),
        "cannot mark a leaf",
    ),
    "Sow: a number as name": Misuse(
        TypeError,
        lambda: Sow(3),  # pyright: ignore
        ("`eqx_sow.Sow(name)` takes a string as name, not 3", "Write `eqx_sow.Sow("),
        "`sow`",
    ),
    "Sow: a list as tag": Misuse(
        TypeError,
        lambda: Sow(tag=[1]),
        ("`Sow(..., tag=...)` takes a hashable tag",),
        "`tag`",
    ),
    "one name twice": Misuse(
        DuplicateSowError,
        lambda: S(_twice)(X),
        _DUPLICATE,
        "marks more than one value",
        _twice,
    ),
    "one name in a Python loop": Misuse(
        DuplicateSowError,
        lambda: S(lambda x: [_fn(x) for _ in range(3)])(X),
        (*_DUPLICATE, "which runs more than once", '`with eqx_sow.scope(f"step{i}"):`'),
        "marks more than one value",
        _fn,
    ),
    "one name in two layers": Misuse(
        DuplicateSowError,
        lambda: S(lambda a, b, x: b(a(x)))(_Layer(X), _Layer(X), X),
        (*_DUPLICATE, "`scope=True` begins them"),
        "marks more than one value",
        _Layer.__call__,
    ),
    "one name for two layers Sow": Misuse(
        DuplicateSowError,
        lambda: S(TWO)(X),
        (*_DUPLICATE, "by two layers `Sow('h')`, which", "a name of its own, or none"),
        "marks more than one value",
    ),
    "branches that differ": Misuse(
        SowError,
        lambda: S(_branches)(X),
        ("`h` is marked in several places", "f32[3] at", "give the marks different"),
        "in several places, and their values differ",
        _branches,
    ),
    "a reducer of values that differ": Misuse(
        SowError,
        lambda: S(_shapes, reduce=Last())(X),
        ("`h` is marked in several places", "f32[3] at", "give the marks different"),
        "in several places, and their values differ",
        _shapes,
    ),
    "sow in a condition": Misuse(
        UnsupportedPrimitiveError,
        lambda: S(_condition)(X),
        ("`sow(..., 'h')`", "in the condition of a", "Mark the value in the body"),
        "the condition of a `while_loop`",
        _condition,
    ),
    "sow in a primitive without a rule": Misuse(
        UnsupportedPrimitiveError,
        lambda: S(_in_a_primitive)(X),
        ("`sow(..., 'h')`", "primitive `twice_in_misuse`", "register_rule(primitive)"),
        "is inside the primitive",
        _in_a_primitive,
    ),
    "sow in a reduction": Misuse(
        UnsupportedPrimitiveError,
        lambda: S(_in_a_kernel)(X),
        ("`sow(..., 'h')`", "primitive `reduce`", "Move the mark out of it"),
        "is inside the primitive",
        _in_a_kernel,
    ),
    "sow that runs while the program is traced": Misuse(
        SowError,
        lambda: S(_at_compile_time)(X),
        ("`sow(..., 'h')`", "only being traced", "Move the mark out of that part"),
        "was executed while",
        _at_compile_time,
    ),
    # --- plant ---
    "values: a list": Misuse(
        TypeError,
        lambda: plant(_fn, [X]),  # pyright: ignore
        ("`plant(..., values=...)` takes a dict", "`{'h': value}`"),
        "`values`",
    ),
    "values: all that save_intermediates returned": Misuse(
        TypeError,
        lambda: plant(_fn, S(_fn)(X)),
        ("takes a dict", "second output of `save_intermediates(", "not (f32[3], "),
        "`values`",
    ),
    "values: a key that is no name": Misuse(
        TypeError,
        lambda: plant(_fn, {0: X}),  # pyright: ignore
        ("`plant(..., values=...)`", _KEYS),
        "`values`",
    ),
    "values: no such name": Misuse(
        UnknownSowError,
        lambda: plant(_fn, {"x": X})(X),
        ("`plant(fn, values)`: 'x'", _THERE),
        "selects no mark",
    ),
    "values: a traced number in a name": Misuse(
        UnknownSowError,
        lambda: jax.jit(lambda i: plant(_loop, {f"h/{i}": jnp.zeros_like})(X))(1),
        ("`plant(fn, values)`: 'h/", "A name cannot contain a traced number"),
        "selects no mark",
    ),
    "values: another shape": Misuse(
        SowError,
        lambda: plant(_fn, {"h": jnp.ones(4)})(X),
        (_PLANTED, "float32[4] where float32[3]", "Plant an array of that shape"),
        "has a leaf",
        _fn,
    ),
    "values: another dtype": Misuse(
        SowError,
        lambda: plant(_fn, {"h": jnp.ones(3, int)})(X),
        (_PLANTED, "int32[3] where float32[3]", "Plant an array of that shape and dty"),
        "has a leaf",
        _fn,
    ),
    "values: without the axis of the loop": Misuse(
        SowError,
        lambda: plant(_loop, {"h": X})(X),
        (_PLANTED, "float32[3] where float32[3, 3]", "an axis in front for each loop"),
        "has a leaf",
        _loop,
    ),
    "values: another structure": Misuse(
        SowError,
        lambda: plant(_fn, {"h": (X, X)})(X),
        (_PLANTED, "has the structure", "Plant a value of that structure"),
        "has a leaf",
        _fn,
    ),
    "values: another static leaf": Misuse(
        SowError,
        lambda: plant(_pair, {"h": {"a": X, "kind": "else"}})(X),
        (_PLANTED, "'else', but 'static' is marked there", "plant that one"),
        "has a leaf",
        _pair,
    ),
    "values: None": Misuse(
        SowError,
        lambda: plant(_fn, {"h": None})(X),
        (_PLANTED, "Plant a value of"),
        "has a leaf",
        _fn,
    ),
    "values: one for two places": Misuse(
        DuplicateSowError,
        lambda: plant(_twice, {"h": X})(X),
        ("'h' runs 2 times: at", "Plant a tuple of 2", "or plant a function"),
        "marks more than one value",
        _twice,
    ),
    "planted function: forgets return": Misuse(
        SowError,
        lambda: plant(_fn, _returned(None))(X),
        ("function for `sow(..., 'h')`", "returned None; did you forget `return`?"),
        "has a leaf",
        _fn,
    ),
    "planted function: another shape": Misuse(
        SowError,
        lambda: plant(_fn, _returned(jnp.ones(4)))(X),
        (_RETURNED, "Return an array of that shape and dtype"),
        "has a leaf",
        _fn,
    ),
    "planted inputs": Misuse(
        UnknownSowError,
        lambda: plant(MODEL, {"layers/1.inputs": lambda x: x}, capture=True)(X),
        ("Inputs are marked with `inputs=True`",),
        "selects no mark",
    ),
    "planted function: of the whole batch": Misuse(
        SowError,
        lambda: plant(_batch, _returned(X))(X),
        (_RETURNED, "float32[3] where float32[] is marked", "the value of one lane"),
        "has a leaf",
        _batch,
    ),
    "planted function: another structure": Misuse(
        SowError,
        lambda: plant(_fn, _returned((X,)))(X),
        (_RETURNED, "Return a value of that structure"),
        "has a leaf",
        _fn,
    ),
    "planted function: of no arguments": Misuse(
        TypeError,
        lambda: plant(_loop, {"h": lambda: X})(X),
        ("takes 0 positional arguments", "that you planted, for `sow(..., 'h')`"),
        "`values`",
        _loop,
    ),
    "mode: no such mode": Misuse(
        ValueError,
        lambda: plant(_fn, {"h": X}, mode="grad"),  # pyright: ignore
        ("`plant(..., mode=...)`: 'grad'", _MODES),
        "`mode`",
    ),
    "mode: a list": Misuse(
        ValueError,
        lambda: plant(_fn, {"h": X}, mode=["primal"]),  # pyright: ignore
        ("`plant(..., mode=...)`: ['primal']", _MODES),
        "`mode`",
    ),
    "mode: a cotangent where there is none": Misuse(
        UnknownSowError,
        lambda: plant(_fn, {"h": X}, mode="cotangent")(X),
        ("'h' is marked, but has no cotangent", "plant(eqx.filter_grad(fn), ...)"),
        "`mode`",
    ),
    "plant in the gradient of a checkpoint": Misuse(
        SowError,
        lambda: plant(jax.grad(_checkpointed), {"h": X})(X),
        ("`sow(..., 'h')`", "`jax.checkpoint`", "Plant before you differentiate"),
        "that was differentiated",
        _checkpointed,
    ),
    "planted inputs: a function of the argument": Misuse(
        SowError,
        lambda: plant(_model, {"m.inputs": lambda x: 2 * x}, **_INPUTS)(MODEL, X),
        ("for the inputs of `m` (a `MLP`", "Inputs are a pair `(args, kwargs)`"),
        "has a leaf",
        _model,
    ),
    "planted inputs: a function that fails": Misuse(
        TypeError,
        lambda: plant(_model, {"m.inputs": jnp.sin}, **_INPUTS)(MODEL, X),
        ("for the inputs of `m` (a `MLP`", "Inputs are a pair `(args, kwargs)`"),
        "has a leaf",
        _model,
    ),
    "capture: forgotten around a plant": Misuse(
        UnknownSowError,
        lambda: S(plant(MODEL, {"layers/0": jnp.sin}, capture=True), names="layers/1")(
            X
        ),
        ("that are planted inside. Did you mean `capture=True`",),
        "selects no mark",
    ),
    # --- tap ---
    "tap: the callback first": Misuse(
        TypeError,
        lambda: tap(print, MODEL),
        ("`tap(fn, callback)`", "not MLP", "write `tap(model, print)`"),
        "`callback`",
    ),
    "tap: the callback first, before a function that was jitted": Misuse(
        TypeError,
        lambda: tap(print, jax.jit(_fn)),
        ("a function made by `jax.jit`", "write `tap(model, print)`"),
        "`callback`",
    ),
    "tap: a number as callback": Misuse(
        TypeError,
        lambda: tap(_fn, 3),
        ("`tap(..., callback=...)` takes a function of an event",),
        "`callback`",
    ),
    "tap: a callback of no arguments": Misuse(
        SowError,
        lambda: jax.block_until_ready(tap(_fn, lambda: None)(X)),
        ("callback of `tap` raised TypeError", "`sow(..., 'h')`"),
        "The callback of `tap` raised",
        _fn,
    ),
    "tap: a callback that raises": Misuse(
        SowError,
        lambda: jax.block_until_ready(tap(_fn, lambda event: event.nothing)(X)),
        ("callback of `tap` raised AttributeError", "`sow(..., 'h')`"),
        "The callback of `tap` raised",
        _fn,
    ),
    "tap: a number as when": Misuse(
        TypeError, lambda: tap(_fn, when=3), ("when=...)` takes a function",), "`when`"
    ),
    "tap: when returns an array": Misuse(
        SowError,
        lambda: tap(_fn, when=lambda x: x > 0)(X),
        ("`when` of `tap`", "`sow(..., 'h')`", "write `.any()` or `.all()`"),
        "`when`",
        _fn,
    ),
    "tap: when returns nothing": Misuse(
        SowError,
        lambda: tap(_fn, when=lambda x: None)(X),
        ("`when` of `tap` returned None", "`sow(..., 'h')`", "a single boolean"),
        "`when`",
        _fn,
    ),
    "tap: every zero": Misuse(
        ValueError, lambda: tap(_fn, every=0), ("every=...)` is at least 1",), "`every`"
    ),
    "tap: every other, and a half": Misuse(
        TypeError,
        lambda: tap(_fn, every=1.5),  # pyright: ignore
        ("every=...)` takes an integer, not 1.5",),
        "`every`",
    ),
    "tap: ordered by name": Misuse(
        TypeError,
        lambda: tap(_fn, ordered="name"),  # pyright: ignore
        ("ordered=...)` takes `True` or `False`",),
        "`ordered`",
    ),
    "tap: no such name": Misuse(
        UnknownSowError,
        lambda: tap(_fn, names="x")(X),
        ("'x' selects no mark", _THERE),
        "selects no mark",
    ),
    "tap: no such mode": Misuse(
        UnknownSowError,
        lambda: tap(_fn, modes="tangent")(X),
        ("`tap(..., modes=...)`: 'tangent'", "The modes there are: 'primal'"),
        "`modes`",
    ),
    # --- what comes back ---
    "an entry: as an array": Misuse(
        TypeError,
        lambda: S(_fn)(X)[1]["h"] * 2.0,
        ("`intermediates['h']`", "has the mode 'primal': write", "['h']['primal']`."),
        '`intermediates["h"]`',
    ),
    "an entry: its shape": Misuse(
        AttributeError,
        lambda: S(_fn)(X)[1]["h"].shape,  # pyright: ignore
        ("`intermediates['h'].shape`", "write `intermediates['h']['primal'].shape`."),
        '`intermediates["h"]`',
    ),
    # --- statistics ---
    "edges: a number": Misuse(
        ValueError,
        lambda: summarize(X, edges=10),  # pyright: ignore
        (*_EDGES, "not 10"),
        "`edges`",
    ),
    "edges: text": Misuse(
        ValueError,
        lambda: summarize(X, edges="auto"),  # pyright: ignore
        (*_EDGES, "not 'auto'"),
        "`edges`",
    ),
    "edges: decreasing": Misuse(
        ValueError,
        lambda: Summary.empty(edges=[1, 0]),
        ("`Summary.empty", *_EDGES),
        "`edges`",
    ),
    "edges: traced": Misuse(
        ValueError,
        lambda: jax.jit(lambda e: summarize(X, edges=e))(X),
        (*_EDGES, "that are being traced"),
        "`edges`",
    ),
    "summaries with other edges": Misuse(
        SowError,
        lambda: summarize(X) + summarize(X, edges=[0, 1]),
        ("`Summary + Summary`", "different edges", "Pass the same `edges`"),
        "`Summary + Summary`",
    ),
    "summaries with other axes": Misuse(
        SowError,
        lambda: summarize(X) + jax.vmap(summarize)(X[None]),
        ("`Summary + Summary`", "different leading axes", "Use `Summary.merge(axis)`"),
        "`Summary + Summary`",
    ),
    "merge: no such axis": Misuse(
        ValueError,
        lambda: summarize(X).merge(0),
        ("`Summary.merge(axis=0)`: there are 0 axes",),
        "`Summary.merge`",
    ),
    "merge: the name of an axis": Misuse(
        ValueError,
        lambda: summarize(X).merge("batch"),
        ("`Summary.merge(axis='batch')`: there are 0 axes",),
        "`Summary.merge`",
    ),
    "tabulate: all that save_intermediates returned": Misuse(
        TypeError,
        lambda: tabulate(S(_fn)(X)),  # pyright: ignore
        ("`tabulate(intermediates)`", "tuple where", "Write `out, intermediates ="),
        "`tabulate`",
    ),
    "tabulate: the modes of one name": Misuse(
        TypeError,
        lambda: tabulate(S(_fn)(X)[1]["h"]),
        ("`tabulate(intermediates)`", "`tabulate({'h': intermediates['h']})`"),
        "`tabulate`",
    ),
    "tabulate: traced": Misuse(
        SowError,
        lambda: jax.jit(lambda x: len(tabulate(S(_fn)(x)[1])))(X),
        ("`tabulate`: the value of 'h' is a tracer", "Return the intermediates"),
        "is a tracer",
    ),
    # --- rules ---
    "register_rule: a name": Misuse(
        TypeError,
        lambda: register_rule("scan"),  # pyright: ignore
        ("`eqx_sow.register_rule(primitive)` takes a `jax.extend.core.Primitive`",),
        "`register_rule`",
    ),
    "register_rule: not of a function": Misuse(
        TypeError,
        lambda: register_rule(twice_p)(3),  # pyright: ignore
        ("`eqx_sow.register_rule(twice_in_misuse)`", "rule(*args, **params) -> outs"),
        "`register_rule`",
    ),
    "register_rule: a rule of another shape": Misuse(
        SowError,
        lambda: S(_with_a_wrong_rule)(X),
        ("`wrong_in_misuse`", "['float32[]'], where", "Return one array for each out"),
        "`register_rule`",
    ),
    # --- mistakes that are JAX's, or Python's ---
    "a Python if on what is traced": Misuse(
        jax.errors.TracerBoolConversionError,
        lambda: S(lambda x: x if x[0] > 0 else -x)(X),
        ("while tracing the function <lambda> at", "test_misuse.py:"),
        "TracerBoolConversionError",
    ),
    "a tracer that leaks": Misuse(
        jax.errors.UnexpectedTracerError,
        lambda: (S(_leaking)(X), jnp.sin(_Leak.x)),
        ("being traced when the value leaked was _leaking at", "test_misuse.py:"),
        "UnexpectedTracerError",
    ),
    "compiled before": Misuse(
        TypeError,
        lambda: S(jax.jit(_fn).lower(X).compile())(X),
        ("Cannot apply JAX transformations to a function lowered and compiled",),
        "lowered and compiled",
    ),
    "a function that captures itself": Misuse(
        RecursionError,
        _too_deep,
        ("maximum recursion depth",),
        "RecursionError",
    ),
}


def _raised(misuse):
    with pytest.raises(misuse.error) as info:
        misuse.do()
    return info.value


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name):
    misuse = MISUSES[name]
    error = _raised(misuse)
    assert type(error).__name__ == misuse.error.__name__
    said = "\n".join([str(error), *getattr(error, "__notes__", ())])
    for part in misuse.says:
        assert part in said
    if misuse.at is not None:
        assert f"test_misuse.py:{misuse.at.__code__.co_firstlineno + 1}" in said


_EQUINOX = str(pathlib.Path(eqx.__file__).parent)
_OURS = str(pathlib.Path(eqx_sow.__file__).parent)


def _files(error):
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


# JAX raises the first two in frames that it does not hide, Python the last anywhere.
_ANYWHERE = (
    "a tracer that leaks",
    "compiled before",
    "a function that captures itself",
)


@pytest.mark.parametrize("name", [name for name in MISUSES if name not in _ANYWHERE])
def test_traceback_ends_in_the_users_frame(name):
    files = _files(_raised(MISUSES[name]))
    assert not any(file.startswith(_OURS) for file in files)
    # Equinox calls the `__init__` of its modules from a frame of its own.
    while files[-1].startswith(_EQUINOX):
        files.pop()
    assert files[-1] == __file__


def test_traceback_shows_all_if_that_of_jax_does():
    before = jax.config.jax_traceback_filtering  # pyright: ignore
    jax.config.update("jax_traceback_filtering", "off")
    try:
        files = _files(_raised(MISUSES["values: another shape"]))
    finally:
        jax.config.update("jax_traceback_filtering", before)
    assert files[-1].startswith(_OURS)


def test_errors_of_layers_keep_their_frame():
    layer = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    with pytest.raises(TypeError) as info:
        S(layer, capture=True)(X)
    assert _files(info.value)[-1].startswith(_EQUINOX)


ERRORS = (pathlib.Path(__file__).parent.parent / "docs/api/errors.md").read_text()
HEADINGS = re.findall(r"^### (.*)$", ERRORS, re.MULTILINE)
ROWS = re.findall(r"^\| (`.*?|an.*?) \|", ERRORS, re.MULTILINE)


# Arguments that are seldom wrong: the message says all.
MESSAGE_ALONE = {
    "another name",
    "`Buffer`",
    "`Summary.merge`",
    "`every`",
    "`inputs`",
    "`methods`",
    "`mode`",
    "`names`",
    "`ordered`",
    "`register_rule`",
    "`scope`",
    "`spec`",
    "`tag`",
}


@pytest.mark.parametrize("name", MISUSES)
def test_the_docs_have_the_remedy(name):
    page = MISUSES[name].page
    in_headings = sum(page in heading for heading in HEADINGS)
    assert page in ROWS or page in MESSAGE_ALONE or in_headings == 1


def test_all_that_the_docs_list_is_in_the_catalogue():
    assert set(ROWS) <= {misuse.page for misuse in MISUSES.values()}


def test_there_are_enough():
    assert len(MISUSES) >= 60
