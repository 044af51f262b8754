"""The attention backends for tpu-inference against its own reference, and in its registries (`make tpu-inference`)."""

import functools
import importlib
import inspect
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.quantization import dequantize, quantize
from kvjax_models.adapters import tpu_inference as adapter

pytest.importorskip("tpu_inference")
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)

PAGE_SIZE, NUM_PAGES, PAGES_PER_SEQUENCE = 256, 24, 4
KV_HEADS, GROUP = 2, 3
# Options of the reference that the interface names differently.
NAMES = {"sliding_window": "attention_chunk_size", "soft_cap": "attn_logits_soft_cap"}


def import_host(name):
    return importlib.import_module(f"tpu_inference.{name}")


@pytest.fixture(scope="module")
def mesh():
    names = import_host("layers.common.sharding").MESH_AXIS_NAMES
    return jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]).reshape((1,) * len(names)), names)


@pytest.fixture
def registry():
    adapter.register()
    adapter.register()  # vLLM may call it more than once
    return import_host("layers.common.attention_backend")


def make_vectors(rng, tokens, kv_dtype, head_dim):
    """Returns keys or values that a format represents up to rounding of float32."""
    x = jnp.asarray(rng.normal(size=(tokens, KV_HEADS, head_dim)), jnp.float32)
    return np.asarray(dequantize(quantize(x, kv_dtype)))


class Host:
    """A server that gives the backend and the reference the same tokens, step by step.

    Attributes:
        lengths: tokens of each sequence.
    """

    def __init__(self, kv_dtype, head_dim, mesh, dtype=jnp.float32, sequences=4):
        suffix = "_hd64" if head_dim == 64 else ""
        self.rpa = import_host(f"kernels.ragged_paged_attention.v3.kernel{suffix}")
        self.reference = getattr(self.rpa, f"ref_ragged_paged_attention{suffix}")
        self.interface = import_host("layers.common.attention_interface")
        self.backend, self.mesh, self.dtype = adapter.QuantizedBackend(kv_dtype), mesh, dtype
        self.rng, self.head_dim, self.lengths = np.random.default_rng(0), head_dim, np.zeros(sequences, int)
        self.table = self.rng.permutation(NUM_PAGES)[: sequences * PAGES_PER_SEQUENCE].astype(np.int32)
        shape = (NUM_PAGES, PAGE_SIZE, KV_HEADS, head_dim, dtype)
        self.cache = jnp.zeros(self.backend.get_kv_cache_shape(*shape), dtype)
        self.reference_cache = jnp.zeros(self.rpa.get_kv_cache_shape(*shape), dtype)

    def step(self, new, make, **options):
        """Adds tokens `make(rng, count)` to the first sequences, `new` to each.

        Returns:
            The outputs of the backend and of the reference, in float32.
        """
        total, padded = sum(new), 384
        q = jnp.asarray(self.rng.normal(size=(padded, KV_HEADS * GROUP, self.head_dim)), self.dtype)
        k, v = (jnp.asarray(make(self.rng, padded), self.dtype) for _ in range(2))
        lengths = self.lengths.copy()
        lengths[: len(new)] += new
        starts = np.full(len(lengths) + 1, 1 << 20)
        starts[: len(new) + 1] = np.cumsum([0, *new])
        decodes = next((i for i, count in enumerate(new) if count > 1), len(new))  # the first ones
        sequences = [jnp.asarray(x, jnp.int32) for x in (lengths, self.table, starts, [decodes, decodes, len(new)])]
        metadata = self.interface.AttentionMetadata(
            jnp.zeros(padded, jnp.int32), seq_lens=sequences[0], block_tables=sequences[1],
            query_start_loc=sequences[2], request_distribution=sequences[3],
        )  # fmt: skip
        scale = self.head_dim**-0.5
        attend = functools.partial(
            self.interface.attention, mesh=self.mesh, sm_scale=scale, attention_backend=self.backend,
            **{NAMES.get(name, name): value for name, value in options.items()},
        )  # fmt: skip
        self.cache, output = jax.jit(attend)(self.cache, q, k, v, metadata)
        if options.pop("update_kv_cache", True):
            self.lengths = lengths
        if "sinks" in options:
            options["attention_sink"] = options.pop("sinks")
        expected, self.reference_cache = self.reference(
            q[:total], k[:total], v[:total], self.reference_cache, *sequences, sm_scale=scale, **options
        )
        assert output.shape == q.shape and output.dtype == self.dtype and not output[total:].any()
        return np.asarray(output[:total], np.float32), np.asarray(expected, np.float32)


# New tokens per step: prompts, decoding beside prompts, decoding alone, and prompts that continue.
STEPS = ([200, 1, 70, 3], [1, 1, 300], [1, 1, 1, 1])


@pytest.mark.parametrize(
    "kv_dtype, head_dim, options",
    [
        ("int4", 128, {}),
        ("int4", 128, {"sliding_window": 37}),
        ("int8", 128, {"soft_cap": 2.0}),
        ("int4", 256, {}),
    ],
    ids=str,
)
def test_representable_vectors_give_the_output_of_the_reference(kv_dtype, head_dim, options, mesh):
    host = Host(kv_dtype, head_dim, mesh)
    for new in STEPS:
        output, expected = host.step(new, lambda rng, n: make_vectors(rng, n, kv_dtype, head_dim), **options)
        np.testing.assert_allclose(output, expected, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kv_dtype", ["int4", "int8"])
def test_random_vectors_are_within_the_quantization_error(kv_dtype, dtype, mesh):
    host = Host(kv_dtype, 128, mesh, dtype)
    vectors = np.random.default_rng(3).normal(size=(1000, 1, 128)).astype(np.float32)
    error = np.linalg.norm(dequantize(quantize(vectors, kv_dtype)) - vectors) / np.linalg.norm(vectors)
    for new in STEPS:
        output, expected = host.step(new, lambda rng, n: rng.normal(size=(n, KV_HEADS, 128)))
        relative = np.linalg.norm(output - expected) / np.linalg.norm(expected)
        # Keys and values have independent errors, and bfloat16 rounds to eight bits.
        assert error / 2 < relative < 1.5 * error + (2**-8 if dtype == jnp.bfloat16 else 0)
        print(f"{kv_dtype} {dtype.__name__}: vectors {error:.4f}, output {relative:.4f}")


def test_heads_on_two_devices(mesh):
    outputs = []
    for devices in (1, 2):
        shape = [devices if name == "model" else 1 for name in mesh.axis_names]
        host = Host("int4", 128, jax.sharding.Mesh(np.array(jax.devices()[:devices]).reshape(shape), mesh.axis_names))
        outputs.append([host.step(new, lambda rng, n: rng.normal(size=(n, KV_HEADS, 128)))[0] for new in STEPS])
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), *outputs)


def test_one_kv_head_on_two_devices(mesh):
    rng, metadata = np.random.default_rng(0), import_host("layers.common.attention_metadata")
    q, k, v = (jnp.asarray(rng.normal(size=(8, heads, 128)), jnp.float32) for heads in (4, 1, 1))
    shape = [2 if name == "model" else 1 for name in mesh.axis_names]
    devices = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(shape), mesh.axis_names)
    cache = jnp.zeros(adapter.QuantizedBackend("int4").get_kv_cache_shape(2, 128, 2, 128, jnp.float32))
    sequences = adapter.Sequences(*(jnp.array(x, jnp.int32) for x in ([8], [1], [0, 8], [0, 0, 1])))
    step = metadata.AttentionMetadata(jnp.arange(8), sequences.page_table, *sequences[::2], sequences[3])
    attend = functools.partial(import_host("layers.common.attention_interface").attention, mesh=devices, sm_scale=0.1)
    backend = {"attention_backend": adapter.QuantizedBackend("int4")}
    actual = jax.jit(functools.partial(attend, **backend))(cache, q, k, v, step)
    repeated = (jnp.repeat(x, 2, axis=1) for x in (k, v))
    expected = adapter.attend(cache, q, *repeated, sequences, options=adapter.Options("int4", 0.1))
    np.testing.assert_array_equal(*(np.asarray(one[0]).view(np.uint32) for one in (actual, expected)))
    np.testing.assert_allclose(actual[1], expected[1], atol=1e-5)


def test_sinks_and_narrow_heads(mesh):
    host = Host("int8", 64, mesh)
    sinks = jnp.asarray(np.random.default_rng(1).normal(size=KV_HEADS * GROUP) * 3, jnp.float32)
    for new in ([70, 1], [1, 1, 80]):
        output, expected = host.step(new, lambda rng, n: make_vectors(rng, n, "int8", 64), sinks=sinks)
        np.testing.assert_allclose(output, expected, atol=2e-5)


def test_pages_are_not_written_without_an_update(mesh):
    host = Host("int4", 128, mesh)
    make = lambda rng, n: make_vectors(rng, n, "int4", 128)  # noqa: E731
    host.step([50, 20], make)
    before = np.asarray(host.cache)
    host.step([1, 1], make, update_kv_cache=False)
    np.testing.assert_array_equal(np.asarray(host.cache), before)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"use_causal_mask": False}, "causal"),
        ({"k_scale": 1.0}, "kv-cache-dtype auto"),
    ],
)
def test_unsupported_options_are_refused(changes, message, mesh):
    host = Host("int4", 128, mesh)
    with pytest.raises(NotImplementedError, match=message):
        host.step([1], lambda rng, n: rng.normal(size=(n, KV_HEADS, 128)), **changes)


@pytest.mark.parametrize("kv_dtype, head_dim, size", [("int4", 128, 132), ("int8", 128, 260), ("int4", 64, 68)])
def test_page_bytes(kv_dtype, head_dim, size, mesh):
    kv_cache = import_host("runner.kv_cache")
    backend = adapter.QuantizedBackend(kv_dtype)
    args = (mesh, 256, 8, head_dim, jnp.bfloat16, False)
    page_bytes = kv_cache.get_attention_page_size_bytes(*args, backend)
    assert page_bytes == 256 * 8 * size
    # bfloat16 pages have 512 bytes per token and head at D=128.
    assert kv_cache.get_attention_page_size_bytes(*args) == 256 * 8 * 4 * head_dim
    [array] = kv_cache.create_kv_caches(3, 256, 8, head_dim, mesh, ["layer"], jnp.bfloat16, attention_backend=backend)
    assert array.nbytes == 3 * page_bytes


def test_the_backends_have_the_methods_of_the_interface(registry):
    for name in registry.AttentionBackend.__abstractmethods__:
        expected = inspect.signature(getattr(registry.AttentionBackend, name)).parameters
        actual = inspect.signature(getattr(adapter.QuantizedBackend, name)).parameters
        assert [(x.name, x.kind) for x in actual.values()] == [(x.name, x.kind) for x in expected.values()]


@pytest.mark.parametrize("name, kv_dtype", [("kvjax_int4", "int4"), ("kvjax_int8", "int8")])
def test_the_registries_find_the_backends(name, kv_dtype, registry):
    from types import SimpleNamespace

    from vllm.config.attention import AttentionConfig
    from vllm.utils.import_utils import resolve_obj_by_qualname

    config = SimpleNamespace(attention_config=AttentionConfig(backend=name))
    assert registry.attention_backend_name(config) == name
    assert registry.create_attention_backend(name) == adapter.QuantizedBackend(kv_dtype)
    platform = import_host("platforms.tpu_platform").TpuPlatform
    path = platform.get_attn_backend_cls(config.attention_config.backend, SimpleNamespace(use_mla=False))
    vllm_class = resolve_obj_by_qualname(path)
    assert vllm_class.get_name() == name.upper()
    assert vllm_class.get_impl_cls().attention_backend == name


def test_vllm_finds_the_entry_point():
    from vllm import plugins

    assert os.environ.get("VLLM_PLUGINS") is None
    assert plugins.load_plugins_by_group("vllm.general_plugins")["kvjax"] is adapter.register
