"""Tests that the benchmarks run at small shapes on this machine."""

import dataclasses
import importlib
import json
import pkgutil
import sys

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import benchmarking
from tests.kvjax.support import each

OPS = [one.name for one in pkgutil.iter_modules(pallas_kernels.__path__) if one.ispkg]


@pytest.mark.parametrize("op", each(OPS, quick=("weighted_decode",)))
def test_every_op_has_a_benchmark_that_runs(op, tmp_path, monkeypatch, capsys):
    module = importlib.import_module(f"pallas_kernels.{op}.benchmark")
    monkeypatch.setattr(benchmarking, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(benchmarking, "PRODUCT_WIDTH", 64)
    monkeypatch.setattr(sys, "argv", ["benchmark", "--quick", f"--output={tmp_path / 'rows.json'}"])
    benchmarking.main(op, module.QUICK, module.PRODUCTION)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {"kvjax", "xla"} <= {row["form"] for row in rows}
    for row in rows:
        assert row["bytes"] > 0 and row["limit"] > 0
        if row["form"] in ("kvjax", "xla"):
            assert row["seconds"] > 0, row["problem"]
            assert row["share_of_limit"] == pytest.approx(row["limit"] / row["seconds"])
    shown = capsys.readouterr().out
    assert all(row["case"] in shown for row in rows)


def test_a_program_makes_all_calls():
    calls = []

    def counted(x):
        # The compiler takes it for pure and could hoist the call.
        return jax.pure_callback(lambda x: calls.append(1) or x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    benchmarking._program_seconds(benchmarking.Form(counted, (jnp.ones(4),)), calls=7, measurements=2)
    assert len(calls) == 7 * 3  # once to compile


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
    assert ours["seconds"] is not None and ours["best_other"] is None
    assert other["seconds"] is None and other["problem"] == "no such unit"
    assert other["best_other"] == ours["seconds"]
