"""Settings of caches, generators that use them, and their bytes relative to a full bfloat16 cache."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

import kvjax
from kvjax.budget import Budget, row_bytes, row_read_bytes
from kvjax.policy import Policy
from kvjax.quantization import KVDtype
from kvjax.registry import PolicyChoice
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
        return dataclasses.replace(choice, budget=with_tail(budget, reference, tokens, tail_tokens)).fit(
            reference, tokens
        )


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
) -> Generator:
    """Returns a generator.

    Args:
        llm: model and tokenizer.
        setting: settings of the cache.
        batch: batch rows.
        max_prompt_tokens: maximum length of prompts.
        max_new_tokens: maximum number of tokens after them.
        budget_tokens: tokens of the full cache that a budget in percent refers to.
        tail_tokens: tokens after the text, such as question and answer, whose bytes come beside such a budget.
        streaming: whether prompts are processed through the compressed cache.

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
    eos = llm.tokenizer.eos_ids
    return Generator(llm.model, policy, **sizes, kv_dtype=kv_dtype, eos=eos, allow_beyond_context=True)


def with_tail(budget: Budget | None, spec: kvjax.CacheSpec, tokens: int, tail_tokens: int) -> Budget | None:
    """Adds the bytes of the tokens after a text to the text's budget, if that is in percent.

    Args:
        budget: the budget.
        spec: spec of the caches.
        tokens: tokens of the text.
        tail_tokens: tokens after it.

    Returns:
        The budget, as text in percent and in bytes.
    """
    if budget is None or budget.fraction is None or not tail_tokens:
        return budget
    layer_bytes = budget.limit(spec, tokens) + tail_bytes(spec, tail_tokens)
    return dataclasses.replace(budget, fraction=None, bytes=layer_bytes * spec.layers)


def tail_bytes(spec: kvjax.CacheSpec, tokens: int) -> int:
    """Returns the bytes that the entries of `tokens` tokens take in the cache of one row and layer."""

    def exact_bytes(tokens: int) -> int:
        return row_bytes(kvjax.Exact(), dataclasses.replace(spec, window=None, max_prompt_tokens=tokens))

    return tokens * (exact_bytes(8192) - exact_bytes(4096)) // 4096


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
        tail_tokens: tokens after them, whose bytes are no part of the fractions held and read.

    Returns:
        The sizes.
    """
    total = kvjax.cache_bytes(state.layers)
    _, read_bytes = _row_bytes(generator.policies, generator.specs)
    held, read = fractions(generator, tokens)
    specs = (spec for spec in _reference_specs(generator) if spec.window is None)
    tail = sum(tail_bytes(spec, tail_tokens) for spec in specs) / full_bytes(generator, tokens)
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
