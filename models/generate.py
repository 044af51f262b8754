"""Generation through a compressed cache: a prompt is read exactly, layer by layer, or streamed through the compressed
cache block by block; then come compiled blocks of decoding steps.

A `Generator` binds a model to a cache policy and to sizes; a `GenerationState` is everything that a generation is at a
moment, as a pytree: it can be forked, saved, and continued with another turn. Between blocks every layer's staged
tokens are compacted, so a returned state is always settled.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

import kvjax
from kvjax import rope
from kvjax.policy import ALL_QUERIES
from kvjax.sharding import HEADS, ROWS
from kvjax.state import BATCH, array, state
from models.exact_attention import chunk_attention
from models.llama import Llama, LlamaConfig, rope_frequencies
from models.sampling import Sampling, finite, sample
from models.sharding import attend_apart, mesh_of, put

NO_TOKEN = -1  # in returned token blocks, where a row had already ended


@state
class GenerationState:
    """A generation between two blocks. Rows are independent: `kvjax.take_rows` and its kin apply."""

    layers: tuple[Any, ...]  # one cache state per layer
    logits: Float[Array, "B V"] = array(BATCH, "vocabulary")  # float32, of the next token
    positions: Int[Array, "B"] = array(BATCH)  # int32, tokens read or written so far
    done: Bool[Array, "B"] = array(BATCH)  # whether the row has ended its turn
    sampling_keys: Key[Array, "B"] = array(BATCH)
    not_finite: Int[Array, "B"] = array(BATCH, fault="steps had logits that are NaN or infinite")


class Generator:
    """A model, a cache policy and sizes, ready to read prompts and to write.

    Args:
        model: the decoder; its parameters are used as they are. Where they lie on a mesh (`models.sharding.place`),
            caches lie there too, and every device generates its part.
        policy: one policy for all layers, or one per layer. Layers with a sliding window keep exactly that window
            instead, whatever the policy.
        batch: rows.
        max_prompt: most tokens of a first prompt.
        max_new: most tokens after it: generated ones and later turns' together.
        sampling: greedy by default.
        eos: token ids that end a row's turn.
        prefill_chunk: tokens per chunk of exact prefill; prompts are padded to a multiple of it.
        streaming: whether the first prompt, too, is read as later ones are: a block of `period` tokens at a time, each
            attending to the compressed cache and causally to itself. Memory is then what the policy keeps, however
            long the prompt.

    Raises:
        ValueError: for a number of policies that is not the number of layers, a policy that cannot stream where that is
            asked for, or what the policies themselves refuse.
    """

    def __init__(
        self,
        model: Llama,
        policy: kvjax.CachePolicy | Sequence[kvjax.CachePolicy],
        *,
        batch: int,
        max_prompt: int,
        max_new: int,
        sampling: Sampling | None = None,
        eos: Sequence[int] = (),
        prefill_chunk: int = 256,
        streaming: bool = False,
    ):
        config = model.config
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk={prefill_chunk}; it must be at least 1 token")
        self.model, self.config = model, config
        self.batch, self.max_prompt, self.max_new = batch, max_prompt, max_new
        self.sampling, self.eos, self.prefill_chunk = sampling or Sampling(), tuple(eos), prefill_chunk
        self.streaming = streaming
        self.mesh = mesh_of(model)
        self.policies = layer_policies(config, policy)
        if self.mesh is not None:
            self.policies = tuple(kvjax.sharded(policy, self.mesh) for policy in self.policies)
        if streaming and (refusing := [policy.name for policy in self.policies if not policy.streams]):
            raise ValueError(f"streaming: {refusing[0]} compresses whole prompts only; read them exactly")
        self.specs = cache_specs(model, batch=batch, max_prompt=max_prompt, max_new=max_new, streaming=streaming)
        self.block = min(self.specs[0].max_new, *(policy.period for policy in self.policies))
        self._graph, self._parameters = nnx.split(model)

    def start(self, seed: int = 0) -> GenerationState:
        """An empty state. Every row has its own randomness, from the seed and its number."""
        return self._fresh(seed) if self.mesh is None else self._fresh_on_mesh(seed)

    @functools.cached_property
    def _fresh_on_mesh(self) -> Callable[[int], GenerationState]:
        # One program: what it makes may lie on devices of other processes.
        return jax.jit(self._fresh, out_shardings=state_shardings(jax.eval_shape(self._fresh, 0), self.mesh))

    def _fresh(self, seed: int | Int[Array, ""]) -> GenerationState:
        key = jax.random.key(seed)
        rows = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(self.batch))
        cache_keys, sampling_keys = jax.vmap(jax.random.split, out_axes=1)(rows)
        layers = tuple(
            _init(policy, spec, jax.vmap(lambda key, number=number: jax.random.fold_in(key, number))(cache_keys))
            for number, (policy, spec) in enumerate(zip(self.policies, self.specs, strict=True))
        )
        return GenerationState(
            layers=layers,
            logits=jnp.zeros((self.batch, self.config.vocab_size), jnp.float32),
            positions=jnp.zeros(self.batch, jnp.int32),
            done=jnp.zeros(self.batch, bool),
            sampling_keys=sampling_keys,
            not_finite=jnp.zeros(self.batch, jnp.int32),
        )

    def read(self, state: GenerationState, prompts: Sequence[Sequence[int]]) -> GenerationState:
        """Reads one prompt per row; the given state must not be used again (its buffers are donated).

        Unless they are streamed, the first prompts are attended to exactly, and each layer is compressed as soon as it
        is done. Later ones (a further turn) are appended and attend to the compressed cache, a block at a time, just as
        generated tokens do.

        Raises:
            ValueError: for an empty prompt, a prompt longer than `max_prompt`, more tokens in all than the caches were
                made for, or a token outside the vocabulary.
        """
        positions = np.asarray(state.positions)
        if not self.streaming and not positions.any():
            return prefill_together([self], [state], prompts)[0]
        tokens, lengths = self._pad(prompts, self.block)
        self._check_room(positions, lengths)
        state = _bound(state, self.mesh)
        for begin in range(0, tokens.shape[1], self.block):
            state = _append_block(
                self._graph,
                self.policies,
                self.mesh,
                self._parameters,
                state,
                everywhere(tokens[:, begin : begin + self.block], self.mesh),
                everywhere(np.clip(lengths - begin, 0, self.block), self.mesh),
            )
            state = self._compact(state)
        _check_finite(state)
        return state

    def score(
        self, state: GenerationState, texts: Sequence[Sequence[int]]
    ) -> tuple[GenerationState, list[Float[np.ndarray, "T"]]]:
        """Reads one text per row through the cache, as `read` reads later prompts, and tells how likely each token was.

        The first tokens of a fresh state are scored under uniform logits, having nothing before them: leave them out.

        Returns:
            The state after the texts, and each row's natural log-probabilities of its tokens, float32.

        Raises:
            ValueError: as `read`; and for a fresh state of a generator that reads prompts exactly.
        """
        positions = np.asarray(state.positions)
        if not self.streaming and not positions.any():
            raise ValueError("score reads through the cache: read a prompt first, or make the generator streaming")
        tokens, lengths = self._pad(texts, self.block)
        self._check_room(positions, lengths)
        state = _bound(state, self.mesh)
        scored = []
        for begin in range(0, tokens.shape[1], self.block):
            block = everywhere(tokens[:, begin : begin + self.block], self.mesh)
            own = everywhere(np.clip(lengths - begin, 0, self.block), self.mesh)
            state, likelihood = _score_block(self._graph, self.policies, self.mesh, self._parameters, state, block, own)
            scored.append(likelihood)
            state = self._compact(state)
        _check_finite(state)
        rows = np.concatenate([np.asarray(block) for block in scored], axis=1)
        return state, [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def write(self, state: GenerationState, max_tokens: int) -> Iterator[tuple[GenerationState, np.ndarray]]:
        """Writes up to `max_tokens` tokens per row, block by block.

        Yields:
            The state after each block and the block's tokens, int32 [B, n], `NO_TOKEN` where a row had ended. Only the
            newest state may be used further. An end-of-sequence token is yielded and read like any other, and the
            generation stops when all rows have written one.

        Raises:
            ValueError: when the caches were not made for so many tokens, or logits turn NaN or infinite.
        """
        self._check_room(np.asarray(state.positions), np.where(np.asarray(state.done), 0, max_tokens))
        state = _bound(state, self.mesh)
        written = 0
        while written < max_tokens and not np.asarray(state.done).all():
            steps = min(self.block, max_tokens - written)
            state, tokens, taken = _decode_block(
                self._graph,
                self.policies,
                self.mesh,
                self.sampling,
                self.eos,
                self.block,
                self._parameters,
                state,
                everywhere(np.int32(steps), self.mesh),
            )
            state = self._compact(state)
            written += steps
            _check_finite(state)
            yield state, np.asarray(tokens)[:, : int(taken)]

    def lower_decode(self, state: GenerationState, sharding: jax.sharding.Sharding | None = None) -> jax.stages.Lowered:
        """The program that writes a block of tokens, lowered for a state or its abstract values. Parameters are placed
        as `sharding` says; a device that is not here will do for a compiler."""
        place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding)  # noqa: E731
        parameters = jax.tree.map(place, self._parameters)
        steps = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding)
        return _decode_block.lower(
            self._graph, self.policies, self.mesh, self.sampling, self.eos, self.block, parameters, state, steps
        )

    def lower_prefill(self, tokens: int) -> tuple[jax.stages.Lowered, jax.stages.Lowered]:
        """The programs that read prompts of so many tokens exactly, through one layer (the last), and compress what it
        kept of them, lowered for parameters that may be abstract, so that a compiler can be asked about them."""
        number, layer = self.config.layers - 1, self.model.layers[-1]
        policy, config = self.policies[number], self.config
        tail = query_tail(policy, tokens)
        place = functools.partial(_abstract, mesh=self.mesh)
        dtype = self.model.embedding.param_dtype
        lengths = place((self.batch,), jnp.int32)
        graph, parameters = nnx.split(layer)
        read = prefill_layer.lower(
            graph, config, self.mesh, self.prefill_chunk, tail,
            parameters, place((self.batch, tokens, config.width), dtype), lengths,
        )  # fmt: skip
        heads = lambda count, heads: place((self.batch, count, heads, config.head_dim), dtype, heads=True)  # noqa: E731
        stored = heads(tokens, config.kv_heads)
        queries = heads(tail, config.query_heads) if tail else None
        cache = placed(jax.eval_shape(self.start), self.mesh).layers[number]
        return read, compress.lower(policy, cache, stored, stored, lengths, queries, None)

    def lower_append(self, state: GenerationState) -> list[jax.stages.Lowered]:
        """The programs that read a block of a streamed or later prompt (appending, then compacting each kind of layer),
        lowered for a state or its abstract values, so that a compiler can be asked about them."""
        block = jnp.zeros((self.batch, self.block), jnp.int32), jnp.zeros(self.batch, jnp.int32)
        layers = dict(zip(self.policies, state.layers, strict=True))
        return [
            _append_block.lower(self._graph, self.policies, self.mesh, self._parameters, state, *block),
            *(_compact.lower(policy, layer) for policy, layer in layers.items()),
        ]

    def _compact(self, state: GenerationState) -> GenerationState:
        layers = tuple(_compact(policy, layer) for policy, layer in zip(self.policies, state.layers, strict=True))
        return dataclasses.replace(state, layers=layers)

    def _pad(self, prompts: Sequence[Sequence[int]], multiple: int) -> tuple[np.ndarray, np.ndarray]:
        """Prompts as one left-aligned array, padded to a multiple, and their lengths."""
        if len(prompts) != self.batch:
            raise ValueError(f"{len(prompts)} prompts were given for batch={self.batch}")
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        if not lengths.all():
            raise ValueError(f"prompt {int(np.argmin(lengths))} is empty; a prompt needs at least one token")
        tokens = np.zeros((self.batch, -(-int(np.max(lengths)) // multiple) * multiple), np.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        if np.min(tokens) < 0 or np.max(tokens) >= self.config.vocab_size:
            raise ValueError(
                f"prompts hold token ids from {np.min(tokens)} to {np.max(tokens)}; the vocabulary has "
                f"{self.config.vocab_size}"
            )
        return tokens.astype(np.int32), lengths

    def _check_room(self, positions: np.ndarray, more: np.ndarray) -> None:
        capacity = self.max_prompt + self.max_new
        needed = int((positions + more).max())
        if needed > capacity:
            raise ValueError(
                f"{needed} tokens in a row exceed max_prompt + max_new = {self.max_prompt} + {self.max_new} that the "
                "caches were made for"
            )


def generate(
    model: Llama,
    policy: kvjax.CachePolicy | Sequence[kvjax.CachePolicy],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    eos: Sequence[int] = (),
    seed: int = 0,
) -> tuple[list[list[int]], GenerationState]:
    """Continues each prompt by up to `max_new_tokens` tokens; `Generator` is the same in steps.

    Returns:
        Each row's new tokens, an end-of-sequence token included, and the state after them.
    """
    generator = Generator(
        model,
        policy,
        batch=len(prompts),
        max_prompt=max(1, *map(len, prompts)),  # an empty prompt is refused when it is read
        max_new=max_new_tokens,
        sampling=sampling,
        eos=eos,
    )
    state = generator.read(generator.start(seed), prompts)
    rows: list[list[int]] = [[] for _ in prompts]
    for newest, tokens in generator.write(state, max_new_tokens):
        state = newest
        collect(rows, tokens)
    return rows, state


def collect(rows: list[list[int]], tokens: np.ndarray) -> None:
    """Appends a block of `Generator.write` to each row's tokens."""
    for row, new in zip(rows, tokens, strict=True):
        row.extend(int(token) for token in new if token != NO_TOKEN)


def prefill_together(
    generators: Sequence[Generator], states: Sequence[GenerationState], prompts: Sequence[Sequence[int]]
) -> list[GenerationState]:
    """Exact prefill of the same prompts into the fresh caches of several generators of one model, computed once.

    It goes layer by layer over all chunks, so that beyond what the policies keep the keys and values of one layer
    exist at a time.

    Raises:
        ValueError: as `Generator.read`; and when the generators do not share the model, or a state has read a prompt.
    """
    first = generators[0]
    if any(generator.model is not first.model for generator in generators):
        raise ValueError("prefill_together needs generators of one and the same model")
    if any(generator.streaming for generator in generators):
        raise ValueError("prefill_together reads exactly; a streaming generator reads by itself")
    if any(np.asarray(state.positions).any() for state in states):
        raise ValueError("prefill_together needs fresh states; one of these has already read a prompt")
    longest = max(map(len, prompts), default=0)
    for generator in generators:
        if longest > generator.max_prompt:
            raise ValueError(f"a prompt of {longest} tokens exceeds max_prompt={generator.max_prompt}")
    tokens, row_lengths = first._pad(prompts, first.prefill_chunk)
    lengths = everywhere(row_lengths, first.mesh)
    caches: list[list[Any]] = [[] for _ in generators]
    shared: list[Any] = [None for _ in generators]
    tails = [
        max(query_tail(generator.policies[number], tokens.shape[1]) for generator in generators)
        for number in range(first.config.layers)
    ]
    for number, read_layer in enumerate(read_layers(first.model, tokens, lengths, first.prefill_chunk, tails)):
        for place, generator in enumerate(generators):
            cache, shared[place] = compress_layer(
                generator.policies[number], states[place].layers[number], read_layer, lengths, shared[place]
            )
            caches[place].append(cache)
    logits = _last_logits(first._graph, first._parameters, read_layer.x, lengths)
    # Each state gets buffers of its own: decoding donates them.
    read = [
        dataclasses.replace(
            state,
            layers=tuple(layers),
            logits=jnp.copy(logits),
            positions=jnp.copy(lengths),
            not_finite=state.not_finite + ~finite(logits),
        )
        for state, layers in zip(states, caches, strict=True)
    ]
    if first.mesh is not None:
        read = [_laid(state, first.mesh) for state in read]
    _check_finite(read[0])
    return read


class ReadLayer(NamedTuple):
    """What one layer computed of whole prompts, padded to N tokens."""

    x: Float[Array, "B N W"]  # the residual stream behind it; the next layer's reading donates it
    keys: Float[Array, "B N H_kv D"]
    values: Float[Array, "B N H_kv D"]
    queries: Float[Array, "B w H_q D"] | None  # of the last tokens, right-aligned, as many as were asked for


def read_layers(
    model: Llama, tokens: Int[np.ndarray, "B N"], lengths: Int[Array, "B"], chunk: int, tails: Sequence[int]
) -> Iterator[ReadLayer]:
    """Reads prompts exactly, layer by layer: N must be a multiple of `chunk`, and `tails[l]` says how many of the last
    queries of layer l are wanted."""
    graph, parameters = nnx.split(model)
    mesh = mesh_of(model)
    x = embed(graph, parameters, everywhere(tokens, mesh))
    for layer, tail in zip(model.layers, tails, strict=True):
        layer_graph, layer_parameters = nnx.split(layer)
        made = ReadLayer(*prefill_layer(layer_graph, model.config, mesh, chunk, tail, layer_parameters, x, lengths))
        yield made
        x = made.x


def compress_layer(
    policy: kvjax.CachePolicy, cache: Any, read: ReadLayer, lengths: Int[Array, "B"], shared: Any = None
) -> tuple[Any, Any]:
    """Takes a layer's prompts into a fresh cache (which is donated), with as many of the last queries as the policy
    asks for."""
    own = query_tail(policy, read.keys.shape[1])
    queries = None if read.queries is None or not own else read.queries[:, read.queries.shape[1] - own :]
    return compress(policy, cache, read.keys, read.values, lengths, queries, shared)


def query_tail(policy: kvjax.CachePolicy, tokens: int) -> int:
    """How many of the last queries of a prompt padded to so many tokens the policy asks for."""
    return tokens if policy.query_tail == ALL_QUERIES else min(policy.query_tail, tokens)


def layer_policies(
    config: LlamaConfig, policy: kvjax.CachePolicy | Sequence[kvjax.CachePolicy]
) -> tuple[kvjax.CachePolicy, ...]:
    """One policy per layer; layers with a sliding window get a cache of just that window, with the others' period."""
    given = (policy,) * config.layers if isinstance(policy, kvjax.CachePolicy) else tuple(policy)
    if len(given) != config.layers:
        raise ValueError(f"{len(given)} policies were given for {config.layers} layers")
    windows = [config.window(number) for number in range(config.layers)]
    period = min(policy.period for policy in given)
    return tuple(
        own if window is None else _sliding(window, min(window, period))
        for window, own in zip(windows, given, strict=True)
    )


@functools.cache
def _sliding(window: int, period: int) -> kvjax.CachePolicy:
    # One object per window: compiled functions are kept by the policy's identity.
    return kvjax.streaming_llm(window, sinks=0, period=period)


def cache_specs(
    model: Llama, *, batch: int, max_prompt: int, max_new: int, streaming: bool = False
) -> tuple[kvjax.CacheSpec, ...]:
    """What each layer's cache is made for. To a cache, a streamed prompt is so many more appended tokens."""
    config = model.config
    if streaming:
        max_prompt, max_new = 1, max_prompt + max_new
    return tuple(
        kvjax.CacheSpec(
            batch=batch,
            query_heads=config.query_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_prompt=max_prompt,
            max_new=max_new,
            dtype=model.embedding.param_dtype,
            rope_frequencies=tuple(np.asarray(rope_frequencies(config)).tolist()),
            layer=number,
            layers=config.layers,
        )
        for number in range(config.layers)
    )


def placed(state: Any, mesh: Mesh | None) -> Any:
    """Abstract values of a state, where it lies on a mesh."""
    lies = state_shardings(state, mesh)
    if lies is None:
        return state
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), state, lies)


def state_shardings(state: GenerationState, mesh: Mesh | None) -> GenerationState | None:
    """Where a state lies on a mesh: caches and logits in parts, what every process must know of a row everywhere. None
    without a mesh."""
    if mesh is None:
        return None
    told: Any = NamedSharding(mesh, PartitionSpec())
    names = ("positions", "done", "sampling_keys", "not_finite")
    return dataclasses.replace(kvjax.shardings(state, mesh), **dict.fromkeys(names, told))


def everywhere(x: np.ndarray | np.generic, mesh: Mesh | None) -> Array:
    """What every process holds alike, whole on every device."""
    return jnp.asarray(x) if mesh is None else put(x, NamedSharding(mesh, PartitionSpec()))


def _abstract(shape: tuple[int, ...], dtype: Any, mesh: Mesh | None, heads: bool = False) -> jax.ShapeDtypeStruct:
    """An array of rows, and maybe of heads [B, T, H, D]."""
    sharding = None if mesh is None else NamedSharding(mesh, HEADS if heads else ROWS)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _bound(state: GenerationState, mesh: Mesh | None) -> GenerationState:
    """The state bound to the device that it lies on. What lies in host memory always is, and binds all that a program
    makes together with it: if the rest came in unbound, the next call would compile the same program once more."""
    return state if mesh is not None else jax.device_put(state, jax.tree.map(lambda x: x.sharding, state))


def _stays(state: GenerationState, mesh: Mesh | None) -> GenerationState:
    """The state where it lay: donated buffers are of use only there."""
    return state if mesh is None else jax.lax.with_sharding_constraint(state, state_shardings(state, mesh))


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("state",))
def _laid(state: GenerationState, mesh: Mesh) -> GenerationState:
    return _stays(state, mesh)


def _told(x: Array, mesh: Mesh | None) -> Array:
    """What every process must know."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))


def _check_finite(state: GenerationState) -> None:
    # Asked after every block, so without a walk over all counters.
    if np.asarray(state.not_finite).any():
        kvjax.check(state)


def weight_bytes(model: Llama) -> int:
    """Bytes of all parameters."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.split(model)[1]))


@functools.partial(jax.jit, static_argnames=("policy", "spec"))
def _init(policy: kvjax.CachePolicy, spec: kvjax.CacheSpec, row_keys: Key[Array, "B"]) -> Any:
    # Compiled so that every field gets a buffer of its own; donation needs that.
    return policy.init(spec, row_keys)


@functools.partial(jax.jit, static_argnames=("graph",))
def embed(graph: Any, parameters: Any, tokens: Int[Array, "B N"]) -> Float[Array, "B N W"]:
    return nnx.merge(graph, parameters).embed(tokens)


@functools.partial(jax.jit, static_argnames=("graph", "config", "mesh", "chunk", "tail"), donate_argnames=("x",))
def prefill_layer(
    graph: Any,
    config: LlamaConfig,
    mesh: Mesh | None,
    chunk: int,
    tail: int,
    parameters: Any,
    x: Float[Array, "B N W"],
    lengths: Int[Array, "B"],
):
    """One layer over a whole prompt: the new residual stream, keys, values and the last `tail` queries of each row."""
    layer = nnx.merge(graph, parameters)
    batch, tokens, _ = x.shape

    def project(x, positions):
        return layer.project(x, *rope.rotation(positions, rope_frequencies(config)))

    def chunk_of(x, number):
        return jax.lax.dynamic_slice_in_dim(x, number * chunk, chunk, axis=1)

    def chunk_positions(number):
        return jnp.broadcast_to(number * chunk + jnp.arange(chunk), (batch, chunk))

    queries = None
    if tail:
        positions = lengths[:, None] - tail + jnp.arange(tail)
        rows = jnp.take_along_axis(x, jnp.maximum(positions, 0)[..., None], axis=1)
        queries, _, _ = project(rows, positions)

    numbers = jnp.arange(tokens // chunk)
    keys, values = jax.lax.map(lambda n: project(chunk_of(x, n), chunk_positions(n))[1:], numbers)
    join = lambda blocks: blocks.swapaxes(0, 1).reshape(batch, tokens, *blocks.shape[3:])  # noqa: E731
    keys, values = join(keys), join(values)
    # Stored once as products read them, [B, H_kv, N, D].
    head_keys, head_values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
    attend: Callable[..., Array] = functools.partial(chunk_attention, window=layer.window)
    if mesh is not None:
        attend = attend_apart(attend, mesh)

    def step(x, number):
        own = chunk_of(x, number)
        query, _, _ = project(own, chunk_positions(number))
        attended = attend(query, head_keys, head_values, number)
        return jax.lax.dynamic_update_slice_in_dim(x, layer.finish(own, attended), number * chunk, axis=1), None

    x, _ = jax.lax.scan(step, x, numbers)
    return x, keys, values, queries


@functools.partial(jax.jit, static_argnames=("policy",), donate_argnames=("cache",))
def compress(policy: kvjax.CachePolicy, cache: Any, keys, values, lengths, queries, shared):
    return policy.prefill(cache, keys, values, lengths, queries, shared)


@functools.partial(jax.jit, static_argnames=("policy",), donate_argnames=("cache",))
def _compact(policy: kvjax.CachePolicy, cache: Any) -> Any:
    return policy.compact(cache)


@functools.partial(jax.jit, static_argnames=("graph",))
def _last_logits(graph: Any, parameters: Any, x: Float[Array, "B N W"], lengths: Int[Array, "B"]):
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return nnx.merge(graph, parameters).logits(last)


@functools.partial(jax.jit, static_argnames=("graph", "policies", "mesh"), donate_argnames=("state",))
def _append_block(
    graph: Any,
    policies: tuple[kvjax.CachePolicy, ...],
    mesh: Mesh | None,
    parameters: Any,
    state: GenerationState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
) -> GenerationState:
    """Reads a block of a later prompt: as decoding would token by token, but all of its tokens at once."""
    model = nnx.merge(graph, parameters)
    x, state = _through_caches(model, policies, state, tokens, lengths)
    return _stays(_with_last_logits(model, state, x, lengths), mesh)


@functools.partial(jax.jit, static_argnames=("graph", "policies", "mesh"), donate_argnames=("state",))
def _score_block(
    graph: Any,
    policies: tuple[kvjax.CachePolicy, ...],
    mesh: Mesh | None,
    parameters: Any,
    state: GenerationState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
) -> tuple[GenerationState, Float[Array, "B T"]]:
    """As `_append_block`, and the log-probability of each token, the first one's from the state's logits."""
    model = nnx.merge(graph, parameters)
    before = state.logits[:, None]
    x, state = _through_caches(model, policies, state, tokens, lengths)
    logits = jnp.concatenate([before, model.logits(x[:, :-1])], axis=1)
    likelihood = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), tokens[..., None], axis=-1)[..., 0]
    return _stays(_with_last_logits(model, state, x, lengths), mesh), _told(likelihood, mesh)


def _through_caches(
    model: Llama,
    policies: tuple[kvjax.CachePolicy, ...],
    state: GenerationState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
) -> tuple[Float[Array, "B T W"], GenerationState]:
    """The residual stream behind tokens that every layer's cache takes in, and the state with these caches."""
    positions = state.positions[:, None] + jnp.arange(tokens.shape[1])
    cos, sin = model.rotation(positions)
    x = model.embed(tokens)
    layers = []
    for layer, policy, cache in zip(model.layers, policies, state.layers, strict=True):
        query, keys, values = layer.project(x, cos, sin)
        cache = policy.extend(cache, keys, values, lengths)
        partials, cache = policy.attend(cache, query, causal=True)
        layers.append(cache)
        x = layer.finish(x, kvjax.output(partials))
    return x, dataclasses.replace(state, layers=tuple(layers))


def _with_last_logits(
    model: Llama, state: GenerationState, x: Float[Array, "B T W"], lengths: Int[Array, "B"]
) -> GenerationState:
    """The state behind a block of which each row read its first `lengths` tokens."""
    last = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
    reads = lengths > 0
    logits = model.logits(last)
    return dataclasses.replace(
        state,
        logits=jnp.where(reads[:, None], logits, state.logits),
        not_finite=state.not_finite + (reads & ~finite(logits)),
        positions=state.positions + lengths,
        done=state.done & ~reads,
    )


@functools.partial(
    jax.jit, static_argnames=("graph", "policies", "mesh", "sampling", "eos", "block"), donate_argnames=("state",)
)
def _decode_block(
    graph: Any,
    policies: tuple[kvjax.CachePolicy, ...],
    mesh: Mesh | None,
    sampling: Sampling,
    eos: tuple[int, ...],
    block: int,
    parameters: Any,
    state: GenerationState,
    steps: Int[Array, ""],
) -> tuple[GenerationState, Int[Array, "B block"], Int[Array, ""]]:
    """Up to `steps` decoding steps in one loop: sample from the logits, read the token, get the next logits.

    Returns:
        The state, the tokens (`NO_TOKEN` where a row had ended) and how many steps were taken.
    """
    model = nnx.merge(graph, parameters)

    def step(carry):
        number, state, tokens = carry
        split = jax.vmap(jax.random.split)(state.sampling_keys)
        token = sample(state.logits, split[:, 0], sampling)
        tokens = jax.lax.dynamic_update_slice(
            tokens, jnp.where(state.done, NO_TOKEN, token)[:, None], (jnp.zeros_like(number), number)
        )
        running = ~state.done
        lengths = running.astype(jnp.int32)
        x, state = _through_caches(model, policies, state, jnp.where(running, token, 0)[:, None], lengths)
        logits = model.logits(x[:, 0])
        ended = jnp.isin(token, jnp.asarray(eos, jnp.int32)) if eos else jnp.zeros_like(state.done)
        state = dataclasses.replace(
            state,
            logits=jnp.where(running[:, None], logits, state.logits),
            positions=state.positions + lengths,
            done=state.done | ended,
            sampling_keys=jax.random.wrap_key_data(
                jnp.where(
                    running[:, None],
                    jax.random.key_data(split[:, 1]),
                    jax.random.key_data(state.sampling_keys),
                )
            ),
            not_finite=state.not_finite + (running & ~finite(logits)),
        )
        return number + 1, _stays(state, mesh), tokens

    def running(carry):
        number, state, _ = carry
        return (number < steps) & ~jnp.all(state.done)

    start = (jnp.zeros((), jnp.int32), state, jnp.full((state.done.shape[0], block), NO_TOKEN, jnp.int32))
    taken, state, tokens = jax.lax.while_loop(running, step, start)
    return _stays(state, mesh), _told(tokens, mesh), _told(taken, mesh)
