"""Long prompts that eight devices, simulated, share by tokens are read as on one device. `test_generate_sharded` runs
these tests in a process that has the devices."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

import kvjax
from experiments.common.compiled import collectives, large_outputs
from kvjax_models.generation import lowering, prefill
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.rows import extend_rows
from kvjax_models.generation.sequence_parallel import CHUNK_SPEC, chunk_size
from kvjax_models.model import flash_attention
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama
from kvjax_models.sharding import shard_model
from tests.kvjax import support
from tests.models.test_generate_sharded import on_devices, run_two, two_processes

CONFIG = LlamaConfig(
    vocab_size=40, width=32, mlp_width=16, layers=2, query_heads=8, kv_heads=4, head_dim=8, max_length=4096
)
SINKS_AND_CAP = {"attention_sinks": True, "attention_logit_cap": 5.0, "windows": (40, None)}
EXPERTS = {"experts": 4, "experts_per_token": 2, "expert_width": 16, "mlp_bias": True}
NORMS = {"norms": "sandwich", "query_key_norm": True, "joint_query_key_norm": True, "windows": (None, 100)}
# Heads of queries and of keys, the mesh, and what else the model has.
MODELS = {
    "heads": (8, 4, {"tensor": 8}, {}),
    "heads of two groups": (4, 4, {"tensor": 4, "data": 2}, SINKS_AND_CAP),
    "tokens": (6, 2, {"tensor": 8}, SINKS_AND_CAP | EXPERTS),
    "tokens of all heads": (4, 2, {"tensor": 8, "sequence": 8}, NORMS),
    "tokens of two groups": (2, 2, {"tensor": 4, "data": 2}, {}),
}
KVZIP = kvjax.KVzip(40, recent=8, compact_every=8, chunk_tokens=100, instruction=(1, 2), continuation=(3,), suffix=(4,))
REPETITION = KVZIP.requires.repetition
CHUNK, LENGTHS = 16, [300, 512]


def random_model(query_heads, kv_heads, more, dtype=jnp.float32):
    config = dataclasses.replace(CONFIG, query_heads=query_heads, kv_heads=kv_heads, **more)
    model = Llama(config, dtype=dtype, rngs=nnx.Rngs(0))
    if config.attention_sinks:
        for layer in model.layers:
            layer.attention.sinks[...] = jnp.linspace(-2.0, 2.0, query_heads, dtype=dtype)
    return model


def read(model, asked, repeat=None, chunk=CHUNK):
    """What every layer computes of two prompts."""
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 512)).astype(np.int32)
    for row, length in zip(tokens, LENGTHS, strict=True):
        row[length:] = 0
    yield from prefill.prefill_layers(model, tokens, jnp.asarray(LENGTHS, jnp.int32), chunk, [asked] * 2, repeat)


def equal(got, wanted, **close):
    for length, row, other in zip(LENGTHS, np.asarray(got), np.asarray(wanted), strict=True):
        np.testing.assert_allclose(row[:length], other[:length], **close)


@on_devices
@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("heads", 5),
        ("tokens", 512),
        *(
            pytest.param(name, asked, marks=pytest.mark.heavy)
            for name, asked in {
                "heads of two groups": 64,
                "tokens of all heads": 100,
                "tokens of two groups": 0,
            }.items()
        ),
    ],
)
def test_layers_compute_what_they_compute_on_one_device(name, asked):
    query_heads, kv_heads, shape, more = MODELS[name]
    model, mesh = random_model(query_heads, kv_heads, more), kvjax.make_mesh(kv_heads, **shape)
    group = shape["tensor"]
    assert chunk_size(model, mesh, 2, 512, CHUNK) == group * CHUNK
    for alone, apart in zip(read(model, asked), read(shard_model(model, mesh), asked), strict=True):
        assert apart.x.shape == (2, 512 // (group * CHUNK), group * CHUNK, CONFIG.width)
        assert apart.x.sharding.is_equivalent_to(NamedSharding(mesh, CHUNK_SPEC), 4)
        for got, wanted in zip(
            (apart.x.reshape(2, 512, -1), apart.keys, apart.values),
            (alone.x.reshape(2, 512, -1), alone.keys, alone.values),
            strict=True,
        ):
            equal(got, wanted, atol=2e-5)
        if asked:
            assert apart.queries.shape == (2, asked, query_heads, CONFIG.head_dim)
            for got, wanted, length in zip(apart.queries, alone.queries, LENGTHS, strict=True):
                np.testing.assert_allclose(got[-length:], wanted[-length:], atol=2e-5)
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    logits = [
        prefill.last_logits(own, last.x, lengths) for own, last in ((model, alone), (shard_model(model, mesh), apart))
    ]
    np.testing.assert_allclose(*logits, atol=2e-5)


@on_devices
@pytest.mark.parametrize("name", ["heads", "tokens"])
def test_repetitions_are_read_as_on_one_device(name):
    query_heads, kv_heads, shape, more = MODELS[name]
    model = random_model(query_heads, kv_heads, more)
    apart = shard_model(model, kvjax.make_mesh(kv_heads, **shape))
    for wanted, got in zip(read(model, 0, REPETITION), read(apart, 0, REPETITION), strict=True):
        wanted, got = wanted.repeated, got.repeated
        assert wanted.lengths.shape == (2, 6) and got.lengths.shape == (2, 8)  # two more, for devices to divide them
        for one, other in ((got.queries, wanted.queries), (got.keys, wanted.keys)):
            for row in range(2):
                for text, length in enumerate(wanted.lengths[row]):
                    of_text = slice(128 * text, 128 * text + int(length))
                    np.testing.assert_allclose(one[row, of_text], other[row, of_text], atol=2e-5)


@on_devices
@pytest.mark.parametrize(
    ("name", "takes_runs", "attends"),
    [
        ("heads", True, (1, (2, 512, 1, 64))),
        ("tokens", True, (4, (2, 128, 3, 64))),
        pytest.param("tokens", False, (1, (2, 512, 1, 64)), marks=pytest.mark.heavy),  # four devices for three heads
    ],
)
def test_the_kernel_attends_as_chunks_do(monkeypatch, name, takes_runs, attends):
    monkeypatch.setattr(flash_attention, "BLOCK", 128)
    query_heads, kv_heads, shape, more = MODELS[name]
    model = random_model(query_heads, kv_heads, {**more, "head_dim": 64, "experts": 0}, jnp.bfloat16)
    apart = shard_model(model, kvjax.make_mesh(kv_heads, **shape))
    streams = lambda: [np.asarray(layer.x.reshape(2, 512, -1), np.float32) for layer in read(apart, 0)]  # noqa: E731
    wanted = streams()
    used = []

    def attend(asked, *given, run):
        used.append((asked.runs, given[0].shape))
        return flash_attention._splash_attention(asked, *given, run, interpret=True)

    unsupported_reason = lambda asked: None if takes_runs or asked.runs == 1 else "runs"  # noqa: E731
    monkeypatch.setattr(flash_attention, "_KERNELS", {"cpu": flash_attention._Kernel(unsupported_reason, attend)})
    prefill.prefill_layer.clear_cache()
    got = streams()
    prefill.prefill_layer.clear_cache()
    assert set(used) == {attends}
    for one, other in zip(got, wanted, strict=True):
        equal(one, other, atol=0.1)


@on_devices
@pytest.mark.parametrize("name", ["exact", "snapkv", pytest.param("kvzip", marks=pytest.mark.heavy)])
def test_tokens_and_logits_are_those_of_one_device(name):
    size, rows, logits = written(random_model(6, 2, {}), name)
    cut, found, together = written(shard_model(random_model(6, 2, {}), kvjax.make_mesh(2, tensor=8)), name)
    assert (size, cut) == (CHUNK, 8 * CHUNK) and found == rows
    np.testing.assert_allclose(together, logits, atol=1e-4)


def written(model, name):
    """Returns the chunk_size that prompts are padded to, the tokens generated for two prompts, and the last logits."""
    policy = (support.ON_A_MESH | {"kvzip": KVZIP})[name]
    prompts = [np.random.default_rng(row).integers(0, 40, length).tolist() for row, length in enumerate((420, 130))]
    made = Generator(model, policy, batch=2, max_prompt_tokens=512, max_new_tokens=16, prefill_chunk=CHUNK)
    state, rows = made.prefill(made.init_state(3), prompts), [[], []]
    for newest, tokens in made.decode(state, 8):
        state = newest
        extend_rows(rows, tokens)
    return made.padding_multiple(420), rows, np.asarray(multihost_utils.process_allgather(state.logits, tiled=True))


# One of two processes, with four of the devices each.
PROCESS = """
    import json, sys
    import jax

    jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
    from tests.models import test_sequence_parallel as own

    size, rows, _ = own.written(own.place(own.random_model(6, 2, {}), own.kvjax.make_mesh(2, tensor=8)), "snapkv")
    print(json.dumps([size, rows]))
"""


@two_processes
@pytest.mark.heavy
def test_two_processes_write_what_one_does():
    assert run_two(PROCESS) == [[8 * CHUNK, written(random_model(6, 2, {}), "snapkv")[1]]] * 2


@on_devices
def test_what_does_not_divide_lies_whole():
    mesh = kvjax.make_mesh(4, tensor=8)
    model = random_model(8, 4, {})
    assert chunk_size(model, None, 2, 512, CHUNK) == CHUNK
    assert chunk_size(model, mesh, 1, 512, 1) == 8 and chunk_size(model, mesh, 1, 8, 1) == 1  # weights would cost more
    assert (
        chunk_size(model, mesh, 1, 410, CHUNK) == 8 * CHUNK and chunk_size(model, mesh, 1, 400, CHUNK) == CHUNK
    )  # padding
    assert chunk_size(model, kvjax.make_mesh(4, data=2, tensor=4), 1, 512, CHUNK) == CHUNK
    tokens, lengths = np.ones((1, 9 * 8 * 4), np.int32), jnp.array([200])
    layer = next(prefill.prefill_layers(shard_model(model, mesh), tokens, lengths, 9, [0, 0]))
    assert layer.x.shape == (1, 4, 72, 32)
    layer = next(prefill.prefill_layers(shard_model(model, mesh), tokens[:, :270], lengths, 9, [0, 0]))
    assert layer.x.shape == (1, 30, 9, 32) and layer.x.sharding.is_fully_replicated


@on_devices
@pytest.mark.parametrize("heads", [(8, 4), (6, 2)])
def test_no_device_holds_or_sends_the_residual_stream(heads):
    config = dataclasses.replace(CONFIG, query_heads=heads[0], kv_heads=heads[1], width=256, max_length=65536)
    model = shard_model(Llama(config, rngs=nnx.Rngs(0)), kvjax.make_mesh(heads[1], tensor=8))
    made = Generator(model, kvjax.Exact(), batch=1, max_prompt_tokens=32768, max_new_tokens=64, prefill_chunk=64)
    compiled = lowering.lower_prefill(made, 32768)[0].compile()
    text, whole = compiled.as_text(), 32768 * 256 * 4
    assert not large_outputs(text, whole // 2)
    assert max(one.bytes for one in collectives(text)) <= whole // 8
    assert compiled.memory_analysis().temp_size_in_bytes < whole // 2
