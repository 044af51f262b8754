"""A run on several devices, in one process or in several.

    python -m experiments.line_retrieval --mesh_data 2 --mesh_tensor 4
    python -m experiments.line_retrieval --mesh_data 2 --mesh_tensor 4 --coordinator HOST:PORT --processes 2 --process 0
    python -m experiments.line_retrieval --mesh_data 2 --mesh_tensor 4 --coordinator HOST:PORT --processes 2 --process 1

Every process runs the same command; the first alone writes and prints. On TPU slices `--coordinator auto` is enough:
JAX finds the others by itself.
"""

import zlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import kvjax

AUTO = "auto"
# Which differ from process to process.
_OWN = ("process", "output_dir")


def join(options: Any) -> None:
    """Joins the other processes, where `options.Run` names some. Before anything else is asked of JAX.

    Raises:
        ValueError: for processes that were started with other flags, with their names.
    """
    if options.coordinator is None or jax.distributed.is_initialized():
        return
    address = None if options.coordinator == AUTO else options.coordinator
    jax.distributed.initialize(address, options.processes, options.process)
    texts = {name: repr(value) for name, value in vars(options).items() if name not in _OWN}
    if differing := _differing(texts):
        raise ValueError(f"processes were started with different flags: {', '.join('--' + name for name in differing)}")


def mesh(options: Any, kv_heads: int) -> jax.sharding.Mesh | None:
    """The mesh that `options.Run` calls for; None for one device."""
    data, tensor, sequence = options.mesh_data, options.mesh_tensor, options.mesh_sequence
    return None if data * tensor == 1 else kvjax.make_mesh(kv_heads, data=data, tensor=tensor, sequence=sequence)


def is_first() -> bool:
    """Whether this process writes and prints. It takes no device to say so."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def agree(what: str, text: str) -> None:
    """Waits for the other processes.

    Raises:
        ValueError: where they do not hold the same text, with what that is.
    """
    if jax.distributed.is_initialized() and _differing({what: text}):
        raise ValueError(f"{what}: processes do not hold the same; do they share the directory?")


def _differing(texts: dict[str, str]) -> list[str]:
    """The names of texts that are not the same in all processes."""
    names = sorted(texts)
    sums = np.array([zlib.crc32(f"{name}={texts[name]}".encode()) for name in names], np.uint32)
    everywhere = np.asarray(multihost_utils.process_allgather(sums)).reshape(-1, len(names))
    return [name for name, differs in zip(names, (everywhere != sums).any(axis=0), strict=True) if differs]
