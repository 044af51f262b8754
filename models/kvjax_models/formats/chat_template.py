"""Renders chat templates, which are untrusted code, in a sandboxed subprocess with limited time and memory.

Run as a program, this file is that subprocess. It imports nothing of the package so that it starts quickly.
"""

import datetime
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

SECONDS = 10
MEMORY_BYTES = 2**29
MAX_CHARACTERS = 2**24


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Renders a conversation.

    Templates omit messages of roles that they do not know. The conversation is therefore rendered a second time, with
    `probe` texts in place of the contents, and each of these must be in the result. If the template refuses them, the
    contents themselves must be in the first result.

    Args:
        template: Jinja template.
        messages: the messages.
        variables: variables that every template may use.
        options: variables that the user sets, and `continue_final_message`, as in transformers: whether the text ends
            with the content of the last message.

    Returns:
        The text.

    Raises:
        ValueError: if an option is unknown, the content of a message is omitted, or `_render` raises it.
        TypeError: if `options` is not a mapping.
    """
    options = {} if options is None else options
    values = {**(variables or {}), **_known_options(template, options)}
    is_continued = bool(options.get("continue_final_message"))
    conversation, probes = list(messages), [_with_probe(message, number) for number, message in enumerate(messages)]
    mark = probe(len(conversation))
    if is_continued:
        if options.get("add_generation_prompt"):
            raise ValueError("continue_final_message and add_generation_prompt exclude each other; pass one of them")
        values["add_generation_prompt"] = False
        conversation[-1:] = [_with_probe(message, len(conversation), append=True) for message in conversation[-1:]]
    text, omitted = _render(template, {**values, "messages": conversation}, probes)
    for number, message in enumerate(messages):
        if probes[number] is message:
            continue  # it has no text
        if omitted is None and isinstance(message["content"], str):
            is_omitted = message["content"].strip() not in text
        else:
            is_omitted = number in (omitted or ())
        if is_omitted:
            raise ValueError(
                f"the chat template omits the content of message {number}, whose role is {message.get('role')!r}; use "
                "roles that the template has, and put other texts into the user's message"
            )
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
    except (ValueError, RecursionError) as error:
        raise ValueError(f"template_options={text!r} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f'template_options={text!r} must be a JSON object such as {{"enable_thinking": false}}')
    return values


def probe(number: int) -> str:
    """Returns a text in place of the content of a message: digits, which no filter of a template changes."""
    return f"7040{number:06d}17"


def _with_probe(message: Mapping[str, Any], number: int, append: bool = False) -> Mapping[str, Any]:
    """Returns a message with a probe in place of its content; the message itself if it has no text.

    Args:
        message: the message.
        number: number of the probe.
        append: whether to append the probe and a space to the content instead.
    """

    def replace(text: str) -> str:
        return f"{text}{probe(number)} " if append else probe(number)

    content = message.get("content")
    if isinstance(content, str) and (content.strip() or append):
        return {**message, "content": replace(content)}
    if isinstance(content, list | tuple):  # parts such as {"type": "text", "text": "..."}
        texts = [i for i, part in enumerate(content) if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
        if texts and (append or content[texts[-1]]["text"].strip()):
            part = content[texts[-1]]
            parts = [*content[: texts[-1]], {**part, "text": replace(part["text"])}, *content[texts[-1] + 1 :]]
            return {**message, "content": parts}
    return message


def _known_options(template: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that are variables of a template.

    Args:
        template: Jinja template.
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


def _render(
    template: str, variables: Mapping[str, Any], probes: Sequence[Mapping[str, Any]]
) -> tuple[str, list[int] | None]:
    """Renders a template twice.

    Args:
        template: Jinja template.
        variables: its variables; they must be serializable as JSON.
        probes: messages of the second time.

    Returns:
        The first text, and the numbers of the probes that the second one lacks; None if the template refuses `probes`.

    Raises:
        ValueError: if the template is invalid, refuses the variables, or exceeds `SECONDS` or `MEMORY_BYTES`.
    """
    try:
        limits = {"seconds": SECONDS, "memory_bytes": MEMORY_BYTES, "max_characters": MAX_CHARACTERS}
        texts = [probe(number) for number in range(len(probes))]
        arguments = {"template": template, "variables": variables, "probes": probes, "probe_texts": texts}
        request = json.dumps(arguments | limits)
    except (TypeError, ValueError) as error:
        raise ValueError(f"messages and template_options must be serializable as JSON: {error}") from error
    command = [sys.executable, "-P", __file__]
    try:
        process = subprocess.run(
            command, input=request, capture_output=True, encoding="utf-8", timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"the chat template took more than {SECONDS} seconds") from None
    if process.returncode:
        reason = process.stderr.strip().rpartition("\n")[2] or f"terminated by signal {-process.returncode}"
        raise ValueError(f"the chat template failed or took more than {MEMORY_BYTES >> 20} MiB: {reason}")
    answer = json.loads(process.stdout)
    if "error" in answer:
        raise ValueError(f"the chat template refuses these messages: {answer['error']}")
    return answer["text"], answer["omitted"]


def _environment():
    """Returns a Jinja environment with the extensions that transformers gives to chat templates."""
    import jinja2.ext
    import jinja2.sandbox

    class GenerationTag(jinja2.ext.Extension):
        """Replaces {% generation %}, which marks the assistant's text for training, by its content."""

        tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        # Jinja's own filter escapes HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(pattern: str):
        return datetime.datetime.now().strftime(pattern)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment


def _set_limits(seconds: int, memory_bytes: int) -> None:
    """Limits time and memory of this process; on systems without `resource` only the parent's timeout applies."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rendered text and the numbers of the probes that are omitted, or the error."""
    import jinja2

    refusals = (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError)
    try:
        compiled = _environment().from_string(request["template"])
        text = compiled.render(request["variables"])
        text.encode("utf-8")  # refuses lone surrogates
    except refusals as error:
        return {"error": str(error) or type(error).__name__}
    except MemoryError:
        return {"error": "it exceeds its memory limit"}
    if len(text) > (maximum := request["max_characters"]):
        return {"error": f"it wrote {len(text)} characters; the maximum is {maximum}"}
    try:
        probed = compiled.render({**request["variables"], "messages": request["probes"]})
    except (*refusals, MemoryError):
        return {"text": text, "omitted": None}
    return {"text": text, "omitted": [i for i, one in enumerate(request["probe_texts"]) if one not in probed]}


if __name__ == "__main__":
    # Bytes, because the encoding of standard streams depends on the terminal.
    request = json.loads(sys.stdin.buffer.read().decode("utf-8"))
    _set_limits(request["seconds"], request["memory_bytes"])
    sys.stdout.write(json.dumps(_answer(request)))
