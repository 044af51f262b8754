"""KVzap (2026): the prompt's tokens with the highest KVzip scores, which a linear map predicts."""

import dataclasses

from jaxtyping import Array, Float

from kvjax.methods.top_k.top_k_policy import TopKPolicy
from kvjax.policy import Prompt, Requirements


@dataclasses.dataclass(frozen=True)
class KVzap(TopKPolicy):
    """Keeps the tokens with the highest predicted scores of KVzip, so that the prompt is read once.

    A map per layer predicts the log of the score of each token in each KV head from the input of the layer's attention.
    `kvjax_models` computes the scores with the linear map of the model's profile.

    The paper predicts scores of KVzip+ with a linear map or a two-layer MLP. It keeps every token whose log score
    exceeds a threshold, also among later tokens, and the last 128 tokens. Here the map predicts scores of KVzip, a
    budget replaces the threshold, and later tokens need no score. `recent=128` keeps the paper's window. `AdaKV` with
    `alpha_safeguard=0` gives the heads of a layer one threshold. Inherited settings: see `TopKPolicy`.

    Reference:
        KVzap (https://arxiv.org/abs/2601.07891); KVzapPress of kvpress.
    """

    requires = Requirements(predicted_scores=True, entire_prompt=True)

    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        """Returns the predicted log scores."""
        if prompt.predicted_scores is None:
            raise ValueError(
                "kvzap needs predicted scores; pass predicted_scores, as kvjax_models does with the model's profile"
            )
        return prompt.predicted_scores
