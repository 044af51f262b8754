"""Plans: the caches of all layers for given lengths, resolved once.

A plan is made where the lengths of prompts and answers are known. It belongs to every generator, document and row of
these lengths; nothing below chooses a policy, a format or a size again.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import kvjax
from kvjax.budget import row_bytes, row_read_bytes
from kvjax.cache import is_resizable, layer_policy
from kvjax.combinators.combined import CombinedPolicies
from kvjax.distributed.collectives import SEQUENCE
from kvjax.messages import shorten
from kvjax.policy import Policy
from kvjax.quantization import KVDtype
from kvjax.spec import check_integer
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama
from kvjax_models.runner.state import cache_specs
from kvjax_models.sharding import mesh_of


@dataclasses.dataclass(frozen=True)
class Plan:
    """The caches of one sequence.

    Attributes:
        max_prompt_tokens: maximum length of the first prompt, or of the prefixes.
        max_new_tokens: maximum number of tokens after it, generated tokens and later prompts together.
        context_tokens: maximum number of tokens of a sequence, also outside the caches; by default their capacity.
        kv_dtype: quantization format of the caches (`kvjax.CacheSpec.kv_dtype`).
        streaming: whether the first prompt is appended in blocks like later ones, each attending to the compressed
            cache. Memory is then independent of the prompt's length.
        is_suffix: whether the caches hold only the up to `max_new_tokens` tokens after frozen prefixes.
        is_short: whether the share of a budget was less than the smallest cache of its policy, so that the caches hold
            more.
        policies: policy of every layer with attention. Layers with a sliding window cache exactly their window.
        specs: spec of the cache of each of these layers, with one batch row.
        block_size: tokens between two compactions of all layers.
        is_resizable: whether the caches hold every token, so that rows can move to caches of another capacity.

    Raises:
        ValueError: if a value is invalid, or a policy does not support streaming.
    """

    model: dataclasses.InitVar[Llama]
    policy: dataclasses.InitVar[Policy | Sequence[Policy]]  # of all layers with attention, or one for each of them
    _: dataclasses.KW_ONLY
    max_prompt_tokens: int
    max_new_tokens: int
    context_tokens: int = 0
    kv_dtype: KVDtype | tuple[KVDtype, KVDtype] | None = None
    streaming: bool = False
    is_suffix: bool = False
    is_short: bool = False
    policies: tuple[Policy, ...] = dataclasses.field(init=False)
    specs: tuple[kvjax.CacheSpec, ...] = dataclasses.field(init=False)
    block_size: int = dataclasses.field(init=False)
    is_resizable: bool = dataclasses.field(init=False)

    def __post_init__(self, model: Llama, policy: Policy | Sequence[Policy]) -> None:
        def set_field(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        if not isinstance(self.streaming, bool):
            raise ValueError(f"streaming={shorten(self.streaming)} must be True or False")
        for name, minimum in (("max_prompt_tokens", 1), ("max_new_tokens", 0)):
            set_field(name, check_integer(name, getattr(self, name), minimum))
        set_field("context_tokens", self.context_tokens or self.max_prompt_tokens + self.max_new_tokens)
        specs = cache_specs(
            model,
            batch=1,
            max_prompt_tokens=1 if self.is_suffix else self.max_prompt_tokens,
            max_new_tokens=self.max_new_tokens,
            streaming=self.streaming,
            kv_dtype=self.kv_dtype,
            context_tokens=self.context_tokens,
        )
        by_layer = (policy,) * len(specs) if isinstance(policy, Policy) else policy
        if len(by_layer) != len(specs):
            raise ValueError(f"policy must be one policy, or one for each of {len(specs)} layers, got {len(by_layer)}")
        set_field("policies", tuple(layer_policy(*layer) for layer in zip(by_layer, specs, strict=True)))
        if self.streaming and (unsupported := [one for one in self.policies if one.requires.entire_prompt]):
            raise ValueError(f"{unsupported[0]} compresses entire prompts; set streaming=False")
        set_field("block_size", min(specs[0].max_new_tokens, *(one.compact_every for one in self.policies)))
        set_field("specs", tuple(dataclasses.replace(spec, staging_slots=self.block_size) for spec in specs))
        mesh = mesh_of(model)
        shards = 1 if mesh is None else mesh.shape[SEQUENCE]
        sharded = (dataclasses.replace(spec, sequence_shards=shards) for spec in self.specs)
        set_field("is_resizable", all(map(is_resizable, self.policies, sharded)))

    @property
    def capacity(self) -> int:
        """Maximum number of tokens of a row."""
        return self.specs[0].capacity

    @property
    def scoring_policy(self) -> Policy | None:
        """A policy that requires predicted scores; None if no layer has one."""
        return next((policy for policy in self.policies if policy.requires.predicted_scores), None)

    @functools.cached_property
    def row_bytes(self) -> int:
        """Device bytes of the caches of one row, over all layers."""
        return sum(row_bytes(policy, spec) for policy, spec in zip(self.policies, self.specs, strict=True))

    @functools.cached_property
    def row_read_bytes(self) -> int:
        """Bytes of the caches of one row that one decode step reads."""
        return sum(row_read_bytes(policy, spec) for policy, spec in zip(self.policies, self.specs, strict=True))

    def held_share(self, tokens: int) -> float:
        """Returns the share of tokens that have a slot, on average over heads and layers without a window."""
        policies = [policy for policy, spec in zip(self.policies, self.specs, strict=True) if spec.window is None]
        return sum(_held_tokens(policy, tokens) for policy in policies) / (len(policies) * tokens)


@functools.lru_cache(maxsize=256)
def rope_tokens(config: LlamaConfig, tokens: int) -> int:
    """Returns the length of sequences that rotary embeddings depend on: one for all lengths of most models.

    Args:
        tokens: maximum length of the sequences.
    """
    longest = max(config.max_length, tokens)
    is_equal = all(config.rotary(one, tokens) == config.rotary(one, longest) for one in config.attention_layers)
    return longest if is_equal else tokens


def _held_tokens(policy: Policy, tokens: int) -> float:
    """Returns the number of tokens for which a KV head has slots, on average over the heads of a layer."""
    if isinstance(policy, CombinedPolicies):
        return sum(_held_tokens(one, tokens) for one in policy.policies) / len(policy.policies)
    if policy.is_retrieval or not hasattr(policy, "budget"):
        inner = getattr(policy, "policy", None)
        return tokens if policy.is_retrieval or inner is None else _held_tokens(inner, tokens)
    return min(policy.budget, tokens)
