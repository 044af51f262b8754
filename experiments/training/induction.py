"""Starting parameters that nearly retrieve: a rough induction circuit instead of the search for one.

A lookup needs two things at once: a layer that looks a few tokens back, and a layer that compares what was found
there. From random parameters neither is worth anything without the other, and a model guesses among the lines it was
given until it happens on both; none of our runs of up to 3,400 steps did. Here the first layer starts out looking 1 to
4 tokens back, and the second comparing what was found and copying what stands where it agrees. Nothing of it depends
on the words, all of it is trained, and the first stage of the curriculum takes 80 steps.

    record:    line  torpid  -kid  : REGISTER_CONTENT is <  12   from <, the token before 12: noun 1, adjective 2 back
                                                                 from 12 itself:              noun 2, adjective 3 back
    question:  line  torpid  -kid  ? I need the number.          from its last token:         noun 1, adjective 2 back

A question must find the number, not the token before it, so it compares what head h found at the question with what
head h + 1 found at the key. That also keeps a question from agreeing best with itself. (With a token between question
and answer both would stand equally far from their names, and nothing would tell a question from what it looks for.)
"""

import jax.numpy as jnp
import numpy as np

from kvjax_models import llama

OFFSETS = (1, 2, 3, 4)
EMBEDDING_SCALE = 0.3
CONSTANT_FEATURE = 4 * EMBEDDING_SCALE  # of every token, in the first dimension: what positional heads attend from
LOCAL_PAIRS, LOCAL_SCALE = 8, 1.6  # fastest rotary pairs and their weight, in the heads that look back
RANDOM_SCALE = 0.25  # of the random query and key weights that stay
FOUND_SCALE, MATCH_SCALE, COPY_SCALE = 0.5, 1.2, 0.7


def start_with_induction(model: llama.Llama, rng: np.random.Generator) -> None:
    """Overwrites a fresh model's parameters in place.

    Raises:
        ValueError: not two layers, fewer query heads than offsets, or values that do not fill the residual stream.
    """
    config = model.config
    if config.layers != 2 or config.query_heads < len(OFFSETS):
        raise ValueError(f"needs 2 layers and {len(OFFSETS)} query heads, got {config.layers}, {config.query_heads}")
    if config.kv_heads * config.head_dim != config.width:
        raise ValueError(f"kv_heads x head_dim = {config.kv_heads} x {config.head_dim} must be width={config.width}")
    embedding = rng.normal(scale=EMBEDDING_SCALE, size=(config.vocab_size, config.width))
    embedding[:, 0] = CONSTANT_FEATURE
    model.embedding.embedding[...] = jnp.asarray(embedding, jnp.float32)
    _look_back(model.layers[0], config)
    _compare_and_copy(model.layers[1], config, rng)


def _look_back(layer: llama.DecoderLayer, config: llama.LlamaConfig) -> None:
    """Query head h attends `OFFSETS[h]` tokens back and writes what it finds to a block of the residual stream."""
    query, key, output = kernels(layer.attention, config)
    pairs = np.arange(LOCAL_PAIRS)
    angles = np.asarray(llama.rope_frequencies(config))[pairs]
    query, key, output = query * RANDOM_SCALE, key * RANDOM_SCALE, output * 0.1
    query[0], key[0] = 0, 0
    key[0][:, pairs] = LOCAL_SCALE
    block = config.width // len(OFFSETS)
    for head, offset in enumerate(OFFSETS):
        query[0, head, pairs] = LOCAL_SCALE * np.cos(angles * offset)
        query[0, head, config.head_dim // 2 + pairs] = -LOCAL_SCALE * np.sin(angles * offset)
        output[head, :block, _block(head, config)] += FOUND_SCALE * np.eye(config.head_dim)[:block, :block]
    set_kernels(layer.attention, query, key, np.array(layer.attention.qkv.kernel[:, :, -1]), output)
    layer.mlp.down.kernel[...] *= 0.3


def _compare_and_copy(layer: llama.DecoderLayer, config: llama.LlamaConfig, rng: np.random.Generator) -> None:
    """Every head compares block h at the query with block h + 1 at the keys; values and output keep a token as it is.

    The comparison uses only pairs that turn by less than a radian over the whole context: it must not see distance.
    """
    query, key, output = kernels(layer.attention, config)
    query, key = query * RANDOM_SCALE, key * RANDOM_SCALE
    group = config.query_heads // config.kv_heads
    still = np.tile(np.asarray(llama.rope_frequencies(config)) * config.max_length < 1, 2)
    for kv_head in range(config.kv_heads):
        for found in range(len(OFFSETS) - 1):
            rows = config.width // len(OFFSETS)
            match = MATCH_SCALE * rng.normal(scale=rows**-0.5, size=(rows, config.head_dim)) * still
            query[_block(found, config), kv_head * group : (kv_head + 1) * group] += match[:, None]
            key[_block(found + 1, config), kv_head] += match
    turn = np.linalg.qr(rng.normal(size=(config.width, config.width)))[0]
    back = turn.T.reshape(config.kv_heads, config.head_dim, config.width)
    output = COPY_SCALE * np.repeat(back, group, axis=0)
    set_kernels(layer.attention, query, key, turn, output)


def _block(head: int, config: llama.LlamaConfig) -> slice:
    """The dimensions of the residual stream that what head `head` finds is written to."""
    size = config.width // len(OFFSETS)
    return slice(head * size, (head + 1) * size)


def kernels(attention: llama.Attention, config: llama.LlamaConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Query [W, H_q, D], key [W, H_kv, D] and output [H_q, D, W] weights."""
    return (
        np.array(attention.qkv.kernel[:, :, :-2]).reshape(config.width, config.query_heads, config.head_dim),
        np.array(attention.qkv.kernel[:, :, -2]),
        np.array(attention.output.kernel[...]).reshape(config.query_heads, config.head_dim, config.width),
    )


def set_kernels(
    attention: llama.Attention, query: np.ndarray, key: np.ndarray, value: np.ndarray, output: np.ndarray
) -> None:
    """Overwrites the weights that `kernels` gives, and the values' [W, H_kv D]."""
    width, kv_heads, head_dim = key.shape
    parts = (query.reshape(width, kv_heads, -1, head_dim), key[:, :, None], value.reshape(key.shape)[:, :, None])
    attention.qkv.kernel[...] = jnp.asarray(np.concatenate(parts, axis=2), jnp.float32)
    attention.output.kernel[...] = jnp.asarray(output.reshape(-1, width), jnp.float32)
