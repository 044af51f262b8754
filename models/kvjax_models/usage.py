"""The tokens, the time and the bytes of a call of `LanguageModel.generate`."""

import dataclasses

import kvjax
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.state import GenerationState


@dataclasses.dataclass(frozen=True)
class Usage:
    """The tokens, the time and the bytes of a generation, over all its sequences.

    Attributes:
        prompt_tokens: tokens of the prompts.
        new_tokens: new tokens, end-of-text tokens included.
        prefill_seconds: seconds until the first new token could be sampled, without compilation.
        decode_seconds: seconds of all decode steps, without compilation.
        compile_seconds: seconds of tracing and compilation.
        cache_bytes: bytes of the caches on the device.
        host_bytes: bytes of the caches in host memory.
        read_bytes: bytes of the caches that one decode step reads.
        full_cache_bytes: bytes of a full bfloat16 cache of the same capacity.
    """

    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    cache_bytes: int
    host_bytes: int
    read_bytes: int
    full_cache_bytes: int

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of decoding."""
        return self.new_tokens / self.decode_seconds if self.decode_seconds else 0.0


def cache_sizes(generator: Generator, state: GenerationState) -> dict[str, int]:
    """Returns the fields of `Usage` that are bytes.

    Args:
        generator: the generator.
        state: its last state.

    Returns:
        The bytes by the name of the field.
    """
    held = kvjax.cache_bytes(state.layers)
    return {
        "cache_bytes": held.device,
        "host_bytes": held.host,
        "read_bytes": sum(map(kvjax.read_bytes, state.layers)),
        "full_cache_bytes": generator.batch * sum(spec.full_cache_bytes(spec.capacity) for spec in generator.specs),
    }
