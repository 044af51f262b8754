"""Attention of the backends for tpu-inference, without tpu-inference, against loops over sequences and tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.quantization import dequantize, quantize
from kvjax_models.adapters import tpu_inference as adapter

HEADS, GROUP, HEAD_DIM = 2, 2, 32
# New tokens of each sequence, per step.
STEPS = ([150, 1, 5], [1, 1, 130], [1, 1, 1])


def attend_with_loops(q, keys, values, new, scale, window, cap):
    """Returns the output of the newest tokens of sequences, whose keys and values are lists [S] of [length, H, D]."""
    output, token = np.zeros(q.shape), 0
    for key, value, count in zip(keys, values, new, strict=True):
        for position in range(len(key) - count, len(key)):
            first = 0 if window is None else max(position + 1 - window, 0)
            for head in range(HEADS * GROUP):
                logits = key[first : position + 1, head // GROUP] @ q[token, head] * scale
                weights = np.exp(logits if cap is None else cap * np.tanh(logits / cap))
                output[token, head] = weights @ value[first : position + 1, head // GROUP] / weights.sum()
            token += 1
    return output


@pytest.mark.parametrize("kv_dtype, window, cap", [("int4", None, None), ("int8", 40, 1.5)])
def test_prompts_and_decode_steps_equal_loops(kv_dtype, window, cap):
    rng = np.random.default_rng(0)
    backend = adapter.QuantizedBackend(kv_dtype)
    cache = jnp.zeros(backend.get_kv_cache_shape(12, 256, HEADS, HEAD_DIM, jnp.bfloat16), jnp.bfloat16)
    table = jnp.asarray(rng.permutation(12)[:8], jnp.int32)  # two pages for each of four sequences, one of them unused
    keys, values = ([np.zeros((0, HEADS, HEAD_DIM))] * 3 for _ in range(2))
    options = adapter.Options(kv_dtype, 0.2, window, cap)
    attend = jax.jit(functools.partial(adapter.attend, options=options))
    for new in STEPS:
        q = rng.normal(size=(160, HEADS * GROUP, HEAD_DIM)).astype(np.float32)
        k, v = rng.normal(size=(2, 160, HEADS, HEAD_DIM)).astype(np.float32)
        starts = np.cumsum([0, *new])
        for tokens, stored, unbiased in ((k, keys, True), (v, values, False)):
            quantized = np.asarray(dequantize(quantize(tokens, kv_dtype, unbiased=unbiased)), np.float64)
            stored[:] = [
                np.concatenate([x, quantized[a:b]]) for x, a, b in zip(stored, starts, starts[1:], strict=False)
            ]
        decodes = next((i for i, count in enumerate(new) if count > 1), len(new))
        metadata = [*map(len, keys), 99], table, [*starts, 12345], [decodes, decodes, 3]
        sequences = adapter.Sequences(*(jnp.asarray(x, jnp.int32) for x in metadata))
        cache, output = attend(cache, q, k, v, sequences)
        expected = attend_with_loops(q[: starts[-1]], keys, values, new, 0.2, window, cap)
        np.testing.assert_allclose(output[: starts[-1]], expected, atol=2e-5)
        assert not output[starts[-1] :].any()


def test_pages_are_chosen_by_the_host():
    backend = adapter.QuantizedBackend("int4")
    assert backend.get_kv_cache_shape(7, 256, 8, 128, jnp.bfloat16) == (7, 2, 8, 33, 2, 128)
    with pytest.raises(ValueError, match="--block-size"):
        backend.get_kv_cache_shape(7, 16, 8, 128, jnp.bfloat16)
    with pytest.raises(ValueError, match="--kv-cache-dtype auto"):
        backend.get_kv_cache_shape(7, 128, 8, 128, jnp.float8_e4m3fn)


def test_vllm_without_tpu_inference_gets_no_backend(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert adapter.register() is None
