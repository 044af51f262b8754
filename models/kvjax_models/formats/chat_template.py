"""Chat templates: code from a file, run in a sandbox, in a process of its own that time and memory are measured out to.

Run as a program, this file is that process; it imports nothing of the package, so that it starts quickly.
"""

import datetime
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

SECONDS = 10
MEMORY_BYTES = 2**29
MOST_CHARACTERS = 2**24


def render(template: str, variables: Mapping[str, Any]) -> str:
    """What a template makes of its variables, which JSON must be able to hold.

    Raises:
        ValueError: where the template refuses them, is wrong, or takes more than `SECONDS` or `MEMORY_BYTES`.
    """
    try:
        limits = {"seconds": SECONDS, "memory_bytes": MEMORY_BYTES, "most_characters": MOST_CHARACTERS}
        given = json.dumps({"template": template, "variables": variables, **limits})
    except (TypeError, ValueError) as error:
        raise ValueError(f"messages must be made of what JSON can hold: {error}") from error
    command = [sys.executable, "-P", __file__]
    try:
        done = subprocess.run(command, input=given, capture_output=True, encoding="utf-8", timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"the chat template took more than {SECONDS} seconds") from None
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2] or f"it was ended by signal {-done.returncode}"
        raise ValueError(f"the chat template failed, or took more than {MEMORY_BYTES >> 20} MiB: {reason}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise ValueError(f"the chat template refuses these messages: {answer['error']}")
    return answer["text"]


def _environment():
    """The Jinja environment that transformers gives chat templates."""
    import jinja2.ext
    import jinja2.sandbox

    class GenerationTag(jinja2.ext.Extension):
        """{% generation %} marks what an assistant wrote, for training; here it is only its contents."""

        tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        # Jinja's own filter escapes HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment


def _limit(seconds: int, memory_bytes: int) -> None:
    """Measures out what this process may take; where the system cannot, its time alone is, by who waits for it."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def _answer(template: str, variables: Mapping[str, Any], most_characters: int) -> dict[str, str]:
    import jinja2

    try:
        text = _environment().from_string(template).render(variables)
        text.encode("utf-8")  # halves of characters are no text
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        return {"error": str(error) or type(error).__name__}
    except MemoryError:
        return {"error": "it takes more memory than it may"}
    if len(text) > most_characters:
        return {"error": f"it wrote {len(text)} characters; at most {most_characters} are read"}
    return {"text": text}


if __name__ == "__main__":
    # Bytes: what a terminal's encoding is does not matter.
    request = json.loads(sys.stdin.buffer.read().decode("utf-8"))
    _limit(request["seconds"], request["memory_bytes"])
    sys.stdout.write(json.dumps(_answer(request["template"], request["variables"], request["most_characters"])))
