"""Settings for all tests: programs compile quickly, are compiled once, and are freed."""

import atexit
import gc
import importlib.metadata
import os
import pathlib
import shutil
import tempfile

from kvjax_models import user_cache

# Compilation dominates the time of a run. The flags must be set before JAX is imported; processes that tests start
# inherit them. XLA's older fusion emitters take half the time, and one module takes less than one per kernel. On a GPU
# machine they would also change how kernels are compiled.
if not pathlib.Path("/dev/nvidiactl").exists():
    os.environ["XLA_FLAGS"] = " ".join(
        [
            os.environ.get("XLA_FLAGS", ""),
            "--xla_backend_optimization_level=0",
            "--xla_llvm_disable_expensive_passes=true",
            "--xla_cpu_parallel_codegen_split_count=1",
            # Newer versions of XLA have only one kind of emitter and refuse this flag.
            *(
                ["--xla_cpu_use_fusion_emitters=false"]
                if importlib.metadata.version("jaxlib").startswith("0.10.")
                else []
            ),
        ]
    )
if "KVJAX_CACHE" not in os.environ:
    # Tests write no files to the user's home directory. Models that were downloaded there are linked.
    models = user_cache.user_cache_directory() / "models"
    cache = tempfile.mkdtemp(prefix="kvjax-tests-cache-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    os.environ["KVJAX_CACHE"] = cache
    (pathlib.Path(cache) / "models").mkdir()
    for model in models.glob("*.gguf"):
        (pathlib.Path(cache) / "models" / model.name).symlink_to(model.resolve())
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # The processes of one run share compiled programs.
    cache_dir = tempfile.mkdtemp(prefix="kvjax-tests-")
    atexit.register(shutil.rmtree, cache_dir, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache_dir
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import pytest

MAX_MEMORY_MAPS = 30_000
# Tracing creates many objects and few cycles; searching for them took an eighth of a run.
gc.set_threshold(200_000, 20, 100)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _free_programs_after_a_file():
    """Compiled programs of XLA:CPU hold memory maps. A run would need more than the 65,000 that a process may have,
    and end in a segmentation fault."""
    yield
    _free_programs()


@pytest.fixture(autouse=True)
def _free_programs_of_a_long_file():
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAX_MEMORY_MAPS:
        _free_programs()


def _free_programs():
    jax.clear_caches()
    gc.collect()  # some programs are in reference cycles
