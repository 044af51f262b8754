"""Sequence parallelism on eight simulated devices: long prompts are processed as on one device. The process with the
devices is started by `test_generate_sharded`."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

import kvjax
from kvjax_models.model import flash_attention
from kvjax_models.model.config import AttentionConfig, ExpertConfig, NormConfig
from kvjax_models.model.llama import Llama
from kvjax_models.runner import lowering, prefill
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.sequence_parallel import CHUNK_SPEC, chunk_size
from kvjax_models.sharding import KV_SPEC, mesh_of, replicate, shard_model
from tests.kvjax import support
from tests.models import meshes
from tests.models.meshes import heavy, needs_devices, run_two_processes, starts_processes
from tests.models.support import written_arrays

CONFIG = dataclasses.replace(meshes.CONFIG, mlp_width=16, max_length=4096)
SINKS_AND_CAP = {"attention": AttentionConfig(sinks=True, logit_cap=5.0, windows=(40, None))}
EXPERTS = {"experts": ExpertConfig(4, 2, 16), "mlp_bias": True}
NORMS = {
    "norms": NormConfig("sandwich"),
    "attention": AttentionConfig(query_key_norm=True, joint_query_key_norm=True, windows=(None, 100)),
}
# Query heads, KV heads, the mesh and further options of models whose devices share heads or tokens.
MODELS = {
    "heads": (8, 4, {"tensor": 8}, {}),
    "heads of two groups": (4, 4, {"tensor": 4, "data": 2}, SINKS_AND_CAP),
    "tokens": (6, 2, {"tensor": 8}, SINKS_AND_CAP | EXPERTS),
    "tokens of all heads": (4, 2, {"tensor": 8, "sequence": 8}, NORMS),
    "tokens of two groups": (2, 2, {"tensor": 4, "data": 2}, {}),
}
KVZIP = kvjax.KVzip(40, recent=8, compact_every=8, chunk_tokens=100, instruction=(1, 2), continuation=(3,), suffix=(4,))
KVZAP = kvjax.KVzap(40, recent=8, compact_every=8)
KVGRAD = kvjax.KVgrad(40, recent=8, compact_every=8, chunk_tokens=100)
CHUNK, LENGTHS = 16, [300, 512]
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective")


def random_model(query_heads, kv_heads, options=None, dtype=jnp.float32):
    config = dataclasses.replace(CONFIG, query_heads=query_heads, kv_heads=kv_heads, **options or {})
    model = Llama(config, dtype=dtype, rngs=nnx.Rngs(0))
    if config.attention.sinks:
        for layer in model.layers:
            layer.attention.sinks[...] = jnp.linspace(-2.0, 2.0, query_heads, dtype=dtype)
    return model


def random_models(name, **options):
    """Returns a model and its sharded copy."""
    query_heads, kv_heads, shape, model_options = MODELS[name]
    model = random_model(query_heads, kv_heads, model_options | options, jnp.bfloat16 if options else jnp.float32)
    return model, shard_model(model, kvjax.make_mesh(kv_heads, **shape))


def make_scorer(kv_heads):
    """Returns random coefficients of predicted scores."""
    return np.random.default_rng(0).normal(size=(CONFIG.layers, CONFIG.width + 2, kv_heads)).astype(np.float32)


def prefill_layers(model, num_queries, repeat=None, scorer=None):
    """Yields the results of every layer for two prompts."""
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 512)).astype(np.int32)
    for row, length in zip(tokens, LENGTHS, strict=True):
        row[length:] = 0
    scorer = None if scorer is None else replicate(scorer, mesh_of(model))
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    yield from prefill.prefill_layers(model, tokens, lengths, CHUNK, [num_queries] * 2, repeat, scorer=scorer)


def assert_rows_close(actual, expected, *, atol):
    """Compares the tokens of each row without padding."""
    for length, row, expected_row in zip(LENGTHS, np.asarray(actual), np.asarray(expected), strict=True):
        np.testing.assert_allclose(row[:length], expected_row[:length], atol=atol)


@needs_devices
@pytest.mark.parametrize(
    ("name", "num_queries"),
    [
        ("heads", 5),
        ("tokens", 512),
        heavy("heads of two groups", 64),
        heavy("tokens of all heads", 100),
        heavy("tokens of two groups", 0),
    ],
)
def test_layers_equal_those_of_one_device(name, num_queries):
    model, sharded_model = random_models(name)
    query_heads, kv_heads, shape, _ = MODELS[name]
    mesh, chunk = kvjax.make_mesh(kv_heads, **shape), shape["tensor"] * CHUNK
    assert chunk_size(model, mesh, 2, 512, CHUNK) == chunk
    scorer = make_scorer(kv_heads)
    layers = zip(*(prefill_layers(each, num_queries, scorer=scorer) for each in (model, sharded_model)), strict=True)
    for layer, sharded in layers:
        assert sharded.x.shape == (2, 512 // chunk, chunk, CONFIG.width)
        assert sharded.x.sharding.is_equivalent_to(NamedSharding(mesh, CHUNK_SPEC), 4)
        assert_rows_close(sharded.x.reshape(2, 512, -1), layer.x.reshape(2, 512, -1), atol=2e-5)
        assert_rows_close(sharded.keys, layer.keys, atol=2e-5)
        assert_rows_close(sharded.values, layer.values, atol=2e-5)
        assert sharded.predicted_scores.shape == (2, kv_heads, 512)
        assert_rows_close(*(x.predicted_scores.swapaxes(1, 2) for x in (sharded, layer)), atol=2e-4)
        if num_queries:
            assert sharded.queries.shape == (2, num_queries, query_heads, CONFIG.head_dim)
            for row, expected, length in zip(sharded.queries, layer.queries, LENGTHS, strict=True):
                np.testing.assert_allclose(row[-length:], expected[-length:], atol=2e-5)
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    logits = prefill.last_logits(model, layer.x, lengths)
    np.testing.assert_allclose(prefill.last_logits(sharded_model, sharded.x, lengths), logits, atol=2e-5)


@needs_devices
@pytest.mark.parametrize("name", [heavy("heads"), "tokens"])
def test_repetitions_equal_those_of_one_device(name):
    layers = zip(*(prefill_layers(model, 0, KVZIP.requires.repetition) for model in random_models(name)), strict=True)
    for layer, sharded_layer in layers:
        repeated, sharded = layer.repeated, sharded_layer.repeated
        # Two more texts make the number divisible by the devices.
        assert repeated.lengths.shape == (2, 6) and sharded.lengths.shape == (2, 8)
        for actual, expected in ((sharded.queries, repeated.queries), (sharded.keys, repeated.keys)):
            for row, text in np.ndindex(2, 6):
                tokens = slice(128 * text, 128 * text + int(repeated.lengths[row, text]))
                np.testing.assert_allclose(actual[row, tokens], expected[row, tokens], atol=2e-5)
        assert (sharded.received is None) == (repeated.received is None)
        if sharded.received is not None:
            np.testing.assert_allclose(sharded.received, repeated.received, atol=2e-5)


@needs_devices
@pytest.mark.parametrize(
    ("name", "is_sharded", "supports_runs", "expected_call"),
    [
        heavy("tokens", False, True, (1, (2, 512, 6, 64))),
        heavy("heads", True, True, (1, (2, 512, 1, 64))),
        ("tokens", True, True, (4, (2, 128, 3, 64))),
        heavy("tokens", True, False, (1, (2, 512, 1, 64))),  # four devices for three heads
    ],
)
def test_a_kernel_equals_chunks(monkeypatch, name, is_sharded, supports_runs, expected_call):
    monkeypatch.setattr(flash_attention, "BLOCK", 128)
    model = random_models(name, head_dim=64, experts=None)[is_sharded]
    calls = set()

    def attend(spec, query, *args, run):
        calls.add((spec.runs, query.shape))
        return flash_attention._splash_attention(spec, query, *args, run, interpret=True)

    def unsupported_reason(spec):
        return None if supports_runs or spec.runs == 1 else "runs"

    def residual_streams():
        return [np.asarray(layer.x.reshape(2, 512, -1), np.float32) for layer in prefill_layers(model, 0)]

    expected = residual_streams()
    monkeypatch.setattr(flash_attention, "_KERNELS", {"cpu": flash_attention._Kernel(unsupported_reason, attend)})
    prefill.prefill_layer.clear_cache()
    actual = residual_streams()
    prefill.prefill_layer.clear_cache()
    assert calls == {expected_call}
    for stream, expected_stream in zip(actual, expected, strict=True):
        assert_rows_close(stream, expected_stream, atol=0.1)


def generate(model, name):
    """Returns the multiple to which prompts are padded, generated tokens, and the last logits."""
    policy = (support.ON_A_MESH | {"kvzip": KVZIP, "kvgrad": KVGRAD, "kvzap": KVZAP})[name]
    prompts = [np.random.default_rng(row).integers(0, 40, length).tolist() for row, length in enumerate((420, 130))]
    sizes = {"batch": 2, "max_prompt_tokens": 512, "max_new_tokens": 16, "prefill_chunk": CHUNK}
    generator = Generator(model, policy, **sizes, scorer=make_scorer(model.config.kv_heads))
    return generator.padding_multiple(420), *meshes.generate(generator, prompts, 8)


@needs_devices
@pytest.mark.parametrize("name", [heavy("exact"), "snapkv", heavy("kvzip"), heavy("kvgrad"), heavy("kvzap")])
def test_tokens_and_logits_equal_those_of_one_device(name):
    multiple, rows, logits = generate(random_model(6, 2), name)
    sharded = generate(shard_model(random_model(6, 2), kvjax.make_mesh(2, tensor=8)), name)
    assert (multiple, sharded[0]) == (CHUNK, 8 * CHUNK) and sharded[1] == rows
    np.testing.assert_allclose(sharded[2], logits, atol=1e-4)


GENERATE = """
from tests.models import test_sequence_parallel as tests

model = tests.shard_model(tests.random_model(6, 2), tests.kvjax.make_mesh(2, tensor=8))
print(json.dumps(tests.generate(model, "snapkv")[:2]))
"""


@starts_processes
@pytest.mark.heavy
def test_two_processes_generate_the_same_tokens():
    assert run_two_processes(GENERATE) == [[8 * CHUNK, generate(random_model(6, 2), "snapkv")[1]]] * 2


@needs_devices
def test_chunk_size():
    model, mesh = random_model(8, 4), kvjax.make_mesh(4, tensor=8)
    assert chunk_size(model, None, 2, 512, CHUNK) == CHUNK
    assert chunk_size(model, mesh, 1, 512, 1) == 8
    assert chunk_size(model, mesh, 1, 8, 1) == 1  # weights would transfer more
    assert chunk_size(model, mesh, 1, 410, CHUNK) == 8 * CHUNK
    assert chunk_size(model, mesh, 1, 400, CHUNK) == CHUNK  # too much padding
    assert chunk_size(model, kvjax.make_mesh(4, data=2, tensor=4), 1, 512, CHUNK) == CHUNK


@needs_devices
@pytest.mark.parametrize(("count", "shape"), [(288, (1, 4, 72, 32)), (270, (1, 30, 9, 32))])
def test_prompts_that_devices_do_not_divide_are_replicated(count, shape):
    model, tokens = shard_model(random_model(8, 4), kvjax.make_mesh(4, tensor=8)), np.ones((1, count), np.int32)
    layer = next(prefill.prefill_layers(model, tokens, jnp.array([200]), 9, [0, 0]))
    assert layer.x.shape == shape
    assert layer.x.sharding.is_fully_replicated == (count == 270)


@needs_devices
def test_predicted_scores_with_tensor_parallelism():
    """The prompts are too short for sequence parallelism; scores are sharded along heads."""
    model, mesh, lengths = random_model(8, 4), kvjax.make_mesh(4, tensor=8), jnp.array([60, 33])
    tokens, results = np.arange(120).reshape(2, 60) % 40, []
    for one in (model, shard_model(model, mesh)):
        assert chunk_size(one, mesh_of(one), 2, 60, 20) == 20
        scorer = replicate(make_scorer(4), mesh_of(one))
        layers = prefill.prefill_layers(one, tokens, lengths, 20, [0, 0], scorer=scorer)
        results.append([layer.predicted_scores for layer in layers])
    for expected, actual in zip(*results, strict=True):
        np.testing.assert_allclose(actual, expected, atol=2e-4)
        assert actual.sharding.is_equivalent_to(NamedSharding(mesh, KV_SPEC), 3)


@needs_devices
@pytest.mark.parametrize("heads", [heavy((8, 4)), (6, 2)])
def test_no_device_holds_or_sends_the_residual_stream(heads):
    config = dataclasses.replace(CONFIG, query_heads=heads[0], kv_heads=heads[1], width=256, max_length=65536)
    model = shard_model(Llama(config, rngs=nnx.Rngs(0)), kvjax.make_mesh(heads[1], tensor=8))
    sizes = {"batch": 1, "max_prompt_tokens": 32768, "max_new_tokens": 64, "prefill_chunk": 64}
    compiled = lowering.lower_prefill(Generator(model, kvjax.Exact(), **sizes), 32768)[0].compile()
    stream_bytes, written = 32768 * 256 * 4, written_arrays(compiled)
    assert max(size for _, size in written) < stream_bytes // 2
    assert max(size for opcode, size in written if opcode.startswith(COLLECTIVES)) <= stream_bytes // 8
    assert compiled.memory_analysis().temp_size_in_bytes < stream_bytes // 2
