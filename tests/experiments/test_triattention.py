"""Scores of TriAttention, and the tokens that it keeps."""

import jax.numpy as jnp
import numpy as np

import kvjax
from experiments.triattention import TriAttention
from kvjax import rope
from tests.kvjax.support import read_weights, row_keys

TOKENS, DIM = 40, 64
FREQUENCIES = 10000.0 ** -np.linspace(0, 1, DIM // 2, endpoint=False)


def scores_of(queries, keys, now):
    """Returns the scores of rotated keys [T, D] by one head's queries before RoPE, in complex numbers."""
    queries, keys = (x[:, : DIM // 2] + 1j * x[:, DIM // 2 :] for x in (queries.astype(np.float64), keys))
    mean = queries.mean(0)
    logits = np.zeros(len(keys))
    for distance in 2.0 ** np.arange(17):
        future = mean * np.exp(1j * FREQUENCIES * (now + distance))
        logits += (future * keys.conj()).real.sum(1) / 17
    return logits + np.abs(keys) @ (np.abs(queries).mean(0) - np.abs(mean))


def test_every_compaction_scores_all_tokens_again():
    random = np.random.default_rng(0)
    policy = TriAttention(16, sinks=2, recent=4, compact_every=4)
    spec = kvjax.CacheSpec(
        2, 2, 1, DIM, max_prompt_tokens=28, max_new_tokens=12, rope_frequencies=tuple(FREQUENCIES.tolist())
    )
    keys = random.normal(size=(2, TOKENS, 1, DIM)).astype(np.float32)
    values = np.broadcast_to(np.eye(DIM, dtype=np.float32)[:TOKENS, None], keys.shape)
    queries = random.normal(size=(2, 28, 2, DIM)).astype(np.float32) + 1
    rotated = rope.rotate(jnp.asarray(queries), *rope.rotation(jnp.arange(28)[None], jnp.asarray(FREQUENCIES)))
    cache, counters = kvjax.init(policy, spec, row_keys(2))
    cache, counters, _ = kvjax.prefill(cache, counters, keys[:, :28], values[:, :28], jnp.array([28, 28]), rotated)
    kept = [list(range(28)), list(range(28))]
    for count in range(28, TOKENS + 1, 4):
        if count > 28:
            staged = kvjax.append(cache, counters, keys[:, count - 4 : count], values[:, count - 4 : count])
            cache, counters = kvjax.compact(*staged)
        for row, tokens in enumerate(kept):
            tokens += range(max(28, count - 4), count)
            scores = np.array([scores_of(queries[row, :, head], keys[row, tokens, 0], count - 1) for head in (0, 1)])
            scores -= scores.mean(1, keepdims=True)
            scores /= scores.std(1, keepdims=True)
            best = scores.max(0)
            best[[token < 2 or token >= count - 4 for token in tokens]] = np.inf
            kept[row] = sorted(tokens[i] for i in np.argsort(-best, kind="stable")[:16])
            assert np.flatnonzero(np.asarray(read_weights(cache, counters))[row, 0] > 0.5).tolist() == kept[row]
