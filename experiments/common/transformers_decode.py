"""Decode steps and answers of transformers, for comparison. Needs torch and transformers."""

import copy
import gc
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from experiments.common.output import Measured
from experiments.common.speed_options import TRANSFORMERS, Options, dtype_of
from experiments.common.statistics import Estimate, median_interval
from experiments.common.timing import interleaved_seconds
from kvjax_models import LanguageModel
from kvjax_models.model.config import LlamaConfig
from pallas_kernels.benchmarking import describe

CacheKind = Literal["dynamic", "static", "static in a CUDA graph"]
CACHES: tuple[CacheKind, ...] = ("dynamic", "static", "static in a CUDA graph")


class TransformersAnswers:
    """Answers of a Llama of transformers with random weights and a `DynamicCache`, greedy.

    The model is on a GPU if there is one. The rotary embedding and its scaling have no effect on the time.
    """

    def __init__(self, config: LlamaConfig, dtype: str):
        """Creates the model.

        Args:
            config: sizes of the decoder.
            dtype: dtype of the weights.

        Raises:
            ImportError: if torch or transformers is not installed.
        """
        import torch
        import transformers

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        values = transformers.LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=config.width, intermediate_size=config.mlp_width,
            num_hidden_layers=config.layers, num_attention_heads=config.query_heads,
            num_key_value_heads=config.kv_heads, head_dim=config.head_dim, max_position_embeddings=config.max_length,
            tie_word_embeddings=config.tied_embeddings, attention_bias=config.attention.qkv_bias,
        )  # fmt: skip
        with torch.device(self.device):
            self.model: Any = transformers.AutoModelForCausalLM.from_config(
                values, attn_implementation="sdpa", dtype=getattr(torch, dtype)
            ).eval()

    def read(self, text: Sequence[int]) -> Any:
        """Returns the cache of a text."""
        import torch
        import transformers

        cache = transformers.DynamicCache(config=self.model.config)
        with torch.inference_mode():
            tokens = torch.tensor([text], device=self.device)
            self.model(tokens, past_key_values=cache, logits_to_keep=1)
        return cache

    def answer(self, prompts: Sequence[Sequence[int]], answer_tokens: int, cache: Any = None) -> list[list[int]]:
        """Answers prompts of one length as a batch.

        Args:
            prompts: token ids.
            answer_tokens: tokens of every answer.
            cache: the cache of a text that all prompts continue; it is copied for each of them.

        Returns:
            The answers.
        """
        import torch
        import transformers

        cache = transformers.DynamicCache(config=self.model.config) if cache is None else copy.deepcopy(cache)
        with torch.inference_mode():
            if len(prompts) > 1:
                cache.batch_repeat_interleave(len(prompts))
            tokens, answers = torch.tensor(prompts, device=self.device), []
            for _ in range(answer_tokens):
                logits = self.model(tokens, past_key_values=cache, logits_to_keep=1).logits
                tokens = logits[:, -1:].argmax(-1)
                answers.append(tokens)
            return torch.cat(answers, dim=1).tolist()


class TransformersWriter(TransformersAnswers):
    """Decodes `tokens` tokens per call, greedily, after a context of random keys and values."""

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

        super().__init__(config, dtype)
        # Room for a run that warms up and the runs of a measurement.
        room = context + 16 * tokens
        caches: Any = transformers  # its classes have different arguments
        if cache == "dynamic":
            self.cache = caches.DynamicCache(config=self.model.config)
        else:
            self.cache = caches.StaticCache(config=self.model.config, max_cache_len=room)
        self.tokens, self.token = tokens, torch.zeros((1, 1), dtype=torch.long, device=self.device)
        shape = (2, 1, config.kv_heads, context, config.head_dim)
        with torch.inference_mode():
            for layer in range(config.layers):
                self.cache.update(*torch.randn(shape, dtype=getattr(torch, dtype), device=self.device), layer)
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


def _ms_per_token(options: Options, llm: LanguageModel, context: int, cache: CacheKind) -> Estimate:
    """Returns the time per token with a cache, whose memory is not referenced afterwards."""
    writer = TransformersWriter(llm.model.config, dtype_of(llm), context, options.tokens, cache)
    return median_interval(1e3 * interleaved_seconds([writer], options.repetitions)[0] / options.tokens)


def measure_transformers(options: Options, llm: LanguageModel, context: int) -> Iterator[Measured]:
    """Measures decode steps of transformers with each of its caches, after a context of random keys and values.

    Args:
        options: the options.
        llm: the model, which gives the sizes.
        context: tokens in the cache.

    Yields:
        Labels and values of each cache; of a cache that failed, the problem. CUDA graphs need a GPU.
    """
    import torch

    has_gpu = torch.cuda.is_available()
    common = options.labels(llm, context) | {"device": torch.cuda.get_device_name() if has_gpu else "cpu"}
    for cache in CACHES if has_gpu else CACHES[:2]:
        labels, values = {"setting": f"{TRANSFORMERS}, {cache}", **common}, dict[str, Any]()
        try:
            values["ms_per_token"] = _ms_per_token(options, llm, context, cache)
            if has_gpu:
                values["peak_bytes"] = torch.cuda.max_memory_allocated()
        except Exception as error:  # the other caches are measured
            labels["problem"] = describe(error)
        yield labels, values
        gc.collect()  # the memory is free before the next model is created
        if has_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
