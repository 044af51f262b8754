"""Settings of caches, and their bytes relative to a full bfloat16 cache."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

import kvjax
from kvjax.budget import Budget, abstract_cache, row_bytes, row_read_bytes
from kvjax.policy import Policy
from kvjax.quantization import KVDtype, parse_kv_dtype
from kvjax.registry import resolve_policy
from kvjax_models import LanguageModel
from kvjax_models.cache import CachedModel
from kvjax_models.document import Document
from kvjax_models.runner.auto_policy import NamedPolicy
from kvjax_models.runner.generator import Generator

REFERENCE_DTYPE = jnp.bfloat16  # dtype of the full cache that budgets and fractions refer to
FULL = "exact"  # policy of the full cache


@dataclasses.dataclass(frozen=True)
class Setting:
    """A policy, its budget and the quantization of its cache.

    Attributes:
        policy: policy without budget, as in policy strings.
        budget: the budget, as text with its unit.
        kv_dtype: format of keys and values, or two formats with a comma; None if not quantized.
    """

    policy: str
    budget: str | None = None
    kv_dtype: str | None = None

    @property
    def label(self) -> str | None:
        """The budget in rows and tables, which write slots as the papers do, without a unit."""
        return self.budget and self.budget.removesuffix(" slots")

    def __str__(self) -> str:
        budget = f" @ {self.label}" if self.budget else ""
        return self.policy + budget + (f", {self.kv_dtype}" if self.kv_dtype else "")

    @property
    def formats(self) -> KVDtype | tuple[KVDtype, KVDtype] | None:
        """The argument `kv_dtype` of the library."""
        if self.kv_dtype is None:
            return None
        parts: Any = tuple(self.kv_dtype.split(","))
        return parts[0] if len(parts) == 1 else parts

    def cache(self, llm: LanguageModel) -> CachedModel:
        """Returns the model with the setting's cache; budgets count unquantized arrays as bfloat16."""
        cache = llm.cache(self.policy, self.budget, kv_dtype=self.formats, allow_beyond_context=True)
        return dataclasses.replace(cache, budget_dtype=REFERENCE_DTYPE)

    def check(self, generator: Generator) -> None:
        """Checks that caches hold no more than the budget.

        Raises:
            ValueError: if its share is less than the smallest cache of the policy, which short texts have.
        """
        if generator.is_short:
            raise ValueError(f"budget={self.budget} is less than the smallest cache of {self.policy}")

    def resolve(self, spec: kvjax.CacheSpec, tokens: int) -> Policy:
        """Returns the policy for caches of a spec; a share of a budget is of a full cache of `tokens`."""
        return resolve_policy(self.policy, self.budget, dataclasses.replace(_reference(spec), window=None), tokens)


def parse_settings(
    policies: Sequence[str], budgets: Sequence[str], kv_dtypes: Sequence[str] = ("none",)
) -> list[Setting]:
    """Returns every policy with every budget and format.

    Args:
        policies: policy strings. A policy that names its budget ("snapkv@25%") or its format ("exact+int4",
            "snapkv@25%+int8") has only that.
        budgets: budgets.
        kv_dtypes: formats ("int8", "int4,int2"), or "none".

    Returns:
        The settings, without repetitions.

    Raises:
        ValueError: if a policy, a budget or a format is invalid.
    """
    settings = []
    for text in policies:
        text, _, kv_dtype = text.partition("+")
        choice = NamedPolicy.parse(text)
        name = text.partition("@")[0]  # without defaults filled in, because names identify rows
        parsed = [str(Budget.parse(budget)) for budget in budgets]
        sizes: Sequence[Any] = [str(choice.budget)] if choice.budget else parsed if choice.takes_budget else [None]
        settings += [
            Setting(name, size, None if one == "none" else one)
            for size in sizes
            for one in ([kv_dtype] if kv_dtype else kv_dtypes)
        ]
    for setting in settings:
        if setting.kv_dtype != "bfloat16":  # turns the formats of a profile off
            parse_kv_dtype(setting.formats)
    return list(dict.fromkeys(settings))


@dataclasses.dataclass(frozen=True)
class CacheSize:
    """Bytes of the cache of one sequence, as `rows.Row` has them."""

    device_bytes: int
    host_bytes: int
    read_bytes: int
    cache_fraction: float
    read_fraction: float
    tail_fraction: float | None = None


def text_size(document: Document) -> CacheSize:
    """Returns the size of a compressed text, with the bytes of one question and answer as `tail_fraction`."""
    layers = list(zip(document.prefix.generator.policies, document.prefix.generator.specs, strict=True))
    sizes = [_frozen_bytes(policy, _reference(spec)) for policy, spec in layers]
    held, read = (sum(of_layers) / document.full_cache_bytes for of_layers in zip(*sizes, strict=True))
    tail = _row_bytes(document.suffix_sizes())[0] / document.full_cache_bytes
    prefix = document.prefix
    return CacheSize(prefix.cache_bytes, prefix.host_bytes, prefix.read_bytes, held, read, tail)


def sequence_size(generator: Generator, tokens: int, host_bytes: int = 0) -> CacheSize:
    """Returns the size of the cache of one sequence.

    Args:
        generator: sizes and policies.
        tokens: tokens of the full cache to compare with.
        host_bytes: bytes in host memory.
    """
    layers = list(zip(generator.policies, _specs(generator, tokens), strict=True))
    held = sum(row_bytes(*layer) for layer in layers) + generator.recurrent_row_bytes
    read_bytes = sum(row_read_bytes(*layer) for layer in layers)
    return CacheSize(held, host_bytes, read_bytes, *fractions(generator, tokens))


def fractions(generator: Generator, tokens: int) -> tuple[float, float]:
    """Returns the bytes that a cache holds and that a step reads, relative to a full bfloat16 cache of `tokens`."""
    held, read = _row_bytes(generator, tokens)
    full = sum(spec.full_cache_bytes(min(tokens, spec.window or tokens)) for spec in generator.specs)
    return held / full, read / full


def _specs(generator: Generator, tokens: int | None = None) -> list[kvjax.CacheSpec]:
    """Returns the specs of the layers, of full caches with the capacity of a number of tokens."""
    if tokens is None or not generator.plan.is_resizable:
        return [*generator.specs]
    return [
        dataclasses.replace(spec, max_prompt_tokens=max(tokens - spec.max_new_tokens, 1)) for spec in generator.specs
    ]


def _row_bytes(generator: Generator, tokens: int | None = None) -> tuple[int, int]:
    """Returns the bytes that a sequence holds and reads per step, with unquantized arrays in bfloat16."""
    specs = map(_reference, _specs(generator, tokens))
    layers = list(zip(generator.policies, specs, strict=True))
    return sum(row_bytes(*layer) for layer in layers), sum(row_read_bytes(*layer) for layer in layers)


def _reference(spec: kvjax.CacheSpec) -> kvjax.CacheSpec:
    """Returns a spec with unquantized arrays in bfloat16."""
    return dataclasses.replace(spec, dtype=REFERENCE_DTYPE)


@functools.lru_cache(maxsize=1024)
def _frozen_bytes(policy: Policy, spec: kvjax.CacheSpec) -> tuple[int, int]:
    """Returns the bytes that a frozen text holds in a layer and that a step reads."""
    text = kvjax.FrozenCache(abstract_cache(policy, spec)[0].state, policy=policy, spec=spec, mesh=None)
    return kvjax.cache_bytes(text).device, kvjax.read_bytes(text)
