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

from kvjax_models.model import flash_attention
from kvjax_models.model.config import AttentionConfig
from kvjax_models.model.exact_attention import chunk_attention
from kvjax_models.model.flash_attention import AttentionSpec, unsupported_reason
from kvjax_models.model.llama import Llama
from kvjax_models.runner.prefill import prefill_layer
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


@pytest.mark.parametrize("window", [None, 40])
def test_nvidia_programs_contain_cudnn_attention(monkeypatch, window):
    # Only lowers: the checks of this process's GPU are disabled.
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    sizes = {"query_heads": 4, "kv_heads": 2, "width": 64, "mlp_width": 64, "head_dim": 64, "max_length": 512}
    config = small_config(**sizes, attention=AttentionConfig(windows=(window,)))
    layer = Llama(config, dtype=BF16, rngs=nnx.Rngs(0)).layers[0]
    shapes = jax.ShapeDtypeStruct((2, 4, 64, 64), BF16), jax.ShapeDtypeStruct((2,), jnp.int32)

    def lower(unsupported_reason):
        """Traces the layer, which selects a kernel, anew."""
        monkeypatch.setattr(flash_attention, "_gpu_unsupported", lambda: unsupported_reason)
        prefill = functools.partial(prefill_layer.__wrapped__, layer, config.rotary(0, 512), None, False, 0)
        return jax.jit(prefill).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()

    chunk_rows = "2x2x128x64"  # [2, 2, 64 x 2, 64]
    text = lower(None)
    assert text.count("__cudnn$fmhaSoftmax") == 1 and chunk_rows not in text
    assert chunk_rows in lower("none")
