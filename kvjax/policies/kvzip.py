"""KVzip (Kim et al. 2025): the prompt's tokens that are attended to when a model repeats it."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policy import Prompt, Repeat
from kvjax.selection import Selection

QUERY_BLOCK = 64  # queries whose probabilities exist at a time


@dataclasses.dataclass(frozen=True)
class KVzip(Selection):
    """Keeps the tokens that any query of a repetition of the prompt gives the most attention: what is needed to say the
    text again is what any question about it may need.

    The model reads the prompt twice: then in chunks, each behind the whole prompt, which takes two to three times as
    long and does not happen again when the prefix is continued. Only one layer's keys and values exist at a time.
    Published with `AdaKV(KVzip(budget, beside=True), floor=0)` in every layer, or with a budget for all layers, which
    this has not. An answer depends on the repetition's words hardly: by default there are none.

    Attributes:
        budget, sinks, recent, beside, shares, compact_every: as in `Selection`; sinks=4 and recent=0 are
            those published.
        chunk: tokens that are repeated at a time.
        ask, ask_part, suffix: token ids around the first chunk and around further ones (`kvjax.policy.Repeat`); kvpress
            says "\\n\\nRepeat the previous context exactly." and "\\n\\nRepeat the part of the previous context
            exactly, starting with".

    Source: KVzip, section 3 (https://arxiv.org/abs/2505.23416); kvpress's KVzipPress.
    """

    chunk: int = 2048
    ask: tuple[int, ...] = ()
    ask_part: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.repeat

    @property
    def repeat(self) -> Repeat:
        return Repeat(self.chunk, self.ask, self.ask_part, self.suffix)

    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        if prompt.repeated is None:
            raise ValueError("KVzip needs repetitions of the prompt (`repeated`); models.generate.Generator reads them")
        chunk, tokens = self.chunk, prompt.keys.shape[2]
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
    batch, size, query_heads, head_dim = queries.shape
    kv_heads, chunk = keys.shape[1:3]
    group, block = query_heads // kv_heads, min(QUERY_BLOCK, size)
    blocks = -(-size // block)
    padded = jnp.pad(queries, ((0, 0), (0, blocks * block - size), (0, 0), (0, 0)))
    rows = padded.reshape(batch, blocks, block, kv_heads, group, head_dim).transpose(1, 0, 3, 2, 4, 5)
    rows = rows.reshape(blocks, batch, kv_heads, block * group, head_dim)
    seen = jnp.concatenate([prompt.keys[:, :, :sinks], keys, again.swapaxes(1, 2).astype(keys.dtype)], axis=2)
    seen = seen.astype(jnp.promote_types(queries.dtype, seen.dtype))
    present = jnp.arange(chunk) + first < prompt.lengths[:, None]
    before = jnp.concatenate([jnp.ones((batch, sinks), bool), present], axis=1)[:, None, None]
    extra = None
    if prompt.sink_logits is not None:
        extra = jnp.tile(prompt.sink_logits.astype(jnp.float32).reshape(kv_heads, group), (1, block))[..., None]

    def most(best, item):
        number, rows = item
        place = jnp.repeat(number * block + jnp.arange(block), group)[:, None]
        logits = jnp.einsum("bhrd,bhtd->bhrt", rows.astype(seen.dtype), seen, preferred_element_type=jnp.float32)
        logits = logits / math.sqrt(head_dim)
        if prompt.logit_cap is not None:
            logits = prompt.logit_cap * jnp.tanh(logits / prompt.logit_cap)
        causal = jnp.broadcast_to(jnp.arange(size) <= place, (batch, 1, block * group, size))
        visible = jnp.concatenate([jnp.broadcast_to(before, (*causal.shape[:3], before.shape[3])), causal], axis=3)
        logits = jnp.where(visible, logits, -1e30)
        if extra is not None:
            logits = jnp.concatenate([logits, jnp.broadcast_to(extra, (*logits.shape[:3], 1))], axis=3)
        probability = jax.nn.softmax(logits, axis=-1)[..., sinks : sinks + chunk]
        real = place < lengths[:, None, None, None]
        return jnp.maximum(best, jnp.max(jnp.where(real, probability, 0.0), axis=2)), None

    return jax.lax.scan(most, jnp.zeros((batch, kv_heads, chunk)), (jnp.arange(blocks), rows))[0]
