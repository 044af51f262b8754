"""Exact prefill: prompts are read layer by layer over all chunks, and each layer's cache is filled as soon as it is
done, so that beyond what the policies keep the keys and values of one layer exist at a time."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

import kvjax
from kvjax.policy import ALL_QUERIES, Policy, Repeat, Repeated
from kvjax.sharding import DATA
from kvjax_models import flash_attention
from kvjax_models.exact_attention import attend_behind, chunk_attention
from kvjax_models.llama import DecoderLayer, Llama
from kvjax_models.rotary import Rotary, turn
from kvjax_models.sharding import STORED, attend_apart, by_row, everywhere, mesh_of

REPEAT_BLOCK = 128  # tokens of a repetition that attend at a time


class ReadLayer(NamedTuple):
    """What one layer computed of whole prompts, padded to N tokens."""

    x: Float[Array, "B N W"]  # the residual stream behind it; the next layer's reading donates it
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
    """Reads prompts exactly, layer by layer: N must be a multiple of `chunk`, `asked[l]` says how many of the last
    queries of layer l are wanted, `repeat` whether every layer reads the prompts again, and `capacity` how many tokens
    the sequences may grow to (N by default), which some rotary embeddings ask."""
    mesh = mesh_of(model)
    capacity = tokens.shape[1] if capacity is None else capacity
    x = embed(model, everywhere(tokens, mesh))
    if repeat is not None:
        again, sizes = (everywhere(part, mesh) for part in repetitions(repeat, tokens, np.asarray(lengths)))
        again = embed(model, again.reshape(len(tokens), -1))
    for number, (layer, count) in enumerate(zip(model.layers, asked, strict=True)):
        rotary = model.config.rotary(number, capacity)
        read = prefill_layer(layer, rotary, mesh, chunk, count, x, lengths)
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


@jax.jit
def embed(model: Llama, tokens: Int[Array, "B N"]) -> Float[Array, "B N W"]:
    return model.embed(tokens)


@functools.partial(jax.jit, static_argnames=("rotary", "mesh", "chunk", "asked"), donate_argnames=("x",))
def prefill_layer(
    layer: DecoderLayer,
    rotary: Rotary,
    mesh: Mesh | None,
    chunk: int,
    asked: int,
    x: Float[Array, "B N W"],
    lengths: Int[Array, "B"],
) -> ReadLayer:
    """One layer over a whole prompt: the new residual stream, keys, values and the last `asked` queries of each row."""
    batch, tokens, _ = x.shape
    x = by_row(x, mesh)

    def queries_of(x, positions):
        return layer.queries(x, *turn(rotary, positions))

    def chunk_of(x, number):
        return jax.lax.dynamic_slice_in_dim(x, number * chunk, chunk, axis=1)

    def chunk_positions(number):
        return jnp.broadcast_to(number * chunk + jnp.arange(chunk), (batch, chunk))

    queries = None
    if asked:
        positions = lengths[:, None] - asked + jnp.arange(asked)
        rows = jnp.take_along_axis(x, jnp.maximum(positions, 0)[..., None], axis=1)
        queries = queries_of(rows, positions)

    numbers = jnp.arange(tokens // chunk)
    keys, values = jax.lax.map(lambda n: layer.stored(chunk_of(x, n), *turn(rotary, chunk_positions(n))), numbers)
    join = lambda blocks: blocks.swapaxes(0, 1).reshape(batch, tokens, *blocks.shape[3:])  # noqa: E731
    keys, values = join(keys), join(values)
    # Stored once as products read them, [B, H_kv, N, D].
    head_keys, head_values = keys.swapaxes(1, 2), values.swapaxes(1, 2)

    def apart(attend: Callable[..., Array], *given: PartitionSpec) -> Callable[..., Array]:
        return attend if mesh is None else attend_apart(attend, mesh, heads_of(layer), STORED, STORED, *given)

    def by_chunks(x, keys, values, sink_logits):
        of_layer = functools.partial(chunk_attention, window=layer.window, logit_cap=layer.attention_cap)
        attend = apart(of_layer, PartitionSpec())

        def step(x, number):
            rows = chunk_of(x, number)
            attended = attend(queries_of(rows, chunk_positions(number)), keys, values, number, sink_logits)
            finished = by_row(layer.finish(rows, attended), mesh)
            return jax.lax.dynamic_update_slice_in_dim(x, finished, number * chunk, axis=1), None

        return jax.lax.scan(step, x, numbers)[0]

    def at_once(attend, x, keys, values, sink_logits):
        query = join(jax.lax.map(lambda n: queries_of(chunk_of(x, n), chunk_positions(n)), numbers))
        attended = apart(attend)(query, keys, values, sink_logits)

        def step(x, number):
            finished = by_row(layer.finish(chunk_of(x, number), chunk_of(attended, number)), mesh)
            return jax.lax.dynamic_update_slice_in_dim(x, finished, number * chunk, axis=1), None

        return jax.lax.scan(step, x, numbers)[0]

    asked_for = flash_attention.Asked.of(layer, x.dtype, tokens)
    kernels = {
        platform: functools.partial(at_once, attend) for platform, attend in flash_attention.kernels(asked_for).items()
    }
    given = (x, head_keys, head_values, layer.sink_logits)
    x = jax.lax.platform_dependent(*given, default=by_chunks, **kernels) if kernels else by_chunks(*given)
    return ReadLayer(x, keys, values, queries)


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
def last_logits(model: Llama, x: Float[Array, "B N W"], lengths: Int[Array, "B"]) -> Float[Array, "B V"]:
    """Logits behind the last token of every row."""
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return model.logits(last)
