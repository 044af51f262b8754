"""Shared parts of the kernels for TPU (Mosaic): launches and matrix products."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.quantized_array import array_bytes, product_dtype


def launch(
    name: str, kernel: Callable[..., None],
    inputs: Iterable[tuple[Array, pl.BlockSpec]], outputs: Iterable[tuple[tuple[int, ...], Any, pl.BlockSpec]],
    *, parallel: tuple[int, ...] = (), sequential: tuple[int | Array, ...] = (), scalars: Sequence[Array] = (),
    scratch: Sequence[Any] = (), interpret: Any, flops: int, transcendentals: int = 0,
    bytes_accessed: int | None = None, **compiler_params: Any,
) -> Sequence[Array]:  # fmt: skip
    """Launches a kernel by `pallas_call`.

    Args:
        name: The name of the kernel in compiled programs.
        kernel: Takes refs of scalars, inputs, outputs and scratch.
        inputs: The arguments and their blocks.
        outputs: The shapes, dtypes and blocks of the results.
        parallel: The leading axes of the grid, which several cores may share.
        sequential: The other axes of the grid; their lengths may be traced.
        scalars: Arguments in scalar memory, which index maps read.
        scratch: On-chip memory.
        interpret: Passed to `pallas_call`.
        transcendentals: An estimate of the number of exponentials.
        bytes_accessed: An estimate of the bytes that move; None if all inputs and outputs do.
        **compiler_params: Further fields of `pltpu.CompilerParams`.

    Returns:
        The results.
    """
    arrays, in_specs = zip(*inputs, strict=True)
    shapes, dtypes, out_specs = zip(*outputs, strict=True)
    out_shapes = list(map(jax.ShapeDtypeStruct, shapes, dtypes))
    moved = array_bytes(arrays, out_shapes) if bytes_accessed is None else bytes_accessed
    semantics: Any = ("parallel",) * len(parallel) + ("arbitrary",) * len(sequential)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(*parallel, *sequential),
            in_specs=in_specs,
            out_specs=list(out_specs),
            scratch_shapes=scratch,
        ),
        out_shape=out_shapes,
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics, **compiler_params),
        cost_estimate=pl.CostEstimate(flops, transcendentals, moved),
        interpret=interpret,
        name=name,
    )(*scalars, *arrays)


def dot(left: Float[Array, "M K"], right: Array, axis: int) -> Float[Array, "M N"]:
    """Multiplies matrices, accumulated in float32 and with full precision for float32 operands.

    Args:
        left: Contracted over its last axis.
        right: A matrix of the same dtype.
        axis: The axis of `right` that is contracted.

    Returns:
        The float32 product.
    """
    precision = jax.lax.Precision.HIGHEST if right.dtype == jnp.float32 else None
    dimensions = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)


def dot_stored(left: Float[Array, "M K"], stored: Array, axis: int) -> Float[Array, "M N"]:
    """Multiplies queries and stored keys, or weights and stored values, in their `product_dtype`.

    Args:
        left: Queries or weights.
        stored: Keys, values or unpacked codes.
        axis: The axis of `stored` that is contracted.

    Returns:
        The float32 product.
    """
    dtype = product_dtype(left.dtype, stored.dtype)
    if jnp.issubdtype(stored.dtype, jnp.integer):
        stored = stored.astype(jnp.float32)  # Mosaic converts float32 to every dtype
    return dot(left.astype(dtype), stored.astype(dtype), axis)
