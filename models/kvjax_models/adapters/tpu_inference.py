"""Attention backends with quantized pages, `kvjax_int4` and `kvjax_int8`, for tpu-inference (vLLM on TPUs).

vLLM calls `register` through its entry point for plugins, after which `--attention-backend kvjax_int4 --block-size 128`
selects a backend. Keys and values are rotated and quantized as everywhere in kvjax, with one scale per vector. Decode
steps attend by `pallas_kernels.paged_decode`, and prompts by the same operation, a few tokens at a time.
"""

import dataclasses
import functools
import importlib.util
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kvjax.quantization import quantize, rotate, rotate_back
from pallas_kernels.paged_decode import Pages, pack_words, paged_decode, slot_words, write_tokens
from pallas_kernels.partials import MASK_VALUE, Partials

Format = Literal["int4", "int8"]
# Slots of the pages of `pallas_kernels.paged_decode`; a page of vLLM consists of several.
PAGE_SIZE = 128
# Tokens of a prompt that attend together.
CHUNK_TOKENS = 64
BITS = {"int4": 4, "int8": 8}
# The formats of the backends, and their classes in `tpu_inference_vllm`.
BACKENDS: dict[str, tuple[Format, str]] = {
    "kvjax_int4": ("int4", "Int4Backend"),
    "kvjax_int8": ("int8", "Int8Backend"),
}


def register() -> None:
    """Registers the backends with tpu-inference; does nothing without tpu-inference."""
    if importlib.util.find_spec("tpu_inference") is None:
        return
    from tpu_inference.layers.common.attention_backend import register_attention_backend

    for name, (kv_dtype, vllm_class) in BACKENDS.items():
        register_attention_backend(
            name,
            attention=functools.partial(QuantizedBackend, kv_dtype),
            vllm_backend=f"{__name__}_vllm.{vllm_class}",
        )


class Sequences(NamedTuple):
    """The sequences of a step, whose new tokens follow each other.

    Attributes:
        lengths: The tokens of each sequence, including its new ones.
        page_table: The pages of each sequence, flat.
        query_starts: The first new token of each sequence, and the end of the last one.
        distribution: The numbers of sequences that decode one token, of these and those with prompts of a fixed length,
            and of all.
    """

    lengths: Int[Array, "S"]
    page_table: Int[Array, "S*K"]
    query_starts: Int[Array, "S+1"]
    distribution: Int[Array, "3"]


class Options(NamedTuple):
    """Static options of attention.

    Attributes:
        kv_dtype: The format of keys and values.
        scale: The factor of logits.
        window: The last tokens that a token attends to, itself included; None for all.
        logit_cap: Logits become cap * tanh(logit / cap); None disables this.
        update: Whether new keys and values are written.
        has_decode_rows: Whether the first sequences of a step have one new token each.
    """

    kv_dtype: Format
    scale: float
    window: int | None = None
    logit_cap: float | None = None
    update: bool = True
    has_decode_rows: bool = True


@dataclasses.dataclass(frozen=True)
class QuantizedBackend:
    """An `AttentionBackend` of tpu-inference.

    Attributes:
        kv_dtype: The format of keys and values.
    """

    kv_dtype: Format

    def get_kv_cache_shape(
        self, total_num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, kv_dtype: Any
    ) -> tuple[int, ...]:
        """Returns the shape of one layer's pages, an array of `kv_dtype` whose bits hold quantized vectors.

        Args:
            total_num_pages: The number of pages.
            page_size: Tokens per page.
            num_kv_heads: KV heads.
            head_dim: Dimensions of keys and values.
            kv_dtype: The dtype of the array.

        Returns:
            The shape [pages, page_size / 128, heads, words of a slot, elements of a word, 128].

        Raises:
            ValueError: If the page size or the dtype is not supported.
        """
        if page_size % PAGE_SIZE:
            raise ValueError(f"page_size={page_size}; pass --block-size with a multiple of {PAGE_SIZE}")
        itemsize = jnp.dtype(kv_dtype).itemsize
        if itemsize not in (2, 4):
            raise ValueError(f"kv_dtype={jnp.dtype(kv_dtype).name}; pass --kv-cache-dtype auto")
        words = slot_words(head_dim, BITS[self.kv_dtype])
        return total_num_pages, page_size // PAGE_SIZE, num_kv_heads, words, 4 // itemsize, PAGE_SIZE

    def attention(
        self, kv_cache: Array, q: Array, k: Array, v: Array, md: Any, shared_md: Any, mesh: jax.sharding.Mesh,
        *, head_dim_original: int, sm_scale: float, attention_chunk_size: int | None,
        q_scale: float | None, k_scale: float | None, v_scale: float | None, sinks: Array | None,
        update_kv_cache: bool, use_causal_mask: bool, attn_logits_soft_cap: float | None, decode_query_size: int,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Writes the new tokens of all sequences and attends to them and to earlier ones.

        Args:
            kv_cache: Pages of a layer.
            q: Queries [T, H_q, D].
            k: Keys [T, H, D].
            v: Values [T, H, D].
            md: Metadata with the page tables.
            shared_md: Metadata with lengths and the tokens of each sequence.
            mesh: The mesh; heads and sequences may be sharded.
            head_dim_original: Dimensions before padding; not used, because zeros do not change products.
            sm_scale: The factor of logits.
            attention_chunk_size: The sliding window.
            q_scale: Must be None.
            k_scale: Must be None.
            v_scale: Must be None.
            sinks: A logit per query head that only adds to the denominator.
            update_kv_cache: Whether new keys and values are written.
            use_causal_mask: Must be True.
            attn_logits_soft_cap: See `Options`.
            decode_query_size: New tokens per decoding sequence.

        Returns:
            The pages, and the output [T, H_q, D].

        Raises:
            NotImplementedError: For options that are not supported.
        """
        if (q_scale, k_scale, v_scale) != (None, None, None):
            raise NotImplementedError("kvjax quantizes keys and values itself; pass --kv-cache-dtype auto")
        if not use_causal_mask:
            raise NotImplementedError("use_causal_mask=False; the kvjax backends are causal")
        if shared := [axis for axis in ("dcp", "pcp") if mesh.shape.get(axis, 1) > 1]:
            raise NotImplementedError(f"mesh axis {shared[0]!r}; the kvjax backends do not share sequences")
        options = Options(
            self.kv_dtype, sm_scale, attention_chunk_size, attn_logits_soft_cap, update_kv_cache, decode_query_size == 1
        )
        sequences = Sequences(
            shared_md.seq_lens, md.block_tables, shared_md.query_start_loc, shared_md.request_distribution
        )
        return _attend_on_mesh(mesh, options, kv_cache, q, k, v, sequences, sinks)


def _attend_on_mesh(
    mesh: jax.sharding.Mesh, options: Options, cache: Array, q: Array, k: Array, v: Array, sequences: Sequences,
    sinks: Array | None,
) -> tuple[Array, Array]:  # fmt: skip
    """Runs `attend` on every device of a mesh, sharded as tpu-inference does."""
    from tpu_inference.layers.common.sharding import ShardingAxisName
    from tpu_inference.utils import get_mesh_shape_product

    data, heads = ShardingAxisName.ATTN_DATA, ShardingAxisName.ATTN_HEAD
    shards = get_mesh_shape_product(mesh, heads)
    if k.shape[1] < shards:
        if shards % k.shape[1]:
            raise ValueError(f"{k.shape[1]} KV heads on {shards} devices; one number must divide the other")
        k, v = (jnp.repeat(x, shards // k.shape[1], axis=1) for x in (k, v))
    per_token = jax.sharding.PartitionSpec(data, heads)
    per_page = jax.sharding.PartitionSpec(data, None, heads)
    sequence_specs = jax.tree.map(lambda _: jax.sharding.PartitionSpec(data), sequences)
    sink_spec = None if sinks is None else jax.sharding.PartitionSpec(heads)
    return jax.shard_map(
        functools.partial(attend, options=options),
        mesh=mesh,
        in_specs=(per_page, per_token, per_token, per_token, sequence_specs, sink_spec),
        out_specs=(per_page, per_token),
        check_vma=False,
    )(cache, q, k, v, sequences, sinks)


def attend(
    cache: Shaped[Array, "N m H W n P"],
    q: Float[Array, "T H_q D"],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H D"],
    sequences: Sequences,
    sinks: Float[Array, "H_q"] | None = None,
    *,
    options: Options,
) -> tuple[Array, Array]:
    """Writes new tokens into pages and attends to the pages of their sequences, on one device.

    Args:
        cache: The pages, of the shape that `QuantizedBackend.get_kv_cache_shape` returns.
        q: Queries.
        k: Keys. D may be smaller than in the pages.
        v: Values.
        sequences: The sequences.
        sinks: A logit per query head that adds to the denominator.
        options: Static options.

    Returns:
        The pages, and the output [T, H_q, D]; zeros for tokens of no sequence.
    """
    tokens, query_heads, head_dim = q.shape
    pages = Pages(cache.reshape(-1, *cache.shape[2:]), BITS[options.kv_dtype])
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, pages.head_dim - head_dim))) for x in (q, k, v))
    table = sequences.page_table.reshape(len(sequences.lengths), -1, 1) * cache.shape[1] + jnp.arange(cache.shape[1])
    table = jnp.clip(table.reshape(len(sequences.lengths), -1), 0, len(pages.data) - 1)
    if options.update:
        pages = _write(pages, k, v, sequences, table, options)
    queries = rotate(q.reshape(tokens, pages.heads, -1, pages.head_dim))
    # `paged_decode` divides by sqrt(D).
    queries = (queries * (options.scale * math.sqrt(pages.head_dim))).astype(q.dtype)
    sink_logits = None if sinks is None else sinks.astype(jnp.float32).reshape(pages.heads, -1)
    decode_rows = sequences.distribution[0] if options.has_decode_rows else jnp.int32(0)
    output = _decode(pages, queries, sequences, table, sink_logits, decode_rows, options)
    output = _prefill(output, pages, queries, sequences, table, sink_logits, decode_rows, options)
    output = rotate_back(output).reshape(tokens, query_heads, -1)[..., :head_dim].astype(q.dtype)
    return pages.data.reshape(cache.shape), output


def _query_lengths(sequences: Sequences) -> Int[Array, "S"]:
    """Returns the number of new tokens of each sequence, 0 for unused ones."""
    is_used = jnp.arange(len(sequences.lengths)) < sequences.distribution[2]
    return jnp.where(is_used, jnp.diff(sequences.query_starts), 0)


def _write(pages: Pages, k: Array, v: Array, sequences: Sequences, table: Int[Array, "S K"], options: Options) -> Pages:
    """Returns pages with the new tokens, quantized."""
    tokens, count = len(k), len(sequences.lengths)
    is_used = jnp.arange(count) < sequences.distribution[2]
    ends = jnp.where(is_used, sequences.query_starts[1:], tokens)
    token = jnp.arange(tokens, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(ends, token, side="right", method="compare_all"), count - 1)
    position = sequences.lengths[sequence] - ends[sequence] + token
    is_valid = token < sequences.query_starts[sequences.distribution[2]]
    page = table[sequence, jnp.clip(position // PAGE_SIZE, 0, table.shape[1] - 1)]
    words = pack_words(quantize(k, options.kv_dtype, unbiased=True), quantize(v, options.kv_dtype))
    return write_tokens(
        pages, words, jnp.where(is_valid, page, len(pages.data)), jnp.where(is_valid, position % PAGE_SIZE, 0),
        max_runs=min(tokens, tokens // PAGE_SIZE + 2 * count),
    )  # fmt: skip


def _decode(
    pages: Pages, queries: Float[Array, "T H R D"], sequences: Sequences, table: Int[Array, "S K"],
    sinks: Float[Array, "H R"] | None, decode_rows: Int[Array, ""], options: Options,
) -> Float[Array, "T H R D"]:  # fmt: skip
    """Returns the rotated output of sequences with one new token, the first ones; zeros for other tokens."""
    rows = min(len(queries), len(sequences.lengths))
    stop = jnp.where(jnp.arange(rows) < decode_rows, sequences.lengths[:rows], 0)
    start = _first_positions(stop, options.window)
    partials = paged_decode(queries[:rows], pages, table[:rows], start, stop, logit_cap=options.logit_cap)
    return jnp.zeros(queries.shape, jnp.float32).at[:rows].set(_normalize(partials, sinks))


def _prefill(
    output: Float[Array, "T H R D"], pages: Pages, queries: Float[Array, "T H R D"], sequences: Sequences,
    table: Int[Array, "S K"], sinks: Float[Array, "H R"] | None, decode_rows: Int[Array, ""], options: Options,
) -> Float[Array, "T H R D"]:  # fmt: skip
    """Returns the output with the rows of the other sequences, `CHUNK_TOKENS` tokens of a sequence at a time."""
    tokens, heads, group, head_dim = queries.shape
    chunk = min(CHUNK_TOKENS, tokens)
    is_prefill = jnp.arange(len(sequences.lengths)) >= decode_rows
    query_lengths = jnp.where(is_prefill, _query_lengths(sequences), 0)
    chunk_ends = jnp.cumsum(-(-query_lengths // chunk))
    padding = ((0, chunk), (0, 0), (0, 0), (0, 0))
    queries = jnp.pad(queries, padding)

    def attend_chunk(index: Int[Array, ""], output: Array) -> Array:
        """Returns the output with the rows of chunk `index`."""
        sequence = jnp.searchsorted(chunk_ends, index, side="right", method="compare_all")
        previous = chunk_ends[sequence] + (-query_lengths[sequence] // chunk)  # chunks of earlier sequences
        offset = (index - previous) * chunk
        first, row = sequences.query_starts[sequence] + offset, jnp.arange(chunk)
        is_used = row < query_lengths[sequence] - offset
        stop = sequences.lengths[sequence] - query_lengths[sequence] + offset + row + 1
        stop = jnp.repeat(jnp.where(is_used, stop, 0), group)[None]
        rows = jax.lax.dynamic_slice_in_dim(queries, first, chunk).swapaxes(0, 1).reshape(1, heads, -1, head_dim)
        partials = paged_decode(
            rows, pages, table[sequence][None], _first_positions(stop, options.window), stop,
            logit_cap=options.logit_cap,
        )  # fmt: skip
        result = _normalize(partials, None if sinks is None else jnp.tile(sinks, chunk))
        result = result.reshape(heads, chunk, group, head_dim).swapaxes(0, 1)
        old = jax.lax.dynamic_slice_in_dim(output, first, chunk)
        result = jnp.where(is_used[:, None, None, None], result, old)
        return jax.lax.dynamic_update_slice_in_dim(output, result, first, axis=0)

    return jax.lax.fori_loop(0, chunk_ends[-1], attend_chunk, jnp.pad(output, padding))[:tokens]


def _first_positions(stop: Int[Array, "*A"], window: int | None) -> Int[Array, "*A"]:
    return jnp.zeros_like(stop) if window is None else jnp.maximum(stop - window, 0)


def _normalize(partials: Partials, sinks: Float[Array, "H R"] | None) -> Float[Array, "B H R D"]:
    """Returns the output of attention, zeros for queries without entries."""
    is_read = partials.max > MASK_VALUE / 2
    largest = partials.max if sinks is None else jnp.maximum(partials.max, sinks)
    factor = jnp.where(is_read, jnp.exp(partials.max - largest), 0.0)
    denominator = partials.denominator * factor
    if sinks is not None:
        denominator += jnp.exp(sinks - largest)
    return partials.numerator * (factor / jnp.where(is_read, denominator, 1.0))[..., None]
