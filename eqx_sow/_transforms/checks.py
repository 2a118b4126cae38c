"""What is checked once a program has been traced: that options select something, and
that what they select can be had."""

from collections.abc import Callable, Iterable
from typing import Any

from .._names import check_known, matches, one_iteration, same_in_a_model
from .._values.modes import labels
from .options import Options
from .program import Program


def hints(program: Program, plants: bool = False) -> Callable[[Any, Any], str]:
    """For `check_known`: what else a pattern may have been meant for. `plants`: a name
    may have an iteration behind it."""

    def hint(pattern: Any, known: Iterable[str]) -> str:
        if not isinstance(pattern, str):
            return ""
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
        return _about_iteration(pattern, known, plants)

    return hint


_PASSED = "How a name begins depends on how the model is passed:"


def _listed(names: Iterable[str]) -> str:
    first, *more = map(repr, names)
    return ", ".join([first, *more[:5], *(["..."] if more[5:] else [])])


def _about_iteration(pattern: str, known: Iterable[str], plants: bool) -> str:
    name, at = one_iteration(pattern, known)
    if at:
        return (
            f" {name!r} stands for all iterations of its loop. Write that, and take "
            f"entry {'/'.join(map(str, at))} of what comes back (of `tap`, the event "
            "with that `count`)."
        )
    parts = pattern.split("/")
    for i, part in enumerate(parts):
        rest = "/".join(parts[:i] + parts[i + 1 :])
        if plants and part.isdigit() and any(matches(rest, x) for x in known):
            return f" For an iteration of a loop, write {f'{rest}/{part}'!r}."
    return ""


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
        options.tag,
        "Leave out the derivative that is taken last: pass the other modes as "
        "`modes=`. Or take the `jax.checkpoint` away.",
    )
    return mode_of
