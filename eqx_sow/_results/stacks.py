"""Stacks of layers: taken apart, as if each were a list, and layers put together."""

import itertools as it
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._errors import SowError
from .._globs import head_of, is_number, layers_in, of_all_layers
from .._names import with_indices
from .layers import (
    behind_layers,
    Known,
    LoopAxis,
    loops_of,
    OfRuns,
    OfValue,
    parts,
    runs_of,
    Values,
)
from .leaves import arrays_in, is_value


# --- taken apart ---
def unstacked(
    values: Values, known: Known, call: str = "Intermediates.unstack()"
) -> tuple[dict[str, dict[str, Any]], dict[tuple[str, str], OfValue | OfRuns]]:
    """The values as if each stack of layers were a list, in order of execution, and
    their axes. `call`: for messages, what needs that."""
    began: dict[Any, int] = {}
    when: dict[str, tuple[int, ...]] = {}
    out: dict[str, dict[str, Any]] = {}
    new: dict[tuple[str, str], OfValue | OfRuns] = {}
    for position, (name, modes) in enumerate(values.items()):
        for mode, value in modes.items():
            axes = known.of(name, mode)
            each = [loops_of(*run) for run in runs_of(axes, value)]
            if any(x.place is not None and not x.is_known for x in it.chain(*each)):
                raise SowError(
                    f"`{call}`: the values of {name!r} have other shapes than those "
                    "that `save_intermediates` returned, so the axis of the layers is "
                    f"no longer known. Write `{call}` before you compute with the "
                    "values. If a `jax.vmap` around `save_intermediates` has added the "
                    "axis of a batch that is as long as there are layers, put it "
                    "inside: `save_intermediates(jax.vmap(fn))`."
                )
            # Those around the first run of which they are known.
            loops = next(filter(None, each), [])
            for layer, index, (of_layer, part) in parts(name, axes, value):
                if mode in out.setdefault(layer, {}):
                    raise SowError(
                        f"`{call}`: a layer of {name!r} would be "
                        f"called {layer!r}, and so is another value. Choose other "
                        "names for `sow`, or unstack only some of the names."
                    )
                out[layer][mode], new[layer, mode] = part, of_layer
                if layer not in when:
                    backward = mode.count("cotangent") % 2 == 1
                    when[layer] = _when(position, loops, index, backward, began)
    order = sorted(out, key=lambda layer: when[layer])
    return {layer: out[layer] for layer in order}, new


def _when(
    position: int,
    loops: Sequence[LoopAxis],
    index: Mapping[int | None, int],
    backward: bool,
    began: dict[Any, int],
) -> tuple[int, ...]:
    """Sorts layers by when they ran, given the position of the whole value among all.
    For each loop around: where the first value in it stands, and which iteration this
    is. Of loops of which there are all iterations, the first counts."""
    key = []
    for depth, x in enumerate(loops):
        i = index.get(x.place, 0)
        # A backward pass goes through the iterations the other way round.
        from_end = x.scan is not None and bool(x.scan[-1][1]) != backward
        key += [began.setdefault(x.scan or (position, depth), position)]
        key += [x.length - 1 - i if from_end and x.place in index else i]
    return (*key, position)


# --- taken apart by shapes, where no axes are known ---
def layers_like(
    pattern: str, names: Iterable[str]
) -> tuple[list[str], list[int]] | None:
    """All layers of a list that a stack of this name would have, in order, if these
    names are there; and how many there are along each axis."""
    stars = [k for k, part in enumerate(pattern.split("/")) if head_of(part)[0] == "*"]
    found = {}
    for name in names if stars else ():
        at = [head_of(part)[0] for k, part in enumerate(name.split("/")) if k in stars]
        if all(map(is_number, at)) and with_indices(pattern, zip(stars, at)) == name:
            found[tuple(map(int, at))] = name
    sizes = [max(i) + 1 for i in zip(*found)]
    every = [*it.product(*map(range, sizes))]
    if not sizes or {*every} != {*found}:
        return None
    return [found[i] for i in every], sizes


def fits_along(
    shape: Sequence[int], sizes: Sequence[int], of_layer: Sequence[int], n: int
) -> set[tuple[int, ...]]:
    """Where an array may have axes of so many layers, given the shape of one layer, of
    which the first `n` axes are leading ones: of `[5, 4, 3]`, 4 layers of `[5, 3]` are
    along axis 1."""
    every = it.combinations(range(n + len(sizes)), len(sizes))
    keep = lambda at: [k for k in range(len(shape)) if k not in at]
    return {
        at
        for at in (every if len(shape) == len(sizes) + len(of_layer) else ())
        if [shape[k] for k in at] == [*sizes]
        and [shape[k] for k in keep(at)] == [*of_layer]
    }


# --- put together ---
def stacked(
    pattern: str, layers: Values, axes: Mapping[tuple[str, str], OfValue | OfRuns]
) -> tuple[dict[str, Any], dict[tuple[str, str], OfValue | OfRuns]]:
    """The modes that all of these layers have, which a pattern fits, as one value each,
    whose arrays have new axes in front. Nested lists have one axis for each: those of
    `blocks/0/layers/0` to `blocks/1/layers/3` are `(2, 4)`. Other names are along one
    axis, in order of execution. Also what all axes are, given those of the layers."""
    names, sizes = grid(pattern, list(layers))
    values, new = {}, {}
    for mode, one in layers[names[0]].items():
        if all(mode in layers[name] for name in names):
            values[mode] = _along_new_axes(pattern, mode, layers, names, sizes)
            known = axes[names[0], mode]
            each = [behind_layers(*run, sizes) for run in runs_of(known, one)]
            new[pattern, mode] = each if isinstance(known, list) else each[0]
    return values, new


def grid(pattern: str, names: list[str]) -> tuple[list[str], list[int]]:
    """Names in the order of the layers of their lists, and how many there are along
    each axis."""
    if len({of_all_layers(name) for name in names}) > 1:
        return names, [len(names)]
    axes = layers_in(names[0], pattern)
    index = lambda split: [int(head_of(split[k])[0]) for k in axes]
    found = sorted((index(name.split("/")), name) for name in names)
    sizes = [len({i[k] for i, _ in found}) for k in range(len(axes))]
    if math.prod(sizes) != len(names):
        raise SowError(
            f"`intermediates[{pattern!r}]`: there are lists of different lengths, from "
            f"{found[0][1]!r} to {found[-1][1]!r}, which cannot be stacked. Stack each "
            "by a pattern of its own."
        )
    return [name for _, name in found], sizes or [1]


def _along_new_axes(
    pattern: str, mode: str, layers: Values, names: Sequence[str], sizes: Sequence[int]
) -> Any:
    def form(value):
        arrays = [(x.shape, x.dtype) for x in arrays_in(value)]
        return jtu.tree_structure(value), arrays

    values = [layers[name][mode] for name in names]
    if any(form(value) != form(values[0]) for value in values):
        kinds: dict[str, str] = {}
        for name, value in zip(names, values):
            kinds.setdefault(eqx.tree_pformat(value), name)
        found = " and ".join(f"{name!r} is {kind}" for kind, name in kinds.items())
        raise SowError(
            f"`intermediates[{pattern!r}]`: the values differ in structure, shape or "
            f"dtype: the {mode} of {found}. Select values that are alike, by a pattern "
            "such as `blocks/*/mlp`."
        )

    def stack(*xs):
        if not is_value(xs[0]):
            return xs[0]
        shape = (*sizes, *xs[0].shape)
        if isinstance(xs[0], jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, xs[0].dtype)
        # JAX has no arrays of the dtype `float0`.
        x = (jnp if any(isinstance(x, jax.Array) for x in xs) else np).stack(xs)
        return x if len(sizes) == 1 else x.reshape(shape)

    return jtu.tree_map(stack, *values)
