"""The layers of hybrid models without attention: a gated delta rule or a short convolution."""

import jax
from flax import nnx

from kvjax_models.model.gated_delta import DeltaState, GatedDeltaNet, GatedDeltaSizes
from kvjax_models.model.short_convolution import ConvolutionState, ShortConvolution, ShortConvolutionSizes

RecurrentSizes = GatedDeltaSizes | ShortConvolutionSizes
RecurrentState = DeltaState | ConvolutionState


def make_mixer(
    width: int,
    sizes: RecurrentSizes,
    norm_epsilon: float,
    *,
    dtype: jax.typing.DTypeLike,
    rngs: nnx.Rngs,
    quantized: bool = False,
) -> GatedDeltaNet | ShortConvolution:
    """Returns the module of a layer's recurrence, with new parameters.

    Args:
        width: size of input and output.
        sizes: sizes of the layer, which determine its kind.
        dtype: dtype of parameters and activations.
        rngs: random keys of the initial parameters.
        quantized: whether the kernels of projections are int8.
    """
    if isinstance(sizes, ShortConvolutionSizes):
        return ShortConvolution(width, sizes, dtype=dtype, rngs=rngs, quantized=quantized)
    return GatedDeltaNet(width, sizes, norm_epsilon, dtype=dtype, rngs=rngs, quantized=quantized)
