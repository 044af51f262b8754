"""Chooses the implementation of an op from an ordered list, for the platform that a program is compiled for.

Each op has a tuple `IMPLEMENTATIONS`, in order of preference: Pallas kernels, then forms in XLA, of which the last one
takes any arguments on any platform, then the oracle, which runs by name only. On a platform, the first implementation
runs that names the platform, is preferred for the arguments, and whose `check` accepts them.
`jax.lax.platform_dependent` selects it, so that a program may be compiled for another platform than the process's.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax


class Implementation(NamedTuple):
    """One way to compute an op.

    Attributes:
        name: Such as "mosaic_tpu"; names of forms in XLA begin with "xla".
        compute: Computes the op from its arguments and `options`.
        platforms: The platforms that it is preferred on, such as "tpu", "cuda" or "cpu"; empty for all.
        check: Takes what `compute` takes; raises NotImplementedError with the reason if the arguments are not
            supported. None if all arguments are.
        config: The class of its configuration, whose defaults apply unless the caller passes an instance.
        is_preferred: Takes the arguments, and returns whether this implementation is faster than the next ones for
            them. None if it always is. It does not matter if the implementation is requested.
        is_kernel: Whether `compute` and `check` take `interpret`, as Pallas kernels do.
    """

    name: str
    compute: Callable[..., Any]
    platforms: tuple[str, ...] = ()
    check: Callable[..., None] | None = None
    config: type | None = None
    is_preferred: Callable[..., bool] | None = None
    is_kernel: bool = False

    def options(self, config: Any, interpret: Any, static: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keyword arguments of `compute` and `check`.

        Args:
            config: A configuration of any implementation, or None.
            interpret: Passed to Pallas kernels.
        """
        options = dict(static)
        if self.is_kernel:
            options["interpret"] = interpret
        if self.config is not None:
            options["config"] = config if isinstance(config, self.config) else self.config()
        return options


def check_config(config: Any, **multiples: int) -> None:
    """Checks settings of a configuration; None passes.

    Args:
        config: A dataclass.
        **multiples: The number of which each setting must be a positive multiple.

    Raises:
        ValueError: If a setting is not; names the setting.
    """
    for name, multiple in multiples.items():
        value = getattr(config, name)
        if value is not None and (value < multiple or value % multiple):
            allowed = f"a multiple of {multiple}" if multiple > 1 else "at least 1"
            raise ValueError(f"{name}={value}; it must be {allowed}")


class PreferXla(NotImplementedError):
    """Raised by a kernel's check where XLA is at least as fast; it is not logged."""


def dispatch(
    op: str,
    implementations: Sequence[Implementation],
    requested: str | None,
    *arguments: Any,
    config: Any = None,
    interpret: Any = False,
    **static: Any,
) -> Any:
    """Runs the first applicable implementation of an op.

    Raises the errors of `applicable`.

    Args:
        op: The name of the op, for messages.
        implementations: The op's implementations, in order of preference.
        *arguments: The op's arguments, pytrees of arrays.
        config: The configuration of the implementation that it belongs to; None for defaults.
        interpret: Passed to Pallas kernels.

    Returns:
        The result of the op.
    """
    options = {"config": config, "interpret": interpret, "static": static}
    return select(applicable(op, implementations, requested, *arguments, **options), **options)(*arguments)


def applicable(
    op: str,
    implementations: Sequence[Implementation],
    requested: str | None,
    *arguments: Any,
    config: Any,
    interpret: Any,
    static: Mapping[str, Any],
) -> tuple[Implementation, ...]:
    """Returns the implementations that accept the arguments, in order.

    Logs once why an implementation for this process's platform is not among them.

    Args:
        op: The name of the op, for messages.
        implementations: The op's implementations, in order of preference.
        requested: The name of an implementation, which then runs on any platform; "xla" for all forms in XLA; or None
            for all implementations.

    Returns:
        At least one implementation.

    Raises:
        ValueError: If the requested implementation is unknown.
        NotImplementedError: If the requested implementation does not support the arguments.
    """
    chosen = [
        one
        for one in implementations
        if requested in (None, one.name) or (requested == "xla" and one.name.startswith("xla"))
    ]
    if not chosen:
        known = ", ".join(repr(one.name) for one in implementations)
        raise ValueError(f"implementation={requested!r}; for {op} it must be None, 'xla' or one of {known}")
    accepted = []
    for one in chosen:
        if len(chosen) > 1 and one.is_preferred is not None and not one.is_preferred(*arguments, **static):
            continue
        try:
            if one.check is not None:
                one.check(*arguments, **one.options(config, interpret, static))
        except NotImplementedError as reason:
            if len(chosen) == 1:
                raise NotImplementedError(
                    f"implementation={requested!r} of {op} does not support these arguments: {reason}"
                ) from reason
            if _default_platform() in one.platforms and not isinstance(reason, PreferXla):
                _log_once(f"{op} runs without {one.name}: {reason}")
        else:
            accepted.append(one)
    # A requested implementation also runs on other platforms than its own, in an interpreter.
    return tuple(accepted) if len(chosen) > 1 else (accepted[0]._replace(platforms=()),)


def select(
    implementations: Sequence[Implementation], *, config: Any, interpret: Any, static: Mapping[str, Any]
) -> Callable[..., Any]:
    """Returns the op as a function that runs the first implementation for the platform it is compiled for.

    Args:
        implementations: Implementations that accept the arguments, in order of preference.
    """
    by_platform: dict[str, Callable[..., Any]] = {}
    for one in implementations:
        compute = functools.partial(one.compute, **one.options(config, interpret, static))
        for platform in one.platforms or ("default",):
            by_platform.setdefault(platform, compute)
        if not one.platforms:
            break
    if by_platform.keys() == {"default"}:
        return by_platform["default"]
    return functools.partial(jax.lax.platform_dependent, **by_platform)


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
