"""The command line's spelling of policies, budgets and models."""

import dataclasses

import jax
import pytest

import kvjax
from experiments.common import settings
from kvjax.budget import row_bytes

SPEC = kvjax.CacheSpec(
    batch=1, query_heads=4, kv_heads=2, head_dim=16, max_prompt_tokens=2000, max_new_tokens=48, layers=4
)


def test_policy_flags_become_policies():
    [setting] = settings.settings(["clustergen:sinks=4,recent=32"], ["64"])
    assert settings.label(setting) == "clustergen:sinks=4,recent=32 @ 64"
    assert setting.fit(SPEC, 2048) == kvjax.ClusterGen(64, sinks=4, recent=32)
    [setting] = settings.settings(["streaming_llm:reindex=true"], ["64"])
    assert setting.fit(SPEC, 2048) == kvjax.StreamingLLM(64, reindex=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "nothing.*clustergen"),
        ("uniform:sinkz=4", "uniform:sinkz=4.*sinkz"),
        ("uniform:recent=many", "recent="),
        ("uniform:host_steps=1", "HostMemory needs a retrieval policy.*got Uniform"),
        ("uniform:sinks", "'sinks' must have the form setting=value"),
    ],
)
def test_invalid_values_are_refused_by_name(text, message):
    with pytest.raises(ValueError, match=message):
        settings.settings([text], ["25%"])


def test_budgets():
    resolve_policy = lambda text: settings.settings(["uniform"], [text])[0].budget  # noqa: E731
    assert resolve_policy("1024").slots == 1024
    assert resolve_policy("12.5%").fraction == 0.125
    assert resolve_policy("1.5MiB").bytes == 3 * 2**19
    for text in ("", "-3", "25 %", "64MB", "half"):
        with pytest.raises(ValueError, match="pass slots"):
            resolve_policy(text)


def test_share_of_exact_is_met_from_below():
    [setting] = settings.settings(["streaming_llm"], ["25%"])
    limit = SPEC.full_cache_bytes(2048) // 4
    held = row_bytes(setting.fit(SPEC, 2048), SPEC)
    per_slot = SPEC.full_cache_bytes(1)
    assert limit - per_slot < held <= limit


def test_byte_budgets_apply_to_all_layers():
    [setting] = settings.settings(["uniform"], ["512KiB"])
    # Budgets are multiples of 16 slots.
    assert 2**19 - 4 * 16 * 300 < 4 * row_bytes(setting.fit(SPEC, 2048), SPEC) <= 2**19


def test_policies_of_a_fixed_size_occur_once():
    chosen = settings.settings(["exact", "uniform", "subgen@128"], ["50%", "25%"])
    assert [settings.label(one) for one in chosen] == ["exact", "uniform @ 50%", "uniform @ 25%", "subgen @ 128"]


def test_descriptions_include_defaults():
    spelt, short, other = settings.settings(["uniform:sinks=4", "uniform", "uniform:sinks=8"], ["25%"])
    assert settings.description(spelt) == settings.description(short) != settings.description(other)
    assert settings.description(short)["policy"]["sinks"] == 4
    few, many = (settings.description(one) for one in settings.settings(["uniform"], ["100", "200"]))
    assert (few["policy"]["budget"], many["policy"]["budget"]) == (100, 200)
    [exact] = settings.settings(["exact"], ["25%"])
    assert settings.description(exact) == {"policy": {"class": "Exact", "compact_every": 64}, "budget": None}


def test_windows_of_layers_do_not_count():
    [setting] = settings.settings(["uniform"], ["25%"])
    windowed = dataclasses.replace(SPEC, window=32)
    assert settings.fitted(setting, windowed, 2048) == settings.fitted(setting, SPEC, 2048)
    policies, refused = settings.possible([setting], windowed, 2048)
    assert list(policies) == [setting] and not refused


def test_invalid_settings_have_a_reason():
    chosen = settings.settings(["exact", "uniform", "snapkv"], ["0.1%"]) + settings.settings(["snapkv"], ["50%"])
    policies, refused = settings.possible(chosen, SPEC, 2048, streaming=True)
    assert list(policies) == chosen[:1]
    assert refused[chosen[3]] == "compresses whole prompts only"
    assert "too small" in refused[chosen[1]] or "budget" in refused[chosen[1]]


def test_unknown_model_lists_the_shipped_ones():
    with pytest.raises(ValueError, match="nowhere.*line-retrieval"):
        settings.model_directory("nowhere")


def test_quantized_policies_may_have_full_layers():
    [setting] = settings.settings(["uniform:recent=8,full_layers=1"], ["50%"])
    quantized = dataclasses.replace(SPEC, kv_dtype="int8")
    policy = setting.fit(quantized, 2048)
    limit = SPEC.full_cache_bytes(2048) // 2
    sizes = [row_bytes(policy, dataclasses.replace(quantized, layer=layer)) for layer in range(4)]
    assert limit - SPEC.full_cache_bytes(8) < sum(sizes) / 4 <= limit
    plain = row_bytes(kvjax.Exact(), SPEC)
    assert sizes[0] < plain / 3  # the full layer is stored in eight bits, too
    assert sizes[1] == sizes[2] == sizes[3]


def test_retrieval_policies_may_use_host_memory():
    [setting] = settings.settings(["quest:host_steps=2,full_layers=1"], ["64"])
    policy = setting.fit(SPEC, 2048)
    small = dataclasses.replace(SPEC, batch=1, max_prompt_tokens=256, max_new_tokens=16)
    rows = jax.random.split(jax.random.key(0), 1)
    first, later = (kvjax.cache_bytes(kvjax.init(policy, dataclasses.replace(small, layer=n), rows)) for n in range(2))
    assert first.host == 0
    assert later.host > small.full_cache_bytes(256)
