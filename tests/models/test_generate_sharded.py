"""Generation on eight simulated devices: the same tokens, logits and shardings as documented, with one process and with
two. The tests run in a subprocess that has the devices."""

import contextlib
import dataclasses
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

import kvjax
from kvjax.distributed.sharding import rename_axes
from kvjax_models import LanguageModel
from kvjax_models.engine import Engine
from kvjax_models.formats import huggingface
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama
from kvjax_models.runner import lowering, prefill
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.state import state_shardings
from kvjax_models.saves import Save
from kvjax_models.sharding import mesh_of, parameter_shardings, shard_model
from tests.kvjax import support
from tests.models import tiny
from tests.models.huggingface_files import save_model
from tests.models.loops import decode, decode_all
from tests.models.support import GOLDEN, ROOT, start_python

DEVICES = 8
needs_devices = pytest.mark.skipif(jax.device_count() < DEVICES, reason="needs eight devices")
starts_processes = pytest.mark.skipif(jax.device_count() >= DEVICES, reason="starts processes")
heavy = functools.partial(pytest.param, marks=pytest.mark.heavy)

CONFIG = LlamaConfig(
    vocab_size=40, width=32, mlp_width=48, layers=2, query_heads=8, kv_heads=4, head_dim=8, max_length=128
)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]]
SIZES = {"batch": 4, "max_prompt_tokens": 12, "max_new_tokens": 24}
POLICIES = {
    "exact": kvjax.Exact(compact_every=4),
    "chelsea": kvjax.Chelsea(10, sinks=2, recent=4, chunk=4, compact_every=4),
    "snapkv": kvjax.SnapKV(10, window_size=4, compact_every=4),
    "by_head": kvjax.ByHead((kvjax.Exact(compact_every=4), kvjax.Uniform(10, sinks=2, recent=4, compact_every=4)) * 2),
}
CHECKPOINT = tiny.directory()


@functools.cache
def make_model():
    # With these parameters no two merges are equally good up to rounding, where devices may decide differently.
    return Llama(CONFIG, rngs=nnx.Rngs(1))


@functools.cache
def load_checkpoint():
    return huggingface.load_model(CHECKPOINT)


def make_mesh(kv_heads=CONFIG.kv_heads, **axes):
    return kvjax.make_mesh(kv_heads, **axes)


def generate_turns(model, policy, *, streaming=False):
    """Returns the tokens of two turns and the last state."""
    generator = Generator(model, policy, **SIZES, streaming=streaming)
    state, rows = generator.init_state(3), [[] for _ in PROMPTS]
    for prompts in (PROMPTS, [[2, 4], [8], [1, 1, 1], [7]]):
        tokens, state = decode_all(generator, generator.prefill(state, prompts), 6)
        rows = [row + more for row, more in zip(rows, tokens, strict=True)]
    return rows, state


def generate_after_prompts(model, policy):
    """Returns the checkpoint's tokens after prompts of several lengths, and the last logits."""
    generator = Generator(model, policy, batch=4, max_prompt_tokens=60, max_new_tokens=24)
    prompts = [list(range(5, 5 + length)) for length in (60, 17, 41, 33)]
    rows, state = decode_all(generator, generator.prefill(generator.init_state(3), prompts), 12)
    return rows, np.asarray(multihost_utils.process_allgather(state.logits, tiled=True))


def assert_sharded(state, mesh):
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(state_shardings(state, mesh)), strict=True):
        assert not leaf.size or leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


# --- Subprocesses ---


@pytest.mark.skipif(jax.device_count() >= DEVICES, reason="this process has the devices")
@pytest.mark.parametrize("marker", ["not heavy", heavy("heavy")])
def test_with_eight_devices(marker):
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}", "JAX_PLATFORMS": "cpu"} | support.THREADS
    names = ("generate_sharded", "sequence_parallel", "hybrid_sharded")
    files = [str(ROOT / "tests" / "models" / f"test_{name}.py") for name in names]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", marker, *files]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | flags, check=False)
    assert result.returncode == 0, result.stdout[-5000:]


# The first lines of two processes with four of the devices each.
INITIALIZE = """
import json, os, signal, sys
import jax

jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
from tests.models import test_generate_sharded as tests
from tests.models.loops import decode, decode_all
"""

# Is killed after its first save, or continues from it.
RESUME = """
mesh = tests.make_mesh(data=2, tensor=4)
generator = tests.Generator(tests.shard_model(tests.make_model(), mesh), tests.POLICIES["exact"], **tests.SIZES)
saved = tests.Save(sys.argv[3])
if sys.argv[4] == "killed":
    for state, _ in decode(generator, generator.prefill(generator.init_state(3), tests.PROMPTS), 12):
        saved.write(state, {}, {})
        os.kill(os.getpid(), signal.SIGKILL)
saved.check()
state = saved.restore(generator.init_state())
print(json.dumps([tokens.tolist() for _, tokens in decode(generator, state, 8)]))
"""

GENERATE_WITH_EVERY_POLICY = """
model = tests.shard_model(tests.load_checkpoint(), tests.make_mesh(2, data=2, tensor=4))
results = {name: tests.generate_after_prompts(model, policy) for name, policy in tests.support.ON_A_MESH.items()}
print(json.dumps({name: [rows, logits.tolist()] for name, (rows, logits) in results.items()}))
"""


def run_two_processes(script, *arguments, expected_code=0):
    """Returns the last line that each of two processes prints, parsed as JSON."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        **support.THREADS,
    }
    with contextlib.ExitStack() as files, pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        # Files, because a process whose pipe nobody reads yet would block.
        out, err = ([files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in range(2))
        processes = [
            start_python(INITIALIZE + script, port, index, *arguments, stdout=out[index], stderr=err[index])
            for index in range(2)
        ]
        codes = [process.wait(timeout=1800) for process in processes]
        for file in (*out, *err):
            file.seek(0)
        assert codes == [expected_code] * 2, err[0].read()[-3000:]
        return [json.loads(file.read().splitlines()[-1]) for file in out] if expected_code == 0 else []


@starts_processes
@pytest.mark.heavy
def test_two_killed_processes_resume_from_their_save(tmp_path):
    run_two_processes(RESUME, str(tmp_path), "killed", expected_code=-signal.SIGKILL)
    generator = Generator(make_model(), POLICIES["exact"], **SIZES)
    state = generator.prefill(generator.init_state(3), PROMPTS)
    blocks = [tokens.tolist() for _, tokens in decode(generator, state, 12)]
    assert run_two_processes(RESUME, str(tmp_path), "resumed") == [blocks[1:]] * 2


@starts_processes
@pytest.mark.heavy
def test_two_processes_generate_the_same_with_every_policy():
    first, second = run_two_processes(GENERATE_WITH_EVERY_POLICY)
    assert first == second
    for name, policy in support.ON_A_MESH.items():
        rows, logits = generate_after_prompts(load_checkpoint(), policy)
        assert first[name][0] == rows, name
        np.testing.assert_allclose(first[name][1], logits, atol=1e-4, err_msg=name)


# --- Generation ---


@needs_devices
@pytest.mark.parametrize(
    "name, data, tensor", [("exact", 1, 8), ("snapkv", 2, 4), heavy("chelsea", 2, 4), heavy("by_head", 4, 2)]
)
def test_tokens_and_logits_equal_those_of_one_device(name, data, tensor):
    mesh, streaming = make_mesh(data=data, tensor=tensor), name == "chelsea"
    rows, state = generate_turns(make_model(), POLICIES[name], streaming=streaming)
    sharded_rows, sharded = generate_turns(shard_model(make_model(), mesh), POLICIES[name], streaming=streaming)
    assert sharded_rows == rows
    np.testing.assert_allclose(sharded.logits, state.logits, atol=1e-4)
    assert_sharded(sharded, mesh)


@needs_devices
@pytest.mark.parametrize(
    ("tensor", "kv_heads", "query_heads", "per_device"), [(8, 4, 8, 1), (8, 4, 12, 3), (4, 4, 8, 2)]
)
def test_devices_that_share_a_kv_head_share_its_query_heads(monkeypatch, tensor, kv_heads, query_heads, per_device):
    counts = set()

    def attend(query, *args, **options):
        counts.add(query.shape[2])
        return query

    monkeypatch.setattr(prefill, "attend_in_chunks", attend)
    config = dataclasses.replace(CONFIG, kv_heads=kv_heads, query_heads=query_heads)
    mesh = make_mesh(kv_heads, tensor=tensor, devices=jax.devices()[:tensor])
    layer = shard_model(Llama(config, rngs=nnx.Rngs(0)), mesh).layers[0]
    x, lengths = jax.ShapeDtypeStruct((1, 1, 8, config.width), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.int32)
    prefill_layer = functools.partial(prefill.prefill_layer.__wrapped__, layer, config.rotary(), mesh, False, 0)
    jax.eval_shape(prefill_layer, x, lengths)
    assert counts == {per_device}


@needs_devices
def test_each_device_needs_its_share_of_memory():
    def peak_bytes(mesh):
        model = make_model() if mesh is None else shard_model(make_model(), mesh)
        generator = Generator(model, POLICIES["exact"], batch=4, max_prompt_tokens=2048, max_new_tokens=64)
        state = lowering.abstract_state(jax.eval_shape(generator.init_state), mesh)
        sharding = None if mesh else jax.sharding.SingleDeviceSharding(jax.devices()[0])
        memory = lowering.lower_decode(generator, state, sharding=sharding).compile().memory_analysis()
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes

    share = peak_bytes(None) / 8
    for shape in ({"data": 4, "tensor": 2}, {"data": 2, "tensor": 4}, {"tensor": 8}, {"tensor": 8, "sequence": 8}):
        # Staged tokens and all arrays except the stores are replicated on devices that share a head.
        assert share < peak_bytes(make_mesh(**shape)) < 1.3 * share


@needs_devices
def test_a_state_saved_on_one_mesh_continues_on_another(tmp_path):
    meshes = [make_mesh(data=data, tensor=8 // data) for data in (2, 4)]
    first, second = (Generator(shard_model(make_model(), mesh), POLICIES["exact"], **SIZES) for mesh in meshes)
    blocks = []
    for state, tokens in decode(first, first.prefill(first.init_state(3), PROMPTS), 12):
        if not blocks:
            Save(tmp_path).write(state, {}, {})
        blocks.append(tokens)
    restored = Save(tmp_path).restore(second.init_state())
    assert_sharded(restored, meshes[1])
    continued = [tokens for _, tokens in decode(second, restored, 8)]
    np.testing.assert_array_equal(np.concatenate(continued, axis=1), np.concatenate(blocks[1:], axis=1))


@needs_devices
@pytest.mark.heavy
@pytest.mark.parametrize("name", ["exact", "chelsea"])
def test_continuous_batching_on_a_mesh(name):
    def run_requests(mesh):
        model = make_model() if mesh is None else shard_model(make_model(), mesh)
        generator = Generator(model, POLICIES[name], **SIZES | {"batch": 1}, prefill_chunk=4)
        engine, rows = Engine(model, tiny.make_llm().tokenizer, lambda *_: (generator,), rows=2), {}
        for prompt in PROMPTS:
            engine.add(prompt, max_new_tokens=9)
        for output in engine.run():
            rows.setdefault(output.number, []).extend(output.tokens)
        return rows

    assert run_requests(make_mesh(data=1, tensor=DEVICES)) == run_requests(None)
    with pytest.raises(ValueError, match="batch rows are sharded over 2 groups of devices"):
        run_requests(make_mesh(data=2, tensor=DEVICES // 2))


@needs_devices
@pytest.mark.parametrize("name", ["snapkv", heavy("chelsea"), heavy("exact")])
def test_documents_on_a_mesh(name):
    """Entries of a text and tails are sharded along heads, also in an engine with rows of several sizes."""

    def answer(mesh):
        model, tokenizer = load_checkpoint(), tiny.make_llm().tokenizer
        llm = LanguageModel(model if mesh is None else shard_model(model, mesh), tokenizer)
        cache = llm.cache(POLICIES[name])
        document = cache.read(list(range(5, 65)), max_new_tokens=32)
        texts = document.generate(["ab", "c", "def"], max_new_tokens=12)
        engine = cache.engine(rows=4, stream_interval=3)
        engine.add([9, 10], document, max_new_tokens=12)
        for prompt in ([5, 6, 7], list(range(5, 65))):
            engine.add(prompt, max_new_tokens=40)
        mixed = [one.tokens for one in engine.complete()[0]]
        return texts, mixed, [document.generate(["c"], max_new_tokens=12)], document

    *expected, _ = answer(None)
    *answers, document = answer(make_mesh(2, data=1, tensor=DEVICES))
    assert answers == expected
    keys = jax.tree.leaves(document.prefix.entries[0].state)[0]
    assert not keys.sharding.is_fully_replicated


# --- Meshes and shardings ---


@needs_devices
@pytest.mark.heavy
def test_a_mesh_may_have_other_axis_names():
    named = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("fsdp", "data", "tp"))
    mesh = rename_axes(named, CONFIG.kv_heads, data="fsdp", tensor="tp")
    assert dict(mesh.shape) == {"data": 2, "other_data": 2, "tensor": 2, "sequence": 1}
    rows, state = generate_turns(shard_model(make_model(), mesh), POLICIES["exact"])
    assert rows == generate_turns(make_model(), POLICIES["exact"])[0]
    keys = state.layers[0].state.keys
    assert keys.sharding.is_equivalent_to(NamedSharding(named, jax.P("fsdp", "tp")), keys.ndim)


@needs_devices
def test_a_mesh_without_the_axis_names_is_refused():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tp"))
    with pytest.raises(ValueError, match="axes 'fsdp', 'tp' and lacks .*'sequence'; pass .*rename_axes"):
        shard_model(make_model(), mesh)


@needs_devices
@pytest.mark.heavy
def test_experts_and_sinks_on_a_mesh():
    """Loads the golden gpt-oss checkpoint directly onto the mesh."""
    model = huggingface.load_model(GOLDEN / "gpt_oss", jnp.float32)
    mesh = make_mesh(model.config.kv_heads, data=2, tensor=4)
    sharded = huggingface.load_model(GOLDEN / "gpt_oss", jnp.float32, mesh)
    gate = sharded.layers[0].mlp.gate.kernel[...]
    assert gate.sharding.shard_shape(gate.shape) == (4, 32, 4)  # a quarter of every expert's width
    assert generate_turns(sharded, POLICIES["exact"])[0] == generate_turns(model, POLICIES["exact"])[0]


@needs_devices
@pytest.mark.heavy
def test_sigmoid_routing_and_shared_experts_on_a_mesh():
    """The router is replicated; experts and the shared expert are sharded along their hidden size."""
    model = huggingface.load_model(GOLDEN / "glm4_moe", jnp.float32)
    mesh = make_mesh(model.config.kv_heads, data=2, tensor=4)
    sharded = huggingface.load_model(GOLDEN / "glm4_moe", jnp.float32, mesh)
    mlp = sharded.layers[1].mlp
    parameters = (mlp.gate.kernel, mlp.shared.gate_up.kernel, mlp.shared.down.kernel, mlp.router.selection_bias)
    shapes = [parameter[...].sharding.shard_shape(parameter.shape) for parameter in parameters]
    assert shapes == [(8, 32, 4), (32, 2, 8), (8, 32), (8,)]
    assert generate_turns(sharded, POLICIES["exact"])[0] == generate_turns(model, POLICIES["exact"])[0]


@needs_devices
def test_devices_share_parameters():
    mesh = make_mesh(tensor=8)
    sharded = shard_model(make_model(), mesh)
    assert mesh_of(sharded) == mesh and mesh_of(make_model()) is None
    assert shard_model(sharded, mesh) is sharded
    attention, mlp = sharded.layers[0].attention, sharded.layers[0].mlp
    modules = (attention.qkv, attention.output, mlp.gate_up, mlp.down, sharded.head)
    shapes = [module.kernel[...].addressable_shards[0].data.shape for module in modules]
    # Four KV heads are on two devices each. Both need the queries of its group, so they share the input axis.
    group = CONFIG.query_heads // CONFIG.kv_heads
    assert shapes == [(16, 1, group + 2, 8), (8, 32), (32, 2, 6), (6, 32), (32, 5)]
    scale = sharded.norm.scale[...]
    assert scale.addressable_shards[0].data.shape == scale.shape


@needs_devices
def test_a_checkpoint_is_loaded_onto_its_shardings(tmp_path):
    mesh = make_mesh(data=2, tensor=4)
    save_model(tmp_path, make_model())
    expected, loaded = shard_model(make_model(), mesh), huggingface.load_model(tmp_path, mesh=mesh)
    for leaf, expected_leaf in zip(jax.tree.leaves(loaded), jax.tree.leaves(expected), strict=True):
        assert leaf.sharding == expected_leaf.sharding
        np.testing.assert_array_equal(leaf, expected_leaf)


@needs_devices
def test_axes_that_devices_do_not_divide_are_replicated():
    config = dataclasses.replace(CONFIG, vocab_size=33, mlp_width=36, layers=1, query_heads=4, kv_heads=2)
    _, parameters = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    shardings = nnx.to_pure_dict(parameter_shardings(parameters, config, make_mesh(2, tensor=8)))
    layer = shardings["layers"][0]
    assert shardings["embedding"]["embedding"].spec == jax.P(None)
    assert layer["mlp"]["gate_up"]["kernel"].spec == jax.P(None, None, ("tensor",))
    assert layer["attention"]["qkv"]["kernel"].spec == jax.P(("sequence",), ("tensor",))
