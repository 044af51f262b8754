"""Outputs of an engine, completions, and the tokens, the time and the bytes that they took."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple

from kvjax_models.citations import Citation
from kvjax_models.prefix import Prefix

FinishReason = Literal["stop", "length", "error", "abort"]


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one new token, before penalties and temperature.

    Attributes:
        token: the token.
        logprob: its natural log-probability.
        top: the most likely tokens and their log-probabilities, as many as `Sampling.logprobs`.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Output(NamedTuple):
    """The new tokens of a request after a step.

    Attributes:
        number: number of the request.
        text: new text; characters at its end that may be the start of a stop string come later. The last output of
            a request has all that were held back, also if it failed or was aborted.
        tokens: new tokens, including an end-of-text token and the tokens of a stop string.
        finish_reason: "stop" for an end-of-text token or a stop string, "length" for the maximum number of tokens,
            "error" for an invalid request, "abort" after `Engine.abort`; None if the request is not finished.
        logprobs: one item per new token, if the request asked for them.
        error: message of a failed request.
        prefix: all tokens of the sequence with their cache, if the request asked for them (`keep`), the sequence has
            ended without a fault and did not end at a stop string.
    """

    number: int
    text: str
    tokens: list[int]
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    prefix: Prefix | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """The continuation of a prompt, or the answer to a question.

    Attributes:
        number: index of the prompt.
        text: new text without the stop string.
        tokens: all new tokens, including an end-of-text token and the tokens of a stop string.
        finish_reason: "stop" for an end-of-text token or a stop string, "length" for the maximum number of tokens.
        logprobs: one item per new token, if log-probabilities were requested.
        citations: parts of the document's text that the answer is based on, if they were requested.
    """

    number: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None = None
    citations: tuple[Citation, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Usage:
    """The tokens, the time and the bytes of a generation, over all its sequences.

    Attributes:
        prompt_tokens: tokens of the prompts, without prefixes.
        new_tokens: new tokens, end-of-text tokens included.
        prefill_seconds: seconds until the first new token could be sampled, without compilation.
        decode_seconds: seconds of all decode steps, without compilation.
        compile_seconds: seconds of tracing and compilation.
        cache_bytes: bytes of the rows' caches on the device, when they took the most; the others are of this time.
        host_bytes: bytes of the rows' caches in host memory.
        read_bytes: bytes that one decode step reads, of all rows and of shared prefixes.
        full_cache_bytes: bytes of full bfloat16 caches of the same capacity, of all rows and of shared prefixes.
        document_bytes: bytes of shared prefixes (documents), on the device and in host memory.
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
