"""Exact prefill: prompts are read layer by layer over all chunks, and each layer's cache is filled as soon as it is
done, so that beyond what the policies keep the keys and values of one layer exist at a time."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

import kvjax
from kvjax.cache import with_counters
from kvjax.distributed.sharding import DATA, HEADS, ROWS
from kvjax.policy import RepeatedPrompt, Repetition
from kvjax.stores.staging import Counters
from kvjax_models.generation.sequence_parallel import CHUNKS, DeviceGroup, chunk_size, with_gathered_parameters
from kvjax_models.model import flash_attention
from kvjax_models.model.exact_attention import attend_in_chunks, attend_repetitions
from kvjax_models.model.llama import DecoderLayer, Llama
from kvjax_models.model.rotary import Rotary, rotation
from kvjax_models.sharding import KV_SPEC, constrain_to_batch, mesh_of, replicate, shard_array, shard_attention

REPEAT_BLOCK = 128  # tokens of a repetition that attend at a time


class PrefilledLayer(NamedTuple):
    """What one layer computed of whole prompts, padded to N tokens."""

    x: Float[Array, "B M C W"]  # the residual stream behind it, in pieces; the next layer's reading donates it
    keys: Float[Array, "B N H_kv D"]
    values: Float[Array, "B N H_kv D"]
    queries: Float[Array, "B w H_q D"] | None  # of the last tokens, right-aligned, as many as were asked for
    repeated: RepeatedPrompt | None = None
    sink_logits: Float[Array, "H_q"] | None = None  # the layer's own, for its cache


def prefill_layers(
    model: Llama,
    tokens: Int[np.ndarray, "B N"],
    lengths: Int[Array, "B"],
    chunk: int,
    asked: Sequence[int],
    repeat: Repetition | None = None,
    capacity: int | None = None,
) -> Iterator[PrefilledLayer]:
    """Reads prompts exactly, layer by layer: N must be a multiple of `chunk`, and of `chunk_size` where devices shall share
    the tokens of long prompts. `asked[l]` says how many of the last queries of layer l are wanted, `repeat` whether
    every layer reads the prompts again, and `capacity` how many tokens the sequences may grow to (N by default), which
    some rotary embeddings ask."""
    mesh, (batch, count) = mesh_of(model), tokens.shape
    capacity = count if capacity is None else capacity
    size = chunk_size(model, mesh, batch, count, chunk)
    cut = size > chunk and count % size == 0

    def embedded(pieces):
        if not cut or mesh is None:
            return embed(model, replicate(pieces, mesh))
        return embed(model, shard_array(pieces, NamedSharding(mesh, CHUNKS)), mesh)

    x = embedded(tokens.reshape(batch, -1, size if cut else chunk))
    if repeat is not None:
        together = REPEAT_BLOCK * (size // chunk if cut else 1)
        texts, text_lengths = make_repetitions(repeat, tokens, np.asarray(lengths), together)
        again, sizes = embedded(texts.reshape(batch, -1, together)), replicate(text_lengths, mesh)
    for number, (layer, wanted) in enumerate(zip(model.layers, asked, strict=True)):
        rotary = model.config.rotary(number, capacity)
        read = prefill_layer(layer, rotary, mesh, cut, wanted, x, lengths)
        x, read = read.x, read._replace(sink_logits=layer.sink_logits)
        if repeat is not None:
            again, query, key = repeat_layer(layer, rotary, mesh, cut, again, read.keys, read.values, lengths, sizes)
            read = read._replace(repeated=RepeatedPrompt(query, key, sizes))
        yield read


def make_repetitions(
    repeat: Repetition, tokens: Int[np.ndarray, "B N"], lengths: Int[np.ndarray, "B"], multiple: int = REPEAT_BLOCK
) -> tuple[Int[np.ndarray, "B texts R"], Int[np.ndarray, "B texts"]]:
    """The texts that repeat prompts, as many chunks for each row as the longest has, padded, and their lengths; all
    texts of a row together have a multiple of so many tokens."""
    longest = int(lengths.max())
    width = -(-repeat.max_width(longest) // REPEAT_BLOCK) * REPEAT_BLOCK
    together = multiple // math.gcd(multiple, width)
    texts = np.zeros((len(tokens), -(-repeat.num_chunks(longest) // together) * together, width), np.int32)
    sizes = np.zeros(texts.shape[:2], np.int32)
    for row, length in enumerate(lengths):
        for number, first in enumerate(range(0, int(length), repeat.chunk_tokens)):
            before = repeat.continuation + tuple(tokens[row, max(first - repeat.overlap, 0) : first])
            chunk = tokens[row, first : min(first + repeat.chunk_tokens, length)]
            text = (*(before if number else repeat.instruction), *repeat.suffix, *chunk)
            texts[row, number, : len(text)], sizes[row, number] = text, len(text)
    return texts, sizes


def compress_layer(
    cache: kvjax.Cache,
    counters: Counters,
    read: PrefilledLayer,
    lengths: Int[Array, "B"],
    layer_carry: Shaped[Array, "B H_kv *N"] | None = None,
) -> tuple[kvjax.Cache, Counters, Shaped[Array, "B H_kv *N"] | None]:
    """Takes one layer's prompts into an empty cache, which is donated.

    Args:
        cache: the layer's cache, without counters.
        counters: counters of all layers, before the prompt.
        read: the layer's keys, values and queries of the prompts.
        lengths: tokens per row.
        layer_carry: the third result for the previous layer.

    Returns:
        The cache, the counters after the prompt, and what the policy passes to the next layer.
    """
    count = cache.policy.requires.num_prompt_queries(read.keys.shape[1])
    queries = None if read.queries is None or not count else read.queries[:, read.queries.shape[1] - count :]
    repeated = None if cache.policy.requires.repetition is None else read.repeated
    more = {"repeated": repeated, "sink_logits": read.sink_logits}
    return prefill_cache(cache, counters, read.keys, read.values, lengths, queries, layer_carry, **more)


@functools.partial(jax.jit, static_argnames=("mesh",))
def embed(model: Llama, tokens: Int[Array, "*N"], mesh: Mesh | None = None) -> Float[Array, "*N W"]:
    """Embeddings of tokens, which are cut into `CHUNKS` where there is a mesh: every device then needs the whole table,
    and no sum."""
    if mesh is None:
        return model.embed(tokens)
    return with_gathered_parameters(Llama.embed, mesh, model, model.config.query_heads, (CHUNKS,), CHUNKS)(tokens)


@functools.partial(jax.jit, static_argnames=("rotary", "mesh", "cut", "asked"), donate_argnames=("x",))
def prefill_layer(
    layer: DecoderLayer,
    rotary: Rotary,
    mesh: Mesh | None,
    cut: bool,
    asked: int,
    x: Float[Array, "B M C W"],
    lengths: Int[Array, "B"],
) -> PrefilledLayer:
    """One layer over a whole prompt in pieces, which are cut among the devices that share a layer, or not: the new
    residual stream, keys, values and the last `asked` queries of each row."""
    if mesh is None or not cut:
        x, keys, values, queries = _read_pieces(
            rotary, mesh, [DeviceGroup()], asked, layer, constrain_to_batch(x, mesh), lengths
        )
        return PrefilledLayer(constrain_to_batch(x, mesh), keys, values, queries)
    groups = [DeviceGroup.of(mesh, heads_of(layer), always_heads) for always_heads in (False, True)]
    read = functools.partial(_read_pieces, rotary, None, groups, asked)
    lies = (CHUNKS, ROWS), (CHUNKS, HEADS, HEADS, HEADS)
    return PrefilledLayer(*with_gathered_parameters(read, mesh, layer, layer.attention.query_heads, *lies)(x, lengths))


def _read_pieces(
    rotary: Rotary,
    mesh: Mesh | None,
    groups: Sequence[DeviceGroup],
    asked: int,
    layer: DecoderLayer,
    x: Float[Array, "B M c W"],
    lengths: Int[Array, "B"],
) -> tuple[Float[Array, "B M c W"], Float[Array, "B N h D"], Float[Array, "B N h D"], Float[Array, "B w h D"] | None]:
    """What `prefill_layer` gives, of those tokens that this device of a group has; its attention is shared as the first
    of the groups says that the kernel can do with. Where there is a mesh, the compiler cuts products among its devices.
    """
    (batch, pieces, own, _), group = x.shape, groups[0]
    tokens, numbers = pieces * own * group.devices, jnp.arange(pieces)

    def rows_of(x, number):
        return jax.lax.dynamic_index_in_dim(x, number, axis=1, keepdims=False)

    def turned(number):
        first = (number * group.devices + group.place()) * own
        return rotation(rotary, jnp.broadcast_to(first + jnp.arange(own), (batch, own)))

    def queries_of(x, number):
        return layer.project_queries(rows_of(x, number), *turned(number))

    def finished(x, attended, number):
        rows = constrain_to_batch(layer.finish(rows_of(x, number), attended), mesh)
        return jax.lax.dynamic_update_index_in_dim(x, rows, number, axis=1)

    queries = _asked_queries(layer, rotary, group, asked, x, lengths) if asked else None
    keys, values = (
        joined(group.gathered(one))
        for one in jax.lax.map(lambda n: layer.project_kv(rows_of(x, n), *turned(n)), numbers)
    )
    # Stored once as products read them, [B, H_kv, N, D].
    head_keys, head_values = keys.swapaxes(1, 2), values.swapaxes(1, 2)

    def apart(attend: Callable[..., Array], *given: PartitionSpec) -> Callable[..., Array]:
        return attend if mesh is None else shard_attention(attend, mesh, heads_of(layer), KV_SPEC, KV_SPEC, *given)

    def by_chunks(x, keys, values, sink_logits):
        of_layer = functools.partial(
            attend_in_chunks, chunk=own, window=layer.window, logit_cap=layer.attention_logit_cap
        )
        attend = apart(of_layer, PartitionSpec())
        sinks = None if sink_logits is None else group.own_heads(sink_logits)

        def step(x, number):
            query = group.to_heads(queries_of(x, number)[None], number)[0]
            attended = attend(query, keys, values, group.first(number), sinks)
            return finished(x, group.to_tokens(attended[None], number)[0], number), None

        return jax.lax.scan(step, x, numbers)[0]

    def at_once(group, attend, x, keys, values, sink_logits):
        sinks = None if sink_logits is None else group.own_heads(sink_logits)
        query = joined(group.to_heads(jax.lax.map(lambda n: queries_of(x, n), numbers)))
        attended = apart(functools.partial(attend, run=group.run()))(query, keys, values, sinks)
        attended = group.to_tokens(attended.reshape(batch, pieces, -1, *attended.shape[2:]).swapaxes(0, 1))
        return jax.lax.scan(lambda x, of: (finished(x, *of), None), x, (attended, numbers))[0]

    kernels = {
        platform: functools.partial(at_once, own_group, attend)
        for own_group in groups[::-1]
        for platform, attend in flash_attention.available_kernels(
            flash_attention.AttentionSpec.of(layer, x.dtype, tokens, pieces, own_group.runs)
        ).items()
    }
    given = (x, head_keys, head_values, layer.sink_logits)
    x = jax.lax.platform_dependent(*given, default=by_chunks, **kernels) if kernels else by_chunks(*given)
    return x, keys, values, queries


def _asked_queries(
    layer: DecoderLayer,
    rotary: Rotary,
    group: DeviceGroup,
    asked: int,
    x: Float[Array, "B M c W"],
    lengths: Int[Array, "B"],
) -> Float[Array, "B w h D"]:
    """The last queries of each row, of a device's kv heads, whose rows the devices of a group take a part of each; a
    chunk_size at a time."""
    share = min(-(-asked // group.devices), x.shape[2])
    block = share * group.devices
    positions = lengths[:, None] - asked + jnp.arange(-(-asked // block) * block)

    def of_block(positions):
        own = jax.lax.dynamic_slice_in_dim(positions, group.place() * share, share, axis=1)
        return layer.project_queries(group.rows_at(x, positions), *rotation(rotary, own))

    blocks = positions.reshape(len(lengths), -1, block).swapaxes(0, 1)
    return joined(group.gathered(jax.lax.map(of_block, blocks)))[:, :asked]


def joined(pieces: Shaped[Array, "M B C *D"]) -> Shaped[Array, "B N *D"]:
    """The tokens of pieces, one chunk_size behind the other."""
    return pieces.swapaxes(0, 1).reshape(pieces.shape[1], -1, *pieces.shape[3:])


@functools.partial(jax.jit, static_argnames=("rotary", "mesh", "cut"), donate_argnames=("x",))
def repeat_layer(
    layer: DecoderLayer,
    rotary: Rotary,
    mesh: Mesh | None,
    cut: bool,
    x: Float[Array, "B M C W"],
    prompt_keys: Float[Array, "B N H_kv D"],
    prompt_values: Float[Array, "B N H_kv D"],
    lengths: Int[Array, "B"],
    sizes: Int[Array, "B texts"],
) -> tuple[Float[Array, "B M C W"], Float[Array, "B MC H_q D"], Float[Array, "B MC H_kv D"]]:
    """One layer over all repetitions of prompts, each as if it came right behind the prompt and alone: the new residual
    stream, in pieces that are cut where the prompts' are, queries and keys."""
    given = (prompt_keys, prompt_values, lengths, sizes)
    if mesh is None or not cut:
        x, queries, keys = _repeat_pieces(rotary, mesh, DeviceGroup(), layer, constrain_to_batch(x, mesh), *given)
        return constrain_to_batch(x, mesh), queries, keys
    repeat = functools.partial(_repeat_pieces, rotary, None, DeviceGroup.of(mesh, heads_of(layer)))
    lies = (CHUNKS, HEADS, HEADS, ROWS, ROWS), (CHUNKS, HEADS, HEADS)
    return with_gathered_parameters(repeat, mesh, layer, layer.attention.query_heads, *lies)(x, *given)


def _repeat_pieces(
    rotary: Rotary,
    mesh: Mesh | None,
    group: DeviceGroup,
    layer: DecoderLayer,
    x: Float[Array, "B M c W"],
    prompt_keys: Float[Array, "B N h D"],
    prompt_values: Float[Array, "B N h D"],
    lengths: Int[Array, "B"],
    sizes: Int[Array, "B texts"],
) -> tuple[Float[Array, "B M c W"], Float[Array, "B MC h D"], Float[Array, "B MC h D"]]:
    """What `repeat_layer` gives, of those tokens that this device of a group has; as `_read_pieces`."""
    batch, pieces, own, _ = x.shape
    width = pieces * own * group.devices // sizes.shape[1]
    firsts = (np.arange(pieces)[:, None] * group.devices + group.place()) * own
    place = (firsts + np.arange(own)).reshape(-1) % width
    rows = x.reshape(batch, pieces * own, -1)

    def apart_in_pieces(x):
        return x.reshape(batch, pieces, -1, *x.shape[2:]).swapaxes(0, 1)

    query, key, value = map(apart_in_pieces, layer.project(rows, *rotation(rotary, lengths[:, None] + place)))
    all_queries, key, value = (joined(group.gathered(one)) for one in (query, key, value))
    stored = [heads_first.swapaxes(1, 2) for heads_first in (prompt_keys, prompt_values, key, value)]
    attend: Callable[..., Array] = functools.partial(
        attend_repetitions, width=width, window=layer.window, logit_cap=layer.attention_logit_cap
    )
    if mesh is not None:
        attend = shard_attention(attend, mesh, heads_of(layer), *[KV_SPEC] * 4, PartitionSpec(DATA), PartitionSpec())
    sinks = None if layer.sink_logits is None else group.own_heads(layer.sink_logits)
    query = group.to_heads(query)
    runs = query.shape[2] // REPEAT_BLOCK
    blocks = (group.first(jnp.arange(pieces))[:, None] * (own // REPEAT_BLOCK) + jnp.arange(runs)).reshape(-1)
    queries = joined(query).reshape(batch, len(blocks), REPEAT_BLOCK, *query.shape[3:]).swapaxes(0, 1)
    attended = jax.lax.map(lambda of: attend(of[0], *stored, lengths, of[1], sinks), (queries, blocks))
    attended = joined(group.to_tokens(apart_in_pieces(joined(attended))))
    return layer.finish(rows, attended).reshape(x.shape), all_queries, key


def heads_of(layer: DecoderLayer) -> tuple[int, int]:
    """Of queries, and of keys."""
    return layer.attention.query_heads, layer.attention.kv_heads


@functools.partial(jax.jit, donate_argnames=("cache",))
def prefill_cache(
    cache: kvjax.Cache, counters: Counters, *prompt: Any, **options: Any
) -> tuple[kvjax.Cache, Counters, Shaped[Array, "B H_kv *N"] | None]:
    """Calls `kvjax.prefill` with counters that all layers share."""
    cache, layer_carry = kvjax.prefill(with_counters(cache, counters), *prompt, **options)
    return with_counters(cache, None), cache.counters, layer_carry


@jax.jit
def last_logits(model: Llama, x: Float[Array, "B M C W"], lengths: Int[Array, "B"]) -> Float[Array, "B V"]:
    """Logits behind the last token of every row."""
    number, place = (index[:, None, None] for index in jnp.divmod(lengths - 1, x.shape[2]))
    last = jnp.take_along_axis(jnp.take_along_axis(x, number[..., None], axis=1)[:, 0], place, axis=1)[:, 0]
    return model.logits(last)
