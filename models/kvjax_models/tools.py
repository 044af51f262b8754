r"""Calls of tools: the grammar of answers with calls, and the calls in an answer.

Models write calls as text, in the form that their chat template shows them. `form_of` knows three:

    Hermes, Qwen    <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>
    Llama 3         {"name": "add", "parameters": {"a": 1}}
    Mistral         [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]
"""

import dataclasses
import json
import re
import secrets
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.runner.constraints import JSON_STYLE

_ID_CHARACTERS, _ID_LENGTH = string.ascii_letters + string.digits, 9  # Mistral's templates refuse other ids
_BETWEEN = re.compile(r"(?:\[TOOL_CALLS\]|</?tool_call>|```(?:json)?|[\s,;\[\]])*")  # before, between and after calls
_MAX_CALLS = 8  # of an answer: small models repeat calls until the limit of tokens


class Tool(NamedTuple):
    """A function that the model may call.

    Attributes:
        name: its name.
        parameters: JSON schema of its arguments, which are an object.
    """

    name: str
    parameters: Mapping[str, Any]

    def takes(self, arguments: Any) -> bool:
        """Returns whether a call has the required arguments, and no others than the schema names.

        Calls after a mark follow the schema by their grammar; a call in a block of code is not constrained.
        """
        if not isinstance(arguments, dict) or not {*self.parameters.get("required", ())} <= arguments.keys():
            return False
        if "properties" not in self.parameters or "patternProperties" in self.parameters:
            return True
        allows_others = self.parameters.get("additionalProperties", False) is not False
        return allows_others or arguments.keys() <= {*self.parameters["properties"]}


class ToolCall(NamedTuple):
    """A call of a tool.

    Attributes:
        id: id to which the result refers.
        name: name of the tool.
        arguments: its arguments, as JSON.
    """

    id: str
    name: str
    arguments: str


@dataclasses.dataclass(frozen=True)
class Form:
    """How calls are written.

    Attributes:
        arguments: name of the field with the arguments.
        mark: token or text before calls, or "".
        end: token or text after a call, or "".
        one: rule of the grammar for a call, where MARK and END stand for these, and MORE for further calls.
        several: rule for one call or several.
        bare: rule for calls without a mark, which models write, too; None if they are text.
        starts: texts with which calls start; an answer's text lacks a mark that is a special token.
        first: texts with which calls start at the beginning of an answer. Some models write calls into a block of code.
    """

    arguments: str
    mark: str
    end: str
    one: str
    several: str
    bare: str | None = None
    starts: tuple[str, ...] = ()
    first: tuple[str, ...] = ()

    def grammar(
        self,
        tools: Sequence[Tool],
        tokenizer: Tokenizer,
        *,
        is_required: bool,
        is_parallel: bool,
        answer_schema: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the grammar of an answer, for `Sampling.grammar`.

        Args:
            tools: the tools that may be called.
            is_required: whether the answer is a call; otherwise it may be a text, or a text before calls.
            is_parallel: whether there may be several calls.
            answer_schema: schema of an answer without calls; None for any text.
        """
        mark, end = _terminal(self.mark, tokenizer), _terminal(self.end, tokenizer)
        is_token = mark.startswith("<")

        def written(rule: str) -> str:
            return rule.replace("MARK", mark).replace("END", end).replace("MORE", str(_MAX_CALLS - 1))

        calls = self.several if is_parallel else self.one
        rules = [f"calls: {written(calls)}"]
        text = "(?s:.*)" if self.bare is None else "[^{](?s:.*)"
        bare = "" if self.bare is None else f" | {written(self.bare) if is_parallel else 'call'}"
        if is_required:
            rules.append("start: calls")
        elif answer_schema is not None:
            rules += [
                "start: calls | answer",
                f"answer: %json {json.dumps({**answer_schema, 'x-guidance': JSON_STYLE})}",
            ]
        elif is_token or not self.mark:
            rules += [f"start: TEXT? {'calls?' if self.mark else ''}{bare}", f"TEXT: /{text}/"]
        else:  # a text ends with the mark, or has none: a grammar of texts cannot look ahead
            pattern = re.escape(self.mark)
            rules += [f"start: TEXT? | before after_mark{bare}", f"TEXT: /{text}/ & ~/(?s:.*){pattern}(?s:.*)/"]
            rules += [f"before[lazy]: /({text})?{pattern}/", f"after_mark: {written(calls.replace('MARK', '', 1))}"]
        rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
        rules += [f"call_{index}: %json {json.dumps(self._schema(tool))}" for index, tool in enumerate(tools)]
        return "\n".join(rules)

    def _schema(self, tool: Tool) -> dict[str, Any]:
        parameters: dict[str, Any] = {"type": "object", **tool.parameters}
        if "properties" in parameters:  # a function takes the arguments that it names
            parameters.setdefault("additionalProperties", False)
        # References in it begin at the root.
        definitions = {name: parameters.pop(name, {}) for name in ["$defs", "definitions"]}
        return {
            "type": "object",
            "properties": {"name": {"const": tool.name}, self.arguments: parameters},
            "required": ["name", self.arguments],
            "additionalProperties": False,
            "x-guidance": JSON_STYLE,
            **definitions,
        }

    def find(self, text: str) -> tuple[int | None, int]:
        """Finds the first call.

        Returns:
            Where it starts, or None, and the length of the text before it, whatever follows.
        """
        stripped = text.lstrip()
        if self.first and stripped.startswith(self.first):
            place = len(text) - len(stripped)
            return place, place
        if any(start.startswith(stripped) for start in self.first):
            return None, 0
        places = [place for start in self.starts if (place := text.find(start)) >= 0]
        if places:
            return min(places), min(places)
        ends = (start[:size] for start in self.starts for size in range(1, len(start)))
        return None, len(text) - max((len(end) for end in ends if text.endswith(end)), default=0)

    def read(self, text: str, tools: Mapping[str, Tool]) -> tuple[list[tuple[str, str]], int]:
        """Reads calls.

        Args:
            text: text that starts with calls.
            tools: the tools by name; JSON that no tool takes is not a call.

        Returns:
            Name and arguments of the complete calls, and where they end.
        """
        calls: list[tuple[str, str]] = []
        end = _length_between(text, 0)
        while end < len(text):
            try:
                call, place = json.JSONDecoder().raw_decode(text, end)
                name, arguments = call["name"], call.get(self.arguments, {})
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                break
            if name not in tools or not tools[name].takes(arguments):
                break
            calls.append((name, json.dumps(arguments, ensure_ascii=False)))
            end = _length_between(text, place)
        return calls, end


def _length_between(text: str, start: int) -> int:
    match = _BETWEEN.match(text, start)
    assert match is not None
    return match.end()


def _terminal(text: str, tokenizer: Tokenizer) -> str:
    """Returns a token, or a text, as a grammar has it."""
    number = tokenizer.backend.token_to_id(text)
    is_added = number in tokenizer.backend.get_added_tokens_decoder()
    return f"<[{number}]>" if is_added else json.dumps(text)


_HERMES = Form(
    "arguments", "<tool_call>", "</tool_call>", r'MARK "\n" call "\n" END',
    r'MARK "\n" call "\n" END ("\n" MARK "\n" call "\n" END){0,MORE}', r'call ("\n" call){0,MORE}', ("<tool_call>",),
    ('{"name": ', "```json\n{"),
)  # fmt: skip
_MISTRAL = Form(
    "arguments", "[TOOL_CALLS]", "", 'MARK " [" call "]"', 'MARK " [" call (", " call){0,MORE} "]"',
    starts=("[TOOL_CALLS]", '[{"name": '),
)  # fmt: skip
_LLAMA3 = Form("parameters", "", "", "call", "call", "call", first=('{"name": ',))


def form_of(chat_template: str | None) -> Form | None:
    """Returns how a chat template has the model write calls; None if it has no tools, or another form."""
    template = chat_template or ""
    if not re.search(r"\btools\b", template):
        return None
    if "<tool_call>" in template:
        return None if "<function=" in template or "<arg_key>" in template else _HERMES
    if "[TOOL_CALLS]" in template:
        return None if "[ARGS]" in template else _MISTRAL
    return _LLAMA3 if "<|start_header_id|>" in template and '"parameters"' in template else None


class CallReader:
    """Separates the text of an answer from its calls, while it grows.

    Attributes:
        calls: the calls up to now.
    """

    def __init__(self, form: Form, tools: Iterable[Tool]) -> None:
        """Starts an answer.

        Args:
            form: how calls are written.
        """
        self._form, self._text, self._num_taken = form, "", 0
        self._tools = {tool.name: tool for tool in tools}
        self.calls: list[ToolCall] = []

    def push(self, text: str, *, is_finished: bool) -> tuple[str, list[ToolCall]]:
        """Appends text.

        Args:
            is_finished: whether it is the last one.

        Returns:
            The new text outside of calls, and the new calls. In the end, a call that is not complete is text.
        """
        self._text += text
        start, end = self._form.find(self._text)
        new: list[ToolCall] = []
        if start is not None:
            calls, length = self._form.read(self._text[start:], self._tools)
            new = [ToolCall(_new_id(), *call) for call in calls[len(self.calls) :]]
            self.calls += new
            if is_finished:  # an incomplete call, or what follows the calls
                before = self._text[self._num_taken : start]
                after = self._text[start + length :] if calls else self._text[start:]
                if calls and self._form.end.startswith(after):  # cut within the end of a call
                    after = ""
                self._num_taken = len(self._text)
                return before + after, new
        end = len(self._text) if is_finished else end
        content, self._num_taken = self._text[self._num_taken : end], max(self._num_taken, end)
        return content, new


def _new_id() -> str:
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))
