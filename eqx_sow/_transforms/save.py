"""`save_intermediates`."""

import dataclasses as dc
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import equinox as eqx

from .._errors import UnsupportedPrimitiveError
from .._mark.listening import listening
from .._mark.static import Const, Same
from .._modules.find import Marking
from .._names import check_known
from .._values import spec as _spec
from .._values.assemble import assemble, labels
from .._values.intermediates import in_order, Intermediates
from .._values.reduce import folds, Reducer
from .._walk.handler import Given, Taken
from . import options as opt
from .collect import Collect, reductions
from .program import Program, trace
from .transformed import Transformed, wrap


@dc.dataclass(frozen=True)
class _Options:
    names: tuple[Any, ...] | None
    modes: tuple[str, ...] | None
    spec: Mapping[str, Any] | None
    marking: Marking


class _SaveIntermediates(Transformed):
    # Reducers and transforms may hold arrays.
    _fn: Callable
    _reduce: Any
    _transform: Any
    _options: Const = eqx.field(static=True)

    def _run(self, args, kwargs):
        options: _Options = self._options.value
        outer = listening.value is not None
        program = trace(self._fn, args, kwargs, options.marking)
        collect = Collect(
            tag=options.marking.tag,
            names=Const(options.names),
            modes=options.modes,
            reduce=Same(self._reduce),
            transform=Same(self._transform),
            outer=outer,
        )
        carry: Any = {}
        if any(map(folds, opt.each(self._reduce))):
            survey = program.survey(dc.replace(collect, survey=True))
            collect, carry = reductions(collect, survey)
        outs, taken = program.evaluate(collect, Given(carry), *program.inputs)
        _check_names(self, taken.rest.seen)
        for name, message in taken.rest.hidden:
            if name not in taken.rest.seen:
                raise UnsupportedPrimitiveError(message)
        program.check_called(taken.rest.seen)
        _check_second_derivatives(program, collect, taken)
        intermediates = program.unmark(assemble(collect, taken, tuple(carry)))
        intermediates = Intermediates(
            {name: in_order(modes) for name, modes in intermediates.items()}
        )
        _spec.check(taken.rest.checks, options.spec, intermediates)
        return program.output(outs), intermediates


def _check_second_derivatives(program: Program, collect: Collect, taken: Taken) -> None:
    keys = [*taken.carry, *(e.site.key for e in taken.rest.entries)]
    if any(orders[:1] > (0,) for _, _, orders in keys):
        program.check_recomputed(
            [
                key
                for key, mode in labels(keys).items()
                if mode.startswith("primal.") and "cotangent" in mode
                if collect.has(mode)
            ],
            collect.tag,
            'Leave this derivative out, `modes=("primal", "cotangent")`, or take the '
            "`jax.checkpoint` away.",
        )


def _check_names(self: _SaveIntermediates, seen: Sequence[str]) -> None:
    options: _Options = self._options.value
    check_known("save_intermediates(..., names=...)", options.names, seen)
    for name, option in (
        ("reduce", self._reduce),
        ("transform", self._transform),
        ("spec", options.spec),
    ):
        if isinstance(option, Mapping):
            check_known(f"save_intermediates(..., {name}=...)", option, seen)


_unset: Any = object()


def save_intermediates(
    fn: Callable = _unset,
    *,
    tag: Hashable = "intermediates",
    names: str | Sequence[str] | Callable[[str], bool] | None = None,
    modes: str | Sequence[str] | None = None,
    capture: Any = None,
    methods: str | Sequence[str] = ("__call__",),
    inputs: bool = False,
    scope: bool = False,
    reduce: Reducer | Mapping[str, Reducer] | None = None,
    transform: Callable | Mapping[str, Callable] | None = None,
    spec: Mapping[str, Any] | None = None,
) -> Callable:
    """Makes a function return what is sown in it, along with its output.

    The law: the first output of `save_intermediates(fn)` is that of `fn`, always; so
    are its gradients.

    **Arguments:**

    - `fn`: a function, a model, or a transformed function such as
        `eqx.filter_grad(loss)` or `eqx.filter_jit(model)`. Without it this returns a
        decorator.
    - `tag`: only sows with this tag, any hashable.
    - `names`: what to capture: a name, a glob, a sequence of them, or a function of the
        name. Nothing else is stored or computed. In a glob, `*` matches any characters.
    - `modes`: what to capture of each, `"primal"`, `"tangent"`, `"cotangent"`, or
        second-order ones joined by a dot (`"cotangent.tangent"`); one or a sequence.
    - `capture`: marks the output of submodules of a model that nobody edits: `True` for
        every module with a `__call__`, a class or a tuple of classes, or a function
        `(path, module) -> bool`. The name is the path of the module, `layers/0`; under
        an argument of a plain function it begins with the name of the parameter,
        `model/layers/0`. The module that is `fn` itself has the name `.`.
    - `methods`: which methods to mark. Those other than `__call__` have the name
        `layers/0.encode`.
    - `inputs`: also mark what was passed in, under `layers/0.inputs`, as a tuple
        `(args, kwargs)`.
    - `scope`: put the path of the module in which a sow is before its name.
    - `reduce`: how several executions of a name combine: [`eqx_sow.Append`][],
        [`eqx_sow.Last`][], [`eqx_sow.Fold`][] or [`eqx_sow.Buffer`][], for all names
        or as a dict of names or globs.
    - `transform`: a function of the value, or a dict of names or globs to functions,
        that is applied where the value is sown: within a loop only its result is
        stacked.
    - `spec`: a dict of names or globs to jaxtyping annotations of what comes back: of
        the primal, or of the first mode if there is none. All annotations in one call
        share their axis names.

    **Returns:**

    A function with the signature of `fn`, that returns `(out, intermediates)`.
    `intermediates[name][mode]` is the value, an [`eqx_sow.Intermediates`][], in order
    of execution:

    - in a scan, a `fori_loop` with static bounds or `lax.map`, with a leading axis for
      each loop, entry `i` from iteration `i`;
    - under `vmap`, with a leading axis for each `vmap` that it varies over, outermost
      first;
    - in a `cond` or a `while_loop`, of the branch that ran or the last iteration; zeros
      if there was none. `intermediates[name]["count"]`, an int32, says how often it
      ran.

    Like `eqx.filter_vmap`, what is returned is a PyTree whose leaves are those of `fn`,
    and it can be used as a decorator of methods.

    **Raises:**

    `TypeError` and `ValueError` if an option is not of the kind above. When called:

    - [`eqx_sow.DuplicateSowError`][] if a name is sown twice, and no reducer says what
        the values become;
    - [`eqx_sow.UnknownSowError`][] if an option selects nothing;
    - [`eqx_sow.SowTypeError`][] if a value does not fit its annotation;
    - [`eqx_sow.UnsupportedPrimitiveError`][] if a value cannot be had where it is sown;
    - [`eqx_sow.SowError`][] if values of one name cannot become one.

    !!! example

        ```python
        import equinox as eqx
        import eqx_sow
        import jax
        import jax.numpy as jnp

        model = eqx.nn.MLP(2, 1, 8, 2, key=jax.random.key(0))

        @eqx.filter_grad
        def grad(model, x):
            return model(x)[0] ** 2

        saved = eqx_sow.save_intermediates(grad, capture=eqx.nn.Linear)
        grads, intermediates = saved(model, jnp.ones(2))
        intermediates["model/layers/0"]["primal"].shape  # (8,)
        intermediates["model/layers/0"]["cotangent"].shape  # (8,)
        ```
    """
    options: dict[str, Any] = dict(
        tag=tag,
        names=names,
        modes=modes,
        capture=capture,
        methods=methods,
        inputs=inputs,
        scope=scope,
        reduce=reduce,
        transform=transform,
        spec=spec,
    )
    if fn is _unset:
        return lambda fn: save_intermediates(fn, **options)
    call = "save_intermediates"
    marking = opt.as_marking(call, fn, tag, capture, methods, inputs, scope)
    opt.check_reduce(call, reduce)
    opt.check_transform(call, transform)
    opt.check_spec(call, spec)
    names = opt.as_names(call, names)
    static = _Options(names, opt.as_modes(call, modes), spec, marking)
    return wrap(_SaveIntermediates, fn, reduce, transform, Const(static))
