"""KVzap (2026): the tokens with the highest KVzip scores, which a linear map predicts."""

import dataclasses

from jaxtyping import Array, Float, Key

from kvjax.methods.top_k import top_k_store
from kvjax.methods.top_k.top_k_policy import TopKPolicy
from kvjax.methods.top_k.top_k_store import TopKStore, init_top_k_store
from kvjax.policy import Prompt, Requirements
from kvjax.spec import CacheSpec


@dataclasses.dataclass(frozen=True)
class KVzap(TopKPolicy):
    """Keeps the tokens with the highest predicted scores of KVzip, so that the prompt is read once.

    A map per layer predicts the log of the score of each token in each KV head from the input of the layer's attention.
    `kvjax_models` computes the scores with the linear map of the model's profile. Later tokens have scores, too: every
    compaction drops the tokens of lowest score, so that a long answer or a streamed prompt has bounded memory.

    The paper predicts scores of KVzip+ with a linear map or a two-layer MLP, and keeps every token whose log score
    exceeds a threshold, and the last 128 tokens. Here the map predicts scores of KVzip, and a budget replaces the
    threshold. `recent=128` keeps the paper's window. `AdaKV` with `alpha_safeguard=0` gives the heads of a layer one
    threshold; its later tokens have no scores. Inherited settings: see `TopKPolicy`.

    Attributes:
        recent: newest tokens, which are always kept; at least the tokens of one compaction are.

    Reference:
        KVzap (https://arxiv.org/abs/2601.07891); KVzapPress of kvpress.
    """

    requires = Requirements(predicted_scores=True)

    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        """Returns the predicted log scores."""
        assert prompt.predicted_scores is not None  # `kvjax.prefill` requires them
        return prompt.predicted_scores

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> TopKStore:
        """Returns an empty store with scores.

        Args:
            row_keys: not used, because the policy draws no random numbers.

        Returns:
            A store with `num_slots(spec)` slots per KV head.
        """
        newest = max(self.recent, spec.staging_slots or self.compact_every)
        return init_top_k_store(spec, self.num_slots(spec), newest=newest)

    def prefill(self, state: TopKStore, prompt: Prompt) -> TopKStore:
        """Keeps the tokens of highest rank, at most `budget` per KV head, with their scores.

        Args:
            state: an empty store.

        Returns:
            The store.
        """
        rank, scores = self.rank(prompt), self.score(prompt)
        state = top_k_store.fill(state, rank, prompt.keys, prompt.values, prompt.lengths, self.budget)
        return top_k_store.start_scores(state, rank, scores, self.sinks, self.recent)
