"""Kernels and decoding compile with the TPU compiler, without a TPU."""

import collections
import importlib.util
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from experiments.common import ROOT, schedules
from experiments.common.compiled import launches
from experiments.common.compilers import COMPILER
from tests.experiments.support import command, figures

# Kernels per layer: one for all plain entries, one for residual clusters with corrections, one that selects blocks and
# one that attends to them.
SYSTEMS = {"exact": 1, "clusterkv_residual": 3, "chelsea": 1, "subgen_mean": 1, "balancekv": 1}
GPU_COMPILER = pathlib.Path(sys.prefix) / "gpu-compiler"
# libtpu exists only for Linux on x86.
needs_compiler = pytest.mark.skipif(
    not COMPILER.exists() and importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


def compile_all(tmp_path, *arguments):
    """Returns the figures by program, after a check that no program has a problem."""
    devices = () if any(one.startswith("--device") for one in arguments) else ("--device=v5e",)
    done = command("experiments.compile", "--layers=2", *devices, *arguments, f"--output_dir={tmp_path}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return {row["program"]: row for row in figures(tmp_path / "compile.json")}


# Kernels by op.
OPS = {"weighted_decode": 29, "cluster_recall": 16, "select_blocks": 7, "k_means": 7}
OPS |= {"soft_match": 7, "balanced_walk": 4}


@needs_compiler
@pytest.mark.parametrize(
    "policies, ops",
    [
        pytest.param(("exact", "clusterkv_residual"), ("select_blocks",), id="two policies"),
        pytest.param(SYSTEMS, ("soft_match", "balanced_walk"), id="systems", marks=pytest.mark.heavy),
        pytest.param((), OPS, id="every policy and kernel", marks=pytest.mark.heavy),
    ],
)
def test_kernels_and_decoding_compile_for_a_tpu(policies, ops, tmp_path):
    flags = [*(f"--policy={name}" for name in policies), *(f"--op={name}" for name in ops)]
    rows = compile_all(tmp_path, "--head_dim=128", *flags)
    kernels = {name: row for name, row in rows.items() if "layers" not in name}
    assert all(row["kernels"] == 1 for row in kernels.values())
    assert collections.Counter(name.split()[0] for name in kernels) == {op: OPS[op] for op in ops}
    decoding_kernels = "weighted_decode", "select_blocks"
    assert all(row["value"] == 0 for name, row in kernels.items() if name.startswith(decoding_kernels))
    of_groups = {name.split()[0]: row for name, row in rows.items() if "two groups" in name}
    decoding = {name.split()[0]: row for name, row in rows.items() if name not in kernels and "two groups" not in name}
    assert decoding.pop("prefill")["kernels"] == 1
    for programs, groups in ((decoding, 1), (of_groups, 2)):
        for name in policies or SYSTEMS:
            assert programs[name]["kernels"] == 2 * groups * SYSTEMS[name], name
    assert all(row["kernels"] >= 2 for row in decoding.values())


@pytest.mark.heavy
@needs_compiler
def test_decoding_with_narrow_heads_compiles_without_a_copy(tmp_path):
    policies = (f"--policy={name}" for name in ("exact", "chelsea", "clusterkv_residual"))
    rows = compile_all(tmp_path, "--head_dim=64", "--op=weighted_decode", *policies)
    assert sum("D=64" in name for name in rows) == 7  # with prefill, and with two groups of rows


@pytest.mark.heavy
@needs_compiler
def test_a_copied_cache_is_detected(tmp_path):
    # With a number of slots that 8 does not divide, XLA chooses a layout that the kernel cannot read.
    script = """
from experiments import compile
from kvjax.shared import window
window.allocated_slots = lambda slots: slots
compile.run_command(compile.main, compile.Options)
"""
    arguments = ("--layers=2", "--device=v5e", "--policy=uniform", "--budget=4093 slots", "--op=weighted_decode")
    words = [sys.executable, "-c", script, *arguments, f"--output_dir={tmp_path}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "copies of a cache" in done.stdout + done.stderr


needs_gpu_compiler = pytest.mark.skipif(
    not GPU_COMPILER.exists() and importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="JAX's compiler for CUDA is not installed (make aot-gpu)",
)


@pytest.mark.heavy
@needs_gpu_compiler
def test_kernels_and_decoding_with_every_policy_compile_for_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(GPU_COMPILER))
    rows = compile_all(tmp_path, "--device=h200", "--head_dim=128")
    ops = collections.Counter(name.split()[0] for name in rows if "layers" not in name)
    # Without float32 heads of 256 dimensions, which do not fit in shared memory, and int3 heads of 64 dimensions.
    assert ops["weighted_decode"] == 27 and ops["cluster_recall"] == 18
    decoding = {name.split()[0]: row for name, row in rows.items() if "layers" in name}
    del decoding["prefill"]  # needs the cuDNN of a GPU
    assert set(decoding) >= set(SYSTEMS)
    assert all(row["kernels"] >= 2 for row in decoding.values())


@pytest.mark.heavy
@needs_gpu_compiler
def test_the_segments_of_a_layer_share_a_launch(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(GPU_COMPILER))
    policies = [f"--policy={name}" for name in ("exact", "uniform", "balancekv", "chelsea")]
    rows = compile_all(tmp_path, "--device=h200", "--shape=llama-3.1-8b", "--op=soft_match", "--batch=1", *policies)
    of_layers = {name: row for name, row in rows.items() if "layers" in name and "groups" not in name}
    decoding = {name.split()[0]: row for name, row in of_layers.items() if "prefill" not in name}
    assert len(decoding) == len(policies)
    assert all(row["kernels"] == 2 for row in decoding.values())  # of two layers
    assert all(row["launches_per_layer"] < 35 for row in decoding.values())


def test_launches_of_one_iteration_of_the_longest_loop_are_counted():
    def step(_, x):
        return jnp.sin(x @ x)

    def twice(number, x):
        return step(number, step(number, x)) + x[::-1]

    def loop(*bodies):
        return lambda x: [jax.lax.fori_loop(0, 3, body, x) for body in bodies]

    functions = jnp.sin, loop(step), loop(step, twice)
    none, fewer, more = (launches(jax.jit(f).lower(jnp.ones((64, 64))).compile().as_text()) for f in functions)
    assert none == 0 and 2 <= fewer < more


def test_loops_of_a_schedule_are_identified_by_depth():
    depths = ["", ">LB", ">", ">>LB", ">>", "", ">>", ">", ">>LB", ">", ""]  # a skipped block has no depth
    text = "\n".join(
        f"  {number:#x} {'LB' if 'LB' in depth else '  '}: {depth.strip('LB')} {{ nop }}"
        for number, depth in enumerate(depths)
    )
    assert schedules.parse_loops(text) == (len(depths), ">9 >>4 >>1")


@pytest.mark.heavy
@needs_compiler
def test_the_schedule_of_recall_allows_most_of_the_chip_s_bandwidth(tmp_path):
    rows = compile_all(tmp_path, "--head_dim=128", "--policy=uniform", "--op=cluster_recall", "--schedule=true")
    (schedule,) = rows["cluster_recall batch=8, selected=256"]["schedules"]
    step, *starting = (int(loop.strip(">")) for loop in schedule[2].split()[2:])
    # 64 blocks of 8 KiB, with eight copies per iteration, at 1.5 GHz and 819 GB/s (v5e).
    cycles = 8 * max(starting) + step - sum(starting)
    assert 64 * 8192 / cycles * 1.5e9 >= 0.6 * 819e9
