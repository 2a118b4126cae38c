"""Patterns are paths: `*` stops at a slash, `**` does not. In all options alike."""

import fnmatch
import itertools as it
import random
import re

import equinox as eqx
import jax
import jax.lax as lax
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_sow import (
    Append,
    plant,
    save_intermediates as S,
    sow,
    SowError,
    tap,
    UnknownSowError,
)
from eqx_sow._globs import fits
from eqx_sow._names import in_loops, Named
from eqx_sow._selection import Selection
from jaxtyping import Array, Float

from .helpers import assert_close
from .tables import under


X = jnp.array([0.3, 0.5])


# --- the matcher, against an obvious one ---
def _obvious(pattern, name):
    """Whether the parts of a pattern fit those of a name."""
    if not pattern or not name:
        return all(p == "**" for p in pattern) and not name
    first, *rest = pattern
    if first == "**":
        return _obvious(rest, name) or _obvious(pattern, name[1:])
    # What is behind the number of a layer has to be asked for.
    is_hidden = re.match(r"\d+\.[a-z]", name[0]) and "." not in first
    fit = fnmatch.fnmatchcase(name[0], first) and not is_hidden
    return fit and _obvious(rest, name[1:])


PARTS = ["a", "b", "ab", "0", "1", "12", "0.call", "a.inputs", "-1"]
GLOBS = ["*", "*", "**", "**", "?", "a*", "*b", "[ab]", "[!a]", "[01]*", "*.call", "1?"]


def _random(rng, parts, most=4):
    return "/".join(rng.choice(parts) for _ in range(rng.randint(1, most)))


@pytest.mark.slow
def test_matches_are_those_of_an_obvious_matcher():
    rng = random.Random(0)
    n_fit = 0
    for _ in range(20_000):
        name = _random(rng, PARTS)
        pattern = _random(rng, PARTS + GLOBS)
        expected = pattern == name or _obvious(pattern.split("/"), name.split("/"))
        assert fits(pattern, name) == expected, (pattern, name)
        n_fit += expected
    assert n_fit > 500


def test_many_patterns_at_once_are_each_by_itself():
    rng = random.Random(1)
    for _ in range(200):
        names = {_random(rng, PARTS) for _ in range(12)}
        patterns = list({_random(rng, PARTS + GLOBS) for _ in range(12)})
        named = [Named(name) for name in names]
        # Without lists, so that no index is counted from the end.
        selection = Selection(patterns, named)
        for x in named:
            got = {patterns[i] for i in selection.of(x)}
            want = {
                p
                for p in patterns
                if p == x.name
                or p not in names
                and _obvious(p.split("/"), x.name.split("/"))
            }
            from_end = {p for p in got - want if "-1" in p}
            assert got - from_end == want


@pytest.mark.parametrize(
    "pattern, name, fit",
    [
        ("**/attn", "attn", True),
        ("**/attn", "a/b/attn", True),
        ("blocks/**", "blocks", True),
        ("blocks/**", "blocks/0/attn", True),
        ("blocks/**/attn", "blocks/*/attn", True),
        ("**", ".", True),
        ("layers/*", "layers/0.encode", False),
        ("layers/*.inputs", "layers/0.inputs", True),
        ("layers/*", "layers/0/linear", False),
        ("*layers/0", "model/layers/0", False),
        ("layers/?0", "layers/10", True),
        ("layers?0", "layers/0", False),
        ("a[/]b", "a/b", False),
    ],
)
def test_what_fits(pattern, name, fit):
    assert fits(pattern, name) == fit


def _listed(named):
    """The names that lists would have instead of stacks, with the indices of each."""
    places = [place for place, _ in named.loops]
    for at in it.product(*[range(n) for _, n in named.loops]):
        parts = named.name.split("/")
        for place, i in zip(places, at):
            parts[place] = parts[place].replace("*", str(i))
        yield at, "/".join(parts)


@pytest.mark.slow
def test_a_stack_goes_by_the_names_of_a_list():
    """Whatever selects something in lists selects the same in stacks."""
    rng = random.Random(2)
    places = [
        Named("net/head"),
        in_loops("net/blocks/*", (2,), (3,)),
        in_loops("net/blocks/*.call", (2,), (3,)),
        in_loops("net/blocks/*/attn", (2,), (3,)),
        in_loops("net/blocks/*/mlp/layers/0", (2,), (3,)),
        in_loops("net/blocks/*/mlp/layers/1", (2,), (3,)),
        in_loops("net/stages/*/blocks/*/mlp", (2, 4), (2, 2)),
        in_loops("net/stages/*", (2,), (2,)),
    ]
    globs = ["*", "**", "?", "[01]", "*.call", "-1", "2", "*a*"]
    n_fit = 0
    for _ in range(2000):
        stacks = rng.sample(places, rng.randint(1, 5))
        _, name = rng.choice(list(_listed(rng.choice(stacks))))
        parts = [rng.choice([x, x, rng.choice(globs)]) for x in name.split("/")]
        pattern = "/".join(x for x in parts if x != "**" or rng.random() < 0.9)
        lists = {
            name: (x.name, at, Named(name)) for x in stacks for at, name in _listed(x)
        }
        of_list = Selection([pattern], [x for *_, x in lists.values()])
        want = {(name, at) for name, at, x in lists.values() if of_list.of(x)}
        if not want:
            continue
        n_fit += 1
        of_stack = Selection([pattern], stacks)
        got = {
            (x.name, at)
            for x in stacks
            for one in of_stack.all_of(x)
            for at, _ in _listed(x)
            if all(i in (None, n) for i, n in zip(one.at, at))
        }
        assert got == want, (pattern, stacks)
    assert n_fit > 300


def _random_mark(rng):
    parts = [rng.choice(["m", "n"]), *(rng.choice("abh01") for _ in range(2))]
    name = "/".join(parts[rng.randrange(3) :])
    ends = [i for i, c in enumerate(f"{name}/") if c == "/"]
    n_loops = rng.randrange(4)
    places = [rng.choice([None, None, rng.choice(ends)]) for _ in range(n_loops)]
    return in_loops(name, places, [rng.choice([2, 3, 12]) for _ in range(n_loops)])


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_what_a_pattern_selects_depends_on_that_alone(seed, whole):
    """Whatever else is asked for, of marks in loops, and with roots left out."""
    rng = random.Random(seed)
    more = ["h", "m", "n", "-1", "1?", "**"]
    n_fit = n_missing = 0
    for _ in range(25):
        marks = list(dict.fromkeys(_random_mark(rng) for _ in range(rng.randint(1, 5))))
        patterns = [_random(rng, PARTS + GLOBS + more, 3) for _ in range(8)]
        # A name, with and without its root.
        name = rng.choice(marks).name
        patterns = list(dict.fromkeys([*patterns, name, name.partition("/")[2] or "a"]))
        rng.shuffle(patterns)
        select = lambda ps: Selection(ps, marks, ["m", "n"], whole=whole)
        together = select(patterns)
        for i, p in enumerate(patterns):
            alone = select([p])
            if p in alone.ambiguous:
                continue
            assert (i in together.missing) == (0 in alone.missing), (p, patterns, marks)
            for mark in marks:
                got = together.of(mark).get(i), alone.of(mark).get(0)
                assert got[0] == got[1], (p, patterns, mark)
                n_fit += got[1] is not None
            n_missing += bool(alone.missing)
    assert n_fit > 40 and n_missing > 40


def test_a_name_that_reads_like_a_glob_means_that_mark():
    def fn(x):
        return sow(sow(sow(x, "w*") + 1, "w1") + 1, "w[0-9]")

    selected = lambda names: list(S(fn, names=names)(X)[1])
    assert selected("w*") == ["w*"]
    assert selected("w[0-9]") == ["w[0-9]"]
    assert selected("w?") == ["w*", "w1"]
    assert_close(plant(fn, {"w*": jnp.zeros_like})(X), jnp.full_like(X, 2.0))


def test_a_neighbour_with_more_indices():
    def fn(x):
        inner = lambda x: lax.fori_loop(0, 12, lambda i, x: sow(x + i, "h"), x)
        return lax.fori_loop(0, 2, lambda i, x: inner(x), x)

    for deep in ("**/1?", "h/*/1?"):
        assert set(S(fn, names=deep)(X)[1]) == {"h/*/10", "h/*/11"}
        got = S(fn, names=[deep, "h/0/0"])(X)[1]
        assert set(got) == {"h/0/0", "h/*/10", "h/*/11"}


def test_a_name_with_and_without_its_root():
    model, _ = _models()
    fn = lambda model, x: model(x)
    both = ["head", "model/head"]
    for names in (both, both[::-1]):
        got = S(fn, capture=True, names=names)(model, X)[1]
        assert_close(dict(got), {"model/head": {"primal": model(X)}})
        assert _events(fn, model, X, capture=True, names=names) == ["model/head"]
        same = dict.fromkeys(names, _double)
        assert_close(plant(fn, same, capture=True)(model, X), 2 * model(X))
        _, got = S(fn, capture=True, transform=same)(model, X)
        assert_close(got["head"]["primal"], 2 * model(X))
    # What was captured under two names can be planted.
    loop = lambda x: lax.fori_loop(0, 4, lambda i, x: sow(x + i, "h"), x)
    _, got = S(loop, names=["h/3", "h/-1"])(X)
    assert_close(plant(loop, got)(X), loop(X))


@pytest.mark.parametrize("keys", [("head", "model/head"), ("blocks/2", "blocks/-1")])
def test_two_keys_that_mean_one_mark(keys):
    model, stacked = _models()
    fn = lambda model, x: model(x)
    values = dict(zip(keys, (jnp.sin, jnp.cos)))
    said = f"{keys[0]!r} and {keys[1]!r} both mean 'model/.*', with different values"
    listen = [plant(fn, values, capture=True), S(fn, capture=True, transform=values)]
    for listening in listen:
        with pytest.raises(SowError, match=said):
            listening(model, X)
    if keys[0] != "head":
        with pytest.raises(SowError, match=said):
            plant(fn, values, capture=True)(stacked, X)
    # A glob beside a name is no doubt.
    plant(fn, {"**": jnp.sin, keys[0]: jnp.cos}, capture=True)(model, X)


# --- in all options ---
class Block(eqx.Module):
    attn: eqx.nn.Linear
    mlp: eqx.nn.Linear

    def __init__(self, key):
        self.attn, self.mlp = (eqx.nn.Linear(2, 2, key=k) for k in jr.split(key))

    def __call__(self, x):
        return x + self.mlp(jnp.tanh(self.attn(x)))


class Model(eqx.Module):
    blocks: list[Block] | Block
    head: eqx.nn.Linear

    def __call__(self, x):
        if isinstance(self.blocks, Block):
            arrays, static = eqx.partition(self.blocks, eqx.is_array)
            step = lambda x, layer: (eqx.combine(layer, static)(x), None)
            x, _ = lax.scan(step, x, arrays)
        else:
            for block in self.blocks:
                x = block(x)
        return self.head(x)


def _models():
    blocks = [Block(jr.key(i)) for i in range(3)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *blocks)
    head = eqx.nn.Linear(2, 2, key=jr.key(9))
    return Model(blocks, head), Model(stacked, head)


def _by_hand(model, x, at_block, at_attn):
    """The model, with functions applied to the outputs of its blocks and attentions."""
    for i, block in enumerate(model.blocks):
        attn = at_attn(i, block.attn(x))
        x = at_block(i, x + block.mlp(jnp.tanh(attn)))
    return model.head(x)


_same = lambda i, x: x
_double = lambda x: 2 * x
EDITS = {
    # Not what is inside the blocks, which was doubled, too.
    "blocks/*": (lambda i, x: 2 * x, _same),
    "blocks/*/attn": (_same, lambda i, x: 2 * x),
    "**/attn": (_same, lambda i, x: 2 * x),
    "blocks/-1": (lambda i, x: 2 * x if i == 2 else x, _same),
    "model/blocks/-2/a*": (_same, lambda i, x: 2 * x if i == 1 else x),
    "blocks/[01]/attn": (_same, lambda i, x: 2 * x if i < 2 else x),
}


@pytest.mark.sample(6)
@under("eager", "filter_jit", "filter_grad")
@pytest.mark.parametrize("pattern, edit", EDITS.items(), ids=EDITS)
def test_plant_is_the_edited_model(pattern, edit, wrap):
    listed, stacked = _models()
    loss = lambda model, x: jnp.sum(model(x) ** 2)
    by_hand = wrap(lambda model, x: jnp.sum(_by_hand(model, x, *edit) ** 2))
    want = by_hand(listed, X)
    planted = wrap(plant(loss, {pattern: _double}, capture=True))
    assert_close(planted(listed, X), want)
    got = planted(stacked, X)
    if isinstance(want, Model):
        want = eqx.tree_at(
            lambda m: m.blocks,
            want,
            jax.tree.map(lambda *x: jnp.stack(x), *want.blocks),
        )
    assert_close(got, want)


def _events(fn, *args, **options):
    events = []
    tap(fn, events.append, **options)(*args)
    jax.effects_barrier()
    return [event.name for event in events]


def test_names_are_the_same_for_a_list_and_a_stack():
    listed, stacked = _models()
    run = lambda model, x: model(x)
    for names in ("blocks/-1/attn", "model/blocks/-1", ["*/blocks/2/*", "head"]):
        each = [S(run, capture=True, names=names)(m, X)[1] for m in (listed, stacked)]
        assert_close(dict(each[1]), dict(each[0]))
        assert _events(run, listed, X, capture=True, names=names) == list(each[0])
        # What was captured can be planted, under these names.
        assert_close(plant(run, each[0], capture=True)(listed, X), listed(X))
    assert list(each[0]) == ["model/blocks/2/attn", "model/blocks/2/mlp", "model/head"]
    _, last = S(run, capture=True, names="blocks/-1")(listed, X)
    _, every = S(run, capture=True)(listed, X)
    assert list(last) == ["model/blocks/-1"]
    assert_close(last["model/blocks/-1"], every["model/blocks/2"])


def test_dicts_of_patterns():
    listed, stacked = _models()
    run = lambda model, x: model(x)
    _, want = S(listed, capture=True)(X)
    for model in (listed, stacked):
        options = dict(
            transform={"blocks/*": jnp.max, "*/head": jnp.min, "**/attn": jnp.sum},
            reduce={"blocks/*": Append()},
            spec={"blocks/*/mlp": Float[Array, "*layers 2"], "head": Float[Array, ""]},
        )
        _, got = S(run, capture=True, **options)(model, X)
        top = ("model/head", "model")
        for i in range(3) if model is listed else ():
            of = {"": (jnp.max,), "/attn": jnp.sum, "/mlp": lambda x: x}
            for end, fn in of.items():
                value = want[f"blocks/{i}{end}"]["primal"]
                value = (fn[0](value),) if end == "" else fn(value)
                assert_close(got[f"model/blocks/{i}{end}"]["primal"], value)
        if model is stacked:
            each = lambda end: want[f"blocks/*{end}"]["primal"]
            assert_close(got["model/blocks/*"]["primal"], (each("").max(-1),))
            assert_close(got["model/blocks/*/attn"]["primal"], each("/attn").sum(-1))
            assert_close(got["model/blocks/*/mlp"]["primal"], each("/mlp"))
        assert_close(got[top[0]]["primal"], want["head"]["primal"].min())
        assert_close(got[top[1]]["primal"], want["."]["primal"])
    # The last layer of a list, also by its index from the end.
    _, got = S(run, capture=True, transform={"blocks/-1": jnp.max})(listed, X)
    assert got["model/blocks/2"]["primal"].shape == ()
    assert got["model/blocks/1"]["primal"].shape == (2,)


def test_no_dict_has_some_iterations_apart_that_come_back_together():
    def fn(x):
        return lax.scan(lambda c, _: (c + 1, sow(c, "h")), x, None, length=4)[0]

    for options in (
        {"reduce": {"h/*": Append()}},
        {"transform": {"h/*": jnp.sin}},
        {"spec": {"h/1": Float[Array, "2"]}},
    ):
        with pytest.raises(UnknownSowError, match=next(iter(options))):
            S(fn, **options).eval_shape(X)


def test_a_pattern_is_a_look_up():
    listed, _ = _models()
    x, want = X, []
    for block in listed.blocks:
        want.append(block.mlp(jnp.tanh(block.attn(x))))
        x = block(x)
    want = jnp.stack(want)
    for model in _models():
        _, got = S(lambda model, x: model(x), capture=True)(model, X)
        for pattern in ("model/blocks/*/mlp", "blocks/*/mlp", "**/mlp"):
            assert pattern in got
            assert_close(got[pattern]["primal"], want)
            assert_close(got.primals[pattern], want)
            assert_close(got.get(pattern), {"primal": want})
        assert_close(got["blocks/-1/mlp"]["primal"], want[2])
        assert_close(got["blocks/[02]/mlp"]["primal"], want[::2])
        for pattern in ("blocks/*", "*/blocks/*"):
            assert got[pattern]["primal"].shape == (3, 2)


@pytest.mark.parametrize(
    "mode, says",
    [
        ("grad", "The mode is called 'cotangent'. No value has one, as nothing was"),
        ("cotangent", "No value has one, as nothing was differentiated"),
        ("activations", "The mode is called 'primal'."),
        ("primals", "Did you mean 'primal'?"),
        ("x", "For a part of the value, write `['primal']['x']`."),
    ],
)
def test_a_pattern_has_no_mode_that_no_name_has(mode, says):
    model, _ = _models()
    _, got = S(model, capture=True)(X)
    with pytest.raises(UnknownSowError) as e:
        got["blocks/*"][mode]
    said = f"'blocks/*' has no mode {mode!r}. Its modes are: 'primal'."
    assert said in str(e.value) and says in str(e.value)


def _three(x):
    for i in range(3):
        x = sow(sow(x + i, f"blocks/{i}/attn") * 2, f"blocks/{i}/mlp")
    return sow(x, "top/head")


OPTIONS = {
    "names": lambda p: S(_three, names=p),
    "tap": lambda p: tap(_three, names=["top/head", p]),
    "plant": lambda p: plant(_three, {p: jnp.sin}),
    "reduce": lambda p: S(_three, reduce={p: Append()}),
    "transform": lambda p: S(_three, transform={p: jnp.sum}),
    "spec": lambda p: S(_three, spec={p: Float[Array, "2"]}),
    "[]": lambda p: lambda x: S(_three)(x)[1][p],
}


@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    "pattern, instead",
    [
        ("blocks/*", ["blocks/**", "blocks/*/*"]),
        ("*attn", ["**/attn", "**/*attn"]),
        ("blocks*mlp", ["blocks/*/mlp", "blocks/**/mlp"]),
        ("t*head", ["t*/*head", "t*/**/*head"]),
    ],
)
def test_what_would_fit_across_a_slash(option, pattern, instead):
    with pytest.raises(UnknownSowError) as e:
        option(pattern)(X)
    _, said = str(e.value).split("`*` stops at a slash: write ")
    shown = said.removesuffix(".").split(" or ")
    assert set(shown) == set(map(repr, instead))
    for right in instead:
        option(right)(X)


def test_several_roots():
    model, _ = _models()
    fn = lambda a, b, x: b(a(x))
    for listen in (
        lambda p: S(fn, capture=True, names=p),
        lambda p: tap(fn, lambda event: None, capture=True, names=p),
        lambda p: plant(fn, {p: jnp.sin}, capture=True),
        lambda p: S(fn, capture=True, transform={p: jnp.sum}),
        lambda p: lambda *args: S(fn, capture=True)(*args)[1][p],
    ):
        with pytest.raises(UnknownSowError, match=r"may be 'a/head' or 'b/head'\."):
            listen("head")(model, model, X)
        listen("b/head")(model, model, X)

    # Each name is by itself: that `a` alone has both settles nothing.
    class Head(eqx.Module):
        head: eqx.nn.Linear

        def __call__(self, x):
            return self.head(x)

    other = Head(eqx.nn.Linear(2, 2, key=jr.key(8)))
    names = ["head", "blocks/0"]
    with pytest.raises(UnknownSowError, match=r"'head' may be 'a/head' or 'b/head'"):
        S(fn, capture=True, names=names)(model, other, X)
    _, got = S(fn, capture=True, names=["a/head", "blocks/0"])(model, other, X)
    assert set(got) == {"a/head", "a/blocks/0"}
    # What is there goes before what is behind a root.
    marked = lambda a, x: sow(a(x), "head")
    assert list(S(marked, capture=True, names="head")(model, X)[1]) == ["head"]
    # The model itself, and a method of it.
    _, got = S(lambda a, x: a(x), capture=True, names=[".", "head"])(model, X)
    assert set(got) == {"a", "a/head"}
    # The names of sows with the path of a module have roots, too.

    class Marked(eqx.Module):
        def __call__(self, x):
            return sow(x, "h")

    run = lambda net, x: net[0](x)
    _, got = S(run, scope=True, names="0/h")([Marked()], X)
    assert list(got) == ["net/0/h"]


def test_lists_are_counted_from_the_end():
    _, every = S(_three)(X)
    for i in range(3):
        name = f"blocks/{i - 3}/mlp"
        _, got = S(_three, names=name)(X)
        assert_close(dict(got), {name: every[f"blocks/{i}/mlp"]})
        planted = plant(_three, {name: jnp.cos})(X)
        assert_close(planted, plant(_three, {f"blocks/{i}/mlp": jnp.cos})(X))
    for name in ("blocks/-4/mlp", "blocks/*/mlp/-1"):
        with pytest.raises(UnknownSowError, match="'blocks/0/mlp' to 'blocks/2/mlp'"):
            S(_three, names=name)(X)
    # A sow that is called so is that one.
    fn = lambda x: sow(sow(x, "h/0") + 1, "h/-1")
    assert_close(dict(S(fn, names="h/-1")(X)[1]), {"h/-1": {"primal": X + 1}})
    assert_close(plant(fn, {"h/-1": jnp.zeros_like})(X), 0 * X)


def test_each_name_is_looked_at_once():
    looked_at = []

    def by_predicate(name):
        looked_at.append(name)
        return name.endswith("attn")

    _, got = S(jax.grad(lambda x: _three(x).sum()), names=by_predicate)(X)
    assert len(got) == 3
    assert len(looked_at) == len(set(looked_at)) == 7


def test_what_goes_wrong_in_a_planted_function_names_the_mark():
    model, _ = _models()
    fn = plant(
        model, {"**": lambda v: v @ jnp.ones((2, 2)) if v.ndim else v, "head": 0}
    )
    with pytest.raises(UnknownSowError):
        fn(X)

    def wide(x):
        return sow(sow(x, "blocks/0/h").sum(), "blocks/1/h")

    fn = plant(wide, {"blocks/*/h": lambda v: v @ jnp.ones((2, 2))})
    with pytest.raises(Exception) as e:
        fn(X)
    assert any("'blocks/1/h'" in note for note in e.value.__notes__)
    for wrong in (lambda v: None, lambda v: jnp.ones(2), lambda v: (v, v)):
        with pytest.raises(SowError, match="'blocks/1/h'"):
            plant(wide, {"blocks/*/h": wrong, "blocks/0/h": X})(X)
