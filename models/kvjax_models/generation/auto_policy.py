"""Resolves `policy="auto"`, `layer_budget_scale="auto"` and budgets in bytes for a model."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from absl import logging

import kvjax
from kvjax.budget import Budget, format_bytes, row_bytes
from kvjax.quantization import FORMATS, KVDtype
from kvjax.registry import AnyPolicy, PolicyChoice
from kvjax.spec import CacheSpec
from kvjax_models import calibration
from kvjax_models.model.llama import Llama

DEFAULT_BUDGET = "25%"
_SCALE_BITS = 16 / 64  # per stored number, for vectors of 64 dimensions

KVFormat = KVDtype | tuple[KVDtype, KVDtype] | None


# Smallest budget, as a fraction of a full bfloat16 cache, and the format of `policy="auto"`. Measured on SmolLM2-135M.
_AUTO_FORMATS: tuple[tuple[float, KVFormat], ...] = ((0.2, "int8"), (0.1, "int4"), (0.0, ("int4", "int2")))
# The staging buffer is not quantized: 16 tokens, or 4 if 16 exceed this fraction of the budget.
_LARGEST_STAGING = 0.02
_MAX_STAGING = 128  # tokens in the staging buffer of any policy by default
# Later tokens have reserved slots if they need at most this fraction of the budget.
_LARGEST_RESERVE = 1 / 3


def resolve_auto(
    model: Llama, policy: AnyPolicy, budget: int | str | Budget | None, kv_dtype: KVFormat, spec: CacheSpec, tokens: int
) -> tuple[AnyPolicy, int | str | Budget | None, KVFormat]:
    """Replaces "auto" in a policy by settings for a model.

    `policy="auto"` stores the tokens in 4 bits, from 20% of a full bfloat16 cache on in 8, and below 10% values in 2,
    unless `kv_dtype` is given. Its staging buffer holds 16 tokens, or 4 if the budget is smaller than 800 tokens in
    bfloat16. Later tokens have reserved slots, but in long generations, where they would need more than a third of
    the budget, they replace the tokens of lowest rank. The budget is divided among layers by the model's calibration.

    Args:
        model: the decoder.
        policy: the policy.
        budget: the budget; 25% by default for "auto".
        kv_dtype: the quantization format.
        spec: spec of the caches without quantization.
        tokens: tokens of the full cache that a fraction refers to.

    Returns:
        The policy, the budget and the format.
    """
    choice = PolicyChoice.parse(policy) if isinstance(policy, str) else policy
    if not isinstance(choice, PolicyChoice) or not choice.needs_calibration:
        return policy, budget, kv_dtype
    is_auto = choice.settings == PolicyChoice.parse("auto").settings
    if is_auto and budget is None and choice.budget is None:
        budget = DEFAULT_BUDGET
    size = choice.budget if budget is None else Budget.of(budget)
    fraction = _fraction(size, spec, tokens)
    if is_auto and kv_dtype is None:
        kv_dtype = next(formats for smallest, formats in _AUTO_FORMATS if fraction >= smallest)
    # In bytes, narrow formats keep more tokens.
    kept = fraction if size is not None and size.slots is not None else fraction * 16 / _bits(kv_dtype, spec)
    if is_auto:
        chosen = {
            "compact_every": "16" if _LARGEST_STAGING * fraction * tokens >= 16 else "4",
            "reserve_decode_slots": "true" if spec.max_new_tokens <= _LARGEST_RESERVE * kept * tokens else "false",
        }
        choice = dataclasses.replace(choice, settings=tuple((dict(choice.settings) | chosen).items()))
    found = calibration.find(model)
    if found is None:
        logging.log_first_n(
            logging.WARNING,
            "the model has no calibration, so that all layers get equal budgets; run `kvjax calibrate` once",
            1,
        )
        return choice.calibrated(None), budget, kv_dtype
    return choice.calibrated(found.scale(min(kept, 1.0))), budget, kv_dtype


def resolve_windows(
    policy: AnyPolicy, budget: int | str | Budget | None, specs: Sequence[CacheSpec]
) -> tuple[AnyPolicy, int | str | Budget | None]:
    """Subtracts the bytes of layers with a sliding window from a budget in bytes.

    Such layers cache exactly their window, and `Budget.limit` divides the bytes of a budget among all layers.

    Args:
        policy: the policy, whose text may have the budget.
        budget: the budget.
        specs: specs of all layers.

    Returns:
        The policy and the budget that give the other layers the remaining bytes.

    Raises:
        ValueError: if the windows take all bytes.
    """
    policy = PolicyChoice.parse(policy) if isinstance(policy, str) else policy
    size = policy.budget if isinstance(policy, PolicyChoice) else None
    size = Budget.of(budget) if budget is not None else size
    windows = [spec for spec in specs if spec.window is not None]
    if size is None or size.bytes is None or not windows or len(windows) == len(specs):
        return policy, budget
    held = sum(row_bytes(kvjax.Exact(compact_every=_MAX_STAGING), spec) for spec in windows)
    if held >= size.bytes:
        raise ValueError(
            f"budget={size} is less than the {format_bytes(held)} that {len(windows)} layers with a sliding window "
            "hold; pass more bytes, or a share (25%), which applies to the other layers"
        )
    size = dataclasses.replace(size, bytes=(size.bytes - held) * len(specs) // (len(specs) - len(windows)))
    if budget is None and isinstance(policy, PolicyChoice):
        return dataclasses.replace(policy, budget=size), None
    return policy, size


def _fraction(budget: Budget | None, spec: CacheSpec, tokens: int) -> float:
    """Returns the fraction of a full bfloat16 cache, or of its tokens for a budget in slots; 1 without a budget."""
    if budget is None:
        return 1.0
    if budget.slots is not None:
        return budget.slots / max(tokens, 1)
    return budget.limit(spec, tokens) / max(spec.full_cache_bytes(tokens), 1)


def _bits(kv_dtype: KVFormat, spec: CacheSpec) -> float:
    """Returns the bits of a stored number."""
    spec = dataclasses.replace(spec, kv_dtype=kv_dtype)
    if spec.kv_formats is None:
        return 8.0 * jnp.dtype(spec.dtype).itemsize
    bits = [FORMATS[name].bits or 8 for name in spec.kv_formats]
    return sum(bits) / len(bits) + _SCALE_BITS
