"""Which form of an op a program runs: the kernel of the platform it is compiled for where there is one, XLA otherwise.

A kernel says what it cannot do by a NotImplementedError; nothing else makes an op fall through to XLA.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax

T = TypeVar("T")

# Which kernels programs for a platform may run.
PLATFORMS = {"tpu": "mosaic_tpu", "cuda": "mosaic_gpu"}


class Kernel(NamedTuple):
    """A faster way to say what an op's reference says."""

    run: Callable[..., Any]
    check: Callable[..., None]  # of the same arguments; raises a NotImplementedError, with the reason, if it cannot run


def dispatch(
    implementation: str | None, reference: Callable[..., T], kernels: Mapping[str, Kernel], *arguments: Any
) -> T:
    """Runs an op in the form that was asked for, or in the best one for the platform the program is compiled for.

    Args:
        implementation: "xla", the name of a kernel, or None.
        kernels: by name, see `PLATFORMS`.
        arguments: pytrees of arrays.

    Raises:
        ValueError: for an implementation that is not known.
        NotImplementedError: where the kernel that was asked for cannot do this, with the reason.
    """
    if implementation == "xla":
        return reference(*arguments)
    if implementation is not None:
        if implementation not in kernels:
            known = ", ".join(map(repr, ("xla", *kernels)))
            raise ValueError(f"implementation={implementation!r}; it must be None or one of {known}")
        kernels[implementation].check(*arguments)
        return kernels[implementation].run(*arguments)
    able = {platform: kernels[name].run for platform, name in PLATFORMS.items() if _can(kernels.get(name), arguments)}
    if not able:
        return reference(*arguments)
    return jax.lax.platform_dependent(*arguments, default=reference, **able)


def _can(kernel: Kernel | None, arguments: tuple[Any, ...]) -> bool:
    if kernel is None:
        return False
    try:
        kernel.check(*arguments)
    except NotImplementedError:
        return False
    return True


def tensor_cores() -> int:
    """How many cores share a program on this process's TPUs: two on v4 and v5p, one on others. Programs that are
    compiled ahead of time, where there is no TPU, are cut for one."""
    return 2 if jax.devices()[0].device_kind in ("TPU v4", "TPU v5", "TPU v5p") else 1
