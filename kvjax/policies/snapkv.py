"""SnapKV (Li et al. 2024): the prompt's tokens that its last queries attended to."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policy import Policy, Prompt, Requirements, check_min
from kvjax.prompt_attention import attention_received
from kvjax.top_k_policy import TopKPolicy


@dataclasses.dataclass(frozen=True)
class SnapKV(TopKPolicy):
    """Keeps, of a prompt, its last `window_size` tokens and those before them that their queries attended to most.

    A token's score is its attention probability summed over these queries, each of which sees the whole prompt
    causally; scores are average-pooled over neighbours and averaged over the query heads of a kv head's group. Prompts
    of at most `budget` tokens are kept whole. The released code keeps key and value heads repeated and so chooses per
    query head; averaging over the group came with later ports (kvpress among them). kvpress's window is 64 by default,
    its budget a share of the prompt, so that short prompts lose tokens too.

    Attributes:
        budget, beside, shares, compact_every: as in `TopKPolicy`. As published, generated tokens are kept beside the
            budget; `reserve_decode_slots=False` lets them take the places of the least.
        recent: last tokens of the prompt, whose queries choose (the paper's L_obs, kvpress's window_size); all of them
            are kept.
        sinks: first tokens that are kept whatever they draw; none as published.
        kernel: tokens that a score is averaged over, odd; tokens past either end count as 0.

    Reference:
        SnapKV, section 4, and `SnapKVCluster` of the released code.
    """

    sinks: int = 0
    window_size: int = 32
    reserve_decode_slots: bool = True
    kernel_size: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_min(1, window_size=self.window_size)
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={self.kernel_size} must be odd and at least 1")
        if self.recent:
            raise ValueError(f"recent={self.recent} is not a setting of {type(self).__name__}; pass window_size")

    @property
    def requires(self) -> Requirements:  # type: ignore[override]
        """The queries of the window."""
        return Requirements(prompt_queries=self.window_size, entire_prompt=True)

    @property
    def num_recent(self) -> int:
        """The window."""
        return self.window_size

    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        return observed_attention(self, prompt, self.window_size, self.kernel_size)


def observed_attention(policy: Policy, prompt: Prompt, window_size: int, kernel_size: int) -> Float[Array, "B H_kv T"]:
    """The attention that tokens before the last `window_size` draw from the queries that the policy asks for, averaged over
    `kernel_size` neighbours; float32.

    Raises:
        ValueError: where the queries are not those asked for (`kvjax.prompt_attention.check_prompt_queries`).
    """
    before = jnp.arange(prompt.keys.shape[2]) < prompt.lengths[:, None, None] - window_size
    received = jnp.where(before, attention_received(policy, prompt), 0.0)
    return jax.lax.reduce_window(received, 0.0, jax.lax.add, (1, 1, kernel_size), (1, 1, 1), "SAME")
