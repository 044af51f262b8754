"""Recurrent layers: the gated delta rule against its definition, token by token in float64, and convolutions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax_models.model.gated_delta import GatedDeltaNet, GatedDeltaSizes, gated_delta_rule
from kvjax_models.model.parameters import Initializer
from kvjax_models.model.short_convolution import ShortConvolution, ShortConvolutionSizes, convolve, last_inputs

BATCH, HEADS, GROUP, KEY_DIM, VALUE_DIM = 2, 2, 3, 8, 6


def token_by_token(query, key, values, beta, log_decay, memory):
    """Returns the outputs and the last state in float64."""
    memory, outputs = np.array(memory, np.float64), []
    for t in range(query.shape[1]):
        k, q = key[:, t, :, None, :, None].astype(np.float64), query[:, t, :, None, :, None].astype(np.float64)
        memory = memory * np.exp(log_decay[:, t].astype(np.float64))[..., None, None]
        read = (memory * k).sum(-2)
        memory = memory + k * (beta[:, t, ..., None] * (values[:, t] - read))[..., None, :]
        outputs.append((memory * q).sum(-2))
    return np.stack(outputs, axis=1), memory


def draw(tokens, seed=0, *, equal_keys=False, decay=0.3):
    """Returns random arguments of `gated_delta_rule`."""
    rng = np.random.default_rng(seed)
    key = rng.normal(size=(BATCH, tokens, HEADS, KEY_DIM))
    if equal_keys:
        key[:] = key[:, :1]
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    shape = (BATCH, tokens, HEADS, GROUP)
    arrays = (
        rng.normal(size=key.shape),
        key,
        rng.normal(size=(*shape, VALUE_DIM)),
        rng.uniform(size=shape) ** 0.2,
        -decay * rng.exponential(size=shape),
        rng.normal(size=(BATCH, HEADS, GROUP, KEY_DIM, VALUE_DIM)),
    )
    return [x.astype(np.float32) for x in arrays]


# The largest decay makes exp of a sum over a chunk underflow; differences of such sums lose digits.
@pytest.mark.parametrize(
    "options, tolerance",
    [({}, 2e-5), ({"equal_keys": True, "decay": 1e-3}, 2e-5), ({"decay": 30.0}, 3e-4)],
    ids=["random", "equal keys", "large decay"],
)
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 150])
def test_outputs_and_state_equal_the_definition(tokens, options, tolerance):
    arguments = draw(tokens, **options)
    outputs, memory = jax.jit(gated_delta_rule)(*arguments)
    expected_outputs, expected_memory = token_by_token(*arguments)
    np.testing.assert_allclose(outputs, expected_outputs, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(memory, expected_memory, atol=tolerance, rtol=tolerance)


def test_gradients_are_finite_for_large_decays():
    arguments = [jnp.asarray(x) for x in draw(70, decay=30.0)]
    gradients = jax.jit(jax.grad(lambda *args: gated_delta_rule(*args)[0].sum(), argnums=range(6)))(*arguments)
    assert all(bool(jnp.isfinite(one).all()) for one in gradients)


def gated_delta_layer():
    sizes = GatedDeltaSizes(key_heads=HEADS, value_heads=HEADS * GROUP, key_dim=8, value_dim=6, kernel_size=4)
    return GatedDeltaNet(16, sizes, 1e-6, Initializer(jnp.float32, nnx.Rngs(0)))


def convolution_layer():
    sizes = ShortConvolutionSizes(channels=32, kernel_size=3, use_bias=True)
    layer = ShortConvolution(16, sizes, Initializer(jnp.float32, nnx.Rngs(0)))
    layer.bias[...] = jax.random.normal(jax.random.key(2), 32)
    return layer


every_layer = pytest.mark.parametrize("make_layer", [gated_delta_layer, convolution_layer])


@every_layer
def test_tokens_in_parts_equal_one_pass(make_layer):
    layer = make_layer()
    state = layer.init_state(BATCH)
    x = jax.random.normal(jax.random.key(0), (BATCH, 70, 16))
    expected, last = layer(x, state, jnp.full(BATCH, 70))
    parts, first = [], 0
    for size in (1, 66, 1, 2):
        y, state = layer(x[:, first : first + size], state, jnp.full(BATCH, size))
        parts.append(y)
        first += size
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), expected, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state, last)


@every_layer
@pytest.mark.parametrize("tokens", [1, 20])
def test_padding_does_not_change_the_state(make_layer, tokens):
    layer = make_layer()
    x = jax.random.normal(jax.random.key(1), (BATCH, 30 + tokens, 16))
    _, state = layer(x[:, :30], layer.init_state(BATCH), jnp.array([30, 1]))
    _, short = layer(x[1:, :1], layer.init_state(1), jnp.array([1]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1:], b, atol=1e-6), state, short)
    _, changed = layer(x[:, 30:], state, jnp.array([tokens, 0]))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1], b[1]), changed, state)
    assert all(jnp.abs(a[0] - b[0]).max() > 1e-3 for a, b in zip(*map(jax.tree.leaves, (changed, state)), strict=True))


def test_convolutions_equal_numpy():
    rng = np.random.default_rng(0)
    x, kernel, last = rng.normal(size=(1, 5, 1)), rng.normal(size=(4, 1)), rng.normal(size=(1, 3, 1))
    entire = np.concatenate([last, x], axis=1)
    inputs = jnp.asarray(entire, jnp.float32)
    expected = np.convolve(entire.reshape(-1), kernel[::-1].reshape(-1), mode="valid")
    np.testing.assert_allclose(convolve(inputs, jnp.asarray(kernel)).reshape(-1), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(last_inputs(inputs, jnp.array([4]), 3), inputs[:, 4:7])


def test_value_heads_must_share_key_heads_evenly():
    with pytest.raises(ValueError, match="value_heads=3 must be a multiple of key_heads=2"):
        GatedDeltaSizes(key_heads=2, value_heads=3, key_dim=8, value_dim=8, kernel_size=4)
