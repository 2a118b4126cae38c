"""What goes wrong with a mark."""

import contextlib
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import equinox as eqx


class SowError(Exception):
    """Base class of all errors of eqx_sow."""


class DuplicateSowError(SowError, ValueError):
    """A name of `sow` or `Sow` marks several values in straight-line code, and no
    reducer says how to combine them. Or one value is planted under a captured name that
    runs several times."""


class UnknownSowError(SowError, ValueError):
    """A name, a pattern or a filter selects nothing in this program."""


class UnknownKeyError(UnknownSowError, KeyError):
    """A name or a mode is not in what `save_intermediates` returned. It is a `KeyError`
    as well, like that of any other dict."""

    # That of a `KeyError` shows the message in quotes.
    __str__ = Exception.__str__


class SowTypeError(SowError, TypeError):
    """A marked value does not match its jaxtyping annotation, or contains an object
    that is not a PyTree but holds traced arrays, which JAX does not see."""


class UnsupportedPrimitiveError(SowError, NotImplementedError):
    """A marked value cannot be captured where it is: in a primitive without a rule, in
    a linear solve, in the condition of a `while_loop`, or, with a reducer, in a
    `shard_map`."""


for _error in (SowError, *SowError.__subclasses__()):
    _error.__module__ = "eqx_sow"


@contextlib.contextmanager
def calling(
    what: str, site: Any, hint: str = "", no_name: str = ""
) -> Iterator[Callable[[Callable], Callable]]:
    """Errors of a user's function say for which mark it was called: that of a `Site`.
    They also say what with, if what it yields is applied to the function: `hint` goes
    on with that sentence. `no_name` says why the function does not know the names of
    all vmaps around the mark."""
    seen = []

    def watched(fn):
        def call(value, *more):
            seen[:] = [value]
            return fn(value, *more)

        return call

    try:
        yield watched
    except Exception as e:  # whatever it raises, which goes on its way
        # JAX would say: "unbound axis name: batch. [...] call psum under `shard_map`".
        names = [a.name for a in site.axes if f"axis name: {a.name}." in str(e)]
        if no_name and names and isinstance(e, NameError):
            raise SowError(
                f"The {what}, for {site.said}, uses the axis name {names[0]!r}, which "
                f"is not known there. {no_name}"
            ) from e
        if site.where not in str(e):
            got = (
                f" It was called with {eqx.tree_pformat(*seen)}{hint}." if seen else ""
            )
            e.add_note(f"Raised by the {what}, for {site.said}.{got}{site.form_said}")
        raise


# A message lists no more names than that.
_MOST = 12
# An index in a name, `layers/3/attn` or `layers/3.encode`: what is before it, the
# index, and what is behind it.
_INDEX = re.compile(r"(?<![^/])\d+(?![^/. ])")


def shown(names: Iterable[Any], form: Callable[[str], str] = repr) -> str:
    """The names for a message, each in this form. If there are more than a dozen, those
    that differ in an index alone are one, `layers/{0..11}/attn`, and no more than a
    dozen of them are listed."""
    names = list(map(str, names))
    short = names if len(names) <= _MOST else _by_layer(names)
    more = f", and {len(short) - _MOST} more" * (len(short) > _MOST)
    return ", ".join(map(form, short[:_MOST])) + more or "none at all"


def _by_layer(names: Sequence[str]) -> list[str]:
    """From the last index on to the first, so that `stages/0/blocks/{0..1}` and
    `stages/1/blocks/{0..5}` stay two."""
    parts = [(_INDEX.split(name), _INDEX.findall(name)) for name in names]
    for k in reversed(range(max(len(found) for _, found in parts))):
        alike = defaultdict(dict)
        for texts, found in parts:
            one = tuple(found[k : k + 1])
            others = (*texts,), (*found[:k], *(None,) * len(one), *found[k + 1 :])
            alike[others] |= dict.fromkeys(one)
        parts = [
            (texts, [_indices(some) if x is None else x for x in found])
            for (texts, found), some in alike.items()
        ]
    return [
        "".join(x for pair in zip(texts, (*found, "")) for x in pair)
        for texts, found in parts
    ]


def _indices(some: Iterable[str]) -> str:
    several = sorted(map(int, some))
    first, last = several[0], several[-1]
    if len(several) == 1:
        return str(first)
    is_range = several == list(range(first, last + 1)) and len(several) > 2
    text = f"{first}..{last}" if is_range else ",".join(map(str, several))
    return f"{{{text}}}"


def check_arity(option: str, fn: Callable, form: str, *hints: str) -> None:
    """Raises if it cannot be called as in `form`, such as `(path, module) -> bool`."""
    names = form[1 : form.index(")")]
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # of a builtin
        return
    try:
        signature.bind(*names.split(", "))
    except TypeError as e:
        what = f"`{option}` takes a function `{form}`, but {fn!r} takes {signature}."
        instead = f"Write `lambda {names}: ...`."
        raise TypeError(" ".join((what, instead, *hints))) from e


def takes_two(fn: Callable) -> bool:
    """Whether a function cannot be called with one argument, but with two."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # of a builtin
        return False
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    needed = [
        p.default is p.empty for p in signature.parameters.values() if p.kind in kinds
    ]
    return sum(needed) == 2
