"""`cluster_recall` on whatever the program runs on."""

import functools
from typing import Any, Literal

from jaxtyping import Array, Float, Int

from pallas_kernels.cluster_recall import mosaic_gpu, mosaic_tpu, reference
from pallas_kernels.cluster_recall.base import Blocks, check
from pallas_kernels.dispatch import Kernel, dispatch
from pallas_kernels.weighted_decode import Partials

Implementation = Literal["xla", "mosaic_tpu", "mosaic_gpu"]


def cluster_recall(
    rows: Float[Array, "B H R D"],
    blocks: Blocks,
    number: Int[Array, "B H K"],
    count: Int[Array, "B H K"],
    *,
    implementation: Implementation | None = None,
    config: mosaic_tpu.Config | mosaic_gpu.GpuConfig | None = None,
    interpret: Any = False,
) -> Partials:
    """Both sums of attention of the rows of every head over the blocks it recalls, in float32; see `reference`.

    Args:
        rows: queries that share what they recall: those of a kv head (H = H_kv, R of them), or of every query head of
            its own (H a multiple of H_kv; head h reads kv head h // (H / H_kv)).
        number: int32 numbers of blocks that there are.
        count: int32 tokens that are read of each, its first ones; 0 where nothing is.
        implementation: None: the kernel of the platform that the program is compiled for, where there is one and it can
            do this, XLA otherwise.
        config: of the kernel that it is made for; None: the default.
        interpret: of the kernel, as `pallas_call` takes it, or `plgpu.InterpretGPUParams`.

    Raises:
        ValueError: for shapes that do not fit, or an implementation that is not known.
        NotImplementedError: where the implementation that was asked for cannot do this, with the reason.
    """
    check(rows, blocks, number, count)
    for_tpu = config if isinstance(config, mosaic_tpu.Config) else None
    for_gpu = config if isinstance(config, mosaic_gpu.GpuConfig) else None
    kernels = {
        "mosaic_tpu": Kernel(
            functools.partial(mosaic_tpu.cluster_recall, config=for_tpu, interpret=interpret), mosaic_tpu.check
        ),
        "mosaic_gpu": Kernel(
            functools.partial(mosaic_gpu.cluster_recall, config=for_gpu, interpret=interpret),
            functools.partial(mosaic_gpu.check, interpret=interpret),
        ),
    }
    return dispatch("cluster_recall", implementation, reference.cluster_recall, kernels, rows, blocks, number, count)
