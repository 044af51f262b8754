"""TriAttention (2026), for comparisons: tokens to which the mean query of later positions attends.

    python -m experiments.triattention --task gsm8k_trace:256 --policy triattention --budget 128slots

It has the options of `experiments.evaluate`, whose policies the command completes with `triattention`.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

import kvjax
from experiments import evaluate
from experiments.common.flags import run_command
from kvjax import rope
from kvjax.methods.top_k import top_k_store
from kvjax.methods.top_k.top_k_policy import prompt_mask
from kvjax.methods.top_k.top_k_store import TopKStore, init_top_k_store
from kvjax.policy import Policy, Prompt, Requirements, check_min
from kvjax.prompt_attention import check_prompt_queries
from kvjax.quantization import dequantize
from kvjax.segment import SegmentLike
from kvjax.spec import CacheSpec
from kvjax.staging import Tokens
from kvjax.state import state


@state
class TriAttentionState:
    """The kept tokens, and statistics of the prompt's queries before RoPE."""

    store: TopKStore
    mean: Float[Array, "B H_kv G D"]  # float32, mean query of every query head of a group
    norm: Float[Array, "B H_kv G half_D"]  # float32, mean norm of each rotated pair of coordinates
    frequencies: Float[Array, "half_D"]  # float32, of RoPE


@dataclasses.dataclass(frozen=True)
class TriAttention(Policy[TriAttentionState]):
    """Keeps the newest tokens, and those with the highest trigonometric scores at every compaction.

    The score of a key is the mean logit of the mean query at distances 1, 2, 4, ... after the newest token, plus the
    products of norms that the mean leaves out. Scores are standardized per query head; a KV head takes the largest one
    of its group. The paper's mean queries come from calibration texts, here they are the prompt's.

    Attributes:
        budget: slots per KV head.
        sinks: first tokens, which are never dropped.
        recent: newest tokens that are always kept.
        max_distance: largest distance.
        compact_every: tokens between compactions (the paper's 128).

    Reference:
        TriAttention (https://arxiv.org/abs/2604.04921), and its released code for scores of keys after RoPE.
    """

    budget: int
    sinks: int = 4
    recent: int = 64
    max_distance: int = 2**16
    compact_every: int = 128

    requires = Requirements(prompt_queries="all", entire_prompt=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.sinks + max(self.recent, self.compact_every)
        check_min(1, compact_every=self.compact_every, max_distance=self.max_distance)
        check_min(least, budget=self.budget)

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> TriAttentionState:
        """Returns an empty store for `spec`; `row_keys` are not used."""
        newest = max(self.recent, spec.staging_slots or self.compact_every)
        shape = spec.batch, spec.kv_heads, spec.query_heads // spec.kv_heads
        return TriAttentionState(
            init_top_k_store(spec, self.budget, newest=newest),
            jnp.zeros((*shape, spec.head_dim)),
            jnp.zeros((*shape, spec.head_dim // 2)),
            jnp.zeros(spec.head_dim // 2),
        )

    def prefill(self, state: TriAttentionState, prompt: Prompt) -> TriAttentionState:
        """Measures the prompt's queries and keeps its tokens of highest score."""
        frequencies = prompt.rope_frequencies
        if frequencies is None:
            raise ValueError("TriAttention needs CacheSpec.rope_frequencies to undo RoPE on queries; pass them")
        batch, kv_heads, tokens, head_dim = prompt.keys.shape
        queries, position = check_prompt_queries(self, prompt), prompt.lengths[:, None] - tokens + jnp.arange(tokens)
        queries = rope.rotate(queries.astype(jnp.float32), *rope.rotation(-position, frequencies))
        queries = queries.reshape(batch, tokens, kv_heads, -1, head_dim)  # zeros before each row's first
        count = jnp.maximum(prompt.lengths, 1)[:, None, None, None]
        state = dataclasses.replace(
            state,
            mean=jnp.sum(queries, axis=1) / count,
            norm=jnp.sum(_pair_norms(queries), axis=1) / count,
            frequencies=frequencies,
        )
        score = self._score(state, prompt.keys, prompt_mask(prompt), prompt.lengths)
        position = jnp.arange(tokens)
        rank = jnp.where(position >= prompt.lengths[:, None, None] - self.recent, 1e30 * (1 + position / tokens), score)
        rank = jnp.where(position < self.sinks, jnp.inf, rank)
        rank = jnp.where(prompt_mask(prompt), rank, -jnp.inf)
        store = top_k_store.fill(state.store, rank, prompt.keys, prompt.values, prompt.lengths, self.budget)
        store = top_k_store.start_scores(store, rank, score, self.sinks, self.recent)
        return dataclasses.replace(state, store=store)

    def segments(self, state: TriAttentionState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        """Returns the kept tokens of `state`."""
        return (top_k_store.store_segment(state.store),)

    def compact(self, state: TriAttentionState, new: Tokens) -> TriAttentionState:
        """Scores stored and `new` tokens again and drops those of lowest score."""
        store = state.store
        assert store.scores is not None
        occupied = ~jnp.isneginf(store.scores)
        keys = jnp.concatenate([dequantize(store.keys).astype(jnp.float32), new.keys.astype(jnp.float32)], axis=2)
        present = jnp.broadcast_to(new.present[:, None], new.keys.shape[:3])
        valid = jnp.concatenate([occupied, present], axis=2)
        score = self._score(state, keys, valid, new.first + new.count)
        stored, arriving = jnp.split(score, [occupied.shape[2]], axis=2)
        store = dataclasses.replace(store, scores=jnp.where(occupied, stored, -jnp.inf).astype(store.scores.dtype))
        store = top_k_store.append_scored(store, dataclasses.replace(new, scores=arriving), self.sinks)
        return dataclasses.replace(state, store=store)

    def _score(
        self, state: TriAttentionState, keys: Float[Array, "B H_kv S D"], valid: Array, length: Int[Array, "B"]
    ) -> Float[Array, "B H_kv S"]:
        """Returns the scores of valid keys for queries after `length` tokens."""
        distance = 2 ** jnp.arange(self.max_distance.bit_length())
        angles = rope.rotation(length[:, None] - 1 + distance, state.frequencies)
        cos, sin = (jnp.mean(x, axis=1, keepdims=True) for x in angles)  # a mean of rotations is linear
        batch, *_, head_dim = state.mean.shape
        future = rope.rotate(state.mean.reshape(batch, 1, -1, head_dim), cos, sin).reshape(state.mean.shape)
        keys = keys.astype(jnp.float32)
        logits = jnp.einsum("bhgd,bhsd->bhgs", future, keys)
        spread = state.norm - _pair_norms(state.mean)
        logits += jnp.einsum("bhgd,bhsd->bhgs", spread, _pair_norms(keys))
        valid = jnp.broadcast_to(valid, keys.shape[:3])[:, :, None]
        count = jnp.maximum(jnp.sum(valid, axis=3, keepdims=True), 1)
        mean = jnp.sum(jnp.where(valid, logits, 0), axis=3, keepdims=True) / count
        variance = jnp.sum(jnp.where(valid, (logits - mean) ** 2, 0), axis=3, keepdims=True) / count
        return jnp.max((logits - mean) / jnp.sqrt(variance + 1e-6), axis=2)


def _pair_norms(x: Float[Array, "... D"]) -> Float[Array, "... half_D"]:
    """Returns the norms of the pairs of coordinates that RoPE rotates together."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.sqrt(first**2 + second**2)


if __name__ == "__main__":
    kvjax.register("triattention", TriAttention)
    run_command(evaluate.main, evaluate.Options)
