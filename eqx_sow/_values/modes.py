"""Modes: which of a sow's values, and derivatives of it, is meant.

`"primal"` is the value, `"tangent"` and `"cotangent"` are its derivatives, and those of
second order are joined by dots, in the order in which they were taken:
`"cotangent.tangent"` is forward over reverse. Where a value was differentiated twice by
one mode, as in `grad(grad(f))`, both derivatives are a `"cotangent"`; the outer one is
then called `"primal.cotangent"`.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal


# For type checkers.
Mode = Literal[
    "primal",
    "tangent",
    "cotangent",
    "tangent.tangent",
    "tangent.cotangent",
    "cotangent.tangent",
    "cotangent.cotangent",
    "primal.tangent",
    "primal.cotangent",
]

PRIMAL = "primal"
_DERIVATIVES = ("tangent", "cotangent")


def without_order(label: str) -> str:
    """What `Site.mode` is for a label: which of two equal derivatives it is shows only
    once all are known."""
    while label.startswith(f"{PRIMAL}."):
        label = label.removeprefix(f"{PRIMAL}.")
    return label


def labels(keys: Iterable[Any]) -> dict[Any, str]:
    """What to call the mode of each `Site.key`."""
    taken: set[tuple[str, str]] = set()
    found = {}
    for key in sorted(dict.fromkeys(keys), key=lambda k: k[2]):
        name, label, _ = key
        while (name, label) in taken:
            label = f"{PRIMAL}.{label}"
        taken.add((name, label))
        found[key] = label
    return found


def as_mode(option: str, mode: Any) -> str:
    parts = without_order(mode).split(".") if isinstance(mode, str) else [None]
    if not (parts == [PRIMAL] or all(p in _DERIVATIVES for p in parts)):
        raise ValueError(
            f"`{option}`: {mode!r} is not a mode. Modes are 'primal', 'tangent' and "
            "'cotangent' (the gradient), or of second order, such as "
            "'cotangent.tangent'."
        )
    return mode


def as_modes(option: str, modes: Any) -> tuple[str, ...] | None:
    if modes is None:
        return None
    if isinstance(modes, str) or not isinstance(modes, Sequence | set | frozenset):
        modes = (modes,)
    return tuple(as_mode(option, mode) for mode in modes)
