"""Models, meshes and processes of the tests on eight simulated devices."""

import contextlib
import functools
import json
import os
import socket
import tempfile

import jax
import numpy as np
import pytest
from flax import nnx
from jax.experimental import multihost_utils

import kvjax
from kvjax_models.model.config import AttentionConfig, LlamaConfig, RecurrenceConfig
from kvjax_models.model.gated_delta import GatedDeltaSizes
from kvjax_models.model.llama import Llama
from kvjax_models.model.short_convolution import ShortConvolutionSizes
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.state import state_shardings
from kvjax_models.sharding import shard_model
from tests.kvjax import support
from tests.models import tiny
from tests.models.loops import decode_all
from tests.models.support import start_python

DEVICES = 8
needs_devices = pytest.mark.skipif(jax.device_count() < DEVICES, reason="needs eight devices")
starts_processes = pytest.mark.skipif(jax.device_count() >= DEVICES, reason="starts processes")


def heavy(*values):
    return pytest.param(*values, marks=pytest.mark.heavy)


CONFIG = LlamaConfig(
    vocab_size=40, width=32, mlp_width=48, layers=2, query_heads=8, kv_heads=4, head_dim=8, max_length=128
)
DELTA = GatedDeltaSizes(key_heads=4, value_heads=8, key_dim=8, value_dim=6, kernel_size=3)
HYBRID = {
    "vocab_size": 98,
    "layers": 3,
    "recurrence": RecurrenceConfig((0, 2), DELTA),
    "attention": AttentionConfig(gate=True),
}
CONVOLUTION = ShortConvolutionSizes(channels=CONFIG.width, kernel_size=3, use_bias=True)
RECURRENT = {"hybrid": HYBRID, "convolution": HYBRID | {"recurrence": RecurrenceConfig((0, 2), CONVOLUTION)}}
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]]
SIZES = {"batch": 4, "max_prompt_tokens": 12, "max_new_tokens": 24}
POLICIES = {
    "exact": kvjax.Exact(compact_every=4),
    "chelsea": kvjax.Chelsea(10, sinks=2, recent=4, chunk=4, compact_every=4),
    "snapkv": kvjax.SnapKV(10, window_size=4, compact_every=4),
    "by_head": kvjax.ByHead((kvjax.Exact(compact_every=4), kvjax.Uniform(10, sinks=2, recent=4, compact_every=4)) * 2),
}


@functools.cache
def make_model(kind="dense"):
    if kind == "dense":
        # With these parameters no two merges are equally good up to rounding, where devices may decide differently.
        return Llama(CONFIG, rngs=nnx.Rngs(1))
    return tiny.make_lively_llm(**vars(CONFIG) | RECURRENT[kind]).model


def make_mesh(kv_heads=CONFIG.kv_heads, **axes):
    return kvjax.make_mesh(kv_heads, **axes)


def on_mesh(mesh, model=None):
    """Returns a model on a mesh, or on one device for None."""
    model = make_model() if model is None else model
    return model if mesh is None else shard_model(model, mesh)


def generate_turns(model, policy="exact", *, streaming=False):
    """Returns the tokens of two turns and the last state."""
    generator = Generator(model, POLICIES[policy], **SIZES, streaming=streaming)
    state, rows = generator.init_state(3), [[] for _ in PROMPTS]
    for prompts in (PROMPTS, [[2, 4], [8], [1, 1, 1], [7]]):
        tokens, state = decode_all(generator, generator.prefill(state, prompts), 6)
        rows = [row + more for row, more in zip(rows, tokens, strict=True)]
    return rows, state


def generate(generator, prompts, count):
    """Returns generated tokens and the last logits, in every process."""
    rows, state = decode_all(generator, generator.prefill(generator.init_state(3), prompts), count)
    return rows, np.asarray(multihost_utils.process_allgather(state.logits, tiled=True))


def assert_sharded(state, mesh):
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(state_shardings(state, mesh)), strict=True):
        assert not leaf.size or leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


# The first lines of two processes with four of the devices each.
INITIALIZE = """
import json, os, signal, sys
import jax

jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
"""


def run_two_processes(script, *arguments, expected_code=0):
    """Returns the last line that each of two processes prints, parsed as JSON."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        **support.THREADS,
    }
    with contextlib.ExitStack() as files, pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        # Files, because a process whose pipe nobody reads yet would block.
        out, err = ([files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in range(2))
        processes = [
            start_python(INITIALIZE + script, port, index, *arguments, stdout=out[index], stderr=err[index])
            for index in range(2)
        ]
        codes = [process.wait(timeout=1800) for process in processes]
        for file in (*out, *err):
            file.seek(0)
        assert codes == [expected_code] * 2, err[0].read()[-3000:]
        return [json.loads(file.read().splitlines()[-1]) for file in out] if expected_code == 0 else []
