"""`sow`, and the layer `Sow`."""

import typing
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.core
import jax.tree_util as jtu
import numpy as np

from .._errors import SowError, SowTypeError
from .._frames import api_boundary, SowCall, user_line
from .._names import has_traced_number, join
from .listening import Listening, listening
from .primitive import NO_EDGE, sow_p
from .site import Fixed, Label, Site
from .static import Const, Form, holder_of_traced, OPERAND, take_apart


_T = TypeVar("_T")


@api_boundary
def sow(
    value: _T, name: str, *, tag: Hashable = "intermediates", spec: Any = None
) -> _T:
    """Marks a value: gives it a name, and returns it unchanged.

    `sow` is free: outside [`eqx_sow.save_intermediates`][], [`eqx_sow.plant`][] and
    [`eqx_sow.tap`][] it adds nothing to the program.

    **Arguments:**

    - `value`: any PyTree. Its JAX and NumPy arrays are captured, under every
        transformation; all other leaves come back as they are. In the program itself,
        NumPy arrays stay NumPy arrays. Objects that hold arrays must be PyTrees.
    - `name`: a name for the value. It marks one place in a program: for a function that
        you call twice, use [`eqx_sow.scope`][] or the option `reduce`.
    - `tag`: any hashable object. `save_intermediates(..., tag=...)` captures the marks
        with one tag.
    - `spec`: a jaxtyping annotation (or any other that beartype understands) of the
        value as the code here sees it. It is checked when the value is captured.

    **Returns:**

    `value`, with its structure, shapes and dtypes. [`eqx_sow.save_intermediates`][]
    says what shape the captured value has.

    **Raises:**

    `TypeError` if `name` is not a string. While capturing, also `TypeError` if `tag` is
    not hashable, [`eqx_sow.SowError`][] if `name` contains a traced number, or if a
    leaf is traced and not an array, such as a `jax.Ref`, and [`eqx_sow.SowTypeError`][]
    if the value does not match `spec`, or contains an object that is not a PyTree but
    holds traced arrays.

    !!! example

        ```python
        import eqx_sow
        import jax.numpy as jnp

        def f(x):
            h = eqx_sow.sow(jnp.tanh(x), "h")
            return h.sum()

        out, intermediates = eqx_sow.save_intermediates(f)(jnp.arange(3.0))
        intermediates["h"]["primal"]  # the same as jnp.tanh(jnp.arange(3.0))
        ```
    """
    # Always: with its arguments swapped, it would return a string.
    if type(name) is not str:
        _check_name("sow(value, name)", name, '`eqx_sow.sow(value, "some_name")`')
    here = listening.value
    return value if here is None else _sow(value, name, tag, spec, here)


def _sow(
    value: Any, name: str, tag: Hashable, spec: Any, here: Listening, layer: Any = None
) -> Any:
    """`layer` is the `Sow` that is called, if one is."""
    check_tag(f"sow(..., {name!r}, tag=...)", tag)
    name = join(here.scope, name)
    if has_traced_number(name):
        raise SowError(
            f"`sow(value, {name!r})`: a name is fixed when JAX traces the program, so "
            "it cannot contain a traced number. In a loop, leave out the number: each "
            "iteration is an entry of the value, and `names='h/3'` selects one."
        )
    if spec is not None:
        check_spec("sow(..., spec=...)", spec)
        spec = Const(spec)
    return bind_sow(value, (Label(name, tag),), origin=SowCall(layer), spec=spec)


_ARRAY = Form(Const(jtu.tree_structure(0)), (OPERAND,))


def bind_sow(
    value: Any,
    labels: tuple[Label, ...],
    edge: Any = NO_EDGE,
    origin: SowCall | None = None,
    **fields,
) -> Any:
    """Binds the primitive to the array leaves of a value. Names are whole names.
    `fields` are more fields of the `Site`."""
    if isinstance(value, jax.Array):  # as nearly all values are
        arrays, form, fixed, seen = [value], _ARRAY, (), _ARRAY
        where = user_line()
    else:
        arrays, form = take_apart(value)
        seen = _without_holders(value, form, labels)
        where = user_line()
        replaced = (listening.value or Listening()).replaced
        every = [Fixed(i, Const(x), (labels, where, i)) for i, x in enumerate(arrays)]
        fixed = tuple(
            x
            for x in every
            if isinstance(x.array.value, np.ndarray | np.generic)
            and x.mark not in replaced
        )
    none = ((),) * len(arrays)
    site = Site(
        labels,
        seen,
        where=where,
        origin=origin or SowCall(),
        varies=none,
        permutations=none,
        fixed=fixed,
        **fields,
    )
    _, *out = sow_p.bind(edge, *arrays, site=site)
    if form is _ARRAY:
        return out[0]
    for x in fixed:
        out[x.i] = x.array.value
    return form.with_arrays(out)


def _without_holders(value: Any, form: Form, labels: Sequence[Label]) -> Form:
    """The form of a value as others see it: with a `Holder` in the place of an object
    that holds traced arrays. It is an error where somebody wants the value."""
    changed = {}
    for i, x in enumerate(form.leaves):
        if x is OPERAND:
            continue
        if isinstance(x.value, jax.core.Tracer):
            name = labels[0].name
            what = "`capture=`" if name is None else f"`sow(..., {name!r})`"
            raise SowError(
                f"{what} cannot mark a leaf of type "
                f"{jax.typeof(x.value)}: only arrays can be captured. Mark the value "
                "that it holds."
            )
        if (found := holder_of_traced(value, i, x.value)) is not None:
            changed[i] = Const(found)
    if not changed:
        return form
    leaves = [changed.get(i, x) for i, x in enumerate(form.leaves)]
    return form._replace(leaves=tuple(leaves))


class UnnamedSowError(Exception):
    """The program has to be traced again, with a note of the calls of modules: an
    unnamed `Sow` is called by its path in the model."""


class Sow(eqx.Module):
    """Marks its input, as [`eqx_sow.sow`][] does: a layer for `eqx.nn.Sequential`.

    !!! example

        ```python
        import equinox as eqx
        import eqx_sow
        import jax
        import jax.numpy as jnp

        k1, k2 = jax.random.split(jax.random.key(0))
        model = eqx.nn.Sequential([
            eqx.nn.Linear(2, 8, key=k1),
            eqx_sow.Sow("hidden"),
            eqx.nn.Linear(8, 1, key=k2),
        ])
        _, intermediates = eqx_sow.save_intermediates(model)(jnp.ones(2))
        intermediates["hidden"]["primal"].shape  # (8,)
        ```
    """

    name: str | None = eqx.field(static=True)
    spec: Any = eqx.field(static=True)
    tag: Hashable = eqx.field(static=True)

    @api_boundary
    def __init__(
        self,
        name: str | None = None,
        spec: Any = None,
        *,
        tag: Hashable = "intermediates",
    ):
        """**Arguments:**

        - `name`: a name for the value. Without one, it is the layer's path in the
            model, and a layer that runs several times gives a tuple.
        - `spec`: a jaxtyping annotation for the value, as in [`eqx_sow.sow`][].
        - `tag`: as in [`eqx_sow.sow`][].

        **Raises:**

        `TypeError` if `name` is neither a string nor `None`, or `tag` is not hashable.
        """
        if name is not None:
            _check_name("Sow(name)", name, '`eqx_sow.Sow("some_name")`')
        first = "" if name is None else f"{name!r}, "
        self.name = name
        self.spec = spec
        check_spec("Sow(spec=...)", spec)
        self.tag = check_tag(f"Sow(..., {first}tag=...)", tag)

    @api_boundary
    def __call__(self, x: _T, *, key: Any = None) -> _T:
        """Marks `x` (any PyTree) and returns it.

        **Arguments:**

        - `x`: the value.
        - `key`: ignored; `eqx.nn.Sequential` passes it.

        **Returns:**

        `x`.

        **Raises:**

        As [`eqx_sow.sow`][].
        """
        del key
        here = listening.value
        if here is None:
            return x
        if self.name is None:
            # Where calls of modules are noted, the value is marked there. At a depth of
            # 0 no transformation traces this: `_walk/sows.py` looks once more into a
            # function that an equation holds.
            if here.depth and not here.captures:
                raise UnnamedSowError
            return x
        return _sow(x, self.name, self.tag, self.spec, here, layer=self)


def _check_name(call: str, name: Any, instead: str) -> None:
    if not isinstance(name, str):
        got = eqx.tree_pformat(name)
        raise TypeError(
            f"`eqx_sow.{call}` takes a string as name, not {got}. Write {instead}."
        )


def check_tag(option: str, tag: Any) -> Hashable:
    try:
        hash(tag)
    except TypeError as e:
        raise TypeError(f"`{option}` takes a hashable tag, not {tag!r}.") from e
    return tag


def check_spec(option: str, annotation: Any) -> None:
    """Raises if a part of an annotation would not be checked. beartype looks at the
    first argument of `Annotated`, and at its own validators among the others."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is not typing.Annotated:
        for arg in args:
            check_spec(option, arg)
        return
    what, *others = args
    for x in others:
        if not type(x).__module__.startswith("beartype."):
            raise SowTypeError(
                f"`{option}`: {annotation!r} holds {x!r}, which beartype ignores, so "
                f"only `{getattr(what, '__name__', what)}` would be checked. Write "
                "what it can check, such as `Float[Array, 'batch dim']`. Of an object "
                "with named axes, mark the array that it holds."
            )
    check_spec(option, what)
