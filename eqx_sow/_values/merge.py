"""Several captured entries of one name, or sows in several branches, as one.

| | of | makes |
|---|---|---|
| `unify` | all entries of one name | a form with room for each: axes, leaves, a count |
| `conform` | one entry, and a form | the same entry in that form |
| `zeros` | a form | the entry of what did not run |
| `latest` | two entries of one form | for each lane, the one that ran last |
| `merge` | entries of two branches | one: both conform, and then `latest` |

`sown.py` calls these where branches meet, `collect.py` after each iteration of a while,
and `reduce.py` for the form of a state.

For example, `h` is `f32[3]` in one branch. In the other it varies over a `vmap` of 4
lanes, and is `f32[4,3]`. The form is `f32[4,3]`, and the first conforms by a broadcast
along the axis of the lanes, which its site does not have (`placed`).
"""

import dataclasses as dc
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._arrays import (
    broadcast_like,
    select,
    sharded_like,
    types_of,
    zeros_like,
)
from .._errors import DuplicateSowError, SowError
from .._mark.site import Axis, Cases, Site, with_has
from .._mark.static import NoTangent, OPERAND, rebuild
from .entry import align, broadcast, either, Entry, with_count
from .modes import is_backward


# --- leaves that only some of the sows differentiate ---
def common_leaves(sites: Sequence[Site]) -> tuple[Any, ...]:
    """Those of the first, but an operand wherever any of them has one and the others
    do not differentiate the leaf."""
    first, *others = [s.leaves for s in sites]
    if any(s.treedef != sites[0].treedef for s in sites):
        return first
    return tuple(
        OPERAND if isinstance(x, NoTangent) and any(y is OPERAND for y in column) else x
        for x, *column in zip(first, *others)
    )


def with_leaves(entry: Entry, leaves: Sequence[Any]) -> Entry:
    """With zeros for the leaves that are operands in `leaves`, and which the sow does
    not differentiate itself."""
    site = entry.site
    missing = [
        isinstance(x, NoTangent) and y is OPERAND for x, y in zip(site.leaves, leaves)
    ]
    if not any(missing):
        return entry
    new = [(x, site.has(i)) for i, x in enumerate(entry.arrays)]
    at = len(site.guards)
    for x, m in zip(site.leaves, missing):
        if m:
            zeros = jnp.zeros(x.shape, x.tangent_dtype)
            new.insert(at, (zeros, (False,) * len(site.axes)))
        at += m or x is OPERAND
    arrays, has = zip(*new)
    filled = tuple(OPERAND if m else x for x, m in zip(site.leaves, missing))
    site = site._replace(leaves=filled, axes=with_has(site.axes, has))
    return dc.replace(entry, arrays=arrays, site=site)


# --- one form for several entries ---
def _common_axes(entries: Sequence[Entry]) -> list[Axis]:
    """The axes that entries of the same name have in all: of one with the axes
    `[loop, vmap]` and one with `[loop]`, which does not vary over the vmap,
    `[loop, vmap]`. Which of the longer one's axes a shorter one has must be clear: of
    `[vmap, vmap]` and `[vmap]` it is not, if both are of one kind."""

    sites = [e.site for e in entries]
    longest = max((s.axes for s in sites), key=len)
    for s in sites:
        if _embeddings([a.kind for a in s.axes], [a.kind for a in longest]) != 1:
            raise SowError(
                f"`{s.name}` is sown in several places that vary over different "
                f"axes: sizes {[a.size for a in longest]} at {sites[0].where} "
                f"and {[a.size for a in s.axes]} at {s.where}. They cannot "
                "become one value: give them different names."
            )
    return list(longest)


def _embeddings(few: Sequence[Any], many: Sequence[Any]) -> int:
    """In how many ways the first is a subsequence of the second."""
    ways = [1] + [0] * len(few)
    for x in many:
        for i in reversed(range(len(few))):
            if few[i] == x:
                ways[i + 1] += ways[i]
    return ways[-1]


def unify(entries: Sequence[Entry]) -> Entry:
    """A counted entry, as shapes, that has room for each of `entries`."""
    leaves = common_leaves([e.site for e in entries])
    entries = [
        types_of(lambda e: with_count(with_leaves(e, leaves)), e) for e in entries
    ]
    first = entries[0]
    for e in entries[1:]:
        _check_same(first, e)
    axes = _common_axes(entries)
    n = len(first.arrays)
    all_has = [[placed(e.site, axes, i) for i in range(n)] for e in entries]
    _check_totals(entries, axes, all_has)
    has = [either(*same) for same in zip(*all_has)]
    # Wherever the count varies, the value does too: it may not have run there.
    has = [either(h, has[-1]) for h in has]
    # A branch may have zeros, say, that are not sharded.
    sharded = lambda i: lambda e: sum(a is not None for a in e.core_spec(i))
    most = [max(entries, key=sharded(i)) for i in range(n)]
    lead = [[a for a, h in zip(axes, of) if h] for of in has]
    arrays = tuple(most[i].with_lead(i, lead[i]) for i in range(n))
    cases = ()
    if all(e.cases for e in entries):
        cases = tuple(dict.fromkeys(x for e in entries for x in e.cases))
    return dc.replace(
        first,
        arrays=arrays,
        site=_of_all([e.site for e in entries])._replace(axes=with_has(axes, has)),
        cases=cases,
    )


def _of_all(sites: Sequence[Site]) -> Site:
    """The first site, with the lines and the executions of all of them."""
    return sites[0]._replace(
        where=" or ".join(dict.fromkeys(s.where for s in sites)),
        of=frozenset().union(*[s.of for s in sites]),
    )


def placed(site: Site, axes: Sequence[Axis], i: int) -> tuple[bool, ...]:
    """Which of `axes` operand `i` of a site has. The site's own axes are some of these:
    with its own `[vmap]`, and `axes` of `[loop, vmap]`, `(True,)` becomes
    `(False, True)`."""
    own = list(zip(site.axes, site.has(i)))
    return tuple(
        own.pop(0)[1] if own and own[0][0].kind == a.kind else False for a in axes
    )


def conform(entry: Entry, target: Entry) -> Entry:
    """An entry in the form of `target`, which came from `unify`: broadcast along the
    axes that it lacks, with zeros for leaves that it does not differentiate."""
    entry = with_count(with_leaves(entry, target.site.leaves))
    own, form = entry.site, target.site
    axes = form.axes
    arrays = tuple(
        sharded_like(broadcast(x, placed(own, axes, i), form.has(i), axes), to)
        for i, (x, to) in enumerate(zip(entry.arrays, target.arrays))
    )
    return dc.replace(target, arrays=arrays)


def zeros(target: Entry) -> Entry:
    """What did not run, in the form of `target`: its count is zero, too."""
    return dc.replace(target, arrays=tuple(map(zeros_like, target.arrays)))


def latest(old: Entry, new: Entry) -> Entry:
    """For entries of one form: `new` where it ran, otherwise `old`."""
    *old_values, old_count = old.arrays
    *new_values, new_count = new.arrays
    n = len(new_values)
    ran, ran_has = new_count > 0, new.site.has(n)
    values = [
        select(align(ran, ran_has, new.site.has(i)), x, y)
        for i, (x, y) in enumerate(zip(new_values, old_values))
    ]
    return dc.replace(new, arrays=(*values, old_count + new_count))


def merge(a: Entry, b: Entry) -> Entry:
    """One entry from two of the same name, in exclusive branches."""
    target = unify([a, b])
    return latest(conform(a, target), conform(b, target))


# --- branches ---
def exclusive(a: Entry, b: Entry) -> bool:
    """Whether the two are in different branches of one cond."""

    def apart(x: Cases, y: Cases) -> bool:
        mine = {(cond, run): branch for cond, branch, _, run in x}
        return any(
            mine.get((cond, run), branch) != branch for cond, branch, _, run in y
        )

    return all(apart(x, y) for x in a.cases or [()] for y in b.cases or [()])


# --- errors ---
def duplicate(a: Site, b: Site, remedy: str = "") -> DuplicateSowError:
    twice = a.where == b.where
    places = a.where + (
        ", which runs more than once" if twice else f" and at {b.where}"
    )
    if b.backward and not a.backward:
        places += (
            " (the latter in a backward pass, so in the `bwd` of a `jax.custom_vjp`)"
        )
    if a.note and b.note:
        paths = (
            "this is the path of a module, which is called more than once: put `with "
            'eqx_sow.scope("first"):` around one of the calls'
        )
    elif a.note or b.note:
        paths = (
            "a module has this path, and a `sow` has this name: choose with "
            '`capture=lambda path, module: path != "..."`'
        )
    else:
        paths = (
            "`scope=True` puts the paths of modules before them, and `with "
            'eqx_sow.scope("first"):` around a call puts that before them'
        )
    remedy = remedy or (
        f"or say how to combine them: `save_intermediates(..., reduce={{{a.name!r}: "
        "eqx_sow.Append()})` returns a tuple of all of them, `eqx_sow.Last()` the last."
    )
    return DuplicateSowError(
        f"`{a.name}` is sown more than once ({a.mode}): at {places}. Give the values "
        f"different names ({paths}), {remedy}"
    )


def form(e: Entry) -> Any:
    """What entries must have in common to become one."""
    arrays = [(e.core_shape(i), x.dtype) for i, x in enumerate(e.arrays)]
    return e.site.treedef, e.site.leaves, arrays


def _check_same(a: Entry, b: Entry) -> None:
    def describe(e):
        values = [
            jax.ShapeDtypeStruct(e.core_shape(i), x.dtype)
            for i, x in enumerate(e.arrays[:-1])
        ]
        value = rebuild(e.site.treedef, e.site.leaves, values)
        return eqx.tree_pformat(value, struct_as_array=True)

    if form(a) != form(b):
        raise SowError(
            f"`{a.site.name}` is sown in several branches, and their values differ in "
            f"structure, shape or dtype: {describe(a)} at {a.site.where}, but "
            f"{describe(b)} at {b.site.where}. Sow values of one form, or give the "
            "sows different names."
        )


def _check_totals(
    entries: Sequence[Entry],
    axes: Sequence[Axis],
    all_has: Sequence[Sequence[tuple[bool, ...]]],
) -> None:
    """The total of all lanes and the cotangent of each lane have no common form."""
    lanes = [[h for h, a in zip(of, axes) if a.lane] for has in all_has for of in has]
    first = entries[0].site
    n = len(all_has[0])
    if is_backward(first.mode) and any(
        lanes[i] != lanes[i % n] for i in range(len(lanes)) if i % n != n - 1
    ):
        raise SowError(
            f"`{first.name}` is sown in several branches, at "
            f"{' and at '.join(e.site.where for e in entries)}. A leaf is the same for "
            "all lanes of a `jax.vmap` in one of them, where its cotangent is the "
            "total, and has a cotangent for each lane in another. They cannot become "
            "one value: give the sows different names."
        )
