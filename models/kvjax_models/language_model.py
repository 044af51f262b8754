"""A model with its tokenizer: text in, text out, through any cache policy."""

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import huggingface_hub
import jax
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from jax.sharding import Mesh

import kvjax
from kvjax.budget import Budget
from kvjax.quantization import KVDtype
from kvjax.registry import AnyPolicy, resolve_policy
from kvjax_models import compile_cache
from kvjax_models.formats import huggingface
from kvjax_models.formats.huggingface_tokenizer import load_tokenizer
from kvjax_models.formats.tokenizer import Streamer, Tokenizer
from kvjax_models.generation.batching import Request, parse_batch_size
from kvjax_models.generation.completions import Completion, TextCallback, generate_completions, in_prompt_order
from kvjax_models.generation.generator import Generator, cache_specs, extend_rows
from kvjax_models.generation.sampling import Sampling
from kvjax_models.model.llama import Llama

Message = Mapping[str, str]  # {"role": "user", "content": "..."}
Prompt = str | Sequence[Message]  # a text to continue, or a conversation to answer

_FILES = ["*.json", "*.safetensors", "*.jinja"]  # what is read of a model on the hub


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A decoder and its tokenizer."""

    model: Llama
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        size = self.model.config.vocab_size
        for name, ids in (("end-of-text", self.tokenizer.eos_ids), ("first", self.tokenizer.prefix_ids)):
            if strange := [token for token in ids if token >= size]:
                raise ValueError(f"the tokenizer's {name} token is {strange[0]}; the model's vocabulary has {size}")

    def generate(
        self,
        prompt: str | Sequence[str],
        policy: AnyPolicy = "exact",
        budget: int | str | Budget | None = None,
        *,
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        seed: int = 0,
        allow_beyond_context: bool = False,
        kv_dtype: KVDtype | tuple[KVDtype, KVDtype] | None = None,
    ) -> str | list[str]:
        """Continues a text, or several side by side.

        Args:
            prompt: one text, or a list of them; for conversations see `stream`.
            policy, budget: how much the cache keeps, and of what: "subgen" and "25%", `kvjax.SubGen` and 1024, or a
                policy; see `kvjax.registry.resolve_policy`. Prompts nearly as long as another share its programs
                (`compile_cache.length_bucket`): a share is one of what exact holds for the shortest of them, never more.
            max_new_tokens: most tokens to write; an end-of-text token ends a row before.
            sampling: greedy where None.
            allow_beyond_context: see `Generator`.
            kv_dtype: quantization format of the cache: "int8", "fp8", "int4", "int3", "int2", or a pair (keys, values).

        Returns:
            The new text, or one per prompt. All stand side by side; `generate_many` takes a few at a time.

        Raises:
            ValueError: for what is no policy, a budget that it cannot have, or an empty prompt.
        """
        prompts = [self.encode(text) for text in ([prompt] if isinstance(prompt, str) else prompt)]
        longest = max(map(len, prompts), default=0)
        generator = self._shared_generator(
            policy, budget, len(prompts), longest, max_new_tokens, sampling, allow_beyond_context, kv_dtype
        )
        state = generator.prefill(generator.init_state(seed), prompts)
        rows: list[list[int]] = [[] for _ in prompts]
        for newest, tokens in generator.decode(state, max_new_tokens):
            state = newest
            extend_rows(rows, tokens)
        kvjax.raise_faults(state)
        texts = [self.tokenizer.decode(row) for row in rows]
        return texts[0] if isinstance(prompt, str) else texts

    def stream(
        self,
        prompt: Prompt,
        policy: AnyPolicy = "exact",
        budget: int | str | Budget | None = None,
        *,
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        seed: int = 0,
        stream_interval: int = 1,
        allow_beyond_context: bool = False,
        kv_dtype: KVDtype | tuple[KVDtype, KVDtype] | None = None,
    ) -> Iterator[str]:
        """The same for one text or conversation, in pieces as they come.

        Args:
            every: tokens between two looks; more of them are quicker.
        """
        tokens = self.encode(prompt)
        generator = self._shared_generator(
            policy, budget, 1, len(tokens), max_new_tokens, sampling, allow_beyond_context, kv_dtype
        )
        state = generator.prefill(generator.init_state(seed), [tokens])
        streamer = Streamer(self.tokenizer, context=tokens)
        for newest, block in generator.decode(state, max_new_tokens, stream_interval):
            state = newest
            if piece := "".join(map(streamer.push, block[0].tolist())):
                yield piece
        kvjax.raise_faults(state)
        if piece := streamer.flush():
            yield piece

    def generate_many(
        self,
        prompts: Iterable[Prompt],
        policy: AnyPolicy = "exact",
        budget: int | str | Budget | None = None,
        *,
        batch_size: int | str = 8,
        max_new_tokens: int = 256,
        max_prompt_tokens: int | None = None,
        sampling: Sampling | None = None,
        seed: int = 0,
        stop: Sequence[str] = (),
        on_text: TextCallback | None = None,
        max_prefill_steps: int | None = None,
        allow_beyond_context: bool = False,
        kv_dtype: KVDtype | tuple[KVDtype, KVDtype] | None = None,
    ) -> Iterator[Completion]:
        """Continues any number of texts or conversations, a few at a time, by continuous batching (`batching`).

        Args:
            batch_size: rows, or bytes for their caches ("2GiB"): the less a policy keeps, the more rows.
            max_prompt_tokens: most tokens of a prompt, for which caches are made. With it prompts are taken as rows fall free;
                without it all are taken first, and it is the longest.
            seed: of the first prompt; the next ones have those that follow, so that what is sampled does not depend on
                the batch: it is what `generate` gives to the prompt alone with its seed, in caches of the same size.
            stop: strings that end a text and are no part of it.
            watch: called with a prompt's number and every new piece of its text.
            pieces: see `batching.complete`: a small number has running texts wait less for new prompts.

        Yields:
            Completions in the order of the prompts.

        Raises:
            ValueError: as `generate`, with the number of the prompt.
        """
        encoded: Iterable[list[int]] = map(self.encode, prompts)
        if max_prompt_tokens is None:
            encoded = list(encoded)
            max_prompt_tokens = max(map(len, encoded), default=0)
        generator = self.batch_generator(
            policy, budget, batch_size, max_prompt_tokens, max_new_tokens, sampling, allow_beyond_context, kv_dtype
        )
        requests = (Request(prompt, max_new_tokens, seed=seed + number) for number, prompt in enumerate(encoded))
        found = generate_completions(
            self.tokenizer, generator, requests, stop=stop, on_text=on_text, max_prefill_steps=max_prefill_steps
        )
        return in_prompt_order(found)

    def batch_generator(
        self,
        policy: AnyPolicy,
        budget: int | str | Budget | None,
        batch_size: int | str,
        longest: int,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        allow_beyond_context: bool = False,
        kv_dtype: KVDtype | tuple[KVDtype, KVDtype] | None = None,
    ) -> Generator:
        """A generator of so many rows, or bytes of them, for prompts of up to so many tokens."""
        one = self._shared_generator(
            policy, budget, 1, longest, max_new_tokens, sampling, allow_beyond_context, kv_dtype
        )
        return one.with_batch(parse_batch_size(batch_size, one))

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
        kv_dtype: KVDtype | tuple[KVDtype, KVDtype] | None = None,
        budget_tokens: int | None = None,
    ) -> Generator:
        """The `Generator` behind `generate`, for who holds states: to fork, save and continue them.

        Args:
            max_prompt_tokens, max_new_tokens: tokens that its caches are made for; a budget that is a share is one of what exact
                holds for both.
            budget_tokens: what it is a share of instead, in tokens.
        """
        sizes: dict[str, Any] = {
            "kv_dtype": kv_dtype,
            "batch": batch,
            "max_prompt_tokens": max(max_prompt_tokens, 1),
            "max_new_tokens": max_new_tokens,
        }
        # A window does not count: such a layer keeps exactly that.
        spec = cache_specs(self.model, **sizes, streaming=streaming)[0]
        chosen = resolve_policy(
            policy, budget, dataclasses.replace(spec, window=None), budget_tokens or max_prompt_tokens + max_new_tokens
        )
        sizes |= {"streaming": streaming, "allow_beyond_context": allow_beyond_context}
        return Generator(self.model, chosen, **sizes, sampling=sampling, eos=self.tokenizer.eos_ids)

    def _shared_generator(
        self,
        policy: AnyPolicy,
        budget: int | str | Budget | None,
        batch: int,
        longest: int,
        max_new_tokens: int,
        sampling: Sampling | None,
        allow_beyond_context: bool,
        kv_dtype: KVDtype | tuple[KVDtype, KVDtype] | None,
    ) -> Generator:
        """A generator for prompts of up to so many tokens, whose programs others of nearly their length share."""
        lengths = compile_cache.length_bucket(longest)
        return self.generator(
            policy,
            budget,
            batch=batch,
            max_prompt_tokens=lengths[-1],
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            allow_beyond_context=allow_beyond_context,
            kv_dtype=kv_dtype,
            budget_tokens=lengths[0] + max_new_tokens,
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """The tokens of a text with what the model wants before it, or of a conversation through its chat template.

        Raises:
            ValueError: for a conversation where the model has no chat template.
        """
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else self.tokenizer.encode_chat(prompt)


def load(name: str | os.PathLike, dtype: jax.typing.DTypeLike | None = None, mesh: Mesh | None = None) -> LanguageModel:
    """Loads a model and its tokenizer.

    Args:
        name: a Hugging Face directory, or the name of a model on the hub ("Qwen/Qwen3-0.6B"), which is downloaded once.
        dtype: of parameters and arithmetic; None for the file's own.
        mesh: devices to lie on, see `kvjax.make_mesh`; None for one.

    Raises:
        FileNotFoundError: where there is no such directory, nor such a model on the hub, or no way to it.
        ValueError: what `huggingface.load_model` and `load_tokenizer` refuse.
    """
    directory = resolve_directory(name)
    model, tokens = huggingface.load_model(directory, dtype, mesh), load_tokenizer(directory)
    try:
        return LanguageModel(model, tokens)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error


def resolve_directory(name: str | os.PathLike) -> pathlib.Path:
    """The directory of a model, downloaded from the hub where it is none yet; raises as `load`."""
    directory = pathlib.Path(name)
    if directory.is_dir():
        return directory
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(str(name), allow_patterns=_FILES))
    except HFValidationError:
        raise FileNotFoundError(f"{name} is no directory, and no name that a model on the hub can have") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise FileNotFoundError(
            f"{name} is no directory, and the hub did not give it ({reason}); where there is no net, give a directory "
            "with config.json, tokenizer.json and safetensors files"
        ) from error
