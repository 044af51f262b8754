"""The decoder, its rotary embedding and its configuration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax_models.model.config import AttentionConfig, NormConfig, RopeConfig
from kvjax_models.model.llama import Llama
from kvjax_models.model.rotary import RopeScaling
from tests.models.support import small_config

TOKENS = jax.random.randint(jax.random.key(0), (2, 12), 0, 24)


def make_config(**changes):
    sizes = {"vocab_size": 24, "mlp_width": 20, "layers": 2, "query_heads": 4, "kv_heads": 2, "head_dim": 4}
    return small_config(**sizes | {"max_length": 64} | changes)


SMALL = make_config()


def build(**changes):
    return Llama(make_config(**changes), rngs=nnx.Rngs(0))


def test_logits_are_float32():
    model = Llama(SMALL, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    hidden = model.hidden_states(TOKENS)
    projected = model.layers[0].project(hidden, model.rotation(jnp.zeros((2, 12), jnp.int32)))
    assert model(TOKENS).dtype == jnp.float32
    assert {x.dtype for x in (hidden, *projected)} == {jnp.dtype(jnp.bfloat16)}


def test_norms_use_the_epsilon():
    assert jnp.abs(build(norms=NormConfig(epsilon=1e-2))(TOKENS) - build()(TOKENS)).max() > 1e-3


EXPERTS = {"experts.number": 4, "experts.per_token": 2, "experts.width": 8}
GROUPS = {"experts.number": 8, "experts.per_token": 3, "experts.width": 4, "experts.scoring_func": "sigmoid"}


@pytest.mark.parametrize("changes", [{}, {"tied_embeddings": True}, EXPERTS])
def test_every_parameter_has_a_gradient(changes):
    attention = AttentionConfig(qkv_bias=True, output_bias=True, query_key_norm=True)
    model = build(attention=attention, mlp_bias=True, **changes)
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
        config = make_config(head_dim=head_dim, rope=RopeConfig(theta=5e5, scaling=scaling))
        compiled = jax.jit(lambda config: jnp.asarray(config.rotary().frequencies), static_argnums=0)(config)
        np.testing.assert_array_equal(compiled, np.asarray(config.rotary().frequencies, np.float32))


def test_frequencies_depend_on_the_maximum_length():
    scaling = RopeScaling("longrope", 4.0, original_length=16, short_factors=(1.0, 1.0), long_factors=(2.0, 8.0))
    config = make_config(rope=RopeConfig(scaling=scaling))
    plain = np.asarray(SMALL.rotary().frequencies)
    np.testing.assert_allclose(config.rotary(0, 16).frequencies, plain)
    np.testing.assert_allclose(config.rotary(0, 17).frequencies, plain / [2, 8])
    assert config.rotary() == config.rotary(0, SMALL.max_length)
    dynamic = make_config(rope=RopeConfig(scaling=RopeScaling("dynamic", 2.0, original_length=16)))
    np.testing.assert_allclose(dynamic.rotary(0, 3).frequencies, plain)
    # For twice the length, the base grows by 3 ** (4 / (4 - 2)).
    np.testing.assert_allclose(dynamic.rotary(0, 32).frequencies, [1, (10000.0 * 9) ** -0.5], rtol=1e-6)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rope.rotary_dim": 3}, "rotary_dim=3 must be even"),
        ({"activation": "relu"}, "activation='relu' must be one of silu, gelu"),
        ({"norms.position": "none"}, "norms.position='none' must be one of pre, post, sandwich"),
        (EXPERTS | {"experts.per_token": 5}, "experts.per_token=5 must be between 1 and experts.number=4"),
        (EXPERTS | {"experts.width": 0}, "experts.width=0 must be at least 1"),
        (
            {"rope.scaling": RopeScaling("longrope", 2.0, short_factors=(1.0,))},
            r"short_factors must have one entry per rotated pair \(2\), got 1",
        ),
        ({"query_heads": 3}, "query_heads=3 must be a multiple of kv_heads=2"),
        ({"head_dim": 5}, "head_dim=5 must be even"),
        (
            GROUPS | {"experts.groups": 2, "experts.scoring_func": "softmax"},
            "experts.groups=2 needs scoring_func='sigmoid'",
        ),
        (GROUPS | {"experts.groups": 3}, "experts.groups=3 must divide experts.number=8"),
        (GROUPS | {"experts.groups": 8, "experts.groups_per_token": 4}, "groups of at least two experts"),
        (
            GROUPS | {"experts.groups": 4, "experts.groups_per_token": 5},
            "experts.groups_per_token=5 must be between 1 and",
        ),
        (GROUPS | {"experts.groups": 4}, "must have at least experts.per_token=3"),
        ({"attention.windows": (3,)}, r"windows must have one entry per layer \(2\), got 1"),
    ],
)
def test_invalid_configurations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_config(**changes)
    with pytest.raises(ValueError, match="kind='xpos'.*linear, llama3, yarn, longrope, dynamic"):
        RopeScaling("xpos", 2.0)
