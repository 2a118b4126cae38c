"""Patterns of names, and which names they fit.

A pattern is a path, like a name: `*`, `?` and `[...]` stop at a slash, and `**` stands
for any number of parts, none included. `blocks/*/attn` fits `blocks/0/attn`, and
`**/attn` also `attn` and `a/b/attn`.

Many patterns are compiled to one tree, so that a hundred cost little more than one.
"""

import fnmatch
import functools as ft
import itertools as it
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple


# --- patterns, compiled ---
class Node:
    """What may come next, after the parts of some patterns that have been matched."""

    __slots__ = "parts", "indices", "globs", "deep", "is_deep", "ends"

    def __init__(self, is_deep: bool = False):
        # By what is spelled out, and of these, the indices, each as it is written
        # without what is behind it: `2.encode` is `2` and `.encode`.
        self.parts: dict[str, Node] = {}
        self.indices: list[tuple[int, str, Node]] = []
        # By what a part begins with that fits; then by what is written.
        self.globs: dict[str, dict[str, tuple[Callable[[str], Any], Node]]] = {}
        # Behind a `**`, and whether this is behind one: any part leads back to here.
        self.deep: Node | None = None
        self.is_deep = is_deep
        # The numbers of the patterns that end here.
        self.ends: list[int] = []

    def after(self, part: str) -> "Node":
        if part == "**":
            if self.is_deep:
                return self
            self.deep = self.deep or Node(is_deep=True)
            return self.deep
        if is_glob(part):
            globs = self.globs.setdefault(re.split(r"[*?[]", part)[0], {})
            if part not in globs:
                globs[part] = re.compile(fnmatch.translate(part)).match, Node()
            return globs[part][1]
        if part not in self.parts:
            self.parts[part] = node = Node()
            head, rest = head_of(part)
            if is_index(head):
                self.indices.append((int(head), rest, node))
        return self.parts[part]


def is_glob(pattern: str) -> bool:
    return any(c in pattern for c in "*?[")


def head_of(part: str) -> tuple[str, str]:
    """What is in front of the name of a method, and the rest: `2` and `.encode`."""
    head, dot, rest = part.partition(".")
    return head, dot + rest


def is_of_layer(part: str) -> bool:
    """Whether a part is the inputs, the call or a method of a layer: `2.inputs`. The
    layers, `blocks/*`, are without these."""
    head, rest = head_of(part)
    return is_number(head) and rest[1:2].isidentifier()


def of_all_layers(name: str) -> str:
    """What all layers are called, of which a name is one: of `blocks/2.encode` that is
    `blocks/*.encode`."""
    parts = map(head_of, name.split("/"))
    return "/".join(("*" if is_index(head) else head) + rest for head, rest in parts)


def is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def is_index(text: str) -> bool:
    return is_number(text.removeprefix("-"))


@ft.lru_cache(maxsize=256)
def compiled(patterns: tuple[str, ...]) -> Node:
    """Many patterns as one tree, of which this is the root, so that a name is matched
    with all of them at once. What these have in common is matched once."""
    root = Node()
    for i, pattern in enumerate(patterns):
        node = root
        for part in pattern.split("/"):
            node = node.after(part)
        node.ends.append(i)
    return root


# --- names, as patterns see them ---
class Part(NamedTuple):
    """A part of a name, which is counted from 0; and what else it is called, if it is
    counted from the end of a list of layers."""

    number: int
    text: str
    from_end: str | None


class Index(NamedTuple):
    """Where a name has the index of an iteration, with what is behind it in that part,
    as for `blocks/2.encode`. `loop`: the number of the loop; `n`: of its iterations."""

    loop: int
    n: int
    rest: str


# Of the parts that are special, what a pattern made of them: of a loop, an iteration or
# "*"; of a layer of a list, what it is called if it is counted from the end.
Choice = tuple[tuple[Index | Part, Any], ...]


# So many iterations are looked at, to find those that a glob fits.
MOST = 1000


def fitting(
    root: Node, name: Sequence[Part | Index], whole: bool
) -> dict[int, list[Choice]]:
    """The patterns that fit a name, and how. With `whole`, an index in a name is that
    of all iterations, and no pattern may choose some."""
    states: dict[tuple[Node, Choice], None] = dict.fromkeys(_with_deep(root, ()))
    for part in name:
        of_part = _of_index if isinstance(part, Index) else _of_text
        after = [
            new
            for node, choice in states
            for child, more in of_part(node, part, whole)
            for new in _with_deep(child, choice + more)
        ]
        states = dict.fromkeys(after)
    found: dict[int, list[Choice]] = {}
    for node, choice in states:
        for i in node.ends:
            found.setdefault(i, []).append(choice)
    return found


def _with_deep(node: Node, choice: Choice) -> Iterator[tuple[Node, Choice]]:
    yield node, choice
    if node.deep is not None:
        yield node.deep, choice


def _of_text(node: Node, part: Any, whole: bool) -> Iterator[tuple[Node, Choice]]:
    del whole
    if node.is_deep:
        yield node, ()
    if part.text in node.parts:
        yield node.parts[part.text], ()
    if part.from_end in node.parts:
        yield node.parts[part.from_end], ((part, part.from_end),)
    of_layer = node.globs and is_of_layer(part.text)
    for n in range(len(part.text) + 1 if node.globs else 0):
        for glob, (fits, child) in node.globs.get(part.text[:n], {}).items():
            if fits(part.text) and ("." in glob or not of_layer):
                yield child, ()


def _of_index(node: Node, index: Any, whole: bool) -> Iterator[tuple[Node, Choice]]:
    every = ((index, "*"),)
    # With a symbolic length, there may be any iteration.
    is_known = isinstance(index.n, int)
    if node.is_deep:
        yield node, every
    globs = it.chain.from_iterable(x.items() for x in node.globs.values())
    for glob, (fits, child) in globs:
        if index.rest and "." not in glob:
            continue
        if head_of(glob)[0] == "*":
            if fits(f"0{index.rest}"):
                yield child, every
        elif not whole:
            for i in range(min(index.n, MOST) if is_known else MOST):
                if fits(f"{i}{index.rest}"):
                    yield child, ((index, i),)
    for i, rest, child in () if whole else node.indices:
        if rest == index.rest and (not is_known or -index.n <= i < index.n):
            yield child, ((index, i),)


def fits(pattern: str, name: str) -> bool:
    """Whether a pattern fits a name, part by part."""
    root = compiled((pattern,))
    return pattern == name or bool(fitting(root, parts_of(name, {}), False))


def layers_in(name: str, pattern: str) -> list[int]:
    """The parts of a name that are the index of a layer, and that a pattern, which fits
    the name, has a glob for: of `b/1/layers/0` and `b/1/**`, the last one. What is left
    out in front is a root, which is no list."""
    parts, given = name.split("/"), pattern.split("/")
    by = _aligned(parts, given) or _aligned(parts, ["**", *given]) or []
    of_layer = (is_index(head_of(part)[0]) for part in parts)
    return [k for k, (is_, p) in enumerate(zip(of_layer, by)) if is_ and is_glob(p)]


def _aligned(parts: Sequence[str], given: Sequence[str]) -> list[str] | None:
    """For each part of a name, the part of a pattern that stands for it, where a `**`
    stands for as few as possible. `None` if the pattern does not fit."""
    if given[:1] == ["**"]:
        for n in range(len(parts) + 1):
            rest = _aligned(parts[n:], given[1:])
            if rest is not None:
                return ["**"] * n + rest
    elif given and parts and _fits_part(given[0], parts[0]):
        rest = _aligned(parts[1:], given[1:])
        return None if rest is None else [given[0], *rest]
    return None if given or parts else []


def _fits_part(given: str, part: str) -> bool:
    (index, of_given), (head, of_part) = head_of(given), head_of(part)
    # A `*` is the index of a stack. How long a list is, is not known here.
    if head == "*" or (index.startswith("-") and is_number(head)):
        given, part = f"*{of_given}", f"0{of_part}"
    return fits(given, part)


def parts_of(name: str, lengths: Mapping[str, int]) -> list[Part]:
    """A name, taken apart. `lengths`: see `lengths_of_lists`."""
    parts, start = [], 0
    for number, text in enumerate(name.split("/")):
        head, rest = head_of(text)
        n = lengths.get(name[:start]) if is_number(head) else None
        from_end = None if n is None else f"{int(head) - n}{rest}"
        parts.append(Part(number, text, from_end))
        start += len(text) + 1
    return parts


def lengths_of_lists(names: Iterable[str]) -> dict[str, int]:
    """By what is in front of their indices, how long lists are: for `blocks/0` to
    `blocks/5` that is `{"blocks/": 6}`."""
    lengths: dict[str, int] = {}
    for name in names:
        start = 0
        for text in name.split("/"):
            head, _ = head_of(text)
            if is_number(head):
                front = name[:start]
                lengths[front] = max(lengths.get(front, 0), int(head) + 1)
            start += len(text) + 1
    return lengths
