"""Renders chat templates, which are untrusted code, in a sandboxed subprocess with limited time and memory.

Run as a program, this file is that subprocess. It imports nothing of the package so that it starts quickly.
"""

import datetime
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

SECONDS = 10
MEMORY_BYTES = 2**29
MAX_CHARACTERS = 2**24


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Renders a template.

    Args:
        template: Jinja template.
        variables: its variables; they must be serializable as JSON.

    Returns:
        The text.

    Raises:
        ValueError: if the template is invalid, refuses the variables, or exceeds `SECONDS` or `MEMORY_BYTES`.
    """
    try:
        limits = {"seconds": SECONDS, "memory_bytes": MEMORY_BYTES, "max_characters": MAX_CHARACTERS}
        request = json.dumps({"template": template, "variables": variables, **limits})
    except (TypeError, ValueError) as error:
        raise ValueError(f"messages must be serializable as JSON: {error}") from error
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
    return answer["text"]


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


def _answer(template: str, variables: Mapping[str, Any], max_characters: int) -> dict[str, str]:
    """Returns the rendered text, or the error."""
    import jinja2

    try:
        text = _environment().from_string(template).render(variables)
        text.encode("utf-8")  # refuses lone surrogates
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        return {"error": str(error) or type(error).__name__}
    except MemoryError:
        return {"error": "it exceeds its memory limit"}
    if len(text) > max_characters:
        return {"error": f"it wrote {len(text)} characters; the maximum is {max_characters}"}
    return {"text": text}


if __name__ == "__main__":
    # Bytes, because the encoding of standard streams depends on the terminal.
    request = json.loads(sys.stdin.buffer.read().decode("utf-8"))
    _set_limits(request["seconds"], request["memory_bytes"])
    sys.stdout.write(json.dumps(_answer(request["template"], request["variables"], request["max_characters"])))
