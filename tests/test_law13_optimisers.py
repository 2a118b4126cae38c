"""A training step by each optimiser of optax, whose states hold trees like models."""

import equinox as eqx
import jax
import optax
import pytest
from eqx_sow import Last, save_intermediates as S, sow

from tests.helpers import assert_close
from tests.meeting import at, make_net, mapped, Run, X


PARTS = ("layers/0", "act", "layers/1", "")
OPTIMISERS = {
    "adabelief": lambda: optax.adabelief(0.1),
    "adadelta": lambda: optax.adadelta(0.1),
    "adafactor": lambda: optax.adafactor(0.1),
    "adagrad": lambda: optax.adagrad(0.1),
    "adam": lambda: optax.adam(0.1),
    "adamax": lambda: optax.adamax(0.1),
    "adamaxw": lambda: optax.adamaxw(0.1),
    "adamw": lambda: optax.adamw(0.1),
    "adan": lambda: optax.adan(0.1),
    "amsgrad": lambda: optax.amsgrad(0.1),
    "fromage": lambda: optax.fromage(0.1),
    "lamb": lambda: optax.lamb(0.1),
    "lars": lambda: optax.lars(0.1),
    "lbfgs": lambda: optax.lbfgs(),
    "lion": lambda: optax.lion(0.1),
    "nadam": lambda: optax.nadam(0.1),
    "nadamw": lambda: optax.nadamw(0.1),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=0),
    "novograd": lambda: optax.novograd(0.1),
    "optimistic_adam_v2": lambda: optax.optimistic_adam_v2(0.1),
    "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(0.1),
    "polyak_sgd": lambda: optax.polyak_sgd(),
    "radam": lambda: optax.radam(0.1),
    "rmsprop": lambda: optax.rmsprop(0.1, momentum=0.9),
    "rprop": lambda: optax.rprop(0.1),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "sign_sgd": lambda: optax.sign_sgd(0.1),
    "sm3": lambda: optax.sm3(0.1),
    "yogi": lambda: optax.yogi(0.1),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "ema": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "masked": lambda: optax.masked(
        optax.adam(0.1), lambda p: mapped(lambda _: True, p)
    ),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 2),
    "inject": lambda: optax.inject_hyperparams(optax.adam)(0.1),
    "centralize": lambda: optax.chain(optax.centralize(), optax.sgd(0.1)),
    "ademamix": lambda: optax.contrib.ademamix(0.1),
    "adopt": lambda: optax.contrib.adopt(0.1),
    "cocob": lambda: optax.contrib.cocob(),
    "dadapt_adamw": lambda: optax.contrib.dadapt_adamw(),
    "dog": lambda: optax.contrib.dog(),
    "dowg": lambda: optax.contrib.dowg(),
    "madgrad": lambda: optax.contrib.madgrad(0.1),
    "mechanize": lambda: optax.contrib.mechanize(optax.sgd(0.1)),
    "momo": lambda: optax.contrib.momo(),
    "muon": lambda: optax.contrib.muon(0.1),
    "prodigy": lambda: optax.contrib.prodigy(),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(0.1),
    "reduce_on_plateau": lambda: optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau()
    ),
}


def _step(run, optimiser):
    def step(m, state, x):
        loss = lambda m: run.loss(m, x, "m")
        value, grads = eqx.filter_value_and_grad(loss)(m)
        more = dict(value=value, grad=grads, value_fn=loss)
        update = optax.with_extra_args_support(optimiser).update
        updates, state = update(grads, state, m, **more)
        m = eqx.apply_updates(m, updates)
        return run(m, x, "m"), m, state

    return step


QUICK = ("adam", "lbfgs", "masked", "schedule_free")


@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.every) for n in OPTIMISERS],
)
def test_optimisers(name):
    optimiser, net = OPTIMISERS[name](), make_net(0)
    state = optimiser.init(net)
    options = {"reduce": Last()}

    def run(net, state):
        by_hand = _step(Run(lambda v, name, of: sow(v, name)), optimiser)
        step = _step(Run(), optimiser)
        return (
            step(net, state, X),
            S(by_hand, **options)(net, state, X),
            S(step, capture=True, **options)(net, state, X),
        )

    out, (_, want), (got_out, got) = eqx.filter_jit(run)(net, state)
    assert_close(got_out, out, weak=True)
    assert list(got) == list(want) == [at("m", part) for part in PARTS]
    assert_close(got, want)
