"""Streams of keys, values and queries to measure caches on: laws with a known structure, and what a model computes.

The synthetic ones are drawn at norm one, since their laws fix directions alone; `Streams.scaled` sets the norms. g
stands for a fresh standard normal vector in what follows.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from experiments.common.tasks import line_retrieval as task
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.generation.prefill import prefill_layers
from kvjax_models.model.llama import Llama

Tokens = tuple[Float[np.ndarray, "n D"], Float[np.ndarray, "n D"], Float[np.ndarray, "Q D"]]


@dataclasses.dataclass(frozen=True)
class Streams:
    """Rows that are independent streams of n tokens, each with the Q queries that are asked after them."""

    keys: Float32[np.ndarray, "R n H_kv D"]
    values: Float32[np.ndarray, "R n H_kv D"]
    queries: Float32[np.ndarray, "R Q H_q D"]
    # Of the n tokens themselves, for policies that learn from a prompt's queries; only where they were asked for.
    prompt_queries: Float32[np.ndarray, "R n H_q D"] | None = None

    def scaled(self, norm: float, value_norm: float | None = None) -> "Streams":
        """Every key and query at l2 norm `norm`, every value at `value_norm` (by default a fifth of it, about what
        is measured on Llama 3.1)."""
        value_norm = norm / 5 if value_norm is None else value_norm
        prompt = None if self.prompt_queries is None else _at(norm, self.prompt_queries)
        return Streams(_at(norm, self.keys), _at(value_norm, self.values), _at(norm, self.queries), prompt)


def synthetic(
    name: str, seeds: Sequence[int], tokens: int, queries: int, head_dim: int = 128, *, prompt_queries: bool = False
) -> Streams:
    """Streams of the named law with one head, norms one, a row per seed; a row depends on its own seed alone. The
    prompt's queries follow the law of those that are asked.

    Raises:
        ValueError: for an unknown name, with the known ones.
    """
    if name not in SYNTHETIC:
        raise ValueError(f"stream {name!r} is not known; known: {', '.join(SYNTHETIC)}")
    rows = [SYNTHETIC[name](np.random.default_rng(seed), tokens, queries, head_dim) for seed in seeds]
    keys, values, asked = (np.stack([row[part] for row in rows])[:, :, None] for part in range(3))
    drawn = Streams(keys, values, asked).scaled(1.0, 1.0)
    if not prompt_queries:
        return drawn
    # The same seed gives the same law (centres, subspaces); what comes behind the first queries was not asked.
    more = [SYNTHETIC[name](np.random.default_rng(seed), tokens, queries + tokens, head_dim)[2] for seed in seeds]
    return dataclasses.replace(drawn, prompt_queries=_at(1.0, np.stack(more)[:, queries:, None]))


def recorded(
    model: Llama,
    tokenizer: Tokenizer,
    seeds: Sequence[int],
    tokens: int,
    queries: int,
    *,
    prompt_queries: bool = False,
) -> Iterator[tuple[int, Streams]]:
    """What every layer of a model computes on documents that it was not trained on, one per seed, at its own norms.

    Keys and values are those of a prompt's first `tokens` tokens; queries (of all heads) those of its last `queries`,
    which end in the question about one of the document's lines. A prompt is a few tokens longer than the two together,
    because it ends where a question does; the tokens between them are left out.

    Yields:
        The number of each layer and its streams.

    Raises:
        ValueError: for more tokens than the model can read.
    """
    for number, found in prompt_streams(model, tokenizer, seeds, tokens + queries, queries, prompt_queries):
        prompt = None if found.prompt_queries is None else found.prompt_queries[:, :tokens]
        yield number, Streams(found.keys[:, :tokens], found.values[:, :tokens], found.queries, prompt)


def prompt_streams(
    model: Llama,
    tokenizer: Tokenizer,
    seeds: Sequence[int],
    tokens: int,
    queries: int,
    prompt_queries: bool = False,
) -> Iterator[tuple[int, Streams]]:
    """As `recorded`, but prompts have `tokens` tokens (or a few more), whose queries are the last `queries` of them.

    Keys and queries are rotated. Every row's document is decided by its seed alone; no seed of training is used.
    """
    if tokens > model.config.max_length:
        raise ValueError(f"{tokens} tokens are more than the {model.config.max_length} that the model can read")

    def make(rng: np.random.Generator) -> task.Document:
        return task.generate_for_tokens(rng, lambda text: len(tokenizer.encode(text)), tokens)

    documents = [document for seed in seeds for document in task.documents(task.EVALUATION_SEED + seed, 1, make)]
    prompts = [tokenizer.encode(document.context + document.question) for document in documents]
    yield from read_streams(model, prompts, tokens, queries, prompt_queries)


def read_streams(
    model: Llama, prompts: Sequence[Sequence[int]], tokens: int, queries: int, prompt_queries: bool = False
) -> Iterator[tuple[int, Streams]]:
    """What every layer of a model computes on prompts of its own tokens, a row each: rotated keys and values of the
    first `tokens` tokens (no prompt may be shorter), queries of each prompt's last `queries`, and of the first
    `tokens` where the prompt's own are asked for."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    padded = np.zeros((len(prompts), -(-max(lengths) // _CHUNK) * _CHUNK), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    asked = (max(lengths) if prompt_queries else queries,) * model.config.layers
    for number, read in enumerate(prefill_layers(model, padded, jnp.asarray(lengths), _CHUNK, asked)):
        keys, values, last = (np.asarray(x) for x in (read.keys[:, :tokens], read.values[:, :tokens], read.queries))
        of_prompt = None
        if prompt_queries:  # right-aligned: a row's first query stands behind those that its longer neighbours have
            of_prompt = np.stack([row[-length:][:tokens] for row, length in zip(last, lengths, strict=True)])
        yield number, Streams(keys, values, last[:, -queries:], of_prompt)


def exact_attention(streams: Streams) -> Float[np.ndarray, "R Q H_q D"]:
    """float64 attention of every query to all tokens of its row."""
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
    """|z - Attn| / |Attn| in l2, its mean over each row's queries and heads."""
    distance = np.linalg.norm(attended - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    return distance.mean(axis=(1, 2))


def clamped_errors(
    attended: Float[np.ndarray, "R Q H_q D"], exact: Float[np.ndarray, "R Q H_q D"]
) -> Float[np.ndarray, "R"]:
    """As the notebook that is released with BalanceKV measures its Figures 1 and 3: |z - Attn| / |max(Attn, 1e-8)|, the
    norms of vectors, its mean over each row. What is negative in exact attention is missing below, so that it is larger
    than `relative_errors`."""
    distance = np.linalg.norm(attended - exact, axis=-1) / np.linalg.norm(np.maximum(exact, 1e-8), axis=-1)
    return distance.mean(axis=(1, 2))


def weighted_terms(
    queries: Float[Array, "Q D"], keys: Float[Array, "S D"], log_weight: Float[Array, "S"] | float = 0.0
) -> Float[Array, "Q S"]:
    """exp(<q, k> / sqrt(D) + log-weight), the terms of both sums of attention, without a maximum taken out: for norms
    up to 20, whose terms float32 holds."""
    return jnp.exp(queries @ keys.T / math.sqrt(keys.shape[1]) + log_weight)


def effective_rank(keys: Float[np.ndarray, "n D"], most: int = 1024) -> float:
    """How many directions the kernel exp(<k_i, k_j> / sqrt(D)) of a stream's keys spreads over: the exponential of the
    entropy of its normalised eigenvalues, from 1 to the number of keys. It is taken over at most `most` keys, at even
    distances, and so never exceeds that; figures compare at one `most`."""
    keys = keys[:: -(-len(keys) // most)].astype(np.float64)
    logits = keys @ keys.T / np.sqrt(keys.shape[1])
    shares = np.maximum(np.linalg.eigvalsh(np.exp(logits - logits.max())), 0)
    shares = shares[shares > 0] / shares.sum()
    return float(np.exp(-np.sum(shares * np.log(shares))))


_CHUNK = 128  # tokens per chunk of exact prefill


def _iid(rng: np.random.Generator, tokens: int, queries: int, head_dim: int) -> Tokens:
    """k = g, v = g: nothing to exploit."""
    return _normal(rng, tokens, head_dim), _normal(rng, tokens, head_dim), _normal(rng, queries, head_dim)


def _tight(rng: np.random.Generator, tokens: int, queries: int, head_dim: int) -> Tokens:
    """64 clusters of centre c_j = g and mean value w_j = g, far smaller than the distances between them: token i takes
    j uniformly, k = c_j + .1 g, v = w_j + .3 g."""
    centers, means = _normal(rng, 64, head_dim), _normal(rng, 64, head_dim)
    cluster, asked = rng.integers(64, size=tokens), rng.integers(64, size=queries)
    return (
        centers[cluster] + 0.1 * _normal(rng, tokens, head_dim),
        means[cluster] + 0.3 * _normal(rng, tokens, head_dim),
        centers[asked] + 0.1 * _normal(rng, queries, head_dim),
    )


def _drift(rng: np.random.Generator, tokens: int, queries: int, head_dim: int) -> Tokens:
    """32 centres that walk, c_j(i + 1) = sqrt(1 - 1e-6) c_j(i) + 1e-3 g, visited in runs of mean length 16: k = c_j(i)
    + .3 g, v = w_j + .5 g. Queries ask where a token drawn uniformly stood."""
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
    """A cluster per token: drawn uniformly for each run, whose length is geometric with mean 16."""
    run = np.cumsum(rng.random(tokens) < 1 / 16)
    return rng.integers(clusters, size=run[-1] + 1)[run]


def _walk(rng: np.random.Generator, times: Int[np.ndarray, "V"], head_dim: int) -> Float[np.ndarray, "V D"]:
    """The walk c(i + 1) = a c(i) + sqrt(1 - a^2) g, a^2 = 1 - 1e-6, from c = g, looked at at some times only.

    c(i) / a^i has independent increments, so that its values at those times are one cumulative sum.
    """
    log_a = 0.5 * np.log1p(-1e-6)
    variance = np.exp(-2 * log_a * times)  # of c(i) / a^i
    steps = np.sqrt(np.diff(variance, prepend=0.0))[:, None] * rng.standard_normal((len(times), head_dim))
    return np.cumsum(steps, axis=0) * np.exp(log_a * times)[:, None]


def _low_rank(rng: np.random.Generator, tokens: int, queries: int, head_dim: int) -> Tokens:
    """Keys near 8 dimensions, and values near a linear image of them: with a = g in 8 dimensions and U, W of random
    orthonormal columns, k = U a + .05 g, v = W a + .1 g."""
    to_key, to_value = (np.linalg.qr(_normal(rng, head_dim, 8))[0] for _ in range(2))
    latent = _normal(rng, tokens, 8)
    return (
        latent @ to_key.T + 0.05 * _normal(rng, tokens, head_dim),
        latent @ to_value.T + 0.1 * _normal(rng, tokens, head_dim),
        _normal(rng, queries, 8) @ to_key.T + 0.05 * _normal(rng, queries, head_dim),
    )


def _index(rng: np.random.Generator, tokens: int, queries: int, head_dim: int) -> Tokens:
    """The hard instance of BalanceKV's lower bound (its appendix C), on which no small cache can answer every query.

    It encodes the communication problem INDEX: one party holds a string of random bits and sends one message, from
    which the other must read any one bit. Here there are 2n bits, one per possible (key, value) pair. Public randomness
    divides them into groups of D. All pairs of a group have the same key, a vector of random signs (nearly orthogonal
    to those of other groups), and the D values of a group are the standard basis e_1 ... e_D, so that a pair is known
    by its group and its coordinate. The stream holds the n pairs whose bit is one, in random order; the other half is
    removed. A query is the key of one group: it stands for asking about any bit of the group, kept or removed alike,
    because coordinate j of exact attention is large where the pair (group, e_j) was kept and small where it was
    removed. A cache that answers every such query to within the gap therefore holds all bits.
    """
    groups = -(-2 * tokens // head_dim)
    signs = 2.0 * rng.integers(2, size=(groups, head_dim)) - 1
    kept = rng.permutation(groups * head_dim)[:tokens]
    group, coordinate = np.divmod(kept, head_dim)
    return signs[group], np.eye(head_dim)[coordinate], signs[rng.integers(groups, size=queries)]


SYNTHETIC: dict[str, Callable[[np.random.Generator, int, int, int], Tokens]] = {
    "iid": _iid,
    "tight": _tight,
    "drift": _drift,
    "low_rank": _low_rank,
    "index": _index,
}


def _normal(rng: np.random.Generator, count: int, head_dim: int) -> Float32[np.ndarray, "n D"]:
    return rng.standard_normal((count, head_dim), np.float32)


def _at(norm: float, vectors: Float[np.ndarray, "... D"]) -> Float32[np.ndarray, "... D"]:
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return (norm / lengths * vectors).astype(np.float32)
