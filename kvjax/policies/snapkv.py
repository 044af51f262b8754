"""SnapKV (Li et al. 2024): the prompt's tokens that its last queries attended to, and every generated one."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.growing import Growing, add, fill, init_growing, stored
from kvjax.per_head import per_head
from kvjax.policy import Policy, check_least, check_settings
from kvjax.prompt_attention import attention_received


@dataclasses.dataclass(frozen=True)
class SnapKV(Policy):
    """Keeps, of a prompt, its last `window` tokens and those before them that the window's queries attended to most;
    every token that comes later is kept too.

    A token's score is its attention probability summed over the window's queries, each of which sees the whole prompt
    causally; scores are average-pooled over neighbours and averaged over the query heads of a kv head's group. Prompts
    of at most `budget` tokens are kept whole. The released code keeps key and value heads repeated and so chooses per
    query head; averaging over the group came with later ports (kvpress among them). kvpress's window is 64 by default,
    its budget a share of the prompt, so that short prompts lose tokens too.

    Attributes:
        budget: slots per head for the prompt, the window included. As published, generated tokens are kept beside it:
            the store has `budget + spec.max_new` slots (rounded up to blocks of attention), all counted as bytes.
        window: last tokens of the prompt, whose queries choose (the paper's L_obs); all of them are kept.
        kernel: tokens that a score is averaged over, odd; tokens past either end count as 0.
        compact_every: tokens between compactions, which move staged tokens into the store. It changes no result.

    Source: SnapKV, section 4, and `SnapKVCluster` of the released code.
    """

    budget: int
    window: int = 32
    kernel: int = 5
    compact_every: int = 64

    streams = False

    def __post_init__(self) -> None:
        check_least(1, window=self.window)
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel={self.kernel}; it must be odd and at least 1")
        check_settings(self.budget, 0, self.window, self.compact_every)

    @property
    def prompt_queries(self) -> int:
        return self.window

    def init(self, spec, row_keys) -> Growing:
        return init_growing(spec, min(self.budget, spec.max_prompt))

    def prefill(self, state: Growing, prompt) -> Growing:
        room = min(self.budget, prompt.keys.shape[2])
        choose = lambda score, length: most_observed(score, length, room, self.window, self.kernel)  # noqa: E731
        chosen = per_head(choose, 0, None)(attention_received(self, prompt), prompt.lengths)[..., None]
        keys, values = (jnp.take_along_axis(x, chosen, axis=2) for x in (prompt.keys, prompt.values))
        return fill(state, keys, values, jnp.minimum(prompt.lengths, self.budget))

    def read(self, state: Growing, newer):
        return stored(state)

    def compact(self, state: Growing, new) -> Growing:
        return add(state, new)


def most_observed(
    received: Float[Array, "T"], length: Int[Array, ""], room: int, window: int, kernel: int
) -> Int[Array, "room"]:
    """Which `room` tokens of a prompt of `length` one head keeps, in the order of the text: the last `window` and those
    before them that drew most attention, of equals the earlier. Behind a shorter prompt's stands any token."""
    position = jnp.arange(received.shape[0])
    before = jnp.where(position < length - window, received, 0.0)
    pooled = jax.lax.reduce_window(before, 0.0, jax.lax.add, (kernel,), (1,), "SAME")
    score = jnp.where(position < length - window, pooled, jnp.inf)
    score = jnp.where(position < length, score, -jnp.inf)
    # Places past the prompt, whose scores are least, are also its last: in order they stand behind.
    return jnp.sort(jax.lax.top_k(score, room)[1])
