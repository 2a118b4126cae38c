"""`register_rule`: primitives of other libraries, as JAX programs."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.extend.core as jexc
import jax.numpy as jnp

from .._errors import SowError
from .._frames import api_boundary
from .._mark.listening import listening
from .sows import has_sow, jaxprs_in


_Rule = TypeVar("_Rule", bound=Callable)


@api_boundary
def register_rule(primitive: jexc.Primitive) -> Callable[[_Rule], _Rule]:
    """Teaches eqx_sow to capture inside your own higher-order primitive.

    Without a rule, a mark in a jaxpr among the parameters of the primitive raises
    [`eqx_sow.UnsupportedPrimitiveError`][].

    While [`eqx_sow.save_intermediates`][] or another transformation traces a program,
    an equation of this primitive with a mark inside is replaced by the program of the
    rule. So reducers, axes, planted values, derivatives and batching work inside it as
    in any JAX program. JAX's own rules for the primitive are not used: if its
    derivative is not the derivative of the program, give the program a `jax.custom_jvp`
    or `jax.custom_vjp` rule. Without a mark inside, and outside eqx_sow, the primitive
    stays as it is.

    **Arguments:**

    - `primitive`: the `jax.extend.core.Primitive`.

    **Returns:**

    A decorator for a function `rule(*args, **params) -> outs`, which it returns
    unchanged. The rule does what the primitive does: it takes one array for each
    operand, and the parameters of the equation by keyword, and returns one array for
    each output, of the same shapes and dtypes. It is written with public JAX, such as
    `jax.lax.scan`, `jax.lax.cond` and `jax.extend.core.jaxpr_as_fun(params["jaxpr"])`,
    and runs the jaxpr as many times as the primitive does.

    **Raises:**

    `TypeError` if `primitive` is not a `Primitive`, or `rule` not a function.
    [`eqx_sow.SowError`][], when the rule is used, if its outputs differ from those of
    the primitive in number, shape or dtype.

    !!! example

        ```python
        import eqx_sow
        import jax
        from jax.extend.core import jaxpr_as_fun, Primitive

        repeat_p = Primitive("repeat")  # runs `jaxpr` on its own output, `n` times
        repeat_p.multiple_results = True
        repeat_p.def_effectful_abstract_eval(
            lambda x, *, jaxpr, n: ([x], set(jaxpr.effects))
        )

        @eqx_sow.register_rule(repeat_p)
        def _repeat(x, *, jaxpr, n):
            body = jaxpr_as_fun(jaxpr)
            return [jax.lax.fori_loop(0, n, lambda _, x: body(x)[0], x)]

        def fn(x):
            step = jax.make_jaxpr(lambda x: eqx_sow.sow(x / 2, "half"))(x)
            return repeat_p.bind(x, jaxpr=step, n=3)[0]

        _, intermediates = eqx_sow.save_intermediates(fn)(8.0)
        intermediates["half"]["primal"]  # [4. 2. 1.]
        ```
    """
    if not isinstance(primitive, jexc.Primitive):
        raise TypeError(
            "`eqx_sow.register_rule(primitive)` takes a `jax.extend.core.Primitive`, "
            f"not {primitive!r}."
        )
    # A second registration goes in the place of the first.
    bind = getattr(primitive.bind, "__wrapped__", primitive.bind)

    @api_boundary
    def register(rule: _Rule) -> _Rule:
        if not callable(rule):
            raise TypeError(
                f"`eqx_sow.register_rule({primitive})` is a decorator of a function "
                f"`rule(*args, **params) -> outs`, not of {rule!r}."
            )

        # Before JAX batches or differentiates it: afterwards it could not be told how
        # many loops are around a mark in there.
        @ft.wraps(bind)
        def bind_or_run(*args, **params):
            if listening.value is None or not any(map(has_sow, jaxprs_in(params))):
                return bind(*args, **params)
            return _run(primitive, rule, args, params)

        primitive.bind = bind_or_run
        return rule

    return register


def _run(primitive: Any, rule: Callable, args: Sequence[Any], params: dict) -> Any:
    outs = rule(*args, **params)
    outs = list(outs) if primitive.multiple_results else [outs]
    want, _ = primitive.abstract_eval(*map(jax.typeof, args), **params)
    want = [a.str_short() for a in (want if primitive.multiple_results else [want])]
    got = [jax.typeof(x).str_short() for x in map(jnp.asarray, outs)]
    if got != want:
        raise SowError(
            f"The rule that `eqx_sow.register_rule` was given for `{primitive}` "
            f"returned {got}, where the primitive returns {want}. Return one array for "
            "each output of the primitive."
        )
    return outs if primitive.multiple_results else outs[0]
