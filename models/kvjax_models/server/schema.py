"""Bodies of requests: OpenAI's fields that this server implements, with strict types.

A field with the value null is absent. Fields that do not change an answer are ignored, and so are values of others that
ask for nothing. Every other field is refused by name, because the answer would not be the one that the client expects.
"""

import dataclasses
import functools
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec

from kvjax_models.prompts import Message
from kvjax_models.runner.sampling import Sampling
from kvjax_models.server.errors import RequestError

if TYPE_CHECKING:
    from kvjax_models.cache import CachedModel
    from kvjax_models.document import Document
    from kvjax_models.tokenized_model import TokenizedModel

T = TypeVar("T", bound=msgspec.Struct)

MAX_CHOICES = 128  # sequences of a request, as in OpenAI's interface
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
_UNSUPPORTED = {
    "tools": "this server does not call tools",
    "response_format": "this server does not constrain answers; only {'type': 'text'} is possible",
    "reuse": "only chat completions continue earlier answers",
}


_Tokens = Annotated[int, msgspec.Meta(ge=1)]
_Empty = Annotated[list[Any], msgspec.Meta(max_length=0)]
_Stop = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]


class TextPart(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A part of a message's content; other types are refused."""

    text: str


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A message; fields of answers that clients send back must be null or empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: _Empty = ()  # type: ignore[assignment]
    annotations: _Empty = ()  # type: ignore[assignment]
    audio: _Empty = ()  # type: ignore[assignment]
    function_call: _Empty = ()  # type: ignore[assignment]
    tool_calls: _Empty = ()  # type: ignore[assignment]

    def as_message(self) -> Message:
        """Returns role, content as text, and the name if there is one."""
        content = self.content
        if content is None and self.role != "assistant":
            raise RequestError("content of messages must be a text or a list of text parts", param="messages")
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        return {"role": self.role, "content": content or ""} | ({} if self.name is None else {"name": self.name})


_Messages = Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # ignored: chunks have no padding


class _Generation(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of both kinds of completions."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: _Tokens | None = None
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: _Stop | Annotated[list[_Stop], msgspec.Meta(max_length=16)] = ()  # type: ignore[assignment]
    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] = 1
    document: str | None = None
    cite: bool = False
    parse_special: bool | None = None

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


class ChatRequest(_Generation, kw_only=True):
    """The body of a chat completion."""

    messages: _Messages
    max_completion_tokens: _Tokens | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reuse: bool | None = None  # by default where it changes no answer

    @property
    def num_top_logprobs(self) -> int | None:
        """As `top_logprobs`, which is 0 by default."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs requires logprobs=true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def as_messages(self) -> list[Message]:
        """Returns the messages; an invalid one raises a RequestError."""
        return [message.as_message() for message in self.messages]

    def limit(self) -> int | None:
        """Returns the maximum number of new tokens; `max_tokens` is the deprecated name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def prompts(self, llm: "TokenizedModel", document: "Document | None") -> list[list[int]]:
        """Returns the tokens of the prompt, or of the question to a document.

        Args:
            llm: the model.
            document: the document.

        Raises:
            RequestError: if messages are invalid.
        """
        messages = self.as_messages()
        if document is None:
            return [llm.encode(messages, self.chat_template_kwargs)]
        if document.messages is None:  # the model has no chat template
            raise RequestError("this document is a plain text; ask it at /v1/completions", param="document")
        return [document.encode(messages, template_options=self.chat_template_kwargs)]


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

    def prompts(self, llm: "TokenizedModel", document: "Document | None") -> list[list[int]]:
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
        tokenizer = llm.tokenizer
        encode = functools.partial(tokenizer.encode_continuation, context=document.tokens)
        return [encode(tokenizer.escape(one)) if isinstance(one, str) else one for one in parts]


class DocumentRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a new document: one of `text` and `messages`."""

    id: str | None = None
    text: str | None = None
    messages: _Messages | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parse_special: bool | None = None

    def content(self) -> str | list[Message]:
        """Returns the text or the conversation.

        Raises:
            RequestError: if there is not exactly one, or it is empty.
        """
        if (self.text is None) == (self.messages is None):
            raise RequestError("a document has either text or messages", param="text")
        if self.messages is not None:
            return [message.as_message() for message in self.messages]
        if not self.text:
            raise RequestError("text is empty", param="text")
        return self.text


def with_special(cache: "CachedModel", parse_special: bool | None) -> "CachedModel":
    """Returns a cache whose tokenizer parses special tokens in texts, or keeps them text.

    Args:
        cache: the cache of a model.
        parse_special: whether special tokens are parsed; None for the server's option.
    """
    tokenizer = cache.llm.tokenizer
    if parse_special in (None, tokenizer.parse_special):
        return cache
    tokenizer = dataclasses.replace(tokenizer, parse_special=bool(parse_special))
    return dataclasses.replace(cache, llm=dataclasses.replace(cache.llm, tokenizer=tokenizer))


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
    if isinstance(messages := values.get("messages"), list):  # the client openai sends back fields that are null
        values["messages"] = [
            {name: value for name, value in one.items() if value is not None} if isinstance(one, dict) else one
            for one in messages
        ]
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        param = re.search(r"`\$\.([^`\[.]*)", str(error)) or re.search(r"field `([^`]*)`", str(error))
        raise RequestError(str(error), param=param and param[1]) from None
