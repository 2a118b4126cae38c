"""Runs a program without compiling it: traces it, then runs its operations one by one,
the loops and branches in Python. XLA takes longer to compile a random program than
anything else does, and two programs have most of their operations in common."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np


def unrolled(fn):
    """Like `equinox.filter_jit(fn)`, of array arguments."""

    def call(*args):
        closed, shapes, static = eqx.filter_make_jaxpr(fn)(*args)
        outs = _run(closed.jaxpr, closed.consts, jtu.tree_leaves(args))
        arrays = jtu.tree_unflatten(jtu.tree_structure(shapes), outs)
        return eqx.combine(arrays, static)

    return call


def _run(jaxpr, consts, args):
    env = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, args))
    read = lambda v: v.val if isinstance(v, jax.extend.core.Literal) else env[v]
    for eqn in jaxpr.eqns:
        ins = [read(v) for v in eqn.invars]
        outs = _RULES.get(eqn.primitive.name, _bind)(eqn, *ins)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [_out(v, read(v)) for v in jaxpr.outvars]


def _out(v, value):
    # What no operation makes: it has no buffer.
    return np.zeros(v.aval.shape, v.aval.dtype) if v.aval.dtype == _FLOAT0 else value


_FLOAT0 = jax.dtypes.float0


def _call(eqn, *ins):
    (inner,) = (
        v for k, v in eqn.params.items() if k in ("jaxpr", "call_jaxpr", "call")
    )
    return _run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), ins)


def _bind(eqn, *ins):
    outs = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(eqn.params))
    return outs if eqn.primitive.multiple_results else [outs]


def _cond(eqn, index, *ins):
    branches = eqn.params["branches"]
    branch = branches[np.clip(int(index), 0, len(branches) - 1)]
    return _run(branch.jaxpr, branch.consts, ins)


def _while(eqn, *ins):
    test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    of_test, of_body, carry = ins[:n], ins[n : n + m], list(ins[n + m :])
    while True:
        # One for each lane, where lanes differ.
        goes_on = np.asarray(_run(test.jaxpr, test.consts, [*of_test, *carry])[0])
        if not goes_on.any():
            return carry
        new = _run(body.jaxpr, body.consts, [*of_body, *carry])
        carry = [_where(goes_on, *pair) for pair in zip(new, carry, strict=True)]


def _where(lanes, x, y):
    x, y = np.asarray(x), np.asarray(y)
    return np.where(lanes.reshape(lanes.shape + (1,) * (x.ndim - lanes.ndim)), x, y)


def _scan(eqn, *ins):
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    if "ft_in" in eqn.params:
        n, m, _ = map(len, eqn.params["ft_in"].unpack())
    else:
        n, m = eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, xs = ins[:n], ins[n : n + m], ins[n + m :]
    rows = []
    order = range(length)[:: -1 if eqn.params["reverse"] else 1]
    for i in order:
        at = [np.asarray(x)[i] for x in xs]
        outs = _run(body.jaxpr, body.consts, [*consts, *carry, *at])
        carry, row = outs[:m], outs[m:]
        rows.append(row)
    if not rows:
        empty = [np.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars[m:]]
        return [*carry, *empty]
    rows = rows[:: -1 if eqn.params["reverse"] else 1]
    return [*carry, *(np.stack(column) for column in zip(*rows))]


def _compiled(eqn, *ins):
    return jax.jit(lambda *ins: [*_bind(eqn, *ins)])(*ins)


def _of_equinox(eqn, *ins):
    """Its primitives use the methods of JAX's arrays."""
    return _bind(eqn, *map(jnp.asarray, ins))


def _broadcast(eqn, x, *_):
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    x = np.asarray(x)
    middle = [1] * len(shape)
    for size, dim in zip(x.shape, dims, strict=True):
        middle[dim] = size
    return [np.broadcast_to(x.reshape(middle), shape)]


def _select(eqn, which, *cases):
    if len(cases) > 2 or np.asarray(which).dtype != bool:
        return _bind(eqn, which, *cases)
    return [np.where(np.asarray(which), np.asarray(cases[1]), np.asarray(cases[0]))]


def _numpy(fn):
    def rule(eqn, *ins):
        with np.errstate(all="ignore"):  # infinite here as in JAX, which says nothing
            return [np.asarray(fn(*map(np.asarray, ins), eqn.params))]

    return rule


_CALLS = (
    *("jit", "pjit", "closed_call", "eval_jaxpr", "checkpoint", "remat2"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vmap_call"),
)
_RULES = {
    **dict.fromkeys(_CALLS, _call),
    "broadcast_in_dim": _broadcast,
    "select_n": _select,
    "shard_map": _compiled,
    **dict.fromkeys(("maybe_set", "select_if_vmap"), _of_equinox),
    "add": _numpy(lambda x, y, _: np.add(x, y)),
    "add_any": _numpy(lambda x, y, _: np.add(x, y)),
    "mul": _numpy(lambda x, y, _: np.multiply(x, y)),
    "rev": _numpy(lambda x, p: np.flip(x, p["dimensions"])),
    **dict.fromkeys(("stop_gradient", "reshard"), _numpy(lambda x, _: x)),
    "transpose": _numpy(lambda x, p: np.transpose(x, p["permutation"])),
    "reduce_sum": _numpy(lambda x, p: np.sum(x, tuple(p["axes"]), dtype=x.dtype)),
    "cond": _cond,
    "while": _while,
    "scan": _scan,
}
