"""Attention kernels for entire prompts: the table of blocks against JAX's, interpreted kernels against XLA, and the
selection of a kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import process_mask

from kvjax_models.generation.prefill import prefill_layer
from kvjax_models.model import flash_attention
from kvjax_models.model.exact_attention import chunk_attention
from kvjax_models.model.flash_attention import AttentionSpec, unsupported_reason
from kvjax_models.model.llama import Llama
from tests.models.support import small_config

BF16 = jnp.dtype(jnp.bfloat16)
heavy = functools.partial(pytest.param, marks=pytest.mark.heavy)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(flash_attention, "BLOCK", 128)
    flash_attention._max_kv_blocks.cache_clear()
    yield
    flash_attention._max_kv_blocks.cache_clear()


def make_spec(tokens=300, *, dtype=BF16, head_dim=64, window=None, logit_cap=None, sinks=False, chunks=1, runs=1):
    return AttentionSpec(dtype, tokens, head_dim, window, logit_cap, sinks, chunks, runs)


@pytest.mark.parametrize("tokens", [128, 640])
@pytest.mark.parametrize("window", [None, 1, 128, 129, 257, 5000])
def test_kv_blocks_equal_those_of_jax(tokens, window):
    shape = (tokens, tokens)
    mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
    info, _ = process_mask(masks.MultiHeadMask([mask]), (128, 128), head_shards=1, q_seq_shards=1)
    kv_blocks, visibility = flash_attention._kv_blocks(make_spec(tokens, window=window), jnp.arange(tokens))
    np.testing.assert_array_equal(visibility, info.block_mask[0])
    np.testing.assert_array_equal(kv_blocks[visibility > 0], info.data_next[0][visibility > 0])
    # Invisible blocks prefetch the next visible one in the order of the grid.
    blocks, visible = kv_blocks.ravel(), np.flatnonzero(visibility.ravel())
    for step in np.flatnonzero(visibility.ravel() == 0):
        later = visible[visible > step]
        assert not later.size or blocks[step] == blocks[later[0]]


@pytest.mark.parametrize(
    "spec",
    [
        make_spec(300, window=150),
        heavy(make_spec(300)),
        heavy(make_spec(256, head_dim=128, window=5000)),
        heavy(make_spec(200, logit_cap=20.0, sinks=True)),
        make_spec(1024, window=300, chunks=2, runs=4),
        heavy(make_spec(768, logit_cap=20.0, sinks=True, chunks=4, runs=3)),
    ],
    ids=str,
)
def test_splash_attention_equals_exact_attention(spec):
    batch, heads, kv_heads = (2, 4, 2) if spec.runs == 1 else (1, 2, 1)
    query = 3 * jax.random.normal(jax.random.key(0), (batch, spec.tokens, heads, spec.head_dim), BF16)
    keys, values = jax.random.normal(jax.random.key(1), (2, batch, kv_heads, spec.tokens, spec.head_dim), BF16)
    sinks = jnp.linspace(-1.0, 3.0, heads) if spec.sinks else None
    exact_inputs = (x.astype(jnp.float32) for x in (query, keys, values))
    expected = chunk_attention(*exact_inputs, 0, sinks, window=spec.window, logit_cap=spec.logit_cap)
    runs = [spec.positions(run) for run in range(spec.runs)]
    np.testing.assert_array_equal(np.sort(np.concatenate(runs)), np.arange(spec.tokens))
    assert len({int(positions.sum()) for positions in runs}) == 1  # equal work
    attend = jax.jit(functools.partial(flash_attention._splash_attention, spec, interpret=True))
    for run, positions in enumerate(runs):
        output = attend(query[:, positions], keys, values, sinks, jnp.int32(run))
        assert output.dtype == BF16 and output.shape == query[:, positions].shape
        # bfloat16 has 8 bits: half a unit in the last place of the output and of the scaled query.
        np.testing.assert_allclose(np.asarray(output, np.float32), expected[:, positions], atol=0.03)


@pytest.mark.parametrize(
    ("platform", "spec", "reason"),
    [
        ("tpu", make_spec(), None),
        ("tpu", make_spec(window=64, logit_cap=30.0, sinks=True), None),
        ("tpu", make_spec(dtype=jnp.dtype(jnp.float32)), "float32"),
        ("tpu", make_spec(dtype=jnp.dtype(jnp.float16)), "float16"),
        ("tpu", make_spec(head_dim=96), "96"),
        ("tpu", make_spec(10**6), "blocks"),
        ("cuda", make_spec(logit_cap=30.0), "cap"),
        ("cuda", make_spec(sinks=True), "sinks"),
        ("tpu", make_spec(1024, chunks=2, runs=4), None),
        ("cuda", make_spec(1024, chunks=2, runs=4), "offsets"),
        ("cuda", make_spec(head_dim=256), "256"),
        ("cuda", make_spec(), "no GPU"),
        ("cpu", make_spec(), "no attention kernel"),
    ],
)
def test_unsupported_reason(platform, spec, reason):
    explanation = unsupported_reason(platform, spec)
    assert explanation is None if reason is None else reason in explanation
    assert (platform in flash_attention.available_kernels(spec)) == (reason is None)


def make_prefill(**sizes):
    """Returns a function that computes one layer; every call traces it, which selects a kernel, anew."""
    config = small_config(width=64, mlp_width=64, head_dim=64, max_length=512, **sizes)
    layer = Llama(config, dtype=BF16, rngs=nnx.Rngs(0)).layers[0]

    def prefill(num_queries):
        options = layer, config.rotary(0, 512), None, False, num_queries
        return jax.jit(lambda x, lengths: prefill_layer.__wrapped__(*options, x, lengths))

    return prefill


@pytest.mark.heavy
def test_a_layer_equals_its_chunks_with_the_kernel(monkeypatch):
    prefill = make_prefill(windows=(40,))
    x = jax.random.normal(jax.random.key(2), (1, 256, 64), BF16).reshape(1, 4, 64, 64)
    lengths = jnp.array([200], jnp.int32)
    expected = prefill(32)(x, lengths)
    specs = []

    def attend(spec, *args, run):
        specs.append(spec)
        return flash_attention._splash_attention(spec, *args, run, interpret=True)

    monkeypatch.setattr(flash_attention, "_KERNELS", {"cpu": flash_attention._Kernel(lambda spec: None, attend)})
    actual = prefill(32)(x, lengths)
    assert specs == [AttentionSpec(BF16, 256, 64, 40, None, False, chunks=4)]
    for leaf, expected_leaf in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(leaf, np.float32), np.asarray(expected_leaf, np.float32), atol=0.05)


@pytest.mark.parametrize("window", [None, 40])
def test_nvidia_programs_contain_cudnn_attention(monkeypatch, window):
    # Only lowers: the checks of this process's GPU are disabled.
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(flash_attention, "_gpu_unsupported", lambda: None)
    prefill = make_prefill(query_heads=4, kv_heads=2, windows=(window,))
    shapes = jax.ShapeDtypeStruct((2, 4, 64, 64), BF16), jax.ShapeDtypeStruct((2,), jnp.int32)
    chunk_rows = "2x2x128x64"  # [2, 2, 64 x 2, 64]

    def lower():
        return prefill(0).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()

    text = lower()
    assert text.count("__cudnn$fmhaSoftmax") == 1 and chunk_rows not in text
    monkeypatch.setattr(flash_attention, "_gpu_unsupported", lambda: "none")
    assert chunk_rows in lower()
