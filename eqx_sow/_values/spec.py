"""Checks of captured values against jaxtyping annotations."""

import collections
import collections.abc as abc
import contextlib
import io
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jaxtyping

from .._errors import SowTypeError
from .._mark.primitive import sow_p
from .._mark.site import Site


def check(
    annotated: Sequence[tuple[Site, Any]],
    spec: Mapping[str, Any],
    intermediates: dict[str, dict[str, Any]],
) -> None:
    """Checks the annotations of sows, each with its equation, against what was sown,
    and those of names in `spec` against what comes back. All of them share one set of
    axis names."""
    if not annotated and not spec:
        return
    for site, eqn in annotated:
        if eqn.primitive is not sow_p:
            raise SowTypeError(
                f"The annotation of {site.said} cannot be checked: it is in a function "
                f"that a `HiPrim` holds. Leave it out, and pass `spec={{{site.name!r}: "
                "...}` to `save_intermediates`."
            )

    def at_sows(values):
        for (site, _), operands in zip(annotated, values):
            value = site.form.with_arrays(operands[len(site.guards) :])
            annotation: Any = site.spec
            _check(site.name, f"as marked at {site.where}", annotation.value, value)

    shapes = [
        [
            jax.ShapeDtypeStruct(site.shape(i, v.aval.shape), v.aval.dtype)
            for i, v in enumerate(eqn.invars[1:])
        ]
        for site, eqn in annotated
    ]

    with jaxtyping.jaxtyped("context"):
        # Nothing is computed: the arrays that are checked are tracers.
        jax.eval_shape(at_sows, shapes)
        for name, modes in intermediates.items():
            if name in spec:
                mode = next(m for m in modes if m != "count")
                mode = "primal" if "primal" in modes else mode
                _check(name, mode, spec[name], modes[mode])


def _check(name: str, what: str, annotation: Any, value: Any) -> None:
    # beartype takes as long to import as the rest of eqx_sow.
    from beartype.roar import BeartypeException

    try:
        fits = _fits(value, annotation)
    except BeartypeException as e:
        # There may be one inside: `list["Float"]`.
        may_be_text = isinstance(annotation, str) or typing.get_args(annotation)
        raise SowTypeError(
            f"`{name}` ({what}): beartype does not understand the annotation "
            f"{annotation!r}. Write a type, such as `Float[Array, 'n']`"
            f"{', not a string' if may_be_text else ''}."
        ) from e
    except Exception as e:  # jaxtyping evaluates what is written in an annotation
        # What jaxtyping says next is about the annotations of a function.
        said, is_symbolic, _ = str(e).partition(" Have you applied the `jaxtyped`")
        instead = (
            " Write a name, a number, or what can be computed from names that are in "
            "annotations checked before: there are no arguments for `{...}`."
        )
        raise SowTypeError(
            f"`{name}` ({what}) cannot be checked against its annotation "
            f"{_name(annotation)}: {type(e).__name__}: {said}"
            f"{instead if is_symbolic else ''}"
        ) from e
    if fits:
        return
    bound = io.StringIO()
    with contextlib.redirect_stdout(bound):
        jaxtyping.print_bindings()
    _, *sizes = bound.getvalue().splitlines()
    sizes = f"The sizes bound so far are: {', '.join(sizes)}." if sizes else ""
    raise SowTypeError(
        f"`{name}` ({what}) does not match its annotation. Expected "
        f"{_name(annotation)}, got {eqx.tree_pformat(value)}. {sizes}".rstrip()
    )


def _name(annotation: Any) -> str:
    if not isinstance(annotation, type):
        return repr(annotation)
    # JAX's arrays have a class of their own, with a name that depends on the version.
    return re.sub(r"(?<=\[)[\w.]+\.(?=\w)", "", annotation.__name__)


def _fits(value: Any, annotation: Any) -> bool:
    """Like `is_bearable`, which looks at one item of a container, drawn at random. This
    looks at all: for `dict[str, Float[Array, "n"]]`, each value has to fit."""
    from beartype.door import is_bearable

    if not is_bearable(value, annotation):
        return False
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is typing.Annotated:
        return _fits(value, args[0])
    if not args or not isinstance(origin, type):
        return True
    if issubclass(origin, tuple) and args[-1] is not Ellipsis:
        return all(map(_fits, value, args))
    if issubclass(origin, abc.Mapping) and origin is not collections.Counter:
        # Of a mapping with one parameter, or three, we do not know what they mean.
        key, item = args if len(args) == 2 else (Any, Any)
        return all(_fits(k, key) and _fits(v, item) for k, v in value.items())
    if issubclass(origin, abc.Collection):
        return all(_fits(v, args[0]) for v in value)
    return True
