import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from experiments.common.compiled import large_outputs
from experiments.common.together import prefill_together
from kvjax.state import map_fields
from kvjax_models.generation import lowering, prefill
from kvjax_models.generation.decode import NO_TOKEN, decode_block
from kvjax_models.generation.generator import Generator, generate
from kvjax_models.generation.rows import extend_rows
from kvjax_models.generation.sampling import Sampling
from kvjax_models.generation.state import compact_layer
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama

VOCABULARY, PERIOD, CHUNK = 128, 16, 32
EXACT = kvjax.Exact(compact_every=PERIOD)
POLICIES = {
    "exact": EXACT,
    "streaming_llm_reindexed": kvjax.StreamingLLM(40, compact_every=PERIOD, reindex=True),
    "uniform": kvjax.Uniform(40, sinks=2, recent=16, compact_every=PERIOD),
    "clustergen_paper": kvjax.ClusterGen(40, compact_every=PERIOD, variant="paper"),
    "clustergen_mean_value": kvjax.ClusterGen(40, compact_every=PERIOD),
}
every_policy = pytest.mark.parametrize("name", POLICIES)


def random_model(windows=(None, 20, None)):
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        width=32,
        mlp_width=64,
        layers=len(windows),
        query_heads=4,
        kv_heads=2,
        head_dim=16,
        max_length=512,
        windows=windows,
    )
    graph, parameters = nnx.split(Llama(config, rngs=nnx.Rngs(0)))
    # Larger matrices than at initialisation: logits spread, so that a wrong cache changes tokens.
    return nnx.merge(graph, jax.tree.map(lambda x: 3 * x if x.ndim == 2 else x, parameters))


@functools.cache
def model():
    return random_model()


def tokens_of(seed, *lengths):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, length).tolist() for length in lengths]


PROMPTS = tokens_of(0, 70, 33, 1)
TURN = tokens_of(1, 20, 3, 7)


@functools.cache
def greedy_reference(number, count):
    """Token by token, the most likely one under full attention over everything."""
    forward = _forward()
    text = list(PROMPTS[number])
    for _ in range(count):
        padded = jnp.asarray([text + [0] * (128 - len(text))])
        text.append(int(jnp.argmax(forward(padded)[0, len(text) - 1])))
    return text[len(PROMPTS[number]) :]


@functools.cache
def _forward():
    return jax.jit(lambda tokens: model()(tokens))


@functools.cache
def generator(name, batch=3):
    return Generator(model(), POLICIES[name], batch=batch, max_prompt_tokens=70, max_new_tokens=90, prefill_chunk=CHUNK)


def written(made, state, count):
    rows = [[] for _ in range(made.batch)]
    for newest, tokens in made.decode(state, count):
        state = newest
        extend_rows(rows, tokens)
    return rows, state


def leaves(state):
    plain = lambda leaf: jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf  # noqa: E731
    return [np.asarray(plain(leaf)) for leaf in jax.tree.leaves(state)]


def test_greedy_tokens_under_exact_are_those_of_full_attention():
    made = generator("exact")
    rows, state = written(made, made.prefill(made.init_state(), PROMPTS), 40)
    assert rows == [greedy_reference(number, 40) for number in range(3)]
    assert len(set(rows[0])) > 5  # a text, not one token over and over
    np.testing.assert_array_equal(state.positions, [110, 73, 41])


def test_a_second_turn_under_exact_equals_one_long_prompt():
    made = generator("exact")
    state = made.prefill(made.init_state(), [prompt[: len(prompt) // 2 + 1] for prompt in PROMPTS])
    # Rows of 34, 16 and 9 more tokens, in blocks of 16: some rows end blocks before others.
    rest = [prompt[len(prompt) // 2 + 1 :] or greedy_reference(2, 9) for prompt in PROMPTS]
    rows, _ = written(made, made.prefill(state, rest), 30)
    assert rows == [greedy_reference(0, 30), greedy_reference(1, 30), greedy_reference(2, 39)[9:]]


def likelihoods(text):
    """Of a text's tokens but the first, under full attention."""
    padded = jnp.asarray([text + [0] * (128 - len(text))])
    logits = jax.nn.log_softmax(_forward()(padded)[0], axis=-1)
    return np.asarray([logits[place, token] for place, token in enumerate(text[1:])])


def test_scores_under_exact_are_log_probabilities_of_full_attention():
    whole = [prompt + turn for prompt, turn in zip(PROMPTS, TURN, strict=True)]
    made = generator("exact")
    state, scored = made.score(made.prefill(made.init_state(), PROMPTS), TURN)
    for text, turn, found in zip(whole, TURN, scored, strict=True):
        np.testing.assert_allclose(found, likelihoods(text)[-len(turn) :], atol=1e-4)
    # The state behind is that of reading: the same tokens come next.
    rows, _ = written(made, state, 5)
    assert rows == written(made, made.prefill(made.prefill(made.init_state(), PROMPTS), TURN), 5)[0]
    made = streaming("exact")
    _, scored = made.score(made.init_state(), PROMPTS)
    for prompt, found in zip(PROMPTS, scored, strict=True):
        np.testing.assert_allclose(found[0], -np.log(VOCABULARY), atol=1e-6)
        np.testing.assert_allclose(found[1:], likelihoods(prompt), atol=1e-4)


def test_a_fresh_generator_that_reads_exactly_does_not_score():
    made = generator("exact")
    with pytest.raises(ValueError, match="prefill a prompt first"):
        made.score(made.init_state(), PROMPTS)


@functools.cache
def streaming(name, max_prompt_tokens=70):
    return Generator(
        model(), POLICIES[name], batch=3, max_prompt_tokens=max_prompt_tokens, max_new_tokens=90, streaming=True
    )


def test_a_streamed_prompt_under_exact_is_read_exactly():
    made = streaming("exact")
    rows, state = written(made, made.prefill(made.init_state(), PROMPTS), 30)
    assert rows == [greedy_reference(number, 30) for number in range(3)]
    kvjax.raise_faults(state)


@every_policy
def test_a_streamed_prompt_may_come_in_parts(name):
    made = streaming(name)
    whole = [(PROMPTS[0] + prompt)[:64] for prompt in PROMPTS]
    at_once = made.prefill(made.init_state(3), whole)
    state = made.init_state(3)
    for begin in (0, 2 * PERIOD):  # at the borders of blocks
        state = made.prefill(state, [prompt[begin : begin + 2 * PERIOD] for prompt in whole])
    for a, b in zip(leaves(state), leaves(at_once), strict=True):
        np.testing.assert_array_equal(a, b)
    kvjax.raise_faults(state)


def test_a_streamed_prompt_takes_no_more_memory_the_longer_it_is():
    def bytes_of(max_prompt_tokens):
        made = streaming("uniform", max_prompt_tokens)
        memories = [
            lowered.compile().memory_analysis()
            for lowered in lowering.lower_append(made, jax.eval_shape(made.init_state))
        ]
        return [memory.argument_size_in_bytes + memory.temp_size_in_bytes for memory in memories]

    assert bytes_of(4096) == bytes_of(512)


def test_streaming_is_refused_where_it_cannot_be():
    whole_prompts_only = kvjax.SnapKV(40)
    with pytest.raises(ValueError, match=r"SnapKV\(.* compresses entire prompts"):
        Generator(model(), whole_prompts_only, batch=3, max_prompt_tokens=70, max_new_tokens=90, streaming=True)
    made = [streaming("exact"), generator("exact")]
    with pytest.raises(ValueError, match="prefill_together reads exactly"):
        prefill_together(made, [one.init_state() for one in made], PROMPTS)


@every_policy
def test_two_turns_survive_forking_taking_and_inserting_rows(name):
    made = generator(name)
    first, state = written(made, made.prefill(made.init_state(), PROMPTS), 20)
    assert [len(row) for row in first] == [20] * 3
    order = jnp.array([2, 0, 1])
    taken = kvjax.take_rows(state, order)
    # Row 1 goes into another state, made of other rows; row 0 is left out.
    inserted = kvjax.insert_rows(kvjax.take_rows(state, jnp.array([2, 2, 2])), _row(state, 1), jnp.array([0]))
    repeated = kvjax.repeat_rows(_row(state, 0), 3)
    second, _ = written(made, made.prefill(state, TURN), 20)  # this donates `state`; the forks must stand alone
    assert len({tuple(row) for row in second}) == 3
    rows, _ = written(made, made.prefill(taken, [TURN[row] for row in order]), 20)
    assert rows == [second[row] for row in order]
    rows, _ = written(made, made.prefill(inserted, [TURN[1], TURN[2], TURN[2]]), 20)
    assert rows == [second[1], second[2], second[2]]
    rows, _ = written(made, made.prefill(repeated, [TURN[0]] * 3), 20)
    assert rows == [second[0]] * 3


def _row(state, number):
    return kvjax.take_rows(state, jnp.array([number]))


def test_a_row_ends_alone_at_its_end_of_sequence_token():
    made = generator("exact")
    free = [greedy_reference(number, 40) for number in range(3)]
    eos = free[1][10]  # row 1 ends by its 11th token
    ends = [row.index(eos) + 1 if eos in row else len(row) for row in free]
    assert ends[1] <= 11 and max(ends) > 20
    stopping = Generator(
        model(), EXACT, batch=3, max_prompt_tokens=70, max_new_tokens=90, prefill_chunk=CHUNK, eos=(eos,)
    )
    rows, state = [[] for _ in PROMPTS], stopping.prefill(stopping.init_state(), PROMPTS)
    for newest, tokens in stopping.decode(state, 40):
        state = newest
        assert tokens.dtype == np.int32 and (tokens[1, ends[1] :] == NO_TOKEN).all()
        extend_rows(rows, tokens)
    assert rows == [row[:end] for row, end in zip(free, ends, strict=True)]
    expected = [len(prompt) + end for prompt, end in zip(PROMPTS, ends, strict=True)]
    np.testing.assert_array_equal(state.positions, expected)
    np.testing.assert_array_equal(state.counters.total, expected)
    np.testing.assert_array_equal(state.done, np.array(ends) < 40)
    assert made.block_size == stopping.block_size == PERIOD


@every_policy
def test_a_sampled_row_is_the_same_alone_and_by_itself_repeatable(name):
    sampling = Sampling(temperature=0.9, top_k=20)
    made = Generator(
        model(),
        POLICIES[name],
        batch=3,
        max_prompt_tokens=70,
        max_new_tokens=90,
        sampling=sampling,
        prefill_chunk=CHUNK,
    )
    rows, _ = written(made, made.prefill(made.init_state(seed=4), PROMPTS), 34)
    alone = Generator(
        model(),
        POLICIES[name],
        batch=1,
        max_prompt_tokens=70,
        max_new_tokens=90,
        sampling=sampling,
        prefill_chunk=CHUNK,
    )
    row, _ = written(alone, alone.prefill(_row(made.init_state(seed=4), 1), PROMPTS[1:2]), 34)
    assert row[0] == rows[1]
    if name == "exact":
        again, _ = written(made, made.prefill(made.init_state(seed=4), PROMPTS), 34)
        other, _ = written(made, made.prefill(made.init_state(seed=5), PROMPTS), 34)
        assert again == rows and all(a != b for a, b in zip(rows, other, strict=True))
        first, _ = written(alone, alone.prefill(alone.init_state(seed=4), PROMPTS[:1]), 34)
        assert first[0] == rows[0]  # a row's randomness depends on the seed and its number alone


def test_layers_may_have_policies_of_their_own():
    given = [EXACT, POLICIES["uniform"], POLICIES["clustergen_mean_value"]]
    made = Generator(model(), given, batch=3, max_prompt_tokens=70, max_new_tokens=90, prefill_chunk=CHUNK)
    # A sliding layer keeps just its window.
    assert made.policies == (EXACT, kvjax.SlidingWindow(20, compact_every=PERIOD), given[2])
    state = made.prefill(made.init_state(), PROMPTS)
    assert state.layers[0].state.keys.shape[2] == 192  # in whole blocks
    assert state.layers[1].state.keys.shape[2] == 20 and state.layers[2].state.window.keys.shape[2] == 40
    rows, _ = written(made, state, 20)
    assert [len(row) for row in rows] == [20] * 3


def test_generators_of_one_model_share_compiled_functions():
    # Policies are values: a generator with equal ones, and equal sizes, compiles nothing.
    made = [
        Generator(
            model(),
            kvjax.Exact(compact_every=PERIOD),
            batch=3,
            max_prompt_tokens=70,
            max_new_tokens=90,
            prefill_chunk=CHUNK,
        )
        for _ in range(2)
    ]
    assert made[0].policies == made[1].policies
    sizes = []
    for one in made:
        written(one, one.prefill(one.init_state(), PROMPTS), 3)
        sizes.append(decode_block._cache_size())
    assert sizes[0] == sizes[1]


def test_one_prefill_feeds_several_policies():
    names = ["exact", "uniform"]
    made = [generator(name) for name in names]
    together = prefill_together(made, [one.init_state() for one in made], PROMPTS)
    for one, state in zip(made, together, strict=True):
        apart = one.prefill(one.init_state(), PROMPTS)
        for a, b in zip(leaves(state), leaves(apart), strict=True):
            np.testing.assert_array_equal(a, b)
    rows = [written(one, state, 18)[0] for one, state in zip(made, together, strict=True)]
    assert rows[0] == [greedy_reference(number, 18) for number in range(3)]


def test_generate_is_the_generator_in_one_call():
    rows, state = generate(model(), EXACT, PROMPTS, max_new_tokens=18)
    assert rows == [greedy_reference(number, 18) for number in range(3)]
    kvjax.raise_faults(state)


@pytest.mark.parametrize(
    "prompts, message",
    [
        ([[1] * 71, [1], [1]], "71 tokens exceeds max_prompt_tokens=70"),
        ([[1], [], [1]], "prompt 1 is empty"),
        ([[1], [1]], "expected 3 prompts, one per batch row, got 2"),
        ([[1], [VOCABULARY], [1]], "got 0 to 128"),
        ([[1], [-1], [1]], "got -1 to 1"),
        ([[1], [2**32 + 1], [1]], "got 0 to 4294967297"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(prompts, message):
    made = generator("exact")
    with pytest.raises(ValueError, match=message):
        made.prefill(made.init_state(), prompts)


def test_more_tokens_than_the_caches_hold_are_refused():
    made = generator("exact")
    state = made.prefill(made.init_state(), PROMPTS)
    with pytest.raises(ValueError, match=r"161 tokens .* = 70 \+ 90"):
        next(made.decode(state, 91))
    with pytest.raises(ValueError, match="170 tokens"):
        made.prefill(state, [[1] * 100, [1], [1]])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"policy": [EXACT] * 2}, "one for each of 3 layers, got 2"),
        ({"prefill_chunk": 0}, "prefill_chunk=0"),
        ({"batch": 0}, "batch=0"),
        ({"max_new_tokens": 0}, r"max_new\w*=0"),
    ],
)
def test_generators_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Generator(
            **(
                {"model": model(), "policy": EXACT, "batch": 3, "max_prompt_tokens": 70, "max_new_tokens": 90}
                | arguments
            )
        )


def test_prefill_together_needs_one_model():
    made = generator("exact")
    other = Generator(random_model(), EXACT, batch=3, max_prompt_tokens=70, max_new_tokens=90, prefill_chunk=CHUNK)
    with pytest.raises(ValueError, match="one and the same model"):
        prefill_together([made, other], [made.init_state(), other.init_state()], PROMPTS)


def test_weights_that_are_not_finite_raise_instead_of_giving_tokens():
    broken = random_model()
    broken.layers[2].mlp.down.kernel[...] = broken.layers[2].mlp.down.kernel[...].at[0, 0].set(jnp.nan)
    made = Generator(broken, EXACT, batch=3, max_prompt_tokens=70, max_new_tokens=90, prefill_chunk=CHUNK)
    with pytest.raises(ValueError, match="logits that are NaN or infinite"):
        list(made.decode(made.prefill(made.init_state(), PROMPTS), 20))


# --- what it costs ---


def live():
    arrays = jax.live_arrays()
    return len(arrays), sum(array.nbytes for array in arrays)


def test_256_tokens_take_one_trace_and_no_more_memory():
    # Two layers of one shape, so each function is compiled once whatever the number of layers.
    plain = random_model(windows=(None, None))
    policy = kvjax.Uniform(40, sinks=2, recent=16, compact_every=PERIOD)
    functions = [decode_block, compact_layer, prefill.prefill_cache, prefill.prefill_layer]
    before = [function._cache_size() for function in functions]
    made = Generator(plain, policy, batch=2, max_prompt_tokens=40, max_new_tokens=256, prefill_chunk=CHUNK)
    state, buffers, blocks = made.prefill(made.init_state(), tokens_of(3, 40, 9)), [], 0
    for _ in made.decode(state, 256):
        blocks += 1
        buffers.append(live())
    assert blocks == 256 // PERIOD
    assert len(set(buffers[1:])) == 1, buffers
    assert [function._cache_size() - size for function, size in zip(functions, before, strict=True)] == [1] * 4


LONG = 8192  # slots: 8192 * 2 * 16 elements per cache, far more than anything else in the program


@functools.cache
def compiled_decoding():
    made = Generator(model(), EXACT, batch=1, max_prompt_tokens=LONG, max_new_tokens=64, prefill_chunk=CHUNK)
    return lowering.lower_decode(made, jax.eval_shape(made.init_state)).compile()


CACHE_BYTES = 4 * 2 * (LONG + 64) * 16


def test_decoding_copies_no_cache():
    # An update in place has the shape of its whole buffer; decoding has none of that size, because it writes to staging
    # alone.
    assert large_outputs(compiled_decoding().as_text(), CACHE_BYTES) == []


def test_the_search_for_copies_finds_a_planted_one():
    def planted(buffer):
        def step(carry):
            number, buffer = carry
            # The old buffer is read after the update, which therefore cannot be in place.
            new = jax.lax.dynamic_update_slice(buffer, jnp.full((2, 1, 16), 1.0 * number), (0, number, 0))
            return number + 1, new + buffer[:, ::-1].sum() * (buffer[0, 0, 0] > 0)

        return jax.lax.while_loop(lambda carry: carry[0] < 5, step, (0, buffer))

    compiled = jax.jit(planted, donate_argnums=0).lower(jnp.zeros((2, LONG + 64, 16))).compile()
    assert "copy" in {one.opcode for one in large_outputs(compiled.as_text(), CACHE_BYTES)}


def test_decoding_needs_less_temporary_memory_than_one_cache():
    assert 0 < compiled_decoding().memory_analysis().temp_size_in_bytes < 2 * CACHE_BYTES


def test_prefill_memory_grows_with_the_prompt_not_its_square():
    layer = model().layers[0]

    def temporary(tokens):
        x = jax.ShapeDtypeStruct((1, tokens // 256, 256, 32), jnp.float32)
        lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
        lowered = prefill.prefill_layer.lower(layer, model().config.rotary(), None, False, 0, x, lengths)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary(2048) <= 4.5 * temporary(512)


def test_a_state_names_the_axes_of_all_it_holds():
    state = generator("uniform").init_state()
    names = map_fields(lambda field, _: field.axes, state)
    assert names.logits == ("B", "V") and names.layers[0].state.window.keys[0] == "B"
    for leaf, dimensions in zip(jax.tree.leaves(state), jax.tree.leaves(names, is_leaf=_names), strict=True):
        assert leaf.ndim == len(dimensions)
    assert dataclasses.is_dataclass(state)


def _names(node):
    return isinstance(node, tuple) and all(isinstance(name, str) for name in node)
