"""What is checked once a program has been traced: that the options select something,
and that it can be captured."""

import functools as ft
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .._frames import warn
from .._names import (
    check_known,
    every_selected,
    in_a_list,
    matches,
    same_in_a_model,
    selected,
)
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
        added = {option: program.new_names(known, option) for option in options}
        for find in (_alike, same_in_a_model):
            for option, names in {None: known, **added}.items():
                glob, fits = find(pattern, names)
                if fits:
                    text = _forgotten(option, fits) if option else ""
                    return text if glob == pattern else text + _passed(glob, fits)
        if not known and added["capture"]:
            return " Nothing is marked here." + _forgotten("capture", added["capture"])
        return ""

    return hint


def _alike(pattern: str, names: Iterable[str]) -> tuple[str, list[str]]:
    """As `same_in_a_model`, but only the names that the pattern itself fits."""
    return pattern, [name for name in names if matches(pattern, name)]


def _forgotten(option: str, names: Iterable[str]) -> str:
    return f" Did you mean `{option}=True`? It adds {_listed(names)}."


def _passed(glob: str, names: Iterable[str]) -> str:
    return (
        " How a name begins depends on how the model is passed: write "
        f"{glob!r}, which fits {_listed(names)}."
    )


def _listed(names: Iterable[str]) -> str:
    first, *more = map(repr, names)
    return ", ".join([first, *more[:5], *(["..."] if more[5:] else [])])


def _about_iteration(pattern: str, program: Program) -> str:
    """If there is an index in the pattern: where it stands, or which ones there are; or
    why an option cannot have it."""
    parts = pattern.split("/")
    indices = [i for i, part in enumerate(parts) if part.lstrip("-").isdecimal()]
    for site, loops in program.in_loops:
        name, after = site.name, site.label.after
        place = next((n for n in after if n is not None), None)
        for i in indices if loops else ():
            listed = in_a_list(name, [(place, parts[i])])
            without = "/".join(parts[:i] + parts[i + 1 :])
            if matches(without, name) and not matches(pattern, listed):
                of_layers = "" if place is None else " over layers"
                return (
                    f" {name!r} is in a loop{of_layers}: for one iteration write "
                    f"{listed!r}."
                )
        for part in every_selected(pattern, name, after, loops):
            if part.at:
                return (
                    f" One iteration of {name!r} is a value of its own only if `names` "
                    f"asks for it: pass `names={pattern!r}`, too."
                )
            return f" All iterations of {name!r} are one value: write {name!r}."
        iteration = selected(pattern, name, after)
        if iteration is not None and iteration.at:
            return (
                f" Of {name!r} there is no such iteration: the loops around it, "
                f"from outside in, have {list(loops)} iterations, counted from 0 (a "
                "`while_loop` has none that can be named)."
            )
    return ""


def check_selected(
    call: str,
    program: Program,
    known: Iterable[str],
    names: Iterable[Any] | None,
    by_name: Mapping[str, Any],
) -> None:
    """Raises if anything in the option `names`, or a key of those options that are
    dicts of names, selects no sow of the program, nor an iteration of one."""

    def selects_nothing(pattern: Any) -> bool:
        return not any(
            every_selected(pattern, site.name, site.label.after, loops)
            for site, loops in program.in_loops
        )

    patterns: dict[str, Any] = dict(names=filter(selects_nothing, names or ()))
    patterns |= {k: v for k, v in by_name.items() if isinstance(v, Mapping)}
    for option, some in patterns.items():
        if option == "transform":
            all_layers = {site.label.of_all for site, _ in program.in_loops}
            some = [x for x in some if not any(matches(x, name) for name in all_layers)]
        check_known(f"{call}(..., {option}=...)", some, known, hint=hints(program))


def wanted(
    call: str,
    program: Program,
    options: Options,
    keys: Iterable[Any],
    others: Iterable[str] = (),
) -> dict[Any, str]:
    """What the modes are called of those `Site.key`s that the option `modes` selects.
    `others` are names of modes that it may have, too."""
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


# Where the functions, and the classes of models, are from. One that is made anew in
# each step of training is from the same place.
_unmarked: set[tuple[Any, ...]] = set()


def warn_unmarked(call: str, fn: Any, program: Program, options: Options) -> None:
    """Warns, once for each function, if there is nothing in the program that could be
    selected. What was asked for by name is an error before that."""
    asked = options.names is not None or options.capture is not None
    if asked or program.has_sows:
        return
    fn = _called(fn)
    name = getattr(fn, "__name__", type(fn).__name__)
    code = getattr(fn, "__code__", None)
    place = name, type(fn).__module__, type(fn).__qualname__
    if code is not None:
        place = name, code.co_filename, code.co_firstlineno
    if place not in _unmarked:
        why = (
            f" that is left: a `save_intermediates` inside, with the same tag "
            f"{options.tag!r}, took them. Give one of the two another `tag`."
            if options.tag in program.taken
            else ". Pass `capture=True` for the output of each module, or mark values "
            "with `eqx_sow.sow`. A function that was traced before, by `jax.vjp` or "
            "`jax.linearize`, has lost its marks: call these inside `fn`."
        )
        warn(f"`{call}` found no mark in `{name}`{why}")
        # Not if the warning is an error.
        _unmarked.add(place)


def _called(fn: Any) -> Any:
    """The function inside transformations and partial applications."""
    fn = inspect.unwrap(fn)
    return _called(fn.func) if isinstance(fn, ft.partial) else fn
