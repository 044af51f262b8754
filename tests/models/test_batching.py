"""Continuous batching: every request gets the tokens of a single-row generator."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from kvjax_models.generation.batching import Request, run_requests

import kvjax
from kvjax_models.generation import batching, prefill
from kvjax_models.generation.decode import decode_program
from kvjax_models.generation.sampling import Sampling
from tests.kvjax.support import ON_A_MESH, each
from tests.models import test_generate
from tests.models.support import compile_counts
from tests.models.test_generate import PERIOD, random_model, random_tokens

# More requests than rows, with one to three chunks, which finish at various positions of a block.
LENGTHS, NEW = (70, 33, 1, 20, 5), (5, 40, 16, 1, 23)
EXACT = kvjax.Exact(compact_every=PERIOD)
SHARED = ("exact", "clustergen", "streaming_llm", "subgen_mean", "balancekv", "clusterkv", "leverage_scores")
POLICIES = {name: ON_A_MESH[name] for name in SHARED} | {
    "host_memory": kvjax.HostMemory(ON_A_MESH["clusterkv"]),
    "kvzip": kvjax.KVzip(40, recent=8, compact_every=PERIOD),
    "first_layers": kvjax.FirstLayers(1, kvjax.Uniform(40, recent=16, compact_every=PERIOD), kvjax.Exact(PERIOD)),
}


@functools.cache
def model():
    return random_model((None, None))


def make_generator(policy=EXACT, other_model=None, **changes):
    return test_generate.make_generator(policy, other_model or model(), **{"max_new_tokens": 64} | changes)


def requests(*, question=()):
    prompts = random_tokens(3, *LENGTHS)
    return [Request(text, new, question, seed) for seed, (text, new) in enumerate(zip(prompts, NEW, strict=True))]


def complete(generator, some_requests, **options):
    """Tokens and finish reasons in the order of the requests."""
    rows, reasons = {}, {}
    for number, tokens, reason in run_requests(generator, some_requests, **options):
        assert number not in reasons
        rows.setdefault(number, []).extend(tokens)
        if reason is not None:
            reasons[number] = reason
    return [rows[number] for number in sorted(rows)], [reasons[number] for number in sorted(reasons)]


def complete_alone(generator, some_requests):
    alone, rows = generator.with_batch(1), []
    for request in some_requests:
        state = alone.prefill(alone.init_state(request.seed), [request.prompt])
        if request.question:
            state = alone.prefill(state, [request.question])
        rows += alone.decode_all(state, request.max_new_tokens)[0]
    return rows


@pytest.mark.parametrize("name", each(POLICIES, quick=("clustergen",)))
def test_tokens_equal_those_of_each_request_alone(name):
    """With a question and sampling."""
    generator = make_generator(POLICIES[name], sampling=Sampling(temperature=1.0))
    some_requests = requests(question=(7, 8, 9))
    rows, reasons = complete(generator, some_requests, max_prefill_steps=2)
    assert rows == complete_alone(generator, some_requests) and reasons == ["length"] * len(some_requests)
    assert [len(row) for row in rows] == list(NEW)


def test_tokens_do_not_depend_on_rows_or_prefill_steps():
    expected = complete_alone(make_generator(), requests())
    for batch, max_prefill_steps in ((3, None), (8, 1)):
        assert complete(make_generator(batch=batch), requests(), max_prefill_steps=max_prefill_steps)[0] == expected


def test_prefill_steps_alternate_with_blocks():
    # The second request needs two layers and an insertion: three blocks of the first one come before its first block.
    some_requests = [Request([1] * 40, 64), Request([2] * 40, 64)]
    for steps, expected in ((1, [0] * 3 + [0, 1] + [1] * 3), (None, [0, 1] * 4)):
        outputs = run_requests(make_generator(batch=2), some_requests, max_prefill_steps=steps)
        assert [output.number for output in outputs] == expected


def test_requests_are_read_when_rows_are_free():
    num_read = []

    def read_requests():
        for number in range(5):
            num_read.append(number)
            yield Request([number + 1] * 9, 8)

    order = [(output.number, len(num_read)) for output in run_requests(make_generator(batch=2), read_requests())]
    assert order == [(0, 2), (1, 2), (2, 4), (3, 4), (4, 5)]


def test_end_of_text_tokens_and_the_caller_finish_requests():
    unlimited, _ = complete(make_generator(), requests())
    eos = unlimited[1][20]
    rows, reasons = complete(make_generator(eos=(eos,)), requests())
    assert rows == [row[: row.index(eos) + 1] if eos in row else row for row in unlimited]
    assert reasons == ["stop" if eos in row else "length" for row in unlimited] and "stop" in reasons
    rows, reasons = complete(make_generator(), requests(), should_stop=lambda number, tokens: number == 1)
    assert rows == [unlimited[0], unlimited[1][:PERIOD], *unlimited[2:]] and reasons.count("stop") == 1


def test_prompts_of_all_lengths_share_programs():
    generator = make_generator(batch=2, max_prompt_tokens=80, max_new_tokens=16, prefill_chunk=8)
    functions = [decode_program, prefill.prefill_layer, prefill.prefill_cache, batching._insert_row]
    # Prompts are padded to 5 lengths from 16 to 80, although chunks have 8 tokens; equal layers share programs.
    with compile_counts(functions, [1, 5, 5, 1]):
        complete(generator, [Request([1] * length, 2) for length in range(1, 81, 5)])


def test_batch_size_from_bytes():
    generator = make_generator(kvjax.StreamingLLM(40, compact_every=PERIOD))
    cache_bytes = kvjax.cache_bytes(generator.with_batch(4).init_state().layers).device
    assert cache_bytes <= 4 * generator.row_bytes < 1.01 * cache_bytes  # rows share a counter
    sizes = {f"{4 * generator.row_bytes}B": 4, f"{5 * generator.row_bytes - 1}B": 4, 5: 5, "5": 5}
    assert {size: batching.parse_batch_size(size, generator) for size in sizes} == sizes
    for size, message in (
        (f"{generator.row_bytes - 1}B", "are less than the .* of one row's caches"),
        ("10%", "batch_size='10%'"),
    ):
        with pytest.raises(ValueError, match=message):
            batching.parse_batch_size(size, generator)


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        (Request([], 4), "prompt 1: the prompt is empty"),
        (
            Request([1] * 60, 4, [1] * 71),
            r"prompt 1: a sequence of 135 tokens exceeds max_prompt_tokens \+ max_new_tokens = 70 \+ 64",
        ),
        (Request([1], 0), "prompt 1: max_new_tokens=0 must be at least 1"),
        (Request([128], 1), "prompt 1: token ids must be between 0 and 127, got 0 to 128"),
    ],
)
def test_invalid_requests_are_refused_by_number(invalid, message):
    with pytest.raises(ValueError, match=message):
        list(run_requests(make_generator(), [Request([1], 1), invalid]))


def test_invalid_number_of_prefill_steps_is_refused():
    with pytest.raises(ValueError, match="max_prefill_steps=0 must be at least 1"):
        next(run_requests(make_generator(), [], max_prefill_steps=0))


def test_faults_name_the_prompts():
    graph, parameters = nnx.split(model())
    broken = nnx.merge(graph, jax.tree.map(lambda x: jnp.nan * x, parameters))
    with pytest.raises(ValueError, match="prompt 0: .*steps had logits that are NaN or infinite"):
        list(run_requests(make_generator(EXACT, broken, batch=2), [Request([1, 2], 4)]))
