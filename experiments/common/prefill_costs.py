"""The least that exact prefill costs each device of a mesh, counted from shapes: what it multiplies, what it receives
from others, and what it holds of the residual stream.

Shares are those that the code itself takes, of the device that does most.
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

BYTES = 2  # of a number


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one device does, over all layers, and what it holds of the residual stream."""

    way: str
    attention_flops: int
    dense_flops: int
    received_bytes: int
    stream_bytes: int

    def seconds(self, chip: dict[str, float]) -> tuple[float, float, float]:
        """Of attention, of all other products, and of receiving, at the published rates of a chip."""
        flops = 1e12 * chip["bfloat16_tflops"]
        received = self.received_bytes / (1e9 * chip["interconnect_gb_s"])
        return self.attention_flops / flops, self.dense_flops / flops, received


def ways(model: Llama, mesh: Mesh, batch: int, tokens: int, chunk: int) -> list[Cost]:
    """Costs of ways to read prompts, the last of which is taken: all devices that share a kv head attend with all of
    its query heads; they share these, where they divide; they share tokens, where prompts are long.

    Args:
        model: abstract, its parameters on the mesh.
    """
    config, rows = model.config, batch // mesh.shape[DATA]
    heads, size = (config.query_heads, config.kv_heads), chunk_size(model, mesh, batch, tokens, chunk)
    found = [_whole("all query heads of a kv head", model, mesh, rows, tokens, mesh.shape[TENSOR])]
    if share_heads(mesh, heads) and mesh.shape[SEQUENCE] > 1:
        found.append(_whole("query heads shared", model, mesh, rows, tokens, mesh.shape[TENSOR] * mesh.shape[SEQUENCE]))
    if size > chunk:
        found.append(_cut("tokens shared", model, DeviceGroup.from_mesh(mesh, heads), rows, -(-tokens // size), size))
    return found


def _whole(way: str, model: Llama, mesh: Mesh, rows: int, tokens: int, sharing: int) -> Cost:
    """Prompts lie whole on every device of a group; products are cut along heads and the MLP's width."""
    config, tensor, parts = model.config, mesh.shape[TENSOR], mesh.shape[SEQUENCE]
    stream = rows * tokens * config.width
    # A sum over so many devices brings each of them twice what it gives. Of the stream there are two per layer; where
    # devices share a kv head, each takes a part of what goes into its queries, keys and values.
    made = rows * tokens * (config.query_heads + 2 * config.kv_heads) * config.head_dim // tensor
    summed = 2 * stream * 2 * (tensor * parts - 1) / (tensor * parts) + made * 2 * (parts - 1) / parts
    return Cost(
        way,
        _attention_flops(model, rows, config.query_heads // sharing, _asked(model, tokens).positions()),
        2 * rows * tokens * _active(model, part=True),
        round(BYTES * config.layers * summed),
        BYTES * stream,
    )


def _cut(way: str, model: Llama, group: DeviceGroup, rows: int, pieces: int, size: int) -> Cost:
    """Every device of a group has tokens of its own."""
    config, own = model.config, rows * pieces * size // group.devices
    # Queries go to their heads and come back, all of them once more where runs turn; keys and values come from all
    # other devices.
    sharing = group.devices if group.shares_heads else group.tensor
    queries = 2 * own * config.query_heads // sharing * (sharing - 1) + (group.runs > 1) * 2 * own * config.query_heads
    stored = 2 * own * config.kv_heads // group.tensor * (group.devices - 1)
    weights = sum(leaf.size - _part(leaf) for leaf in jax.tree.leaves(model.layers))
    latest = _asked(model, pieces * size, pieces, group.runs).positions(group.runs - 1)
    return Cost(
        way,
        _attention_flops(model, rows, config.query_heads // sharing, latest),
        2 * own * _active(model),
        BYTES * (weights + config.layers * (queries + stored) * config.head_dim),
        BYTES * own * config.width,
    )


def _asked(model: Llama, tokens: int, pieces: int = 1, runs: int = 1) -> AttentionSpec:
    dtype: Any = np.float16
    return AttentionSpec(dtype, tokens, model.config.head_dim, None, None, False, pieces, runs)


def _attention_flops(model: Llama, rows: int, heads: int, positions: Any) -> int:
    """Two products of queries at these positions with all that they see, in all layers."""
    windows = (model.config.window(layer) or positions[-1] + 1 for layer in range(model.config.layers))
    pairs = sum(int(np.sum(np.minimum(positions + 1, window))) for window in windows)
    return 4 * rows * heads * model.config.head_dim * pairs


def _active(model: Llama, part: bool = False) -> int:
    """Parameters of the layers, or a device's part of them, that a token is multiplied by: of experts those that it
    takes."""
    config = model.config

    def share(leaf: Any) -> float:
        return config.experts_per_token / config.experts if leaf.ndim == 3 and leaf.shape[0] == config.experts else 1.0

    return round(sum(share(leaf) * (_part(leaf) if part else leaf.size) for leaf in jax.tree.leaves(model.layers)))


def _part(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape))
