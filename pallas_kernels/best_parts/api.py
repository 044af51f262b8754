"""`best_parts` on whatever the program runs on."""

import functools
from typing import Any, Literal

from jaxtyping import Array, Float, Int

from pallas_kernels.best_parts import mosaic_tpu, reference
from pallas_kernels.best_parts.base import Ranked
from pallas_kernels.dispatch import Kernel, dispatch

Implementation = Literal["xla", "mosaic_tpu"]


def best_parts(
    score: Float[Array, "C"],
    size: Int[Array, "C"],
    first: Int[Array, "C"],
    *,
    tokens: int,
    blocks: int,
    places: int,
    skip: Int[Array, ""] | int | None = None,
    implementation: Implementation | None = None,
    interpret: Any = False,
) -> Ranked:
    """Whole parts (clusters, pages) in descending order of score, the last one cut so as to end exactly at the budget.

    Of equal scores the part with the lower number comes first; a part that is cut keeps its first tokens. Parts of size
    0 are passed over.

    Args:
        size: tokens of each part.
        first: block where it begins; its tokens fill that one and the following ones without gaps.
        tokens: the budget.
        blocks: K, as many blocks as are read at most: parts that leave much of their blocks empty may use them up
            before the tokens of the budget.
        places: tokens of a block.
        skip: leaves out so many first blocks, which were read before; `taken` counts their tokens, too.
        implementation: None: the kernel on a TPU, where it can do this, XLA otherwise.
        interpret: of the kernel, as `pallas_call` takes it.

    Raises:
        ValueError: for an implementation that is not known.
        NotImplementedError: where the implementation that was asked for cannot do this, with the reason.
    """
    sizes: dict[str, Any] = {"tokens": tokens, "blocks": blocks, "places": places}
    given = (score, size, first) if skip is None else (score, size, first, skip)
    kernel = Kernel(
        functools.partial(mosaic_tpu.best_parts, **sizes, interpret=interpret),
        functools.partial(mosaic_tpu.check, **sizes),
    )
    plain = functools.partial(reference.best_parts, **sizes)
    return dispatch("best_parts", implementation, plain, {"mosaic_tpu": kernel}, *given)
