"""The options that the public functions take, checked."""

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx

from .._mark.sow import check_tag
from .._modules.find import check_predicate, Marking
from .._values.reduce import Reducer


def check_function(call: str, fn: Any) -> None:
    if not callable(fn):
        raise TypeError(f"`{call}(fn)` takes a function or a model, not {fn!r}.")


def as_capture(call: str, capture: Any) -> Any:
    """`None` for no capture."""
    if capture is None or capture is False:
        return None
    if isinstance(capture, str):
        raise TypeError(
            f"`{call}(..., capture=...)` takes no path. To choose by path, write "
            f"`capture=True, names={capture!r}`."
        )
    classes = capture if isinstance(capture, tuple) else (capture,)
    if isinstance(capture, eqx.Module):
        raise TypeError(
            f"`{call}(..., capture=...)` takes no module. To choose by path, write "
            '`lambda path, module: path == "layers/0"`.'
        )
    if capture is True or all(isinstance(c, type) for c in classes):
        return capture
    if callable(capture):
        check_predicate(call, capture)
        return capture
    raise TypeError(
        f"`{call}(..., capture=...)` takes `True`, a class, a tuple of classes, or a "
        f"function `(path, module) -> bool`, not {capture!r}. To choose by path, write "
        "a function."
    )


def as_methods(call: str, methods: Any) -> tuple[str, ...]:
    if isinstance(methods, str):
        return (methods,)
    if isinstance(methods, Sequence) and all(isinstance(m, str) for m in methods):
        return tuple(methods)
    raise TypeError(
        f"`{call}(..., methods=...)` takes the name of a method, or a sequence of "
        f"them, not {methods!r}."
    )


def as_names(call: str, names: Any) -> tuple[Any, ...] | None:
    if names is None:
        return None
    if isinstance(names, str) or callable(names):
        return (names,)
    if isinstance(names, Sequence | set | frozenset):
        if all(isinstance(name, str) or callable(name) for name in names):
            return tuple(names)
    raise TypeError(
        f"`{call}(..., names=...)` takes a name, a glob, a sequence of them, or a "
        f"function of a name, not {names!r}."
    )


_PARTS = ("primal", "tangent", "cotangent")


def check_mode(call: str, mode: Any) -> None:
    parts = mode.split(".") if isinstance(mode, str) else [None]
    while parts[0] == "primal" and len(parts) > 1:
        parts = parts[1:]
    if not (parts == ["primal"] or all(p in _PARTS[1:] for p in parts)):
        raise ValueError(
            f"`{call}`: {mode!r} is no mode. Modes are 'primal', 'tangent' and "
            "'cotangent', or of second order, such as 'cotangent.tangent'."
        )


def as_modes(call: str, modes: Any) -> tuple[str, ...] | None:
    if modes is None:
        return None
    if isinstance(modes, Sequence | set | frozenset) and not isinstance(modes, str):
        modes = tuple(modes)
    else:
        modes = (modes,)
    for mode in modes:
        check_mode(call, mode)
    return modes


def each(option: Any) -> list[Any]:
    return list(option.values()) if isinstance(option, Mapping) else [option]


def check_reduce(call: str, reduce: Any) -> None:
    for r in each(reduce):
        if not (reduce is None or isinstance(r, Reducer)):
            raise TypeError(
                f"`{call}(..., reduce=...)` takes `eqx_sow.Append()`, "
                "`eqx_sow.Last()`, `eqx_sow.Fold(init, fn)` or "
                f"`eqx_sow.Buffer(size)`, or a dict of names to them, not {r!r}."
            )


def check_transform(call: str, transform: Any) -> None:
    for fn in each(transform):
        if not (transform is None or callable(fn)):
            raise TypeError(
                f"`{call}(..., transform=...)` takes a function of the value, or a "
                f"dict of names to functions, not {fn!r}."
            )


def check_spec(call: str, spec: Any) -> None:
    if not (spec is None or isinstance(spec, Mapping)):
        raise TypeError(
            f"`{call}(..., spec=...)` takes a dict of names to annotations, not "
            f"{spec!r}."
        )


def as_marking(
    call: str, fn: Any, tag: Any, capture: Any, methods: Any, inputs: bool, scope: bool
) -> Marking:
    """The options that `save_intermediates` and `plant` share."""
    check_function(call, fn)
    check_tag(call, tag)
    capture, methods = as_capture(call, capture), as_methods(call, methods)
    return Marking(capture, tag, methods, inputs, scope)
