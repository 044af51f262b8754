"""Weights in int8 with one scale per output channel, for matrix products with activations in float.

A quantized module has the parameters of its float counterpart, with int8 values, and `channel_scale`. Products multiply
with the int8 values in the dtype of the activations and scale the result: no float copy of a model exists.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped

WeightDtype = Literal["int8"]
SCALE = "channel_scale"  # name of the scales among a module's parameters
_MAX_INT8 = 127
_FEW_TOKENS = 16  # up to here, a product takes less time than a conversion of its weights that is written to memory
_BLOCK_INPUTS, _BLOCK_OUTPUTS = 16, 64  # of weights that are converted at a time on CPUs, within their caches


class QuantizedLinear(nnx.Module):
    """A linear projection with an int8 kernel [in, *out]."""

    def __init__(self, inputs: int, outputs: int | Sequence[int], *, use_bias: bool, dtype: Any):
        """Creates a projection with zeros.

        Args:
            use_bias: whether there is a bias.
            dtype: dtype of activations, scales and bias.
        """
        shape = (outputs,) if isinstance(outputs, int) else tuple(outputs)
        self.kernel = nnx.Param(jnp.zeros((inputs, *shape), jnp.int8))
        self.channel_scale = nnx.Param(jnp.zeros(shape, dtype))
        self.bias = nnx.Param(jnp.zeros(shape, dtype)) if use_bias else None

    def __call__(self, x: Float[Array, "*B in"]) -> Float[Array, "..."]:
        """Returns the projection."""
        return self.project(x)

    def project(
        self, x: Float[Array, "*B in"], index: tuple[Any, ...] = (), dtype: jax.typing.DTypeLike | None = None
    ) -> Float[Array, "..."]:
        """Returns a part of the projection.

        Args:
            x: input.
            index: index of the output's axes.
            dtype: dtype of the output; None for the dtype of x.
        """
        y = multiply(x, self.kernel[...][:, *index], self.channel_scale[...][index], dtype)
        return y if self.bias is None else y + self.bias[...][index]


class QuantizedEmbedding(nnx.Module):
    """An embedding table [V, W] in int8 with one scale per token."""

    def __init__(self, tokens: int, width: int, *, dtype: Any):
        """Creates a table of zeros.

        Args:
            tokens: size of the vocabulary.
            width: size of an embedding.
            dtype: dtype of activations and scales.
        """
        self.embedding = nnx.Param(jnp.zeros((tokens, width), jnp.int8))
        self.channel_scale = nnx.Param(jnp.zeros(tokens, dtype))
        self.param_dtype = dtype

    def __call__(self, tokens: Int[Array, "*B"]) -> Float[Array, "*B W"]:
        """Returns the embeddings of tokens."""
        scale = jnp.take(self.channel_scale[...], tokens, axis=0)[..., None]
        return jnp.take(self.embedding[...], tokens, axis=0).astype(scale.dtype) * scale


def dot_general(x: Float[Array, "..."], kernel: Float[Array, "..."], dimensions: Any, **options: Any) -> Array:
    """Multiplies as `jax.lax.dot_general`, on CPUs with sums in float32.

    XLA:CPU multiplies bfloat16 numbers as they are only if the result is float32 and `x` has at least two rows;
    otherwise it converts the weights to float32 in memory, which takes several times as long as the product.
    Accelerators always sum in float32.

    Args:
        x: activations.
        kernel: weights.

    Returns:
        The product in the dtype that `jax.lax.dot_general` returns.
    """

    def multiply(x: Array, kernel: Array) -> Array:
        return jax.lax.dot_general(x, kernel, dimensions, **options)

    def multiply_in_float32(x: Array, kernel: Array) -> Array:
        """Rounds sums in float32; a row of zeros accompanies a single one."""
        ((contracted, _), (batch, _)) = dimensions
        axes = [axis for axis in range(x.ndim) if axis not in (*contracted, *batch)]
        is_one_row = not batch and bool(axes) and all(x.shape[axis] == 1 for axis in axes)
        if is_one_row:
            x = jnp.pad(x, [(0, int(axis == axes[0])) for axis in range(x.ndim)])
        product = jax.lax.dot_general(x, kernel, dimensions, **{**options, "preferred_element_type": jnp.float32})
        return (product[:1] if is_one_row else product).astype(options.get("preferred_element_type") or x.dtype)

    if x.dtype != jnp.bfloat16 or kernel.dtype != jnp.bfloat16:
        return multiply(x, kernel)
    return jax.lax.platform_dependent(x, kernel, cpu=multiply_in_float32, default=multiply)


def quantize(weights: Shaped[np.ndarray, "..."], axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Rounds weights to int8 with the scale max |w| / 127 along an axis.

    Args:
        axis: axis of the inputs, over which a scale is shared.

    Returns:
        The int8 values and the float32 scales, without the axis.
    """
    scale = np.max(np.abs(weights), axis=axis, keepdims=True).astype(np.float32) / _MAX_INT8
    values = np.rint(weights.astype(np.float32) / np.where(scale == 0, 1, scale)).astype(np.int8)
    return values, np.squeeze(scale, axis)


def multiply(
    x: Float[Array, "*B in"],
    kernel: Int[Array, "in *out"],
    scale: Float[Array, "*out"],
    dtype: jax.typing.DTypeLike | None = None,
) -> Float[Array, "..."]:
    """Returns x @ kernel * scale.

    Compilers for accelerators convert the kernel inside of the product. On CPUs, few tokens multiply blocks of inputs,
    because XLA:CPU writes a converted operand to memory. Sums are float32 up to the scale: without it they are up to
    127 times as large as weights in float give, which float16 cannot represent.

    Args:
        x: activations.
        kernel: int8 values.
        dtype: dtype of the product; None for the dtype of x.
    """
    flat, matrix = x.reshape(-1, x.shape[-1]), kernel.reshape(kernel.shape[0], -1)

    def direct(x: Array, matrix: Array) -> Array:
        return dot_general(x, matrix.astype(x.dtype), (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    def by_blocks(x: Array, matrix: Array) -> Array:
        """Sums the products of blocks of inputs."""
        x_blocks = x.reshape(len(x), -1, _BLOCK_INPUTS).swapaxes(0, 1)
        blocks = matrix.reshape(-1, _BLOCK_INPUTS, matrix.shape[1])
        zeros = jnp.zeros((len(x), matrix.shape[1]), jnp.float32)
        return jax.lax.scan(lambda y, pair: (y + direct(*pair), None), zeros, (x_blocks, blocks))[0]

    use_blocks = len(flat) <= _FEW_TOKENS and len(matrix) % _BLOCK_INPUTS == 0
    y = jax.lax.platform_dependent(flat, matrix, cpu=by_blocks if use_blocks else direct, default=direct)
    y = y.reshape(*x.shape[:-1], *kernel.shape[1:]) * scale.astype(jnp.float32)
    return y.astype(x.dtype if dtype is None else dtype)


def multiply_transposed(
    x: Float[Array, "*B W"], table: Int[Array, "V W"], scale: Float[Array, "V"]
) -> Float[Array, "*B V"]:
    """Returns x @ table.T * scale in float32, such as the logits of tied embeddings.

    Args:
        x: activations.
        table: int8 values.
    """
    flat = x.reshape(-1, x.shape[-1])

    def direct(x: Array, table: Array) -> Array:
        """Contracts both operands along their last axis."""
        dimensions = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(x, table.astype(x.dtype), dimensions, preferred_element_type=jnp.float32)

    def by_blocks(x: Array, table: Array) -> Array:
        """Concatenates the products of blocks of outputs."""
        blocks = table.reshape(-1, _BLOCK_OUTPUTS, table.shape[1])
        return jax.lax.map(lambda block: direct(x, block), blocks).swapaxes(0, 1).reshape(len(x), -1)

    use_blocks = len(table) % _BLOCK_OUTPUTS == 0
    y = jax.lax.platform_dependent(flat, table, cpu=by_blocks if use_blocks else direct, default=direct)
    return y.reshape(*x.shape[:-1], -1) * scale.astype(jnp.float32)
