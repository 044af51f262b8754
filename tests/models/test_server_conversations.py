"""Turns of a conversation continue from the cache of the turn before, over loopback."""

import contextlib
import dataclasses
import http.client
import json

import pytest

from kvjax_models.runner.sampling import Sampling
from tests.models import tiny
from tests.models.loops import decode_all
from tests.models.serving import MODEL, Server, wait_until

CHAT = "/v1/chat/completions"
QUESTIONS = ("Which ships left the harbor?", "When?", "Why so early?")
# As in real templates, an end token follows every answer, also one of the maximum length.
TEMPLATE = tiny.TEMPLATE.replace(
    "{{ message.content }}", f"{{{{ message.content }}}}{{% if message.role == 'assistant' %}}{tiny.EOS}{{% endif %}}"
)
SAMPLED = {"temperature": 0.9, "top_k": 30, "repetition_penalty": 1.1, "max_tokens": 9}


@pytest.fixture(scope="module")
def llm():
    return tiny.make_llm(TEMPLATE)


@pytest.fixture(scope="module")
def server(llm):
    with Server(llm.cache(), {"max_new_tokens": 128}) as one:
        yield one


def ask(server, messages, headers=None, **options):
    """Returns the answers of all choices, and the usage."""
    data = {"model": MODEL, "messages": messages, **SAMPLED, **options}
    if not data.get("stream"):
        status, answer = server.request("POST", CHAT, data, headers)
        assert status == 200, answer
        return [choice["message"]["content"] for choice in answer["choices"]], answer["usage"]
    status, events = server.stream(CHAT, **data, stream_options={"include_usage": True})
    assert status == 200, events
    deltas = [event["choices"][0]["delta"].get("content", "") for event in events[:-2]]
    return ["".join(deltas)], events[-2]["usage"]


def num_cached(usage):
    return usage["prompt_tokens_details"]["cached_tokens"]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def converse(server, questions=QUESTIONS, **options):
    """Returns the messages of a conversation, and the usage of every turn."""
    messages, usages = [], []
    for seed, question in enumerate(questions):
        messages.append(user(question))
        [text], usage = ask(server, messages, seed=seed, **options)
        messages.append(assistant(text))
        usages.append(usage)
    return messages, usages


def assert_continued(usages, first=0):
    """Checks that every turn reused all tokens of the turn before."""
    expected = first
    for usage in usages:
        assert num_cached(usage) == expected
        expected = usage["total_tokens"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_turn_reads_only_its_new_tokens(server, stream):
    before = server.metric("kvjax_prompt_tokens_total")
    messages, usages = converse(server, (f"Streamed: {stream}. {QUESTIONS[0]}", *QUESTIONS[1:]), stream=stream)
    assert_continued(usages)
    read = server.metric("kvjax_prompt_tokens_total") - before
    assert read == sum(usage["prompt_tokens"] - num_cached(usage) for usage in usages) < usages[-1]["prompt_tokens"]
    for seed in range(3):  # the full cache has the same entries, however they came into it
        [text], usage = ask(server, messages[: 2 * seed + 1], seed=seed, reuse=False)
        assert text == messages[2 * seed + 1]["content"] and num_cached(usage) == 0
    # A turn can be continued many times, and its choices, too.
    texts, usage = ask(server, messages[:3], seed=1, n=2)
    assert texts[0] == messages[3]["content"] and num_cached(usage) == usages[0]["total_tokens"]
    texts = [ask(server, [*messages[:3], assistant(text), user("And?")], seed=7) for text in texts]
    assert all(num_cached(usage) > usages[0]["total_tokens"] for _, usage in texts)


@pytest.mark.parametrize("policy", ["streaming_llm", "clustergen"])
def test_compressed_turns_equal_an_uninterrupted_conversation(llm, policy):
    cache = llm.cache(policy, 24)
    settings = {"max_new_tokens": 128, "rows": 2}
    with Server(cache, settings) as server:
        messages, usages = converse(server, temperature=0, reuse=True)
        generator = cache.rows(len(llm.encode(messages[:1])), 128)[-1]
        fresh = ask(server, messages[:-1], temperature=0, reuse=False)[0]
    assert_continued(usages)
    assert fresh != [messages[-1]["content"]]
    options = {name: SAMPLED[name] for name in ("repetition_penalty", "top_k")}
    state, tokens = generator.init_state(0, Sampling(**options)), []
    for turn in range(3):
        prompt = llm.encode(messages[: 2 * turn + 1])
        state = generator.prefill(state, [prompt[len(tokens) :]])
        [new], state = decode_all(generator, state, SAMPLED["max_tokens"])
        assert llm.tokenizer.decode_continuation(new, prompt) == messages[2 * turn + 1]["content"]
        tokens = prompt + new
        is_known = state.sampling.in_prompt | (state.sampling.counts > 0)
        state = dataclasses.replace(state, sampling=dataclasses.replace(state.sampling, in_prompt=is_known))


def test_turns_about_a_document_continue_its_tail(llm):
    cache = llm.cache("streaming_llm", "50%")
    with Server(cache, {"max_new_tokens": 128}) as server:
        document = server.post("/v1/documents", text="A long text about ships. " * 6)[1]
        messages, usages = converse(server, document=document["id"], reuse=True)
        assert_continued(usages, first=document["tokens"])
        for seed in range(3):
            options = {"seed": seed, "reuse": False, "document": document["id"]}
            [text], usage = ask(server, messages[: 2 * seed + 1], **options)
            assert text == messages[2 * seed + 1]["content"] and num_cached(usage) == document["tokens"]
        other = server.post("/v1/documents", text="A long text about trees. " * 6)[1]
        assert num_cached(ask(server, messages[:3], document=other["id"], reuse=True)[1]) == other["tokens"]
        assert num_cached(ask(server, messages[:3], reuse=True)[1]) == 0
        # A document of the same id is another one.
        server.request("DELETE", f"/v1/documents/{document['id']}")
        server.post("/v1/documents", id=document["id"], text="A long text about ships. " * 6)
        options = {"document": document["id"], "reuse": True}
        assert num_cached(ask(server, messages[:3], **options)[1]) == document["tokens"]


@pytest.mark.parametrize(
    ("policy", "budget", "kv_dtype"), [("streaming_llm", 24, None), ("clustergen", 24, None), ("exact", None, "int8")]
)
def test_answers_of_compressed_caches_do_not_depend_on_earlier_requests(llm, policy, budget, kv_dtype):
    with Server(llm.cache(policy, budget, kv_dtype=kv_dtype), {"max_new_tokens": 128}) as server:
        messages, usages = converse(server)
        assert [num_cached(usage) for usage in usages] == [0, 0, 0] and not len(server.worker.conversations)
        for _ in range(2):  # also after an answer that is continued on request
            for seed in range(3):
                assert ask(server, messages[: 2 * seed + 1], seed=seed)[0] == [messages[2 * seed + 1]["content"]]
            converse(server, reuse=True)
        document = server.post("/v1/documents", text="A long text about ships. " * 6)[1]
        messages, usages = converse(server, document=document["id"])
        assert [num_cached(usage) for usage in usages] == [document["tokens"]] * 3


def test_a_full_cache_in_the_dtype_of_the_model_continues(llm):
    with Server(llm.cache("exact", kv_dtype="bfloat16"), {"max_new_tokens": 128}) as server:  # of a float32 model
        assert [num_cached(usage) for usage in converse(server)[1]] == [0, 0, 0]
    with Server(llm.cache(), {"max_new_tokens": 128}) as server:
        document = server.post("/v1/documents", text="A long text about ships. " * 6)[1]
        assert_continued(converse(server, document=document["id"])[1], first=document["tokens"])


def test_other_keys_and_other_messages_do_not_continue(server):
    ours = {"Authorization": "Bearer ours"}
    first = [user("A secret question")]
    [text], usage = ask(server, first, ours, seed=1)
    later = [*first, assistant(text), user("And then?")]
    assert num_cached(ask(server, later, ours)[1]) == usage["total_tokens"]
    for headers in (None, {"Authorization": "Bearer theirs"}, {"Authorization": "Bearer ours2"}):
        assert num_cached(ask(server, later, headers)[1]) == 0
    for changed in (
        [user("A secret questiom"), *later[1:]],
        [first[0], assistant(text[:-1]), later[2]],
        [first[0], assistant(text + "x"), later[2]],
        [first[0] | {"name": "Ann"}, *later[1:]],
        [{"role": "system", "content": "Be brief."}, *later],
    ):
        assert num_cached(ask(server, changed, ours)[1]) == 0
    assert num_cached(ask(server, later, ours, reuse=False)[1]) == 0
    [text], _ = ask(server, [user("Not kept")], reuse=False)
    assert num_cached(ask(server, [user("Not kept"), assistant(text), user("x")])[1]) == 0
    status, answer = server.complete("x", reuse=True)
    assert status == 400 and answer["error"]["param"] == "reuse"


def test_incomplete_answers_do_not_continue(server):
    question = [user("A question that is interrupted")]
    [text], _ = ask(server, question, temperature=0)
    # A stop string is not part of the text, but its tokens are in the cache.
    [stopped], _ = ask(server, question, temperature=0, stop=text[4:6])
    assert num_cached(ask(server, [*question, assistant(stopped), user("x")])[1]) == 0
    count = len(server.worker.conversations)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        data = {"model": MODEL, "messages": [user("An aborted one")], "max_tokens": 120, "stream": True}
        connection.request("POST", CHAT, json.dumps(data))
        connection.getresponse().readline()
    wait_until(lambda: server.metric("kvjax_rows_running") == 0)
    assert len(server.worker.conversations) == count


LONG = (*QUESTIONS, "Where to?", "Who knows?", "Is it true?")


def test_long_conversations_grow(server):
    messages, usages = converse(server, LONG)
    assert_continued(usages)
    [text], _ = ask(server, messages[:-1], seed=5, reuse=False)
    assert text == messages[-1]["content"]


def test_long_compressed_conversations_are_read_again(llm):
    """The tokens after the first prompt have the capacity of new tokens, 128."""
    with Server(llm.cache("streaming_llm", 24), {"max_new_tokens": 128}) as server:
        _, usages = converse(server, LONG, reuse=True)
        cached = [num_cached(usage) for usage in usages]
        assert cached[1] and 0 in cached[2:] and cached[-1]  # read again once, and continued from there
        # Without a limit, the answer has the capacity that is left.
        [text], _ = ask(server, [user("short")], seed=1, reuse=True)  # another text may end sooner
        first = [user("short"), assistant(text), user("x")]
        usages = [ask(server, first, max_tokens=None, seed=seed, reuse=True)[1] for seed in range(8)]
        assert all(map(num_cached, usages)) and 64 <= max(usage["completion_tokens"] for usage in usages) < 128


def test_turns_used_least_recently_are_dropped(llm):
    questions = [user(f"Question {number}?") for number in range(3)]

    def is_held(server, number, text):
        return num_cached(ask(server, [questions[number], assistant(text), user("x")], max_tokens=1)[1]) > 0

    with Server(llm.cache(), {"conversations": 3}) as server:
        texts = [ask(server, [one])[0][0] for one in questions]
        size = server.metric("kvjax_conversations_bytes") / 3
        assert server.metric("kvjax_conversations ") == 3 and size > 0
        assert is_held(server, 0, texts[0])  # now the one used most recently; question 1 made room for its turn
        assert not is_held(server, 1, texts[1])
    with Server(llm.cache(), {"conversations": 0}) as server:
        assert not is_held(server, 0, ask(server, questions[:1])[0][0])
    reserve = llm.cache().rows(30, SAMPLED["max_tokens"])[-1].row_bytes  # of a row, which takes precedence
    with Server(llm.cache(), {"cache_bytes": int(reserve + 2.2 * size)}) as server:
        texts = [ask(server, [one])[0][0] for one in questions]
        assert is_held(server, 2, texts[2]) and not is_held(server, 0, texts[0])
        assert 0 < server.metric("kvjax_conversations_bytes") <= reserve + 2.2 * size
