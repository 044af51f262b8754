"""Weights in int8: products, whole models against their dequantized weights, bytes, saves and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax_models import formats, load
from kvjax_models.formats.checkpoint import _input_axis, flatten_parameters
from kvjax_models.model import quantized
from kvjax_models.model.llama import parameter_bytes
from kvjax_models.runner.generator import Generator
from tests.models import tiny
from tests.models.loops import decode_all
from tests.models.support import GOLDEN

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 60, (2, 24)))


@pytest.mark.parametrize("shape", [(64, 5, 3), (48, 7), (7, 16)])
@pytest.mark.parametrize("tokens", [1, 40])
def test_products_equal_those_of_dequantized_weights(shape, tokens):
    rng = np.random.default_rng(0)
    weights = rng.normal(size=shape).astype(np.float32)
    values, scale = quantized.quantize(weights, 0)
    np.testing.assert_allclose(values * scale, weights, atol=np.abs(weights).max() / 127)
    assert values.dtype == np.int8 and np.abs(values).max() == 127
    zeros = quantized.quantize(np.zeros((4, 3), np.float32), 0)
    np.testing.assert_array_equal(zeros[0] * zeros[1], np.zeros((4, 3)))
    x = rng.normal(size=(tokens, shape[0])).astype(np.float32)
    expected = np.tensordot(x, values * scale, axes=1)
    np.testing.assert_allclose(jax.jit(quantized.multiply)(x, values, scale), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("tokens", [1, 40])
def test_sums_of_products_are_float32(dtype, tokens):
    """Sums before the scale are up to 127 times as large as the product, and have as many terms as inputs."""
    rng = np.random.default_rng(0)
    values, scale = quantized.quantize(rng.normal(size=(4096, 24)).astype(np.float32) / 64, 0)
    x = rng.normal(size=(tokens, 4096)).astype(np.float32)
    x[:, 5] = 2000
    x, scale = jnp.asarray(x, dtype), jnp.asarray(scale, dtype)
    expected = np.asarray(x, np.float64) @ (values * np.asarray(scale, np.float64))
    product = np.asarray(jax.jit(quantized.multiply)(x, values, scale), np.float64)
    assert np.linalg.norm(product - expected) < 0.5 * jnp.finfo(dtype).eps * np.linalg.norm(expected)


def test_logits_of_an_untied_head_are_not_rounded():
    model = formats.load_model(GOLDEN / "llama2", jnp.bfloat16, weight_dtype="int8")
    x = jax.random.normal(jax.random.key(0), (1, 1, model.config.width), jnp.bfloat16)
    logits = jax.jit(lambda model, x: model.logits(x))(model, x)
    normalized, head = np.asarray(model.norm(x), np.float64), model.head
    expected = normalized @ (np.asarray(head.kernel) * np.asarray(head.channel_scale, np.float64))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("size", [192, 100])  # with and without blocks
def test_tied_logits_equal_those_of_the_dequantized_table(size):
    rng = np.random.default_rng(0)
    values, scale = quantized.quantize(rng.normal(size=(size, 24)).astype(np.float32), 1)
    x = rng.normal(size=(3, 24)).astype(np.float32)
    logits = jax.jit(quantized.multiply_transposed)(x, values, scale)
    np.testing.assert_allclose(logits, x @ (values * scale[:, None]).T, rtol=1e-5, atol=1e-5)


def dequantized(model, quantized_model):
    """Returns a float model whose weights are those of a quantized one."""
    parameters = flatten_parameters(nnx.state(quantized_model, nnx.Param))
    graph, state = nnx.split(model)
    for path, leaf in list(flatten_parameters(state).items()):
        value = np.asarray(parameters[path])
        if value.dtype == np.int8:
            scale = np.asarray(parameters[(*path[:-1], quantized.SCALE)])
            value = value * np.expand_dims(scale, _input_axis(path, value.ndim))
        assert value.shape == leaf.shape
        parameters[path] = jnp.asarray(value)
    kept = {path: leaf for path, leaf in parameters.items() if path[-1] != quantized.SCALE}
    nnx.replace_by_pure_dict(state, nnx.traversals.unflatten_mapping(kept))
    return nnx.merge(graph, state)


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "glm4_moe", "qwen2", "gemma4_experts", "qwen3_5"])
def test_logits_equal_those_of_the_dequantized_model(family):
    model = formats.load_model(GOLDEN / family, jnp.float32)
    int8 = formats.load_model(GOLDEN / family, jnp.float32, weight_dtype="int8")
    logits, exact = jax.jit(lambda model: model(TOKENS))(int8), jax.jit(lambda model: model(TOKENS))(model)
    np.testing.assert_allclose(logits, jax.jit(lambda model: model(TOKENS))(dequantized(model, int8)), atol=1e-4)
    assert 0 < jnp.linalg.norm(logits - exact) < 0.1 * jnp.linalg.norm(exact)


@pytest.fixture(scope="module")
def llms():
    return [load(tiny.directory(), weight_dtype=weight_dtype) for weight_dtype in (None, "int8")]


def test_bytes_and_generation(llms):
    exact, int8 = llms
    assert 0.25 < parameter_bytes(int8.model) / parameter_bytes(exact.model) < 0.32
    assert {leaf.dtype for leaf in jax.tree.leaves(int8.model)} == {jnp.dtype(jnp.int8), jnp.dtype(jnp.float32)}
    tokens = [int8.encode("The quick brown fox jumps over the lazy dog. " * 5)]
    generator = Generator(int8.model, kvjax.Exact(), batch=1, max_prompt_tokens=256, max_new_tokens=8)
    state = generator.prefill(generator.init_state(), tokens)
    np.testing.assert_allclose(state.logits[0], int8.model(jnp.asarray(tokens))[0, -1], atol=2e-3)
    rows, _ = decode_all(generator, state, 8)
    logits = int8.model(jnp.asarray([tokens[0] + rows[0]]))[0]
    assert rows[0] == jnp.argmax(logits[len(tokens[0]) - 1 : -1], axis=-1).tolist()


def test_saves_name_the_dtype_of_weights(llms, tmp_path):
    llms[1].cache().read([1, 2, 3]).save(tmp_path / "run")
    assert llms[1].open(tmp_path / "run").tokens == (1, 2, 3)
    for call, message in (
        (lambda: llms[0].open(tmp_path / "run"), "model.weight_dtype is 'int8'.* not 'float32'"),
        (lambda: load(tiny.directory(), mesh=kvjax.make_mesh(1), weight_dtype="int8"), "needs a single device"),
        (lambda: load(tiny.directory(), weight_dtype="int5"), "weight_dtype='int5' must be"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
