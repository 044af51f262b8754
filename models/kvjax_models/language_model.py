"""A model with its tokenizer: generates text through any cache policy."""

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypedDict, Unpack

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from jax.sharding import Mesh
from jaxtyping import Float

import kvjax
from kvjax.budget import Budget
from kvjax.messages import shorten
from kvjax.quantization import KVDtype
from kvjax.registry import AnyPolicy, resolve_policy
from kvjax_models import compile_cache, formats, known_models
from kvjax_models import profile as profiles
from kvjax_models.formats.checkpoint import LoadOptions
from kvjax_models.formats.tokenizer import Streamer, Tokenizer
from kvjax_models.generation.auto_policy import Heads, resolve_auto, resolve_windows
from kvjax_models.generation.batching import Request, parse_batch_size, seed_of_prompt
from kvjax_models.generation.completions import Completion, TextCallback, generate_completions, in_prompt_order
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.prefix import Prefix, read_prefix, restore_prefix
from kvjax_models.generation.sampling import Sampling
from kvjax_models.generation.saved_states import SavedStates
from kvjax_models.generation.state import cache_specs
from kvjax_models.model.llama import Llama
from kvjax_models.model.quantized import WeightDtype
from kvjax_models.profile import Profile
from kvjax_models.prompts import Message as Message
from kvjax_models.prompts import Prompt as Prompt
from kvjax_models.prompts import TemplateOptions as TemplateOptions
from kvjax_models.prompts import as_prompts, check_prompt, is_prompt
from kvjax_models.stopwatch import Stopwatch
from kvjax_models.usage import Usage, cache_sizes

KVDtypes = KVDtype | tuple[KVDtype, KVDtype] | None  # of keys and values together, or of each


class GeneratorOptions(TypedDict, total=False):
    """Options that all methods of `LanguageModel` pass to the generator; `LanguageModel.generate` describes them."""

    sampling: Sampling | None
    allow_beyond_context: bool
    kv_dtype: KVDtypes
    heads: Heads


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

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        policy: AnyPolicy = "exact",
        budget: int | str | Budget | None = None,
        *,
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        seed: int = 0,
        allow_beyond_context: bool = False,
        kv_dtype: KVDtypes = None,
        heads: Heads = None,
        template_options: TemplateOptions = None,
        return_usage: bool = False,
    ) -> str | list[str] | tuple[str | list[str], Usage]:
        """Continues one text or a batch of texts, or answers conversations.

        Invalid policies, budgets and empty prompts raise a ValueError; prompts of other types a TypeError.

        Args:
            prompt: one text or one list of messages {"role": ..., "content": ...}, or a list of either, which are
                processed as one batch (`generate_many` limits the batch size).
            policy: cache policy: "auto" (see `generation.auto_policy`), the name of another one ("snapkv"), a class
                (`kvjax.SnapKV`) or a policy.
            budget: size of the cache of one sequence: a share of a full bfloat16 cache ("25%"), bytes ("64MiB") or
                slots per KV head (1024); None if the policy has a budget or takes none. A share refers to the full
                cache after the last new token. Layers with a sliding window cache exactly their window; their bytes
                count only in a budget in bytes. Prompts of similar length share compiled programs
                (`compile_cache.length_bucket`) and the budget of the shortest of them.
            max_new_tokens: maximum number of new tokens; an end-of-text token finishes a sequence earlier.
            sampling: sampling parameters; greedy by default.
            seed: seed of sampling and of the policy's random numbers.
            allow_beyond_context: whether sequences may exceed the model's context length; see `Generator`.
            kv_dtype: quantization format of the cache: "int8", "fp8", "int4", "int3", "int2", a pair for keys and
                values, or "bfloat16"; the dtype of the model by default.
            heads: budgets of the KV heads: "auto" keeps every token in the heads that retrieve, by the model's profile
                (measured at the first use of an unknown model), a `profile.Profile`, or the shares of
                `kvjax.HeadBudgets`; equal budgets by default. "auto" and policies with `heads=auto` have it already.
            template_options: variables of the chat template, such as {"enable_thinking": False} or {"tools": [...]};
                {"continue_final_message": True} continues the last message. Only for conversations.
            return_usage: whether to return the tokens, seconds and bytes, too.

        Returns:
            The new text, or a list with one text per prompt; with `return_usage` a pair of it and a `Usage`.
        """
        is_single = is_prompt(prompt)
        prompts = [self.encode(one, template_options) for one in as_prompts([prompt] if is_single else prompt)]
        generator = self._bucketed_generator(
            policy,
            budget,
            max(map(len, prompts), default=0),
            max_new_tokens,
            batch=len(prompts),
            sampling=sampling,
            allow_beyond_context=allow_beyond_context,
            kv_dtype=kv_dtype,
            heads=heads,
        )
        prefill = Stopwatch()
        state = generator.prefill(generator.init_state(seed), prompts)
        prefill_seconds, decode = prefill.seconds, Stopwatch()
        rows, state = generator.decode_all(state, max_new_tokens, compact_last=False)
        decode_seconds = decode.seconds
        texts = [self.tokenizer.decode_continuation(*pair) for pair in zip(rows, prompts, strict=True)]
        result = texts[0] if is_single else texts
        if not return_usage:
            return result
        return result, Usage(
            prompt_tokens=sum(map(len, prompts)),
            new_tokens=sum(map(len, rows)),
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            compile_seconds=prefill.compile_seconds,
            **cache_sizes(generator, state),
        )

    def stream(
        self,
        prompt: Prompt,
        policy: AnyPolicy = "exact",
        budget: int | str | Budget | None = None,
        *,
        max_new_tokens: int = 256,
        seed: int = 0,
        stream_interval: int = 1,
        template_options: TemplateOptions = None,
        **options: Unpack[GeneratorOptions],
    ) -> Iterator[str]:
        """Continues a text or answers a conversation, and yields the new text during generation.

        Args:
            prompt: a text, or a list of messages.
            policy: as for `generate`.
            budget: as for `generate`.
            max_new_tokens: as for `generate`.
            seed: as for `generate`.
            stream_interval: tokens per yield; larger intervals are faster.
            template_options: as for `generate`.
            **options: `sampling`, `allow_beyond_context`, `kv_dtype` and `heads`, as for `generate`.

        Yields:
            Parts of the new text, in order; joined they are the entire new text.
        """
        tokens = self.encode(prompt, template_options)
        generator = self._bucketed_generator(policy, budget, len(tokens), max_new_tokens, **options)
        state = generator.prefill(generator.init_state(seed), [tokens])
        streamer = Streamer(self.tokenizer, context=tokens)
        for new_state, block in generator.decode(state, max_new_tokens, stream_interval, compact_last=False):
            state = new_state
            if text := "".join(map(streamer.push, block[0].tolist())):
                yield text
        kvjax.raise_faults(state)
        if text := streamer.flush():
            yield text

    def generate_many(
        self,
        prompts: Iterable[Prompt],
        policy: AnyPolicy = "exact",
        budget: int | str | Budget | None = None,
        *,
        batch_size: int | str = 8,
        max_new_tokens: int = 256,
        max_prompt_tokens: int | None = None,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        on_text: TextCallback | None = None,
        max_prefill_steps: int | None = None,
        template_options: TemplateOptions = None,
        **options: Unpack[GeneratorOptions],
    ) -> Iterator[Completion]:
        """Continues any number of texts or conversations by continuous batching (see `batching`).

        A finished sequence frees its batch row for the next prompt. Invalid arguments raise a ValueError as in
        `generate`; errors of a prompt name its number.

        Args:
            prompts: texts, or lists of messages.
            policy: as for `generate`.
            budget: as for `generate`.
            batch_size: number of batch rows, or bytes for the caches of all rows ("2GiB"); smaller caches allow more
                rows.
            max_new_tokens: as for `generate`.
            max_prompt_tokens: maximum length of a prompt; a longer one is an error. With it, prompts are read from the
                iterable when a row is free; by default all are read first and their maximum length is used.
            seed: seed of the first prompt; prompt n has seed + n, modulo 2**32. A completion does not depend on the
                other prompts of the batch: `generate` returns the same text for the prompt and its seed, with caches of
                the same size.
            stop: a string or strings that finish a sequence and are excluded from its text; they may contain special
                tokens.
            on_text: called with the number of a prompt and each new part of its text.
            max_prefill_steps: see `batching.run_requests`; a small number reduces the latency of running sequences.
            template_options: as for `generate`.
            **options: `sampling`, `allow_beyond_context`, `kv_dtype` and `heads`, as for `generate`.

        Returns:
            An iterator over completions in the order of the prompts.
        """
        token_lists: Iterable[list[int]] = (self.encode(one, template_options) for one in as_prompts(prompts))
        if max_prompt_tokens is None:
            token_lists = list(token_lists)
            max_prompt_tokens = max(map(len, token_lists), default=0)
        generator = self.batch_generator(policy, budget, batch_size, max_prompt_tokens, max_new_tokens, **options)
        requests = _requests(token_lists, max_prompt_tokens, max_new_tokens, seed)
        completions = generate_completions(
            self.tokenizer, generator, requests, stop=stop, on_text=on_text, max_prefill_steps=max_prefill_steps
        )
        return in_prompt_order(completions)

    def batch_generator(
        self,
        policy: AnyPolicy,
        budget: int | str | Budget | None,
        batch_size: int | str,
        max_prompt_tokens: int,
        max_new_tokens: int,
        **options: Unpack[GeneratorOptions],
    ) -> Generator:
        """Returns the generator that `generate_many` uses.

        Args:
            policy: as for `generate`.
            budget: as for `generate`.
            batch_size: number of batch rows, or bytes for their caches ("2GiB").
            max_prompt_tokens: maximum length of a prompt.
            max_new_tokens: maximum number of tokens after the prompt.
            **options: `sampling`, `allow_beyond_context`, `kv_dtype` and `heads`, as for `generate`.

        Returns:
            A generator for prompts of up to `max_prompt_tokens` tokens.
        """
        single_row = self._bucketed_generator(policy, budget, max_prompt_tokens, max_new_tokens, **options)
        return single_row.with_batch(parse_batch_size(batch_size, single_row))

    def generator(
        self,
        policy: AnyPolicy,
        budget: int | str | Budget | None = None,
        *,
        batch: int = 1,
        max_prompt_tokens: int,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        streaming: bool = False,
        allow_beyond_context: bool = False,
        kv_dtype: KVDtypes = None,
        heads: Heads = None,
        budget_tokens: int | None = None,
    ) -> Generator:
        """Returns a `Generator`, with which callers fork, save and continue generation states themselves.

        Args:
            policy: as for `generate`.
            budget: as for `generate`.
            batch: number of batch rows.
            max_prompt_tokens: maximum length of the first prompt.
            max_new_tokens: maximum number of tokens after it.
            sampling: as for `generate`.
            streaming: whether prompts are compressed while they are processed, in memory independent of their length;
                see `Generator`.
            allow_beyond_context: as for `generate`.
            kv_dtype: as for `generate`.
            heads: as for `generate`.
            budget_tokens: sequence length whose full cache a budget's share refers to; by default the sum of
                `max_prompt_tokens` and `max_new_tokens`.

        Returns:
            The generator.
        """
        sizes: dict[str, Any] = {
            "batch": batch,
            "max_prompt_tokens": max(max_prompt_tokens, 1),
            "max_new_tokens": max_new_tokens,
            "streaming": streaming,
        }
        # The budget applies to layers without a sliding window; the others cache exactly their window.
        spec = dataclasses.replace(cache_specs(self.model, **sizes)[0], window=None)
        tokens = budget_tokens or max_prompt_tokens + max_new_tokens
        policy, budget, kv_dtype = resolve_auto(
            policy, budget, kv_dtype, spec, tokens, heads=heads, streaming=streaming, find_profile=self.profile
        )
        policy, budget = resolve_windows(policy, budget, cache_specs(self.model, **sizes, kv_dtype=kv_dtype))
        resolved = resolve_policy(policy, budget, dataclasses.replace(spec, kv_dtype=kv_dtype), tokens)
        return Generator(
            self.model,
            resolved,
            **sizes,
            kv_dtype=kv_dtype,
            sampling=sampling,
            eos=self.tokenizer.eos_ids,
            allow_beyond_context=allow_beyond_context,
            scorer=self.scorer(heads) if resolved.requires.predicted_scores else None,
        )

    def profile(self, *, scorer: bool = False) -> Profile | None:
        """Returns the model's profile; measures and saves it if there is none (see `profile.find_or_measure`).

        Args:
            scorer: whether to measure the scorer of a saved profile that has none.
        """
        return profiles.find_or_measure(self.model, self.tokenizer, scorer=scorer)

    def scorer(self, heads: Heads = None) -> Float[np.ndarray, "L W+2 H_kv"] | None:
        """Returns the scorer of tokens of a profile; None if the model cannot be measured.

        Args:
            heads: as for `generate`; a profile with a scorer replaces the model's.
        """
        profile = heads if isinstance(heads, Profile) and heads.scorer is not None else self.profile(scorer=True)
        return None if profile is None else profile.scorer

    def prefix(
        self,
        context: Prompt,
        policy: AnyPolicy = "exact",
        budget: int | str | Budget | None = None,
        *,
        max_new_tokens: int = 512,
        seed: int = 0,
        template_options: TemplateOptions = None,
        **options: Unpack[GeneratorOptions],
    ) -> Prefix:
        """Reads a text once and returns its compressed cache, which answers many questions.

        Args:
            context: the text, or a conversation.
            policy: as for `generate`.
            budget: as for `generate`.
            max_new_tokens: capacity for each question and its answer, in tokens.
            seed: as for `generate`.
            template_options: as for `generate`.
            **options: `sampling`, `allow_beyond_context`, `kv_dtype` and `heads`, as for `generate`.

        Returns:
            The prefix.
        """
        tokens = self.encode(context, template_options)
        generator = self.generator(
            policy, budget, max_prompt_tokens=len(tokens), max_new_tokens=max_new_tokens, **options
        )
        return read_prefix(self.tokenizer, generator, tokens, seed)

    def restore_prefix(
        self,
        directory: str | os.PathLike,
        policy: AnyPolicy = "exact",
        budget: int | str | Budget | None = None,
        **options: Unpack[GeneratorOptions],
    ) -> Prefix:
        """Restores a prefix from `Prefix.save`.

        Args:
            directory: directory of the save.
            policy: the policy of the save.
            budget: the budget of the save.
            **options: `sampling`, `allow_beyond_context`, `kv_dtype` and `heads` of the save.

        Returns:
            The prefix.

        Raises:
            FileNotFoundError: if the directory has no save.
            ValueError: if the save belongs to another model, tokenizer or policy, with the first difference.
        """
        generator = self.generator(policy, budget, **SavedStates(pathlib.Path(directory)).generator_sizes(), **options)
        return restore_prefix(self.tokenizer, generator, directory)

    def _bucketed_generator(
        self,
        policy: AnyPolicy,
        budget: int | str | Budget | None,
        prompt_tokens: int,
        max_new_tokens: int,
        **options: Any,
    ) -> Generator:
        """Returns a generator whose programs are shared by prompts of similar length."""
        lengths = compile_cache.length_bucket(prompt_tokens)
        return self.generator(
            policy,
            budget,
            max_prompt_tokens=lengths[-1],
            max_new_tokens=max_new_tokens,
            budget_tokens=lengths[0] + max_new_tokens,
            **options,
        )

    def encode(self, prompt: Prompt, template_options: TemplateOptions = None) -> list[int]:
        """Converts a prompt to tokens.

        Args:
            prompt: a text, which gets a BOS token if the model uses one, or a conversation, which is written in the
                model's chat template.
            template_options: as for `generate`.

        Returns:
            Token ids.

        Raises:
            TypeError: if the prompt is neither a text nor a list of messages.
            ValueError: if there are `template_options` and the prompt is a text.
        """
        check_prompt(prompt)
        if not isinstance(prompt, str):
            return self.tokenizer.encode_chat(prompt, template_options=template_options)
        if template_options:
            raise ValueError(
                f"template_options={template_options!r} apply to conversations only; pass a list of messages"
            )
        return self.tokenizer.encode(prompt)


def _requests(
    token_lists: Iterable[list[int]], max_prompt_tokens: int, max_new_tokens: int, seed: int
) -> Iterator[Request]:
    """Makes one request per prompt.

    Yields:
        The requests.

    Raises:
        ValueError: if a prompt is too long, with its number.
    """
    for number, tokens in enumerate(token_lists):
        if len(tokens) > max_prompt_tokens:  # the generator's limit is rounded up
            raise ValueError(
                f"prompt {number}: {len(tokens)} tokens exceed max_prompt_tokens={max_prompt_tokens}; shorten the "
                "prompt or pass a larger number"
            )
        yield Request(tokens, max_new_tokens, seed=seed_of_prompt(seed, number))


def load(
    name: str | os.PathLike,
    dtype: jax.typing.DTypeLike | None = None,
    mesh: Mesh | None = None,
    *,
    weight_dtype: WeightDtype | None = None,
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
        return LanguageModel(model, tokenizer)
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
