"""Calls of modules: what is known of one while the program is traced.

A call is an object of its own. It is a parameter of the equation whose operands are
the arrays of the module, `edge_p.bind(*arrays, call=call)`, and it is on the name
stack of every equation that is made while the call runs:

    e = edge[call=c] w b        # c: a `Linear` is called
    y = dot_general w x         # name stack: c
    _, z = sow[note=c] e y      # what it returned

JAX keeps the name stack through all its transformations, and that of an equation inside
a `jit` begins anew there. So a function that JAX traced once, and that is called by two
modules, is found to run in the one and then in the other.
"""

import contextlib
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax

from .static import Const


# Where something is in a tree, as strings.
Path = tuple[str, ...]


class Call:
    """A method of a module that is called.

    `leaves` are the paths of some of the arrays in the module: those that are the
    operands of its edge. A path is a tuple of keys, as strings. `within` is the module
    whose method is running, and where this one is in there, if it is. `outline` has
    shapes in the place of arrays; it is for the predicates that users write, and is
    left out if there are none.

    No array leads to a module without arrays. Of such a one, `given` has its place
    among the arguments of each transformation around, by the depth of that; `form` is
    what it is compared by, and `identity` is an object of its own.
    """

    def __init__(
        self,
        cls: Any,
        method: str,
        leaves: tuple[Path, ...],
        within: tuple["Call", Path] | None,
        outline: Any,
    ):
        self.cls = cls
        self.method = method
        self.leaves = leaves
        self.within = within
        self.outline = outline
        self.given: dict[int, Path] = {}
        self.form: Const | None = None
        self.identity: Any = None

    def __repr__(self):
        return f"{self.cls.__name__}.{self.method}"

    @property
    def is_function(self) -> bool:
        """Whether it is the call of a function, which is then `cls`."""
        return not isinstance(self.cls, type)

    def running(self) -> contextlib.AbstractContextManager[Any]:
        return jax.named_scope(_Running(self))


class _Running(str):
    """The name of a scope. It knows of which call."""

    call: Call

    def __new__(cls, call: Call):
        new = super().__new__(cls, call.cls.__name__)
        new.call = call
        return new


def calls_around(eqn: Any) -> tuple[Call, ...]:
    """The calls in which an equation was made, from outside in, as far as they began in
    the same jaxpr."""
    names = [getattr(x, "name", None) for x in eqn.source_info.name_stack.stack]
    return tuple(x.call for x in names if isinstance(x, _Running))


def same_calls(eqn: Any) -> contextlib.AbstractContextManager[Any]:
    """What is made in the place of an equation runs in the calls around it."""
    stack = contextlib.ExitStack()
    for call in calls_around(eqn):
        stack.enter_context(call.running())
    return stack


class Note(NamedTuple):
    """Of a sow that is a captured call: the call, what of it (`inputs`, or nothing for
    the output), and the user's scopes around it. For an unnamed `Sow` the `tag` is its
    own."""

    call: Call
    what: tuple[str, ...] = ()
    scope: str = ""
    tag: Hashable = None
