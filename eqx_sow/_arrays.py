"""Helpers for arrays.

On a mesh with explicit axes, which is what `jax.make_mesh` makes, a sharding is part of
the type of an array. Arrays that are made here to stand for a value, such as zeros of a
branch that did not run, have the sharding of that value. A `spec` says for each axis of
an array over which mesh axes it is sharded, as in `("data", None)`.
"""

import contextlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from . import _compat


def as_integer(x: Any) -> int | None:
    """A number, if it is a whole one. A boolean has an index too, but is a mistake, and
    a tracer raises a `TypeError` of its own."""
    try:
        return None if isinstance(x, bool | np.bool_) else operator.index(x)
    except TypeError:
        return None


def leading(x, ndim: int):
    """Gives `x` more axes of size one, behind its own."""
    return jnp.reshape(x, jnp.shape(x) + (1,) * (ndim - jnp.ndim(x)))


def select(mask, x, y):
    return jnp.where(leading(mask, jnp.ndim(x)), x, y)


def differentiable_where(mask, x):
    """The same array, with derivatives only where the mask says so: for a function
    whose result counts only there. Elsewhere, as that of a logarithm at zero, its
    derivative may be infinite, and zero times that is NaN."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return select(mask, x, jax.lax.stop_gradient(x))


def _sharding(x) -> NamedSharding:
    return (x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)).sharding


def _mesh(x) -> AbstractMesh | None:
    """The mesh in the type of an array, if it has explicit axes."""
    mesh: Any = _sharding(x).mesh
    return mesh if AxisType.Explicit in mesh.axis_types else None


def spec_of(x) -> tuple[Any, ...]:
    """Over which explicit mesh axes each axis of an array is sharded."""
    spec = () if _mesh(x) is None else _sharding(x).spec
    return (*spec, *[None] * (len(x.shape) - len(spec)))


def sharding_with(x, spec: Sequence[Any]) -> NamedSharding | None:
    """For a new array on the mesh of `x`, if that has explicit axes."""
    return sharding_on(_mesh(x) or jax.sharding.get_abstract_mesh(), spec)


def sharding_on(mesh: Any, spec: Sequence[Any]) -> NamedSharding | None:
    """For a new array on a mesh with explicit axes. What `spec` says of other mesh axes
    is left out."""
    if AxisType.Explicit not in mesh.axis_types:
        return None
    return with_spec(mesh, spec)


def with_spec(mesh: Any, spec: Sequence[Any]) -> NamedSharding:
    """A sharding over the explicit axes of a mesh. What `spec` says of others is left
    out."""
    types = dict(zip(mesh.axis_names, mesh.axis_types))

    def of_axis(names):
        every = names if isinstance(names, tuple) else (names,)
        kept = tuple(a for a in every if types.get(a) == AxisType.Explicit)
        return kept[0] if len(kept) == 1 else kept or None

    return NamedSharding(mesh, PartitionSpec(*map(of_axis, spec)))


def shape_like(x, shape: Sequence[int], spec: Sequence[Any]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding_with(x, spec))


def zeros_like(x):
    """Zeros of the type of `x`, which may be a type itself."""
    sharding = sharding_with(x, spec_of(x))
    return jnp.zeros(x.shape, x.dtype, out_sharding=sharding)


def broadcast_to(x, shape: Sequence[int], spec: Sequence[Any]):
    """Gives an array new leading axes. `spec` is that of these."""
    old = spec_of(x)[jnp.ndim(x) - (len(shape) - len(spec)) :]
    sharding = sharding_with(x, (*spec, *old))
    return jnp.broadcast_to(x, shape, out_sharding=sharding)


def sharded_like(x, other):
    """`x` with the sharding of another array of its shape."""
    spec = spec_of(other)
    if spec_of(x) == spec or sharding_with(other, spec) is None:
        return x
    # Only an inner `shard_map` knows the mesh.
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.sharding.reshard(x, sharding_with(other, spec))


def sharded_along(x, spec: Sequence[Any]):
    """`x` with its leading axes sharded so."""
    spec = (*spec, *spec_of(x)[len(spec) :])
    return sharded_like(x, shape_like(x, x.shape, spec))


def on_mesh(x, mesh: Any, spec: Sequence[Any]):
    """Puts an array on a mesh, if that has explicit axes and `x` is on none yet."""
    sharding = sharding_on(mesh, spec)
    if sharding is None or _mesh(x) is not None:
        return x
    # `jnp.zeros(..., out_sharding=)` would need `jax.set_mesh`.
    return jax.sharding.reshard(x, sharding)


def whole_along(x, axis: int):
    """Not sharded over this axis, along which it can then be indexed."""
    spec = list(spec_of(x))
    if spec[axis] is None:
        return x
    spec[axis] = None
    return jax.sharding.reshard(x, sharding_with(x, spec))


def one_along(x, axis: int):
    """The first along an axis, which stays, for several that are all the same. Of none,
    it is zeros."""
    if x.shape[axis] == 0:
        spec = spec_of(whole_along(x, axis))
        return zeros_like(
            shape_like(x, (*x.shape[:axis], 1, *x.shape[axis + 1 :]), spec)
        )
    return jax.lax.index_in_dim(whole_along(x, axis), 0, axis)


def at_index(x, index: Mapping[int, Any]):
    """`x` at these places along some axes, which go."""
    sizes = [1 if k in index else n for k, n in enumerate(x.shape)]
    return jax.lax.dynamic_slice(x, _starts(x, index), sizes).squeeze(tuple(index))


def with_index(x, index: Mapping[int, Any], new):
    """`x`, in which `new` is at these places along some axes."""
    new = jnp.expand_dims(new, tuple(index))
    return jax.lax.dynamic_update_slice(x, new, _starts(x, index))


def _starts(x, index: Mapping[int, Any]) -> list[Any]:
    return [index.get(k, np.int32(0)) for k in range(x.ndim)]


def in_mesh_of(arrays: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Sets the mesh of these arrays if the user did not call `jax.set_mesh`."""
    told = not jax.sharding.get_abstract_mesh().empty
    there = [] if told else [x for x in arrays if _mesh(x) is not None]
    if not there:
        return contextlib.nullcontext()
    # What runs now has to be told of the devices too.
    context = _compat.set_mesh_of(there[0])
    mesh: Any = _mesh(there[0])
    return context or jax.sharding.use_abstract_mesh(mesh)


# --- meshes within a mesh, see `_walk/meshes.py` ---
def mesh_inside(eqn: Any) -> AbstractMesh | None:
    """The mesh of an equation, if its axes have other types than here."""
    here = jax.sharding.get_abstract_mesh()
    if here.empty:
        return None
    with eqn.ctx.manager:
        inside = jax.sharding.get_abstract_mesh()
    same = inside.empty or inside.axis_types == here.axis_types
    return None if same else inside


def onto(x: Any, mesh: Any, spec: Sequence[Any]) -> Any:
    """An array on a mesh whose axes have other types than the one that it is on."""
    there: Any = jax.typeof(x).sharding.mesh
    if there.empty or mesh.empty or there.axis_types == mesh.axis_types:
        return x
    return jax.sharding.reshard(x, with_spec(mesh, spec))


def as_jax_does(x: Any, dtype: Any) -> Any:
    """A NumPy array or a Python number as an array, if it can be one of the dtype.
    Anything else comes back as it is."""
    # JAX refuses strings, a number that is too large, and any number for a key.
    with contextlib.suppress(TypeError, OverflowError):
        if isinstance(x, np.ndarray | np.generic):
            return jnp.asarray(x)
        if isinstance(x, bool | int | float | complex):
            with jax.numpy_dtype_promotion("standard"):
                if jnp.result_type(x, dtype) == dtype:
                    return jnp.asarray(x, dtype)
    return x
