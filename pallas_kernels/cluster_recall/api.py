"""`cluster_recall` on whatever the program runs on."""

import functools
from typing import Any, Literal

from jaxtyping import Array, Float, Int

from pallas_kernels.cluster_recall import mosaic_tpu, reference
from pallas_kernels.cluster_recall.base import Blocks, check
from pallas_kernels.dispatch import Kernel, dispatch
from pallas_kernels.weighted_decode import Sums

Implementation = Literal["xla", "mosaic_tpu"]


def cluster_recall(
    rows: Float[Array, "B H R D"],
    blocks: Blocks,
    number: Int[Array, "B H K"],
    count: Int[Array, "B H K"],
    *,
    implementation: Implementation | None = None,
    config: mosaic_tpu.Config | None = None,
    interpret: Any = False,
) -> Sums:
    """Both sums of attention of the rows of every head over the blocks it recalls, in float32; see `reference`.

    Args:
        rows: queries that share what they recall: those of a kv head (H = H_kv, R of them), or of every query head of
            its own (H a multiple of H_kv; head h reads kv head h // (H / H_kv)).
        number: int32 numbers of blocks that there are.
        count: int32 tokens that are read of each, its first ones; 0 where nothing is.
        implementation: None: the kernel of the platform that the program is compiled for, where there is one and it can
            do this, XLA otherwise.
        config: of the kernel.
        interpret: of the kernel, as `pallas_call` takes it.

    Raises:
        ValueError: for shapes that do not fit, or an implementation that is not known.
        NotImplementedError: where the implementation that was asked for cannot do this, with the reason.
    """
    check(rows, blocks, number, count)
    kernels = {
        "mosaic_tpu": Kernel(
            functools.partial(mosaic_tpu.cluster_recall, config=config, interpret=interpret), mosaic_tpu.check
        ),
    }
    return dispatch(implementation, reference.cluster_recall, kernels, rows, blocks, number, count)
