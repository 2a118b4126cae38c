"""Looking up what is not a key of an `Intermediates`: what the errors say."""

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import jax.export
import jax.tree_util as jtu

from .._errors import shown, UnknownKeyError
from .._names import listed


class Known(dict[tuple[str, str], Any]):
    """What is known of what came back: of each name and mode, the leading axes of the
    arrays, see `NamedAxes`; and of the call what errors need."""

    # The names of all marks in the program, those that were left out included.
    names: frozenset[str] = frozenset()
    # The options.
    capture: Any = None
    modes: tuple[str, ...] | None = None


class Modes(dict[str, Any]):
    """The modes of one name, as `intermediates[name]` returns them: a dict that says
    what it means that a mode is not there.

    What an `Intermediates` holds are plain dicts. To set a mode here sets it there."""

    _name: str = ""
    _known: Known = Known()
    # Where it was looked up.
    _held: dict[str, Any] | None = None

    def __missing__(self, mode: Any) -> NoReturn:
        raise UnknownKeyError(
            f"{self._name!r} has no mode {mode!r}. Its modes are: {shown(self)}."
            f"{_why(self, mode)}"
        )

    def __setitem__(self, mode: str, value: Any) -> None:
        super().__setitem__(mode, value)
        if self._held is not None:
            self._held[mode] = value

    def __delitem__(self, mode: str) -> None:
        super().__delitem__(mode)
        if self._held is not None:
            del self._held[mode]

    def __reduce__(self):
        return dict, (dict(self),)


def modes_of(name: str, modes: dict[str, Any], known: Known) -> Modes:
    made = Modes(modes)
    made._name, made._known, made._held = name, known, modes
    return made


class _Keys(tuple[str, ...]):
    """The static part of `Modes`. Only the modes count for whether two are equal."""

    name: str = ""
    known: Known = Known()


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
    asked = modes._known.modes
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
    elsewhere = [name for name, m in modes._known if m == mode]
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


def unknown_name(name: Any, there: Iterable[str], known: Known) -> UnknownKeyError:
    """The error for a name that is not there."""

    def hint(name, close):
        if not isinstance(name, str):
            return " Write `intermediates[name][mode]`."
        if name in known.names:
            return " It is in the program, but `names=` or `modes=` left it out."
        if any(x in name for x in "*?["):
            return (
                " For all names that a pattern fits, write "
                f"`intermediates.stack({name!r})`."
            )
        if name.endswith(".inputs") and not close:
            return " Inputs are captured with `inputs=True`."
        if close or known.capture is not None:
            return ""
        return " The outputs of modules are captured with `capture=True`."

    return UnknownKeyError(f"{name!r} is no name here. {listed(name, there, hint=hint)}")


def from_the_end(name: str, there: Iterable[str]) -> str:
    """A name in which negative indices count from the end of a list: `blocks/-1/attn`
    is `blocks/3/attn` if `blocks/3` is the last one. Where there is no list, they stay
    as they are."""
    parts, there = name.split("/"), [x.split("/") for x in there]
    for k, part in enumerate(parts):
        digits = part.split(".")[0].removeprefix("-")
        if not (part.startswith("-") and digits.isdecimal()):
            continue
        before, rest = parts[:k], part[1 + len(digits) :]
        siblings = [x[k].split(".")[0] for x in there if x[:k] == before and x[k:]]
        n = max((int(x) + 1 for x in siblings if x.isdecimal()), default=0)
        if int(digits) <= n and int(digits):
            parts[k] = f"{n - int(digits)}{rest}"
    return "/".join(parts)
