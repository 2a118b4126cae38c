"""What is static about a mark: its names, its leaves, its axes, and more.

What has to do with a backward pass goes by one of three words. `in_backward_pass`: an
equation, or the mark of a primal, is part of one, by what JAX writes on name stacks.
`flows_backward`: a value runs through loops from their end, and is a total over lanes
that share it, as a cotangent does; the cotangent of a cotangent does not. `is_vjp`:
JAX makes tangents that it will transpose, in its own word.
"""

import functools as ft
import itertools as it
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from .._names import join
from .calls import Note
from .static import Const, Form


class Axis(NamedTuple):
    """A leading axis of a mark, which a vmap or a loop gave to it. In

        jax.vmap(lambda x: lax.scan(lambda c, y: (c, sow(c + y, "h")), x, ys))(xs)

    the mark has an axis of the vmap, with one loop between. So in what comes back, the
    axis of the vmap stands before that of the scan.
    """

    size: int
    # How many loops run between the vmap and the mark.
    n_loops: int = 0
    # Whether it is the axis of a vmap.
    lane: bool = True
    # The name of the mesh axis, if it is the axis of a `shard_map`.
    mesh: Hashable = None
    # Over which explicit mesh axes it is sharded.
    spec: Hashable = None
    # Whether what the vmap came to was a cotangent, as in `vmap(grad(f))`. A cotangent
    # without the axis is then the same in each lane. In `grad(vmap(f))` it is their
    # total; and in `grad(vmap(grad(f)))`, so is the cotangent of a cotangent.
    flows_backward: bool = False
    # The `axis_name` and the `spmd_axis_name` of the vmap, for functions of the user's
    # that are called at the mark.
    name: Hashable = None
    spmd_name: Hashable = None

    @property
    def kind(self) -> Hashable:
        return self.size, self.n_loops, self.lane, self.mesh


class Guard(NamedTuple):
    """A cond, or a while loop, around a mark that a vmap made run for all lanes, with
    results that are thrown away for some of them.

    For each guard the mark has one more operand, before those of the value: the index
    of the branch that really runs, or for a loop, a boolean that says whether the lane
    still runs.
    """

    # An object for each cond, `None` for a loop.
    cond: Any = None
    # In which of its branches the mark is, and how many these are.
    branch: int = 1
    n_branches: int = 1


class Label(NamedTuple):
    """What a mark is called by one of the transformations around it.

    Of a call of `sow`, there is one label for all of them. A captured module gets a
    label from each transformation that captures it, which has a number of its own, its
    `depth`: how many transformations there are around the program that it traces,
    itself included. Its `name` is `None` until the whole program is there that this
    transformation traces, and shows where the arrays of the module come from.
    `Site.visible_to` says who sees which label.

    `places` says, for each loop around the mark from outside in, which part of the name
    is the index of an iteration; or `None`, as for loops that `places` does not reach
    to, if that stands at the end. A scan over the layers of a stack at `blocks` gives
    `blocks/*/attn` the `places` `(1,)`: its layer 2 is `blocks/2/attn`, as if the
    layers were a list. Iteration 2 of a loop over `h` is `h/2`.
    """

    name: Any
    tag: Hashable
    depth: int = 0
    places: tuple[int | None, ...] = ()

    def in_scope(self, scope: str) -> "Label":
        if self.name is None or not scope:
            return self
        n = scope.count("/") + 1
        places = tuple(None if k is None else n + k for k in self.places)
        return self._replace(name=join(scope, self.name), places=places)


# With a tag that no transformation asks for.
_NOT_WANTED = Label("", Const(object()))


class Fixed(NamedTuple):
    """An array of NumPy's among those that are marked. The program goes on with it, and
    not with what comes out of the mark, so that an index or a size in Python stays one.
    """

    # Which array of the value it is.
    i: int
    array: Const
    # What tells it from others, if the program is traced once more: the labels and the
    # line of the mark, and the index. See `Listening.replaced`.
    mark: tuple[Any, ...]


class _Fields(NamedTuple):
    # --- what was marked, and for whom ---
    # What the mark is called, by each transformation around that wants it, from inside
    # out; but first comes the label for the transformation at hand.
    labels: tuple[Label, ...]
    # The value without its arrays, which are operands of the equation.
    form: Form

    # The tags of which an inner transformation has taken this value, and left its
    # derivatives to others.
    taken: tuple[Hashable, ...] = ()

    # --- differentiation ---
    # `()` for a primal, `("tangent",)`, `("cotangent", "tangent")`, ...
    modes: tuple[str, ...] = ()
    # For each of `modes`, how many derivatives were taken of the same value before. In
    # `grad(grad(f))`, a value has two cotangents, with `(0,)` and `(1,)`.
    orders: tuple[int, ...] = ()
    # How many derivatives were taken of this value so far.
    differentiated: int = 0
    # One object per `jax.checkpoint` that was differentiated with the mark inside. The
    # recomputed copy shares it. Derivatives taken earlier do not carry it.
    splits: tuple[Any, ...] = ()

    # --- where it runs ---
    axes: tuple[Axis, ...] = ()
    # For each operand, which of these axes it has. It is the same all along the others.
    varies: tuple[tuple[bool, ...], ...] = ()
    # For each operand, the permutation that brings those of the axes that it has to the
    # front, in their order; `()` if they are there.
    permutations: tuple[tuple[int, ...], ...] = ()
    guards: tuple[Guard, ...] = ()
    # Whether there should be more guards. The mark came from a derivative rule, which
    # JAX traced after the vmap had changed the cond.
    unguarded: bool = False

    # --- for checks and messages ---
    spec: Const | None = None
    where: str = ""

    # The call of `sow`, which its derivatives share: a `SowCall`.
    origin: Any = None

    fixed: tuple[Fixed, ...] = ()

    # --- modules ---
    # Which call it is, if `capture=` marked it.
    note: Note | None = None
    # Whether, with `scope=True`, the names begin with the path of the module around.
    scoped: bool = False


class Site(_Fields):
    """The static part of a mark: the single parameter of its equation.

    `bind_sow` in `sow.py` makes it. Differentiation, batching and the rules for loops
    and branches rewrite it. Handlers read it.
    """

    # What follows is asked for many times, if one function is called many times. So it
    # is a class of its own: a `NamedTuple` has no place to keep it.
    @ft.cached_property
    def label(self) -> Label:
        """What it is called by the transformation at hand."""
        first = self.labels[0] if self.labels else _NOT_WANTED
        there = first.name is not None and first.tag not in self.taken
        return first if there else _NOT_WANTED

    @ft.cached_property
    def name(self) -> str:
        return self.label.name

    @property
    def tag(self) -> Hashable:
        return self.label.tag

    def called(self, labels: tuple[Label, ...]) -> "Site":
        """The mark with these labels."""
        return self if labels == self.labels else self._replace(labels=labels)

    def visible_to(self, depth: int, tag: Hashable) -> "Site":
        """The mark as a transformation sees it that has this depth and tag. It sees
        labels of `sow`, of its own, and of those around, but not what one inside has
        captured for itself. First come those with a name, of its own tag."""
        labels = [x for x in self.labels if x.depth <= depth]
        labels.sort(key=lambda x: (x.name is None, x.tag != tag))
        return self.called(tuple(labels))

    def without(self, tag: Hashable) -> "Site | None":
        """What is left to others by a transformation that takes this tag."""
        left = tuple(x for x in self.labels if x.tag != tag)
        return self._replace(labels=left) if left or self.note else None

    def without_this_mode(self, tag: Hashable) -> "Site":
        """The site of a mark that a transformation of this tag has taken: to others it
        leaves what comes of it by a derivative."""
        return self._replace(taken=(*self.taken, tag))

    def for_all(self, label: Label) -> "Site":
        """The mark, also seen by outer transformations that have no label for it: under
        the name that one inside has for it."""
        return self.called((*self.labels, Label(label.name, label.tag)))

    def in_scope(self, scope: str) -> "Site":
        return self._replace(labels=tuple(x.in_scope(scope) for x in self.labels))

    @ft.cached_property
    def mode(self) -> str:
        return ".".join(self.modes) if self.modes else "primal"

    @property
    def flows_backward(self) -> bool:
        """Whether values of this mode are computed in the order opposite to that of the
        primals."""
        return self.modes.count("cotangent") % 2 == 1

    @ft.cached_property
    def key(self) -> tuple[str, str, tuple[int, ...]]:
        return self.name, self.mode, self.orders

    def __repr__(self):
        return f"{self.name}:{self.mode}"

    @property
    def said(self) -> str:
        """What messages say of it, in a sentence."""
        if self.note is not None:
            return self.note.said(self.name, self.where)
        return f"`sow(..., {self.name!r})` at {self.where}"

    @property
    def form_said(self) -> str:
        """A sentence about the form of the value, if that is ours."""
        return self.note.form_said if self.note is not None else ""

    @property
    def said_first(self) -> str:
        """`said`, at the beginning of a sentence."""
        return self.said[0].upper() + self.said[1:]

    def shape(self, i: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that the code at the mark sees, from that of operand `i`."""
        order = self.permutations[i] or range(len(shape))
        return tuple(shape[k] for k in order[sum(self.varies[i]) :])


def out_of_loop(
    axes: Sequence[Axis], loop: Axis | None
) -> tuple[int, tuple[Axis, ...]]:
    """The axes of what was marked in a loop as seen from outside of it: first those of
    the vmaps around the loop, then the axis that the `loop` adds, if it does, then the
    rest. Also how many come first."""
    around = [
        a._replace(n_loops=a.n_loops - 1)
        for a in it.takewhile(lambda a: a.n_loops > 0, axes)
    ]
    n = len(around)
    return n, (*around, *([] if loop is None else [loop]), *axes[n:])
