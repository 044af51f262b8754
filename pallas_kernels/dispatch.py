"""Which form of an op a program runs: the kernel of the platform it is compiled for where there is one, XLA otherwise.

A kernel says what it cannot do by a NotImplementedError; nothing else makes an op fall through to XLA.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

T = TypeVar("T")

# Which kernels programs for a platform may run.
PLATFORMS = {"tpu": "mosaic_tpu", "cuda": "mosaic_gpu"}


class Kernel(NamedTuple):
    """A faster way to say what an op's reference says."""

    run: Callable[..., Any]
    check: Callable[..., None]  # of the same arguments; raises a NotImplementedError, with the reason, if it cannot run


class Unsuited(NotImplementedError):
    """A kernel could do it, and XLA does it as well or better: no reason to say so."""


def dispatch(
    op: str, implementation: str | None, reference: Callable[..., T], kernels: Mapping[str, Kernel], *arguments: Any
) -> T:
    """Runs an op in the form that was asked for, or in the best one for the platform the program is compiled for.

    Args:
        op: its name, for who is told that a kernel cannot do it.
        implementation: "xla", the name of a kernel, or None.
        kernels: by name, see `PLATFORMS`.
        arguments: pytrees of arrays.

    Raises:
        ValueError: for an implementation that is not known.
        NotImplementedError: where the kernel that was asked for cannot do this, with the reason.
    """
    each = lambda run: lambda *parts: [run(*part) for part in parts]  # noqa: E731
    of_parts = {name: Kernel(each(kernel.run), kernel.check) for name, kernel in kernels.items()}
    return dispatch_parts(op, implementation, each(reference), of_parts, arguments)[0]


def dispatch_parts(
    op: str,
    implementation: str | None,
    reference: Callable[..., list[T]],
    kernels: Mapping[str, Kernel],
    *parts: tuple[Any, ...],
) -> list[T]:
    """As `dispatch`, for several arguments at a time: forms give a list, checks take one. Where no implementation is
    asked for, XLA does what a kernel cannot, and says so, once, where the kernel is for this process's own device."""
    if implementation == "xla":
        return reference(*parts)
    if implementation is not None:
        if implementation not in kernels:
            known = ", ".join(map(repr, ("xla", *kernels)))
            raise ValueError(f"implementation={implementation!r}; it must be None or one of {known}")
        for part in parts:
            kernels[implementation].check(*part)
        return kernels[implementation].run(*parts)
    able = {}
    for platform, name in PLATFORMS.items():
        if name in kernels:
            reasons = [_why_not(kernels[name], part) for part in parts]
            if not all(reasons):
                able[platform] = functools.partial(_share, kernels[name].run, reference, reasons)
            if platform == _own_platform():
                for reason in reasons:
                    _say(op, name, reason)
    if not able:
        return reference(*parts)
    return jax.lax.platform_dependent(*parts, default=reference, **able)


def _why_not(kernel: Kernel, part: tuple[Any, ...]) -> NotImplementedError | None:
    try:
        kernel.check(*part)
    except NotImplementedError as reason:
        return reason
    return None


def _share(
    run: Callable[..., list[T]],
    reference: Callable[..., list[T]],
    reasons: Sequence[NotImplementedError | None],
    *parts: Any,
) -> list[T]:
    """The kernel runs the parts that it can, XLA the others."""
    taken = [part for part, reason in zip(parts, reasons, strict=True) if reason is None]
    left = [part for part, reason in zip(parts, reasons, strict=True) if reason is not None]
    of_kernel, of_xla = iter(run(*taken)), iter(reference(*left))
    return [next(of_kernel if reason is None else of_xla) for reason in reasons]


def _own_platform() -> str:
    return {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())


def _say(op: str, kernel: str, reason: NotImplementedError | None) -> None:
    if reason is not None and not isinstance(reason, Unsuited):
        _say_once(f"{op}: XLA in place of {kernel}: {reason}")


_say_once = functools.cache(logging.getLogger(__name__).warning)


def target() -> Any:
    """The device that programs are compiled for: that of the mesh in use (`jax.sharding.use_abstract_mesh`), where it
    names one, and otherwise this process's own. Of either, `platform` and `device_kind`."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.local_devices()[0]


def tensor_cores() -> int:
    """How many cores share a program on the target: two on TPUs v4 and v5p, one on others."""
    return 2 if target().device_kind in ("TPU v4", "TPU v5", "TPU v5p") else 1
