"""What is checked once a program has been traced: that options select something, and
that what they select can be had."""

import functools as ft
from collections.abc import Callable, Iterable
from typing import Any

from .._frames import warn
from .._names import check_known, in_a_list, matches, same_in_a_model, selected
from .._values.modes import labels
from .options import Options
from .program import Program


def hints(program: Program) -> Callable[[Any, Any], str]:
    """For `check_known`: what else a pattern may have been meant for."""

    def hint(pattern: Any, known: Iterable[str]) -> str:
        if not isinstance(pattern, str):
            return ""
        if about := _about_iteration(pattern, program):
            return about
        options = ("capture", "scope")
        forgotten = {x: program.new_names(known, x) for x in options}
        for option, new in forgotten.items():
            if any(matches(pattern, name) for name in new):
                return f" Did you mean `{option}=True`? It adds {_listed(new)}."
        glob, fits = same_in_a_model(pattern, known)
        if fits:
            return f" {_PASSED} write {glob!r}, which fits {_listed(fits)}."
        for option, new in forgotten.items():
            glob, fits = same_in_a_model(pattern, new)
            if fits:
                return (
                    f" Did you mean `{option}=True`? It adds {_listed(fits)}. "
                    f"{_PASSED} {glob!r} fits as well."
                )
        if not known and forgotten["capture"]:
            return (
                " Nothing is marked here. Did you mean `capture=True`? It adds "
                f"{_listed(forgotten['capture'])}."
            )
        return ""

    return hint


_PASSED = "How a name begins depends on how the model is passed:"


def _listed(names: Iterable[str]) -> str:
    first, *more = map(repr, names)
    return ", ".join([first, *more[:5], *(["..."] if more[5:] else [])])


def _about_iteration(pattern: str, program: Program) -> str:
    for label, loops in program.in_loops():
        name, _, last = pattern.rpartition("/")
        one = selected(name, label.name, label.after)
        places = [n for n in label.after if n is not None]
        if one is not None and not one.at and places and last.lstrip("-").isdecimal():
            listed = in_a_list(label.name, [(places[0], last)])
            return (
                f" {label.name!r} is in a loop over layers. Write {listed!r}: the "
                "index stands where a list has it."
            )
        one = selected(pattern, label.name, label.after)
        if one is not None and one.at:
            return (
                f" Of {label.name!r} there is no such iteration: the loops around it, "
                f"from outside in, have {list(loops)} iterations, counted from 0 (a "
                "`while_loop` has none that can be named)."
            )
        parts = pattern.split("/")
        for i, part in enumerate(parts):
            rest = "/".join(parts[:i] + parts[i + 1 :])
            if loops and not places and part.isdecimal() and rest == label.name:
                return f" For an iteration of its loop, write {f'{rest}/{part}'!r}."
    return ""


def unselected(names: Iterable[Any] | None, program: Program) -> list[Any]:
    """Those of the `names` that select no sow, nor an iteration of one."""
    there = program.in_loops() if names else {}
    return [
        p
        for p in names or ()
        if not any(selected(p, x.name, x.after, loops) for x, loops in there)
    ]


def wanted(
    call: str,
    program: Program,
    options: Options,
    keys: Iterable[Any],
    others: Iterable[str] = (),
) -> dict[Any, str]:
    """What to call the mode of each `Site.key` that is asked for. `others`: modes that
    there are besides."""
    modes, mode_of = options.modes, labels(keys)
    check_known(
        f"{call}(..., modes=...)",
        modes,
        [*others, *mode_of.values()],
        "is a mode that no selected sow of this program has",
        kind="modes",
    )
    mode_of = {k: m for k, m in mode_of.items() if modes is None or m in modes}
    program.check_recomputed(
        [k for k in mode_of if "cotangent" in k[1]],
        "Leave out the derivative that is taken last: pass the other modes as "
        "`modes=`. Or take the `jax.checkpoint` away.",
    )
    return mode_of


# Where the functions and the classes of models are from. One that is made anew in each
# step is from the same place.
_unmarked: set[tuple[Any, ...]] = set()


def warn_unmarked(call: str, fn: Any, program: Program, options: Options) -> None:
    """Warns, once for each function, if there is nothing in the program that could be
    selected. What was asked for by name is an error before that."""
    asked = options.names is not None or options.capture is not None
    # Calls that are only noted have no name.
    if asked or any(program.names):
        return
    fn = _called(fn)
    name = getattr(fn, "__name__", type(fn).__name__)
    code = getattr(fn, "__code__", None)
    if code is None:
        place = name, type(fn).__module__, type(fn).__qualname__
    else:
        place = name, code.co_filename, code.co_firstlineno
    if place not in _unmarked:
        warn(
            f"`{call}` found no mark in `{name}`. Pass `capture=True` for the output "
            "of each module, or mark values with `eqx_sow.sow`."
        )
        # Not if the warning is an error.
        _unmarked.add(place)


def _called(fn: Any) -> Any:
    """The function inside transformations and partial applications."""
    while True:
        if hasattr(fn, "__wrapped__"):
            fn = fn.__wrapped__
        elif isinstance(fn, ft.partial):
            fn = fn.func
        else:
            return fn
