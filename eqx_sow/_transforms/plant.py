"""`plant`."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import equinox as eqx

from .._errors import SowError
from .._frames import api_boundary
from .._handlers.asked import Asked
from .._handlers.collect import Collect, EACH_PLACE
from .._handlers.planting import Planted, prepare, Replace
from .._mark.listening import listening
from .._mark.site import Site
from .._mark.static import Const, SameParts
from .._names import check_known, join, selected
from .._values import merge as _merge
from .._values.entry import Entry, grouped
from .._values.modes import labels, Mode
from .._walk.handler import Given
from .checks import hints
from .options import Options
from .program import Program
from .transformed import Transformed, wrap


# Which iteration of each loop around a sow is planted, or `None` for all of a loop.
_At = tuple[int | None, ...]


def _meant(values: Mapping[str, Any], program: Program) -> dict[str, dict[_At, Any]]:
    """For each name that is planted, the value by iteration. A pattern that fits
    nothing stands for itself. What no name has as it is was captured from the model
    itself, if all of it fits one model only."""
    there = program.in_loops()

    def fits(pattern: str) -> list[tuple[str, _At]]:
        whole = any(label.name == pattern for label, _ in there)
        found = [
            (label.name, one.at)
            for label, loops in there
            if (one := selected(pattern, label.name, label.after, loops)) is not None
            if not (whole and one.at)
        ]
        return list(dict.fromkeys(found))

    meant = {p: fits(p) for p in values}
    missing = [p for p in values if not meant[p]]
    models = []
    for model in program.named.roots if missing else ():
        path = lambda p: model if p == "." else join(model, p)
        inside = {p: fits(path(p)) for p in missing}
        if all(inside.values()):
            models.append(inside)
    if len(models) == 1:
        meant |= models[0]
    chosen: dict[str, dict[_At, Any]] = {}
    # What is spelled out goes before globs, and these go in their order.
    for pattern in sorted(meant, key=_is_glob):
        for name, at in meant[pattern] or [(pattern, ())]:
            chosen.setdefault(name, {}).setdefault(at, values[pattern])
    return chosen


def _is_glob(pattern: str) -> bool:
    return any(x in pattern for x in "*?[")


def _plan(
    found: Sequence[Entry], at: _At, value: Any, options: Options
) -> tuple[Planted, list[Any]]:
    """What to plant for one `Site.key`, and its arrays."""
    if len(found) > 1 and (at or not callable(value)):
        raise _merge.duplicate(
            found[0].site,
            found[1].site,
            "or plant a function, which is called at each of them.",
        )
    entry = found[0]
    loops = [i for i, a in enumerate(entry.site.axes) if not a.lane and a.mesh is None]
    if callable(value):
        fn = SameParts(value)
        return Planted(fn, at, options.with_index), []
    entry = entry.without_axes([k for k, i in zip(loops, at) if i is not None])
    return Planted(entry.site, at), prepare(value, options.mode, entry)


def _check_loops(site: Site, loops: Collection[tuple[int, ...]]) -> None:
    """Of a name in several branches, one may be in more loops than another."""
    if len(loops) > 1:
        found = " and ".join(str(list(x)) for x in sorted(loops))
        raise SowError(
            f"`plant`: `sow(..., {site.name!r})` at {site.where} is in several "
            f"branches, in which there are other loops around it: {found} iterations, "
            "from outside in. No value has the axes of all. Plant a function, or give "
            "the values different names."
        )


class _Plant(Transformed):
    _fn: Callable
    _values: Any
    _options: Const = eqx.field(static=True)

    def _result(self, program: Program) -> Any:
        options: Options = self._options.value
        outer = listening.value is not None
        chosen = _meant(self._values, program)
        entries = type(self)._entries(self, program, tuple(chosen))
        loops = program.loops_by_key()
        values, planted = {}, {}
        for key, found in entries.items():
            if any(at or not callable(x) for at, x in chosen[key[0]].items()):
                _check_loops(found[0].site, loops[key])
            # What is for fewer iterations counts more.
            ats = sorted(chosen[key[0]], key=lambda at: len(at) - at.count(None))
            pairs = [_plan(found, at, chosen[key[0]][at], options) for at in ats]
            planted[key] = tuple(p for p, _ in pairs)
            values[key] = [arrays for _, arrays in pairs]
        program.check_recomputed(
            planted,
            "Plant before you differentiate: `eqx.filter_grad(plant(fn, ...))`.",
            planted=True,
        )
        handler = Replace(options.tag, tuple(planted.items()), outer)
        outs, _ = program.evaluate(handler, Given(values=values))
        return program.output(outs)

    def _entries(
        self, program: Program, patterns: tuple[str, ...]
    ) -> dict[Any, list[Entry]]:
        """What would be captured at each place that is planted, as shapes."""
        options: Options = self._options.value
        mode = options.mode
        survey = Collect(
            tag=options.tag,
            modes=(mode,),
            asked=Asked(patterns, frozenset(patterns)),
            reduce=EACH_PLACE,
            transform=SameParts(None),
            elsewhere=program.names_outside_of_solvers,
            has_outer=False,
        )
        sown = program.with_executions(lambda name: False).survey(survey)
        names = [name for name, _ in sown.seen]
        hint = hints(program)
        check_known("plant(fn, values)", patterns, names, hint=hint)
        mode_of = labels({e.site.key for e in sown.entries})
        entries = grouped([e for e in sown.entries if mode_of[e.site.key] == mode])
        problem = f"is sown, but has no {mode} here"
        if "cotangent" in mode:
            problem += " (as it has in `plant(eqx.filter_grad(fn), ...)`)"
        there = [name for name, *_ in entries]
        check_known(f"plant(fn, values, mode={mode!r})", patterns, there, problem)
        return entries


_P = ParamSpec("_P")
_T = TypeVar("_T")


@api_boundary
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
) -> Callable[_P, _T]:
    """Replaces marked values while a function runs.

    Planting what [`eqx_sow.save_intermediates`][] captured changes nothing (except in a
    `while_loop`). Planting another value is the same as editing the program at the sow.

    **Arguments:**

    - `fn`: a function, a model, or a transformed function such as
        `eqx.filter_grad(loss)`.
    - `values`: maps names or globs to either
        - a PyTree like the one that is captured there: the same structure, static
            leaves, dtypes and shapes, leading axes of loops and vmaps included (in a
            `while_loop`, one value for all iterations), or what `save_intermediates`
            returned under that name, `{mode: value, ...}`; or
        - a function of the value that is sown there, as the code there sees it.

        With an index in it, a name is for one iteration of a loop, as in the option
        `names` of [`eqx_sow.save_intermediates`][]: `"h/3"`, or `"blocks/2/attn"` in a
        stack of layers. A value then has no axis for that loop. A name that no sow has,
        but that is the path of a part of the only model in the program that fits, means
        that part: what `save_intermediates(model)` captured can be planted into a
        function of `model`.
    - `mode`: what to replace: `"primal"` (the value); or, if `fn` differentiates,
        `"cotangent"` (the gradient that flows back there) or `"tangent"`. Second-order
        modes are joined by a dot.
    - `tag`: only sows with this tag.
    - `capture`, `methods`, `scope`: as in `save_intermediates`, so that submodules of a
        model can be planted by their paths.
    - `with_index`: call functions with `(value, index)`. `index` is a tuple of the
        iterations of the loops around the sow, from outside in, traced int32s: in a
        scan over layers `(layer,)`. So which layer is meant can be an argument of a
        compiled program. A `while_loop` counts for nothing in it, nor does a
        `fori_loop` whose bounds are traced. In a reversed scan, iteration `i` is that
        of `xs[i]`.

    **Returns:**

    A function with the signature and the output of `fn`. A planted sow is still a sow:
    `save_intermediates(plant(fn, values))` captures what was planted. Of the modules
    that `capture` selects here, others see those that are planted; what they capture
    themselves is under their own path. Planted arrays may be traced and differentiated.

    `plant(eqx.filter_grad(loss), ...)` replaces values within the computation of the
    gradient, but the gradient still flows back through a planted primal.
    `eqx.filter_grad(plant(loss, ...))` is the gradient of the edited program, in which
    nothing flows back from a constant. A `custom_jvp` or `custom_vjp` function with a
    planted sow inside has the derivative of the edited function, not that of its rule.

    **Raises:**

    `TypeError` and `ValueError` if an option is not of the kind above. When called:

    - [`eqx_sow.UnknownSowError`][] if a name or a glob matches nothing, or has nothing
      of this mode, or there is no such iteration;
    - [`eqx_sow.SowError`][] if the structure, a shape, a dtype or a static leaf
      differs;
    - [`eqx_sow.DuplicateSowError`][] if a value, not a function, is planted where a
      name is sown several times;
    - [`eqx_sow.UnsupportedPrimitiveError`][] if a value is not accessible where it is
        sown.

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
    return wrap(_Plant, "plant", fn, options)
