"""Looking up what is not a key of an `Intermediates`: what the errors say."""

import difflib
import functools as ft
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import jax.export
import jax.tree_util as jtu

from .._errors import shown, UnknownKeyError
from .._globs import is_glob
from .._names import listed, Named, no_such_iteration, Selection


class Known(dict[tuple[str, str], Any]):
    """What is known of what came back: of each name and mode, the leading axes of the
    arrays, see `NamedAxes`; and of the program and the call, what else can be looked
    up, and what errors say."""

    # All marks in the program, those that were left out included.
    found: tuple[Named, ...] = ()
    # Where the models are, as in `Program.roots`.
    roots: tuple[str, ...] = ()
    # The options.
    capture: Any = None
    modes: tuple[str, ...] | None = None
    # Those that the user's `Append` has put into a tuple, also if there is one alone.
    appended: frozenset[str] = frozenset()

    def of_layers(self, axes: Mapping[tuple[str, str], Any]) -> "Known":
        """What is known if stacks are taken apart. The names are others then."""
        made = Known(axes)
        made.roots, made.capture, made.modes = self.roots, self.capture, self.modes
        return made

    def __reduce__(self):
        # Pickles are then independent of our classes.
        return dict, (dict(self),)


def as_known(axes: Mapping[tuple[str, str], Any]) -> Known:
    return axes if isinstance(axes, Known) else Known(axes)


class Modes(dict[str, Any]):
    """The modes of one name, as `intermediates[name]` returns them: a dict that says
    what it means that a mode is not there.

    What an `Intermediates` holds are plain dicts. What changes this one changes that,
    too."""

    _name: str = ""
    _known: Mapping[tuple[str, str], Any] = Known()
    # Where it was looked up.
    _held: dict[str, Any] | None = None

    def __missing__(self, mode: Any) -> NoReturn:
        raise UnknownKeyError(
            f"{self._name!r} has no mode {mode!r}. Its modes are: {shown(self)}."
            f"{_why(self, mode)}"
        )

    def __reduce__(self):
        return dict, (dict(self),)


def _in_both(change: str) -> Callable:
    """A method of a dict that changes it, for `Modes`."""

    def method(self, *args, **kwargs):
        if self._held is not None:
            getattr(self._held, change)(*args, **kwargs)
        return getattr(dict, change)(self, *args, **kwargs)

    return ft.update_wrapper(method, getattr(dict, change))


for _change in (
    *("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem"),
    *("setdefault", "update"),
):
    setattr(Modes, _change, _in_both(_change))


def modes_of(
    name: str, modes: dict[str, Any], known: Mapping[tuple[str, str], Any]
) -> Modes:
    made = Modes(modes)
    made._name, made._known, made._held = name, known, modes
    return made


class _Keys(tuple[str, ...]):
    """The static part of `Modes`. Only the modes count for whether two are equal."""

    name: str = ""
    known: Mapping[tuple[str, str], Any] = Known()


def _flatten(x: Modes):
    keys = _Keys(x)
    keys.name, keys.known = x._name, x._known
    return tuple(x.values()), keys


def _flatten_with_keys(x: Modes):
    values, keys = _flatten(x)
    return tuple(zip(map(jtu.DictKey, keys), values)), keys


def _unflatten(keys, children) -> Modes:
    made = Modes(zip(keys, children))
    made._name, made._known = keys.name, keys.known
    return made


jtu.register_pytree_with_keys(Modes, _flatten_with_keys, _unflatten, _flatten)
jax.export.register_pytree_node_serialization(
    Modes,
    serialized_name="eqx_sow.Modes",
    serialize_auxdata=lambda keys: json.dumps(keys).encode(),
    deserialize_auxdata=lambda keys: _Keys(json.loads(keys)),
)


# --- why it is not there ---
_CALLED = {
    "primal": ("value", "values", "activation", "activations", "out", "output"),
    "cotangent": ("grad", "grads", "gradient", "gradients", "vjp"),
    "tangent": ("jvp",),
    "count": ("counts",),
}


def _why(modes: Modes, mode: Any) -> str:
    for right, others in _CALLED.items():
        if str(mode).lower() in others:
            more = "" if right in modes else _why(modes, right)
            return f" The mode is called {right!r}.{more}"
    known = as_known(modes._known)
    asked = known.modes
    if asked is not None and mode not in (*asked, "count"):
        return f" `modes=` selected {shown(asked)} only."
    *_, kind = str(mode).split(".")
    if kind == "count":
        return " It is there for a name under a condition or in a `while_loop` only."
    if kind not in ("cotangent", "tangent"):
        close = difflib.get_close_matches(str(mode), _CALLED, n=1)
        if close:
            return f" Did you mean {close[0]!r}?"
        first = next(iter(modes), "primal")
        return f" For a part of the value, write `[{first!r}][{mode!r}]`."
    elsewhere = [name for name, m in known if m == mode]
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


def unknown_name(
    name: Any, there: Iterable[str], known: Known, selection: Selection | None
) -> UnknownKeyError:
    """The error for a name that is not there. `selection` is what the program has
    under that name."""

    def hint(name, close):
        if selection is None:
            return " Write `intermediates[name][mode]`."
        if is_glob(name):
            all_of = f"`intermediates.stack({name!r})`"
            return f" For all names that a pattern fits, write {all_of}."
        if several := selection.ambiguous.get(name):
            return f" It may be {' or '.join(map(repr, several))}."
        some = [(n.name, one) for n in known.found for one in selection.all_of(n)]
        for whole, one in some:
            if one.at and whole in there:
                return (
                    f" The axis of the loop in {whole!r} is not known: a reducer has "
                    "combined the iterations, or you have computed with the values. "
                    f"Capture this iteration with `names={name!r}`."
                )
            return " The program has it, but `names=` or `modes=` left it out."
        if iterations := no_such_iteration(name, known.found):
            return iterations
        if name.endswith(".inputs") and not close:
            return " Inputs are captured with `inputs=True`."
        if close or known.capture is not None:
            return ""
        return " The outputs of modules are captured with `capture=True`."

    return UnknownKeyError(
        f"{name!r} is no name here. {listed(name, there, hint=hint)}"
    )
