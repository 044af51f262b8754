"""Chooses the implementation of an op: a Pallas kernel of the platform that a program is compiled for, or XLA.

A kernel refuses arguments that it does not support by raising NotImplementedError from its `check`. XLA runs instead.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import jax

T = TypeVar("T")

Implementation = Literal["xla", "mosaic_tpu", "mosaic_gpu"]

# The kernel that programs for a platform may run.
PLATFORMS = {"tpu": "mosaic_tpu", "cuda": "mosaic_gpu"}


class Kernel(NamedTuple):
    """A Pallas kernel of an op.

    Attributes:
        compute: Computes the op from its arguments and the options.
        check: Takes the same arguments and options; raises NotImplementedError if the kernel does not support them.
        options: Static keyword arguments, such as `interpret` and `config`.
    """

    compute: Callable[..., Any]
    check: Callable[..., None]
    options: Mapping[str, Any] = {}


class PreferXla(NotImplementedError):
    """Raised by a kernel where XLA is at least as fast; it is not logged."""


def dispatch(op: str, implementation: str | None, reference: Callable[..., T], *arguments: Any, **kernels: Kernel) -> T:
    """Runs an op by the requested implementation, or by the best one for the platform.

    Raises the errors of `supported_kernels`.

    Args:
        op: The name of the op, for the log.
        implementation: "xla", the name of a kernel, or None to choose by the platform that the program is compiled for.
        reference: Computes the op in XLA.
        *arguments: The op's arguments, pytrees of arrays.
        **kernels: The op's kernels by name, see `PLATFORMS`.

    Returns:
        The result of the op.
    """
    supported = supported_kernels(op, implementation, kernels, *arguments)
    return run(implementation, reference, {name: kernels[name] for name in supported}, *arguments)


def supported_kernels(
    op: str, implementation: str | None, kernels: Mapping[str, Kernel], *arguments: Any
) -> tuple[str, ...]:
    """Returns the names of the kernels that may run an op.

    If no implementation is requested, logs once why the kernel for this process's platform is not among them. Raises
    NotImplementedError if a requested kernel does not support the arguments.

    Args:
        op: The name of the op, for the log.
        implementation: "xla", the name of a kernel, or None.
        kernels: The op's kernels by name.
        *arguments: The op's arguments.

    Returns:
        The names of the kernels that support the arguments, or the name of the requested kernel.

    Raises:
        ValueError: If the implementation is unknown.
    """
    if implementation is None:
        return tuple(name for name, kernel in kernels.items() if _supports(op, name, kernel, *arguments))
    if implementation == "xla":
        return ()
    if implementation not in kernels:
        known = ", ".join(map(repr, ("xla", *kernels)))
        raise ValueError(f"implementation={implementation!r}; it must be None or one of {known}")
    kernels[implementation].check(*arguments, **kernels[implementation].options)
    return (implementation,)


def run(implementation: str | None, reference: Callable[..., T], kernels: Mapping[str, Kernel], *arguments: Any) -> T:
    """Runs the requested implementation, or the one for the platform that the program is compiled for.

    Args:
        implementation: "xla", the name of a kernel, or None.
        reference: Computes the op in XLA.
        kernels: The kernels that support the arguments, by name.
        *arguments: The op's arguments, pytrees of arrays.

    Returns:
        The result of the op.
    """
    bound = {name: functools.partial(kernel.compute, **kernel.options) for name, kernel in kernels.items()}
    if implementation is not None:
        return bound.get(implementation, reference)(*arguments)
    by_platform = {platform: bound[name] for platform, name in PLATFORMS.items() if name in bound}
    if not by_platform:
        return reference(*arguments)
    return jax.lax.platform_dependent(*arguments, default=reference, **by_platform)


def _supports(op: str, name: str, kernel: Kernel, *arguments: Any) -> bool:
    try:
        kernel.check(*arguments, **kernel.options)
    except NotImplementedError as reason:
        if PLATFORMS.get(_default_platform()) == name and not isinstance(reason, PreferXla):
            _log_once(f"{op}: XLA instead of {name}: {reason}")
        return False
    return True


def _default_platform() -> str:
    return {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())


_log_once = functools.cache(logging.getLogger(__name__).warning)


def target() -> Any:
    """Returns the device that programs are compiled for.

    Returns:
        The abstract device of the mesh in use (`jax.sharding.use_abstract_mesh`) if it has one, otherwise the first
        local device. Both have `platform` and `device_kind`.
    """
    return jax.sharding.get_abstract_mesh().abstract_device or jax.local_devices()[0]


def tensor_cores() -> int:
    """Returns how many cores share a program on the target: two on TPU v4 and v5p, one otherwise."""
    return 2 if target().device_kind in ("TPU v4", "TPU v5", "TPU v5p") else 1
