"""Names, globs and predicates."""

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ._errors import UnknownSowError


def join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def matches(pattern: Any, name: str) -> bool:
    """Whether a name, a glob, a predicate or a sequence of them selects `name`."""
    if isinstance(pattern, str):
        return pattern == name or fnmatch.fnmatchcase(name, pattern)
    if isinstance(pattern, Sequence):
        return name in pattern or any(matches(p, name) for p in pattern)
    selects = pattern(name)
    try:
        return bool(selects)
    except Exception as e:  # of an array, NumPy's or JAX's
        raise TypeError(
            f"`names={pattern!r}` returned {selects!r} for {name!r}. Return `True` or "
            "`False`."
        ) from e


def one_iteration(pattern: str, there: Iterable[str]) -> tuple[str, tuple[int, ...]]:
    """A name or a glob, and which iteration of the loops around it is meant: `"h"` and
    `(3,)` for `"h/3"`. What matches as it is means all iterations."""
    name, at = pattern, ()
    while not any(matches(name, x) for x in there):
        name, _, last = name.rpartition("/")
        if not (name and last.isascii() and last.isdigit()):
            return pattern, ()
        at = (int(last), *at)
    return name, at


def lookup(option: Any, name: str) -> Any:
    """What a dict of glob to something (or one thing for all names) says of `name`. A
    name that is spelled out goes before globs, and these go in their order."""
    if not isinstance(option, Mapping):
        return option
    if name in option:
        return option[name]
    return next((x for p, x in option.items() if matches(p, name)), None)


def same_in_a_model(name: str, there: Iterable[str]) -> tuple[str, list[str]]:
    """A glob for what `name` may be called if the model is passed in another way, and
    what it fits: names that end like it, after a slash."""
    parts = name.split("/")
    for i in range(len(parts)):
        end = "/".join(parts[i:])
        fits = [x for x in there if x == end or x.endswith(f"/{end}")]
        if fits and ("/" in end or i == 0 or end in fits):
            return f"*{end}", fits
    return "", []


def check_known(
    call: str,
    option: Iterable[Any] | None,
    there: Iterable[str],
    problem: str = "selects no sow of this program",
    *,
    kind: str = "names",
    hint: Callable[[Any, Iterable[str]], str] = lambda pattern, known: "",
) -> None:
    """Raises if anything in `option` selects nothing of what is `there`. `hint` says
    more about a pattern."""
    known = dict.fromkeys(there)
    for pattern in option or ():
        spelled_out = isinstance(pattern, str) and pattern in known
        if spelled_out or any(matches(pattern, name) for name in known):
            continue
        message = f"`{call}`: {pattern!r} {problem}. "
        names = ", ".join(map(repr, known)) if known else "none at all"
        message += f"The {kind} there are: {names}."
        if isinstance(pattern, str):
            close = difflib.get_close_matches(pattern, known, n=3)
            if close:
                message += f" Did you mean {' or '.join(map(repr, close))}?"
        raise UnknownSowError(message + hint(pattern, known))
