"""Decode steps of transformers, for comparison. Needs torch and transformers."""

from typing import Any, Literal

from kvjax_models.model.config import LlamaConfig

CacheKind = Literal["dynamic", "static", "static in a CUDA graph"]
CACHES: tuple[CacheKind, ...] = ("dynamic", "static", "static in a CUDA graph")


class TransformersWriter:
    """Decodes `tokens` tokens per call, greedily, after a context of random keys and values.

    Weights are random and created on torch's device: a GPU if there is one. Attention is torch's fused one ("sdpa").
    """

    def __init__(self, config: LlamaConfig, dtype: str, context: int, tokens: int, cache: CacheKind = "dynamic"):
        """Creates the model and fills the cache.

        Args:
            config: sizes of the decoder.
            dtype: dtype of weights and cache.
            context: tokens in the cache before the first call.
            tokens: tokens per call.
            cache: `DynamicCache`, `StaticCache`, or `StaticCache` with one captured step that every call repeats at the
                same position; it reads the entire cache, as every step does.

        Raises:
            ImportError: if torch or transformers is not installed.
        """
        import torch
        import transformers

        device = "cuda" if torch.cuda.is_available() else "cpu"
        # A Llama of the same sizes; the rotary embedding and its scaling have no effect on the time.
        values = transformers.LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=config.width, intermediate_size=config.mlp_width,
            num_hidden_layers=config.layers, num_attention_heads=config.query_heads,
            num_key_value_heads=config.kv_heads, head_dim=config.head_dim, max_position_embeddings=config.max_length,
            tie_word_embeddings=config.tied_embeddings, attention_bias=config.qkv_bias,
        )  # fmt: skip
        with torch.device(device):
            self.model: Any = transformers.AutoModelForCausalLM.from_config(
                values, attn_implementation="sdpa", dtype=getattr(torch, dtype)
            ).eval()
        # Room for a run that warms up and the runs of a measurement.
        room = context + 16 * tokens
        caches: Any = transformers  # its classes have different arguments
        if cache == "dynamic":
            self.cache = caches.DynamicCache(config=values)
        else:
            self.cache = caches.StaticCache(config=values, max_cache_len=room)
        self.tokens, self.token = tokens, torch.zeros((1, 1), dtype=torch.long, device=device)
        shape = (2, 1, config.kv_heads, context, config.head_dim)
        with torch.inference_mode():
            for layer in range(config.layers):
                self.cache.update(*torch.randn(shape, dtype=getattr(torch, dtype), device=device), layer)
            self._step = self._capture(context) if cache == CACHES[2] else self._decode

    def __call__(self) -> list[int]:
        """Decodes the next tokens and returns the last one, which waits for the device."""
        import torch

        with torch.inference_mode():
            for _ in range(self.tokens):
                self._step()
        return self.token[0].tolist()

    def _decode(self, **options: Any) -> None:
        logits = self.model(self.token, past_key_values=self.cache, **options).logits
        self.token.copy_(logits[:, -1:].argmax(-1))

    def _capture(self, context: int) -> Any:
        """Returns a function that repeats one captured step."""
        import torch

        options = {"position_ids": torch.full((1, 1), context, dtype=torch.long, device="cuda")}
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._decode(**options)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._decode(**options)
        return graph.replay
