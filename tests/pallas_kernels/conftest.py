"""Selects the tests that run kernels for GPUs."""

import jax
import pytest

from tests.pallas_kernels import helpers

GPU_FORMS = {"device", "gpu", "mosaic_gpu"}
if helpers.ON_GPU:
    # XLA, which runs what a kernel does not support, would multiply float32 numbers in TF32.
    jax.config.update("jax_default_matmul_precision", "highest")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects tests by their marks
def pytest_collection_modifyitems(items):
    for item in items:
        if hasattr(item, "callspec") and item.callspec.params.get("form") in GPU_FORMS:
            item.add_marker("gpu_kernel")
        if item.get_closest_marker("gpu_kernel") and not helpers.RUNS_GPU_KERNELS:
            item.add_marker(pytest.mark.skip(reason="the GPU interpreter needs JAX 0.11"))
        if item.get_closest_marker("gpu_interpreter") and (helpers.ON_GPU or not helpers.RUNS_GPU_KERNELS):
            item.add_marker(pytest.mark.skip(reason="counts copies of the GPU interpreter, which needs JAX 0.11"))
