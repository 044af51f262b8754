"""Settings of caches, generators that use them, and their bytes relative to a full bfloat16 cache."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

import kvjax
from kvjax.budget import Budget, abstract_cache, row_bytes, row_read_bytes
from kvjax.policy import Policy
from kvjax.quantization import KVDtype
from kvjax.registry import LARGE_BUDGET, PolicyChoice
from kvjax_models import LanguageModel
from kvjax_models.generation.auto_policy import resolve_auto
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.state import GenerationState, cache_specs

REFERENCE_DTYPE = jnp.bfloat16  # dtype of the full cache that budgets and fractions refer to
FULL = "exact"  # policy of the full cache


@dataclasses.dataclass(frozen=True)
class Setting:
    """A policy, its budget and the quantization of its cache.

    Attributes:
        policy: policy without budget, as in policy strings.
        budget: the budget, as text.
        kv_dtype: format of keys and values, or two formats with a comma; None if not quantized.
    """

    policy: str
    budget: str | None = None
    kv_dtype: str | None = None

    def __str__(self) -> str:
        budget = f" @ {self.budget}" if self.budget else ""
        return self.policy + budget + (f", {self.kv_dtype}" if self.kv_dtype else "")

    @property
    def formats(self) -> KVDtype | tuple[KVDtype, KVDtype] | None:
        """The argument `kv_dtype` of the library."""
        if self.kv_dtype is None:
            return None
        parts: Any = tuple(self.kv_dtype.split(","))
        return parts[0] if len(parts) == 1 else parts

    def fit(
        self, spec: kvjax.CacheSpec, tokens: int, tail_tokens: int = 0, choice: PolicyChoice | None = None
    ) -> Policy:
        """Returns the policy for a text.

        Args:
            spec: spec of the caches.
            tokens: tokens of the text; a budget in percent is a share of its full bfloat16 cache.
            tail_tokens: tokens after the text, whose bytes (`tail_bytes`) are added to a budget in percent.
            choice: the policy, if it has the shares of a model's heads.

        Returns:
            The policy.
        """
        choice = choice or PolicyChoice.parse(self.policy)
        reference = dataclasses.replace(spec, window=None, dtype=REFERENCE_DTYPE)
        budget = Budget.parse(self.budget) if self.budget else None
        if budget is not None and budget.fraction is not None and tail_tokens:
            tail = tail_bytes(reference, tail_tokens, choice.make(LARGE_BUDGET).compact_every)
            total = reference.layers * (budget.limit(reference, tokens) + tail)
            budget = dataclasses.replace(budget, fraction=None, bytes=total)
        return dataclasses.replace(choice, budget=budget).fit(reference, tokens)


def parse_settings(
    policies: Sequence[str], budgets: Sequence[str], kv_dtypes: Sequence[str] = ("none",)
) -> list[Setting]:
    """Returns every policy with every budget and format; a policy that names its budget ("snapkv@25%") has only that.

    Args:
        policies: policy strings.
        budgets: budgets.
        kv_dtypes: formats ("int8", "int8,int4"), or "none".

    Returns:
        The settings, without repetitions.
    """
    settings = []
    for text in policies:
        choice = PolicyChoice.parse(text)
        name = str(dataclasses.replace(choice, budget=None))
        sizes: Sequence[Any] = [str(choice.budget)] if choice.budget else budgets if choice.takes_budget else [None]
        settings += [
            Setting(name, size, None if kv_dtype == "none" else kv_dtype) for size in sizes for kv_dtype in kv_dtypes
        ]
    return list(dict.fromkeys(settings))


def make_generator(
    llm: LanguageModel,
    setting: Setting,
    *,
    batch: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    budget_tokens: int,
    tail_tokens: int = 0,
    streaming: bool = False,
    scorer: Float[np.ndarray, "L W+2 H_kv"] | None = None,
) -> Generator:
    """Returns a generator.

    Args:
        llm: model and tokenizer.
        setting: settings of the cache.
        batch: batch rows.
        max_prompt_tokens: maximum length of prompts.
        max_new_tokens: maximum number of tokens after them.
        budget_tokens: tokens of the full cache that a budget in percent refers to.
        tail_tokens: tokens after the text, such as question and answer, whose bytes are added to such a budget.
        streaming: whether prompts are processed through the compressed cache.
        scorer: coefficients of predicted scores; by default those of the model's profile.

    Returns:
        The generator.
    """
    sizes: dict[str, Any] = {
        "batch": batch,
        "max_prompt_tokens": max_prompt_tokens,
        "max_new_tokens": max_new_tokens,
        "streaming": streaming,
    }
    spec = dataclasses.replace(cache_specs(llm.model, **sizes)[0], dtype=REFERENCE_DTYPE)
    choice, _, kv_dtype = resolve_auto(
        PolicyChoice.parse(setting.policy),
        setting.budget,
        setting.formats,
        spec,
        budget_tokens,
        streaming=streaming,
        find_profile=llm.profile,
    )
    assert isinstance(choice, PolicyChoice)
    policy = setting.fit(dataclasses.replace(spec, kv_dtype=kv_dtype), budget_tokens, tail_tokens, choice)
    if scorer is None and policy.requires.predicted_scores:
        scorer = llm.scorer()
    return Generator(
        llm.model,
        policy,
        **sizes,
        kv_dtype=kv_dtype,
        eos=llm.tokenizer.eos_ids,
        allow_beyond_context=True,
        scorer=scorer,
    )


def tail_bytes(spec: kvjax.CacheSpec, tokens: int, compact_every: int) -> int:
    """Returns the bytes that the tokens after a text take in the cache of one row and layer.

    Args:
        spec: spec of the caches.
        tokens: tokens after the text.
        compact_every: slots of the staging buffer, which holds only such tokens.

    Returns:
        Bytes of the entries of the tokens in the cache's format, and of the staging buffer.
    """

    def empty_cache(tokens: int) -> kvjax.Cache:
        sizes = dataclasses.replace(spec, window=None, batch=1, max_prompt_tokens=tokens)
        return abstract_cache(kvjax.Exact(compact_every), sizes)

    few, many = empty_cache(4096), empty_cache(8192)
    entry_bytes = (kvjax.cache_bytes(many).device - kvjax.cache_bytes(few).device) / 4096
    return round(tokens * entry_bytes) + kvjax.cache_bytes(few.staging).device


def full_bytes(generator: Generator, tokens: int) -> int:
    """Returns the bytes of a full bfloat16 cache of one sequence; layers with a sliding window hold their window."""
    return sum(spec.full_cache_bytes(min(tokens, spec.window or tokens)) for spec in generator.specs)


@dataclasses.dataclass(frozen=True)
class CacheSize:
    """Bytes of the cache of one sequence, as `rows.Row` has them."""

    device_bytes: int
    host_bytes: int
    read_bytes: int
    cache_fraction: float
    read_fraction: float
    tail_fraction: float = 0.0


def measure_size(generator: Generator, state: GenerationState, tokens: int, tail_tokens: int = 0) -> CacheSize:
    """Measures the cache of one sequence.

    Args:
        generator: generator of the state.
        state: a state.
        tokens: tokens of the full cache to compare with.
        tail_tokens: tokens after them, whose bytes the fractions held and read do not include.

    Returns:
        The sizes.
    """
    total = kvjax.cache_bytes(state.layers)
    _, read_bytes = _row_bytes(generator.policies, generator.specs)
    held, read = fractions(generator, tokens)
    specs = (spec for spec in _reference_specs(generator) if spec.window is None and tail_tokens)
    tail = sum(tail_bytes(spec, tail_tokens, generator.block_size) for spec in specs) / full_bytes(generator, tokens)
    device, host = total.device // generator.batch, total.host // generator.batch
    return CacheSize(device, host, read_bytes, held - tail, read - tail, tail)


def fractions(generator: Generator, tokens: int) -> tuple[float, float]:
    """Returns the bytes that a cache holds and that a step reads, relative to a full bfloat16 cache of `tokens`."""
    held, read = _row_bytes(generator.policies, _reference_specs(generator))
    full = full_bytes(generator, tokens)
    return held / full, read / full


def _reference_specs(generator: Generator) -> tuple[kvjax.CacheSpec, ...]:
    """Returns the specs of all layers with unquantized arrays in bfloat16."""
    return tuple(dataclasses.replace(spec, dtype=REFERENCE_DTYPE) for spec in generator.specs)


@functools.lru_cache(maxsize=256)
def _row_bytes(policies: tuple[Policy, ...], specs: tuple[kvjax.CacheSpec, ...]) -> tuple[int, int]:
    """Returns the bytes that a sequence holds and reads per step."""
    layers = list(zip(policies, specs, strict=True))
    return sum(row_bytes(*layer) for layer in layers), sum(row_read_bytes(*layer) for layer in layers)
