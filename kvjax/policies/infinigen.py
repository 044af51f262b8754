"""InfiniGen (Lee et al. 2024): everything is kept; a few dimensions of queries and keys foretell which tokens a query
needs, and those alone are read."""

import dataclasses
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.policies.windowed import check_queries, init_windowed, over_heads, windowed_policy
from kvjax.policy import ALL_QUERIES, CachePolicy, CacheSpec
from kvjax.recall import NOWHERE, BlockStore, Plan, arrange, arrays_bytes, init_store, put, put_blocks, recalling
from kvjax.shards import heads_in_all, own_heads, summed_over_heads
from kvjax.staging import Block, check_budget, check_period, init_window, window_segments
from kvjax.state import BATCH, HEAD_DIM, KV_HEADS, SLOTS, array, stacked, state, static

COLUMNS = "columns"


@state
class Partial:
    """One head's keys in a few dimensions."""

    keys: Float[Array, "N C"] = array(SLOTS, COLUMNS)  # of the cache's dtype
    # float32, from a key to those dimensions: the columns of the skew that were chosen.
    columns: Float[Array, "D C"] = array(HEAD_DIM, COLUMNS)


@state
class Tokens:
    """Every token but the staged ones, each a block of its own, at the number of its position."""

    store: BlockStore = stacked(BATCH, KV_HEADS)
    index: Partial = stacked(BATCH, KV_HEADS)
    group: int = static()  # query heads per kv head
    layer: int = static()


def infinigen(
    budget: int,
    *,
    alpha: float = 5.0,
    partial: float = 0.2,
    skew: str | os.PathLike[str] | None = None,
    period: int = 64,
) -> CachePolicy:
    """Keeps every key and value; a query reads the tokens whose speculated logits come within `alpha` of the largest.

    Speculated logits are products of queries and keys in a share `partial` of the dimensions, after both were turned by
    an orthogonal matrix per kv head (the skew, found offline, see `experiments.calibrate_skew`), which leaves whole
    products as they are and concentrates them in few dimensions. Which ones is chosen per head from the prompt: those
    where its queries' absolute values have the largest sum. The number of tokens is the same for all kv heads of a row:
    the mean of how many of each pass, at most `budget` (Lee et al. 2024, section 4; `speculate_attention` and
    `partial_weight_index_generation` of the released code).

    The published system foretells a layer's queries from the layer before, to fetch while that one still computes, and
    so reads all of the first layer; a cache policy is given the queries themselves, and every layer is alike. It is
    made for heads that share nothing: here a group's query heads share a kv head's skew, dimensions and tokens, and a
    token passes if it does for any of them. Tokens wait in staging, always read, until `compact`.

    Args:
        budget: most tokens read per kv head, staged ones not counted. Published as 20% of the tokens so far.
        alpha: in units of logits (products over sqrt(D)); the paper's 5 for Llama, 4 for OPT.
        partial: share of the dimensions that speculation looks at.
        skew: an npz file with `skew`, float32 [layers, H_kv, D, D]; None to leave keys as they are.
        period: tokens between compactions, which move staged tokens into the store.

    Raises:
        ValueError: for sizes that cannot be; when a cache is made, for a skew of another model; in prefill, without the
            prompt's queries.
    """
    check_budget(budget, sinks=0, recent=0)
    check_period(period)
    if not alpha > 0:
        raise ValueError(f"alpha={alpha}; it must be above 0")
    if not 0 < partial <= 1:
        raise ValueError(f"partial={partial}; it must lie in (0, 1]")
    turns = None if skew is None else load_skew(skew)

    def init(spec: CacheSpec, row_keys):
        del row_keys
        if turns is not None and turns.shape != (spec.layers, spec.kv_heads, spec.head_dim, spec.head_dim):
            wanted = (spec.layers, spec.kv_heads, spec.head_dim, spec.head_dim)
            raise ValueError(f"skew={skew} has shape {turns.shape}; it must be [layers, H_kv, D, D] = {wanted}")
        slots, columns = spec.max_prompt + spec.max_new, max(1, int(partial * spec.head_dim))

        def one(_):
            index = Partial(
                keys=jnp.zeros((slots, columns), spec.dtype),
                columns=jnp.zeros((spec.head_dim, columns), jnp.float32),
            )
            return init_store(spec, slots, 1), index

        store, index = over_heads(one)(jnp.zeros((spec.batch, spec.kv_heads)))
        tokens = Tokens(store, index, spec.query_heads // spec.kv_heads, spec.layer)
        return init_windowed(spec, init_window(spec, 0, 0, 0, period), tokens)

    def select(state, keys, values, queries):
        kept, window = state.selection, state.window
        queries = check_queries("infinigen", queries, keys, ALL_QUERIES)
        batch, count, _, head_dim = queries.shape
        grouped = queries.reshape(batch, count, keys.shape[2], -1, head_dim).transpose(0, 2, 1, 3, 4)
        turn = jnp.eye(head_dim) if turns is None else own_heads(jnp.asarray(turns[kept.layer]), keys.shape[2])
        turn = jnp.broadcast_to(turn, (batch, keys.shape[2], head_dim, head_dim))
        real = jnp.arange(count) >= count - window.total[:, None]
        columns = kept.index.columns.shape[-1]
        chosen = over_heads(lambda turn, queries, real: chosen_columns(turn, queries, real, columns), 0, 0, None)(
            turn, grouped, real
        )
        kept = dataclasses.replace(kept, index=dataclasses.replace(kept.index, columns=chosen))
        tokens = min(keys.shape[1], kept.index.keys.shape[2])  # a prompt may be padded past the longest one
        keys, values = (x[:, :tokens].swapaxes(1, 2) for x in (keys, values))
        zero = jnp.zeros_like(window.total)
        return dataclasses.replace(state, selection=file_tokens(kept, keys, values, zero, window.total))

    def absorb(state, block: Block):
        kept = file_tokens(state.selection, block.keys, block.values, block.first, block.count)
        slots = kept.index.keys.shape[2]
        lost = jnp.maximum(block.first + block.count - jnp.maximum(block.first, slots), 0)
        return dataclasses.replace(state, selection=kept, overflow=state.overflow + lost)

    def plan(state, query) -> Plan:
        kept = state.selection
        slots = kept.index.keys.shape[2]
        logits = speculated(kept.index, query)
        there = jnp.arange(slots) < state.window.total[:, None]
        below = jnp.where(there[:, None, None], logits, -jnp.inf)
        largest = jnp.max(below, axis=-1, keepdims=True)
        # A token counts for the group as it does for the head that is nearest to needing it.
        below = jnp.max(below - jnp.where(jnp.isneginf(largest), 0.0, largest), axis=2)
        passing = jnp.sum(below > -alpha, axis=-1)
        best, token = jax.lax.top_k(below, min(budget, slots))
        wanted = summed_over_heads(jnp.sum(passing, axis=1)) // heads_in_all(passing.shape[1])
        read = (jnp.arange(token.shape[2]) < wanted[:, None, None]) & ~jnp.isneginf(best)
        return Plan(token, read.astype(jnp.int32))

    base = windowed_policy(
        "infinigen",
        init=init,
        select=select,
        absorb=absorb,
        segments=lambda state, queries: window_segments(state.window, queries=queries),
        period=period,
        query_tail=ALL_QUERIES,
        streams=False,
    )
    return recalling(base, plan, lambda state: arrays_bytes(*jax.tree.leaves(state.selection.index)))


def load_skew(path: str | os.PathLike[str]) -> Float[np.ndarray, "L H_kv D D"]:
    """The matrices that `experiments.calibrate_skew` wrote.

    Raises:
        ValueError: for a file without them, or matrices that are not orthogonal (which would change logits).
    """
    with np.load(path) as arrays:
        if "skew" not in arrays:
            raise ValueError(f"skew={path} holds {sorted(arrays)}; it must hold an array 'skew'")
        skew = arrays["skew"].astype(np.float32)
    if skew.ndim != 4 or skew.shape[2] != skew.shape[3]:
        raise ValueError(f"skew={path} has shape {skew.shape}; it must be [layers, H_kv, D, D]")
    if np.abs(np.swapaxes(skew, 2, 3) @ skew - np.eye(skew.shape[3])).max() > 1e-3:
        raise ValueError(f"skew={path} holds matrices that are not orthogonal")
    return skew


def file_tokens(
    kept: Tokens,
    keys: Float[Array, "B H_kv T D"],
    values: Float[Array, "B H_kv T D"],
    first: Int[Array, "B"],
    count: Int[Array, "B"],
) -> Tokens:
    """Puts the first `count[b]` of T tokens of every row into store and index, from slot `first[b]` on."""

    def one(store: BlockStore, index: Partial, keys, values, first, count):
        number = jnp.arange(keys.shape[0])
        place = jnp.where(number < count, first + number, NOWHERE)
        partial = (keys.astype(jnp.float32) @ index.columns).astype(index.keys.dtype)
        blocks = arrange(number[:, None], keys, values, first + number)
        return put_blocks(store, place, blocks), dataclasses.replace(index, keys=put(index.keys, place, partial))

    store, index = over_heads(one, 0, 0, 0, 0, None, None)(kept.store, kept.index, keys, values, first, count)
    return dataclasses.replace(kept, store=store, index=index)


def speculated(index: Partial, query: Float[Array, "B 1 H_q D"]) -> Float[Array, "B H_kv G N"]:
    """Logits of every query head as its chosen dimensions foretell them."""
    batch, kv_heads, head_dim, _ = index.columns.shape
    grouped = query.reshape(batch, kv_heads, -1, head_dim).astype(jnp.float32)
    turned = jnp.einsum("bhgd,bhdc->bhgc", grouped, index.columns)
    return jnp.einsum("bhgc,bhnc->bhgn", turned, index.keys.astype(jnp.float32)) / math.sqrt(head_dim)


def chosen_columns(
    turn: Float[Array, "D D"], queries: Float[Array, "w G D"], real: Bool[Array, "w"], count: int
) -> Float[Array, "D C"]:
    """The columns of one head's skew in which a prompt's queries have the largest absolute values."""
    size = jnp.abs(jnp.where(real[:, None, None], queries, 0.0).astype(jnp.float32) @ turn)
    _, chosen = jax.lax.top_k(jnp.sum(size, axis=(0, 1)), count)
    return turn[:, chosen]
