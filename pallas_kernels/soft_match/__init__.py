"""Chunked soft matching: finds the most similar partner of every other key without storing similarities."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.soft_match import mosaic_gpu, mosaic_tpu, oracle, xla
from pallas_kernels.soft_match.mosaic_tpu import TpuConfig as TpuConfig
from pallas_kernels.soft_match.oracle import Partners as Partners

IMPLEMENTATIONS = (
    Implementation("mosaic_tpu", mosaic_tpu.soft_match, ("tpu",), mosaic_tpu.check, TpuConfig, is_kernel=True),
    Implementation("mosaic_gpu", mosaic_gpu.soft_match, ("cuda",), mosaic_gpu.check, is_kernel=True),
    Implementation("xla", xla.soft_match),
    Implementation("oracle", oracle.soft_match),
)


def soft_match(
    keys: Float[Array, "S D"],
    num_keys: Int[Array, ""] | int,
    chunk_size: int,
    *,
    implementation: str | None = None,
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
        implementation: A name in `IMPLEMENTATIONS`, "xla" for all of its forms, or None for the first one that applies.
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
    return dispatch(
        "soft_match", IMPLEMENTATIONS, implementation, keys, jnp.asarray(num_keys, jnp.int32),
        config=config, interpret=interpret, chunk_size=chunk_size,
    )  # fmt: skip
