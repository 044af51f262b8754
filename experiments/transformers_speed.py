"""Measures decode steps of transformers with each of its caches, in a process without JAX's device memory.

    python -m experiments.transformers_speed --shape llama-3.1-8b --context_tokens 32768 --results rows.jsonl

Needs torch and transformers. Weights and the context are random. Without a GPU, the cache in a CUDA graph is left out.
"""

import dataclasses
import gc
import pathlib

from experiments.common.flags import Flags, repeatable, run_command
from experiments.common.output import append_row
from experiments.common.shapes import find_shape, first_layers
from experiments.common.statistics import Estimate, median_interval
from experiments.common.timing import interleaved_seconds
from experiments.common.transformers_decode import CACHES, CacheKind, TransformersWriter
from kvjax_models.model.config import LlamaConfig
from pallas_kernels.benchmarking import describe


@dataclasses.dataclass(frozen=True)
class Options(Flags):
    """Options of the command."""

    shape: str = "small"  # Sizes of the model: a name of `common.shapes`, or a directory with a config.json.
    layers: int | None = None  # Layers of the model; by default all.
    dtype: str = "bfloat16"
    context_tokens: tuple[int, ...] = repeatable(4096)  # Tokens in the cache; repeatable.
    tokens: int = 32  # Tokens of a timed run.
    repetitions: int = 7  # Timed runs, at least 6.
    cache: tuple[CacheKind, ...] = repeatable(*CACHES, choices=CACHES)  # Repeatable.
    results: str | None = None  # File of JSON lines, to which a row per cache is appended.


def measure(config: LlamaConfig, options: Options, context: int, cache: CacheKind) -> Estimate:
    """Returns the milliseconds per token."""
    writer = TransformersWriter(config, options.dtype, context, options.tokens, cache)
    return median_interval(1e3 * interleaved_seconds([writer], options.repetitions)[0] / options.tokens)


def main(options: Options) -> None:
    """Prints and writes a row per context and cache."""
    import torch

    config = first_layers(find_shape(options.shape), options.layers)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    for context in options.context_tokens:
        for cache in options.cache:
            if cache == CACHES[2] and device == "cpu":
                continue
            row = {"measure": "transformers", "setting": f"transformers, {cache}", "context_tokens": context}
            row |= {"model": options.shape, "dtype": options.dtype, "device": device, "torch": torch.__version__}
            try:
                row["ms_per_token"] = measure(config, options, context, cache)
                if device != "cpu":
                    row["peak_bytes"] = torch.cuda.max_memory_allocated()
            except Exception as error:  # the other caches are measured
                row["problem"] = describe(error)
            gc.collect()  # the model's memory is free before the next one is created
            if device != "cpu":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            print(row, flush=True)
            if options.results is not None:
                append_row(pathlib.Path(options.results), row)


if __name__ == "__main__":
    run_command(main, Options)
