"""Compilers for devices that this machine does not have."""

import os
import pathlib
import sys

import jax

from experiments.common import schedules

# The Makefile installs libtpu outside Python's path, because JAX would otherwise look for TPUs in every process.
COMPILER = pathlib.Path(sys.prefix) / "tpu-compiler" / "libtpu" / "libtpu.so"


def prepare_compiler(dump: pathlib.Path | None = None) -> None:
    """Configures JAX to compile with libtpu without a TPU, in several processes, and with CUDA without a GPU.

    Args:
        dump: directory for the schedules of kernels (`schedules`); libtpu must not be loaded yet.
    """
    if dump is not None:
        os.environ["LIBTPU_INIT_ARGS"] = " ".join([os.environ.get("LIBTPU_INIT_ARGS", ""), schedules.DUMP.format(dump)])
    os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1", JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1")
    if COMPILER.exists():
        os.environ["TPU_LIBRARY_PATH"] = str(COMPILER)
    jax.config.update("jax_platforms", "cpu")
