"""InfiniGen (Lee et al. 2024): all tokens are kept, and a few dimensions of keys predict which ones a query needs.

All tokens stay in the cache; a step reads few of them, token by token. Per KV head:

1. An orthogonal matrix (the skew, computed offline) rotates queries and keys such that few dimensions dominate their
   products. Without one, the original dimensions are used.
2. After the prompt has been read, the dimensions in which its queries are largest are selected: a share `partial`.
3. The index holds every key in these dimensions only.
4. At every step, the products of query and keys in these dimensions predict the logits.
5. Tokens whose prediction is within `alpha` of the largest are read, at most `budget`. Other tokens have a predicted
   weight below e^-alpha of the largest. Flat attention therefore reads more tokens than sharp attention.

Later tokens are appended to the store and to the index.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.block_store import (
    OUT_OF_RANGE,
    BlockStore,
    arrange_blocks,
    init_block_store,
    write_blocks,
    write_index,
)
from kvjax.distributed.collectives import global_heads, local_heads, sum_over_heads
from kvjax.methods.infinigen.skew import Skew
from kvjax.policy import Policy, Prompt, Requirements, check_above, check_budget
from kvjax.prompt_attention import check_prompt_queries
from kvjax.quantization import dequantize
from kvjax.segment import BlockSelection, BlockStoreRead, SegmentLike
from kvjax.shared.per_head import per_head
from kvjax.spec import CacheSpec
from kvjax.staging import Tokens
from kvjax.state import fault, retrieval_index, stacked, state, static


@state
class Partial:
    """One head's keys in a few dimensions."""

    keys: Float[Array, "M C"] = retrieval_index()  # of the cache's dtype
    columns: Float[Array, "D C"]  # float32, selected columns of the skew; maps keys to these dimensions


@state
class InfiniGenState:
    """Every token, in a block of one token whose index is the token's position."""

    total: Int[Array, "B"]  # int32
    overflow: Int[Array, "B"] = fault("tokens came to a full cache that must hold all of them")
    store: BlockStore = stacked("B", "H_kv")
    partial: Partial = stacked("B", "H_kv")
    layer: int | None = static()  # selects the skew; None without one, so that layers share one program


@dataclasses.dataclass(frozen=True)
class InfiniGen(Policy[InfiniGenState]):
    """Keeps every token; a query reads the tokens whose predicted logits are within `alpha` of the largest.

    Predicted logits are products of queries and keys in a share `partial` of the dimensions. An orthogonal matrix per
    KV head (the skew, computed offline) is applied to both first: it does not change products, but concentrates them
    in few dimensions. The dimensions are selected per head from the prompt: those with the largest sum of absolute
    values of queries. All KV heads of a row read the same number of tokens: the mean of how many tokens are within
    `alpha`, at most `budget`.

    The published system predicts a layer's queries from the previous layer, to overlap fetching with computation, and
    reads all tokens in the first layer. A cache policy gets the queries themselves, so that all layers are equal. The
    paper has no grouped queries: here the query heads of a group share skew, dimensions and tokens, and a token is
    read if it is within `alpha` for any of them.

    Attributes:
        budget: maximum tokens read per KV head, staged tokens excluded. The paper uses 20% of the tokens so far.
        alpha: margin of the logits, after the factor 1 / sqrt(D); 5 for Llama and 4 for OPT in the paper.
        partial: share of the dimensions in which logits are predicted (the paper's partial weight ratio).
        skew: a skew or the path of one; None for no skew.
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
            try:
                object.__setattr__(self, "skew", Skew.load(self.skew))
            except OSError as error:
                raise ValueError(f"skew={self.skew!r} cannot be read: {error}") from error
        check_budget(self.budget, compact_every=self.compact_every)
        check_above(0, alpha=self.alpha)
        if not 0 < self.partial <= 1:
            raise ValueError(f"partial={self.partial} must be above 0 and at most 1")

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> InfiniGenState:
        """Returns an empty store for `spec`."""
        if isinstance(self.skew, Skew):
            shape = (spec.layers, spec.kv_heads, spec.head_dim, spec.head_dim)
            if (actual := self.skew.matrices().shape) != shape:
                raise ValueError(f"skew={self.skew.path} has shape {actual}, expected [layers, H_kv, D, D] = {shape}")
        slots, columns = spec.max_prompt_tokens + spec.max_new_tokens, max(1, int(self.partial * spec.head_dim))

        def init_head(_: Array) -> tuple[BlockStore, Partial]:
            partial = Partial(jnp.zeros((slots, columns), spec.dtype), jnp.zeros((spec.head_dim, columns)))
            return init_block_store(spec, slots, 1), partial

        store, partial = per_head(init_head)(jnp.zeros((spec.batch, spec.kv_heads)))
        total, overflow = (jnp.zeros(spec.batch, jnp.int32) for _ in range(2))
        return InfiniGenState(total, overflow, store, partial, None if self.skew is None else spec.layer)

    def prefill(self, state: InfiniGenState, prompt: Prompt) -> InfiniGenState:
        """Selects the dimensions and writes the prompt into the store."""
        queries = check_prompt_queries(self, prompt)
        batch, heads, tokens, dim = prompt.keys.shape
        grouped = queries.reshape(batch, tokens, heads, -1, dim).transpose(0, 2, 1, 3, 4)
        skew: Array = jnp.eye(dim)
        if isinstance(self.skew, Skew):
            skew = local_heads(jnp.asarray(self.skew.matrices()[state.layer]), heads)
        valid = jnp.arange(tokens) >= tokens - prompt.lengths[:, None]
        select = functools.partial(select_columns, count=state.partial.columns.shape[-1])
        columns = per_head(select, 0, 0, None)(jnp.broadcast_to(skew, (batch, heads, dim, dim)), grouped, valid)
        state = dataclasses.replace(state, partial=dataclasses.replace(state.partial, columns=columns))
        stop = min(tokens, state.partial.keys.shape[2])  # a prompt may be padded beyond the capacity
        return _append(state, prompt.keys[:, :, :stop], prompt.values[:, :, :stop], prompt.lengths)

    def segments(self, state: InfiniGenState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        """Returns the store of a state."""
        index = (state.partial.keys, state.partial.columns)
        return (BlockStoreRead(state.store, functools.partial(self._select, state), index),)

    def compact(self, state: InfiniGenState, new: Tokens) -> InfiniGenState:
        """Appends the staged tokens."""
        return _append(state, new.keys, new.values, new.count)

    def _select(self, state: InfiniGenState, query: Float[Array, "B 1 H_q D"]) -> BlockSelection:
        """Selects tokens by predicted logits for one query of every row."""
        logits = _predict_logits(state.partial, query)
        slots = logits.shape[-1]
        present = jnp.arange(slots) < state.total[:, None]
        logits = jnp.where(present[:, None, None], logits, -jnp.inf)
        largest = jnp.max(logits, axis=-1, keepdims=True)
        # A token counts for a group if it counts for any of its heads.
        margin = jnp.max(logits - jnp.where(jnp.isneginf(largest), 0.0, largest), axis=2)
        num_within = jnp.sum(margin > -self.alpha, axis=-1)
        # As in the released code, all heads of a row read the same number of tokens, the mean over heads.
        best, token = jax.lax.top_k(margin, min(self.budget, slots))
        count = sum_over_heads(jnp.sum(num_within, axis=1)) // global_heads(num_within.shape[1])
        read = (jnp.arange(token.shape[2]) < count[:, None, None]) & ~jnp.isneginf(best)
        return BlockSelection(token, read.astype(jnp.int32))


_multiply = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def select_columns(
    skew: Float[Array, "D D"], queries: Float[Array, "w G D"], valid: Bool[Array, "w"], count: int
) -> Float[Array, "D C"]:
    """Selects the columns of one head's skew in which queries have the largest sum of absolute values.

    Args:
        skew: the head's matrix.
        valid: queries that count.

    Returns:
        The columns.
    """
    size = jnp.abs(_multiply(jnp.where(valid[:, None, None], queries, 0.0).astype(jnp.float32), skew))
    _, columns = jax.lax.top_k(jnp.sum(size, axis=(0, 1)), count)
    return skew[:, columns]


def _append(
    state: InfiniGenState, keys: Float[Array, "B H T D"], values: Float[Array, "B H T D_v"], count: Int[Array, "B"]
) -> InfiniGenState:
    """Appends the first `count[b]` tokens of every row to the store and the index."""

    def append_head(store: BlockStore, partial: Partial, *tokens: Array) -> tuple[BlockStore, Partial]:
        """Appends tokens (keys, values, first position, count) of one head to its `store` and its `partial` keys."""
        keys, values, first, count = tokens
        number = jnp.arange(keys.shape[0])
        is_new = number < count
        index = jnp.where(is_new, first + number, OUT_OF_RANGE)
        partial_keys = _multiply(keys.astype(jnp.float32), partial.columns).astype(partial.keys.dtype)
        partial = dataclasses.replace(partial, keys=write_index(partial.keys, index, partial_keys))
        # Padding has no block: it would count in the mean key of a quantized store.
        source = jnp.where(is_new, number, keys.shape[0])[:, None]
        return write_blocks(store, index, arrange_blocks(source, keys, values, first + number)), partial

    append = per_head(append_head, 0, 0, 0, 0, None, None)
    store, partial = append(state.store, state.partial, keys, values, state.total, count)
    total = state.total + count
    excess = jnp.maximum(total - jnp.maximum(state.total, partial.keys.shape[2]), 0)
    return InfiniGenState(total, state.overflow + excess, store, partial, state.layer)


def _predict_logits(partial: Partial, query: Float[Array, "B 1 H_q D"]) -> Float[Array, "B H_kv G N"]:
    """Returns the logits of every query head in the selected dimensions."""
    batch, kv_heads, head_dim, _ = partial.columns.shape
    grouped = query.reshape(batch, kv_heads, -1, head_dim).astype(jnp.float32)
    keys = dequantize(partial.keys).astype(jnp.float32)
    return _multiply(_multiply(grouped, partial.columns), keys.swapaxes(2, 3)) / math.sqrt(head_dim)
