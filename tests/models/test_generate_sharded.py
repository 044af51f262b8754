"""Generation on eight simulated devices: the same tokens, logits and shardings as documented, with one process and with
two. The tests run in a subprocess that has the devices."""

import dataclasses
import functools
import itertools
import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from kvjax.distributed.sharding import rename_axes
from kvjax_models import LanguageModel
from kvjax_models.formats import huggingface
from kvjax_models.model.config import RecurrenceConfig
from kvjax_models.model.llama import Llama
from kvjax_models.runner import lowering, prefill
from kvjax_models.runner.generator import Generator
from kvjax_models.saves import Save
from kvjax_models.sharding import mesh_of, parameter_shardings, shard_model
from tests.kvjax import support
from tests.models import meshes, tiny
from tests.models.huggingface_files import save_model
from tests.models.loops import decode
from tests.models.meshes import (
    CONFIG,
    DELTA,
    DEVICES,
    POLICIES,
    PROMPTS,
    SIZES,
    assert_sharded,
    generate_turns,
    heavy,
    make_mesh,
    make_model,
    needs_devices,
    on_mesh,
    run_two_processes,
    starts_processes,
)
from tests.models.support import GOLDEN, ROOT

CHECKPOINT = tiny.directory()


@functools.cache
def load_checkpoint():
    return huggingface.load_model(CHECKPOINT)


# --- Subprocesses ---


@starts_processes
@pytest.mark.parametrize("marker", ["not heavy", heavy("heavy")])
def test_with_eight_devices(marker):
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}", "JAX_PLATFORMS": "cpu"} | support.THREADS
    files = [str(ROOT / "tests" / "models" / f"test_{name}.py") for name in ("generate_sharded", "sequence_parallel")]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", marker, *files]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | flags, check=False)
    assert result.returncode == 0, result.stdout[-5000:]


# Is killed after its first save, or continues from it.
RESUME = """
from tests.models import test_generate_sharded as tests

mesh = tests.make_mesh(data=2, tensor=4)
generator = tests.Generator(tests.on_mesh(mesh), tests.POLICIES["exact"], **tests.SIZES)
saved = tests.Save(sys.argv[3])
if sys.argv[4] == "killed":
    for state, _ in tests.decode(generator, generator.prefill(generator.init_state(3), tests.PROMPTS), 12):
        saved.write(state, {}, {})
        os.kill(os.getpid(), signal.SIGKILL)
saved.check()
state = saved.restore(generator.init_state())
print(json.dumps([tokens.tolist() for _, tokens in tests.decode(generator, state, 8)]))
"""

GENERATE_WITH_EVERY_POLICY = """
from tests.models import test_generate_sharded as tests

model = tests.on_mesh(tests.make_mesh(2, data=2, tensor=4), tests.load_checkpoint())
results = {name: tests.generate_after_prompts(model, policy) for name, policy in tests.support.ON_A_MESH.items()}
print(json.dumps({name: [rows, logits.tolist()] for name, (rows, logits) in results.items()}))
"""


@starts_processes
@pytest.mark.heavy
def test_two_killed_processes_resume_from_their_save(tmp_path):
    run_two_processes(RESUME, str(tmp_path), "killed", expected_code=-signal.SIGKILL)
    generator = Generator(make_model(), POLICIES["exact"], **SIZES)
    state = generator.prefill(generator.init_state(3), PROMPTS)
    blocks = [tokens.tolist() for _, tokens in decode(generator, state, 12)]
    assert run_two_processes(RESUME, str(tmp_path), "resumed") == [blocks[1:]] * 2


def generate_after_prompts(model, policy):
    generator = Generator(model, policy, batch=4, max_prompt_tokens=60, max_new_tokens=24)
    return meshes.generate(generator, [list(range(5, 5 + length)) for length in (60, 17, 41, 33)], 12)


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
    ("kind", "name", "data", "tensor"),
    [
        ("dense", "exact", 1, 8),
        ("dense", "snapkv", 2, 4),
        heavy("dense", "chelsea", 2, 4),
        heavy("dense", "by_head", 4, 2),
        heavy("hybrid", "exact", 1, 8),
        heavy("hybrid", "exact", 2, 4),
        ("convolution", "exact", 2, 4),
    ],
)
def test_tokens_and_logits_equal_those_of_one_device(kind, name, data, tensor):
    mesh, model = make_mesh(data=data, tensor=tensor), make_model(kind)
    rows, state = generate_turns(model, name, streaming=name == "chelsea")
    sharded_model = on_mesh(mesh, model)
    sharded_rows, sharded = generate_turns(sharded_model, name, streaming=name == "chelsea")
    assert sharded_rows == rows
    np.testing.assert_allclose(sharded.logits, state.logits, atol=1e-4)
    assert_sharded(sharded, mesh)
    if kind == "hybrid":
        assert shape_on_a_device(sharded.recurrent[0].memory) == (4 // data, 1, 2, 8, 6)  # one of four key heads
        kernel = sharded_model.layers[0].mixer.qkvz.kernel[...]
        assert shape_on_a_device(kernel) == (CONFIG.width, 1, DELTA.channels + 12)
    if kind == "convolution":
        assert shape_on_a_device(sharded.recurrent[0].inputs) == (2, 2, CONFIG.width // 4)


def shape_on_a_device(array):
    return array.addressable_shards[0].data.shape


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
        generator = Generator(on_mesh(mesh), POLICIES["exact"], batch=4, max_prompt_tokens=2048, max_new_tokens=64)
        state = lowering.abstract_state(jax.eval_shape(generator.init_state), mesh)
        sharding = None if mesh else jax.sharding.SingleDeviceSharding(jax.devices()[0])
        memory = lowering.lower_decode(generator, state, sharding=sharding).compile().memory_analysis()
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes

    share = peak_bytes(None) / 8
    for shape in ({"data": 4, "tensor": 2}, {"data": 2, "tensor": 4}, {"tensor": 8}, {"tensor": 8, "sequence": 8}):
        # Staged tokens and all arrays except the stores are replicated on devices that share a head.
        assert share < peak_bytes(make_mesh(**shape)) < 1.3 * share


@needs_devices
@pytest.mark.parametrize("kind", [heavy("dense"), "hybrid"])
def test_a_state_saved_on_one_mesh_continues_on_another(kind, tmp_path):
    shapes = [make_mesh(data=data, tensor=8 // data) for data in (2, 4)]
    first, second = (Generator(on_mesh(mesh, make_model(kind)), POLICIES["exact"], **SIZES) for mesh in shapes)
    blocks = []
    for state, tokens in decode(first, first.prefill(first.init_state(3), PROMPTS), 12):
        if not blocks:
            Save(tmp_path).write(state, {}, {})
        blocks.append(tokens)
    restored = Save(tmp_path).restore(second.init_state())
    assert_sharded(restored, shapes[1])
    continued = [tokens for _, tokens in decode(second, restored, 8)]
    np.testing.assert_array_equal(np.concatenate(continued, axis=1), np.concatenate(blocks[1:], axis=1))


@needs_devices
@pytest.mark.parametrize("name", [heavy("snapkv"), heavy("chelsea"), heavy("exact")])
def test_documents_on_a_mesh(name):
    """Entries of a text and tails are sharded along heads, also in an engine with rows of several sizes."""

    def answer(mesh):
        cache = LanguageModel(on_mesh(mesh, load_checkpoint()), tiny.make_llm().tokenizer).cache(POLICIES[name])
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


@needs_devices
def test_a_document_that_one_device_saved_answers_on_a_mesh(tmp_path):
    tokens, mesh = [i % 30 + 2 for i in range(60)], make_mesh(tensor=4, devices=jax.devices()[:4])
    alone, llm = (LanguageModel(on_mesh(one, make_model("hybrid")), tiny.make_llm().tokenizer) for one in (None, mesh))
    document = alone.cache(POLICIES["exact"]).read(tokens, max_new_tokens=32)
    document.save(tmp_path)
    for one in (llm.cache(POLICIES["exact"]).read(tokens, max_new_tokens=32), llm.open(tmp_path)):
        texts = ["ab", "c", "def"]
        assert one.generate(texts, max_new_tokens=12) == document.generate(texts, max_new_tokens=12)
        assert not one.prefix.recurrent[0].memory.sharding.is_fully_replicated


@needs_devices
def test_a_document_on_devices_that_share_slots_is_opened_on_one_and_back(tmp_path):
    """A store has as many slots as all devices of a head need."""
    llms = [
        LanguageModel(on_mesh(mesh, load_checkpoint()), tiny.make_llm().tokenizer)
        for mesh in (None, make_mesh(2, tensor=DEVICES))
    ]
    slots = []
    for number, (llm, other) in enumerate(itertools.permutations(llms)):
        document = llm.cache(POLICIES["exact"]).read([i % 60 + 5 for i in range(70)], max_new_tokens=32)
        document.save(tmp_path / str(number))
        opened = other.open(tmp_path / str(number))
        texts = ["ab", "c", "def"]
        assert opened.generate(texts, max_new_tokens=12) == document.generate(texts, max_new_tokens=12)
        slots.append([one.prefix.entries[0].state.keys.shape[2] for one in (document, opened)])
    assert slots == [[128, 256], [256, 128]]


# --- Meshes and shardings ---


@needs_devices
@pytest.mark.heavy
def test_a_mesh_may_have_other_axis_names():
    named = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("fsdp", "data", "tp"))
    mesh = rename_axes(named, CONFIG.kv_heads, data="fsdp", tensor="tp")
    assert dict(mesh.shape) == {"data": 2, "other_data": 2, "tensor": 2, "sequence": 1}
    rows, state = generate_turns(on_mesh(mesh))
    assert rows == generate_turns(make_model())[0]
    keys = state.layers[0].state.keys
    assert keys.sharding.is_equivalent_to(NamedSharding(named, jax.P("fsdp", "tp")), keys.ndim)


@needs_devices
def test_meshes_that_cannot_be_used_are_refused():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tp"))
    with pytest.raises(ValueError, match="axes 'fsdp', 'tp' and lacks .*'sequence'; pass .*rename_axes"):
        shard_model(make_model(), mesh)
    recurrence = RecurrenceConfig((0, 2), dataclasses.replace(DELTA, key_heads=2))
    config = dataclasses.replace(CONFIG, **meshes.HYBRID | {"recurrence": recurrence})
    model = shard_model(Llama(config, rngs=nnx.Rngs(0)), make_mesh(data=2, tensor=4))
    with pytest.raises(ValueError, match="2 along 'H' cannot be divided among 4 devices along 'tensor'"):
        Generator(model, POLICIES["exact"], **SIZES).init_state()
    llm = LanguageModel(on_mesh(make_mesh(data=2, tensor=4), make_model("hybrid")), tiny.make_llm().tokenizer)
    with pytest.raises(ValueError, match="batch rows are sharded over 2 groups of devices"):
        llm.cache(POLICIES["exact"]).engine(rows=2)


@needs_devices
@pytest.mark.heavy
@pytest.mark.parametrize("family", ["gpt_oss", "glm4_moe"])
def test_experts_on_a_mesh(family):
    """Loads a checkpoint directly onto the mesh. Experts are sharded along their hidden size, routers replicated."""
    model = huggingface.load_model(GOLDEN / family, jnp.float32)
    mesh = make_mesh(model.config.kv_heads, data=2, tensor=4)
    sharded = huggingface.load_model(GOLDEN / family, jnp.float32, mesh)
    mlp = sharded.layers[-1].mlp
    assert shape_on_a_device(mlp.gate.kernel[...])[1:] == (32, 4)  # a quarter of every expert's width
    if family == "glm4_moe":
        parameters = mlp.shared.gate_up.kernel, mlp.shared.down.kernel, mlp.router.selection_bias
        assert [shape_on_a_device(one[...]) for one in parameters] == [(32, 2, 8), (8, 32), (8,)]
    assert generate_turns(sharded)[0] == generate_turns(model)[0]


@needs_devices
def test_devices_share_parameters():
    mesh = make_mesh(tensor=8)
    sharded = on_mesh(mesh)
    assert mesh_of(sharded) == mesh and mesh_of(make_model()) is None and shard_model(sharded, mesh) is sharded
    attention, mlp = sharded.layers[0].attention, sharded.layers[0].mlp
    modules = (attention.qkv, attention.output, mlp.gate_up, mlp.down, sharded.head)
    # Four KV heads are on two devices each. Both need the queries of its group, so they share the input axis.
    group = CONFIG.query_heads // CONFIG.kv_heads
    shapes = [(16, 1, group + 2, 8), (8, 32), (32, 2, 6), (6, 32), (32, 5)]
    assert [shape_on_a_device(module.kernel[...]) for module in modules] == shapes
    assert shape_on_a_device(sharded.norm.scale[...]) == sharded.norm.scale[...].shape


@needs_devices
def test_a_checkpoint_is_loaded_onto_its_shardings(tmp_path):
    mesh = make_mesh(data=2, tensor=4)
    save_model(tmp_path, make_model())
    loaded = huggingface.load_model(tmp_path, mesh=mesh)
    for leaf, expected in zip(jax.tree.leaves(loaded), jax.tree.leaves(on_mesh(mesh)), strict=True):
        assert leaf.sharding == expected.sharding
        np.testing.assert_array_equal(leaf, expected)


@needs_devices
def test_axes_that_devices_do_not_divide_are_replicated():
    config = dataclasses.replace(CONFIG, vocab_size=33, mlp_width=36, layers=1, query_heads=4, kv_heads=2)
    _, parameters = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    shardings = nnx.to_pure_dict(parameter_shardings(parameters, config, make_mesh(2, tensor=8)))
    layer = shardings["layers"][0]
    assert shardings["embedding"]["embedding"].spec == jax.P(None)
    assert layer["mlp"]["gate_up"]["kernel"].spec == jax.P(None, None, ("tensor",))
    assert layer["attention"]["qkv"]["kernel"].spec == jax.P(("sequence",), ("tensor",))
