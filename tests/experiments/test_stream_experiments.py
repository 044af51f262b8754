"""Small runs of the experiments on stream structures, with the results that they must show."""

import pytest

from experiments import discrepancy, stream_structures, subgen_rates
from tests.experiments.running import run, select


def test_the_walk_has_bounded_discrepancy_unlike_random_signs(tmp_path):
    rows = run(discrepancy, tmp_path, quick=False, seeds=12, longest=2048, queries=64, setting=("16,1,1",))
    assert (tmp_path / "discrepancy.png").stat().st_size > 3_000
    assert all(row["n"] == 12 and row["norm"] == 1 and row["c"] == 1 for row in rows)
    [walk] = select(rows, metric="discrepancy_slope", variant="softmax_balance")
    [coins] = select(rows, metric="discrepancy_slope", variant="fair coins")
    assert walk["ci95_high"] < 0.25
    assert coins["ci95_low"] < 0.5 < coins["ci95_high"]
    [share] = select(rows, metric="discrepancy_over_coins", context_tokens=2048)
    assert share["ci95_high"] < 0.5


@pytest.mark.heavy
def test_at_real_norms_the_walk_equals_random_signs(tmp_path):
    rows = run(discrepancy, tmp_path, setting=("128,15,theorem",))
    [share] = select(rows, metric="discrepancy_over_coins", context_tokens=1024)
    assert share["value"] == pytest.approx(1, abs=0.05)


@pytest.mark.heavy
def test_errors_of_subgen_decrease_with_the_root_of_samples(tmp_path):
    rows = run(subgen_rates, tmp_path, quick=False, seeds=8, tokens=4096)
    slopes = select(rows, metric="relative_error_slope")
    assert {(row["stream"], row["knob"]) for row in slopes} == {
        (stream, knob) for stream in ("tight", "drift", "low_rank") for knob in "st"
    }
    for row in slopes:
        assert row["value"] == pytest.approx(-0.5, abs=0.05), row
        assert row["ci95_high"] - row["ci95_low"] < 0.2, row


@pytest.mark.heavy
def test_structures_have_the_documented_bytes_and_no_faults(tmp_path, capsys):
    rows = run(stream_structures, tmp_path)
    printed = capsys.readouterr().out
    assert {row["variant"] for row in select(rows, metric="update_seconds")} == {
        "reservoir", "table", "tree"
    }  # fmt: skip
    errors = select(rows, metric="relative_error")
    assert {(row["variant"], row["context_tokens"]) for row in errors} == {
        (name, size) for name in ("reservoir", "table", "tree") for size in (2**12, 2**16)
    }
    for row in errors:
        assert row["device_bytes"] == row["bytes_promised"]
        assert not row["not_a_number"]
        assert row["value"] < 0.5
    assert printed.count("as promised") == 3
