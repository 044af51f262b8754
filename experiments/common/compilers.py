"""Compilers for devices that are not here."""

import os
import pathlib
import sys

import jax

from experiments.common import schedules

# Where the Makefile puts the compiler: apart from what Python imports, or JAX would look for TPUs in every process.
COMPILER = pathlib.Path(sys.prefix) / "tpu-compiler" / "libtpu" / "libtpu.so"


def prepare_compiler(dump: pathlib.Path | None = None) -> None:
    """Makes JAX find libtpu, which must not look for a TPU, nor refuse a second process that uses it. CUDA's compiler
    must do without a GPU.

    Args:
        dump: where libtpu, which must not have been loaded yet, writes kernels' schedules (see `schedules`).
    """
    if dump is not None:
        os.environ["LIBTPU_INIT_ARGS"] = " ".join([os.environ.get("LIBTPU_INIT_ARGS", ""), schedules.DUMP.format(dump)])
    os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1", JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1")
    if COMPILER.exists():
        os.environ["TPU_LIBRARY_PATH"] = str(COMPILER)
    jax.config.update("jax_platforms", "cpu")
