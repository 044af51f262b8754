"""What all forms of a pass of Lloyd's algorithm give."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Pass(NamedTuple):
    label: Int[Array, "N"]  # int32, the point's cluster; C where it is not valid
    sums: Float[Array, "C D"]  # float32, of every cluster's points
    gained: Float[Array, ""]  # float32, the sum over valid points of the product with their cluster's direction
