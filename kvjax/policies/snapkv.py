"""SnapKV (Li et al. 2024): the prompt's tokens that its last queries attended to."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policy import Policy, Prompt, check_least
from kvjax.prompt_attention import attention_received
from kvjax.selection import Selection


@dataclasses.dataclass(frozen=True)
class SnapKV(Selection):
    """Keeps, of a prompt, its last `recent` tokens and those before them that their queries attended to most.

    A token's score is its attention probability summed over these queries, each of which sees the whole prompt
    causally; scores are average-pooled over neighbours and averaged over the query heads of a kv head's group. Prompts
    of at most `budget` tokens are kept whole. The released code keeps key and value heads repeated and so chooses per
    query head; averaging over the group came with later ports (kvpress among them). kvpress's window is 64 by default,
    its budget a share of the prompt, so that short prompts lose tokens too.

    Attributes:
        budget, beside, shares, compact_every: as in `Selection`. As published, generated tokens are kept beside the
            budget; `beside=False` lets them take the places of the least.
        recent: last tokens of the prompt, whose queries choose (the paper's L_obs, kvpress's window_size); all of them
            are kept.
        sinks: first tokens that are kept whatever they draw; none as published.
        kernel: tokens that a score is averaged over, odd; tokens past either end count as 0.

    Source: SnapKV, section 4, and `SnapKVCluster` of the released code.
    """

    sinks: int = 0
    recent: int = 32
    beside: bool = True
    kernel: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(1, recent=self.recent)
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel={self.kernel}; it must be odd and at least 1")
        super().__post_init__()

    @property
    def prompt_queries(self) -> int:
        return self.recent

    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        return observed_attention(self, prompt, self.recent, self.kernel)


def observed_attention(policy: Policy, prompt: Prompt, recent: int, kernel: int) -> Float[Array, "B H_kv T"]:
    """The attention that tokens before the last `recent` draw from the queries that the policy asks for, averaged over
    `kernel` neighbours; float32.

    Raises:
        ValueError: where the queries are not those asked for (`kvjax.prompt_attention.asked_queries`).
    """
    before = jnp.arange(prompt.keys.shape[2]) < prompt.lengths[:, None, None] - recent
    received = jnp.where(before, attention_received(policy, prompt), 0.0)
    return jax.lax.reduce_window(received, 0.0, jax.lax.add, (1, 1, kernel), (1, 1, 1), "SAME")
