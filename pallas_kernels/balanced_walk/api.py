"""The walk on whatever the program runs on."""

import functools
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.balanced_walk import mosaic_gpu, mosaic_tpu, reference
from pallas_kernels.balanced_walk.base import Block, Pairs, Signs
from pallas_kernels.dispatch import Kernel, dispatch

Implementation = Literal["xla", "mosaic_tpu", "mosaic_gpu"]


def signs(
    block: Block,
    uniforms: Float[Array, "t"],
    gain: Float[Array, "t"] | Float[Array, ""] | float,
    weight: Float[Array, "t"] | Float[Array, ""] | float = 1.0,
    *,
    implementation: Implementation | None = None,
    config: mosaic_tpu.Config | None = None,
    interpret: Any = False,
) -> Signs:
    """The self-balancing walk's signs of one block; see `reference.signs`. More blocks by `jax.vmap`: a kernel
    walks several side by side.

    Args:
        gain, weight: scalars where they are the same for all entries.
        implementation: None: the kernel of the platform that the program is compiled for, where there is one and it can
            do this, XLA otherwise.
        config: of the TPU kernel.
        interpret: of the kernel, as `pallas_call` or `plgpu.kernel` takes it.

    Raises:
        ValueError: for shapes that do not fit, or an implementation that is not known.
        NotImplementedError: where the implementation that was asked for cannot do this, with the reason.
    """
    entries = block.keys.shape[0]
    _check_shapes(block, {"uniforms": (uniforms, entries)})
    spread = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.float32), (entries,))  # noqa: E731
    kernels = {
        "mosaic_tpu": Kernel(
            functools.partial(mosaic_tpu.signs, config=config, interpret=interpret),
            functools.partial(mosaic_tpu.check, config=config),
        ),
        "mosaic_gpu": Kernel(
            functools.partial(mosaic_gpu.signs, interpret=interpret),
            functools.partial(mosaic_gpu.check, interpret=interpret),
        ),
    }
    given = (block, uniforms, spread(gain), spread(weight))
    return dispatch("balanced_walk", implementation, reference.signs, kernels, *given)


def pairs(
    block: Block,
    uniforms: Float[Array, "h"],
    weights: Float[Array, "t"],
    gamma: Float[Array, ""] | float,
    *,
    implementation: Implementation | None = None,
    config: mosaic_tpu.Config | None = None,
    interpret: Any = False,
) -> Pairs:
    """Makes one entry of every two nearest ones of a block; see `reference.pairs`. Arguments and errors as for
    `signs`."""
    entries = block.keys.shape[0]
    _check_shapes(block, {"uniforms": (uniforms, entries // 2), "weights": (weights, entries)})
    kernels = {
        "mosaic_tpu": Kernel(
            functools.partial(mosaic_tpu.pairs, config=config, interpret=interpret),
            functools.partial(mosaic_tpu.check, config=config),
        ),
        "mosaic_gpu": Kernel(
            functools.partial(mosaic_gpu.pairs, interpret=interpret),
            functools.partial(mosaic_gpu.check, interpret=interpret),
        ),
    }
    given = (block, uniforms, weights, jnp.asarray(gamma, jnp.float32))
    return dispatch("balanced_walk", implementation, reference.pairs, kernels, *given)


def _check_shapes(block: Block, vectors: dict[str, tuple[Array, int]]) -> None:
    for name, (array, size) in vectors.items():
        if array.shape != (size,):
            raise ValueError(f"{name} has shape {array.shape}; with keys {block.keys.shape} it must be {(size,)}")
    if block.values is not None and block.values.shape[0] != block.keys.shape[0]:
        raise ValueError(f"values {block.values.shape} are not as many as keys {block.keys.shape}")
