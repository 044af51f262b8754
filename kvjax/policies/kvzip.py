"""KVzip (Kim et al. 2025): the prompt's tokens that are attended to when a model repeats it."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policy import Prompt, Repetition, Requirements
from kvjax.prompt_attention import attention_drawn
from kvjax.top_k_policy import TopKPolicy


@dataclasses.dataclass(frozen=True)
class KVzip(TopKPolicy):
    """Keeps the tokens that any query of a repetition of the prompt gives the most attention: what is needed to say the
    text again is what any question about it may need.

    The model reads the prompt twice: then in chunks, each behind the whole prompt, which takes two to three times as
    long and does not happen again when the prefix is continued. Only one layer's keys and values exist at a time.
    Published with `AdaKV(KVzip(budget, reserve_decode_slots=True), floor=0)` in every layer, or with a budget for all layers, which
    this has not. An answer depends on the repetition's words hardly: by default there are none.

    Attributes:
        budget, sinks, recent, beside, shares, compact_every: as in `TopKPolicy`; sinks=4 and recent=0 are
            those published.
        chunk: tokens that are repeated at a time.
        ask, ask_part, suffix: token ids around the first chunk and around further ones (`kvjax.policy.Repetition`); kvpress
            says "\\n\\nRepeat the previous context exactly." and "\\n\\nRepeat the part of the previous context
            exactly, starting with".

    Reference:
        KVzip, section 3 (https://arxiv.org/abs/2505.23416); kvpress's KVzipPress.
    """

    chunk_tokens: int = 2048
    instruction: tuple[int, ...] = ()
    continuation: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.requires

    @property
    def requires(self) -> Requirements:  # type: ignore[override]
        """A repetition of the prompt."""
        repetition = Repetition(self.chunk_tokens, self.instruction, self.continuation, self.suffix)
        return Requirements(repetition=repetition, entire_prompt=True)

    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        if prompt.repeated is None:
            raise ValueError("KVzip needs the prompt read again (`repeated`), as kvjax_models.generate.Generator does")
        chunk, tokens = self.chunk_tokens, prompt.keys.shape[2]
        chunks = prompt.repeated.lengths.shape[1]
        size = prompt.repeated.keys.shape[1] // chunks
        received = []
        for number, first in enumerate(range(0, min(chunks * chunk, tokens), chunk)):
            own = slice(number * size, (number + 1) * size)
            queries, again = prompt.repeated.queries[:, own], prompt.repeated.keys[:, own]
            lengths, keys = prompt.repeated.lengths[:, number], prompt.keys[:, :, first : first + chunk]
            received.append(_most_received(prompt, queries, again, lengths, keys, first, min(self.sinks, first)))
        score = jnp.concatenate(received, axis=2)
        # Behind the last chunk of the longest row there is padding alone.
        return jnp.pad(score, ((0, 0), (0, 0), (0, tokens - score.shape[2])))


def _most_received(prompt, queries, again, lengths, keys, first, sinks) -> Float[Array, "B H_kv C"]:
    """The largest probability that a query of a repetition gives each key of its chunk, of attention to the sinks, the
    chunk and the repetition itself.

    Args:
        queries, again: of the repetition, [B, R, H, D], the first `lengths[b]` real.
        keys: of the chunk [B, H_kv, C, D], whose first token is number `first` of the prompt.
    """
    chunk, size = keys.shape[2], queries.shape[1]
    seen = jnp.concatenate([prompt.keys[:, :, :sinks], keys, again.swapaxes(1, 2).astype(keys.dtype)], axis=2)
    present = jnp.arange(chunk) + first < prompt.lengths[:, None]
    before = jnp.concatenate([jnp.ones((len(lengths), sinks), bool), present], axis=1)[:, None]

    def sees(number):
        causal = jnp.broadcast_to(jnp.arange(size) <= number[:, None], (len(lengths), len(number), size))
        real = number[:, None] < lengths[:, None, None]
        return real & jnp.concatenate([jnp.broadcast_to(before, (*causal.shape[:2], sinks + chunk)), causal], axis=2)

    return attention_drawn(prompt, queries, seen, sees, largest=True)[..., sinks : sinks + chunk]
