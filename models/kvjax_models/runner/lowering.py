"""Lowers the programs of generation for a compiler, also for absent devices and abstract parameters."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

import kvjax
from kvjax.distributed.sharding import HEADS, ROWS
from kvjax_models.runner.decode import append_program, decode_program
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.prefill import PrefilledLayer, prefill_cache, prefill_layer
from kvjax_models.runner.sequence_parallel import CHUNK_SPEC
from kvjax_models.runner.state import GenerationState, compact_layer, state_shardings
from kvjax_models.sharding import KV_SPEC


def lower_decode(
    generator: Generator, *states: GenerationState, sharding: jax.sharding.Sharding | None = None
) -> jax.stages.Lowered:
    """Lowers the program that decodes a block on an accelerator.

    Args:
        generator: model, policies and sizes.
        *states: states of groups of rows, or their shapes; the first one is the generator's.
        sharding: sharding of the parameters, which may then be abstract; by default their own.

    Returns:
        The lowered program.
    """
    model, steps = generator.model, jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding)
    if sharding is not None:
        model = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), model)
    # Arguments of the form that `decode_groups` passes, so that a state's own program is not compiled again.
    return decode_program.lower(
        model,
        generator.mesh,
        generator.eos,
        generator.block_size,
        states,
        steps,
        (None,) * len(states),
        (generator.scorer,) * len(states),
    )


def lower_compression(
    cache: kvjax.Cache, counters: kvjax.Counters, layer: PrefilledLayer, lengths: Int[Array, "B"]
) -> jax.stages.Lowered:
    """Lowers the program that stores a layer's prompts in its empty cache.

    Args:
        cache: empty cache; arrays or their shapes, as all arguments.
        counters: counters of all layers, before the prompt.

    Returns:
        The lowered program.
    """
    return prefill_cache.lower(cache, counters, lengths, None, layer.inputs_for(cache.policy))


def lower_prefill(generator: Generator, tokens: int) -> tuple[jax.stages.Lowered, jax.stages.Lowered]:
    """Lowers the programs of exact prefill for the last layer.

    Args:
        generator: model, policies and sizes.
        tokens: length of the prompts; rounded up as the generator does.

    Returns:
        The lowered programs that compute the layer and compress it.
    """
    size = generator.padding_multiple(tokens)
    tokens, sequence_parallel = -(-tokens // size) * size, size > generator.prefill_chunk
    number = generator.config.attention_layers[-1]
    layer = generator.model.layers[number]
    batch, config, mesh = generator.batch, generator.config.of_layer(number), generator.mesh
    num_queries = generator.policies[-1].requires.num_prompt_queries(tokens)
    rotary = config.rotary(number, generator.context_tokens)
    dtype = generator.model.embedding.param_dtype
    abstract = functools.partial(_abstract_array, mesh=mesh)
    lengths = abstract((batch,), jnp.int32, ROWS)
    x = abstract((batch, tokens // size, size, config.width), dtype, CHUNK_SPEC if sequence_parallel else ROWS)
    scorer = scores = None
    if generator.scorer is not None:
        scorer = abstract(generator.scorer.shape[1:], jnp.float32, PartitionSpec())
        scores = abstract((batch, config.kv_heads, tokens), jnp.float32, KV_SPEC)
    prefill = prefill_layer.lower(layer, rotary, mesh, sequence_parallel, num_queries, x, lengths, scorer)
    keys = abstract((batch, tokens, config.kv_heads, config.head_dim), dtype, HEADS)
    queries = abstract((batch, num_queries, config.query_heads, config.head_dim), dtype, HEADS) if num_queries else None
    state = abstract_state(jax.eval_shape(generator.init_state), mesh)
    prefilled = PrefilledLayer(x, keys, keys, queries, sink_logits=layer.sink_logits, predicted_scores=scores)
    return prefill, lower_compression(state.layers[-1], state.counters, prefilled, lengths)


def lower_append(generator: Generator, state: GenerationState) -> list[jax.stages.Lowered]:
    """Lowers the programs that append a block: appending, and compaction for each distinct policy.

    Args:
        generator: model, policies and sizes.

    Returns:
        The lowered programs.
    """
    block = jnp.zeros((generator.batch, generator.block_size), jnp.int32), jnp.zeros(generator.batch, jnp.int32)
    caches = dict(zip(generator.policies, state.layers, strict=True))
    append = append_program.lower(generator.model, generator.mesh, state, *block, None, generator.scorer)
    return [append, *(compact_layer.lower(cache, state.counters) for cache in caches.values())]


def abstract_state(state: Any, mesh: Mesh | None) -> Any:
    """Returns the shapes of a state with its shardings on a mesh.

    Args:
        mesh: mesh of the state; None returns the state itself.
    """
    shardings = state_shardings(state, mesh)
    if shardings is None:
        return state

    def abstract(x: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(abstract, state, shardings)


def _abstract_array(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec, mesh: Mesh | None) -> Any:
    sharding = None if mesh is None else NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
