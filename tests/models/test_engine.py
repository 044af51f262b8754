"""Continuous batching: every request gets the tokens of a single row, whatever other requests do."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax_models import LanguageModel, compile_cache
from kvjax_models.engine import Collector, Output
from kvjax_models.model.rotary import RopeScaling
from kvjax_models.runner.answer_text import AnswerText, check_stop
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.sampling import Sampling
from tests.kvjax.support import ON_A_MESH, each
from tests.models import tiny
from tests.models.loops import decode_all, gather
from tests.models.support import count_compilations

PERIOD = 8  # tokens of a block
EXACT = kvjax.Exact(compact_every=PERIOD)
# More requests than rows, with one to three chunks, which finish at various positions of a block.
LENGTHS, NEW = (70, 33, 1, 20, 5), (5, 20, 16, 1, 11)
SAMPLING = (
    Sampling(),
    Sampling(1.0, logprobs=2),
    Sampling(0.8, 20, 0.9, 0.01),
    Sampling(1.0, repetition_penalty=1.3),
    Sampling(presence_penalty=0.5, frequency_penalty=0.5),
)
SHARED = ("exact", "clustergen", "streaming_llm", "subgen_mean", "balancekv", "clusterkv", "leverage_scores")
POLICIES = {name: ON_A_MESH[name] for name in SHARED} | {
    "host_memory": kvjax.HostMemory(ON_A_MESH["clusterkv"]),
    "kvzip": kvjax.KVzip(40, recent=8, compact_every=PERIOD),
    "first_layers": kvjax.FirstLayers(1, kvjax.Uniform(40, recent=16, compact_every=PERIOD), EXACT),
}


@functools.cache
def llm():
    return tiny.make_lively_llm()


def make_engine(policy=EXACT, language_model=None, **options):
    return (language_model or llm()).cache(policy).engine(**{"rows": 3} | options)


@functools.cache
def prompts():
    rng = np.random.default_rng(3)
    return [rng.integers(0, 96, length).tolist() for length in LENGTHS]


def add_all(some_engine, **options):
    for seed, (prompt, new, sampling) in enumerate(zip(prompts(), NEW, SAMPLING, strict=True)):
        some_engine.add(prompt, sampling=sampling, max_new_tokens=new, seed=seed, **options)


def collect(some_engine):
    """Runs all requests."""
    results = gather(some_engine.run())
    assert not some_engine.has_unfinished and some_engine.num_free_rows == some_engine._scheduler.rows
    return results


def tokens_alone(number, policy=EXACT):
    """Returns the tokens of a request in a row that does not grow."""
    alone = llm().cache(policy).rows(LENGTHS[number], NEW[number])[-1]
    state = alone.prefill(alone.init_state(number, SAMPLING[number]), [prompts()[number]])
    return decode_all(alone, state, NEW[number])[0][0]


@pytest.mark.parametrize("name", each(POLICIES, quick=("clustergen",)))
def test_tokens_equal_those_of_each_request_alone(name):
    """With other sampling, seeds and lengths in every row."""
    some_engine = make_engine(POLICIES[name], max_prefill_tokens=64)
    add_all(some_engine)
    rows, texts, reasons = collect(some_engine)
    for number, new in enumerate(NEW):
        assert rows[number] == tokens_alone(number, POLICIES[name]) and len(rows[number]) == new
        assert texts[number] == llm().tokenizer.decode_continuation(rows[number], prompts()[number])
    assert reasons == dict.fromkeys(range(5), "length")


@pytest.mark.parametrize("name", each(POLICIES, quick=("clustergen",)))
def test_requests_continue_finished_ones(name):
    """With the tokens of a state that two prompts are appended to, whatever other rows do."""
    cache = llm().cache(POLICIES[name])
    some_engine = make_engine(POLICIES[name], stream_interval=3)
    first, question, sampling = prompts()[3], prompts()[1][:9], Sampling(0.9, repetition_penalty=1.3)

    def finish(prompt, limit, seed, **options):
        some_engine.add(prompts()[0], max_new_tokens=20 + seed)
        options |= {"keep": True, "room": 56}
        number = some_engine.add(prompt, sampling=sampling, max_new_tokens=limit, seed=seed, **options)
        return [output.prefix for output in some_engine.run() if output.number == number][-1]

    turn = finish(first, 13, 1)
    turns = [finish(question, 11, 2, prefix=turn) for _ in range(2)]
    assert turns[0].tokens == turns[1].tokens and turns[0].num_first == len(first)
    alone = cache.rows(len(first), 56)[-1]
    [tokens], state = decode_all(alone, alone.prefill(alone.init_state(1, sampling), [first]), 13)
    assert turn.tokens == (*first, *tokens)
    rows = dataclasses.replace(state.sampling, in_prompt=state.sampling.in_prompt | (state.sampling.counts > 0))
    rows = dataclasses.replace(rows, counts=jnp.zeros_like(rows.counts))
    state = alone.prefill(alone.reseed(dataclasses.replace(state, sampling=rows), 2), [question])
    assert turns[0].tokens == (*turn.tokens, *question, *decode_all(alone, state, 11)[0][0])
    with pytest.raises(TypeError, match="a prompt after a prefix must be token ids, got str"):
        some_engine.add("Who?", turn)
    if name == "exact":  # grows
        some_engine.add(question, turn, max_new_tokens=500)
        return
    with pytest.raises(ValueError, match="9 tokens of the prompt and max_new_tokens=50 exceed the 51 tokens"):
        some_engine.add(question, turn, max_new_tokens=50)


def test_tokens_do_not_depend_on_rows_prefill_steps_or_the_stream_interval():
    results = []
    for options in (
        {},
        {"rows": 8, "max_prefill_tokens": 1},
        {"rows": 1, "max_prefill_tokens": 60, "stream_interval": 1},
        {"stream_interval": 3},
        {"stream_interval": 50},
    ):
        some_engine = make_engine(**options)
        add_all(some_engine)
        outputs = list(some_engine.run())
        assert max(len(output.tokens) for output in outputs) == min(options.get("stream_interval", 50), PERIOD)
        results.append(gather(outputs))
    assert all(result == results[0] for result in results)


def test_answers_to_one_prompt_share_its_prefill(monkeypatch):
    prefilled = []
    steps = Generator.prefill_steps

    def count(self, state, new, *args, **options):
        prefilled.append(new)
        return steps(self, state, new, *args, **options)

    monkeypatch.setattr(Generator, "prefill_steps", count)
    some_engine = make_engine(kvjax.Uniform(40, recent=16, compact_every=PERIOD))
    sampling = Sampling(temperature=2.0)
    for seed in (5, 6, 7, 8):  # the last one waits for a row
        some_engine.add(prompts()[1], sampling=sampling, max_new_tokens=9, seed=seed, prompt_seed=5)
    some_engine.add(prompts()[1], max_new_tokens=9, seed=5)  # greedy
    rows, *_ = collect(some_engine)
    assert prefilled == [[tuple(prompts()[1])], [tuple(prompts()[1])] * 2]
    alone = llm().cache(kvjax.Uniform(40, recent=16, compact_every=PERIOD)).rows(LENGTHS[1], 9)[-1]
    for number in range(4):
        state = alone.prefill(alone.init_state(5, sampling), [prompts()[1]])
        assert rows[number] == decode_all(alone, alone.reseed(state, 5 + number), 9)[0][0]


def test_requests_that_differ_compile_nothing():
    """Sampling, stop strings, seeds and lengths of one bucket are values; rows of all parameters are in one program."""

    def run(some_engine, shift):
        for number in range(10):
            stop, options = ("x", "ab")[number % 2 :], SAMPLING[(number + shift) % 5]
            length = 20 + (number + shift) % 10
            new = 1 + 2 * number
            some_engine.add(prompts()[0][:length], sampling=options, stop=stop, max_new_tokens=new, seed=number)
        collect(some_engine)

    run(make_engine(), 0)
    with count_compilations() as num_compiled:
        run(make_engine(), 3)  # an equal engine
    assert num_compiled() == 0


def test_prefill_alternates_with_blocks():
    # The second request needs two layers and an insertion: three blocks of the first one come before its first block.
    for tokens, expected in ((1, [0] * 3 + [0, 1] + [1] * 3), (None, [0, 1] * 4)):
        some_engine = make_engine(rows=2, max_prefill_tokens=tokens)
        for length in (40, 60):
            some_engine.add([length] * length, max_new_tokens=32)
        assert [output.number for output in some_engine.run()] == expected


# --- the end of a request ---


def full_text():
    some_engine = make_engine(rows=1)
    some_engine.add(prompts()[1], max_new_tokens=24)
    rows, texts, _ = collect(some_engine)
    return rows[0], texts[0]


def test_end_of_text_tokens_finish_requests():
    tokens, _ = full_text()
    eos = tokens[10]
    language_model = LanguageModel(llm().model, dataclasses.replace(llm().tokenizer, eos_ids=(eos,)))
    some_engine = make_engine(language_model=language_model)
    for number in range(3):
        some_engine.add(prompts()[1], max_new_tokens=(24, 24, tokens.index(eos))[number])
    rows, _, reasons = collect(some_engine)
    assert rows[0] == rows[1] == tokens[: tokens.index(eos) + 1] and reasons == {0: "stop", 1: "stop", 2: "length"}


def test_a_stop_string_may_span_blocks():
    """Texts end before it, whatever was returned already; tokens end with it."""
    tokens, text = full_text()
    assert len(text) == len(tokens) == 24  # a character per token
    for start, end in ((PERIOD - 2, PERIOD + 2), (PERIOD - 1, PERIOD), (2, 2 * PERIOD + 1)):
        stop = text[start:end]
        position = text.find(stop)
        for interval in (None, 1):
            some_engine = make_engine(stream_interval=interval)
            some_engine.add(prompts()[1], stop=["absent", stop])
            other = some_engine.add(prompts()[1], stop="absent", max_new_tokens=24)
            rows, texts, reasons = collect(some_engine)
            assert texts[0] == text[:position] and reasons[0] == "stop"
            assert rows[0] == tokens[: position + len(stop)]
            assert rows[other] == tokens and texts[other] == text


@pytest.mark.parametrize(
    ("stop", "length"),
    [
        (["END", "\n\n"], 3),
        ([tiny.BOS], 8),
        ([f"two{tiny.BOS}", "END"], 5),
        ([f"{tiny.BOS} END", f"x{tiny.BOS}"], 8),
        (["two END"], None),  # the special token is between the words
        (["begin_of_text", "\n\n\n"], 8),
        ([f"{tiny.BOS[:9]}"], 8),
    ],
)
def test_stop_strings_may_contain_special_tokens(stop, length):
    tokens = llm().tokenizer.encode_continuation(f"one\n\ntwo{tiny.BOS} END", context=())
    answer, text = AnswerText(llm().tokenizer, [], stop), "one\n\ntwo END"
    parts = []
    for token in tokens:
        answer.push([token])
        parts.append(answer.take(is_finished=False))
        assert "".join(parts) == text[: len("".join(parts))]
    assert "".join([*parts, answer.take(is_finished=True)]) == answer.text == text[:length]
    assert answer.is_stopped == (length is not None)
    # All tokens at once
    at_once = AnswerText(llm().tokenizer, [], stop)
    at_once.push(tokens)
    assert (at_once.text, at_once.tokens) == (answer.text, answer.tokens)


def test_possible_starts_of_stop_strings_are_withheld():
    answer = AnswerText(llm().tokenizer, [], ["\n\n", "END"])
    withheld = []
    for token in llm().tokenizer.encode_continuation("a long line", context=()):
        answer.push([token])
        answer.take(is_finished=False)
        withheld.append(len(answer.text) - answer._num_taken)
    assert withheld == [1, *[2] * 10]  # less than the longest one


@pytest.mark.parametrize(
    ("stop", "error", "message"),
    [
        ("", ValueError, "stop must not contain an empty string"),
        (["a", ""], ValueError, "stop must not contain an empty string"),
        (b"x", TypeError, "stop=.* must be a string or a list of strings"),
        (["x", None], TypeError, "stop=.* must be a string or a list of strings"),
    ],
)
def test_invalid_stop_strings_are_refused(stop, error, message):
    with pytest.raises(error, match=message):
        check_stop(stop)


# --- failures and aborts ---


def test_failing_requests_do_not_stop_the_others():
    some_engine = make_engine()
    for prompt, options, message in (
        ([], {}, "the prompt is empty"),
        ([1] * 60, {"max_new_tokens": 10**6}, "1000060 tokens exceeds the model's context length"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ([1], {"seed": -1}, "seed=-1 must be"),
        ([1], {"stop": ""}, "stop must not contain an empty string"),
    ):
        with pytest.raises(ValueError, match=message):
            some_engine.add(prompt, **options)
    bad = some_engine.add([98])
    add_all(some_engine)
    outputs = list(some_engine.run())
    [error] = [output.error for output in outputs if output.error is not None]
    assert "token ids must be between 0 and 97" in error
    rows, _, reasons = gather(outputs)
    assert reasons.pop(bad) == "error" and set(reasons.values()) == {"length"}
    assert all(rows[number + 1] == tokens_alone(number) for number in range(5))


def broken_model(token):
    """Returns the model with an embedding of NaN for one token."""
    graph, parameters = nnx.split(llm().model)
    model = nnx.merge(graph, jax.tree.map(jnp.copy, parameters))
    model.embedding.embedding[...] = model.embedding.embedding[...].at[token].set(jnp.nan)
    return LanguageModel(model, llm().tokenizer)


def test_a_row_of_nan_is_an_error_of_its_request():
    """In the prompt, and in the middle of an answer; the freed rows are used again."""
    tokens, _ = full_text()
    bad = next(token for token in tokens[9:] if token not in prompts()[1])
    some_engine = make_engine(language_model=broken_model(bad), rows=2)
    some_engine.add(prompts()[1], max_new_tokens=24)
    some_engine.add([1, bad, 2], max_new_tokens=24)
    for seed in range(3):
        some_engine.add([1, 2, 3], max_new_tokens=8, seed=seed)
    outputs = list(some_engine.run())
    assert gather(outputs)[2] == {0: "error", 1: "error", 2: "length", 3: "length", 4: "length"}
    for output in outputs:
        assert output.finish_reason != "error" or "logits that are NaN or infinite" in output.error


def test_requests_are_aborted_while_they_wait_prefill_and_run():
    some_engine = make_engine(rows=2, max_prefill_tokens=1)
    add_all(some_engine)
    outputs = some_engine.step()  # a layer of request 0
    assert some_engine._prefill is not None and some_engine.num_waiting == 4
    some_engine.abort(0)  # prefills
    some_engine.abort(3)  # waits
    while not any(output.number == 1 for output in outputs):
        outputs += some_engine.step()
    for number in (1, 1, 99):  # runs
        some_engine.abort(number)
    rows, _, reasons = gather([*outputs, *some_engine.run()])
    assert reasons == {0: "abort", 1: "abort", 2: "length", 3: "abort", 4: "length"} and some_engine.num_free_rows == 2
    assert rows[0] == rows[3] == [] and rows[1] and rows[1] == tokens_alone(1)[: len(rows[1])]
    assert all(rows[number] == tokens_alone(number) for number in (2, 4))


def test_a_failed_request_of_a_collector_is_an_error():
    with pytest.raises(ValueError, match="prompt 7: too bad"):
        Collector().add(Output(7, "", [], "error", error="too bad"))


# --- log-probabilities ---


def test_log_probabilities_come_with_their_tokens():
    some_engine = make_engine(rows=2)
    some_engine.add(prompts()[1], sampling=Sampling(1.0, logprobs=3), max_new_tokens=11, seed=4)
    some_engine.add(prompts()[1], sampling=Sampling(1.0), max_new_tokens=11, seed=4)
    outputs = list(some_engine.run())
    items = [item for output in outputs if output.number == 0 for item in output.logprobs]
    tokens = [token for output in outputs if output.number == 1 for token in output.tokens]
    assert [item.token for item in items] == tokens
    assert all(output.logprobs is None for output in outputs if output.number)
    logits = llm().model(jnp.asarray([prompts()[1] + tokens]))[0, len(prompts()[1]) - 1 : -1]
    expected = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    for item, row in zip(items, expected, strict=True):
        assert item.logprob == pytest.approx(row[item.token], abs=1e-3)
        assert [token for token, _ in item.top] == np.argsort(-row)[:3].tolist()


# --- sizes ---


def test_rows_follow_their_tokens():
    """A row of a full cache grows; a kept one has slots for its tokens only, and a copy of it grows again."""
    sizes = llm().cache(EXACT).rows(20, 500)
    assert [one.plan.capacity for one in sizes] == [256, 512, 1024]
    some_engine, held, first, question = make_engine(rows=1), [], prompts()[3], prompts()[1][:9]
    some_engine.add(first, max_new_tokens=500, keep=True)
    for output in some_engine.run():
        held.append(some_engine.cache_bytes)
        prefix = output.prefix
    assert sorted(set(held[:-1])) == pytest.approx([one.row_bytes for one in sizes], rel=0.01)
    assert prefix.cache_bytes == pytest.approx(sizes[0].row_bytes * 520 / 256, rel=0.15)
    alone = sizes[-1]
    [tokens], state = decode_all(alone, alone.prefill(alone.init_state(0), [first]), 500)
    assert prefix.tokens == (*first, *tokens)
    some_engine.add(question, prefix, max_new_tokens=200)
    state = dataclasses.replace(state, done=jnp.zeros(1, bool), max_positions=jnp.full(1, 10**6))
    expected = decode_all(alone, alone.prefill(state, [question]), 200)[0][0]
    assert collect(some_engine)[0][1] == expected


def test_turns_of_a_full_cache_may_have_any_limits():
    """Also of less than a block, next to a row with another limit."""
    cache, question = llm().cache("exact"), prompts()[1][:9]
    some_engine = cache.engine(rows=2)
    for limits in ((9, 50), (50, 9)):
        number = some_engine.add(prompts()[3], max_new_tokens=limits[0], keep=True)
        prefix = [output.prefix for output in some_engine.run() if output.number == number][-1]
        expected = cache.engine(rows=1)
        first = some_engine.add(prompts()[0], max_new_tokens=limits[1])
        expected.add(prompts()[0], max_new_tokens=limits[1])
        some_engine.add(question, prefix, max_new_tokens=limits[1])
        expected.add([*prefix.tokens, *question], max_new_tokens=limits[1])
        rows = collect(some_engine)[0]
        assert [rows[first], rows[first + 1]] == [*collect(expected)[0].values()]


@pytest.mark.parametrize(("policy", "budget"), [("snapkv", "25%"), ("auto", "64KiB")])
def test_a_full_cache_that_is_followed_by_another_kind_keeps_its_size(policy, budget):
    """The cache of a short prompt is a full one, also with a budget; the cache of a long one is compressed."""
    cache, question = llm().cache(policy, budget), [*range(90)] * 6
    some_engine = cache.engine(rows=2)

    def turn(prompt, prefix=None, **options):
        number = some_engine.add(prompt, prefix, keep=True, **options)
        return [output for output in some_engine.run() if output.number == number][-1].prefix

    first = turn(prompts()[3], max_new_tokens=9)
    assert first.generator.plan.is_resizable and not cache.rows(len(question), 9)[-1].plan.is_resizable
    assert some_engine.num_left(first, 2, 3) == 3
    longer = some_engine.num_left(first, len(question), 9)
    assert longer < 0
    with pytest.raises(ValueError, match=f"{len(question)} tokens of the prompt and max_new_tokens=9 exceed the"):
        turn(question, first, max_new_tokens=9)
    # Within its size, it has the tokens of a full cache.
    some_engine.add(question[:100], max_new_tokens=9)
    second = turn(question[:2], first, max_new_tokens=1)
    exact = make_engine("exact")
    exact.add([*first.tokens, *question[:2]], max_new_tokens=1)
    assert second.tokens == (*first.tokens, *question[:2], *collect(exact)[0][0])
    # With room for the later turns, the first one has the cache that these need.
    roomy = turn(prompts()[3], max_new_tokens=9, room=len(question) + 20)
    assert some_engine.num_left(roomy, len(question), 9) == 9
    assert len(turn(question, roomy, max_new_tokens=9).tokens) == len(roomy.tokens) + len(question) + 9


def test_turns_that_change_the_rotary_embedding_are_refused():
    """The keys of a prefix were rotated for shorter sequences."""
    long_factors = (1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 16.0, 16.0)
    scaling = RopeScaling("longrope", 4.0, original_length=256, short_factors=(1.0,) * 8, long_factors=long_factors)
    some_engine = make_engine("exact", tiny.make_lively_llm(**{"rope.scaling": scaling}))
    some_engine.add(prompts()[0], max_new_tokens=20, keep=True)
    prefix = [output.prefix for output in some_engine.run()][-1]
    assert some_engine.num_left(prefix, 100, 60) == 60
    assert some_engine.num_left(prefix, 100, 100) == 256 - 90 - 100
    with pytest.raises(ValueError, match="exceed the 166 tokens that the row of the prefix has capacity for"):
        some_engine.add(prompts()[0] * 2, prefix, max_new_tokens=60)


def test_prefixes_of_another_model_are_refused():
    for cache in (llm().cache("exact"), llm().cache("streaming_llm", 64)):
        some_engine = cache.engine()
        some_engine.add(prompts()[0], max_new_tokens=2, keep=True)
        prefix = [output.prefix for output in some_engine.run()][-1]
        with pytest.raises(ValueError, match="does not fit into the engine: it belongs to another model"):
            make_engine(language_model=tiny.make_lively_llm()).add([1], prefix, max_new_tokens=2)


def test_answers_of_similar_lengths_share_a_compressed_row():
    cache = llm().cache("uniform:recent=16", "50%")
    for prompt in (100, 650, 3000):
        shortest = compile_cache.length_bucket(prompt).start
        sizes = {}
        for answer in range(1, 700):
            (row,) = cache.rows(prompt, answer)
            sizes.setdefault(row, []).append(answer)
        for row, answers in sizes.items():
            assert answers[-1] <= row.plan.max_new_tokens
            assert answers[-1] - answers[0] < max(16, shortest / 8, answers[-1] / 4)
    assert len(sizes) <= 6


def test_requests_wait_for_bytes():
    cache = llm().cache(kvjax.StreamingLLM(40, compact_every=PERIOD))
    row_bytes = cache.rows(LENGTHS[1], 9)[-1].row_bytes
    some_engine = cache.engine(rows=8, max_bytes=f"{3 * row_bytes - 1}B")
    for seed in range(5):
        some_engine.add(prompts()[1], max_new_tokens=9, seed=seed)
    held = []
    while some_engine.has_unfinished:
        some_engine.step()
        held.append(some_engine.cache_bytes)
    assert 1.99 * row_bytes < max(held) <= 2 * row_bytes  # rows share a counter
    assert some_engine.usage.cache_bytes == max(held)
    with pytest.raises(ValueError, match="takes up to .*iB, more than the .*iB for all rows"):
        cache.engine(max_bytes=row_bytes - 1).add(prompts()[1], max_new_tokens=9)


def test_invalid_sizes_are_refused():
    for name in ("rows", "max_bytes", "max_prefill_tokens", "stream_interval"):
        with pytest.raises(ValueError, match=f"{name}=0 must be"):
            make_engine(**{name: 0})


def test_random_operations_change_no_tokens():
    """Requests are added and aborted in any order; the others have the tokens that they have alone."""
    rng = np.random.default_rng(0)
    some_engine = make_engine(rows=3, max_prefill_tokens=60, stream_interval=3)
    kinds, outputs = {}, []
    for _ in range(120):
        operation = rng.choice(["add", "add", "abort", "step", "step"])
        if operation == "add" and len(kinds) < 20:
            kind = int(rng.integers(5))
            options = {"sampling": SAMPLING[kind], "max_new_tokens": NEW[kind], "seed": kind}
            kinds[some_engine.add(prompts()[kind], **options)] = kind
        elif operation == "abort" and kinds:
            some_engine.abort(int(rng.choice(list(kinds))))
        else:
            outputs += some_engine.step()
    rows, _, reasons = gather([*outputs, *some_engine.run()])
    assert reasons.keys() == kinds.keys() and set(reasons.values()) == {"length", "abort"}
    for number, kind in kinds.items():
        expected = tokens_alone(kind)
        assert rows[number] == (expected if reasons[number] == "length" else expected[: len(rows[number])])


@pytest.mark.heavy
@pytest.mark.parametrize(
    "policy", [EXACT, kvjax.StreamingLLM(64, compact_every=PERIOD)], ids=["exact", "streaming_llm"]
)
def test_many_mixed_requests_need_few_programs_and_no_further_memory(policy):
    """Prompts of 20 to 600 tokens and questions to four documents; every answer is the one alone."""
    rng, cache = np.random.default_rng(1), llm().cache(policy)
    lengths = (40, 150, 300, 600)
    documents = [cache.read(rng.integers(0, 96, length).tolist(), max_new_tokens=96) for length in lengths]
    some_engine = cache.engine(rows=8, max_prefill_tokens=512, stream_interval=4)

    def make_request():
        document = documents[rng.integers(4)] if rng.random() < 0.5 else None
        length = int(rng.integers(1, 40)) if document is not None else int(20 * 30 ** rng.random())
        return {
            "prompt": rng.integers(0, 96, length).tolist(),
            "prefix": document,
            "sampling": SAMPLING[rng.integers(5)],
            "stop": ("xy", "z")[rng.integers(3) :],
            "max_new_tokens": int(rng.integers(1, 49)),
            "seed": int(rng.integers(2**32)),
        }

    requests, tokens, waiting, num_held, held = [], {}, 200, 0, []
    while waiting or some_engine.has_unfinished:
        while waiting and some_engine.num_waiting < 6:
            requests.append(make_request())
            waiting -= 1
            assert some_engine.add(**requests[-1]) == len(requests) - 1
        for output in some_engine.step():
            tokens.setdefault(output.number, []).extend(output.tokens)
            if output.finish_reason is not None and (num_held := num_held + 1) in (40, 200):
                held.append(sum(x.nbytes for x in jax.live_arrays()))
            elif output.finish_reason is None and rng.random() < 0.005:
                some_engine.abort(output.number)
    assert held[1] < 1.05 * held[0]
    if policy is EXACT:  # of the others, the size of a row follows from the length of its answer, too
        assert some_engine.num_programs <= 44
    alone = cache.engine(rows=1)
    for number, request in enumerate(requests):
        alone.add(**request)
        expected = [token for output in alone.run() for token in output.tokens]
        assert tokens[number] == expected[: len(tokens[number])]
