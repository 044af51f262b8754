"""The layers of hybrid models without attention: a gated delta rule or a short convolution."""

from kvjax_models.model.gated_delta import DeltaState, GatedDeltaNet, GatedDeltaSizes
from kvjax_models.model.parameters import Initializer
from kvjax_models.model.short_convolution import ConvolutionState, ShortConvolution, ShortConvolutionSizes

RecurrentSizes = GatedDeltaSizes | ShortConvolutionSizes
RecurrentState = DeltaState | ConvolutionState


def make_mixer(
    width: int, sizes: RecurrentSizes, norm_epsilon: float, init: Initializer
) -> GatedDeltaNet | ShortConvolution:
    """Returns the module of a layer's recurrence, with new parameters.

    Args:
        width: size of input and output.
        sizes: sizes of the layer, which determine its kind.
    """
    if isinstance(sizes, ShortConvolutionSizes):
        return ShortConvolution(width, sizes, init)
    return GatedDeltaNet(width, sizes, norm_epsilon, init)
