"""Which rows of a `Buffer` belong together: those of a value and of its derivatives.

They do if each execution of the value has one derivative, and if the derivatives come
in the order of the values, or in the opposite order, as in the backward pass of a scan.
Or if each derivative is computed before the value is marked again, as in

    while ...:                       # a loop that runs at most four times
        y, pull = jax.vjp(f, x)      # `f` marks a value
        if is_better(y):
            x = x - pull(1.0)

with a `Buffer(4)`: then there are zeros in the rows of the iterations that are not
better. All else is an error.

To tell, each loop is taken to run twice, or once if one iteration is asked for.
"""

import functools as ft
import itertools as it
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jexc

from .._errors import SowError
from .._mark.site import Site
from .._walk.runs import Run
from .._walk.sows import lengths_of, loop_of, Mark, Way
from .asked import for_each_loop, layer_in, when


class Buffered(NamedTuple):
    """A mark that has rows, and the run that it is, or is a derivative of. `at` says
    which iterations are asked for: see `Ask`."""

    mark: Mark
    run: Run
    at: tuple[int | None, ...] = ()

    @property
    def loops(self) -> list[tuple[Way, Any]]:
        """The loops around it, with the ways to them, from outside in."""
        way: Any = self.mark.way
        pairs = enumerate(self.mark.eqns)
        return [(way[: 2 * i + 1], e) for i, e in pairs if loop_of(e) is not None]


# An execution: the way to the mark of the value, and the iteration of each loop around.
_Id = tuple[Way, tuple[int, ...]]
# When it is: see `when`.
_When = tuple[float, ...]


def values_open_rows(
    values: Sequence[Buffered], derivatives: Sequence[Buffered]
) -> bool:
    """Whether the rows of these derivatives are those that the values open, rather than
    one after the other. Raises if they do not belong together in either way."""
    by_way: dict[Any, Buffered] = {x.mark.way: x for x in values}
    ran = sorted((when, id) for x in values for when, id in _executions(x, x))
    pairs = [
        (when, id, x)
        for x in derivatives
        for way in x.run.of
        if way in by_way
        for when, id in _executions(x, by_way[way])
    ]
    pairs.sort(key=lambda pair: pair[0])
    exclusive = ft.partial(_exclusive, by_way)
    together = any(_n_common(x, by_way[id[0]]) for _, id, x in pairs)
    # Each layer of a stack has rows of its own.
    layer_of = lambda id: _layer(by_way[id[0]], id[1])
    in_order = True
    for one in {layer_of(id) for _, id in ran}:
        of_layer = [x for x in ran if layer_of(x[1]) == one]
        its_pairs = [x for x in pairs if layer_of(x[1]) == one]
        one_each = _one_each(of_layer, its_pairs, together)
        if one_each and _in_one_order(of_layer, its_pairs, exclusive):
            continue
        in_order = False
        if not _follow(of_layer, its_pairs, exclusive):
            raise _apart(derivatives[0].mark.site)
    return not in_order


def _layer(x: Buffered, iterations: Sequence[int]) -> tuple[int, ...]:
    """The index among `iterations` in each stack of layers around."""
    of_scans = [i for i, (_, e) in zip(iterations, x.loops) if lengths_of([e])]
    return layer_in(x.at, x.mark.site.label, of_scans)


def _executions(x: Buffered, value: Buffered) -> list[tuple[_When, _Id]]:
    """When a mark runs, each with the execution of its value that it is of."""
    loops, of_value = x.loops, value.loops
    n = _n_common(x, value)
    # Loops around a backward pass alone come first. What is computed after a
    # `while_loop` is of its last iteration.
    more = max(len(loops) - len(of_value), 0)
    after = of_value[len(loops) - more :]
    if any(lengths_of([e]) for _, e in after):
        raise _apart(x.mark.site)
    backward = iter(x.run.backward)
    is_reversed = [not lengths_of([e]) and next(backward, None) for _, e in loops]
    of_loops = [(0, 1) if i is None else (0,) for i in for_each_loop(x.mark, x.at)]
    found = []
    for iterations in it.product(*of_loops):
        own = [1 - i if r else i for i, r in zip(iterations, is_reversed)]
        id = (*own[:n], *own[n + more :], *(1 for _ in after))
        found.append((when(x.mark, iterations), (value.mark.way, id)))
    return found


_Ran = Sequence[tuple[_When, _Id]]
_Pairs = Sequence[tuple[_When, _Id, Buffered]]
_Exclusive = Callable[[_Id, _Id], bool]


def _one_each(ran: _Ran, pairs: _Pairs, together: bool) -> bool:
    """Whether each execution has one derivative; or, if a whole backward pass is in a
    branch, none has. `together`: whether there is a loop around both."""
    n = Counter(id for _, id, _ in pairs)
    only_if = {x.run.only_if for *_, x in pairs}
    is_sure = len(only_if) == 1 and not (together and any(only_if))
    return is_sure and all(n[id] == 1 for _, id in ran)


def _n_common(x: Buffered, y: Buffered) -> int:
    """How many loops are around both."""
    return sum(a[0] == b[0] for a, b in zip(x.loops, y.loops))


def _in_one_order(ran: _Ran, pairs: _Pairs, exclusive: _Exclusive) -> bool:
    """Whether derivatives are in the order of their values, or in the opposite one."""
    place = {id: k for k, (_, id, _) in enumerate(pairs)}
    ids = [id for _, id in ran]
    orders = {
        place[a] < place[b] for a, b in it.combinations(ids, 2) if not exclusive(a, b)
    }
    return len(orders) < 2


def _follow(ran: _Ran, pairs: _Pairs, exclusive: _Exclusive) -> bool:
    """Whether no value comes between another one and its derivative, of which there is
    at most one."""
    all_ids = [id for _, id, _ in pairs]
    if len(all_ids) != len(set(all_ids)):
        return False
    last: Any = None
    steps = [(when, False, id) for when, id in ran]
    steps += [(when, True, id) for when, id, _ in pairs]
    for _, is_derivative, id in sorted(steps):
        if not is_derivative:
            last = id
        elif last is None or not (id == last or exclusive(id, last)):
            return False
    return True


def _exclusive(by_way: Mapping[Any, Buffered], a: _Id, b: _Id) -> bool:
    """Whether two executions are in two branches of one run of a cond."""
    (x, mine), (y, others) = (by_way[a[0]], a[1]), (by_way[b[0]], b[1])
    guards = {id(g.cond): g.branch for g in x.mark.site.guards if g.cond is not None}
    if any(guards.get(id(g.cond), g.branch) != g.branch for g in y.mark.site.guards):
        return mine == others
    way, other = a[0], b[0]
    k = next((k for k, (i, j) in enumerate(zip(way, other)) if i != j), 0)
    if k % 2 == 0 or x.mark.eqns[k // 2].primitive is not jexc.primitives.cond_p:
        return False
    n = sum(loop_of(e) is not None for e in x.mark.eqns[: k // 2])
    return mine[:n] == others[:n]


def _apart(site: Site) -> SowError:
    return SowError(
        f"{site.said} is kept in a `Buffer`, but there is not one {site.mode} for each "
        "value, in the same or in the opposite order: a function from `jax.vjp` may be "
        "called twice, for example, or the value may be computed once more without a "
        "derivative. So the rows of the two would not be of the same executions. Give "
        f"the marks different names, or leave the {site.mode} out, by `modes`."
    )
