"""Gated short convolutions, alone and as the layers of a hybrid model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax_models.model.short_convolution import ShortConvolution, ShortConvolutionSizes, convolve, last_inputs
from tests.models import tiny
from tests.models.test_hybrid import QUESTIONS, assert_close, continue_without_cache, generate, make_generator

BATCH, CHANNELS = 2, 32


def make_layer(dtype=jnp.float32):
    sizes = ShortConvolutionSizes(channels=CHANNELS, kernel_size=3, use_bias=True)
    layer = ShortConvolution(16, sizes, dtype=dtype, rngs=nnx.Rngs(0))
    layer.bias[...] = jax.random.normal(jax.random.key(2), CHANNELS)
    return layer, layer.init_state(BATCH)


def test_convolution_equals_numpy():
    rng = np.random.default_rng(0)
    x, kernel, last = rng.normal(size=(1, 5, 1)), rng.normal(size=(4, 1)), rng.normal(size=(1, 3, 1))
    entire = np.concatenate([last, x], axis=1)
    inputs = jnp.asarray(entire, jnp.float32)
    expected = np.convolve(entire.reshape(-1), kernel[::-1].reshape(-1), mode="valid")
    np.testing.assert_allclose(convolve(inputs, jnp.asarray(kernel)).reshape(-1), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(last_inputs(inputs, jnp.array([4]), 3), inputs[:, 4:7])


def test_tokens_in_parts_equal_one_pass():
    layer, state = make_layer()
    x = jax.random.normal(jax.random.key(0), (BATCH, 20, 16))
    expected, last = layer(x, state, jnp.full(BATCH, 20))
    parts, first = [], 0
    for size in (1, 2, 1, 16):
        y, state = layer(x[:, first : first + size], state, jnp.full(BATCH, size))
        parts.append(y)
        first += size
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), expected, atol=1e-5)
    np.testing.assert_allclose(state.inputs, last.inputs, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 20])
def test_padding_does_not_change_the_state(tokens):
    layer, state = make_layer()
    x = jax.random.normal(jax.random.key(1), (BATCH, 5 + tokens, 16))
    _, state = layer(x[:, :5], state, jnp.array([5, 1]))
    _, unchanged = layer(x[:, 5:], state, jnp.array([tokens, 0]))
    np.testing.assert_array_equal(unchanged.inputs[1], state.inputs[1])
    assert float(jnp.abs(unchanged.inputs[0] - state.inputs[0]).max()) > 1e-3
    _, short = layer(x[1:, :1], layer.init_state(1), jnp.array([1]))
    np.testing.assert_allclose(state.inputs[1:], short.inputs, atol=1e-6)


@pytest.fixture(scope="module")
def llm():
    sizes = ShortConvolutionSizes(channels=tiny.make_config().width, kernel_size=3, use_bias=True)
    return tiny.make_lively_llm(layers=5, recurrent_layers=(0, 2, 4), recurrence=sizes, query_key_norm=True)


def test_chunks_of_any_size_generate_what_full_attention_generates(llm):
    expected, states = continue_without_cache(llm), []
    for options in ({"prefill_chunk": 8}, {"prefill_chunk": 80}, {"streaming": True}):
        rows, state = generate(make_generator(llm, **options))
        assert rows == expected and len(state.layers) == 2 and len(state.recurrent) == 3
        states.append(state)
    for state in states[1:]:
        assert_close((state.recurrent, state.logits), (states[0].recurrent, states[0].logits))
    row = 4 * 3 * 2 * llm.model.config.width  # float32, three layers of two inputs
    assert make_generator(llm).recurrent_row_bytes == row


@pytest.mark.parametrize("policy, budget", [("exact", None), ("snapkv", 64), ("kvzip", 64)])
def test_document_answers_as_runs_from_the_start(llm, policy, budget, tmp_path):
    text = "a text of some length, which is read once; " * 3
    cache, options = llm.cache(policy, budget), {"max_new_tokens": 8}
    document = cache.read(text, max_new_tokens=64, chat=False)
    answers = document.generate(QUESTIONS[:4], **options)
    assert len(set(answers)) == 4
    if budget is None:
        assert cache.generate([text + one for one in QUESTIONS[:4]], **options) == answers
    document.save(tmp_path)
    opened = llm.open(tmp_path)
    assert_close(opened.prefix.recurrent, document.prefix.recurrent, atol=0)
    assert opened.generate(QUESTIONS[:4], **options) == answers
    assert document.cache_bytes == kvjax.cache_bytes((document.prefix.entries, document.prefix.recurrent)).device
