"""Mixtures of experts, compared with applying every expert to every token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax_models.model.activations import ACTIVATIONS
from kvjax_models.model.experts import Experts, blocks_by_expert
from kvjax_models.model.parameters import Initializer
from tests.models.support import small_config


def layer(experts, per_token, **options):
    sizes = {"experts.number": experts, "experts.per_token": per_token, "experts.width": 6}
    config = small_config(width=8, **sizes | {"experts.scaling_factor": 1.5} | options)
    experts_layer = Experts(config, Initializer(jnp.float32, nnx.Rngs(0)))
    random = np.random.default_rng(0)
    state = jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype), nnx.state(experts_layer))
    nnx.update(experts_layer, state)
    return config, experts_layer


def softmax(x):
    exponentials = np.exp(x - x.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def expert_weights(experts, logits, selection_bias):
    """The weight of every expert for one token, 0 for experts that are not selected."""
    scores = softmax(logits) if experts.scoring_func == "softmax" else sigmoid(logits)
    ranks = np.copy(scores) if experts.scoring_func == "softmax" else scores + selection_bias
    groups = np.split(np.arange(experts.number), experts.groups)
    if experts.groups > 1:
        best = sorted(groups, key=lambda group: -np.sort(ranks[group])[-2:].sum())
        for group in best[experts.groups_per_token :]:
            ranks[group] = -np.inf
    weights = np.zeros(experts.number)
    for expert in np.argsort(-ranks)[: experts.per_token]:
        weights[expert] = scores[expert]
    return experts.scaling_factor * weights / (weights.sum() if experts.normalize_weights else 1)


def apply_all_experts(config, layer, x):
    """The weighted sum over all experts in float64, plus the shared expert."""
    x = np.asarray(x, np.float64)
    router = layer.router
    logits = x @ router.kernel[...] + (0 if router.bias is None else router.bias[...])
    bias = None if router.selection_bias is None else np.asarray(router.selection_bias[...])
    weight = np.apply_along_axis(lambda row: expert_weights(config.experts, row, bias), -1, logits)

    def project(part, inputs, expert=...):
        return inputs @ np.asarray(part.kernel[...])[expert] + (0 if part.bias is None else part.bias[...][expert])

    def activate(gate, up):
        return np.asarray(ACTIVATIONS[config.activation](jnp.asarray(gate), jnp.asarray(up)))

    total = 0
    for expert in range(config.experts.number):
        inside = activate(project(layer.gate, x, expert), project(layer.up, x, expert))
        total = total + weight[..., expert, None] * project(layer.down, inside, expert)
    if config.experts.shared_width:
        kernel = np.asarray(layer.shared.gate_up.kernel[...])
        shared = activate(x @ kernel[:, 0], x @ kernel[:, 1]) @ layer.shared.down.kernel[...]
        gate = sigmoid(x @ layer.shared_gate.kernel[...]) if config.experts.shared_gate else 1
        total = total + gate * shared
    return total


SIGMOID = {"experts.scoring_func": "sigmoid"}


@pytest.mark.parametrize("shape", [(1, 1), (2, 40), (1, 700)], ids=str)
@pytest.mark.parametrize(
    "experts, per_token, options",
    [
        (4, 2, {}),
        (4, 4, {"activation": "clipped_swiglu", "mlp_bias": True}),
        (16, 3, {"experts.normalize_weights": False}),
        (1, 1, {"mlp_bias": True}),
        (4, 2, {"experts.shared_width": 5, "experts.shared_gate": True}),
        (16, 3, SIGMOID | {"experts.groups": 4, "experts.groups_per_token": 2, "experts.shared_width": 5}),
        (6, 2, SIGMOID | {"experts.normalize_weights": False}),
        (8, 3, SIGMOID | {"experts.groups": 4, "experts.groups_per_token": 2}),
        (12, 4, SIGMOID | {"experts.groups": 3, "experts.groups_per_token": 2, "experts.normalize_weights": False}),
        (12, 4, SIGMOID | {"experts.groups": 2, "experts.groups_per_token": 1}),
    ],
)
def test_weighted_sum_of_selected_experts(shape, experts, per_token, options):
    """The selection bias and the groups decide which experts are selected, but not their weights."""
    config, experts_layer = layer(experts, per_token, **options)
    x = jax.random.normal(jax.random.key(1), (*shape, 8))
    expected = apply_all_experts(config, experts_layer, x)
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
