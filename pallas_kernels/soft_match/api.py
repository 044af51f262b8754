"""`soft_match` on whatever the program runs on."""

import functools
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Kernel, dispatch
from pallas_kernels.soft_match import mosaic_gpu, mosaic_tpu, reference
from pallas_kernels.soft_match.base import Partners

Implementation = Literal["xla", "mosaic_tpu", "mosaic_gpu"]


def soft_match(
    keys: Float[Array, "S D"],
    count: Int[Array, ""] | int,
    chunk: int,
    *,
    implementation: Implementation | None = None,
    config: mosaic_tpu.Config | None = None,
    interpret: Any = False,
) -> Partners:
    """For every other key the most similar of those between, within its chunk; see `reference.soft_match`.

    Args:
        keys: one head's, in the order of the text; float32 or bfloat16. More heads and sequences by `jax.vmap`.
        count: keys that are there, the first ones.
        chunk: keys among which a partner is sought; even.
        implementation: None: the kernel of the platform that the program is compiled for, where there is one and it can
            do this, XLA otherwise.
        config: of the kernel for TPU.
        interpret: of the kernel, as `pallas_call` or `plgpu.kernel` takes it.

    Raises:
        ValueError: for a chunk that is not even, or an implementation that is not known.
        NotImplementedError: where the implementation that was asked for cannot do this, with the reason.
    """
    if chunk < 2 or chunk % 2:
        raise ValueError(f"chunk={chunk}; it must be even and at least 2")
    kernels = {
        "mosaic_tpu": Kernel(
            functools.partial(mosaic_tpu.soft_match, chunk=chunk, config=config, interpret=interpret),
            functools.partial(mosaic_tpu.check, chunk=chunk),
        ),
        "mosaic_gpu": Kernel(
            functools.partial(mosaic_gpu.soft_match, chunk=chunk, interpret=interpret),
            functools.partial(mosaic_gpu.check, chunk=chunk, interpret=interpret),
        ),
    }
    plain = functools.partial(reference.soft_match, chunk=chunk)
    return dispatch("soft_match", implementation, plain, kernels, keys, jnp.asarray(count, jnp.int32))
