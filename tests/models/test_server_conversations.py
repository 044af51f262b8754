"""Turns of a conversation continue from the cache of the turn before, over loopback."""

import contextlib

import pytest

from tests.models import serving, tiny
from tests.models.serving import CHAT, DOCUMENTS, Server, body, is_idle, open_request, user, wait_until

QUESTIONS = ("Which ships left the harbor?", "When?", "Why so early?")
TEXT = "A long text about ships. " * 6
LONG = (*QUESTIONS, "Where to?", "Who knows?", "Is it true?")
# As in real templates, an end token follows every answer, also one of the maximum length.
TEMPLATE = tiny.TEMPLATE.replace(
    "{{ message.content }}", f"{{{{ message.content }}}}{{% if message.role == 'assistant' %}}{tiny.EOS}{{% endif %}}"
)
SAMPLED = {"temperature": 0.9, "top_k": 30, "repetition_penalty": 1.1, "seed": 0, "max_tokens": 9}


@pytest.fixture(scope="module")
def llm():
    return tiny.make_llm(TEMPLATE)


@pytest.fixture(scope="module")
def server(llm):
    with Server(llm.cache(), {"max_new_tokens": 128}) as one:
        yield one


def ask(server, messages, headers=None, stream=False, **options):
    """Returns the answers of all choices, and the usage."""
    choices, usage = serving.ask(server, CHAT, stream, messages, headers, **SAMPLED | options)
    return [text for text, *_ in choices], usage


def num_cached(usage):
    return usage["prompt_tokens_details"]["cached_tokens"]


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


def test_a_turn_reads_only_its_new_tokens(server):
    before = server.metric("kvjax_prompt_tokens_total")
    messages, usages = converse(server, LONG, stream=True)
    assert_continued(usages)
    read = server.metric("kvjax_prompt_tokens_total") - before
    assert read == sum(usage["prompt_tokens"] - num_cached(usage) for usage in usages) < usages[-1]["prompt_tokens"]
    for seed in (0, 1, 5):  # the full cache has the same entries, however they came into it
        [text], usage = ask(server, messages[: 2 * seed + 1], seed=seed, reuse=False)
        assert text == messages[2 * seed + 1]["content"] and num_cached(usage) == 0
    # A turn can be continued many times, and its choices, too.
    texts, usage = ask(server, messages[:3], seed=1, n=2)
    assert texts[0] == messages[3]["content"] and num_cached(usage) == usages[0]["total_tokens"]
    texts = [ask(server, [*messages[:3], assistant(text), user("And?")], seed=7) for text in texts]
    assert all(num_cached(usage) > usages[0]["total_tokens"] for _, usage in texts)


def test_turns_about_a_document_continue_its_tail(llm, server):
    cache = llm.cache("streaming_llm", "50%")
    with Server(cache, {"max_new_tokens": 128}) as compressed:
        document = compressed.post(DOCUMENTS, text=TEXT)[1]
        messages, usages = converse(compressed, document=document["id"], reuse=True)
        assert_continued(usages, first=document["tokens"])
        [text], usage = ask(compressed, messages[:-1], seed=2, reuse=False, document=document["id"])
        assert text == messages[-1]["content"] and num_cached(usage) == document["tokens"]
        other = compressed.post(DOCUMENTS, text=TEXT[::-1])[1]
        assert num_cached(ask(compressed, messages[:3], document=other["id"], reuse=True)[1]) == other["tokens"]
        assert num_cached(ask(compressed, messages[:3], reuse=True)[1]) == 0
        # A document of the same id is another one.
        compressed.request("DELETE", f"{DOCUMENTS}/{document['id']}")
        compressed.post(DOCUMENTS, id=document["id"], text=TEXT)
        usage = ask(compressed, messages[:3], document=document["id"], reuse=True)[1]
        assert num_cached(usage) == document["tokens"]
    document = server.post(DOCUMENTS, text=TEXT)[1]  # with a full cache, which continues by default
    assert_continued(converse(server, document=document["id"])[1], first=document["tokens"])


@pytest.mark.parametrize(("policy", "budget", "kv_dtype"), [("streaming_llm", 24, None), ("exact", None, "bfloat16")])
def test_answers_of_compressed_caches_do_not_depend_on_earlier_requests(llm, policy, budget, kv_dtype):
    """Also of a float32 model whose cache is in bfloat16."""
    with Server(llm.cache(policy, budget, kv_dtype=kv_dtype), {"max_new_tokens": 128}) as server:
        messages, usages = converse(server)
        assert [num_cached(usage) for usage in usages] == [0, 0, 0] and not len(server.worker.conversations)
        assert_continued(converse(server, reuse=True)[1])
        for seed in range(3):  # also after an answer that is continued on request
            assert ask(server, messages[: 2 * seed + 1], seed=seed)[0] == [messages[2 * seed + 1]["content"]]
        document = server.post(DOCUMENTS, text=TEXT)[1]
        messages, usages = converse(server, document=document["id"])
        assert [num_cached(usage) for usage in usages] == [document["tokens"]] * 3


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
    data = body(CHAT, "An aborted one", max_tokens=120, stream=True)
    with contextlib.closing(open_request(server, data)) as connection:
        connection.recv(10)
    wait_until(lambda: is_idle(server))
    assert len(server.worker.conversations) == count


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


def test_turns_of_other_caches_are_read_again(llm):
    """The cache of a short conversation is a full one; that of a long one, and its capacity, are others."""
    with Server(llm.cache("snapkv", "25%"), {"max_prompt_tokens": 2048, "max_new_tokens": 40}) as server:
        for limit in (9, None):
            messages, usages = converse(server, ("Why?", "x" * 200, "y"), max_tokens=limit, reuse=True)
            assert num_cached(usages[1]) == 0 and len(messages) == 6


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
