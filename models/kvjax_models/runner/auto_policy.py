"""The policy "auto" and `heads="auto"` as values, and their settings for a model and a budget.

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
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
from absl import logging

import kvjax
from kvjax.budget import MAX_STAGING_TOKENS, Budget, format_bytes, row_bytes, staging_tokens
from kvjax.combinators.head_budgets import Shares
from kvjax.messages import shorten, unknown_policy
from kvjax.policy import Policy, setting_types
from kvjax.quantization import FORMATS, KVDtype
from kvjax.registry import POLICIES, PolicyChoice, PolicyValue, policy_values, split_policy
from kvjax.spec import CacheSpec
from kvjax_models.profile import Profile

DEFAULT_BUDGET = "25%"
# Policies of `auto` for the heads that do not retrieve, the latter two if the profile has no scorer for KVzap.
POLICY = "kvzap"
POLICY_WITHOUT_SCORER = "snapkv"
STREAMING_POLICY_WITHOUT_SCORER = "chelsea"  # if prompts are streamed
_SCALE_BITS = 16 / 64  # per stored number, for vectors of 64 dimensions

KVFormat = KVDtype | tuple[KVDtype, KVDtype] | None

# Smallest budget, as a fraction of a full bfloat16 cache, and the format of `policy="auto"`. Measured on SmolLM2-135M.
_AUTO_FORMATS: tuple[tuple[float, KVFormat], ...] = ((0.2, "int8"), (0.05, "int4"), (0.0, ("int4", "int2")))
# Where no head keeps every token, a lost token costs more than bits. Measured on Gemma 3 270M.
_FORMATS_WITH_FEW_HEADS = ((0.5, "int8"), *_AUTO_FORMATS[1:])
# Largest fraction of the budget that 16 staged tokens, which are not quantized, may take; otherwise 8 are staged.
_LARGEST_STAGING = 0.07
# Newest tokens that KVzap keeps, as a fraction of the kept tokens, and at most. More of them predict books better (.016
# nats per token over the full cache with 16, .007 with 128, at 25% of 2,048 tokens); short texts have others to keep.
_RECENT_SHARE, _MAX_RECENT = 1 / 8, 128
# Later tokens have reserved slots if they need at most this fraction of the budget.
_LARGEST_RESERVE = 1 / 3


@dataclasses.dataclass(frozen=True)
class Auto:
    """The policy "auto", whose settings follow from the model and the budget."""

    def __str__(self) -> str:
        return "auto"


@dataclasses.dataclass(frozen=True)
class AutoHeads:
    """Budgets of the KV heads by the profile of the model: `heads="auto"`."""

    def __str__(self) -> str:
        return "auto"


HeadValues: TypeAlias = AutoHeads | Profile | Shares | None
Heads: TypeAlias = HeadValues | Literal["auto"]


@dataclasses.dataclass(frozen=True)
class NamedPolicy:
    """A policy as text names it: `auto`, or a choice of `kvjax.PolicyChoice`, which may have `heads=auto`.

    Attributes:
        policy: the policy, without its budget.
        budget: the budget, if it is part of the text.
        heads: budgets of the heads, if the text has `heads=auto`.
    """

    policy: Auto | PolicyChoice
    budget: Budget | None = None
    heads: AutoHeads | None = None

    @classmethod
    def parse(cls, text: str) -> "NamedPolicy":
        """Parses `auto`, `NAME`, `NAME:setting=value,...` and each of them with `@BUDGET`.

        Returns:
            The policy.

        Raises:
            ValueError: if the policy, a setting, a value or the budget is invalid.
        """
        name, settings, budget = split_policy(text)
        if name == "auto":
            if settings:
                raise ValueError(f"policy {shorten(text)}: auto takes no settings; pass {POLICY}:heads=auto with them")
            return cls(Auto(), budget)
        if name not in POLICIES:
            raise ValueError(unknown_policy(name, ["auto", *POLICIES]))
        is_auto = settings.get("heads") == "auto"
        if is_auto:
            del settings["heads"]
        choice = dataclasses.replace(PolicyChoice.create(name, settings, budget), budget=None)
        return cls(choice, budget, AutoHeads() if is_auto else None)

    @property
    def takes_budget(self) -> bool:
        """Whether the policy has a budget."""
        return isinstance(self.policy, Auto) or self.policy.takes_budget

    def __str__(self) -> str:
        policy: Any = self.policy
        if self.heads is not None:
            policy = dataclasses.replace(policy, settings=(*policy.settings, ("heads", self.heads)))
        return f"{policy}@{self.budget}" if self.budget else str(policy)


# Policies as `CachedModel` takes them, and as it has them.
AnyPolicy: TypeAlias = str | NamedPolicy | Auto | PolicyValue
CachePolicy: TypeAlias = Auto | PolicyValue


def cache_options(
    policy: AnyPolicy, budget: int | str | Budget | None, heads: Heads
) -> tuple[CachePolicy, Budget | None, HeadValues]:
    """Turns options of a cache into values, and checks them as far as they do not depend on lengths.

    Args:
        budget: the budget; 25% by default for "auto".
        heads: "auto" or a profile for any policy, or the shares of `kvjax.HeadBudgets`.

    Returns:
        The policy without its budget, the budget and the heads.

    Raises:
        ValueError: if an option is invalid, missing or given twice.
        TypeError: if `policy` is none.
    """
    if isinstance(policy, str):
        policy = NamedPolicy.parse(policy)
    if isinstance(policy, NamedPolicy):
        if policy.budget is not None and budget is not None:
            raise ValueError(f"policy {policy} has a budget; remove it or budget={budget}")
        if policy.heads is not None and heads is not None:
            raise ValueError(f"policy {policy} has heads; remove them or heads={heads!r}")
        budget, heads, policy = policy.budget or budget, policy.heads or heads, policy.policy
    if not (heads is None or isinstance(heads, AutoHeads | Profile | tuple) or heads == "auto"):
        raise ValueError(f"heads={shorten(heads)} must be 'auto', a profile, shares of the heads, or None")
    if heads is not None and isinstance(policy, Auto | PolicyChoice):
        if isinstance(policy, Auto) or "heads" in dict(policy.settings):
            raise ValueError(f"policy {policy} has heads; remove them or heads={heads!r}")
        if not policy.takes_budget:
            raise ValueError(f"policy {policy} keeps everything; remove heads={str(heads)!r}")
    if isinstance(heads, str):
        heads = AutoHeads()
    if isinstance(policy, Auto):
        return policy, Budget.of(DEFAULT_BUDGET if budget is None else budget), heads
    return *policy_values(policy, budget), heads


def resolve_auto(
    policy: CachePolicy,
    budget: Budget | None,
    kv_dtype: KVFormat,
    spec: CacheSpec,
    tokens: int,
    *,
    heads: HeadValues = None,
    streaming: bool = False,
    find_profile: Callable[[], Profile | None],
) -> tuple[PolicyValue, KVFormat]:
    """Replaces "auto" in a policy and its heads by settings for a model.

    Args:
        policy: the policy, as `cache_options` returns it.
        kv_dtype: the quantization format.
        spec: spec of the caches without quantization.
        tokens: tokens of the full cache that a fraction refers to.
        streaming: whether prompts are streamed through the cache.
        find_profile: returns the model's profile, or None; called only if it is needed.

    Returns:
        The policy and the format.
    """
    if not isinstance(policy, Auto) and heads is None:
        return policy, kv_dtype
    is_auto, is_in_bytes = isinstance(policy, Auto), budget is not None and budget.slots is None
    fraction = 1.0 if budget is None else budget.share(spec, tokens)
    profile = shares = None
    if isinstance(heads, tuple):
        shares = heads
    else:
        profile = heads if isinstance(heads, Profile) else find_profile()
    if kv_dtype is None and (is_auto or (is_in_bytes and shares is None)):
        # A budget in slots holds no more tokens with fewer bits.
        has_few_heads = profile is not None and profile.has_few_heads and is_in_bytes
        table = _FORMATS_WITH_FEW_HEADS if has_few_heads else _AUTO_FORMATS
        kv_dtype = next(formats for smallest, formats in table if fraction >= smallest)
    policy_class = getattr(policy, "policy_class", policy)  # or a policy, or a function that makes one
    if not isinstance(policy, Auto) and shares is None and getattr(policy_class, "is_retrieval", False) is True:
        # Every head holds all tokens already; with more reads for some heads, fewer questions are answered.
        return policy, kv_dtype
    # In bytes, narrow formats keep more tokens.
    kept = fraction * 16 / _bits(kv_dtype, spec) if is_in_bytes or budget is None else fraction
    if profile is not None:
        shares = profile.shares(min(kept, 1.0))
    elif shares is None:
        logging.log_first_n(logging.WARNING, "the model has no profile, so that all heads get equal budgets", 1)
    if isinstance(policy, Auto):
        choice = PolicyChoice(POLICY)
        if profile is None or profile.scorer is None:
            choice = PolicyChoice(STREAMING_POLICY_WITHOUT_SCORER if streaming else POLICY_WITHOUT_SCORER)
    elif isinstance(policy, PolicyChoice):
        choice = policy
    else:
        return _with_heads(policy, shares), kv_dtype
    settings: dict[str, Any] = {}
    types = setting_types(choice.policy_class)
    if "compact_every" in types:
        # The budget is the bytes of some tokens in bfloat16.
        is_large = _LARGEST_STAGING * fraction * tokens >= 16
        settings["compact_every"] = staging_tokens(fraction * tokens) if is_large else 8
    if is_auto and choice.name == POLICY_WITHOUT_SCORER:
        settings["window_size"] = 16
    elif is_auto and choice.name == POLICY:
        settings["recent"] = min(max(round(_RECENT_SHARE * kept * tokens / 16) * 16, 16), _MAX_RECENT)
    if is_auto and "reserve_decode_slots" in types:
        settings["reserve_decode_slots"] = spec.max_new_tokens <= _LARGEST_RESERVE * kept * tokens
    if shares is not None:
        settings["heads"] = shares
    return choice.with_settings(**settings), kv_dtype


def _with_heads(policy: Any, shares: Shares | None) -> PolicyValue:
    """Returns a policy, or a function that makes one from a budget, with budgets by heads."""
    if shares is None:
        return policy
    if isinstance(policy, Policy):
        return kvjax.HeadBudgets(policy, shares)

    def make(budget: int) -> Policy:
        return kvjax.HeadBudgets(policy(budget), shares)

    make.__name__ = str(getattr(policy, "__name__", policy))
    return make


def resolve_windows(budget: Budget | None, specs: Sequence[CacheSpec]) -> Budget | None:
    """Subtracts the bytes of layers with a sliding window from a budget in bytes.

    Such layers cache exactly their window, and `Budget.limit` divides the bytes of a budget among all layers.

    Returns:
        The budget that gives the other layers the remaining bytes.

    Raises:
        ValueError: if the windows take all bytes.
    """
    windows = [spec for spec in specs if spec.window is not None]
    if budget is None or budget.bytes is None or not windows or len(windows) == len(specs):
        return budget
    held = sum(row_bytes(kvjax.Exact(compact_every=MAX_STAGING_TOKENS), spec) for spec in windows)
    if held >= budget.bytes:
        raise ValueError(
            f"budget={budget} is less than the {format_bytes(held)} that {len(windows)} layers with a sliding window "
            "hold; pass more bytes, or a share (25%), which applies to the other layers"
        )
    remaining = (budget.bytes - held) * len(specs) // (len(specs) - len(windows))
    return dataclasses.replace(budget, bytes=remaining)


def _bits(kv_dtype: KVFormat, spec: CacheSpec) -> float:
    """Returns the bits of a stored number."""
    spec = dataclasses.replace(spec, kv_dtype=kv_dtype)
    if spec.kv_formats is None:
        return 8.0 * jnp.dtype(spec.dtype).itemsize
    bits = [FORMATS[name].bits or 8 for name in spec.kv_formats]
    return sum(bits) / len(bits) + _SCALE_BITS
