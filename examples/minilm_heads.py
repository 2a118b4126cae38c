# %% [markdown]
# # Which heads tell two sentences apart?
#
# Activation patching on a pretrained model, one attention head at a time. Two sentences
# differ in one word: a *river* bank, and a *savings* bank. We run the model on the
# first sentence, but plant what one head computes for the second, and measure how far
# the embedding moves towards the embedding of the second. A heat map by layer and head
# shows which heads carry the difference.
#
# The model is the pretrained sentence encoder all-MiniLM-L6-v2, as in `minilm.py`. It
# does not mention eqx_sow.

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from eqx_sow import plant, save_intermediates
from jaxtyping import Array, Float, Int
from minilm import Encoder, load_encoder, Mix, moved, pool, Softmax


LAYERS, HEADS = 6, 12
plt.rcParams.update({"font.size": 9, "axes.titlesize": 10})
model, tokenizer = load_encoder()

# %% [markdown]
# ## Pairs of sentences
#
# The sentences of each pair differ in one word, which changes the meaning of the word
# after it.

# %%
PAIRS = [
    ("The {} bank was closed after the storm.", "river", "savings"),
    ("He looked at the {} mouse for a while.", "computer", "field"),
    ("She found a {} bat in the old barn.", "baseball", "vampire"),
    ("They talked about the {} plant all evening.", "power", "garden"),
]


def encode(sentence: str) -> Int[Array, " n"]:
    # Without the padding of the tokenizer.
    encoded = tokenizer.encode(sentence)
    return jnp.array([i for i, m in zip(encoded.ids, encoded.attention_mask) if m])


def embed(model: Encoder, ids: Int[Array, " n"]) -> Float[Array, " d"]:
    return model(ids, jnp.ones(len(ids), bool))


@eqx.filter_jit
def similarity(model, one, other):
    return embed(model, one) @ embed(model, other)


for text, one, other in PAIRS:
    ours, theirs = encode(text.format(one)), encode(text.format(other))
    assert ours.shape == theirs.shape and (ours != theirs).sum() == 1
    print(f"{similarity(model, ours, theirs):.2f}  {text.format(f'{one} / {other}')}")

# %% [markdown]
# ## Plant one head
#
# `Softmax` and `Mix` are modules of the model, so `capture=` can select their outputs:
# the attention patterns, an array `[heads, n, n]`, and the values that the heads mix
# with them, `[n, heads, size]`. `plant` takes a function of the value, which replaces
# one of the heads. The head is a traced number, so `jax.vmap` tries all twelve at once.

# %%
PARTS = {
    "mix": (
        "what the head puts out",
        lambda x, head, new: x.at[:, head].set(new[:, head]),
    ),
    "softmax": ("where it looks", lambda x, head, new: x.at[head].set(new[head])),
}
modules = (Mix, Softmax)


@eqx.filter_jit
def shares(model, part, ours, theirs):
    """How far the embedding moves for each layer and head, [layers, heads]."""
    end, donor = save_intermediates(embed, capture=modules)(model, theirs)
    start = embed(model, ours)

    def patched(layer, head):
        name = f"model/layers/{layer}/attention/{part}"
        new = donor[name]["primal"]
        put = lambda x: PARTS[part][1](x, head, new)
        return moved(
            plant(embed, {name: put}, capture=modules)(model, ours), start, end
        )

    heads = jnp.arange(HEADS)
    return jnp.stack(
        [jax.vmap(lambda head: patched(i, head))(heads) for i in range(LAYERS)]
    )


maps = {part: [] for part in PARTS}
for text, one, other in PAIRS:
    ours, theirs = encode(text.format(one)), encode(text.format(other))
    for part in PARTS:
        maps[part].append(shares(model, part, ours, theirs))
maps = {part: np.mean(x, axis=0) for part, x in maps.items()}

# %% [markdown]
# ## The heat map

# %% alt="Two heat maps by layer and head: outputs of heads, and attention patterns"
figure, axes = plt.subplots(1, 2, figsize=(9, 3), sharey=True, layout="constrained")
most = max(x.max() for x in maps.values())
for axis, (part, share) in zip(axes, maps.items()):
    image = axis.imshow(share, cmap="RdBu_r", vmin=-most, vmax=most, origin="lower")
    axis.set_title(PARTS[part][0])
    axis.set_xticks(range(HEADS))
    axis.set_yticks(range(LAYERS))
    axis.set_xlabel("head")
axes[0].set_ylabel("layer")
figure.colorbar(image, ax=axes, label="share of the way")

# %%
share = maps["mix"]
for rank, i in enumerate(np.argsort(share.ravel())[::-1][:5], start=1):
    layer, head = np.unravel_index(i, share.shape)
    print(f"{rank}. layer {layer}, head {head}: {share[layer, head]:.0%} of the way")
by_layer = share.sum(axis=1)
print("sum of the heads of each layer:", " ".join(f"{x:.0%}" for x in by_layer))

# %% [markdown]
# ## Is it right?
#
# Three heads are checked without eqx_sow: copy the code of the layer, and add a line
# that replaces the output of the head.


# %% aside
def by_hand(model, ours, theirs, at, head):
    mask = jnp.ones(len(ours), bool)

    def run(ids, new=None):
        x = model.embeddings(ids)
        for i, layer in enumerate(model.layers):
            a = layer.attention
            split = lambda linear: jax.vmap(linear)(x).reshape(len(x), HEADS, -1)
            q, k, v = split(a.query), split(a.key), split(a.value)
            scores = jnp.einsum("qhd,khd->hqk", q, k) / jnp.sqrt(q.shape[-1])
            z = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=-1), v)
            if i == at:
                if new is None:
                    return z
                z = z.at[:, head].set(new[:, head])
            x = jax.vmap(layer.norm1)(x + jax.vmap(a.output)(z.reshape(x.shape)))
            hidden = jax.nn.gelu(jax.vmap(layer.up)(x), approximate=False)
            x = jax.vmap(layer.norm2)(x + jax.vmap(layer.down)(hidden))
        return pool(x, mask)

    out = run(ours, run(theirs))
    return moved(out, embed(model, ours), embed(model, theirs))


text, one, other = PAIRS[0]
ours, theirs = encode(text.format(one)), encode(text.format(other))
each = shares(model, "mix", ours, theirs)
for layer, head in ((0, 3), (2, 7), (5, 0)):
    expected = by_hand(model, ours, theirs, layer, head)
    assert np.isclose(each[layer, head], expected, atol=1e-4)

# %% [markdown]
# What to notice:
#
# - Most of the difference is carried by a few heads of the last layer, which bring it
#   from the changed word to all others; the embedding is the mean over words.
# - The heads attend to nearly the same words in both sentences, except in the first
#   layer. What differs is the information that they find there.
# - No layer was edited. The names, such as `model/layers/5/attention/mix`, are the
#   paths of the modules, and a planted function edits one head of twelve.
