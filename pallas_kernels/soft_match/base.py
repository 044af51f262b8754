"""What all forms of the search for partners give."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Partners(NamedTuple):
    """Of every A entry (even places of a chunk); A = ceil(S / chunk) chunk / 2 of them."""

    cosine: Float[Array, "A"]  # float32, with its partner; -inf where either is missing
    place: Int[Array, "A"]  # int32, the partner's place among the chunk's B entries; any where the cosine is -inf
