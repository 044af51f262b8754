"""A model with its tokenizer: generates text through any cache policy."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, Unpack, overload

import huggingface_hub
import jax
from absl import logging
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from jax.sharding import Mesh

from kvjax.budget import Budget
from kvjax.messages import shorten
from kvjax_models import compile_cache, formats, known_models
from kvjax_models.cache import CachedModel, GenerateOptions, open_document
from kvjax_models.cache_plans import KVDtypes
from kvjax_models.document import Document
from kvjax_models.engine import Completion, Usage
from kvjax_models.engine.answers import Answers
from kvjax_models.formats.checkpoint import LoadOptions
from kvjax_models.keywords import suggest_keywords
from kvjax_models.model.quantized import WeightDtype
from kvjax_models.prompts import Message as Message
from kvjax_models.prompts import Prompt as Prompt
from kvjax_models.prompts import TemplateOptions as TemplateOptions
from kvjax_models.runner.auto_policy import AnyPolicy, Heads, cache_options
from kvjax_models.tokenized_model import TokenizedModel

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]  # downloaded from the hub, without subdirectories


Size: TypeAlias = int | str | Budget | None


class OneCallOptions(GenerateOptions, total=False):
    """The options of `LanguageModel.generate` that do not change the type of the result."""

    kv_dtype: KVDtypes
    heads: Heads
    allow_beyond_context: bool


@dataclasses.dataclass(frozen=True, repr=False)
class LanguageModel(TokenizedModel):
    """A decoder and its tokenizer, which generate text with any cache policy. `load` makes one from a checkpoint.

    Attributes:
        model: the decoder.
        tokenizer: its tokenizer; its end-of-text and BOS tokens must be in the model's vocabulary.
    """

    @suggest_keywords()
    def cache(
        self,
        policy: AnyPolicy = "exact",
        budget: int | str | Budget | None = None,
        *,
        kv_dtype: KVDtypes = None,
        heads: Heads = None,
        allow_beyond_context: bool = False,
    ) -> CachedModel:
        """Returns the model with options of its KV cache, which generates text and reads documents.

        See `CachedModel` for the arguments.

        Returns:
            The model with a cache.

        Raises:
            ValueError: if an option is invalid, missing or given twice.
            TypeError: if `policy` is none.
        """
        policy_value, size, head_values = cache_options(policy, budget, heads)
        return CachedModel(self, policy_value, size, kv_dtype, head_values, allow_beyond_context)

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompt: Prompt, policy: AnyPolicy = ..., budget: Size = ..., **options: Unpack[OneCallOptions]
    ) -> str: ...
    @overload
    def generate(
        self, prompt: Sequence[Prompt], policy: AnyPolicy = ..., budget: Size = ..., **options: Unpack[OneCallOptions]
    ) -> list[str]: ...
    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt,
        policy: AnyPolicy = ...,
        budget: Size = ...,
        *,
        return_details: Literal[True],
        **options: Unpack[OneCallOptions],
    ) -> tuple[Completion, Usage]: ...
    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        policy: AnyPolicy = ...,
        budget: Size = ...,
        *,
        return_details: Literal[True],
        **options: Unpack[OneCallOptions],
    ) -> tuple[list[Completion], Usage]: ...
    @overload
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        policy: AnyPolicy = ...,
        budget: Size = ...,
        *,
        n: int,
        return_details: bool = False,
        **options: Unpack[OneCallOptions],
    ) -> Answers: ...

    @suggest_keywords(CachedModel.generate)
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        policy: AnyPolicy = "exact",
        budget: Size = None,
        *,
        kv_dtype: KVDtypes = None,
        heads: Heads = None,
        allow_beyond_context: bool = False,
        **options: Any,
    ) -> Answers:
        """Continues texts or answers conversations in one call: `cache(policy, budget).generate(prompt)`.

        Args:
            budget: size of the cache.
            kv_dtype: quantization format.
            heads: budgets of the KV heads.
            allow_beyond_context: whether sequences may exceed the model's context length.
            **options: options of `CachedModel.generate`: `max_new_tokens`, `stop`, `seed`, `n`, `temperature`, ...

        Returns:
            The new text, or a list of texts; see `CachedModel.generate`.
        """
        cache = self.cache(policy, budget, kv_dtype=kv_dtype, heads=heads, allow_beyond_context=allow_beyond_context)
        return cache.generate(prompt, **options)

    def open(self, directory: str | os.PathLike) -> Document:
        """Restores a document from `Document.save`, with its policy, budget and format.

        Returns:
            The document.

        Raises:
            FileNotFoundError: if the directory has no save.
            ValueError: if the save is damaged, or belongs to another model or tokenizer, with the first difference.
        """
        return open_document(self, directory)


@suggest_keywords()
def load(
    name: str | os.PathLike,
    dtype: jax.typing.DTypeLike | None = None,
    mesh: Mesh | None = None,
    *,
    weight_dtype: WeightDtype | None = None,
    parse_special: bool = False,
) -> LanguageModel:
    """Loads a model and its tokenizer; enables JAX's cache of compiled programs (see `compile_cache`).

    Args:
        name: a Hugging Face directory, a GGUF file, a known model ("smollm2-135m", see `known_models`), or the name of
            a model on the hub ("Qwen/Qwen3-0.6B"), which is downloaded once.
        dtype: dtype of parameters and activations. By default float32 on CPUs, because few CPUs
            compute in 16 bits; elsewhere the dtype of the checkpoint, float32 if it is quantized.
        mesh: mesh to shard the model on (see `kvjax.make_mesh`); a single device by default.
        weight_dtype: "int8" stores the embedding and all kernels in int8 with one scale per output channel, a quarter
            of the bytes of float32; activations keep `dtype`. Needs a single device.
        parse_special: whether special tokens that texts and messages spell out, such as "<|im_end|>", become these
            tokens, for prompts that contain a rendered chat template. By default they stay text.

    Returns:
        The model and its tokenizer.

    Raises:
        FileNotFoundError: if the model or one of its files does not exist.
        ValueError: if the checkpoint is invalid or not supported; see `formats.load`.
    """
    path = resolve_path(name)
    compile_cache.enable_persistent_cache()
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    options = LoadOptions(dtype, widen=device.platform == "cpu", weight_dtype=weight_dtype, mesh=mesh)
    model, tokenizer = formats.load(path, options)
    try:
        return LanguageModel(model, dataclasses.replace(tokenizer, parse_special=parse_special))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def resolve_path(name: str | os.PathLike) -> pathlib.Path:
    """Returns the directory or GGUF file of a model; downloads it from the hub if `name` contains a slash.

    Args:
        name: a Hugging Face directory, a GGUF file, a known model, or the name of a model on the hub.

    Returns:
        The local path.

    Raises:
        FileNotFoundError: if `name` is none of these. Only names with a slash are searched on the hub.
    """
    path = pathlib.Path(name)
    try:
        if path.is_dir():
            return path
    except OSError as error:  # the name is too long for a path
        raise FileNotFoundError(f"{shorten(str(name))} is not a model: {error.strerror}") from None
    if formats.is_gguf(path):
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")
        return path
    if str(name) in known_models.KNOWN_MODELS or len(path.parts) < 2:
        return known_models.find_model(str(name))
    logging.warning("%s is not a local path: searching the hub", name)
    try:
        return pathlib.Path(
            huggingface_hub.snapshot_download(str(name), allow_patterns=_HUB_FILES, ignore_patterns="*/*")
        )
    except HFValidationError:
        raise FileNotFoundError(f"{name} is neither a local path nor a valid name of a model on the hub") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise FileNotFoundError(
            f"{name} is not a local path and could not be downloaded from the hub ({reason}); without a network, pass "
            "a GGUF file, or a directory with config.json, tokenizer.json and safetensors files"
        ) from error
