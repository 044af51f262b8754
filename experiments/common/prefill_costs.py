"""Lower bounds of the cost of exact prefill per device of a mesh: operations, received bytes, residual stream.

They follow from shapes, for the device with the most work.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from kvjax.distributed.collectives import SEQUENCE, TENSOR
from kvjax.distributed.sharding import DATA
from kvjax_models.generation.sequence_parallel import DeviceGroup, chunk_size
from kvjax_models.model.flash_attention import AttentionSpec
from kvjax_models.model.llama import Llama
from kvjax_models.sharding import share_heads

BYTES = 2  # per value


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one device over all layers, and its bytes of the residual stream."""

    way: str
    attention_flops: int
    dense_flops: int
    received_bytes: int
    stream_bytes: int

    def seconds(self, chip: dict[str, float]) -> tuple[float, float, float]:
        """Returns the seconds of attention, other products and communication, at the published rates of a chip."""
        flops = 1e12 * chip["bfloat16_tflops"]
        received = self.received_bytes / (1e9 * chip["interconnect_gb_s"])
        return self.attention_flops / flops, self.dense_flops / flops, received


def ways(model: Llama, mesh: Mesh, batch: int, tokens: int, chunk: int) -> list[Cost]:
    """Returns the costs of several ways of prefill; the library uses the last one.

    Devices that share a KV head replicate its query heads, share them if the number allows it, or share the tokens of
    long prompts.

    Args:
        model: abstract model with parameters on the mesh.
        mesh: the mesh.
        batch: batch rows.
        tokens: tokens of the prompts.
        chunk: tokens per chunk.

    Returns:
        The costs.
    """
    config, rows = model.config, batch // mesh.shape[DATA]
    heads, size = (config.query_heads, config.kv_heads), chunk_size(model, mesh, batch, tokens, chunk)
    costs = [_by_heads("query heads replicated", model, mesh, rows, tokens, mesh.shape[TENSOR])]
    if share_heads(mesh, heads) and mesh.shape[SEQUENCE] > 1:
        costs.append(
            _by_heads("query heads shared", model, mesh, rows, tokens, mesh.shape[TENSOR] * mesh.shape[SEQUENCE])
        )
    if size > chunk:
        costs.append(
            _by_tokens("tokens shared", model, DeviceGroup.from_mesh(mesh, heads), rows, -(-tokens // size), size)
        )
    return costs


def _by_heads(way: str, model: Llama, mesh: Mesh, rows: int, tokens: int, sharing: int) -> Cost:
    """Returns the cost if every device of a group has all tokens, and products are sharded over heads and MLP width."""
    config, tensor, parts = model.config, mesh.shape[TENSOR], mesh.shape[SEQUENCE]
    stream = rows * tokens * config.width
    # An all-reduce transfers about twice the array; there are two per layer. Devices that share a KV head also gather
    # their parts of the projections' inputs.
    made = rows * tokens * (config.query_heads + 2 * config.kv_heads) * config.head_dim // tensor
    summed = 2 * stream * 2 * (tensor * parts - 1) / (tensor * parts) + made * 2 * (parts - 1) / parts
    return Cost(
        way,
        _attention_flops(model, rows, config.query_heads // sharing, _attention_spec(model, tokens).positions()),
        2 * rows * tokens * _active(model, part=True),
        round(BYTES * config.layers * summed),
        BYTES * stream,
    )


def _by_tokens(way: str, model: Llama, group: DeviceGroup, rows: int, pieces: int, size: int) -> Cost:
    """Returns the cost if the devices of a group share the tokens."""
    config, own = model.config, rows * pieces * size // group.devices
    # Queries are exchanged between tokens and heads, twice if there are several runs; keys and values are gathered.
    sharing = group.devices if group.shares_heads else group.tensor
    queries = 2 * own * config.query_heads // sharing * (sharing - 1) + (group.runs > 1) * 2 * own * config.query_heads
    stored = 2 * own * config.kv_heads // group.tensor * (group.devices - 1)
    weights = sum(leaf.size - _part(leaf) for leaf in jax.tree.leaves(model.layers))
    latest = _attention_spec(model, pieces * size, pieces, group.runs).positions(group.runs - 1)
    return Cost(
        way,
        _attention_flops(model, rows, config.query_heads // sharing, latest),
        2 * own * _active(model),
        BYTES * (weights + config.layers * (queries + stored) * config.head_dim),
        BYTES * own * config.width,
    )


def _attention_spec(model: Llama, tokens: int, pieces: int = 1, runs: int = 1) -> AttentionSpec:
    dtype: Any = np.float16
    return AttentionSpec(dtype, tokens, model.config.head_dim, None, None, False, pieces, runs)


def _attention_flops(model: Llama, rows: int, heads: int, positions: Any) -> int:
    """Returns the operations of both attention products for queries at `positions`, in all layers."""
    windows = (model.config.window(layer) or positions[-1] + 1 for layer in range(model.config.layers))
    pairs = sum(int(np.sum(np.minimum(positions + 1, window))) for window in windows)
    return 4 * rows * heads * model.config.head_dim * pairs


def _active(model: Llama, part: bool = False) -> int:
    """Returns the number of parameters that a token is multiplied with; of experts only the selected ones."""
    config = model.config

    def share(leaf: Any) -> float:
        return config.experts_per_token / config.experts if leaf.ndim == 3 and leaf.shape[0] == config.experts else 1.0

    return round(sum(share(leaf) * (_part(leaf) if part else leaf.size) for leaf in jax.tree.leaves(model.layers)))


def _part(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape))
