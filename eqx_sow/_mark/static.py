"""How a PyTree is split into its arrays, which are operands of an equation, and all
else, which is part of a parameter. JAX compares parameters, and keeps programs by
them. So an object that is no PyTree, and holds a traced array, must not be in one."""

import contextlib
import contextvars
import dataclasses as dc
import inspect
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np


class Const:
    """A static leaf, or a treedef, compared by `same`."""

    __slots__ = ("value", "_hash")

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self):
        if not hasattr(self, "_hash"):
            is_structure = type(self.value) is _TreeDef
            found = (_hash_structure if is_structure else _hash)(self.value)
            self._hash = id(self.value) if found is None else found
        return self._hash

    def __eq__(self, other):
        return type(other) is Const and same(self.value, other.value)

    def __repr__(self):
        return repr(self.value)


def same(a: Any, b: Any) -> bool:
    """Whether two static objects are equal, so that no program could tell them apart:
    `1`, `1.0` and `True` differ, and so do `0.0` and `-0.0`.

    No `==` of a user's class is called: it may return anything, such as an array of
    booleans. Objects of such a class are equal if all that they hold is."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, _TreeDef):
        return _same_structure(a, b)
    if isinstance(a, float | complex):
        return repr(a) == repr(b)
    if isinstance(a, np.ndarray):
        return _identity(a) == _identity(b)
    if isinstance(a, dict):
        return same([*a.items()], [*b.items()])
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    equality = next(c for c in type(a).__mro__ if "__eq__" in vars(c))
    if equality is object:
        return False
    try:
        if _is_library(equality):
            return bool(a == b)
        return _hash(a) == _hash(b) and same(state_of(a), state_of(b))
    except Exception:  # as JAX's `__bool__`, or a cycle
        return False


_TreeDef = type(jtu.tree_structure(0))


def _same_structure(a: Any, b: Any) -> bool:
    if (a.num_nodes, a.num_leaves) != (b.num_nodes, b.num_leaves):
        return False
    try:
        # At C++ speed. JAX compares what is static in a node, if it is not the very
        # same object.
        if a == b:
            return True
    except Exception:  # as above
        pass
    node, other = a.node_data(), b.node_data()
    if node is None or other is None:  # a leaf, or `None`
        return node is other and a.num_leaves == b.num_leaves
    mine, others = a.children(), b.children()
    return (
        node[0] is other[0]
        and same(node[1], other[1])
        and len(mine) == len(others)
        and all(map(_same_structure, mine, others))
    )


def _hash(x: Any) -> Any:
    try:
        return hash((type(x), repr(x) if isinstance(x, float | complex) else x))
    except Exception:  # A user's `__hash__` may raise anything.
        return None


def _hash_structure(treedef: Any) -> int:
    """A hash of what a treedef holds as well. JAX's is that of the shape alone: to find
    what was compiled for one function would be to compare it with all others."""
    found: list[Any] = [hash(treedef)]

    def node(_, held):
        try:
            found.append(hash(_with_hash(held)))
        except Exception:  # A user's `__hash__` may raise anything.
            found.extend(map(_hash, held) if type(held) is tuple else [type(held)])

    # It is given numbers in place of leaves.
    treedef.walk(node, type, range(treedef.num_leaves))
    return hash((*found,))


def _with_hash(held: Any) -> Any:
    """Without what Equinox says first of a function that it wraps, names and a dict of
    annotations, and without the signature, whose hash takes as long as all the rest. It
    is asked in each call: to try, and to catch what is raised, takes longer."""
    if type(held) is list:  # the keys of a dict
        return tuple(held)
    if type(held) is tuple and held and type(held[0]) is tuple:
        names, *rest = held
        if names and type(names[-1]) is dict:
            return tuple([x for x in rest if type(x) is not inspect.Signature])
    return held


def _is_library(cls: type) -> bool:
    """Whether `==` of this class is known to tell whether two objects are equal."""
    root = cls.__module__.split(".")[0]
    is_known = root in sys.stdlib_module_names or root in _LIBRARIES
    return is_known and not dc.is_dataclass(cls)


_LIBRARIES = "jax", "jaxlib", "numpy", "ml_dtypes", "equinox", "jaxtyping", "eqx_sow"


def state_of(x: Any) -> dict[str, Any]:
    """The attributes that an object holds, without calling a property of it."""
    held = {}
    for name, slot in _slots(type(x)):
        with contextlib.suppress(AttributeError):  # it is empty
            held[name] = slot.__get__(x)
    with contextlib.suppress(AttributeError, TypeError):
        held |= object.__getattribute__(x, "__dict__")
    return held


def _slots(cls: type) -> list[tuple[str, Any]]:
    if cls not in _slots_of:
        _slots_of[cls] = [
            (name, x)
            for c in cls.__mro__
            for name, x in vars(c).items()
            # Python's own functions have some, such as `__globals__`.
            if type(x) is _Slot and not name.startswith("__")
        ]
    return _slots_of[cls]


_slots_of: weakref.WeakKeyDictionary[type, list] = weakref.WeakKeyDictionary()


class _Slotted:
    __slots__ = ("slot",)


_Slot = type(vars(_Slotted)["slot"])


class SameParts:
    """A PyTree, equal to another one if the arrays are the very same objects, and all
    other leaves are equal. For options that users may write anew in each call, such as
    `transform={"h": jnp.mean}`: what is compiled is found again. To compare arrays by
    their numbers would compute, and add equations to a program that is being traced.

    A NumPy array is compared by its numbers: a user may change them between two calls.
    """

    __slots__ = ("value", "_form", "_hash")

    def __init__(self, value: Any):
        arrays, form = take_apart(value)
        self.value = value
        if any(isinstance(x, np.ndarray) for x in arrays):
            arrays = [x.copy() if isinstance(x, np.ndarray) else x for x in arrays]
            self.value = form.with_arrays(arrays)
        self._form = (form, *map(_identity, arrays))
        self._hash = hash(self._form)

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        return type(other) is SameParts and self._form == other._form


def _identity(x: Any) -> Hashable:
    if isinstance(x, np.ndarray):
        return x.tobytes(), x.dtype, x.shape
    return id(x)


@dc.dataclass(frozen=True)
class NoTangent:
    """A leaf, in a derivative of a mark, that was not differentiated: an integer, a
    key, a NumPy array, or what JAX refuses to differentiate. There is no operand for
    it.

    Its tangent is zero. Its cotangent is not known: JAX never computes one. Zeros of
    this `dtype` stand in its place.
    """

    shape: tuple[int, ...]
    dtype: Any


# For what is being traced in this thread: the inputs, by their ids, and the arrays that
# these stand for.
_inputs: contextvars.ContextVar[Mapping[int, tuple[Any, Any]]]
_inputs = contextvars.ContextVar("inputs", default=types.MappingProxyType({}))


@contextlib.contextmanager
def numbers_known(inputs: Sequence[Any], arrays: Sequence[Any]):
    """As long as this lasts, the numbers in these traced arrays are known, if those in
    the arrays are that they stand for. In `save_intermediates(plant(fn, values))` the
    planted values are inputs of what is traced."""
    new = {id(x): (x, y) for x, y in zip(inputs, arrays) if x is not y}
    before = _inputs.set({**_inputs.get(), **new})
    try:
        yield
    finally:
        _inputs.reset(before)


def numbers_in(x: Any) -> Any:
    """The array with the numbers in `x`, if they can be had here and now, or `None`."""
    inputs = _inputs.get()
    while id(x) in inputs:
        _, x = inputs[id(x)]
    is_known = not isinstance(x, jax.Array) or (
        not isinstance(x, jax.core.Tracer) and x.is_fully_addressable
    )
    return np.asarray(x) if is_known else None


# A leaf that is an operand of the equation.
OPERAND = object()


def is_operand(x: Any) -> bool:
    """Whether a leaf is an array that JAX can hold: NumPy has arrays of strings. Or a
    number with a dtype, which JAX makes of a Python number: the rule of a
    `jax.custom_vjp` function may be called with one."""
    if isinstance(x, jax.Array):
        return True
    # An attribute of any other object may be a property of a user's.
    if not (eqx.is_array(x) or isinstance(x, int | float | complex)):
        return False
    dtype = getattr(x, "dtype", np.dtype(object))
    return jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)


@jtu.register_static
class Form(NamedTuple):
    """A PyTree without its arrays. For `(x, 2)` with an array `x`, `leaves` are
    `(OPERAND, Const(2))`. In a derivative, some may be `NoTangent`s. In a PyTree, as
    what a jitted function returns, a form is static."""

    treedef: Const
    leaves: tuple[Any, ...]

    @property
    def n_operands(self) -> int:
        return self.leaves.count(OPERAND)

    def with_arrays(self, arrays: Sequence[Any], lead: Sequence[int] = ()) -> Any:
        """The PyTree with these arrays. Leaves that were not differentiated are zeros,
        with the axes `lead` before their own."""
        operand = iter(arrays)
        leaves = [
            next(operand)
            if x is OPERAND
            else np.zeros((*lead, *x.shape), x.dtype)
            if isinstance(x, NoTangent)
            else x.value
            for x in self.leaves
        ]
        return jtu.tree_unflatten(self.treedef.value, leaves)


def take_apart(
    tree: Any, is_operand: Callable[[Any], bool] = is_operand
) -> tuple[list[Any], Form]:
    """The arrays of a PyTree, and what else it is."""
    leaves, treedef = jtu.tree_flatten(tree)
    found = list(map(is_operand, leaves))
    static = tuple([OPERAND if d else Const(x) for d, x in zip(found, leaves)])
    return [x for d, x in zip(found, leaves) if d], Form(Const(treedef), static)


# --- objects that are not PyTrees ---
# What holds nothing that is traced, or nothing that anybody put there.
_PLAIN = (
    *(str, bytes, int, float, complex, type, types.NoneType, types.ModuleType),
    *(types.CodeType, np.dtype, np.generic, np.ufunc, inspect.Signature),
    *(jax.Array, _TreeDef),
)
_SEQUENCES: tuple[Any, ...] = list, tuple, set, frozenset, deque
# So many objects are looked at, in one: enough for all that a person would write.
_MOST = 2000


class Holder(NamedTuple):
    """What a `Site` knows of a leaf that is not a PyTree and holds a traced array: the
    leaf itself must not outlive the trace."""

    # What the leaf is, where it is in the value, and where in it the array is.
    what: str
    leaf: str
    where: str


def holder_of_traced(value: Any, i: int, leaf: Any) -> Holder | None:
    """What to say of `leaf`, which is leaf `i` of a value and no array, if it holds a
    traced one."""
    where = _where_traced(leaf)
    if where is None:
        return None
    path, _ = jtu.tree_leaves_with_path(value)[i]
    what = f"an object of the class `{type(leaf).__qualname__}`"
    if type(leaf) in (types.FunctionType, types.MethodType):
        what = f"the function `{leaf.__qualname__}`"
    return Holder(what, jtu.keystr(path), where)


def _where_traced(x: Any) -> str | None:
    """Where in an object there is a traced array, such as `.parts[0]['h']`, or `None`.
    No property of it is called, and no `==`."""
    if issubclass(type(x), _PLAIN):
        return None
    todo, seen = deque([("", x)]), {id(x): x}
    while todo:
        where, outer = todo.popleft()
        for key, y in _inside(outer):
            if issubclass(type(y), jax.core.Tracer):
                return where + key
            if issubclass(type(y), _PLAIN) or id(y) in seen or len(seen) == _MOST:
                continue
            # It is kept: no other object has its id.
            seen[id(y)] = y
            todo.append((where + key, y))
    return None


def _inside(x: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, and how to get there."""
    kind = type(x)
    if issubclass(kind, dict):
        for key, y in dict.items(x):
            # The `repr` of any other object may do anything.
            yield f"[{key!r}]" if type(key) in (str, int) else "[...]", y
    for base in _SEQUENCES:
        if issubclass(kind, base):
            yield from ((f"[{i}]", y) for i, y in enumerate(base.__iter__(x)))
    if kind is np.ndarray and x.dtype == object:
        yield from ((f".flat[{i}]", y) for i, y in enumerate(x.flat))
    if kind in (types.MethodType, types.BuiltinMethodType):
        yield ".__self__", x.__self__
    if kind is types.MethodType:
        yield ".__func__", x.__func__
    if kind is types.FunctionType:
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or ()):
            with contextlib.suppress(ValueError):  # it is empty
                yield f".__closure__[{name!r}]", cell.cell_contents
        yield ".__defaults__", x.__defaults__
        yield ".__kwdefaults__", x.__kwdefaults__
    yield from ((f".{name}", y) for name, y in state_of(x).items())
