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
        return name in pattern or any(matches(p, name) for p in pattern)
    return bool(pattern(name))


def lookup(option: Any, name: str) -> Any:
    """What a dict of glob to something (or one thing for all names) says of `name`. A
    name that is spelled out goes before globs, and these go in their order."""
    if not isinstance(option, Mapping):
        return option
    if name in option:
        return option[name]
    return next((x for p, x in option.items() if matches(p, name)), None)


def check_known(
    call: str,
    option: Iterable[Any] | None,
    there: Iterable[str],
    problem: str = "selects no sow of this program",
    *,
    kind: str = "names",
    unmarked: Callable[[], bool] = lambda: False,
) -> None:
    """Raises if anything in `option` selects nothing of what is `there`. `unmarked`: a
    model is in sight whose layers were not asked for."""
    known = dict.fromkeys(there)
    for pattern in option or ():
        spelled_out = isinstance(pattern, str) and pattern in known
        if spelled_out or any(matches(pattern, name) for name in known):
            continue
        if not known and unmarked():
            hint = "Nothing is marked here. Did you mean `capture=True`?"
        else:
            names = ", ".join(map(repr, known)) if known else "none at all"
            hint = f"The {kind} there are: {names}."
        if isinstance(pattern, str):
            close = difflib.get_close_matches(pattern, known, n=3)
            if close:
                hint += f" Did you mean {' or '.join(map(repr, close))}?"
            pattern = repr(pattern)
        raise UnknownSowError(f"`{call}`: {pattern} {problem}. {hint}")
