"""`capture=` on models of other libraries, unedited."""

import diffrax
import equinox as eqx
import esm2quinox
import flowjax.bijections
import flowjax.distributions
import flowjax.flows
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import paramax
import pytest
from eqx_sow import Append, Buffer, plant, save_intermediates as S

from .helpers import assert_close, modes_of, with_mode


# Other libraries count on what NumPy does.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("standard_promotion"),
]


def _equimo_vit():
    try:
        from equimo.vision.models import VisionTransformer
    except ImportError:  # before 2.0
        from equimo.models import VisionTransformer
    model = VisionTransformer(
        img_size=8,
        in_channels=3,
        dim=8,
        patch_size=4,
        num_heads=2,
        depths=[2],
        num_classes=5,
        key=jr.key(0),
    )
    return eqx.nn.inference_mode(model)


# --- By hand ---


class Heard(eqx.Module):
    """Writes down what the layer returns."""

    layer: eqx.Module
    heard: list = eqx.field(static=True)

    def __call__(self, *args, **kwargs):
        out = self.layer(*args, **kwargs)
        self.heard.append(out)
        return out

    def __getattr__(self, name):
        return getattr(self.layer, name)


class Nudged(eqx.Module):
    """Adds something to what the layer returns."""

    layer: eqx.Module
    eps: jax.Array

    def __call__(self, *args, **kwargs):
        return self.layer(*args, **kwargs) + self.eps

    def __getattr__(self, name):
        return getattr(self.layer, name)


def _at(model, path):
    for key in path.split("/"):
        if isinstance(model, dict):
            model = model[key]
        else:
            model = model[int(key)] if key.isdigit() else getattr(model, key)
    return model


def _wrap(model, path, wrap):
    where = lambda m: _at(m, path)
    return eqx.tree_at(where, model, replace_fn=wrap)


def _hear(run, model, path, *args):
    heard = []
    run(_wrap(model, path, lambda layer: Heard(layer, heard)), *args)
    (value,) = heard
    return value


def _nudge(loss, model, path, like, *args):
    def by_eps(eps):
        return loss(_wrap(model, path, lambda layer: Nudged(layer, eps)), *args)

    return jax.grad(by_eps)(jnp.zeros(like.shape, like.dtype))


def _check_run(run, model, *args, **options):
    """The output is that of the uncaptured run, under `eqx.filter_jit`."""
    expected = eqx.filter_jit(run)(model, *args)
    out, got = eqx.filter_jit(S(run, **options))(model, *args)
    assert_close(out, expected, rtol=2e-6, atol=2e-6)
    inside, same = S(eqx.filter_jit(run), **options)(model, *args)
    assert_close(inside, expected, rtol=2e-6, atol=2e-6)
    assert_close(same, got)
    return expected, got


def _check_grad(loss, model, *args, **options):
    grad = eqx.filter_grad(loss)
    expected = eqx.filter_jit(grad)(model, *args)
    grads, got = eqx.filter_jit(S(grad, **options))(model, *args)
    assert jtu.tree_structure(grads) == jtu.tree_structure(expected)
    assert_close(grads, expected, rtol=2e-6, atol=2e-6)
    return got


# --- Equinox's own ---


def _mlp():
    model = eqx.nn.MLP(3, 2, 4, 2, key=jr.key(0))
    return lambda m, x: m(x), model, (jnp.array([0.3, -1.2, 0.7]),)


def _attention():
    model = eqx.nn.MultiheadAttention(2, 4, key=jr.key(0))
    return lambda m, x: m(x, x, x), model, (jr.normal(jr.key(1), (3, 4)),)


def _gru():
    def run(m, xs):
        return lax.scan(lambda h, x: (m(x, h), None), jnp.zeros(4), xs)[0]

    return run, eqx.nn.GRUCell(3, 4, key=jr.key(0)), (jr.normal(jr.key(1), (5, 3)),)


def _lstm():
    def run(m, xs):
        init = (jnp.zeros(4), jnp.zeros(4))
        return lax.scan(lambda h, x: (m(x, h), None), init, xs)[0][0]

    return run, eqx.nn.LSTMCell(3, 4, key=jr.key(0)), (jr.normal(jr.key(1), (5, 3)),)


def _convolutions():
    keys = jr.split(jr.key(0), 3)
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, 2, 3, key=keys[0]),
            eqx.nn.PReLU(),
            eqx.nn.AvgPool2d(2, 2),
            eqx.nn.ConvTranspose2d(2, 3, 2, key=keys[1]),
            eqx.nn.GroupNorm(1, 3),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(27, 2, key=keys[2]),
        ]
    )
    layers = [eqx.nn.Lambda(x) if type(x) is eqx.nn.PReLU else x for x in model.layers]
    return (
        lambda m, x: m(x),
        eqx.nn.Sequential(layers),
        (jr.normal(jr.key(1), (1, 6, 6)),),
    )


def _batch_norm():
    def make(key):
        keys = jr.split(key)
        return eqx.nn.Sequential(
            [
                eqx.nn.Linear(3, 4, key=keys[0]),
                eqx.nn.BatchNorm(4, "batch", mode="batch"),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.Linear(4, 2, key=keys[1]),
            ]
        )

    model, state = eqx.nn.make_with_state(make)(jr.key(0))

    def run(m, state, xs):
        f = jax.vmap(m, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        return f(xs, state)[0]

    return run, model, (state, jr.normal(jr.key(1), (6, 3)))


OWN = [_mlp, _attention, _gru, _lstm, _convolutions, _batch_norm]


@pytest.mark.parametrize("make", OWN)
def test_equinox(make):
    run, model, args = make()
    _, got = _check_run(run, model, *args, capture=True)
    loss = lambda m, *args: jnp.sum(run(m, *args) ** 2)
    graded = _check_grad(loss, model, *args, capture=True)
    assert set(graded) == set(got)
    assert_close(with_mode(graded, "primal"), with_mode(got, "primal"))
    assert set(with_mode(graded, "cotangent")) == set(got)


@pytest.mark.parametrize("make", [_mlp, _convolutions])
def test_equinox_by_hand(make):
    run, model, args = make()
    _, got = _check_run(run, model, *args, capture=True)
    loss = lambda m, *args: jnp.sum(run(m, *args) ** 2)
    graded = _check_grad(loss, model, *args, capture=True)
    for name, entry in graded.items():
        path = name.removeprefix("m").removeprefix("/")
        if not path:
            continue
        value = _hear(run, model, path, *args)
        assert_close(got[name]["primal"], value)
        assert_close(entry["cotangent"], _nudge(loss, model, path, value, *args))


def test_equinox_batch_norm_by_hand():
    run, model, (state, xs) = _batch_norm()
    loss = lambda m, *args: jnp.sum(run(m, *args) ** 3)
    got = _check_grad(loss, model, state, xs, capture=eqx.nn.Linear)

    def by_hand(eps):
        h = jax.vmap(model.layers[0])(xs) + eps
        norm = jax.vmap(
            model.layers[1], axis_name="batch", in_axes=(0, None), out_axes=(0, None)
        )
        normal, _ = norm(h, state)
        out = jax.vmap(model.layers[3])(jax.nn.relu(normal))
        return jnp.sum(out**3), (h, out)

    cts, (h, out) = jax.grad(by_hand, has_aux=True)(jnp.zeros((6, 4)))
    assert_close(got["m/layers/0"], {"primal": h, "cotangent": cts}, atol=1e-4)
    assert_close(got["m/layers/3"], {"primal": out, "cotangent": 3 * out**2})


# --- diffrax: a neural ODE ---


class NeuralODE(eqx.Module):
    """As in diffrax's documentation."""

    field: eqx.nn.MLP

    def __call__(self, ts, y0, **options):
        def vector_field(t, y, args):
            return self.field(y)

        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(vector_field),
            t0=ts[0],
            t1=ts[-1],
            y0=y0,
            saveat=diffrax.SaveAt(ts=ts),
            **options,
        )
        return solution.ys


def _ode():
    field = eqx.nn.MLP(2, 2, 4, 1, activation=jnp.tanh, key=jr.key(0))
    return NeuralODE(field), jnp.linspace(0.0, 1.0, 5), jnp.array([1.0, -0.5])


def _euler(model, y0, eps):
    """Four steps by hand, with `eps` added to the first layer's output."""
    first, second = model.field.layers
    y, seen = y0, []
    for i in range(4):
        h = first(y) + eps[i]
        seen.append(h)
        y = y + 0.25 * second(jnp.tanh(h))
    return y, jnp.stack(seen)


EULER = dict(solver=diffrax.Euler(), dt0=0.25)
TSIT5 = dict(
    solver=diffrax.Tsit5(),
    dt0=None,
    stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-3),
)


@pytest.mark.parametrize("options", [EULER, TSIT5], ids=["euler", "tsit5"])
@pytest.mark.parametrize("max_steps", [16, None])
def test_diffrax_output(options, max_steps):
    model, ts, y0 = _ode()
    run = lambda m, ts, y0: m(ts, y0, max_steps=max_steps, **options)
    _, got = _check_run(run, model, ts, y0, capture=eqx.nn.Linear, reduce=Buffer(64))
    names = {"m/field/layers/0", "m/field/layers/1"}
    assert set(got) == names
    counts = {int(got[n]["count"]) for n in names}
    assert len(counts) == 1 and min(counts) >= 4


def test_diffrax_values_of_each_step():
    model, ts, y0 = _ode()
    run = lambda m, ts, y0: m(ts, y0, **EULER)
    _, got = _check_run(run, model, ts, y0, capture=eqx.nn.Linear, reduce=Buffer(6))
    _, seen = _euler(model, y0, jnp.zeros((4, 4)))
    entry = got["m/field/layers/0"]
    assert entry["count"] == 4
    assert_close(entry["primal"][:4], seen)
    assert_close(entry["primal"][4:], jnp.zeros((2, 4)))


def test_diffrax_last_value():
    model, ts, y0 = _ode()
    run = lambda m, ts, y0: m(ts, y0, **EULER)
    _, got = _check_run(run, model, ts, y0, capture=eqx.nn.Linear)
    _, seen = _euler(model, y0, jnp.zeros((4, 4)))
    assert got["m/field/layers/0"]["count"] == 4
    assert_close(got["m/field/layers/0"]["primal"], seen[-1])


def _ode_loss(m, ts, y0, **options):
    return jnp.sum(m(ts, y0, **options)[-1] ** 2)


def test_diffrax_default_adjoint():
    model, ts, y0 = _ode()
    loss = lambda m, ts, y0: _ode_loss(m, ts, y0, max_steps=4, **EULER)
    got = _check_grad(loss, model, ts, y0, capture=eqx.nn.Linear, reduce=Buffer(4))[
        "m/field/layers/0"
    ]
    by_hand = lambda eps: jnp.sum(_euler(model, y0, eps)[0] ** 2)
    _, seen = _euler(model, y0, jnp.zeros((4, 4)))
    assert_close(got["primal"], seen)
    assert got["count"] == 4
    # Cotangents run backward.
    cts = jax.grad(by_hand)(jnp.zeros((4, 4)))
    assert_close(got["cotangent"], cts[::-1])


def test_diffrax_direct_adjoint():
    model, ts, y0 = _ode()
    loss = lambda m, ts, y0: _ode_loss(
        m, ts, y0, max_steps=4, adjoint=diffrax.DirectAdjoint(), **EULER
    )
    got = _check_grad(loss, model, ts, y0, capture=eqx.nn.Linear, reduce=Buffer(4))
    assert modes_of(got)["m/field/layers/0"] >= {"primal", "cotangent"}
    entry = got["m/field/layers/0"]
    by_hand = lambda eps: jnp.sum(_euler(model, y0, eps)[0] ** 2)
    _, seen = _euler(model, y0, jnp.zeros((4, 4)))
    assert_close(entry["primal"], seen)
    cts = jax.grad(by_hand)(jnp.zeros((4, 4)))
    assert_close(entry["cotangent"], cts[::-1])


def test_diffrax_batch():
    model, ts, y0 = _ode()
    y0s = jnp.stack([y0, 2 * y0, -y0])
    run = lambda m, ts, y0s: jax.vmap(lambda y0: m(ts, y0, **EULER))(y0s)
    _, got = _check_run(run, model, ts, y0s, capture=eqx.nn.Linear, reduce=Buffer(4))
    expected = jnp.stack([_euler(model, y, jnp.zeros((4, 4)))[1] for y in y0s])
    assert_close(got["m/field/layers/0"]["primal"], expected)


def test_diffrax_planted():
    model, ts, y0 = _ode()
    run = lambda m, ts, y0: m(ts, y0, **EULER)
    still = plant(run, {"m/field": jnp.zeros_like}, capture=eqx.nn.MLP)
    assert_close(still(model, ts, y0), jnp.tile(y0, (5, 1)))


# --- flowjax: a coupling flow ---


FLOW = "m/bijection/bijection/bijection/*/bijections/0/conditioner"


def _flow():
    flow = flowjax.flows.coupling_flow(
        jr.key(0),
        base_dist=flowjax.distributions.Normal(jnp.zeros(4)),
        flow_layers=3,
        nn_width=5,
        nn_activation=jnp.tanh,
    )
    return flow, jnp.array([0.3, -0.7, 1.1, 0.2])


def _flow_by_hand(flow, x, eps):
    """The values of the last layer of each conditioner, with `eps` added to them."""
    stacked = flow.bijection.bijection.bijection
    inside = flowjax.bijections.Chain
    total, seen = 0.0, []
    for i in range(3):
        chain = jtu.tree_map(lambda a: a[i] if eqx.is_array(a) else a, stacked)
        assert type(chain) is inside
        coupling, permute = chain.bijections
        first, second = coupling.conditioner.layers
        h = second(jnp.tanh(first(x[:2]))) + eps[i]
        seen.append(h)
        transformer = coupling._flat_params_to_transformer(h)
        y, log_det = transformer.transform_and_log_det(x[2:])
        x = permute.transform(jnp.concatenate([x[:2], y]))
        total = total + log_det
    return flow.base_dist.log_prob(x) + total, jnp.stack(seen)


def test_flowjax():
    flow, x = _flow()
    run = lambda m, x: m.log_prob(x)
    out, got = _check_run(run, flow, x, capture=eqx.nn.Linear)
    expected, seen = _flow_by_hand(flow, x, jnp.zeros((3, 4)))
    assert_close(out, expected)
    assert set(got) == {f"{FLOW}/layers/0", f"{FLOW}/layers/1"}
    assert_close(got[f"{FLOW}/layers/1"]["primal"], seen)
    graded = _check_grad(run, flow, x, capture=eqx.nn.Linear)
    cts = jax.grad(lambda e: _flow_by_hand(flow, x, e)[0])(jnp.zeros((3, 4)))
    assert_close(graded[f"{FLOW}/layers/1"], {"primal": seen, "cotangent": cts})


def test_flowjax_batch_and_training_loss():
    flow, x = _flow()
    xs = jnp.stack([x, -x, 2 * x])
    run = lambda m, xs: m.log_prob(xs)
    _, got = _check_run(run, flow, xs, capture=eqx.nn.MLP)
    expected = jnp.stack([_flow_by_hand(flow, x, jnp.zeros((3, 4)))[1] for x in xs])
    assert_close(got[FLOW]["primal"], expected)
    loss = lambda m, xs: -jnp.mean(m.log_prob(xs))
    graded = _check_grad(loss, flow, xs, capture=eqx.nn.MLP)
    assert graded[FLOW]["cotangent"].shape == (3, 3, 4)


def test_flowjax_methods():
    flow, x = _flow()
    run = lambda m, x: m.log_prob(x)
    coupling = flowjax.bijections.Coupling
    _, got = _check_run(run, flow, x, capture=coupling, methods="transform_and_log_det")
    (name,) = got
    assert name == f"{FLOW.removesuffix('/conditioner')}.transform_and_log_det"
    y, log_det = got[name]["primal"]
    assert y.shape == (3, 4) and log_det.shape == (3,)


def test_flowjax_masked_autoregressive():
    flow = flowjax.flows.masked_autoregressive_flow(
        jr.key(0),
        base_dist=flowjax.distributions.Normal(jnp.zeros(3)),
        flow_layers=2,
        nn_width=6,
    )
    x = jnp.array([0.3, -0.7, 1.1])
    run = lambda m, x: m.log_prob(x)
    _, got = _check_run(run, flow, x, capture=True)
    assert got
    _check_grad(run, flow, x, capture=True)
    # Sampling goes through each network more than once.
    sample = lambda m, key: m.sample(key, (2,))
    _check_run(sample, flow, jr.key(1), capture=True, reduce=Append())


# --- equimo: a vision transformer ---


VIT_LAYERS = [
    "patch_embed",
    "patch_embed/proj",
    "blocks/0",
    "blocks/0/blocks/0",
    "blocks/0/blocks/0/attn",
    "blocks/0/blocks/0/mlp",
    "blocks/0/blocks/1",
    "blocks/0/blocks/1/attn",
    "head",
]


def test_equimo_vision_transformer():
    model = _equimo_vit()
    image = jr.normal(jr.key(1), (3, 8, 8))
    run = lambda m, x: m(x, key=jr.key(2))
    loss = lambda m, x: jnp.sum(run(m, x) ** 2)
    out, got = _check_run(run, model, image, capture=True)
    assert len(got) > 40
    assert_close(got["m"]["primal"], out)
    graded = _check_grad(loss, model, image, capture=True)
    assert set(graded) == set(got)
    for path in VIT_LAYERS:
        value = _hear(run, model, path, image)
        assert_close(got[f"m/{path}"]["primal"], value)
        ct = _nudge(loss, model, path, value, image)
        assert_close(graded[f"m/{path}"]["cotangent"], ct)
    assert_close(graded["m"]["cotangent"], 2 * out)


def test_equimo_mapped_layers():
    """Linear layers are mapped over tokens."""
    model = _equimo_vit()
    image = jr.normal(jr.key(1), (3, 8, 8))
    loss = lambda m, x: jnp.sum(m(x, key=jr.key(2)) ** 2)
    got = _check_grad(loss, model, image, capture=eqx.nn.Linear)
    path = "blocks/0/blocks/1/mlp/fc1"
    entry = got[f"m/{path}"]
    assert entry["primal"].shape == entry["cotangent"].shape == (9, 32)
    # One `eps` for all tokens.
    ct = _nudge(loss, model, path, jax.ShapeDtypeStruct((32,), jnp.float32), image)
    assert_close(jnp.sum(entry["cotangent"], 0), ct)


def test_equimo_batch():
    model = _equimo_vit()
    images = jr.normal(jr.key(1), (2, 3, 8, 8))
    run = lambda m, xs: jax.vmap(lambda x: m(x, key=jr.key(2)))(xs)
    _, got = _check_run(run, model, images, capture=lambda path, m: "attn" in path)
    one = lambda m, x: m(x, key=jr.key(2))
    path = "blocks/0/blocks/1/attn"
    expected = jnp.stack([_hear(one, model, path, x) for x in images])
    assert_close(got[f"m/{path}"]["primal"], expected)


def test_equimo_planted():
    """Attention is ablated by path, as if the model were edited."""
    model = _equimo_vit()
    image = jr.normal(jr.key(1), (3, 8, 8))
    run = lambda m, x: m(x, key=jr.key(2))
    path = "blocks/0/blocks/0/attn"
    planted = plant(run, {f"m/{path}": jnp.zeros_like}, capture=True)

    class Zero(eqx.Module):
        layer: eqx.Module

        def __call__(self, *args, **kwargs):
            return jnp.zeros_like(self.layer(*args, **kwargs))

    assert_close(planted(model, image), run(_wrap(model, path, Zero), image))


# --- paramax: layers whose weights are computed ---


def _parametrized():
    linear = eqx.nn.Linear(3, 3, key=jr.key(0))
    where = lambda m: (m.weight, m.bias)
    bias = paramax.NonTrainable(linear.bias)
    weight = paramax.WeightNormalization(linear.weight)
    linear = eqx.tree_at(where, linear, (weight, bias))
    model = eqx.nn.Sequential([linear, eqx.nn.Lambda(jnp.tanh)])
    return model, jnp.array([0.3, -1.2, 0.7])


def test_paramax():
    model, x = _parametrized()
    run = lambda m, x: jnp.sum(paramax.unwrap(m)(x) ** 2)
    _, got = _check_run(run, model, x, capture=eqx.nn.Linear)
    linear = paramax.unwrap(model)[0]
    assert_close(got["m/layers/0"]["primal"], linear(x))
    got = _check_grad(run, model, x, capture=eqx.nn.Linear)
    cotangent = jax.grad(lambda h: jnp.sum(jnp.tanh(h) ** 2))(linear(x))
    assert_close(got["m/layers/0"]["cotangent"], cotangent)
    zero = plant(run, {"m/layers/0": jnp.zeros_like}, capture=eqx.nn.Linear)
    assert zero(model, x) == 0


# --- esm2quinox: blocks that are stacked, and a jitted method under vmap ---


def _esm2_by_hand(model, tokens, nudges):
    """The sum of squares of what one protein's logits are, and what the blocks return,
    to which nudges were added. No block is looked at twice."""
    pad, mask = tokens == 1, tokens == 32
    x = jnp.where((pad | mask)[:, None], 0, jax.vmap(model.embedding)(tokens))
    x = x * (1 - 0.15 * 0.8) / (1 - mask.sum() / (~pad).sum())
    blocks = []
    for i, nudge in enumerate(nudges):
        at = lambda leaf: leaf[i] if eqx.is_array(leaf) else leaf
        x = jax.tree.map(at, model.layers)(x, is_pad=pad) + nudge
        blocks.append(x)
    logits = jax.vmap(model.logit_head)(jax.vmap(model.layer_norm)(x))
    return jnp.sum(logits**2), jnp.stack(blocks)


def test_esm2():
    model = esm2quinox.ESM2(3, 8, 2, token_dropout=True, key=jr.key(0))
    tokens = jnp.asarray(esm2quinox.tokenise(["SP#DERM#N", "FOO"]))
    loss = lambda m, tokens: jnp.sum(jax.vmap(m)(tokens).logits ** 2)
    block = type(model.layers)
    got = _check_grad(loss, model, tokens, capture=block)["m/layers/*"]
    by_hand = jax.vmap(lambda t, nudges: _esm2_by_hand(model, t, nudges))
    nudges = jnp.zeros((2, 3, tokens.shape[1], 8))
    summed = lambda nudges: jnp.sum(by_hand(tokens, nudges)[0])
    near = dict(rtol=1e-4, atol=1e-4)
    assert_close(got["primal"], by_hand(tokens, nudges)[1], **near)
    assert_close(got["cotangent"], jax.grad(summed)(nudges), **near)

    again = plant(loss, {"m/layers/*": got}, capture=block)
    assert_close(again(model, tokens), loss(model, tokens), **near)
    without = plant(loss, {"m/layers/1": jnp.zeros_like}, capture=block)
    without_too = nudges.at[:, 1].set(-got["primal"][:, 1])
    assert_close(without(model, tokens), summed(without_too), **near)


# --- quax: arrays of other types ---


def test_quax():
    # Its older releases, beside the oldest of everything, cannot be imported.
    import quax
    import quax.examples.lora

    linear = eqx.nn.Linear(3, 2, use_bias=False, key=jr.key(0))
    adapted = quax.examples.lora.LoraArray(linear.weight, rank=1, key=jr.key(1))
    model = eqx.tree_at(lambda m: m.weight, linear, adapted)
    x = jnp.array([0.3, -1.2, 0.7])
    saved = quax.quaxify(S(lambda m, x: m(x), capture=True))
    out, got = saved(model, x)
    assert_close(out, linear(x))
    assert_close(got["m"]["primal"], linear(x))
    # The other way round its arrays are not seen. The class is.
    for capture in (True, eqx.nn.Linear):
        out, got = S(quax.quaxify(lambda m, x: m(x)), capture=capture)(model, x)
        assert_close(out, linear(x))
        assert_close(got["Linear"]["primal"], linear(x))


@pytest.mark.parametrize("capture", [True, eqx.nn.Linear])
@pytest.mark.parametrize("bias", [True, False])
def test_quax_hides_the_weights(capture, bias):
    """The biases lead to the model. Without any, its class is its name."""
    import quax
    import quax.examples.lora

    mlp = eqx.nn.MLP(3, 2, 4, 2, use_bias=bias, use_final_bias=bias, key=jr.key(0))
    weights = lambda m: [layer.weight for layer in m.layers]
    lora = [
        quax.examples.lora.LoraArray(w, rank=1, key=jr.key(1)) for w in weights(mlp)
    ]
    x = jnp.array([0.3, -1.2, 0.7])
    want = S(lambda m, x: m(x), capture=capture)(mlp, x)[1]
    f = quax.quaxify(lambda m, x: m(x))
    got = S(f, capture=capture)(eqx.tree_at(weights, mlp, lora), x)[1]
    root = "m" if bias else "MLP"
    assert got.keys() == {root + name[1:] for name in want}
    for name in want:
        assert_close(got[root + name[1:]]["primal"], want[name]["primal"])


# --- the first hour with a model ---
def _esm2():
    model = esm2quinox.ESM2(2, 8, 2, token_dropout=True, key=jr.key(0))
    tokens = jnp.asarray(esm2quinox.tokenise(["SP"])[0])
    return model, tokens, lambda m, tokens: m(tokens)


def _vit():
    image = jr.normal(jr.key(1), (3, 8, 8))
    return _equimo_vit(), image, lambda m, x: m(x, key=jr.key(2))


@pytest.mark.parametrize(
    "make", [_esm2, _vit, lambda: (*_flow(), lambda m, x: m.log_prob(x))]
)
def test_each_name_is_one_module(make):
    """Captures a model as it is, and plants at each of the names."""
    model, x, run = make()
    out, got = S(run, capture=True, reduce=Append())(model, x)
    assert_close(out, run(model, x))
    shapes = lambda value: jtu.tree_map(lambda a: a.shape, value)
    once = {}
    for name, entry in got.items():
        seen = []
        spy = lambda value, seen=seen: (seen.append(shapes(value)), value)[1]
        planted = plant(run, {name: spy}, capture=True)
        eqx.filter_eval_shape(planted, model, x)
        # The functions see one iteration, what comes back is stacked.
        assert seen and all(s == seen[0] for s in seen)
        if len(entry["primal"]) == 1:
            once[name] = {**entry, "primal": entry["primal"][0]}
    assert len(once) >= len(got) - 1
    again = plant(run, once, capture=True)(model, x)
    assert_close(again, out, rtol=1e-4, atol=1e-4)
