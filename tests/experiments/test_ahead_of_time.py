"""The real TPU compiler takes the kernels and decoding, without a TPU."""

import importlib.util
import json

import pytest

from tests.experiments.test_commands import run

# libtpu is made for Linux on x86 alone.
needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


@needs_compiler
def test_kernels_and_decoding_compile_for_a_tpu(tmp_path):
    done = run(
        "experiments.ahead_of_time", "--quick", "--policy=exact", "--policy=uniform", "--policy=chelsea",
        f"--output_dir={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = {row["policy"]: row for row in json.loads((tmp_path / "ahead_of_time.json").read_text())}
    kernels = {name: row for name, row in rows.items() if name.startswith("weighted_decode")}
    assert len(kernels) == 20
    assert all(row["kernels"] == 1 and row["value"] == 0 for row in kernels.values())
    decoding = {name: row for name, row in rows.items() if name not in kernels}
    assert len(decoding) == 3
    # Window and staging, in both layers.
    assert all(row["kernels"] == 4 and row["problem"] is None for row in decoding.values())


@needs_compiler
def test_a_copied_cache_is_found(tmp_path):
    # A number of slots that is no multiple of 8 makes XLA lay the store out as no kernel reads it.
    done = run(
        "experiments.ahead_of_time", "--quick", "--policy=uniform", "--budget=4093", f"--output_dir={tmp_path}",
    )  # fmt: skip
    assert done.returncode != 0
    assert "copies of a cache" in done.stdout + done.stderr
