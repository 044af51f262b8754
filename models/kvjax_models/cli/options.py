"""Options that commands share."""

import dataclasses
import pathlib
import sys
from typing import Literal

import jax.numpy as jnp
import simple_parsing

import kvjax
from kvjax.budget import Budget, format_bytes
from kvjax.registry import PolicyChoice
from kvjax_models import language_model
from kvjax_models.devices import Devices, initialize_processes, is_first_process, make_mesh
from kvjax_models.formats import huggingface
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.sampling import Sampling
from kvjax_models.generation.state import GenerationState


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Which model, and where it lies."""

    model: str = ""  # A Hugging Face directory, or the name of a model on the hub, such as Qwen/Qwen3-0.6B.
    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # Of parameters and arithmetic; the file's own.
    seed: int = 0  # Decides sampling, and the policies' randomness.
    devices: Devices = dataclasses.field(default_factory=Devices)

    def load(self) -> language_model.LanguageModel:
        """The model on the devices that the options call for."""
        if not self.model:
            raise ValueError("give --model: a Hugging Face directory, or the name of a model on the hub")
        own = dataclasses.asdict(self)
        initialize_processes(self.devices, own | own.pop("devices") | {"process": None})
        directory = language_model.resolve_directory(self.model)
        mesh = make_mesh(self.devices, huggingface.load_config(directory).kv_heads)
        dtype = None if self.dtype is None else jnp.dtype(self.dtype)
        return language_model.load(directory, dtype, mesh)


@dataclasses.dataclass(frozen=True)
class GenerationOptions(ModelOptions):
    """How text is written."""

    policy: str = "exact"  # NAME or NAME:setting=value,...; `kvjax policies` lists them.
    budget: str = "25%"  # Slots per head (1024), a share of exact's bytes (25%) or bytes (64MiB).
    max_new_tokens: int = 256  # Most tokens to write.
    temperature: float = 0.0  # 0 takes the most likely token.
    top_k: int | None = None  # Sample among so many of the most likely tokens.
    top_p: float | None = None  # Sample among the most likely tokens that hold this probability.
    allow_beyond_context: bool = False  # Only warn of texts longer than those that the model was trained on.

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p)

    @property
    def choice(self) -> PolicyChoice:
        return parse_policy(self.policy, self.budget)


def parse_policy(policy: str, budget: str) -> PolicyChoice:
    """A policy with this budget, unless it has one of its own or takes none."""
    choice = PolicyChoice.parse(policy)
    wanted = Budget.parse(budget)
    return dataclasses.replace(choice, budget=wanted) if choice.takes_budget and choice.budget is None else choice


def repeatable(metavar: str) -> list[str]:
    """A field that may be given many times."""
    return simple_parsing.field(default_factory=list, action="append", nargs=None, metavar=metavar)


def read_text(path: str) -> str:
    """A file's text; - for standard input.

    Raises:
        ValueError: for a file that is not UTF-8, with its name.
    """
    try:
        return sys.stdin.read() if path == "-" else pathlib.Path(path).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from error


def write_output(text: str) -> None:
    """Writes a part of the text as soon as it is there, in the first process of a run."""
    if is_first_process():
        sys.stdout.write(text)
        sys.stdout.flush()


def write_status(text: str) -> None:
    """Says beside the text what was done."""
    if is_first_process():
        print(text, file=sys.stderr, flush=True)


def describe_cache(generator: Generator, state: GenerationState) -> str:
    """What the caches of a generation hold and read, in words."""
    bytes_held = kvjax.cache_bytes(state.layers)
    read = sum(map(kvjax.read_bytes, state.layers))
    exact = generator.specs[0].full_cache_bytes(int(state.positions.sum())) * len(generator.specs)
    return (
        f"cache {format_bytes(bytes_held.device)} on the device, {bytes_held.device / exact:.1%} of exact's, "
        f"{format_bytes(bytes_held.host)} on the host; {format_bytes(read)} read per token"
    )
