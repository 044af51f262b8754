"""Helpers that the tests of kvjax_models share."""

import contextlib
import math
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax_models.model.config import make_config
from kvjax_models.model.llama import Llama
from kvjax_models.profile import FRACTIONS, Profile

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "transformers"
NO_VALUES = np.zeros(0, np.float32)


def small_config(**changes):
    """Returns a configuration; names of `changes` are those of `make_config`, or of groups."""
    sizes = {"vocab_size": 32, "width": 16, "mlp_width": 16, "layers": 1, "query_heads": 2, "kv_heads": 1}
    return make_config(sizes | {"head_dim": 8, "max_length": 128} | changes)


def random_model(config, dtype=jnp.float32):
    """Returns a model whose parameters, including biases and norms, are random."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0))))
    random = np.random.default_rng(0)
    return nnx.merge(graph, jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape), leaf.dtype), state))


def make_profile(needs, scorer=NO_VALUES):
    """Returns a profile with the needs [layers, H_kv] for every budget."""
    needs = np.tile(np.asarray(needs, np.float32), (len(FRACTIONS), 1, 1))
    return Profile(needs, NO_VALUES, scorer, *(NO_VALUES,) * 3)


def key_data(leaf):
    """Random keys as integers, which numpy can compare."""
    return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def assert_equal_parameters(model, expected, *, rtol=0.0, atol=0.0):
    """Asserts that two models have the same parameters, with the same dtypes."""
    actual, expected = (dict(jax.tree_util.tree_leaves_with_path(one)) for one in (model, expected))
    assert actual.keys() == expected.keys()
    for path, array in expected.items():
        assert actual[path].dtype == array.dtype
        values = (np.asarray(x, np.float32) for x in (actual[path], array))
        np.testing.assert_allclose(*values, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


def assert_equal_states(state, other):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(key_data(a), key_data(b)), state, other)


@contextlib.contextmanager
def compile_counts(functions, expected):
    """Asserts how many programs of each jitted function the body compiles."""
    before = [function._cache_size() for function in functions]
    yield
    counts = [function._cache_size() - size for function, size in zip(functions, before, strict=True)]
    assert counts == expected, (counts, expected)


@contextlib.contextmanager
def count_compilations():
    """Gives a function that returns the number of programs that the body has compiled so far."""
    events = []

    def record(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        yield lambda: len(events)
    finally:
        jax.monitoring.unregister_event_duration_listener(record)


_ARRAY = re.compile(r"(?:pred|[sufb]\w*?)(\d*)\[([\d,]+)\]")
_INSTRUCTION = re.compile(r" = \(?(.*?)\)? ([a-z\-]+)\(")
_NOT_WRITTEN = {"parameter", "get-tuple-element", "bitcast", "while", "conditional", "call", "tuple"}


def written_arrays(program):
    """Returns opcode and bytes of every instruction of a compiled program that writes arrays."""
    written = []
    for result, opcode in _INSTRUCTION.findall(program.as_text()):
        arrays = _ARRAY.findall(result)
        sizes = [int(bits or 8) // 8 * math.prod(map(int, sides.split(","))) for bits, sides in arrays]
        if sizes and opcode not in _NOT_WRITTEN:
            written.append((opcode, sum(sizes)))
    return written


def start_python(code, *arguments, **options):
    """Starts a process that runs `code` with the imports of this checkout."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "models"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen(command, env=environment, **pipes)


def damage_bytes(data, rng):
    """Returns damaged bytes and the kind of damage; `rng` is a `random.Random`."""
    kind = rng.choice(["truncate", "empty", "noise", "flip", "repeat", "zeros", "ones", "bom"])
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.choice([1, 4, 8, 64]))
    damaged = {
        "truncate": data[:start],
        "empty": b"",
        "noise": rng.randbytes(100),
        "flip": data[:start] + bytes([data[start] ^ (1 << rng.randrange(8))]) + data[start + 1 :],
        "repeat": data[:end] + data[start:end] * rng.choice([1, 100]) + data[end:],
        "zeros": data[:start] + bytes(end - start) + data[end:],
        "ones": data[:start] + b"\xff" * (end - start) + data[end:],
        "bom": b"\xff\xfe" + data,
    }[kind]
    return damaged, kind


MAX_SECONDS = 20


@contextlib.contextmanager
def time_limit(seconds=MAX_SECONDS):
    """Fails if the body takes longer."""

    def fail(*_):
        raise AssertionError(f"took more than {seconds} seconds")

    handler = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


@contextlib.contextmanager
def memory_limit(megabytes):
    """Fails if the peak memory of the process grows by more."""
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    except OSError:
        yield
        return
    initial = _peak_memory()
    yield
    assert _peak_memory() - initial < megabytes * 2**10, f"uses more than {megabytes} MiB"


def _peak_memory():
    """Returns the largest resident size of this process, in KiB."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


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
