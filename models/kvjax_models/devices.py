"""A run on several devices, in one process or in several: the options of commands, and what comes of them.

    kvjax generate ... --mesh_data 2 --mesh_tensor 4
    kvjax generate ... --mesh_data 2 --mesh_tensor 4 --coordinator HOST:PORT --processes 2 --process 0
    kvjax generate ... --mesh_data 2 --mesh_tensor 4 --coordinator HOST:PORT --processes 2 --process 1

Every process runs the same command; the first alone writes and prints. On TPU slices `--coordinator auto` is enough:
JAX finds the others by itself.
"""

import dataclasses
import zlib
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

import kvjax

AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class Devices:
    """Where a command runs."""

    mesh_data: int = 1  # Groups of devices that share the rows of a batch.
    mesh_tensor: int = 1  # Devices that share a layer.
    mesh_sequence: int | None = None  # Those of them that share each head; by default as few as there are heads for.
    coordinator: str | None = None  # HOST:PORT of the first process, or auto; for runs in several processes.
    processes: int | None = None  # Processes of the run.
    process: int | None = None  # Number of this one.


def initialize_processes(devices: Devices, options: Mapping[str, object]) -> None:
    """Joins the other processes, where there are some. Before anything else is asked of JAX.

    Args:
        options: all that the command was given and that must be the same in all processes.

    Raises:
        ValueError: for processes that were started with other options, with their names.
    """
    if devices.coordinator is None or jax.distributed.is_initialized():
        return
    address = None if devices.coordinator == AUTO else devices.coordinator
    jax.distributed.initialize(address, devices.processes, devices.process)
    if differing := _differing({name: repr(value) for name, value in options.items()}):
        raise ValueError(f"processes were started with different flags: {', '.join('--' + name for name in differing)}")


def make_mesh(devices: Devices, kv_heads: int) -> jax.sharding.Mesh | None:
    """The mesh that the options call for; None for one device."""
    data, tensor = devices.mesh_data, devices.mesh_tensor
    if data * tensor == 1:
        return None
    return kvjax.make_mesh(kv_heads, data=data, tensor=tensor, sequence=devices.mesh_sequence)


def is_first_process() -> bool:
    """Whether this process writes and prints. It takes no device to say so."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def check_agreement(what: str, text: str) -> None:
    """Waits for the other processes.

    Raises:
        ValueError: where they do not hold the same text, with what that is.
    """
    if jax.distributed.is_initialized() and _differing({what: text}):
        raise ValueError(f"{what}: processes do not hold the same; do they share the directory?")


def _differing(texts: Mapping[str, str]) -> list[str]:
    """The names of texts that are not the same in all processes."""
    names = sorted(texts)
    sums = np.array([zlib.crc32(f"{name}={texts[name]}".encode()) for name in names], np.uint32)
    everywhere = np.asarray(multihost_utils.process_allgather(sums)).reshape(-1, len(names))
    return [name for name, differs in zip(names, (everywhere != sums).any(axis=0), strict=True) if differs]
