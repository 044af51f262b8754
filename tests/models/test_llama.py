"""The decoder, its rotary embedding and its configuration."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax_models.formats.config_json import parse_config
from kvjax_models.model.config import LlamaConfig, rope_frequencies
from kvjax_models.model.llama import Llama
from kvjax_models.model.rotary import RopeScaling

SMALL = LlamaConfig(
    vocab_size=24, width=16, mlp_width=20, layers=2, query_heads=4, kv_heads=2, head_dim=4, max_length=64
)
TOKENS = jax.random.randint(jax.random.key(0), (2, 12), 0, 24)


def build(**changes):
    return Llama(dataclasses.replace(SMALL, **changes), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_shapes_and_dtypes(dtype):
    model = Llama(SMALL, dtype=dtype, rngs=nnx.Rngs(0))
    hidden, logits = model.hidden_states(TOKENS), model(TOKENS)
    assert (hidden.shape, hidden.dtype) == ((2, 12, 16), dtype)
    assert (logits.shape, logits.dtype) == ((2, 12, 24), jnp.float32)
    query, key, value = model.layers[0].project(hidden, *model.rotation(jnp.zeros((2, 12), jnp.int32)))
    assert query.shape == (2, 12, 4, 4) and key.shape == value.shape == (2, 12, 2, 4)
    assert query.dtype == key.dtype == value.dtype == dtype


def test_logits_of_single_positions_equal_those_of_all():
    model = build()
    np.testing.assert_allclose(model.logits(model.hidden_states(TOKENS)[:, -1]), model(TOKENS)[:, -1], atol=1e-6)


def test_attention_is_causal():
    model = build()
    changed = TOKENS.at[:, 7].set((TOKENS[:, 7] + 1) % 24)
    before, after = model(TOKENS), model(changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert (jnp.abs(before - after)[:, 7:].max(axis=(0, 2)) > 1e-4).all()


def test_window_includes_the_token_itself():
    """With a window of 3, token 7 attends to tokens 5 to 7."""
    model = build(layers=1, windows=(3,))
    for changed_token, is_visible in ((4, False), (5, True)):
        changed = TOKENS.at[:, changed_token].set((TOKENS[:, changed_token] + 1) % 24)
        difference = jnp.abs(model(TOKENS) - model(changed))[:, 7].max()
        assert (difference > 1e-5) == is_visible


def test_project_and_finish_with_explicit_attention():
    model = build(query_key_norm=True, qkv_bias=True)
    x = model.embed(TOKENS)
    cos, sin = model.rotation(jnp.broadcast_to(jnp.arange(12), (2, 12)))
    for layer in model.layers:
        query, key, value = layer.project(x, cos, sin)
        key, value = jnp.repeat(key, 2, axis=2), jnp.repeat(value, 2, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / 2.0
        weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((12, 12), bool)), scores, -jnp.inf))
        x = layer.finish(x, jnp.einsum("bhqk,bkhd->bqhd", weights, value))
    np.testing.assert_allclose(x, model.hidden_states(TOKENS), atol=1e-5)


def test_scores_depend_on_relative_positions():
    model = build()
    x = model.embed(TOKENS)
    scores = []
    for start in (0, 100):
        positions = jnp.broadcast_to(jnp.arange(start, start + 12), (2, 12))
        query, key, _ = model.layers[0].project(x, *model.rotation(positions))
        scores.append(jnp.einsum("bqgd,bkgd->bgqk", query[:, :, ::2], key))
    np.testing.assert_allclose(*scores, atol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"tied_embeddings": True}])
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


def test_rope_frequencies():
    config = dataclasses.replace(SMALL, head_dim=8, rope_theta=10000.0)
    plain = np.array([1, 0.1, 0.01, 0.001])
    np.testing.assert_allclose(rope_frequencies(config), plain, rtol=1e-6)
    linear = dataclasses.replace(config, rope_scaling=RopeScaling("linear", 4.0))
    np.testing.assert_allclose(rope_frequencies(linear), plain / 4, rtol=1e-6)
    # Rotations within 200 tokens: 31.8, 3.18, .318, .0318. Over 4 are unchanged, under 1 divided, others interpolated.
    scaled = dataclasses.replace(config, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 200))
    keep = (200 * 0.1 / (2 * np.pi) - 1) / 3
    expected = [1, 0.1 * (keep + (1 - keep) / 8), 0.01 / 8, 0.001 / 8]
    np.testing.assert_allclose(rope_frequencies(scaled), expected, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("scaling", [None, RopeScaling("llama3", 8.0)])
def test_rope_frequencies_are_equal_when_compiled(head_dim, scaling):
    """One bit of a frequency changes the angle at position 131,072 by .008 radians."""
    config = dataclasses.replace(SMALL, head_dim=head_dim, rope_theta=5e5, rope_scaling=scaling)
    np.testing.assert_array_equal(jax.jit(lambda: rope_frequencies(config))(), rope_frequencies(config))


@pytest.mark.parametrize("theta, factor", [(5e5, 8.0), (5e5, 32.0)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rope_angles_equal_transformers_at_long_context(head_dim, theta, factor):
    """Llama 3.1 and 3.2 at their full length; logits of small models test only the first positions."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    theirs = transformers.LlamaConfig(head_dim=head_dim, max_position_embeddings=131072, rope_parameters=rope)
    expected = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")[0].numpy()
    config = dataclasses.replace(SMALL, head_dim=head_dim, rope_theta=theta, rope_scaling=RopeScaling("llama3", factor))
    difference = np.asarray(rope_frequencies(config), np.float64) - expected
    assert np.abs(difference).max() * 131072 < 1e-3


SCALINGS = {
    "yarn": {"factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 30.0},
    "yarn-not-truncated": {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    "yarn-attention": {"factor": 4.0, "original_max_position_embeddings": 32768, "mscale": 0.707,
                       "mscale_all_dim": 1.0},
    "linear": {"factor": 8.0},
    "dynamic": {"factor": 4.0},
    "longrope": {"original_max_position_embeddings": 4096, "short_factor": list(np.linspace(1, 1.4, 32)),
                 "long_factor": list(np.linspace(1, 60, 32))},
}  # fmt: skip


@pytest.mark.parametrize("tokens", [1000, 131072])
@pytest.mark.parametrize("name", SCALINGS)
def test_rope_angles_equal_transformers_for_every_scaling(name, tokens):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind, longest = name.partition("-")[0], 65536
    rope = {"rope_type": kind, "rope_theta": 10000.0, **SCALINGS[name]}
    sizes = {"vocab_size": 24, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 1,
             "num_attention_heads": 4, "max_position_embeddings": longest}  # fmt: skip
    theirs = transformers.LlamaConfig(**sizes, rope_parameters=dict(rope))
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu", seq_len=tokens)
    rotary = parse_config({"model_type": "llama", **sizes, "rope_scaling": rope}).rotary(0, tokens)
    np.testing.assert_allclose(rotary.frequencies, frequencies.numpy(), rtol=2e-7)  # one unit in the last place
    assert rotary.factor == pytest.approx(factor)


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
        ({"windows": (3,)}, r"windows must have one entry per layer \(2\), got 1"),
    ],
)
def test_invalid_configurations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


def test_unknown_rope_scaling_is_refused():
    with pytest.raises(ValueError, match="kind='xpos'.*linear, llama3, yarn, longrope, dynamic"):
        RopeScaling("xpos", 2.0)
