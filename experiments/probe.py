"""Reports the device, its versions and limits, and whether the compilers of kernels work.

python -m experiments.probe --results rows.jsonl
"""

import dataclasses
import importlib.metadata
import os
import pathlib
import shutil
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import kvjax
from experiments.common.flags import Flags, run_command
from experiments.common.output import append_row
from pallas_kernels import benchmarking
from pallas_kernels.weighted_decode import benchmark as decode_benchmark


@dataclasses.dataclass(frozen=True)
class Options(Flags):
    """Options of the command."""

    results: str | None = None  # File of JSON lines, to which a row per property is appended.


def versions() -> dict[str, Any]:
    """Returns versions of software, and the memory of the device."""
    device = jax.devices()[0]
    found: dict[str, Any] = {"kvjax": kvjax.__version__, "device_kind": device.device_kind}
    found["memory_bytes"] = (device.memory_stats() or {}).get("bytes_limit")
    for name in ("jax", "jaxlib", "flax", "torch", "transformers", "jax-cuda13-plugin", "jax-cuda12-plugin"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if shutil.which("nvidia-smi"):
        query = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem",
            "--format=csv,noheader",
        ]
        found["nvidia_smi"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return found


def compilers() -> dict[str, Any]:
    """Returns where the assembler of GPU programs is, and the variables that affect compilation."""
    names = ("CUDA_ROOT", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    return {"ptxas": shutil.which("ptxas"), **{name: os.environ.get(name) for name in names}}


def bandwidth() -> dict[str, Any]:
    """Measures the memory bandwidth."""
    return {"memory_bandwidth_gb_s": benchmarking.memory_bandwidth() / 1e9}


def products() -> dict[str, Any]:
    """Measures the rate of bfloat16 products."""
    return {"bfloat16_tflops": benchmarking.product_rate(jnp.dtype(jnp.bfloat16)) / 1e12}


def kernel() -> dict[str, Any]:
    """Runs the decode kernel of this device and compares it with XLA."""
    shape = decode_benchmark.Shape(2, 1024, weighted=True)
    rows = {row["form"]: row for row in benchmarking.measure(shape)}
    return {"case": str(shape), **{name: rows["kvjax"][name] for name in ("error", "seconds", "problem")}}


def fused_attention() -> dict[str, Any]:
    """Runs causal attention of cuDNN, which exact prefill uses on a GPU, and measures its rate."""
    if jax.default_backend() != "gpu":
        return {"problem": "no GPU"}
    tokens, heads, kv_heads, head_dim = 16384, 32, 8, 128
    query = jax.random.normal(jax.random.key(0), (1, tokens, heads, head_dim), jnp.bfloat16)
    keys = jax.random.normal(jax.random.key(1), (1, tokens, kv_heads, head_dim), jnp.bfloat16)
    attend = jax.jit(lambda q, k: jax.nn.dot_product_attention(q, k, k, is_causal=True, implementation="cudnn"))
    seconds = benchmarking.median_seconds(lambda: attend(query, keys))
    return {"ms": 1e3 * seconds, "tflops": 2 * tokens**2 * heads * head_dim / seconds / 1e12}


PROPERTIES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "versions": versions,
    "compilers": compilers,
    "kernel": kernel,
    "fused attention": fused_attention,
    "bandwidth": bandwidth,
    "products": products,
}


def main(options: Options) -> None:
    """Prints and writes a row per property."""
    for name, measure in PROPERTIES.items():
        row: dict[str, Any] = {"measure": "probe", "property": name}
        try:
            row |= measure()
        except Exception as error:  # the other properties are reported
            row["problem"] = benchmarking.describe(error)
        print(row, flush=True)
        if options.results is not None:
            append_row(pathlib.Path(options.results), row)


if __name__ == "__main__":
    run_command(main, Options)
