"""Options that commands share."""

import dataclasses
import functools
import importlib.util
import pathlib
import sys
from typing import Literal

import jax.numpy as jnp
import simple_parsing

import kvjax
from kvjax.budget import Budget, format_bytes
from kvjax.quantization import KVFormats, parse_kv_dtype
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
    kv_dtype: str | None = None  # Quantization of the cache: int8, fp8, int4, int3, int2, or KEYS,VALUES.
    policy_module: str | None = None  # A Python file to run first; its policies are added with kvjax.register.

    @property
    def kv_formats(self) -> KVFormats | None:
        """Formats of keys and values."""
        return parse_kv_formats(self.kv_dtype)

    def parse_policy(self, policy: str, budget: str) -> PolicyChoice:
        """Parses a policy with a budget, after running the policy module.

        Args:
            policy: the policy.
            budget: the budget if the policy's text has none.

        Returns:
            The choice.
        """
        if self.policy_module is not None:
            run_policy_module(self.policy_module)
        return parse_policy(policy, budget)

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
        """The policy with its budget."""
        return self.parse_policy(self.policy, self.budget)


def parse_kv_formats(text: str | None) -> KVFormats | None:
    """Parses `--kv_dtype`: one format for keys and values, or two separated by a comma."""
    if text is None:
        return None
    formats = tuple(text.split(","))
    return parse_kv_dtype(formats[0] if len(formats) == 1 else formats)  # type: ignore[arg-type]


@functools.cache
def run_policy_module(path: str) -> None:
    """Runs a Python file that registers policies, once per process.

    Args:
        path: the file.

    Raises:
        FileNotFoundError: if there is no such file.
    """
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(f"policy_module={path!r} is not a file; pass a Python file that calls kvjax.register")
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    assert spec is not None and spec.loader is not None  # of an existing file
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)


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
