"""What all forms of the choice of parts give."""

from typing import NamedTuple

from jaxtyping import Array, Int


class Ranked(NamedTuple):
    """Which blocks hold the best parts of a store up to a budget, and how much of every part they are."""

    block: Int[Array, "K"]  # int32; in which order is the form's own, but those that are read come first
    tokens: Int[Array, "K"]  # int32, how many are read of each; 0 where none
    taken: Int[Array, "C"]  # int32 tokens that are read of each part
