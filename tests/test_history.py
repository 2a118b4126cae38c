"""Law 12: what comes back does not depend on what was done before.

JAX and Equinox keep what they have traced with the function objects, and with the
equations of their jaxprs. So a use of one set of function objects, after another use of
the same objects, is compared with the same use of new ones.
"""

import functools as ft
import os
import random
import re
import time
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import pytest
from eqx_sow import Append, Last, plant, save_intermediates, sow
from jax import lax

from tests.helpers import tree_allclose


eqxi = eqx.internal

# Some derivative rules have no sow.
pytestmark = [
    pytest.mark.sample(10),
    pytest.mark.filterwarnings("ignore:.*found no mark"),
]

X = jnp.array([0.3, 0.7])
V = jnp.array([1.0, -0.5])
XS = jnp.stack([X, 2 * X, X - 1])
TS = jnp.array([0.5, 1.0, 1.5])


# Uses: words that are applied from right to left to the function of a program. What a
# suffix of the words makes is one object for all uses of one set of functions.


def _jvp(f):
    return lambda x: jax.jvp(f, (x,), (V,))


def _vjp(f, **kwargs):
    def fn(x):
        out, pull, *aux = jax.vjp(f, x, **kwargs)
        return out, pull(jnp.ones_like(out)), aux

    return fn


def _linearize(f):
    def fn(x):
        out, push = jax.linearize(f, x)
        return out, push(V)

    return fn


def _twice(value):
    return jax.tree.map(lambda x: 2 * x, value)


def _square_sum(value):
    return jax.tree.map(lambda x: jnp.sum(x * x), value)


class _FailedError(Exception):
    pass


def _fail(value):
    raise _FailedError


def _save(**options):
    return lambda f, program: save_intermediates(f, **{**program.options, **options})


def _planted(name="*", **options):
    def wrap(f, program):
        return plant(f, {name: _twice}, capture=program.capture, **options)

    return wrap


def _plant_what_was_saved(f, program):
    saved = _save()(f, program)
    return lambda x: plant(f, saved(x)[1], capture=program.capture)(x)


PLAIN_WORDS = {
    "jit": jax.jit,
    "filter_jit": eqx.filter_jit,
    "checkpoint": jax.checkpoint,
    "grad": jax.grad,
    "grad_aux": lambda f: jax.grad(f, has_aux=True),
    "filter_grad": eqx.filter_grad,
    "jvp": _jvp,
    "vjp": _vjp,
    "vjp_aux": lambda f: _vjp(f, has_aux=True),
    "linearize": _linearize,
    "vmap": jax.vmap,
    "sum": lambda f: lambda x: f(x).sum(),
    "eval_shape": lambda f: lambda x: jax.eval_shape(f, x),
}

LIBRARY_WORDS = {
    "S": _save(),
    "S_names": _save(names="fn"),
    "S_names_rule": _save(names="rule*"),
    "S_tag": _save(tag="other"),
    "S_modes": _save(modes="cotangent"),
    "S_append": _save(reduce=Append()),
    "S_last": _save(reduce=Last()),
    "S_scope": _save(scope=True),
    "S_transform": _save(transform=_square_sum),
    "S_fails": _save(transform=_fail),
    "plant": _planted(),
    "plant_tag": _planted(tag="other"),
    "plant_cotangent": _planted("fn", mode="cotangent"),
    "plant_saved": _plant_what_was_saved,
}

USES = """
    f
    jit
    grad
    jit grad
    grad jit
    jvp
    vmap
    eval_shape grad
    filter_jit filter_grad
    S
    S jit
    S checkpoint
    S grad
    S jit grad
    S grad jit
    S grad checkpoint
    S filter_jit filter_grad
    S vjp
    S jvp
    S linearize
    S_append jvp grad
    S vmap
    S vmap grad
    S grad sum vmap
    eval_shape S grad
    jit S
    jit S grad
    grad_aux S
    grad_aux S jit
    grad_aux checkpoint S
    jit grad_aux S
    jvp S
    vjp_aux S
    linearize S
    vmap S
    vmap grad_aux S
    vmap S grad
    S S
    S grad_aux S
    plant
    plant_saved
    plant_tag
    plant grad
    plant_cotangent grad
    grad plant
    S plant
    S plant grad
    S grad plant
    S_names
    S_names_rule grad
    S_tag
    S_tag grad
    S_tag S
    S_modes grad
    S_append
    S_append grad
    S_last
    S_last grad
    S_scope
    S_transform grad
    S_fails grad
"""
USES = [use.strip() for use in USES.strip().splitlines()]


class Program(NamedTuple):
    make: Callable
    options: dict

    @property
    def capture(self):
        return self.options.get("capture")


class Functions:
    """One set of function objects: those of a program, and what words make of them."""

    def __init__(self, program):
        self._program = program
        self._made = {(): program.make()}

    def _get(self, words):
        if words not in self._made:
            inner, word = self._get(words[1:]), words[0]
            if word in LIBRARY_WORDS:
                made = LIBRARY_WORDS[word](inner, self._program)
            elif word == "jit" and self._program.capture:
                # A `jax.jit` hides the modules in it.
                made = eqx.filter_jit(inner)
            else:
                made = PLAIN_WORDS[word](inner)
            self._made[words] = made
        return self._made[words]

    def use(self, use, how):
        words = () if use == "f" else tuple(use.split())
        try:
            return how(self._get(words), XS if "vmap" in words else X)
        except Exception as error:
            return error


# Programs: each function makes new function objects. `wrap` is `jax.jit`, or nothing.


def _unwrapped(f):
    return f


def _loss(inner, wrap):
    inner = wrap(inner)
    return lambda x: jnp.sum(inner(x) * x)


def jvp_function(wrap):
    @jax.custom_jvp
    def g(x):
        return sow(jnp.sin(x), "fn") * sow(x, "o", tag="other")

    @g.defjvp
    def _(primals, tangents):
        (x,), (v,) = primals, tangents
        return jnp.sin(x) * x, 0.8 * v * jnp.cos(x)

    return _loss(g, wrap)


def jvp_rule_that_calls_the_function(wrap):
    @jax.custom_jvp
    def g(x):
        return sow(jnp.sin(x), "fn") * sow(x, "o", tag="other")

    @g.defjvp
    def _(primals, tangents):
        (x,), (v,) = primals, tangents
        return g(x), 0.8 * v * jnp.cos(x)

    return _loss(g, wrap)


def jvp_rule(wrap):
    @jax.custom_jvp
    def g(x):
        return jnp.sin(x)

    @g.defjvp
    def _(primals, tangents):
        (x,), (v,) = primals, tangents
        y = sow(jnp.sin(x), "rule") + sow(x, "o", tag="other")
        return y - x, 0.8 * v * sow(jnp.cos(x), "rule_slope")

    return _loss(g, wrap)


def jvp_both(wrap):
    @jax.custom_jvp
    def g(x):
        return sow(jnp.sin(x), "fn") * sow(x, "o", tag="other")

    @g.defjvp
    def _(primals, tangents):
        (x,), (v,) = primals, tangents
        y = sow(jnp.sin(x), "fn") * sow(x, "o", tag="other")
        return y, sow(0.8 * v * jnp.cos(x), "rule")

    return _loss(g, wrap)


def defjvps(wrap):
    @jax.custom_jvp
    def g(x, y):
        return sow(jnp.sin(x), "fn") * y

    g.defjvps(
        lambda v, out, x, y: v * sow(jnp.cos(x), "rule_x"),
        lambda v, out, x, y: v * sow(out, "rule_y") * sow(y, "o", tag="other"),
    )
    return _loss(lambda x: g(x, x + 1), wrap)


def vjp_fwd(wrap):
    @jax.custom_vjp
    def g(x):
        return jnp.sin(x)

    def fwd(x):
        y = sow(jnp.sin(x), "rule") + sow(x, "o", tag="other")
        return y - x, x

    g.defvjp(fwd, lambda x, ct: (ct * x,))
    return _loss(g, wrap)


def vjp_bwd(wrap):
    @jax.custom_vjp
    def g(x):
        return sow(jnp.sin(x), "fn")

    def bwd(x, ct):
        return (sow(ct * x, "rule") * sow(x, "o", tag="other"),)

    g.defvjp(lambda x: (jnp.sin(x), x), bwd)
    return _loss(g, wrap)


def vjp_both(wrap):
    @jax.custom_vjp
    def g(x):
        return sow(jnp.sin(x), "fn") * sow(x, "o", tag="other")

    def fwd(x):
        return sow(jnp.sin(x), "fn") * x, (x, sow(jnp.cos(x), "rule_residual"))

    def bwd(residual, ct):
        x, slope = residual
        return (sow(ct * slope, "rule") * sow(x, "o", tag="other"),)

    g.defvjp(fwd, bwd)
    return _loss(g, wrap)


def vjp_nondiff(wrap):
    @ft.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def g(h, x):
        return h(x)

    def fwd(h, x):
        return h(x), x

    def bwd(h, x, ct):
        return (ct * sow(jnp.cos(x), "rule"),)

    g.defvjp(fwd, bwd)
    h = lambda x: sow(jnp.sin(x), "fn") * sow(x, "o", tag="other")

    return _loss(lambda x: g(h, x), wrap)


def custom_gradient(wrap):
    @jax.custom_gradient
    def g(x):
        def pull(ct):
            return ct * sow(jnp.cos(x), "rule") * sow(x, "o", tag="other")

        return sow(jnp.sin(x), "fn"), pull

    return _loss(g, wrap)


def filter_custom_vjp(wrap):
    @eqx.filter_custom_vjp
    def g(x, scale):
        return sow(jnp.sin(x), "fn") * scale

    @g.def_fwd
    def _(perturbed, x, scale):
        slope = sow(jnp.cos(x), "rule_residual") * sow(x, "o", tag="other")
        return sow(jnp.sin(x), "fn") * scale, slope

    @g.def_bwd
    def _(slope, ct, perturbed, x, scale):
        return sow(ct * slope, "rule") * scale

    return _loss(lambda x: g(x, 2.0), wrap)


def filter_custom_jvp(wrap):
    @eqx.filter_custom_jvp
    def g(x, *, scale):
        return sow(jnp.sin(x), "fn") * scale

    @g.def_jvp
    def _(primals, tangents, *, scale):
        (x,), (v,) = primals, tangents
        slope = sow(jnp.cos(x), "rule") * sow(x, "o", tag="other")
        return g(x, scale=scale), v * slope

    return _loss(lambda x: g(x, scale=2.0), wrap)


def checkpointed_while(wrap):
    def body(carry):
        i, x = carry
        return i + 1, sow(jnp.sin(x), "fn") * sow(x + 1, "o", tag="other")

    def g(x):
        return eqxi.while_loop(
            lambda carry: carry[0] < 3, body, (0, x), max_steps=4, kind="checkpointed"
        )[1]

    return _loss(g, wrap)


def checkpointed_scan(wrap):
    def body(x, t):
        x = sow(jnp.sin(x), "fn") * sow(x + t, "o", tag="other")
        return x, x

    def g(x):
        return eqxi.scan(body, x, TS, kind="checkpointed")[0]

    return _loss(g, wrap)


def _custom(kind, name="fn"):
    if kind == "jvp":

        @jax.custom_jvp
        def g(x):
            return sow(jnp.sin(x), name) * sow(x, "o", tag="other")

        @g.defjvp
        def _(primals, tangents):
            (x,), (v,) = primals, tangents
            return g(x), v * sow(jnp.cos(x), "rule")

    else:

        @jax.custom_vjp
        def g(x):
            return sow(jnp.sin(x), name) * sow(x, "o", tag="other")

        def fwd(x):
            return g(x), sow(jnp.cos(x), "rule")

        g.defvjp(fwd, lambda slope, ct: (sow(ct * slope, "rule_back"),))
    return g


def rule_beside_a_sow(wrap, kind):
    g = _custom(kind, "inside")
    return _loss(lambda x: g(sow(2 * x, "fn")), wrap)


def rule_in_scan(wrap, kind):
    g = _custom(kind)
    body = wrap(lambda x, t: (g(x) * t, None))
    return _loss(lambda x: lax.scan(body, x, TS)[0], _unwrapped)


def rule_in_jit_in_scan(wrap, kind):
    g = jax.jit(_custom(kind))
    body = lambda x, t: (g(x) * t, None)
    return _loss(lambda x: lax.scan(body, x, TS)[0], wrap)


def rule_in_cond(wrap, kind):
    g, flip = _custom(kind), lambda x: -x
    return _loss(lambda x: lax.cond(x[0] > 0, g, flip, x), wrap)


def rule_in_checkpoint(wrap, kind):
    return _loss(jax.checkpoint(_custom(kind)), wrap)


def rule_in_while(wrap):
    g = _custom("jvp")

    def inner(x):
        body = lambda carry: (carry[0] + 1, g(carry[1]))
        return lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))[1]

    return _loss(inner, wrap)


def rule_of_a_rule(wrap):
    inner = _custom("jvp")

    @jax.custom_jvp
    def g(x):
        return jnp.sin(inner(x))

    @g.defjvp
    def _(primals, tangents):
        return jax.jvp(lambda x: jnp.sin(inner(x)), primals, tangents)

    return _loss(g, wrap)


def twice_the_same(wrap):
    g = wrap(_custom("jvp"))
    return _loss(lambda x: g(x) * g(x + 1), _unwrapped)


def jvp_rule_that_calls_a_jitted_function(wrap):
    helper = jax.jit(lambda x: sow(jnp.cos(x), "rule") * sow(x, "o", tag="other"))

    @jax.custom_jvp
    def g(x):
        return jnp.sin(x)

    @g.defjvp
    def _(primals, tangents):
        (x,), (v,) = primals, tangents
        return jnp.sin(x), v * helper(x)

    return _loss(g, wrap)


def vjp_rule_that_calls_a_jitted_function(wrap):
    helper = jax.jit(lambda x: sow(jnp.sin(x), "fn") * sow(x, "o", tag="other"))
    backward = jax.jit(lambda x, ct: sow(ct * x, "rule"))

    @jax.custom_vjp
    def g(x):
        return helper(x)

    g.defvjp(lambda x: (helper(x), x), lambda x, ct: (backward(x, ct),))
    return _loss(g, wrap)


def silent_rule(wrap):
    @jax.custom_jvp
    def relu(x):
        return jnp.maximum(x, 0.0)

    relu.defjvps(lambda v, out, x: jnp.where(x > 0, v, 0.0))
    relu = jax.jit(relu)

    def g(x):
        return relu(sow(x * 3, "fn")) + relu(sow(-x, "o", tag="other"))

    return _loss(g, wrap)


def silent_vjp_rule(wrap):
    @jax.custom_vjp
    def clip(x):
        return x

    clip.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -0.5, 0.5),))

    def g(x):
        return clip(sow(jnp.sin(x), "fn")) * sow(clip(x), "o", tag="other")

    return _loss(g, wrap)


def scan(wrap):
    def body(x, t):
        return sow(jnp.sin(x), "fn") * sow(x * t, "o", tag="other"), x

    body = wrap(body)
    return _loss(lambda x: lax.scan(body, x, TS)[0], _unwrapped)


def while_loop(wrap):
    def body(carry):
        i, x = carry
        return i + 1, sow(jnp.sin(x), "fn") * sow(x, "o", tag="other")

    less = lambda carry: carry[0] < 3
    return _loss(lambda x: lax.while_loop(less, body, (0, x))[1], wrap)


def fori_loop(wrap):
    body = lambda i, x: sow(jnp.sin(x), "fn") * sow(x, "o", tag="other")
    return _loss(lambda x: lax.fori_loop(0, 3, body, x), wrap)


def cond(wrap):
    yes = lambda x: sow(jnp.sin(x), "fn") * sow(x, "o", tag="other")
    no = lambda x: sow(jnp.cos(x), "no")
    return _loss(lambda x: lax.cond(x[0] > 0, yes, no, x), wrap)


def switch(wrap):
    branches = [
        lambda x: sow(jnp.sin(x), "fn"),
        lambda x: sow(x * x, "fn") * sow(x, "o", tag="other"),
        wrap(lambda x: sow(jnp.cos(x), "third")),
    ]
    index = lambda x: (x[1] > 0).astype("int32")
    return _loss(lambda x: lax.switch(index(x), branches, x), wrap)


def checkpoint(wrap):
    inner = lambda x: sow(jnp.sin(x), "fn") * sow(jnp.exp(x), "o", tag="other")
    inner = jax.checkpoint(wrap(inner))
    return _loss(lambda x: inner(jnp.cos(x)), wrap)


def vmapped(wrap):
    row = wrap(lambda t, x: sow(jnp.sin(t * x), "fn") * sow(x, "o", tag="other"))
    return _loss(lambda x: jax.vmap(row, (0, None))(TS, x).sum(0), wrap)


def jitted_twice(wrap):
    inner = wrap(lambda x: sow(jnp.sin(x), "fn") * sow(x, "o", tag="other"))

    @jax.jit
    def outer(x):
        return inner(x) + 1

    return _loss(lambda x: inner(outer(x)), wrap)


def eqx_while_loop(wrap, kind):
    def body(carry):
        i, x = carry
        return i + 1, sow(jnp.sin(x), "fn") * sow(x, "o", tag="other")

    less = lambda carry: carry[0] < 3
    run = ft.partial(eqxi.while_loop, less, body, max_steps=4, kind=kind)
    return _loss(lambda x: run((0, x))[1], wrap)


class Layer(eqx.Module):
    weight: jax.Array
    activation: Callable
    name: str

    def __call__(self, x):
        return self.activation(sow(self.weight * x, self.name))


class Net(eqx.Module):
    layers: list

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return sow(x, "o", tag="other")


def module(wrap, activation=jnp.tanh):
    net = Net([Layer(V, jnp.sin, "fn"), Layer(X + 1, activation, "rule")])

    def inner(net, x):
        return net(x)

    inner = eqx.filter_jit(inner) if wrap is jax.jit else inner
    return lambda x: jnp.sum(inner(net, x))


def module_with_a_rule(wrap):
    @jax.custom_jvp
    def activation(x):
        return sow(jnp.sin(x), "in_function")

    @activation.defjvp
    def _(primals, tangents):
        (x,), (v,) = primals, tangents
        return jnp.sin(x), v * sow(jnp.cos(x), "in_rule")

    return module(wrap, activation)


def module_with_relu(wrap):
    return module(wrap, jax.nn.relu)


def _programs(*makes, **options):
    return {
        f"{make.__name__}-{name}": Program(ft.partial(make, wrap), options)
        for make in makes
        for name, wrap in (("plain", _unwrapped), ("jit", jax.jit))
    }


def _of_kinds(make, *kinds, **options):
    return {
        f"{make.__name__}-{kind}-{name}": Program(ft.partial(make, wrap, kind), options)
        for kind in kinds
        for name, wrap in (("plain", _unwrapped), ("jit", jax.jit))
    }


WITH_RULES = {
    **_programs(
        jvp_function,
        jvp_rule_that_calls_the_function,
        jvp_rule,
        jvp_both,
        defjvps,
        vjp_fwd,
        vjp_bwd,
        vjp_both,
        vjp_nondiff,
        custom_gradient,
        filter_custom_vjp,
        filter_custom_jvp,
        rule_in_while,
        rule_of_a_rule,
        jvp_rule_that_calls_a_jitted_function,
        vjp_rule_that_calls_a_jitted_function,
        silent_rule,
        silent_vjp_rule,
    ),
    **_of_kinds(rule_beside_a_sow, "jvp", "vjp"),
    **_of_kinds(rule_in_scan, "jvp", "vjp"),
    **_of_kinds(rule_in_jit_in_scan, "jvp", "vjp"),
    **_of_kinds(rule_in_cond, "jvp", "vjp"),
    **_of_kinds(rule_in_checkpoint, "jvp", "vjp"),
    **_programs(twice_the_same, reduce=Append()),
    **_programs(module_with_a_rule, module_with_relu, capture=True),
}

CHECKPOINTED = _programs(checkpointed_while, checkpointed_scan)

WITHOUT_RULES = {
    **_programs(scan, while_loop, fori_loop, cond, switch, checkpoint, vmapped),
    **_programs(jitted_twice, reduce=Append()),
    **_of_kinds(eqx_while_loop, "lax", "bounded"),
    **_programs(module, capture=True),
}

PROGRAMS = {**WITH_RULES, **CHECKPOINTED, **WITHOUT_RULES}


# How a function is run.


class Traced(NamedTuple):
    order: list
    structure: jax.tree_util.PyTreeDef
    static: list
    jaxpr: jexc.ClosedJaxpr
    x: jax.Array

    def text(self):
        return re.sub("0x[0-9a-f]+", "", str(self.jaxpr))

    def values(self):
        try:
            return jax.jit(jexc.jaxpr_as_fun(self.jaxpr))(self.x)
        except Exception as error:
            # A forward derivative of a jitted `custom_vjp` function can be traced.
            return error


def _order(tree):
    """The keys of all dicts as they come: a tree structure has them sorted."""
    if isinstance(tree, dict):
        return [(key, _order(value)) for key, value in tree.items()]
    if isinstance(tree, tuple | list):
        return [_order(value) for value in tree]
    return None


def traced(fn, x):
    """Compiling is most of the time that a use takes, so most of them are traced."""
    kept = []

    def run(x):
        out = fn(x)
        leaves, structure = jax.tree.flatten(out)
        arrays, static = eqx.partition(leaves, eqx.is_array)
        kept.append((_order(out), structure, static))
        return arrays

    jaxpr = jax.make_jaxpr(run)(x)
    return Traced(*kept[-1], jaxpr, x)


def eager(fn, x):
    return jax.block_until_ready(fn(x))


def _differ(got, want):
    """What is different, in a few words, or `None`."""
    if isinstance(got, Exception) or isinstance(want, Exception):
        if type(got) is type(want):
            return None
        return f"{_short(got)} instead of {_short(want)}"
    if not isinstance(want, Traced):
        if _order(got) != _order(want):
            return f"{_order(got)} instead of {_order(want)}"
        return None if tree_allclose(got, want, weak=True) else f"{got} not {want}"
    if got.order != want.order:
        return f"{_names(got.order)} instead of {_names(want.order)}"
    if got.structure != want.structure:
        return f"{got.structure} instead of {want.structure}"
    if not tree_allclose(got.static, want.static):
        return f"{got.static} instead of {want.static}"
    if got.jaxpr.out_avals != want.jaxpr.out_avals:
        return f"{got.jaxpr.out_avals} instead of {want.jaxpr.out_avals}"
    if got.text() == want.text() and tree_allclose(got.jaxpr.consts, want.jaxpr.consts):
        return None
    return _differ(got.values(), want.values())


def _names(order):
    """The names and modes in the dicts of an order."""
    if order is None:
        return []
    if order and isinstance(order[0], tuple):
        return [(name, _names(modes)) if modes else name for name, modes in order]
    return [names for inner in order if (names := _names(inner))]


def _short(result):
    if isinstance(result, Exception):
        return f"{type(result).__name__}: {str(result)[:120]}"
    return _names(result.order if isinstance(result, Traced) else _order(result))


@ft.cache
def _fresh(name, use, how):
    return Functions(PROGRAMS[name]).use(use, how)


def _after(name, history, use, how=traced):
    """How `use` differs after `history` on the same objects."""
    functions = Functions(PROGRAMS[name])
    for earlier in history:
        functions.use(earlier, how)
    return _differ(functions.use(use, how), _fresh(name, use, how))


def _check(name, first, seconds, how=traced):
    """`first`, then `seconds` one after the other on the same objects."""
    functions, history, wrong = Functions(PROGRAMS[name]), [first], []
    functions.use(first, how)
    for use in seconds:
        difference = _differ(functions.use(use, how), _fresh(name, use, how))
        if difference:
            alone = (e for e in history if _after(name, [e], use, how))
            cause = next(alone, history)
            wrong.append(f"{use!r} after {cause!r}: {difference}")
        history.append(use)
    assert not wrong, f"{name}\n" + "\n".join(wrong)


# What fills caches in different ways, before anything else.
FIRST = ("grad", "S grad", "grad_aux S", "jvp S", "grad plant")
# What shows whether the rules have their sows.
DERIVATIVES = ("S grad", "S jvp", "S grad jit", "S vmap grad", "S_append grad")


def _plan(programs, first, sampled, seconds):
    """Some first uses of each program, each with some second uses."""
    for name in programs:
        chosen = random.Random(name)
        # The same for each first use: each one has to be run on new objects too.
        after = [chosen.choice(DERIVATIVES), *chosen.sample(USES, seconds - 1)]
        for use in dict.fromkeys((*first, *chosen.sample(USES, sampled))):
            chosen.shuffle(after)
            yield pytest.param(name, use, tuple(after), id=f"{name}-{use}")


def _wrapped(programs, how):
    return [name for name in programs if name.endswith(how)]


# About one in seventy of all pairs, for the sake of time.
@pytest.mark.parametrize(
    "name, first, seconds",
    [
        *_plan(_wrapped(WITH_RULES, "jit"), FIRST, sampled=1, seconds=4),
        *_plan(_wrapped(WITH_RULES, "plain"), ("grad_aux S",), sampled=1, seconds=4),
        *_plan(_wrapped(CHECKPOINTED, "jit"), ("grad_aux S",), sampled=0, seconds=2),
        *_plan(WITHOUT_RULES, (), sampled=2, seconds=3),
    ],
)
def test_what_was_done_before_does_not_matter(name, first, seconds):
    _check(name, first, seconds)


@pytest.mark.parametrize("name", _wrapped(WITH_RULES, "jit")[::2])
def test_nor_if_it_is_not_only_traced(name):
    chosen = random.Random(f"{name} eager")
    _check(name, chosen.choice(FIRST), [chosen.choice(DERIVATIVES)], eager)


@pytest.mark.parametrize("how", [traced, eager])
@pytest.mark.parametrize(
    "impure",
    [
        lambda n, x: sow(x, f"fn{n}"),
        lambda n, x: sow(x, "fn") if n else x,
        lambda n, x: sow((n + 1.0) * x, "fn"),
        lambda n, x: sow(x, "fn") + n,
        lambda n, x: (sow(x, "fn"), n),
        lambda n, x: sow(x[n:], "fn"),
        lambda n, x: sow(x > n, "fn") if n else sow(x, "fn"),
        lambda n, x: 1 / n * sow(x, "fn"),
    ],
)
def test_a_dependence_on_history_is_found(impure, how, monkeypatch, request):
    def make():
        calls = []

        def f(x):
            calls.append(x.shape)
            return impure(len(calls) - 1, x)

        return f

    name = request.node.name
    monkeypatch.setitem(PROGRAMS, name, Program(make, {}))
    with pytest.raises(AssertionError, match="'S' after 'f'"):
        _check(name, "f", ["S"], how)


@pytest.mark.fuzz
def test_all_pairs_within_a_budget():
    """`FUZZ_SEED` for other pairs first, `FUZZ_SECONDS` for more, 15000 for all."""
    chosen = random.Random(int(os.environ.get("FUZZ_SEED", "1000")))
    end = time.monotonic() + float(os.environ.get("FUZZ_SECONDS", "60"))
    firsts = {name: chosen.sample(USES, len(USES)) for name in PROGRAMS}
    for start in range(0, len(USES), 4):
        for name in chosen.sample(list(PROGRAMS), len(PROGRAMS)):
            for first in firsts[name][start : start + 4]:
                if time.monotonic() > end:
                    return
                _check(name, first, chosen.sample(USES, len(USES)))
            _fresh.cache_clear()
            jax.clear_caches()
