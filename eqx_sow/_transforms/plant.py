"""`plant`."""

import dataclasses as dc
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, ClassVar, ParamSpec, TypeVar

import equinox as eqx
import numpy as np

from .._errors import SowError
from .._frames import api_boundary
from .._handlers.numpy_arrays import NOT_PLANTED, NotFixed
from .._handlers.replace import prepare, Replace
from .._mark.listening import listening
from .._mark.static import SameParts
from .._values.modes import Mode
from .._walk.handler import Given
from .layered import by_layer
from .placement import (
    At,
    by_iteration,
    check_one_place,
    marks_for,
    places_of,
    surveyed,
    to_plant,
)
from .program import Program
from .transformed import Function, of_function, Transformed, wrap


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


def _runs_matter(program: Program, chosen: Mapping[str, Mapping[At, Any]]) -> bool:
    """Whether what is planted may differ from one run of a name to the next: values do,
    and iterations, as not every run need be in such a loop."""
    n = Counter(x.site.key for x in program.mine)
    return any(
        k > 1 and (any(chosen[name]) or not all(map(callable, chosen[name].values())))
        for (name, *_), k in n.items()
        if name in chosen
    )


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
        places = marks_for(given, program)
        chosen, together = by_iteration(given, places, program)
        runs = program.runs(() if _runs_matter(program, chosen) else None)
        survey = surveyed(program, runs, places)
        by_layer(chosen, together, given, places, survey, program)
        # The marks of each name, by their runs.
        found = defaultdict(lambda: defaultdict(list))
        for x in program.mine:
            found[x.site.name][runs[x.way].run].append(x)
        values, planted, not_fixed = [], [], NotFixed()
        # For each key, the slot of each run, or of all (`None`).
        slots: dict[Any, dict[int | None, int]] = {}
        for key in survey.of_key:
            name, *_ = key
            slots[key] = {}
            for place in places_of(
                key,
                survey,
                found[name],
                chosen[name],
                together[name].values(),
                program.options.mode,
            ):
                is_value = not all(map(callable, place.values.values()))
                if any(place.values) or is_value:
                    check_one_place(place.entry.site, {x.loops for x in place.marks})
                # What is for fewer iterations goes before what is for more, and so
                # last.
                ats = sorted(place.values, key=lambda at: len(at) - at.count(None))
                sites, options = [x.site for x in place.marks], program.options
                each = [
                    prepare(
                        place.entry, sites, at, place.values[at], options, not_fixed
                    )
                    for at in ats
                ]
                slots[key][place.run] = len(planted)
                planted.append(tuple(new for new, _ in each))
                values.append([arrays for _, arrays in each])
        program.check_recomputed(
            survey.of_key,
            "Plant before you differentiate: `eqx.filter_grad(plant(fn, ...))`.",
            planted=True,
        )
        has_outer = listening.value is not None
        left = program.left
        not_fixed.check(left)
        asks = to_plant(program.mine, runs, slots, planted)
        functions = any(isinstance(x.new, SameParts) for each in planted for x in each)
        handler = Replace(has_outer, not functions, left)
        carry = {NOT_PLANTED: np.False_} if left else {}
        passed = Given(carry, dict(enumerate(values)))
        if any(x.site.fixed for x in program.mine if x.site.key in survey.of_key):
            # A function may return another array. By now, no part of the program has
            # been evaluated, with marks and prints for outer transformations.
            program.types_of(handler, asks, passed)
        outs, taken = program.evaluate(handler, asks, passed)
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
    capture: bool | type | Collection[type | Callable] | Callable | None = None,
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
            loop, of one example in one iteration. The function may receive fewer axes
            than the captured value has: `eqx.nn.MultiheadAttention` runs under a `vmap`
            over heads, so a function planted at its `softmax` receives one head, of
            shape `(query, key)`. `intermediates.axes(name)` calls the axes that it does
            not see `"vmap"`. [`eqx_sow.batched`][] around the function passes all heads
            or examples, as leading axes, and it returns them.

        Names and globs are those of the option `names` of
        [`eqx_sow.save_intermediates`][]: `"blocks/*"` is the blocks, without what is in
        them, and `"h/3"` is one iteration of a loop, whose value has no axis for that
        loop. Under a pattern you can plant `intermediates[pattern]`, of a list or a
        stack: of an array `[layers, ...]`, each layer of a list gets its own entry. If
        several keys match a mark, a name takes precedence over globs, and an
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
        compiled program. The layers of a list have the same index as a stack under a
        glob such as `"blocks/*/attn"`, but not under `"blocks/2/attn"`. A `while_loop`,
        or a `fori_loop` with traced bounds, has no entry in it. In a reversed scan,
        iteration `i` has `xs[i]`.

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
