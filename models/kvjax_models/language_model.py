"""A model with its tokenizer: generates text through any cache policy."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from jax.sharding import Mesh
from jaxtyping import Float

from kvjax.budget import Budget
from kvjax.messages import shorten
from kvjax_models import compile_cache, formats, known_models
from kvjax_models import profile as profiles
from kvjax_models.cache import CachedModel, KVDtypes, open_document
from kvjax_models.document import Document
from kvjax_models.formats.checkpoint import LoadOptions
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.generation.auto_policy import AnyPolicy, Heads, cache_options
from kvjax_models.keywords import suggest_keywords
from kvjax_models.model.llama import Llama
from kvjax_models.model.quantized import WeightDtype
from kvjax_models.profile import Profile
from kvjax_models.prompts import Message as Message
from kvjax_models.prompts import Prompt as Prompt
from kvjax_models.prompts import TemplateOptions as TemplateOptions
from kvjax_models.prompts import encode_prompt

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]  # downloaded from the hub, without subdirectories


@dataclasses.dataclass(frozen=True, repr=False)
class LanguageModel:
    """A decoder and its tokenizer, which generate text with any cache policy. `load` makes one from a checkpoint.

    Attributes:
        model: the decoder.
        tokenizer: its tokenizer; its end-of-text and BOS tokens must be in the model's vocabulary.
    """

    model: Llama
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        """Checks that the end-of-text and BOS tokens are in the vocabulary.

        Raises:
            ValueError: if one of them is not.
        """
        size = self.model.config.vocab_size
        for name, ids in (("end-of-text", self.tokenizer.eos_ids), ("BOS", self.tokenizer.prefix_ids)):
            if outside := [token for token in ids if token >= size]:
                raise ValueError(
                    f"the tokenizer's {name} token {outside[0]} exceeds the model's vocabulary of {size} tokens"
                )

    def __repr__(self) -> str:
        """Returns the sizes of the model, without its parameters."""
        config, dtype = self.model.config, self.model.embedding.param_dtype
        weights = self.model.weight_dtype or jnp.dtype(dtype).name
        return (
            f"LanguageModel(layers={config.layers}, width={config.width}, query_heads={config.query_heads}, "
            f"kv_heads={config.kv_heads}, head_dim={config.head_dim},\n"
            f"              vocab_size={config.vocab_size}, max_length={config.max_length}, weights={weights})"
        )

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

        Args:
            policy: see `CachedModel`, as for all arguments.
            budget: size of the cache.
            kv_dtype: quantization format.
            heads: budgets of the KV heads.
            allow_beyond_context: whether sequences may exceed the model's context length.

        Returns:
            The model with a cache.

        Raises:
            ValueError: if an option is invalid, missing or given twice.
            TypeError: if `policy` is none.
        """
        policy_value, size, head_values = cache_options(policy, budget, heads)
        return CachedModel(self, policy_value, size, kv_dtype, head_values, allow_beyond_context)

    @suggest_keywords(CachedModel.generate)
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        policy: AnyPolicy = "exact",
        budget: int | str | Budget | None = None,
        *,
        kv_dtype: KVDtypes = None,
        heads: Heads = None,
        allow_beyond_context: bool = False,
        **options: Any,
    ) -> Any:
        """Continues texts or answers conversations in one call: `cache(policy, budget).generate(prompt)`.

        Args:
            prompt: see `CachedModel.generate`.
            policy: see `CachedModel`, as for the options of `cache`.
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

        Args:
            directory: directory of the save.

        Returns:
            The document.

        Raises:
            FileNotFoundError: if the directory has no save.
            ValueError: if the save is damaged, or belongs to another model or tokenizer, with the first difference.
        """
        return open_document(self, directory)

    def profile(self, *, scorer: bool = False) -> Profile | None:
        """Returns the model's profile; measures and saves it if there is none (see `profile.find_or_measure`).

        Args:
            scorer: whether to measure the scorer of a saved profile that has none.
        """
        return profiles.find_or_measure(self.model, self.tokenizer, scorer=scorer)

    def scorer(self, heads: Heads = None) -> Float[np.ndarray, "L W+2 H_kv"] | None:
        """Returns the scorer of tokens of a profile; None if the model cannot be measured.

        Args:
            heads: as for `cache`; a profile with a scorer replaces the model's.
        """
        profile = heads if isinstance(heads, Profile) and heads.scorer is not None else self.profile(scorer=True)
        return None if profile is None else profile.scorer

    def encode(self, prompt: Prompt, template_options: TemplateOptions = None) -> list[int]:
        """Converts a prompt to tokens.

        Args:
            prompt: a text, which gets a BOS token if the model uses one, or a conversation, which is written in the
                model's chat template.
            template_options: as for `CachedModel.generate`.

        Returns:
            Token ids.

        Raises:
            TypeError: if the prompt is neither a text nor a list of messages.
            ValueError: if there are `template_options` and the prompt is a text.
        """
        return encode_prompt(self.tokenizer, prompt, template_options)


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
    model, tokenizer = formats.load(path, options=options)
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
