"""Whole prompts through the platforms' kernels: the table of blocks against JAX's own, attention in the interpreter
against XLA's, and which path is taken."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import process_mask

from kvjax_models.generation import prefill
from kvjax_models.model import flash_attention
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.exact_attention import chunk_attention
from kvjax_models.model.flash_attention import AttentionSpec, unsupported_reason
from kvjax_models.model.llama import Llama

BF16 = jnp.dtype(jnp.bfloat16)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(flash_attention, "BLOCK", 128)
    flash_attention._max_kv_blocks.cache_clear()
    yield
    flash_attention._max_kv_blocks.cache_clear()


def asked(tokens=300, *, dtype=BF16, head_dim=64, window=None, logit_cap=None, sinks=False, pieces=1, runs=1):
    return AttentionSpec(dtype, tokens, head_dim, window, logit_cap, sinks, pieces, runs)


@pytest.mark.parametrize("tokens", [128, 640])
@pytest.mark.parametrize("window", [None, 1, 128, 129, 257, 5000])
def test_the_blocks_that_are_read_are_those_that_jax_finds(tokens, window):
    shape = (tokens, tokens)
    mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
    info, _ = process_mask(masks.MultiHeadMask([mask]), (128, 128), head_shards=1, q_seq_shards=1)
    of, kinds = flash_attention._kv_blocks(asked(tokens, window=window), jnp.arange(tokens))
    np.testing.assert_array_equal(kinds, info.block_mask[0])
    np.testing.assert_array_equal(of[kinds > 0], info.data_next[0][kinds > 0])
    # What is fetched ahead is what is read next, in the order of the grid.
    blocks, read = of.ravel(), np.flatnonzero(kinds.ravel())
    for step in np.flatnonzero(kinds.ravel() == 0):
        after = read[read > step]
        assert not after.size or blocks[step] == blocks[after[0]]


@pytest.mark.parametrize(
    "of",
    [
        asked(300, window=150),
        *(
            pytest.param(of, marks=pytest.mark.heavy)
            for of in (asked(300), asked(256, head_dim=128, window=5000), asked(200, logit_cap=20.0, sinks=True))
        ),
    ],
    ids=str,
)
def test_splash_attention_is_exact_attention(of):
    # Ragged rows need nothing: no token sees what pads a prompt behind it.
    query = 3 * jax.random.normal(jax.random.key(0), (2, of.tokens, 4, of.head_dim), BF16)
    keys, values = jax.random.normal(jax.random.key(1), (2, 2, 2, of.tokens, of.head_dim), BF16)
    sinks = jnp.linspace(-1.0, 3.0, 4) if of.sinks else None
    attend = jax.jit(functools.partial(flash_attention._splash_attention, of, interpret=True))
    got = attend(query, keys, values, sinks)
    wide = (x.astype(jnp.float32) for x in (query, keys, values))
    expected = chunk_attention(*wide, 0, sinks, window=of.window, logit_cap=of.logit_cap)
    assert got.dtype == BF16 and got.shape == query.shape
    # bfloat16 has 8 bits: half a unit of the result's last place, and of the scaled query's.
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, atol=0.03)


@pytest.mark.parametrize(
    "of",
    [
        asked(1024, window=300, pieces=2, runs=4),
        pytest.param(asked(768, logit_cap=20.0, sinks=True, pieces=4, runs=3), marks=pytest.mark.heavy),
    ],
    ids=str,
)
def test_splash_attention_of_a_device_s_queries_is_exact_attention(of):
    query = 3 * jax.random.normal(jax.random.key(0), (1, of.tokens, 2, of.head_dim), BF16)
    keys, values = jax.random.normal(jax.random.key(1), (2, 1, 1, of.tokens, of.head_dim), BF16)
    sinks = jnp.linspace(-1.0, 3.0, 2) if of.sinks else None
    attend = jax.jit(functools.partial(flash_attention._splash_attention, of, interpret=True))
    wide = (x.astype(jnp.float32) for x in (query, keys, values))
    expected = chunk_attention(*wide, 0, sinks, window=of.window, logit_cap=of.logit_cap)
    taken = [of.positions(run) for run in range(of.runs)]
    np.testing.assert_array_equal(np.sort(np.concatenate(taken)), np.arange(of.tokens))
    assert len({int(positions.sum()) for positions in taken}) == 1  # equal work
    for run, positions in enumerate(taken):
        got = attend(query[:, positions], keys, values, sinks, jnp.int32(run))
        np.testing.assert_allclose(np.asarray(got, np.float32), expected[:, positions], atol=0.03)


@pytest.mark.parametrize(
    ("platform", "of", "reason"),
    [
        ("tpu", asked(), None),
        ("tpu", asked(window=64, logit_cap=30.0, sinks=True), None),
        ("tpu", asked(dtype=jnp.dtype(jnp.float32)), "float32"),
        ("tpu", asked(dtype=jnp.dtype(jnp.float16)), "float16"),
        ("tpu", asked(head_dim=96), "96"),
        ("tpu", asked(10**6), "blocks"),
        ("cuda", asked(logit_cap=30.0), "cap"),
        ("cuda", asked(sinks=True), "sinks"),
        ("tpu", asked(1024, pieces=2, runs=4), None),
        ("cuda", asked(1024, pieces=2, runs=4), "offsets"),
        ("cuda", asked(head_dim=256), "256"),
        ("cuda", asked(), "no GPU"),
        ("cpu", asked(), "no attention kernel"),
    ],
)
def test_it_says_why_a_kernel_is_not_taken(platform, of, reason):
    told = unsupported_reason(platform, of)
    assert told is None if reason is None else reason in told
    assert (platform in flash_attention.available_kernels(of)) == (reason is None)


@pytest.mark.heavy
def test_a_layer_reads_a_prompt_through_the_kernel_as_through_chunks(monkeypatch):
    sizes = {"vocab_size": 16, "width": 64, "mlp_width": 64, "layers": 1, "query_heads": 2, "kv_heads": 1}
    config = LlamaConfig(**sizes, head_dim=64, max_length=512, windows=(40,))
    layer = Llama(config, dtype=BF16, rngs=nnx.Rngs(0)).layers[0]
    rows = jax.random.normal(jax.random.key(2), (1, 256, 64), BF16)

    def read():
        # A function of its own: which path is taken is found out while tracing.
        of_rows = lambda *given: prefill.prefill_layer.__wrapped__(  # noqa: E731
            layer, config.rotary(0, 512), None, False, 32, *given
        )
        return jax.jit(of_rows)(rows.reshape(1, 4, 64, 64), jnp.array([200], jnp.int32))

    expected = read()
    used = []

    def attend(of, *given, run):
        used.append(of)
        return flash_attention._splash_attention(of, *given, run, interpret=True)

    kernel = flash_attention._Kernel(lambda of: None, attend)
    monkeypatch.setattr(flash_attention, "_KERNELS", {"cpu": kernel})
    got = read()
    assert used == [AttentionSpec(BF16, 256, 64, 40, None, False, chunks=4)]
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), atol=0.05)


@pytest.mark.parametrize("window", [None, 40])
def test_programs_for_an_nvidia_gpu_hold_cudnns_attention(monkeypatch, window):
    # What asks the GPU of this process is set aside; nothing runs.
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(flash_attention, "_gpu_unsupported", lambda: None)
    sizes = {"vocab_size": 16, "width": 64, "mlp_width": 64, "layers": 1, "query_heads": 4, "kv_heads": 2}
    config = LlamaConfig(**sizes, head_dim=64, max_length=512, windows=(window,))
    layer = Llama(config, dtype=BF16, rngs=nnx.Rngs(0)).layers[0]
    read = lambda *given: prefill.prefill_layer.__wrapped__(layer, config.rotary(0, 512), None, False, 0, *given)  # noqa: E731
    given = jax.ShapeDtypeStruct((2, 4, 64, 64), BF16), jax.ShapeDtypeStruct((2,), jnp.int32)
    rows_of_a_chunk = "2x2x128x64"  # [2, 2, 64 x 2, 64]

    def lowered():
        return jax.jit(lambda *given: read(*given)).trace(*given).lower(lowering_platforms=("cuda",)).as_text()

    text = lowered()
    assert text.count("__cudnn$fmhaSoftmax") == 1 and rows_of_a_chunk not in text
    monkeypatch.setattr(flash_attention, "_gpu_unsupported", lambda: "none")
    assert rows_of_a_chunk in lowered()
