"""Policies by name, and from text such as `subgen:variant=paper,recent=32@25%`."""

import dataclasses
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, cast

from kvjax.budget import Budget, fit_bytes
from kvjax.combinators.ada_kv import AdaKV
from kvjax.combinators.by_layer import FirstLayers
from kvjax.combinators.host_memory import HostMemory
from kvjax.combinators.quantized import Quantized
from kvjax.policies.balancekv import BalanceKV
from kvjax.policies.balancekv_paper import BalanceKVPaper
from kvjax.policies.balancekv_reference import BalanceKVReference
from kvjax.policies.cam import CaM
from kvjax.policies.chelsea import Chelsea
from kvjax.policies.clustergen import ClusterGen
from kvjax.policies.clusterkv import ClusterKV
from kvjax.policies.clusterkv_certified import ClusterKVCertified
from kvjax.policies.clusterkv_paper import ClusterKVPaper
from kvjax.policies.clusterkv_reference import ClusterKVReference
from kvjax.policies.compactor import Compactor
from kvjax.policies.cur import CUR
from kvjax.policies.exact import Exact
from kvjax.policies.expected_attention import ExpectedAttention
from kvjax.policies.h2o import H2O
from kvjax.policies.infinigen import InfiniGen
from kvjax.policies.keydiff import KeyDiff
from kvjax.policies.knorm import Knorm
from kvjax.policies.kvzip import KVzip
from kvjax.policies.lagkv import LagKV
from kvjax.policies.leverage_scores import LeverageScores
from kvjax.policies.pyramidkv import PyramidKV
from kvjax.policies.quest import Quest
from kvjax.policies.snapkv import SnapKV
from kvjax.policies.streaming_llm import StreamingLLM
from kvjax.policies.subgen import SubGen
from kvjax.policies.tova import TOVA
from kvjax.policies.uniform import Uniform
from kvjax.policy import Policy, spelled
from kvjax.selection import Selection
from kvjax.spec import CacheSpec
from kvjax.storage import StorageName

POLICIES: dict[str, type[Policy]] = {
    "exact": Exact,
    "streaming_llm": StreamingLLM,
    "uniform": Uniform,
    "balancekv": BalanceKV,
    "balancekv_reference": BalanceKVReference,
    "balancekv_paper": BalanceKVPaper,
    "cam": CaM,
    "chelsea": Chelsea,
    "clustergen": ClusterGen,
    "clusterkv": ClusterKV,
    "clusterkv_certified": ClusterKVCertified,
    "clusterkv_paper": ClusterKVPaper,
    "clusterkv_reference": ClusterKVReference,
    "compactor": Compactor,
    "cur": CUR,
    "expected_attention": ExpectedAttention,
    "h2o": H2O,
    "infinigen": InfiniGen,
    "keydiff": KeyDiff,
    "knorm": Knorm,
    "kvzip": KVzip,
    "lagkv": LagKV,
    "leverage_scores": LeverageScores,
    "pyramidkv": PyramidKV,
    "quest": Quest,
    "snapkv": SnapKV,
    "subgen": SubGen,
    "tova": TOVA,
}

# What text may say of any policy: how combinators are put around it.
_AROUND: dict[str, Any] = {
    "storage": StorageName,
    "value_storage": StorageName,
    "whole_window": bool,
    "host_steps": int,
    "full_layers": int,
    "head_floor": float,
}

_AMPLE_BUDGET = 2**20  # slots that leave room for every setting: with them only the settings can be wrong


@dataclasses.dataclass(frozen=True)
class PolicyChoice:
    """A policy by its registered name, the settings given with it, as text, and maybe its budget.

    Beside its own settings every policy takes `storage=int8`, `fp8`, `int4`, `int3` or `int2` (`Quantized`),
    `value_storage` for values alone, `whole_window=True` to spare sinks and recent tokens, and `full_layers=n`
    (`FirstLayers`, in the same storage). Those that recall take `host_steps=R` (`HostMemory`), selections by scores
    `head_floor=0.2` (`AdaKV`).
    """

    name: str
    settings: tuple[tuple[str, str], ...] = ()
    budget: Budget | None = None

    @classmethod
    def parse(cls, text: str) -> "PolicyChoice":
        """Reads `NAME`, `NAME:setting=value,...` and either with `@BUDGET`.

        Raises:
            ValueError: for an unknown policy or setting, a value that it cannot have, or what is no budget.
        """
        whole, _, budget = text.partition("@")
        name, _, rest = whole.partition(":")
        if name not in POLICIES:
            raise ValueError(f"policy {name!r} is not known; known: {', '.join(sorted(POLICIES))}")
        settings = []
        for part in filter(None, re.split(r",(?![^(]*\))", rest)):
            key, equals, value = part.partition("=")
            if not equals:
                raise ValueError(f"policy {text!r}: {part!r} must read setting=value")
            settings.append((key, value))
        choice = cls(name, tuple(settings), Budget.parse(budget) if budget else None)
        if budget and not choice.takes_budget:
            raise ValueError(f"policy {text!r}: {name} keeps everything and takes no budget")
        choice.make(_AMPLE_BUDGET)
        return choice

    @property
    def takes_budget(self) -> bool:
        """Whether the policy is sized by a budget (all but exact are)."""
        return "budget" in _kinds(POLICIES[self.name])

    @property
    def variant(self) -> str | None:
        """The settings as given, None without any; with the name they identify a row of results."""
        return ",".join(f"{key}={value}" for key, value in self.settings) or None

    def __str__(self) -> str:
        variant = f":{self.variant}" if self.settings else ""
        return f"{self.name}{variant}" + (f"@{self.budget}" if self.budget else "")

    def make(self, budget: int | None = None) -> Policy:
        """The policy of so many slots (of its own budget in slots, where none is given).

        Raises:
            ValueError: for a setting that cannot be, with its name.
        """
        policy_class = POLICIES[self.name]
        kinds, around, own = _kinds(policy_class), {}, {}
        for key, text in self.settings:
            if (key not in kinds and key not in _AROUND) or key == "budget":
                known = ", ".join(sorted({*kinds, *_AROUND} - {"budget"}))
                raise ValueError(f"policy {self}: there is no setting {key!r}; {self.name} has {known}")
            try:
                if key in kinds:
                    own[key] = parse_value(kinds[key], text)
                else:
                    around[key] = parse_value(_AROUND[key], text)
            except ValueError as error:
                raise ValueError(f"policy {self}: {key}={text}: {error}") from error
        if self.takes_budget:
            budget = self.budget.slots if budget is None and self.budget is not None else budget
            own["budget"] = budget
        try:
            return put_around(policy_class(**own), **around)
        except (TypeError, ValueError) as error:
            raise ValueError(f"policy {self}: {error}") from error

    def fit(self, spec: CacheSpec, tokens: int) -> Policy:
        """The policy for a cache of this spec; a budget that is a share is one of what exact holds for so many
        tokens."""
        return self.make() if self.budget is None else _fill(self.make, self.budget, spec, tokens)


AnyPolicy = str | PolicyChoice | Policy | Callable[..., Policy]


def sized(policy: AnyPolicy, budget: int | str | Budget | None, spec: CacheSpec, tokens: int) -> Policy:
    """The policy that fills a budget.

    Args:
        policy: text as `PolicyChoice.parse` reads it ("subgen:recent=32"), a class such as `kvjax.SubGen`, whatever
            else makes a policy of slots, or a policy, which has its size.
        budget: slots per head (1024), a share of what exact holds for so many tokens ("25%") or bytes of a sequence
            over all layers ("64MiB"); None where the policy has its own.
        spec: what the cache is made for.

    Raises:
        ValueError: for what is no policy or no budget, a budget where there is one, and none where there is none.
    """
    if isinstance(policy, str):
        policy = PolicyChoice.parse(policy)
    if isinstance(policy, PolicyChoice):
        if policy.budget is not None and budget is not None:
            raise ValueError(f"policy {policy} has a budget; give budget={budget} or that one")
        if policy.budget is not None or not policy.takes_budget:
            return policy.fit(spec, tokens)
        make: Callable[..., Policy] = policy.make
        name = f"policy {policy}"
    elif isinstance(policy, Policy):
        if budget is not None:
            raise ValueError(f"{policy} has its size; give budget={budget} to its class, or to its name")
        return policy
    elif policy is Exact:
        return Exact()
    else:
        make, name = policy, str(getattr(policy, "__name__", policy))
    if budget is None:
        raise ValueError(f'{name} needs a budget: slots (1024), a share ("25%") or bytes ("64MiB")')
    return _fill(make, Budget.of(budget), spec, tokens)


def _fill(make: Callable[[int], Policy], budget: Budget, spec: CacheSpec, tokens: int) -> Policy:
    """The policy of a budget, which a share needs so many tokens for."""
    if budget.slots is not None:
        return make(budget.slots)
    try:
        return fit_bytes(make, spec, budget.limit(spec, tokens))
    except ValueError as error:
        raise ValueError(f"a budget of {budget} of {tokens} tokens: {error}") from error


def put_around(
    policy: Policy,
    storage: StorageName | None = None,
    value_storage: StorageName | None = None,
    whole_window: bool = False,
    host_steps: int | None = None,
    full_layers: int = 0,
    head_floor: float | None = None,
) -> Policy:
    """The policy with one budget for all heads, in few bits, in host memory, and behind so many exact layers in the
    same storage."""
    full: Policy = Exact(policy.compact_every)
    if head_floor is not None:
        policy = AdaKV(cast(Selection, policy), head_floor)
    if storage is not None:
        policy, full = (Quantized(one, storage, value_storage, whole_window) for one in (policy, full))
    elif value_storage is not None or whole_window:
        given = "whole_window" if value_storage is None else f"value_storage={value_storage}"
        raise ValueError(f"{given} needs a storage")
    if host_steps is not None:
        policy = HostMemory(policy, host_steps)
    return FirstLayers(full_layers, policy, full) if full_layers else policy


def parse_value(kind: Any, text: str) -> Any:
    """The value of a setting of this type.

    Raises:
        ValueError: for what it cannot be.
    """
    kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    for option in kinds:
        try:
            return _value(option, text)
        except (ValueError, KeyError):
            if hasattr(option, "load"):
                raise
    raise ValueError(f"it must be {spelled(kind)}")


def settings_of(policy_class: type[Policy]) -> list[tuple[str, str, str | None]]:
    """Every setting of a policy: its name, what it may be, and its default as text, None without one."""
    fields = dataclasses.fields(policy_class)  # type: ignore[arg-type]
    kinds = _kinds(policy_class)
    return [
        (field.name, spelled(kinds[field.name]), None if field.default is dataclasses.MISSING else str(field.default))
        for field in fields
    ]


def _value(kind: Any, text: str) -> Any:
    """Raises a ValueError or KeyError where text says no value of this one type."""
    if kind is type(None):
        return {"None": None, "none": None}[text]
    if typing.get_origin(kind) is Literal:
        return {str(choice): choice for choice in typing.get_args(kind)}[text]
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)
        parts = text.strip("()").split(",")
        if inner[1:] == (Ellipsis,):
            inner = inner[:1] * len(parts)
        return tuple(_value(own, part.strip()) for own, part in zip(inner, parts, strict=True))
    if kind is bool:
        return {"True": True, "true": True, "False": False, "false": False}[text]
    if hasattr(kind, "load"):
        return None if text == "None" else kind.load(text)
    return kind(text)


def _kinds(policy_class: type[Policy]) -> dict[str, Any]:
    """The type of every setting."""
    hints = typing.get_type_hints(policy_class)
    return {field.name: hints[field.name] for field in dataclasses.fields(policy_class)}  # type: ignore[arg-type]
