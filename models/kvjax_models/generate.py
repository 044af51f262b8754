"""Generation through compressed caches: a prompt is read exactly, layer by layer, or streamed through the caches block
by block; then come compiled blocks of decoding steps.

A `Generator` binds a model to a cache policy and to sizes; a `GenerationState` is everything that a generation is at a
moment, as a pytree: it can be forked, saved, and continued with another turn. Between blocks every layer's staged
tokens are compacted, so a returned state is always settled.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

import kvjax
from kvjax.budget import row_bytes
from kvjax.cache import counts_like, layer_policy, with_counters_of, without_counters
from kvjax.policy import Policy, repeat_of
from kvjax.sharding import shardings
from kvjax.state import drawn, fault, faults_of_rows, state
from kvjax_models import prefill, programs
from kvjax_models.cut_prompts import piece
from kvjax_models.llama import Llama
from kvjax_models.prefill import asked_queries, compress_layer, last_logits, read_layers
from kvjax_models.sampling import Sampling, finite, sample
from kvjax_models.sharding import by_row, everywhere, mesh_of

NO_TOKEN = -1  # in returned token blocks, where a row had already ended


@state
class GenerationState:
    """A generation between two blocks. Rows are independent: `kvjax.take_rows` and its kin apply."""

    layers: tuple[Any, ...]  # one `kvjax.Cache` per layer
    logits: Float[Array, "B V"]  # float32, of the next token
    positions: Int[Array, "B"]  # int32, tokens read or written so far
    done: Bool[Array, "B"]  # whether the row has ended its turn
    sampling_keys: Key[Array, "B"] = drawn()
    not_finite: Int[Array, "B"] = fault("steps had logits that are NaN or infinite")


class Generator:
    """A model, a cache policy and sizes, ready to read prompts and to write.

    Args:
        model: the decoder; its parameters are used as they are. Where they lie on a mesh (`sharding.place`),
            caches lie there too, and every device generates its part.
        policy: one policy for all layers, or one per layer. Layers with a sliding window keep exactly that window
            instead, whatever the policy.
        batch: rows.
        max_prompt: most tokens of a first prompt.
        max_new: most tokens after it: generated ones and later turns' together.
        sampling: greedy by default.
        eos: token ids that end a row's turn.
        prefill_chunk: tokens per chunk of exact prefill; prompts are padded to a multiple of it.
        streaming: whether the first prompt, too, is read as later ones are: a block of tokens at a time, each
            attending to the compressed cache and causally to itself. Memory is then what the policy keeps, however
            long the prompt.
        beyond_positions: whether texts may be longer than the model's `max_length`, past which it was never trained:
            then a warning says so, else they are refused.

    Raises:
        ValueError: for a number of policies that is not the number of layers, a policy that cannot stream where that is
            asked for, or what the policies themselves refuse.
    """

    def __init__(
        self,
        model: Llama,
        policy: Policy | Sequence[Policy],
        *,
        batch: int,
        max_prompt: int,
        max_new: int,
        sampling: Sampling | None = None,
        eos: Sequence[int] = (),
        prefill_chunk: int = 256,
        streaming: bool = False,
        beyond_positions: bool = False,
    ):
        programs.keep_few(_PROGRAMS)
        config = model.config
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk={prefill_chunk}; it must be at least 1 token")
        self.model, self.config = model, config
        self.batch, self.max_prompt, self.max_new = batch, max_prompt, max_new
        self.sampling, self.eos, self.prefill_chunk = sampling or Sampling(), tuple(eos), prefill_chunk
        self.streaming, self.beyond_positions = streaming, beyond_positions
        self.mesh = mesh_of(model)
        self.specs = cache_specs(model, batch=batch, max_prompt=max_prompt, max_new=max_new, streaming=streaming)
        policies = (policy,) * config.layers if isinstance(policy, Policy) else tuple(policy)
        if len(policies) != config.layers:
            raise ValueError(f"{len(policies)} policies were given for {config.layers} layers")
        self.policies = tuple(layer_policy(*layer) for layer in zip(policies, self.specs, strict=True))
        if streaming and (refusing := [policy for policy in self.policies if not policy.streams]):
            raise ValueError(f"streaming: {refusing[0]} compresses whole prompts only; read them exactly")
        # Tokens between two compactions of all layers.
        self.block = min(self.specs[0].max_new, *(policy.compact_every for policy in self.policies))

    def of_rows(self, batch: int) -> "Generator":
        """The same for another number of rows, whose states' rows can be put among this one's."""
        return Generator(
            self.model,
            self.policies,
            batch=batch,
            max_prompt=self.max_prompt,
            max_new=self.max_new,
            sampling=self.sampling,
            eos=self.eos,
            prefill_chunk=self.prefill_chunk,
            streaming=self.streaming,
            beyond_positions=self.beyond_positions,
        )

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes that the caches of one row hold on the device, over all layers."""
        return sum(row_bytes(policy, spec) for policy, spec in zip(self.policies, self.specs, strict=True))

    def start(self, seed: int = 0) -> GenerationState:
        """An empty state. Every row has its own randomness, from the seed and its number.

        Raises:
            ValueError: for a seed that is no whole number of 32 bits: JAX would take it for another.
        """
        given = _seed(seed)
        fresh = functools.partial(_fresh, self.policies, self.specs, self.config.vocab_size, self.mesh)
        if self.mesh is None:
            return fresh(given)
        # What it makes may lie on devices of other processes.
        return jax.jit(fresh, out_shardings=state_shardings(jax.eval_shape(fresh, given), self.mesh))(given)

    def reseeded(self, state: GenerationState, seed: int) -> GenerationState:
        """The state with the keys that sampling would draw from had it been started with this seed: for continuations
        of a state whose own seed was another's. What its caches draw stays as it is."""
        keys = everywhere(np.asarray(jax.random.key_data(_row_keys(self.batch, _seed(seed))[1])), self.mesh)
        return dataclasses.replace(state, sampling_keys=jax.random.wrap_key_data(keys))

    def read(self, state: GenerationState, prompts: Sequence[Sequence[int]]) -> GenerationState:
        """Reads one prompt per row; the given state must not be used again (its buffers are donated).

        Unless they are streamed, the first prompts are attended to exactly, and each layer is compressed as soon as it
        is done. Later ones (a further turn) are appended and attend to the compressed cache, a block at a time, just as
        generated tokens do.

        Raises:
            ValueError: for an empty prompt, a prompt longer than `max_prompt`, more tokens in all than the caches were
                made for or the model has positions for, or what is no token of the vocabulary.
        """
        *_, last = self.reading(state, prompts)
        assert last is not None
        return last

    def reading(
        self, state: GenerationState, prompts: Sequence[Sequence[int]], *, shared_lengths: bool = False
    ) -> Iterator[GenerationState | None]:
        """As `read`, a piece at a time, for who has other work between: a layer of exact reading, a block of what is
        read through the caches.

        Args:
            shared_lengths: pad prompts that are read exactly to lengths that others share (`programs.bucket`), so that
                prompts of all lengths need few programs.

        Yields:
            None after every piece; at last the state.
        """
        positions = np.asarray(state.positions)
        if not self.streaming and not positions.any():
            yield from self._read_exactly(state, prompts, shared_lengths)
            return
        tokens, lengths = self.pad(prompts, self.block)
        self.check_room(positions, lengths)
        state = _bound(state, self.mesh)
        for block, count in self._blocks(tokens, lengths):
            state = compacted(append_block(self.model, self.mesh, state, block, count))
            yield None
        check_finite(state)
        check_sound(state, self.mesh)
        yield state

    def _read_exactly(
        self, state: GenerationState, prompts: Sequence[Sequence[int]], shared_lengths: bool
    ) -> Iterator[GenerationState | None]:
        """Reads the first prompts with exact attention, and compresses each layer when it is done."""
        longest = max(map(len, prompts), default=0)
        if longest > self.max_prompt:
            raise ValueError(f"a prompt of {longest} tokens exceeds max_prompt={self.max_prompt}")
        self._check_positions(longest)
        shared = len(programs.bucket(longest)) if shared_lengths else 1
        multiple = self.prompt_piece(longest)
        tokens, row_lengths = self.pad(prompts, -(-shared // multiple) * multiple)
        lengths, caches, told = everywhere(row_lengths, self.mesh), [], None
        asked = [asked_queries(policy, tokens.shape[1]) for policy in self.policies]
        repeat, capacity = repeat_of(self.policies), self.specs[0].capacity
        for cache, layer in zip(
            state.layers,
            read_layers(self.model, tokens, lengths, self.prefill_chunk, asked, repeat, capacity),
            strict=True,
        ):
            cache, told = compress_layer(cache, layer, lengths, told)
            caches.append(cache)
            yield None
        state = with_prompt(state, caches, last_logits(self.model, layer.x, lengths), lengths)
        yield laid(state, self.mesh)

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
        state, scored, _ = self.score_and_compare(state, texts)
        return state, scored

    def score_and_compare(
        self, state: GenerationState, texts: Sequence[Sequence[int]]
    ) -> tuple[GenerationState, list[Float[np.ndarray, "T"]], list[Bool[np.ndarray, "T"]]]:
        """As `score`, and whether each token was the most likely one."""
        positions = np.asarray(state.positions)
        if not self.streaming and not positions.any():
            raise ValueError("score reads through the cache: read a prompt first, or make the generator streaming")
        tokens, lengths = self.pad(texts, self.block)
        self.check_room(positions, lengths)
        state = _bound(state, self.mesh)
        scored, likeliest = [], []
        for block, count in self._blocks(tokens, lengths):
            state, likelihood, best = score_block(self.model, self.mesh, state, block, count)
            scored.append(likelihood)
            likeliest.append(best)
            state = compacted(state)
        check_finite(state)
        check_sound(state, self.mesh)
        found, compared = (
            np.concatenate([np.asarray(block) for block in blocks], axis=1) for blocks in (scored, likeliest)
        )
        of_rows = lambda rows: [row[:length] for row, length in zip(rows, lengths, strict=True)]  # noqa: E731
        return state, of_rows(found), of_rows(compared)

    def write(
        self, state: GenerationState, max_tokens: int, every: int | None = None
    ) -> Iterator[tuple[GenerationState, np.ndarray]]:
        """Writes up to `max_tokens` tokens per row, block by block.

        Args:
            every: tokens after which those of an unfinished block are yielded, for who watches: the same tokens, but
                their states are settled only where a block ends.

        Yields:
            The state after each block and the block's tokens, int32 [B, n], `NO_TOKEN` where a row had ended. Only the
            newest state may be used further. An end-of-sequence token is yielded and read like any other, and the
            generation stops when all rows have written one.

        Raises:
            ValueError: when the caches were not made for so many tokens, or the model has no positions for them; where
                logits turn NaN or infinite, or a cache is not sound.
        """
        self.check_room(np.asarray(state.positions), np.where(np.asarray(state.done), 0, max_tokens))
        state = _bound(state, self.mesh)
        written = in_block = 0
        while written < max_tokens and not np.asarray(state.done).all():
            steps = min(every or self.block, self.block - in_block, max_tokens - written)
            number = everywhere(np.int32(steps), self.mesh)
            state, tokens, taken = decode_block(
                self.model, self.mesh, self.sampling, self.eos, self.block, state, number
            )
            written, in_block = written + steps, in_block + steps
            check_finite(state)
            if in_block == self.block or written == max_tokens or np.asarray(state.done).all():
                state, in_block = compacted(state), 0
                check_sound(state, self.mesh)
            yield state, np.asarray(tokens)[:, : int(taken)]

    def _blocks(self, tokens: Int[np.ndarray, "B N"], lengths: Int[np.ndarray, "B"]) -> Iterator[tuple[Array, Array]]:
        """Blocks of tokens, and how many of each row's are real."""
        for begin in range(0, tokens.shape[1], self.block):
            count = np.clip(lengths - begin, 0, self.block)
            yield everywhere(tokens[:, begin : begin + self.block], self.mesh), everywhere(count, self.mesh)

    def prompt_piece(self, longest: int) -> int:
        """What prompts that are read exactly, the longest of so many tokens, are padded to a multiple of."""
        return piece(self.model, self.mesh, self.batch, longest, self.prefill_chunk)

    def pad(self, prompts: Sequence[Sequence[int]], multiple: int) -> tuple[np.ndarray, np.ndarray]:
        """Prompts as one left-aligned array, padded to a multiple, and their lengths."""
        if len(prompts) != self.batch:
            raise ValueError(f"{len(prompts)} prompts were given for batch={self.batch}")
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        if not lengths.all():
            raise ValueError(f"prompt {int(np.argmin(lengths))} is empty; a prompt needs at least one token")
        tokens = np.zeros((self.batch, -(-int(np.max(lengths)) // multiple) * multiple), np.int64)
        for row, prompt in enumerate(prompts):
            given = np.asarray(prompt)
            if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer):
                raise ValueError(f"prompt {row} holds {given.dtype}{list(given.shape)}; it must be whole numbers [T]")
            tokens[row, : len(prompt)] = given
        if np.min(tokens) < 0 or np.max(tokens) >= self.config.vocab_size:
            raise ValueError(
                f"prompts hold token ids from {np.min(tokens)} to {np.max(tokens)}; the vocabulary has "
                f"{self.config.vocab_size}"
            )
        return tokens.astype(np.int32), lengths

    def check_room(self, positions: Int[np.ndarray, "B"], more: Int[np.ndarray, "B"]) -> None:
        """Raises a ValueError where rows of so many tokens have no room for so many more."""
        capacity = self.max_prompt + self.max_new
        needed = int((positions + more).max())
        if needed > capacity:
            raise ValueError(
                f"{needed} tokens in a row exceed max_prompt + max_new = {self.max_prompt} + {self.max_new} that the "
                "caches were made for"
            )
        self._check_positions(needed)

    def _check_positions(self, needed: int) -> None:
        """Text past what a model was trained for is garbage, and nothing else would say so."""
        if needed <= self.config.max_length:
            return
        problem = f"{needed} tokens in a row are more than the {self.config.max_length} positions that the model knows"
        if not self.beyond_positions:
            raise ValueError(
                f"{problem} (max_position_embeddings): shorten the prompt, write fewer tokens, or allow it with "
                "beyond_positions"
            )
        logging.log_first_n(logging.WARNING, "%s: what it writes there may make no sense", 1, problem)


def generate(
    model: Llama,
    policy: Policy | Sequence[Policy],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    eos: Sequence[int] = (),
    seed: int = 0,
    beyond_positions: bool = False,
) -> tuple[list[list[int]], GenerationState]:
    """Continues each prompt by up to `max_new_tokens` tokens; `Generator` is the same in steps.

    Caches are made for a length that prompts nearly as long share (`programs.bucket`), and with it their programs.

    Returns:
        Each row's new tokens, an end-of-sequence token included, and the state after them.
    """
    generator = Generator(
        model,
        policy,
        batch=len(prompts),
        max_prompt=programs.bucket(max(map(len, prompts), default=0))[-1],  # no prompt is refused when it is read
        max_new=max_new_tokens,
        sampling=sampling,
        eos=eos,
        beyond_positions=beyond_positions,
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
            window=config.window(number),
            logit_cap=config.attention_cap,
            rope_frequencies=config.rotary(number, max_prompt + max_new).frequencies,
            layer=number,
            layers=config.layers,
        )
        for number in range(config.layers)
    )


def with_prompt(
    state: GenerationState, caches: Sequence[kvjax.Cache], logits: Float[Array, "B V"], lengths: Int[Array, "B"]
) -> GenerationState:
    """A fresh state behind prompts that its caches have taken in, with buffers of its own: decoding donates them."""
    return dataclasses.replace(
        state,
        layers=tuple(caches),
        logits=jnp.copy(logits),
        positions=jnp.copy(lengths),
        not_finite=state.not_finite + ~finite(logits),
    )


def laid(state: GenerationState, mesh: Mesh | None) -> GenerationState:
    """The state where it is to lie on a mesh, looked over."""
    state = state if mesh is None else _laid(state, mesh)
    check_finite(state)
    return state


def state_shardings(state: GenerationState, mesh: Mesh | None) -> GenerationState | None:
    """Where a state lies on a mesh: caches and logits in parts, what every process must know of a row everywhere. None
    without a mesh."""
    if mesh is None:
        return None
    known: Any = NamedSharding(mesh, PartitionSpec())
    names = ("positions", "done", "sampling_keys", "not_finite")
    return dataclasses.replace(shardings(state, mesh), **dict.fromkeys(names, known))


def weight_bytes(model: Llama) -> int:
    """Bytes of all parameters."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(model))


def compacted(state: GenerationState) -> GenerationState:
    """The state with its layers' staged tokens compacted."""
    return dataclasses.replace(state, layers=tuple(compact_layer(cache) for cache in state.layers))


def check_finite(state: GenerationState) -> None:
    """Raises a ValueError where logits were NaN or infinite. Asked after every block, so without a walk over all
    counters."""
    if np.asarray(state.not_finite).any():
        kvjax.check(state)


def check_sound(state: GenerationState, mesh: Mesh | None) -> None:
    """Raises a ValueError where any counter of faults is not zero; asked where blocks end."""
    if np.asarray(_faults(state, mesh)).any():
        kvjax.check(state)


@functools.partial(jax.jit, static_argnames=("mesh",))
def _faults(state: GenerationState, mesh: Mesh | None) -> Int[Array, "B"]:
    faults = faults_of_rows(state)
    assert faults is not None  # `not_finite` is one
    return _known(faults, mesh)


def _bound(state: GenerationState, mesh: Mesh | None) -> GenerationState:
    """The state bound to the device that it lies on. What lies in host memory always is, and binds all that a program
    makes together with it: if the rest came in unbound, the next call would compile the same program once more."""
    return state if mesh is not None else jax.device_put(state, jax.tree.map(lambda x: x.sharding, state))


def stays(state: GenerationState, mesh: Mesh | None) -> GenerationState:
    """The state where it lay: donated buffers are of use only there."""
    return state if mesh is None else jax.lax.with_sharding_constraint(state, state_shardings(state, mesh))


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("state",))
def _laid(state: GenerationState, mesh: Mesh) -> GenerationState:
    return stays(state, mesh)


def _known(x: Array, mesh: Mesh | None) -> Array:
    """What every process must know."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))


# Compiled so that every field gets a buffer of its own; donation needs that.
@functools.partial(jax.jit, static_argnames=("policies", "specs", "vocabulary", "mesh"))
def _fresh(
    policies: tuple[Policy, ...],
    specs: tuple[kvjax.CacheSpec, ...],
    vocabulary: int,
    mesh: Mesh | None,
    seed: Int[Array, ""] | np.uint32,
) -> GenerationState:
    batch = specs[0].batch
    cache_keys, sampling_keys = _row_keys(batch, seed)
    layers = []
    for number, (policy, spec) in enumerate(zip(policies, specs, strict=True)):
        layer_keys = jax.vmap(lambda key, number=number: jax.random.fold_in(key, number))(cache_keys)
        layers.append(kvjax.init(policy, spec, layer_keys, mesh))
    return GenerationState(
        layers=tuple(layers),
        logits=jnp.zeros((batch, vocabulary), jnp.float32),
        positions=jnp.zeros(batch, jnp.int32),
        done=jnp.zeros(batch, bool),
        sampling_keys=sampling_keys,
        not_finite=jnp.zeros(batch, jnp.int32),
    )


def _row_keys(batch: int, seed: Int[Array, ""] | np.uint32) -> Key[Array, "2 B"]:
    """Every row's keys of its caches, and those that it samples with."""
    rows = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(jnp.arange(batch))
    return jax.vmap(jax.random.split, out_axes=1)(rows)


def _seed(seed: int) -> np.uint32:
    """A seed, checked: JAX would take larger ones for smaller."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed!r}; it must be a whole number from 0 to 2^32 - 1")
    return np.uint32(seed)


compact_layer = jax.jit(kvjax.compact, donate_argnames=("cache",))


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("state",))
def append_block(
    model: Llama,
    mesh: Mesh | None,
    state: GenerationState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
) -> GenerationState:
    """Reads a block of a later prompt: as decoding would token by token, but all of its tokens at once."""
    x, state = _through_caches(model, state, tokens, lengths)
    return stays(_with_last_logits(model, state, x, lengths), mesh)


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("state",))
def score_block(
    model: Llama,
    mesh: Mesh | None,
    state: GenerationState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
) -> tuple[GenerationState, Float[Array, "B T"], Bool[Array, "B T"]]:
    """As `append_block`, and the log-probability of each token, the first one's from the state's logits, and whether it
    was the most likely."""
    before = state.logits[:, None]
    x, state = _through_caches(model, state, tokens, lengths)
    logits = jnp.concatenate([before, model.logits(x[:, :-1])], axis=1)
    likelihood = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), tokens[..., None], axis=-1)[..., 0]
    best = jnp.argmax(logits, axis=-1) == tokens
    return stays(_with_last_logits(model, state, x, lengths), mesh), _known(likelihood, mesh), _known(best, mesh)


def _through_caches(
    model: Llama,
    state: GenerationState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
) -> tuple[Float[Array, "B T W"], GenerationState]:
    """The residual stream behind tokens that every layer's cache takes in, and the state with these caches."""
    positions = state.positions[:, None] + jnp.arange(tokens.shape[1])
    mesh = state.layers[0].mesh
    x = by_row(model.embed(tokens), mesh)
    layers = []
    for number, (layer, cache) in enumerate(zip(model.layers, state.layers, strict=True)):
        query, keys, values = layer.project(x, *model.rotation(positions, number, cache.spec.capacity))
        attended, cache = kvjax.step(
            cache, query, keys, values, lengths, sink_logits=layer.sink_logits, compact_when_full=False
        )
        layers.append(cache)
        x = by_row(layer.finish(x, attended), mesh)
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


@functools.partial(jax.jit, static_argnames=("mesh", "sampling", "eos", "block"), donate_argnames=("state",))
def decode_block(
    model: Llama,
    mesh: Mesh | None,
    sampling: Sampling,
    eos: tuple[int, ...],
    block: int,
    state: GenerationState,
    steps: Int[Array, ""],
    ends: Int[Array, "B"] | None = None,
) -> tuple[GenerationState, Int[Array, "B block"], Int[Array, ""]]:
    """Up to `steps` decoding steps in one loop: sample from the logits, read the token, get the next logits.

    Args:
        ends: tokens of each row, read and written, with which its turn ends at the latest.

    Returns:
        The state, the tokens (`NO_TOKEN` where a row had ended) and how many steps were taken.
    """

    def step(carry):
        number, state, tokens = carry
        state = dataclasses.replace(state, layers=_counted(state.layers))
        split = jax.vmap(jax.random.split)(state.sampling_keys)
        token = sample(state.logits, split[:, 0], sampling)
        tokens = jax.lax.dynamic_update_slice(
            tokens, jnp.where(state.done, NO_TOKEN, token)[:, None], (jnp.zeros_like(number), number)
        )
        running = ~state.done
        lengths = running.astype(jnp.int32)
        x, state = _through_caches(model, state, jnp.where(running, token, 0)[:, None], lengths)
        logits = model.logits(x[:, 0])
        ended = jnp.isin(token, jnp.asarray(eos, jnp.int32)) if eos else jnp.zeros_like(state.done)
        positions = state.positions + lengths
        if ends is not None:
            ended |= positions >= ends
        state = dataclasses.replace(
            state,
            logits=jnp.where(running[:, None], logits, state.logits),
            positions=positions,
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
        return number + 1, _counted_once(stays(state, mesh)), tokens

    def running(carry):
        number, state, _ = carry
        return (number < steps) & ~jnp.all(state.done)

    tokens = jnp.full((state.done.shape[0], block), NO_TOKEN, jnp.int32)
    start = (jnp.zeros((), jnp.int32), _counted_once(state), tokens)
    taken, state, tokens = jax.lax.while_loop(running, step, start)
    state = dataclasses.replace(state, layers=_counted(state.layers))
    return stays(state, mesh), _known(tokens, mesh), _known(taken, mesh)


def _counts_for(layers: tuple[Any, ...]) -> list[int]:
    """Of every layer the first that holds the same counters, which all would update alike at every step."""
    return [next(n for n, first in enumerate(layers) if counts_like(first, one)) for one in layers]


def _counted_once(state: GenerationState) -> GenerationState:
    """The state with the counters of layers that count alike in the first of them alone."""
    layers = zip(state.layers, _counts_for(state.layers), strict=True)
    kept = [one if number == first else without_counters(one) for number, (one, first) in enumerate(layers)]
    return dataclasses.replace(state, layers=tuple(kept))


def _counted(layers: tuple[Any, ...]) -> tuple[Any, ...]:
    """The layers, each with its counters again."""
    return tuple(with_counters_of(one, layers[first]) for one, first in zip(layers, _counts_for(layers), strict=True))


# All that sizes and policies compile.
_PROGRAMS = (
    _laid,
    _fresh,
    _faults,
    compact_layer,
    append_block,
    score_block,
    decode_block,
    prefill.embed,
    prefill.prefill_layer,
    prefill.repeat_layer,
    prefill.compress,
    prefill.last_logits,
)
