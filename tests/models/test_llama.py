"""The decoder, its rotary embedding and its configuration."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax_models.model.config import rope_frequencies
from kvjax_models.model.llama import Llama
from kvjax_models.model.rotary import RopeScaling
from tests.models.support import small_config

SMALL = small_config(vocab_size=24, mlp_width=20, layers=2, query_heads=4, kv_heads=2, head_dim=4, max_length=64)
TOKENS = jax.random.randint(jax.random.key(0), (2, 12), 0, 24)


def build(**changes):
    return Llama(dataclasses.replace(SMALL, **changes), rngs=nnx.Rngs(0))


def test_logits_are_float32():
    model = Llama(SMALL, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    hidden = model.hidden_states(TOKENS)
    projected = model.layers[0].project(hidden, *model.rotation(jnp.zeros((2, 12), jnp.int32)))
    assert model(TOKENS).dtype == jnp.float32
    assert {x.dtype for x in (hidden, *projected)} == {jnp.dtype(jnp.bfloat16)}


def test_norms_use_the_epsilon():
    assert jnp.abs(build(norm_epsilon=1e-2)(TOKENS) - build()(TOKENS)).max() > 1e-3


EXPERTS = {"experts": 4, "experts_per_token": 2, "expert_width": 8}
GROUPS = {"experts": 8, "experts_per_token": 3, "expert_width": 4, "scoring_func": "sigmoid"}


@pytest.mark.parametrize("changes", [{}, {"tied_embeddings": True}, EXPERTS])
def test_every_parameter_has_a_gradient(changes):
    model = build(qkv_bias=True, output_bias=True, mlp_bias=True, query_key_norm=True, **changes)
    gradients = nnx.jit(nnx.grad(lambda model: jax.nn.logsumexp(model(TOKENS) ** 2, axis=-1).mean()))(model)
    flat = dict(nnx.to_flat_state(nnx.state(gradients)))
    assert flat.keys() == dict(nnx.to_flat_state(nnx.state(model))).keys()
    for path, gradient in flat.items():
        size = float(jnp.abs(gradient[...]).max())
        assert size > 0 and np.isfinite(size), path


def test_all_state_is_parameters():
    graph, state = nnx.split(build())
    assert all(isinstance(variable, nnx.Param) for _, variable in nnx.to_flat_state(state))
    np.testing.assert_array_equal(nnx.merge(graph, state)(TOKENS), build()(TOKENS))


@pytest.mark.parametrize("scaling", [None, RopeScaling("llama3", 8.0)])
def test_rope_frequencies_are_equal_when_compiled(scaling):
    """One bit of a frequency changes the angle at position 131,072 by .008 radians."""
    for head_dim in (64, 80, 128):
        config = dataclasses.replace(SMALL, head_dim=head_dim, rope_theta=5e5, rope_scaling=scaling)
        np.testing.assert_array_equal(jax.jit(rope_frequencies, static_argnums=0)(config), rope_frequencies(config))


def test_frequencies_depend_on_the_maximum_length():
    scaling = RopeScaling("longrope", 4.0, original_length=16, short_factors=(1.0, 1.0), long_factors=(2.0, 8.0))
    config = dataclasses.replace(SMALL, rope_scaling=scaling)
    plain = np.asarray(SMALL.rotary().frequencies)
    np.testing.assert_allclose(config.rotary(0, 16).frequencies, plain)
    np.testing.assert_allclose(config.rotary(0, 17).frequencies, plain / [2, 8])
    assert config.rotary() == config.rotary(0, SMALL.max_length)
    dynamic = dataclasses.replace(SMALL, rope_scaling=RopeScaling("dynamic", 2.0, original_length=16))
    np.testing.assert_allclose(dynamic.rotary(0, 3).frequencies, plain)
    # For twice the length, the base grows by 3 ** (4 / (4 - 2)).
    np.testing.assert_allclose(dynamic.rotary(0, 32).frequencies, [1, (10000.0 * 9) ** -0.5], rtol=1e-6)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rotary_dim": 3}, "rotary_dim=3 must be even"),
        ({"activation": "relu"}, "activation='relu' must be one of silu, gelu"),
        ({"norms": "none"}, "norms='none' must be one of pre, post, sandwich"),
        ({"experts": 2, "experts_per_token": 3}, r"experts_per_token=3 must be between 1 and experts=2"),
        ({"experts": 2, "experts_per_token": 1}, "expert_width=0 must be at least 1"),
        (
            {"rope_scaling": RopeScaling("longrope", 2.0, short_factors=(1.0,))},
            r"short_factors must have one entry per rotated pair \(2\), got 1",
        ),
        ({"query_heads": 3}, "query_heads=3 must be a multiple of kv_heads=2"),
        ({"head_dim": 5}, "head_dim=5 must be even"),
        (GROUPS | {"expert_groups": 2, "scoring_func": "softmax"}, "expert_groups=2 needs scoring_func='sigmoid'"),
        (GROUPS | {"expert_groups": 3}, "expert_groups=3 must divide experts=8"),
        (GROUPS | {"expert_groups": 8, "expert_groups_per_token": 4}, "groups of at least two experts"),
        (
            GROUPS | {"expert_groups": 4, "expert_groups_per_token": 5},
            "expert_groups_per_token=5 must be between 1 and",
        ),
        (GROUPS | {"expert_groups": 4}, "must have at least experts_per_token=3"),
        ({"windows": (3,)}, r"windows must have one entry per layer \(2\), got 1"),
    ],
)
def test_invalid_configurations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)
    with pytest.raises(ValueError, match="kind='xpos'.*linear, llama3, yarn, longrope, dynamic"):
        RopeScaling("xpos", 2.0)
