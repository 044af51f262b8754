"""Gated short convolutions, in the layers of hybrid models (LFM2) without attention, and the convolution itself.

A layer projects a token to an input gate b, an output gate c and channels x, and convolves the gated channels over the
last tokens:

    y = c * convolve(b * x)

The state of a sequence is the inputs of the convolution of its last tokens.

Reference:
    Sizes and order of the projection as in transformers 5.24.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax.state import state
from kvjax_models.model.parameters import Initializer


@state
class ConvolutionState:
    """The state of the rows of a batch in one layer.

    Attributes:
        inputs: inputs of the convolution of the last tokens, zeros before the first one, in the dtype of the model.
    """

    inputs: Float[Array, "B t H"]


@dataclasses.dataclass(frozen=True)
class ShortConvolutionSizes:
    """The sizes of a layer.

    Attributes:
        channels: number of channels, which devices share like heads.
        kernel_size: tokens that the convolution spans.
        use_bias: whether the convolution and the projections have a bias.
    """

    channels: int
    kernel_size: int
    use_bias: bool = False

    def init_state(self, batch: int, dtype: jax.typing.DTypeLike) -> ConvolutionState:
        """Returns the state of sequences without tokens.

        Args:
            batch: number of batch rows.
        """
        return ConvolutionState(jnp.zeros((batch, self.kernel_size - 1, self.channels), dtype))


class ShortConvolution(nnx.Module):
    """Projections and gates around a short convolution."""

    def __init__(self, width: int, sizes: ShortConvolutionSizes, init: Initializer):
        """Creates the parameters.

        Args:
            width: size of input and output.
        """
        self.sizes = sizes
        self.bcx = init.linear(width, (3, sizes.channels), use_bias=sizes.use_bias)
        self.kernel = init.normal((sizes.kernel_size, sizes.channels), sizes.kernel_size**-0.5)
        self.bias = init.zeros(sizes.channels) if sizes.use_bias else None
        self.out = init.linear(sizes.channels, width, use_bias=sizes.use_bias)

    def __call__(
        self, x: Float[Array, "B T W"], state: ConvolutionState, lengths: Int[Array, "B"]
    ) -> tuple[Float[Array, "B T W"], ConvolutionState]:
        """Processes the next tokens of each row.

        Args:
            x: normalized residual stream of padded tokens.
            state: state before the tokens.
            lengths: number of tokens of each row; padding does not change the state.

        Returns:
            The output and the state after the tokens.
        """
        input_gate, output_gate, channels = jnp.moveaxis(self.bcx(x), 2, 0)
        inputs = jnp.concatenate([state.inputs, input_gate * channels], axis=1)
        mixed = convolve(inputs, self.kernel[...])
        mixed = mixed if self.bias is None else mixed + self.bias[...].astype(jnp.float32)
        y = (output_gate.astype(jnp.float32) * mixed).astype(x.dtype)
        return self.out(y), ConvolutionState(last_inputs(inputs, lengths, self.sizes.kernel_size - 1))

    def init_state(self, batch: int) -> ConvolutionState:
        """Returns the state of sequences without tokens, for a number of batch rows."""
        return self.sizes.init_state(batch, self.kernel[...].dtype)


def convolve(inputs: Float[Array, "B t+T *C"], kernel: Float[Array, "k *C"]) -> Float[Array, "B T *C"]:
    """Applies a causal convolution to each channel.

    Args:
        inputs: inputs of k - 1 tokens before the padded tokens, and of these.
        kernel: weight of every token and channel, the newest token last.

    Returns:
        The outputs of the padded tokens, float32.
    """
    weights, tokens = kernel.astype(jnp.float32), inputs.shape[1] - len(kernel) + 1
    products = (inputs[:, i : i + tokens].astype(jnp.float32) * weights[i] for i in range(len(weights)))
    return sum(products, start=jnp.float32(0))


def last_inputs(inputs: Float[Array, "B t+T *C"], lengths: Int[Array, "B"], count: int) -> Float[Array, "B t *C"]:
    """Returns the inputs of each row's last tokens.

    Args:
        inputs: inputs of `count` tokens before the padded tokens, and of these.
        lengths: number of tokens of each row without padding.
        count: number of last tokens.
    """
    return jax.vmap(functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=count))(inputs, lengths)
