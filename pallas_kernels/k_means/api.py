"""`k_means` on whatever the program runs on."""

import functools
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import Kernel, dispatch
from pallas_kernels.k_means import mosaic_gpu, mosaic_tpu, reference
from pallas_kernels.k_means.base import Pass

Implementation = Literal["xla", "mosaic_tpu", "mosaic_gpu"]


def k_means(
    points: Float[Array, "N D"],
    directions: Float[Array, "C D"],
    valid: Bool[Array, "N"],
    *,
    used: Int[Array, ""] | int | None = None,
    summed: Float[Array, "N D"] | None = None,
    block: int = 2048,
    implementation: Implementation | None = None,
    config: mosaic_tpu.Config | None = None,
    interpret: Any = False,
) -> Pass:
    """One pass of Lloyd's algorithm over one head's points: see `reference.k_means`. More heads by `jax.vmap`.

    Args:
        points, directions, summed: float32; finite, also where points are not valid.
        used: only the first so many directions are open; None: all.
        summed: what is summed over every cluster's points; None: the points themselves, then read once.
        block: of the reference.
        implementation: None: the kernel of the platform that the program is compiled for, where there is one and it can
            do this, XLA otherwise.
        config: of the kernel for TPU.
        interpret: of the kernel, as `pallas_call` or `plgpu.kernel` takes it.

    Raises:
        ValueError: for shapes that do not fit, or an implementation that is not known.
        NotImplementedError: where the implementation that was asked for cannot do this, with the reason.
    """
    tokens, head_dim = points.shape
    wanted = {"directions": (directions.shape[0], head_dim), "valid": (tokens,), "summed": (tokens, head_dim)}
    for name, array in {"directions": directions, "valid": valid, "summed": summed}.items():
        if array is not None and array.shape != wanted[name]:
            raise ValueError(f"{name} has shape {array.shape}; with points {points.shape} it must be {wanted[name]}")
    kernels = {
        "mosaic_tpu": Kernel(
            functools.partial(mosaic_tpu.k_means, config=config, interpret=interpret),
            functools.partial(mosaic_tpu.check, config=config),
        ),
        "mosaic_gpu": Kernel(
            functools.partial(mosaic_gpu.k_means, interpret=interpret),
            functools.partial(mosaic_gpu.check, interpret=interpret),
        ),
    }
    used = jnp.asarray(directions.shape[0] if used is None else used, jnp.int32)
    plain = functools.partial(reference.k_means, block=block)
    return dispatch("k_means", implementation, plain, kernels, points, directions, valid, used, summed)
