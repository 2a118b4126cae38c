"""What is static about a sow: its name, its leaves, and the axes it was given."""

import itertools as it
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from .._names import join
from .calls import Note
from .static import Const


class Axis(NamedTuple):
    """A leading axis of a sow, which a vmap or a loop gave to it.

    `lane` is true if it is that of a vmap. `loops` is how many loops run between the
    vmap and the sow: the axis belongs outside of theirs. `has` says which operands
    really have the axis; the others are the same all along it. An axis of a `shard_map`
    has the name of the `mesh` axis. `spec` says over which explicit mesh axes it is
    sharded.
    """

    size: int
    has: tuple[bool, ...]
    loops: int = 0
    lane: bool = True
    mesh: Hashable = None
    spec: Hashable = None

    @property
    def kind(self) -> Hashable:
        return self.size, self.loops, self.lane, self.mesh


Guards = tuple[tuple[Any, int, int], ...]
# The same, each with where the value of its operand is made. A cond in a function that
# is called twice is told apart by it.
Cases = tuple[tuple[Any, int, int, Any], ...]


class Label(NamedTuple):
    """What a sow is to a transformation. With a `depth` only those that have no more of
    them around see it: it is the mark of a module, made by the one that has so many,
    itself included.

    `after` says, for each loop around the sow from outside in, where in the name the
    index of an iteration stands: after so many segments, or at the end (`None`, as for
    loops that `after` does not reach to). A scan over the layers of a stack at `blocks`
    gives `blocks/attn` an `after` of `(1,)`: its layer 2 is `blocks/2/attn`, as if the
    layers were a list. Iteration 2 of a loop over `h` is `h/2`.
    """

    name: str
    tag: Hashable
    depth: int = 0
    after: tuple[int | None, ...] = ()

    def in_scope(self, scope: str) -> "Label":
        n = len(scope.split("/")) if scope else 0
        after = tuple(None if k is None else n + k for k in self.after)
        return self._replace(name=join(scope, self.name), after=after)


# With a tag that no transformation asks for.
_OF_NOBODY = Label("", Const(object()))


class Site(NamedTuple):
    """The static part of a sow: the single parameter of its equation.

    `bind` in `sow.py` makes it. Differentiation, batching and the rules for loops and
    branches rewrite it. Handlers read it.
    """

    # --- what was sown, and for whom ---
    # What the sow is to each transformation around that has a name for it, from inside
    # out; but first comes that of the transformation at hand.
    labels: tuple[Label, ...]
    # The value: its arrays are operands of the equation (`OPERAND` among the leaves),
    # all other leaves are here.
    treedef: Const
    leaves: tuple[Any, ...]

    # --- differentiation ---
    # `()` for a primal, `("tangent",)`, `("cotangent", "tangent")`, ...
    modes: tuple[str, ...] = ()
    # Of each of `modes`, how many derivatives of the same value came before that one:
    # the two cotangents in `grad(grad(f))` are told apart by it.
    orders: tuple[int, ...] = ()
    # How many derivatives of it there are already.
    differentiated: int = 0

    # --- where it runs ---
    axes: tuple[Axis, ...] = ()
    # For each there is one more operand, before those of the value: a boolean that says
    # whether the sow really runs, as in a loop under a batched predicate, or the index
    # of the branch that does. A guard then says which cond, which of its branches the
    # sow is in, and how many there are.
    guards: Guards = ()
    # There should be more guards: JAX calls derivative rules when it is too late for
    # these.
    unguarded: bool = False

    # --- for checks and messages ---
    spec: Const | None = None
    where: str = ""

    # --- which execution it is: see `_walk/executions.py` ---
    # An object of its own for each call of `sow`, which its derivatives share.
    origin: Any = None
    # The rest is only known to the transformation at hand, and only if it needs to
    # know. The executions that the sow is, or is a derivative of, by the ways to their
    # equations; there are several if it is in several branches.
    of: frozenset[tuple[int, ...]] = frozenset()
    # Whether it is a repetition of these, which is not an execution of its own. `None`
    # if that cannot be told.
    again: bool | None = False
    # Whether it is a primal in a backward pass.
    backward: bool = False
    # Its guards, with which run of a cond is meant.
    cases: Cases = ()

    # Which of the arrays the program does not take from the sow: NumPy arrays, which
    # stay what they are. Guards do not count.
    fixed: tuple[int, ...] = ()

    # --- calls that `capture=` marks ---
    note: Note | None = None
    # Of the transformations around that have yet to give it a label, the depth and the
    # tag, from inside out. They can once they have traced their program, and see where
    # the arrays of the module come from.
    waiting: tuple[tuple[int, Hashable], ...] = ()
    # Whether its name begins with the path of the module around.
    scoped: bool = False

    @property
    def label(self) -> Label:
        """What it is to the transformation at hand."""
        if self.labels:
            return self.labels[0]
        if self.note is not None and self.waiting:
            # In an equation that cannot be looked into, for a message.
            return Label(repr(self.note.call), self.waiting[0][1])
        return _OF_NOBODY

    @property
    def name(self) -> str:
        return self.label.name

    @property
    def tag(self) -> Hashable:
        return self.label.tag

    def seen_from(self, depth: int, tag: Hashable) -> "Site":
        """The sow as a transformation sees it, before it has asked anything."""
        if self.of or self.cases:
            self = self._replace(of=frozenset(), again=False, backward=False, cases=())
        if len(self.labels) == 1 and self.labels[0].depth <= depth:
            return self
        labels = [x for x in self.labels if x.depth <= depth]
        labels = tuple(sorted(labels, key=lambda x: x.tag != tag)) or (_OF_NOBODY,)
        return self if labels == self.labels else self._replace(labels=labels)

    def without(self, tag: Hashable) -> "Site | None":
        """What is left to others by a transformation that takes this tag."""
        left = tuple(x for x in self.labels if x.tag != tag)
        waiting = tuple(x for x in self.waiting if x[1] != tag)
        if not (left or waiting):
            return None
        return self._replace(labels=left or (_OF_NOBODY,), waiting=waiting)

    def for_all(self) -> "Site":
        """The sow, also seen by those further out that have no label for it."""
        return self._replace(labels=(*self.labels, Label(self.name, self.tag)))

    def in_scope(self, scope: str) -> "Site":
        return self._replace(labels=tuple(x.in_scope(scope) for x in self.labels))

    @property
    def mode(self) -> str:
        return ".".join(self.modes) if self.modes else "primal"

    @property
    def key(self) -> tuple[str, str, tuple[int, ...]]:
        return self.name, self.mode, self.orders

    def __repr__(self):
        return f"{self.name}:{self.mode}"

    def has(self, i: int) -> tuple[bool, ...]:
        """Which of the axes operand `i` has."""
        return tuple(a.has[i] for a in self.axes)

    def shape(self, i: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that the code at the sow sees, from that of operand `i`."""
        return tuple(shape[sum(self.has(i)) :])


def with_has(axes: Sequence[Axis], has: Sequence[Sequence[bool]]) -> tuple[Axis, ...]:
    return tuple(a._replace(has=tuple(h[i] for h in has)) for i, a in enumerate(axes))


def runs_apart(site: Site) -> bool:
    """Whether the sow is in a loop that JAX moved out of another one."""
    return any(not a.lane and a.loops for a in site.axes)


def out_of_loop(
    axes: Sequence[Axis], loop: Axis | None
) -> tuple[int, tuple[Axis, ...]]:
    """The axes outside of one more loop, which has the axis `loop`: inside the axes
    whose vmap is around the loop. Also how many those are. `loop.loops` is how many
    loops there still are within this one."""
    within = 0 if loop is None else loop.loops
    around = list(it.takewhile(lambda a: a.loops > within, axes))
    n = len(around)
    around = [a._replace(loops=a.loops - 1) for a in around]
    return n, (*around, *([] if loop is None else [loop]), *axes[n:])
