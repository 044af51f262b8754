"""Helpers that the tests of kvjax_models share."""

import contextlib
import os
import pathlib
import resource
import signal
import subprocess
import sys
import textwrap

import jax

from kvjax_models.model.config import LlamaConfig

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "transformers"


def small_config(**changes):
    sizes = {"vocab_size": 32, "width": 16, "mlp_width": 16, "layers": 1, "query_heads": 2, "kv_heads": 1}
    return LlamaConfig(**sizes | {"head_dim": 8, "max_length": 128} | changes)


def key_data(leaf):
    """Random keys as integers, which numpy can compare."""
    return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


@contextlib.contextmanager
def compile_counts(functions, expected):
    """Asserts how many programs of each jitted function the body compiles."""
    before = [function._cache_size() for function in functions]
    yield
    counts = [function._cache_size() - size for function, size in zip(functions, before, strict=True)]
    assert counts == expected, (counts, expected)


def start_python(code, *arguments, **options):
    """Starts a process that runs `code` with the imports of this checkout."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "models"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen(command, env=environment, **pipes)


@contextlib.contextmanager
def limit_file_size(max_bytes):
    """Makes writes of this process fail beyond a file size, as on a full disk."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
