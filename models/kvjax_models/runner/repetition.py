"""Repetitions of prompts, which some policies (KVzip) attend with to score the prompt's keys."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

import kvjax
from kvjax.distributed.sharding import HEADS, ROWS
from kvjax.policy import RepeatedPrompt, Repetition
from kvjax_models.model.exact_attention import PromptAndTexts, attend_repetitions, attend_texts
from kvjax_models.model.llama import DecoderLayer, RecurrentLayer
from kvjax_models.model.recurrent import RecurrentState
from kvjax_models.model.rotary import Rotary, rotation
from kvjax_models.runner.sequence_parallel import (
    CHUNK_SPEC,
    DeviceGroup,
    join_chunks,
    split_into_chunks,
    with_gathered_parameters,
)
from kvjax_models.sharding import KV_SPEC, constrain_to_batch, head_counts, shard_attention

BLOCK = 64  # tokens of a repetition per block of attention


def make_repetitions(
    repeat: Repetition, tokens: Int[np.ndarray, "B N"], lengths: Int[np.ndarray, "B"], multiple: int = BLOCK
) -> tuple[Int[np.ndarray, "B texts R"], Int[np.ndarray, "B texts"]]:
    """Builds the texts that repeat prompts chunk by chunk.

    Args:
        repeat: chunk size and surrounding tokens.
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


@functools.partial(jax.jit, static_argnames=("repeat", "rotary", "mesh", "sequence_parallel"), donate_argnames=("x",))
def repeat_layer(
    layer: DecoderLayer,
    repeat: Repetition,
    rotary: Rotary,
    mesh: Mesh | None,
    sequence_parallel: bool,
    x: Float[Array, "B M C W"],
    prompt_keys: Float[Array, "B N H_kv D"],
    prompt_values: Float[Array, "B N H_kv D"],
    lengths: Int[Array, "B"],
    sizes: Int[Array, "B texts"],
) -> tuple[Float[Array, "B M C W"], RepeatedPrompt]:
    """Computes one layer of all repetitions, each as if it alone followed the prompt.

    Args:
        repeat: chunk size and surrounding tokens of the repetitions.
        sequence_parallel: whether the devices of a layer share the tokens.
        x: residual stream of the repetitions in chunks; donated.
        sizes: lengths of the repetitions.

    Returns:
        The new residual stream, and the layer's projections of the repetitions, with weights of the values, and of
        the queries unless these are gradients.
    """
    args = (prompt_keys, prompt_values, lengths, sizes)
    query_weights = 1 / token_norms(layer.normalize(x)) if repeat.weights == "hidden_norm" else None
    value_norms = None if repeat.weights == "none" else _value_norms(layer, prompt_values)
    if mesh is None or not sequence_parallel:
        x = constrain_to_batch(x, mesh)
        x, queries, keys, received = _repeat_chunks(repeat, rotary, mesh, DeviceGroup(), layer, x, *args)
        x = constrain_to_batch(x, mesh)
    else:
        group = DeviceGroup.from_mesh(mesh, head_counts(layer))
        repeat_chunks = functools.partial(_repeat_chunks, repeat, rotary, None, group)
        specs = (CHUNK_SPEC, HEADS, HEADS, ROWS, ROWS), (CHUNK_SPEC, HEADS, HEADS, KV_SPEC)
        run = with_gathered_parameters(repeat_chunks, mesh, layer, layer.attention.query_heads, *specs)
        x, queries, keys, received = run(x, *args)
    return x, RepeatedPrompt(queries, keys, sizes, received, query_weights, value_norms)


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("x",))
def repeat_recurrent_layer(
    layer: RecurrentLayer,
    mesh: Mesh | None,
    x: Float[Array, "B M C W"],
    state: RecurrentState,
    sizes: Int[Array, "B texts"],
) -> Float[Array, "B M C W"]:
    """Computes one layer without attention of all repetitions, each as if it alone followed the prompt.

    Args:
        x: residual stream of the repetitions in chunks; donated.
        state: states after the prompts.
        sizes: lengths of the repetitions.

    Returns:
        The new residual stream.
    """
    texts = sizes.size
    y, _ = layer(x.reshape(texts, -1, x.shape[3]), kvjax.repeat_rows(state, sizes.shape[1]), sizes.reshape(texts))
    return constrain_to_batch(y.reshape(x.shape), mesh)


def token_norms(x: Float[Array, "B M C W"]) -> Float[Array, "B MC"]:
    """Returns the norm of each token's vector, float32."""
    return jnp.linalg.norm(x.astype(jnp.float32), axis=-1).reshape(x.shape[0], -1)


def _value_norms(layer: DecoderLayer, values: Float[Array, "B N H_kv D"]) -> Float[Array, "B H_q N"]:
    """Returns the norm of each value's product with each query head's part of the output projection, float32."""
    attention = layer.attention
    kv_heads, head_dim = values.shape[2:]
    inputs = attention.query_heads * head_dim
    zero = jnp.zeros((1, inputs), values.dtype)
    kernel = (attention.output(jnp.eye(inputs, dtype=values.dtype)) - attention.output(zero)).astype(jnp.float32)
    kernel = kernel.reshape(kv_heads, -1, head_dim, kernel.shape[1])
    # The products of all values would be as large as an MLP's activations; these are as large as a head.
    products = jnp.einsum("hgdw,hgew->hgde", kernel, kernel)
    values = values.astype(jnp.float32)
    squares = jnp.einsum("bnhd,hgde,bnhe->bhgn", values, products, values)
    return jnp.sqrt(jnp.maximum(squares, 0.0)).reshape(len(values), -1, values.shape[1])


@functools.partial(jax.jit, static_argnames=("rotary",), donate_argnames=("gradient",))
def backpropagate_layer(
    layer: DecoderLayer,
    rotary: Rotary,
    x: Float[Array, "B M C W"],
    prompt_keys: Float[Array, "B N H_kv D"],
    prompt_values: Float[Array, "B N H_kv D"],
    lengths: Int[Array, "B"],
    sizes: Int[Array, "B texts"],
    gradient: Float[Array, "B M C W"],
) -> tuple[Float[Array, "B M C W"], Float[Array, "B MC"]]:
    """Propagates a gradient through one layer of `repeat_layer`, with the prompts held fixed.

    Args:
        x: residual stream of the repetitions before the layer.
        sizes: lengths of the repetitions.
        gradient: gradient with respect to the residual stream after the layer, zero for padding; donated.

    Returns:
        The gradient with respect to `x`, and the norms of the gradient with respect to each token's attention output.
    """
    tokens = x.reshape(x.shape[0], -1, x.shape[3])
    position = np.arange(tokens.shape[1]) % (tokens.shape[1] // sizes.shape[1])
    angles = rotation(rotary, lengths[:, None] + position)
    prompt = [y.swapaxes(1, 2) for y in (prompt_keys, prompt_values)]

    def attention_output(tokens: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
        query, *projected = layer.project(tokens, angles)
        entries = PromptAndTexts._make([*prompt, *(y.swapaxes(1, 2) for y in projected), lengths, sizes])
        options: Mapping[str, Any] = {"window": layer.window, "logit_cap": layer.attention_logit_cap}
        attended = attend_texts(query, entries, layer.sink_logits, block=BLOCK, **options)
        return layer.project_output(tokens, attended)

    output, pull_attention = jax.vjp(attention_output, tokens)
    _, pull_rest = jax.vjp(layer.add_attention, tokens, output)
    direct, at_output = pull_rest(gradient.reshape(tokens.shape))
    (through_attention,) = pull_attention(at_output)
    return (direct + through_attention).reshape(x.shape), token_norms(at_output[:, None])


@jax.jit
def final_gradient(x: Float[Array, "B M C W"], sizes: Int[Array, "B texts"]) -> Float[Array, "B M C W"]:
    """Returns the gradient of the sum of squares of the repetitions' hidden states, zero for padding."""
    width = x.shape[1] * x.shape[2] // sizes.shape[1]
    present = jnp.arange(width) < sizes[..., None]
    return jnp.where(present.reshape(*x.shape[:3], 1), 2 * x, 0)


def _repeat_chunks(
    repeat: Repetition,
    rotary: Rotary,
    mesh: Mesh | None,
    group: DeviceGroup,
    layer: DecoderLayer,
    x: Float[Array, "B M c W"],
    prompt_keys: Float[Array, "B N h D"],
    prompt_values: Float[Array, "B N h D"],
    lengths: Int[Array, "B"],
    sizes: Int[Array, "B texts"],
) -> tuple[Float[Array, "B M c W"], Float[Array, "B MC h D"], Float[Array, "B MC h D"], Float[Array, "B h N"] | None]:
    """Returns the residual stream, queries, keys and received attention of `repeat_layer` for this device's tokens."""
    batch, chunks, size, _ = x.shape
    width = chunks * size * group.devices // sizes.shape[1]
    first = (np.arange(chunks)[:, None] * group.devices + group.device_index()) * size
    position = (first + np.arange(size)).reshape(-1) % width  # in the text
    tokens = x.reshape(batch, chunks * size, -1)
    query, key, value = (
        split_into_chunks(y, chunks) for y in layer.project(tokens, rotation(rotary, lengths[:, None] + position))
    )
    all_queries, key, value = (join_chunks(group.gather_tokens(y)) for y in (query, key, value))
    transposed = [y.swapaxes(1, 2) for y in (prompt_keys, prompt_values, key, value)]
    entries = PromptAndTexts._make([*transposed, lengths, sizes])
    attend: Callable[..., tuple[Array, Array | None]] = functools.partial(
        attend_repetitions,
        # Caches of a window do not select tokens, and policies weigh the attention of queries themselves.
        repeat=repeat if layer.window is None and repeat.weights == "none" else None,
        window=layer.window,
        logit_cap=layer.attention_logit_cap,
    )
    if mesh is not None:
        specs = PromptAndTexts._make([KV_SPEC] * 4 + [ROWS] * 2), PartitionSpec()
        attend = shard_attention(attend, mesh, head_counts(layer), *specs, results=(KV_SPEC,))
    sinks = None if layer.sink_logits is None else group.local_heads(layer.sink_logits)
    query = group.tokens_to_heads(query)
    first_block = group.first_shard(jnp.arange(chunks))[:, None] * (size // BLOCK)
    indices = (first_block + jnp.arange(query.shape[2] // BLOCK)).reshape(-1)
    attended, received = attend(join_chunks(query), entries, indices, sinks)
    attended = join_chunks(group.heads_to_tokens(split_into_chunks(attended, chunks)))
    return layer.finish(tokens, attended).reshape(x.shape), all_queries, key, received
