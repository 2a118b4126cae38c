"""What is captured does not depend on what was done before, or in other threads."""

import functools as ft
import threading

import equinox as eqx
import jax
import pytest
from eqx_sow import plant, save_intermediates as S

from tests import meeting_trees, meeting_ways  # noqa: F401
from tests.helpers import assert_close
from tests.meeting import (
    edit,
    events_of,
    Layer,
    loss_of,
    make_net,
    over_data,
    PROGRAMS,
    Run,
    X,
)


pytestmark = pytest.mark.sample(5)


def _over_lanes(fn, args):
    fn, args = over_data(fn, args)
    return S(fn, capture=True)(*args)


HISTORY = {
    "capture": lambda fn, args: S(fn, capture=True)(*args),
    "a class": lambda fn, args: S(fn, capture=Layer)(*args),
    "another tag": lambda fn, args: S(fn, capture=True, tag="other")(*args),
    "grad": lambda fn, args: S(eqx.filter_grad(loss_of(fn)), capture=True)(*args),
    "vmap": lambda fn, args: _over_lanes(fn, args),
    "plain": lambda fn, args: fn(*args),
    "plant": lambda fn, args: plant(fn, {"**/layers/1": edit}, capture=True)(*args),
    "tap": lambda fn, args: events_of(fn, args, capture=True),
}
KEPT = (
    "one_jitted_function",
    "one_checkpointed_function",
    "one_jitted_function_in_a_loop",
    "average_in_a_scan",
    "calls_by_cond",
)


@ft.cache
def _fresh(name):
    program = PROGRAMS[name]
    args = program.args()
    return {use: run(program.make(Run()), args) for use, run in HISTORY.items()}


QUICK = ("capture", "grad")


@pytest.mark.parametrize(
    "first",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.every) for n in HISTORY],
)
@pytest.mark.parametrize("name", KEPT)
def test_what_was_done_before_does_not_matter(name, first):
    program, fresh = PROGRAMS[name], _fresh(name)
    args = program.args()
    fn = program.make(Run())
    HISTORY[first](fn, args)
    for use in (first, *HISTORY):
        assert_close(HISTORY[use](fn, args), fresh[use])


def _in_threads(*functions):
    results, errors = {}, []

    def run(i, function):
        try:
            results[i] = function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=item) for item in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[i] for i in range(len(functions))]


@pytest.mark.parametrize("name", KEPT)
def test_threads_at_the_same_time(name):
    program = PROGRAMS[name]
    args, fn = program.args(), program.make(Run())
    uses = ["capture", "plain", "a class", "another tag", "grad", "plain"]
    want = [HISTORY[use](program.make(Run()), args) for use in uses]
    start = threading.Barrier(len(uses))

    def run(use):
        start.wait()
        return [HISTORY[use](fn, args) for _ in range(2)]

    got = _in_threads(*(lambda use=use: run(use) for use in uses))
    assert_close(got, [[w, w] for w in want])


@pytest.mark.parametrize("use", HISTORY)
def test_a_thread_that_the_function_waits_for(use):
    """It may use eqx_sow itself, in whatever way, while the function is traced."""
    program, net = PROGRAMS[KEPT[0]], make_net(0)
    args, want = program.args(), S(net, capture=True)(X)
    inside = []

    def fn(x):
        inside.extend(_in_threads(lambda: HISTORY[use](program.make(Run()), args)))
        return net(x)

    assert_close(S(fn, capture=True)(X)[0], want[0])
    assert list(S(fn, capture=True)(X)[1]) == [_in(net_name) for net_name in want[1]]
    for got in inside:
        assert_close(got, HISTORY[use](program.make(Run()), args))


def test_threads_that_end_in_another_order():
    """The methods are put back after the last trace, and not after the first."""
    net, x = make_net(0), X
    code = type(net).__call__.__code__
    want = S(net, capture=True)(x)[1]
    second_began, first_is_over = threading.Event(), threading.Event()

    def first(x):
        second_began.wait(30)
        return net(x)

    def second(x):
        second_began.set()
        first_is_over.wait(30)
        return net(x)

    def run_first():
        try:
            return S(first, capture=True)(x)[1]
        finally:
            first_is_over.set()

    got = _in_threads(run_first, lambda: S(second, capture=True)(x)[1])
    for intermediates in got:
        assert list(intermediates) == list(map(_in, want))
        assert_close(list(intermediates.values()), list(want.values()))
    assert type(net).__call__.__code__ is code


def _in(name):
    return "net" if name == "." else f"net/{name}"


@pytest.mark.slow
def test_another_thread_sees_nothing():
    net, traced = make_net(0), []
    plain = str(jax.make_jaxpr(lambda x: net(x))(X))

    def fn(m, x):
        def look():
            return str(jax.make_jaxpr(lambda x: net(x))(X)), net(X)

        traced.extend(_in_threads(look))
        return m(x)

    S(fn, capture=True)(net, X)
    assert traced[0][0] == plain
    assert_close(traced[0][1], net(X))
