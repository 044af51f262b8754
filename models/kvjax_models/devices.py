"""Options for runs on several devices and in several processes.

    kvjax generate ... --mesh_tensor 4
    kvjax generate ... --mesh_tensor 4 --coordinator HOST:PORT --processes 2 --process 0
    kvjax generate ... --mesh_tensor 4 --coordinator HOST:PORT --processes 2 --process 1

Every process runs the same command; only the first one writes files and prints. On TPU slices, `--coordinator auto`
is enough: JAX finds the other processes.
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
    """The devices and processes that a command runs on."""

    mesh_data: int = 1  # Groups of devices; each group processes some of the batch rows.
    mesh_tensor: int = 1  # Devices per group; they share the work of every layer.
    mesh_sequence: int | None = None  # Of these, the devices that share one KV head; by default as few as possible.
    coordinator: str | None = None  # HOST:PORT of the first process, or auto; for runs in several processes.
    processes: int | None = None  # Number of processes of the run.
    process: int | None = None  # Index of this process.

    @property
    def is_single(self) -> bool:
        """Whether the model runs on one device."""
        return self.mesh_data * self.mesh_tensor == 1


def initialize_processes(devices: Devices, options: Mapping[str, object]) -> None:
    """Connects the processes of a run; call this before any other use of JAX.

    Args:
        devices: the coordinator and the processes; does nothing without a coordinator.
        options: all options of the command that must be equal in all processes.

    Raises:
        ValueError: if another process was started with different options.
    """
    if devices.coordinator is None or jax.distributed.is_initialized():
        return
    address = None if devices.coordinator == AUTO else devices.coordinator
    jax.distributed.initialize(address, devices.processes, devices.process)
    if names := _differing_names({name: repr(value) for name, value in options.items()}):
        raise ValueError(
            f"processes were started with different values of {', '.join('--' + name for name in names)}; start all of "
            "them with the same flags"
        )


def make_mesh(devices: Devices, kv_heads: int) -> jax.sharding.Mesh | None:
    """Creates the mesh that the options request.

    Args:
        devices: sizes of the mesh axes.
        kv_heads: KV heads of the model, which determine how the devices of a layer share heads.

    Returns:
        The mesh; None for a single device.
    """
    if devices.is_single:
        return None
    return kvjax.make_mesh(kv_heads, data=devices.mesh_data, tensor=devices.mesh_tensor, sequence=devices.mesh_sequence)


def is_first_process() -> bool:
    """Returns whether this process writes files and prints; does not initialize a device."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def check_agreement(name: str, text: str) -> None:
    """Waits for the other processes and compares a text with theirs.

    Args:
        name: name of the text in the error message.

    Raises:
        ValueError: if the texts differ.
    """
    if jax.distributed.is_initialized() and _differing_names({name: text}):
        raise ValueError(f"{name} differs between processes; all processes must use the same directory")


def _differing_names(texts: Mapping[str, str]) -> list[str]:
    """Returns the names of texts that are not equal in all processes."""
    names = sorted(texts)
    sums = np.array([zlib.crc32(f"{name}={texts[name]}".encode()) for name in names], np.uint32)
    gathered = np.asarray(multihost_utils.process_allgather(sums)).reshape(-1, len(names))
    return [name for name, differs in zip(names, (gathered != sums).any(axis=0), strict=True) if differs]
