"""Prefill of prompts and later turns into KV caches.

First prompts are processed with exact attention, for one generator or for several: the model runs once for all
generators whose policies need the same repetition of the prompts, or none. The keys and values of one layer exist at a
time, and every generator compresses them before the next layer is computed.
"""

import copy
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

import kvjax
from kvjax.messages import format_bytes, shorten
from kvjax.policy import Policy, Repetition, merge_requirements
from kvjax.quantization import KVDtype
from kvjax.spec import check_integer
from kvjax_models import compile_cache
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama
from kvjax_models.model.recurrent import RecurrentState
from kvjax_models.runner import decode as decode_lib
from kvjax_models.runner import prefill as prefill_lib
from kvjax_models.runner import state as state_lib
from kvjax_models.runner.decode import Group, Prefixes, SplitModel, append_block, score_block, split_model
from kvjax_models.runner.plan import Plan, rope_tokens
from kvjax_models.runner.prefill import PrefilledLayer, compress_layer, last_logits, prefill_layers
from kvjax_models.runner.rows import pad_prompts, trim_rows
from kvjax_models.runner.sampling import GREEDY, Sampling, row_sampling
from kvjax_models.runner.sequence_parallel import chunk_size
from kvjax_models.runner.state import (
    GenerationState,
    check_faults,
    commit_to_device,
    compact_layers,
    finish_prefill,
    shard_state,
)
from kvjax_models.sharding import mesh_of, replicate


@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)
class Generator:
    """A model with the plan of its caches and a batch size, which creates and continues generation states.

    A `GenerationState` is a pytree that can be forked, saved and continued with further prompts. States that a
    generator returns are settled: no tokens are staged between blocks.

    Attributes:
        model: the decoder, whose parameters may not be replaced after the first step. If they are sharded on a mesh
            (`sharding.shard_model`), so are the caches.
        plan: policies and sizes of the caches. A generator has its values as attributes, too; its `specs` have the
            batch size.
        batch: number of batch rows.
        eos: tokens that finish a sequence.
        prefill_chunk: tokens per chunk of exact prefill; prompts are padded to a multiple of it.
        allow_beyond_context: whether sequences may exceed the model's context length, with a warning; otherwise they
            are refused.
        scorer: coefficients of predicted scores (`profile.Profile.scorer`), for policies that require them
            (`kvjax.KVzap`); ignored for others. Its shape suffices for a generator that is only lowered.
    """

    model: Llama
    plan: Plan
    batch: int
    eos: tuple[int, ...]
    prefill_chunk: int
    allow_beyond_context: bool
    scorer: Float[Array | np.ndarray, "L W+2 H_kv"] | None
    policies: tuple[Policy, ...] = dataclasses.field(init=False)
    specs: tuple[kvjax.CacheSpec, ...] = dataclasses.field(init=False)
    max_prompt_tokens: int = dataclasses.field(init=False)
    max_new_tokens: int = dataclasses.field(init=False)
    context_tokens: int = dataclasses.field(init=False)
    kv_dtype: KVDtype | tuple[KVDtype, KVDtype] | None = dataclasses.field(init=False)
    streaming: bool = dataclasses.field(init=False)
    is_suffix: bool = dataclasses.field(init=False)
    is_short: bool = dataclasses.field(init=False)
    block_size: int = dataclasses.field(init=False)

    def __init__(
        self,
        model: Llama,
        plan: Plan | Policy | Sequence[Policy],
        *,
        batch: int,
        eos: Sequence[int] = (),
        prefill_chunk: int = 256,
        allow_beyond_context: bool = False,
        scorer: Float[Array | np.ndarray, "L W+2 H_kv"] | None = None,
        **lengths: Any,
    ) -> None:
        """Creates a generator.

        Args:
            plan: a plan, or the policies of one, which is made for `lengths`.
            eos: tokens that finish a sequence.
            prefill_chunk: tokens per chunk of exact prefill.
            allow_beyond_context: whether sequences may exceed the model's context length.
            **lengths: arguments of `Plan`.

        Raises:
            ValueError: if an argument is invalid, or a policy requires predicted scores and there is no scorer.
            TypeError: if there are a plan and lengths.
        """
        if not isinstance(allow_beyond_context, bool):
            raise ValueError(f"allow_beyond_context={shorten(allow_beyond_context)} must be True or False")
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk={prefill_chunk} must be at least 1 token")
        if not isinstance(plan, Plan):
            plan = Plan(model, plan, **lengths)
        elif lengths:
            raise TypeError(f"{', '.join(lengths)} belong to the plan; make another plan with them")
        values = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
        values |= {"model": model, "plan": plan, "eos": tuple(eos), "prefill_chunk": prefill_chunk}
        for name, value in values.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "allow_beyond_context", allow_beyond_context)
        object.__setattr__(self, "scorer", self._check_scorer(scorer))
        self._set_batch(batch)

    def _set_batch(self, batch: int) -> None:
        object.__setattr__(self, "batch", check_integer("batch", batch, 1))
        specs = tuple(dataclasses.replace(spec, batch=self.batch) for spec in self.plan.specs)
        object.__setattr__(self, "specs", specs)

    @property
    def config(self) -> LlamaConfig:
        """Sizes of the model."""
        return self.model.config

    @functools.cached_property
    def mesh(self) -> Mesh | None:
        """The mesh of the model; None for a single device."""
        return mesh_of(self.model)

    @functools.cached_property
    def split_model(self) -> SplitModel:
        """The model as decode steps take it."""
        return split_model(self.model, self.scorer, self.context_tokens, self.mesh)

    def _check_scorer(self, scorer: Any) -> Float[Array, "L W+2 H_kv"] | None:
        """Returns the scorer on the model's devices; None if no policy requires predicted scores."""
        if (policy := self.plan.scoring_policy) is None:
            return None
        if scorer is None:
            raise ValueError(
                f"{policy} requires predicted scores, and the model has no scorer; run `kvjax calibrate`, and pass "
                "the scorer of the profile to Generator"
            )
        shape = (len(self.config.attention_layers), self.config.width + 2, self.config.kv_heads)
        if scorer.shape != shape:
            raise ValueError(f"scorer has shape {scorer.shape}, expected [L, W+2, H_kv] = {shape}")
        is_abstract = isinstance(scorer, jax.ShapeDtypeStruct)  # of a generator that is only lowered
        return scorer if is_abstract else replicate(np.asarray(scorer, np.float32), self.mesh)

    def with_batch(self, batch: int) -> "Generator":
        """Returns a copy with another batch size; rows of its states can be inserted into states of this generator."""
        if batch == self.batch:
            return self
        other = copy.copy(self)
        other._set_batch(batch)
        return other

    def can_move_to(self, other: "Generator") -> bool:
        """Returns whether rows of these sizes can have another size: both hold all tokens, in equal caches."""
        if not (self.plan.is_resizable and other.plan.is_resizable):
            return False
        return self._kept_properties() == other._kept_properties()

    def _kept_properties(self) -> tuple[Any, ...]:
        """Returns the properties that decide the entries of a cache, except for their number."""
        layers = self.config.attention_layers
        rotaries = [self.config.rotary(layer, self.context_tokens) for layer in layers]  # keys are rotated in the cache
        return self.policies, self.kv_dtype, rotaries

    @property
    def row_bytes(self) -> int:
        """Device bytes of the caches and recurrent states of one batch row, over all layers."""
        return self.plan.row_bytes + self.recurrent_row_bytes

    @functools.cached_property
    def recurrent_row_bytes(self) -> int:
        """Bytes of the recurrent states of one batch row; 0 for models that are not hybrid."""
        dtype = self.model.embedding.param_dtype
        return kvjax.cache_bytes(jax.eval_shape(lambda: state_lib.init_recurrent(self.config, 1, dtype))).device

    def cache_sizes(self, state: GenerationState) -> dict[str, int]:
        """Returns the bytes of the caches of all rows, from shapes and dtypes; recurrent states count in all of them.

        Args:
            state: a state of this generator, with any number of rows.

        Returns:
            `cache_bytes` on the device, `host_bytes` in host memory, `read_bytes` of one decode step, and
            `full_cache_bytes` of full bfloat16 caches of the same capacity.
        """
        batch = state.positions.shape[0]
        held, recurrent = kvjax.cache_bytes(state.layers), batch * self.recurrent_row_bytes
        full = batch * sum(spec.full_cache_bytes(spec.capacity) for spec in self.specs)
        return {
            "cache_bytes": held.device + recurrent,
            "host_bytes": held.host,
            "read_bytes": batch * self.plan.row_read_bytes + recurrent,
            "full_cache_bytes": full + recurrent,
        }

    def describe_share(self, sizes: Mapping[str, int], tokens: int | None = None) -> str:
        """Describes how much of a full cache is held.

        Args:
            sizes: bytes, as `cache_sizes` returns them.
            tokens: length of the text; by default the capacity.

        Returns:
            The share of a full bfloat16 cache, or the bytes of that cache if it is the smaller one. For a short text,
            which has more slots than its budget's share, the share of the tokens that have a slot.
        """
        if self.is_short:
            held = self.plan.held_share(self.specs[0].capacity if tokens is None else tokens)
            return f"holds {int(100 * held)}%: the text is short"
        share = sizes["cache_bytes"] / sizes["full_cache_bytes"]
        if share > 1:
            return f"a full bfloat16 cache takes {format_bytes(sizes['full_cache_bytes'])}"
        return f"{share:.1%} of a full bfloat16 cache"

    def init_state(
        self,
        seed: int | Sequence[int] = 0,
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        layers: Sequence[tuple[kvjax.Cache, kvjax.Counters]] | None = None,
    ) -> GenerationState:
        """Returns a state with empty caches.

        Args:
            seed: seed of sampling and of the policies; the random numbers of a row depend on the seed and its index.
                Or a seed for every row, which then has the random numbers of row 0.
            sampling: parameters of sampling of all rows, or of each; greedy by default.
            layers: caches of all layers with their counters, in place of empty ones.

        Returns:
            The state.

        Raises:
            ValueError: if a seed is invalid, or there is not one value per row.
        """
        samplings = [sampling] * self.batch if isinstance(sampling, Sampling) else list(sampling)
        if len(samplings) != self.batch:
            raise ValueError(f"sampling must have one value per row, got {len(samplings)} for {self.batch} rows")
        seeds = state_lib.row_seeds(self.batch, seed)
        if layers is None:
            layers = list(state_lib.init_layers(self.policies, self.specs, self.mesh, seeds))
        state = GenerationState(
            layers=tuple(cache for cache, _ in layers),
            counters=layers[-1][1],
            sampling=row_sampling(samplings, self.config.vocab_size, self.mesh),
            recurrent=state_lib.init_recurrent(self.config, self.batch, self.model.embedding.param_dtype, self.mesh),
            # Equal states of more lengths share programs.
            context_tokens=rope_tokens(self.config, self.context_tokens),
            **state_lib.init_rows(self.config.vocab_size, self.mesh, seeds),
        )
        return shard_state(state, self.mesh)

    def reseed(self, state: GenerationState, seed: int | Sequence[int]) -> GenerationState:
        """Returns a state whose sampling continues as if it had been created with another seed.

        Args:
            state: a state, which may come from a generator with another batch size.
            seed: as for `init_state`. The randomness of the caches does not change.
        """
        keys = state_lib.row_keys(state_lib.row_seeds(self.batch, seed))[1]
        key_data = replicate(np.asarray(jax.random.key_data(keys)), self.mesh)
        return dataclasses.replace(state, sampling_keys=jax.random.wrap_key_data(key_data))

    def prefill(
        self, state: GenerationState, prompts: Sequence[Sequence[int]], prefixes: Prefixes = None
    ) -> GenerationState:
        """Processes one prompt per row.

        The first prompts are processed with exact attention, and each layer's cache is compressed before the next layer
        is computed, unless the generator is streaming. Later prompts are appended in blocks, which attend to the
        compressed cache. Prompts that are empty, too long or contain unknown tokens raise a ValueError.

        Args:
            state: state before the prompts; its buffers are donated.
            prompts: token ids of each row.
            prefixes: the frozen prefixes that the rows share, for a plan of suffixes.

        Returns:
            The state after the prompts.
        """
        *_, new_state = self.prefill_steps(state, prompts, prefixes)
        assert new_state is not None
        return new_state

    def prefill_steps(
        self,
        state: GenerationState,
        prompts: Sequence[Sequence[int]],
        prefixes: Prefixes = None,
        *,
        shared_lengths: bool = False,
    ) -> Iterator[GenerationState | None]:
        """Processes prompts like `prefill` in steps, between which the caller can do other work.

        Args:
            state: state before the prompts; its buffers are donated.
            prompts: token ids of each row.
            shared_lengths: whether exact prefill pads prompts to lengths of `compile_cache.length_bucket`, so that all
                lengths need few compiled programs.

        Yields:
            None after every step, which is a layer of exact prefill or an appended block; finally the state.
        """
        compile_cache.free_compiled_programs(_PROGRAMS)
        if self._is_first_prompt(state):
            for states in prefill_together([self], [state], prompts, shared_lengths=shared_lengths):
                yield None if states is None else states[0]
            return
        state, _, blocks = self._to_blocks(state, prompts)
        for block in blocks:
            state = compact_layers(append_block(Group(self.split_model, state, prefixes), *block))
            yield None
        check_faults(state, self.mesh)
        yield state

    def score(
        self, state: GenerationState, prompts: Sequence[Sequence[int]], prefixes: Prefixes = None
    ) -> tuple[GenerationState, list[Float[np.ndarray, "T"]], list[Bool[np.ndarray, "T"]]]:
        """Appends one text per row like a later prompt and scores its tokens.

        Args:
            state: state before the prompts; its buffers are donated. If it is empty, the first token has no context
                and is scored under uniform logits.
            prompts: token ids of each row.

        Returns:
            The state after the prompts, the natural log-probability of each token, float32, and whether it was the most
            likely one.

        Raises:
            ValueError: if the state is empty and the generator is not streaming.
        """
        if self._is_first_prompt(state):
            raise ValueError(
                "scoring appends to a cache; prefill a prompt first, or create the generator with streaming"
            )
        state, lengths, blocks = self._to_blocks(state, prompts)
        scores = []
        for block in blocks:
            state, *of_block = score_block(Group(self.split_model, state, prefixes), *block)
            scores.append(of_block)
            state = compact_layers(state)
        check_faults(state, self.mesh)
        log_probs, is_greedy = (np.concatenate([*map(np.asarray, one)], axis=1) for one in zip(*scores, strict=True))
        return state, trim_rows(log_probs, lengths), trim_rows(is_greedy, lengths)

    def _is_first_prompt(self, state: GenerationState) -> bool:
        """Returns whether the next prompts are processed with exact attention."""
        return not (self.streaming or self.is_suffix or np.asarray(state.positions).any())

    def padding_multiple(self, longest: int) -> int:
        """Returns what exact prefill pads prompts to a multiple of, given the length of the longest one."""
        return chunk_size(self.model, self.mesh, self.batch, longest, self.prefill_chunk)

    def check_capacity(self, positions: Int[np.ndarray, "B"], new_tokens: Int[np.ndarray, "B"]) -> None:
        """Checks that the caches have capacity for more tokens.

        Args:
            positions: number of tokens of each row.
            new_tokens: number of tokens to append to each row.

        Raises:
            ValueError: if they have not.
        """
        needed = int((positions + new_tokens).max())
        if needed > self.max_prompt_tokens + self.max_new_tokens:
            raise ValueError(
                f"a sequence of {needed} tokens exceeds max_prompt_tokens + max_new_tokens = "
                f"{self.max_prompt_tokens} + {self.max_new_tokens}"
            )
        self.check_context(needed)

    def check_context(self, tokens: int) -> None:
        """Checks a sequence against the model's context length, beyond which its output is meaningless.

        Raises:
            ValueError: if the sequence is longer and that is not allowed.
        """
        if tokens <= self.config.max_length:
            return
        problem = f"a sequence of {tokens} tokens exceeds the model's context length of {self.config.max_length}"
        if not self.allow_beyond_context:
            raise ValueError(
                f"{problem} (max_position_embeddings); shorten the prompt, generate fewer tokens, or set "
                "allow_beyond_context"
            )
        logging.log_first_n(logging.WARNING, "%s: the output may be meaningless", 1, problem)

    def _to_blocks(
        self, state: GenerationState, texts: Sequence[Sequence[int]]
    ) -> tuple[GenerationState, Int[np.ndarray, "B"], Iterator[tuple[Array, Array]]]:
        """Splits texts into blocks; the last one has half the width if that suffices.

        Returns:
            The state, committed to its device; the lengths of the texts; and each block with the number of its tokens
            per row.
        """
        tokens, lengths = pad_prompts(texts, self.batch, self.block_size, self.config.vocab_size)
        self.check_capacity(np.asarray(state.positions), lengths)

        def blocks() -> Iterator[tuple[Array, Array]]:
            for start in range(0, tokens.shape[1], self.block_size):
                count = np.clip(lengths - start, 0, self.block_size)
                # Two widths, because each is a program.
                width = self.block_size // 2 if np.max(count) <= self.block_size // 2 else self.block_size
                yield replicate(tokens[:, start : start + width], self.mesh), replicate(count, self.mesh)

        return commit_to_device(state, self.mesh), lengths, blocks()


def prefill_together(
    generators: Sequence[Generator],
    states: Sequence[GenerationState],
    prompts: Sequence[Sequence[int]],
    *,
    shared_lengths: bool = True,
) -> Iterator[list[GenerationState] | None]:
    """Processes the same prompts into the empty caches of several generators.

    Args:
        generators: generators of one model and batch size, whose prompts are not streamed.
        states: an empty state of each generator; their buffers are donated.
        prompts: token ids of each row.
        shared_lengths: whether prompts are padded to lengths of `compile_cache.length_bucket`, so that all lengths need
            few compiled programs.

    Yields:
        None after every layer; finally the states.

    Raises:
        ValueError: if the generators do not fit together, a state is not empty, or a prompt is too long.
    """
    first = generators[0]
    if any(generator.model is not first.model for generator in generators):
        raise ValueError("prefill_together needs generators of one model")
    if any(generator.streaming for generator in generators):
        raise ValueError("prefill_together needs exact prefill, got a streaming generator")
    if any(np.asarray(state.positions).any() for state in states):
        raise ValueError("prefill_together needs empty states")
    repetitions = [merge_requirements(generator.policies).repetition for generator in generators]
    passes: list[Repetition | None] = [*dict.fromkeys(one for one in repetitions if one is not None)]
    passes = passes or [None]
    results = list(states)
    for repeat in passes:
        indices = [i for i, one in enumerate(repetitions) if one == repeat or (one is None and repeat == passes[0])]
        yield from _prefill_in_one_pass(generators, results, indices, prompts, shared_lengths)
    yield results


def _prefill_in_one_pass(
    generators: Sequence[Generator],
    states: list[GenerationState],
    indices: Sequence[int],
    prompts: Sequence[Sequence[int]],
    shared_lengths: bool,
) -> Iterator[None]:
    """Processes prompts into the states at some indices, which need at most one repetition of the prompts."""
    members = [generators[index] for index in indices]
    layers, tokens, lengths = prefill_for(members, prompts, shared_lengths=shared_lengths)
    caches: dict[int, list[kvjax.Cache]] = {index: [] for index in indices}
    counters: dict[int, kvjax.Counters] = {}
    carries: dict[int, Any] = dict.fromkeys(indices)
    recurrent: list[RecurrentState] = []
    for number, layer in enumerate(layers):
        for index in indices:
            state = states[index]
            cache, counters[index], carries[index] = compress_layer(
                state.layers[number], state.counters, layer, lengths, carries[index]
            )
            caches[index].append(cache)
        recurrent.extend(layer.recurrent)
        yield None
    logits, mesh = last_logits(members[0].model, layer.x, lengths), members[0].mesh
    for index in indices:
        results = caches[index], counters[index], logits, tokens, lengths, recurrent
        states[index] = finish_prefill(states[index], *results, mesh)


def prefill_for(
    generators: Sequence[Generator], prompts: Sequence[Sequence[int]], *, shared_lengths: bool
) -> tuple[Iterator[PrefilledLayer], Int[Array, "B N"], Int[Array, "B"]]:
    """Computes first prompts layer by layer with exact attention, and with the inputs that the policies require.

    Args:
        generators: generators of one model, whose policies need at most one repetition of the prompts.
        prompts: token ids of each row.

    Returns:
        An iterator over the results of the layers, the padded tokens of the prompts, and their lengths.

    Raises:
        ValueError: if a prompt is too long.
    """
    first, longest = generators[0], max(map(len, prompts), default=0)
    for generator in generators:
        if longest > generator.max_prompt_tokens:
            raise ValueError(f"a prompt of {longest} tokens exceeds max_prompt_tokens={generator.max_prompt_tokens}")
        generator.check_context(longest)
    bucket_size = len(compile_cache.length_bucket(longest)) if shared_lengths else 1
    multiple = first.padding_multiple(longest)
    tokens, row_lengths = pad_prompts(
        prompts, first.batch, -(-bucket_size // multiple) * multiple, first.config.vocab_size
    )
    lengths = replicate(row_lengths, first.mesh)
    num_queries = [
        max(generator.policies[number].requires.num_prompt_queries(tokens.shape[1]) for generator in generators)
        for number in range(len(first.specs))
    ]
    repeat = merge_requirements([policy for generator in generators for policy in generator.policies]).repetition
    layers = prefill_layers(
        first.model,
        tokens,
        lengths,
        first.prefill_chunk,
        num_queries,
        repeat,
        first.context_tokens,
        common_scorer(generators),
    )
    return layers, replicate(tokens, first.mesh), lengths


def common_scorer(generators: Sequence[Generator]) -> Float[Array | np.ndarray, "L W+2 H_kv"] | None:
    """Returns the scorer of the generators whose policies require predicted scores; None if there are none.

    Raises:
        ValueError: if generators have different scorers.
    """
    scorers = [generator.scorer for generator in generators if generator.scorer is not None]
    if any(one is not scorers[0] and not np.array_equal(one, scorers[0]) for one in scorers[1:]):
        raise ValueError("generators that read one prompt need the same scorer")
    return scorers[0] if scorers else None


_PROGRAMS = (*state_lib.PROGRAMS, *decode_lib.PROGRAMS, *prefill_lib.PROGRAMS)
