"""The leaves of two values in pairs: those at the same place, whatever holds them.

A tuple may have become a list in a file, a module or a `Summary` the keys of a flat
dict, and an array a list of numbers.
"""

import contextlib
import enum
import functools as ft
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .flat import as_data, fields_of, inside_of
from .leaves import is_key, is_numeric, is_state, is_value
from .rows import is_whole, Leaf
from .summarize import Summary


class Static(NamedTuple):
    """What is not a number: `key` is the same for two that are the same."""

    key: Any
    shown: str


class Found(NamedTuple):
    label: str
    leaf: Leaf


# By place, such as `a/0`.
Leaves = dict[str, Found]


# --- in pairs ---
def pairs(
    a: Leaves, b: Leaves, are_ours: bool
) -> Iterator[tuple[str, str, Leaf, Leaf]]:
    """The place of each leaf, what it is called, the leaf of `a` and that of `b`, whose
    `x` is `None` where only the other has one. `are_ours`: whether both are what was
    captured, and so have the same structure."""
    if not are_ours:
        a, b = _bare(a, b), _bare(b, a)
    a, b = _opened(a, b), _opened(b, a)
    nothing = Found("", Leaf(None))
    for place in {**a, **b}:
        (one, x), (other, y) = a.get(place, nothing), b.get(place, nothing)
        yield place, one or other, x, y


def by_place(leaves: Mapping[Any, Leaf], is_flat: bool) -> Leaves:
    found: Leaves = {}
    for path, leaf in leaves.items():
        place, label = inside_of(path), jtu.keystr(path)
        if is_flat:
            parts = place.split("/") if place else []
            label = "".join(f"[{p if p.isdigit() else repr(p)}]" for p in parts)
        # A key of a dict may have a slash in it.
        found[label if place in found else place] = Found(label, leaf)
    return found


def _bare(own: Leaves, other: Leaves) -> Leaves:
    """What is alone in tuples as `other` has it: the inputs `((x,), {})` as `x`."""
    mine, its = ([*filter(_is_number, leaves.items())] for leaves in (own, other))
    if not len(mine) == len(its) == 1:
        return own
    ((place, one),), ((whole, x),) = mine, its
    parts = {*place.split("/"), *whole.split("/")}
    if len(place) <= len(whole) or not parts <= {"0", ""}:
        return own
    is_list = isinstance(x.leaf.x, list)
    if is_list and np.shape(x.leaf.x) != np.shape(one.leaf.x):
        return own
    return {whole: one}


def _opened(own: Leaves, other: Leaves) -> Leaves:
    """With the parts of a list of numbers, of a `Summary` or a `State` where the other
    has parts, too."""
    opened: Leaves = {}
    for place, (label, leaf) in own.items():
        if not _is_opened(place, leaf.x, other):
            opened[place] = Found(label, leaf)
            continue
        parts = {
            "/".join(filter(None, (place, inside_of(path)))): Found(
                label + jtu.keystr(path), leaf._replace(x=part)
            )
            for path, part in _parts(leaf.x)
        }
        opened |= _opened(parts, other)
    return opened


def _is_opened(place: str, x: Any, other: Leaves) -> bool:
    if place in other:
        return is_state(x) and is_state(other[place].leaf.x)
    if isinstance(x, list) and not x:
        return True
    has_parts = isinstance(x, list | Summary)
    return has_parts and any(not place or p.startswith(f"{place}/") for p in other)


def _parts(x: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(x, Summary):
        return fields_of(x)
    if is_state(x):
        return iter(jtu.tree_leaves_with_path(x))
    return (((jtu.SequenceKey(i),), y) for i, y in enumerate(x))


# --- leaves ---
def is_leaf(x: Any) -> bool:
    return is_whole(x) or type(x) is list and as_numbers(x) is not None


def as_numbers(x: Any) -> np.ndarray | None:
    """A Python number, or a list of them, as an array, if it loses nothing."""
    found: list[Any] = []
    if not _gathered(x, found):
        return None
    try:
        array = np.asarray(x)
        is_long = any(isinstance(i, int) and int.__abs__(i) > 2**53 for i in found)
        if array.dtype.kind not in "biu" and is_long:
            if not all(isinstance(i, int) for i in found):
                return None
            return np.array(found, np.uint64).reshape(array.shape)
    except (ValueError, OverflowError):  # of different lengths; too long
        return None
    return array


def _gathered(x: Any, found: list[Any]) -> bool:
    if type(x) is list:
        return all(_gathered(y, found) for y in x)
    if isinstance(x, np.generic):
        found.append(x.item())
        return is_numeric(x)
    found.append(x)
    return isinstance(x, bool | int | float | complex)


def _is_number(found: tuple[str, Found]) -> bool:
    """Whether it has numbers or keys, once it is an array."""
    x, _ = as_compared(found[1].leaf.x, None)
    return isinstance(x, Summary) or is_numeric(x) or is_key(x)


def as_compared(x: Any, y: Any) -> tuple[Any, Any]:
    """Two leaves as arrays if they have numbers, and else as `Static`."""
    p, q = _array_of(x), _array_of(y)
    p, q = _read_as(p, q), _read_as(q, p)
    if is_value(p) and is_value(q):
        # A file has `[]` for an array of `[0, 3]`.
        p = q if isinstance(x, list) and _is_start(p, q) else p
        q = p if isinstance(y, list) and _is_start(q, p) else q
    return p, q


def _is_start(x: Any, y: Any) -> bool:
    return x.size == 0 and x.shape == y.shape[: x.ndim]


def _array_of(x: Any) -> Any:
    if x is None or is_whole(x):
        return x
    # Such as a tensor of PyTorch, which is a leaf to JAX.
    if not is_value(x) and hasattr(x, "dtype") and hasattr(x, "__array__"):
        x = np.asarray(x)
    if is_value(x):
        is_ours = isinstance(x, jax.Array | jax.ShapeDtypeStruct)
        return x if is_ours else np.asarray(x)
    numbers = as_numbers(x)
    return _static(x) if numbers is None else numbers


# What NumPy reads from its files in the place of these, by their size. Of the types of
# one byte it does not say which one it was.
_BITS: Any = {1: np.uint8, 2: jnp.bfloat16}


def _read_as(x: Any, other: Any) -> Any:
    """What a file has made of an array as that."""
    if not is_value(x):
        return x
    if is_key(x):
        is_read = is_value(other) and not is_key(other)
        return as_data(x) if is_read else x
    size = x.dtype.itemsize
    if x.dtype.type is np.void and not x.dtype.names and size in _BITS:
        is_known = is_numeric(other) and other.dtype.itemsize == size
        return x.view(other.dtype if is_known else _BITS[size])
    if x.dtype.kind in "fc" and x.dtype.type in (np.longdouble, np.clongdouble):
        return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
    return x if is_numeric(x) else _of_no_numbers(x)


def _of_no_numbers(x: Any) -> Static:
    """An array of strings, dates or objects, or the cotangent of integers."""
    said = f"{x.dtype}{[*x.shape]}"
    if x.dtype == jax.dtypes.float0:
        return Static((x.dtype, x.shape), "float0")
    if x.dtype.type is np.void:
        return Static((str(x.dtype), x.shape, x.tobytes()), said)
    parts = x.astype(str if x.dtype.kind in "mM" else object).ravel()
    return Static((x.shape, *(_static(y).key for y in parts)), said)


def _static(x: Any) -> Static:
    """No method of a user's class decides whether two are the same. Of what is neither
    a string nor a number nor has a name, the class does."""
    for base in (str, bytes, int, float, complex):
        if isinstance(x, base):
            value = getattr(base, f"__{base.__name__}__")(x)
            return Static((base, value), reprlib.repr(value))
    if isinstance(x, np.dtype):
        return Static((np.dtype, str(x)), str(x))
    if isinstance(x, enum.Enum):
        shown = f"{_name(type(x))}.{x._name_}"
        return Static((enum.Enum, shown), shown)
    if isinstance(x, ft.partial):
        key, shown = _static(x.func)
        return Static((ft.partial, key), f"partial({shown})")
    name = ""
    if callable(x):
        with contextlib.suppress(Exception):
            name = _name(x)
    shown = name or _name(type(x))
    return Static((bool(name), shown), shown)


def _name(x: Any) -> str:
    parts = getattr(x, "__module__", None), getattr(x, "__qualname__", None)
    return ".".join(p for p in parts if isinstance(p, str)) if parts[1] else ""
