"""Block stores in host memory, with the blocks of the last steps cached on the device."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, Shaped

from kvjax.attention import AttentionStats
from kvjax.block_cache import BlockCache, init_block_cache
from kvjax.block_store import BlockStore
from kvjax.combinators.combined import CombinedPolicies
from kvjax.policy import Policy, Prompt, check_min
from kvjax.segment import BlockSelection, BlockStoreRead, SegmentLike
from kvjax.spec import CacheSpec
from kvjax.staging import Tokens
from kvjax.state import state
from pallas_kernels.weighted_decode import SLOT_TILE


@state
class HostMemoryState:
    """A policy's state whose block stores are in host memory."""

    inner: Any
    block_caches: tuple[BlockCache, ...]  # one per `BlockStoreRead` of the policy


@dataclasses.dataclass(frozen=True)
class HostMemory(CombinedPolicies[HostMemoryState]):
    """Keeps the block stores of a retrieval policy in host memory.

    The device holds the index, the window and the blocks that the last `steps` appended tokens selected. Only missing
    blocks move. Results do not change. `BlockCache.requested` and `BlockCache.hits` count blocks.

    On a backend without host memory a warning is given and everything stays on the device. Devices cannot share the
    blocks of one KV head in host memory.

    Attributes:
        policy: a retrieval policy.
        steps: steps whose blocks are cached (R); 0 moves every block that is read.

    Reference:
        ClusterKV, section IV, where clusters are cached instead of blocks.
    """

    policy: Policy
    steps: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_min(0, steps=self.steps)
        if isinstance(self.policy, HostMemory) or not self.policy.is_retrieval:
            raise ValueError(f"HostMemory needs a retrieval policy whose blocks are on the device, got {self.policy}")

    @property
    def policies(self) -> tuple[Policy, ...]:  # type: ignore[override]
        """The policy."""
        return (self.policy,)

    def for_layer(self, spec: CacheSpec) -> Policy:
        """Returns the policy of one layer.

        Returns:
            A `HostMemory` of `policy.for_layer(spec)`; that policy alone if it is not a retrieval policy.
        """
        policy = self.policy.for_layer(spec)
        return dataclasses.replace(self, policy=policy) if policy.is_retrieval else policy

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> HostMemoryState:
        """Returns an empty state, with block stores in host memory and empty block caches on the device.

        Args:
            row_keys: one PRNG key per row, for the policy.

        Returns:
            The state.

        Raises:
            ValueError: if several devices share a KV head (`spec.sequence_shards`).
        """
        if spec.sequence_shards > 1:
            raise ValueError(
                f"HostMemory: {spec.sequence_shards} devices share a KV head, whose blocks cannot be shared"
            )
        inner = self.policy.init(spec, row_keys)
        caches = []
        for read in self.policy.segments(inner, jnp.zeros((spec.batch, 1), jnp.int32)):
            if not isinstance(read, BlockStoreRead):
                continue
            heads = spec.kv_heads if read.kv_heads is None else len(read.kv_heads)
            query = jnp.zeros((spec.batch, 1, heads * spec.query_heads // spec.kv_heads, spec.head_dim))
            blocks = jax.eval_shape(lambda read=read, query=query: _select(read, query).block_indices)
            caches.append(init_block_cache(blocks, read.store.entries, self.steps))
        return HostMemoryState(to_host(inner), tuple(caches))

    def prefill(self, state: HostMemoryState, prompt: Prompt) -> HostMemoryState:
        """Compresses a prompt on the device, then moves the block stores to host memory.

        Returns:
            The state.
        """
        on_device = _map_stores(state.inner, lambda x: jnp.zeros(x.shape, x.dtype))
        return HostMemoryState(to_host(self.policy.prefill(on_device, prompt)), state.block_caches)

    def segments(self, state: HostMemoryState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        """Returns the policy's segments and block stores, the latter with their block caches.

        Args:
            num_visible_staged: int32 number of staged tokens that each query attends to.

        Returns:
            Segments, and reads of block stores in host memory.
        """
        caches = iter(state.block_caches)
        return tuple(
            dataclasses.replace(one, block_cache=next(caches), select=functools.partial(_select, one))
            if isinstance(one, BlockStoreRead)
            else one
            for one in self.policy.segments(state.inner, num_visible_staged)
        )

    def observe(self, state: HostMemoryState, stats: AttentionStats) -> HostMemoryState:
        """Stores the block caches that attention updated, and passes the statistics to the policy.

        Args:
            stats: attention statistics, which hold the block caches after the step.

        Returns:
            The updated state.
        """
        caches = tuple(one for one in stats.segments if isinstance(one, BlockCache))
        return HostMemoryState(self.policy.observe(state.inner, stats), caches)

    def compact(self, state: HostMemoryState, new: Tokens) -> HostMemoryState:
        """Moves the staged tokens into the policy's state; new blocks are written to host memory."""
        return HostMemoryState(self.policy.compact(state.inner, new), state.block_caches)

    def layer_carry(self, state: HostMemoryState, prompt: Prompt) -> Shaped[Array, "B H_kv *N"] | None:
        """Returns the policy's array for the next layer.

        Args:
            prompt: the prompt, with the previous layer's carry.

        Returns:
            An array with leading axes [B, H_kv], or None.
        """
        return self.policy.layer_carry(state.inner, prompt)


def _select(read: BlockStoreRead, query: Float[Array, "B 1 H_q D"]) -> BlockSelection:
    """Selects blocks, and adds empty ones: attention reads the fetched blocks as a store of a multiple of 8 slots."""
    selection, block_size = read.select(query), read.store.entries.shape[3]
    count = selection.block_indices.shape[2]
    padding = ((0, 0), (0, 0), (0, -count % (SLOT_TILE // math.gcd(SLOT_TILE, block_size))))
    return selection._replace(
        block_indices=jnp.pad(selection.block_indices, padding),
        block_lengths=jnp.pad(selection.block_lengths, padding),
    )


def to_host(tree: Any) -> Any:
    """Moves the entries of all block stores in a state to host memory.

    Without pinned host memory on the backend, it warns and returns the state unchanged.

    Args:
        tree: a policy's state.

    Returns:
        The state.
    """
    if "pinned_host" not in {memory.kind for memory in jax.devices()[0].addressable_memories()}:
        backend = jax.default_backend()
        warnings.warn(f"HostMemory: backend {backend!r} has no host memory; blocks stay on the device", stacklevel=2)
        return tree
    return _map_stores(tree, lambda x: jax.device_put(x, jax.memory.Space.Host))


def _map_stores(tree: Any, move: Callable[[Array], Array]) -> Any:
    """Applies a function to the entries of all block stores in a state."""

    def is_store(x: Any) -> bool:
        return isinstance(x, BlockStore)

    def move_entries(x: Any) -> Any:
        return dataclasses.replace(x, entries=move(x.entries)) if is_store(x) else x

    return jax.tree.map(move_entries, tree, is_leaf=is_store)
