"""Policies by name, and from text such as `subgen:delta=2.5,recent=32@25%`."""

import ast
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from kvjax.budget import (
    LARGE_BUDGET,
    MAX_RESERVED_SHARE,
    Budget,
    fit_bytes,
    fit_share,
    min_budget,
    reserved_bytes,
    staging_tokens,
)
from kvjax.combinators.ada_kv import AdaKV
from kvjax.combinators.by_layer import FirstLayers
from kvjax.combinators.head_budgets import HeadBudgets, Shares, load_shares
from kvjax.combinators.host_memory import HostMemory
from kvjax.messages import describe_os_error, did_you_mean, shorten, unknown_policy
from kvjax.methods import table
from kvjax.methods.exact.exact import Exact
from kvjax.methods.top_k.top_k_policy import TopKPolicy
from kvjax.policy import Policy, check_policy_class, setting_types, type_name
from kvjax.policy_docs import THEORY as THEORY
from kvjax.policy_docs import in_order
from kvjax.spec import TILE, CacheSpec

PolicyClass = TypeVar("PolicyClass", bound=type[Policy])

_TABLE: dict[str, type[Policy]] = {
    policy_class.__module__.rpartition(".")[2]: policy_class
    for policy_class in vars(table).values()
    if isinstance(policy_class, type)
}
POLICIES = {name: _TABLE[name] for name in in_order(set(_TABLE))}

# Settings of any policy in text, which put a combinator around it.
_COMBINATOR_SETTINGS = ("full_layers", "host_steps", "alpha_safeguard", "heads")


def register(name: str, policy_class: PolicyClass) -> PolicyClass:
    """Adds a policy under a name, for policy strings and the command line.

    Args:
        name: lower-case letters, digits and underscores.
        policy_class: a frozen dataclass that derives from `kvjax.policy.Policy`.

    Returns:
        The class.

    Raises:
        ValueError: if the name is malformed or taken by another class.
        TypeError: if the class is not a frozen dataclass that derives from `Policy`.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"name={name!r} must consist of lower-case letters, digits and underscores")
    check_policy_class(policy_class)
    if POLICIES.setdefault(name, policy_class) is not policy_class:
        raise ValueError(f"name={name!r} is already registered for {POLICIES[name].__name__}; choose another name")
    return policy_class


@dataclasses.dataclass(frozen=True)
class PolicyChoice:
    """A registered policy by name, with settings and possibly a budget.

    Every policy takes its own settings and `full_layers=n` (`FirstLayers` with a full cache). Retrieval policies take
    `host_steps=R` (`HostMemory`), top-k policies `alpha_safeguard=x` (`AdaKV`), policies with a budget `heads=FILE`
    (`HeadBudgets` with the shares of a file) or, as a value, shares.

    Attributes:
        name: the registered name.
        settings: pairs of a setting and its value.
        budget: the budget, if it is part of the text.
    """

    name: str
    settings: tuple[tuple[str, Any], ...] = ()
    budget: Budget | None = None

    @classmethod
    def parse(cls, text: str) -> "PolicyChoice":
        """Parses `NAME`, `NAME:setting=value,...` and either with `@BUDGET`.

        Returns:
            The choice.

        Raises:
            ValueError: if the policy, a setting, a value or the budget is invalid.
        """
        return cls.create(*split_policy(text))

    @classmethod
    def create(cls, name: str, settings: Mapping[str, Any], budget: Budget | None) -> "PolicyChoice":
        """Returns a choice whose settings are checked; see `parse`."""
        if name not in POLICIES:
            raise ValueError(unknown_policy(name, POLICIES))
        choice = cls(name, tuple(settings.items()), budget)
        if budget and not choice.takes_budget:
            raise ValueError(f"policy {shorten(str(choice))}: {name} keeps everything and takes no budget")
        choice.make(LARGE_BUDGET)
        return choice

    @property
    def policy_class(self) -> type[Policy]:
        """The class of the policy, without combinators."""
        return POLICIES[self.name]

    def with_settings(self, **settings: Any) -> "PolicyChoice":
        """Returns the choice with further settings; its present ones stay."""
        return dataclasses.replace(self, settings=tuple((settings | dict(self.settings)).items()))

    def without_files(self) -> "PolicyChoice":
        """Returns the choice with the shares of a file in place of its name (`heads=FILE`)."""
        heads = dict(self.settings).get("heads")
        if not isinstance(heads, str):
            return self
        return dataclasses.replace(self, settings=tuple((dict(self.settings) | {"heads": load_shares(heads)}).items()))

    @property
    def takes_budget(self) -> bool:
        """Whether the policy has a budget (all but exact have one)."""
        return "budget" in setting_types(self.policy_class)

    @property
    def variant(self) -> str | None:
        """The settings as text, None for defaults; with the name they identify a row of results."""
        return ",".join(f"{key}={_format_value(value)}" for key, value in self.settings) or None

    def __str__(self) -> str:
        text = f"{self.name}:{self.variant}" if self.settings else self.name
        return f"{text}@{self.budget}" if self.budget else text

    def make(self, budget: int | None = None) -> Policy:
        """Returns the policy.

        Args:
            budget: slots; None for the choice's own budget in slots.

        Returns:
            The policy.

        Raises:
            ValueError: if a setting is invalid; names it.
        """
        types = setting_types(self.policy_class)
        own: dict[str, Any] = {}
        combinators: dict[str, Any] = {}
        for key, value in self.settings:
            if key == "budget" or (key not in types and key not in _COMBINATOR_SETTINGS):
                known = sorted({*types, *_COMBINATOR_SETTINGS} - {"budget"})
                raise ValueError(
                    f"policy {self.name}: unknown setting {shorten(key)}; {did_you_mean(key, known)}{self.name} has "
                    f"{', '.join(known)}"
                )
            (own if key in types else combinators)[key] = value
        if self.takes_budget:
            own["budget"] = self.budget.slots if budget is None and self.budget is not None else budget
        try:
            return _combine(self.policy_class(**own), **combinators)
        except (TypeError, ValueError, OSError) as error:
            reason = describe_os_error(error) if isinstance(error, OSError) else error
            raise ValueError(f"policy {shorten(str(self))[1:-1]}: {reason}") from error

    def fit(self, spec: CacheSpec, tokens: int) -> Policy:
        """Returns the policy for a cache.

        Args:
            tokens: tokens of the full cache that a fractional budget refers to.

        Returns:
            The policy.
        """
        return fit_policy(self, self.budget, spec, tokens)


def split_policy(text: str) -> tuple[str, dict[str, Any], Budget | None]:
    """Splits the text of a policy, see `PolicyChoice.parse`.

    Returns:
        The name, the settings and the budget, of which only the form is checked.

    Raises:
        ValueError: if a setting or the budget is malformed.
    """
    description, _, budget = text.partition("@")
    name, _, settings_text = description.partition(":")
    settings = {}
    for part in filter(None, _split_settings(settings_text)):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"policy {shorten(text)}: {shorten(part)} must have the form setting=value")
        settings[key] = parse_value(value)
    return name, settings, Budget.parse(budget) if budget else None


def _split_settings(text: str) -> list[str]:
    """Splits text at the commas that are not in parentheses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def parse_value(text: str) -> Any:
    """Returns the value of a setting: a Python literal (`8`, `0.5`, `None`, `(1,2)`), or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "none": None}.get(text, text)


def _format_value(value: Any) -> str:
    """Returns the text of a value, of which `parse_value` returns the value."""
    if isinstance(value, tuple):
        return f"({','.join(map(_format_value, value))}{',' if len(value) == 1 else ''})"
    return str(value).lower() if isinstance(value, bool) else str(value)


PolicyValue = PolicyChoice | Policy | Callable[..., Policy]
AnyPolicy = str | PolicyValue


def resolve_policy(policy: AnyPolicy, budget: int | str | Budget | None, spec: CacheSpec, tokens: int) -> Policy:
    """Returns the policy that fills a budget.

    Args:
        policy: text (`PolicyChoice.parse`), a class such as `kvjax.SubGen`, a function that makes a policy from a
            number of slots, or a policy.
        budget: slots per KV head (1024), a fraction of the bytes of a full cache ("25%"; a retrieval policy's step
            reads at most as many) or bytes of a sequence over all layers ("64MiB"); None if the policy has one.
        tokens: tokens of the full cache that a fraction refers to.

    Returns:
        The policy.

    Raises:
        ValueError: if `policy` or `budget` is invalid, missing, or given twice.
    """
    return fit_policy(*policy_values(policy, budget), spec, tokens)


def policy_values(policy: AnyPolicy, budget: int | str | Budget | None) -> tuple[PolicyValue, Budget | None]:
    """Turns a policy and its budget into values, and checks them before the sizes of a cache are known.

    Returns:
        The policy without a budget in text, and the budget; None for a policy that needs none.

    Raises:
        ValueError: if `policy` or `budget` is invalid, missing, or given twice.
        TypeError: if `policy` is none.
    """
    if isinstance(policy, str):
        policy = PolicyChoice.parse(policy)
    own: Budget | None = None
    refusal = "keeps everything and takes no budget; remove"
    if isinstance(policy, PolicyChoice):
        name, own, takes_budget = f"policy {policy}", policy.budget, policy.takes_budget
        policy = dataclasses.replace(policy, budget=None)
        if own is not None:
            refusal = "has a budget; remove it or"
    elif isinstance(policy, Policy):
        name, takes_budget = str(policy), False
        if not isinstance(policy, Exact):
            refusal = "has a budget; pass its class or its name with"
    elif isinstance(policy, type) and issubclass(policy, Policy) and "budget" not in setting_types(policy):
        name, takes_budget, refusal = policy.__name__, False, "takes no budget; remove"
    elif callable(policy):
        name, takes_budget = str(getattr(policy, "__name__", policy)), True
    else:
        raise TypeError(f"policy={shorten(policy)} must be a name, a class of policies or a policy")
    if budget is not None and (own is not None or not takes_budget):
        raise ValueError(f"{name} {refusal} budget={budget}")
    if not takes_budget:
        return policy, None
    budget = own if budget is None else budget
    if budget is None:
        raise ValueError(f'{name} needs a budget: a share ("25%"), bytes ("64MiB") or slots (1024)')
    return policy, Budget.of(budget)


def fit_policy(
    policy: PolicyValue, budget: Budget | None, spec: CacheSpec, tokens: int, *, allow_smallest: bool = False
) -> Policy:
    """Returns the policy that fills a budget, of values that `policy_values` returned.

    If slots for new tokens (`reserve_decode_slots`, SnapKV's default) would take more than half of a budget in bytes or
    percent, new tokens take the slots of the lowest-ranked ones instead, unless the policy's name sets that.

    Args:
        budget: the budget; None for a policy that needs none.
        tokens: tokens of the full cache that a fraction refers to.
        allow_smallest: whether a fraction into which no cache fits gives the smallest one (`fit_share`).

    Returns:
        The policy.

    Raises:
        ValueError: if the policy does not fit into the budget.
    """
    if isinstance(policy, Policy):
        return policy
    if budget is None or budget.slots is not None:
        make = policy.make if isinstance(policy, PolicyChoice) else policy
        return make() if budget is None else make(budget.slots)
    settings: dict[str, Any] = {"compact_every": staging_tokens(budget.share(spec, tokens) * tokens)}
    try:
        limit = budget.limit(spec, tokens)
        make = _maker(policy, settings)
        if reserved_bytes(make(min_budget(make, spec)), spec) > MAX_RESERVED_SHARE * limit:
            make = _maker(policy, settings | {"reserve_decode_slots": False})
        if allow_smallest and budget.fraction is not None:
            return fit_share(make, spec, limit, full=Exact(TILE))
        return fit_bytes(make, spec, limit)
    except ValueError as error:
        raise ValueError(f"budget={budget} of {tokens} tokens: {error}") from error


def _maker(policy: PolicyChoice | Callable[[int], Policy], settings: Mapping[str, Any]) -> Callable[[int], Policy]:
    """Returns a function that makes a policy with a budget; top-k policies get settings that a name does not have."""
    policy_class = policy.policy_class if isinstance(policy, PolicyChoice) else policy
    if not (isinstance(policy_class, type) and issubclass(policy_class, TopKPolicy)):
        settings = {}
    if isinstance(policy, PolicyChoice):
        return policy.with_settings(**settings).make
    return functools.partial(policy, **settings) if settings else policy


def _combine(
    policy: Policy,
    full_layers: int = 0,
    host_steps: int | None = None,
    alpha_safeguard: float | None = None,
    heads: str | Shares | None = None,
) -> Policy:
    """Puts combinators around a policy."""
    full = Exact(policy.compact_every)
    if alpha_safeguard is not None:
        policy = AdaKV(cast(TopKPolicy, policy), alpha_safeguard)
    if host_steps is not None:
        policy = HostMemory(policy, host_steps)
    if heads is not None:
        policy = HeadBudgets(policy, load_shares(heads) if isinstance(heads, str) else heads)
    return FirstLayers(full_layers, policy, full) if full_layers else policy


def settings_of(policy_class: type[Policy]) -> list[tuple[str, str, str | None]]:
    """Lists the settings of a policy class.

    Returns:
        Name, allowed values and default (None without one) of every setting, as text.
    """
    types = setting_types(policy_class)
    fields = dataclasses.fields(policy_class)  # type: ignore[arg-type]
    return [
        (field.name, type_name(types[field.name]), None if field.default is dataclasses.MISSING else str(field.default))
        for field in fields
    ]
