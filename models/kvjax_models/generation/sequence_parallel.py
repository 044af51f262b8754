"""Long prompts on many devices: each of those that share a layer reads tokens of its own with all of the layer's
weights, and attends with heads of its own.

A product that is cut along heads or along the MLP's width, as decoding's are, needs the tokens of all devices, and its
sums go to all: per layer a device receives four times the residual stream. Cut along tokens, it receives the layer's
weights instead, whatever the prompt: 1.7 GB for Llama-3.1-70B, whose stream of a million tokens is 17 GB. So prompts
are cut where that is less (`piece`), and the stream never lies whole anywhere. Around attention queries go from the
device of their token to that of their head and back; keys and values of a layer are gathered once.

Tokens lie [B, M, C, ...], in M pieces of C tokens, and each piece is cut among the devices (`CHUNKS`), so that every
device has early and late ones. Where query heads cannot be shared, those along SEQUENCE attend with the queries of a run
of each piece, in an order that turns from piece to piece: all have the same work, but for an odd piece.
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

# Neighbours along TENSOR have neighbouring tokens: together, those of a run that a device along SEQUENCE attends with.
TOKENS = (SEQUENCE, TENSOR)
CHUNKS = PartitionSpec(DATA, None, TOKENS)  # [B, M, C, ...]


def chunk_size(model: Llama, mesh: Mesh | None, batch: int, tokens: int, chunk: int) -> int:
    """Tokens that all devices read at a time of prompts of so many: `chunk` where the prompts lie whole on each of the
    devices that share a layer; `chunk` for every device where they are cut among these, which no more than a quarter of
    padding is worth."""
    if mesh is None or batch % mesh.shape[DATA]:
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
    given: tuple[PartitionSpec, ...],
    result: PartitionSpec | tuple[PartitionSpec, ...],
) -> Callable[..., Any]:
    """What a function does on every device with parameters, a model's or a layer's of so many query heads, which are
    whole there, and with what lies so (`given`); its results lie so, too."""
    specs = parameter_specs(parameters, query_heads, mesh)

    def gathered(x: Array, spec: PartitionSpec) -> Array:
        for axis, names in enumerate(spec):
            # One mesh axis behind the other: TPUs' compiler makes a sum, twice the bytes, of a gather along two.
            for name in reversed((names,) if isinstance(names, str) else names or ()):
                x = jax.lax.all_gather(x, name, axis=axis, tiled=True)
        return x

    def of_device(parameters: Any, *given: Any) -> Any:
        return function(jax.tree.map(gathered, parameters, specs), *given)

    apart = jax.shard_map(of_device, mesh=mesh, in_specs=(specs, *given), out_specs=result, check_vma=False)
    return functools.partial(apart, parameters)


class DeviceGroup(NamedTuple):
    """The devices that share a layer, as each of them sees them inside `jax.shard_map`; by default it is alone."""

    tensor: int = 1  # devices along TENSOR
    parts: int = 1  # devices along SEQUENCE
    heads: int = 1  # of queries, of a device along TENSOR
    shares_heads: bool = True  # whether those along SEQUENCE share the query heads of a kv head; else they share tokens

    @classmethod
    def of(cls, mesh: Mesh, heads: tuple[int, int], always_heads: bool = False) -> "DeviceGroup":
        """The group of a mesh, for a layer with so many heads of queries, and of keys.

        Args:
            always_heads: share heads where some devices get fewer, too, for kernels that cannot do with a part of the
                tokens.
        """
        (query_heads, kv_heads), tensor, parts = heads, mesh.shape[TENSOR], mesh.shape[SEQUENCE]
        shares = parts == 1 or share_heads(mesh, heads) or (always_heads and tensor == kv_heads)
        return cls(tensor, parts, query_heads // tensor, shares)

    @property
    def devices(self) -> int:
        return self.tensor * self.parts

    @property
    def runs(self) -> int:
        """Runs of consecutive queries that a piece is cut into for attention."""
        return 1 if self.shares_heads else self.parts

    def place(self) -> Int[Array, ""] | int:
        """The number of this device, in the order in which tokens of a piece lie along them."""
        return 0 if self.devices == 1 else jax.lax.axis_index(TOKENS)

    def run(self) -> Int[Array, ""] | int:
        """The number of this device's run in the first piece, and every other; see `run_index`."""
        return 0 if self.runs == 1 else jax.lax.axis_index(SEQUENCE)

    def first(self, piece: Int[Array, ""]) -> Int[Array, ""]:
        """The share of a device, of all pieces', with which this device's run of a piece begins."""
        return piece * self.devices + run_index(piece, self.runs, self.run()) * self.tensor

    def gathered(self, x: Shaped[Array, "M B c H D"]) -> Shaped[Array, "M B C h D"]:
        """Of all tokens, this device's heads along TENSOR."""
        x = self._exchanged(x, TENSOR, split=3, joined=2)
        return x if self.parts == 1 else jax.lax.all_gather(x, SEQUENCE, axis=2, tiled=True)

    def to_heads(self, x: Shaped[Array, "M B c H D"], piece: Int[Array, ""] | int = 0) -> Shaped[Array, "M B q h D"]:
        """Of queries of this device's tokens, those that it attends with: its heads of all tokens, or of its run of
        pieces from that one on."""
        x = self._exchanged(x, TENSOR, split=3, joined=2)
        if not self.shares_heads:
            return self._turned(x, piece)
        return self._exchanged(self._padded(x, 3), SEQUENCE, split=3, joined=2)

    def to_tokens(self, x: Shaped[Array, "M B q h D"], piece: Int[Array, ""] | int = 0) -> Shaped[Array, "M B c H D"]:
        """The way back."""
        if not self.shares_heads:
            x = self._turned(x, piece)
        elif self.parts > 1:
            x = self._exchanged(x, SEQUENCE, split=2, joined=3)[:, :, :, : self.heads]
        return self._exchanged(x, TENSOR, split=2, joined=3)

    def own_heads(self, x: Shaped[Array, "H"]) -> Shaped[Array, "h"]:
        """Of what all query heads have, that of those which this device attends with."""
        if self.devices == 1:
            return x
        x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(TENSOR) * self.heads, self.heads)
        if not self.shares_heads:
            return x
        x = self._padded(x, 0).reshape(self.parts, -1)
        return jax.lax.dynamic_index_in_dim(x, jax.lax.axis_index(SEQUENCE), keepdims=False)

    def rows_at(self, x: Float[Array, "B M c W"], positions: Int[Array, "B w"]) -> Float[Array, "B v W"]:
        """The rows of tokens at these positions, cut among the devices as they come; those of no token are any."""
        batch, pieces, own, width = x.shape
        offset = positions % (own * self.devices) - self.place() * own
        place = positions // (own * self.devices) * own + offset
        rows = jnp.take_along_axis(
            x.reshape(batch, pieces * own, width), jnp.clip(place, 0, pieces * own - 1)[..., None], axis=1
        )
        if self.devices == 1:
            return rows
        here = (offset >= 0) & (offset < own)
        return jax.lax.psum_scatter(jnp.where(here[..., None], rows, 0), TOKENS, scatter_dimension=1, tiled=True)

    def _turned(self, x: Array, piece: Int[Array, ""] | int) -> Array:
        """Runs of every other piece in reverse order, or back from it."""
        turned = jax.lax.ppermute(x, SEQUENCE, [(one, self.parts - 1 - one) for one in range(self.parts)])
        odd = (piece + jnp.arange(len(x))) % 2 == 1
        return jnp.where(odd.reshape(-1, *(1,) * (x.ndim - 1)), turned, x)

    def _padded(self, x: Array, axis: int) -> Array:
        """Heads, and such of nobody for devices along SEQUENCE to divide them."""
        more = -x.shape[axis] % self.parts
        return x if not more else jnp.pad(x, [(0, more if one == axis else 0) for one in range(x.ndim)])

    def _exchanged(self, x: Array, axis: str, *, split: int, joined: int) -> Array:
        if self.devices == 1 or jax.lax.axis_size(axis) == 1:
            return x
        return jax.lax.all_to_all(x, axis, split_axis=split, concat_axis=joined, tiled=True)
