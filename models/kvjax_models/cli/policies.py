"""`kvjax policies`: lists the policies and their settings."""

import dataclasses
import inspect
import re
from collections.abc import Mapping

import simple_parsing

from kvjax.messages import unknown_policy
from kvjax.policy_docs import THEORY, docstrings
from kvjax_models.cli.output import write_output

_AUTO_SUMMARY = "The recommended policy: all tokens in the heads that retrieve, KVzap in the others, quantized."


@dataclasses.dataclass(frozen=True)
class Policies:
    """Lists all policies, or the settings of one."""

    # A policy, to show its settings.
    name: str | None = simple_parsing.field(default=None, positional=True, metavar="NAME")

    def run(self) -> None:
        """Runs the command.

        Raises:
            ValueError: if the policy is unknown.
        """
        policies = docstrings()
        if self.name is None:
            write_output(list_policies(policies))
        elif self.name == "auto":
            write_output(describe_auto())
        elif self.name in policies:
            write_output(describe_policy(self.name))
        else:
            raise ValueError(unknown_policy(self.name, ["auto", *policies]))


def list_policies(policies: Mapping[str, str]) -> str:
    """Returns every policy with its summary.

    Args:
        policies: docstrings by name.
    """
    width = max(map(len, policies))
    lines = [f"{'auto':{width}}  {_AUTO_SUMMARY}"]
    lines += [f"{name:{width}}  {_summary(text)}" for name, text in policies.items() if name not in THEORY]
    lines += ["", "Algorithms of theorems, which pretrained models do not answer with:"]
    lines += [f"{name:{width}}  {_summary(policies[name])}" for name in THEORY]
    more = (
        "kvjax policies NAME shows settings. All policies take full_layers=N and --kv_dtype; those with a budget take\n"
        "heads=auto, which keeps all tokens in the heads that retrieve."
    )
    return "\n".join([*lines, "", more, ""])


def describe_auto() -> str:
    """Describes `auto` for the command line, from the documentation of `auto_policy`."""
    from kvjax_models.runner import auto_policy  # imports JAX, as below

    _, rules, steps, *_ = inspect.cleandoc(auto_policy.__doc__ or "").split("\n\n")
    equivalent = f"It stands for {auto_policy.POLICY}:heads=auto, with settings for the model and the budget:"
    budget = f"Budget: {auto_policy.DEFAULT_BUDGET} by default\n"
    return "\n\n".join(["auto", _AUTO_SUMMARY, equivalent, rules, steps, budget])


def describe_policy(name: str) -> str:
    """Describes a policy for the command line.

    Returns:
        The policy's docstring, and its settings with types and defaults.
    """
    from kvjax.registry import POLICIES, settings_of

    policy = POLICIES[name]
    settings = [
        f"  {key}: {kind}" + ("" if default is None else f" = {default}") for key, kind, default in settings_of(policy)
    ]
    return "\n".join([name, "", inspect.cleandoc(policy.__doc__ or ""), "", "Settings:", *settings, ""])


def _summary(docstring: str) -> str:
    """Returns the first sentence of a policy's documentation, and the second one if the first is short."""
    text = " ".join(docstring.split("\n\n")[0].split())
    first, *more = re.split(r"(?<=[.;:])\s", text)
    return f"{first} {more[0]}".rstrip(";:") if len(first) < 45 and more else first.rstrip(";:")
