"""SnapKV (Li et al. 2024): the prompt's tokens to which its last queries attend.

The last tokens of a prompt often ask for something, and later queries attend to the same tokens. Per KV head:

1. The last `window_size` tokens form the observation window; they are always kept.
2. The attention probabilities of the window's queries are summed for every earlier token, over the queries and over the
   query heads of the group.
3. These sums are averaged over `kernel_size` neighbors, so that the tokens around an important one are kept as well.
4. The earlier tokens with the highest averages are kept, up to the budget.

Later tokens get slots beyond the budget (`reserve_decode_slots`), and decoding evicts no token.
`top_k_policy.TopKPolicy` ranks and stores the tokens; this file has the score. If the question comes after the
compressed text, the window sees the end of the text instead of the question, and selects less well.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.methods.top_k.top_k_policy import TopKPolicy
from kvjax.policy import Prompt, Requirements, check_min
from kvjax.prompt_attention import attention_received


@dataclasses.dataclass(frozen=True)
class SnapKV(TopKPolicy):
    """Keeps the last tokens of a prompt (the window) and the earlier tokens to which their queries attend most.

    A token's score is the attention of the window's queries, averaged over neighboring tokens and summed over the query
    heads of a group. The released code repeats KV heads and selects per query head; later ports, such as kvpress,
    average over the group. Prompts of at most `budget` tokens are not compressed; kvpress's budget is a share of the
    prompt, so that short prompts are compressed too. Inherited settings: see `TopKPolicy`.

    Attributes:
        sinks: first tokens that are always kept; 0 in the paper.
        window_size: last tokens of the prompt, which are always kept (the paper's L_obs); 64 by default in kvpress.
        reserve_decode_slots: as in the paper, later tokens have slots beyond the budget. If False, they replace the
            tokens of the lowest rank.
        kernel_size: tokens over which scores are averaged, odd; tokens past either end count as 0.

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
        """Returns the attention of the window's queries to the prompt, summed over neighboring tokens."""
        before_window = jnp.arange(prompt.keys.shape[2]) < prompt.lengths[:, None, None] - self.window_size
        received = jnp.where(before_window, attention_received(self, prompt), 0.0)
        return jax.lax.reduce_window(received, 0.0, jax.lax.add, (1, 1, self.kernel_size), (1, 1, 1), "SAME")
