"""Plans: what the walk does where, for each jaxpr by itself."""

import jax
import jax.numpy as jnp
import pytest
from eqx_sow import Append, save_intermediates as S, sow
from eqx_sow._handlers.collect import Collect
from eqx_sow._mark.listening import Listening, listening
from eqx_sow._mark.site import Label
from eqx_sow._walk.plan import Ask, asked, NOTHING, Plan, planned, Wanted
from eqx_sow._walk.sows import sows
from jax import lax


pytestmark = pytest.mark.sample(1)

X = jnp.arange(3.0)


def traced(fn, *args):
    with listening(Listening()):
        return jax.make_jaxpr(fn)(*args)


@jax.jit
def block(x):
    y = lax.scan(lambda c, _: (sow(jnp.sin(c), "in a scan"), None), x, length=2)[0]
    return lax.cond(y[0] > 0, lambda: sow(y, "h"), lambda: sow(2 * y, "h"))


def program(n):
    def fn(x):
        for _ in range(n):
            x = block(x)
        return sow(x, "out")

    return traced(fn, X)


def rows(closed, slot_of):
    label = Label("h", "tag")
    return [Wanted(x, [Ask(slot_of(i, x), label)]) for i, x in enumerate(sows(closed))]


@pytest.mark.parametrize(
    "slot_of",
    [
        lambda i, x: i,
        lambda i, x: 10 - i,
        lambda i, x: i // 2,
        lambda i, x: NOTHING if i % 3 == 1 else i % 2,
    ],
)
def test_each_mark_has_what_was_asked(slot_of):
    closed = program(3)
    given = rows(closed, slot_of)
    placed = planned(given)
    for mark, asks, _ in given:
        got = [placed.outside(ask) for ask in placed.plan.at(mark.way)]
        assert got == asks
    want = [(mark.way, ask) for mark, (ask,), _ in given if ask.slot != NOTHING]
    assert [(mark.way, ask) for mark, ask in asked(placed, closed)] == want


def test_what_is_not_asked_is_not_there():
    closed = program(2)
    *_, last = rows(closed, lambda i, x: i)
    placed = planned([last])
    assert not placed.plan.inside and len(placed.plan.marks) == 1
    assert placed.slots == (last[1][0].slot,)


def test_many_calls_have_one_plan():
    plan, slots = planned(rows(program(100), lambda i, x: i))
    calls = [plan.inside[i] for i in range(100)]
    assert len({call.plan for call in calls}) == 1
    assert len({s for call in calls for s in call.slots}) == 300
    # Also of another program, as long as the first one is there.
    other, _ = planned(rows(program(2), lambda i, x: i))
    assert other.inside[0].plan is calls[0].plan and other is not plan
    del slots


def test_many_calls_are_walked_by_one_plan(monkeypatch):
    plans = []
    evaluate = Collect.end_jaxpr

    def end_jaxpr(self, found, frame):
        plans.append(frame.jaxpr)
        return evaluate(self, found, frame)

    monkeypatch.setattr(Collect, "end_jaxpr", end_jaxpr)

    def n_walks(n):
        fn = jax.jit(lambda x: sow(jnp.cos(x), "h"))

        def many(x):
            for _ in range(n):
                x = fn(x)
            return x.sum()

        plans.clear()
        S(jax.grad(many), reduce=Append())(X)
        return len(plans)

    assert n_walks(100) == n_walks(3)


def test_slots_of_a_while_loop_that_are_apart():
    def fn(x):
        body = lambda c: sow(sow(c + 1, "h"), "h")
        return lax.while_loop(lambda c: c[0] < 5, body, x)

    given = rows(traced(fn, X), lambda i, x: i)
    given[1] = given[1]._replace(backward=(True,))
    pairs = lambda derivative, value: (derivative, value) == (1, 0)
    plan, _ = planned(given, pairs)
    ((_, of_loop),) = plan.inside.items()
    assert of_loop.plan.apart == {(1, 0)} and of_loop.plan.backward == {1}
    assert isinstance(of_loop.plan, Plan)
