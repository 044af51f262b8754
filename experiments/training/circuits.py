"""Starting parameters of a language model that nearly looks things up, in any text.

`training.induction` starts a model of two layers for records whose names and numbers stand at fixed distances. In text
they do not: names are several tokens long, and a question says more after the name. So here are three layers that
do roughly what heads of trained models do (Olsson et al. 2022, In-context Learning and Induction Heads), in random
directions; the layers above start at random, and all is trained.

    layer 1  heads look 1, 2 and 3 tokens back, and one over the last dozen tokens: each writes what it finds to a part
             of the residual stream of its own
    layer 2  induction: where the tokens here and just before stand before a token, that token is copied
    layer 3  lookup: where the dozen tokens before a token are like the dozen here, that token is copied

The first half of the residual stream holds the token itself, the second half what layer 1 finds. The output layer is
not the embedding but the embedding turned, so that a token does not predict itself.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from experiments.training.induction import kernels, set_kernels
from kvjax_models import llama

EMBEDDING_SCALE = 0.2
CONSTANT_FEATURE = 2.0  # of every token, against its other features; what layer 1 attends from
NEAR_OFFSETS, NEAR_PAIRS, NEAR_SCORE = (1, 2, 3), slice(0, 8), 32.0  # pairs of rotary frequencies; score at the offset
LATELY_OFFSET, LATELY_PAIRS, LATELY_SCORE = 7, slice(3, 12), 4.4
LATELY_SCALE = 4.0  # makes up for the mean over a dozen tokens
STILL = 1.2  # pairs that turn by less over the whole context, in radians, compare without seeing distance
NEAREST_MATCH, NEXT_MATCH, LATELY_MATCH = 2.8, 1.8, 1.8  # strengths, of queries and of keys
COPY_SCALE, OUTPUT_SCALE = 2.0, 0.1
RANDOM_QUERY_KEY, RANDOM_OUTPUT = 0.05, 0.02  # what remains of random weights


class Stream(NamedTuple):
    """The parts of the residual stream."""

    signature: Float[np.ndarray, "W half"]  # directions of a token's features
    turn: Float[np.ndarray, "W W"]  # of features as tokens have them to features as the output layer reads them
    near: Sequence[Float[np.ndarray, "W n"]]  # what stands at each of `NEAR_OFFSETS`
    lately: Float[np.ndarray, "W m"]  # what stood in the last dozen tokens


class Comparison(NamedTuple):
    """Of a part of the stream at the query with a part at the keys."""

    at_query: Float[np.ndarray, "W n"]
    at_key: Float[np.ndarray, "W n"]
    strength: float


def start_with_lookup(model: llama.Llama, rng: np.random.Generator) -> None:
    """Overwrites a fresh model's parameters in place.

    Raises:
        ValueError: fewer than three layers or four query heads, tied embeddings, or a width that does not hold what is
            found.
    """
    config = model.config
    if config.layers < 3 or config.query_heads <= len(NEAR_OFFSETS) or config.tied_embeddings:
        raise ValueError(
            f"needs 3 layers, {len(NEAR_OFFSETS) + 1} query heads and an output layer of its own, got {config.layers},"
            f" {config.query_heads}, tied_embeddings={config.tied_embeddings}"
        )
    if config.width < max(4, 2 * config.kv_heads) * config.head_dim:
        raise ValueError(
            f"width={config.width} must be 4 x head_dim={config.head_dim} and 2 x kv_heads={config.kv_heads} x head_dim"
        )
    half = config.width // 2
    embedding = np.zeros((config.vocab_size, config.width))
    features = rng.normal(size=(config.vocab_size, half))
    # Of one length: then the constant is the same in every token once it is normalised.
    features *= half**0.5 / np.linalg.norm(features, axis=1, keepdims=True)
    embedding[:, :half] = EMBEDDING_SCALE * features
    embedding[:, -1] = CONSTANT_FEATURE * EMBEDDING_SCALE
    stream = _stream(config, rng)
    model.embedding.embedding[...] = jnp.asarray(embedding, jnp.float32)
    model.head.kernel[...] = jnp.asarray(OUTPUT_SCALE / EMBEDDING_SCALE * (embedding @ stream.turn).T, jnp.float32)
    for layer in model.layers:
        layer.attention.output.kernel[...] *= RANDOM_OUTPUT
        layer.mlp.down.kernel[...] *= RANDOM_OUTPUT
    first, second, third, *_ = model.layers
    here, (one, two, three) = stream.signature[:, : stream.near[0].shape[1]], stream.near
    _look_back(first, config, stream)
    with_this_token = [Comparison(here, one, NEAREST_MATCH), Comparison(one, two, NEXT_MATCH)]
    before_it = [Comparison(one, two, NEAREST_MATCH), Comparison(two, three, NEXT_MATCH)]
    said_lately = [Comparison(stream.lately, stream.lately, LATELY_MATCH)]
    _compare_and_copy(second, config, stream, (with_this_token, before_it), rng)
    _compare_and_copy(third, config, stream, (said_lately,), rng)


def _stream(config: llama.LlamaConfig, rng: np.random.Generator) -> Stream:
    half, size = config.width // 2, 3 * config.head_dim // 8
    signature, turn = np.zeros((config.width, half)), np.zeros((config.width, config.width))
    signature[:half], turn[:half, :half] = _rotation(half, rng), _rotation(half, rng)
    ends = half + size * np.arange(1, len(NEAR_OFFSETS) + 1)
    _, *near, lately, _ = np.split(np.eye(config.width), [half, *ends, ends[-1] + 2 * size], axis=1)
    return Stream(signature, turn, near, lately)


def _look_back(layer: llama.DecoderLayer, config: llama.LlamaConfig, stream: Stream) -> None:
    """One head per offset writes the first features of what stands there, the next one the last features of what was
    said lately."""
    query, key, output = kernels(layer.attention, config)
    query, key = query * RANDOM_QUERY_KEY, key * RANDOM_QUERY_KEY
    unit = _feature_size(config)
    frequencies = np.asarray(llama.rope_frequencies(config))
    query[-1], key[-1] = 0, 0
    key[-1, :, : len(frequencies)] = 1 / (CONSTANT_FEATURE * unit)
    near = [(offset, NEAR_PAIRS, NEAR_SCORE) for offset in NEAR_OFFSETS]
    for head, (offset, pairs, score) in enumerate([*near, (LATELY_OFFSET, LATELY_PAIRS, LATELY_SCORE)]):
        strength = np.zeros(len(frequencies))
        strength[pairs] = score * config.head_dim**0.5 / len(strength[pairs]) / (CONSTANT_FEATURE * unit)
        angles = frequencies * offset
        query[-1, head] = np.concatenate([strength * np.cos(angles), -strength * np.sin(angles)])
    for head, where in enumerate(stream.near):
        output[head, : where.shape[1]] += EMBEDDING_SCALE / unit * where.T
    output[len(near), -stream.lately.shape[1] :] += LATELY_SCALE * EMBEDDING_SCALE / unit * stream.lately.T
    value = np.tile(stream.signature[:, : config.head_dim], config.kv_heads)
    set_kernels(layer.attention, query, key, value, output)


def _compare_and_copy(
    layer: llama.DecoderLayer,
    config: llama.LlamaConfig,
    stream: Stream,
    comparisons: Sequence[Sequence[Comparison]],
    rng: np.random.Generator,
) -> None:
    """Key/value heads take the sums of comparisons in turn; what they attend to is copied."""
    query, key, output = kernels(layer.attention, config)
    query, key = query * RANDOM_QUERY_KEY, key * RANDOM_QUERY_KEY
    group = config.query_heads // config.kv_heads
    still = np.flatnonzero(np.tile(np.asarray(llama.rope_frequencies(config)) * config.max_length < STILL, 2))
    for kv_head in range(config.kv_heads):
        for at_query, at_key, strength in comparisons[kv_head % len(comparisons)]:
            size = at_query.shape[1]
            larger = max(size, len(still))
            compared = np.zeros((size, config.head_dim))
            compared[:, still] = _rotation(larger, rng)[:size, : len(still)] * (larger / len(still)) ** 0.5
            query[:, kv_head * group : (kv_head + 1) * group] += strength * (at_query @ compared)[:, None]
            key[:, kv_head] += strength * at_key @ compared
    value = stream.signature[:, : config.kv_heads * config.head_dim]
    copied = (value.T @ stream.turn).reshape(config.kv_heads, config.head_dim, config.width)
    output += COPY_SCALE * EMBEDDING_SCALE / _feature_size(config) * np.repeat(copied, group, axis=0)
    set_kernels(layer.attention, query, key, value, output)


def _feature_size(config: llama.LlamaConfig) -> float:
    """How large a token's features are once they are normalised: they fill half of the stream beside the constant."""
    return (0.5 + CONSTANT_FEATURE**2 / config.width) ** -0.5


def _rotation(size: int, rng: np.random.Generator) -> Float[np.ndarray, "n n"]:
    return np.linalg.qr(rng.normal(size=(size, size)))[0]
