"""Every family generates through every policy, and what families have beside attention reaches the caches."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax_models.formats import huggingface
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.rows import extend_rows
from tests.kvjax.support import ON_A_MESH as POLICIES  # one of them with buckets for values of any norm
from tests.models import families
from tests.models.test_parity import GOLDEN

LENGTHS, NEW = (40, 25), 12


def generated(family, policy):
    """The model, new tokens, and the state behind them."""
    model = huggingface.load_model(GOLDEN / family, jnp.float32)
    with np.load(GOLDEN / family / "golden.npz") as arrays:
        prompts = [row[:length].tolist() for row, length in zip(arrays["tokens"], LENGTHS, strict=True)]
    generator = Generator(model, policy, batch=2, max_prompt_tokens=max(LENGTHS), max_new_tokens=NEW, prefill_chunk=16)
    state, rows = generator.prefill(generator.init_state(), prompts), [[], []]
    for newest, tokens in generator.decode(state, NEW):
        state = newest
        extend_rows(rows, tokens)
    return model, prompts, rows, state


def check_generates(family, policy):
    model, _, rows, state = generated(family, policy)
    assert [len(row) for row in rows] == [NEW] * 2
    assert {token for row in rows for token in row} <= set(range(families.VOCAB))
    kvjax.raise_faults(state)
    assert np.isfinite(state.logits).all()
    for number, cache in enumerate(state.layers):
        if (window := model.config.window(number)) is not None:  # exactly its window, whatever the policy
            assert type(cache.policy) is kvjax.SlidingWindow
            assert cache.state.recent == window


# What stands out of the line: caps, sinks, parts of heads that are not turned.
QUICK = [("gpt_oss", "subgen_mean_value"), ("gemma2", "clusterkv"), ("glm4", "expected_attention")]


@pytest.mark.parametrize("family, policy", QUICK)
def test_families_generate_through_policies(family, policy):
    check_generates(family, POLICIES[policy])


@pytest.mark.heavy
@pytest.mark.parametrize("number", range(len(families.GOLDEN)), ids=lambda number: families.GOLDEN[number].name)
def test_every_family_generates_through_an_eighth_of_the_policies(number):
    """Families next to each other through different ones."""
    for policy in list(POLICIES.values())[number % 8 :: 8]:
        check_generates(families.GOLDEN[number].name, policy)


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
def test_a_sample_of_everything_writes_what_exact_writes(family):
    """Caps and sinks mean the same in a store of another kind."""
    everything = kvjax.Uniform(64, recent=8, compact_every=8)
    model, prompts, rows, _ = generated(family, everything)
    text = [prompt + row for prompt, row in zip(prompts, rows, strict=True)]
    padded = np.array([row + [0] * (max(map(len, text)) - len(row)) for row in text])
    best = np.asarray(model(jnp.asarray(padded)).argmax(-1))
    for row, length, new in zip(best, LENGTHS, rows, strict=True):
        assert row[length - 1 : length + NEW - 1].tolist() == new
