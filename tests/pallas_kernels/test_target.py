"""Tests that kernels depend on the device that a program is compiled for, and the configurations of all kernels."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import balanced_walk, cluster_recall, dispatch, hopper, k_means, select_blocks, soft_match
from pallas_kernels import weighted_decode as decode


def mesh_of(kind, cores, platform):
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=cores, platform=platform)
    return jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)


@pytest.mark.parametrize("kind, cores", [("TPU v5 lite", 1), ("TPU v5", 2), ("TPU v6 lite", 1), ("TPU v4", 2)])
def test_programs_use_the_cores_of_their_target(kind, cores):
    with jax.sharding.use_abstract_mesh(mesh_of(kind, cores, "tpu")):
        assert dispatch.tensor_cores() == cores
    assert dispatch.target() == jax.local_devices()[0]


HOPPER = ["NVIDIA H100 80GB HBM3", "NVIDIA H200 141GB HBM3e", "NVIDIA GH200 480GB", "NVIDIA H20"]


@pytest.mark.parametrize("kind", [*HOPPER, "NVIDIA B200", "NVIDIA A100-SXM4-80GB", "NVIDIA L4"])
def test_only_programs_for_hopper_use_its_kernels(kind, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())  # as if the compiler were installed
    with jax.sharding.use_abstract_mesh(mesh_of(kind, 148, "gpu")):
        assert hopper._multiprocessors() == 148
        if kind in HOPPER:
            hopper.check_device()
        else:
            with pytest.raises(NotImplementedError, match=kind):
                hopper.check_device()


def test_without_a_target_the_compiler_decides(monkeypatch):
    with pytest.raises(NotImplementedError, match="not installed"):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        hopper.check_device()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    if jax.default_backend() == "cpu":
        hopper.check_device()
        assert hopper._multiprocessors() == 132


@pytest.mark.parametrize(
    "config, name, value",
    [
        (balanced_walk.TpuConfig, "blocks_per_step", 0),
        (cluster_recall.TpuConfig, "cores", 0),
        (cluster_recall.TpuConfig, "step_blocks", 0),
        (cluster_recall.TpuConfig, "step_blocks", 12),
        (decode.TpuConfig, "block_slots", 100),
        (decode.TpuConfig, "splits", 0),
        (hopper.GpuConfig, "splits", 0),
        (hopper.GpuConfig, "stages", 0),
        (k_means.TpuConfig, "block_points", 100),
        (soft_match.TpuConfig, "block_keys", 0),
    ],
)
def test_invalid_configurations_raise(config, name, value):
    with pytest.raises(ValueError, match=f"{name}={value}; it must be"):
        config(**{name: value})


def test_unknown_implementations_raise():
    with pytest.raises(
        ValueError,
        match="implementation='cuda'; for soft_match it must be None, 'xla' or one of 'mosaic_tpu', 'mosaic_gpu'",
    ):
        soft_match.soft_match(jnp.zeros((64, 64)), 64, 16, implementation="cuda")


@pytest.mark.parametrize("op", [balanced_walk, cluster_recall, decode, k_means, select_blocks, soft_match])
def test_any_arguments_have_an_implementation_on_any_platform(op):
    *_, general, oracle = op.IMPLEMENTATIONS
    assert general.name.startswith("xla") and oracle.name == "oracle"
    assert (general.platforms, general.check, general.is_preferred) == ((), None, None)


def run_list(requested, accepts=True, prefers=True):
    def check(x, **options):
        if not accepts:
            raise NotImplementedError("x is a vector")

    implementations = (
        dispatch.Implementation("mosaic_tpu", lambda x, interpret: x + 1, ("tpu",), check, is_kernel=True),
        dispatch.Implementation("xla_fast", lambda x: x + 2, ("cpu",), is_preferred=lambda x: prefers),
        dispatch.Implementation("xla_any", lambda x: x + 3),
        dispatch.Implementation("oracle", lambda x: x + 4),
    )
    run = jax.jit(lambda x: dispatch.dispatch("add", implementations, requested, x))
    lowered = run.trace(jnp.zeros(2)).lower(lowering_platforms=("cpu",))
    return int(lowered.compile()(jnp.zeros(2))[0])


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="programs are compiled for a CPU")
def test_the_first_implementation_runs_that_applies():
    numbers = {None: 2, "xla": 2, "xla_fast": 2, "xla_any": 3, "oracle": 4, "mosaic_tpu": 1}
    assert {name: run_list(name) for name in numbers} == numbers
    numbers = {None: 3, "xla": 3, "xla_fast": 2}
    assert {name: run_list(name, prefers=False) for name in numbers} == numbers
    assert run_list(None, accepts=False) == 2
    with pytest.raises(NotImplementedError, match="'mosaic_tpu' of add does not support these arguments: x is a vect"):
        run_list("mosaic_tpu", accepts=False)
