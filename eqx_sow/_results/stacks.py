"""Stacks of layers: taken apart, as if each were a list, and layers put together."""

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._errors import shown, SowError, UnknownSowError
from .._globs import is_glob
from .._names import Iterations, Named
from .._selection import Selection
from .._unknown import across_slashes
from .layers import (
    axes_of_runs,
    layer_of,
    LoopAxis,
    loops_of,
    loops_over_layers,
    names_of_layers,
    OfRuns,
    OfValue,
    runs_of,
)
from .leaves import is_value
from .lookup import Known, Values, why_no_mode


# --- taken apart ---
def unstacked(
    values: Values, known: Known
) -> tuple[dict[str, dict[str, Any]], dict[tuple[str, str], OfValue | OfRuns]]:
    """The values as if each stack of layers were a list, in order of execution, and
    their axes."""
    began: dict[Any, int] = {}
    when: dict[str, tuple[int, ...]] = {}
    out: dict[str, dict[str, Any]] = {}
    new: dict[tuple[str, str], OfValue | OfRuns] = {}
    for position, (name, modes) in enumerate(values.items()):
        for mode, value in modes.items():
            axes = known.of(name, mode)
            if _was_stacked(axes, value):
                raise _changed("unstack", name)
            over = loops_over_layers(axes, value)
            for layer, at in names_of_layers(name, over, range(len(over))):
                of_layer, part = layer_of(axes, value, at)
                if mode in out.setdefault(layer, {}):
                    raise SowError(
                        f"`Intermediates.unstack()`: a layer of {name!r} would be "
                        f"called {layer!r}, and so is another value. Choose other "
                        "names for `sow`, or unstack only some of the names."
                    )
                out[layer][mode], new[layer, mode] = part, of_layer
                if layer not in when:
                    loops = _around(axes, value)
                    backward = mode.count("cotangent") % 2 == 1
                    when[layer] = _when(position, loops, at, backward, began)
    order = sorted(out, key=lambda layer: when[layer])
    return {layer: out[layer] for layer in order}, new


def _was_stacked(axes: OfValue | OfRuns, value: Any) -> bool:
    """Whether a value had an axis of layers of which it is not known where it is."""
    for of_run, x in runs_of(axes, value):
        loops = loops_of(of_run, x)
        if loops is None and any(p is not None for own, _ in of_run for _, p, _ in own):
            return True
        if any(x.place is not None and not x.is_known for x in loops or ()):
            return True
    return False


def _changed(method: str, name: str) -> SowError:
    return SowError(
        f"`Intermediates.{method}()`: the values of {name!r} have other shapes than "
        "those that `save_intermediates` returned, so the axis of the layers is no "
        f"longer known. Call `{method}` before you compute with the values. If a "
        "`jax.vmap` around `save_intermediates` has added the axis of a batch that is "
        "as long as there are layers, put it inside: "
        "`save_intermediates(jax.vmap(fn))`."
    )


def _around(axes: OfValue | OfRuns, value: Any) -> list[LoopAxis]:
    """The loops around the first run of which they are known."""
    each = (loops_of(of_run, x) for of_run, x in runs_of(axes, value) if of_run)
    return next(filter(None, each), [])


def _when(
    position: int,
    loops: Sequence[LoopAxis],
    at: Sequence[Any],
    backward: bool,
    began: dict[Any, int],
) -> tuple[int, ...]:
    """Sorts layers by when they ran, given the position of the whole value among all.
    For each loop around: where the first value in it stands, and which iteration this
    is. Of loops of which there are all iterations, the first counts."""
    indices, key = iter(at), []
    for depth, x in enumerate(loops):
        i = 0 if x.place is None else next(indices)
        # A backward pass goes through the iterations the other way round.
        from_end = x.scan is not None and bool(x.scan[-1][1]) != backward
        key += [began.setdefault(x.scan or (position, depth), position)]
        key += [x.length - 1 - i if from_end and x.place is not None else i]
    return (*key, position)


# --- put together ---
def stacked(pattern: str, mode: str, values: Values, known: Known) -> Any:
    """The layers that a pattern fits, along a new first axis of their arrays."""
    there = {name: modes[mode] for name, modes in values.items() if mode in modes}
    call = f"`Intermediates.stack({pattern!r}, {mode!r})`"
    if values and not there:
        modes = dict.fromkeys(m for modes_of in values.values() for m in modes_of)
        raise UnknownSowError(
            f"{call}: no name has the mode {mode!r}. The modes there are: "
            f"{shown(modes)}.{why_no_mode(mode, modes, known)}"
        )
    axes = {name: known.of(name, mode) for name in there}
    selection, parts = _selected(pattern, there, axes)
    for several in selection.ambiguous.values():
        which = " or ".join(map(repr, several))
        raise UnknownSowError(f"{call} may be {which}. Write which one.")
    if not parts:
        changed = any(None in axes_of_runs(axes[name], x) for name, x in there.items())
        hint = " If you have computed with the values since, the axis of the layers"
        hint += " is no longer known: call `stack` before that."
        hint = hint if changed else across_slashes(str(pattern), there)
        raise UnknownSowError(
            f"{call} matches nothing. The names with this mode are: "
            f"{shown(there)}.{hint}"
        )
    for name, *_ in parts:
        if _was_stacked(axes[name], there[name]):
            raise _changed("stack", name)
    layers = [
        (layer, layer_of(axes[name], there[name], at)[1]) for name, layer, at in parts
    ]
    return _along_a_new_axis(pattern, layers)


def _selected(
    pattern: str, values: Mapping[str, Any], axes: Mapping[str, OfValue | OfRuns]
) -> tuple[Selection, list[tuple[str, str, tuple[int | None, ...]]]]:
    """What a pattern selects, as if each stack were a list: the name of a value, that
    of the layer, and its indices. Of `b` in a loop of 2, in which there is one of 4,
    `"b/*/*"` has all of `b/0/0` to `b/1/3`. If it fits no such name, the inner loops
    stay: `"b/*"` has `b/0` and `b/1`, each with an axis of 4. The name of a stack
    means all layers of it.
    """
    roots = [name.split("/")[0] for name in values]
    loops = {name: loops_over_layers(axes[name], x) for name, x in values.items()}
    n = max(map(len, loops.values()), default=0)
    while True:
        named = {
            name: Named(name, tuple(Iterations(x.place, x.length) for x in some[:n]))
            for name, some in loops.items()
        }
        selection = Selection([pattern], named.values(), roots)
        if n == 0 or selection.is_of_a_list or selection.ambiguous:
            break
        n -= 1
    parts = []
    for name, one in [
        (k, one) for k, x in named.items() for one in selection.all_of(x)
    ]:
        which = range(n if n or is_glob(pattern) else len(loops[name]))
        for layer, at in names_of_layers(name, loops[name], which):
            if all(i in (None, j) for i, j in zip(one.at, at)):
                parts.append((name, layer, at))
    return selection, parts


def _along_a_new_axis(pattern: str, named: Sequence[tuple[str, Any]]) -> Any:
    """Values, each with its name, as one."""

    def form(value):
        arrays = filter(is_value, jtu.tree_leaves(value))
        return jtu.tree_structure(value), [(x.shape, x.dtype) for x in arrays]

    values = [value for _, value in named]
    if any(form(value) != form(values[0]) for value in values):
        kinds: dict[str, str] = {}
        for name, value in named:
            kinds.setdefault(eqx.tree_pformat(value), name)
        found = " and ".join(f"{name!r} is {kind}" for kind, name in kinds.items())
        raise SowError(
            f"`Intermediates.stack({pattern!r})`: the values differ in structure, "
            f"shape or dtype: {found}. Select values that are alike, by a pattern such "
            "as `blocks/*/mlp`."
        )

    def stacked(*xs):
        if not is_value(xs[0]):
            return xs[0]
        if isinstance(xs[0], jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((len(xs), *xs[0].shape), xs[0].dtype)
        # JAX has no arrays of the dtype `float0`.
        return (jnp if any(isinstance(x, jax.Array) for x in xs) else np).stack(xs)

    return jtu.tree_map(stacked, *values)
