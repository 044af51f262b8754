"""Renders chat templates in Jinja's immutable sandbox, with the extensions that transformers gives them."""

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2.ext
import jinja2.sandbox


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Renders a conversation.

    Args:
        variables: variables that every template may use.
        options: variables that the user sets, and `continue_final_message`, as in transformers: whether the text ends
            with the content of the last message.

    Returns:
        The text.

    Raises:
        ValueError: if the template is invalid, refuses the messages, omits the content of one, or does not use an
            option.
        TypeError: if `options` is not a mapping.
    """
    options = {} if options is None else options
    values = {**(variables or {}), **_known_options(template, options)}
    is_continued = bool(options.get("continue_final_message"))
    mark = probe(len(messages))
    if is_continued:
        if options.get("add_generation_prompt"):
            raise ValueError("continue_final_message and add_generation_prompt exclude each other; pass one of them")
        values["add_generation_prompt"] = False
    last = [_with_text(message, f"{_text(message)}{mark} ") for message in messages[-1:] if is_continued]
    text = _render(template, {**values, "messages": [*messages[: len(messages) - len(last)], *last]})
    _check_contents(template, values, messages, text)
    if not is_continued:
        return text
    start, found, end = text.rpartition(mark)
    if not found:
        raise ValueError("continue_final_message requires a last message with a text that the chat template renders")
    return start if end.startswith(" ") else start.rstrip()  # as the template treats white space after the content


def parse_options(text: str) -> dict[str, Any]:
    """Returns the options in a JSON object, such as {"enable_thinking": false}.

    Raises:
        ValueError: if the text is anything else.
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"template_options={text!r} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f'template_options={text!r} must be a JSON object such as {{"enable_thinking": false}}')
    return values


def probe(number: int) -> str:
    """Returns a text in place of the content of a message: digits, which no filter of a template changes."""
    return f"7040{number:09d}17"


_PROBES = re.compile(r"(?=7040(\d{9})17)")  # also where other digits overlap with one


def _text(message: Mapping[str, Any]) -> str | None:
    """Returns the text of a message, or of its last part with a text; None if it has none."""
    content = message.get("content")
    if isinstance(content, list | tuple):  # parts such as {"type": "text", "text": "..."}
        content = next((part["text"] for part in reversed(content) if "text" in part), None)
    return content if isinstance(content, str) else None


def _with_text(message: Mapping[str, Any], text: str) -> Mapping[str, Any]:
    """Returns a message with another text; the message itself if it has none."""
    content: Any = message.get("content")
    if isinstance(content, str):
        return {**message, "content": text}
    if _text(message) is None:
        return message
    last = max(number for number, part in enumerate(content) if "text" in part)
    return {**message, "content": [*content[:last], {**content[last], "text": text}, *content[last + 1 :]]}


def _check_contents(template: str, values: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Checks that a template renders the content of every message: templates omit those of roles that they lack.

    Templates may change a content, so the conversation is rendered with probes, each of which must be in the result. If
    the template refuses them, the contents must be in the text.

    Args:
        values: variables of the template without the messages.
        text: the rendered messages.

    Raises:
        ValueError: if one is omitted.
    """
    # Llama's and Mistral's templates have no text before a tool call, which models may write.
    contents = ["" if message.get("tool_calls") else (_text(message) or "").strip() for message in messages]
    probes = [
        _with_text(message, probe(number)) if content else message
        for number, (message, content) in enumerate(zip(messages, contents, strict=True))
    ]
    try:
        found = {int(digits) for digits in _PROBES.findall(_render(template, {**values, "messages": probes}))}
    except ValueError:
        found = _find_in_order(contents, text)
    for number, content in enumerate(contents):
        if content and number not in found:
            raise ValueError(
                f"the chat template omits the content of message {number}, whose role is "
                f"{messages[number].get('role')!r}; use roles that the template has, and put other texts into the "
                "user's message"
            )


def _find_in_order(contents: Sequence[str], text: str) -> set[int]:
    """Returns the indices of the contents that are in a text, up to the first one that is not.

    Most templates keep the order of the messages. Each search starts after the previous content, so that the time is
    linear in the length of the text.
    """
    found, position = set[int](), 0
    for number, content in enumerate(contents):
        start = text.find(content, position)
        if start < 0 and (start := text.find(content)) < 0:
            break
        found.add(number)
        position = start + len(content)
    return found


def _known_options(template: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that are variables of a template.

    Args:
        options: the user's options.

    Raises:
        ValueError: if the template does not use one of them.
        TypeError: if `options` is not a mapping with strings as keys.
    """
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise TypeError(f"template_options={options!r} must be a dictionary of names and values")
    known = {name: value for name, value in options.items() if name != "continue_final_message"}
    for name in known:
        if name == "messages" or not re.search(rf"\b{re.escape(name)}\b", template):
            raise ValueError(f"template_options: the chat template does not use {name!r}; remove it")
    return known


def _render(template: str, variables: Mapping[str, Any]) -> str:
    """Returns the text of a template.

    Raises:
        ValueError: if the template is invalid or refuses the variables.
    """
    try:
        return _compile(template).render(variables)
    except Exception as error:  # a template raises what the operations in it raise
        raise ValueError(f"the chat template refuses these messages: {error or type(error).__name__}") from error


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    """Returns a template with the filters, functions and tags that transformers gives to chat templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment.from_string(template)


class _GenerationTag(jinja2.ext.Extension):
    """Replaces {% generation %}, which marks the assistant's text for training, by its content."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Returns JSON; Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
