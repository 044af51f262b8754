"""`kvjax serve`: answers in JSON, calls of tools, and texts that are sent as files."""

import json

import openai
import pydantic
import pytest

from tests.models import chain
from tests.models.serving import CHAT, DOCUMENTS, MODEL, TEXT, Server, ask, body, user

TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% for message in messages %}[{{ message.role }}]"
    "{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}"
    "{% endfor %}"
)
CHAINS = [[b"?", b"Fine", b"."], [b".", None]]
SIZES = {"max_prompt_tokens": 1024, "max_new_tokens": 256}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
FORCED = {"type": "function", "function": {"name": "weather"}}


class Ship(pydantic.BaseModel):
    kind: str = pydantic.Field(max_length=4)
    masts: int = pydantic.Field(ge=1, le=9)


@pytest.fixture(scope="module")
def server():
    with Server(chain.make_llm(CHAINS, TEMPLATE, max_length=2048).cache(), SIZES) as one:
        yield one


def test_openai_client_parses_answers(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    options = {"model": MODEL, "messages": [user("A ship?")], "seed": 1}
    parsed = client.chat.completions.parse(response_format=Ship, **options).choices[0]
    assert parsed.finish_reason == "stop" and 1 <= parsed.message.parsed.masts <= 9
    options |= {"tools": [openai.pydantic_function_tool(Ship)], "tool_choice": "required", "parallel_tool_calls": False}
    [call] = client.chat.completions.parse(**options).choices[0].message.tool_calls
    assert call.function.name == "Ship" and isinstance(call.function.parsed_arguments, Ship)
    with client.chat.completions.stream(**options) as stream:
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)


def test_calls(server):
    options = {"tools": [NOW, WEATHER], "tool_choice": FORCED, "parallel_tool_calls": False, "n": 2}
    status, answer = server.chat("Weather?", temperature=0, **options)
    assert status == 200 and answer["usage"]["completion_tokens"] > 0
    for one in answer["choices"]:
        [call] = one["message"]["tool_calls"]
        assert one["finish_reason"] == "tool_calls" and one["message"]["content"] is None
        assert call["type"] == "function" and call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
    choices = [
        one for event in server.stream(CHAT, **body(CHAT, "Weather?", **options))[1][:-1] for one in event["choices"]
    ]
    for expected in answer["choices"]:
        parts = [one for one in choices if one["index"] == expected["index"]]
        assert parts[0]["delta"]["role"] == "assistant" and parts[-1]["finish_reason"] == "tool_calls"
        [call] = [call for one in parts for call in one["delta"].get("tool_calls", ())]
        assert call["index"] == 0 and call["function"] == expected["message"]["tool_calls"][0]["function"]
        assert not any(one["delta"].get("content") for one in parts)


def test_tools_that_are_not_called(server):
    for options in ({"tools": [WEATHER, NOW]}, {"tools": [WEATHER], "tool_choice": "none"}, {}):
        status, answer = server.chat("Well?", temperature=0, **options)
        choice = answer["choices"][0]
        assert status == 200 and choice["message"]["content"] == "Fine." and "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"
    plain = server.chat("Well?", tools=[WEATHER], tool_choice="none")[1]["usage"]["prompt_tokens"]
    assert server.chat("Well?")[1]["usage"]["prompt_tokens"] == plain
    assert server.chat("Well?", tools=[WEATHER])[1]["usage"]["prompt_tokens"] > plain


def test_earlier_calls_are_part_of_the_prompt(server):
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        user("Weather?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "Rain?"},
    ]
    status, answer = server.chat(messages, temperature=0)
    assert status == 200 and answer["choices"][0]["message"]["content"] == "Fine."
    text = "[user]Weather?[assistant]Rome[tool]Rain?"
    assert answer["usage"]["prompt_tokens"] == len(text)
    call["function"]["arguments"] = "Rome"
    status, answer = server.chat(messages)
    assert status == 400 and "arguments of tool_calls must be a JSON object" in answer["error"]["message"]


def test_answers_in_json(server):
    schema = {"name": "ship", "schema": Ship.model_json_schema(), "strict": True}
    options = {"response_format": {"type": "json_schema", "json_schema": schema}, "max_tokens": 60, "seed": 3}
    for path in (CHAT, TEXT):
        entire, streamed = (ask(server, path, stream, "?", temperature=1, **options) for stream in (False, True))
        [(text, reason, _)] = entire[0]
        assert Ship.model_validate_json(text) and reason == "stop" and entire == streamed
    [(text, _, _)], _ = ask(server, CHAT, False, "?", response_format={"type": "json_object"}, max_tokens=10)
    assert text.startswith("{")


def test_biases(server):
    token = server.worker.cache.llm.tokenizer.backend.token_to_id("Fine")
    [(text, _, _)], _ = ask(server, CHAT, False, "Anything", logit_bias={str(token): 100})  # otherwise equal logits
    assert text == "Fine."


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, "the client's functions are the only tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice requires tools"),
        ({"tools": [NOW], "tool_choice": FORCED}, "'weather', which is not among the tools"),
        ({"tools": [NOW], "document": "x"}, "exclude each other"),
        ({"tools": [{**NOW, "function": {"name": "f", "parameters": {"type": 3}}}]}, "is not possible"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}}, "Invalid type"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"logit_bias": {"a": 1}}, "keys are token ids"),
        ({"logit_bias": {"5": 101}}, "from -100 to 100"),
        ({"logit_bias": {"99999": 1}}, "the model has tokens 0 to"),
        ({"functions": [{"name": "f"}]}, "use tools"),
        ({"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}])]}, "text only"),
    ],
)
def test_refusals(server, fields, message):
    status, answer = server.post(CHAT, **body(CHAT, "?", **fields))
    assert status == 400 and message in answer["error"]["message"], answer


def form(boundary, **fields):
    parts = []
    for name, value in fields.items():
        file = '; filename="a.txt"' if name == "file" else ""
        parts.append(b'--%s\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n' % (
            boundary.encode(), name.encode(), file.encode(), value))  # fmt: skip
    return b"".join(parts) + f"--{boundary}--\r\n".encode()


def test_texts_as_files():
    text = "A text about ships, 漢字. " * 3
    plain = {"content-type": "text/plain; charset=utf-8"}
    headers = {"content-type": "multipart/form-data; boundary=XYZ"}
    with Server(chain.make_llm(CHAINS, TEMPLATE).cache("uniform:recent=8", 64)) as server:
        tokens = server.post(DOCUMENTS, id="json", text=text)[1]["tokens"]
        status, answer = server.request("POST", f"{DOCUMENTS}?id=plain", b"\xef\xbb\xbf" + text.encode(), plain)
        assert status == 200 and answer["id"] == "plain" and answer["tokens"] == tokens
        file = form("XYZ", id=b"file", full_cache=b"true", file=text.encode())
        status, answer = server.request("POST", DOCUMENTS, file, headers)
        assert status == 200 and answer["full_cache"] == "file-full" and answer["tokens"] == tokens
        sizes = {one["id"]: one["bytes"] for one in server.request("GET", DOCUMENTS)[1]["data"]}
        assert {*sizes} == {"json", "plain", "file", "file-full"} and sizes["file"] < sizes["file-full"]
        for name in sizes:
            assert server.request("GET", f"{DOCUMENTS}/{name}/text")[1]["text"] == text
            instructed = [{"role": "system", "content": "Be brief."}, user("Well?")]
            answers = [ask(server, CHAT, False, prompt, document=name) for prompt in (instructed, "Be brief.\n\nWell?")]
            assert answers[0] == answers[1] and answers[0][0][0][0] == "Fine."
        for kind, data, message in (
            (plain, b"%PDF-1.7\xff", "not a text in UTF-8"),
            (plain, b"a\0b", "not a text in UTF-8"),
            (plain, b"", "text is empty"),
            (headers, form("XYZ", id=b"x"), "no file in its field 'file'"),
            (headers, form("XYZ", color=b"x", file=b"text"), "field 'color' is not supported"),
            (headers, b"nonsense", "the form cannot be read"),
            (headers, form("XYZ", full_cache=b"yes", file=b"text"), "must be true or false"),
        ):
            status, answer = server.request("POST", DOCUMENTS, data, kind)
            assert status == 400 and message in answer["error"]["message"], answer
        assert server.post(DOCUMENTS, id="json", text=text, full_cache=True)[0] == 409


def test_a_full_directory_refuses_documents(tmp_path):
    cache = chain.make_llm(CHAINS, TEMPLATE).cache()
    text = "A text about ships."
    with Server(cache, {"documents_dir": str(tmp_path)}) as server:
        assert server.post(DOCUMENTS, id="first", text=text)[0] == 200
        size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    with Server(cache, {"documents_dir": str(tmp_path), "documents_bytes": int(1.5 * size)}) as server:
        status, answer = server.post(DOCUMENTS, id="second", text=text)
        assert status == 507 and "documents_bytes" in answer["error"]["message"]
        assert [one["id"] for one in server.request("GET", DOCUMENTS)[1]["data"]] == ["first"]
        assert server.request("GET", f"{DOCUMENTS}/second")[0] == 404
        assert server.request("DELETE", f"{DOCUMENTS}/first")[0] == 200
        assert server.post(DOCUMENTS, id="second", text=text)[0] == 200
