"""Resolves `policy="auto"`, `heads="auto"` and budgets in bytes for a model.

`auto` keeps every token in the heads that retrieve, which the model's profile names. In the others it keeps the tokens
with the highest scores of the profile's linear map (KVzap). It reads a prompt once:

1. The format follows from the budget: from 20% of a full bfloat16 cache on tokens are stored in 8 bits, from 5% on in
   4, and below that keys in 4 and values in 2. A `kv_dtype` has precedence; "bfloat16" stores 16 bits.
2. The retrieving heads are the first ones of the profile's ranking, as many as `Profile.shares` allows.
3. The staging buffer, which is not quantized, holds 16 tokens, 8 if the budget is small, and up to 128 if it is large.
   The newest tokens stay: an eighth of the kept ones, from 16 to 128.
4. Later tokens, and those of streamed prompts, have scores, too. They have reserved slots, but in long generations the
   tokens of lowest score are dropped.

Without a scorer SnapKV replaces KVzap, and Chelsea does if prompts are streamed. In models with few KV heads (Gemma 3
270M), no head keeps every token: budgets follow the heads' needs, and tokens are stored in 8 bits from 50% on only.

`heads="auto"` does 1 to 3 for any policy with a budget. Two exceptions: a budget in slots, which holds no more tokens
in fewer bits, keeps the dtype of the model, and the heads of retrieval policies, which hold every token, stay equal.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
from absl import logging

import kvjax
from kvjax.budget import Budget, format_bytes, row_bytes
from kvjax.combinators.head_budgets import Shares
from kvjax.policy import Policy, setting_types
from kvjax.quantization import FORMATS, KVDtype
from kvjax.registry import POLICIES, AnyPolicy, PolicyChoice
from kvjax.spec import CacheSpec
from kvjax_models.profile import Profile

DEFAULT_BUDGET = "25%"
# Policies of `auto` for the heads that do not retrieve, if the profile has no scorer for KVzap.
POLICY_WITHOUT_SCORER = "snapkv"
STREAMING_POLICY_WITHOUT_SCORER = "chelsea"  # if prompts are streamed
_SCALE_BITS = 16 / 64  # per stored number, for vectors of 64 dimensions

KVFormat = KVDtype | tuple[KVDtype, KVDtype] | None
Heads: TypeAlias = str | Profile | Shares | None

# Smallest budget, as a fraction of a full bfloat16 cache, and the format of `policy="auto"`. Measured on SmolLM2-135M.
_AUTO_FORMATS: tuple[tuple[float, KVFormat], ...] = ((0.2, "int8"), (0.05, "int4"), (0.0, ("int4", "int2")))
# Where no head keeps every token, a lost token costs more than bits. Measured on Gemma 3 270M.
_FORMATS_WITH_FEW_HEADS = ((0.5, "int8"), *_AUTO_FORMATS[1:])
# The staging buffer is not quantized: 16 tokens, or 8 if 16 exceed the first fraction of the budget, or more within the
# second one, because compacting all layers takes as long as several decode steps on a GPU.
_LARGEST_STAGING, _SMALL_STAGING = 0.07, 0.01
_MAX_STAGING = 128  # tokens in the staging buffer of any policy by default
# Newest tokens that KVzap keeps, as a fraction of the kept tokens, and at most. More of them predict books better (.016
# nats per token over the full cache with 16, .007 with 128, at 25% of 2,048 tokens); short texts have others to keep.
_RECENT_SHARE, _MAX_RECENT = 1 / 8, 128
# Later tokens have reserved slots if they need at most this fraction of the budget.
_LARGEST_RESERVE = 1 / 3


def resolve_auto(
    policy: AnyPolicy,
    budget: int | str | Budget | None,
    kv_dtype: KVFormat,
    spec: CacheSpec,
    tokens: int,
    *,
    heads: Heads = None,
    streaming: bool = False,
    find_profile: Callable[[], Profile | None],
) -> tuple[AnyPolicy, int | str | Budget | None, KVFormat]:
    """Replaces "auto" in a policy by settings for a model.

    Args:
        policy: the policy.
        budget: the budget; 25% by default for "auto".
        kv_dtype: the quantization format.
        spec: spec of the caches without quantization.
        tokens: tokens of the full cache that a fraction refers to.
        heads: "auto" or a profile for any policy, or the shares of `kvjax.HeadBudgets`.
        streaming: whether prompts are streamed through the cache.
        find_profile: returns the model's profile, or None; called only if it is needed.

    Returns:
        The policy, the budget and the format.

    Raises:
        ValueError: if `heads` is given twice, or for a policy without a budget.
    """
    choice = PolicyChoice.parse(policy) if isinstance(policy, str) else policy
    check_heads(choice, heads)
    if heads is not None and isinstance(choice, PolicyChoice):
        choice = choice.with_settings(heads="auto")
    if heads is None and not (isinstance(choice, PolicyChoice) and choice.needs_profile):
        return policy, budget, kv_dtype
    is_auto = isinstance(choice, PolicyChoice) and choice.is_auto
    size = choice.budget if isinstance(choice, PolicyChoice) else None
    if is_auto and budget is None and size is None:
        budget = DEFAULT_BUDGET
    size = size if budget is None else Budget.of(budget)
    is_in_bytes = size is not None and size.slots is None
    fraction = 1.0 if size is None else size.share(spec, tokens)
    profile = heads if isinstance(heads, Profile) else None
    if profile is None and (is_auto or not isinstance(heads, tuple)):
        profile = find_profile()
    if kv_dtype is None and (is_auto or (is_in_bytes and not isinstance(heads, tuple))):
        # A budget in slots holds no more tokens with fewer bits.
        has_few_heads = profile is not None and profile.has_few_heads and is_in_bytes
        table = _FORMATS_WITH_FEW_HEADS if has_few_heads else _AUTO_FORMATS
        kv_dtype = next(formats for smallest, formats in table if fraction >= smallest)
    if not isinstance(heads, tuple) and _is_retrieval(choice):
        # Every head holds all tokens already; with more reads for some heads, fewer questions are answered.
        return choice.without_profile() if isinstance(choice, PolicyChoice) else choice, budget, kv_dtype
    # In bytes, narrow formats keep more tokens.
    kept = fraction if size is not None and size.slots is not None else fraction * 16 / _bits(kv_dtype, spec)
    if isinstance(heads, tuple):
        shares: Shares | None = heads
    elif profile is not None:
        shares = profile.shares(min(kept, 1.0))
    else:
        logging.log_first_n(logging.WARNING, "the model has no profile, so that all heads get equal budgets", 1)
        shares = None
    if not isinstance(choice, PolicyChoice):
        return _with_heads(choice, shares), budget, kv_dtype
    if is_auto and (profile is None or profile.scorer is None):
        name = STREAMING_POLICY_WITHOUT_SCORER if streaming else POLICY_WITHOUT_SCORER
        choice = dataclasses.replace(choice, name=name)
    settings: dict[str, Any] = {}
    types = setting_types(POLICIES[choice.name])
    if "compact_every" in types:
        settings["compact_every"] = _staging_tokens(fraction * tokens)
    if is_auto and choice.name == POLICY_WITHOUT_SCORER:
        settings["window_size"] = 16
    elif is_auto and choice.name != STREAMING_POLICY_WITHOUT_SCORER:
        settings["recent"] = min(max(round(_RECENT_SHARE * kept * tokens / 16) * 16, 16), _MAX_RECENT)
    if is_auto and "reserve_decode_slots" in types:
        settings["reserve_decode_slots"] = spec.max_new_tokens <= _LARGEST_RESERVE * kept * tokens
    choice = choice.with_settings(**settings)
    return choice.without_profile() if shares is None else choice.with_shares(shares), budget, kv_dtype


def _staging_tokens(budget: float) -> int:
    """Returns the tokens of the staging buffer for a budget of the bytes of some tokens in bfloat16."""
    smallest = 16 if _LARGEST_STAGING * budget >= 16 else 8
    return max([smallest, *(size for size in (32, 64, _MAX_STAGING) if size <= _SMALL_STAGING * budget)])


def check_heads(policy: AnyPolicy, heads: Heads) -> None:
    """Checks the budgets of the heads of a policy.

    Args:
        policy: the policy; text is parsed already.
        heads: as for `resolve_auto`.

    Raises:
        ValueError: if `heads` is invalid, given twice, or for a policy without a budget.
    """
    if heads is not None and isinstance(policy, PolicyChoice):
        if "heads" in dict(policy.settings):
            raise ValueError(f"policy {policy} has heads; remove them or heads={heads!r}")
        if not policy.takes_budget:
            raise ValueError(f"policy {policy} keeps everything; remove heads={heads!r}")
    if isinstance(heads, str) and heads != "auto":
        raise ValueError(f"heads={heads!r} must be 'auto', a profile, shares of the heads, or None")


def _is_retrieval(policy: AnyPolicy) -> bool:
    """Returns whether a policy keeps every token and selects the ones to read."""
    if isinstance(policy, PolicyChoice):
        policy = POLICIES[policy.name]
    return getattr(policy, "is_retrieval", False) is True


def _with_heads(policy: Any, shares: Shares | None) -> AnyPolicy:
    """Returns a policy, or a function that makes one from a budget, with budgets by heads."""
    if shares is None:
        return policy
    if isinstance(policy, Policy):
        return kvjax.HeadBudgets(policy, shares)

    def make(budget: int) -> Policy:
        return kvjax.HeadBudgets(policy(budget), shares)

    make.__name__ = str(getattr(policy, "__name__", policy))
    return make


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


def _bits(kv_dtype: KVFormat, spec: CacheSpec) -> float:
    """Returns the bits of a stored number."""
    spec = dataclasses.replace(spec, kv_dtype=kv_dtype)
    if spec.kv_formats is None:
        return 8.0 * jnp.dtype(spec.dtype).itemsize
    bits = [FORMATS[name].bits or 8 for name in spec.kv_formats]
    return sum(bits) / len(bits) + _SCALE_BITS
