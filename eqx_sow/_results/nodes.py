"""The dicts that come back: of all names, and of the modes of one name.

To JAX each is a PyTree node of its own type, since JAX sorts the keys of a plain dict.
"""

import dataclasses as dc
import functools as ft
import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax.export
import jax.tree_util as jtu

from .._frames import api_boundary
from .layers import Known, OfRuns, OfValue, Values
from .lookup import find, is_there, no_array, unknown_mode, unknown_name


class Keys(tuple[Any, ...]):
    """The static part of such a dict: its keys, then `Known.orders` of its values, if
    there are any; and what is known of it. Nothing else of that counts for whether two
    are of one form: both a loop and a vmap stack values."""

    known: Any


def made(cls: Any, values: Any, known: Any) -> Any:
    """Such a dict of these values, of which this is known."""
    new = cls(values)
    new._known = known
    return new


class Modes(dict[str, Any]):
    """The modes of one name, as `intermediates[name]` returns them: a dict that says
    what it means that a mode is not there.

    What an `Intermediates` holds are plain dicts. What changes this one changes that,
    too."""

    # The name, and what is known of all that came back.
    _known: tuple[str, Known] = "", Known()
    # Where it was looked up.
    _held: dict[str, Any] | None = None

    @api_boundary
    def __getitem__(self, mode: Any) -> Any:
        try:
            return super().__getitem__(mode)
        except TypeError:  # of a slice or an array, which cannot be a key
            return self.__missing__(mode)

    def __missing__(self, mode: Any) -> NoReturn:
        raise unknown_mode(mode, self, *self._known)

    def copy(self) -> "Modes":
        return made(Modes, self, self._known)

    __copy__ = copy

    @api_boundary
    def __getattr__(self, attribute: str) -> NoReturn:
        raise AttributeError(no_array(self, self._known[0], attribute))

    def __reduce__(self):
        return dict, (dict(self),)


@api_boundary
def _as_array(self: Modes, *args: Any, **kwargs: Any) -> NoReturn:
    raise TypeError(no_array(self, self._known[0]))


# What is done with arrays. The value is not this dict, but in it. (Dicts have `|`.)
_BINARY = "add sub mul truediv floordiv mod divmod pow matmul".split()
for _does in (
    *("__array__", "__array_ufunc__", "__jax_array__"),
    *(f"__{_side}{_op}__" for _op in _BINARY for _side in ("", "r")),
    *(f"__{_op}__" for _op in "neg pos abs invert lt le gt ge".split()),
    *(f"__{_type}__" for _type in "int float complex round".split()),
):
    setattr(Modes, _does, _as_array)


def _in_both(change: str) -> Callable:
    """A method of a dict that changes it, for `Modes`."""

    def method(self, *args, **kwargs):
        if self._held is not None:
            getattr(self._held, change)(*args, **kwargs)
        return getattr(dict, change)(self, *args, **kwargs)

    return ft.update_wrapper(method, getattr(dict, change))


for _change in (
    *("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem"),
    *("setdefault", "update"),
):
    setattr(Modes, _change, _in_both(_change))


def modes_of(name: str, held: dict[str, Any], known: Known) -> Modes:
    modes = made(Modes, held, (name, known))
    modes._held = held
    return modes


# --- the values of one mode ---
class OfMode(dict[str, Any]):
    """The values of one mode, by their names, which are looked up as in an
    `Intermediates`."""

    # The mode, and what is known of all that came back.
    _known: tuple[str, Known] = "primal", Known()

    @property
    def _values(self) -> Values:
        mode, known = self._known
        values = {name: {mode: value} for name, value in self.items()}
        return {name: {} for name in known.lacking if name not in self.keys()} | values

    @api_boundary
    def __missing__(self, name: Any) -> Any:
        mode, known = self._known
        if (there := find(name, self._values, known)) is not None:
            if mode in there[1]:
                return there[1][mode]
            for lacks, others in known.lacking.items():
                if find(name, {lacks: {}}, known) is not None:
                    raise unknown_mode(mode, others, name, known)
        if others := [m for n, m in known.axes if n == name]:
            raise unknown_mode(mode, others, name, known)
        raise unknown_name(name, self, known)

    def get(self, name: Any, default: Any = None) -> Any:
        return self[name] if name in self else default

    def __contains__(self, name: Any) -> bool:
        mode, known = self._known
        return super().__contains__(name) or is_there(name, self._values, known, mode)

    def __reduce__(self):
        return dict, (dict(self),)


def axes_given(given: Mapping[str, Any], name: str, mode: str) -> OfValue | OfRuns:
    """What is known of the axes of a value that somebody passes on, in what came back
    or in a dict: of the mode of an entry, or of one in `primals`."""
    value = given[name]
    if type(value) is Modes:
        name, known = value._known
    elif type(given) is OfMode:
        mode, known = given._known
    else:
        return ()
    return known.of(name, mode)


# --- in order ---
def _rank(mode: str) -> tuple[Any, ...]:
    order = {"primal": 0, "tangent": 1, "cotangent": 2}
    parts = [order.get(part, 3) for part in mode.split(".")]
    return mode == "count", len(parts), parts, mode


@ft.lru_cache(maxsize=4096)
def _ordered(modes: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(sorted(modes, key=lambda mode: _rank(str(mode))))


def modes_in_order(modes: Mapping[str, Any]) -> dict[str, Any]:
    """The modes of one name: `"primal"` first, `"count"` last."""
    return {mode: modes[mode] for mode in _ordered(tuple(modes))}


# --- as PyTrees ---
# To flatten and unflatten an `Intermediates` is most of what a call of a compiled
# function costs more than one that returns a plain dict. So neither does more than it
# has to.
def _flatten(x: Any) -> tuple[tuple[Any, ...], Keys]:
    keys, held = Keys(x), x._known
    children = tuple(x.values())
    for modes in children:
        # An entry of an `Intermediates` that was put into this one.
        if type(modes) is Modes:
            held = _with_axes_of(x)
            children = tuple(dict(m) if type(m) is Modes else m for m in children)
            break
    own, known = held if type(held) is tuple else (None, held)
    if known.orders:
        names = (own,) if type(x) is Modes else x
        orders = tuple(map(known.orders.get, names))
        keys = Keys((*x, orders)) if any(orders) else keys
    keys.known = held
    return children, keys


def _with_axes_of(x: Any) -> Known:
    """What is known of an `Intermediates` and of the entries of others in it."""
    axes = dict(x._known.axes)
    for name, entry in x.items():
        if type(entry) is Modes:
            own, known = entry._known
            axes |= {(name, mode): known.of(own, mode) for mode in entry}
    return dc.replace(x._known, axes=axes)


def _flatten_with_keys(x: Any) -> tuple[tuple[Any, ...], Keys]:
    children, keys = _flatten(x)
    return tuple(zip(map(jtu.DictKey, keys), children)), keys


def register(cls: Any, unflatten: Callable[[Keys, Any], Any]) -> None:
    """Makes a class of dicts, with an attribute `_known`, a PyTree."""

    def deserialized(text: bytes) -> Keys:
        _, keys = _flatten(cls(dict.fromkeys(json.loads(text))))
        return keys

    jtu.register_pytree_with_keys(cls, _flatten_with_keys, unflatten, _flatten)
    jax.export.register_pytree_node_serialization(
        cls,
        serialized_name=f"eqx_sow.{cls.__name__}",
        serialize_auxdata=lambda keys: json.dumps(
            [k for k in keys if type(k) is not tuple]
        ).encode(),
        deserialize_auxdata=deserialized,
    )


for _cls in (Modes, OfMode):
    register(_cls, lambda k, xs, cls=_cls: made(cls, zip(k, xs), k.known))
