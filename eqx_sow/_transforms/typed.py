"""What type checkers know of what `save_intermediates`, `plant` and `tap` return."""

from typing import Any, Concatenate, overload, ParamSpec, Protocol, TypeVar

from .transformed import Stage


_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_T_co = TypeVar("_T_co", covariant=True)


class Function(Protocol[_P, _T_co]):
    """A function with the parameters of `fn`, which can be a method. See
    `Transformed`."""

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _T_co: ...

    # What stands for an array has the type of one.
    def eval_shape(self, *args: Any, **kwargs: Any) -> _T_co: ...

    def lower(self, *args: Any, **kwargs: Any) -> Stage: ...

    def trace(self, *args: Any, **kwargs: Any) -> Stage: ...

    @overload
    def __get__(self, instance: None, owner: Any) -> "Function[_P, _T_co]": ...

    @overload
    def __get__(
        self: "Function[Concatenate[Any, _Q], _T_co]",
        instance: object,
        owner: Any,
    ) -> "Function[_Q, _T_co]": ...
