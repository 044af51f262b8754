"""Calls of tools: forms of chat templates, grammars, and calls in texts that grow."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax_models.runner.constraints import constraint_of
from kvjax_models.runner.sampling import Sampling
from kvjax_models.tools import CallReader, Tool, form_of
from tests.models import chain

HERMES = "{% if tools %}<tools>{{ tools | tojson }}</tools><tool_call>{% endif %}"
MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS] ["
LLAMA3 = '{% if tools %}<|start_header_id|>{"name": function name, "parameters": {}}{% endif %}'
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/small"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"small": {"enum": [1, 2]}},
}
TOOLS = [Tool("add", ADD), Tool("now", {"type": "object", "properties": {}})]
ONE = {
    HERMES: '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 2}}\n</tool_call>',
    MISTRAL: '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 3, "b": 2}}]',
    LLAMA3: '{"name": "add", "parameters": {"a": 3, "b": 2}}',
}
NOW = '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TWO = {
    HERMES: ONE[HERMES] + NOW,
    MISTRAL: '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 3, "b": 2}}, {"name": "now", "arguments": {}}]',
}
EACH = pytest.mark.parametrize("template", [HERMES, MISTRAL, LLAMA3], ids=["hermes", "mistral", "llama3"])


@pytest.fixture(scope="module", params=[(), ("<tool_call>", "</tool_call>", "[TOOL_CALLS]")], ids=["texts", "tokens"])
def tokenizer(request):
    """With marks that are texts, and with marks that are tokens."""
    tokenizer = chain.make_llm([]).tokenizer
    tokenizer.backend.add_tokens([*request.param])
    return tokenizer


def accepts(tokenizer, grammar, text):
    """Returns whether a text is an answer of a grammar."""
    constraint = constraint_of(Sampling(grammar=grammar), tokenizer, 300)
    tokens = tokenizer.encode_continuation(text, context=())
    taken = constraint._matcher.try_consume_tokens(tokens)
    return taken == len(tokens) and constraint._matcher.is_accepting()


@EACH
def test_grammars(tokenizer, template):
    form = form_of(template)

    def is_answer(text, *, is_required=False, is_parallel=True, **options):
        options = {"is_required": is_required, "is_parallel": is_parallel, **options}
        return accepts(tokenizer, form.grammar(TOOLS, tokenizer, **options), text)

    one, two = ONE[template], TWO.get(template)
    assert is_answer(one) and is_answer(one, is_required=True, is_parallel=False)
    assert not is_answer(one.replace("3", '"3"')) and not is_answer(one.replace('"b": 2', '"b": 3'))
    assert not is_answer(one.replace("add", "subtract"), is_required=True)
    empty, full = (one.replace("add", "now").replace('"a": 3, "b": 2', text) for text in ("", '"zone": 1'))
    assert is_answer(empty) and not is_answer(full)
    assert is_answer("Just [a] text.") and not is_answer("Just a text.", is_required=True)
    if two is not None:
        assert is_answer(two) and is_answer(two, is_required=True) and not is_answer(two, is_parallel=False)
        assert is_answer(f"Let me see.\n{two}")
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    assert is_answer('{"x": 1}', answer_schema=schema) and is_answer(one, answer_schema=schema)
    assert not is_answer("Just a text.", answer_schema=schema)


def test_hermes_calls_may_have_no_mark_and_their_number_is_bounded(tokenizer):
    form = form_of(HERMES)
    grammar = form.grammar(TOOLS, tokenizer, is_required=True, is_parallel=True)
    assert accepts(tokenizer, grammar, ONE[HERMES] + 7 * NOW) and not accepts(tokenizer, grammar, ONE[HERMES] + 8 * NOW)
    grammar = form.grammar(TOOLS, tokenizer, is_required=False, is_parallel=True)
    text = '{"name": "now", "arguments": {}}\n{"name": "add", "arguments": {"a": 1, "b": 2}}'
    assert accepts(tokenizer, grammar, text)
    assert read(HERMES, [text]) == ("", [("now", {}), ("add", {"a": 1, "b": 2})])


@pytest.mark.parametrize(
    "name, arguments, is_call",
    [
        ("add", {"a": 1, "b": 2}, True),
        ("other", {}, False),
        ("add", {"a": 1}, False),  # lacks an argument
        ("now", {"properties": {}, "type": "object"}, False),  # small models repeat the schema
        ("now", [], False),
    ],
)
def test_a_block_of_code_may_be_a_call(name, arguments, is_call):
    text = f'```json\n{{\n  "name": "{name}",\n  "arguments": {json.dumps(arguments)}\n}}\n```'
    for pieces in ([text], [*text]):
        assert read(HERMES, pieces) == (("", [(name, arguments)]) if is_call else (text, []))


def test_arguments_that_the_schema_does_not_name():
    names = {"properties": {"a": {}}}
    for schema in ({}, names | {"additionalProperties": {}}, names | {"patternProperties": {"^b": {}}}):
        assert Tool("f", schema).takes({"b": 1}), schema
    assert not Tool("f", names).takes({"b": 1})


def read(template, pieces):
    """Returns the text and the calls of an answer in pieces."""
    reader = CallReader(form_of(template), TOOLS)
    parts = [reader.push(piece, is_finished=number == len(pieces) - 1) for number, piece in enumerate(pieces)]
    assert [call for _, calls in parts for call in calls] == reader.calls
    return "".join(text for text, _ in parts), [(one.name, json.loads(one.arguments)) for one in reader.calls]


@EACH
@given(data=st.data())
def test_pieces_do_not_change_what_is_read(template, data):
    before = data.draw(st.sampled_from(["", "See [1] <b> {x}:\n"])) if template != LLAMA3 else ""
    calls = TWO.get(template, ONE[template])
    text = before + calls
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    expected = [("add", {"a": 3, "b": 2}), ("now", {})][: 1 if template == LLAMA3 else 2]
    assert read(template, pieces) == (before, expected)


@EACH
def test_texts_without_calls_stay(template):
    cut = ONE[template][:-20]
    for text in ("", "A text.", "{", "<tool", "[TOOL", "[1, 2]", '{"x": 1}', "1 < 2 [", '{"name"', cut):
        for pieces in ([text], [*text] or [""]):
            assert read(template, pieces) == (text, [])


def test_calls_end_where_json_of_another_kind_follows():
    other = '{"name": "other", "arguments": {}}\n</tool_call>'
    assert read(HERMES, [*f"{ONE[HERMES]}\n<tool_call>\n{other}"]) == (other, [("add", {"a": 3, "b": 2})])


def test_calls_arrive_when_they_are_complete():
    reader = CallReader(form_of(HERMES), TOOLS)
    assert reader.push(ONE[HERMES] + NOW[:-15], is_finished=False)[1] == reader.calls and len(reader.calls) == 1
    assert reader.push(NOW[-15:], is_finished=True)[1] == reader.calls[1:] and len(reader.calls) == 2
    ids = [one.id for one in reader.calls]
    assert len({*ids}) == 2 and all(len(one) == 9 and one.isalnum() for one in ids)


def test_other_forms_are_unknown():
    for template in (
        None,
        "{{ messages[0].content }}",
        "<tool_call>",  # no tools
        "{% if tools %}<tool_call><function=name>{% endif %}",
        "{% if tools %}[TOOL_CALLS]name[ARGS]{}{% endif %}",
        "{% if tools %}<|channel|>{% endif %}",
    ):
        assert form_of(template) is None
