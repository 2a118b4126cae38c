"""Looking up what is not a key of an `Intermediates`: what `names=` would have captured
under that name, or an error that says why there is nothing."""

import dataclasses as dc
import difflib
import itertools as it
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from .._errors import shown, SowError, UnknownKeyError
from .._globs import is_glob, layers_in
from .._names import Iterations, Named, Selected
from .._selection import Selection
from .._unknown import (
    across_slashes,
    entry_of_value,
    listed,
    no_such_iteration,
    without_option,
)
from .layers import (
    at_iteration,
    joined,
    Known,
    LoopAxis,
    loops_of,
    runs_of,
    Values,
)
from .leaves import shape_of
from .stacks import stacked, unstacked


def find(
    name: Any, values: Values, known: Known, shapes: bool = False
) -> tuple[str, Any, Known] | None:
    """What `names=name` would have captured: its name, its modes, and what is known of
    these; or `None` if it is not here. It may be an iteration of a loop, a layer that
    is counted from the end, or lack its root. What several names have that a pattern
    fits is stacked. With `shapes`, nothing is computed."""
    if name in values:
        return name, values.get(name), known
    if not isinstance(name, str):
        return None
    # What is here are also iterations: `names=("h/1", "h/2")` leaves no `h`.
    found = [] if is_glob(name) else known.found
    found = found or [*_all_named(values, known)]
    selection = Selection([name], found, known.roots)
    some = [(whole, one) for whole in found for one in selection.all_of(whole)]
    each = {one.name: one for _, one in some}
    pairs = [(one, _one(new, some, values, known, shapes)) for new, one in each.items()]
    there = [x for _, x in pairs if x is not None]
    if not there or not is_glob(name):
        return there[0] if there else None
    (new, *_), places = there[0], [n for n in pairs[0][0].places if n is not None]
    if len(there) == len(pairs) == 1 and places and not layers_in(new, name):
        return there[0]
    parts = {new: modes for new, modes, _ in there}
    if not all(parts.values()):  # in a view of one mode
        return name, {}, known
    axes = {(n, m): of.of(n, m) for n, modes, of in there for m in modes}
    call = f"intermediates[{name!r}]"
    layers, axes = unstacked(parts, dc.replace(known, axes=axes), call)
    modes, axes = stacked(name, layers, axes)
    return name, modes, dc.replace(known, axes={**known.axes, **axes})


def is_there(name: Any, values: Values, known: Known, mode: str | None = None) -> bool:
    """Whether a name can be looked up, or one mode of it. Nothing is computed for
    that."""
    try:
        there = find(name, values, known, shapes=True)
        return there is not None and (mode is None or mode in there[1])
    except SowError:  # it cannot be stacked
        return False


def _one(
    new: str,
    some: Sequence[tuple[Named, Selected]],
    values: Values,
    known: Known,
    shapes: bool,
) -> tuple[str, Any, Known] | None:
    """What a pattern selects under one name, given all that it selects of each mark:
    the name, its modes, and what is known of these, if it is here."""
    held = lambda name: jtu.tree_map(shape_of, values[name]) if shapes else values[name]
    if new in values:
        return new, held(new), known
    pairs = [(whole, one.at) for whole, one in some if one.name == new]
    # Where a reducer has combined the iterations of others, loops over layers are left.
    at = dict([_of_layers(*pair) for pair in pairs] + pairs)
    wholes = {whole.name for whole in at}
    if len(wholes) > 1 or not wholes <= values.keys():
        return None
    (whole,) = wholes
    if not any(at.values()):
        return whole, held(whole), known
    modes, axes = _iteration(whole, held(whole), known, at)
    of_new = {(new, mode): x for mode, x in axes.items()}
    known = dc.replace(known, axes={**known.axes, **of_new})
    return (new, modes, known) if modes else None


# --- iterations ---
def _all_named(values: Values, known: Known) -> Iterator[Named]:
    """What the names are to patterns, as far as that is known: with the loops that each
    is in, wherever in the name their indices stand."""
    for name, modes in values.items():
        runs = [run for m, x in modes.items() for run in runs_of(known.of(name, m), x)]
        some = [_named(name, loops_of(run, None)) for run, _ in runs if run]
        yield from dict.fromkeys(some) or [Named(name)]


def _named(name: str, loops: Sequence[LoopAxis]) -> Named:
    return Named(name, tuple(Iterations(*x[:2]) for x in loops))


def _of_layers(whole: Named, at: Sequence[int | None]) -> tuple[Named, Any]:
    """A mark without the loops that are not over layers, of all of whose iterations
    something is asked for; and what is asked for, see `Selected.at`."""
    each = it.zip_longest(whole.loops, at)
    kept = [(x, i) for x, i in each if i is not None or x.place is not None]
    loops = tuple(x for x, _ in kept)
    return whole._replace(loops=loops), tuple(i for _, i in kept) if at else ()


def _iteration(
    name: str, held: Mapping[str, Any], known: Known, at: Mapping[Named, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of each mode that is `held` of a name, the iterations `at`, see `Selected.at`,
    and the axes of that. `at` has those of each place. There is none if the axes are
    not known."""
    modes: dict[str, Any] = {}
    axes: dict[str, Any] = {}
    # Of several runs, which ones have them. A derivative may be missing there.
    having: set[int] = set()
    for mode, value in held.items():
        of_mode = known.of(name, mode)
        several = isinstance(of_mode, list)
        parts = {}
        for k, (of_run, x) in enumerate(runs_of(of_mode, value)):
            loops = loops_of(of_run, x)
            one = at.get(_named(name, loops)) or ()
            are_known = all(y.is_known for y, i in zip(loops, one) if i is not None)
            if one and are_known:
                parts[k] = at_iteration(of_run, x, one)
            elif one or not several:
                return {}, {}
            elif x is None and k in having:
                parts[k] = (), None
        having |= parts.keys()
        if parts:
            axes[mode], modes[mode] = joined(of_mode, [*parts.values()])
    if len(having) == 1 and name not in known.appended:
        # Of the runs, one alone is in such a loop.
        for mode in modes:
            if isinstance(axes[mode], list):
                modes[mode], axes[mode] = modes[mode][0], axes[mode][0]
    return modes, axes


# --- why it is not there ---
_CALLED = {
    "primal": ("value", "values", "activation", "activations", "out", "output"),
    "cotangent": ("grad", "grads", "gradient", "gradients", "vjp"),
    "tangent": ("jvp",),
    "count": ("counts",),
}


def unknown_mode(
    mode: Any, there: Collection[str], name: str, known: Known
) -> UnknownKeyError:
    """The error for a mode of a name that is not there."""
    first = next(iter(there), "primal")
    key = eqx.tree_pformat(mode)
    index = key if isinstance(mode, str | int) else "..."
    part = f" For a part of the value, write `[{first!r}][{index}]`."
    return UnknownKeyError(
        f"{name!r} has no mode {key}. Its modes are: {shown(there)}."
        f"{why_no_mode(mode, there, known) or part}"
    )


def no_array(there: Collection[str], name: str, attribute: str = "") -> str:
    """What to say if the modes of a name are used as if they were an array, perhaps
    by such an attribute of one."""
    called = (m for m, others in _CALLED.items() if attribute.lower() in (m, *others))
    mode = next((m for m in called if m in there), None)
    first, dot = next(iter(there), "primal"), attribute and f".{attribute}"
    part = f"[{first!r}]{dot}" if mode is None else f"[{mode!r}]"
    entry = f"intermediates[{name!r}]"
    return (
        f"`{entry}{dot}`: this is a dict, not an array. It has the "
        f"mode{'s' * (len(there) != 1)} {' and '.join(map(repr, there)) or None}: "
        f"write `{entry}{part}`."
    )


def why_no_mode(mode: Any, there: Collection[str], known: Known) -> str:
    """Says why a mode is not `there`, if it is one, or is like one."""
    for right, others in _CALLED.items():
        if str(mode).lower() in others:
            more = "" if right in there else why_no_mode(right, there, known)
            return f" The mode is called {right!r}.{more}"
    asked = known.modes
    if asked is not None and mode not in (*asked, "count"):
        return f" `modes=` selected {shown(asked)} only."
    *_, kind = str(mode).split(".")
    if kind == "count":
        return " It is there for a name under a condition or in a `while_loop` only."
    if kind not in ("cotangent", "tangent"):
        close = difflib.get_close_matches(str(mode), _CALLED, n=1)
        return f" Did you mean {close[0]!r}?" if close else ""
    elsewhere = [name for name, m in known.axes if m == mode]
    if kind == "tangent":
        if elsewhere:
            return " The value does not depend on what is differentiated."
        return " A value has a tangent if `jax.jvp` is inside `save_intermediates`."
    if elsewhere:
        return (
            " The value does not depend on what is differentiated, so JAX computes no "
            f"cotangent of it. These names have one: {shown(elsewhere)}."
        )
    return (
        " No value has one, as nothing was differentiated inside "
        "`save_intermediates`, or no value depends on what was. For gradients, write "
        "`save_intermediates(eqx.filter_grad(loss))`."
    )


def unknown_name(name: Any, there: Values, known: Known) -> UnknownKeyError:
    """The error for a name that is not there."""

    def hint(name, close):
        if not isinstance(name, str):
            return " Write `intermediates[name][mode]`."
        if entry := entry_of_value(name, there, known.roots):
            return entry
        if said := across_slashes(name, there):
            return said
        # What the program has under that name.
        found = known.found or [*_all_named(there, known)]
        selection = Selection([name], found, known.roots)
        if several := selection.ambiguous.get(name):
            return f" It may be {' or '.join(map(repr, several))}."
        some = [(n.name, one) for n in known.found for one in selection.all_of(n)]
        for whole, one in some:
            if one.at and whole in there:
                return (
                    f" The axis of the loop in {whole!r} is not known: a reducer has "
                    "combined the iterations, or you have computed with the values, or "
                    "a transformation around has added an axis of the same length. "
                    f"Capture this iteration with `names={name!r}`."
                )
            return " The program has it, but `names=` or `modes=` left it out."
        if iterations := no_such_iteration(name, known.found, known.roots):
            return iterations
        if said := without_option(name, there):
            return said
        if close or known.capture is not None:
            return ""
        return " The outputs of modules are captured with `capture=True`."

    said = listed(name, there, hint=hint, found=known.found)
    return UnknownKeyError(f"{name!r} is not a name here. {said}")
