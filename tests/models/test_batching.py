"""Continuous batching: every prompt gets the tokens that it gets alone, whatever stands beside it."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import kvjax
from kvjax_models.generation import batching, prefill
from kvjax_models.generation.batching import Request, run_requests
from kvjax_models.generation.decode import decode_block
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.rows import extend_rows
from kvjax_models.generation.sampling import Sampling
from tests.models.test_generate import CHUNK, PERIOD, random_model, tokens_of

# More than rows, of lengths that need one to three chunks, and ending at all places of a block.
LENGTHS = (70, 33, 1, 20, 5)
NEW = (5, 40, 16, 1, 23)
CLUSTERKV = kvjax.ClusterKV(24, sinks=2, cluster_tokens=8, chunk_tokens=16, chunk_clusters=2, compact_every=PERIOD)
QUICK = {
    "exact": kvjax.Exact(compact_every=PERIOD),
    "clustergen": kvjax.ClusterGen(40, compact_every=PERIOD),
}
HEAVY = {
    "streaming_llm": kvjax.StreamingLLM(40, compact_every=PERIOD),
    "subgen": kvjax.SubGen(40, recent=8, compact_every=PERIOD),
    "balancekv": kvjax.BalanceKV(60, recent=16, compact_every=PERIOD),
    "clusterkv": CLUSTERKV,
    "host_memory": kvjax.HostMemory(CLUSTERKV),
    "leverage_scores": kvjax.LeverageScores(40, recent=8, compact_every=PERIOD),
    "kvzip": kvjax.KVzip(40, recent=8, compact_every=PERIOD),
    "first_layers": kvjax.FirstLayers(1, kvjax.Uniform(40, recent=16, compact_every=PERIOD), kvjax.Exact(PERIOD)),
}


@functools.cache
def model():
    return random_model((None, None))


def generator(policy, batch=3, **given):
    return Generator(
        model(), policy, batch=batch, max_prompt_tokens=70, max_new_tokens=64, prefill_chunk=CHUNK, **given
    )


def requests(*, question=()):
    prompts = tokens_of(3, *LENGTHS)
    return [Request(text, new, question, seed) for seed, (text, new) in enumerate(zip(prompts, NEW, strict=True))]


def completed(made, asked, **given):
    """Tokens and reasons by number."""
    rows, reasons = {}, {}
    for number, tokens, reason in run_requests(made, asked, **given):
        assert number not in reasons
        rows.setdefault(number, []).extend(tokens)
        if reason is not None:
            reasons[number] = reason
    return [rows[number] for number in sorted(rows)], [reasons[number] for number in sorted(reasons)]


def alone(made, asked):
    one = made.with_batch(1)
    found = []
    for request in asked:
        state, rows = one.prefill(one.init_state(request.seed), [request.prompt]), [[]]
        if request.question:
            state = one.prefill(state, [request.question])
        for _, tokens in one.decode(state, request.max_new_tokens):
            extend_rows(rows, tokens)
        found += rows
    return found


def check_policy(policy):
    # A second turn and sampling, too, follow from the request alone.
    made, asked = generator(policy, sampling=Sampling(temperature=1.0)), requests(question=(7, 8, 9))
    rows, reasons = completed(made, asked, max_prefill_steps=2)
    assert rows == alone(made, asked) and reasons == ["length"] * len(asked)
    assert [len(row) for row in rows] == list(NEW)


@pytest.mark.parametrize("name", QUICK)
def test_tokens_are_those_of_each_prompt_alone(name):
    check_policy(QUICK[name])


@pytest.mark.heavy
@pytest.mark.parametrize("name", HEAVY)
def test_tokens_are_those_of_each_prompt_alone_under_any_policy(name):
    check_policy(HEAVY[name])


def test_greedy_tokens_do_not_depend_on_rows_or_pieces():
    asked = requests()
    expected = alone(generator(QUICK["exact"]), asked)
    for batch, max_prefill_steps in ((3, None), (8, 1)):
        assert completed(generator(QUICK["exact"], batch), asked, max_prefill_steps=max_prefill_steps)[0] == expected


def test_a_prompt_is_read_in_pieces_between_blocks():
    # Two layers, and what puts the row in: three blocks of the first row come before the second prompt's first.
    asked = [Request([1] * 40, 64), Request([2] * 40, 64)]
    order = [written.number for written in run_requests(generator(QUICK["exact"], 2), asked, max_prefill_steps=1)]
    assert order == [0] * 3 + [0, 1] + [1] * 3
    order = [written.number for written in run_requests(generator(QUICK["exact"], 2), asked)]
    assert order == [0, 1] * 4


def test_requests_are_taken_as_rows_fall_free():
    taken = []

    def each():
        for number in range(5):
            taken.append(number)
            yield Request([number + 1] * 9, 8)

    seen = [(written.number, len(taken)) for written in run_requests(generator(QUICK["exact"], 2), each())]
    assert seen == [(0, 2), (1, 2), (2, 4), (3, 4), (4, 5)]


def test_an_end_of_text_token_and_what_the_caller_says_end_a_row():
    asked = requests()
    free, _ = completed(generator(QUICK["exact"]), asked)
    end = free[1][20]  # somewhere in the middle of the longest
    rows, reasons = completed(generator(QUICK["exact"], eos=(end,)), asked)
    cut = [row[: row.index(end) + 1] if end in row else row for row in free]
    assert rows == cut and reasons == ["stop" if end in row else "length" for row in free]
    assert "stop" in reasons
    stopped, reasons = completed(generator(QUICK["exact"]), asked, should_stop=lambda number, tokens: number == 1)
    assert stopped == [free[0], free[1][:PERIOD], *free[2:]] and reasons.count("stop") == 1


def test_prompts_of_all_lengths_share_few_programs():
    made = Generator(model(), QUICK["exact"], batch=2, max_prompt_tokens=80, max_new_tokens=16, prefill_chunk=8)
    functions = [decode_block, prefill.prefill_layer, prefill.prefill_cache, batching._insert_row]
    before = [function._cache_size() for function in functions]
    completed(made, [Request([1] * length, 2) for length in range(1, 81, 5)])
    # Both layers share theirs. Lengths of 16 to 80 are read, though chunks of 8 would do for some.
    assert [function._cache_size() - size for function, size in zip(functions, before, strict=True)] == [1, 5, 5, 1]


def test_rows_within_memory():
    made = generator(kvjax.StreamingLLM(40, compact_every=PERIOD))
    held = kvjax.cache_bytes(made.with_batch(4).init_state().layers).device
    assert held <= 4 * made.row_bytes < 1.01 * held  # rows share a counter
    assert (
        batching.parse_batch_size(f"{4 * made.row_bytes}B", made)
        == 4
        == batching.parse_batch_size(f"{5 * made.row_bytes - 1}B", made)
    )
    assert batching.parse_batch_size(5, made) == batching.parse_batch_size("5", made) == 5
    for size, message in (
        (f"{made.row_bytes - 1}B", "are less than the .* of one row's caches"),
        ("10%", "batch_size='10%'"),
    ):
        with pytest.raises(ValueError, match=message):
            batching.parse_batch_size(size, made)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([], 4), "prompt 1: the prompt is empty"),
        (Request([1] * 71, 4), "prompt 1: a prompt of 71 tokens exceeds max_prompt_tokens=70"),
        (
            Request([1] * 60, 4, [1] * 71),
            r"prompt 1: a sequence of 135 tokens exceeds max_prompt_tokens \+ max_new_tokens = 70 \+ 64",
        ),
        (Request([1], 0), "prompt 1: max_new_tokens=0 must be at least 1"),
        (Request([128], 1), "prompt 1: token ids must be between 0 and 127, got 0 to 128"),
        (Request([1], 1, seed=-1), "prompt 1: seed=-1"),
    ],
)
def test_a_request_that_cannot_be_is_named(request_, message):
    with pytest.raises(ValueError, match=message):
        list(run_requests(generator(QUICK["exact"]), [Request([1], 1), request_]))
    with pytest.raises(ValueError, match="max_prefill_steps=0 must be at least 1"):
        next(run_requests(generator(QUICK["exact"]), [], max_prefill_steps=0))


def test_a_cache_that_is_not_sound_names_the_prompts():
    graph, parameters = nnx.split(model())
    spoilt = nnx.merge(graph, jax.tree.map(lambda x: jnp.nan * x, parameters))
    made = Generator(spoilt, QUICK["exact"], batch=2, max_prompt_tokens=70, max_new_tokens=64, prefill_chunk=CHUNK)
    with pytest.raises(ValueError, match="prompt 0: .*steps had logits that are NaN or infinite"):
        list(run_requests(made, [Request([1, 2], 4)]))
