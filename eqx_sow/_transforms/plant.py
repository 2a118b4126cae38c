"""`plant`."""

import contextlib
import dataclasses as dc
import functools as ft
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import PartitionSpec

from .. import _compat
from .._arrays import leading, one_along, shape_like, sharded_like, whole_along
from .._errors import calling, SowError, UnknownSowError
from .._mark.listening import listening
from .._mark.primitive import sow_p
from .._mark.site import Axis, Site
from .._mark.static import Const, OPERAND, rebuild, SameParts
from .._names import check_known, join, lookup, matches, one_iteration
from .._values import entry as _entry, merge as _merge
from .._values.entry import Entry
from .._values.modes import labels, Mode
from .._values.reduce import Append
from .._walk.find import sites, sites_in_body
from .._walk.frame import Frame
from .._walk.handler import Given, Handler
from .._walk.refuse import check_guarded
from .._walk.rules.control_flow import alike
from . import options as opt
from .checks import hints
from .collect import Collect, pass_by
from .options import Options
from .program import Program, trace
from .transformed import Transformed, wrap


@dc.dataclass(frozen=True)
class _Replace(Handler):
    """Replaces what is sown. All go by `Site.key`: of what is `planted` there, the last
    one counts. `Given.values` has its arrays."""

    tag: Any
    planted: tuple[tuple[Any, tuple["_Planted", ...]], ...]
    has_outer: bool

    @ft.cached_property
    def _planted(self) -> dict[Any, tuple["_Planted", ...]]:
        return dict(self.planted)

    @property
    def cacheable(self):
        return not any(
            isinstance(x.new, SameParts) for _, xs in self.planted for x in xs
        )

    def wants(self, site):
        return site.tag == self.tag and site.key in self._planted

    def keeps_intact(self, eqn):
        return self.has_outer and not self.changes_inside(eqn)

    def changes_inside(self, eqn):
        return any(map(self.wants, sites(eqn)))

    def sow(self, found, given, site: Site, atoms, frame: Frame):
        del found
        n_guards = len(site.guards)
        if not self.wants(site):
            pass_by(self, atoms, frame)
            return given
        check_guarded(site)
        old = frame.read(atoms)
        guards, old = old[:n_guards], old[n_guards:]
        new = old
        for planted, (here, arrays) in zip(
            self._planted[site.key], given.values[site.key]
        ):
            compute = ft.partial(_new, planted, arrays, site, guards, old)
            new = _only_if(here, compute, new, planted, site)
        new = [*guards, *new]
        if self.has_outer:
            new = sow_p.bind(*new, site=site)
        frame.set(frame.eqn.outvars, new)
        return given

    def slices_for_scan(self, values, jaxpr):
        inside, whole = {}, {}
        for site, outside in sites_in_body(jaxpr):
            if self.wants(site):
                inside[site.key], whole[site.key] = zip(
                    *[
                        planted.for_scan(site, outside, *x)
                        for planted, x in zip(self._planted[site.key], values[site.key])
                    ]
                )

        def put_back(xs):
            new = {
                k: [(here, [*x, *rest]) for (here, x), rest in zip(xs[k], whole[k])]
                for k in xs
            }
            return {**values, **new}

        return inside, put_back

    def slices_for_devices(self, values, jaxpr, devices):
        keys = {s.key for s in sites(jaxpr) if self.wants(s)}
        inside = {k: values[k] for k in keys}
        mesh = {
            k: [[a.mesh for a in p.axes if a.mesh in devices] for p in self._planted[k]]
            for k in keys
        }
        specs = {
            k: [(PartitionSpec(), PartitionSpec(*m)) for m in mesh[k]] for k in keys
        }

        def put_back(xs):
            local = {
                k: [
                    (here, [a.reshape(a.shape[len(m) :]) for a in arrays])
                    for m, (here, arrays) in zip(mesh[k], xs[k])
                ]
                for k in xs
            }
            return {**values, **local}

        return inside, put_back, specs


@dc.dataclass(frozen=True)
class _Planted:
    """One of `values`, for one `Site.key`. `new` is the site that its arrays are for,
    or a function of the value. The first axes of the arrays are those of the loops
    still around the walk.

    With `at`, this is for one iteration only: of so many of the `loops` around. Its
    arrays lack the axes of these, and a boolean with an axis for each loop still around
    the walk says `here`.
    """

    new: Site | SameParts
    at: tuple[int, ...] = ()
    loops: tuple[int, ...] = ()

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.new.axes if isinstance(self.new, Site) else ()

    def here(self) -> Any:
        return jnp.zeros(self.loops, bool).at[self.at].set(True) if self.at else None

    def has_axis_of(self, here: Any) -> bool:
        """Whether the arrays have an axis for the outermost loop still around."""
        return here is None or here.ndim <= len(self.loops) - len(self.at)

    def for_scan(self, site: Site, outside: int, here: Any, arrays: list) -> Any:
        """What a scan slices, and what it does not. JAX moved the scan out of so many
        loops `outside` of it, of which the axes are still there, and come first."""
        if outside and self.at:
            raise _moved(site)
        if not self.has_axis_of(here):
            return (here, []), arrays
        return (here, [jnp.moveaxis(x, outside, 0) for x in arrays]), []


def _moved(site: Site) -> SowError:
    return SowError(
        f"`plant`: `sow(..., {site.name!r})` at {site.where} has the same value in "
        "each iteration, so JAX moved it out of the loop when it differentiated the "
        "program, and a single iteration cannot be planted. Plant before you "
        "differentiate: `eqx.filter_grad(plant(fn, ...))`."
    )


def _new(
    planted: _Planted, arrays: Sequence[Any], site: Site, guards: list, old: list
) -> list[Any]:
    if isinstance(planted.new, Site):
        new = _at_site(site, guards, arrays, planted.new)
    else:
        new = _apply(planted.new.value, site, old)
    _check_fixed(site, old, new)
    return new


def _only_if(
    here: Any,
    compute: Callable[[], list[Any]],
    other: list[Any],
    planted: _Planted,
    site: Site,
) -> list[Any]:
    """What is computed in one iteration, and elsewhere the other."""
    if here is None:
        return compute()
    if not planted.has_axis_of(here):
        raise _moved(site)
    # Not `where`: elsewhere a function may have a gradient that is not finite.
    changes = [
        i
        for i, x in enumerate(other)
        if i not in site.fixed and x.dtype != jax.dtypes.float0
    ]
    pick = lambda values: [values[i] for i in changes]
    first, second = alike([lambda _: pick(compute()), lambda xs: xs], pick(other))
    chosen = jax.lax.cond(jnp.any(here), first, second, pick(other))
    new = dict(zip(changes, chosen))
    return [new.get(i, x) for i, x in enumerate(other)]


def _check_fixed(site: Site, old: Sequence[Any], new: Sequence[Any]) -> None:
    for x, y in ((old[i], new[i]) for i in site.fixed):
        known = not any(isinstance(z, jax.core.Tracer) for z in (x, y))
        if not (x is y or (known and np.array_equal(x, y))):
            raise SowError(
                f"`plant`: at `sow(..., {site.name!r})` ({site.where}) there is a "
                "NumPy array, with which the program goes on whatever is planted. Sow "
                "a JAX array, `jnp.asarray(...)`, to replace it."
            )


def _at_site(site: Site, guards: list, arrays: Sequence[Any], form: Site) -> list[Any]:
    """The operands of a sow, from arrays that have all the axes of the form."""
    # A sow that was moved out of its loop still has the axis of it, first of all.
    hoisted = sum(not a.lane for a in site.axes)
    lanes = [a for a in form.axes if a.lane]
    own = tuple(a._replace(loops=0) for a in site.axes if a.lane)
    own = Entry((), form._replace(axes=own))
    runs = jnp.ones((1,) * (hoisted + len(lanes)), bool)
    for i, x in enumerate(_entry.runs(site, guards)):
        has = [False] * hoisted + list(_merge.placed(own, lanes, i))
        runs = runs & x[tuple(slice(None) if h else None for h in has)]
    pairs = [pair for pair in zip(form.leaves, site.leaves) if pair[0] is OPERAND]
    # Another branch may differentiate leaves that this one does not.
    arrays = [x for x, (_, leaf) in zip(arrays, pairs) if leaf is OPERAND]
    new = []
    for i, x in enumerate(arrays):
        at, here = 0, runs
        keep = [False] * hoisted + list(_merge.placed(own, lanes, len(guards) + i))
        for k in keep:
            if k:
                at += 1
            else:
                x = _same_along(x, at, here, site)
                here = jnp.any(here, axis=at)
        new.append(x)
    return new


def _same_along(x, axis: int, runs, site: Site):
    """The one value along an axis, as far as the sow `runs`."""
    if x.shape[axis] == 1:
        return one_along(x, axis)
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    data = jax.random.key_data(x) if is_key else x
    data = whole_along(data, axis)
    runs = leading(whole_along(runs, axis), data.ndim)
    at = jnp.argmax(runs, axis, keepdims=True)
    one = jnp.take_along_axis(data, at, axis)
    if _compat.varying(one):
        # A device that fails alone would leave the others waiting.
        raise SowError(
            f"`plant`: `sow(..., {site.name!r})` at {site.where} has one value for all "
            "entries of an axis. Whether a planted value varies along it cannot be "
            "checked in a `jax.shard_map`. Plant a function, or plant before you "
            "differentiate: `eqx.filter_grad(plant(fn, ...))`."
        )
    one = eqx.error_if(
        one,
        jnp.any(runs & (data != one) & ~((data != data) & (one != one))),
        f"`plant`: at `sow(..., {site.name!r})` ({site.where}) the program has one "
        "value for all entries of an axis: the planted value must not vary along it.",
    )
    one = jnp.squeeze(one, axis)
    return jax.random.wrap_key_data(one, impl=jax.random.key_impl(x)) if is_key else one


def _apply(fn: Callable, site: Site, values: Sequence[Any]) -> list[Any]:
    """`fn` of the value as the code at the sow sees it, for each lane."""
    n_guards = len(site.guards)
    has = [site.has(n_guards + i) for i in range(len(values))]

    def apply(*values):
        old = rebuild(site.treedef, site.leaves, values)
        return _operands(fn(old), site, values, of_function=True)

    with calling("planted function", site):
        return _entry.for_each_lane(apply, site.axes, has, has)(*values)


def _operands(
    value: Any, site: Site, like: Sequence[Any], of_function: bool = False
) -> list[Any]:
    """The arrays of a value that must look like what is sown, and they like `like`."""
    whose = "what the function returned" if of_function else "the value"
    value_for = f"`plant`: {whose} for `sow(..., {site.name!r})` at {site.where}"
    leaves, treedef = jtu.tree_flatten(value)
    if Const(treedef) != site.treedef:
        if of_function and value is None:
            raise SowError(
                f"`plant`: the function for `sow(..., {site.name!r})` at {site.where} "
                "returned None; did it forget `return`?"
            )
        raise SowError(
            f"{value_for} has the structure {treedef}, but {site.treedef.value} is "
            f"sown there. {'Return' if of_function else 'Plant'} a value of that "
            "structure."
        )
    new = []
    operand = iter(like)
    for leaf, x in zip(site.leaves, leaves):
        if leaf is not OPERAND:
            if isinstance(leaf, Const) and leaf != Const(x):
                raise SowError(
                    f"{value_for} has the static leaf {x!r}, but {leaf.value!r} is "
                    "sown there. Static leaves cannot be changed: plant that one."
                )
            continue
        old = next(operand)
        x = _as_jax_does(x, old.dtype)
        if not eqx.is_array(x) or (x.shape, x.dtype) != (old.shape, old.dtype):
            got = f"{x.dtype}{list(x.shape)}" if eqx.is_array(x) else repr(x)
            remedy = (
                "Return an array of that shape and dtype."
                if of_function
                else "Plant an array of that shape and dtype, or a function."
            )
            raise SowError(
                f"{value_for} has a leaf {got} where {old.dtype}{list(old.shape)} is "
                f"sown. {remedy}"
            )
        new.append(sharded_like(jnp.asarray(x), old))
    return new


def _as_jax_does(x: Any, dtype: Any) -> Any:
    """A NumPy array or a Python number as an array, if it can be one of the dtype."""
    # Such as strings; a number that is too large; any number for a key.
    with contextlib.suppress(TypeError, OverflowError):
        if isinstance(x, np.ndarray | np.generic):
            return jnp.asarray(x)
        if isinstance(x, bool | int | float | complex):
            with jax.numpy_dtype_promotion("standard"):
                if jnp.result_type(x, dtype) == dtype:
                    return jnp.asarray(x, dtype)
    return x


def _prepare(value: Any, mode: str, entry: Entry) -> list[Any]:
    """The arrays of a planted value, the axes of loops first."""
    axes = entry.site.axes
    final = _entry.final_axes(entry.site, counted=False)
    like = []
    for i, has in enumerate(final):
        lead = tuple(a.size for a, h in zip(axes, has) if h)
        spec = (*(a.spec for a, h in zip(axes, has) if h), *entry.core_spec(i))
        shape = (*lead, *entry.core_shape(i))
        like.append(shape_like(entry.arrays[i], shape, spec))
    structure = Const(jtu.tree_structure(value))
    if structure != entry.site.treedef and isinstance(value, Mapping) and mode in value:
        value = value[mode]
    arrays = _operands(value, entry.site, like)
    loops = [i for i, a in enumerate(axes) if not a.lane]
    every = (True,) * len(axes)
    arrays = [_entry.align(x, has, every) for x, has in zip(arrays, final)]
    return [jnp.moveaxis(x, loops, range(len(loops))) for x in arrays]


def _meant(
    patterns: Iterable[str], there: Sequence[str], models: Iterable[str]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """By pattern, which names it is for, and which iteration. What no name has as it is
    was captured from the model itself, if all of it fits one model only."""

    def is_there(name, at):
        del at
        return any(matches(name, x) for x in there)

    meant = {p: one_iteration(p, there) for p in patterns}
    missing = [p for p in meant if not is_there(*meant[p])]
    fits = []
    for model in models if missing else ():
        path = lambda p: model if p == "." else join(model, p)
        inside = {p: one_iteration(path(p), there) for p in missing}
        if all(is_there(*x) for x in inside.values()):
            fits.append(inside)
    return {**meant, **fits[0]} if len(fits) == 1 else meant


def _plan(
    found: Sequence[Entry], at: tuple[int, ...], value: Any, mode: str
) -> tuple[_Planted, list[Any]]:
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
        return _Planted(SameParts(value), at, sizes), []
    entry = entry.without_axes(loops[: len(at)])
    return _Planted(entry.site, at, sizes), _prepare(value, mode, entry)


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

    def _run(self, args, kwargs):
        program = trace(self._fn, args, kwargs, self._options.value.marking)
        # Not `self._planted`: see `transformed._run`.
        with program.on_mesh():
            return type(self)._planted(self, program)

    def _planted(self, program: Program) -> Any:
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
        )
        handler = _Replace(options.tag, tuple(planted.items()), outer)
        outs, _ = program.evaluate(handler, Given(values=values), *program.inputs)
        return program.output(outs)

    def _entries(
        self, program: Program, patterns: tuple[str, ...]
    ) -> dict[Any, list[Entry]]:
        """What would be captured at each place that is planted, as shapes."""
        options: Options = self._options.value
        mode = options.mode
        wanted = options._replace(names=patterns, modes=(mode,))
        survey = Collect(Const(wanted), _EACH_PLACE, SameParts(None), has_outer=False)
        sown = program.survey(survey)
        names = [name for name, _ in sown.seen]
        hint = hints(program, plants=True)
        check_known("plant(fn, values)", patterns, names, hint=hint)
        program.check_called(names)
        mode_of = labels({e.site.key for e in sown.entries})
        entries: dict[Any, list[Entry]] = {}
        for e in sown.entries:
            if mode_of[e.site.key] == mode:
                entries.setdefault(e.site.key, []).append(e)
        problem = f"is sown, but has no {mode} here"
        if "cotangent" in mode:
            problem += " (as it has in `plant(eqx.filter_grad(fn), ...)`)"
        there = [name for name, *_ in entries]
        check_known(f"plant(fn, values, mode={mode!r})", patterns, there, problem)
        return entries


_P = ParamSpec("_P")
_T = TypeVar("_T")


@_compat.api_boundary
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
    `save_intermediates(plant(fn, values))` captures what was planted. Planted arrays
    may be traced and differentiated.

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
