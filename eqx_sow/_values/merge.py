"""How several captured entries of one name become one.

Each jaxpr yields its entries, and those of its calls, loops and branches. `gather`
looks for those of one name that belong together. Where such entries meet, these
functions make one of them:

| | of | makes |
|---|---|---|
| `unify` | all entries of one name | a form with room for each: axes, leaves, a count |
| `conform` | one entry, and a form | the same entry in that form |
| `zeros` | a form | the entry of what did not run |
| `latest` | two entries of one form | for each lane, the one that ran last |
| `merged` | two entries in different branches | the one that ran |
| `with_values` | all of an iteration | the same: a derivative runs if its value does |

For example, `h` is `f32[3]` in one branch. In the other it varies over a `vmap` of 4
lanes, and is `f32[4,3]`. The form is `f32[4,3]`. The first one conforms: `with_axes`
makes it `f32[1,3]`, which is then repeated along the lanes.

A branch of a `jax.lax.cond` returns each name of the other ones as zeros, with a count
of zero (`to_one_form`). Under a `vmap` all branches run, each for the lanes that take
it, and `gather` merges what they mark. The handler calls `latest` after each iteration
of a `while_loop`, and `state.py` asks for the form of a state.
"""

import dataclasses as dc
import itertools as it
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from .._arrays import select, sharded_like, spec_of, zeros_like
from .._errors import DuplicateSowError, SowError
from .._frames import parting
from .._mark.site import Axis, Site
from .._staging import types_of
from .axes import aligned, as_operand, broadcast, either, total_over
from .entry import Entry, FINISHED, finished, grouped, left_loop, with_count
from .transform import Batched


# What was captured in a jaxpr, in order of execution.
Entries = tuple[Entry, ...]
# An entry, and the transform that it is still to have, for `finished`.
WithTransform = tuple[Entry, Any]


def gather(found: Iterable[WithTransform]) -> Entries:
    """What was found in a jaxpr, with one entry for each slot."""
    gathered: dict[Any, WithTransform] = {}
    for new in found:
        slot = new[0].slot
        old = gathered.get(slot)
        gathered[slot] = new if old is None else _one_of(old, new)
    return tuple(finished(e, transform) for e, transform in gathered.values())


def _one_of(a: WithTransform, b: WithTransform) -> WithTransform:
    """One entry for two of which at most one runs in each lane. If they are of one form
    before the transform, it is applied once, to the value that was selected."""
    transform = a[1]
    if (
        transform is not b[1]
        # It sees all lanes at once, and no branch has these: `finished` raises.
        or isinstance(transform, Batched)
        or _form(a[0]) != _form(b[0])
    ):
        return merged(finished(*a), finished(*b)), FINISHED
    return merged(a[0], b[0]), transform


def _form(e: Entry) -> Any:
    """What entries have in common that can become one."""
    arrays = [(x.shape, x.dtype) for x in e.with_only().arrays]
    return e.site.form, arrays


def merged(old: Entry, new: Entry) -> Entry:
    """For two entries of which at most one ran in each lane: that one. Where the first
    did not, it is the second, which is how JAX selects outputs: so XLA has one boolean
    for both."""
    form = unify([old, new])
    return latest(conform(new, form), conform(old, form))


def _of_all(sites: Sequence[Site]) -> Site:
    """The first site, with the lines of all of them."""
    where = " or ".join(dict.fromkeys(s.where for s in sites))
    return sites[0]._replace(where=where)


def to_one_form(branches: Sequence[Entries]) -> Callable[[Entries], Entries]:
    """For branches of which one runs, as shapes: a function that brings each to one
    form, with an entry for each slot."""
    slots = dict.fromkeys(e.slot for branch in branches for e in branch)
    each = [{e.slot: e for e in branch} for branch in branches]
    forms = {s: unify([own[s] for own in each if s in own]) for s in slots}

    def bring(branch: Entries) -> Entries:
        own = {e.slot: e for e in branch}
        return tuple(
            conform(own[s], form) if s in own else zeros(form)
            for s, form in forms.items()
        )

    return bring


# --- one form for several entries ---
def own_axes(own: Sequence[Axis], axes: Sequence[Axis]) -> list[bool]:
    """Which of `axes` an entry has that has some of them, its `own`. For `[vmap]`, of
    `[loop, vmap]`, it is `[False, True]`."""
    left = [a.kind for a in own]
    found = []
    for a in axes:
        found.append(left[:1] == [a.kind])
        left = left[found[-1] :]
    return found


def without_lanes(entry: Entry, kept: Container[Any]) -> Entry:
    """An entry with only those vmaps among its axes whose kind is kept. Its arrays are
    of one place along the others."""
    is_kept = [not a.lane or a.kind in kept for a in entry.site.axes]
    if all(is_kept):
        return entry
    only = lambda x: tuple(it.compress(x, is_kept))
    return entry.replace(
        [as_operand(x, is_kept) for x in entry.arrays],
        axes=only(entry.site.axes),
        varies=list(map(only, entry.site.varies)),
    )


def kinds_that_vary(sites: Iterable[Site]) -> set[Any]:
    """The kinds of those vmaps that an array of any of these varies over."""
    each = [(s.axes, v) for s in sites for v in s.varies]
    return {a.kind for axes, v in each for a in it.compress(axes, v) if a.lane}


def with_axes(entry: Entry, axes: Sequence[Axis]) -> Entry:
    """An entry with all of these axes, some of which are its own: with its own `[vmap]`
    and `axes` of `[loop, vmap]`, `f32[4,3]` becomes `f32[1,4,3]`. Of a vmap that is not
    among them, it does not vary over the lanes."""
    entry = without_lanes(entry, {a.kind for a in axes})
    is_own = own_axes(entry.site.axes, axes)
    if all(is_own):
        return entry

    def placed(own, others):
        own = iter(own)
        return tuple(next(own) if o else x for x, o in zip(others, is_own))

    return entry.replace(
        [aligned(x, is_own) for x in entry.arrays],
        axes=placed(entry.site.axes, axes),
        varies=[placed(v, [False] * len(axes)) for v in entry.site.varies],
    )


def _common_axes(each: Iterable[Sequence[Axis]]) -> list[Axis] | None:
    """The axes that entries of the same name have in all: of one with the axes
    `[loop, vmap]` and one with `[loop]`, which does not vary over the vmap,
    `[loop, vmap]`. Which of the longer one's axes a shorter one has must be clear: of
    `[vmap, vmap]` and `[vmap]` it is not, if both are of one kind."""
    each = list(each)
    every = max(each, key=len)
    for axes in each:
        found = own_axes(axes, every)
        from_inside = own_axes(axes[::-1], every[::-1])[::-1]
        if found != from_inside or sum(found) != len(axes):
            return None
    return list(every)


def unify(entries: Sequence[Entry]) -> Entry:
    """The form of all `entries`: with a count, as shapes, and with room for each."""
    sites = [e.site for e in entries]
    kinds = kinds_that_vary(sites)
    lanes = lambda s: [a for a in s.axes if not a.lane or a.kind in kinds]
    axes = _common_axes([s.axes for s in sites])
    if axes is None:
        axes = _common_axes(map(lanes, sites))
    if axes is None:
        raise different_axes(sites)
    in_form = [a.kind for a in axes]
    full = lambda e: with_axes(with_count(e), axes)
    entries = [
        e
        if e.counted and [a.kind for a in e.site.axes] == in_form
        else types_of(full, e)
        for e in entries
    ]
    for e in entries[1:]:
        _check_same(entries[0], e)
    n = len(entries[0].arrays)
    varies = [either(*[e.site.varies[i] for e in entries]) for i in range(n)]
    # Wherever the count varies, the value does too: it may not have run there.
    varies = [either(v, varies[-1]) for v in varies]
    site = _of_all(sites)._replace(axes=tuple(axes), varies=tuple(varies))

    def shape(i):
        # A branch may have zeros, say, that are not sharded.
        n_sharded = lambda e: -spec_of(e.shape(i, (), ())).count(None)
        return max(entries, key=n_sharded).shape(i, axes, varies[i])

    cases = ()
    if all(e.cases for e in entries):
        cases = tuple(dict.fromkeys(x for e in entries for x in e.cases))
    arrays = tuple(map(shape, range(n)))
    return dc.replace(entries[0], arrays=arrays, site=site, cases=cases)


def conform(entry: Entry, form: Entry) -> Entry:
    """An entry in a form that `unify` made, repeated along the axes that it lacks."""
    axes = form.site.axes
    entry = with_axes(with_count(entry), axes)
    arrays = tuple(
        sharded_like(broadcast(x, v, axes), like)
        for x, v, like in zip(entry.arrays, form.site.varies, form.arrays)
    )
    return dc.replace(form, arrays=arrays)


def zeros(form: Entry) -> Entry:
    """What did not run, in this form: its count is zero, too."""
    return dc.replace(form, arrays=tuple(map(zeros_like, form.arrays)))


def latest(old: Entry, new: Entry) -> Entry:
    """For entries of one form: `new` where it ran, otherwise `old`."""
    *old_values, old_count = old.arrays
    *new_values, new_count = new.arrays
    ran = new_count.astype(bool)
    values = [select(ran, x, y) for x, y in zip(new_values, old_values)]
    return dc.replace(new, arrays=(*values, old_count + new_count))


def after_iteration(old: Entry, entry: Entry, is_backward: bool) -> Entry:
    """What is kept of a `while_loop` after one more iteration, given what it was before
    and the entry of that iteration. It is the last one that ran. If the loop is a
    backward pass, and goes through the iterations of the value from the last one, then
    what belongs to the last value is the first one that ran."""
    new = conform(left_loop(entry), old)
    # What ran before stays, in the lanes where any did.
    return latest(new, old) if is_backward else latest(old, new)


def with_values(entries: Entries, apart: Collection[tuple[int, int]]) -> Entries:
    """What is marked in an iteration of a `while_loop`, of which the last one that ran
    comes back. In

        lax.cond(i == 1, lambda x: sow(jnp.sin(x), "h"), lambda x: sow(y, "h"), x)

    there is no tangent of `y`, but iteration 2 returns its value. So that the tangent
    is not that of iteration 1, it runs wherever the value does, and is zero there.
    `apart` has the slots of derivatives with those of values that they are not of."""
    values = grouped([e for e in entries if not e.site.modes], lambda s: s.name)

    def with_value(e: Entry) -> Entry:
        if not (e.counted and e.site.modes):
            return e
        of = [
            v
            for v in values.get(e.site.name, ())
            if (e.slot, v.slot) not in apart and _may_be_of(e, v)
        ]
        return _running_with(e, of[0]) if len(of) == 1 else e

    return tuple(map(with_value, entries))


def _may_be_of(derivative: Entry, value: Entry) -> bool:
    """Whether it may be of this value, by the axes. A derivative may have more of them,
    as in `jax.jacrev`."""
    n = sum(own_axes(value.site.axes, derivative.site.axes))
    return n == len(value.site.axes)


def _running_with(derivative: Entry, value: Entry) -> Entry:
    site, axes = derivative.site, derivative.site.axes
    *arrays, count = derivative.arrays
    *varies, of_count = site.varies
    value = with_axes(with_count(value), axes)
    varies.append(either(of_count, value.site.varies[-1]))
    arrays.append(jnp.maximum(count, value.arrays[-1]))
    return derivative.replace(arrays, varies=varies)


# --- errors ---
def duplicate(a: Site, b: Site, late: bool) -> DuplicateSowError:
    places, names = _places(a, b)
    if late:
        places += " (also in a backward pass: in the `bwd` of a `jax.custom_vjp`)"
    if bool(a.note) != bool(b.note):
        names = (
            "a module has this path, and a `sow` has this name: choose with "
            '`capture=lambda path, module: path != "..."`'
        )
    return DuplicateSowError(
        f"`{a.name}` marks more than one value ({a.mode}): {places}. Give the values "
        f"different names ({names}), or pass `reduce={{{a.name!r}: "
        "eqx_sow.Append()}` for a tuple of all, or `eqx_sow.Last()` for the last. If "
        "you need none of them, select others with `names`."
    )


def _places(a: Site, b: Site) -> tuple[str, str]:
    """Where two marks of one name are, and how to give them different names."""
    names = (
        "`scope=True` begins them with the paths of modules, and `with "
        'eqx_sow.scope("first"):` around a call begins them with `first/`'
    )
    if a.where != b.where:
        return f"at {a.where} and at {b.where}", names
    layers = {id(x.origin.layer): x.origin.layer for x in (a, b)}
    if len(layers) == 2 and None not in layers.values():
        return (
            f"by two layers `Sow({layers[id(a.origin.layer)].name!r})`, which "
            f"{a.where} calls",
            "give each `Sow` a name of its own, or none: it then has that of its place "
            "in the model",
        )
    again = f"at {a.where}, which runs more than once"
    if a.origin is b.origin:
        return again, names
    parts = parting(a.origin, b.origin)
    if parts is None:
        return again, (
            "`scope=True` begins them with the paths of modules; and in a Python loop, "
            '`with eqx_sow.scope(f"step{i}"):` around the body begins them with '
            "`step0/`, `step1/` and so on"
        )
    first, second, is_sow = parts
    if is_sow:
        return f"twice in the line {a.where}", names
    if first != second:
        return f"at {a.where}, which {first} and {second} call", names
    return again, names


def different_axes(sites: Sequence[Site]) -> SowError:
    most, *others = sorted(sites, key=lambda s: -len(s.axes))
    sizes = lambda s: [a.size for a in s.axes]
    other = next((s for s in others if sizes(s) != sizes(most)), others[-1])
    return SowError(
        f"`{most.name}` is marked in several places that vary over different axes: "
        f"sizes {sizes(most)} at {most.where} and {sizes(other)} at {other.where}. "
        "Give them different names, or pass a `transform` that reduces these axes, "
        "such as `batched(...)`."
    )


def _check_same(a: Entry, b: Entry) -> None:
    """Raises if two entries cannot become one."""

    def describe(e: Entry) -> str:
        *values, _ = e.with_only().arrays
        value = e.site.form.with_arrays(values)
        return f"{eqx.tree_pformat(value, struct_as_array=True)} at {e.site.where}"

    mode = a.site.mode
    # The count may vary over other lanes, and so may a value that is not a total.
    lanes = [
        [
            [v or not t for v, t in zip(x, total_over(e.site))]
            for x in e.site.varies[:-1]
        ]
        for e in (a, b)
    ]
    if _form(a) != _form(b):
        problem = "in several places, and their values differ"
        remedy = (
            "Mark values of one structure, shape and dtype, pass a `transform` to one "
            "shape, such as `lambda x: x.mean()`, or give the marks different names."
        )
        if mode != "primal":
            remedy += f" (A NumPy array has no {mode}, so mark `jnp.asarray(...)`.)"
    elif lanes[0] != lanes[1]:
        problem = "in several places"
        remedy = (
            "A leaf is the same for all lanes of a `jax.vmap` in one of them, where "
            "its cotangent is the total. They cannot become one value: give the marks "
            "different names."
        )
    else:
        return
    raise SowError(
        f"`{a.site.name}` is marked {problem}: {describe(a)}, but {describe(b)}. "
        f"{remedy}"
    )
