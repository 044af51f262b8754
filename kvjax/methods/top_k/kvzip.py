"""KVzip (Kim et al. 2025): the prompt's tokens to which a model attends when it repeats the prompt.

A score that does not depend on a question: answering may need any token that repeating the text needs.

1. The prompt is read exactly.
2. The model reads the prompt again as if it repeated it, in chunks of `chunk_tokens` after the entire prompt.
3. A token's score in a KV head is the largest attention probability that it receives from any query of the repetition
   of its chunk, over the query heads of the group. The maximum, and not the sum: one query that needs it is enough.
4. The tokens with the highest scores are kept (`TopKPolicy`). Keys and values of the repetition are dropped.

Prefill takes about three times as long. `KVzap` predicts the scores instead.
"""

import dataclasses
import functools
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.methods.top_k.top_k_policy import TopKPolicy
from kvjax.policy import Prompt, Repetition, Requirements
from kvjax.prompt_attention import key_attention


@dataclasses.dataclass(frozen=True)
class KVzip(TopKPolicy):
    r"""Keeps the tokens that receive the most attention from any query of a repetition of the prompt.

    A question about the text may need any token that repeating it needs. The model reads the prompt a second time in
    chunks, each after the entire prompt. Prefill then takes about three times as long, except when the
    prefix is continued; only one layer's keys and values are in memory at a time.

    The paper uses `AdaKV(KVzip(budget, reserve_decode_slots=True), alpha_safeguard=0)` in every layer, or one budget
    for all layers, to which `kvjax.HeadBudgets` comes close. Results hardly depend on the instruction of the
    repetition, which is empty by default. kvpress uses "\n\nRepeat the previous context exactly." and "\n\nRepeat the
    part of the previous context exactly, starting with". Inherited settings: see `TopKPolicy`. The paper uses sinks=4,
    recent=0.

    Attributes:
        chunk_tokens: tokens that are repeated at a time.
        instruction: token ids before the first chunk (see `kvjax.policy.Repetition`).
        continuation: token ids before a further chunk.
        suffix: token ids between either and the chunk.
        plus: KVzip+: an attention probability is multiplied by the norm of the value's contribution to the residual
            stream, and divided by the norm of the query's hidden state. Prefill then takes about five times as
            long as without repetition.

    Reference:
        KVzip, section 3 (https://arxiv.org/abs/2505.23416); KVzipPress of kvpress, with `kvzip_plus_normalization`
        for `plus`.
    """

    chunk_tokens: int = 2048
    instruction: tuple[int, ...] = ()
    continuation: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    plus: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.requires

    @property
    def requires(self) -> Requirements:  # type: ignore[override]
        """A repetition of the prompt."""
        return self._require("hidden_norm" if self.plus else "none")

    def _require(self, weights: Literal["none", "hidden_norm", "gradient"]) -> Requirements:
        """Returns the repetition, with weights of its queries."""
        texts = (self.instruction, self.continuation, self.suffix)
        repetition = Repetition(self.chunk_tokens, *texts, sinks=self.sinks, weights=weights)
        return Requirements(repetition=repetition, entire_prompt=True)

    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        """Returns the largest (weighted) attention to the prompt's tokens from any query that repeats their chunk."""
        name, repetition = type(self).__name__, self.requires.repetition
        if prompt.repeated is None or repetition is None:
            raise ValueError(f"{name} needs a repetition of the prompt; pass prompt.repeated, as kvjax_models does")
        weighted = prompt.repeated.query_weights is not None and prompt.repeated.value_norms is not None
        if weighted != (repetition.weights != "none"):
            raise ValueError(
                f"{name} needs prompt.repeated with weights={repetition.weights!r}; pass query_weights and value_norms "
                "for 'hidden_norm' and 'gradient' only"
            )
        if prompt.repeated.received is not None:
            return prompt.repeated.received
        tokens, chunks = prompt.keys.shape[2], prompt.repeated.lengths.shape[1]
        received = [self._score_chunk(prompt, chunk) for chunk in range(min(chunks, -(-tokens // self.chunk_tokens)))]
        score = jnp.concatenate(received, axis=2)
        # After the last chunk of the longest row there is only padding.
        return jnp.pad(score, ((0, 0), (0, 0), (0, tokens - score.shape[2])))

    def _score_chunk(self, prompt: Prompt, chunk: int) -> Float[Array, "B H_kv C"]:
        """Returns the scores of one chunk.

        Queries of its repetition attend to the sinks, the chunk and the repetition itself, causally.
        """
        assert prompt.repeated is not None
        batch, chunks = prompt.repeated.lengths.shape
        size, first = prompt.repeated.keys.shape[1] // chunks, chunk * self.chunk_tokens
        sinks = min(self.sinks, first)
        repetition = slice(chunk * size, (chunk + 1) * size)
        chunk_keys = prompt.keys[:, :, first : first + self.chunk_tokens]
        repeated_keys = prompt.repeated.keys[:, repetition].swapaxes(1, 2).astype(chunk_keys.dtype)
        keys = jnp.concatenate([prompt.keys[:, :, :sinks], chunk_keys, repeated_keys], axis=2)
        present = jnp.arange(chunk_keys.shape[2]) + first < prompt.lengths[:, None]
        before = jnp.concatenate([jnp.ones((batch, sinks), bool), present], axis=1)[:, None]
        is_visible = functools.partial(_is_visible, before, prompt.repeated.lengths[:, chunk], size)
        query_weights, key_weights = prompt.repeated.query_weights, prompt.repeated.value_norms
        if query_weights is not None and key_weights is not None:
            query_weights = query_weights[:, repetition]
            key_weights = key_weights[:, :, first : first + self.chunk_tokens]
            rest = keys.shape[2] - sinks - key_weights.shape[2]  # only the chunk is scored
            key_weights = jnp.pad(key_weights, ((0, 0), (0, 0), (sinks, rest)))
        received = key_attention(
            prompt,
            prompt.repeated.queries[:, repetition],
            keys,
            is_visible,
            reduce="max",
            query_weights=query_weights,
            key_weights=key_weights,
        )
        return received[..., sinks : sinks + chunk_keys.shape[2]]


def _is_visible(
    before: Bool[Array, "B 1 S"], lengths: Int[Array, "B"], size: int, index: Int[Array, "n"]
) -> Bool[Array, "B n S+R"]:
    """Returns the keys that queries of a repetition see: those before it, and the repetition up to themselves."""
    causal = jnp.broadcast_to(jnp.arange(size) <= index[:, None], (len(lengths), len(index), size))
    present = index[:, None] < lengths[:, None, None]
    return present & jnp.concatenate([jnp.broadcast_to(before, (*causal.shape[:2], before.shape[2])), causal], axis=2)
