"""One iteration of Lloyd's algorithm by inner product: labels of points and sums of clusters."""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import Implementation, Kernel, dispatch
from pallas_kernels.k_means import mosaic_gpu, mosaic_tpu, reference
from pallas_kernels.k_means.mosaic_tpu import TpuConfig as TpuConfig
from pallas_kernels.k_means.reference import LloydStep as LloydStep
from pallas_kernels.k_means.reference import cluster_sums as cluster_sums


def k_means(
    points: Float[Array, "N D"],
    centroids: Float[Array, "C D"],
    is_valid: Bool[Array, "N"],
    *,
    num_centroids: Int[Array, ""] | int | None = None,
    summands: Float[Array, "N D"] | None = None,
    block_size: int = 2048,
    implementation: Implementation | None = None,
    config: TpuConfig | None = None,
    interpret: Any = False,
) -> LloydStep:
    """Assigns every valid point to the centroid of largest inner product, the first of equal ones.

    Use `jax.vmap` for several heads. Raises NotImplementedError if a requested kernel does not support the arguments.

    Args:
        points: The points of one head, float32. Invalid points must be finite, too.
        centroids: float32; unit vectors make the inner product a cosine similarity, up to the norm of the point.
        is_valid: Which points are assigned.
        num_centroids: The number of centroids that points are assigned to, which come first. None means C.
        summands: The vectors that are summed per cluster, finite float32. None means the points, which are then read
            once.
        block_size: Points per block of the XLA implementation.
        implementation: "xla", "mosaic_tpu", "mosaic_gpu", or None for the kernel of the platform that the program is
            compiled for if it supports the arguments, XLA otherwise.
        config: The configuration of the TPU kernel; None for the defaults.
        interpret: Passed to `pallas_call` or `plgpu.kernel`.

    Returns:
        Labels, sums per cluster, and the total inner product.

    Raises:
        ValueError: If shapes do not match, or the implementation is unknown.

    Reference:
        Lloyd 1982; ClusterKV, section III.
    """
    tokens, head_dim = points.shape
    expected = {"centroids": (centroids.shape[0], head_dim), "is_valid": (tokens,), "summands": (tokens, head_dim)}
    for name, array in {"centroids": centroids, "is_valid": is_valid, "summands": summands}.items():
        if array is not None and array.shape != expected[name]:
            raise ValueError(
                f"{name} has shape {array.shape}; for points of shape {points.shape} it must be {expected[name]}"
            )
    tpu_options = {"config": config or TpuConfig(), "interpret": interpret}
    count = jnp.asarray(centroids.shape[0] if num_centroids is None else num_centroids, jnp.int32)
    inputs = reference.Inputs(points, centroids, is_valid, count, summands)
    return dispatch(
        "k_means", implementation, functools.partial(reference.k_means, block_size=block_size), inputs,
        mosaic_tpu=Kernel(mosaic_tpu.k_means, mosaic_tpu.check, tpu_options),
        mosaic_gpu=Kernel(mosaic_gpu.k_means, mosaic_gpu.check, {"interpret": interpret}),
    )  # fmt: skip
