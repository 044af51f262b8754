"""Attention Matching (Zweiger et al. 2026): fewer entries that reproduce the attention of reference queries.

A selection of tokens, which is then fitted such that attention to it equals attention to all tokens, for queries like
the references. Per KV head:

1. Reference queries are taken from the prompt, or from a repetition of it, and their attention to the entire prompt is
   computed: logits, softmax denominators and outputs.
2. Keys are chosen: those with the largest root mean square of attention, or by orthogonal matching pursuit.
3. Each chosen key gets a log-weight. The weights solve a non-negative least squares problem: the weighted sum of the
   chosen exponentials must equal the denominator of all keys, for every reference.
4. Each chosen key gets a new value. The values solve a ridge regression: the references must get the attention
   outputs of the full cache. The penalty pulls values towards the original ones.
5. Optionally, Adam refines keys, log-weights and values together.

Sinks and recent tokens keep weight 1 and their values. Attention reads the entries like any others: log-weights are
added to the logits.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax import rope
from kvjax.methods.attention_matching.attention_fit import (
    References,
    Slots,
    attention_shares,
    capped_logits,
    fit_log_weights,
    fit_values,
    refine,
)
from kvjax.methods.attention_matching.least_squares import matching_pursuit
from kvjax.methods.top_k import top_k_store
from kvjax.methods.top_k.top_k_policy import TopKPolicy, prompt_mask
from kvjax.methods.top_k.top_k_store import TopKStore, init_top_k_store
from kvjax.policy import Prompt, Repetition, Requirements, check_above, check_min
from kvjax.prompt_attention import check_prompt_queries
from kvjax.shared.per_head import map_rows, per_head
from kvjax.spec import CacheSpec

_QUERY_BLOCK = 64  # reference queries whose attention to the entire prompt exists at a time
_BOUNDS = {"rms": (math.exp(-3), math.exp(3)), "omp": (math.exp(-7), math.exp(7))}  # of weights, as released
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2  # its multiples are evenly spread modulo 1
_NNLS_STEPS = {"rms": 2, "omp": 0}


@dataclasses.dataclass(frozen=True)
class AttentionMatching(TopKPolicy):
    """Keeps a subset of the keys, with log-weights and new values that reproduce the attention of reference queries.

    Log-weights give the kept keys the softmax denominators of all keys (non-negative least squares). Values are then
    fitted to the attention outputs (ridge regression towards the original values). Queries unlike the
    references are approximated less well: tokens to which few references attend are lost, single facts among them.
    Sinks and recent tokens are kept exactly, and rows of at most `budget` tokens too. Log-weights are stored in the
    dtype of the cache. Inherited settings: see `TopKPolicy`.

    Attributes:
        references: source of the reference queries: the prompt, a repetition of the prompt as in `KVzip`, which needs a
            second pass, or both. All reference queries attend to the entire prompt.
        n_future_positions: positions after the prompt to which RoPE moves the reference queries, evenly spread, because
            later queries have these distances from the keys; needs `CacheSpec.rope_frequencies`. None leaves the
            queries at their positions, as in the paper.
        max_references: reference queries per KV head and its group of query heads, evenly spaced.
        selection: "rms" keeps the keys with the largest root mean square of attention. "omp" chooses keys by
            orthogonal matching pursuit, which is better and slower: its time grows with the cube of the budget.
        refine_steps: steps of Adam by which keys, log-weights and values are refined together; needs optax.
        ridge: penalty of changes of weights and of values, relative to the squared norm of the attention weights.
        chunk_tokens: tokens that are repeated at a time.
        instruction: token ids before the first chunk (see `kvjax.policy.Repetition`).
        continuation: token ids before a further chunk.
        suffix: token ids between either and the chunk.

    Reference:
        Attention Matching (https://arxiv.org/abs/2602.16284) and the released settings AM-HighestAttnKeys-basic and
        AM-OMP-basic.
    """

    references: Literal["prompt", "repetition", "both"] = "prompt"
    n_future_positions: int | None = 256
    max_references: int = 1024
    selection: Literal["rms", "omp"] = "rms"
    refine_steps: int = 0
    ridge: float = 1e-4
    chunk_tokens: int = 2048
    instruction: tuple[int, ...] = ()
    continuation: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    keeps_entries = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_min(1, max_references=self.max_references, n_future_positions=self.n_future_positions)
        check_min(0, refine_steps=self.refine_steps)
        check_above(0, ridge=self.ridge)
        _ = self.requires

    @property
    def requires(self) -> Requirements:  # type: ignore[override]
        """All queries of the prompt, or a repetition of it."""
        repetition = Repetition(self.chunk_tokens, self.instruction, self.continuation, self.suffix, sinks=self.sinks)
        return Requirements(
            prompt_queries=0 if self.references == "repetition" else "all",
            repetition=None if self.references == "prompt" else repetition,
            entire_prompt=True,
        )

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> TopKStore:
        """Returns an empty store.

        Args:
            row_keys: not used, because the policy draws no random numbers.

        Returns:
            A store with `num_slots(spec)` weighted slots per KV head.
        """
        return init_top_k_store(spec, self.num_slots(spec), weighted=True)

    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        """Returns the mean squares of attention, or the order of matching pursuit."""
        with jax.default_matmul_precision("highest"):
            return map_rows(lambda row: self._score(row, self._read_prompt(row)), prompt)

    def prefill(self, state: TopKStore, prompt: Prompt) -> TopKStore:
        """Keeps the tokens of highest rank, at most `budget` per KV head, and fits them to the references.

        Args:
            state: an empty store.

        Returns:
            The store.
        """
        # Row by row, because rounding decides among tokens of equal scores (see `map_rows`).
        return map_rows(self._fill_row, state, prompt)

    def _fill_row(self, state: TopKStore, prompt: Prompt) -> TopKStore:
        """Fills the store of one row."""
        assert state.log_weights is not None
        with jax.default_matmul_precision("highest"):
            references = self._read_prompt(prompt)
            rank = self.rank_scores(self._score(prompt, references), prompt.lengths)
            store = top_k_store.fill(state, rank, prompt.keys, prompt.values, prompt.lengths, self.budget)
            count = min(self.budget, prompt.keys.shape[2])
            _, position = jax.lax.top_k(rank, count)
            lengths = prompt.lengths[:, None, None]
            used = jnp.broadcast_to(jnp.arange(count) < lengths, position.shape)
            is_exact = (position < self.sinks) | (position >= lengths - self.num_recent) | (lengths <= self.budget)
            slots = Slots(
                keys=store.keys[:, :, :count].astype(jnp.float32),
                values=store.values[:, :, :count].astype(jnp.float32),
                log_weights=jnp.zeros(position.shape),
                used=used,
                fitted=used & ~is_exact,
            )
            slots = self._fit(prompt, references, slots, state.log_weights.dtype)
        return dataclasses.replace(
            store,
            keys=store.keys.at[:, :, :count].set(slots.keys.astype(store.keys.dtype)),
            values=store.values.at[:, :, :count].set(slots.values.astype(store.values.dtype)),
            log_weights=state.log_weights.at[:, :, :count].set(slots.log_weights.astype(state.log_weights.dtype)),
        )

    def _read_prompt(self, prompt: Prompt) -> References:
        """Computes the attention of the reference queries to the entire prompt."""
        queries, exists, position = self._queries(prompt)
        batch, kv_heads, _, head_dim = prompt.keys.shape
        group = queries.shape[2] // kv_heads
        count = min(max(self.max_references // group, 1), queries.shape[1])
        index, exists = _evenly_spaced(exists, count)
        queries = jnp.take_along_axis(queries, index[..., None, None], axis=1).astype(jnp.float32)
        if self.n_future_positions is not None:
            if prompt.rope_frequencies is None:
                raise ValueError("n_future_positions needs CacheSpec.rope_frequencies; pass them, or None")
            future = jnp.floor(self.n_future_positions * (jnp.arange(count) * _GOLDEN_RATIO % 1)).astype(jnp.int32)
            queries = rope.rotate(queries, *rope.rotation(future - position[index], prompt.rope_frequencies))
        queries = queries.reshape(batch, count, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
        valid = jnp.broadcast_to(exists[:, None, :, None], queries.shape[:4]).reshape(batch, kv_heads, -1)
        return attend_references(prompt, queries.reshape(batch, kv_heads, -1, head_dim), valid)

    def _queries(self, prompt: Prompt) -> tuple[Float[Array, "B N H_q D"], Bool[Array, "B N"], Int[Array, "N"]]:
        """Returns all candidates for reference queries, which of them exist, and positions after the prompt's end."""
        candidates: list[tuple[Array, Array, Array]] = []
        if self.references != "repetition":
            queries = check_prompt_queries(self, prompt)
            position = jnp.arange(-queries.shape[1], 0)
            candidates.append((queries, position >= -prompt.lengths[:, None], position))
        if self.references != "prompt":
            if prompt.repeated is None:
                raise ValueError(
                    "AttentionMatching needs a repetition of the prompt; pass prompt.repeated, as kvjax_models does, "
                    'or references="prompt"'
                )
            batch, texts = prompt.repeated.lengths.shape
            width = prompt.repeated.queries.shape[1] // texts
            exists = jnp.arange(width) < prompt.repeated.lengths[..., None]
            position = jnp.tile(jnp.arange(width), texts)
            candidates.append((prompt.repeated.queries, exists.reshape(batch, -1), position))
        all_queries, all_exist, positions = zip(*candidates, strict=True)
        return jnp.concatenate(all_queries, axis=1), jnp.concatenate(all_exist, axis=1), jnp.concatenate(positions)

    def _score(self, prompt: Prompt, references: References) -> Float[Array, "B H_kv T"]:
        """Returns scores of all tokens. A head at a time is in memory for matching pursuit."""
        if self.selection == "rms":
            return references.score
        position, length = jnp.arange(prompt.keys.shape[2]), prompt.lengths[:, None, None]
        exact = (position < self.sinks) | (position >= length - self.num_recent)
        count = max(self.budget - self.sinks - self.num_recent, 1)

        def pursue(head: tuple[Array, ...]) -> Float[Array, "T"]:
            """Scores the tokens of one head, from its references, its keys and two masks."""
            queries, valid, log_mass, sink_logits, keys, present, exact = head
            share = attention_shares(queries, valid, log_mass, keys, present, prompt.logit_cap)
            target = jnp.where(valid, 1 - jnp.exp(sink_logits - log_mass), 0) - jnp.sum(
                jnp.where(exact, share, 0), axis=1
            )
            free = present & ~exact
            return matching_pursuit(jnp.where(free, share, 0), target, free, count, _BOUNDS["omp"], self.ridge)

        shape = prompt.keys.shape[:3]
        masks = [jnp.broadcast_to(mask, shape) for mask in (prompt_mask(prompt), exact)]
        arrays = (*references[:4], prompt.keys.astype(jnp.float32), *masks)
        heads = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrays)
        return jax.lax.map(pursue, heads).reshape(shape)

    def _fit(self, prompt: Prompt, references: References, slots: Slots, dtype: Any) -> Slots:
        """Fits log-weights and values of every head, and refines the result."""
        bounds, iterations = _BOUNDS[self.selection], _NNLS_STEPS[self.selection]

        def fit_head(references: References, slots: Slots) -> Slots:
            """Fits one head."""
            slots = fit_log_weights(references, slots, bounds, iterations, self.ridge, dtype, prompt.logit_cap)
            slots = fit_values(references, slots, self.ridge, prompt.logit_cap)
            return (
                refine(references, slots, self.refine_steps, bounds, prompt.logit_cap) if self.refine_steps else slots
            )

        return per_head(fit_head)(references, slots)


def _evenly_spaced(exists: Bool[Array, "B N"], count: int) -> tuple[Int[Array, "B n"], Bool[Array, "B n"]]:
    """Returns evenly spaced indices of existing queries in every row, and which of them exist."""
    number, index = jnp.sum(exists, axis=1, keepdims=True, dtype=jnp.int32), jnp.arange(count, dtype=jnp.int32)
    # index * number // count, whose product could overflow
    spaced = index * (number // count) + index * (number % count) // count
    spaced = jnp.where(number > count, spaced, index)
    return jnp.take_along_axis(jnp.argsort(~exists, axis=1, stable=True), spaced, axis=1), index < number


def attend_references(
    prompt: Prompt, queries: Float[Array, "B H_kv R D"], valid: Bool[Array, "B H_kv R"]
) -> References:
    """Computes the attention of reference queries to an entire prompt, in blocks of queries.

    Args:
        queries: queries; the heads of a group take turns.
        valid: which queries exist.

    Returns:
        The references.
    """
    batch, kv_heads, count, _ = queries.shape
    block = min(_QUERY_BLOCK, count)
    padding = -count % block
    sinks = jnp.full((kv_heads, 1), -jnp.inf) if prompt.sink_logits is None else prompt.sink_logits
    sinks = jnp.tile(sinks.astype(jnp.float32).reshape(kv_heads, -1), (1, count))[:, :count]
    sinks = jnp.broadcast_to(sinks, valid.shape)

    def blocks(x: Array) -> Array:
        """Divides axis 2 into blocks, which are moved to the front."""
        x = jnp.pad(x, ((0, 0), (0, 0), (0, padding), *(((0, 0),) * (x.ndim - 3))))
        return jnp.moveaxis(x.reshape(*x.shape[:2], -1, block, *x.shape[3:]), 2, 0)

    keys, values = prompt.keys.astype(jnp.float32), prompt.values.astype(jnp.float32)
    present = prompt_mask(prompt)[:, :, None]

    def read(total: Float[Array, "B H_kv T"], item: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
        """Attends with one block of queries, and adds the squares of its probabilities to `total`."""
        queries, valid, sink = item
        logits = jnp.where(present, capped_logits(queries, keys, prompt.logit_cap), -jnp.inf)
        peak = jnp.maximum(jnp.max(logits, axis=-1), sink)
        peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
        weight = jnp.exp(logits - peak[..., None])
        mass = jnp.where(valid, jnp.sum(weight, axis=-1) + jnp.exp(sink - peak), 1.0)
        probability = jnp.where(valid[..., None], weight / mass[..., None], 0.0)
        return total + jnp.sum(jnp.square(probability), axis=2), (peak + jnp.log(mass), probability @ values)

    items = (blocks(queries), blocks(valid), blocks(sinks))
    total, results = jax.lax.scan(read, jnp.zeros(prompt.keys.shape[:3]), items)
    log_mass, outputs = (
        jnp.moveaxis(x, 0, 2).reshape(batch, kv_heads, -1, *x.shape[4:])[:, :, :count] for x in results
    )
    score = total / jnp.maximum(jnp.sum(valid, axis=2, dtype=jnp.float32), 1)[..., None]
    return References(queries, valid, log_mass, sinks, outputs, score)
