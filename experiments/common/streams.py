"""Streams of keys, values and queries: synthetic, or recorded from a model.

Synthetic streams have norm one; `Streams.scaled` changes it. Below, g denotes a new standard normal vector.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from experiments.tasks import haystacks, passages
from experiments.tasks.task import Request
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.model.llama import Llama
from kvjax_models.runner.prefill import prefill_layers

Tokens = tuple[Float[np.ndarray, "n D"], Float[np.ndarray, "n D"], Float[np.ndarray, "Q D"]]


@dataclasses.dataclass(frozen=True)
class Streams:
    """Independent streams of n tokens, one per row, with Q queries after them.

    Attributes:
        keys: the keys.
        values: the values.
        queries: the queries.
        prompt_queries: queries of the n tokens, for policies that need a prompt's queries; None if not requested.
    """

    keys: Float32[np.ndarray, "R n H_kv D"]
    values: Float32[np.ndarray, "R n H_kv D"]
    queries: Float32[np.ndarray, "R Q H_q D"]
    prompt_queries: Float32[np.ndarray, "R n H_q D"] | None = None

    def scaled(self, norm: float, value_norm: float | None = None) -> "Streams":
        """Returns the streams with other norms.

        Args:
            norm: l2 norm of keys and queries.
            value_norm: l2 norm of values; by default a fifth of `norm`, as measured on Llama 3.1.

        Returns:
            The streams.
        """
        value_norm = norm / 5 if value_norm is None else value_norm
        prompt = None if self.prompt_queries is None else _with_norm(norm, self.prompt_queries)
        return Streams(
            _with_norm(norm, self.keys), _with_norm(value_norm, self.values), _with_norm(norm, self.queries), prompt
        )


def synthetic(
    name: str, seeds: Sequence[int], tokens: int, queries: int, head_dim: int = 128, *, prompt_queries: bool = False
) -> Streams:
    """Returns streams with one head and norm one, one row per seed.

    Args:
        name: a name in `SYNTHETIC`.
        seeds: seeds of the rows.
        tokens: number of tokens.
        queries: number of queries.
        head_dim: dimensions of keys and values.
        prompt_queries: whether to draw queries of the tokens, from the distribution of the queries.

    Returns:
        The streams.

    Raises:
        ValueError: if the name is unknown.
    """
    if name not in SYNTHETIC:
        raise ValueError(f"stream {name!r} is not known; known: {', '.join(SYNTHETIC)}")
    rows = [SYNTHETIC[name](np.random.default_rng(seed), tokens, queries, head_dim) for seed in seeds]
    keys, values, asked = (np.stack([row[part] for row in rows])[:, :, None] for part in range(3))
    drawn = Streams(keys, values, asked).scaled(1.0, 1.0)
    if not prompt_queries:
        return drawn
    # The same seed gives the same centers and subspaces; only the later queries are new.
    more = [SYNTHETIC[name](np.random.default_rng(seed), tokens, queries + tokens, head_dim)[2] for seed in seeds]
    return dataclasses.replace(drawn, prompt_queries=_with_norm(1.0, np.stack(more)[:, queries:, None]))


def recorded(
    model: Llama, prompts: Sequence[Sequence[int]], queries: int, *, prompt_queries: bool = False
) -> Iterator[tuple[int, Streams]]:
    """Computes keys, values and queries of every layer of a model.

    Args:
        model: the decoder.
        prompts: token ids of prompts of one length, one per row.
        queries: number of last tokens whose queries are returned; their keys and values are not part of the stream.
        prompt_queries: whether the queries of the stream's tokens are returned, too.

    Yields:
        The index of each layer and its stream, with rotated keys and queries.
    """
    length = len(prompts[0])
    tokens = length - queries
    padded = np.zeros((len(prompts), -(-length // _CHUNK) * _CHUNK), np.int32)
    padded[:, :length] = prompts
    counts = (length if prompt_queries else queries,) * model.config.layers
    lengths = jnp.full(len(prompts), length, jnp.int32)
    for number, layer in enumerate(prefill_layers(model, padded, lengths, _CHUNK, counts)):
        keys, values, last = (np.asarray(x, np.float32) for x in (layer.keys, layer.values, layer.queries))
        of_prompt = last[:, :tokens] if prompt_queries else None
        yield number, Streams(keys[:, :tokens], values[:, :tokens], last[:, -queries:], of_prompt)


def text_prompts(
    tokenizer: Tokenizer, source: str, seeds: Sequence[int], tokens: int, data_dir: pathlib.Path | None
) -> list[list[int]]:
    """Returns one prompt of `tokens` tokens per seed.

    Args:
        tokenizer: tokenizer of the model.
        source: "docs" for Python's documentation, or "books", "wikitext2" or "essays" in the data directory.
        seeds: seeds of the passages.
        tokens: length of the prompts.
        data_dir: the data directory.

    Returns:
        The token ids.
    """
    prompts = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        if source in (haystacks.DOCS, "essays"):
            text = haystacks.take(haystacks.words(rng, "" if source == "essays" else source, data_dir), 2 * tokens)
        else:
            request = Request(tokenizer, tokens, 1, seed, data_dir)
            text = passages.make_task(f"perplexity_{source}", "", request).documents[0].context
        prompts.append(tokenizer.encode(text)[:tokens])
    return prompts


def exact_attention(streams: Streams) -> Float[np.ndarray, "R Q H_q D"]:
    """Returns the attention of every query to all tokens of its row, in float64."""
    _, queries, query_heads, head_dim = streams.queries.shape
    kv_heads = streams.keys.shape[2]
    attended = []
    for keys, values, asked in zip(streams.keys, streams.values, streams.queries, strict=True):
        grouped = asked.reshape(queries, kv_heads, -1, head_dim).transpose(1, 0, 2, 3).astype(np.float64)
        rows = grouped.reshape(kv_heads, -1, head_dim)
        logits = rows @ keys.transpose(1, 2, 0).astype(np.float64) / np.sqrt(head_dim)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        sums = weights @ values.transpose(1, 0, 2).astype(np.float64) / weights.sum(axis=-1, keepdims=True)
        attended.append(sums.reshape(kv_heads, queries, -1, head_dim).transpose(1, 0, 2, 3))
    return np.stack(attended).reshape(-1, queries, query_heads, head_dim)


def relative_errors(
    attended: Float[np.ndarray, "R Q H_q D"], exact: Float[np.ndarray, "R Q H_q D"]
) -> Float[np.ndarray, "R"]:
    """Returns the l2 error of attention relative to exact attention, averaged over queries and heads of each row."""
    distance = np.linalg.norm(attended - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    return distance.mean(axis=(1, 2))


def weighted_terms(
    queries: Float[Array, "Q D"], keys: Float[Array, "S D"], log_weight: Float[Array, "S"] | float = 0.0
) -> Float[Array, "Q S"]:
    """Returns exp(<q, k> / sqrt(D) + log-weight) without subtracting a maximum; float32 suffices for norms up to 20."""
    return jnp.exp(queries @ keys.T / math.sqrt(keys.shape[1]) + log_weight)


_CHUNK = 128  # tokens per chunk of exact prefill


def _iid(rng: np.random.Generator, tokens: int, queries: int, head_dim: int) -> Tokens:
    """Draws k = g, v = g."""
    return _normal(rng, tokens, head_dim), _normal(rng, tokens, head_dim), _normal(rng, queries, head_dim)


def _tight(rng: np.random.Generator, tokens: int, queries: int, head_dim: int) -> Tokens:
    """Draws 64 clusters with centers c_j = g and mean values w_j = g: k = c_j + .1 g, v = w_j + .3 g, j uniform."""
    centers, means = _normal(rng, 64, head_dim), _normal(rng, 64, head_dim)
    cluster, asked = rng.integers(64, size=tokens), rng.integers(64, size=queries)
    return (
        centers[cluster] + 0.1 * _normal(rng, tokens, head_dim),
        means[cluster] + 0.3 * _normal(rng, tokens, head_dim),
        centers[asked] + 0.1 * _normal(rng, queries, head_dim),
    )


def _drift(rng: np.random.Generator, tokens: int, queries: int, head_dim: int) -> Tokens:
    """Draws 32 centers that move, c_j(i + 1) = sqrt(1 - 1e-6) c_j(i) + 1e-3 g, in runs with mean length 16.

    k = c_j(i) + .3 g, v = w_j + .5 g; queries are near the center of a uniformly drawn token.

    Returns:
        Keys, values and queries.
    """
    means = _normal(rng, 32, head_dim)
    cluster = _runs(rng, tokens, clusters=32)
    centers = np.empty((tokens, head_dim), np.float32)
    for number in range(32):
        (visits,) = np.nonzero(cluster == number)
        centers[visits] = _walk(rng, visits, head_dim)
    asked = rng.integers(tokens, size=queries)
    return (
        centers + 0.3 * _normal(rng, tokens, head_dim),
        means[cluster] + 0.5 * _normal(rng, tokens, head_dim),
        centers[asked] + 0.3 * _normal(rng, queries, head_dim),
    )


def _runs(rng: np.random.Generator, tokens: int, clusters: int) -> Int[np.ndarray, "n"]:
    """Returns the cluster of each token: uniform for each run; lengths of runs are geometric with mean 16."""
    run = np.cumsum(rng.random(tokens) < 1 / 16)
    return rng.integers(clusters, size=run[-1] + 1)[run]


def _walk(rng: np.random.Generator, times: Int[np.ndarray, "V"], head_dim: int) -> Float[np.ndarray, "V D"]:
    """Returns c(i + 1) = a c(i) + sqrt(1 - a^2) g, a^2 = 1 - 1e-6, c(0) = g, at the given times.

    c(i) / a^i has independent increments, so its values are a cumulative sum.
    """
    log_a = 0.5 * np.log1p(-1e-6)
    variance = np.exp(-2 * log_a * times)  # of c(i) / a^i
    steps = np.sqrt(np.diff(variance, prepend=0.0))[:, None] * rng.standard_normal((len(times), head_dim))
    return np.cumsum(steps, axis=0) * np.exp(log_a * times)[:, None]


def _low_rank(rng: np.random.Generator, tokens: int, queries: int, head_dim: int) -> Tokens:
    """Draws keys near 8 dimensions: a = g in 8 dimensions, U and W orthonormal, k = U a + .05 g, v = W a + .1 g."""
    to_key, to_value = (np.linalg.qr(_normal(rng, head_dim, 8))[0] for _ in range(2))
    latent = _normal(rng, tokens, 8)
    return (
        latent @ to_key.T + 0.05 * _normal(rng, tokens, head_dim),
        latent @ to_value.T + 0.1 * _normal(rng, tokens, head_dim),
        _normal(rng, queries, 8) @ to_key.T + 0.05 * _normal(rng, queries, head_dim),
    )


SYNTHETIC: dict[str, Callable[[np.random.Generator, int, int, int], Tokens]] = {
    "iid": _iid,
    "tight": _tight,
    "drift": _drift,
    "low_rank": _low_rank,
}


def _normal(rng: np.random.Generator, count: int, head_dim: int) -> Float32[np.ndarray, "n D"]:
    return rng.standard_normal((count, head_dim), np.float32)


def _with_norm(norm: float, vectors: Float[np.ndarray, "... D"]) -> Float32[np.ndarray, "... D"]:
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return (norm / lengths * vectors).astype(np.float32)
