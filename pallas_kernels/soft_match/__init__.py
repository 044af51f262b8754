"""Chunked soft matching: finds the most similar partner of every other key without storing similarities."""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, Kernel, dispatch
from pallas_kernels.soft_match import mosaic_gpu, mosaic_tpu, reference
from pallas_kernels.soft_match.mosaic_tpu import TpuConfig as TpuConfig
from pallas_kernels.soft_match.reference import Partners as Partners


def soft_match(
    keys: Float[Array, "S D"],
    num_keys: Int[Array, ""] | int,
    chunk_size: int,
    *,
    implementation: Implementation | None = None,
    config: TpuConfig | None = None,
    interpret: Any = False,
) -> Partners:
    """Finds, for each key at an even index (A), the most similar key at an odd index (B) of the same chunk.

    Of equally similar keys the first is chosen. Use `jax.vmap` for several heads or sequences. Raises
    NotImplementedError if a requested kernel does not support the arguments.

    Args:
        keys: The keys of one head in text order, float32 or bfloat16. Keys from `num_keys` on are ignored.
        num_keys: The number of valid keys, which come first.
        chunk_size: Keys per chunk, an even number.
        implementation: "xla", "mosaic_tpu", "mosaic_gpu", or None for the kernel of the platform that the program is
            compiled for if it supports the arguments, XLA otherwise.
        config: The configuration of the TPU kernel; None for the defaults.
        interpret: Passed to `pallas_call` or `plgpu.kernel`.

    Returns:
        The partners of the A keys.

    Raises:
        ValueError: If `chunk_size` is not a positive even number or the implementation is unknown.

    Reference:
        Chelsea, section 5.2 (chunked soft matching).
    """
    if chunk_size < 2 or chunk_size % 2:
        raise ValueError(f"chunk_size={chunk_size}; it must be even and at least 2")
    options = {"chunk_size": chunk_size, "interpret": interpret}
    tpu_options = {**options, "config": config or TpuConfig()}
    return dispatch(
        "soft_match", implementation, functools.partial(reference.soft_match, chunk_size=chunk_size),
        keys, jnp.asarray(num_keys, jnp.int32),
        mosaic_tpu=Kernel(mosaic_tpu.soft_match, mosaic_tpu.check, tpu_options),
        mosaic_gpu=Kernel(mosaic_gpu.soft_match, mosaic_gpu.check, options),
    )  # fmt: skip
