"""`plant`."""

import dataclasses as dc
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import equinox as eqx

from .._errors import UnknownSowError
from .._frames import api_boundary
from .._mark.listening import listening
from .._mark.site import Site
from .._mark.static import Const, SameParts
from .._names import check_known, join, lookup, matches, one_iteration
from .._values import merge as _merge
from .._values.entry import Entry, grouped
from .._values.modes import labels, Mode
from .._values.reduce import Append
from .._walk.find import sites
from .._walk.handler import Given
from . import options as opt
from .checks import hints
from .collect import Collect
from .options import Options
from .planting import Planted, prepare, Replace
from .program import Program
from .transformed import Transformed, wrap


def _meant(
    patterns: Iterable[str], there: Sequence[str], models: Iterable[str]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """By pattern, which names it is for, and which iteration. What no name has as it is
    was captured from the model itself, if all of it fits one model only."""
    is_there = lambda meant: any(matches(meant[0], x) for x in there)
    meant = {p: one_iteration(p, there) for p in patterns}
    missing = [p for p in meant if not is_there(meant[p])]
    fits = []
    for model in models if missing else ():
        path = lambda p: model if p == "." else join(model, p)
        inside = {p: one_iteration(path(p), there) for p in missing}
        if all(map(is_there, inside.values())):
            fits.append(inside)
    return {**meant, **fits[0]} if len(fits) == 1 else meant


def _plan(
    found: Sequence[Entry], at: tuple[int, ...], value: Any, mode: str
) -> tuple[Planted, list[Any]]:
    """What to plant for one `Site.key`, and its arrays. `at`: see `one_iteration`."""
    if len(found) > 1 and (at or not callable(value)):
        raise _merge.duplicate(
            found[0].site,
            found[1].site,
            "or plant a function, which is called at each of them.",
        )
    entry = found[0]
    loops = [i for i, a in enumerate(entry.site.axes) if not a.lane and a.mesh is None]
    sizes = tuple(entry.site.axes[i].size for i in loops)
    if at:
        _check_iteration(entry.site, at, sizes)
    if callable(value):
        return Planted(SameParts(value), at, sizes), []
    entry = entry.without_axes(loops[: len(at)])
    return Planted(entry.site, at, sizes), prepare(value, mode, entry)


def _check_iteration(site: Site, at: tuple[int, ...], loops: tuple[int, ...]) -> None:
    iteration = "/".join(map(str, at))
    if len(at) > len(loops):
        raise UnknownSowError(
            f"`plant(fn, values)`: {site.name}/{iteration} is an iteration of "
            f"{len(at)} loops, but `sow(..., {site.name!r})` at {site.where} has the "
            f"axes of {len(loops)} (a `while_loop` gives none, nor does what JAX moved "
            "out of a loop). Plant a function, and sow what tells it where it is next "
            "to the value."
        )
    if any(i >= n for i, n in zip(at, loops)):
        raise UnknownSowError(
            f"`plant(fn, values)`: {site.name!r} has no iteration {iteration}: the "
            f"loops around it, from outside in, have {list(loops)} iterations, "
            "counted from 0."
        )


# Every place has an entry of its own.
_EACH_PLACE = SameParts(Append())


class _Plant(Transformed):
    _fn: Callable
    _values: Any
    _options: Const = eqx.field(static=True)

    def _result(self, program: Program) -> Any:
        options: Options = self._options.value
        outer = listening.value is not None
        there = [s.name for s in sites(program.closed) if s.tag == options.tag]
        chosen: dict[tuple[int, ...], dict[str, Any]] = {}
        for pattern, (name, at) in _meant(self._values, there, program.models).items():
            chosen.setdefault(at, {})[name] = self._values[pattern]
        names = dict.fromkeys(n for by_name in chosen.values() for n in by_name)
        entries = type(self)._entries(self, program, tuple(names))
        values, planted = {}, {}
        for key, found in entries.items():
            pairs = [
                _plan(found, at, lookup(chosen[at], key[0]), options.mode)
                # What is for fewer iterations counts more.
                for at in sorted(chosen, key=len)
                if any(matches(pattern, key[0]) for pattern in chosen[at])
            ]
            planted[key] = tuple(p for p, _ in pairs)
            values[key] = [(p.here(), arrays) for p, arrays in pairs]
        program.check_recomputed(
            planted,
            options.tag,
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
        wanted = dc.replace(options, names=patterns, modes=(mode,))
        survey = Collect(Const(wanted), _EACH_PLACE, SameParts(None), has_outer=False)
        sown = program.survey(survey)
        names = [name for name, _ in sown.seen]
        hint = hints(program, plants=True)
        check_known("plant(fn, values)", patterns, names, hint=hint)
        program.check_called(names)
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
    capture: bool | type | tuple[type, ...] | Callable[[str, Any], bool] | None = None,
    methods: str | Sequence[str] = ("__call__",),
    scope: bool = False,
) -> Callable[_P, _T]:
    """Replaces marked values while a function runs.

    Planting what [`eqx_sow.save_intermediates`][] captured changes nothing (except in a
    `while_loop`). Planting another value is the same as editing the program at the
    mark.

    **Arguments:**

    - `fn`: a function, a model, or a transformed function such as
        `eqx.filter_grad(loss)`.
    - `values`: maps names or globs to either
        - a PyTree like the one that is captured there: the same structure, static
            leaves, dtypes and shapes, leading axes of loops and vmaps included (in a
            `while_loop`, one value for all iterations), or what `save_intermediates`
            returned under that name, `{mode: value, ...}`; or
        - a function of the value that is sown there, as the code there sees it.

        With an index behind it, `"blocks/3"`, a name is for one iteration of the
        outermost loop around (`"blocks/3/0"`: and of the next loop inside), which is
        entry `[3]` of what is captured as `"blocks"`. A value then has no axis for that
        loop. A name that is not there, but that one of the models in the program has
        for a part of it, is that part: what `save_intermediates(model)` captured can be
        planted into a function of `model`.
    - `mode`: what to replace: `"primal"`, or `"cotangent"` (the gradient that flows
        back there) or `"tangent"` if `fn` differentiates. Second-order modes are
        joined by a dot.
    - `tag`: only sows with this tag.
    - `capture`, `methods`, `scope`: as in `save_intermediates`, so that submodules of a
        model can be planted by their paths.

    **Returns:**

    A function with the signature and the output of `fn`. A planted sow is still a sow:
    `save_intermediates(plant(fn, values))` captures what was planted. Of the modules
    that `capture` selects here, others see those that are planted; what they capture
    themselves is under their own path. Planted arrays may be traced and differentiated.

    `plant(eqx.filter_grad(loss), ...)` replaces values within the gradient computation:
    the gradient still flows back past a planted primal. `eqx.filter_grad(plant(loss,
    ...))` is the gradient of the edited program, in which nothing flows back from a
    constant. A `custom_jvp` or `custom_vjp` function with a planted sow inside has the
    derivative of the edited function, not that of its rule.

    **Raises:**

    `TypeError` and `ValueError` if an option is not of the kind above. When called:

    - [`eqx_sow.UnknownSowError`][] if a name or a glob matches nothing, or has nothing
      of this mode, or there is no such iteration;
    - [`eqx_sow.SowError`][] if the structure, a shape, a dtype or a static leaf
      differs;
    - [`eqx_sow.DuplicateSowError`][] if a value, not a function, is planted where a
      name is sown several times;
    - [`eqx_sow.UnsupportedPrimitiveError`][] if a value cannot be had where it is sown.

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
        ```
    """
    options = {k: v for k, v in locals().items() if k != "fn"}
    static, arrays = opt.checked("plant", fn, options)
    return wrap(_Plant, fn, arrays["values"], Const(static))
