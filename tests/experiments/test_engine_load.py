"""The load of an engine, with a tiny model."""

import pytest

from experiments.engine_load import Load, Options
from tests.models import tiny


@pytest.mark.heavy
def test_mixed_requests_are_compared_with_those_alone():
    load = Load(Options(requests=6, rows=3, seed=1), tiny.make_lively_llm())
    values = load.measure_requests()
    assert values["requests"] == 6 and values["differ"] == 0 and 0 < values["programs"] <= 12
    kept = load.measure_kept()
    assert kept["tokens"] == 40 and kept["bytes"] >= load.cache.rows(20, 20)[0].plan.specs[0].full_cache_bytes(40)


def test_steps_are_compared_after_programs_are_compiled():
    load = Load(Options(answer_tokens=4, repetitions=1), tiny.make_lively_llm())
    values = load.measure_batch()
    assert values["ratio"] > 0 and values["seconds"] > 0 and values["base_seconds"] > 0
