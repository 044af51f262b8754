"""Bodies of requests: OpenAI's fields that this server implements, with strict types.

A field with the value null is absent. Fields that do not change an answer are ignored, and so are values of others that
ask for nothing. Every other field is refused by name, because the answer would not be the one that the client expects.
"""

import dataclasses
import functools
import json
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec

from kvjax_models.citations import SEPARATOR
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.prompts import Message
from kvjax_models.runner.sampling import Sampling
from kvjax_models.server.errors import RequestError
from kvjax_models.tools import Form, Tool, form_of

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
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "reuse": (False,),
}
_UNSUPPORTED = {
    "tools": "only chat completions call tools",
    "functions": "it is deprecated; use tools",
    "function_call": "it is deprecated; use tool_choice",
    "reuse": "only chat completions continue earlier answers",
}


_KINDS = {  # the possible types of some parts
    r"\.content\[\d+\]\.type`": "this server reads text only, as parts of type 'text'",
    r"\.tools\[\d+\]\.type`": "the client's functions are the only tools",
}

_Tokens = Annotated[int, msgspec.Meta(ge=1)]
_Empty = Annotated[list[Any], msgspec.Meta(max_length=0)]
_Stop = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]


class _Strict(msgspec.Struct, forbid_unknown_fields=True):
    """An object whose unknown fields are refused."""


class TextPart(_Strict, tag_field="type", tag="text"):
    """A part of a message's content; other types are refused."""

    text: str


class CalledFunction(_Strict):
    """Name and arguments, as JSON, of a call."""

    name: str
    arguments: str = "{}"


class CalledTool(_Strict):
    """A call in an earlier answer."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None

    def as_call(self) -> dict[str, Any]:
        """Returns the call as chat templates take it: with its arguments as an object."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise RequestError("arguments of tool_calls must be a JSON object in a string", param="messages")
        function = {"name": self.function.name, "arguments": arguments}
        return {"type": "function", "function": function} | ({} if self.id is None else {"id": self.id})


class ChatMessage(_Strict, omit_defaults=True):
    """A message; fields of answers that clients send back without use must be null or empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] = []
    tool_call_id: str | None = None
    refusal: _Empty = []
    annotations: _Empty = []
    audio: _Empty = []
    function_call: _Empty = []

    def as_message(self) -> Message:
        """Returns the fields that the message has as chat templates take them: with the content as text."""
        content = self.content
        if content is None and self.role != "assistant":
            raise RequestError("content of messages must be a text or a list of text parts", param="messages")
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        message: dict[str, Any] = {**msgspec.to_builtins(self), "content": content or ""}
        if self.tool_calls:
            message["tool_calls"] = [one.as_call() for one in self.tool_calls]
        return message


class Function(_Strict):
    """A function of the client."""

    name: Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # calls always follow the schema


class FunctionTool(_Strict, tag_field="type", tag="function"):
    """A tool that the model may call; other types are refused."""

    function: Function

    def as_option(self) -> dict[str, Any]:
        """Returns the tool as chat templates take it."""
        function: dict[str, Any] = {"name": self.function.name, "description": self.function.description or ""}
        function["parameters"] = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class _Named(_Strict):
    name: str


class NamedTool(_Strict, tag_field="type", tag="function"):
    """The tool that the model must call."""

    function: _Named


class TextFormat(_Strict, tag_field="type", tag="text"):
    """Any answer."""


class ObjectFormat(_Strict, tag_field="type", tag="json_object"):
    """An answer that is any JSON object."""


class _Schema(_Strict, rename={"content": "schema"}):
    name: str | None = None
    content: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None  # answers always follow the schema


class SchemaFormat(_Strict, tag_field="type", tag="json_schema"):
    """An answer that is JSON with a schema."""

    json_schema: _Schema


_Messages = Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]


class StreamOptions(_Strict):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # ignored: chunks have no padding


class _Generation(_Strict, kw_only=True):
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
    stop: _Stop | Annotated[list[_Stop], msgspec.Meta(max_length=16)] = []
    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] = 1
    logit_bias: dict[str, float] = {}
    response_format: TextFormat | ObjectFormat | SchemaFormat = msgspec.field(default_factory=TextFormat)
    document: str | None = None
    cite: bool = False
    parse_special: bool | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of alternatives of each token; None without log-probabilities."""
        raise NotImplementedError

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """The schema of the answer; None for any text."""
        if isinstance(self.response_format, SchemaFormat):
            return self.response_format.json_schema.content or {"type": "object"}
        return {"type": "object"} if isinstance(self.response_format, ObjectFormat) else None

    def sampling(self, tokenizer: Tokenizer) -> Sampling:
        """Returns the sampling parameters for a model with a `tokenizer`; invalid ones raise a ValueError."""
        if wrong := next((one for one in self.logit_bias if not one.isdecimal()), None):
            raise RequestError(f"logit_bias has the key {wrong[:100]!r}; keys are token ids", param="logit_bias")
        return Sampling(
            temperature=self.temperature,
            top_k=None if self.top_k in (0, -1) else self.top_k,  # as in vLLM and llama.cpp: all tokens
            top_p=self.top_p,
            min_p=self.min_p or None,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logprobs=self.num_top_logprobs,
            logit_bias={int(token): value for token, value in self.logit_bias.items()},
            **self.constraint(tokenizer),
        )

    def constraint(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Returns the schema or the grammar of the answer, as `Sampling` has them."""
        return {"json_schema": self.json_schema}


class ChatRequest(_Generation, kw_only=True):
    """The body of a chat completion."""

    messages: _Messages
    max_completion_tokens: _Tokens | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reuse: bool | None = None  # by default where it changes no answer
    tools: list[FunctionTool] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True

    @property
    def num_top_logprobs(self) -> int | None:
        """As `top_logprobs`, which is 0 by default."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs requires logprobs=true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def as_messages(self) -> list[Message]:
        """Returns the messages; an invalid one raises a RequestError."""
        return [message.as_message() for message in self.messages]

    def call_form(self, tokenizer: Tokenizer) -> Form | None:
        """Returns how the model writes calls of tools; None if it may not call any.

        Raises:
            RequestError: if that is not known for the model, or tools and another field exclude each other.
        """
        if not self.tools or self.tool_choice == "none":
            if self.tool_choice not in ("none", "auto"):
                raise RequestError("tool_choice requires tools", param="tool_choice")
            return None
        if self.document is not None:
            raise RequestError("tools and a document exclude each other", param="tools")
        if (form := form_of(tokenizer.chat_template)) is None:
            raise RequestError(
                "the chat template of this model has no tools, or another form of calls than Hermes, Qwen, Llama 3 and "
                "Mistral",
                param="tools",
            )
        return form

    def calls(self, tokenizer: Tokenizer) -> tuple[Form, list[Tool]] | None:
        """Returns the form of calls and the tools; None if the model may not call any."""
        form = self.call_form(tokenizer)
        return None if form is None else (form, self._functions)

    @property
    def _functions(self) -> list[Tool]:
        """The tools as the parser of calls takes them."""
        return [Tool(one.function.name, one.function.parameters or {}) for one in self.tools]

    def constraint(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """As for other requests; with tools, a grammar of calls."""
        if (form := self.call_form(tokenizer)) is None:
            return super().constraint(tokenizer)
        choice = self.tool_choice
        tools = self._functions
        if isinstance(choice, NamedTool):
            tools = [one for one in tools if one.name == choice.function.name]
            if not tools:
                raise RequestError(
                    f"tool_choice names {choice.function.name[:100]!r}, which is not among the tools",
                    param="tool_choice",
                )
        return {
            "grammar": form.grammar(
                tools,
                tokenizer,
                is_required=choice != "auto",
                is_parallel=self.parallel_tool_calls,
                answer_schema=self.json_schema,
            )
        }

    def limit(self) -> int | None:
        """Returns the maximum number of new tokens; `max_tokens` is the deprecated name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def prompts(self, llm: "TokenizedModel", document: "Document | None") -> list[list[int]]:
        """Returns the tokens of the prompt, or of the question to a document.

        Args:
            llm: the model.

        Raises:
            RequestError: if messages are invalid.
        """
        messages, options = self.as_messages(), self.chat_template_kwargs
        if document is None:
            if self.tools and self.tool_choice != "none":
                options = {**(options or {}), "tools": [one.as_option() for one in self.tools]}
            return [llm.encode(messages, options)]
        if document.messages is None:  # the model has no chat template
            raise RequestError("this document is a plain text; ask it at /v1/completions", param="document")
        if len(messages) > 1 and messages[0]["role"] in ("system", "developer") and messages[1]["role"] == "user":
            # The text is read already, so instructions precede the question.
            texts = [message["content"] for message in messages[:2]]
            messages = [{**messages[1], "content": SEPARATOR.join(texts)}, *messages[2:]]
        return [document.encode(messages, template_options=options)]


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


GenerationRequest = ChatRequest | CompletionRequest


class DocumentRequest(_Strict):
    """The body of a new document: one of `text` and `messages`; `full_cache` also makes one with a full cache."""

    id: str | None = None
    text: str | None = None
    messages: _Messages | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parse_special: bool | None = None
    full_cache: bool = False

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


def text_document(data: bytes, fields: dict[str, str]) -> DocumentRequest:
    """Returns the request of a document that is sent as plain text.

    Args:
        data: the text, in UTF-8.
        fields: `id` and `full_cache`, as text.

    Raises:
        RequestError: if it is not a text, or a field is not known.
    """
    try:
        text: str | None = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = None
    if text is None or "\0" in text:
        raise RequestError(
            "the file is not a text in UTF-8; other formats, such as PDF, must be converted", param="file"
        )
    if unknown := next((name for name in fields if name not in ("id", "full_cache")), None):
        raise RequestError(f"field {unknown[:100]!r} is not supported; remove it", param=unknown[:100])
    if (full_cache := fields.get("full_cache", "false")) not in ("true", "false"):
        raise RequestError(f"full_cache={full_cache[:100]!r} must be true or false", param="full_cache")
    return DocumentRequest(id=fields.get("id"), text=text, full_cache=full_cache == "true")


def with_special(cache: "CachedModel", parse_special: bool | None) -> "CachedModel":
    """Returns a cache whose tokenizer parses special tokens in texts, or keeps them text.

    Args:
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
        message = str(error)
        param = re.search(r"`\$\.([^`\[.]*)", message) or re.search(r"field `([^`]*)`", message)
        for place, reason in _KINDS.items():
            if re.search(place, message):
                message += f"; {reason}"
        raise RequestError(message, param=param and param[1]) from None
