"""The initial parameters of modules."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax_models.model.quantized import QuantizedLinear, dot_general


@dataclasses.dataclass(frozen=True)
class Initializer:
    """Creates the parameters of modules.

    Attributes:
        dtype: dtype of parameters and activations.
        rngs: random keys of the initial values.
        quantized: whether the kernels of projections are int8.
    """

    dtype: jax.typing.DTypeLike
    rngs: nnx.Rngs
    quantized: bool = False

    def linear(self, inputs: int, outputs: int | Sequence[int], *, use_bias: bool) -> Any:
        """Returns a linear projection [in, *out]: random values, or zeros if kernels are int8."""
        if self.quantized:
            return QuantizedLinear(inputs, outputs, use_bias=use_bias, dtype=self.dtype)
        return self.float_linear(inputs, outputs, use_bias=use_bias)

    def float_linear(
        self, inputs: int, outputs: int | Sequence[int], *, use_bias: bool
    ) -> nnx.Linear | nnx.LinearGeneral:
        """Returns a linear projection that is never quantized, such as a gate."""
        options: Any = {"use_bias": use_bias, "dtype": self.dtype, "param_dtype": self.dtype, "rngs": self.rngs}
        if isinstance(outputs, int):
            return nnx.Linear(inputs, outputs, dot_general=dot_general, **options)
        return nnx.LinearGeneral(inputs, outputs, dot_general=dot_general, **options)

    def normal(self, shape: Sequence[int], scale: float) -> nnx.Param:
        """Returns random values with a standard deviation of `scale`."""
        return nnx.Param(jax.random.normal(self.rngs.params(), shape, self.dtype) * scale)

    def zeros(self, *shape: int) -> nnx.Param:
        """Returns zeros."""
        return nnx.Param(jnp.zeros(shape, self.dtype))

    def ones(self, *shape: int) -> nnx.Param:
        """Returns ones."""
        return nnx.Param(jnp.ones(shape, self.dtype))
