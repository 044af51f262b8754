"""Generators: greedy tokens against full attention, independence of rows, refusals, memory and compilation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.policy import Prompt
from kvjax_models.model import llama
from kvjax_models.model.config import AttentionConfig
from kvjax_models.model.llama import Llama
from kvjax_models.runner import decode as decode_lib
from kvjax_models.runner import lowering, prefill, repetition
from kvjax_models.runner.decode import NO_TOKEN, decode_program
from kvjax_models.runner.generator import Generator, prefill_together
from kvjax_models.runner.state import compact_layer
from tests.models import tiny
from tests.models.loops import decode, decode_all
from tests.models.support import assert_equal_states, compile_counts, small_config, written_arrays

VOCABULARY, PERIOD, CHUNK = 128, 16, 32
EXACT = kvjax.Exact(compact_every=PERIOD)
POLICIES = {
    "exact": EXACT,
    "streaming_llm_reindexed": kvjax.StreamingLLM(40, compact_every=PERIOD, reindex=True),
    "uniform": kvjax.Uniform(40, sinks=2, recent=16, compact_every=PERIOD),
    "clustergen": kvjax.ClusterGen(40, compact_every=PERIOD),
    "subgen_mean": kvjax.SubGenMean(40, recent=16, compact_every=PERIOD),
    # Another head of the first and of the last layer keeps every token; the second layer has a sliding window.
    "head_budgets": kvjax.HeadBudgets(
        kvjax.Chelsea(100, sinks=2, recent=16, chunk=16, compact_every=PERIOD), ((0.001, 1.0), None, (1.0, 0.001))
    ),
}
every_policy = pytest.mark.parametrize("name", POLICIES)
few_policies = pytest.mark.parametrize("name", ["exact", "subgen_mean", "head_budgets"])


def random_model(windows=(None, 20, None)):
    sizes = {"vocab_size": VOCABULARY, "width": 32, "mlp_width": 64, "query_heads": 4, "kv_heads": 2, "head_dim": 16}
    config = small_config(**sizes, max_length=512, layers=len(windows), attention=AttentionConfig(windows=windows))
    graph, parameters = nnx.split(Llama(config, rngs=nnx.Rngs(0)))
    # Larger than initial parameters, so that logits differ and a wrong cache changes tokens.
    return nnx.merge(graph, jax.tree.map(lambda x: 3 * x if x.ndim == 2 else x, parameters))


@functools.cache
def model():
    return random_model()


def random_tokens(seed, *lengths):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, length).tolist() for length in lengths]


PROMPTS = random_tokens(0, 70, 33, 1)
TURN = random_tokens(1, 20, 3, 7)


@functools.cache
def _forward():
    return jax.jit(lambda tokens: model()(tokens))


def full_attention_logits(text):
    """Returns the logits [T, V] after every token of a text."""
    padded = jnp.asarray([text + [0] * (128 - len(text))])
    return _forward()(padded)[0, : len(text)]


@functools.cache
def greedy_reference(number, count):
    """Greedy tokens with full attention, one by one."""
    text = list(PROMPTS[number])
    for _ in range(count):
        text.append(int(jnp.argmax(full_attention_logits(text)[-1])))
    return text[len(PROMPTS[number]) :]


def make_generator(policy=EXACT, other_model=None, **changes):
    sizes = {"batch": 3, "max_prompt_tokens": 70, "max_new_tokens": 90, "prefill_chunk": CHUNK} | changes
    return Generator(other_model or model(), policy, **sizes)


@functools.cache
def named_generator(name, batch=3):
    return make_generator(POLICIES[name], batch=batch)


@functools.cache
def streaming(name, max_prompt_tokens=70):
    return make_generator(POLICIES[name], max_prompt_tokens=max_prompt_tokens, streaming=True)


def start(generator, prompts=PROMPTS, seed=0):
    return generator.prefill(generator.init_state(seed), prompts)


def take_row(state, number):
    return kvjax.take_rows(state, jnp.array([number]))


@pytest.mark.parametrize("make", [named_generator, streaming])
def test_exact_generates_the_tokens_of_full_attention(make):
    generator = make("exact")
    rows, state = decode_all(generator, start(generator), 40)
    assert rows == [greedy_reference(number, 40) for number in range(3)]
    assert len(set(rows[0])) > 5
    np.testing.assert_array_equal(state.positions, [110, 73, 41])


def test_two_turns_with_exact_equal_one_prompt():
    generator = named_generator("exact")
    state = start(generator, [prompt[: len(prompt) // 2 + 1] for prompt in PROMPTS])
    # 34, 16 and 9 more tokens in blocks of 16: rows end in different blocks.
    remaining = [prompt[len(prompt) // 2 + 1 :] or greedy_reference(2, 9) for prompt in PROMPTS]
    rows, _ = decode_all(generator, generator.prefill(state, remaining), 30)
    assert rows == [greedy_reference(0, 30), greedy_reference(1, 30), greedy_reference(2, 39)[9:]]


def log_probs_of(text):
    """Log-probabilities of all tokens but the first, with full attention."""
    log_probs = np.asarray(jax.nn.log_softmax(full_attention_logits(text)))
    return log_probs[np.arange(len(text) - 1), text[1:]]


def test_scores_with_exact_are_log_probabilities_of_full_attention():
    generator = named_generator("exact")
    state, log_probs, is_greedy = generator.score(start(generator), TURN)
    for prompt, turn, row, greedy in zip(PROMPTS, TURN, log_probs, is_greedy, strict=True):
        np.testing.assert_allclose(row, log_probs_of(prompt + turn)[-len(turn) :], atol=1e-4)
        best = np.asarray(full_attention_logits(prompt + turn)[len(prompt) - 1 : -1].argmax(-1))
        np.testing.assert_array_equal(greedy, best == turn)
    with pytest.raises(ValueError, match="prefill a prompt first"):
        generator.score(generator.init_state(), PROMPTS)
    # The final state equals the state of prefill.
    assert decode_all(generator, state, 5)[0] == decode_all(generator, generator.prefill(start(generator), TURN), 5)[0]
    generator = streaming("exact")
    for prompt, row in zip(PROMPTS, generator.score(generator.init_state(), PROMPTS)[1], strict=True):
        np.testing.assert_allclose(row[0], -np.log(VOCABULARY), atol=1e-6)
        np.testing.assert_allclose(row[1:], log_probs_of(prompt), atol=1e-4)


@every_policy
def test_a_streaming_prompt_may_be_split_at_blocks(name):
    generator = streaming(name)
    prompts = [(PROMPTS[0] + prompt)[:64] for prompt in PROMPTS]
    state = generator.init_state(3)
    for begin in (0, 2 * PERIOD):
        state = generator.prefill(state, [prompt[begin : begin + 2 * PERIOD] for prompt in prompts])
    assert_equal_states(state, start(generator, prompts, seed=3))
    kvjax.raise_faults(state)


def test_streaming_memory_does_not_depend_on_the_prompt_length():
    def memory(max_prompt_tokens):
        generator = streaming("uniform", max_prompt_tokens)
        programs = lowering.lower_append(generator, jax.eval_shape(generator.init_state))
        analyses = [program.compile().memory_analysis() for program in programs]
        return [analysis.argument_size_in_bytes + analysis.temp_size_in_bytes for analysis in analyses]

    assert memory(4096) == memory(512)


@few_policies
def test_two_turns_with_copied_and_inserted_rows(name):
    generator = named_generator(name)
    first, state = decode_all(generator, start(generator), 20)
    assert [len(row) for row in first] == [20] * 3
    order = jnp.array([2, 0, 1])
    taken = kvjax.take_rows(state, order)
    inserted = kvjax.insert_rows(kvjax.take_rows(state, jnp.array([2, 2, 2])), take_row(state, 1), jnp.array([0]))
    repeated = kvjax.repeat_rows(take_row(state, 0), 3)
    # Donates `state`; the copies must not depend on it.
    second, _ = decode_all(generator, generator.prefill(state, TURN), 20)
    assert len({tuple(row) for row in second}) == 3
    for copy, rows in ((taken, order.tolist()), (inserted, [1, 2, 2]), (repeated, [0, 0, 0])):
        new_rows, _ = decode_all(generator, generator.prefill(copy, [TURN[row] for row in rows]), 20)
        assert new_rows == [second[row] for row in rows]


@pytest.mark.parametrize("min_layers", [decode_lib.MIN_LAYERS, 1], ids=["one program", "layer by layer"])
def test_each_row_finishes_at_its_end_of_text_token(min_layers, monkeypatch):
    monkeypatch.setattr(decode_lib, "MIN_LAYERS", min_layers)
    unlimited = [greedy_reference(number, 40) for number in range(3)]
    eos = unlimited[1][10]
    ends = [row.index(eos) + 1 if eos in row else len(row) for row in unlimited]
    assert ends[1] <= 11 and max(ends) > 20
    generator = make_generator(eos=(eos,))
    rows, state = [[] for _ in PROMPTS], start(generator)
    for new_state, tokens in decode(generator, state, 40):
        state = new_state
        assert tokens.dtype == np.int32 and (tokens[1, ends[1] :] == NO_TOKEN).all()
        for row, new in zip(rows, tokens, strict=True):
            row += [token for token in new.tolist() if token != NO_TOKEN]
    assert rows == [row[:end] for row, end in zip(unlimited, ends, strict=True)]
    expected = [len(prompt) + end for prompt, end in zip(PROMPTS, ends, strict=True)]
    np.testing.assert_array_equal(state.positions, expected)
    np.testing.assert_array_equal(state.counters.num_tokens, expected)
    np.testing.assert_array_equal(state.done, np.array(ends) < 40)
    assert generator.block_size == PERIOD


def test_a_plan_is_made_once():
    generator = make_generator(POLICIES["uniform"])
    split, many = generator.split_model, generator.with_batch(7)
    assert many.split_model is split and many.plan is generator.plan and (many.batch, many.specs[0].batch) == (7, 7)
    assert Generator(generator.model, generator.plan, batch=2).policies == generator.policies
    with pytest.raises(TypeError, match="max_new_tokens belong to the plan; make another plan with them"):
        Generator(generator.model, generator.plan, batch=2, max_new_tokens=9)
    with pytest.raises(ValueError, match="batch=0 must be at least 1"):
        generator.with_batch(0)


def test_each_layer_may_have_its_own_policy():
    policies = [EXACT, POLICIES["uniform"], POLICIES["clustergen"]]
    generator = make_generator(policies)
    # The layer with a sliding window caches its window.
    assert generator.policies == (EXACT, kvjax.SlidingWindow(20, compact_every=PERIOD), policies[2])
    state = start(generator)
    assert state.layers[0].state.keys.shape[2] == 192  # rounded up to blocks
    assert state.layers[1].state.keys.shape[2] == 24 and state.layers[2].state.window.keys.shape[2] == 40
    rows, _ = decode_all(generator, state, 20)
    assert [len(row) for row in rows] == [20] * 3


def test_one_prefill_for_several_policies():
    """Policies that need different repetitions of the prompt are in one call too."""
    repeating = [policy(40, compact_every=PERIOD) for policy in (kvjax.KVzip, kvjax.KVgrad)]
    generators = [named_generator(name) for name in ("exact", "uniform")]
    generators += [make_generator(policy) for policy in repeating]
    *_, states = prefill_together(generators, [generator.init_state() for generator in generators], PROMPTS)
    for generator, state in zip(generators, states, strict=True):
        assert_equal_states(state, start(generator))
    for other, message in (
        (make_generator(EXACT, random_model()), "generators of one model"),
        (streaming("exact"), "got a streaming generator"),
    ):
        with pytest.raises(ValueError, match=message):
            next(prefill_together([generators[0], other], [generators[0].init_state(), other.init_state()], PROMPTS))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: start(named_generator("exact"), [[1] * 71, [1], [1]]), "71 tokens exceeds max_prompt_tokens=70"),
        (lambda: start(named_generator("exact"), [[1], [], [1]]), "prompt 1 is empty"),
        (lambda: start(named_generator("exact"), [[1], [1]]), "expected 3 prompts, one per batch row, got 2"),
        (lambda: make_generator([EXACT] * 2), "one for each of 3 layers, got 2"),
        (lambda: make_generator(prefill_chunk=0), "prefill_chunk=0"),
        (lambda: make_generator(batch=0), "batch=0"),
        (lambda: make_generator(max_new_tokens=-1), r"max_new\w*=-1"),
        (lambda: make_generator(kvjax.SnapKV(40), streaming=True), r"SnapKV\(.* compresses entire prompts"),
    ],
)
def test_invalid_prompts_and_generators_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_more_tokens_than_the_capacity_are_refused():
    generator = named_generator("exact")
    state = start(generator)
    with pytest.raises(ValueError, match=r"161 tokens .* = 70 \+ 90"):
        next(decode(generator, state, 91))
    with pytest.raises(ValueError, match="170 tokens"):
        generator.prefill(state, [[1] * 100, [1], [1]])


# --- memory and compilation ---


def test_decoding_compiles_once_and_allocates_nothing():
    # Two equal layers, so each function is compiled once for all of them.
    generator = make_generator(
        POLICIES["uniform"], random_model((None, None)), batch=2, max_prompt_tokens=40, max_new_tokens=256
    )
    with compile_counts([decode_program, compact_layer, prefill.prefill_cache, prefill.prefill_layer], [1] * 4):
        state, buffers = start(generator, random_tokens(3, 40, 9)), []
        for _ in decode(generator, state, 256):
            buffers.append([array.nbytes for array in jax.live_arrays()])
    assert len(buffers) == 256 // PERIOD
    assert len({(len(sizes), sum(sizes)) for sizes in buffers[1:]}) == 1, buffers


@few_policies
def test_layer_by_layer_equals_one_program(name, monkeypatch):
    def two_turns():
        generator = named_generator(name)
        first, state = decode_all(generator, start(generator), 20)
        state = generator.prefill(state, TURN)
        state, log_probs, _ = generator.score(state, TURN)
        second, state = decode_all(generator, state, 18)
        return first + second, log_probs, state

    expected_tokens, expected_log_probs, expected_state = two_turns()
    monkeypatch.setattr(decode_lib, "MIN_LAYERS", 1)
    programs = [decode_program, decode_lib.append_program, decode_lib.score_program, decode_lib.step_layer]
    decode_lib.step_layer.clear_cache()
    # One program per kind of layer (full attention, window), and per length of a block: one token, PERIOD tokens, and
    # half of them for the end of a turn.
    with compile_counts(programs, [0, 0, 0, 6]):
        tokens, log_probs, state = two_turns()
    assert tokens == expected_tokens
    for row, expected in zip(log_probs, expected_log_probs, strict=True):
        np.testing.assert_allclose(row, expected, atol=1e-4)
    np.testing.assert_array_equal(state.positions, expected_state.positions)
    for cache, other in zip(state.layers, expected_state.layers, strict=True):
        assert jax.tree.map(jnp.shape, cache) == jax.tree.map(jnp.shape, other)


def test_a_cache_in_host_memory_generates_the_tokens_of_a_device_cache():
    def two_turns(policy):
        generator = make_generator(policy, random_model((None,)))
        state, turns = generator.init_state(), []
        for prompts in (PROMPTS, TURN):
            state = dataclasses.replace(generator.prefill(state, prompts), done=jnp.zeros(3, bool))
            rows, state = decode_all(generator, state, 20)
            turns.append(rows)
        return turns, state.layers[0].state, kvjax.cache_bytes(state).host

    clusters = {"full_layers": 0, "chunk_tokens": 16, "chunk_clusters": 2}
    policy = kvjax.ClusterKV(24, sinks=2, **clusters, compact_every=PERIOD)
    expected, device_state, _ = two_turns(policy)
    with compile_counts([decode_lib.append_program, decode_program, compact_layer], [2, 1, 1]):  # blocks of two lengths
        turns, state, host_bytes = two_turns(kvjax.HostMemory(policy))
    store = state.inner.store
    assert turns == expected and store.entries.sharding.memory_kind == "pinned_host"
    assert host_bytes == store.entries.nbytes and int(jnp.sum(state.block_caches[0].hits)) > 0
    np.testing.assert_array_equal(store.position, device_state.store.position)


LONG = 8192  # slots; a cache is far larger than all other arrays of the program
CACHE_BYTES = 4 * 2 * (LONG + 64) * 16


def test_decoding_copies_no_cache():
    """Decoding writes to the staging buffer only, so no operation may have the size of a cache."""
    generator = make_generator(batch=1, max_prompt_tokens=LONG, max_new_tokens=64)
    compiled = lowering.lower_decode(generator, jax.eval_shape(generator.init_state)).compile()
    assert max(size for _, size in written_arrays(compiled)) < CACHE_BYTES
    copies = jax.jit(jnp.flip).lower(jnp.zeros(CACHE_BYTES // 4)).compile()
    assert max(size for _, size in written_arrays(copies)) == CACHE_BYTES
    assert 0 < compiled.memory_analysis().temp_size_in_bytes < 2 * CACHE_BYTES


def test_prefill_memory_is_linear_in_the_prompt_length():
    def temporary_bytes(tokens):
        x = jax.ShapeDtypeStruct((1, tokens // 256, 256, 32), jnp.float32)
        lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
        options = model().layers[0], model().config.rotary(), None, False, 0
        return prefill.prefill_layer.lower(*options, x, lengths).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(2048) <= 4.5 * temporary_bytes(512)


# --- repetitions of the prompt ---


def make_model(**options):
    config = small_config(vocab_size=VOCABULARY, query_heads=4, kv_heads=2, layers=3, **options)
    return Llama(config, rngs=nnx.Rngs(0))


def padded_prompts(*lengths):
    """Returns random prompts, padded to the first length, and their lengths."""
    tokens = np.stack([np.resize(row, lengths[0]) for row in random_tokens(2, *lengths)])
    return tokens * (np.arange(lengths[0]) < np.array(lengths)[:, None]), np.array(lengths, np.int32)


SINKS_AND_CAP = {"attention.windows": (None, 20, None), "attention.sinks": True, "attention.logit_cap": 5.0}


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"attention.windows": (None, 20, None)}, {}),
        (SINKS_AND_CAP, {"chunk_tokens": 100}),
        (SINKS_AND_CAP, {"chunk_tokens": 170, "sinks": 0}),
    ],
)
def test_attention_received_from_repetitions_equals_the_scores_of_the_policy(options, settings):
    """KVzip computes scores from queries and keys of the repetition if the model does not return them."""
    policy = kvjax.KVzip(40, instruction=(1, 2), continuation=(3,), suffix=(4,), **settings)
    model = make_model(**options)
    tokens, lengths = padded_prompts(512, 300, 90)
    scored = []
    for layer in prefill.prefill_layers(model, tokens, jnp.asarray(lengths), 64, [0] * 3, policy.requires.repetition):
        scored.append(layer.repeated.received is not None)
        if not scored[-1]:
            continue
        prompt = Prompt(
            layer.keys.swapaxes(1, 2),
            layer.values.swapaxes(1, 2),
            jnp.asarray(lengths),
            sink_logits=layer.sink_logits,
            repeated=dataclasses.replace(layer.repeated, received=None),
            logit_cap=model.config.attention.logit_cap,
        )
        assert layer.repeated.received.max() < 1
        np.testing.assert_allclose(layer.repeated.received, policy.score(prompt), rtol=1e-4, atol=1e-6)
    assert scored == [True, False, True]


@pytest.mark.heavy
def test_weights_of_repetitions_are_gradients_and_norms():
    """The reference reads the prompt and one repetition as one text, and adds zeros to each attention output."""
    policy = kvjax.KVgrad(40, instruction=(1, 2), continuation=(3,), suffix=(4,), chunk_tokens=50)
    options = SINKS_AND_CAP | {"norms.position": "sandwich", "scales.residual": 0.5, "attention.output_bias": True}
    model, (tokens, lengths) = make_model(**options), padded_prompts(96, 60)
    config = model.config
    [*layers] = prefill.prefill_layers(
        model, tokens, jnp.asarray(lengths), 96, [0] * 3, policy.requires.repetition, capacity=192
    )
    texts, sizes = repetition.make_repetitions(policy.requires.repetition, tokens, lengths)

    @jax.grad
    def gradient(zeros, text):
        """Differentiates the sum of squares of the repetition, the last tokens of `text`."""
        positions = jnp.arange(len(text))[None]
        x = model.embed(text[None])
        for number, (layer, zero) in enumerate(zip(model.layers, zeros, strict=True)):
            query, key, value = layer.project(x, model.rotation(positions, number, 192))
            attended = llama._causal_attention(layer, query, key, value)
            output = layer.project_output(x, attended).at[0, -len(zero) :].add(zero)
            x = layer.add_attention(x, output)
        return jnp.sum(jnp.square(x[0, -zeros.shape[1] :]))

    for row, number in ((0, 1), (1, 0)):
        size = sizes[row, number]
        text = jnp.asarray(np.concatenate([tokens[row, : lengths[row]], texts[row, number, :size]]))
        gradients = gradient(jnp.zeros((3, size, config.width)), text)
        for layer, expected in zip(layers, jnp.linalg.norm(gradients, axis=-1), strict=True):
            weights = layer.repeated.query_weights.reshape(2, 2, -1)[row, number]
            np.testing.assert_allclose(weights[:size], expected, rtol=2e-4)
            assert not weights[size:].any()
    for layer, module in zip(layers, model.layers, strict=True):
        kernel = np.asarray(module.attention.output.kernel).reshape(4, config.head_dim, config.width)
        added = np.einsum("bnhd,hdw->bhnw", np.repeat(layer.values, 2, axis=2), kernel)
        np.testing.assert_allclose(layer.repeated.value_norms, np.linalg.norm(added, axis=-1), rtol=1e-4, atol=1e-6)


def test_layers_that_share_programs_have_their_own_heads():
    llm = tiny.make_llm()
    full, short = kvjax.Exact(compact_every=8), kvjax.StreamingLLM(16, sinks=2, compact_every=8)
    policies = [kvjax.ByHead(heads) for heads in ((full, short), (short, full))]
    sizes = {"batch": 1, "max_prompt_tokens": 40, "max_new_tokens": 8}
    state = Generator(llm.model, policies, **sizes).init_state()
    heads = [[group.index.tolist() for group in cache.state.heads] for cache in state.layers]
    assert heads == [[[0], [1]], [[1], [0]]]
    assert state.layers[0].policy == state.layers[1].policy
