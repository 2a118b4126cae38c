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
import dataclasses as dc
from typing import Any, NamedTuple

import jax


# Where something is in a tree: the keys, as strings.
Path = tuple[str, ...]


@dc.dataclass(eq=False, repr=False)
class NotedCall:
    """A method of a module that is called, or a function. No two calls are equal.

    `_note` in `noting.py` makes it, and `_modules/naming.py` finds the name for it.
    """

    # The class of the module, or the function.
    cls: Any
    method: str = "__call__"
    # What `checkpoint_name(x, name)` calls its value, which other functions do not.
    value_name: str | None = None
    # Where some of the arrays are in the module: those that are the operands of its
    # edge.
    leaves: tuple[Path, ...] = ()
    # The shapes that they have there.
    shapes: tuple[tuple[Any, ...], ...] = ()
    # The module without its arrays, a `Form`.
    form: Any = None
    # What holds the module, and where it is in there: a module whose method is running,
    # as the call of that; or the arguments of a transformation, as its depth.
    holder: "tuple[NotedCall | int, Path] | None" = None
    # The module with shapes in the place of arrays, if a user's predicate needs it.
    outline: Any = None
    # The module itself, if it has no arrays, which would say where it comes from.
    module: Any = None

    def __repr__(self):
        return f"{self.cls.__name__}.{self.method}"

    @property
    def is_function(self) -> bool:
        return not isinstance(self.cls, type)

    def running(self) -> contextlib.AbstractContextManager[Any]:
        name = _Running(self.cls.__name__)
        name.call = self
        return jax.named_scope(name)


class _Running(str):
    """The name of a scope. It knows of which call."""

    call: NotedCall


def calls_around(eqn: Any) -> tuple[NotedCall, ...]:
    """The calls in which an equation was made, from outside in, as far as they began in
    the same jaxpr."""
    names = [getattr(x, "name", None) for x in eqn.source_info.name_stack.stack]
    return tuple([x.call for x in names if isinstance(x, _Running)])


class Call(NamedTuple):
    """Holds what went into a call of a module or function, and what came out.

    With `calls=True`, [`eqx_sow.save_intermediates`][], [`eqx_sow.plant`][] and
    [`eqx_sow.tap`][] mark one for each captured call, after the call has run, under the
    name `layers/0.call`.

    **Attributes:**

    - `args`: the positional arguments, a tuple, as they were before the call.
    - `kwargs`: the keyword arguments, a dict.
    - `out`: the output.

    The program continues with `out` alone. So if you plant a `Call`, its `args` change
    nothing, and the cotangents of `args` and `kwargs` are zeros: for the gradient with
    respect to the arguments, capture `layers/0.inputs` with `inputs=True`.

    !!! example

        ```python
        import equinox as eqx
        import eqx_sow
        import jax
        import jax.numpy as jnp

        model = eqx.nn.MLP(4, 4, 4, 2, key=jax.random.key(0))
        x = jnp.ones(4)

        # How much longer is the output of each layer than its input?
        def growth(call):
            return jnp.linalg.norm(call.out) / jnp.linalg.norm(call.args[0])

        _, intermediates = eqx_sow.save_intermediates(
            model,
            capture=eqx.nn.Linear,
            calls=True,
            names="**/*.call",
            transform=growth,
        )(x)
        intermediates["layers/0.call"]["primal"].shape  # ()

        # Skip a layer:
        skip = {"layers/1.call": lambda call: call._replace(out=call.args[0])}
        eqx_sow.plant(model, skip, capture=True, calls=True)(x)
        ```
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


Call.__module__ = "eqx_sow"


class Note(NamedTuple):
    """What a mark of a captured call says of that, in its `Site`.

    `what` of it: a tuple of one of `Capture.kinds`, or `()` for the output. `scope`:
    the user's scopes around the call. `is_sow`: whether it is an unnamed `Sow`, which
    cannot be selected.
    """

    call: NotedCall
    what: tuple[str, ...] = ()
    scope: str = ""
    is_sow: bool = False

    @property
    def form_said(self) -> str:
        """What messages say of the form of such values, if it is not the user's."""
        return _FORMS.get(self.what, "")

    def said(self, name: str, where: str) -> str:
        """What messages say of the mark, given its name, if it has one yet, and the
        line of the call."""
        (what,) = self.what or ("output",)
        cls = self.call.cls.__name__
        article = "the function" if self.call.is_function else "a"
        article += "n" * (article == "a" and cls[0] in "AEIOU")
        callee, name = f"{article} `{cls}`", name.removesuffix(f".{what}")
        if self.is_sow:
            at = f" at `{name}`" if name else ""
            return f"the layer `Sow()`{at} (called at {where})"
        if not name:
            return f"the {what} of {callee} (called at {where})"
        return f"the {what} of `{name}` ({callee}, called at {where})"


_FORMS: dict[tuple[str, ...], str] = {
    ("inputs",): " Inputs are a pair `(args, kwargs)`, also of a single argument.",
    ("call",): " A call is a `Call(args, kwargs, out)`.",
}
