"""The base class of policies that keep the highest-scoring tokens of a prompt.

Most published selections differ in one function: the score of a token. Everything else is here, per KV head:

1. The prompt is read exactly. `score` returns a number for every token, from keys, values, queries or a repetition.
2. Sinks rank first, then the last tokens, then all others by score.
3. The tokens of the highest ranks are copied into `budget` slots, in the order of rank; the others are dropped.
4. While decoding, a later token takes a free slot, or else the slot of the token with the lowest rank. Later tokens
   therefore need no score.

`AdaKV` replaces step 3 by a selection among all heads of a layer, `HeadBudgets` gives every head its number of slots.
"""

import abc
import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.methods.top_k import top_k_store
from kvjax.methods.top_k.top_k_store import TopKStore, init_top_k_store
from kvjax.policy import Policy, Prompt, Requirements, check_budget, check_min
from kvjax.segment import Segment
from kvjax.spec import TILE, CacheSpec, allocated_slots
from kvjax.staging import Tokens

_ABOVE_SCORES = 1e30  # above any score that a policy gives
_LOWEST_SCORE = -1e30  # of NaN, which `top_k` would rank above the sinks


@dataclasses.dataclass(frozen=True)
class TopKPolicy(Policy[TopKStore]):
    """Keeps the tokens of a prompt with the highest scores, per KV head.

    A subclass is a frozen dataclass with one method, `score`. The first tokens (sinks) and the last ones (recent) are
    always kept. Slots are in the order of rank, so that a later token needs no score: it takes a free slot, or the slot
    of the token with the lowest rank. `AdaKV` shares the budget among the heads of a layer, `HeadBudgets` divides it
    among all heads.

    Attributes:
        budget: slots per KV head, for the prompt and later tokens.
        sinks: first tokens, which are never dropped.
        recent: last tokens of the prompt, ranked right after the sinks.
        reserve_decode_slots: whether later tokens get `spec.max_new_tokens` slots beyond the budget, as in published
            selections. These slots count as bytes.
        compact_every: tokens between compactions. Until then all new tokens are read in addition to the kept ones.
    """

    budget: int
    sinks: int = 4
    recent: int = 0
    reserve_decode_slots: bool = False
    compact_every: int = 16

    requires = Requirements(entire_prompt=True)
    keeps_entries: ClassVar[bool] = True  # whether kept keys and values are the prompt's, without log-weights

    def __post_init__(self) -> None:
        super().__post_init__()
        check_min(0, recent=self.recent)
        check_budget(self.budget, self.sinks, compact_every=self.compact_every)
        if self.budget < self.sinks + self.num_recent:  # the window of a subclass has another name
            raise ValueError(
                f"budget={self.budget} slots cannot hold sinks={self.sinks} and {self.num_recent} recent tokens; "
                f"pass at least {self.sinks + self.num_recent}"
            )
        if self.budget < self.min_budget():
            raise ValueError(
                f"budget={self.budget} slots cannot hold sinks={self.sinks} and the compact_every={self.compact_every} "
                f"tokens of a compaction; pass at least {self.min_budget()}"
            )

    @abc.abstractmethod
    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        """Scores every token of a prompt for every KV head.

        Returns:
            Scores, float32; tokens with higher scores are kept. Scores past a row's length are ignored.
        """

    @property
    def num_recent(self) -> int:
        """Last tokens of the prompt that are always kept."""
        return self.recent

    def min_budget(self, spec: CacheSpec | None = None) -> int:
        """Returns the slots for the tokens that are always kept and for one compaction."""
        return max(self.sinks + max(self.num_recent, 0 if self.reserve_decode_slots else self.compact_every), 1)

    def for_layer(self, spec: CacheSpec) -> Policy[TopKStore]:
        """Returns the policy with at most as many slots as there can be tokens.

        Returns:
            The policy with a budget of at most `spec.capacity`, or `spec.max_prompt_tokens` if slots for later tokens
            are reserved, rounded up to a multiple of 16.
        """
        tokens = spec.max_prompt_tokens if self.reserve_decode_slots else spec.capacity
        largest = max(-(-tokens // TILE) * TILE, self.min_budget())
        return self if self.budget <= largest else dataclasses.replace(self, budget=largest)

    def num_slots(self, spec: CacheSpec) -> int:
        """Returns the number of slots per KV head.

        Returns:
            The budget, plus slots for `spec.max_new_tokens` if `reserve_decode_slots`.
        """
        return allocated_slots(self.budget + spec.max_new_tokens) if self.reserve_decode_slots else self.budget

    def rank(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        """Ranks the tokens of a prompt: sinks first, then recent tokens, then all others by score.

        Returns:
            float32 numbers, larger for tokens to keep; -inf past a row's length.
        """
        return self.rank_scores(self.score(prompt), prompt.lengths)

    def rank_scores(self, score: Float[Array, "B H_kv T"], lengths: Int[Array, "B"]) -> Float[Array, "B H_kv T"]:
        """Ranks the tokens of a prompt by their scores, below sinks and recent tokens.

        Args:
            score: scores as `score` returns them; NaN is the lowest.
            lengths: tokens of every row.

        Returns:
            Numbers as `rank` returns them.
        """
        tokens = score.shape[2]
        score = jnp.where(jnp.isnan(score), _LOWEST_SCORE, score)
        position, length = jnp.arange(tokens), lengths[:, None, None]
        recent = position >= length - self.num_recent
        # Later recent tokens rank higher, so that decoding overwrites the oldest of them first.
        rank = jnp.where(recent, _ABOVE_SCORES * (1 + position / tokens), score)
        rank = jnp.where(position < self.sinks, jnp.inf, rank)
        return jnp.where(position < length, rank, -jnp.inf)

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> TopKStore:
        """Returns an empty store.

        Args:
            row_keys: not used, because the policy draws no random numbers.

        Returns:
            A store with `num_slots(spec)` slots per KV head.
        """
        return init_top_k_store(spec, self.num_slots(spec))

    def prefill(self, state: TopKStore, prompt: Prompt) -> TopKStore:
        """Keeps the tokens of highest rank, at most `budget` per KV head.

        Args:
            state: an empty store.

        Returns:
            The store.
        """
        rank = self.rank(prompt)
        return top_k_store.fill(state, rank, prompt.keys, prompt.values, prompt.lengths, self.budget)

    def segments(self, state: TopKStore, num_visible_staged: Int[Array, "B #T"]) -> tuple[Segment, ...]:
        """Returns the kept tokens.

        Args:
            num_visible_staged: not used, because staged tokens hide no slot.

        Returns:
            One segment.
        """
        return (top_k_store.store_segment(state),)

    def compact(self, state: TopKStore, new: Tokens) -> TopKStore:
        """Writes later tokens into empty slots, then over the tokens of lowest rank or, if they have scores, score."""
        append = top_k_store.append if state.scores is None else top_k_store.append_scored
        return append(state, new, self.sinks)


def prompt_mask(prompt: Prompt) -> Bool[Array, "B 1 T"]:
    """Returns which positions of a prompt hold a token, with an axis for heads."""
    return (jnp.arange(prompt.keys.shape[2]) < prompt.lengths[:, None])[:, None]
