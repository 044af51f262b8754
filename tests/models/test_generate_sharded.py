"""Generation on eight devices, simulated, writes what it writes on one: the tests run in a process that has them."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

import kvjax
from kvjax.distributed.sharding import rename_axes
from kvjax_models.formats import huggingface
from kvjax_models.generation import batching, lowering, prefill
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.rows import extend_rows
from kvjax_models.generation.saved_states import SavedStates
from kvjax_models.generation.state import state_shardings
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama
from kvjax_models.sharding import mesh_of, parameter_shardings, shard_model
from tests.kvjax import support

DEVICES = 8
on_devices = pytest.mark.skipif(jax.device_count() < DEVICES, reason="runs in a process with eight devices")
CONFIG = LlamaConfig(
    vocab_size=40, width=32, mlp_width=48, layers=2, query_heads=8, kv_heads=4, head_dim=8, max_length=128
)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]]
SIZES = {"batch": 4, "max_prompt_tokens": 12, "max_new_tokens": 24}
POLICIES = {
    "exact": kvjax.Exact(compact_every=4),
    "chelsea": kvjax.Chelsea(10, sinks=2, recent=4, chunk=4, compact_every=4),
    "snapkv": kvjax.SnapKV(10, window_size=4, compact_every=4),
    "by_head": kvjax.ByHead(
        (kvjax.Exact(compact_every=4),) * 2 + (kvjax.Uniform(10, sinks=2, recent=4, compact_every=4),) * 2
    ),
}
CHECKPOINT = pathlib.Path(__file__).parents[2] / "models" / "checkpoints" / "line-retrieval-2l-4k"


@pytest.mark.skipif(jax.device_count() >= DEVICES, reason="the tests themselves run here")
@pytest.mark.parametrize("marked", ["not heavy", pytest.param("heavy", marks=pytest.mark.heavy)])
def test_in_a_process_with_eight_devices(marked):
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}", "JAX_PLATFORMS": "cpu"} | support.THREADS
    own = pathlib.Path(__file__)
    files = [str(own), str(own.with_name("test_sequence_parallel.py"))]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", marked, *files]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | flags, check=False)
    assert done.returncode == 0, done.stdout[-5000:]


# One of two processes, with four of the devices each.
PROCESS = """
    import json, sys
    import jax

    jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
    from tests.models import test_generate_sharded as own

    mesh = own.kvjax.make_mesh(own.CONFIG.kv_heads, data=2, tensor=4)
    rows, state = own.run(own.place(own.model(), mesh), own.POLICIES[sys.argv[3]], streaming=False)
    own.kvjax.raise_faults(state)
    print(json.dumps([jax.device_count(), jax.local_device_count(), rows]))
"""


# Is killed behind its first save; or goes on from there.
RESUMED = """
    import json, os, signal, sys
    import jax

    jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
    from tests.models import test_generate_sharded as own

    mesh = own.kvjax.make_mesh(own.CONFIG.kv_heads, data=2, tensor=4)
    made = own.Generator(own.place(own.model(), mesh), own.POLICIES["exact"], **own.SIZES)
    saved = own.SavedStates(sys.argv[3])
    if sys.argv[4] == "killed":
        for state, _ in made.decode(made.prefill(made.init_state(3), own.PROMPTS), 12):
            saved.save(4, made, state)
            os.kill(os.getpid(), signal.SIGKILL)
    step, state, _ = saved.restore(made)
    print(json.dumps([tokens.tolist() for _, tokens in made.decode(state, 12 - step)]))
"""


def run_two(script, *arguments, expected_code=0):
    """The last line that each of two processes printed, as JSON."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        **support.THREADS,
        "PYTHONPATH": os.pathsep.join(str(pathlib.Path(__file__).parents[2] / part) for part in ("", "models")),
    }
    command = [sys.executable, "-c", textwrap.dedent(script), str(port)]
    with contextlib.ExitStack() as files:
        # Not pipes: while one is read, the process behind the other would wait for a reader.
        out, err = ([files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in range(2))
        started = [
            subprocess.Popen(
                [*command, str(number), *arguments], env=os.environ | flags, stdout=out[number], stderr=err[number]
            )
            for number in range(2)
        ]
        codes = [process.wait(timeout=1800) for process in started]
        for file in (*out, *err):
            file.seek(0)
        assert codes == [expected_code] * 2, err[0].read()[-3000:]
        return [json.loads(file.read().splitlines()[-1]) for file in out] if expected_code == 0 else []


two_processes = pytest.mark.skipif(jax.device_count() >= DEVICES, reason="starts processes of its own")


@two_processes
@pytest.mark.heavy
@pytest.mark.parametrize("name", ["exact", "snapkv"])
def test_two_processes_write_what_one_does(name):
    expected = [8, 4, run(model(), POLICIES[name], streaming=False)[0]]
    assert run_two(PROCESS, name) == [expected] * 2


@two_processes
@pytest.mark.heavy
def test_two_processes_that_are_killed_go_on_where_they_saved(tmp_path):
    run_two(RESUMED, str(tmp_path), "killed", expected_code=-signal.SIGKILL)
    generator = Generator(model(), POLICIES["exact"], **SIZES)
    blocks = [
        tokens.tolist() for _, tokens in generator.decode(generator.prefill(generator.init_state(3), PROMPTS), 12)
    ]
    assert run_two(RESUMED, str(tmp_path), "resumed") == [blocks[1:]] * 2


@functools.cache
def model():
    # Where two merges are equally good but for rounding, devices may choose differently: not with these parameters.
    return Llama(CONFIG, rngs=nnx.Rngs(1))


def run(model, policy, streaming):
    """Tokens of two turns, and the last state."""
    generator = Generator(model, policy, **SIZES, streaming=streaming)
    state = generator.prefill(generator.init_state(3), PROMPTS)
    rows = [[] for _ in PROMPTS]
    for turn in range(2):
        if turn:
            state = generator.prefill(state, [[2, 4], [8], [1, 1, 1], [7]])
        for newest, tokens in generator.decode(state, 6):
            state = newest
            extend_rows(rows, tokens)
    return rows, state


@on_devices
@pytest.mark.parametrize(
    "name, data, tensor",
    [
        ("exact", 1, 8),
        ("snapkv", 2, 4),
        pytest.param("chelsea", 2, 4, marks=pytest.mark.heavy),
        pytest.param("by_head", 4, 2, marks=pytest.mark.heavy),
    ],
)
def test_tokens_and_logits_are_those_of_one_device(name, data, tensor):
    mesh = kvjax.make_mesh(CONFIG.kv_heads, data=data, tensor=tensor)
    streaming = name == "chelsea"
    rows, state = run(model(), POLICIES[name], streaming)
    found, together = run(shard_model(model(), mesh), POLICIES[name], streaming)
    assert found == rows
    np.testing.assert_allclose(together.logits, state.logits, atol=1e-4)
    for leaf, at in zip(jax.tree.leaves(together), jax.tree.leaves(state_shardings(together, mesh)), strict=True):
        assert not leaf.size or leaf.sharding.is_equivalent_to(at, leaf.ndim)


@on_devices
@pytest.mark.parametrize(("tensor", "kv_heads", "query_heads", "each"), [(8, 4, 8, 1), (8, 4, 12, 3), (4, 4, 8, 2)])
def test_devices_that_share_a_kv_head_share_its_query_heads(monkeypatch, tensor, kv_heads, query_heads, each):
    seen = []

    def attend(query, *given, **settings):
        seen.append(query.shape[2])
        return query

    monkeypatch.setattr(prefill, "attend_in_chunks", attend)
    config = dataclasses.replace(CONFIG, kv_heads=kv_heads, query_heads=query_heads)
    mesh = kvjax.make_mesh(kv_heads, tensor=tensor, devices=jax.devices()[:tensor])
    layer = shard_model(Llama(config, rngs=nnx.Rngs(0)), mesh).layers[0]
    rows, lengths = jax.ShapeDtypeStruct((1, 1, 8, config.width), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.int32)
    read = functools.partial(prefill.prefill_layer.__wrapped__, layer, config.rotary(), mesh, False, 0)
    jax.eval_shape(read, rows, lengths)
    assert set(seen) == {each}


# Of two processes, with every policy.
SHIPPED = """
    import json, sys
    import jax

    jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
    from tests.models import test_generate_sharded as own

    model = own.place(own.shipped(), own.kvjax.make_mesh(2, data=2, tensor=4))
    made = {name: own.written(model, policy) for name, policy in own.support.ON_A_MESH.items()}
    print(json.dumps({name: [rows, logits.tolist()] for name, (rows, logits) in made.items()}))
"""


@two_processes
@pytest.mark.heavy
def test_two_processes_write_what_one_does_with_every_policy():
    first, second = run_two(SHIPPED)
    assert first == second
    for name, policy in support.ON_A_MESH.items():
        rows, logits = written(shipped(), policy)
        assert first[name][0] == rows, name
        np.testing.assert_allclose(first[name][1], logits, atol=1e-4, err_msg=name)


@functools.cache
def shipped():
    return huggingface.load_model(CHECKPOINT)


def written(model, policy):
    """What the shipped model writes in answer to prompts of several lengths, and its last logits."""
    prompts = [list(range(5, 5 + length)) for length in (60, 17, 41, 33)]
    generator = Generator(model, policy, batch=4, max_prompt_tokens=60, max_new_tokens=24)
    state = generator.prefill(generator.init_state(3), prompts)
    rows = [[] for _ in prompts]
    for newest, tokens in generator.decode(state, 12):
        state = newest
        extend_rows(rows, tokens)
    return rows, np.asarray(multihost_utils.process_allgather(state.logits, tiled=True))


@on_devices
@pytest.mark.heavy
@pytest.mark.parametrize("name", support.ON_A_MESH)
def test_the_shipped_model_writes_what_it_writes_on_one_device(name):
    policy = support.ON_A_MESH[name]
    rows, logits = written(shipped(), policy)
    # Two heads, each on two devices.
    found, together = written(shard_model(shipped(), kvjax.make_mesh(2, data=2, tensor=4)), policy)
    assert found == rows
    np.testing.assert_allclose(together, logits, atol=1e-4)


@on_devices
def test_devices_hold_and_need_their_part_of_the_memory():
    def peak(mesh):
        own = model() if mesh is None else shard_model(model(), mesh)
        generator = Generator(own, POLICIES["exact"], batch=4, max_prompt_tokens=2048, max_new_tokens=64)
        state = lowering.abstract_state(jax.eval_shape(generator.init_state), mesh)
        lies = None if mesh else jax.sharding.SingleDeviceSharding(jax.devices()[0])
        memory = lowering.lower_decode(generator, state, lies).compile().memory_analysis()
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes

    alone = peak(None)
    for shape in ({"data": 4, "tensor": 2}, {"data": 2, "tensor": 4}, {"tensor": 8}, {"tensor": 8, "sequence": 8}):
        # Staged tokens, and what is not a store, are the same on all devices that share a head.
        assert alone / 8 < peak(kvjax.make_mesh(CONFIG.kv_heads, **shape)) < 1.3 * alone / 8


@on_devices
def test_a_generation_saved_on_one_mesh_goes_on_on_another(tmp_path):
    meshes = [kvjax.make_mesh(CONFIG.kv_heads, data=data, tensor=8 // data) for data in (2, 4)]
    first, second = (Generator(shard_model(model(), mesh), POLICIES["exact"], **SIZES) for mesh in meshes)
    state, rows = first.prefill(first.init_state(3), PROMPTS), []
    for newest, tokens in first.decode(state, 12):
        if not rows:
            SavedStates(tmp_path).save(4, first, newest)
        rows.append(tokens)
    state = SavedStates(tmp_path).restore(second).state
    for leaf, at in zip(jax.tree.leaves(state), jax.tree.leaves(state_shardings(state, meshes[1])), strict=True):
        assert not leaf.size or leaf.sharding.is_equivalent_to(at, leaf.ndim)
    rest = [tokens for _, tokens in second.decode(state, 8)]
    np.testing.assert_array_equal(np.concatenate(rest, axis=1), np.concatenate(rows[1:], axis=1))


@on_devices
def test_a_mesh_may_have_names_of_its_own():
    users = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("fsdp", "data", "tp"))
    mesh = rename_axes(users, CONFIG.kv_heads, data="fsdp", tensor="tp")
    assert dict(mesh.shape) == {"data": 2, "other_data": 2, "tensor": 2, "sequence": 1}
    rows, state = run(shard_model(model(), mesh), POLICIES["exact"], streaming=False)
    assert rows == run(model(), POLICIES["exact"], streaming=False)[0]
    keys = state.layers[0].state.keys
    assert keys.sharding.is_equivalent_to(NamedSharding(users, jax.P("fsdp", "tp")), keys.ndim)


@on_devices
def test_a_mesh_of_other_names_is_refused_with_what_to_do():
    users = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tp"))
    lacks = "axes 'fsdp', 'tp' and lacks 'data', 'tensor', 'sequence'; pass .*rename_axes"
    with pytest.raises(ValueError, match=lacks):
        shard_model(model(), users)
    with pytest.raises(ValueError, match=lacks):
        huggingface.load_model(CHECKPOINT, mesh=users)
    spec = kvjax.CacheSpec(batch=4, query_heads=8, kv_heads=4, head_dim=8, max_prompt_tokens=12, max_new_tokens=24)
    with pytest.raises(ValueError, match=lacks):
        kvjax.init(POLICIES["exact"], spec, jax.random.split(jax.random.key(0), 4), users)


@on_devices
def test_experts_and_sinks_on_a_mesh():
    """The golden gpt-oss checkpoint, read right onto the mesh: experts in parts, a sink beside each head."""
    directory = pathlib.Path(__file__).parents[1] / "golden" / "transformers" / "gpt_oss"
    alone = huggingface.load_model(directory, jax.numpy.float32)
    mesh = kvjax.make_mesh(alone.config.kv_heads, data=2, tensor=4)
    apart = huggingface.load_model(directory, jax.numpy.float32, mesh)
    gate = apart.layers[0].mlp.gate.kernel[...]
    assert gate.sharding.shard_shape(gate.shape) == (4, 32, 4)  # a quarter of every expert's width
    assert run(apart, POLICIES["exact"], streaming=False)[0] == run(alone, POLICIES["exact"], streaming=False)[0]


@on_devices
def test_more_devices_than_heads_along_an_axis_share_each_head():
    users = Mesh(np.array(jax.devices()), ("tp",))
    assert dict(rename_axes(users, 4, tensor="tp").shape) == {"tensor": 4, "sequence": 2, "data": 1}
    with pytest.raises(ValueError, match="8 devices along 'tp' must divide kv_heads=6 or be a multiple of it"):
        rename_axes(users, 6, tensor="tp")
    with pytest.raises(ValueError, match="no axis 'model'; it has 'tp'"):
        rename_axes(users, 4, tensor="model")


@on_devices
def test_devices_share_a_model_s_parameters():
    mesh = kvjax.make_mesh(CONFIG.kv_heads, tensor=8)
    placed = shard_model(model(), mesh)
    assert mesh_of(placed) == mesh and mesh_of(model()) is None
    assert shard_model(placed, mesh) is placed
    layer = placed.layers[0]
    parts = {
        "qkv": layer.attention.qkv, "output": layer.attention.output,
        "gate_up": layer.mlp.gate_up, "down": layer.mlp.down, "head": placed.head,
    }  # fmt: skip
    held = {name: one.kernel[...].addressable_shards[0].data.shape for name, one in parts.items()}
    # Four kv heads lie on two devices each, which both need the queries of its group: they share what goes in.
    group = CONFIG.query_heads // CONFIG.kv_heads
    assert held == {
        "qkv": (16, 1, group + 2, 8), "output": (8, 32), "gate_up": (32, 2, 6), "down": (6, 32), "head": (32, 5),
    }  # fmt: skip
    whole = placed.norm.scale[...]
    assert whole.addressable_shards[0].data.shape == whole.shape


@on_devices
def test_a_checkpoint_is_read_into_its_parts(tmp_path):
    mesh = kvjax.make_mesh(CONFIG.kv_heads, data=2, tensor=4)
    huggingface.save_model(tmp_path, model())
    wanted, found = (shard_model(model(), mesh), huggingface.load_model(tmp_path, mesh=mesh))
    for one, other in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        assert one.sharding == other.sharding
        np.testing.assert_array_equal(one, other)


@on_devices
def test_what_devices_do_not_divide_lies_whole():
    mesh = kvjax.make_mesh(2, tensor=8)
    odd = LlamaConfig(
        vocab_size=33, width=32, mlp_width=36, layers=1, query_heads=4, kv_heads=2, head_dim=8, max_length=8
    )
    _, parameters = nnx.split(nnx.eval_shape(lambda: Llama(odd, rngs=nnx.Rngs(0))))
    placed = nnx.to_pure_dict(parameter_shardings(parameters, odd, mesh))
    layer = placed["layers"][0]
    specs = [
        placed["embedding"]["embedding"],
        *(one["kernel"] for one in (layer["mlp"]["gate_up"], layer["attention"]["qkv"])),
    ]
    assert [one.spec for one in specs] == [
        jax.P(None),
        jax.P(None, None, ("tensor",)),
        jax.P(("sequence",), ("tensor",)),
    ]


@on_devices
@pytest.mark.heavy
@pytest.mark.parametrize("name", ["exact", "chelsea"])
def test_rows_give_place_to_further_prompts_on_a_mesh(name):
    def texts(mesh):
        placed = model() if mesh is None else shard_model(model(), mesh)
        made = Generator(placed, POLICIES[name], **{**SIZES, "batch": 2}, prefill_chunk=4)
        rows = {}
        for written in batching.run_requests(made, [batching.Request(prompt, 9) for prompt in PROMPTS]):
            rows.setdefault(written.number, []).extend(written.tokens)
        return rows

    layers = kvjax.make_mesh(CONFIG.kv_heads, data=1, tensor=DEVICES)
    assert texts(layers) == texts(None)
    with pytest.raises(ValueError, match="cannot be divided among 2 groups of devices"):
        texts(kvjax.make_mesh(CONFIG.kv_heads, data=2, tensor=DEVICES // 2))
