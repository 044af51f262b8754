"""Mixtures of experts, compared with applying every expert to every token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax_models.model.experts import ACTIVATIONS, Experts, blocks_by_expert


def layer(experts, per_token, *, normalize_weights=True, bias=False, activation="silu"):
    experts_layer = Experts(8, 6, activation, bias, experts=experts, per_token=per_token, dtype=jnp.float32,
                            normalize_weights=normalize_weights, rngs=nnx.Rngs(0))  # fmt: skip
    random = np.random.default_rng(0)
    state = jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype), nnx.state(experts_layer))
    nnx.update(experts_layer, state)
    return experts_layer


def apply_all_experts(layer, x):
    """The weighted sum over all experts, with a weight of 0 for experts that are not selected."""
    logits = layer.router(x)
    order = np.argsort(-np.asarray(logits), axis=-1)[..., : layer.per_token]
    weight = np.zeros(logits.shape, np.float32)
    np.put_along_axis(weight, order, np.take_along_axis(np.asarray(jax.nn.softmax(logits)), order, -1), -1)
    if layer.normalize_weights:
        weight /= weight.sum(-1, keepdims=True)
    total = 0
    for expert in range(layer.experts):
        gate, up, down = (
            (part.kernel[...][expert], 0 if part.bias is None else part.bias[...][expert])
            for part in (layer.gate, layer.up, layer.down)
        )
        inside = ACTIVATIONS[layer.activation](x @ gate[0] + gate[1], x @ up[0] + up[1])
        total = total + weight[..., expert, None] * (inside @ down[0] + down[1])
    return total


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 40), (1, 700)], ids=str)
@pytest.mark.parametrize(
    "experts, per_token, options",
    [
        (4, 2, {}),
        (4, 4, {"activation": "clipped_swiglu", "bias": True}),
        (16, 3, {"normalize_weights": False}),
        (1, 1, {"bias": True}),
    ],
)
def test_weighted_sum_of_selected_experts(shape, experts, per_token, options):
    experts_layer = layer(experts, per_token, **options)
    x = jax.random.normal(jax.random.key(1), (*shape, 8))
    expected = apply_all_experts(experts_layer, x)
    np.testing.assert_allclose(nnx.jit(lambda layer, x: layer(x))(experts_layer, x), expected, atol=1e-4, rtol=1e-4)


SIZES = [(1, 2, 4), (5, 1, 40), (40, 4, 16), (300, 2, 4), (300, 4, 40)]  # each is compiled


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SIZES), st.integers(0, 2**32 - 1), st.booleans())
def test_every_token_has_slots_in_blocks_of_its_experts(sizes, seed, imbalanced):
    """Slots are distinct, and their number does not grow with tokens times experts."""
    rows, per_token, experts = sizes
    random = np.random.default_rng(seed)
    score = random.normal(size=(rows, experts)) - (10 * np.arange(experts) if imbalanced else 0)
    chosen = np.argsort(score, axis=1)[:, :per_token].astype(np.int32)
    slot, source, block_expert = (np.asarray(x) for x in blocks_by_expert(jnp.asarray(chosen), experts))
    assert len(set(slot.reshape(-1))) == slot.size
    np.testing.assert_array_equal(source.reshape(-1)[slot], np.broadcast_to(np.arange(rows)[:, None], slot.shape))
    np.testing.assert_array_equal(block_expert[slot // source.shape[1]], chosen)
    assert (source < rows).sum() == slot.size
    assert source.size <= 3 * slot.size + experts


def test_a_decode_step_reads_only_selected_experts():
    """One token with two of 128 experts needs two blocks of one token."""
    _, source, _ = jax.eval_shape(lambda chosen: blocks_by_expert(chosen, 128), jnp.zeros((1, 2), jnp.int32))
    assert source.shape == (2, 1)


def test_clipped_swiglu():
    gate, up = jnp.array([9.0, 2.0, -9.0]), jnp.array([-9.0, 0.5, 9.0])
    expected = [7 / (1 + np.exp(-1.702 * 7)) * -6, 2 / (1 + np.exp(-1.702 * 2)) * 1.5, -9 / (1 + np.exp(1.702 * 9)) * 8]
    np.testing.assert_allclose(ACTIVATIONS["clipped_swiglu"](gate, up), expected, rtol=1e-6)


def test_router_and_experts_have_gradients():
    experts_layer = layer(4, 2, bias=True)
    x = jax.random.normal(jax.random.key(1), (1, 50, 8))
    gradients = nnx.grad(lambda layer: jnp.sum(layer(x) ** 2))(experts_layer)
    for path, gradient in nnx.to_flat_state(nnx.state(gradients)):
        assert float(jnp.abs(gradient[...]).max()) > 0, path
