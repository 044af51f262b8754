"""What options name: a model, policies with their settings, budgets."""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

import kvjax
from experiments.common.options import Run
from kvjax.budget import Budget, abstract_cache
from kvjax.policy import Policy
from kvjax.registry import PolicyChoice
from kvjax_models import atomic_io, devices, fingerprint, formats, known_models, language_model
from kvjax_models.formats import tokenizer
from kvjax_models.model.llama import Llama

CHECKPOINTS = pathlib.Path(__file__).parents[2] / "models" / "checkpoints"

# Slots that leave room for every setting.
_NOMINAL_BUDGET = 2**20


def settings(policies: Sequence[str], budgets: Sequence[str]) -> list[PolicyChoice]:
    """Every policy with every budget; a policy that takes none, or names its own, comes once.

    Raises:
        ValueError: for an unknown policy, a wrong setting or what is no budget.
    """
    chosen = []
    for choice in map(PolicyChoice.parse, policies):
        resolve_policy = choice.takes_budget and choice.budget is None
        sizes = [Budget.parse(text) for text in budgets] if resolve_policy else [choice.budget]
        chosen += [dataclasses.replace(choice, budget=budget) for budget in sizes]
    return chosen


def label(setting: PolicyChoice) -> str:
    """A setting as tables write it, and as `results.by_setting` finds it in rows."""
    return f"{plain(setting)} @ {setting.budget}" if setting.budget else str(setting)


def plain(setting: PolicyChoice) -> PolicyChoice:
    """The setting without its budget."""
    return dataclasses.replace(setting, budget=None)


def description(setting: PolicyChoice) -> dict[str, Any]:
    """What decides the policy, as units of a run name it: with every default's value, so that a default that changes
    makes another unit. Budgets that are shares or bytes become slots only where sizes are known; they stand beside."""
    slots = setting.budget.slots if setting.budget else None
    try:
        policy = setting.make(_NOMINAL_BUDGET if slots is None else slots)
    except ValueError:  # so few are refused, which is found where it is made
        policy = setting.make(_NOMINAL_BUDGET)
    return {"policy": kvjax.describe(policy), "budget": str(setting.budget) if setting.budget else None}


def tell_left_out(setting: PolicyChoice, reason: object) -> None:
    """Says that a sweep goes on without a setting."""
    tqdm.write(f"{label(setting)} is left out: {reason}")


@functools.cache
def fitted(setting: PolicyChoice, spec: kvjax.CacheSpec, tokens: int) -> Policy:
    """The setting's policy for a cache of this spec, whose window does not count; shares are of what exact holds for so
    many tokens.

    Remembered, because it is found by tracing caches of many sizes: seconds for some policies and many layers, and the
    tasks of a sweep ask for the same one after the other.
    """
    return setting.fit(dataclasses.replace(spec, window=None), tokens)


def possible(
    chosen: Sequence[PolicyChoice], spec: kvjax.CacheSpec, tokens: int, *, streaming: bool = False
) -> tuple[dict[PolicyChoice, Policy], dict[PolicyChoice, str]]:
    """The policies of the settings that a cache of this spec can have (and stream prompts through), and why the others
    cannot be: a sweep goes down to budgets that not every policy can keep."""
    policies, refused = {}, {}
    for setting in chosen:
        try:
            policy = fitted(setting, spec, tokens)
            for layer in range(spec.layers):
                abstract_cache(policy, dataclasses.replace(spec, layer=layer, window=None))
            if streaming and policy.requires.entire_prompt:
                raise ValueError("compresses whole prompts only")
        except ValueError as error:
            refused[setting] = str(error)
        else:
            policies[setting] = policy
    return policies, refused


def model_directory(name: str) -> pathlib.Path:
    """The directory of a shipped checkpoint by name, a directory itself, or the GGUF file of a path or a known model.

    Raises:
        ValueError: when it is neither, with the names that are shipped.
    """
    for directory in (CHECKPOINTS / name, pathlib.Path(name)):
        if (directory / "config.json").is_file():
            return directory
    if name in known_models.KNOWN_MODELS or formats.is_gguf(name):
        return language_model.resolve_path(name)
    shipped = sorted(path.parent.name for path in CHECKPOINTS.glob("*/config.json"))
    raise ValueError(f"--model={name} is neither a directory with a config.json nor a shipped checkpoint: {shipped}")


def model_identity(name: str) -> str:
    """What units of a run know a model by: its content, wherever it lies."""
    path = model_directory(name)
    return f"sha256:{atomic_io.sha256_of_file(path) if path.is_file() else fingerprint.directory_fingerprint(path)}"


def load_model(options: Run) -> tuple[Llama, tokenizer.Tokenizer]:
    """Model and tokenizer of a directory or a shipped checkpoint; the model on the devices that options call for."""
    directory = model_directory(options.model)
    devices.initialize_processes(options, vars(options) | {"process": None, "output_dir": None})
    mesh = devices.make_mesh(options, formats.load_config(directory).kv_heads)
    return formats.load(directory, mesh=mesh)
