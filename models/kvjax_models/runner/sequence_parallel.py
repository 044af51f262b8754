"""Sequence parallelism for long prompts: the devices of a layer share the tokens, and in attention the heads.

Tensor parallelism, as in decoding, shards projections along heads and the MLP's width. It needs all tokens on every
device, and per layer each device receives four times the residual stream. With sequence parallelism it receives the
layer's weights instead, independent of the prompt's length: 1.7 GB for Llama-3.1-70B, whose residual stream of a
million tokens has 17 GB. `chunk_size` selects the scheme that transfers less. Before attention, queries move from the
device of their token to the device of their head, and back after it; keys and values of a layer are gathered once.

Tokens are arranged as M chunks of C tokens, [B, M, C, ...], and each chunk is sharded (`CHUNK_SPEC`), so that every
device has early and late tokens. If query heads cannot be shared, the devices along SEQUENCE share the queries of each
chunk in zigzag order, which balances the work of causal attention.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from kvjax.distributed.collectives import SEQUENCE, TENSOR
from kvjax.distributed.sharding import DATA
from kvjax_models.model.flash_attention import run_index
from kvjax_models.model.llama import Llama
from kvjax_models.sharding import parameter_specs, share_heads

# Neighbors along TENSOR have neighboring tokens, which form a run of one device along SEQUENCE.
TOKENS = (SEQUENCE, TENSOR)
CHUNK_SPEC = PartitionSpec(DATA, None, TOKENS)  # [B, M, C, ...]


def chunk_size(model: Llama, mesh: Mesh | None, batch: int, tokens: int, chunk: int) -> int:
    """Chooses between tensor and sequence parallelism.

    Args:
        tokens: length of the longest prompt.
        chunk: tokens per chunk on one device.

    Returns:
        The number of tokens that all devices of a layer process at a time: `chunk` with tensor parallelism. With
        sequence parallelism `chunk` per device, if that transfers less and adds at most a quarter of padding. Hybrid
        models always use tensor parallelism: a recurrent state needs the tokens in order.
    """
    if mesh is None or batch % mesh.shape[DATA] or model.config.recurrent_layers:
        return chunk
    size = chunk * math.prod(mesh.shape[axis] for axis in TOKENS)
    padded = -(-tokens // size) * size
    weights = sum(leaf.size for leaf in jax.tree.leaves(model.layers)) / len(model.layers)
    received = 4 * batch // mesh.shape[DATA] * padded * model.config.width
    return size if received > weights and padded <= 1.25 * tokens else chunk


def with_gathered_parameters(
    function: Callable[..., Any],
    mesh: Mesh,
    parameters: Any,
    query_heads: int,
    in_specs: tuple[PartitionSpec, ...],
    out_specs: Any,
) -> Callable[..., Any]:
    """Wraps a function in `shard_map` so that every device gathers the parameters and calls it with its own tokens.

    Args:
        function: takes the parameters and further arguments.
        parameters: sharded parameters of a model or of a layer.
        in_specs: partition specs of the further arguments.
        out_specs: partition specs of the results.

    Returns:
        A function of the further arguments.
    """
    specs = parameter_specs(parameters, query_heads, mesh)

    def gather(x: Array, spec: PartitionSpec) -> Array:
        """Gathers a parameter `x` that is sharded as `spec` says."""
        for axis, names in enumerate(spec):
            # One mesh axis at a time: XLA:TPU lowers a gather along two axes to an all-reduce of twice the bytes.
            for name in reversed((names,) if isinstance(names, str) else names or ()):
                x = jax.lax.all_gather(x, name, axis=axis, tiled=True)
        return x

    def call(parameters: Any, *args: Any) -> Any:
        return function(jax.tree.map(gather, parameters, specs), *args)

    sharded = jax.shard_map(call, mesh=mesh, in_specs=(specs, *in_specs), out_specs=out_specs, check_vma=False)
    return functools.partial(sharded, parameters)


class DeviceGroup(NamedTuple):
    """The devices that share a layer, as seen by one of them inside `shard_map`; by default a single device."""

    tensor: int = 1  # devices along TENSOR
    parts: int = 1  # devices along SEQUENCE
    heads: int = 1  # query heads per device along TENSOR
    shares_heads: bool = True  # devices along SEQUENCE share the query heads of a KV head; otherwise they share tokens

    @classmethod
    def from_mesh(cls, mesh: Mesh, heads: tuple[int, int], always_share_heads: bool = False) -> "DeviceGroup":
        """Returns the group of a mesh.

        Args:
            heads: numbers of query heads and of KV heads.
            always_share_heads: share heads even if some devices get fewer, for kernels that need all tokens.

        Returns:
            The group.
        """
        (query_heads, kv_heads), tensor, parts = heads, mesh.shape[TENSOR], mesh.shape[SEQUENCE]
        shares_heads = parts == 1 or share_heads(mesh, heads) or (always_share_heads and tensor == kv_heads)
        return cls(tensor, parts, query_heads // tensor, shares_heads)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.tensor * self.parts

    @property
    def runs(self) -> int:
        """The number of runs of consecutive queries that a chunk is divided into for attention."""
        return 1 if self.shares_heads else self.parts

    def device_index(self) -> Int[Array, ""] | int:
        """Returns the index of this device in the order of a chunk's tokens."""
        return 0 if self.devices == 1 else jax.lax.axis_index(TOKENS)

    def run(self) -> Int[Array, ""] | int:
        """Returns this device's run of the first chunk; see `run_index`."""
        return 0 if self.runs == 1 else jax.lax.axis_index(SEQUENCE)

    def first_shard(self, chunk: Int[Array, ""]) -> Int[Array, ""]:
        """Returns the first shard of this device's run of a chunk.

        Returns:
            The index of the shard, counted over all chunks.
        """
        return chunk * self.devices + run_index(chunk, self.runs, self.run()) * self.tensor

    def gather_tokens(self, x: Shaped[Array, "M B c H D"]) -> Shaped[Array, "M B C h D"]:
        """Gathers all tokens of this device's KV heads.

        Args:
            x: keys or values of this device's tokens, for all heads.

        Returns:
            Keys or values of all tokens, for this device's heads along TENSOR.
        """
        x = self._all_to_all(x, TENSOR, split=3, concat=2)
        return x if self.parts == 1 else jax.lax.all_gather(x, SEQUENCE, axis=2, tiled=True)

    def tokens_to_heads(
        self, x: Shaped[Array, "M B c H D"], chunk: Int[Array, ""] | int = 0
    ) -> Shaped[Array, "M B q h D"]:
        """Moves queries from the devices of their tokens to the devices of their heads.

        Args:
            x: queries of this device's tokens.
            chunk: index of the first chunk.

        Returns:
            Queries of this device's heads and all tokens, or its run of each chunk.
        """
        x = self._all_to_all(x, TENSOR, split=3, concat=2)
        if not self.shares_heads:
            return self._reverse_odd_chunks(x, chunk)
        return self._all_to_all(self._pad_heads(x, 3), SEQUENCE, split=3, concat=2)

    def heads_to_tokens(
        self, x: Shaped[Array, "M B q h D"], chunk: Int[Array, ""] | int = 0
    ) -> Shaped[Array, "M B c H D"]:
        """Moves attention output back to the devices of its tokens; the inverse of `tokens_to_heads`.

        Args:
            x: attention output of this device's queries.
            chunk: index of the first chunk.

        Returns:
            Attention output of this device's tokens.
        """
        if not self.shares_heads:
            x = self._reverse_odd_chunks(x, chunk)
        elif self.parts > 1:
            x = self._all_to_all(x, SEQUENCE, split=2, concat=3)[:, :, :, : self.heads]
        return self._all_to_all(x, TENSOR, split=2, concat=3)

    def local_heads(self, x: Shaped[Array, "H"]) -> Shaped[Array, "h"]:
        """Selects the values of the query heads with which this device attends.

        Args:
            x: one value per query head of the model, such as attention sink logits.

        Returns:
            One value per query head of this device.
        """
        if self.devices == 1:
            return x
        x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(TENSOR) * self.heads, self.heads)
        if not self.shares_heads:
            return x
        x = self._pad_heads(x, 0).reshape(self.parts, -1)
        return jax.lax.dynamic_index_in_dim(x, jax.lax.axis_index(SEQUENCE), keepdims=False)

    def take_tokens(self, x: Float[Array, "B M c W"], positions: Int[Array, "B w"]) -> Float[Array, "B v W"]:
        """Returns the values of tokens, sharded among the devices in the order of `positions`.

        Args:
            x: values of this device's tokens.
            positions: positions of the tokens; the values of positions out of range are arbitrary.
        """
        batch, chunks, size, width = x.shape
        offset = positions % (size * self.devices) - self.device_index() * size
        index = positions // (size * self.devices) * size + offset
        values = jnp.take_along_axis(
            x.reshape(batch, chunks * size, width), jnp.clip(index, 0, chunks * size - 1)[..., None], axis=1
        )
        if self.devices == 1:
            return values
        is_local = (offset >= 0) & (offset < size)
        return jax.lax.psum_scatter(jnp.where(is_local[..., None], values, 0), TOKENS, scatter_dimension=1, tiled=True)

    def _reverse_odd_chunks(self, x: Array, chunk: Int[Array, ""] | int) -> Array:
        """Reverses the order of devices along SEQUENCE in odd chunks; its own inverse."""
        reverse = jax.lax.ppermute(x, SEQUENCE, [(index, self.parts - 1 - index) for index in range(self.parts)])
        is_odd = (chunk + jnp.arange(len(x))) % 2 == 1
        return jnp.where(is_odd.reshape(-1, *(1,) * (x.ndim - 1)), reverse, x)

    def _pad_heads(self, x: Array, axis: int) -> Array:
        """Pads heads so that the devices along SEQUENCE divide them."""
        padding = -x.shape[axis] % self.parts
        return x if not padding else jnp.pad(x, [(0, padding if i == axis else 0) for i in range(x.ndim)])

    def _all_to_all(self, x: Array, axis: str, *, split: int, concat: int) -> Array:
        if self.devices == 1 or jax.lax.axis_size(axis) == 1:
            return x
        return jax.lax.all_to_all(x, axis, split_axis=split, concat_axis=concat, tiled=True)


def join_chunks(chunks: Shaped[Array, "M B C *D"]) -> Shaped[Array, "B N *D"]:
    """Returns the tokens of consecutive chunks as one axis."""
    return chunks.swapaxes(0, 1).reshape(chunks.shape[1], -1, *chunks.shape[3:])


def split_into_chunks(x: Shaped[Array, "B N *D"], chunks: int) -> Shaped[Array, "M B C *D"]:
    """Returns tokens as chunks; the inverse of `join_chunks`."""
    return x.reshape(x.shape[0], chunks, -1, *x.shape[2:]).swapaxes(0, 1)
