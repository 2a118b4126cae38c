"""Names, globs and predicates."""

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ._errors import UnknownSowError


def matches(pattern: Any, name: str) -> bool:
    """Whether a name, a glob, a predicate or a sequence of them selects `name`."""
    if isinstance(pattern, str):
        return pattern == name or fnmatch.fnmatchcase(name, pattern)
    if isinstance(pattern, Sequence):
        return any(matches(p, name) for p in pattern)
    return bool(pattern(name))


def lookup(option: Any, name: str) -> Any:
    """What a dict of glob to something (or one thing for all names) says of `name`. A
    name that is spelled out goes before globs, and these go in their order."""
    if not isinstance(option, Mapping):
        return option
    if name in option:
        return option[name]
    return next((x for p, x in option.items() if matches(p, name)), None)


def patterns(option: Any) -> list[Any]:
    """All that has to select something."""
    if option is None:
        return []
    if isinstance(option, str) or isinstance(option, Callable):
        return [option]
    return list(option)


def check_known(
    call: str,
    option: Any,
    names: Iterable[str],
    problem: str = "selects no sow of this program",
) -> None:
    """Raises if anything in `option` selects none of `names`."""
    names = list(dict.fromkeys(names))
    for pattern in patterns(option):
        if any(matches(pattern, name) for name in names):
            continue
        there = ", ".join(map(repr, names)) if names else "none at all"
        hint = ""
        if isinstance(pattern, str):
            close = difflib.get_close_matches(pattern, names, n=3)
            if close:
                hint = f" Did you mean {' or '.join(map(repr, close))}?"
            pattern = repr(pattern)
        raise UnknownSowError(
            f"`{call}`: {pattern} {problem}. The names there are: {there}.{hint}"
        )
