"""Every family generates with every policy, and the features of its attention apply to the caches."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import registry
from kvjax_models.formats import huggingface
from kvjax_models.model.config import ExpertConfig
from kvjax_models.runner.generator import Generator
from tests.kvjax.support import ON_A_MESH as POLICIES
from tests.kvjax.support import each
from tests.models import families, tiny
from tests.models.loops import decode_all
from tests.models.support import GOLDEN

LENGTHS, NEW = (40, 25), 12


def generate(family, policy):
    model = huggingface.load_model(GOLDEN / family, jnp.float32)
    with np.load(GOLDEN / family / "golden.npz") as arrays:
        prompts = [row[:length].tolist() for row, length in zip(arrays["tokens"], LENGTHS, strict=True)]
    generator = Generator(model, policy, batch=2, max_prompt_tokens=max(LENGTHS), max_new_tokens=NEW, prefill_chunk=16)
    return model, prompts, *decode_all(generator, generator.prefill(generator.init_state(), prompts), NEW)


NAMES = [family.name for family in families.GOLDEN]
# Every family with an eighth of the policies.
PAIRS = [(family, policy) for number, family in enumerate(NAMES) for policy in list(POLICIES)[number % 8 :: 8]]
QUICK = [("qwen3_next", "subgen_mean"), ("gemma2", "clusterkv"), ("glm4", "expected_attention")]


@pytest.mark.parametrize("family, policy", each(dict.fromkeys(PAIRS + QUICK), QUICK))
def test_families_generate_with_policies(family, policy):
    model, _, rows, state = generate(family, POLICIES[policy])
    assert [len(row) for row in rows] == [NEW] * 2
    assert {token for row in rows for token in row} <= set(range(families.VOCAB))
    assert np.isfinite(state.logits).all()
    for number, cache in enumerate(state.layers):
        if (window := model.config.window(number)) is not None:
            assert type(cache.policy) is kvjax.SlidingWindow and cache.state.recent == window


EXPERTS = ExpertConfig(4, 2, 16, scoring_func="sigmoid", dense_layers=(0,), shared_width=16)


@pytest.mark.heavy
@pytest.mark.parametrize("policy", registry.POLICIES)
def test_every_policy_compresses_a_document_of_a_model_with_experts(policy, tmp_path, monkeypatch):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))  # of the profile that KVzap makes
    text = "".join(f"Line {number}: the code is {7315 + 11 * number}.\n" for number in range(40))
    llm = tiny.make_lively_llm(experts=EXPERTS)
    document = llm.cache(policy, None if policy == "exact" else "50%").read(text)
    assert len(document.generate(" and", max_new_tokens=4)) == 4


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
def test_uniform_sampling_of_all_tokens_equals_full_attention(family):
    """Caps and sinks have the same effect in another kind of store."""
    model, prompts, rows, _ = generate(family, kvjax.Uniform(64, recent=8, compact_every=8))
    texts = [prompt + row for prompt, row in zip(prompts, rows, strict=True)]
    padded = np.array([row + [0] * (max(map(len, texts)) - len(row)) for row in texts])
    best = np.asarray(model(jnp.asarray(padded)).argmax(-1))
    for row, length, new in zip(best, LENGTHS, rows, strict=True):
        assert row[length - 1 : length + NEW - 1].tolist() == new
