"""Exact prefill: prompts are read layer by layer over all chunks, and each layer's cache is filled as soon as it is
done, so that beyond what the policies keep the keys and values of one layer exist at a time."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

import kvjax
from kvjax.policy import ALL_QUERIES, Policy, Repeat, Repeated
from kvjax.sharding import DATA, HEADS, ROWS
from kvjax_models import flash_attention
from kvjax_models.cut_prompts import PIECES, Group, piece, whole
from kvjax_models.exact_attention import attend_behind, attend_in_chunks
from kvjax_models.llama import DecoderLayer, Llama
from kvjax_models.rotary import Rotary, turn
from kvjax_models.sharding import STORED, attend_apart, by_row, everywhere, mesh_of, parameter_specs, put

REPEAT_BLOCK = 128  # tokens of a repetition that attend at a time


class ReadLayer(NamedTuple):
    """What one layer computed of whole prompts, padded to N tokens."""

    x: Float[Array, "B M C W"]  # the residual stream behind it, in pieces; the next layer's reading donates it
    keys: Float[Array, "B N H_kv D"]
    values: Float[Array, "B N H_kv D"]
    queries: Float[Array, "B w H_q D"] | None  # of the last tokens, right-aligned, as many as were asked for
    repeated: Repeated | None = None
    sink_logits: Float[Array, "H_q"] | None = None  # the layer's own, for its cache


def read_layers(
    model: Llama,
    tokens: Int[np.ndarray, "B N"],
    lengths: Int[Array, "B"],
    chunk: int,
    asked: Sequence[int],
    repeat: Repeat | None = None,
    capacity: int | None = None,
) -> Iterator[ReadLayer]:
    """Reads prompts exactly, layer by layer: N must be a multiple of `chunk`, and of `piece` where devices shall share
    the tokens of long prompts. `asked[l]` says how many of the last queries of layer l are wanted, `repeat` whether
    every layer reads the prompts again, and `capacity` how many tokens the sequences may grow to (N by default), which
    some rotary embeddings ask."""
    mesh, (batch, count) = mesh_of(model), tokens.shape
    capacity = count if capacity is None else capacity
    size = piece(model, mesh, batch, count, chunk)
    cut = size > chunk and count % size == 0
    if cut and mesh is not None:
        at = NamedSharding(mesh, PIECES)
        x = embed(model, put(tokens.reshape(batch, -1, size), at), mesh)
    else:
        x = embed(model, everywhere(tokens.reshape(batch, -1, chunk), mesh))
    if repeat is not None:
        again, sizes = (everywhere(part, mesh) for part in repetitions(repeat, tokens, np.asarray(lengths)))
        again = embed(model, again.reshape(len(tokens), -1))
    for number, (layer, wanted) in enumerate(zip(model.layers, asked, strict=True)):
        rotary = model.config.rotary(number, capacity)
        read = prefill_layer(layer, rotary, mesh, cut, wanted, x, lengths)
        x, read = read.x, read._replace(sink_logits=layer.sink_logits)
        if repeat is not None:
            again, query, key = repeat_layer(layer, rotary, mesh, again, read.keys, read.values, lengths, sizes)
            read = read._replace(repeated=Repeated(query, key, sizes))
        yield read


def repetitions(
    repeat: Repeat, tokens: Int[np.ndarray, "B N"], lengths: Int[np.ndarray, "B"]
) -> tuple[Int[np.ndarray, "B C R"], Int[np.ndarray, "B C"]]:
    """The texts that repeat prompts, as many chunks for each row as the longest has and padded, and their lengths."""
    longest = int(lengths.max())
    width = -(-repeat.width(longest) // REPEAT_BLOCK) * REPEAT_BLOCK
    texts = np.zeros((len(tokens), repeat.chunks(longest), width), np.int32)
    sizes = np.zeros(texts.shape[:2], np.int32)
    for row, length in enumerate(lengths):
        for number, first in enumerate(range(0, int(length), repeat.chunk)):
            before = repeat.ask_part + tuple(tokens[row, max(first - repeat.overlap, 0) : first])
            chunk = tokens[row, first : min(first + repeat.chunk, length)]
            text = (*(before if number else repeat.ask), *repeat.suffix, *chunk)
            texts[row, number, : len(text)], sizes[row, number] = text, len(text)
    return texts, sizes


def compress_layer(
    cache: kvjax.Cache, read: ReadLayer, lengths: Int[Array, "B"], told: Any = None
) -> tuple[kvjax.Cache, Any]:
    """Takes a layer's prompts into a fresh cache (which is donated), with as many of the last queries as its policy
    asks for, and what the layer before told. Returns what this layer tells, too."""
    count = asked_queries(cache.policy, read.keys.shape[1])
    queries = None if read.queries is None or not count else read.queries[:, read.queries.shape[1] - count :]
    repeated = None if cache.policy.repeat is None else read.repeated
    more = {"repeated": repeated, "sink_logits": read.sink_logits}
    return compress(cache, read.keys, read.values, lengths, queries, told, **more)


def asked_queries(policy: Policy, tokens: int) -> int:
    """How many of the last queries of a prompt padded to so many tokens the policy asks for."""
    return tokens if policy.prompt_queries == ALL_QUERIES else min(policy.prompt_queries, tokens)


@functools.partial(jax.jit, static_argnames=("mesh",))
def embed(model: Llama, tokens: Int[Array, "*N"], mesh: Mesh | None = None) -> Float[Array, "*N W"]:
    """Embeddings of tokens, which are cut into `PIECES` where there is a mesh: every device then needs the whole table,
    and no sum."""
    if mesh is None:
        return model.embed(tokens)
    specs = parameter_specs(model, model.config.query_heads, mesh)
    of_devices = {"mesh": mesh, "in_specs": (specs, PIECES), "out_specs": PIECES}
    return jax.shard_map(lambda model, tokens: whole(model, specs).embed(tokens), **of_devices, check_vma=False)(
        model, tokens
    )


@functools.partial(jax.jit, static_argnames=("rotary", "mesh", "cut", "asked"), donate_argnames=("x",))
def prefill_layer(
    layer: DecoderLayer,
    rotary: Rotary,
    mesh: Mesh | None,
    cut: bool,
    asked: int,
    x: Float[Array, "B M C W"],
    lengths: Int[Array, "B"],
) -> ReadLayer:
    """One layer over a whole prompt in pieces, which are cut among the devices that share a layer, or not: the new
    residual stream, keys, values and the last `asked` queries of each row."""
    if mesh is None or not cut:
        return ReadLayer(*_read_pieces(layer, rotary, mesh, Group(), asked, by_row(x, mesh), lengths))
    group = Group.of(mesh, heads_of(layer))
    specs = parameter_specs(layer, layer.attention.query_heads, mesh)

    def read(layer, x, lengths):
        return _read_pieces(whole(layer, specs), rotary, None, group, asked, x, lengths)

    of_devices = {"mesh": mesh, "in_specs": (specs, PIECES, ROWS), "out_specs": (PIECES, HEADS, HEADS, HEADS)}
    return ReadLayer(*jax.shard_map(read, **of_devices, check_vma=False)(layer, x, lengths))


def _read_pieces(
    layer: DecoderLayer,
    rotary: Rotary,
    mesh: Mesh | None,
    group: Group,
    asked: int,
    x: Float[Array, "B M c W"],
    lengths: Int[Array, "B"],
) -> tuple[Float[Array, "B M c W"], Float[Array, "B N h D"], Float[Array, "B N h D"], Float[Array, "B w h D"] | None]:
    """What `prefill_layer` gives, of those tokens that this device of a group has. Where there is a mesh, the compiler
    cuts products among its devices."""
    batch, pieces, own, _ = x.shape
    tokens, numbers = pieces * own * group.devices, jnp.arange(pieces)

    def rows_of(x, number):
        return jax.lax.dynamic_index_in_dim(x, number, axis=1, keepdims=False)

    def turned(number):
        first = (number * group.devices + group.place()) * own
        return turn(rotary, jnp.broadcast_to(first + jnp.arange(own), (batch, own)))

    def queries_of(x, number):
        return layer.queries(rows_of(x, number), *turned(number))

    def finished(x, attended, number):
        rows = by_row(layer.finish(rows_of(x, number), attended), mesh)
        return jax.lax.dynamic_update_index_in_dim(x, rows, number, axis=1)

    queries = _asked_queries(layer, rotary, group, asked, x, lengths) if asked else None
    keys, values = (
        joined(group.gathered(one)) for one in jax.lax.map(lambda n: layer.stored(rows_of(x, n), *turned(n)), numbers)
    )
    # Stored once as products read them, [B, H_kv, N, D].
    head_keys, head_values = keys.swapaxes(1, 2), values.swapaxes(1, 2)

    def apart(attend: Callable[..., Array], *given: PartitionSpec) -> Callable[..., Array]:
        return attend if mesh is None else attend_apart(attend, mesh, heads_of(layer), STORED, STORED, *given)

    def by_chunks(x, keys, values, sink_logits):
        of_layer = functools.partial(attend_in_chunks, chunk=own, window=layer.window, logit_cap=layer.attention_cap)
        attend = apart(of_layer, PartitionSpec())

        def step(x, number):
            query = group.to_heads(queries_of(x, number)[None])[0]
            first = number * group.devices + group.run() * group.tensor
            attended = attend(query, keys, values, first, sink_logits)
            return finished(x, group.to_tokens(attended[None])[0], number), None

        return jax.lax.scan(step, x, numbers)[0]

    def at_once(attend, x, keys, values, sink_logits):
        query = joined(group.to_heads(jax.lax.map(lambda n: queries_of(x, n), numbers)))
        attended = apart(functools.partial(attend, run=group.run()))(query, keys, values, sink_logits)
        attended = group.to_tokens(attended.reshape(batch, pieces, -1, *attended.shape[2:]).swapaxes(0, 1))
        return jax.lax.scan(lambda x, of: (finished(x, *of), None), x, (attended, numbers))[0]

    asked_for = flash_attention.Asked.of(layer, x.dtype, tokens, pieces, group.runs)
    kernels = {
        platform: functools.partial(at_once, attend) for platform, attend in flash_attention.kernels(asked_for).items()
    }
    sinks = None if layer.sink_logits is None else group.own_heads(layer.sink_logits)
    given = (x, head_keys, head_values, sinks)
    x = jax.lax.platform_dependent(*given, default=by_chunks, **kernels) if kernels else by_chunks(*given)
    return x, keys, values, queries


def _asked_queries(
    layer: DecoderLayer,
    rotary: Rotary,
    group: Group,
    asked: int,
    x: Float[Array, "B M c W"],
    lengths: Int[Array, "B"],
) -> Float[Array, "B w h D"]:
    """The last queries of each row, of a device's kv heads, whose rows the devices of a group take a part of each; a
    piece at a time."""
    share = min(-(-asked // group.devices), x.shape[2])
    block = share * group.devices
    positions = lengths[:, None] - asked + jnp.arange(-(-asked // block) * block)

    def of_block(positions):
        own = jax.lax.dynamic_slice_in_dim(positions, group.place() * share, share, axis=1)
        return layer.queries(group.rows_at(x, positions), *turn(rotary, own))

    blocks = positions.reshape(len(lengths), -1, block).swapaxes(0, 1)
    return joined(group.gathered(jax.lax.map(of_block, blocks)))[:, :asked]


def joined(pieces: Shaped[Array, "M B C *D"]) -> Shaped[Array, "B N *D"]:
    """The tokens of pieces, one piece behind the other."""
    return pieces.swapaxes(0, 1).reshape(pieces.shape[1], -1, *pieces.shape[3:])


@functools.partial(jax.jit, static_argnames=("rotary", "mesh"), donate_argnames=("x",))
def repeat_layer(
    layer: DecoderLayer,
    rotary: Rotary,
    mesh: Mesh | None,
    x: Float[Array, "B CR W"],
    prompt_keys: Float[Array, "B N H_kv D"],
    prompt_values: Float[Array, "B N H_kv D"],
    lengths: Int[Array, "B"],
    sizes: Int[Array, "B C"],
) -> tuple[Float[Array, "B CR W"], Float[Array, "B CR H_q D"], Float[Array, "B CR H_kv D"]]:
    """One layer over all repetitions of prompts, each as if it came right behind the prompt and alone: the new residual
    stream, queries and keys."""
    batch, total, _ = x.shape
    width = total // sizes.shape[1]
    place = jnp.arange(total) % width
    query, key, value = layer.project(x, *turn(rotary, lengths[:, None] + place))
    stored = [heads_first.swapaxes(1, 2) for heads_first in (prompt_keys, prompt_values, key, value)]
    attend: Callable[..., Array] = functools.partial(
        attend_behind, width=width, window=layer.window, logit_cap=layer.attention_cap
    )
    if mesh is not None:
        attend = attend_apart(attend, mesh, heads_of(layer), *[STORED] * 4, PartitionSpec(DATA), PartitionSpec())

    def of_block(number):
        queries = jax.lax.dynamic_slice_in_dim(query, number * REPEAT_BLOCK, REPEAT_BLOCK, axis=1)
        return attend(queries, *stored, lengths, number, layer.sink_logits)

    attended = jax.lax.map(of_block, jnp.arange(total // REPEAT_BLOCK))
    attended = attended.swapaxes(0, 1).reshape(batch, total, *attended.shape[3:])
    return layer.finish(x, attended), query, key


def heads_of(layer: DecoderLayer) -> tuple[int, int]:
    """Of queries, and of keys."""
    return layer.attention.query_heads, layer.attention.kv_heads


compress = jax.jit(kvjax.prefill, donate_argnames=("cache",))


@jax.jit
def last_logits(model: Llama, x: Float[Array, "B M C W"], lengths: Int[Array, "B"]) -> Float[Array, "B V"]:
    """Logits behind the last token of every row."""
    number, place = (index[:, None, None] for index in jnp.divmod(lengths - 1, x.shape[2]))
    last = jnp.take_along_axis(jnp.take_along_axis(x, number[..., None], axis=1)[:, 0], place, axis=1)[:, 0]
    return model.logits(last)
