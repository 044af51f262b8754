"""What all tests have in common: programs compile quickly, are compiled once, and do not pile up."""

import atexit
import gc
import importlib.metadata
import os
import pathlib
import shutil
import tempfile

# Compiling takes most of the time of a run. Set before JAX is imported, and for every process that a test starts. XLA's
# older emitters of fusions take half of the newer ones' time, one module of code less than one per kernel.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
        # Newer XLA has one kind of emitters, and would not start with this flag.
        *(["--xla_cpu_use_fusion_emitters=false"] if importlib.metadata.version("jaxlib").startswith("0.10.") else []),
    ]
)
if "KVJAX_CACHE" not in os.environ:
    # Nothing is written to the home directory of whoever runs the tests.
    cache = tempfile.mkdtemp(prefix="kvjax-tests-cache-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    os.environ["KVJAX_CACHE"] = cache
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # All processes of a run share what they compiled; the next run begins anew.
    compiled = tempfile.mkdtemp(prefix="kvjax-tests-")
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import pytest

MOST_MAPS = 30_000
# Tracing makes many objects and few cycles: looking for these took an eighth of a run.
gc.set_threshold(200_000, 20, 100)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _drop_programs_of_a_file():
    """Every program that XLA:CPU compiled holds memory maps, and a process may have some 65,000 of them: a whole run
    would pass that, and end in a segmentation fault."""
    yield
    _drop_programs()


@pytest.fixture(autouse=True)
def _drop_programs_of_a_long_file():
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        _drop_programs()


def _drop_programs():
    jax.clear_caches()
    gc.collect()  # some are held by cycles
