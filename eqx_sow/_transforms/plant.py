"""`plant`."""

import contextlib
import dataclasses as dc
import functools as ft
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import PartitionSpec

from .._arrays import leading
from .._errors import calling, SowError
from .._mark.listening import listening
from .._mark.primitive import sow_p
from .._mark.site import Site
from .._mark.static import Const, OPERAND, rebuild, Same
from .._names import check_known, lookup
from .._values import entry as _entry, merge as _merge
from .._values.entry import Entry
from .._values.modes import labels
from .._values.reduce import Append
from .._walk.find import sites
from .._walk.frame import Frame
from .._walk.handler import Given, Handler
from .._walk.refuse import check_guarded
from . import options as opt
from .checks import is_unmarked
from .collect import Collect, pass_by
from .options import Options
from .program import Program, trace
from .transformed import Transformed, wrap


@dc.dataclass(frozen=True)
class _Replace(Handler):
    """Replaces what is sown. All go by `Site.key`: `Given.values` has the arrays of the
    new values, whose first axes are those of the loops still around the walk;
    `planted` the sites that they are for, and the functions of the value."""

    tag: Any
    planted: tuple[tuple[Any, Site | Same], ...]
    has_outer: bool

    @ft.cached_property
    def _planted(self) -> dict[Any, Any]:
        return dict(self.planted)

    @property
    def cacheable(self):
        return not any(isinstance(x, Same) for _, x in self.planted)

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
        planted = self._planted[site.key]
        old = frame.read(atoms)
        guards, old = old[:n_guards], old[n_guards:]
        if isinstance(planted, Site):
            new = _at_site(site, guards, given.values[site.key], planted)
        else:
            new = _apply(planted.value, site, old)
        _check_fixed(site, old, new)
        new = [*guards, *new]
        if self.has_outer:
            new = sow_p.bind(*new, site=site)
        frame.set(frame.eqn.outvars, new)
        return given

    def slices_for_scan(self, values, jaxpr):
        here = {s.key for s in sites(jaxpr) if self.wants(s)}
        inside = {k: x for k, x in values.items() if k in here}
        return inside, lambda xs: {**values, **xs}

    def slices_for_devices(self, values, jaxpr, devices):
        inside, put_all_back = self.slices_for_scan(values, jaxpr)
        mesh = {
            k: [a.mesh for a in self._planted[k].axes if a.mesh in devices]
            for k in inside
        }
        specs = {k: [PartitionSpec(*mesh[k])] * len(x) for k, x in inside.items()}

        def put_back(xs):
            local = {k: [x.reshape(x.shape[len(mesh[k]) :]) for x in xs[k]] for k in xs}
            return put_all_back(local)

        return inside, put_back, specs


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
        return jax.lax.index_in_dim(x, 0, axis, keepdims=False)
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    data = jax.random.key_data(x) if is_key else x
    runs = leading(runs, data.ndim)
    at = jnp.argmax(runs, axis, keepdims=True)
    one = jnp.take_along_axis(data, at, axis)
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
        new.append(jnp.asarray(x))
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
        shape, dtype = (*lead, *entry.core_shape(i)), entry.arrays[i].dtype
        like.append(jax.ShapeDtypeStruct(shape, dtype))
    structure = Const(jtu.tree_structure(value))
    if structure != entry.site.treedef and isinstance(value, Mapping) and mode in value:
        value = value[mode]
    arrays = _operands(value, entry.site, like)
    loops = [i for i, a in enumerate(axes) if not a.lane]
    every = (True,) * len(axes)
    arrays = [_entry.align(x, has, every) for x, has in zip(arrays, final)]
    return [jnp.moveaxis(x, loops, range(len(loops))) for x in arrays]


# Every place has an entry of its own.
_EACH_PLACE = Same(Append())


class _Plant(Transformed):
    _fn: Callable
    _values: Any
    _options: Const = eqx.field(static=True)

    def _run(self, args, kwargs):
        options: Options = self._options.value
        outer = listening.value is not None
        program = trace(self._fn, args, kwargs, options.marking)
        unmarked = ft.partial(is_unmarked, options, self._fn, args, kwargs)
        # Not `self._entries`: see `transformed._run`.
        entries = type(self)._entries(self, program, unmarked)
        values, planted = {}, {}
        for key, found in entries.items():
            value = lookup(self._values, key[0])
            if callable(value):
                planted[key] = Same(value)
                continue
            if len(found) > 1:
                raise _merge.duplicate(
                    found[0].site,
                    found[1].site,
                    "or plant a function, which is called at each of them.",
                )
            values[key] = _prepare(value, options.mode, found[0])
            planted[key] = found[0].site
        program.check_recomputed(
            planted,
            options.tag,
            "Plant before you differentiate: `eqx.filter_grad(plant(fn, ...))`.",
        )
        handler = _Replace(options.tag, tuple(planted.items()), outer)
        outs, _ = program.evaluate(handler, Given(values=values), *program.inputs)
        return program.output(outs)

    def _entries(
        self, program: Program, unmarked: Callable[[], bool]
    ) -> dict[Any, list[Entry]]:
        """What would be captured at each place that is planted, as shapes."""
        options: Options = self._options.value
        mode = options.mode
        wanted = options._replace(names=tuple(self._values), modes=(mode,))
        survey = Collect(Const(wanted), _EACH_PLACE, Same(None), has_outer=False)
        sown = program.survey(survey)
        names = [name for name, _ in sown.seen]
        check_known("plant(fn, values)", self._values, names, unmarked=unmarked)
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
        check_known(f"plant(fn, values, mode={mode!r})", self._values, there, problem)
        return entries


def plant(
    fn: Callable,
    values: Mapping[str, Any],
    *,
    mode: str = "primal",
    tag: Hashable = "intermediates",
    capture: Any = None,
    methods: Sequence[str] = ("__call__",),
    scope: bool = False,
) -> Callable:
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

    [`eqx_sow.UnknownSowError`][] if a name or a glob matches nothing.
    [`eqx_sow.SowError`][] if the structure, a shape, a dtype or a static leaf differs.

    !!! example

        ```python
        import equinox as eqx
        import eqx_sow
        import jax
        import jax.numpy as jnp

        model = eqx.nn.MLP(2, 1, 8, 2, key=jax.random.key(0))
        ablated = eqx_sow.plant(model, {"layers/1": jnp.zeros_like}, capture=True)
        ablated(jnp.ones(2))
        ```
    """
    options = {k: v for k, v in locals().items() if k != "fn"}
    static, arrays = opt.checked("plant", fn, options)
    return wrap(_Plant, fn, arrays["values"], Const(static))
