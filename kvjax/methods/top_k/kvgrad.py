"""KVgrad (2026): the prompt's tokens whose values, by a gradient, change the model's output most."""

import dataclasses

from kvjax.methods.top_k.kvzip import KVzip
from kvjax.policy import Requirements


@dataclasses.dataclass(frozen=True)
class KVgrad(KVzip):
    r"""Keeps the tokens with the largest effect on the hidden states of a repetition of the prompt.

    The score of token t in a KV head is the maximum of A[p, t] * |v_t W_O| * |g_p| over the query heads of the group
    and the tokens p of the repetition. A is the attention probability, v_t W_O the contribution of the value to the
    residual stream, and g_p the gradient of the sum of squares of the last layer's hidden states with respect to the
    attention output of p. Scores of different layers have one unit, so that one budget can be divided among all layers.

    The generator keeps the keys and values of all layers and the repetition's hidden states until the gradient has
    passed. On a CPU, prefill takes about 13 times as long as without repetition (SmolLM2-135M, 1,980 tokens), and three
    times with `KVzip`. Inherited settings: see `KVzip`.

    Attributes:
        chunk_tokens: tokens that are repeated at a time; 512 in kvpress.

    Reference:
        KVgrad (https://openreview.net/forum?id=cg1wTCJjjk); KVgradPress of kvpress 0.5.5.
    """

    chunk_tokens: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plus:
            raise ValueError(f"plus={self.plus} is not a setting of KVgrad, which always weighs values by their norm")

    @property
    def requires(self) -> Requirements:  # type: ignore[override]
        """A repetition of the prompt with gradients."""
        return self._require("gradient")
