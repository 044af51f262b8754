"""Options that commands share."""

import dataclasses
import functools
import importlib.util
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import simple_parsing

from kvjax.budget import Budget, format_bytes
from kvjax.quantization import KVDtype, KVFormats, parse_kv_dtype
from kvjax_models import formats, language_model
from kvjax_models.cache import CachedModel
from kvjax_models.cli.output import write_status
from kvjax_models.devices import Devices, initialize_processes, make_mesh
from kvjax_models.formats import chat_template
from kvjax_models.model.quantized import WeightDtype
from kvjax_models.prefix import Prefix
from kvjax_models.runner.auto_policy import DEFAULT_BUDGET, NamedPolicy
from kvjax_models.runner.sampling import Sampling, SamplingOptions
from kvjax_models.runner.state import check_seed


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """The model and the devices it runs on."""

    model: str = ""  # A Hugging Face directory, a GGUF file, or a name of `kvjax models` or on the Hugging Face hub.
    # By default float32 on CPUs (`serve`: bfloat16, if they multiply it), else the checkpoint's.
    dtype: str | None = simple_parsing.field(default=None, choices=["float32", "bfloat16", "float16"])
    # Stores weights with one scale per output channel.
    weight_dtype: WeightDtype | None = simple_parsing.field(default=None, choices=["int8"], type=str)
    seed: int = 0  # Seed of sampling and of the policies' randomness.
    devices: Devices = dataclasses.field(default_factory=Devices)
    # Of the cache: bfloat16, int8, fp8, int4, int3, int2, or KEYS,VALUES; for auto and heads=auto by budget.
    kv_dtype: str | None = None
    parse_special: bool = False  # Special tokens that texts spell out, such as <|im_end|>, become tokens.
    policy_module: str | None = None  # A Python file to run first; its policies are added with kvjax.register.

    @property
    def kv_formats(self) -> KVDtype | KVFormats | None:
        """The formats of keys and values."""
        return parse_kv_formats(self.kv_dtype)

    def parse_policy(self, policy: str, budget: str | None) -> NamedPolicy:
        """Parses a policy with a budget, after running the policy module.

        Args:
            policy: policy as a user writes it.
            budget: budget as a user writes it; None for the default.

        Returns:
            The policy with its budget.

        Raises:
            ValueError: if the policy or the budget is invalid, or the policy takes no further budget.
        """
        if self.policy_module is not None:
            run_policy_module(self.policy_module)
        choice, size = NamedPolicy.parse(policy), Budget.parse(budget or DEFAULT_BUDGET)
        if budget is not None and not choice.takes_budget:
            raise ValueError(
                f"--budget={budget} has no effect on --policy={policy}, which keeps everything; pass another --policy "
                "(`kvjax policies` lists them) or remove the budget"
            )
        if budget is not None and choice.budget is not None:
            raise ValueError(f"--policy={policy} has a budget; remove it or --budget={budget}")
        has_size = choice.budget is not None or not choice.takes_budget
        return choice if has_size else dataclasses.replace(choice, budget=size)

    def load(self, default_dtype: Callable[[], str | None] = lambda: None) -> language_model.LanguageModel:
        """Loads the model onto the requested devices.

        Args:
            default_dtype: returns the dtype if no option names one; called after all processes are connected. None for
                the default of `language_model.load`.

        Returns:
            The model and its tokenizer.

        Raises:
            ValueError: if no model is given.
        """
        if not self.model:
            raise ValueError(
                "--model is required: a Hugging Face directory, a GGUF file, or a name of `kvjax models` or on the hub"
            )
        options = dataclasses.asdict(self)
        initialize_processes(self.devices, options | options.pop("devices") | {"process": None})
        path = language_model.resolve_path(self.model)
        mesh = None
        if not self.devices.is_single:
            mesh = make_mesh(self.devices, formats.load_config(path).kv_heads)
        name = self.dtype or default_dtype()
        dtype = None if name is None else jnp.dtype(name)
        options = {"weight_dtype": self.weight_dtype, "parse_special": self.parse_special}
        return language_model.load(path, dtype, mesh, **options)


@dataclasses.dataclass(frozen=True)
class GenerationOptions(ModelOptions):
    """How text is generated."""

    policy: str = "exact"  # NAME or NAME:setting=value,...; `kvjax policies` lists them.
    # Share of the full cache (25%), bytes (64MiB), or slots per KV head ("256 slots"); 25% by default.
    budget: str | None = None
    max_new_tokens: int = 256  # Maximum number of new tokens.
    temperature: float = 0.0  # 0 selects the most likely token.
    top_k: int | None = None  # Sample among the k most likely tokens.
    top_p: float | None = None  # Sample among the most likely tokens whose probability reaches p.
    min_p: float | None = None  # Sample among tokens with at least p times the probability of the most likely one.
    repetition_penalty: float = 1.0  # Divides the logits of tokens of prompt and answer; 1 for none.
    presence_penalty: float = 0.0  # Subtracted from the logits of tokens of the answer.
    frequency_penalty: float = 0.0  # Subtracted for every occurrence of a token in the answer.
    json_schema: str | None = None  # JSON schema of an answer that is a JSON value.
    allow_beyond_context: bool = False  # Only warn if a sequence exceeds the model's context length.
    template_options: str | None = None  # JSON object of the chat template's variables: {"enable_thinking": false}
    quiet: bool = False  # Print neither progress nor a summary on standard error.

    @property
    def sampling(self) -> Sampling:
        """The sampling parameters."""
        names = {field.name for field in dataclasses.fields(self)} & SamplingOptions.__annotations__.keys()
        return Sampling(**{name: getattr(self, name) for name in names})

    def cache(self, llm: language_model.LanguageModel) -> CachedModel:
        """Returns the model with the options of its KV cache."""
        return llm.cache(self.choice, kv_dtype=self.kv_formats, allow_beyond_context=self.allow_beyond_context)

    @property
    def chat_options(self) -> dict[str, Any]:
        """The variables of the chat template."""
        return {} if self.template_options is None else chat_template.parse_options(self.template_options)

    @functools.cached_property
    def choice(self) -> NamedPolicy:
        """The policy with its budget."""
        return self.parse_policy(self.policy, self.budget)

    def write_summary(self, *parts: str, policy: str | None = None) -> None:
        """Writes a policy (by default the option) and a description of the work to standard error, unless `quiet`."""
        if not self.quiet:
            write_status(f"[{policy or self.choice}: {'; '.join(parts)}]")

    def check(self) -> None:
        """Checks the options before a model is loaded; invalid policies and sampling raise a ValueError, too.

        Raises:
            ValueError: if the number of new tokens is invalid.
        """
        if self.max_new_tokens < 1:
            raise ValueError(f"--max_new_tokens={self.max_new_tokens} must be at least 1")
        check_seed(self.seed)
        _ = self.choice, self.kv_formats, self.sampling, self.chat_options


def parse_kv_formats(text: str | None) -> KVDtype | KVFormats | None:
    """Parses the option `--kv_dtype`.

    Args:
        text: one format for keys and values, or two formats separated by a comma; None for an unquantized cache
            in the dtype of the model.

    Returns:
        "bfloat16", the formats of keys and values, or None.
    """
    if text is None or text == "bfloat16":
        return text  # type: ignore[return-value]
    formats = tuple(text.split(","))
    return parse_kv_dtype(formats[0] if len(formats) == 1 else formats)  # type: ignore[arg-type]


@functools.cache
def run_policy_module(path: str) -> None:
    """Runs a Python file that registers policies, once per process.

    Args:
        path: the file.

    Raises:
        FileNotFoundError: if the file does not exist.
    """
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(f"--policy_module={path!r} is not a file; pass a Python file that calls kvjax.register")
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    assert spec is not None and spec.loader is not None  # of an existing file
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)


def repeatable(metavar: str) -> list[str]:
    """Returns a field of an option that can be repeated."""
    return simple_parsing.field(default_factory=list, action="append", nargs=None, metavar=metavar)


def read_text(path: str) -> str:
    """Returns the content of a UTF-8 file; "-" is standard input.

    Raises:
        ValueError: if it is not UTF-8.
        OSError: if standard input is closed, or the file cannot be read.
    """
    if path == "-" and sys.stdin is None:
        raise OSError("standard input is closed; pass a file")
    try:
        text = sys.stdin.read() if path == "-" else pathlib.Path(path).read_text("utf-8")
        return text.removeprefix("\ufeff")  # a byte order mark, as editors on Windows write it
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def describe_sizes(sizes: Mapping[str, int], share: str) -> str:
    """Describes the bytes of caches.

    Args:
        sizes: bytes, as `Generator.cache_sizes` returns them.
        share: what `Generator.describe_share` returns.

    Returns:
        A part of a summary.
    """
    return (
        f"cache {format_bytes(sizes['cache_bytes'])} on the device, {share}, "
        f"{format_bytes(sizes['host_bytes'])} on the host; {format_bytes(sizes['read_bytes'])} read per token"
    )


def describe_prefix(prefix: Prefix) -> str:
    """Describes the bytes of a compressed text, as a part of a summary."""
    names = ("cache_bytes", "host_bytes", "read_bytes")
    return describe_sizes({name: getattr(prefix, name) for name in names}, prefix.describe_share())
