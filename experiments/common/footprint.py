"""What a cache takes and what it is compared by: bytes held, or bytes read per token for policies that recall."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import kvjax
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.state import GenerationState


class CacheUse(NamedTuple):
    """Bytes of one sequence over all layers."""

    device_bytes: int
    host_bytes: int
    read_bytes: int  # per generated token
    recalls: bool  # whether everything is kept and a part is read
    fraction: float  # of exact's bytes: of those held, or of those read where it recalls


def cache_use(generator: Generator, state: GenerationState, tokens: int) -> CacheUse:
    """What the caches of a state take, where exact holds so many tokens."""
    held = kvjax.cache_bytes(state.layers)
    device, host = held.device // generator.batch, held.host // generator.batch
    read = sum(map(kvjax.read_bytes, state.layers)) // generator.batch
    recalls = any(policy.is_retrieval for policy in generator.policies)
    exact = generator.specs[0].full_cache_bytes(tokens) * len(generator.policies)
    return CacheUse(device, host, read, recalls, (read if recalls else device) / exact)


def row_fields(uses: Sequence[CacheUse]) -> dict[str, Any]:
    """The fields of a row of results, as means over sequences."""
    device, host, read, _, fraction = np.mean(uses, axis=0).tolist()
    return {
        "budget_fraction": fraction,
        "device_bytes": round(device),
        "host_bytes": round(host),
        "read_bytes_per_token": round(read),
    }
