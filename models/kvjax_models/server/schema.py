"""Bodies of requests: OpenAI's fields that this server implements, with strict types.

A field with the value null is absent. Fields that do not change an answer are ignored, and so are values of others that
ask for nothing. Every other field is refused by name, because the answer would not be the one that the client expects.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvjax_models.generation.sampling import Sampling
from kvjax_models.prompts import Message
from kvjax_models.server.errors import RequestError

if TYPE_CHECKING:
    from kvjax_models.document import Document
    from kvjax_models.language_model import LanguageModel

T = TypeVar("T", bound=msgspec.Struct)

MAX_CHOICES = 128  # sequences of a request, as in OpenAI's interface
_MAX_STOPS, _MAX_STOP_LENGTH = 16, 1000
_ROLES = ("system", "developer", "user", "assistant", "tool")
_COMPLETION_TOKENS = 16  # of a text completion by default, as in OpenAI's interface
_IGNORED = {
    "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
}  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # values that ask for nothing
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "reuse": (False,),
}
_NEUTRAL_IN_MESSAGE = ("refusal", "annotations", "audio", "function_call", "tool_calls")  # if null or empty
_UNSUPPORTED = {
    "tools": "this server does not call tools",
    "response_format": "this server does not constrain answers; only {'type': 'text'} is possible",
    "reuse": "only chat completions continue earlier answers",
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # ignored: chunks have no padding


class _Generation(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of both kinds of completions."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | list[str] = ()  # type: ignore[assignment]
    seed: int | None = None
    n: int = 1
    document: str | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of alternatives of each token; None without log-probabilities."""
        raise NotImplementedError

    def sampling(self) -> Sampling:
        """Returns the sampling parameters; invalid ones raise a ValueError."""
        return Sampling(
            temperature=self.temperature,
            top_k=None if self.top_k in (0, -1) else self.top_k,  # as in vLLM and llama.cpp: all tokens
            top_p=self.top_p,
            min_p=self.min_p or None,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logprobs=self.num_top_logprobs,
        )

    def stops(self) -> tuple[str, ...]:
        """Returns the stop strings.

        Raises:
            RequestError: if there are too many, or one is empty or too long.
        """
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if len(stops) > _MAX_STOPS or not all(0 < len(one) <= _MAX_STOP_LENGTH for one in stops):
            raise RequestError(
                f"stop must be at most {_MAX_STOPS} strings of 1 to {_MAX_STOP_LENGTH} characters", param="stop"
            )
        return stops

    def check(self) -> None:
        """Checks the numbers that no other part checks.

        Raises:
            RequestError: if one is invalid.
        """
        if not 1 <= self.n <= MAX_CHOICES:
            raise RequestError(f"n={self.n} must be from 1 to {MAX_CHOICES}", param="n")
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise RequestError(f"seed={self.seed} must be from 0 to 2**32 - 1", param="seed")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options requires stream=true", param="stream_options")


class ChatRequest(_Generation, kw_only=True):
    """The body of a chat completion."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reuse: bool = True

    @property
    def num_top_logprobs(self) -> int | None:
        """As `top_logprobs`, which is 0 by default."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs requires logprobs=true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def limit(self) -> int | None:
        """Returns the maximum number of new tokens; `max_tokens` is the deprecated name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def prompts(self, llm: "LanguageModel", document: "Document | None") -> list[list[int]]:
        """Returns the tokens of the prompt, or of the question to a document.

        Args:
            llm: the model.
            document: the document.

        Raises:
            RequestError: if messages are invalid.
        """
        messages = check_messages(self.messages)
        if document is None:
            return [llm.encode(messages, self.chat_template_kwargs)]
        if self.chat_template_kwargs:
            raise RequestError(
                "chat_template_kwargs cannot change a document; remove the field", param="chat_template_kwargs"
            )
        if document.messages is None:  # the model has no chat template
            raise RequestError("this document is a plain text; ask it at /v1/completions", param="document")
        return [document.encode(messages)]


class CompletionRequest(_Generation, kw_only=True):
    """The body of a text completion."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        """As `logprobs`."""
        return self.logprobs

    def limit(self) -> int | None:
        """Returns the maximum number of new tokens."""
        return _COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def prompts(self, llm: "LanguageModel", document: "Document | None") -> list[list[int]]:
        """Returns the tokens of every prompt.

        Args:
            llm: the model.
            document: the document that the prompts continue.

        Raises:
            RequestError: if there are too many prompts, or token ids are invalid.
        """
        parts: list[Any] = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if parts and all(isinstance(one, int) for one in parts):
            parts = [parts]
        if not parts or len({type(one) for one in parts}) > 1:
            raise RequestError("prompt must be a string, token ids, or a list of either", param="prompt")
        if len(parts) * self.n > MAX_CHOICES:
            raise RequestError(
                f"{len(parts)} prompts and n={self.n} exceed {MAX_CHOICES} sequences of a request", param="prompt"
            )
        size = llm.model.config.vocab_size
        if any(not 0 <= token < size for one in parts if isinstance(one, list) for token in one):
            raise RequestError(f"token ids of prompt must be from 0 to {size - 1}", param="prompt")
        if document is None:
            return [llm.encode(one) if isinstance(one, str) else one for one in parts]
        encode = llm.tokenizer.encode_continuation
        return [encode(one, document.tokens) if isinstance(one, str) else one for one in parts]


class DocumentRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a new document: one of `text` and `messages`."""

    id: str | None = None
    text: str | None = None
    messages: list[dict[str, Any]] | None = None

    def content(self) -> str | list[Message]:
        """Returns the text or the conversation.

        Raises:
            RequestError: if there is not exactly one, or it is empty.
        """
        if (self.text is None) == (self.messages is None):
            raise RequestError("a document has either text or messages", param="text")
        if self.messages is not None:
            return check_messages(self.messages)
        if not self.text:
            raise RequestError("text is empty", param="text")
        return self.text


def parse(kind: type[T], body: bytes) -> T:
    """Returns the body of a request.

    Args:
        kind: its type.
        body: JSON.

    Raises:
        RequestError: if it is not JSON, a field has another type, or a field is not supported.
    """
    try:
        values = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not a JSON object: {error}") from None
    values = {name: value for name, value in values.items() if value is not None and name not in _IGNORED}
    fields = kind.__struct_fields__
    for name, value in [*values.items()]:
        if name in fields:
            continue
        if not any(value == neutral and type(value) is type(neutral) for neutral in _NEUTRAL.get(name, ())):
            reason = _UNSUPPORTED.get(name, "this server does not have it; remove it")
            raise RequestError(f"field {name[:100]!r} is not supported: {reason}", param=name[:100])
        del values[name]
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        path = re.search(r"`\$\.?([^`\[.]*)|field `([^`]*)`", str(error))
        param = next((group for group in path.groups() if group), None) if path else None
        raise RequestError(str(error), param=param) from None


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Returns messages with role and content as text.

    Raises:
        RequestError: if the list is empty, or a message has other fields or content.
    """
    if not messages:
        raise RequestError("messages is empty; pass at least one", param="messages")
    return [_check_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _check_message(message: Mapping[str, Any], place: str) -> Message:
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise RequestError(f"{place}.role must be one of {', '.join(_ROLES)}", param="messages")
    for name, value in message.items():
        is_neutral = value is None or (name in _NEUTRAL_IN_MESSAGE and value == [])
        if name not in ("role", "content", "name") and not is_neutral:
            raise RequestError(f"{place}.{name[:100]} is not supported; remove it", param="messages")
    if isinstance(content, list):
        content = "\n".join(_text_of_part(part, place) for part in content)
    if content is None and role == "assistant":
        content = ""
    if not isinstance(content, str):
        raise RequestError(f"{place}.content must be a text or a list of text parts", param="messages")
    author = message.get("name")
    if not isinstance(author, str | None):
        raise RequestError(f"{place}.name must be a text", param="messages")
    return {"role": role, "content": content} | ({} if author is None else {"name": author})


def _text_of_part(part: Any, place: str) -> str:
    if not (isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text"):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise RequestError(f"{place}.content: parts must be of type 'text', got {str(kind)[:100]!r}", param="messages")
    if not isinstance(part["text"], str):
        raise RequestError(f"{place}.content: the text of a part must be a string", param="messages")
    return part["text"]
