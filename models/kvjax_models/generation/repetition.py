"""Repetitions of prompts, which some policies (KVzip) attend with to score the prompt's keys."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from kvjax.distributed.sharding import DATA, HEADS, ROWS
from kvjax.policy import Repetition
from kvjax_models.generation.sequence_parallel import (
    CHUNK_SPEC,
    DeviceGroup,
    join_chunks,
    split_into_chunks,
    with_gathered_parameters,
)
from kvjax_models.model.exact_attention import attend_repetitions
from kvjax_models.model.llama import DecoderLayer
from kvjax_models.model.rotary import Rotary, rotation
from kvjax_models.sharding import KV_SPEC, constrain_to_batch, head_counts, shard_attention

BLOCK = 128  # tokens of a repetition per block of attention


def make_repetitions(
    repeat: Repetition, tokens: Int[np.ndarray, "B N"], lengths: Int[np.ndarray, "B"], multiple: int = BLOCK
) -> tuple[Int[np.ndarray, "B texts R"], Int[np.ndarray, "B texts"]]:
    """Builds the texts that repeat prompts chunk by chunk.

    Args:
        repeat: chunk size and surrounding tokens.
        tokens: padded prompts.
        lengths: lengths of the prompts.
        multiple: the number of tokens of a row's texts is a multiple of it.

    Returns:
        Padded texts, equally many for each row, and their lengths.
    """
    longest = int(lengths.max())
    width = -(-repeat.max_width(longest) // BLOCK) * BLOCK
    num_texts = multiple // math.gcd(multiple, width)
    texts = np.zeros((len(tokens), -(-repeat.num_chunks(longest) // num_texts) * num_texts, width), np.int32)
    sizes = np.zeros(texts.shape[:2], np.int32)
    for row, length in enumerate(lengths):
        for number, first in enumerate(range(0, int(length), repeat.chunk_tokens)):
            later_prefix = repeat.continuation + tuple(tokens[row, max(first - repeat.overlap, 0) : first])
            chunk = tokens[row, first : min(first + repeat.chunk_tokens, length)]
            text = (*(later_prefix if number else repeat.instruction), *repeat.suffix, *chunk)
            texts[row, number, : len(text)], sizes[row, number] = text, len(text)
    return texts, sizes


@functools.partial(jax.jit, static_argnames=("rotary", "mesh", "sequence_parallel"), donate_argnames=("x",))
def repeat_layer(
    layer: DecoderLayer,
    rotary: Rotary,
    mesh: Mesh | None,
    sequence_parallel: bool,
    x: Float[Array, "B M C W"],
    prompt_keys: Float[Array, "B N H_kv D"],
    prompt_values: Float[Array, "B N H_kv D"],
    lengths: Int[Array, "B"],
    sizes: Int[Array, "B texts"],
) -> tuple[Float[Array, "B M C W"], Float[Array, "B MC H_q D"], Float[Array, "B MC H_kv D"]]:
    """Computes one layer of all repetitions, each as if it alone followed the prompt.

    Args:
        layer: the layer.
        rotary: its rotary embedding.
        mesh: mesh of the model.
        sequence_parallel: whether the devices of a layer share the tokens.
        x: residual stream of the repetitions in chunks; donated.
        prompt_keys: keys of the prompts.
        prompt_values: values of the prompts.
        lengths: lengths of the prompts.
        sizes: lengths of the repetitions.

    Returns:
        The new residual stream, and the queries and keys of the repetitions.
    """
    args = (prompt_keys, prompt_values, lengths, sizes)
    if mesh is None or not sequence_parallel:
        x, queries, keys = _repeat_chunks(rotary, mesh, DeviceGroup(), layer, constrain_to_batch(x, mesh), *args)
        return constrain_to_batch(x, mesh), queries, keys
    repeat = functools.partial(_repeat_chunks, rotary, None, DeviceGroup.from_mesh(mesh, head_counts(layer)))
    specs = (CHUNK_SPEC, HEADS, HEADS, ROWS, ROWS), (CHUNK_SPEC, HEADS, HEADS)
    return with_gathered_parameters(repeat, mesh, layer, layer.attention.query_heads, *specs)(x, *args)


def _repeat_chunks(
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
    """Returns the results of `repeat_layer` for this device's tokens."""
    batch, chunks, size, _ = x.shape
    width = chunks * size * group.devices // sizes.shape[1]
    first = (np.arange(chunks)[:, None] * group.devices + group.device_index()) * size
    position = (first + np.arange(size)).reshape(-1) % width  # in the text
    tokens = x.reshape(batch, chunks * size, -1)
    query, key, value = (
        split_into_chunks(y, chunks) for y in layer.project(tokens, *rotation(rotary, lengths[:, None] + position))
    )
    all_queries, key, value = (join_chunks(group.gather_tokens(y)) for y in (query, key, value))
    keys_and_values = [y.swapaxes(1, 2) for y in (prompt_keys, prompt_values, key, value)]
    attend: Callable[..., Array] = functools.partial(
        attend_repetitions, width=width, window=layer.window, logit_cap=layer.attention_logit_cap
    )
    if mesh is not None:
        specs = (*[KV_SPEC] * 4, PartitionSpec(DATA), PartitionSpec())
        attend = shard_attention(attend, mesh, head_counts(layer), *specs)
    sinks = None if layer.sink_logits is None else group.local_heads(layer.sink_logits)

    def attend_block(query_and_index):
        """Attends with one block of queries; `query_and_index` also holds the index of the block."""
        block, index = query_and_index
        return attend(block, *keys_and_values, lengths, index, sinks)

    query = group.tokens_to_heads(query)
    first_block = group.first_shard(jnp.arange(chunks))[:, None] * (size // BLOCK)
    indices = (first_block + jnp.arange(query.shape[2] // BLOCK)).reshape(-1)
    blocks = join_chunks(query).reshape(batch, len(indices), BLOCK, *query.shape[3:]).swapaxes(0, 1)
    attended = join_chunks(jax.lax.map(attend_block, (blocks, indices)))
    attended = join_chunks(group.heads_to_tokens(split_into_chunks(attended, chunks)))
    return layer.finish(tokens, attended).reshape(x.shape), all_queries, key
