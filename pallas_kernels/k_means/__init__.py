"""One iteration of Lloyd's algorithm by inner product: labels of points and sums of clusters."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.k_means import mosaic_gpu, mosaic_tpu, oracle, xla
from pallas_kernels.k_means.mosaic_tpu import TpuConfig as TpuConfig
from pallas_kernels.k_means.oracle import LloydStep as LloydStep
from pallas_kernels.k_means.xla import XlaConfig as XlaConfig
from pallas_kernels.k_means.xla import cluster_sums as cluster_sums

IMPLEMENTATIONS = (
    Implementation("mosaic_tpu", mosaic_tpu.k_means, ("tpu",), mosaic_tpu.check, TpuConfig, is_kernel=True),
    Implementation("mosaic_gpu", mosaic_gpu.k_means, ("cuda",), mosaic_gpu.check, is_kernel=True),
    Implementation("xla", xla.k_means, config=XlaConfig),
    Implementation("oracle", oracle.k_means),
)


def k_means(
    points: Float[Array, "N D"],
    centroids: Float[Array, "C D"],
    is_valid: Bool[Array, "N"],
    *,
    num_centroids: Int[Array, ""] | int | None = None,
    summands: Float[Array, "N D"] | None = None,
    implementation: str | None = None,
    config: TpuConfig | XlaConfig | None = None,
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
        implementation: A name in `IMPLEMENTATIONS`, "xla" for all of its forms, or None for the first one that applies.
        config: The configuration of the implementation that it belongs to; None for the defaults.
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
    count = jnp.asarray(centroids.shape[0] if num_centroids is None else num_centroids, jnp.int32)
    inputs = oracle.Inputs(points, centroids, is_valid, count, summands)
    return dispatch("k_means", IMPLEMENTATIONS, implementation, inputs, config=config, interpret=interpret)
