"""A text whose compressed cache answers many questions: it is read once, and every question continues a copy."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

import kvjax
from kvjax.spec import check_integer
from kvjax_models.fingerprint import tokenizer_fingerprint
from kvjax_models.formats.tokenizer import CONTEXT_TOKENS, Tokenizer
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.saved_states import SavedStates
from kvjax_models.generation.state import GenerationState
from kvjax_models.kept import kept_shares
from kvjax_models.prompts import Prompt, as_prompts, check_prompt, is_prompt


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Prefix:
    """A text in the cache of one batch row. `LanguageModel.prefix` and `LanguageModel.restore_prefix` create it.

    Attributes:
        tokenizer: tokenizer of the model.
        generator: generator of the state, with one batch row.
        state: state after the text.
        num_tokens: length of the text in tokens.
        context: the last tokens of the text, with which texts after it are encoded and decoded; None if not known.
        tokens: token ids of the text; None if not known.
        seed: seed of the policy's random numbers; None if not known.
    """

    tokenizer: Tokenizer
    generator: Generator
    state: GenerationState
    num_tokens: int
    context: tuple[int, ...] | None
    tokens: tuple[int, ...] | None = None
    seed: int | None = None

    def generate(
        self, prompt: Prompt | Sequence[Prompt], *, max_new_tokens: int | None = None, seed: int = 0
    ) -> str | list[str]:
        """Continues the text with each prompt; the prefix does not change.

        Args:
            prompt: a text that follows the prefix, or messages, which follow it in the model's chat template; or a list
                of alternative ones, which are processed as one batch.
            max_new_tokens: maximum number of new tokens; by default as many as the cache has capacity for.
            seed: seed of sampling.

        Returns:
            The new text, or a list with one text per prompt.

        Raises:
            ValueError: if a prompt is empty, or prompt and new tokens exceed the capacity of the cache.
            TypeError: if a prompt is neither a text nor a list of messages.
        """
        is_single = is_prompt(prompt)
        prompts = [self._encode(one) for one in as_prompts([prompt] if is_single else prompt)]
        rows, _ = self.continue_tokens(prompts, max_new_tokens, seed=seed)
        answers = self.decode(rows, prompts)
        return answers[0] if is_single else answers

    def _encode(self, prompt: Prompt) -> list[int]:
        """Converts a text or messages to the tokens that follow the prefix."""
        check_prompt(prompt)
        text = prompt if isinstance(prompt, str) else self.tokenizer.render_turn(prompt)
        return self.tokenizer.encode_continuation(text, self.context)

    def __repr__(self) -> str:
        """Returns the sizes of the cache, without its arrays."""
        generator = self.generator
        policies = list(dict.fromkeys(map(str, generator.policies)))
        more = f" and {len(policies) - 1} more" if len(policies) > 1 else ""
        return (
            f"Prefix(num_tokens={self.num_tokens}, cache_bytes={kvjax.cache_bytes(self.state.layers).device:,},\n"
            f"       max_prompt_tokens={generator.max_prompt_tokens}, max_new_tokens={generator.max_new_tokens},\n"
            f"       policy={policies[0]}{more})"
        )

    def continue_tokens(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int | None = None, *, seed: int = 0
    ) -> tuple[list[list[int]], GenerationState]:
        """Continues the text like `generate`, from tokens to tokens.

        Args:
            prompts: token ids of each prompt.
            max_new_tokens: as for `generate`.
            seed: as for `generate`.

        Returns:
            The new tokens of each prompt, and the state after them.
        """
        if max_new_tokens is not None:
            max_new_tokens = check_integer("max_new_tokens", max_new_tokens, minimum=1)
        else:
            capacity = self.generator.max_prompt_tokens + self.generator.max_new_tokens
            max_new_tokens = max(capacity - self.num_tokens - max(map(len, prompts), default=0), 1)
        generator = self.generator.with_batch(len(prompts))
        state = generator.reseed(kvjax.repeat_rows(self.state, len(prompts)), seed)
        return generator.decode_all(generator.prefill(state, prompts), max_new_tokens)

    def decode(self, rows: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]]) -> list[str]:
        """Returns the texts of new tokens.

        Args:
            rows: new tokens of each prompt.
            prompts: the tokens of the prompts.
        """
        contexts = [[*(self.context or ()), *prompt] for prompt in prompts]
        return [self.tokenizer.decode_continuation(*pair) for pair in zip(rows, contexts, strict=True)]

    def kept(self) -> Float[np.ndarray, "L H_kv T"]:
        """Returns the share of a slot that every token of the text has in the cache.

        A token with a slot to itself has 1, a token that is merged with n - 1 others has 1/n, and a dropped token
        has 0. Policies that sample with replacement may give a token more than one slot. Retrieval policies hold all
        tokens: 1 everywhere. Layers with a sliding window have 1 for the tokens of their window. For a quantized
        cache, the tokens are those that the policy keeps without quantization.

        The model computes the text once more, and the policy compresses it with marked values (see
        `kvjax_models.kept`).

        Returns:
            Shares, float32, for every layer, KV head and token of the text.

        Raises:
            ValueError: if the prefix was saved without its text, is on a mesh or from a streaming generator, or the
                policy's entries are not means of tokens.
        """
        if self.tokens is None or self.seed is None:
            raise ValueError(
                "the prefix was saved by an earlier version of kvjax, without its text; create it again with "
                "LanguageModel.prefix"
            )
        return kept_shares(self.generator, self.tokens, self.seed)

    def save(self, directory: str | os.PathLike) -> None:
        """Saves the prefix; see `SavedStates.save`.

        Args:
            directory: a directory without saves.
        """
        SavedStates(pathlib.Path(directory)).save(
            0,
            self.generator,
            self.state,
            _run(self.tokenizer),
            {"tokens": self.num_tokens, "context": self.context, "token_ids": self.tokens, "seed": self.seed},
        )


def read_prefix(tokenizer: Tokenizer, generator: Generator, tokens: Sequence[int], seed: int = 0) -> Prefix:
    """Reads a text into a new cache.

    Args:
        tokenizer: tokenizer of the model.
        generator: generator with one batch row.
        tokens: token ids of the text.
        seed: seed of the policy's random numbers.

    Returns:
        The prefix.
    """
    state = generator.prefill(generator.init_state(seed), [tokens])
    return Prefix(tokenizer, generator, state, len(tokens), tuple(tokens[-CONTEXT_TOKENS:]), tuple(tokens), seed)


def restore_prefix(tokenizer: Tokenizer, generator: Generator, directory: str | os.PathLike) -> Prefix:
    """Restores a saved prefix; see `SavedStates.restore` for errors.

    Args:
        tokenizer: tokenizer of the model.
        generator: generator with the settings and sizes of the saved one.
        directory: directory of the save.

    Returns:
        The prefix.
    """
    _, state, notes = SavedStates(pathlib.Path(directory)).restore(generator, _run(tokenizer))
    # Older saves have neither.
    context, tokens = (None if (ids := notes.get(name)) is None else tuple(ids) for name in ("context", "token_ids"))
    return Prefix(tokenizer, generator, state, notes["tokens"], context, tokens, notes.get("seed"))


def _run(tokenizer: Tokenizer) -> dict[str, str]:
    """Returns the values that determine a saved prefix, in addition to its generator."""
    return {"tokenizer": tokenizer_fingerprint(tokenizer)}
