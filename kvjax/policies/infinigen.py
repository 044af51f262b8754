"""InfiniGen (Lee et al. 2024): everything is kept; a few dimensions of queries and keys foretell which tokens a query
needs, and those alone are read."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.distributed.collectives import global_heads, local_heads, sum_over_heads
from kvjax.policy import Policy, Prompt, Requirements, check_above, check_budget
from kvjax.prompt_attention import check_prompt_queries
from kvjax.quantization import dequantize
from kvjax.segment import BlockSelection, BlockStoreRead, SegmentLike
from kvjax.spec import CacheSpec
from kvjax.state import fault, retrieval_index, stacked, state, static
from kvjax.stores.block_store import (
    OUT_OF_RANGE,
    BlockStore,
    arrange_blocks,
    init_block_store,
    write_blocks,
    write_index,
)
from kvjax.stores.staging import Tokens
from kvjax.structures.per_head import per_head
from kvjax.structures.skew import Skew


@state
class Partial:
    """One head's keys in a few dimensions."""

    keys: Float[Array, "M C"] = retrieval_index()  # of the cache's dtype
    columns: Float[Array, "D C"]  # float32, from a key to those dimensions: the columns of the skew that were chosen


@state
class InfiniGenState:
    """Every token, a block of its own at the number of its position."""

    total: Int[Array, "B"]  # int32
    overflow: Int[Array, "B"] = fault("tokens came to a full cache that must hold all of them")
    store: BlockStore = stacked("B", "H_kv")
    partial: Partial = stacked("B", "H_kv")
    layer: int | None = static()  # whose skew it is; layers without one are one program


@dataclasses.dataclass(frozen=True)
class InfiniGen(Policy[InfiniGenState]):
    """Keeps every key and value; a query reads the tokens whose speculated logits come within `alpha` of the largest.

    Speculated logits are products of queries and keys in a share `partial` of the dimensions, after both were turned by
    an orthogonal matrix per kv head (the skew, found offline, see `experiments.calibrate_skew`), which leaves whole
    products as they are and concentrates them in few dimensions. Which ones is chosen per head from the prompt: those
    where its queries' absolute values have the largest sum. The number of tokens is the same for all kv heads of a row:
    the mean of how many of each pass, at most `budget`.

    The published system foretells a layer's queries from the layer before, to fetch while that one still computes, and
    so reads all of the first layer; a cache policy is given the queries themselves, and every layer is alike. It is
    made for heads that share nothing: here a group's query heads share a kv head's skew, dimensions and tokens, and a
    token passes if it does for any of them.

    Attributes:
        budget: most tokens read per kv head, staged ones not counted. Published as 20% of the tokens so far.
        alpha: in units of logits (products over sqrt(D)); the paper's 5 for Llama, 4 for OPT.
        partial: share of the dimensions that speculation looks at (the paper's partial weight ratio).
        skew: None to leave keys as they are.
        compact_every: tokens between compactions, which move staged tokens into the store.

    Reference:
        InfiniGen, section 4; `speculate_attention` and `partial_weight_index_generation` of the released code.
    """

    budget: int
    alpha: float = 5.0
    partial: float = 0.2
    skew: Skew | str | None = None
    compact_every: int = 64

    requires = Requirements(prompt_queries="all", entire_prompt=True)
    is_retrieval = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.skew, str):
            object.__setattr__(self, "skew", Skew.load(self.skew))
        check_budget(self.budget, compact_every=self.compact_every)
        check_above(0, alpha=self.alpha)
        if not 0 < self.partial <= 1:
            raise ValueError(f"partial={self.partial}; it must lie in (0, 1]")

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> InfiniGenState:
        shape = (spec.layers, spec.kv_heads, spec.head_dim, spec.head_dim)
        if self.skew is not None and self.skew.matrices().shape != shape:
            raise ValueError(
                f"skew={self.skew.path} has shape {self.skew.matrices().shape}; it must be [layers, H_kv, D, D] = "
                f"{shape}"
            )
        slots, columns = spec.max_prompt_tokens + spec.max_new_tokens, max(1, int(self.partial * spec.head_dim))
        empty = lambda _: (  # noqa: E731
            init_block_store(spec, slots, 1),
            Partial(jnp.zeros((slots, columns), spec.dtype), jnp.zeros((spec.head_dim, columns))),
        )
        store, partial = per_head(empty)(jnp.zeros((spec.batch, spec.kv_heads)))
        zero = lambda: jnp.zeros(spec.batch, jnp.int32)  # noqa: E731
        return InfiniGenState(zero(), zero(), store, partial, None if self.skew is None else spec.layer)

    def prefill(self, state: InfiniGenState, prompt: Prompt) -> InfiniGenState:
        queries = check_prompt_queries(self, prompt)
        batch, heads, tokens, dim = prompt.keys.shape
        grouped = queries.reshape(batch, tokens, heads, -1, dim).transpose(0, 2, 1, 3, 4)
        turn = jnp.eye(dim) if self.skew is None else local_heads(jnp.asarray(self.skew.matrices()[state.layer]), heads)
        real = jnp.arange(tokens) >= tokens - prompt.lengths[:, None]
        pick = functools.partial(chosen_columns, count=state.partial.columns.shape[-1])
        columns = per_head(pick, 0, 0, None)(jnp.broadcast_to(turn, (batch, heads, dim, dim)), grouped, real)
        state = dataclasses.replace(state, partial=dataclasses.replace(state.partial, columns=columns))
        most = min(tokens, state.partial.keys.shape[2])  # a prompt may be padded past the longest one
        return file_tokens(state, prompt.keys[:, :, :most], prompt.values[:, :, :most], prompt.lengths)

    def segments(self, state: InfiniGenState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        index = (state.partial.keys, state.partial.columns)
        return (BlockStoreRead(state.store, functools.partial(self._select, state), index),)

    def compact(self, state: InfiniGenState, new: Tokens) -> InfiniGenState:
        return file_tokens(state, new.keys, new.values, new.count)

    def _select(self, state: InfiniGenState, query: Float[Array, "B 1 H_q D"]) -> BlockSelection:
        logits = speculated(state.partial, query)
        slots = logits.shape[-1]
        there = jnp.arange(slots) < state.total[:, None]
        below = jnp.where(there[:, None, None], logits, -jnp.inf)
        largest = jnp.max(below, axis=-1, keepdims=True)
        # A token counts for the group as it does for the head that is nearest to needing it.
        below = jnp.max(below - jnp.where(jnp.isneginf(largest), 0.0, largest), axis=2)
        passing = jnp.sum(below > -self.alpha, axis=-1)
        best, token = jax.lax.top_k(below, min(self.budget, slots))
        wanted = sum_over_heads(jnp.sum(passing, axis=1)) // global_heads(passing.shape[1])
        read = (jnp.arange(token.shape[2]) < wanted[:, None, None]) & ~jnp.isneginf(best)
        return BlockSelection(token, read.astype(jnp.int32))


def file_tokens(
    state: InfiniGenState, keys: Float[Array, "B H T D"], values: Float[Array, "B H T D_v"], count: Int[Array, "B"]
) -> InfiniGenState:
    """Puts the first `count[b]` of T tokens of every row into store and index, behind those that are there."""

    def one(store: BlockStore, partial: Partial, keys, values, first, count):
        number = jnp.arange(keys.shape[0])
        place = jnp.where(number < count, first + number, OUT_OF_RANGE)
        few = (keys.astype(jnp.float32) @ partial.columns).astype(partial.keys.dtype)
        blocks = arrange_blocks(number[:, None], keys, values, first + number)
        return write_blocks(store, place, blocks), dataclasses.replace(
            partial, keys=write_index(partial.keys, place, few)
        )

    of_heads = per_head(one, 0, 0, 0, 0, None, None)
    store, partial = of_heads(state.store, state.partial, keys, values, state.total, count)
    slots = state.partial.keys.shape[2]
    lost = jnp.maximum(state.total + count - jnp.maximum(state.total, slots), 0)
    return dataclasses.replace(
        state, store=store, partial=partial, total=state.total + count, overflow=state.overflow + lost
    )


def speculated(partial: Partial, query: Float[Array, "B 1 H_q D"]) -> Float[Array, "B H_kv G N"]:
    """Logits of every query head as its chosen dimensions foretell them."""
    batch, kv_heads, head_dim, _ = partial.columns.shape
    grouped = query.reshape(batch, kv_heads, -1, head_dim).astype(jnp.float32)
    turned = jnp.einsum("bhgd,bhdc->bhgc", grouped, partial.columns)
    return jnp.einsum("bhgc,bhnc->bhgn", turned, dequantize(partial.keys).astype(jnp.float32)) / math.sqrt(head_dim)


def chosen_columns(
    turn: Float[Array, "D D"], queries: Float[Array, "w G D"], real: Bool[Array, "w"], count: int
) -> Float[Array, "D C"]:
    """The columns of one head's skew in which a prompt's queries have the largest absolute values."""
    size = jnp.abs(jnp.where(real[:, None, None], queries, 0.0).astype(jnp.float32) @ turn)
    _, chosen = jax.lax.top_k(jnp.sum(size, axis=(0, 1)), count)
    return turn[:, chosen]
