"""Completions, and the tokens, the time and the bytes that they took."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kvjax_models.engine import Engine, FinishReason, Output, TokenLogprobs
from kvjax_models.stopwatch import Stopwatch

if TYPE_CHECKING:
    from kvjax_models.document import Document


@dataclasses.dataclass(frozen=True)
class Completion:
    """The continuation of a prompt, or the answer to a question.

    Attributes:
        number: index of the prompt.
        text: new text without the stop string.
        tokens: all new tokens, including an end-of-text token and the tokens of a stop string.
        finish_reason: "stop" for an end-of-text token or a stop string, "length" for the maximum number of tokens.
        logprobs: one item per new token, if log-probabilities were requested.
    """

    number: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Usage:
    """The tokens, the time and the bytes of a generation, over all its sequences.

    Attributes:
        prompt_tokens: tokens of the prompts, without those of a document.
        new_tokens: new tokens, end-of-text tokens included.
        prefill_seconds: seconds until the first new token could be sampled, without compilation.
        decode_seconds: seconds of all decode steps, without compilation.
        compile_seconds: seconds of tracing and compilation.
        cache_bytes: bytes of the rows' caches on the device.
        host_bytes: bytes of the rows' caches in host memory.
        read_bytes: bytes that one decode step reads, of all rows and of the document.
        full_cache_bytes: bytes of full bfloat16 caches of the same capacity, of all rows and of the document.
        document_bytes: bytes of the document's entries, on the device and in host memory; 0 without a document.
        is_short: whether a budget's share was less than the smallest cache of the policy, so that the caches hold more.
    """

    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    cache_bytes: int
    host_bytes: int
    read_bytes: int
    full_cache_bytes: int
    document_bytes: int = 0
    is_short: bool = False

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of decoding."""
        return self.new_tokens / self.decode_seconds if self.decode_seconds else 0.0


def completions(engine: Engine, numbers: Mapping[int, int] | None = None) -> Iterator[Completion]:
    """Runs an engine until its requests are finished, which may be added meanwhile.

    Args:
        engine: an engine with requests.
        numbers: numbers of the prompts by request; by default those of the requests.

    Yields:
        Completions as they finish.

    Raises:
        ValueError: if a request failed, with the number of its prompt.
    """
    collector = Collector(numbers)
    for output in engine.run():
        if (completion := collector.add(output)) is not None:
            yield completion


class Collector:
    """Collects the outputs of requests into completions."""

    def __init__(self, numbers: Mapping[int, int] | None = None) -> None:
        """Creates a collector.

        Args:
            numbers: numbers of the prompts by request; by default those of the requests.
        """
        self._outputs: dict[int, list[Output]] = {}
        self._numbers = {} if numbers is None else numbers

    def add(self, output: Output) -> Completion | None:
        """Adds an output of an engine.

        Args:
            output: the output.

        Returns:
            The completion that it finishes; None if the request goes on.

        Raises:
            ValueError: if the request failed.
        """
        number = self._numbers.get(output.number, output.number)
        if output.error is not None:
            raise ValueError(f"prompt {number}: {output.error}")
        outputs = self._outputs.setdefault(number, [])
        outputs.append(output)
        if output.finish_reason is None:
            return None
        del self._outputs[number]
        has_logprobs = any(one.logprobs is not None for one in outputs)
        return Completion(
            number=number,
            text="".join(one.text for one in outputs),
            tokens=tuple(token for one in outputs for token in one.tokens),
            finish_reason=output.finish_reason,
            logprobs=tuple(item for one in outputs for item in one.logprobs or ()) if has_logprobs else None,
        )


def collect(engine: Engine, prompt_tokens: int, document: "Document | None" = None) -> tuple[list[Completion], Usage]:
    """Runs an engine until its requests are finished.

    Args:
        engine: an engine with requests.
        prompt_tokens: tokens of all prompts.
        document: the document that the requests continue.

    Returns:
        The completions in the order of the requests, and what they took.

    Raises:
        ValueError: if a request failed.
    """
    watch = Stopwatch()
    finished = sorted(completions(engine), key=lambda one: one.number)
    return finished, Usage(
        prompt_tokens=prompt_tokens,
        new_tokens=sum(len(one.tokens) for one in finished),
        prefill_seconds=engine.prefill_seconds,
        decode_seconds=engine.decode_seconds,
        compile_seconds=watch.compile_seconds,
        **_sizes(engine, document),
        is_short=(engine if document is None else document).generator.is_short,
    )


def _sizes(engine: Engine, document: "Document | None") -> dict[str, int]:
    """Returns the fields of `Usage` that are bytes."""
    sizes = engine.cache_sizes
    if document is None:
        return sizes
    read_bytes = sizes["read_bytes"] + document.read_bytes
    full_bytes = sizes["full_cache_bytes"] + document.full_cache_bytes
    held = document.cache_bytes + document.host_bytes
    return sizes | {"read_bytes": read_bytes, "full_cache_bytes": full_bytes, "document_bytes": held}
