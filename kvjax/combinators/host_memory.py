"""What a policy recalls from in host memory, with the blocks of the last steps on the device."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax.attention import Recall
from kvjax.policy import Policy, check_least
from kvjax.recall import BlockStore
from kvjax.recent import Recent, init_recent
from kvjax.segment import Recalled, map_parts, parts_of
from kvjax.state import state


@state
class Hosted:
    """A policy's state whose stored entries lie in host memory."""

    cache: Any
    recent: tuple[Recent, ...]  # one for every `Recalled` of the policy's reading


@dataclasses.dataclass(frozen=True)
class HostMemory(Policy[Hosted]):
    """A policy that recalls, with the blocks that it recalls from in host memory. The device holds its index, its
    window, and the blocks that the last `steps` appended tokens recalled; only blocks that are not among these are
    moved. A layer or a head that recalls nothing stays on the device.

    Results are those of the policy itself. Blocks are moved in groups of an eighth of what a query reads, as many
    groups as the row and head that lack most need; further rounds of a certified recall move every block that they
    read. Hits are counted in blocks (`Recent.requested`, `.hits`); every miss is a block moved. A prompt is compressed
    on the device, from where its store is moved at once. Where the backend has no host memory space, a warning says so
    and everything stays on the device. Devices cannot share a kv head's blocks in host memory: each would have to ask
    the others' hosts.

    Attributes:
        policy: one that recalls.
        steps: R, the paper's 1; 0 keeps none, so that every block that is read is moved.

    Source: ClusterKV, sections 4.1 and 4.4 (there clusters are cached, not blocks).
    """

    policy: Policy
    steps: int = 1

    recalls = True
    compact_every = property(lambda self: self.policy.compact_every)
    prompt_queries = property(lambda self: self.policy.prompt_queries)
    repeat = property(lambda self: self.policy.repeat)
    observes = property(lambda self: self.policy.observes)
    streams = property(lambda self: self.policy.streams)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(0, steps=self.steps)
        if isinstance(self.policy, HostMemory):
            raise ValueError(f"HostMemory: what {self.policy} recalls from lies in host memory already")
        if not self.policy.recalls:
            raise ValueError(f"HostMemory: {self.policy} recalls nothing, so nothing of it can lie in host memory")

    def at(self, spec) -> Policy:
        policy = self.policy.at(spec)
        return dataclasses.replace(self, policy=policy) if policy.recalls else policy

    def head_order(self, devices: int = 1) -> tuple[int, ...] | None:
        return self.policy.head_order(devices)

    def init(self, spec, row_keys) -> Hosted:
        if spec.parts > 1:
            raise ValueError(f"HostMemory: {spec.parts} devices share each kv head; its blocks cannot be shared there")
        cache = self.policy.init(spec, row_keys)

        def empty(part: Recalled) -> Recent:
            heads = spec.kv_heads if part.heads is None else part.heads[1] - part.heads[0]
            query = jnp.zeros((spec.batch, 1, heads * spec.query_heads // spec.kv_heads, spec.head_dim))
            blocks = jax.eval_shape(lambda: part.choose(query, _first_round(part, spec.batch)).block)
            return init_recent(blocks, part.store.entries, self.steps)

        parts = parts_of(self.policy.read(cache, jnp.zeros((spec.batch, 1), jnp.int32)))
        return Hosted(to_host(cache), tuple(empty(part) for part in parts if isinstance(part, Recalled)))

    def prefill(self, state: Hosted, prompt) -> Hosted:
        # On the device, from where the store is moved at once.
        fresh = _map_stores(state.cache, lambda x: jnp.zeros(x.shape, x.dtype))
        return Hosted(to_host(self.policy.prefill(fresh, prompt)), state.recent)

    def read(self, state: Hosted, newer):
        recent = iter(state.recent)
        give = lambda part: dataclasses.replace(part, recent=next(recent)) if isinstance(part, Recalled) else part  # noqa: E731
        return map_parts(give, self.policy.read(state.cache, newer))

    def observe(self, state: Hosted, seen) -> Hosted:
        parts = jax.tree.leaves(seen.parts, is_leaf=lambda x: isinstance(x, Recall))
        recent = tuple(part.recent for part in parts if isinstance(part, Recall))
        return Hosted(self.policy.observe(state.cache, seen), recent)

    def compact(self, state: Hosted, new) -> Hosted:
        return Hosted(self.policy.compact(state.cache, new), state.recent)

    def tell(self, state: Hosted, prompt) -> Any:
        return self.policy.tell(state.cache, prompt)

    def read_bytes(self, state: Hosted) -> int:
        return self.policy.read_bytes(state.cache)


def _first_round(part: Recalled, batch: int) -> Array | None:
    return None if part.target is None else jnp.zeros(batch, jnp.int32)


def to_host(cache: Any) -> Any:
    """The state with its stores' entries in host memory, where the backend has any."""
    if "pinned_host" not in {memory.kind for memory in jax.devices()[0].addressable_memories()}:
        message = f"HostMemory: backend {jax.default_backend()!r} has no host memory; blocks stay on the device"
        warnings.warn(message, stacklevel=2)
        return cache
    return _map_stores(cache, lambda x: jax.device_put(x, jax.memory.Space.Host))


def _map_stores(cache: Any, move: Callable[[Array], Array]) -> Any:
    """The state with the entries of all its block stores moved."""
    # Among the scales of `Quantized` a store has none: it keeps its own.
    is_store = lambda x: isinstance(x, BlockStore) and x.entries is not None  # noqa: E731
    moved = lambda x: dataclasses.replace(x, entries=move(x.entries)) if is_store(x) else x  # noqa: E731
    return jax.tree.map(moved, cache, is_leaf=is_store)
