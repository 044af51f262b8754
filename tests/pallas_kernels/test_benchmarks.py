"""Tests that the benchmarks run at small shapes on this machine."""

import dataclasses
import importlib
import json
import pkgutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import benchmark_all, benchmarking
from pallas_kernels.partials import MASK_VALUE, Partials
from tests.kvjax.support import each

OPS = [one.name for one in pkgutil.iter_modules(pallas_kernels.__path__) if one.ispkg]


@pytest.fixture(autouse=True)
def _measure_briefly(monkeypatch):
    for name, value in (("MIN_SECONDS", 1e-9), ("BANDWIDTH_BYTES", 2**20), ("PRODUCT_WIDTH", 512), ("MEASUREMENTS", 2)):
        monkeypatch.setattr(benchmarking, name, value)


@pytest.mark.parametrize("op", each(OPS, quick=("weighted_decode",)))
def test_every_op_has_a_benchmark_that_runs(op, tmp_path, monkeypatch, capsys):
    module, output = importlib.import_module(f"pallas_kernels.{op}.benchmark"), tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["benchmark", "--quick", f"--output={output}"])
    benchmarking.main(op, module.QUICK, module.PRODUCTION)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert {"kvjax", "xla"} <= {row["form"] for row in rows}
    for row in rows:
        assert row["op"] == op and row["bytes"] > 0 and row["limit"] > 0
        if row["form"] in ("kvjax", "xla"):
            assert row["seconds"] > 0, row["problem"]
            assert row["share_of_limit"] == pytest.approx(row["limit"] / row["seconds"])
            assert op == "select_blocks" or row["error"] < 0.02  # blocks are selected by one form only
    shown = capsys.readouterr().out
    assert all(row["case"] in shown for row in rows)
    # Another start measures only the forms without a row.
    output.write_text("".join(json.dumps(row) + "\n" for row in rows if row["form"] != "xla"))
    benchmarking.main(op, module.QUICK[:1], module.PRODUCTION)
    again = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["form"] for row in again[len(rows) - len(module.QUICK) :]] == ["xla"]


def test_the_measured_shapes_exceed_the_cache_of_a_gpu():
    modules = {op: importlib.import_module(f"pallas_kernels.{op}.benchmark") for op in benchmark_all.OPS}
    for op, module in modules.items():
        assert all(shape.bytes > 120e6 for shape in module.MEASURED), op
    assert set(OPS) - modules.keys() == {"select_blocks"}  # it reads little, and is for TPUs only


def test_a_program_makes_all_calls():
    calls = []

    def counted(x):
        # The compiler takes it for pure and could hoist the call.
        return jax.pure_callback(lambda x: calls.append(1) or x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    program = benchmarking.compile_calls(benchmarking.Form(counted, (jnp.ones(4),)), calls=7)
    benchmarking.median_seconds(lambda: program(jnp.ones(4)))
    assert len(calls) == 7 * 3  # one call warms up


def test_errors_are_relative_to_the_oracle():
    expected = Partials(jnp.array([1.0, MASK_VALUE]), jnp.array([[2.0], [0.0]]), jnp.array([4.0, 0.0]))
    shifted = Partials(jnp.array([0.0, MASK_VALUE]), jnp.e * expected.numerator, jnp.e * expected.denominator)
    assert benchmarking.relative_error(shifted, expected) < 1e-6
    wrong = expected._replace(numerator=1.5 * expected.numerator)
    assert benchmarking.relative_error(wrong, expected) == pytest.approx(0.5)
    assert benchmarking.relative_error(jnp.array([1, 2, 3, 4]), jnp.array([1, 2, 3, 5])) == 0.25
    not_numbers = {"sums": jnp.array([jnp.nan]), "labels": jnp.array([1])}
    assert np.isnan(benchmarking.relative_error(not_numbers, {**not_numbers, "sums": jnp.ones(1)}))


def test_a_form_that_cannot_run_is_reported():
    def fails(x):
        raise NotImplementedError("no such unit")

    @dataclasses.dataclass(frozen=True)
    class Sum(benchmarking.Shape):
        bytes = 32

        def arguments(self, array):
            return (jnp.ones(8),)

        def function(self, **options):
            return fails if options else jnp.sum

    ours, other = benchmarking.measure(Sum())
    assert ours["seconds"] is not None and ours["error"] is None  # the oracle cannot run either
    assert other["seconds"] is None and other["problem"] == "NotImplementedError: no such unit"
