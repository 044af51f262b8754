"""Decode steps of transformers with its DynamicCache, for comparison. Needs torch and transformers."""

import pathlib
import tempfile
from typing import Any

import jax.numpy as jnp

from kvjax_models.formats import huggingface
from kvjax_models.model.llama import Llama


class TransformersWriter:
    """Decodes `tokens` tokens per call, greedily, after a context of random keys and values."""

    def __init__(self, model: Llama, context: int, tokens: int):
        """Converts the model and fills the cache.

        Args:
            model: the decoder; the same weights and dtype are used.
            context: tokens in the cache before the first call.
            tokens: tokens per call.

        Raises:
            ImportError: if torch or transformers is not installed.
        """
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        config, dtype = model.config, getattr(torch, str(jnp.dtype(model.embedding.param_dtype)))
        with tempfile.TemporaryDirectory() as directory:
            huggingface.save_model(pathlib.Path(directory), model)
            self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        self._cache, self._tokens = transformers.DynamicCache(), tokens
        for layer in range(config.layers):
            keys, values = torch.randn((2, 1, config.kv_heads, context, config.head_dim), dtype=dtype)
            self._cache.update(keys, values, layer)
        self._token = torch.zeros((1, 1), dtype=torch.long)

    def __call__(self) -> list[int]:
        """Decodes the next tokens and returns them."""
        import torch

        tokens = []
        with torch.no_grad():
            for _ in range(self._tokens):
                logits = self._model(self._token, past_key_values=self._cache).logits
                self._token = logits[:, -1:].argmax(-1)
                tokens.append(int(self._token))
        return tokens
