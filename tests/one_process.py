"""One of several processes that run one program, see `test_processes.py`. Prints what
has to be the same in all of them."""

import hashlib
import json
import sys

import jax


address, count, process, axes = sys.argv[1:]
jax.distributed.initialize(address, int(count), int(process))

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from eqx_sow import (
    compare,
    plant,
    save_intermediates as S,
    sow,
    summarize,
    tabulate,
    tap,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tables import IN_ORDER


kinds = getattr(AxisType, axes)
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(kinds,))
by_example, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
jax.set_mesh(mesh)

# The references are computed by NumPy, which knows of no other process.
rng = np.random.default_rng(0)
weights = [rng.normal(size=s).astype("f4") for s in ((5, 3), (2, 5))]
data = rng.normal(size=(8, 3)).astype("f4")


class Model(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def linear(weight):
    shape = eqx.nn.Linear(*weight.shape[::-1], use_bias=False, key=jax.random.key(0))
    weight = jax.make_array_from_callback(weight.shape, everywhere, lambda i: weight[i])
    return eqx.tree_at(lambda m: m.weight, shape, weight)


def loss(model, xs):
    return jnp.mean(jax.vmap(model)(xs) ** 2)


model = Model(*map(linear, weights))
xs = jax.make_array_from_callback(data.shape, by_example, lambda i: data[i])


def numpy_loss(first=None):
    h = data @ weights[0].T if first is None else first
    out = np.tanh(h) @ weights[1].T
    d_out = 2 * out / out.size
    d_h = d_out @ weights[1] * (1 - np.tanh(h) ** 2)
    return np.mean(out**2), h, out, d_h, d_out


def check(got, want, spec):
    """Each process looks at its shards."""
    assert got.shape == want.shape, (got.shape, want.shape)
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec), got.ndim), (
        got.sharding
    )
    for shard in got.addressable_shards:
        np.testing.assert_allclose(shard.data, want[shard.index], rtol=1e-5, atol=1e-6)


def digest(fn, *args):
    text = eqx.filter_jit(fn).lower(*args).as_text()
    return hashlib.sha256(text.encode()).hexdigest()


same = {}

# Values, gradients, shardings.
grad = eqx.filter_value_and_grad(loss)
saved = S(grad, capture=eqx.nn.Linear)
(value, grads), intermediates = eqx.filter_jit(saved)(model, xs)
want, h, out, d_h, d_out = numpy_loss()
check(value, want, P())
check(grads.first.weight, d_h.T @ data, P())
captured = {"model/first": (h, d_h), "model/second": (out, d_out)}
for name, (primal, cotangent) in captured.items():
    check(intermediates[name]["primal"], primal, P("data"))
    check(intermediates[name]["cotangent"], cotangent, P("data"))
same["names"] = list(intermediates)
same["program"] = digest(saved, model, xs)

# Tables.
same["table"] = tabulate(intermediates)
_, summaries = eqx.filter_jit(S(grad, capture=eqx.nn.Linear, transform=summarize))(
    model, xs
)
same["summaries"] = tabulate(summaries)
check(summaries["model/first"]["primal"].mean.mean(), h.mean(), P())


def blocks(xs):
    def step(x, scale):
        return sow(sow(jnp.tanh(x), "norm") * scale, "mlp"), None

    return jax.lax.scan(step, xs, jnp.array([1, 1, jnp.nan, 1]))[0]


same["first"] = tabulate(eqx.filter_jit(S(blocks))(xs)[1])
assert same["first"].splitlines()[-1].endswith("<- first"), same["first"]

# A comparison of values on all processes with those of one.
close = compare(intermediates, {"model/first": h})
assert close.first is None, close
same["comparison"] = compare(intermediates, {"model/first": h + (h > 0)})
assert same["comparison"].first == ("model/first", "primal")
# No device has the digits of these, or the numbers.
fine = h.astype(np.float64) * (1 + 1e-9)
same["float64"] = compare(intermediates, {"model/first": fine})
assert same["float64"].first is None, same["float64"]
with_wide = {"model/first": np.where(h == h.max(), 1e300, fine)}
assert compare(intermediates, with_wide).first == ("model/first", "primal")
same["summaries compared"] = compare(summaries, summaries)

# What is planted.
planted = plant(loss, {"model/first": jnp.zeros_like}, capture=eqx.nn.Linear)
check(eqx.filter_jit(planted)(model, xs), numpy_loss(np.zeros_like(h))[0], P())
for value in (intermediates["model/first"]["primal"], h):
    planted = plant(loss, {"model/first": value}, capture=eqx.nn.Linear)
    check(eqx.filter_jit(planted)(model, xs), want, P())
clipped = plant(
    eqx.filter_grad(loss),
    {"model/first": lambda ct: 0 * ct},
    mode="cotangent",
    capture=eqx.nn.Linear,
)
check(eqx.filter_jit(clipped)(model, xs).first.weight, 0 * weights[0], P())


# Loops and reducers.
def steps(xs):
    def step(i, x):
        return sow(x / 2, "x")

    return jax.lax.fori_loop(0, 3, step, xs)


halves = [data / 2, data / 4, data / 8]
check(eqx.filter_jit(S(steps))(xs)[1]["x"]["primal"], np.stack(halves), P(None, "data"))
for name, row in IN_ORDER.items():
    fn = S(steps, reduce=row.reducer)
    spec = P(*[None] * len(row.lead), "data") if row.like_the_value else P()
    want = row.by_hand(halves, 0 * data)
    check(eqx.filter_jit(fn)(xs)[1]["x"]["primal"], want, spec)
    same[name] = digest(fn, xs)

# Events: those of the whole program come to the first process, and in a `shard_map`
# each process hears of its own devices.
events = []
tapped = eqx.filter_jit(tap(loss, events.append, capture=eqx.nn.Linear))
check(tapped(model, xs), numpy_loss()[0], P())
jax.effects_barrier()
seen = {e.name: e.value for e in events}
assert len(events) == len(seen)
if jax.process_index() == 0:
    np.testing.assert_allclose(seen.pop("model/first"), h, rtol=1e-5)
    np.testing.assert_allclose(seen.pop("model/second"), out, rtol=1e-5)
assert not seen
same["tapped"] = digest(tap(loss, print, capture=eqx.nn.Linear), model, xs)


# Devices.
def local(xs):
    return sow(xs.sum(0), "sum")[None]


sums = data.reshape(4, 2, 3).sum(1)
sharded = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
check(eqx.filter_jit(S(sharded))(xs)[1]["sum"]["primal"], sums, P("data"))
events.clear()
check(eqx.filter_jit(tap(sharded, events.append))(xs), sums, P("data"))
jax.effects_barrier()
seen = {e.device["data"]: e.value for e in events}
first = 2 * jax.process_index()
assert sorted(seen) == [first, first + 1]
for i, value in seen.items():
    np.testing.assert_allclose(value, sums[i], rtol=1e-5)

print(json.dumps(same))
jax.distributed.shutdown()
