"""Answers in OpenAI's formats: entire completions, and chunks of streamed ones."""

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from kvjax_models.engine import Completion, Output, TokenLogprobs
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.server.schema import ChatRequest, GenerationRequest
from kvjax_models.tools import CallReader, ToolCall

_MIN_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have; as in OpenAI's interface


class TokenBytes:
    """The bytes of single tokens, which may be parts of characters.

    Attributes:
        tokenizer: the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Reads how a tokenizer writes bytes."""
        self.tokenizer, self._special = tokenizer, tokenizer.special_ids
        decoder = json.loads(tokenizer.backend.decoder.__getstate__()) if tokenizer.backend.decoder else {}
        kinds = [part.get("type") for part in (decoder, *decoder.get("decoders", ()))]
        self._bytes_of = byte_level_characters() if "ByteLevel" in kinds else None
        self._added = tokenizer.backend.get_added_tokens_decoder()

    def name(self, token: int) -> str:
        """Returns the token as the vocabulary writes it."""
        return self.tokenizer.backend.id_to_token(token) or ""

    def __call__(self, token: int) -> bytes | None:
        """Returns the bytes of a token; None for special tokens, which are not part of the text."""
        text = self.tokenizer.backend.id_to_token(token)
        if text is None or token in self._special:
            return None
        if token in self._added:
            return text.encode()
        if self._bytes_of is not None:
            return bytes(self._bytes_of[one] for one in text)
        if len(text) == 6 and text.startswith("<0x"):  # SentencePiece's bytes
            return bytes([int(text[3:5], 16)])
        return text.replace("▁", " ").encode()


def byte_level_characters() -> dict[str, int]:
    """Returns the bytes that the characters of byte-level BPE stand for (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [*map(chr, printable), *(chr(256 + number) for number in range(len(others)))]
    return dict(zip(characters, [*printable, *others], strict=True))


class Format:
    """Writes the answers to one request."""

    def __init__(self, token_bytes: TokenBytes, model: str, body: GenerationRequest) -> None:
        """Creates the format of the answers to a request."""
        self._token_bytes, self._is_chat = token_bytes, isinstance(body, ChatRequest)
        self._num_top = body.num_top_logprobs  # alternatives of each token; None without log-probabilities
        self._calls = body.calls(token_bytes.tokenizer) if isinstance(body, ChatRequest) else None
        self._readers: dict[int, CallReader] = {}  # of the choices
        self._has_role: set[int] = set()
        self._offsets: dict[int, int] = {}  # lengths of the choices' texts
        kind = "chatcmpl" if self._is_chat else "cmpl"
        self._head = {"id": f"{kind}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def answer(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> bytes:
        """Returns a completion."""
        kind = "chat.completion" if self._is_chat else "text_completion"
        return msgspec.json.encode({**self._head, "object": kind, "choices": choices, "usage": usage})

    def chunk(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        """Returns an event with a part of a completion.

        Args:
            usage: the usage, in the last event.
        """
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return event({**self._head, "object": kind, "choices": choices, "usage": usage})

    def choice(self, completion: Completion) -> dict[str, Any]:
        """Returns an entire choice."""
        content: dict[str, Any] = {"text": completion.text}
        if self._is_chat:
            text, calls = self._read_calls(completion.number, completion.text, is_finished=True)
            message = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
            content = {"message": message | ({"tool_calls": [_call_as_json(one) for one in calls]} if calls else {})}
        return self._choice(completion, content)

    def delta(self, output: Output) -> dict[str, Any] | None:
        """Returns a part of a choice; None for nothing new. The first one of a chat completion has the role."""
        index, is_finished = output.number, output.finish_reason is not None
        if not self._is_chat:
            is_empty = not (output.text or is_finished or output.logprobs)
            return None if is_empty else self._choice(output, {"text": output.text})
        text, calls = self._read_calls(index, output.text, is_finished=is_finished)
        if not (text or calls or is_finished or output.logprobs):
            return None
        delta: dict[str, Any] = {"content": text} if text or not (calls or index in self._has_role) else {}
        if calls:
            first = len(self._readers[index].calls) - len(calls)
            delta["tool_calls"] = [{"index": first + place, **_call_as_json(one)} for place, one in enumerate(calls)]
        if index not in self._has_role:
            delta = {"role": "assistant", **delta}
            self._has_role.add(index)
        return self._choice(output, {"delta": delta})

    def _read_calls(self, index: int, text: str, *, is_finished: bool) -> tuple[str, list[ToolCall]]:
        """Returns the new text and the new calls of a choice."""
        if self._calls is None:
            return text, []
        reader = self._readers.setdefault(index, CallReader(*self._calls))
        return reader.push(text, is_finished=is_finished)

    def _choice(self, part: Completion | Output, content: dict[str, Any]) -> dict[str, Any]:
        logprobs, reason = self._logprobs(part.number, part.logprobs), part.finish_reason
        if reason == "stop" and part.number in self._readers and self._readers[part.number].calls:
            reason = "tool_calls"  # type: ignore[assignment]
        return {"index": part.number, **content, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, index: int, items: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        if items is None or self._num_top is None:
            return None
        if self._is_chat:
            content = [
                self._item(one.token, one.logprob)
                | {"top_logprobs": [self._item(*alternative) for alternative in one.top[: self._num_top]]}
                for one in items
            ]
            return {"content": content, "refusal": None}
        tokens = [self._text(one.token) for one in items]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(token)
        alternatives = [{one.token: one.logprob, **dict(one.top[: self._num_top])} for one in items]
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(one.logprob) for one in items],
            "top_logprobs": [{self._text(k): _finite(v) for k, v in one.items()} for one in alternatives],
            "text_offset": offsets,
        }

    def _item(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._token_bytes(token)
        return {"token": self._text(token), "logprob": _finite(logprob), "bytes": None if data is None else [*data]}

    def _text(self, token: int) -> str:
        data = self._token_bytes(token)
        if data is None:
            return self._token_bytes.name(token)
        return data.decode("utf-8", "backslashreplace")


def event(values: Any) -> bytes:
    """Returns a server-sent event with JSON."""
    return b"data: " + msgspec.json.encode(values) + b"\n\n"


def _call_as_json(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)
