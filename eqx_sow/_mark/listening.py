"""The context in which a program is traced: whether `sow` marks, and what is around;
and `scope`, with which a user says more of that."""

import contextlib
import inspect
import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.core

from .._errors import SowError
from .._names import join


Fn = TypeVar("Fn", bound=Callable)


class Capture(NamedTuple):
    """The calls that a transformation wants a note of, from its options `capture`,
    `methods`, `inputs`, `calls` and `scope`."""

    # How many transformations there are around the program, this one included.
    depth: int
    tag: Hashable
    methods: tuple[str, ...] = ()
    # Of modules of these classes, or of all, of which a predicate will choose (`None`).
    classes: tuple[type, ...] | None = None
    functions: tuple[Any, ...] = ()
    # What is marked beside the output: `"inputs"`, `"call"`.
    kinds: frozenset[str] = frozenset()
    scope: bool = False


class Listening(NamedTuple):
    """What marks have to know of the transformations that trace the program."""

    # How many loops are around whatever is being vmapped right now.
    n_loops: int = 0
    # The user's scopes, as `"outer/inner"`.
    scope: str = ""
    # If it is not `None`, a mark does nothing but report its `Site` to it.
    report: Callable[[Any], None] | None = None
    # The calls of modules to take note of, for all the transformations.
    captures: tuple[Capture, ...] = ()
    # How many transformations there are, one within the other.
    depth: int = 0
    # Whether JAX makes the tangents of a `jax.checkpoint` that it will transpose.
    is_vjp: bool = False
    # Whether, of a value, only those leaves are differentiated that the program itself
    # differentiates, instead of all. This is a second try, after an error of JAX's.
    leafwise: bool = False
    # The `Fixed.mark`s of NumPy arrays in whose place something else is planted. The
    # program goes on with JAX arrays there.
    replaced: frozenset[Any] = frozenset()
    # Whether JAX moves something out of a scan, see `_walk/jax_rules.py`.
    moving: bool = False
    # Whether JAX splits the body of a while loop, which can keep nothing.
    in_while: bool = False


# Not `None` while a program is traced in order to see or change its marks. It is
# part of the key of every cache of JAX's, so a jitted function is traced once for each
# value.
listening = jax.make_user_context(None)


class Around(NamedTuple):
    """What is between a vmap and the equation that it batches now: how many loops, and
    which conds and loops that run for some lanes only, as `Site.guards` has them."""

    n_loops: int = 0
    conds: tuple[Any, ...] = ()


def around(axis_data: Any) -> Around:
    # Some rules of JAX's, as that of `shard_map`, make other axis data.
    here = listening.value or Listening()
    return getattr(axis_data, "around", Around(here.n_loops))


def scope(name: str) -> "_Scope":
    """Prefixes every name inside with `name/`. Use it to call one function twice.

    A context manager and a decorator, like `jax.named_scope`. Outside
    [`eqx_sow.save_intermediates`][], [`eqx_sow.plant`][] and [`eqx_sow.tap`][] it does
    nothing, and adds nothing to the program.

    Scopes can be nested. The full name of a mark is the path of its module (with
    `scope=True`), then the scopes from the outside in, then its own name. A module that
    `capture=` selects has its path as its own name, so the scopes come before the path.

    A scope applies to everything that is called within it, including compiled
    functions, loops and derivative rules, but not to the names that a
    `save_intermediates`, `plant` or `tap` within it takes and returns.

    **Arguments:**

    - `name`: a string. It may contain slashes.

    **Returns:**

    A context manager, which can also decorate a function, and can be entered any number
    of times.

    **Raises:**

    `TypeError` if `name` is not a string, or if it decorates a class, a generator or a
    coroutine. `ValueError` if `name` is empty. While capturing, [`eqx_sow.SowError`][]
    if scopes are not left in the reverse of the order in which they were entered, as in
    generators that take turns.

    !!! example

        ```python
        import eqx_sow
        import jax.numpy as jnp

        def block(x):
            return eqx_sow.sow(jnp.tanh(x), "h")

        @eqx_sow.scope("last")
        def head(x):
            return block(x).sum()

        def f(x):
            with eqx_sow.scope("first"):
                x = block(x)
            return head(x)

        _, intermediates = eqx_sow.save_intermediates(f)(jnp.ones(3))
        list(intermediates)  # ["first/h", "last/h"]
        ```
    """
    if not isinstance(name, str):
        raise TypeError(
            f"`eqx_sow.scope(name)` takes a string, not {name!r}. Write "
            '`with eqx_sow.scope("some_name"):` or `@eqx_sow.scope("some_name")`.'
        )
    if not name:
        raise ValueError("`eqx_sow.scope(name)` takes a non-empty name.")
    return _Scope(name)


# Each thread has an object of its own, since each has a context of its own.
class _Scope(threading.local, contextlib.ContextDecorator):
    def __init__(self, name: str):
        self._name = name
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        inside = here = listening.value
        context = contextlib.nullcontext()
        if here is not None:
            inside = here._replace(scope=join(here.scope, self._name))
            context = listening(inside)
        context.__enter__()
        self._entered.append((inside, context))

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        inside, context = self._entered.pop()
        now = listening.value
        if now is inside:
            context.__exit__(kind, error, traceback)
        elif kind is None and None not in (inside, now):
            raise SowError(
                f"`eqx_sow.scope({self._name!r})`: scopes were not left in the reverse "
                "of the order in which they were entered, as when a generator is "
                "suspended within a scope. So names may have the wrong scope. Leave "
                "the scope before each `yield` or `await`."
            )

    def __reduce__(self):
        # cloudpickle writes functions of a notebook with all that they close over.
        return scope, (self._name,)

    def __call__(self, fn: Fn) -> Fn:
        suspended = (
            inspect.isgeneratorfunction,
            inspect.iscoroutinefunction,
            inspect.isasyncgenfunction,
        )
        kind: Any = fn
        if inspect.isclass(fn) or not callable(fn) or any(s(kind) for s in suspended):
            raise TypeError(
                f"`@eqx_sow.scope({self._name!r})` decorates a function that returns "
                f"its result, not {fn!r}. Decorate a method of a class, such as "
                "`__call__`; in a generator, write `with eqx_sow.scope(...):` around "
                "the calls."
            )
        return super().__call__(fn)
