"""Flat dicts of arrays, as files and loggers take them, and what their keys say."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from .leaves import is_key, is_state, is_value
from .summarize import Summary


# The name, the mode, and the path in the value, of which a key is made.
Place = tuple[str, str, str]


def flattened(
    values: Mapping[str, Any], sep: str = "/"
) -> Iterator[tuple[str, Place, Any]]:
    """Each array with its key, and with the place where it was found."""
    for name, modes in values.items():
        for mode, value in modes.items():
            for path, x in _arrays_in(value):
                place = str(name), str(mode), inside_of(path, sep)
                yield sep.join(filter(None, place)), place, x


def inside_of(path: tuple[Any, ...], sep: str = "/") -> str:
    """A path in a value, as keys have it: `a/0` for `["a"][0]`."""
    return jtu.keystr(path, simple=True, separator=sep)


def _arrays_in(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    is_leaf = lambda x: is_state(x) or isinstance(x, Summary)
    for path, x in jtu.tree_leaves_with_path(value, is_leaf=is_leaf):
        if isinstance(x, Summary):
            yield from ((path + p, y) for p, y in fields_of(x))
        elif is_value(x) and x.dtype != jax.dtypes.float0:
            yield path, x


def fields_of(x: Summary) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield from jtu.tree_leaves_with_path(x)
    if x.edges is not None:
        yield (jtu.GetAttrKey("edges"),), np.asarray(x.edges)


def as_data(x: Any) -> Any:
    """A key as the numbers in it, since no file has keys."""
    return jax.random.key_data(x) if is_key(x) and isinstance(x, jax.Array) else x


# --- read ---
def places_of(
    keys: Collection[Any], others: Mapping[str, Any], are_flat: bool
) -> dict[str, Place] | None:
    """What the keys of a mapping say, if it is a flat dict. `others` is what it is
    compared with: if that is not flat itself, it tells names and modes apart.

    Without it, `x/cotangent/y/primal` may be the primal of `x/cotangent/y`, or a part
    of the cotangent of `x`. It is the latter only if there is an `x/primal/y/primal`,
    as a cotangent has the parts of the primal; and names that contain modes go first.
    """
    named = {k: x for k, x in others.items() if isinstance(x, Mapping) and not are_flat}
    known = {key: place for key, place, _ in flattened(named)}
    if not are_flat and all(key in others for key in keys):
        return None
    every = {*keys, *(others if are_flat else known)}
    begun = {(name, mode) for key in every for name, mode, _ in _ways(key)}
    places = {k: known.get(k) or _taken_apart(k, every, begun) for k in keys}
    if any(key in known for key in keys) or all(places.values()):
        return {key: place or (key, "primal", "") for key, place in places.items()}
    return None


def _ways(key: Any) -> list[Place]:
    """All ways to take it apart."""
    parts = key.split("/") if isinstance(key, str) else []
    modes = [i for i, part in enumerate(parts) if i and is_mode(part)]
    return [("/".join(parts[:i]), parts[i], "/".join(parts[i + 1 :])) for i in modes]


def _taken_apart(
    key: Any, every: Collection[Any], begun: Collection[tuple[str, str]]
) -> Place | None:
    def may_be(name, mode, inside):
        if mode == "count":
            # One number for each run of a name.
            modes = ("primal", "tangent", "cotangent")
            is_number = not inside or inside.isdigit()
            return is_number and any((name, m) in begun for m in modes)
        return "/".join(filter(None, (name, "primal", inside))) in every

    ways = _ways(key)[::-1]
    return next((way for way in ways if may_be(*way)), ways[0] if ways else None)


def is_mode(key: Any) -> bool:
    modes = {"primal", "tangent", "cotangent"}
    return key == "count" or isinstance(key, str) and modes >= {*key.split(".")}
