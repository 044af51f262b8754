"""Counts the bytes that kernels move between main memory and the chip.

Blocks of the pipeline are counted by the index maps of their specs: a block is fetched when its index changes from one
step of the grid to the next, and an output block is written likewise. Copies that a kernel starts itself are recorded
by the interpreter. Estimates of the kernels are not used.
"""

import contextlib
import importlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


class Moved(NamedTuple):
    """Bytes that moved between main memory and the chip."""

    blocks: int  # fetched and written by pipelines
    copies: int  # started by kernels
    scalars: int  # prefetched

    @property
    def total(self) -> int:
        return sum(self)


def moved(function: Callable[..., Any], *arguments: Any, run: bool = True) -> Moved:
    """Counts the bytes that the kernels of a function move.

    Args:
        function: A function that is not jitted.
        *arguments: Its arguments.
        run: Whether to run the kernels, interpreted by `pltpu.InterpretParams`, to record their copies. Otherwise their
            results are zeros, which is enough for kernels that only use the pipeline.

    Returns:
        The bytes of all kernels.
    """
    calls: list[tuple[int, int]] = []
    real = pl.pallas_call

    def counting(kernel, *args, grid_spec, **kwargs):
        call = real(kernel, *args, grid_spec=grid_spec, **kwargs)

        def called(*operands):
            if run:
                results = call(*operands)
            else:
                results = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(call, *operands))
            scalars = operands[: grid_spec.num_scalar_prefetch]
            arrays = [*operands[len(scalars) :], *jax.tree.leaves(results)]
            specs = [*grid_spec.in_specs, *grid_spec.out_specs]
            blocks = [_block_bytes(*pair, grid_spec.grid, scalars) for pair in zip(specs, arrays, strict=True)]
            calls.append((sum(blocks), sum(x.nbytes for x in scalars)))
            return results

        return called

    with mock.patch.object(pl, "pallas_call", counting), _recorded_copies() as copies:
        jax.block_until_ready(function(*arguments))
    assert calls, "no kernel was called"
    return Moved(sum(blocks for blocks, _ in calls), sum(copies), sum(scalars for _, scalars in calls))


def _block_bytes(spec: pl.BlockSpec, array: Any, grid: tuple[int, ...], scalars: tuple[Any, ...]) -> int:
    """Returns the bytes of an operand's blocks, clipped to the array, whenever the block changes."""
    if spec.memory_space in (pl.ANY, pltpu.HBM):
        return 0  # the kernel copies it
    if spec.index_map is None or spec.block_shape is None:
        return array.nbytes
    steps = np.array(list(itertools.product(*map(range, grid))), np.int32).reshape(-1, len(grid))
    numbers = jax.vmap(lambda step: spec.index_map(*step, *scalars))(steps)
    number = np.stack([np.broadcast_to(x, len(steps)) for x in numbers], axis=1)
    changed = np.append(True, (number[1:] != number[:-1]).any(axis=1))
    size = np.array([1 if length is None else length for length in spec.block_shape])
    within = np.clip(np.array(array.shape) - number * size, 0, size)
    return int(within.prod(axis=1)[changed].sum()) * array.dtype.itemsize


@contextlib.contextmanager
def _recorded_copies() -> Iterator[list[int]]:
    """Records the bytes of every copy to or from main memory."""
    sizes: list[int] = []
    read = interpreter.DMA.execute_read
    main_memory = {interpreter.TPU_MEMORY_SPACE_IDXS[space] for space in (pl.ANY, pltpu.HBM)}

    def recording(self):
        before = self.data
        read(self)
        if before is None and self.data is not None and main_memory & {self.src_memory_space, self.dst_memory_space}:
            sizes.append(self.data_size)

    with mock.patch.object(interpreter.DMA, "execute_read", recording):
        yield sizes


def copied_for_gpu(function: Callable[..., Any], *arguments: Any) -> int:
    """Returns the bytes that kernels interpreted by `plgpu.InterpretGPUParams` copy between main and shared memory.

    The few numbers that they read from main memory directly are not counted.
    """
    interpreter = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks")
    sizes: list[int] = []
    copy = interpreter.AsyncCopyTask.__call__

    def recording(self, *given):
        buffer = interpreter._get_shared_memory().buffer_shape_and_dtype(self.src_allocation_key)
        sizes.append(math.prod(self.src_access.shape) * buffer.dtype.itemsize)
        return copy(self, *given)

    with mock.patch.object(interpreter.AsyncCopyTask, "__call__", recording):
        jax.block_until_ready(function(*arguments))
    assert sizes, "nothing was copied"
    return sum(sizes)


def check(actual: int, minimum: int) -> None:
    """Checks that at most 5% more than the necessary bytes move."""
    assert minimum <= actual <= 1.05 * minimum
