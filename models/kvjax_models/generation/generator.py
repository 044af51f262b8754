"""Generation through compressed caches: a prompt is read exactly, layer by layer, or streamed through the caches block
by block; then come compiled blocks of decoding steps.

A `Generator` binds a model to a cache policy and to sizes; a `GenerationState` is everything that a generation is at a
moment, as a pytree: it can be forked, saved, and continued with another turn. Between blocks every layer's staged
tokens are compact_layers, so a returned state is always settled.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from absl import logging
from jaxtyping import Array, Bool, Float, Int

import kvjax
from kvjax.budget import row_bytes
from kvjax.cache import layer_policy
from kvjax.policy import Policy, merge_requirements
from kvjax.quantization import KVDtype
from kvjax_models import compile_cache
from kvjax_models.generation import prefill
from kvjax_models.generation.decode import NO_TOKEN, append_block, decode_block, score_block
from kvjax_models.generation.prefill import compress_layer, last_logits, prefill_layers
from kvjax_models.generation.sampling import Sampling
from kvjax_models.generation.sequence_parallel import chunk_size
from kvjax_models.generation.state import (
    GenerationState,
    _commit_to_device,
    _faults,
    _fresh,
    _laid,
    _row_keys,
    _seed,
    check_faults,
    check_finite,
    compact_layer,
    compact_layers,
    finish_prefill,
    shard_state,
    state_shardings,
)
from kvjax_models.model.llama import Llama
from kvjax_models.sharding import mesh_of, replicate


class Generator:
    """A model, a cache policy and sizes, ready to read prompts and to write.

    Args:
        model: the decoder; its parameters are used as they are. Where they lie on a mesh (`sharding.place`),
            caches lie there too, and every device generates its part.
        policy: one policy for all layers, or one per layer. Layers with a sliding window keep exactly that window
            instead, whatever the policy.
        batch: rows.
        max_prompt_tokens: most tokens of a first prompt.
        max_new_tokens: most tokens after it: generated ones and later turns' together.
        sampling: greedy by default.
        eos: token ids that end a row's turn.
        prefill_chunk: tokens per chunk of exact prefill; prompts are padded to a multiple of it.
        streaming: whether the first prompt, too, is read as later ones are: a block of tokens at a time, each
            attending to the compressed cache and causally to itself. Memory is then what the policy keeps, however
            long the prompt.
        allow_beyond_context: whether texts may be longer than the model's `max_length`, past which it was never trained:
            then a warning says so, else they are refused.
        kv_dtype: quantization format of the caches (`kvjax.CacheSpec.kv_dtype`).

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
        max_prompt_tokens: int,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        eos: Sequence[int] = (),
        prefill_chunk: int = 256,
        streaming: bool = False,
        allow_beyond_context: bool = False,
        kv_dtype: KVDtype | tuple[KVDtype, KVDtype] | None = None,
    ):
        compile_cache.free_compiled_programs(_PROGRAMS)
        config = model.config
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk={prefill_chunk}; it must be at least 1 token")
        self.model, self.config = model, config
        self.batch, self.max_prompt_tokens, self.max_new_tokens = batch, max_prompt_tokens, max_new_tokens
        self.sampling, self.eos, self.prefill_chunk = sampling or Sampling(), tuple(eos), prefill_chunk
        self.streaming, self.allow_beyond_context = streaming, allow_beyond_context
        self.kv_dtype = kv_dtype
        self.mesh = mesh_of(model)
        self.specs = cache_specs(
            model,
            batch=batch,
            max_prompt_tokens=max_prompt_tokens,
            max_new_tokens=max_new_tokens,
            streaming=streaming,
            kv_dtype=kv_dtype,
        )
        policies = (policy,) * config.layers if isinstance(policy, Policy) else tuple(policy)
        if len(policies) != config.layers:
            raise ValueError(f"{len(policies)} policies were given for {config.layers} layers")
        self.policies = tuple(layer_policy(*layer) for layer in zip(policies, self.specs, strict=True))
        if streaming and (refusing := [policy for policy in self.policies if policy.requires.entire_prompt]):
            raise ValueError(f"streaming: {refusing[0]} compresses whole prompts only; read them exactly")
        # Tokens between two compactions of all layers.
        self.block_size = min(self.specs[0].max_new_tokens, *(policy.compact_every for policy in self.policies))
        self.specs = tuple(dataclasses.replace(spec, staging_slots=self.block_size) for spec in self.specs)

    def with_batch(self, batch: int) -> "Generator":
        """The same for another number of rows, whose states' rows can be put among this one's."""
        return Generator(
            self.model,
            self.policies,
            batch=batch,
            max_prompt_tokens=self.max_prompt_tokens,
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            eos=self.eos,
            prefill_chunk=self.prefill_chunk,
            streaming=self.streaming,
            allow_beyond_context=self.allow_beyond_context,
            kv_dtype=self.kv_dtype,
        )

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes that the caches of one row hold on the device, over all layers."""
        return sum(row_bytes(policy, spec) for policy, spec in zip(self.policies, self.specs, strict=True))

    def init_state(self, seed: int = 0) -> GenerationState:
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

    def reseed(self, state: GenerationState, seed: int) -> GenerationState:
        """The state with the keys that sampling would draw from had it been started with this seed: for continuations
        of a state whose own seed was another's. What its caches draw stays as it is."""
        keys = replicate(np.asarray(jax.random.key_data(_row_keys(self.batch, _seed(seed))[1])), self.mesh)
        return dataclasses.replace(state, sampling_keys=jax.random.wrap_key_data(keys))

    def prefill(self, state: GenerationState, prompts: Sequence[Sequence[int]]) -> GenerationState:
        """Reads one prompt per row; the given state must not be used again (its buffers are donated).

        Unless they are streamed, the first prompts are attended to exactly, and each layer is compressed as soon as it
        is done. Later ones (a further turn) are appended and attend to the compressed cache, a block at a time, just as
        generated tokens do.

        Raises:
            ValueError: for an empty prompt, a prompt longer than `max_prompt_tokens`, more tokens in all than the caches were
                made for or the model has positions for, or what is no token of the vocabulary.
        """
        *_, last = self.prefill_steps(state, prompts)
        assert last is not None
        return last

    def prefill_steps(
        self, state: GenerationState, prompts: Sequence[Sequence[int]], *, shared_lengths: bool = False
    ) -> Iterator[GenerationState | None]:
        """As `read`, a chunk_size at a time, for who has other work between: a layer of exact reading, a block of what is
        read through the caches.

        Args:
            shared_lengths: pad prompts to lengths that others share (`compile_cache.length_bucket`), so that
                prompts of all lengths need few programs.

        Yields:
            None after every chunk_size; at last the state.
        """
        positions = np.asarray(state.positions)
        if not self.streaming and not positions.any():
            yield from self._read_exactly(state, prompts, shared_lengths)
            return
        tokens, lengths = self.pad(prompts, self.block_size)
        self.check_capacity(positions, lengths)
        state = _commit_to_device(state, self.mesh)
        for block, count in self._blocks(tokens, lengths):
            state = compact_layers(append_block(self.model, self.mesh, state, block, count))
            yield None
        check_finite(state)
        check_faults(state, self.mesh)
        yield state

    def _read_exactly(
        self, state: GenerationState, prompts: Sequence[Sequence[int]], shared_lengths: bool
    ) -> Iterator[GenerationState | None]:
        """Reads the first prompts with exact attention, and compresses each layer when it is done."""
        longest = max(map(len, prompts), default=0)
        if longest > self.max_prompt_tokens:
            raise ValueError(f"a prompt of {longest} tokens exceeds max_prompt_tokens={self.max_prompt_tokens}")
        self._check_positions(longest)
        shared = len(compile_cache.length_bucket(longest)) if shared_lengths else 1
        multiple = self.padding_multiple(longest)
        tokens, row_lengths = self.pad(prompts, -(-shared // multiple) * multiple)
        lengths, caches, told = replicate(row_lengths, self.mesh), [], None
        asked = [policy.requires.num_prompt_queries(tokens.shape[1]) for policy in self.policies]
        repeat, capacity = merge_requirements(self.policies).repetition, self.specs[0].capacity
        for cache, layer in zip(
            state.layers,
            prefill_layers(self.model, tokens, lengths, self.prefill_chunk, asked, repeat, capacity),
            strict=True,
        ):
            cache, counters, told = compress_layer(cache, state.counters, layer, lengths, told)
            caches.append(cache)
            yield None
        state = finish_prefill(state, caches, counters, last_logits(self.model, layer.x, lengths), lengths)
        yield shard_state(state, self.mesh)

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
        state, scored, _ = self.score_greedy(state, texts)
        return state, scored

    def score_greedy(
        self, state: GenerationState, texts: Sequence[Sequence[int]]
    ) -> tuple[GenerationState, list[Float[np.ndarray, "T"]], list[Bool[np.ndarray, "T"]]]:
        """As `score`, and whether each token was the most likely one."""
        positions = np.asarray(state.positions)
        if not self.streaming and not positions.any():
            raise ValueError("score reads through the cache: read a prompt first, or make the generator streaming")
        tokens, lengths = self.pad(texts, self.block_size)
        self.check_capacity(positions, lengths)
        state = _commit_to_device(state, self.mesh)
        scored, likeliest = [], []
        for block, count in self._blocks(tokens, lengths):
            state, likelihood, best = score_block(self.model, self.mesh, state, block, count)
            scored.append(likelihood)
            likeliest.append(best)
            state = compact_layers(state)
        check_finite(state)
        check_faults(state, self.mesh)
        found, compared = (
            np.concatenate([np.asarray(block) for block in blocks], axis=1) for blocks in (scored, likeliest)
        )
        of_rows = lambda rows: [row[:length] for row, length in zip(rows, lengths, strict=True)]  # noqa: E731
        return state, of_rows(found), of_rows(compared)

    def decode(
        self, state: GenerationState, max_tokens: int, stream_interval: int | None = None
    ) -> Iterator[tuple[GenerationState, np.ndarray]]:
        """Writes up to `max_tokens` tokens per row, block by block.

        Args:
            stream_interval: tokens after which those of an unfinished block are yielded, for who watches: the same tokens, but
                their states are settled only where a block ends.

        Yields:
            The state after each block and the block's tokens, int32 [B, n], `NO_TOKEN` where a row had ended. Only the
            newest state may be used further. An end-of-sequence token is yielded and read like any other, and the
            generation stops when all rows have written one.

        Raises:
            ValueError: when the caches were not made for so many tokens, or the model has no positions for them; where
                logits turn NaN or infinite, or a cache is not sound.
        """
        self.check_capacity(np.asarray(state.positions), np.where(np.asarray(state.done), 0, max_tokens))
        state = _commit_to_device(state, self.mesh)
        written = in_block = 0
        while written < max_tokens and not np.asarray(state.done).all():
            steps = min(stream_interval or self.block_size, self.block_size - in_block, max_tokens - written)
            number = replicate(np.int32(steps), self.mesh)
            state, tokens, taken = decode_block(
                self.model, self.mesh, self.sampling, self.eos, self.block_size, state, number
            )
            written, in_block = written + steps, in_block + steps
            check_finite(state)
            if in_block == self.block_size or written == max_tokens or np.asarray(state.done).all():
                state, in_block = compact_layers(state), 0
                check_faults(state, self.mesh)
            yield state, np.asarray(tokens)[:, : int(taken)]

    def _blocks(self, tokens: Int[np.ndarray, "B N"], lengths: Int[np.ndarray, "B"]) -> Iterator[tuple[Array, Array]]:
        """Blocks of tokens, and how many of each row's are real."""
        for begin in range(0, tokens.shape[1], self.block_size):
            count = np.clip(lengths - begin, 0, self.block_size)
            yield replicate(tokens[:, begin : begin + self.block_size], self.mesh), replicate(count, self.mesh)

    def padding_multiple(self, longest: int) -> int:
        """What prompts that are read exactly, the longest of so many tokens, are padded to a multiple of."""
        return chunk_size(self.model, self.mesh, self.batch, longest, self.prefill_chunk)

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

    def check_capacity(self, positions: Int[np.ndarray, "B"], more: Int[np.ndarray, "B"]) -> None:
        """Raises a ValueError where rows of so many tokens have no room for so many more."""
        capacity = self.max_prompt_tokens + self.max_new_tokens
        needed = int((positions + more).max())
        if needed > capacity:
            raise ValueError(
                f"{needed} tokens in a row exceed max_prompt_tokens + max_new_tokens = {self.max_prompt_tokens} + {self.max_new_tokens} that the "
                "caches were made for"
            )
        self._check_positions(needed)

    def _check_positions(self, needed: int) -> None:
        """Text past what a model was trained for is garbage, and nothing else would say so."""
        if needed <= self.config.max_length:
            return
        problem = f"{needed} tokens in a row are more than the {self.config.max_length} positions that the model knows"
        if not self.allow_beyond_context:
            raise ValueError(
                f"{problem} (max_position_embeddings): shorten the prompt, write fewer tokens, or allow it with "
                "allow_beyond_context"
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
    allow_beyond_context: bool = False,
    kv_dtype: KVDtype | tuple[KVDtype, KVDtype] | None = None,
) -> tuple[list[list[int]], GenerationState]:
    """Continues each prompt by up to `max_new_tokens` tokens; `Generator` is the same in steps.

    Caches are made for a length that prompts nearly as long share (`compile_cache.length_bucket`), and with it their programs.

    Returns:
        Each row's new tokens, an end-of-sequence token included, and the state after them.
    """
    generator = Generator(
        model,
        policy,
        batch=len(prompts),
        max_prompt_tokens=compile_cache.length_bucket(max(map(len, prompts), default=0))[
            -1
        ],  # no prompt is refused when it is read
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        eos=eos,
        allow_beyond_context=allow_beyond_context,
        kv_dtype=kv_dtype,
    )
    state = generator.prefill(generator.init_state(seed), prompts)
    rows: list[list[int]] = [[] for _ in prompts]
    for newest, tokens in generator.decode(state, max_new_tokens):
        state = newest
        extend_rows(rows, tokens)
    return rows, state


def extend_rows(rows: list[list[int]], tokens: np.ndarray) -> None:
    """Appends a block of `Generator.write` to each row's tokens."""
    for row, new in zip(rows, tokens, strict=True):
        row.extend(int(token) for token in new if token != NO_TOKEN)


def cache_specs(
    model: Llama,
    *,
    batch: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    streaming: bool = False,
    kv_dtype: KVDtype | tuple[KVDtype, KVDtype] | None = None,
) -> tuple[kvjax.CacheSpec, ...]:
    """What each layer's cache is made for. To a cache, a streamed prompt is so many more appended tokens."""
    config = model.config
    if streaming:
        max_prompt_tokens, max_new_tokens = 1, max_prompt_tokens + max_new_tokens
    return tuple(
        kvjax.CacheSpec(
            batch=batch,
            query_heads=config.query_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_prompt_tokens=max_prompt_tokens,
            max_new_tokens=max_new_tokens,
            dtype=model.embedding.param_dtype,
            kv_dtype=kv_dtype,
            window=config.window(number),
            logit_cap=config.attention_logit_cap,
            rope_frequencies=config.rotary(number, max_prompt_tokens + max_new_tokens).frequencies,
            layer=number,
            layers=config.layers,
        )
        for number in range(config.layers)
    )


def parameter_bytes(model: Llama) -> int:
    """Bytes of all parameters."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(model))


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
    prefill.prefill_cache,
    prefill.last_logits,
)
