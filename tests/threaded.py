"""A program of tests/oracle.py with its values threaded out of it by hand.

`threaded(program)` is a function `F(extra, x) -> (out, taken)`. `taken[name, ""]` holds
the array leaves that are sown there, and `taken[name, "count"]` how often that was.
Each loop and branch of it passes them on as a careful user would write it. What is in
`extra` goes the other way, with the same axes, and changes the value at a mark:

- `extra[name, "eps"]` is added. Its gradient is the cotangent there, and its tangent
  goes on from there.
- `extra[name, "set"]` replaces it, and so does a function in `Edits`; only where
  `extra[name, "here"]` is true, if that is there.

A word makes another such function of one: `WORDS[word](F)`. Words of derivatives put
the derivatives of what is taken beside it, `taken[name, "cotangent"]`.
"""

import functools as ft
from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax

from tests import oracle as orc
from tests.helpers import unmarked


class Edits(NamedTuple):
    primal: dict[str, Callable] = {}
    cotangent: dict[str, Callable] = {}
    # Where a program is edited that has been differentiated.
    keeps_derivative: bool = False


def arrays(tree):
    return [x for x in jtu.tree_leaves(tree) if hasattr(x, "dtype")]


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def floats(leaves):
    return [x for x in leaves if is_float(x)]


def is_constant(kind):
    """Of each array leaf, whether it has no derivative."""
    paths = jtu.tree_leaves_with_path(orc._template(kind))
    return [
        kind == "const" or "const" in jtu.keystr(path) or not is_float(x)
        for path, x in paths
        if hasattr(x, "dtype")
    ]


def _bar(fn):
    """An identity of which `fn` changes the cotangent."""
    identity = jax.custom_vjp(lambda x: x)
    identity.defvjp(lambda x: (x, None), lambda _, ct: (fn(ct),))
    return identity


def _inside(extra, node):
    names = orc.names(node)
    return {k: v for k, v in extra.items() if k[0] in names}


def _both(a, b):
    assert not set(a) & set(b)
    return {**a, **b}


def _mark(name, leaves):
    return {(name, ""): leaves, (name, "count"): jnp.int32(1)}


def _edit(value, name, kind, extra, edits):
    leaves, treedef = jtu.tree_flatten(value)
    old = [x for x in leaves if hasattr(x, "dtype")]
    new = extra.get((name, "set"), old)
    if name in edits.primal:
        new = list(map(edits.primal[name], new))
    if (name, "here") in extra:
        new = [jnp.where(extra[name, "here"], n, o) for n, o in zip(new, old)]
    if edits.keeps_derivative:
        new = [
            n if n is o or not is_float(o) else o + lax.stop_gradient(n - o)
            for n, o in zip(new, old)
        ]
    # There is a zero for each float.
    eps = iter(extra.get((name, "eps"), ()))
    zeros = [next(eps, None) if is_float(x) else None for x in new]
    # A NumPy array in whose place something is planted is a JAX array.
    planted = [kind == orc.NUMPY and n is not o for n, o in zip(new, old)]
    fixed = [f and not p for f, p in zip(is_constant(kind), planted)]
    new = [x if f or e is None else x + e for x, e, f in zip(new, zeros, fixed)]
    if name in edits.cotangent:
        bar = _bar(edits.cotangent[name])
        new = [x if f else bar(x) for x, f in zip(new, fixed)]
    new = iter(new)
    leaves = [next(new) if hasattr(x, "dtype") else x for x in leaves]
    return jtu.tree_unflatten(treedef, leaves)


def _counts(key):
    return key[1] == "count"


def _where(ran, new, old):
    pick = lambda n, o: jnp.where(
        ran.reshape(ran.shape + (1,) * (n.ndim - ran.ndim)), n, o
    )
    return [pick(n, o) for n, o in zip(new, old, strict=True)]


def threaded(program, edits=Edits(), derivative=None):
    """`derivative`: "jvp" or "vjp", if the rules of functions run."""

    def run(node, v, o, extra):
        match node:
            case orc.Op():
                return orc._op(jnp, node, v, o), {}
            case orc.Sow():
                value, taken = orc._sown(jnp, node.kind, v, o), {}
                if node.name is not None:
                    value = _edit(value, node.name, node.kind, extra, edits)
                    taken = _mark(node.name, arrays(value))
                return orc._after_sow(node.kind, v, value), taken
            case orc.Rule():
                return rule(node, v, extra)
            case orc.Seq():
                taken = {}
                for child in node.nodes:
                    v, more = run(child, v, o, extra)
                    taken = _both(taken, more)
                return v, taken
            case orc.Scan():
                n = node.length

                def body(c, x):
                    x, extra = x
                    c, taken = run(node.body, c + x if node.xs else c, v, extra)
                    return c, (c.sum(), taken)

                xs = np.float32(0.1) * orc._spread(jnp, v, n)
                xs = xs, _inside(extra, node)
                c, (ys, taken) = lax.scan(body, v, xs, length=n, reverse=node.reverse)
                return c + (ys * orc._weights(n)).sum(), taken
            case orc.Fori():

                def step(c, x):
                    i, extra = x
                    return run(node.body, orc._bump(jnp, c, i), v, extra)

                xs = jnp.arange(node.length), _inside(extra, node)
                return lax.scan(step, v, xs, length=node.length)
            case orc.Map() | orc.Vmap():
                n = node.length if isinstance(node, orc.Map) else node.size
                xs = orc._spread(jnp, v, n), _inside(extra, node)
                lane = lambda x: run(node.body, x[0], v, x[1])
                each = jax.vmap(lane) if isinstance(node, orc.Vmap) else None
                ys, taken = each(xs) if each else lax.map(lane, xs)
                return v + (ys * orc._weights(n)[:, None]).sum(0), taken
            case orc.While():
                return loop(node, v, _inside(extra, node))
            case orc.Own():
                return own(node, v, _inside(extra, node))
            case orc.Again():
                return again(node, v, _inside(extra, node))
            case orc.Grad():
                grad = gradient(node.body, 1 + node.twice)
                return grad(_inside(extra, node), v)
            case orc.Beside():
                plain = ft.partial(run, o=v)
                first, second = node.body, node.again
                value, grad = (second, first) if node.grad_first else (first, second)
                y, taken = plain(value, v, extra=_inside(extra, value))
                g, more = gradient(grad, 1)(_inside(extra, grad), v)
                return orc._of_runs(y, g), _both(taken, more)
            case orc.Cond():
                return choice(node, v, o, _inside(extra, node))
            case orc.Call():
                return run(node.body, v, o, extra)
        raise AssertionError(node)

    def gradient(body, n):
        # What is planted there has the derivative of what it replaces.
        fn = threaded(body, edits._replace(keeps_derivative=True), "vjp")
        return _gradient_in(fn, n)

    def own(node, v, extra):
        n, is_scan = node.length, node.how == "scan"
        xs = np.float32(0.1) * orc._spread(jnp, v, n)
        trips = jnp.asarray(orc._own_trips(node, v)).astype(jnp.int32)

        def step(i, c, extra):
            goes_on = orc._go_on(orc._as_while(node), i, trips, c)
            new, taken = run(node.body, c + xs[i] if is_scan else c, v, extra)
            # Equinox steps all lanes to the end, and leaves those as they are that
            # are done.
            return jnp.where(goes_on, new, c), taken, eqxi.unvmap_any(goes_on)

        if node.how == "bounded":
            return each_step(step, v, n, extra)
        # Iterations of the backward pass begin with the last one.
        is_back = derivative == "vjp" and node.how != "lax"
        backward = orc.only_backward(node.body) if is_back else ()
        again = orc.run_again(node) if is_back else {}
        c, taken, ys = last_step(step, v, n, extra, backward, again)
        return (c + (ys * orc._weights(n)).sum() if is_scan else c), taken

    def again(node, v, extra):
        n, body = node.length, orc.as_scan(node)
        if derivative is None and node.loop != "whole":
            body = orc.without_marks(body)

        def step(i, c, extra):
            c, taken = run(body, c, c, extra)
            return c, taken, jnp.bool_(True)

        if node.loop == "while":
            # It comes to the first step last.
            c, taken, _ = last_step(step, v, n, extra, orc.names(body))
            return c, taken
        if node.loop != "fori":
            return each_step(step, v, n, extra)
        # Its iteration 0 is of the last step.
        turned = lambda tree: jtu.tree_map(lambda x: x[::-1], tree)
        c, taken = each_step(step, v, n, turned(extra))
        return c, turned(taken)

    def each_step(step, v, n, extra):
        """A loop of which the marks of each step are taken."""

        def one(c, x):
            i, extra = x
            c, taken, ran = step(i, c, extra)
            nothing = jtu.tree_map(jnp.zeros_like, taken)
            return c, jtu.tree_map(lambda x, z: jnp.where(ran, x, z), taken, nothing)

        return lax.scan(one, v, (jnp.arange(n), extra), length=n)

    def last_step(step, v, n, extra, backward, again=MappingProxyType({})):
        """A loop of which, of each mark, the last step in which it runs is taken, or,
        of those that run `backward`, the first one. Only there are zeros added. Those
        in `again` run once more in the steps from this one on, after each later one."""
        eps = {k: x for k, x in extra.items() if k[1].startswith("eps")}
        rest = {k: x for k, x in extra.items() if k not in eps}

        def loop(v, extra_in):
            start = nothing(lambda c: step(0, c, rest)[:2], v)
            last = {k: jnp.full_like(x, -1) for k, x in start.items() if _counts(k)}
            reruns = {k: start[k] for k in last if k[0] in again}

            def one(state, i):
                c, before, last, reruns = state
                c, now, ran = step(i, c, extra_in(i))
                now = {
                    k: jnp.where(ran, x, 0) if _counts(k) else x for k, x in now.items()
                }
                is_new = {
                    k[0]: (x > 0) & ((last[k] < 0) | (k[0] not in backward))
                    for k, x in now.items()
                    if _counts(k)
                }
                after = {
                    k: x + before[k]
                    if _counts(k)
                    else _where(is_new[k[0]], x, before[k])
                    for k, x in now.items()
                }
                last = {k: jnp.where(is_new[k[0]], i, x) for k, x in last.items()}
                after |= {k: after[k] + jnp.where(ran, x, 0) for k, x in reruns.items()}
                reruns = {
                    k: x + jnp.where(i >= again[k[0]], now[k], 0)
                    for k, x in reruns.items()
                }
                return (c, after, last, reruns), c.sum()

            state = v, start, last, reruns
            (c, taken, last, _), ys = lax.scan(one, state, jnp.arange(n))
            return c, taken, ys, last

        if not eps:
            return loop(v, lambda i: rest)[:3]
        last = loop(lax.stop_gradient(v), lambda i: rest)[3]
        at_last = lambda name, i, xs: _where(
            last[name, "count"] == i, xs, list(map(jnp.zeros_like, xs))
        )
        here = lambda i: {k: at_last(k[0], i, x) for k, x in eps.items()}
        return loop(v, lambda i: {**rest, **here(i)})[:3]

    def rule(node, v, extra):
        y, name = orc._with_rule(node, unmarked)(v), node.name
        if name is None:
            return y, {}
        value = [jnp.sin(v) * np.float32(node.c)]
        if derivative is None:
            # As a plain function.
            value = _edit(value[0], name, "v", extra, edits)
            # What is edited has the derivative of what it computes.
            edited = name in edits.primal or (name, "set") in extra
            return value if edited else y, _mark(name, [value])
        stop = lax.stop_gradient
        taken = _mark(name, list(map(stop, value)))
        if node.how == derivative or node.how == "jvp":
            taken |= _mark(f"{name}_rule", [stop(jnp.cos(v))])
        if node.how == "vjp":
            taken |= _mark(f"{name}_ct", [stop(y)])
            for eps in extra.get((f"{name}_ct", "eps"), ()):
                y = y + eps
        return y, taken

    def nothing(fn, *args):
        shapes = jax.eval_shape(lambda *args: fn(*args)[1], *args)
        return jtu.tree_map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def loop(node, v, extra):
        trips = orc._trips(node, v).astype(jnp.int32)

        def body(state):
            i, c, before = state
            c, now = run(node.body, c, v, extra)
            after = {
                key: x + before[key]
                if key[1] == "count"
                else _where(now[key[0], "count"] > 0, x, before[key])
                for key, x in now.items()
            }
            return i + 1, c, after

        go_on = lambda s: orc._go_on(node, s[0], trips, s[1])
        start = nothing(lambda c: run(node.body, c, v, extra), v)
        _, c, taken = lax.while_loop(go_on, body, (0, v, start))
        return c, taken

    def choice(node, v, o, extra):
        ran = [ft.partial(run, b) for b in node.branches]
        zeros = {}
        for fn in ran:
            zeros |= nothing(fn, v, o, extra)

        def with_all(fn):
            def branch(v, o, extra):
                out, taken = fn(v, o, extra)
                return out, {**zeros, **taken}

            return branch

        fns = list(map(with_all, ran))
        pred = orc._pred(node, v, o)
        if len(fns) == 2:
            return lax.cond(pred, fns[1], fns[0], v, o, extra)
        return lax.switch(pred.astype(jnp.int32), fns, v, o, extra)

    return lambda extra, x: run(program, x, x, extra)


# Words. What a word makes of a plain function of one array is in `PLAIN`, what it makes
# of a threaded function in `THREADED`.


weights = orc.weights


def _is_derivative(key):
    return not _counts(key)


def _derived(key, mode):
    return key[0], f"{key[1]}.{mode}".removeprefix(".")


def _with_derivatives(taken, new, mode):
    for key, leaves in new.items():
        key = _derived(key, mode)
        # The outer one of two.
        key = (key[0], f"primal.{key[1]}") if key in taken else key
        taken = {**taken, key: leaves}
    return taken


def _eps(key):
    return key[0], f"eps {key[1]}".strip()


def _tangents_of(taken):
    return {k: floats(x) for k, x in taken.items() if _is_derivative(k)}


def _zero(x):
    return jtu.tree_map(lambda s: jnp.zeros(s.shape, s.dtype), x)


def _zeros_for(fn, extra, x):
    """A zero for all that is taken."""
    shapes = jax.eval_shape(lambda x: fn(extra, x)[1], x)
    return {_eps(k): _zero(floats(s)) for k, s in shapes.items() if _is_derivative(k)}


def threaded_jvp(fn):
    def along(extra, x):
        mine = {k: v for k, v in extra.items() if k[1] != "eps tangent"}
        dots = {
            _eps(k): extra.get(_eps(_derived(k, "tangent")))
            for k in jax.eval_shape(lambda x: fn(mine, x)[1], x)
            if _is_derivative(k)
        }
        dots = {k: d for k, d in dots.items() if d is not None}
        mine |= {k: _zero(d) for k, d in dots.items() if k not in mine}
        direct = {k: v for k, v in mine.items() if k in dots}
        rest = {k: v for k, v in mine.items() if k not in dots}

        def run(direct, x):
            out, taken = fn({**rest, **direct}, x)
            return (out, _tangents_of(taken)), taken

        dots = dots, weights(x.shape)
        _, (dout, new), taken = jax.jvp(run, (direct, x), dots, has_aux=True)
        return dout, _with_derivatives(taken, new, "tangent")

    return along


def threaded_grad(fn):
    """The gradient, and what is taken with the cotangents."""
    return lambda extra, x: _gradients(fn, extra, x, 1)[0]


def _gradient_in(fn, n):
    """The same of a function in a program. What is taken of the second one has names
    of its own."""

    def grad(extra, x):
        (out, taken), *more = _gradients(fn, extra, x, n)
        if not more:
            return out, taken
        ((second, again),) = more
        again = {(f"{k[0]}{orc.RUN}1", k[1]): x for k, x in again.items() if k[1]}
        return orc._of_gradients(out, second), {**taken, **again}

    return grad


def _gradients(fn, extra, x, n):
    """For `n` cotangents of the result: the gradient, and what is taken."""
    mine = {k: v for k, v in extra.items() if k[1] != "eps cotangent"}
    mine = {k: v for k, v in mine.items() if orc.RUN not in k[0] or n == 1}
    zeros = _zeros_for(fn, mine, x)
    eps = {k: mine.get(k, z) for k, z in zeros.items()}
    rest = {k: v for k, v in mine.items() if k not in eps}

    def along(i):
        at = lambda key: (f"{key[0]}{orc.RUN}{i}" if i else key[0], key[1])

        def loss(eps, x):
            out, taken = fn({**rest, **eps}, x)
            total = (out * weights(out.shape) * np.float32(1 + i)).sum()
            for key, leaves in taken.items():
                if _is_derivative(key):
                    outer = extra.get(_eps(at(_derived(key, "cotangent"))), ())
                    for bar, leaf in zip(outer, floats(leaves)):
                        total = total + (bar * leaf).sum()
            return total, taken

        (bars, out), taken = jax.grad(loss, (0, 1), has_aux=True)(eps, x)
        new = {k: bars[_eps(k)] for k in taken if _is_derivative(k)}
        return out, _with_derivatives(taken, new, "cotangent")

    return [along(i) for i in range(n)]


def _like(x):
    """Weights of the type of `x`, on a mesh too."""
    return 0 * lax.stop_gradient(x) + weights(x.shape)


def _plain_jvp(f):
    return lambda x: jax.jvp(f, (x,), (_like(x),))[1]


def _plain_linearize(f):
    return lambda x: jax.linearize(f, x)[1](_like(x))


def _plain_grad(f):
    def loss(x):
        out = f(x)
        return (out * weights(out.shape)).sum()

    return jax.grad(loss)


def _plain_vjp(f):
    def fn(x):
        out, pull = jax.vjp(f, x)
        return pull(_like(out))[0]

    return fn


DEVICES = 2


def _shard_map(explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto

    def word(f):
        mesh = jax.make_mesh(
            (DEVICES,), ("d",), axis_types=(kind,), devices=jax.devices()[:DEVICES]
        )
        spec = jax.sharding.PartitionSpec("d")
        over = jax.sharding.NamedSharding(mesh, spec)

        def fn(x):
            run = jax.shard_map(
                lambda x: f(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec
            )
            # On a mesh with explicit axes, this is part of the type.
            return run(jax.sharding.reshard(x, over) if explicit else x)

        return fn

    return word


def _mapped(axis):
    return lambda fn: jax.vmap(fn, in_axes=(0, axis))


PLAIN = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "checkpoint_dots": lambda f: jax.checkpoint(f, policy=orc.POLICIES["dots"]),
    "vmap": jax.vmap,
    "vmap_last": lambda f: jax.vmap(f, in_axes=-1),
    "shard_map": _shard_map(False),
    "shard_map_explicit": _shard_map(True),
    "jvp": _plain_jvp,
    "linearize": _plain_linearize,
    "grad": _plain_grad,
    "vjp": _plain_vjp,
}

THREADED = {
    "jit": lambda fn: fn,
    "checkpoint": lambda fn: fn,
    "checkpoint_dots": lambda fn: fn,
    "vmap": _mapped(0),
    "vmap_last": _mapped(-1),
    "shard_map": _mapped(0),
    "shard_map_explicit": _mapped(0),
    "jvp": threaded_jvp,
    "linearize": threaded_jvp,
    "grad": threaded_grad,
    "vjp": threaded_grad,
}
FORWARD, REVERSE = ("jvp", "linearize"), ("grad", "vjp")
MAPS = ("vmap", "vmap_last", "shard_map", "shard_map_explicit")
SHARDED = ("shard_map", "shard_map_explicit")
