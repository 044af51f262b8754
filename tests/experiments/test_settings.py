"""The command line's spelling of policies, budgets and models."""

import dataclasses

import jax
import pytest

import kvjax
from experiments.common import settings

SPEC = kvjax.CacheSpec(batch=1, query_heads=4, kv_heads=2, head_dim=16, max_prompt=2000, max_new=48, layers=4)


def test_policy_options_become_python_values():
    choice = settings.PolicyChoice.parse("clustergen:variant=paper,sinks=4,recent=32")
    assert choice.options == (("variant", "paper"), ("sinks", 4), ("recent", 32))
    assert str(choice) == "clustergen:variant=paper,sinks=4,recent=32"
    assert settings.PolicyChoice.parse("streaming_llm:reindex=true").options == (("reindex", True),)
    assert choice.build(budget=64).name == "clustergen(paper)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "nothing.*known: .*clustergen"),
        ("uniform:sinks", "option 'sinks' must read name=value"),
    ],
)
def test_unknown_policies_and_malformed_options_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        settings.PolicyChoice.parse(text)


def test_unknown_option_is_named():
    with pytest.raises(ValueError, match="uniform:sinkz=4.*sinkz"):
        settings.PolicyChoice.parse("uniform:sinkz=4").build(budget=100)


def test_budgets():
    assert settings.Budget.parse("1024").slots == 1024
    assert settings.Budget.parse("12.5%").fraction == 0.125
    assert settings.Budget.parse("1.5MiB").bytes == 3 * 2**19
    for text in ("", "-3", "25 %", "64MB", "half"):
        with pytest.raises(ValueError, match="give slots"):
            settings.Budget.parse(text)


def test_share_of_exact_is_met_from_below():
    setting = settings.Setting(settings.PolicyChoice.parse("streaming_llm"), settings.Budget.parse("25%"))
    limit = SPEC.exact_bytes(2048) // 4
    held = kvjax.row_bytes(setting.build(SPEC, 2048), SPEC)
    per_slot = SPEC.exact_bytes(1)
    assert limit - per_slot < held <= limit


def test_bytes_are_those_of_all_layers():
    setting = settings.Setting(settings.PolicyChoice.parse("uniform"), settings.Budget.parse("512KiB"))
    # Budgets come in whole tiles of 16 slots.
    assert 2**19 - 4 * 16 * 300 < 4 * kvjax.row_bytes(setting.build(SPEC, 2048), SPEC) <= 2**19


def test_policies_without_a_budget_come_once():
    chosen = settings.settings(["exact", "uniform"], ["50%", "25%"])
    assert [str(one) for one in chosen] == ["exact", "uniform @ 50%", "uniform @ 25%"]


def test_unknown_model_lists_the_shipped_ones():
    with pytest.raises(ValueError, match="nowhere.*line-retrieval"):
        settings.model_directory("nowhere")


def test_every_policy_may_be_stored_in_eight_bits_with_full_layers():
    setting = settings.Setting(
        settings.PolicyChoice.parse("uniform:storage=int8,full_layers=1"), settings.Budget.parse("50%")
    )
    policy = setting.build(SPEC, 2048)
    limit = SPEC.exact_bytes(2048) // 2
    sizes = [kvjax.row_bytes(policy, dataclasses.replace(SPEC, layer=layer)) for layer in range(4)]
    assert limit - SPEC.exact_bytes(2) < sum(sizes) / 4 <= limit
    plain = kvjax.row_bytes(kvjax.exact(), SPEC)
    assert sizes[0] < plain / 3  # the full layer is stored in eight bits, too
    assert sizes[1] == sizes[2] == sizes[3]
    with pytest.raises(ValueError, match="storage='int4'"):
        settings.PolicyChoice.parse("uniform:storage=int4").build(budget=100)


def test_policies_that_recall_may_do_so_from_host_memory():
    policy = settings.PolicyChoice.parse("quest:host_steps=2,full_layers=1").build(budget=64)
    small = dataclasses.replace(SPEC, batch=1, max_prompt=256, max_new=16)
    rows = jax.random.split(jax.random.key(0), 1)
    first, later = (kvjax.cache_bytes(policy.init(dataclasses.replace(small, layer=n), rows)) for n in range(2))
    assert first.host == 0
    assert later.host > small.exact_bytes(256)
    with pytest.raises(ValueError, match="host_memory: uniform"):
        settings.PolicyChoice.parse("uniform:host_steps=1").build(budget=100)
