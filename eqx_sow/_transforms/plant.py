"""`plant`."""

import dataclasses as dc
from collections import Counter, defaultdict
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
)
from typing import Any, ClassVar, NamedTuple, ParamSpec, TypeVar

import equinox as eqx
import jax.tree_util as jtu
import numpy as np

from .._errors import DuplicateSowError, SowError
from .._frames import api_boundary
from .._handlers.collect import Collect, EACH_PLACE
from .._handlers.fixed import NOT_PLANTED, NotFixed
from .._handlers.planting import prepare, Replace, slot_of
from .._mark.listening import listening
from .._mark.site import Site
from .._mark.static import Const, SameParts
from .._names import check_known
from .._values.assemble import by_run, runs_several_times
from .._values.entry import Entry, grouped
from .._values.modes import labels, Mode
from .._walk.handler import Given
from .._walk.sows import Found
from .program import Program
from .transformed import of_function, Transformed, wrap
from .typed import Function


# Which iteration of each loop around a sow is planted, or `None` for all of a loop.
_At = tuple[int | None, ...]


def _places(
    patterns: Collection[str], program: Program
) -> dict[str, list[tuple[str, _At]]]:
    """The names and iterations that each pattern fits: of `h/3`, `h` and `(3,)`. What
    is spelled out goes before globs, and these go in their order."""
    selection = program.select(patterns)
    program.check_selected("plant(fn, values)", selection)
    every = [(x.site.name, selection.of(named)) for x, named in program.named]
    return {
        selection.patterns[i]: [
            (name, one.at) for name, found in every for one in found.get(i, ())
        ]
        for i in sorted(range(len(selection.patterns)), key=selection.order)
    }


def _entries(
    program: Program, places: Mapping[str, Sequence[tuple[str, _At]]]
) -> tuple[dict[Any, list[Entry]], dict[str, list[Entry]]]:
    """What would be captured, as shapes, for each `Site.key` that is planted; and for
    each name, with its primals. One of the names that a pattern fits has to have a
    value of the mode."""
    chosen = tuple(
        dict.fromkeys(name for found in places.values() for name, _ in found)
    )
    mode = program.options.mode
    survey = Collect(
        **program.listens(program.select(chosen)),
        modes=(mode,),
        reduce=EACH_PLACE,
        transform=SameParts(None),
    )
    found = program.survey(survey)
    mode_of = labels({e.site.key for e in found})
    entries = grouped([e for e in found if mode_of[e.site.key] == mode])
    there = dict.fromkeys(name for name, *_ in entries)
    without = [
        name
        for found in places.values()
        if there.keys().isdisjoint(name for name, _ in found)
        for name, _ in found
    ]
    check_known(
        f"plant(fn, values, mode={mode!r})",
        without,
        there,
        f"is marked, but has no {mode} here (a cotangent is in "
        "`plant(eqx.filter_grad(fn), ...)`)",
        kind=f"names with a {mode}",
    )
    return entries, grouped(found, lambda site: site.name)


class _Run(NamedTuple):
    """Where something is planted: at one run of a `Site.key`, number `run`, or at all
    (`None`). `entry` is what would be captured there, `found` the sows, and `values`
    what is planted in which iterations."""

    run: int | None
    entry: Entry
    found: list[Found]
    values: dict[_At, Any]


def _check_one_place(site: Site, loops: Collection[tuple[int, ...]]) -> None:
    """Raises if a value, or an index, cannot be for all places of a run. In `loops` are
    the numbers of iterations around each place."""
    if len(loops) > 1:
        found = " and ".join(str(list(x)) for x in sorted(loops))
        raise SowError(
            f"`plant`: {site.said} is in several branches, with different loops around "
            f"it: {found} iterations, outermost first. No value has the axes of all, "
            "and no index is right for all. Plant a function under the name without an "
            "index, or give the values different names."
        )


def _has(loops: Sequence[int], at: _At) -> bool:
    """Whether what is in these loops has the iteration."""
    return not at or (
        len(at) == len(loops) and all(i is None or i < n for i, n in zip(at, loops))
    )


def _that_has(run: Iterable[Found], ats: Iterable[_At]) -> list[_At]:
    """Those of the iterations that a run has."""
    loops = {x.loops for x in run}
    return [at for at in ats if any(_has(x, at) for x in loops)]


def _runs(
    mine: list[Entry],
    entries: list[Entry],
    found: list[Found],
    values: dict[_At, Any],
    together: Iterable[Sequence[_At]],
    mode: str,
) -> tuple[list[_Run], Sequence[frozenset] | None]:
    """Where a `Site.key` is planted, given its entries, and those of its name, with all
    sows of that name; and `Site.of` of each run, if they are planted one by one. Of
    each iteration, those runs are planted that have it. `together` are the iterations
    of one pattern: layer 2 is `(2,)` for a run in a loop over layers, and `(None, 2)`
    for another one, around which there is a loop over steps."""
    key = mine[0].site.key
    of_key = [x for x in found if x.site.key == key]
    functions = all(map(callable, values.values()))
    alike = len({x.loops for x in of_key}) == 1
    if not runs_several_times(mine, entries) or (
        functions and (alike or not any(values))
    ):
        return [_Run(None, mine[0], of_key, values)], None
    primals = [e for e in entries if not e.site.modes]
    runs = by_run(mine, entries)
    ofs = [(e or primals[i]).site.execution.of for i, e in enumerate(runs)]
    sows = [[x for x in of_key if not x.site.execution.of.isdisjoint(of)] for of in ofs]
    around = [
        xs or [x for x in found if not x.site.execution.of.isdisjoint(of)]
        for xs, of in zip(sows, ofs)
    ]
    given: list[dict[_At, Any]] = [{} for _ in runs]
    for ats in together:
        fits = {i: _that_has(xs, ats) for i, xs in enumerate(around)}
        fits = {i: here for i, here in fits.items() if here}
        where = [around[i][0].site for i in fits]
        each = _one_by_one(values[ats[0]], mine[0].site, where, mode)
        for (i, here), x in zip(fits.items(), each):
            if x is None:
                continue
            if runs[i] is None and not callable(x):
                raise SowError(
                    f"`plant`: run {i} of {key[0]!r}, at {where[0].where}, has no "
                    f"{mode}. Leave None there, as it was captured."
                )
            given[i] |= dict.fromkeys(here, x)
    return [
        _Run(i, e, xs, of_run)
        for i, (e, xs, of_run) in enumerate(zip(runs, sows, given))
        if e is not None and of_run
    ], ofs


def _one_by_one(given: Any, site: Site, runs: Sequence[Site], mode: str) -> Any:
    """What is planted in each of these runs: of a tuple, the entries."""
    form = site.form.treedef
    has_form = lambda x: Const(jtu.tree_structure(x)) == form
    value: Any = given
    if callable(value):
        return [value] * len(runs)
    if isinstance(value, Mapping) and not has_form(value):
        value = value.get(mode, value)
    if len(runs) == 1:
        return [value]
    if type(value) in (tuple, list) and len(value) == len(runs):
        # The value of a single run may also be a tuple.
        single = has_form(value) and not any(x is None or has_form(x) for x in value)
        if not single:
            return value
    n = len(runs)
    where = " and at ".join(dict.fromkeys(x.where for x in runs))
    raise DuplicateSowError(
        f"`plant`: {site.name!r} runs {n} times: at {where}. Plant a tuple of {n} "
        "values, one for each run in order of execution, as `save_intermediates` "
        "returns it (None leaves a run as it is); or plant a function, which is called "
        "at each of them."
    )


def _traced_again(program: Program, found: NotFixed) -> Program:
    """The program, in which arrays of NumPy's can be replaced that are not what is
    planted there."""
    every = frozenset(found.found)
    said = " and ".join(dict.fromkeys(found.found.values()))
    if every <= program.replaced:
        raise SowError(
            f"`plant`: at {said} there is a NumPy array, in a function that eqx_sow "
            "cannot trace again, so it would be used whatever you plant. Mark a JAX "
            "array there: `jnp.asarray(...)`."
        )
    try:
        return program.again(every)
    except SowError:
        raise
    except Exception as e:  # whatever the program raises
        left = program.left | found.captured
        if every <= left:
            return dc.replace(program, left=left)
        e.add_note(
            f"Something else is planted for the NumPy array of {said}, or it is "
            "traced, so it is a JAX array now. Where the program needs its numbers "
            "while it is traced, as an index or a shape, plant the NumPy array that is "
            "marked there, outside of `jax.jit`."
        )
        raise


class _Plant(Transformed):
    _call: ClassVar[str] = "plant"

    def _result(self, program: Program) -> Any:
        try:
            return type(self)._planted(self, program)
        except NotFixed as e:
            if e.traced and program.compiled:
                raise
            found = e
        return type(self)._result(self, _traced_again(program, found))

    def _planted(self, program: Program) -> Any:
        given = self._others["values"]
        places = _places(given, program)
        # For each name, what by iteration: `{"h/3": v}` is `{"h": {(3,): v}}`.
        chosen: dict[str, dict[_At, Any]] = defaultdict(dict)
        together: dict[str, dict[str, list[_At]]] = defaultdict(dict)
        for pattern, found in places.items():
            for name, at in found:
                if at not in chosen[name]:
                    chosen[name][at] = given[pattern]
                    together[name].setdefault(pattern, []).append(at)
        n = Counter(x.site.key for x in program.mine)
        has_value = {k: not all(map(callable, v.values())) for k, v in chosen.items()}
        several = {
            name
            for (name, *_), k in n.items()
            if k > 1 and (has_value.get(name) or any(chosen.get(name, ())))
        }
        if several:
            program = program.with_executions()
        of_key, of_name = _entries(program, places)
        found = defaultdict(list)
        for x in program.mine:
            found[x.site.name].append(x)
        values, planted, runs, not_fixed = {}, {}, {}, NotFixed()
        for key, entries in of_key.items():
            name, *_ = key
            each, ofs = _runs(
                entries,
                of_name[name],
                found[name],
                chosen[name],
                together[name].values(),
                program.options.mode,
            )
            if ofs is not None:
                runs[key] = tuple(ofs)
            for run in each:
                if any(run.values) or not all(map(callable, run.values.values())):
                    _check_one_place(run.entry.site, {x.loops for x in run.found})
                # What is for fewer iterations goes before what is for more, and so
                # last.
                ats = sorted(run.values, key=lambda at: len(at) - at.count(None))
                sites, more = [x.site for x in run.found], (program.options, not_fixed)
                plans = [
                    prepare(run.entry, sites, at, run.values[at], *more) for at in ats
                ]
                slot = slot_of(key, run.run)
                planted[slot] = tuple(new for new, _ in plans)
                values[slot] = [arrays for _, arrays in plans]
        program.check_recomputed(
            of_key,
            "Plant before you differentiate: `eqx.filter_grad(plant(fn, ...))`.",
            planted=True,
        )
        has_outer = listening.value is not None
        left = program.left
        not_fixed.check(left)
        handler = Replace(
            program.options.tag, SameParts(planted), SameParts(runs), has_outer, left
        )
        carry = {NOT_PLANTED: np.False_} if left else {}
        given = Given(carry, values)
        if any(x.site.fixed for x in program.mine if x.site.key in of_key):
            # A function may return another array. By now, no part of the program has
            # been evaluated, with marks and prints for outer transformations.
            program.survey(handler, given)
        outs, taken = program.evaluate(handler, given)
        if left:
            outs = eqx.error_if(
                outs,
                taken.carry[NOT_PLANTED],
                "`plant`: zeros are planted in the place of a NumPy array that the "
                "program needs while it is traced, and the mark, which did not run "
                "where they were captured, ran.",
            )
        return program.output(outs)


_P = ParamSpec("_P")
_T = TypeVar("_T")


@api_boundary
@of_function
def plant(
    fn: Callable[_P, _T],
    values: Mapping[str, Any],
    *,
    mode: Mode = "primal",
    tag: Hashable = "intermediates",
    capture: bool | type | tuple[Any, ...] | Callable[..., Any] | None = None,
    methods: str | Sequence[str] = ("__call__",),
    inputs: bool = False,
    calls: bool = False,
    scope: bool = False,
    with_index: bool = False,
) -> Function[_P, _T]:
    """Replaces marked values while a function runs.

    Planting a value is the same as editing the program there. Planting what
    [`eqx_sow.save_intermediates`][] captured changes nothing (except in a
    `while_loop`).

    **Arguments:**

    - `fn`: a function, a model, or a transformed function such as
        `eqx.filter_grad(loss)`.
    - `values`: maps names or globs to either
        - a PyTree like the one that is captured there: with the same structure,
            static leaves, dtypes and shapes, including the leading axes of loops and
            `vmap`s (in a `while_loop`, one value for all iterations). You can pass an
            entry of `intermediates`, `{mode: value, ...}`, directly; or
        - for a name that runs several times, a tuple with one of these for each run, in
            order of execution, or None to leave that run as it is; or
        - a function of the value, as the code at the mark sees it: in a `vmap` or a
            loop, of one example in one iteration. [`eqx_sow.batched`][] around it
            passes all examples, as leading axes, and it returns them.

        Names and globs are those of the option `names` of
        [`eqx_sow.save_intermediates`][]: `"blocks/*"` is the blocks, without what is in
        them, and `"h/3"` is one iteration of a loop, whose value has no axis for that
        loop. If several keys match a mark, a name takes precedence over globs, and an
        earlier glob over a later one.

        You can plant what `save_intermediates(model)` captured into a function of
        `model`, although the names lack the prefix `model/`, as long as only one model
        in the function matches.

    - `mode`: what to replace: `"primal"` (the value); or, if `fn` differentiates,
        `"cotangent"` (the gradient that flows back there) or `"tangent"`. Second-order
        modes are joined by a dot.
    - `tag`: replace only marks with this tag.
    - `capture`, `methods`, `inputs`, `calls`, `scope`: as in `save_intermediates`.
        Under `"layers/1.inputs"` you plant the arguments of the module, a tuple `(args,
        kwargs)`. Under `"layers/1.call"` you plant an [`eqx_sow.Call`][], and the
        program continues with its `out`: `lambda c: c._replace(out=c.args[0])` skips a
        layer.
    - `with_index`: call functions with `(value, index)`. `index` is a tuple of the
        iterations of the loops around the mark, outermost first, as traced int32s: in a
        scan over layers, `index[0]` is the layer. So the layer can be an argument of a
        compiled program. A `while_loop`, or a `fori_loop` with traced bounds, has no
        entry in it. In a reversed scan, iteration `i` has `xs[i]`.

    **Returns:**

    A function with the signature of `fn`, and an output of the same structure. The
    planted value is still marked: `save_intermediates(plant(fn, values))` captures it,
    and needs no `capture` for planted modules. A `tap`, inside or around, sends the
    planted value. Planted arrays may be traced and differentiated. The function has the
    methods `.eval_shape`, `.lower` and `.trace` of [`eqx_sow.save_intermediates`][].

    You can plant other values for a marked NumPy array, too: it is then a JAX array in
    the program. If the program needs its numbers while it is traced, as an index or a
    shape, JAX raises an error.

    `plant(eqx.filter_grad(loss), ...)` replaces values within the computation of the
    gradient, but the gradient still flows back through a planted primal.
    `eqx.filter_grad(plant(loss, ...))` is the gradient of the edited program, in which
    nothing flows back from a constant. A `custom_jvp` or `custom_vjp` function with a
    planted value inside has the derivative of the edited function, not of its rule.

    **Raises:**

    `TypeError` and `ValueError` if an option is not of the kind above. When called:

    - [`eqx_sow.UnknownSowError`][] if a name or a glob matches nothing, or does not
      have this mode, or there is no such iteration;
    - [`eqx_sow.SowError`][] if the structure, a shape, a dtype or a static leaf
      differs;
    - [`eqx_sow.DuplicateSowError`][] if a value, neither a tuple nor a function, is
      planted under a name that runs several times;
    - [`eqx_sow.UnsupportedPrimitiveError`][] if a value cannot be replaced where it is
      marked.

    !!! example

        ```python
        import equinox as eqx
        import eqx_sow
        import jax
        import jax.numpy as jnp

        model = eqx.nn.MLP(2, 1, 8, 2, key=jax.random.key(0))
        ablated = eqx_sow.plant(model, {"layers/1": jnp.zeros_like}, capture=True)
        ablated(jnp.ones(2))

        def fn(x):
            return jax.lax.fori_loop(0, 6, lambda i, x: eqx_sow.sow(x + i, "x"), x)

        eqx_sow.plant(fn, {"x/3": lambda x: 2 * x})(jnp.ones(2))

        @jax.jit
        def without(i, x):
            zero = lambda value, index: jnp.where(index[0] == i, 0, value)
            return eqx_sow.plant(fn, {"x": zero}, with_index=True)(x)

        [without(i, jnp.ones(2)) for i in range(6)]  # compiled once
        ```
    """
    options = {k: v for k, v in locals().items() if k != "fn"}
    return wrap(_Plant, fn, options)
