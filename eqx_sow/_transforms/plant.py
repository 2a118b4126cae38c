"""`plant`."""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, ClassVar, ParamSpec, TypeVar

from .._errors import SowError
from .._frames import api_boundary
from .._handlers.collect import Collect, EACH_PLACE
from .._handlers.planting import prepare, Replace
from .._mark.listening import listening
from .._mark.static import SameParts
from .._names import check_known
from .._values import merge as _merge
from .._values.entry import Entry, grouped
from .._values.modes import labels, Mode
from .._walk.handler import Given
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
) -> dict[Any, list[Entry]]:
    """What would be captured, as shapes, for each `Site.key` that is planted. One of
    the names that a pattern fits has to have a value of the mode."""
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
    found = program.with_executions(lambda site: False).survey(survey)
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
        f"is sown, but has no {mode} here (a cotangent is in "
        "`plant(eqx.filter_grad(fn), ...)`)",
        kind=f"names with a {mode}",
    )
    return entries


def _check_one_place(
    entries: Sequence[Entry], loops: Collection[tuple[int, ...]], has_value: bool
) -> None:
    """Raises if a value, or an index, cannot be for all places of a `Site.key`. In
    `loops` are the numbers of iterations around each place."""
    site = entries[0].site
    if len(loops) > 1:
        found = " and ".join(str(list(x)) for x in sorted(loops))
        raise SowError(
            f"`plant`: {site.said} is in several branches, with different loops around "
            f"it: {found} iterations, outermost first. No value has the axes of all, "
            "and no index is right for all. Plant a function under the name without an "
            "index, or give the values different names."
        )
    if len(entries) > 1 and has_value:
        remedy = "or plant a function, which is called at each of them."
        raise _merge.duplicate(site, entries[1].site, remedy)


class _Plant(Transformed):
    _call: ClassVar[str] = "plant"

    def _result(self, program: Program) -> Any:
        given = self._others["values"]
        places = _places(given, program)
        # For each name, what by iteration: `{"h/3": v}` is `{"h": {(3,): v}}`.
        chosen: dict[str, dict[_At, Any]] = defaultdict(dict)
        for pattern, found in places.items():
            for name, at in found:
                chosen[name].setdefault(at, given[pattern])
        sows = defaultdict(list)
        for x in program.mine:
            sows[x.site.key].append(x)
        values, planted = {}, {}
        for key, entries in _entries(program, places).items():
            by_iteration = chosen[key[0]]
            has_value = not all(map(callable, by_iteration.values()))
            if has_value or any(by_iteration):
                loops = {x.loops for x in sows[key]}
                _check_one_place(entries, loops, has_value)
            # What is for fewer iterations goes before what is for more, and so last.
            ats = sorted(by_iteration, key=lambda at: len(at) - at.count(None))
            sites = [x.site for x in sows[key]]
            plans = [
                prepare(entries[0], sites, at, by_iteration[at], program.options)
                for at in ats
            ]
            planted[key] = tuple(new for new, _ in plans)
            values[key] = [arrays for _, arrays in plans]
        program.check_recomputed(
            planted,
            "Plant before you differentiate: `eqx.filter_grad(plant(fn, ...))`.",
            planted=True,
        )
        has_outer = listening.value is not None
        handler = Replace(program.options.tag, SameParts(planted), has_outer)
        outs, _ = program.evaluate(handler, Given(values=values))
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
    scope: bool = False,
    with_index: bool = False,
) -> Function[_P, _T]:
    """Replaces marked values while a function runs.

    Planting what [`eqx_sow.save_intermediates`][] captured changes nothing (except in a
    `while_loop`). Planting another value is the same as editing the program there.

    **Arguments:**

    - `fn`: a function, a model, or a transformed function such as
        `eqx.filter_grad(loss)`.
    - `values`: maps names or globs to either
        - a PyTree like the one that is captured there: with the same structure,
            static leaves, dtypes and shapes, including the leading axes of loops and
            `vmap`s (in a `while_loop`, one value for all iterations). You can also
            pass what `save_intermediates` returned under that name,
            `{mode: value, ...}`; or
        - a function of the value, as the code at the mark sees it: in a `vmap` or a
            loop, of one example in one iteration.

        Globs mean what they mean in the option `names` of
        [`eqx_sow.save_intermediates`][]: `"blocks/*"` is the blocks, and not what is in
        them. Where several keys match a mark, a name goes before globs, and these go in
        their order. A function under a glob is called at each mark that matches.

        A name with an index means one iteration of a loop, as in the option `names` of
        [`eqx_sow.save_intermediates`][]: `"h/3"`, or `"blocks/2/attn"` in a stack of
        layers. A value then has no axis for that loop. You can plant what
        `save_intermediates(model)` captured into a function of `model`: the names
        lack the prefix `model/`, which does not matter if they match only one model
        in the program.

    - `mode`: what to replace: `"primal"` (the value); or, if `fn` differentiates,
        `"cotangent"` (the gradient that flows back there) or `"tangent"`. Second-order
        modes are joined by a dot.
    - `tag`: replace only marks with this tag.
    - `capture`, `methods`, `scope`: as in `save_intermediates`, so that submodules of a
        model can be planted by their paths.
    - `with_index`: call functions with `(value, index)`. `index` is a tuple of the
        iterations of the loops around the mark, outermost first, as traced int32s: in
        a scan over layers `(layer,)`. So the layer can be an argument of a compiled
        program. Compare `index[0]`: the tuple itself equals no number. A
        `while_loop`, or a `fori_loop` with traced bounds, has no entry in it. In a
        reversed scan, iteration `i` is that of `xs[i]`.

    **Returns:**

    A function with the signature of `fn`, and an output of the same structure. What is
    planted is still marked: `save_intermediates(plant(fn, values))` captures it, and
    needs no `capture` for planted modules. `tap` sends what is planted, whether it is
    inside or around. Planted arrays may be traced and differentiated.

    `plant(eqx.filter_grad(loss), ...)` replaces values within the computation of the
    gradient, but the gradient still flows back through a planted primal.
    `eqx.filter_grad(plant(loss, ...))` is the gradient of the edited program, in which
    nothing flows back from a constant. A `custom_jvp` or `custom_vjp` function with a
    planted value inside has the derivative of the edited function, not of its rule.

    **Raises:**

    `TypeError` and `ValueError` if an option is not of the kind above. When called:

    - [`eqx_sow.UnknownSowError`][] if a name or a glob matches nothing, or has nothing
      of this mode, or there is no such iteration;
    - [`eqx_sow.SowError`][] if the structure, a shape, a dtype or a static leaf
      differs;
    - [`eqx_sow.DuplicateSowError`][] if a value, not a function, is planted under a
      name that marks several places;
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
