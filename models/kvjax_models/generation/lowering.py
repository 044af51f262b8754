"""The programs of generation, lowered so that a compiler can be asked about them: for devices that are not here, from
states and parameters that may be abstract."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.distributed.sharding import HEADS, ROWS
from kvjax_models.generation.decode import append_block, decode_block
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.prefill import prefill_cache, prefill_layer
from kvjax_models.generation.sequence_parallel import CHUNKS
from kvjax_models.generation.state import GenerationState, compact_layer, state_shardings


def lower_decode(
    generator: Generator, state: GenerationState, sharding: jax.sharding.Sharding | None = None
) -> jax.stages.Lowered:
    """The program that writes a block of tokens. Parameters are placed as `sharding` says."""
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding)  # noqa: E731
    model = jax.tree.map(place, generator.model)
    steps = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding)
    return decode_block.lower(
        model, generator.mesh, generator.sampling, generator.eos, generator.block_size, state, steps
    )


def lower_prefill(generator: Generator, tokens: int) -> tuple[jax.stages.Lowered, jax.stages.Lowered]:
    """The programs that read prompts of so many tokens exactly, through one layer (the last), and prefill_cache what it kept
    of them; the tokens are rounded up as the generator would."""
    size = generator.padding_multiple(tokens)
    tokens, cut = -(-tokens // size) * size, size > generator.prefill_chunk
    number, layer = generator.config.layers - 1, generator.model.layers[-1]
    asked, config, mesh = (
        generator.policies[number].requires.num_prompt_queries(tokens),
        generator.config,
        generator.mesh,
    )
    rotary = config.rotary(number, generator.specs[number].capacity)
    place = functools.partial(_abstract, mesh=mesh)
    dtype = generator.model.embedding.param_dtype
    lengths, rows = place((generator.batch,), jnp.int32, ROWS), (generator.batch, tokens // size, size, config.width)
    read = prefill_layer.lower(layer, rotary, mesh, cut, asked, place(rows, dtype, CHUNKS if cut else ROWS), lengths)
    heads = lambda count, heads: place((generator.batch, count, heads, config.head_dim), dtype, HEADS)  # noqa: E731
    stored = heads(tokens, config.kv_heads)
    queries = heads(asked, config.query_heads) if asked else None
    state = placed(jax.eval_shape(generator.init_state), mesh)
    cache, counters = state.layers[number], state.counters
    return read, prefill_cache.lower(
        cache, counters, stored, stored, lengths, queries, None, sink_logits=layer.sink_logits
    )


def lower_append(generator: Generator, state: GenerationState) -> list[jax.stages.Lowered]:
    """The programs that read a block of a streamed or later prompt: appending, then compacting each kind of layer."""
    block = jnp.zeros((generator.batch, generator.block_size), jnp.int32), jnp.zeros(generator.batch, jnp.int32)
    kinds = dict(zip(generator.policies, state.layers, strict=True))
    append = append_block.lower(generator.model, generator.mesh, state, *block)
    return [append, *(compact_layer.lower(cache, state.counters) for cache in kinds.values())]


def placed(state: Any, mesh: Mesh | None) -> Any:
    """Abstract values of a state, where it lies on a mesh."""
    lies = state_shardings(state, mesh)
    if lies is None:
        return state
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), state, lies)


def _abstract(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec, mesh: Mesh | None) -> jax.ShapeDtypeStruct:
    sharding = None if mesh is None else NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
