"""Random programs under random stacks of four transformations.

    python tests/fuzz.py --programs 5000 --seed 0 --seconds 600

One seed is one program of tests/oracle.py, four words of tests/threaded.py around it,
`save_intermediates` at some place among these, and one further feature. The reference
is the same program with its values threaded out of it by hand. Prints how many programs
ran, which exceptions there were how often, and the seeds that failed.
"""

import argparse
import collections
import functools as ft
import itertools
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import tests.conftest  # noqa: F401  (eight devices, strict promotion)

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from eqx_sow import (
    Append,
    DuplicateSowError,
    plant,
    save_intermediates,
    sow,
    SowError,
    SowTypeError,
    summarize,
    tap,
)
from jaxtyping import Array, Float

from tests import oracle as orc, threaded as thr
from tests.tables import REDUCERS
from tests.unrolled import unrolled


class Wrong(AssertionError):
    """A number, a name or a structure that is not that of the reference."""


class Refused(Exception):
    """JAX refuses the program itself, without a capture."""


# What docs/api/errors.md says, by what it says of it.
DOCUMENTED = {
    "a name at two places": r"marks more than one value",
    "rule that only some lanes run": r"derivative rule of a function .* some lanes",
    "differentiated checkpoint": r"is in a `jax.checkpoint` that was differentiated",
    "lanes that cannot be told": r"cannot tell which lanes run",
    "bwd that only some lanes call": r"cannot tell whether the `bwd` repeats",
    "different vmaps": r"in several places that vary over different axes",
    "total and single cotangents in branches": r"where its cotangent is the total",
    "plant in a shard_map": r"cannot be checked in a `jax.shard_map`",
    "total in a branch of some devices": r"run this branch or iteration would wait",
    "derivatives of some rows": r"would not be of the same executions",
    "which cotangent": r"which \S+ belongs to which primal",
    "one value planted for several runs": r"runs \d+ times: .* Plant a tuple",
    "a branch without a derivative": r"cannot tell which iteration of it belongs",
}


# The loops of Equinox whose backward pass runs their body once more.
REPLAYED = ("checkpointed", "one checkpoint", "scan")


def _within(program, outer: Callable[[Any], bool], inner: Callable[[Any], bool]):
    """Whether a node of one kind is somewhere inside one of another."""
    found = (n for n in orc.walk(program) if outer(n))
    return any(inner(n) for x in found for y in orc.children(x) for n in orc.walk(y))


walk = orc.walk
_is_rule = lambda n: isinstance(n, orc.Rule)
_is_again = lambda n: isinstance(n, orc.Again)
_is_whole = lambda n: _is_again(n) and n.loop == "whole"
_is_own = lambda n: isinstance(n, orc.Own)
_is_replayed = lambda n: _is_own(n) and n.how in REPLAYED
# JAX counts the iterations of these outside of the loops around them, if it
# differentiates these.
_counts = lambda n: isinstance(n, orc.Fori) or (_is_own(n) and n.how == "bounded")


def _may_run_twice(the_plan: "Plan") -> bool:
    """What docs/limits.md and docs/api/errors.md say of marks that run twice."""
    f, words = the_plan.program, the_plan.words
    calls = [n.how for n in walk(f) if isinstance(n, orc.Call)]
    kept = {"checkpoint", "checkpoint_dots", *orc.POLICIES} & {*words, *calls}
    # `jax.linearize` runs a loop of unknown length twice.
    if orc.has_while(f) and "linearize" in words:
        return True
    # In a loop of Equinox in a checkpoint or in a `bwd`, it is not told what repeats a
    # function with a rule.
    if _within(f, _is_own, _is_rule) and (kept or _within(f, _is_again, _is_own)):
        return True
    # Nor, in a loop of Equinox, what its `bwd` computes once more.
    if _within(f, _is_replayed, _is_whole):
        return True
    if _within(
        f, _is_replayed, lambda n: _is_again(n) and _within(n, _is_again, _is_own)
    ):
        return True
    if _within(f, _is_whole, _counts):
        return True
    # Of two captures, the inner one makes another program of what is around its marks.
    sharded = any(w in thr.SHARDED for w in words)
    nested = the_plan.feature == "nested" and sharded
    return nested and any(map(_is_whole, walk(f)))


def _has_branch_without_derivative(the_plan: "Plan") -> bool:
    """Whether there is, in a loop of Equinox, a name in several branches, one of which
    marks a constant, or what a gradient around the loop leaves alone: the last value
    may be that."""
    found = collections.defaultdict(list)
    for loop in filter(_is_replayed, walk(the_plan.program)):
        for n in walk(loop):
            if isinstance(n, orc.Sow):
                found[id(loop), n.name].append(n.kind)
    constant = ("const", "outer", "outer_unused")
    return any(
        len(kinds) > 1 and any(kind in constant for kind in kinds)
        for kinds in found.values()
    )


CONDITIONS = {"a branch without a derivative": _has_branch_without_derivative}


def _plants_in_a_loop_of_equinox(the_plan: "Plan") -> bool:
    """What is planted there has no derivative in reverse mode."""
    planted = the_plan.feature.startswith("plant") and "grad" in the_plan.outer
    return planted and any(map(_is_replayed, walk(the_plan.program)))


def documented(error: Exception, the_plan: "Plan") -> str | None:
    text = " ".join(str(error).split())
    if isinstance(error, DuplicateSowError) and not _may_run_twice(the_plan):
        return None
    if isinstance(error, SowError):
        for label, pattern in DOCUMENTED.items():
            if re.search(pattern, text) and CONDITIONS.get(label, bool)(the_plan):
                return f"{type(error).__name__}: {label}"
    noted = any(
        "there is a mark in this loop" in x for x in getattr(error, "__notes__", ())
    )
    if noted and _plants_in_a_loop_of_equinox(the_plan):
        return "JAX's error: no reverse mode for what is planted in a loop of Equinox"
    old = jax.__version_info__ < (0, 11)
    sharded = any(w in thr.SHARDED for w in the_plan.words)
    pvary = "pvary is a invariant->variant" in text
    pvary |= sharded and old and "requires varying manual axes to match" in text
    # JAX fills in what other branches keep for the backward pass, along no mesh axis.
    kept = "branches of cond produced mismatched varying manual axes" in text
    if sharded and "grad" in the_plan.words and kept:
        return "JAX's error: what the branches of a cond keep in a shard_map"
    lanes = sharded and "vmap" in the_plan.words
    of_type = lanes and type(error).__name__ == "_RepError"
    if (isinstance(error, ValueError) and pvary) or of_type:
        return "JAX's error: vmap of a shard_map with a constant in a branch"
    # `squeeze` of an empty array, op by op: what comes out cannot be read.
    if isinstance(error, ValueError) and "could not broadcast input array" in text:
        return "ValueError: an empty array with explicit axes" if old else None
    return None


# --- what a seed stands for ---


class Plan(NamedTuple):
    seed: int
    program: Any
    # From the function outwards; `save_intermediates` comes after so many of them.
    words: tuple[str, ...]
    saved_after: int
    feature: str
    capture: bool

    @property
    def inner(self):
        return self.words[: self.saved_after]

    @property
    def outer(self):
        return self.words[self.saved_after :]

    @property
    def derivatives(self):
        return [w for w in self.inner if w in thr.FORWARD + thr.REVERSE]

    @property
    def derivative(self):
        found = self.derivatives
        return found and ("vjp" if found[0] in thr.REVERSE else "jvp") or None

    @property
    def way(self):
        """Op by op, compiled in one piece, or without the compiler."""
        ways = {0: lambda fn: fn, 1: eqx.filter_jit}
        return ways.get(self.seed % 8, unrolled)

    def __str__(self):
        words = [*self.words]
        words.insert(self.saved_after, "S")
        stack = " ".join(reversed(words))
        capture = ", capture" if self.capture else ""
        return f"seed {self.seed}: {stack} f, {self.feature}{capture}\n{self.program}"


# What a feature does not go with.
ALONE = ("tap",)
NO_OUTER_LANES = (
    "plant value",
    "plant iteration",
    "plant cotangent",
    "plant what was saved",
    "spec",
)


def _choose_words(rng, feature):
    saved_after = 4 if feature in ALONE else int(rng.integers(1, 5))
    if feature == "plant cotangent":
        saved_after = max(saved_after, 2)
    words = []
    two = rng.random() < 0.2 and not feature.startswith("plant")
    for i in range(4):
        inside = i < saved_after
        n_derivatives = sum(w in thr.FORWARD + thr.REVERSE for w in words)
        choice = ["jit", "checkpoint"]
        if inside or feature not in NO_OUTER_LANES:
            choice += ["vmap"]
        if inside:
            choice += ["checkpoint_dots", "vmap_last"]
            if any(w in thr.SHARDED for w in words):
                # Devices come before lanes.
                choice = [w for w in choice if w not in thr.MAPS]
            elif not any(w in thr.MAPS for w in words):
                if feature not in (*ALONE, *REDUCERS):
                    choice += thr.SHARDED
            if n_derivatives < 1 + two and feature not in REDUCERS:
                choice += (*thr.FORWARD, *thr.REVERSE) * 2
        elif not any(w in thr.REVERSE for w in words):
            if feature not in (*NO_OUTER_LANES, *REDUCERS, "nested"):
                choice += ["grad"]
        words.append(str(choice[rng.integers(len(choice))]))
    if feature == "plant cotangent":
        words = ["jit" if w in thr.FORWARD + thr.REVERSE else w for w in words]
        words[int(rng.integers(2))] = "grad"
    return tuple(words), saved_after


def _around(words):
    """The derivatives that are taken, from the first one."""
    kinds = dict.fromkeys(thr.FORWARD, orc.FORWARD)
    kinds |= dict.fromkeys(thr.REVERSE, orc.REVERSE)
    return tuple(kinds[w] for w in words if w in kinds)


def plan(seed: int) -> Plan:
    rng = np.random.default_rng([seed, 7])
    feature = str(rng.choice(list(CHECKS)))
    words, saved_after = _choose_words(rng, feature)
    derivatives = [w for w in words if w in thr.FORWARD + thr.REVERSE]
    allow_while = not any(w in thr.REVERSE for w in derivatives)
    maker = orc.Generator([seed, 8], allow_while, features=True, around=_around(words))
    without = ("plant cotangent", "plant inside", *REDUCERS)
    maker.allow_derivatives = feature not in without
    maker.allow_runs = feature not in ("nested", *REDUCERS)
    # `jax.linearize` runs them twice, what is planted in one has no gradient, and
    # Equinox makes none in a `shard_map`.
    maker.allow_unknown = "linearize" not in words and feature != "plant inside"
    maker.allow_own = not any(w in thr.SHARDED for w in words)
    maker.has_lanes = any(w in thr.MAPS for w in words)
    # Lanes of Equinox's loops end together, and one lane by itself does not.
    maker.allow_ends = feature not in REDUCERS
    maker.budget = 5
    program = maker.program()
    capture = maker.layers > 0 and bool(rng.random() < 0.6)
    # `jax.linearize` runs a `while_loop` twice, and so each module in it.
    capture = capture and not ("linearize" in words and orc.has_while(program))
    return Plan(seed, program, words, saved_after, feature, capture)


# --- the function under test ---


def inputs(the_plan):
    """The input of the whole stack, and the same with all lanes in front."""
    maps = [w for w in the_plan.words if w in thr.MAPS]
    rng = np.random.default_rng([the_plan.seed, 9])
    lanes = [2] * len(maps)
    canonical = rng.uniform(-1.5, 1.5, (*lanes, orc.SIZE)).astype(np.float32)

    def layout(x, maps):
        if not maps:
            return x
        axis = -1 if maps[-1] == "vmap_last" else 0
        return np.stack([layout(y, maps[:-1]) for y in x], axis=axis)

    return jnp.asarray(layout(canonical, maps)), canonical


def apply(words, f, how):
    for word in words:
        f = how[word](f)
    return f


# Around `(out, intermediates)`, of which some leaves are static.
OUTER = {
    "jit": eqx.filter_jit,
    "checkpoint": eqx.filter_checkpoint,
    "vmap": eqx.filter_vmap,
    "grad": lambda f: lambda x: eqx.filter_grad(_weighted(f), has_aux=True)(x),
}


def _weighted(f):
    def loss(x):
        out, aux = f(x)
        return (out * thr.weights(out.shape)).sum(), aux

    return loss


OUTER_REFERENCE = {
    **thr.THREADED,
    "vmap": jax.vmap,
    "grad": lambda f: jax.grad(_weighted(f), has_aux=True),
}


class Reference:
    """What has to come back, for a tag."""

    def __init__(self, the_plan, x, tag="intermediates", edits=thr.Edits(), extra=None):
        self.plan = the_plan
        capture = the_plan.capture and tag == "intermediates"
        self.program = orc.expand(the_plan.program, tag, capture)
        self.sites = orc.find_sites(self.program, derivative=the_plan.derivative)
        base = thr.threaded(self.program, edits, the_plan.derivative)
        inner = apply(the_plan.inner, base, thr.THREADED)
        extra = jtu.tree_map(jnp.asarray, extra or {})
        f = lambda x: inner(extra, x)
        f = unrolled(apply(the_plan.outer, f, OUTER_REFERENCE))
        self.out, self.taken = f(x)
        self._at_nearby = lambda: f(x + 1e-3)[1]
        # Of what is planted, whether it depends on the input says the same program
        # without it.
        self.unedited = self
        self._cotangents_in_rules()

    def _cotangents_in_rules(self):
        """Those that a rule sows are primals there."""
        for name, site in self.sites.items():
            if site.in_rule:
                bar = self.taken.get((name, "cotangent"))
                if name.endswith("_ct") and bar is not None:
                    self.taken[name, ""] = bar
                for key in list(self.taken):
                    if key[0] == name and key[1] not in ("", "count"):
                        del self.taken[key]

    @property
    def several(self):
        """The names that run several times, or have several cotangents."""
        return {n.split(orc.RUN)[0] for n in self.sites if orc.RUN in n}

    @property
    def names(self):
        return [n for n in self.sites if orc.RUN not in n]

    @ft.cached_property
    def _nearby(self):
        return self._at_nearby()

    @property
    def runs_loops_twice(self):
        """`jax.linearize` runs a loop of unknown length for its values, and once more
        with their tangents."""
        return "linearize" in self.plan.inner and orc.has_while(self.program)

    def constant(self, name, mode):
        """The executions in which it does not depend on the input, as the cotangent of
        an output, or a gradient of what is linear."""
        count = np.asarray(self.taken[name, "count"])
        same = np.ones(count.shape, bool)
        leaves = self.taken[name, mode], self._nearby[name, mode]
        for here, there in zip(*map(thr.arrays, leaves), strict=True):
            core = tuple(range(count.ndim, here.ndim))
            same &= np.all(np.asarray(here) == np.asarray(there), axis=core)
        return same

    def may_lack(self, name, mode):
        """The executions in which it need not have this derivative."""
        if _is_free(mode):
            return np.True_
        of = mode.rpartition(".")[0].removeprefix("primal").removeprefix(".")
        if of:
            return self.constant(name, of)
        # Of the values themselves, only the gradients in a program.
        if not orc.has_gradient(self.program) or not mode:
            return np.False_
        name = name.split(orc.RUN)[0] if self.sites[name].pulled else name
        before = self.unedited
        if before is self:
            return self.constant(name, "")
        return self.constant(name, "") & before.constant(name, "").all()

    def without_rule(self, name):
        """Whether it is a mark of a derivative rule, and what the function is called
        with does not depend on the input. JAX then calls the function itself."""
        if not orc.has_gradient(self.program):
            return False
        is_constant = lambda name: bool(self.constant(name, "").all())
        for n in orc.walk(self.program):
            if isinstance(n, orc.Again) and n.loop != "whole":
                marks = orc.names(orc.as_scan(n))
                if name in marks:
                    of = marks - {f"{n.name}_ct"} or marks
                    return all(map(is_constant, of))
        of, end, _ = name.rpartition("_")
        is_rule = self.sites[name].in_rule and end and of in self.sites
        return is_rule and is_constant(of)

    @ft.cached_property
    def by_other_lanes(self):
        """Marks in a bounded loop of Equinox, in a branch that some lanes take, in a
        gradient. Equinox steps all lanes until the last one is done. JAX gives those in
        another branch zeros for what theirs keeps, and so they may be the last ones: a
        lane that is done is then stepped as often as nothing here knows."""
        lanes = any(w in thr.MAPS for w in self.plan.words)
        lanes |= any(isinstance(n, orc.Vmap) for n in orc.walk(self.program))
        gradient = self.plan.derivatives or orc.has_gradient(self.program)
        if not (lanes and gradient):
            return set()
        in_branches = [
            loop
            for branches in orc.walk(self.program)
            if isinstance(branches, orc.Cond)
            for loop in orc.walk(branches)
        ]
        loops = [n for n in in_branches if _is_own(n) and n.how == "bounded"]
        return {name for n in loops if n.on != "length" for name in orc.names(n)}

    @property
    def n_inner_lanes(self):
        return sum(w in thr.MAPS for w in self.plan.inner)

    def simple(self, loops=None):
        """Names whose values have all axes, each of them."""
        return [
            name
            for name, site in self.sites.items()
            if orc.X in site.varies
            and not (site.in_rule or site.replayed or name in self.several)
            and orc.RUN not in name
            and not site.kind.startswith(("outer", "const"))
            and all(site.kept)
            and (loops is None or loops(site))
        ]


# --- comparison ---


def close(got, want):
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape:
        return False
    scale = np.max(np.abs(want[np.isfinite(want)]), initial=1.0)
    return np.allclose(got, want, rtol=5e-4, atol=4e-5 * scale, equal_nan=True)


def _constant_along(x, axis):
    return x.shape[axis] > 0 and close(np.broadcast_to(x.take([0], axis), x.shape), x)


def forms(want, primal, summed):
    """What may come back for `want`: what does not vary over some lanes may lack their
    axes. If it is the value that does not, its cotangent is the total over these."""
    for k in range(want.ndim + 1):
        for axes in itertools.combinations(range(want.ndim), k):
            drop = tuple(0 if i in axes else slice(None) for i in range(want.ndim))
            total = [i for i in axes if summed and _constant_along(primal, i)]
            form = want.sum(tuple(total), keepdims=True)
            if all(_constant_along(form, i) for i in axes):
                yield form[drop]
            if total and all(_constant_along(want, i) for i in axes):
                yield want[drop]


def check_leaf(got, want, primal, summed, what):
    want, primal = np.asarray(want), np.asarray(primal)
    if primal.size == 0 and np.ndim(got) <= want.ndim:
        return
    if not any(close(got, form) for form in forms(want, primal, summed)):
        raise Wrong(f"{what}:\n{got}\nis not\n{want}")


def _is_free(mode):
    """A tangent may not depend on what is differentiated next."""
    return mode.startswith("tangent.")


def check_tree(got, kind, want, primal, mode, what):
    """`want`: the array leaves, for a derivative those that are floats."""
    like = orc._template(kind)
    if jtu.tree_structure(got) != jtu.tree_structure(like):
        raise Wrong(f"{what}: {jtu.tree_structure(got)}")
    want, primal, ndims = iter(want), iter(primal), set()
    constant = iter(thr.is_constant(kind))
    summed = mode.count("cotangent") % 2 == 1
    for leaf, template in zip(jtu.tree_leaves(got), jtu.tree_leaves(like)):
        if not hasattr(template, "dtype"):
            if leaf != template:
                raise Wrong(f"{what}: {leaf!r} is not {template!r}")
            continue
        primal_leaf, is_constant = next(primal), next(constant)
        if mode != "" and not thr.is_float(template):
            if leaf.dtype != jax.dtypes.float0:
                raise Wrong(f"{what}: {leaf.dtype} of an integer")
            continue
        expected = next(want)
        if leaf.dtype == jax.dtypes.float0:
            if np.any(np.asarray(expected)) and not _is_free(mode):
                raise Wrong(f"{what}: no derivative instead of {expected}")
            continue
        if leaf.dtype != expected.dtype:
            raise Wrong(f"{what}: {leaf.dtype} is not {expected.dtype}")
        check_leaf(leaf, expected, primal_leaf, summed, what)
        # In `grad(vmap(grad(f)))`, a constant has one cotangent for all lanes. So what
        # belongs to that is a total, too.
        if not (is_constant and mode.count("cotangent") > 1):
            ndims.add(np.ndim(leaf) - template.ndim)
    # The total of all lanes has no axis for them.
    if len(ndims) > 1 and not summed:
        raise Wrong(f"{what}: leaves with different axes, {ndims}")


def check_out(got, want, what="out"):
    if not close(got, want):
        raise Wrong(f"{what}:\n{got}\nis not\n{want}")


def _captured_where(got, want, executions, value=None):
    """`want`, but in these executions what was captured, where that is `value`."""
    leaves = [x for x in thr.arrays(got) if x.dtype != jax.dtypes.float0]
    leaves = list(map(np.asarray, leaves))
    if [x.shape for x in leaves] != [np.shape(x) for x in want]:
        return want
    at = lambda x: np.expand_dims(executions, tuple(range(executions.ndim, x.ndim)))
    here = [at(x) & (True if value is None else x == value) for x in leaves]
    return [
        np.where(h, x, w).astype(w.dtype)
        for h, x, w in zip(here, leaves, want, strict=True)
    ]


def _any(tree):
    leaves = [x for x in jtu.tree_leaves(tree) if hasattr(x, "dtype")]
    return any(np.any(x) for x in leaves if x.dtype != jax.dtypes.float0)


def _of_last_loop(entry, n):
    """Of a loop that `jax.linearize` runs twice, with `n` runs of a name in it, those
    of the second one, which has all derivatives. Both have the same values."""
    if len(entry.get("primal", ())) != 2 * n:
        return entry
    last = {}
    for mode, values in entry.items():
        # Second cotangents of a value come after all runs.
        first, seconds = values[:n], values[2 * n :]
        last[mode] = values[n : 2 * n] + seconds
        if "tangent" in mode.split("."):
            if any(x is not None for x in first):
                raise Wrong(f"{mode}: {first} in a loop without tangents")
            continue
        half = len(seconds) // 2
        first += seconds[:half]
        last[mode] = values[n : 2 * n] + seconds[half:]
        for a, b in zip(*map(thr.arrays, (first, last[mode])), strict=True):
            if a.dtype != jax.dtypes.float0 and not close(a, b):
                raise Wrong(f"{mode}: {a} and {b} in one loop")
    return last


def _by_run(got, ref):
    """With a name for each run. What runs several times, or has two cotangents, comes
    back in tuples, with `None` for a run that has no derivative."""
    found = {}
    for name, entry in got.items():
        if name not in ref.several:
            found[name] = entry
            continue
        if ref.runs_loops_twice:
            runs = [n for n in ref.sites if n.split(orc.RUN)[0] == name]
            entry = _of_last_loop(entry, sum(not ref.sites[n].pulled for n in runs))
        for mode, values in entry.items():
            if type(values) is not tuple:
                raise Wrong(f"{name} {mode}: no tuple, but {values}")
            for i, value in enumerate(values):
                if value is not None:
                    run = f"{name}{orc.RUN}{i}" if i else name
                    found.setdefault(run, {})[mode] = value
    for name, entry in found.items():
        # In a gradient, the tangent of a value is the outer one of two derivatives. In
        # a tuple it is called so, as that of a run beside it is the only one.
        if name.split(orc.RUN)[0] in ref.several:
            for mode in [m for m in entry if m.startswith("primal.")]:
                if (alone := mode.removeprefix("primal.")) not in entry:
                    entry[alone] = entry.pop(mode)
    return found


def check_saved(got, ref: Reference, names=None, strict=True, modes=None):
    got = _by_run(got, ref)
    if names is not None:
        names = {n for n in ref.sites if n.split(orc.RUN)[0] in names}
    sites = {n: s for n, s in ref.sites.items() if names is None or n in names}
    # What does not depend on the input has no second cotangent.
    gone = [n for n, s in sites.items() if s.pulled and n not in got]
    for name in gone:
        if any(map(np.any, ref.taken[name, "cotangent"])):
            raise Wrong(f"{name}: no second cotangent")
        del sites[name]
    sites = {n: s for n, s in sites.items() if n in got or not ref.without_rule(n)}
    if set(got) != set(sites):
        raise Wrong(f"{sorted(got)} instead of {sorted(sites)}")
    for name, site in sites.items():
        entry = dict(got[name])
        of_value = name.split(orc.RUN)[0] if site.pulled else name
        count, primal = ref.taken[name, "count"], ref.taken[of_value, ""]
        unknown = None
        if site.pulled:
            entry.pop("count", None)
        elif (count_got := entry.pop("count", None)) is not None or site.conditional:
            if count_got is None or not site.conditional:
                raise Wrong(f"{name}: a count, or none")
            if name in ref.by_other_lanes and np.shape(count_got) == count.shape:
                unknown = np.asarray(count_got) != np.asarray(count)
                count = np.where(unknown, count_got, count)
            check_leaf(count_got, count, count, False, f"{name} count")
        want = {m: v for (n, m), v in ref.taken.items() if n == name and m != "count"}
        want = {m: v for m, v in want.items() if m or not site.pulled}
        for mode, value in want.items():
            label = mode or "primal"
            if modes is not None and label not in modes:
                continue
            there = label in entry
            lacking = ref.may_lack(name, mode)
            if there and unknown is not None:
                value = _captured_where(entry[label], value, unknown)
            free = lacking.all()
            if there and lacking.any() and site.conditional:
                # It may not be so in another branch: this one then has zeros for it.
                if free and not _any(entry[label]):
                    del entry[label]
                    continue
                value = _captured_where(entry[label], value, lacking, 0)
            if not there:
                if mode == "" or (not free and any(map(np.any, value))):
                    raise Wrong(f"{name}: no {label}")
                first = label in ("tangent", "cotangent") and len(want) == 2
                # A gradient may be the same for each input.
                first = first and not orc.has_gradient(ref.program)
                if strict and first and orc.X in site.varies and not site.in_rule:
                    raise Wrong(f"{name}: no {label}, though it depends on the input")
                continue
            what = f"{name} {label}"
            check_tree(entry.pop(label), site.kind, value, primal, mode, what)
        if entry:
            raise Wrong(f"{name}: {sorted(entry)} in addition")


# --- features ---


class Run(NamedTuple):
    plan: Plan
    f: Callable
    x: Any
    canonical: np.ndarray
    ref: Reference
    options: dict

    def stack(self, f=None):
        return apply(self.plan.inner, self.f if f is None else f, thr.PLAIN)

    def outer(self, saved):
        return apply(self.plan.outer, saved, OUTER)

    def save(self, f, **options):
        return save_intermediates(f, **{**self.options, **options})

    def run(self, fn):
        return self.plan.way(fn)(self.x)

    def saved(self, what="out", **options):
        """What is captured. The output is compared."""
        out, got = self.run(self.outer(self.save(self.stack(), **options)))
        check_out(out, self.ref.out, what)
        return got

    def pick(self, names):
        rng = np.random.default_rng([self.plan.seed, 10])
        return str(names[rng.integers(len(names))]) if names else None

    def reference(self, **kwargs):
        return Reference(self.plan, self.x, **kwargs)


def _double(x):
    return (x * 2 + 1).astype(x.dtype)


def _each(fn):
    def leaf(x):
        return fn(x) if hasattr(x, "dtype") and x.dtype != jax.dtypes.float0 else x

    return lambda tree: jtu.tree_map(leaf, tree)


def _no_outer_lanes(run):
    return not any(w in ("vmap", "grad") for w in run.plan.outer)


def _tree(kind, leaves):
    leaves = iter(leaves)
    like = orc._template(kind)
    return jtu.tree_map(lambda x: next(leaves) if hasattr(x, "dtype") else x, like)


def _check_planted(run, name, new, edits, extra=None, mode="primal"):
    inside = orc.has_gradient(run.ref.program)
    if (run.plan.derivatives or inside) and _has_grad(run):
        # What is planted then has two derivatives, one of each kind.
        return False
    planted = plant(
        run.stack(), {name: new}, mode=mode, capture=run.options.get("capture")
    )
    got = run.run(run.outer(run.save(planted)))
    if run.plan.derivatives:
        edits = edits._replace(keeps_derivative=True)
    ref = run.reference(edits=edits, extra=extra)
    ref.unedited = run.ref
    check_out(got[0], ref.out, f"out with {name} planted")
    check_saved(got[1], ref, strict=False)
    return True


def plant_value(run):
    name = run.pick(run.ref.simple())
    if name is None or not _no_outer_lanes(run):
        return False
    kind = run.ref.sites[name].kind
    shift = lambda x: x * 0.9 + 0.05 if thr.is_float(x) else x + 1
    new = [shift(x) for x in run.ref.taken[name, ""]]
    extra = {(name, "set"): new}
    return _check_planted(run, name, _tree(kind, new), thr.Edits(), extra)


def plant_function(run):
    name = run.pick(run.ref.simple())
    if name is None:
        return False
    return _check_planted(run, name, _each(_double), thr.Edits({name: _double}))


def _loop(site):
    """Which axis is the outermost loop."""
    at = [i for i, a in enumerate(site.axes) if not a.is_vmap]
    return at[0] if at and site.axes[at[0]].size > 1 else None


def plant_iteration(run):
    name = run.pick(run.ref.simple(lambda s: _loop(s) is not None))
    if name is None or not _no_outer_lanes(run):
        return False
    ref = run.ref
    axis = ref.n_inner_lanes + _loop(ref.sites[name])
    here = np.zeros(ref.taken[name, "count"].shape, bool)
    here[(slice(None),) * axis + (1,)] = True
    extra = {(name, "here"): jnp.asarray(here)}
    edits = thr.Edits({name: _double})
    return _check_planted(run, f"{name}/1", _each(_double), edits, extra)


def plant_cotangent(run):
    ways = run.plan.derivatives
    name = run.pick(run.ref.simple())
    if name is None or len(ways) != 1 or ways[0] not in thr.REVERSE:
        return False
    twice = lambda x: x * 2
    edits = thr.Edits(cotangent={name: twice})
    return _check_planted(run, name, _each(twice), edits, mode="cotangent")


def plant_saved(run):
    if orc.has_while(run.plan.program) or not _no_outer_lanes(run):
        return False
    stack, capture = run.stack(), run.options.get("capture")

    def again(x):
        saved = run.save(stack)(x)[1]
        return plant(stack, saved, capture=capture)(x)

    if not run.ref.sites:
        return False
    out = run.run(run.outer(again))
    check_out(out, run.ref.out, "out with what was saved planted")
    return True


def plant_inside(run):
    name = run.pick(run.ref.simple())
    if name is None:
        return False
    capture = run.options.get("capture")
    planted = plant(run.f, {name: _each(_double)}, capture=capture)
    reduce = run.options.get("reduce")
    got = run.run(run.outer(save_intermediates(run.stack(planted), reduce=reduce)))
    ref = run.reference(edits=thr.Edits({name: _double}))
    check_out(got[0], ref.out, f"out with {name} planted inside")
    # Of the modules that the inner one marks, what it planted is for others too.
    names = {n for n in ref.sites if n == name or f"{orc.CAPTURED}/" not in n}
    check_saved(got[1], ref, names, strict=False)
    return True


def watch(run):
    """The events of a name and mode, whatever their order, are what is stacked."""
    if any(w in thr.SHARDED for w in run.plan.inner) or run.plan.outer:
        return False
    events = []
    tapped = tap(run.stack(), events.append, capture=run.options.get("capture"))
    out = run.run(tapped)
    jax.block_until_ready(out)
    jax.effects_barrier()
    check_out(out, run.ref.out, "out of tap")
    ref = run.ref
    for name in ref.simple(lambda s: not s.conditional):
        site = ref.sites[name]
        if any(a.is_vmap for a in site.axes):
            continue
        for (n, mode), leaves in ref.taken.items():
            if n == name and mode in ("", "tangent", "cotangent"):
                _check_events(events, name, mode, site, leaves, ref.n_inner_lanes)
    return True


def _check_events(events, name, mode, site, leaves, n_lanes):
    label = mode or "primal"
    mine = [e for e in events if (e.name, e.mode) == (name, label)]
    n = int(np.prod([a.size for a in site.axes], dtype=int))
    if not mine and mode and not any(np.any(np.asarray(x)) for x in leaves):
        return
    if sorted(e.count for e in mine) != list(range(n)):
        raise Wrong(f"tap, {name} {label}: {[e.count for e in mine]}, not {n} events")
    loops = list(np.ndindex(*(a.size for a in site.axes)))
    lanes = (slice(None),) * n_lanes
    left = [[np.asarray(x)[(*lanes, *i)] for x in leaves] for i in loops]
    for event in mine:
        got = [x for x in thr.arrays(event.value) if x.dtype != jax.dtypes.float0]
        constant = thr.is_constant(site.kind)
        want = (
            [x for x, f in zip(left[0], constant) if not (mode and f)] if left else []
        )
        if len(got) not in (len(want), len(leaves)):
            raise Wrong(f"tap, {name} {label}: {event}")
        keep = lambda xs: (
            xs
            if len(got) == len(leaves)
            else [x for x, f in zip(xs, _float_flags(site.kind, mode)) if not f]
        )
        pairs = [[*zip(got, keep(x), strict=True)] for x in left]
        # Of those that are close, the closest: very small ones are all close.
        close_ones = [
            i for i, p in enumerate(pairs) if all(_close_event(*x) for x in p)
        ]
        if not close_ones:
            raise Wrong(f"tap, {name} {label}: {event} is none of {left}")
        del left[min(close_ones, key=lambda i: sum(map(_distance, pairs[i])))]


def _float_flags(kind, mode):
    flags = thr.is_constant(kind)
    if not mode:
        return flags
    templates = thr.arrays(orc._template(kind))
    return [f for f, x in zip(flags, templates) if thr.is_float(x)]


def _close_event(got, want):
    return np.ndim(got) <= want.ndim and close(np.broadcast_to(got, want.shape), want)


def _distance(pair):
    got, want = pair
    return np.abs(np.asarray(got, np.float64) - want).sum()


def _reduced(row, program, x, names):
    """What a reducer makes of the executions of one lane, by name."""
    oracle = orc.Oracle(program, x)
    found = {}
    for name in names:
        values = [v for _, v in oracle.at(name)]
        zero = orc._map_arrays(np.zeros_like, orc._template(oracle.sites[name].kind))
        found[name] = thr.arrays(row.by_hand(values, zero))
    return found


def reduce_(run):
    """In order of execution, each lane by itself."""
    feature, ref = run.plan.feature, run.ref
    if any(w in thr.SHARDED + ("grad",) for w in run.plan.words):
        return False
    if any(isinstance(n, orc.Rule) for n in orc.walk(ref.program)):
        return False
    names = [
        n
        for n, s in ref.sites.items()
        if not any(a.is_vmap for a in s.axes) and orc.X in s.varies
    ]
    if not names:
        return False
    row = REDUCERS[feature]
    if not row.in_order:
        return _appended(run, names)
    got = run.saved("out with a reducer", names=names, reduce=row.reducer)
    lanes = run.canonical.shape[:-1]
    each = [
        _reduced(row, ref.program, run.canonical[i], names) for i in np.ndindex(*lanes)
    ]
    for name in names:
        leaves = thr.arrays(got[name]["primal"])
        columns = zip(*(e[name] for e in each))
        for leaf, column in zip(leaves, columns, strict=True):
            want = np.stack(column).reshape((*lanes, *np.shape(column[0])))
            # Of a leaf that does not vary, one may be kept for all lanes.
            if not any(close(leaf, w) for w in forms(want, want, False)):
                raise Wrong(f"{feature} {name}:\n{leaf}\nis not\n{want}")
    return True


def _appended(run, names):
    got = run.saved("out with Append", names=names, reduce=Append())
    for name, entry in got.items():
        for mode, value in entry.items():
            if mode != "count" and (type(value) is not tuple or not value):
                raise Wrong(f"Append {name} {mode}: {value}")
    one = {
        n: {m: v if m == "count" else v[0] for m, v in entry.items()}
        for n, entry in got.items()
        if not run.ref.sites[n].conditional
    }
    check_saved(one, run.ref, names=set(one))
    return True


def transform(run):
    fn = lambda tree: [jnp.sum(x * x) for x in thr.arrays(tree)]
    if not run.ref.sites:
        return False
    got = run.saved("out with a transform", transform=fn, modes="primal")
    got = _by_run(got, run.ref)
    for name, want in _cores(run.ref).items():
        leaves = got[name]["primal"]
        for leaf, (x, core) in zip(leaves, want, strict=True):
            check_leaf(leaf, (x * x).sum(core), x.sum(core), False, f"{name} squares")
    return True


def _cores(ref):
    """Of each name the leaves, and which of their axes are those of one value."""
    found = {}
    for name, site in ref.sites.items():
        if site.pulled or name in ref.by_other_lanes:
            continue
        like = thr.arrays(orc._template(site.kind))
        leaves = [np.asarray(x) for x in ref.taken[name, ""]]
        core = [tuple(range(x.ndim - t.ndim, x.ndim)) for x, t in zip(leaves, like)]
        found[name] = list(zip(leaves, core, strict=True))
    return found


def summarized(run):
    if not run.ref.sites:
        return False
    got = run.saved("out with summarize", transform=summarize, modes="primal")
    got = _by_run(got, run.ref)
    is_summary = lambda x: hasattr(x, "rms")
    for name, want in _cores(run.ref).items():
        leaves = jtu.tree_leaves(got[name]["primal"], is_leaf=is_summary)
        leaves = [x for x in leaves if is_summary(x)]
        count = np.asarray(run.ref.taken[name, "count"])
        for leaf, (x, core) in zip(leaves, want, strict=True):
            x = x.astype(np.float32)
            total, largest = x.sum(core), x.max(core, initial=-np.inf)
            check_leaf(leaf.mean * leaf.size, total, total, False, f"{name} total")
            ran = np.broadcast_to(count > 0, largest.shape)
            largest = np.where(ran, largest, 0)
            check_leaf(leaf.max, largest, largest, False, f"{name} max")
    return True


def nested(run):
    if _has_grad(run):
        return False
    other = run.reference(tag="other")
    both = save_intermediates(run.save(run.stack()), tag="other")
    (out, mine), others = run.run(run.outer(both))
    check_out(out, run.ref.out, "out of two")
    check_saved(mine, run.ref)
    check_saved(others, other)
    names = list(run.ref.sites)[::2]
    check_pair(run, names, run.pick(["all", "primal"]))
    return True


def check_pair(run, names, mode):
    """Of two with one tag, the inner one takes what it returns, and the outer one all
    else. The outer one captures no module."""
    if not names:
        return
    modes = None if mode == "all" else mode
    inner = run.save(run.stack(), names=names, modes=modes)
    (out, mine), rest = run.run(run.outer(save_intermediates(inner)))
    check_out(out, run.ref.out, "out of a pair")
    both = {}
    for name, entry in (*mine.items(), *rest.items()):
        of_name = both.setdefault(name, {})
        if twice := (of_name.keys() & entry.keys()) - {"count"}:
            raise Wrong(f"{name} {twice}: taken by both")
        # Of two counts, that of the primals: a constant in a branch has no cotangent.
        both[name] = {**entry, **of_name}
    at_least = {n for n in run.ref.sites if n in names or f"{orc.CAPTURED}/" not in n}
    if modes:  # which neither of the two takes of modules
        at_least -= {n for n in at_least if f"{orc.CAPTURED}/" in n}
        both = {n: entry for n, entry in both.items() if n in at_least}
    check_saved(both, run.ref, names=at_least)


def _has_grad(run):
    return "grad" in run.plan.outer


def some_names(run):
    names = run.ref.names[::2]
    if not names:
        return False
    got = run.saved("out with names", names=names)
    check_saved(got, run.ref, names=set(names))
    return True


def some_modes(run):
    """What comes back of a mode does not depend on what else is asked for."""
    every = run.saved()
    check_saved(every, run.ref)
    found = dict.fromkeys(m for entry in every.values() for m in entry if m != "count")
    mode = run.pick([*found])
    if mode is None:
        return False
    alone = run.saved(modes=mode)
    want = {n: entry[mode] for n, entry in every.items() if mode in entry}
    got = {n: entry[mode] for n, entry in alone.items() if mode in entry}
    if got.keys() != want.keys():
        raise Wrong(f"{mode} of {sorted(got)} instead of {sorted(want)}")
    for name, value in want.items():
        pairs = zip(thr.arrays(got[name]), thr.arrays(value), strict=True)
        if not all(x.dtype == jax.dtypes.float0 or close(x, y) for x, y in pairs):
            raise Wrong(f"{name} {mode} alone:\n{got[name]}\nis not\n{value}")
    return True


def spec(run):
    names = [n for n in run.ref.simple() if run.ref.sites[n].kind in ("v", "unused")]
    if not names or not _no_outer_lanes(run):
        return False
    shape = {n: np.shape(run.ref.taken[n, ""][0]) for n in names}
    right = {n: Float[Array, " ".join(map(str, s))] for n, s in shape.items()}
    check_saved(run.saved("out with a spec", spec=right), run.ref)
    name = run.pick(names)
    wrong = {name: Float[Array, " ".join(map(str, (*shape[name], 3)))]}
    try:
        jax.eval_shape(lambda x: run.save(run.stack(), spec=wrong)(x)[0], run.x)
    except SowTypeError as error:
        if name not in str(error):
            raise Wrong("a SowTypeError without the name") from error
    else:
        raise Wrong(f"a wrong spec of {name} passes")
    return True


CHECKS = {
    "none": lambda run: True,
    "plant value": plant_value,
    "plant function": plant_function,
    "plant iteration": plant_iteration,
    "plant cotangent": plant_cotangent,
    "plant what was saved": plant_saved,
    "plant inside": plant_inside,
    "tap": watch,
    **dict.fromkeys(REDUCERS, reduce_),
    "transform": transform,
    "summarize": summarized,
    "nested": nested,
    "names": some_names,
    "modes": some_modes,
    "spec": spec,
}


def check(the_plan: Plan, mark: Callable = sow) -> str:
    """What was checked, in addition to the output. `mark` is what marks the values."""
    f = orc.to_jax(the_plan.program, mark, orc.to_layers(the_plan.program))
    x, canonical = inputs(the_plan)
    outer = {**OUTER, "grad": thr.PLAIN["grad"]}
    plain = apply(the_plan.outer, apply(the_plan.inner, f, thr.PLAIN), outer)
    try:
        return _check(the_plan, f, x, canonical)
    except Wrong:
        raise
    except Exception as error:
        if documented(error, the_plan):
            raise
        try:
            the_plan.way(lambda x: plain(x))(x)
        except Exception as same:
            raise Refused(f"{type(same).__name__}: {str(same)[:60]}") from error
        raise


def _check(the_plan, f, x, canonical):
    ref = Reference(the_plan, x)
    options: dict[str, Any] = {"capture": orc.Module} if the_plan.capture else {}
    run = Run(the_plan, f, x, canonical, ref, options)
    several, lacking = ref.several, set(filter(ref.without_rule, ref.sites))
    if several & lacking:
        several &= {*run.saved(reduce=Append())}
    if several:
        options["reduce"] = dict.fromkeys(several, Append())
    # What the others check has to do with each name.
    feature = the_plan.feature if not lacking or the_plan.feature == "modes" else "none"
    if feature == "none" or not CHECKS[feature](run):
        check_saved(run.saved(), ref)
        return "values"
    return feature


# --- many ---


class Report:
    def __init__(self):
        self.programs = 0
        self.features = collections.Counter()
        self.exceptions: dict[str, list[int]] = collections.defaultdict(list)
        self.failing: dict[int, str] = {}
        self.start = time.monotonic()

    def run(self, seed: int, verbose: bool = False):
        self.programs += 1
        the_plan = plan(seed)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                # A program, or what of it runs, may have no sow.
                warnings.filterwarnings("ignore", ".*found no mark")
                self.features[check(the_plan)] += 1
        except Refused as error:
            self.exceptions[f"JAX without a capture, {error}"].append(seed)
        except Exception as error:
            label = documented(error, the_plan)
            if label:
                self.exceptions[label].append(seed)
            else:
                self.failing[seed] = f"{type(error).__name__}: {str(error)[:300]}"
                if verbose:
                    print(the_plan, file=sys.stderr)
                    traceback.print_exc()
                else:
                    print(f"{seed}: {self.failing[seed]}", file=sys.stderr, flush=True)

    def __str__(self):
        seconds = time.monotonic() - self.start
        lines = [f"jax {jax.__version__}: {self.programs} programs, {seconds:.0f} s"]
        lines += ["checked:"]
        lines += [f"  {n:5} {what}" for what, n in self.features.most_common()]
        lines += ["exceptions:"]
        for what, seeds in self.exceptions.items():
            lines += [f"  {len(seeds):5} {what}, seeds {', '.join(map(str, seeds))}"]
        lines += [f"failing seeds: {sorted(self.failing) or 'none'}"]
        lines += [f"  {seed}: {what}" for seed, what in sorted(self.failing.items())]
        return "\n".join(lines)


def many(seed: int, programs: int, seconds: float, verbose: bool = False) -> Report:
    report = Report()
    for this in range(seed, seed + programs):
        if time.monotonic() - report.start > seconds:
            break
        report.run(this, verbose)
        if report.programs % 50 == 0:
            jax.clear_caches()
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    report = many(args.seed, args.programs, args.seconds, args.verbose)
    print(report)
    sys.exit(bool(report.failing))


if __name__ == "__main__":
    main()
