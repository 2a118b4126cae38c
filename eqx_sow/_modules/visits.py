"""What `naming.py` knows of the calls and the marks of a program."""

import dataclasses as dc
from collections.abc import Sequence
from typing import NamedTuple

from .._mark.calls import NotedCall, Path
from .._mark.site import Site
from .._walk.sows import Way
from .cuts import Cut
from .sources import Origin


@dc.dataclass(eq=False)
class Visit:
    """A call of a module, each time that the pass over the program comes to it: a
    jitted function that is called three times has one `NotedCall` inside, with three
    visits, which may be of three modules."""

    call: NotedCall
    # The operands of its edge.
    arrays: Sequence[Origin]
    # The modules whose methods are running, from outside in.
    running: "list[Visit]"
    # The rest is known once the pass is over. For each place to which arrays lead, how
    # well it fits: (computations between, -arrays that lead there). Smaller is better.
    fits: dict[Path, tuple[int, int]] = dc.field(default_factory=dict)
    # Whether some of the arrays were made of others, rather than changed.
    is_made: bool = False
    # For each of these places, the constant indices that the module was taken out by.
    cuts: dict[Path, tuple[Cut, ...]] = dc.field(default_factory=dict)
    # Where the module is. If that is not known, the first key is the name of a class:
    # `("MLP#1", "layers", "0")`.
    path: Path | None = None
    # Which entries of stacks the module is in, from left to right in the path.
    indices: "tuple[Index, ...]" = ()

    @property
    def name(self) -> Path:
        """The path with the indices: `blocks/2/attn` of `blocks/attn`."""
        assert self.path is not None
        name = self.path
        for index in reversed(self.indices):
            name = (*name[: index.at], str(index.cut.i), *name[index.at :])
        return name


class Index(NamedTuple):
    """An entry of a stack: its index stands behind `at` keys of the path."""

    at: int
    cut: Cut


class Mark(NamedTuple):
    """A mark, and the calls that it is in, or is the output of. There may be several:
    if a branch decides of which call a derivative is. `scans`: the ways to the scans
    around it; for a derivative, around its primal, since a scan of the backward pass
    need not go over the arrays themselves."""

    site: Site
    visits: list[Visit]
    scans: list[Way]
