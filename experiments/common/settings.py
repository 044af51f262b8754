"""The flags that experiments share, and what they name: a model, policies with their options, budgets."""

import ast
import dataclasses
import functools
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from absl import flags

import kvjax
from experiments.common import pod
from models import checkpoint, tokenizer
from models.llama import Llama

CHECKPOINTS = pathlib.Path(__file__).parents[2] / "models" / "checkpoints"
# Of shipped checkpoints, the one that finds lines in longer texts, and the one that knows other tasks, too.
LINES_CHECKPOINT, LANGUAGE_CHECKPOINT = "line-retrieval-2l-4k", "kvjax-lm-2k"

# Slots that leave room for every option: with them only the options can be wrong.
_AMPLE_BUDGET = 2**20
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def define_run(*, model: str = LINES_CHECKPOINT) -> None:
    """Defines the flags of every experiment. Call once, at import of the experiment's module."""
    flags.DEFINE_string("model", model, "A Hugging Face directory, or the name of a shipped checkpoint.")
    flags.DEFINE_string("output_dir", "build", "Where results go.")
    flags.DEFINE_integer("seed", 0, "Decides documents, sampling and the policies' randomness.")
    flags.DEFINE_bool("quick", False, "A small run, to see that everything works.")
    pod.define()


def define_common(*, policies: Sequence[str], budgets: Sequence[str], model: str = LINES_CHECKPOINT) -> None:
    """Defines the flags of experiments on policies, with an experiment's own defaults; calls `define_run`."""
    define_run(model=model)
    flags.DEFINE_multi_string("policy", list(policies), "NAME or NAME:option=value,... ; repeatable.")
    flags.DEFINE_multi_string(
        "budget", list(budgets), "Slots per head (1024), a share of exact's bytes (25%) or bytes (64MiB); repeatable."
    )


def value(name: str, *, quick: Any) -> Any:
    """A flag's value; in a quick run, where it was not given, `quick`."""
    flag = flags.FLAGS[name]
    return quick if flags.FLAGS.quick and flag.using_default_value else flag.value


@dataclasses.dataclass(frozen=True)
class PolicyChoice:
    """A policy by its registered name and the options given with it, such as `clustergen:variant=paper,sinks=4`.

    Beside its own options every policy takes `storage=int8` or `fp8` (`kvjax.quantized`) and `full_layers=n`: the first
    n layers keep everything, in the same storage. Those that recall take `host_steps=R` (`kvjax.host_memory`).
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "PolicyChoice":
        """Raises a ValueError for an unknown policy or a malformed option."""
        name, _, rest = text.partition(":")
        kvjax.factory(name)
        options = []
        for option in filter(None, rest.split(",")):
            key, equals, value = option.partition("=")
            if not equals:
                raise ValueError(f"--policy={text}: option {option!r} must read name=value")
            options.append((key, _literal(value)))
        return cls(name, tuple(options))

    def __str__(self) -> str:
        return self.name + (":" if self.options else "") + ",".join(f"{key}={value}" for key, value in self.options)

    @property
    def variant(self) -> str | None:
        """The options as given, None without any; with the name they identify a row of results."""
        return ",".join(f"{key}={value}" for key, value in self.options) or None

    def build(self, **budget: int) -> kvjax.CachePolicy:
        """The policy; a wrong option is a ValueError that names it."""
        options = dict(self.options)
        storage, host_steps = options.pop("storage", None), options.pop("host_steps", None)
        full_layers = options.pop("full_layers", 0)
        try:
            policy = kvjax.factory(self.name)(**budget, **options)
        except TypeError as error:
            raise ValueError(f"policy {self}: {error}") from error
        full = kvjax.exact(period=policy.period)
        if storage is not None:
            policy, full = kvjax.quantized(policy, storage), kvjax.quantized(full, storage)
        if host_steps is not None:
            policy = kvjax.host_memory(policy, host_steps)
        return kvjax.first_layers(full_layers, full, policy)


@dataclasses.dataclass(frozen=True)
class Budget:
    """How large a cache may be: slots per head, a fraction of exact's bytes, or bytes of a sequence over all layers."""

    text: str
    slots: int | None = None
    fraction: float | None = None
    bytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Raises a ValueError for what is no budget."""
        if match := re.fullmatch(r"(\d+)", text):
            return cls(text, slots=int(match[1]))
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)%", text):
            return cls(text, fraction=float(match[1]) / 100)
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)(B|KiB|MiB|GiB)", text):
            return cls(text, bytes=int(float(match[1]) * _UNITS[match[2]]))
        raise ValueError(f"--budget={text}: give slots (1024), a share of exact's bytes (25%) or bytes (64MiB)")

    def limit(self, spec: kvjax.CacheSpec, tokens: int) -> int:
        """Bytes per row and layer, where exact holds so many tokens."""
        if self.fraction is not None:
            return int(self.fraction * spec.exact_bytes(tokens))
        if self.bytes is not None:
            return self.bytes // spec.layers
        raise ValueError(f"--budget={self.text} gives slots, not bytes")

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Setting:
    """One line of a sweep: a policy and its budget (None for exact, which needs none)."""

    choice: PolicyChoice
    budget: Budget | None

    def __str__(self) -> str:
        return str(self.choice) + (f" @ {self.budget}" if self.budget else "")

    @functools.cache  # noqa: B019 (settings are few; compiled functions are kept by the policy's identity)
    def build(self, spec: kvjax.CacheSpec, tokens: int) -> kvjax.CachePolicy:
        """The policy for a cache of this spec, the same object for the same spec; shares are of what exact holds for so
        many tokens."""
        budget = self.budget
        if budget is None:
            return self.choice.build()
        if budget.slots is not None:
            return self.choice.build(budget=budget.slots)
        limit = budget.limit(spec, tokens)
        return kvjax.fit_bytes(lambda slots: self.choice.build(budget=slots), spec, limit)


def settings(policies: Sequence[str], budgets: Sequence[str]) -> list[Setting]:
    """Every policy with every budget; a policy that takes none comes once.

    Raises:
        ValueError: for an unknown policy, a wrong option or what is no budget.
    """
    found = []
    for choice in map(PolicyChoice.parse, policies):
        choice.build(**({"budget": _AMPLE_BUDGET} if kvjax.takes_budget(choice.name) else {}))
        sized = [Budget.parse(text) for text in budgets] if kvjax.takes_budget(choice.name) else [None]
        found += [Setting(choice, budget) for budget in sized]
    return found


def possible(
    chosen: Sequence[Setting], spec: kvjax.CacheSpec, tokens: int, *, streaming: bool = False
) -> tuple[list[Setting], dict[Setting, str]]:
    """Which settings a cache of this spec can have (and stream prompts through), and why the others cannot be: a sweep
    goes down to budgets that not every policy can keep.

    Raises:
        ValueError: where none can be, with the first one's reason.
    """
    reasons = {setting: _refusal(setting, spec, tokens, streaming) for setting in chosen}
    refused = {setting: reason for setting, reason in reasons.items() if reason is not None}
    return [setting for setting in chosen if setting not in refused], refused


@functools.cache
def _refusal(setting: Setting, spec: kvjax.CacheSpec, tokens: int, streaming: bool) -> str | None:
    """Why a setting cannot be, None if it can."""
    try:
        policy = setting.build(spec, tokens)
        for layer in range(spec.layers):
            kvjax.abstract_state(policy, dataclasses.replace(spec, layer=layer))
    except ValueError as error:
        return str(error)
    return "compresses whole prompts only" if streaming and not policy.streams else None


def model_directory(name: str) -> pathlib.Path:
    """The directory of a shipped checkpoint by name, or the directory itself.

    Raises:
        ValueError: when it is neither, with the names that are shipped.
    """
    for directory in (CHECKPOINTS / name, pathlib.Path(name)):
        if (directory / "config.json").is_file():
            return directory
    shipped = sorted(path.parent.name for path in CHECKPOINTS.glob("*/config.json"))
    raise ValueError(f"--model={name} is neither a directory with a config.json nor a shipped checkpoint: {shipped}")


def load_model(name: str) -> tuple[Llama, tokenizer.Tokenizer]:
    """Model and tokenizer of a directory or a shipped checkpoint; the model on the devices that flags call for."""
    directory = model_directory(name)
    if not flags.FLAGS.is_parsed():
        return checkpoint.load(directory), tokenizer.load(directory)
    pod.join()
    mesh = pod.mesh(checkpoint.load_config(directory).kv_heads)
    return checkpoint.load(directory, mesh=mesh), tokenizer.load(directory)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False}.get(text, text)
