"""Exact prefill: computes a prompt layer by layer and compresses each layer at once.

Beyond the caches, the keys and values of a single layer exist at a time.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

import kvjax
from kvjax.distributed.sharding import HEADS, ROWS
from kvjax.policy import Policy, RepeatedPrompt, Repetition
from kvjax_models.model import flash_attention
from kvjax_models.model.exact_attention import attend_in_chunks
from kvjax_models.model.llama import DecoderLayer, Llama, RecurrentLayer
from kvjax_models.model.recurrent import RecurrentState
from kvjax_models.model.rotary import Angles, Rotary, rotation
from kvjax_models.runner import repetition
from kvjax_models.runner.scorer import predict_log_scores
from kvjax_models.runner.sequence_parallel import (
    CHUNK_SPEC,
    DeviceGroup,
    chunk_size,
    join_chunks,
    split_into_chunks,
    with_gathered_parameters,
)
from kvjax_models.sharding import (
    KV_SPEC,
    constrain_states,
    constrain_to_batch,
    head_counts,
    mesh_of,
    replicate,
    shard_array,
    shard_attention,
)


class PrefilledLayer(NamedTuple):
    """The results of one layer with attention for prompts that are padded to N tokens.

    In a hybrid model, they include the layers without attention that follow it, and that precede the first one.
    """

    x: Float[Array, "B M C W"]  # the residual stream in chunks after these layers; donated to the next one
    keys: Float[Array, "B N H_kv D"]
    values: Float[Array, "B N H_kv D"]
    queries: Float[Array, "B w H_q D"] | None  # of the last tokens, right-aligned, as many as were requested
    repeated: RepeatedPrompt | None = None  # projections of repetitions of the prompt
    sink_logits: Float[Array, "H_q"] | None = None
    predicted_scores: Float[Array, "B H_kv N"] | None = None  # float32 log scores of the tokens
    recurrent: tuple[RecurrentState, ...] = ()  # states of the layers without attention after the prompts

    def inputs_for(self, policy: Policy) -> dict[str, Any]:
        """Returns the arguments of `kvjax.prefill` that a policy requires."""
        requires, queries = policy.requires, self.queries
        if queries is not None and queries.shape[1] > requires.num_prompt_queries(self.keys.shape[1]):
            queries = kvjax.prompt_queries(policy, queries)
        return {
            "keys": self.keys,
            "values": self.values,
            "queries": queries,
            "repeated": None if requires.repetition is None else self.repeated,
            "sink_logits": self.sink_logits,
            "predicted_scores": self.predicted_scores if requires.predicted_scores else None,
        }


@dataclasses.dataclass
class _Repetitions:
    """Repetitions of the prompts, which are computed after the prompts in every layer.

    Attributes:
        x: residual stream in chunks.
        sizes: lengths of the repetitions.
        inputs: residual stream before each layer with attention, for gradients.
    """

    repeat: Repetition
    mesh: Mesh | None
    sequence_parallel: bool
    x: Float[Array, "B M C W"]
    sizes: Int[Array, "B texts"]
    inputs: list[Float[Array, "B M C W"]] = dataclasses.field(default_factory=list)

    @property
    def needs_gradients(self) -> bool:
        """Whether the weights of the queries are gradients."""
        return self.repeat.weights == "gradient"

    def compute(
        self, layer: DecoderLayer, rotary: Rotary, prompt: PrefilledLayer, lengths: Int[Array, "B"]
    ) -> RepeatedPrompt:
        """Computes a layer with attention, given its results for the prompts."""
        if self.needs_gradients:
            self.inputs.append(jnp.copy(self.x))
        arrays = self.x, prompt.keys, prompt.values, lengths, self.sizes
        self.x, repeated = repetition.repeat_layer(
            layer, self.repeat, rotary, self.mesh, self.sequence_parallel, *arrays
        )
        return repeated

    def compute_recurrent(self, layer: RecurrentLayer, state: RecurrentState) -> None:
        """Computes a layer without attention, given its state after the prompts."""
        self.x = repetition.repeat_recurrent_layer(layer, self.mesh, self.x, state, self.sizes)


def prefill_layers(
    model: Llama,
    tokens: Int[np.ndarray, "B N"],
    lengths: Int[Array, "B"],
    chunk: int,
    num_queries: Sequence[int],
    repeat: Repetition | None = None,
    capacity: int | None = None,
    scorer: Float[Array | np.ndarray, "L W+2 H_kv"] | None = None,
) -> Iterator[PrefilledLayer]:
    """Computes prompts layer by layer with exact attention.

    In a hybrid model, only layers with attention count.

    Args:
        tokens: padded prompts; N must be a multiple of `chunk`. Sequence parallelism is used only if N is also a
            multiple of `sequence_parallel.chunk_size`.
        chunk: tokens per chunk on one device.
        num_queries: for each layer, the number of the prompt's last queries to return.
        repeat: whether each layer also processes repetitions of the prompts, for policies that score with them.
        capacity: maximum length of the sequences, on which some rotary embeddings depend; N by default.
        scorer: coefficients with which each layer predicts the scores of the tokens (`profile.Profile.scorer`), for
            policies that require them; None to predict none.

    Yields:
        The results of each layer.

    Raises:
        ValueError: if `repeat` needs gradients through layers without attention.
    """
    mesh, (batch, count) = mesh_of(model), tokens.shape
    capacity = count if capacity is None else capacity
    size = chunk_size(model, mesh, batch, count, chunk)
    sequence_parallel = size > chunk and count % size == 0

    def embed_chunks(chunks: np.ndarray) -> Array:
        """Embeds the tokens of `chunks`, sharded over the mesh with sequence parallelism."""
        if not sequence_parallel or mesh is None:
            return embed(model, replicate(chunks, mesh))
        return embed(model, shard_array(chunks, NamedSharding(mesh, CHUNK_SPEC)), mesh)

    x, texts = embed_chunks(tokens.reshape(batch, -1, size if sequence_parallel else chunk)), None
    if repeat is not None:
        block = repetition.BLOCK * (size // chunk if sequence_parallel else 1)
        repeated, text_lengths = repetition.make_repetitions(repeat, tokens, np.asarray(lengths), block)
        text_x = embed_chunks(repeated.reshape(batch, -1, block))
        texts = _Repetitions(repeat, mesh, sequence_parallel, text_x, replicate(text_lengths, mesh))
        if texts.needs_gradients and model.config.recurrent_layers:
            raise ValueError(
                "the policy scores with gradients, which pass layers with attention only; use another policy"
            )
    results: list[PrefilledLayer] = []
    numbers = model.config.attention_layers
    x, leading = _compute_recurrent_layers(model.layers[: numbers[0]], mesh, x, lengths, texts)
    ends = (*numbers[1:], model.config.layers)
    for index, (number, end, layer_queries) in enumerate(zip(numbers, ends, num_queries, strict=True)):
        layer, rotary = model.layers[number], model.config.rotary(number, capacity)
        layer_scorer = None if scorer is None else scorer[index]
        result = prefill_layer(layer, rotary, mesh, sequence_parallel, layer_queries, x, lengths, layer_scorer)
        of_texts = None if texts is None else texts.compute(layer, rotary, result, lengths)
        x, states = _compute_recurrent_layers(model.layers[number + 1 : end], mesh, result.x, lengths, texts)
        recurrent = states if index else leading + states
        result = result._replace(x=x, sink_logits=layer.sink_logits, repeated=of_texts, recurrent=recurrent)
        if texts is not None and texts.needs_gradients:
            results.append(result)
        else:
            yield result
    if texts is not None and texts.needs_gradients:
        yield from _add_gradients(model, results, texts, lengths, capacity)


def _compute_recurrent_layers(
    layers: Sequence[RecurrentLayer],
    mesh: Mesh | None,
    x: Float[Array, "B M C W"],
    lengths: Int[Array, "B"],
    texts: _Repetitions | None,
) -> tuple[Float[Array, "B M C W"], tuple[RecurrentState, ...]]:
    """Returns the residual stream of the prompts after consecutive layers without attention, and their states."""
    states: list[RecurrentState] = []
    for layer in layers:
        x, state = prefill_recurrent_layer(layer, mesh, x, lengths)
        states.append(state)
        if texts is not None:
            texts.compute_recurrent(layer, state)
    return x, tuple(states)


def _add_gradients(
    model: Llama, layers: Sequence[PrefilledLayer], texts: _Repetitions, lengths: Int[Array, "B"], capacity: int
) -> list[PrefilledLayer]:
    """Sets `RepeatedPrompt.query_weights` of all layers to the norms of gradients; see `kvjax.KVgrad`."""
    gradient, weighted = repetition.final_gradient(texts.x, texts.sizes), []
    for number in reversed(range(len(layers))):
        result, rotary = layers[number], model.config.rotary(number, capacity)
        assert result.repeated is not None
        arrays = (texts.inputs[number], result.keys, result.values, lengths, texts.sizes)
        gradient, weights = repetition.backpropagate_layer(model.layers[number], rotary, *arrays, gradient)
        weighted.append(result._replace(repeated=dataclasses.replace(result.repeated, query_weights=weights)))
    return weighted[::-1]


def compress_layer(
    cache: kvjax.Cache,
    counters: kvjax.Counters,
    layer: PrefilledLayer,
    lengths: Int[Array, "B"],
    layer_carry: Shaped[Array, "B H_kv *N"] | None = None,
) -> tuple[kvjax.Cache, kvjax.Counters, Shaped[Array, "B H_kv *N"] | None]:
    """Stores a layer's prompts in its empty cache.

    Args:
        cache: empty cache; donated.
        counters: counters of all layers, before the prompt.
        layer_carry: the third result for the previous layer.

    Returns:
        The cache, the counters after the prompt, and the carry for the next layer.
    """
    return prefill_cache(cache, counters, lengths, layer_carry, layer.inputs_for(cache.policy))


@functools.partial(jax.jit, donate_argnames=("cache",))
def prefill_cache(
    cache: kvjax.Cache,
    counters: kvjax.Counters,
    lengths: Int[Array, "B"],
    layer_carry: Shaped[Array, "B H_kv *N"] | None,
    inputs: dict[str, Any],
) -> tuple[kvjax.Cache, kvjax.Counters, Shaped[Array, "B H_kv *N"] | None]:
    """Calls `kvjax.prefill` in a compiled program that does not donate the counters, which all layers share.

    Args:
        inputs: further arguments of `kvjax.prefill` (`PrefilledLayer.inputs_for`).

    Returns:
        The results of `compress_layer`.
    """
    return kvjax.prefill(cache, counters, lengths=lengths, layer_carry=layer_carry, **inputs)


@functools.partial(jax.jit, static_argnames=("mesh",))
def embed(model: Llama, tokens: Int[Array, "*N"], mesh: Mesh | None = None) -> Float[Array, "*N W"]:
    """Computes embeddings.

    Args:
        mesh: for sequence parallelism: every device gathers the table and looks up its own tokens.

    Returns:
        The embeddings.
    """
    if mesh is None:
        return model.embed(tokens)
    embed_local = with_gathered_parameters(
        Llama.embed, mesh, model, model.config.query_heads, (CHUNK_SPEC,), CHUNK_SPEC
    )
    return embed_local(tokens)


@functools.partial(
    jax.jit, static_argnames=("rotary", "mesh", "sequence_parallel", "num_queries"), donate_argnames=("x",)
)
def prefill_layer(
    layer: DecoderLayer,
    rotary: Rotary,
    mesh: Mesh | None,
    sequence_parallel: bool,
    num_queries: int,
    x: Float[Array, "B M C W"],
    lengths: Int[Array, "B"],
    scorer: Float[Array, "W+2 H_kv"] | None = None,
) -> PrefilledLayer:
    """Computes one layer of entire prompts.

    Args:
        sequence_parallel: whether the devices of a layer share the tokens.
        num_queries: number of the prompt's last queries to return.
        x: residual stream in chunks; donated.
        scorer: the layer's coefficients of predicted scores; None to predict none.

    Returns:
        The results of the layer.
    """
    if mesh is None or not sequence_parallel:
        x = constrain_to_batch(x, mesh)
        result = _prefill_chunks(rotary, mesh, [DeviceGroup()], num_queries, layer, x, lengths, scorer)
        if (scores := result.predicted_scores) is not None and mesh is not None:
            scores = jax.lax.with_sharding_constraint(scores, NamedSharding(mesh, KV_SPEC))
        return result._replace(x=constrain_to_batch(result.x, mesh), predicted_scores=scores)
    groups = [DeviceGroup.from_mesh(mesh, head_counts(layer), always) for always in (False, True)]
    prefill = functools.partial(_prefill_chunks, rotary, None, groups, num_queries)
    results: Any = PrefilledLayer(*(CHUNK_SPEC, HEADS, HEADS, HEADS), predicted_scores=KV_SPEC)  # type: ignore[arg-type]
    specs = (CHUNK_SPEC, ROWS, PartitionSpec()), results
    run = with_gathered_parameters(prefill, mesh, layer, layer.attention.query_heads, *specs)
    return run(x, lengths, scorer)


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("x",))
def prefill_recurrent_layer(
    layer: RecurrentLayer, mesh: Mesh | None, x: Float[Array, "B M C W"], lengths: Int[Array, "B"]
) -> tuple[Float[Array, "B M C W"], RecurrentState]:
    """Computes one layer without attention of entire prompts, chunk by chunk.

    Args:
        x: residual stream in chunks; donated.

    Returns:
        The new residual stream, and the states after the prompts.
    """
    size = x.shape[2]

    def step(state: RecurrentState, chunk: tuple[Array, Array]) -> tuple[RecurrentState, Array]:
        """Computes one chunk, given its number and its residual stream."""
        number, x = chunk
        y, state = layer(x, state, jnp.clip(lengths - number * size, 0, size))
        return constrain_states(state, mesh), constrain_to_batch(y, mesh)

    chunks = jnp.arange(x.shape[1]), constrain_to_batch(x, mesh).swapaxes(0, 1)
    state, y = jax.lax.scan(step, constrain_states(layer.init_state(len(x)), mesh), chunks)
    return constrain_to_batch(y.swapaxes(0, 1), mesh), state


@jax.jit
def last_logits(model: Llama, x: Float[Array, "B M C W"], lengths: Int[Array, "B"]) -> Float[Array, "B V"]:
    """Returns the logits after each prompt's last token.

    Args:
        x: residual stream after the last layer, in chunks.
    """
    chunk, offset = (index[:, None, None] for index in jnp.divmod(lengths - 1, x.shape[2]))
    last = jnp.take_along_axis(jnp.take_along_axis(x, chunk[..., None], axis=1)[:, 0], offset, axis=1)[:, 0]
    return model.logits(last)


class _ChunkedLayer(NamedTuple):
    """A layer's computations on single chunks of this device's tokens."""

    layer: DecoderLayer
    rotary: Rotary
    group: DeviceGroup
    mesh: Mesh | None

    def rotation(self, x: Float[Array, "B M c W"], chunk: Int[Array, ""]) -> Angles:
        """Returns the rotary angles of this device's tokens of a `chunk`, an index into axis 1 of `x`."""
        batch, _, size, _ = x.shape
        first = (chunk * self.group.devices + self.group.device_index()) * size
        return rotation(self.rotary, jnp.broadcast_to(first + jnp.arange(size), (batch, size)))

    def queries(self, x: Float[Array, "B M c W"], chunk: Int[Array, ""]) -> Float[Array, "B c H D"]:
        """Returns the rotated queries of this device's tokens of `x` in a `chunk`."""
        return self.layer.project_queries(_take_chunk(x, chunk), self.rotation(x, chunk))

    def all_queries(self, x: Float[Array, "B M c W"]) -> Float[Array, "M B c H D"]:
        """Returns the rotated queries of all chunks of `x`."""
        return jax.lax.map(functools.partial(self.queries, x), jnp.arange(x.shape[1]))

    def all_keys_and_values(self, x: Float[Array, "B M c W"]) -> tuple[Array, Array]:
        """Returns the keys and values of all tokens, from the residual stream `x`, for this device's heads."""

        def project(chunk):
            return self.layer.project_kv(_take_chunk(x, chunk), self.rotation(x, chunk))

        keys, values = jax.lax.map(project, jnp.arange(x.shape[1]))
        return join_chunks(self.group.gather_tokens(keys)), join_chunks(self.group.gather_tokens(values))

    def predicted_scores(self, scorer: Float[Array, "W+2 H_kv"], x: Float[Array, "B M c W"]) -> Float[Array, "B h N"]:
        """Returns the predicted log scores of all tokens, from the residual stream `x`, for this device's heads."""

        def predict(chunk):
            first = (chunk * self.group.devices + self.group.device_index()) * x.shape[2]
            return predict_log_scores(scorer, self.layer.normalize(_take_chunk(x, chunk)), first)

        scores = jax.lax.map(predict, jnp.arange(x.shape[1]))
        return join_chunks(self.group.gather_tokens(scores[..., None]))[..., 0].swapaxes(1, 2)

    def finish(self, x: Float[Array, "B M c W"], attended: Array, chunk: Int[Array, ""]) -> Float[Array, "B M c W"]:
        """Replaces a `chunk` of the residual stream `x` by the layer's output, given the output `attended`."""
        new_chunk = constrain_to_batch(self.layer.finish(_take_chunk(x, chunk), attended), self.mesh)
        return jax.lax.dynamic_update_index_in_dim(x, new_chunk, chunk, axis=1)

    def shard_attention(self, attend: Callable[..., Array], *specs: PartitionSpec) -> Callable[..., Array]:
        """Wraps `attend` in `shard_map` if the model is on a mesh; `specs` are for arguments after keys and values."""
        if self.mesh is None:
            return attend
        return shard_attention(attend, self.mesh, head_counts(self.layer), KV_SPEC, KV_SPEC, *specs)

    def attend_by_chunks(self, x: Array, keys: Array, values: Array, sink_logits: Array | None) -> Array:
        """Computes the layer with attention in XLA, chunk by chunk.

        Args:
            x: residual stream before the layer, [B, M, c, W].
            sink_logits: attention sink logits [H_q].

        Returns:
            The residual stream after the layer.
        """
        attend_chunks = functools.partial(
            attend_in_chunks, chunk=x.shape[2], window=self.layer.window, logit_cap=self.layer.attention_logit_cap
        )
        attend = self.shard_attention(attend_chunks, PartitionSpec())
        sinks = None if sink_logits is None else self.group.local_heads(sink_logits)

        def step(x, chunk):
            """Computes the layer for one `chunk` of `x`."""
            query = self.group.tokens_to_heads(self.queries(x, chunk)[None], chunk)[0]
            attended = attend(query, keys, values, self.group.first_shard(chunk), sinks)
            return self.finish(x, self.group.heads_to_tokens(attended[None], chunk)[0], chunk), None

        return jax.lax.scan(step, x, jnp.arange(x.shape[1]))[0]

    def attend_by_kernel(
        self, attend: flash_attention.Attend, x: Array, keys: Array, values: Array, sink_logits: Array | None
    ) -> Array:
        """Computes the layer with attention of all chunks in one kernel.

        Args:
            attend: attention function of a kernel (`flash_attention`).
            x: residual stream before the layer, [B, M, c, W].
            sink_logits: attention sink logits [H_q].

        Returns:
            The residual stream after the layer.
        """
        chunks = x.shape[1]
        sinks = None if sink_logits is None else self.group.local_heads(sink_logits)
        query = join_chunks(self.group.tokens_to_heads(self.all_queries(x)))
        attend_run = functools.partial(attend, run=self.group.run())  # type: ignore[call-arg]
        attended = self.shard_attention(attend_run)(query, keys, values, sinks)
        attended = self.group.heads_to_tokens(split_into_chunks(attended, chunks))

        def step(x, chunk_output):
            return self.finish(x, *chunk_output), None

        return jax.lax.scan(step, x, (attended, jnp.arange(chunks)))[0]


def _prefill_chunks(
    rotary: Rotary,
    mesh: Mesh | None,
    groups: Sequence[DeviceGroup],
    num_queries: int,
    layer: DecoderLayer,
    x: Float[Array, "B M c W"],
    lengths: Int[Array, "B"],
    scorer: Float[Array, "W+2 H_kv"] | None,
) -> PrefilledLayer:
    """Returns the results of `prefill_layer` for this device's tokens.

    Attention is shared as in the first group that a kernel supports. With a mesh, the compiler partitions projections.
    """
    tokens = x.shape[1] * x.shape[2] * groups[0].devices
    chunked = _ChunkedLayer(layer, rotary, groups[0], mesh)
    queries = _last_queries(layer, rotary, groups[0], num_queries, x, lengths) if num_queries else None
    scores = None if scorer is None else chunked.predicted_scores(scorer, x)
    keys, values = chunked.all_keys_and_values(x)
    kernels = {
        platform: functools.partial(chunked._replace(group=group).attend_by_kernel, attend)
        for group in groups[::-1]
        for platform, attend in flash_attention.available_kernels(
            flash_attention.AttentionSpec.for_layer(layer, x.dtype, tokens, x.shape[1], group.runs)
        ).items()
    }
    # Transposed once, [B, H_kv, N, D], for all matrix products.
    args = (x, keys.swapaxes(1, 2), values.swapaxes(1, 2), layer.sink_logits)
    if kernels:
        x = jax.lax.platform_dependent(*args, default=chunked.attend_by_chunks, **kernels)
    else:
        x = chunked.attend_by_chunks(*args)
    return PrefilledLayer(x, keys, values, queries, predicted_scores=scores)


def _last_queries(
    layer: DecoderLayer,
    rotary: Rotary,
    group: DeviceGroup,
    num_queries: int,
    x: Float[Array, "B M c W"],
    lengths: Int[Array, "B"],
) -> Float[Array, "B w h D"]:
    """Returns the last queries of each row for this device's heads; the devices of a group share the projections."""
    share = min(-(-num_queries // group.devices), x.shape[2])
    block = share * group.devices
    positions = lengths[:, None] - num_queries + jnp.arange(-(-num_queries // block) * block)

    def project_block(positions):
        """Returns this device's share of the queries at `positions`."""
        local = jax.lax.dynamic_slice_in_dim(positions, group.device_index() * share, share, axis=1)
        return layer.project_queries(group.take_tokens(x, positions), rotation(rotary, local))

    blocks = positions.reshape(len(lengths), -1, block).swapaxes(0, 1)
    return join_chunks(group.gather_tokens(jax.lax.map(project_block, blocks)))[:, :num_queries]


def _take_chunk(x: Shaped[Array, "B M *D"], chunk: Int[Array, ""]) -> Shaped[Array, "B *D"]:
    return jax.lax.dynamic_index_in_dim(x, chunk, axis=1, keepdims=False)


PROGRAMS = (
    embed,
    prefill_layer,
    prefill_recurrent_layer,
    repetition.repeat_layer,
    repetition.repeat_recurrent_layer,
    repetition.backpropagate_layer,
    prefill_cache,
    last_logits,
)
