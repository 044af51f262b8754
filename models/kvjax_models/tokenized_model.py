"""A decoder with its tokenizer and profile."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from kvjax_models import profile as profiles
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.model.llama import Llama
from kvjax_models.profile import Profile
from kvjax_models.prompts import Prompt, TemplateOptions, encode_prompt
from kvjax_models.runner.auto_policy import Heads


@dataclasses.dataclass(frozen=True, repr=False)
class TokenizedModel:
    """A decoder and its tokenizer.

    Attributes:
        model: the decoder.
        tokenizer: its tokenizer; its end-of-text and BOS tokens must be in the model's vocabulary.
    """

    model: Llama
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        """Checks that the end-of-text and BOS tokens are in the vocabulary.

        Raises:
            ValueError: if one of them is not.
        """
        size = self.model.config.vocab_size
        for name, ids in (("end-of-text", self.tokenizer.eos_ids), ("BOS", self.tokenizer.prefix_ids)):
            if outside := [token for token in ids if token >= size]:
                raise ValueError(
                    f"the tokenizer's {name} token {outside[0]} exceeds the model's vocabulary of {size} tokens"
                )

    def __repr__(self) -> str:
        """Returns the sizes of the model, without its parameters."""
        config, dtype = self.model.config, self.model.embedding.param_dtype
        weights = self.model.weight_dtype or jnp.dtype(dtype).name
        return (
            f"{type(self).__name__}(layers={config.layers}, width={config.width}, query_heads={config.query_heads}, "
            f"kv_heads={config.kv_heads}, head_dim={config.head_dim},\n"
            f"              vocab_size={config.vocab_size}, max_length={config.max_length}, weights={weights})"
        )

    def profile(self, *, scorer: bool = False) -> Profile | None:
        """Returns the model's profile; measures and saves it if there is none (see `profile.find_or_measure`).

        Args:
            scorer: whether to measure the scorer of a saved profile that has none.
        """
        return profiles.find_or_measure(self.model, self.tokenizer, scorer=scorer)

    def scorer(self, heads: Heads = None) -> Float[np.ndarray, "L W+2 H_kv"] | None:
        """Returns the scorer of tokens of a profile; None if the model cannot be measured.

        Args:
            heads: as for `cache`; a profile with a scorer replaces the model's.
        """
        profile = heads if isinstance(heads, Profile) and heads.scorer is not None else self.profile(scorer=True)
        return None if profile is None else profile.scorer

    def encode(self, prompt: Prompt, template_options: TemplateOptions = None) -> list[int]:
        """Converts a prompt to tokens.

        Args:
            prompt: a text, which gets a BOS token if the model uses one, or a conversation, which is written in the
                model's chat template.

        Returns:
            Token ids.

        Raises:
            TypeError: if the prompt is neither a text nor a list of messages.
            ValueError: if there are `template_options` and the prompt is a text.
        """
        return encode_prompt(self.tokenizer, prompt, template_options)
