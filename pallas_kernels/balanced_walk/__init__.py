"""The self-balancing walk: signs that balance a kernel matrix."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.balanced_walk import mosaic_gpu, mosaic_tpu, oracle, xla
from pallas_kernels.balanced_walk.mosaic_tpu import TpuConfig as TpuConfig
from pallas_kernels.balanced_walk.oracle import Block as Block
from pallas_kernels.balanced_walk.oracle import Signs as Signs
from pallas_kernels.balanced_walk.xla import assign_signs_from_matrix as assign_signs_from_matrix
from pallas_kernels.balanced_walk.xla import kernel_matrix as kernel_matrix
from pallas_kernels.dispatch import Implementation, dispatch

IMPLEMENTATIONS = (
    Implementation("mosaic_tpu", mosaic_tpu.assign_signs, ("tpu",), mosaic_tpu.check, TpuConfig, is_kernel=True),
    Implementation("mosaic_gpu", mosaic_gpu.assign_signs, ("cuda",), mosaic_gpu.check, is_kernel=True),
    Implementation("xla", xla.assign_signs),
    Implementation("oracle", oracle.assign_signs),
)


def assign_signs(
    block: Block,
    uniforms: Float[Array, "t"],
    gain: Float[Array, "t"] | Float[Array, ""] | float,
    weight: Float[Array, "t"] | Float[Array, ""] | float = 1.0,
    *,
    implementation: str | None = None,
    config: TpuConfig | None = None,
    interpret: Any = False,
) -> Signs:
    """Assigns a sign to every entry by the self-balancing walk.

    Sign s_i is +1 if u_i < 1/2 - gain_i y_i and -1 otherwise, with y_i = sum over j < i of K_ij weight_j s_j. Use
    `jax.vmap` for several blocks, which a kernel processes together.

    Raises NotImplementedError if a requested kernel does not support the arguments.

    Args:
        block: The entries, in the order of the walk.
        uniforms: u, one draw from [0, 1) per entry. A draw of 0 makes the first sign +1.
        gain: How strongly a sign counters the sum of the earlier ones; per entry or for all.
        implementation: A name in `IMPLEMENTATIONS`, "xla" for all of its forms, or None for the first one that applies.
        config: The configuration of the TPU kernel; None for the defaults.
        interpret: Passed to `pallas_call` or `plgpu.kernel`.

    Returns:
        The signs, and how often |gain_i y_i| exceeded 1/2, where the probability is clipped.

    Raises:
        ValueError: If shapes do not match or the implementation is unknown.

    Reference:
        Alweiss, Liu and Sawhney 2021, "Discrepancy minimization via a self-balancing walk".
    """
    entries = block.keys.shape[0]
    if uniforms.shape != (entries,):
        raise ValueError(
            f"uniforms has shape {uniforms.shape}; for keys of shape {block.keys.shape} it must be {(entries,)}"
        )
    if block.values is not None and block.values.shape[0] != entries:
        raise ValueError(
            f"values have shape {block.values.shape} and keys {block.keys.shape}; their first axes must be equal"
        )
    gains, weights = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), (entries,)) for x in (gain, weight))
    # Signs are discrete. Kernels have no derivative, which JAX would otherwise look for.
    inputs = jax.lax.stop_gradient((block, uniforms, gains, weights))
    return dispatch("balanced_walk", IMPLEMENTATIONS, implementation, *inputs, config=config, interpret=interpret)
