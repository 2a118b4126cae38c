"""`save_intermediates`."""

import functools as ft
import inspect
import types
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, ClassVar, overload, ParamSpec, Protocol, TypeVar, Unpack

from .._frames import api_boundary
from .._handlers.collect import in_order, numbers_of_runs, Taking
from .._results.intermediates import Intermediates
from .._values import spec as _spec
from .._values.assemble import assemble
from .._values.reduce import Reducer
from .._walk.handler import Given
from .options import Saving
from .program import Program
from .transformed import Function, of_function, Transformed, wrap


def _pair(annotation: Any) -> Any:
    """The annotation of what comes back, from that of what the function returns."""
    known = annotation is not inspect.Signature.empty
    return tuple[annotation if known else Any, Intermediates]


class _SaveIntermediates(Transformed):
    _call: ClassVar[str] = "save_intermediates"

    # For `help`, and for libraries that check types at run time. The class has none.
    @types.DynamicClassAttribute
    def __signature__(self):
        signature = inspect.signature(self._fn)
        returns = _pair(signature.return_annotation)
        return signature.replace(return_annotation=returns)

    def _result(self, program: Program) -> tuple[Any, Intermediates]:
        options, asked = program.options, program.asked
        by_name = program.by_name(
            self._call,
            reduce=self._others["reduce"],
            transform=self._others["transform"],
            spec=options.spec or {},
        )
        taking = Taking.of(
            asked, options.modes, by_name["reduce"], by_name["transform"]
        )
        runs = program.runs(taking.with_several_runs(asked), taking.has_rows)
        taking.check_iterations(asked, runs)
        seen = list(filter(program.is_seen, asked))
        carry = taking.started(
            seen, lambda: program.survey(taking.for_each_place, seen, runs)
        )
        plan, slots = taking.plan(seen, runs)
        walk = program.collect(taking), plan, Given(carry)
        if error := taking.duplicate(seen, runs):
            # What no rule can do is said first.
            program.types_of(*walk)
            raise error
        modes = [x.site.mode for x in asked]
        mode_of = program.wanted(self._call, [x.key for x in slots], modes)
        outs, taken = program.evaluate(*walk)
        program.warn_unmarked(self._call, self._fn)
        intermediates = assemble(
            [*taking.results(carry, taken), *taken.entries],
            in_order(asked, runs),
            taking.reducer,
            mode_of,
            program.known,
            numbers_of_runs(slots),
        )
        marks = [(x.site, x.mark) for x in asked if x.site.spec]
        annotated = [(site, mark.holder or mark.eqns[-1]) for site, mark in marks]
        _spec.check(annotated, by_name["spec"], intermediates)
        return program.output(outs), intermediates


_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Decorator(Protocol):
    def __call__(
        self, fn: Callable[_P, _T], /
    ) -> Function[_P, tuple[_T, Intermediates]]: ...


@overload
def save_intermediates(
    fn: Callable[_P, _T], **options: Unpack[Saving]
) -> Function[_P, tuple[_T, Intermediates]]: ...


@overload
def save_intermediates(
    **options: Unpack[Saving],
) -> _Decorator: ...


@api_boundary
@of_function
def save_intermediates(
    fn: Any = ...,
    *,
    tag: Hashable = "intermediates",
    names: str | Sequence[str] | Callable[[str], bool] | None = None,
    modes: str | Sequence[str] | None = None,
    capture: bool | type | Collection[type | Callable] | Callable | None = None,
    methods: str | Sequence[str] = ("__call__",),
    inputs: bool = False,
    calls: bool = False,
    scope: bool = False,
    reduce: Reducer | Mapping[str, Reducer] | None = None,
    transform: Callable | Mapping[str, Callable] | None = None,
    spec: Mapping[str, Any] | None = None,
) -> Callable:
    """Makes a function also return the values that are marked in it.

    Mark values with [`eqx_sow.sow`][], or the outputs of modules with `capture`. The
    returned function gives `(out, intermediates)`: the output of `fn`, with the same
    gradients, and the marked values.

    **Arguments:**

    - `fn`: a function, a model, or a transformed function such as
        `eqx.filter_grad(loss)` or `eqx.filter_jit(model)`. If you leave it out, you get
        a decorator.
    - `tag`: capture only the marks with this tag, which is any hashable object.
    - `names`: what to capture: a name, a glob, a sequence of them, or a function of the
        name. Nothing else is stored or computed. In a glob, `*`, `?` and `[...]` stop
        at a slash, and a part `**` stands for any number of parts, or none:
        `"blocks/*"` is the blocks, `"blocks/*/attn"` the attention of each, `"**/attn"`
        every attention at any depth, and `"blocks/**"` the blocks with everything in
        them. You can leave out where the model is (`"layers/0"` for `"model/layers/0"`)
        if only one model fits. `"layers/-1"` is the last layer, and comes back under
        that name. `"h/3"` is iteration 3 of the loop around `h`, without an axis for
        that loop, and `"h/3/0"` is iteration 0 of the loop inside. A scan over a stack
        of layers has the names of a list: `"blocks/2/attn"` is layer 2, and
        `"blocks/*/attn"` is all of them, in one value with a leading axis.
    - `modes`: what to capture of each: `"primal"` (the value), `"cotangent"` (the
        gradient with respect to it), `"tangent"` (its directional derivative), or
        second-order modes joined by a dot (`"cotangent.tangent"`); one or a sequence.
    - `capture`: also mark the outputs of submodules, without editing the model: `True`
        for every module with a `__call__`; a class; a JAX function such as
        `jax.nn.softmax`, a function made by `jax.jit` or `eqx.filter_jit`, or one with
        a custom derivative rule; a sequence of these; or a predicate `(path, module) ->
        bool`, which gets the module with shapes in place of its arrays. The name of a
        module is its path, `layers/0`; if the model is an argument of a plain function,
        the path begins with the parameter, `model/layers/0`. The module that is `fn`
        itself has the name `.`.
    - `methods`: which methods to mark. A method other than `__call__` has a name such
        as `layers/0.encode`.
    - `inputs`: also mark what a captured module or function was called with, as a
        tuple `(args, kwargs)` under `layers/0.inputs`.
    - `calls`: also mark each captured call as a whole, after it has run, as an
        [`eqx_sow.Call`][] `(args, kwargs, out)` under `layers/0.call`.
    - `scope`: begin each name with the path of the module that contains the mark.
    - `reduce`: how to combine several executions of a name: a reducer, such as
        [`eqx_sow.Last`][], for all names, or a dict from names or globs to reducers.
    - `transform`: a function of the value, or a dict of names or globs to functions,
        that is applied where the value is marked, so that a loop stacks only its
        results. Under `vmap` it receives the value of one example; around it,
        [`eqx_sow.batched`][] passes the whole batch. A `sow` inside it is not captured.
    - `spec`: a dict of names or globs to jaxtyping annotations of what comes back (of
        the primal, or of the first mode if there is no primal). All annotations in one
        call share their axis names.

    **Returns:**

    A function with the signature of `fn`, which returns `(out, intermediates)`. The
    values are at `intermediates[name][mode]`; `intermediates` is an
    [`eqx_sow.Intermediates`][], whose names are in order of execution. A value is the
    PyTree that was marked, with its dtypes (a tangent or cotangent has the dtype of the
    primal; for integers, `float0`) and its shapes, and in addition

    - in a scan, a `fori_loop` with static bounds or `lax.map`: a leading axis for each
        loop, entry `i` from iteration `i`;
    - under `vmap`: a leading axis for each `vmap` that it varies over, outermost first;
    - in a `cond` or a `while_loop`: `intermediates[name]["count"]`, an int32 that says
        how often the mark ran. The value comes from the branch that ran, or from the
        last iteration; zeros if there was none;
    - for a captured module or function that runs several times: a tuple with one entry
        for each run.

    The function also has three methods, with the same arguments or
    `jax.ShapeDtypeStruct`s in place of arrays:

    - `.eval_shape(...)` returns the shapes of `(out, intermediates)` without compiling
        or running anything;
    - `.lower(...)` and `.trace(...)` are as for `jax.jit`, if `fn` is made by `jax.jit`
        or `eqx.filter_jit`.

    Like the result of `eqx.filter_vmap`, the function is a PyTree with the leaves of
    `fn`. You can decorate methods with `save_intermediates`.

    **Raises:**

    `TypeError` and `ValueError` if an option is not of the kind above. When called:

    - [`eqx_sow.DuplicateSowError`][] if a name of `sow` marks several places, and no
        reducer says how to combine the values;
    - [`eqx_sow.UnknownSowError`][] if an option selects nothing;
    - [`eqx_sow.SowTypeError`][] if a value does not match its annotation, or contains
        an object that is not a PyTree but holds traced arrays;
    - [`eqx_sow.UnsupportedPrimitiveError`][] if a value cannot be captured where it is
        marked;
    - [`eqx_sow.SowError`][] if values of one name cannot be combined.

    You get a warning, once for each line of your code, if nothing in `fn` is marked.

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

        # Which names are there? Nothing is computed for this.
        out, shapes = saved.eval_shape(model, jnp.ones(2))
        list(shapes)  # ["model/layers/0", "model/layers/1", "model/layers/2"]
        ```
    """
    options = {k: v for k, v in locals().items() if k != "fn"}
    if fn is ...:
        return ft.partial(save_intermediates, **options)
    saved = wrap(_SaveIntermediates, fn, options)
    hints = getattr(saved, "__annotations__", {})
    if isinstance(hints, dict) and "return" in hints:
        hints = {**hints, "return": _pair(hints["return"])}
        object.__setattr__(saved, "__annotations__", hints)
    return saved
