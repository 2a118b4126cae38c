"""NumPy arrays in what is marked, and what is planted in their place.

The program goes on with a NumPy array as it is, so that an index or a size in Python
stays one. If that array is planted there, nothing is to be done. If anything else is,
or if the numbers in it are not known, the program is traced once more, and goes on with
a JAX array there (`Listening.replaced`).
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._errors import SowError
from .._mark.site import Site
from .._mark.static import numbers_in, OPERAND
from .._values.axes import aligned
from .._values.entry import running
from .._walk.handler import Given


class NotFixed(Exception):
    """Something else is planted in the place of these arrays of NumPy's. The program
    has to be traced again, where they are arrays of JAX's."""

    def __init__(self):
        # For each `Fixed.mark`, what messages say of the mark.
        self.found: dict[Any, str] = {}
        # Those of which the planted value is what was captured, if the mark runs only
        # where that is not zero.
        self.captured: set[Any] = set()
        # Whether that may be because the numbers in a planted value are not known.
        self.traced = False

    def check(self, left: Collection[Any] = ()) -> None:
        """Raises, unless it is all `left` as it is."""
        if not self.found.keys() <= set(left):
            raise self

    def add(
        self,
        places: Sequence[Site],
        value: Any,
        old: Sequence[Any] | None = None,
        *,
        counted: bool = False,
    ) -> "NotFixed":
        """With those at these places, of one name, that are not what is in `value`,
        which is planted there. `old` are the arrays of what a function was called with,
        that returned it. With `counted`, the mark may not have run."""
        # As the user gave them: under a `jit`, JAX makes a tracer of an array whose
        # numbers are known.
        leaves = zip(jtu.tree_leaves(value), places[0].form.leaves)
        new = [x for x, leaf in leaves if leaf is OPERAND]
        for site, (i, array, mark) in ((s, x) for s in places for x in s.fixed):
            if old is not None and new[i] is old[i]:
                continue
            numbers = numbers_in(new[i])
            self.traced |= numbers is None and old is None
            if numbers is not None:
                one = np.asarray(array.value).astype(numbers.dtype)
                if _consists_of(numbers, [one]):
                    continue
                if counted and _consists_of(numbers, [one, np.zeros_like(one)]):
                    self.captured.add(mark)
            self.found[mark] = site.said
        return self


def _consists_of(x: Any, several: Sequence[Any]) -> bool:
    """Whether an array is one of several, or has these along more axes in front. Bit by
    bit: `0.0` and `-0.0` differ, and NaN is equal to itself."""
    size = several[0].size
    each = {row.tobytes() for row in x.reshape(-1, size)} if x.size else set()
    return each <= {one.tobytes() for one in several}


NOT_PLANTED = "not planted"


def with_left(
    left: Collection[Any],
    given: Given,
    site: Site,
    guards: Sequence[Any],
    value: Sequence[Any],
) -> Given:
    """For a mark with this planted value. `left` are the `Fixed.mark`s of NumPy arrays
    that the program keeps although zeros may be planted there, which were captured
    where the mark did not run. `Given.carry` says whether it runs, as `NOT_PLANTED`."""
    if not left:
        return given
    if NOT_PLANTED not in given.carry:
        raise SowError(
            f"`plant`: {site.said} has a NumPy array that the program needs while "
            "it is traced. It did not run where the planted zeros were captured, "
            "and whether it runs now cannot be checked in a `jax.shard_map`. Plant "
            "the NumPy array that is marked there."
        )
    wrong, n = given.carry[NOT_PLANTED], len(site.axes)
    run, _ = running(site, guards)
    for i, array, mark in site.fixed:
        if mark in left:
            x = aligned(value[i], site.varies[len(guards) + i])
            one = jnp.asarray(array.value)
            one = one.reshape((1,) * n + one.shape)
            differs = (x != one) & ~((x != x) & (one != one))
            differs = differs.any(range(n, x.ndim))
            wrong |= jnp.any(differs if run is None else differs & run)
    return given._replace(carry={**given.carry, NOT_PLANTED: wrong})
