"""Ada-KV (Feng et al. 2024): one budget for all KV heads of a layer."""

import dataclasses
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from kvjax.block_store import OUT_OF_RANGE
from kvjax.methods.top_k.top_k_policy import TopKPolicy, prompt_mask
from kvjax.methods.top_k.top_k_store import later_token_slots
from kvjax.policy import Policy, Prompt, Requirements
from kvjax.quantization import QuantizedArray, first_mean, write_entries
from kvjax.segment import Segment
from kvjax.shared.per_head import per_head
from kvjax.spec import CacheSpec, allocated_slots
from kvjax.staging import Tokens
from kvjax.state import kv_entries, state, static

T = TypeVar("T")


@state
class AdaKVState:
    """The slots of all heads as one pool; head h has slots [start, start + ranked + empty)."""

    # A slot of one head's row may hold another head's token: keys are stored without the mean of their own head.
    keys: Float[Array, "B H_kv S D"] = kv_entries(centered=False, written_once=True)
    values: Float[Array, "B H_kv S D_v"] = kv_entries(written_once=True)
    start: Int[Array, "B H_kv"]  # int32
    ranked: Int[Array, "B H_kv"]  # int32, tokens of the prompt that the head kept
    empty: Int[Array, "B H_kv"]  # int32, slots left for later tokens
    later: Int[Array, "B"]  # int32, tokens received after the prompt
    mean: Float[Array, "B H_kv D"] | None  # float32, mean of the first keys; None if the cache is not quantized
    slots: int = static()  # maximum number of tokens, over the number of heads; the last slots of the pool stay empty


@dataclasses.dataclass(frozen=True)
class AdaKV(Policy[AdaKVState]):
    """Keeps the tokens with the highest scores of all heads of a layer, so that heads get slots by need.

    The buffer has the size of one with equal heads. If devices shard the heads, the heads of one device share its
    slots. XLA multiplies the slots of all heads with every head's queries and masks the slots of other heads.

    Attributes:
        policy: the policy that scores tokens.
        alpha_safeguard: fraction of its budget that every head reserves for its best tokens, at least the sinks and
            the tokens of one compaction.

    Reference:
        Ada-KV, section 3.3 (https://arxiv.org/abs/2407.11550); kvpress's AdaKVPress.
    """

    policy: TopKPolicy
    alpha_safeguard: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.policy.keeps_entries:
            raise ValueError(
                f"policy={self.policy} changes the entries that it keeps; AdaKV needs a policy that selects tokens only"
            )
        if not 0 <= self.alpha_safeguard <= 1:
            raise ValueError(f"alpha_safeguard={self.alpha_safeguard} must be in [0, 1]")

    @property
    def compact_every(self) -> int:
        """Tokens between compactions of the policy."""
        return self.policy.compact_every

    @property
    def requires(self) -> Requirements:
        """Requirements of the policy, and an entire prompt."""
        return dataclasses.replace(self.policy.requires, entire_prompt=True)

    def min_budget(self, spec: CacheSpec | None = None) -> int:
        """Returns the smallest budget of the policy."""
        return self.policy.min_budget(spec)

    def for_layer(self, spec: CacheSpec) -> "AdaKV":
        """Returns Ada-KV with the budget of one layer.

        Returns:
            A policy whose inner policy is `policy.for_layer(spec)`.
        """
        return dataclasses.replace(self, policy=cast(TopKPolicy, self.policy.for_layer(spec)))

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> AdaKVState:
        """Returns an empty pool.

        Args:
            row_keys: not used, because the policy draws no random numbers.

        Returns:
            A state in which every head has `policy.num_slots(spec)` empty slots.
        """
        slots, shape = self.policy.num_slots(spec), (spec.batch, spec.kv_heads)
        zeros = jnp.zeros(shape, jnp.int32)
        return AdaKVState(
            keys=jnp.zeros((*shape, allocated_slots(slots), spec.head_dim), spec.dtype),
            values=jnp.zeros((*shape, allocated_slots(slots), spec.value_width), spec.dtype),
            start=zeros + slots * jnp.arange(spec.kv_heads, dtype=jnp.int32),
            ranked=zeros,
            empty=zeros + slots,
            later=jnp.zeros(spec.batch, jnp.int32),
            mean=None if spec.kv_formats is None else jnp.zeros((*shape, spec.head_dim), jnp.float32),
            slots=slots,
        )

    def prefill(self, state: AdaKVState, prompt: Prompt) -> AdaKVState:
        """Keeps the tokens with the highest rank among all heads, after each head's reserved share.

        Args:
            state: an empty pool.
            prompt: the prompt; the inner policy ranks its tokens.

        Returns:
            The pool. Slots that the prompt leaves empty are divided evenly among the heads.
        """
        rank, new_keys, mean = self._safeguarded(self.policy.rank(prompt)), prompt.keys, state.mean
        if mean is not None:
            mean = first_mean(mean, new_keys, prompt_mask(prompt))
            new_keys = new_keys - mean[:, :, None]
        keep = rank.shape[1] * min(self.policy.budget, rank.shape[2])

        def fill_row(keys: Array, values: Array, rank: Array, new_keys: Array, new_values: Array):
            """Fills one row's `keys` and `values` with the tokens of highest `rank`."""
            token, target, start, ranked, empty = _allocate(rank, keep, keys.shape[0] * state.slots)
            head, index = token
            keys, values = _put(keys, target, new_keys[head, index]), _put(values, target, new_values[head, index])
            return keys, values, start, ranked, empty

        keys, values, start, ranked, empty = jax.vmap(fill_row)(state.keys, state.values, rank, new_keys, prompt.values)
        return AdaKVState(keys, values, start, ranked, empty, state.later, mean, state.slots)

    def _safeguarded(self, rank: Float[Array, "B H T"]) -> Float[Array, "B H T"]:
        """Raises the rank of every head's best tokens above all other tokens, in the same order."""
        policy, tokens = self.policy, rank.shape[2]
        count = int(self.alpha_safeguard * policy.budget)
        if not policy.reserve_decode_slots:
            count = max(count, policy.sinks + policy.compact_every)
        count = min(count, tokens)
        if not count:
            return rank
        top, index = jax.lax.top_k(rank, count)
        safe = jnp.where(jnp.isneginf(top), top, jnp.maximum(top, _SAFE_RANK * (2 - jnp.arange(count) / count)))
        return per_head(lambda rank, index, safe: rank.at[index].set(safe))(rank, index, safe)

    def segments(self, state: AdaKVState, num_visible_staged: Int[Array, "B #T"]) -> tuple[Segment, ...]:
        """Returns one segment per head, all over the same pool.

        Args:
            num_visible_staged: not used, because staged tokens hide no slot.

        Returns:
            Segments of one KV head each, which read the head's slots only.
        """
        pool: Array | QuantizedArray = _single_head(state.keys)
        values = _single_head(state.values)
        stop = state.start + state.ranked + jnp.minimum(state.later[:, None], state.empty)

        def head_segment(head: int) -> Segment:
            """Returns the segment of a `head`."""
            keys = pool
            if isinstance(keys, QuantizedArray) and state.mean is not None:
                keys = dataclasses.replace(keys, offset=state.mean[:, head, None])
            return Segment(
                keys, values, start=state.start[:, head, None], stop=stop[:, head, None], kv_heads=np.array([head])
            )

        return tuple(head_segment(head) for head in range(state.start.shape[1]))

    def compact(self, state: AdaKVState, new: Tokens) -> AdaKVState:
        """Writes later tokens into each head's empty slots, then over its tokens of lowest rank.

        Args:
            new: the staged tokens; every head stores all of them.

        Returns:
            The pool.
        """
        number = state.later[:, None] + jnp.arange(new.keys.shape[2])
        target = later_token_slots(number[:, None], state.ranked, state.empty, self.policy.sinks)
        target = jnp.where(new.present[:, None], state.start[..., None] + target, OUT_OF_RANGE)

        def put(pool: Float[Array, "B H S *D"], new: Float[Array, "B H P *D"]) -> Float[Array, "B H S *D"]:
            return jax.vmap(_put)(pool, target, new)

        mean, new_keys = state.mean, new.keys
        if mean is not None:
            mean = first_mean(mean, new_keys, new.present[:, None])  # after an empty prompt
            new_keys = new_keys - mean[:, :, None]
        keys = write_entries(state.keys, new_keys, put, valid=new.present[:, None])
        values = write_entries(state.values, new.values, put)
        return dataclasses.replace(state, keys=keys, values=values, later=state.later + new.count, mean=mean)


_SAFE_RANK = 1e25  # above any score, below the rank of sinks and recent tokens


def _put(pool: Float[Array, "H S *D"], target: Int[Array, "*n"], new: Float[Array, "..."]) -> Float[Array, "H S *D"]:
    """Writes tokens into the slots of all heads, numbered head after head."""
    width = pool.shape[2:]
    flat, new = pool.reshape(-1, *width), new.reshape(-1, *width).astype(pool.dtype)
    return flat.at[target.reshape(-1)].set(new, mode="drop").reshape(pool.shape)


def _allocate(rank: Float[Array, "H T"], keep: int, slots: int):
    """Chooses one row's best tokens and their slots.

    Returns:
        The chosen tokens (head, index), their slots, and per head the first slot, the ranked and the empty slots.
    """
    heads, tokens = rank.shape
    top, index = jax.lax.top_k(rank.reshape(-1), keep)
    head, token, valid = index // tokens, index % tokens, ~jnp.isneginf(top)
    chosen = (head[:, None] == jnp.arange(heads)) & valid[:, None]
    ranked = jnp.sum(chosen, axis=0, dtype=jnp.int32)
    # The remaining slots are divided evenly; the first heads get one more.
    remaining = slots - jnp.sum(ranked)
    empty = remaining // heads + (jnp.arange(heads) < remaining % heads)
    start = jnp.cumsum(ranked + empty) - ranked - empty
    target = start[head] + jnp.cumsum(chosen, axis=0)[jnp.arange(keep), head] - 1
    return (head, token), jnp.where(valid, target, OUT_OF_RANGE), start, ranked, empty


def _single_head(x: T) -> T:
    """Merges the slots of all heads into one head."""
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0], 1, -1, *leaf.shape[3:]), x)
